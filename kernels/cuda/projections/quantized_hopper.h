// FP8 activations times FP8 or MXFP4 weights by wgmma of e4m3 (sm_90a), for few tokens. Shared by
// linear_hopper.cu and grouped_linear_hopper.cu; grouped_linear_swiglu_hopper.cu keeps the sums.
// linear_quantized.cu has the formulas. quantized_hopper_large.h is for many tokens of FP8.
//
// Weights are the rows of the MMA and tokens its columns: few tokens waste little of the MMA. A
// work tile (Unit) is 128 features by TOKENS tokens and a part of k; a k-block (stage) is 128 of
// k, one group of scales. Each block lists its tiles first (ListedTurns). Three warpgroups:
// - 0 and 1: consumers, 64 features each. A stage accumulates from zero and is promoted: times its
//   scales, added to fp32 sums. Tensor cores keep 13 fraction bits (wgmma.h), over one group at
//   most. One consumer promotes while the other's MMAs run.
// - 2: producer. Each warp loads every fourth stage by cp.async in wgmma's swizzle, and its
//   scales. It hands a stage over when the copies of its next stage are issued; where REORDERED is
//   set, cp.async arrives at the mbarrier itself.
// MXFP4: a k-step of 32 has one scale a feature. Codes of w stay packed in shared memory;
// consumers make e4m3 A fragments of them in registers (2^-6 as large, exactly).
// Invariants: a producer warp holds at most one stage while it waits for a slot (PRODUCERS <
// STAGES). A stage is free when all consumer lanes have arrived at its empty barrier.
// Floor: bytes of w at 4.24 TB/s, or the MMA rate. What limits it: of FP8 the 16-byte copies; of
// MXFP4 issue slots and DRAM. What was tried: kernels/docs/linear_quantized.md.
//
// The including file defines TOKENS 8, 16, 64 or 128; WEIGHTS 1 (FP8) or 2 (MXFP4); X_GROUP,
// elements of x that share a scale: 128, of MXFP4 also 32. Before this header it declares
//   using RowsOfW   which rows of w the 128 features of a tile are (rows_of_w.h)
#pragma once

#include "async_copy.h"
#include "codes.h"
#include "hopper.h"
#include "linear_quantized.h"
#include "panels.h"
#include "pipeline.h"
#include "rows_of_w.h"

static_assert(TOKENS == 8 || TOKENS == 16 || TOKENS == 64 || TOKENS == 128, "products have 8, 16, 64 or 128 columns");

static_assert(WEIGHTS == 1 || WEIGHTS == 2, "weights are FP8 or MXFP4");

constexpr bool MXFP4 = WEIGHTS == 2;
static_assert(X_GROUP == 128 || (MXFP4 && X_GROUP == 32), "numbers of x that share a scale are 128 or, of MXFP4, 32");
constexpr int GROUP = 128;
constexpr int FEATURES = 128, CONSUMER_FEATURES = 64, CONSUMERS = FEATURES / CONSUMER_FEATURES;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE, THREADS = CONSUMER_THREADS + WARPGROUP_SIZE;
constexpr int PRODUCERS = WARPGROUP_SIZE / WARP_SIZE;
constexpr int STAGES = TOKENS == 128 ? 6 : 8;
// MXFP4: W_GROUP elements share a scale: 16 bytes of codes, one k-step of wgmma. STEPS: k-steps of
// a stage. X_SCALES: scales of a token in a stage.
constexpr int W_GROUP = 32, STEPS = GROUP / W_GROUP, X_SCALES = GROUP / X_GROUP;
// FP8: blocks of w whose scales a stage has.
constexpr int W_BLOCKS = MXFP4 ? 1 : RowsOfW::BLOCKS;
// Blocks an SM holds. With two, consumers and producer both keep the launch's register count. The
// exception is 16 tokens with rows in order: their sums need more, and the producer gives some.
constexpr int HELD = MXFP4 && TOKENS <= 16 ? 2 : 1;
constexpr bool GIVES = TOKENS == 16 && RowsOfW::IN_ORDER;
using Registers = DividedRegisters<1, HELD == 2 ? (GIVES ? 64 : 80) : MXFP4 ? 120 : 152, CONSUMERS,
                                   HELD == 2 ? (GIVES ? 88 : 80) : MXFP4 ? 192 : 176, HELD>;
// A producer warp waits for a slot while it still holds a stage that it has not handed over. The
// slot's former stage is older than the held one, so no two warps wait for each other.
static_assert(PRODUCERS < STAGES, "the place of a stage is taken by one that nobody hands over before");
// MXFP4: whether x is stored in the order in which the shifts leave the elements of w.
constexpr bool REORDERED = MXFP4 && TOKENS <= 16;

// Rounds of a block whose tiles are listed at the start. Decode with 256 experts has no more.
constexpr int LISTED_TURNS = 64;

struct UnitShape {
    static constexpr int ROWS = TOKENS, COLUMNS = FEATURES, STAGE_DEPTH = GROUP;
};

// The scales of a stage.
struct alignas(16) StageScales {
    float x[X_SCALES][TOKENS];
    float factors[W_BLOCKS][MXFP4 ? 1 : TOKENS];  // of FP8: x times w
    float w[W_BLOCKS];                            // of FP8
    int32_t regular;   // of FP8: whether all factors are what their scales multiply to
    int32_t ordinary;  // of MXFP4: whether all scales of w are, and in w_pairs
    alignas(8) uint32_t w_pairs[MXFP4 ? FEATURES : 1][STEPS / 2];  // of MXFP4: 2^6 times the scales of two steps of a row, in bf16
};

struct Shared {
    static constexpr int W_BYTES = FEATURES * (MXFP4 ? 64 : 128), STAGE_BYTES = W_BYTES + TOKENS * 128;
    static constexpr int SUM_TOKENS = minimum(TOKENS, 32), SUM_STRIDE = CONSUMER_FEATURES + 4;
    static constexpr int LISTED_BYTES = 48;
    struct Plan {
        uint8_t stages[STAGES][STAGE_BYTES];  // weights, then tokens
        float sums[CONSUMERS][SUM_TOKENS][SUM_STRIDE];
        StageScales scales[STAGES];
        PipelineBarriers<STAGES> barriers;
        uint8_t listed[LISTED_TURNS + 1][LISTED_BYTES];  // ListedUnit
    };
    static constexpr int SUMS = OFFSET_OF(Plan, sums), BYTES = sizeof(Plan);

