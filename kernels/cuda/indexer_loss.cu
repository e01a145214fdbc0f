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
// read once; a longer row is read again in each of up to four passes, out of the second-level cache. Powers,
// logarithms, sums: three reductions over the block, each with one barrier. A thread reads and writes the same slots,
// so that the gradient may lie over logits or target. Rows of kl are added in one order by indexer_loss_sum.cu: the
// loss is the same in every run.
//
// Floor: 12 bytes a valid slot of a list (8 of a dense row) and 4 of every slot of the gradient: at 4.24 TB/s 7.9 us
// for 4096 lists of 512, 15.8 us of 1024, and 32 us for 4096 dense rows of 4096 up to the diagonal; about 40
// instructions a slot, which is a third of that. Limited by memory; for lists of 512 the sum's launch, some 3 us, shows
// beside it. Measured on one H200, value and gradient in one launch: 17.8 us (1.89 TB/s) for lists of 512, 28.9 us
// (2.33) of 1024, 102 us (1.32) dense; the gradient alone 13.8, 24.1 and 75.8 us (2.43, 2.79, 1.77): not yet memory alone.
//
// Defines: THREADS   threads of a block: a multiple of 32
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
constexpr int HELD = 8;                // slots of a thread at a time: the kernels take some 55 registers
constexpr int TILE = THREADS * HELD;  // and of a block
constexpr int REDUCTIONS = 4;

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

// Of all threads, in one order; every thread gets the same bits. `parts` is used once.
template <float (*COMBINE)(float, float)>
DEVICE float over_block(float value, float (&parts)[WARPS]) {
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        value = COMBINE(value, __shfl_xor_sync(FULL_WARP, value, distance));
    if (lane_id() == 0) parts[warp_id()] = value;
    __syncthreads();
    value = parts[0];
    for (int warp = 1; warp < WARPS; ++warp) value = COMBINE(value, parts[warp]);
    return value;
}

// ---------------------------------------------------------------- a row

struct Row {
    const IndexerLossParams& params;
    const float* logits;
    const float* target;
    float l1;       // 1 where the target is one already
    Ranking list;   // slots from list.length on are not valid

    bool is_valid(int slot, uint32_t index) const {
        return slot < list.length && (!SELECTED || list.valid_row(static_cast<int32_t>(index)) >= 0);
    }
    // T of what is stored as the target.
    float share(float stored) const {
        if (!params.l1) return stored;
        const float share = l1 == 0.0f ? 0.0f : stored / l1;
        return share > 1.0f ? 1.0f : share;
    }
};

DEVICE Row row_of(const IndexerLossParams& params, int32_t token) {
    const bool is_padding = params.row_mask && params.row_mask[token] == 0;
    Row row{params, params.logits + token * params.logits_stride, params.target + token * params.target_stride, 1.0f,
            ranking(params, token, params.slots)};
    if (is_padding) row.list.length = 0;
    else if (params.l1) row.l1 = params.l1[token];
    return row;
}

// The slots of a thread out of one tile of a row; 0 where they are not valid.
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

template <int COUNT>
DEVICE void load(const Row& row, int tile, Held& held) {
    held.valid = 0;
    UNROLL
    for (int access = 0; access < HELD / COUNT; ++access) {
        const int first = first_slot<COUNT>(tile, access);
        float x[COUNT] = {}, target[COUNT] = {};
        uint32_t indices[COUNT] = {};
        if (first < row.list.length) {
            load_elements<COUNT>(row.logits + first, x);
            load_elements<COUNT>(row.target + first, target);
            if (SELECTED) load_words<COUNT>(row.list.indices + first, indices);
        }
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const int at = access * COUNT + i;
            const bool valid = row.is_valid(first + i, indices[i]);
            held.valid |= static_cast<uint32_t>(valid) << at;
            held.x[at] = valid ? x[i] : 0.0f;
            held.target[at] = valid ? row.share(target[i]) : 0.0f;
        }
    }
}

// take(i) for each valid slot of this thread, tile by tile. A row that is held was loaded before.
template <int COUNT, bool RESIDENT, typename Take>
DEVICE void for_each_valid(const Row& row, Held& held, Take take) {
    for (int tile = 0; tile < row.list.length; tile += TILE) {
        if (!RESIDENT) load<COUNT>(row, tile, held);
        UNROLL
        for (int i = 0; i < HELD; ++i)
            if (held.valid >> i & 1) take(i);
    }
}

