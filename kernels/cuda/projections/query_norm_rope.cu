// Norm of the query heads and their rotation by position, in one pass, and its gradient (inference
// 3, 4, 5.1, training 8, 11.3). With the mean over the head_dim channels of a head,
//
//     rstd[t,h] = 1 / sqrt(mean(x[t,h,:]^2) + eps)             in fp32, kept for the backward
//     n[t,h,:]  = x[t,h,:] rstd[t,h]                           in bf16
//     y[t,h,:]  = n[t,h,:], its last rope_dim channels rotated by token t's position, in bf16
//
//     g[t,h,:]  = dy[t,h,:] with these channels rotated backwards, in fp32
//     dx[t,h,:] = rstd (g - x rstd^2 mean(g x))                in bf16
//
// No weight exists. rotation.h has the rotation. A position outside the table makes NaN of the
// token's rotated channels, and of its whole gradient, whose mean contains them. n is not stored:
// the query is read once and written once. y may be x, and dx may be dy.
//
// A warp takes a head. In the vector kernels (heads up to 512) a lane has up to two 16-byte
// accesses of it. In the scalar ones (any even head_dim up to 1024) it has up to 16 pairs. Inputs
// stay in registers. Sums are fp32, over a lane's channels, then over lanes, in one order.
//
// Floor: 4 bytes a channel forward, 6 backward, and the tables: at 4.24 TB/s 1.01 and 1.52 ms for
// 16384 tokens of 128 heads of 512. Limit: memory. What was tried:
// kernels/docs/query_norm_rope.md.
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

// The head of a warp.
struct Head {
    int64_t token;
    int32_t head;
};

// A block has heads of one token. The division has 32 bits: a 64-bit one would delay the first
// load.
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

// Enough blocks to keep as many bytes in flight as a copy: a lane has 32 of them, or 64.
KERNEL_OF(query_norm_rope_vector, QueryNormRopeParams, THREADS, 12) { normalise_and_turn<true>(params); }
KERNEL(query_norm_rope_scalar, QueryNormRopeParams, THREADS) { normalise_and_turn<false>(params); }
KERNEL_OF(query_norm_rope_backward_vector, QueryNormRopeBackwardParams, THREADS, 8) { backward<true>(params); }
KERNEL(query_norm_rope_backward_scalar, QueryNormRopeBackwardParams, THREADS) { backward<false>(params); }
