// The projection of a token's concatenated residual streams to COLUMNS values, and the sum of
// their squares (inference 2.1 and 2.5). Each split of the channels leaves PARTIAL_WIDTH<COLUMNS>
// floats a token: the dot products, the sum of squares, padding.
//
// bf16 streams times fp32 weights, exactly: TF32 would round weights to 11 bits. 2^16 times a
// weight (which overflows beyond 2^111) is the exact sum of three bf16 values, subnormal ones too,
// so all MMA products are exact. MMA adds 64 channels from zero, in 12 steps that truncate, and
// fp32 adds these sums. A sum of thousands of steps in the accumulator would shrink by about
// 2^-12. The sum of squares uses the same loads.
//
// project: a block takes 128 tokens, 16 a warp, and a split of the channels, the same of every
// stream, in steps (k-blocks) of 64 of one stream. cp.async loads them and 24 x 64 weights
// (COLUMNS 24) into a ring of STAGES. A lane loads 16 bytes of each of two tokens as its A
// fragments: which 8 channels it has is free as long as B's fragments agree. The block splits the
// weights into shared memory for all warps, with one barrier a step.
// project_at_once: one step of each stream a block, without a ring. project_few: up to FEW_TOKENS
// tokens a block in fp32. project_scalar: a warp a token, any layout.
#pragma once

#include "async_copy.h"
#include "math.h"
#include "mma.h"
#include "numeric.h"
#include "streams.h"

constexpr int PROJECTION_THREADS = 256;
constexpr int WARP_TOKENS = 16;
constexpr int BLOCK_TOKENS = PROJECTION_THREADS / WARP_SIZE * WARP_TOKENS;
constexpr int PIECE = 8;  // channels of 16 bytes
constexpr int BLOCK_PIECES = 8;  // of a row, in a step
constexpr int PARTS = 3;  // bf16 numbers of a weight
constexpr int STAGES = 4;  // steps whose channels are in shared memory or on their way there
// A weight's last bit is 2^-149, a bf16 value's 2^-133: with this scale subnormal weights have
// three parts as well.
constexpr float WEIGHT_SCALE = 65536.0f;

template <int COLUMNS>
constexpr int TILES = (COLUMNS + 7) / 8;  // of eight columns, as the instructions take them
template <int COLUMNS>
constexpr int PARTIAL_WIDTH = (COLUMNS + 8) / 8 * 8;

struct ProjectionParams {
    const bf16* streams;  // [num_tokens, STREAMS, hidden_size]
    int64_t streams_token_stride; int64_t streams_stream_stride;
    const float* fn;  // [COLUMNS, STREAMS * hidden_size]
    float* partials;  // [splits, num_tokens, PARTIAL_WIDTH]
    int64_t num_tokens;
    int32_t hidden_size;
    int32_t splits;  // of the channels
};

// The leading 8 bits of a value, as in a bf16. A NaN stays NaN, whichever bits it has.
DEVICE float leading_part(float x) {
    return __uint_as_float((__float_as_uint(x) & 0xffff0000u) | (is_nan(x) ? 0x00400000u : 0u));
}

// Two weights as PARTS words of two bf16 each, `low` in the low halves. A value that is not finite
// has no remainder.
DEVICE void split_pair(float low, float high, uint32_t (&words)[PARTS]) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const float low_part = leading_part(low), high_part = leading_part(high);
        words[part] = __float_as_uint(low_part) >> 16 | __float_as_uint(high_part);
        low = is_finite(low) ? low - low_part : 0.0f;
        high = is_finite(high) ? high - high_part : 0.0f;
    }
}

// The same for finite weights, in half as many instructions.
DEVICE void split_finite_pair(float low, float high, uint32_t (&words)[PARTS]) {
    UNROLL
    for (int part = 0; part < PARTS; ++part) {
        const uint32_t low_bits = __float_as_uint(low), high_bits = __float_as_uint(high);
        words[part] = low_bits >> 16 | (high_bits & 0xffff0000u);
        low -= __uint_as_float(low_bits & 0xffff0000u);
        high -= __uint_as_float(high_bits & 0xffff0000u);
    }
}

// Eight weights of one column that this thread has loaded.
struct Weights {
    float values[PIECE];
};

