// Which keys a token ranks (training 1, 2 and 5), shared by the operators of the indexer's
// training. SELECTED 1: slot j is the key that a list names. It is valid iff j <
// clamp(topk_length, 0, topk) and the index is within the keys of the token's sequence. SELECTED
// 0: slot j is key j of the token's sequence. It is valid iff j < lim(t) = clamp(floor((q_off + t
// + 1) / ratio), 0, keys), with t counted within the sequence.
//
// The including file is compiled with SELECTED defined.
#pragma once

#include "platform.h"

// One token's slots. Its sequence's keys are the rows [first_key, first_key + num_keys).
struct Ranking {
    const int32_t* indices;
    int32_t length;      // slots beyond it do not count
    int32_t first_key;
    int32_t num_keys;
    int32_t index_base;  // what an index of the sequence's first key is

    // The stored index of a slot, -1 from `length` on.
    int32_t stored_index(int slot) const {
        if (slot >= length) return -1;
        return SELECTED ? indices[slot] : index_base + slot;
    }
    // Whether a stored index is one of the sequence's. An index below the first becomes larger
    // than any, since index_base + num_keys fits 32 bits.
    bool contains(int32_t index) const {
        const uint32_t local = local_key(index);
        return local < static_cast<uint32_t>(num_keys);
    }
    // The number of the key within the sequence; out of range if it is not one of its keys.
    uint32_t local_key(int32_t index) const { return static_cast<uint32_t>(index) - static_cast<uint32_t>(index_base); }
    // The key row of a stored index, -1 outside of the sequence. The test comes before the
    // sequence's first row is added.
    int32_t valid_row(int32_t index) const { return contains(index) ? first_key + (index - index_base) : -1; }
};

// The sequence of a token: the first that ends after it. num_sequences where none does.
DEVICE int32_t sequence_of(const int32_t* cu_q, int32_t num_sequences, int32_t token) {
    int32_t low = 0, high = num_sequences;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (cu_q[middle + 1] <= token) low = middle + 1;
        else high = middle;
    }
    return low;
}

template <typename Params>
DEVICE Ranking ranking(const Params& params, int32_t token, int32_t columns) {
    const int32_t sequence = params.cu_q ? sequence_of(params.cu_q, params.num_sequences, token) : 0;
    if (params.cu_q && sequence == params.num_sequences) return Ranking{};
    // Clamped to the tensor, whatever cu_k holds.
    const int32_t first_key = params.cu_k ? minimum(maximum(params.cu_k[sequence], 0), params.num_keys) : 0;
    const int32_t last_key = params.cu_k ? minimum(params.cu_k[sequence + 1], params.num_keys) : params.num_keys;
    const int32_t num_keys = maximum(last_key - first_key, 0);
    if constexpr (SELECTED != 0) {
        const int32_t listed = params.topk_length ? params.topk_length[token] : columns;
        const int32_t length = maximum(minimum(listed, columns), 0);
        return Ranking{params.indices + token * params.indices_stride, length, first_key, num_keys,
                       params.indices_global ? first_key : 0};
    } else {
        // Key j covers the tokens j*ratio .. j*ratio + ratio - 1, and is visible from the last of
        // them on.
        const int32_t first_token = params.cu_q ? params.cu_q[sequence] : 0;
        const int64_t offset = params.q_off ? params.q_off[sequence] : 0;
        const int64_t position = maximum<int64_t>(offset + (token - first_token) + 1, 0);
        // A position is less than 2^32, and a 32-bit division takes far fewer instructions.
        const uint32_t limit = minimum(static_cast<uint32_t>(position) / static_cast<uint32_t>(params.ratio),
                                       static_cast<uint32_t>(minimum(num_keys, columns)));
        return Ranking{nullptr, static_cast<int32_t>(limit), first_key, num_keys, 0};
    }
}
