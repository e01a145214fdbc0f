// SwiGLU with clamps and an optional row weight, quantized (inference 5.4, 5.7, 11.1). With a =
// min(gate, limit), b = clamp(up, -limit, limit) and w the weight of the row,
//
//     o = w (a sigmoid(a) b)          rounded to bf16 before it is quantized, with round_to_bf16
//     codes, scales = those of quantize_fp8.cu for o, in groups of 32 or 128 of a row
//
// A padding row, one whose pos_to_token_topk entry is negative, is not read: it is quantized as a
// row of zeros. The backward treats quantization as the identity: it is swiglu.cu's.
//
// Work division: the lanes of a group are lanes of one row (groups.h), so that no row contributes
// to another's scale.
//
// Floor for bf16: 4 bytes read and 1 written an element, and 4 bytes or 1 a group: 60 us for 24576
// x 2048 at 4.24 TB/s. Limit: memory. An element takes about 21 of the 33 instructions that memory
// leaves time for, and two special functions, half of that time. One H200, 24576 x 2048: 65.1 us
// with groups of 32 and e8m0 scales, 68.7 us with groups of 128 and fp32 scales.
//
// Defines: ELEMENT  type of gate and up: bf16 or float. Launch: ceil(padded_rows * row_warps /
// WARPS) blocks.
// What was tried: kernels/docs/swiglu_quantize.md.
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

// The values of a span; 0 where none exist.
template <bool WIDE>
DEVICE void load_products(const SwigluQuantizeParams& params, const Span& span, float (&x)[SPAN]) {
    float gate[SPAN] = {}, up[SPAN] = {};
    load_span<WIDE>(params.gate + span.row * params.gate_row_stride + span.column, span.count, gate);
    load_span<WIDE>(params.up + span.row * params.up_row_stride + span.column, span.count, up);
    const float weight = params.weight ? params.weight[span.row] : 1.0f;
    UNROLL
    for (int i = 0; i < SPAN; ++i) {
        // Data after the row is not part of its group, whatever the weight is. Wide accesses have
        // none.
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

// Six blocks an SM: while one waits for memory the others compute.
KERNEL_OF(swiglu_quantize_vector, SwigluQuantizeParams, THREADS, 6) { swiglu_quantize<true>(params); }
KERNEL(swiglu_quantize_scalar, SwigluQuantizeParams, THREADS) { swiglu_quantize<false>(params); }
