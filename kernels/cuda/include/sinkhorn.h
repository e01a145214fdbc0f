// The normalisation of mixing matrices of STREAMS x STREAMS numbers (inference 2.2, training 11.1): 16 lanes hold one,
// lane 4 i + j of them element (source i, destination j), so that a warp holds two.
//
//     P = softmax over j of the logits          M = P + eps
//     pass 1, 3, 5, ...   M /= (sum over i of M) + eps        columns
//     pass 2, 4, ...      M /= (sum over j of M) + eps        rows
//
// `iterations` iterations are 2 iterations - 1 passes: the first one begins with the softmax instead of rows, and the
// last pass is one over columns. With M' = M / s the gradient of a pass is dM = (dM' - sum of dM' M') / s over the same
// elements as s, and that of the softmax dlogit = P (dP - sum over j of dP P).
#pragma once

#include "math.h"
#include "sigmoid.h"
#include "streams.h"

constexpr int MATRIX_LANES = STREAMS * STREAMS;
constexpr int COLUMNS = 2 * STREAMS + MATRIX_LANES;  // of a projection to pre, post and comb

// Sums over the destinations of a source, and over the sources of a destination, in every lane that has a part in them.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
DEVICE float column_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 4);
    return x + __shfl_xor_sync(FULL_WARP, x, 8);
}

DEVICE float row_softmax(float logit) {
    float top = maximum_or_nan_f32(logit, __shfl_xor_sync(FULL_WARP, logit, 1));
    top = maximum_or_nan_f32(top, __shfl_xor_sync(FULL_WARP, top, 2));
    const float power = exp2_approx((logit - top) * LOG2_E);
    return power * reciprocal_approx(row_sum(power));
}

DEVICE int sinkhorn_passes(int iterations) { return 2 * iterations - 1; }
DEVICE bool is_of_columns(int pass) { return pass % 2 == 1; }

// What M is multiplied by in a pass.
DEVICE float sinkhorn_factor(float m, int pass, float eps) {
    return reciprocal_approx((is_of_columns(pass) ? column_sum(m) : row_sum(m)) + eps);
}

// The gradient in front of a pass, of the one behind it, of M behind it and of what M was multiplied by.
DEVICE float sinkhorn_gradient(float gradient, float m, float factor, int pass) {
    const float product = gradient * m;
    return factor * (gradient - (is_of_columns(pass) ? column_sum(product) : row_sum(product)));
}
