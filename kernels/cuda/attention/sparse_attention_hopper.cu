// Sparse attention for sm_90a where V is the first 512 columns of K (head_dim 512 or 576): the forward of
// sparse_attention.cu, which has the formulas, with warpgroup matrix products and an asynchronous gather.
//
// A block works on one token and 64 of its heads after another, as many blocks as there are multiprocessors, so that
// the first rows of the next token arrive while the last one's results are stored. hopper_attention.h says
// how the three warpgroups share the work; here the producer copies q, and the listed rows of K, with cp.async.
//
// Floors as in sparse_attention.cu. Per pair of tiles and multiprocessor, at 4096 FLOP a cycle and 128 bytes of
// shared memory a cycle (D 512): matrix products 4096 cycles; shared memory 2 x (1024 for the scores' operands,
// 512 for values, 512 for arriving rows) = 4096 cycles; gather from L2 131 KB.
//
// What limits it (one H200, 4096 queries, D 512): 452 TFLOP/s at H 64, topk 512 over 8192 keys, 439 over 32768; 505 at
// H 128, topk 1024 over 8192 keys and 471 over 65536, at the clock that the GPU keeps under a second of this load (471 and
// 519 over 8192 keys in a tenth of a second; of an earlier version ncu timed single launches at 448 and 495 where the mean
// of many was 402 and 445). ncu, H 128: matrix units 63 % of the time, L2 42 %, shared memory 62 %; the producer waits half
// of its time for a part to be released, warpgroup 0 a tenth of its own for rows. Each tile is gathered, multiplied and
// released in turn, two in flight, so part of either shows. Before addresses were found once a tile (gather.h) the producer
// issued half of all instructions and the kernel ran at 405 and 446. Storing out took 10 and 5 % of the time then, less than
// half of that its way through shared memory. Asking for lines ahead (prefetch, of keys or of q) or for wider sectors made
// it slower; shuffles in place of shared memory changed nothing, nor did parts released 16 slots at a time, as the product
// goes through them.
//
// Defines: HEAD_DIM 512 or 576, V_DIM 512, HEADS_PER_BLOCK 64, V_SEPARATE 0. Launch: any grid in x of at most
// num_tokens * ceil(num_heads / 64) blocks.

#include "hopper_attention.h"
#include "sparse_attention.h"

static_assert(HEAD_DIM == 512 || HEAD_DIM == 576, "HEAD_DIM is 512 or 576");
static_assert(V_DIM == 512 && V_SEPARATE == 0, "V is the first 512 columns of K");
static_assert(HEADS_PER_BLOCK == HEADS, "a block holds the heads of a product");

SHARED_MEMORY(sparse_attention_hopper_forward, Shared::BYTES)

// The works of this block: every gridDim.x-th, from blockIdx.x on.
DEVICE uint32_t total_works(const SparseAttentionForwardParams& params) {
    return static_cast<uint32_t>(params.num_tokens) * ceil_div(params.num_heads, HEADS_PER_BLOCK);
}

// ---------------------------------------------------------------- producer

// Starts the arrival of one part of a tile, of the warp's slots from 16 * warp on.
template <int TILE, int PART>
DEVICE void gather_part(const GatheredRows& rows, SharedAddress shared, int warp) {
    const SharedAddress keys = shared + Shared::keys(TILE);
    gather_panels<Shared::first_panel(TILE, PART), HALF_PANELS>(keys, rows, 16 * warp);
    if constexpr (ROPE_PANEL && PART == 1) gather_panels<PANELS - 1, 1>(keys, rows, 16 * warp);
}

// One tile of a pair, both parts, each as soon as its last reader has released it. Lane i < 16 holds the key row, or -1,
// of the warp's slot 16 * warp + i.
template <int TILE>
DEVICE void produce_tile(const SlotList& list, SharedAddress shared, int warp, uint32_t& uses, int32_t row) {
    auto* valid = reinterpret_cast<uint16_t*>(dynamic_shared() + Shared::VALID) + 4 * TILE;
    const uint32_t released = (uses++ & 1) ^ 1;
    const GatheredRows rows = find_rows(list.k, list.k_stride, row);
    mbarrier_wait(shared + Shared::empty(TILE, 0), released);
    // The warpgroup that released part 0 is the one that reads these bits.
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

// The heads of one work; absent heads become zeros.
DEVICE void produce_q(const SparseAttentionForwardParams& params, const Work& work, SharedAddress shared,
                      uint32_t& uses) {
    mbarrier_wait(shared + Shared::Q_EMPTY, (uses++ & 1) ^ 1);
    const bf16* q = params.q + work.token * params.q_token_stride + work.first_head * params.q_head_stride;
    load_panels<PANELS>(shared + Shared::Q, q, params.q_head_stride, work.heads, producer_thread(),
                        PRODUCERS, evicted_first());
    copy_arrive(shared + Shared::Q_FULL);
}

// A work's list and the stored indices of its first two tiles, looked up while the work before it is gathered.
struct Upcoming {
    SlotList list;
    int32_t index[2];
};

DEVICE Upcoming look_up(const SparseAttentionForwardParams& params, uint32_t number, int slot) {
    Upcoming next{slot_list(params, block_work(number, params.num_heads).token), {-1, -1}};
    // Up to topk: to wait for the list's length here would stall the gather.
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
            // The list is read a pair ahead, so that its latency is not in the gather's way.
            index[0] = list.stored_index((tile + 2) * TILE_SLOTS + slot);
            index[1] = list.stored_index((tile + 3) * TILE_SLOTS + slot);
            produce_tile<0>(list, shared, warp, uses.tile[0], row[0]);
            if (tile + 1 < tiles) produce_tile<1>(list, shared, warp, uses.tile[1], row[1]);
        }
    }
}

// ---------------------------------------------------------------- end of a block

// lse and max_logits, and what out is multiplied by. Rows without a valid slot get 0, whatever the sink.
template <int W>
DEVICE void finish_softmax(const Consumer& c, const float (&total)[2], float (&factor)[2],
                           const SparseAttentionForwardParams& params, const Work& work) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = c.row + 8 * half;
        const bool empty = total[half] == 0.0f;
        factor[half] = 0.0f;
        if (row >= work.heads) continue;
        // A sink near the largest fp32 becomes inf in base 2 and its share inf: out is then 0, as it should be.
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
    // Each producer thread's copies; for part 0, with the slots' validity by one lane of each warp.
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
