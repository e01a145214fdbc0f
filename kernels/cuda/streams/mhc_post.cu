// The streams after a sublayer (inference 2.4, training 11.1). X are the STREAMS streams before
// it, y its output, post and comb fp32 coefficients. i is the source, j the destination.
//
//     out[j]     = post[j] y + sum over i of comb[i,j] X[i]
//     dX[i]      = sum over j of comb[i,j] dout[j]     dy       = sum over j of post[j] dout[j]
//     dcomb[i,j] = sum over channels of X[i] dout[j]   dpost[j] = sum over channels of y dout[j]
//
// fp32 from load to store, y's product first and sources in their order, so each output is rounded
// once. NaN and infinities propagate through products: 0 times an infinity is NaN.
// Forward: a thread loads 16 bytes of y and of the four streams, 80 bytes in flight, and stores 16
// bytes of each output. A block of 128 threads takes a piece of a token: one token of 7168
// channels is 7. All loads of a thread come before its stores: out may be X.
// Backward: one block a token, since 20 sums run over its channels. A thread takes up to 8 times
// 16 bytes of nine rows (144 bytes in flight), adds its 20 sums in registers; a block has one
// barrier. A token's sums depend only on hidden_size and the kernel. Scalar kernels allow any
// stride and alignment.
//
// Floors for a bf16 token of d channels: forward 18 d bytes and 40 d FLOPs, backward 28 d and 96
// d. At 4.24 TB/s: 997 and 1551 us for 32768 tokens of 7168 channels.
// Limit: memory, 99 and 98 % of a copy on one H200. Per access the forward has about 250
// instructions, the backward 420.
// Defines: ELEMENT  type of X, y, out and their gradients: bf16 or float.
// Launch: forward num_tokens * chunks blocks, backward num_tokens; any multiple of 32 threads;
// `chunks` blocks cover a row.
// What was tried: kernels/docs/mhc_post.md.
#include "element.h"
#include "streams.h"

constexpr int FORWARD_THREADS = 128;
constexpr int BACKWARD_THREADS = 256;
constexpr int COEFFICIENTS = STREAMS + STREAMS * STREAMS;  // post, then comb by sources

struct MhcPostForwardParams {
    const ELEMENT* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_source_stride;
    const ELEMENT* y; int64_t y_token_stride;  // [num_tokens, hidden_size]
    const float* post;  // [num_tokens, STREAMS]
    const float* comb;  // [num_tokens, source, destination]
    ELEMENT* out; int64_t out_token_stride; int64_t out_destination_stride;  // as streams, which it may be
    int32_t hidden_size;
    int32_t chunks;  // blocks of a token
};

struct MhcPostBackwardParams {
    const ELEMENT* streams; int64_t streams_token_stride; int64_t streams_source_stride;
    const ELEMENT* y; int64_t y_token_stride;
    const float* post;
    const float* comb;
    const ELEMENT* dout; int64_t dout_token_stride; int64_t dout_destination_stride;
    ELEMENT* dstreams; int64_t dstreams_token_stride; int64_t dstreams_source_stride;
    ELEMENT* dy; int64_t dy_token_stride;
    float* dpost;
    float* dcomb;
    int32_t hidden_size;
};

template <int COUNT>
DEVICE void mhc_post_forward(const MhcPostForwardParams& params) {
    const uint32_t chunks = static_cast<uint32_t>(params.chunks);
    const int64_t token = blockIdx.x / chunks;
    const int64_t column = (static_cast<int64_t>(blockIdx.x % chunks) * blockDim.x + threadIdx.x) * COUNT;
    if (column >= params.hidden_size) return;
    float x[STREAMS][COUNT], y[COUNT], post[STREAMS], comb[STREAMS * STREAMS];
    load_streams(params.streams + token * params.streams_token_stride + column, params.streams_source_stride, x);
    load_elements<COUNT>(params.y + token * params.y_token_stride + column, y);
    load_coefficients(params.post + token * STREAMS, post);
    load_coefficients(params.comb + token * STREAMS * STREAMS, comb);
    ELEMENT* const to = params.out + token * params.out_token_stride + column;
    UNROLL
    for (int j = 0; j < STREAMS; ++j) {
        float out[COUNT];
        mix_destination(x, y, post, comb, j, out);
        store_elements(to + j * params.out_destination_stride, out);
    }
}

