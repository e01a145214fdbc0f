// mhc_mix_backward_streams_wide of mhc_mix_backward.cu, which has the formulas, for sm_90a. The
// products of projection_backward_products.h by wgmma, twice as fast as mma.sync. g are a token's
// rstd dmix:
//
//     dfn = g^T v      v as loaded, rows of tokens; one operand holds all parts of g, 72 columns
//     dv = g fn        the six largest of 3 x 3 products of parts
// Products are exact and in the same order, but dfn's start from zero every 64 tokens.
//
// A block takes 256 channels, four panels of 64 of one stream each, and a split of the tokens, 64
// at a time (a round). Each of four consumer warpgroups has a panel: its parts of fn, split once,
// stay in shared memory, its sums of dfn in registers. One producer warp issues the streams' TMA
// loads, as far ahead as the stages allow. Three warps split the values of coming rounds, eight
// columns a warp, two tokens a lane. The parts, rows of tokens, are the operand of dfn and the
// fragments of dv. Columns of dv's MMA are channels in an order that gives a lane eight neighbours
// (channel_of). Values that cannot be split (is_large, is_irregular) count as zeros. After the
// round, what they or irregular weights touch is computed again in plain fp32 (mend).
//
// Floors as there: 16 d bytes a token of d channels. A block's round has 3600 cycles of an SM's
// share of memory (4.24 TB/s, 1.75 GHz). MMAs take 1730 (a panel: nine of 64 x 64 x 16, four of 64
// x 72 x 16), issue about 1500.
// Expected limit: memory (DRAM at 73 % of its rate, L2 at 83); 1218 us for 32768 tokens of 7168
// channels on one H200, 73 % of a copy.
// Launch: ceil(panels / PANELS) blocks for each of `splits` splits of the tokens.
// What was tried: kernels/docs/mhc_mix.md.
#include "panels.h"
#include "pipeline.h"
#include "projection_hopper.h"
#include "projection_limits.h"
#include "sinkhorn.h"

constexpr int PANELS = CONSUMERS;                 // of a block: one for each warpgroup
constexpr int PANEL_TOKENS = 64;                  // of a round
constexpr int CHANNEL_STAGES = 4, SPLIT_STAGES = 2;
constexpr int NUMBERS = COLUMNS + 4;              // of a token: rstd dmix, the factor of v, nothing
constexpr int CHUNKS = COLUMNS / PIECE;           // eight columns each: a warp splits one of them
constexpr int SPLIT_WARPS = CHUNKS;
constexpr int BACKWARD_THREADS = CONSUMER_THREADS + COPY_THREADS + SPLIT_WARPS * WARP_SIZE;
static_assert(BACKWARD_THREADS == CONSUMER_THREADS + WARPGROUP_SIZE, "who gives registers is a whole warpgroup");
constexpr int SLICES = 5;                         // of 16 rows: what a product of dv multiplies of fn
constexpr int SLICE_BYTES = 16 * 128, WEIGHT_BYTES = SLICES * SLICE_BYTES;

using Registers = DividedRegisters<1, 64, CONSUMERS, 104>;

struct MhcMixHopperBackwardParams {
    const float* fn;  // [COLUMNS, STREAMS * hidden_size]
    const float* numbers;  // [num_tokens, NUMBERS]
    bf16* dstreams; int64_t dstreams_token_stride; int64_t dstreams_stream_stride;
    float* dfn_partials;  // [splits, COLUMNS, STREAMS * hidden_size]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the tokens
    TensorMap streams_map;  // [STREAMS, num_tokens, bytes], boxes of PANEL_TOKENS rows
};

