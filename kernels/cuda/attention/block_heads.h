// A block of the portable attention kernels: a token and up to HEADS_PER_BLOCK of its heads, the M
// side of its GEMMs. How warps divide the scores and the output, and the heads' rows on their way
// in and out.
//
// The including file is compiled with HEADS_PER_BLOCK defined, 16 or 64. Its tiles of bf16 in
// shared memory have CHUNKS columns of 16 bytes and say where one lies: offset(row, chunk).
#pragma once

#include "async_copy.h"
#include "memory.h"
#include "numeric.h"
#include "platform.h"

static_assert(HEADS_PER_BLOCK == 16 || HEADS_PER_BLOCK == 64, "a block holds 16 or 64 heads");

constexpr int M_TILES = HEADS_PER_BLOCK / 16;
constexpr int WARPS = HEADS_PER_BLOCK == 64 ? 8 : 4;
constexpr int THREADS = WARPS * WARP_SIZE;
// For the scores, warps form a grid: one row for each 16 heads, KEY_WARPS columns over the slots.
constexpr int KEY_WARPS = WARPS / M_TILES;

// A warp's part of the scores, and this lane's rows in it.
struct ScorePlace {
    int head_warp, key_warp;
    int row;        // the lane's first head row within the block; the other is row + 8
    int first_key;  // the warp's first slot within the tile
};
template <int N8>
DEVICE ScorePlace score_place() {
    const int head_warp = warp_id() / KEY_WARPS, key_warp = warp_id() % KEY_WARPS;
    return ScorePlace{head_warp, key_warp, 16 * head_warp + lane_id() / 4, key_warp * N8 * 8};
}

// Copies this block's heads of one token, rows of the tile. Absent heads become zeros.
template <typename T>
DEVICE void load_heads(SharedAddress tile, const bf16* source, int64_t head_stride, int heads) {
    for (int i = threadIdx.x; i < HEADS_PER_BLOCK * T::CHUNKS; i += THREADS) {
        const int head = i / T::CHUNKS, chunk = i % T::CHUNKS;
        const bool wanted = head < heads;
        copy_async_16(tile + T::offset(head, chunk), source + (wanted ? head * head_stride : 0) + chunk * 8, wanted);
    }
}

// Rounds a block's accumulators, split over the warps by columns, to a tile of bf16. Row r is
// multiplied by factor(r).
template <typename T, int N8, typename Factor>
DEVICE void stage_heads(SharedAddress tile, const float (&c)[M_TILES][N8][4], Factor factor) {
    const int g = lane_id() / 4, t = lane_id() % 4, first_tile = warp_id() * N8;
    UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        const int row = 16 * m + g;
        const float low = factor(row), high = factor(row + 8);
        UNROLL
        for (int n = 0; n < N8; ++n) {
            if (WARPS * N8 != T::CHUNKS && first_tile + n >= T::CHUNKS) break;
            const int chunk = first_tile + n;
            store_shared(tile + T::offset(row, chunk) + 4 * t, pack_bf16(c[m][n][0] * low, c[m][n][1] * low));
            store_shared(tile + T::offset(row + 8, chunk) + 4 * t, pack_bf16(c[m][n][2] * high, c[m][n][3] * high));
        }
    }
}

// Stores a staged tile to this block's heads of one token, 16 bytes a thread.
template <typename T>
DEVICE void store_heads(bf16* target, int64_t head_stride, SharedAddress tile, int heads) {
    for (int i = threadIdx.x; i < heads * T::CHUNKS; i += THREADS) {
        const int head = i / T::CHUNKS, chunk = i % T::CHUNKS;
        store_vec16_streaming(target + head * head_stride + chunk * 8,
                              load_shared_vec16(tile + T::offset(head, chunk)));
    }
}
