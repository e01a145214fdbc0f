// Products of FP8 activations with FP8 or MXFP4 weights by warpgroup matrix products of e4m3 (sm_90a), for few tokens: what
// linear_hopper.cu and grouped_linear_hopper.cu share. linear_quantised.cu has the formulas; quantised_hopper_large.h is for
// many tokens of FP8. Those of MXFP4 are here, too. grouped_linear_swiglu_hopper.cu goes on with the sums where they are.
//
// Weights are the rows of a product and tokens its columns, so that few tokens leave the tensor cores little to do that
// nobody needs: a block takes 128 features by TOKENS tokens, and of k a part in stages of 128, one group of scales.
// Blocks take such units in turn, which are found before the first one is begun (ListedTurns). Three warpgroups:
//   0 and 1  consumers, 64 features each. Of each stage the products are accumulated from zero, multiplied by the
//            scales of their tokens and of the block of weights, and added to sums in fp32: the tensor cores keep 13
//            fraction bits (hopper.h), over the 128 numbers of a group and no more. While one promotes, the other's
//            products run.
//   2        producer: each of its warps brings every fourth stage, with cp.async in the swizzle that wgmma reads, and
//            its scales; the next unit's first stages while the last one's sums are stored. A warp has two stages under
//            way: it hands one over when the copies of the next are on their way. Of MXFP4 up to 16 tokens no product
//            reads what was copied, so that copies hand their stage over themselves. What comes by way of registers is
//            asked for when the warp's stage before has been handed over.
//
// Promotion. The product of a token's scale and the block's is made once a stage, by the producer, so that a consumer
// needs one fused multiplication and addition for each sum. Where it would leave the range of normal fp32 numbers for
// some token, a sum is multiplied by one scale after the other: a sum of a group may be normal where that product is not.
//
// What a stage of FP8, 128 features by 128 tokens, takes of a multiprocessor: 512 cycles of products; 64 + some 50 instructions
// of each consumer warp and some 300 of one of the producer's, of 4 x 512 slots; of shared memory, at 128 bytes a cycle,
// 32 KB that arrive and 2 x (8 + 16) KB that the products read, 640 cycles. So shared memory is the bound, four fifths of
// the tensor cores' rate; wider tiles would read less, but 64 x 256 sums and as many accumulators fit no registers.
// Measured on one H200 a stage of 128 tokens takes some 1,900 cycles, three times that: the producer's copies of 16 bytes,
// 64 for each lane of one warp a stage, are what limits it. Copies of boxes in their place take 1,000 (the other header).
//
// Why cp.async: few tokens wait for memory, of which it brings enough, and takes any rows at multiples of 16 bytes.
//
// MXFP4. Hopper has no products of e2m1. But a code of e2m1 with its two parts moved to where e4m3 has them is an e4m3 number
// 2^-6 as large, whichever of the sixteen it is: the lossless fold of inference 5.5 with one exponent for all groups. A product
// of 32 numbers of k, one step of wgmma, belongs to one scale of a feature, so that each step's products are accumulated from
// zero and multiplied by their own scale, a power of two: nothing has to fold, however far apart scales are, and sums are
// rounded less often than over 128. Codes lie in shared memory as in memory, two in a byte: of weights half the bytes of FP8
// come. A consumer reads them, 8 numbers of a step of each of two rows a lane, and has them as the fragments of A that wgmma
// takes from registers: nobody stores e4m3 codes, and no fence is needed for them. What a lane reads are 8 neighbours, of which
// the shifts leave the even ones in one register and the odd ones in another: the channel that an instruction takes for its k-th is
// free as long as x agrees. So of up to 16 tokens the producer leaves the 32 numbers of a step in that order (`place_of`), by way of
// registers. Of more tokens that would take it longer than it saves (measured, of 4096 tokens: half as long again and more): the
// consumer reads 4 neighbours and 4 numbers 16 further, and puts even and odd ones in their order.
// Scales that are not 2^-63 to 2^63, which no quantiser makes, might leave the range of fp32 before the scale of x brings them
// back, and numbers of those from 2^126 on may be infinite in bf16. For a stage that has any, the consumers add products in
// fp32, number by number: right, and a hundred times as slow.
//
// What a stage of MXFP4 takes of a multiprocessor's 4 issue slots a cycle, as compiled: of each consumer warp 128 instructions
// with 8 tokens, 149 with 16, where x has a scale for 128 numbers, of which 56 make fragments; of the producer's warps some 330 and
// a copy of 16 bytes for each 512. 8 tokens: (8 x 128 + 330) / 4 are 340 cycles, and memory takes 7.5 of 8.5 KB at 4.24 TB/s 420. So
// two blocks share a multiprocessor there, since each waits for its own copies and products.
// Measured on one H200, experts of [4096, 4096] with 6, 192 and 768 slots: 37.4, 483 and 908 us with 16 tokens, some 200
// instructions, and 64 bytes of a row at a time from memory, 57 % of its rate. 8 tokens, and 256 bytes of a row into the
// second-level cache at a time, took 31.7, 394 and 740 us. Since all counts of experts are asked for at once, tokens and scales a
// stage ahead, and stages hand themselves over: 26.0, 364 and 693 us, of which clocks said why they scattered by 5 %: at 700 W
// the GPU lowers its clock from 1980 MHz to 1665 to 1965, so that instructions cost time whether or not they are waited for.
// ncu counted 145 a stage and consumer warp, 45 of them for where in the stage a lane's numbers lie. Kept (LanePlaces), and scales
// as bf16 in place of bytes, they are 128, and it takes 23.9, 328 and 621 us (330 and 640 were expected): 3.66 TB/s of DRAM in
// ncu's run of 192 slots, 86 % of a copy's rate.
// The compiler has to take a stage's number for the same in all lanes: where a consumer's loop has R2UR in it, it does not, and 20
// instructions more of each stage are descriptors and addresses. A search in the loop around had that effect.
// Units that are halved (UnitsOfBlock) gave the 6 slots nothing of MXFP4, though a multiprocessor has three halves then in place of
// four: so what limits them is not what two blocks share. Of FP8, whose blocks share nothing, they gave 31.4 to 30.1 us, and that
// units are found beforehand 29.5 to 28.6.
//
// The including file is compiled with TOKENS, the columns of a product, defined as 8, 16, 64 or 128; WEIGHTS as 1 (FP8) or 2
// (MXFP4); and X_GROUP, the numbers of x that share a scale, 128 or, of MXFP4, 32. Before this header it declares
//   using RowsOfW   which rows of w a unit's 128 features are (rows_of_w.h)
#pragma once

