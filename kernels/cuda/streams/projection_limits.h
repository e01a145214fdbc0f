// Which factors of the gradients of a projection (projection_backward_products.h) are split into parts of bf16 whose products are exact.
#pragma once

#include "numeric.h"

constexpr float LARGE = 1099511627776.0f;      // 2^40
constexpr float SMALL = 1.0f / LARGE / LARGE;  // 2^-80

// A token's number that is not, infinite and NaN among them.
DEVICE bool is_large(float x) { return !(absolute_f32(x) < LARGE); }

// A weight that is not.
DEVICE bool is_irregular(float weight) { return is_large(weight) || (weight != 0.0f && absolute_f32(weight) < SMALL); }
