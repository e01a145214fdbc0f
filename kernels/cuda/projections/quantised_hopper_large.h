// Products of FP8 operands by warpgroup matrix products of e4m3 (sm_90a), for many tokens: what linear_hopper_large.cu and
// grouped_linear_hopper_large.cu share. linear_quantised.cu has the formulas, quantised_hopper.h is for few tokens.
//
// Tokens are the rows of a product and features its columns. A block takes 128 tokens by 256 features, two blocks of
// weights side by side, and of k a part in stages of 128, one group of scales. Blocks take one such unit after the other. Three
// warpgroups:
//   0 and 1  consumers, 64 tokens each: of each stage 64 x 128 products with the one block of weights, then with the other,
//            each accumulated from zero, multiplied by the scales of the token and of the block, and added to sums in fp32:
//            the tensor cores keep 13 fraction bits (hopper.h), over the 128 numbers of a group and no more. Of a unit
//            of no more than 64 tokens each takes one block of weights.
//   2        producer: one warp starts the copies of boxes (tensor_copy_in), which swizzle as wgmma reads and fill with
//            zeros what lies outside; the other three bring the scales, each those of every third stage. Both go on with
//            the next unit's first stages while the last one's sums are stored.
//
// Pairs. Blocks may run in clusters of two, whose units have the same weights and other tokens: each brings one of the two
// blocks of weights, which arrives in both, and a stage takes 32 KB of the second-level cache instead of 48. Or they have the
// same tokens and other weights, and bring the tokens in turn: 40 KB. A stage is brought anew when the consumers of both blocks
// have given it back, so that neither gets ahead of the other by more than there are stages. Their arrivals pass no writes on
// (mbarrier_arrive_at): a consumer would wait for the sums of the unit before to be stored, at every stage.
//
// Promotion. The product of a token's scale and a block's is made once a stage, by the producer. Where it would leave the
// range of normal fp32 numbers for some token, a sum is multiplied by one scale after the other: a sum of a group may be
// normal where that product is not.
//
// What a stage takes of a multiprocessor: 1024 cycles of products; of shared memory, at 128 bytes a cycle, 48 KB that arrive
// and 2 x 2 x (8 + 16) KB that the products read, 1152 cycles; of the second-level cache 48 KB. 64 x 256 sums and 64 x 128
// accumulators of a warpgroup are 192 registers a thread, so that no wider unit fits.
// Measured on one H200 for 4096 tokens of [65536, 1536] and [7168, 16384], with DeepGEMM in the same run where it is named: tiles
// of 128 x 128 by cp.async 1875 and 2098 us, by copies of boxes 1034 and 973; 128 x 256 with a way out of 300 instructions a warp
// 902 and 939 with consumers that start their products in turn, 883 and 914 without (DeepGEMM 707 and 765). What ncu said of
// those: tensor cores busy 61 and 72 % of the time (DeepGEMM's 79 and 90), 1.9 times DeepGEMM's instructions, a fifth of a
// consumer's time in the way out of units of 12 stages, each access of it behind a branch. With the way out below, and weights
// shared by pairs of blocks (linear_hopper_large_pairs), 860 to 868 and 905 to 922 (706 and 758): the turn of a unit is cheaper,
// and the pairs gave less than the 770 and 780 that were hoped for.
// As compiled then, a product took 72 instructions beside its 64 sums (DeepGEMM's, of the same shape, 32) and three jumps over code
// that is seldom wanted. It takes 45 and one jump since a unit's stages but the last are a loop that asks for nothing else, and
// where the sums of scales that are no normal numbers are not sums of their own. Expected: 790 and 830 us; measured: 811
// and 841 (706 and 754 in that call).
#pragma once

#include "hopper.h"
#include "linear_quantised.h"
#include "panels.h"

constexpr int GROUP = 128, TOKENS = 128, BLOCKS = 2, FEATURES = BLOCKS * GROUP;
constexpr int CONSUMERS = 2, CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE, THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
constexpr int CONSUMER_TOKENS = TOKENS / CONSUMERS;
using Registers = DividedRegisters<1, 56, CONSUMERS, 224>;
constexpr int SCALE_WARPS = WARPGROUP_SIZE / WARP_SIZE - 1;
constexpr int STAGES = 4;
constexpr int SCALE_STAGES = 8, UNITS = 8;  // places of scales and of units; one more than there are stages would do
static_assert(SCALE_STAGES > STAGES && UNITS > STAGES, "places are taken while consumers read them");
constexpr int N8 = GROUP / 8;

struct UnitShape {
    static constexpr int ROWS = TOKENS, COLUMNS = FEATURES, STAGE_DEPTH = GROUP;
};

