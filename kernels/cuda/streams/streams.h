// The residual streams of a token (inference 2): STREAMS rows of hidden_size elements, and their
// mix before a sublayer. Also the block's sums of products from which the coefficients' gradients
// are computed.
#pragma once

#include "elements.h"
#include "math.h"

constexpr int STREAMS = 4;

// COUNT elements, as floats, of each stream of a token; the first stream's are at `first`.
template <int COUNT, typename T>
DEVICE void load_streams(const T* first, int64_t stream_stride, float (&x)[STREAMS][COUNT]) {
    UNROLL
    for (int i = 0; i < STREAMS; ++i) load_elements<COUNT>(first + i * stream_stride, x[i]);
}

// COUNT coefficients of a token. All threads load the same ones, so a warp's load is one access to
// the cache.
template <int COUNT>
DEVICE void load_coefficients(const float* source, float (&coefficients)[COUNT]) {
    UNROLL
    for (int c = 0; c < COUNT; ++c) coefficients[c] = source[c];
}

// Sums of VALUES values of each thread over the block, sum v in thread v. It adds over the lanes
// of each warp, then over the warps in their order, so equal launches give equal bits. `partials`
// has a row for each warp; it is read until the block's next barrier.
template <int VALUES>
DEVICE float block_sums(const float (&values)[VALUES], float (*partials)[VALUES]) {
    UNROLL
    for (int v = 0; v < VALUES; ++v) {
        const float sum = warp_sum(values[v]);
        if (lane_id() == 0) partials[warp_id()][v] = sum;
    }
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.x < VALUES)
        for (uint32_t warp = 0; warp < blockDim.x / WARP_SIZE; ++warp) total += partials[warp][threadIdx.x];
    return total;
}

// pre[0] x[0] + pre[1] x[1] + ..., in the order of the streams.
template <int COUNT>
DEVICE void mix_streams(const float (&x)[STREAMS][COUNT], const float (&pre)[STREAMS], float (&h)[COUNT]) {
    UNROLL
    for (int e = 0; e < COUNT; ++e) {
        h[e] = pre[0] * x[0][e];
        UNROLL
        for (int i = 1; i < STREAMS; ++i) h[e] += pre[i] * x[i][e];
    }
}

// Destination j after a sublayer: post[j] y + comb[0,j] x[0] + comb[1,j] x[1] + ..., in this
// order. `comb` is by sources.
template <int COUNT>
DEVICE void mix_destination(const float (&x)[STREAMS][COUNT], const float (&y)[COUNT], const float* post,
                            const float* comb, int j, float (&out)[COUNT]) {
    UNROLL
    for (int e = 0; e < COUNT; ++e) {
        out[e] = post[j] * y[e];
        UNROLL
        for (int i = 0; i < STREAMS; ++i) out[e] += comb[i * STREAMS + j] * x[i][e];
    }
}

// Adds the thread's products of each stream of a token with one row to `sums`.
template <int COUNT, typename T>
DEVICE void add_products(const T* streams, int64_t stream_stride, const T* row, int64_t width,
                         float (&sums)[STREAMS]) {
    for (int64_t column = threadIdx.x * COUNT; column < width; column += blockDim.x * COUNT) {
        float x[STREAMS][COUNT], dout[COUNT];
        load_streams(streams + column, stream_stride, x);
        load_elements<COUNT>(row + column, dout);
        UNROLL
        for (int i = 0; i < STREAMS; ++i) {
            UNROLL
            for (int e = 0; e < COUNT; ++e) sums[i] += x[i][e] * dout[e];
        }
    }
}

// 1 / sqrt(mean(v^2) + norm_eps), from a token's sum of squares.
template <typename Params>
DEVICE float streams_rstd(const Params& params, float squares) {
    return rsqrt_approx(squares / (static_cast<float>(STREAMS) * params.hidden_size) + params.norm_eps);
}

// A value after it is stored as T.
template <typename T>
DEVICE float as_stored(float x) {
    T stored;
    Element<T>::store(&stored, x);
    return Element<T>::load(&stored);
}
