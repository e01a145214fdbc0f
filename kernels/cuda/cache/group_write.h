// The e4m3 channels of a row of the paged cache, group by group (inference 5.4, 8.3).
#pragma once

#include "kv_cache.h"
#include "memory.h"
#include "quantize.h"

constexpr int LANE_CHANNELS = 8;  // channels of a lane: 16 bytes of bf16
constexpr int GROUP_LANES = SCALE_GROUP / LANE_CHANNELS;

// Quantizes a lane's channels from `channel` on, which are `stored` in bf16. All lanes of a warp
// take part, and GROUP_LANES neighbours share a group. Where the row is wanted, it stores the
// codes, and the group's scale or the 0 that pads the scales. `then` gets both codes and scale.
template <typename Row, typename Then>
DEVICE void write_group(const float (&x)[LANE_CHANNELS], const Vec16& stored, int32_t channel, uint8_t* data,
                        uint8_t* scales, bool wanted, Then then) {
    const bool exists = channel < Row::GROUPS * SCALE_GROUP;
    const uint8_t scale = group_scale(largest(largest_magnitude(stored), GROUP_LANES), E4M3_FLOOR, 1.0f / 448.0f);
    const bool within = Row::HEAD_DIM <= LARGEST_NOPE_DIM || channel < LARGEST_NOPE_DIM;
    if (wanted && within && lane_id() % GROUP_LANES == 0) scales[channel / SCALE_GROUP] = exists ? scale : 0;
    if (!exists) return;
    uint32_t codes[LANE_CHANNELS / 4];
    e4m3_codes(x, inverse_of_scale(scale), codes);
    if (wanted) store_words<true>(data + channel, codes);
    then(codes, scale);
}
