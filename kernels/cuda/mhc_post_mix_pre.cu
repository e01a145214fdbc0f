// The coefficients of the next site and what its sublayer reads, of few tokens, in one launch (inference 2.2 to 2.4): what
// mhc_mix_coefficients_few and mhc_pre are in two. From what mhc_mix's projection left of the streams `out`,
//
//     pre, post, comb, mix and rstd of the next site                                                       mhc_mix.cu
//     h = sum over i of pre[i] out[i], pre of the next site                                                mhc_pre.cu
//
// with the same bits. The new streams in front of it are mhc_post's.
//
// A block takes a token: eight warps that mix, and one that makes coefficients. All of what is read is asked for at once: the parts
// of the projection, scale and base, HELD pieces of out of a thread. The eight warps add up the parts, and wait for the four
// numbers of pre; comb, 2 sinkhorn_iters - 1 dependent passes, is the last warp's alone while the others mix.
//
// Floor: 10 bytes a channel of the streams' 8 and h's 2, of few tokens from the second-level cache: 9 MB, 2 us, for 128 tokens of
// 7168 channels. Expected to limit: the trip to the parts, the sums and pre, one behind the other, some 2 us; what it saves is a
// launch, 1.5 us, and the trip to pre.
// A kernel that made the new streams and their projection in one kept too few bytes under way, and was slower at every size (on one
// H200 2585 us for 32768 tokens beside 2063, 28.3 for 128 tokens beside 22.1).
//
// Launch: num_tokens blocks.
#include "coefficients.h"

constexpr int MIX_THREADS = (FEW_WARPS + 1) * static_cast<int>(WARP_SIZE);
constexpr int HELD = 4;  // pieces of each destination that a thread has under way

struct MhcPostMixPreMixParams {
    const bf16* out; int64_t out_token_stride; int64_t out_destination_stride;  // [num_tokens, STREAMS, hidden_size]
    const float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
    const float* scale;  // [3]
    const float* base;  // [COLUMNS]
    float* pre;  // [num_tokens, STREAMS]; this and what follows of the next site
    float* post;  // [num_tokens, STREAMS]
    float* comb;  // [num_tokens, source, destination]
    float* mix;  // [num_tokens, COLUMNS]
    float* rstd;  // [num_tokens]
    bf16* h; int64_t h_token_stride;  // [num_tokens, hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
    int32_t sinkhorn_iters;
    float norm_eps;
    float hc_eps;
};
PARAMS_LAYOUT(MhcPostMixPreMixParams, out, out_token_stride, out_destination_stride, partials, scale, base, pre, post,
              comb, mix, rstd, h, h_token_stride, num_tokens, hidden_size, splits, sinkhorn_iters, norm_eps, hc_eps)

// HELD pieces of each destination from a thread's piece `first` on, a block's mixing threads apart.
constexpr int APART = FEW_WARPS * static_cast<int>(WARP_SIZE);
DEVICE void load_pieces(const MhcPostMixPreMixParams& params, int64_t token, int first, Vec16 (&held)[HELD][STREAMS]) {
    const int last = params.hidden_size / PIECE - 1;
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        // Behind the last piece that one again, which is not stored: a branch would make the next load wait.
        const int piece = minimum(first + v * APART, last);
        const bf16* const out = params.out + token * params.out_token_stride + piece * PIECE;
        UNROLL
        for (int i = 0; i < STREAMS; ++i) held[v][i] = load_vec16(out + i * params.out_destination_stride);
    }
}

DEVICE void store_mixed(const MhcPostMixPreMixParams& params, int64_t token, int first, const float (&pre)[STREAMS],
                        const Vec16 (&held)[HELD][STREAMS]) {
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int column = (first + v * APART) * PIECE;
        if (column >= params.hidden_size) break;
        float x[STREAMS][PIECE], h[PIECE];
        UNROLL
        for (int i = 0; i < STREAMS; ++i) unpack<bf16>(held[v][i], x[i]);
        mix_streams(x, pre, h);
        store_elements(params.h + token * params.h_token_stride + column, h);
    }
}

// The coefficients of a token from the sums of its block's warps, by the last warp; pre is there for all others past a barrier.
DEVICE void make_coefficients(const MhcPostMixPreMixParams& params, int64_t token, const SumsOfWarps& sums, float (&pre)[STREAMS],
                              const LogitOf& logit) {
    const float sum = sum_of_warps(sums);
    const float rstd = streams_rstd(params, __shfl_sync(FULL_WARP, sum, COLUMNS)), mix = rstd * sum, z = logit(mix);
    if (lane_id() < 2 * STREAMS) {
        const float gate = store_gate_of(params, token, lane_id(), mix, z);
        if (lane_id() < STREAMS) pre[lane_id()] = gate;
    }
    __syncthreads();
    if (lane_id() == 0) params.rstd[token] = rstd;
    store_comb_of_one(params, token, mix, z);
}

KERNEL(mhc_post_mix_pre_mix, MhcPostMixPreMixParams, MIX_THREADS) {
    __shared__ SumsOfWarps sums;
    __shared__ float pre[STREAMS];
    const int64_t token = blockIdx.x;
    const int own = threadIdx.x;
    if (warp_id() == FEW_WARPS) {
        const LogitOf logit(params, lane_id());
        __syncthreads();
        make_coefficients(params, token, sums, pre, logit);
        return;
    }
    PartsOfWarp parts(params, token);
    Vec16 held[HELD][STREAMS];
    load_pieces(params, token, own, held);
    sums[warp_id()][lane_id()] = parts.sum();
    __syncthreads();
    __syncthreads();
    for (int first = own; first * PIECE < params.hidden_size; first += HELD * APART) {
        if (first != own) load_pieces(params, token, first, held);
        store_mixed(params, token, first, pre, held);
    }
}
