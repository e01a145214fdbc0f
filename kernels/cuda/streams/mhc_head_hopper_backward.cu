// The backward of mhc_head_backward.cu, which has the formulas, for sm_90a. A cluster keeps a
// token's channels in the shared memory of its blocks between dw and what depends on it. So
// streams and dout are read once. streams_cluster.h describes how tokens are loaded and sums are
// exchanged.
//
// A thread has four channels of each stream. It accumulates their dfn in 64 registers over all
// tokens of its cluster's run. fn is in shared memory, where a thread loads it for two tokens at a
// time. Each cluster stores a partial of dfn, 16 rows, and its sums of dz and dz mix. The last two
// kernels of mhc_head_backward.cu add those in their order.
//
// Floor for a bf16 token of d channels: 18 d bytes; at 3.0 TB/s 1409 us for 32768 tokens of 7168
// channels, 176 us for 4096. A block's part of a token there has about 1200 cycles of an SM (1.75
// GHz, 32 clusters at once). Issue takes 730 of them (830 instructions of each warp for two
// tokens), shared memory 430. All clusters run in one wave, no more than certainly fit at once:
// more would run as a tail, and each stores 0.46 MB.
// Limit: memory, 93 to 94 % of a copy for 32768 tokens on one H100.
//
// Launch: CLUSTER blocks for each run of tokens; the number in the kernel's name is the maximum of
// channels of a stream.
// What was tried: kernels/docs/mhc_head.md.
#include "sigmoid.h"
#include "streams_cluster.h"

constexpr int TOKENS = 2;  // of a batch
// Lanes of a token, and those of them of a stream: lane l of a warp has dw of stream (l / 4) % 4
// of token l / 16.
constexpr int LANES = WARP_SIZE / TOKENS, STREAM_LANES = LANES / STREAMS;
constexpr int PRODUCTS = 2 * STREAMS;  // of a cluster: dz, dz mix
constexpr int DOUT = STREAMS;  // row of a token
template <int WARPS>
struct Shared : ClusterShared<WARPS, TOKENS, STREAMS + 1, TOKENS * STREAMS> {
    // Row q STREAMS + i is column q of stream i. A thread loads only what it stored itself.
    alignas(16) float fn[STREAMS * STREAMS][ClusterShared<WARPS, TOKENS, STREAMS + 1, TOKENS * STREAMS>::CHANNELS];
};

struct MhcHeadHopperBackwardParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const bf16* dout; int64_t dout_token_stride;  // [num_tokens, hidden_size]
    const float* fn;  // [STREAMS, STREAMS * hidden_size]
    const float* mix;  // [num_tokens, STREAMS]
    const float* rstd;  // [num_tokens]
    const float* scale;  // [1]
    const float* base;  // [STREAMS]
    bf16* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dfn_partials;  // [clusters, STREAMS, STREAMS * hidden_size]
    float* products;  // [clusters, PRODUCTS]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t run;  // tokens of a cluster
    float hc_eps;
};

DEVICE const bf16* source_of(const MhcHeadHopperBackwardParams& params, int64_t token, int row) {
    return row < STREAMS ? params.streams + token * params.streams_token_stride + row * params.streams_stream_stride
                         : params.dout + token * params.dout_token_stride;
}

template <typename Shared>
DEVICE void keep_weights(const MhcHeadHopperBackwardParams& params, const Share& share, Shared& shared) {
    if (!share.exists) return;
    const float* const from = params.fn + share.column + share.own;
    UNROLL
    for (int row = 0; row < STREAMS * STREAMS; ++row)
        store_vec16(&shared.fn[row][share.own], load_vec16_readonly(from + static_cast<int64_t>(row) * params.hidden_size));
}

