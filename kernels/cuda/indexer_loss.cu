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
// one warp each, and no barrier. Powers, logarithms, sums: three reductions over the block, each with one barrier. A
// thread reads and writes the same slots, so that the gradient may lie over logits or target. Rows of kl are added in
// one order by indexer_loss_sum.cu: the loss is the same in every run. (That the last block adds them would need a
// count in memory that somebody has cleared, by a launch as well.)
//
// Floor: 12 bytes a valid slot of a list (8 of a dense row) and 4 of every slot of the gradient: at 4.24 TB/s 7.9 us
// for 4096 lists of 512, 15.8 us of 1024, and 32 us for 4096 dense rows of 4096 up to the diagonal; an empty launch
// takes some 2 us beside that. Measured on one H200, this kernel alone in a graph of launches: value and gradient 12.3
// us for lists of 512, 20.1 of 1024, 54.1 dense (64, 79 and 59 % of the copy rate); the gradient alone 11.1, 18.8 and
// 38.5 us. With branches around slots, twice the threads of half the slots, a division each of a dense row and
// reductions in which each thread added the parts of all warps it was 16.0, 27.5 and 101 us; 14.0, 24.9 and 76.7.
// Beside these the sum of the rows takes a launch, some 2 us. By instructions, some 75 a slot, lists of 512 take 5 us,
// and dense rows 20: what is not hidden is the wait of each block for its row, its reductions and its stores, one
// behind the other. Half the slots a thread and twice the threads take 11.6 and 19.4 us of lists, but 77.7 of dense
// rows.
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
// Of a multiprocessor, which leaves a thread 80 registers, or 64 and some spilled: with more threads more of the rows
// is on its way. Either was measured to be the faster one.
constexpr int RESIDENT_THREADS = SELECTED ? 768 : 1024;
static_assert((WARPS & (WARPS - 1)) == 0, "parts of warps are combined in pairs");

constexpr float CLIP_LOG_MIN = -100.0f;
constexpr float CLIP_PROB_MIN = 0x1.bp-145f;  // e^-100: 27 steps of the subnormal numbers
constexpr float EXACT_FLOOR = 1e-10f;

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

// Each number over all threads, in one order; every thread gets the same bits. `parts` are used once.
template <float (*COMBINE)(float, float), int COUNT>
DEVICE void over_block(float (&values)[COUNT], float (*parts)[WARPS]) {
    over_lanes<COMBINE, WARP_SIZE>(values);
    if constexpr (WARPS > 1) {
        for (int i = 0; i < COUNT; ++i)
            if (lane_id() == 0) parts[i][warp_id()] = values[i];
        __syncthreads();
        for (int i = 0; i < COUNT; ++i) values[i] = parts[i][lane_id() % WARPS];
        over_lanes<COMBINE, WARPS>(values);
    }
}

// ---------------------------------------------------------------- a row

struct Row {
    const IndexerLossParams& params;
    const float* logits;
    const float* target;
    float l1;       // 1 where the target is one already
    // l1 times `scale`, a power of two that brings it to where remainders of quotients are exact, and its inverse.
    float scale, scaled_l1, inverse;
    Ranking list;   // slots from list.length on are not valid

    bool is_valid(int slot, uint32_t index) const {
        return slot < list.length && (!SELECTED || list.contains(static_cast<int32_t>(index)));
    }
    // stored / l1 with one correction by its remainder, which a share that is not clipped needs. A branch to a division
    // costs more. The inverse of an infinity is 0.
    float quotient(float stored) const {
        const float number = __fmul_rn(stored, scale), near = __fmul_rn(number, inverse);
        const float corrected = fused_multiply_add(fused_multiply_add(-near, scaled_l1, number), inverse, near);
        return inverse != 0.0f && absolute_f32(near) < 2.0f ? corrected : near;
    }
    // T of what is stored as the target. Lists have targets already.
    float share(float stored) const {
        if (SELECTED) return stored;
        const float share = l1 == 0.0f ? 0.0f : quotient(stored);
        return share > 1.0f ? 1.0f : share;
    }
};

