// The gradients of projection_backward.h by tensor cores, of streams that lie as whole accesses of 16 bytes.
// mhc_mix_backward.cu has the formulas. With g the numbers rstd dmix of a token, both products have a factor of fp32, or two:
//
//     dfn = g^T v      v is bf16; g is split into three bf16 numbers that are it exactly (projection.h)
//     dv = g fn        of 3 x 3 products of such parts the six largest; the other three are below 2^-24 of the result
//
// so that all products are exact, and 16 at a time are added with one truncation. dfn's begin at zero for every 16 tokens, and fp32
// adds these sums.
//
// A block has 512 channels and a part of the tokens, 32 at a time (a round). Their channels come by cp.async to one of four places,
// in which every row of 128 bytes is permuted so that neither the eight rows of ldmatrix nor the lanes of four rows meet in a bank.
// Their numbers are split once for all eight warps, those of a round while the one before is multiplied. A warp has 64 channels: its
// parts of fn stay in registers for all tokens, and so do its sums of dfn. The columns of a product of dv are channels in such an
// order that a lane's are eight neighbours, 16 bytes (channel_of_column).
//
// Parts of numbers are made of 2^16 times each, which is not done to what is 2^40 or more or no number: the rows of such a token, and
// of fn's such channels, are made by plain fp32, and so is dfn of its 16 tokens.
#pragma once

#include "projection.h"
#include "projection_backward.h"

constexpr int PRODUCT_THREADS = 256, PRODUCT_WARPS = PRODUCT_THREADS / WARP_SIZE;
constexpr int WARP_CHANNELS = 64, PRODUCT_CHANNELS = PRODUCT_WARPS * WARP_CHANNELS;
constexpr int ROUND_TOKENS = WARP_SIZE;  // a lane for each where their numbers are split
constexpr int PRODUCT_STAGES = 4;
constexpr int ROW_PIECES = PRODUCT_CHANNELS / PIECE;
constexpr int CHANNEL_TILES = WARP_CHANNELS / 8;  // of eight columns of dv
constexpr int HALF_TILES = CHANNEL_TILES / 2;     // whose channels lie together: a lane's 16 bytes
constexpr float LARGE = 1099511627776.0f;         // 2^40

template <int COLUMNS>
struct ProductShared {
    static constexpr int PARTS_PIECES = PARTS * COLUMNS / PIECE;
    Vec16 channels[PRODUCT_STAGES][ROUND_TOKENS][ROW_PIECES];
    Vec16 parts[2][ROUND_TOKENS][PARTS_PIECES];  // of a token's numbers: all columns of the leading part first
    float factors[2][ROUND_TOKENS];
    uint32_t large[2][PRODUCT_WARPS];  // bits of tokens, of which one of four columns is large
};

DEVICE bool is_large(float x) { return !(absolute_f32(x) < LARGE); }

// Where a piece of a token's row lies: rows of ldmatrix are eight tokens, and lanes that read four pieces of each of two tokens
// have even and odd ones.
DEVICE int permuted(int token, int piece) { return piece ^ ((token & 1) << 2 | (token >> 1 & 3)); }

// The channel, of 32, of column `column` of tile `tile` of four: those of lane t, columns 2t and 2t + 1, are 8t to 8t + 7.
DEVICE int channel_of_column(int tile, int column) { return column / 2 * PIECE + 2 * tile + column % 2; }

// What a block makes: `channels` from its first one on, of the tokens of a part.
struct ProductPart {
    int64_t channels, first_channel, split, begin;
    int32_t tokens;

    template <typename Params>
    explicit ProductPart(const Params& params) {
        channels = static_cast<int64_t>(STREAMS) * params.hidden_size, split = blockIdx.x % params.splits;
        first_channel = static_cast<int64_t>(blockIdx.x / params.splits) * PRODUCT_CHANNELS;
        begin = params.num_tokens * split / params.splits;
        tokens = static_cast<int32_t>(params.num_tokens * (split + 1) / params.splits - begin);
    }
};

// ---------------------------------------------------------------- channels

// Copies the channels of one round after the other to shared memory: a thread one piece of every fourth token.
template <int COLUMNS>
struct ChannelCopies {
    static constexpr int ROWS = PRODUCT_THREADS / ROW_PIECES, COUNT = ROUND_TOKENS / ROWS;
    static_assert(ROWS == 4, "of tokens four apart the order of pieces differs in one bit");
    const bf16* source;  // the thread's piece of its first token of the next round
    int64_t stride;
    int32_t left;  // tokens, from that one on; none where there is no such channel
    SharedAddress places[2];  // of even and odd tokens of its own, of the first round

