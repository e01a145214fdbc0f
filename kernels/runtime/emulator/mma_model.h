// What a GPU's tensor cores make of a warp's matrix product (mma), on the host: included by `mma.h` where the emulator compiles it.
#pragma once

namespace emulator {

struct MmaPayload {
    uint32_t a[4];
    uint32_t b[2];
    float c[4];
};

EMULATOR_INLINE float bf16_half(uint32_t pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); }

// The compiler's own vectors, so that it uses the vector unit at every level of optimisation, in functions that are marked
// for it the widest that the machine has. Each element is computed as a number by itself would be.
#if defined(PARITY_VECTORS)
#define WIDE_VECTORS UNWATCHED __attribute__((target(PARITY_VECTORS)))
#else
#define WIDE_VECTORS UNWATCHED
#endif
// What a matrix product spends its time in is optimised in every module, those of a mutant's few runs, too. (clang knows no such
// attribute, and optimises these well at -Og.)
#if defined(__clang__)
#define OPTIMISED
#else
#define OPTIMISED __attribute__((optimize("O2")))
#endif
typedef double Doubles __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Words __attribute__((vector_size(32)));

// 2^exponent of a number, that of the smallest normal one where it is subnormal; 0 of a zero, and infinity of what is not finite.
UNWATCHED inline float scale_of(float x) {
    const uint32_t bits = __float_as_uint(x), exponent = bits & 0x7f800000u;
    return __uint_as_float((bits & 0x7fffffffu) == 0 ? 0 : exponent == 0 ? 0x00800000u : exponent);
}

UNWATCHED inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// An element of A with its scale.
struct Scaled {
    double value, scale;
    UNWATCHED void set(float x) { value = x, scale = scale_of(x); }
};

// Eight columns of B, or of C.
struct ScaledColumns {
    Doubles value, scale;
    UNWATCHED void set(int n, float x) { value[n] = x, scale[n] = scale_of(x); }
};

// to[i] is x[i] as a float, towards zero.
WIDE_VECTORS OPTIMISED inline void toward_zero(const Doubles& x, float* to) {
    const Floats nearest = __builtin_convertvector(x, Floats);
    const Doubles y = __builtin_convertvector(nearest, Doubles);
    const auto beyond = ((y < 0 ? -y : y) > (x < 0 ? -x : x)) & (y - y == 0);
    // Where y is finite and further from 0 than x, and so not 0: the next value towards it.
    const Words bits = reinterpret_cast<const Words&>(nearest) + __builtin_convertvector(beyond, Words);
    std::memcpy(to, &bits, sizeof(bits));
}

WIDE_VECTORS OPTIMISED inline bool any(const Words& words) {
    uint64_t parts[4];
    std::memcpy(parts, &words, sizeof(parts));
    return (parts[0] | parts[1] | parts[2] | parts[3]) != 0;
}

// Products of bf16 numbers that Hopper's tensor cores add in one step, and 2^bits that they keep below the exponent of the
// largest term.
constexpr int BLOCK_TERMS = 16;
constexpr double ALIGNED = 1 << 25;

// A block in which some operand is infinite or NaN. A column that has none is added as any other, whatever stands beside it: the
// others are the plain sum, and take zeros into that of the finite ones.
template <int TERMS>
struct FiniteTerms {
    Doubles whole;
    Scaled a[TERMS];
    ScaledColumns b[TERMS];
    float row[8];

    WIDE_VECTORS void take(const Scaled* all_a, const ScaledColumns* all_b, const float* all_c) {
        for (int n = 0; n < 8; ++n) whole[n] = all_c[n], row[n] = is_finite(all_c[n]) ? all_c[n] : 0;
        for (int k = 0; k < TERMS; ++k) {
            whole += all_a[k].value * all_b[k].value;
            a[k] = all_a[k].value - all_a[k].value == 0 ? all_a[k] : Scaled{0, 0};
            b[k] = all_b[k];
            for (int n = 0; n < 8; ++n)
                if (b[k].value[n] - b[k].value[n] != 0) b[k].value[n] = b[k].scale[n] = 0;
        }
    }
    WIDE_VECTORS void give(float* to) const {
        toward_zero(whole, to);
        for (int n = 0; n < 8; ++n)
            if (whole[n] - whole[n] == 0) to[n] = row[n];
    }
};

