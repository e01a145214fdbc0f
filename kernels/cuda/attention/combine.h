// The merge of partial attention results (inference 8.2), one warp a row.
#pragma once

#include "math.h"
#include "memory.h"
#include "numeric.h"

// A part without a valid key has an infinite exponent of either sign. It becomes -inf, so that the
// weight is 0.
DEVICE float part_exponent(float e) {
    return is_infinite(e) ? -INFINITY_F32 : e;
}

// The parts of one row: part s has its columns at `out + s * out_stride` and its base-2
// log-sum-exp at `lse + s * lse_stride`. The functions below require these members of any type of
// parts.
struct StridedParts {
    const float* out;
    const float* lse;
    int64_t out_stride;
    int64_t lse_stride;
    int32_t count;

    float exponent(int32_t part) const { return part_exponent(lse[part * lse_stride]); }
    const float* columns(int32_t part) const { return out + part * out_stride; }
};

// The sum over the parts of 2^(e_s - shift). The shift is the largest e_s, or 0 where all parts
// are empty.
struct CombinedSum {
    float shift, sum;
};
// Every lane of the warp gets the result.
template <typename Parts>
DEVICE CombinedSum combined_sum(const Parts& parts) {
    const int lane = threadIdx.x % WARP_SIZE;
    // A NaN loses this comparison; it enters through the sum.
    float largest = -INFINITY_F32;
    for (int32_t s = lane; s < parts.count; s += WARP_SIZE) largest = maximum_f32(largest, parts.exponent(s));
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        largest = maximum_f32(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    const float shift = largest == -INFINITY_F32 ? 0.0f : largest;
    float sum = 0.0f;
    for (int32_t s = lane; s < parts.count; s += WARP_SIZE) sum += exp2_approx(parts.exponent(s) - shift);
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    return CombinedSum{shift, sum};
}

// Parts whose columns are loaded before any of them is used: with few rows latency limits. A wide
// row has enough loads in one part.
constexpr int parts_at_once(int turns) { return turns <= 2 ? 4 : 1; }

// Adds PARTS_AT_ONCE parts, starting at `first`, to the lane's columns.
template <int COLUMNS, int PARTS_AT_ONCE, int TURNS, typename Parts>
DEVICE void add_parts(float (&sum)[TURNS][8], const Parts& parts, int32_t first, float shift, float inverse) {
    const int lane = threadIdx.x % WARP_SIZE;
    Vec16 columns[PARTS_AT_ONCE][TURNS][2];
    float weight[PARTS_AT_ONCE];
    UNROLL
    for (int p = 0; p < PARTS_AT_ONCE; ++p) {
        // Past the last part the last one is loaded again, with a weight of 0.
        const int32_t part = minimum(first + p, parts.count - 1);
        const float exponent = first + p < parts.count ? parts.exponent(part) : -INFINITY_F32;
        weight[p] = exponent != -INFINITY_F32 ? exp2_approx(exponent - shift) * inverse : -INFINITY_F32;
        UNROLL
        for (int turn = 0; turn < TURNS; ++turn) {
            const int chunk = minimum(turn * static_cast<int>(WARP_SIZE) + lane, COLUMNS / 8 - 1);
            columns[p][turn][0] = load_vec16(parts.columns(part) + chunk * 8);
            columns[p][turn][1] = load_vec16(parts.columns(part) + chunk * 8 + 4);
        }
    }
    UNROLL
    for (int p = 0; p < PARTS_AT_ONCE; ++p) {
        // The columns of an empty part may be NaN, and NaN * 0 is NaN. So the part is skipped.
        if (weight[p] == -INFINITY_F32) continue;
        UNROLL
        for (int turn = 0; turn < TURNS; ++turn)
            UNROLL
            for (int i = 0; i < 8; ++i)
                sum[turn][i] =
                    fused_multiply_add(weight[p], __uint_as_float(columns[p][turn][i / 4].w[i % 4]), sum[turn][i]);
    }
}

// Merges the parts of a row into COLUMNS of bf16 and the natural log-sum-exp. A whole warp takes
// part.
template <int COLUMNS, typename Parts>
DEVICE void combine_row(const Parts& parts, float sink_log2, bf16* out, float* lse) {
    const int lane = threadIdx.x % WARP_SIZE;
    const CombinedSum total = combined_sum(parts);
    const bool empty = total.sum == 0.0f;
    if (lane == 0) *lse = empty ? INFINITY_F32 : (total.shift + log2_approx(total.sum)) * LN_2;
    // The sink enters only here. A large sink is inf in base 2, and so is its power: out is then
    // 0.
    const float inverse = 1.0f / (total.sum + exp2_approx(sink_log2 - total.shift));
    constexpr int TURNS = ceil_div(COLUMNS / 8, static_cast<int>(WARP_SIZE));
    float sum[TURNS][8] = {};
    constexpr int PARTS_AT_ONCE = parts_at_once(TURNS);
    for (int32_t first = 0; first < parts.count; first += PARTS_AT_ONCE)
        add_parts<COLUMNS, PARTS_AT_ONCE>(sum, parts, first, total.shift, inverse);
    UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
        const int chunk = turn * WARP_SIZE + lane;
        if (chunk >= COLUMNS / 8) break;
        Vec16 rounded;
        UNROLL
        for (int i = 0; i < 4; ++i) rounded.w[i] = pack_bf16(sum[turn][2 * i], sum[turn][2 * i + 1]);
        store_vec16(out + chunk * 8, rounded);
    }
}
