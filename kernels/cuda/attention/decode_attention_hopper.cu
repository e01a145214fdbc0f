// Attention of decoded tokens over a paged cache for sm_90a, with WGMMA. Rows have 448 e4m3 and 64
// bf16 channels, or 512 bf16 channels. decode_attention.cu has the formulas and the division of
// work; hopper_attention.h has the roles of the three warpgroups.
//
// The producer loads bf16 channels with cp.async. It loads e4m3 channels with cp.async too, half a
// tile ahead, to shared-memory slots private to the lane. The lane then converts them into the
// tile. A code becomes code * 2^(scale - 127), exact in bf16, by integer operations on four codes
// and multiplications of bf16 pairs (numeric.h).
//
// Floor: as in decode_attention.cu. Converting a tile of 64 rows takes the producer's four warps
// 14 chunks of 16 codes a thread. That is about 800 issue slots in each scheduler, next to 2048
// cycles of MMA.
//
// What limits it (one H200): the producer. At batch 128, H 128, 128 + 1024 slots of e4m3 rows it
// takes 127 us. ncu: warpgroup 0 waits 45 % of its time for rows; tensor cores are busy 30 % and
// L2 44 % of the time.
//
// Defines: NOPE_DIM 448 and ROPE_DIM 64, or 0 and 512; HEADS_PER_BLOCK 64. Launch: as
// decode_attention. What was tried: kernels/docs/decode_attention.md.

#include "async_copy.h"
#include "decode_attention.h"
#include "hopper_attention.h"

static_assert((NOPE_DIM == 448 && ROPE_DIM == 64) || (NOPE_DIM == 0 && ROPE_DIM == 512), "512 channels");
static_assert(HEADS_PER_BLOCK == HEADS && KEYS == TILE_SLOTS, "a block holds the heads and slots of a product");

// ---------------------------------------------------------------- producer

constexpr int ROWS = 16;  // of a tile, that one warp brings
constexpr int CODE_PANELS = NOPE_DIM / 64;

// Panels of codes in half a row, starting at its first panel. The panels after them are bf16.
constexpr int code_panels(int half) { return maximum(minimum(CODE_PANELS - half * HALF_PANELS, HALF_PANELS), 0); }
constexpr bool has_copies(int half) { return code_panels(half) < HALF_PANELS; }
// One lane of each warp arrives for its stores, and every thread arrives for its copies.
constexpr uint32_t arrivals(int half) { return 4 + (has_copies(half) ? PRODUCERS : 0); }
// The lower half of the columns is the part that warpgroup 0 owns.
constexpr int part_of(int tile, int half) { return tile ^ half; }

// A warp's rows are in octets. In a panel of codes four lanes share a row, 16 codes each. Eight
// lanes then store to all banks, because the swizzle puts the even chunks of an odd row where an
// even row has its odd chunks. The codes of an octet are one group of copies, in flight to slots
// private to the lane, [octet][panel][thread].
constexpr int OCTET = 8;
constexpr int OCTETS = ROWS / OCTET;
struct DecodeShared {
    struct Plan {
        Shared::Plan attention;
        alignas(16) uint8_t codes[OCTETS][HALF_PANELS][PRODUCERS][16];
    };
    static constexpr int CODES = OFFSET_OF(Plan, codes), BYTES = sizeof(Plan);
};
static_assert(DecodeShared::BYTES <= MAX_SHARED_BYTES, "codes exceed shared memory");

SHARED_MEMORY(decode_attention_hopper, DecodeShared::BYTES)

DEVICE SharedAddress code_place(SharedAddress shared, int octet, int panel) {
    return shared + DecodeShared::CODES + ((octet * HALF_PANELS + panel) * PRODUCERS + producer_thread()) * 16;
}
DEVICE int code_row(int octet) { return OCTET * octet + lane_id() / 4; }

