// Sparse attention's gradients for sm_90a where V is K and both are 512 wide: the backward of
// sparse_attention.cu, which has the formulas, with WGMMA and an asynchronous gather.
//
// A block takes a token and 64 heads. q and dout stay in shared memory; listed rows of K come in
// tiles of 64 slots. Three warpgroups:
//   0, 1  consumers. Warpgroup w computes scores and dP of the slots [32 w, 32 w + 32) of a tile,
//         stores P and dS to shared memory. Then it owns columns [256 w, 256 w + 256): dq of all
//         heads, in registers for the whole list, and the tile's dk = scale dS^T q + P^T dout, 64
//         columns at a time, added to fp32 rows in memory while the next MMA runs. One instance of
//         the code serves both, so that both reach each barrier at one place (compute-sanitizer).
//   2     producer: gathers the rows of the next tile. Warpgroup w releases its half of columns
//         once its dq MMA is done, so the gather overlaps the other MMA and the atomics of dk.
//
// Floor for 64 heads and a tile of 64 slots (D 512): five GEMMs, 5120 cycles at 4096 FLOP a cycle;
// 64 KB gathered; 128 KB of fp32 atomics; about 9400 cycles of the shared-memory data path for
// operands, exchanges between lanes, atomics and gathered rows. With DETERMINISTIC the same bytes
// are stored, and sparse_attention_sum reads them.
// What limits it (ncu, one H200, H 64, 8192 keys): the shared-memory data path, busy 65 % of the
// time, and the path into L2, 70 %. 316 TFLOP/s at H 64, topk 512 over 8192 keys; 346 at H 128,
// topk 1024.
//
// Defines: HEAD_DIM 512, V_DIM 512, HEADS_PER_BLOCK 64, V_SEPARATE 0, DETERMINISTIC
// (sparse_attention_tiles.h). Launch: num_tokens * ceil(num_heads / 64) blocks. What was tried:
// kernels/docs/sparse_attention.md.

#include "async_copy.h"
#include "gather.h"
#include "hopper.h"
#include "lines.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "panels.h"
#include "platform.h"
#include "sparse_attention.h"

static_assert(HEAD_DIM == 512 && V_DIM == 512 && V_SEPARATE == 0, "V is K, and both are 512 wide");
static_assert(HEADS_PER_BLOCK == 64, "a block holds 64 heads: the rows of a warpgroup's product");

constexpr int THREADS = 3 * WARPGROUP_SIZE;
constexpr int CONSUMERS = 2 * WARPGROUP_SIZE;
constexpr int TILE_SLOTS = 64;
constexpr int OWN_SLOTS = TILE_SLOTS / 2;
constexpr int MAX_SHARED_BYTES = 227 * 1024;

constexpr int PANELS = HEAD_DIM / 64;
constexpr int HALF_PANELS = PANELS / 2;
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
// dk is computed in pieces of one panel's columns.
constexpr int PIECES = HALF_PANELS;
static_assert(PIECES % 2 == 0, "the last piece is the second of two");

struct Shared {
    struct Plan {
        uint8_t q[TILE_BYTES], dout[TILE_BYTES], keys[TILE_BYTES];
        uint8_t p[PANEL_BYTES], ds[PANEL_BYTES];
        int32_t rows[2][TILE_SLOTS];  // key rows of the slots, -1 where invalid, in turns
        uint64_t full[2], empty[2];   // mbarriers, one for each half of the columns
    };
    static constexpr int Q = OFFSET_OF(Plan, q), DOUT = OFFSET_OF(Plan, dout), KEYS = OFFSET_OF(Plan, keys);
    static constexpr int P = OFFSET_OF(Plan, p), DS = OFFSET_OF(Plan, ds), ROWS = OFFSET_OF(Plan, rows);
    static constexpr int BYTES = sizeof(Plan);

