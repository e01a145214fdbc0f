// Tokens pooled into compressed entries while sequences grow (inference 6, 6.2). With C = kv and S
// = gate + ape[t mod ratio] of the token at position t of its sequence, and R = num_rows,
//
//     state[slot][t mod R] = (C, S)          of each token of the call
//     entry j of a sequence, if its last token (j + 1) ratio - 1 is of the call: see compressor.cu
//
// Tokens of the call come from kv and gate, earlier ones from the state. Those before position 0
// are absent, by selects, so a slot may hold any data when a sequence starts in it. A position
// that comes again after a rejection overwrites its row. Row cu_entries[i] + k is the k-th entry
// that sequence i completes in the call; other rows are zero. A sequence whose slot does not exist
// writes no state and makes no entry.
//
// Work: entries are made first, by compressor.cu's functions: equal values give equal bits, from
// the call or the state. A last launch writes the rows, because the call's first entries may still
// read the rows it overwrites. Without overlap it makes the entries from the pooled values too. Of
// tokens with one row the last one writes it. With overlap a call of one or two tokens a sequence
// is one launch (compressor_stream_step): a block has a sequence, a thread some columns of all its
// rows, which no other thread accesses.
//
// Floor: each token is read once for the state and once for each entry that pools it, 16 bytes a
// value for a token that completes none. At decode, 128 sequences of width 1024: 0.5 us, every
// fourth step 2 us, at 4.24 TB/s. What limits it: launches and the latency of dependent loads
// (cu_entries, slots, rows).
// ELEMENT: type of pooled and entries, bf16 or float. Tried: kernels/docs/compressor_stream.md.
#include "compressor.h"

constexpr int THREADS = 128;
constexpr int MAX_WARPS = THREADS / static_cast<int>(WARP_SIZE);
constexpr int LINE_NUMBERS = 128 / 4;  // of an L2 access

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

// ---------------------------------------------------------------- sequences

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

// Prefetches what load_sequence reads, for up to a thousand sequences, during the search for one.
DEVICE void prefetch_sequences(const CompressorStreamParams& params) {
    const int number = lane_id() * LINE_NUMBERS;
    if (number >= params.num_sequences) return;
    prefetch_second_level(params.slots + number);
    prefetch_second_level(params.first_positions + number);
    prefetch_second_level(params.cu_seqlens + number);
}

struct StreamPlace {
    Sequence sequence;
    int64_t position;  // of the first token of the entry's own group
    bool exists;
};

// The place of an entry of a sequence. Entry 0 is the first that the call can complete, the group
// of its first token.
DEVICE StreamPlace place_in(const Sequence& sequence, int32_t ratio, int64_t entry) {
    if (!sequence.exists || entry < 0) return StreamPlace{sequence, 0, false};
    const int64_t group = static_cast<uint32_t>(sequence.first_position) / static_cast<uint32_t>(ratio) + entry;
    const int64_t position = group * ratio;
    return StreamPlace{sequence, position, position + ratio <= sequence.end};
}

// All lanes of a warp look up one entry.
DEVICE StreamPlace stream_place(const CompressorStreamParams& params, int64_t entry) {
    StreamPlace place{Sequence{}, 0, false};
    if (entry >= params.num_entries) return place;
    prefetch_sequences(params);
    const int number = sequence_of_warp(params.cu_entries, params.num_sequences, entry);
    if (number < 0) return place;
    const Sequence sequence = load_sequence(params, number);
    if (entry >= params.cu_entries[number + 1]) return place;
    return place_in(sequence, params.ratio, entry - params.cu_entries[number]);
}

// Positions are below 2^32; a 32-bit remainder takes a tenth of the instructions of a 64-bit one.
DEVICE int64_t remainder_of(int64_t position, int32_t divisor) {
    return static_cast<uint32_t>(position) % static_cast<uint32_t>(divisor);
}

// Offsets of a token's values and scores, from a column on: in kv and gate for a token of the
// call, in the state for an earlier one.
struct Row {
    int64_t value, score;
    bool of_call;
};
DEVICE Row row_at(const CompressorStreamParams& params, const Sequence& sequence, int64_t position, int64_t state_row,
                  int64_t column) {
    const int64_t token = sequence.token + position - sequence.first_position;
    if (position >= sequence.first_position)
        return Row{token * params.kv_stride + column, token * params.gate_stride + column, true};
    const int64_t row = sequence.slot * params.state_slot_stride + state_row * params.state_row_stride + column;
    return Row{row, row + params.width, false};
}