// Starts the copies of an octet's codes, as one group. `row` is the address that the lane looked
// up. An invalid slot forms no source address; `anywhere` stands for it.
template <int HALF>
DEVICE void copy_codes(int octet, const uint8_t* row, const void* anywhere, SharedAddress shared) {
    if constexpr (code_panels(HALF) > 0) {
        const uint8_t* data = address_of_lane(row, code_row(octet));
        const bool wanted = data != nullptr;
        UNROLL
        for (int panel = 0; panel < code_panels(HALF); ++panel) {
            const void* from = wanted ? data + (HALF * HALF_PANELS + panel) * 64 + 16 * (lane_id() % 4) : anywhere;
            copy_async_16(code_place(shared, octet, panel), from, wanted);
        }
    }
    copy_commit();
}

// Converts the lane's codes of an octet and stores them. `scales` is the word of the lane's own
// row with this half's scales.
template <int HALF>
DEVICE void store_codes(int octet, uint32_t scales, SharedAddress shared, SharedAddress tile, int warp) {
    constexpr int COUNT = code_panels(HALF);
    if constexpr (COUNT > 0) {
        const uint32_t word = __shfl_sync(FULL_WARP, scales, code_row(octet));
        Vec16 codes[COUNT];
        UNROLL
        for (int panel = 0; panel < COUNT; ++panel) codes[panel] = load_shared_vec16(code_place(shared, octet, panel));
        const int row = ROWS * warp + code_row(octet), chunk = lane_id() % 4 * 2;
        UNROLL
        for (int panel = 0; panel < COUNT; ++panel) {
            const bf16 scale = e8m0_to_bf16(static_cast<uint8_t>(word >> 8 * panel));
            const SharedAddress at = tile + (HALF * HALF_PANELS + panel) * PANEL_BYTES;
            UNROLL
            for (int i = 0; i < 2; ++i) {
                Vec16 values;
                e4m3x4_to_bf16(codes[panel].w[2 * i], scale, values.w[0], values.w[1]);
                e4m3x4_to_bf16(codes[panel].w[2 * i + 1], scale, values.w[2], values.w[3]);
                store_shared_vec16(at + panel_offset(row, chunk + i), values);
            }
        }
    }
}

// Starts the copies of a half's bf16 channels. An invalid slot forms no source address; `anywhere`
// stands for it.
template <int HALF>
DEVICE void copy_channels(const uint8_t* row, const void* anywhere, SharedAddress tile, int warp) {
    constexpr int FIRST = HALF * HALF_PANELS + code_panels(HALF);   // panel
    constexpr int CHUNKS = 8 * ((HALF + 1) * HALF_PANELS - FIRST);  // of a row
    constexpr int BYTES_BEFORE = NOPE_DIM + 2 * (64 * FIRST - NOPE_DIM);
    UNROLL_BY(4)
    for (int i = lane_id(); i < ROWS * CHUNKS; i += WARP_SIZE) {
        const int r = i / CHUNKS, chunk = i % CHUNKS;
        const uint8_t* data = address_of_lane(row, r);
        const bool wanted = data != nullptr;
        const void* from = wanted ? data + BYTES_BEFORE + 16 * chunk : anywhere;
        copy_async_16(tile + (FIRST + chunk / 8) * PANEL_BYTES + panel_offset(ROWS * warp + r, chunk % 8), from, wanted);
    }
}

// The words of a row's scales: the first four groups, and the others.
struct Scales {
    uint32_t word[2];
};

DEVICE Scales load_scales(const LaneRow& row) {
    Scales scales{{0, 0}};
    if constexpr (NOPE_DIM > 0) {
        if (row.scales != nullptr) {
            scales.word[0] = reinterpret_cast<const uint32_t*>(row.scales)[0];
            scales.word[1] = reinterpret_cast<const uint32_t*>(row.scales)[1];
        }
    }
    return scales;
}

// The row that a lane looks up for its warp, null where the slot is invalid, and its scales.
struct Arriving {
    const uint8_t* data;
    Scales scales;
};

