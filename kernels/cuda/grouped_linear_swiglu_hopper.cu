// The first linear layer of experts and what follows it, for few rows of an expert with FP8 weights, or any number with MXFP4, on
// sm_90a: grouped_linear_swiglu.cu, which has the formulas, with warpgroup matrix products of e4m3.
//
// How the work is laid out. quantised_hopper.h says how a block computes its units, grouped_linear.h which tiles there are. A tile
// is TOKENS rows of an expert by 128 features, whole groups of either size, which take 256 rows of w: a cluster of blocks has it,
// two of 128 rows each, or four of 64 of MXFP4 with 16 tokens, where two consumers would have no registers. Each consumer has 64
// rows, a slice of 32 features: eight of gate, the eight of up of the same features, and so on (rows_of_w.h), of which a thread has
// gate and up of one feature of two tokens of each eight in its registers. What it makes of them stays there. The largest
// magnitudes of a token's 32 features are those of 8 lanes and 4 warps; of groups of 128 each slice tells its own to all blocks of
// the cluster, which is all that these exchange. Then codes go through the consumer's place in shared memory, so that a lane stores
// 16 neighbours. The sums of a slice are one consumer's, stage after stage, as those of every other kernel of this product are: no
// bit depends on which one runs.
//
// Of MXFP4 what a producer does for a stage is as much for 64 rows as for 128, and issue slots are short: 192 slots took 608 us in
// blocks of 64 rows. Blocks whose features are behind the last one bring nothing, and take part in the exchange.
//
// Which clusters fit together is said by the processing clusters of the GPU: of four blocks, three to a multiprocessor, an H200 has 92
// and not 99. Clusters take tiles in turn, so that one that has to wait for another's end begins its turns then: 96 of them took
// 718 us in place of 532 of 192 slots of FP8, whose blocks had that size. The launcher asks the driver.
//
// While the producer brings the first stages, the consumers quantise the rows of nobody.
//
// Floors: the bytes of w of the experts that have rows at 4.24 TB/s: 6 experts of [4096, 4096] 23.7 us, of MXFP4 12.6 us with its
// scales; 256 experts 1.01 and 0.54 ms. Expected to limit: of FP8 memory; of MXFP4 the consumers' instructions as much as memory
// (quantised_hopper.h). On top of a product a unit costs a consumer warp some 250 instructions with 8 tokens, and an exchange of some
// 700 ns that other blocks of the multiprocessor do not wait for, but all of them at the end of a single round.
// Measured on one H200, masked, 6, 192 and 768 slots, and in the same call the product alone, behind which the activation takes
// 1.9 to 2.5 us more: MXFP4 27.9, 398 and 741 us (26.1, 383 and 724 alone; the portable kernel that was there before took 178 of
// 6 slots on an H100). FP8 33.4, 511 and 924 us (29.5, 490 and 899 alone; in another call 33.4, 529 and 973 beside 29.8, 506 and
// 936), where clusters of four blocks of 64 rows, three to a multiprocessor, took 39.8, 510 and 935, and the kernel for many
// rows 34.3, 567 and 1045. To have the producers begin before the cluster has met gained nothing, nor did 256 bytes of a row at
// a time from memory, eleven stages in place of eight, or codes of FP8 that are made behind the next unit's products, when the
// others have long told. With interleaved rows and groups of 32 it takes 32.7, 495 and 895 us: what 192 and 768 slots lose is
// lost where rows of gate and of up lie apart. Six experts have 96 tiles for 66 clusters; the product alone halves the units of
// its last round.
// MXFP4, contiguous, 24576 and 196608 rows: 3.07 and 15.8 ms.
//
// Defines
//   TOKENS   columns of a product, rows of an expert: 16, of MXFP4 also 8, 64 or 128
//   WEIGHTS  1: FP8, 2: MXFP4
//   X_GROUP  numbers of x that share a scale: 128, of MXFP4 also 32
//
// Launch. Any grid in x of whole clusters. Of FP8 with rows of gate before those of up, features are a multiple of 128: blocks of w
// that share a scale are gate's or up's.
#if !defined(TOKENS) || !defined(WEIGHTS) || !defined(X_GROUP)
#error "define TOKENS, WEIGHTS as 1 (FP8) or 2 (MXFP4), and X_GROUP"
#endif
#include "grouped_linear_swiglu.h"
#include "rows_of_w.h"

constexpr int FEATURES = WEIGHTS == 2 && TOKENS == 16 ? 64 : 128;  // of gate and of up, a block's rows of w
using RowsOfW = RowsOfGateAndUp;
#include "quantised_hopper.h"