// Two units of the same features, tokens behind tokens.
struct PairShape {
    static constexpr int ROWS = 2 * TOKENS, COLUMNS = FEATURES, STAGE_DEPTH = GROUP;
};

// The scales of a stage.
struct alignas(16) StageScales {
    float factors[BLOCKS][TOKENS];  // x times w
    float x[TOKENS];
    float w[BLOCKS];
    int32_t regular;  // whether all factors are what their scales multiply to
};

// What consumers have to know of a unit. The producer leaves it: to find a unit among those of experts takes longer than a
// stage.
struct UnitResult {
    Result result;
    Part part;
    int32_t x_row, x_matrix;  // of the map of x: where its tokens begin
    int32_t stages;
    int32_t is_last;  // of the block's
    int32_t is_half;  // whether its first 64 tokens are all that there are
    int32_t is_rounded;
};

// Where everything lies in dynamic shared memory. A consumer gives a stage's operands back before it promotes, so that it
// may still read the scales of a stage whose operands are being replaced: they have more places than there are stages. And so
// have units, since it reads a unit's place when its stages are long given back.
struct Shared {
    static constexpr int NUMBERS = 16;  // places of numbers of units: more than producers are ever apart
    static constexpr int X_BYTES = TOKENS * 128, STAGE_BYTES = X_BYTES + FEATURES * 128;
    static constexpr int OUT = STAGES * STAGE_BYTES;  // of each consumer warp: what it stores next
    static constexpr int WARP_ROWS = 16, SUM_COLUMNS = 32, SUM_STRIDE = SUM_COLUMNS + 4, OUT_COLUMNS = 64;
    static constexpr int WARP_BYTES = WARP_ROWS * SUM_STRIDE * 4;
    static constexpr int SCALES = OUT + CONSUMER_THREADS / WARP_SIZE * WARP_BYTES;  // StageScales [SCALE_STAGES]
    static constexpr int RESULTS = SCALES + SCALE_STAGES * static_cast<int>(sizeof(StageScales));  // UnitResult [UNITS]
    static constexpr int FULL = RESULTS + UNITS * static_cast<int>(sizeof(UnitResult));            // mbarriers [STAGES]
    static constexpr int EMPTY = FULL + 8 * STAGES;
    static constexpr int READ = EMPTY + 8 * STAGES;
    static constexpr int TOLD = READ + 8 * STAGES;                                         // mbarriers [NUMBERS]
    static constexpr int NUMBER = TOLD + 8 * NUMBERS;                                      // uint32_t [NUMBERS]
    static constexpr int BYTES = NUMBER + 4 * NUMBERS;

    static constexpr int x(uint32_t stage) { return stage % STAGES * STAGE_BYTES; }
    static constexpr int w(uint32_t stage, int block) { return x(stage) + X_BYTES + block * GROUP * 128; }
    static constexpr int full(uint32_t stage) { return FULL + 8 * (stage % STAGES); }
    static constexpr int empty(uint32_t stage) { return EMPTY + 8 * (stage % STAGES); }
    static constexpr int read(uint32_t stage) { return READ + 8 * (stage % STAGES); }
    static constexpr int told(uint32_t unit) { return TOLD + 8 * (unit % NUMBERS); }
    static constexpr int number(uint32_t unit) { return NUMBER + 4 * (unit % NUMBERS); }
};
static_assert(Shared::WARP_ROWS * Shared::OUT_COLUMNS * 2 <= Shared::WARP_BYTES, "rows of bf16 exceed a warp's place");
static_assert(Shared::OUT % 128 == 0 && Shared::WARP_BYTES % 128 == 0, "a warp's place begins within a row of banks");

// Parity of the phase in which stage number n, counted over all units, has come.
DEVICE uint32_t stage_phase(uint32_t stage) { return stage / STAGES & 1; }

DEVICE StageScales& stage_scales(uint32_t stage) {
    return reinterpret_cast<StageScales*>(dynamic_shared() + Shared::SCALES)[stage % SCALE_STAGES];
}

// Of unit number n of the block's.
DEVICE UnitResult& unit_result(uint32_t unit) {
    return reinterpret_cast<UnitResult*>(dynamic_shared() + Shared::RESULTS)[unit % UNITS];
}

// Of a product, in units of a shape.
template <typename S>
DEVICE int64_t units_of(const Result& result) {
    return ceil_div<int64_t>(result.rows, S::ROWS) * ceil_div<int64_t>(result.columns, S::COLUMNS) * result.splits;
}

// What a block computes next: a part of a product, and where its rows begin in the maps of x and w, where each of its blocks
// of weights is GROUP rows that share their scales.
struct Unit {
    QuantisedProduct product;
    Part part;
    int32_t x_row, x_matrix, w_rows[BLOCKS], w_matrix;
    int32_t shares_tokens;  // of a cluster: whether its blocks have the same tokens, and not the same weights
};

