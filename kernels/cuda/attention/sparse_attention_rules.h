// Rules shared by all kernels of sparse attention: which slots of a list are valid, which keys
// they name, and what share of a softmax a sink leaves.
#pragma once

#include "math.h"
#include "numeric.h"
#include "platform.h"

// The key that a stored index names, -1 where the index is invalid.
DEVICE int32_t valid_key(int32_t index, int32_t num_keys) {
    return index >= 0 && index < num_keys ? index : -1;
}

// How many slots of a token's list count.
template <typename Params>
DEVICE int32_t list_length(const Params& params, int64_t token) {
    const int32_t listed = params.topk_length ? params.topk_length[token] : params.topk;
    return maximum(minimum(listed, params.topk), 0);
}

// exp(lse) / (exp(lse) + exp(sink)) for base-2 arguments: the share that the sink leaves to the
// softmax without it.
DEVICE float share_beside_sink(float lse_log2, float sink_log2) {
    return 1.0f / (1.0f + exp2_approx(sink_log2 - lse_log2));
}