    static constexpr int w(uint32_t stage) { return stage % STAGES * STAGE_BYTES; }
    static constexpr int x(uint32_t stage) { return w(stage) + W_BYTES; }
};
static_assert((Shared::BYTES + 1024) * HELD <= 228 * 1024, "stages exceed shared memory");

// Stages are counted over all tiles.
using Stages = Pipeline<OFFSET_OF(Shared::Plan, barriers), STAGES>;

DEVICE StageScales& stage_scales(uint32_t stage) {
    return reinterpret_cast<StageScales*>(dynamic_shared() + OFFSET_OF(Shared::Plan, scales))[stage % STAGES];
}

// Work tiles of a product.
DEVICE int64_t units_of(const Result& result) {
    return ceil_div<int64_t>(result.rows, TOKENS) * ceil_div<int64_t>(result.columns, FEATURES) * result.splits;
}

// A work tile: a part of a product, with all features of the tile or the half of them that starts
// there.
template <typename Rows>
struct UnitOf {
    QuantizedProduct product;
    Part part;
    int32_t features;
    Rows rows;
    int32_t matrix;  // whose rows they are, where each expert has a part of its own
};
// Even a field without a value costs registers.
template <>
struct UnitOf<RowsInOrder> {
    QuantizedProduct product;
    Part part;
    int32_t features;
    static constexpr RowsInOrder rows{};
};
using Unit = UnitOf<RowsOfW>;

// The tile of a block in one round, found at the start: the expert's rows and the part, in 32-bit
// counts (part_of).
struct alignas(16) ListedUnit {
    int32_t features;  // 0 where the block has nothing to do in the turn
    int32_t matrix;
    int32_t first_row, rows;     // of the expert's rows, of those of all and how many
    uint32_t row_tile, columns;  // of TOKENS rows and of CONSUMER_FEATURES columns, so many before the part
    int32_t begin, end, split;   // stages

    ListedUnit() : features(0) {}
    explicit ListedUnit(const Part& part, int32_t matrix = 0, int64_t first_row = 0, int64_t rows = 0)
        : features(FEATURES), matrix(matrix), first_row(static_cast<int32_t>(first_row)), rows(static_cast<int32_t>(rows)),
          row_tile(static_cast<uint32_t>(part.row / TOKENS)), columns(static_cast<uint32_t>(part.column / CONSUMER_FEATURES)),
          begin(static_cast<int32_t>(part.begin)), end(static_cast<int32_t>(part.end)), split(part.split) {}

    Part part() const {
        return Part{static_cast<int64_t>(row_tile) * TOKENS, static_cast<int64_t>(columns) * CONSUMER_FEATURES, begin, end, split};
    }
};
static_assert(sizeof(ListedUnit) == Shared::LISTED_BYTES, "a listed unit has the bytes of its place");

DEVICE ListedUnit* listed_units() {
    return reinterpret_cast<ListedUnit*>(dynamic_shared() + OFFSET_OF(Shared::Plan, listed));
}

// Work tiles in the order in which blocks take them. The functions below need:
//   CLUSTER                                      blocks of a cluster; they share a tile's number
//   int64_t count() const
//   ListedUnit listed(int64_t number) const      searches and divides
//   Unit unit(const ListedUnit& listed) const    does neither
// Each block of a cluster takes its own part of the tile.
//
// The tiles of one product.
struct UnitsOfProduct {
    static constexpr uint32_t CLUSTER = 1;
    const QuantizedProduct& product;

    int64_t count() const { return units_of(product.result); }
    ListedUnit listed(int64_t number) const {
        return ListedUnit(part_of<UnitShape>(product.result, number));
    }
    Unit unit(const ListedUnit& listed) const { return Unit{product, listed.part(), listed.features}; }
};

// The tiles of a block, round by round. If the last round has fewer tiles than blocks, some are
// halved: each half has one consumer's features and goes to a block that would be idle. Then no
// tile holds an SM longer than it must, and all SMs load weights. Where two blocks share an SM,
// the first ones take the whole tiles. With one block an SM, halving ends sooner only if all tiles
// are halved. Above 16 tokens none is halved, because the tokens would be loaded twice.
constexpr bool HALVED = TOKENS <= 16 && RowsOfW::IN_ORDER;

template <typename Units>
struct UnitsOfBlock {
    const Units& units;

    // A cluster counts as one block.
    static int32_t block() { return static_cast<int32_t>(blockIdx.x / Units::CLUSTER); }
    static int32_t blocks() { return static_cast<int32_t>(gridDim.x / Units::CLUSTER); }

    // Of the `left` tiles at the start of a round, how many stay whole.
    static int32_t whole(int32_t left, int32_t blocks) {
        if (left >= blocks || (HELD == 1 && 2 * left > blocks)) return left;
        return maximum(2 * left - blocks, 0);
    }
    // Blocks that take part. FP8 without halving uses the fewest blocks that need no more rounds:
    // weights arrive as fast, and the blocks are balanced. 96 tiles of six experts took 29.6 us
    // with 48 clusters, 31.0 with 66. MXFP4 has twice as many blocks: few tiles are one round, and
    // for many tiles the number makes no difference.
    int32_t taking_part() const {
        if constexpr (HALVED || MXFP4) return blocks();
        const int64_t count = units.count(), turns = maximum<int64_t>(ceil_div<int64_t>(count, blocks()), 1);
        return static_cast<int32_t>(ceil_div(count, turns));
    }
    // The block's tile in a round of the first `blocks` blocks. It searches and divides.
    ListedUnit find(int32_t turn, int32_t blocks) const {
        const int64_t first = static_cast<int64_t>(turn) * blocks, all = units.count() - first;
        if (all <= 0) return ListedUnit();
        const auto left = static_cast<int32_t>(minimum<int64_t>(all, blocks));
        const int32_t block = this->block(), whole = HALVED ? this->whole(left, blocks) : left, half = block - whole;
        if (half < 0) return units.listed(first + block);
        if (half >= 2 * (left - whole)) return ListedUnit();
        ListedUnit listed = units.listed(first + whole + half / 2);
        listed.columns += static_cast<uint32_t>(half % 2);
        listed.features = CONSUMER_FEATURES;
        return listed;
    }
};

