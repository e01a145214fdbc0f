// The gradients of the coefficients of the residual streams (training 11.1). v is a token's
// STREAMS streams, concatenated. mix and rstd come from the forward. z = mix scale + base; s =
// sigmoid(z):
//
//     dz = dpre s (1 - s), 2 dpost s (1 - s), the gradient of the Sinkhorn iteration (sinkhorn.h)
//     dmix = dz scale        dbase = sum over tokens of dz
//     dscale[g] = sum over tokens and the columns of group g of dz mix
//     dfn[q,e] = sum over tokens of (rstd dmix[q]) v[e]
//     dv[e] = sum over q of fn[q,e] (rstd dmix[q])
//             - v[e] rstd^2 / (STREAMS hidden_size) (sum over q of dmix[q] mix[q])
//
// 1 - s is sigmoid(-z), which keeps its digits where s is 1. mhc_mix_backward_coefficients: 16
// lanes a token, all passes' matrices in shared memory. It stores 25 values a token and partials
// of dbase and dscale. mhc_mix_backward_streams reads v once for dv and dfn: by exact MMA
// (projection_backward_products.h), or for unaligned rows in fp32 (projection_backward.h).
// mhc_mix_backward_sums adds the partials in their order. Nothing is atomic: equal launches give
// equal bits.
// Floors for a token of d channels: 16 d bytes, 885 us for 32768 tokens of 7168 channels at 4.24
// TB/s; 27 m16n8k16 for 16 tokens and 16 channels, 400 us at the data sheet's rate.
// Limit: 54 % of cycles have no warp that could issue, at one block an SM; faster memory does not
// help. 55 % of a copy on one H200. mhc_mix_hopper_backward.cu uses wgmma.
// Launch: coefficients any number of blocks, 2 THREADS floats of dynamic shared memory a pass;
// streams ceil(STREAMS * hidden_size / PRODUCT_CHANNELS) * splits (scalar: STREAMS_THREADS
// channels a block); sums ceil(numbers / THREADS).
// What was tried: kernels/docs/mhc_mix.md.
#include "projection_backward_products.h"
#include "sinkhorn.h"

constexpr int GROUPS = 3;
constexpr int THREADS = 128;
constexpr int TOKENS = THREADS / MATRIX_LANES;  // that a block of the coefficients takes at a time
constexpr int NUMBERS = COLUMNS + 4;  // of a token: rstd dmix, the factor of v, nothing

struct MhcMixBackwardCoefficientsParams {
    const float* mix;  // [num_tokens, COLUMNS]
    const float* rstd;  // [num_tokens]
    const float* scale;  // [GROUPS]
    const float* base;  // [COLUMNS]
    const float* dpre;  // [num_tokens, STREAMS]
    const float* dpost;  // [num_tokens, STREAMS]
    const float* dcomb;  // [num_tokens, source, destination]
    float* numbers;  // [num_tokens, NUMBERS]
    float* partials;  // [gridDim.x, 2 COLUMNS]: of dz, of dz mix
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t sinkhorn_iters;
    float hc_eps;
};

struct MhcMixBackwardStreamsParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* fn;  // [COLUMNS, STREAMS * hidden_size]
    const float* numbers;
    bf16* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dfn_partials;  // [splits, COLUMNS, STREAMS * hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
};

struct MhcMixBackwardSumsParams {
    const float* dfn_partials; float* dfn;
    const float* partials; float* dscale; float* dbase;
    int64_t channels;  // STREAMS * hidden_size
    int32_t splits;
    int32_t blocks;  // rows of partials
};

// ---------------------------------------------------------------- coefficients

// What a lane has of its token: its element of comb and, in the first eight lanes, a gate of pre
// or post.
struct Coefficients {
    float comb, gate;
};

