// The gradients of projection_backward.h by MMA, for streams that are whole 16-byte accesses.
// mhc_mix_backward.cu has the formulas. With g the values rstd dmix of a token, both products have
// one fp32 factor or two:
//
//     dfn = g^T v      v is bf16; g is the exact sum of three bf16 parts (projection.h)
//     dv = g fn        of 3 x 3 products of parts the six largest; the rest is below 2^-24
//
// So all products are exact, and 16 at a time are added with one truncation. dfn's MMAs start from
// zero for every 16 tokens, and fp32 adds these sums.
//
// A block has 512 channels and a split of the tokens, 32 at a time (a round). It fills an SM: 155
// KB of shared memory, all registers. cp.async loads their channels to one of four stages. Every
// row of 128 bytes is permuted, so neither the eight rows of ldmatrix nor the lanes of four rows
// have bank conflicts. A round's values are split once for all sixteen warps, during the round
// before. A warp has 32 channels; its parts of fn and its sums of dfn stay in registers. The
// columns of dv's MMA are channels in an order that gives a lane eight neighbours, 16 bytes
// (channel_of_column). A kernel's other terms of dv (NoOthers) are loaded from L2 where dv is
// finished.
//
// Parts are made from 2^16 times a token's value and 2^-16 times a weight: those of the smallest
// values are exact, and dv needs no scaling. Four values of a token count as zeros if one is 2^40
// or more, infinite or NaN. Weights that large, or below 2^-80 and not 0, are not split exactly.
// After a round with such factors, what they touch is computed again in plain fp32 (mend).
#pragma once

#include "projection.h"
#include "projection_backward.h"
#include "projection_limits.h"

constexpr int PRODUCT_THREADS = 512, PRODUCT_WARPS = PRODUCT_THREADS / WARP_SIZE;
constexpr int WARP_CHANNELS = 32, PRODUCT_CHANNELS = PRODUCT_WARPS * WARP_CHANNELS;
constexpr int ROUND_TOKENS = WARP_SIZE;  // a lane for each where their numbers are split
constexpr int PRODUCT_STAGES = 4, NUMBER_STAGES = PRODUCT_STAGES + 1;
constexpr int ROW_PIECES = PRODUCT_CHANNELS / PIECE;
constexpr int CHANNEL_TILES = WARP_CHANNELS / 8;  // of eight columns of dv: a lane's channels are 16 bytes
static_assert(CHANNEL_TILES == 4, "which four tiles have");

// The slot of a piece of a token's row. ldmatrix rows are eight tokens; lanes that load four
// pieces of each of two tokens have an even and an odd one.
DEVICE int permuted(int token, int piece) { return piece ^ ((token & 1) << 2 | (token >> 1 & 3)); }

template <int COLUMNS>
struct ProductShared {
    static constexpr int PARTS_PIECES = PARTS * COLUMNS / PIECE, FOURS = COLUMNS / 4;
    Vec16 channels[PRODUCT_STAGES][ROUND_TOKENS][ROW_PIECES];
    Vec16 numbers[NUMBER_STAGES][ROUND_TOKENS][FOURS + 1];  // four columns each, then the factor of v
    Vec16 parts[2][ROUND_TOKENS][PARTS_PIECES];  // of a token's numbers: all columns of the leading part first
    uint32_t large[2][FOURS];                    // bits of tokens, of which one of four columns is large

    float number(int32_t round, int token, int place) const {
        return reinterpret_cast<const float*>(numbers[round % NUMBER_STAGES][token])[place];
    }
    // Addresses of a token's piece of a round, of its four numbers, and of its parts, in 32 bits.
    static SharedAddress channels_at(int32_t round, int token, int piece) {
        return begin() + OFFSET_OF(ProductShared, channels) + (round % PRODUCT_STAGES * ROUND_TOKENS + token) * (ROW_PIECES * 16) + 16 * permuted(token, piece);
    }
    static SharedAddress numbers_at(int32_t round, int token, int four) {
        return begin() + OFFSET_OF(ProductShared, numbers) + (round % NUMBER_STAGES * ROUND_TOKENS + token) * ((FOURS + 1) * 16) + 16 * four;
    }
    static SharedAddress parts_at(int32_t round, int token, int piece) {
        return begin() + OFFSET_OF(ProductShared, parts) + (round % 2 * ROUND_TOKENS + token) * (PARTS_PIECES * 16) + 16 * piece;
    }
    static SharedAddress begin() { return shared_address(dynamic_shared()); }
};

