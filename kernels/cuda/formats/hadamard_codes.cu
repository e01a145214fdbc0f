// The Walsh-Hadamard transform of rows of bf16, quantized: the same bits as hadamard.cu with
// STORED 1 (e2m1) or 2 (e4m3), where 16-byte accesses fit every row (inference 5.4, 7, 7.1).
// hadamard.cu has the formulas.
//
// One lane takes a row: the seven steps, the largest magnitude of each group and the codes,
// without an exchange. To access memory line by line, a warp loads its 32 rows into shared memory
// by cp.async and stores the codes from there. Pieces of 16 bytes are swizzled within a row, or
// within its codes, so that eight lanes use different banks. A warp takes tiles of 32 rows
// round-robin. When its lanes have a tile in registers, the next one is in flight. A rest of at
// most half a round is taken by all warps, in groups of eight rows, four lanes a row. They do this
// while they wait for their first tile.
//
// Floor: 256 bytes read and 68 or 132 written a row, 20.3 us and 24.3 us for 262144 rows at 4.24
// TB/s. e2m1 issues about 15 instructions an element: 7 sums and a product, 1 to unpack, 1.5 to
// round and find the largest, 3.5 for the code, 1 for memory. That is about 1920 a tile, 15 us at
// 1.95 GHz. A third of them are logic, which a scheduler starts every second cycle.
// Measured on one H200: e2m1 25.05 us (81 % of the copy rate), e4m3 27.5 us (88 %). ncu, e2m1: 66
// % of issue slots, DRAM at 56 %, 12 warps of 168 registers an SM. What was tried:
// kernels/docs/hadamard.md.
//
// Defines: STORED  1 or 2. Launch: any number of blocks of one warp; RESIDENT_BLOCKS an SM fill
// it.
#include "async_copy.h"
#include "butterflies.h"
#include "elements.h"
#include "hadamard.h"
#include "math.h"
#include "memory.h"
#include "quantize.h"

#if !defined(STORED) || (STORED != 1 && STORED != 2)
#error "define STORED as 1 (e2m1) or 2 (e4m3)"
#endif

constexpr int TILE_ROWS = WARP_SIZE;
constexpr int PIECE = 16;  // bytes
constexpr int ROW_BYTES = DIM * 2, ROW_PIECES = ROW_BYTES / PIECE;
constexpr int CODE_BYTES = STORED == 1 ? DIM / 2 : DIM, CODE_PIECES = CODE_BYTES / PIECE;
constexpr int GROUP = 32, GROUPS = DIM / GROUP;  // of e2m1
// Eight pieces fill a row of the 32 banks.
constexpr int BANK_PIECES = 8;
// Blocks of an SM, each with 168 registers a lane and 10 or 12 KiB. A scheduler has registers for
// three warps, or for four with 128 each: 13 would spill.
constexpr int RESIDENT_BLOCKS = 12;

struct HadamardCodesParams {
    const bf16* x; int64_t x_row_stride;           // [num_rows, 128]; strides in elements
    uint8_t* codes; int64_t codes_row_stride;      // [num_rows, 64 or 128]
    uint8_t* scale_bytes;                          // [num_rows, 4] e8m0, or nullptr
    float* scales;                                 // [num_rows], or nullptr
    int64_t num_rows;
};

struct SharedPlan {
    uint8_t rows[TILE_ROWS][ROW_BYTES];
    uint8_t codes[TILE_ROWS][CODE_BYTES];
};
constexpr int CODES = OFFSET_OF(SharedPlan, codes);
SHARED_MEMORY(hadamard_codes, sizeof(SharedPlan))

// Byte offset of a piece of a row of the tile.
DEVICE int row_place(int row, int piece) { return row * ROW_BYTES + (piece ^ row % BANK_PIECES) * PIECE; }