#include "async_copy.h"
#include "codes.h"
#include "hopper.h"
#include "linear_quantised.h"
#include "panels.h"
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
// Of MXFP4: numbers that share a scale, which are 16 bytes of codes and a step of wgmma; of a stage's rows; scales of a token.
constexpr int W_GROUP = 32, STEPS = GROUP / W_GROUP, X_SCALES = GROUP / X_GROUP;
// Of FP8: blocks of w whose scales a stage has.
constexpr int W_BLOCKS = MXFP4 ? 1 : RowsOfW::BLOCKS;
// Blocks that a multiprocessor holds. Where those are two, neither the consumers nor the producer can do with less than the launch
// gives, but of 16 tokens, whose sums take more, a producer of rows in order.
constexpr int HELD = MXFP4 && TOKENS <= 16 ? 2 : 1;
constexpr bool GIVES = TOKENS == 16 && RowsOfW::IN_ORDER;
using Registers = DividedRegisters<1, HELD == 2 ? (GIVES ? 64 : 80) : MXFP4 ? 120 : 152, CONSUMERS,
                                   HELD == 2 ? (GIVES ? 88 : 80) : MXFP4 ? 192 : 176, HELD>;
// A warp of the producer waits for a stage's place while it still holds one that it has not handed over. What held that
// place is older than the one it holds, so that no two wait for each other.
static_assert(PRODUCERS < STAGES, "the place of a stage is taken by one that nobody hands over before");
// Of MXFP4: whether x has the order in which the shifts leave w's numbers.
constexpr bool REORDERED = MXFP4 && TOKENS <= 16;