// The channel, of 32, of column `column` of tile `tile` of four: lane t has columns 2t and 2t + 1,
// which are channels 8t to 8t + 7.
DEVICE int channel_of_column(int tile, int column) { return column / 2 * PIECE + 2 * tile + column % 2; }

// Which block of channels is a block's. Overloaded where another order keeps more of what blocks
// read in L2.
template <typename Params>
DEVICE uint32_t channel_block(const Params& params) {
    return blockIdx.x / params.splits;
}

// A block's work: its channels from first_channel on, and a split of the tokens. `channels` counts
// all channels.
struct ProductPart {
    uint32_t channels, first_channel;
    int64_t begin;
    int32_t tokens;

    template <typename Params>
    explicit ProductPart(const Params& params) {
        const int64_t split = split_of(params);
        channels = static_cast<uint32_t>(STREAMS * params.hidden_size);
        first_channel = channel_block(params) * PRODUCT_CHANNELS;
        begin = params.num_tokens * split / params.splits;
        tokens = static_cast<int32_t>(params.num_tokens * (split + 1) / params.splits - begin);
    }
    template <typename Params>
    static uint32_t split_of(const Params& params) {
        return blockIdx.x % params.splits;
    }
};

// ---------------------------------------------------------------- channels

// Copies the channels of one round after another to shared memory: a thread copies one piece of
// every eighth token.
template <int COLUMNS>
struct ChannelCopies {
    static constexpr int ROWS = PRODUCT_THREADS / ROW_PIECES, COUNT = ROUND_TOKENS / ROWS;
    static_assert(ROWS == 8, "the pieces of tokens eight apart lie in the same order");
    const bf16* source;  // the thread's piece of its first token of the next round
    bool exists;

    template <typename Params>
    ChannelCopies(const Params& params, const ProductPart& part) {
        const uint32_t channel = part.first_channel + threadIdx.x % ROW_PIECES * PIECE;
        exists = channel < part.channels;
        const uint32_t at = exists ? channel : 0, width = params.hidden_size;
        source = params.streams + at / width * params.streams_stream_stride + at % width +
                 (part.begin + threadIdx.x / ROW_PIECES) * params.streams_token_stride;
    }

    // Zeros after the last token and after the last channel.
    template <typename Params>
    void start(const Params& params, int32_t tokens, int32_t round) {
        const int row = threadIdx.x / ROW_PIECES, piece = threadIdx.x % ROW_PIECES;
        const SharedAddress place = ProductShared<COLUMNS>::channels_at(round, row, piece);
        const int32_t left = exists ? tokens - round * ROUND_TOKENS - row : 0;
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const bool wanted = i * ROWS < left;
            copy_async_16(place + i * (ROWS * ROW_PIECES * sizeof(Vec16)), wanted ? source : params.streams, wanted);
            source += ROWS * params.streams_token_stride;
        }
        copy_commit();
    }
};

// ---------------------------------------------------------------- numbers

// Copies the numbers of one round after another: a thread copies four of one token.
template <int COLUMNS>
struct NumberCopies {
    static constexpr int FOURS = ProductShared<COLUMNS>::FOURS;
    static constexpr int SLOTS = PRODUCT_THREADS / ROUND_TOKENS;
    static_assert(FOURS < SLOTS, "a thread for each");
    const float* source;

    NumberCopies(const float* numbers, const ProductPart& part) {
        const int at = threadIdx.x / SLOTS, four = threadIdx.x % SLOTS;
        source = numbers + (part.begin + at) * (COLUMNS + 4) + 4 * four;
    }

    // Zeros after the last token.
    void start(const float* any, int32_t tokens, int32_t round) {
        const int at = threadIdx.x / SLOTS, four = threadIdx.x % SLOTS;
        const bool wanted = round * ROUND_TOKENS + at < tokens;
        if (four <= FOURS) copy_async_16(ProductShared<COLUMNS>::numbers_at(round, at, four), wanted ? source : any, wanted);
        source += ROUND_TOKENS * (COLUMNS + 4);
    }
};