// Of a tile: rows of w, and of them a consumer's; features of a slice.
constexpr int TILE_ROWS = 256, SLICES = TILE_ROWS / CONSUMER_FEATURES, SLICE_FEATURES = CONSUMER_FEATURES / 2;
constexpr uint32_t CLUSTER = TILE_ROWS / FEATURES;
constexpr int LOG2_OF_128 = 7;

struct TileShape {
    static constexpr int ROWS = TOKENS, COLUMNS = TILE_ROWS, STAGE_DEPTH = GROUP;
};

// What a consumer has in shared memory for what becomes of its sums, in the place of sums that are stored.
struct WayOut {
    static constexpr int CODES_STRIDE = SLICE_FEATURES + 16;  // four tokens' codes of a feature are in different banks
    uint32_t of_warps[4][TOKENS];  // largest magnitudes, as bits
    float scales[TOKENS];
    alignas(16) uint8_t codes[TOKENS][CODES_STRIDE];
};
static_assert(sizeof(WayOut) <= Shared::SUM_TOKENS * Shared::SUM_STRIDE * 4, "what sums become exceeds the place of sums");

DEVICE WayOut& way_out(uint32_t consumer) {
    return reinterpret_cast<WayOut*>(dynamic_shared() + Shared::SUMS)[consumer];
}

// Magnitudes that slices tell each other lie in one of PLACES places in turn. A slice that tells those of the second unit behind one
// has been told those of the unit between by all, who have read the first one's by then.
constexpr uint32_t PLACES = 2;

// Behind what units have there. What is computed of parameters once would be kept in registers, which are scarce.
struct FusedShared {
    static constexpr int ENDS = Shared::BYTES;               // of count_tiles
    static constexpr int TARGET = ENDS + MAX_EXPERTS * 4;    // QuantisedRows
    static constexpr int TOLD = TARGET + static_cast<int>(sizeof(QuantisedRows));  // mbarriers [PLACES]
    static constexpr int MAGNITUDES = TOLD + 8 * PLACES;     // uint32_t [PLACES][SLICES][TOKENS]
    static constexpr int PLACE_BYTES = SLICES * TOKENS * 4;
    static constexpr int BYTES = MAGNITUDES + PLACES * PLACE_BYTES;

    static QuantisedRows& target() { return *reinterpret_cast<QuantisedRows*>(dynamic_shared() + TARGET); }
    static constexpr int told(uint32_t unit) { return TOLD + 8 * (unit % PLACES); }
    static constexpr int magnitude(uint32_t unit, int slice, int token) {
        return MAGNITUDES + unit % PLACES * PLACE_BYTES + (slice * TOKENS + token) * 4;
    }
};
static_assert((FusedShared::BYTES + 1024) * HELD <= 228 * 1024, "stages exceed shared memory");
SHARED_MEMORY(grouped_linear_swiglu_hopper, FusedShared::BYTES)

// Tiles of experts, of which each block of a cluster has its own rows.
struct UnitsOfGateAndUp {
    static constexpr uint32_t CLUSTER = ::CLUSTER;
    ExpertTiles<TileShape> tiles;
    int32_t interleaved;

    int64_t count() const { return tiles.count(); }
    Unit at(int64_t number) const {
        const GroupedLinearParams& params = tiles.params;
        const ExpertTile tile = tiles[number];
        const QuantisedProduct product = product_of_expert(params, tile.expert);
        Part part = part_of<TileShape>(product.result, tile.number);
        part.column += static_cast<int64_t>(cluster_rank() * FEATURES);
        if (part.column >= params.columns) part.end = part.begin;
        const RowsOfGateAndUp rows = RowsOfGateAndUp::of(params.columns / 2, interleaved);
        return Unit{product, part, FEATURES, rows, params.expert_offsets ? 0 : tile.expert};
    }
};

// ---------------------------------------------------------------- activation

// Of a thread's feature two tokens of each eight.
using Products = float[N8][2];

// The weights of a tile's tokens, a lane those of every 32nd.
constexpr int LANE_WEIGHTS = ceil_div<int>(TOKENS, WARP_SIZE);
using Weights = float[LANE_WEIGHTS];

DEVICE int64_t first_row(const Unit& unit) { return unit.product.x_scales.first_row + unit.part.row; }
DEVICE int32_t count_tokens(const Unit& unit) {
    return static_cast<int32_t>(minimum<int64_t>(unit.product.result.rows - unit.part.row, TOKENS));
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

// Sums of gate are those of the first of wgmma's two rows, those of up eight rows further. Of tokens that there are not they are 0.
DEVICE void activate(const GroupedLinearSwigluParams& params, const float (&total)[N8][4], const Weights& weights, Products& o) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        const uint32_t gate = pack_bf16(total[n][0], total[n][1]), up = pack_bf16(total[n][2], total[n][3]);
        const int token = 8 * n % static_cast<int>(WARP_SIZE) + lane_id() % 4 * 2;
        const float of_lane = weights[8 * n / static_cast<int>(WARP_SIZE)];
        const float first = __shfl_sync(FULL_WARP, of_lane, token), second = __shfl_sync(FULL_WARP, of_lane, token + 1);
        o[n][0] = weighted_swiglu(unpack_bf16_low(gate), unpack_bf16_low(up), params.limit, first);
        o[n][1] = weighted_swiglu(unpack_bf16_high(gate), unpack_bf16_high(up), params.limit, second);
        if (params.round_to_bf16) round_to_bf16(o[n]);
    }
}