struct RoundLayout {
    static constexpr int STAGE_BYTES = PANELS * PANEL_BYTES, PARTS_BYTES = 2 * PANEL_BYTES;
    struct Plan {
        uint8_t channels[CHANNEL_STAGES][STAGE_BYTES];  // tokens by channels
        uint8_t weights[PANELS][WEIGHT_BYTES];          // of each panel: SLICES of rows of channels
        uint8_t of_tokens[SPLIT_STAGES][PARTS_BYTES];   // tokens by columns of all parts, 64 and 8
        float factors[SPLIT_STAGES][PANEL_TOKENS];
        uint32_t large[SPLIT_STAGES][CHUNKS][2];        // bits of tokens
        uint32_t irregular[PANELS][4];                  // of each warp
        PipelineBarriers<CHANNEL_STAGES> arriving;
        PipelineBarriers<SPLIT_STAGES> splitting;
    };
    using Channels = Pipeline<OFFSET_OF(Plan, arriving), CHANNEL_STAGES>;
    using Numbers = Pipeline<OFFSET_OF(Plan, splitting), SPLIT_STAGES>;  // full when split into parts
    static constexpr int WEIGHTS = OFFSET_OF(Plan, weights), OF_TOKENS = OFFSET_OF(Plan, of_tokens);
    static constexpr int FACTORS = OFFSET_OF(Plan, factors), LARGE = OFFSET_OF(Plan, large);
    static constexpr int IRREGULAR = OFFSET_OF(Plan, irregular), BYTES = sizeof(Plan);
    static_assert(IRREGULAR % 16 == 0 && BYTES <= 227 * 1024, "stages exceed shared memory");

    static constexpr int channels(uint32_t round, int panel) {
        return round % CHANNEL_STAGES * STAGE_BYTES + panel * PANEL_BYTES;
    }
    static constexpr int weights(int panel) { return WEIGHTS + panel * WEIGHT_BYTES; }
    static constexpr int parts(uint32_t round) { return OF_TOKENS + round % SPLIT_STAGES * PARTS_BYTES; }
    // Eight columns of a token of a round: chunk `chunk` of the columns of all parts.
    static constexpr int parts_at(uint32_t round, int token, int chunk) {
        return parts(round) + chunk / 8 * PANEL_BYTES + panel_offset(token, chunk % 8);
    }
};

DEVICE float* factors_of(uint32_t round) {
    return reinterpret_cast<float*>(dynamic_shared() + RoundLayout::FACTORS) + round % SPLIT_STAGES * PANEL_TOKENS;
}
DEVICE uint32_t* large_of(uint32_t round) {
    return reinterpret_cast<uint32_t*>(dynamic_shared() + RoundLayout::LARGE) + round % SPLIT_STAGES * (CHUNKS * 2);
}

// A block's share of the work: panels, and rounds of tokens. Only the last round of all may be
// partial.
struct RoundPart {
    int32_t first_panel, panels, panels_of_stream;
    uint32_t rounds, split;
    int64_t first_token;

    explicit RoundPart(const MhcMixHopperBackwardParams& params) {
        panels_of_stream = ceil_div(params.hidden_size, STEP_CHANNELS);
        first_panel = static_cast<int32_t>(blockIdx.x / params.splits) * PANELS;
        panels = minimum(STREAMS * panels_of_stream - first_panel, PANELS);
        split = blockIdx.x % params.splits;
        const int64_t all = ceil_div(params.num_tokens, int64_t{PANEL_TOKENS});
        const int64_t begin = all * split / params.splits, end = all * (split + 1) / params.splits;
        rounds = static_cast<uint32_t>(end - begin);
        first_token = begin * PANEL_TOKENS;
    }
    int64_t token(uint32_t round) const { return first_token + static_cast<int64_t>(round) * PANEL_TOKENS; }
};

// A panel's stream, and the panel's first channel in it.
struct Panel {
    int32_t stream, within;

    Panel(const RoundPart& part, int number)
        : stream((part.first_panel + number) / part.panels_of_stream),
          within((part.first_panel + number) % part.panels_of_stream * STEP_CHANNELS) {}
};

// ---------------------------------------------------------------- channels

