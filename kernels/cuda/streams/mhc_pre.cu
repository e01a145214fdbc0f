// The input of a sublayer from the residual streams (inference 2.3, training 11.1). X are the
// STREAMS streams of a token, pre its coefficients in fp32:
//
//     h     = sum over i of pre[i] X[i]
//     dX[i] = pre[i] dh                           dpre[i] = sum over the channels of X[i] dh
//
// fp32 from load to store, streams in their order, so each output is rounded once. NaN and
// infinities propagate through products. mhc_pre_norm.cu adds the RMSNorm that follows.
//
// Forward: a thread loads 16 bytes of each stream (64 bytes in flight) and stores 16 bytes. A
// block of 128 threads takes a piece of a token: one token of 7168 channels is 7 blocks.
// Backward: one block a token, since four sums run over its channels. A thread takes up to 8 times
// 16 bytes of each of the five rows, and a block has one barrier. A token's sums depend only on
// hidden_size and the kernel. The scalar kernels take one element at a time, at any stride and
// alignment.
//
// Floors for a bf16 token of d channels: forward 10 d bytes and 7 d FLOPs, backward 18 d and 12 d.
// At 4.24 TB/s 32768 tokens of 7168 channels take 554 and 997 us.
// Limit: memory, 105 and 97 % of a copy on one H200. Per access about 110 instructions in the
// forward and 150 in the backward, below a quarter of the issue slots.
//
// Defines: ELEMENT  type of X, h and their gradients: bf16 or float.
// Launch: forward num_tokens * chunks blocks, backward num_tokens; any multiple of 32 threads, in
// the forward such that `chunks` blocks cover a row.
// Measured times: kernels/docs/mhc_pre.md.
#include "element.h"
#include "streams.h"

constexpr int FORWARD_THREADS = 128;
constexpr int BACKWARD_THREADS = 256;

struct MhcPreForwardParams {
    const ELEMENT* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* pre;  // [num_tokens, STREAMS]
    ELEMENT* h; int64_t h_token_stride;  // [num_tokens, hidden_size]
    int32_t hidden_size;
    int32_t chunks;  // blocks of a token
};

struct MhcPreBackwardParams {
    const ELEMENT* streams; int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* pre;
    const ELEMENT* dh; int64_t dh_token_stride;
    ELEMENT* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dpre;
    int32_t hidden_size;
};

template <int COUNT>
DEVICE void mhc_pre_forward(const MhcPreForwardParams& params) {
    const uint32_t chunks = static_cast<uint32_t>(params.chunks);
    const int64_t token = blockIdx.x / chunks;
    const int64_t column = (static_cast<int64_t>(blockIdx.x % chunks) * blockDim.x + threadIdx.x) * COUNT;
    if (column >= params.hidden_size) return;
    float x[STREAMS][COUNT], pre[STREAMS], h[COUNT];
    load_streams(params.streams + token * params.streams_token_stride + column, params.streams_stream_stride, x);
    load_coefficients(params.pre + token * STREAMS, pre);
    mix_streams(x, pre, h);
    store_elements(params.h + token * params.h_token_stride + column, h);
}

KERNEL(mhc_pre_forward_vector, MhcPreForwardParams, FORWARD_THREADS) { mhc_pre_forward<VECTOR>(params); }
KERNEL(mhc_pre_forward_scalar, MhcPreForwardParams, FORWARD_THREADS) { mhc_pre_forward<1>(params); }

template <int COUNT>
DEVICE void mhc_pre_backward(const MhcPreBackwardParams& params, float (*partials)[STREAMS]) {
    const int64_t token = blockIdx.x;
    float pre[STREAMS], dpre[STREAMS] = {};
    load_coefficients(params.pre + token * STREAMS, pre);
    for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += blockDim.x * COUNT) {
        float x[STREAMS][COUNT], dh[COUNT], dx[COUNT];
        load_streams(params.streams + token * params.streams_token_stride + column, params.streams_stream_stride, x);
        load_elements<COUNT>(params.dh + token * params.dh_token_stride + column, dh);
        ELEMENT* const to = params.dstreams + token * params.dstreams_token_stride + column;
        UNROLL
        for (int i = 0; i < STREAMS; ++i) {
            UNROLL
            for (int e = 0; e < COUNT; ++e) {
                dx[e] = pre[i] * dh[e];
                dpre[i] += x[i][e] * dh[e];
            }
            store_elements(to + i * params.dstreams_stream_stride, dx);
        }
    }
    const float sum = block_sums(dpre, partials);
    if (threadIdx.x < STREAMS) params.dpre[token * STREAMS + threadIdx.x] = sum;
}

KERNEL(mhc_pre_backward_vector, MhcPreBackwardParams, BACKWARD_THREADS) {
    __shared__ float partials[BACKWARD_THREADS / WARP_SIZE][STREAMS];
    mhc_pre_backward<VECTOR>(params, partials);
}
KERNEL(mhc_pre_backward_scalar, MhcPreBackwardParams, BACKWARD_THREADS) {
    __shared__ float partials[BACKWARD_THREADS / WARP_SIZE][STREAMS];
    mhc_pre_backward<1>(params, partials);
}
