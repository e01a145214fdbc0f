// Scales in tiles of 128 rows by 4 groups, for block-scaled products, out of rows, and back (inference 5.7). The scale
// of group g of row r lies in tile (r / 128, g / 4) at byte
//
//     r % 32 * 16 + r % 128 / 32 * 4 + g % 4
//
// Rows and groups that there are not are 0 in a tile, and are not read back.
//
// A warp takes four neighbouring tiles. Lane l has of each the 16 bytes that lie together in it: four groups of rows l,
// l + 32, l + 64 and l + 96. It reads 16 bytes of each of these rows, a word for each tile, and stores four times 16
// bytes; the inverse goes the other way. Where rows do not allow it, they are read byte by byte.
//
// Floor: a byte read and one written a scale; at 4.24 TB/s 3.5 us for the scales of 32 of 32768 x 7168 numbers, which a
// launch covers in part. Rows are read in half sectors, whose other halves the neighbouring warp finds in the cache.
// On one H100 the
// inverse takes 11.6 us for 32768 x 224 and 23.3 for 32768 x 448, 42 % of a copy. ncu (reports/h100/ncu.txt): DRAM at 23 %, the
// second-level cache at 65 %, where half sectors are asked for, and 93 % of the cycles without a warp that could issue: a warp
// waits for its four loads.
//
// Launch: ceil(row_tiles * ceil(group_tiles / 4) / WARPS) blocks.
#include "memory.h"
#include "quantise.h"

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int TILE_ROWS = 128, TILE_GROUPS = 4, TILES = 4;  // tiles of a warp
constexpr int QUARTERS = TILE_ROWS / WARP_SIZE;

struct ScaleSwizzleParams {
    uint8_t* scales; int64_t scales_row_stride;  // [num_rows, num_groups]; strides in bytes
    uint8_t* tiles; int64_t tiles_row_tiles_stride, tiles_group_tiles_stride;  // [row_tiles, group_tiles, 512]
    int64_t num_rows;
    int32_t num_groups;
};
PARAMS_LAYOUT(ScaleSwizzleParams, scales, scales_row_stride, tiles, tiles_row_tiles_stride, tiles_group_tiles_stride,
              num_rows, num_groups)

// The first of the tiles of a warp.
struct Corner {
    int64_t row_tile;
    int32_t group_tile;
};

DEVICE Corner corner_of(const ScaleSwizzleParams& params) {
    const uint32_t across = ceil_div(params.num_groups, TILE_GROUPS * TILES);
    const uint32_t warp = blockIdx.x * WARPS + static_cast<uint32_t>(warp_id());
    return Corner{static_cast<int64_t>(warp / across), static_cast<int32_t>(warp % across) * TILES};
}

DEVICE uint8_t* lane_of_tile(const ScaleSwizzleParams& params, const Corner& corner, int tile) {
    return params.tiles + corner.row_tile * params.tiles_row_tiles_stride +
           (corner.group_tile + tile) * params.tiles_group_tiles_stride + 16 * lane_id();
}

// Of a row the bytes that lie in the tiles of a warp: where they begin, and how many there are.
DEVICE int bytes_of_row(const ScaleSwizzleParams& params, const Corner& corner, int quarter, int64_t& offset) {
    const int64_t row = corner.row_tile * TILE_ROWS + quarter * static_cast<int>(WARP_SIZE) + lane_id();
    const int32_t group = corner.group_tile * TILE_GROUPS;
    offset = row * params.scales_row_stride + group;
    return row < params.num_rows ? minimum(maximum(params.num_groups - group, 0), TILE_GROUPS * TILES) : 0;
}

template <bool WIDE>
DEVICE void swizzle(const ScaleSwizzleParams& params) {
    const Corner corner = corner_of(params);
    if (corner.row_tile * TILE_ROWS >= params.num_rows) return;
    uint32_t words[QUARTERS][TILES] = {};
    UNROLL
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        int64_t offset;
        const int bytes = bytes_of_row(params, corner, quarter, offset);
        if (bytes > 0) load_words<WIDE>(params.scales + offset, words[quarter], bytes);
    }
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        if ((corner.group_tile + tile) * TILE_GROUPS >= params.num_groups) return;
        store_vec16(lane_of_tile(params, corner, tile),
                    Vec16{{words[0][tile], words[1][tile], words[2][tile], words[3][tile]}});
    }
}

template <bool WIDE>
DEVICE void unswizzle(const ScaleSwizzleParams& params) {
    const Corner corner = corner_of(params);
    if (corner.row_tile * TILE_ROWS >= params.num_rows) return;
    uint32_t words[QUARTERS][TILES] = {};
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        if ((corner.group_tile + tile) * TILE_GROUPS >= params.num_groups) break;
        const Vec16 stored = load_vec16(lane_of_tile(params, corner, tile));
        UNROLL
        for (int quarter = 0; quarter < QUARTERS; ++quarter) words[quarter][tile] = stored.w[quarter];
    }
    UNROLL
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        int64_t offset;
        const int bytes = bytes_of_row(params, corner, quarter, offset);
        if (bytes > 0) store_words<WIDE>(params.scales + offset, words[quarter], bytes);
    }
}

KERNEL(scale_swizzle_vector, ScaleSwizzleParams, THREADS) { swizzle<true>(params); }
KERNEL(scale_swizzle_scalar, ScaleSwizzleParams, THREADS) { swizzle<false>(params); }
KERNEL(scale_unswizzle_vector, ScaleSwizzleParams, THREADS) { unswizzle<true>(params); }
KERNEL(scale_unswizzle_scalar, ScaleSwizzleParams, THREADS) { unswizzle<false>(params); }
