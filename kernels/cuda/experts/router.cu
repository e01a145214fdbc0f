// The router: which experts a token goes to, and with which weights (inference 10, training 11.4).
//
//     s       = sqrt(max(x, 0) + log1p(exp(-|x|))), x = logits;  s = exp(x / 2) below x = -18
//     learned : topk_indices = the topk experts with the largest s + bias, from the lowest id up
//     hashed  : topk_indices = tid2eid[token id], in the table's order
//     topk_weights = route_scale s / Z,  Z = max(sum of s over the slots, 1e-20)
//
//     ds_j       = route_scale / Z (dtopk_weights_j - [Z > 1e-20] sum_k dtopk_weights_k s_k / Z)
//     dlogits[e] = sum over e's slots j, in order, of ds_j sigmoid(x) / (2 s);  0 without a slot
//
// Ties go to the lower id. NaN counts as -infinity, so ids are distinct and valid for any logits.
// A token id that is negative or, hashed, beyond the table gives ids -1, weights 0. A table slot
// without an expert is -1 with weight 0, not in Z. An expert listed twice counts in each slot.
//
// Work division: one warp takes a token, its scores are ordered keys in registers. Each of topk
// rounds reduces to the largest key, then to the lowest id that has it. With few tokens a block
// takes a token, a thread an expert (router_learned_few), with the same bits. Backward: a warp has
// four tokens of up to eight slots, builds each row in shared memory and stores it once.
//
// Floor: 4 bytes an expert each way: 32768 tokens of 256 (384) experts 7.9 (11.9) us at 4.24 TB/s.
// Limit of the forward: instructions, about 60 an expert and 3 an expert and round. One H200: 45
// (60) us; backward 13.7 (18.0) us, limited by L2 and latency.
//
// Launch: ceil(num_tokens / TOKENS_PER_BLOCK) blocks; router_learned_few num_tokens; the backward
// a quarter of these where topk <= FEW_SLOTS. What was tried: kernels/docs/router.md.
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "selection.h"

constexpr int LANES = WARP_SIZE, TOKENS_PER_BLOCK = 4, THREADS = TOKENS_PER_BLOCK * LANES;
constexpr int MAX_EXPERTS = 512, GROUPS = MAX_EXPERTS / LANES;  // of a token that a block takes: a warp a group
constexpr int FLOATS = 4;                 // of a 16-byte access
constexpr int STEP = LANES * FLOATS;      // experts that a warp takes at once
constexpr float SUM_FLOOR = 1e-20f;
constexpr float SMALL_LOGIT = -18.0f;
constexpr int32_t NO_EXPERT = -1;
constexpr int FEW_SLOTS = 8;             // so many lanes have a token in the backward, where its slots are no more

struct RouterForwardParams {
    const float* logits; int64_t logits_token_stride;              // [num_tokens, num_experts]; strides in elements
    const float* bias;                                             // [num_experts], or nullptr where there is a table
    const int32_t* tid2eid; int64_t tid2eid_vocab_size_stride;     // [vocab_size, topk], or nullptr
    const int32_t* token_ids;                                      // [num_tokens], or nullptr where every token is one
    int32_t* topk_indices; int64_t topk_indices_token_stride;      // [num_tokens, topk]
    float* topk_weights; int64_t topk_weights_token_stride;        // [num_tokens, topk]
    int64_t num_tokens;
    int64_t vocab_size;
    int32_t num_experts;
    int32_t topk;
    float route_scale;
};

struct RouterBackwardParams {
    const float* logits; int64_t logits_token_stride;                // [num_tokens, num_experts]
    const int32_t* topk_indices; int64_t topk_indices_token_stride;  // [num_tokens, topk]
    const float* dtopk_weights; int64_t dtopk_weights_token_stride;  // [num_tokens, topk]
    float* dlogits; int64_t dlogits_token_stride;                    // [num_tokens, num_experts]
    int64_t num_tokens;
    int32_t num_experts;
    int32_t topk;
    float route_scale;
};

