// The indexer's distillation loss, KL(target || prediction) of every row, and its score gradient (training 6; stage 1
// of training 7). Over the valid slots v of row t, of which a padding row has none,
//
//     lse  = log sum_v exp x                 computed and stored, or given; +inf where the sum is 0
//     ell  = x - lse                         Pred = exp ell
//
//     exact:        kl = sum_v T (log max(T, 1e-10) - ell)               g = -T
//     clipped log:  kl = sum_v T' (log T' - min(max(ell, -100), 0))      g = 0 where ell < -100, else -T'
//                   T' = max(T, e^-100)
//
//     dlogits = grad_loss s (g - Pred sum_v g), 0 in all other slots     loss = s sum_t kl, s = loss_coeff / R
//
// T is `target` itself, or with l1 `min(target / l1, 1)`, 0 where l1 is 0. What is clipped is decided on ell: e^-100 is
// subnormal, and the power is flushed to 0 below e^-87. ranking.h says which slots are valid. What is not valid is
// never used, whatever it holds.
//
// One block takes one row: THREADS threads hold up to HELD slots each in registers, so that logits, target and list are
// read once; a longer row is read again in each of up to four passes, out of the second-level cache. Lists of 512 have
// one warp each, and no barrier. Two reductions over the block, each with one barrier: powers with the largest logit,
// and the sums. All loads of a row are asked for before anything else is computed, those of a list before it is known
// how many of its slots are valid, and what lies behind its end is set to 0 meanwhile. An access of four slots that are
// all valid, as most are, is computed without a look at each; where a warp of a longer list has no other ones, its
// sixteen of a thread in one piece. A thread reads and writes the same slots, so that the gradient may lie over logits or
// target. Rows of kl are added in one order by indexer_loss_sum.cu: the loss is the same in every run. (That the last
// block adds them, by a count in the module's memory that it puts back, took 14.1, 23.1 and 45.4 us where the sum's
// launch took 13.4, 21.1 and 41.3; eight lists a block, two of a warp under way at once, 11.7 us for the gradient of
// lists of 512 where one had 11.0.)
//
// Floor: 12 bytes a valid slot of a list (8 of a dense row) and 4 of every slot of the gradient: at 4.24 TB/s 7.9 us
// for 4096 lists of 512, 15.8 us of 1024, and 32 us for 4096 dense rows of 4096 up to the diagonal; an empty launch
// takes some 2 us beside that, and the sum of the rows another launch, some 1.5 us. By instructions, some 30 a slot of a
// list and 35 of a dense row, lists of 512 take 2 us, and dense rows 10. All lists of 512 are on the GPU at once.
// Measured on one H200, value and gradient with the sum of the rows: lists of 512 11.85 us, of 1024 18.99, dense rows 41.27
// (67, 83 and 77 % of the copy rate; 83, 93 and 81 % of what the driver's copies of as many bytes take in the same run, 9.83,
// 17.70 and 33.39 us); the gradient alone 10.22, 17.28 and 36.97 us. Dense rows then had two ways through their loads, as lists
// have; with one, as now, they took 40.08 and 35.8 in an earlier call. What is left of lists of 512 above their floor is two
// launches, the first row's way and the last one's. Warps in one piece: 19.26 us for 19.62 of lists of 1024; with them lists of
// 512 took 12.2 and dense rows 40.4.
// When every launch began at the end of the one before and the sum had 1024 threads, 13.4, 21.1 and 41.3 us, the gradient
// alone 11.0, 18.6 and 36.3 (768 threads a multiprocessor for lists, or stores that leave the cache first, changed none by
// more than 0.2). Before, with some 75 instructions a slot, three reductions and two of a dense row's eight loads behind
// l1, 12.3, 20.1 and 54.1 us without the sum; the gradient alone
// 11.1, 18.8 and 38.5 us. Before that, with branches around slots, twice the threads of half the slots, a division each
// of a dense row and reductions in which each thread added the parts of all warps, 16.0, 27.5 and 101 us; 14.0, 24.9
// and 76.7. Half the slots a thread and twice the threads took 11.6 and 19.4 us of lists, but 77.7 of dense rows.
//
// Defines: THREADS   threads of a block: a power of two, 32 at least
//          SELECTED  1: lists of selected keys. 0: all keys up to a causal limit
// Launch: num_tokens blocks.
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
// Of a multiprocessor, which leaves a thread 64 registers: with more threads more of the rows is on its way.
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
PARAMS_LAYOUT(IndexerLossParams, logits, logits_stride, target, target_stride, l1, row_mask, indices, indices_stride,
              topk_length, cu_q, cu_k, q_off, idx_lse, grad_loss, real_rows, kl, dlogits, dlogits_stride, slots,
              num_keys, num_sequences,
              ratio, indices_global, lse_given, clipped, divisor, loss_coeff)

