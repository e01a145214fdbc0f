// Sums of sparse attention's backward: delta over channels, dsink over tokens, accumulator rows of
// dk and dv, and rows of slots in one order (training 3 and 4). sparse_attention_backward.cu has
// the formulas.
//
//   sparse_attention_delta     one warp per (token, head): delta and the token's term of dsink
//   sparse_attention_dsink     sum of those terms over tokens in a fixed order
//   sparse_attention_zero      zero-fills the fp32 accumulator rows
//   sparse_attention_cast      fp32 accumulator rows to bf16
// For a deterministic dk and dv, chunk by chunk of tokens, around a backward without atomics:
//   sparse_attention_count     how many slots name each key
//   sparse_attention_reserve   room for each key's list of slots
//   sparse_attention_fill      the lists, in any order
//   sparse_attention_order     the lists, ascending
//   sparse_attention_sum       adds the rows of a key's slots to its accumulator row in list order
//
// The cost of determinism: each block of heads stores a slot's row once, and the sum reads it
// once. So 8*D bytes for each slot, token and block of heads (8*(D + Dv) with V_SEPARATE) replace
// 4*D bytes of atomics.
//
// Define: V_DIM, width of out, a multiple of 16, at most 512. Launch: 256 threads, no dynamic
// shared memory, the grid as given at the parameters. Bounds: kernels/docs/sparse_attention.md.
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "platform.h"
#include "sparse_attention_rules.h"

#ifndef V_DIM
#error "define V_DIM"
#endif

// ---------------------------------------------------------------- per-row terms

constexpr int ROW_THREADS = 256;
constexpr int ROWS_PER_BLOCK = ROW_THREADS / WARP_SIZE;

// delta = sum_d out*dout in fp32, and sink_term = -exp(sink - L)*delta, both [num_tokens,
// num_heads]. One warp per (token, head); grid ceil(num_tokens*num_heads / 8). sink and sink_terms
// may be null, both or neither.
struct SparseAttentionDeltaParams {
    const bf16* out;
    int64_t out_token_stride;
    int64_t out_head_stride;
    const bf16* dout;
    int64_t dout_token_stride;
    int64_t dout_head_stride;
    const float* lse;
    const float* sink;
    float* delta;
    float* sink_terms;
    int32_t num_tokens;
    int32_t num_heads;
};

// Adds the products of two packed pairs to `sum`.
DEVICE float dot_pair(uint32_t x, uint32_t y, float sum) {
    sum = fused_multiply_add(unpack_bf16_low(x), unpack_bf16_low(y), sum);
    return fused_multiply_add(unpack_bf16_high(x), unpack_bf16_high(y), sum);
}

KERNEL(sparse_attention_delta, SparseAttentionDeltaParams, ROW_THREADS) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (at >= static_cast<int64_t>(params.num_tokens) * params.num_heads) return;
    const int64_t token = at / params.num_heads, head = at % params.num_heads;
    const bf16* out = params.out + token * params.out_token_stride + head * params.out_head_stride;
    const bf16* dout = params.dout + token * params.dout_token_stride + head * params.dout_head_stride;
    float sum = 0.0f;
    UNROLL
    for (int chunk = lane_id(); chunk < V_DIM / 8; chunk += 32) {
        const Vec16 x = load_vec16_streaming(out + chunk * 8), y = load_vec16_readonly(dout + chunk * 8);
        UNROLL
        for (int i = 0; i < 4; ++i) sum = dot_pair(x.w[i], y.w[i], sum);
    }
    UNROLL
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    if (lane_id() != 0) return;
    const float lse = params.lse[at];
    // A row without valid slots gets 0 whatever its saved out holds. It is a select, since NaN * 0
    // is NaN.
    const float delta = is_infinite(lse) ? 0.0f : sum;
    params.delta[at] = delta;
    if (params.sink == nullptr) return;
    const float sink_share = share_beside_sink(params.sink[head] * LOG2_E, lse * LOG2_E);
    params.sink_terms[at] = is_infinite(lse) ? 0.0f : -sink_share * delta;
}
// dsink[h] = sum over tokens of sink_terms[t, h]. One block sums each head in one order. Grid
// ceil(num_heads / 32).
struct SparseAttentionDsinkParams {
    const float* sink_terms;
    float* dsink;
    int32_t num_tokens;
    int32_t num_heads;
};

