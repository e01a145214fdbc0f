// The indexer's logits of selected keys for sm_90a: the kernel of indexer_recompute.cu, which has
// the formulas, with wgmma.
//
// Work division. Keys are the rows of an MMA and the heads of one token its columns, so that a
// logit is a sum within a lane and over four lanes. One block per SM takes tokens round-robin. The
// tiles of all of a block's tokens, 64 slots each, are one sequence: the pipeline does not drain
// where a token ends. Four warpgroups and five warps:
//   consumers  take the tiles round-robin: while one does relu and sums, the others' MMAs run.
//              They exchange nothing.
//   gatherers  one for each consumer: looks up the slots of its next tile while it gathers this
//              one's rows, by cp.async in wgmma's swizzle, and stores which slots are valid.
//   queries    one warp loads those of the next token, and its weights, during this one.
//
// Floor: that of indexer_recompute.cu. Per tile 256 cycles of MMAs at 4096 FLOP a cycle; shared
// memory 8 x (16 + 16) + 128 for arriving rows = 384 cycles at 128 bytes a cycle. 4096 tokens,
// topk 512: about 53 us of these at 1.8 GHz; L2 delivers 537 MB in 91 to 101 us at 5.9 to 5.3
// TB/s. Limit: the gather from L2. One H200: 94.6 us (5.7 TB/s, 363 TFLOP/s), 182 us at topk 1024.
//
// Defines: WEIGHT_ELEMENT  type of w: float or bf16; SELECTED  1
// Launch: any grid in x of at most num_tokens blocks of THREADS threads.
// What was tried: kernels/docs/indexer_recompute.md.
#include "async_copy.h"
#include "hopper.h"
#include "indexer_heads.h"
#include "indexer_recompute.h"
#include "indexer_shared.h"
#include "panels.h"

constexpr int SLOTS = 64;                 // of a tile: the rows of a product
constexpr int PANELS = HEAD_DIM / 64;
constexpr int CONSUMERS = 4, CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE;
// One warp gathers for each consumer, one loads the queries.
constexpr int PRODUCER_WARPS = CONSUMERS + 1;
constexpr int THREADS = CONSUMER_THREADS + PRODUCER_WARPS * WARP_SIZE;
constexpr int STAGES = 12;
static_assert(STAGES % CONSUMERS == 0, "each consumer has its own stages");
// Tiles of a gatherer in flight before it waits for the oldest.
constexpr int LAG = 1;

constexpr int OPERAND_BYTES = PANELS * PANEL_BYTES;  // of a token's queries, of a tile's keys
// The notes are which slots of a tile are valid: a bit for each.
using Shared = IndexerShared<STAGES, OPERAND_BYTES, OPERAND_BYTES, HEADS, uint32_t[STAGES][2]>;
using Tiles = Shared::Tiles;
using Units = Shared::Units;
SHARED_MEMORY(indexer_recompute_hopper, Shared::BYTES)

DEVICE uint32_t* valid_slots(uint32_t tile) {
    return reinterpret_cast<uint32_t*>(Shared::notes()) + tile % STAGES * 2;
}

DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        Tiles::initialise(shared, 1, WARPGROUP_SIZE / WARP_SIZE);
        Units::initialise(shared, WARP_SIZE, CONSUMER_THREADS / WARP_SIZE);
        fence_mbarrier_init();
    }
    __syncthreads();
}

DEVICE int tiles_of(const Ranking& list) { return ceil_div(list.length, SLOTS); }

// ---------------------------------------------------------------- queries

// Loads the queries of the block's tokens and their heads' weights, those of one while the one
// before is computed. Missing heads become zeros. One warp.
DEVICE void bring_queries(const IndexerRecomputeParams& params, SharedAddress shared) {
    const int chunk = lane_id() % 8;
    uint32_t unit = 0;
    for (uint32_t token = blockIdx.x; token < static_cast<uint32_t>(params.num_tokens); token += gridDim.x, ++unit) {
        const bf16* q = params.q + token * params.q_token_stride + 8 * chunk;
        Units::wait_empty(shared, unit);
        UNROLL_BY(4)
        for (int head = lane_id() / 8; head < HEADS; head += WARP_SIZE / 8) {
            const bool wanted = head < params.num_heads;
            const bf16* from = q + (wanted ? head * params.q_head_stride : 0);
            const SharedAddress at = shared + Shared::q(unit) + panel_offset(head, chunk);
            UNROLL
            for (int panel = 0; panel < PANELS; ++panel)
                copy_async_16(at + panel * PANEL_BYTES, from + 64 * panel, wanted);
        }
        copy_commit();
        for (int head = lane_id(); head < HEADS; head += WARP_SIZE)
            Shared::weights(unit)[weight_place(head)] = load_weight(params, token, head);
        copy_wait<0>();
        fence_async_proxy();
        // Each lane arrives for its own copies.
        mbarrier_arrive(shared + Units::full(unit));
    }
}

