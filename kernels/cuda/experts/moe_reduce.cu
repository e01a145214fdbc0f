// Sums rows of experts to rows of tokens, and its backward (inference 11.2, 11.3).
//
//     out[t] = shared[t] + sum over the slots k with p = token_topk_to_pos[t][k] >= 0 of w y[p]
//     dy[p]  = w dout[t] for every such slot;  0 in rows whose pos_to_token is negative
//     dtopk_weights[t][k] = sum over the channels of dout[t] y[p];  0 without a position
//
// w is the slot's weight, or 1 without weights (where the experts applied them). shared[t] is
// optional; it is added once, last, with weight 1, and its gradient is dout. Sums over slots are
// fp32, fused and in the order of the slots. Sums over channels are fp32, in an order that follows
// from hidden_size only. Each result is rounded once and does not depend on the other tokens.
// Padding rows and weights of slots without a position are not read.
//
// Work division. Forward: a block takes a piece of a token's row, 16 bytes a thread, with up to
// HELD rows in flight. Backward: a block takes a token. Each thread sums the weights' gradients
// over its channels, then shuffles and warps add them up. The first blocks look for padding rows,
// 128 positions each.
//
// Floor, s = sizeof(ELEMENT): forward s (num_slots + num_tokens) bytes a channel; backward s
// (num_tokens + num_positions), weighted s num_slots more. 32768 tokens of 7168 bf16 channels, 6
// slots, at 4.24 TB/s: forward 3.3 GB, 0.78 ms; backward 3.5 GB, 0.83 ms, weighted 6.3 GB, 1.5 ms.
// Limit: memory. One H200: forward 853 us, 748 us without shared.
//
// Launch: forward num_tokens blocks for each piece of a row; backward num_tokens +
// ceil(num_positions / rows_per_block). Defines: ELEMENT  type of the rows: bf16 or float.
// What was tried: kernels/docs/moe_reduce.md.
#include "moe_rows.h"

struct MoeReduceForwardParams {
    const ELEMENT* y; int64_t y_position_stride;                               // [num_positions, hidden_size]; strides in elements
    const int32_t* token_topk_to_pos; int64_t token_topk_to_pos_token_stride;  // [num_tokens, topk]
    const float* topk_weights; int64_t topk_weights_token_stride;              // [num_tokens, topk], or nullptr for ones
    const ELEMENT* shared; int64_t shared_token_stride;                        // [num_tokens, hidden_size], or nullptr
    ELEMENT* out; int64_t out_token_stride;                                    // [num_tokens, hidden_size]
    int64_t num_tokens;
    int64_t num_positions;
    int32_t topk;
    int32_t hidden_size;
};

struct MoeReduceBackwardParams {
    const ELEMENT* dout; int64_t dout_token_stride;                            // [num_tokens, hidden_size]
    const ELEMENT* y; int64_t y_position_stride;                               // [num_positions, hidden_size]
    const int32_t* token_topk_to_pos; int64_t token_topk_to_pos_token_stride;  // [num_tokens, topk]
    const int32_t* pos_to_token;                                               // [num_positions]
    const float* topk_weights; int64_t topk_weights_token_stride;              // [num_tokens, topk], or nullptr for ones
    ELEMENT* dy; int64_t dy_position_stride;                                   // [num_positions, hidden_size]
    float* dtopk_weights; int64_t dtopk_weights_token_stride;                  // [num_tokens, topk], or nullptr
    int64_t num_tokens;
    int64_t num_positions;
    int32_t topk;
    int32_t hidden_size;
    int32_t rows_per_block;
};

