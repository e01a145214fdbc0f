// The coefficients of the residual streams (inference 2.1 and 2.2). With v the STREAMS streams of a token one behind the other,
//
//     rstd = 1 / sqrt(mean(v^2) + norm_eps)          mix[q] = rstd (sum over e of fn[q,e] v[e])             q = 0 .. 23
//     z = mix scale + base                            scale[0] for q = 0..3, scale[1] for 4..7, scale[2] for 8..23
//     pre[i] = sigmoid(z[i]) + hc_eps     post[j] = 2 sigmoid(z[4 + j])     comb = Sinkhorn(z[8 + 4 i + j])    (sinkhorn.h)
//
// The projection multiplies bf16 streams by fp32 weights. TF32 would round the weights to 11 bits; here each is split into three bf16
// numbers that are it exactly (where they are normal: above 2^-110), so that all products of the tensor cores are exact. They add
// 64 channels at a time from zero, 12 steps that truncate, and fp32 adds these sums: left in the accumulator, thousands of steps
// would pull every sum towards zero by some 2^-12 of itself. The sum of squares rides on the same loads.
//
// A block takes 128 tokens, 16 a warp, and a part of the channels, 64 at a time. A lane reads 16 bytes of each of two tokens straight
// into its fragments of A: which 8 channels are its part of the sum is free as long as B's fragments agree. The block's threads read 24
// x 64 weights, split them, and leave them in shared memory for all warps, while the next ones are under way: one barrier for each
// 64 channels. The parts of all blocks of a token are added by mhc_mix_coefficients in their order; their number depends on
// num_tokens, so that few tokens keep all multiprocessors busy. There 16 lanes take a token, and a pass of the Sinkhorn iteration is
// two shuffles, a reciprocal and a product.
//
// Floors for a token of d channels: 8 d bytes, and 576 d FLOPs of three products, a quarter of the time of the bytes at 790 TFLOP/s;
// 8192 tokens of 7168 channels 111 us at 4.24 TB/s, of 4096 channels 63 us. Reads of the weights from the second-level cache
// add 0.4 of the streams' bytes, and reads of shared memory take some 65 % of its rate. Expected to be limited by memory at 75 to 85 %,
// with 64 bytes of each of 512 threads in flight. Not measured yet. mhc_mix_project_scalar takes layouts that 16 bytes do not fit, a
// warp a token, in plain fp32.
//
// Launch: mhc_mix_project token_tiles * splits blocks; mhc_mix_project_scalar a warp a token, splits 1; mhc_mix_coefficients
// ceil(num_tokens / (THREADS / 16)) blocks.
#include "mma.h"
#include "numeric.h"
#include "sinkhorn.h"

constexpr int COLUMNS = 24;                         // pre, post, comb
constexpr int PARTIAL_WIDTH = 32;                   // of a token: the products, the sum of squares, nothing
constexpr int THREADS = 256;
constexpr int WARP_TOKENS = 16;
constexpr int BLOCK_TOKENS = THREADS / WARP_SIZE * WARP_TOKENS;
constexpr int PIECE = 8;                            // channels of 16 bytes
constexpr int BLOCK_PIECES = 8;                     // of a row, in a step
constexpr int PARTS = 3;                            // bf16 numbers of a weight
constexpr int COEFFICIENT_THREADS = 128;

struct MhcMixProjectParams {
    const bf16* streams; int64_t streams_token_stride; int64_t streams_stream_stride;   // [num_tokens, STREAMS, hidden_size]
    const float* fn;                                                                    // [COLUMNS, STREAMS * hidden_size]
    float* partials;                                                                    // [splits, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;                                                                     // of the channels
};
PARAMS_LAYOUT(MhcMixProjectParams, streams, streams_token_stride, streams_stream_stride, fn, partials, num_tokens, hidden_size,
              splits)