// ---------------------------------------------------------------- keys

// The stored indices of a lane's two slots of a tile.
struct TileSlots {
    int32_t stored[2];

    void look_up(const Ranking& list, int tile) {
        UNROLL
        for (int half = 0; half < 2; ++half)
            stored[half] = list.stored_index(tile * SLOTS + half * static_cast<int>(WARP_SIZE) + lane_id());
    }
};

// Starts the loads of a tile's rows, eight lanes a row; invalid slots become zeros. Many tokens'
// lists name these rows: keep them in L2.
DEVICE void gather_tile(const IndexerRecomputeParams& params, const int32_t (&own_rows)[2], SharedAddress stage) {
    const CachePolicy policy = evicted_last();
    const int chunk = lane_id() % 8;
    UNROLL
    for (int slot = 0; slot < SLOTS; slot += WARP_SIZE / 8) {
        const int32_t row = __shfl_sync(FULL_WARP, own_rows[slot / WARP_SIZE], slot % WARP_SIZE + lane_id() / 8);
        const bool wanted = row >= 0;
        const bf16* from = params.k + (wanted ? row * params.k_stride : 0) + 8 * chunk;
        const SharedAddress at = stage + panel_offset(slot + lane_id() / 8, chunk);
        UNROLL
        for (int panel = 0; panel < PANELS; ++panel)
            copy_async_16(at + panel * PANEL_BYTES, from + 64 * panel, wanted, policy);
    }
}

// Tiles of a warp whose copies were issued, and those handed to their consumer, which is later. A
// fence after the wait for a lane's own copies makes them visible to the MMAs.
struct Handover {
    SharedAddress shared;
    uint32_t tile;    // the next to be issued; every CONSUMERS-th is the warp's
    uint32_t oldest;  // the next to be handed over

    void hand_oldest() {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(shared + Tiles::full(oldest));
        oldest += CONSUMERS;
    }
    // Counts one more issued tile.
    void issue() {
        copy_commit();
        tile += CONSUMERS;
        if (tile - oldest <= LAG * CONSUMERS) return;
        copy_wait<LAG>();
        fence_async_proxy();
        hand_oldest();
    }
    // Hands over all of them.
    void finish() {
        copy_wait<0>();
        fence_async_proxy();
        while (oldest != tile) hand_oldest();
    }
};

// The tiles of consumer `own` of all of the block's tokens, in order, as if they were of one list.
struct OwnTiles {
    const IndexerRecomputeParams& params;
    uint32_t token;
    Ranking list;
    int own;  // counted from the first tile of the token

    OwnTiles(const IndexerRecomputeParams& of, uint32_t consumer)
        : params(of), token(blockIdx.x), list(ranking(of, static_cast<int32_t>(blockIdx.x), of.topk)),
          own(static_cast<int>(consumer)) {
        find();
    }
    bool exists() const { return token < static_cast<uint32_t>(params.num_tokens); }
    void advance() {
        own += CONSUMERS;
        find();
    }
    // Advances to the token that has the tile.
    void find() {
        while (own >= tiles_of(list)) {
            own -= tiles_of(list);
            token += gridDim.x;
            if (!exists()) return;
            list = ranking(params, static_cast<int32_t>(token), params.topk);
        }
    }
};

