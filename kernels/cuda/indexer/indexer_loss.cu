// The indexer's distillation loss, KL(target || prediction) of every row, and its score gradient
// (training 6; stage 1 of training 7). Over the valid slots v of row t; a padding row has none,
//
//     lse  = log sum_v exp x       computed and stored, or given; +inf where the sum is 0
//     ell  = x - lse               Pred = exp ell
//
//     exact:        kl = sum_v T (log max(T, 1e-10) - ell)            g = -T
//     clipped log:  kl = sum_v T' (log T' - min(max(ell, -100), 0))   g = ell < -100 ? 0 : -T'
//                   T' = max(T, e^-100)
//
//     dlogits = grad_loss s (g - Pred sum_v g), 0 if invalid   loss = s sum_t kl, s = loss_coeff/R
//
// T is `target`, or with l1 min(target / l1, 1), 0 where l1 is 0. Clipping is decided on ell:
// e^-100 is subnormal. Invalid slots are never used, whatever they hold.
//
// Work division: a block takes a row. A thread holds up to HELD slots in registers, so that
// logits, target and list are read once; a longer row is read from L2 in up to four passes. Two
// reductions over the block, one barrier each; lists of 512 have one warp and none. A thread loads
// and stores the same slots: the gradient may overlap logits or target.
//
// Floor: 12 bytes a valid slot of a list (8 dense), 4 a slot of the gradient: at 4.24 TB/s 7.9 us
// for 4096 lists of 512. One H200: 11.85 us. Limit: two launches, their start and end.
//
// Defines: THREADS a power of two from 32 on; SELECTED see ranking.h. Launch: num_tokens blocks.
// What was tried: kernels/docs/indexer_loss.md.
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "ranking.h"

#if !defined(THREADS) || !defined(SELECTED)
#error "define THREADS and SELECTED"
#endif

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int HELD = 16;              // slots of a thread at a time
constexpr int TILE = THREADS * HELD;  // and of a block
constexpr int REDUCTIONS = 4;
// Threads of an SM, which leaves a thread 64 registers: more threads keep more of the rows in
// flight.
constexpr int RESIDENT_THREADS = 1024;
static_assert((WARPS & (WARPS - 1)) == 0, "parts of warps are combined in pairs");

constexpr float CLIP_LOG_MIN = -100.0f;
constexpr float CLIP_PROB_MIN = 0x1.bp-145f;  // e^-100: 27 steps of the subnormal numbers
constexpr float EXACT_FLOOR = 1e-10f;
constexpr float MIN_NORMAL = 0x1p-126f;

struct IndexerLossParams {
    const float* logits; int64_t logits_stride;   // [num_tokens, slots]; strides in elements
    const float* target; int64_t target_stride;   // [num_tokens, slots]
    const float* l1;                              // [num_tokens], or nullptr where the target is one already
    const uint8_t* row_mask;                      // [num_tokens], 0 of a padding row; or nullptr
    const int32_t* indices; int64_t indices_stride;  // [num_tokens, slots], or nullptr
    const int32_t* topk_length;                   // [num_tokens], or nullptr
    const int32_t* cu_q;                          // [num_sequences + 1], or nullptr
    const int32_t* cu_k;                          // [num_sequences + 1], or nullptr
    const int32_t* q_off;                         // [num_sequences], or nullptr
    float* idx_lse;                               // [num_tokens]: read where it is given, else written
    const float* grad_loss;                       // [1], or nullptr
    const int32_t* real_rows;                     // [1]: what a mean divides by, or nullptr where it is `divisor`
    float* kl;                                    // [num_tokens], or nullptr where no value is wanted
    float* dlogits; int64_t dlogits_stride;       // [num_tokens, slots], or nullptr
    int32_t slots;
    int32_t num_keys;
    int32_t num_sequences;
    int32_t ratio;
    int32_t indices_global;
    int32_t lse_given;
    int32_t clipped;
    int32_t divisor;
    float loss_coeff;
};

// Shared memory of a block: what its warps exchange, separate for each reduction.
struct Shared {
    float parts[REDUCTIONS][WARPS];
};
SHARED_MEMORY(indexer_loss_vector, sizeof(Shared))
SHARED_MEMORY(indexer_loss_scalar, sizeof(Shared))
SHARED_MEMORY(indexer_loss_streamed, sizeof(Shared))

// ---------------------------------------------------------------- over the block