// Splits them: warps 0 to FOURS - 1 have four columns each, a lane has a token.
template <int COLUMNS>
DEVICE void split_numbers(ProductShared<COLUMNS>& shared, int32_t round) {
    constexpr int FOURS = ProductShared<COLUMNS>::FOURS;
    const int stage = round % 2, warp = warp_id();
    if (warp >= FOURS) return;
    float own[4];
    bool large = false;
    unpack<float>(shared.numbers[round % NUMBER_STAGES][lane_id()][warp], own);
    UNROLL
    for (int i = 0; i < 4; ++i) large |= is_large(own[i]);
    const uint32_t tokens = __ballot_sync(FULL_WARP, large);
    if (lane_id() == 0) shared.large[stage][warp] = tokens;
    UNROLL
    for (int i = 0; i < 4; ++i) own[i] = large ? 0.0f : WEIGHT_SCALE * own[i];
    uint32_t first[PARTS], second[PARTS];
    split_finite_pair(own[0], own[1], first);
    split_finite_pair(own[2], own[3], second);
    bf16* const row = reinterpret_cast<bf16*>(shared.parts[stage][lane_id()]);
    UNROLL
    for (int part = 0; part < PARTS; ++part)
        *reinterpret_cast<uint64_t*>(row + part * COLUMNS + 4 * warp) = first[part] | static_cast<uint64_t>(second[part]) << 32;
}

// ---------------------------------------------------------------- dv

// Three chunks of eight columns of each part are multiplied two at a time: the first two of a part
// with those of another part; of the third chunk two parts with two parts. A warp has of fn, for a
// tile of eight channels, chunks 0 and 1 of each part. Of chunk 2 it has parts 0 and 1, then 2 and
// 0.
struct WeightTile {
    uint32_t pairs[PARTS][2], third[2][2];
};
template <typename Params>
DEVICE float weight(const Params& params, const ProductPart& part, int column, uint32_t channel) {
    return channel < part.channels ? params.fn[static_cast<int64_t>(column) * part.channels + channel] : 0.0f;
}

// The weights of the channels from `first` on. Returns whether one of them is not split exactly.
template <typename Params>
DEVICE bool load_weight_tile(const Params& params, const ProductPart& part, uint32_t first, int tile, WeightTile& to) {
    const uint32_t channel = first + channel_of_column(tile, lane_id() / 4);
    bool irregular = false;
    UNROLL
    for (int chunk = 0; chunk < 3; ++chunk) {
        const int column = 8 * chunk + 2 * (lane_id() % 4);
        const float low = weight(params, part, column, channel), high = weight(params, part, column + 1, channel);
        irregular |= is_irregular(low) || is_irregular(high);
        uint32_t words[PARTS];
        split_finite_pair(1.0f / WEIGHT_SCALE * low, 1.0f / WEIGHT_SCALE * high, words);
        UNROLL
        for (int i = 0; i < PARTS && chunk < 2; ++i) to.pairs[i][chunk] = words[i];
        if (chunk == 2) to.third[0][0] = words[0], to.third[0][1] = words[1], to.third[1][0] = words[2], to.third[1][1] = words[0];
    }
    return irregular;
}

DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16x8x16(sums, a, b[0], b[1]); }

// g fn of 16 tokens and 32 channels: for each part of g, which is loaded once, the smallest
// products first.
template <int COLUMNS>
DEVICE void multiply_weights(int32_t round, int first, const WeightTile (&fn)[CHANNEL_TILES], float (&sums)[CHANNEL_TILES][4]) {
    static_assert(COLUMNS == 24, "three chunks of eight columns");
    const int row = first + lane_id() % WARP_TOKENS, second = lane_id() / WARP_TOKENS;
    uint32_t g[4];
    // Two chunks, from the chunk indices of all parts: lane i addresses row i % 16 of the first
    // one or of the second.
    const auto take = [&](int low, int high) {
        ldmatrix_x4(g, ProductShared<COLUMNS>::parts_at(round, row, low + second * (high - low)));
    };
    const auto add_pairs = [&](int part) {
        UNROLL
        for (int tile = 0; tile < CHANNEL_TILES; ++tile) multiply(sums[tile], g, fn[tile].pairs[part]);
    };
    const auto add_third = [&](int which) {
        UNROLL
        for (int tile = 0; tile < CHANNEL_TILES; ++tile) multiply(sums[tile], g, fn[tile].third[which]);
    };
    take(6, 7);
    add_pairs(0);
    take(3, 4);
    add_pairs(1);
    add_pairs(0);
    take(2, 8);
    add_third(1);
    take(5, 5);
    add_third(0);
    take(0, 1);
    add_pairs(2);
    add_pairs(1);
    add_pairs(0);
    take(2, 2);
    add_third(0);
}