// The same as addresses, and that of a row of ape, which the scores of a token of the call lack.
// For an earlier token the address of its values stands in, at no cost.
struct Source {
    const float *value, *score, *ape;
    bool of_call;
};
DEVICE Source source_at(const CompressorStreamParams& params, const Row& row, int64_t ape_row, int64_t column) {
    const float* const value = (row.of_call ? params.kv : params.state) + row.value;
    return Source{value, (row.of_call ? params.gate : params.state) + row.score,
                  row.of_call ? params.ape + ape_row * params.width + column : value, row.of_call};
}

template <bool WIDE, int SLOTS>
DEVICE void request_slot(const Source& source, int slot, Awaited<SLOTS>& awaited) {
    load_quad<WIDE>(source.value, awaited.slots.value[slot]);
    load_quad<WIDE>(source.score, awaited.slots.score[slot]);
    load_quad<WIDE>(source.ape, awaited.ape[slot]);
    awaited.lacks_ape[slot] = source.of_call;
}

// The row of the state that a token of the call writes; nullptr where a later token of the call
// has the same row.
DEVICE float* own_row(const CompressorStreamParams& params, const Sequence& sequence, int64_t position) {
    if (position + params.num_rows < sequence.end) return nullptr;
    return params.state + sequence.slot * params.state_slot_stride +
           remainder_of(position, params.num_rows) * params.state_row_stride;
}

template <bool WIDE, int SLOTS>
DEVICE void store_row(const CompressorStreamParams& params, float* row, int64_t column, int slot, const Slots<SLOTS>& slots) {
    store_quad<WIDE>(row + column, slots.value[slot]);
    store_quad<WIDE>(row + params.width + column, slots.score[slot]);
}

// ---------------------------------------------------------------- with overlap

// The pointer of another lane, passed as an offset from a pointer of the launch. With a pointer
// made from an integer, the compiler does not know that it is to global memory.
DEVICE const float* pointer_in_lane(const float* base, const float* pointer, int lane) {
    const int64_t distance = reinterpret_cast<int64_t>(pointer) - reinterpret_cast<int64_t>(base);
    return reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(base) + __shfl_sync(FULL_WARP, distance, lane));
}

// Starts the loads of the slots of an existing entry. The address of a row takes dozens of
// instructions, and differs between a warp's threads only by channel. So each lane computes that
// of one slot, and the others get it by shuffles.
template <bool WIDE>
DEVICE void request_entry(const CompressorStreamParams& params, const StreamPlace& place, int channel,
                          Awaited<OVERLAP_SLOTS>& awaited) {
    const int own = lane_id() % OVERLAP_SLOTS;
    const int64_t position = place.position - OVERLAP_RATIO + own;  // perhaps before 0; there are as many rows as slots at least
    const Row row = row_at(params, place.sequence, position, remainder_of(position + params.num_rows, params.num_rows),
                           overlap_column(params.head_dim, 0, own));
    const Source source = source_at(params, row, own % OVERLAP_RATIO, overlap_column(params.head_dim, 0, own));
    const uint32_t of_call = __ballot_sync(FULL_WARP, source.of_call);
    UNROLL
    for (int slot = 0; slot < OVERLAP_SLOTS; ++slot) {
        const auto in_lane = [&](const float* pointer) { return pointer_in_lane(params.state, pointer, slot) + channel; };
        const Source of_slot{in_lane(source.value), in_lane(source.score), in_lane(source.ape), (of_call >> slot & 1) != 0};
        request_slot<WIDE>(of_slot, slot, awaited);
    }
}

// Pools the slots of an entry, loaded together with the other inputs of the entry. Zeros for an
// absent entry, and past its last channel, where threads load the last channels.
template <bool WIDE>
DEVICE Finish pool_entry(const CompressorStreamParams& params, const StreamPlace& place, int channel, Channels& x) {
    for (int i = 0; i < QUAD; ++i) x[i] = 0.0f;
    if (!place.exists) return Finish{};
    Awaited<OVERLAP_SLOTS> awaited;
    request_entry<WIDE>(params, place, minimum(channel, params.head_dim - QUAD), awaited);
    const Finish finish = load_finish<WIDE>(params, place.position, channel);
    add_ape(awaited);
    const int absent = place.position == 0 ? OVERLAP_RATIO : 0;
    UNROLL
    for (int slot = 0; slot < OVERLAP_RATIO; ++slot)
        if (slot < absent) leave_empty(awaited.slots, slot);
    Channels inverse;
    pool(awaited.slots, nullptr, x, inverse);
    for (int i = 0; i < QUAD; ++i) x[i] = channel < params.head_dim ? x[i] : 0.0f;
    round_to_stored(x);
    return finish;
}

