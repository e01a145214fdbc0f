// Rows of groups: SPAN consecutive elements of a row to a lane, so that a group is a few neighbouring lanes and a
// warp has 512 elements of one row.
//
// Parameters of kernels that go over rows so have num_rows, width, row_warps (warps that take a row: its elements
// and, where they reach further, its padding groups), padded_rows (scale_layout.h).
#pragma once

#include "element.h"
#include "elements.h"
#include "memory.h"
#include "quantise.h"
#include "scale_layout.h"

constexpr int SPAN = 16;
constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;

// What a lane takes: elements column to column + count - 1 of a row, none of them where the row is padding, or ends
// before.
struct Span {
    int64_t row;
    int32_t column, count;
};

template <typename Params>
DEVICE Span span_of(const Params& params) {
    const uint32_t warp = blockIdx.x * WARPS + static_cast<uint32_t>(warp_id()), row_warps = params.row_warps;
    const int64_t row = warp / row_warps;
    const int32_t first = static_cast<int32_t>(warp % row_warps) * static_cast<int32_t>(WARP_SIZE);
    const int32_t column = (first + lane_id()) * SPAN;
    const int32_t left = row < params.num_rows ? maximum(params.width - column, 0) : 0;
    return Span{row, column, minimum(left, SPAN)};
}

// The elements of a span in wide accesses, where it has all of them or none, or one by one; the others are as they
// were.
template <bool WIDE, typename T>
DEVICE void load_span(const T* source, int count, float (&x)[SPAN]) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    UNROLL
    for (int i = 0; i < SPAN; i += COUNT)
        if (i < count) load_elements<COUNT>(source + i, *reinterpret_cast<float(*)[COUNT]>(&x[i]));
}

template <bool WIDE, typename T>
DEVICE void store_span(T* target, int count, const float (&x)[SPAN]) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    UNROLL
    for (int i = 0; i < SPAN; i += COUNT)
        if (i < count) store_elements(target + i, *reinterpret_cast<const float(*)[COUNT]>(&x[i]));
}