// A block's rounds. If they fit, they are listed at the start, one thread a round; otherwise each
// is found when it comes. A search in the middle would make producers and consumers wait for an
// expert's count from memory. The compiler also treats nothing as warp-uniform in a loop with a
// search, including descriptors and stage addresses.
template <typename Units>
struct ListedTurns {
    int32_t turn = 0;

    static bool suit(const Units& units) {
        return units.count() <= static_cast<int64_t>(LISTED_TURNS) * UnitsOfBlock<Units>::blocks();
    }
    // Visible to other threads after the block's next barrier. The entry after the last round has
    // no tile.
    static void list(const Units& units) {
        const auto turn = static_cast<int32_t>(threadIdx.x);
        const UnitsOfBlock<Units> own{units};
        if (turn <= LISTED_TURNS) listed_units()[turn] = own.find(turn, own.taking_part());
    }

    explicit ListedTurns(const Units&) {}
    bool has_unit() const { return uniform(now().features) != 0; }
    const ListedUnit& now() const { return listed_units()[turn]; }
    void advance() { ++turn; }
};

template <typename Units>
struct FoundTurns {
    UnitsOfBlock<Units> units;
    int32_t turn = 0;

    explicit FoundTurns(const Units& units) : units{units} {}
    bool has_unit() const { return uniform(now().features) != 0; }
    ListedUnit now() const { return units.find(turn, units.blocks()); }
    void advance() { ++turn; }
};

// Visible to other threads after the block's next barrier.
DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        // A fill is all lanes' copies; with reordered tokens also one arrival for the stores.
        //
        // All consumer lanes release a stage. With one arrival a warp, the compiler removes the warp
        // barrier before it where it knows the warp to be whole, and racecheck sees no order. 32
        // arrivals take no longer (measured).
        Stages::initialise(shared, WARP_SIZE + (REORDERED ? 1 : 0), CONSUMER_THREADS);
        fence_mbarrier_init();
    }
}

// ---------------------------------------------------------------- producer

