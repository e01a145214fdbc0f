// Sparse attention for sm_90a where V is the first 512 columns of K (head_dim 512 or 576): the
// forward of sparse_attention.cu, which has the formulas, with WGMMA and an asynchronous gather.
//
// Persistent blocks, one an SM: each takes works of one token and 64 heads. So the first rows of
// the next work are loaded while the results of the last one are stored. hopper_attention.h has
// the roles of the three warpgroups. The producer copies q and the listed rows of K with cp.async.
//
// Floor: as in sparse_attention.cu. Per pair of tiles and SM, at 4096 FLOP and 128 bytes of shared
// memory a cycle (D 512): MMA 4096 cycles; shared memory 2 x (1024 for the scores' operands, 512
// for values, 512 for gathered rows) = 4096 cycles; gather from L2 131 KB.
//
// Measured on one H200 (4096 queries, D 512): 452 TFLOP/s at H 64, topk 512 over 8192 keys; 505 at
// H 128, topk 1024 over 8192 keys. What limits it: each tile is gathered, multiplied and released
// in sequence with two tiles in flight, so part of each latency is exposed. ncu, H 128: tensor
// cores 63 %, L2 42 %, shared memory 62 % of the time.
//
// Defines: HEAD_DIM 512 or 576, V_DIM 512, HEADS_PER_BLOCK 64, V_SEPARATE 0. Launch: any grid in x
// of at most num_tokens * ceil(num_heads / 64) blocks. What was tried:
// kernels/docs/sparse_attention.md.

#include "hopper_attention.h"
#include "sparse_attention.h"

static_assert(HEAD_DIM == 512 || HEAD_DIM == 576, "HEAD_DIM is 512 or 576");
static_assert(V_DIM == 512 && V_SEPARATE == 0, "V is the first 512 columns of K");
static_assert(HEADS_PER_BLOCK == HEADS, "a block holds the heads of a product");

SHARED_MEMORY(sparse_attention_hopper_forward, Shared::BYTES)

// The works of this block: every gridDim.x-th, starting at blockIdx.x.
DEVICE uint32_t total_works(const SparseAttentionForwardParams& params) {
    return static_cast<uint32_t>(params.num_tokens) * ceil_div(params.num_heads, HEADS_PER_BLOCK);
}

// ---------------------------------------------------------------- producer

// Starts the copies of one part of a tile, for the warp's slots starting at 16 * warp.
template <int TILE, int PART>
DEVICE void gather_part(const GatheredRows& rows, SharedAddress shared, int warp) {
    const SharedAddress keys = shared + Shared::keys(TILE);
    gather_panels<Shared::first_panel(TILE, PART), HALF_PANELS>(keys, rows, 16 * warp);
    if constexpr (ROPE_PANEL && PART == 1) gather_panels<PANELS - 1, 1>(keys, rows, 16 * warp);
}

// One tile of a pair, both parts, each as soon as its last reader releases it. Lane i < 16 holds
// the key row, or -1, of the warp's slot 16 * warp + i.
template <int TILE>
DEVICE void produce_tile(const SlotList& list, SharedAddress shared, int warp, uint32_t& uses, int32_t row) {
    auto* valid = reinterpret_cast<uint16_t*>(dynamic_shared() + Shared::VALID) + 4 * TILE;
    const uint32_t released = (uses++ & 1) ^ 1;
    const GatheredRows rows = find_rows(list.k, list.k_stride, row);
    mbarrier_wait(shared + Shared::empty(TILE, 0), released);
    // The warpgroup that releases part 0 is the one that reads these bits.
    const uint32_t warp_valid = __ballot_sync(FULL_WARP, row >= 0) & 0xffffu;
    if (lane_id() == 0) {
        valid[warp] = static_cast<uint16_t>(warp_valid);
        mbarrier_arrive(shared + Shared::full(TILE, 0));
    }
    gather_part<TILE, 0>(rows, shared, warp);
    copy_arrive(shared + Shared::full(TILE, 0));
    mbarrier_wait(shared + Shared::empty(TILE, 1), released);
    gather_part<TILE, 1>(rows, shared, warp);
    copy_arrive(shared + Shared::full(TILE, 1));
}

// The heads of one work. Absent heads become zeros.
DEVICE void produce_q(const SparseAttentionForwardParams& params, const Work& work, SharedAddress shared,
                      uint32_t& uses) {
    mbarrier_wait(shared + Shared::Q_EMPTY, (uses++ & 1) ^ 1);
    const bf16* q = params.q + work.token * params.q_token_stride + work.first_head * params.q_head_stride;
    load_panels<PANELS>(shared + Shared::Q, q, params.q_head_stride, work.heads, producer_thread(),
                        PRODUCERS, evicted_first());
    copy_arrive(shared + Shared::Q_FULL);
}

// A work's list and the stored indices of its first two tiles, looked up while the previous work
// is gathered.
struct Upcoming {
    SlotList list;
    int32_t index[2];
};

