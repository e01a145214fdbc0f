// The forward of mhc_head.cu, which has the formulas, for sm_90a. A cluster keeps a token's
// channels in the shared memory of its blocks between the sums and the mix, so streams are read
// once. streams_cluster.h describes how tokens are loaded and sums are exchanged.
//
// A thread keeps the weights of its four channels of the four streams in 64 registers, for all
// tokens of its run. A token's five sums are added over a thread's 16 elements first, then over
// lanes, warps and blocks. (bf16 squares added one by one to a long fp32 sum would hit ties that
// all round down.) Every warp computes the token's w. The first warp of the first block saves mix
// and rstd.
//
// Floor for a bf16 token of d channels: 10 d bytes; at 3.0 TB/s 783 us for 32768 tokens of 7168
// channels, 98 us for 4096. A block's part of a token there, 7 KB, has about 670 cycles of an SM
// (1.75 GHz, 32 clusters at once). Issue takes 390 of them (900 instructions of each warp for four
// tokens, a third of them multiplications), shared memory 170. A batch of four takes a block about
// 2000 cycles, its bytes 5400. Weights come from L2 once a run: an eighth of the bytes of 64
// tokens. One token waits once for memory and once for the other blocks.
// Limit on H100: memory, 97 to 98 % of a copy for 32768 tokens. On H200, whose memory is 1.4 times
// as fast: instructions and their latency, 73 to 79 %. More warps do not fit, since each thread
// keeps 64 weights.
//
// Launch: CLUSTER blocks for each run of tokens; the number in the kernel's name is the maximum of
// channels of a stream.
// What was tried: kernels/docs/mhc_head.md.
#include "sigmoid.h"
#include "streams_cluster.h"

constexpr int TOKENS = 4;  // of a batch
// Lane l of a warp has a sum of token l / 8: dot product (l / 2) % 4 if l is even, the squares if
// l is odd.
constexpr int LANES = WARP_SIZE / TOKENS;
template <int WARPS>
using Shared = ClusterShared<WARPS, TOKENS, STREAMS, WARP_SIZE>;

struct MhcHeadHopperParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* fn;  // [STREAMS, STREAMS * hidden_size]
    const float* scale;  // [1]
    const float* base;  // [STREAMS]
    bf16* out; int64_t out_token_stride;  // [num_tokens, hidden_size]
    float* mix;  // [num_tokens, STREAMS]
    float* rstd;  // [num_tokens]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t run;  // tokens of a cluster
    float norm_eps;
    float hc_eps;
};

DEVICE const bf16* source_of(const MhcHeadHopperParams& params, int64_t token, int row) {
    return params.streams + token * params.streams_token_stride + row * params.streams_stream_stride;
}

using Weights = float[STREAMS][STREAMS][OWN];  // column, stream

DEVICE void load_weights(const MhcHeadHopperParams& params, const Share& share, Weights& fn) {
    if (!share.exists) return;
    UNROLL
    for (int row = 0; row < STREAMS * STREAMS; ++row)
        unpack<float>(load_vec16_readonly(params.fn + static_cast<int64_t>(row) * params.hidden_size + share.column + share.own),
                      fn[row / STREAMS][row % STREAMS]);
}

// Adds a thread's channels of a token to its sums.
template <typename Batch>
DEVICE void add_token(const Batch& batch, int token, const Weights& fn, float* products, float& squares) {
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        float x[OWN];
        load_elements<OWN>(batch.row(token, i), x);
        UNROLL
        for (int e = 0; e < OWN; ++e) {
            squares += x[e] * x[e];
            UNROLL
            for (int q = 0; q < STREAMS; ++q) products[q] += fn[q][i][e] * x[e];
        }
    }
}