// Gathers the keys of consumer `warp`. A tile's slots are looked up while the one before is
// gathered.
DEVICE void gather(const IndexerRecomputeParams& params, SharedAddress shared, uint32_t warp) {
    Handover handover{shared, warp, warp};
    OwnTiles next(params, warp);
    TileSlots slots{};
    if (next.exists()) slots.look_up(next.list, next.own);
    while (next.exists()) {
        const int32_t rows[2] = {next.list.valid_row(slots.stored[0]), next.list.valid_row(slots.stored[1])};
        next.advance();
        if (next.exists()) slots.look_up(next.list, next.own);
        const uint32_t tile = handover.tile;
        Tiles::wait_empty(shared, tile);
        const uint32_t valid[2] = {__ballot_sync(FULL_WARP, rows[0] >= 0), __ballot_sync(FULL_WARP, rows[1] >= 0)};
        // By the lane that hands the tile over: racecheck does not relate its arrival to other
        // lanes' stores.
        if (lane_id() == 0) {
            valid_slots(tile)[0] = valid[0];
            valid_slots(tile)[1] = valid[1];
        }
        gather_tile(params, rows, shared + Shared::k(tile));
        handover.issue();
    }
    handover.finish();
}

// ---------------------------------------------------------------- consumers

// d = k q^T: the tile's keys by all heads.
DEVICE void multiply(float (&d)[HEADS / 8][4], uint64_t keys, uint64_t queries) {
    wgmma_fence();
    UNROLL
    for (int panel = 0; panel < PANELS; ++panel) {
        UNROLL
        for (int step = 0; step < 4; ++step) {
            const uint32_t place = panel * PANEL_BYTES + 32 * step;
            wgmma_shared<false, false>(d, descriptor_advance(keys, place), descriptor_advance(queries, place),
                                       panel > 0 || step > 0);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
}

// The slot of a tile whose logit this lane keeps; lanes of a pair keep the same.
DEVICE int lane_slot() { return warp_id() % 4 * 16 + lane_id() / 4 + lane_id() / 2 % 2 * 8; }

// The sum over the heads of this lane's slot.
DEVICE float sum_heads(const float (&d)[HEADS / 8][4], const float* weights, int num_heads) {
    float sums[2], kept[1];
    if (num_heads == HEADS) sum_own_heads<1, HEADS, false>(sums, d, weights, HEADS);
    else sum_own_heads<1, HEADS, true>(sums, d, weights, num_heads);
    add_halves(kept, sums, 2);
    return kept[0] + __shfl_xor_sync(FULL_WARP, kept[0], 1);
}

DEVICE void consume(const IndexerRecomputeParams& params, SharedAddress shared, uint32_t consumer) {
    uint32_t tile = consumer, unit = 0;
    auto own = static_cast<int>(consumer);  // counted from the first tile of the token
    const int slot = lane_slot();
    for (uint32_t token = blockIdx.x; token < static_cast<uint32_t>(params.num_tokens); token += gridDim.x, ++unit) {
        const Ranking list = ranking(params, static_cast<int32_t>(token), params.topk);
        const int length = uniform(list.length), tiles = ceil_div(length, SLOTS);
        float* logits = params.logits + token * params.logits_stride;
        const uint64_t queries = matrix_descriptor(shared + Shared::q(unit), 0, 1024);
        Units::wait_full(shared, unit);
        for (; own < tiles; own += CONSUMERS, tile += CONSUMERS) {
            Tiles::wait_full(shared, tile);
            const bool valid = valid_slots(tile)[slot / WARP_SIZE] >> slot % WARP_SIZE & 1;
            float d[HEADS / 8][4];
            multiply(d, matrix_descriptor(shared + Shared::k(tile), 0, 1024), queries);
            // Every lane has read whether its slot is valid.
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Tiles::empty(tile));
            const float sum = sum_heads(d, Shared::weights(unit), params.num_heads);
            const int at = own * SLOTS + slot;
            if (at < length && lane_id() % 2 == 0) logits[at] = valid ? sum * params.sm_scale : -INFINITY_F32;
        }
        own -= tiles;
        for (int at = length + static_cast<int>(threadIdx.x); at < params.topk; at += CONSUMER_THREADS)
            logits[at] = -INFINITY_F32;
        // The warp has read all of the token in shared memory.
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(shared + Units::empty(unit));
    }
}

KERNEL(indexer_recompute_hopper, IndexerRecomputeParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    initialise_barriers(shared);
    const int32_t warp = uniform(warp_id());
    if (warp < CONSUMERS * 4) consume(params, shared, warp / 4);
    else if (warp < CONSUMERS * 5) gather(params, shared, warp - CONSUMERS * 4);
    else bring_queries(params, shared);
}