// The slot of a column's piece. Rows have 128 bytes; odd ones have their halves swapped. So the
// lanes of an access, four in each of two rows, have no bank conflict.
DEVICE int swizzled(int column, int piece) { return piece ^ (column & 1) << 2; }

template <int COLUMNS>
using WeightParts = Vec16[PARTS][8 * TILES<COLUMNS>][BLOCK_PIECES];

template <void (*SPLIT)(float, float, uint32_t (&)[PARTS])>
DEVICE void split(const Weights& weights, Vec16 (&vectors)[PARTS]) {
    UNROLL
    for (int pair = 0; pair < PIECE / 2; ++pair) {
        uint32_t words[PARTS];
        SPLIT(WEIGHT_SCALE * weights.values[2 * pair], WEIGHT_SCALE * weights.values[2 * pair + 1], words);
        UNROLL
        for (int part = 0; part < PARTS; ++part) vectors[part].w[pair] = words[part];
    }
}

DEVICE void split_weights(const Weights& weights, Vec16 (&vectors)[PARTS]) {
    uint32_t largest = 0;
    UNROLL
    for (int e = 0; e < PIECE; ++e) largest = maximum(largest, __float_as_uint(weights.values[e]) & 0x7fffffffu);
    if (is_finite(WEIGHT_SCALE * __uint_as_float(largest))) split<split_finite_pair>(weights, vectors);
    else split<split_pair>(weights, vectors);
}

template <int COLUMNS>
DEVICE void store_weights(const Weights& weights, WeightParts<COLUMNS>& parts) {
    const int column = threadIdx.x / BLOCK_PIECES, piece = swizzled(column, threadIdx.x % BLOCK_PIECES);
    if (column >= 8 * TILES<COLUMNS>) return;
    Vec16 vectors[PARTS];
    split_weights(weights, vectors);
    for (int part = 0; part < PARTS; ++part) parts[part][column][piece] = vectors[part];
}

// What a lane loads of its two tokens in a step: piece lane_id() % 4 of the first half and of the
// second half.
struct Fragments {
    Vec16 of[2][2];  // half, token
};

// Shared memory of a block. A thread copies the streams that it loads itself, so no thread waits
// for another thread's copies of them.
template <int COLUMNS>
struct ProjectionShared {
    Vec16 fragments[STAGES][2][2][PROJECTION_THREADS];  // half, token
    Vec16 weights[STAGES][2][COLUMNS * BLOCK_PIECES];  // half of a piece, thread
    WeightParts<COLUMNS> parts[2];
};

// The steps of a split of the channels. BLOCK_PIECES adjacent pieces are a group, which has a step
// in each stream, in stream order. So a block has the same channels of all streams and can compute
// them from others (mhc_post_mix_pre.cu). Every stream has whole steps: zeros after its end.
// Splits take groups round-robin: blocks of the same tokens load and store adjacent memory at
// about the same time.
struct Steps {
    uint32_t split, splits, count;

    // 32 bits: a 64-bit division would be waited for before any load starts. A split has as many
    // groups as another one, or one more.
    Steps(int32_t hidden_size, uint32_t split, uint32_t splits) : split(split), splits(splits) {
        const uint32_t groups = ceil_div(static_cast<uint32_t>(hidden_size / PIECE), uint32_t{BLOCK_PIECES});
        const uint32_t each = groups / splits, rest = groups - each * splits;
        count = STREAMS * (each + (split < rest ? 1 : 0));
    }
    // The group of a stream that is the split's `number`-th.
    uint32_t group(uint32_t number) const { return split + number * splits; }
    // The first piece of a step, and its stream.
    int32_t piece(uint32_t step) const { return static_cast<int32_t>(group(step / STREAMS)) * BLOCK_PIECES; }
    static int32_t stream(uint32_t step) { return static_cast<int32_t>(step % STREAMS); }
};

