// Groups of e4m3 codes with their scales (inference 5.4); quantize_fp8.cu has the formulas.
//
// The parameters of kernels that quantize have the fields of groups.h and scale_layout.h, codes
// and codes_row_stride [num_rows, width], and scale_type (fp8_scales.h). log2_group is the
// logarithm of a group's elements, 16 at least.
#pragma once

#include "fp8_scales.h"
#include "groups.h"

// 1 / s of a scale that is a power of two; NaN stays NaN.
DEVICE float inverse_of_power(float scale) {
    return is_nan(scale) ? scale : __uint_as_float(0x7f000000u - __float_as_uint(scale));
}

// The codes of numbers x of a group with this scale.
template <typename Params>
DEVICE void codes_of(const Params& params, float (&x)[SPAN], float scale, uint32_t (&codes)[SPAN / 4]) {
    if (params.scale_type == FP32) {
        // Scales are normal numbers or NaN, and so are their inverses.
        const float inverse = reciprocal_of_normal(scale);
        UNROLL
        for (int i = 0; i < SPAN; ++i) x[i] = divided_for_e4m3(x[i], scale, inverse);
        e4m3_codes(x, 1.0f, codes);
    } else {
        e4m3_codes(x, inverse_of_power(scale), codes);
    }
}

// The same of elements as stored. Elements of bf16 are multiplied by a power of two in bf16, two
// at a time. Only products that are zeros in e4m3 are rounded by that.
template <typename Params, typename T>
DEVICE void codes_of(const Params& params, const Raw<T>& raw, float scale, uint32_t (&codes)[SPAN / 4]) {
    float x[SPAN];
    if (sizeof(T) == 2 && params.scale_type != FP32) {
        const float inverse = inverse_of_power(scale);
        const uint32_t both = pack_bf16(inverse, inverse), negative_zeros = 0x80008000u;
        Raw<T> scaled;
        UNROLL
        for (int i = 0; i < 4 * Raw<T>::VECTORS; ++i)
            scaled.vectors[i / 4].w[i % 4] = multiply_add_bf16x2(raw.vectors[i / 4].w[i % 4], both, negative_zeros);
        unpack_stored(scaled, x);
        e4m3_codes(x, 1.0f, codes);
    } else {
        unpack_stored(raw, x);
        codes_of(params, x, scale, codes);
    }
}

// Stores the first `count` of them.
template <bool WIDE, typename Params, typename Numbers>
DEVICE void store_codes(const Params& params, const Span& span, Numbers& x, float scale) {
    if (span.count == 0) return;
    uint32_t codes[SPAN / 4];
    codes_of(params, x, scale, codes);
    store_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column, codes, span.count);
}

// Quantizes a warp's part of a row of groups, 16 elements a lane, as floats or as stored. Stored
// bf16 elements are compared two at a time. All lanes take part. `has_scales`: whether this lane
// stores the row's scales, padding included.
template <bool WIDE, typename Params, typename Numbers>
DEVICE void quantize_span(const Params& params, const Span& span, Numbers& x, bool has_scales = true) {
    const int group_lanes = (1 << params.log2_group) / SPAN;
    const float scale = scale_of(params, largest(largest_magnitude(x), group_lanes));
    store_codes<WIDE>(params, span, x, scale);
    const int32_t group = span.column >> params.log2_group;
    if (has_scales && (lane_id() & (group_lanes - 1)) == 0 && group < params.padded_groups) {
        const bool exists = span.row < params.num_rows && group < params.num_groups;
        store_scale(params, scale_place(params, span.row, group), scale, exists);
    }
}
