// Resets the counter of taken work tiles, before kernels whose blocks take them as they become
// free (AsFree of quantized_hopper_large.h).
//
// One store. Launch: one block.
#include "platform.h"

struct GroupedLinearUnitsParams {
    uint32_t* num_taken;
};

KERNEL(grouped_linear_units, GroupedLinearUnitsParams, 32) {
    if (threadIdx.x == 0) *params.num_taken = 0;
}
