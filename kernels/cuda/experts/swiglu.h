// The parts of SwiGLU (inference 11.1); swiglu.cu has the formulas. A value beyond a limit is
// clamped, and NaN stays NaN.
#pragma once

#include "math.h"

DEVICE float clamp_gate(float gate, float limit) { return minimum_or_nan_f32(gate, limit); }
DEVICE float clamp_up(float up, float limit) { return maximum_or_nan_f32(minimum_or_nan_f32(up, limit), -limit); }
// 1 / (1 + exp(-x)), as a quarter of 1 / (1/4 + exp(-x) / 4). Where the result is subnormal that
// reciprocal is still normal and needs no scaling. 0 below -88.7.
DEVICE float sigmoid(float x) {
    return 0.25f * reciprocal_normal_approx(0.25f + exp2_approx(fused_multiply_add(x, -LOG2_E, -2.0f)));
}

// w (a sigmoid(a) b), before it is quantized.
DEVICE float weighted_swiglu(float gate, float up, float limit, float weight) {
    const float a = clamp_gate(gate, limit), b = clamp_up(up, limit);
    return a * sigmoid(a) * b * weight;
}
