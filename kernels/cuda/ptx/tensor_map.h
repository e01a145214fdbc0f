// What hardware knows of a tensor of bytes, [matrices, rows, bytes of a row], of which hopper.h copies boxes of so many rows
// of 128 bytes (tensor_copy_in). The launcher has the device make it; nobody else reads the words.
#pragma once

#include "platform.h"

struct alignas(64) TensorMap {
    uint64_t words[16];
};