// Turns of a block whose units are found before anything else: 256 experts' decode has no more.
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

// Where everything lies in dynamic shared memory.
struct Shared {
    static constexpr int W_BYTES = FEATURES * (MXFP4 ? 64 : 128), STAGE_BYTES = W_BYTES + TOKENS * 128;
    static constexpr int SUMS = STAGES * STAGE_BYTES;  // float [CONSUMERS][SUM_TOKENS][SUM_STRIDE]
    static constexpr int SUM_TOKENS = minimum(TOKENS, 32), SUM_STRIDE = CONSUMER_FEATURES + 4;
    static constexpr int SCALES = SUMS + CONSUMERS * SUM_TOKENS * SUM_STRIDE * 4;  // StageScales [STAGES]
    static constexpr int FULL = SCALES + STAGES * static_cast<int>(sizeof(StageScales));  // mbarriers [STAGES]
    static constexpr int EMPTY = FULL + 8 * STAGES;
    static constexpr int LISTED = EMPTY + 8 * STAGES, LISTED_BYTES = 48;  // ListedUnit [LISTED_TURNS + 1]
    static constexpr int BYTES = LISTED + (LISTED_TURNS + 1) * LISTED_BYTES;

    static constexpr int w(uint32_t stage) { return stage % STAGES * STAGE_BYTES; }
    static constexpr int x(uint32_t stage) { return w(stage) + W_BYTES; }
    static constexpr int full(uint32_t stage) { return FULL + 8 * (stage % STAGES); }
    static constexpr int empty(uint32_t stage) { return EMPTY + 8 * (stage % STAGES); }
};
static_assert((Shared::BYTES + 1024) * HELD <= 228 * 1024, "stages exceed shared memory");

// Parity of the phase in which stage number n, counted over all units, has come.
DEVICE uint32_t stage_phase(uint32_t stage) { return stage / STAGES & 1; }

DEVICE StageScales& stage_scales(uint32_t stage) {
    return reinterpret_cast<StageScales*>(dynamic_shared() + Shared::SCALES)[stage % STAGES];
}

// Of a product.
DEVICE int64_t units_of(const Result& result) {
    return ceil_div<int64_t>(result.rows, TOKENS) * ceil_div<int64_t>(result.columns, FEATURES) * result.splits;
}

// What a block computes next: a part of a product, of all features of a tile or of the half of them that begins there.
template <typename Rows>
struct UnitOf {
    QuantisedProduct product;
    Part part;
    int32_t features;
    Rows rows;
    int32_t matrix;  // whose rows they are, where each expert has a part of its own
};
// A field without a number, too, costs registers.
template <>
struct UnitOf<RowsInOrder> {
    QuantisedProduct product;
    Part part;
    int32_t features;
    static constexpr RowsInOrder rows{};
};
using Unit = UnitOf<RowsOfW>;

// What a block takes in a turn, found beforehand: which expert's rows or which part, in numbers of 32 bits (part_of).
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

DEVICE ListedUnit* listed_units() { return reinterpret_cast<ListedUnit*>(dynamic_shared() + Shared::LISTED); }

// Units in the order in which blocks take them, as the functions below are given them:
//   CLUSTER                                      blocks of a cluster, which take a unit together, each its own part of it
//   int64_t count() const
//   ListedUnit listed(int64_t number) const      searches and divides
//   Unit unit(const ListedUnit& listed) const    does neither
//
// Those of one product.
struct UnitsOfProduct {
    static constexpr uint32_t CLUSTER = 1;
    const QuantisedProduct& product;

    int64_t count() const { return units_of(product.result); }
    ListedUnit listed(int64_t number) const {
        return ListedUnit(part_of<UnitShape>(product.result, number));
    }
    Unit unit(const ListedUnit& listed) const { return Unit{product, listed.part(), listed.features}; }
};

