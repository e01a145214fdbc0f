// The streams behind a sublayer, the coefficients of the next site and what its sublayer reads, of few tokens, in fewer launches
// than mhc_post, mhc_mix and mhc_pre take (inference 2.1 to 2.4), with the same bits. With X the STREAMS streams of a token, y the
// sublayer's output, post and comb the coefficients of its site,
//
//     out[j] = bf16(post[j] y + sum over i of comb[i,j] X[i])                                         mhc_post.cu
//     pre, post, comb, mix and rstd of the next site from v = out[0], out[1], ..., one behind the other    mhc_mix.cu
//     h = sum over i of pre[i] out[i], pre of the next site                                            mhc_pre.cu
//
// mhc_post_mix_pre_project_few, of up to FEW_TOKENS tokens: out, and what mhc_mix_project_few leaves of it. A block makes all
// destinations of its part of the channels, a lane a piece of one, and multiplies what it stores out of registers. `out` may be
// `streams`: a block stores behind a barrier past which all of its warps have read, and no other block reads there.
//
// mhc_post_mix_pre_project, of more, where mhc_mix has mhc_mix_project_at_once (projection.h): the same of that one. A lane reads the
// pieces of all sources, makes those of all destinations of them, stores these and multiplies them as that kernel does, which
// therefore neither waits for other blocks' streams nor reads them again.
//
// mhc_post_mix_pre_mix, of few tokens whose channels are in many parts: the coefficients and h, what mhc_mix_coefficients_few and
// mhc_pre are in two launches. A block takes a token: eight warps that mix, and one that makes coefficients. All of what is read is
// asked for at once: the parts of the projection, scale and base, HELD pieces of out of a thread. The eight warps add up the parts,
// and wait for the four numbers of pre; comb, 2 sinkhorn_iters - 1 dependent passes, is the last warp's alone while the others mix.
//
// Floors: of one token of 7168 channels the next site's weights, 2.75 MB, 0.7 us at 4.24 TB/s; of 128 tokens 20 bytes a channel, the
// second reading of out from the second-level cache: 18 MB and 2.75, 5 us. Expected to limit: two launches, two trips to memory, the
// sums and pre one behind the other.
// Measured on one H200, 7168 channels: 1 token 5.6 us, 128 tokens 14.3, where the separate kernels take 7.6 and 17.7 in the same call
// and an empty kernel with the bytes 1.7 and 5.9; 128 tokens took 16.0, in another call, when mhc_post's kernel and mhc_mix_project
// were two of three launches. What 128 tokens are made of, each measured with the rest left out: the mix behind a project of nothing
// 4.5, project 10.8 with a mix of nothing, of which an empty launch more is 1.0. Of project's 9.8, what it reads and stores alone
// takes 6.9, products 1.7 of the rest, and weights, sums and squares 0.3 to 0.4 each: they come when the last streams have. What did
// not help: eight warps that copy to shared memory in place of 16 that read into registers (1.9 us more), a tenth fewer instructions
// (nothing), weights in front of all streams (0.1 more); the mix's blocks called before the streams have come, to wait in the few
// free places (0.2 more). The barriers of the mix are at one place of the source for all warps, as the block's barriers must be; at
// two, which worked and which compute-sanitizer refuses, 1 token took 5.5 us and 128 tokens 14.1.
// More tokens take mhc_post, mhc_mix and mhc_pre, which move 18 bytes where a kernel that made all of it would move 10: at the copy
// rate 56 % of a copy of the latter, and they reach 51 to 54 % on one H200. On Hopper mhc_post_mix_pre_hopper.cu makes streams and
// projection in one, and mhc_pre alone reads them again: 14 bytes.
//
// Launch: project_few as many blocks as there are parts of FEW_PIECES pieces; project token_tiles * splits, splits as many as there
// are steps of a stream; mix num_tokens blocks.
#include "coefficients.h"

constexpr int MIX_THREADS = (FEW_WARPS + 1) * static_cast<int>(WARP_SIZE);
constexpr int HELD = 4;  // pieces of each destination that a thread has under way

struct MhcPostMixPreProjectParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_source_stride;
    const bf16* y; int64_t y_token_stride;  // [num_tokens, hidden_size]
    const float* post;  // [num_tokens, STREAMS]
    const float* comb;  // [num_tokens, source, destination]
    const float* fn;  // [COLUMNS, STREAMS * hidden_size], of the next site
    bf16* out; int64_t out_token_stride; int64_t out_destination_stride;  // as streams, which it may be
    float* partials;  // [parts, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the channels
};
PARAMS_LAYOUT(MhcPostMixPreProjectParams, streams, streams_token_stride, streams_source_stride, y, y_token_stride, post,
              comb, fn, out, out_token_stride, out_destination_stride, partials, num_tokens, hidden_size, splits)

