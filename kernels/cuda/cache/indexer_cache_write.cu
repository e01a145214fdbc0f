// Transforms and quantizes the indexer's keys, and scatters them to slots of a paged store
// (inference 5.4, 7, 7.1, 13.2).
//
//     row = pages[slots[t]]       untouched where the slot is negative or not below num_slots
//     y   = bf16(128^-0.5 sum over j of (-1)^popcount(i AND j) k[t, j])     in hadamard.cu's order
//     codes and scales of y as in hadamard.cu: STORED 1 as e2m1 in four groups, 2 as e4m3 in one
//
// A page of B rows keeps the codes of all its rows, then four bytes of scales for each: e8m0, or
// one f32 value.
//
//     page + i * CODE_BYTES         codes of row i: 64 bytes, even channels in low nibbles, or 128
//     page + B * CODE_BYTES + i * 4 its scales
//
// Slots must be distinct: which of two keys wins is undefined. Four lanes take a key, as in
// hadamard.cu. A key is read whether or not its slot exists, so that its load does not wait for
// the slot.
//
// Floor: 256 bytes read, 68 or 132 written and 4 of the slot for a key. 32768 keys (131072 tokens)
// are 10.7 or 12.8 MB, 2.5 or 3.0 us at 4.24 TB/s. Measured on one H200: 5.5 us each. What limits
// it: latency of a load, the transform and a store in sequence at the sizes of a step; issue slots
// beyond (hadamard.cu).
//
// Defines: ELEMENT bf16; STORED 1 or 2. Launch: ceil(num_tokens / TOKENS_PER_BLOCK) blocks.
// Measurements: kernels/docs/indexer_cache_write.md.
#include "element.h"
#include "hadamard.h"

#ifndef STORED
#error "define STORED as 1 (e2m1) or 2 (e4m3)"
#endif

constexpr int THREADS = 128;
constexpr int TOKENS_PER_BLOCK = THREADS / LANES;
constexpr int CODE_BYTES = STORED == 1 ? DIM / 2 : DIM;
constexpr int SCALE_BYTES = 4;

struct IndexerCacheWriteParams {
    const bf16* k;         // [num_tokens, 128], 16-byte aligned rows
    int64_t k_stride;      // elements
    const int32_t* slots;  // [num_tokens]
    uint8_t* pages;        // [num_pages, page bytes], 16-byte aligned pages
    int64_t pages_stride;  // bytes
    int32_t num_tokens;
    int32_t num_slots;
    int32_t page_size;
};

KERNEL(indexer_cache_write, IndexerCacheWriteParams, THREADS) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    // An absent key is one of zeros: its lanes take part in the shuffles of their warp.
    const bool exists = token < params.num_tokens;
    Row x = {};
    if (exists) load_row<true>(params.k + token * params.k_stride, lane, x);
    const int32_t slot = exists ? params.slots[token] : -1;
    transform(x, lane);
    const Rounded rounded = round_to_bf16(x);
    const bool wanted = slot >= 0 && slot < params.num_slots;
    const int32_t target = wanted ? slot : 0;
    const int32_t row = target % params.page_size;
    uint8_t* const page = params.pages + target / params.page_size * params.pages_stride;
    uint8_t* const codes = page + static_cast<int64_t>(row) * CODE_BYTES;
    uint8_t* const scales =
        page + static_cast<int64_t>(params.page_size) * CODE_BYTES + static_cast<int64_t>(row) * SCALE_BYTES;
    if constexpr (STORED == 1) {
        store_e2m1<true>(codes, scales, lane, wanted, rounded);
    } else {
        const uint8_t scale = store_e4m3<true>(codes, lane, wanted, x, rounded);
        if (wanted && lane == 0) *reinterpret_cast<float*>(scales) = e8m0_to_float(scale);
    }
}
