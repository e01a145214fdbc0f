// Maps each slot of the router to its row when rows are sorted by expert (inference 11.3).
//
//     slot   = token * topk + place;  it counts if its topk_indices entry is in 0..num_experts-1
//     counts[e]        = slots of expert e
//     expert_offsets   = 0 and the prefix sums of the counts rounded up to multiples of alignment
//     position of slot = expert_offsets[e] + how many slots of expert e come before it
//
//     token_topk_to_pos[token][place] = position, -1 where the slot does not count
//     pos_to_token_topk, pos_to_token, pos_to_expert [position] = slot, token, expert; -1: padding
//
// Results are integers independent of the order of blocks, warps and lanes: an expert's rows
// keep the order of the slots. No atomic decides an order. A ballot for each bit of the expert's
// number finds the lanes with the same expert; a slot's rank among them is a popcount. Warps'
// counts are summed once a round. A round is stored from shared memory in the order of experts.
//
// Up to a few thousand slots take one launch, moe_map_small. Each block counts all slots; a warp
// places a slot. Other blocks store counts and offsets and clear the tail. Otherwise moe_map_count
// counts a chunk a block. moe_map_place sums the chunks before its own from L2 and places it.
//
// Floor: 4 bytes read and 4 written a slot, 12 written a position: 32768 tokens, 6 slots, 256
// experts about 4.6 MB, 1.1 us at 4.24 TB/s. One H200: 11.2 us. Limit: two launches, and latency
// in the second: memory twice, and a dozen barriers.
//
// Launch: moe_map_count and moe_map_place one block a chunk of chunk_slots slots, a multiple of
// ROUND; moe_map_small num_chunks and one or more. What was tried: kernels/docs/moe_map.md.
#include "memory.h"
#include "selection.h"

constexpr int LANES = WARP_SIZE, THREADS = 512, WARPS = THREADS / LANES;
constexpr int HELD = 4;                // slots of a round that a thread holds
constexpr int ROUND = THREADS * HELD;  // slots that a block places at once
constexpr int EXPERT_BITS = 9, MAX_EXPERTS = 1 << EXPERT_BITS;
constexpr int ROUND_BITS = 11;
constexpr int SMALL_ROUNDS = 2 * HELD, SMALL_SLOTS = SMALL_ROUNDS * THREADS;  // of one launch
constexpr int COMPARED = 4, TILE = LANES * COMPARED;  // slots that a lane, and a warp, compares with one at once
constexpr int LOADS = 48;              // counts of other chunks that a thread has in flight
constexpr int32_t NONE = -1;
static_assert(MAX_EXPERTS <= THREADS, "a thread for each expert");
static_assert(ROUND == 1 << ROUND_BITS && ROUND_BITS + EXPERT_BITS <= 32, "slot and expert share a word");

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
    int32_t num_chunks;             // of one launch: blocks that place slots
    int64_t topk_inverse, alignment_inverse;  // see divided
};

struct Shared {
    union {
        uint16_t before[WARPS][MAX_EXPERTS];      // of a round: an expert's slots in a warp so far, then in the warps before it
        alignas(16) int32_t experts[SMALL_SLOTS]; // of one launch: those of all slots
    };
    alignas(16) int32_t counts[MAX_EXPERTS];  // of all slots
    int32_t next[MAX_EXPERTS];            // the position of an expert's next slot
    int32_t offsets[MAX_EXPERTS + 1];
    int32_t starts[MAX_EXPERTS];          // of a round sorted by expert: where an expert's slots begin
    int32_t moved[MAX_EXPERTS];           // and what makes a position of a place in that order
    uint32_t sorted[ROUND];               // the round in that order: expert, and slot within the round
    uint32_t sums[WARPS];
    int32_t num_sorted;
};

SHARED_MEMORY(moe_map_count, sizeof(Shared))
SHARED_MEMORY(moe_map_place, sizeof(Shared))
SHARED_MEMORY(moe_map_small, sizeof(Shared))

