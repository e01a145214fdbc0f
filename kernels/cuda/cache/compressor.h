// Tokens pooled into entries, their norm and their rotation (inference 6, training 9).
// compressor.cu has the formulas.
//
// A thread has QUAD consecutive channels of an entry and some of its slots. A slot is a token's
// half that the entry pools. The functions here fix the order of every sum: kernels that load the
// rows of an entry from different places, but call these, store the same bits. The including file
// is compiled with ELEMENT defined, the stored type of an entry.
#pragma once

#include "butterflies.h"
#include "element.h"
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "quantize.h"
#include "rotation.h"

constexpr int QUAD = 4;  // channels of a thread: 16 bytes of fp32
constexpr int OVERLAP_RATIO = 4, OVERLAP_SLOTS = 2 * OVERLAP_RATIO;
// Entries without overlap: a block of up to POOL_THREADS pools CHUNK channels of one entry.
// CHUNK_QUADS threads have a group of slots. There are as many groups as slots where the block has
// enough threads. Otherwise a thread has up to GROUP_SLOTS slots.
constexpr int POOL_THREADS = 256, POOL_WARPS = POOL_THREADS / static_cast<int>(WARP_SIZE);
constexpr int CHUNK_QUADS = 8, CHUNK = CHUNK_QUADS * QUAD;
constexpr int GROUP_SLOTS = 4, MAX_RATIO = POOL_THREADS / CHUNK_QUADS * GROUP_SLOTS;

using Channels = float[QUAD];

// ---------------------------------------------------------------- rows: in wide accesses, or
// element by element

template <bool WIDE, typename T>
DEVICE void load_quad(const T* source, Channels& x) {
    if constexpr (WIDE) {
        load_elements<QUAD>(source, x);
    } else {
        for (int i = 0; i < QUAD; ++i) x[i] = Element<T>::load(source + i);
    }
}

// For data that is read once.
template <bool WIDE>
DEVICE void load_quad_streaming(const float* source, Channels& x) {
    if constexpr (WIDE) {
        unpack<float>(load_vec16_streaming(source), x);
    } else {
        for (int i = 0; i < QUAD; ++i) x[i] = source[i];
    }
}

template <bool WIDE>
DEVICE void store_quad(float* target, const Channels& x) {
    if constexpr (WIDE) {
        store_elements(target, x);
    } else {
        for (int i = 0; i < QUAD; ++i) target[i] = x[i];
    }
}

template <bool WIDE>
DEVICE void store_quad(bf16* target, const Channels& x) {
    if constexpr (WIDE) {
        store_elements(target, x);
    } else {
        for (int i = 0; i < QUAD; ++i) target[i] = to_bf16(x[i]);
    }
}

// The values as they are stored.
DEVICE float stored_as(float, float x) { return x; }
DEVICE float stored_as(bf16, float x) { return to_float(to_bf16(x)); }
DEVICE void round_to_stored(Channels& x) {
    for (int i = 0; i < QUAD; ++i) x[i] = stored_as(ELEMENT{}, x[i]);
}

// ---------------------------------------------------------------- pooling

// Values and scores of a thread's channels, of SLOTS tokens. A slot without a token has the value
// 0 and the score -inf. They are selected, not computed: the memory of an absent token is not
// read.
template <int SLOTS>
struct Slots {
    float value[SLOTS][QUAD], score[SLOTS][QUAD];
};

template <int SLOTS>
DEVICE void leave_empty(Slots<SLOTS>& slots, int slot) {
    for (int i = 0; i < QUAD; ++i) {
        slots.value[slot][i] = 0.0f;
        slots.score[slot][i] = -INFINITY_F32;
    }
}

// Slots in flight, all at once: no load waits for another slot. Rows of ape are added later, to
// scores that lack theirs. An absent slot is loaded from another slot's address and emptied later.
// A branch around a slot's loads would make the next loads wait for them.
template <int SLOTS>
struct Awaited {
    Slots<SLOTS> slots;
    float ape[SLOTS][QUAD];
    bool lacks_ape[SLOTS];
};

template <int SLOTS>
DEVICE void add_ape(Awaited<SLOTS>& awaited) {
    UNROLL
    for (int slot = 0; slot < SLOTS; ++slot) {
        UNROLL
        for (int i = 0; i < QUAD; ++i) {
            const float score = awaited.slots.score[slot][i];
            awaited.slots.score[slot][i] = awaited.lacks_ape[slot] ? score + awaited.ape[slot][i] : score;
        }
    }
}

// What the warps of a block exchange, for each of the three values of a channel.
struct alignas(16) PoolShared {
    float of_warp[3][POOL_WARPS][CHUNK];
};

template <bool SUM>
DEVICE float joined(float a, float b) { return SUM ? a + b : maximum_f32(a, b); }

