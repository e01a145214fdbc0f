// The projection of mhc_mix.cu, which has the formulas, for sm_90a. projection_hopper.h describes
// it.
//
// Floors as there: 111 us for 8192 tokens of 7168 channels at 4.24 TB/s, 63 us of 4096 channels. A
// step, 64 channels of 256 tokens, has 1790 cycles of an SM's share of memory at 1.75 GHz. Of
// these the MMAs take 576 (16 of 64 x 72 x 16). Shared memory takes 860: 32 KiB arrive and are
// read, 9 KiB of weights are stored and read by 4 warpgroups, 128 bytes a cycle. Instructions take
// 900: 176 of each consumer warp, about 130 of each warp that splits, four a cycle. Weights come
// from L2 once for 256 tokens, 0.19 of the streams' bytes.
// Limit: memory. With the coefficients 81 % of a copy for 8192 tokens of 7168 channels on one
// H200. The projection has DRAM at 84 % of a copy's rate; 45 % of a warp's time is the wait for
// weight loads. The coefficients add 7.5 us at 12 % of memory's rate: 39 dependent passes.
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
// What was tried: kernels/docs/mhc_mix.md.
#include "projection_hopper.h"
#include "sinkhorn.h"

SHARED_MEMORY(mhc_mix_project_hopper, ProjectionLayout<COLUMNS>::BYTES)

KERNEL(mhc_mix_project_hopper, HopperProjectionParams, HOPPER_PROJECTION_THREADS) { project_hopper<COLUMNS>(params); }
