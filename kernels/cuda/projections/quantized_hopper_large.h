// FP8 GEMM by wgmma of e4m3 (sm_90a), for many tokens. Shared by linear_hopper_large.cu and
// grouped_linear_hopper_large.cu. linear_quantized.cu has the formulas; quantized_hopper.h is for
// few tokens.
//
// Tokens are the rows of the MMA, features its columns. A work tile (Unit) is 128 tokens by 256
// features (two blocks of 128 rows of w) and a part of k. A stage is 128 of k, one group of
// scales. Blocks are persistent. Three warpgroups:
// - 0 and 1: consumers, 64 tokens each. Each stage multiplies 64 x 128 with the one block of w,
//   then the other. Each MMA accumulates from zero and is promoted: times its scales, added to
//   fp32 sums. Tensor cores keep 13 fraction bits (wgmma.h), over one group at most. In a tile of
//   at most 64 tokens each consumer takes one block of w.
// - 2: producer. Warp 0 issues TMA loads, which swizzle as wgmma reads and fill with zeros. Warps
//   1 to 3 load scales, every third stage each. The next tile's first stages load during the
//   epilogue.
// Pairs (clusters of two). Either the blocks share w: each loads one block of w, multicast to
// both, and a stage takes 32 KB of L2 instead of 48. Or they share tokens and load them
// alternately: 40 KB. A stage is loaded again only when the consumers of both blocks have released
// it.
// Promotion: the producer multiplies a token's scale by a block's once a stage. If a product
// leaves the normal fp32 range, a sum is multiplied by one scale after the other.
// Floor of a stage on an SM: 1024 cycles of MMA; shared memory at 128 B a cycle: 48 KB in and 96
// KB read, 1152 cycles; 48 KB of L2. Sums and accumulators take 192 registers a thread, so no
// wider tile fits. Limit: shared memory and L2.
// What was tried: kernels/docs/linear_quantized.md.
#pragma once

#include "hopper.h"
#include "linear_quantized.h"
#include "panels.h"
#include "pipeline.h"

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

// Two tiles with the same features and consecutive tokens.
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

// What consumers need of a tile, written by the producer: to find a tile among the experts takes
// longer than a stage.
struct UnitResult {
    Result result;
    Part part;
    int32_t x_row, x_matrix;  // of the map of x: where its tokens begin
    int32_t stages;
    int32_t is_last;  // of the block's
    int32_t is_half;  // whether its first 64 tokens are all that there are
    int32_t is_rounded;
};

// Layout of dynamic shared memory. A consumer releases a stage's operands before it promotes, so
// it may read the scales of a stage whose operands are being replaced. So scales have more slots
// than stages. Tiles too: a consumer reads a tile's slot long after it released the tile's stages.
struct Shared {
    static constexpr int NUMBERS = 16;  // places of numbers of units: more than producers are ever apart
    static constexpr int X_BYTES = TOKENS * 128, STAGE_BYTES = X_BYTES + FEATURES * 128;
    static constexpr int WARP_ROWS = 16, SUM_COLUMNS = 32, SUM_STRIDE = SUM_COLUMNS + 4, OUT_COLUMNS = 64;
    static constexpr int WARP_BYTES = WARP_ROWS * SUM_STRIDE * 4;
    struct Plan {
        uint8_t stages[STAGES][STAGE_BYTES];                       // tokens, then weights
        uint8_t out[CONSUMER_THREADS / WARP_SIZE][WARP_BYTES];     // of each consumer warp: what it stores next
        StageScales scales[SCALE_STAGES];
        UnitResult results[UNITS];
        PipelineBarriers<STAGES> barriers;
        uint64_t read[STAGES];   // mbarriers: the scales of a stage in a cluster
        uint64_t told[NUMBERS];  // mbarriers
        uint32_t numbers[NUMBERS];
    };
    static constexpr int OUT = OFFSET_OF(Plan, out), BYTES = sizeof(Plan);

    static constexpr int x(uint32_t stage) { return stage % STAGES * STAGE_BYTES; }
    static constexpr int w(uint32_t stage, int block) { return x(stage) + X_BYTES + block * GROUP * 128; }
    static constexpr int read(uint32_t stage) { return OFFSET_OF(Plan, read) + 8 * (stage % STAGES); }
    static constexpr int told(uint32_t unit) { return OFFSET_OF(Plan, told) + 8 * (unit % NUMBERS); }
    static constexpr int number(uint32_t unit) { return OFFSET_OF(Plan, numbers) + 4 * (unit % NUMBERS); }
};
static_assert(Shared::WARP_ROWS * Shared::OUT_COLUMNS * 2 <= Shared::WARP_BYTES, "rows of bf16 exceed a warp's place");
static_assert(Shared::OUT % 128 == 0 && Shared::WARP_BYTES % 128 == 0, "a warp's place begins within a row of banks");