// Starts the copies of the thread's weights of a step, if it has any; zeros after a stream's end.
template <int COLUMNS>
DEVICE void start_weights(const ProjectionParams& params, const Steps& steps, uint32_t step,
                          Vec16 (&stage)[2][COLUMNS * BLOCK_PIECES]) {
    const int64_t width = params.hidden_size, column = threadIdx.x / BLOCK_PIECES;
    const int64_t channel = (steps.piece(step) + threadIdx.x % BLOCK_PIECES) * PIECE;
    if (column >= COLUMNS) return;
    const bool wanted = channel < width;
    const float* const source = params.fn + (wanted ? (column * STREAMS + steps.stream(step)) * width + channel : 0);
    UNROLL
    for (int half = 0; half < 2; ++half)
        copy_async_16(shared_address(&stage[half][threadIdx.x]), source + half * (PIECE / 2), wanted);
}

template <int COLUMNS>
DEVICE void read_weights(const Vec16 (&stage)[2][COLUMNS * BLOCK_PIECES], Weights& weights) {
    if (threadIdx.x >= COLUMNS * BLOCK_PIECES) return;
    UNROLL
    for (int half = 0; half < 2; ++half)
        unpack<float>(load_vec16(&stage[half][threadIdx.x]), weights.values + half * (PIECE / 2));
}

// A lane's two tokens among those of warp `warp` of a tile, and whether they exist.
struct OwnTokens {
    int64_t first;
    bool any;  // of the warp
    bool exists[2];

    template <typename Params>
    OwnTokens(const Params& params, int64_t tile, int warp) {
        const int64_t of_warp = tile * BLOCK_TOKENS + warp * WARP_TOKENS;
        first = of_warp + lane_id() / 4;
        any = of_warp < params.num_tokens;
        for (int row = 0; row < 2; ++row) exists[row] = token(row) < params.num_tokens;
    }
    int64_t token(int row) const { return first + row * (WARP_TOKENS / 2); }
};

// The lane's piece of a half of a group, the same in each stream.
DEVICE int32_t own_piece(int half) { return BLOCK_PIECES / 2 * half + lane_id() % 4; }

// Starts the copies of a step to the thread's slots of a stage.
DEVICE void start_streams(const ProjectionParams& params, const OwnTokens& own, const Steps& steps, uint32_t step,
                          SharedAddress stage) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int32_t piece = steps.piece(step) + own_piece(half);
        UNROLL
        for (int row = 0; row < 2; ++row) {
            const bool wanted = own.exists[row] && piece < params.hidden_size / PIECE;
            // Even an address that is not read must be aligned. With one token the token stride
            // may be any value.
            const bf16* const source = params.streams + own.token(row) * params.streams_token_stride +
                                       steps.stream(step) * params.streams_stream_stride + piece * PIECE;
            copy_async_16(stage + (2 * half + row) * PROJECTION_THREADS * sizeof(Vec16), wanted ? source : params.streams, wanted);
        }
    }
}

DEVICE void read_fragments(const Vec16 (&stage)[2][2][PROJECTION_THREADS], Fragments& fragments) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        UNROLL
        for (int row = 0; row < 2; ++row) fragments.of[half][row] = load_vec16(&stage[half][row][threadIdx.x]);
    }
}

// A step's contribution to the sums of 16 tokens, from zero.
template <int COLUMNS>
struct Sums {
    float products[TILES<COLUMNS>][4];  // C fragments (mma.h)
    float squares[2];
};

DEVICE void add_squares(const Vec16& piece, float& squares) {
    float x[PIECE];
    unpack<bf16>(piece, x);
    UNROLL
    for (int e = 0; e < PIECE; ++e) squares += x[e] * x[e];
}

// Squares in fp32: as the diagonal of an MMA they would gain nothing, since the projection nearly
// fills the tensor cores. The squares of a step are added first: added one by one to a long sum,
// each would be rounded.
DEVICE void add_squares(const Fragments& fragments, float (&squares)[2]) {
    UNROLL
    for (int row = 0; row < 2; ++row) {
        float of_step = 0.0f;
        UNROLL
        for (int half = 0; half < 2; ++half) add_squares(fragments.of[half][row], of_step);
        squares[row] += of_step;
    }
}

