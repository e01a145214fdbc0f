// What comes before the kernels whose blocks take units of work as they get free (AsFree of quantised_hopper_large.h): nobody has
// taken any.
//
// One store. Launch: one block.
#include "platform.h"

struct GroupedLinearUnitsParams {
    uint32_t* num_taken;
};
PARAMS_LAYOUT(GroupedLinearUnitsParams, num_taken)

KERNEL(grouped_linear_units, GroupedLinearUnitsParams, 32) {
    if (threadIdx.x == 0) *params.num_taken = 0;
}
