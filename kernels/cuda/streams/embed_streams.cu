// The residual streams of a token, each a copy of its embedding (inference 1).
//
//     out[t][s] = table[token_ids[t]] for every stream s; 0 if the id is none of 0..vocab_size-1
//     dtable[v] = sum over tokens t with token_ids[t] = v, in order, and streams s, of dout[t][s]
//
// Rows are copied bit for bit. An id that names no row is never looked up. Sums are fp32, in the
// order of tokens and then of streams, so a gradient has the same bits in every run. Rows of
// dtable that no token names are zeros.
//
// Forward: a thread loads its pieces of a token's row once, 16 bytes each, and stores them to each
// stream.
// Backward: the index kernels of sparse_attention_sums.cu list the tokens of each id, ascending,
// with ids as keys and tokens as slots. embed_streams_clear zeroes their counts first. Then a
// block takes a part of a row of dtable, with up to HELD streams of a token in flight.
//
// Floors, with s = sizeof(ELEMENT), at 4.24 TB/s. Forward: s (1 + num_streams) bytes a token and
// channel, 0.56 ms for 32768 tokens of 7168 bf16 channels and 4 streams. Backward: s num_streams
// bytes a token and channel and 4 a channel of the table, 1.3 ms with 129280 rows.
// Limit: memory, 87 to 94 % of a copy on one H200. If one id has most tokens, the latency of
// dependent sums is expected to limit the backward.
//
// Defines: ELEMENT  type of table, out and dout: bf16 or float. Launch: forward num_tokens blocks
// for each THREADS * PIECES pieces of a row (few: THREADS), backward vocab_size for each;
// embed_streams_clear ceil((vocab_size + 1) / THREADS).
// What was tried: kernels/docs/embed_streams.md.
#include "element.h"
#include "elements.h"
#include "memory.h"

constexpr int THREADS = 128;
constexpr int HELD = 4;    // streams that a thread has in flight
constexpr int FLOATS = 4;  // of a 16-byte access
constexpr int PIECES = 4;  // of a row that a thread has, so that blocks are few enough to be started in time

struct EmbedStreamsForwardParams {
    const ELEMENT* table; int64_t table_vocab_size_stride;              // [vocab_size, hidden_size]; strides in elements
    const int32_t* token_ids;                                           // [num_tokens]
    ELEMENT* out; int64_t out_token_stride; int64_t out_stream_stride;  // [num_tokens, num_streams, hidden_size]
    int32_t vocab_size;
    int32_t num_streams;
    int32_t hidden_size;
};

struct EmbedStreamsBackwardParams {
    const ELEMENT* dout; int64_t dout_token_stride; int64_t dout_stream_stride;  // [num_tokens, num_streams, hidden_size]
    float* dtable; int64_t dtable_vocab_size_stride;                             // [vocab_size, hidden_size]
    int32_t* counts;                                                             // [vocab_size + 1], the tokens of each id
    const int32_t* ends;                                                         // [vocab_size], where their list ends
    const int32_t* ordered;                                                      // [num_tokens], the lists
    int32_t vocab_size;
    int32_t num_streams;
    int32_t hidden_size;
};

// A thread's columns: OWN pieces of COUNT, at a distance of one piece of each thread of the block.
// So an access of a warp is contiguous.
template <int COUNT, int OWN = PIECES>
DEVICE int64_t first_column(uint32_t part) { return (static_cast<int64_t>(part) * OWN * THREADS + threadIdx.x) * COUNT; }
template <int COUNT>
constexpr int64_t NEXT_PIECE = THREADS * COUNT;