DEVICE Shared& shared_memory() { return *reinterpret_cast<Shared*>(dynamic_shared()); }

// A slot's token, and its place there. Slots are counted in 31 bits: a 64-bit division takes ten
// times as long.
struct Place {
    int64_t token;
    int32_t place;
};
DEVICE Place place_of(const MoeMapParams& params, int64_t slot) {
    const uint32_t number = static_cast<uint32_t>(slot), topk = static_cast<uint32_t>(params.topk);
    return Place{number / topk, static_cast<int32_t>(number % topk)};
}

DEVICE int32_t load_place(const MoeMapParams& params, Place at) {
    return params.topk_indices[at.token * params.topk_indices_token_stride + at.place];
}
// The entry of a slot; NONE for a slot from `end` on.
DEVICE int32_t load_slot(const MoeMapParams& params, int64_t slot, int64_t end) {
    return slot < end ? load_place(params, place_of(params, slot)) : NONE;
}

// The expert that an entry names; NONE where it names none.
DEVICE int32_t expert_of(const MoeMapParams& params, int32_t expert) {
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
        for (int i = 0; i < HELD; ++i) experts[i] = load_slot(params, first + i * THREADS, end);
        UNROLL
        for (int i = 0; i < HELD; ++i) experts[i] = expert_of(params, experts[i]);
        UNROLL
        for (int i = 0; i < HELD; ++i)
            if (experts[i] != NONE) atomicAdd(&shared.counts[experts[i]], 1);
    }
    __syncthreads();
}

// What a thread sums up. The block's threads form groups of one thread per expert. Each group
// takes the chunks round-robin.
struct Part {
    const int32_t* counts;  // of its expert in its first chunk
    int64_t step;           // between those of its chunks
    int expert, chunks, chunks_before;  // so many chunks, and those of them before the block's own
};
DEVICE Part part_of(const MoeMapParams& params) {
    const int thread = static_cast<int>(threadIdx.x), groups = THREADS / params.num_experts;
    const int group = thread / params.num_experts, expert = thread - group * params.num_experts;
    const auto chunks_of = [&](int chunks) { return group < groups ? ceil_div(chunks - group + groups, groups) - 1 : 0; };
    return Part{params.chunk_counts + static_cast<int64_t>(group) * params.num_experts + expert,
                static_cast<int64_t>(groups) * params.num_experts, expert, chunks_of(params.num_chunks),
                chunks_of(static_cast<int>(blockIdx.x))};
}

// The counts of up to LOADS of a thread's chunks, from `first` on.
DEVICE void load_counts(const Part& part, int first, int32_t (&counts)[LOADS]) {
    const int32_t* source = part.counts + first * part.step;
    UNROLL
    for (int i = 0; i < LOADS; ++i) {
        if (first + i >= part.chunks) break;
        counts[i] = *source;
        source += part.step;
    }
}

// Adds the counts of all chunks, and to `next` those of the chunks before this block's own. The
// first LOADS are already loaded.
DEVICE void sum_chunks(Shared& shared, const Part& part, int32_t (&counts)[LOADS]) {
    int32_t all = 0, before = 0;
    for (int first = 0; first < part.chunks; first += LOADS) {
        if (first > 0) load_counts(part, first, counts);
        UNROLL
        for (int i = 0; i < LOADS; ++i) {
            if (first + i >= part.chunks) break;
            all += counts[i];
            before += first + i < part.chunks_before ? counts[i] : 0;
        }
    }
    if (all != 0) atomicAdd(&shared.counts[part.expert], all);
    if (before != 0) atomicAdd(&shared.next[part.expert], before);
    __syncthreads();
}

