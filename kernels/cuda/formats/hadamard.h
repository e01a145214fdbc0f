// Rows of 128 under the Walsh-Hadamard transform, four lanes a row, and how they are quantized
// (inference 5.4, 7, 7.1). hadamard.cu has the formulas.
//
// A lane has SPAN consecutive elements of each half of a row: five of the seven steps of the
// transform stay within it.
#pragma once

#include "butterflies.h"
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "quantize.h"

constexpr int LANES = 4, SPAN = 16;
constexpr int PARTS = DIM / (LANES * SPAN);
constexpr int E2M1_GROUP = 32, E2M1_GROUPS = DIM / E2M1_GROUP;
constexpr int GROUP_LANES = E2M1_GROUP / SPAN;

using Row = float[PARTS][SPAN];

DEVICE void transform(Row& x, int lane) { walsh_hadamard<LANES>(x, lane); }

// A row rounded to bf16. `magnitudes`: the largest of each part as bf16 bits, which sort like
// values, NaN above infinity. `pairs`: of eight elements word i has the i-th in its lower half and
// the (i + 4)-th in the upper one.
struct Rounded {
    uint32_t magnitudes[PARTS];
    uint32_t pairs[PARTS][SPAN / 8][4];
};
DEVICE Rounded round_to_bf16(Row& x) {
    Rounded rounded;
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        uint32_t largest_pair = 0;
        UNROLL
        for (int first = 0; first < SPAN; first += 8) {
            UNROLL
            for (int i = first; i < first + 4; ++i) {
                const uint32_t pair = pack_bf16(x[part][i], x[part][i + 4]);
                rounded.pairs[part][first / 8][i - first] = pair;
                largest_pair = maximum_u16x2(largest_pair, pair & 0x7fff7fffu);
                x[part][i] = unpack_bf16_low(pair);
                x[part][i + 4] = unpack_bf16_high(pair);
            }
        }
        rounded.magnitudes[part] = maximum(largest_pair & 0xffffu, largest_pair >> 16);
    }
    return rounded;
}

// ---------------------------------------------------------------- rows: wide or by element

template <bool WIDE, typename T>
DEVICE void load_row(const T* row, int lane, Row& x) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    for (int part = 0; part < PARTS; ++part) {
        const T* source = row + (part * LANES + lane) * SPAN;
        UNROLL
        for (int i = 0; i < SPAN; i += COUNT)
            load_elements<COUNT>(source + i, *reinterpret_cast<float(*)[COUNT]>(&x[part][i]));
    }
}

template <bool WIDE, typename T>
DEVICE void store_row(T* row, int lane, const Row& x) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    for (int part = 0; part < PARTS; ++part) {
        T* target = row + (part * LANES + lane) * SPAN;
        UNROLL
        for (int i = 0; i < SPAN; i += COUNT)
            store_elements(target + i, *reinterpret_cast<const float(*)[COUNT]>(&x[part][i]));
    }
}

// ---------------------------------------------------------------- codes of values in bf16

// A row's 64 bytes of codes and 4 of scales. All lanes of a warp take part; a missing row is not
// stored.
template <bool WIDE>
DEVICE void store_e2m1(uint8_t* row_codes, uint8_t* row_scales, int lane, bool exists, const Rounded& rounded) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const float amax = largest(rounded.magnitudes[part] << 16, GROUP_LANES);
        const uint8_t scale = group_scale(amax, E2M1_FLOOR, 1.0f / 6.0f);
        if (!exists) continue;
        const int first = (part * LANES + lane) * SPAN;
        if (first % E2M1_GROUP == 0) row_scales[first / E2M1_GROUP] = scale;
        const uint32_t codes[] = {e2m1_codes(rounded.pairs[part][0], scale), e2m1_codes(rounded.pairs[part][1], scale)};
        store_words<WIDE>(row_codes + first / 2, codes);
    }
}

// The 128 bytes of codes of a rounded row y; returns the byte of its scale.
template <bool WIDE>
DEVICE uint8_t store_e4m3(uint8_t* row_codes, int lane, bool exists, const Row& y, const Rounded& rounded) {
    uint32_t magnitude = 0;
    UNROLL
    for (int part = 0; part < PARTS; ++part) magnitude = maximum(magnitude, rounded.magnitudes[part]);
    const uint8_t scale = group_scale(largest(magnitude << 16, LANES), E4M3_FLOOR, 1.0f / 448.0f);
    const float inverse = inverse_of_scale(scale);
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        if (!exists) continue;
        uint32_t codes[SPAN / 4];
        e4m3_codes(y[part], inverse, codes);
        store_words<WIDE>(row_codes + (part * LANES + lane) * SPAN, codes);
    }
    return scale;
}