// Whether a unit's sums are rounded to bf16 and stored, and no more, and the result has all of its features.
DEVICE bool is_rounded(const Result& result, const Part& part) {
    const bool plain = result.splits == 1 && !result.out_is_f32 && result.wide && result.before == nullptr;
    return plain && result.factor == 1.0f && part.column + FEATURES <= result.columns;
}

// ---------------------------------------------------------------- which units a block takes

// Behind a block's last one.
constexpr uint32_t NO_UNIT = 0xffffffffu;

DEVICE uint32_t unit_of_count(uint32_t number, uint32_t count) { return number < count ? number : NO_UNIT; }

// A block's first one, or a cluster's.
template <uint32_t CLUSTER>
DEVICE uint32_t first_unit(uint32_t count) { return unit_of_count(blockIdx.x / CLUSTER, count); }

// Which units a block takes, or a cluster, whose blocks take units of one number together:
//   uint32_t first() const                                 the first one's number
//   uint32_t tell_behind(uint32_t taken, uint32_t number)  what comes behind a unit, the `taken`th: asked once of each by the
//                                                          lane that starts copies
//   uint32_t behind(uint32_t taken, uint32_t number) const the same for the producer's other warps
//
// In turn: every so many-th. For units of one product, which cost the same: for 4096 tokens of [65536, 1536] and [7168, 16384] the
// way below was no faster (816 and 856 us; in turn 818 and 846).
template <uint32_t CLUSTER>
struct InTurn {
    uint32_t count;

    uint32_t first() const { return first_unit<CLUSTER>(count); }
    uint32_t behind(uint32_t, uint32_t number) const { return unit_of_count(number + gridDim.x / CLUSTER, count); }
    uint32_t tell_behind(uint32_t taken, uint32_t number) { return behind(taken, number); }
};

// As blocks get free: the next one that nobody has, by a counter in memory, 0 before the launch. Units that are taken at a time
// are neighbours then, whose operands are brought from memory once. In turn, clusters of which one has half units and another has none
// get so far apart that each brings experts' weights of its own: of 196608 rows 13.0 GB were read where 5.2 are now.
//
// A cluster's first block asks, one unit in advance, and tells all of them.
template <uint32_t CLUSTER>
struct AsFree {
    uint32_t count;
    SharedAddress shared;
    uint32_t* num_taken;
    uint32_t ahead = NO_UNIT;  // of the lane that asks: what it tells next

    uint32_t first() const { return first_unit<CLUSTER>(count); }
    uint32_t ask() const { return unit_of_count(gridDim.x / CLUSTER + atomicAdd(num_taken, 1u), count); }
    uint32_t behind(uint32_t taken, uint32_t) const {
        mbarrier_wait(shared + Shared::told(taken), taken / Shared::NUMBERS & 1);
        return *reinterpret_cast<const volatile uint32_t*>(dynamic_shared() + Shared::number(taken));
    }
    uint32_t tell_behind(uint32_t taken, uint32_t) {
        if constexpr (CLUSTER > 1) mbarrier_arrive_expect(shared + Shared::told(taken), 4);
        if (CLUSTER > 1 && cluster_rank() != 0) return behind(taken, 0);
        if (taken == 0) ahead = ask();
        const uint32_t number = ahead;
        tell(taken, number);
        if (number != NO_UNIT) ahead = ask();
        return number;
    }
    void tell(uint32_t taken, uint32_t number) const {
        const SharedAddress place = shared + Shared::number(taken), told = shared + Shared::told(taken);
        if constexpr (CLUSTER == 1) {
            store_shared(place, number);
            mbarrier_arrive(told);
        } else {
            UNROLL
            for (uint32_t rank = 0; rank < CLUSTER; ++rank) store_at(place, number, told, rank);
        }
    }
};

// Units in the order in which blocks take them, as the functions below are given them, or of clusters what their blocks take
// together:
//   static constexpr uint32_t CLUSTER          blocks of a cluster
//   Turns turns(SharedAddress shared) const    which of them the block takes, as above
//   Unit at(uint32_t number) const             the block's own
//
// Those of one product.
struct UnitsOfProduct {
    static constexpr uint32_t CLUSTER = 1;
    const QuantisedProduct& product;

    InTurn<CLUSTER> turns(SharedAddress) const { return {static_cast<uint32_t>(units_of<UnitShape>(product.result))}; }
    Unit at(uint32_t number) const {
        const Part part = part_of<UnitShape>(product.result, number);
        const auto column = static_cast<int32_t>(part.column);
        return Unit{product, part, static_cast<int32_t>(part.row), 0, {column, column + GROUP}, 0, false};
    }
};

