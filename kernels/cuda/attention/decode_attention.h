// What both implementations of decode_attention share: parameters, the split of tiles over blocks,
// the addresses of cache rows, and the workspace of the merge. decode_attention.cu has the
// formulas and the division of work.
//
// The including file is compiled with NOPE_DIM, ROPE_DIM and HEADS_PER_BLOCK defined.
#pragma once

#include "kv_cache.h"
#include "memory.h"
#include "numeric.h"
#include "platform.h"

using Row = CacheRow<NOPE_DIM, ROPE_DIM>;
constexpr int HEAD_DIM = Row::HEAD_DIM;
constexpr int KEYS = 64;  // slots of a tile

// ---------------------------------------------------------------- parameters

// Strides are in elements, those of pages in bytes. q and out: base and strides are multiples of
// 16 bytes. The number of tokens is batch * s_q. lse is [tokens, num_heads]. sink and the lengths
// may be null; lengths are [batch]. An absent store has topk and num_slots 0. For G blocks the
// workspace is partial_out [2 G, HEADS_PER_BLOCK, HEAD_DIM], partial_lse [2 G, HEADS_PER_BLOCK],
// spans int32 [G, 2].
struct DecodeAttentionParams {
    const bf16* q;
    int64_t q_token_stride;
    int64_t q_head_stride;
    const uint8_t* window_pages;
    int64_t window_pages_stride;
    const int32_t* window_indices;
    int64_t window_indices_stride;
    const int32_t* window_length;
    const uint8_t* compressed_pages;
    int64_t compressed_pages_stride;
    const int32_t* compressed_indices;
    int64_t compressed_indices_stride;
    const int32_t* compressed_length;
    const float* sink;
    bf16* out;
    int64_t out_token_stride;
    int64_t out_head_stride;
    float* lse;
    float* partial_out;
    float* partial_lse;
    int32_t* spans;
    int32_t batch;
    int32_t s_q;
    int32_t num_heads;
    int32_t window_page_size;
    int32_t window_num_slots;
    int32_t window_topk;
    int32_t compressed_page_size;
    int32_t compressed_num_slots;
    int32_t compressed_topk;
    float softmax_scale;
};

DEVICE int32_t head_blocks(const DecodeAttentionParams& params) { return ceil_div(params.num_heads, HEADS_PER_BLOCK); }

// ---------------------------------------------------------------- the split of tiles over blocks

DEVICE int32_t list_length(const int32_t* lengths, int32_t topk, int32_t request) {
    return lengths ? maximum(minimum(lengths[request], topk), 0) : topk;
}

// Tiles of both lists of a request's tokens. A token without slots has one tile, so that its
// output is stored.
DEVICE int32_t window_tiles(const DecodeAttentionParams& params, int32_t request) {
    return ceil_div(list_length(params.window_length, params.window_topk, request), KEYS);
}
DEVICE int32_t unit_tiles(const DecodeAttentionParams& params, int32_t request) {
    const int32_t compressed = list_length(params.compressed_length, params.compressed_topk, request);
    return maximum(window_tiles(params, request) + ceil_div(compressed, KEYS), 1);
}

// A block's stretch: `count` tiles, starting at tile `first` of request `request`.
struct Stretch {
    int32_t request, first, count;
    int32_t per_block;  // tiles of every block but the last ones
};

DEVICE int32_t warp_sum(int32_t x) {
    UNROLL
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}
// The sum of x over the lanes up to and including this one.
DEVICE int32_t warp_running_sum(int32_t x) {
    UNROLL
    for (int distance = 1; distance < static_cast<int>(WARP_SIZE); distance *= 2) {
        const int32_t below = __shfl_up_sync(FULL_WARP, x, distance);
        if (lane_id() >= distance) x += below;
    }
    return x;
}

// Equal stretches for units of one length. A block gets whole units where these are at most a
// sixteenth longer: the extra work is less than fp32 parts and their merge.
DEVICE int32_t stretch_length(int32_t total, int32_t tiles) {
    const int32_t per_block = ceil_div(total, static_cast<int32_t>(gridDim.x));
    const int32_t whole_units = ceil_div(per_block, tiles) * tiles;
    return whole_units - per_block <= per_block / 16 ? whole_units : per_block;
}

DEVICE Stretch stretch_of(int32_t total, int32_t request, int32_t before, int32_t per_block) {
    const int32_t begin = static_cast<int32_t>(blockIdx.x) * per_block;
    return Stretch{request, begin - before, minimum(total - begin, per_block), per_block};
}

// Every warp finds the stretch independently, without shared memory: one lane a request.
DEVICE Stretch find_stretch(const DecodeAttentionParams& params) {
    const int32_t units = params.s_q * head_blocks(params);
    const int32_t blocks = static_cast<int32_t>(gridDim.x);
    if (params.window_length == nullptr && params.compressed_length == nullptr) {
        const int32_t tiles = units * unit_tiles(params, 0), total = params.batch * tiles;
        const int32_t per_block = stretch_length(total, unit_tiles(params, 0));
        const int32_t request = static_cast<int32_t>(blockIdx.x) * per_block / tiles;
        return stretch_of(total, request, request * tiles, per_block);
    }
    const auto tiles_of = [&](int32_t request) {
        return request < params.batch ? units * unit_tiles(params, request) : 0;
    };
    int32_t total = 0;
    for (int32_t request = lane_id(); request < params.batch; request += WARP_SIZE) total += tiles_of(request);
    total = warp_sum(total);
    const int32_t per_block = ceil_div(total, blocks);
    const int32_t begin = static_cast<int32_t>(blockIdx.x) * per_block;
    int32_t before = 0;
    for (int32_t base = 0; base < params.batch; base += WARP_SIZE) {
        const int32_t own = tiles_of(base + lane_id()), upto = before + warp_running_sum(own);
        const uint32_t beyond = __ballot_sync(FULL_WARP, upto > begin);
        if (beyond) {
            const int lane = __ffs(beyond) - 1;
            return stretch_of(total, base + lane, __shfl_sync(FULL_WARP, upto - own, lane), per_block);
        }
        before = __shfl_sync(FULL_WARP, upto, WARP_SIZE - 1);
    }
    return Stretch{params.batch, 0, 0, per_block};
}

