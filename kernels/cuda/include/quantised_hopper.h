// Products of FP8 operands by warpgroup matrix products of e4m3 (sm_90a), for few tokens: what linear_hopper.cu and
// grouped_linear_hopper.cu share. linear_quantised.cu has the formulas; quantised_hopper_large.h is for many tokens, but for
// MXFP4, whose products of many tokens are here, too.
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
// Measured on one H200 a stage of 128 tokens takes some 1,900 cycles, three times that: the producer's copies of 16 bytes,
// 64 for each lane of one warp a stage, are what limits it. Copies of boxes in their place take 1,000 (the other header).
//
// Why cp.async: few tokens wait for memory, of which it brings enough, and takes any rows at multiples of 16 bytes.
//
// MXFP4. Hopper has no products of e2m1. The weights of a stage are folded (inference 5.5): with S the largest scale of the
// block of 128 x 128 over 64, an e2m1 number times its scale over S is a number of e4m3, and S takes the place of FP8's
// scale of the block. That is exact where the scales of a block are at most 2^14 apart and none is 2^126 or more (products
// with those may be infinite in bf16). For any other block the consumers add products in fp32, number by number: right,
// and a hundred times as slow, for weights that no quantiser makes. The producer reads codes and scales into registers and
// stores e4m3 codes where cp.async would have put them: of weights only half the bytes of FP8 come from memory.
//
// The including file is compiled with TOKENS, the columns of a product, defined as 16, 64 or 128, and WEIGHTS as 1 (FP8)
// or 2 (MXFP4, with a scale for each 128 numbers of x).
#pragma once

#include "async_copy.h"
#include "codes.h"
#include "hopper.h"
#include "linear_quantised.h"
#include "panels.h"

static_assert(TOKENS == 16 || TOKENS == 64 || TOKENS == 128, "products have 16, 64 or 128 columns");

static_assert(WEIGHTS == 1 || WEIGHTS == 2, "weights are FP8 or MXFP4");

constexpr bool MXFP4 = WEIGHTS == 2;
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
    int32_t folded;   // of MXFP4: whether the weights of the stage are
    uint32_t w_words[MXFP4 ? FEATURES : 1];  // of MXFP4: the scales of the rows of w, a byte for each 32 numbers
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
    if constexpr (!MXFP4)
        copy_rows<FEATURES>(shared + Shared::w(stage), product.w, product.w_stride, part.column, result.columns, begin,
                            result.depth);
    copy_rows<TOKENS>(shared + Shared::x(stage), product.x, product.x_stride, part.row, result.rows, begin,
                      result.depth);
}

DEVICE void produce_scales(const QuantisedProduct& product, const Part& part, int32_t group, float w_scale,
                           StageScales& scales) {
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

// ---------------------------------------------------------------- weights of MXFP4

constexpr int W_GROUP = 32;               // numbers that share a scale, 16 bytes of codes
constexpr int W_CHUNKS = GROUP / W_GROUP;  // of a row
constexpr int LANE_CHUNKS = FEATURES * W_CHUNKS / WARP_SIZE;
constexpr int LARGEST_FINITE = 252;       // the byte of the largest scale of which no product is infinite in bf16

// The bytes of the scales of four groups from `group` on, a multiple of four, of a row: they lie side by side in all
// layouts. Bytes of groups that there are not say nothing.
DEVICE uint32_t four_scales(const Scales& scales, int64_t row, int32_t group) {
    const uint8_t* const first = static_cast<const uint8_t*>(scales.scales) + scale_place(scales, scales.first_row + row, group);
    // Only plain rows may end, or begin, within a word.
    if (group + 4 <= scales.padded_groups && reinterpret_cast<uint64_t>(first) % 4 == 0)
        return *reinterpret_cast<const uint32_t*>(first);
    uint32_t word = 0;
    UNROLL
    for (int i = 0; i < 4; ++i) word |= group + i < scales.num_groups ? static_cast<uint32_t>(first[i]) << 8 * i : 0u;
    return word;
}

// The scales of the weights of a stage, into shared memory. Returns the byte of the scale over which all of its numbers are
// folded, or -1 where they cannot be.
DEVICE int produce_w_scales(const QuantisedProduct& product, const Part& part, int64_t group, StageScales& scales) {
    const auto first_group = static_cast<int32_t>(group * W_CHUNKS);
    uint32_t words[FEATURES / WARP_SIZE];
    UNROLL
    for (int i = 0; i < FEATURES / WARP_SIZE; ++i) {
        const int64_t row = part.column + lane_id() + i * WARP_SIZE;
        words[i] = row < product.result.columns ? four_scales(product.w_scales, row, first_group) : 0u;
    }
    int largest = 0, least = 255;
    UNROLL
    for (int i = 0; i < FEATURES / WARP_SIZE; ++i) {
        const int row = lane_id() + i * WARP_SIZE;
        scales.w_words[row] = words[i];
        UNROLL
        for (int g = 0; g < W_CHUNKS; ++g) {
            const bool has = part.column + row < product.result.columns && first_group + g < product.w_scales.num_groups;
            const int byte = static_cast<int>(words[i] >> 8 * g & 255u);
            largest = has ? maximum(largest, byte) : largest;
            least = has ? minimum(least, byte) : least;
        }
    }
    UNROLL
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = maximum(largest, __shfl_xor_sync(FULL_WARP, largest, distance));
        least = minimum(least, __shfl_xor_sync(FULL_WARP, least, distance));
    }
    return largest > LARGEST_FINITE || largest - least > LARGEST_FOLD - LEAST_FOLD ? -1 : largest;
}

