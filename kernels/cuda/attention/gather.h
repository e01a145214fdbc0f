// Copies of rows of device memory to panels (panels.h): of listed rows, and of consecutive rows.
#pragma once

#include "async_copy.h"
#include "numeric.h"
#include "panels.h"
#include "platform.h"

// The rows lane / 8 + 4 i, of the 16 rows that a warp gathers; this lane copies 16 bytes of each
// panel of them. Addresses are computed once for all panels: computing them for each copy takes
// longer than the copies.
struct GatheredRows {
    const bf16* from[4];  // the lane's columns of the first panel
    bool wanted[4];       // false for a row of zeros
};

// Lane i < 16 of the warp holds the source row of row i, in units of `stride` elements, or -1 for
// a row of zeros. A row of zeros forms no source address; `source` stands for it.
DEVICE GatheredRows find_rows(const bf16* source, int64_t stride, int32_t row) {
    const int lane = static_cast<int>(threadIdx.x % WARP_SIZE);
    GatheredRows rows;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const int32_t source_row = __shfl_sync(FULL_WARP, row, 4 * i + lane / 8);
        rows.wanted[i] = source_row >= 0;
        rows.from[i] = source + (rows.wanted[i] ? source_row * stride : 0) + lane % 8 * 8;
    }
    return rows;
}

// Starts the copies of the panels [FIRST, FIRST + COUNT) of 16 rows, to rows first_row and
// following of a tile. The policy is evict-last, because lists of many tokens name these rows.
template <int FIRST, int COUNT>
DEVICE void gather_panels(SharedAddress tile, const GatheredRows& rows, int first_row) {
    const CachePolicy policy = evicted_last();
    const int lane = static_cast<int>(threadIdx.x % WARP_SIZE);
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const SharedAddress at = tile + panel_offset(first_row + 4 * i + lane / 8, lane % 8);
        UNROLL
        for (int panel = FIRST; panel < FIRST + COUNT; ++panel)
            copy_async_16(at + panel * PANEL_BYTES, rows.from[i] + panel * 64, rows.wanted[i], policy);
    }
}

// Starts the copies of `rows` of 64 consecutive rows to PANEL_COUNT panels; the other rows become
// zeros. Called by thread `thread` of `threads`. Policy: none, or the CachePolicy of the copies.
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