// The units of a block, a round of all blocks after the other. Where the last round has fewer units than blocks some of them
// are halved, a consumer's features each, for blocks that would have none: no unit takes a multiprocessor longer than it must,
// and weights come over all of them. Of blocks that share a multiprocessor, as every second one does, the first ones take what
// is whole. Where a block has a multiprocessor to itself nothing ends sooner unless all are halved. Of more than 16 tokens, which
// would come twice, none are.
constexpr bool HALVED = TOKENS <= 16 && RowsOfW::IN_ORDER;

template <typename Units>
struct UnitsOfBlock {
    const Units& units;

    // Clusters count as blocks do.
    static int32_t block() { return static_cast<int32_t>(blockIdx.x / Units::CLUSTER); }
    static int32_t blocks() { return static_cast<int32_t>(gridDim.x / Units::CLUSTER); }

    // Of the units that are left at the beginning of a round, those that are not halved.
    static int32_t whole(int32_t left, int32_t blocks) {
        if (left >= blocks || (HELD == 1 && 2 * left > blocks)) return left;
        return maximum(2 * left - blocks, 0);
    }
    // Blocks that take part. Of FP8, where no unit is halved, as few as have no more turns for it: weights come as fast to those, and
    // none has a unit more than others. 96 tiles of six experts took 29.6 us by 48 clusters and 31.0 by 66. Of MXFP4, whose blocks
    // are twice as many, so few tiles are one turn, and where there are many the difference is none.
    int32_t taking_part() const {
        if constexpr (HALVED || MXFP4) return blocks();
        const int64_t count = units.count(), turns = maximum<int64_t>(ceil_div<int64_t>(count, blocks()), 1);
        return static_cast<int32_t>(ceil_div(count, turns));
    }
    // What the block takes in a turn of the first `blocks` blocks, with the searches and divisions that say so.
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

// A block's turns, one after the other: listed beforehand where there are no more than there is room for, by a thread each, or found
// when they come. Who copies or multiplies would search, and wait for an expert's count out of memory, in the middle of it; and
// where a loop has a search in it the compiler takes nothing for the same in all lanes, descriptors and addresses of stages neither.
template <typename Units>
struct ListedTurns {
    int32_t turn = 0;

    static bool suit(const Units& units) {
        return units.count() <= static_cast<int64_t>(LISTED_TURNS) * UnitsOfBlock<Units>::blocks();
    }
    // For others to see behind the block's next barrier. Behind the last turn one without a unit.
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

// For others behind the block's next barrier.
DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            // All lanes' copies; where tokens are stored in another order, the stores besides.
            mbarrier_init(shared + Shared::full(stage), WARP_SIZE + (REORDERED ? 1 : 0));
            // All lanes of the consumers: where the compiler knows a warp to be whole it leaves out the barrier behind which one lane
            // could arrive for all, and racecheck then sees no order (32 arrivals take no longer, measured).
            mbarrier_init(shared + Shared::empty(stage), CONSUMER_THREADS);
        }
        fence_mbarrier_init();
    }
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

// Where 16 bytes of codes of MXFP4 lie, a step of a row: eight rows' are in different banks.
DEVICE constexpr int packed_offset(int row, int step) { return row * 64 + 16 * (step ^ (row / 2 & 3)); }

// The same of the unit's rows of w where they are not in order, eight at a time: there are all of them or none.
DEVICE void copy_eights(SharedAddress target, const Unit& unit, int64_t begin) {
    constexpr int STEP = WARP_SIZE / 8;
    const QuantisedProduct& product = unit.product;
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
        const QuantisedProduct& product = unit.product;
        for (int32_t first = 0; first < unit.features; first += CONSUMER_FEATURES)
            copy_rows<CONSUMER_FEATURES>(target + first * 128, product.w, product.w_stride, unit.part.column + first,
                                         product.result.columns, group * GROUP, product.result.depth);
    }
};

// The same of MXFP4: rows of 64 bytes, two codes in each.
struct PackedWeights {
    static constexpr int ROWS = WARP_SIZE / STEPS, AT_ONCE = CONSUMER_FEATURES / ROWS;
    const uint8_t* source;  // the lane's 16 bytes of its first row's first group
    int32_t rows;           // that the lane's are among, from its first on