    template <typename Params>
    ChannelCopies(const Params& params, const ProductPart& part, ProductShared<COLUMNS>& shared) {
        const int row = threadIdx.x / ROW_PIECES, piece = threadIdx.x % ROW_PIECES;
        const int64_t channel = part.first_channel + static_cast<int64_t>(piece) * PIECE;
        const bool exists = channel < part.channels;
        const int64_t at = exists ? channel : 0;
        stride = params.streams_token_stride;
        source = params.streams + at / params.hidden_size * params.streams_stream_stride + at % params.hidden_size +
                 (part.begin + row) * stride;
        left = exists ? part.tokens - row : 0;
        UNROLL
        for (int i = 0; i < 2; ++i)
            places[i] = shared_address(&shared.channels[0][row + i * ROWS][permuted(row + i * ROWS, piece)]);
    }

    // Zeros behind the last token and behind the last channel.
    void start(const bf16* any, int32_t round) {
        constexpr int ROW_BYTES = ROW_PIECES * sizeof(Vec16);
        const uint32_t stage = round % PRODUCT_STAGES * (ROUND_TOKENS * ROW_BYTES);
        UNROLL
        for (int i = 0; i < COUNT; ++i) {
            const bool wanted = i * ROWS < left;
            copy_async_16(places[i % 2] + stage + i / 2 * (2 * ROWS * ROW_BYTES), wanted ? source : any, wanted);
            source += ROWS * stride;
        }
        left -= ROUND_TOKENS;
        copy_commit();
    }
};

// ---------------------------------------------------------------- numbers

// Four numbers of a token of a round: warps 0 to COLUMNS / 4 - 1 have those of four columns, the next one the factor of v.
template <int COLUMNS>
struct Numbers {
    static constexpr int FOURS = COLUMNS / 4;
    static_assert(FOURS < PRODUCT_WARPS, "a warp for each four columns and one for the factor");
    float own[4];

    // Zeros behind the last token.
    void load(const float* numbers, const ProductPart& part, int32_t round) {
        const int64_t token = static_cast<int64_t>(round) * ROUND_TOKENS + lane_id();
        UNROLL
        for (int i = 0; i < 4; ++i) own[i] = 0.0f;
        if (warp_id() <= FOURS && token < part.tokens)
            load_elements<4>(numbers + (part.begin + token) * (COLUMNS + 4) + 4 * warp_id(), own);
    }
    void store(ProductShared<COLUMNS>& shared, int stage) const {
        const int warp = warp_id();
        bool large = false;
        UNROLL
        for (int i = 0; i < 4; ++i) large |= is_large(own[i]);
        const uint32_t tokens = __ballot_sync(FULL_WARP, warp < FOURS && large);
        if (lane_id() == 0) shared.large[stage][warp] = tokens;
        if (warp == FOURS) shared.factors[stage][lane_id()] = own[0];
        if (warp >= FOURS) return;
        uint32_t first[PARTS], second[PARTS];
        split_finite_pair(WEIGHT_SCALE * own[0], WEIGHT_SCALE * own[1], first);
        split_finite_pair(WEIGHT_SCALE * own[2], WEIGHT_SCALE * own[3], second);
        bf16* const row = reinterpret_cast<bf16*>(shared.parts[stage][lane_id()]);
        UNROLL
        for (int part = 0; part < PARTS; ++part)
            *reinterpret_cast<uint64_t*>(row + part * COLUMNS + 4 * warp) =
                first[part] | static_cast<uint64_t>(second[part]) << 32;
    }
};

// ---------------------------------------------------------------- dv

// Three chunks of eight columns of each part are multiplied two by two: the first two of a part with those of another one, and of
// the third ones two parts with two parts. What a warp has of fn, for a tile of eight channels: chunks 0 and 1 of each part, then
// of chunk 2 parts 0 and 1, and 2 and 0.
struct WeightTile {
    uint32_t pairs[PARTS][2], third[2][2];
};
// What it has of 16 tokens' numbers: chunks 0 and 1 of each part; of chunk 2 part 0 twice, part 1 twice, and 0 and 2.
struct NumberTile {
    uint32_t pairs[PARTS][4], third[3][4];
};

