// bf16 tiles in shared memory, and MMA by mma.sync out of them.
#pragma once

#include "memory.h"
#include "mma.h"

// A row-major tile of bf16 in shared memory, in chunks of 8 columns (16 bytes). Eight rows of one
// chunk column fall into eight different bank groups. If a row is a multiple of eight chunks, an
// XOR with the row does this; otherwise a row length that is odd in chunks.
template <int COLUMNS>
struct Tile {
    static constexpr int CHUNKS = COLUMNS / 8;
    static constexpr bool XOR = CHUNKS % 8 == 0;
    static constexpr int ROW_BYTES = 16 * (XOR || CHUNKS % 2 ? CHUNKS : CHUNKS + 1);

    static constexpr int bytes(int rows) { return rows * ROW_BYTES; }
    // Byte offset of one chunk.
    static constexpr int offset(int row, int chunk) {
        return row * ROW_BYTES + 16 * (XOR ? chunk ^ (row & 7) : chunk);
    }
};

// k-steps (16 columns each) between two calls of `between`.
constexpr int STEPS_BETWEEN = 4;
constexpr int pauses(int columns) { return ceil_div(columns / 16, STEPS_BETWEEN); }

// c[n] += A B^T: 16 rows of tile A from a_row on, N8 * 8 rows of tile B from b_row on, over all
// COLUMNS of both. between(0), between(1), ... are called along the way, pauses(COLUMNS) times in
// all. They are other work of the warp, to fill the issue slots in which the MMAs wait for
// operands. N8 is even.
template <int COLUMNS, int N8, typename Between>
DEVICE void multiply_rows(float (&c)[N8][4], SharedAddress a_tile, int a_row, SharedAddress b_tile, int b_row,
                          Between between) {
    using T = Tile<COLUMNS>;
    static_assert(N8 % 2 == 0, "B is loaded 16 rows at a time");
    const int lane = lane_id();
    UNROLL
    for (int pause = 0; pause < pauses(COLUMNS); ++pause) {
        UNROLL
        for (int k = STEPS_BETWEEN * pause; k < minimum(STEPS_BETWEEN * (pause + 1), COLUMNS / 16); ++k) {
            uint32_t a[4];
            ldmatrix_x4(a, a_tile + T::offset(a_row + lane % 16, 2 * k + lane / 16));
            UNROLL
            for (int n = 0; n < N8; n += 2) {
                uint32_t b[4];
                const int row = b_row + 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, b_tile + T::offset(row, 2 * k + lane / 8 % 2));
                mma_bf16_16x8x16(c[n], a, b[0], b[1]);
                mma_bf16_16x8x16(c[n + 1], a, b[2], b[3]);
            }
        }
        between(pause);
    }
}

// c[m][n] += A B^T: 16 M rows of tile A from a_row on, 8 N8 rows of tile B from b_row on, over all
// COLUMNS of both. Each fragment of either is read once. N8 is even.
template <int COLUMNS, int M, int N8>
DEVICE void multiply_row_tiles(float (&c)[M][N8][4], SharedAddress a_tile, int a_row, SharedAddress b_tile, int b_row) {
    using T = Tile<COLUMNS>;
    static_assert(N8 % 2 == 0, "B is loaded 16 rows at a time");
    const int lane = lane_id();
    UNROLL
    for (int k = 0; k < COLUMNS / 16; ++k) {
        uint32_t a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m)
            ldmatrix_x4(a[m], a_tile + T::offset(a_row + 16 * m + lane % 16, 2 * k + lane / 16));
        UNROLL
        for (int n = 0; n < N8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, b_tile + T::offset(b_row + 8 * n + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
            UNROLL
            for (int m = 0; m < M; ++m) {
                mma_bf16_16x8x16(c[m][n], a[m], b[0], b[1]);
                mma_bf16_16x8x16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// c[m][n] += A B for the columns of B's 8-wide tiles first_tile + n. DEPTH columns of A, rows of
// B; COLUMNS of B. Tiles that B does not have are skipped: if they do not divide evenly, the last
// warps own fewer.
template <int DEPTH, int COLUMNS, bool RAGGED, int M, int N8>
DEVICE void multiply_columns(float (&c)[M][N8][4], SharedAddress a_tile, SharedAddress b_tile, int first_tile) {
    using A = Tile<DEPTH>;
    using B = Tile<COLUMNS>;
    constexpr int TILES = COLUMNS / 8;
    const int lane = lane_id();
    if (RAGGED && first_tile >= TILES) return;
    UNROLL
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) ldmatrix_x4(a[m], a_tile + A::offset(16 * m + lane % 16, k / 8 + lane / 16));
        UNROLL
        for (int n = 0; n < N8; n += 2) {
            if (RAGGED && first_tile + n >= TILES) break;
            // A tile without a neighbour is loaded twice and used once.
            int tile = first_tile + n + lane / 16;
            if (RAGGED || N8 % 2) tile = minimum(minimum(tile, first_tile + N8 - 1), TILES - 1);
            uint32_t b[4];
            ldmatrix_x4_transposed(b, b_tile + B::offset(k + lane % 16, tile));
            UNROLL
            for (int m = 0; m < M; ++m) {
                mma_bf16_16x8x16(c[m][n], a[m], b[0], b[1]);
                if (n + 1 < N8 && !(RAGGED && first_tile + n + 1 >= TILES))
                    mma_bf16_16x8x16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}
