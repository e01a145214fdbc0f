// The sum over the indexer's heads of a key's products (inference 7, training 1): sum_h w[h] max(d[h], 0).
#pragma once

#include "math.h"
#include "memory.h"
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

// Where the weight of a head lies in shared memory for sum_own_heads: a lane finds four weights of its heads,
// 8 n + 2 (lane % 4) + i, one behind the other, and those of its neighbour behind them.
DEVICE constexpr int weight_place(int head) { return head / 16 * 16 + head % 8 / 2 * 4 + head / 8 % 2 * 2 + head % 2; }

// Of accumulators of a warpgroup product (hopper.h) whose rows are keys and whose columns are the heads of NUM_TOKENS tokens,
// the sums over this lane's heads: sums[2 token + half]. PADDED: there are fewer heads than NUM_HEADS.
template <int NUM_TOKENS, int NUM_HEADS, bool PADDED>
DEVICE void sum_own_heads(float (&sums)[2 * NUM_TOKENS], const float (&d)[NUM_TOKENS * NUM_HEADS / 8][4],
                          const float* weights, int num_heads) {
    UNROLL
    for (int token = 0; token < NUM_TOKENS; ++token) {
        float total[2] = {0.0f, 0.0f};
        UNROLL
        for (int n = 0; n < NUM_HEADS / 8; n += 2) {
            const Vec16 four = load_vec16(weights + token * NUM_HEADS + 8 * n + lane_id() % 4 * 4);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                const int head = 8 * (n + i / 2) + lane_id() % 4 * 2 + i % 2;
                UNROLL
                for (int half = 0; half < 2; ++half)
                    total[half] = add_head(total[half], d[token * (NUM_HEADS / 8) + n + i / 2][2 * half + i % 2],
                                           __uint_as_float(four.w[i]), !PADDED || head < num_heads);
            }
        }
        sums[2 * token] = total[0];
        sums[2 * token + 1] = total[1];
    }
}
