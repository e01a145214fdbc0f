// The experts' first linear layer, SwiGLU and quantization on sm_90a, for few rows of an expert
// with FP8 weights, or any number with MXFP4: grouped_linear_swiglu.cu, which has the formulas,
// with e4m3 wgmma.
//
// Work division: quantized_hopper.h says how a block computes its work tiles, grouped_linear.h
// which exist. A tile is TOKENS rows of an expert by 128 features, which need 256 rows of w. A
// cluster of two blocks takes it: one with gate's rows, one with up's (rows_of_w.h). In the
// epilogue each block keeps the sums of every second token. It sends the others to the same thread
// of the other block by DSMEM. A block then has gate and up of all features of half the tokens.
// Warps store the largest magnitudes in shared memory; after the tile's only barrier each lane
// computes its scales. Codes pass through shared memory, so that a lane stores 16 neighbours. One
// consumer adds up a slice of w stage by stage, as in the other kernels of this GEMM: the bits are
// the same. The grid is as many clusters as fit (the driver's count), and they take tiles
// round-robin: a cluster that has to wait starts late. While the producer loads the first stages,
// the consumers quantize the padding rows.
//
// Floor: the bytes of w at 4.24 TB/s: 6 experts of [4096, 4096] 23.7 us, of MXFP4 12.6 us with
// scales; 256 experts 1.01 and 0.54 ms. Limit: FP8 memory; MXFP4 the consumers' instructions as
// much. The epilogue takes about 200 instructions of a consumer warp a tile, and an exchange of
// about 700 ns that the producer hides.
//
// Defines: TOKENS (rows of an expert in a tile) 16, of MXFP4 also 8, 64 or 128; WEIGHTS 1: FP8,
// 2: MXFP4; X_GROUP (values of x that share a scale) 128, of MXFP4 also 32.
// Launch: any grid in x of whole clusters. FP8 with gate before up: features a multiple of 128.
// What was tried: kernels/docs/grouped_linear_swiglu.md.
#if !defined(TOKENS) || !defined(WEIGHTS) || !defined(X_GROUP)
#error "define TOKENS, WEIGHTS as 1 (FP8) or 2 (MXFP4), and X_GROUP"
#endif
#include "grouped_linear_swiglu.h"
#include "rows_of_w.h"

using RowsOfW = RowsOfGateOrUp;
#include "quantized_hopper.h"

constexpr uint32_t CLUSTER = 2;
constexpr int OWN_TOKENS = TOKENS / 2;  // of a tile, those of which a block gets gate and up
constexpr int WARPS = CONSUMER_THREADS / WARP_SIZE, GROUP_WARPS = 2;  // of 32 features, a warp has 16
constexpr int WARP_FEATURES = FEATURES / WARPS;
constexpr int LOG2_OF_128 = 7;

struct TileShape {
    static constexpr int ROWS = TOKENS, COLUMNS = 2 * FEATURES, STAGE_DEPTH = GROUP;
};

// Shared memory of the epilogue, in the place of stored sums. A warp stores largest magnitudes in
// one of two buffers, alternating by tile. It reuses a buffer two tiles later. The barrier of the
// tile between then guarantees that all warps have read it. Codes are the warp's own.
struct WayOut {
    using Magnitudes = uint32_t[OWN_TOKENS][WARPS];  // as bits
    alignas(16) Magnitudes magnitudes[2];
    alignas(16) uint8_t codes[WARPS][OWN_TOKENS][WARP_FEATURES];
};
static_assert(sizeof(WayOut) <= CONSUMERS * Shared::SUM_TOKENS * Shared::SUM_STRIDE * 4, "what sums become exceeds their place");

DEVICE WayOut& way_out() { return *reinterpret_cast<WayOut*>(dynamic_shared() + Shared::SUMS); }

// Sums exchanged between blocks alternate between PLACES slots. A thread that sends those of a
// tile has received those of the tile before from all threads of the other consumer. These have
// then read the slot's earlier content.
constexpr uint32_t PLACES = 2;

