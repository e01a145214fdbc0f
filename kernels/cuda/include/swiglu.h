// What SwiGLU is made of (inference 11.1); swiglu.cu has the formulas. What exceeds a limit is clamped, and a NaN
// stays one.
#pragma once

#include "math.h"

DEVICE float clamp_gate(float gate, float limit) { return minimum_or_nan_f32(gate, limit); }
DEVICE float clamp_up(float up, float limit) { return maximum_or_nan_f32(minimum_or_nan_f32(up, limit), -limit); }
DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-LOG2_E * x)); }

// w (a sigmoid(a) b), before it is quantised.
DEVICE float weighted_swiglu(float gate, float up, float limit, float weight) {
    const float a = clamp_gate(gate, limit), b = clamp_up(up, limit);
    return a * sigmoid(a) * b * weight;
}