// One warp issues the copies of one group of ROWS rows of codes, 128 bytes each. Missing bytes are
// 0.
template <int ROWS>
DEVICE void copy_rows(SharedAddress target, const uint8_t* codes, int64_t stride, int64_t first, int64_t extent,
                      int64_t begin, int64_t depth) {
    constexpr int STEP = WARP_SIZE / 8;
    const int chunk = lane_id() % 8, lane_row = lane_id() / 8;
    const bool has_chunk = begin + 16 * chunk < depth;
    const uint8_t* source = codes + (first + lane_row) * stride + begin + 16 * chunk;
    if (first + ROWS <= extent && begin + GROUP <= depth) {
        // The lane's rows STEP apart alternate between two swizzled chunk offsets.
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

// Offset of 16 bytes of MXFP4 codes, one k-step of a row: eight rows use different banks.
DEVICE constexpr int packed_offset(int row, int step) { return row * 64 + 16 * (step ^ (row / 2 & 3)); }

// The same for rows of w that are not in order, eight at a time: either all eight exist or none.
DEVICE void copy_eights(SharedAddress target, const Unit& unit, int64_t begin) {
    constexpr int STEP = WARP_SIZE / 8;
    const QuantizedProduct& product = unit.product;
    const int64_t columns = product.result.columns - unit.part.column;
    const int64_t four = STEP * product.w_stride, eight = unit.rows.eight() * product.w_stride;
    const int chunk = lane_id() % 8, lane_row = lane_id() / 8;
    const uint8_t* source = product.w + unit.rows.row(unit.part.column + lane_row) * product.w_stride + begin + 16 * chunk;
    const SharedAddress places[2] = {target + panel_offset(lane_row, chunk), target + panel_offset(lane_row + STEP, chunk)};
    if (columns >= FEATURES && begin + GROUP <= product.result.depth) {
        UNROLL
        for (int i = 0; i < FEATURES / GRANULE; source += eight, ++i) {
            copy_async_16(places[0] + i * (GRANULE * 128), source);
            copy_async_16(places[1] + i * (GRANULE * 128), source + four);
        }
        return;
    }
    const bool in_row = begin + 16 * chunk < product.result.depth;
    UNROLL_BY(4)
    for (int i = 0; i < FEATURES / GRANULE; source += eight, ++i) {
        const bool wanted = in_row && i * GRANULE < columns;
        copy_async_16(places[0] + i * (GRANULE * 128), wanted ? source : product.w, wanted);
        copy_async_16(places[1] + i * (GRANULE * 128), wanted ? source + four : product.w, wanted);
    }
}

// The weights of a stage, by one warp: rows of 128 bytes.
struct CopiedWeights {
    void begin(const Unit&) {}
    void copy(const Unit& unit, int64_t group, SharedAddress target) const {
        if constexpr (!RowsOfW::IN_ORDER) return copy_eights(target, unit, group * GROUP);
        const QuantizedProduct& product = unit.product;
        for (int32_t first = 0; first < unit.features; first += CONSUMER_FEATURES)
            copy_rows<CONSUMER_FEATURES>(target + first * 128, product.w, product.w_stride, unit.part.column + first,
                                         product.result.columns, group * GROUP, product.result.depth);
    }
};

// The same for MXFP4: rows of 64 bytes, two codes a byte.
struct PackedWeights {
    static constexpr int ROWS = WARP_SIZE / STEPS, AT_ONCE = CONSUMER_FEATURES / ROWS;
    const uint8_t* source;  // the lane's 16 bytes of its first row's first group
    int32_t rows;           // that the lane's are among, from its first on

    void begin(const Unit& unit) {
        const QuantizedProduct& product = unit.product;
        const int64_t row = unit.part.column + lane_id() / STEPS;
        source = product.w + unit.rows.row(row) * product.w_stride + 16 * (lane_id() % STEPS);
        rows = static_cast<int32_t>(minimum<int64_t>(product.result.columns - row, unit.features - lane_id() / STEPS));
    }
    void copy(const Unit& unit, int64_t group, SharedAddress target) const {
        const QuantizedProduct& product = unit.product;
        static_assert(ROWS == GRANULE, "a copy has eight rows");
        const int64_t bytes = product.result.depth / 2 - group * 64, step = unit.rows.eight() * product.w_stride;
        const SharedAddress place = target + packed_offset(lane_id() / STEPS, lane_id() % STEPS);
        const uint8_t* from = source + group * 64;
        const bool whole = unit.part.column + unit.features <= product.result.columns && bytes >= 64;
        const int32_t left = 16 * (lane_id() % STEPS) < bytes ? rows : 0;
        for (int32_t first = 0; first < unit.features; first += CONSUMER_FEATURES) {
            if (whole) {
                UNROLL
                for (int i = 0; i < AT_ONCE; from += step, ++i)
                    copy_async_16_of_row(place + first * 64 + i * (ROWS * 64), from);
            } else {
                UNROLL_BY(4)
                for (int i = 0; i < AT_ONCE; from += step, ++i) {
                    const bool wanted = first + i * ROWS < left;
                    copy_async_16_of_row(place + first * 64 + i * (ROWS * 64), wanted ? from : product.w, wanted);
                }
            }
        }
    }
};

// Offset of element k in the 32 bytes of x of a k-step. Reordered: lane t of a row has elements 8t
// to 8t + 7 of w. wgmma takes the even ones as its 4t to 4t + 3, the odd ones as those 16 further.
DEVICE constexpr int place_of(int k) { return REORDERED ? k % 2 * 16 + k / 8 * 4 + k % 8 / 2 : k; }

// The tokens of a stage, 128 bytes each, by one warp. They are copied; for the order of place_of
// they are loaded before the slot is free and stored afterwards. Missing values are 0.
struct CopiedTokens {
    void begin(const Unit&) {}
    void load(const Unit&, int64_t) {}
    void store(const Unit& unit, int64_t group, SharedAddress target) const {
        const QuantizedProduct& product = unit.product;
        copy_rows<TOKENS>(target, product.x, product.x_stride, unit.part.row, product.result.rows, group * GROUP,
                          product.result.depth);
    }
};

struct StoredTokens {
    static constexpr int ROWS = WARP_SIZE / 8, ACCESSES = TOKENS / ROWS;
    const uint8_t* source;  // the lane's chunk of its first row's first group
    int32_t rows;           // that there are, from the lane's first on
    Vec16 chunks[ACCESSES];

    void begin(const Unit& unit) {
        const int64_t row = unit.part.row + lane_id() / 8;
        source = unit.product.x + row * unit.product.x_stride + 16 * (lane_id() % 8);
        rows = static_cast<int32_t>(minimum<int64_t>(unit.product.result.rows - row, TOKENS));
    }
    // With 16 tokens no registers are left to load a stage in advance.
    void load(const Unit& unit, int64_t group) {
        if constexpr (TOKENS == 8) load_chunks(unit, group);
    }
    void load_chunks(const Unit& unit, int64_t group) {
        const bool exists = 16 * (lane_id() % 8) < unit.product.result.depth - group * GROUP;
        UNROLL
        for (int i = 0; i < ACCESSES; ++i) {
            chunks[i] = Vec16{};
            if (exists && i * ROWS < rows) chunks[i] = load_vec16(source + group * GROUP + i * ROWS * unit.product.x_stride);
        }
    }
    void store(const Unit& unit, int64_t group, SharedAddress target) {
        if constexpr (TOKENS != 8) load_chunks(unit, group);
        const int chunk = lane_id() % 8, lane_row = lane_id() / 8;
        UNROLL
        for (int i = 0; i < ACCESSES; ++i) {
            const uint32_t (&w)[4] = chunks[i].w;
            // Half of a chunk's bytes go to the lower 16 bytes of the k-step, half to the upper
            // 16.
            const SharedAddress own = 8 * (chunk % 2);
            store_shared_vec8(target + panel_offset(lane_row + i * ROWS, chunk & ~1) + own,
                              __byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420));
            store_shared_vec8(target + panel_offset(lane_row + i * ROWS, chunk | 1) + own,
                              __byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531));
        }
    }
};

constexpr int X_LANE_ROWS = ceil_div<int>(TOKENS, WARP_SIZE);

// The FP8 scales of a stage; each lane has those of every 32nd token. They are loaded long before
// the slot is free, so no later step waits for memory.
struct LoadedFactors {
    float w[W_BLOCKS], x[X_LANE_ROWS];
    bool two = false;  // blocks of w

    void begin(const Unit& unit) { two = unit.rows.are_of_two_blocks(); }
    void load(const Unit& unit, int32_t group) {
        const QuantizedProduct& product = unit.product;
        const Part& part = unit.part;
        UNROLL
        for (int block = 0; block < W_BLOCKS; ++block) {
            const int64_t last = product.result.columns - 1, second = part.column + block * CONSUMER_FEATURES;
            const int64_t number = block == 0 ? part.column : minimum(second, last);
            if (block == 0 || two) w[block] = scale_of_group(product.w_scales, unit.rows.row(number) / GROUP, group);
        }
        UNROLL
        for (int i = 0; i < X_LANE_ROWS; ++i) {
            const int64_t row = part.row + lane_id() + i * WARP_SIZE;
            x[i] = row < product.result.rows ? scale_of_group(product.x_scales, row, group) : 0.0f;
        }
    }
    void store(StageScales& scales) const {
        bool regular = true;
        UNROLL
        for (int i = 0; i < X_LANE_ROWS; ++i) {
            const int token = lane_id() + i * WARP_SIZE;
            if (token >= TOKENS) continue;
            scales.x[0][token] = x[i];
            UNROLL
            for (int block = 0; block < W_BLOCKS; ++block) {
                if (block > 0 && !two) continue;
                scales.factors[block][token] = x[i] * w[block];
                regular = regular && is_regular(x[i], w[block]);
            }
        }
        const bool irregular = __any_sync(FULL_WARP, !regular);
        if (lane_id() == 0) {
            UNROLL
            for (int block = 0; block < W_BLOCKS; ++block)
                if (block == 0 || two) scales.w[block] = w[block];
            scales.regular = !irregular;
        }
    }
};

