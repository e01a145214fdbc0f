// Rotations of adjacent pairs by a token's position (inference 4). rope.cu has the formulas.
//
// The parameters of kernels that rotate have cos and sin [table_rows, rope_dim / 2] with row
// strides, table_rows, and whether the rotation is the inverse. positions is [num_tokens] or
// nullptr: then token t uses table row t.
#pragma once

#include "elements.h"
#include "math.h"
#include "numeric.h"

struct Rotation {
    float cos, sin;
};

// The addresses of a token's rotations from one pair on; null if its position is outside the
// table.
struct RotationRows {
    const float *cos, *sin;

    bool exist() const { return cos != nullptr; }
    bool in_vectors() const { return ((reinterpret_cast<uint64_t>(cos) | reinterpret_cast<uint64_t>(sin)) & 15) == 0; }
};

template <typename Params>
DEVICE int64_t position_of(const Params& params, int64_t token) {
    return params.positions ? params.positions[token] : token;
}
template <typename Params>
DEVICE RotationRows rows_of_position(const Params& params, int64_t position, int first) {
    const bool inside = position >= 0 && position < params.table_rows;
    if (!inside) return RotationRows{nullptr, nullptr};
    return RotationRows{&params.cos[position * params.cos_stride + first], &params.sin[position * params.sin_stride + first]};
}

template <typename Params>
DEVICE RotationRows rotation_rows(const Params& params, int64_t token, int first) {
    return rows_of_position(params, position_of(params, token), first);
}

// Four in an access where alignment allows it: fewer loads wait for each other. All are issued
// before any is needed.
template <int PAIRS>
DEVICE void load_pairs(const RotationRows& rows, float (&cosines)[PAIRS], float (&sines)[PAIRS]) {
    if constexpr (PAIRS % 4 == 0) {
        if (rows.in_vectors()) {
            load_elements(rows.cos, cosines);
            load_elements(rows.sin, sines);
            return;
        }
    }
    UNROLL
    for (int i = 0; i < PAIRS; ++i) cosines[i] = rows.cos[i], sines[i] = rows.sin[i];
}

// PAIRS consecutive rotations. A position outside the table reads nothing and gives NaN, which no
// comparison takes for a value.
template <int PAIRS, typename Params>
DEVICE void load_rotations(const Params& params, const RotationRows& rows, Rotation (&rotations)[PAIRS]) {
    if (!rows.exist()) {
        UNROLL
        for (int i = 0; i < PAIRS; ++i) rotations[i] = Rotation{NAN_F32, NAN_F32};
        return;
    }
    float cosines[PAIRS], sines[PAIRS];
    load_pairs(rows, cosines, sines);
    UNROLL
    for (int i = 0; i < PAIRS; ++i) {
        const float cos = cosines[i], sin = sines[i];
        rotations[i] = Rotation{cos, params.inverse ? -sin : sin};
    }
}

// Those of a token, from pair `first` on.
template <int PAIRS, typename Params>
DEVICE void load_rotations(const Params& params, int64_t token, int first, Rotation (&rotations)[PAIRS]) {
    load_rotations(params, rotation_rows(params, token, first), rotations);
}

DEVICE void rotate(Rotation by, float& even, float& odd) {
    const float x0 = even, x1 = odd;
    even = fused_multiply_add(x0, by.cos, -__fmul_rn(x1, by.sin));
    odd = fused_multiply_add(x0, by.sin, __fmul_rn(x1, by.cos));
}

// Rotates those of COUNT neighbouring channels, from the even `channel` on, that are among the
// last rope_dim of head_dim. The parameters have both fields. Returns whether any channel rotates.
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
