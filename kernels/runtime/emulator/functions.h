// CUDA's mathematical functions on the host: those of the C library, declared here, since libstdc++'s <cmath> takes longer
// to read than most kernels take to compile. As in CUDA, a function of a float is the float's: exp(x) is expf(x) there, by
// this name and by that of namespace std.
#pragma once

#define IN_STD(name) namespace std { using ::name; }

#define UNARY(name)                                    \
    extern "C" double name(double) noexcept;           \
    extern "C" float name##f(float) noexcept;          \
    inline float name(float x) { return name##f(x); }  \
    IN_STD(name) IN_STD(name##f)

#define BINARY(name)                                               \
    extern "C" double name(double, double) noexcept;               \
    extern "C" float name##f(float, float) noexcept;               \
    inline float name(float x, float y) { return name##f(x, y); }  \
    IN_STD(name) IN_STD(name##f)

// With an integer as its second argument, or as its result.
#define SCALING(name)                                            \
    extern "C" double name(double, int) noexcept;                \
    extern "C" float name##f(float, int) noexcept;               \
    inline float name(float x, int n) { return name##f(x, n); }  \
    IN_STD(name) IN_STD(name##f)

#define INTEGRAL(type, name)                          \
    extern "C" type name(double) noexcept;            \
    extern "C" type name##f(float) noexcept;          \
    inline type name(float x) { return name##f(x); }  \
    IN_STD(name) IN_STD(name##f)

#define CLASSIFICATION(name)                                    \
    inline bool name(float x) { return __builtin_##name(x); }   \
    inline bool name(double x) { return __builtin_##name(x); }  \
    IN_STD(name)

UNARY(sqrt) UNARY(cbrt) UNARY(exp) UNARY(exp2) UNARY(exp10) UNARY(expm1) UNARY(log) UNARY(log2) UNARY(log10) UNARY(log1p)
UNARY(sin) UNARY(cos) UNARY(tan) UNARY(asin) UNARY(acos) UNARY(atan) UNARY(sinh) UNARY(cosh) UNARY(tanh) UNARY(asinh)
UNARY(acosh) UNARY(atanh) UNARY(erf) UNARY(erfc) UNARY(tgamma) UNARY(lgamma) UNARY(logb)
UNARY(fabs) UNARY(floor) UNARY(ceil) UNARY(trunc) UNARY(round) UNARY(rint) UNARY(nearbyint)
BINARY(fmin) BINARY(fmax) BINARY(fmod) BINARY(pow) BINARY(atan2) BINARY(copysign) BINARY(hypot) BINARY(fdim)
BINARY(remainder) BINARY(nextafter)
SCALING(ldexp) SCALING(scalbn)
INTEGRAL(int, ilogb) INTEGRAL(long, lround) INTEGRAL(long, lrint) INTEGRAL(long long, llround) INTEGRAL(long long, llrint)
CLASSIFICATION(isnan) CLASSIFICATION(isinf) CLASSIFICATION(isfinite) CLASSIFICATION(signbit)

extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
IN_STD(fma) IN_STD(fmaf)

#undef IN_STD
#undef UNARY
#undef BINARY
#undef SCALING
#undef INTEGRAL
#undef CLASSIFICATION