template <typename Params>
DEVICE float weight(const Params& params, const ProductPart& part, int column, int64_t channel) {
    return channel < part.channels ? params.fn[column * part.channels + channel] : 0.0f;
}

// Those of the channels from `first` on; returns whether one of them is large.
template <typename Params>
DEVICE bool load_weight_tile(const Params& params, const ProductPart& part, int64_t first, int tile, WeightTile& to) {
    const int64_t channel = first + channel_of_column(tile, lane_id() / 4);
    bool large = false;
    UNROLL
    for (int chunk = 0; chunk < 3; ++chunk) {
        const int column = 8 * chunk + 2 * (lane_id() % 4);
        const float low = weight(params, part, column, channel), high = weight(params, part, column + 1, channel);
        large |= is_large(low) || is_large(high);
        uint32_t words[PARTS];
        split_finite_pair(WEIGHT_SCALE * low, WEIGHT_SCALE * high, words);
        UNROLL
        for (int i = 0; i < PARTS && chunk < 2; ++i) to.pairs[i][chunk] = words[i];
        if (chunk == 2) to.third[0][0] = words[0], to.third[0][1] = words[1], to.third[1][0] = words[2], to.third[1][1] = words[0];
    }
    return large;
}

// Of the 16 tokens whose parts begin at `parts`: lane i names row i % 16, of the first of two chunks or of the second.
template <int COLUMNS>
DEVICE void load_number_tile(SharedAddress parts, NumberTile& to) {
    static_assert(COLUMNS == 24, "three chunks of eight columns");
    constexpr int ROW = sizeof(Vec16) * ProductShared<COLUMNS>::PARTS_PIECES;
    const int second = lane_id() / WARP_TOKENS;
    const SharedAddress row = parts + lane_id() % WARP_TOKENS * ROW;
    const auto chunk = [](int part, int chunk) { return static_cast<int>(sizeof(Vec16)) * (3 * part + chunk); };
    UNROLL
    for (int part = 0; part < PARTS; ++part) ldmatrix_x4(to.pairs[part], row + chunk(part, second));
    UNROLL
    for (int part = 0; part < 2; ++part) ldmatrix_x4(to.third[part], row + chunk(part, 2));
    ldmatrix_x4(to.third[2], row + chunk(2 * second, 2));
}

DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_16x8x16(sums, a, b[0], b[1]); }

// g fn of 16 tokens and all channels of the warp, 2^32 times: the smallest products first.
DEVICE void multiply_weights(const NumberTile& g, const WeightTile (&fn)[CHANNEL_TILES], float (&sums)[CHANNEL_TILES][4]) {
    const auto add = [&](const uint32_t (&a)[4], const auto& of_tile) {
        UNROLL
        for (int tile = 0; tile < CHANNEL_TILES; ++tile) multiply(sums[tile], a, of_tile(fn[tile]));
    };
    const auto pairs = [](int part) {
        return [part](const WeightTile& tile) -> const uint32_t(&)[2] { return tile.pairs[part]; };
    };
    const auto third = [](int which) {
        return [which](const WeightTile& tile) -> const uint32_t(&)[2] { return tile.third[which]; };
    };
    add(g.pairs[2], pairs(0));
    add(g.pairs[0], pairs(2));
    add(g.pairs[1], pairs(1));
    add(g.third[2], third(1));
    add(g.third[1], third(0));
    add(g.pairs[1], pairs(0));
    add(g.pairs[0], pairs(1));
    add(g.third[0], third(0));
    add(g.pairs[0], pairs(0));
}

// g fn of one token and eight channels, of any numbers.
template <int COLUMNS, typename Params>
DEVICE void multiply_plainly(const Params& params, const ProductPart& part, int32_t token, int64_t channel,
                             float (&dv)[PIECE]) {
    const float* const numbers = params.numbers + (part.begin + token) * (COLUMNS + 4);
    UNROLL
    for (int e = 0; e < PIECE; ++e) dv[e] = 0.0f;
    UNROLL_BY(1)
    for (int q = 0; q < COLUMNS; ++q) {
        const float g = numbers[q];
        UNROLL
        for (int e = 0; e < PIECE; ++e) dv[e] += params.fn[q * part.channels + channel + e] * g;
    }
}

// ---------------------------------------------------------------- a warp

