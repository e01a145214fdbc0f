// MMA accumulators in whole lines of memory.
#pragma once

#include "math.h"
#include "platform.h"

// Exchanges b of the lanes that are even by their bit `lanes` for a of those that are odd.
DEVICE void trade(float& a, float& b, bool odd, int lanes) {
    const float traded = __shfl_xor_sync(FULL_WARP, odd ? a : b, lanes);
    (odd ? a : b) = traded;
}

// Lanes exchange values, in 32 columns of 16 rows, until eight of them hold all 32 columns of one
// row, a line of memory. An atomic add to a part of a line costs L2 as much as one to the whole
// line. Before: a lane has two columns in each of four groups of eight, of rows g and g + 8 (g =
// lane / 4). After: rows pair up as g and g + 1 (g even), and g + 8 and g + 9. Of each pair it has
// four consecutive columns of one row in c[first] and c[first + 1]. Those of the other row are in
// the two after them. The columns start at line_column().
template <int N8>
DEVICE void trade_columns(float (&c)[N8][4], int first) {
    const bool odd_lane = lane_id() % 2 != 0, odd_row = lane_id() / 4 % 2 != 0;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        UNROLL
        for (int n = first; n < first + 4; n += 2) trade(c[n][i], c[n + 1][i], odd_lane, 1);
    }
    UNROLL
    for (int n = first; n < first + 2; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) trade(c[n][i], c[n + 2][i], odd_row, 4);
    }
}

// The first of the four columns, of 32, that a lane has after the exchange.
DEVICE int line_column() { return lane_id() / 4 % 2 * 16 + lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4; }

// The row, of 16, whose columns a lane has at 2 (i % 2) of c, in the values from 2 (i / 2) on.
DEVICE int line_row(int i) { return lane_id() / 8 * 2 + 8 * (i / 2) + i % 2; }
