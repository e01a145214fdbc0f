// What both implementations of sparse attention share: parameters, lists of slots, and the rules
// of a softmax whose rows may be empty and whose sink has no value. sparse_attention.cu has the
// formulas.
//
// The including file is compiled with HEADS_PER_BLOCK, V_SEPARATE and DETERMINISTIC defined.
#pragma once

#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "platform.h"
#include "sparse_attention_rules.h"

// ---------------------------------------------------------------- parameters

// Outputs are out, lse and max_logits. Strides are in elements; lse and max_logits are
// [num_tokens, num_heads]. k, v, q and out: base and strides are multiples of 16 bytes. v is read
// only with V_SEPARATE. sink and topk_length may be null.
struct SparseAttentionForwardParams {
    const bf16* q;
    int64_t q_token_stride;
    int64_t q_head_stride;
    const bf16* k;
    int64_t k_stride;
    const bf16* v;
    int64_t v_stride;
    const float* sink;
    const int32_t* indices;
    int64_t indices_stride;
    const int32_t* topk_length;
    bf16* out;
    int64_t out_token_stride;
    int64_t out_head_stride;
    float* lse;
    float* max_logits;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_keys;
    int32_t topk;
    float softmax_scale;
};

// Outputs are dq in bf16, and sums to the fp32 rows dk [num_keys, HEAD_DIM] and dv [num_keys,
// V_DIM], which the caller zeroes before. Without V_SEPARATE dv is not used: dk gets dV in its
// first V_DIM columns. With DETERMINISTIC the rows of dk and dv are those of slots, not of keys
// (see first_own_row). An lse of +inf or -inf marks a row without valid slots. sink, topk_length
// and dlse may be null. q, k, v, dout, dq, dk and dv: base and strides are multiples of 16 bytes.
struct SparseAttentionBackwardParams {
    const bf16* q;
    int64_t q_token_stride;
    int64_t q_head_stride;
    const bf16* k;
    int64_t k_stride;
    const bf16* v;
    int64_t v_stride;
    const bf16* dout;
    int64_t dout_token_stride;
    int64_t dout_head_stride;
    const float* sink;
    const float* lse;
    const float* delta;
    const float* dlse;
    const int32_t* indices;
    int64_t indices_stride;
    const int32_t* topk_length;
    bf16* dq;
    int64_t dq_token_stride;
    int64_t dq_head_stride;
    float* dk;
    int64_t dk_stride;
    float* dv;
    int64_t dv_stride;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_keys;
    int32_t topk;
    float softmax_scale;
};

// ---------------------------------------------------------------- work and lists

// The (token, heads) of this block.
struct Work {
    int64_t token;
    int32_t first_head;
    int32_t heads;  // real heads in this block, at most HEADS_PER_BLOCK
};

// Work number `number`. The works of one token are consecutive.
DEVICE Work block_work(uint32_t number, int32_t num_heads) {
    const uint32_t head_blocks = ceil_div(num_heads, HEADS_PER_BLOCK);
    const int32_t first_head = static_cast<int32_t>(number % head_blocks) * HEADS_PER_BLOCK;
    return Work{number / head_blocks, first_head, minimum(num_heads - first_head, HEADS_PER_BLOCK)};
}

// One token's list of slots, and the tensors that it indexes. Strides are in elements.
struct SlotList {
    const int32_t* indices;
    int32_t length;
    int32_t num_keys;
    const bf16* k;
    const bf16* v;
    int64_t k_stride;
    int64_t v_stride;

    // The stored index of a slot, -1 past the list's end.
    int32_t stored_index(int slot) const {
        return slot < length ? indices[slot] : -1;
    }
    int32_t valid_row(int32_t index) const {
        return valid_key(index, num_keys);
    }
};

template <typename Params>
DEVICE SlotList slot_list(const Params& params, int64_t token) {
    const int32_t length = list_length(params, token);
    return SlotList{params.indices + token * params.indices_stride, length, params.num_keys, params.k,
                    V_SEPARATE ? params.v : params.k, params.k_stride, V_SEPARATE ? params.v_stride : params.k_stride};
}

// ---------------------------------------------------------------- targets of the gradients of
// keys

// DETERMINISTIC 0: the gradients of a slot and a block's heads are added to the fp32 row of the
// slot's key. DETERMINISTIC 1: they are stored in a separate row, [head blocks, num_tokens, topk],
// and sparse_attention_sum adds those rows in one order.

// The separate row of this block's slot 0.
DEVICE int64_t first_own_row(const SparseAttentionBackwardParams& params, const Work& work) {
    const int64_t head_block = work.first_head / HEADS_PER_BLOCK;
    return (head_block * params.num_tokens + work.token) * params.topk;
}

DEVICE int64_t gradient_row(int32_t key, int64_t own_row) {
    return DETERMINISTIC ? own_row : key;
}

// Adds or stores four consecutive floats of such a row, 16-byte aligned.
DEVICE void give_vec4(float* target, float v0, float v1, float v2, float v3) {
    if constexpr (DETERMINISTIC) {
        store_vec16_streaming(target, Vec16{{__float_as_uint(v0), __float_as_uint(v1), __float_as_uint(v2),
                                             __float_as_uint(v3)}});
    } else {
        atomic_add_vec4(target, v0, v1, v2, v3);
    }
}

// ---------------------------------------------------------------- softmax

// What the softmax of one head row needs: P = share * exp2(z_log2 - lse_log2).
struct RowState {
    float lse_log2, share, delta, dlse;
};

DEVICE RowState row_state(const SparseAttentionBackwardParams& params, const Work& work, int row) {
    // exp2(z - inf) = 0: an absent head or an empty row has no weights and no gradients.
    const RowState nothing{INFINITY_F32, 0.0f, 0.0f, 0.0f};
    if (row >= work.heads) return nothing;
    const int32_t head = work.first_head + row;
    const int64_t at = work.token * params.num_heads + head;
    const float lse = params.lse[at];
    if (is_infinite(lse)) return nothing;
    const float sink_log2 = params.sink ? params.sink[head] * LOG2_E : -INFINITY_F32;
    const float share = share_beside_sink(lse * LOG2_E, sink_log2);
    return RowState{lse * LOG2_E, share, params.delta[at], params.dlse ? params.dlse[at] : 0.0f};
}
