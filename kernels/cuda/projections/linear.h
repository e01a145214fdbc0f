// GEMM by tiles of the result: shared by all kernels of linear layers (inference 5.5).
//
//     out[i,j] = before[i,j] + factor sum over k of A(i,k) B(j,k)
//     i < rows, j < columns, k < depth
//
// Sums are fp32; `before` (which may be absent) is added to the whole sum, with one rounding if
// out is bf16. Operands are in shared memory as bf16, a stage of DEPTH elements of k at a time;
// mma.sync reads them there (mma.h).
//
// A block takes one tile of the result and one of `splits` parts of k. With several parts each
// writes its sums to `partials`, and another launch adds these in order with finish_chunk. A block
// that folds takes all parts, and adds their sums in the same order: the same bits.
#pragma once

#include "elements.h"
#include "numeric.h"
#include "tiles.h"

constexpr int DEPTH = 64;     // of a stage
constexpr int CHUNK = 8;      // numbers of bf16 in 16 bytes
constexpr int TILE_GROUP = 8;  // rows of tiles that are taken together, so that their operands stay in L2

// The result and its inputs other than the operands. A kernel's parameters have these fields.
struct Result {
    const void* before; int64_t before_stride;  // [rows, columns], of out's type, or nullptr
    void* out; int64_t out_stride;              // [rows, columns]
    float* partials;                            // [splits, rows, columns rounded up to CHUNK], where splits > 1
    int64_t rows; int64_t columns; int64_t depth;
    int32_t splits;
    int32_t out_is_f32;
    int32_t wide;  // whether before and out take 16-byte accesses
    float factor;  // of every sum, on its way out
};

template <int ROWS_OF_TILE, int COLUMNS_OF_TILE, int WARPS_OF_ROWS, int WARPS_OF_COLUMNS, int STAGES_OF_TILE>
struct Shape {
    static constexpr int ROWS = ROWS_OF_TILE, COLUMNS = COLUMNS_OF_TILE, STAGES = STAGES_OF_TILE;
    static constexpr int STAGE_DEPTH = DEPTH;
    static constexpr int WARPS_M = WARPS_OF_ROWS, THREADS = 32 * WARPS_OF_ROWS * WARPS_OF_COLUMNS;
    static constexpr int WARP_ROWS = ROWS / WARPS_OF_ROWS, WARP_COLUMNS = COLUMNS / WARPS_OF_COLUMNS;
    static constexpr int M16 = WARP_ROWS / 16, N8 = WARP_COLUMNS / 8;
    // The sums in the epilogue: a row is 16 bytes longer, so that the lanes storing a fragment
    // conflict in few banks.
    static constexpr int SUM_STRIDE = COLUMNS + 4;
    struct Stage {
        uint8_t a[ROWS * DEPTH * 2];
        uint8_t b[COLUMNS * DEPTH * 2];
    };
    union Plan {
        Stage stages[STAGES];
        float sums[ROWS][SUM_STRIDE];
    };
    static constexpr int B = OFFSET_OF(Stage, b), STAGE_BYTES = sizeof(Stage), BYTES = sizeof(Plan);
    static_assert(N8 % 2 == 0, "columns are loaded 16 at a time");
};

// A block's part of the GEMM.
struct Part {
    int64_t row, column;   // of the tile's first element
    int64_t begin, end;    // stages
    int32_t split;
};

// Tiles are taken in groups of TILE_GROUP rows of tiles, column by column within a group. S: ROWS,
// COLUMNS, STAGE_DEPTH. Counts have 32 bits: a result of 2^31 tiles, or a row of as many stages,
// fits no memory. 32-bit divisions take a third of the time, and many parts have only a few
// stages.
template <typename S>
DEVICE Part part_of(const Result& result, int64_t block) {
    const auto row_tiles = static_cast<uint32_t>(ceil_div<int64_t>(result.rows, S::ROWS));
    const auto column_tiles = static_cast<uint32_t>(ceil_div<int64_t>(result.columns, S::COLUMNS));
    const auto stages = static_cast<uint32_t>(ceil_div<int64_t>(result.depth, S::STAGE_DEPTH));
    const uint32_t tiles = row_tiles * column_tiles, number = static_cast<uint32_t>(block);
    const uint32_t splits = static_cast<uint32_t>(result.splits);
    const uint32_t split = splits == 1 ? 0 : number / tiles, tile = number - split * tiles;
    const uint32_t group = tile / (TILE_GROUP * column_tiles), first = group * TILE_GROUP;
    const uint32_t rows = minimum<uint32_t>(TILE_GROUP, row_tiles - first);
    const uint32_t within = tile - group * TILE_GROUP * column_tiles, column = within / rows;
    const int64_t begin = splits == 1 ? 0 : static_cast<int64_t>(stages) * split / splits;
    const int64_t end = splits == 1 ? stages : static_cast<int64_t>(stages) * (split + 1) / splits;
    return Part{static_cast<int64_t>(first + within - column * rows) * S::ROWS, static_cast<int64_t>(column) * S::COLUMNS,
                begin, end, static_cast<int32_t>(split)};
}

