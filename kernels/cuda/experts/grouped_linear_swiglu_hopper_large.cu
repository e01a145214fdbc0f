// The first linear layer of experts with FP8 weights and what follows it, for many rows of an expert on sm_90a:
// grouped_linear_swiglu.cu, which has the formulas, with warpgroup matrix products of e4m3.
//
// How the work is laid out. quantised_hopper_large.h says how a block computes its units, grouped_linear.h which there are; as
// many blocks as there are multiprocessors take them as they get free, alone or in pairs as there. A unit's two blocks of weights are 128
// rows of gate and those of up of the same features or, where rows are interleaved, 256 rows in their order. Either way a thread
// has gate and up of the same features of two tokens in its registers, and four lanes have a token's: what they make of them is scaled and encoded
// there, and goes as codes through the warp's place in shared memory, so that 16 neighbours are stored at a time. Features that
// interleaved rows do not have come as zeros: no number but a weight that spoils the group's others makes more of them.
//
// Half units, those of no more than 64 tokens. Each consumer has the products with one block of weights. Where that is gate's
// or up's, warps of the same tokens exchange halves of them, in bf16, to which they are rounded anyhow; then each has 64
// features, half a group of 128, and the two exchange the largest magnitudes. Nobody else has these tokens, and waits.
//
// While the producer brings the first stages, the consumers quantise the rows of nobody.
//
// Floors: those of grouped_linear_hopper_large.cu, with 1 byte a feature written in the place of 4: of 24576 rows the bytes
// of w, 1.01 ms. Expected to limit: what limits that kernel. On top of it a unit costs some 23 instructions a feature and token,
// 1,500 of each warp where that kernel stores sums with 300: 2,000 of some 48,000 cycles a unit with 4096 numbers of k.
// Predicted for 256 experts of [4096, 4096]: 24576 rows 1.45 ms, 196608 rows 7.9 ms; apart 1.52 and 8.27. Measured on one
// H200: 1518 and 7996 us; apart, in the same run or the one before, 1477 + 69 and 7443 + 566. Masked, 6 and 192 slots, 40.5 and 594 us
// (35 and 512 the product alone). That was with warps that the compiler did not know to be whole: it took a stage's products' places
// from registers anew, 14 instructions between two products, 412 a stage of which 342 are left; and with blocks alone. Without
// that and in pairs 1396 and 6489 us, interleaved 1374 and 6727 (the product alone 1394 and 6830, in a call before). With units that
// are taken as blocks get free 1381 and 6302 (1383 and 6543 in turn, in the same call).
//
// Launch. Any grid in x; of pairs of whole clusters, and no other number of features than fills an even number of units.
#include "grouped_hopper_large.h"
#include "grouped_linear_swiglu.h"

// Behind what units of experts have there: where codes and scales go. What is computed of parameters once would be kept in
// registers, which are scarce.
struct FusedShared {
    static constexpr int TARGET = GroupedShared::BYTES;
    static constexpr int BYTES = TARGET + static_cast<int>(sizeof(QuantisedRows));

    static QuantisedRows& target() { return *reinterpret_cast<QuantisedRows*>(dynamic_shared() + TARGET); }
};
static_assert(FusedShared::BYTES <= 227 * 1024, "stages exceed shared memory");
SHARED_MEMORY(grouped_linear_swiglu_hopper_large, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_interleaved, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_pairs, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_interleaved_pairs, FusedShared::BYTES)

constexpr int UNIT_FEATURES = FEATURES / 2, UNIT_EIGHTS = UNIT_FEATURES / 8;  // of gate, and of up
constexpr int HALF_FEATURES = UNIT_FEATURES / CONSUMERS, HALF_EIGHTS = HALF_FEATURES / 8;

// Units of experts, alone or in pairs, of which one block of weights is gate's and the other up's; interleaved rows lie in their
// order.
template <typename Experts, bool INTERLEAVED>
struct UnitsOfGateAndUp {
    static constexpr uint32_t CLUSTER = Experts::CLUSTER;
    Experts experts;

    AsFree<CLUSTER> turns(SharedAddress shared) const { return experts.turns(shared); }
    Unit at(uint32_t number) const {
        Unit unit = experts.at(number);
        if constexpr (!INTERLEAVED) {
            unit.w_rows[0] = static_cast<int32_t>(unit.part.column / 2);
            unit.w_rows[1] = unit.w_rows[0] + static_cast<int32_t>(experts.tiles.params.columns / 2);
        }
        return unit;
    }
};