DEVICE void copy_rounds(const MhcMixHopperBackwardParams& params, SharedAddress shared, const RoundPart& part) {
    const Panel panels[PANELS] = {{part, 0}, {part, 1}, {part, 2}, {part, 3}};
    for (uint32_t round = 0; round < part.rounds; ++round) {
        const SharedAddress full = shared + RoundLayout::Channels::full(round);
        RoundLayout::Channels::wait_empty(shared, round);
        mbarrier_arrive_expect(full, static_cast<uint32_t>(part.panels) * PANEL_BYTES);
        UNROLL
        for (int panel = 0; panel < PANELS; ++panel) {
            if (panel >= part.panels) break;
            tensor_copy_in(shared + RoundLayout::channels(round, panel), params.streams_map,
                           panels[panel].within * static_cast<int32_t>(sizeof(bf16)), static_cast<int32_t>(part.token(round)),
                           panels[panel].stream, full);
        }
    }
}

// ---------------------------------------------------------------- numbers

// Eight columns of a lane's two tokens of a round. The warp of the first columns loads the
// factors, too. Zeros after the last token.
struct TokenNumbers {
    Weights columns[2];
    float factor[2];

    void load(const MhcMixHopperBackwardParams& params, int64_t first_token, int chunk) {
        UNROLL
        for (int second = 0; second < 2; ++second) {
            const int64_t token = first_token + lane_id() + second * static_cast<int>(WARP_SIZE);
            const bool exists = token < params.num_tokens;
            const float* const own = params.numbers + (exists ? token : 0) * NUMBERS;
            UNROLL
            for (int e = 0; e < PIECE; ++e) columns[second].values[e] = 0.0f;
            factor[second] = 0.0f;
            if (!exists) continue;
            load_elements<PIECE>(own + chunk * PIECE, columns[second].values);
            if (chunk == 0) factor[second] = own[COLUMNS];
        }
    }
    // Stores their parts; large values count as zeros.
    void store(SharedAddress shared, uint32_t round, int chunk) {
        UNROLL
        for (int second = 0; second < 2; ++second) {
            const int token = lane_id() + second * static_cast<int>(WARP_SIZE);
            bool large = false;
            UNROLL
            for (int e = 0; e < PIECE; ++e) large |= is_large(columns[second].values[e]);
            const uint32_t tokens = __ballot_sync(FULL_WARP, large);
            if (lane_id() == 0) large_of(round)[2 * chunk + second] = tokens;
            UNROLL
            for (int e = 0; e < PIECE; ++e) columns[second].values[e] = large ? 0.0f : columns[second].values[e];
            Vec16 vectors[PARTS];
            split<split_finite_pair>(columns[second], vectors);
            UNROLL
            for (int part = 0; part < PARTS; ++part)
                store_shared_vec16(shared + RoundLayout::parts_at(round, token, CHUNKS * part + chunk), vectors[part]);
            if (chunk == 0) factors_of(round)[token] = factor[second];
        }
    }
};

DEVICE void split_rounds(const MhcMixHopperBackwardParams& params, SharedAddress shared, const RoundPart& part, int chunk) {
    TokenNumbers numbers;
    if (part.rounds > 0) numbers.load(params, part.token(0), chunk);
    for (uint32_t round = 0; round < part.rounds; ++round) {
        RoundLayout::Numbers::wait_empty(shared, round);
        numbers.store(shared, round, chunk);
        // The fence is here, where nothing is in flight that it would wait for: no loads of the
        // lane, no stores of consumers.
        fence_async_proxy();
        // Each lane arrives for its own stores: racecheck does not see that one lane's arrival
        // covers its warp.
        mbarrier_arrive(shared + RoundLayout::Numbers::full(round));
        if (round + 1 < part.rounds) numbers.load(params, part.token(round + 1), chunk);
    }
}

// ---------------------------------------------------------------- weights

// The operand of dv. Slice i has columns 0 to 15 of part i. The next ones have columns 16 to 23:
// of parts 0 and 1, then of parts 2 and 0. Row row_of_weight(column, part) has that part of the
// column. The first part of the last columns is there twice.
DEVICE int row_of_weight(int column, int part) {
    if (column < 16) return 16 * part + column;
    return 48 + 8 * part + column - 16;
}
constexpr int SECOND_FIRST_PART = 72;  // row of column 16
static_assert(SECOND_FIRST_PART + 8 == 16 * SLICES, "rows of all slices");