struct MhcPostMixPreMixParams {
    const bf16* out; int64_t out_token_stride; int64_t out_destination_stride;  // [num_tokens, STREAMS, hidden_size]
    const float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
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

// The pieces of a lane's destination, made of those of all sources.
template <int TOKENS>
struct MadePieces {
    const MhcPostMixPreProjectParams& params;
    Vec16 x[TOKENS][STREAMS] = {}, y[TOKENS] = {};
    float post[TOKENS], comb[TOKENS][STREAMS * STREAMS];  // of comb the first column is that of the lane's destination
    bf16* out = nullptr;  // of the first token; nullptr of a lane that has no piece

    void ask(int64_t first_token, const FewPlace& place) {
        const int64_t column = static_cast<int64_t>(place.piece) * PIECE;
        out = params.out + first_token * params.out_token_stride + place.stream * params.out_destination_stride + column;
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            const int64_t token = few_token(first_token, t, params.num_tokens);
            const bf16* const source = params.streams + token * params.streams_token_stride + column;
            y[t] = load_vec16(params.y + token * params.y_token_stride + column);
            post[t] = params.post[token * STREAMS + place.stream];
            UNROLL
            for (int i = 0; i < STREAMS; ++i) {
                x[t][i] = load_vec16(source + i * params.streams_source_stride);
                comb[t][i * STREAMS] = params.comb[(token * STREAMS + i) * STREAMS + place.stream];
            }
        }
    }
    void make(Vec16 (&streams)[TOKENS]) const {
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            streams[t] = Vec16{};
            if (out == nullptr) continue;
            float of_x[STREAMS][PIECE], of_y[PIECE], made[PIECE];
            unpack<bf16>(y[t], of_y);
            UNROLL
            for (int i = 0; i < STREAMS; ++i) unpack<bf16>(x[t][i], of_x[i]);
            mix_destination(of_x, of_y, &post[t], comb[t], 0, made);
            streams[t] = pack<bf16>(made);
        }
        // Every warp has read what is stored to.
        __syncthreads();
        UNROLL
        for (int t = 0; t < TOKENS; ++t)
            if (warp_id() == t && out != nullptr && t < params.num_tokens) store_vec16_global(out + t * params.out_token_stride, streams[t]);
    }
};

KERNEL(mhc_post_mix_pre_project_few, MhcPostMixPreProjectParams, FEW_PROJECTION_THREADS<COLUMNS>) {
    if (params.num_tokens == 1) {
        project_few_tokens<COLUMNS, 1>(params, 0, blockIdx.x, MadePieces<1>{params});
    } else {
        project_few_tokens<COLUMNS, FEW_TOKENS>(params, 0, blockIdx.x, MadePieces<FEW_TOKENS>{params});
    }
}

// Made of those of all sources, of more tokens. Their coefficients are in shared memory: in registers they would be 40.
struct MadeShared {
    AtOnceShared<COLUMNS> projection;
    // post, then comb by sources; the rows of eight tokens lie in different banks.
    alignas(16) float coefficients[BLOCK_TOKENS][STREAMS + STREAMS * STREAMS];
};

struct MadeStreams {
    static constexpr int OF_COMB = STREAMS * STREAMS * BLOCK_TOKENS / AT_ONCE_THREADS;  // numbers of a thread
    static_assert(STREAMS * BLOCK_TOKENS == AT_ONCE_THREADS, "one number of post a thread");
    const MhcPostMixPreProjectParams& params;
    MadeShared& shared;
    Vec16 x[2][STREAMS] = {}, y[2] = {};
    float post = 0.0f, comb[OF_COMB] = {};

