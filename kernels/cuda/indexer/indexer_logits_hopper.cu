// Logits of the indexer for sm_90a: the kernel of indexer_logits.cu, which has the formulas, with
// wgmma.
//
// Work division. Keys are the rows of an MMA and the heads of TOKENS tokens its columns. Of an MMA
// of 64 keys a lane holds two keys by a quarter of the heads: a logit is a sum within the lane and
// over four lanes. One block per SM takes work tiles (a few tokens and a piece of their keys)
// round-robin. Five warpgroups:
//   0 to 3  consumers. They take key tiles of 64 round-robin from a ring of STAGES: while one does
//           relu and sums, the others' MMAs run. They exchange nothing.
//   4       producer. bf16 and e4m3: one warp loads the tiles by TMA (tensor_copy_in) as far ahead
//           as stages exist, a second one the queries of the next work tiles. e2m1, for which
//           Hopper has no MMA, passes through the registers of all four warps and becomes bf16,
//           exactly: each warp decodes the tiles of one consumer.
// The scales of e4m3 keys are loaded to the consumers' registers, a tile ahead. e4m3 MMAs
// accumulate with 13 fraction bits (hopper.h) over the 128 values of a head; the oracle's
// tolerance follows.
//
// Floor: that of indexer_logits.cu. Limit: tensor cores, issue slots and shared memory about
// equally, none of them full; with one token a request, memory; with one request, latency from the
// length over the page number to the keys. One H200: 4096 queries of e4m3, 16384 keys 1167 us (824
// TFLOP/s); 8192 of bf16, 2048 keys, ratio 4 273 us (504 TFLOP/s).
//
// Defines: OPERANDS 0 bf16, 1 e4m3, 2 e2m1; HEADS 32 or 64, those after num_heads add nothing;
// TOKENS of a work tile: TOKENS * HEADS is 64 or 128. Launch: any grid in x of at most
// total_units<TOKENS> blocks. What was tried: kernels/docs/indexer_logits.md.
#include "async_copy.h"
#include "hopper.h"
#include "indexer_logits.h"
#include "indexer_shared.h"

#ifndef TOKENS
#error "define TOKENS"
#endif

constexpr int ROWS = TOKENS * HEADS;  // of the queries: columns of a product
static_assert(HEADS == 32 || HEADS == 64, "a block holds 32 or 64 heads");
static_assert(ROWS == 64 || ROWS == 128, "products have 64 or 128 columns");

constexpr int KEYS = 64;  // the rows of a product
constexpr int CONSUMERS = 4, CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE, PRODUCERS = WARPGROUP_SIZE;
constexpr int THREADS = CONSUMER_THREADS + PRODUCERS;
constexpr int PANELS = OPERANDS == E4M3 ? 1 : 2;  // rows of 128 bytes that hold a row of an operand
constexpr int STAGES = OPERANDS == E4M3 ? 16 : 8;
static_assert(STAGES % CONSUMERS == 0, "each consumer has its own stages");
// Whether operands are loaded by TMA. Codes of e2m1 pass through registers.
constexpr bool BOXES = OPERANDS != E2M1;

constexpr int Q_BYTES = PANELS * ROWS * 128, TILE_BYTES = PANELS * KEYS * 128;
// The notes are the two work tiles.
struct alignas(8) NotedUnit {
    Unit<TOKENS> unit;
};
using Shared = IndexerShared<STAGES, Q_BYTES, TILE_BYTES, ROWS, NotedUnit[2]>;
using Tiles = Shared::Tiles;
using Units = Shared::Units;
SHARED_MEMORY(indexer_logits_hopper, Shared::BYTES)

DEVICE Unit<TOKENS>& shared_unit(uint32_t unit) {
    return *reinterpret_cast<Unit<TOKENS>*>(Shared::notes() + unit % 2 * sizeof(NotedUnit));
}