// The inclusive prefix sum over the block's threads.
DEVICE uint32_t sum_upto(Shared& shared, uint32_t own) {
    const uint32_t upto = inclusive_sum(own);
    if (lane_id() == LANES - 1) shared.sums[warp_id()] = upto;
    __syncthreads();
    const uint32_t of_warps = sum_of_lanes(lane_id() < warp_id() ? shared.sums[lane_id()] : 0);
    return of_warps + upto;
}

// Offsets of the experts, from their counts; `next` becomes a position.
DEVICE void find_offsets(const MoeMapParams& params, Shared& shared) {
    const int expert = threadIdx.x;
    const uint32_t rows = ceil_div(shared.counts[expert], params.alignment) * params.alignment;
    const uint32_t end = sum_upto(shared, rows);
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

// Clears the padding rows [first, end), by a warp.
DEVICE void clear_rows(const MoeMapParams& params, int first, int end) {
    for (int row = first + lane_id(); row < end; row += LANES) write_row(params, row, NONE, NONE, NONE);
}

// Clears the rows after the last expert's, divided over `blocks` blocks.
DEVICE void clear_tail(const MoeMapParams& params, const Shared& shared, uint32_t block, uint32_t blocks) {
    const int64_t first = static_cast<int64_t>(block) * THREADS + threadIdx.x;
    // Unrolled, the compiler would count the iterations with a 64-bit division. Hardly one runs.
    UNROLL_BY(1)
    for (int64_t row = shared.offsets[params.num_experts] + first; row < params.num_positions; row += blocks * THREADS)
        write_row(params, row, NONE, NONE, NONE);
}

// Clears the rows after each expert's last slot, divided over the warps of all blocks, and those
// after the last expert's.
DEVICE void clear_unused(const MoeMapParams& params, const Shared& shared) {
    const int warps = static_cast<int>(gridDim.x) * WARPS;
    for (int expert = static_cast<int>(blockIdx.x) * WARPS + warp_id(); expert < params.num_experts; expert += warps)
        clear_rows(params, shared.offsets[expert] + shared.counts[expert], shared.offsets[expert + 1]);
    clear_tail(params, shared, blockIdx.x, gridDim.x);
}

// The lanes of the warp with the same expert as this one. Meaningless without an expert.
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
        // Not lanes_before (selection.h): its shift is no mask that the code can compare with 0.
        const uint32_t lanes = lanes_of(experts[i]), before = lanes & ((1u << lane_id()) - 1);
        const bool counted = experts[i] != NONE;
        const int32_t so_far = counted ? counts[experts[i]] : 0;
        ranks[i] = so_far + __popc(before);
        __syncwarp();
        if (counted && before == 0) counts[experts[i]] = static_cast<uint16_t>(so_far + __popc(lanes));
        __syncwarp();
    }
}

// What a thread holds of a round: experts, and ranks among the warp's slots of the same expert.
struct Round {
    int32_t experts[HELD], ranks[HELD];
};

// The first of a thread's slots of a round; the others follow at a stride of LANES.
DEVICE int first_of_thread() { return warp_id() * (LANES * HELD) + lane_id(); }

DEVICE Round ranked_round(const MoeMapParams& params, Shared& shared, int64_t begin, int64_t end) {
    Round round;
    UNROLL
    for (int i = 0; i < HELD; ++i) round.experts[i] = load_slot(params, begin + first_of_thread() + i * LANES, end);
    UNROLL
    for (int i = 0; i < HELD; ++i) round.experts[i] = expert_of(params, round.experts[i]);
    rank_slots(round.experts, round.ranks, shared.before[warp_id()], params.num_experts);
    return round;
}

