// Shared by the kernels of grouped linear layers: their parameters, the rows of each expert, and
// the tiles of the result (grouped_linear.cu has the formulas).
#pragma once

#include "linear_quantized.h"
#include "selection.h"

constexpr int MAX_EXPERTS = 512;

// Shared memory of work tiles whose plan is Tile, and of count_tiles.
template <typename Tile>
struct SharedOfExperts {
    struct Plan {
        Tile tile;
        alignas(16) int32_t ends[MAX_EXPERTS];
    };
    static constexpr int BYTES = sizeof(Plan);

    static int32_t* ends() { return reinterpret_cast<int32_t*>(dynamic_shared() + OFFSET_OF(Plan, ends)); }
};

struct GroupedLinearParams {
    const uint8_t* x; int64_t x_expert_stride; int64_t x_stride;  // codes, [rows, depth] or [experts, rows, depth]
    const uint8_t* w; int64_t w_expert_stride; int64_t w_stride;  // codes, [experts, columns, bytes of depth]
    const void* x_scales;           // see scale_layout.h; where x has experts, of one after the other
    const void* w_scales;           // of one expert after the other
    const float* x_global_scale;    // [1], of NVFP4
    const float* w_global_scale;    // [experts], of NVFP4
    const int32_t* counts;          // [experts]
    const int32_t* expert_offsets;  // [experts + 1], or nullptr where x has experts
    void* out; int64_t out_expert_stride; int64_t out_stride;     // [rows, columns] or [experts, rows, columns]
    int64_t x_expert_scales;        // scales of an expert, those of padding among them
    int64_t w_expert_scales;
    int64_t rows;
    int64_t columns;
    int64_t depth;
    int64_t x_padded_rows;
    int64_t w_padded_rows;
    int32_t x_groups;
    int32_t x_padded_groups;
    int32_t x_scale_layout;
    int32_t w_groups;
    int32_t w_padded_groups;
    int32_t w_scale_layout;
    int32_t scale_bytes;  // whether scales are e8m0 bytes (of NVFP4: e4m3), and not fp32 numbers
    int32_t experts;
    int32_t out_is_f32;
    int32_t wide;         // whether out takes 16-byte accesses
    uint32_t* num_taken;  // of units, where blocks take them as they get free; 0 before the launch
    TensorMap x_map;      // boxes of rows of x, and of w, where a kernel copies such
    TensorMap w_map;
};

// ---------------------------------------------------------------- rows of experts

// An expert's rows: offsets are into x as a whole, or into the expert's own part of it.
struct Rows {
    int64_t first, count;
};

// Counts out of range are clamped: a negative one to 0, a large one to the rows that fit.
DEVICE Rows rows_of(const GroupedLinearParams& params, int32_t expert) {
    const bool sorted = params.expert_offsets != nullptr;
    const int64_t first = sorted ? params.expert_offsets[expert] : 0;
    const int64_t end = sorted ? params.expert_offsets[expert + 1] : params.rows;
    return Rows{first, minimum<int64_t>(maximum<int64_t>(params.counts[expert], 0), end - first)};
}

// Scales of an expert: `count` scales after those of the first one.
DEVICE const void* scales_behind(const GroupedLinearParams& params, const void* scales, int64_t count) {
    return static_cast<const uint8_t*>(scales) + (params.scale_bytes ? 1 : 4) * count;
}

// The GEMM of an expert's rows with its weights.
DEVICE QuantizedProduct product_of_expert(const GroupedLinearParams& params, int32_t expert, const Rows& rows) {
    // Where x has no expert dimension its expert strides are 0.
    const uint8_t* const x = params.x + expert * params.x_expert_stride + rows.first * params.x_stride;
    const uint8_t* const w = params.w + expert * params.w_expert_stride;
    const int64_t out = expert * params.out_expert_stride + rows.first * params.out_stride;
    const Scales x_scales{scales_behind(params, params.x_scales, expert * params.x_expert_scales), params.x_padded_rows,
                          params.x_groups, params.x_padded_groups, params.x_scale_layout,
                          params.scale_bytes, rows.first};
    const Scales w_scales{scales_behind(params, params.w_scales, expert * params.w_expert_scales), params.w_padded_rows,
                          params.w_groups, params.w_padded_groups, params.w_scale_layout, params.scale_bytes, 0};
    const Result result{nullptr, 0, static_cast<uint8_t*>(params.out) + (params.out_is_f32 ? 4 : 2) * out,
                        params.out_stride, nullptr, rows.count, params.columns, params.depth, 1, params.out_is_f32,
                        params.wide, 1.0f};
    return QuantizedProduct{x, params.x_stride, w, params.w_stride, x_scales, w_scales, result};
}
DEVICE QuantizedProduct product_of_expert(const GroupedLinearParams& params, int32_t expert) {
    return product_of_expert(params, expert, rows_of(params, expert));
}

// ---------------------------------------------------------------- tiles

