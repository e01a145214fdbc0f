// The gradients of the collapse of the residual streams (inference 2.5, training 11.1). X are the
// STREAMS streams of a token, v the same concatenated. mix and rstd are as the forward saved them.
// With z = mix scale + base, s = sigmoid(z) and w = s + hc_eps:
//
//     dw[i] = sum over the channels of X[i] dout        dz = dw s (1 - s)        dmix = dz scale
//     dbase = sum over tokens of dz                     dscale = sum over tokens and i of dz mix
//     dfn[i,e] = sum over tokens of (rstd dmix[i]) v[e]
//     dX[i] = w[i] dout + sum over q of fn[q,e] (rstd dmix[q])
//             - v[e] rstd^2 / (STREAMS hidden_size) (sum over q of dmix[q] mix[q])
//
// 1 - s is computed as sigmoid(-z). mhc_head_backward_coefficients takes a block a token. It
// stores 12 values (rstd dmix, the factor of v, w), then dz and dz mix. dmix needs the whole
// token, so mhc_head_backward_streams reads X and dout again. It is mhc_mix's kernel
// (projection_backward.h) with one more term. mhc_head_backward_sums adds its blocks' partials of
// dfn, mhc_head_backward_parameters adds dz and dz mix, all in a fixed order.
//
// Floor for a bf16 token of d channels: 18 d bytes, 28 d with the second read, and 96 d FLOPs.
// With it 32768 tokens of 7168 channels take 1551 us at 4.24 TB/s.
// Limit: memory, 84 % of a copy with the second read on one H200. mhc_head_hopper_backward.cu
// reads streams once; the last two kernels here add its clusters' partials.
//
// Launch: coefficients num_tokens blocks of any multiple of 32 threads; streams as mhc_mix's with
// 8 channels a thread, in the scalar kernel 1; sums ceil(numbers / THREADS) blocks; parameters one
// block.
// What was tried: kernels/docs/mhc_head.md.
#include "projection_backward.h"
#include "sigmoid.h"

constexpr int THREADS = 128;
constexpr int COEFFICIENT_THREADS = 256;
constexpr int PARAMETER_THREADS = 1024;
constexpr int NUMBERS = 3 * STREAMS;  // of a token: rstd dmix; the factor of v, nothing; w
constexpr int PRODUCTS = 2 * STREAMS;  // of a token: dz, dz mix
constexpr int GROUPS = PARAMETER_THREADS / PRODUCTS;

struct MhcHeadBackwardCoefficientsParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const bf16* dout; int64_t dout_token_stride;  // [num_tokens, hidden_size]
    const float* mix;  // [num_tokens, STREAMS]
    const float* rstd;  // [num_tokens]
    const float* scale;  // [1]
    const float* base;  // [STREAMS]
    float* numbers;  // [num_tokens, NUMBERS]
    float* products;  // [num_tokens, PRODUCTS]
    int32_t hidden_size;
    float hc_eps;
};

struct MhcHeadBackwardStreamsParams {
    const bf16* streams; int64_t streams_token_stride; int64_t streams_stream_stride;
    const bf16* dout; int64_t dout_token_stride;
    const float* fn;  // [STREAMS, STREAMS * hidden_size]
    const float* numbers;
    bf16* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dfn_partials;  // [splits, STREAMS, STREAMS * hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
};

struct MhcHeadBackwardSumsParams {
    const float* dfn_partials; float* dfn;
    int64_t numbers;  // of dfn
    int32_t splits;
};

struct MhcHeadBackwardParametersParams {
    const float* products; float* dscale; float* dbase;
    int64_t num_tokens;
};

template <int COUNT>
DEVICE void mhc_head_backward_coefficients(const MhcHeadBackwardCoefficientsParams& params,
                                           float (*partials)[STREAMS]) {
    const int64_t token = blockIdx.x;
    float sums[STREAMS] = {};
    add_products<COUNT>(params.streams + token * params.streams_token_stride, params.streams_stream_stride,
                        params.dout + token * params.dout_token_stride, params.hidden_size, sums);
    const float dw = block_sums(sums, partials);
    if (warp_id() != 0) return;
    // Lanes past the streams repeat the fourth lane's part, so that all lanes take part in the
    // shuffles.
    const int stream = minimum(lane_id(), STREAMS - 1);
    const float own = __shfl_sync(FULL_WARP, dw, stream), mix = params.mix[token * STREAMS + stream];
    const float z = mix * params.scale[0] + params.base[stream], rstd = params.rstd[token];
    const float dz = own * (sigmoid(z) * sigmoid(-z)), dmix = dz * params.scale[0];
    float radial = lane_id() < STREAMS ? dmix * mix : 0.0f;
    radial += __shfl_xor_sync(FULL_WARP, radial, 1);
    radial += __shfl_xor_sync(FULL_WARP, radial, 2);
    if (lane_id() >= STREAMS) return;
    float* const numbers = params.numbers + token * NUMBERS;
    const float channels = static_cast<float>(STREAMS) * params.hidden_size;
    numbers[stream] = rstd * dmix;
    numbers[STREAMS + stream] = stream == 0 ? rstd * (rstd * (radial / channels)) : 0.0f;
    numbers[2 * STREAMS + stream] = sigmoid(z) + params.hc_eps;
    params.products[token * PRODUCTS + stream] = dz;
    params.products[token * PRODUCTS + STREAMS + stream] = dz * mix;
}