// Where each expert's slots start in the round sorted by expert, from the counts of its warps.
DEVICE void sort_experts(const MoeMapParams& params, Shared& shared) {
    const int expert = threadIdx.x;
    int32_t of_round = 0;
    if (expert < params.num_experts) {
        UNROLL
        for (int warp = 0; warp < WARPS; ++warp) {
            const int32_t of_warp = shared.before[warp][threadIdx.x];
            shared.before[warp][threadIdx.x] = static_cast<uint16_t>(of_round);
            of_round += of_warp;
        }
    }
    const int32_t end = static_cast<int32_t>(sum_upto(shared, of_round));
    shared.starts[expert] = end - of_round;
    shared.moved[expert] = shared.next[expert] - (end - of_round);
    shared.next[threadIdx.x] += of_round;
    if (expert == THREADS - 1) shared.num_sorted = end;
    __syncthreads();
}

// Places the slots of a round. Rows are stored in the order of experts: those of one expert are
// neighbours, and stores coalesce.
DEVICE void place_round(const MoeMapParams& params, Shared& shared, int64_t begin, int64_t end, const Round& round) {
    __syncthreads();
    sort_experts(params, shared);
    UNROLL
    for (int i = 0; i < HELD; ++i) {
        const int number = first_of_thread() + i * LANES;
        const int64_t slot = begin + number;
        if (slot >= end) continue;
        const int32_t expert = round.experts[i];
        int32_t position = NONE;
        if (expert != NONE) {
            const int32_t at = shared.starts[expert] + shared.before[warp_id()][expert] + round.ranks[i];
            shared.sorted[at] = static_cast<uint32_t>(expert << ROUND_BITS | number);
            position = shared.moved[expert] + at;
        }
        const auto [token, place] = place_of(params, slot);
        params.token_topk_to_pos[token * params.token_topk_to_pos_token_stride + place] = position;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < shared.num_sorted; at += THREADS) {
        const uint32_t word = shared.sorted[at];
        const int32_t expert = static_cast<int32_t>(word >> ROUND_BITS);
        const int64_t slot = begin + (word & (ROUND - 1));
        write_row(params, shared.moved[expert] + at, expert, static_cast<int32_t>(place_of(params, slot).token),
                  static_cast<int32_t>(slot));
    }
}

