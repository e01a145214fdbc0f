// The streams behind a sublayer, the coefficients of the next site and what its sublayer reads, of one reading of the
// streams in front (inference 2.1 to 2.4): mhc_post, mhc_mix and mhc_pre in two kernels. With X the STREAMS streams of
// a token, y the sublayer's output, post and comb the coefficients of its site,
//
//     out[j] = bf16(post[j] y + sum over i of comb[i,j] X[i])                                         mhc_post.cu
//     pre, post, comb, mix and rstd of the next site from v = out[0], out[1], ..., one behind the other    mhc_mix.cu
//     h = sum over i of pre[i] out[i], pre of the next site                                            mhc_pre.cu
//
// The next coefficients stand behind sums over all channels of a token, so that h needs out a second time. A block that
// kept a token's streams, 56 KiB at 7168 channels, would read the weights for a few tokens only, more bytes than the
// streams have; so there are two kernels, and what the second reads was just written.
//
// mhc_post_mix_pre_project is the projection of mhc_mix with sources in the place of streams: a block takes 128 tokens,
// 16 a warp, and a part of the channels, 32 at a time. A lane reads 16 bytes of y and of each stream of two tokens (160
// bytes, the next ones under way while it computes), makes the same 8 channels of all destinations, and multiplies the
// numbers that it stores from its registers: they are its fragments of A. Weights come in two halves of two
// destinations each, 64 products from zero as in mhc_mix. A token's 20 coefficients lie in shared memory, in rows of 80
// bytes, which eight rows read without a conflict. The first kernel's sums are in another order than mhc_mix's (all
// destinations of 32 channels, then the next ones), so that the coefficients differ from its by roundings of fp32; out
// does not differ from mhc_post's by a bit. The scalar kernel, a warp a token, stores the destinations and then goes
// over them as mhc_mix's does: all that it leaves has the same bits.
//
// mhc_post_mix_pre_mix takes a block a token. Its threads ask for HELD of their 8 pieces of out, add up their part of what the
// blocks of the first left, and wait for the four numbers of pre, which one warp makes first; comb, 2 sinkhorn_iters -
// 1 dependent passes, is that warp's alone while the others mix.
//
// `out` may be `streams`: a block reads and writes the same channels of the same tokens.
//
// Floors for a token of d channels: 20 d bytes where the second reading comes from the second-level cache (up to some
// 400 tokens of 7168 channels), 28 d bytes where it does not; the separate kernels move 36 d. 32768 tokens of 7168
// channels: 1551 us at 4.24 TB/s beside 1994; 576 d FLOPs of tensor cores and 40 d of fp32 are a quarter of that time.
// (In parts of so many tokens that the cache holds them, each of two launches of its own, 8 d bytes would come from the
// cache: 440 us less of memory, some 340 us of cache, and two half-filled machines for each of 74 parts.) Expected to
// be limited by memory in both kernels.
// Measured on one H200: 32768 tokens of 7168 channels 2585 us, 4096 tokens 346.8, 128 tokens 28.3, where the separate
// kernels take 2063 (2145 in the call of the others), 276.7 and 22.1: the first kernel's 186 registers leave a
// multiprocessor one block, which does not keep enough bytes under way. The launcher takes the separate ones of more than
// 1024 tokens; they were the faster ones of 128 tokens, too.
//
// Launch: project token_tiles * splits blocks, project_scalar a warp a token, splits 1; mix num_tokens blocks of whole
// warps, of which the last one makes coefficients.
#include "coefficients.h"

constexpr int MIX_THREADS = 256 + WARP_SIZE;
constexpr int MIX_WARPS = MIX_THREADS / WARP_SIZE;
constexpr int HELD = 4;  // pieces of each destination that a thread has under way
constexpr int STEP_PIECES = BLOCK_PIECES / 2;  // of each stream, in a step
constexpr int OF_TOKEN = STREAMS * STREAMS + STREAMS;  // comb by sources, post

struct MhcPostMixPreProjectParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_source_stride;
    const bf16* y; int64_t y_token_stride;  // [num_tokens, hidden_size]
    const float* post;  // [num_tokens, STREAMS]
    const float* comb;  // [num_tokens, source, destination]
    const float* fn;  // [COLUMNS, STREAMS * hidden_size], of the next site
    bf16* out; int64_t out_token_stride; int64_t out_destination_stride;  // as streams, which it may be
    float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the channels
};
PARAMS_LAYOUT(MhcPostMixPreProjectParams, streams, streams_token_stride, streams_source_stride, y, y_token_stride, post,
              comb, fn, out, out_token_stride, out_destination_stride, partials, num_tokens, hidden_size, splits)