// The gradient of a lane's logit. `passes` has room for M after each pass and for the factor of
// the pass.
DEVICE float comb_gradient(float logit, float dcomb, int iterations, float eps, float* passes) {
    const float p = row_softmax(logit);
    float m = p + eps;
    for (int pass = 1; pass <= sinkhorn_passes(iterations); ++pass) {
        const float factor = sinkhorn_factor(m, pass, eps);
        m *= factor;
        passes[(2 * pass - 2) * THREADS + threadIdx.x] = m;
        passes[(2 * pass - 1) * THREADS + threadIdx.x] = factor;
    }
    float gradient = dcomb;
    for (int pass = sinkhorn_passes(iterations); pass >= 1; --pass) {
        const float behind = passes[(2 * pass - 2) * THREADS + threadIdx.x];
        gradient = sinkhorn_gradient(gradient, behind, passes[(2 * pass - 1) * THREADS + threadIdx.x], pass);
    }
    return p * (gradient - row_sum(gradient * p));
}

DEVICE float gate_gradient(const MhcMixBackwardCoefficientsParams& params, int64_t token, int lane, float z) {
    const float slope = sigmoid(z) * sigmoid(-z);
    if (lane < STREAMS) return params.dpre[token * STREAMS + lane] * slope;
    return 2.0f * params.dpost[token * STREAMS + lane - STREAMS] * slope;
}

// Sums over a block's tokens of dz and of dz mix, by column.
DEVICE void store_partials(const MhcMixBackwardCoefficientsParams& params, const Coefficients& dz, const Coefficients& products) {
    __shared__ float sums[TOKENS][2 * COLUMNS];
    const int lane = threadIdx.x % MATRIX_LANES, row = threadIdx.x / MATRIX_LANES;
    sums[row][2 * STREAMS + lane] = dz.comb;
    sums[row][COLUMNS + 2 * STREAMS + lane] = products.comb;
    if (lane < 2 * STREAMS) sums[row][lane] = dz.gate;
    if (lane < 2 * STREAMS) sums[row][COLUMNS + lane] = products.gate;
    __syncthreads();
    if (threadIdx.x >= 2 * COLUMNS) return;
    float sum = 0.0f;
    for (int token = 0; token < TOKENS; ++token) sum += sums[token][threadIdx.x];
    params.partials[static_cast<int64_t>(blockIdx.x) * 2 * COLUMNS + threadIdx.x] = sum;
}

KERNEL(mhc_mix_backward_coefficients, MhcMixBackwardCoefficientsParams, THREADS) {
    float* const passes = reinterpret_cast<float*>(dynamic_shared());
    const int lane = threadIdx.x % MATRIX_LANES;
    Coefficients sums = {}, products = {};
    // The loop is uniform for a block: lanes of a missing token take part in their warp's
    // shuffles.
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * TOKENS; first < params.num_tokens;
         first += static_cast<int64_t>(gridDim.x) * TOKENS) {
        const int64_t token = first + threadIdx.x / MATRIX_LANES;
        const bool exists = token < params.num_tokens, has_gate = exists && lane < 2 * STREAMS;
        const float rstd = exists ? params.rstd[token] : 0.0f;
        const float dcomb = exists ? params.dcomb[token * MATRIX_LANES + lane] : 0.0f;
        Coefficients mix = {}, dz = {};
        if (exists) mix.comb = params.mix[token * COLUMNS + 2 * STREAMS + lane];
        if (has_gate) mix.gate = params.mix[token * COLUMNS + lane];
        const float logit = mix.comb * params.scale[2] + params.base[2 * STREAMS + lane];
        dz.comb = comb_gradient(logit, dcomb, params.sinkhorn_iters, params.hc_eps, passes);
        if (!exists) dz.comb = 0.0f;
        const float gate_scale = has_gate ? params.scale[lane / STREAMS] : 0.0f;
        if (has_gate) dz.gate = gate_gradient(params, token, lane, mix.gate * gate_scale + params.base[lane]);
        sums.comb += dz.comb;
        sums.gate += dz.gate;
        products.comb += dz.comb * mix.comb;
        products.gate += dz.gate * mix.gate;
        const Coefficients dmix{dz.comb * params.scale[2], has_gate ? dz.gate * gate_scale : 0.0f};
        const float radial = column_sum(row_sum(dmix.comb * mix.comb + (has_gate ? dmix.gate * mix.gate : 0.0f)));
        if (!exists) continue;
        float* const numbers = params.numbers + token * NUMBERS;
        numbers[2 * STREAMS + lane] = rstd * dmix.comb;
        if (has_gate) numbers[lane] = rstd * dmix.gate;
        const float channels = static_cast<float>(STREAMS) * params.hidden_size;
        if (lane < NUMBERS - COLUMNS) numbers[COLUMNS + lane] = lane == 0 ? rstd * (rstd * (radial / channels)) : 0.0f;
    }
    store_partials(params, sums, products);
}

