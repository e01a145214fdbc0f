// Asynchronous copies from global to shared memory (cp.async), 16 bytes each or 4.
//
// A copy lands at some moment before copy_wait returns in the thread that issued it. Other threads
// may read it only after a barrier that follows that wait.
#pragma once

#include "memory.h"

// How soon L2 may evict the lines of a copy. (The emulator has no cache.)
struct CachePolicy {
    uint64_t bits;
};

// For lines that many blocks will load.
DEVICE CachePolicy evicted_last() {
    CachePolicy policy{0};
#if !defined(PARITY_EMULATOR)
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
    return policy;
}

// For lines that no block loads again.
DEVICE CachePolicy evicted_first() {
    CachePolicy policy{0};
#if !defined(PARITY_EMULATOR)
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
    return policy;
}

// Starts the copy of 16 bytes, past the L1 cache. If `wanted` is false nothing is read, whatever
// `source` is, and the 16 bytes become 0. Both addresses must be 16-byte aligned.
DEVICE void copy_async_16(SharedAddress target, const void* source, bool wanted) {
    const uint32_t source_bytes = wanted ? 16u : 0u;
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(source, 16, "copy_async_16");
    if (wanted) emulator::require_global(source, "copy_async_16");
    uint8_t* const shared = shared_pointer(target, 16, "copy_async_16");
    emulator::host->copy_async(emulator::context, shared, source, 16, source_bytes);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(source_bytes)
                 : "memory");
#endif
}

// The same for 16 bytes that are always wanted.
DEVICE void copy_async_16(SharedAddress target, const void* source) {
#if defined(PARITY_EMULATOR)
    copy_async_16(target, source, true);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#endif
}

// The same for 16 bytes of a row that is read further: L2 loads the 256 bytes around them at once
// instead of 32, at a higher DRAM rate.
DEVICE void copy_async_16_of_row(SharedAddress target, const void* source, bool wanted) {
#if defined(PARITY_EMULATOR)
    copy_async_16(target, source, wanted);
#else
    const uint32_t source_bytes = wanted ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(source_bytes)
                 : "memory");
#endif
}

DEVICE void copy_async_16_of_row(SharedAddress target, const void* source) {
#if defined(PARITY_EMULATOR)
    copy_async_16(target, source, true);
#else
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#endif
}

DEVICE void copy_async_16(SharedAddress target, const void* source, bool wanted, CachePolicy policy) {
#if defined(PARITY_EMULATOR)
    static_cast<void>(policy);
    copy_async_16(target, source, wanted);
#else
    const uint32_t source_bytes = wanted ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target), "l"(source),
                 "r"(source_bytes), "l"(policy.bits)
                 : "memory");
#endif
}

// The same for 4 bytes, through the L1 cache; both addresses are multiples of 4.
DEVICE void copy_async_4(SharedAddress target, const void* source, bool wanted) {
    const uint32_t source_bytes = wanted ? 4u : 0u;
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(source, 4, "copy_async_4");
    if (wanted) emulator::require_global(source, "copy_async_4");
    uint8_t* const shared = shared_pointer(target, 4, "copy_async_4");
    emulator::host->copy_async(emulator::context, shared, source, 4, source_bytes);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(source_bytes) : "memory");
#endif
}

// Closes the group of copies that this thread has issued since its last commit (it may be empty).
DEVICE void copy_commit() {
#if defined(PARITY_EMULATOR)
    emulator::host->copy_commit(emulator::context);
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's newest groups have not landed.
template <int PENDING>
DEVICE void copy_wait() {
#if defined(PARITY_EMULATOR)
    emulator::host->copy_wait(emulator::context, PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
