// Where each slot of the router goes when rows are sorted by expert (inference 11.3).
//
//     slot             = token * topk + its place;  it counts when its entry of topk_indices is one of 0 .. num_experts - 1
//     counts[e]        = slots of expert e
//     expert_offsets   = 0 and the running sums of the counts, each rounded up to a multiple of `alignment`
//     position of slot = expert_offsets[e] + how many slots of expert e come before it
//
//     token_topk_to_pos[token][place] = position, -1 where the slot does not count
//     pos_to_token_topk, pos_to_token, pos_to_expert [position] = slot, token, expert; -1 in rows that no slot has
//
// Everything is an integer and has one value, whatever the order of blocks, warps and lanes: an expert's rows keep the
// order of the slots. A warp finds the lanes that have one expert by a ballot for each bit of its number, so that a slot's
// rank among them is a count of bits; counts of a warp lie in shared memory, those of the warps before it are summed once a
// round, and those of the chunks before a block's own come from moe_map_count. No atomic decides an order.
//
// Up to a few thousand slots are one launch, moe_map_small: each block counts them all, the first places them, and all of
// them share the rows that nobody has. Otherwise there are two: moe_map_count counts a chunk of slots a block,
// moe_map_place sums what lies before its own, 4 bytes a chunk and expert from the second-level cache, and places the
// chunk.
//
// Floor: 4 bytes read and 4 written a slot, 12 written a position: 32768 tokens with 6 slots of 256 experts are some 4.6
// MB, 1.1 us at 4.24 TB/s. Expected to limit it: two launches, and in the second the latencies of some ten barriers.
// Measured on one H200: 32768 tokens of 256 and of 384 experts 21.7 and 23.1 us, 4096 tokens 16.1, 128 tokens 7.7,
// one token 5.3 us. With divisions of 64 bits and a modulo for each count of a chunk 27.5, 31.7, 20.7 and 9.1 us; one
// token 23.4 us, when one block cleared the rows of each expert in turn.
//
// Launch: moe_map_count and moe_map_place one block a chunk of chunk_slots slots, a multiple of ROUND; moe_map_small any
// number.
#include "memory.h"
#include "selection.h"

constexpr int LANES = WARP_SIZE, THREADS = 512, WARPS = THREADS / LANES;
constexpr int HELD = 4;                // slots of a round that a thread holds
constexpr int ROUND = THREADS * HELD;  // slots that a block places at once
constexpr int EXPERT_BITS = 9, MAX_EXPERTS = 1 << EXPERT_BITS;
constexpr int LOADS = 16;              // counts of other chunks that a thread has under way
constexpr int32_t NONE = -1;
static_assert(MAX_EXPERTS <= THREADS, "a thread for each expert");

struct MoeMapParams {
    const int32_t* topk_indices; int64_t topk_indices_token_stride;        // [num_tokens, topk]; strides in elements
    int32_t* counts;                                                       // [num_experts]
    int32_t* expert_offsets;                                               // [num_experts + 1]
    int32_t* token_topk_to_pos; int64_t token_topk_to_pos_token_stride;    // [num_tokens, topk]
    int32_t* pos_to_expert;                                                // [num_positions], as are the next two
    int32_t* pos_to_token;
    int32_t* pos_to_token_topk;
    int32_t* chunk_counts;                                                 // [num_chunks, num_experts], or nullptr
    int32_t num_slots;
    int32_t topk;
    int32_t num_experts;
    int32_t num_positions;
    int32_t alignment;
    int32_t chunk_slots;
    int32_t num_chunks;
};
PARAMS_LAYOUT(MoeMapParams, topk_indices, topk_indices_token_stride, counts, expert_offsets, token_topk_to_pos,
              token_topk_to_pos_token_stride, pos_to_expert, pos_to_token, pos_to_token_topk, chunk_counts, num_slots, topk,
              num_experts, num_positions, alignment, chunk_slots, num_chunks)

struct Shared {
    uint16_t before[WARPS][MAX_EXPERTS];  // of a round: an expert's slots in a warp so far, then in the warps before it
    int32_t counts[MAX_EXPERTS];          // of all slots
    int32_t next[MAX_EXPERTS];            // the position of an expert's next slot
    int32_t offsets[MAX_EXPERTS + 1];
    uint32_t sums[WARPS];
};

SHARED_MEMORY(moe_map_count, sizeof(Shared))
SHARED_MEMORY(moe_map_place, sizeof(Shared))
SHARED_MEMORY(moe_map_small, sizeof(Shared))

DEVICE Shared& shared_memory() { return *reinterpret_cast<Shared*>(dynamic_shared()); }