    static constexpr int full(int half) { return OFFSET_OF(Plan, full) + 8 * half; }
    static constexpr int empty(int half) { return OFFSET_OF(Plan, empty) + 8 * half; }
};
static_assert(Shared::BYTES <= MAX_SHARED_BYTES, "tiles exceed shared memory");

SHARED_MEMORY(sparse_attention_hopper_backward, Shared::BYTES)

// Named barriers among the consumers.
constexpr uint32_t HEADS_READY = 1, WEIGHTS_FREE = 2, WEIGHTS_READY = 3, LAST_TILE_DONE = 4;

DEVICE int32_t* tile_rows(int tile) {
    return reinterpret_cast<int32_t*>(dynamic_shared() + Shared::ROWS) + tile % 2 * TILE_SLOTS;
}

// ---------------------------------------------------------------- producer

DEVICE void produce(const SlotList& list, SharedAddress shared, int tiles) {
    const int warp = warp_id() - CONSUMERS / static_cast<int>(WARP_SIZE);
    const int slot = 16 * warp + lane_id() % 16;
    int32_t index = list.stored_index(slot);
    for (int tile = 0; tile < tiles; ++tile) {
        const int32_t row = list.valid_row(index);
        const GatheredRows rows = find_rows(list.k, list.k_stride, row);
        // The list is read a tile ahead, so that its latency does not delay the gather.
        index = list.stored_index((tile + 1) * TILE_SLOTS + slot);
        const uint32_t released = (tile & 1) ^ 1;
        UNROLL
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait(shared + Shared::empty(half), released);
            if (half == 1 && lane_id() < 16) {
                // A warpgroup that has released half of the previous tile has finished the atomics
                // of the tile before that.
                tile_rows(tile)[slot] = row;
                mbarrier_arrive(shared + Shared::full(1));
            }
            const SharedAddress keys = shared + Shared::KEYS;
            if (half == 0) gather_panels<0, HALF_PANELS>(keys, rows, 16 * warp);
            else gather_panels<HALF_PANELS, HALF_PANELS>(keys, rows, 16 * warp);
            copy_arrive(shared + Shared::full(half));
        }
    }
}

// ---------------------------------------------------------------- consumers

DEVICE void load_heads(const SparseAttentionBackwardParams& params, const Work& work, SharedAddress shared) {
    const bf16* q = params.q + work.token * params.q_token_stride + work.first_head * params.q_head_stride;
    const bf16* dout = params.dout + work.token * params.dout_token_stride + work.first_head * params.dout_head_stride;
    load_panels<PANELS>(shared + Shared::Q, q, params.q_head_stride, work.heads, threadIdx.x, CONSUMERS,
                        evicted_first());
    load_panels<PANELS>(shared + Shared::DOUT, dout, params.dout_head_stride, work.heads, threadIdx.x, CONSUMERS,
                        evicted_first());
    copy_commit();
    copy_wait<0>();
    fence_async_proxy();
    named_barrier_sync(HEADS_READY, CONSUMERS);
}

// Starts s = q K^T and dp = dout K^T for the warpgroup's own slots, one half of the columns after
// the other as they arrive.
DEVICE void start_scores(int w, float (&s)[4][4], float (&dp)[4][4], SharedAddress shared, uint32_t phase) {
    const uint64_t q = matrix_descriptor(shared + Shared::Q, 0, 1024);
    const uint64_t dout = matrix_descriptor(shared + Shared::DOUT, 0, 1024);
    const uint64_t keys = matrix_descriptor(shared + Shared::KEYS + w * OWN_SLOTS * 128, 0, 1024);
    UNROLL
    for (int half = 0; half < 2; ++half) {
        mbarrier_wait(shared + Shared::full(half), phase);
        fence_async_proxy();
        wgmma_fence();
        UNROLL
        for (int panel = half * HALF_PANELS; panel < (half + 1) * HALF_PANELS; ++panel) {
            UNROLL
            for (int k = 0; k < 4; ++k) {
                const uint32_t at = panel * PANEL_BYTES + 32 * k;
                wgmma_shared<false, false>(s, descriptor_advance(q, at), descriptor_advance(keys, at), panel + k > 0);
                wgmma_shared<false, false>(dp, descriptor_advance(dout, at), descriptor_advance(keys, at), panel + k > 0);
            }
        }
        wgmma_commit();
    }
}

