// The gradients of mhc_post_mix_pre.cu (training 11.1). X' is its out, dX' that tensor's other
// gradient, dh that of h; dpost and dcomb are those of the next site.
//
//     dpre[i] = sum over channels of X'[i] dh;  dz, dmix and parameters as in mhc_mix_backward.cu
//     dX'[i] total = bf16(dX'[i] + pre[i] dh + sum over q of fn[q,e] (rstd dmix[q])
//                         - v[e] rstd^2 / (STREAMS hidden_size) (sum over q of dmix[q] mix[q]))
//     dX, dy, dpost and dcomb of the previous site from the total as in mhc_post.cu
//
// dmix needs dpre of the whole token, dcomb of the previous site a sum of the total: separate
// kernels. mhc_post_mix_pre_dpre takes a block a token and stores four values. The coefficients,
// and the sums of dfn, dscale and dbase, are mhc_mix_backward.cu's kernels. mhc_post_mix_pre_total
// is its streams kernel with two more terms: fp32 sums of three gradients, rounded once, dX' + pre
// dh first. It is MMA (projection_backward_products.h) or, for unaligned rows, fp32
// (projection_backward.h). mhc_post's backward follows. The two more rows go from L2 to registers,
// 16 bytes a lane; they are prefetched into L2 a round ahead. Blocks of the same channels of four
// streams run next to each other (channel_block), so dh is in L2 for all.
//
// Floor for a token of d channels: 46 d bytes, 64 d with second reads: 3550 us for 32768 tokens of
// 7168 channels at 4.24 TB/s. dpre moves 10 d, the total 26 d, mhc_post's backward 28 d.
// Expected limit: memory. ncu has DRAM at 89 % in dpre, 67 % in the total. 72 to 78 % of a copy of
// what moves on one H200. The first site of a block has no previous post: X' and pre are its
// streams and pre, and the total is the gradient of the streams.
// Launch: dpre num_tokens blocks of any multiple of 32 threads; total as mhc_mix_backward_streams;
// `splits` divides the number of blocks.
// What was tried: kernels/docs/mhc_post_mix_pre.md.
#include "projection_backward_products.h"
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

// Which block of channels is a block's. Blocks of the same channels of the four streams run next
// to each other, so L2 has their rows of dh for all of them.
DEVICE uint32_t channel_block(const MhcPostMixPreTotalParams& params) {
    const uint32_t block = blockIdx.x / params.splits, each = gridDim.x / params.splits / STREAMS;
    return each * STREAMS * params.splits == gridDim.x ? block % STREAMS * each + block / STREAMS : block;
}

// The stream of a piece, where a stream has `pieces` of them; STREAMS after the last one. A
// division would be waited for before any load starts.
DEVICE int32_t stream_of(int32_t piece, int32_t pieces) {
    int32_t stream = 0;
    UNROLL
    for (int s = 1; s <= STREAMS; ++s) stream += piece >= s * pieces;
    return stream;
}

// The stream of a channel of the concatenated streams, and its offset in the stream.
struct OfStream {
    uint32_t stream, within;

    OfStream(const MhcPostMixPreTotalParams& params, uint32_t channel) {
        const uint32_t width = params.hidden_size;
        stream = stream_of(channel / PIECE, width / PIECE), within = channel - stream * width;
    }
};

// What backward_products adds to dv: the other gradient dX', and pre dh.
struct TotalOthers {
    struct Rows {
        Vec16 dout[2], dh[2];
        float pre[2];

        void add(int row, float (&dv)[PIECE]) const { add_rows(dout[row], dh[row], pre[row], dv); }
    };
    const bf16 *dout, *dh;  // of the lane's channels and its first token of the next 16
    const float* pre;

    TotalOthers(const MhcPostMixPreTotalParams& params, const ProductPart& part, uint32_t channel) {
        const int64_t token = part.begin + lane_id() / 4;
        const OfStream own(params, channel);
        dout = params.dout + token * params.dout_token_stride + own.stream * params.dout_destination_stride + own.within;
        dh = params.dh + token * params.dh_token_stride + own.within;
        pre = params.pre + token * STREAMS + own.stream;
    }

