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
//            its scales; the next unit's first stages while the last one's sums are stored. A warp has two stages under
//            way: it hands one over when the copies of the next are on their way.
//
// Promotion. The product of a token's scale and the block's is made once a stage, by the producer, so that a consumer
// needs one fused multiplication and addition for each sum. Where it would leave the range of normal fp32 numbers for
// some token, a sum is multiplied by one scale after the other: a sum of a group may be normal where that product is not.
//
// What a stage of 128 features by 128 tokens takes of a multiprocessor: 512 cycles of products; 64 + some 50 instructions
// of each consumer warp and some 300 of one of the producer's, of 4 x 512 slots; of shared memory, at 128 bytes a cycle,
// 32 KB that arrive and 2 x (8 + 16) KB that the products read, 640 cycles. So shared memory is the bound, four fifths of
// the tensor cores' rate; wider tiles would read less, but 64 x 256 sums and as many accumulators fit no registers.
//
// Why cp.async: bulk copies without a tensor map bring contiguous bytes as they lie, and products need rows of 128 bytes
// swizzled; the emulator knows no tensor maps.
//
// The including file is compiled with TOKENS, the columns of a product, defined as 16, 64 or 128.
#pragma once

#include "async_copy.h"
#include "hopper.h"
#include "linear_quantised.h"
#include "panels.h"

static_assert(TOKENS == 16 || TOKENS == 64 || TOKENS == 128, "products have 16, 64 or 128 columns");

constexpr int FEATURES = 128, GROUP = 128;
constexpr int CONSUMERS = 2, CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE, THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
constexpr int CONSUMER_FEATURES = FEATURES / CONSUMERS;
constexpr int PRODUCERS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int STAGES = TOKENS == 128 ? 6 : 8;
// A warp of the producer waits for a stage's place while it still holds one that it has not handed over. What held that
// place is older than the one it holds, so that no two wait for each other.
static_assert(PRODUCERS < STAGES, "the place of a stage is taken by one that nobody hands over before");

struct UnitShape {
    static constexpr int ROWS = TOKENS, COLUMNS = FEATURES, STAGE_DEPTH = GROUP;
};

// The scales of a stage.
struct alignas(16) StageScales {
    float factors[TOKENS];  // x times w
    float x[TOKENS];
    float w;
    int32_t regular;  // whether all factors are what their scales multiply to
};