// Turns scores and dP into the operands P and dS. P * (dP - delta) is computed in fp32. The scale
// is applied to the accumulators of dq and dk, since dS is what is rounded.
DEVICE void write_weights(int w, const float (&s)[4][4], const float (&dp)[4][4], const RowState (&state)[2], int row,
                          const int32_t* rows, SharedAddress shared, float scale_log2) {
    const int t = lane_id() % 4;
    UNROLL
    for (int n = 0; n < 4; ++n) {
        float p[4], ds[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const RowState& head = state[i / 2];
            const bool valid = rows[w * OWN_SLOTS + 8 * n + 2 * t + i % 2] >= 0;
            const float without_sink =
                valid ? exp2_approx(fused_multiply_add(s[n][i], scale_log2, -head.lse_log2)) : 0.0f;
            p[i] = without_sink * head.share;
            ds[i] = p[i] * (dp[n][i] - head.delta) + without_sink * head.dlse;
        }
        const int low = panel_offset(row, w * OWN_SLOTS / 8 + n) + 4 * t;
        const int high = panel_offset(row + 8, w * OWN_SLOTS / 8 + n) + 4 * t;
        store_shared(shared + Shared::P + low, pack_bf16(p[0], p[1]));
        store_shared(shared + Shared::P + high, pack_bf16(p[2], p[3]));
        store_shared(shared + Shared::DS + low, pack_bf16(ds[0], ds[1]));
        store_shared(shared + Shared::DS + high, pack_bf16(ds[2], ds[3]));
    }
    fence_async_proxy();
}

// dq += dS K for the warpgroup's columns.
DEVICE void add_query_gradient(int w, float (&dq)[32][4], SharedAddress shared) {
    const uint64_t ds = matrix_descriptor(shared + Shared::DS, 0, 1024);
    const uint64_t keys = matrix_descriptor(shared + Shared::KEYS + w * HALF_PANELS * PANEL_BYTES, PANEL_BYTES, 1024);
    wgmma_hold(dq);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < 4; ++k)
        wgmma_shared<false, true>(dq, descriptor_advance(ds, 32 * k), descriptor_advance(keys, 2048 * k), true);
    wgmma_commit();
}

// dk = W^T H, or dk += W^T H with ACCUMULATE, for all slots of the tile and the 64 columns of a
// panel. `weights` is [heads, slots] and `heads` a tile [heads, columns].
template <bool ACCUMULATE>
DEVICE void multiply_heads(float (&dk)[8][4], SharedAddress weights, SharedAddress heads) {
    const uint64_t w = matrix_descriptor(weights, 0, 1024), h = matrix_descriptor(heads, 0, 1024);
    if constexpr (ACCUMULATE) wgmma_hold(dk);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < 4; ++k)
        wgmma_shared<true, true>(dk, descriptor_advance(w, 2048 * k), descriptor_advance(h, 2048 * k),
                                 ACCUMULATE || k > 0);
    wgmma_commit();
}

// The rows to which a tile's dk goes: those of its slots, or of the keys that the slots name.
struct Receivers {
    float* target;
    int64_t stride;
    const int32_t* keys;  // of the slots; invalid ones are left alone
    int64_t first_row;    // slot 0's own
};

DEVICE Receivers receivers_of(const SparseAttentionBackwardParams& params, const Work& work, int tile) {
    const int64_t first_row = first_own_row(params, work) + tile * TILE_SLOTS;
    return Receivers{params.dk, params.dk_stride, tile_rows(tile), first_row};
}

