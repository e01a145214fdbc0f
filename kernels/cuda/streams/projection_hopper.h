// The projection of projection.h for sm_90a, used by mhc_mix_hopper.cu: wgmma, and weights split
// once for 256 tokens. The layout of the results is the same. mhc_post_mix_pre_hopper.cu uses the
// weights and MMAs of a step with streams that it computes. Steps are in the order of
// projection.h, 64 channels of one stream after another.
//
// A block takes 256 tokens and a split of the channels, a step of 64 at a time. Four consumer
// warpgroups have 64 tokens each. One producer warp issues the streams' TMA loads, a box of 64
// channels and 256 tokens, as far ahead as there are stages. Six warps split the weights of each
// step, a chunk of 8 channels of a column a thread, and store them as an operand. (A lone warp
// takes about four cycles an instruction, so three warps with two chunks a thread were slower than
// the loads.)
//
// The three parts of the weights are columns of one MMA, 64 x 72 x 16 for 24 columns. So the MMA
// is wide, and sums of unlike size stay in separate accumulators. A step is four wgmma from zero;
// fp32 adds the parts, the smallest first, then the steps of a group of channels, from zero, then
// the groups of a split. So a split for each group leaves what a split of several would add.
//
// A consumer loads the streams from shared memory once, into its A fragments, and sums their
// squares. The stage is free as soon as they are loaded. A lane loads 16 bytes of each of two
// tokens: an MMA's k-th channel is free as long as the weights agree (`channel_of`). A warp's
// tokens have another order (`row_of`), so eight lanes, which load from two rows, have no bank
// conflict.
//
// Consumers have the proxy fence for the weights: it would make the warps that split wait for
// their loads of the next steps. Limit: see mhc_mix_hopper.cu.
// What was tried: kernels/docs/mhc_mix.md.
#pragma once

#include "hopper.h"
#include "panels.h"
#include "pipeline.h"
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

// The weights of STAGES steps as a member of a plan, and the mbarriers of their ring: full when a
// step's weights have been stored, empty when they are no longer needed.
template <int COLUMNS, int STAGES>
struct WeightPlan {
    static constexpr int ROWS = PARTS * 8 * TILES<COLUMNS>;  // those of a part one behind the other
    static constexpr int WEIGHT_BYTES = ROWS * 128;
    uint8_t weights[STAGES][WEIGHT_BYTES];
    PipelineBarriers<STAGES> barriers;
};

// A WeightPlan that lies AT bytes from the start of shared memory, a multiple of 1024.
template <int COLUMNS, int AT, int STAGES>
struct WeightLayout {
    using Plan = WeightPlan<COLUMNS, STAGES>;
    static constexpr int ROWS = Plan::ROWS;
    using Ring = Pipeline<AT + OFFSET_OF(Plan, barriers), STAGES>;

    static constexpr int weight(uint32_t step) { return AT + step % STAGES * Plan::WEIGHT_BYTES; }
    // Called by one thread of a block in which `warps` warps use the weights.
    static void initialise(SharedAddress shared, uint32_t warps) {
        Ring::initialise(shared, SPLIT_THREADS / WARP_SIZE, warps);
    }
};

template <int COLUMNS>
struct ProjectionLayout {
    static constexpr int STREAM_BYTES = TILE_TOKENS * 128;
    static constexpr int SUMS = 4 * TILES<COLUMNS> + 2;  // of a thread
    struct Plan {
        uint8_t streams[STREAM_STAGES][STREAM_BYTES];
        WeightPlan<COLUMNS, WEIGHT_STAGES> weight;
        float totals[SUMS][CONSUMER_THREADS];
        PipelineBarriers<STREAM_STAGES> arriving;
    };
    static constexpr int TOTALS = OFFSET_OF(Plan, totals);
    using Weight = WeightLayout<COLUMNS, OFFSET_OF(Plan, weight), WEIGHT_STAGES>;
    using Streams = Pipeline<OFFSET_OF(Plan, arriving), STREAM_STAGES>;
    static constexpr int BYTES = sizeof(Plan);
    static_assert(BYTES <= 227 * 1024, "stages exceed shared memory");

    static constexpr int stream(uint32_t step) { return step % STREAM_STAGES * STREAM_BYTES; }
};

// A block's share of the work: TILE_TOKENS tokens, and steps.
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

// Where a step starts: a stream and a channel in it. Steps are counted up, without a division.
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
        const SharedAddress full = shared + Layout::Streams::full(step);
        Layout::Streams::wait_empty(shared, step);
        mbarrier_arrive_expect(full, Layout::STREAM_BYTES);
        tensor_copy_in(shared + Layout::stream(step), params.streams_map, place.within * sizeof(bf16),
                       static_cast<int32_t>(part.first_token), place.stream, full);
    }
}

// ---------------------------------------------------------------- weights

// The channel of a step whose weights come first in pair `pair` of a column's 16-byte chunk. In
// MMA chunk / 2, lane `pair` of a row has two adjacent channels. They are word 2 (chunk / 2 % 2) +
// chunk % 2 of its piece of half chunk / 4.
DEVICE constexpr int channel_of(int chunk, int pair) { return 32 * (chunk / 4) + PIECE * pair + 2 * (chunk % 4); }

