// The coefficients of the residual streams (inference 2.1 and 2.2). v is the STREAMS streams of a
// token, concatenated; q = 0..23:
//
//     rstd = 1 / sqrt(mean(v^2) + norm_eps)      mix[q] = rstd (sum over e of fn[q,e] v[e])
//     z = mix scale + base     scale[0] for q = 0..3, scale[1] for 4..7, scale[2] for 8..23
//     pre[i] = sigmoid(z[i]) + hc_eps        post[j] = 2 sigmoid(z[4 + j])
//     comb = Sinkhorn(z[8 + 4 i + j]) (sinkhorn.h)
//
// projection.h has the projection: bf16 MMA with exact products of fp32 weights. coefficients.h
// has the coefficients. A block stores partials of its split of the channels. The number of splits
// depends on num_tokens, so few tokens keep all SMs busy. mhc_mix_coefficients adds a token's
// partials in their order, by four lanes, a row of comb each. mhc_mix_coefficients_few takes a
// block a token. mhc_mix_project_scalar takes layouts that 16 bytes do not fit.
// Batch invariance (Device::invariant): splits from hidden_size, one projection, no *_few kernel; for
// sm_90a splits of FEW_WARPS or of all groups of channels, which coefficients.h adds to the same sums.
// Floors for a token of d channels: 8 d bytes; 576 d FLOPs, a quarter of the bytes' time at 790
// TFLOP/s. 8192 tokens of 7168 channels: 111 us at 4.24 TB/s, of 4096 channels 63 us. Weights from
// L2 add 0.4 of the streams' bytes. Shared memory loads take about 65 % of its rate.
// Limit: tensor pipes, then issue slots; 54 % of the floor's rate on one H200. mhc_mix_hopper.cu
// is faster from about 256 tokens on. Few tokens: two launches, 39 dependent passes.
// Launch: mhc_mix_project and mhc_mix_project_at_once token_tiles * splits blocks;
// mhc_mix_project_few one a split of FEW_PIECES pieces; mhc_mix_project_scalar a warp a token,
// splits 1; mhc_mix_coefficients ceil(num_tokens / (COEFFICIENT_THREADS / 4)) blocks,
// mhc_mix_coefficients_few num_tokens.
// What was tried: kernels/docs/mhc_mix.md.
#include "coefficients.h"

constexpr int COEFFICIENT_THREADS = 32;
constexpr int FEW_THREADS = FEW_WARPS * static_cast<int>(WARP_SIZE);

struct MhcMixCoefficientsParams {
    const float* partials;
    const float* scale;  // [3]
    const float* base;  // [COLUMNS]
    float* pre;  // [num_tokens, STREAMS]
    float* post;  // [num_tokens, STREAMS]
    float* comb;  // [num_tokens, source, destination]
    float* mix;  // [num_tokens, COLUMNS]
    float* rstd;  // [num_tokens]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
    int32_t sinkhorn_iters;
    float norm_eps;
    float hc_eps;
};

SHARED_MEMORY(mhc_mix_project, sizeof(ProjectionShared<COLUMNS>))

KERNEL(mhc_mix_project, ProjectionParams, PROJECTION_THREADS) { project<COLUMNS>(params); }
SHARED_MEMORY(mhc_mix_project_at_once, sizeof(AtOnceShared<COLUMNS>))
KERNEL(mhc_mix_project_at_once, ProjectionParams, AT_ONCE_THREADS) {
    project_at_once<COLUMNS>(params, *reinterpret_cast<AtOnceShared<COLUMNS>*>(dynamic_shared()), StreamsOfMemory{params});
}
KERNEL(mhc_mix_project_few, ProjectionParams, FEW_PROJECTION_THREADS<COLUMNS>) { project_few<COLUMNS>(params); }
KERNEL(mhc_mix_project_scalar, ProjectionParams, PROJECTION_THREADS) { project_scalar<COLUMNS>(params); }

// What lane i of a token's four computes its coefficients from.
struct SourceSums {
    float comb[STREAMS], pre, post, squares;
};

// Adds a token's partials in their order, with AT_ONCE of them in flight.
template <int AT_ONCE>
DEVICE void add_parts(const MhcMixCoefficientsParams& params, int64_t token, int lane, SourceSums& sums) {
    const int64_t apart = params.num_tokens * PARTIAL_WIDTH<COLUMNS>;
    const float* part = params.partials + token * PARTIAL_WIDTH<COLUMNS>;
    for (int32_t split = 0; split < params.splits; split += AT_ONCE) {
        SourceSums parts[AT_ONCE] = {};
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i, part += apart) {
            if (split + i >= params.splits) continue;
            load_elements<STREAMS>(part + 2 * STREAMS + STREAMS * lane, parts[i].comb);
            parts[i].pre = part[lane];
            parts[i].post = part[STREAMS + lane];
            parts[i].squares = part[COLUMNS];
        }
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i) {
            UNROLL
            for (int j = 0; j < STREAMS; ++j) sums.comb[j] += parts[i].comb[j];
            sums.pre += parts[i].pre;
            sums.post += parts[i].post;
            sums.squares += parts[i].squares;
        }
    }
}

KERNEL(mhc_mix_coefficients, MhcMixCoefficientsParams, COEFFICIENT_THREADS) {
    const int64_t token = (static_cast<int64_t>(blockIdx.x) * COEFFICIENT_THREADS + threadIdx.x) / STREAMS;
    const int lane = threadIdx.x % STREAMS;
    // Lanes of a missing token take part in their warp's shuffles.
    const bool exists = token < params.num_tokens;
    SourceSums sums = {};
    if (exists) add_parts<4>(params, token, lane, sums);
    const float rstd = streams_rstd(params, sums.squares);
    UNROLL
    for (int j = 0; j < STREAMS; ++j) sums.comb[j] *= rstd;
    store_comb_row(params, token, lane, exists, sums.comb);
    if (!exists) return;
    store_gate(params, token, lane, rstd * sums.pre);
    store_gate(params, token, STREAMS + lane, rstd * sums.post);
    if (lane == 0) params.rstd[token] = rstd;
}

// For few tokens with many partials: a block a token. scale and base are loaded with the partials.
// Each lane of the first warp computes all of comb.
KERNEL(mhc_mix_coefficients_few, MhcMixCoefficientsParams, FEW_THREADS) {
    __shared__ SumsOfWarps sums;
    const LogitOf logit(params, lane_id());
    const int64_t token = blockIdx.x;
    sums[warp_id()][lane_id()] = PartsOfWarp(params, token).sum();
    __syncthreads();
    if (warp_id() != 0) return;
    store_comb_of_one(params, token, store_gates_of_one(params, token, sums, logit));
}
