// Attention of 64 heads over tiles of rows by WGMMA, for sm_90a. sparse_attention_hopper.cu and
// decode_attention_hopper.cu share it; they differ in how rows are loaded and in what they store.
// Three warpgroups:
//   0, 1  consumers. Tiles of 64 slots go in pairs, the first to warpgroup 0, the next to 1. Each
//         computes the scores of its tile and the weights P. Warpgroup w keeps the columns
//         [256 w, 256 w + 256) of out of all 64 heads in registers. So it multiplies both P with
//         its half of the values: its own P from registers, the other's from shared memory.
//   2     producer: loads q, and rows of K into two tiles, completing on mbarriers.
//
// One running maximum passes through the tiles in order, so one warpgroup's softmax overlaps the
// other's MMA:
//
//   0: S0 = q K0^T, m0 = max(m, S0), P0 ->         out += P0 V0       (wait P1) out += P1 V1
//   1: S1 = q K1^T                   (wait P0) out += P0 V0 | m1 = max(m0, S1), P1 -> out += P1 V1
//
// A tile is filled and released in two parts, each released by the warpgroup that reads it last.
// Part 0 of tile w, the columns of V that warpgroup w owns, is released by w. Part 1, the other
// columns, is released by 1 - w. It reads them after P of tile w, so after the scores of tile w.
// With head_dim 576 the last 64 columns belong to part 1, and P overwrites them once the scores
// are done.
//
// The including file defines HEAD_DIM, 512 or 576; V is the first 512 columns of a row. What was
// tried: kernels/docs/sparse_attention.md.
#pragma once

#include "gather.h"
#include "hopper.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "panels.h"
#include "platform.h"

constexpr int CONSUMERS = 2 * WARPGROUP_SIZE;
constexpr int PRODUCERS = WARPGROUP_SIZE;
constexpr int THREADS = CONSUMERS + PRODUCERS;
constexpr int TILE_SLOTS = 64;
constexpr int HEADS = 64;  // the rows of a warpgroup's product
constexpr int MAX_SHARED_BYTES = 227 * 1024;

constexpr int VALUE_DIM = 512;
constexpr int PANELS = HEAD_DIM / 64;
constexpr int HALF_PANELS = VALUE_DIM / 64 / 2;  // panels of one warpgroup's half of the values
constexpr int TILE_BYTES = PANELS * PANEL_BYTES;
constexpr bool ROPE_PANEL = PANELS > 2 * HALF_PANELS;

struct Shared {
    static constexpr int STAGING_COLUMNS = ROPE_PANEL ? 32 : 64;
    static constexpr int STAGING_BYTES = 16 * STAGING_COLUMNS * 2;
    struct Plan {
        uint8_t q[TILE_BYTES];
        uint8_t keys[2][TILE_BYTES];
        [[no_unique_address]] Where<!ROPE_PANEL, uint8_t[2][PANEL_BYTES]> p;
        uint64_t valid[2];       // of each tile: a bit for each slot, set where it is valid
        float maxima[2][HEADS];  // after either tile of a pair
        float sums[2][2][HEADS];  // of this work and of the next, by each warpgroup
        // The staging of out on its way to memory: for each consumer warp 16 rows of some columns.
        // Where each P has its own panel, staging reuses the warp's own rows of P: once the sums
        // are ready no thread reads them, and only this warp writes them. (Another warp of the
        // warpgroup may already write the weights of the next work.)
        [[no_unique_address]] Where<ROPE_PANEL, uint8_t[2][4][STAGING_BYTES]> staging;
        uint64_t full[2][2];  // mbarriers [tile][part]
        uint64_t empty[2][2];
        uint64_t q_full;
        uint64_t q_empty;
        uint64_t weights_ready[2];  // mbarriers [tile]: its P and the maxima after it
        uint64_t sums_ready;
    };
    static constexpr int Q = OFFSET_OF(Plan, q), VALID = OFFSET_OF(Plan, valid), MAXIMA = OFFSET_OF(Plan, maxima);
    static constexpr int SUMS = OFFSET_OF(Plan, sums), SUMS_READY = OFFSET_OF(Plan, sums_ready);
    static constexpr int Q_FULL = OFFSET_OF(Plan, q_full), Q_EMPTY = OFFSET_OF(Plan, q_empty);
    static constexpr int BYTES = sizeof(Plan);