// g fn of token `at` of a round and eight channels, for any values.
template <int COLUMNS, typename Params>
DEVICE void multiply_plainly(const Params& params, const ProductPart& part, const ProductShared<COLUMNS>& shared, int32_t round,
                             int at, uint32_t channel, float (&dv)[PIECE]) {
    UNROLL
    for (int e = 0; e < PIECE; ++e) dv[e] = 0.0f;
    UNROLL_BY(1)
    for (int q = 0; q < COLUMNS; ++q) {
        const float g = shared.number(round, at, q);
        UNROLL
        for (int e = 0; e < PIECE; ++e) dv[e] += params.fn[static_cast<int64_t>(q) * part.channels + channel + e] * g;
    }
}

// ---------------------------------------------------------------- a warp

// The other terms of dv of a kernel: none here. A kernel that has some gives backward_products a
// struct with these functions.
struct NoOthers {
    // The terms of the lane's two tokens of 16. add() adds those of one of the two to dv.
    struct Rows {
        void add(int, float (&)[PIECE]) const {}
    };
    // Those of eight channels.
    template <typename Params>
    NoOthers(const Params&, const ProductPart&, uint32_t) {}
    // Prefetches those of a round into L2.
    template <typename Params>
    static void prefetch(const Params&, const ProductPart&, int32_t) {}
    // Loads those of the next 16 tokens, of which `left` remain; zeros for the others.
    template <typename Params>
    Rows load(const Params&, int32_t) {
        return {};
    }
    // Adds those of any token and eight channels to dv.
    template <typename Params>
    static void add_plainly(const Params&, int64_t, uint32_t, float (&)[PIECE]) {}
};

template <int COLUMNS, typename Others>
struct ProductWarp {
    static constexpr int CHUNKS = COLUMNS / 8, FOURS = COLUMNS / 4, ROW_TILES = WARP_CHANNELS / 16;
    WeightTile fn[CHANNEL_TILES];
    float dfn[ROW_TILES][CHUNKS][4];  // channels of ROW_TILES times 16 rows, eight columns
    bool irregular;                   // a weight
    bool exists;                      // the lane's eight channels of dv
    bf16* target;                     // those of its first token of the next 16
    Others others;                    // beside these

    template <typename Params>
    ProductWarp(const Params& params, const ProductPart& part) : dfn{}, others(params, part, channel_of(part)) {
        const uint32_t first = part.first_channel + warp_id() * WARP_CHANNELS;
        irregular = false;
        UNROLL
        for (int tile = 0; tile < CHANNEL_TILES; ++tile)
            irregular |= load_weight_tile(params, part, first, tile, fn[tile]);
        irregular = __any_sync(FULL_WARP, irregular);
        const uint32_t channel = first + lane_id() % 4 * PIECE;
        exists = channel < part.channels;
        target = channels_of(params, exists ? channel : 0) + (part.begin + lane_id() / 4) * params.dstreams_token_stride;
    }

    // The first of the lane's channels of dv; 0 if they do not exist.
    static uint32_t channel_of(const ProductPart& part) {
        const uint32_t channel = part.first_channel + warp_id() * WARP_CHANNELS + lane_id() % 4 * PIECE;
        return channel < part.channels ? channel : 0;
    }

    // The address in the first token.
    template <typename Params>
    static bf16* channels_of(const Params& params, uint32_t channel) {
        const uint32_t width = params.hidden_size;
        return params.dstreams + channel / width * params.dstreams_stream_stride + channel % width;
    }