DEVICE int64_t own_token() { return static_cast<int64_t>(blockIdx.x) * TOKENS_PER_BLOCK + warp_id(); }

// sqrt(softplus(logit)); NaN stays NaN. Below -18 log1p(e) equals e in fp32: the root is taken of
// the exponent, because exp(logit) may leave the range of fp32.
DEVICE float score_of(float logit) {
    if (logit < SMALL_LOGIT) return expf(0.5f * logit);
    return __fsqrt_rn((logit < 0.0f ? 0.0f : logit) + log1pf(expf(-absolute_f32(logit))));
}

// The derivative, sigmoid(logit) / (2 score). Below -18 it is score / 2.
DEVICE float slope_of(float logit, float score) {
    if (logit < SMALL_LOGIT) return 0.5f * score;
    const float power = expf(-absolute_f32(logit));
    return (logit < 0.0f ? power : 1.0f) / ((1.0f + power) * (2.0f * score));
}

// The divisor of a token's scores: their sum, but at least the floor; NaN where the sum is NaN.
DEVICE float divisor_of(float sum) { return sum < SUM_FLOOR ? SUM_FLOOR : sum; }

// The expert of element `i` of this lane's keys.
template <bool WIDE>
DEVICE int expert_of(int i) {
    return WIDE ? i / FLOATS * STEP + lane_id() * FLOATS + i % FLOATS : i * LANES + lane_id();
}

// The keys of a token's biased scores; 0 after the last expert, which is below every score's key.
template <bool WIDE, int KEYS>
DEVICE void load_keys(const RouterForwardParams& params, int64_t token, uint32_t (&keys)[KEYS]) {
    constexpr int COUNT = WIDE ? FLOATS : 1;
    const float* logits = params.logits + token * params.logits_token_stride;
    UNROLL
    for (int i = 0; i < KEYS; i += COUNT) {
        const int expert = expert_of<WIDE>(i);
        float logit[COUNT], bias[COUNT];
        if (expert < params.num_experts) {
            load_elements<COUNT>(logits + expert, logit);
            load_elements<COUNT>(params.bias + expert, bias);
        }
        for (int e = 0; e < COUNT; ++e)
            keys[i + e] = expert < params.num_experts ? key_of(score_of(logit[e]) + bias[e]) : 0;
    }
}

// The expert of slot j in lane j, from the lowest id up. Clears the keys that it takes.
template <bool WIDE, int KEYS>
DEVICE int32_t chosen_experts(uint32_t (&keys)[KEYS], int topk) {
    int32_t expert = NO_EXPERT;
    for (int round = 0; round < topk; ++round) {
        uint32_t best = 0;
        int at = 0;
        UNROLL
        for (int i = 0; i < KEYS; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                at = i;
            }
        }
        const bool is_highest = best == __reduce_max_sync(FULL_WARP, best);
        const uint32_t own = is_highest ? static_cast<uint32_t>(expert_of<WIDE>(at)) : FULL_WARP;
        const uint32_t taken = __reduce_min_sync(FULL_WARP, own);
        UNROLL
        for (int i = 0; i < KEYS; ++i) keys[i] = own == taken && i == at ? 0 : keys[i];
        if (lane_id() == round) expert = static_cast<int32_t>(taken);
    }
    int place = 0;
    for (int slot = 0; slot < topk; ++slot) place += __shfl_sync(FULL_WARP, expert, slot) < expert;
    int32_t ordered = NO_EXPERT;
    for (int slot = 0; slot < topk; ++slot) {
        const int32_t other = __shfl_sync(FULL_WARP, expert, slot);
        if (__shfl_sync(FULL_WARP, place, slot) == lane_id()) ordered = other;
    }
    return ordered;
}

// The score of a slot's expert, 0 without one. It reads the logit again, from a cache.
DEVICE float score_of_slot(const RouterForwardParams& params, int64_t token, int32_t expert) {
    const bool used = expert != NO_EXPERT;
    return used ? score_of(params.logits[token * params.logits_token_stride + expert]) : 0.0f;
}