// The sum (or the maximum) of what the block's warps have stored for a thread's channels, in warp
// order. All loads start before the first use; an absent warp adds nothing.
template <bool SUM>
DEVICE void join_warps(const float (&of_warp)[POOL_WARPS][CHUNK], int column, Channels& x) {
    const int warps = static_cast<int>(blockDim.x / WARP_SIZE);
    Channels parts[POOL_WARPS];
    UNROLL
    for (int warp = 0; warp < POOL_WARPS; ++warp) {
        UNROLL
        for (int i = 0; i < QUAD; ++i) parts[warp][i] = SUM ? 0.0f : -INFINITY_F32;
        if (warp < warps) load_elements(&of_warp[warp][column], parts[warp]);
    }
    UNROLL
    for (int i = 0; i < QUAD; ++i) {
        x[i] = parts[0][i];
        UNROLL
        for (int warp = 1; warp < POOL_WARPS; ++warp) x[i] = joined<SUM>(x[i], parts[warp][i]);
    }
}

// The sums (or maxima) over all threads of the block with the same channels, in each of them, for
// COUNT values a channel.
template <bool SUM, int COUNT>
DEVICE void across_groups(Channels (&x)[COUNT], float (*of_warp)[POOL_WARPS][CHUNK]) {
    const int column = lane_id() % CHUNK_QUADS * QUAD;
    UNROLL
    for (int number = 0; number < COUNT; ++number) {
        UNROLL
        for (int i = 0; i < QUAD; ++i) {
            UNROLL
            for (int distance = CHUNK_QUADS; distance < static_cast<int>(WARP_SIZE); distance *= 2)
                x[number][i] = joined<SUM>(x[number][i], __shfl_xor_sync(FULL_WARP, x[number][i], distance));
        }
        if (lane_id() < CHUNK_QUADS) store_vec16(&of_warp[number][warp_id()][column], pack<float>(x[number]));
    }
    __syncthreads();
    UNROLL
    for (int number = 0; number < COUNT; ++number) join_warps<SUM>(of_warp[number], column, x[number]);
}

// Turns scores into exp(score - the channel's maximum). Returns the pooled value of each channel,
// and the inverse of the sum of these powers, which turns them into the softmax weights. `shared`
// is nullptr where a thread has all slots.
template <int SLOTS>
DEVICE void pool(Slots<SLOTS>& slots, PoolShared* shared, Channels& pooled, Channels& inverse) {
    Channels largest[1], sums[2];  // of powers, and of these times values
    UNROLL
    for (int i = 0; i < QUAD; ++i) {
        largest[0][i] = slots.score[0][i];
        UNROLL
        for (int slot = 1; slot < SLOTS; ++slot) largest[0][i] = maximum_f32(largest[0][i], slots.score[slot][i]);
    }
    if (shared) across_groups<false>(largest, shared->of_warp);
    UNROLL
    for (int i = 0; i < QUAD; ++i) {
        float total = 0.0f, sum = 0.0f;
        UNROLL
        for (int slot = 0; slot < SLOTS; ++slot) {
            const float power = exp2_approx((slots.score[slot][i] - largest[0][i]) * LOG2_E);
            slots.score[slot][i] = power;
            total += power;
            sum = fused_multiply_add(power, slots.value[slot][i], sum);
        }
        sums[0][i] = total;
        sums[1][i] = sum;
    }
    if (shared) across_groups<true>(sums, shared->of_warp + 1);
    UNROLL
    for (int i = 0; i < QUAD; ++i) {
        // Between 1 and the number of slots, or NaN.
        inverse[i] = reciprocal_of_normal(sums[0][i]);
        pooled[i] = sums[1][i] * inverse[i];
    }
}

// ---------------------------------------------------------------- norm and rotation
//
// An entry belongs to entry_threads threads, whole warps of one block. Each has the QUAD channels
// starting at `channel`; threads past the last channel have zeros.

// Sums over the threads of an entry, in each of them. All threads of the block take part.
// `partials` has room for each warp; a caller may pass it again only after another barrier.
template <int COUNT>
DEVICE void entry_sums(float (&x)[COUNT], int entry_threads, float (*partials)[COUNT]) {
    for (int i = 0; i < COUNT; ++i) x[i] = warp_sum(x[i]);
    const int warps = entry_threads / static_cast<int>(WARP_SIZE);
    if (warps == 1) return;
    const int first = warp_id() / warps * warps;
    for (int i = 0; i < COUNT; ++i)
        if (lane_id() == 0) partials[warp_id()][i] = x[i];
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) {
        x[i] = partials[first][i];
        for (int warp = 1; warp < warps; ++warp) x[i] += partials[first + warp][i];
    }
}

DEVICE float reciprocal_rms(float sum_of_squares, int head_dim, float eps) {
    return rsqrt_approx(sum_of_squares / static_cast<float>(head_dim) + eps);
}