    void begin(const Unit& unit) {
        const QuantisedProduct& product = unit.product;
        const int64_t row = unit.part.column + lane_id() / STEPS;
        source = product.w + unit.rows.row(row) * product.w_stride + 16 * (lane_id() % STEPS);
        rows = static_cast<int32_t>(minimum<int64_t>(product.result.columns - row, unit.features - lane_id() / STEPS));
    }
    void copy(const Unit& unit, int64_t group, SharedAddress target) const {
        const QuantisedProduct& product = unit.product;
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

// Where of the 32 bytes of x of a step its number k lies. Where they are reordered lane t of a row has numbers 8t to 8t + 7 of w,
// and wgmma takes the even ones for its 4t-th to 4t + 3-th and the odd ones for those 16 further.
DEVICE constexpr int place_of(int k) { return REORDERED ? k % 2 * 16 + k / 8 * 4 + k % 8 / 2 : k; }

// The tokens' numbers of a stage, 128 bytes each, by one warp: copied or, where they have to be in the order of place_of, loaded
// before the stage's place is free and stored then. Zeros where there are none.
struct CopiedTokens {
    void begin(const Unit&) {}
    void load(const Unit&, int64_t) {}
    void store(const Unit& unit, int64_t group, SharedAddress target) const {
        const QuantisedProduct& product = unit.product;
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
    // Of 16 tokens there are no registers for those of a stage to come.
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
            // Half of a chunk's bytes lie in the lower 16 of the step, half in the upper ones.
            const SharedAddress own = 8 * (chunk % 2);
            store_shared_vec8(target + panel_offset(lane_row + i * ROWS, chunk & ~1) + own,
                              __byte_perm(w[0], w[1], 0x6420), __byte_perm(w[2], w[3], 0x6420));
            store_shared_vec8(target + panel_offset(lane_row + i * ROWS, chunk | 1) + own,
                              __byte_perm(w[0], w[1], 0x7531), __byte_perm(w[2], w[3], 0x7531));
        }
    }
};

constexpr int X_LANE_ROWS = ceil_div<int>(TOKENS, WARP_SIZE);

// The scales of a stage of FP8, a lane those of every 32nd token. They are asked for long before the stage's place is free: what
// comes after them, the stage before included, waits for no memory then.
struct LoadedFactors {
    float w[W_BLOCKS], x[X_LANE_ROWS];
    bool two = false;  // blocks of w

    void begin(const Unit& unit) { two = unit.rows.are_of_two_blocks(); }
    void load(const Unit& unit, int32_t group) {
        const QuantisedProduct& product = unit.product;
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
// 2^6 times what e2m1x8_as_e4m3 makes of a number is the number. A byte of a scale counts its exponent.
constexpr uint32_t LOST_EXPONENT = 6;
// Bytes of the scales of w that are ordinary: 2^-63 to 2^63. Sums of a stage of numbers with such scales are normal fp32
// numbers, whatever scale x has, and the factors below 2^70.
constexpr uint32_t LEAST_ORDINARY = 64, LARGEST_ORDINARY = 190;
// The byte of a scale that multiplies zeros.
constexpr uint32_t NOBODY = 127;

// Whether one of four bytes is less than `bound`, 1 to 128.
DEVICE bool has_byte_below(uint32_t word, uint32_t bound) {
    return ((word - 0x01010101u * bound) & ~word & 0x80808080u) != 0;
}

// The powers of two that have the lower two bytes as their exponents' codes.
DEVICE uint32_t exponents_as_bf16(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140) << 7; }

// The bytes of the scales of the four groups of a stage, of which there are `left`: they lie side by side in all layouts.
// Groups that there are not have NOBODY's.
DEVICE uint32_t four_scales(const uint8_t* first, int32_t left) {
    // Only plain rows may end, or begin, within a word.
    if (left >= STEPS && reinterpret_cast<uint64_t>(first) % 4 == 0) return *reinterpret_cast<const uint32_t*>(first);
    uint32_t word = 0;
    UNROLL
    for (int i = 0; i < STEPS; ++i) word |= (i < left ? first[i] : NOBODY) << 8 * i;
    return word;
}

// The scales of a stage of MXFP4, a lane those of every 32nd row. They are asked for long before the stage's place is free. Where
// one lies is a sum of what its row and what its group says (scale_layout.h), and w's rows of a lane are equally far apart where
// they are in order.
struct LoadedScales {
    static constexpr int W_PLACES = RowsOfW::IN_ORDER ? 1 : W_LANE_ROWS;
    int64_t w_places[W_PLACES], x_places[X_LANE_ROWS];
    int32_t w_rows, x_rows;  // that there are, from the lane's first on
    int32_t in_words;        // whether all rows of w exist, and their scales of a stage are a word of memory
    uint32_t w[W_LANE_ROWS], x[X_LANE_ROWS];

