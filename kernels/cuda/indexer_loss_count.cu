// How many rows of the indexer's loss are no padding (training 6), for a mean over these:
//
//     real_rows = number of rows t with row_mask[t] != 0
//
// A thread counts every THREADS-th row. Floor: a byte a row; limited by the launch: some 4 us on one H200.
//
// Launch: one block.
#include "platform.h"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP_SIZE;

struct IndexerLossCountParams {
    const uint8_t* row_mask;  // [num_tokens]
    int32_t* real_rows;       // [1]
    int32_t num_tokens;
};
PARAMS_LAYOUT(IndexerLossCountParams, row_mask, real_rows, num_tokens)

SHARED_MEMORY(indexer_loss_count, WARPS * sizeof(int32_t))

// Of all threads.
DEVICE int32_t sum_over_block(int32_t value) {
    auto* parts = reinterpret_cast<int32_t*>(dynamic_shared());
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, distance);
    if (lane_id() == 0) parts[warp_id()] = value;
    __syncthreads();
    value = parts[lane_id()];
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, distance);
    return value;
}
static_assert(WARPS == WARP_SIZE, "a lane for each warp");

KERNEL(indexer_loss_count, IndexerLossCountParams, THREADS) {
    int32_t count = 0;
    for (int64_t token = threadIdx.x; token < params.num_tokens; token += THREADS) count += params.row_mask[token] != 0;
    count = sum_over_block(count);
    if (threadIdx.x == 0) *params.real_rows = count;
}
