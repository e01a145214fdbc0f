// Shared by the two implementations of score_recompute: parameters, the loads of q and keys to
// shared memory, and the epilogue of a tile's scores. They differ in their MMAs.
// score_recompute.cu has the formulas.
//
// The including file is compiled with HEAD_DIM, HEADS and SELECTED defined, and it defines
// for_each_tile.
#pragma once

#include "async_copy.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "panels.h"
#include "platform.h"
#include "ranking.h"

// ---------------------------------------------------------------- shapes of the block's tiles

// Panels as in panels.h, of as many rows as heads, or keys in a tile.
constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;
constexpr int PANEL_CHUNKS = PANEL_COLUMNS / 8;
constexpr int PANELS = ceil_div(HEAD_DIM, PANEL_COLUMNS);
constexpr int panel_bytes(int rows) { return rows * PANEL_ROW_BYTES; }

constexpr int MAX_SHARED_BYTES = 227 * 1024;
constexpr int HALF_SHARED_BYTES = 113 * 1024;  // what a block may have where two share an SM
constexpr int MAX_STAGES = 5;
constexpr int Q_BYTES = PANELS * panel_bytes(HEADS);
// Flags and totals, next to q, the stages and the partial sums.
constexpr int SMALL_BYTES = 1024;

// A block's threads, the keys of its tiles, and its dynamic shared memory. PARTIALS are sums over
// some of the heads of each key, for other warps to add up.
template <int BLOCK_WARPS, int TILE_KEYS, int PARTIALS, int BLOCK_BYTES>
struct BlockLayout {
    static constexpr int WARPS = BLOCK_WARPS;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int KEYS = TILE_KEYS;
    static constexpr int STAGE_BYTES = panel_bytes(KEYS);
    static constexpr int STAGES =
        minimum(MAX_STAGES, (BLOCK_BYTES - Q_BYTES - SMALL_BYTES - PARTIALS * KEYS * 4) / STAGE_BYTES);
    static_assert(STAGES >= 3, "three stages fit");

    struct Plan {
        uint8_t q[Q_BYTES];
        uint8_t stages[STAGES][STAGE_BYTES];
        uint8_t valid[STAGES][KEYS];  // which slots of a tile count
        float totals[2][WARPS];
        [[no_unique_address]] Where<(PARTIALS > 0), float[maximum(PARTIALS, 1)][KEYS]> partial;
    };
    static constexpr int Q = OFFSET_OF(Plan, q), STAGE = OFFSET_OF(Plan, stages), VALID = OFFSET_OF(Plan, valid);
    static constexpr int TOTALS = OFFSET_OF(Plan, totals), PARTIAL = OFFSET_OF(Plan, partial);
    static constexpr int BYTES = sizeof(Plan);
    static_assert(BYTES <= BLOCK_BYTES, "tiles exceed shared memory");
};

// Further from 1 than 2^+-64, exponents are taken relative to the row's largest.
constexpr float LARGEST_EXPONENT = 64.0f;

// ---------------------------------------------------------------- parameters

// scores: [num_tokens, columns], the target (SELECTED) or A. l1 and shift: [num_tokens], null with
// SELECTED. lse is [num_tokens, num_heads]. Strides in elements; base and strides of q and k are
// multiples of 16 bytes. sink, topk_length, q_off, and cu_q with cu_k may be null. indices,
// topk_length and indices_global belong to SELECTED 1, q_off and ratio to SELECTED 0.
struct ScoreRecomputeParams {
    const bf16* q;
    int64_t q_token_stride;
    int64_t q_head_stride;
    const bf16* k;
    int64_t k_stride;
    const float* lse;
    const float* sink;
    const int32_t* indices;
    int64_t indices_stride;
    const int32_t* topk_length;
    const int32_t* cu_q;
    const int32_t* cu_k;
    const int32_t* q_off;
    float* scores;
    int64_t scores_stride;
    float* l1;
    float* shift;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_keys;
    int32_t columns;
    int32_t num_sequences;
    int32_t ratio;
    int32_t indices_global;
    float softmax_scale;
};

// ---------------------------------------------------------------- loads of panels

