// Building blocks of the portable forward and backward of sparse attention: shapes of a block's
// work, the gather of rows, and MMA from shared memory.
//
// Division of work: all heads of a token share one list of keys. A block takes a token and up to
// 64 of its heads as the M side of the GEMMs. It gathers the listed rows of K (and V) tile by tile
// to shared memory with cp.async, one tile ahead of the MMA. Its result (out, or dq) stays in
// registers, split over the warps by columns. Scores are split over the warps by heads and keys.
// Shared tiles are swizzled, so that ldmatrix reads eight rows without a bank conflict. Blocks of
// the same token are neighbours in the grid, so its rows are read from L2.
//
// Defines
//   HEAD_DIM         width of q and k, a multiple of 16, at most 576
//   V_DIM            width of v and out, a multiple of 16, at most 512
//   HEADS_PER_BLOCK  16 or 64
//   V_SEPARATE       1: V is a separate tensor. 0: V is the first V_DIM columns of K
//   DETERMINISTIC    1: the backward stores a row a slot. 0: it adds to keys' rows by atomics
#pragma once

#include "async_copy.h"
#include "block_heads.h"
#include "math.h"
#include "memory.h"
#include "mma.h"
#include "numeric.h"
#include "platform.h"
#include "sparse_attention.h"

#if !defined(HEAD_DIM) || !defined(V_DIM) || !defined(HEADS_PER_BLOCK) || !defined(V_SEPARATE) || \
    !defined(DETERMINISTIC)
#error "define HEAD_DIM, V_DIM, HEADS_PER_BLOCK, V_SEPARATE and DETERMINISTIC"
#endif

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 576, "HEAD_DIM is a multiple of 16 up to 576");
static_assert(V_DIM % 16 == 0 && V_DIM >= 16 && V_DIM <= 512, "V_DIM is a multiple of 16 up to 512");
static_assert(V_SEPARATE || V_DIM <= HEAD_DIM, "V as a part of K cannot be wider than K");
// ---------------------------------------------------------------- shapes of the block's work

// A row-major tile of bf16 in shared memory, in chunks of 8 columns (16 bytes). Eight rows of one
// chunk column are in eight different bank groups: by XOR with the row where a row is a multiple
// of eight chunks, otherwise by a row length that is odd in chunks.
template <int COLUMNS>
struct Tile {
    static constexpr int CHUNKS = COLUMNS / 8;
    static constexpr bool XOR = CHUNKS % 8 == 0;
    static constexpr int ROW_BYTES = 16 * (XOR ? CHUNKS : CHUNKS + 1);

    static constexpr int bytes(int rows) { return rows * ROW_BYTES; }
    // Byte offset of one chunk.
    static constexpr int offset(int row, int chunk) {
        return row * ROW_BYTES + 16 * (XOR ? chunk ^ (row & 7) : chunk);
    }
};

constexpr int STAGES = 2;
constexpr int MAX_SHARED_BYTES = 227 * 1024;

using KeyTile = Tile<HEAD_DIM>;  // also q and dq
using ValueTile = Tile<V_DIM>;   // also out and dout
using GatheredValueTile = Tile<V_SEPARATE ? V_DIM : HEAD_DIM>;
constexpr int GATHERED_ROW_BYTES = KeyTile::ROW_BYTES + (V_SEPARATE ? ValueTile::ROW_BYTES : 0);

// Dynamic shared memory, for KEYS slots in a tile.
template <int KEYS, bool BACKWARD>
struct Layout {
    using WeightTile = Tile<KEYS>;  // P and dS: heads x slots
    static constexpr int STAGE_BYTES = KEYS * GATHERED_ROW_BYTES;
    static constexpr int WEIGHT_BYTES = WeightTile::bytes(HEADS_PER_BLOCK);
    struct Plan {
        uint8_t q[KeyTile::bytes(HEADS_PER_BLOCK)];
        [[no_unique_address]] Where<BACKWARD, uint8_t[ValueTile::bytes(HEADS_PER_BLOCK)]> dout;
        uint8_t stages[STAGES][STAGE_BYTES];
        uint8_t p[WEIGHT_BYTES];
        [[no_unique_address]] Where<BACKWARD, uint8_t[WEIGHT_BYTES]> ds;
        int32_t rows[STAGES][KEYS];  // key rows of the slots, -1 where invalid
        [[no_unique_address]] Where<!BACKWARD, float[KEY_WARPS][HEADS_PER_BLOCK]> partial;  // maxima, later sums
        [[no_unique_address]] Where<!BACKWARD, float[HEADS_PER_BLOCK]> factor;
    };
    static constexpr int Q = OFFSET_OF(Plan, q), DOUT = OFFSET_OF(Plan, dout), STAGE = OFFSET_OF(Plan, stages);
    static constexpr int P = OFFSET_OF(Plan, p), DS = OFFSET_OF(Plan, ds), ROWS = OFFSET_OF(Plan, rows);
    static constexpr int PARTIAL = OFFSET_OF(Plan, partial), FACTOR = OFFSET_OF(Plan, factor);
    static constexpr int BYTES = sizeof(Plan);