// The same in pairs. The second unit of one may have no token: its block takes part with zeros, which nobody stores.
struct PairsOfProduct {
    static constexpr uint32_t CLUSTER = 2;
    const QuantisedProduct& product;

    InTurn<CLUSTER> turns(SharedAddress) const { return {static_cast<uint32_t>(units_of<PairShape>(product.result))}; }
    Unit at(uint32_t number) const {
        Part part = part_of<PairShape>(product.result, number);
        part.row += cluster_rank() * TOKENS;
        const auto column = static_cast<int32_t>(part.column);
        return Unit{product, part, static_cast<int32_t>(part.row), 0, {column, column + GROUP}, 0, false};
    }
};

// All blocks of the cluster have come here: before, nobody may reach into another one's shared memory, and nobody has left.
template <uint32_t CLUSTER>
DEVICE void meet_blocks() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

template <uint32_t CLUSTER = 1>
DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            // One lane's expected bytes, and all lanes of the warp that brings the scales.
            mbarrier_init(shared + Shared::full(stage), 1 + WARP_SIZE);
            // Weights arrive in all blocks of a cluster at a time, so that all of them must have given the stage back, a warp each.
            // Without a cluster all lanes give it back (quantised_hopper.h says why).
            mbarrier_init(shared + Shared::empty(stage), CLUSTER == 1 ? CONSUMER_THREADS : CLUSTER * CONSUMER_THREADS / WARP_SIZE);
            if constexpr (CLUSTER > 1) mbarrier_init(shared + Shared::read(stage), CONSUMER_THREADS);
        }
        for (uint32_t unit = 0; unit < Shared::NUMBERS; ++unit) mbarrier_init(shared + Shared::told(unit), 1);
        fence_mbarrier_init();
    }
    meet_blocks<CLUSTER>();
}

// ---------------------------------------------------------------- producer

// All blocks of a cluster, for tensor_copy_in_all.
template <uint32_t CLUSTER>
constexpr uint32_t ALL_BLOCKS = (1u << CLUSTER) - 1;

// The tokens of a stage. Blocks of a cluster that share them bring them in turn.
template <uint32_t CLUSTER>
DEVICE void copy_tokens(const TensorMap& x_map, const Unit& unit, int32_t group, SharedAddress shared, uint32_t stage) {
    const SharedAddress to = shared + Shared::x(stage), full = shared + Shared::full(stage);
    if (CLUSTER == 1 || !unit.shares_tokens) {
        tensor_copy_in(to, x_map, group * GROUP, unit.x_row, unit.x_matrix, full);
    } else if (stage % CLUSTER == cluster_rank()) {
        tensor_copy_in_all(to, x_map, group * GROUP, unit.x_row, unit.x_matrix, full, ALL_BLOCKS<CLUSTER>);
    }
}

// Its weights: both blocks or, where blocks of a cluster share them, one of them for both.
template <uint32_t CLUSTER>
DEVICE void copy_weights(const TensorMap& w_map, const Unit& unit, int32_t group, SharedAddress shared, uint32_t stage) {
    const SharedAddress full = shared + Shared::full(stage);
    static_assert(CLUSTER == 1 || CLUSTER == BLOCKS, "each block of a cluster brings a block of weights");
    if (CLUSTER == 1 || unit.shares_tokens) {
        UNROLL
        for (int block = 0; block < BLOCKS; ++block)
            tensor_copy_in(shared + Shared::w(stage, block), w_map, group * GROUP, unit.w_rows[block], unit.w_matrix, full);
    } else {
        const auto block = static_cast<int>(cluster_rank());
        // An index that is not known to the compiler would put the unit into memory.
        const int32_t row = block == 0 ? unit.w_rows[0] : unit.w_rows[1];
        tensor_copy_in_all(shared + Shared::w(stage, block), w_map, group * GROUP, row, unit.w_matrix, full,
                           ALL_BLOCKS<CLUSTER>);
    }
}

