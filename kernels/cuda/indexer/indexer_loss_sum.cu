// Reductions over the rows of the indexer's loss (training 6): the number of rows that are not
// padding, and their sum.
//
//     real_rows = number of rows t with row_mask[t] != 0
//     loss      = loss_coeff / R sum_t kl[t]        R = real_rows, at least 1, or `divisor`
//
// Work division: one block each. A thread adds every THREADS-th row, and the block adds its
// threads in one order: a sum has the same bits in every run. A thread loads AT_ONCE rows before
// it adds the first. Few warps and few instructions, because nothing else runs meanwhile and every
// instruction before or after the loads adds latency. Floor: 1 or 4 bytes a row. Limit: the
// launch, the loads' latency and the exchange.
//
// Launch: one block.
#include "elements.h"
#include "memory.h"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int AT_ONCE = 16;
static_assert((WARPS & (WARPS - 1)) == 0, "parts of warps are combined in pairs");

struct IndexerLossCountParams {
    const uint8_t* row_mask;  // [num_tokens]
    int32_t* real_rows;       // [1]
    int32_t num_tokens;
};

struct IndexerLossSumParams {
    const float* kl;           // [num_tokens]
    const int32_t* real_rows;  // [1], or nullptr
    float* loss;               // [1]
    int32_t num_tokens;
    int32_t divisor;
    float loss_coeff;
};

SHARED_MEMORY(indexer_loss_count, WARPS * sizeof(int32_t))
SHARED_MEMORY(indexer_loss_sum, WARPS * sizeof(float))

// The sum over all threads, in every thread.
template <typename T>
DEVICE T sum_over_block(T value) {
    auto* parts = reinterpret_cast<T*>(dynamic_shared());
    value = sum_over_lanes<WARP_SIZE>(value);
    if (lane_id() == 0) parts[warp_id()] = value;
    __syncthreads();
    return sum_over_lanes<WARPS>(parts[lane_id() % WARPS]);
}

// The sum of `of` over the rows of this thread.
template <typename T, typename Of>
DEVICE T sum_of_rows(int32_t num_tokens, Of of) {
    T sum = 0;
    UNROLL_BY(1)
    for (int64_t token = threadIdx.x; token < num_tokens; token += AT_ONCE * THREADS) {
        const int32_t left = num_tokens - static_cast<int32_t>(token);
        T values[AT_ONCE];
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i) values[i] = i * THREADS < left ? of(token + i * THREADS) : T(0);
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i) sum += values[i];
    }
    return sum;
}

KERNEL(indexer_loss_count, IndexerLossCountParams, THREADS) {
    int32_t count = sum_of_rows<int32_t>(params.num_tokens, [&](int64_t token) { return params.row_mask[token] != 0 ? 1 : 0; });
    count = sum_over_block(count);
    if (threadIdx.x == 0) *params.real_rows = count;
}

KERNEL(indexer_loss_sum, IndexerLossSumParams, THREADS) {
    float sum = sum_of_rows<float>(params.num_tokens, [&](int64_t token) { return params.kl[token]; });
    const int32_t rows = params.real_rows ? maximum(*params.real_rows, 1) : params.divisor;
    const float scale = params.loss_coeff / static_cast<float>(rows);
    sum = sum_over_block(sum);
    if (threadIdx.x == 0) *params.loss = sum * scale;
}