DEVICE Row row_of(const IndexerLossParams& params, int32_t token) {
    Ranking list = ranking(params, token, params.slots);
    const bool is_padding = params.row_mask && params.row_mask[token] == 0;
    if (is_padding) list.length = 0;
    const float l1 = SELECTED ? 1.0f : params.l1[token];
    const float scale = absolute_f32(l1) < 0x1p-60f ? 0x1p100f : absolute_f32(l1) > 0x1p60f ? 0x1p-64f : 1.0f;
    const float scaled_l1 = l1 * scale;
    const float* logits = params.logits + token * params.logits_stride;
    const float* target = params.target + token * params.target_stride;
    return Row{params, logits, target, l1, scale, scaled_l1, __frcp_rn(scaled_l1), list};
}

// The slots of a thread out of one tile of a row; logits of -infinity where they are not valid, and targets that nobody uses.
struct Held {
    float x[HELD], target[HELD];
    uint32_t valid;  // a bit for each
};

template <int COUNT>
DEVICE int first_slot(int tile, int access) {
    return tile + (access * THREADS + static_cast<int>(threadIdx.x)) * COUNT;
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

// All loads are on their way before the first number is needed.
template <int COUNT>
DEVICE void load(const Row& row, int tile, Held& held) {
    uint32_t indices[HELD];
    UNROLL
    for (int access = 0; access < HELD / COUNT; ++access) {
        const int first = first_slot<COUNT>(tile, access);
        float x[COUNT] = {}, target[COUNT] = {};
        uint32_t words[COUNT] = {};
        if (first < row.list.length) {
            load_elements<COUNT>(row.logits + first, x);
            load_elements<COUNT>(row.target + first, target);
            if (SELECTED) load_words<COUNT>(row.list.indices + first, words);
        }
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int at = access * COUNT + i;
            held.x[at] = x[i];
            held.target[at] = target[i];
            indices[at] = words[i];
        }
    }
    held.valid = 0;
    UNROLL
    for (int access = 0; access < HELD / COUNT; ++access) {
        const int first = first_slot<COUNT>(tile, access);
        if (first >= row.list.length) break;
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int at = access * COUNT + i;
            const bool valid = row.is_valid(first + i, indices[at]);
            held.valid |= static_cast<uint32_t>(valid) << at;
            held.x[at] = valid ? held.x[at] : -INFINITY_F32;
            held.target[at] = row.share(held.target[at]);
        }
    }
}

// take(i, whether it is valid) for the slots of this thread, tile by tile, up to the access in which the row ends. A
// row that is held was loaded before. Within an access nothing branches: to go around a slot costs more than to compute
// it.
template <int COUNT, bool RESIDENT, typename Take>
DEVICE void for_each_slot(const Row& row, Held& held, Take take) {
    // A row that is held has one tile.
    UNROLL_BY(1)
    for (int tile = 0; tile < row.list.length; tile += TILE) {
        if (!RESIDENT) load<COUNT>(row, tile, held);
        UNROLL
        for (int access = 0; access < HELD / COUNT; ++access) {
            if (first_slot<COUNT>(tile, access) >= row.list.length) break;
            UNROLL
            for (int at = access * COUNT; at < (access + 1) * COUNT; ++at) take(at, (held.valid >> at & 1) != 0);
        }
    }
}

// The natural log-sum-exp of the valid logits.
template <int COUNT, bool RESIDENT>
DEVICE float log_sum_exp(const Row& row, Held& held, Shared& shared) {
    float largest[] = {-INFINITY_F32}, sum[] = {0.0f};
    for_each_slot<COUNT, RESIDENT>(row, held, [&](int i, bool) { largest[0] = maximum_f32(largest[0], held.x[i]); });
    over_block<maximum_f32>(largest, shared.parts);
    const float shift = subtrahend(largest[0]);
    // A NaN loses that comparison, and enters by the sum.
    const auto add_power = [&](int i, bool) { sum[0] += exp2_approx((held.x[i] - shift) * LOG2_E); };
    for_each_slot<COUNT, RESIDENT>(row, held, add_power);
    over_block<sum_of>(sum, shared.parts + 1);
    return sum[0] == 0.0f ? INFINITY_F32 : shift + log2_approx(sum[0]) * LN_2;
}

