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
// round, and those of the chunks before a block's own come from moe_map_count. No atomic decides an order. Rows are written
// from a round that lies in shared memory in the order of experts.
//
// Up to a few thousand slots are one launch, moe_map_small: each block counts them all, and a warp places a slot, whose rank
// is how many of those before it have its expert, of which each lane compares some. The rows in front of its expert's the warp
// adds up for itself, so that no warp waits for others behind the counts; further blocks write counts and offsets meanwhile, and
// clear the rows behind the last expert's. The warp of an expert's last slot clears
// the rows behind it, so that nobody looks through the experts for such rows. Otherwise there are two: moe_map_count counts a
// chunk of slots a block, moe_map_place sums what lies before its own, 4 bytes a chunk and expert from the second-level cache,
// and places the chunk.
//
// Floor: 4 bytes read and 4 written a slot, 12 written a position: 32768 tokens with 6 slots of 256 experts are some 4.6
// MB, 1.1 us at 4.24 TB/s. Limited by two launches, and in the second by latencies: of memory twice, and of a dozen
// barriers.
// Measured on one H200 before the last change but one: 32768 tokens of 256 and of 384 experts 21.7 and 23.1 us, 4096 tokens
// 16.1, 128 tokens 7.7, one token 5.3 us. With divisions of 64 bits and a modulo for each count of a chunk 27.5, 31.7, 20.7
// and 9.1 us; one token 23.4 us, when one block cleared the rows of each expert in turn.
// Then: 14.3 and 16.3, 12.7, 7.5 and 5.9 us. Rows are written in the order of experts, eight
// neighbours a line instead of one, which takes the 6144 accesses of a multiprocessor to an eighth; counts of the chunks
// come at once instead of in three turns, and while slots are ranked.
// Of few slots (128 tokens 7.0, one token 5.5 us on an H100) one block had placed them all by the rounds of moe_map_place,
// which read them again and have a dozen barriers, while its warps looked through the experts for rows to clear. By
// a warp a slot one token took 1.95 and 128 tokens 2.89 us there, of which the launch is 1.0 and one access of memory 0.8. With two
// barriers in place of four, since a warp adds up for itself what lies in front of its expert, no division and half as many slots a
// block 1.72 and 2.35 us. Loads of slots no longer wait for each other, in the larger kernels either: 32768 tokens of 256 and
// of 384 experts 11.7 and 13.9 us on the H100, 4096 tokens 9.8.
// On one H200 11.2, 13.3 and 9.8: not a matter of bytes, 1 MB of which are moved at 2 to 5 % of memory's rate. ncu (reports/h200/ncu.txt):
// of 96 blocks 55 % of the cycles are without a warp that could issue, in passes over chunks one behind the other.
//
// Launch: moe_map_count and moe_map_place one block a chunk of chunk_slots slots, a multiple of ROUND; moe_map_small one
// or more behind num_chunks.
#include "memory.h"
#include "selection.h"

constexpr int LANES = WARP_SIZE, THREADS = 512, WARPS = THREADS / LANES;
constexpr int HELD = 4;                // slots of a round that a thread holds
constexpr int ROUND = THREADS * HELD;  // slots that a block places at once
constexpr int EXPERT_BITS = 9, MAX_EXPERTS = 1 << EXPERT_BITS;
constexpr int ROUND_BITS = 11;
constexpr int SMALL_ROUNDS = 2 * HELD, SMALL_SLOTS = SMALL_ROUNDS * THREADS;  // of one launch
constexpr int COMPARED = 4, TILE = LANES * COMPARED;  // slots that a lane, and a warp, compares with one at once
constexpr int LOADS = 48;              // counts of other chunks that a thread has under way
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
PARAMS_LAYOUT(MoeMapParams, topk_indices, topk_indices_token_stride, counts, expert_offsets, token_topk_to_pos,
              token_topk_to_pos_token_stride, pos_to_expert, pos_to_token, pos_to_token_topk, chunk_counts, num_slots, topk,
              num_experts, num_positions, alignment, chunk_slots, num_chunks, topk_inverse, alignment_inverse)

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

// Whose slot it is, and its place there. Slots are counted in 31 bits: a division of 64 bits is ten times as long.
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
// What a slot says; NONE where there is no such slot before `end`.
DEVICE int32_t load_slot(const MoeMapParams& params, int64_t slot, int64_t end) {
    return slot < end ? load_place(params, place_of(params, slot)) : NONE;
}

