// Number formats: bf16, fp8 e4m3, fp4 e2m1 and the power-of-two scale e8m0 (inference 5.3).
//
// Every conversion gives the same bits on a GPU and in the emulator. If an instruction exists, the
// GPU uses it and the host computes its exact result by hand. If it exists only on newer GPUs,
// older ones run the host's integer arithmetic.
#pragma once

#include "platform.h"

// ---------------------------------------------------------------- bf16

struct bf16 {
    uint16_t bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Nearest, ties to even. NaN becomes 0x7fff; infinities and signed zeros stay.
DEVICE bf16 to_bf16(float x) {
#if defined(PARITY_EMULATOR)
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fff};
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#else
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#endif
}

// Two values in one register, `low` at the lower address.
DEVICE uint32_t pack_bf16(float low, float high) {
#if defined(PARITY_EMULATOR)
    return static_cast<uint32_t>(to_bf16(low).bits) | static_cast<uint32_t>(to_bf16(high).bits) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}
DEVICE float unpack_bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float unpack_bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four bytes, each filled with the sign of one of the eight bytes of the two words. A nibble of
// SELECTOR, the lowest for the lowest byte, is 8 plus the number of that byte; those of `low` are
// 0 to 3.
template <uint32_t SELECTOR>
DEVICE uint32_t byte_signs(uint32_t low, uint32_t high) {
    static_assert((SELECTOR & 0x8888u) == 0x8888u, "signs, not bytes");
#if defined(PARITY_EMULATOR)
    const uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
    uint32_t signs = 0;
    for (int i = 0; i < 4; ++i)
        if (bytes >> (8 * (SELECTOR >> 4 * i & 7u) + 7) & 1u) signs |= 0xffu << 8 * i;
    return signs;
#else
    uint32_t signs;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(low), "r"(high), "n"(SELECTOR));
    return signs;
#endif
}

// Of each half, as unsigned integers.
DEVICE uint32_t maximum_u16x2(uint32_t a, uint32_t b) {
#if defined(PARITY_EMULATOR)
    const uint32_t low_a = a & 0xffffu, low_b = b & 0xffffu, high_a = a >> 16, high_b = b >> 16;
    return (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b) << 16;
#else
    return __vmaxu2(a, b);
#endif
}

#if defined(PARITY_EMULATOR)
// Bits of the nearest binary16, ties to even.
DEVICE uint32_t half_bits(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
    // Below 2^-14 the step is 2^-24, the spacing of floats from 0.5 on: the addition rounds.
    if (magnitude < 0x38800000u) return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u);
    return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
}
// Bits of the binary16 next to a number, towards zero.
DEVICE uint32_t half_bits_toward_zero(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude == 0x7f800000u) return sign | 0x7c00u;
    if (magnitude >= 0x47800000u) return sign | 0x7bffu;  // 65536 and above
    if (magnitude < 0x38800000u) return sign | static_cast<uint32_t>(__uint_as_float(magnitude) * 0x1p24f);
    return sign | (magnitude - (112u << 23)) >> 13;
}
#endif

// Two binary16 in one register, `low` at the lower address.
DEVICE uint32_t pack_half(float low, float high) {
#if defined(PARITY_EMULATOR)
    return half_bits(low) | half_bits(high) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// The same, truncated towards zero: each stays on its side of every binary16.
DEVICE uint32_t pack_half_toward_zero(float low, float high) {
#if defined(PARITY_EMULATOR)
    return half_bits_toward_zero(low) | half_bits_toward_zero(high) << 16;
#else
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

DEVICE uint32_t minimum_u16x2(uint32_t a, uint32_t b) {
#if defined(PARITY_EMULATOR)
    const uint32_t low_a = a & 0xffffu, low_b = b & 0xffffu, high_a = a >> 16, high_b = b >> 16;
    return (low_a < low_b ? low_a : low_b) | (high_a < high_b ? high_a : high_b) << 16;
#else
    return __vminu2(a, b);
#endif
}

#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ >= 900
// a * b of each half, rounded once. (On the host if fp32 holds the product: it is normal, or a
// factor is a power of two.)
DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
#if defined(PARITY_EMULATOR)
    return pack_bf16(unpack_bf16_low(a) * unpack_bf16_low(b), unpack_bf16_high(a) * unpack_bf16_high(b));
#else
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
#endif
}
#endif

// a * b + c of each half, rounded once. (On the host if fp32 holds the product and the sum, or
// rounds only far from a tie of bf16.)
DEVICE uint32_t multiply_add_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
#if defined(PARITY_EMULATOR)
    return pack_bf16(unpack_bf16_low(a) * unpack_bf16_low(b) + unpack_bf16_low(c),
                     unpack_bf16_high(a) * unpack_bf16_high(b) + unpack_bf16_high(c));
#else
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
#endif
}

// ---------------------------------------------------------------- fp8 e4m3 (finite, up to 448)

struct fp8_e4m3 {
    uint8_t bits;
};