// ---------------------------------------------------------------- products

DEVICE int32_t features_of(const GroupedLinearSwigluParams& params) { return static_cast<int32_t>(params.columns / 2); }

// Eights of features of a thread's two tokens, as wgmma has sums.
template <int EIGHTS>
using Products = float[EIGHTS][4];

// The same of sums with a block of weights, rounded to bf16: pairs of features, of either token.
template <int EIGHTS>
using Pairs = uint32_t[EIGHTS][2];

DEVICE void round_block(const BlockSums& total, Pairs<N8>& pairs) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; i += 2) pairs[n][i / 2] = pack_bf16(total[n][i], total[n][i + 1]);
    }
    hold_pairs(pairs);
}

constexpr int WARPS_OF_CONSUMER = WARPGROUP_SIZE / static_cast<int>(WARP_SIZE);

// The tokens that a warp has of a unit: the first one, of the sorted rows or of an expert's, and how many there are. Rows of
// a unit have 32 bits, and registers are scarce.
struct WarpTokens {
    int warp, lane;  // a lane has tokens lane / 4 and 8 further
    int32_t row, expert, count;

    WarpTokens(const UnitResult& unit, const Share& share) {
        warp = static_cast<int>(share.consumer) * WARPS_OF_CONSUMER + share.warp;
        lane = lane_anew();
        // Units begin where their rows of x do.
        const int first = share.warp_row();
        row = unit.x_row + first, expert = unit.x_matrix;
        const int32_t left = static_cast<int32_t>(unit.result.rows) - static_cast<int32_t>(unit.part.row) - first;
        count = minimum<int32_t>(left, Shared::WARP_ROWS);
    }
    bool has(int own) const { return own < count; }

    // Where the warp leaves what it stores next, or what the other consumer's warp of the same tokens reads; its place.
    uint8_t* place() const { return dynamic_shared() + Shared::OUT + warp * Shared::WARP_BYTES; }
    const uint8_t* other_place() const {
        return dynamic_shared() + Shared::OUT + (warp ^ WARPGROUP_SIZE / static_cast<int>(WARP_SIZE)) * Shared::WARP_BYTES;
    }
    // Waits for that warp.
    void meet_other_warp() const { named_barrier_sync(1 + static_cast<uint32_t>(warp % 4), 2 * WARP_SIZE); }
};

// The weights of a thread's two tokens.
struct Weights {
    float of_tokens[2];

    Weights(const GroupedLinearSwigluParams& params, const WarpTokens& tokens) {
        const float* const first = params.weight + (tokens.expert * params.rows + tokens.row);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const int own = tokens.lane / 4 + 8 * half;
            of_tokens[half] = params.weight && tokens.has(own) ? first[own] : 1.0f;
        }
    }
};

// What gate and up of two features of a token each make.
DEVICE void activate(const uint32_t (&gate)[2], const uint32_t (&up)[2], float limit, const Weights& weights, float (&o)[4]) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const float weight = weights.of_tokens[half];
        o[2 * half] = weighted_swiglu(unpack_bf16_low(gate[half]), unpack_bf16_low(up[half]), limit, weight);
        o[2 * half + 1] = weighted_swiglu(unpack_bf16_high(gate[half]), unpack_bf16_high(up[half]), limit, weight);
    }
}

// Of a unit whose tokens a consumer has with both blocks of weights.
template <bool INTERLEAVED>
DEVICE void activate_unit(const Pairs<N8> (&pairs)[BLOCKS], float limit, const Weights& weights, Products<UNIT_EIGHTS>& o) {
    UNROLL
    for (int n = 0; n < UNIT_EIGHTS; ++n) {
        const Pairs<N8>& block = pairs[n / HALF_EIGHTS];
        const int own = n % HALF_EIGHTS * 2;
        if constexpr (INTERLEAVED) activate(block[own], block[own + 1], limit, weights, o[n]);
        else activate(pairs[0][n], pairs[1][n], limit, weights, o[n]);
    }
}

// Behind the pairs that two warps exchange: the largest magnitudes of their tokens.
constexpr int MAGNITUDES = Shared::WARP_ROWS * HALF_FEATURES * 2;
static_assert(MAGNITUDES + Shared::WARP_ROWS * 4 <= Shared::WARP_BYTES, "what warps exchange exceeds a warp's place");

