// Clusters of blocks: ranks, their barrier, and stores to another block's shared memory.
#pragma once

#include "memory.h"

// The block's rank in its cluster.
DEVICE uint32_t cluster_rank() {
#if defined(PARITY_EMULATOR)
    return emulator::context->cluster_rank;
#else
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

// The barrier of all threads of a cluster that have not returned. A thread waits once for every
// time that it has arrived.
DEVICE void cluster_arrive() {
#if defined(PARITY_EMULATOR)
    emulator::host->cluster_barrier(emulator::context, 0);
#else
    asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
}
// The same for a thread whose stores no other thread reads. Others see mbarriers that it has
// initialised (fence_mbarrier_init). The arrival above waits until its stores are visible to the
// whole GPU.
DEVICE void cluster_arrive_relaxed() {
#if defined(PARITY_EMULATOR)
    cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if defined(PARITY_EMULATOR)
    emulator::host->cluster_barrier(emulator::context, 1);
#else
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Stores 4 bytes at offset `target` in block `rank` of the cluster, and counts them at the
// mbarrier at offset `barrier` there. That mbarrier need not expect them yet. A thread that has
// waited for its phase may read them. In a launch without clusters the instruction is illegal,
// even for the block itself.
DEVICE void store_at(SharedAddress target, uint32_t value, SharedAddress barrier, uint32_t rank) {
#if defined(PARITY_EMULATOR)
    emulator::host->store_at(emulator::context, target, value, barrier, rank);
#else
    asm volatile(
        "{\n.reg .b32 there, told;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 told, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [told];\n}" ::"r"(target),
        "r"(value), "r"(barrier), "r"(rank)
        : "memory");
#endif
}