DEVICE void initialise_barriers(SharedAddress shared) {
    if (threadIdx.x == 0) {
        Tiles::initialise(shared, 1, WARPGROUP_SIZE / WARP_SIZE);
        // One lane's expected bytes and the lanes that load weights, or all threads that decode.
        Units::initialise(shared, BOXES ? 1 + WARP_SIZE : PRODUCERS, CONSUMER_THREADS / WARP_SIZE);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// ---------------------------------------------------------------- producer

DEVICE int producer_thread() { return static_cast<int>(threadIdx.x) - CONSUMER_THREADS; }

// Decodes half a row of e2m1: 64 values, one panel.
DEVICE void decode_half_row(SharedAddress operand, int rows, int row, int half, const uint8_t* source,
                            const uint8_t* scales) {
    const SharedAddress panel = operand + half * rows * 128;
    UNROLL
    for (int group = 0; group < 2; ++group) {
        const Vec16 codes = source ? load_vec16_readonly(source + 32 * half + 16 * group) : Vec16{{0, 0, 0, 0}};
        const bf16 scale = e8m0_to_bf16(source ? scales[2 * half + group] : uint8_t{127});
        UNROLL
        for (int i = 0; i < 4; ++i) {
            Vec16 numbers;
            e2m1x8_to_bf16(codes.w[i], scale, numbers.w);
            store_shared_vec16(panel + panel_offset(row, 4 * group + i), numbers);
        }
    }
}

// Loads the weights of a work tile, by threads `thread` of `threads`.
DEVICE void produce_weights(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, uint32_t number, int thread,
                            int threads) {
    float* weights = Shared::weights(number);
    for (int row = thread; row < ROWS; row += threads) {
        const int token = row / HEADS, head = row % HEADS;
        const bool exists = token < unit.count && head < params.num_heads;
        weights[token * HEADS + weight_place(head)] = exists ? load_weight(params, unit.first_token + token, head) : 0.0f;
    }
}

// ---------------------------------------------------------------- TMA producer

// Loads the queries of all work tiles, by one warp. Heads and tokens beyond the tensor are zeros.
// Columns of tokens outside the work tile are not stored.
DEVICE void produce_query_boxes(const IndexerLogitsParams& params, SharedAddress shared) {
    const int64_t units = total_units<TOKENS>(params);
    uint32_t number = 0;
    for (int64_t at = blockIdx.x; at < units; at += gridDim.x, ++number) {
        const Unit<TOKENS> unit = unit_of<TOKENS>(params, at, KEYS);
        const SharedAddress full = shared + Units::full(number);
        Units::wait_empty(shared, number);
        if (lane_id() == 0) {
            shared_unit(number) = unit;
            mbarrier_arrive_expect(full, Q_BYTES);
            UNROLL
            for (int token = 0; token < TOKENS; ++token) {
                UNROLL
                for (int panel = 0; panel < PANELS; ++panel)
                    tensor_copy_in(shared + Shared::q(number) + (panel * ROWS + token * HEADS) * 128, params.q_map,
                                   panel * 128, 0, unit.first_token + token, full);
            }
        }
        __syncwarp();
        produce_weights(params, unit, number, lane_id(), WARP_SIZE);
        mbarrier_arrive(full);
    }
}

// Prefetches `bytes` bytes into L2.
DEVICE void prefetch_lines(const void* source, int32_t bytes) {
    constexpr int32_t LINE = 128;
    for (int32_t at = 0; at < bytes; at += LINE) prefetch_second_level(static_cast<const uint8_t*>(source) + at);
}

// Loads the keys of all work tiles, by one warp, a lane a TMA box: a tile of pages of 32 keys has
// two. An absent page leaves the rows of its stage as they are; their logits are not stored.
DEVICE void produce_key_boxes(const IndexerLogitsParams& params, SharedAddress shared) {
    const int64_t units = total_units<TOKENS>(params);
    const bool paged = params.block_table;
    const int32_t box_keys = paged ? minimum(KEYS, 1 << params.page_shift) : KEYS, boxes = KEYS / box_keys;
    uint32_t tile = 0;
    for (int64_t at = blockIdx.x; at < units; at += gridDim.x) {
        const Unit<TOKENS> unit = unit_of<TOKENS>(params, at, KEYS);
        int32_t page = 0;  // of this lane's box: one load is waited for in as many boxes as there are lanes
        for (int32_t own = unit.begin, lane = 0; own < unit.end; ++own, ++tile, lane = (lane + boxes) % WARP_SIZE) {
            const int32_t first = unit.first + own * KEYS;
            if (paged && lane == 0) page = page_of(params, unit.request, first + lane_id() * box_keys);
            const uint32_t there = __ballot_sync(FULL_WARP, page >= 0) & ((1u << boxes) - 1) << lane;
            const SharedAddress full = shared + Tiles::full(tile);
            Tiles::wait_empty(shared, tile);
            // All lanes must have seen this phase first. Where no page exists the arrival below
            // completes the tile. Consumers may then end the next phase before a slower lane has
            // looked.
            __syncwarp();
            // Bytes outside of the tensor count as arrived.
            if (lane_id() == 0) mbarrier_arrive_expect(full, __popc(there) * PANELS * box_keys * 128);
            __syncwarp();
            if (!(there >> lane_id() & 1)) continue;
            const SharedAddress rows = shared + Shared::k(tile) + (lane_id() - lane) * box_keys * 128;
            UNROLL
            for (int panel = 0; panel < PANELS; ++panel)
                tensor_copy_in(rows + panel * KEYS * 128, params.k_map, panel * 128, paged ? 0 : first, page, full);
            // Without the prefetch the first tiles' scales arrive late. A prefetch for all tiles
            // takes longer than it saves.
            if (OPERANDS == E4M3 && paged && own - unit.begin < STAGES)
                prefetch_lines(scale_on(params, page, 0), box_keys * SCALE_BYTES);
        }
    }
}

// ---------------------------------------------------------------- producer of decoded codes

DEVICE const uint8_t* query(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, int row) {
    const int token = row / HEADS, head = row % HEADS;
    if (token >= unit.count || head >= params.num_heads) return nullptr;
    return params.q + (unit.first_token + token) * params.q_token_stride + head * params.q_head_stride;
}

DEVICE void decode_queries(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, SharedAddress q, uint32_t number) {
    for (int i = producer_thread(); i < 2 * ROWS; i += PRODUCERS) {
        const int row = i / 2;
        const int64_t token = unit.first_token + row / HEADS, head = token * params.num_heads + row % HEADS;
        decode_half_row(q, ROWS, row, i % 2, query(params, unit, row), params.q_scale_bytes + 4 * head);
    }
    produce_weights(params, unit, number, producer_thread(), PRODUCERS);
}

// The pages of a warp's next 16 tiles; every CONSUMERS-th tile is the warp's. A lane holds the
// page of half a tile: one load is waited for every 16 tiles.
struct Pages {
    int32_t own;
    static constexpr int TILES = WARP_SIZE / 2;

    // `first` is the position at which the first of these tiles starts.
    void look_up(const IndexerLogitsParams& params, int32_t request, int32_t first) {
        own = page_of(params, request, first + (lane_id() / 2 * 2 * CONSUMERS + lane_id() % 2) * (KEYS / 2));
    }
    // The page of a half of tile `place` of these.
    int32_t of(int32_t place, int half) const { return __shfl_sync(FULL_WARP, own, place * 2 + half); }
};

// Decodes the keys of a tile that starts at `first` and whose halves are on these pages, by one
// warp.
DEVICE void decode_keys(const IndexerLogitsParams& params, const int32_t (&page)[2], int32_t first, SharedAddress stage) {
    constexpr int HALF = KEYS / 2;
    const int lane = lane_id();
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
            const int row = half * HALF + i * WARP_SIZE / 2 + lane / 2;
            const Key key = key_on(params, page[half], first + row);
            decode_half_row(stage, KEYS, row, lane % 2, key.row, key.scales);
        }
    }
}

