// Rotations of adjacent pairs by a token's position (inference 4). rope.cu has the formulas.
//
// Parameters of kernels that rotate have cos and sin [table_rows, rope_dim / 2] with strides of their rows, positions
// [num_tokens] or nullptr (token t uses table row t), table_rows, and whether the rotation is the inverse one.
#pragma once

#include "math.h"
#include "memory.h"
#include "numeric.h"

struct Rotation {
    float cos, sin;
};

// PAIRS consecutive rotations of a token, from pair `first` on. A position outside the table reads
// nothing and gives NaN, which no comparison mistakes for a value.
template <int PAIRS, typename Params>
DEVICE void load_rotations(const Params& params, int64_t token, int first, Rotation (&rotations)[PAIRS]) {
    const int64_t position = params.positions ? params.positions[token] : token;
    const bool inside = position >= 0 && position < params.table_rows;
    for (int i = 0; i < PAIRS; ++i) {
        rotations[i] = Rotation{NAN_F32, NAN_F32};
        if (!inside) continue;
        const float cos = params.cos[position * params.cos_stride + first + i];
        const float sin = params.sin[position * params.sin_stride + first + i];
        rotations[i] = Rotation{cos, params.inverse ? -sin : sin};
    }
}

// The same, asked for in accesses of 16 bytes where cos and sin lie so: one after the other they are 2 PAIRS accesses.
template <int PAIRS, typename Params>
DEVICE void load_rotations_at_once(const Params& params, int64_t token, int first, Rotation (&rotations)[PAIRS]) {
    static_assert(PAIRS % 4 == 0, "accesses hold four");
    const int64_t position = params.positions ? params.positions[token] : token;
    const float* const cos = params.cos + position * params.cos_stride + first;
    const float* const sin = params.sin + position * params.sin_stride + first;
    const bool aligned = ((reinterpret_cast<uint64_t>(cos) | reinterpret_cast<uint64_t>(sin)) & 15) == 0;
    if (!aligned || position < 0 || position >= params.table_rows) return load_rotations(params, token, first, rotations);
    const uint32_t sign = params.inverse ? 0x80000000u : 0u;
    Vec16 cosines[PAIRS / 4], sines[PAIRS / 4];
    UNROLL
    for (int i = 0; i < PAIRS / 4; ++i) {
        cosines[i] = load_vec16(cos + 4 * i);
        sines[i] = load_vec16(sin + 4 * i);
    }
    UNROLL
    for (int i = 0; i < PAIRS; ++i)
        rotations[i] = Rotation{__uint_as_float(cosines[i / 4].w[i % 4]), __uint_as_float(sines[i / 4].w[i % 4] ^ sign)};
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
