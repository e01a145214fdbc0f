// Scalar fp32 arithmetic: the hardware's fast approximations by name, and constants.
//
// Each approximate function is one instruction of the special-function unit. Its error is a few
// ulps of fp32, far below one bf16 rounding. It is stated here, so that a kernel's choice is
// informed. The host bodies are the correctly rounded functions.
#pragma once

#include "platform.h"

constexpr float INFINITY_F32 = __builtin_bit_cast(float, 0x7f800000u);
constexpr float NAN_F32 = __builtin_bit_cast(float, 0x7fc00000u);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.69314718055994531f;

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_infinite(float x) { return x == INFINITY_F32 || x == -INFINITY_F32; }
DEVICE bool is_finite(float x) { return x - x == 0.0f; }

// a*b + c with one rounding, whatever the compiler's contraction setting is.
DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// The larger operand; a NaN operand loses to a number.
DEVICE float maximum_f32(float a, float b) {
#if defined(PARITY_EMULATOR)
    return fmaxf(a, b);
#else
    float y;
    asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// The larger operand, or NaN if one is NaN: a result of a NaN must not look like a number.
DEVICE float maximum_or_nan_f32(float a, float b) {
#if defined(PARITY_EMULATOR)
    return is_nan(a) || is_nan(b) ? NAN_F32 : fmaxf(a, b);
#else
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// The smaller operand; a NaN operand loses to a number.
DEVICE float minimum_f32(float a, float b) {
#if defined(PARITY_EMULATOR)
    return fminf(a, b);
#else
    float y;
    asm("min.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// The smaller operand, or NaN if one is NaN.
DEVICE float minimum_or_nan_f32(float a, float b) {
#if defined(PARITY_EMULATOR)
    return is_nan(a) || is_nan(b) ? NAN_F32 : fminf(a, b);
#else
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#endif
}

// |x|, the sign bit cleared (NaN stays NaN).
DEVICE float absolute_f32(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffu); }

// 2^x, relative error at most 2^-22.5; subnormal arguments and results are flushed to 0.
DEVICE float exp2_approx(float x) {
#if defined(PARITY_EMULATOR)
    const float y = exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// log2(x), relative error 2^-22 away from 1 and absolute error 2^-22 near it; 0 gives -inf.
DEVICE float log2_approx(float x) {
#if defined(PARITY_EMULATOR)
    return log2f(x);
#else
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// log2_approx where x is not subnormal: without the instructions that scale such a value.
DEVICE float log2_normal_approx(float x) {
#if defined(PARITY_EMULATOR)
    return log2f(x);
#else
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1/sqrt(x), relative error at most 2^-22.4.
DEVICE float rsqrt_approx(float x) {
#if defined(PARITY_EMULATOR)
    return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
#else
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1/x, relative error at most 2^-23; 0 gives inf, inf gives 0.
DEVICE float reciprocal_approx(float x) {
#if defined(PARITY_EMULATOR)
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// reciprocal_approx where a result below 2^-126 may be 0: without the three instructions that
// scale such a value.
DEVICE float reciprocal_normal_approx(float x) {
#if defined(PARITY_EMULATOR)
    const float y = 1.0f / x;
    return y < 1.17549435e-38f && y > -1.17549435e-38f ? 0.0f : y;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// 1/x, rounded once, where neither is subnormal: one correction of an approximation within one
// ulp.
DEVICE float reciprocal_of_normal(float x) {
    const float inverse = reciprocal_normal_approx(x);
    return fused_multiply_add(inverse, fused_multiply_add(-inverse, x, 1.0f), inverse);
}

// A maximum that may be subtracted: (-inf) - (-inf) would be NaN if a row has no valid slot.
DEVICE float subtrahend(float row_maximum) {
    return row_maximum == -INFINITY_F32 ? 0.0f : row_maximum;
}
