// y[i] = the value after x[i] in its tile of 64, through shared memory. One barrier is missing.
#include "platform.h"

constexpr int THREADS = 64;

struct NextValueParams {
    const float* x;  // [count]
    float* y;        // [count]
    int64_t count;   // a multiple of THREADS
};

// One block.
KERNEL(next_value, NextValueParams, THREADS) {
    __shared__ float tile[THREADS];
    const int thread = threadIdx.x, next = thread + 1 < THREADS ? thread + 1 : thread;
    for (int64_t first = 0; first < params.count; first += THREADS) {
        tile[thread] = params.x[first + thread];
        __syncthreads();
        params.y[first + thread] = tile[next];
        // __syncthreads(): a fast thread stores its next value where its neighbor has yet to load.
    }
}