// A WHOLE batch needs no check of each token.
template <bool WHOLE, typename Batch>
DEVICE void leave_sums(const Batch& batch, const Weights& fn) {
    float products[TOKENS * STREAMS] = {}, squares[TOKENS] = {};
    UNROLL
    for (int t = 0; t < TOKENS; ++t)
        if (WHOLE || batch.has(t)) add_token(batch, t, fn, products + t * STREAMS, squares[t]);
    const float product = lane_sums<WARP_SIZE / 2>(products), square = lane_sums<WARP_SIZE / 2>(squares);
    batch.own_sums()[lane_id()] = lane_id() % 2 == 0 ? product : square;
}

template <typename Batch>
DEVICE void add_up(const Batch& batch, const Weights& fn) {
    if (!batch.exists()) return;
    batch.wait();
    if (batch.whole()) leave_sums<true>(batch, fn);
    else leave_sums<false>(batch, fn);
    batch.tell();
}

// w of the lane's token and stream.
template <typename Batch>
DEVICE float weight_of(const MhcHeadHopperParams& params, const Batch& batch, float scale, float base) {
    const float sum = batch.sum(lane_id());
    const float squares = __shfl_sync(FULL_WARP, sum, lane_id() | 1), product = __shfl_sync(FULL_WARP, sum, lane_id() & ~1);
    const float rstd = streams_rstd(params, squares), mix = rstd * product;
    if (cluster_rank() == 0 && warp_id() == 0 && lane_id() / LANES < batch.left) {
        const int64_t token = batch.first + lane_id() / LANES;
        if (lane_id() % 2 == 0) params.mix[token * STREAMS + lane_id() / 2 % STREAMS] = mix;
        if (lane_id() % LANES == 0) params.rstd[token] = rstd;
    }
    return sigmoid(mix * scale + base) + params.hc_eps;
}

template <bool WHOLE, typename Batch>
DEVICE void mix_batch(const MhcHeadHopperParams& params, const Batch& batch, float weight) {
    bf16* target = params.out + batch.first * params.out_token_stride + batch.share.column + batch.share.own;
    UNROLL
    for (int t = 0; t < TOKENS; ++t) {
        float x[STREAMS][OWN], w[STREAMS], out[OWN];
        UNROLL
        for (int i = 0; i < STREAMS; ++i) w[i] = __shfl_sync(FULL_WARP, weight, t * LANES + 2 * i);
        if (WHOLE || batch.has(t)) {
            UNROLL
            for (int i = 0; i < STREAMS; ++i) load_elements<OWN>(batch.row(t, i), x[i]);
            mix_streams(x, w, out);
            store_elements(target, out);
        }
        target += params.out_token_stride;
    }
}

template <int WARPS>
DEVICE void mhc_head(const MhcHeadHopperParams& params) {
    auto& shared = *reinterpret_cast<Shared<WARPS>*>(dynamic_shared());
    const Share share(params);
    initialise_cluster(shared);
    Batches<Shared<WARPS>> batch(params, shared, share);
    const float scale = params.scale[0], base = params.base[lane_id() / 2 % STREAMS];
    Weights fn = {};
    load_weights(params, share, fn);
    cluster_wait();
    add_up(batch, fn);
    for (; batch.exists(); batch.next(params)) {
        add_up(batch.following(), fn);
        const float weight = weight_of(params, batch, scale, base);
        if (batch.whole()) mix_batch<true>(params, batch, weight);
        else mix_batch<false>(params, batch, weight);
    }
    // Stores to other blocks' shared memory may still be in flight: a block exits when they have
    // arrived.
    cluster_arrive_relaxed();
    cluster_wait();
}

SHARED_MEMORY(mhc_head_hopper_1024, sizeof(Shared<1>))
SHARED_MEMORY(mhc_head_hopper_4096, sizeof(Shared<4>))
SHARED_MEMORY(mhc_head_hopper_7168, sizeof(Shared<7>))

KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_1024, MhcHeadHopperParams, 1 * WARP_SIZE, 8, CLUSTER) { mhc_head<1>(params); }
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_4096, MhcHeadHopperParams, 4 * WARP_SIZE, 4, CLUSTER) { mhc_head<4>(params); }
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_7168, MhcHeadHopperParams, 7 * WARP_SIZE, 2, CLUSTER) { mhc_head<7>(params); }