struct MhcPostMixPreMixParams {
    const bf16* out; int64_t out_token_stride; int64_t out_destination_stride;
    const float* partials;
    const float* scale;  // [3]
    const float* base;  // [COLUMNS]
    float* pre;  // [num_tokens, STREAMS]; this and what follows of the next site
    float* post;  // [num_tokens, STREAMS]
    float* comb;  // [num_tokens, source, destination]
    float* mix;  // [num_tokens, COLUMNS]
    float* rstd;  // [num_tokens]
    bf16* h; int64_t h_token_stride;  // [num_tokens, hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;
    int32_t sinkhorn_iters;
    float norm_eps;
    float hc_eps;
};
PARAMS_LAYOUT(MhcPostMixPreMixParams, out, out_token_stride, out_destination_stride, partials, scale, base, pre, post,
              comb, mix, rstd, h, h_token_stride, num_tokens, hidden_size, splits, sinkhorn_iters, norm_eps, hc_eps)

// ---------------------------------------------------------------- destinations and their projection

// What a lane reads of its two tokens in a step: one piece of each source, and of y.
struct Sources {
    Vec16 x[2][STREAMS], y[2];
};

// Where a lane is: its tokens, and its piece of a row.
struct Place {
    int64_t first_token;
    int32_t piece;
};

DEVICE bool is_there(const MhcPostMixPreProjectParams& params, const Place& place, int row) {
    const int64_t token = place.first_token + row * (WARP_TOKENS / 2);
    return token < params.num_tokens && place.piece < params.hidden_size / PIECE;
}

DEVICE void load_sources(const MhcPostMixPreProjectParams& params, const Place& place, Sources& sources) {
    const int64_t column = static_cast<int64_t>(place.piece) * PIECE;
    UNROLL
    for (int row = 0; row < 2; ++row) {
        const int64_t token = place.first_token + row * (WARP_TOKENS / 2);
        const bool there = is_there(params, place, row);
        const bf16* const x = params.streams + token * params.streams_token_stride + column;
        sources.y[row] = there ? load_vec16(params.y + token * params.y_token_stride + column) : Vec16{};
        UNROLL
        for (int i = 0; i < STREAMS; ++i)
            sources.x[row][i] = there ? load_vec16(x + i * params.streams_source_stride) : Vec16{};
    }
}

// The coefficients of the block's tokens, zeros of tokens that are not there.
DEVICE void stage_coefficients(const MhcPostMixPreProjectParams& params, int64_t first_token,
                               float (&of_tokens)[BLOCK_TOKENS][OF_TOKEN]) {
    for (int at = threadIdx.x; at < BLOCK_TOKENS * OF_TOKEN; at += PROJECTION_THREADS) {
        const int64_t token = first_token + at / OF_TOKEN;
        const int number = at % OF_TOKEN, of_post = number - STREAMS * STREAMS;
        float coefficient = 0.0f;
        if (token < params.num_tokens)
            coefficient = of_post < 0 ? params.comb[token * STREAMS * STREAMS + number]
                                      : params.post[token * STREAMS + of_post];
        of_tokens[at / OF_TOKEN][number] = coefficient;
    }
}

// Stores destinations `first` and the next one, and leaves them as fragments: those of `first` in half 0.
DEVICE void make_destinations(const MhcPostMixPreProjectParams& params, const Place& place, const Sources& sources,
                              const float (*of_tokens)[OF_TOKEN], int first, Fragments& fragments) {
    UNROLL
    for (int row = 0; row < 2; ++row) {
        const int64_t token = place.first_token + row * (WARP_TOKENS / 2);
        const float* const comb = of_tokens[row * (WARP_TOKENS / 2)];
        bf16* const to = params.out + token * params.out_token_stride + static_cast<int64_t>(place.piece) * PIECE;
        float x[STREAMS][PIECE], y[PIECE], out[PIECE];
        unpack<bf16>(sources.y[row], y);
        UNROLL
        for (int i = 0; i < STREAMS; ++i) unpack<bf16>(sources.x[row][i], x[i]);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            mix_destination(x, y, comb + STREAMS * STREAMS, comb, first + half, out);
            // Zeros where nothing is: 0 times an infinite coefficient would be NaN.
            fragments.of[half][row] = Vec16{};
            if (!is_there(params, place, row)) continue;
            fragments.of[half][row] = pack<bf16>(out);
            store_vec16_global(to + (first + half) * params.out_destination_stride, fragments.of[half][row]);
        }
    }
}