// The same for its codes, row after row: a row of banks holds two rows of e2m1.
DEVICE int code_place(int row, int piece) {
    constexpr int ROWS_OF_BANKS = BANK_PIECES / CODE_PIECES;
    return (row * CODE_PIECES + (piece ^ row / ROWS_OF_BANKS % CODE_PIECES)) * PIECE;
}

// Rows of a tile. DENSE: all exist and are contiguous, so each access has a constant offset from
// the first. WHOLE: all exist. SOME: a missing row computes a copy of the last one and is not
// stored.
enum class Rows { DENSE, WHOLE, SOME };

// Two rows at once.
template <Rows ROWS>
DEVICE void copy_rows(const HadamardCodesParams& params, int64_t first_row, int rows) {
    constexpr int ROWS_AT_ONCE = WARP_SIZE / ROW_PIECES;
    static_assert(ROWS_AT_ONCE == 2, "a pair begins at an even row");
    const int piece = lane_id() % ROW_PIECES, odd = lane_id() / ROW_PIECES;
    const int64_t stride = ROWS == Rows::DENSE ? DIM : params.x_row_stride;
    const SharedAddress tile = shared_address(dynamic_shared());
    const bf16* const begin = params.x + first_row * stride + piece * (PIECE / 2);
    const bf16* source = begin + odd * stride;
    UNROLL_BY(ROWS == Rows::SOME ? 1 : TILE_ROWS)
    for (int first = 0; first < TILE_ROWS; first += ROWS_AT_ONCE) {
        // row_place(first + odd, piece): the bits of an even row and of `odd` do not overlap.
        const int place = (row_place(odd, piece) ^ first % BANK_PIECES * PIECE) + first * ROW_BYTES;
        if constexpr (ROWS == Rows::SOME) source = begin + minimum(first + odd, rows - 1) * stride;
        copy_async_16(tile + place, source);
        if constexpr (ROWS != Rows::SOME) source += first + ROWS_AT_ONCE < TILE_ROWS ? ROWS_AT_ONCE * stride : 0;
    }
}

DEVICE void load_row(float (&x)[DIM]) {
    const SharedAddress tile = shared_address(dynamic_shared());
    UNROLL
    for (int piece = 0; piece < ROW_PIECES; ++piece) {
        // The high bit of a piece is not swizzled.
        const int place = row_place(lane_id(), piece % BANK_PIECES) + piece / BANK_PIECES * BANK_PIECES * PIECE;
        unpack<bf16>(load_shared_vec16(tile + place), &x[piece * (PIECE / 2)]);
    }
}

// Of eight elements rounded to bf16 word i has the i-th in its lower half and the (i + 4)-th in
// the upper one.
DEVICE void round_octet(const float* x, uint32_t (&pairs)[4]) {
    UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(x[i], x[i + 4]);
}

// The largest magnitude of eight elements and those before, one for each half of the word.
DEVICE uint32_t larger(uint32_t largest_pair, const uint32_t (&pairs)[4]) {
    UNROLL
    for (int i = 0; i < 4; ++i) largest_pair = maximum_u16x2(largest_pair, pairs[i] & 0x7fff7fffu);
    return largest_pair;
}
DEVICE float larger_half(uint32_t largest_pair) {
    return __uint_as_float(maximum(largest_pair & 0xffffu, largest_pair >> 16) << 16);
}

// Sixteen bytes of a lane's codes, into the shared memory after the tile.
DEVICE void stage_codes(int piece, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    store_vec16(dynamic_shared() + CODES + code_place(lane_id(), piece), Vec16{{first, second, third, fourth}});
}