// The MMAs of half of a step, added to `products`. `nothing` is 0, which the compiler must not
// know. Each A operand is then a separate result in four consecutive registers. Otherwise it would
// be gathered from two pieces again for each of nine MMAs.
template <int COLUMNS>
DEVICE void multiply_half(const Vec16& low, const Vec16& high, uint32_t nothing, const WeightParts<COLUMNS>& parts, int half,
                          float (&products)[TILES<COLUMNS>][4]) {
    const int column = lane_id() / 4;
    uint32_t a[2][4];
    UNROLL
    for (int word = 0; word < 4; ++word) {
        a[word / 2][word % 2 * 2] = low.w[word] ^ nothing;
        a[word / 2][word % 2 * 2 + 1] = high.w[word] ^ nothing;
    }
    UNROLL
    for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
        UNROLL
        for (int part = 0; part < PARTS; ++part) {
            const Vec16 b = parts[part][8 * tile + column][swizzled(column, BLOCK_PIECES / 2 * half + lane_id() % 4)];
            UNROLL
            for (int k = 0; k < 2; ++k) mma_bf16_16x8x16(products[tile], a[k], b.w[2 * k], b.w[2 * k + 1]);
        }
    }
}

template <int COLUMNS>
DEVICE void add_scaled(const float (&products)[TILES<COLUMNS>][4], Sums<COLUMNS>& sums) {
    UNROLL
    for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
        UNROLL
        for (int c = 0; c < 4; ++c) sums.products[tile][c] += 1.0f / WEIGHT_SCALE * products[tile][c];
    }
}

template <int COLUMNS>
DEVICE void add_step(const Fragments& fragments, uint32_t nothing, const WeightParts<COLUMNS>& parts, Sums<COLUMNS>& sums) {
    float products[TILES<COLUMNS>][4] = {};
    add_squares(fragments, sums.squares);
    UNROLL
    for (int half = 0; half < 2; ++half)
        multiply_half<COLUMNS>(fragments.of[half][0], fragments.of[half][1], nothing, parts, half, products);
    add_scaled(products, sums);
}

// The squares of a token's whole rows in each of its four lanes.
DEVICE void add_squares_of_lanes(float (&squares)[2]) {
    UNROLL
    for (int row = 0; row < 2; ++row) {
        for (int distance = 1; distance < 4; distance *= 2) squares[row] += __shfl_xor_sync(FULL_WARP, squares[row], distance);
    }
}

// Stores the sums of a split; their squares are those of whole rows.
template <int COLUMNS, typename Params>
DEVICE void store_sums(const Params& params, int64_t split, int64_t first_token, const Sums<COLUMNS>& sums) {
    UNROLL
    for (int row = 0; row < 2; ++row) {
        const int64_t token = first_token + row * (WARP_TOKENS / 2);
        if (token >= params.num_tokens) continue;
        float* const to = params.partials + (split * params.num_tokens + token) * PARTIAL_WIDTH<COLUMNS>;
        UNROLL
        for (int tile = 0; tile < TILES<COLUMNS>; ++tile) {
            const int column = 8 * tile + 2 * (lane_id() % 4);
            if (column >= COLUMNS) continue;
            store_pair(to + column, sums.products[tile][2 * row], sums.products[tile][2 * row + 1]);
        }
        if (lane_id() % 4 == 0) to[COLUMNS] = sums.squares[row];
    }
}

template <int COLUMNS>
DEVICE void project(const ProjectionParams& params) {
    auto& shared = *reinterpret_cast<ProjectionShared<COLUMNS>*>(dynamic_shared());
    const uint32_t splits = static_cast<uint32_t>(params.splits), split = blockIdx.x % splits;
    const Steps steps(params.hidden_size, split, splits);
    const OwnTokens own(params, blockIdx.x / splits, warp_id());
    const SharedAddress own_places = shared_address(&shared.fragments[0][0][0][threadIdx.x]);
    // Starts the copies of a step, in step order; an empty group after the last one.
    const auto start = [&](uint32_t step) {
        if (step < steps.count) {
            start_streams(params, own, steps, step, own_places + step % STAGES * sizeof(shared.fragments[0]));
            start_weights<COLUMNS>(params, steps, step, shared.weights[step % STAGES]);
        }
        copy_commit();
    };
    for (uint32_t step = 0; step < STAGES; ++step) start(step);
    let_next_kernel_come();
    Sums<COLUMNS> sums = {};
    for (uint32_t step = 0; step < steps.count; ++step) {
        WeightParts<COLUMNS>& parts = shared.parts[step % 2];
        Fragments fragments;
        Weights weights = {};
        copy_wait<STAGES - 1>();
        read_weights<COLUMNS>(shared.weights[step % STAGES], weights);
        read_fragments(shared.fragments[step % STAGES], fragments);
        store_weights<COLUMNS>(weights, parts);
        __syncthreads();
        start(step + STAGES);
        if (own.any) add_step<COLUMNS>(fragments, splits >> 31, parts, sums);
    }
    if (!own.any) return;
    add_squares_of_lanes(sums.squares);
    store_sums<COLUMNS>(params, split, own.first, sums);
}

