// The sum over the indexer's heads of a key's products (inference 7, training 1): sum_h w[h] max(d[h], 0).
#pragma once

#include "math.h"
#include "platform.h"

// relu, which keeps NaN, times the head's weight. A head that is not there adds nothing, whatever its product with an
// infinite key is.
DEVICE float add_head(float sum, float product, float weight, bool exists) {
    const float next = fused_multiply_add(maximum_or_nan_f32(product, 0.0f), weight, sum);
    return exists ? next : sum;
}

// Adds the lane at this distance: one of the two keeps the first half, the other the second.
template <int COUNT>
DEVICE void add_halves(float (&kept)[COUNT / 2], const float (&x)[COUNT], int distance) {
    const bool second = lane_id() & distance;
    UNROLL
    for (int i = 0; i < COUNT / 2; ++i) {
        const float own = second ? x[COUNT / 2 + i] : x[i], other = second ? x[i] : x[COUNT / 2 + i];
        kept[i] = own + __shfl_xor_sync(FULL_WARP, other, distance);
    }
}
