// The normalization of mixing matrices of STREAMS x STREAMS values (inference 2.2, training 11.1).
//
//     P = softmax over j of the logits          M = P + eps
//     pass 1, 3, 5, ...   M /= (sum over i of M) + eps        columns
//     pass 2, 4, ...      M /= (sum over j of M) + eps        rows
//
// `iterations` iterations are 2 iterations - 1 passes: the first iteration has the softmax in
// place of rows, and the last pass is over columns. With M' = M / s the gradient of a pass is dM =
// (dM' - sum of dM' M') / s over the same elements as s. That of the softmax is dlogit = P (dP -
// sum over j of dP P).
//
// Three layouts. 16 lanes a matrix, two matrices a warp: lane 4 i + j has element (source i,
// destination j). Four lanes a matrix, eight a warp: lane i has the row of source i, with 4.6
// instructions a pass and matrix instead of 7 and sums of the same order. Or a whole matrix in
// every lane: for a single matrix no pass waits for a shuffle.
//
// Limit: dependent passes; 39 passes of a matrix in one lane take 2575 cycles on an H100, 66 a
// pass. What was tried: kernels/docs/mhc_mix.md.
#pragma once

#include "math.h"
#include "sigmoid.h"
#include "streams.h"

constexpr int MATRIX_LANES = STREAMS * STREAMS;
constexpr int COLUMNS = 2 * STREAMS + MATRIX_LANES;  // of a projection to pre, post and comb

// Sums over the destinations of a source, and over the sources of a destination, in every lane
// that takes part.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
DEVICE float column_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 4);
    return x + __shfl_xor_sync(FULL_WARP, x, 8);
}

DEVICE float softmax_power(float logit, float top) { return exp2_approx((logit - top) * LOG2_E); }
DEVICE float softmax_share(float power, float sum) { return power * reciprocal_approx(sum); }

DEVICE float row_softmax(float logit) {
    float top = maximum_or_nan_f32(logit, __shfl_xor_sync(FULL_WARP, logit, 1));
    top = maximum_or_nan_f32(top, __shfl_xor_sync(FULL_WARP, top, 2));
    const float power = softmax_power(logit, top);
    return softmax_share(power, row_sum(power));
}

DEVICE int sinkhorn_passes(int iterations) { return 2 * iterations - 1; }
DEVICE bool is_of_columns(int pass) { return pass % 2 == 1; }

// What a pass multiplies M by: from the sum of the elements, and for a lane's element.
DEVICE float factor_of_sum(float sum, float eps) { return reciprocal_approx(sum + eps); }
DEVICE float sinkhorn_factor(float m, int pass, float eps) {
    return factor_of_sum(is_of_columns(pass) ? column_sum(m) : row_sum(m), eps);
}

// The gradient before a pass, from the gradient after it, M after it and the factor of the pass.
DEVICE float sinkhorn_gradient(float gradient, float m, float factor, int pass) {
    const float product = gradient * m;
    return factor * (gradient - (is_of_columns(pass) ? column_sum(product) : row_sum(product)));
}

// ---------------------------------------------------------------- a row a lane

DEVICE float sum_of_row(const float (&row)[STREAMS]) { return (row[0] + row[1]) + (row[2] + row[3]); }

DEVICE void softmax_of_row(float (&row)[STREAMS]) {
    const float top = maximum_or_nan_f32(maximum_or_nan_f32(row[0], row[1]), maximum_or_nan_f32(row[2], row[3]));
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] = softmax_power(row[j], top);
    const float sum = sum_of_row(row);
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] = softmax_share(row[j], sum);
}

DEVICE void pass_over_rows(float (&row)[STREAMS], float eps) {
    const float factor = factor_of_sum(sum_of_row(row), eps);
    UNROLL
    for (int j = 0; j < STREAMS; ++j) row[j] *= factor;
}

// All lanes of the warp take part.
DEVICE void pass_over_columns(float (&row)[STREAMS], float eps) {
    UNROLL
    for (int j = 0; j < STREAMS; ++j) {
        const float sum = row[j] + __shfl_xor_sync(FULL_WARP, row[j], 1);
        row[j] *= factor_of_sum(sum + __shfl_xor_sync(FULL_WARP, sum, 2), eps);
    }
}

DEVICE void sinkhorn_of_rows(float (&row)[STREAMS], int passes, float eps) {
    for (int pass = 1; pass <= passes; ++pass) {
        if (is_of_columns(pass)) pass_over_columns(row, eps);
        else pass_over_rows(row, eps);
    }
}

// ---------------------------------------------------------------- a matrix a lane

DEVICE float sum_of_column(const float (&matrix)[STREAMS][STREAMS], int j) {
    return (matrix[0][j] + matrix[1][j]) + (matrix[2][j] + matrix[3][j]);
}

// A pass with the same bits as the other layouts. NORMAL: neither the divisor nor its inverse is
// subnormal.
template <bool NORMAL>
DEVICE float factor_of_sum_within(float sum, float eps) {
    if constexpr (NORMAL) return reciprocal_normal_approx(sum + eps);
    else return factor_of_sum(sum, eps);
}

template <bool NORMAL>
DEVICE void pass_over_columns(float (&matrix)[STREAMS][STREAMS], float eps) {
    UNROLL
    for (int j = 0; j < STREAMS; ++j) {
        const float factor = factor_of_sum_within<NORMAL>(sum_of_column(matrix, j), eps);
        UNROLL
        for (int i = 0; i < STREAMS; ++i) matrix[i][j] *= factor;
    }
}

template <bool NORMAL>
DEVICE void pass_over_rows(float (&matrix)[STREAMS][STREAMS], float eps) {
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        const float factor = factor_of_sum_within<NORMAL>(sum_of_row(matrix[i]), eps);
        UNROLL
        for (int j = 0; j < STREAMS; ++j) matrix[i][j] *= factor;
    }
}

// An iteration is two passes; columns have one pass more than rows.
template <bool NORMAL>
DEVICE void sinkhorn_of_matrix(float (&matrix)[STREAMS][STREAMS], int passes, float eps) {
    pass_over_columns<NORMAL>(matrix, eps);
    for (int pass = 3; pass <= passes; pass += 2) {
        pass_over_rows<NORMAL>(matrix, eps);
        pass_over_columns<NORMAL>(matrix, eps);
    }
}

// The same as sinkhorn_of_rows for one matrix: every lane has the row of source lane % STREAMS.
// Elements are at most 1 + eps, so with such an eps the sums are between 2^-126 and 16.
DEVICE void sinkhorn_of_one(float (&row)[STREAMS], int passes, float eps) {
    constexpr float LEAST = 1.17549435e-38f, MOST = 1.0f;
    float matrix[STREAMS][STREAMS];
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        UNROLL
        for (int j = 0; j < STREAMS; ++j) matrix[i][j] = __shfl_sync(FULL_WARP, row[j], i);
    }
    if (eps >= LEAST && eps <= MOST) sinkhorn_of_matrix<true>(matrix, passes, eps);
    else sinkhorn_of_matrix<false>(matrix, passes, eps);
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        UNROLL
        for (int j = 0; j < STREAMS; ++j) row[j] = lane_id() % STREAMS == i ? matrix[i][j] : row[j];
    }
}