KERNEL(mhc_post_forward_vector, MhcPostForwardParams, FORWARD_THREADS) { mhc_post_forward<VECTOR>(params); }
KERNEL(mhc_post_forward_scalar, MhcPostForwardParams, FORWARD_THREADS) { mhc_post_forward<1>(params); }

// Stores dy and dX of these elements.
template <int COUNT>
DEVICE void store_gradients(const MhcPostBackwardParams& params, int64_t token, int64_t column,
                            const float (&post)[STREAMS], const float (&comb)[STREAMS * STREAMS],
                            const float (&dout)[STREAMS][COUNT]) {
    float gradient[COUNT] = {};
    UNROLL
    for (int j = 0; j < STREAMS; ++j) {
        UNROLL
        for (int e = 0; e < COUNT; ++e) gradient[e] += post[j] * dout[j][e];
    }
    store_elements(params.dy + token * params.dy_token_stride + column, gradient);
    ELEMENT* const to = params.dstreams + token * params.dstreams_token_stride + column;
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        UNROLL
        for (int e = 0; e < COUNT; ++e) {
            gradient[e] = comb[i * STREAMS] * dout[0][e];
            UNROLL
            for (int j = 1; j < STREAMS; ++j) gradient[e] += comb[i * STREAMS + j] * dout[j][e];
        }
        store_elements(to + i * params.dstreams_source_stride, gradient);
    }
}

template <int COUNT>
DEVICE void mhc_post_backward(const MhcPostBackwardParams& params, float (*partials)[COEFFICIENTS]) {
    const int64_t token = blockIdx.x;
    float post[STREAMS], comb[STREAMS * STREAMS], sums[COEFFICIENTS] = {};
    load_coefficients(params.post + token * STREAMS, post);
    load_coefficients(params.comb + token * STREAMS * STREAMS, comb);
    for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += blockDim.x * COUNT) {
        float x[STREAMS][COUNT], y[COUNT], dout[STREAMS][COUNT];
        load_streams(params.streams + token * params.streams_token_stride + column, params.streams_source_stride, x);
        load_elements<COUNT>(params.y + token * params.y_token_stride + column, y);
        load_streams(params.dout + token * params.dout_token_stride + column, params.dout_destination_stride, dout);
        store_gradients(params, token, column, post, comb, dout);
        UNROLL
        for (int j = 0; j < STREAMS; ++j) {
            UNROLL
            for (int e = 0; e < COUNT; ++e) {
                sums[j] += y[e] * dout[j][e];
                UNROLL
                for (int i = 0; i < STREAMS; ++i) sums[STREAMS + i * STREAMS + j] += x[i][e] * dout[j][e];
            }
        }
    }
    const float sum = block_sums(sums, partials);
    if (threadIdx.x < STREAMS) params.dpost[token * STREAMS + threadIdx.x] = sum;
    if (threadIdx.x >= STREAMS && threadIdx.x < COEFFICIENTS)
        params.dcomb[token * STREAMS * STREAMS + threadIdx.x - STREAMS] = sum;
}

KERNEL(mhc_post_backward_vector, MhcPostBackwardParams, BACKWARD_THREADS) {
    __shared__ float partials[BACKWARD_THREADS / WARP_SIZE][COEFFICIENTS];
    mhc_post_backward<VECTOR>(params, partials);
}
KERNEL(mhc_post_backward_scalar, MhcPostBackwardParams, BACKWARD_THREADS) {
    __shared__ float partials[BACKWARD_THREADS / WARP_SIZE][COEFFICIENTS];
    mhc_post_backward<1>(params, partials);
}
