// The projection of mhc_head.cu, which has the formulas, for sm_90a: projection_hopper.h says how it works, and
// mhc_mix_hopper.cu what it costs. The products are 64 x 24 x 16, a third of those there.
//
// Floor for 32768 tokens of 7168 channels: 443 us at 4.24 TB/s. Expected to be limited by memory. Predicted, not measured:
// 490 us, some 70 less than the portable kernel, of the operator's 1178.
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
#include "projection_hopper.h"

SHARED_MEMORY(mhc_head_project_hopper, ProjectionLayout<STREAMS>::BYTES)

KERNEL(mhc_head_project_hopper, HopperProjectionParams, HOPPER_PROJECTION_THREADS) { project_hopper<STREAMS>(params); }