    static constexpr int keys(int tile) { return OFFSET_OF(Plan, keys) + tile * TILE_BYTES; }
    static constexpr int weights(int tile) {
        return ROPE_PANEL ? keys(tile) + (PANELS - 1) * PANEL_BYTES : OFFSET_OF(Plan, p) + tile * PANEL_BYTES;
    }
    static constexpr int staging(int warpgroup, int warp) {
        return ROPE_PANEL ? OFFSET_OF(Plan, staging) + (4 * warpgroup + warp) * STAGING_BYTES
                          : weights(warpgroup) + warp * STAGING_BYTES;
    }
    static constexpr int full(int tile, int part) { return OFFSET_OF(Plan, full) + 8 * (2 * tile + part); }
    static constexpr int empty(int tile, int part) { return OFFSET_OF(Plan, empty) + 8 * (2 * tile + part); }
    static constexpr int weights_ready(int tile) { return OFFSET_OF(Plan, weights_ready) + 8 * tile; }
    // First panel of a tile's part. The panel past the values belongs to part 1.
    static constexpr int first_panel(int tile, int part) { return (tile ^ part) * HALF_PANELS; }
};
static_assert(Shared::BYTES <= MAX_SHARED_BYTES, "tiles exceed shared memory");

// Named barriers, each among the threads of one warpgroup. Data from one warpgroup to another is
// ordered by mbarriers, at which every thread that wrote or read it arrives. The sanitizer's
// racecheck can follow this order too.
constexpr uint32_t scores_done(int warpgroup) { return 1 + warpgroup; }

// How often a buffer has been filled (producer) or read (consumer): the parity of its phase.
struct Uses {
    uint32_t tile[2] = {0, 0};
    uint32_t q = 0;
};

