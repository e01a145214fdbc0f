// The TMA descriptor of a tensor of bytes, [matrices, rows, bytes of a row]. hopper.h copies boxes
// of it: a number of rows of 128 bytes (tensor_copy_in). The launcher has the device make it; no
// other code reads the words.
#pragma once

#include "platform.h"

struct alignas(64) TensorMap {
    uint64_t words[16];
};
