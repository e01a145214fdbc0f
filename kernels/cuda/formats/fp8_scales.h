// Scales of groups of e4m3 codes (inference 5.4); quantize_fp8.cu has the formulas.
//
// The parameters of kernels that store them have the fields of scale_layout.h, and scale_type, one
// of the constants below.
#pragma once

#include "quantize.h"
#include "scale_layout.h"

constexpr int E8M0 = 0, POWER_OF_TWO = 1, FP32 = 2;

// The scale of a group with this largest magnitude.
template <typename Params>
DEVICE float scale_of(const Params& params, float amax) {
    if (params.scale_type == FP32) return group_scale_f32(amax, E4M3_FLOOR, 1.0f / 448.0f);
    const uint8_t scale = group_scale(amax, E4M3_FLOOR, 1.0f / 448.0f);
    return scale == 255 ? NAN_F32 : __uint_as_float(uint32_t{scale} << 23);
}

// A scale that is a power of two, or NaN, as its e8m0 byte.
DEVICE uint8_t scale_byte(float scale) { return static_cast<uint8_t>(is_nan(scale) ? 255u : __float_as_uint(scale) >> 23); }

// Stores the scale of a group that exists, or 0 for padding.
template <typename Params>
DEVICE void store_scale(const Params& params, int64_t place, float scale, bool exists) {
    if (params.scale_type == E8M0) {
        params.scales[place] = exists ? scale_byte(scale) : 0;
    } else {
        reinterpret_cast<float*>(params.scales)[place] = exists ? scale : 0.0f;
    }
}
