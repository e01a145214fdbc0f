// The Walsh-Hadamard transform of rows of 128, several lanes a row (inference 7). hadamard.cu has
// the formulas.
//
// Seven steps of butterflies on elements 1, 2, 4 ... 64 apart, in this order, for any split of a
// row over lanes. Splits differ in which steps stay within a lane; all give the same bits.
#pragma once

#include "math.h"

constexpr int DIM = 128;
constexpr float INVERSE_ROOT = 0.08838834764831845f;  // 128^-0.5

DEVICE void butterfly(float& a, float& b) {
    const float sum = __fadd_rn(a, b), difference = __fadd_rn(a, -b);
    a = sum;
    b = difference;
}

// Element i of part p of lane l is element (p LANES + l) SPAN + i of its row. The lanes of a row
// are neighbours, the first at a multiple of LANES. All lanes of the warp take part.
template <int LANES, int PARTS, int SPAN>
DEVICE void walsh_hadamard(float (&x)[PARTS][SPAN], int lane) {
    static_assert(LANES * PARTS * SPAN == DIM, "the lanes have a row");
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int h = 1; h < SPAN; h *= 2) {
            UNROLL
            for (int i = 0; i < SPAN; ++i)
                if (!(i & h)) butterfly(x[part][i], x[part][i | h]);
        }
        UNROLL
        for (int h = 1; h < LANES; h *= 2) {
            // The upper of two lanes has the difference. A product with 1 or -1 is exact, so each
            // sum is rounded once.
            const float sign = lane & h ? -1.0f : 1.0f;
            UNROLL
            for (int i = 0; i < SPAN; ++i) {
                const float other = __shfl_xor_sync(FULL_WARP, x[part][i], h);
                x[part][i] = fused_multiply_add(x[part][i], sign, other);
            }
        }
    }
    UNROLL
    for (int h = 1; h < PARTS; h *= 2) {
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
            UNROLL
            for (int i = 0; i < SPAN; ++i)
                if (!(part & h)) butterfly(x[part][i], x[part | h][i]);
        }
    }
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int i = 0; i < SPAN; ++i) x[part][i] = __fmul_rn(x[part][i], INVERSE_ROOT);
    }
}