KERNEL(sparse_attention_dsink, SparseAttentionDsinkParams, ROW_THREADS) {
    __shared__ float partial[ROWS_PER_BLOCK][WARP_SIZE];
    const int32_t head = static_cast<int32_t>(blockIdx.x * WARP_SIZE) + lane_id();
    float sum = 0.0f;
    if (head < params.num_heads) {
        UNROLL_BY(8)
        for (int32_t token = warp_id(); token < params.num_tokens; token += ROWS_PER_BLOCK)
            sum += params.sink_terms[static_cast<int64_t>(token) * params.num_heads + head];
    }
    partial[warp_id()][lane_id()] = sum;
    __syncthreads();
    if (warp_id() != 0 || head >= params.num_heads) return;
    float total = 0.0f;
    UNROLL
    for (int w = 0; w < ROWS_PER_BLOCK; ++w) total += partial[w][lane_id()];
    params.dsink[head] = total;
}

// ---------------------------------------------------------------- accumulator rows

// Sets fp32 rows to 0. One warp per row; grid ceil(num_rows / 8). width and stride are multiples
// of 4.
struct SparseAttentionZeroParams {
    float* target;
    int64_t target_stride;
    int64_t num_rows;
    int32_t width;
};

KERNEL(sparse_attention_zero, SparseAttentionZeroParams, ROW_THREADS) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (row >= params.num_rows) return;
    float* target = params.target + row * params.target_stride;
    for (int column = 4 * lane_id(); column < params.width; column += 4 * WARP_SIZE)
        store_vec16(target + column, Vec16{{0, 0, 0, 0}});
}

// Rounds fp32 rows to bf16, once. One warp per row; grid ceil(num_rows / 8). width and strides are
// multiples of 8.
struct SparseAttentionCastParams {
    const float* source;
    int64_t source_stride;
    bf16* target;
    int64_t target_stride;
    int64_t num_rows;
    int32_t width;
};

KERNEL(sparse_attention_cast, SparseAttentionCastParams, ROW_THREADS) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (row >= params.num_rows) return;
    const float* source = params.source + row * params.source_stride;
    bf16* target = params.target + row * params.target_stride;
    for (int column = 8 * lane_id(); column < params.width; column += 8 * WARP_SIZE) {
        const Vec16 low = load_vec16_streaming(source + column), high = load_vec16_streaming(source + column + 4);
        Vec16 rounded;
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const Vec16& from = i < 2 ? low : high;
            rounded.w[i] = pack_bf16(__uint_as_float(from.w[2 * (i % 2)]), __uint_as_float(from.w[2 * (i % 2) + 1]));
        }
        store_vec16_streaming(target + column, rounded);
    }
}

// ---------------------------------------------------------------- sums in one order

// The inverted index of a chunk of tokens: for each key the slots that name it. Slot j of the
// chunk's token t is entry t * topk + j, below 2^31; invalid slots are in no list. Integer atomics
// assign room and positions. So the place of a list, and its order before sparse_attention_order,
// differ from run to run. The sums depend on neither. counts is [num_keys + 1] and zero before:
// the lengths of the lists, and last how many entries have room. ends is [num_keys]: where a
// list's room starts, and once it is filled, where it ends. Lists are in entries in any order, in
// ordered in ascending order; both are [num_tokens * topk].
struct SparseAttentionIndexParams {
    const int32_t* indices;
    int64_t indices_stride;
    const int32_t* topk_length;
    int32_t* counts;
    int32_t* ends;
    int32_t* entries;
    int32_t* ordered;
    int32_t num_tokens;
    int32_t num_keys;
    int32_t topk;
};

