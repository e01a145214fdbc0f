// The rows of K = V behind their projection, in one pass: normed, turned by position, quantised and written to the paged
// window cache (inference 3, 4, 5.1, 5.4, 8.3, 13.2). With the mean over the channels of a row,
//
//     n     = weight x / sqrt(mean(x^2) + eps)                         in bf16
//     r     = n with its last ROPE_DIM channels rotated by the position of token t, in bf16
//     codes, scales = those of kv_cache_write.cu for the first NOPE_DIM channels of r, in groups of 64
//     row   = cache[slots[t]] = codes, the other channels of r, scales; untouched where the slot is none of the cache
//     y     = what the row decodes to: bf16(value(code) s), and the other channels of r
//
// y is what a prefill attends to, the cache what later tokens do: both are the same numbers. y is written for every
// token, whatever its slot is; slots must be distinct. A group with a NaN or an infinity has the scale 255, codes of NaN
// and NaN in y. A position outside of the table makes NaN of the rotated channels.
//
// How the work is laid out. A warp takes a token, a lane two accesses of eight channels, so that a group is eight
// neighbouring lanes and nothing goes through shared memory; a lane stores eight codes at a time, and one of eight a
// scale, or the 0 that pads them.
//
// Floor: 2 HEAD_DIM bytes read, as many written and DATA_BYTES + SCALE_BYTES more (1024, 1024 and 584 in the model's
// format): at 4.24 TB/s 41 us for 65536 tokens, where the norm, the rotation and the write apart move 5.7 KB a token.
// On one H100 71.3 us for 65536 tokens (88 % of a copy), 6.4 for 4096 (61 %), 2.9 for 128 and 2.3 for one; since few tokens ask the
// second-level cache for weights and rotations while they wait for the row, 2.75 for 128. On one H200 56.3 us (79 %), 5.7 (49 %), 2.6
// and 2.1, with what turns known when it is compiled and rows decoded two channels at a time (56.8, 5.9, 2.75 and 2.2 before). ncu
// there (reports/h200/ncu.txt), 65536 tokens: DRAM at 64 %, 62 % of the issue slots taken, 52 % of a warp's time waiting for memory:
// for its row, for weights, for a position and then for the rotations of it. Tried there, in turn with 56.8 us and 2.75 of 128
// tokens: two tokens of a warp 59.2 and 3.7, four 70.8 and 6.2; rotations asked for with the row 57.2 and 2.8 (ten blocks a
// multiprocessor have room for them), positions 57.9 and 2.7; sixteen blocks of 32 registers 55.7 and 2.8.
//
// wq_a and wkv read the same h, and their weights may lie one behind the other, so that one product makes both outputs:
// this kernel takes x with any distance between rows of whole 16 bytes. That should pay for few tokens, where a product
// is bound by the bytes of its weights and a second launch costs about as much as the 512 rows of wkv; for many tokens it
// saves one of several readings of h, which the tiles of wq_a's columns make anyway. Not measured.
//
// Defines
//   ELEMENT   bf16, the type of x and y
//   NOPE_DIM  e4m3 channels, a multiple of 64, not 0
//   ROPE_DIM  bf16 channels, which turn: a multiple of 8; both together at most 512
//
// Launch: ceil(num_tokens / WARPS) blocks.
#include "channels.h"
#include "kv_cache.h"
#include "quantise.h"

#if !defined(NOPE_DIM) || !defined(ROPE_DIM)
#error "define NOPE_DIM and ROPE_DIM"
#endif

using Row = CacheRow<NOPE_DIM, ROPE_DIM>;
static_assert(NOPE_DIM > 0 && Row::HEAD_DIM <= 512, "a lane has two accesses of a row");

constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE;
constexpr int GROUP_LANES = SCALE_GROUP / VECTOR;
constexpr int LINE_FLOATS = 32;  // of an access of the second-level cache
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
PARAMS_LAYOUT(KvNormRopeWriteParams, x, x_stride, weight, y, y_stride, slots, pages, pages_stride, cos, cos_stride, sin,
              sin_stride, positions, table_rows, num_tokens, num_slots, page_size, head_dim, rope_dim, inverse, eps)

// As rotation.h takes it: which channels turn, and that they turn forwards, is known here, and costs nothing where it is asked.
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

// Asks the second-level cache for what the norm and the rotation of a row need, while the row itself is waited for. Of many tokens
// it has them.
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

// The codes of eight channels, and in y, which has the channels, what they decode to; stored, with the scale of their group, where
// the row is wanted. All lanes take part.
DEVICE void write_group(const float (&x)[VECTOR], int32_t channel, uint8_t* data, uint8_t* scales, bool wanted, Vec16& y) {
    const bool exists = channel < NOPE_DIM;
    const uint8_t scale = group_scale(largest(largest_magnitude(y), GROUP_LANES), E4M3_FLOOR, 1.0f / 448.0f);
    if (wanted && lane_id() % GROUP_LANES == 0) scales[channel / SCALE_GROUP] = exists ? scale : 0;
    if (!exists) return;
    uint32_t codes[VECTOR / 4];
    e4m3_codes(x, inverse_of_scale(scale), codes);
    if (wanted) store_words<true>(data + channel, codes);
    UNROLL
    for (int i = 0; i < 2; ++i) e4m3x4_to_bf16(codes[i], e8m0_to_bf16(scale), y.w[2 * i], y.w[2 * i + 1]);
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
        write_group(x.x[p], channel, data, scales, wanted, y);
        if (channel >= Row::HEAD_DIM) continue;
        if (wanted && channel >= NOPE_DIM) store_vec16(data + NOPE_DIM + 2 * (channel - NOPE_DIM), y);
        store_vec16_global(params.y + token * params.y_stride + channel, y);
    }
}