// Initializes all barriers. arrivals[tile][part] are those that fill a part.
DEVICE void initialise_barriers(SharedAddress shared, const uint32_t (&arrivals)[2][2]) {
    if (threadIdx.x == 0) {
        UNROLL
        for (int tile = 0; tile < 2; ++tile) {
            UNROLL
            for (int part = 0; part < 2; ++part) {
                mbarrier_init(shared + Shared::full(tile, part), arrivals[tile][part]);
                mbarrier_init(shared + Shared::empty(tile, part), WARPGROUP_SIZE / WARP_SIZE);
            }
            mbarrier_init(shared + Shared::weights_ready(tile), WARPGROUP_SIZE);
        }
        mbarrier_init(shared + Shared::Q_FULL, PRODUCERS);
        mbarrier_init(shared + Shared::Q_EMPTY, CONSUMERS / WARP_SIZE);
        mbarrier_init(shared + Shared::SUMS_READY, CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// A thread's number among the producers. The modulo shows its range to the compiler.
DEVICE int producer_thread() { return static_cast<int>(threadIdx.x % PRODUCERS); }

// ---------------------------------------------------------------- consumers

// What a consumer thread keeps: its two head rows (row, row + 8) of half of out, in 32 column
// tiles of 8.
struct Consumer {
    float out[32][4];
    float maximum[2];  // running, in base 2, without the sink; the same in the four lanes of a row
    float sum[2];      // of this lane's own slots of the warpgroup's own tiles
    int row;
};

// The lane that stores for a thread's rows.
DEVICE bool speaks() { return lane_id() % 4 == 0; }

// s += q K^T over PANEL_COUNT panels, starting at FIRST.
template <int FIRST, int PANEL_COUNT>
DEVICE void multiply_panels(float (&s)[8][4], uint64_t q, uint64_t keys, bool accumulate) {
    UNROLL
    for (int panel = FIRST; panel < FIRST + PANEL_COUNT; ++panel) {
        UNROLL
        for (int k = 0; k < 4; ++k) {
            const uint32_t at = panel * PANEL_BYTES + 32 * k;
            wgmma_shared<false, false>(s, descriptor_advance(q, at), descriptor_advance(keys, at),
                                       accumulate || panel > FIRST || k > 0);
        }
    }
}

// Scores of the warpgroup's own tile, part by part as they arrive.
template <int TILE>
DEVICE void score_tile(float (&s)[8][4], SharedAddress shared, uint32_t phase) {
    const uint64_t q = matrix_descriptor(shared + Shared::Q, 0, 1024);
    const uint64_t keys = matrix_descriptor(shared + Shared::keys(TILE), 0, 1024);
    mbarrier_wait(shared + Shared::full(TILE, 0), phase);
    fence_async_proxy();
    wgmma_fence();
    multiply_panels<Shared::first_panel(TILE, 0), HALF_PANELS>(s, q, keys, false);
    wgmma_commit();
    mbarrier_wait(shared + Shared::full(TILE, 1), phase);
    fence_async_proxy();
    wgmma_fence();  // behind the wait's branch: where the compiler has to put it itself, it may serialise the products
    multiply_panels<Shared::first_panel(TILE, 1), HALF_PANELS>(s, q, keys, true);
    if constexpr (ROPE_PANEL) multiply_panels<PANELS - 1, 1>(s, q, keys, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(s);
}

// Scores of invalid slots become -inf. `largest` is the largest of each row, as a base-2 logit.
template <int TILE>
DEVICE void mask_scores(float (&s)[8][4], float (&largest)[2], float scale_log2) {
    // Lane 0 reads for its warp, because it is the lane that releases the tile.
    uint64_t bits = 0;
    if (lane_id() == 0) bits = reinterpret_cast<const uint64_t*>(dynamic_shared() + Shared::VALID)[TILE];
    const int t = lane_id() % 4;
    const uint32_t valid[2] = {__shfl_sync(FULL_WARP, static_cast<uint32_t>(bits), 0) >> 2 * t,
                               __shfl_sync(FULL_WARP, static_cast<uint32_t>(bits >> 32), 0) >> 2 * t};
    largest[0] = largest[1] = -INFINITY_F32;
    UNROLL
    for (int n = 0; n < 8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
            if (!(valid[n / 4] >> (8 * (n % 4) + i % 2) & 1)) s[n][i] = -INFINITY_F32;
            largest[i / 2] = maximum_or_nan_f32(largest[i / 2], s[n][i]);
        }
    }
    UNROLL
    for (int half = 0; half < 2; ++half) {
        largest[half] = maximum_or_nan_f32(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 1));
        largest[half] = maximum_or_nan_f32(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 2)) * scale_log2;
    }
}

// Rescales the accumulators to another maximum.
DEVICE void rescale(Consumer& c, const float (&maximum)[2]) {
    float factor[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        factor[half] = exp2_approx(c.maximum[half] - subtrahend(maximum[half]));
        c.maximum[half] = maximum[half];
        c.sum[half] *= factor[half];
    }
    if (!__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) return;
    UNROLL
    for (int n = 0; n < 32; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) c.out[n][i] *= factor[i / 2];
}

// Weights exp2(scale s - maximum): in bf16 as A fragments and to the tile's P in shared memory, in
// fp32 to the sum.
template <int TILE>
DEVICE void write_weights(uint32_t (&p)[4][4], float (&sum)[2], const float (&s)[8][4], const float (&maximum)[2],
                          float scale_log2, int row, SharedAddress shared) {
    const int t = lane_id() % 4;
    const float shift[2] = {subtrahend(maximum[0]), subtrahend(maximum[1])};
    const SharedAddress panel = shared + Shared::weights(TILE);
    // A warp's wait covers only its own rows of the scores. Other warps may still read the panel
    // that P overwrites.
    if constexpr (ROPE_PANEL) named_barrier_sync(scores_done(TILE), WARPGROUP_SIZE);
    UNROLL
    for (int n = 0; n < 8; ++n) {
        float weight[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            weight[i] = exp2_approx(fused_multiply_add(s[n][i], scale_log2, -shift[i / 2]));
            sum[i / 2] += weight[i];
        }
        p[n / 2][n % 2 * 2] = pack_bf16(weight[0], weight[1]);
        p[n / 2][n % 2 * 2 + 1] = pack_bf16(weight[2], weight[3]);
        store_shared(panel + panel_offset(row, n) + 4 * t, p[n / 2][n % 2 * 2]);
        store_shared(panel + panel_offset(row + 8, n) + 4 * t, p[n / 2][n % 2 * 2 + 1]);
    }
    fence_async_proxy();
}

// The values of a tile that warpgroup W multiplies: 64 slots x its 256 columns.
template <int TILE, int W>
DEVICE uint64_t value_descriptor(SharedAddress shared) {
    return matrix_descriptor(shared + Shared::keys(TILE) + W * HALF_PANELS * PANEL_BYTES, PANEL_BYTES, 1024);
}

// out += P V with the warpgroup's own P.
template <int W>
DEVICE void add_own_values(Consumer& c, const uint32_t (&p)[4][4], SharedAddress shared) {
    const uint64_t values = value_descriptor<W, W>(shared);
    wgmma_hold(c.out);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < 4; ++k) wgmma_registers<true>(c.out, p[k], descriptor_advance(values, 2048 * k), true);
    wgmma_commit();
}

