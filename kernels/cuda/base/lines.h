// Sums of matrix products in whole lines of memory.
#pragma once

#include "math.h"
#include "platform.h"

// Exchanges b of the lanes that are even by their bit `lanes` for a of those that are odd.
DEVICE void trade(float& a, float& b, bool odd, int lanes) {
    const float traded = __shfl_xor_sync(FULL_WARP, odd ? a : b, lanes);
    (odd ? a : b) = traded;
}

// Lanes trade, in 32 columns of 16 rows, until eight of them hold all 32 of one row, a line of memory: an addition to a part
// of a line keeps the second-level cache as busy as one to all of it. Before, a lane has two columns in each of four times
// eight, of the rows g and g + 8 (g = lane / 4). After, of each pair of rows g and g + 1 (g even), and of g + 8 and g + 9, it
// has four consecutive columns of the one in c[first] and c[first + 1], and of the other in the two behind them: those from
// line_column() on.
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

// Of the 32 columns the first of the four that a lane has then.
DEVICE int line_column() { return lane_id() / 4 % 2 * 16 + lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4; }

// Of 16 rows the one of which a lane has columns at 2 (i % 2) of c, in the numbers 2 (i / 2) and behind it.
DEVICE int line_row(int i) { return lane_id() / 8 * 2 + 8 * (i / 2) + i % 2; }