// The operands of all stages of all units, by one lane.
template <typename Units>
DEVICE void produce_operands(const Units& units, const TensorMap& x_map, const TensorMap& w_map, SharedAddress shared) {
    auto turns = units.turns(shared);
    uint32_t stage = 0, taken = 0, next;
    for (uint32_t number = turns.first(); number != NO_UNIT; number = next, ++taken) {
        next = turns.tell_behind(taken, number);
        const Unit unit = units.at(number);
        const auto first = static_cast<int32_t>(unit.part.begin);
        for (int32_t group = first; group < unit.part.end; ++group, ++stage) {
            const SharedAddress full = shared + Shared::full(stage);
            mbarrier_wait(shared + Shared::empty(stage), stage_phase(stage) ^ 1);
            if (group == first) {
                const bool is_last = next == NO_UNIT;
                const bool is_half = unit.product.result.rows - unit.part.row <= CONSUMER_TOKENS;
                const int32_t stages = static_cast<int32_t>(unit.part.end) - first;
                const bool rounded = is_rounded(unit.product.result, unit.part);
                unit_result(taken) = UnitResult{unit.product.result, unit.part, unit.x_row, unit.x_matrix,
                                                stages, is_last, is_half, rounded};
            }
            // What lies outside of a tensor counts as arrived.
            mbarrier_arrive_expect(full, Shared::STAGE_BYTES);
            copy_tokens<Units::CLUSTER>(x_map, unit, group, shared, stage);
            copy_weights<Units::CLUSTER>(w_map, unit, group, shared, stage);
        }
    }
}

// The scales of a stage, by one warp. Where one lies is a sum of what its row and what its group says, of which a lane keeps
// those of its rows: scale_place takes longer than a stage has.
struct LoadedScales {
    static constexpr int COUNT = TOKENS / WARP_SIZE;
    static constexpr int64_t NOWHERE = -1;
    int64_t x_places[COUNT], w_places[BLOCKS];
    float x[COUNT], w[BLOCKS];

    void begin(const Unit& unit) {
        const QuantisedProduct& product = unit.product;
        UNROLL
        for (int block = 0; block < BLOCKS; ++block) {
            const int64_t row = unit.w_rows[block];
            w_places[block] = row < product.result.columns ? scale_place(product.w_scales, row / GROUP, 0) : NOWHERE;
        }
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int64_t row = unit.part.row + lane_id() + i * WARP_SIZE, first = product.x_scales.first_row;
            x_places[i] = row < product.result.rows ? scale_place(product.x_scales, first + row, 0) : NOWHERE;
        }
    }
    void load(const Unit& unit, int32_t group) {
        const Scales &x_scales = unit.product.x_scales, &w_scales = unit.product.w_scales;
        const int64_t of_x = scale_place(x_scales, 0, group), of_w = scale_place(w_scales, 0, group);
        UNROLL
        for (int block = 0; block < BLOCKS; ++block)
            w[block] = w_places[block] != NOWHERE ? scale_at(w_scales, w_places[block] + of_w) : 0.0f;
        UNROLL
        for (int i = 0; i < COUNT; ++i) x[i] = x_places[i] != NOWHERE ? scale_at(x_scales, x_places[i] + of_x) : 0.0f;
    }
    void store(StageScales& scales) const {
        bool regular = true;
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int token = lane_id() + i * WARP_SIZE;
            UNROLL
            for (int block = 0; block < BLOCKS; ++block) {
                scales.factors[block][token] = x[i] * w[block];
                regular = regular && is_regular(x[i], w[block]);
            }
            scales.x[token] = x[i];
        }
        const bool irregular = __any_sync(FULL_WARP, !regular);
        if (lane_id() != 0) return;
        UNROLL
        for (int block = 0; block < BLOCKS; ++block) scales.w[block] = w[block];
        scales.regular = !irregular;
    }
};

// Which barrier says that a stage's scales may be replaced. Those of a cluster's blocks are their own, and an arrival of one lane
// for others, that orders nothing (mbarrier_arrive_at), says nothing of what these have read.
template <uint32_t CLUSTER>
DEVICE constexpr int scales_free(uint32_t stage) { return CLUSTER == 1 ? Shared::empty(stage) : Shared::read(stage); }

// Warp `warp` of those that bring scales.
template <typename Units>
DEVICE void produce_scales(const Units& units, SharedAddress shared, uint32_t warp) {
    const auto turns = units.turns(shared);
    uint32_t stage = 0, taken = 0;
    for (uint32_t number = turns.first(); number != NO_UNIT; number = turns.behind(taken++, number)) {
        const Unit unit = units.at(number);
        LoadedScales scales;
        scales.begin(unit);
        for (auto group = static_cast<int32_t>(unit.part.begin); group < unit.part.end; ++group, ++stage) {
            if (stage % SCALE_WARPS != warp) continue;
            scales.load(unit, group);
            mbarrier_wait(shared + scales_free<Units::CLUSTER>(stage), stage_phase(stage) ^ 1);
            scales.store(stage_scales(stage));
            mbarrier_arrive(shared + Shared::full(stage));
        }
    }
}

// ---------------------------------------------------------------- consumers

using BlockSums = float[N8][4];

// d = x w^T of one group, 64 tokens by 128 features.
DEVICE void start_product(BlockSums& d, uint64_t x, uint64_t w) {
    wgmma_fence();
    UNROLL
    for (int step = 0; step < 4; ++step)
        wgmma_shared_e4m3(d, descriptor_advance(x, 32 * step), descriptor_advance(w, 32 * step), step > 0);
    wgmma_commit();
}