// After what the work tiles need. Values computed once from the parameters stay here: registers
// are scarce.
struct FusedShared {
    using Grouped = SharedOfExperts<Shared::Plan>;
    static constexpr int PAIRS_BYTES = N8 * WARPGROUP_SIZE * 4;  // that a consumer is told of a unit
    struct Plan {
        Grouped::Plan grouped;
        QuantizedRows target;
        uint64_t told[PLACES][CONSUMERS];  // mbarriers
        uint32_t pairs[PLACES][CONSUMERS][N8][WARPGROUP_SIZE];
    };
    static constexpr int TOLD = OFFSET_OF(Plan, told), BYTES = sizeof(Plan);

    static QuantizedRows& target() {
        return *reinterpret_cast<QuantizedRows*>(dynamic_shared() + OFFSET_OF(Plan, target));
    }
    static constexpr uint32_t place(uint32_t unit, uint32_t consumer) { return unit % PLACES * CONSUMERS + consumer; }
    static constexpr int told(uint32_t unit, uint32_t consumer) { return TOLD + 8 * place(unit, consumer); }
    static constexpr int pair(uint32_t unit, uint32_t consumer, int n, int thread) {
        return OFFSET_OF(Plan, pairs) + place(unit, consumer) * PAIRS_BYTES + (n * WARPGROUP_SIZE + thread) * 4;
    }
};
static_assert((FusedShared::BYTES + 1024) * HELD <= 228 * 1024, "stages exceed shared memory");
SHARED_MEMORY(grouped_linear_swiglu_hopper, FusedShared::BYTES)

// Tiles of experts: a cluster's first block has gate's rows, its second block up's. A block's
// features are those of the tile. Its columns are those of gate or of up only.
struct UnitsOfGateOrUp {
    static constexpr uint32_t CLUSTER = ::CLUSTER;
    ExpertTiles<TileShape> tiles;
    int32_t interleaved;

    int64_t count() const { return tiles.count(); }
    ListedUnit listed(int64_t number) const {
        const GroupedLinearParams& params = tiles.params;
        const ExpertTile tile = tiles[number];
        const Rows rows = rows_of(params, tile.expert);
        Part part = part_of<TileShape>(product_of_expert(params, tile.expert, rows).result, tile.number);
        part.column /= 2;
        return ListedUnit(part, tile.expert, rows.first, rows.count);
    }
    Unit unit(const ListedUnit& listed) const {
        const GroupedLinearParams& params = tiles.params;
        QuantizedProduct product = product_of_expert(params, listed.matrix, Rows{listed.first_row, listed.rows});
        product.result.columns = params.columns / 2;
        const RowsOfGateOrUp rows = RowsOfGateOrUp::of(params.columns / 2, interleaved, cluster_rank() == 1);
        return Unit{product, listed.part(), FEATURES, rows, params.expert_offsets ? 0 : listed.matrix};
    }
};

// ---------------------------------------------------------------- gate and up

// A consumer of a block, and the thread in it.
struct Share {
    uint32_t consumer, rank;
    int thread;

    explicit Share(uint32_t consumer)
        : consumer(consumer), rank(cluster_rank()), thread(static_cast<int>(threadIdx.x) % WARPGROUP_SIZE) {}

    // The tile's token number of the block's own token: one of which it has gate and up.
    int token(int own) const { return 2 * own + static_cast<int>(rank); }
    // The own token that this thread has among eight tokens n.
    int own(int n) const { return 4 * n + lane_id() % 4; }
    void meet() const { named_barrier_sync(1, CONSUMER_THREADS); }
};

// Gate or up of a feature and of the feature eight further, rounded to bf16, of one token of each
// eight.
using Pairs = uint32_t[N8];
// The results of SwiGLU on these.
using Products = float[N8][2];

