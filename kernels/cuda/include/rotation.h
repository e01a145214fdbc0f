// Rotations of adjacent pairs by a token's position (inference 4). rope.cu has the formulas.
//
// Parameters of kernels that rotate have cos and sin [table_rows, rope_dim / 2] with strides of their rows, positions
// [num_tokens] or nullptr (token t uses table row t), table_rows, and whether the rotation is the inverse one.
#pragma once

#include "math.h"
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

DEVICE void rotate(Rotation by, float& even, float& odd) {
    const float x0 = even, x1 = odd;
    even = fused_multiply_add(x0, by.cos, -__fmul_rn(x1, by.sin));
    odd = fused_multiply_add(x0, by.sin, __fmul_rn(x1, by.cos));
}
