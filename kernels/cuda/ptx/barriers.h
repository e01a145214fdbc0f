// The fence of the asynchronous proxy, and named barriers.
#pragma once

#include "memory.h"

// Orders ordinary accesses to shared memory before later ones through the asynchronous proxy.
DEVICE void fence_async_proxy() {
#if defined(PARITY_EMULATOR)
    emulator::host->fence_async_proxy(emulator::context);
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if defined(PARITY_EMULATOR)
namespace emulator {
inline void named_barrier(uint32_t id, uint32_t threads, bool wait) {
    if (id == 0 || threads == 0 || threads % WARP_SIZE)
        host->fail(context, "a named barrier is one of 1 to 15, for a multiple of 32 threads");
    host->barrier(context, id, threads, wait, 0, nullptr);
}
}  // namespace emulator
#endif

// Barriers 1 to 15 among `threads` threads, a multiple of 32; barrier 0 is __syncthreads.
DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
#if defined(PARITY_EMULATOR)
    emulator::named_barrier(id, threads, true);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Arrives without waiting.
DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
#if defined(PARITY_EMULATOR)
    emulator::named_barrier(id, threads, false);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}
