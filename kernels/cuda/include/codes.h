// Codes of narrow formats as bf16, eight at a time: every e4m3 and e2m1 number is one, and so is an e2m1 number times a
// power of two or an e4m3 scale. And codes of e2m1 as codes of e4m3.
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

// Least and largest powers of two of which the product with every e2m1 number is one of e4m3: 0.5 is 2^-9, the smallest,
// and 6 is 384.
constexpr int LEAST_FOLD = -8, LARGEST_FOLD = 6;

// The codes of e4m3 of the magnitudes 0, 0.5, 1, 1.5 (first) and 2, 3, 4, 6 (second) times 2^exponent.
struct FoldedCodes {
    uint32_t first, second;
};

DEVICE FoldedCodes folded_codes(int exponent) {
    // From 2^-5 on all of them are normal, and a step of the exponent is 8.
    const uint32_t steps = static_cast<uint32_t>(exponent + 5);
    if (exponent >= -5) return FoldedCodes{0x14100800u + steps * 0x08080800u, 0x24201c18u + steps * 0x08080808u};
    if (exponent == -6) return FoldedCodes{0x0c080400u, 0x1c181410u};
    if (exponent == -7) return FoldedCodes{0x06040200u, 0x14100c08u};
    return FoldedCodes{0x03020100u, 0x0c080604u};
}

// Four codes of e2m1, the low half of `codes`, in a byte each.
DEVICE uint32_t e2m1_as_e4m3(uint32_t codes, const FoldedCodes& folded) {
    const uint32_t magnitudes = __byte_perm(folded.first, folded.second, codes & 0x7777u);
    return magnitudes | __byte_perm(0x8000u, 0u, codes >> 3 & 0x1111u);
}
