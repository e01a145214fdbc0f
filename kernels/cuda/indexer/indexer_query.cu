// The indexer's queries and head weights (inference 7, 7.1): rotated, transformed and quantized in
// one pass.
//
//     r[t,h,:] = q[t,h,:] with its last 64 channels rotated by position_t, in bf16
//     y[t,h,:] = 128^-0.5 H r[t,h,:], in bf16          w[t,h] = fp32(weights[t,h] * weights_scale)
//
// STORED 0 stores y. 1 stores it as e2m1 with a scale for each 32, kept with the operand. 2 stores
// it as e4m3 with one scale for the row, a power of two, which is not stored: w[t,h] is multiplied
// by it. So each scale counts once.
//
// rotation.h, hadamard.h and quantize.h define the formulas and the order of their sums: results
// have one value, bit for bit. The rotation is fp32(x[2i] C - fp32(x[2i+1] S)) and fp32(x[2i] S +
// fp32(x[2i+1] C)). A position outside the table makes the token's rotated channels NaN, hence y
// and its scales.
//
// The backward, of STORED 0: dq = R^-1 (128^-0.5 H dy), fp32 with one rounding at the store, and
// dweights = dw * weights_scale.
//
// Work division: four lanes take a head, a block 32 heads of one token. Each lane has eight whole
// pairs of the second part of a row, which is rotated. Floor: 256 bytes read and 68 (e2m1), 128
// (e4m3) or 256 written a head: 20, 24 and 32 us for 4096 tokens of 64 heads at 4.24 TB/s. Limit:
// about 25 instructions an element, with time for 18 to 28. One H200: 38.1, 36.8, 39.3 us.
//
// Defines: ELEMENT bf16, q's type; WEIGHT bf16 or float, weights' type; STORED 0, 1 or 2. Launch:
// num_tokens * ceil(num_heads / HEADS_PER_BLOCK). What was tried: kernels/docs/indexer_query.md.
#include "element.h"
#include "hadamard.h"
#include "rotation.h"

#if !defined(STORED) || !defined(WEIGHT)
#error "define WEIGHT, and STORED as 0 (y), 1 (e2m1) or 2 (e4m3)"
#endif

constexpr int THREADS = 128;
constexpr int HEADS_PER_BLOCK = THREADS / LANES;
constexpr int TURNED_PART = PARTS / 2;
static_assert(PARTS == 2, "the last 64 channels are the second part");

struct IndexerQueryParams {
    const ELEMENT* q; int64_t q_token_stride; int64_t q_head_stride;        // [num_tokens, num_heads, 128]
    const WEIGHT* weights; int64_t weights_token_stride;                    // [num_tokens, num_heads]
    ELEMENT* y; int64_t y_token_stride; int64_t y_head_stride;              // as q, or nullptr
    uint8_t* codes; int64_t codes_token_stride; int64_t codes_head_stride;  // [.., 64 or 128], or nullptr
    uint8_t* scale_bytes;                                                   // [num_tokens, num_heads, 4], or nullptr
    float* w; int64_t w_token_stride;                                       // [num_tokens, num_heads]
    const float* cos; int64_t cos_stride;                                   // [table_rows, 32]
    const float* sin; int64_t sin_stride;
    const int32_t* positions;                                               // [num_tokens], or nullptr
    int64_t table_rows;
    int32_t num_heads;
    int32_t inverse;  // 0
    float weights_scale;
};

struct IndexerQueryBackwardParams {
    const ELEMENT* dy; int64_t dy_token_stride; int64_t dy_head_stride;     // [num_tokens, num_heads, 128]
    const float* dw; int64_t dw_token_stride;                               // [num_tokens, num_heads]
    ELEMENT* dq; int64_t dq_token_stride; int64_t dq_head_stride;
    WEIGHT* dweights; int64_t dweights_token_stride;
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const int32_t* positions;
    int64_t table_rows;
    int32_t num_heads;
    int32_t inverse;  // 1
    float weights_scale;
};