// What a row's terms are made of.
template <bool CLIPPED>
struct Terms {
    static constexpr bool clipped = CLIPPED;
    float lse;

    float ell(float x) const { return x - lse; }
    float weight(float target) const { return clipped ? maximum_or_nan_f32(target, CLIP_PROB_MIN) : target; }
    float value(float x, float target) const {
        const float floored = clipped ? weight(target) : maximum_or_nan_f32(target, EXACT_FLOOR);
        float log_prediction = ell(x);
        if (clipped && log_prediction < CLIP_LOG_MIN) log_prediction = CLIP_LOG_MIN;
        if (clipped && log_prediction > 0.0f) log_prediction = 0.0f;
        return weight(target) * (log2_approx(floored) * LN_2 - log_prediction);
    }
    float g(float x, float target) const { return clipped && ell(x) < CLIP_LOG_MIN ? 0.0f : -weight(target); }
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

// The gradient of every slot of the row, 0 where it is not valid.
template <int COUNT, bool RESIDENT, typename Terms>
DEVICE void store_gradient(const Row& row, Held& held, const Terms& terms, float scale, float sum, float* target) {
    for (int tile = 0; tile < row.params.slots; tile += TILE) {
        if (!RESIDENT) load<COUNT>(row, tile, held);
        UNROLL
        for (int access = 0; access < HELD / COUNT; ++access) {
            const int first = first_slot<COUNT>(tile, access);
            if (first >= row.params.slots) break;
            float gradient[COUNT] = {};
            if (first < row.list.length) {
                UNROLL
                for (int i = 0; i < COUNT; ++i) {
                    const int at = access * COUNT + i;
                    const float prediction = exp2_approx(terms.ell(held.x[at]) * LOG2_E);
                    const float g = terms.g(held.x[at], held.target[at]);
                    gradient[i] = held.valid >> at & 1 ? scale * (g - prediction * sum) : 0.0f;
                }
            }
            store_elements(target + first, gradient);
        }
    }
}

// Value and gradient, of which either may be wanted alone.
template <int COUNT, bool RESIDENT, typename Terms>
DEVICE void sum_terms(const Row& row, Held& held, Shared& shared, const Terms& terms, float scale, int32_t token) {
    const IndexerLossParams& params = row.params;
    float sums[] = {0.0f, 0.0f};  // of kl and of g
    const auto add_g = [&](int i, bool valid) {
        const float g = terms.g(held.x[i], held.target[i]);
        sums[1] += valid ? g : 0.0f;
    };
    const auto add_both = [&](int i, bool valid) {
        const float value = terms.value(held.x[i], held.target[i]);
        sums[0] += valid ? value : 0.0f;
        add_g(i, valid);
    };
    if (params.kl) for_each_slot<COUNT, RESIDENT>(row, held, add_both);
    else for_each_slot<COUNT, RESIDENT>(row, held, add_g);
    over_block<sum_of>(sums, shared.parts + 2);
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
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    // Without lists later tokens see more keys: they go first.
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Scalars scalars = scalars_of(params, token);
    const Row row = row_of(params, token);
    Held held;
    if (RESIDENT) load<COUNT>(row, 0, held);
    const float lse = params.lse_given ? scalars.lse : log_sum_exp<COUNT, RESIDENT>(row, held, shared);
    const float scale = scalars.gradient_scale(params);
    if (params.clipped) sum_terms<COUNT, RESIDENT>(row, held, shared, Terms<true>{lse}, scale, token);
    else sum_terms<COUNT, RESIDENT>(row, held, shared, Terms<false>{lse}, scale, token);
}

KERNEL_OF(indexer_loss_vector, IndexerLossParams, THREADS, RESIDENT_THREADS / THREADS) { loss_of_row<4, true>(params); }
KERNEL(indexer_loss_scalar, IndexerLossParams, THREADS) { loss_of_row<1, true>(params); }
KERNEL(indexer_loss_streamed, IndexerLossParams, THREADS) { loss_of_row<1, false>(params); }
