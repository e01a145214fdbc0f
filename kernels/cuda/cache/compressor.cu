// Tokens pooled into compressed entries (inference 6, training 9). With C = kv and Z = gate of a
// token at position t,
//
//     S[t] = Z[t] + ape[t mod ratio]
//     p    = softmax over the entry's slots, for each channel          u = sum of p C
//     y    = norm_weight u r        r = 1/sqrt(mean(u^2) + eps)
//     z    = y with its last rope_dim channels rotated by j ratio      (entry j of its sequence)
//
// u, y and z are rounded to ELEMENT, all else is fp32. Entry j has the slots [j ratio, (j + 1)
// ratio); incomplete groups make no entry. With overlap (width 2 head_dim) these have the second
// half of their tokens; the tokens of group j - 1 with their first half precede them (none for
// entry 0). Row e of `entries` is entry e - cu_entries[i] of sequence i, or zero.
// Backward, with dy = dz rotated back, g = dy norm_weight; u in dS is unrounded, elsewhere saved:
//     du = r (g - u r^2 mean(g u))        dC = p du        dS = p du (C - u)        dZ = dS
//     dnorm_weight = sum of dy u r        dape = sum of dS over entries
// Token halves that no entry pools get zeros. Absent slots are excluded by selects. An epilogue
// (argument) stores an entry as its codes decode it, without a backward; z is the same bits for
// each (H: hadamard.cu; codes: quantize.h):
//     SIMULATED_E4M3    fp8-simulate(z) in groups of 64 of the unrotated channels, else z
//     TRANSFORMED_E2M1  fp4-simulate(128^-0.5 H z, rounded to ELEMENT) in groups of 32, 128 dims
// Work: with overlap a thread has four channels of all eight slots; without, a block has 32
// channels of an entry and u goes through memory. Sums use rows of partials, no atomics.
// Floor at 4.24 TB/s, 8 bytes a value of kv: 32768 tokens of width 1024 67 us, of 512 at ratio
// 128 32 us; backward twice that. Limit: memory; backward with overlap 8 warps an SM.
// ELEMENT: type of pooled, entries, dentries; GRADIENT: of dkv, dgate. See kernels/docs/compressor.md.
#include "compressor.h"

constexpr int FORWARD_THREADS = 128, BACKWARD_THREADS = 128;
constexpr int MAX_WARPS = BACKWARD_THREADS / static_cast<int>(WARP_SIZE);
constexpr int MAX_HEAD_DIM = 512;
constexpr int SUM_GROUPS = 16, SUM_THREADS = SUM_GROUPS * static_cast<int>(WARP_SIZE);

struct CompressorParams {
    const float* kv; int64_t kv_stride;            // [num_tokens, width]
    const float* gate; int64_t gate_stride;        // as kv
    const float* ape;                              // [ratio, width]
    const float* norm_weight;                      // [head_dim]
    const int32_t* cu_seqlens;                     // [num_sequences + 1]: a sequence's first token, and the end
    const int32_t* cu_entries;                     // [num_sequences + 1]: its first row of entries, and the end
    const float* cos; int64_t cos_stride;          // [table_rows, rope_dim / 2]
    const float* sin; int64_t sin_stride;
    ELEMENT* pooled;                               // [num_entries, head_dim]; nullptr where nobody needs it
    ELEMENT* entries; int64_t entries_stride;   // [num_entries, head_dim]
    int64_t table_rows;
    int32_t num_entries;
    int32_t num_sequences;
    int32_t ratio;
    int32_t head_dim;
    int32_t rope_dim;
    int32_t entry_threads;  // of an entry: whole warps that hold head_dim, QUAD channels a thread
    float eps;
    int32_t epilogue;  // what entries are stored for, of compressor.h
};

