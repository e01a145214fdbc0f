// The counter-based generator Philox4x32-10 (Salmon et al., 2011): four words that are a function of a counter of 128
// bits and a key of 64, so that the random number of a token knows nothing of its batch (inference 12.3).
#pragma once

#include "platform.h"

struct PhiloxWords {
    uint32_t w[4];
};

// Both halves of a product. Shifts of 64-bit products cost an addition of 0 each.
DEVICE void multiply_wide(uint32_t a, uint32_t b, uint32_t& low, uint32_t& high) {
#if defined(PARITY_EMULATOR)
    const uint64_t product = static_cast<uint64_t>(a) * b;
    low = static_cast<uint32_t>(product);
    high = static_cast<uint32_t>(product >> 32);
#else
    asm("{ .reg .b64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product; }"
        : "=r"(low), "=r"(high)
        : "r"(a), "r"(b));
#endif
}

DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
    UNROLL
    for (int round = 0; round < 10; ++round) {
        uint32_t first, first_high, second, second_high;
        multiply_wide(c0, 0xd2511f53u, first, first_high);
        multiply_wide(c2, 0xcd9e8d57u, second, second_high);
        c0 = second_high ^ c1 ^ low_key;
        c2 = first_high ^ c3 ^ high_key;
        c1 = second;
        c3 = first;
        low_key += 0x9e3779b9u;
        high_key += 0xbb67ae85u;
    }
    return PhiloxWords{{c0, c1, c2, c3}};
}