// Whose slot it is, and its place there. Slots are counted in 31 bits: a division of 64 bits is ten times as long.
struct Place {
    int64_t token;
    int32_t place;
};
DEVICE Place place_of(const MoeMapParams& params, int64_t slot) {
    const uint32_t number = static_cast<uint32_t>(slot), topk = static_cast<uint32_t>(params.topk);
    return Place{number / topk, static_cast<int32_t>(number % topk)};
}

// The expert of a slot; NONE where there is none, or no such slot before `end`.
DEVICE int32_t expert_of(const MoeMapParams& params, int64_t slot, int64_t end) {
    if (slot >= end) return NONE;
    const Place at = place_of(params, slot);
    const int32_t expert = params.topk_indices[at.token * params.topk_indices_token_stride + at.place];
    return expert >= 0 && expert < params.num_experts ? expert : NONE;
}

DEVICE void clear_counts(Shared& shared) {
    shared.counts[threadIdx.x] = 0;
    shared.next[threadIdx.x] = 0;
    __syncthreads();
}

// Adds the slots [begin, end) to the counts.
DEVICE void count_slots(const MoeMapParams& params, Shared& shared, int64_t begin, int64_t end) {
    for (int64_t first = begin + threadIdx.x; first < end; first += ROUND) {
        int32_t experts[HELD];
        UNROLL
        for (int i = 0; i < HELD; ++i) experts[i] = expert_of(params, first + i * THREADS, end);
        UNROLL
        for (int i = 0; i < HELD; ++i)
            if (experts[i] != NONE) atomicAdd(&shared.counts[experts[i]], 1);
    }
    __syncthreads();
}

// Adds the counts of all chunks, and to `next` those of the chunks before this block's own. As many groups of threads as
// the block has, a thread an expert, take every so many-th chunk.
DEVICE void sum_chunks(const MoeMapParams& params, Shared& shared) {
    const int groups = THREADS / params.num_experts, group = static_cast<int>(threadIdx.x) / params.num_experts;
    const int expert = static_cast<int>(threadIdx.x) - group * params.num_experts;
    int32_t all = 0, before = 0;
    for (int first = group; group < groups && first < params.num_chunks; first += LOADS * groups) {
        int32_t counts[LOADS];
        UNROLL
        for (int i = 0; i < LOADS; ++i) {
            const int chunk = first + i * groups;
            const int64_t at = static_cast<int64_t>(chunk) * params.num_experts + expert;
            counts[i] = chunk < params.num_chunks ? params.chunk_counts[at] : 0;
        }
        UNROLL
        for (int i = 0; i < LOADS; ++i) {
            all += counts[i];
            before += first + i * groups < static_cast<int>(blockIdx.x) ? counts[i] : 0;
        }
    }
    if (all != 0) atomicAdd(&shared.counts[expert], all);
    if (before != 0) atomicAdd(&shared.next[expert], before);
    __syncthreads();
}

// Offsets of the experts, from their counts; `next` becomes a position.
DEVICE void find_offsets(const MoeMapParams& params, Shared& shared) {
    const int expert = threadIdx.x;
    const uint32_t rows = ceil_div(shared.counts[expert], params.alignment) * params.alignment;
    const uint32_t upto = inclusive_sum(rows);
    if (lane_id() == LANES - 1) shared.sums[warp_id()] = upto;
    __syncthreads();
    const uint32_t of_warps = inclusive_sum(lane_id() < warp_id() ? shared.sums[lane_id()] : 0);
    const uint32_t end = __shfl_sync(FULL_WARP, of_warps, LANES - 1) + upto;
    if (expert == 0) shared.offsets[0] = 0;
    shared.offsets[expert + 1] = end;
    shared.next[expert] += end - rows;
    __syncthreads();
}

DEVICE void write_counts(const MoeMapParams& params, const Shared& shared) {
    const int expert = threadIdx.x;
    if (expert >= params.num_experts) return;
    params.counts[expert] = shared.counts[expert];
    if (expert == 0) params.expert_offsets[0] = 0;
    params.expert_offsets[expert + 1] = shared.offsets[expert + 1];
}

DEVICE void write_row(const MoeMapParams& params, int64_t position, int32_t expert, int32_t token, int32_t slot) {
    params.pos_to_expert[position] = expert;
    params.pos_to_token[position] = token;
    params.pos_to_token_topk[position] = slot;
}