    // dv of 16 tokens of a round from `first` on: the lane's two tokens and its channels. Without
    // a branch, so that what follows may start meanwhile.
    template <typename Params>
    void store_dv(const Params& params, int32_t tokens, const ProductShared<COLUMNS>& shared, int32_t round, int first,
                  const float (&sums)[CHANNEL_TILES][4], const typename Others::Rows& rows) {
        const int piece = warp_id() * (WARP_CHANNELS / PIECE) + lane_id() % 4;
        const int32_t left = tokens - round * ROUND_TOKENS;
        UNROLL
        for (int row = 0; row < 2; ++row) {
            const int at = first + row * 8 + lane_id() / 4;
            const float factor = shared.number(round, at, COLUMNS);
            float v[PIECE], dv[PIECE];
            unpack<bf16>(shared.channels[round % PRODUCT_STAGES][at][permuted(at, piece)], v);
            UNROLL
            for (int e = 0; e < PIECE; ++e) dv[e] = sums[e / 2][2 * row + e % 2] - factor * v[e];
            rows.add(row, dv);
            const Vec16 vector = pack<bf16>(dv);
            if (at < left && exists) store_vec16(target + row * 8 * params.dstreams_token_stride, vector);
        }
        target += WARP_TOKENS * params.dstreams_token_stride;
    }

    // Adds what 16 tokens give to dfn.
    void add_dfn(int32_t round, int first) {
        const int row = first + lane_id() % WARP_TOKENS, second = lane_id() / WARP_TOKENS;
        const int token = first + second * 8 + lane_id() % 8, piece = warp_id() * (WARP_CHANNELS / PIECE) + lane_id() / 8 % 2;
        uint32_t v[ROW_TILES][4];
        float sums[ROW_TILES][CHUNKS][4] = {};
        UNROLL
        for (int tile = 0; tile < ROW_TILES; ++tile)
            ldmatrix_x4_transposed(v[tile], ProductShared<COLUMNS>::channels_at(round, token, piece + 2 * tile));
        UNROLL
        for (int part = PARTS - 1; part >= 0; --part) {
            uint32_t two[4], third[2];
            ldmatrix_x4_transposed(two, ProductShared<COLUMNS>::parts_at(round, row, CHUNKS * part + second));
            ldmatrix_x2_transposed(third, ProductShared<COLUMNS>::parts_at(round, row, CHUNKS * part + 2));
            UNROLL
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                mma_bf16_16x8x16(sums[tile][0], v[tile], two[0], two[1]);
                mma_bf16_16x8x16(sums[tile][1], v[tile], two[2], two[3]);
                mma_bf16_16x8x16(sums[tile][2], v[tile], third[0], third[1]);
            }
        }
        UNROLL
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                UNROLL
                for (int c = 0; c < 4; ++c) dfn[tile][chunk][c] += 1.0f / WEIGHT_SCALE * sums[tile][chunk][c];
            }
        }
    }

    // After a round: adds to dfn what fours of values give that counted as zeros, and stores dv of
    // such tokens again. If a weight is irregular it stores dv of all tokens again.
    template <typename Params>
    void mend(const Params& params, const ProductShared<COLUMNS>& shared, int32_t round) {
        const uint32_t(&large)[FOURS] = shared.large[round % 2];
        uint32_t tokens = irregular ? FULL_WARP : 0;
        UNROLL
        for (int four = 0; four < FOURS; ++four) tokens |= large[four];
        if (tokens == 0) return;
        // Other lanes stored what is stored again here.
        __syncwarp();
        const ProductPart part(params);
        const int32_t left = minimum(part.tokens - round * ROUND_TOKENS, ROUND_TOKENS);
        UNROLL_BY(1)
        for (int at = 0; at < left; ++at) {
            if (!(tokens >> at & 1)) continue;
            const auto& channels = shared.channels[round % PRODUCT_STAGES][at];
            // A lane a piece.
            const uint32_t channel = part.first_channel + warp_id() * WARP_CHANNELS + lane_id() * PIECE;
            if (lane_id() < WARP_CHANNELS / PIECE && channel < part.channels) {
                float v[PIECE], dv[PIECE];
                unpack<bf16>(channels[permuted(at, warp_id() * (WARP_CHANNELS / PIECE) + lane_id())], v);
                multiply_plainly(params, part, shared, round, at, channel, dv);
                UNROLL
                for (int e = 0; e < PIECE; ++e) dv[e] -= shared.number(round, at, COLUMNS) * v[e];
                const int64_t token = part.begin + round * ROUND_TOKENS + at;
                Others::add_plainly(params, token, channel, dv);
                store_vec16(channels_of(params, channel) + token * params.dstreams_token_stride, pack<bf16>(dv));
            }
            UNROLL
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                UNROLL
                for (int c = 0; c < 4; ++c) {
                    const int channel = warp_id() * WARP_CHANNELS + 16 * tile + 8 * (c / 2) + lane_id() / 4;
                    const Vec16& piece = channels[permuted(at, channel / PIECE)];
                    const float v = to_float(reinterpret_cast<const bf16*>(&piece)[channel % PIECE]);
                    UNROLL
                    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                        const int column = 8 * chunk + 2 * (lane_id() % 4) + c % 2;
                        if (large[column / 4] >> at & 1) dfn[tile][chunk][c] += v * shared.number(round, at, column);
                    }
                }
            }
        }
    }

    template <typename Params>
    void store_dfn(const Params& params) const {
        const ProductPart part(params);
        const int64_t channels = part.channels;
        float* const partial = params.dfn_partials + ProductPart::split_of(params) * COLUMNS * channels;
        UNROLL
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            UNROLL
            for (int c = 0; c < 4; ++c) {
                const uint32_t own = part.first_channel + warp_id() * WARP_CHANNELS + 16 * tile + 8 * (c / 2) + lane_id() / 4;
                if (own >= part.channels) continue;
                UNROLL
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    partial[(8 * chunk + 2 * (lane_id() % 4) + c % 2) * channels + own] = dfn[tile][chunk][c];
            }
        }
    }
};