// What the sums of a product are multiplied by: read before they are there, since what is read then delays the consumer's next
// product by twice the time that shared memory takes.
struct Factors {
    float of_rows[2];  // tokens `row` and `row + 8`
    int32_t regular;
};

DEVICE Factors factors_of(const StageScales& scales, int block, int row) {
    return Factors{{scales.factors[block][row], scales.factors[block][row + 8]}, uniform(scales.regular)};
}

// total += d times the scales of its tokens, rows `row` and `row + 8`, and of the weights. Where one product of the scales will
// not do, d is multiplied by the token's here. It is not in the way of the others: a second loop of sums would be.
DEVICE void promote(BlockSums& total, BlockSums& d, const Factors& factors, const StageScales& scales, int block, int row) {
    float of_rows[2] = {factors.of_rows[0], factors.of_rows[1]};
    if (__builtin_expect(factors.regular == 0, false)) {
        float x[2] = {scales.x[row], scales.x[row + 8]};
        UNROLL
        for (int half = 0; half < 2; ++half) {
            // A token's own scales say how its sums are rounded, and not those of its neighbours or of the other block.
            if (is_regular(x[half], scales.w[block])) x[half] = 1.0f;
            else of_rows[half] = scales.w[block];
        }
        UNROLL
        for (int n = 0; n < N8; ++n) {
            UNROLL
            for (int i = 0; i < 4; ++i) d[n][i] *= x[i / 2];
        }
    }
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(d[n][i], of_rows[i / 2], total[n][i]);
    }
}

// What of a unit a consumer takes: 64 of its tokens with both blocks of weights or, where there are no more than 64, all with
// one block, so that neither computes what nobody needs.
struct Share {
    uint32_t consumer;
    int32_t warp;  // of the consumer's; like it the same in all lanes, so that it takes none of their registers
    int32_t is_half;

    // The consumer's and the warp's first token, and the lane's first.
    int first_token() const { return is_half ? 0 : static_cast<int>(consumer) * CONSUMER_TOKENS; }
    int warp_row() const { return first_token() + warp * Shared::WARP_ROWS; }
    int row() const { return warp_row() + lane_id() / 4; }
    int first_block() const { return is_half ? static_cast<int>(consumer) : 0; }
};

// OUT_COLUMNS sums of each of a warp's rows, from the n8th eight of `total` on, in bf16 in shared memory: chunks of 16 bytes, of
// which a row's lie in the places of panels.h, so that all lanes meet in different banks.
DEVICE void stage_rounded(uint8_t* place, const BlockSums& total, int n8) {
    const int lane = lane_id();
    UNROLL
    for (int n = 0; n < Shared::OUT_COLUMNS / CHUNK; ++n) {
        // Of the row eight further on the chunks lie alike.
        uint8_t* const to = place + panel_offset(lane / 4, n) + lane % 4 * 4;
        UNROLL
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint32_t*>(to + panel_offset(8 * half, 0)) =
                pack_bf16(total[n8 + n][2 * half], total[n8 + n][2 * half + 1]);
    }
    __syncwarp();
}

// Where a lane's first chunk of a warp's rows is stored, how far the rows are apart, and how many there are.
struct RoundedRows {
    bf16* to;
    int64_t stride;
    int32_t count;
};

// A block's sums of a warp's rows, rounded, where the result has all of these features. No access is behind a branch, so that
// what a row's chunks wait for is under way together: one after the other they took a fifth of the time of units of 12 stages.
DEVICE void store_rounded(const RoundedRows& rows, uint8_t* place, const BlockSums& total) {
    constexpr int CHUNKS = Shared::OUT_COLUMNS / CHUNK, ROWS_AT_ONCE = WARP_SIZE / CHUNKS;
    const int own = lane_id() / CHUNKS, chunk = lane_id() % CHUNKS;
    UNROLL
    for (int first = 0; first < GROUP; first += Shared::OUT_COLUMNS) {
        stage_rounded(place, total, first / 8);
        bf16* to = rows.to + first;
        UNROLL
        for (int row = own; row < Shared::WARP_ROWS; row += ROWS_AT_ONCE) {
            const Vec16 features = load_vec16(place + panel_offset(row, chunk));
            if (row < rows.count) store_vec16(to, features);
            to += ROWS_AT_ONCE * rows.stride;
        }
        // The next ones may take their place.
        __syncwarp();
    }
}