// Stores the slots of a token, whose experts and scores are in the lanes. The sum runs over 32
// lanes in one order.
DEVICE void write_slots(const RouterForwardParams& params, int64_t token, int32_t expert, float score) {
    const bool used = expert != NO_EXPERT;
    const float divisor = divisor_of(warp_sum(score));
    if (lane_id() >= params.topk) return;
    params.topk_indices[token * params.topk_indices_token_stride + lane_id()] = expert;
    params.topk_weights[token * params.topk_weights_token_stride + lane_id()] =
        used ? params.route_scale * (score / divisor) : 0.0f;
}

template <bool WIDE, int STEPS>
DEVICE void route_token(const RouterForwardParams& params, int64_t token) {
    uint32_t keys[STEPS * FLOATS];
    load_keys<WIDE>(params, token, keys);
    const int32_t expert = chosen_experts<WIDE>(keys, params.topk);
    write_slots(params, token, expert, score_of_slot(params, token, expert));
}

template <bool WIDE>
DEVICE void route_learned(const RouterForwardParams& params) {
    const int64_t token = own_token();
    if (token >= params.num_tokens) return;
    if (params.token_ids && params.token_ids[token] < 0) {
        write_slots(params, token, NO_EXPERT, 0.0f);
    } else if (params.num_experts <= STEP) {
        route_token<WIDE, 1>(params, token);
    } else if (params.num_experts <= 2 * STEP) {
        route_token<WIDE, 2>(params, token);
    } else if (params.num_experts <= 3 * STEP) {
        route_token<WIDE, 3>(params, token);
    } else {
        route_token<WIDE, 4>(params, token);
    }
}

KERNEL(router_learned_vector, RouterForwardParams, THREADS) { route_learned<true>(params); }
KERNEL(router_learned_scalar, RouterForwardParams, THREADS) { route_learned<false>(params); }

// Shared memory of a block of router_learned_few. The topk-th largest of the warps' largest keys
// is at most the topk-th largest of all, so smaller keys are out. Of 384 random scores and 6 slots
// about 8 candidates stay. Each counts those before it in the order of keys and ids, which is its
// rank. The choice is right however many stay, for example where all keys are equal.
struct Choice {
    uint64_t candidates[MAX_EXPERTS];  // key, and below it what is larger for a lower id; 0 behind the last one
    float scores[MAX_EXPERTS];
    uint32_t highest[GROUPS];          // of a warp's keys
    uint32_t chosen[LANES];            // experts, from the largest key down, and behind them what is none
    uint32_t ordered[LANES];           // the same from the lowest id up
    int32_t num_candidates;
};

// The number of COUNT neighbours above `own`, or below it with BELOW. Four sums, because one would
// be a long dependency chain.
template <bool BELOW, int COUNT, typename T>
DEVICE int count_beside(const T* numbers, T own) {
    int counts[4] = {};
    UNROLL
    for (int i = 0; i < COUNT; ++i) counts[i % 4] += BELOW ? numbers[i] < own : numbers[i] > own;
    return counts[0] + counts[1] + (counts[2] + counts[3]);
}

// The same of `count` of them, in steps: the values that fill up the last step are neither above
// nor below.
template <bool BELOW, typename T>
DEVICE int count_beside(const T* numbers, int count, T own) {
    constexpr int AT_ONCE = 8;
    int sum = 0;
    UNROLL_BY(1)
    for (int first = 0; first < count; first += AT_ONCE) sum += count_beside<BELOW, AT_ONCE>(numbers + first, own);
    return sum;
}

// A lower bound of the chosen keys: the topk-th largest of the warps' largest keys, 0 where fewer
// exist.
DEVICE uint32_t least_key(const Choice& choice, int topk) {
    const uint32_t own = lane_id() < GROUPS ? choice.highest[lane_id()] : 0;
    const int above = count_beside<false, GROUPS>(choice.highest, own);
    return __reduce_min_sync(FULL_WARP, above < topk ? own : FULL_WARP);
}