// This thread's number in the grid.
DEVICE int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * ROW_THREADS + threadIdx.x; }

// The key that an entry names, -1 where the slot is invalid or the entry does not exist.
DEVICE int32_t entry_key(const SparseAttentionIndexParams& params, int64_t entry) {
    if (entry >= static_cast<int64_t>(params.num_tokens) * params.topk) return -1;
    const int32_t token = static_cast<int32_t>(entry) / params.topk;
    const int32_t slot = static_cast<int32_t>(entry) % params.topk;
    if (slot >= list_length(params, token)) return -1;
    return valid_key(params.indices[token * params.indices_stride + slot], params.num_keys);
}

// One thread per entry; grid ceil(num_tokens*topk / 256).
KERNEL(sparse_attention_count, SparseAttentionIndexParams, ROW_THREADS) {
    const int32_t key = entry_key(params, thread_number());
    if (key >= 0) atomicAdd(&params.counts[key], 1);
}

// One thread per key; grid ceil(num_keys / 256). A warp reserves room for its 32 keys at once.
KERNEL(sparse_attention_reserve, SparseAttentionIndexParams, ROW_THREADS) {
    const int64_t key = thread_number();
    const int32_t count = key < params.num_keys ? params.counts[key] : 0;
    int32_t through = count;
    UNROLL
    for (int distance = 1; distance < static_cast<int>(WARP_SIZE); distance *= 2) {
        const int32_t lower = __shfl_up_sync(FULL_WARP, through, distance);
        if (lane_id() >= distance) through += lower;
    }
    int32_t first = 0;
    if (lane_id() == 31) first = atomicAdd(&params.counts[params.num_keys], through);
    first = __shfl_sync(FULL_WARP, first, 31);
    if (key < params.num_keys) params.ends[key] = first + through - count;
}

// One thread per entry; grid ceil(num_tokens*topk / 256).
KERNEL(sparse_attention_fill, SparseAttentionIndexParams, ROW_THREADS) {
    const int64_t entry = thread_number();
    const int32_t key = entry_key(params, entry);
    if (key >= 0) params.entries[atomicAdd(&params.ends[key], 1)] = static_cast<int32_t>(entry);
}

// Up to this many entries are ranked by comparing each with all others: n^2 / 32 steps of a warp.
constexpr int32_t RANKED_ENTRIES = 256;
// Longer lists go through a bitmap of a window of entries at a time.
constexpr int WINDOW_WORDS = 256;
constexpr uint32_t WINDOW_ENTRIES = 32 * WINDOW_WORDS;

// Stores each entry of a warp's list at its rank. All entries are distinct.
DEVICE void order_by_rank(const int32_t* entries, int32_t* ordered, int32_t count) {
    constexpr int32_t BEYOND = 0x7fffffff;
    for (int32_t own = lane_id(); own - lane_id() < count; own += WARP_SIZE) {
        const int32_t entry = own < count ? entries[own] : BEYOND;
        int32_t rank = 0;
        for (int32_t other = lane_id(); other - lane_id() < count; other += WARP_SIZE) {
            const int32_t compared = other < count ? entries[other] : BEYOND;
            UNROLL
            for (int lane = 0; lane < static_cast<int>(WARP_SIZE); ++lane)
                rank += __shfl_sync(FULL_WARP, compared, lane) < entry;
        }
        if (own < count) ordered[rank] = entry;
    }
}

