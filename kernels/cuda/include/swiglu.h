// What SwiGLU is made of (inference 11.1); swiglu.cu has the formulas. What exceeds a limit is clamped, and a NaN
// stays one.
#pragma once

#include "math.h"

DEVICE float clamp_gate(float gate, float limit) { return gate > limit ? limit : gate; }
DEVICE float clamp_up(float up, float limit) { return up > limit ? limit : up < -limit ? -limit : up; }
DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-LOG2_E * x)); }
