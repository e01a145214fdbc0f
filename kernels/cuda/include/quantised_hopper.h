// Products of FP8 operands by warpgroup matrix products of e4m3 (sm_90a): what linear_hopper.cu and
// grouped_linear_hopper.cu share. linear_quantised.cu has the formulas.
//
// Weights are the rows of a product and tokens its columns, so that few tokens leave the tensor cores little to do that
// nobody needs: a block takes 128 features by TOKENS tokens, and of k a part in stages of 128, one group of scales.
// Blocks take such units in turn. Three warpgroups:
//   0 and 1  consumers, 64 features each. Of each stage the products are accumulated from zero, multiplied by the
//            scales of their tokens and of the block of weights, and added to sums in fp32: the tensor cores keep 13
//            fraction bits (hopper.h), over the 128 numbers of a group and no more. While one promotes, the other's
//            products run.
//   2        producer: each of its warps brings every fourth stage, with cp.async in the swizzle that wgmma reads, and
//            its scales; the next unit's first stages while the last one's sums are stored.
//
// The including file is compiled with TOKENS, the columns of a product, defined as 64 or 128.
#pragma once

#include "async_copy.h"
#include "hopper.h"
#include "linear_quantised.h"
#include "panels.h"

static_assert(TOKENS == 64 || TOKENS == 128, "products have 64 or 128 columns");

constexpr int FEATURES = 128, GROUP = 128;
constexpr int CONSUMERS = 2, CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE, THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
constexpr int CONSUMER_FEATURES = FEATURES / CONSUMERS;
constexpr int PRODUCERS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int STAGES = 4;
static_assert(STAGES == PRODUCERS, "each warp of the producer has a stage of its own");

struct UnitShape {
    static constexpr int ROWS = TOKENS, COLUMNS = FEATURES, STAGE_DEPTH = GROUP;
};

// Where everything lies in dynamic shared memory.
struct Shared {
    static constexpr int W_BYTES = FEATURES * 128, STAGE_BYTES = W_BYTES + TOKENS * 128;
    static constexpr int SUMS = STAGES * STAGE_BYTES;              // float [CONSUMERS][TOKENS][SUM_STRIDE]
    static constexpr int SUM_STRIDE = CONSUMER_FEATURES + 4;
    static constexpr int SCALES = SUMS + CONSUMERS * TOKENS * SUM_STRIDE * 4;  // float [STAGES][TOKENS + 4]
    static constexpr int FULL = SCALES + STAGES * (TOKENS + 4) * 4;            // mbarriers [STAGES]
    static constexpr int EMPTY = FULL + 8 * STAGES;
    static constexpr int BYTES = EMPTY + 8 * STAGES;

    static constexpr int w(uint32_t stage) { return stage % STAGES * STAGE_BYTES; }
    static constexpr int x(uint32_t stage) { return w(stage) + W_BYTES; }
    static constexpr int full(uint32_t stage) { return FULL + 8 * (stage % STAGES); }
    static constexpr int empty(uint32_t stage) { return EMPTY + 8 * (stage % STAGES); }
};
static_assert(Shared::BYTES <= 227 * 1024, "stages exceed shared memory");

// Parity of the phase in which stage number n, counted over all units, has come.
DEVICE uint32_t stage_phase(uint32_t stage) { return stage / STAGES & 1; }

// Read from one lane, so that the compiler knows that a warp agrees. Where it may diverge, it serialises wgmma.
DEVICE int32_t uniform(int32_t x) { return __shfl_sync(FULL_WARP, x, 0); }

// The scales of a stage: of its tokens, and behind them of its block of weights.
DEVICE float* stage_scales(uint32_t stage) {
    return reinterpret_cast<float*>(dynamic_shared() + Shared::SCALES) + stage % STAGES * (TOKENS + 4);
}

// Of a product.
DEVICE int64_t units_of(const Result& result) {
    return ceil_div<int64_t>(result.rows, TOKENS) * ceil_div<int64_t>(result.columns, FEATURES) * result.splits;
}

// What a block computes next: a part of a product.
struct Unit {
    QuantisedProduct product;
    Part part;
};

// Units in the order in which blocks take them, as the functions below are given them:
//   int64_t count() const
//   Unit at(int64_t number) const
//
// Those of one product.
struct UnitsOfProduct {
    const QuantisedProduct& product;

    int64_t count() const { return units_of(product.result); }
    Unit at(int64_t number) const { return Unit{product, part_of<UnitShape>(product.result, number)}; }
};

DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + Shared::full(stage), 1);
            mbarrier_init(shared + Shared::empty(stage), CONSUMER_THREADS / WARP_SIZE);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

// ---------------------------------------------------------------- producer

// Starts the arrival of the numbers of a group of `ROWS` rows of codes, 128 bytes each, all of it by one warp: zeros
// where there are none.
template <int ROWS>
DEVICE void copy_rows(SharedAddress target, const uint8_t* codes, int64_t stride, int64_t first, int64_t extent,
                      int64_t begin, int64_t depth) {
    constexpr int STEP = WARP_SIZE / 8;
    const int chunk = lane_id() % 8, lane_row = lane_id() / 8;
    const bool has_chunk = begin + 16 * chunk < depth;
    const uint8_t* source = codes + (first + lane_row) * stride + begin + 16 * chunk;
    UNROLL_BY(8)
    for (int row = lane_row; row < ROWS; row += STEP, source += STEP * stride) {
        const bool wanted = has_chunk && first + row < extent;
        copy_async_16(target + panel_offset(row, chunk), wanted ? source : codes, wanted);
    }
}

