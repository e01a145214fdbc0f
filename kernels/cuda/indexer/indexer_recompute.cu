// The indexer's logits of selected keys, recomputed for its loss (training 1, 6). For the key i of
// slot j of token t (ranking.h),
//
//     logits[t,j] = sm_scale sum_h w[t,h] max(q[t,h] . k[i], 0)
//
// and -infinity in invalid slots, which are never dereferenced. max keeps NaN; an absent head adds
// nothing.
//
// Work division: a block takes a token with up to 64 heads; missing heads are zeros. Its queries
// stay in shared memory, the B operand of an MMA whose A operand is keys. A warp has every fourth
// tile of 32 slots. cp.async loads its keys, STAGES - 1 tiles in flight, and no other warp waits
// for them. It multiplies two MMA row tiles by all heads, so that sums over heads stay within four
// lanes: 16 heads in a lane, in order, then two exchanges that leave each lane with one slot.
//
// Floor, 64 heads, J slots a token: 2*64*128*J FLOP and 256*J bytes gathered. 4096 tokens, topk
// 512: 34 GFLOP, 43 us at 790 TFLOP/s; 537 MB from L2, where 8192 keys stay, 101 us at 5.3 TB/s;
// 84 MB from and to memory, 20 us. mma.sync with ldmatrix runs at about half its rate, 80 us. One
// H200: 148 us. Limit: the gather, and about 16 us in which blocks start and end.
//
// Defines: WEIGHT_ELEMENT  type of w: float or bf16; SELECTED  1 Launch: num_tokens blocks of
// THREADS threads. What was tried: kernels/docs/indexer_recompute.md.
#include "async_copy.h"
#include "indexer_heads.h"
#include "indexer_recompute.h"
#include "memory.h"
#include "numeric.h"
#include "tiles.h"

constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int STAGES = 3;
constexpr int SLOTS = WARP_SIZE;       // of a tile: one a lane
constexpr int CHUNKS = HEAD_DIM / 8;   // of 16 bytes in a row
constexpr int STEPS = HEAD_DIM / 16;   // of a product
constexpr int M = SLOTS / 16;          // rows of matrix instructions
static_assert(M == 2, "two exchanges leave each lane with one slot");

using Rows = Tile<HEAD_DIM>;  // of q, and of k

struct SharedPlan {
    uint8_t q[Rows::bytes(HEADS)];
    float weights[HEADS];
    uint8_t k[WARPS][STAGES][Rows::bytes(SLOTS)];  // each warp has its own ring of tiles
};
constexpr int Q = OFFSET_OF(SharedPlan, q), WEIGHTS = OFFSET_OF(SharedPlan, weights), K = OFFSET_OF(SharedPlan, k);
constexpr int SHARED_BYTES = sizeof(SharedPlan);
SHARED_MEMORY(indexer_recompute, SHARED_BYTES)

// Loads q of a token and its heads' weights; missing heads become zeros.
DEVICE void load_queries(const IndexerRecomputeParams& params, int32_t token, SharedAddress shared) {
    const bf16* q = params.q + token * params.q_token_stride;
    for (int i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
        const int head = i / CHUNKS, chunk = i % CHUNKS;
        const bool wanted = head < params.num_heads;
        const bf16* from = q + (wanted ? head * params.q_head_stride : 0) + 8 * chunk;
        copy_async_16(shared + Q + Rows::offset(head, chunk), from, wanted);
    }
    copy_commit();
    if (threadIdx.x < HEADS) {
        const int head = threadIdx.x;
        const float weight = load_weight(params, token, head);
        reinterpret_cast<float*>(dynamic_shared() + WEIGHTS)[head] = weight;
    }
}

// The first slot of this warp's tile of this number.
DEVICE int first_slot(int tile) { return (tile * WARPS + warp_id()) * SLOTS; }

// The row of k of this lane's slot, -1 where it is invalid.
DEVICE int32_t look_up(const Ranking& list, int tile) {
    return list.valid_row(list.stored_index(first_slot(tile) + lane_id()));
}

