// The projection of mhc_head.cu, which has the formulas, for sm_90a: projection_hopper.h says how it works, and
// mhc_mix_hopper.cu what it costs. The products are 64 x 24 x 16, a third of those there.
//
// Floor for 32768 tokens of 7168 channels: 443 us at 4.24 TB/s. Measured on one H200, with what
// follows: 1194 us, where the portable kernel takes 1178: no gain, since memory gives as little (mhc_mix_hopper.cu).
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
#include "projection_hopper.h"

SHARED_MEMORY(mhc_head_project_hopper, ProjectionLayout<STREAMS>::BYTES)

KERNEL(mhc_head_project_hopper, HopperProjectionParams, HOPPER_PROJECTION_THREADS) { project_hopper<STREAMS>(params); }
