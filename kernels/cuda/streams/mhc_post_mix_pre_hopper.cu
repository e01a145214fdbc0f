// mhc_post_mix_pre_project of mhc_post_mix_pre.cu, which has the formulas, for sm_90a: the streams
// after a sublayer and their projection, for any number of tokens. It has the bits of mhc_post and
// of mhc_mix_project_hopper (projection_hopper.h).
//
// A block takes 256 tokens and a split of the channels, 64 of each stream at a time (a group:
// STREAMS steps). A group's weights are split once for all tokens. Two consumer warpgroups take 64
// tokens each, twice (a turn). One producer warp issues the TMA loads of a turn: the same 64
// channels of the four streams and of y, a stage of 40 KiB, as far ahead as a consumer has stages.
// Six warps split weights. A consumer loads a token's pieces once and computes all destinations.
// These are the fragments of its MMAs, and it stores them from registers. `out` may be `streams`:
// a group's sources have arrived when its destinations are stored, and no other group uses these
// addresses.
//
// Floors for a bf16 token of d channels: 18 d bytes (mhc_post and mhc_mix apart: 26 d); at 4.24
// TB/s 997 us for 32768 tokens of 7168 channels. A group has 16100 cycles of an SM's share of
// memory at 1.75 GHz. Issue takes 6000: about 2600 instructions of each of eight consumer warps
// and 520 of each of six that split, four a cycle. MMA and shared memory, at which 160 KiB arrive
// and are read, take less.
// Limit: stores interfere with loads in memory (DRAM at 69 % of its rate); consumers wait for
// their sources. 1270 us on one H200, 78 % of a copy of what moves. A block stores 128 bytes of
// each of 1024 rows, and the adjacent ones a group later, after 9 us.
//
// Launch: ceil(num_tokens / TILE_TOKENS) * splits blocks.
// What was tried: kernels/docs/mhc_post_mix_pre.md.
#include "coefficients.h"
#include "projection_hopper.h"

constexpr int MAKERS = 2, TURNS = 2;
static_assert(MAKERS * TURNS * CONSUMER_TOKENS == TILE_TOKENS, "a block of projection_hopper.h");
constexpr int MAKER_THREADS = MAKERS * WARPGROUP_SIZE;
// Two more warpgroups: one warp that issues TMA loads, the warps that split weights, and one idle
// warp.
constexpr int MADE_THREADS = MAKER_THREADS + 2 * WARPGROUP_SIZE;
static_assert(COPY_THREADS + SPLIT_THREADS <= 2 * WARPGROUP_SIZE, "warps for all of it");
constexpr int MAKER_STAGES = 2;               // turns of one consumer that are there or on their way
constexpr int MADE_WEIGHT_STAGES = 5;         // steps of a group, which its turns need together, and one more
constexpr int SOURCES = STREAMS + 1;          // the streams, and y
constexpr int OF_TOKEN = STREAMS + STREAMS * STREAMS;  // coefficients: post, then comb by sources

using Registers = DividedRegisters<2, 56, 2, 200>;

struct MhcPostMixPreHopperParams {
    const float* post;  // [num_tokens, STREAMS]
    const float* comb;  // [num_tokens, source, destination]
    const float* fn;  // [COLUMNS, STREAMS * hidden_size], of the next site
    bf16* out; int64_t out_token_stride; int64_t out_destination_stride;  // as streams, which it may be
    float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the channels
    TensorMap streams_map;  // [STREAMS, num_tokens, bytes], boxes of CONSUMER_TOKENS rows
    TensorMap y_map;  // [num_tokens, bytes], the same boxes
};

// A turn of a consumer: 64 tokens of a group. `number` counts all turns of a consumer.
struct Turn {
    uint32_t number, consumer;
};

// Each consumer has its own stages.
struct MadeLayout {
    static constexpr int STAGES = MAKERS * MAKER_STAGES, STAGE_BYTES = SOURCES * PANEL_BYTES;
    struct Plan {
        uint8_t stages[STAGES][STAGE_BYTES];
        float coefficients[TILE_TOKENS][OF_TOKEN];
        WeightPlan<COLUMNS, MADE_WEIGHT_STAGES> weight;
        uint64_t full[STAGES], empty[STAGES];  // mbarriers
    };
    static constexpr int COEFFICIENTS = OFFSET_OF(Plan, coefficients), BYTES = sizeof(Plan);
    static constexpr int FULL = OFFSET_OF(Plan, full), EMPTY = OFFSET_OF(Plan, empty);
    using Weight = WeightLayout<COLUMNS, OFFSET_OF(Plan, weight), MADE_WEIGHT_STAGES>;
    static_assert(BYTES <= 227 * 1024, "stages exceed shared memory");

