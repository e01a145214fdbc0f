// The channels of a head, or of a row of keys, in the registers of a warp: up to 512 in 16-byte
// accesses, or any even number up to 1024 in pairs.
#pragma once

#include "element.h"
#include "elements.h"
#include "rotation.h"

// A lane's channels of a head: pieces of COUNT neighbours, WARP_SIZE pieces apart. Missing
// channels are 0.
template <bool WIDE>
struct Channels {
    static constexpr int COUNT = WIDE ? VECTOR : 2, PIECES = WIDE ? 2 : 16;
    float x[PIECES][COUNT];

    static int32_t first(int piece) { return (lane_id() + piece * static_cast<int32_t>(WARP_SIZE)) * COUNT; }

    void load(const ELEMENT* head, int32_t head_dim) {
        UNROLL
        for (int p = 0; p < PIECES; ++p) {
            UNROLL
            for (int e = 0; e < COUNT; ++e) x[p][e] = 0.0f;
            if (first(p) >= head_dim) continue;
            if constexpr (WIDE) {
                load_elements<COUNT>(head + first(p), x[p]);
            } else {
                x[p][0] = Element<ELEMENT>::load(head + first(p));
                x[p][1] = Element<ELEMENT>::load(head + first(p) + 1);
            }
        }
    }
    void store(ELEMENT* head, int32_t head_dim) const {
        UNROLL
        for (int p = 0; p < PIECES; ++p) {
            if (first(p) >= head_dim) continue;
            if constexpr (WIDE) {
                store_elements<COUNT>(head + first(p), x[p]);
            } else {
                Element<ELEMENT>::store(head + first(p), x[p][0]);
                Element<ELEMENT>::store(head + first(p) + 1, x[p][1]);
            }
        }
    }
    // The dot product with another head's channels, in every lane.
    float dot(const Channels& other) const {
        float sum = 0.0f;
        UNROLL
        for (int p = 0; p < PIECES; ++p) {
            UNROLL
            for (int e = 0; e < COUNT; ++e) sum += x[p][e] * other.x[p][e];
        }
        return warp_sum(sum);
    }
    template <typename Params>
    void turn(const Params& params, int64_t token) {
        UNROLL
        for (int p = 0; p < PIECES; ++p)
            if (first(p) < params.head_dim) turn_channels(params, token, first(p), x[p]);
    }
};
