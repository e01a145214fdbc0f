// Rows as e2m1 codes with e8m0 scales of 32 neighbours, and back (inference 5.3, 5.4, 5.7):
//
//     amax  = max(max |x|, 6 * 2^-126)
//     s     = 2^ceil(log2(amax * fp32(1/6)))         an e8m0 byte
//     code  = e2m1(x / s)                            nearest even; two in a byte, the even one low
//     y     = value(code) * s                        rounded once if stored in bf16
//
// The last group of a row may be smaller. A group with a NaN or an infinity has the scale NaN
// (255) and the codes 7, because e2m1 has no NaN: it decodes to NaN. scale_layout.h has the layout
// of scales; padding is 0.
//
// A lane takes 16 elements (groups.h), so a group is two lanes, and stores their codes in one
// access of 8 bytes. Codes of bf16 are found by packed bf16 arithmetic on two numbers at a time
// (quantize.h), those of fp32 by three sums each (to_e2m1).
//
// Floor for bf16: 2 bytes read and 1/2 written an element, and a byte a group: at 4.24 TB/s 80 us
// for 32768 x 4096. Limit: memory; about 9 instructions an element of the 17 that there is time
// for. Measured on one H200: 89.9 us.
//
// Defines: ELEMENT  type of x and y: bf16 or float. Launch: ceil(padded_rows * row_warps / WARPS)
// blocks.
#include "codes.h"
#include "element.h"
#include "groups.h"
#include "math.h"

constexpr int GROUP = 32, GROUP_LANES = GROUP / SPAN;

struct QuantizeMxfp4Params {
    const ELEMENT* x; int64_t x_row_stride;      // [num_rows, width]; strides in elements
    uint8_t* codes; int64_t codes_row_stride;    // [num_rows, width / 2]
    uint8_t* scales;                             // scale_layout.h
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout;
};

struct DequantizeMxfp4Params {
    const uint8_t* codes; int64_t codes_row_stride;  // [num_rows, width / 2]
    ELEMENT* y; int64_t y_row_stride;                // [num_rows, width]
    const uint8_t* scales;                           // scale_layout.h
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout;
};

template <bool WIDE>
DEVICE void quantize(const QuantizeMxfp4Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.padded_rows) return;
    Raw<ELEMENT> raw;
    load_raw<WIDE>(params.x + span.row * params.x_row_stride + span.column, span.count, raw);
    float x[SPAN];
    unpack_stored(raw, x);
    const uint8_t scale = group_scale(largest(largest_magnitude(raw), GROUP_LANES), E2M1_FLOOR, 1.0f / 6.0f);
    if (span.count > 0) {
        uint32_t codes[SPAN / 8];
        e2m1_codes_of<ELEMENT>(x, scale, codes);
        store_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column / 2, codes, span.count / 2);
    }
    const int32_t group = span.column / GROUP;
    if (span.column % GROUP == 0 && group < params.padded_groups) {
        const bool exists = span.row < params.num_rows && group < params.num_groups;
        params.scales[scale_place(params, span.row, group)] = exists ? scale : 0;
    }
}

template <bool WIDE>
DEVICE void dequantize(const DequantizeMxfp4Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.num_rows) return;
    // Lanes after the row's end take part in its stores.
    uint32_t codes[SPAN / 8] = {};
    float scale = 1.0f;
    if (span.count > 0) {
        load_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column / 2, codes, span.count / 2);
        scale = e8m0_to_float(params.scales[scale_place(params, span.row, span.column / GROUP)]);
    }
    float y[SPAN];
    for (int i = 0; i < SPAN; i += 8) e2m1x8_to_float(codes[i / 8], *reinterpret_cast<float(*)[8]>(y + i));
    UNROLL
    for (int i = 0; i < SPAN; ++i) y[i] = __fmul_rn(y[i], scale);
    store_span<WIDE>(params.y + span.row * params.y_row_stride + span.column, span.count, y);
}

KERNEL(quantize_mxfp4_vector, QuantizeMxfp4Params, THREADS) { quantize<true>(params); }
KERNEL(quantize_mxfp4_scalar, QuantizeMxfp4Params, THREADS) { quantize<false>(params); }
KERNEL(dequantize_mxfp4_vector, DequantizeMxfp4Params, THREADS) { dequantize<true>(params); }
KERNEL(dequantize_mxfp4_scalar, DequantizeMxfp4Params, THREADS) { dequantize<false>(params); }