// out += P V of the other warpgroup's tile.
template <int W>
DEVICE void add_other_values(Consumer& c, SharedAddress shared) {
    const uint64_t weights = matrix_descriptor(shared + Shared::weights(1 - W), 0, 1024);
    const uint64_t values = value_descriptor<1 - W, W>(shared);
    wgmma_hold(c.out);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < 4; ++k)
        wgmma_shared<false, true>(c.out, descriptor_advance(weights, 32 * k), descriptor_advance(values, 2048 * k), true);
    wgmma_commit();
}

DEVICE void finish_values(Consumer& c, SharedAddress released) {
    wgmma_wait<0>();
    wgmma_hold(c.out);
    if (lane_id() == 0) mbarrier_arrive(released);
}

DEVICE void add_sum(Consumer& c, const float (&sum)[2]) {
    c.sum[0] += sum[0];
    c.sum[1] += sum[1];
}

DEVICE float* maxima(int tile) {
    return reinterpret_cast<float*>(dynamic_shared() + Shared::MAXIMA) + HEADS * tile;
}

// Takes the maximum of the warpgroup's own tile over all earlier tiles, and stores it for the
// other warpgroup.
template <int TILE>
DEVICE void carry_maximum(const Consumer& c, float (&maximum)[2]) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        maximum[half] = maximum_or_nan_f32(maximum[half], c.maximum[half]);
        if (speaks()) maxima(TILE)[c.row + 8 * half] = maximum[half];
    }
}

// Waits for the other warpgroup's weights, and rescales to its maximum.
template <int TILE>
DEVICE void await_weights(Consumer& c, SharedAddress shared, uint32_t phase) {
    mbarrier_wait(shared + Shared::weights_ready(TILE), phase);
    const float maximum[2] = {maxima(TILE)[c.row], maxima(TILE)[c.row + 8]};
    rescale(c, maximum);
}

// A pair of tiles: the parities of their phases, whether the second exists, whether this is the
// last read of q.
struct Pair {
    uint32_t phase[2];
    bool second;
    bool last;
};

DEVICE void release_q(SharedAddress shared, const Pair& pair) {
    // Lane 0 releases for its warp: a lane that has not yet seen q arrive would find the phase of
    // the next q.
    __syncwarp();
    if (pair.last && lane_id() == 0) mbarrier_arrive(shared + Shared::Q_EMPTY);
}

// Warpgroup 0's part of a pair.
DEVICE void consume_first(Consumer& c, SharedAddress shared, const Pair& pair, float scale_log2) {
    float s[8][4], maximum[2], sum[2] = {0.0f, 0.0f};
    uint32_t p[4][4];
    score_tile<0>(s, shared, pair.phase[0]);
    release_q(shared, pair);
    mask_scores<0>(s, maximum, scale_log2);
    carry_maximum<0>(c, maximum);
    write_weights<0>(p, sum, s, maximum, scale_log2, c.row, shared);
    mbarrier_arrive(shared + Shared::weights_ready(0));
    rescale(c, maximum);
    add_sum(c, sum);
    add_own_values<0>(c, p, shared);
    finish_values(c, shared + Shared::empty(0, 0));
    if (!pair.second) return;
    await_weights<1>(c, shared, pair.phase[1]);
    mbarrier_wait(shared + Shared::full(1, 1), pair.phase[1]);
    fence_async_proxy();
    add_other_values<0>(c, shared);
    finish_values(c, shared + Shared::empty(1, 1));
}

// Warpgroup 1's part.
DEVICE void consume_second(Consumer& c, SharedAddress shared, const Pair& pair, float scale_log2) {
    float s[8][4], maximum[2], sum[2] = {0.0f, 0.0f};
    uint32_t p[4][4];
    if (pair.second) {
        score_tile<1>(s, shared, pair.phase[1]);
        mask_scores<1>(s, maximum, scale_log2);
    }
    release_q(shared, pair);
    await_weights<0>(c, shared, pair.phase[0]);
    mbarrier_wait(shared + Shared::full(0, 1), pair.phase[0]);
    fence_async_proxy();
    add_other_values<1>(c, shared);
    if (pair.second) {
        // While the MMA runs, everything except out may be written.
        carry_maximum<1>(c, maximum);
        write_weights<1>(p, sum, s, maximum, scale_log2, c.row, shared);
        mbarrier_arrive(shared + Shared::weights_ready(1));
        finish_values(c, shared + Shared::empty(0, 1));
        rescale(c, maximum);
        add_sum(c, sum);
        add_own_values<1>(c, p, shared);
        finish_values(c, shared + Shared::empty(1, 0));
    } else {
        finish_values(c, shared + Shared::empty(0, 1));
    }
}