// ---------------------------------------------------------------- scales of MXFP4

constexpr int W_LANE_ROWS = FEATURES / WARP_SIZE;
// An element is 2^6 times what e2m1x8_as_e4m3 makes of it. A scale's byte is its biased exponent.
constexpr uint32_t LOST_EXPONENT = 6;
// Ordinary bytes of the scales of w: 2^-63 to 2^63. With these, sums of a stage are normal fp32
// numbers for any scale of x, and the factors are below 2^70.
constexpr uint32_t LEAST_ORDINARY = 64, LARGEST_ORDINARY = 190;
// The byte of a scale that multiplies zeros.
constexpr uint32_t UNIT_SCALE = 127;

// Whether one of four bytes is less than `bound`, 1 to 128.
DEVICE bool has_byte_below(uint32_t word, uint32_t bound) {
    return ((word - 0x01010101u * bound) & ~word & 0x80808080u) != 0;
}

// The powers of two whose biased exponents are the lower two bytes, as a pair of bf16.
DEVICE uint32_t exponents_as_bf16(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140) << 7; }

// The scale bytes of a stage's four groups, of which `left` exist. They are adjacent in all
// layouts. Missing groups have the byte UNIT_SCALE.
DEVICE uint32_t four_scales(const uint8_t* first, int32_t left) {
    // Only plain rows may start or end within a word.
    if (left >= STEPS && reinterpret_cast<uint64_t>(first) % 4 == 0) return *reinterpret_cast<const uint32_t*>(first);
    uint32_t word = 0;
    UNROLL
    for (int i = 0; i < STEPS; ++i) word |= (i < left ? first[i] : UNIT_SCALE) << 8 * i;
    return word;
}

// The MXFP4 scales of a stage; each lane has those of every 32nd row. They are loaded long before
// the slot is free. An address is the sum of a row's part and a group's part (scale_layout.h). If
// the rows of w are in order, a lane's rows have a constant stride.
struct LoadedScales {
    static constexpr int W_PLACES = RowsOfW::IN_ORDER ? 1 : W_LANE_ROWS;
    int64_t w_places[W_PLACES], x_places[X_LANE_ROWS];
    int32_t w_rows, x_rows;  // that there are, from the lane's first on
    int32_t in_words;        // whether all rows of w exist, and their scales of a stage are a word of memory
    uint32_t w[W_LANE_ROWS], x[X_LANE_ROWS];

    void begin(const Unit& unit) {
        const QuantizedProduct& product = unit.product;
        const Part& part = unit.part;
        const int64_t row = part.column + lane_id(), token = part.row + lane_id();
        UNROLL
        for (int i = 0; i < W_PLACES; ++i)
            w_places[i] = scale_place(product.w_scales, unit.rows.row(row + i * WARP_SIZE), 0);
        UNROLL
        for (int i = 0; i < X_LANE_ROWS; ++i)
            x_places[i] = scale_place(product.x_scales, product.x_scales.first_row + token + i * WARP_SIZE, 0);
        w_rows = static_cast<int32_t>(minimum<int64_t>(product.result.columns - row, unit.features - lane_id()));
        x_rows = static_cast<int32_t>(minimum<int64_t>(product.result.rows - token, TOKENS - lane_id()));
        const bool whole = product.w_scales.num_groups % STEPS == 0 && reinterpret_cast<uint64_t>(product.w_scales.scales) % 4 == 0;
        in_words = whole && part.column + unit.features <= product.result.columns;
    }
    void load_weights(const Unit& unit, const uint8_t* first, int32_t left) {
        const int64_t w_step = scale_place(unit.product.w_scales, WARP_SIZE, 0);
        const auto place = [&](int i) { return W_PLACES == 1 ? i * w_step : w_places[i % W_PLACES]; };
        if (in_words) {
            UNROLL
            for (int i = 0; i < W_LANE_ROWS; ++i)
                w[i] = i * static_cast<int>(WARP_SIZE) < unit.features
                    ? *reinterpret_cast<const uint32_t*>(first + place(i)) : UNIT_SCALE * 0x01010101u;
            return;
        }
        UNROLL
        for (int i = 0; i < W_LANE_ROWS; ++i)
            w[i] = i * static_cast<int>(WARP_SIZE) < w_rows ? four_scales(first + place(i), left) : UNIT_SCALE * 0x01010101u;
    }
    void load(const Unit& unit, int32_t group) {
        const QuantizedProduct& product = unit.product;
        const int32_t w_group = group * STEPS, x_group = group * X_SCALES;
        const uint8_t* const of_w = static_cast<const uint8_t*>(product.w_scales.scales) + scale_place(product.w_scales, 0, w_group);
        const uint8_t* const of_x = static_cast<const uint8_t*>(product.x_scales.scales) + scale_place(product.x_scales, 0, x_group);
        load_weights(unit, W_PLACES == 1 ? of_w + w_places[0] : of_w, product.w_scales.num_groups - w_group);
        UNROLL
        for (int i = 0; i < X_LANE_ROWS; ++i) {
            x[i] = 0;
            if (i * static_cast<int>(WARP_SIZE) < x_rows)
                x[i] = X_SCALES == 1 ? of_x[x_places[i]] : four_scales(of_x + x_places[i], product.x_scales.num_groups - x_group);
        }
    }
    void store(StageScales& scales) const {
        bool ordinary = true;
        UNROLL
        for (int i = 0; i < W_LANE_ROWS; ++i) {
            ordinary = ordinary && !has_byte_below(w[i], LEAST_ORDINARY) && !has_byte_below(~w[i], 255 - LARGEST_ORDINARY);
            const uint32_t exponents = w[i] + LOST_EXPONENT * 0x01010101u;
            uint32_t (&pairs)[STEPS / 2] = scales.w_pairs[lane_id() + i * WARP_SIZE];
            UNROLL
            for (int pair = 0; pair < STEPS / 2; ++pair) pairs[pair] = exponents_as_bf16(exponents >> 16 * pair);
        }
        UNROLL
        for (int i = 0; i < X_LANE_ROWS; ++i) {
            const int token = lane_id() + i * WARP_SIZE;
            UNROLL
            for (int step = 0; step < X_SCALES; ++step)
                if (token < TOKENS) scales.x[step][token] = e8m0_to_float(x[i] >> 8 * step & 255u);
        }
        const bool all = !__any_sync(FULL_WARP, !ordinary);
        if (lane_id() == 0) scales.ordinary = all;
    }
};

