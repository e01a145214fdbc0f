// The input of a sublayer from the residual streams, and its RMSNorm (inference 2.3 and 3,
// training 11.1 and 11.3). X are the STREAMS streams of a token, pre its coefficients, w the
// norm's fp32 weight; stored() rounds to ELEMENT:
//
//     h  = stored(sum over i of pre[i] X[i])     y = w (h rstd),  rstd = 1 / sqrt(mean(h^2) + eps)
//     g  = dy w      dh = rstd (g - h rstd^2 mean(g h)) in fp32      dX[i] = pre[i] dh
//     dpre[i] = sum over the channels of X[i] dh        dw = sum over tokens of dy (h rstd)
//
// The rounding of h is part of the definition. Only rstd is saved: the backward reads X for dpre
// anyway and computes h again. NaN and infinities propagate, by rstd to a whole token.
// Forward: a block a token keeps h in registers between the sum of squares and y, 32 elements a
// thread, with one barrier. For few tokens a thread loads one piece with its weights; the sum's
// order differs (Device::invariant: never).
// Backward: blocks loop over tokens, since dw is a sum over them, kept in registers. A block
// stores one partial row; rms_norm's kernel adds them in order. cp.async loads the next token's
// five rows meanwhile. A thread loads only what it copied, so no barrier waits for copies. Wide
// rows are read twice.
// Floors for a bf16 token of d channels: forward 10 d bytes, backward 18 d. At 4.24 TB/s 32768
// tokens of 7168 channels take 554 and 997 us.
// Limit: memory. The backward, at 84 % of a copy on one H200, has L2 at 81 % of its rate and DRAM
// at 74. One token: about 0.8 us to load 86 KB into an SM.
// Defines: ELEMENT  type of X, y and their gradients: bf16 or float.
// Launch: forward num_tokens blocks, HELD pieces a thread (few: one) to a row (scalar: any);
// backward any number; staged: 2 ROWS rows of dynamic shared memory, GRADIENT_HELD a thread.
// What was tried: kernels/docs/mhc_pre_norm.md.
#include "async_copy.h"
#include "element.h"
#include "math.h"
#include "streams.h"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int FEW_THREADS = 1024;  // of the forward for few tokens
constexpr int HELD = 32 / VECTOR;  // pieces of h that a thread of the forward holds
constexpr int GRADIENT_HELD = 2;  // pieces of a token that a thread of the staged backward takes
constexpr int ROWS = STREAMS + 1;  // rows of a stage: the streams and dy

struct MhcPreNormForwardParams {
    const ELEMENT* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* pre;  // [num_tokens, STREAMS]
    const float* weight;  // [hidden_size]
    ELEMENT* y; int64_t y_token_stride;  // [num_tokens, hidden_size]
    float* rstd;  // [num_tokens], or nullptr
    int32_t hidden_size;
    float eps;
};

struct MhcPreNormBackwardParams {
    const ELEMENT* streams; int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* pre;
    const float* weight;
    const float* rstd;  // as the forward saved it
    const ELEMENT* dy; int64_t dy_token_stride;
    ELEMENT* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dpre;
    float* dweight_partials;  // [gridDim.x, hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
};

// The sum over the block, in every thread. `partials` may be written again after the block's next
// barrier.
template <int MOST>
DEVICE float block_sum(float value, float (&partials)[MOST]) {
    value = warp_sum(value);
    if (lane_id() == 0) partials[warp_id()] = value;
    __syncthreads();
    return warp_sum(lane_id() < static_cast<int>(blockDim.x / WARP_SIZE) ? partials[lane_id()] : 0.0f);
}

DEVICE float reciprocal_rms(float sum_of_squares, int32_t hidden_size, float eps) {
    return rsqrt_approx(sum_of_squares / static_cast<float>(hidden_size) + eps);
}

// h of these elements, rounded as it is stored.
template <int COUNT>
DEVICE void stored_mix(const float (&x)[STREAMS][COUNT], const float (&pre)[STREAMS], float (&h)[COUNT]) {
    mix_streams(x, pre, h);
    UNROLL
    for (int e = 0; e < COUNT; ++e) h[e] = as_stored<ELEMENT>(h[e]);
}

template <int COUNT>
DEVICE void normalise(const float (&weight)[COUNT], const float (&h)[COUNT], float rstd, float (&y)[COUNT]) {
    for (int e = 0; e < COUNT; ++e) y[e] = weight[e] * (h[e] * rstd);
}

