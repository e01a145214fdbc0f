// Hopper's asynchronous machinery (sm_90a): mbarriers, wgmma, copies that complete on an mbarrier,
// bulk copies and reductions, named barriers, setmaxnreg. Kernels that include this header compile
// for sm_90a only.
//
// Who may read what, and when:
// - A phase of an mbarrier completes when all its expected arrivals have come and all its expected
//   bytes have landed. mbarrier_wait(parity) returns after the phase of that parity is complete.
//   Earlier writes of the arriving threads are then visible to ordinary reads.
// - wgmma and bulk copies access shared memory through the asynchronous proxy. It sees ordinary
//   stores or copy_async_16 only after fence_async_proxy(), by the writer after its write, or by
//   the issuing warp after it has synchronized with the writer.
// - Between its issue and its wgmma_wait, a wgmma may read its operands in shared memory, and its
//   accumulators are undefined.
// - A thread waits (bulk_wait_read) for its bulk additions before it returns. Some thread waits
//   for every bulk copy before the block ends.
// - Blocks of a cluster (KERNEL_OF_CLUSTERS) run at the same time. A block may arrive at another's
//   mbarriers and copy into its shared memory after that block has initialised its mbarriers and
//   before it ends. So both start and end with the cluster's barrier.
// The emulator does all asynchronous work at a random moment that these rules allow, or as late as
// they allow. Data that the asynchronous proxy need not see reads as NaN, and so do accumulators
// before their wait. A wgmma without a wgmma_fence since its warp's last wait is a fault, unless
// it continues accumulators in flight.
#pragma once

#if !defined(PARITY_EMULATOR) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "hopper.h needs sm_90a"
#endif

#include "barriers.h"
#include "cluster.h"
#include "mbarrier.h"
#include "registers.h"
#include "tma.h"
#include "wgmma.h"
