// Rows of all ranks, and lists of them, brought together (training 10).
//
//     slots[p]  = the row of gathered keys whose position is p; the lowest of several; -1: none
//     mapped[i] = slots[indices[i]]; -1 where indices[i] is no position
//     target[i] = source[map[i]], or source[i] without a map; 0 where map[i] is no row
//
// Nothing is read on the host, so a step of ranks can be recorded in a graph. Positions are data:
// ranks that name a position twice, or none for a key, get a defined list and no fault. Rows are
// copied bit for bit, in words of 16 bytes. No result depends on the order of blocks; slots take the
// minimum.
//
// Work division: a thread for each row or list entry; a warp for each row that is copied, with
// COPIED words of a lane in flight.
//
// Floor: bytes read and written: lists 8 a slot, copies twice the rows. 131072 keys over 2 ranks:
// 65536 tokens of 512 slots 268 MB, 63 us at 4.24 TB/s; the keys, 1 KiB each, 268 MB as well.
//
// Launch: ceil(items / THREADS) blocks; copies ceil(rows / WARPS).
#include "memory.h"

constexpr int LANES = WARP_SIZE, THREADS = 256, WARPS = THREADS / LANES;
constexpr int COPIED = 2;  // words of a lane in flight
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
    const Vec16* source; int64_t source_row_stride;  // [num_source_rows, width]; strides in words of 16 bytes
    Vec16* target; int64_t target_row_stride;        // [num_rows, width]
    const int32_t* map;                              // [num_rows], or nullptr
    int64_t num_rows;
    int64_t num_source_rows;
    int32_t width;
};

DEVICE int64_t item() { return static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; }
DEVICE int64_t row_of_warp() { return static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / LANES; }
DEVICE int32_t lane() { return static_cast<int32_t>(threadIdx.x % LANES); }

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

KERNEL(gathered_copy, GatheredCopyParams, THREADS) {
    const int64_t row = row_of_warp();
    if (row >= params.num_rows) return;
    const int64_t from = params.map ? params.map[row] : row;
    const bool is_row = from >= 0 && from < params.num_source_rows;
    // No address is formed of a row that does not exist.
    const Vec16* source = params.source + (is_row ? from : 0) * params.source_row_stride;
    Vec16* target = params.target + row * params.target_row_stride;
    for (int32_t first = lane(); first < params.width; first += COPIED * LANES) {
        Vec16 words[COPIED] = {};
        UNROLL
        for (int i = 0; i < COPIED; ++i)
            if (is_row && first + i * LANES < params.width) words[i] = load_vec16(source + first + i * LANES);
        UNROLL
        for (int i = 0; i < COPIED; ++i)
            if (first + i * LANES < params.width) store_vec16(target + first + i * LANES, words[i]);
    }
}