// ---------------------------------------------------------------- streams

// mhc_mix adds no other terms to dv.
template <typename... Others>
DEVICE void load_other(const MhcMixBackwardStreamsParams&, const Others&...) {}
template <typename... Others>
DEVICE void add_other(const MhcMixBackwardStreamsParams&, const Others&...) {}

SHARED_MEMORY(mhc_mix_backward_streams_wide, sizeof(ProductShared<COLUMNS>))

KERNEL(mhc_mix_backward_streams_wide, MhcMixBackwardStreamsParams, PRODUCT_THREADS) { backward_products<COLUMNS>(params); }
KERNEL(mhc_mix_backward_streams_scalar, MhcMixBackwardStreamsParams, STREAMS_THREADS) {
    __shared__ Vec16 staged[STAGED_TOKENS][NUMBERS / 4];
    backward_narrow<COLUMNS, 1>(params, staged);
}

// ---------------------------------------------------------------- sums over blocks

constexpr int SUM_LANES = 2 * COLUMNS / 4, SUM_GROUPS = THREADS / SUM_LANES;

// dz and dz mix of all columns, in row 0 of of_groups. A group of threads adds every SUM_GROUPS-th
// of the blocks' partials; the groups' sums are added in their order. With a thread a column about
// fifty loads would depend on each other.
DEVICE void column_totals(const MhcMixBackwardSumsParams& params, float (*of_groups)[2 * COLUMNS]) {
    const int first = static_cast<int>(threadIdx.x) % SUM_LANES * 4, group = static_cast<int>(threadIdx.x) / SUM_LANES;
    float sums[4] = {};
    for (int32_t block = group; group < SUM_GROUPS && block < params.blocks; block += SUM_GROUPS) {
        float parts[4];
        load_elements(params.partials + static_cast<int64_t>(block) * 2 * COLUMNS + first, parts);
        UNROLL
        for (int i = 0; i < 4; ++i) sums[i] += parts[i];
    }
    UNROLL
    for (int i = 0; i < 4 && group < SUM_GROUPS; ++i) of_groups[group][first + i] = sums[i];
    __syncthreads();
    if (threadIdx.x < 2 * COLUMNS) {
        float total = 0.0f;
        for (int row = 0; row < SUM_GROUPS; ++row) total += of_groups[row][threadIdx.x];
        of_groups[0][threadIdx.x] = total;
    }
    __syncthreads();
}

KERNEL(mhc_mix_backward_sums, MhcMixBackwardSumsParams, THREADS) {
    __shared__ float of_groups[SUM_GROUPS][2 * COLUMNS];
    const int64_t numbers = COLUMNS * params.channels, at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (at < numbers) {
        float sum = 0.0f;
        for (int64_t split = 0; split < params.splits; ++split) sum += params.dfn_partials[split * numbers + at];
        params.dfn[at] = sum;
    }
    if (blockIdx.x != 0) return;
    column_totals(params, of_groups);
    if (threadIdx.x < COLUMNS) params.dbase[threadIdx.x] = of_groups[0][threadIdx.x];
    if (threadIdx.x >= GROUPS) return;
    // Columns 0 to 3, 4 to 7, 8 to 23.
    const int first = threadIdx.x * STREAMS, last = threadIdx.x == GROUPS - 1 ? COLUMNS : first + STREAMS;
    float sum = 0.0f;
    for (int column = first; column < last; ++column) sum += of_groups[0][COLUMNS + column];
    params.dscale[threadIdx.x] = sum;
}