    void begin(const Unit& unit) {
        const QuantisedProduct& product = unit.product;
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
                    ? *reinterpret_cast<const uint32_t*>(first + place(i)) : NOBODY * 0x01010101u;
            return;
        }
        UNROLL
        for (int i = 0; i < W_LANE_ROWS; ++i)
            w[i] = i * static_cast<int>(WARP_SIZE) < w_rows ? four_scales(first + place(i), left) : NOBODY * 0x01010101u;
    }
    void load(const Unit& unit, int32_t group) {
        const QuantisedProduct& product = unit.product;
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

// Hands a stage over once this lane's copies have landed, but for those of the PENDING stages after it.
template <int PENDING>
DEVICE void hand_over(SharedAddress shared, uint32_t stage) {
    copy_wait<PENDING>();
    // What this lane copied becomes visible to the products.
    fence_async_proxy();
    mbarrier_arrive(shared + Shared::full(stage));
}

// Hands a stage over whose products read nothing that was copied, only what was stored: the copies tell by themselves when they
// have landed, and nobody waits for them.
DEVICE void hand_over_stores(SharedAddress shared, uint32_t stage) {
    const SharedAddress full = shared + Shared::full(stage);
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

// Warp `warp` of the producer brings every fourth stage of all units. What comes by way of registers is asked for when the stage
// before is handed over.
template <typename Turns, typename Units>
DEVICE void produce(const Units& units, SharedAddress shared, uint32_t warp) {
    // Stages of the units before, and the warp's next one: it has had one as soon as that is not among the first.
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
            mbarrier_wait(shared + Shared::empty(stage), stage_phase(stage) ^ 1);
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

// total += d times the scales of its tokens and of the weights, those of `block`. `regular`: of the scales.
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
    // A token's own scales say how its sums are rounded, and not those of its neighbours in the tile.
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

// ---------------------------------------------------------------- products of MXFP4

// Tokens whose products are under way together, and steps of theirs: more would have no registers.
constexpr int SLICE = minimum(TOKENS, 64), UNDER_WAY = TOKENS <= 16 ? STEPS : 2;
using SliceSums = float[SLICE / 8][4];

// Where in a stage lies what a lane multiplies: of each step its codes of the first of its two rows, the scales of that row, and
// its first token. Of few tokens they are kept, since a stage's base is then all that is added: computed anew they were a fifth of a
// stage's instructions. Of many there are no registers for them.
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

// What a lane multiplies of a stage: of its two rows the codes as they lie in memory, and the scales.
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
    // A step as wgmma takes it.
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

// d = w x^T of one step, 64 features by SLICE tokens.
DEVICE void start_step(SliceSums& d, const PackedRows& w, uint64_t x, int step) {
    uint32_t a[4];
    w.fragments(a, step);
    wgmma_fence();
    wgmma_registers_e4m3(d, a, descriptor_advance(x, 32 * step), false);
    wgmma_commit();
}

// The scales of x of a slice of a stage.
struct SliceScales {
    const StageScales& scales;
    int token;  // the lane's first

    void x(float (&own)[2], int step, int n) const { load_elements(scales.x[step] + token + 8 * n, own); }
};

// The steps from STEP on, of which the first are under way: `sums` of their products with the scales of w or, where x has a
// scale for each of them, `total` of those with both.
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

// total += w x^T of a stage with all scales, of SLICE tokens.
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

// The same of all tokens and features of a consumer, of weights whose scales are ordinary.
DEVICE void multiply_codes(float (&total)[N8][4], SharedAddress shared, uint32_t stage, const PackedRows& rows,
                           const LanePlaces& lane) {
    const uint64_t x = matrix_descriptor(shared + Shared::x(stage), 0, 1024);
    UNROLL
    for (int n = 0; n < N8; n += SLICE / 8) {
        const SliceScales own{stage_scales(stage), lane.token + 8 * n};
        multiply_slice(*reinterpret_cast<SliceSums*>(&total[n]), rows, descriptor_advance(x, 1024 * n), own);
    }
}

// A number of w with its scale, in bf16.
DEVICE float number_of_w(const QuantisedProduct& product, int64_t row, int64_t k) {
    const uint8_t pair = product.w[row * product.w_stride + k / 2];
    const float scale = e8m0_to_float(scale_byte(product.w_scales, row, static_cast<int32_t>(k / W_GROUP)));
    return to_float(to_bf16(e2m1_to_float(static_cast<uint8_t>(k % 2 ? pair >> 4 : pair & 15)) * scale));
}

// The same of weights of any scales, number by number in fp32. A scale of x below 1 is multiplied with the numbers of x, one
// above it with those of w: neither leaves fp32's range for it unless the product does. `x`: the stage's tokens.
DEVICE void multiply_numbers(float (&total)[N8][4], const QuantisedProduct& product, const Part& part, const RowsOfW& rows,
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

// Of a stage of a unit, which is found anew where it is needed: the registers that a product takes are scarce.
template <typename Units, typename Turns>
DEVICE void multiply_mxfp4(float (&total)[N8][4], const Units& units, const Turns& turns, int32_t group,
                           SharedAddress shared, uint32_t stage, uint32_t consumer, const LanePlaces& lane) {
    // Asked for before it is known whether they are taken as they are.
    const PackedRows rows(dynamic_shared() + Shared::w(stage), stage_scales(stage), lane);
    if (uniform(stage_scales(stage).ordinary)) return multiply_codes(total, shared, stage, rows, lane);
    const Unit unit = units.unit(turns.now());
    const uint8_t* const x = dynamic_shared() + Shared::x(stage);
    multiply_numbers(total, unit.product, unit.part, unit.rows, unit.part.begin + group, consumer, x, stage_scales(stage));
}

// ---------------------------------------------------------------- units

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

// What becomes of the sums of a consumer, as the functions below are given it:
//   void begin(const Unit& unit)
//   void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4])
//
// They are the result's.
struct StoredUnits {
    void begin(const Unit&) {}
    void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4]) {
        store_unit(unit.product.result, unit.part, consumer, total);
    }
};

// A stage that this consumer has no features of: it only says that it does not need it.
DEVICE void pass_stage(SharedAddress shared, uint32_t stage) {
    mbarrier_wait(shared + Shared::full(stage), stage_phase(stage));
    mbarrier_arrive(shared + Shared::empty(stage));
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
            mbarrier_wait(shared + Shared::full(stage), stage_phase(stage));
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
            mbarrier_arrive(shared + Shared::empty(stage));
        }
        const Unit done = MXFP4 ? units.unit(turns.now()) : unit;
        results.end(done, consumer, total);
    }
}

// What a block does in its turns: `before` is what its consumers do first.
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

// The same, once its barriers are there.
template <typename Units, typename Before, typename Results>
DEVICE void multiply_units(const Units& units, SharedAddress shared, const Before& before, const Results& results) {
    const bool listed = ListedTurns<Units>::suit(units);
    if (listed) ListedTurns<Units>::list(units);
    __syncthreads();
    if (listed) take_turns<ListedTurns<Units>>(units, shared, before, results);
    else take_turns<FoundTurns<Units>>(units, shared, before, results);
}