template <int COUNT>
DEVICE void store_normalised(const MhcPreNormForwardParams& params, int64_t token, int64_t column, float rstd,
                             const float (&h)[COUNT]) {
    float weight[COUNT], y[COUNT];
    load_elements<COUNT>(params.weight + column, weight);
    normalise(weight, h, rstd, y);
    store_elements(params.y + token * params.y_token_stride + column, y);
}

KERNEL(mhc_pre_norm_forward_vector, MhcPreNormForwardParams, THREADS) {
    __shared__ float partials[WARPS];
    const int64_t token = blockIdx.x;
    const ELEMENT* const streams = params.streams + token * params.streams_token_stride;
    float pre[STREAMS], h[VECTOR], sum = 0.0f;
    load_coefficients(params.pre + token * STREAMS, pre);
    Vec16 held[HELD];
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int64_t column = static_cast<int64_t>(threadIdx.x + v * blockDim.x) * VECTOR;
        held[v] = Vec16{};
        if (column >= params.hidden_size) continue;
        float x[STREAMS][VECTOR];
        load_streams(streams + column, params.streams_stream_stride, x);
        stored_mix(x, pre, h);
        for (int e = 0; e < VECTOR; ++e) sum += h[e] * h[e];
        held[v] = pack<ELEMENT>(h);
    }
    const float rstd = reciprocal_rms(block_sum(sum, partials), params.hidden_size, params.eps);
    if (params.rstd && threadIdx.x == 0) params.rstd[token] = rstd;
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int64_t column = static_cast<int64_t>(threadIdx.x + v * blockDim.x) * VECTOR;
        if (column >= params.hidden_size) continue;
        unpack<ELEMENT>(held[v], h);
        store_normalised(params, token, column, rstd, h);
    }
}

// For so few tokens that each block has an SM. A thread has one piece and loads all that it needs
// at once. So no thread waits after the barrier for a weight that is not in the cache.
KERNEL(mhc_pre_norm_forward_few, MhcPreNormForwardParams, FEW_THREADS) {
    __shared__ float partials[FEW_THREADS / WARP_SIZE];
    const int64_t token = blockIdx.x, column = static_cast<int64_t>(threadIdx.x) * VECTOR;
    const bool exists = column < params.hidden_size;
    float x[STREAMS][VECTOR] = {}, weight[VECTOR], pre[STREAMS], h[VECTOR], y[VECTOR], sum = 0.0f;
    load_coefficients(params.pre + token * STREAMS, pre);
    if (exists) {
        load_streams(params.streams + token * params.streams_token_stride + column, params.streams_stream_stride, x);
        load_elements<VECTOR>(params.weight + column, weight);
    }
    stored_mix(x, pre, h);
    for (int e = 0; e < VECTOR; ++e) sum += h[e] * h[e];
    const float rstd = reciprocal_rms(block_sum(exists ? sum : 0.0f, partials), params.hidden_size, params.eps);
    if (params.rstd && threadIdx.x == 0) params.rstd[token] = rstd;
    if (!exists) return;
    normalise(weight, h, rstd, y);
    store_elements(params.y + token * params.y_token_stride + column, y);
}

// Any width, stride and alignment. The second read comes from a cache.
KERNEL(mhc_pre_norm_forward_scalar, MhcPreNormForwardParams, THREADS) {
    __shared__ float partials[WARPS];
    const int64_t token = blockIdx.x;
    const ELEMENT* const streams = params.streams + token * params.streams_token_stride;
    float pre[STREAMS], x[STREAMS][1], h[1], sum = 0.0f;
    load_coefficients(params.pre + token * STREAMS, pre);
    for (int64_t column = threadIdx.x; column < params.hidden_size; column += blockDim.x) {
        load_streams(streams + column, params.streams_stream_stride, x);
        stored_mix(x, pre, h);
        sum += h[0] * h[0];
    }
    const float rstd = reciprocal_rms(block_sum(sum, partials), params.hidden_size, params.eps);
    if (params.rstd && threadIdx.x == 0) params.rstd[token] = rstd;
    for (int64_t column = threadIdx.x; column < params.hidden_size; column += blockDim.x) {
        load_streams(streams + column, params.streams_stream_stride, x);
        stored_mix(x, pre, h);
        store_normalised(params, token, column, rstd, h);
    }
}

// ---------------------------------------------------------------- backward