template <int COLUMNS>
struct ProductWarp {
    static constexpr int CHUNKS = COLUMNS / 8, ROW_TILES = WARP_CHANNELS / 16;
    WeightTile fn[CHANNEL_TILES];
    float dfn[ROW_TILES][CHUNKS][4];  // channels of ROW_TILES times 16 rows, eight columns
    bool large;                       // a weight
    bool exists[2];                   // channels of either half of the warp's, of which a lane has eight
    bf16* target[2];                  // those of its first token of the next 16

    template <typename Params>
    ProductWarp(const Params& params, const ProductPart& part) : dfn{} {
        const int64_t first = part.first_channel + warp_id() * WARP_CHANNELS;
        large = false;
        UNROLL
        for (int tile = 0; tile < CHANNEL_TILES; ++tile)
            large |= load_weight_tile(params, part, first + tile / HALF_TILES * (WARP_CHANNELS / 2), tile % HALF_TILES, fn[tile]);
        large = __any_sync(FULL_WARP, large);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const int64_t channel = channel_of_half(part, half);
            exists[half] = channel < part.channels;
            const int64_t at = exists[half] ? channel : 0;
            target[half] = params.dstreams + at / params.hidden_size * params.dstreams_stream_stride + at % params.hidden_size +
                           (part.begin + lane_id() / 4) * params.dstreams_token_stride;
        }
    }

    static int64_t channel_of_half(const ProductPart& part, int half) {
        return part.first_channel + warp_id() * WARP_CHANNELS + half * (WARP_CHANNELS / 2) + lane_id() % 4 * PIECE;
    }

    // dv of 16 tokens from `first` of a round on: the lane's two and their sixteen channels.
    template <typename Params>
    void store_dv(const Params& params, const ProductPart& part, const ProductShared<COLUMNS>& shared, int32_t round, int first,
                  uint32_t large_tokens, const float (&sums)[CHANNEL_TILES][4]) {
        const int32_t left = part.tokens - round * ROUND_TOKENS;
        UNROLL
        for (int row = 0; row < 2; ++row) {
            const int at = first + row * 8 + lane_id() / 4;
            const float factor = shared.factors[round % 2][at];
            UNROLL
            for (int half = 0; half < 2; ++half) {
                if (at >= left || !exists[half]) continue;
                float v[PIECE], dv[PIECE];
                const int piece = warp_id() * (WARP_CHANNELS / PIECE) + half * HALF_TILES + lane_id() % 4;
                unpack<bf16>(load_vec16(&shared.channels[round % PRODUCT_STAGES][at][permuted(at, piece)]), v);
                UNROLL
                for (int e = 0; e < PIECE; ++e)
                    dv[e] = 1.0f / WEIGHT_SCALE / WEIGHT_SCALE * sums[half * HALF_TILES + e / 2][2 * row + e % 2];
                if (large || (large_tokens >> at & 1))
                    multiply_plainly<COLUMNS>(params, part, round * ROUND_TOKENS + at, channel_of_half(part, half), dv);
                UNROLL
                for (int e = 0; e < PIECE; ++e) dv[e] -= factor * v[e];
                store_vec16(target[half] + row * 8 * params.dstreams_token_stride, pack<bf16>(dv));
            }
        }
        UNROLL
        for (int half = 0; half < 2; ++half) target[half] += WARP_TOKENS * params.dstreams_token_stride;
    }

    // Adds to dfn what 16 tokens give.
    void add_dfn(const ProductShared<COLUMNS>& shared, int32_t round, int first) {
        const SharedAddress parts = shared_address(&shared.parts[round % 2][first + lane_id() % WARP_TOKENS][0]);
        uint32_t g[PARTS * CHUNKS][2];
        UNROLL
        for (int chunk = 0; chunk + 1 < PARTS * CHUNKS; chunk += 2) {
            uint32_t two[4];
            ldmatrix_x4_transposed(two, parts + sizeof(Vec16) * (chunk + lane_id() / WARP_TOKENS));
            g[chunk][0] = two[0], g[chunk][1] = two[1], g[chunk + 1][0] = two[2], g[chunk + 1][1] = two[3];
        }
        ldmatrix_x2_transposed(g[PARTS * CHUNKS - 1], parts + sizeof(Vec16) * (PARTS * CHUNKS - 1));
        const int token = first + lane_id() / 16 * 8 + lane_id() % 8, piece = warp_id() * (WARP_CHANNELS / PIECE) + lane_id() / 8 % 2;
        UNROLL
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            uint32_t v[4];
            float sums[CHUNKS][4] = {};
            ldmatrix_x4_transposed(
                v, shared_address(&shared.channels[round % PRODUCT_STAGES][token][permuted(token, piece + 2 * tile)]));
            UNROLL
            for (int part = PARTS - 1; part >= 0; --part) {
                UNROLL
                for (int chunk = 0; chunk < CHUNKS; ++chunk) multiply(sums[chunk], v, g[part * CHUNKS + chunk]);
            }
            UNROLL
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                UNROLL
                for (int c = 0; c < 4; ++c) dfn[tile][chunk][c] += 1.0f / WEIGHT_SCALE * sums[chunk][c];
            }
        }
    }

    // The same, of any numbers.
    template <typename Params>
    void add_dfn_plainly(const Params& params, const ProductPart& part, const ProductShared<COLUMNS>& shared, int32_t round,
                         int first) {
        const int32_t count = minimum(part.tokens - round * ROUND_TOKENS - first, WARP_TOKENS);
        UNROLL_BY(1)
        for (int at = first; at < first + count; ++at) {
            const float* const numbers =
                params.numbers + (part.begin + static_cast<int64_t>(round) * ROUND_TOKENS + at) * (COLUMNS + 4);
            UNROLL
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                UNROLL
                for (int c = 0; c < 4; ++c) {
                    const int channel = 16 * tile + 8 * (c / 2) + lane_id() / 4;
                    const int piece = (warp_id() * WARP_CHANNELS + channel) / PIECE;
                    const Vec16& vector = shared.channels[round % PRODUCT_STAGES][at][permuted(at, piece)];
                    const float v = to_float(reinterpret_cast<const bf16*>(&vector)[channel % PIECE]);
                    UNROLL
                    for (int chunk = 0; chunk < CHUNKS; ++chunk)
                        dfn[tile][chunk][c] += v * numbers[8 * chunk + 2 * (lane_id() % 4) + c % 2];
                }
            }
        }
    }

    template <typename Params>
    void store_dfn(const Params& params, const ProductPart& part) const {
        float* const partial = params.dfn_partials + part.split * COLUMNS * part.channels;
        UNROLL
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            UNROLL
            for (int c = 0; c < 4; ++c) {
                const int64_t own = part.first_channel + warp_id() * WARP_CHANNELS + 16 * tile + 8 * (c / 2) + lane_id() / 4;
                if (own >= part.channels) continue;
                UNROLL
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    partial[(8 * chunk + 2 * (lane_id() % 4) + c % 2) * part.channels + own] = dfn[tile][chunk][c];
            }
        }
    }
};

