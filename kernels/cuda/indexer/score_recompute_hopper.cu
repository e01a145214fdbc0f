// Distillation targets for sm_90a: the kernel score_recompute of score_recompute.cu, which has the
// formulas, with wgmma.
//
// Work division. A block takes a token with all of its heads. cp.async loads q and the keys in
// panels of 64 columns, in the swizzle that wgmma reads: no operand passes through registers. A
// warpgroup multiplies 64 heads by all keys of a tile. At 128 heads two warpgroups share tiles of
// 128 keys. At 64 one warpgroup has tiles of 64 keys, and two blocks share an SM and hide each
// other's exponentials, starts and ends. While a block waits for a panel, the MMAs of the one
// before may still run: panels arrive in the stages that neither of the two uses, STAGES - 2
// ahead.
//
// A lane exponentiates two heads by a quarter of the tile's keys and sums the two. A
// reduce-scatter over the eight lanes with the same keys leaves each a few keys' sums over the
// warp's 16 heads. These pass through shared memory; after the next panel's barrier one thread a
// key adds the warps up, always in one order, and stores A.
//
// Floor: that of score_recompute.cu. Limit, one H200, 4096 queries, 8192 keys: 423 us at H 64,
// topk 512 (325 TFLOP/s), 1274 us at H 128, topk 1024 (432 TFLOP/s): latency of the chain of
// barrier, fence and first MMA of a panel, and a tile's exponentials, which nothing in the block
// hides.
//
// Defines: HEAD_DIM  width of q and k, a multiple of 64, at most 576; HEADS  of a block, 64 or
// 128, those after num_heads add nothing; SELECTED  see ranking.h.
// Launch: num_tokens blocks in x; the module exports block size and dynamic shared memory.
// What was tried: kernels/docs/score_recompute.md.

#if !defined(HEAD_DIM) || !defined(HEADS) || !defined(SELECTED)
#error "define HEAD_DIM, HEADS and SELECTED"
#endif

#include "hopper.h"
#include "score_recompute.h"

static_assert(HEAD_DIM % PANEL_COLUMNS == 0 && HEAD_DIM <= 576, "HEAD_DIM is a multiple of 64 up to 576");
static_assert(HEADS == 64 || HEADS == 128, "a block holds 64 or 128 heads");

constexpr int WARPGROUP_HEADS = 64;  // the rows of a warpgroup's product
constexpr int WARPS = HEADS / 16;
constexpr int KEYS = HEADS;
constexpr int N8 = KEYS / 8;
constexpr int KEPT = N8 / 4;  // keys of a tile whose sums over a warp's heads one lane keeps

// float [2][WARPS][KEYS]: of one tile and, where it is only one panel long, of the next.
constexpr int PARTIALS = 2 * WARPS;
// Four stages leave room for a second block.
constexpr bool TWO_BLOCKS = Q_BYTES + 4 * panel_bytes(KEYS) + SMALL_BYTES + PARTIALS * KEYS * 4 <= HALF_SHARED_BYTES;
using Layout = BlockLayout<WARPS, KEYS, PARTIALS, TWO_BLOCKS ? HALF_SHARED_BYTES : MAX_SHARED_BYTES>;
constexpr int STAGES = Layout::STAGES;
constexpr int AHEAD = STAGES - 2;  // panels on their way while two are read
static_assert(Layout::STAGE % 1024 == 0 && Layout::STAGE_BYTES % 1024 == 0, "panels start at multiples of 1024 bytes");

// ---------------------------------------------------------------- the scores of a tile

// s = q k^T over the first panel, s += q k^T over later ones.
DEVICE void multiply_panel(float (&s)[N8][4], uint64_t q_panel, uint64_t k_panel, bool accumulate) {
    UNROLL
    for (int k = 0; k < PANEL_COLUMNS / 16; ++k)
        wgmma_shared<false, false>(s, descriptor_advance(q_panel, 32 * k), descriptor_advance(k_panel, 32 * k),
                                   accumulate || k > 0);
    wgmma_commit();
}

template <typename Taker>
DEVICE void for_each_tile(const Ranking& list, const Queries& queries, const bf16* k, int64_t k_stride, int tiles,
                          bool with_queries, Taker& taker) {
    if (tiles == 0) return;
    const SharedAddress shared = shared_address(dynamic_shared());
    // Read from one lane, so that the compiler knows that it is uniform in a warp.
    const int warpgroup = __shfl_sync(FULL_WARP, warp_id() / 4, 0);
    const uint64_t q = matrix_descriptor(shared + Layout::Q + warpgroup * panel_bytes(WARPGROUP_HEADS), 0, 1024);
    const uint64_t keys = matrix_descriptor(shared + Layout::STAGE, 0, 1024);
    Loader<Layout> loader;
    loader.look_up(list, 0);
    UNROLL
    for (int i = 0; i < AHEAD; ++i) loader.start(list, queries, k, k_stride, shared, tiles, with_queries);
    taker.prepare();
    int stage = 0, flags = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        float s[1][N8][4];
        for (int panel = 0; panel < PANELS; ++panel) {
            copy_wait<AHEAD - 1>();
            // After this barrier all threads see the panel, and no thread reads the one before the
            // last any more.
            __syncthreads();
            fence_async_proxy();
            wgmma_fence();
            multiply_panel(s[0], descriptor_advance(q, panel * panel_bytes(HEADS)),
                           descriptor_advance(keys, stage * Layout::STAGE_BYTES), panel > 0);
            // In flight with the MMAs.
            loader.start(list, queries, k, k_stride, shared, tiles, with_queries);
            if (panel == 0 && tile > 0) taker.settle();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            wgmma_wait<1>();
        }
        const uint32_t valid = valid_slots<Layout, N8>(flags, 0);
        wgmma_wait<0>();
        wgmma_hold(s[0]);
        taker.take(s, tile, valid);
        flags = flags + 1 == STAGES ? 0 : flags + 1;
    }
    __syncthreads();  // the last tile's sums are there, and nobody reads its keys any more
    taker.settle();
}

// ---------------------------------------------------------------- target

// Exponentiates a tile's scores, sums them over the heads, and stores the row of A.
struct HeadSums {
    RowSums<1, N8> row;
    int pending = 0;  // the tile whose sums wait to be added up

    // The slot within a tile that this thread adds up.
    static int own_slot() { return static_cast<int>(threadIdx.x); }
    static bool stores() { return threadIdx.x < KEYS; }

    void prepare() { row.prepare(16 * warp_id()); }

    float* partial(int tile, int warp) const {
        return reinterpret_cast<float*>(dynamic_shared() + Layout::PARTIAL) + (tile % 2 * WARPS + warp) * KEYS;
    }

    void take(const float (&s)[1][N8][4], int tile, uint32_t valid) {
        float kept[KEPT];
        row.sum_heads(kept, s, valid);
        float* sums = partial(tile, warp_id()) + lane_id() / 4 * 4 * KEPT + lane_id() % 4 * 2;
        UNROLL
        for (int i = 0; i < KEPT; ++i) sums[i / 2 * 8 + i % 2] = kept[i];
        pending = tile;
    }

    void settle() {
        if (!stores()) return;
        float sum = 0.0f;
        UNROLL
        for (int w = 0; w < WARPS; ++w) sum += partial(pending, w)[own_slot()];
        row.store(pending * KEYS + own_slot(), sum);
    }
};

SHARED_MEMORY(score_recompute_hopper, Layout::BYTES)

KERNEL(score_recompute_hopper, ScoreRecomputeParams, Layout::THREADS) { recompute_row<Layout, HeadSums>(params); }