// Places the slots [begin, end), ROUND at a time. The first round is already ranked.
DEVICE void place_slots(const MoeMapParams& params, Shared& shared, int64_t begin, int64_t end, Round round) {
    while (begin < end) {
        place_round(params, shared, begin, end, round);
        begin += ROUND;
        if (begin < end) round = ranked_round(params, shared, begin, end);
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
    const int64_t end = minimum<int64_t>(begin + params.chunk_slots, params.num_slots);
    // The loads of counts are in flight while slots are ranked.
    const Part part = part_of(params);
    int32_t counts[LOADS];
    load_counts(part, 0, counts);
    const Round round = ranked_round(params, shared, begin, end);
    clear_counts(shared);
    sum_chunks(shared, part, counts);
    find_offsets(params, shared);
    if (blockIdx.x == 0) write_counts(params, shared);
    place_slots(params, shared, begin, end, round);
    clear_unused(params, shared);
}

// ---------------------------------------------------------------- few slots

// Divides by topk or by the alignment. The hardware division would take a hundred of the two
// thousand cycles that few slots take. x times the divisor is below 2^32, and `inverse` is
// ceil(2^32 / divisor). For divisor 1 that does not fit 32 bits: there 2^32 - 1 and x + 1 give the
// same.
DEVICE uint32_t divided(uint32_t x, uint32_t divisor, int64_t inverse) {
    return static_cast<uint32_t>(static_cast<uint64_t>(x + (divisor == 1)) * static_cast<uint32_t>(inverse) >> 32);
}
DEVICE Place place_of_few(const MoeMapParams& params, int slot) {
    const auto number = static_cast<uint32_t>(slot), topk = static_cast<uint32_t>(params.topk);
    const uint32_t token = divided(number, topk, params.topk_inverse);
    return Place{token, static_cast<int32_t>(number - token * topk)};
}
// The rows of an expert with `slots` slots.
DEVICE uint32_t rows_of_few(const MoeMapParams& params, uint32_t slots) {
    const auto alignment = static_cast<uint32_t>(params.alignment);
    return divided(slots + alignment - 1, alignment, params.alignment_inverse) * alignment;
}

// The experts of all slots, and their counts. Loads of slots are in flight while counts are
// cleared.
DEVICE void gather_slots(const MoeMapParams& params, Shared& shared) {
    int32_t experts[SMALL_ROUNDS];
    UNROLL
    for (int i = 0; i < SMALL_ROUNDS; ++i) {
        if (i * THREADS >= params.num_slots) break;
        const int slot = i * THREADS + static_cast<int>(threadIdx.x);
        experts[i] = slot < params.num_slots ? load_place(params, place_of_few(params, slot)) : NONE;
    }
    clear_counts(shared);
    UNROLL
    for (int i = 0; i < SMALL_ROUNDS; ++i) {
        if (i * THREADS >= params.num_slots) break;
        const int32_t expert = expert_of(params, experts[i]);
        shared.experts[i * THREADS + threadIdx.x] = expert;
        if (expert != NONE) atomicAdd(&shared.counts[expert], 1);
    }
    __syncthreads();
}

// The number of slots before this one with its expert.
DEVICE int rank_of(const Shared& shared, int slot, int32_t expert) {
    uint32_t rank = 0;
    UNROLL_BY(4)
    for (int tile = 0; tile < slot; tile += TILE) {
        const int first = tile + lane_id() * COMPARED;
        const Vec16 others = load_vec16(shared.experts + first);
        for (int i = 0; i < COMPARED; ++i) rank += static_cast<int32_t>(others.w[i]) == expert && first + i < slot;
    }
    return static_cast<int>(sum_of_lanes(rank));
}

// The rows of the experts before one, added up by a warp.
DEVICE int rows_before(const MoeMapParams& params, const Shared& shared, int32_t expert) {
    uint32_t before = 0;
    UNROLL
    for (int tile = 0; tile < MAX_EXPERTS; tile += TILE) {
        if (tile >= expert) break;
        const int first = tile + lane_id() * COMPARED;
        const Vec16 counts = load_vec16(shared.counts + first);
        for (int i = 0; i < COMPARED; ++i) before += first + i < expert ? rows_of_few(params, counts.w[i]) : 0;
    }
    return static_cast<int>(sum_of_lanes(before));
}

// Places a warp's slot. The warp of an expert's last slot also clears the rows after it.
DEVICE void place_slot(const MoeMapParams& params, const Shared& shared, int slot) {
    const int32_t expert = shared.experts[slot];
    const auto [token, place] = place_of_few(params, slot);
    int32_t* const target = params.token_topk_to_pos + token * params.token_topk_to_pos_token_stride + place;
    if (expert == NONE) {
        if (lane_id() == 0) *target = NONE;
        return;
    }
    const int first = rows_before(params, shared, expert), rank = rank_of(shared, slot, expert), row = first + rank;
    if (lane_id() == 0) {
        *target = row;
        write_row(params, row, expert, static_cast<int32_t>(token), slot);
    }
    const int count = shared.counts[expert];
    if (rank + 1 == count) clear_rows(params, row + 1, first + static_cast<int>(rows_of_few(params, count)));
}

KERNEL(moe_map_small, MoeMapParams, THREADS) {
    Shared& shared = shared_memory();
    gather_slots(params, shared);
    const uint32_t placing = static_cast<uint32_t>(params.num_chunks), block = blockIdx.x;
    if (block < placing) {
        // The first slots go to the first warp of every block: with few slots each block has few
        // warps at work, which do not take each other's issue slots.
        for (int slot = warp_id() * placing + block; slot < params.num_slots; slot += WARPS * placing) place_slot(params, shared, slot);
        return;
    }
    find_offsets(params, shared);
    clear_tail(params, shared, block - placing, gridDim.x - placing);
    if (block == placing) write_counts(params, shared);
}
