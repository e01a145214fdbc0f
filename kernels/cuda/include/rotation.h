// Rotations of adjacent pairs by a token's position (inference 4). rope.cu has the formulas.
//
// Parameters of kernels that rotate have cos and sin [table_rows, rope_dim / 2] with strides of their rows, positions
// [num_tokens] or nullptr (token t uses table row t), table_rows, and whether the rotation is the inverse one.
#pragma once

#include "elements.h"
#include "math.h"
#include "numeric.h"

struct Rotation {
    float cos, sin;
};

// Neighbours of both tables: four in an access where they lie so, of which fewer wait for each other then.
template <int COUNT>
DEVICE void load_neighbours(const float* cos, const float* sin, float (&cosines)[COUNT], float (&sines)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
        const bool aligned = ((reinterpret_cast<uint64_t>(cos) | reinterpret_cast<uint64_t>(sin)) & 15) == 0;
        if (aligned) {
            load_elements(cos, cosines);
            load_elements(sin, sines);
            return;
        }
    }
    UNROLL
    for (int i = 0; i < COUNT; ++i) cosines[i] = cos[i], sines[i] = sin[i];
}

// PAIRS consecutive rotations of a token, from pair `first` on. A position outside the table reads
// nothing and gives NaN, which no comparison mistakes for a value.
template <int PAIRS, typename Params>
DEVICE void load_rotations(const Params& params, int64_t token, int first, Rotation (&rotations)[PAIRS]) {
    const int64_t position = params.positions ? params.positions[token] : token;
    const bool inside = position >= 0 && position < params.table_rows;
    if (!inside) {
        UNROLL
        for (int i = 0; i < PAIRS; ++i) rotations[i] = Rotation{NAN_F32, NAN_F32};
        return;
    }
    float cosines[PAIRS], sines[PAIRS];
    const float* const cos_row = &params.cos[position * params.cos_stride + first];
    const float* const sin_row = &params.sin[position * params.sin_stride + first];
    load_neighbours(cos_row, sin_row, cosines, sines);
    UNROLL
    for (int i = 0; i < PAIRS; ++i) {
        const float cos = cosines[i], sin = sines[i];
        rotations[i] = Rotation{cos, params.inverse ? -sin : sin};
    }
}

DEVICE void rotate(Rotation by, float& even, float& odd) {
    const float x0 = even, x1 = odd;
    even = fused_multiply_add(x0, by.cos, -__fmul_rn(x1, by.sin));
    odd = fused_multiply_add(x0, by.sin, __fmul_rn(x1, by.cos));
}

// Turns those of COUNT neighbouring channels of a head, from the even one `channel` on, that turn: the last rope_dim of
// its head_dim. Parameters have these two as well. Returns whether any does.
template <int COUNT, typename Params>
DEVICE bool turn_channels(const Params& params, int64_t token, int32_t channel, float (&x)[COUNT]) {
    const int32_t copied = params.head_dim - params.rope_dim;
    if (channel + COUNT <= copied) return false;
    if (channel >= copied) {
        Rotation rotations[COUNT / 2];
        load_rotations(params, token, (channel - copied) / 2, rotations);
        UNROLL
        for (int i = 0; i < COUNT / 2; ++i) rotate(rotations[i], x[2 * i], x[2 * i + 1]);
    } else {
        UNROLL
        for (int i = 0; i < COUNT / 2; ++i) {
            if (channel + 2 * i < copied) continue;
            Rotation rotation[1];
            load_rotations(params, token, (channel + 2 * i - copied) / 2, rotation);
            rotate(rotation[0], x[2 * i], x[2 * i + 1]);
        }
    }
    return true;
}
