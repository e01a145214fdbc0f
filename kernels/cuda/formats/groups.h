// Rows of groups: SPAN consecutive elements of a row to a lane. A group is a few neighbouring
// lanes, and a warp has 512 elements of one row.
//
// The parameters of kernels over such rows have num_rows, width, row_warps (warps of a row: its
// elements and, if they reach further, its padding groups), padded_rows (scale_layout.h).
#pragma once

#include "elements.h"
#include "memory.h"
#include "quantize.h"
#include "scale_layout.h"

constexpr int SPAN = 16;
constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;

// A lane's elements: column to column + count - 1 of a row. count is 0 if the row is padding, or
// ends before.
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

// The elements of a span as stored in memory.
template <typename T>
using Raw = Stored<SPAN, T>;

// In wide accesses, if a span ends with a whole one, or element by element. Missing elements are
// 0.
template <bool WIDE, typename T>
DEVICE void load_raw(const T* source, int count, Raw<T>& raw) {
    if constexpr (WIDE) {
        UNROLL
        for (int i = 0; i < Raw<T>::VECTORS; ++i)
            raw.vectors[i] = i * Element<T>::per_vec16 < count ? load_vec16(source + i * Element<T>::per_vec16) : Vec16{};
    } else {
        float x[SPAN] = {};
        UNROLL
        for (int i = 0; i < SPAN; ++i)
            if (i < count) x[i] = Element<T>::load(source + i);
        UNROLL
        for (int i = 0; i < Raw<T>::VECTORS; ++i)
            raw.vectors[i] =
                pack<T>(reinterpret_cast<const float(&)[Element<T>::per_vec16]>(x[i * Element<T>::per_vec16]));
    }
}

// As floats; missing elements keep their value.
template <bool WIDE, typename T>
DEVICE void load_span(const T* source, int count, float (&x)[SPAN]) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    UNROLL
    for (int i = 0; i < SPAN; i += COUNT)
        if (i < count) load_elements<COUNT>(source + i, *reinterpret_cast<float(*)[COUNT]>(&x[i]));
}

// Stores a lane's 32 bytes of bf16 together with its neighbour's, so that each access writes whole
// 32-byte sectors: first the even lane's, then the odd one's. All lanes of a warp take part.
DEVICE void store_span_pairs(bf16* target, int count, const float (&x)[SPAN]) {
    const int odd = lane_id() & 1;
    const Vec16 low = pack<bf16>(reinterpret_cast<const float(&)[8]>(x[0]));
    const Vec16 high = pack<bf16>(reinterpret_cast<const float(&)[8]>(x[8]));
    Vec16 first, second;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t received = __shfl_xor_sync(FULL_WARP, odd ? low.w[i] : high.w[i], 1);
        first.w[i] = odd ? received : low.w[i];
        second.w[i] = odd ? high.w[i] : received;
    }
    const int other_count = __shfl_xor_sync(FULL_WARP, count, 1);
    bf16* const even_target = target - odd * SPAN + odd * 8;
    if ((odd ? other_count : count) > 0) store_vec16(even_target, first);
    if ((odd ? count : other_count) > 0) store_vec16(even_target + SPAN, second);
}

// All lanes of a warp take part.
template <bool WIDE, typename T>
DEVICE void store_span(T* target, int count, const float (&x)[SPAN]) {
    constexpr int COUNT = WIDE ? Element<T>::per_vec16 : 1;
    if constexpr (WIDE && sizeof(T) == 2) {
        store_span_pairs(target, count, x);
    } else {
        UNROLL
        for (int i = 0; i < SPAN; i += COUNT)
            if (i < count) store_elements(target + i, *reinterpret_cast<const float(*)[COUNT]>(&x[i]));
    }
}

// The largest magnitude of stored elements, as bits (quantize.h); two bf16 at a time.
DEVICE uint32_t largest_magnitude(const Raw<float>& raw) {
    uint32_t magnitude = 0;
    UNROLL
    for (int i = 0; i < SPAN; ++i) magnitude = maximum(magnitude, raw.vectors[i / 4].w[i % 4] & 0x7fffffffu);
    return magnitude;
}
DEVICE uint32_t largest_magnitude(const Raw<bf16>& raw) {
    uint32_t pair = 0;
    UNROLL
    for (int i = 0; i < SPAN / 2; ++i) pair = maximum_u16x2(pair, raw.vectors[i / 4].w[i % 4] & 0x7fff7fffu);
    return maximum(pair << 16, pair & 0xffff0000u);
}