struct CompressorBackwardParams {
    const float* kv; int64_t kv_stride;
    const float* gate; int64_t gate_stride;
    const float* ape;
    const float* norm_weight;
    const int32_t* cu_seqlens;
    const int32_t* cu_entries;
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const ELEMENT* pooled;                                    // as the forward saved it
    const ELEMENT* dentries; int64_t dentries_stride;      // [num_entries, head_dim]
    GRADIENT* dkv; int64_t dkv_stride;                  // [num_tokens, width]
    GRADIENT* dgate; int64_t dgate_stride;
    float* dpooled;               // [num_entries, head_dim], between two kernels without overlap
    float* dape_partials;                                     // [a row for each block, ratio * width]
    float* dnorm_weight_partials;                             // [a row for each block, head_dim]
    int64_t table_rows;
    int32_t num_entries;
    int32_t num_sequences;
    int32_t ratio;
    int32_t head_dim;
    int32_t rope_dim;
    int32_t entry_threads;
    float eps;
};

struct CompressorSumsParams {
    const float* dape_partials;          // [num_dape_partials, num_ape]
    const float* dnorm_weight_partials;  // [num_dnorm_weight_partials, head_dim]
    float* dape;                         // [num_ape]
    float* dnorm_weight;                 // [head_dim]
    GRADIENT* dkv; int64_t dkv_stride;
    GRADIENT* dgate; int64_t dgate_stride;
    const int32_t* cu_seqlens;
    const int32_t* cu_entries;
    int32_t num_tokens;
    int32_t num_sequences;
    int32_t num_dape_partials;
    int32_t num_dnorm_weight_partials;
    int32_t num_ape;  // ratio * width
    int32_t ratio;
    int32_t width;
    int32_t head_dim;
};

// ---------------------------------------------------------------- the tokens of an entry

// How many entries a sequence has: complete groups that have a row.
template <typename Params>
DEVICE int entries_of(const Params& params, int sequence) {
    const int tokens = params.cu_seqlens[sequence + 1] - params.cu_seqlens[sequence];
    const int rows = params.cu_entries[sequence + 1] - params.cu_entries[sequence];
    return minimum(tokens / params.ratio, rows);
}

struct Place {
    int64_t token;     // the first one of the entry's own group
    int64_t position;  // of that token in its sequence
    bool exists;
    bool has_previous;
};

// The entry is the same in all lanes of a warp.
template <typename Params>
DEVICE Place place_of(const Params& params, int64_t entry) {
    Place place{0, 0, false, false};
    if (entry >= params.num_entries) return place;
    const int sequence = sequence_of_warp(params.cu_entries, params.num_sequences, entry);
    if (sequence < 0) return place;
    const int64_t number = entry - params.cu_entries[sequence];
    if (number >= entries_of(params, sequence)) return place;
    place.position = number * params.ratio;
    place.token = params.cu_seqlens[sequence] + place.position;
    place.exists = true;
    place.has_previous = number > 0;
    return place;
}

// Starts the loads of a token's values and scores, of four columns, and of a row of ape.
template <bool WIDE, int SLOTS, typename Params>
DEVICE void request_slot(const Params& params, int64_t token, int64_t column, const float* ape, int slot, Awaited<SLOTS>& awaited) {
    load_quad_streaming<WIDE>(params.kv + token * params.kv_stride + column, awaited.slots.value[slot]);
    load_quad_streaming<WIDE>(params.gate + token * params.gate_stride + column, awaited.slots.score[slot]);
    load_quad<WIDE>(ape + column, awaited.ape[slot]);
    awaited.lacks_ape[slot] = true;
}

// ---------------------------------------------------------------- with overlap

// The token of a slot. Those of the previous group come first.
DEVICE int64_t overlap_token(const Place& place, int slot) { return place.token + slot - OVERLAP_RATIO; }

