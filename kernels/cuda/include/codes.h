// Codes of narrow formats as bf16, eight at a time: every e4m3 and e2m1 number is one, and so is an e2m1 number times a
// power of two or an e4m3 scale.
#pragma once

#include "memory.h"
#include "numeric.h"

// Eight codes of e2m1 with one scale, exactly; beyond what bf16 holds they are infinite.
DEVICE Vec16 e2m1_as_bf16(uint32_t codes, float scale) {
    Vec16 numbers;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        const uint32_t pair = codes >> 8 * i;
        numbers.w[i] = pack_bf16(e2m1_to_float(static_cast<uint8_t>(pair & 15)) * scale,
                                 e2m1_to_float(static_cast<uint8_t>(pair >> 4 & 15)) * scale);
    }
    return numbers;
}

// Eight codes of e4m3, exactly.
DEVICE Vec16 e4m3_as_bf16(uint32_t first, uint32_t second) {
    Vec16 numbers;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        float low, high;
        e4m3x2_to_float((i < 2 ? first : second) >> 16 * (i % 2) & 0xffffu, low, high);
        numbers.w[i] = pack_bf16(low, high);
    }
    return numbers;
}
