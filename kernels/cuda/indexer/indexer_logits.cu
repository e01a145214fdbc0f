// Logits of the indexer (inference sections 7, 7.1; training section 1).
//
//     d[t,h,k]    = q[t,h] . k[k]                                head_dim 128, accumulated in fp32
//     logits[t,c] = sm_scale s[k] sum_h w[t,h] max(d[t,h,k], 0)  k = first(t) + c, c < length(t)
//
// Sums over heads are fp32; max keeps NaN. OPERANDS 1: q and k are e4m3, q's scale is folded into
// w, s is the key's scale; otherwise s = 1. OPERANDS 2: e2m1 with a power of two for each 32
// values, exact in bf16. A token scores the keys [first, first + length):
//   ranges   rows ks .. ke of k
//   causal   of its sequence the first clamp(floor((q_off + t + 1) / ratio), 0, keys), t within it
//   paged    the first context_lens[t] entries; entry i is row i % B of page block_table[i / B].
//            A page holds B rows and then their B scales
// Keys, pages and columns out of bounds are skipped. Columns from length(t) on and those of absent
// pages become -inf with clean logits. Otherwise they are not written and must not be read.
//
// Work division: a block takes TOKENS tokens with all heads and a piece of their keys, in tiles of
// 64. Keys are the rows of the MMA, heads its columns: sums over heads stay in registers up to the
// last step over four lanes. Operands pass through registers and become bf16.
//
// Floor, V token-key pairs: 2 num_heads 128 V FLOP, 4 bytes stored a logit, keys from L2 once a
// tile of tokens. 8192 queries, 64 heads, 2048 keys, ratio 4: 174 us at 790 TFLOP/s; one H200 755
// us. Limit: mma.sync with ldmatrix; where one token decodes, memory. Defines: OPERANDS 0 bf16, 1
// e4m3, 2 e2m1; HEADS 16, 32 or 64, those after num_heads add nothing.
// Launch: total_units<TOKENS> blocks in x. What was tried: kernels/docs/indexer_logits.md.
#include "indexer_logits.h"
#include "mma.h"

static_assert(HEADS == 16 || HEADS == 32 || HEADS == 64, "a block holds 16, 32 or 64 heads");

constexpr int TOKENS = 4, KEYS = 64, WARPS = 4, THREADS = WARPS * 32;
constexpr int STEPS = HEAD_DIM / 16;  // of a product
constexpr int Q_ROWS = TOKENS * HEADS;

struct Layout {
    static constexpr int KEY_BYTES = KEYS * 2 * HEAD_DIM;
    struct Plan {
        uint8_t q[Q_ROWS][2 * HEAD_DIM];
        uint8_t k[2][KEY_BYTES];  // two tiles
        float weights[TOKENS][HEADS];
    };
    static constexpr int Q = OFFSET_OF(Plan, q), K = OFFSET_OF(Plan, k), WEIGHTS = OFFSET_OF(Plan, weights);
    static constexpr int BYTES = sizeof(Plan);
};
SHARED_MEMORY(indexer_logits, Layout::BYTES)

// ---------------------------------------------------------------- loads of operands

constexpr int ROW_CHUNKS = ROW_BYTES / 16;
constexpr int CHUNK_NUMBERS = HEAD_DIM / ROW_CHUNKS;  // in 16 bytes

// 16 bytes of a row, and the scale of its values.
struct Chunk {
    Vec16 codes;
    float scale;
};

// Zeros where the row is absent.
DEVICE Chunk load_chunk(const uint8_t* row, const uint8_t* scales, int chunk) {
    if (!row) return Chunk{{{0, 0, 0, 0}}, 1.0f};
    const float scale = OPERANDS == E2M1 ? e8m0_to_float(scales[chunk * CHUNK_NUMBERS / GROUP]) : 1.0f;
    return Chunk{load_vec16_readonly(row + 16 * chunk), scale};
}

// Stores a chunk as bf16 to its position in an operand of `rows` rows.
DEVICE void store_chunk(SharedAddress operand, int rows, int row, int chunk, const Chunk& x) {
    const uint32_t(&w)[4] = x.codes.w;
    UNROLL
    for (int i = 0; i < CHUNK_NUMBERS / 8; ++i) {
        Vec16 numbers = x.codes;
        if constexpr (OPERANDS == E4M3) numbers = e4m3_as_bf16(w[2 * i], w[2 * i + 1]);
        if constexpr (OPERANDS == E2M1) numbers = e2m1_as_bf16(w[i], x.scale);
        store_shared_vec16(operand + bf16_offset(rows, row, chunk * CHUNK_NUMBERS / 8 + i), numbers);
    }
}

// Loads the heads of the work tile's tokens and their weights; absent ones are zeros.
DEVICE void load_queries(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, SharedAddress shared) {
    auto* weights = reinterpret_cast<float*>(dynamic_shared() + Layout::WEIGHTS);
    for (int i = threadIdx.x; i < Q_ROWS * ROW_CHUNKS; i += THREADS) {
        const int row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS, token = row / HEADS, head = row % HEADS;
        const int64_t at = unit.first_token + token;
        const bool exists = token < unit.count && head < params.num_heads;
        const uint8_t* source = exists ? params.q + at * params.q_token_stride + head * params.q_head_stride : nullptr;
        const uint8_t* scales = OPERANDS == E2M1 ? params.q_scale_bytes + (at * params.num_heads + head) * 4 : nullptr;
        store_chunk(shared + Layout::Q, Q_ROWS, row, chunk, load_chunk(source, scales, chunk));
        if (chunk == 0) weights[row] = exists ? load_weight(params, static_cast<int32_t>(at), head) : 0.0f;
    }
}

