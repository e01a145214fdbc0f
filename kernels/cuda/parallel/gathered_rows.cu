// What the launchers of ranks do with rows of all ranks and with lists of them (training 10).
//
//     slots[p]      = the row of gathered keys whose position is p; the lowest of several; -1: none
//     mapped[i]     = slots[indices[i]]; -1 where indices[i] is no position
//     target[i]     = source[map[i]], or source[i] without a map; 0 where map[i] is no row
//     offsets[t], lengths[t] = the first of the keys ks up to ke of token t, and how many they are
//     window[t][j]  = the row of key t + j + 1 - W of a token's window of W keys, counted in rows of
//                     halo and own keys; -1 before the start of the token's sequence
//     target[i]     = a number of the launch
//
// Nothing is read on the host, so a step of ranks can be recorded in a graph. Positions are data:
// ranks that name a position twice, or none for a key, get a defined list and no fault. Rows are
// copied bit for bit, in words of 4 or 16 bytes. No result depends on the order of blocks; slots
// take the minimum.
//
// Work division: a thread for each row, list entry, token or number; a warp for each row that is
// copied, with COPIED words of a lane in flight, and for each token's window.
//
// Floor: bytes read and written: lists 8 a slot, copies twice the rows. 131072 keys over 2 ranks:
// 65536 tokens of 512 slots 268 MB, 63 us at 4.24 TB/s; the keys, 1 KiB each, 268 MB as well.
//
// Launch: ceil(items / THREADS) blocks; copies and windows ceil(rows / WARPS).
#include "memory.h"
#include "numeric.h"

constexpr int LANES = WARP_SIZE, THREADS = 256, WARPS = THREADS / LANES;
constexpr int COPIED = 4;    // words of a lane in flight
constexpr int NUMBERS = 256;  // of a launch
constexpr int32_t NONE = -1;

struct GatheredSlotsParams {
    const int32_t* positions;  // [num_rows]
    int32_t* slots;            // [num_keys], -1 before the launch
    int64_t num_rows;
    int32_t num_keys;
};

struct GatheredListsParams {
    const int32_t* indices;  // [num_slots]
    const int32_t* slots;    // [num_keys]
    int32_t* mapped;         // [num_slots]
    int64_t num_slots;
    int32_t num_keys;
};

struct GatheredCopyParams {
    const uint32_t* source; int64_t source_row_stride;  // [num_source_rows, width]; strides in words of 4 bytes
    uint32_t* target; int64_t target_row_stride;        // [num_rows, width]
    const int32_t* map;                                 // [num_rows], or nullptr
    int64_t num_rows;
    int64_t num_source_rows;
    int32_t width;                                      // in words of the kernel
};

struct GatheredRangesParams {
    const int32_t* ks;  // [num_tokens]
    const int32_t* ke;
    int32_t* offsets;
    int32_t* lengths;
    int64_t num_tokens;
    int32_t num_keys;
};

struct GatheredWindowParams {
    const int32_t* starts;  // [num_sequences]: the row of each sequence's first key, ascending
    int32_t* indices;       // [num_tokens, window]
    int64_t num_tokens;
    int32_t num_sequences;
    int32_t halo;
    int32_t window;
};

struct GatheredNumbersParams {
    int32_t* target;
    int32_t count;
    int32_t numbers[NUMBERS];
};

DEVICE int64_t item() { return static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; }
DEVICE int64_t row_of_warp() { return static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / LANES; }
DEVICE int32_t lane() { return static_cast<int32_t>(threadIdx.x % LANES); }
DEVICE int32_t within(int32_t x, int32_t low, int32_t high) { return x < low ? low : x < high ? x : high; }

KERNEL(gathered_slots, GatheredSlotsParams, THREADS) {
    const int64_t row = item();
    if (row >= params.num_rows) return;
    const int32_t position = params.positions[row];
    if (position < 0 || position >= params.num_keys) return;
    // As an unsigned number -1 is above every row.
    atomicMin(reinterpret_cast<uint32_t*>(params.slots + position), static_cast<uint32_t>(row));
}

KERNEL(gathered_lists, GatheredListsParams, THREADS) {
    const int64_t slot = item();
    if (slot >= params.num_slots) return;
    const int32_t position = params.indices[slot];
    params.mapped[slot] = position >= 0 && position < params.num_keys ? params.slots[position] : NONE;
}

DEVICE uint32_t load_word(const uint32_t* source) { return *source; }
DEVICE Vec16 load_word(const Vec16* source) { return load_vec16(source); }
DEVICE void store_word(uint32_t* target, uint32_t word) { *target = word; }
DEVICE void store_word(Vec16* target, Vec16 word) { store_vec16(target, word); }

template <typename Word>
DEVICE void copy_row(const GatheredCopyParams& params) {
    const int64_t row = row_of_warp();
    if (row >= params.num_rows) return;
    const int64_t from = params.map ? params.map[row] : row;
    const bool is_row = from >= 0 && from < params.num_source_rows;
    // No address is formed of a row that does not exist.
    const uint32_t* source_row = params.source + (is_row ? from : 0) * params.source_row_stride;
    const Word* source = reinterpret_cast<const Word*>(source_row);
    Word* target = reinterpret_cast<Word*>(params.target + row * params.target_row_stride);
    for (int32_t first = lane(); first < params.width; first += COPIED * LANES) {
        Word words[COPIED] = {};
        UNROLL
        for (int i = 0; i < COPIED; ++i)
            if (is_row && first + i * LANES < params.width) words[i] = load_word(source + first + i * LANES);
        UNROLL
        for (int i = 0; i < COPIED; ++i)
            if (first + i * LANES < params.width) store_word(target + first + i * LANES, words[i]);
    }
}

KERNEL(gathered_copy_vector, GatheredCopyParams, THREADS) { copy_row<Vec16>(params); }
KERNEL(gathered_copy_scalar, GatheredCopyParams, THREADS) { copy_row<uint32_t>(params); }

KERNEL(gathered_ranges, GatheredRangesParams, THREADS) {
    const int64_t token = item();
    if (token >= params.num_tokens) return;
    const int32_t first = within(params.ks[token], 0, params.num_keys);
    params.offsets[token] = first;
    params.lengths[token] = within(params.ke[token], first, params.num_keys) - first;
}

KERNEL(gathered_window, GatheredWindowParams, THREADS) {
    const int64_t token = row_of_warp();
    if (token >= params.num_tokens) return;
    const int32_t row = params.halo + static_cast<int32_t>(token);
    // The last sequence that starts at the row or before.
    int32_t low = 0, high = params.num_sequences;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (params.starts[middle] <= row) low = middle;
        else high = middle;
    }
    const int32_t start = params.starts[low];
    for (int32_t slot = lane(); slot < params.window; slot += LANES) {
        const int32_t key = row + slot + 1 - params.window;
        params.indices[token * params.window + slot] = key >= start ? key : NONE;
    }
}

KERNEL(gathered_numbers, GatheredNumbersParams, THREADS) {
    const int32_t at = static_cast<int32_t>(item());
    if (at < params.count) params.target[at] = params.numbers[at];
}
