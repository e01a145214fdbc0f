// Tiles of the GEMM of quantized operands, for any GPU. Shared by linear_quantized.cu (which has
// the formulas), grouped_linear.cu and grouped_linear_swiglu.cu.
//
// GPUs before sm_89 have no MMA of e4m3, and none before sm_100 has one of e2m1. So codes become
// bf16, exactly, on the way from global memory through registers to shared memory. The next stage
// is loaded while this one is multiplied. The scale of a group of x takes the same way. At the end
// of a group its sums are multiplied by its scales and added to the result's.
//
// The including file is compiled with FORMAT and GROUP defined.
#pragma once

#include "codes.h"
#include "linear_quantized.h"
#include "quantize.h"

constexpr int FP8 = 1, MXFP4 = 2, NVFP4 = 3;
static_assert(FORMAT == FP8 || FORMAT == MXFP4 || FORMAT == NVFP4, "there are three formats");
constexpr int W_GROUP = FORMAT == NVFP4 ? 16 : 32;  // numbers of w that share a scale, where rows have scales
constexpr int BLOCK = 128;                          // rows of w that share one otherwise
// Whether sums of groups are multiplied by a scale; STEPS groups, or parts of one, are in a stage.
constexpr bool SCALED = FORMAT != NVFP4;
constexpr int STEP = SCALED && GROUP < DEPTH ? GROUP : DEPTH, STEPS = DEPTH / STEP;

using Large = Shape<128, 128, 2, 4, 2>;
using Small = Shape<16, 64, 1, 4, 2>;
using Scalar = Shape<64, 64, 2, 2, 2>;

// The row of w for a column of the result: the row with the same number. SHARED aligned columns
// belong to rows of one block and have one scale.
struct RowsInOrder {
    static constexpr int SHARED = BLOCK;
    int64_t row(int64_t column) const { return column; }
};

// Scales of w that a stage of a tile loads.
template <typename S, typename Columns>
constexpr int W_SCALES = FORMAT == FP8 ? ceil_div(S::COLUMNS, Columns::SHARED) : 0;

// Operands in shared memory, and their scales: of the rows of x for each step, and of w. The sums
// of the epilogue take their place.
template <typename S, typename Columns = RowsInOrder>
struct Layout {
    static constexpr int STAGE_SCALES = STEPS * S::ROWS + maximum(W_SCALES<S, Columns>, 4);
    struct Operands {
        typename S::Stage stages[S::STAGES];
        float scales[S::STAGES][STAGE_SCALES];
    };
    union Plan {
        Operands operands;
        typename S::Plan sums;
    };
    static constexpr int SCALES = OFFSET_OF(Operands, scales), BYTES = sizeof(Plan);
};

// ---------------------------------------------------------------- operands in flight

struct Operand {
    const uint8_t* codes;
    int64_t stride, extent, bytes;  // of a row
    Scales scales;                  // of e2m1
};

// This thread's part of a stage's codes: 16 bytes of a row at a time, and the scales of e2m1
// values.
template <int EXTENT, int THREADS, bool E2M1, bool WIDE>
struct Codes {
    static constexpr int ROW_CHUNKS = (E2M1 ? DEPTH / 2 : DEPTH) / 16, TOTAL = EXTENT * ROW_CHUNKS;
    static constexpr int COUNT = ceil_div(TOTAL, THREADS), CHUNK_NUMBERS = E2M1 ? 32 : 16;
    static constexpr int SCALES = E2M1 ? CHUNK_NUMBERS / W_GROUP : 1;  // of a chunk
    uint32_t words[COUNT][4];
    float scales[COUNT][SCALES];

