// The indexer's queries, from their projection to the operands of its logits, and the weights of its heads (inference
// 7, 7.1). Of each token t and head h, with C and S the cosines and sines of the token's position and e = 128 -
// rope_dim,
//
//     r            = q but for its last rope_dim channels, which turn in adjacent pairs and are rounded to bf16:
//     r[e + 2i]    = bf(fma(q[e + 2i], C[i], -fp32(q[e + 2i + 1] S[i])))
//     r[e + 2i+1]  = bf(fma(q[e + 2i], S[i],  fp32(q[e + 2i + 1] C[i])))
//     y            = Had(r)                                            as in hadamard.cu, rounded to bf16
//     w[t, h]      = weights[t, h] * head_scale                        head_scale = 128^-0.5 num_heads^-0.5
//
// STORED 0 writes y. 1 quantises it to e2m1 with a scale for each 32 channels, 2 to e4m3 with one power-of-two scale
// for each row, which multiplies w and is not stored: each scale counts once, in fp32. A position outside of the table
// gives NaN in what turns, so in all of y, in the codes and scales, and with e4m3 in w.
//
// Eight lanes take a row (a token's head), of which they hold 16 channels each, pairs whole; the rest is hadamard.cu's.
// Floor: 256 bytes read a row, and 256, 68 or 128 written, with 4 or 2 bytes of weight read and 4 written: for 4096
// tokens of 64 heads 86 MB and 20 us to e2m1, 101 MB and 24 us to e4m3, 136 MB and 32 us as bf16, at 4.24 TB/s. A
// rotation's row of tables serves 64 heads out of the first-level cache. Limited by memory, with hadamard.cu's shuffles
// close behind. To be measured.
//
// Defines: ELEMENT         bf16, the type of q and y
//          WEIGHT_ELEMENT  type of weights: bf16 or float
//          STORED          0, 1 or 2
// Launch: ceil(num_tokens * num_heads / ROWS_PER_BLOCK) blocks.
#include "element.h"
#include "elements.h"
#include "hadamard.h"
#include "rotation.h"

#if !defined(STORED) || !defined(WEIGHT_ELEMENT)
#error "define STORED as 0 (y), 1 (e2m1) or 2 (e4m3), and WEIGHT_ELEMENT"
#endif

constexpr int THREADS = 128;
constexpr int ROWS_PER_BLOCK = THREADS / LANES;

struct IndexerQueryParams {
    const ELEMENT* q; int64_t q_token_stride; int64_t q_head_stride;  // [num_tokens, num_heads, 128]; in elements
    const float* cos; int64_t cos_stride;  // [table_rows, rope_dim / 2]
    const float* sin; int64_t sin_stride;  // [table_rows, rope_dim / 2]
    const int32_t* positions;  // [num_tokens], or nullptr: token t uses row t
    const WEIGHT_ELEMENT* weights; int64_t weights_stride;  // [num_tokens, num_heads]
    ELEMENT* y; int64_t y_token_stride; int64_t y_head_stride;  // [num_tokens, num_heads, 128], or nullptr
    uint8_t* codes; int64_t codes_token_stride; int64_t codes_head_stride;  // [num_tokens, num_heads, 64 or 128]
    uint8_t* scale_bytes;  // [num_tokens, num_heads, 4] e8m0; both nullptr where there is y
    float* w; int64_t w_stride;  // [num_tokens, num_heads]
    int64_t num_rows;  // num_tokens * num_heads
    int64_t table_rows;
    int32_t num_heads;
    int32_t rope_dim;  // even, up to 128
    float head_scale;
};
PARAMS_LAYOUT(IndexerQueryParams, q, q_token_stride, q_head_stride, cos, cos_stride, sin, sin_stride, positions,
              weights, weights_stride, y, y_token_stride, y_head_stride, codes, codes_token_stride, codes_head_stride,
              scale_bytes, w, w_stride, num_rows, table_rows, num_heads, rope_dim, head_scale)

// The first channel of one of the lane's parts of a row.
DEVICE int first_channel(int part, int lane) { return (part * LANES + lane) * VECTOR; }

// Turns the pairs of the lane's channels that turn. A position outside of the table reads nothing.
DEVICE void rotate_row(const IndexerQueryParams& params, int64_t token, int lane, Row& x) {
    const int64_t position = params.positions ? params.positions[token] : token;
    const bool inside = position >= 0 && position < params.table_rows;
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int i = 0; i < VECTOR; i += 2) {
            const int turning = first_channel(part, lane) + i - (DIM - params.rope_dim);
            if (turning < 0) continue;
            Rotation by{NAN_F32, NAN_F32};
            if (inside) {
                by.cos = params.cos[position * params.cos_stride + turning / 2];
                by.sin = params.sin[position * params.sin_stride + turning / 2];
            }
            rotate(by, x[part][i], x[part][i + 1]);
            x[part][i] = to_float(to_bf16(x[part][i]));
            x[part][i + 1] = to_float(to_bf16(x[part][i + 1]));
        }
    }
}

template <bool WIDE>
DEVICE void query_row(const IndexerQueryParams& params) {
    constexpr int COUNT = WIDE ? VECTOR : 1;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    // A row that is not there is a row of zeros: its lanes take part in the shuffles of their warp.
    const bool exists = row < params.num_rows;
    const int64_t token = row / params.num_heads, head = row - token * params.num_heads;
    Row x = {};
    if (exists) {
        const ELEMENT* q = params.q + token * params.q_token_stride + head * params.q_head_stride;
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
            const ELEMENT* from = q + first_channel(part, lane);
            UNROLL
            for (int i = 0; i < VECTOR; i += COUNT)
                load_elements<COUNT>(from + i, *reinterpret_cast<float(*)[COUNT]>(&x[part][i]));
        }
        rotate_row(params, token, lane, x);
    }
    transform(x, lane);
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        UNROLL
        for (int i = 0; i < VECTOR; ++i) x[part][i] = to_float(to_bf16(x[part][i]));
    }
    float scale_of_row = 1.0f;
    if constexpr (STORED == 0) {
        ELEMENT* y = params.y + token * params.y_token_stride + head * params.y_head_stride;
        for (int part = 0; part < PARTS && exists; ++part) {
            ELEMENT* to = y + first_channel(part, lane);
            UNROLL
            for (int i = 0; i < VECTOR; i += COUNT)
                store_elements(to + i, *reinterpret_cast<const float(*)[COUNT]>(&x[part][i]));
        }
    } else {
        uint8_t* codes = params.codes + token * params.codes_token_stride + head * params.codes_head_stride;
        if constexpr (STORED == 1) store_e2m1<WIDE>(codes, params.scale_bytes + row * E2M1_GROUPS, lane, exists, x);
        else scale_of_row = e8m0_to_float(store_e4m3<WIDE>(codes, lane, exists, x));
    }
    if (exists && lane == 0) {
        const float weight = Element<WEIGHT_ELEMENT>::load(params.weights + token * params.weights_stride + head);
        params.w[token * params.w_stride + head] = __fmul_rn(__fmul_rn(weight, params.head_scale), scale_of_row);
    }
}

KERNEL(indexer_query_vector, IndexerQueryParams, THREADS) { query_row<true>(params); }
KERNEL(indexer_query_scalar, IndexerQueryParams, THREADS) { query_row<false>(params); }
