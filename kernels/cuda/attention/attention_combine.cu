// Merges partial attention results over disjoint sets of keys, with the sink (inference 8.2).
//
//     m   = max_s e_s     Z = sum_s 2^(e_s - m)     lse = (m + log2 Z) ln 2
//     out = bf16( sum_s 2^(e_s - m) / (Z + 2^(sink * log2 e - m)) o_s )
//
// e_s is the base-2 log-sum-exp of part s and o_s its softmax-weighted sum, both without the sink.
// A part with an e_s of -inf or +inf has no key; its weight is 0, whatever its o_s is. A row with
// only such parts has out = 0 and lse = +inf, whatever the sink. A sink of +inf makes out 0 and
// does not change lse.
//
// One warp takes a row, a (token, head): first all its e_s, one lane a part, then all parts, eight
// columns a lane and step. Parts are added in their order, so that the result does not depend on
// the launch.
//
// Floor: num_parts * (4 * V_DIM + 4) bytes read and 2 * V_DIM + 4 written for a row, at two
// operations an element read. Limited by memory. Not measured. The estimate for 128 tokens, 128
// heads and 8 parts of 512 columns is 285 MB at 4.24 TB/s, 67 us.
//
// Defines: V_DIM, columns of a row, a multiple of 8. Launch: ceil(num_rows / 8) blocks of 256
// threads.
#include "combine.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"

#ifndef V_DIM
#error "define V_DIM as a multiple of 8"
#endif
static_assert(V_DIM % 8 == 0 && V_DIM > 0, "V_DIM is a multiple of 8");

constexpr int THREADS = 256;
constexpr int ROWS_PER_BLOCK = THREADS / WARP_SIZE;

struct AttentionCombineParams {
    const float* partial_out;         // [num_parts, num_tokens, num_heads, V_DIM]; parts and rows of 16-byte aligned strides
    int64_t partial_out_part_stride;  // all strides in elements
    int64_t partial_out_token_stride;
    int64_t partial_out_head_stride;
    const float* partial_lse;  // [num_parts, num_tokens, num_heads], base 2
    const float* sink;         // [num_heads], natural; or nullptr
    bf16* out;                 // [num_tokens, num_heads, V_DIM], 16-byte aligned strides
    int64_t out_token_stride;
    int64_t out_head_stride;
    float* lse;        // [num_tokens, num_heads], natural, without the sink
    int64_t num_rows;  // num_tokens * num_heads
    int32_t num_parts;
    int32_t num_heads;
};

KERNEL(attention_combine, AttentionCombineParams, THREADS) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / WARP_SIZE;
    if (row >= params.num_rows) return;
    // Rows fit 32 bits: a 64-bit division takes as long as the rest of a short row.
    const int64_t token = static_cast<int32_t>(row) / params.num_heads, head = row - token * params.num_heads;
    const float* partial_out =
        params.partial_out + token * params.partial_out_token_stride + head * params.partial_out_head_stride;
    const StridedParts parts{partial_out, params.partial_lse + row, params.partial_out_part_stride, params.num_rows,
                             params.num_parts};
    const float sink_log2 = params.sink ? params.sink[head] * LOG2_E : -INFINITY_F32;
    bf16* out = params.out + token * params.out_token_stride + head * params.out_head_stride;
    combine_row<V_DIM>(parts, sink_log2, out, params.lse + row);
}