// The rows of the table, by position.
struct RotationTable {
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const int32_t* positions;  // nullptr
    int64_t table_rows;
    bool inverse;
};

// The rotations of a thread's two pairs. Returns how many of its pairs, from the last one on, are
// rotated: the last rope_dim channels of an entry are. One pair where rope_dim is not a multiple
// of QUAD.
template <bool INVERSE, typename Params>
DEVICE int load_turn(const Params& params, int64_t position, int channel, Rotation (&rotations)[QUAD / 2]) {
    const int first = channel - (params.head_dim - params.rope_dim);
    if (first <= -QUAD) return 0;
    const RotationTable table{params.cos, params.cos_stride,  params.sin, params.sin_stride,
                              nullptr,    params.table_rows, INVERSE};
    if (first >= 0) {
        load_rotations(table, position, first / 2, rotations);
        return QUAD / 2;
    }
    Rotation last[1];
    load_rotations(table, position, 0, last);
    rotations[QUAD / 2 - 1] = last[0];
    return 1;
}

DEVICE void turn_by(const Rotation (&rotations)[QUAD / 2], int turns, Channels& x) {
    for (int pair = 0; pair < QUAD / 2; ++pair) {
        if (pair >= QUAD / 2 - turns) rotate(rotations[pair], x[2 * pair], x[2 * pair + 1]);
    }
}

// The reciprocal of the norm of an entry, from the pooled and rounded values, in all its threads.
template <typename Params>
DEVICE float norm_of(const Params& params, const Channels& x, float (*partials)[1]) {
    float squares[1] = {0.0f};
    for (int i = 0; i < QUAD; ++i) squares[0] += x[i] * x[i];
    entry_sums(squares, params.entry_threads, partials);
    return reciprocal_rms(squares[0], params.head_dim, params.eps);
}

DEVICE void weigh(const Channels& weight, float rstd, Channels& x) {
    for (int i = 0; i < QUAD; ++i) x[i] = weight[i] * (x[i] * rstd);
    round_to_stored(x);
}

// ---------------------------------------------------------------- epilogues of an entry
// (inference 5.4)
//
// Values become what their codes decode to. The threads of a warp have neighbouring channels, so
// that those that share a scale are neighbouring lanes. All lanes of the warp take part.

constexpr int SIMULATED_E4M3 = 1, TRANSFORMED_E2M1 = 2;  // of params.epilogue; anything else leaves an entry as it is
constexpr int E4M3_GROUP = 64, E2M1_GROUP = 32;          // channels that share a scale

// Only the first `coded` channels of the thread change.
DEVICE void simulate_e4m3(int coded, Channels& x) {
    Channels own;
    for (int i = 0; i < QUAD; ++i) own[i] = i < coded ? x[i] : 0.0f;
    const float amax = largest(largest_magnitude(own), E4M3_GROUP / QUAD);
    const uint8_t scale = group_scale(amax, E4M3_FLOOR, 1.0f / 448.0f);
    if (coded <= 0) return;
    uint32_t codes[QUAD / 4];
    e4m3_codes(own, inverse_of_scale(scale), codes);
    e4m3x2_to_float(codes[0], own[0], own[1]);
    e4m3x2_to_float(codes[0] >> 16, own[2], own[3]);
    for (int i = 0; i < QUAD; ++i) x[i] = i < coded ? own[i] * e8m0_to_float(scale) : x[i];
}

DEVICE void simulate_e2m1(Channels& x) {
    const float amax = largest(largest_magnitude(x), E2M1_GROUP / QUAD);
    const uint8_t scale = group_scale(amax, E2M1_FLOOR, 1.0f / 6.0f);
    const float inverse = inverse_of_scale(scale);
    for (int i = 0; i < QUAD; ++i) x[i] = e2m1_to_float(to_e2m1(x[i] * inverse)) * e8m0_to_float(scale);
}

// The unrotated channels as e4m3; or all of an entry of 128, which one warp has: transformed,
// rounded, and as e2m1.
template <typename Params>
DEVICE void simulate_codes(const Params& params, int channel, Channels& x) {
    if (params.epilogue == SIMULATED_E4M3) {
        simulate_e4m3(params.head_dim - params.rope_dim - channel, x);
    } else if (params.epilogue == TRANSFORMED_E2M1) {
        walsh_hadamard<static_cast<int>(WARP_SIZE)>(*reinterpret_cast<float(*)[1][QUAD]>(&x), lane_id());
        round_to_stored(x);
        simulate_e2m1(x);
    }
}

