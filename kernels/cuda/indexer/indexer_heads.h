// The sum over the indexer's heads for one key (inference 7, training 1): sum_h w[h] max(d[h], 0).
#pragma once

#include "math.h"
#include "memory.h"
#include "platform.h"

// relu, which keeps NaN, times the head's weight. An absent head adds nothing, even if its d with
// an infinite key is NaN.
DEVICE float add_head(float sum, float product, float weight, bool exists) {
    const float next = fused_multiply_add(maximum_or_nan_f32(product, 0.0f), weight, sum);
    return exists ? next : sum;
}

// Exchanges with the lane at this distance and adds: one of the two keeps the first half, the
// other the second.
template <int COUNT>
DEVICE void add_halves(float (&kept)[COUNT / 2], const float (&x)[COUNT], int distance) {
    const bool second = lane_id() & distance;
    UNROLL
    for (int i = 0; i < COUNT / 2; ++i) {
        const float own = second ? x[COUNT / 2 + i] : x[i], other = second ? x[i] : x[COUNT / 2 + i];
        kept[i] = own + __shfl_xor_sync(FULL_WARP, other, distance);
    }
}

// The position of a head's weight in shared memory for sum_own_heads. The four weights of a lane's
// heads, 8 n + 2 (lane % 4) + i, are contiguous, and those of the next lane follow.
DEVICE constexpr int weight_place(int head) { return head / 16 * 16 + head % 8 / 2 * 4 + head / 8 % 2 * 2 + head % 2; }

// The sums over this lane's heads, sums[2 token + half], of wgmma accumulators (hopper.h) whose
// rows are keys and whose columns are the heads of NUM_TOKENS tokens. PADDED: fewer heads than
// NUM_HEADS.
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