template <int COUNT, int OWN>
DEVICE void embed_forward(const EmbedStreamsForwardParams& params) {
    const uint32_t parts = pieces_of<THREADS * OWN, COUNT>(params.hidden_size);
    const int64_t token = blockIdx.x / parts, column = first_column<COUNT, OWN>(blockIdx.x % parts);
    const int64_t id = params.token_ids[token];
    float held[OWN][COUNT] = {};
    UNROLL
    for (int piece = 0; piece < OWN; ++piece) {
        const int64_t next = piece * NEXT_PIECE<COUNT>;
        if (column + next >= params.hidden_size) break;
        const ELEMENT* row = params.table + id * params.table_vocab_size_stride + column;
        if (id >= 0 && id < params.vocab_size) load_elements<COUNT>(row + next, held[piece]);
    }
    ELEMENT* out = params.out + token * params.out_token_stride + column;
    UNROLL
    for (int piece = 0; piece < OWN; ++piece) {
        const int64_t next = piece * NEXT_PIECE<COUNT>;
        if (column + next >= params.hidden_size) break;
        for (int stream = 0; stream < params.num_streams; ++stream)
            store_elements(out + stream * params.out_stream_stride + next, held[piece]);
    }
}

// Adds a token's streams to the sum, one after another.
template <int COUNT>
DEVICE void add_streams(const ELEMENT* streams, int64_t stride, int num_streams, float (&sum)[COUNT]) {
    for (int first = 0; first < num_streams; first += HELD) {
        float held[HELD][COUNT];
        UNROLL
        for (int i = 0; i < HELD; ++i)
            if (first + i < num_streams) load_elements<COUNT>(streams + (first + i) * stride, held[i]);
        UNROLL
        for (int i = 0; i < HELD; ++i)
            for (int e = 0; e < COUNT; ++e) sum[e] += first + i < num_streams ? held[i][e] : 0.0f;
    }
}

// Sums of four columns are 16 bytes of fp32, so a warp's stores are contiguous.
template <int COUNT>
DEVICE void embed_backward(const EmbedStreamsBackwardParams& params) {
    const uint32_t parts = pieces_of<THREADS * PIECES, COUNT>(params.hidden_size);
    const int64_t id = blockIdx.x / parts, column = first_column<COUNT>(blockIdx.x % parts);
    const int32_t count = params.counts[id];
    const int32_t* tokens = params.ordered + (params.ends[id] - count);
    float sums[PIECES][COUNT] = {};
    for (int32_t i = 0; i < count; ++i) {
        const int64_t token = tokens[i];
        const ELEMENT* dout = params.dout + token * params.dout_token_stride + column;
        UNROLL
        for (int piece = 0; piece < PIECES; ++piece) {
            const int64_t next = piece * NEXT_PIECE<COUNT>;
            if (column + next >= params.hidden_size) break;
            float(&sum)[COUNT] = sums[piece];
            add_streams(dout + next, params.dout_stream_stride, params.num_streams, sum);
        }
    }
    float* target = params.dtable + id * params.dtable_vocab_size_stride + column;
    UNROLL
    for (int piece = 0; piece < PIECES; ++piece) {
        const int64_t next = piece * NEXT_PIECE<COUNT>;
        if (column + next < params.hidden_size) store_elements(target + next, sums[piece]);
    }
}

KERNEL(embed_streams_clear, EmbedStreamsBackwardParams, THREADS) {
    const int64_t id = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (id <= params.vocab_size) params.counts[id] = 0;
}

KERNEL(embed_streams_forward_vector, EmbedStreamsForwardParams, THREADS) { embed_forward<VECTOR, PIECES>(params); }
// For few tokens: with several pieces a thread the SMs would have too few loads in flight.
KERNEL(embed_streams_forward_few, EmbedStreamsForwardParams, THREADS) { embed_forward<VECTOR, 1>(params); }
KERNEL(embed_streams_forward_scalar, EmbedStreamsForwardParams, THREADS) { embed_forward<1, PIECES>(params); }
// Enough blocks to hide three dependent loads: the id's count and list end, its list of tokens,
// their streams.
KERNEL_OF(embed_streams_backward_vector, EmbedStreamsBackwardParams, THREADS, 10) { embed_backward<FLOATS>(params); }
KERNEL(embed_streams_backward_scalar, EmbedStreamsBackwardParams, THREADS) { embed_backward<1>(params); }
