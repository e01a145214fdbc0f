// Rows and squares as e4m3 codes with scales, and back (inference 5.3, 5.4, 5.7). A group is 64 or
// 128 neighbours in a row, or a square of 128 by 128:
//
//     amax  = max(max |x|, 1e-4)
//     s     = 2^ceil(log2(amax * fp32(1/448)))   as an e8m0 byte or in fp32,
//             or amax * fp32(1/448)              in fp32
//     code  = e4m3(fp32(x / s))                  nearest even
//     y     = fp32(value(code) * s)              rounded once more if stored in bf16
//
// A group at the end of a row or column may be smaller. One with a NaN or an infinity has the
// scale NaN and codes of NaN (0x7f). scale_layout.h has the layout of scales; padding is 0.
//
// Groups of rows: a lane takes 16 elements (groups.h) in 16-byte accesses, so a group is 4 or 8
// lanes; codes are stored in one access. A division by a scale that is not a power of two is three
// instructions (quantize.h). Squares: a block takes one, a thread 16 elements of each of four
// rows. They stay in registers while the block finds the largest.
//
// Floor for bf16: 2 bytes read and 1 written an element, and 4 bytes or 1 a group; at 4.24 TB/s 98
// us for 32768 x 4096. Limit: memory. 6 instructions an element, 8 with division, of the 20 that
// there is time for. Scales stored group by group take 4-byte stores, 1/64 of the elements.
// Measured numbers and what was tried: kernels/docs/quantize_fp8.md.
//
// Defines: ELEMENT  type of x and y: bf16 or float. Launch: rows ceil(padded_rows * row_warps /
// WARPS) blocks, squares one block each.
#include "element.h"
#include "quantize_fp8.h"

constexpr int SQUARE = 128;

struct QuantizeFp8Params {
    const ELEMENT* x; int64_t x_row_stride;      // [num_rows, width]; strides in elements
    uint8_t* codes; int64_t codes_row_stride;    // [num_rows, width]
    uint8_t* scales;                             // scale_layout.h: bytes, or fp32 numbers
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout, scale_type, log2_group;
};

struct DequantizeFp8Params {
    const uint8_t* codes; int64_t codes_row_stride;  // [num_rows, width]
    ELEMENT* y; int64_t y_row_stride;                // [num_rows, width]
    const uint8_t* scales;                           // scale_layout.h: bytes, or fp32 numbers
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout, scale_type, log2_group, log2_group_rows;
};

template <bool WIDE>
DEVICE void quantize_rows(const QuantizeFp8Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.padded_rows) return;
    Raw<ELEMENT> x;
    load_raw<WIDE>(params.x + span.row * params.x_row_stride + span.column, span.count, x);
    quantize_span<WIDE>(params, span, x);
}

constexpr int SPANS = SQUARE * SQUARE / (THREADS * SPAN);
constexpr int LANES = SQUARE / SPAN;      // of a row of a square
constexpr int ROWS = THREADS / LANES;     // of a square that a block takes at a time

template <bool WIDE>
DEVICE void quantize_square(const QuantizeFp8Params& params) {
    __shared__ float of_warp[WARPS];
    const uint32_t num_groups = params.num_groups;
    const int64_t square_row = blockIdx.x / num_groups;
    const int32_t square_column = static_cast<int32_t>(blockIdx.x % num_groups);
    const int32_t column = square_column * SQUARE + static_cast<int32_t>(threadIdx.x) % LANES * SPAN;
    const int32_t left = minimum(maximum(params.width - column, 0), SPAN);
    Raw<ELEMENT> raw[SPANS];
    uint32_t magnitude = 0;
    UNROLL
    for (int i = 0; i < SPANS; ++i) {
        const int64_t row = square_row * SQUARE + i * ROWS + threadIdx.x / LANES;
        load_raw<WIDE>(params.x + row * params.x_row_stride + column, row < params.num_rows ? left : 0, raw[i]);
    }
    UNROLL
    for (int i = 0; i < SPANS; ++i) magnitude = maximum(magnitude, largest_magnitude(raw[i]));
    const float amax_of_warp = largest(magnitude, WARP_SIZE);
    if (lane_id() == 0) of_warp[warp_id()] = amax_of_warp;
    __syncthreads();
    float amax = of_warp[0];
    UNROLL
    for (int warp = 1; warp < WARPS; ++warp) amax = maximum_or_nan_f32(amax, of_warp[warp]);
    const float scale = scale_of(params, amax);
    UNROLL
    for (int i = 0; i < SPANS; ++i) {
        const int64_t row = square_row * SQUARE + i * ROWS + threadIdx.x / LANES;
        float x[SPAN];
        unpack_stored(raw[i], x);
        if (row < params.num_rows) store_codes<WIDE>(params, Span{row, column, left}, x, scale);
    }
    if (threadIdx.x == 0) store_scale(params, scale_place(params, square_row, square_column), scale, true);
}

template <bool WIDE>
DEVICE void dequantize(const DequantizeFp8Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.num_rows) return;
    // Lanes after the row's end take part in its stores.
    uint32_t codes[SPAN / 4] = {};
    float scale = 1.0f;
    if (span.count > 0) {
        load_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column, codes, span.count);
        const int64_t place = scale_place(params, span.row >> params.log2_group_rows, span.column >> params.log2_group);
        scale = params.scale_type == E8M0 ? e8m0_to_float(params.scales[place])
                                          : reinterpret_cast<const float*>(params.scales)[place];
    }
    float y[SPAN];
    UNROLL
    for (int i = 0; i < SPAN; i += 2) {
        e4m3x2_to_float(codes[i / 4] >> 8 * (i % 4) & 0xffffu, y[i], y[i + 1]);
        y[i] = __fmul_rn(y[i], scale);
        y[i + 1] = __fmul_rn(y[i + 1], scale);
    }
    store_span<WIDE>(params.y + span.row * params.y_row_stride + span.column, span.count, y);
}

// As many blocks as fit: while one waits for memory, the others use it.
KERNEL_OF(quantize_fp8_vector, QuantizeFp8Params, THREADS, 8) { quantize_rows<true>(params); }
KERNEL(quantize_fp8_scalar, QuantizeFp8Params, THREADS) { quantize_rows<false>(params); }
KERNEL(quantize_fp8_squares_vector, QuantizeFp8Params, THREADS) { quantize_square<true>(params); }
KERNEL(quantize_fp8_squares_scalar, QuantizeFp8Params, THREADS) { quantize_square<false>(params); }
KERNEL(dequantize_fp8_vector, DequantizeFp8Params, THREADS) { dequantize<true>(params); }
KERNEL(dequantize_fp8_scalar, DequantizeFp8Params, THREADS) { dequantize<false>(params); }
