// The gradients of the residual streams and of the weights of their projection (training 11.1),
// both from one read of the streams. mhc_mix_backward.cu has the formulas and the layout. Each
// token has `numbers` in memory, four at a time: rstd dmix of COLUMNS columns, then the factor of
// v, then what else add_other needs. add_other adds a kernel's other terms to dv. In the wide
// kernels they come through shared memory from other_of; in the narrow ones load_other reads them.
#pragma once

#include "projection.h"

constexpr int STREAMS_THREADS = 128;
constexpr int STAGED_TOKENS = 32;  // whose numbers a block of the narrow kernels has at a time
constexpr int AT_ONCE = 8;         // tokens whose channels a thread of the narrow kernels has in flight

// The channels that a thread owns; none of them exists past the last channel.
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

// One channel, or eight adjacent ones aligned to 16 bytes.
template <int CHANNELS>
DEVICE void store_channels(bf16* target, const float (&dv)[CHANNELS]) {
    if constexpr (CHANNELS == 8) store_vec16(target, pack<bf16>(dv));
    if constexpr (CHANNELS == 1) *target = to_bf16(dv[0]);
}

// A block's work: which channels, and of which tokens.
template <int COLUMNS, int CHANNELS>
struct Part {
    Owned<COLUMNS, CHANNELS> own;
    int64_t channels, split, begin, end;

    template <typename Params>
    explicit Part(const Params& params) : own{} {
        channels = static_cast<int64_t>(STREAMS) * params.hidden_size, split = blockIdx.x % params.splits;
        begin = params.num_tokens * split / params.splits, end = params.num_tokens * (split + 1) / params.splits;
        own.channel = (static_cast<int64_t>(blockIdx.x / params.splits) * STREAMS_THREADS + threadIdx.x) * CHANNELS;
        own.exists = own.channel < channels;
        // Channels are counted in 32 bits: a 64-bit division would be waited for before any load
        // starts.
        const uint32_t channel = static_cast<uint32_t>(own.channel), width = static_cast<uint32_t>(params.hidden_size);
        own.stream = channel / width, own.within = channel % width;
        for (int q = 0; q < COLUMNS && own.exists; ++q)
            for (int c = 0; c < CHANNELS; ++c) own.fn[q][c] = params.fn[q * channels + own.channel + c];
    }

    template <typename Params>
    void store(const Params& params) const {
        float* const partial = params.dfn_partials + split * COLUMNS * channels + own.channel;
        for (int q = 0; q < COLUMNS && own.exists; ++q)
            for (int c = 0; c < CHANNELS; ++c) partial[q * channels + c] = own.dfn[q][c];
    }
};

// The configuration of backward_wide. A thread owns CHANNELS channels. TOKENS tokens are in shared
// memory while as many are in flight. A token has `channels`, another row of the same channels if
// OTHERS is 1, and PLACES times four numbers.
template <int CHANNELS_, int TOKENS_, int OTHERS_, int PLACES_>
struct Wide {
    static constexpr int CHANNELS = CHANNELS_, TOKENS = TOKENS_, OTHERS = OTHERS_, PLACES = PLACES_;
    static constexpr int PIECES = STREAMS_THREADS * CHANNELS / PIECE;  // of a block's channels
    static constexpr int ROWS = STREAMS_THREADS / PIECES;              // that its threads copy at a time
    static_assert(PIECES <= STREAMS_THREADS, "a thread copies one piece of a row");

    struct Shared {
        Vec16 channels[2][1 + OTHERS][TOKENS][PIECES];
        Vec16 numbers[2][TOKENS][PLACES];
    };
};

// Copies to shared memory what a block needs of some tokens, 16 bytes a thread.
template <typename W>
struct Stager {
    const bf16* sources[2];
    int64_t strides[2];
    bool exists;

    template <typename Params>
    explicit Stager(const Params& params) {
        const uint32_t channel = (blockIdx.x / params.splits * W::PIECES + threadIdx.x % W::PIECES) * PIECE;
        const uint32_t width = static_cast<uint32_t>(params.hidden_size);
        const int64_t stream = channel / width, within = channel % width;
        exists = channel < STREAMS * width;
        sources[0] = params.streams + stream * params.streams_stream_stride + within;
        strides[0] = params.streams_token_stride;
        if constexpr (W::OTHERS == 1) sources[1] = other_of(params) + within, strides[1] = other_stride(params);
    }