// This thread's part of a tile of keys.
struct KeyTile {
    static constexpr int LOADS = KEYS * ROW_CHUNKS / THREADS, ROW_STEP = THREADS / ROW_CHUNKS;
    Chunk chunks[LOADS];

    static int row(int i) { return static_cast<int>(threadIdx.x) / ROW_CHUNKS + i * ROW_STEP; }
    static int chunk() { return static_cast<int>(threadIdx.x) % ROW_CHUNKS; }

    void load(const IndexerLogitsParams& params, int32_t request, int32_t first) {
        UNROLL
        for (int i = 0; i < LOADS; ++i) {
            const int32_t position = first + row(i);
            const Key key = key_on(params, page_of(params, request, position), position);
            chunks[i] = load_chunk(key.row, key.scales, chunk());
        }
    }
    void store(SharedAddress tile) const {
        UNROLL
        for (int i = 0; i < LOADS; ++i) store_chunk(tile, KEYS, row(i), chunk(), chunks[i]);
    }
};

// ---------------------------------------------------------------- the logits of a tile

// d[n] = k q^T: this warp's 16 keys by the heads of one token.
DEVICE void multiply(float (&d)[HEADS / 8][4], const uint32_t (&keys)[STEPS][4], SharedAddress q, int first_row) {
    const int row = first_row + lane_id() % 8 + lane_id() / 16 * 8;
    UNROLL
    for (int step = 0; step < STEPS; ++step) {
        UNROLL
        for (int n = 0; n < HEADS / 8; n += 2) {
            uint32_t heads[4];
            ldmatrix_x4(heads, q + bf16_offset(Q_ROWS, row + 8 * n, 2 * step + lane_id() / 8 % 2));
            mma_bf16_16x8x16(d[n], keys[step], heads[0], heads[1]);
            mma_bf16_16x8x16(d[n + 1], keys[step], heads[2], heads[3]);
        }
    }
}

// The sum over the heads of the key that this lane keeps: row lane / 4 of the warp's, or 8 rows
// further with bit 1 of the lane.
DEVICE float sum_heads(const float (&d)[HEADS / 8][4], const float* weights, int num_heads) {
    float sums[2] = {0.0f, 0.0f}, kept[1];
    UNROLL
    for (int n = 0; n < HEADS / 8; ++n) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int head = 8 * n + lane_id() % 4 * 2 + i;
            UNROLL
            for (int half = 0; half < 2; ++half)
                sums[half] = add_head(sums[half], d[n][2 * half + i], weights[head], head < num_heads);
        }
    }
    add_halves(kept, sums, 2);
    return kept[0] + __shfl_xor_sync(FULL_WARP, kept[0], 1);
}

DEVICE void score_tile(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, SharedAddress shared,
                       SharedAddress tile, int32_t first) {
    const int lane = lane_id(), first_row = 16 * warp_id();
    uint32_t keys[STEPS][4];
    UNROLL
    for (int step = 0; step < STEPS; ++step)
        ldmatrix_x4(keys[step], tile + bf16_offset(KEYS, first_row + lane % 16, 2 * step + lane / 16));
    const int32_t position = first + first_row + lane / 4 + lane / 2 % 2 * 8;
    const int32_t page = page_of(params, unit.request, position);
    const float* scale = scale_on(params, page, position);
    const Factor factor{scale ? *scale : 1.0f, exists_on(params, page, position)};
    const auto* weights = reinterpret_cast<const float*>(dynamic_shared() + Layout::WEIGHTS);
    UNROLL
    for (int token = 0; token < TOKENS; ++token) {
        const KeyRange range = unit.ranges[token];
        if (first >= range.first + range.length || first + KEYS <= range.first) continue;
        float d[HEADS / 8][4] = {};
        multiply(d, keys, shared + Layout::Q, token * HEADS);
        const float sum = sum_heads(d, weights + token * HEADS, params.num_heads);
        float* row = params.logits + (unit.first_token + token) * params.logits_stride;
        if (lane % 2 == 0) store_logit(params, row, range, position, factor, sum);
    }
}

KERNEL(indexer_logits, IndexerLogitsParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const Unit<TOKENS> unit = unit_of<TOKENS>(params, blockIdx.x, KEYS);
    if (unit.begin < unit.end) {
        KeyTile keys;
        keys.load(params, unit.request, unit.first + unit.begin * KEYS);
        load_queries(params, unit, shared);
        for (int32_t tile = unit.begin; tile < unit.end; ++tile) {
            const SharedAddress at = shared + Layout::K + tile % 2 * Layout::KEY_BYTES;
            const int32_t first = unit.first + tile * KEYS;
            keys.store(at);
            // After this barrier all threads see the tile, and no thread reads the one before it
            // any more.
            __syncthreads();
            if (tile + 1 < unit.end) keys.load(params, unit.request, first + KEYS);
            score_tile(params, unit, shared, at, first);
        }
    }
    UNROLL
    for (int token = 0; token < TOKENS; ++token)
        if (token < unit.count && cleans(params))
            clean_row(params, unit.first_token + token, unit.ranges[token].length, unit.piece, threadIdx.x, THREADS);
}
