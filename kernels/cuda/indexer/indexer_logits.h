// Shared by the two implementations of indexer_logits: parameters, which keys a token scores,
// where keys are stored, the sum over the heads, and the stores. indexer_logits.cu has the
// formulas.
//
// The including file is compiled with OPERANDS and HEADS defined.
#pragma once

#include "codes.h"
#include "indexer_heads.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "panels.h"
#include "platform.h"
#include "tensor_map.h"

#if !defined(OPERANDS) || !defined(HEADS)
#error "define OPERANDS as 0 (bf16), 1 (e4m3) or 2 (e2m1), and HEADS"
#endif

constexpr int BF16 = 0, E4M3 = 1, E2M1 = 2;
static_assert(OPERANDS == BF16 || OPERANDS == E4M3 || OPERANDS == E2M1, "operands are bf16, e4m3 or e2m1");

constexpr int HEAD_DIM = 128;
constexpr int ROW_BYTES = OPERANDS == BF16 ? 2 * HEAD_DIM : OPERANDS == E4M3 ? HEAD_DIM : HEAD_DIM / 2;  // of a key
constexpr int SCALE_BYTES = OPERANDS == BF16 ? 0 : 4;  // of a key; with e2m1 of a head as well
constexpr int GROUP = 32;                              // numbers of e2m1 that share a scale

// ---------------------------------------------------------------- parameters

// q: [num_tokens, num_heads] rows of ROW_BYTES bytes. k: rows of keys at a stride of k_stride
// bytes. With a block table k is pages at that stride: 2^page_shift rows and then their scales.
// Base and strides of both are multiples of 16 bytes. Scales: q_scale_bytes [num_tokens,
// num_heads, 4] with e2m1. Without pages, keys have k_scales [num_keys] with e4m3 and
// k_scale_bytes [num_keys, 4] with e2m1. w: [num_tokens, num_heads] bf16 or fp32. A token's keys
// are given in exactly one way: block_table and context_lens [num_tokens]; or ks and ke
// [num_tokens]; or a causal limit. The limit has cu_q and cu_k [num_sequences + 1], or one
// sequence, and q_off [num_sequences], or 0.
struct IndexerLogitsParams {
    const uint8_t* q;
    int64_t q_token_stride;  // bytes
    int64_t q_head_stride;   // bytes
    const uint8_t* q_scale_bytes;
    const void* w;
    int64_t w_token_stride;  // elements
    const uint8_t* k;
    int64_t k_stride;  // bytes
    const float* k_scales;
    const uint8_t* k_scale_bytes;
    const int32_t* block_table;  // [num_tokens / next_n, table_pages]
    int64_t block_table_stride;
    const int32_t* context_lens;
    const int32_t* ks;
    const int32_t* ke;
    const int32_t* cu_q;
    const int32_t* cu_k;
    const int32_t* q_off;
    float* logits;  // [num_tokens, columns]
    int64_t logits_stride;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_keys;  // rows of all pages where there is a block table
    int32_t columns;
    int32_t num_sequences;
    int32_t ratio;
    int32_t next_n;  // tokens of a request; num_tokens where there is no block table
    int32_t page_shift;
    int32_t table_pages;
    int32_t num_pieces;  // that a tile's keys are dealt into
    int32_t flags;
    float sm_scale;
    TensorMap q_map;  // for the Hopper kernel, of bf16 and e4m3: [num_tokens, num_heads, bytes], boxes of HEADS rows
    TensorMap k_map;  // [num_keys, bytes] in boxes of 64, or of pages [num_pages, page_size, bytes], boxes of up to 64 rows
};

DEVICE bool cleans(const IndexerLogitsParams& params) { return params.flags & 1; }
DEVICE bool has_bf16_weights(const IndexerLogitsParams& params) { return params.flags & 2; }

DEVICE float load_weight(const IndexerLogitsParams& params, int32_t token, int head) {
    const int64_t at = token * params.w_token_stride + head;
    return has_bf16_weights(params) ? to_float(static_cast<const bf16*>(params.w)[at])
                                    : static_cast<const float*>(params.w)[at];
}

// ---------------------------------------------------------------- which keys a token scores

// The keys at positions [first, first + length): column c of the token's row is the key at
// position first + c. A position is a row of k, or counts the entries of a request's pages.
struct KeyRange {
    int32_t first, length;
};

// The sequence of a token: the first that ends after it. num_sequences where none does.
DEVICE int32_t sequence_of(const IndexerLogitsParams& params, int32_t token) {
    int32_t low = 0, high = params.num_sequences;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (params.cu_q[middle + 1] <= token) low = middle + 1;
        else high = middle;
    }
    return low;
}