// Marks a warp's entries in a bitmap, window by window, and stores the marked entries in order.
DEVICE void order_by_marking(const int32_t* entries, int32_t* ordered, int32_t count, uint32_t* window) {
    int32_t written = 0;
    for (uint32_t first = 0; written < count; first += WINDOW_ENTRIES) {
        for (int word = lane_id(); word < WINDOW_WORDS; word += WARP_SIZE) window[word] = 0;
        __syncwarp();
        UNROLL_BY(4)
        for (int32_t i = lane_id(); i < count; i += WARP_SIZE) {
            const uint32_t offset = static_cast<uint32_t>(entries[i]) - first;
            if (offset < WINDOW_ENTRIES) atomicOr(&window[offset / 32], 1u << offset % 32);
        }
        __syncwarp();  // all marks of the window are there
        for (int word = lane_id(); word < WINDOW_WORDS; word += WARP_SIZE) {
            uint32_t marks = window[word];
            int32_t through = __popc(marks);
            UNROLL
            for (int distance = 1; distance < static_cast<int>(WARP_SIZE); distance *= 2) {
                const int32_t lower = __shfl_up_sync(FULL_WARP, through, distance);
                if (lane_id() >= distance) through += lower;
            }
            int32_t at = written + through - __popc(marks);
            written += __shfl_sync(FULL_WARP, through, 31);
            for (; marks != 0; marks &= marks - 1)
                ordered[at++] = static_cast<int32_t>(first + 32 * word) + __ffs(static_cast<int>(marks)) - 1;
        }
        __syncwarp();  // the window is read
    }
}

// One warp per key; grid ceil(num_keys / 8).
KERNEL(sparse_attention_order, SparseAttentionIndexParams, ROW_THREADS) {
    __shared__ uint32_t windows[ROWS_PER_BLOCK][WINDOW_WORDS];
    const int64_t key = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (key >= params.num_keys) return;
    const int32_t count = params.counts[key], begin = params.ends[key] - count;
    if (count <= RANKED_ENTRIES) order_by_rank(params.entries + begin, params.ordered + begin, count);
    else order_by_marking(params.entries + begin, params.ordered + begin, count, windows[warp_id()]);
}

// target[key] += the rows of the key's entries, in ascending order of entries and, for each, of
// head blocks. Rows are added one by one, so chunks of any size give the same sum, bit for bit.
// rows is [head_blocks, num_entries, width]; only rows of valid slots are read. One warp per (key,
// 128 columns); grid ceil(num_keys*ceil(width/128) / 8). width and stride are multiples of 4.
struct SparseAttentionSumParams {
    const float* rows;
    const int32_t* counts;
    const int32_t* ends;
    const int32_t* ordered;
    float* target;
    int64_t target_stride;
    int64_t num_entries;
    int32_t head_blocks;
    int32_t num_keys;
    int32_t width;
};

KERNEL(sparse_attention_sum, SparseAttentionSumParams, ROW_THREADS) {
    constexpr int COLUMNS = 4 * static_cast<int>(WARP_SIZE);
    const int32_t parts = ceil_div(params.width, COLUMNS);
    const int64_t number = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    const int64_t key = number / parts;
    const int32_t column = static_cast<int32_t>(number % parts) * COLUMNS + 4 * lane_id();
    if (key >= params.num_keys || column >= params.width) return;
    const int32_t count = params.counts[key];
    if (count == 0) return;
    const int32_t* list = params.ordered + (params.ends[key] - count);
    const float* rows = params.rows + column;
    float* target = params.target + key * params.target_stride + column;

    const Vec16 before = load_vec16(target);
    float sum[4];
    UNROLL
    for (int i = 0; i < 4; ++i) sum[i] = __uint_as_float(before.w[i]);
    const int64_t terms = static_cast<int64_t>(count) * params.head_blocks;
    int32_t head_block = 0;
    UNROLL_BY(8)
    for (int64_t term = 0; term < terms; ++term) {
        const Vec16 row = load_vec16_streaming(rows + (head_block * params.num_entries + *list) * params.width);
        UNROLL
        for (int i = 0; i < 4; ++i) sum[i] += __uint_as_float(row.w[i]);
        // The list advances only where a next entry exists, so that nothing is read past its end.
        head_block = head_block + 1 == params.head_blocks ? 0 : head_block + 1;
        if (head_block == 0 && term + 1 < terms) ++list;
    }
    store_vec16(target, Vec16{{__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                               __float_as_uint(sum[3])}});
}
