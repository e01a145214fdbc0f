// Panels: the layout of wgmma operands in shared memory. A panel is 64 rows of 64 columns of bf16,
// a row 128 bytes, in the 128-byte swizzle that wgmma.h describes. A wider operand is a row of
// panels. Panels start at multiples of 1024 bytes.
#pragma once

#include "platform.h"

constexpr int PANEL_BYTES = 64 * 128;

// Byte offset within a panel of 16 bytes: 8 columns of one row.
DEVICE constexpr int panel_offset(int row, int chunk) { return row * 128 + 16 * (chunk ^ (row & 7)); }