    void ask_for_block(uint32_t tile) {
        const int64_t first = static_cast<int64_t>(tile) * BLOCK_TOKENS, left = params.num_tokens - first;
        const int own = threadIdx.x;
        if (own < left * STREAMS) post = params.post[first * STREAMS + own];
        UNROLL
        for (int i = 0; i < OF_COMB; ++i) {
            const int number = own + i * AT_ONCE_THREADS;
            if (number < left * (STREAMS * STREAMS)) comb[i] = params.comb[first * (STREAMS * STREAMS) + number];
        }
    }
    void ask(const AtOncePlace& place) {
        UNROLL
        for (int row = 0; row < 2; ++row) {
            if (!place.exists[row]) continue;
            const int64_t token = place.tokens.token(row), column = static_cast<int64_t>(place.piece) * PIECE;
            UNROLL
            for (int i = 0; i < STREAMS; ++i)
                x[row][i] = load_vec16(params.streams + token * params.streams_token_stride + i * params.streams_source_stride + column);
            y[row] = load_vec16(params.y + token * params.y_token_stride + column);
        }
    }
    void leave() const {
        const int own = threadIdx.x;
        shared.coefficients[own / STREAMS][own % STREAMS] = post;
        UNROLL
        for (int i = 0; i < OF_COMB; ++i) {
            const int number = own + i * AT_ONCE_THREADS, of_token = STREAMS * STREAMS;
            shared.coefficients[number / of_token][STREAMS + number % of_token] = comb[i];
        }
    }
    // All that a piece is made of is read before anything is stored, by the same thread: out may be streams.
    void make(const AtOncePlace& place, int row, Vec16 (&streams)[STREAMS]) const {
        UNROLL
        for (int j = 0; j < STREAMS; ++j) streams[j] = Vec16{};
        if (!place.exists[row]) return;
        float coefficients[STREAMS + STREAMS * STREAMS], of_x[STREAMS][PIECE], of_y[PIECE];
        const float* const of_token = shared.coefficients[place.tokens.token(row) % BLOCK_TOKENS];
        UNROLL
        for (int i = 0; i <= STREAMS; ++i) unpack<float>(load_vec16(of_token + i * STREAMS), coefficients + i * STREAMS);
        unpack<bf16>(y[row], of_y);
        UNROLL
        for (int i = 0; i < STREAMS; ++i) unpack<bf16>(x[row][i], of_x[i]);
        bf16* const to = params.out + place.tokens.token(row) * params.out_token_stride + place.piece * PIECE;
        UNROLL
        for (int j = 0; j < STREAMS; ++j) {
            float made[PIECE];
            mix_destination(of_x, of_y, coefficients, coefficients + STREAMS, j, made);
            streams[j] = pack<bf16>(made);
            store_vec16_global(to + j * params.out_destination_stride, streams[j]);
        }
    }
};

SHARED_MEMORY(mhc_post_mix_pre_project, sizeof(MadeShared))

KERNEL(mhc_post_mix_pre_project, MhcPostMixPreProjectParams, AT_ONCE_THREADS) {
    auto& shared = *reinterpret_cast<MadeShared*>(dynamic_shared());
    project_at_once<COLUMNS>(params, shared.projection, MadeStreams{params, shared});
}

// ---------------------------------------------------------------- coefficients of the next site, and h

// HELD pieces of each destination from a thread's piece `first` on, a block's mixing threads apart.
constexpr int APART = FEW_WARPS * static_cast<int>(WARP_SIZE);
DEVICE void load_pieces(const MhcPostMixPreMixParams& params, int64_t token, int first, Vec16 (&held)[HELD][STREAMS]) {
    const int last = params.hidden_size / PIECE - 1;
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        // Behind the last piece that one again, which is not stored: a branch would make the next load wait.
        const int piece = minimum(first + v * APART, last);
        const bf16* const out = params.out + token * params.out_token_stride + piece * PIECE;
        UNROLL
        for (int i = 0; i < STREAMS; ++i) held[v][i] = load_vec16(out + i * params.out_destination_stride);
    }
}

DEVICE void store_mixed(const MhcPostMixPreMixParams& params, int64_t token, int first, const float (&pre)[STREAMS],
                        const Vec16 (&held)[HELD][STREAMS]) {
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int column = (first + v * APART) * PIECE;
        if (column >= params.hidden_size) break;
        float x[STREAMS][PIECE], h[PIECE];
        UNROLL
        for (int i = 0; i < STREAMS; ++i) unpack<bf16>(held[v][i], x[i]);
        mix_streams(x, pre, h);
        store_elements(params.h + token * params.h_token_stride + column, h);
    }
}

KERNEL(mhc_post_mix_pre_mix, MhcPostMixPreMixParams, MIX_THREADS) {
    __shared__ SumsOfWarps sums;
    __shared__ float pre[STREAMS];
    const int64_t token = blockIdx.x;
    const int own = threadIdx.x;
    const bool mixes = warp_id() < FEW_WARPS;
    const LogitOf logit(params, mixes ? COLUMNS : lane_id());
    Vec16 held[HELD][STREAMS] = {};
    if (mixes) {
        PartsOfWarp parts(params, token);
        load_pieces(params, token, own, held);
        sums[warp_id()][lane_id()] = parts.sum();
    }
    __syncthreads();
    ColumnOfOne column = {};
    if (!mixes) {
        column = store_gates_of_one(params, token, sums, logit);
        if (lane_id() < STREAMS) pre[lane_id()] = column.gate;
    }
    __syncthreads();
    if (!mixes) return store_comb_of_one(params, token, column);
    for (int first = own; first * PIECE < params.hidden_size; first += HELD * APART) {
        if (first != own) load_pieces(params, token, first, held);
        store_mixed(params, token, first, pre, held);
    }
}
