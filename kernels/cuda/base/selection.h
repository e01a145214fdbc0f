// Parts of selections by score: scores as integers of the same order, and prefix sums over a warp.
#pragma once

#include "math.h"

// Ordered like scores: -0 equals 0, and NaN counts as -infinity. Never 0.
DEVICE uint32_t key_of(float score) {
    // Adding 0 turns -0 into 0.
    const uint32_t bits = __float_as_uint(is_nan(score) ? -INFINITY_F32 : __fadd_rn(score, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The score of a key.
DEVICE float score_of_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Over the lanes before this one and itself.
template <typename T>
DEVICE T inclusive_sum(T value) {
    UNROLL
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const T before = __shfl_up_sync(FULL_WARP, value, distance);
        if (lane_id() >= distance) value += before;
    }
    return value;
}

// How many of `lanes` are before this one. A shift by 32 leaves nothing, so no mask is needed: a
// mask took two more instructions, and a branch for the sampler's stores after it.
DEVICE int lanes_before(uint32_t lanes) { return __popc(__funnelshift_lc(0, lanes, static_cast<uint32_t>(WARP_SIZE - lane_id()))); }

// Over all lanes, in every lane.
DEVICE uint32_t sum_of_lanes(uint32_t value) {
#if defined(PARITY_EMULATOR)
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
#else
    return __reduce_add_sync(FULL_WARP, value);
#endif
}
