// The coefficients of the residual streams (inference 2.1 and 2.2). With v the STREAMS streams of a token one behind
// the other,
//
//     rstd = 1 / sqrt(mean(v^2) + norm_eps)          mix[q] = rstd (sum over e of fn[q,e] v[e])             q = 0 .. 23
//     z = mix scale + base                            scale[0] for q = 0..3, scale[1] for 4..7, scale[2] for 8..23
//     pre[i] = sigmoid(z[i]) + hc_eps    post[j] = 2 sigmoid(z[4 + j])    comb = Sinkhorn(z[8 + 4 i + j]) (sinkhorn.h)
//
// The projection multiplies bf16 streams by fp32 weights. TF32 would round the weights to 11 bits; here 2^16 times each
// (which overflows beyond 2^111) is split into three bf16 numbers that are it exactly, subnormal ones as well, so that
// all products of the tensor cores are exact. They add 64 channels at a time from zero, 12 steps that truncate, and fp32
// adds these sums: left in the accumulator, thousands of steps would pull every sum towards zero by some 2^-12 of
// itself. The sum of squares rides on the same loads.
//
// A block takes 128 tokens, 16 a warp, and a part of the channels, the same of every stream, 64 of one at a time. They come to
// shared memory by cp.async, four steps of 64 in a ring, and 24 x 64 weights with each. A lane reads 16 bytes of each of two
// tokens from there into its fragments of A: which 8 channels are its part of the sum is free as long as B's fragments agree. The
// block's threads split the weights and leave them in shared memory for all warps: one barrier for each 64 channels. The parts of
// all blocks of a token are added by mhc_mix_coefficients in their order; their number depends on num_tokens, so that few tokens
// keep all multiprocessors busy. Where each has one step of each stream, mhc_mix_project_at_once takes it, without a ring
// (projection.h). In mhc_mix_coefficients four lanes take a token, a row of comb each (sinkhorn.h), in some 230 instructions of a
// warp for each token; 16 lanes with an element each took 550, which filled the issue slots.
//
// The projection is in projection.h, which mhc_head shares, the coefficients are in coefficients.h, which
// mhc_post_mix_pre shares.
//
// Floors for a token of d channels: 8 d bytes, and 576 d FLOPs of three products, a quarter of the time of the bytes at
// 790 TFLOP/s; 8192 tokens of 7168 channels 111 us at 4.24 TB/s, of 4096 channels 63 us. Reads of the weights from the
// second-level cache add 0.4 of the streams' bytes, and reads of shared memory take some 65 % of its rate.
// Measured on one H200: 8192 tokens of 7168 channels 207 us with the coefficients, 54 % of the floor's rate; 847 us for
// 32768. ncu: the tensor pipes are busiest, then the issue slots, which six products of m16n8k16 for 16 x 8 channels
// and the splitting of weights in every block fill. mhc_mix_hopper.cu has wgmma instead, of one instruction for 64 x 72
// x 16, and is the faster one from some 256 tokens on; this one is for other hardware and for fewer tokens.
// One token of 7168 channels took 12.8 us, 128 tokens 15.1 us, when weights came from memory a step ahead and a lane of
// mhc_mix_coefficients added up a hundred parts of its two columns, 16 at a time, some 4 us. Of so few tokens
// mhc_mix_coefficients_few adds them up by eight warps: 10.5 and 13.4 us; with launches that overlap 9.4 and 12.1, of which the 39
// passes of the Sinkhorn iteration, each a sum, a reciprocal and a product that wait for one another, are some 1.5 by count. On
// one H100 9.5 and 13.0. What is waited for is counted in trips to memory. A block's fourth step came to memory's notice behind
// the first, and its weights a step ahead: now all of four steps is asked for at once, and up to four tokens have
// mhc_mix_project_few, and some 256 mhc_mix_project_at_once, without steps. scale and base were a trip behind the sums, now beside
// them. A lane has a whole matrix, so that no pass waits for shuffles, and reciprocals need no scaling. The coefficients' blocks
// take their places while the projection runs. On one H100 one token takes 5.3 us, of which some 1.4 are the passes by count, and
// 128 tokens 10.7 where 9 were expected. On one H200 4.9 and 10.7, and 128 tokens 10.1 with mhc_mix_project_at_once. What an empty
// kernel, the bytes and 1.5 us would be, 3.1 and 4.9 there, is out of reach of two launches, two trips to memory and passes that
// wait for one another (mhc_post_mix_pre.cu says what the same two cost it). mhc_mix_project_scalar takes layouts that 16 bytes do
// not fit, a warp a token, in plain fp32.
//
// Launch: mhc_mix_project and mhc_mix_project_at_once token_tiles * splits blocks; mhc_mix_project_few as many as there are parts
// of FEW_PIECES pieces; mhc_mix_project_scalar a warp a token, splits 1; mhc_mix_coefficients ceil(num_tokens /
// (COEFFICIENT_THREADS / 4)) blocks, or mhc_mix_coefficients_few num_tokens.
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
PARAMS_LAYOUT(MhcMixCoefficientsParams, partials, scale, base, pre, post, comb, mix, rstd, num_tokens, hidden_size,
              splits, sinkhorn_iters, norm_eps, hc_eps)

SHARED_MEMORY(mhc_mix_project, sizeof(ProjectionShared<COLUMNS>))

KERNEL(mhc_mix_project, ProjectionParams, PROJECTION_THREADS) { project<COLUMNS>(params); }
SHARED_MEMORY(mhc_mix_project_at_once, sizeof(AtOnceShared<COLUMNS>))
KERNEL(mhc_mix_project_at_once, ProjectionParams, AT_ONCE_THREADS) {
    project_at_once<COLUMNS>(params, *reinterpret_cast<AtOnceShared<COLUMNS>*>(dynamic_shared()), StreamsOfMemory{params});
}
KERNEL(mhc_mix_project_few, ProjectionParams, FEW_PROJECTION_THREADS<COLUMNS>) { project_few<COLUMNS>(params); }
KERNEL(mhc_mix_project_scalar, ProjectionParams, PROJECTION_THREADS) { project_scalar<COLUMNS>(params); }

// What lane i of a token's four makes its coefficients of.
struct SourceSums {
    float comb[STREAMS], pre, post, squares;
};

// Parts of the channels added in their order, AT_ONCE of them waited for at once.
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
    // The lanes of a token that is not there take part in the shuffles of their warp.
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

// Few tokens, whose channels are in many parts: a block each. scale and base are asked for with the parts, and each lane of the
// first warp makes all of comb.
KERNEL(mhc_mix_coefficients_few, MhcMixCoefficientsParams, FEW_THREADS) {
    __shared__ SumsOfWarps sums;
    const LogitOf logit(params, lane_id());
    const int64_t token = blockIdx.x;
    sums[warp_id()][lane_id()] = PartsOfWarp(params, token).sum();
    __syncthreads();
    if (warp_id() != 0) return;
    store_comb_of_one(params, token, store_gates_of_one(params, token, sums, logit));
}