// Eight columns of a row of C + A B as Hopper's tensor cores compute it (reference/src/tensor_core.rs, which is held to an H100
// bit for bit): all terms are cut off at one power of two, that of the largest term's exponent over ALIGNED, where the exponent of
// a product is the sum of its factors' exponents; their sum is exact, and cut off to fp32. Where an operand of a column is infinite
// or NaN, so is its sum.
WIDE_VECTORS OPTIMISED inline void block_sum(const Scaled* a, const ScaledColumns* b, bool finite, float* row) {
    Words bits;
    std::memcpy(&bits, row, sizeof(bits));
    const Words exponent = bits & 0x7f800000, zero = (bits & 0x7fffffff) == 0;
    const Words smallest = {0x00800000, 0x00800000, 0x00800000, 0x00800000, 0x00800000, 0x00800000, 0x00800000, 0x00800000};
    const Words scale_bits = (exponent == 0 ? smallest : exponent) & ~zero;
    const Doubles c = __builtin_convertvector(reinterpret_cast<const Floats&>(bits), Doubles);
    if (!finite || any(exponent == 0x7f800000)) {
        FiniteTerms<BLOCK_TERMS> terms;
        terms.take(a, b, row);
        block_sum(terms.a, terms.b, true, terms.row);
        return terms.give(row);
    }
    Doubles largest = __builtin_convertvector(reinterpret_cast<const Floats&>(scale_bits), Doubles);
    for (int k = 0; k < BLOCK_TERMS; ++k) {
        const Doubles scale = a[k].scale * b[k].scale;
        largest = largest > scale ? largest : scale;
    }
    // A block of zeros has no exponent: any will do.
    largest = largest > 0 ? largest : largest + 1;
    const Doubles finest = largest * (1 / ALIGNED), steps = 1 / finest;
    // In units of the finest bit no term reaches 2^27.
    Doubles sum = __builtin_convertvector(__builtin_convertvector(c * steps, Words), Doubles);
    for (int k = 0; k < BLOCK_TERMS; ++k)
        sum += __builtin_convertvector(__builtin_convertvector(a[k].value * steps * b[k].value, Words), Doubles);
    const Doubles done = sum * finest;
    toward_zero(done, row);
}

WIDE_VECTORS inline void mma_bf16_op(void* const* payloads, uint32_t) {
    Scaled a[16][BLOCK_TERMS];
    ScaledColumns b[BLOCK_TERMS];
    float c[16][8];
    bool finite = true;
    const auto seen = [&](float x) EMULATOR_LAMBDA { finite &= is_finite(x); return x; };
    for (int lane = 0; lane < 32; ++lane) {
        const auto* p = static_cast<const MmaPayload*>(payloads[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                a[g + 8 * (i & 1)][2 * t + half + 8 * (i >> 1)].set(seen(bf16_half(p->a[i], half)));
        for (int i = 0; i < 2; ++i)
            for (int half = 0; half < 2; ++half) b[2 * t + half + 8 * i].set(g, seen(bf16_half(p->b[i], half)));
        for (int i = 0; i < 4; ++i) c[g + 8 * (i >> 1)][2 * t + (i & 1)] = p->c[i];
    }
    for (int m = 0; m < 16; ++m) block_sum(a[m], b, finite, c[m]);
    for (int lane = 0; lane < 32; ++lane) {
        auto* p = static_cast<MmaPayload*>(payloads[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) p->c[i] = c[g + 8 * (i >> 1)][2 * t + (i & 1)];
    }
}

struct LdmatrixPayload {
    const uint8_t* row;
    uint32_t result[4];
};

template <int COUNT, bool TRANSPOSED>
UNWATCHED inline void ldmatrix_op(void* const* payloads, uint32_t) {
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        uint16_t elements[8][8];
        for (int row = 0; row < 8; ++row)
            std::memcpy(elements[row], static_cast<const LdmatrixPayload*>(payloads[8 * matrix + row])->row, 16);
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            const uint32_t low = TRANSPOSED ? elements[2 * t][g] : elements[g][2 * t];
            const uint32_t high = TRANSPOSED ? elements[2 * t + 1][g] : elements[g][2 * t + 1];
            static_cast<LdmatrixPayload*>(payloads[lane])->result[matrix] = low | high << 16;
        }
    }
}

template <int COUNT, bool TRANSPOSED>
inline void ldmatrix(uint32_t (&d)[COUNT], SharedAddress row) {
    const bool named = context->lane < 8 * COUNT;
    LdmatrixPayload payload{named ? shared_pointer(row, 16, "ldmatrix") : nullptr, {}};
    if (named) accessed_by_caller(payload.row, 16, AccessKind::read);
    collective(FULL_WARP, "ldmatrix", ldmatrix_op<COUNT, TRANSPOSED>, payload);
    for (int i = 0; i < COUNT; ++i) d[i] = payload.result[i];
}

}  // namespace emulator
