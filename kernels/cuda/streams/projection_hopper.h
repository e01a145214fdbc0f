// The projection of projection.h for sm_90a, of mhc_mix_hopper.cu: warpgroup matrix products, and weights that are split once for 256
// tokens. What it leaves is laid out as there. mhc_post_mix_pre_hopper.cu has the weights and the products of a step from here, and
// streams that it makes itself: steps are in the order of projection.h, 64 channels of each stream one after the other.
//
// A block takes 256 tokens and a part of the channels, 64 at a time (a step). Four warpgroups of consumers have 64 tokens each.
// Of the warps behind them one has boxes of the streams copied, 64 channels of 256 tokens, as far ahead as there are stages; six
// split the weights of each step, a chunk of 8 channels of a column each thread, and leave them as an operand. (A warp alone
// takes some four cycles an instruction: three warps with two chunks a thread took longer than the streams' way, and consumers
// waited for them 47 % of the time.)
//
// A box takes 128 bytes of each of 256 rows that lie 8 to 57 KB apart; the next step takes those of the next stream. Measured on one H200,
// 8192 tokens of 7168 and 4096 channels with their coefficients, one change after the other:
//
//     158   96.3 us   a proxy fence by those who split weights: it waited for their loads of the next steps as well, a latency of
//                     the second-level cache in every step
//     152.2 93.1      the fence by consumers, who have no loads under way
//     144.8 89.1      places of weights counted on: a division for each step was a fifth of what those who split execute
//     142.5 87.1      four stages of streams and six of weights in the place of six and three
//     140.0 85.3      coefficients by four lanes a token (mhc_mix.cu), and launches that overlap
//
// Beside the last: five stages of streams 141.7 and 87.1, three and nine of weights 140.4 and 85.4; boxes of two steps asked for
// together 142.7 and 87.7. Before all of these a second-level cache that was asked for 256 bytes at a time and not for 128 (the
// runtime's tensor maps) gave 174 and 105.5. DeepGEMM's projection alone took 128.3 and 76.3 beside the first.
//
// The three parts of the weights are columns of one product, 64 x 72 x 16 of 24 columns, so that the tensor cores are
// given a wide one, and sums of unlike size do not meet in one accumulator: a step's product of each part is four
// instructions from zero, and fp32 adds the parts, the smallest first, and then the steps.
//
// A consumer reads the streams from shared memory once, into its fragments of A, of which it makes the sum of squares,
// too; the stage is free as soon as they are there. As in projection.h a lane reads 16 bytes of each of two tokens: the
// channel that an instruction takes for its k-th is free as long as the weights agree (`channel_of`). A warp's tokens
// stand in another order (`row_of`) so that eight lanes, who read of two rows, meet in no bank.
#pragma once

#include "hopper.h"
#include "panels.h"
#include "projection.h"

constexpr int CONSUMERS = 4;  // warpgroups
constexpr int CONSUMER_TOKENS = 64, TILE_TOKENS = CONSUMERS * CONSUMER_TOKENS;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_SIZE;
constexpr int COPY_THREADS = WARP_SIZE, SPLIT_THREADS = 6 * WARP_SIZE;
constexpr int HOPPER_PROJECTION_THREADS = CONSUMER_THREADS + COPY_THREADS + SPLIT_THREADS;
constexpr int STEP_CHANNELS = 64;  // a row of 128 bytes
constexpr int STREAM_STAGES = 4, WEIGHT_STAGES = 6;

struct HopperProjectionParams {
    const float* fn;  // [COLUMNS, STREAMS * hidden_size]
    float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the channels
    TensorMap streams_map;  // [STREAMS, num_tokens, bytes], boxes of TILE_TOKENS rows
};
PARAMS_LAYOUT(HopperProjectionParams, fn, partials, num_tokens, hidden_size, splits, streams_map)

// Where the operands of STAGES steps lie in dynamic shared memory, from BEGIN on, a multiple of 1024, and the mbarriers that say that
// they are there, and are no longer needed.
template <int COLUMNS, int BEGIN, int STAGES>
struct WeightLayout {
    static constexpr int ROWS = PARTS * 8 * TILES<COLUMNS>;  // those of a part one behind the other
    static constexpr int WEIGHT_BYTES = ROWS * 128;
    static constexpr int SPLIT = BEGIN + STAGES * WEIGHT_BYTES;  // mbarriers [STAGES]
    static constexpr int USED = SPLIT + 8 * STAGES;
    static constexpr int END = USED + 8 * STAGES;