DEVICE float sum_of(float a, float b) { return a + b; }

// Combines each value over all lanes of the warp that differ in bits below SPAN. Every lane gets
// the same bits, since each step adds the same two values in both of its lanes.
template <float (*COMBINE)(float, float), int SPAN, int COUNT>
DEVICE void over_lanes(float (&values)[COUNT]) {
    UNROLL
    for (int distance = SPAN / 2; distance > 0; distance /= 2)
        for (float& value : values) value = COMBINE(value, __shfl_xor_sync(FULL_WARP, value, distance));
}

// Gives every group of WARPS lanes the values of all warps, which their first lanes hold. `parts`
// are used once.
template <int COUNT>
DEVICE void of_warps(float (&values)[COUNT], float (*parts)[WARPS]) {
    for (int i = 0; i < COUNT; ++i)
        if (lane_id() == 0) parts[i][warp_id()] = values[i];
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) values[i] = parts[i][lane_id() % WARPS];
}

// The sum of each value over all threads, in one order; every thread gets the same bits.
template <int COUNT>
DEVICE void over_block(float (&values)[COUNT], float (*parts)[WARPS]) {
    over_lanes<sum_of, WARP_SIZE>(values);
    if constexpr (WARPS > 1) {
        of_warps(values, parts);
        over_lanes<sum_of, WARPS>(values);
    }
}

// ---------------------------------------------------------------- a row

// The addresses of a row.
struct Sources {
    const float* logits;
    const float* target;
    const int32_t* indices;  // of a list
};

DEVICE Sources sources_of(const IndexerLossParams& params, int32_t token) {
    return Sources{params.logits + token * params.logits_stride, params.target + token * params.target_stride,
                   SELECTED ? params.indices + token * params.indices_stride : nullptr};
}

struct Row {
    const IndexerLossParams& params;
    Sources sources;
    float l1;       // 1 where the target is one already
    Ranking list;   // slots from list.length on are not valid

    bool is_valid(int slot, uint32_t index) const {
        return slot < list.length && (!SELECTED || list.contains(static_cast<int32_t>(index)));
    }
    // Whether COUNT slots are all valid, in fewer instructions.
    template <int COUNT>
    bool all_valid(int first, const uint32_t* indices) const {
        uint32_t largest = 0;
        UNROLL
        for (int i = 0; i < COUNT && SELECTED; ++i) largest = maximum(largest, list.local_key(static_cast<int32_t>(indices[i])));
        return first + COUNT <= list.length && (!SELECTED || largest < static_cast<uint32_t>(list.num_keys));
    }
};

DEVICE Row row_of(const IndexerLossParams& params, const Sources& sources, int32_t token) {
    Ranking list = ranking(params, token, params.slots);
    const bool is_padding = params.row_mask && params.row_mask[token] == 0;
    if (is_padding) list.length = 0;
    const float l1 = SELECTED ? 1.0f : params.l1[token];
    return Row{params, sources, l1, list};
}

// The divisor of dense scores, l1. Computed while the row is in flight: the row's loads do not
// wait for l1.
struct Divisor {
    // l1 times `scale`, and its inverse. scale is a power of two that makes the remainders of
    // quotients exact.
    float scale, scaled_l1, inverse;

    explicit Divisor(float l1)
        : scale(absolute_f32(l1) < 0x1p-60f ? 0x1p100f : absolute_f32(l1) > 0x1p60f ? 0x1p-64f : 1.0f),
          scaled_l1(l1 * scale), inverse(__frcp_rn(scaled_l1)) {
        // The inverse of an infinity is 0, and so is every quotient: no correction is needed.
        if (inverse == 0.0f) scaled_l1 = 0.0f;
    }
    // stored / l1 with one correction by its remainder, which a share that is not clipped needs. A
    // branch to a division costs more.
    float quotient(float stored) const {
        const float number = __fmul_rn(stored, scale), near = __fmul_rn(number, inverse);
        const float corrected = fused_multiply_add(fused_multiply_add(-near, scaled_l1, number), inverse, near);
        return absolute_f32(near) < 2.0f ? corrected : near;
    }
    float share(float stored) const { return minimum_or_nan_f32(quotient(stored), 1.0f); }
};

// A thread's slots of one tile of a row: logits, -infinity where invalid, and targets, unused
// there. Later the terms of the gradient, x - lse and -g.
struct Held {
    float x[HELD], target[HELD];
    uint32_t valid;  // a bit for each
    bool is_whole;   // all of them in all lanes of the warp: its slots are computed without a look at any, sixteen in one piece