// The expert that it names; NONE where it names none.
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

// What a thread sums up: as many groups of threads as the block has, a thread an expert, take every so many-th chunk.
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

// The counts of LOADS of a thread's chunks, or of as many as there are, from `first` on.
DEVICE void load_counts(const Part& part, int first, int32_t (&counts)[LOADS]) {
    const int32_t* source = part.counts + first * part.step;
    UNROLL
    for (int i = 0; i < LOADS; ++i) {
        if (first + i >= part.chunks) break;
        counts[i] = *source;
        source += part.step;
    }
}

// Adds the counts of all chunks, and to `next` those of the chunks before this block's own. The first LOADS are given.
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

// The sum over the block's threads up to this one, itself among them.
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

// The rows [first, end), which nobody has, by a warp.
DEVICE void clear_rows(const MoeMapParams& params, int first, int end) {
    for (int row = first + lane_id(); row < end; row += LANES) write_row(params, row, NONE, NONE, NONE);
}

// The rows behind the last expert's, divided over so many blocks.
DEVICE void clear_tail(const MoeMapParams& params, const Shared& shared, uint32_t block, uint32_t blocks) {
    const int64_t first = static_cast<int64_t>(block) * THREADS + threadIdx.x;
    // Unrolled it would divide 64 bits to count its turns, of which there is hardly one.
    UNROLL_BY(1)
    for (int64_t row = shared.offsets[params.num_experts] + first; row < params.num_positions; row += blocks * THREADS)
        write_row(params, row, NONE, NONE, NONE);
}

// The rows behind an expert's last slot, divided over the warps of all blocks, and those behind the last expert's.
DEVICE void clear_unused(const MoeMapParams& params, const Shared& shared) {
    const int warps = static_cast<int>(gridDim.x) * WARPS;
    for (int expert = static_cast<int>(blockIdx.x) * WARPS + warp_id(); expert < params.num_experts; expert += warps)
        clear_rows(params, shared.offsets[expert] + shared.counts[expert], shared.offsets[expert + 1]);
    clear_tail(params, shared, blockIdx.x, gridDim.x);
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
        // By lanes_before (selection.h), whose shift is no mask to compare with 0, 4096 tokens took 9.79 us in place of 9.70 on one H200.
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

// The first of a thread's slots of a round; the others follow LANES apart.
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

// Where the slots of each expert begin in the round sorted by expert, from the counts of its warps.
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

// Places the slots of a round. Rows are written in the order of experts: neighbours of one expert lie next to each other,
// while each slot's own store would be an access of its own.
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

// Places the slots [begin, end), ROUND at once, of which the first ones are ranked.
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
    // Counts come while slots are ranked.
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

// Divisions by topk and by the alignment, which take a hundred cycles of the two thousand that few slots take: of an x so small that
// x times the divisor is below 2^32, given ceil(2^32 / divisor). 1 has none of 32 bits: 2^32 - 1 does of x + 1.
DEVICE uint32_t divided(uint32_t x, uint32_t divisor, int64_t inverse) {
    return static_cast<uint32_t>(static_cast<uint64_t>(x + (divisor == 1)) * static_cast<uint32_t>(inverse) >> 32);
}
DEVICE Place place_of_few(const MoeMapParams& params, int slot) {
    const auto number = static_cast<uint32_t>(slot), topk = static_cast<uint32_t>(params.topk);
    const uint32_t token = divided(number, topk, params.topk_inverse);
    return Place{token, static_cast<int32_t>(number - token * topk)};
}
// The rows of an expert with so many slots.
DEVICE uint32_t rows_of_few(const MoeMapParams& params, uint32_t slots) {
    const auto alignment = static_cast<uint32_t>(params.alignment);
    return divided(slots + alignment - 1, alignment, params.alignment_inverse) * alignment;
}

// The experts of all slots, and their counts. Slots are on their way while counts are cleared.
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

// How many slots before this one have its expert.
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

// The rows of the experts in front of one, added up by a warp.
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

// A warp's slot; that of an expert's last one clears the rows behind it.
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
        // The first slots are the first warps': few slots leave every block few warps, which take no others' turns.
        for (int slot = warp_id() * placing + block; slot < params.num_slots; slot += WARPS * placing) place_slot(params, shared, slot);
        return;
    }
    find_offsets(params, shared);
    clear_tail(params, shared, block - placing, gridDim.x - placing);
    if (block == placing) write_counts(params, shared);
}
