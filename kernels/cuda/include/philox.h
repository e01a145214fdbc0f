// The counter-based generator Philox4x32-10 (Salmon et al., 2011): four words that are a function of a counter of 128
// bits and a key of 64, so that the random number of a token knows nothing of its batch (inference 12.3).
#pragma once

#include "platform.h"

struct PhiloxWords {
    uint32_t w[4];
};

DEVICE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
    UNROLL
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = static_cast<uint64_t>(c0) * 0xd2511f53u;
        const uint64_t second = static_cast<uint64_t>(c2) * 0xcd9e8d57u;
        c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ low_key;
        c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ high_key;
        c1 = static_cast<uint32_t>(second);
        c3 = static_cast<uint32_t>(first);
        low_key += 0x9e3779b9u;
        high_key += 0xbb67ae85u;
    }
    return PhiloxWords{{c0, c1, c2, c3}};
}