// A row's codes in e2m1; returns the bytes of its scales, the first group's lowest.
DEVICE uint32_t e2m1_row(float (&y)[DIM]) {
    static_assert(GROUP / 2 == PIECE, "a group's codes are a piece");
    uint32_t scales = 0;
    UNROLL
    for (int group = 0; group < GROUPS; ++group) {
        uint32_t pairs[GROUP / 8][4], codes[GROUP / 8], largest_pair = 0;
        UNROLL
        for (int octet = 0; octet < GROUP / 8; ++octet) {
            round_octet(&y[group * GROUP + octet * 8], pairs[octet]);
            largest_pair = larger(largest_pair, pairs[octet]);
        }
        const uint8_t scale = group_scale(larger_half(largest_pair), E2M1_FLOOR, 1.0f / 6.0f);
        UNROLL
        for (int octet = 0; octet < GROUP / 8; ++octet) codes[octet] = e2m1_codes(pairs[octet], scale);
        stage_codes(group, codes[0], codes[1], codes[2], codes[3]);
        scales |= static_cast<uint32_t>(scale) << 8 * group;
    }
    return scales;
}

// The same in e4m3, where the row is one group.
DEVICE uint32_t e4m3_row(float (&y)[DIM]) {
    uint32_t largest_pair = 0;
    UNROLL
    for (int first = 0; first < DIM; first += 8) {
        uint32_t pairs[4];
        round_octet(&y[first], pairs);
        largest_pair = larger(largest_pair, pairs);
        UNROLL
        for (int i = 0; i < 4; ++i) {
            y[first + i] = unpack_bf16_low(pairs[i]);
            y[first + i + 4] = unpack_bf16_high(pairs[i]);
        }
    }
    const uint8_t scale = group_scale(larger_half(largest_pair), E4M3_FLOOR, 1.0f / 448.0f);
    uint32_t codes[DIM / 4];
    e4m3_codes(y, inverse_of_scale(scale), codes);
    UNROLL
    for (int piece = 0; piece < DIM / PIECE; ++piece)
        stage_codes(piece, codes[4 * piece], codes[4 * piece + 1], codes[4 * piece + 2], codes[4 * piece + 3]);
    return scale;
}

template <int FORMAT>
DEVICE uint32_t quantize(float (&y)[DIM]) {
    if constexpr (FORMAT == 1) return e2m1_row(y);
    else return e4m3_row(y);
}

// The warp stores the codes of its rows from shared memory, line by line.
template <Rows ROWS>
DEVICE void store_codes(const HadamardCodesParams& params, int64_t first_row, int rows) {
    constexpr int ROWS_AT_ONCE = WARP_SIZE / CODE_PIECES;
    const SharedAddress staged = shared_address(dynamic_shared()) + CODES;
    const int piece = lane_id() % CODE_PIECES;
    const int64_t stride = ROWS == Rows::DENSE ? CODE_BYTES : params.codes_row_stride;
    uint8_t* const target = params.codes + first_row * stride + piece * PIECE;
    UNROLL
    for (int first = 0; first < TILE_ROWS; first += ROWS_AT_ONCE) {
        const int row = first + lane_id() / CODE_PIECES;
        if (ROWS != Rows::SOME || row < rows)
            store_vec16(target + row * stride, load_shared_vec16(staged + code_place(row, piece)));
    }
}

// The bytes of e2m1 in one access if they are aligned; all rows are, or none.
DEVICE void store_scales(const HadamardCodesParams& params, int64_t row, uint32_t scales) {
    if constexpr (STORED == 1) {
        uint8_t* const target = params.scale_bytes + row * GROUPS;
        if (reinterpret_cast<uintptr_t>(params.scale_bytes) % GROUPS == 0) *reinterpret_cast<uint32_t*>(target) = scales;
        else store_words<false>(target, {scales});
    } else {
        params.scales[row] = e8m0_to_float(static_cast<uint8_t>(scales));
    }
}

// Starts the copies of a tile of the first `tiled_rows` rows, or of none if no row is left.
DEVICE void start_tile(const HadamardCodesParams& params, int64_t tiled_rows, int64_t first_row) {
    const int64_t left = tiled_rows - first_row;
    if (left >= TILE_ROWS && params.x_row_stride == DIM) copy_rows<Rows::DENSE>(params, first_row, TILE_ROWS);
    else if (left >= TILE_ROWS) copy_rows<Rows::WHOLE>(params, first_row, TILE_ROWS);
    else if (left > 0) copy_rows<Rows::SOME>(params, first_row, static_cast<int>(left));
    copy_commit();
}

