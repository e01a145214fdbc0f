// The orthonormal Walsh-Hadamard transform of rows of 128, and its rows as codes (inference 5.4, 7, 7.1). hadamard.cu
// has the formulas. Eight lanes have a row; all lanes of a warp take part, those of a row that does not exist too.
//
// The including file is compiled with ELEMENT defined: a lane has as many consecutive elements as 16 bytes hold.
#pragma once

#include "element.h"
#include "math.h"
#include "memory.h"
#include "quantise.h"

constexpr int DIM = 128, LANES = 8;
constexpr int PARTS = DIM / (LANES * VECTOR);  // a lane has VECTOR consecutive elements of each part of a row
constexpr float INVERSE_ROOT = 0.08838834764831845f;  // 128^-0.5
constexpr int E2M1_GROUP = 32, E2M1_GROUPS = DIM / E2M1_GROUP;

using Row = float[PARTS][VECTOR];

DEVICE void butterfly(float& a, float& b) {
    const float sum = __fadd_rn(a, b), difference = __fadd_rn(a, -b);
    a = sum;
    b = difference;
}

DEVICE void transform(Row& x, int lane) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int h = 1; h < VECTOR; h *= 2) {
            UNROLL
            for (int i = 0; i < VECTOR; ++i)
                if (!(i & h)) butterfly(x[part][i], x[part][i | h]);
        }
        UNROLL
        for (int h = 1; h < LANES; h *= 2) {
            UNROLL
            for (int i = 0; i < VECTOR; ++i) {
                const float other = __shfl_xor_sync(FULL_WARP, x[part][i], h);
                x[part][i] = lane & h ? __fadd_rn(other, -x[part][i]) : __fadd_rn(x[part][i], other);
            }
        }
    }
    UNROLL
    for (int h = 1; h < PARTS; h *= 2) {
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
            UNROLL
            for (int i = 0; i < VECTOR; ++i)
                if (!(part & h)) butterfly(x[part][i], x[part | h][i]);
        }
    }
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int i = 0; i < VECTOR; ++i) x[part][i] = __fmul_rn(x[part][i], INVERSE_ROOT);
    }
}

template <int COUNT>
DEVICE uint32_t magnitude_of(const float (&x)[COUNT]) {
    uint32_t magnitude = 0;
    UNROLL
    for (int i = 0; i < COUNT; ++i) magnitude = maximum(magnitude, __float_as_uint(x[i]) & 0x7fffffffu);
    return magnitude;
}

// Bytes that lie one behind the other, the first in the lowest bits: in one access, or one by one.
template <bool WIDE, int BYTES>
DEVICE void store_bytes(uint8_t* target, uint64_t bytes) {
    if constexpr (WIDE && BYTES == 8) {
        *reinterpret_cast<uint64_t*>(target) = bytes;
    } else if constexpr (WIDE && BYTES == 4) {
        *reinterpret_cast<uint32_t*>(target) = static_cast<uint32_t>(bytes);
    } else {
        for (int i = 0; i < BYTES; ++i) target[i] = static_cast<uint8_t>(bytes >> 8 * i);
    }
}

// Codes of a row, and the scale of each of its groups, in a row that exists.
template <bool WIDE>
DEVICE void store_e2m1(uint8_t* codes_of_row, uint8_t* scale_bytes, int lane, bool exists, const Row& y) {
    constexpr int GROUP_LANES = E2M1_GROUP / VECTOR;
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const uint8_t scale = group_scale(largest(magnitude_of(y[part]), GROUP_LANES), E2M1_FLOOR, 1.0f / 6.0f);
        const float inverse = inverse_of_scale(scale);
        if (!exists) continue;
        const int first = (part * LANES + lane) * VECTOR;
        if (first % E2M1_GROUP == 0) scale_bytes[first / E2M1_GROUP] = scale;
        uint64_t codes = 0;
        UNROLL
        for (int i = 0; i < VECTOR; ++i) codes |= static_cast<uint64_t>(to_e2m1(y[part][i] * inverse)) << 4 * i;
        store_bytes<WIDE, VECTOR / 2>(codes_of_row + first / 2, codes);
    }
}

// Codes of a row that exists; the scale of the row in each of its lanes.
template <bool WIDE>
DEVICE uint8_t store_e4m3(uint8_t* codes_of_row, int lane, bool exists, const Row& y) {
    uint32_t magnitude = 0;
    UNROLL
    for (int part = 0; part < PARTS; ++part) magnitude = maximum(magnitude, magnitude_of(y[part]));
    const uint8_t scale = group_scale(largest(magnitude, LANES), E4M3_FLOOR, 1.0f / 448.0f);
    const float inverse = inverse_of_scale(scale);
    for (int part = 0; part < PARTS && exists; ++part) {
        uint64_t codes = 0;
        UNROLL
        for (int i = 0; i < VECTOR; ++i)
            codes |= static_cast<uint64_t>(to_e4m3(y[part][i] * inverse).bits) << 8 * i;
        store_bytes<WIDE, VECTOR>(codes_of_row + (part * LANES + lane) * VECTOR, codes);
    }
    return scale;
}
