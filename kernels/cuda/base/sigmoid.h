// 1 / (1 + exp(-x)) by one power and one reciprocal (math.h); 0 if the power overflows, below
// -88.7.
#pragma once

#include "math.h"

DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-LOG2_E * x)); }