// Adds a piece, 64 columns starting at `column`, to its rows; `dk` is overwritten. All exchanges
// come first: an atomic add is a branch to the compiler, and nothing moves past it.
DEVICE void scatter(float (&dk)[8][4], const Receivers& receivers, int column, int row) {
    UNROLL
    for (int n = 0; n < 8; n += 4) trade_columns(dk, n);
    const int first = column + line_column();
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int slot = row - row % 2 + 8 * (i / 2) + i % 2, pair = i / 2 * 2;
        const int32_t key = receivers.keys[slot];
        if (key < 0) continue;
        float* at = receivers.target + gradient_row(key, receivers.first_row + slot) * receivers.stride + first;
        UNROLL
        for (int n = i % 2 * 2; n < 8; n += 4)
            give_vec4(at + n / 4 * 32, dk[n][pair], dk[n][pair + 1], dk[n + 1][pair], dk[n + 1][pair + 1]);
    }
}

// Stores the warpgroup's half of dq, staged in the half of the tile that it owned. Each warp
// stages its own 16 rows.
DEVICE void store_query_gradient(int w, const float (&dq)[32][4], const SparseAttentionBackwardParams& params,
                                 const Work& work, int row, SharedAddress shared) {
    const int t = lane_id() % 4, warp = warp_id() % 4;
    const SharedAddress panels = shared + Shared::KEYS + w * HALF_PANELS * PANEL_BYTES;
    const float scale = params.softmax_scale;
    UNROLL
    for (int n = 0; n < 32; ++n) {
        const SharedAddress panel = panels + n / 8 * PANEL_BYTES;
        store_shared(panel + panel_offset(row, n % 8) + 4 * t, pack_bf16(dq[n][0] * scale, dq[n][1] * scale));
        store_shared(panel + panel_offset(row + 8, n % 8) + 4 * t, pack_bf16(dq[n][2] * scale, dq[n][3] * scale));
    }
    __syncwarp();
    bf16* target = params.dq + work.token * params.dq_token_stride + work.first_head * params.dq_head_stride;
    const int chunk = lane_id();
    for (int head = 16 * warp; head < minimum(16 * warp + 16, work.heads); ++head) {
        const Vec16 v = load_shared_vec16(panels + chunk / 8 * PANEL_BYTES + panel_offset(head, chunk % 8));
        store_vec16_streaming(target + head * params.dq_head_stride + w * (HEAD_DIM / 2) + chunk * 8, v);
    }
}

// Starts dk = scale dS^T q for a piece.
DEVICE void start_piece(int w, float (&dk)[8][4], SharedAddress shared, int piece) {
    multiply_heads<false>(dk, shared + Shared::DS, shared + Shared::Q + (w * HALF_PANELS + piece) * PANEL_BYTES);
}

// Waits for a piece's MMA and all others.
DEVICE void end_piece(float (&dk)[8][4]) {
    wgmma_wait<0>();
    wgmma_hold(dk);
}

// Scales the result of start_piece, and starts dk += P^T dout.
DEVICE void continue_piece(int w, float (&dk)[8][4], SharedAddress shared, int piece, float softmax_scale) {
    end_piece(dk);
    UNROLL
    for (int n = 0; n < 8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) dk[n][i] *= softmax_scale;
    multiply_heads<true>(dk, shared + Shared::P, shared + Shared::DOUT + (w * HALF_PANELS + piece) * PANEL_BYTES);
}