    // Tokens from `first` on; zeros from `end` on. Loops stay rolled: unrolled, their addresses
    // would take the registers of the sums.
    void start(const float* numbers, int64_t first, int64_t end, typename W::Shared& shared, int stage) const {
        const int count = static_cast<int>(minimum<int64_t>(end - first, W::TOKENS));
        const int row = threadIdx.x / W::PIECES;
        UNROLL
        for (int of = 0; of <= W::OTHERS; ++of) {
            const bf16* source = sources[of] + (first + row) * strides[of];
            SharedAddress target = shared_address(&shared.channels[stage][of][row][threadIdx.x % W::PIECES]);
            UNROLL_BY(1)
            for (int at = row; at < W::TOKENS; at += W::ROWS) {
                const bool wanted = exists && at < count;
                copy_async_16(target, wanted ? source : sources[of], wanted);
                source += W::ROWS * strides[of];
                target += W::ROWS * sizeof(shared.channels[0][0][0]);
            }
        }
        UNROLL_BY(1)
        for (int at = threadIdx.x; at < W::TOKENS * W::PLACES; at += STREAMS_THREADS)
            copy_async_16(shared_address(&shared.numbers[stage][at / W::PLACES][at % W::PLACES]),
                          numbers + first * 4 * W::PLACES + 4 * at, at / W::PLACES < count);
        copy_commit();
    }
};

// A thread's adjacent channels come through shared memory while the tokens before are processed.
// Rows are aligned to 16 bytes, and so are their sizes. The numbers are the same for all threads,
// but each thread waits for 16 bytes of every four. The more channels a thread owns, the smaller
// is that share of its time.
template <int COLUMNS, typename W, typename Params>
DEVICE void backward_wide(const Params& params) {
    auto& shared = *reinterpret_cast<typename W::Shared*>(dynamic_shared());
    Part<COLUMNS, W::CHANNELS> part(params);
    const Stager<W> stager(params);
    bf16* const to = params.dstreams + part.own.stream * params.dstreams_stream_stride + part.own.within;
    int stage = 1;
    for (int64_t first = part.begin - W::TOKENS; first < part.end; first += W::TOKENS, stage ^= 1) {
        stager.start(params.numbers, first + W::TOKENS, part.end, shared, stage ^ 1);
        if (first < part.begin) continue;
        copy_wait<1>();
        __syncthreads();
        const int count = part.own.exists ? static_cast<int>(minimum<int64_t>(part.end - first, W::TOKENS)) : 0;
        // Pointers advance by their own steps: addresses computed from the token's index took a
        // tenth of the instructions.
        const bf16* own = reinterpret_cast<const bf16*>(shared.channels[stage][0][0]) + threadIdx.x * W::CHANNELS;
        const Vec16* numbers = shared.numbers[stage][0];
        bf16* target = to + first * params.dstreams_token_stride;
        UNROLL_BY(1)
        for (int left = count; left > 0; --left) {
            float v[W::CHANNELS], other[W::CHANNELS] = {}, dv[W::CHANNELS];
            load_elements<W::CHANNELS>(own, v);
            if constexpr (W::OTHERS == 1) load_elements<W::CHANNELS>(own + W::TOKENS * W::PIECES * PIECE, other);
            own += W::PIECES * PIECE;
            add_token(part.own, numbers, v, dv);
            add_other(params, part.own, numbers, other, dv);
            store_channels(target, dv);
            numbers += W::PLACES;
            target += params.dstreams_token_stride;
        }
        // The stage is read and may be overwritten.
        __syncthreads();
    }
    part.store(params);
}

// One channel a thread, for any width, stride and alignment, with what load_other reads. The
// numbers of STAGED_TOKENS tokens are in shared memory; zeros for tokens outside of the block's
// split.
template <int COLUMNS, int CHANNELS, int PLACES, typename Params>
DEVICE void backward_narrow(const Params& params, Vec16 (&staged)[STAGED_TOKENS][PLACES]) {
    Part<COLUMNS, CHANNELS> part(params);
    const bf16* const from = params.streams + part.own.stream * params.streams_stream_stride + part.own.within;
    bf16* const to = params.dstreams + part.own.stream * params.dstreams_stream_stride + part.own.within;
    for (int64_t first = part.begin; first < part.end; first += STAGED_TOKENS) {
        __syncthreads();
        for (int at = threadIdx.x; at < STAGED_TOKENS * PLACES; at += STREAMS_THREADS)
            staged[at / PLACES][at % PLACES] = first + at / PLACES < part.end
                                                   ? load_vec16(params.numbers + first * 4 * PLACES + 4 * at)
                                                   : Vec16{};
        __syncthreads();
        for (int at = 0; at < STAGED_TOKENS && first + at < part.end && part.own.exists; at += AT_ONCE) {
            float v[AT_ONCE][CHANNELS] = {}, other[AT_ONCE][CHANNELS] = {}, dv[CHANNELS];
            UNROLL
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + at + i >= part.end) continue;
                load_elements<CHANNELS>(from + (first + at + i) * params.streams_token_stride, v[i]);
                load_other(params, part.own, first + at + i, other[i]);
            }
            UNROLL
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + at + i >= part.end) continue;
                add_token(part.own, staged[at + i], v[i], dv);
                add_other(params, part.own, staged[at + i], other[i], dv);
                store_channels(to + (first + at + i) * params.dstreams_token_stride, dv);
            }
        }
    }
    part.store(params);
}
