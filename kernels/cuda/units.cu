// What comes before the kernels whose blocks take units of work as they get free (AsFree of quantised_hopper_large.h): nobody has
// taken any.
//
// One store. Launch: one block.
#include "platform.h"

struct UnitsBeginParams {
    uint32_t* num_taken;
};
PARAMS_LAYOUT(UnitsBeginParams, num_taken)

KERNEL(units_begin, UnitsBeginParams, 32) {
    if (threadIdx.x == 0) *params.num_taken = 0;
}
