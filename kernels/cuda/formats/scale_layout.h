// The layout of the scales of groups (inference 5.7).
//
// The parameters of kernels that write or read scales have
//   scales         bytes or fp32 numbers, at the offsets below; padding holds 0
//   scale_layout   one of the constants below
//   num_groups     groups of a row
//   padded_rows    rows of scales, padding included: num_rows, its multiple of 4 or of 128
//   padded_groups  groups of scales: num_groups or its multiple of 4
#pragma once

#include "numeric.h"

constexpr int PLAIN = 0;     // row by row
constexpr int MN_MAJOR = 1;  // group by group
constexpr int PACKED = 2;    // bytes: group by group, four groups in a word
constexpr int BLOCKED = 3;   // bytes: tiles of 128 rows by 4 groups

// Rows and groups of scales, padding included.
DEVICE int64_t padded_rows_of(int32_t scale_layout, int64_t rows) {
    const int64_t multiple = scale_layout == PLAIN ? 1 : scale_layout == BLOCKED ? 128 : 4;
    // A power of two: division by a value unknown at compile time takes a hundred instructions.
    return (rows + multiple - 1) & -multiple;
}
DEVICE int32_t padded_groups_of(int32_t scale_layout, int32_t groups) {
    return scale_layout == PLAIN || scale_layout == MN_MAJOR ? groups : ceil_div(groups, 4) * 4;
}

// The offset of a scale, counted in scales.
template <typename Params>
DEVICE int64_t scale_place(const Params& params, int64_t row, int32_t group) {
    const int64_t rows = params.padded_rows;
    if (params.scale_layout == PLAIN) return row * params.num_groups + group;
    if (params.scale_layout == MN_MAJOR) return group * rows + row;
    if (params.scale_layout == PACKED) return (group / 4 * rows + row) * 4 + group % 4;
    const int64_t tile = row / 128 * (params.padded_groups / 4) + group / 4;
    const int32_t in_tile = static_cast<int32_t>(row % 128);
    return tile * 512 + in_tile % 32 * 16 + in_tile / 32 * 4 + group % 4;
}
