// Tokens pooled into compressed entries while sequences grow (inference 6, 6.2). With C = kv and S = gate + ape[t mod
// ratio] of the token at position t of its sequence, and R = num_rows,
//
//     state[slot][t mod R] = (C, S)                  of each token of the call
//     entry j of a sequence, if its last token (j + 1) ratio - 1 is of the call: as compressor.cu has it, epilogue included
//
// Tokens of the call come from kv and gate, earlier ones from the state; those before position 0 are absent, chosen
// by a select, so that a slot may hold anything of another sequence when one begins in it. A position that comes
// again, after the tokens from there on were rejected, writes its row again. Row cu_entries[i] + k is the k-th entry
// that sequence i completes in the call; rows without one are zero. A sequence whose slot there is not writes no
// state and makes no entry.
//
// Work. Entries are made first, by the functions that compressor.cu calls as well: the same numbers give the same
// bits, whatever was a call's and whatever the state's. A second launch then writes the rows, since a call of more
// tokens than the state has room for writes rows that its own first entries read. Of tokens with one row the last one
// writes it.
//
// Floors: each token is read once for the state and, when its group is complete, once for each entry that pools it;
// 16 bytes a number for a token that completes nothing. At decode, 128 sequences of width 1024: 2.1 MB of rows, and
// every fourth step 8 MB of slots: 0.5 and 2 us at 4.24 TB/s, which launches exceed. Expected to
// limit it: the latency of cu_entries, slots and rows one after the other, and the second launch.
// Measured on one H200, 128 sequences: 14.3 us of 512 dims and 13.0 us of 128 at ratio 4.
//
// Defines: ELEMENT  type of pooled and entries: bf16 or float
#include "compressor.h"

constexpr int THREADS = 128;
constexpr int MAX_WARPS = THREADS / static_cast<int>(WARP_SIZE);

struct CompressorStreamParams {
    const float* kv; int64_t kv_stride;      // [num_tokens, width]
    const float* gate; int64_t gate_stride;  // as kv
    const float* ape;                        // [ratio, width]
    const float* norm_weight;                // [head_dim]
    float* state; int64_t state_slot_stride; int64_t state_row_stride;  // [num_slots, num_rows, 2 * width]: C, then S
    const int32_t* cu_seqlens;       // [num_sequences + 1]: a sequence's first token of the call, and the end
    const int32_t* cu_entries;       // [num_sequences + 1]: its first row of entries, and the end
    const int32_t* first_positions;  // [num_sequences]: the position of its first token
    const int32_t* slots;            // [num_sequences]
    const float* cos; int64_t cos_stride;  // [table_rows, rope_dim / 2]
    const float* sin; int64_t sin_stride;
    ELEMENT* pooled;                       // [num_entries, head_dim], between two kernels without overlap
    ELEMENT* entries; int64_t entries_stride;  // [num_entries, head_dim]
    int64_t table_rows;
    int32_t num_entries;
    int32_t num_sequences;
    int32_t num_slots;
    int32_t num_rows;
    int32_t ratio;
    int32_t width;
    int32_t head_dim;
    int32_t rope_dim;
    int32_t entry_threads;
    float eps;
    int32_t epilogue;  // what entries are stored for, of compressor.h
};
PARAMS_LAYOUT(CompressorStreamParams, kv, kv_stride, gate, gate_stride, ape, norm_weight, state, state_slot_stride,
              state_row_stride, cu_seqlens, cu_entries, first_positions, slots, cos, cos_stride, sin, sin_stride,
              pooled, entries, entries_stride, table_rows, num_entries, num_sequences, num_slots, num_rows,
              ratio, width, head_dim, rope_dim, entry_threads, eps, epilogue)

// ---------------------------------------------------------------- where a sequence is

struct Sequence {
    int64_t token;           // its first one of the call
    int64_t first_position;  // of that token
    int64_t end;             // the position behind its last token
    int64_t slot;
    bool exists;
};

DEVICE Sequence load_sequence(const CompressorStreamParams& params, int number) {
    const int32_t slot = params.slots[number], first = params.first_positions[number];
    const int32_t token = params.cu_seqlens[number], tokens = params.cu_seqlens[number + 1] - token;
    const bool exists = slot >= 0 && slot < params.num_slots && first >= 0;
    return Sequence{token, first, first + static_cast<int64_t>(tokens), slot, exists};
}

struct StreamPlace {
    Sequence sequence;
    int64_t position;  // of the first token of the entry's own group
    bool exists;
};

DEVICE StreamPlace stream_place(const CompressorStreamParams& params, int64_t entry) {
    StreamPlace place{Sequence{}, 0, false};
    if (entry >= params.num_entries) return place;
    const int number = sequence_of(params.cu_entries, params.num_sequences, entry);
    if (number < 0 || entry >= params.cu_entries[number + 1]) return place;
    place.sequence = load_sequence(params, number);
    // The group of the first token is the first that the call can complete.
    const int64_t group = place.sequence.first_position / params.ratio + entry - params.cu_entries[number];
    place.position = group * params.ratio;
    place.exists = place.sequence.exists && place.position + params.ratio <= place.sequence.end;
    return place;
}

