// The forward of mhc_head.cu, which has the formulas, for sm_90a: by clusters that hold a token's channels in the shared memory of
// their blocks between the sums and the mix, so that streams are read once. streams_cluster.h says how tokens come and sums go.
//
// A thread keeps the weights of its four channels of the four streams in registers, 64 of them, for all tokens of its run. A
// token's five sums are added over the 16 elements that a thread has of it (bf16 squares that are added to a long fp32 sum meet ties
// that all round down), then over lanes, warps and blocks. Every warp makes the token's w of them; the first one of the first block
// saves mix and rstd for the backward.
//
// Floor for a bf16 token of d channels: 10 d bytes; 32768 tokens of 7168 channels 783 us at 3.0 TB/s, 4096 tokens 98 us. A block's
// part of a token there, 7 KB, has some 670 cycles of a multiprocessor (1.75 GHz, 32 clusters at once), of which issuing takes 390
// (900 instructions of each warp for four tokens, a third of them products) and shared memory 170. A batch of four takes a block
// some 2000 cycles where its bytes take 5400, so that the two blocks of a multiprocessor wait for memory and seldom for others.
// Weights come from the second-level cache once for a run, an eighth of the bytes of 64 tokens. One token waits for memory once and
// for the other blocks once: 1.1 us of an empty kernel, 0.9 for memory, 0.3 for 57 KB of weights a block, 0.7 for sums and mix.
// On one H100, as a share of a copy of the floor's bytes: 32768 tokens 799 us of 7168 channels and 462 of 4096 (98 and 97 %), 4096
// tokens 115 and 69 (85 and 82 %). ncu: DRAM at 88 % of its rate, 41 % of the cycles without a warp that could issue. When a batch was
// finished before the next one was added up, so that every block waited for the sums of the others, one H200 reached 71 and 74 %, 63 %
// of 4096 tokens. One token 3.0 us, where an empty kernel, the bytes and 1.5 us are 2.8. Limited by memory.
// On one H200, whose memory is 1.4 times as fast: 757 and 401 us (73 and 79 %), 108 and 63 (64 and 63 %). ncu there
// (reports/h200/ncu.txt), 4096 tokens of 7168 channels: DRAM at 54 %, 41 % of the cycles without a warp that could issue, an
// instruction of a warp every 5.5 cycles, 14 warps a multiprocessor: instructions, and what each waits for the one before it, limit it.
// More warps have no registers, since each keeps 64 weights; fewer instructions would be tensor cores' (below).
// 128 tokens take 8.3 us on one H200, where 5.0 were expected; by launches of a graph 8.7, and in runs of 4 and 16 tokens 8.8
// and 9.2. By the clock in the kernel, 16 clusters of two batches, cycles of some 1.98 GHz: a block's 57 KB of streams are
// there after 4,200, at memory's rate; the first batch is added up at 7,000 and the second at 8,800, the first is mixed at
// 9,900 and the second at 11,300. A batch is 900 instructions of each of seven warps, two of which share a scheduler: 1,800
// cycles, and the first waits some 900 more for the weights, which 16 clusters bring from the second-level cache, as many
// bytes again as the streams. Both batches come at once, so that arithmetic hides behind nothing: 3,600 cycles of issuing that
// only fewer instructions a channel could shorten, such as tensor cores with weights in three bf16 parts, which take some 400
// instructions to divide and would still leave 6.5 us.
//
// Launch: CLUSTER blocks for each run of tokens; the kernel's number is the most channels of a stream.
#include "sigmoid.h"
#include "streams_cluster.h"

constexpr int TOKENS = 4;  // of a batch
// Lane l of a warp has a sum of token l / 8: its product (l / 2) % 4 where l is even, its squares where it is odd.
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
PARAMS_LAYOUT(MhcHeadHopperParams, streams, streams_token_stride, streams_stream_stride, fn, scale, base, out,
              out_token_stride, mix, rstd, num_tokens, hidden_size, run, norm_eps, hc_eps)

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

// What a thread's channels of a token add to its sums.
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

// Of WHOLE batches nothing is asked token by token.
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

// The lane's w, of its token and stream.
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
    // What a block has told may still be on its way to others: it ends when they have it.
    cluster_arrive_relaxed();
    cluster_wait();
}

SHARED_MEMORY(mhc_head_hopper_1024, sizeof(Shared<1>))
SHARED_MEMORY(mhc_head_hopper_4096, sizeof(Shared<4>))
SHARED_MEMORY(mhc_head_hopper_7168, sizeof(Shared<7>))

KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_1024, MhcHeadHopperParams, 1 * WARP_SIZE, 8, CLUSTER) { mhc_head<1>(params); }
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_4096, MhcHeadHopperParams, 4 * WARP_SIZE, 4, CLUSTER) { mhc_head<4>(params); }
KERNEL_OF_RESIDENT_CLUSTERS(mhc_head_hopper_7168, MhcHeadHopperParams, 7 * WARP_SIZE, 2, CLUSTER) { mhc_head<7>(params); }
