// Codes of narrow formats as floats or bf16, eight at a time; codes of e2m1 as codes of e4m3. bf16
// holds every e4m3 and e2m1 value, and an e2m1 value times a power of two or an e4m3 scale.
#pragma once

#include "memory.h"
#include "numeric.h"

// The values of eight e2m1 codes, the first in the lowest nibble. The two bytes of a magnitude's
// bf16 are looked up for four codes at a time.
DEVICE void e2m1x8_to_float(uint32_t codes, float (&numbers)[8]) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const uint32_t four = codes >> 16 * half, magnitudes = four & 0x7777u;
        // The bytes for 0, 0.5, 1, 1.5; 2, 3, 4, 6.
        const uint32_t high = __byte_perm(0x3f3f3f00u, 0x40404040u, magnitudes);
        const uint32_t low = __byte_perm(0xc0800000u, 0xc0804000u, magnitudes);
        UNROLL
        for (int pair = 0; pair < 2; ++pair) {
            const uint32_t signs = (four >> 8 * pair & 0x88u) * 0x01001000u & 0x80008000u;
            const uint32_t two = __byte_perm(low, high, pair ? 0x7362 : 0x5140) | signs;
            numbers[4 * half + 2 * pair] = unpack_bf16_low(two);
            numbers[4 * half + 2 * pair + 1] = unpack_bf16_high(two);
        }
    }
}

// Eight e2m1 codes times one scale, exactly; beyond bf16's range they are infinite.
DEVICE Vec16 e2m1_as_bf16(uint32_t codes, float scale) {
    float x[8];
    e2m1x8_to_float(codes, x);
    Vec16 numbers;
    UNROLL
    for (int i = 0; i < 4; ++i) numbers.w[i] = pack_bf16(x[2 * i] * scale, x[2 * i + 1] * scale);
    return numbers;
}

// Eight e4m3 codes, exactly.
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

// Eight e2m1 codes as e4m3 codes, 2^-6 as large, exactly. The sign is the highest bit of either.
// The two exponent bits become the lower ones of e4m3's exponent, the fraction bit the highest of
// its fraction. This holds for 0 and 0.5 too, since neither format has an implicit bit where the
// exponent is 0.
// `even`: the codes in the lower halves of the bytes, in the bytes' order; `odd`: those in the
// upper.
DEVICE void e2m1x8_as_e4m3(uint32_t codes, uint32_t& even, uint32_t& odd) {
    even = (codes << 2 & 0x1c1c1c1cu) | (codes << 4 & 0x80808080u);
    odd = (codes >> 2 & 0x1c1c1c1cu) | (codes & 0x80808080u);
}