    // The valid bits of an access.
    template <int COUNT>
    uint32_t valid_at(int at) const { return valid >> at & ALL<COUNT>; }
    template <int COUNT>
    static constexpr uint32_t ALL = (1u << COUNT) - 1;
};

template <int COUNT>
DEVICE int first_slot(int tile, int at) {
    return tile + at * THREADS + static_cast<int>(threadIdx.x) * COUNT;
}

template <int COUNT>
DEVICE void load_words(const int32_t* source, uint32_t (&words)[COUNT]) {
    if constexpr (COUNT == 4) {
        const Vec16 vector = load_vec16(source);
        for (int i = 0; i < COUNT; ++i) words[i] = vector.w[i];
    } else {
        for (int i = 0; i < COUNT; ++i) words[i] = static_cast<uint32_t>(source[i]);
    }
}

template <int COUNT>
DEVICE void load_access(const Sources& sources, int first, int at, Held& held, uint32_t (&indices)[HELD]) {
    float x[COUNT], target[COUNT];
    uint32_t words[COUNT] = {};
    load_elements<COUNT>(sources.logits + first, x);
    load_elements<COUNT>(sources.target + first, target);
    if (SELECTED) load_words<COUNT>(sources.indices + first, words);
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
        held.x[at + i] = x[i];
        held.target[at + i] = target[i];
        indices[at + i] = words[i];
    }
}

// Starts the loads of a tile of a row's first slots. All loads are in flight before the first
// value is needed.
template <int COUNT>
DEVICE void load(const Sources& sources, int slots, int tile, Held& held, uint32_t (&indices)[HELD]) {
    // The diagonal cuts many tiles of a dense row: there two code paths for loads are slower than
    // one.
    if (SELECTED && slots - tile >= TILE) {
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) load_access<COUNT>(sources, first_slot<COUNT>(tile, at), at, held, indices);
        return;
    }
    UNROLL
    for (int at = 0; at < HELD; at += COUNT) {
        const int first = first_slot<COUNT>(tile, at);
        UNROLL
        for (int i = at; i < at + COUNT; ++i) {
            held.x[i] = held.target[i] = 0.0f;
            indices[i] = 0;
        }
        if (first < slots) load_access<COUNT>(sources, first, at, held, indices);
    }
}

// Finds the valid slots. In most accesses all are valid: then no slot is tested by itself.
template <int COUNT>
DEVICE void find_valid(const Row& row, int tile, Held& held, const uint32_t (&indices)[HELD]) {
    held.valid = 0;
    UNROLL
    for (int at = 0; at < HELD; at += COUNT) {
        const int first = first_slot<COUNT>(tile, at);
        if (row.all_valid<COUNT>(first, &indices[at])) {
            held.valid |= Held::ALL<COUNT> << at;
        } else if (first < row.list.length) {
            UNROLL
            for (int i = at; i < at + COUNT; ++i) {
                const bool valid = row.is_valid(first + i - at, indices[i]);
                held.valid |= static_cast<uint32_t>(valid) << i;
                held.x[i] = valid ? held.x[i] : -INFINITY_F32;
            }
        }
    }
    // Few rows up to the diagonal have such warps. Lists of one warp gain nothing from it.
    held.is_whole = SELECTED && WARPS > 1 && __all_sync(FULL_WARP, held.valid == Held::ALL<HELD>) != 0;
}

// T of a dense row's stored values. Lists store T itself.
template <int COUNT>
DEVICE void find_shares(const Row& row, Held& held) {
    if constexpr (!SELECTED) {
        const Divisor divisor(row.l1);
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) {
            if (held.valid_at<COUNT>(at) == 0) continue;
            UNROLL
            for (int i = at; i < at + COUNT; ++i) held.target[i] = divisor.share(held.target[i]);
        }
        if (row.l1 == 0.0f)
            for (float& target : held.target) target = 0.0f;
    }
}

template <int COUNT>
DEVICE void load_tile(const Row& row, int tile, Held& held) {
    uint32_t indices[HELD];
    load<COUNT>(row.sources, row.list.length, tile, held, indices);
    find_valid<COUNT>(row, tile, held, indices);
    find_shares<COUNT>(row, held);
}