// Shared memory of a block: what its warps hand to each other, for each reduction anew.
struct Shared {
    float parts[REDUCTIONS][WARPS];
};
SHARED_MEMORY(indexer_loss_vector, sizeof(Shared))
SHARED_MEMORY(indexer_loss_scalar, sizeof(Shared))
SHARED_MEMORY(indexer_loss_streamed, sizeof(Shared))

// ---------------------------------------------------------------- over the block

DEVICE float sum_of(float a, float b) { return a + b; }

// Each number over all lanes of the warp that differ in bits below SPAN. Every lane gets the same bits, since each step
// adds the same two numbers in both of its lanes.
template <float (*COMBINE)(float, float), int SPAN, int COUNT>
DEVICE void over_lanes(float (&values)[COUNT]) {
    UNROLL
    for (int distance = SPAN / 2; distance > 0; distance /= 2)
        for (float& value : values) value = COMBINE(value, __shfl_xor_sync(FULL_WARP, value, distance));
}

// What each warp has, as its first lane holds it: of all warps in every group of WARPS lanes. `parts` are used once.
template <int COUNT>
DEVICE void of_warps(float (&values)[COUNT], float (*parts)[WARPS]) {
    for (int i = 0; i < COUNT; ++i)
        if (lane_id() == 0) parts[i][warp_id()] = values[i];
    __syncthreads();
    for (int i = 0; i < COUNT; ++i) values[i] = parts[i][lane_id() % WARPS];
}

// The sum of each number over all threads, in one order; every thread gets the same bits.
template <int COUNT>
DEVICE void over_block(float (&values)[COUNT], float (*parts)[WARPS]) {
    over_lanes<sum_of, WARP_SIZE>(values);
    if constexpr (WARPS > 1) {
        of_warps(values, parts);
        over_lanes<sum_of, WARPS>(values);
    }
}

// ---------------------------------------------------------------- a row

// Where a row lies.
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
    // Of COUNT slots, in fewer instructions.
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

// What dense scores are divided by, l1. Made where the row is on its way: nothing of that waits for l1.
struct Divisor {
    // l1 times `scale`, a power of two that brings it to where remainders of quotients are exact, and its inverse.
    float scale, scaled_l1, inverse;

    explicit Divisor(float l1)
        : scale(absolute_f32(l1) < 0x1p-60f ? 0x1p100f : absolute_f32(l1) > 0x1p60f ? 0x1p-64f : 1.0f),
          scaled_l1(l1 * scale), inverse(__frcp_rn(scaled_l1)) {
        // The inverse of an infinity is 0, and so is every quotient: nothing is left to correct.
        if (inverse == 0.0f) scaled_l1 = 0.0f;
    }
    // stored / l1 with one correction by its remainder, which a share that is not clipped needs. A branch to a division
    // costs more.
    float quotient(float stored) const {
        const float number = __fmul_rn(stored, scale), near = __fmul_rn(number, inverse);
        const float corrected = fused_multiply_add(fused_multiply_add(-near, scaled_l1, number), inverse, near);
        return absolute_f32(near) < 2.0f ? corrected : near;
    }
    float share(float stored) const { return minimum_or_nan_f32(quotient(stored), 1.0f); }
};

