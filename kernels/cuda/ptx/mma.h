// Warp matrix instructions: ldmatrix and mma.sync m16n8k16 (bf16 operands, fp32 accumulators).
// Every lane of the warp must take part.
//
// Fragments, for lane = 4*g + t (g = 0..7, t = 0..3); {x, y} packs x in the low half:
//   A (16 x 16, row = m, column = k)  a[0] = {A[g][2t],   A[g][2t+1]}   a[1] = the same at row g+8
//                                     a[2] = {A[g][2t+8], A[g][2t+9]}   a[3] = the same at row g+8
//   B (16 x 8, row = k, column = n)   b[0] = {B[2t][g], B[2t+1][g]}
//                                     b[1] = {B[2t+8][g], B[2t+9][g]}
//   C (16 x 8)                        c[0], c[1] = C[g][2t], C[g][2t+1]
//                                     c[2], c[3] = the same at row g+8
//
// ldmatrix loads 8 x 8 matrices of 16-bit elements. Lane i gives the address of row i%8 of matrix
// i/8, 16 bytes, 16-byte aligned. Lane (g, t) receives row g, elements 2t and 2t+1 of each matrix;
// with `transposed`, elements g of rows 2t and 2t+1.
#pragma once

#include "memory.h"

#if defined(PARITY_EMULATOR)
#include "mma_model.h"
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

// Lanes 0 to 15 give the row addresses; those of the others are not read.
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