// ---------------------------------------------------------------- a step of each stream

// For as many splits as groups: a block has one step of each stream, and all its loads start at
// once, into registers. A warp has 16 tokens and half of the pieces of a step. So 16 warps give
// the scheduler more choice than eight with two halves each. The warps of the second half load and
// split the weights first. These are in shared memory when the other warps' streams arrive, which
// then multiply while the rest is in flight.
constexpr int AT_ONCE_THREADS = 2 * PROJECTION_THREADS;

template <int COLUMNS>
struct AtOnceShared {
    WeightParts<COLUMNS> parts[STREAMS];
    float second_half[4 * TILES<COLUMNS> + 2][PROJECTION_THREADS];  // sums of the warps that have it
};

// A lane's pieces: one of each stream of two tokens.
struct AtOncePlace {
    static constexpr int WARPS = PROJECTION_THREADS / WARP_SIZE;  // of a half
    OwnTokens tokens;
    int32_t half, piece;
    bool exists[2];

    template <typename Params>
    AtOncePlace(const Params& params, uint32_t split, uint32_t tile)
        : tokens(params, tile, warp_id() % WARPS), half(warp_id() / WARPS),
          piece(static_cast<int32_t>(split) * BLOCK_PIECES + own_piece(half)) {
        for (int row = 0; row < 2; ++row) exists[row] = tokens.exists[row] && piece < params.hidden_size / PIECE;
    }
};

// How project_at_once gets a lane's pieces:
//     void ask_for_block(uint32_t tile)              starts loads that all threads share
//     void ask(const AtOncePlace& place)             starts the loads of the lane's pieces
//     void leave()                                   before the block's barrier
//     void make(const AtOncePlace& place, int row,   after it; zeros where no piece exists
//               Vec16 (&streams)[STREAMS])
//
// This one loads them from memory as they are.
struct StreamsOfMemory {
    const ProjectionParams& params;
    Vec16 pieces[2][STREAMS] = {};

    void ask_for_block(uint32_t) const {}
    void ask(const AtOncePlace& place) {
        UNROLL
        for (int row = 0; row < 2; ++row) {
            if (!place.exists[row]) continue;
            const bf16* const source = params.streams + place.tokens.token(row) * params.streams_token_stride + place.piece * PIECE;
            UNROLL
            for (int i = 0; i < STREAMS; ++i) pieces[row][i] = load_vec16_readonly(source + i * params.streams_stream_stride);
        }
    }
    void leave() const {}
    void make(const AtOncePlace&, int row, Vec16 (&streams)[STREAMS]) const {
        UNROLL
        for (int i = 0; i < STREAMS; ++i) streams[i] = pieces[row][i];
    }
};

// A thread's weights, of PROJECTION_THREADS threads: its share of all columns' pieces in the step
// of each stream.
template <int COLUMNS>
struct AtOnceWeights {
    static constexpr int ALL = STREAMS * COLUMNS * BLOCK_PIECES, OWN = ceil_div(ALL, PROJECTION_THREADS);
    static_assert(COLUMNS % 8 == 0, "columns that there are none of would need zeros");
    Weights weights[OWN] = {};