// A thread has two neighbouring tokens of each eight: the first is the first block's, the second
// is the second block's. It sends the other block's sums to the same thread there, and receives
// its own from there. `unit`: the number of tiles before this one.
DEVICE void exchange_sums(const Share& share, SharedAddress shared, uint32_t unit, const float (&total)[N8][4], Pairs& kept,
                          Pairs& received) {
    const SharedAddress told = shared + FusedShared::told(unit, share.consumer);
    if (share.thread == 0) mbarrier_arrive_expect(told, FusedShared::PAIRS_BYTES);
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const uint32_t first = pack_bf16(total[n][0], total[n][2]), second = pack_bf16(total[n][1], total[n][3]);
        kept[n] = share.rank == 0 ? first : second;
        store_at(shared + FusedShared::pair(unit, share.consumer, n, share.thread), share.rank == 0 ? second : first, told,
                 1 - share.rank);
    }
    mbarrier_wait(told, unit / PLACES & 1);
    UNROLL
    for (int n = 0; n < N8; ++n)
        received[n] = *reinterpret_cast<const uint32_t*>(dynamic_shared() +
                                                         FusedShared::pair(unit, share.consumer, n, share.thread));
}

// The weights of a tile's tokens: a lane has those of every 32nd.
constexpr int LANE_WEIGHTS = ceil_div<int>(TOKENS, WARP_SIZE);
using Weights = float[LANE_WEIGHTS];

// In 32 bits, which all row numbers fit (ListedUnit): 64 bits take twice the instructions.
DEVICE int32_t first_row(const Unit& unit) {
    return static_cast<int32_t>(unit.product.x_scales.first_row) + static_cast<int32_t>(unit.part.row);
}
DEVICE int32_t count_tokens(const Unit& unit) {
    return minimum(static_cast<int32_t>(unit.product.result.rows) - static_cast<int32_t>(unit.part.row), TOKENS);
}

DEVICE void load_weights(const GroupedLinearSwigluParams& params, const Unit& unit, Weights& weights) {
    const float* const first = params.weight + unit.matrix * params.rows + first_row(unit);
    const int32_t count = count_tokens(unit);
    UNROLL
    for (int i = 0; i < LANE_WEIGHTS; ++i) {
        const int token = lane_id() + i * static_cast<int>(WARP_SIZE);
        weights[i] = params.weight && token < count ? first[token] : 1.0f;
    }
}

// Sums of absent tokens are 0.
DEVICE void activate(const GroupedLinearSwigluParams& params, const Share& share, const Pairs& kept, const Pairs& received,
                     const Weights& weights, Products& o) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const uint32_t gate = share.rank == 0 ? kept[n] : received[n], up = share.rank == 0 ? received[n] : kept[n];
        const float of_lane = weights[8 * n / static_cast<int>(WARP_SIZE)];
        const float weight = __shfl_sync(FULL_WARP, of_lane, static_cast<uint32_t>(share.token(share.own(n))) % WARP_SIZE);
        o[n][0] = weighted_swiglu(unpack_bf16_low(gate), unpack_bf16_low(up), params.limit, weight);
        o[n][1] = weighted_swiglu(unpack_bf16_high(gate), unpack_bf16_high(up), params.limit, weight);
        if (params.round_to_bf16) round_to_bf16(o[n]);
    }
}

// ---------------------------------------------------------------- scales

// Stores the largest magnitude of a warp's features of each token; 8 lanes share a token.
DEVICE void leave_magnitudes(const Share& share, const Products& o, WayOut::Magnitudes& magnitudes) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        uint32_t magnitude = maximum(__float_as_uint(o[n][0]) & 0x7fffffffu, __float_as_uint(o[n][1]) & 0x7fffffffu);
        UNROLL
        for (int distance = 16; distance >= 4; distance /= 2)
            magnitude = maximum(magnitude, __shfl_xor_sync(FULL_WARP, magnitude, distance));
        if (lane_id() < 4) magnitudes[share.own(n)][warp_id()] = magnitude;
    }
}