// Warp `warp` of the producer decodes the tiles of consumer `warp`. All of its warps decode the
// queries. A fence makes a lane's stores visible to the MMAs.
DEVICE void produce_decoded(const IndexerLogitsParams& params, SharedAddress shared, uint32_t warp) {
    const int64_t units = total_units<TOKENS>(params);
    uint32_t tile = warp, before = 0, number = 0;  // how many tiles and units have come before the unit
    for (int64_t at = blockIdx.x; at < units; at += gridDim.x, ++number) {
        const Unit<TOKENS> unit = unit_of<TOKENS>(params, at, KEYS);
        Units::wait_empty(shared, number);
        if (producer_thread() == 0) shared_unit(number) = unit;
        decode_queries(params, unit, shared + Shared::q(number), number);
        fence_async_proxy();
        // Each lane arrives for its own stores: racecheck does not relate a lane's arrival to
        // other lanes' stores.
        mbarrier_arrive(shared + Units::full(number));
        Pages pages;
        const int32_t tiles = unit.end - unit.begin;
        for (int32_t own = tile - before, place = 0; own < tiles; own += CONSUMERS, tile += CONSUMERS, ++place) {
            const int32_t first = unit.first + (unit.begin + own) * KEYS;
            if (place % Pages::TILES == 0) pages.look_up(params, unit.request, first);
            const int32_t page[2] = {pages.of(place % Pages::TILES, 0), pages.of(place % Pages::TILES, 1)};
            Tiles::wait_empty(shared, tile);
            decode_keys(params, page, first, shared + Shared::k(tile));
            fence_async_proxy();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Tiles::full(tile));
        }
        before += tiles;
    }
}