// Stages are counted over all tiles.
using Stages = Pipeline<OFFSET_OF(Shared::Plan, barriers), STAGES>;

DEVICE StageScales& stage_scales(uint32_t stage) {
    return reinterpret_cast<StageScales*>(dynamic_shared() + OFFSET_OF(Shared::Plan, scales))[stage % SCALE_STAGES];
}

// Of the block's tile number n.
DEVICE UnitResult& unit_result(uint32_t unit) {
    return reinterpret_cast<UnitResult*>(dynamic_shared() + OFFSET_OF(Shared::Plan, results))[unit % UNITS];
}

// Tiles of a product, in a given shape.
template <typename S>
DEVICE int64_t units_of(const Result& result) {
    return ceil_div<int64_t>(result.rows, S::ROWS) * ceil_div<int64_t>(result.columns, S::COLUMNS) * result.splits;
}

// A work tile: a part of a product, and where its rows start in the tensor maps of x and w. Each
// of its blocks of w is GROUP rows that share their scales.
struct Unit {
    QuantizedProduct product;
    Part part;
    int32_t x_row, x_matrix, w_rows[BLOCKS], w_matrix;
    int32_t shares_tokens;  // of a cluster: whether its blocks have the same tokens, and not the same weights
};

// Whether a tile's sums are only rounded to bf16 and stored, and the result has all of its
// features.
DEVICE bool is_rounded(const Result& result, const Part& part) {
    const bool plain = result.splits == 1 && !result.out_is_f32 && result.wide && result.before == nullptr;
    return plain && result.factor == 1.0f && part.column + FEATURES <= result.columns;
}

// ---------------------------------------------------------------- tile scheduler

// After a block's last tile.
constexpr uint32_t NO_UNIT = 0xffffffffu;

DEVICE uint32_t unit_of_count(uint32_t number, uint32_t count) { return number < count ? number : NO_UNIT; }

// The first tile of a block or of a cluster.
template <uint32_t CLUSTER>
DEVICE uint32_t first_unit(uint32_t count) { return unit_of_count(blockIdx.x / CLUSTER, count); }

// Which tiles a block takes, or a cluster, whose blocks take one tile number together:
//   uint32_t first() const                                 the first tile's number
//   uint32_t tell_behind(uint32_t taken, uint32_t number)  the tile after the `taken`th; only the
//                                                          TMA lane calls it, once each
//   uint32_t behind(uint32_t taken, uint32_t number) const the same for other producer warps
//
// Round-robin, for the tiles of one product, which cost the same. AsFree is no faster there: 816
// and 856 us for 4096 tokens of [65536, 1536] and [7168, 16384], round-robin 818 and 846.
template <uint32_t CLUSTER>
struct InTurn {
    uint32_t count;

    uint32_t first() const { return first_unit<CLUSTER>(count); }
    uint32_t behind(uint32_t, uint32_t number) const { return unit_of_count(number + gridDim.x / CLUSTER, count); }
    uint32_t tell_behind(uint32_t taken, uint32_t number) { return behind(taken, number); }
};

// Dynamic: the next free tile, by a counter in memory that is 0 before the launch. Tiles in flight
// together are then neighbours, and their operands are read from DRAM once. Round-robin lets
// clusters drift apart if one has half tiles and another none, and each reads its own expert's
// weights: 13.0 GB instead of 5.2 GB for 196608 rows.
//
// A cluster's first block takes the number, one tile in advance, and sends it to all blocks.
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

// Tiles in the order in which blocks take them; of a cluster, what its blocks take together. The
// functions below need:
//   static constexpr uint32_t CLUSTER          blocks of a cluster
//   Turns turns(SharedAddress shared) const    which of them the block takes, as above
//   Unit at(uint32_t number) const             the block's own
//
// The tiles of one product.
struct UnitsOfProduct {
    static constexpr uint32_t CLUSTER = 1;
    const QuantizedProduct& product;

