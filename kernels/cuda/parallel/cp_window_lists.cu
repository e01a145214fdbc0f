// Lists of windows of a rank's tokens, and numbers that its plan knows (training 10).
//
//     indices[t][j] = the row of key t + j + 1 - W of a window of W keys, counted in rows of halo and
//                     own keys; -1 before the start of the token's sequence
//     target[i]     = a number of the launch
//
// Numbers are in the launch's parameters: a recorded step has them without memory of the host.
//
// Floor: 4 bytes a slot, written. Launch: ceil(num_tokens / WARPS) blocks, a warp for each token; one
// block for numbers.
#include "platform.h"

constexpr int LANES = WARP_SIZE, THREADS = 256, WARPS = THREADS / LANES;
constexpr int NUMBERS = 256;  // of a launch
constexpr int32_t NONE = -1;

struct GatheredWindowParams {
    const int32_t* starts;  // [num_sequences]: the row of each sequence's first key, ascending
    int32_t* indices;       // [num_tokens, window]
    int64_t num_tokens;
    int32_t num_sequences;
    int32_t halo;
    int32_t window;
};

struct GatheredNumbersParams {
    int32_t* target;
    int32_t count;
    int32_t numbers[NUMBERS];
};

KERNEL(gathered_window, GatheredWindowParams, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / LANES;
    if (token >= params.num_tokens) return;
    const int32_t row = params.halo + static_cast<int32_t>(token);
    // The last sequence that starts at the row or before.
    int32_t low = 0, high = params.num_sequences;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (params.starts[middle] <= row) low = middle;
        else high = middle;
    }
    const int32_t start = params.starts[low];
    for (int32_t slot = static_cast<int32_t>(threadIdx.x % LANES); slot < params.window; slot += LANES) {
        const int32_t key = row + slot + 1 - params.window;
        params.indices[token * params.window + slot] = key >= start ? key : NONE;
    }
}

KERNEL(gathered_numbers, GatheredNumbersParams, THREADS) {
    const int32_t at = static_cast<int32_t>(threadIdx.x);
    if (at < params.count) params.target[at] = params.numbers[at];
}