// take(first slot of an access, its valid bits) for this thread's slots, tile by tile; skipped
// where no slot is valid. A resident row is already loaded.
template <int COUNT, bool RESIDENT, typename Take>
DEVICE void for_each_access_found(const Row& row, Held& held, Take take) {
    UNROLL_BY(1)
    for (int tile = 0; tile < row.list.length; tile += TILE) {
        if (!RESIDENT) load_tile<COUNT>(row, tile, held);
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) {
            const uint32_t valid = held.valid_at<COUNT>(at);
            if (valid != 0) take(at, valid);
        }
        if (RESIDENT) break;
    }
}

// The same, without a test of each access, where a warp's slots are all valid.
template <int COUNT, bool RESIDENT, typename Take>
DEVICE void for_each_access(const Row& row, Held& held, Take take) {
    if (RESIDENT && held.is_whole) {
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) take(at, Held::ALL<COUNT>);
    } else {
        for_each_access_found<COUNT, RESIDENT>(row, held, take);
    }
}

// The natural log-sum-exp of the valid logits. The powers of each warp are relative to its own
// largest logit and are rescaled to the row's: one barrier is enough for both.
template <int COUNT, bool RESIDENT>
DEVICE float log_sum_exp(const Row& row, Held& held, Shared& shared) {
    float largest[] = {-INFINITY_F32}, sum[] = {0.0f};
    for_each_access<COUNT, RESIDENT>(row, held, [&](int at, uint32_t) {
        for (int i = at; i < at + COUNT; ++i) largest[0] = maximum_f32(largest[0], held.x[i]);
    });
    over_lanes<maximum_f32, WARP_SIZE>(largest);
    float shift = subtrahend(largest[0]);
    // A NaN loses that comparison, and enters by the sum.
    for_each_access<COUNT, RESIDENT>(row, held, [&](int at, uint32_t) {
        for (int i = at; i < at + COUNT; ++i) sum[0] += exp2_approx((held.x[i] - shift) * LOG2_E);
    });
    over_lanes<sum_of, WARP_SIZE>(sum);
    if constexpr (WARPS > 1) {
        float parts[] = {largest[0], sum[0]};
        of_warps(parts, shared.parts);
        largest[0] = parts[0];
        over_lanes<maximum_f32, WARPS>(largest);
        shift = subtrahend(largest[0]);
        sum[0] = parts[1] * exp2_approx((parts[0] - shift) * LOG2_E);
        over_lanes<sum_of, WARPS>(sum);
    }
    return sum[0] == 0.0f ? INFINITY_F32 : shift + log2_approx(sum[0]) * LN_2;
}

// The terms of a row. PLAIN: no weight of the clipped form is so small that it is raised or has
// the logarithm of a subnormal, which costs three instructions more. UNCLIPPED: besides, no ell is
// clipped.
template <bool CLIPPED>
struct Terms {
    static constexpr bool clipped = CLIPPED;
    float lse;

    static bool is_plain(float target) { return !clipped || target >= MIN_NORMAL; }
    // Whether nothing held is clipped, by bits: values of one sign are ordered as their magnitudes
    // are. How a NaN compares changes no result.
    bool all_unclipped(const Held& held) const {
        if constexpr (!clipped) return true;
        int32_t least_target = 0x7fffffff;
        uint32_t lowest_ell = 0;
        UNROLL
        for (int i = 0; i < HELD; ++i) {
            least_target = minimum(least_target, static_cast<int32_t>(__float_as_uint(held.target[i])));
            lowest_ell = maximum(lowest_ell, __float_as_uint(ell(held.x[i])));
        }
        return least_target >= static_cast<int32_t>(__float_as_uint(MIN_NORMAL)) && lowest_ell <= __float_as_uint(CLIP_LOG_MIN);
    }
    float ell(float x) const { return x - lse; }
    template <bool PLAIN>
    float weight(float target) const {
        return clipped && !PLAIN ? maximum_or_nan_f32(target, CLIP_PROB_MIN) : target;
    }
    template <bool PLAIN>
    float log2_of(float floored) const {
        return clipped && !PLAIN ? log2_approx(floored) : log2_normal_approx(floored);
    }
    template <bool PLAIN, bool UNCLIPPED>
    float value(float ell, float target) const {
        const float floored = clipped ? weight<PLAIN>(target) : maximum_or_nan_f32(target, EXACT_FLOOR);
        const float raised = UNCLIPPED ? ell : maximum_or_nan_f32(ell, CLIP_LOG_MIN);
        const float log_prediction = clipped ? minimum_or_nan_f32(raised, 0.0f) : ell;
        return weight<PLAIN>(target) * (log2_of<PLAIN>(floored) * LN_2 - log_prediction);
    }
    template <bool PLAIN, bool UNCLIPPED>
    float minus_g(float ell, float target) const {
        return clipped && !UNCLIPPED && ell < CLIP_LOG_MIN ? 0.0f : weight<PLAIN>(target);
    }
};

