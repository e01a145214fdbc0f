// The counter-based generator Philox4x32-10 (Salmon et al., 2011): four words, a function of a
// 128-bit counter and a 64-bit key. So a token's random number does not depend on its batch
// (inference 12.3).
#pragma once

#include "platform.h"

struct PhiloxWords {
    uint32_t w[4];
};

// Both halves of a 64-bit product, without shifts: each shift of one costs an addition of 0.
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

constexpr int PHILOX_ROUNDS = 10;

// The keys of the rounds, by half of the key.
struct alignas(16) PhiloxKeys {
    uint32_t of_rounds[PHILOX_ROUNDS][2];
};

DEVICE uint32_t philox_key(uint64_t key, uint32_t round, uint32_t half) {
    return half ? static_cast<uint32_t>(key >> 32) + round * 0xbb67ae85u : static_cast<uint32_t>(key) + round * 0x9e3779b9u;
}

DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, const PhiloxKeys& keys) {
    UNROLL
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
        uint32_t first, first_high, second, second_high;
        multiply_wide(c0, 0xd2511f53u, first, first_high);
        multiply_wide(c2, 0xcd9e8d57u, second, second_high);
        c0 = second_high ^ c1 ^ keys.of_rounds[round][0];
        c2 = first_high ^ c3 ^ keys.of_rounds[round][1];
        c1 = second;
        c3 = first;
    }
    return PhiloxWords{{c0, c1, c2, c3}};
}