DEVICE Arriving look_up(const DecodeAttentionParams& params, const Segment& segment, int32_t tile, int32_t index) {
    const LaneRow row = find_row(params, segment, tile, index, lane_id() < ROWS);
    return Arriving{row.data, load_scales(row)};
}

// Fills half of tile `tile` (0 or 1), once it is released, from codes in flight. Then starts the
// copies of the next half, of row `next`, to the same slots.
template <int HALF>
DEVICE void produce_half(const Arriving& own, const uint8_t* next, const void* anywhere, SharedAddress shared,
                         int warp, int tile, uint32_t released) {
    const SharedAddress keys = shared + Shared::keys(tile);
    const int part = part_of(tile, HALF);
    mbarrier_wait(shared + Shared::empty(tile, part), released);
    if (part == 0) {
        // The warpgroup that releases part 0 is the one that reads these bits.
        auto* valid = reinterpret_cast<uint16_t*>(dynamic_shared() + Shared::VALID) + 4 * tile;
        const uint32_t warp_valid = __ballot_sync(FULL_WARP, own.data != nullptr) & 0xffffu;
        if (lane_id() == 0) valid[warp] = static_cast<uint16_t>(warp_valid);
    }
    const SharedAddress full = shared + Shared::full(tile, part);
    if constexpr (has_copies(HALF)) {
        copy_channels<HALF>(own.data, anywhere, keys, warp);
        copy_arrive(full);
    }
    UNROLL
    for (int octet = 0; octet < OCTETS; ++octet) {
        copy_wait<OCTETS - 1>();  // the oldest of the groups: this octet's codes
        store_codes<HALF>(octet, own.scales.word[HALF], shared, keys, warp);
        copy_codes<1 - HALF>(octet, next, anywhere, shared);
    }
    fence_async_proxy();
    // Every arrival wakes waiting threads, which then take issue slots from this warp. So one lane
    // arrives for all.
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(full);
}

DEVICE void produce_q(const DecodeAttentionParams& params, const Segment& segment, SharedAddress shared,
                      uint32_t& uses) {
    mbarrier_wait(shared + Shared::Q_EMPTY, (uses++ & 1) ^ 1);
    const bf16* q = params.q + segment.token * params.q_token_stride + segment.first_head * params.q_head_stride;
    // No cache policy: with one, ptxas 13.0.88 emits an instruction for bf16 rows that the GPU
    // rejects.
    load_panels<PANELS>(shared + Shared::Q, q, params.q_head_stride, segment.heads, producer_thread(), PRODUCERS);
    copy_arrive(shared + Shared::Q_FULL);
}

DEVICE void produce_segment(const DecodeAttentionParams& params, const Segment& segment, SharedAddress shared,
                            Uses& uses) {
    const int warp = producer_thread() / static_cast<int>(WARP_SIZE);
    const int slot = ROWS * warp + lane_id() % ROWS;
    const auto index_of = [&](int32_t tile) { return stored_index(params, segment, tile, slot); };
    // Indices are loaded two tiles ahead; rows and scales are looked up one tile ahead.
    const int32_t first_index = index_of(segment.first);
    int32_t index = index_of(segment.first + 1);
    produce_q(params, segment, shared, uses.q);
    Arriving own = look_up(params, segment, segment.first, first_index);
    copy_wait<0>();  // what was copied for the tile behind the last one
    UNROLL
    for (int octet = 0; octet < OCTETS; ++octet) copy_codes<0>(octet, own.data, params.q, shared);
    for (int32_t number = segment.first; number < segment.last; ++number) {
        const Arriving next = look_up(params, segment, number + 1, index);
        index = index_of(number + 2);
        const SharedAddress base = recomputed(shared);
        const int tile = (number - segment.first) % 2;
        const uint32_t released = ((tile == 0 ? uses.tile[0]++ : uses.tile[1]++) & 1) ^ 1;
        produce_half<0>(own, own.data, params.q, base, warp, tile, released);
        produce_half<1>(own, next.data, params.q, base, warp, tile, released);
        own = next;
    }
}

// ---------------------------------------------------------------- consumers

