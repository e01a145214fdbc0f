// The experts' first linear layer with FP8 weights, SwiGLU and quantization, for many rows of an
// expert on sm_90a: grouped_linear_swiglu.cu, which has the formulas, with e4m3 wgmma.
//
// Work division: quantized_hopper_large.h says how a block computes its work tiles,
// grouped_linear.h which tiles exist. One block per SM takes them as it becomes free, single or in
// pairs. A work tile's two blocks of weights are 128 rows of gate and the same features' rows of
// up. Where rows interleave they are 256 rows in order. Either way a thread has gate and up of the
// same features of two tokens in registers; four lanes share a token. They scale and encode in
// registers. Codes pass through the warp's slot in shared memory, so that a lane stores 16
// neighbours. Features beyond the interleaved rows load as zeros. Only a weight that already
// spoils its group makes anything else of them.
//
// Half work tiles, of at most 64 tokens: each consumer multiplies with one block of weights. Where
// that is gate's or up's, warps of the same tokens exchange halves in bf16. Each then has 64
// features, half a group of 128, and the two exchange the largest magnitudes. No other warp has
// these tokens, so none waits. The consumers quantize the padding rows while the producer loads
// the first stages.
//
// Floor: that of grouped_linear_hopper_large.cu, with 1 byte stored a feature in place of 4: 24576
// rows 1.01 ms, the bytes of w. Limit: that of the same kernel. The epilogue adds about 23
// instructions a feature and token, 1,500 a warp where that kernel takes 300: 2,000 of about
// 48,000 cycles a work tile with k = 4096.
//
// Launch: any grid in x; pairs: whole clusters, features that fill an even number of tiles.
// What was tried: kernels/docs/grouped_linear_swiglu.md.
#include "grouped_hopper_large.h"
#include "grouped_linear_swiglu.h"

// After what the experts' work tiles need: where codes and scales are stored. Values computed once
// from the parameters stay here: registers are scarce.
struct FusedShared {
    struct Plan {
        GroupedShared::Plan grouped;
        QuantizedRows target;
    };
    static constexpr int BYTES = sizeof(Plan);

    static QuantizedRows& target() {
        return *reinterpret_cast<QuantizedRows*>(dynamic_shared() + OFFSET_OF(Plan, target));
    }
};
static_assert(FusedShared::BYTES <= 227 * 1024, "stages exceed shared memory");
SHARED_MEMORY(grouped_linear_swiglu_hopper_large, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_interleaved, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_pairs, FusedShared::BYTES)
SHARED_MEMORY(grouped_linear_swiglu_hopper_large_interleaved_pairs, FusedShared::BYTES)

constexpr int UNIT_FEATURES = FEATURES / 2, UNIT_EIGHTS = UNIT_FEATURES / 8;  // of gate, and of up
constexpr int HALF_FEATURES = UNIT_FEATURES / CONSUMERS, HALF_EIGHTS = HALF_FEATURES / 8;

// Work tiles of experts, single or in pairs, with one block of gate's weights and one of up's.
// Interleaved rows stay in their order.
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

// ---------------------------------------------------------------- SwiGLU

DEVICE int32_t features_of(const GroupedLinearSwigluParams& params) { return static_cast<int32_t>(params.columns / 2); }

// Groups of eight features of a thread's two tokens, in wgmma's accumulator layout.
template <int EIGHTS>
using Products = float[EIGHTS][4];

// The same of the sums with one block of weights, rounded to bf16: pairs of features of each
// token.
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

// The tokens of a work tile that a warp has: the first row, among the sorted rows or an expert's,
// and the count. Row numbers have 32 bits: registers are scarce.
struct WarpTokens {
    int warp, lane;  // a lane has tokens lane / 4 and 8 further
    int32_t row, expert, count;

    WarpTokens(const UnitResult& unit, const Share& share) {
        warp = static_cast<int>(share.consumer) * WARPS_OF_CONSUMER + share.warp;
        lane = lane_anew();
        // Work tiles start where their rows of x do.
        const int first = share.warp_row();
        row = unit.x_row + first, expert = unit.x_matrix;
        const int32_t left = static_cast<int32_t>(unit.result.rows) - static_cast<int32_t>(unit.part.row) - first;
        count = minimum<int32_t>(left, Shared::WARP_ROWS);
    }
    bool has(int own) const { return own < count; }

