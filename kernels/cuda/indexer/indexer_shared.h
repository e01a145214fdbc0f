// Shared memory of the indexer's kernels for sm_90a. A unit is what a block computes at a time: a
// token, or a work tile of a few. The queries and weights of one are loaded while the one before
// is computed. Tiles of keys come through a ring, those of all of a block's units one after the
// other.
#pragma once

#include "pipeline.h"

template <int STAGES, int Q_BYTES, int K_BYTES, int WEIGHTS, typename Notes>
struct IndexerShared {
    struct Plan {
        uint8_t q[2][Q_BYTES];
        uint8_t k[STAGES][K_BYTES];
        float weights[2][WEIGHTS];  // at weight_place
        Notes notes;                // what producers tell consumers
        PipelineBarriers<STAGES> tiles;
        PipelineBarriers<2> units;
    };
    using Tiles = Pipeline<OFFSET_OF(Plan, tiles), STAGES>;
    using Units = Pipeline<OFFSET_OF(Plan, units), 2>;
    static constexpr int BYTES = sizeof(Plan);
    static_assert(BYTES <= 227 * 1024, "tiles exceed shared memory");

    static constexpr int q(uint32_t unit) { return OFFSET_OF(Plan, q) + unit % 2 * Q_BYTES; }
    static constexpr int k(uint32_t tile) { return OFFSET_OF(Plan, k) + tile % STAGES * K_BYTES; }
    static float* weights(uint32_t unit) {
        return reinterpret_cast<float*>(dynamic_shared() + OFFSET_OF(Plan, weights)) + unit % 2 * WEIGHTS;
    }
    static uint8_t* notes() { return dynamic_shared() + OFFSET_OF(Plan, notes); }
};