// The log-sum-exp, natural of a whole unit and base 2 of a part, and the rows' normalizers, with
// the sink where the unit is whole. Rows without a valid slot get 0.
template <int W>
DEVICE void finish_softmax(const Consumer& c, const float (&total)[2], float (&factor)[2],
                           const DecodeAttentionParams& params, const Segment& segment, int32_t part) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = c.row + 8 * half;
        const float sum = total[half], lse_log2 = c.maximum[half] + log2_approx(sum);
        const bool empty = sum == 0.0f, writes = W == 0 && speaks();
        factor[half] = 0.0f;
        if (row >= segment.heads) continue;
        if (part != WHOLE) {
            factor[half] = empty ? 0.0f : 1.0f / sum;
            if (writes)
                params.partial_lse[static_cast<int64_t>(part) * HEADS + row] = empty ? -INFINITY_F32 : lse_log2;
            continue;
        }
        // A sink near the largest fp32 becomes inf in base 2, and so does its share: out is then
        // 0, as specified.
        const float sink_log2 = params.sink ? params.sink[segment.first_head + row] * LOG2_E : -INFINITY_F32;
        const float sink_share = exp2_approx(sink_log2 - subtrahend(c.maximum[half]));
        factor[half] = empty ? 0.0f : 1.0f / (sum + sink_share);
        if (writes)
            params.lse[segment.token * params.num_heads + segment.first_head + row] =
                empty ? INFINITY_F32 : lse_log2 * LN_2;
    }
}

// Stores the accumulators to the part's rows in fp32, each row times its factor. Absent heads are
// skipped.
template <int W>
DEVICE void store_part(float* part, const Consumer& c, const float (&factor)[2], int heads) {
    const int t = lane_id() % 4;
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = c.row + 8 * half;
        if (row >= heads) continue;
        float* target = part + row * HEAD_DIM + W * (HEAD_DIM / 2) + 2 * t;
        UNROLL
        for (int n = 0; n < 32; ++n)
            store_pair(target + 8 * n, c.out[n][2 * half] * factor[half], c.out[n][2 * half + 1] * factor[half]);
    }
}

template <int W>
DEVICE Span consume(const DecodeAttentionParams& params, SharedAddress shared) {
    Consumer c;
    c.row = warp_id() % 4 * 16 + lane_id() / 4;
    const float scale_log2 = params.softmax_scale * LOG2_E;
    Uses uses;
    uint32_t turn = 0;
    return for_each_segment(params, [&](const Segment& segment, int32_t part) {
        clear(c);
        consume_tiles<W>(c, shared, uses, uniform(segment.last - segment.first), scale_log2);
        float total[2], factor[2];
        total_sums<W>(total, c, shared, turn++);
        finish_softmax<W>(c, total, factor, params, segment, part);
        if (part == WHOLE) {
            bf16* out =
                params.out + segment.token * params.out_token_stride + segment.first_head * params.out_head_stride;
            store_out<W>(c, factor, out, params.out_head_stride, segment.heads, shared);
        } else {
            store_part<W>(params.partial_out + static_cast<int64_t>(part) * HEADS * HEAD_DIM, c, factor, segment.heads);
        }
    });
}

using Registers = DividedRegisters<1, 88, 2, 208>;

KERNEL(decode_attention_hopper, DecodeAttentionParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    initialise_barriers(shared, {{arrivals(part_of(0, 0)), arrivals(part_of(0, 1))},
                                 {arrivals(part_of(1, 0)), arrivals(part_of(1, 1))}});
    const int warpgroup = uniform(warp_id() / 4);
    if (warpgroup == 2) {
        Registers::give();
        Uses uses;
        for_each_segment(params,
                         [&](const Segment& segment, int32_t) { produce_segment(params, segment, shared, uses); });
    } else {
        Registers::take();
        if (warpgroup == 0) {
            const Span span = consume<0>(params, shared);
            if (threadIdx.x == 0) store_span(params, span);
        } else {
            consume<1>(params, shared);
        }
    }
}