    static constexpr int weight(uint32_t step) { return BEGIN + step % STAGES * WEIGHT_BYTES; }
    static constexpr int split(uint32_t step) { return SPLIT + 8 * (step % STAGES); }
    static constexpr int used(uint32_t step) { return USED + 8 * (step % STAGES); }
    // Parity of the phase in which a step's weights have come. What lay there before is given up in the phase before this one.
    static constexpr uint32_t phase(uint32_t step) { return step / STAGES & 1; }

    // By one thread of a block whose `warps` use them.
    static void initialise(SharedAddress shared, uint32_t warps) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + split(stage), SPLIT_THREADS / WARP_SIZE);
            mbarrier_init(shared + used(stage), warps);
        }
    }
};

// Where everything lies.
template <int COLUMNS>
struct ProjectionLayout {
    static constexpr int STREAM_BYTES = TILE_TOKENS * 128;
    using Weight = WeightLayout<COLUMNS, STREAM_STAGES * STREAM_BYTES, WEIGHT_STAGES>;
    static constexpr int FULL = Weight::END;  // mbarriers [STREAM_STAGES]
    static constexpr int EMPTY = FULL + 8 * STREAM_STAGES;
    static constexpr int BYTES = EMPTY + 8 * STREAM_STAGES;
    static_assert(BYTES <= 227 * 1024, "stages exceed shared memory");

    static constexpr int stream(uint32_t step) { return step % STREAM_STAGES * STREAM_BYTES; }
    static constexpr int full(uint32_t step) { return FULL + 8 * (step % STREAM_STAGES); }
    static constexpr int empty(uint32_t step) { return EMPTY + 8 * (step % STREAM_STAGES); }
};

// Parity of the phase in which a step's streams have come, as that of the weights.
DEVICE uint32_t stream_phase(uint32_t step) { return step / STREAM_STAGES & 1; }

// A block's part of the work: TILE_TOKENS tokens, and steps.
struct Part {
    int64_t first_token;
    Steps steps;
    uint32_t consumers;  // that have tokens

    template <typename Params>
    explicit Part(const Params& params)
        : first_token(static_cast<int64_t>(blockIdx.x / params.splits) * TILE_TOKENS),
          steps(params.hidden_size, blockIdx.x % params.splits, params.splits) {
        const int64_t tokens = minimum(params.num_tokens - first_token, int64_t{TILE_TOKENS});
        consumers = static_cast<uint32_t>(ceil_div(tokens, int64_t{CONSUMER_TOKENS}));
    }
};

// Where a step begins: a stream and a channel of it. Steps are counted on, not divided.
struct Place {
    int32_t stream = 0, within, apart;

    explicit Place(const Part& part)
        : within(static_cast<int32_t>(part.steps.split) * STEP_CHANNELS), apart(static_cast<int32_t>(part.steps.splits) * STEP_CHANNELS) {}
    void next() {
        if (++stream < STREAMS) return;
        stream = 0;
        within += apart;
    }
};

// ---------------------------------------------------------------- streams

template <int COLUMNS>
DEVICE void copy_streams(const HopperProjectionParams& params, SharedAddress shared, const Part& part) {
    using Layout = ProjectionLayout<COLUMNS>;
    Place place(part);
    for (uint32_t step = 0; step < part.steps.count; ++step, place.next()) {
        const SharedAddress full = shared + Layout::full(step);
        mbarrier_wait(shared + Layout::empty(step), stream_phase(step) ^ 1);
        mbarrier_arrive_expect(full, Layout::STREAM_BYTES);
        tensor_copy_in(shared + Layout::stream(step), params.streams_map, place.within * sizeof(bf16),
                       static_cast<int32_t>(part.first_token), place.stream, full);
    }
}

// ---------------------------------------------------------------- weights

