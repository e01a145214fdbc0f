// Scales of groups of codes: powers of two, as e8m0 bytes (inference 5.4).
#pragma once

#include "math.h"
#include "numeric.h"

constexpr float E2M1_FLOOR = 6.0f * 0x1p-126f;  // least amax of a group of e2m1: its scale stays a normal number
constexpr float E4M3_FLOOR = 1e-4f;             // and of e4m3

// The largest magnitude over `lanes` neighbouring lanes. Bits of magnitudes are ordered as they are, NaN above infinity.
DEVICE float largest(uint32_t magnitude, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        magnitude = maximum(magnitude, __shfl_xor_sync(FULL_WARP, magnitude, distance));
    return __uint_as_float(magnitude);
}

// The scale of a group with this largest magnitude: 2^ceil(log2(max(amax, floor) / largest)), 255 (NaN) for what is not finite.
DEVICE uint8_t group_scale(float amax, float floor, float inverse_of_largest) {
    return is_finite(amax) ? to_e8m0(__fmul_rn(maximum_f32(amax, floor), inverse_of_largest)) : 255;
}

// 1 / s: s is a power of two, and so is its inverse, whose byte is 254 - that of s. NaN of NaN.
DEVICE float inverse_of_scale(uint8_t scale) {
    return scale == 255 ? NAN_F32 : e8m0_to_float(static_cast<uint8_t>(254 - scale));
}