DEVICE void produce(const IndexerLogitsParams& params, SharedAddress shared, uint32_t warp) {
    if constexpr (!BOXES) produce_decoded(params, shared, warp);
    else if (warp == 0) produce_key_boxes(params, shared);
    else if (warp == 1) produce_query_boxes(params, shared);
}

// ---------------------------------------------------------------- consumers

constexpr int N8 = ROWS / 8;
// Logits of a tile that a lane keeps, and their token. With one token two lanes keep the same
// logit.
constexpr int KEPT = TOKENS == 4 ? 2 : 1;
DEVICE int lane_token() { return TOKENS == 1 ? 0 : TOKENS == 2 ? lane_id() / 2 % 2 : lane_id() % 4; }
DEVICE bool lane_stores() { return TOKENS > 1 || lane_id() % 2 == 0; }
// The key, among the warp's, of the lane's logit i.
DEVICE int lane_key(int i) {
    const int half = TOKENS == 4 ? i : TOKENS == 2 ? lane_id() % 2 : lane_id() / 2 % 2;
    return lane_id() / 4 + 8 * half;
}

// Issues d = k q^T, 64 keys by all columns.
DEVICE void start_product(float (&d)[N8][4], uint64_t keys, uint64_t queries) {
    wgmma_fence();
    UNROLL
    for (int panel = 0; panel < PANELS; ++panel) {
        UNROLL
        for (int step = 0; step < 4; ++step) {
            const uint64_t a = descriptor_advance(keys, panel * KEYS * 128 + 32 * step);
            const uint64_t b = descriptor_advance(queries, panel * ROWS * 128 + 32 * step);
            if constexpr (OPERANDS == E4M3) wgmma_shared_e4m3(d, a, b, step > 0);
            else wgmma_shared<false, false>(d, a, b, panel > 0 || step > 0);
        }
    }
    wgmma_commit();
}

// Sums over the four lanes that hold the same keys: what this lane keeps.
template <int COUNT>
DEVICE void sum_lanes(float (&kept)[KEPT], const float (&sums)[COUNT]) {
    if constexpr (COUNT == 2) {
        add_halves(kept, sums, 2);
        kept[0] += __shfl_xor_sync(FULL_WARP, kept[0], 1);
    } else {
        float halves[COUNT / 2];
        add_halves(halves, sums, 2);
        add_halves(kept, halves, 1);
    }
}

// The columns of a lane's logits of a tile, and the factors of their sums.
struct Places {
    int32_t column[KEPT];  // -1: none
    float scale[KEPT];
};

// A lane's constants for its token's logits in the tiles of a work tile.
struct LaneLogits {
    float* row;
    const uint8_t* scales;  // of the keys from the token's first on, or of those of page 0
    int32_t entries;        // the bits of a column that are an entry of its page: all of them where there is but page 0
    int32_t first;          // the column of its first key in the unit's first tile
    int32_t columns;        // of the token; 0 if the lane stores none

    LaneLogits(const IndexerLogitsParams& params, const Unit<TOKENS>& unit, int32_t warp_key) {
        const KeyRange range = unit.ranges[lane_token()];
        row = params.logits + (unit.first_token + lane_token()) * params.logits_stride;
        scales = params.block_table ? params.k + page_scales(params)
                                    : reinterpret_cast<const uint8_t*>(params.k_scales + range.first);
        entries = params.block_table ? entry_of(params, -1) : -1;
        first = unit.first + unit.begin * KEYS + warp_key + lane_key(0) - range.first;
        columns = lane_stores() ? range.length : 0;
    }
    // The columns and scales of tile `at`, whose keys are on `page`. Logits of an absent page are
    // -inf, with clean logits.
    Places look_up(const IndexerLogitsParams& params, int32_t at, int32_t page) const {
        Places places;
        UNROLL
        for (int i = 0; i < KEPT; ++i) {
            const int32_t column = first + at * KEYS + lane_key(i) - lane_key(0);
            const bool inside = static_cast<uint32_t>(column) < static_cast<uint32_t>(columns);
            places.column[i] = inside ? column : -1;
            places.scale[i] = 1.0f;
            if (page < 0) {
                places.column[i] = -1;
                if (inside && cleans(params)) row[column] = -INFINITY_F32;
            } else if (OPERANDS == E4M3 && inside) {
                places.scale[i] = *reinterpret_cast<const float*>(scales + page * params.k_stride + (column & entries) * 4ll);
            }
        }
        return places;
    }
    void store(const IndexerLogitsParams& params, const Places& places, const float (&sums)[KEPT]) const {
        UNROLL
        for (int i = 0; i < KEPT; ++i)
            if (places.column[i] >= 0) row[places.column[i]] = logit_of(params, Factor{places.scale[i], true}, sums[i]);
    }
};