// Hands a stage over when this lane's copies have landed, except those of the PENDING newer
// stages.
template <int PENDING>
DEVICE void hand_over(SharedAddress shared, uint32_t stage) {
    copy_wait<PENDING>();
    // What this lane copied becomes visible to wgmma.
    fence_async_proxy();
    mbarrier_arrive(shared + Stages::full(stage));
}

// Hands over a stage whose MMAs read only what was stored, not what was copied. The copies arrive
// at the mbarrier when they land, and no thread waits for them.
DEVICE void hand_over_stores(SharedAddress shared, uint32_t stage) {
    const SharedAddress full = shared + Stages::full(stage);
    copy_arrive(full);
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(full);
}

template <bool IS_FIRST, typename First, typename Second>
struct Chosen {
    using Type = First;
};
template <typename First, typename Second>
struct Chosen<false, First, Second> {
    using Type = Second;
};

// Producer warp `warp` loads every fourth stage of all tiles. Loads through registers are issued
// when the stage before is handed over.
template <typename Turns, typename Units>
DEVICE void produce(const Units& units, SharedAddress shared, uint32_t warp) {
    // Stages of the tiles before, and the warp's next stage. The warp has had a stage if that
    // number is at least PRODUCERS.
    uint32_t before = 0, stage = warp;
    typename Chosen<MXFP4, PackedWeights, CopiedWeights>::Type weights;
    typename Chosen<MXFP4, LoadedScales, LoadedFactors>::Type scales;
    typename Chosen<REORDERED, StoredTokens, CopiedTokens>::Type tokens;
    for (Turns turns(units); turns.has_unit(); turns.advance()) {
        const Unit unit = units.unit(turns.now());
        const auto begin = static_cast<int32_t>(unit.part.begin);
        const uint32_t groups = static_cast<uint32_t>(unit.part.end) - begin;
        weights.begin(unit);
        scales.begin(unit);
        tokens.begin(unit);
        const auto load = [&] {
            if (stage - before >= groups) return;
            const int32_t group = begin + static_cast<int32_t>(stage - before);
            scales.load(unit, group);
            tokens.load(unit, group);
        };
        load();
        while (stage - before < groups) {
            const int32_t group = begin + static_cast<int32_t>(stage - before);
            Stages::wait_empty(shared, stage);
            weights.copy(unit, group, shared + Shared::w(stage));
            tokens.store(unit, group, shared + Shared::x(stage));
            copy_commit();
            scales.store(stage_scales(stage));
            if constexpr (REORDERED) hand_over_stores(shared, stage);
            else if (stage >= PRODUCERS) hand_over<1>(shared, stage - PRODUCERS);
            stage += PRODUCERS;
            load();
        }
        before += groups;
    }
    if constexpr (REORDERED) copy_wait<0>();
    else if (stage >= PRODUCERS) hand_over<0>(shared, stage - PRODUCERS);
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

// total += d times the scales of its tokens and of the weights in `block`. `regular` is the flag
// of the scales.
DEVICE void promote(float (&total)[N8][4], const float (&d)[N8][4], const StageScales& scales, int32_t regular, int32_t block) {
    const int token = lane_id() % 4 * 2;
    if (regular) {
        UNROLL
        for (int n = 0; n < N8; ++n) {
            float factor[2];
            load_elements(scales.factors[block] + 8 * n + token, factor);
            UNROLL
            for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(d[n][i], factor[i % 2], total[n][i]);
        }
        return;
    }
    // A token's own scales alone decide how its sums are rounded, not those of its neighbours in
    // the tile.
    UNROLL
    for (int n = 0; n < N8; ++n) {
        float x_scale[2], factor[2], first[2], second[2];
        load_elements(scales.x[0] + 8 * n + token, x_scale);
        load_elements(scales.factors[block] + 8 * n + token, factor);
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const bool own = is_regular(x_scale[i], scales.w[block]);
            first[i] = own ? 1.0f : x_scale[i];
            second[i] = own ? factor[i] : scales.w[block];
        }
        UNROLL
        for (int i = 0; i < 4; ++i)
            total[n][i] = fused_multiply_add(d[n][i] * first[i % 2], second[i % 2], total[n][i]);
    }
}

// ---------------------------------------------------------------- MMA of MXFP4

// Tokens and k-steps whose MMAs are in flight together: more would need too many registers.
constexpr int SLICE = minimum(TOKENS, 64), UNDER_WAY = TOKENS <= 16 ? STEPS : 2;
using SliceSums = float[SLICE / 8][4];

// Where a lane's operands are in a stage: for each k-step the codes of the first of its two rows,
// the row of its scales, and its first token. With few tokens these offsets stay in registers and
// only the stage's base is added: computed again, they were a fifth of a stage's instructions.
// With many tokens no registers are left for them.
struct LanePlaces {
    int codes[STEPS], row, token;

    explicit LanePlaces(uint32_t consumer) {
        const auto own = [](int place) { return REORDERED ? kept(place) : place; };
        row = own(static_cast<int>(consumer) * CONSUMER_FEATURES + warp_id() % 4 * 16 + lane_id() / 4);
        token = own(lane_id() % 4 * 2);
        UNROLL
        for (int step = 0; step < STEPS; ++step)
            codes[step] = own(packed_offset(row, step) + (REORDERED ? 4 : 2) * (lane_id() % 4));
    }
};

