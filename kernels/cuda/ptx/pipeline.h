// Rings of buffers in shared memory between warps that fill them and warps that read them.
#pragma once

#include "mbarrier.h"

// The mbarriers of a ring of STAGES buffers, as a member of a plan. A buffer's `full` completes a
// phase when it has been filled, its `empty` when it is no longer read.
template <int STAGES>
struct PipelineBarriers {
    uint64_t full[STAGES];
    uint64_t empty[STAGES];
};

// A ring whose barriers lie AT bytes from the start of shared memory. Fills are numbered over all
// that a block does; fill n has buffer n % STAGES.
template <int AT, int STAGES>
struct Pipeline {
    static constexpr int full(uint32_t n) { return AT + 8 * (n % STAGES); }
    static constexpr int empty(uint32_t n) { return AT + 8 * STAGES + 8 * (n % STAGES); }
    // Parity of the phase in which fill n is complete. Its buffer was released in the phase
    // before, of the opposite parity.
    static constexpr uint32_t phase(uint32_t n) { return n / STAGES & 1; }

    // By one thread, before fence_mbarrier_init: the arrivals that complete a phase.
    static void initialise(SharedAddress shared, uint32_t fills, uint32_t releases) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + full(stage), fills);
            mbarrier_init(shared + empty(stage), releases);
        }
    }
    // Waits until fill n is complete.
    static void wait_full(SharedAddress shared, uint32_t n) { mbarrier_wait(shared + full(n), phase(n)); }
    // Waits until the buffer of fill n may be written.
    static void wait_empty(SharedAddress shared, uint32_t n) { mbarrier_wait(shared + empty(n), phase(n) ^ 1); }
};