struct MhcMixCoefficientsParams {
    const float* partials;
    const float* scale;   // [3]
    const float* base;    // [COLUMNS]
    float* pre;           // [num_tokens, STREAMS]
    float* post;          // [num_tokens, STREAMS]
    float* comb;          // [num_tokens, source, destination]
    float* mix;           // [num_tokens, COLUMNS]
    float* rstd;          // [num_tokens]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
    int32_t sinkhorn_iters;
    float norm_eps;
    float hc_eps;
};
PARAMS_LAYOUT(MhcMixCoefficientsParams, partials, scale, base, pre, post, comb, mix, rstd, num_tokens, hidden_size, splits,
              sinkhorn_iters, norm_eps, hc_eps)

// ---------------------------------------------------------------- projection

// The leading 8 bits of a number, as they stand in a bf16; a NaN stays one whatever bits it has.
DEVICE float leading_part(float x) {
    return __uint_as_float((__float_as_uint(x) & 0xffff0000u) | (is_nan(x) ? 0x00400000u : 0u));
}

// Two weights as PARTS words of two bf16 each, `low` in the low halves. What is not finite has no rest.
DEVICE void split_pair(float low, float high, uint32_t (&words)[PARTS]) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const float low_part = leading_part(low), high_part = leading_part(high);
        words[part] = __float_as_uint(low_part) >> 16 | __float_as_uint(high_part);
        low = is_finite(low) ? low - low_part : 0.0f;
        high = is_finite(high) ? high - high_part : 0.0f;
    }
}

// Eight weights of one column: where this thread has a part in them, and what it has read.
struct Weights {
    float values[PIECE];
};

// Where the 16 bytes of a column's piece lie: rows of 128 bytes, of which odd ones have their halves exchanged, so that the lanes
// of an access, four of each of two rows, meet in no bank.
DEVICE int swizzled(int column, int piece) { return piece ^ (column & 1) << 2; }

using WeightParts = Vec16[PARTS][COLUMNS][BLOCK_PIECES];

DEVICE void load_weights(const MhcMixProjectParams& params, int64_t step, Weights& weights) {
    const int column = threadIdx.x / BLOCK_PIECES;
    const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size;
    const int64_t channel = (step * BLOCK_PIECES + threadIdx.x % BLOCK_PIECES) * PIECE;
    for (int e = 0; e < PIECE; ++e) weights.values[e] = 0.0f;
    if (column < COLUMNS && channel < channels) load_elements<PIECE>(params.fn + column * channels + channel, weights.values);
}

DEVICE void store_weights(const Weights& weights, WeightParts& parts) {
    const int column = threadIdx.x / BLOCK_PIECES, piece = swizzled(column, threadIdx.x % BLOCK_PIECES);
    if (column >= COLUMNS) return;
    Vec16 vectors[PARTS];
    UNROLL
    for (int pair = 0; pair < PIECE / 2; ++pair) {
        uint32_t words[PARTS];
        split_pair(weights.values[2 * pair], weights.values[2 * pair + 1], words);
        UNROLL
        for (int part = 0; part < PARTS; ++part) vectors[part].w[pair] = words[part];
    }
    for (int part = 0; part < PARTS; ++part) parts[part][column][piece] = vectors[part];
}

// What a lane reads of its two tokens in a step: piece t of the first half and of the second.
struct Fragments {
    Vec16 of[2][2];   // half, token
};

// Where a lane reads: its piece of the row of streams, as stream and piece of that.
struct Cursor {
    int64_t first_token;
    int32_t stream, piece;
};

DEVICE void load_fragments(const MhcMixProjectParams& params, Cursor cursor, Fragments& fragments) {
    const int32_t pieces = params.hidden_size / PIECE;
    for (int half = 0; half < 2; ++half, cursor.piece += BLOCK_PIECES / 2) {
        for (; cursor.piece >= pieces; ++cursor.stream) cursor.piece -= pieces;
        for (int row = 0; row < 2; ++row) {
            const int64_t token = cursor.first_token + row * (WARP_TOKENS / 2);
            fragments.of[half][row] = Vec16{};
            if (token >= params.num_tokens || cursor.stream >= STREAMS) continue;
            const bf16* const x = params.streams + token * params.streams_token_stride;
            fragments.of[half][row] =
                load_vec16_streaming(x + cursor.stream * params.streams_stream_stride + cursor.piece * PIECE);
        }
    }
}

