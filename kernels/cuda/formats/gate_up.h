// Rows of gate and up, interleaved (inference 5.8); gate_up_interleave.cu has the formula.
#pragma once

#include "platform.h"

constexpr int GRANULE = 8;  // neighbouring rows of gate, or of up