// Starts the loads of a tile's rows, half a warp a row; invalid slots become zeros.
DEVICE void start_tile(const IndexerRecomputeParams& params, int32_t own_row, SharedAddress tile) {
    UNROLL
    for (int i = 0; i < SLOTS; i += 2) {
        const int slot = i + lane_id() / CHUNKS, chunk = lane_id() % CHUNKS;
        const int32_t row = __shfl_sync(FULL_WARP, own_row, slot);
        const bool wanted = row >= 0;
        copy_async_16(tile + Rows::offset(slot, chunk), params.k + (wanted ? row * params.k_stride : 0) + 8 * chunk, wanted);
    }
}

// d[m][n] = k q^T: the tile's keys by all heads.
DEVICE void multiply(float (&d)[M][HEADS / 8][4], SharedAddress keys, SharedAddress q) {
    const int lane = lane_id();
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
        uint32_t a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], keys + Rows::offset(16 * m + lane % 16, 2 * step + lane / 16));
        UNROLL
        for (int n = 0; n < HEADS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, q + Rows::offset(8 * n + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
            UNROLL
            for (int m = 0; m < M; ++m) {
                mma_bf16_16x8x16(d[m][n], a[m], b[0], b[1]);
                mma_bf16_16x8x16(d[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// The sum over the heads of this lane's slot.
DEVICE float sum_heads(const float (&d)[M][HEADS / 8][4], int num_heads) {
    const auto* weights = reinterpret_cast<const float*>(dynamic_shared() + WEIGHTS);
    float sums[2 * M] = {}, pair[M], kept[1];  // of rows g and g + 8 of each m
    UNROLL
    for (int n = 0; n < HEADS / 8; ++n) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * n + lane_id() % 4 * 2 + i;
            UNROLL
            for (int row = 0; row < 2 * M; ++row)
                sums[row] = add_head(sums[row], d[row / 2][n][row % 2 * 2 + i], weights[head], head < num_heads);
        }
    }
    add_halves(pair, sums, 2);
    add_halves(kept, pair, 1);
    // Lane 4g + r has row g + 8r of the tile.
    return __shfl_sync(FULL_WARP, kept[0], lane_id() % 8 * 4 + lane_id() / 8);
}

KERNEL(indexer_recompute, IndexerRecomputeParams, THREADS) {
    const auto token = static_cast<int32_t>(blockIdx.x);
    const Ranking list = ranking(params, token, params.topk);
    const SharedAddress shared = shared_address(dynamic_shared());
    const SharedAddress ring = shared + K + warp_id() * STAGES * Rows::bytes(SLOTS);
    float* logits = params.logits + token * params.logits_stride;
    const int tiles = ceil_div(maximum(list.length - first_slot(0), 0), WARPS * SLOTS);

    if (list.length > 0) load_queries(params, token, shared);
    // Rows of the tiles in flight, the next MMA's first, and of the tile after them.
    int32_t rows[STAGES];
    UNROLL
    for (int stage = 0; stage + 1 < STAGES; ++stage) {
        rows[stage] = look_up(list, stage);
        if (stage < tiles) start_tile(params, rows[stage], ring + stage * Rows::bytes(SLOTS));
        copy_commit();
    }
    rows[STAGES - 1] = look_up(list, STAGES - 1);
    if (list.length > 0) {
        // The queries were loaded before the keys.
        copy_wait<STAGES - 1>();
        __syncthreads();
    }
    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<STAGES - 2>();
        // After this point every lane sees the tile, and none reads the one before it any more.
        __syncwarp();
        if (tile + STAGES - 1 < tiles)
            start_tile(params, rows[STAGES - 1], ring + (tile + STAGES - 1) % STAGES * Rows::bytes(SLOTS));
        copy_commit();
        float d[M][HEADS / 8][4] = {};
        multiply(d, ring + tile % STAGES * Rows::bytes(SLOTS), shared + Q);
        const float sum = sum_heads(d, params.num_heads);
        const int slot = first_slot(tile) + lane_id();
        if (slot < list.length) logits[slot] = rows[0] < 0 ? -INFINITY_F32 : sum * params.sm_scale;
        UNROLL
        for (int stage = 0; stage + 1 < STAGES; ++stage) rows[stage] = rows[stage + 1];
        rows[STAGES - 1] = look_up(list, tile + STAGES);
    }
    for (int slot = list.length + static_cast<int>(threadIdx.x); slot < params.topk; slot += THREADS)
        logits[slot] = -INFINITY_F32;
}