// SUM_COLUMNS sums of each of a warp's rows in fp32, in whatever way they are stored. `row`, `column`: of the result.
DEVICE void store_sums(const Result& result, const Part& part, uint8_t* place, const BlockSums& total, int n8, int64_t row,
                       int64_t column) {
    constexpr int CHUNKS = Shared::SUM_COLUMNS / CHUNK;
    auto* const sums = reinterpret_cast<float*>(place);
    const int lane = lane_id();
    UNROLL
    for (int n = 0; n < CHUNKS; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i)
            sums[(lane / 4 + i / 2 * 8) * Shared::SUM_STRIDE + 8 * n + lane % 4 * 2 + i % 2] = total[n8 + n][i];
    }
    __syncwarp();
    UNROLL_BY(1)
    for (int i = lane; i < Shared::WARP_ROWS * CHUNKS; i += WARP_SIZE) {
        const int own = i / CHUNKS, chunk = i % CHUNKS;
        if (row + own >= result.rows || column + chunk * CHUNK >= result.columns) continue;
        float x[CHUNK];
        load_elements<CHUNK>(sums + own * Shared::SUM_STRIDE + chunk * CHUNK, x);
        store_chunk(result, part.split, row + own, column + chunk * CHUNK, x);
    }
    __syncwarp();
}

// The sums of a unit's part that a warp has, by way of shared memory, so that features lie side by side.
DEVICE void store_unit(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) {
    uint8_t* const place = dynamic_shared() + Shared::OUT + (share.consumer * 4 + share.warp) * Shared::WARP_BYTES;
    const int64_t row = unit.part.row + share.warp_row(), column = unit.part.column + share.first_block() * GROUP;
    if (uniform(unit.is_rounded)) {
        constexpr int CHUNKS = Shared::OUT_COLUMNS / CHUNK;
        const int64_t stride = unit.result.out_stride, left = unit.result.rows - row;
        bf16* const first = static_cast<bf16*>(unit.result.out) + (row + lane_id() / CHUNKS) * stride + column;
        const RoundedRows rows{first + lane_id() % CHUNKS * CHUNK, stride, static_cast<int32_t>(minimum<int64_t>(left, TOKENS))};
        store_rounded(rows, place, total[0]);
        if (!share.is_half) store_rounded(RoundedRows{rows.to + GROUP, stride, rows.count}, place, total[1]);
        return;
    }
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
        if (block > 0 && share.is_half) return;
        UNROLL
        for (int first = 0; first < GROUP; first += Shared::SUM_COLUMNS)
            store_sums(unit.result, unit.part, place, total[block], first / 8, row, column + block * GROUP + first);
    }
}

// What becomes of a unit's sums, as `consume` is given it:
//   void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const
//
// They are stored.
struct StoredSums {
    void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const {
        store_unit(unit, total, share);
    }
};

// Where a stage's operands are in the first one's place: in another's they are so many bytes further on, which leaves little
// to compute before a consumer's products.
struct Operands {
    uint64_t x, w;
};

DEVICE Operands operands_of(SharedAddress shared) {
    return Operands{matrix_descriptor(shared + Shared::x(0), 0, 1024), matrix_descriptor(shared + Shared::w(0, 0), 0, 1024)};
}

DEVICE void end(BlockSums& d) {
    wgmma_wait<0>();
    wgmma_hold(d);
}

DEVICE void clear(BlockSums (&total)[BLOCKS]) {
    UNROLL
    for (int block = 0; block < BLOCKS; ++block) {
        UNROLL
        for (int n = 0; n < N8; ++n) {
            UNROLL
            for (int i = 0; i < 4; ++i) total[block][n][i] = 0.0f;
        }
    }
}

// A warp no longer needs a stage's operands: who brings the next ones learns it, in every block of a cluster.
template <uint32_t CLUSTER>
DEVICE void give_back(SharedAddress shared, uint32_t stage) {
    const SharedAddress empty = shared + Shared::empty(stage);
    if constexpr (CLUSTER == 1) {
        mbarrier_arrive(empty);
    } else {
        // Scales of the stages before are what each lane has read by itself.
        mbarrier_arrive(shared + Shared::read(stage));
        // Products are a whole warp's: one lane's arrival says for all that they have ended.
        __syncwarp();
        if (lane_id() < CLUSTER) mbarrier_arrive_at(empty, lane_id());
    }
}

// A consumer at work: the sums of its unit, and the product that is under way.
template <uint32_t CLUSTER>
struct Consumer {
    SharedAddress shared;
    Operands operands;
    Share share;
    uint32_t stage;
    Factors factors;  // of the product under way
    BlockSums d, total[BLOCKS];

    Factors factors_at(uint32_t other, int block) const { return factors_of(stage_scales(other), block, share.row()); }

