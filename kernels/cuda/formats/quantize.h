// Scales of groups of codes: powers of two, as e8m0 bytes (inference 5.4).
#pragma once

#include "math.h"
#include "memory.h"
#include "numeric.h"

constexpr float E2M1_FLOOR = 6.0f * 0x1p-126f;  // least amax of a group of e2m1: its scale stays a normal number
constexpr float E4M3_FLOOR = 1e-4f;             // and of e4m3

// The largest magnitude, as bits: NaN is above infinity, infinity above all finite values.
template <int COUNT>
DEVICE uint32_t largest_magnitude(const float (&x)[COUNT]) {
    uint32_t magnitude = 0;
    UNROLL
    for (int i = 0; i < COUNT; ++i) magnitude = maximum(magnitude, __float_as_uint(x[i]) & 0x7fffffffu);
    return magnitude;
}

// The same of eight bf16 values, two at a time.
DEVICE uint32_t largest_magnitude(const Vec16& x) {
    uint32_t pair = 0;
    UNROLL
    for (int i = 0; i < 4; ++i) pair = maximum_u16x2(pair, x.w[i] & 0x7fff7fffu);
    return maximum(pair << 16, pair & 0xffff0000u);
}

// The largest magnitude over `lanes` neighbouring lanes. Bits of magnitudes sort like values, NaN
// above infinity.
DEVICE float largest(uint32_t magnitude, int lanes) {
    if (lanes == 8) {
        // Groups of 128 need no loop.
        UNROLL
        for (int distance = 4; distance > 0; distance /= 2)
            magnitude = maximum(magnitude, __shfl_xor_sync(FULL_WARP, magnitude, distance));
        return __uint_as_float(magnitude);
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        magnitude = maximum(magnitude, __shfl_xor_sync(FULL_WARP, magnitude, distance));
    return __uint_as_float(magnitude);
}

// to_e8m0 of a positive normal number, in two instructions.
DEVICE uint8_t normal_to_e8m0(float x) { return static_cast<uint8_t>((__float_as_uint(x) + 0x7fffffu) >> 23); }

// The scale of a group with this largest magnitude: 2^ceil(log2(max(amax, floor) / largest)), or
// 255 (NaN) if amax is not finite. The floors and the largest codes keep the byte within 1 to 253.
DEVICE uint8_t group_scale(float amax, float floor, float inverse_of_largest) {
    return is_finite(amax) ? normal_to_e8m0(__fmul_rn(maximum_f32(amax, floor), inverse_of_largest)) : 255;
}

// 1 / s of the scale of a group. s is a power of two, and the byte of its inverse is 254 minus
// that of s. NaN gives NaN.
DEVICE float inverse_of_scale(uint8_t scale) {
    return scale == 255 ? NAN_F32 : __uint_as_float((254u - scale) << 23);
}

// The scale that need not be a power of two: amax / largest by a product, NaN if amax is not
// finite.
DEVICE float group_scale_f32(float amax, float floor, float inverse_of_largest) {
    return is_finite(amax) ? __fmul_rn(maximum_f32(amax, floor), inverse_of_largest) : NAN_F32;
}

// x / divisor, rounded once. inverse is 1 / divisor, rounded once, and neither is subnormal. Two
// corrections by the remainder; the second starts within one ulp. The remainder loses the sign of
// a zero, so it is restored.
DEVICE float divided(float x, float divisor, float inverse) {
    float quotient = __fmul_rn(x, inverse);
    UNROLL
    for (int step = 0; step < 2; ++step)
        quotient = fused_multiply_add(fused_multiply_add(-quotient, divisor, x), inverse, quotient);
    return __uint_as_float((__float_as_uint(quotient) & 0x7fffffffu) | (__float_as_uint(x) & 0x80000000u));
}

// A quotient as above with one correction: its e4m3 equals e4m3 of the quotient rounded once. They
// could differ only where the two are on different sides of a tie of e4m3, or one of them on it.
// Checked for all 2^23 mantissas of a divisor, all 16 ties of an octave, and the eleven numbers x
// next to the product of both: none differs. With the product x * inverse only, one of 20 does.
// The remainder is q * divisor - x, which keeps the sign of a zero.
DEVICE float divided_for_e4m3(float x, float divisor, float inverse) {
    const float quotient = __fmul_rn(x, inverse);
    return fused_multiply_add(-fused_multiply_add(quotient, divisor, -x), inverse, quotient);
}

// Whether x * (1 / divisor), each rounded once, can have another e2m1 code than x / divisor,
// rounded once, for a bf16 x. Codes change at 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and 5: powers of
// two times 1, 3, 5 and 7. Product and quotient are within 2^-23 of the exact value. So they are
// on one side of such a threshold unless x is within four ulps of the threshold times the divisor.
// The last 16 bits of a bf16, as a float, are 0. For divisors far from underflow. One divisor in
// two thousand can, but all with few bits.
DEVICE bool e2m1_needs_quotients(float divisor) {
    uint32_t nearest = 0xffffu;
    UNROLL
    for (int factor = 1; factor < 8; factor += 2)
        nearest = minimum(nearest, (__float_as_uint(static_cast<float>(factor) * divisor) + 4u) & 0xffffu);
    return nearest < 8u;
}

// The sign of each of eight 16-bit numbers in the highest bit of its nibble. Word i has number i
// in its lower half and number i + 4 in the upper one.
DEVICE uint32_t nibble_signs(const uint32_t (&pairs)[4]) {
    // Byte j is filled with the sign of number 2 j in low_signs, of number 2 j + 1 in high_signs.
    const uint32_t low_signs = byte_signs<0xfbd9>(pairs[0], pairs[2]), high_signs = byte_signs<0xfbd9>(pairs[1], pairs[3]);
    return (low_signs & 0x08080808u) | (high_signs & 0x80808080u);
}

// e2m1 codes of eight numbers times 2^14 `factor`, the first in the lowest nibble. The products
// are below 7, and none is where codes change.
// The smallest normal exponent of e2m1 is 2^0, with one fraction bit also below it; that of
// binary16 is 2^-14. So a code is the two lowest exponent bits and the first fraction bit, after
// half a unit of that bit is added.
DEVICE uint32_t e2m1_codes_of_products(const float* numbers, float factor) {
    uint32_t pairs[4], codes = 0;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        pairs[i] = pack_half_toward_zero(numbers[i] * factor, numbers[i + 4] * factor);
        codes |= (pairs[i] + 0x01000100u) >> 9 << 4 * i & 0x00070007u << 4 * i;
    }
    return codes | nibble_signs(pairs);
}