// A consumer with gate's products keeps those of the first half of the features, and leaves the others to the consumer with
// up's, which keeps these: each then has gate and up of one half.
DEVICE void exchange_halves(const WarpTokens& tokens, const Pairs<N8>& pairs, uint32_t consumer, Pairs<HALF_EIGHTS>& gate,
                            Pairs<HALF_EIGHTS>& up) {
    const int lane = tokens.lane, offset = lane % 4 * 4;
    uint8_t* const place = tokens.place();
    const uint8_t* const from = tokens.other_place();
    UNROLL
    for (int n = 0; n < HALF_EIGHTS; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint32_t*>(place + panel_offset(lane / 4 + 8 * half, n) + offset) =
                consumer == 0 ? pairs[n + HALF_EIGHTS][half] : pairs[n][half];
    }
    tokens.meet_other_warp();
    UNROLL
    for (int n = 0; n < HALF_EIGHTS; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const uint32_t kept = consumer == 0 ? pairs[n][half] : pairs[n + HALF_EIGHTS][half];
            const uint32_t received =
                *reinterpret_cast<const uint32_t*>(from + panel_offset(lane / 4 + 8 * half, n) + offset);
            gate[n][half] = consumer == 0 ? kept : received;
            up[n][half] = consumer == 0 ? received : kept;
        }
    }
}

// Of a half unit.
template <bool INTERLEAVED>
DEVICE void activate_half(const WarpTokens& tokens, const Pairs<N8>& pairs, uint32_t consumer, float limit,
                          const Weights& weights, Products<HALF_EIGHTS>& o) {
    if constexpr (INTERLEAVED) {
        UNROLL
        for (int n = 0; n < HALF_EIGHTS; ++n) activate(pairs[2 * n], pairs[2 * n + 1], limit, weights, o[n]);
        // Magnitudes that the other warp may still read are those of an earlier unit.
        tokens.meet_other_warp();
    } else {
        Pairs<HALF_EIGHTS> gate, up;
        exchange_halves(tokens, pairs, consumer, gate, up);
        UNROLL
        for (int n = 0; n < HALF_EIGHTS; ++n) activate(gate[n], up[n], limit, weights, o[n]);
    }
}

// ---------------------------------------------------------------- codes

// The largest magnitudes of a thread's two tokens in each group of GROUP_EIGHTS eights, in all four lanes of the tokens.
template <int EIGHTS, int GROUP_EIGHTS>
struct Magnitudes {
    static constexpr int GROUPS = EIGHTS / GROUP_EIGHTS;
    float largest_of[2][GROUPS];

    explicit Magnitudes(const Products<EIGHTS>& o) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            UNROLL
            for (int group = 0; group < GROUPS; ++group) {
                float own[2 * GROUP_EIGHTS];
                UNROLL
                for (int i = 0; i < 2 * GROUP_EIGHTS; ++i) own[i] = o[group * GROUP_EIGHTS + i / 2][2 * half + i % 2];
                largest_of[half][group] = largest(largest_magnitude(own), 4);
            }
        }
    }
};

// The same of both consumers' halves of a group.
DEVICE void join_magnitudes(const WarpTokens& tokens, Magnitudes<HALF_EIGHTS, HALF_EIGHTS>& magnitudes) {
    const int lane = tokens.lane;
    auto* const own = reinterpret_cast<float*>(tokens.place() + MAGNITUDES);
    const auto* const other = reinterpret_cast<const float*>(tokens.other_place() + MAGNITUDES);
    // All four lanes of two tokens have the same.
    if (lane % 4 == 0) own[lane / 4] = magnitudes.largest_of[0][0];
    if (lane % 4 == 1) own[lane / 4 + 8] = magnitudes.largest_of[1][0];
    tokens.meet_other_warp();
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float& magnitude = magnitudes.largest_of[half][0];
        magnitude = maximum_or_nan_f32(magnitude, other[lane / 4 + 8 * half]);
    }
}