    static int number_of(int own) { return static_cast<int>(threadIdx.x) % PROJECTION_THREADS + own * PROJECTION_THREADS; }
    template <typename Params>
    void ask(const Params& params, uint32_t split) {
        const int64_t width = params.hidden_size;
        UNROLL
        for (int own = 0; own < OWN; ++own) {
            const int number = number_of(own), row = number / BLOCK_PIECES;  // of a column and stream
            const int64_t channel = (static_cast<int64_t>(split) * BLOCK_PIECES + number % BLOCK_PIECES) * PIECE;
            if (number >= ALL || channel >= width) continue;
            const float* const source = params.fn + (row % COLUMNS * STREAMS + row / COLUMNS) * width + channel;
            UNROLL
            for (int part = 0; part < 2; ++part)
                unpack<float>(load_vec16_readonly(source + part * (PIECE / 2)), weights[own].values + part * (PIECE / 2));
        }
    }
    void leave(WeightParts<COLUMNS> (&parts)[STREAMS]) const {
        UNROLL
        for (int own = 0; own < OWN; ++own) {
            const int number = number_of(own), row = number / BLOCK_PIECES, column = row % COLUMNS;
            if (number >= ALL) continue;
            Vec16 vectors[PARTS];
            split_weights(weights[own], vectors);
            UNROLL
            for (int part = 0; part < PARTS; ++part)
                parts[row / COLUMNS][part][column][swizzled(column, number % BLOCK_PIECES)] = vectors[part];
        }
    }
};

// Adds the sums of both halves, in the warps of the first half.
template <int COLUMNS>
DEVICE void add_second_half(const AtOncePlace& place, AtOnceShared<COLUMNS>& shared, Sums<COLUMNS>& sums) {
    float* const own = &shared.second_half[0][threadIdx.x % PROJECTION_THREADS];
    float* const numbers = &sums.products[0][0];
    constexpr int PRODUCTS = 4 * TILES<COLUMNS>;
    if (place.half == 1) {
        UNROLL
        for (int i = 0; i < PRODUCTS; ++i) own[i * PROJECTION_THREADS] = numbers[i];
        UNROLL
        for (int row = 0; row < 2; ++row) own[(PRODUCTS + row) * PROJECTION_THREADS] = sums.squares[row];
    }
    __syncthreads();
    if (place.half == 1) return;
    UNROLL
    for (int i = 0; i < PRODUCTS; ++i) numbers[i] += own[i * PROJECTION_THREADS];
    UNROLL
    for (int row = 0; row < 2; ++row) sums.squares[row] += own[(PRODUCTS + row) * PROJECTION_THREADS];
}

// Params needs fn, partials, num_tokens, hidden_size and splits, as in ProjectionParams.
template <int COLUMNS, typename Streams, typename Params>
DEVICE void project_at_once(const Params& params, AtOnceShared<COLUMNS>& shared, Streams streams) {
    const uint32_t splits = static_cast<uint32_t>(params.splits), split = blockIdx.x % splits, tile = blockIdx.x / splits;
    const AtOncePlace place(params, split, tile);
    streams.ask_for_block(tile);
    if (place.half == 0) {
        streams.ask(place);
    } else {
        AtOnceWeights<COLUMNS> weights;
        weights.ask(params, split);
        weights.leave(shared.parts);
        streams.ask(place);
    }
    streams.leave();
    __syncthreads();
    let_next_kernel_come();
    Sums<COLUMNS> sums = {};
    if (place.tokens.any) {
        Vec16 pieces[2][STREAMS];
        UNROLL
        for (int row = 0; row < 2; ++row) {
            streams.make(place, row, pieces[row]);
            UNROLL
            for (int i = 0; i < STREAMS; ++i) {
                float of_step = 0.0f;
                add_squares(pieces[row][i], of_step);
                sums.squares[row] += of_step;
            }
        }
        UNROLL
        for (int i = 0; i < STREAMS; ++i) {
            float products[TILES<COLUMNS>][4] = {};
            multiply_half<COLUMNS>(pieces[0][i], pieces[1][i], splits >> 31, shared.parts[i], place.half, products);
            add_scaled(products, sums);
        }
    }
    add_second_half(place, shared, sums);
    if (place.half != 0 || !place.tokens.any) return;
    add_squares_of_lanes(sums.squares);
    store_sums<COLUMNS>(params, split, place.tokens.first, sums);
}

// ---------------------------------------------------------------- few tokens