// A WHOLE batch needs no check of each token.
template <bool WHOLE, typename Batch>
DEVICE void leave_sums(const Batch& batch) {
    float dw[TOKENS * STREAMS] = {};
    UNROLL
    for (int t = 0; t < TOKENS; ++t) {
        if (!WHOLE && !batch.has(t)) continue;
        float x[OWN], dout[OWN];
        load_elements<OWN>(batch.row(t, DOUT), dout);
        UNROLL
        for (int i = 0; i < STREAMS; ++i) {
            load_elements<OWN>(batch.row(t, i), x);
            UNROLL
            for (int e = 0; e < OWN; ++e) dw[t * STREAMS + i] += x[e] * dout[e];
        }
    }
    const float sum = lane_sums<WARP_SIZE / 2>(dw);
    if (lane_id() % STREAM_LANES == 0) batch.own_sums()[lane_id() / STREAM_LANES] = sum;
}

// What a lane has of its token and stream.
struct Saved {
    float mix, rstd;
};
struct Numbers {
    float through, factor, w;  // rstd dmix; of v, for the whole token; of dout
};
struct RunSums {
    float dz, dz_mix;  // over the tokens of the lane
};

// Loads that start before the wait for the batch.
template <typename Batch>
DEVICE Saved saved_of(const MhcHeadHopperBackwardParams& params, const Batch& batch) {
    if (lane_id() / LANES >= batch.left) return {0.0f, 0.0f};
    const int64_t token = batch.first + lane_id() / LANES;
    return {params.mix[token * STREAMS + lane_id() / STREAM_LANES % STREAMS], params.rstd[token]};
}

template <typename Batch>
DEVICE Saved add_up(const MhcHeadHopperBackwardParams& params, const Batch& batch) {
    const Saved saved = saved_of(params, batch);
    if (!batch.exists()) return saved;
    batch.wait();
    if (batch.whole()) leave_sums<true>(batch);
    else leave_sums<false>(batch);
    batch.tell();
    return saved;
}

template <typename Batch>
DEVICE Numbers numbers_of(const MhcHeadHopperBackwardParams& params, const Batch& batch, const Saved& saved, float scale,
                          float base, RunSums& sums) {
    const float dw = batch.sum(lane_id() / STREAM_LANES), z = saved.mix * scale + base;
    const float s = sigmoid(z), dz = dw * (s * sigmoid(-z)), dmix = dz * scale;
    float radial = dmix * saved.mix;
    UNROLL
    for (int distance = STREAM_LANES; distance < LANES; distance *= 2) radial += __shfl_xor_sync(FULL_WARP, radial, distance);
    if (lane_id() / LANES < batch.left) sums.dz += dz, sums.dz_mix += dz * saved.mix;
    const float channels = static_cast<float>(STREAMS) * params.hidden_size;
    return {saved.rstd * dmix, saved.rstd * (saved.rstd * (radial / channels)), s + params.hc_eps};
}

// A thread's part of dfn: column, stream.
using Gradients = float[STREAMS][STREAMS][OWN];

// dX of one stream of a token, and what the token adds to dfn of this stream.
DEVICE void add_stream(const float (&x)[OWN], const float (&dout)[OWN], const float (&fn)[STREAMS][OWN],
                       const float (&through)[STREAMS], float factor, float w, Gradients& dfn, int i, float (&dx)[OWN]) {
    UNROLL
    for (int e = 0; e < OWN; ++e) {
        dx[e] = -(factor * x[e]);
        UNROLL
        for (int q = 0; q < STREAMS; ++q) {
            dx[e] += fn[q][e] * through[q];
            dfn[q][i][e] += x[e] * through[q];
        }
        dx[e] += w * dout[e];
    }
}