// The head of a lane. An absent head is a head of zeros: its lanes take part in the shuffles of
// their warp.
struct Head {
    int64_t token;
    int head, lane;
    bool exists;
};

DEVICE Head head_of_lane(int num_heads) {
    const uint32_t chunks = ceil_div(num_heads, HEADS_PER_BLOCK);
    const uint32_t token = blockIdx.x / chunks;
    const int head = (blockIdx.x - token * chunks) * HEADS_PER_BLOCK + threadIdx.x / LANES;
    return Head{token, head, static_cast<int>(threadIdx.x % LANES), head < num_heads};
}

// Rotates the lane's eight pairs of the second part.
template <typename Params>
DEVICE void turn(const Params& params, const Head& at, Row& x) {
    Rotation rotations[SPAN / 2];
    load_rotations(params, at.token, at.lane * (SPAN / 2), rotations);
    UNROLL
    for (int i = 0; i < SPAN / 2; ++i) rotate(rotations[i], x[TURNED_PART][2 * i], x[TURNED_PART][2 * i + 1]);
}

template <bool WIDE>
DEVICE void query(const IndexerQueryParams& params) {
    const Head at = head_of_lane(params.num_heads);
    Row x = {};
    if (at.exists) {
        load_row<WIDE>(params.q + at.token * params.q_token_stride + at.head * params.q_head_stride, at.lane, x);
        turn(params, at, x);
    }
    round_to_bf16(x);
    transform(x, at.lane);
    const Rounded rounded = round_to_bf16(x);
    uint8_t* const codes = params.codes + at.token * params.codes_token_stride + at.head * params.codes_head_stride;
    uint8_t scale = 127;  // 1
    if constexpr (STORED == 1) {
        uint8_t* const scales = params.scale_bytes + (at.token * params.num_heads + at.head) * E2M1_GROUPS;
        store_e2m1<WIDE>(codes, scales, at.lane, at.exists, rounded);
    }
    if constexpr (STORED == 2) scale = store_e4m3<WIDE>(codes, at.lane, at.exists, x, rounded);
    if (!at.exists) return;
    if constexpr (STORED == 0)
        store_row<WIDE>(params.y + at.token * params.y_token_stride + at.head * params.y_head_stride, at.lane, x);
    if (at.lane == 0) {
        const float weight = Element<WEIGHT>::load(params.weights + at.token * params.weights_token_stride + at.head);
        const float scaled = __fmul_rn(weight, params.weights_scale);
        params.w[at.token * params.w_token_stride + at.head] = __fmul_rn(scaled, e8m0_to_float(scale));
    }
}

template <bool WIDE>
DEVICE void query_backward(const IndexerQueryBackwardParams& params) {
    const Head at = head_of_lane(params.num_heads);
    Row x = {};
    if (at.exists)
        load_row<WIDE>(params.dy + at.token * params.dy_token_stride + at.head * params.dy_head_stride, at.lane, x);
    transform(x, at.lane);
    if (!at.exists) return;
    turn(params, at, x);
    store_row<WIDE>(params.dq + at.token * params.dq_token_stride + at.head * params.dq_head_stride, at.lane, x);
    if (at.lane == 0) {
        const float dw = params.dw[at.token * params.dw_token_stride + at.head];
        WEIGHT* const dweight = params.dweights + at.token * params.dweights_token_stride + at.head;
        Element<WEIGHT>::store(dweight, __fmul_rn(dw, params.weights_scale));
    }
}

KERNEL(indexer_query_vector, IndexerQueryParams, THREADS) { query<true>(params); }
KERNEL(indexer_query_scalar, IndexerQueryParams, THREADS) { query<false>(params); }
KERNEL(indexer_query_backward_vector, IndexerQueryBackwardParams, THREADS) { query_backward<true>(params); }
KERNEL(indexer_query_backward_scalar, IndexerQueryBackwardParams, THREADS) { query_backward<false>(params); }