// The slots of a thread out of one tile of a row: logits, of -infinity where they are not valid, and targets, that
// nobody uses there; later what the gradient is made of, x - lse and -g.
struct Held {
    float x[HELD], target[HELD];
    uint32_t valid;  // a bit for each
    bool is_whole;   // all of them in all lanes of the warp: its slots are computed without a look at any, sixteen in one piece

    // The bits of an access.
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

// Asks for the slots of a tile, of a row's first ones. All loads are on their way before the first number is needed.
template <int COUNT>
DEVICE void load(const Sources& sources, int slots, int tile, Held& held, uint32_t (&indices)[HELD]) {
    // Of a dense row's tiles the diagonal cuts many, and two ways through its loads were slower than one.
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

// Which of the slots are valid. Of most accesses all are: then none is looked at alone.
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
    // Few rows up to the diagonal have such warps; lists of one warp are no sooner ready by it.
    held.is_whole = SELECTED && WARPS > 1 && __all_sync(FULL_WARP, held.valid == Held::ALL<HELD>) != 0;
}

// T of what a dense row has stored. Lists have targets already.
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

// take(first slot of an access, which of its slots are valid) for the slots of this thread, tile by tile; not where
// none of them is. A row that is held was loaded before.
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

// The same in one piece where a warp's slots are all valid.
template <int COUNT, bool RESIDENT, typename Take>
DEVICE void for_each_access(const Row& row, Held& held, Take take) {
    if (RESIDENT && held.is_whole) {
        UNROLL
        for (int at = 0; at < HELD; at += COUNT) take(at, Held::ALL<COUNT>);
    } else {
        for_each_access_found<COUNT, RESIDENT>(row, held, take);
    }
}

// The natural log-sum-exp of the valid logits. The powers of each warp are relative to the largest logit of its own,
// and are brought to that of the row with it: one barrier does for both.
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

// What a row's terms are made of. PLAIN: no weight of the clipped form is so small that it is raised, or that its
// logarithm is one of a subnormal number, which costs three instructions more. UNCLIPPED: besides, nothing is clipped below.
template <bool CLIPPED>
struct Terms {
    static constexpr bool clipped = CLIPPED;
    float lse;

    static bool is_plain(float target) { return !clipped || target >= MIN_NORMAL; }
    // Of all that is held, and whether nothing is clipped, by bits: those of numbers of one sign are ordered as their
    // magnitudes are, and what a NaN is taken for changes nothing of what is made of it.
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

// Read before the slots, so that nobody waits for it later.
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

// Adds kl, if it is wanted, and g of one access, and leaves behind what the gradient is made of.
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

// The same of all that a warp holds, where nothing of it is raised or clipped; false where something is.
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

// The gradient of the slots up to the access in which the row ends, 0 where they are not valid.
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

// 0 behind that: nothing has to be waited for.
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

// Adds kl, if it is wanted, and g of this thread's slots.
template <int COUNT, bool RESIDENT, bool VALUE, typename Terms>
DEVICE void add_all(const Row& row, Held& held, const Terms& terms, float (&sums)[2]) {
    if constexpr (RESIDENT)
        if (held.is_whole && add_whole<COUNT, VALUE>(terms, held, sums)) return;
    for_each_access_found<COUNT, RESIDENT>(row, held, [&](int at, uint32_t valid) {
        add_terms<COUNT, VALUE>(terms, held, at, valid, sums);
    });
}

// Value and gradient, of which either may be wanted alone.
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
    // The sum of the rows.
    let_next_kernel_come();
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    // Without lists later tokens see more keys: they go first.
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Sources sources = sources_of(params, token);
    Held held;
    uint32_t indices[HELD];
    // Of a list all slots: which of them are valid takes instructions, or loads, that nothing waits for then.
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
