// Attention scores recomputed as the target of the indexer's distillation (training section 5).
//
//     z[t,h,j] = softmax_scale q[t,h] . k[key(t,j)]              over the valid slots j of token t
//     L[t,h]   = log(exp(lse[t,h]) + exp(sink_h))                natural; lse without the sink
//     A[t,j]   = sum_h exp(z[t,h,j] - L[t,h])
//     l1[t]    = sum_j A[t,j]                                    target = A / l1, 0 where l1 = 0
//     lse[t,h] = log(sum_j exp z[t,h,j] + exp(lse_beside[t,h]))  +inf where neither has a term
//
// SELECTED 1 (sparse) stores the target, 0 in invalid slots. SELECTED 0 (dense) stores A, 0 in
// masked columns, and l1. ranking.h says which slots are valid; invalid ones are never
// dereferenced. The caller chooses lse: of the ranked keys only (V3.2: l1 is the number of heads),
// or of the layer's softmax with window (V4). A head with an infinite lse, or an L beyond fp32 in
// base 2, adds nothing. If a row's largest exp(z - L) is beyond 2^+-64, it is computed again with
// that z - L added to every L: it cancels in A / l1. The dense form stores it as `shift`; its A
// and l1 are exp(-shift) times the formula's.
//
// Work division: a block takes a token with all heads (up to 128), M of one GEMM. Queries stay in
// shared memory. cp.async loads keys in tiles of 128 rows by panels of 64 columns, STAGES in
// flight. A warp has 64 heads by 32 keys in registers, exponentiates, and sums its heads.
//
// Floor: 2*H*J*D FLOP and 2*J*D bytes gathered a token. 4096 tokens, D 512: H 64, topk 512 174 us;
// H 128, topk 1024 696 us at 790 TFLOP/s. Limit: H 64 the gather; H 128 mma.sync, exponentials.
//
// Defines: HEAD_DIM a multiple of 16 up to 576; HEADS of a block 16, 64 or 128; SELECTED. Launch:
// num_tokens blocks; the module exports the rest. What was tried: kernels/docs/score_recompute.md.

#if !defined(HEAD_DIM) || !defined(HEADS) || !defined(SELECTED)
#error "define HEAD_DIM, HEADS and SELECTED"
#endif

#include "mma.h"
#include "score_recompute.h"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 576, "HEAD_DIM is a multiple of 16 up to 576");
static_assert(HEADS == 16 || HEADS == 64 || HEADS == 128, "a block holds 16, 64 or 128 heads");

// ---------------------------------------------------------------- shapes of the block's tiles

// Warps form a grid over the scores of a tile: HEAD_WARPS over the heads, KEY_WARPS over the keys.
constexpr int KEY_WARPS = 4;
constexpr int WARP_KEYS = 32;
constexpr int KEYS = KEY_WARPS * WARP_KEYS;
constexpr int N8 = WARP_KEYS / 8;
constexpr int COLUMNS = 2 * N8;  // keys of the warp's 32 whose scores one lane holds

// Q and three stages leave room for a second block.
constexpr bool TWO_BLOCKS = Q_BYTES + 3 * panel_bytes(KEYS) + SMALL_BYTES <= HALF_SHARED_BYTES;

// A single block an SM needs eight warps to keep it busy.
constexpr int HEAD_WARPS = HEADS >= 64 && (HEADS == 128 || !TWO_BLOCKS) ? 2 : 1;
constexpr int M_TILES = HEADS / 16 / HEAD_WARPS;
static_assert(M_TILES >= 1 && M_TILES <= 4, "a warp holds 16 to 64 heads");

constexpr int PARTIALS = (HEAD_WARPS - 1) * 2;  // of two tiles: sums of the second warp's heads
constexpr int BLOCK_SHARED_BYTES = TWO_BLOCKS ? HALF_SHARED_BYTES : MAX_SHARED_BYTES;
using Layout = BlockLayout<HEAD_WARPS * KEY_WARPS, KEYS, PARTIALS, BLOCK_SHARED_BYTES>;
constexpr int STAGES = Layout::STAGES;
// score_recompute_lse merges its warps in the memory of the keys: float [2][KEY_WARPS][HEADS].
static_assert(2 * KEY_WARPS * HEADS * 4 <= STAGES * Layout::STAGE_BYTES, "the merge fits the stages");

DEVICE int head_warp() { return warp_id() / KEY_WARPS; }
DEVICE int key_warp() { return warp_id() % KEY_WARPS; }
// The head of this lane's accumulators s[m][.][2 * half], s[m][.][2 * half + 1].
DEVICE int lane_head(int m, int half) { return (head_warp() * M_TILES + m) * 16 + lane_id() / 4 + 8 * half; }
// The slot within a tile of this lane's accumulators s[.][n][i], s[.][n][i + 2].
DEVICE int lane_slot(int n, int i) { return key_warp() * WARP_KEYS + 8 * n + 2 * (lane_id() % 4) + i; }