    // The warp's slot in shared memory: for what it stores next, or for what the other consumer's
    // warp of the same tokens reads.
    uint8_t* place() const { return dynamic_shared() + Shared::OUT + warp * Shared::WARP_BYTES; }
    const uint8_t* other_place() const {
        return dynamic_shared() + Shared::OUT + (warp ^ WARPGROUP_SIZE / static_cast<int>(WARP_SIZE)) * Shared::WARP_BYTES;
    }
    // Barrier with that warp.
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

// SwiGLU of gate and up of two features of each of two tokens.
DEVICE void activate(const uint32_t (&gate)[2], const uint32_t (&up)[2], float limit, const Weights& weights, float (&o)[4]) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const float weight = weights.of_tokens[half];
        o[2 * half] = weighted_swiglu(unpack_bf16_low(gate[half]), unpack_bf16_low(up[half]), limit, weight);
        o[2 * half + 1] = weighted_swiglu(unpack_bf16_high(gate[half]), unpack_bf16_high(up[half]), limit, weight);
    }
}

// SwiGLU of a work tile for which a consumer has both blocks of weights.
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

// After the pairs that two warps exchange: the largest magnitudes of their tokens.
constexpr int MAGNITUDES = Shared::WARP_ROWS * HALF_FEATURES * 2;
static_assert(MAGNITUDES + Shared::WARP_ROWS * 4 <= Shared::WARP_BYTES, "what warps exchange exceeds a warp's place");

// The consumer with gate's sums keeps those of the first half of the features. It gives the others
// to the consumer with up's sums, which keeps that half. Each then has gate and up of one half.
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

// SwiGLU of a half work tile.
template <bool INTERLEAVED>
DEVICE void activate_half(const WarpTokens& tokens, const Pairs<N8>& pairs, uint32_t consumer, float limit,
                          const Weights& weights, Products<HALF_EIGHTS>& o) {
    if constexpr (INTERLEAVED) {
        UNROLL
        for (int n = 0; n < HALF_EIGHTS; ++n) activate(pairs[2 * n], pairs[2 * n + 1], limit, weights, o[n]);
        // The barrier protects magnitudes of an earlier work tile that the other warp may still
        // read.
        tokens.meet_other_warp();
    } else {
        Pairs<HALF_EIGHTS> gate, up;
        exchange_halves(tokens, pairs, consumer, gate, up);
        UNROLL
        for (int n = 0; n < HALF_EIGHTS; ++n) activate(gate[n], up[n], limit, weights, o[n]);
    }
}

// ---------------------------------------------------------------- codes

// The largest magnitudes of a thread's two tokens in each group of GROUP_EIGHTS eights, in all
// four lanes that share the tokens.
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

// Joins the magnitudes of both consumers' halves of a group.
DEVICE void join_magnitudes(const WarpTokens& tokens, Magnitudes<HALF_EIGHTS, HALF_EIGHTS>& magnitudes) {
    const int lane = tokens.lane;
    auto* const own = reinterpret_cast<float*>(tokens.place() + MAGNITUDES);
    const auto* const other = reinterpret_cast<const float*>(tokens.other_place() + MAGNITUDES);
    // All four lanes of two tokens hold the same values.
    if (lane % 4 == 0) own[lane / 4] = magnitudes.largest_of[0][0];
    if (lane % 4 == 1) own[lane / 4 + 8] = magnitudes.largest_of[1][0];
    tokens.meet_other_warp();
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float& magnitude = magnitudes.largest_of[half][0];
        magnitude = maximum_or_nan_f32(magnitude, other[lane / 4 + 8 * half]);
    }
}

// Divides values by the scales of their groups, as store_codes of quantize_fp8.h.
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

// Copies the codes of a warp's tokens, from `feature` on, out of the warp's slot.
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

// Stores codes of values already divided by their scales, through the warp's slot. `feature` is
// the first one.
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
    // The next codes may overwrite the slot.
    __syncwarp();
}

