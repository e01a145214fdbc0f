// Copies rows of tokens to rows of experts, and its backward (inference 11.3).
//
//     y[token_topk_to_pos[t][k]] = x[t] for every slot with a position; 0 where pos_to_token < 0
//     dx[t] = sum over the slots k of t that have a position of dy[token_topk_to_pos[t][k]]
//
// The maps are those of moe_map: the positions of all slots, and the rows that pos_to_token marks
// as padding, are all positions. Rows are copied bit for bit. Sums are fp32, in the order of the
// slots, and rounded once; they do not depend on the other tokens. A row of x without a slot is
// not read, nor is a row of dy that no slot has.
//
// Work division: a block takes a piece of a token's row, 16 bytes a thread. The forward reads it
// once and stores it to each of its slots' rows. The backward has up to HELD rows in flight. The
// first blocks look for padding rows, up to 128 positions each: at the end of a launch they would
// run with the SMs otherwise idle.
//
// Floor, s = sizeof(ELEMENT): s (num_tokens + num_positions) bytes a channel either way. 32768
// tokens of 7168 bf16 channels with 6 slots each and about 16000 rows of padding: 3.5 GB, 0.83 ms
// at 4.24 TB/s. Limit: memory. One H200: forward 1003 us, 94 % of the copy rate with padding
// included.
//
// Defines: ELEMENT  type of x, y, dy and dx: bf16 or float. Launch: num_tokens blocks for each
// piece of a row, and, of the forward, ceil(num_positions / rows_per_block) more.
// What was tried: kernels/docs/moe_expand.md.
#include "moe_rows.h"

struct MoeExpandForwardParams {
    const ELEMENT* x; int64_t x_token_stride;                                  // [num_tokens, hidden_size]; strides in elements
    const int32_t* token_topk_to_pos; int64_t token_topk_to_pos_token_stride;  // [num_tokens, topk]
    const int32_t* pos_to_token;                                               // [num_positions]
    ELEMENT* y; int64_t y_position_stride;                                     // [num_positions, hidden_size]
    int64_t num_tokens;
    int64_t num_positions;
    int32_t topk;
    int32_t hidden_size;
    int32_t rows_per_block;
};

struct MoeExpandBackwardParams {
    const ELEMENT* dy; int64_t dy_position_stride;                             // [num_positions, hidden_size]
    const int32_t* token_topk_to_pos; int64_t token_topk_to_pos_token_stride;  // [num_tokens, topk]
    ELEMENT* dx; int64_t dx_token_stride;                                      // [num_tokens, hidden_size]
    int64_t num_tokens;
    int64_t num_positions;
    int32_t topk;
    int32_t hidden_size;
};

template <int COUNT>
DEVICE void expand_forward(const MoeExpandForwardParams& params) {
    const uint32_t clearing = clearing_blocks(params);
    if (blockIdx.x < clearing) {
        clear_rows<COUNT>(params.pos_to_token, blockIdx.x, params.rows_per_block, params.num_positions, params.y,
                          params.y_position_stride, params.hidden_size);
        return;
    }
    const uint32_t pieces = pieces_of<THREADS, COUNT>(params.hidden_size), block = blockIdx.x - clearing;
    const int64_t token = block / pieces;
    const int64_t column = (block % pieces * THREADS + threadIdx.x) * COUNT;
    if (column >= params.hidden_size) return;
    const Positions positions = positions_of(params, token);
    float x[COUNT];
    bool is_read = false;
    for (int slot = 0; slot < params.topk; ++slot) {
        const int64_t position = positions[slot];
        if (position == NONE) continue;
        if (!is_read) load_elements<COUNT>(params.x + token * params.x_token_stride + column, x);
        is_read = true;
        store_elements(params.y + position * params.y_position_stride + column, x);
    }
}

template <int COUNT>
DEVICE void expand_backward(const MoeExpandBackwardParams& params) {
    const uint32_t pieces = pieces_of<THREADS, COUNT>(params.hidden_size);
    const int64_t token = blockIdx.x / pieces, column = (blockIdx.x % pieces * THREADS + threadIdx.x) * COUNT;
    if (column >= params.hidden_size) return;
    float sum[COUNT] = {};
    add_rows<COUNT>(positions_of(params, token), nullptr, params.dy, params.dy_position_stride, column, sum);
    store_elements(params.dx + token * params.dx_token_stride + column, sum);
}

KERNEL(moe_expand_forward_vector, MoeExpandForwardParams, THREADS) { expand_forward<VECTOR>(params); }
KERNEL(moe_expand_forward_scalar, MoeExpandForwardParams, THREADS) { expand_forward<1>(params); }
// As moe_reduce.cu's forward.
KERNEL_OF(moe_expand_backward_vector, MoeExpandBackwardParams, THREADS, 10) { expand_backward<VECTOR>(params); }
KERNEL(moe_expand_backward_scalar, MoeExpandBackwardParams, THREADS) { expand_backward<1>(params); }