// What a lane brings of a stage's codes: a chunk of every eighth row, always the same one of a row; zeros where there is
// none.
struct FoldedRows {
    uint32_t words[LANE_CHUNKS][4];

    void load(const QuantisedProduct& product, const Part& part, int64_t group) {
        const int chunk = lane_id() % W_CHUNKS, lane_row = lane_id() / W_CHUNKS;
        const int64_t begin = group * (GROUP / 2) + 16 * chunk;
        const int64_t rows = begin < product.result.depth / 2 ? product.result.columns - part.column : 0;
        const uint8_t* source = product.w + (part.column + lane_row) * product.w_stride + begin;
        UNROLL
        for (int i = 0; i < LANE_CHUNKS; ++i, source += WARP_SIZE / W_CHUNKS * product.w_stride) {
            const Vec16 codes = lane_row + i * (WARP_SIZE / W_CHUNKS) < rows ? load_vec16(source) : Vec16{};
            UNROLL
            for (int word = 0; word < 4; ++word) words[i][word] = codes.w[word];
        }
    }
    // As codes of e4m3, in their places in the rows of a stage.
    void store(SharedAddress target, int largest, const StageScales& scales) const {
        const int chunk = lane_id() % W_CHUNKS;
        UNROLL
        for (int i = 0; i < LANE_CHUNKS; ++i) {
            const int row = lane_id() / W_CHUNKS + i * (WARP_SIZE / W_CHUNKS);
            const int scale = static_cast<int>(scales.w_words[row] >> 8 * chunk & 255u);
            // What is beyond belongs to zeros.
            const int exponent = maximum(minimum(scale - largest + LARGEST_FOLD, LARGEST_FOLD), LEAST_FOLD);
            const FoldedCodes folded = folded_codes(exponent);
            UNROLL
            for (int half = 0; half < 2; ++half) {
                const uint32_t first = words[i][2 * half], second = words[i][2 * half + 1];
                const Vec16 numbers{{e2m1_as_e4m3(first, folded), e2m1_as_e4m3(first >> 16, folded),
                                     e2m1_as_e4m3(second, folded), e2m1_as_e4m3(second >> 16, folded)}};
                store_shared_vec16(target + panel_offset(row, 2 * chunk + half), numbers);
            }
        }
    }
};

// The weights of a stage; returns the scale of their block, 1 where consumers multiply numbers with their own.
DEVICE float produce_folded(const QuantisedProduct& product, const Part& part, int64_t group, SharedAddress target,
                            StageScales& scales) {
    FoldedRows rows;
    rows.load(product, part, group);
    const int largest = produce_w_scales(product, part, group, scales);
    if (lane_id() == 0) scales.folded = largest >= 0;
    if (largest < 0) return 1.0f;
    // All lanes' scales are there.
    __syncwarp();
    rows.store(target, largest, scales);
    return e8m0_to_float(static_cast<uint8_t>(largest)) * __uint_as_float((127u - LARGEST_FOLD) << 23);
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
            StageScales& scales = stage_scales(stage);
            float w_scale;
            if constexpr (MXFP4)
                w_scale = produce_folded(unit.product, part, group, shared + Shared::w(stage), scales);
            else
                w_scale = scale_of_group(unit.product.w_scales, part.column / FEATURES, static_cast<int32_t>(group));
            produce_scales(unit.product, part, static_cast<int32_t>(group), w_scale, scales);
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

// The same of weights of MXFP4 that do not fold, each with its own scale, in fp32. `x`: the stage's tokens.
DEVICE void multiply_unfolded(float (&d)[N8][4], const QuantisedProduct& product, const Part& part, int64_t group,
                              uint32_t consumer, const uint8_t* x) {
    const int lane = lane_id(), warp = warp_id() % 4;
    const int64_t first = part.column + consumer * CONSUMER_FEATURES + 16 * warp + lane / 4;
    const auto count = static_cast<int>(minimum<int64_t>(GROUP, product.result.depth - group * GROUP));
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) d[n][i] = 0.0f;
    }
    UNROLL_BY(1)
    for (int k = 0; k < count; ++k) {
        float w[2];
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const int64_t row = minimum<int64_t>(first + 8 * half, product.result.columns - 1), at = group * GROUP + k;
            const uint8_t pair = product.w[row * product.w_stride + at / 2];
            const float scale = e8m0_to_float(scale_byte(product.w_scales, row, static_cast<int32_t>(at / W_GROUP)));
            const auto code = static_cast<uint8_t>(at % 2 ? pair >> 4 : pair & 15);
            w[half] = to_float(to_bf16(e2m1_to_float(code) * scale));
        }
        UNROLL
        for (int n = 0; n < N8; ++n) {
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const int token = 8 * n + lane % 4 * 2 + i;
                const float number = to_float(fp8_e4m3{x[panel_offset(token, k / 16) + k % 16]});
                d[n][i] = fused_multiply_add(w[0], number, d[n][i]);
                d[n][i + 2] = fused_multiply_add(w[1], number, d[n][i + 2]);
            }
        }
    }
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
            if (!MXFP4 || uniform(stage_scales(stage).folded)) {
                multiply(d, matrix_descriptor(w, 0, 1024), matrix_descriptor(shared + Shared::x(stage), 0, 1024));
            } else {
                const uint8_t* const x = reinterpret_cast<const uint8_t*>(dynamic_shared()) + Shared::x(stage);
                multiply_unfolded(d, unit.product, part, part.begin + group, consumer, x);
            }
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