// The weights of a warpgroup's panel. Returns whether one of the thread's weights is not split
// exactly. Zeros after the stream's end.
DEVICE bool bring_weights(const MhcMixHopperBackwardParams& params, const Panel& panel, SharedAddress weights) {
    const int32_t within = panel.within;
    bool irregular = false;
    for (int task = threadIdx.x % WARPGROUP_SIZE; task < COLUMNS * 8; task += WARPGROUP_SIZE) {
        const int column = task / 8, chunk = task % 8;
        const float* const fn =
            params.fn + (static_cast<int64_t>(column) * STREAMS + panel.stream) * params.hidden_size + within;
        Vec16 vectors[PARTS];
        UNROLL
        for (int pair = 0; pair < PIECE / 2; ++pair) {
            const int channel = channel_of(chunk, pair);
            float two[2] = {};
            if (within + channel < params.hidden_size) load_elements<2>(fn + channel, two);
            irregular |= is_irregular(two[0]) || is_irregular(two[1]);
            uint32_t words[PARTS];
            split_finite_pair(1.0f / WEIGHT_SCALE * two[0], 1.0f / WEIGHT_SCALE * two[1], words);
            UNROLL
            for (int i = 0; i < PARTS; ++i) vectors[i].w[pair] = words[i];
        }
        UNROLL
        for (int i = 0; i < PARTS; ++i)
            store_shared_vec16(weights + panel_offset(row_of_weight(column, i), chunk), vectors[i]);
        if (column >= 16) store_shared_vec16(weights + panel_offset(SECOND_FIRST_PART + column - 16, chunk), vectors[0]);
    }
    return irregular;
}

// ---------------------------------------------------------------- products

// A warpgroup's panel of a block.
struct PanelWarp {
    const MhcMixHopperBackwardParams& params;
    const RoundPart& part;
    SharedAddress shared;
    int panel;
    Panel own;
    int row;         // the lane's first token of a round
    bool irregular;  // a weight of the panel

    int32_t channel(int half) const { return own.within + own_piece(half) * PIECE; }

    // g fn of a round, the smallest products first. A lane loads each part of g once, two chunks
    // of eight columns at a time.
    void start_dv(uint32_t round, float (&dv)[8][4]) const {
        // ldmatrix rows are in the order of the lanes' tokens.
        const int token = row - row_of(lane_id() / 4) + row_of(lane_id() % 8) + lane_id() / 8 % 2 * (WARP_TOKENS / 2);
        const int second = lane_id() / WARP_TOKENS;
        uint32_t g[6][4];
        const auto take = [&](uint32_t(&to)[4], int low, int high) {
            ldmatrix_x4(to, shared + RoundLayout::parts_at(round, token, second == 0 ? low : high));
        };
        take(g[0], 6, 7);
        take(g[1], 3, 4);
        take(g[2], 2, 8);
        take(g[3], 5, 5);
        take(g[4], 0, 1);
        take(g[5], 2, 2);
        const uint64_t weights = matrix_descriptor(shared + RoundLayout::weights(panel), 0, 1024);
        const auto add = [&](int which, int slice, bool accumulate) {
            wgmma_registers<true>(dv, g[which], descriptor_advance(weights, slice * SLICE_BYTES), accumulate);
        };
        wgmma_fence();
        add(0, 0, false);
        add(1, 1, true);
        add(1, 0, true);
        add(2, 4, true);
        add(3, 3, true);
        add(4, 2, true);
        add(4, 1, true);
        add(4, 0, true);
        add(5, 3, true);
        wgmma_commit();
    }
    // g^T v of a round for all parts of g, from zero.
    void start_dfn(uint32_t round, float (&products)[PARTS * TILES<COLUMNS>][4]) const {
        const uint64_t channels = matrix_descriptor(shared + RoundLayout::channels(round, panel), 0, 1024);
        const uint64_t numbers = matrix_descriptor(shared + RoundLayout::parts(round), PANEL_BYTES, 1024);
        wgmma_fence();
        UNROLL
        for (int k = 0; k < PANEL_TOKENS / 16; ++k)
            wgmma_shared<true, true>(products, descriptor_advance(channels, 2048 * k), descriptor_advance(numbers, 2048 * k), k > 0);
        wgmma_commit();
    }
    // dv of the lane's two tokens, eight channels of each half of the panel.
    void store_dv(uint32_t round, const float (&products)[8][4]) const {
        UNROLL
        for (int second = 0; second < 2; ++second) {
            const int of_round = row + second * (WARP_TOKENS / 2);
            const int64_t token = part.token(round) + of_round;
            const float factor = factors_of(round)[of_round];
            bf16* const to = params.dstreams + token * params.dstreams_token_stride + own.stream * params.dstreams_stream_stride;
            UNROLL
            for (int half = 0; half < 2; ++half) {
                float v[PIECE], dv[PIECE];
                unpack<bf16>(load_shared_vec16(shared + RoundLayout::channels(round, panel) + panel_offset(of_round, own_piece(half))), v);
                UNROLL
                for (int e = 0; e < PIECE; ++e) dv[e] = products[4 * half + e / 2][2 * second + e % 2] - factor * v[e];
                if (token < params.num_tokens && channel(half) < params.hidden_size)
                    store_vec16_global(to + channel(half), pack<bf16>(dv));
            }
        }
    }