template <typename S>
using Sums = float[S::M16][S::N8][4];

// Adds the sums of a part of k to those of the parts before it, as add_partials does, and starts
// the next part.
template <typename S>
DEVICE void fold(Sums<S>& total, Sums<S>& sums) {
    UNROLL
    for (int m = 0; m < S::M16; ++m) {
        UNROLL
        for (int n = 0; n < S::N8; ++n) {
            UNROLL
            for (int i = 0; i < 4; ++i) {
                total[m][n][i] += sums[m][n][i];
                sums[m][n][i] = 0.0f;
            }
        }
    }
}

// Fragments of 16 rows of A, for 16 elements of k from `k` on. A row of the tile is a row of A or,
// TRANSPOSED, one k.
template <int ROWS, bool TRANSPOSED>
DEVICE void load_a(uint32_t (&a)[4], SharedAddress tile, int row, int k) {
    const int lane = lane_id();
    if constexpr (TRANSPOSED) {
        ldmatrix_x4_transposed(a, tile + Tile<ROWS>::offset(k + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    } else {
        ldmatrix_x4(a, tile + Tile<DEPTH>::offset(row + lane % 16, k / 8 + lane / 16));
    }
}

// The same for 16 rows of B, which are columns of the result: b[0] and b[1] are those of the first
// eight.
template <int COLUMNS, bool TRANSPOSED>
DEVICE void load_b(uint32_t (&b)[4], SharedAddress tile, int column, int k) {
    const int lane = lane_id();
    if constexpr (TRANSPOSED) {
        ldmatrix_x4_transposed(b, tile + Tile<COLUMNS>::offset(k + lane % 16, column / 8 + lane / 16));
    } else {
        const int row = column + lane % 8 + lane / 16 * 8;
        ldmatrix_x4(b, tile + Tile<DEPTH>::offset(row, k / 8 + lane / 8 % 2));
    }
}

// The offset of the warp's part of the tile.
template <typename S>
DEVICE int warp_row() { return warp_id() % S::WARPS_M * S::WARP_ROWS; }
template <typename S>
DEVICE int warp_column() { return warp_id() / S::WARPS_M * S::WARP_COLUMNS; }

// sums += A B^T over one stage, or over these of its elements of k.
template <typename S, bool A_TRANSPOSED, bool B_TRANSPOSED, int BEGIN = 0, int END = DEPTH>
DEVICE void multiply_stage(Sums<S>& sums, SharedAddress stage) {
    UNROLL
    for (int k = BEGIN; k < END; k += 16) {
        uint32_t a[S::M16][4];
        UNROLL
        for (int m = 0; m < S::M16; ++m) load_a<S::ROWS, A_TRANSPOSED>(a[m], stage, warp_row<S>() + 16 * m, k);
        UNROLL
        for (int n = 0; n < S::N8; n += 2) {
            uint32_t b[4];
            load_b<S::COLUMNS, B_TRANSPOSED>(b, stage + S::B, warp_column<S>() + 8 * n, k);
            UNROLL
            for (int m = 0; m < S::M16; ++m) {
                mma_bf16_16x8x16(sums[m][n], a[m], b[0], b[1]);
                mma_bf16_16x8x16(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// ---------------------------------------------------------------- epilogue

// Adds `before` and stores CHUNK elements of a row, or those that the row has.
template <typename T>
DEVICE void finish_typed(const Result& result, int64_t row, int64_t column, float (&x)[CHUNK]) {
    constexpr int COUNT = Element<T>::per_vec16;
    const T* const before = static_cast<const T*>(result.before) + row * result.before_stride + column;
    T* const out = static_cast<T*>(result.out) + row * result.out_stride + column;
    UNROLL
    for (int i = 0; i < CHUNK; i += COUNT) {
        if (result.wide && column + i < result.columns) {
            float(&own)[COUNT] = *reinterpret_cast<float(*)[COUNT]>(&x[i]);
            if (result.before) {
                float added[COUNT];
                load_elements<COUNT>(before + i, added);
                UNROLL
                for (int e = 0; e < COUNT; ++e) own[e] += added[e];
            }
            store_elements<COUNT>(out + i, own);
        } else {
            UNROLL
            for (int e = i; e < i + COUNT; ++e)
                if (column + e < result.columns)
                    Element<T>::store(out + e, result.before ? x[e] + Element<T>::load(before + e) : x[e]);
        }
    }
}

DEVICE void finish_chunk(const Result& result, int64_t row, int64_t column, float (&x)[CHUNK]) {
    UNROLL
    for (int e = 0; e < CHUNK; ++e) x[e] *= result.factor;
    if (result.out_is_f32) {
        finish_typed<float>(result, row, column, x);
    } else {
        finish_typed<bf16>(result, row, column, x);
    }
}

// The address of the partial sums of CHUNK elements.
DEVICE float* partial_sums(const Result& result, int64_t split, int64_t row, int64_t column) {
    const int64_t stride = ceil_div<int64_t>(result.columns, CHUNK) * CHUNK;
    return result.partials + (split * result.rows + row) * stride + column;
}

// Stores the sums of CHUNK elements of a part of k; finishes them if it is the only part.
DEVICE void store_chunk(const Result& result, int32_t split, int64_t row, int64_t column, float (&x)[CHUNK]) {
    if (result.splits == 1) return finish_chunk(result, row, column, x);
    float* const to = partial_sums(result, split, row, column);
    store_vec16(to, pack<float>({x[0], x[1], x[2], x[3]}));
    store_vec16(to + 4, pack<float>({x[4], x[5], x[6], x[7]}));
}

// The block's epilogue through shared memory, which no thread may still be reading.
template <typename S>
DEVICE void store_sums(const Result& result, const Part& part, const Sums<S>& sums) {
    auto* const shared = reinterpret_cast<float*>(dynamic_shared());
    const int lane = lane_id();
    UNROLL
    for (int m = 0; m < S::M16; ++m) {
        UNROLL
        for (int n = 0; n < S::N8; ++n) {
            UNROLL
            for (int i = 0; i < 4; ++i) {
                const int row = warp_row<S>() + 16 * m + lane / 4 + i / 2 * 8;
                shared[row * S::SUM_STRIDE + warp_column<S>() + 8 * n + lane % 4 * 2 + i % 2] = sums[m][n][i];
            }
        }
    }
    __syncthreads();
    constexpr int ROW_CHUNKS = S::COLUMNS / CHUNK;
    for (int i = threadIdx.x; i < S::ROWS * ROW_CHUNKS; i += S::THREADS) {
        const int64_t row = part.row + i / ROW_CHUNKS, column = part.column + i % ROW_CHUNKS * CHUNK;
        if (row >= result.rows || column >= result.columns) continue;
        float x[CHUNK];
        load_elements<CHUNK>(shared + i / ROW_CHUNKS * S::SUM_STRIDE + i % ROW_CHUNKS * CHUNK, x);
        store_chunk(result, part.split, row, column, x);
    }
}

// Adds the partial sums, part after part: a thread takes CHUNK elements.
DEVICE void add_partials(const Result& result, int64_t number) {
    const int64_t row_chunks = ceil_div<int64_t>(result.columns, CHUNK);
    const int64_t row = number / row_chunks, column = number % row_chunks * CHUNK;
    if (row >= result.rows) return;
    float sum[CHUNK] = {};
    for (int32_t split = 0; split < result.splits; ++split) {
        float x[CHUNK];
        load_elements<CHUNK>(partial_sums(result, split, row, column), x);
        UNROLL
        for (int e = 0; e < CHUNK; ++e) sum[e] += x[e];
    }
    finish_chunk(result, row, column, sum);
}