// Threads past the last channel load the last channels.
template <bool WIDE, typename Params>
DEVICE void request_overlap(const Params& params, const Place& place, int channel, Awaited<OVERLAP_SLOTS>& awaited) {
    if (!place.exists) return;
    const int own = minimum(channel, params.head_dim - QUAD);
    UNROLL
    for (int slot = 0; slot < OVERLAP_SLOTS; ++slot) {
        const int64_t token = place.has_previous || slot >= OVERLAP_RATIO ? overlap_token(place, slot) : place.token;
        const float* const ape = params.ape + slot % OVERLAP_RATIO * 2 * static_cast<int64_t>(params.head_dim);
        request_slot<WIDE>(params, token, overlap_column(params.head_dim, own, slot), ape, slot, awaited);
    }
}

// The slots, once all have arrived. All slots of an absent entry are empty.
DEVICE void settle_overlap(const Place& place, Awaited<OVERLAP_SLOTS>& awaited) {
    const int absent = place.has_previous ? 0 : OVERLAP_RATIO;
    add_ape(awaited);
    UNROLL
    for (int slot = 0; slot < OVERLAP_SLOTS; ++slot)
        if (!place.exists || slot < absent) leave_empty(awaited.slots, slot);
}

template <bool WIDE>
DEVICE void overlap(const CompressorParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(blockIdx.x, params.entry_threads);
    const Place place = place_of(params, item.entry);
    Awaited<OVERLAP_SLOTS> awaited;
    request_overlap<WIDE>(params, place, item.channel, awaited);
    const Finish finish = load_finish<WIDE>(params, place.position, item.channel);
    settle_overlap(place, awaited);
    Channels x, inverse;
    pool(awaited.slots, nullptr, x, inverse);
    const bool there = place.exists && item.channel < params.head_dim;
    for (int i = 0; i < QUAD; ++i) x[i] = there ? x[i] : 0.0f;
    round_to_stored(x);
    store_pooled<WIDE>(params, item.entry, item.channel, x);
    make_entry(params, finish, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

KERNEL(compressor_overlap_vector, CompressorParams, FORWARD_THREADS) { overlap<true>(params); }
KERNEL(compressor_overlap_scalar, CompressorParams, FORWARD_THREADS) { overlap<false>(params); }

// ---------------------------------------------------------------- without overlap

// The entry must exist.
template <bool WIDE, typename Params>
DEVICE void request_group(const Params& params, const Place& place, const PoolItem& item, Awaited<GROUP_SLOTS>& awaited) {
    const int channel = minimum(item.channel, params.head_dim - QUAD);
    UNROLL
    for (int i = 0; i < GROUP_SLOTS; ++i) {
        const int slot = minimum(slot_of(item, i), params.ratio - 1);
        const float* const ape = params.ape + static_cast<int64_t>(slot) * params.head_dim;
        request_slot<WIDE>(params, place.token + slot, channel, ape, i, awaited);
    }
}

template <bool WIDE>
DEVICE void pool_chunk(const CompressorParams& params) {
    __shared__ PoolShared shared;
    const PoolItem item = pool_item(blockIdx.x, params.head_dim);
    const Place place = place_of(params, item.entry);
    Channels x = {}, inverse;
    if (place.exists) {
        Awaited<GROUP_SLOTS> awaited;
        request_group<WIDE>(params, place, item, awaited);
        settle_group(params.ratio, item, awaited);
        pool(awaited.slots, &shared, x, inverse);
    }
    if (item.group == 0) store_pooled<WIDE>(params, item.entry, item.channel, x);
}

KERNEL_OF(compressor_pool_vector, CompressorParams, POOL_THREADS, 4) { pool_chunk<true>(params); }
KERNEL(compressor_pool_scalar, CompressorParams, POOL_THREADS) { pool_chunk<false>(params); }

template <bool WIDE>
DEVICE void norm(const CompressorParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(blockIdx.x, params.entry_threads);
    const Place place = place_of(params, item.entry);
    const Finish finish = load_finish<WIDE>(params, place.position, item.channel);
    Channels x = {};
    if (place.exists && item.channel < params.head_dim)
        load_quad<WIDE>(params.pooled + item.entry * params.head_dim + item.channel, x);
    make_entry(params, finish, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

KERNEL(compressor_norm_vector, CompressorParams, FORWARD_THREADS) { norm<true>(params); }
KERNEL(compressor_norm_scalar, CompressorParams, FORWARD_THREADS) { norm<false>(params); }

// ---------------------------------------------------------------- backward
//
// Each block loops over entries with the grid as its stride, accumulates dape and dnorm_weight and
// stores one row of each. compressor_sums adds the rows in their order. No atomics are used, so
// equal launches give equal bits.

// The inputs of the gradient of an entry's norm; zeros for an absent entry.
struct NormInputs {
    Channels pooled, dy, weight;
    Rotation rotations[QUAD / 2];
    int turns;
    bool exists;
};
template <bool WIDE>
DEVICE NormInputs load_norm(const CompressorBackwardParams& params, const Place& place, const Item& item) {
    NormInputs inputs{};
    inputs.exists = place.exists && item.channel < params.head_dim;
    if (!inputs.exists) return inputs;
    load_quad<WIDE>(params.pooled + item.entry * params.head_dim + item.channel, inputs.pooled);
    load_quad<WIDE>(params.dentries + item.entry * params.dentries_stride + item.channel, inputs.dy);
    load_quad<WIDE>(params.norm_weight + item.channel, inputs.weight);
    inputs.turns = load_turn<true>(params, place.position, item.channel, inputs.rotations);
    return inputs;
}

// The gradient of the pooled values, zeros for an absent entry. Adds the terms of dnorm_weight to
// `dnorm_weight`.
DEVICE void norm_gradient(const CompressorBackwardParams& params, NormInputs& inputs, float (*partials)[2], Channels& dpooled,
                          Channels& dnorm_weight) {
    const Channels &pooled = inputs.pooled, &dy = inputs.dy, &weight = inputs.weight;
    turn_by(inputs.rotations, inputs.turns, inputs.dy);
    float sums[2] = {0.0f, 0.0f};  // of u^2 and of g u
    for (int i = 0; i < QUAD; ++i) {
        sums[0] += pooled[i] * pooled[i];
        sums[1] += dy[i] * weight[i] * pooled[i];
    }
    entry_sums(sums, params.entry_threads, partials);
    const float rstd = reciprocal_rms(sums[0], params.head_dim, params.eps);
    const float factor = rstd * rstd * (sums[1] / static_cast<float>(params.head_dim));
    for (int i = 0; i < QUAD; ++i) {
        dpooled[i] = inputs.exists ? rstd * (dy[i] * weight[i] - pooled[i] * factor) : 0.0f;
        if (inputs.exists) dnorm_weight[i] += dy[i] * (pooled[i] * rstd);
    }
}

// Stores dC and dS of one slot, and returns dS in `dscore`.
template <bool WIDE>
DEVICE void store_slot_gradient(const CompressorBackwardParams& params, int64_t token, int64_t column,
                                const Channels& value, const Channels& power, const Channels& inverse,
                                const Channels& pooled, const Channels& dpooled, Channels& dscore) {
    Channels dvalue;
    for (int i = 0; i < QUAD; ++i) {
        dvalue[i] = power[i] * inverse[i] * dpooled[i];
        dscore[i] = dvalue[i] * (value[i] - pooled[i]);
    }
    store_quad<WIDE>(params.dkv + token * params.dkv_stride + column, dvalue);
    store_quad<WIDE>(params.dgate + token * params.dgate_stride + column, dscore);
}

// The groups of threads of a block add their sums of one channel one after the other, so that the
// order is always the same. `total` is in shared memory, [slots, MAX_HEAD_DIM].
template <int COUNT>
DEVICE void add_in_turn(const float (&x)[COUNT][QUAD], int group, int num_groups, int channel, int head_dim,
                        float (*total)[MAX_HEAD_DIM]) {
    for (int turn = 0; turn < num_groups; ++turn) {
        if (turn == group && channel < head_dim) {
            for (int slot = 0; slot < COUNT; ++slot) {
                for (int i = 0; i < QUAD; ++i)
                    total[slot][channel + i] = (turn == 0 ? 0.0f : total[slot][channel + i]) + x[slot][i];
            }
        }
        __syncthreads();
    }
}

template <bool WIDE>
DEVICE void overlap_gradient(const CompressorBackwardParams& params, const Place& place, const Item& item,
                             float (*partials)[2], float (&sums)[OVERLAP_SLOTS + 1][QUAD]) {
    Awaited<OVERLAP_SLOTS> awaited;
    Slots<OVERLAP_SLOTS>& slots = awaited.slots;
    request_overlap<WIDE>(params, place, item.channel, awaited);
    NormInputs inputs = load_norm<WIDE>(params, place, item);
    settle_overlap(place, awaited);
    Channels pooled, inverse, dpooled;
    norm_gradient(params, inputs, partials, dpooled, sums[OVERLAP_SLOTS]);
    pool(slots, nullptr, pooled, inverse);
    UNROLL
    for (int slot = 0; slot < OVERLAP_SLOTS; ++slot) {
        const bool there = place.exists && (place.has_previous || slot >= OVERLAP_RATIO);
        if (!there || item.channel >= params.head_dim) continue;
        Channels dscore;
        const int64_t column = overlap_column(params.head_dim, item.channel, slot);
        store_slot_gradient<WIDE>(params, overlap_token(place, slot), column, slots.value[slot],
                                  slots.score[slot], inverse, pooled, dpooled, dscore);
        for (int i = 0; i < QUAD; ++i) sums[slot][i] += dscore[i];
    }
}

template <bool WIDE>
DEVICE void overlap_backward(const CompressorBackwardParams& params) {
    __shared__ float partials[2][MAX_WARPS][2];
    __shared__ float total[OVERLAP_SLOTS + 1][MAX_HEAD_DIM];
    const int groups = static_cast<int>(blockDim.x) / params.entry_threads;
    const int64_t blocks = ceil_div<int64_t>(params.num_entries, groups);
    float sums[OVERLAP_SLOTS + 1][QUAD] = {};
    int turn = 0;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x, turn ^= 1) {
        const Item item = item_of_thread(block, params.entry_threads);
        overlap_gradient<WIDE>(params, place_of(params, item.entry), item, partials[turn], sums);
    }
    const int group = static_cast<int>(threadIdx.x) / params.entry_threads;
    const int channel = static_cast<int>(threadIdx.x) % params.entry_threads * QUAD;
    add_in_turn(sums, group, groups, channel, params.head_dim, total);
    // Slot s has row s mod OVERLAP_RATIO of ape and, of that row, the first half or the second.
    const int head_dim = params.head_dim, num_ape = OVERLAP_SLOTS * head_dim;
    float* const dape = params.dape_partials + static_cast<int64_t>(blockIdx.x) * num_ape;
    float* const dnorm_weight = params.dnorm_weight_partials + static_cast<int64_t>(blockIdx.x) * head_dim;
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        for (int slot = 0; slot < OVERLAP_SLOTS; ++slot)
            dape[slot % OVERLAP_RATIO * 2 * head_dim + overlap_column(head_dim, column, slot)] = total[slot][column];
        dnorm_weight[column] = total[OVERLAP_SLOTS][column];
    }
}

KERNEL(compressor_overlap_backward_vector, CompressorBackwardParams, BACKWARD_THREADS) {
    overlap_backward<true>(params);
}
KERNEL(compressor_overlap_backward_scalar, CompressorBackwardParams, BACKWARD_THREADS) {
    overlap_backward<false>(params);
}

// Without overlap: first dpooled, of whole entries.
template <bool WIDE>
DEVICE void norm_backward(const CompressorBackwardParams& params) {
    __shared__ float partials[2][MAX_WARPS][2];
    __shared__ float total[1][MAX_HEAD_DIM];
    const int groups = static_cast<int>(blockDim.x) / params.entry_threads;
    const int64_t blocks = ceil_div<int64_t>(params.num_entries, groups);
    float sums[1][QUAD] = {};
    int turn = 0;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x, turn ^= 1) {
        const Item item = item_of_thread(block, params.entry_threads);
        Channels dpooled;
        NormInputs inputs = load_norm<WIDE>(params, place_of(params, item.entry), item);
        norm_gradient(params, inputs, partials[turn], dpooled, sums[0]);
        if (item.entry < params.num_entries && item.channel < params.head_dim)
            store_quad<WIDE>(params.dpooled + item.entry * params.head_dim + item.channel, dpooled);
    }
    const Item own = item_of_thread(0, params.entry_threads);
    add_in_turn(sums, static_cast<int>(own.entry), groups, own.channel, params.head_dim, total);
    float* const dnorm_weight = params.dnorm_weight_partials + static_cast<int64_t>(blockIdx.x) * params.head_dim;
    for (int column = threadIdx.x; column < params.head_dim; column += blockDim.x)
        dnorm_weight[column] = total[0][column];
}

KERNEL(compressor_norm_backward_vector, CompressorBackwardParams, BACKWARD_THREADS) { norm_backward<true>(params); }
KERNEL(compressor_norm_backward_scalar, CompressorBackwardParams, BACKWARD_THREADS) { norm_backward<false>(params); }

// A block keeps its channels and its slots' sums of dape, and takes every (grid / chunks)th entry.
template <bool WIDE>
DEVICE void pool_backward(const CompressorBackwardParams& params) {
    __shared__ PoolShared shared;
    const PoolItem item = pool_item(blockIdx.x, params.head_dim);
    const int64_t step = gridDim.x / ceil_div(params.head_dim, CHUNK);
    float sums[GROUP_SLOTS][QUAD] = {};
    const int own_channel = minimum(item.channel, params.head_dim - QUAD);
    Place next = place_of(params, item.entry);
    for (int64_t entry = item.entry; entry < params.num_entries; entry += step) {
        const Place place = next;
        Awaited<GROUP_SLOTS> awaited;
        Slots<GROUP_SLOTS>& slots = awaited.slots;
        Channels pooled, inverse, dpooled;
        if (place.exists) request_group<WIDE>(params, place, item, awaited);
        load_quad<WIDE>(params.dpooled + entry * params.head_dim + own_channel, dpooled);
        // The lookup of the next place takes several dependent loads, which these loads hide.
        next = place_of(params, entry + step);
        if (!place.exists) continue;
        settle_group(params.ratio, item, awaited);
        pool(slots, &shared, pooled, inverse);
        if (item.channel >= params.head_dim) continue;
        UNROLL
        for (int i = 0; i < GROUP_SLOTS; ++i) {
            const int slot = slot_of(item, i);
            if (slot >= params.ratio) continue;
            Channels dscore;
            store_slot_gradient<WIDE>(params, place.token + slot, item.channel, slots.value[i], slots.score[i], inverse,
                                      pooled, dpooled, dscore);
            for (int c = 0; c < QUAD; ++c) sums[i][c] += dscore[c];
        }
    }
    if (item.channel >= params.head_dim) return;
    float* const dape = params.dape_partials + item.entry * params.ratio * params.head_dim;
    for (int i = 0; i < GROUP_SLOTS; ++i) {
        const int slot = slot_of(item, i);
        float* const row = dape + static_cast<int64_t>(slot) * params.head_dim;
        if (slot < params.ratio) store_quad<WIDE>(row + item.channel, sums[i]);
    }
}

KERNEL_OF(compressor_pool_backward_vector, CompressorBackwardParams, POOL_THREADS, 2) { pool_backward<true>(params); }
KERNEL(compressor_pool_backward_scalar, CompressorBackwardParams, POOL_THREADS) { pool_backward<false>(params); }

// ---------------------------------------------------------------- sums over blocks, and tokens
// that no entry pools

// The sum of a column of `partials`, one column a lane: SUM_GROUPS strided sums, then those in
// their order.
DEVICE void sum_column(const float* partials, int num_partials, int64_t width, int64_t column, float* result,
                       float (*sums)[WARP_SIZE]) {
    const int lane = lane_id(), group = warp_id();
    float sum = 0.0f;
    if (column < width) {
        for (int64_t row = group; row < num_partials; row += SUM_GROUPS) sum += partials[row * width + column];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= width) return;
    for (int g = 1; g < SUM_GROUPS; ++g) sum += sums[g][lane];
    result[column] = sum;
}

// Whether an entry pools the first half of a token (as part of the previous group), and the second
// half or only half.
struct Pooled {
    bool first, own;
};
DEVICE Pooled pooled_halves(const CompressorSumsParams& params, int64_t token) {
    const int sequence = sequence_of(params.cu_seqlens, params.num_sequences, token);
    if (sequence < 0 || token >= params.cu_seqlens[sequence + 1]) return Pooled{false, false};
    const int group = static_cast<int>(token - params.cu_seqlens[sequence]) / params.ratio;
    const int entries = entries_of(params, sequence);
    return Pooled{group + 1 < entries, group < entries};
}

// Zeros those of a warp's 32 tokens, or their halves, that get no gradient. The lane that holds a
// token determines it; the other tokens, which are most, cost nothing.
template <bool WIDE>
DEVICE void zero_unpooled(const CompressorSumsParams& params, int64_t first_token) {
    const int64_t own = first_token + lane_id();
    const Pooled pooled = own < params.num_tokens ? pooled_halves(params, own) : Pooled{true, true};
    const bool has_overlap = params.width > params.head_dim;
    const Channels zeros = {};
    const uint32_t without_first = __ballot_sync(FULL_WARP, has_overlap && !pooled.first);
    const uint32_t without_own = __ballot_sync(FULL_WARP, !pooled.own);
    for (uint32_t left = without_first | without_own; left != 0; left &= left - 1) {
        const int number = __ffs(static_cast<int>(left)) - 1;
        const int64_t token = first_token + number;
        for (int column = lane_id() * QUAD; column < params.width; column += WARP_SIZE * QUAD) {
            const uint32_t without = has_overlap && column < params.head_dim ? without_first : without_own;
            if ((without >> number & 1u) == 0) continue;
            store_quad<WIDE>(params.dkv + token * params.dkv_stride + column, zeros);
            store_quad<WIDE>(params.dgate + token * params.dgate_stride + column, zeros);
        }
    }
}

template <bool WIDE>
DEVICE void sums(const CompressorSumsParams& params) {
    __shared__ float shared[SUM_GROUPS][WARP_SIZE];
    // Tokens first: their lookup takes a search, which the other blocks then hide.
    const int token_blocks = ceil_div(params.num_tokens, SUM_THREADS);
    const int ape_blocks = ceil_div(params.num_ape, static_cast<int>(WARP_SIZE));
    const int block = static_cast<int>(blockIdx.x);
    if (block < token_blocks) {
        const int64_t first = static_cast<int64_t>(block) * SUM_THREADS;
        zero_unpooled<WIDE>(params, first + warp_id() * static_cast<int>(WARP_SIZE));
    } else if (block < token_blocks + ape_blocks) {
        sum_column(params.dape_partials, params.num_dape_partials, params.num_ape,
                   static_cast<int64_t>(block - token_blocks) * WARP_SIZE + lane_id(), params.dape, shared);
    } else {
        const int64_t column = static_cast<int64_t>(block - token_blocks - ape_blocks) * WARP_SIZE + lane_id();
        sum_column(params.dnorm_weight_partials, params.num_dnorm_weight_partials, params.head_dim, column, params.dnorm_weight, shared);
    }
}

KERNEL(compressor_sums_vector, CompressorSumsParams, SUM_THREADS) { sums<true>(params); }
KERNEL(compressor_sums_scalar, CompressorSumsParams, SUM_THREADS) { sums<false>(params); }