// Stores in `chosen` the experts of the topk largest candidates.
DEVICE void rank_candidates(Choice& choice, int topk) {
    const int count = choice.num_candidates, thread = static_cast<int>(threadIdx.x);
    if (thread >= count) return;
    const uint64_t own = choice.candidates[thread];
    const int rank = count_beside<false>(choice.candidates, count, own);
    if (rank < topk) choice.chosen[rank] = ~static_cast<uint32_t>(own);
}

// The chosen expert of slot j in lane j of the one warp that calls it, from the lowest id up.
DEVICE int32_t ordered_expert(Choice& choice, int topk) {
    const uint32_t own = choice.chosen[lane_id()];
    const int place = count_beside<true>(choice.chosen, topk, own);
    if (lane_id() < topk) choice.ordered[place] = own;
    __syncwarp();
    return lane_id() < topk ? static_cast<int32_t>(choice.ordered[lane_id()]) : NO_EXPERT;
}

KERNEL(router_learned_few, RouterForwardParams, MAX_EXPERTS) {
    __shared__ Choice choice;
    const int64_t token = blockIdx.x;
    const int expert = static_cast<int>(threadIdx.x);
    const bool exists = expert < params.num_experts;
    const float logit = exists ? params.logits[token * params.logits_token_stride + expert] : 0.0f;
    const float bias = exists ? params.bias[expert] : 0.0f;
    const bool padding = params.token_ids && params.token_ids[token] < 0;
    choice.candidates[expert] = 0;
    if (expert < LANES) choice.chosen[expert] = static_cast<uint32_t>(NO_EXPERT);
    if (expert == 0) choice.num_candidates = 0;
    const float score = score_of(logit);
    const uint32_t key = exists && !padding ? key_of(score + bias) : 0;
    choice.scores[expert] = score;
    const uint32_t highest = __reduce_max_sync(FULL_WARP, key);
    if (lane_id() == 0) choice.highest[warp_id()] = highest;
    __syncthreads();
    const uint32_t least = least_key(choice, params.topk);
    if (key != 0 && key >= least) {
        const int at = atomicAdd(&choice.num_candidates, 1);
        choice.candidates[at] = static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(expert);
    }
    __syncthreads();
    rank_candidates(choice, params.topk);
    __syncthreads();
    if (warp_id() > 0) return;
    const int32_t chosen = ordered_expert(choice, padding ? 0 : params.topk);
    write_slots(params, token, chosen, chosen != NO_EXPERT ? choice.scores[chosen] : 0.0f);
}

KERNEL(router_hashed, RouterForwardParams, THREADS) {
    const int64_t token = own_token();
    if (token >= params.num_tokens) return;
    const int64_t id = params.token_ids[token];
    int32_t expert = NO_EXPERT;
    if (id >= 0 && id < params.vocab_size && lane_id() < params.topk) {
        const int32_t listed = params.tid2eid[id * params.tid2eid_vocab_size_stride + lane_id()];
        if (listed >= 0 && listed < params.num_experts) expert = listed;
    }
    write_slots(params, token, expert, score_of_slot(params, token, expert));
}

// ---------------------------------------------------------------- backward

// A lane's slot of a token, and its expert or NO_EXPERT. SLOT_LANES neighbours have a token.
struct Slot {
    int64_t token;
    int32_t number, expert;
};

template <int SLOT_LANES>
DEVICE Slot slot_of_lane(const RouterBackwardParams& params, int64_t first_token) {
    Slot slot{first_token + lane_id() / SLOT_LANES, lane_id() % SLOT_LANES, NO_EXPERT};
    if (slot.token < params.num_tokens && slot.number < params.topk) {
        const int32_t listed = params.topk_indices[slot.token * params.topk_indices_token_stride + slot.number];
        if (listed >= 0 && listed < params.num_experts) slot.expert = listed;
    }
    return slot;
}