// The integer form of to_e4m3, for GPUs before sm_89 and for the host.
DEVICE uint8_t e4m3_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 24) & 0x80u;
    if (magnitude > 0x7f800000u) return 0x7f;
    if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and above
    if (magnitude < 0x3c800000u) {
        // Below 2^-6 the step is 2^-9, which is the spacing of floats from 2^14 on: the addition
        // rounds.
        const uint32_t steps = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;
        return static_cast<uint8_t>(sign | steps);
    }
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// Nearest, ties to even; beyond +-448, infinities included, +-448; NaN becomes 0x7f.
DEVICE fp8_e4m3 to_e4m3(float x) {
#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ < 890
    return fp8_e4m3{e4m3_bits(x)};
#else
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return fp8_e4m3{static_cast<uint8_t>(pair)};
#endif
}

// Two of them, `low` in the lower byte.
DEVICE uint32_t pack_e4m3(float low, float high) {
#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ < 890
    return e4m3_bits(low) | static_cast<uint32_t>(e4m3_bits(high)) << 8;
#else
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// Exact. Both NaN codes become the NaN 0x7fffffff.
DEVICE float to_float(fp8_e4m3 x) {
    const uint32_t magnitude = x.bits & 0x7fu;
    if (magnitude == 0x7fu) return __uint_as_float(0x7fffffffu);
    // The bits as a float's are 2^(7-127) too small, subnormals included.
    const float scaled = __fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f);
    return __uint_as_float(__float_as_uint(scaled) | static_cast<uint32_t>(x.bits & 0x80u) << 24);
}

// Two codes, `low` of them in the lower byte. Exact; the same values as to_float's.
DEVICE void e4m3x2_to_float(uint32_t codes, float& low, float& high) {
#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ < 890
    low = to_float(fp8_e4m3{static_cast<uint8_t>(codes)});
    high = to_float(fp8_e4m3{static_cast<uint8_t>(codes >> 8)});
#else
    // fp16 holds every e4m3 number.
    asm("{ .reg .b16 low, high; .reg .b32 pair; cvt.rn.f16x2.e4m3x2 pair, %2; mov.b32 {low, high}, pair; "
        "cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(low), "=f"(high)
        : "h"(static_cast<uint16_t>(codes)));
#endif
}

#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ >= 900
// Four codes times a scale that is a power of two or NaN, in bf16: to_bf16(to_float(code) *
// to_float(scale)) of each. `first` has the codes of the two lower bytes. No conversion
// instructions: those run at a fraction of the others' rate.
DEVICE void e4m3x4_to_bf16(uint32_t codes, bf16 scale, uint32_t& first, uint32_t& second) {
    constexpr uint32_t TWO_TO_120 = 0x7b807b80u, BEYOND_448 = 0x7b107b10u;  // 2^119 * 9/8
    const uint32_t scales = static_cast<uint32_t>(scale.bits) * 0x10001u;
    // The bytes of the bf16 with the code's bits. High: sign, four zeros, three of the exponent's
    // four bits; low: the last one, mantissa.
    const uint32_t high = (codes & 0x80808080u) | (codes >> 4 & 0x07070707u), low = codes << 4 & 0xf0f0f0f0u;
    const auto convert = [&](uint32_t bits) {
        // They are 2^(7-127) too small, subnormals included.
        const uint32_t value = multiply_bf16x2(bits, TWO_TO_120);
        // The code of NaN became 480, and no other value is above 448. So only 480 * 2^119 * 9/8
        // overflows, and inf * 0 is NaN. All others give a zero of the value's sign.
        const uint32_t nan_or_zero = multiply_bf16x2(multiply_bf16x2(value, BEYOND_448), 0);
        return multiply_add_bf16x2(value, scales, nan_or_zero);
    };
    first = convert(__byte_perm(low, high, 0x5140));
    second = convert(__byte_perm(low, high, 0x7362));
}
#else
// The same by floats, where no packed bf16 multiplication exists.
DEVICE void e4m3x4_to_bf16(uint32_t codes, bf16 scale, uint32_t& first, uint32_t& second) {
    const auto convert = [=](uint32_t pair) {
        float low, high;
        e4m3x2_to_float(pair, low, high);
        return pack_bf16(low * to_float(scale), high * to_float(scale));
    };
    first = convert(codes & 0xffffu);
    second = convert(codes >> 16);
}
#endif

// ---------------------------------------------------------------- fp4 e2m1 (up to 6), low 4 bits

// Nearest, ties to even; beyond +-6, infinities included, +-6; NaN becomes +6, as satfinite does.
// Values below 2 are multiples of 0.5, those below 4 of 1 and those up to 6 of 2. A sum with a
// large number rounds to each of these, its last bits count the codes, and the right one of three
// is the least.
DEVICE uint8_t to_e2m1(float x) {
    const uint32_t bits = __float_as_uint(x), magnitude_bits = bits & 0x7fffffffu;
    if (magnitude_bits > 0x7f800000u) return 7;
    const float m = magnitude_bits > 0x40c00000u ? 6.0f : __uint_as_float(magnitude_bits);
    const uint32_t halves = __float_as_uint(__fadd_rn(m, 4194304.0f)) & 15u;
    const uint32_t ones = __float_as_uint(__fadd_rn(m, 8388608.0f + 2.0f)) & 15u;
    const uint32_t twos = __float_as_uint(__fadd_rn(m, 16777216.0f + 8.0f)) & 15u;
    return static_cast<uint8_t>(minimum(minimum(halves, ones), twos) | ((bits >> 28) & 8u));
}

