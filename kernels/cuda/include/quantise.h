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

// Codes in e2m1 of eight numbers of bf16 divided by the scale of their group, at most 6 then, the first in the lowest nibble; of
// the scale that is NaN, 7 (+6) each. A binary16 that is 2^14 times smaller has the code in its bits: 0 and 0.5 are subnormal, and
// all but the highest bit of the mantissa is rounded away by an addition, of two numbers at a time.
DEVICE uint32_t e2m1_codes(const float* numbers, uint8_t scale) {
    const float factor = inverse_of_scale(scale) * 0x1p-14f;
    uint32_t codes = 0;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        // Four numbers apart, so that both codes are in their place.
        const uint32_t pair = pack_half(numbers[i] * factor, numbers[i + 4] * factor);
        const uint32_t rounded = pair + 0x00ff00ffu + (pair >> 9 & 0x00010001u);
        const uint32_t magnitudes = i < 3 ? rounded >> (9 - 4 * i) : rounded << 3;
        codes |= magnitudes & 0x00070007u << 4 * i;
        codes |= pair >> (12 - 4 * i) & 0x00080008u << 4 * i;
    }
    return scale == 255 ? 0x77777777u : codes;
}
