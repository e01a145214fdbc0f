// Collapses the residual streams to one before the final norm (inference 2.5). v is the STREAMS
// streams X of a token, concatenated:
//
//     rstd = 1 / sqrt(mean(v^2) + norm_eps)          mix[i] = rstd (sum over e of fn[i,e] v[e])
//     w[i] = sigmoid(mix[i] scale + base[i]) + hc_eps            out = sum over i of w[i] X[i]
//
// The projection is that of mhc_mix (projection.h) with four columns, so the weights keep all bits
// of fp32. Everything is fp32 until out is stored, which rounds once. Streams are added in their
// order.
//
// w needs the whole token, so X is read twice, the second time by mhc_head_mix. As in mhc_pre a
// block takes a piece of a token. Each thread computes w from the token's five sums, which come
// from the cache. The block of the first piece saves mix and rstd for the backward.
// Batch invariance: as mhc_mix, splits from hidden_size alone and one projection.
//
// Floor for a bf16 token of d channels: 10 d bytes, 18 d with the second read. With it 32768
// tokens of 7168 channels take 997 us at 4.24 TB/s. Up to about 400 such tokens stay in L2 between
// the reads.
// Limit: memory. The reads reach 83 % of DRAM's rate on one H100; the second read is the loss.
// mhc_head_hopper.cu keeps a token's channels in a cluster and reads them once.
//
// Launch: mhc_head_project token_tiles * splits blocks; mhc_head_project_few one for each split of
// FEW_PIECES pieces; mhc_head_project_scalar a warp a token, splits 1; mhc_head_mix_* num_tokens *
// chunks blocks of any multiple of 32 threads that cover a row.
// What was tried: kernels/docs/mhc_head.md.
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

SHARED_MEMORY(mhc_head_project, sizeof(ProjectionShared<STREAMS>))

KERNEL(mhc_head_project, ProjectionParams, PROJECTION_THREADS) { project<STREAMS>(params); }
KERNEL(mhc_head_project_few, ProjectionParams, FEW_PROJECTION_THREADS<STREAMS>) { project_few<STREAMS>(params); }
KERNEL(mhc_head_project_scalar, ProjectionParams, PROJECTION_THREADS) { project_scalar<STREAMS>(params); }

// A token's dot products and sum of squares, value i % (STREAMS + 1) in lane i. With many splits,
// groups of STREAMS + 1 lanes of all warps add a share of the partials each. All loads of a share
// are in flight at once. Then the groups' sums, and the warps', are added in their order.
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
    // What is needed last is loaded first: after the sums it would be one more wait.
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
