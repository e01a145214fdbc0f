// The merge of partial attention results (inference 8.2), one warp a row.
#pragma once

#include "math.h"
#include "memory.h"
#include "numeric.h"

// A part that has seen no key says so by an infinity of either sign; its exponent is -inf, so that its weight is 0.
DEVICE float part_exponent(float e) {
    return is_infinite(e) ? -INFINITY_F32 : e;
}

// The parts of one row: part s has its columns at `out + s * out_stride` and its base-2 log-sum-exp at
// `lse + s * lse_stride`. What the functions below ask of any kind of parts.
struct StridedParts {
    const float* out;
    const float* lse;
    int64_t out_stride;
    int64_t lse_stride;
    int32_t count;

    float exponent(int32_t part) const { return part_exponent(lse[part * lse_stride]); }
    const float* columns(int32_t part) const { return out + part * out_stride; }
};

// The sum over the parts of 2^(e_s - shift), with the largest e_s as the shift (0 where all parts are empty).
struct CombinedSum {
    float shift, sum;
};
// Every lane of the warp gets it.
template <typename Parts>
DEVICE CombinedSum combined_sum(const Parts& parts) {
    const int lane = threadIdx.x % WARP_SIZE;
    // A NaN loses this comparison, and enters by the sum.
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

// Merges the parts of a row into COLUMNS of bf16 and the natural log-sum-exp. A whole warp takes part.
template <int COLUMNS, typename Parts>
DEVICE void combine_row(const Parts& parts, float sink_log2, bf16* out, float* lse) {
    const int lane = threadIdx.x % WARP_SIZE;
    const CombinedSum total = combined_sum(parts);
    const bool empty = total.sum == 0.0f;
    if (lane == 0) *lse = empty ? INFINITY_F32 : (total.shift + log2_approx(total.sum)) * LN_2;
    // Here the sink enters, and nowhere else. A large one is inf in base 2, and so is its power: out is then 0.
    const float inverse = 1.0f / (total.sum + exp2_approx(sink_log2 - total.shift));
    for (int chunk = lane; chunk < COLUMNS / 8; chunk += WARP_SIZE) {
        float sum[8] = {};
        UNROLL_BY(4)
        for (int32_t s = 0; s < parts.count; ++s) {
            const float exponent = parts.exponent(s);
            // What an empty part left may be NaN, which a weight of 0 would not silence: it is not read.
            const bool counts = exponent != -INFINITY_F32;
            const float weight = counts ? exp2_approx(exponent - total.shift) * inverse : 0.0f;
            const float* source = parts.columns(s) + chunk * 8;
            Vec16 low{{0, 0, 0, 0}}, high{{0, 0, 0, 0}};
            if (counts) low = load_vec16(source);
            if (counts) high = load_vec16(source + 4);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                sum[i] = fused_multiply_add(weight, __uint_as_float(low.w[i]), sum[i]);
                sum[4 + i] = fused_multiply_add(weight, __uint_as_float(high.w[i]), sum[4 + i]);
            }
        }
        Vec16 rounded;
        UNROLL
        for (int i = 0; i < 4; ++i) rounded.w[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
        store_vec16(out + chunk * 8, rounded);
    }
}
