// The keys that each token of a rank scores (training 1, 10).
//
//     offsets[t], lengths[t] = the first of the keys ks up to ke of token t, and how many they are
//
// Both ends are held to the keys, as the logits' kernel holds them.
//
// Floor: 16 bytes a token. Launch: ceil(num_tokens / THREADS) blocks.
#include "platform.h"

constexpr int THREADS = 256;

struct GatheredRangesParams {
    const int32_t* ks;  // [num_tokens]
    const int32_t* ke;
    int32_t* offsets;
    int32_t* lengths;
    int64_t num_tokens;
    int32_t num_keys;
};

DEVICE int32_t within(int32_t x, int32_t low, int32_t high) { return x < low ? low : x < high ? x : high; }

KERNEL(gathered_ranges, GatheredRangesParams, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (token >= params.num_tokens) return;
    const int32_t first = within(params.ks[token], 0, params.num_keys);
    params.offsets[token] = first;
    params.lengths[token] = within(params.ke[token], first, params.num_keys) - first;
}