// A block has a tile of tokens and a split of the channels, the same FEW_PIECES pieces of every
// stream. All loads start at once: the time is one wait for memory. A lane has one piece, a warp
// OWN columns, in fp32. With so few tokens MMAs would mostly multiply padding, after four steps
// with a barrier each. Where streams are computed from others, as after a sublayer, a block
// computes its channels of all of them: it loads only what it stores.
constexpr int FEW_TOKENS = 4;
constexpr int FEW_PIECES = WARP_SIZE / STREAMS;
template <int COLUMNS>
constexpr int FEW_PROJECTION_WARPS = minimum(COLUMNS, 8);
template <int COLUMNS>
constexpr int FEW_PROJECTION_THREADS = FEW_PROJECTION_WARPS<COLUMNS>* static_cast<int>(WARP_SIZE);

// A lane's piece.
struct FewPlace {
    int32_t stream, piece;
    bool exists;

    FewPlace(int32_t hidden_size, uint32_t split)
        : stream(lane_id() / FEW_PIECES), piece(static_cast<int32_t>(split) * FEW_PIECES + lane_id() % FEW_PIECES),
          exists(piece < hidden_size / PIECE) {}
};

// A missing token is replaced by the first one; its sums are not stored.
DEVICE int64_t few_token(int64_t first_token, int t, int64_t num_tokens) {
    return first_token + t < num_tokens ? first_token + t : first_token;
}

// How project_few_tokens gets a lane's pieces of a tile's tokens:
//     void ask(int64_t first_token, const FewPlace& place)      starts the loads
//     void make(Vec16 (&streams)[TOKENS])                       called by all threads of the block
//
// make gives zeros where no piece exists. This one loads pieces from memory as they are.
template <int TOKENS>
struct PiecesOfMemory {
    const ProjectionParams& params;
    Vec16 pieces[TOKENS] = {};

    void ask(int64_t first_token, const FewPlace& place) {
        UNROLL
        for (int t = 0; t < TOKENS; ++t)
            pieces[t] = load_vec16_readonly(params.streams + few_token(first_token, t, params.num_tokens) * params.streams_token_stride +
                                            place.stream * params.streams_stream_stride + place.piece * PIECE);
    }
    void make(Vec16 (&streams)[TOKENS]) const {
        UNROLL
        for (int t = 0; t < TOKENS; ++t) streams[t] = pieces[t];
    }
};

// What a warp adds up: dot products of its columns with each token, and the squares of token
// warp_id().
template <int TOKENS, int OWN>
struct FewSums {
    float products[TOKENS][OWN], squares;
};

template <int TOKENS, int OWN>
DEVICE void add_few(const Vec16 (&weights)[OWN][2], const Vec16 (&streams)[TOKENS], FewSums<TOKENS, OWN>& sums) {
    UNROLL
    for (int t = 0; t < TOKENS; ++t) {
        float x[PIECE];
        unpack<bf16>(streams[t], x);
        UNROLL
        for (int own = 0; own < OWN; ++own) {
            float w[PIECE];
            unpack<float>(weights[own][0], w);
            unpack<float>(weights[own][1], w + PIECE / 2);
            UNROLL
            for (int e = 0; e < PIECE; ++e) sums.products[t][own] += w[e] * x[e];
        }
        if (warp_id() != t) continue;
        UNROLL
        for (int e = 0; e < PIECE; ++e) sums.squares += x[e] * x[e];
    }
}

