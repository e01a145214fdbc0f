// Rows of the paged KV cache (inference 8.3).
//
// A row of NOPE + ROPE channels holds the first NOPE as e4m3, one byte each, and the others as
// bf16. A page of B rows keeps the data of its rows together, and the scales after them. A scale
// is one e8m0 byte for 64 e4m3 channels. A row has eight scale bytes; those after the last group
// are 0:
//
//     page + i * (NOPE + 2 * ROPE)          data of row i: e4m3 [NOPE], bf16 [ROPE]
//     page + B * (NOPE + 2 * ROPE) + i * 8  scales of row i: e8m0 [NOPE / 64], then 0
//
// NOPE = 448, ROPE = 64 is the model's row of 584 bytes. NOPE = 0 is a row of bf16 without scales.
#pragma once

#include "numeric.h"

constexpr int SCALE_GROUP = 64;      // e4m3 channels that share a scale
constexpr int ROW_SCALE_BYTES = 8;   // of a row that has e4m3 channels
constexpr int LARGEST_NOPE_DIM = SCALE_GROUP * ROW_SCALE_BYTES;

template <int NOPE, int ROPE>
struct CacheRow {
    static_assert(NOPE % SCALE_GROUP == 0 && NOPE >= 0 && NOPE <= LARGEST_NOPE_DIM, "whole groups, 8 at most");
    static_assert(ROPE % 8 == 0 && ROPE > 0, "bf16 channels fill 16-byte accesses");
    static constexpr int HEAD_DIM = NOPE + ROPE;
    static constexpr int GROUPS = NOPE / SCALE_GROUP;
    static constexpr int DATA_BYTES = NOPE + 2 * ROPE;
    static constexpr int SCALE_BYTES = NOPE > 0 ? ROW_SCALE_BYTES : 0;
};

// Addresses of the rows of a store, for reading or for writing. A slot is page * page_size + row
// in the page.
template <typename Byte>
struct PagedRows {
    Byte* pages;
    int64_t page_stride;  // bytes
    int32_t page_size;    // rows
    int32_t num_slots;

    bool holds(int32_t slot) const { return slot >= 0 && slot < num_slots; }

    Byte* page(int32_t slot) const { return pages + slot / page_size * page_stride; }
    // First byte of a row's data. The store must hold the slot.
    template <typename Row>
    Byte* data(int32_t slot) const {
        return page(slot) + static_cast<int64_t>(slot % page_size) * Row::DATA_BYTES;
    }
    // First byte of a row's scales.
    template <typename Row>
    Byte* scales(int32_t slot) const {
        const int64_t behind_data = static_cast<int64_t>(page_size) * Row::DATA_BYTES;
        return page(slot) + behind_data + static_cast<int64_t>(slot % page_size) * Row::SCALE_BYTES;
    }
};
