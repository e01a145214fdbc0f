// Warp matrix instructions: ldmatrix and mma.sync m16n8k16 (bf16 operands, fp32 accumulators).
// Every lane of the warp must take part.
//
// Fragments, for lane = 4*g + t (g = 0..7, t = 0..3); {x, y} packs x in the low half:
//   A (16 x 16, row = m, column = k)   a[0] = {A[g][2t],   A[g][2t+1]}    a[1] = the same at row g+8
//                                      a[2] = {A[g][2t+8], A[g][2t+9]}    a[3] = the same at row g+8
//   B (16 x 8, row = k, column = n)    b[0] = {B[2t][g], B[2t+1][g]}      b[1] = {B[2t+8][g], B[2t+9][g]}
//   C (16 x 8)                         c[0], c[1] = C[g][2t], C[g][2t+1]  c[2], c[3] = the same at row g+8
//
// ldmatrix loads 8 x 8 matrices of 16-bit elements; lane i names the address of row i%8 of matrix
// i/8, 16 bytes, 16-byte aligned. Lane (g, t) receives row g, elements 2t and 2t+1 of each matrix;
// with `transposed`, elements g of rows 2t and 2t+1.
#pragma once

#include "memory.h"

#if defined(PARITY_EMULATOR)
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
typedef double Doubles __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Words __attribute__((vector_size(32)));

// Tensor cores cut the sum off instead of rounding it to nearest: to[i] is x[i] as a float, towards zero.
WIDE_VECTORS inline void toward_zero(const Doubles& x, float* to) {
    const Floats nearest = __builtin_convertvector(x, Floats);
    const Doubles y = __builtin_convertvector(nearest, Doubles);
    const auto beyond = ((y < 0 ? -y : y) > (x < 0 ? -x : x)) & (y - y == 0);
    // Where y is finite and further from 0 than x, and so not 0: the next value towards it.
    const Words bits = reinterpret_cast<const Words&>(nearest) + __builtin_convertvector(beyond, Words);
    std::memcpy(to, &bits, sizeof(bits));
}

// C += A B, products exact, one rounding of the whole sum.
WIDE_VECTORS inline void mma_bf16_op(void* const* payloads, uint32_t) {
    double a[16][16];
    Doubles b[16], c[16];
    for (int lane = 0; lane < 32; ++lane) {
        const auto* p = static_cast<const MmaPayload*>(payloads[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                a[g + 8 * (i & 1)][2 * t + half + 8 * (i >> 1)] = bf16_half(p->a[i], half);
        for (int i = 0; i < 2; ++i)
            for (int half = 0; half < 2; ++half) b[2 * t + half + 8 * i][g] = bf16_half(p->b[i], half);
        for (int i = 0; i < 4; ++i) c[g + 8 * (i >> 1)][2 * t + (i & 1)] = p->c[i];
    }
    float rounded[16][8];
    for (int m = 0; m < 16; ++m) {
        Doubles sum = c[m];  // in a register
        for (int k = 0; k < 16; ++k) sum += a[m][k] * b[k];
        const Doubles done = sum;
        toward_zero(done, rounded[m]);
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto* p = static_cast<MmaPayload*>(payloads[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) p->c[i] = rounded[g + 8 * (i >> 1)][2 * t + (i & 1)];
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
    collective(FULL_WARP, "ldmatrix", ldmatrix_op<COUNT, TRANSPOSED>, payload);
    for (int i = 0; i < COUNT; ++i) d[i] = payload.result[i];
}

}  // namespace emulator
#endif

// c += A B.
DEVICE void mma_bf16_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(PARITY_EMULATOR)
    emulator::MmaPayload payload{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    emulator::collective(FULL_WARP, "mma", emulator::mma_bf16_op, payload);
    for (int i = 0; i < 4; ++i) c[i] = payload.c[i];
#else
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

DEVICE void ldmatrix_x4(uint32_t (&d)[4], SharedAddress row) {
#if defined(PARITY_EMULATOR)
    emulator::ldmatrix<4, false>(d, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
#endif
}

DEVICE void ldmatrix_x4_transposed(uint32_t (&d)[4], SharedAddress row) {
#if defined(PARITY_EMULATOR)
    emulator::ldmatrix<4, true>(d, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
#endif
}

// Lanes 0 to 15 name the rows; the addresses of the others are not read.
DEVICE void ldmatrix_x2(uint32_t (&d)[2], SharedAddress row) {
#if defined(PARITY_EMULATOR)
    emulator::ldmatrix<2, false>(d, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
#endif
}

DEVICE void ldmatrix_x2_transposed(uint32_t (&d)[2], SharedAddress row) {
#if defined(PARITY_EMULATOR)
    emulator::ldmatrix<2, true>(d, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
#endif
}