// A lane's operands of a stage: the codes of its two rows as stored, and their scales.
struct PackedRows {
    uint32_t codes[STEPS][2], scales[2][STEPS / 2];

    PackedRows(const uint8_t* w, const StageScales& of_stage, const LanePlaces& lane) {
        constexpr int EIGHT_ROWS = 8 * 64;
        UNROLL
        for (int step = 0; step < STEPS; ++step) {
            UNROLL
            for (int half = 0; half < 2; ++half) codes[step][half] = eight_codes(w + lane.codes[step] + half * EIGHT_ROWS);
        }
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32_t (&pairs)[STEPS / 2] = of_stage.w_pairs[lane.row + 8 * half];
            UNROLL
            for (int pair = 0; pair < STEPS / 2; ++pair) scales[half][pair] = pairs[pair];
        }
    }
    float scale(int half, int step) const {
        const uint32_t pair = scales[half][step / 2];
        return __uint_as_float(step % 2 ? pair & 0xffff0000u : pair << 16);
    }
    // Eight neighbours, or four and the four that are 16 further.
    static uint32_t eight_codes(const uint8_t* own) {
        if constexpr (REORDERED) return *reinterpret_cast<const uint32_t*>(own);
        const uint32_t first = *reinterpret_cast<const uint16_t*>(own);
        const uint32_t second = *reinterpret_cast<const uint16_t*>(own + 8);
        return first | second << 16;
    }
    // The A fragment of a k-step.
    void fragments(uint32_t (&a)[4], int step) const {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            uint32_t even, odd;
            e2m1x8_as_e4m3(codes[step][half], even, odd);
            a[half] = REORDERED ? even : __byte_perm(even, odd, 0x5140);
            a[half + 2] = REORDERED ? odd : __byte_perm(even, odd, 0x7362);
        }
    }
};

// d = w x^T of one k-step, 64 features by SLICE tokens.
DEVICE void start_step(SliceSums& d, const PackedRows& w, uint64_t x, int step) {
    uint32_t a[4];
    w.fragments(a, step);
    wgmma_fence();
    wgmma_registers_e4m3(d, a, descriptor_advance(x, 32 * step), false);
    wgmma_commit();
}

// The scales of x for a slice of a stage.
struct SliceScales {
    const StageScales& scales;
    int token;  // the lane's first

    void x(float (&own)[2], int step, int n) const { load_elements(scales.x[step] + token + 8 * n, own); }
};

// The k-steps from STEP on, of which the first are in flight. `sums` takes their MMAs times the
// scales of w. If x has a scale for each k-step, `total` takes them times both scales.
template <int STEP>
DEVICE void take_steps(SliceSums& total, SliceSums& sums, SliceSums (&d)[UNDER_WAY], const PackedRows& rows,
                       uint64_t x, const SliceScales& scales) {
    if constexpr (STEP < STEPS) {
        SliceSums& done = d[STEP % UNDER_WAY];
        wgmma_wait<minimum(UNDER_WAY, STEPS - STEP) - 1>();
        wgmma_hold(done);
        const float w[2] = {rows.scale(0, STEP), rows.scale(1, STEP)};
        UNROLL
        for (int n = 0; n < SLICE / 8; ++n) {
            float own[2];
            if constexpr (X_SCALES > 1) scales.x(own, STEP, n);
            UNROLL
            for (int i = 0; i < 4; ++i) {
                if constexpr (X_SCALES > 1)
                    total[n][i] = fused_multiply_add(done[n][i] * w[i / 2], own[i % 2], total[n][i]);
                else
                    sums[n][i] = STEP == 0 ? done[n][i] * w[i / 2] : fused_multiply_add(done[n][i], w[i / 2], sums[n][i]);
            }
        }
        if constexpr (STEP + UNDER_WAY < STEPS) start_step(done, rows, x, STEP + UNDER_WAY);
        take_steps<STEP + 1>(total, sums, d, rows, x, scales);
    }
}

// total += w x^T of a stage with all scales, for SLICE tokens.
DEVICE void multiply_slice(SliceSums& total, const PackedRows& rows, uint64_t x, const SliceScales& scales) {
    SliceSums d[UNDER_WAY], sums;
    UNROLL
    for (int step = 0; step < UNDER_WAY; ++step) start_step(d[step], rows, x, step);
    take_steps<0>(total, sums, d, rows, x, scales);
    if constexpr (X_SCALES == 1) {
        UNROLL
        for (int n = 0; n < SLICE / 8; ++n) {
            float own[2];
            scales.x(own, 0, n);
            UNROLL
            for (int i = 0; i < 4; ++i) total[n][i] = fused_multiply_add(sums[n][i], own[i % 2], total[n][i]);
        }
    }
}

// The same for all tokens and features of a consumer, where the scales of w are ordinary.
DEVICE void multiply_codes(float (&total)[N8][4], SharedAddress shared, uint32_t stage, const PackedRows& rows,
                           const LanePlaces& lane) {
    const uint64_t x = matrix_descriptor(shared + Shared::x(stage), 0, 1024);
    UNROLL
    for (int n = 0; n < N8; n += SLICE / 8) {
        const SliceScales own{stage_scales(stage), lane.token + 8 * n};
        multiply_slice(*reinterpret_cast<SliceSums*>(&total[n]), rows, descriptor_advance(x, 1024 * n), own);
    }
}

// An element of w times its scale, in bf16.
DEVICE float number_of_w(const QuantizedProduct& product, int64_t row, int64_t k) {
    const uint8_t pair = product.w[row * product.w_stride + k / 2];
    const float scale = e8m0_to_float(scale_byte(product.w_scales, row, static_cast<int32_t>(k / W_GROUP)));
    return to_float(to_bf16(e2m1_to_float(static_cast<uint8_t>(k % 2 ? pair >> 4 : pair & 15)) * scale));
}