template <bool WIDE>
DEVICE void stream_overlap(const CompressorStreamParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(blockIdx.x, params.entry_threads);
    const StreamPlace place = stream_place(params, item.entry);
    Channels x;
    const Finish finish = pool_entry<WIDE>(params, place, item.channel, x);
    make_entry(params, finish, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

KERNEL(compressor_stream_overlap_vector, CompressorStreamParams, THREADS) { stream_overlap<true>(params); }
KERNEL(compressor_stream_overlap_scalar, CompressorStreamParams, THREADS) { stream_overlap<false>(params); }

// ---------------------------------------------------------------- without overlap

// Prefetches the other inputs of the entry to L2 for the next launch.
DEVICE void prefetch_finish(const CompressorStreamParams& params, int64_t position, int channel) {
    if (channel >= params.head_dim) return;
    prefetch_second_level(params.norm_weight + channel);
    if (params.rope_dim == 0 || position >= params.table_rows) return;
    prefetch_second_level(params.cos + position * params.cos_stride);
    prefetch_second_level(params.sin + position * params.sin_stride);
}

template <bool WIDE>
DEVICE void stream_pool(const CompressorStreamParams& params) {
    __shared__ PoolShared shared;
    const PoolItem item = pool_item(blockIdx.x, params.head_dim);
    const StreamPlace place = stream_place(params, item.entry);
    Channels x = {}, inverse;
    if (place.exists) {
        Awaited<GROUP_SLOTS> awaited;
        const int channel = minimum(item.channel, params.head_dim - QUAD);
        UNROLL
        for (int i = 0; i < GROUP_SLOTS; ++i) {
            const int slot = minimum(slot_of(item, i), params.ratio - 1);
            const int64_t position = place.position + slot, state_row = remainder_of(position, params.num_rows);
            const Row row = row_at(params, place.sequence, position, state_row, channel);
            request_slot<WIDE>(source_at(params, row, slot, channel), i, awaited);
        }
        if (threadIdx.x == 0) prefetch_finish(params, place.position, item.channel);
        settle_group(params.ratio, item, awaited);
        pool(awaited.slots, &shared, x, inverse);
    }
    if (item.group == 0) store_pooled<WIDE>(params, item.entry, item.channel, x);
}

KERNEL(compressor_stream_pool_vector, CompressorStreamParams, POOL_THREADS) { stream_pool<true>(params); }
KERNEL(compressor_stream_pool_scalar, CompressorStreamParams, POOL_THREADS) { stream_pool<false>(params); }

// Turns pooled values into an entry.
template <bool WIDE>
DEVICE void stream_norm(const CompressorStreamParams& params, int64_t block) {
    __shared__ float partials[MAX_WARPS][1];
    const Item item = item_of_thread(block, params.entry_threads);
    const bool there = item.entry < params.num_entries && item.channel < params.head_dim;
    Channels x = {};
    if (there) load_quad<WIDE>(params.pooled + item.entry * params.head_dim + item.channel, x);
    const StreamPlace place = stream_place(params, item.entry);
    for (int i = 0; i < QUAD; ++i) x[i] = place.exists ? x[i] : 0.0f;
    const Finish finish = load_finish<WIDE>(params, place.position, item.channel);
    make_entry(params, finish, item.channel, x, partials);
    store_entry<WIDE>(params, item.entry, place.exists, item.channel, x);
}

// ---------------------------------------------------------------- the state

// A block writes the row of one token. A token whose row a later token of the call has as well is
// skipped.
template <bool WIDE>
DEVICE void write_rows(const CompressorStreamParams& params, int64_t token) {
    const int step = static_cast<int>(blockDim.x) * QUAD;
    // In flight during the search for the sequence.
    for (int at = static_cast<int>(threadIdx.x) * QUAD; at < params.width; at += step) {
        prefetch_second_level(params.kv + (token * params.kv_stride + at));
        prefetch_second_level(params.gate + (token * params.gate_stride + at));
    }
    prefetch_sequences(params);
    const int number = sequence_of_warp(params.cu_seqlens, params.num_sequences, token);
    if (number < 0) return;
    const Sequence sequence = load_sequence(params, number);
    if (token >= params.cu_seqlens[number + 1]) return;
    const int64_t position = sequence.first_position + token - sequence.token;
    if (!sequence.exists) return;
    float* const row = own_row(params, sequence, position);
    if (!row) return;
    for (int column = static_cast<int>(threadIdx.x) * QUAD; column < params.width; column += step) {
        Awaited<1> own;
        const Row source = row_at(params, sequence, position, 0, column);
        request_slot<WIDE>(source_at(params, source, remainder_of(position, params.ratio), column), 0, own);
        add_ape(own);
        store_row<WIDE>(params, row, column, 0, own.slots);
    }
}

KERNEL(compressor_stream_write_vector, CompressorStreamParams, THREADS) { write_rows<true>(params, blockIdx.x); }
KERNEL(compressor_stream_write_scalar, CompressorStreamParams, THREADS) { write_rows<false>(params, blockIdx.x); }

// The first blocks make entries, the others write a token's row each. The launch before has read
// what these overwrite.
template <bool WIDE>
DEVICE void norm_and_write(const CompressorStreamParams& params) {
    const int64_t block = blockIdx.x, norms = ceil_div(params.num_entries, THREADS / params.entry_threads);
    if (block < norms) {
        stream_norm<WIDE>(params, block);
    } else {
        write_rows<WIDE>(params, block - norms);
    }
}

KERNEL(compressor_stream_norm_write_vector, CompressorStreamParams, THREADS) { norm_and_write<true>(params); }
KERNEL(compressor_stream_norm_write_scalar, CompressorStreamParams, THREADS) { norm_and_write<false>(params); }

// ---------------------------------------------------------------- a step of few tokens, with
// overlap
//
// A block has a sequence, and its threads those of one entry. A thread has its channels of either
// half of a row. No other thread reads or writes them, so its program order is enough.

// A token's columns of the call, both halves.
template <bool WIDE>
DEVICE void request_token(const CompressorStreamParams& params, const Sequence& sequence, int64_t position, int channel,
                          Awaited<2>& token) {
    const int64_t ape_row = position % OVERLAP_RATIO;
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int64_t column = half * params.head_dim + channel;
        request_slot<WIDE>(source_at(params, row_at(params, sequence, position, 0, column), ape_row, column), half, token);
    }
}

template <bool WIDE>
DEVICE void store_token(const CompressorStreamParams& params, const Sequence& sequence, int64_t position, int channel,
                        Awaited<2>& token) {
    float* const row = own_row(params, sequence, position);
    if (!row) return;
    add_ape(token);
    store_row<WIDE>(params, row, channel, 0, token.slots);
    store_row<WIDE>(params, row, params.head_dim + channel, 1, token.slots);
}

template <bool WIDE>
DEVICE void step_sequence(const CompressorStreamParams& params) {
    __shared__ float partials[MAX_WARPS][1];
    const int number = static_cast<int>(blockIdx.x), channel = static_cast<int>(threadIdx.x) * QUAD;
    // All of these loads are in flight at once.
    const int64_t first = params.cu_entries[number], behind = params.cu_entries[number + 1];
    const int64_t last = params.cu_entries[params.num_sequences];
    const Sequence sequence = load_sequence(params, number);
    const bool writes = sequence.exists && channel < params.head_dim && sequence.first_position < sequence.end;
    Awaited<2> token;
    if (writes) request_token<WIDE>(params, sequence, sequence.first_position, channel, token);
    const int64_t end = minimum<int64_t>(behind, params.num_entries);
    for (int64_t entry = number > 0 ? maximum<int64_t>(first, 0) : 0; entry < end; ++entry) {
        const StreamPlace place = place_in(sequence, OVERLAP_RATIO, entry - first);
        Channels x;
        const Finish finish = pool_entry<WIDE>(params, place, channel, x);
        if (place.exists) make_entry(params, finish, channel, x, partials);
        store_entry<WIDE>(params, entry, place.exists, channel, x);
        if (entry + 1 < end) __syncthreads();
    }
    // Rows that belong to no sequence.
    for (int64_t entry = maximum<int64_t>(last, 0) + number; entry < params.num_entries; entry += gridDim.x) {
        Channels zeros = {};
        store_entry<WIDE>(params, entry, false, channel, zeros);
    }
    if (!writes) return;
    store_token<WIDE>(params, sequence, sequence.first_position, channel, token);
    for (int64_t position = sequence.first_position + 1; position < sequence.end; ++position) {
        request_token<WIDE>(params, sequence, position, channel, token);
        store_token<WIDE>(params, sequence, position, channel, token);
    }
}

KERNEL(compressor_stream_step_vector, CompressorStreamParams, THREADS) { step_sequence<true>(params); }
KERNEL(compressor_stream_step_scalar, CompressorStreamParams, THREADS) { step_sequence<false>(params); }