template <int COUNT>
DEVICE void reduce_forward(const MoeReduceForwardParams& params) {
    const uint32_t pieces = pieces_of<THREADS, COUNT>(params.hidden_size);
    const int64_t token = blockIdx.x / pieces, column = (blockIdx.x % pieces * THREADS + threadIdx.x) * COUNT;
    if (column >= params.hidden_size) return;
    float sum[COUNT] = {};
    Stored<COUNT, ELEMENT> stored;
    if (params.shared) load_stored(params.shared + token * params.shared_token_stride + column, stored);
    const float* weights = params.topk_weights ? params.topk_weights + token * params.topk_weights_token_stride : nullptr;
    add_rows<COUNT>(positions_of(params, token), weights, params.y, params.y_position_stride, column, sum);
    if (params.shared) {
        float shared[COUNT];
        unpack_stored(stored, shared);
        for (int e = 0; e < COUNT; ++e) sum[e] += shared[e];
    }
    store_elements(params.out + token * params.out_token_stride + column, sum);
}

// The gradients of up to HELD slots of a token: stores rows, and sums what each thread's channels
// add to the weights' gradients.
template <int COUNT>
DEVICE void slot_gradients(const MoeReduceBackwardParams& params, int64_t token, const int64_t (&positions)[HELD],
                           const float (&weights)[HELD], float (&dots)[HELD]) {
    for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += THREADS * COUNT) {
        float dout[COUNT];
        Stored<COUNT, ELEMENT> stored[HELD];
        load_elements<COUNT>(params.dout + token * params.dout_token_stride + column, dout);
        UNROLL
        for (int i = 0; i < HELD; ++i)
            if (params.dtopk_weights && positions[i] != NONE)
                load_stored(params.y + positions[i] * params.y_position_stride + column, stored[i]);
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            if (positions[i] == NONE) continue;
            float dy[COUNT], y[COUNT];
            if (params.dtopk_weights) unpack_stored(stored[i], y);
            UNROLL
            for (int e = 0; e < COUNT; ++e) {
                dy[e] = weights[i] * dout[e];
                if (params.dtopk_weights) dots[i] += dout[e] * y[e];
            }
            store_elements(params.dy + positions[i] * params.dy_position_stride + column, dy);
        }
    }
}

// Sums over the block for slot `first` and those after it, each stored by one thread.
DEVICE void write_dots(const MoeReduceBackwardParams& params, int64_t token, int first, const float (&dots)[HELD]) {
    __shared__ float parts[WARPS][HELD];
    UNROLL
    for (int i = 0; i < HELD; ++i) {
        const float of_warp = warp_sum(dots[i]);
        if (lane_id() == 0) parts[warp_id()][i] = of_warp;
    }
    __syncthreads();
    const int slot = first + threadIdx.x;
    if (threadIdx.x < HELD && slot < params.topk) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp][threadIdx.x];
        params.dtopk_weights[token * params.dtopk_weights_token_stride + slot] = sum;
    }
    __syncthreads();
}

template <int COUNT>
DEVICE void reduce_backward(const MoeReduceBackwardParams& params) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) - clearing_blocks(params);
    if (token < 0) {
        clear_rows<COUNT>(params.pos_to_token, blockIdx.x, params.rows_per_block, params.num_positions, params.dy,
                          params.dy_position_stride, params.hidden_size);
        return;
    }
    const Positions all = positions_of(params, token);
    for (int first = 0; first < params.topk; first += HELD) {
        int64_t positions[HELD];
        float weights[HELD], dots[HELD] = {};
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            positions[i] = all[first + i];
            const bool weighted = params.topk_weights && positions[i] != NONE;
            weights[i] = weighted ? params.topk_weights[token * params.topk_weights_token_stride + first + i] : 1.0f;
        }
        slot_gradients<COUNT>(params, token, positions, weights, dots);
        if (params.dtopk_weights) write_dots(params, token, first, dots);
    }
}

// Rows wait for positions, and positions for memory: more blocks an SM keep more rows in flight.
KERNEL_OF(moe_reduce_forward_vector, MoeReduceForwardParams, THREADS, 10) { reduce_forward<VECTOR>(params); }
KERNEL(moe_reduce_forward_scalar, MoeReduceForwardParams, THREADS) { reduce_forward<1>(params); }
KERNEL_OF(moe_reduce_backward_vector, MoeReduceBackwardParams, THREADS, 4) { reduce_backward<VECTOR>(params); }
KERNEL(moe_reduce_backward_scalar, MoeReduceBackwardParams, THREADS) { reduce_backward<1>(params); }