// Loaded before the slots, so that no later step waits for them.
struct Scalars {
    float grad_loss, lse;
    int32_t rows;  // R

    // s times the upstream gradient.
    float gradient_scale(const IndexerLossParams& params) const {
        return grad_loss * (params.loss_coeff / static_cast<float>(rows));
    }
};

DEVICE Scalars scalars_of(const IndexerLossParams& params, int32_t token) {
    return Scalars{params.dlogits ? *params.grad_loss : 0.0f, params.lse_given ? params.idx_lse[token] : 0.0f,
                   params.real_rows ? maximum(*params.real_rows, 1) : params.divisor};
}

// Adds kl, if requested, and g of one access, and leaves the terms of the gradient in place.
template <int COUNT, bool PLAIN, bool UNCLIPPED, bool VALUE, typename Terms>
DEVICE void add_access(const Terms& terms, Held& held, int at, uint32_t valid, float (&sums)[2]) {
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
        const float ell = terms.ell(held.x[at + i]), target = held.target[at + i];
        const float minus_g = terms.template minus_g<PLAIN, UNCLIPPED>(ell, target);
        const bool counts = PLAIN || (valid >> i & 1) != 0;
        if (VALUE) {
            const float value = terms.template value<PLAIN, UNCLIPPED>(ell, target);
            sums[0] += counts ? value : 0.0f;
        }
        sums[1] -= counts ? minus_g : 0.0f;
        held.x[at + i] = ell;
        held.target[at + i] = minus_g;
    }
}

template <int COUNT, bool VALUE, typename Terms>
DEVICE void add_terms(const Terms& terms, Held& held, int at, uint32_t valid, float (&sums)[2]) {
    bool is_plain = valid == Held::ALL<COUNT>;
    UNROLL
    for (int i = 0; i < COUNT; ++i) is_plain = is_plain & terms.is_plain(held.target[at + i]);
    if (is_plain) add_access<COUNT, true, false, VALUE>(terms, held, at, valid, sums);
    else add_access<COUNT, false, false, VALUE>(terms, held, at, valid, sums);
}

// The same for all that a warp holds, where nothing is raised or clipped; false otherwise.
template <int COUNT, bool VALUE, typename Terms>
DEVICE bool add_whole(const Terms& terms, Held& held, float (&sums)[2]) {
    if (!__all_sync(FULL_WARP, terms.all_unclipped(held))) return false;
    UNROLL
    for (int at = 0; at < HELD; at += COUNT) add_access<COUNT, true, true, VALUE>(terms, held, at, Held::ALL<COUNT>, sums);
    return true;
}

// The gradient of an access whose terms were added.
template <int COUNT>
DEVICE void gradient_of(const Held& held, int at, float scale, float sum, float (&gradient)[COUNT]) {
    UNROLL
    for (int i = 0; i < COUNT; ++i) {
        const float prediction = exp2_approx(held.x[at + i] * LOG2_E), g = -held.target[at + i];
        gradient[i] = scale * (g - prediction * sum);
    }
}

// Stores the gradient of the slots up to the access in which the row ends, 0 where they are
// invalid.
template <int COUNT, bool RESIDENT, typename Terms>
DEVICE void store_gradient(const Row& row, Held& held, const Terms& terms, float scale, float sum, float* target) {
    float gradient[COUNT];
    if (RESIDENT && held.is_whole) {
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) {
            gradient_of(held, at, scale, sum, gradient);
            store_elements(target + first_slot<COUNT>(0, at), gradient);
        }
        return;
    }
    UNROLL_BY(1)
    for (int tile = 0; tile < row.list.length; tile += TILE) {
        if (!RESIDENT) load_tile<COUNT>(row, tile, held);
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) {
            const int first = first_slot<COUNT>(tile, at);
            if (first >= row.list.length) continue;
            const uint32_t valid = held.valid_at<COUNT>(at);
            float unused[2] = {};
            if (!RESIDENT) add_terms<COUNT, false>(terms, held, at, valid, unused);
            gradient_of(held, at, scale, sum, gradient);
            if (valid != Held::ALL<COUNT>) {
                UNROLL
                for (int i = 0; i < COUNT; ++i) gradient[i] = valid >> i & 1 ? gradient[i] : 0.0f;
            }
            store_elements(target + first, gradient);
        }
        if (RESIDENT) break;
    }
}