    template <typename Order>
    void load(const Operand& operand, const Order& order, int64_t first, int64_t stage) {
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int number = static_cast<int>(threadIdx.x) + i * THREADS;
            const int64_t row = order.row(first + number / ROW_CHUNKS), chunk = stage * ROW_CHUNKS + number % ROW_CHUNKS;
            const int64_t bytes = number < TOTAL && row < operand.extent ? operand.bytes - 16 * chunk : 0;
            UNROLL
            for (int word = 0; word < 4; ++word) words[i][word] = 0;
            if (bytes > 0)
                load_words<WIDE>(operand.codes + row * operand.stride + 16 * chunk, words[i],
                                 static_cast<int>(minimum<int64_t>(bytes, 16)));
            if constexpr (E2M1) load_scales(operand.scales, row, static_cast<int32_t>(chunk) * SCALES, bytes > 0, i);
        }
    }
    void load_scales(const Scales& from, int64_t row, int32_t group, bool exists, int i) {
        UNROLL
        for (int g = 0; g < SCALES; ++g) {
            const bool has = exists && group + g < from.num_groups;
            const uint8_t byte = has ? scale_byte(from, row, group + g) : uint8_t{0};
            scales[i][g] = FORMAT == NVFP4 ? to_float(fp8_e4m3{byte}) : e8m0_to_float(byte);
        }
    }
    // As bf16, into the swizzled tile.
    void store(SharedAddress tile) const {
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int number = static_cast<int>(threadIdx.x) + i * THREADS;
            const int row = number / ROW_CHUNKS, chunk = number % ROW_CHUNKS * (CHUNK_NUMBERS / CHUNK);
            if (number >= TOTAL) continue;
            UNROLL
            for (int c = 0; c < CHUNK_NUMBERS / CHUNK; ++c) {
                const SharedAddress target = tile + Tile<DEPTH>::offset(row, chunk + c);
                if constexpr (E2M1)
                    store_shared_vec16(target, e2m1_as_bf16(words[i][c], scales[i][c * CHUNK / W_GROUP]));
                else
                    store_shared_vec16(target, e4m3_as_bf16(words[i][2 * c], words[i][2 * c + 1]));
            }
        }
    }
};

// A stage in flight: codes of both operands, and the scale of x, or of the block of w, that this
// thread loads.
template <typename S, bool WIDE, typename Columns>
struct Stage {
    Codes<S::ROWS, S::THREADS, FORMAT == NVFP4, WIDE> x;
    Codes<S::COLUMNS, S::THREADS, FORMAT != FP8, WIDE> w;
    float scale;
    static constexpr int X_SCALES = STEPS * S::ROWS, SCALES = X_SCALES + W_SCALES<S, Columns>;
    static_assert(SCALES <= S::THREADS, "a thread brings one scale");

    void load(const QuantizedProduct& product, const Columns& columns, const Part& part, int64_t stage) {
        const Scales &x_scales = product.x_scales, &w_scales = product.w_scales;
        const Result& result = product.result;
        const int64_t x_bytes = result.depth / (FORMAT == NVFP4 ? 2 : 1);
        const int64_t w_bytes = result.depth / (FORMAT == FP8 ? 1 : 2);
        x.load(Operand{product.x, product.x_stride, result.rows, x_bytes, x_scales}, RowsInOrder{}, part.row, stage);
        w.load(Operand{product.w, product.w_stride, result.columns, w_bytes, w_scales}, columns, part.column, stage);
        if constexpr (SCALED) {
            const int thread = static_cast<int>(threadIdx.x);
            const int64_t row = part.row + thread % S::ROWS;
            // The group of the thread's step of the stage.
            const int step = minimum(thread / S::ROWS, STEPS - 1);
            const auto group = static_cast<int32_t>((stage * DEPTH + step * STEP) / GROUP);
            scale = 0.0f;
            if (thread < STEPS * S::ROWS && row < result.rows && group < x_scales.num_groups)
                scale = scale_of_group(x_scales, row, group);
            if (FORMAT == FP8 && thread >= X_SCALES && thread < SCALES) {
                const int64_t w_row = columns.row(part.column + (thread - X_SCALES) * Columns::SHARED);
                if (w_row < result.columns) scale = scale_of_group(w_scales, w_row / BLOCK, group);
            }
        }
    }
    void store(SharedAddress tiles, float* scales) const {
        x.store(tiles);
        w.store(tiles + S::B);
        if (SCALED && threadIdx.x < SCALES) scales[threadIdx.x] = scale;
    }
};