// One tile. Its additions to dk go to memory a piece at a time, while the tensor cores compute the
// next piece, with two buffers. dk[1] first holds the last piece of the previous tile, then pieces
// of this one.
DEVICE void consume_tile(int w, float (&dq)[32][4], float (&dk)[2][8][4], const SparseAttentionBackwardParams& params,
                         const Work& work, const RowState (&state)[2], int row, SharedAddress shared, int tile) {
    const Receivers receivers = receivers_of(params, work, tile);
    const auto give = [&](const Receivers& to, int piece) {
        scatter(dk[piece % 2], to, (w * HALF_PANELS + piece) * 64, row);
    };
    {
        float s[4][4], dp[4][4];
        end_piece(dk[1]);  // has ended: said once more, because ptxas does not look back past the loop's edge
        start_scores(w, s, dp, shared, tile & 1);
        if (tile > 0) give(receivers_of(params, work, tile - 1), PIECES - 1);
        wgmma_wait<0>();
        wgmma_hold(s);
        wgmma_hold(dp);
        named_barrier_sync(WEIGHTS_FREE, CONSUMERS);  // nobody multiplies with the weights of the tile before any more
        write_weights(w, s, dp, state, row, receivers.keys, shared, params.softmax_scale * LOG2_E);
    }
    named_barrier_sync(WEIGHTS_READY, CONSUMERS);
    add_query_gradient(w, dq, shared);
    start_piece(w, dk[0], shared, 0);
    wgmma_wait<1>();
    wgmma_hold(dq);
    mbarrier_arrive(shared + Shared::empty(w));
    UNROLL
    for (int piece = 0; piece < PIECES; ++piece) {
        continue_piece(w, dk[piece % 2], shared, piece, params.softmax_scale);
        if (piece + 1 == PIECES) break;
        start_piece(w, dk[(piece + 1) % 2], shared, piece + 1);
        wgmma_wait<1>();
        wgmma_hold(dk[piece % 2]);
        give(receivers, piece);
    }
    end_piece(dk[1]);
}

DEVICE void consume(int w, const SparseAttentionBackwardParams& params, const Work& work, SharedAddress shared, int tiles) {
    const int row = warp_id() % 4 * 16 + lane_id() / 4;
    float dq[32][4], dk[2][8][4];
    UNROLL
    for (int n = 0; n < 32; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) dq[n][i] = 0.0f;
    const RowState state[2] = {row_state(params, work, row), row_state(params, work, row + 8)};
    if (tiles > 0) load_heads(params, work, shared);
    for (int tile = 0; tile < tiles; ++tile)
        consume_tile(w, dq, dk, params, work, state, row, recomputed(shared), tile);
    if (tiles > 0)
        scatter(dk[1], receivers_of(params, work, tiles - 1), (w * HALF_PANELS + PIECES - 1) * 64, row);
    named_barrier_sync(LAST_TILE_DONE, CONSUMERS);
    store_query_gradient(w, dq, params, work, row, shared);
}

DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        // Arrivals: each producer thread's copies; for the second half also the stores of the row
        // list.
        mbarrier_init(shared + Shared::full(0), WARPGROUP_SIZE);
        mbarrier_init(shared + Shared::full(1), WARPGROUP_SIZE + TILE_SLOTS);
        mbarrier_init(shared + Shared::empty(0), WARPGROUP_SIZE);
        mbarrier_init(shared + Shared::empty(1), WARPGROUP_SIZE);
        fence_mbarrier_init();
    }
    __syncthreads();
}

using Registers = DividedRegisters<1, 40, 2, 232>;

KERNEL(sparse_attention_hopper_backward, SparseAttentionBackwardParams, THREADS) {
    const Work work = block_work(blockIdx.x, params.num_heads);
    const SlotList list = slot_list(params, work.token);
    const SharedAddress shared = shared_address(dynamic_shared());
    // Read from one lane, so that the compiler knows that a warp agrees. Where a warp may diverge,
    // it serializes wgmma.
    const int tiles = __shfl_sync(FULL_WARP, ceil_div(list.length, TILE_SLOTS), 0);
    const int warpgroup = __shfl_sync(FULL_WARP, warp_id() / 4, 0);
    initialise_barriers(shared);
    if (warpgroup == 2) {
        Registers::give();
        produce(list, shared, tiles);
    } else {
        Registers::take();
        consume(warpgroup, params, work, shared, tiles);
    }
}