// The natural log-sum-exp of the valid logits.
template <int COUNT, bool RESIDENT>
DEVICE float log_sum_exp(const Row& row, Held& held, Shared& shared) {
    float largest = -INFINITY_F32, sum = 0.0f;
    for_each_valid<COUNT, RESIDENT>(row, held, [&](int i) { largest = maximum_f32(largest, held.x[i]); });
    largest = subtrahend(over_block<maximum_f32>(largest, shared.parts[0]));
    // A NaN loses that comparison, and enters by the sum.
    for_each_valid<COUNT, RESIDENT>(row, held, [&](int i) { sum += exp2_approx((held.x[i] - largest) * LOG2_E); });
    sum = over_block<sum_of>(sum, shared.parts[1]);
    return sum == 0.0f ? INFINITY_F32 : largest + log2_approx(sum) * LN_2;
}

// What a row's terms are made of.
struct Terms {
    bool clipped;
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

// loss_coeff / R.
DEVICE float loss_scale(const IndexerLossParams& params) {
    const int32_t rows = params.real_rows ? maximum(*params.real_rows, 1) : params.divisor;
    return params.loss_coeff / static_cast<float>(rows);
}

// The gradient of every slot of the row, 0 where it is not valid.
template <int COUNT, bool RESIDENT>
DEVICE void store_gradient(const Row& row, Held& held, const Terms& terms, float sum, int32_t token) {
    const IndexerLossParams& params = row.params;
    const float scale = *params.grad_loss * loss_scale(params);
    float* target = params.dlogits + token * params.dlogits_stride;
    for (int tile = 0; tile < params.slots; tile += TILE) {
        if (!RESIDENT) load<COUNT>(row, tile, held);
        UNROLL
        for (int access = 0; access < HELD / COUNT; ++access) {
            const int first = first_slot<COUNT>(tile, access);
            if (first >= params.slots) continue;
            float gradient[COUNT];
            UNROLL
            for (int i = 0; i < COUNT; ++i) {
                const int at = access * COUNT + i;
                const float prediction = exp2_approx(terms.ell(held.x[at]) * LOG2_E);
                const float g = terms.g(held.x[at], held.target[at]);
                gradient[i] = held.valid >> at & 1 ? scale * (g - prediction * sum) : 0.0f;
            }
            store_elements(target + first, gradient);
        }
    }
}

template <int COUNT, bool RESIDENT>
DEVICE void loss_of_row(const IndexerLossParams& params) {
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    // Without lists later tokens see more keys: they go first.
    const int32_t token = static_cast<int32_t>(SELECTED ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    const Row row = row_of(params, token);
    Held held;
    if (RESIDENT) load<COUNT>(row, 0, held);
    Terms terms{params.clipped != 0, 0.0f};
    terms.lse = params.lse_given ? params.idx_lse[token] : log_sum_exp<COUNT, RESIDENT>(row, held, shared);

    float kl = 0.0f, sum = 0.0f;
    for_each_valid<COUNT, RESIDENT>(row, held, [&](int i) {
        if (params.kl) kl += terms.value(held.x[i], held.target[i]);
        sum += terms.g(held.x[i], held.target[i]);
    });
    if (params.kl) kl = over_block<sum_of>(kl, shared.parts[2]);
    if (threadIdx.x == 0) {
        if (params.kl) params.kl[token] = kl;
        if (!params.lse_given) params.idx_lse[token] = terms.lse;
    }
    if (!params.dlogits) return;
    sum = over_block<sum_of>(sum, shared.parts[3]);
    store_gradient<COUNT, RESIDENT>(row, held, terms, sum, token);
}

KERNEL(indexer_loss_vector, IndexerLossParams, THREADS) { loss_of_row<4, true>(params); }
KERNEL(indexer_loss_scalar, IndexerLossParams, THREADS) { loss_of_row<1, true>(params); }
KERNEL(indexer_loss_streamed, IndexerLossParams, THREADS) { loss_of_row<1, false>(params); }