// Exact; the upper four bits of `code` are ignored. Code 8 is -0.
DEVICE float e2m1_to_float(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
    const uint32_t magnitude = code & 7u;
    const uint32_t normal = ((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22;
    const uint32_t small = magnitude ? 0x3f000000u : 0u;  // 0.5 is the one subnormal
    return __uint_as_float(sign | (magnitude < 2u ? small : normal));
}

#if defined(PARITY_EMULATOR) || __CUDA_ARCH__ >= 900
// Eight codes, the first in the lowest bits, times a scale that is a power of two or NaN, in bf16:
// exactly, or infinite beyond bf16's range.
DEVICE void e2m1x8_to_bf16(uint32_t codes, bf16 scale, uint32_t (&pairs)[4]) {
    constexpr uint32_t TWO_TO_126 = 0x7e807e80u;
    const uint32_t scales = static_cast<uint32_t>(scale.bits) * 0x10001u;
    const uint32_t even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
    // The bytes of the bf16 with the code's bits. High: sign, six zeros, the upper bit of the
    // exponent; low: its lower bit, mantissa.
    const auto high = [](uint32_t code) { return (code << 4 & 0x80808080u) | (code >> 2 & 0x01010101u); };
    const auto low = [](uint32_t code) { return code << 6 & 0xc0c0c0c0u; };
    const uint32_t even_low = low(even), even_high = high(even), odd_low = low(odd), odd_high = high(odd);
    const uint32_t evens[2] = {__byte_perm(even_low, even_high, 0x5140), __byte_perm(even_low, even_high, 0x7362)};
    const uint32_t odds[2] = {__byte_perm(odd_low, odd_high, 0x5140), __byte_perm(odd_low, odd_high, 0x7362)};
    UNROLL
    for (int i = 0; i < 4; ++i) {
        // They are 2^(1-127) too small, subnormals included.
        const uint32_t bits = __byte_perm(evens[i / 2], odds[i / 2], i % 2 ? 0x7632 : 0x5410);
        pairs[i] = multiply_bf16x2(multiply_bf16x2(bits, TWO_TO_126), scales);
    }
}
#endif

// ---------------------------------------------------------------- e8m0: 2^(byte - 127), 255: NaN

// The smallest power of two that is not below x: exponent + (mantissa != 0), on the bits
// (inference 5.4). 0 and values below 2^-127 give 0; beyond 2^127 gives 254. No code means a
// negative scale, so a negative x gives NaN, like NaN itself; -0 gives 0.
DEVICE uint8_t to_e8m0(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (bits == 0x80000000u) return 0;
    if (bits > 0x7f800000u) return 255;
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
    if (exponent == 0) return mantissa > 0x400000u ? 1 : 0;
    return static_cast<uint8_t>(minimum(exponent + (mantissa != 0 ? 1u : 0u), 254u));
}

// Exact; 0 is the subnormal 2^-127.
DEVICE float e8m0_to_float(uint8_t byte) {
    if (byte == 255) return __uint_as_float(0x7fffffffu);
    return __uint_as_float(byte == 0 ? 0x400000u : static_cast<uint32_t>(byte) << 23);
}
// Exact, too.
DEVICE bf16 e8m0_to_bf16(uint8_t byte) { return bf16{static_cast<uint16_t>(__float_as_uint(e8m0_to_float(byte)) >> 16)}; }

// ---------------------------------------------------------------- elements of generic kernels

// What a kernel for "bf16 or float" needs of its element type. `T` is stored, arithmetic is fp32,
// and a store rounds once.
//   Element<T>::per_word, per_vec16    elements in 4 and in 16 bytes
//   Element<T>::load(p), store(p, x)   one element
//   Element<T>::unpack(word, out), pack(in)    the per_word elements of one 32-bit word
template <typename T>
struct Element;

template <>
struct Element<float> {
    static constexpr int per_word = 1;
    static constexpr int per_vec16 = 4;
    DEVICE float load(const float* p) { return *p; }
    DEVICE void store(float* p, float x) { *p = x; }
    DEVICE void unpack(uint32_t word, float* out) { out[0] = __uint_as_float(word); }
    DEVICE uint32_t pack(const float* in) { return __float_as_uint(in[0]); }
};

template <>
struct Element<bf16> {
    static constexpr int per_word = 2;
    static constexpr int per_vec16 = 8;
    DEVICE float load(const bf16* p) { return to_float(*p); }
    DEVICE void store(bf16* p, float x) { *p = to_bf16(x); }
    DEVICE void unpack(uint32_t word, float* out) {
        out[0] = unpack_bf16_low(word);
        out[1] = unpack_bf16_high(word);
    }
    DEVICE uint32_t pack(const float* in) { return pack_bf16(in[0], in[1]); }
};
