// The softmax of a block's rows, tile by tile of its slots (block_heads.h). The logits are in base
// 2, without the sink. A tile's weights are computed under the largest logit so far; where a tile
// raises it, what was summed before is multiplied by a factor.
//
// `partial` in shared memory is [KEY_WARPS][HEADS_PER_BLOCK]: each warp's maxima, later its sums.
// `factor` is [HEADS_PER_BLOCK].
#pragma once

#include "block_heads.h"
#include "math.h"

// The running softmax of this lane's two head rows. `maximum` is the same in all lanes that share
// a row; `sum` covers only this lane's slots.
struct RunningSoftmax {
    float maximum[2] = {-INFINITY_F32, -INFINITY_F32};
    float sum[2] = {0.0f, 0.0f};
};

// Turns scores into base-2 logits, -inf in invalid slots, and stores the warp's maximum of each
// row to `partial`. masked(slot, z) is the logit z of a valid slot of the tile, otherwise -inf.
// MAXIMUM decides what a NaN does to the maximum.
template <float (&MAXIMUM)(float, float), int N8, typename Masked>
DEVICE void mask_and_reduce(float (&s)[N8][4], const ScorePlace& place, float* partial, float scale_log2,
                            Masked masked) {
    const int t = lane_id() % 4;
    float largest[2] = {-INFINITY_F32, -INFINITY_F32};
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
            s[n][i] = masked(place.first_key + 8 * n + 2 * t + i % 2, s[n][i] * scale_log2);
            largest[i / 2] = MAXIMUM(largest[i / 2], s[n][i]);
        }
    }
    UNROLL
    for (int half = 0; half < 2; ++half) {
        largest[half] = MAXIMUM(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 1));
        largest[half] = MAXIMUM(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 2));
        if (t == 0) partial[place.key_warp * HEADS_PER_BLOCK + place.row + 8 * half] = largest[half];
    }
}

// Adds the tile to the running softmax. The weights exp2(z - maximum) go to the tile of P, heads x
// slots, in bf16 and to the sum in fp32. The factor for the earlier accumulators goes to `factor`.
template <float (&MAXIMUM)(float, float), typename WeightTile, int N8>
DEVICE void update_softmax(RunningSoftmax& state, const float (&s)[N8][4], const ScorePlace& place,
                           const float* partial, float* factor, SharedAddress p_tile) {
    const int t = lane_id() % 4;
    float shift[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = place.row + 8 * half;
        float largest = state.maximum[half];
        UNROLL
        for (int w = 0; w < KEY_WARPS; ++w) largest = MAXIMUM(largest, partial[w * HEADS_PER_BLOCK + row]);
        shift[half] = subtrahend(largest);
        const float rescale = exp2_approx(state.maximum[half] - shift[half]);
        state.maximum[half] = largest;
        state.sum[half] *= rescale;
        if (t == 0 && place.key_warp == 0) factor[row] = rescale;
    }
    UNROLL
    for (int n = 0; n < N8; ++n) {
        float p[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(s[n][i] - shift[i / 2]);
            state.sum[i / 2] += p[i];
        }
        const int chunk = place.first_key / 8 + n;
        store_shared(p_tile + WeightTile::offset(place.row, chunk) + 4 * t, pack_bf16(p[0], p[1]));
        store_shared(p_tile + WeightTile::offset(place.row + 8, chunk) + 4 * t, pack_bf16(p[2], p[3]));
    }
}

// Multiplies a warp's accumulators by the factors of their rows. Most tiles raise no maximum, so
// most skip this.
template <int N8>
DEVICE void rescale_output(float (&out)[M_TILES][N8][4], const float* factor) {
    const int g = lane_id() / 4;
    bool changed = false;
    float rescale[M_TILES][2];
    UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            rescale[m][half] = factor[16 * m + g + 8 * half];
            changed = changed || rescale[m][half] != 1.0f;
        }
    }
    if (!__any_sync(FULL_WARP, changed)) return;
    UNROLL
    for (int m = 0; m < M_TILES; ++m)
        UNROLL
        for (int n = 0; n < N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) out[m][n][i] *= rescale[m][i / 2];
}

// After the last tile, when `factor` is no longer read: the warps' sums of each row to `partial`,
// and its maximum to `factor`. All threads of the block.
DEVICE void share_sums(const RunningSoftmax& state, const ScorePlace& place, float* partial, float* factor) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (lane_id() % 4 == 0) partial[place.key_warp * HEADS_PER_BLOCK + place.row + 8 * half] = sum;
        if (lane_id() % 4 == 0 && place.key_warp == 0) factor[place.row + 8 * half] = state.maximum[half];
    }
    __syncthreads();
}

// The sum of a row's weights; 0 in a row without a valid slot.
DEVICE float sum_of_row(const float* partial, int row) {
    float sum = 0.0f;
    UNROLL
    for (int w = 0; w < KEY_WARPS; ++w) sum += partial[w * HEADS_PER_BLOCK + row];
    return sum;
}
