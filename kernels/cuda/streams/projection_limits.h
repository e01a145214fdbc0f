// Which factors of the gradients of a projection (projection_backward_products.h) split into bf16
// parts with exact products.
#pragma once

#include "numeric.h"

constexpr float LARGE = 1099511627776.0f;      // 2^40
constexpr float SMALL = 1.0f / LARGE / LARGE;  // 2^-80

// Of a token's values, one that does not; infinities and NaN are among them.
DEVICE bool is_large(float x) { return !(absolute_f32(x) < LARGE); }

// Of the weights, one that does not.
DEVICE bool is_irregular(float weight) { return is_large(weight) || (weight != 0.0f && absolute_f32(weight) < SMALL); }