// Numbers by the scales of their groups, as store_codes of quantize_fp8.h has them.
template <bool POWERS, int EIGHTS, int GROUP_EIGHTS>
DEVICE void divide_products(const Magnitudes<EIGHTS, GROUP_EIGHTS>& scales, Products<EIGHTS>& o) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int group = 0; group < EIGHTS / GROUP_EIGHTS; ++group) {
            const float scale = scales.largest_of[half][group];
            const float power = is_nan(scale) ? scale : __uint_as_float(0x7f000000u - __float_as_uint(scale));
            const float inverse = POWERS ? power : reciprocal_of_normal(scale);
            UNROLL
            for (int i = 0; i < 2 * GROUP_EIGHTS; ++i) {
                float& x = o[group * GROUP_EIGHTS + i / 2][2 * half + i % 2];
                x = POWERS ? x * inverse : divided_for_e4m3(x, scale, inverse);
            }
        }
    }
}

// Codes of a warp's tokens from `feature` on, out of its place.
template <bool WIDE, int EIGHTS>
DEVICE void copy_codes(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature,
                       const uint8_t* place) {
    constexpr int CODES = 16, CHUNKS = 8 * EIGHTS / CODES, STEPS = Shared::WARP_ROWS * CHUNKS / static_cast<int>(WARP_SIZE);
    uint8_t* const target = params.codes + tokens.expert * params.codes_expert_stride + tokens.row * params.codes_stride;
    UNROLL_BY(WIDE ? STEPS : 1)
    for (int step = 0; step < STEPS; ++step) {
        const int number = tokens.lane + step * static_cast<int>(WARP_SIZE), own = number / CHUNKS, chunk = number % CHUNKS;
        const int32_t column = feature + chunk * CODES, left = features_of(params) - column;
        if (!tokens.has(own) || left <= 0) continue;
        const Vec16 codes = load_vec16(place + panel_offset(own, chunk));
        store_words<WIDE>(target + own * params.codes_stride + column, codes.w, minimum(left, CODES));
    }
}

// Codes of numbers that are divided by their scales, by way of the warp's place; `feature`: the first one.
template <int EIGHTS>
DEVICE void store_codes(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature,
                        const Products<EIGHTS>& o) {
    uint8_t* const place = tokens.place();
    const int row = tokens.lane / 4, column = tokens.lane % 4 * 2;
    UNROLL
    for (int n = 0; n < EIGHTS; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint16_t*>(place + panel_offset(row + 8 * half, n / 2) + n % 2 * 8 + column) =
                static_cast<uint16_t>(pack_e4m3(o[n][2 * half], o[n][2 * half + 1]));
    }
    __syncwarp();
    if (params.wide) copy_codes<true, EIGHTS>(params, tokens, feature, place);
    else copy_codes<false, EIGHTS>(params, tokens, feature, place);
    // The next ones may take their place.
    __syncwarp();
}

// The scales of groups `first` to `end` - 1 of a warp's tokens, of which a lane has one, and those behind the own ones pad.
template <int EIGHTS, int GROUP_EIGHTS>
DEVICE void store_scales(const QuantisedRows& target, const WarpTokens& tokens,
                         const Magnitudes<EIGHTS, GROUP_EIGHTS>& scales, int32_t first,
                         int32_t end) {
    const int lane = tokens.lane, own_group = lane % 4;
    const int32_t group = first + own_group;
    if (group >= end) return;
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int own = lane / 4 + 8 * half;
        if (!tokens.has(own)) continue;
        float scale = 0.0f;
        UNROLL
        for (int i = 0; i < EIGHTS / GROUP_EIGHTS; ++i) scale = own_group == i ? scales.largest_of[half][i] : scale;
        store_scale(target, scale_place(target, tokens.row + own, group), scale, group < target.num_groups);
    }
}