// ---------------------------------------------------------------- one unit's lists

// Tiles [first, last) of a unit. What is the same for all units stays in the parameters.
struct Segment {
    int64_t token;
    int32_t first_head;
    int32_t heads;  // real heads in this block, at most HEADS_PER_BLOCK
    int32_t first, last;
    int32_t window_tiles;  // tiles before this one are of the window
    int32_t window_length, compressed_length;
};

DEVICE Segment unit_segment(const DecodeAttentionParams& params, int32_t request, int32_t unit) {
    const int32_t blocks = head_blocks(params);
    const int32_t first_head = unit % blocks * HEADS_PER_BLOCK;
    return Segment{static_cast<int64_t>(request) * params.s_q + unit / blocks,
                   first_head,
                   minimum(params.num_heads - first_head, HEADS_PER_BLOCK),
                   0,
                   0,
                   window_tiles(params, request),
                   list_length(params.window_length, params.window_topk, request),
                   list_length(params.compressed_length, params.compressed_topk, request)};
}

// The stored index of a slot of a tile; -1 past the list's end and past the segment's end.
DEVICE int32_t stored_index(const DecodeAttentionParams& params, const Segment& segment, int32_t tile,
                            int32_t slot_in_tile) {
    const bool window = tile < segment.window_tiles;
    const int32_t slot = (window ? tile : tile - segment.window_tiles) * KEYS + slot_in_tile;
    if (tile >= segment.last || slot >= (window ? segment.window_length : segment.compressed_length)) return -1;
    const int32_t* indices = window ? params.window_indices : params.compressed_indices;
    return indices[segment.token * (window ? params.window_indices_stride : params.compressed_indices_stride) + slot];
}

// The cache row that a lane looks up for its warp. Null where the slot is invalid, or the lane
// looks up none.
struct LaneRow {
    const uint8_t* data;
    const uint8_t* scales;
};

DEVICE LaneRow find_row(const DecodeAttentionParams& params, const Segment& segment, int32_t tile, int32_t index,
                        bool looks_up) {
    const bool window = tile < segment.window_tiles;
    const PagedRows<const uint8_t> rows{window ? params.window_pages : params.compressed_pages,
                                        window ? params.window_pages_stride : params.compressed_pages_stride,
                                        window ? params.window_page_size : params.compressed_page_size,
                                        window ? params.window_num_slots : params.compressed_num_slots};
    if (!looks_up || !rows.holds(index)) return LaneRow{nullptr, nullptr};
    return LaneRow{rows.data<Row>(index), rows.scales<Row>(index)};
}

// The address that lane `source` holds.
DEVICE const uint8_t* address_of_lane(const uint8_t* own, int source) {
    return reinterpret_cast<const uint8_t*>(
        __shfl_sync(FULL_WARP, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(own)), source));
}

// ---------------------------------------------------------------- a block's segments

// A part's slot in the workspace. WHOLE: the unit needs none.
constexpr int32_t WHOLE = -1;

// Parts in the workspace: at 2 b block b stores the end of a unit that starts in an earlier block.
// At 2 b + 1 it stores the start of a unit that ends in a later block.
DEVICE int32_t part_place(int32_t block, bool begins_here) { return 2 * block + (begins_here ? 1 : 0); }

// A block's entry for the merge: the unit that starts in it and ends in a later block, or -1, and
// its number of parts.
struct Span {
    int32_t unit, parts;
};

// Calls attend(segment, part) for each segment of the block's stretch. `part` is WHOLE or the
// segment's slot in the workspace. Every participating thread finds the same segments
// independently.
template <typename Attend>
DEVICE Span for_each_segment(const DecodeAttentionParams& params, Attend attend) {
    Stretch stretch = find_stretch(params);
    const int32_t units = params.s_q * head_blocks(params);
    const int32_t block = static_cast<int32_t>(blockIdx.x);
    Span span{-1, 0};
    while (stretch.count > 0) {
        const int32_t tiles = unit_tiles(params, stretch.request);
        const int32_t unit = stretch.first / tiles;
        Segment segment = unit_segment(params, stretch.request, unit);
        segment.first = stretch.first % tiles;
        segment.last = minimum(tiles, segment.first + stretch.count);
        const bool begins = segment.first == 0, ends = segment.last == tiles;
        attend(segment, begins && ends ? WHOLE : part_place(block, begins));
        if (begins && !ends)
            span = Span{stretch.request * units + unit, 1 + ceil_div(tiles - segment.last, stretch.per_block)};
        stretch.count -= segment.last - segment.first;
        stretch.first += segment.last - segment.first;
        if (stretch.first == units * tiles) {
            stretch.first = 0;
            ++stretch.request;
        }
    }
    return span;
}

DEVICE void store_span(const DecodeAttentionParams& params, const Span& span) {
    params.spans[2 * blockIdx.x] = span.unit;
    params.spans[2 * blockIdx.x + 1] = span.parts;
}