// ---------------------------------------------------------------- scales

// The largest magnitudes of a warp's eight features of each token, which 8 lanes have.
DEVICE void leave_magnitudes(const Products& o, WayOut& out) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
            uint32_t magnitude = __float_as_uint(o[n][i]) & 0x7fffffffu;
            UNROLL
            for (int distance = 16; distance >= 4; distance /= 2)
                magnitude = maximum(magnitude, __shfl_xor_sync(FULL_WARP, magnitude, distance));
            if (lane_id() < 4) out.of_warps[warp_id() % 4][8 * n + lane_id() * 2 + i] = magnitude;
        }
    }
}

// Of a token's features in a slice, as bits (quantise.h).
DEVICE uint32_t largest_of_slice(const WayOut& out, int token) {
    uint32_t magnitude = 0;
    UNROLL
    for (int warp = 0; warp < 4; ++warp) magnitude = maximum(magnitude, out.of_warps[warp][token]);
    return magnitude;
}

// A consumer of a cluster's tile: which of its slices, and which thread.
struct Slice {
    uint32_t consumer;
    int number, thread;

    explicit Slice(uint32_t consumer)
        : consumer(consumer), number(static_cast<int>(cluster_rank() * CONSUMERS + consumer)),
          thread(static_cast<int>(threadIdx.x) % WARPGROUP_SIZE) {}

    void meet() const { named_barrier_sync(1 + consumer, WARPGROUP_SIZE); }
};

// Tells the slice's largest magnitudes to all blocks of the cluster, this one among them. `unit`: how many have been told before.
DEVICE void tell_magnitudes(const Slice& slice, const WayOut& out, SharedAddress shared, uint32_t unit) {
    const SharedAddress told = shared + FusedShared::told(unit);
    if (slice.consumer == 0 && slice.thread == 0) mbarrier_arrive_expect(told, FusedShared::PLACE_BYTES);
    for (int i = slice.thread; i < TOKENS * static_cast<int>(CLUSTER); i += WARPGROUP_SIZE) {
        const int token = i % TOKENS;
        store_at(shared + FusedShared::magnitude(unit, slice.number, token), largest_of_slice(out, token), told,
                 static_cast<uint32_t>(i / TOKENS));
    }
}

// Of a token's features in the tile.
DEVICE uint32_t largest_of_tile(SharedAddress shared, uint32_t unit, int token) {
    mbarrier_wait(shared + FusedShared::told(unit), unit / PLACES & 1);
    uint32_t magnitude = 0;
    UNROLL
    for (int slice = 0; slice < SLICES; ++slice) {
        const uint8_t* const told = dynamic_shared() + FusedShared::magnitude(unit, slice, token);
        magnitude = maximum(magnitude, *reinterpret_cast<const uint32_t*>(told));
    }
    return magnitude;
}

// The scale of a row in the group that begins with the slice, and 0 for what pads the row behind the last group: a tile has four
// groups of 32, which is what their number is rounded up to.
DEVICE void store_row_scales(const QuantisedRows& target, const Slice& slice, int64_t row, int32_t feature, float scale) {
    const bool is_shared = target.log2_group == LOG2_OF_128;
    if (is_shared && slice.number != 0) return;
    const int32_t group = feature >> target.log2_group;
    const int32_t end = is_shared && group == target.num_groups - 1 ? target.padded_groups
                                                                    : minimum(group + 1, target.padded_groups);
    for (int32_t own = group; own < end; ++own)
        store_scale(target, scale_place(target, row, own), scale, own < target.num_groups);
}

// ---------------------------------------------------------------- codes

// Numbers divided by their scales, as codes_of of quantize_fp8.h has them, to the consumer's place; `feature`: the thread's, of the
// slice.
DEVICE void encode(const Products& o, bool of_fp32, int feature, WayOut& out) {
    const int token = lane_id() % 4 * 2;
    UNROLL
    for (int n = 0; n < N8; ++n) {
        float scale[2], x[2];
        load_elements(out.scales + 8 * n + token, scale);
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const float power = is_nan(scale[i]) ? scale[i] : __uint_as_float(0x7f000000u - __float_as_uint(scale[i]));
            x[i] = of_fp32 ? divided_for_e4m3(o[n][i], scale[i], reciprocal_of_normal(scale[i])) : o[n][i] * power;
        }
        const uint32_t codes = pack_e4m3(x[0], x[1]);
        out.codes[8 * n + token][feature] = static_cast<uint8_t>(codes);
        out.codes[8 * n + token + 1][feature] = static_cast<uint8_t>(codes >> 8);
    }
}