// COUNT channels of a token: what is loaded, and h and g computed from it.
template <int COUNT>
struct Channels {
    float x[STREAMS][COUNT], dy[COUNT], h[COUNT], g[COUNT];
};

// Computes h and g = dy w; x and dy are loaded.
template <int COUNT>
DEVICE void complete(Channels<COUNT>& own, const float* weight, int64_t column, const float (&pre)[STREAMS]) {
    float w[COUNT];
    load_elements<COUNT>(weight + column, w);
    stored_mix(own.x, pre, own.h);
    for (int e = 0; e < COUNT; ++e) own.g[e] = own.dy[e] * w[e];
}

// sum + these channels' part of sum(g h).
template <int COUNT>
DEVICE float dot_sum(const Channels<COUNT>& own, float sum) {
    for (int e = 0; e < COUNT; ++e) sum += own.g[e] * own.h[e];
    return sum;
}

// rstd^2 mean(g h), the factor of h in dh.
DEVICE float mean_term(float dot, float rstd, int32_t hidden_size) {
    return rstd * rstd * (dot / static_cast<float>(hidden_size));
}

// Stores dX of these channels, and adds their parts of dpre and dweight.
template <int COUNT>
DEVICE void gradients(const MhcPreNormBackwardParams& params, ELEMENT* to, const Channels<COUNT>& own,
                      const float (&pre)[STREAMS], float rstd, float mean, float (&dpre)[STREAMS],
                      float (&dweight)[COUNT]) {
    float dh[COUNT], dx[COUNT];
    for (int e = 0; e < COUNT; ++e) {
        dh[e] = rstd * (own.g[e] - own.h[e] * mean);
        dweight[e] += own.dy[e] * (own.h[e] * rstd);
    }
    UNROLL
    for (int i = 0; i < STREAMS; ++i) {
        UNROLL
        for (int e = 0; e < COUNT; ++e) {
            dx[e] = pre[i] * dh[e];
            dpre[i] += own.x[i][e] * dh[e];
        }
        store_elements(to + i * params.dstreams_stream_stride, dx);
    }
}

// A thread's pieces of its block's tokens, in two stages of shared memory: row 0 is dy, the others
// are the streams.
struct Stages {
    SharedAddress first;
    int32_t pieces;  // of a row
};

DEVICE int piece_of(int v) { return static_cast<int>(threadIdx.x + v * blockDim.x); }

DEVICE SharedAddress place(const Stages& stages, int stage, int row, int piece) {
    return stages.first + static_cast<SharedAddress>((stage * ROWS + row) * stages.pieces + piece) * 16;
}

// Starts the copies of this thread's pieces of a token, if the token exists, and commits their
// group.
DEVICE void request(const MhcPreNormBackwardParams& params, const Stages& stages, int64_t token, int stage) {
    for (int v = 0; v < GRADIENT_HELD && token < params.num_tokens; ++v) {
        const int piece = piece_of(v);
        if (piece >= stages.pieces) break;
        const int64_t column = static_cast<int64_t>(piece) * VECTOR;
        const ELEMENT* const streams = params.streams + token * params.streams_token_stride + column;
        copy_async_16(place(stages, stage, 0, piece), params.dy + token * params.dy_token_stride + column, true);
        for (int i = 0; i < STREAMS; ++i)
            copy_async_16(place(stages, stage, 1 + i, piece), streams + i * params.streams_stream_stride, true);
    }
    copy_commit();
}

DEVICE void load_piece(const MhcPreNormBackwardParams& params, const Stages& stages, int stage, int piece,
                       const float (&pre)[STREAMS], Channels<VECTOR>& own) {
    unpack<ELEMENT>(load_shared_vec16(place(stages, stage, 0, piece)), own.dy);
    UNROLL
    for (int i = 0; i < STREAMS; ++i) unpack<ELEMENT>(load_shared_vec16(place(stages, stage, 1 + i, piece)), own.x[i]);
    complete(own, params.weight, static_cast<int64_t>(piece) * VECTOR, pre);
}

