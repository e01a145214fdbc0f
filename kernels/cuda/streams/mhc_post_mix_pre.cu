// mhc_post, mhc_mix of the next site and mhc_pre in fewer launches for few tokens, with the same
// bits (inference 2.1 to 2.4). X are a token's STREAMS streams, y the sublayer's output, post and
// comb its coefficients.
//
//     out[j] = bf16(post[j] y + sum over i of comb[i,j] X[i])                          mhc_post.cu
//     pre, post, comb, mix, rstd of the next site from v = out[0], out[1], ...         mhc_mix.cu
//     h = sum over i of pre[i] out[i], pre of the next site                            mhc_pre.cu
//
// mhc_post_mix_pre_project_few, up to FEW_TOKENS tokens: out and mhc_mix_project_few of it. A
// block computes all destinations of its channels, a piece a lane, and projects them from
// registers. `out` may be `streams`: a block stores after a barrier after all of its loads; no
// other block reads there.
// mhc_post_mix_pre_project, more tokens, where mhc_mix uses mhc_mix_project_at_once: a lane loads
// the pieces of all sources, then computes, stores and projects all destinations.
// mhc_post_mix_pre_mix: coefficients and h. A block takes a token: eight warps mix, one computes
// coefficients. All its loads start at once. The eight warps add the partials and wait for pre.
// The last warp computes comb, 2 sinkhorn_iters - 1 dependent passes, meanwhile.
//
// Floors at 4.24 TB/s, 7168 channels: 1 token 2.75 MB of weights, 0.7 us; 128 tokens 20 bytes a
// channel, with out's second read from L2: 18 MB and 2.75, 5 us.
// Limit: two launches, two trips to memory, dependent sums and pre. One H200: 1 token 5.6 us, 128
// tokens 14.3.
// Launch: project_few one block a split of FEW_PIECES pieces; project token_tiles * splits, splits
// as many as a stream has steps; mix num_tokens blocks.
// What was tried: kernels/docs/mhc_post_mix_pre.md.
#include "coefficients.h"

constexpr int MIX_THREADS = (FEW_WARPS + 1) * static_cast<int>(WARP_SIZE);
constexpr int HELD = 4;  // pieces of each destination that a thread has in flight

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

// ---------------------------------------------------------------- streams and their projection

// The pieces of a lane's destination, computed from those of all sources.
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
        // Every warp has loaded from the addresses that are stored to: out may be streams.
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

// The same for more tokens. Their coefficients are in shared memory: in registers they would take
// 40.
struct MadeShared {
    AtOnceShared<COLUMNS> projection;
    // post, then comb by sources. The rows of eight tokens are in different banks.
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
    // A thread loads all sources of a piece before it stores any destination: out may be streams.
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

// ---------------------------------------------------------------- coefficients and h

// HELD pieces of each destination, starting at the thread's piece `first`, APART pieces from one
// to the next.
constexpr int APART = FEW_WARPS * static_cast<int>(WARP_SIZE);
DEVICE void load_pieces(const MhcPostMixPreMixParams& params, int64_t token, int first, Vec16 (&held)[HELD][STREAMS]) {
    const int last = params.hidden_size / PIECE - 1;
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        // After the last piece this loads it again, and it is not stored: a branch would make the
        // next load wait.
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