// ---------------------------------------------------------------- the scores of a tile

// s[m][n] += q k^T over one panel: this warp's 16 * M_TILES heads by its 32 keys.
DEVICE void multiply_panel(float (&s)[M_TILES][N8][4], SharedAddress q_panel, SharedAddress k_panel, int steps) {
    const int lane = lane_id();
    const int head = head_warp() * M_TILES * 16 + lane % 16;
    const int key = key_warp() * WARP_KEYS + lane % 8 + lane / 16 * 8;
    UNROLL
    for (int k = 0; k < PANEL_COLUMNS / 16; ++k) {
        if (HEAD_DIM % PANEL_COLUMNS != 0 && k >= steps) break;
        uint32_t a[M_TILES][4], b[N8 / 2][4];
        UNROLL
        for (int n = 0; n < N8 / 2; ++n) ldmatrix_x4(b[n], k_panel + panel_offset(key + 16 * n, 2 * k + lane / 8 % 2));
        UNROLL
        for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], q_panel + panel_offset(head + 16 * m, 2 * k + lane / 16));
        UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            UNROLL
            for (int n = 0; n < N8 / 2; ++n) {
                mma_bf16_16x8x16(s[m][2 * n], a[m], b[n][0], b[n][1]);
                mma_bf16_16x8x16(s[m][2 * n + 1], a[m], b[n][2], b[n][3]);
            }
        }
    }
}

template <typename Taker>
DEVICE void for_each_tile(const Ranking& list, const Queries& queries, const bf16* k, int64_t k_stride, int tiles,
                          bool with_queries, Taker& taker) {
    if (tiles == 0) return;
    const SharedAddress shared = shared_address(dynamic_shared());
    Loader<Layout> loader;
    loader.look_up(list, 0);
    UNROLL
    for (int i = 0; i < STAGES - 1; ++i) loader.start(list, queries, k, k_stride, shared, tiles, with_queries);
    taker.prepare();
    int stage = 0, flags = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        float s[M_TILES][N8][4] = {};
        for (int panel = 0; panel < PANELS; ++panel) {
            copy_wait<STAGES - 2>();
            // After this barrier all threads see the panel, and no thread reads the one before it
            // any more.
            __syncthreads();
            loader.start(list, queries, k, k_stride, shared, tiles, with_queries);
            if (panel == 0 && tile > 0) taker.settle();
            multiply_panel(s, shared + Layout::Q + panel * panel_bytes(HEADS),
                           shared + Layout::STAGE + stage * Layout::STAGE_BYTES,
                           panel + 1 < PANELS ? PANEL_COLUMNS / 16 : HEAD_DIM % PANEL_COLUMNS / 16);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        taker.take(s, tile, valid_slots<Layout, N8>(flags, key_warp() * WARP_KEYS));
        flags = flags + 1 == STAGES ? 0 : flags + 1;
    }
    __syncthreads();  // the last tile's sums are there, and nobody reads its keys any more
    taker.settle();
}

// ---------------------------------------------------------------- target

// Exponentiates a tile's scores, sums them over the heads, and stores the row of A.
struct HeadSums {
    RowSums<M_TILES, N8> row;
    float pending[1] = {0.0f};  // sum over the first warp's heads, of the slot `pending_slot`
    int pending_slot = 0;

    // The slot within a tile whose sum over the heads this lane keeps.
    static int own_slot() { return lane_slot(lane_id() / 8, lane_id() / 4 % 2); }
    static bool stores() { return head_warp() == 0; }

    void prepare() { row.prepare(head_warp() * M_TILES * 16); }

    float* partial(int tile) const {
        return reinterpret_cast<float*>(dynamic_shared() + Layout::PARTIAL) + tile % 2 * KEYS + own_slot();
    }

    void take(const float (&s)[M_TILES][N8][4], int tile, uint32_t valid) {
        row.sum_heads(pending, s, valid);
        pending_slot = tile * KEYS + own_slot();
        if constexpr (HEAD_WARPS == 2) {
            if (head_warp() == 1) *partial(tile) = pending[0];
        } else {
            row.store(pending_slot, pending[0]);
        }
    }

    void settle() {
        if constexpr (HEAD_WARPS == 2) {
            if (head_warp() == 0) row.store(pending_slot, pending[0] + *partial(pending_slot / KEYS));
        }
    }
};

SHARED_MEMORY(score_recompute, Layout::BYTES)

KERNEL(score_recompute, ScoreRecomputeParams, Layout::THREADS) { recompute_row<Layout, HeadSums>(params); }

// ---------------------------------------------------------------- lse of the ranked keys