// A thread's weights, if it has any: the same chunk of the same column in each step.
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

    // Zeros for columns that do not exist, and after a stream's end.
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

// The loads of the next two steps are in flight while one step is split, in separate registers: a
// move would wait for them. A fence here would wait for them, too; consumers have it.
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
            Layout::Ring::wait_empty(shared, step);
            chunk.store(weights[i], shared + Layout::weight(step));
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Layout::Ring::full(step));
            if (step + AHEAD < part.steps.count) chunk.load(ahead, weights[i]);
        }
    }
}

// ---------------------------------------------------------------- products

// The row, of eight, of a lane's first token. Eight lanes that load together have two rows that
// differ in bit 2, by which the swizzle swaps the halves of a row.
DEVICE int row_of(int group) { return (group & 2) | (group & 1) << 2 | group >> 2; }

// Loads a lane's A fragments of a step.
DEVICE void read_rows(SharedAddress stage, int row, Fragments& fragments) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int second = 0; second < 2; ++second)
            fragments.of[half][second] =
                load_shared_vec16(stage + panel_offset(row + second * (WARP_TOKENS / 2), 4 * half + lane_id() % 4));
    }
}

// Starts the MMAs of a step with all parts of the weights, from zero.
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

// Adds the parts of a step's products, starting with the smallest.
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

// Adds a step to the sums; its weights have arrived. `meanwhile` runs while the MMAs are in
// flight. `gives_up` releases the weights.
template <int COLUMNS, typename Layout, typename Meanwhile>
DEVICE void add_hopper_step(const Fragments& fragments, SharedAddress shared, uint32_t step, bool gives_up, Sums<COLUMNS>& sums,
                            Meanwhile meanwhile) {
    float products[PARTS * TILES<COLUMNS>][4];
    start_products(fragments, shared + Layout::weight(step), products);
    meanwhile();
    add_squares(fragments, sums.squares);
    wgmma_wait<0>();
    wgmma_hold(products);
    if (gives_up && lane_id() == 0) mbarrier_arrive(shared + Layout::Ring::empty(step));
    add_parts<COLUMNS>(products, sums);
}

// Adds a group of channels, all of whose steps have been added, to the sums.
template <int COLUMNS>
DEVICE void add_group(Sums<COLUMNS>& group, Sums<COLUMNS>& sums) {
    add_squares_of_lanes(group.squares);
    UNROLL
    for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
        UNROLL
        for (int c = 0; c < 4; ++c) sums.products[tile][c] += group.products[tile][c];
    }
    UNROLL
    for (int row = 0; row < 2; ++row) sums.squares[row] += group.squares[row];
    group = {};
}

// A thread's sums of all groups so far. Registers have no room for them beside a step's products.
template <int COLUMNS>
struct Totals {
    float* first;  // the thread's own, CONSUMER_THREADS apart

    // Adds a group, or stores the first one.
    void add(Sums<COLUMNS>& group, bool is_first) const {
        add_squares_of_lanes(group.squares);
        each(group, [&](float& sum, float& total) { total = is_first ? sum : total + sum; });
        group = {};
    }
    void load(Sums<COLUMNS>& sums) const {
        each(sums, [](float& sum, float& total) { sum = total; });
    }
    template <typename Use>
    void each(Sums<COLUMNS>& sums, Use use) const {
        UNROLL
        for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
            UNROLL
            for (int c = 0; c < 4; ++c) use(sums.products[tile][c], first[(4 * tile + c) * CONSUMER_THREADS]);
        }
        UNROLL
        for (int row = 0; row < 2; ++row) use(sums.squares[row], first[(4 * TILES<COLUMNS> + row) * CONSUMER_THREADS]);
    }
};

template <int COLUMNS>
DEVICE void consume(const HopperProjectionParams& params, SharedAddress shared, const Part& part, int consumer) {
    using Layout = ProjectionLayout<COLUMNS>;
    const int row = consumer * CONSUMER_TOKENS + warp_id() % 4 * WARP_TOKENS + row_of(lane_id() / 4);
    const Totals<COLUMNS> totals{reinterpret_cast<float*>(dynamic_shared() + Layout::TOTALS) + threadIdx.x};
    Sums<COLUMNS> sums = {};
    for (uint32_t step = 0; step < part.steps.count; ++step) {
        Fragments fragments;
        Layout::Streams::wait_full(shared, step);
        read_rows(shared + Layout::stream(step), row, fragments);
        Layout::Weight::Ring::wait_full(shared, step);
        fence_async_proxy();
        add_hopper_step<COLUMNS, typename Layout::Weight>(fragments, shared, step, true, sums, [&] {
            // All lanes of the warp have loaded their rows.
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(shared + Layout::Streams::empty(step));
        });
        if (step % STREAMS == STREAMS - 1) totals.add(sums, step < STREAMS);
    }
    if (part.steps.count > 0) totals.load(sums);
    store_sums<COLUMNS>(params, blockIdx.x % params.splits, part.first_token + row, sums);
}

template <int COLUMNS>
DEVICE void initialise_barriers(SharedAddress shared, const Part& part) {
    using Layout = ProjectionLayout<COLUMNS>;
    if (threadIdx.x == 0) {
        const uint32_t warps = part.consumers * (WARPGROUP_SIZE / WARP_SIZE);
        Layout::Streams::initialise(shared, 1, warps);
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