// The weights of this thread's channels of destinations `first` and the next one.
DEVICE void load_step_weights(const MhcPostMixPreProjectParams& params, int64_t step, int first, Weights& weights) {
    const int64_t width = params.hidden_size;
    const int64_t within = (step * STEP_PIECES + threadIdx.x % STEP_PIECES) * PIECE;
    const int64_t destination = first + threadIdx.x % BLOCK_PIECES / STEP_PIECES;
    const int64_t channel = within < width ? destination * width + within : STREAMS * width;
    load_weights_from<COLUMNS>(params.fn, STREAMS * width, channel, weights);
}

KERNEL(mhc_post_mix_pre_project, MhcPostMixPreProjectParams, PROJECTION_THREADS) {
    __shared__ WeightParts<COLUMNS> parts[2];
    __shared__ float of_tokens[BLOCK_TOKENS][OF_TOKEN];
    const int64_t tile = blockIdx.x / params.splits, split = blockIdx.x % params.splits;
    const int64_t steps = ceil_div(params.hidden_size, PIECE * STEP_PIECES);
    const int64_t begin = steps * split / params.splits, end = steps * (split + 1) / params.splits;
    const int local = warp_id() * WARP_TOKENS + lane_id() / 4;
    const bool has_tokens = tile * BLOCK_TOKENS + warp_id() * WARP_TOKENS < params.num_tokens;
    Place place{tile * BLOCK_TOKENS + local, static_cast<int32_t>(begin) * STEP_PIECES + lane_id() % 4};
    Sums<COLUMNS> sums = {};
    Weights weights;
    Sources next;
    load_step_weights(params, begin, 0, weights);
    load_sources(params, place, next);
    stage_coefficients(params, tile * BLOCK_TOKENS, of_tokens);
    for (int64_t step = begin; step < end; ++step) {
        const Sources sources = next;
        const Place own = place;
        place.piece += STEP_PIECES;
        if (step + 1 < end) load_sources(params, place, next);
        UNROLL
        for (int pair = 0; pair < STREAMS / 2; ++pair) {
            store_weights<COLUMNS>(weights, parts[pair]);
            __syncthreads();
            if (pair == 0) load_step_weights(params, step, 2, weights);
            if (pair == 1 && step + 1 < end) load_step_weights(params, step + 1, 0, weights);
            if (!has_tokens) continue;
            Fragments fragments;
            make_destinations(params, own, sources, of_tokens + local, 2 * pair, fragments);
            add_step<COLUMNS>(fragments, parts[pair], sums);
        }
    }
    if (has_tokens) store_sums<COLUMNS>(params, split, place.first_token, sums);
}

// Any width, stride and alignment: a warp a token, of which a lane projects what it stored itself.
KERNEL(mhc_post_mix_pre_project_scalar, MhcPostMixPreProjectParams, PROJECTION_THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (PROJECTION_THREADS / WARP_SIZE) + warp_id();
    if (token >= params.num_tokens) return;
    float x[STREAMS][1], y[1], out[1], post[STREAMS], comb[STREAMS * STREAMS];
    load_coefficients(params.post + token * STREAMS, post);
    load_coefficients(params.comb + token * STREAMS * STREAMS, comb);
    for (int64_t column = lane_id(); column < params.hidden_size; column += WARP_SIZE) {
        load_streams(params.streams + token * params.streams_token_stride + column, params.streams_source_stride, x);
        load_elements<1>(params.y + token * params.y_token_stride + column, y);
        bf16* const to = params.out + token * params.out_token_stride + column;
        UNROLL
        for (int j = 0; j < STREAMS; ++j) {
            mix_destination(x, y, post, comb, j, out);
            store_elements(to + j * params.out_destination_stride, out);
        }
    }
    const ProjectionParams own{params.out, params.out_token_stride, params.out_destination_stride, params.fn,
                               params.partials, params.num_tokens, params.hidden_size, 1};
    project_scalar<COLUMNS>(own);
}

// ---------------------------------------------------------------- coefficients of the next site, and h

// Of a token's numbers in front of the coefficients what the warps of a block add up of them, a lane each.
DEVICE void add_partials(const MhcPostMixPreMixParams& params, int64_t token, float (&sums)[MIX_WARPS][WARP_SIZE]) {
    const int warps = blockDim.x / WARP_SIZE, warp = warp_id();
    const int begin = params.splits * warp / warps, end = params.splits * (warp + 1) / warps;
    float sum = 0.0f;
    for (int split = begin; split < end && lane_id() <= COLUMNS; ++split)
        sum += params.partials[(split * params.num_tokens + token) * PARTIAL_WIDTH<COLUMNS> + lane_id()];
    sums[warp][lane_id()] = sum;
}