// Where everything lies in dynamic shared memory.
struct Shared {
    static constexpr int W_BYTES = FEATURES * 128, STAGE_BYTES = W_BYTES + TOKENS * 128;
    static constexpr int SUMS = STAGES * STAGE_BYTES;  // float [CONSUMERS][SUM_TOKENS][SUM_STRIDE]
    static constexpr int SUM_TOKENS = minimum(TOKENS, 32), SUM_STRIDE = CONSUMER_FEATURES + 4;
    static constexpr int SCALES = SUMS + CONSUMERS * SUM_TOKENS * SUM_STRIDE * 4;  // StageScales [STAGES]
    static constexpr int FULL = SCALES + STAGES * static_cast<int>(sizeof(StageScales));  // mbarriers [STAGES]
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

DEVICE StageScales& stage_scales(uint32_t stage) {
    return reinterpret_cast<StageScales*>(dynamic_shared() + Shared::SCALES)[stage % STAGES];
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
            mbarrier_init(shared + Shared::full(stage), WARP_SIZE);
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
    if (first + ROWS <= extent && begin + GROUP <= depth) {
        // Of every second of the lane's rows the chunk has the same place in the row.
        const SharedAddress places[2] = {target + panel_offset(lane_row, chunk),
                                         target + panel_offset(lane_row + STEP, chunk)};
        UNROLL
        for (int i = 0; i < ROWS / STEP; ++i, source += STEP * stride)
            copy_async_16(places[i % 2] + i / 2 * (2 * STEP * 128), source);
        return;
    }
    UNROLL_BY(8)
    for (int row = lane_row; row < ROWS; row += STEP, source += STEP * stride) {
        const bool wanted = has_chunk && first + row < extent;
        copy_async_16(target + panel_offset(row, chunk), wanted ? source : codes, wanted);
    }
}

DEVICE void produce_stage(const QuantisedProduct& product, const Part& part, int64_t group, SharedAddress shared,
                          uint32_t stage) {
    const int64_t begin = group * GROUP;
    const Result& result = product.result;
    copy_rows<FEATURES>(shared + Shared::w(stage), product.w, product.w_stride, part.column, result.columns, begin,
                        result.depth);
    copy_rows<TOKENS>(shared + Shared::x(stage), product.x, product.x_stride, part.row, result.rows, begin,
                      result.depth);
}

// Whether a product of scales is normal, or one of them 0.
DEVICE bool is_regular(float x_scale, float w_scale) {
    const uint32_t exponent = __float_as_uint(x_scale * w_scale) & 0x7f800000u;
    return x_scale == 0.0f || w_scale == 0.0f || (exponent != 0 && exponent != 0x7f800000u);
}

DEVICE void produce_scales(const QuantisedProduct& product, const Part& part, int32_t group, StageScales& scales) {
    const float w_scale = scale_of_group(product.w_scales, part.column / FEATURES, group);
    bool regular = true;
    UNROLL
    for (int token = lane_id(); token < TOKENS; token += WARP_SIZE) {
        const int64_t row = part.row + token;
        const float x_scale = row < product.result.rows ? scale_of_group(product.x_scales, row, group) : 0.0f;
        scales.factors[token] = x_scale * w_scale;
        scales.x[token] = x_scale;
        regular = regular && is_regular(x_scale, w_scale);
    }
    const bool irregular = __any_sync(FULL_WARP, !regular);
    if (lane_id() == 0) scales.w = w_scale, scales.regular = !irregular;
}

// Hands a stage over once this lane's copies have landed, but for those of the PENDING stages after it.
template <int PENDING>
DEVICE void hand_over(SharedAddress shared, uint32_t stage) {
    copy_wait<PENDING>();
    // What this lane copied becomes visible to the products.
    fence_async_proxy();
    mbarrier_arrive(shared + Shared::full(stage));
}

// Warp `warp` of the producer brings every fourth stage of all units.
template <typename Units>
DEVICE void produce(const Units& units, SharedAddress shared, uint32_t warp) {
    const int64_t count = units.count();
    uint32_t stage = 0;
    bool holds_one = false;
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const Unit unit = units.at(number);
        const Part& part = unit.part;
        for (int64_t group = part.begin; group < part.end; ++group, ++stage) {
            if (stage % PRODUCERS != warp) continue;
            mbarrier_wait(shared + Shared::empty(stage), stage_phase(stage) ^ 1);
            produce_stage(unit.product, part, group, shared, stage);
            copy_commit();
            produce_scales(unit.product, part, static_cast<int32_t>(group), stage_scales(stage));
            if (holds_one) hand_over<1>(shared, stage - PRODUCERS);
            holds_one = true;
        }
    }
    // The last of this warp's: `stage` is how many there were of all warps.
    if (holds_one) hand_over<0>(shared, stage - 1 - (stage - 1 - warp) % PRODUCERS);
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
DEVICE void promote(float (&total)[N8][4], const float (&d)[N8][4], const StageScales& scales) {
    const int token = lane_id() % 4 * 2;
    if (uniform(scales.regular)) {
        UNROLL
        for (int n = 0; n < N8; ++n) {
            float factor[2];
            load_elements(scales.factors + 8 * n + token, factor);
            UNROLL
            for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(d[n][i], factor[i % 2], total[n][i]);
        }
        return;
    }
    UNROLL
    for (int n = 0; n < N8; ++n) {
        float x_scale[2];
        load_elements(scales.x + 8 * n + token, x_scale);
        UNROLL
        for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(d[n][i] * x_scale[i % 2], scales.w, total[n][i]);
    }
}

// The sums of a unit, those of some tokens after the others, by way of shared memory, so that features lie side by side.
DEVICE void store_unit(const Result& result, const Part& part, uint32_t consumer, const float (&total)[N8][4]) {
    auto* const all = reinterpret_cast<float*>(dynamic_shared() + Shared::SUMS);
    float* const sums = all + consumer * Shared::SUM_TOKENS * Shared::SUM_STRIDE;
    const int lane = lane_id(), warp = warp_id() % 4, thread = static_cast<int>(threadIdx.x) % WARPGROUP_SIZE;
    constexpr int ROW_CHUNKS = CONSUMER_FEATURES / CHUNK;
    UNROLL
    for (int first = 0; first < TOKENS; first += Shared::SUM_TOKENS) {
        UNROLL
        for (int n = 0; n < Shared::SUM_TOKENS / 8; ++n) {
            float* const own = sums + (8 * n + lane % 4 * 2) * Shared::SUM_STRIDE + 16 * warp + lane / 4;
            UNROLL
            for (int i = 0; i < 4; ++i) own[i % 2 * Shared::SUM_STRIDE + i / 2 * 8] = total[first / 8 + n][i];
        }
        named_barrier_sync(1 + consumer, WARPGROUP_SIZE);
        for (int i = thread; i < Shared::SUM_TOKENS * ROW_CHUNKS; i += WARPGROUP_SIZE) {
            const int64_t row = part.row + first + i / ROW_CHUNKS;
            const int64_t column = part.column + consumer * CONSUMER_FEATURES + i % ROW_CHUNKS * CHUNK;
            if (row >= result.rows || column >= result.columns) continue;
            float x[CHUNK];
            load_elements<CHUNK>(sums + i / ROW_CHUNKS * Shared::SUM_STRIDE + i % ROW_CHUNKS * CHUNK, x);
            store_chunk(result, part.split, row, column, x);
        }
        // The next sums may take their place.
        named_barrier_sync(1 + consumer, WARPGROUP_SIZE);
    }
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
        registers_decrease<152>();
        produce(units, shared, uniform(warp_id() % 4));
    } else {
        // Of 168 registers a thread of the launch; the sums and accumulators of 128 tokens need 160.
        registers_increase<176>();
        before();
        consume(units, shared, warpgroup);
    }
}
