// Shared by the kernels of quantized linear layers: a GEMM of quantized operands
// (linear_quantized.cu has the formulas), the addresses of its scales, and the parameters of one
// GEMM.
#pragma once

#include "linear.h"
#include "math.h"
#include "scale_layout.h"
#include "tensor_map.h"

// The scales of one operand.
struct Scales {
    const void* scales;
    int64_t padded_rows;
    int32_t num_groups, padded_groups, scale_layout, bytes;
    int64_t first_row;  // the row of the scales that is the operand's first
};

// The byte of a group's scale.
DEVICE uint8_t scale_byte(const Scales& scales, int64_t row, int32_t group) {
    return static_cast<const uint8_t*>(scales.scales)[scale_place(scales, scales.first_row + row, group)];
}

// The scale at an offset, a power of two or any fp32 number.
DEVICE float scale_at(const Scales& scales, int64_t place) {
    if (scales.bytes) return e8m0_to_float(static_cast<const uint8_t*>(scales.scales)[place]);
    return static_cast<const float*>(scales.scales)[place];
}

// The scale of a group.
DEVICE float scale_of_group(const Scales& scales, int64_t row, int32_t group) {
    return scale_at(scales, scale_place(scales, scales.first_row + row, group));
}

// Whether the product of two scales is normal, or one of them is 0.
DEVICE bool is_regular(float x_scale, float w_scale) {
    const uint32_t exponent = __float_as_uint(x_scale * w_scale) & 0x7f800000u;
    return x_scale == 0.0f || w_scale == 0.0f || (exponent != 0 && exponent != 0x7f800000u);
}

// A GEMM of quantized operands.
struct QuantizedProduct {
    const uint8_t* x; int64_t x_stride;  // codes, [rows, bytes of depth]
    const uint8_t* w; int64_t w_stride;  // codes, [columns, bytes of depth]
    Scales x_scales, w_scales;
    Result result;                       // and the extents
};

// ---------------------------------------------------------------- a kernel of one GEMM

struct LinearQuantizedParams {
    const uint8_t* x; int64_t x_stride;  // codes, [rows, bytes of depth]
    const uint8_t* w; int64_t w_stride;  // codes, [columns, bytes of depth]
    const void* x_scales;                // see scale_layout.h
    const void* w_scales;
    const float* x_global_scale;         // [1], of NVFP4
    const float* w_global_scale;
    const void* before; int64_t before_stride;
    void* out; int64_t out_stride;
    float* partials;
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
    int32_t splits;
    int32_t out_is_f32;
    int32_t wide;
    TensorMap x_map;      // boxes of rows of x, and of w, where a kernel copies such
    TensorMap w_map;
};

DEVICE Scales x_scales_of(const LinearQuantizedParams& params) {
    return Scales{params.x_scales,        params.x_padded_rows,  params.x_groups,
                  params.x_padded_groups, params.x_scale_layout, params.scale_bytes,    0};
}

DEVICE Scales w_scales_of(const LinearQuantizedParams& params) {
    return Scales{params.w_scales,        params.w_padded_rows,  params.w_groups,
                  params.w_padded_groups, params.w_scale_layout, params.scale_bytes,    0};
}

// The epilogue multiplies every element by `factor`.
DEVICE Result result_of(const LinearQuantizedParams& params, float factor) {
    return Result{params.before,  params.before_stride, params.out,    params.out_stride, params.partials,
                  params.rows,    params.columns,       params.depth,  params.splits,     params.out_is_f32,
                  params.wide,    factor};
}

DEVICE QuantizedProduct product_of(const LinearQuantizedParams& params, float factor) {
    return QuantizedProduct{params.x,            params.x_stride,     params.w, params.w_stride, x_scales_of(params),
                            w_scales_of(params), result_of(params, factor)};
}
