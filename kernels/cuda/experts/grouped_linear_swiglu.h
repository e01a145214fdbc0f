// Shared by the kernels of the experts' first linear layer with SwiGLU: their parameters, where
// codes and scales are stored, and those of padding rows (grouped_linear_swiglu.cu has the
// formulas).
#pragma once

#include "fp8_scales.h"
#include "gate_up.h"
#include "grouped_linear.h"
#include "swiglu.h"

struct GroupedLinearSwigluParams {
    const uint8_t* x; int64_t x_expert_stride; int64_t x_stride;  // codes, [rows, depth] or [experts, rows, depth]
    const uint8_t* w; int64_t w_expert_stride; int64_t w_stride;  // codes, [experts, columns, bytes of depth]
    const void* x_scales;           // see scale_layout.h; where x has experts, of one after the other
    const void* w_scales;           // of one expert after the other
    const int32_t* counts;          // [experts]
    const int32_t* expert_offsets;  // [experts + 1], or nullptr where x has experts
    const float* weight;            // [rows] or [experts, rows], or nullptr for ones
    uint8_t* codes; int64_t codes_expert_stride; int64_t codes_stride;  // [rows, columns / 2], or of each expert
    uint8_t* scales;                // bytes or fp32 numbers; where x has experts, of one after the other
    int64_t rows;
    int64_t columns;                // of gate and up together: a multiple of 16
    int64_t depth;
    int32_t experts;
    int32_t x_scale_layout;
    int32_t w_scale_layout;
    int32_t scale_bytes;            // whether scales of x and w are e8m0 bytes, and not fp32 numbers
    int32_t interleaved;            // whether rows of gate and up are
    int32_t scale_layout;           // of scales
    int32_t scale_type;             // see fp8_scales.h
    int32_t log2_group;             // of the numbers of a row that share a scale: 32 or 128
    int32_t round_to_bf16;
    uint32_t* num_taken;            // of units, where blocks take them as they get free; 0 before the launch
    int32_t wide;                   // whether codes take 16-byte accesses
    float limit;
    TensorMap x_map;                // boxes of rows of x, and of w, where a kernel copies such
    TensorMap w_map;
};

// The parameters of the GEMM: its operands, and the scale layouts that follow from its shape. A
// scale of x covers OF_X values. A scale of w covers OF_W values of each of W_ROWS rows.
template <int OF_X, int W_ROWS, int OF_W>
DEVICE GroupedLinearParams product_of(const GroupedLinearSwigluParams& params) {
    GroupedLinearParams product = {};
    product.x = params.x;
    product.x_expert_stride = params.x_expert_stride;
    product.x_stride = params.x_stride;
    product.w = params.w;
    product.w_expert_stride = params.w_expert_stride;
    product.w_stride = params.w_stride;
    product.x_scales = params.x_scales;
    product.w_scales = params.w_scales;
    product.counts = params.counts;
    product.expert_offsets = params.expert_offsets;
    product.rows = params.rows;
    product.columns = params.columns;
    product.depth = params.depth;
    product.experts = params.experts;
    product.num_taken = params.num_taken;
    product.scale_bytes = params.scale_bytes;
    product.x_scale_layout = params.x_scale_layout;
    product.x_padded_rows = padded_rows_of(params.x_scale_layout, params.rows);
    product.x_groups = static_cast<int32_t>(ceil_div<int64_t>(params.depth, OF_X));
    product.x_padded_groups = padded_groups_of(params.x_scale_layout, product.x_groups);
    product.x_expert_scales = params.expert_offsets ? 0 : product.x_padded_rows * product.x_padded_groups;
    product.w_scale_layout = params.w_scale_layout;
    const int64_t w_rows = ceil_div<int64_t>(params.columns, W_ROWS);
    product.w_padded_rows = padded_rows_of(params.w_scale_layout, w_rows);
    product.w_groups = static_cast<int32_t>(ceil_div<int64_t>(params.depth, OF_W));
    product.w_padded_groups = padded_groups_of(params.w_scale_layout, product.w_groups);
    product.w_expert_scales = product.w_padded_rows * product.w_padded_groups;
    return product;
}