// A token's values and scores, of four columns: of the call, or as an earlier call left them.
template <bool WIDE, int SLOTS>
DEVICE void load_stream_slot(const CompressorStreamParams& params, const Sequence& sequence, int64_t position,
                             int64_t column, int slot, Slots<SLOTS>& slots) {
    if (position < sequence.first_position) {
        const float* const row = params.state + sequence.slot * params.state_slot_stride +
                                 position % params.num_rows * params.state_row_stride;
        load_quad<WIDE>(row + column, slots.value[slot]);
        load_quad<WIDE>(row + params.width + column, slots.score[slot]);
        return;
    }
    const int64_t token = sequence.token + position - sequence.first_position;
    Channels ape;
    load_quad_streaming<WIDE>(params.kv + token * params.kv_stride + column, slots.value[slot]);
    load_quad_streaming<WIDE>(params.gate + token * params.gate_stride + column, slots.score[slot]);
    load_quad<WIDE>(params.ape + position % params.ratio * params.width + column, ape);
    for (int i = 0; i < QUAD; ++i) slots.score[slot][i] += ape[i];
}

// ---------------------------------------------------------------- with overlap

template <bool WIDE>
DEVICE void stream_overlap(const CompressorStreamParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(blockIdx.x, params.entry_threads);
    const StreamPlace place = stream_place(params, item.entry);
    const bool there = place.exists && item.channel < params.head_dim;
    Slots<OVERLAP_SLOTS> slots;
    UNROLL
    for (int slot = 0; slot < OVERLAP_SLOTS; ++slot) {
        const int64_t position = place.position + slot - OVERLAP_RATIO;
        if (!there || position < 0) {
            leave_empty(slots, slot);
            continue;
        }
        const int64_t column = overlap_column(params.head_dim, item.channel, slot);
        load_stream_slot<WIDE>(params, place.sequence, position, column, slot, slots);
    }
    Channels x, inverse;
    pool(slots, nullptr, x, inverse);
    for (int i = 0; i < QUAD; ++i) x[i] = there ? x[i] : 0.0f;
    round_to_stored(x);
    make_entry<WIDE>(params, place.position, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

KERNEL(compressor_stream_overlap_vector, CompressorStreamParams, THREADS) { stream_overlap<true>(params); }
KERNEL(compressor_stream_overlap_scalar, CompressorStreamParams, THREADS) { stream_overlap<false>(params); }

// ---------------------------------------------------------------- without overlap

template <bool WIDE>
DEVICE void stream_pool(const CompressorStreamParams& params) {
    __shared__ PoolShared shared;
    const PoolItem item = pool_item(blockIdx.x, params.head_dim);
    const StreamPlace place = stream_place(params, item.entry);
    Channels x = {}, inverse;
    if (place.exists) {
        Slots<GROUP_SLOTS> slots;
        UNROLL
        for (int i = 0; i < GROUP_SLOTS; ++i) {
            const int slot = item.group + i * slot_groups();
            if (slot >= params.ratio || item.channel >= params.head_dim) {
                leave_empty(slots, i);
                continue;
            }
            load_stream_slot<WIDE>(params, place.sequence, place.position + slot, item.channel, i, slots);
        }
        pool(slots, &shared, x, inverse);
    }
    if (item.group == 0) store_pooled<WIDE>(params, item.entry, item.channel, x);
}

KERNEL(compressor_stream_pool_vector, CompressorStreamParams, POOL_THREADS) { stream_pool<true>(params); }
KERNEL(compressor_stream_pool_scalar, CompressorStreamParams, POOL_THREADS) { stream_pool<false>(params); }

template <bool WIDE>
DEVICE void stream_norm(const CompressorStreamParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(blockIdx.x, params.entry_threads);
    const StreamPlace place = stream_place(params, item.entry);
    Channels x = {};
    if (place.exists && item.channel < params.head_dim)
        load_quad<WIDE>(params.pooled + item.entry * params.head_dim + item.channel, x);
    make_entry<WIDE>(params, place.position, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

KERNEL(compressor_stream_norm_vector, CompressorStreamParams, THREADS) { stream_norm<true>(params); }
KERNEL(compressor_stream_norm_scalar, CompressorStreamParams, THREADS) { stream_norm<false>(params); }

// ---------------------------------------------------------------- the state

// A block writes the row of one token. One whose row a later token of the call has as well is left out.
template <bool WIDE>
DEVICE void write_rows(const CompressorStreamParams& params) {
    const int64_t token = blockIdx.x;
    const int number = sequence_of(params.cu_seqlens, params.num_sequences, token);
    if (number < 0 || token >= params.cu_seqlens[number + 1]) return;
    const Sequence sequence = load_sequence(params, number);
    const int64_t position = sequence.first_position + token - sequence.token;
    if (!sequence.exists || position + params.num_rows < sequence.end) return;
    float* const row = params.state + sequence.slot * params.state_slot_stride +
                       position % params.num_rows * params.state_row_stride;
    const int step = static_cast<int>(blockDim.x) * QUAD;
    for (int column = static_cast<int>(threadIdx.x) * QUAD; column < params.width; column += step) {
        Slots<1> slots;
        load_stream_slot<WIDE>(params, sequence, position, column, 0, slots);
        store_quad<WIDE>(row + column, slots.value[0]);
        store_quad<WIDE>(row + params.width + column, slots.score[0]);
    }
}

KERNEL(compressor_stream_write_vector, CompressorStreamParams, THREADS) { write_rows<true>(params); }
KERNEL(compressor_stream_write_scalar, CompressorStreamParams, THREADS) { write_rows<false>(params); }