KERNEL(mhc_head_backward_coefficients_vector, MhcHeadBackwardCoefficientsParams, COEFFICIENT_THREADS) {
    __shared__ float partials[COEFFICIENT_THREADS / WARP_SIZE][STREAMS];
    mhc_head_backward_coefficients<Element<bf16>::per_vec16>(params, partials);
}
KERNEL(mhc_head_backward_coefficients_scalar, MhcHeadBackwardCoefficientsParams, COEFFICIENT_THREADS) {
    __shared__ float partials[COEFFICIENT_THREADS / WARP_SIZE][STREAMS];
    mhc_head_backward_coefficients<1>(params, partials);
}

DEVICE const bf16* other_of(const MhcHeadBackwardStreamsParams& params) { return params.dout; }
DEVICE int64_t other_stride(const MhcHeadBackwardStreamsParams& params) { return params.dout_token_stride; }
DEVICE void load_other(const MhcHeadBackwardStreamsParams& params, const Owned<STREAMS, 1>& own, int64_t token,
                       float (&dout)[1]) {
    load_elements<1>(params.dout + token * params.dout_token_stride + own.within, dout);
}

// Adds w dout for the stream that owns the thread's channels.
template <int CHANNELS>
DEVICE void add_other(const MhcHeadBackwardStreamsParams&, const Owned<STREAMS, CHANNELS>& own, const Vec16* numbers,
                      const float (&dout)[CHANNELS], float (&dv)[CHANNELS]) {
    float w[STREAMS];
    unpack<float>(numbers[2], w);
    const float weight = own.stream < 2 ? (own.stream == 0 ? w[0] : w[1]) : (own.stream == 2 ? w[2] : w[3]);
    UNROLL
    for (int c = 0; c < CHANNELS; ++c) dv[c] += weight * dout[c];
}

using OwnWide = Wide<8, 8, 1, NUMBERS / 4>;
SHARED_MEMORY(mhc_head_backward_streams_wide, sizeof(OwnWide::Shared))

KERNEL(mhc_head_backward_streams_wide, MhcHeadBackwardStreamsParams, STREAMS_THREADS) {
    backward_wide<STREAMS, OwnWide>(params);
}
KERNEL(mhc_head_backward_streams_scalar, MhcHeadBackwardStreamsParams, STREAMS_THREADS) {
    __shared__ Vec16 staged[STAGED_TOKENS][NUMBERS / 4];
    backward_narrow<STREAMS, 1>(params, staged);
}

KERNEL(mhc_head_backward_sums, MhcHeadBackwardSumsParams, THREADS) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= params.numbers) return;
    float sum = 0.0f;
    for (int64_t split = 0; split < params.splits; ++split) sum += params.dfn_partials[split * params.numbers + at];
    params.dfn[at] = sum;
}

// GROUPS strided sums of each of the PRODUCTS columns, then their sum in order.
KERNEL(mhc_head_backward_parameters, MhcHeadBackwardParametersParams, PARAMETER_THREADS) {
    __shared__ float sums[GROUPS][PRODUCTS];
    const int column = threadIdx.x % PRODUCTS, group = threadIdx.x / PRODUCTS;
    float sum = 0.0f;
    for (int64_t token = group; token < params.num_tokens; token += GROUPS)
        sum += params.products[token * PRODUCTS + column];
    sums[group][column] = sum;
    __syncthreads();
    if (threadIdx.x >= WARP_SIZE) return;
    sum = 0.0f;
    for (int row = 0; row < GROUPS && threadIdx.x < PRODUCTS; ++row) sum += sums[row][column];
    if (threadIdx.x < STREAMS) params.dbase[threadIdx.x] = sum;
    // The sum of dz mix over all streams.
    const float first = sum + __shfl_xor_sync(FULL_WARP, sum, 1), all = first + __shfl_xor_sync(FULL_WARP, first, 2);
    if (threadIdx.x == STREAMS) params.dscale[0] = all;
}