// The gradient of the logit of this lane's slot, from that slot only. Sums over a token's slots
// use the order of warp_sum, in which the forward has zeros in the other lanes.
template <int SLOT_LANES>
DEVICE float slot_gradient(const RouterBackwardParams& params, const Slot& slot) {
    const bool used = slot.expert != NO_EXPERT;
    const float logit = used ? params.logits[slot.token * params.logits_token_stride + slot.expert] : 0.0f;
    const float upstream = used ? params.dtopk_weights[slot.token * params.dtopk_weights_token_stride + slot.number] : 0.0f;
    const float score = used ? score_of(logit) : 0.0f;
    const float sum = sum_over_lanes<SLOT_LANES>(score), divisor = divisor_of(sum);
    const float along = sum_over_lanes<SLOT_LANES>(used ? upstream * (score / divisor) : 0.0f);
    const float common = sum < SUM_FLOOR ? 0.0f : along;
    return params.route_scale / divisor * (upstream - common) * slope_of(logit, score);
}

// The sum over the slots of this lane's expert, in order, in the lane of the first of them; the
// other lanes lose their expert.
DEVICE float expert_gradient(const RouterBackwardParams& params, Slot& slot, float gradient) {
    float sum = 0.0f;
    bool first = true;
    for (int number = 0; number < params.topk; ++number) {
        const int lane = lane_id() - slot.number + number;
        const int32_t expert = __shfl_sync(FULL_WARP, slot.expert, lane);
        const float term = __shfl_sync(FULL_WARP, gradient, lane);
        if (expert != slot.expert) continue;
        sum += term;
        first = first && number >= slot.number;
    }
    if (!first) slot.expert = NO_EXPERT;
    return sum;
}

// A warp builds the rows of its tokens one after the other in shared memory. Outside of their
// slots it stays zero.
template <int COUNT, int SLOT_LANES>
DEVICE void router_backward(const RouterBackwardParams& params, float (&row)[MAX_EXPERTS]) {
    constexpr int TOKENS = LANES / SLOT_LANES;
    const int64_t first_token = own_token() * TOKENS;
    Slot slot = slot_of_lane<SLOT_LANES>(params, first_token);
    UNROLL
    for (int expert = lane_id() * FLOATS; expert < MAX_EXPERTS; expert += STEP) store_vec16(row + expert, Vec16{});
    const float gradient = expert_gradient(params, slot, slot_gradient<SLOT_LANES>(params, slot));
    __syncwarp();
    UNROLL_BY(1)
    for (int64_t token = first_token; token < minimum(first_token + TOKENS, params.num_tokens); ++token) {
        const bool own = slot.token == token && slot.expert != NO_EXPERT;
        if (own) row[slot.expert] = gradient;
        __syncwarp();
        float* const to = params.dlogits + token * params.dlogits_token_stride;
        UNROLL_BY(4)
        for (int expert = lane_id() * COUNT; expert < params.num_experts; expert += LANES * COUNT) {
            float gradients[COUNT];
            load_elements<COUNT>(row + expert, gradients);
            store_elements(to + expert, gradients);
        }
        __syncwarp();
        if (own) row[slot.expert] = 0.0f;
        __syncwarp();
    }
}

template <int COUNT>
DEVICE void router_backward(const RouterBackwardParams& params) {
    alignas(16) __shared__ float rows[TOKENS_PER_BLOCK][MAX_EXPERTS];
    if (params.topk <= FEW_SLOTS) router_backward<COUNT, FEW_SLOTS>(params, rows[warp_id()]);
    else router_backward<COUNT, LANES>(params, rows[warp_id()]);
}

// All blocks of 32768 tokens run at once.
KERNEL_OF(router_backward_vector, RouterBackwardParams, THREADS, 16) { router_backward<FLOATS>(params); }
KERNEL(router_backward_scalar, RouterBackwardParams, THREADS) { router_backward<1>(params); }