    float number(uint32_t round, int token, int column) const { return params.numbers[(part.token(round) + token) * NUMBERS + column]; }

    // dv of one token for the panel's channels in plain fp32, a piece a lane, for any values.
    void store_plainly(uint32_t round, int token) const {
        const int32_t channel = own.within + lane_id() * PIECE;
        if (lane_id() >= STEP_CHANNELS / PIECE || channel >= params.hidden_size) return;
        const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size;
        const float* const fn = params.fn + static_cast<int64_t>(own.stream) * params.hidden_size + channel;
        float v[PIECE], dv[PIECE] = {};
        unpack<bf16>(load_shared_vec16(shared + RoundLayout::channels(round, panel) + panel_offset(token, lane_id())), v);
        UNROLL_BY(1)
        for (int q = 0; q < COLUMNS; ++q) {
            const float g = number(round, token, q);
            UNROLL
            for (int e = 0; e < PIECE; ++e) dv[e] += fn[q * channels + e] * g;
        }
        UNROLL
        for (int e = 0; e < PIECE; ++e) dv[e] -= factors_of(round)[token] * v[e];
        store_vec16_global(params.dstreams + (part.token(round) + token) * params.dstreams_token_stride +
                               own.stream * params.dstreams_stream_stride + channel,
                           pack<bf16>(dv));
    }
    // After a round: adds to dfn the columns that counted as zeros, and stores dv of such tokens
    // again. If a weight is irregular it stores dv of all tokens again.
    void mend(uint32_t round, Sums<COLUMNS>& sums) const {
        const uint32_t* const large = large_of(round);
        const int first = static_cast<int>(warp_id() % 4) * WARP_TOKENS;
        const int64_t left = params.num_tokens - part.token(round);
        // Other lanes stored what is stored again here.
        __syncwarp();
        UNROLL_BY(1)
        for (int token = 0; token < PANEL_TOKENS && token < left; ++token) {
            bool any = irregular;
            UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) any |= large[2 * chunk + token / 32] >> token % 32 & 1;
            if (any && token >= first && token < first + WARP_TOKENS) store_plainly(round, token);
            UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                if (!(large[2 * chunk + token / 32] >> token % 32 & 1)) continue;
                UNROLL
                for (int c = 0; c < 4; ++c) {
                    const int piece = first / PIECE + c / 2;
                    const auto* const eight = reinterpret_cast<const bf16*>(
                        dynamic_shared() + RoundLayout::channels(round, panel) + panel_offset(token, piece));
                    const int column = PIECE * chunk + 2 * (lane_id() % 4) + c % 2;
                    sums.products[chunk][c] += to_float(eight[lane_id() / 4]) * number(round, token, column);
                }
            }
        }
    }
    bool has_to_mend(uint32_t round) const {
        uint32_t any = irregular;
        UNROLL
        for (int i = 0; i < 2 * CHUNKS; ++i) any |= large_of(round)[i];
        return any != 0;
    }

    void take_round(uint32_t round, Sums<COLUMNS>& sums) const {
        RoundLayout::Channels::wait_full(shared, round);
        RoundLayout::Numbers::wait_full(shared, round);
        float dv[8][4], products[PARTS * TILES<COLUMNS>][4];
        start_dv(round, dv);
        wgmma_wait<0>();
        wgmma_hold(dv);
        // Not sooner: a lane's fragments of g hold the registers. Other warpgroups run MMAs
        // meanwhile.
        start_dfn(round, products);
        store_dv(round, dv);
        wgmma_wait<0>();
        wgmma_hold(products);
        add_parts<COLUMNS>(products, sums);
        if (has_to_mend(round)) mend(round, sums);
        __syncwarp();
        if (lane_id() == 0) {
            mbarrier_arrive(shared + RoundLayout::Channels::empty(round));
            mbarrier_arrive(shared + RoundLayout::Numbers::empty(round));
        }
    }
    void store_dfn(const Sums<COLUMNS>& sums) const {
        const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size;
        float* const partial = params.dfn_partials + part.split * COLUMNS * channels + own.stream * int64_t{params.hidden_size};
        UNROLL
        for (int c = 0; c < 4; ++c) {
            const int32_t channel = own.within + static_cast<int>(warp_id() % 4) * 16 + lane_id() / 4 + c / 2 * 8;
            if (channel >= params.hidden_size) continue;
            UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                partial[(PIECE * chunk + 2 * (lane_id() % 4) + c % 2) * channels + channel] = sums.products[chunk][c];
        }
    }
};