// Stores a tile's results: its scales from registers, its codes from shared memory.
DEVICE void finish_tile(const HadamardCodesParams& params, int64_t tiled_rows, int64_t first_row, uint32_t scales) {
    const int rows = static_cast<int>(minimum<int64_t>(TILE_ROWS, tiled_rows - first_row));
    if (lane_id() < rows) store_scales(params, first_row + lane_id(), scales);
    __syncwarp();
    if (rows == TILE_ROWS && params.codes_row_stride == CODE_BYTES) store_codes<Rows::DENSE>(params, first_row, rows);
    else store_codes<Rows::SOME>(params, first_row, rows);
}

// How many rows the warps take in tiles; a round of all warps has `turn_rows`. A rest of at most
// half a round is left for all warps: otherwise few warps would have one more tile and the others
// none.
DEVICE int64_t rows_in_tiles(int64_t num_rows, int64_t turn_rows) {
    if (num_rows < turn_rows) return num_rows;
    const int64_t rest = num_rows % turn_rows;
    return rest > turn_rows / 2 ? num_rows : num_rows - rest;
}

// The rows after the tiles, four lanes a row, in groups that fill a warp: group g belongs to warp
// g of the grid.
DEVICE void transform_rest(const HadamardCodesParams& params, int64_t tiled_rows) {
    constexpr int ROWS_AT_ONCE = WARP_SIZE / LANES;
    const int lane = lane_id() % LANES;
    UNROLL_BY(1)
    for (int64_t first = tiled_rows + static_cast<int64_t>(blockIdx.x) * ROWS_AT_ONCE; first < params.num_rows;
         first += static_cast<int64_t>(gridDim.x) * ROWS_AT_ONCE) {
        const int64_t row = first + lane_id() / LANES;
        // A missing row is a row of zeros: its lanes take part in the shuffles of their warp.
        const bool exists = row < params.num_rows;
        Row x = {};
        if (exists) load_row<true>(params.x + row * params.x_row_stride, lane, x);
        transform(x, lane);
        const Rounded rounded = round_to_bf16(x);
        uint8_t* const codes = params.codes + row * params.codes_row_stride;
        if constexpr (STORED == 1) {
            store_e2m1<true>(codes, params.scale_bytes + row * GROUPS, lane, exists, rounded);
        } else {
            const uint8_t scale = store_e4m3<true>(codes, lane, exists, x, rounded);
            if (exists && lane == 0) store_scales(params, row, scale);
        }
    }
}

KERNEL_OF(hadamard_codes, HadamardCodesParams, WARP_SIZE, RESIDENT_BLOCKS) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * TILE_ROWS;
    int64_t first_row = static_cast<int64_t>(blockIdx.x) * TILE_ROWS;
    // The first tile is in a whole round, or it is the only one, so it needs no division.
    start_tile(params, params.num_rows, first_row);
    const int64_t tiled_rows = rows_in_tiles(params.num_rows, step);
    // While the first tile is in flight.
    transform_rest(params, tiled_rows);
    for (; first_row < tiled_rows; first_row += step) {
        copy_wait<0>();
        __syncwarp();
        float y[1][DIM];
        load_row(y[0]);
        // Every lane has its row in registers now, and has stored its part of the codes before.
        // The tile's memory is free: the next rows are in flight while these are transformed.
        __syncwarp();
        start_tile(params, tiled_rows, first_row + step);
        walsh_hadamard<1>(y, 0);
        const uint32_t scales = quantize<STORED>(y[0]);
        finish_tile(params, tiled_rows, first_row, scales);
    }
}