// Takes tokens blockIdx.x, blockIdx.x + gridDim.x, ... GRADIENT_HELD pieces a thread cover a row.
KERNEL(mhc_pre_norm_backward_staged, MhcPreNormBackwardParams, THREADS) {
    __shared__ float dots[WARPS], sums[WARPS][STREAMS];
    const Stages stages{shared_address(dynamic_shared()), params.hidden_size / VECTOR};
    float dweight[GRADIENT_HELD][VECTOR] = {}, pre[STREAMS];
    Channels<VECTOR> own;
    request(params, stages, blockIdx.x, 0);
    int stage = 0;
    for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x, stage ^= 1) {
        request(params, stages, token + gridDim.x, stage ^ 1);
        const float rstd = params.rstd[token];
        load_coefficients(params.pre + token * STREAMS, pre);
        copy_wait<1>();
        float dot = 0.0f, dpre[STREAMS] = {};
        for (int v = 0; v < GRADIENT_HELD; ++v) {
            if (piece_of(v) >= stages.pieces) break;
            load_piece(params, stages, stage, piece_of(v), pre, own);
            dot = dot_sum(own, dot);
        }
        const float mean = mean_term(block_sum(dot, dots), rstd, params.hidden_size);
        ELEMENT* const to = params.dstreams + token * params.dstreams_token_stride;
        UNROLL
        for (int v = 0; v < GRADIENT_HELD; ++v) {
            if (piece_of(v) >= stages.pieces) break;
            load_piece(params, stages, stage, piece_of(v), pre, own);
            gradients(params, to + static_cast<int64_t>(piece_of(v)) * VECTOR, own, pre, rstd, mean, dpre, dweight[v]);
        }
        const float sum = block_sums(dpre, sums);
        if (threadIdx.x < STREAMS) params.dpre[token * STREAMS + threadIdx.x] = sum;
    }
    float* const partial = params.dweight_partials + static_cast<int64_t>(blockIdx.x) * params.hidden_size;
    UNROLL
    for (int v = 0; v < GRADIENT_HELD; ++v) {
        if (piece_of(v) >= stages.pieces) break;
        UNROLL
        for (int e = 0; e < VECTOR; ++e) partial[static_cast<int64_t>(piece_of(v)) * VECTOR + e] = dweight[v][e];
    }
}

template <int COUNT>
DEVICE void load_channels(const MhcPreNormBackwardParams& params, int64_t token, int64_t column,
                          const float (&pre)[STREAMS], Channels<COUNT>& own) {
    load_streams(params.streams + token * params.streams_token_stride + column, params.streams_stream_stride, own.x);
    load_elements<COUNT>(params.dy + token * params.dy_token_stride + column, own.dy);
    complete(own, params.weight, column, pre);
}

// For rows too wide for shared memory, or not aligned to 16-byte accesses. They are read twice.
// Each channel's partial dweight is in memory that only one thread touches.
template <int COUNT>
DEVICE void backward_reread(const MhcPreNormBackwardParams& params, float (&dots)[WARPS], float (*sums)[STREAMS]) {
    const int64_t step = static_cast<int64_t>(blockDim.x) * COUNT;
    float* const partial = params.dweight_partials + static_cast<int64_t>(blockIdx.x) * params.hidden_size;
    for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += step)
        for (int e = 0; e < COUNT; ++e) partial[column + e] = 0.0f;
    Channels<COUNT> own;
    for (int64_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
        const float rstd = params.rstd[token];
        float pre[STREAMS], dpre[STREAMS] = {}, dot = 0.0f;
        load_coefficients(params.pre + token * STREAMS, pre);
        for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += step) {
            load_channels(params, token, column, pre, own);
            dot = dot_sum(own, dot);
        }
        const float mean = mean_term(block_sum(dot, dots), rstd, params.hidden_size);
        ELEMENT* const to = params.dstreams + token * params.dstreams_token_stride;
        for (int64_t column = threadIdx.x * COUNT; column < params.hidden_size; column += step) {
            float dweight[COUNT] = {};
            load_channels(params, token, column, pre, own);
            gradients(params, to + column, own, pre, rstd, mean, dpre, dweight);
            for (int e = 0; e < COUNT; ++e) partial[column + e] += dweight[e];
        }
        const float sum = block_sums(dpre, sums);
        if (threadIdx.x < STREAMS) params.dpre[token * STREAMS + threadIdx.x] = sum;
    }
}

KERNEL(mhc_pre_norm_backward_wide, MhcPreNormBackwardParams, THREADS) {
    __shared__ float dots[WARPS], sums[WARPS][STREAMS];
    backward_reread<VECTOR>(params, dots, sums);
}
KERNEL(mhc_pre_norm_backward_scalar, MhcPreNormBackwardParams, THREADS) {
    __shared__ float dots[WARPS], sums[WARPS][STREAMS];
    backward_reread<1>(params, dots, sums);
}
