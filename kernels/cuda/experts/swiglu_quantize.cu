// SwiGLU with clamps and an optional row weight, quantised (inference 5.4, 5.7, 11.1). With a = min(gate, limit),
// b = clamp(up, -limit, limit) and w the weight of the row,
//
//     o = w (a sigmoid(a) b)                  rounded to bf16 before it is quantised, where that is asked for
//     codes, scales = those of quantize_fp8.cu for o, in groups of 32 or 128 of a row
//
// A padding row, one whose entry of pos_to_token_topk is negative, is not read: it is quantised as a row of zeros.
// The lanes of a group are lanes of one row (groups.h), so that no row has a part in another's scale. The backward
// goes through the product as if it were not quantised: it is swiglu.cu's.
//
// Floor for bf16: 4 bytes read and 1 written an element, and 4 bytes or 1 a group: at 4.24 TB/s 60 us for 24576 x
// 2048. Expected to be limited by memory: about 21 instructions an element, of the 33 that there is time for, and two
// special functions, which take half of it.
// Measured on one H200, 24576 x 2048: 68.4 us in groups of 32 with e8m0 scales, 73.6 us in groups of 128 with fp32
// scales; backward 123 us. When a division by a scale that is no power of two took six instructions, and a group's
// first lane was found by a division, these were 72 and 83 us, the latter with 82 % of the issue slots taken. All that was
// when an element took 3.5 instructions more, of which the scaling of subnormal reciprocals were three (swiglu.h);
// now 65.1 and 68.7 us. 4096 rows 13.9 and 14.3 us, where a copy of as many bytes takes 11.8: ncu (reports/h200/ncu.txt) has 64 % of the
// issue slots taken, and the rest is the start of few blocks and their end.
//
// Defines: ELEMENT  type of gate and up: bf16 or float. Launch: ceil(padded_rows * row_warps / WARPS) blocks.
#include "element.h"
#include "quantize_fp8.h"
#include "swiglu.h"

struct SwigluQuantizeParams {
    const ELEMENT* gate; int64_t gate_row_stride;  // [num_rows, width], as is up; strides in elements
    const ELEMENT* up; int64_t up_row_stride;
    const float* weight;                           // [num_rows], or nullptr for ones
    const int32_t* pos_to_token_topk;              // [num_rows], or nullptr where no row is padding
    uint8_t* codes; int64_t codes_row_stride;      // [num_rows, width]
    uint8_t* scales;                               // scale_layout.h: bytes, or fp32 numbers
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout, scale_type, log2_group, round_to_bf16;
    float limit;
};
PARAMS_LAYOUT(SwigluQuantizeParams, gate, gate_row_stride, up, up_row_stride, weight, pos_to_token_topk, codes,
              codes_row_stride, scales, num_rows, padded_rows, width, row_warps, num_groups, padded_groups, scale_layout,
              scale_type, log2_group, round_to_bf16, limit)

// The products of a span; 0 where there are none.
template <bool WIDE>
DEVICE void load_products(const SwigluQuantizeParams& params, const Span& span, float (&x)[SPAN]) {
    float gate[SPAN] = {}, up[SPAN] = {};
    load_span<WIDE>(params.gate + span.row * params.gate_row_stride + span.column, span.count, gate);
    load_span<WIDE>(params.up + span.row * params.up_row_stride + span.column, span.count, up);
    const float weight = params.weight ? params.weight[span.row] : 1.0f;
    UNROLL
    for (int i = 0; i < SPAN; ++i) {
        // What lies behind the row is no part of its group, whatever the weight is. In wide accesses nothing does.
        x[i] = WIDE || i < span.count ? weighted_swiglu(gate[i], up[i], params.limit, weight) : 0.0f;
    }
    if (params.round_to_bf16) round_to_bf16(x);
}

template <bool WIDE>
DEVICE void swiglu_quantize(const SwigluQuantizeParams& params) {
    const Span span = span_of(params);
    if (span.row >= params.padded_rows) return;
    float x[SPAN] = {};
    const bool padding = span.count == 0 || (params.pos_to_token_topk && params.pos_to_token_topk[span.row] < 0);
    if (!padding) load_products<WIDE>(params, span, x);
    quantize_span<WIDE>(params, span, x);
}

// Six blocks of a multiprocessor: what one waits for its memory the others use.
KERNEL_OF(swiglu_quantize_vector, SwigluQuantizeParams, THREADS, 6) { swiglu_quantize<true>(params); }
KERNEL(swiglu_quantize_scalar, SwigluQuantizeParams, THREADS) { swiglu_quantize<false>(params); }