// ---------------------------------------------------------------- a block

template <int COLUMNS, typename Others = NoOthers, typename Params>
DEVICE void backward_products(const Params& params) {
    auto& shared = *reinterpret_cast<ProductShared<COLUMNS>*>(dynamic_shared());
    const ProductPart part(params);
    // The values of a round are split during the round before, so they arrive with the channels of
    // the round before. This order and this count of rounds fit 128 registers on sm_80, too. L2
    // prefetches of other terms run a round ahead.
    ProductWarp<COLUMNS, Others> warp(params, part);
    ChannelCopies<COLUMNS> copies(params, part);
    NumberCopies<COLUMNS> numbers(params.numbers, part);
    Others::prefetch(params, part, 0);
    numbers.start(params.numbers, part.tokens, 0);
    copy_commit();
    UNROLL_BY(1)
    for (int32_t round = 0; round < PRODUCT_STAGES - 1; ++round) {
        numbers.start(params.numbers, part.tokens, round + 1);
        copies.start(params, part.tokens, round);
    }
    copy_wait<PRODUCT_STAGES - 1>();
    __syncthreads();
    split_numbers(shared, 0);
    for (int32_t round = 0; round * ROUND_TOKENS < part.tokens; ++round) {
        copy_wait<PRODUCT_STAGES - 2>();
        // The round's channels and parts and the next round's values have arrived, and the slots
        // of the round before are free.
        __syncthreads();
        Others::prefetch(params, part, round + 1);
        numbers.start(params.numbers, part.tokens, round + PRODUCT_STAGES);
        copies.start(params, part.tokens, round + PRODUCT_STAGES - 1);
        split_numbers(shared, round + 1);
        UNROLL_BY(1)
        for (int first = 0; first < ROUND_TOKENS && round * ROUND_TOKENS + first < part.tokens; first += WARP_TOKENS) {
            float sums[CHANNEL_TILES][4] = {};
            const auto rows = warp.others.load(params, part.tokens - round * ROUND_TOKENS - first);
            multiply_weights<COLUMNS>(round, first, warp.fn, sums);
            warp.store_dv(params, part.tokens, shared, round, first, sums, rows);
            // dfn's loads stay after this barrier: earlier ones would take more registers than
            // there are.
            __syncwarp();
            warp.add_dfn(round, first);
        }
        warp.mend(params, shared, round);
    }
    warp.store_dfn(params);
}
