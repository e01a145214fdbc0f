// Barriers in shared memory that count arrivals and bytes (mbarrier).
#pragma once

#include "async_copy.h"
#include "memory.h"

// An mbarrier is 8 bytes of shared memory, 8-byte aligned. One thread initialises it. The others
// may use it after fence_mbarrier_init by that thread and a __syncthreads.
DEVICE void mbarrier_init(SharedAddress barrier, uint32_t arrivals) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_init(emulator::context, barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

DEVICE void fence_mbarrier_init() {
#if defined(PARITY_EMULATOR)
    emulator::host->fence_mbarrier_init(emulator::context);
#else
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEVICE void mbarrier_arrive(SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive(emulator::context, barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// One arrival, and `bytes` more of bulk copies that the current phase waits for.
DEVICE void mbarrier_arrive_expect(SharedAddress barrier, uint32_t bytes) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive(emulator::context, barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Arrives at the mbarrier at the same offset of block `rank` of the cluster. That block learns
// that this thread's earlier reads and waits are over, and sees none of its ordinary writes. An
// arrival with release would wait until the whole GPU sees them.
DEVICE void mbarrier_arrive_at(SharedAddress barrier, uint32_t rank) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive_at(emulator::context, barrier, rank);
#else
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
#endif
}

// Waits until the phase with this parity is complete. The first phase has parity 0; waiting for
// parity 1 on a fresh barrier returns at once.
DEVICE void mbarrier_wait(SharedAddress barrier, uint32_t parity) {
#if defined(PARITY_EMULATOR)
    emulator::wait_at_mbarrier(barrier, parity);
#else
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1, 0x989680;\n"
        "@complete bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// This thread arrives when all copies (copy_async_16) that it has issued so far have landed. It is
// one of the arrivals that the barrier was initialised with.
DEVICE void copy_arrive(SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    emulator::host->copy_arrive(emulator::context, barrier);
#else
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