// ---------------------------------------------------------------- a block

template <int COLUMNS, typename Params>
DEVICE void backward_products(const Params& params) {
    auto& shared = *reinterpret_cast<ProductShared<COLUMNS>*>(dynamic_shared());
    const ProductPart part(params);
    ChannelCopies<COLUMNS> copies(params, part, shared);
    const int32_t rounds = ceil_div(part.tokens, ROUND_TOKENS);
    for (int32_t round = 0; round < PRODUCT_STAGES - 1; ++round) copies.start(params.streams, round);
    Numbers<COLUMNS> numbers;
    numbers.load(params.numbers, part, 0);
    numbers.store(shared, 0);
    numbers.load(params.numbers, part, 1);
    ProductWarp<COLUMNS> warp(params, part);
    for (int32_t round = 0; round < rounds; ++round) {
        copy_wait<PRODUCT_STAGES - 2>();
        // A round's channels and numbers are there, and the places of the one before are free.
        __syncthreads();
        copies.start(params.streams, round + PRODUCT_STAGES - 1);
        numbers.store(shared, (round + 1) % 2);
        numbers.load(params.numbers, part, round + 2);
        uint32_t large = 0;
        UNROLL
        for (int four = 0; four < Numbers<COLUMNS>::FOURS; ++four) large |= shared.large[round % 2][four];
        UNROLL_BY(1)
        for (int first = 0; first < ROUND_TOKENS; first += WARP_TOKENS) {
            NumberTile g;
            float sums[CHANNEL_TILES][4] = {};
            load_number_tile<COLUMNS>(shared_address(shared.parts[round % 2][first]), g);
            multiply_weights(g, warp.fn, sums);
            warp.store_dv(params, part, shared, round, first, large, sums);
            if (large >> first & 0xffffu) warp.add_dfn_plainly(params, part, shared, round, first);
            else warp.add_dfn(shared, round, first);
        }
    }
    warp.store_dfn(params, part);
}