DEVICE int32_t clamp(int64_t x, int32_t low, int32_t high) {
    return static_cast<int32_t>(minimum<int64_t>(maximum<int64_t>(x, low), high));
}

// Key j of a sequence covers its tokens j * ratio .. j * ratio + ratio - 1, and is visible from
// the last of them on.
DEVICE KeyRange causal_range(const IndexerLogitsParams& params, int32_t token) {
    const int32_t sequence = params.cu_q ? sequence_of(params, token) : 0;
    if (params.cu_q && sequence == params.num_sequences) return KeyRange{0, 0};
    const int32_t first_token = params.cu_q ? params.cu_q[sequence] : 0;
    // Clamped to the tensor, whatever cu_k holds.
    const int32_t first = params.cu_k ? clamp(params.cu_k[sequence], 0, params.num_keys) : 0;
    const int32_t last = params.cu_k ? clamp(params.cu_k[sequence + 1], first, params.num_keys) : params.num_keys;
    const int64_t offset = params.q_off ? params.q_off[sequence] : 0;
    const int64_t covered = maximum<int64_t>(offset + (token - first_token) + 1, 0);
    return KeyRange{first, clamp(covered / params.ratio, 0, minimum(last - first, params.columns))};
}

// Keys beyond the tensor and columns beyond the output are skipped. Entries beyond the table have
// no page.
DEVICE KeyRange key_range(const IndexerLogitsParams& params, int32_t token) {
    if (params.block_table) return KeyRange{0, clamp(params.context_lens[token], 0, params.columns)};
    if (params.ks) {
        const int32_t first = clamp(params.ks[token], 0, params.num_keys);
        const int32_t last = clamp(params.ke[token], first, params.num_keys);
        return KeyRange{first, minimum(last - first, params.columns)};
    }
    return causal_range(params, token);
}

// ---------------------------------------------------------------- addresses of keys

// The page of a request's entry. -1 where no such entry or page exists, or keys are not paged.
DEVICE int32_t page_of(const IndexerLogitsParams& params, int32_t request, int32_t position) {
    if (!params.block_table) return -1;
    const int32_t place = position >> params.page_shift;
    if (place >= params.table_pages) return -1;
    const int32_t page = params.block_table[request * params.block_table_stride + place];
    if (page < 0 || page >= params.num_keys >> params.page_shift) return -1;
    return page;
}
DEVICE int32_t entry_of(const IndexerLogitsParams& params, int32_t position) {
    return position & ((1 << params.page_shift) - 1);
}
// The offset in a page of its scales, after its rows.
DEVICE int32_t page_scales(const IndexerLogitsParams& params) { return ROW_BYTES << params.page_shift; }

// For the entry at `position`, on `page` (from page_of) where keys are paged: whether such a key
// exists, and its address if it does.
DEVICE bool exists_on(const IndexerLogitsParams& params, int32_t page, int32_t position) {
    return params.block_table ? page >= 0 : position < params.num_keys;
}
DEVICE const uint8_t* key_start(const IndexerLogitsParams& params, int32_t page, int32_t position) {
    if (!params.block_table) return params.k + position * params.k_stride;
    return params.k + page * params.k_stride + entry_of(params, position) * ROW_BYTES;
}

// A key's row and its scales. Null where the position or its page does not exist.
struct Key {
    const uint8_t* row;
    const uint8_t* scales;  // of operands that have some in bytes
};

// The key at `position`, on `page` (from page_of) where keys are paged.
DEVICE Key key_on(const IndexerLogitsParams& params, int32_t page, int32_t position) {
    if (!exists_on(params, page, position)) return Key{nullptr, nullptr};
    const uint8_t* row = key_start(params, page, position);
    if (OPERANDS != E2M1) return Key{row, nullptr};
    if (!params.block_table) return Key{row, params.k_scale_bytes + static_cast<int64_t>(position) * SCALE_BYTES};
    const uint8_t* start = params.k + page * params.k_stride;
    return Key{row, start + page_scales(params) + entry_of(params, position) * SCALE_BYTES};
}

// The factor of a key's sum over the heads, and whether the key exists.
struct Factor {
    float scale;
    bool exists;
};

// The address of the scale of the key at `position`. Null where the key has none or does not
// exist.
DEVICE const float* scale_on(const IndexerLogitsParams& params, int32_t page, int32_t position) {
    if (OPERANDS != E4M3) return nullptr;
    if (!params.block_table) return position < params.num_keys ? params.k_scales + position : nullptr;
    if (page < 0) return nullptr;
    const uint8_t* scales = params.k + page * params.k_stride + page_scales(params);
    return reinterpret_cast<const float*>(scales) + entry_of(params, position);
}

