// Rotations of pairs of channels (inference 4): each multiply-add is explicit, so that both backends give the same
// bits.
#pragma once

#include "math.h"

struct Rotation {
    float cos, sin;
};

DEVICE void rotate(Rotation by, float& even, float& odd) {
    const float x0 = even, x1 = odd;
    even = fused_multiply_add(x0, by.cos, -__fmul_rn(x1, by.sin));
    odd = fused_multiply_add(x0, by.sin, __fmul_rn(x1, by.cos));
}