    static constexpr int keys(int stage) { return STAGE + stage * STAGE_BYTES; }
    // Without a separate V, values are the leading columns of the same rows.
    static constexpr int values(int stage) { return keys(stage) + (V_SEPARATE ? KeyTile::bytes(KEYS) : 0); }
};
// Column tiles of 8 that one warp owns when the columns of a GEMM are split over the warps.
constexpr int column_tiles_per_warp(int columns) { return ceil_div(columns / 8, WARPS); }
constexpr int KEY_N8 = column_tiles_per_warp(HEAD_DIM);
constexpr int VALUE_N8 = column_tiles_per_warp(V_DIM);

// ---------------------------------------------------------------- gathering

// Copies this warp's ROWS rows of a tile. Lane i < ROWS holds the source row of row first_row + i,
// or -1 for a row of zeros, for which no source address is formed.
template <typename T, int ROWS>
DEVICE void gather_rows(SharedAddress tile, int first_row, const bf16* source, int64_t stride, int32_t row) {
    constexpr int CHUNKS = ROWS * T::CHUNKS;
    UNROLL
    for (int i = lane_id(); i < ceil_div(CHUNKS, 32) * 32; i += 32) {
        const int r = i / T::CHUNKS, chunk = i % T::CHUNKS;
        const int32_t source_row = __shfl_sync(FULL_WARP, row, r % ROWS);
        const bool wanted = source_row >= 0;
        const bf16* from = source + (wanted ? source_row * stride : 0) + chunk * 8;
        if (CHUNKS % 32 == 0 || i < CHUNKS) copy_async_16(tile + T::offset(first_row + r, chunk), from, wanted);
    }
}

// Starts the copies of one tile. This lane's slot of it holds `index`. Returns whether any slot of
// this warp is valid.
template <typename L, int KEYS>
DEVICE bool gather_tile(const SlotList& list, SharedAddress shared, int stage, int32_t index) {
    constexpr int ROWS = KEYS / WARPS;
    const int first_row = warp_id() * ROWS;
    const int32_t row = lane_id() < ROWS ? list.valid_row(index) : -1;
    int32_t* rows = reinterpret_cast<int32_t*>(dynamic_shared() + L::ROWS) + stage * KEYS;
    if (lane_id() < ROWS) rows[first_row + lane_id()] = row;
    gather_rows<KeyTile, ROWS>(shared + L::keys(stage), first_row, list.k, list.k_stride, row);
    if constexpr (V_SEPARATE)
        gather_rows<ValueTile, ROWS>(shared + L::values(stage), first_row, list.v, list.v_stride, row);
    copy_commit();
    return __any_sync(FULL_WARP, row >= 0);
}

// The slot of a tile that this lane looks up for its warp.
template <int KEYS>
DEVICE int lane_slot(int tile) {
    constexpr int ROWS = KEYS / WARPS;
    return tile * KEYS + warp_id() * ROWS + lane_id() % ROWS;
}

// ---------------------------------------------------------------- MMA from shared memory

// c[n] += A B^T: 16 rows of tile A starting at a_row, N8 * 8 rows of tile B starting at b_row,
// both read over the columns [FROM, TO).
template <typename A, typename B, int FROM, int TO, int N8>
DEVICE void multiply_rows(float (&c)[N8][4], SharedAddress a_tile, int a_row, SharedAddress b_tile, int b_row) {
    const int lane = lane_id();
    UNROLL_BY(4)
    for (int k = FROM / 16; k < TO / 16; ++k) {
        uint32_t a[4];
        ldmatrix_x4(a, a_tile + A::offset(a_row + lane % 16, 2 * k + lane / 16));
        if constexpr (N8 == 1) {
            uint32_t b[2];
            ldmatrix_x2(b, b_tile + B::offset(b_row + lane % 8, 2 * k + lane / 8 % 2));
            mma_bf16_16x8x16(c[0], a, b[0], b[1]);
        } else {
            UNROLL
            for (int n = 0; n < N8; n += 2) {
                uint32_t b[4];
                const int row = b_row + 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, b_tile + B::offset(row, 2 * k + lane / 8 % 2));
                mma_bf16_16x8x16(c[n], a, b[0], b[1]);
                mma_bf16_16x8x16(c[n + 1], a, b[2], b[3]);
            }
        }
    }
}