// ---------------------------------------------------------------- MMA

// The scale of the warp's columns from 8 n on.
template <typename S, typename Columns>
DEVICE float w_scale_of(const float* w_scales, int n) {
    if constexpr (W_SCALES<S, Columns> == 0) return 1.0f;
    else if constexpr (W_SCALES<S, Columns> == 1) return w_scales[0];
    else return w_scales[(warp_column<S>() + 8 * n) / Columns::SHARED];
}

// result += sums times the scales of their rows and of their blocks of w; the sums restart at
// zero.
template <typename S, typename Columns>
DEVICE void promote(Sums<S>& result, Sums<S>& sums, const float* x_scales, const float* w_scales) {
    UNROLL
    for (int m = 0; m < S::M16; ++m) {
        const int row = warp_row<S>() + 16 * m + lane_id() / 4;
        const float scales[2] = {x_scales[row], x_scales[row + 8]};
        UNROLL
        for (int n = 0; n < S::N8; ++n) {
            const float w_scale = w_scale_of<S, Columns>(w_scales, n);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                result[m][n][i] = fused_multiply_add(sums[m][n][i] * scales[i / 2], w_scale, result[m][n][i]);
                sums[m][n][i] = 0.0f;
            }
        }
    }
}

// Multiplies a stage. `last`: k ends with it, and so does the group.
template <typename S, typename Columns>
DEVICE void multiply_groups(Sums<S>& result, Sums<S>& sums, SharedAddress tiles, const float* scales, int64_t stage,
                            bool last) {
    if constexpr (!SCALED) {
        multiply_stage<S, false, false>(result, tiles);
    } else if constexpr (STEPS == 1) {
        multiply_stage<S, false, false>(sums, tiles);
        if (last || (stage + 1) * DEPTH % GROUP == 0)
            promote<S, Columns>(result, sums, scales, scales + STEPS * S::ROWS);
    } else {
        multiply_stage<S, false, false, 0, STEP>(sums, tiles);
        promote<S, Columns>(result, sums, scales, nullptr);
        multiply_stage<S, false, false, STEP, DEPTH>(sums, tiles);
        promote<S, Columns>(result, sums, scales + S::ROWS, nullptr);
    }
}

// Sums a part of a product, by all threads of a block. After it no thread reads the shared memory.
template <typename S, bool WIDE, typename Columns>
DEVICE void sum_tile(const QuantizedProduct& product, const Columns& columns, const Part& part, Sums<S>& total) {
    const Result& result = product.result;
    const SharedAddress shared = shared_address(dynamic_shared());
    auto* const all_scales = reinterpret_cast<float*>(dynamic_shared() + Layout<S, Columns>::SCALES);
    const bool has_sums =
        part.row + warp_row<S>() < result.rows && part.column + warp_column<S>() < result.columns;
    Sums<S> sums = {};
    Stage<S, WIDE, Columns> next;
    if (part.begin < part.end) next.load(product, columns, part, part.begin);
    for (int64_t stage = part.begin; stage < part.end; ++stage) {
        const int place = static_cast<int>(stage % S::STAGES);
        const SharedAddress tiles = shared + place * S::STAGE_BYTES;
        float* const scales = all_scales + place * Layout<S, Columns>::STAGE_SCALES;
        next.store(tiles, scales);
        // After this barrier all threads see this stage, and no thread reads the previous one.
        __syncthreads();
        if (stage + 1 < part.end) next.load(product, columns, part, stage + 1);
        if (has_sums) multiply_groups<S, Columns>(total, sums, tiles, scales, stage, stage + 1 == part.end);
    }
    __syncthreads();
}

// Computes a part of a product, by all threads of a block.
template <typename S, bool WIDE>
DEVICE void multiply_tile(const QuantizedProduct& product, const Part& part) {
    Sums<S> total = {};
    sum_tile<S, WIDE>(product, RowsInOrder{}, part, total);
    store_sums<S>(product.result, part, total);
}
