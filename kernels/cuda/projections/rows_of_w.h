// Which rows of w the rows of a product are, where w's rows are its rows (quantised_hopper.h).
#pragma once

#include "gate_up.h"

// Those of their numbers.
struct RowsInOrder {
    static constexpr bool IN_ORDER = true;
    static constexpr int BLOCKS = 1;  // of w, each with a scale of its own, that rows of 128 in sequence may be from

    int64_t row(int64_t number) const { return number; }
    // From eight rows to the next eight.
    int64_t eight() const { return GRANULE; }
    bool are_of_two_blocks() const { return false; }
};

// Of gate alone, or of up: their numbers are those of the features. All of gate's lie before up's, or both are interleaved by eight;
// 64 features' are of one block of 128 rows either way, and 128 features' only where they are not interleaved.
struct RowsOfGateOrUp {
    static constexpr bool IN_ORDER = false;
    static constexpr int BLOCKS = 2;
    int64_t first, eight_rows;

    static RowsOfGateOrUp of(int64_t features, bool interleaved, bool of_up) {
        if (interleaved) return RowsOfGateOrUp{of_up ? GRANULE : 0, 2 * GRANULE};
        return RowsOfGateOrUp{of_up ? features : 0, GRANULE};
    }
    int64_t row(int64_t number) const { return first + number / GRANULE * eight_rows + number % GRANULE; }
    int64_t eight() const { return eight_rows; }
    bool are_of_two_blocks() const { return eight_rows != GRANULE; }
};