// multiply_rows for two left operands and one right operand, which is loaded once.
template <typename A0, typename A1, typename B, int TO, int N8>
DEVICE void multiply_rows_twice(float (&c0)[N8][4], SharedAddress a0_tile, float (&c1)[N8][4], SharedAddress a1_tile,
                                int a_row, SharedAddress b_tile, int b_row) {
    const int lane = lane_id();
    UNROLL_BY(4)
    for (int k = 0; k < TO / 16; ++k) {
        uint32_t a0[4], a1[4];
        ldmatrix_x4(a0, a0_tile + A0::offset(a_row + lane % 16, 2 * k + lane / 16));
        ldmatrix_x4(a1, a1_tile + A1::offset(a_row + lane % 16, 2 * k + lane / 16));
        if constexpr (N8 == 1) {
            uint32_t b[2];
            ldmatrix_x2(b, b_tile + B::offset(b_row + lane % 8, 2 * k + lane / 8 % 2));
            mma_bf16_16x8x16(c0[0], a0, b[0], b[1]);
            mma_bf16_16x8x16(c1[0], a1, b[0], b[1]);
        } else {
            UNROLL
            for (int n = 0; n < N8; n += 2) {
                uint32_t b[4];
                const int row = b_row + 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, b_tile + B::offset(row, 2 * k + lane / 8 % 2));
                mma_bf16_16x8x16(c0[n], a0, b[0], b[1]);
                mma_bf16_16x8x16(c0[n + 1], a0, b[2], b[3]);
                mma_bf16_16x8x16(c1[n], a1, b[0], b[1]);
                mma_bf16_16x8x16(c1[n + 1], a1, b[2], b[3]);
            }
        }
    }
}

// One 16 x 16 operand A at (row, column), both multiples of 16: of the tile, or of its transpose.
template <typename A, bool TRANSPOSED>
DEVICE void load_a(uint32_t (&a)[4], SharedAddress tile, int row, int column) {
    const int lane = lane_id();
    if constexpr (TRANSPOSED)
        ldmatrix_x4_transposed(a, tile + A::offset(column + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    else
        ldmatrix_x4(a, tile + A::offset(row + lane % 16, column / 8 + lane / 16));
}

// c[m][n] += (A or A^T) B for the columns of B's 8-wide tiles first_tile + n, over DEPTH rows of
// B. Tiles from TILES on do not exist and are skipped (RAGGED: a warp may own such tiles).
template <typename A, bool TRANSPOSED, typename B, int DEPTH, int TILES, bool RAGGED, int M, int N8>
DEVICE void multiply_columns(float (&c)[M][N8][4], SharedAddress a_tile, SharedAddress b_tile, int first_tile) {
    const int lane = lane_id();
    if (RAGGED && first_tile >= TILES) return;
    UNROLL
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) load_a<A, TRANSPOSED>(a[m], a_tile, 16 * m, k);
        UNROLL
        for (int n = 0; n < N8; n += 2) {
            if (RAGGED && first_tile + n >= TILES) break;
            uint32_t b[4] = {};
            if (n + 1 < N8) {
                const int tile = first_tile + n + lane / 16;
                ldmatrix_x4_transposed(b, b_tile + B::offset(k + lane % 16, RAGGED ? minimum(tile, TILES - 1) : tile));
            } else {
                uint32_t half[2];
                ldmatrix_x2_transposed(half, b_tile + B::offset(k + lane % 16, first_tile + n));
                b[0] = half[0];
                b[1] = half[1];
            }
            UNROLL
            for (int m = 0; m < M; ++m) {
                mma_bf16_16x8x16(c[m][n], a[m], b[0], b[1]);
                if (n + 1 < N8 && !(RAGGED && first_tile + n + 1 >= TILES))
                    mma_bf16_16x8x16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}
