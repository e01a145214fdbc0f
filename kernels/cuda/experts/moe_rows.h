// Rows of tokens and rows of experts (inference 11.3), shared by moe_expand and moe_reduce. A
// token's row is stored to the positions of its slots, the rows there are added to one, and
// padding positions become zeros.
//
// The including file is compiled with ELEMENT defined.
#pragma once

#include "element.h"
#include "elements.h"
#include "math.h"
#include "memory.h"

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int HELD = 6;               // slots whose rows a thread has in flight: all of a token of the model
constexpr int32_t NONE = -1;

// The positions of a token's slots.
struct Positions {
    const int32_t* token_topk_to_pos;  // of the token
    int64_t num_positions;
    int32_t topk;

    // The position of a slot; NONE where the slot does not exist or has no position.
    int64_t operator[](int slot) const {
        const int32_t position = slot < topk ? token_topk_to_pos[slot] : NONE;
        return position >= 0 && position < num_positions ? position : NONE;
    }
};

template <typename Params>
DEVICE Positions positions_of(const Params& params, int64_t token) {
    return Positions{params.token_topk_to_pos + token * params.token_topk_to_pos_token_stride, params.num_positions,
                     params.topk};
}

// Blocks that look for padding rows. They are the first of a launch: at its end a few of them,
// with all the padding rows, would still run. rows_per_block is a multiple of WARPS up to THREADS.
// It is smaller where positions are few: a block with 128 rows of 14 KB would still store them
// long after all others have ended. Positions are counted in 31 bits: the wait for a 64-bit
// division would delay every load.
template <typename Params>
DEVICE uint32_t clearing_blocks(const Params& params) {
    return ceil_div(static_cast<uint32_t>(params.num_positions), static_cast<uint32_t>(params.rows_per_block));
}

// Zeros for the padding rows among the rows_per_block positions of a block. A lane looks at one
// position, a warp clears those of its lanes.
template <int COUNT>
DEVICE void clear_rows(const int32_t* pos_to_token, int64_t block, int32_t rows_per_block, int64_t num_positions, ELEMENT* rows,
                       int64_t stride, int32_t hidden_size) {
    const float zeros[COUNT] = {};
    const int rows_of_warp = rows_per_block / WARPS;
    const int64_t first = block * rows_per_block + warp_id() * rows_of_warp;
    const int64_t own = first + lane_id(), end = minimum(first + rows_of_warp, num_positions);
    uint32_t free_rows = __ballot_sync(FULL_WARP, own < end && pos_to_token[own] < 0);
    for (; free_rows != 0; free_rows &= free_rows - 1) {
        const int64_t row = first + __ffs(static_cast<int>(free_rows)) - 1;
        for (int64_t column = lane_id() * COUNT; column < hidden_size; column += WARP_SIZE * COUNT)
            store_elements(rows + row * stride + column, zeros);
    }
}

// The sum over a token's slots of their rows' elements from `column` on, each times its weight
// where weights exist: fp32, fused, in the order of the slots.
template <int COUNT>
DEVICE void add_rows(const Positions& positions, const float* weights, const ELEMENT* rows, int64_t stride, int64_t column,
                     float (&sum)[COUNT]) {
    for (int first = 0; first < positions.topk; first += HELD) {
        Stored<COUNT, ELEMENT> stored[HELD];
        float weight[HELD] = {};
        bool has[HELD];
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            const int64_t position = positions[first + i];
            has[i] = position != NONE;
            if (!has[i]) continue;
            load_stored(rows + position * stride + column, stored[i]);
            weight[i] = weights ? weights[first + i] : 1.0f;
        }
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            if (!has[i]) continue;
            float row[COUNT];
            unpack_stored(stored[i], row);
            UNROLL
            for (int e = 0; e < COUNT; ++e) sum[e] = fused_multiply_add(weight[i], row[e], sum[e]);
        }
    }
}