// The channel of a step whose weights lie first in pair `pair` of a column's chunk of 16 bytes: in instruction
// chunk / 2, lane `pair` of a row has its two neighbouring channels in word 2 (chunk / 2 % 2) + chunk % 2 of the piece
// that it read of half chunk / 4.
DEVICE constexpr int channel_of(int chunk, int pair) { return 32 * (chunk / 4) + PIECE * pair + 2 * (chunk % 4); }

// What a thread brings of the steps, if anything: the same chunk of the same column of each.
template <int COLUMNS>
struct Chunk {
    static constexpr int ALL = 8 * TILES<COLUMNS> * 8;
    static_assert(ALL <= SPLIT_THREADS, "a chunk for each thread");
    const float* fn;  // of the column
    int32_t hidden_size, column, chunk;

    template <typename Params>
    Chunk(const Params& params, int thread)
        : hidden_size(params.hidden_size), column(thread / 8), chunk(thread % 8) {
        fn = params.fn + static_cast<int64_t>(column) * STREAMS * hidden_size;
    }

    // Zeros in columns that there are none of, and behind a stream's end.
    void load(const Place& place, Weights& weights) const {
        const float* const first = fn + (static_cast<int64_t>(place.stream) * hidden_size + place.within);
        const int32_t width = hidden_size - place.within;
        UNROLL
        for (int pair = 0; pair < 4; ++pair) {
            const int channel = channel_of(chunk, pair);
            float two[2] = {};
            if (column < COLUMNS && channel < width) load_elements<2>(first + channel, two);
            weights.values[2 * pair] = two[0];
            weights.values[2 * pair + 1] = two[1];
        }
    }
    void store(const Weights& weights, SharedAddress operand) const {
        if (column >= ALL / 8) return;
        Vec16 vectors[PARTS];
        split_weights(weights, vectors);
        UNROLL
        for (int part = 0; part < PARTS; ++part)
            store_shared_vec16(operand + panel_offset(8 * TILES<COLUMNS> * part + column, chunk), vectors[part]);
    }
};

// Those of the next two steps are on their way while one is split, in registers of their own: nothing is moved, which would
// wait for them. For the same reason there is no fence here: it would wait for them, too. Consumers have it.
template <int COLUMNS, typename Layout, typename Params>
DEVICE void produce_weights(const Params& params, SharedAddress shared, const Part& part, int thread) {
    constexpr uint32_t AHEAD = 2;
    const Chunk<COLUMNS> chunk(params, thread);
    Weights weights[AHEAD];
    Place ahead(part);
    UNROLL
    for (uint32_t step = 0; step < AHEAD; ++step, ahead.next())
        if (step < part.steps.count) chunk.load(ahead, weights[step]);
    for (uint32_t first = 0; first < part.steps.count; first += AHEAD) {
        UNROLL
        for (uint32_t i = 0; i < AHEAD; ++i, ahead.next()) {
            const uint32_t step = first + i;
            if (step >= part.steps.count) break;
            mbarrier_wait(shared + Layout::used(step), Layout::phase(step) ^ 1);
            chunk.store(weights[i], shared + Layout::weight(step));
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Layout::split(step));
            if (step + AHEAD < part.steps.count) chunk.load(ahead, weights[i]);
        }
    }
}

// ---------------------------------------------------------------- products

// The row, of eight, of a lane's first token: eight lanes that read at once have two rows that differ in bit 2, by which
// the swizzle exchanges the halves of a row.
DEVICE int row_of(int group) { return (group & 2) | (group & 1) << 2 | group >> 2; }

// What a lane multiplies in a step.
DEVICE void read_rows(SharedAddress stage, int row, Fragments& fragments) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int second = 0; second < 2; ++second)
            fragments.of[half][second] =
                load_shared_vec16(stage + panel_offset(row + second * (WARP_TOKENS / 2), 4 * half + lane_id() % 4));
    }
}

// Starts the products of a step with all parts of the weights, from zero.
template <int N8>
DEVICE void start_products(const Fragments& fragments, SharedAddress weights, float (&products)[N8][4]) {
    const uint64_t operand = matrix_descriptor(weights, 0, 1024);
    wgmma_fence();
    UNROLL
    for (int k = 0; k < STEP_CHANNELS / 16; ++k) {
        const Vec16 &low = fragments.of[k / 2][0], &high = fragments.of[k / 2][1];
        const int word = k % 2 * 2;
        const uint32_t a[4] = {low.w[word], high.w[word], low.w[word + 1], high.w[word + 1]};
        wgmma_registers<false>(products, a, descriptor_advance(operand, 32 * k), k > 0);
    }
    wgmma_commit();
}