// This block's heads of one token.
struct Queries {
    const bf16* q;
    int64_t head_stride;
    int32_t heads;  // real heads
};

// Starts the loads of one panel after the other: all panels of tile 0, of tile 1, ...
template <typename Layout>
struct Loader {
    static constexpr int KEYS = Layout::KEYS, STAGES = Layout::STAGES;
    static constexpr int ROW_STEP = Layout::THREADS / PANEL_CHUNKS;
    static constexpr int ROWS = KEYS / ROW_STEP;  // rows of a panel of which this thread copies a chunk

    int tile = 0, panel = 0, stage = 0, flags = 0;
    int32_t indices[ROWS];   // of the tile whose first panel starts next, as stored
    const bf16* from[ROWS];  // this thread's columns of the next panel of `tile`
    bool wanted[ROWS];       // false for a row of zeros, for which no source address is formed

    int row(int i) const { return static_cast<int>(threadIdx.x) / PANEL_CHUNKS + i * ROW_STEP; }
    int chunk() const { return static_cast<int>(threadIdx.x) % PANEL_CHUNKS; }

    // The stored indices of a tile.
    void look_up(const Ranking& list, int of_tile) {
        UNROLL
        for (int i = 0; i < ROWS; ++i) indices[i] = list.stored_index(of_tile * KEYS + row(i));
    }

    // Once for a tile: finding addresses for each panel takes longer than its copies.
    void find_rows(const Ranking& list, const bf16* k, int64_t k_stride) {
        uint8_t* valid = dynamic_shared() + Layout::VALID + flags * KEYS;
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
            const int32_t key = list.valid_row(indices[i]);
            wanted[i] = key >= 0;
            from[i] = k + (wanted[i] ? key * k_stride : 0) + chunk() * 8;
            if (chunk() == 0) valid[row(i)] = wanted[i];
        }
        flags = flags + 1 == STAGES ? 0 : flags + 1;
    }

    // Absent heads become zeros. Columns beyond HEAD_DIM are neither copied nor read.
    void start_queries(const Queries& queries, SharedAddress shared) const {
        const int column = panel * PANEL_COLUMNS + chunk() * 8;
        UNROLL
        for (int head = threadIdx.x / PANEL_CHUNKS; head < HEADS; head += ROW_STEP) {
            const bool wanted = head < queries.heads;
            const bf16* from = queries.q + (wanted ? head * queries.head_stride : 0) + column;
            const SharedAddress to = shared + Layout::Q + panel * panel_bytes(HEADS) + panel_offset(head, chunk());
            if (HEAD_DIM % PANEL_COLUMNS == 0 || column < HEAD_DIM) copy_async_16(to, from, wanted, evicted_first());
        }
    }

    void start_keys(SharedAddress shared) {
        const int column = panel * PANEL_COLUMNS + chunk() * 8;
        const SharedAddress panel_start = shared + Layout::STAGE + stage * Layout::STAGE_BYTES;
        UNROLL
        for (int i = 0; i < ROWS; ++i) {
            const SharedAddress to = panel_start + panel_offset(row(i), chunk());
            if (HEAD_DIM % PANEL_COLUMNS == 0 || column < HEAD_DIM)
                copy_async_16(to, from[i], wanted[i], evicted_last());
            from[i] += PANEL_COLUMNS;
        }
    }

    // One panel of keys, and in the first tile the same panel of q. After the last tile the group
    // is empty.
    void start(const Ranking& list, const Queries& queries, const bf16* k, int64_t k_stride, SharedAddress shared,
               int tiles, bool with_queries) {
        if (tile < tiles) {
            if (panel == 0) {
                find_rows(list, k, k_stride);
                look_up(list, tile + 1);  // the loads have the time of a whole tile
            }
            if (with_queries && tile == 0) start_queries(queries, shared);
            start_keys(shared);
            if (++panel == PANELS) {
                panel = 0;
                ++tile;
            }
        }
        copy_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// Which of a lane's slots first_slot + 8 n + 2 (lane % 4) + i of a tile count: bit 2 n + i.
template <typename Layout, int N8>
DEVICE uint32_t valid_slots(int flags, int first_slot) {
    const uint8_t* valid = dynamic_shared() + Layout::VALID + flags * Layout::KEYS + first_slot;
    const auto* pairs = reinterpret_cast<const uint16_t*>(valid) + lane_id() % 4;
    uint32_t bits = 0;
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const uint32_t pair = pairs[4 * n];
        bits |= ((pair | pair >> 7) & 3) << (2 * n);
    }
    return bits;
}