// lse and lse_beside: [num_tokens, num_heads], natural. An infinity of either sign in lse_beside
// is no term, and lse_beside may be null. The rest as in ScoreRecomputeParams.
struct ScoreRecomputeLseParams {
    const bf16* q;
    int64_t q_token_stride;
    int64_t q_head_stride;
    const bf16* k;
    int64_t k_stride;
    const float* lse_beside;
    const int32_t* indices;
    int64_t indices_stride;
    const int32_t* topk_length;
    const int32_t* cu_q;
    const int32_t* cu_k;
    const int32_t* q_off;
    float* lse;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_keys;
    int32_t columns;
    int32_t num_sequences;
    int32_t ratio;
    int32_t indices_global;
    float softmax_scale;
};
SHARED_MEMORY(score_recompute_lse, Layout::BYTES)

// The sum of 2^x over some slots of a row, relative to its largest term.
struct RelativeSum {
    float maximum;
    float sum;

    // The empty sum. Assigned, not a default initialiser: NVRTC 13.0.88 applies those of an
    // array's elements in an aggregate to the first row only, and the other heads would start at
    // 0.
    void clear() {
        maximum = -INFINITY_F32;
        sum = 0.0f;
    }

    void merge(float other_maximum, float other_sum) {
        const float larger = maximum_f32(maximum, other_maximum);
        const float reference = subtrahend(larger);
        sum = sum * exp2_approx(maximum - reference) + other_sum * exp2_approx(other_maximum - reference);
        maximum = larger;
    }
};

// The running sum of exponentials of this lane's heads, each lane over its own slots.
struct HeadLse {
    float scale_log2;
    RelativeSum state[M_TILES][2];

    void clear() {
        UNROLL
        for (int m = 0; m < M_TILES; ++m)
            UNROLL
            for (int half = 0; half < 2; ++half) state[m][half].clear();
    }
    void prepare() {}
    void settle() {}

    void take(const float (&s)[M_TILES][N8][4], int, uint32_t valid) {
        UNROLL
        for (int m = 0; m < M_TILES; ++m)
            UNROLL
            for (int half = 0; half < 2; ++half) take_head(s[m], half, valid, state[m][half]);
    }

    void take_head(const float (&s)[N8][4], int half, uint32_t valid, RelativeSum& head) const {
        float z[COLUMNS];
        float largest = -INFINITY_F32, sum = 0.0f;
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            z[c] = valid >> c & 1 ? s[c / 2][2 * half + c % 2] * scale_log2 : -INFINITY_F32;
            largest = maximum_f32(largest, z[c]);
        }
        const float reference = subtrahend(largest);
        UNROLL
        for (int c = 0; c < COLUMNS; ++c) sum += exp2_approx(z[c] - reference);
        head.merge(largest, sum);
    }

    // Merges the four lanes of a row, and stores each warp's part in maxima and sums,
    // [KEY_WARPS][HEADS].
    void leave(float* maxima, float* sums) {
        UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            UNROLL
            for (int half = 0; half < 2; ++half) {
                RelativeSum& head = state[m][half];
                UNROLL
                for (int distance = 1; distance <= 2; distance *= 2) {
                    const float other_maximum = __shfl_xor_sync(FULL_WARP, head.maximum, distance);
                    head.merge(other_maximum, __shfl_xor_sync(FULL_WARP, head.sum, distance));
                }
                const int at = key_warp() * HEADS + lane_head(m, half);
                if (lane_id() % 4 == 0) {
                    maxima[at] = head.maximum;
                    sums[at] = head.sum;
                }
            }
        }
    }
};

KERNEL(score_recompute_lse, ScoreRecomputeLseParams, Layout::THREADS) {
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : params.num_tokens - 1 - blockIdx.x);
    const Ranking list = ranking(params, token, params.columns);
    const Queries queries{params.q + token * params.q_token_stride, params.q_head_stride, params.num_heads};
    HeadLse heads{params.softmax_scale * LOG2_E, {}};
    heads.clear();
    for_each_tile(list, queries, params.k, params.k_stride, ceil_div(list.length, KEYS), true, heads);

    auto* maxima = reinterpret_cast<float*>(dynamic_shared() + Layout::STAGE);
    float* sums = maxima + KEY_WARPS * HEADS;
    heads.leave(maxima, sums);
    __syncthreads();  // every warp's part is there
    const int head = threadIdx.x;
    if (head >= params.num_heads) return;
    RelativeSum all;
    all.clear();
    UNROLL
    for (int w = 0; w < KEY_WARPS; ++w) all.merge(maxima[w * HEADS + head], sums[w * HEADS + head]);
    // NaN is not an empty row: it stays.
    float lse = all.sum == 0.0f ? -INFINITY_F32 : all.maximum + log2_approx(all.sum);
    const int64_t at = static_cast<int64_t>(token) * params.num_heads + head;
    if (params.lse_beside) {
        const float beside = params.lse_beside[at] * LOG2_E;
        if (!is_infinite(beside)) lse = log2_add_exp2(lse, beside);
    }
    params.lse[at] = lse == -INFINITY_F32 ? INFINITY_F32 : lse * LN_2;
}