DEVICE void clear(Consumer& c) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        c.maximum[half] = -INFINITY_F32;
        c.sum[half] = 0.0f;
    }
    UNROLL
    for (int n = 0; n < 32; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) c.out[n][i] = 0.0f;
}

// All pairs of a list of tiles.
template <int W>
DEVICE void consume_tiles(Consumer& c, SharedAddress shared, Uses& uses, int tiles, float scale_log2) {
    if (tiles > 0) {
        mbarrier_wait(shared + Shared::Q_FULL, uses.q++ & 1);
        fence_async_proxy();
    }
    for (int tile = 0; tile < tiles; tile += 2) {
        const Pair pair{{uses.tile[0] & 1, uses.tile[1] & 1}, tile + 1 < tiles, tile + 2 >= tiles};
        const SharedAddress base = recomputed(shared);
        if constexpr (W == 0) consume_first(c, base, pair, scale_log2);
        else consume_second(c, base, pair, scale_log2);
        ++uses.tile[0];
        uses.tile[1] += pair.second;
    }
}

// ---------------------------------------------------------------- end of a list

// The sums of this thread's two rows over lanes and warpgroups. `turn` is the block's work number.
template <int W>
DEVICE void total_sums(float (&total)[2], const Consumer& c, SharedAddress shared, uint32_t turn) {
    // Double-buffered: one warpgroup may write the next work's sums while the other still reads
    // these.
    auto* sums = reinterpret_cast<float*>(dynamic_shared() + Shared::SUMS) + turn % 2 * 128;
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float sum = c.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (speaks()) sums[64 * W + c.row + 8 * half] = sum;
    }
    mbarrier_arrive(shared + Shared::SUMS_READY);
    mbarrier_wait(shared + Shared::SUMS_READY, turn & 1);
    UNROLL
    for (int half = 0; half < 2; ++half) total[half] = sums[c.row + 8 * half] + sums[64 + c.row + 8 * half];
}

// Stores the warp's 16 rows of its half of out, each times its factor, STAGING_COLUMNS at a time.
// They go through the warp's own staging in shared memory, so that rows are written in pieces of
// 128 bytes (64 with the smaller staging). `out` is the block's first head. Absent heads are
// skipped.
template <int W>
DEVICE void store_out(const Consumer& c, const float (&factor)[2], bf16* out, int64_t head_stride, int heads,
                      SharedAddress shared) {
    constexpr int CHUNKS = Shared::STAGING_COLUMNS / 8, ROWS_AT_ONCE = WARP_SIZE / CHUNKS;
    const int g = lane_id() / 4, t = lane_id() % 4, warp = warp_id() % 4;
    const SharedAddress staging = shared + Shared::staging(W, warp);
    // Swizzled against bank conflicts of writes and of reads. (With four chunks a row, two rows
    // use all banks.)
    const auto place = [&](int row, int chunk) {
        return staging + 16 * (row * CHUNKS + (chunk ^ (CHUNKS == 8 ? row & 7 : row / 2 & 3)));
    };
    UNROLL
    for (int n = 0; n < 32; n += CHUNKS) {
        UNROLL
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const float(&o)[4] = c.out[n + chunk];
            store_shared(place(g, chunk) + 4 * t, pack_bf16(o[0] * factor[0], o[1] * factor[0]));
            store_shared(place(g + 8, chunk) + 4 * t, pack_bf16(o[2] * factor[1], o[3] * factor[1]));
        }
        __syncwarp();
        UNROLL
        for (int first = 0; first < 16; first += ROWS_AT_ONCE) {
            const int row = first + lane_id() / CHUNKS, chunk = lane_id() % CHUNKS, head = 16 * warp + row;
            const Vec16 v = load_shared_vec16(place(row, chunk));
            const int column = W * (VALUE_DIM / 2) + 8 * (n + chunk);
            if (head < heads) store_vec16_streaming(out + head * head_stride + column, v);
        }
        __syncwarp();
    }
}