// ---------------------------------------------------------------- codes and scales

// Where codes and scales of all rows, or of one expert's part, are stored: the parameters of
// fp8_scales.h and quantize_fp8.h.
struct QuantizedRows {
    uint8_t* codes; int64_t codes_row_stride;
    uint8_t* scales;
    int64_t num_rows, padded_rows, part_bytes;  // of the scales of a part
    int32_t num_groups, padded_groups, scale_layout, scale_type, log2_group;
};

DEVICE QuantizedRows quantized_rows_of(const GroupedLinearSwigluParams& params) {
    const int32_t features = static_cast<int32_t>(params.columns / 2), group = 1 << params.log2_group;
    const int32_t groups = (features + group - 1) >> params.log2_group;
    const int32_t padded_groups = padded_groups_of(params.scale_layout, groups);
    const int64_t padded_rows = padded_rows_of(params.scale_layout, params.rows);
    const int64_t part_bytes = padded_rows * padded_groups * (params.scale_type == E8M0 ? 1 : 4);
    return QuantizedRows{params.codes, params.codes_stride, params.scales, params.rows, padded_rows, part_bytes, groups,
                         padded_groups, params.scale_layout, params.scale_type, params.log2_group};
}

// The same for one expert's part, where rows have an expert dimension.
DEVICE QuantizedRows part_of_rows(const GroupedLinearSwigluParams& params, QuantizedRows rows, int32_t part) {
    rows.codes = params.codes + part * params.codes_expert_stride;
    rows.scales = params.scales + part * rows.part_bytes;
    return rows;
}

// 16 codes of a row, or the first `count` of them.
DEVICE void store_code_words(const GroupedLinearSwigluParams& params, uint8_t* target, const uint32_t (&codes)[4], int count) {
    if (params.wide) store_words<true>(target, codes);
    else store_words<false>(target, codes, count);
}

// By a warp: codes and scales of zeros for a row that exists, and 0 for the scales that pad the
// row or the rows.
DEVICE void quantize_zeros(const GroupedLinearSwigluParams& params, const QuantizedRows& target, int64_t row) {
    constexpr int CODES = 16;
    const bool exists = row < params.rows;
    const int64_t width = exists ? params.columns / 2 : 0;
    const uint32_t zeros[CODES / 4] = {};
    for (int64_t column = CODES * lane_id(); column < width; column += CODES * WARP_SIZE)
        store_code_words(params, target.codes + row * target.codes_row_stride + column, zeros,
                         static_cast<int>(minimum<int64_t>(width - column, CODES)));
    const float scale = scale_of(target, 0.0f);
    for (int32_t group = lane_id(); group < target.padded_groups; group += WARP_SIZE)
        store_scale(target, scale_place(target, row, group), scale, exists && group < target.num_groups);
}

// The same for all padding rows of sorted x, and for rows that pad scales: by the first
// `BLOCK_WARPS` warps of all blocks.
template <int BLOCK_WARPS>
DEVICE void quantize_rows_of_nobody(const GroupedLinearSwigluParams& params, const QuantizedRows& target,
                                    const GroupedLinearParams& product) {
    if (params.expert_offsets == nullptr) return;
    const uint32_t step = gridDim.x * BLOCK_WARPS * WARP_SIZE;
    int64_t first = (blockIdx.x * BLOCK_WARPS + static_cast<uint32_t>(uniform(warp_id()))) * WARP_SIZE;
    for (; first < target.padded_rows; first += step) {
        const int64_t own = first + lane_id();
        const bool is_nobodys = own >= params.rows || is_padding(product, own);
        uint32_t marked = __ballot_sync(FULL_WARP, own < target.padded_rows && is_nobodys);
        for (; marked != 0; marked &= marked - 1)
            quantize_zeros(params, target, first + __ffs(static_cast<int>(marked)) - 1);
    }
}