// The rows behind an expert's last slot, divided over the warps of all blocks, and those behind the last expert's.
DEVICE void clear_rows(const MoeMapParams& params, const Shared& shared) {
    const int warps = static_cast<int>(gridDim.x) * WARPS;
    for (int expert = static_cast<int>(blockIdx.x) * WARPS + warp_id(); expert < params.num_experts; expert += warps) {
        const int end = shared.offsets[expert + 1];
        for (int row = shared.offsets[expert] + shared.counts[expert] + lane_id(); row < end; row += LANES)
            write_row(params, row, NONE, NONE, NONE);
    }
    const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    for (int64_t row = shared.offsets[params.num_experts] + first; row < params.num_positions; row += gridDim.x * THREADS)
        write_row(params, row, NONE, NONE, NONE);
}

// The lanes of the warp that have the same expert as this one; of no use to a lane that has none.
DEVICE uint32_t lanes_of(int32_t expert) {
    uint32_t lanes = __ballot_sync(FULL_WARP, expert != NONE);
    UNROLL
    for (int bit = 0; bit < EXPERT_BITS; ++bit) {
        const bool is_set = expert >> bit & 1;
        const uint32_t set = __ballot_sync(FULL_WARP, is_set);
        lanes &= is_set ? set : ~set;
    }
    return lanes;
}

// Ranks the warp's slots of a round among those of the same expert, and counts these.
DEVICE void rank_slots(const int32_t (&experts)[HELD], int32_t (&ranks)[HELD], uint16_t* counts, int num_experts) {
    for (int expert = lane_id(); expert < num_experts; expert += LANES) counts[expert] = 0;
    __syncwarp();
    UNROLL
    for (int i = 0; i < HELD; ++i) {
        const uint32_t lanes = lanes_of(experts[i]), before = lanes & ((1u << lane_id()) - 1);
        const bool counted = experts[i] != NONE;
        const int32_t so_far = counted ? counts[experts[i]] : 0;
        ranks[i] = so_far + __popc(before);
        __syncwarp();
        if (counted && before == 0) counts[experts[i]] = static_cast<uint16_t>(so_far + __popc(lanes));
        __syncwarp();
    }
}

// Places the slots [begin, end), ROUND at once.
DEVICE void place_slots(const MoeMapParams& params, Shared& shared, int64_t begin, int64_t end) {
    for (int64_t round = begin; round < end; round += ROUND) {
        const int64_t first = round + warp_id() * (LANES * HELD) + lane_id();
        int32_t experts[HELD], ranks[HELD];
        UNROLL
        for (int i = 0; i < HELD; ++i) experts[i] = expert_of(params, first + i * LANES, end);
        rank_slots(experts, ranks, shared.before[warp_id()], params.num_experts);
        __syncthreads();
        int32_t of_round = 0;
        if (threadIdx.x < params.num_experts) {
            UNROLL
            for (int warp = 0; warp < WARPS; ++warp) {
                const int32_t of_warp = shared.before[warp][threadIdx.x];
                shared.before[warp][threadIdx.x] = static_cast<uint16_t>(of_round);
                of_round += of_warp;
            }
        }
        __syncthreads();
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            const int64_t slot = first + i * LANES;
            if (slot >= end) continue;
            const auto [token, place] = place_of(params, slot);
            int32_t position = NONE;
            if (experts[i] != NONE) {
                position = shared.next[experts[i]] + shared.before[warp_id()][experts[i]] + ranks[i];
                write_row(params, position, experts[i], static_cast<int32_t>(token), static_cast<int32_t>(slot));
            }
            params.token_topk_to_pos[token * params.token_topk_to_pos_token_stride + place] = position;
        }
        __syncthreads();
        shared.next[threadIdx.x] += of_round;
    }
}

KERNEL(moe_map_count, MoeMapParams, THREADS) {
    Shared& shared = shared_memory();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * params.chunk_slots;
    clear_counts(shared);
    count_slots(params, shared, begin, minimum<int64_t>(begin + params.chunk_slots, params.num_slots));
    if (threadIdx.x < params.num_experts)
        params.chunk_counts[static_cast<int64_t>(blockIdx.x) * params.num_experts + threadIdx.x] = shared.counts[threadIdx.x];
}

KERNEL(moe_map_place, MoeMapParams, THREADS) {
    Shared& shared = shared_memory();
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * params.chunk_slots;
    clear_counts(shared);
    sum_chunks(params, shared);
    find_offsets(params, shared);
    if (blockIdx.x == 0) write_counts(params, shared);
    clear_rows(params, shared);
    place_slots(params, shared, begin, minimum<int64_t>(begin + params.chunk_slots, params.num_slots));
}

KERNEL(moe_map_small, MoeMapParams, THREADS) {
    Shared& shared = shared_memory();
    clear_counts(shared);
    count_slots(params, shared, 0, params.num_slots);
    find_offsets(params, shared);
    clear_rows(params, shared);
    if (blockIdx.x > 0) return;
    write_counts(params, shared);
    place_slots(params, shared, 0, params.num_slots);
}