DEVICE Upcoming look_up(const SparseAttentionForwardParams& params, uint32_t number, int slot) {
    Upcoming next{slot_list(params, block_work(number, params.num_heads).token), {-1, -1}};
    // Up to topk: waiting for the list's length here would stall the gather.
    UNROLL
    for (int tile = 0; tile < 2; ++tile) {
        const int at = tile * TILE_SLOTS + slot;
        if (at < params.topk) next.index[tile] = next.list.indices[at];
    }
    return next;
}

DEVICE void produce(const SparseAttentionForwardParams& params, SharedAddress shared) {
    const int warp = producer_thread() / static_cast<int>(WARP_SIZE);
    const int slot = 16 * warp + lane_id() % 16;
    const uint32_t works = total_works(params);
    Uses uses;
    Upcoming next = look_up(params, blockIdx.x, slot);
    for (uint32_t number = blockIdx.x; number < works; number += gridDim.x) {
        const SlotList list = next.list;
        int32_t index[2] = {slot < list.length ? next.index[0] : -1,
                            TILE_SLOTS + slot < list.length ? next.index[1] : -1};
        if (number + gridDim.x < works) next = look_up(params, number + gridDim.x, slot);
        const int tiles = uniform(ceil_div(list.length, TILE_SLOTS));
        if (tiles > 0) produce_q(params, block_work(number, params.num_heads), shared, uses.q);
        for (int tile = 0; tile < tiles; tile += 2) {
            const int32_t row[2] = {list.valid_row(index[0]), list.valid_row(index[1])};
            // The list is read a pair ahead, so that its latency does not delay the gather.
            index[0] = list.stored_index((tile + 2) * TILE_SLOTS + slot);
            index[1] = list.stored_index((tile + 3) * TILE_SLOTS + slot);
            produce_tile<0>(list, shared, warp, uses.tile[0], row[0]);
            if (tile + 1 < tiles) produce_tile<1>(list, shared, warp, uses.tile[1], row[1]);
        }
    }
}

// ---------------------------------------------------------------- the epilogue of a work

// lse and max_logits, and the factor of out. Rows without a valid slot get 0, whatever the sink.
template <int W>
DEVICE void finish_softmax(const Consumer& c, const float (&total)[2], float (&factor)[2],
                           const SparseAttentionForwardParams& params, const Work& work) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = c.row + 8 * half;
        const bool empty = total[half] == 0.0f;
        factor[half] = 0.0f;
        if (row >= work.heads) continue;
        // A sink near the largest fp32 becomes inf in base 2, and so does its share: out is then
        // 0, as specified.
        const float sink_log2 = params.sink ? params.sink[work.first_head + row] * LOG2_E : -INFINITY_F32;
        const float sink_share = exp2_approx(sink_log2 - subtrahend(c.maximum[half]));
        factor[half] = empty ? 0.0f : 1.0f / (total[half] + sink_share);
        if (W != 0 || !speaks()) continue;
        const int64_t at = work.token * params.num_heads + work.first_head + row;
        params.lse[at] = empty ? INFINITY_F32 : (c.maximum[half] + log2_approx(total[half])) * LN_2;
        params.max_logits[at] = empty ? -INFINITY_F32 : c.maximum[half] * LN_2;
    }
}

template <int W>
DEVICE void consume(const SparseAttentionForwardParams& params, SharedAddress shared) {
    Consumer c;
    c.row = warp_id() % 4 * 16 + lane_id() / 4;
    const float scale_log2 = params.softmax_scale * LOG2_E;
    const uint32_t works = total_works(params);
    Uses uses;
    uint32_t turn = 0;
    int32_t length = slot_list(params, block_work(blockIdx.x, params.num_heads).token).length;
    for (uint32_t number = blockIdx.x; number < works; number += gridDim.x) {
        const Work work = block_work(number, params.num_heads);
        const int tiles = uniform(ceil_div(length, TILE_SLOTS));
        if (number + gridDim.x < works)
            length = slot_list(params, block_work(number + gridDim.x, params.num_heads).token).length;
        clear(c);
        consume_tiles<W>(c, shared, uses, tiles, scale_log2);
        float total[2], factor[2];
        total_sums<W>(total, c, shared, turn++);
        finish_softmax<W>(c, total, factor, params, work);
        bf16* out = params.out + work.token * params.out_token_stride + work.first_head * params.out_head_stride;
        store_out<W>(c, factor, out, params.out_head_stride, work.heads, shared);
    }
}

using Registers = DividedRegisters<1, 72, 2, 216>;

KERNEL(sparse_attention_hopper_forward, SparseAttentionForwardParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    // Arrivals: each producer thread's copies; for part 0 also one lane of each warp, for the
    // validity of the slots.
    constexpr uint32_t COPIES = PRODUCERS;
    initialise_barriers(shared, {{COPIES + 4, COPIES}, {COPIES + 4, COPIES}});
    const int warpgroup = uniform(warp_id() / 4);
    if (warpgroup == 2) {
        Registers::give();
        produce(params, shared);
    } else {
        Registers::take();
        if (warpgroup == 0) consume<0>(params, shared);
        else consume<1>(params, shared);
    }
}
