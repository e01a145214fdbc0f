// Row-major scales into tiles of 128 rows by 4 groups, for block-scaled GEMM, and back (inference
// 5.7). The scale of group g of row r is in tile (r / 128, g / 4) at byte
//
//     r % 32 * 16 + r % 128 / 32 * 4 + g % 4
//
// Missing rows and groups are 0 in a tile, and are not read back.
//
// A warp takes half of the rows of eight neighbouring tiles, a lane those of four of them. Of each
// tile a lane has 16 contiguous bytes: four groups of rows r, r + 32, r + 64 and r + 96. It reads
// 16 bytes of each of these rows, a word for each tile, and stores four times 16 bytes. The
// inverse goes the other way. Two lanes have 32 contiguous bytes of a row, the smallest sector of
// L2. If rows do not allow it, they are read byte by byte.
//
// Floor: a byte read and one written a scale. At 4.24 TB/s 3.5 us for the scales of groups of 32
// of 32768 x 7168, part of it hidden by the launch. Limit: the launch and one memory latency; 63 %
// of a warp's time is that of its loads (ncu). What was tried: kernels/docs/scale_swizzle.md.
//
// Launch: ceil(2 * row_tiles * ceil(group_tiles / 8) / WARPS) blocks.
#include "memory.h"
#include "quantize.h"

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int TILE_ROWS = 128, TILE_GROUPS = 4, TILES = 4;  // tiles of a lane
constexpr int SIDES = 2, WARP_TILES = SIDES * TILES;        // neighbouring lanes have the sides of a warp's tiles
constexpr int QUARTERS = 4, QUARTER_ROWS = TILE_ROWS / QUARTERS, WARP_ROWS = WARP_SIZE / SIDES;
constexpr uint32_t PARTS = QUARTER_ROWS / WARP_ROWS;        // warps that have the same tiles

struct ScaleSwizzleParams {
    uint8_t* scales; int64_t scales_row_stride;  // [num_rows, num_groups]; strides in bytes
    uint8_t* tiles; int64_t tiles_row_tiles_stride, tiles_group_tiles_stride;  // [row_tiles, group_tiles, 512]
    int64_t num_rows;
    int32_t num_groups;
};

// A lane's work: its first tile, and one row in each quarter of the tiles' rows.
struct Place {
    int64_t row_tile;
    int32_t group_tile, row;
};

DEVICE Place place_of_lane(const ScaleSwizzleParams& params) {
    const uint32_t across = ceil_div(params.num_groups, TILE_GROUPS * WARP_TILES);
    const uint32_t warp = blockIdx.x * WARPS + static_cast<uint32_t>(warp_id());
    const uint32_t tiles = warp / PARTS;
    return Place{static_cast<int64_t>(tiles / across),
                 static_cast<int32_t>(tiles % across) * WARP_TILES + lane_id() % SIDES * TILES,
                 static_cast<int32_t>(warp % PARTS) * WARP_ROWS + lane_id() / SIDES};
}

DEVICE uint8_t* lane_of_tile(const ScaleSwizzleParams& params, const Place& place, int tile) {
    return params.tiles + place.row_tile * params.tiles_row_tiles_stride +
           (place.group_tile + tile) * params.tiles_group_tiles_stride + 16 * place.row;
}

// The bytes of a row in the tiles of a lane: their offset, and their number if that is above 0.
DEVICE int bytes_of_row(const ScaleSwizzleParams& params, const Place& place, int quarter, int64_t& offset) {
    const int64_t row = place.row_tile * TILE_ROWS + quarter * QUARTER_ROWS + place.row;
    const int32_t group = place.group_tile * TILE_GROUPS;
    offset = row * params.scales_row_stride + group;
    return row < params.num_rows ? minimum(params.num_groups - group, TILE_GROUPS * TILES) : 0;
}

template <bool WIDE>
DEVICE void swizzle(const ScaleSwizzleParams& params) {
    const Place place = place_of_lane(params);
    if (place.row_tile * TILE_ROWS >= params.num_rows) return;
    uint32_t words[QUARTERS][TILES] = {};
    UNROLL
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        int64_t offset;
        const int bytes = bytes_of_row(params, place, quarter, offset);
        if (bytes > 0) load_words<WIDE>(params.scales + offset, words[quarter], bytes);
    }
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        if ((place.group_tile + tile) * TILE_GROUPS >= params.num_groups) return;
        store_vec16(lane_of_tile(params, place, tile),
                    Vec16{{words[0][tile], words[1][tile], words[2][tile], words[3][tile]}});
    }
}

template <bool WIDE>
DEVICE void unswizzle(const ScaleSwizzleParams& params) {
    const Place place = place_of_lane(params);
    if (place.row_tile * TILE_ROWS >= params.num_rows) return;
    uint32_t words[QUARTERS][TILES] = {};
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
        if ((place.group_tile + tile) * TILE_GROUPS >= params.num_groups) break;
        const Vec16 stored = load_vec16(lane_of_tile(params, place, tile));
        UNROLL
        for (int quarter = 0; quarter < QUARTERS; ++quarter) words[quarter][tile] = stored.w[quarter];
    }
    UNROLL
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        int64_t offset;
        const int bytes = bytes_of_row(params, place, quarter, offset);
        if (bytes > 0) store_words<WIDE>(params.scales + offset, words[quarter], bytes);
    }
}

KERNEL(scale_swizzle_vector, ScaleSwizzleParams, THREADS) { swizzle<true>(params); }
KERNEL(scale_swizzle_scalar, ScaleSwizzleParams, THREADS) { swizzle<false>(params); }
KERNEL(scale_unswizzle_vector, ScaleSwizzleParams, THREADS) { unswizzle<true>(params); }
KERNEL(scale_unswizzle_scalar, ScaleSwizzleParams, THREADS) { unswizzle<false>(params); }