template <bool WHOLE, typename Batch>
DEVICE void add_batch(const MhcHeadHopperBackwardParams& params, const Batch& batch, const Numbers& numbers, Gradients& dfn) {
    const Share& share = batch.share;
    float through[TOKENS][STREAMS], factor[TOKENS], dout[TOKENS][OWN];
    UNROLL
    for (int t = 0; t < TOKENS; ++t) {
        factor[t] = __shfl_sync(FULL_WARP, numbers.factor, t * LANES);
        UNROLL
        for (int q = 0; q < STREAMS; ++q) through[t][q] = __shfl_sync(FULL_WARP, numbers.through, t * LANES + q * STREAM_LANES);
        if (WHOLE || batch.has(t)) load_elements<OWN>(batch.row(t, DOUT), dout[t]);
    }
    bf16* target = params.dstreams + batch.first * params.dstreams_token_stride + share.column + share.own;
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        float fn[STREAMS][OWN];
        UNROLL
        for (int q = 0; q < STREAMS; ++q) unpack<float>(load_vec16(&batch.shared.fn[q * STREAMS + i][share.own]), fn[q]);
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            const float w = __shfl_sync(FULL_WARP, numbers.w, t * LANES + i * STREAM_LANES);
            if (!WHOLE && !batch.has(t)) continue;
            float x[OWN], dx[OWN];
            load_elements<OWN>(batch.row(t, i), x);
            add_stream(x, dout[t], fn, through[t], factor[t], w, dfn, i, dx);
            store_elements(target + t * params.dstreams_token_stride, dx);
        }
        target += params.dstreams_stream_stride;
    }
}

DEVICE void store_run(const MhcHeadHopperBackwardParams& params, const Share& share, const Gradients& dfn, const RunSums& sums) {
    const int64_t cluster = blockIdx.x / CLUSTER;
    const float dz = sums.dz + __shfl_xor_sync(FULL_WARP, sums.dz, LANES);
    const float dz_mix = sums.dz_mix + __shfl_xor_sync(FULL_WARP, sums.dz_mix, LANES);
    if (cluster_rank() == 0 && warp_id() == 0 && lane_id() < LANES && lane_id() % STREAM_LANES == 0) {
        params.products[cluster * PRODUCTS + lane_id() / STREAM_LANES] = dz;
        params.products[cluster * PRODUCTS + STREAMS + lane_id() / STREAM_LANES] = dz_mix;
    }
    if (!share.exists) return;
    float* const to = params.dfn_partials + cluster * STREAMS * STREAMS * params.hidden_size + share.column + share.own;
    UNROLL
    for (int row = 0; row < STREAMS * STREAMS; ++row)
        store_vec16_global(to + static_cast<int64_t>(row) * params.hidden_size, pack<float>(dfn[row / STREAMS][row % STREAMS]));
}

template <int WARPS>
DEVICE void mhc_head_backward(const MhcHeadHopperBackwardParams& params) {
    auto& shared = *reinterpret_cast<Shared<WARPS>*>(dynamic_shared());
    const Share share(params);
    initialise_cluster(shared);
    Batches<Shared<WARPS>> batch(params, shared, share);
    const float scale = params.scale[0], base = params.base[lane_id() / STREAM_LANES % STREAMS];
    keep_weights(params, share, shared);
    Gradients dfn = {};
    RunSums sums = {};
    cluster_wait();
    Saved next = add_up(params, batch);
    for (; batch.exists(); batch.next(params)) {
        const Saved saved = next;
        next = add_up(params, batch.following());
        const Numbers numbers = numbers_of(params, batch, saved, scale, base, sums);
        if (batch.whole()) add_batch<true>(params, batch, numbers, dfn);
        else add_batch<false>(params, batch, numbers, dfn);
    }
    let_next_kernel_come();
    store_run(params, share, dfn, sums);
    // Stores to other blocks' shared memory may still be in flight: a block exits when they have
    // arrived.
    cluster_arrive_relaxed();
    cluster_wait();
}

SHARED_MEMORY(mhc_head_backward_hopper_1024, sizeof(Shared<1>))
SHARED_MEMORY(mhc_head_backward_hopper_4096, sizeof(Shared<4>))
SHARED_MEMORY(mhc_head_backward_hopper_7168, sizeof(Shared<7>))

KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_backward_hopper_1024, MhcHeadHopperBackwardParams, 1 * WARP_SIZE, 8, CLUSTER) {
    mhc_head_backward<1>(params);
}
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_backward_hopper_4096, MhcHeadHopperBackwardParams, 4 * WARP_SIZE, 3, CLUSTER) {
    mhc_head_backward<4>(params);
}
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_backward_hopper_7168, MhcHeadHopperBackwardParams, 7 * WARP_SIZE, 2, CLUSTER) {
    mhc_head_backward<7>(params);
}