// The parts of 16 tokens' sums that one step gives, from zero.
struct Sums {
    float products[COLUMNS / 8][4];   // C fragments (mma.h)
    float squares[2];
};

DEVICE void add_step(const Fragments& fragments, const WeightParts& parts, Sums& sums) {
    const int column = lane_id() / 4;
    float products[COLUMNS / 8][4] = {};
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const Vec16 &low = fragments.of[half][0], &high = fragments.of[half][1];
        UNROLL
        for (int row = 0; row < 2; ++row) {
            float x[PIECE];
            unpack<bf16>(fragments.of[half][row], x);
            for (int e = 0; e < PIECE; ++e) sums.squares[row] += x[e] * x[e];
        }
        UNROLL
        for (int tile = 0; tile < COLUMNS / 8; ++tile) {
            UNROLL
            for (int part = 0; part < PARTS; ++part) {
                const Vec16 b = parts[part][8 * tile + column][swizzled(column, 4 * half + lane_id() % 4)];
                UNROLL
                for (int k = 0; k < 4; k += 2)
                    mma_bf16_16x8x16(products[tile], {low.w[k], high.w[k], low.w[k + 1], high.w[k + 1]}, b.w[k], b.w[k + 1]);
            }
        }
    }
    UNROLL
    for (int tile = 0; tile < COLUMNS / 8; ++tile) {
        UNROLL
        for (int c = 0; c < 4; ++c) sums.products[tile][c] += products[tile][c];
    }
}

DEVICE void store_sums(const MhcMixProjectParams& params, int64_t split, int64_t first_token, const Sums& sums) {
    UNROLL
    for (int row = 0; row < 2; ++row) {
        float squares = sums.squares[row];
        for (int distance = 1; distance < 4; distance *= 2) squares += __shfl_xor_sync(FULL_WARP, squares, distance);
        const int64_t token = first_token + row * (WARP_TOKENS / 2);
        if (token >= params.num_tokens) continue;
        float* const to = params.partials + (split * params.num_tokens + token) * PARTIAL_WIDTH;
        UNROLL
        for (int tile = 0; tile < COLUMNS / 8; ++tile)
            store_pair(to + 8 * tile + 2 * (lane_id() % 4), sums.products[tile][2 * row], sums.products[tile][2 * row + 1]);
        if (lane_id() % 4 == 0) to[COLUMNS] = squares;
    }
}

KERNEL(mhc_mix_project, MhcMixProjectParams, THREADS) {
    __shared__ WeightParts parts[2];
    const int64_t tile = blockIdx.x / params.splits, split = blockIdx.x % params.splits;
    const int64_t steps = ceil_div(static_cast<int64_t>(STREAMS) * params.hidden_size, int64_t{PIECE * BLOCK_PIECES});
    const int64_t begin = steps * split / params.splits, end = steps * (split + 1) / params.splits;
    const int64_t first_token = tile * BLOCK_TOKENS + warp_id() * WARP_TOKENS + lane_id() / 4;
    const bool has_tokens = tile * BLOCK_TOKENS + warp_id() * WARP_TOKENS < params.num_tokens;
    const int32_t pieces = params.hidden_size / PIECE;
    const int64_t piece = begin * BLOCK_PIECES + lane_id() % 4;
    Cursor cursor{first_token, static_cast<int32_t>(piece / pieces), static_cast<int32_t>(piece % pieces)};
    Sums sums = {};
    Weights weights;
    Fragments next;
    load_weights(params, begin, weights);
    load_fragments(params, cursor, next);
    for (int64_t step = begin; step < end; ++step) {
        WeightParts& own = parts[(step - begin) % 2];
        store_weights(weights, own);
        __syncthreads();
        const Fragments fragments = next;
        if (step + 1 < end) {
            for (cursor.piece += BLOCK_PIECES; cursor.piece >= pieces; ++cursor.stream) cursor.piece -= pieces;
            load_weights(params, step + 1, weights);
            load_fragments(params, cursor, next);
        }
        if (has_tokens) add_step(fragments, own, sums);
    }
    if (has_tokens) store_sums(params, split, first_token, sums);
}

