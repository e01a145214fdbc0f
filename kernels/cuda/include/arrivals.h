// Which block of a launch is the last to store its part, so that it may go on with what all have stored: a sum over all
// blocks without a launch of its own.
//
// A count in the module's own memory is 0 before each launch and, since the last block sets it back, behind it. So a launch in
// a recorded graph finds it as any other does, and launches of one module may not overlap: its device has one stream. One that
// ends in a fault leaves a context on a GPU that nobody can use any more; the emulator sets the count back, and faults where it is
// not 0 behind a launch.
//
//     store_published(&parts[own], part);                       in one thread, and no plain store
//     const uint32_t place = arrive();                          the same thread, once
//     ...
//     if (arrived_last(place, threads that arrive in the launch)) ... load_published(&parts[any]) ...
//
// What a thread has published before it arrives is seen by the threads of the block that arrived last.
#pragma once

#include "memory.h"

#if defined(PARITY_EMULATOR)
// Found by the runtime under this name (kernels/src/runtime/emulator/module.rs).
EMULATOR_EXPORT uint32_t emulator_arrivals[1];
uint32_t emulator_arrivals[1] = {0};
DEVICE uint32_t* arrivals_so_far() { return emulator_arrivals; }
namespace emulator {
UNWATCHED inline uint32_t arrive() { return __atomic_fetch_add(arrivals_so_far(), 1u, __ATOMIC_ACQ_REL); }
}  // namespace emulator
#else
static __device__ uint32_t arrivals_of_module;
DEVICE uint32_t* arrivals_so_far() { return &arrivals_of_module; }
#endif

// A number for blocks that may run at the same time: read and written where all multiprocessors see it. (To the emulator these
// are atomic operations: a plain access by another block is a fault.)
DEVICE void store_published(float* target, float value) {
#if defined(PARITY_EMULATOR)
    atomicExch(target, value);
#else
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(target), "f"(value) : "memory");
#endif
}
DEVICE float load_published(const float* source) {
#if defined(PARITY_EMULATOR)
    return emulator::atomic_update(const_cast<float*>(source), [](float value) { return value; });
#else
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(source) : "memory");
    return value;
#endif
}

// How many threads have arrived before this one. What it has stored is there before it arrives; nothing waits for the number
// until somebody uses it.
DEVICE uint32_t arrive() {
#if defined(PARITY_EMULATOR)
    return emulator::arrive();
#else
    uint32_t before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals_so_far()) : "memory");
    return before;
#endif
}

// What a thread passes that has not arrived.
constexpr uint32_t NOT_ARRIVED = 0xffffffffu;

// Whether a thread of this block was the last of `arrivals` to arrive. All threads of a block ask, each once.
DEVICE bool arrived_last(uint32_t before, uint32_t arrivals) {
    if (!__syncthreads_or(before == arrivals - 1)) return false;
#if !defined(PARITY_EMULATOR)
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
    if (threadIdx.x == 0) *arrivals_so_far() = 0;
    return true;
}
