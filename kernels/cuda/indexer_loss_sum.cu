// What the rows of the indexer's loss have in common (training 6): how many are no padding, and their sum.
//
//     real_rows = number of rows t with row_mask[t] != 0
//     loss      = loss_coeff / R sum_t kl[t]        R = real_rows, at least 1, or `divisor`
//
// One block each: a thread adds every THREADS-th row, and the block adds its threads in one order, so that a sum has
// the same bits in every run. Floor: 1 or 4 bytes a row; limited by the launch: some 4 us on one H200.
//
// Launch: one block.
#include "elements.h"
#include "memory.h"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP_SIZE;

struct IndexerLossCountParams {
    const uint8_t* row_mask;  // [num_tokens]
    int32_t* real_rows;       // [1]
    int32_t num_tokens;
};
PARAMS_LAYOUT(IndexerLossCountParams, row_mask, real_rows, num_tokens)

struct IndexerLossSumParams {
    const float* kl;           // [num_tokens]
    const int32_t* real_rows;  // [1], or nullptr
    float* loss;               // [1]
    int32_t num_tokens;
    int32_t divisor;
    float loss_coeff;
};
PARAMS_LAYOUT(IndexerLossSumParams, kl, real_rows, loss, num_tokens, divisor, loss_coeff)

SHARED_MEMORY(indexer_loss_count, WARPS * sizeof(int32_t))
SHARED_MEMORY(indexer_loss_sum, WARPS * sizeof(float))

// Of all threads, in every lane of the first warp.
template <typename T>
DEVICE T sum_over_block(T value) {
    auto* parts = reinterpret_cast<T*>(dynamic_shared());
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
static_assert(WARPS == WARP_SIZE, "a lane of the first warp for each warp");

KERNEL(indexer_loss_count, IndexerLossCountParams, THREADS) {
    int32_t count = 0;
    for (int64_t token = threadIdx.x; token < params.num_tokens; token += THREADS) count += params.row_mask[token] != 0;
    count = sum_over_block(count);
    if (threadIdx.x == 0) *params.real_rows = count;
}

KERNEL(indexer_loss_sum, IndexerLossSumParams, THREADS) {
    float sum = 0.0f;
    for (int64_t token = threadIdx.x; token < params.num_tokens; token += THREADS) sum += params.kl[token];
    sum = sum_over_block(sum);
    const int32_t rows = params.real_rows ? maximum(*params.real_rows, 1) : params.divisor;
    if (threadIdx.x == 0) *params.loss = sum * (params.loss_coeff / static_cast<float>(rows));
}