// Stores the scales of groups `first` to `end` - 1 of a warp's tokens, one group a lane. Groups
// after the warp's own ones are padding.
template <int EIGHTS, int GROUP_EIGHTS>
DEVICE void store_scales(const QuantizedRows& target, const WarpTokens& tokens,
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

// Codes and scales of a warp's values from `feature` on.
template <int EIGHTS, int GROUP_EIGHTS>
DEVICE void quantize_groups(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature,
                            Products<EIGHTS>& o) {
    constexpr bool IS_HALF = EIGHTS == HALF_EIGHTS, IS_SHARED = IS_HALF && GROUP_EIGHTS == HALF_EIGHTS;
    const QuantizedRows target = part_of_rows(params, FusedShared::target(), tokens.expert);
    Magnitudes<EIGHTS, GROUP_EIGHTS> scales(o);
    if constexpr (IS_SHARED) join_magnitudes(tokens, scales);
    // The other consumer's warp has read what the codes overwrite.
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
    // A group that both consumers share is stored by the first one, with the groups that pad the
    // row after it.
    const int32_t own_end = first + EIGHTS / GROUP_EIGHTS;
    const bool has_padding = is_last && (!IS_HALF || IS_SHARED || is_second);
    const int32_t end = IS_SHARED && is_second ? first : has_padding ? padded : minimum(own_end, padded);
    store_scales(target, tokens, scales, first, end);
    if (target.scale_type == FP32) divide_products<false>(scales, o);
    else divide_products<true>(scales, o);
    store_codes(params, tokens, feature, o);
}

template <int EIGHTS>
DEVICE void quantize(const GroupedLinearSwigluParams& params, const WarpTokens& tokens, int32_t feature, Products<EIGHTS>& o) {
    if (params.round_to_bf16) {
        UNROLL
        for (int n = 0; n < EIGHTS; ++n) round_to_bf16(o[n]);
    }
    if (params.log2_group == 5) quantize_groups<EIGHTS, 4>(params, tokens, feature, o);
    else quantize_groups<EIGHTS, EIGHTS>(params, tokens, feature, o);
}

template <bool INTERLEAVED>
struct QuantizedProducts {
    const GroupedLinearSwigluParams& params;

    void store(const UnitResult& unit, const BlockSums (&total)[BLOCKS], const Share& share) const {
        Pairs<N8> pairs[BLOCKS];
        UNROLL
        for (int block = 0; block < BLOCKS; ++block) round_block(total[block], pairs[block]);
        const WarpTokens tokens(unit, share);
        // The other consumer's warp has no tokens either.
        if (tokens.count <= 0) return;
        const Weights weights(params, tokens);
        const int32_t feature = static_cast<int32_t>(unit.part.column) / 2;
        if (share.is_half) {
            Products<HALF_EIGHTS> o;
            activate_half<INTERLEAVED>(tokens, pairs[0], share.consumer, params.limit, weights, o);
            quantize(params, tokens, feature + static_cast<int32_t>(share.consumer) * HALF_FEATURES, o);
        } else {
            Products<UNIT_EIGHTS> o;
            activate_unit<INTERLEAVED>(pairs, params.limit, weights, o);
            quantize(params, tokens, feature, o);
        }
    }
};

template <typename Experts, bool INTERLEAVED>
DEVICE void grouped_linear_swiglu(const GroupedLinearSwigluParams& params) {
    const SharedAddress shared = shared_address(dynamic_shared());
    int32_t* const ends = GroupedShared::ends();
    const GroupedLinearParams product = product_of<GROUP, GROUP, GROUP>(params);
    if (threadIdx.x == 0) FusedShared::target() = quantized_rows_of(params);
    initialise_barriers<Experts::CLUSTER>(shared);
    count_tiles<UnitShape>(product, ends);
    const auto before = [&] { quantize_rows_of_nobody<CONSUMER_THREADS / WARP_SIZE>(params, FusedShared::target(), product); };
    multiply_units(UnitsOfGateAndUp<Experts, INTERLEAVED>{{{product, ends}}}, params.x_map, params.w_map, shared, before,
                   QuantizedProducts<INTERLEAVED>{params});
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