// Stores 0 after that, without a wait for any load.
template <int COUNT, bool RESIDENT>
DEVICE void clear_rest(const Row& row, float* target) {
    if (row.list.length >= row.params.slots) return;
    const float zeros[COUNT] = {};
    for (int tile = 0; tile < row.params.slots; tile += TILE) {
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) {
            const int first = first_slot<COUNT>(tile, at);
            if (first >= row.list.length && first < row.params.slots) store_elements(target + first, zeros);
        }
        if (RESIDENT) break;
    }
}

// Adds kl, if requested, and g of this thread's slots.
template <int COUNT, bool RESIDENT, bool VALUE, typename Terms>
DEVICE void add_all(const Row& row, Held& held, const Terms& terms, float (&sums)[2]) {
    if constexpr (RESIDENT)
        if (held.is_whole && add_whole<COUNT, VALUE>(terms, held, sums)) return;
    for_each_access_found<COUNT, RESIDENT>(row, held, [&](int at, uint32_t valid) {
        add_terms<COUNT, VALUE>(terms, held, at, valid, sums);
    });
}

// Value and gradient; either may be requested without the other.
template <int COUNT, bool RESIDENT, typename Terms>
DEVICE void sum_terms(const Row& row, Held& held, Shared& shared, const Terms& terms, float scale, int32_t token) {
    const IndexerLossParams& params = row.params;
    float sums[] = {0.0f, 0.0f};  // of kl and of g
    if (params.kl) add_all<COUNT, RESIDENT, true>(row, held, terms, sums);
    else add_all<COUNT, RESIDENT, false>(row, held, terms, sums);
    over_block(sums, shared.parts + 2);
    if (threadIdx.x == 0) {
        if (params.kl) params.kl[token] = sums[0];
        if (!params.lse_given) params.idx_lse[token] = terms.lse;
    }
    if (!params.dlogits) return;
    float* target = params.dlogits + token * params.dlogits_stride;
    store_gradient<COUNT, RESIDENT>(row, held, terms, scale, sums[1], target);
}

template <int COUNT, bool RESIDENT>
DEVICE void loss_of_row(const IndexerLossParams& params) {
    // The next kernel is the sum of the rows.
    let_next_kernel_come();
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    // Without lists later tokens see more keys: they go first.
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Sources sources = sources_of(params, token);
    Held held;
    uint32_t indices[HELD];
    // All slots of a list: the loads do not wait for the instructions, or loads, that find the
    // valid ones.
    if (RESIDENT && SELECTED) load<COUNT>(sources, params.slots, 0, held, indices);
    const Scalars scalars = scalars_of(params, token);
    const Row row = row_of(params, sources, token);
    if (RESIDENT && !SELECTED) load<COUNT>(sources, row.list.length, 0, held, indices);
    if (params.dlogits) clear_rest<COUNT, RESIDENT>(row, params.dlogits + token * params.dlogits_stride);
    if (RESIDENT) {
        find_valid<COUNT>(row, 0, held, indices);
        find_shares<COUNT>(row, held);
    }
    const float lse = params.lse_given ? scalars.lse : log_sum_exp<COUNT, RESIDENT>(row, held, shared);
    const float scale = scalars.gradient_scale(params);
    if (params.clipped) sum_terms<COUNT, RESIDENT>(row, held, shared, Terms<true>{lse}, scale, token);
    else sum_terms<COUNT, RESIDENT>(row, held, shared, Terms<false>{lse}, scale, token);
}

KERNEL_OF(indexer_loss_vector, IndexerLossParams, THREADS, RESIDENT_THREADS / THREADS) { loss_of_row<4, true>(params); }
KERNEL(indexer_loss_scalar, IndexerLossParams, THREADS) { loss_of_row<1, true>(params); }
KERNEL(indexer_loss_streamed, IndexerLossParams, THREADS) { loss_of_row<1, false>(params); }