// Codes and scales of a warp's products from `feature` on.
template <int EIGHTS, int GROUP_EIGHTS>
DEVICE void quantise_groups(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature,
                            Products<EIGHTS>& o) {
    constexpr bool IS_HALF = EIGHTS == HALF_EIGHTS, IS_SHARED = IS_HALF && GROUP_EIGHTS == HALF_EIGHTS;
    const QuantisedRows target = part_of_rows(params, FusedShared::target(), tokens.expert);
    Magnitudes<EIGHTS, GROUP_EIGHTS> scales(o);
    if constexpr (IS_SHARED) join_magnitudes(tokens, scales);
    // The other consumer's warp has read what lay where codes go.
    else if constexpr (IS_HALF) tokens.meet_other_warp();
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int group = 0; group < EIGHTS / GROUP_EIGHTS; ++group)
            scales.largest_of[half][group] = scale_of(target, scales.largest_of[half][group]);
    }
    const int32_t first = feature >> target.log2_group, padded = target.padded_groups;
    const bool is_last = feature / UNIT_FEATURES * UNIT_FEATURES + UNIT_FEATURES >= features_of(params);
    const bool is_second = IS_HALF && feature % UNIT_FEATURES != 0;
    // A group that both consumers have a half of is the first one's to store, with those that pad the row behind it.
    const int32_t own_end = first + EIGHTS / GROUP_EIGHTS;
    const bool has_padding = is_last && (!IS_HALF || IS_SHARED || is_second);
    const int32_t end = IS_SHARED && is_second ? first : has_padding ? padded : minimum(own_end, padded);
    store_scales(target, tokens, scales, first, end);
    if (target.scale_type == FP32) divide_products<false>(scales, o);
    else divide_products<true>(scales, o);
    store_codes(params, tokens, feature, o);
}

template <int EIGHTS>
DEVICE void quantise(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature, Products<EIGHTS>& o) {
    if (params.round_to_bf16) {
        UNROLL
        for (int n = 0; n < EIGHTS; ++n) round_to_bf16(o[n]);
    }
    if (params.log2_group == 5) quantise_groups<EIGHTS, 4>(params, tokens, feature, o);
    else quantise_groups<EIGHTS, EIGHTS>(params, tokens, feature, o);
}

template <bool INTERLEAVED>
struct QuantisedProducts {
    const GroupedLinearSwigluParams& params;

    void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const {
        Pairs<N8> pairs[BLOCKS];
        UNROLL
        for (int block = 0; block < BLOCKS; ++block) round_block(total[block], pairs[block]);
        const WarpTokens tokens(unit, share);
        // Neither has the other consumer's warp any.
        if (tokens.count <= 0) return;
        const Weights weights(params, tokens);
        const int32_t feature = static_cast<int32_t>(unit.part.column) / 2;
        if (share.is_half) {
            Products<HALF_EIGHTS> o;
            activate_half<INTERLEAVED>(tokens, pairs[0], share.consumer, params.limit, weights, o);
            quantise(params, tokens, feature + static_cast<int32_t>(share.consumer) * HALF_FEATURES, o);
        } else {
            Products<UNIT_EIGHTS> o;
            activate_unit<INTERLEAVED>(pairs, params.limit, weights, o);
            quantise(params, tokens, feature, o);
        }
    }
};

template <typename Experts, bool INTERLEAVED>
DEVICE void grouped_linear_swiglu(const GroupedLinearSwigluParams& params) {
    const SharedAddress shared = shared_address(dynamic_shared());
    auto* const ends = reinterpret_cast<int32_t*>(dynamic_shared() + GroupedShared::ENDS);
    const GroupedLinearParams product = product_of<GROUP, GROUP, GROUP>(params);
    if (threadIdx.x == 0) FusedShared::target() = quantised_rows_of(params);
    initialise_barriers<Experts::CLUSTER>(shared);
    count_tiles<UnitShape>(product, ends);
    const auto before = [&] { quantise_rows_of_nobody<CONSUMER_THREADS / WARP_SIZE>(params, FusedShared::target(), product); };
    multiply_units(UnitsOfGateAndUp<Experts, INTERLEAVED>{{{product, ends}}}, params.x_map, params.w_map, shared, before,
                   QuantisedProducts<INTERLEAVED>{params});
}

KERNEL(grouped_linear_swiglu_hopper_large, GroupedLinearSwigluParams, THREADS) {
    grouped_linear_swiglu<UnitsOfExperts, false>(params);
}
KERNEL(grouped_linear_swiglu_hopper_large_interleaved, GroupedLinearSwigluParams, THREADS) {
    grouped_linear_swiglu<UnitsOfExperts, true>(params);
}
KERNEL_OF_CLUSTERS(grouped_linear_swiglu_hopper_large_pairs, GroupedLinearSwigluParams, THREADS, PairsOfExperts::CLUSTER) {
    grouped_linear_swiglu<PairsOfExperts, false>(params);
}
KERNEL_OF_CLUSTERS(grouped_linear_swiglu_hopper_large_interleaved_pairs, GroupedLinearSwigluParams, THREADS,
                   PairsOfExperts::CLUSTER) {
    grouped_linear_swiglu<PairsOfExperts, true>(params);
}