// Adds the parts of a step's products, from the smallest on.
template <int COLUMNS>
DEVICE void add_parts(const float (&products)[PARTS * TILES<COLUMNS>][4], Sums<COLUMNS>& sums) {
    UNROLL
    for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
        UNROLL
        for (int c = 0; c < 4; ++c) {
            float product = products[(PARTS - 1) * TILES<COLUMNS> + tile][c];
            UNROLL
            for (int part = PARTS - 2; part >= 0; --part) product += products[part * TILES<COLUMNS> + tile][c];
            sums.products[tile][c] += 1.0f / WEIGHT_SCALE * product;
        }
    }
}

// Adds what a step gives to the sums, whose weights have come. `meanwhile` is what is done while it is multiplied; `gives_up` says that
// the weights are not needed again.
template <int COLUMNS, typename Layout, typename Meanwhile>
DEVICE void add_hopper_step(const Fragments& fragments, SharedAddress shared, uint32_t step, bool gives_up, Sums<COLUMNS>& sums,
                            Meanwhile meanwhile) {
    float products[PARTS * TILES<COLUMNS>][4];
    start_products(fragments, shared + Layout::weight(step), products);
    meanwhile();
    add_squares(fragments, sums.squares);
    wgmma_wait<0>();
    wgmma_hold(products);
    if (gives_up && lane_id() == 0) mbarrier_arrive(shared + Layout::used(step));
    add_parts<COLUMNS>(products, sums);
}

template <int COLUMNS>
DEVICE void consume(const HopperProjectionParams& params, SharedAddress shared, const Part& part, int consumer) {
    using Layout = ProjectionLayout<COLUMNS>;
    const int row = consumer * CONSUMER_TOKENS + warp_id() % 4 * WARP_TOKENS + row_of(lane_id() / 4);
    Sums<COLUMNS> sums = {};
    for (uint32_t step = 0; step < part.steps.count; ++step) {
        Fragments fragments;
        mbarrier_wait(shared + Layout::full(step), stream_phase(step));
        read_rows(shared + Layout::stream(step), row, fragments);
        mbarrier_wait(shared + Layout::Weight::split(step), Layout::Weight::phase(step));
        fence_async_proxy();
        add_hopper_step<COLUMNS, typename Layout::Weight>(fragments, shared, step, true, sums, [&] {
            // All lanes of the warp have read their rows.
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Layout::empty(step));
        });
    }
    store_sums<COLUMNS>(params, blockIdx.x % params.splits, part.first_token + row, sums);
}

template <int COLUMNS>
DEVICE void initialise_barriers(SharedAddress shared, const Part& part) {
    using Layout = ProjectionLayout<COLUMNS>;
    if (threadIdx.x == 0) {
        const uint32_t warps = part.consumers * (WARPGROUP_SIZE / WARP_SIZE);
        for (uint32_t stage = 0; stage < STREAM_STAGES; ++stage) {
            mbarrier_init(shared + Layout::full(stage), 1);
            mbarrier_init(shared + Layout::empty(stage), warps);
        }
        Layout::Weight::initialise(shared, warps);
        fence_mbarrier_init();
    }
    __syncthreads();
}

template <int COLUMNS>
DEVICE void project_hopper(const HopperProjectionParams& params) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const Part part(params);
    initialise_barriers<COLUMNS>(shared, part);
    const int32_t warp = uniform(warp_id()), consumer = warp / 4;
    if (consumer < CONSUMERS) {
        if (consumer < static_cast<int32_t>(part.consumers)) consume<COLUMNS>(params, shared, part, consumer);
    } else if (warp == CONSUMER_THREADS / WARP_SIZE) {
        if (lane_id() == 0) copy_streams<COLUMNS>(params, shared, part);
    } else {
        const int thread = threadIdx.x - CONSUMER_THREADS - COPY_THREADS;
        produce_weights<COLUMNS, typename ProjectionLayout<COLUMNS>::Weight>(params, shared, part, thread);
    }
}