// Computes the scores of one tile after the other. `taker.take(s, tile, valid)` gets this lane's q
// . k and the bits of valid_slots. `taker.settle()` follows it after the next barrier.
template <typename Taker>
DEVICE void for_each_tile(const Ranking& list, const Queries& queries, const bf16* k, int64_t k_stride, int tiles,
                          bool with_queries, Taker& taker);

// ---------------------------------------------------------------- sums over the heads

// log2(2^a + 2^b), one of them finite. Only the smaller has the larger subtracted: inf - inf is
// never computed.
DEVICE float log2_add_exp2(float a, float b) {
    const float larger = maximum_or_nan_f32(a, b), smaller = minimum_f32(a, b);
    return larger + log2_approx(1.0f + exp2_approx(smaller - larger));
}

// A head's L in base 2; +inf where the head adds nothing. L of a sink of +inf, or above 2.36e38,
// leaves fp32 in base 2: it adds nothing either.
DEVICE float head_normaliser(const ScoreRecomputeParams& params, int32_t token, int head) {
    if (head >= params.num_heads) return INFINITY_F32;
    const float lse = params.lse[static_cast<int64_t>(token) * params.num_heads + head] * LOG2_E;
    if (is_infinite(lse)) return INFINITY_F32;
    return params.sink ? log2_add_exp2(lse, params.sink[head] * LOG2_E) : lse;
}

// Exchanges with the lane at this distance and adds: one of the two keeps the first half of the
// columns, the other the second.
template <int COLUMNS>
DEVICE void halve(float (&kept)[COLUMNS / 2], const float (&x)[COLUMNS], int distance) {
    const bool second = lane_id() & distance;
    UNROLL
    for (int i = 0; i < COLUMNS / 2; ++i) {
        const float own = second ? x[COLUMNS / 2 + i] : x[i], other = second ? x[i] : x[COLUMNS / 2 + i];
        kept[i] = own + __shfl_xor_sync(FULL_WARP, other, distance);
    }
}

// Sums COLUMNS values over the eight lanes that differ in lane / 4. A lane keeps COLUMNS / 8 of
// the sums, from COLUMNS / 8 * (lane / 4) on.
template <int COLUMNS>
DEVICE void reduce_scatter(float (&kept)[COLUMNS / 8], const float (&x)[COLUMNS]) {
    float halves[COLUMNS / 2], quarters[COLUMNS / 4];
    halve(halves, x, 16);
    halve(quarters, halves, 8);
    halve(kept, quarters, 4);
}

// A row of A, the constants of its exponentials, and this thread's part of it. A lane's scores
// s[m][n][2 half + i] are of the head first_head + 16 m + lane / 4 + 8 half, and of the lane's
// column 2 n + i.
template <int M_TILES, int N8>
struct RowSums {
    const ScoreRecomputeParams& params;
    int32_t token;
    float* row;                      // of scores
    float scale_log2;
    float added;                     // to every L: what the row's exponents are relative to
    float normaliser[M_TILES][2];    // L in base 2
    float l1 = 0.0f;                 // over this thread's slots
    float largest = -INFINITY_F32;   // exponent of this lane

    void prepare(int first_head) {
        const int head = first_head + lane_id() / 4;
        UNROLL
        for (int m = 0; m < M_TILES; ++m)
            UNROLL
            for (int half = 0; half < 2; ++half)
                normaliser[m][half] = head_normaliser(params, token, head + 16 * m + 8 * half) + added;
    }

