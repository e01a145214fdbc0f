// Shared by the kernels of indexer_recompute.cu and indexer_recompute_hopper.cu: their parameters.
//
// The including file is compiled with WEIGHT_ELEMENT, the type of w, and SELECTED 1 defined.
#pragma once

#include "elements.h"
#include "ranking.h"

#if !defined(WEIGHT_ELEMENT) || !defined(SELECTED)
#error "define WEIGHT_ELEMENT and SELECTED"
#endif
static_assert(SELECTED == 1, "all keys up to a causal limit are those of indexer_logits");

constexpr int HEAD_DIM = 128, HEADS = 64;

struct IndexerRecomputeParams {
    const bf16* q; int64_t q_token_stride; int64_t q_head_stride;  // [num_tokens, num_heads, 128]; in elements
    const bf16* k; int64_t k_stride;                               // [num_keys, 128]
    const WEIGHT_ELEMENT* w; int64_t w_stride;                     // [num_tokens, num_heads]
    const int32_t* indices; int64_t indices_stride;                // [num_tokens, topk]
    const int32_t* topk_length;                                    // [num_tokens], or nullptr
    const int32_t* cu_q;                                           // [num_sequences + 1], or nullptr
    const int32_t* cu_k;                                           // [num_sequences + 1], or nullptr
    float* logits; int64_t logits_stride;                          // [num_tokens, topk]
    int32_t num_tokens;
    int32_t num_heads;
    int32_t topk;
    int32_t num_keys;
    int32_t num_sequences;
    int32_t indices_global;
    float sm_scale;
};

// The weight of a head, 0 of an absent one.
DEVICE float load_weight(const IndexerRecomputeParams& params, int32_t token, int head) {
    return head < params.num_heads ? Element<WEIGHT_ELEMENT>::load(params.w + token * params.w_stride + head) : 0.0f;
}