// Replaces each of MAX_EXPERTS values by its inclusive prefix sum. One warp calls it.
DEVICE void add_up(int32_t* numbers) {
    constexpr int OWN = MAX_EXPERTS / WARP_SIZE, VECTORS = OWN / 4;
    auto* const own = reinterpret_cast<Vec16*>(numbers + lane_id() * OWN);
    int32_t sums[OWN], all = 0;
    UNROLL
    for (int i = 0; i < VECTORS; ++i) {
        const Vec16 four = load_vec16(own + i);
        UNROLL
        for (int j = 0; j < 4; ++j) sums[4 * i + j] = all += static_cast<int32_t>(four.w[j]);
    }
    const int32_t before = inclusive_sum(all) - all;
    UNROLL
    for (int i = 0; i < VECTORS; ++i) {
        Vec16 four;
        UNROLL
        for (int j = 0; j < 4; ++j) four.w[j] = static_cast<uint32_t>(before + sums[4 * i + j]);
        store_vec16(own + i, four);
    }
}

// Inclusive sums over the experts of their tiles of S::ROWS rows, by all threads of a block.
// `ends` has MAX_EXPERTS entries in shared memory, 16-byte aligned. A thread counts one expert's
// tiles, so that all counts are loaded at once. One warp adds them up.
template <typename S>
DEVICE void count_tiles(const GroupedLinearParams& params, int32_t* ends) {
    for (int32_t first = 0; first < MAX_EXPERTS; first += static_cast<int32_t>(blockDim.x)) {
        const int32_t expert = first + static_cast<int32_t>(threadIdx.x);
        const int64_t count = expert < params.experts ? rows_of(params, expert).count : 0;
        if (expert < MAX_EXPERTS) ends[expert] = static_cast<int32_t>(ceil_div<int64_t>(count, S::ROWS));
    }
    __syncthreads();
    if (uniform(warp_id()) == 0) add_up(ends);
    __syncthreads();
}

// A tile of the result: its expert, and its number among that expert's tiles.
struct ExpertTile {
    int32_t expert;
    int64_t number;
};

// The tiles of all experts, one expert after the other. Those of one expert come in the order of
// part_of: blocks that run at the same time then read few experts' weights.
template <typename S>
struct ExpertTiles {
    const GroupedLinearParams& params;
    const int32_t* ends;

    // 32 bits, as in part_of.
    uint32_t column_tiles() const { return static_cast<uint32_t>(ceil_div<int64_t>(params.columns, S::COLUMNS)); }
    int64_t count() const { return static_cast<int64_t>(ends[params.experts - 1]) * column_tiles(); }

    // The first expert whose tiles end beyond this one.
    ExpertTile operator[](int64_t number) const {
        const auto row_tile = static_cast<int32_t>(static_cast<uint32_t>(number) / column_tiles());
        // Counts the experts whose tiles end before it. Absent experts end where the last one
        // does. If the compiler may move these loads among a kernel's others, it treats what
        // follows as different between lanes. That includes the descriptors of MMAs.
        const SharedAddress own = shared_address(ends);
        int32_t before = 0;
        UNROLL
        for (int32_t step = MAX_EXPERTS / 2; step > 0; step /= 2)
            before += load_shared_word(own + 4 * (before + step - 1)) <= row_tile ? step : 0;
        const int64_t first = before > 0 ? ends[before - 1] : 0;
        return ExpertTile{before, number - first * column_tiles()};
    }
};

// ---------------------------------------------------------------- padding rows

// Whether row `row` of x belongs to no expert.
DEVICE bool is_padding(const GroupedLinearParams& params, int64_t row) {
    int32_t low = 0, high = params.experts;
    // The number of experts that start at the row or before it.
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if (params.expert_offsets[middle] <= row) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return true;
    const Rows rows = rows_of(params, low - 1);
    return row >= rows.first + rows.count;
}

// Zeros for the padding rows of out, by the first `WARPS` warps of all blocks. None where x has an
// expert dimension.
template <int WARPS>
DEVICE void clear_padding(const GroupedLinearParams& params) {
    if (params.expert_offsets == nullptr) return;
    const Result result{nullptr, 0, params.out, params.out_stride, nullptr,
                        params.rows, params.columns, params.depth, 1, params.out_is_f32, params.wide, 1.0f};
    const int64_t step = static_cast<int64_t>(gridDim.x) * WARPS * WARP_SIZE;
    int64_t first = (static_cast<int64_t>(blockIdx.x) * WARPS + uniform(warp_id())) * WARP_SIZE;
    for (; first < params.rows; first += step) {
        const int64_t own = first + lane_id();
        uint32_t marked = __ballot_sync(FULL_WARP, own < params.rows && is_padding(params, own));
        for (; marked != 0; marked &= marked - 1) {
            const int64_t row = first + __ffs(static_cast<int>(marked)) - 1;
            for (int64_t column = CHUNK * lane_id(); column < params.columns; column += CHUNK * WARP_SIZE) {
                float zeros[CHUNK] = {};
                finish_chunk(result, row, column, zeros);
            }
        }
    }
}
