// The projection of mhc_mix.cu, which has the formulas, for sm_90a: projection_hopper.h says how it works.
//
// Floors as there: 8192 tokens of 7168 channels 111 us at 4.24 TB/s, of 4096 channels 63 us. A step, 64 channels of 256
// tokens, takes 1790 cycles of a multiprocessor's share of memory at 1.75 GHz. Of these the products take 576 (16 of 64
// x 72 x 16), shared memory 860 (32 KiB arrive and are read, 9 KiB of weights are stored and read by 4 warpgroups, 128
// bytes a cycle), and instructions 900 (176 of each consumer warp, some 130 of each that splits, four a cycle). The
// weights come from the second-level cache once for 256 tokens, 0.19 of the streams' bytes.
// Measured on one H200, with the coefficients: 8192 tokens of 7168 channels 137.3 us, of 4096 channels 82.4 (81 and 77 % of the
// copy rate; 140.0 and 85.3 in another call, in which 32768 tokens took 558 and 323 us; the portable kernel 207, 122 and 847 of
// 7168). projection_hopper.h says what brought it there. ncu of the kernel before these changes: 147.7 us of 158, DRAM at 67 % of
// its rate and the second-level cache at 79; a block took 112 steps in 230 thousand cycles on average and 244 at most, and launch
// and end 11 thousand: some 10 % are the wait for the slowest multiprocessor and the four of 132 that have no block.
//
// ncu now (reports/h200/ncu.txt), 8192 tokens of 7168 channels: 131.7 us, DRAM at 75 % of its rate, 84 % of a copy's, 45 % of a
// warp's time waiting for loads, those of the weights; the coefficients are 7.5 us more, at 12 % of memory's rate: 39 passes one
// behind the other.
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
#include "projection_hopper.h"
#include "sinkhorn.h"

SHARED_MEMORY(mhc_mix_project_hopper, ProjectionLayout<COLUMNS>::BYTES)

KERNEL(mhc_mix_project_hopper, HopperProjectionParams, HOPPER_PROJECTION_THREADS) { project_hopper<COLUMNS>(params); }