// e4m3 codes of numbers times the inverse of their scale, four in a word, the first lowest.
template <int COUNT>
DEVICE void e4m3_codes(const float (&x)[COUNT], float inverse, uint32_t (&codes)[COUNT / 4]) {
    UNROLL
    for (int i = 0; i < COUNT; i += 4)
        codes[i / 4] = pack_e4m3(x[i] * inverse, x[i + 1] * inverse) | pack_e4m3(x[i + 2] * inverse, x[i + 3] * inverse) << 16;
}

// Consecutive words: in one access, or the first `bytes` of them byte by byte.
template <bool WIDE, int WORDS>
DEVICE void store_words(uint8_t* target, const uint32_t (&words)[WORDS], int bytes = 4 * WORDS) {
    if constexpr (WIDE && WORDS == 4) {
        store_vec16(target, Vec16{{words[0], words[1], words[2], words[3]}});
    } else if constexpr (WIDE && WORDS == 2) {
        *reinterpret_cast<uint64_t*>(target) = words[0] | static_cast<uint64_t>(words[1]) << 32;
    } else {
        UNROLL
        for (int i = 0; i < 4 * WORDS; ++i)
            if (i < bytes) target[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
    }
}

// The same as loads; bytes after the first `bytes` are 0.
template <bool WIDE, int WORDS>
DEVICE void load_words(const uint8_t* source, uint32_t (&words)[WORDS], int bytes = 4 * WORDS) {
    if constexpr (WIDE && WORDS == 4) {
        const Vec16 vector = load_vec16_streaming(source);
        UNROLL
        for (int i = 0; i < WORDS; ++i) words[i] = vector.w[i];
    } else if constexpr (WIDE && WORDS == 2) {
        const uint64_t pair = *reinterpret_cast<const uint64_t*>(source);
        words[0] = static_cast<uint32_t>(pair);
        words[1] = static_cast<uint32_t>(pair >> 32);
    } else {
        UNROLL
        for (int i = 0; i < WORDS; ++i) words[i] = 0;
        UNROLL
        for (int i = 0; i < 4 * WORDS; ++i)
            if (i < bytes) words[i / 4] |= static_cast<uint32_t>(source[i]) << 8 * (i % 4);
    }
}

// e2m1 codes of eight bf16 numbers divided by the scale of their group (at most 6 then), the first
// in the lowest nibble. A NaN scale gives 7 (+6) each. Word i has number i in its lower half and
// number i + 4 in the upper one.
// e2m1 values below 2 are multiples of 0.5, those below 4 of 1, those up to 6 of 2. The step of
// bf16 is 0.5 below 128 and 1 above. So two sums round to these values, once each, and the code is
// the distance of a sum's bits from those of 126:
//     126 + z, right up to 4 and larger above,  128 + z / 2, right from 4 on and larger below
DEVICE uint32_t e2m1_codes(const uint32_t (&pairs)[4], uint8_t scale) {
    constexpr uint32_t FIRST = 0x42fc42fcu, FIFTH = 0x43004300u, LAST = FIRST + 0x00070007u, SIGNS = 0x80008000u;
    const float inverse = inverse_of_scale(scale), half = inverse * 0.5f;
    const uint32_t factors[2] = {pack_bf16(inverse, inverse), pack_bf16(half, half)};
    uint32_t codes = 0;
    UNROLL
    for (int i = 3; i >= 0; --i) {
        const uint32_t magnitudes = pairs[i] & ~SIGNS;
        const uint32_t code = minimum_u16x2(multiply_add_bf16x2(magnitudes, factors[0], FIRST),
                                            multiply_add_bf16x2(magnitudes, factors[1], FIFTH));
        // NaN is above all numbers.
        codes = codes * 16 + minimum_u16x2(code, LAST);
    }
    // FIRST was added in all four words. NaN has no sign.
    return codes + (scale == 255 ? 0u : nibble_signs(pairs)) - FIRST * 0x1111u;
}

// The same of eight floats that bf16 holds.
DEVICE uint32_t e2m1_codes(const float* numbers, uint8_t scale) {
    uint32_t pairs[4];
    UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(numbers[i], numbers[i + 4]);
    return e2m1_codes(pairs, scale);
}

// The same of sixteen numbers of any type, in two words.
template <typename T>
DEVICE void e2m1_codes_of(const float (&x)[16], uint8_t scale, uint32_t (&codes)[2]) {
    if constexpr (sizeof(T) == 2) {
        codes[0] = e2m1_codes(x, scale);
        codes[1] = e2m1_codes(x + 8, scale);
    } else {
        const float inverse = inverse_of_scale(scale);
        codes[0] = codes[1] = 0;
        UNROLL
        for (int i = 0; i < 16; ++i) codes[i / 8] |= static_cast<uint32_t>(to_e2m1(x[i] * inverse)) << 4 * (i % 8);
    }
}
