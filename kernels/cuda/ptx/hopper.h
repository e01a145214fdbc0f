// Hopper's asynchronous machinery (sm_90a): mbarriers, warpgroup matrix products (wgmma), copies that
// complete on an mbarrier, bulk copies and reductions, named barriers, register hand-over between
// warpgroups. Kernels that include this header compile for sm_90a only.
//
// Who may read what, and when:
// - A phase of an mbarrier completes when all its expected arrivals have come and all its expected
//   bytes have landed; mbarrier_wait(parity) returns once the phase of that parity is complete. What
//   the arriving threads wrote before is then visible to ordinary reads.
// - wgmma and bulk copies read and write shared memory through the asynchronous proxy. What ordinary
//   stores or copy_async_16 wrote is seen by it only after fence_async_proxy() by the writer after its
//   write, or by the issuing warp after it learnt of the write.
// - Between its issue and the wgmma_wait that covers it a wgmma may read its operands in shared memory,
//   and its accumulators hold nothing that can be used.
// - A thread waits (bulk_wait_read) for its bulk additions before it returns, and somebody waits for every
//   bulk copy before the block ends.
// - Blocks of a cluster (KERNEL_OF_CLUSTERS) run at the same time. One may arrive at another's mbarriers and copy into its
//   shared memory when that one has initialised its mbarriers, and as long as it has not ended: both begin and end with
//   the cluster's barrier.
// The emulator does all asynchronous work at a random moment that these rules allow, or as late as they do.
// What the asynchronous proxy need not see it reads as NaN, and so do accumulators before their wait; a wgmma
// without a wgmma_fence since its warp's last wait, unless it goes on with accumulators under way, is a fault.
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
