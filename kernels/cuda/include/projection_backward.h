// The gradients of the residual streams and of the weights of their projection (training 11.1), both of one reading of
// the streams. mhc_mix_backward.cu has formulas and layout. Of each token there are numbers in memory, four at a time:
// rstd dmix of COLUMNS columns, then the factor of v, and what else add_other wants. It adds to dv what a kernel has
// beside these terms, by what load_other has read.
#pragma once

#include "memory.h"
#include "numeric.h"
#include "streams.h"

constexpr int STREAMS_THREADS = 128;
constexpr int STAGED_TOKENS = 32;  // whose numbers a block holds
constexpr int AT_ONCE = 8;  // tokens whose channels a thread has under way

// The numbers of STAGED_TOKENS tokens from `first` on, and zeros for tokens that are not of the block's part.
template <int NUMBERS>
DEVICE void stage(const float* numbers, int64_t first, int64_t end, Vec16 (&staged)[STAGED_TOKENS][NUMBERS / 4]) {
    __syncthreads();
    for (int at = threadIdx.x; at < STAGED_TOKENS * (NUMBERS / 4); at += STREAMS_THREADS) {
        const int64_t token = first + at / (NUMBERS / 4);
        Vec16 four{};
        if (token < end) four = load_vec16(numbers + token * NUMBERS + at % (NUMBERS / 4) * 4);
        staged[at / (NUMBERS / 4)][at % (NUMBERS / 4)] = four;
    }
    __syncthreads();
}

// Channels that a thread owns, or none where they lie beyond the last one.
template <int COLUMNS, int CHANNELS>
struct Owned {
    bool exists;
    int64_t channel, stream, within;
    float fn[COLUMNS][CHANNELS], dfn[COLUMNS][CHANNELS];
};

// dv of a token's channels, and its part of dfn.
template <int COLUMNS, int CHANNELS>
DEVICE void add_token(Owned<COLUMNS, CHANNELS>& own, const Vec16* numbers, const float (&v)[CHANNELS],
                      float (&dv)[CHANNELS]) {
    float four[4];
    unpack<float>(numbers[COLUMNS / 4], four);
    UNROLL
    for (int c = 0; c < CHANNELS; ++c) dv[c] = -(four[0] * v[c]);
    UNROLL
    for (int q = 0; q < COLUMNS; q += 4) {
        unpack<float>(numbers[q / 4], four);
        UNROLL
        for (int i = 0; i < 4; ++i) {
            UNROLL
            for (int c = 0; c < CHANNELS; ++c) {
                dv[c] += own.fn[q + i][c] * four[i];
                own.dfn[q + i][c] += v[c] * four[i];
            }
        }
    }
}

// One channel, or two neighbouring ones at a multiple of 4 bytes.
template <int CHANNELS>
DEVICE void store_channels(bf16* target, const float (&dv)[CHANNELS]) {
    if constexpr (CHANNELS == 2) *reinterpret_cast<uint32_t*>(target) = pack_bf16(dv[0], dv[1]);
    if constexpr (CHANNELS == 1) *target = to_bf16(dv[0]);
}

template <int COLUMNS, int CHANNELS, typename Params, int PLACES>
DEVICE void backward_streams(const Params& params, Vec16 (&staged)[STAGED_TOKENS][PLACES]) {
    const int64_t channels = static_cast<int64_t>(STREAMS) * params.hidden_size, split = blockIdx.x % params.splits;
    const int64_t begin = params.num_tokens * split / params.splits;
    const int64_t end = params.num_tokens * (split + 1) / params.splits;
    Owned<COLUMNS, CHANNELS> own = {};
    own.channel = (static_cast<int64_t>(blockIdx.x / params.splits) * STREAMS_THREADS + threadIdx.x) * CHANNELS;
    own.exists = own.channel < channels;
    own.stream = own.channel / params.hidden_size, own.within = own.channel % params.hidden_size;
    for (int q = 0; q < COLUMNS && own.exists; ++q)
        for (int c = 0; c < CHANNELS; ++c) own.fn[q][c] = params.fn[q * channels + own.channel + c];
    const bf16* const from = params.streams + own.stream * params.streams_stream_stride + own.within;
    bf16* const to = params.dstreams + own.stream * params.dstreams_stream_stride + own.within;
    for (int64_t first = begin; first < end; first += STAGED_TOKENS) {
        stage<4 * PLACES>(params.numbers, first, end, staged);
        for (int at = 0; at < STAGED_TOKENS && first + at < end && own.exists; at += AT_ONCE) {
            float v[AT_ONCE][CHANNELS] = {}, other[AT_ONCE][CHANNELS] = {}, dv[CHANNELS];
            UNROLL
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + at + i >= end) continue;
                load_elements<CHANNELS>(from + (first + at + i) * params.streams_token_stride, v[i]);
                load_other(params, own, first + at + i, other[i]);
            }
            UNROLL
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + at + i >= end) continue;
                add_token(own, staged[at + i], v[i], dv);
                add_other(params, own, staged[at + i], other[i], dv);
                store_channels(to + (first + at + i) * params.dstreams_token_stride, dv);
            }
        }
    }
    float* const partial = params.dfn_partials + split * COLUMNS * channels + own.channel;
    for (int q = 0; q < COLUMNS && own.exists; ++q)
        for (int c = 0; c < CHANNELS; ++c) partial[q * channels + c] = own.dfn[q][c];
}