// ---------------------------------------------------------------- work tiles

// At most MOST consecutive tokens, of one request where keys are paged, that share the keys of one
// piece: the tiles [begin, end) of `keys` keys from position `first` on. Each token takes those in
// its range.
template <int MOST>
struct Unit {
    int32_t first_token, count, request;
    int32_t piece;
    KeyRange ranges[MOST];  // of absent tokens without keys
    int32_t first;
    int32_t begin, end;
};

// The number of work tiles of MOST tokens.
template <int MOST>
DEVICE int64_t total_units(const IndexerLogitsParams& params) {
    const int32_t requests = params.num_tokens / params.next_n;
    return static_cast<int64_t>(requests) * ceil_div(params.next_n, MOST) * params.num_pieces;
}

// Work tile `number`: the pieces of one tile of tokens follow each other. Under a causal limit
// later tokens see more keys: they go first.
template <int MOST>
DEVICE Unit<MOST> unit_of(const IndexerLogitsParams& params, int64_t number, int keys) {
    // The launcher has fewer work tiles than 2^32: 64-bit divisions take longer than a tile.
    const uint32_t num_pieces = params.num_pieces, place = static_cast<uint32_t>(number);
    const uint32_t tiles = ceil_div(params.next_n, MOST), requests = params.num_tokens / params.next_n;
    const uint32_t tile = requests * tiles - 1 - place / num_pieces;
    Unit<MOST> unit;
    unit.piece = static_cast<int32_t>(place % num_pieces);
    unit.request = static_cast<int32_t>(tile / tiles);
    const auto within = static_cast<int32_t>(tile % tiles * MOST);
    unit.first_token = unit.request * params.next_n + within;
    unit.count = minimum(MOST, params.next_n - within);
    // Prefetches the piece's entries of the block table before its start is known: near here, if
    // the context fills its table.
    if (params.block_table)
        prefetch_second_level(params.block_table + unit.request * params.block_table_stride +
                              params.table_pages / params.num_pieces * unit.piece);
    int32_t last = 0;
    unit.first = params.num_keys;
    UNROLL
    for (int i = 0; i < MOST; ++i) {
        unit.ranges[i] = i < unit.count ? key_range(params, unit.first_token + i) : KeyRange{0, 0};
        if (unit.ranges[i].length == 0) continue;
        unit.first = minimum(unit.first, unit.ranges[i].first);
        last = maximum(last, unit.ranges[i].first + unit.ranges[i].length);
    }
    // The first pieces have one tile more where the tiles do not divide evenly.
    const uint32_t total = last > unit.first ? ceil_div(last - unit.first, keys) : 0, piece = unit.piece;
    const uint32_t each = total / num_pieces, more = total % num_pieces;
    unit.begin = static_cast<int32_t>(piece * each + minimum(piece, more));
    unit.end = static_cast<int32_t>((piece + 1) * each + minimum(piece + 1, more));
    return unit;
}

// With clean logits: stores -inf after the token's range, in the piece's share of the columns.
// Thread `thread` of `threads`.
DEVICE void clean_row(const IndexerLogitsParams& params, int32_t token, int32_t length, int32_t piece, int thread,
                      int threads) {
    float* row = params.logits + token * params.logits_stride;
    for (int64_t c = static_cast<int64_t>(length) + piece * threads + thread; c < params.columns;
         c += static_cast<int64_t>(params.num_pieces) * threads)
        row[c] = -INFINITY_F32;
}

// ---------------------------------------------------------------- stores

// The logit of an absent page is -inf.
DEVICE float logit_of(const IndexerLogitsParams& params, Factor factor, float sum) {
    const float logit = (OPERANDS == E4M3 ? sum * factor.scale : sum) * params.sm_scale;
    return factor.exists ? logit : -INFINITY_F32;
}

// Stores the logit of the key at `position` if it is in the token's range. For an absent page that
// is -inf, with clean logits only.
DEVICE void store_logit(const IndexerLogitsParams& params, float* row, KeyRange range, int32_t position, Factor factor,
                        float sum) {
    const int32_t column = position - range.first;
    if (column < 0 || column >= range.length || !(factor.exists || cleans(params))) return;
    row[column] = logit_of(params, factor, sum);
}

// ---------------------------------------------------------------- operands in shared memory

// Byte offset of chunk `chunk` (8 values) of a row of HEAD_DIM bf16 in two panels of `rows` rows.
DEVICE constexpr int bf16_offset(int rows, int row, int chunk) {
    return chunk / 8 * rows * 128 + panel_offset(row, chunk % 8);
}