    // The sum over this lane's heads of one of its columns. Masked as a whole: the row of zeros of
    // an invalid slot has the score 0, whose exponent may be anything.
    float column(const float (&s)[M_TILES][N8][4], int n, int i, bool valid) {
        float sum = 0.0f, highest = -INFINITY_F32;
        UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            UNROLL
            for (int half = 0; half < 2; ++half) {
                const float exponent = fused_multiply_add(s[m][n][2 * half + i], scale_log2, -normaliser[m][half]);
                highest = maximum_f32(highest, exponent);
                // A head that adds nothing adds nothing to infinities either: padding heads have
                // the score 0, and 0 times an infinite key is NaN.
                sum += normaliser[m][half] == INFINITY_F32 ? 0.0f : exp2_approx(exponent);
            }
        }
        largest = maximum_f32(largest, valid ? highest : -INFINITY_F32);
        return valid ? sum : 0.0f;
    }

    // Sums the warp's heads: this lane gets the columns that reduce_scatter leaves to it.
    void sum_heads(float (&kept)[N8 / 4], const float (&s)[M_TILES][N8][4], uint32_t valid) {
        float sums[2 * N8];
        UNROLL
        for (int n = 0; n < N8; ++n)
            UNROLL
            for (int i = 0; i < 2; ++i) sums[2 * n + i] = column(s, n, i, valid >> (2 * n + i) & 1);
        reduce_scatter(kept, sums);
    }

    void store(int slot, float sum) {
        l1 += sum;
        if (slot < params.columns) row[slot] = sum;
    }
};

// Over the block: the sum of l1 and the largest exponent, in every thread.
template <typename Layout>
DEVICE void reduce_totals(float& l1, float& largest) {
    constexpr int WARPS = Layout::WARPS;
    UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
        l1 += __shfl_xor_sync(FULL_WARP, l1, distance);
        largest = maximum_f32(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
    }
    auto* totals = reinterpret_cast<float*>(dynamic_shared() + Layout::TOTALS);
    if (lane_id() == 0) {
        totals[warp_id()] = l1;
        totals[WARPS + warp_id()] = largest;
    }
    __syncthreads();
    l1 = 0.0f;
    largest = -INFINITY_F32;
    UNROLL
    for (int w = 0; w < WARPS; ++w) {
        l1 += totals[w];
        largest = maximum_f32(largest, totals[WARPS + w]);
    }
}

// Whether fp32 would lose a row of these exponents.
DEVICE bool out_of_range(float largest) { return !is_infinite(largest) && absolute_f32(largest) > LARGEST_EXPONENT; }

// Computes this block's row of the target, or of A. In every tile the same thread of `Sums` stores
// slot own_slot().
template <typename Layout, typename Sums>
DEVICE void recompute_row(const ScoreRecomputeParams& params) {
    // Without lists later tokens see more keys: they go first.
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : params.num_tokens - 1 - blockIdx.x);
    const Ranking list = ranking(params, token, params.columns);
    const Queries queries{params.q + token * params.q_token_stride, params.q_head_stride, params.num_heads};
    const int tiles = ceil_div(list.length, Layout::KEYS);
    float* row = params.scores + token * params.scores_stride;

    float l1 = 0.0f, added = 0.0f;
    for (int pass = 0; pass < 2; ++pass) {
        Sums sums{{params, token, row, params.softmax_scale * LOG2_E, added}};
        for_each_tile(list, queries, params.k, params.k_stride, tiles, pass == 0, sums);
        l1 = sums.row.l1;
        float largest = sums.row.largest;
        reduce_totals<Layout>(l1, largest);
        if (pass == 1 || !out_of_range(largest)) break;
        added = largest;
        __syncthreads();  // everyone has read the totals
    }

    if (Sums::stores()) {
        // NaN stays: a row with an unknown sum has no known share.
        const float inverse = l1 == 0.0f ? 0.0f : 1.0f / l1;
        // This thread reads only what it stored itself.
        for (int slot = Sums::own_slot(); slot < params.columns; slot += Layout::KEYS) {
            if (slot >= tiles * Layout::KEYS) row[slot] = 0.0f;
            else if (SELECTED) row[slot] *= inverse;
        }
    }
    if (!SELECTED && threadIdx.x == 0) {
        params.l1[token] = l1;
        params.shift[token] = added * LN_2;
    }
}