    // A lane prefetches a row: a warp has the rows of two tokens.
    static void prefetch(const MhcPostMixPreTotalParams& params, const ProductPart& part, int32_t round) {
        constexpr int ROWS = ROUND_TOKENS / PRODUCT_WARPS;
        const int32_t at = round * ROUND_TOKENS + warp_id() * ROWS + lane_id() % ROWS;
        if (lane_id() >= 2 * ROWS || at >= part.tokens) return;
        const OfStream own(params, part.first_channel);
        const int64_t token = part.begin + at;
        const bf16* const dout = params.dout + token * params.dout_token_stride + own.stream * params.dout_destination_stride;
        const bf16* const dh = params.dh + token * params.dh_token_stride;
        // Where a block also has channels of the next stream, those are loaded without a prefetch.
        const uint32_t count = minimum(params.hidden_size - own.within, static_cast<uint32_t>(PRODUCT_CHANNELS));
        prefetch_second_level((lane_id() < ROWS ? dout : dh) + own.within, count * sizeof(bf16));
    }

    Rows load(const MhcPostMixPreTotalParams& params, int32_t left) {
        Rows rows = {};
        UNROLL
        for (int row = 0; row < 2; ++row) {
            if (8 * row + lane_id() / 4 >= left) continue;
            rows.dout[row] = load_vec16_readonly(dout + 8 * row * params.dout_token_stride);
            rows.dh[row] = load_vec16_readonly(dh + 8 * row * params.dh_token_stride);
            rows.pre[row] = pre[8 * row * STREAMS];
        }
        dout += WARP_TOKENS * params.dout_token_stride;
        dh += WARP_TOKENS * params.dh_token_stride;
        pre += WARP_TOKENS * STREAMS;
        return rows;
    }

    static void add_rows(const Vec16& dout_row, const Vec16& dh_row, float pre, float (&dv)[PIECE]) {
        float other[PIECE], dh[PIECE];
        unpack<bf16>(dout_row, other);
        unpack<bf16>(dh_row, dh);
        UNROLL
        for (int e = 0; e < PIECE; ++e) dv[e] += other[e] + pre * dh[e];
    }

    static void add_plainly(const MhcPostMixPreTotalParams& params, int64_t token, uint32_t channel, float (&dv)[PIECE]) {
        const OfStream own(params, channel);
        const bf16* const dout = params.dout + token * params.dout_token_stride + own.stream * params.dout_destination_stride;
        const bf16* const dh = params.dh + token * params.dh_token_stride;
        const float pre = params.pre[token * STREAMS + own.stream];
        add_rows(load_vec16(dout + own.within), load_vec16(dh + own.within), pre, dv);
    }
};

// The same for one channel.
DEVICE void load_other(const MhcPostMixPreTotalParams& params, const Owned<COLUMNS, 1>& own, int64_t token, float (&other)[1]) {
    const bf16* const dout = params.dout + token * params.dout_token_stride + own.stream * params.dout_destination_stride;
    const float dh = to_float(params.dh[token * params.dh_token_stride + own.within]);
    other[0] = to_float(dout[own.within]) + params.pre[token * STREAMS + own.stream] * dh;
}

DEVICE void add_other(const MhcPostMixPreTotalParams&, const Owned<COLUMNS, 1>&, const Vec16*, const float (&other)[1],
                      float (&dv)[1]) {
    dv[0] += other[0];
}

SHARED_MEMORY(mhc_post_mix_pre_total_wide, sizeof(ProductShared<COLUMNS>))

KERNEL(mhc_post_mix_pre_total_wide, MhcPostMixPreTotalParams, PRODUCT_THREADS) {
    backward_products<COLUMNS, TotalOthers>(params);
}
KERNEL(mhc_post_mix_pre_total_scalar, MhcPostMixPreTotalParams, STREAMS_THREADS) {
    __shared__ Vec16 staged[STAGED_TOKENS][NUMBERS / 4];
    backward_narrow<COLUMNS, 1>(params, staged);
}