// The same for any scales of w, element by element in fp32. A scale of x below 1 multiplies x, one
// above 1 multiplies w: then neither factor leaves fp32's range unless the product does. `x`: the
// stage's tokens.
DEVICE void multiply_numbers(float (&total)[N8][4], const QuantizedProduct& product, const Part& part, const RowsOfW& rows,
                             int64_t group, uint32_t consumer, const uint8_t* x, const StageScales& scales) {
    const int lane = lane_id(), token = lane % 4 * 2;
    const int64_t first = part.column + consumer * CONSUMER_FEATURES + 16 * (warp_id() % 4) + lane / 4;
    const int64_t last = product.result.columns - 1;
    const int count = uniform(static_cast<int>(minimum<int64_t>(GROUP, product.result.depth - group * GROUP)));
    UNROLL_BY(1)
    for (int k = 0; k < count; ++k) {
        const float w[2] = {number_of_w(product, rows.row(minimum(first, last)), group * GROUP + k),
                            number_of_w(product, rows.row(minimum(first + 8, last)), group * GROUP + k)};
        UNROLL
        for (int n = 0; n < N8; ++n) {
            UNROLL
            for (int e = 0; e < 4; ++e) {
                const int own = 8 * n + token + e % 2;
                const float scale = scales.x[X_SCALES == 1 ? 0 : k / W_GROUP][own];
                const int place = k / W_GROUP * W_GROUP + place_of(k % W_GROUP);
                const float number = to_float(fp8_e4m3{x[panel_offset(own, place / 16) + place % 16]});
                total[n][e] = fused_multiply_add(scale > 1.0f ? w[e / 2] * scale : w[e / 2],
                                                 scale > 1.0f ? number : number * scale, total[n][e]);
            }
        }
    }
}

// One stage of a tile. The tile is found again only where it is needed, because the MMAs leave few
// registers.
template <typename Units, typename Turns>
DEVICE void multiply_mxfp4(float (&total)[N8][4], const Units& units, const Turns& turns, int32_t group,
                           SharedAddress shared, uint32_t stage, uint32_t consumer, const LanePlaces& lane) {
    // Loaded before it is known whether the fast path takes them.
    const PackedRows rows(dynamic_shared() + Shared::w(stage), stage_scales(stage), lane);
    if (uniform(stage_scales(stage).ordinary)) return multiply_codes(total, shared, stage, rows, lane);
    const Unit unit = units.unit(turns.now());
    const uint8_t* const x = dynamic_shared() + Shared::x(stage);
    multiply_numbers(total, unit.product, unit.part, unit.rows, unit.part.begin + group, consumer, x, stage_scales(stage));
}

// ---------------------------------------------------------------- epilogue

// The sums of a tile, SUM_TOKENS tokens at a time, through shared memory, so that features are
// contiguous.
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
        // The next sums may replace these.
        named_barrier_sync(1 + consumer, WARPGROUP_SIZE);
    }
}

// What happens to the sums of a consumer. The functions below need:
//   void begin(const Unit& unit)
//   void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4])
//
// Here they are stored as the result.
struct StoredUnits {
    void begin(const Unit&) {}
    void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4]) {
        store_unit(unit.product.result, unit.part, consumer, total);
    }
};

// A stage without features for this consumer: it only releases the stage.
DEVICE void pass_stage(SharedAddress shared, uint32_t stage) {
    Stages::wait_full(shared, stage);
    mbarrier_arrive(shared + Stages::empty(stage));
}

template <typename Turns, typename Units, typename Results>
DEVICE void consume(const Units& units, SharedAddress shared, uint32_t consumer, Results results) {
    const LanePlaces lane(consumer);
    uint32_t stage = 0;
    for (Turns turns(units); turns.has_unit(); turns.advance()) {
        const Unit unit = units.unit(turns.now());
        results.begin(unit);
        const int32_t groups = uniform(static_cast<int32_t>(unit.part.end - unit.part.begin));
        const int32_t block = W_BLOCKS > 1 && unit.rows.are_of_two_blocks() ? static_cast<int32_t>(consumer) : 0;
        if (HALVED && consumer * CONSUMER_FEATURES >= static_cast<uint32_t>(uniform(unit.features))) {
            UNROLL_BY(1)
            for (int32_t group = 0; group < groups; ++group, ++stage) pass_stage(shared, stage);
            continue;
        }
        float total[N8][4] = {};
        for (int32_t group = 0; group < groups; ++group, ++stage) {
            Stages::wait_full(shared, stage);
            if constexpr (MXFP4) {
                multiply_mxfp4(total, units, turns, group, shared, stage, consumer, lane);
            } else {
                float d[N8][4];
                const int32_t regular = uniform(stage_scales(stage).regular);
                const SharedAddress w = shared + Shared::w(stage) + consumer * CONSUMER_FEATURES * 128;
                multiply(d, matrix_descriptor(w, 0, 1024), matrix_descriptor(shared + Shared::x(stage), 0, 1024));
                promote(total, d, stage_scales(stage), regular, block);
            }
            // Every lane has read its scales.
            mbarrier_arrive(shared + Stages::empty(stage));
        }
        const Unit done = MXFP4 ? units.unit(turns.now()) : unit;
        results.end(done, consumer, total);
    }
}

// A block's work in all rounds. `before` is what its consumers do first.
template <typename Turns, typename Units, typename Before, typename Results>
DEVICE void take_turns(const Units& units, SharedAddress shared, const Before& before, const Results& results) {
    const int32_t warpgroup = uniform(warp_id() / 4);
    if (warpgroup == CONSUMERS) {
        Registers::give();
        produce<Turns>(units, shared, uniform(warp_id() % 4));
    } else {
        Registers::take();
        before();
        consume<Turns>(units, shared, warpgroup, results);
    }
}

// The same, after the barriers are initialised.
template <typename Units, typename Before, typename Results>
DEVICE void multiply_units(const Units& units, SharedAddress shared, const Before& before, const Results& results) {
    const bool listed = ListedTurns<Units>::suit(units);
    if (listed) ListedTurns<Units>::list(units);
    __syncthreads();
    if (listed) take_turns<ListedTurns<Units>>(units, shared, before, results);
    else take_turns<FoundTurns<Units>>(units, shared, before, results);
}
