// The projection of mhc_mix.cu, which has the formulas, for sm_90a: projection_hopper.h says how it works.
//
// Floors as there: 8192 tokens of 7168 channels 111 us at 4.24 TB/s, of 4096 channels 63 us. A step, 64 channels of 256
// tokens, takes 1790 cycles of a multiprocessor's share of memory at 1.75 GHz. Of these the products take 576 (16 of 64
// x 72 x 16), shared memory 860 (32 KiB arrive and are read, 9 KiB of weights are stored and read by 4 warpgroups, 128
// bytes a cycle), and instructions 1020 (170 of each consumer warp, some 450 of each that splits, four a cycle). The
// weights come from the second-level cache once for 256 tokens, 0.19 of the streams' bytes.
// Measured on one H200, with the coefficients: 8192 tokens of 7168 channels 160 us, of 4096 channels 96; 32768 tokens of 7168
// 608 us. (DeepGEMM's projection alone takes 128.6 and 77 in that run; the portable kernel 207, 122 and 847.) Of 154 us of the
// projection ncu said: DRAM at 64 % of its rate, consumers waiting for split weights 47 % of their time. With six warps that
// split, two steps ahead, where there were three, 163.5 became 160: what else holds it is not known. The coefficients take 11 us.
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
#include "projection_hopper.h"
#include "sinkhorn.h"

SHARED_MEMORY(mhc_mix_project_hopper, ProjectionLayout<COLUMNS>::BYTES)

KERNEL(mhc_mix_project_hopper, HopperProjectionParams, HOPPER_PROJECTION_THREADS) { project_hopper<COLUMNS>(params); }