// The other inputs of an entry, loaded before the pooling: after the norm they would be a separate
// wait.
struct Finish {
    Channels weight;
    Rotation rotations[QUAD / 2];
    int turns;
};
template <bool WIDE, typename Params>
DEVICE Finish load_finish(const Params& params, int64_t position, int channel) {
    Finish finish{};
    if (channel >= params.head_dim) return finish;
    load_quad<WIDE>(params.norm_weight + channel, finish.weight);
    finish.turns = load_turn<false>(params, position, channel, finish.rotations);
    return finish;
}

// Makes an entry from pooled and rounded values: norm, rounded as stored, rotation, rounded again,
// epilogue.
template <typename Params>
DEVICE void make_entry(const Params& params, const Finish& finish, int channel, Channels& x, float (*partials)[1]) {
    const float rstd = norm_of(params, x, partials);
    if (channel < params.head_dim) {
        weigh(finish.weight, rstd, x);
        turn_by(finish.rotations, finish.turns, x);
        round_to_stored(x);
    }
    simulate_codes(params, channel, x);
}

// ---------------------------------------------------------------- sequences, entries, channels
// and slots of threads

// The last sequence that starts at or before `at`. It is the one that holds `at`, if any does:
// empty sequences come before it. -1 where all start after it.
DEVICE int sequence_of(const int32_t* starts, int num_sequences, int64_t at) {
    int low = 0, high = num_sequences;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - 1;
}

// The same for a warp whose lanes all look up one place. Each step compares 32 starts that divide
// the rest. So a thousand sequences take two dependent loads, where a single lane would take ten.
DEVICE int sequence_of_warp(const int32_t* starts, int num_sequences, int64_t at) {
    int low = 0, high = num_sequences;
    while (low < high) {
        const int step = ceil_div(high - low, static_cast<int>(WARP_SIZE)), own = low + lane_id() * step;
        const int begun = __popc(__ballot_sync(FULL_WARP, own < high && starts[minimum(own, high - 1)] <= at));
        if (begun == 0) break;
        // The rest is between the last lane's start that is reached, and the first that is not.
        high = minimum(low + begun * step, high);
        low += (begun - 1) * step + 1;
    }
    return low - 1;
}

// The column of a slot with overlap: the first slots have the first half of their tokens, the
// others the second.
DEVICE int64_t overlap_column(int head_dim, int channel, int slot) {
    return slot < OVERLAP_RATIO ? channel : head_dim + channel;
}

// A block's entry, and its threads' channels and slots: slot_of(item, i) for i below GROUP_SLOTS,
// if the entry has it.
DEVICE int slot_groups() { return static_cast<int>(blockDim.x) / CHUNK_QUADS; }
struct PoolItem {
    int64_t entry;
    int channel, group;
};
DEVICE int slot_of(const PoolItem& item, int i) { return item.group + i * slot_groups(); }
DEVICE PoolItem pool_item(int64_t block, int head_dim) {
    // Block numbers fit 32 bits; a 32-bit division takes a tenth of a 64-bit one.
    const uint32_t chunks = ceil_div(head_dim, CHUNK);
    const int64_t entry = static_cast<uint32_t>(block) / chunks;
    const int chunk = static_cast<int>(static_cast<uint32_t>(block) % chunks);
    const int quad = static_cast<int>(threadIdx.x) % CHUNK_QUADS, group = static_cast<int>(threadIdx.x) / CHUNK_QUADS;
    return PoolItem{entry, chunk * CHUNK + quad * QUAD, group};
}

// The slots of a thread once they have arrived: with ape, and empty past those of a group.
DEVICE void settle_group(int ratio, const PoolItem& item, Awaited<GROUP_SLOTS>& awaited) {
    add_ape(awaited);
    UNROLL
    for (int i = 0; i < GROUP_SLOTS; ++i)
        if (slot_of(item, i) >= ratio) leave_empty(awaited.slots, i);
}

// Stores an entry, or zeros where it does not exist.
template <bool WIDE, typename Params>
DEVICE void store_entry(const Params& params, int64_t entry, bool exists, int channel, Channels& x) {
    if (entry >= params.num_entries || channel >= params.head_dim) return;
    for (int i = 0; i < QUAD; ++i) x[i] = exists ? x[i] : 0.0f;
    store_quad<WIDE>(params.entries + entry * params.entries_stride + channel, x);
}

template <bool WIDE, typename Params>
DEVICE void store_pooled(const Params& params, int64_t entry, int channel, const Channels& x) {
    if (!params.pooled || entry >= params.num_entries || channel >= params.head_dim) return;
    store_quad<WIDE>(params.pooled + entry * params.head_dim + channel, x);
}

// The entry and the first channel of a thread, in blocks with several entries.
struct Item {
    int64_t entry;
    int channel;
};
DEVICE Item item_of_thread(int64_t block, int entry_threads) {
    const int entries = static_cast<int>(blockDim.x) / entry_threads;
    return Item{block * entries + threadIdx.x / entry_threads, static_cast<int>(threadIdx.x % entry_threads) * QUAD};
}