DEVICE void take_rounds(const MhcMixHopperBackwardParams& params, SharedAddress shared, const RoundPart& part, int panel) {
    const Panel own(part, panel);
    const bool irregular = bring_weights(params, own, shared + RoundLayout::weights(panel));
    auto* const of_warps = reinterpret_cast<uint32_t*>(dynamic_shared() + RoundLayout::IRREGULAR) + 4 * panel;
    const bool of_warp = __any_sync(FULL_WARP, irregular);
    if (lane_id() == 0) of_warps[warp_id() % 4] = of_warp;
    fence_async_proxy();
    named_barrier_sync(1 + panel, WARPGROUP_SIZE);
    const int row = static_cast<int>(warp_id() % 4) * WARP_TOKENS + row_of(lane_id() / 4);
    const Vec16 any = load_vec16(of_warps);
    const PanelWarp warp{params, part, shared, panel, own, row, (any.w[0] | any.w[1] | any.w[2] | any.w[3]) != 0};
    Sums<COLUMNS> sums = {};
    for (uint32_t round = 0; round < part.rounds; ++round) warp.take_round(round, sums);
    warp.store_dfn(sums);
}

DEVICE void initialise_round_barriers(SharedAddress shared, const RoundPart& part) {
    if (threadIdx.x > 0) return;
    const uint32_t warps = static_cast<uint32_t>(part.panels) * (WARPGROUP_SIZE / WARP_SIZE);
    RoundLayout::Channels::initialise(shared, 1, warps);
    RoundLayout::Numbers::initialise(shared, SPLIT_WARPS * WARP_SIZE, warps);
    fence_mbarrier_init();
}

SHARED_MEMORY(mhc_mix_backward_streams_hopper, RoundLayout::BYTES)

KERNEL(mhc_mix_backward_streams_hopper, MhcMixHopperBackwardParams, BACKWARD_THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const RoundPart part(params);
    initialise_round_barriers(shared, part);
    __syncthreads();
    const int32_t warp = uniform(warp_id()), panel = warp / 4;
    if (panel < PANELS) {
        Registers::take();
        if (panel < part.panels) take_rounds(params, shared, part, panel);
        return;
    }
    Registers::give();
    if (warp == CONSUMER_THREADS / WARP_SIZE) {
        if (lane_id() == 0) copy_rounds(params, shared, part);
    } else {
        split_rounds(params, shared, part, warp - CONSUMER_THREADS / WARP_SIZE - 1);
    }
}