// Codes of the slice's tokens out of there; `left`: features from the slice's first one on.
DEVICE void copy_codes(const GroupedLinearSwigluParams& params, const Slice& slice, const WayOut& out, uint8_t* target,
                       int32_t count, int32_t left) {
    constexpr int CODES = 16, CHUNKS = SLICE_FEATURES / CODES;
    for (int i = slice.thread; i < TOKENS * CHUNKS; i += WARPGROUP_SIZE) {
        const int token = i / CHUNKS, column = i % CHUNKS * CODES;
        if (token >= count || column >= left) continue;
        const Vec16 codes = load_vec16(&out.codes[token][column]);
        store_code_words(params, target + token * params.codes_stride + column, codes.w, minimum(left - column, CODES));
    }
}

// ---------------------------------------------------------------- units

// Codes and scales of a consumer's sums. What one lap of barriers keeps apart is stored to again only behind the next one's.
struct QuantisedUnits {
    const GroupedLinearSwigluParams& params;
    SharedAddress shared;
    uint32_t told = 0;  // units whose magnitudes slices have told
    Weights weights = {};

    // Of more tokens the products leave no registers.
    void begin(const Unit& unit) {
        if constexpr (LANE_WEIGHTS == 1) load_weights(params, unit, weights);
    }

    void end(const Unit& unit, uint32_t consumer, const float (&total)[N8][4]) {
        const Slice slice(consumer);
        WayOut& out = way_out(consumer);
        if constexpr (LANE_WEIGHTS > 1) load_weights(params, unit, weights);
        Products o;
        activate(params, total, weights, o);
        leave_magnitudes(o, out);
        slice.meet();
        const QuantisedRows target = part_of_rows(params, FusedShared::target(), unit.matrix);
        const int32_t feature = static_cast<int32_t>(unit.part.column / 2) + static_cast<int32_t>(consumer) * SLICE_FEATURES;
        scale_tokens(slice, unit, target, feature, out);
        slice.meet();
        encode(o, target.scale_type == FP32, warp_id() % 4 * 8 + lane_id() / 4, out);
        slice.meet();
        copy_codes(params, slice, out, target.codes + first_row(unit) * params.codes_stride + feature, count_tokens(unit),
                   static_cast<int32_t>(params.columns / 2) - feature);
    }

    // A thread has a token.
    void scale_tokens(const Slice& slice, const Unit& unit, const QuantisedRows& target, int32_t feature, WayOut& out) {
        const bool is_shared = target.log2_group == LOG2_OF_128;
        if (is_shared) tell_magnitudes(slice, out, shared, told);
        if (slice.thread < TOKENS) {
            const int token = slice.thread;
            const uint32_t magnitude = is_shared ? largest_of_tile(shared, told, token) : largest_of_slice(out, token);
            const float scale = scale_of(target, __uint_as_float(magnitude));
            out.scales[token] = scale;
            if (token < count_tokens(unit)) store_row_scales(target, slice, first_row(unit) + token, feature, scale);
        }
        ++told;
    }
};

KERNEL_OF_RESIDENT_CLUSTERS(grouped_linear_swiglu_hopper, GroupedLinearSwigluParams, THREADS, HELD, CLUSTER) {
    const SharedAddress shared = shared_address(dynamic_shared());
    auto* const ends = reinterpret_cast<int32_t*>(dynamic_shared() + FusedShared::ENDS);
    const GroupedLinearParams product = product_of<X_GROUP, MXFP4 ? 1 : GROUP, MXFP4 ? W_GROUP : GROUP>(params);
    if (threadIdx.x == 0) {
        FusedShared::target() = quantised_rows_of(params);
        for (uint32_t place = 0; place < PLACES; ++place) mbarrier_init(shared + FusedShared::told(place), 1);
    }
    initialise_barriers(shared);
    cluster_arrive_relaxed();
    count_tiles<TileShape>(product, ends);
    const auto before = [&] { quantise_rows_of_nobody<CONSUMER_THREADS / WARP_SIZE>(params, FusedShared::target(), product); };
    // Nobody tells a block anything before its mbarriers are there.
    cluster_wait();
    multiply_units(UnitsOfGateAndUp{{product, ends}, params.interleaved}, shared, before, QuantisedUnits{params, shared});
    // What a block has told may still be on its way to others: it ends when they have it.
    cluster_arrive_relaxed();
    cluster_wait();
}
