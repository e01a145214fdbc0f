// Which rows of w the rows of a product are, where w's rows are its rows (quantised_hopper.h).
#pragma once

#include "gate_up.h"

// Those of their numbers.
struct RowsInOrder {
    static constexpr bool IN_ORDER = true;
    static constexpr int BLOCKS = 1;  // of w that 64 rows in sequence are from, where they have scales of blocks

    int64_t row(int64_t number) const { return number; }
    // In bytes, from row 8 i of 64 to the one eight further, which in order is `eight` bytes away.
    int64_t step(int, int64_t eight, int64_t) const { return eight; }
};

// Eight of gate, the eight of up of the same features, the next eight of gate: a thread that has wgmma's sums of a row and of the
// one eight further has gate and up of a feature. Blocks of 128 rows are gate's or up's, or have all of 64 rows in sequence.
struct RowsOfGateAndUp {
    static constexpr bool IN_ORDER = false;
    static constexpr int BLOCKS = 2;
    int64_t pair_rows, up_rows;  // from eight of gate to the next eight, and to those of up

    // Of all gate's rows before up's, or of both interleaved by eight.
    static RowsOfGateAndUp of(int64_t features, bool interleaved) {
        if (interleaved) return RowsOfGateAndUp{2 * GRANULE, GRANULE};
        return RowsOfGateAndUp{GRANULE, features};
    }
    int64_t row(int64_t number) const {
        const int64_t eight = number / GRANULE;
        return eight / 2 * pair_rows + eight % 2 * up_rows + number % GRANULE;
    }
    int64_t step(int i, int64_t, int64_t stride) const { return (i % 2 == 0 ? up_rows : pair_rows - up_rows) * stride; }
};
