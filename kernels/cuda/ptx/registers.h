// Registers that warpgroups exchange (setmaxnreg).
#pragma once

#include "memory.h"

constexpr int WARPGROUP_SIZE = 128;

// Divides the registers of the launch among a block's warpgroups. The launch gives each thread the
// most that HELD blocks an SM allow. GIVING warpgroups continue with FEWER and TAKING ones with
// MORE, each by one call in all of its warps. setmaxnreg.inc waits until others have released
// enough, and forever if they never do. The emulator has no registers to count.
template <int GIVING, int FEWER, int TAKING, int MORE, int HELD = 1>
struct DividedRegisters {
    static constexpr int WARPGROUPS = GIVING + TAKING;
    static constexpr int OF_LAUNCH = minimum(65536 / (WARPGROUPS * WARPGROUP_SIZE * HELD) / 8 * 8, 256);
    static_assert(FEWER % 8 == 0 && MORE % 8 == 0 && FEWER >= 24 && MORE <= 256, "multiples of 8 from 24 to 256");
    static_assert(GIVING * FEWER + TAKING * MORE <= WARPGROUPS * OF_LAUNCH, "who takes registers waits without end");

    static void give() {
#if !defined(PARITY_EMULATOR)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEWER));
#endif
    }
    static void take() {
#if !defined(PARITY_EMULATOR)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
#endif
    }
};