    InTurn<CLUSTER> turns(SharedAddress) const { return {static_cast<uint32_t>(units_of<UnitShape>(product.result))}; }
    Unit at(uint32_t number) const {
        const Part part = part_of<UnitShape>(product.result, number);
        const auto column = static_cast<int32_t>(part.column);
        return Unit{product, part, static_cast<int32_t>(part.row), 0, {column, column + GROUP}, 0, false};
    }
};

// The same in pairs. The second tile of a pair may have no token: its block works on zeros, which
// are not stored.
struct PairsOfProduct {
    static constexpr uint32_t CLUSTER = 2;
    const QuantizedProduct& product;

    InTurn<CLUSTER> turns(SharedAddress) const { return {static_cast<uint32_t>(units_of<PairShape>(product.result))}; }
    Unit at(uint32_t number) const {
        Part part = part_of<PairShape>(product.result, number);
        part.row += cluster_rank() * TOKENS;
        const auto column = static_cast<int32_t>(part.column);
        return Unit{product, part, static_cast<int32_t>(part.row), 0, {column, column + GROUP}, 0, false};
    }
};

// All blocks of the cluster have arrived. Before that, no block may access another one's shared
// memory; no block has exited.
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
            // One lane's expected bytes, and all lanes of the warp that loads the scales.
            mbarrier_init(shared + Stages::full(stage), 1 + WARP_SIZE);
            // Weights arrive in all blocks of a cluster at once, so all of them must have released
            // the stage, one arrival a warp. Without a cluster all lanes release it
            // (quantized_hopper.h has the reason).
            mbarrier_init(shared + Stages::empty(stage),
                          CLUSTER == 1 ? CONSUMER_THREADS : CLUSTER * CONSUMER_THREADS / WARP_SIZE);
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

// The tokens of a stage. Blocks of a cluster that share them load them alternately.
template <uint32_t CLUSTER>
DEVICE void copy_tokens(const TensorMap& x_map, const Unit& unit, int32_t group, SharedAddress shared, uint32_t stage) {
    const SharedAddress to = shared + Shared::x(stage), full = shared + Stages::full(stage);
    if (CLUSTER == 1 || !unit.shares_tokens) {
        tensor_copy_in(to, x_map, group * GROUP, unit.x_row, unit.x_matrix, full);
    } else if (stage % CLUSTER == cluster_rank()) {
        tensor_copy_in_all(to, x_map, group * GROUP, unit.x_row, unit.x_matrix, full, ALL_BLOCKS<CLUSTER>);
    }
}

// Its weights: both blocks of w. If the blocks of a cluster share them, each loads one for both.
template <uint32_t CLUSTER>
DEVICE void copy_weights(const TensorMap& w_map, const Unit& unit, int32_t group, SharedAddress shared, uint32_t stage) {
    const SharedAddress full = shared + Stages::full(stage);
    static_assert(CLUSTER == 1 || CLUSTER == BLOCKS, "each block of a cluster brings a block of weights");
    if (CLUSTER == 1 || unit.shares_tokens) {
        UNROLL
        for (int block = 0; block < BLOCKS; ++block)
            tensor_copy_in(shared + Shared::w(stage, block), w_map, group * GROUP, unit.w_rows[block], unit.w_matrix, full);
    } else {
        const auto block = static_cast<int>(cluster_rank());
        // With an index unknown to the compiler the tile would be in local memory.
        const int32_t row = block == 0 ? unit.w_rows[0] : unit.w_rows[1];
        tensor_copy_in_all(shared + Shared::w(stage, block), w_map, group * GROUP, row, unit.w_matrix, full,
                           ALL_BLOCKS<CLUSTER>);
    }
}

// The operands of all stages of all tiles, by one lane.
template <typename Units>
DEVICE void produce_operands(const Units& units, const TensorMap& x_map, const TensorMap& w_map, SharedAddress shared) {
    auto turns = units.turns(shared);
    uint32_t stage = 0, taken = 0, next;
    for (uint32_t number = turns.first(); number != NO_UNIT; number = next, ++taken) {
        next = turns.tell_behind(taken, number);
        const Unit unit = units.at(number);
        const auto first = static_cast<int32_t>(unit.part.begin);
        for (int32_t group = first; group < unit.part.end; ++group, ++stage) {
            const SharedAddress full = shared + Stages::full(stage);
            Stages::wait_empty(shared, stage);
            if (group == first) {
                const bool is_last = next == NO_UNIT;
                const bool is_half = unit.product.result.rows - unit.part.row <= CONSUMER_TOKENS;
                const int32_t stages = static_cast<int32_t>(unit.part.end) - first;
                const bool rounded = is_rounded(unit.product.result, unit.part);
                unit_result(taken) = UnitResult{unit.product.result, unit.part, unit.x_row, unit.x_matrix,
                                                stages, is_last, is_half, rounded};
            }
            // Bytes outside the tensor count as arrived.
            mbarrier_arrive_expect(full, Shared::STAGE_BYTES);
            copy_tokens<Units::CLUSTER>(x_map, unit, group, shared, stage);
            copy_weights<Units::CLUSTER>(w_map, unit, group, shared, stage);
        }
    }
}