// The pages of a warp's keys in the next 32 of its tiles, one a lane; 0 where keys are not paged.
struct WarpPages {
    int32_t own = 0;

    // The page of the warp's tile number `place` of the work tile, whose keys of the warp start at
    // `position`. Its later tiles follow at a stride of CONSUMERS tiles.
    int32_t of(const IndexerLogitsParams& params, int32_t request, uint32_t place, int32_t position) {
        if (!params.block_table) return 0;
        if (place % WARP_SIZE == 0) own = page_of(params, request, position + lane_id() * CONSUMERS * KEYS);
        return __shfl_sync(FULL_WARP, own, place % WARP_SIZE);
    }
};

// Computes this consumer's tiles from tile `own` of the work tile on; `before` tiles came before
// the work tile. The next tile's columns and scales are loaded while this one's MMAs run.
DEVICE void consume_tiles(const IndexerLogitsParams& params, SharedAddress shared, uint32_t number, uint32_t before,
                          int32_t own, int32_t end) {
    const Unit<TOKENS>& unit = shared_unit(number);
    const int32_t warp_key = warp_id() % 4 * 16, first = unit.first + unit.begin * KEYS + warp_key;
    const int32_t request = unit.request;
    const uint64_t queries = matrix_descriptor(shared + Shared::q(number), 0, 1024);
    const LaneLogits logits(params, unit, warp_key);
    WarpPages pages;
    uint32_t place = 0;
    Places next = logits.look_up(params, own, pages.of(params, request, place, first + own * KEYS));
    for (; own < end; own += CONSUMERS) {
        const uint32_t tile = before + own;
        const Places places = next;
        float d[N8][4], sums[2 * TOKENS], kept[KEPT];
        Tiles::wait_full(shared, tile);
        start_product(d, matrix_descriptor(shared + Shared::k(tile), 0, 1024), queries);
        const int32_t after = own + CONSUMERS;
        if (after < end)
            next = logits.look_up(params, after, pages.of(params, request, ++place, first + after * KEYS));
        wgmma_wait<0>();
        wgmma_hold(d);
        if (lane_id() == 0) mbarrier_arrive(shared + Tiles::empty(tile));
        if (params.num_heads == HEADS) sum_own_heads<TOKENS, HEADS, false>(sums, d, Shared::weights(number), HEADS);
        else sum_own_heads<TOKENS, HEADS, true>(sums, d, Shared::weights(number), params.num_heads);
        sum_lanes(kept, sums);
        logits.store(params, places, kept);
    }
}

DEVICE void consume(const IndexerLogitsParams& params, SharedAddress shared, uint32_t consumer) {
    const int64_t units = total_units<TOKENS>(params);
    uint32_t number = 0, before = 0;  // how many units and tiles have come before
    for (int64_t at = blockIdx.x; at < units; at += gridDim.x, ++number) {
        Units::wait_full(shared, number);
        const Unit<TOKENS>& unit = shared_unit(number);
        const int32_t tiles = uniform(unit.end - unit.begin);
        // Consumers take the tiles of all work tiles round-robin.
        const int32_t own = static_cast<int32_t>((consumer - before) % CONSUMERS);
        if (own < tiles) consume_tiles(params, shared, number, before, own, tiles);
        before += tiles;
        for (int token = 0; token < unit.count && cleans(params); ++token)
            clean_row(params, unit.first_token + token, unit.ranges[token].length, unit.piece, threadIdx.x,
                      CONSUMER_THREADS);
        // The warp has read all of the work tile in shared memory.
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(shared + Units::empty(number));
    }
}

using Registers = DividedRegisters<1, 64, CONSUMERS, 104>;

KERNEL(indexer_logits_hopper, IndexerLogitsParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    initialise_barriers(shared);
    const int32_t warpgroup = uniform(warp_id() / 4);
    if (warpgroup == CONSUMERS) {
        Registers::give();
        produce(params, shared, uniform(warp_id() % 4));
    } else {
        Registers::take();
        consume(params, shared, warpgroup);
    }
}
