// The norm of the query heads and their rotation by position, in one pass, and its gradient (inference 3, 4, 5.1,
// training 8, 11.3). With the mean over the head_dim channels of a head,
//
//     rstd[t,h] = 1 / sqrt(mean(x[t,h,:]^2) + eps)             in fp32, kept for the backward
//     n[t,h,:]  = x[t,h,:] rstd[t,h]                           in bf16
//     y[t,h,:]  = n[t,h,:] with its last rope_dim channels rotated by the position of token t, in bf16
//
//     g[t,h,:]  = dy[t,h,:] with these channels rotated backwards, in fp32
//     dx[t,h,:] = rstd (g - x rstd^2 mean(g x))                in bf16
//
// There is no weight. rotation.h has the rotation's formulas; a position outside of the table makes NaN of the token's
// rotated channels, and of all of its gradient, whose mean they are in. n is stored nowhere: the query is read once and
// written once, where the norm and the rotation apart move it twice. y may be x, and dx may be dy.
//
// How the work is laid out. A warp takes a head: a lane has up to two accesses of 16 bytes of it in the vector kernels,
// heads of up to 512 channels, and up to 16 pairs in the scalar ones, whose head_dim is any even number up to 1024. What
// is read stays in registers; sums are fp32, over a lane's own channels and then over lanes, in one order.
//
// Floor: 4 bytes a channel forward, 6 backward, and the tables: at 4.24 TB/s 1.01 and 1.52 ms for 16384 tokens of 128
// heads of 512. Measured on one H200: 1117 and 1527 us (91 and 99 % of a copy), 128 tokens 10.7 us, where 10.4 were expected: 2.6 rounds
// of blocks, in which 37 % of a warp's time is waiting for its loads (ncu, reports/h200/ncu.txt, when it took 11.1). When a warp's head
// was found by a division in 64 bits, which it waited for before it read, 1177, 1599 and 11.1. Limited by memory: about 8 instructions
// a channel of the 27 that there is time for; the lanes that turn have some 30 more for eight channels, once for each warp. Rotations
// asked for with the channels needed registers of two blocks: 12.2 us, 1224 and 1891; positions alone 11.0, 1179 and 1685 (11.1, 1177
// and 1600 in the same call).
//
// Defines: ELEMENT bf16, the type of x. Launch: num_tokens * ceil(num_heads / WARPS) blocks.
#include "channels.h"

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;

struct QueryNormRopeParams {
    const ELEMENT* x; int64_t x_token_stride; int64_t x_head_stride;  // [num_tokens, num_heads, head_dim]
    ELEMENT* y; int64_t y_token_stride; int64_t y_head_stride;        // as x
    float* rstd;                                                      // [num_tokens, num_heads]
    const float* cos; int64_t cos_stride;                             // [table_rows, rope_dim / 2]
    const float* sin; int64_t sin_stride;
    const int32_t* positions;                                         // [num_tokens], or nullptr
    int64_t table_rows, num_tokens;
    int32_t num_heads, head_dim, rope_dim;
    int32_t inverse;  // 0
    float eps;
};
PARAMS_LAYOUT(QueryNormRopeParams, x, x_token_stride, x_head_stride, y, y_token_stride, y_head_stride, rstd, cos,
              cos_stride, sin, sin_stride, positions, table_rows, num_tokens, num_heads, head_dim, rope_dim, inverse, eps)

struct QueryNormRopeBackwardParams {
    const ELEMENT* dy; int64_t dy_token_stride; int64_t dy_head_stride;  // [num_tokens, num_heads, head_dim]
    const ELEMENT* x; int64_t x_token_stride; int64_t x_head_stride;
    const float* rstd;                                                   // [num_tokens, num_heads]
    ELEMENT* dx; int64_t dx_token_stride; int64_t dx_head_stride;
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const int32_t* positions;
    int64_t table_rows, num_tokens;
    int32_t num_heads, head_dim, rope_dim;
    int32_t inverse;  // 1
};
PARAMS_LAYOUT(QueryNormRopeBackwardParams, dy, dy_token_stride, dy_head_stride, x, x_token_stride, x_head_stride, rstd,
              dx, dx_token_stride, dx_head_stride, cos, cos_stride, sin, sin_stride, positions, table_rows, num_tokens,
              num_heads, head_dim, rope_dim, inverse)

// The head of a warp.
struct Head {
    int64_t token;
    int32_t head;
};

// A block has heads of one token. In 32 bits: a division in 64 would be waited for before anything is read.
template <typename Params>
DEVICE Head head_of(const Params& params) {
    const uint32_t blocks = ceil_div(static_cast<uint32_t>(params.num_heads), static_cast<uint32_t>(WARPS));
    return Head{blockIdx.x / blocks, static_cast<int32_t>(blockIdx.x % blocks) * WARPS + warp_id()};
}

template <bool WIDE>
DEVICE void normalise_and_turn(const QueryNormRopeParams& params) {
    const Head at = head_of(params);
    if (at.head >= params.num_heads) return;
    Channels<WIDE> x;
    x.load(params.x + at.token * params.x_token_stride + at.head * params.x_head_stride, params.head_dim);
    const float rstd = rsqrt_approx(x.dot(x) / static_cast<float>(params.head_dim) + params.eps);
    UNROLL
    for (int p = 0; p < Channels<WIDE>::PIECES; ++p) {
        UNROLL
        for (int e = 0; e < Channels<WIDE>::COUNT; ++e) x.x[p][e] *= rstd;
        round_to_bf16(x.x[p]);
    }
    x.turn(params, at.token);
    x.store(params.y + at.token * params.y_token_stride + at.head * params.y_head_stride, params.head_dim);
    if (lane_id() == 0) params.rstd[at.token * params.num_heads + at.head] = rstd;
}

template <bool WIDE>
DEVICE void backward(const QueryNormRopeBackwardParams& params) {
    const Head at = head_of(params);
    if (at.head >= params.num_heads) return;
    Channels<WIDE> x, g;
    g.load(params.dy + at.token * params.dy_token_stride + at.head * params.dy_head_stride, params.head_dim);
    x.load(params.x + at.token * params.x_token_stride + at.head * params.x_head_stride, params.head_dim);
    const float rstd = params.rstd[at.token * params.num_heads + at.head];
    g.turn(params, at.token);
    const float factor = rstd * rstd * (g.dot(x) / static_cast<float>(params.head_dim));
    UNROLL
    for (int p = 0; p < Channels<WIDE>::PIECES; ++p) {
        UNROLL
        for (int e = 0; e < Channels<WIDE>::COUNT; ++e) g.x[p][e] = rstd * (g.x[p][e] - x.x[p][e] * factor);
    }
    g.store(params.dx + at.token * params.dx_token_stride + at.head * params.dx_head_stride, params.head_dim);
}

// As many blocks as keep a copy's bytes under way: a lane has 32 of them, or 64.
KERNEL_OF(query_norm_rope_vector, QueryNormRopeParams, THREADS, 12) { normalise_and_turn<true>(params); }
KERNEL(query_norm_rope_scalar, QueryNormRopeParams, THREADS) { normalise_and_turn<false>(params); }
KERNEL_OF(query_norm_rope_backward_vector, QueryNormRopeBackwardParams, THREADS, 8) { backward<true>(params); }
KERNEL(query_norm_rope_backward_scalar, QueryNormRopeBackwardParams, THREADS) { backward<false>(params); }
