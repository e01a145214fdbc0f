// Which rows of w a GEMM uses (quantized_hopper.h).
#pragma once

#include "gate_up.h"

// The rows with the same numbers.
struct RowsInOrder {
    static constexpr bool IN_ORDER = true;
    static constexpr int BLOCKS = 1;  // of w, each with a scale of its own, that rows of 128 in sequence may be from

    int64_t row(int64_t number) const { return number; }
    // The distance from eight rows to the next eight.
    int64_t eight() const { return GRANULE; }
    bool are_of_two_blocks() const { return false; }
};

// The rows of gate or of up only, numbered by feature. All rows of gate come before those of up,
// or both are interleaved by eight. 64 features are always in one block of 128 rows; 128 features
// only if the rows are not interleaved.
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
