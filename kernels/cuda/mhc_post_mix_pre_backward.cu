// The gradients of mhc_post_mix_pre.cu (training 11.1). With X' its out, dX' the gradient of that from elsewhere, dh
// that of h, and of the next site dpost, dcomb,
//
//     dpre[i] = sum over the channels of X'[i] dh      then dz, dmix, dfn, dscale and dbase as in mhc_mix_backward.cu
//     dX'[i] total = bf16(dX'[i] + pre[i] dh + sum over q of fn[q,e] (rstd dmix[q])
//                         - v[e] rstd^2 / (STREAMS hidden_size) (sum over q of dmix[q] mix[q]))
//     dX, dy, dpost and dcomb of the site in front as in mhc_post.cu, of the total
//
// dmix stands behind dpre, a sum over the whole token, and dcomb of the site in front behind a sum of the total: each
// is a kernel of its own. mhc_post_mix_pre_dpre takes a block a token and leaves four numbers of it. The coefficients
// and the sums of dfn, dscale and dbase are mhc_mix_backward.cu's kernels. mhc_post_mix_pre_total is mhc_mix's second
// reading of the streams (projection_backward.h) with two more terms, so that the three gradients of X' are added in
// fp32 and rounded once. mhc_post's backward reads what it left.
//
// Floor for a token of d channels, each tensor once: 46 d bytes, of which the total is 8 d. X' and dh are read twice
// and the total once more than it is written: 64 d bytes, 3550 us for 32768 tokens of 7168 channels at 4.24 TB/s. The
// separate kernels (mhc_pre 18 d, mhc_mix 16 d, an addition of three gradients 32 d, mhc_post 28 d) move 94 d, and
// round each of the three gradients. Expected to be limited by memory but for the total, 384 d FLOPs of fp32
// (mhc_mix_backward.cu), which reads 18 d and writes 8 d bytes.
// Measured on one H200: 32768 tokens of 7168 channels 12.3 ms, 3.5 times the floor. Its reading of the streams is
// still the one that mhc_mix's backward had before it copied ahead (mhc_mix_backward.cu), with two more rows to wait
// for.
//
// The first site of a block has no post in front: its streams and its pre take the place of X' and pre, and dX' total is
// the gradient of the streams.
//
// Launch: dpre num_tokens blocks of any multiple of 32 threads; total as mhc_mix_backward_streams.
#include "projection_backward.h"
#include "sinkhorn.h"

constexpr int DPRE_THREADS = 256;
constexpr int NUMBERS = COLUMNS + 4;  // of a token: rstd dmix, the factor of v, nothing

struct MhcPostMixPreDpreParams {
    const bf16* streams;  // out, [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_destination_stride;
    const bf16* dh; int64_t dh_token_stride;  // [num_tokens, hidden_size]
    float* dpre;  // [num_tokens, STREAMS]
    int32_t hidden_size;
};
PARAMS_LAYOUT(MhcPostMixPreDpreParams, streams, streams_token_stride, streams_destination_stride, dh, dh_token_stride,
              dpre, hidden_size)

struct MhcPostMixPreTotalParams {
    const bf16* dh; int64_t dh_token_stride;
    const bf16* dout; int64_t dout_token_stride; int64_t dout_destination_stride;
    const float* pre;  // [num_tokens, STREAMS], of the next site
    const bf16* streams; int64_t streams_token_stride; int64_t streams_stream_stride;  // out
    const float* fn;  // [COLUMNS, STREAMS * hidden_size]
    const float* numbers;  // [num_tokens, NUMBERS]
    bf16* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;  // the total
    float* dfn_partials;  // [splits, COLUMNS, STREAMS * hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
};
PARAMS_LAYOUT(MhcPostMixPreTotalParams, dh, dh_token_stride, dout, dout_token_stride, dout_destination_stride, pre,
              streams, streams_token_stride, streams_stream_stride, fn, numbers, dstreams, dstreams_token_stride,
              dstreams_stream_stride, dfn_partials, num_tokens, hidden_size, splits)

template <int COUNT>
DEVICE void store_dpre(const MhcPostMixPreDpreParams& params, float (*partials)[STREAMS]) {
    const int64_t token = blockIdx.x;
    float sums[STREAMS] = {};
    add_products<COUNT>(params.streams + token * params.streams_token_stride, params.streams_destination_stride,
                        params.dh + token * params.dh_token_stride, params.hidden_size, sums);
    const float sum = block_sums(sums, partials);
    if (threadIdx.x < STREAMS) params.dpre[token * STREAMS + threadIdx.x] = sum;
}

KERNEL(mhc_post_mix_pre_dpre_vector, MhcPostMixPreDpreParams, DPRE_THREADS) {
    __shared__ float partials[DPRE_THREADS / WARP_SIZE][STREAMS];
    store_dpre<Element<bf16>::per_vec16>(params, partials);
}
KERNEL(mhc_post_mix_pre_dpre_scalar, MhcPostMixPreDpreParams, DPRE_THREADS) {
    __shared__ float partials[DPRE_THREADS / WARP_SIZE][STREAMS];
    store_dpre<1>(params, partials);
}

// dX' from elsewhere and pre dh.
template <int CHANNELS>
DEVICE void load_other(const MhcPostMixPreTotalParams& params, const Owned<COLUMNS, CHANNELS>& own, int64_t token,
                       float (&other)[CHANNELS]) {
    float dh[CHANNELS];
    const bf16* const dout = params.dout + token * params.dout_token_stride + own.within;
    load_elements<CHANNELS>(dout + own.stream * params.dout_destination_stride, other);
    load_elements<CHANNELS>(params.dh + token * params.dh_token_stride + own.within, dh);
    const float pre = params.pre[token * STREAMS + own.stream];
    UNROLL
    for (int c = 0; c < CHANNELS; ++c) other[c] += pre * dh[c];
}

template <int CHANNELS>
DEVICE void add_other(const MhcPostMixPreTotalParams&, const Owned<COLUMNS, CHANNELS>&, const Vec16*,
                      const float (&other)[CHANNELS], float (&dv)[CHANNELS]) {
    UNROLL
    for (int c = 0; c < CHANNELS; ++c) dv[c] += other[c];
}

KERNEL(mhc_post_mix_pre_total_pairs, MhcPostMixPreTotalParams, STREAMS_THREADS) {
    __shared__ Vec16 staged[STAGED_TOKENS][NUMBERS / 4];
    backward_narrow<COLUMNS, 2>(params, staged);
}
KERNEL(mhc_post_mix_pre_total_scalar, MhcPostMixPreTotalParams, STREAMS_THREADS) {
    __shared__ Vec16 staged[STAGED_TOKENS][NUMBERS / 4];
    backward_narrow<COLUMNS, 1>(params, staged);
}
