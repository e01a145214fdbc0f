// Rows of 128 under the Walsh-Hadamard transform, eight lanes a row, and how they are quantised (inference 5.4, 7, 7.1).
// hadamard.cu has the formulas.
//
// The including file is compiled with ELEMENT defined: a lane has VECTOR consecutive elements of each part of a row.
#pragma once

#include "element.h"
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "quantise.h"

constexpr int DIM = 128, LANES = 8;
constexpr int PARTS = DIM / (LANES * VECTOR);
constexpr int E2M1_GROUP = 32, E2M1_GROUPS = DIM / E2M1_GROUP;
constexpr float INVERSE_ROOT = 0.08838834764831845f;  // 128^-0.5

using Row = float[PARTS][VECTOR];

// ---------------------------------------------------------------- the transform

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

DEVICE void round_to_bf16(Row& x) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int i = 0; i < VECTOR; ++i) x[part][i] = to_float(to_bf16(x[part][i]));
    }
}

// ---------------------------------------------------------------- rows of memory: in wide accesses, or element by element

template <bool WIDE>
DEVICE void load_row(const ELEMENT* row, int lane, Row& x) {
    constexpr int COUNT = WIDE ? VECTOR : 1;
    for (int part = 0; part < PARTS; ++part) {
        const ELEMENT* source = row + (part * LANES + lane) * VECTOR;
        UNROLL
        for (int i = 0; i < VECTOR; i += COUNT)
            load_elements<COUNT>(source + i, *reinterpret_cast<float(*)[COUNT]>(&x[part][i]));
    }
}

template <bool WIDE>
DEVICE void store_row(ELEMENT* row, int lane, Row& x) {
    constexpr int COUNT = WIDE ? VECTOR : 1;
    for (int part = 0; part < PARTS; ++part) {
        ELEMENT* target = row + (part * LANES + lane) * VECTOR;
        UNROLL
        for (int i = 0; i < VECTOR; i += COUNT)
            store_elements(target + i, *reinterpret_cast<const float(*)[COUNT]>(&x[part][i]));
    }
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

// ---------------------------------------------------------------- codes

template <int COUNT>
DEVICE uint32_t magnitude_of(const float (&x)[COUNT]) {
    uint32_t magnitude = 0;
    UNROLL
    for (int i = 0; i < COUNT; ++i) magnitude = maximum(magnitude, __float_as_uint(x[i]) & 0x7fffffffu);
    return magnitude;
}

// A row's 64 bytes of codes and 4 of scales. All lanes of a warp take part; what does not exist is not stored.
template <bool WIDE>
DEVICE void store_e2m1(uint8_t* row_codes, uint8_t* row_scales, int lane, bool exists, const Row& y) {
    constexpr int GROUP_LANES = E2M1_GROUP / VECTOR;
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const uint8_t scale = group_scale(largest(magnitude_of(y[part]), GROUP_LANES), E2M1_FLOOR, 1.0f / 6.0f);
        const float inverse = inverse_of_scale(scale);
        if (!exists) continue;
        const int first = (part * LANES + lane) * VECTOR;
        if (first % E2M1_GROUP == 0) row_scales[first / E2M1_GROUP] = scale;
        uint64_t codes = 0;
        UNROLL
        for (int i = 0; i < VECTOR; ++i) codes |= static_cast<uint64_t>(to_e2m1(y[part][i] * inverse)) << 4 * i;
        store_bytes<WIDE, VECTOR / 2>(row_codes + first / 2, codes);
    }
}

// A row's 128 bytes of codes; returns the byte of its scale.
template <bool WIDE>
DEVICE uint8_t store_e4m3(uint8_t* row_codes, int lane, bool exists, const Row& y) {
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
        store_bytes<WIDE, VECTOR>(row_codes + (part * LANES + lane) * VECTOR, codes);
    }
    return scale;
}