// The largest magnitude of a token's features of `count` warps from `first` on, as bits
// (quantize.h).
DEVICE uint32_t largest_of_warps(const uint32_t (&of_token)[WARPS], int first, int count) {
    uint32_t magnitude = 0;
    for (int warp = first; warp < first + count; ++warp) magnitude = maximum(magnitude, of_token[warp]);
    return magnitude;
}

// The largest magnitude of the group that shares a scale with this warp's features.
DEVICE uint32_t largest_of_group(const QuantizedRows& target, const uint32_t (&of_token)[WARPS]) {
    if (target.log2_group == LOG2_OF_128) return largest_of_warps(of_token, 0, WARPS);
    return largest_of_warps(of_token, warp_id() / GROUP_WARPS * GROUP_WARPS, GROUP_WARPS);
}

// Stores the scale of a row in the tile's group `number`, which starts with `feature`, and 0 for
// what pads the row after the last group. A tile has four groups of 32, the multiple that group
// counts are padded to. The first warps store a group of 128.
DEVICE void store_row_scales(const QuantizedRows& target, int number, int64_t row, int32_t feature, float scale) {
    const bool is_shared = target.log2_group == LOG2_OF_128;
    if (is_shared && number != 0) return;
    const int32_t group = feature >> target.log2_group;
    const int32_t end = is_shared && group == target.num_groups - 1 ? target.padded_groups
                                                                    : minimum(group + 1, target.padded_groups);
    UNROLL_BY(1)
    for (int32_t own = group; own < end; ++own)
        store_scale(target, scale_place(target, row, own), scale, own < target.num_groups);
}

// The scales of a warp's features for each of a thread's tokens. The warp computes them itself:
// of up to eight tokens, each of the eight lanes with the same tokens computes one. The first warp
// of a group stores them.
using TokenScales = float[N8];
DEVICE void make_scales(const Share& share, const Unit& unit, const QuantizedRows& target, const WayOut::Magnitudes& magnitudes,
                        TokenScales& scales) {
    constexpr int TOGETHER = minimum(N8, 8), TURNS = N8 / TOGETHER;
    const int place = lane_id() / 4, number = warp_id() / GROUP_WARPS;
    float made[TURNS];
    UNROLL
    for (int turn = 0; turn < TURNS; ++turn) {
        const int own = share.own(TOGETHER * turn + place % TOGETHER), token = share.token(own);
        made[turn] = scale_of(target, __uint_as_float(largest_of_group(target, magnitudes[own])));
        if (place < TOGETHER && warp_id() % GROUP_WARPS == 0 && token < count_tokens(unit))
            store_row_scales(target, number, first_row(unit) + token,
                             static_cast<int32_t>(unit.part.column) + 32 * number, made[turn]);
    }
    UNROLL
    for (int n = 0; n < N8; ++n) scales[n] = __shfl_sync(FULL_WARP, made[n / TOGETHER], n % TOGETHER * 4 + lane_id() % 4);
}

// ---------------------------------------------------------------- codes

using WarpCodes = uint8_t[OWN_TOKENS][WARP_FEATURES];

// Divides values by their scales and encodes them, as codes_of of quantize_fp8.h.
DEVICE void encode(const Share& share, const Products& o, const TokenScales& scales, bool of_fp32, WarpCodes& target) {
    const int feature = lane_id() / 4;
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const float scale = scales[n];
        const float power = is_nan(scale) ? scale : __uint_as_float(0x7f000000u - __float_as_uint(scale));
        float x[2];
        UNROLL
        for (int i = 0; i < 2; ++i)
            x[i] = of_fp32 ? divided_for_e4m3(o[n][i], scale, reciprocal_of_normal(scale)) : o[n][i] * power;
        const uint32_t codes = pack_e4m3(x[0], x[1]);
        target[share.own(n)][feature] = static_cast<uint8_t>(codes);
        target[share.own(n)][feature + 8] = static_cast<uint8_t>(codes >> 8);
    }
}

