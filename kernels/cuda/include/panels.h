// Panels: how operands of warpgroup products lie in shared memory. A panel is 64 rows of 64 columns of bf16, a row
// 128 bytes, in the 128-byte swizzle that hopper.h describes; a wider operand is a row of panels. Panels start at
// multiples of 1024 bytes.
#pragma once

#include "async_copy.h"
#include "numeric.h"
#include "platform.h"

constexpr int PANEL_BYTES = 64 * 128;

// Byte offset within a panel of 16 bytes: 8 columns of one row.
DEVICE constexpr int panel_offset(int row, int chunk) { return row * 128 + 16 * (chunk ^ (row & 7)); }

// Starts the arrival of 16 rows, from first_row on, in PANEL_COUNT panels. Lane i < 16 of the warp holds the source
// row, in units of `stride` elements, of row first_row + i, or -1 for a row of zeros, for which no source address is
// formed. PANEL_COUNT is 1 or 4: lanes take 16 bytes each, of four rows or of one. Lists of many tokens name these rows.
template <int PANEL_COUNT>
DEVICE void gather_panels(SharedAddress panels, const bf16* source, int64_t stride, int first_row, int32_t row) {
    static_assert(PANEL_COUNT == 1 || PANEL_COUNT == 4, "a warp's copy covers whole rows of panels");
    constexpr int ROWS_AT_ONCE = 4 / PANEL_COUNT;
    const CachePolicy policy = evicted_last();
    const int lane = static_cast<int>(threadIdx.x % WARP_SIZE);
    const int panel = PANEL_COUNT == 4 ? lane / 8 : 0;
    UNROLL_BY(8)
    for (int i = 0; i < 16 / ROWS_AT_ONCE; ++i) {
        const int at = PANEL_COUNT == 4 ? i : 4 * i + lane / 8;
        const int32_t source_row = __shfl_sync(FULL_WARP, row, at);
        const bool wanted = source_row >= 0;
        const bf16* from = source + (wanted ? source_row * stride : 0) + panel * 64 + lane % 8 * 8;
        copy_async_16(panels + panel * PANEL_BYTES + panel_offset(first_row + at, lane % 8), from, wanted, policy);
    }
}

// Starts the arrival of `rows` of 64 consecutive rows in PANEL_COUNT panels; the others become zeros. Thread `thread`
// of `threads`. Policy: none, or the CachePolicy of the copies.
template <int PANEL_COUNT, typename... Policy>
DEVICE void load_panels(SharedAddress panels, const bf16* source, int64_t stride, int rows, int thread, int threads,
                        Policy... policy) {
    constexpr int CHUNKS = 8 * PANEL_COUNT;
    UNROLL_BY(4)
    for (int i = thread; i < 64 * CHUNKS; i += threads) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool wanted = row < rows;
        copy_async_16(panels + chunk / 8 * PANEL_BYTES + panel_offset(row, chunk % 8),
                      source + (wanted ? row * stride : 0) + chunk * 8, wanted, policy...);
    }
}