DEVICE void produce_stage(const QuantisedProduct& product, const Part& part, int64_t group, SharedAddress shared,
                          uint32_t stage) {
    const int64_t begin = group * GROUP;
    const Scales &x_scales = product.x_scales, &w_scales = product.w_scales;
    const Result& result = product.result;
    copy_rows<FEATURES>(shared + Shared::w(stage), product.w, product.w_stride, part.column, result.columns, begin,
                        result.depth);
    copy_rows<TOKENS>(shared + Shared::x(stage), product.x, product.x_stride, part.row, result.rows, begin,
                      result.depth);
    float* const scales = stage_scales(stage);
    UNROLL
    for (int token = lane_id(); token < TOKENS; token += WARP_SIZE) {
        const int64_t row = part.row + token;
        scales[token] = row < result.rows ? scale_of_group(x_scales, row, static_cast<int32_t>(group)) : 0.0f;
    }
    if (lane_id() == 0) scales[TOKENS] = scale_of_group(w_scales, part.column / FEATURES, static_cast<int32_t>(group));
}

// Warp `warp` of the producer brings every fourth stage of all units.
template <typename Units>
DEVICE void produce(const Units& units, SharedAddress shared, uint32_t warp) {
    const int64_t count = units.count();
    uint32_t stage = 0;
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const Unit unit = units.at(number);
        const Part& part = unit.part;
        for (int64_t group = part.begin; group < part.end; ++group, ++stage) {
            if (stage % PRODUCERS != warp) continue;
            mbarrier_wait(shared + Shared::empty(stage), stage_phase(stage) ^ 1);
            produce_stage(unit.product, part, group, shared, stage);
            copy_commit();
            copy_wait<0>();
            // What this lane copied becomes visible to the products; then every lane's has.
            fence_async_proxy();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Shared::full(stage));
        }
    }
}

// ---------------------------------------------------------------- consumers

constexpr int N8 = TOKENS / 8;

// d = w x^T of one group, 64 features by all tokens.
DEVICE void multiply(float (&d)[N8][4], uint64_t w, uint64_t x) {
    wgmma_fence();
    UNROLL
    for (int step = 0; step < 4; ++step)
        wgmma_shared_e4m3(d, descriptor_advance(w, 32 * step), descriptor_advance(x, 32 * step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
}

// total += d times the scales of its tokens and of the weights.
DEVICE void promote(float (&total)[N8][4], const float (&d)[N8][4], const float* scales) {
    const float w_scale = scales[TOKENS];
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const float* const own = scales + 8 * n + lane_id() % 4 * 2;
        const float x_scale[2] = {own[0], own[1]};
        UNROLL
        for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(d[n][i] * x_scale[i % 2], w_scale, total[n][i]);
    }
}

// The sums of a unit, by way of shared memory, so that features lie side by side.
DEVICE void store_unit(const Result& result, const Part& part, uint32_t consumer, const float (&total)[N8][4]) {
    auto* const all = reinterpret_cast<float*>(dynamic_shared() + Shared::SUMS);
    float* const sums = all + consumer * TOKENS * Shared::SUM_STRIDE;
    const int lane = lane_id(), warp = warp_id() % 4, thread = static_cast<int>(threadIdx.x) % WARPGROUP_SIZE;
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i)
            sums[(8 * n + lane % 4 * 2 + i % 2) * Shared::SUM_STRIDE + 16 * warp + lane / 4 + i / 2 * 8] = total[n][i];
    }
    named_barrier_sync(1 + consumer, WARPGROUP_SIZE);
    constexpr int ROW_CHUNKS = CONSUMER_FEATURES / CHUNK;
    for (int i = thread; i < TOKENS * ROW_CHUNKS; i += WARPGROUP_SIZE) {
        const int64_t row = part.row + i / ROW_CHUNKS;
        const int64_t column = part.column + consumer * CONSUMER_FEATURES + i % ROW_CHUNKS * CHUNK;
        if (row >= result.rows || column >= result.columns) continue;
        float x[CHUNK];
        load_elements<CHUNK>(sums + i / ROW_CHUNKS * Shared::SUM_STRIDE + i % ROW_CHUNKS * CHUNK, x);
        store_chunk(result, part.split, row, column, x);
    }
    // The next unit's sums may take their place.
    named_barrier_sync(1 + consumer, WARPGROUP_SIZE);
}

template <typename Units>
DEVICE void consume(const Units& units, SharedAddress shared, uint32_t consumer) {
    const int64_t count = units.count();
    uint32_t stage = 0;
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const Unit unit = units.at(number);
        const Part& part = unit.part;
        const int32_t groups = uniform(static_cast<int32_t>(part.end - part.begin));
        float total[N8][4] = {};
        for (int32_t group = 0; group < groups; ++group, ++stage) {
            float d[N8][4];
            mbarrier_wait(shared + Shared::full(stage), stage_phase(stage));
            const SharedAddress w = shared + Shared::w(stage) + consumer * CONSUMER_FEATURES * 128;
            multiply(d, matrix_descriptor(w, 0, 1024), matrix_descriptor(shared + Shared::x(stage), 0, 1024));
            promote(total, d, stage_scales(stage));
            // Every lane has read its scales.
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Shared::empty(stage));
        }
        store_unit(unit.product.result, part, consumer, total);
    }
}

// What a block does, once its barriers are there: `before` is what its consumers do first.
template <typename Units, typename Before>
DEVICE void multiply_units(const Units& units, SharedAddress shared, const Before& before) {
    const int32_t warpgroup = uniform(warp_id() / 4);
    if (warpgroup == CONSUMERS) {
        registers_decrease<88>();
        produce(units, shared, uniform(warp_id() % 4));
    } else {
        registers_increase<208>();
        before();
        consume(units, shared, warpgroup);
    }
}
