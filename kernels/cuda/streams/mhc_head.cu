// The residual streams collapsed to one in front of the final norm (inference 2.5). With v the STREAMS streams X of a
// token one behind the other,
//
//     rstd = 1 / sqrt(mean(v^2) + norm_eps)          mix[i] = rstd (sum over e of fn[i,e] v[e])
//     w[i] = sigmoid(mix[i] scale + base[i]) + hc_eps            out = sum over i of w[i] X[i]
//
// The weights keep all bits of fp32, as those of mhc_mix do, whose projection (projection.h) this is with four columns.
// fp32 up to the store of out, which is rounded once, streams in their order.
//
// w is known once a whole token is read, so that X is read twice, the second time by mhc_head_mix: a block of it is a
// piece of a token as in mhc_pre, and each of its threads makes w of the token's five sums, which all of them read from
// the cache. The one of the first piece saves mix and rstd for the backward.
//
// Floor for a bf16 token of d channels: 10 d bytes, with the second reading 18 d; 32768 tokens of 7168 channels 997 us
// at 4.24 TB/s. Up to some 400 tokens of them stay in the second-level cache between the readings. Expected to be
// limited by memory.
// Measured on one H200: 32768 tokens of 7168 channels 1178 us (85 % of a copy with the second reading), one token
// 10.8 us, 128 tokens 19.8 us, where a hundred parts of each sum are added; 1253, 13.3 and 24.6 us when every thread
// added up all sums itself. With 16 parts read at a time 1220, 9.5 and 18.5 us. Now six groups of lanes add up a sixth of
// many parts each, 19 loads of a warp instead of 112. 7.2 and 12.6 us.
// On one H100 6.4 and 12.5 us; since then the projection asks for all that it reads at once (mhc_mix.cu), the warps of a
// block share the parts, five loads each instead of 19 in two rounds, and scale and base are not waited for behind them: 3.4 and
// 9.5 us, where 4 and 8.5 were expected. What stops both directions at 53 % of a copy's rate on one H100 (45 % at 4096 tokens)
// is that the coefficients of a token need all of its channels, so that its streams are read twice; the readings themselves
// reach 83 % of memory's rate. On Hopper clusters hold a token's channels between the two, and read them once:
// mhc_head_hopper.cu.
//
// Launch: mhc_head_project token_tiles * splits blocks, mhc_head_project_few as many as there are parts of FEW_PIECES pieces;
// mhc_head_project_scalar a warp a token, splits 1;
// mhc_head_mix_* num_tokens * chunks blocks of any multiple of 32 threads that cover a row.
#include "projection.h"
#include "sigmoid.h"

constexpr int MIX_THREADS = 128, MIX_WARPS = MIX_THREADS / WARP_SIZE;

struct MhcHeadMixParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* partials;  // of the projection
    const float* scale;  // [1]
    const float* base;  // [STREAMS]
    bf16* out; int64_t out_token_stride;  // [num_tokens, hidden_size]
    float* mix;  // [num_tokens, STREAMS]
    float* rstd;  // [num_tokens]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
    int32_t chunks;  // blocks of a token
    float norm_eps;
    float hc_eps;
};
PARAMS_LAYOUT(MhcHeadMixParams, streams, streams_token_stride, streams_stream_stride, partials, scale, base, out,
              out_token_stride, mix, rstd, num_tokens, hidden_size, splits, chunks, norm_eps, hc_eps)

SHARED_MEMORY(mhc_head_project, sizeof(ProjectionShared<STREAMS>))

KERNEL(mhc_head_project, ProjectionParams, PROJECTION_THREADS) { project<STREAMS>(params); }
KERNEL(mhc_head_project_few, ProjectionParams, FEW_PROJECTION_THREADS<STREAMS>) { project_few<STREAMS>(params); }
KERNEL(mhc_head_project_scalar, ProjectionParams, PROJECTION_THREADS) { project_scalar<STREAMS>(params); }

// A token's products and sum of squares, number i in lane i of STREAMS + 1. Where there are many parts of them, groups of
// so many lanes of all warps add up a share of the parts each, all of which are waited for at once, and then the groups' sums and
// the warps' in their order.
DEVICE float projection_of(const MhcHeadMixParams& params, int64_t token, float (&of_warps)[MIX_WARPS][WARP_SIZE]) {
    constexpr int NUMBERS = STREAMS + 1, GROUPS = WARP_SIZE / NUMBERS, FEW_PARTS = 4;
    const int place = lane_id() % NUMBERS, group = lane_id() / NUMBERS;
    const int64_t apart = params.num_tokens * PARTIAL_WIDTH<STREAMS>;
    const float* const first = params.partials + token * PARTIAL_WIDTH<STREAMS> + place;
    if (params.splits <= FEW_PARTS) return sum_of_parts<FEW_PARTS>(first, apart, params.splits);
    const int warps = blockDim.x / WARP_SIZE, share = warp_id() * GROUPS + group, shares = warps * GROUPS;
    const int begin = params.splits * share / shares, end = params.splits * (share + 1) / shares;
    const float own = sum_of_parts<5>(first + begin * apart, apart, group < GROUPS ? end - begin : 0);
    float sum = 0.0f;
    UNROLL
    for (int other = 0; other < GROUPS; ++other) sum += __shfl_sync(FULL_WARP, own, other * NUMBERS + place);
    of_warps[warp_id()][lane_id()] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < warps; ++warp) sum += of_warps[warp][lane_id()];
    return sum;
}

template <int COUNT>
DEVICE void mhc_head_mix(const MhcHeadMixParams& params) {
    const uint32_t chunks = static_cast<uint32_t>(params.chunks), chunk = blockIdx.x % chunks;
    const int64_t token = blockIdx.x / chunks;
    const int64_t column = (static_cast<int64_t>(chunk) * blockDim.x + threadIdx.x) * COUNT;
    const bool exists = column < params.hidden_size;
    __shared__ float of_warps[MIX_WARPS][WARP_SIZE];
    float x[STREAMS][COUNT] = {}, base[STREAMS], w[STREAMS], out[COUNT];
    // What is needed last is asked for first: behind the sums it would be a wait of its own.
    const float scale = params.scale[0];
    load_coefficients(params.base, base);
    if (exists)
        load_streams(params.streams + token * params.streams_token_stride + column, params.streams_stream_stride, x);
    const float own = projection_of(params, token, of_warps);
    const float squares = __shfl_sync(FULL_WARP, own, STREAMS);
    const float rstd = streams_rstd(params, squares);
    const bool saves = chunk == 0 && threadIdx.x == 0;
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        const float mix = rstd * __shfl_sync(FULL_WARP, own, i);
        w[i] = sigmoid(mix * scale + base[i]) + params.hc_eps;
        if (saves) params.mix[token * STREAMS + i] = mix;
    }
    if (saves) params.rstd[token] = rstd;
    if (!exists) return;
    mix_streams(x, w, out);
    store_elements(params.out + token * params.out_token_stride + column, out);
}

KERNEL(mhc_head_mix_vector, MhcHeadMixParams, MIX_THREADS) { mhc_head_mix<Element<bf16>::per_vec16>(params); }
KERNEL(mhc_head_mix_scalar, MhcHeadMixParams, MIX_THREADS) { mhc_head_mix<1>(params); }