    static constexpr int place(Turn turn) { return turn.consumer * MAKER_STAGES + turn.number % MAKER_STAGES; }
    static constexpr int stage(Turn turn) { return place(turn) * STAGE_BYTES; }
    static constexpr int full(Turn turn) { return FULL + 8 * place(turn); }
    static constexpr int empty(Turn turn) { return EMPTY + 8 * place(turn); }
    // Parity of the phase in which a turn's sources have arrived.
    static constexpr uint32_t phase(Turn turn) { return turn.number / MAKER_STAGES & 1; }
};

// ---------------------------------------------------------------- sources

DEVICE void copy_sources(const MhcPostMixPreHopperParams& params, SharedAddress shared, const Part& part) {
    const uint32_t groups = part.steps.count / STREAMS;
    for (uint32_t group = 0; group < groups; ++group) {
        const int32_t column = static_cast<int32_t>(part.steps.group(group) * STEP_CHANNELS * sizeof(bf16));
        for (uint32_t tokens = 0; tokens < part.consumers; ++tokens) {
            const Turn turn{group * TURNS + tokens / MAKERS, tokens % MAKERS};
            const SharedAddress stage = shared + MadeLayout::stage(turn), full = shared + MadeLayout::full(turn);
            const int32_t row = static_cast<int32_t>(part.first_token + tokens * CONSUMER_TOKENS);
            mbarrier_wait(shared + MadeLayout::empty(turn), MadeLayout::phase(turn) ^ 1);
            mbarrier_arrive_expect(full, MadeLayout::STAGE_BYTES);
            for (int32_t stream = 0; stream < STREAMS; ++stream)
                tensor_copy_in(stage + stream * PANEL_BYTES, params.streams_map, column, row, stream, full);
            tensor_copy_in(stage + STREAMS * PANEL_BYTES, params.y_map, column, row, 0, full);
        }
    }
}

// All consumers load the coefficients of the block's tokens into shared memory; zeros after the
// last token.
DEVICE void bring_coefficients(const MhcPostMixPreHopperParams& params, float* coefficients, int64_t first_token) {
    const int64_t left = params.num_tokens - first_token;
    for (int number = threadIdx.x; number < TILE_TOKENS * OF_TOKEN; number += MAKER_THREADS) {
        const int token = number / OF_TOKEN, own = number % OF_TOKEN;
        float value = 0.0f;
        if (token < left)
            value = own < STREAMS ? params.post[(first_token + token) * STREAMS + own]
                                  : params.comb[(first_token + token) * (STREAMS * STREAMS) + own - STREAMS];
        coefficients[number] = value;
    }
    named_barrier_sync(1, MAKER_THREADS);
}

// ---------------------------------------------------------------- destinations

// A lane's part of a group for its two tokens: loads the pieces of every source, computes and
// stores those of every destination.
struct Maker {
    const MhcPostMixPreHopperParams& params;
    const float* coefficients;  // of the block's tokens
    int64_t first_token;        // of the block
    int row;                    // of the lane's first token, in the block

    // The fragments of all destinations. Zeros after a stream's end, whatever a coefficient is.
    void make(SharedAddress stage, int32_t first_channel, Fragments (&made)[STREAMS]) const {
        UNROLL
        for (int second = 0; second < 2; ++second) {
            const int of_block = row + second * (WARP_TOKENS / 2), of_stage = of_block % CONSUMER_TOKENS;
            float own[OF_TOKEN];
            UNROLL
            for (int i = 0; i <= STREAMS; ++i)
                unpack<float>(load_vec16(coefficients + of_block * OF_TOKEN + i * STREAMS), own + i * STREAMS);
            UNROLL
            for (int half = 0; half < 2; ++half) {
                const int piece = own_piece(half);
                float x[STREAMS][PIECE], y[PIECE];
                UNROLL
                for (int i = 0; i < STREAMS; ++i)
                    unpack<bf16>(load_shared_vec16(stage + i * PANEL_BYTES + panel_offset(of_stage, piece)), x[i]);
                unpack<bf16>(load_shared_vec16(stage + STREAMS * PANEL_BYTES + panel_offset(of_stage, piece)), y);
                const bool exists = first_channel + piece * PIECE < params.hidden_size;
                UNROLL
                for (int j = 0; j < STREAMS; ++j) {
                    float out[PIECE];
                    mix_destination(x, y, own, own + STREAMS, j, out);
                    made[j].of[half][second] = exists ? pack<bf16>(out) : Vec16{};
                }
            }
        }
    }
    void store(int32_t first_channel, const Fragments (&made)[STREAMS]) const {
        UNROLL
        for (int second = 0; second < 2; ++second) {
            const int64_t token = first_token + row + second * (WARP_TOKENS / 2);
            bf16* to = params.out + token * params.out_token_stride + first_channel + own_piece(0) * PIECE;
            UNROLL
            for (int j = 0; j < STREAMS; ++j, to += params.out_destination_stride) {
                UNROLL
                for (int half = 0; half < 2; ++half) {
                    const int32_t channel = first_channel + own_piece(half) * PIECE;
                    if (token >= params.num_tokens || channel >= params.hidden_size) continue;
                    store_vec16_global(to + half * (STEP_CHANNELS / 2), made[j].of[half][second]);
                }
            }
        }
    }
};