    // The product of this stage with a block of weights.
    void start(int block, const Factors& its_factors) {
        const auto place = static_cast<uint32_t>(Shared::x(stage));
        start_product(d, descriptor_advance(operands.x, place + share.first_token() * 128),
                      descriptor_advance(operands.w, place + block * GROUP * 128));
        factors = its_factors;
    }

    // Of a stage with both blocks of weights the first product is added, and the second one started.
    void multiply_by_second() {
        const Factors second = factors_at(stage, 1);
        end(d);
        promote(total[0], d, factors, stage_scales(stage), 0, share.row());
        start(1, second);
    }

    // A stage that is not its unit's last: its products are added, and the next one's first is started. No stage waits for
    // what others may need, so that a consumer of units with many stages has little else to issue than its sums.
    template <int PRODUCTS>
    void multiply_stage() {
        const int block = PRODUCTS == 1 ? share.first_block() : 0;
        if constexpr (PRODUCTS > 1) multiply_by_second();
        mbarrier_wait(shared + Shared::full(stage + 1), stage_phase(stage + 1));
        const Factors next = factors_at(stage + 1, block);
        end(d);
        give_back<CLUSTER>(shared, stage);
        promote(total[PRODUCTS - 1], d, factors, stage_scales(stage), block + PRODUCTS - 1, share.row());
        ++stage;
        start(block, next);
    }

    // A unit's last stage. The first product started behind it is the next unit's or, where there is none, its own again, for
    // nobody: accumulators that only some paths leave under way the compiler would wait for where these meet.
    void multiply_last_stage(uint32_t taken, bool is_last_unit) {
        const Share own = share;
        const uint32_t own_stage = stage;
        if (!own.is_half) multiply_by_second();
        if (!is_last_unit) ++stage;
        mbarrier_wait(shared + Shared::full(stage), stage_phase(stage));
        if (!is_last_unit) share.is_half = uniform(unit_result(taken + 1).is_half);
        const Factors next = factors_at(stage, share.first_block());
        end(d);
        if (!is_last_unit) give_back<CLUSTER>(shared, own_stage);
        const StageScales& scales = stage_scales(own_stage);
        if (own.is_half) promote(total[0], d, factors, scales, own.first_block(), own.row());
        else promote(total[1], d, factors, scales, 1, own.row());
        start(share.first_block(), next);
    }
};

// The units of a block that has any. The first product of a stage is started when the last one of the stage before is
// promoted, be it of another unit, whose sums are then stored while it runs.
template <uint32_t CLUSTER, typename Output>
DEVICE void consume(SharedAddress shared, uint32_t consumer, const Output& output) {
    uint32_t taken = 0;
    mbarrier_wait(shared + Shared::full(0), stage_phase(0));
    Consumer<CLUSTER> own;
    own.shared = shared;
    own.operands = operands_of(shared);
    own.share = Share{consumer, uniform(warp_id() % 4), uniform(unit_result(taken).is_half)};
    own.stage = 0;
    clear(own.total);
    own.start(own.share.first_block(), own.factors_at(0, own.share.first_block()));
    for (;;) {
        const int32_t stages = uniform(unit_result(taken).stages);
        const Share share = own.share;
        if (share.is_half) {
            for (int32_t i = 1; i < stages; ++i) own.template multiply_stage<1>();
        } else {
            for (int32_t i = 1; i < stages; ++i) own.template multiply_stage<BLOCKS>();
        }
        const bool is_last = uniform(unit_result(taken).is_last);
        own.multiply_last_stage(taken, is_last);
        output.store(unit_result(taken), own.total, share);
        if (is_last) break;
        clear(own.total);
        ++taken;
    }
    end(own.d);
}

// What a block does, once its barriers are there: `before` is what its consumers do first, `output` what they do with a unit's
// sums. 168 registers a thread are there at the launch, so that what the consumers take the producer must have left.
template <typename Units, typename Before, typename Output>
DEVICE void multiply_units(const Units& units, const TensorMap& x_map, const TensorMap& w_map, SharedAddress shared,
                           const Before& before, const Output& output) {
    const int32_t warpgroup = uniform(warp_id() / 4);
    if (warpgroup == CONSUMERS) {
        Registers::give();
        const int32_t warp = uniform(warp_id() % 4);
        if (warp > 0) {
            produce_scales(units, shared, warp - 1);
        } else if (lane_id() == 0) {
            produce_operands(units, x_map, w_map, shared);
        }
    } else {
        Registers::take();
        before();
        if (units.turns(shared).first() != NO_UNIT) consume<Units::CLUSTER>(shared, warpgroup, output);
    }
    // Its consumers still tell a block that its stages are free when that one has done all its own.
    if constexpr (Units::CLUSTER > 1) meet_blocks<Units::CLUSTER>();
}