// A lane's column behind the division, in the warp that makes coefficients; leaves pre for all others.
DEVICE float make_gates(const MhcPostMixPreMixParams& params, int64_t token, const float (&sums)[MIX_WARPS][WARP_SIZE],
                        float (&pre)[STREAMS]) {
    float sum = 0.0f;
    for (uint32_t warp = 0; warp < blockDim.x / WARP_SIZE; ++warp) sum += sums[warp][lane_id()];
    const float rstd = streams_rstd(params, __shfl_sync(FULL_WARP, sum, COLUMNS)), mix = rstd * sum;
    if (lane_id() < 2 * STREAMS) {
        const float gate = store_gate(params, token, lane_id(), mix);
        if (lane_id() < STREAMS) pre[lane_id()] = gate;
    }
    if (lane_id() == 0) params.rstd[token] = rstd;
    return mix;
}

// Both halves of the warp make comb, and one stores it.
DEVICE void make_comb(const MhcPostMixPreMixParams& params, int64_t token, float mix) {
    const int lane = lane_id() % MATRIX_LANES;
    const float own = __shfl_sync(FULL_WARP, mix, 2 * STREAMS + lane);
    store_comb(params, token, lane, lane_id() < MATRIX_LANES, own);
}

DEVICE bool makes_coefficients() { return threadIdx.x >= blockDim.x - WARP_SIZE; }

// The coefficients of a block's token; returns once pre is there, in the warp that makes them once they are stored.
DEVICE void make_coefficients(const MhcPostMixPreMixParams& params, int64_t token, float (&sums)[MIX_WARPS][WARP_SIZE],
                              float (&pre)[STREAMS]) {
    add_partials(params, token, sums);
    __syncthreads();
    float mix = 0.0f;
    if (makes_coefficients()) mix = make_gates(params, token, sums, pre);
    __syncthreads();
    if (makes_coefficients()) make_comb(params, token, mix);
}

// HELD pieces of each destination from a thread's piece `first` on, a block's mixing threads apart.
DEVICE void load_pieces(const MhcPostMixPreMixParams& params, int64_t token, int64_t first, int64_t apart,
                        Vec16 (&held)[HELD][STREAMS]) {
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int64_t column = (first + v * apart) * PIECE;
        if (column >= params.hidden_size) break;
        const bf16* const out = params.out + token * params.out_token_stride + column;
        UNROLL
        for (int i = 0; i < STREAMS; ++i) held[v][i] = load_vec16(out + i * params.out_destination_stride);
    }
}

DEVICE void store_mixed(const MhcPostMixPreMixParams& params, int64_t token, int64_t first, int64_t apart,
                        const float (&pre)[STREAMS], const Vec16 (&held)[HELD][STREAMS]) {
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int64_t column = (first + v * apart) * PIECE;
        if (column >= params.hidden_size) break;
        float x[STREAMS][PIECE], h[PIECE];
        UNROLL
        for (int i = 0; i < STREAMS; ++i) unpack<bf16>(held[v][i], x[i]);
        mix_streams(x, pre, h);
        store_elements(params.h + token * params.h_token_stride + column, h);
    }
}

KERNEL(mhc_post_mix_pre_mix, MhcPostMixPreMixParams, MIX_THREADS) {
    __shared__ float sums[MIX_WARPS][WARP_SIZE], pre[STREAMS];
    const int64_t token = blockIdx.x, apart = blockDim.x - WARP_SIZE;
    Vec16 held[HELD][STREAMS];
    if (!makes_coefficients()) load_pieces(params, token, threadIdx.x, apart, held);
    make_coefficients(params, token, sums, pre);
    if (makes_coefficients()) return;
    for (int64_t first = threadIdx.x; first * PIECE < params.hidden_size; first += HELD * apart) {
        if (first != threadIdx.x) load_pieces(params, token, first, apart, held);
        store_mixed(params, token, first, apart, pre, held);
    }
}

KERNEL(mhc_post_mix_pre_mix_scalar, MhcPostMixPreMixParams, MIX_THREADS) {
    __shared__ float sums[MIX_WARPS][WARP_SIZE], pre[STREAMS];
    const int64_t token = blockIdx.x, apart = blockDim.x - WARP_SIZE;
    make_coefficients(params, token, sums, pre);
    if (makes_coefficients()) return;
    for (int64_t column = threadIdx.x; column < params.hidden_size; column += apart) {
        float x[STREAMS][1], h[1];
        load_streams(params.out + token * params.out_token_stride + column, params.out_destination_stride, x);
        mix_streams(x, pre, h);
        store_elements(params.h + token * params.h_token_stride + column, h);
    }
}