// A turn: computes its streams, stores them and adds their projection to the sums.
DEVICE void take_turn(const Maker& maker, SharedAddress shared, const Part& part, uint32_t group, Turn turn, bool gives_up,
                      Sums<COLUMNS>& sums) {
    using Weight = MadeLayout::Weight;
    const int32_t first_channel = static_cast<int32_t>(part.steps.group(group)) * STEP_CHANNELS;
    const uint32_t first_step = group * STREAMS;
    Fragments made[STREAMS];
    mbarrier_wait(shared + MadeLayout::full(turn), MadeLayout::phase(turn));
    maker.make(shared + MadeLayout::stage(turn), first_channel, made);
    // All lanes of the warp have loaded.
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared + MadeLayout::empty(turn));
    if (turn.number % TURNS == 0) {
        for (uint32_t step = first_step; step < first_step + STREAMS; ++step)
            Weight::Ring::wait_full(shared, step);
        // One fence for all steps and turns.
        fence_async_proxy();
    }
    maker.store(first_channel, made);
    Sums<COLUMNS> of_group = {};
    UNROLL
    for (int j = 0; j < STREAMS; ++j) add_hopper_step<COLUMNS, Weight>(made[j], shared, first_step + j, gives_up, of_group, [] {});
    add_group(of_group, sums);
}

DEVICE void make_streams(const MhcPostMixPreHopperParams& params, SharedAddress shared, const float* coefficients, const Part& part,
                         uint32_t consumer) {
    constexpr int APART = MAKERS * CONSUMER_TOKENS;  // from a turn's tokens to the next one's
    const int row = static_cast<int>(consumer) * CONSUMER_TOKENS + warp_id() % 4 * WARP_TOKENS + row_of(lane_id() / 4);
    const uint32_t turns = (part.consumers - consumer + MAKERS - 1) / MAKERS;
    // The sums of this turn and of the other one. They are swapped after each turn, so that the
    // code of a turn exists once.
    Sums<COLUMNS> sums = {}, others = {};
    for (uint32_t group = 0; group * STREAMS < part.steps.count; ++group) {
        UNROLL_BY(1)
        for (uint32_t number = 0; number < turns; ++number) {
            const Maker maker{params, coefficients, part.first_token, row + static_cast<int>(number) * APART};
            take_turn(maker, shared, part, group, Turn{group * TURNS + number, consumer}, number + 1 == turns, sums);
            const Sums<COLUMNS> own = sums;
            sums = turns == TURNS ? others : own;
            others = own;
        }
    }
    for (uint32_t number = 0; number < turns; ++number) {
        store_sums<COLUMNS>(params, blockIdx.x % params.splits, part.first_token + row + static_cast<int>(number) * APART, sums);
        sums = others;
    }
}

DEVICE void initialise_made_barriers(SharedAddress shared, const Part& part) {
    constexpr uint32_t WARPS = WARPGROUP_SIZE / WARP_SIZE;
    if (threadIdx.x > 0) return;
    for (int stage = 0; stage < MadeLayout::STAGES; ++stage) {
        mbarrier_init(shared + MadeLayout::FULL + 8 * stage, 1);
        mbarrier_init(shared + MadeLayout::EMPTY + 8 * stage, WARPS);
    }
    MadeLayout::Weight::initialise(shared, minimum(part.consumers, static_cast<uint32_t>(MAKERS)) * WARPS);
    fence_mbarrier_init();
}

SHARED_MEMORY(mhc_post_mix_pre_project_hopper, MadeLayout::BYTES)

KERNEL(mhc_post_mix_pre_project_hopper, MhcPostMixPreHopperParams, MADE_THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    auto* const coefficients = reinterpret_cast<float*>(dynamic_shared() + MadeLayout::COEFFICIENTS);
    const Part part(params);
    initialise_made_barriers(shared, part);
    __syncthreads();
    const int32_t warp = uniform(warp_id()), consumer = warp / 4;
    if (consumer < MAKERS) {
        Registers::take();
        bring_coefficients(params, coefficients, part.first_token);
        if (static_cast<uint32_t>(consumer) < part.consumers) make_streams(params, shared, coefficients, part, consumer);
        return;
    }
    Registers::give();
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - MAKER_THREADS - COPY_THREADS;
    if (thread < 0) {
        if (lane_id() == 0) copy_sources(params, shared, part);
    } else if (thread < SPLIT_THREADS) {
        produce_weights<COLUMNS, MadeLayout::Weight>(params, shared, part, thread);
    }
}