// Params needs fn, partials, num_tokens and hidden_size, as in ProjectionParams.
template <int COLUMNS, int TOKENS, typename Params, typename Pieces>
DEVICE void project_few_tokens(const Params& params, int64_t first_token, uint32_t split, Pieces pieces) {
    constexpr int WARPS = FEW_PROJECTION_WARPS<COLUMNS>, OWN = COLUMNS / WARPS;
    static_assert(OWN * WARPS == COLUMNS && TOKENS <= WARPS, "a warp has whole columns and at most one token's squares");
    const FewPlace place(params.hidden_size, split);
    const int64_t width = params.hidden_size;
    Vec16 weights[OWN][2] = {}, streams[TOKENS];
    if (place.exists) {
        pieces.ask(first_token, place);
        UNROLL
        for (int own = 0; own < OWN; ++own) {
            const int64_t column = warp_id() + own * WARPS;
            const float* const source = params.fn + (column * STREAMS + place.stream) * width + place.piece * PIECE;
            weights[own][0] = load_vec16_readonly(source);
            weights[own][1] = load_vec16_readonly(source + PIECE / 2);
        }
    }
    pieces.make(streams);
    FewSums<TOKENS, OWN> sums = {};
    add_few(weights, streams, sums);
    let_next_kernel_come();
    float* const to = params.partials + (split * params.num_tokens + first_token) * PARTIAL_WIDTH<COLUMNS>;
    UNROLL
    for (int t = 0; t < TOKENS; ++t) {
        if (first_token + t >= params.num_tokens) break;
        UNROLL
        for (int own = 0; own < OWN; ++own) {
            const float sum = warp_sum(sums.products[t][own]);
            if (lane_id() == 0) to[t * PARTIAL_WIDTH<COLUMNS> + warp_id() + own * WARPS] = sum;
        }
    }
    const float squares = warp_sum(sums.squares);
    if (lane_id() == 0 && warp_id() < TOKENS && first_token + warp_id() < params.num_tokens)
        to[warp_id() * PARTIAL_WIDTH<COLUMNS> + COLUMNS] = squares;
}

template <int COLUMNS>
DEVICE void project_few(const ProjectionParams& params) {
    if (params.num_tokens == 1) {
        project_few_tokens<COLUMNS, 1>(params, 0, blockIdx.x, PiecesOfMemory<1>{params});
    } else {
        const uint32_t splits = static_cast<uint32_t>(params.splits);
        const int64_t first_token = static_cast<int64_t>(blockIdx.x / splits) * FEW_TOKENS;
        project_few_tokens<COLUMNS, FEW_TOKENS>(params, first_token, blockIdx.x % splits, PiecesOfMemory<FEW_TOKENS>{params});
    }
}

// Any width, stride and alignment: a warp a token, in fp32. The squares of SCALAR_STEP channels of
// a lane are added before they join the sum of all. A square of a bf16 value has 16 bits, and an
// odd one ends in 001. Added to a sum whose last place is twice its own, it is always a tie that
// rounds down. A sum of hundreds would then be too small by about 2^-19, in every token.
constexpr int SCALAR_STEP = 16;
template <int COLUMNS>
DEVICE void project_scalar(const ProjectionParams& params) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * (PROJECTION_THREADS / WARP_SIZE) + warp_id();
    if (token >= params.num_tokens) return;
    const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size;
    float products[COLUMNS] = {}, squares = 0.0f;
    for (int stream = 0; stream < STREAMS; ++stream) {
        const bf16* const x =
            params.streams + token * params.streams_token_stride + stream * params.streams_stream_stride;
        const float* const fn = params.fn + static_cast<int64_t>(stream) * params.hidden_size;
        float of_step = 0.0f;
        int in_step = 0;
        for (int64_t channel = lane_id(); channel < params.hidden_size; channel += WARP_SIZE) {
            const float value = to_float(x[channel]);
            of_step += value * value;
            UNROLL
            for (int q = 0; q < COLUMNS; ++q) products[q] += fn[q * channels + channel] * value;
            if (++in_step < SCALAR_STEP) continue;
            squares += of_step;
            of_step = 0.0f;
            in_step = 0;
        }
        squares += of_step;
    }
    float* const to = params.partials + token * PARTIAL_WIDTH<COLUMNS>;
    UNROLL
    for (int q = 0; q < COLUMNS; ++q) {
        const float sum = warp_sum(products[q]);
        if (lane_id() == 0) to[q] = sum;
    }
    squares = warp_sum(squares);
    if (lane_id() == 0) to[COLUMNS] = squares;
}

// The sum of a column of partials, `apart` floats from one to the next, in their order, with
// AT_ONCE loads in flight.
template <int AT_ONCE>
DEVICE float sum_of_parts(const float* first, int64_t apart, int32_t splits) {
    float sum = 0.0f;
    UNROLL_BY(1)
    for (int32_t split = 0; split < splits; split += AT_ONCE) {
        float parts[AT_ONCE];
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i, first += apart) parts[i] = split + i < splits ? *first : 0.0f;
        UNROLL
        for (int i = 0; i < AT_ONCE; ++i) sum += parts[i];
    }
    return sum;
}
