// Norm, rotation, quantization and paged cache write of the rows of K = V after their projection,
// in one pass (inference 3, 4, 5.1, 5.4, 8.3, 13.2). With the mean over the channels of a row,
//
//     n     = weight x / sqrt(mean(x^2) + eps)                    in bf16
//     r     = n with its last ROPE_DIM channels rotated by the position of token t, in bf16
//     codes, scales = those of kv_cache_write.cu for r's first NOPE_DIM channels, in groups of 64
//     row   = cache[slots[t]] = codes, r's other channels, scales; untouched if slot is invalid
//     y     = what the row decodes to: bf16(value(code) s), and the other channels of r
//
// A prefill attends to y, later tokens to the cache: both hold the same values. y is written for
// every token, whatever its slot; slots must be distinct. A group with a NaN or an infinity has
// the scale 255, codes of NaN and NaN in y. A position outside the table makes the rotated
// channels NaN.
//
// Work: a warp takes a token, a lane two accesses of eight channels, so a group is eight
// neighbouring lanes and no shared memory is used. A lane stores eight codes at a time; one of
// eight lanes stores a scale, or the 0 that pads.
//
// Floor: 2 HEAD_DIM bytes read, as many written and DATA_BYTES + SCALE_BYTES (1024, 1024 and 584
// in the model's format): 65536 tokens are 41 us at 4.24 TB/s. Measured on one H200: 56.3 us (79
// %). What limits it: waits for memory in sequence.
// Defines: ELEMENT bf16, the type of x and y; NOPE_DIM, e4m3 channels, a multiple of 64, not 0;
// ROPE_DIM, rotated bf16 channels, a multiple of 8; together at most 512. Launch: ceil(num_tokens
// / WARPS) blocks. What was tried: kernels/docs/kv_norm_rope_write.md.
#include "channels.h"
#include "group_write.h"

#if !defined(NOPE_DIM) || !defined(ROPE_DIM)
#error "define NOPE_DIM and ROPE_DIM"
#endif

using Row = CacheRow<NOPE_DIM, ROPE_DIM>;
static_assert(VECTOR == LANE_CHANNELS && NOPE_DIM > 0 && Row::HEAD_DIM <= 512, "a lane has two accesses of a row");

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int LINE_FLOATS = 32;  // of an L2 access
constexpr int FEW_TOKENS = 1024;
static_assert(Channels<true>::PIECES * static_cast<int>(WARP_SIZE) * VECTOR == LARGEST_NOPE_DIM, "each scale has lanes, those that pad too");

struct KvNormRopeWriteParams {
    const ELEMENT* x; int64_t x_stride;  // [num_tokens, HEAD_DIM], 16-byte aligned rows
    const float* weight;                 // [HEAD_DIM]
    ELEMENT* y; int64_t y_stride;        // as x
    const int32_t* slots;                // [num_tokens]
    uint8_t* pages; int64_t pages_stride;  // [num_pages, page bytes], 16-byte aligned pages
    const float* cos; int64_t cos_stride;  // [table_rows, ROPE_DIM / 2]
    const float* sin; int64_t sin_stride;
    const int32_t* positions;              // [num_tokens], or nullptr
    int64_t table_rows;
    int32_t num_tokens, num_slots, page_size, head_dim, rope_dim;
    int32_t inverse;  // 0
    float eps;
};

// The rotations, in the form that rotation.h takes. The rotated channels and the direction are
// constants, so tests on them cost nothing.
struct RowRotations {
    static constexpr int32_t inverse = 0, head_dim = Row::HEAD_DIM, rope_dim = ROPE_DIM;
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const int32_t* positions;
    int64_t table_rows;
};
DEVICE RowRotations rotations_of(const KvNormRopeWriteParams& params) {
    return RowRotations{params.cos, params.cos_stride, params.sin, params.sin_stride, params.positions, params.table_rows};
}

// Prefetches to L2 what the norm and the rotation of a row need, while the row is in flight. With
// many tokens L2 holds it already.
DEVICE void prefetch_rest(const KvNormRopeWriteParams& params, int64_t token) {
    if (params.num_tokens > FEW_TOKENS) return;
    if (lane_id() * LINE_FLOATS < Row::HEAD_DIM) prefetch_second_level(params.weight + lane_id() * LINE_FLOATS);
    const RotationRows rows = rotation_rows(rotations_of(params), token, 0);
    if (rows.exist() && lane_id() * LINE_FLOATS < ROPE_DIM / 2) {
        prefetch_second_level(rows.cos + lane_id() * LINE_FLOATS);
        prefetch_second_level(rows.sin + lane_id() * LINE_FLOATS);
    }
}

// The norm of a row, and its rotation.
DEVICE void normalise_and_turn(const KvNormRopeWriteParams& params, int64_t token, Channels<true>& x) {
    const float rstd = rsqrt_approx(x.dot(x) / static_cast<float>(Row::HEAD_DIM) + params.eps);
    UNROLL
    for (int p = 0; p < Channels<true>::PIECES; ++p) {
        const int32_t channel = Channels<true>::first(p);
        if (channel >= Row::HEAD_DIM) continue;
        float weight[VECTOR];
        load_elements<VECTOR>(params.weight + channel, weight);
        UNROLL
        for (int e = 0; e < VECTOR; ++e) x.x[p][e] = weight[e] * (x.x[p][e] * rstd);
        round_to_bf16(x.x[p]);
        if (turn_channels(rotations_of(params), token, channel, x.x[p])) round_to_bf16(x.x[p]);
    }
}

KERNEL_OF(kv_norm_rope_write, KvNormRopeWriteParams, THREADS, 12) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * WARPS + warp_id();
    if (token >= params.num_tokens) return;
    const PagedRows<uint8_t> cache{params.pages, params.pages_stride, params.page_size, params.num_slots};
    const int32_t slot = params.slots[token];
    const bool wanted = cache.holds(slot);
    Channels<true> x;
    x.load(params.x + token * params.x_stride, Row::HEAD_DIM);
    prefetch_rest(params, token);
    normalise_and_turn(params, token, x);
    uint8_t* const data = cache.data<Row>(wanted ? slot : 0);
    uint8_t* const scales = cache.scales<Row>(wanted ? slot : 0);
    UNROLL
    for (int p = 0; p < Channels<true>::PIECES; ++p) {
        const int32_t channel = Channels<true>::first(p);
        Vec16 y = pack<ELEMENT>(x.x[p]);
        // y becomes what the codes decode to.
        write_group<Row>(x.x[p], y, channel, data, scales, wanted, [&](const uint32_t (&codes)[2], uint8_t scale) {
            UNROLL
            for (int i = 0; i < 2; ++i) e4m3x4_to_bf16(codes[i], e8m0_to_bf16(scale), y.w[2 * i], y.w[2 * i + 1]);
        });
        if (channel >= Row::HEAD_DIM) continue;
        if (wanted && channel >= NOPE_DIM) store_vec16(data + NOPE_DIM + 2 * (channel - NOPE_DIM), y);
        store_vec16_global(params.y + token * params.y_stride + channel, y);
    }
}