KERNEL(mhc_mix_project_scalar, MhcMixProjectParams, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (THREADS / WARP_SIZE) + warp_id();
    if (token >= params.num_tokens) return;
    const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size;
    float products[COLUMNS] = {}, squares = 0.0f;
    for (int stream = 0; stream < STREAMS; ++stream) {
        const bf16* const x = params.streams + token * params.streams_token_stride + stream * params.streams_stream_stride;
        const float* const fn = params.fn + static_cast<int64_t>(stream) * params.hidden_size;
        for (int64_t channel = lane_id(); channel < params.hidden_size; channel += WARP_SIZE) {
            const float value = to_float(x[channel]);
            squares += value * value;
            UNROLL
            for (int q = 0; q < COLUMNS; ++q) products[q] += fn[q * channels + channel] * value;
        }
    }
    float* const to = params.partials + token * PARTIAL_WIDTH;
    UNROLL
    for (int q = 0; q < COLUMNS; ++q) {
        const float sum = warp_sum(products[q]);
        if (lane_id() == 0) to[q] = sum;
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) to[COLUMNS] = squares;
}

// ---------------------------------------------------------------- coefficients

// A token's number at `place` of the partial sums, all splits added in their order.
DEVICE float total(const MhcMixCoefficientsParams& params, int64_t token, int place) {
    float sum = 0.0f;
    for (int64_t split = 0; split < params.splits; ++split)
        sum += params.partials[(split * params.num_tokens + token) * PARTIAL_WIDTH + place];
    return sum;
}

KERNEL(mhc_mix_coefficients, MhcMixCoefficientsParams, COEFFICIENT_THREADS) {
    const int64_t token = (static_cast<int64_t>(blockIdx.x) * COEFFICIENT_THREADS + threadIdx.x) / MATRIX_LANES;
    const int lane = threadIdx.x % MATRIX_LANES;
    // The lanes of a token that is not there take part in the shuffles of their warp.
    const bool exists = token < params.num_tokens, has_gate = exists && lane < 2 * STREAMS;
    const float squares = exists ? total(params, token, COLUMNS) : 0.0f;
    const float rstd = rsqrt_approx(squares / (static_cast<float>(STREAMS) * params.hidden_size) + params.norm_eps);
    const float mix = exists ? rstd * total(params, token, 2 * STREAMS + lane) : 0.0f;
    const float m = row_softmax(mix * params.scale[2] + params.base[2 * STREAMS + lane]) + params.hc_eps;
    float comb = m;
    for (int pass = 1; pass <= sinkhorn_passes(params.sinkhorn_iters); ++pass)
        comb *= sinkhorn_factor(comb, pass, params.hc_eps);
    if (has_gate) {
        const float gate = rstd * total(params, token, lane);
        const float s = sigmoid(gate * params.scale[lane / STREAMS] + params.base[lane]);
        if (lane < STREAMS) params.pre[token * STREAMS + lane] = s + params.hc_eps;
        if (lane >= STREAMS) params.post[token * STREAMS + lane - STREAMS] = 2.0f * s;
        params.mix[token * COLUMNS + lane] = gate;
    }
    if (!exists) return;
    params.comb[token * MATRIX_LANES + lane] = comb;
    params.mix[token * COLUMNS + 2 * STREAMS + lane] = mix;
    if (lane == 0) params.rstd[token] = rstd;
}