// The scales of a stage, by one warp. An address is the sum of a row's part and a group's part. A
// lane keeps the parts of its rows, because scale_place takes longer than a stage.
struct LoadedScales {
    static constexpr int COUNT = TOKENS / WARP_SIZE;
    static constexpr int64_t NOWHERE = -1;
    int64_t x_places[COUNT], w_places[BLOCKS];
    float x[COUNT], w[BLOCKS];

    void begin(const Unit& unit) {
        const QuantizedProduct& product = unit.product;
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

// The barrier after which a stage's scales may be replaced. In a cluster each block has its own
// scales. One lane's remote arrival orders nothing (mbarrier_arrive_at), so it does not cover what
// the other lanes have read.
template <uint32_t CLUSTER>
DEVICE constexpr int scales_free(uint32_t stage) { return CLUSTER == 1 ? Stages::empty(stage) : Shared::read(stage); }

// Warp `warp` of those that load scales.
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
            mbarrier_wait(shared + scales_free<Units::CLUSTER>(stage), Stages::phase(stage) ^ 1);
            scales.store(stage_scales(stage));
            mbarrier_arrive(shared + Stages::full(stage));
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

// The factors of an MMA's sums. They are read before the sums are complete: read afterwards, they
// delay the consumer's next MMA by twice the latency of shared memory.
struct Factors {
    float of_rows[2];  // tokens `row` and `row + 8`
    int32_t regular;
};

DEVICE Factors factors_of(const StageScales& scales, int block, int row) {
    return Factors{{scales.factors[block][row], scales.factors[block][row + 8]}, uniform(scales.regular)};
}

// total += d times the scales of its tokens, rows `row` and `row + 8`, and of the weights. If the
// product of the scales is not normal, d is first multiplied by the token's scale. That branch
// leaves one loop of sums; a second loop would slow the usual case.
DEVICE void promote(BlockSums& total, BlockSums& d, const Factors& factors, const StageScales& scales, int block, int row) {
    float of_rows[2] = {factors.of_rows[0], factors.of_rows[1]};
    if (__builtin_expect(factors.regular == 0, false)) {
        float x[2] = {scales.x[row], scales.x[row + 8]};
        UNROLL
        for (int half = 0; half < 2; ++half) {
            // A token's own scales alone decide how its sums are rounded, not its neighbours or
            // the other block.
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

// A consumer's share of a tile: 64 of its tokens with both blocks of w. If the tile has at most 64
// tokens, it is all tokens with one block, so no MMA is wasted.
struct Share {
    uint32_t consumer;
    int32_t warp;  // of the consumer's; like it the same in all lanes, so that it takes none of their registers
    int32_t is_half;

    // The first token of the consumer, of the warp and of the lane.
    int first_token() const { return is_half ? 0 : static_cast<int>(consumer) * CONSUMER_TOKENS; }
    int warp_row() const { return first_token() + warp * Shared::WARP_ROWS; }
    int row() const { return warp_row() + lane_id() / 4; }
    int first_block() const { return is_half ? static_cast<int>(consumer) : 0; }
};

// OUT_COLUMNS sums of each of a warp's rows, from the n8th eight of `total` on, as bf16 in shared
// memory. The 16-byte chunks of a row use the swizzle of panels.h, so lanes use different banks.
DEVICE void stage_rounded(uint8_t* place, const BlockSums& total, int n8) {
    const int lane = lane_id();
    UNROLL
    for (int n = 0; n < Shared::OUT_COLUMNS / CHUNK; ++n) {
        // The row eight further has the same chunk order.
        uint8_t* const to = place + panel_offset(lane / 4, n) + lane % 4 * 4;
        UNROLL
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint32_t*>(to + panel_offset(8 * half, 0)) =
                pack_bf16(total[n8 + n][2 * half], total[n8 + n][2 * half + 1]);
    }
    __syncwarp();
}

// Where a lane's first chunk of a warp's rows is stored, the stride of the rows, and how many
// exist.
struct RoundedRows {
    bf16* to;
    int64_t stride;
    int32_t count;
};

// A block's sums of a warp's rows, rounded, where the result has all of these features. The loads
// have no branch around them, so a row's chunks are in flight together. One after the other they
// took a fifth of the time of tiles of 12 stages.
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
        // The next ones may replace these.
        __syncwarp();
    }
}

// SUM_COLUMNS sums of each of a warp's rows in fp32, stored in any of the ways. `row`, `column`:
// of the result.
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

// A warp's sums of a tile, through shared memory, so that features are contiguous.
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

// What happens to a tile's sums; `consume` needs:
//   void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const
//
// Here they are stored.
struct StoredSums {
    void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const {
        store_unit(unit, total, share);
    }
};

// Descriptors of the operands in slot 0. Another slot is a fixed byte offset further, so little is
// computed before a consumer's MMAs.
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

// A warp releases a stage's operands, in every block of a cluster.
template <uint32_t CLUSTER>
DEVICE void give_back(SharedAddress shared, uint32_t stage) {
    const SharedAddress empty = shared + Stages::empty(stage);
    if constexpr (CLUSTER == 1) {
        mbarrier_arrive(empty);
    } else {
        // Each lane arrives for the scales that it has read itself.
        mbarrier_arrive(shared + Shared::read(stage));
        // An MMA belongs to the whole warp: one lane's arrival reports for all that it has ended.
        __syncwarp();
        if (lane_id() < CLUSTER) mbarrier_arrive_at(empty, lane_id());
    }
}

// A consumer's state: the sums of its tile, and the MMA in flight.
template <uint32_t CLUSTER>
struct Consumer {
    SharedAddress shared;
    Operands operands;
    Share share;
    uint32_t stage;
    Factors factors;  // of the product in flight
    BlockSums d, total[BLOCKS];

    Factors factors_at(uint32_t other, int block) const { return factors_of(stage_scales(other), block, share.row()); }

    // The MMA of this stage with a block of w.
    void start(int block, const Factors& its_factors) {
        const auto place = static_cast<uint32_t>(Shared::x(stage));
        start_product(d, descriptor_advance(operands.x, place + share.first_token() * 128),
                      descriptor_advance(operands.w, place + block * GROUP * 128));
        factors = its_factors;
    }

    // For a stage with both blocks of w: promotes the first MMA and starts the second.
    void multiply_by_second() {
        const Factors second = factors_at(stage, 1);
        end(d);
        promote(total[0], d, factors, stage_scales(stage), 0, share.row());
        start(1, second);
    }

    // A stage that is not the tile's last: promotes its MMAs and starts the next stage's first.
    // Nothing else is checked here, so tiles with many stages issue little besides their sums.
    template <int PRODUCTS>
    void multiply_stage() {
        const int block = PRODUCTS == 1 ? share.first_block() : 0;
        if constexpr (PRODUCTS > 1) multiply_by_second();
        Stages::wait_full(shared, stage + 1);
        const Factors next = factors_at(stage + 1, block);
        end(d);
        give_back<CLUSTER>(shared, stage);
        promote(total[PRODUCTS - 1], d, factors, stage_scales(stage), block + PRODUCTS - 1, share.row());
        ++stage;
        start(block, next);
    }

    // A tile's last stage. The MMA started after it is the next tile's first. If no next tile
    // exists, it repeats its own, unused. Otherwise accumulators would be in flight on only some
    // paths, and the compiler would wait for them where the paths meet.
    void multiply_last_stage(uint32_t taken, bool is_last_unit) {
        const Share own = share;
        const uint32_t own_stage = stage;
        if (!own.is_half) multiply_by_second();
        if (!is_last_unit) ++stage;
        Stages::wait_full(shared, stage);
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

// The tiles of a block that has any. The first MMA of a stage starts when the last one of the
// stage before is promoted. If that was another tile, its epilogue runs meanwhile.
template <uint32_t CLUSTER, typename Output>
DEVICE void consume(SharedAddress shared, uint32_t consumer, const Output& output) {
    uint32_t taken = 0;
    Stages::wait_full(shared, 0);
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

// A block's work after its barriers are initialised. `before` is what its consumers do first;
// `output` takes the sums of a tile. The launch gives 168 registers a thread: what the consumers
// add by setmaxnreg, the producer has released.
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
    // Consumers of this block still arrive at another block's barriers when that block has
    // finished its own work.
    if constexpr (Units::CLUSTER > 1) meet_blocks<Units::CLUSTER>();
}