// Stores a warp's codes of the block's tokens: a lane stores 16 neighbours.
DEVICE void store_codes(const GroupedLinearSwigluParams& params, const Share& share, const Unit& unit, uint8_t* codes,
                        const WarpCodes& of_warp) {
    const int32_t feature = static_cast<int32_t>(unit.part.column) + warp_id() * WARP_FEATURES;
    const int32_t left = static_cast<int32_t>(params.columns / 2) - feature, count = count_tokens(unit);
    for (int own = lane_id(); own < OWN_TOKENS; own += WARP_SIZE) {
        const int token = share.token(own);
        if (token >= count || left <= 0) continue;
        const Vec16 vector = load_vec16(of_warp[own]);
        store_code_words(params, codes + (first_row(unit) + token) * params.codes_stride + feature, vector.w,
                         minimum(left, WARP_FEATURES));
    }
}

// ---------------------------------------------------------------- work tiles

// The epilogue: codes and scales of a consumer's sums.
struct QuantizedUnits {
    const GroupedLinearSwigluParams& params;
    SharedAddress shared;
    uint32_t told = 0;       // units whose sums blocks have told each other
    uint32_t quantized = 0;  // those of which the block had tokens
    Weights weights = {};

    // With more tokens the MMAs leave no registers for weights.
    void begin(const Unit& unit) {
        if constexpr (LANE_WEIGHTS == 1) load_weights(params, unit, weights);
    }

    void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4]) {
        const Share share(consumer);
        Pairs kept, received;
        exchange_sums(share, shared, told++, total, kept, received);
        // With one row of an expert the second block has no more work here.
        if (share.token(0) >= count_tokens(unit)) return;
        WayOut::Magnitudes& magnitudes = way_out().magnitudes[quantized++ % 2];
        WarpCodes& codes = way_out().codes[warp_id()];
        if constexpr (LANE_WEIGHTS > 1) load_weights(params, unit, weights);
        Products o;
        activate(params, share, kept, received, weights, o);
        leave_magnitudes(share, o, magnitudes);
        share.meet();
        const QuantizedRows target = part_of_rows(params, FusedShared::target(), unit.matrix);
        TokenScales scales;
        make_scales(share, unit, target, magnitudes, scales);
        encode(share, o, scales, target.scale_type == FP32, codes);
        __syncwarp();
        store_codes(params, share, unit, target.codes, codes);
    }
};

KERNEL_OF_RESIDENT_CLUSTERS(grouped_linear_swiglu_hopper, GroupedLinearSwigluParams, THREADS, HELD, CLUSTER) {
    const SharedAddress shared = shared_address(dynamic_shared());
    int32_t* const ends = FusedShared::Grouped::ends();
    const GroupedLinearParams product = product_of<X_GROUP, MXFP4 ? 1 : GROUP, MXFP4 ? W_GROUP : GROUP>(params);
    if (threadIdx.x == 0) {
        FusedShared::target() = quantized_rows_of(params);
        for (uint32_t place = 0; place < PLACES * CONSUMERS; ++place) mbarrier_init(shared + FusedShared::TOLD + 8 * place, 1);
    }
    initialise_barriers(shared);
    cluster_arrive_relaxed();
    count_tiles<TileShape>(product, ends);
    const auto before = [&] { quantize_rows_of_nobody<CONSUMER_THREADS / WARP_SIZE>(params, FusedShared::target(), product); };
    // No block sends sums before the other's mbarriers are initialised.
    cluster_wait();
    multiply_units(UnitsOfGateOrUp{{product, ends}, params.interleaved}, shared, before, QuantizedUnits{params, shared});
    // Sums that a block sent may still be in flight: it exits after the other block has received
    // them.
    cluster_arrive_relaxed();
    cluster_wait();
}
