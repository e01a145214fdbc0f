// The topk largest scores of each row, by index (inference 7, 7.2).
//
//     length  = clamp(lengths[row], 0, num_columns), or num_columns without lengths
//     order   = scores from the largest down, of equal ones the lower column first; -0 equals 0, and NaN counts as -infinity
//     indices = the first min(topk, length) columns in that order, written from the lowest column up, then -1
//     values  = their scores (-infinity for NaN), then -infinity
//
// An index is the column itself, or the column plus offsets[row], or the slot of a paged store that block_table[row] says,
// block_table[row][column / page_size] * page_size + column % page_size; -1 where that entry is negative.
//
// Scores become 32-bit keys that are ordered as they are. A histogram of the first 11 bits finds the bin that the last of the
// chosen falls into; histograms of the next 11 and of the last 10 bits of those in it find its key. Then every warp takes a
// stretch of the row, counts what lies above that key and what equals it, and writes behind what the warps before it count:
// the result has one value, whatever the order of blocks, warps and lanes.
//
// topk_resident keeps the keys of a row in shared memory, so that scores are read once; topk_streamed reads the row five times,
// which a second-level cache holds. Floor: 4 bytes a score. Limited, where rows are short and many, by the histogram's atomics, one
// a score, and by five barriers a pass. Measured on one H200: 289 us for 512 of 16384 in 4096 rows, 199 us for 1024 of 8192, with 80 % of
// the issue slots taken and 20 % of the memory's rate; 60 us for 512 of 65536 in 32 rows, which use a quarter of the GPU.
//
// Defines: THREADS, a power of two of at least 64 threads a block. Launch: num_rows blocks, of which topk_resident has
// 4 bytes of shared memory a column beyond its own.
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "selection.h"

#ifndef THREADS
#error "define THREADS as the threads of a block"
#endif

constexpr int LANES = WARP_SIZE, WARPS = THREADS / LANES;
constexpr int FIRST_BITS = 11, BINS = 1 << FIRST_BITS;
constexpr int BINS_OF_A_THREAD = ceil_div(BINS, THREADS);

struct TopkParams {
    const float* scores; int64_t scores_row_stride;              // [num_rows, num_columns]; strides in elements
    const int32_t* lengths;                                      // [num_rows], or nullptr
    const int32_t* offsets;                                      // [num_rows], or nullptr
    const int32_t* block_table; int64_t block_table_row_stride;  // [num_rows, num_pages], or nullptr
    int32_t* indices; int64_t indices_row_stride;                // [num_rows, topk]
    float* values; int64_t values_row_stride;                    // [num_rows, topk], or nullptr
    int32_t num_columns;
    int32_t topk;
    int32_t page_size;
};
PARAMS_LAYOUT(TopkParams, scores, scores_row_stride, lengths, offsets, block_table, block_table_row_stride, indices,
              indices_row_stride, values, values_row_stride, num_columns, topk, page_size)

// Shared memory of a block; the keys of topk_resident follow.
struct Shared {
    uint32_t histogram[BINS];
    uint32_t above[WARPS], equal[WARPS];  // of a warp: counts, or sums of bins
    uint32_t bin, left;                   // the bin that was found, and how many of it are chosen
};

SHARED_MEMORY(topk_resident, sizeof(Shared))
SHARED_MEMORY(topk_streamed, sizeof(Shared))

// Finds the bin of the histogram, counted from the last one down, in which the sum reaches `wanted`, and what is left of it there.
DEVICE void find_bin(Shared& shared, uint32_t wanted) {
    const int first = BINS - BINS_OF_A_THREAD * (static_cast<int>(threadIdx.x) + 1);
    uint32_t own = 0;
    for (int i = 0; i < BINS_OF_A_THREAD; ++i) own += first + i >= 0 ? shared.histogram[first + i] : 0;
    const uint32_t upto = inclusive_sum(own);
    if (lane_id() == WARP_SIZE - 1) shared.above[warp_id()] = upto;
    __syncthreads();
    const uint32_t of_warps = lane_id() < warp_id() ? shared.above[lane_id()] : 0;
    uint32_t before = __shfl_sync(FULL_WARP, inclusive_sum(of_warps), WARP_SIZE - 1) + upto - own;
    if (before < wanted && before + own >= wanted) {
        int bin = first + BINS_OF_A_THREAD - 1;
        while (before + shared.histogram[bin] < wanted) before += shared.histogram[bin--];
        shared.bin = bin;
        shared.left = wanted - before;
    }
    __syncthreads();
}

// A row's keys, of which topk_resident keeps its own copy.
template <bool RESIDENT>
struct Keys {
    const float* scores;
    uint32_t* kept;

    uint32_t operator[](int column) const { return RESIDENT ? kept[column] : key_of(scores[column]); }
};

// Counts the keys that agree with `prefix` in all bits from `above` up, by their `bits` bits from `shift` up.
template <bool RESIDENT>
DEVICE void count_keys(Shared& shared, const Keys<RESIDENT>& keys, int length, uint32_t prefix, int above, int shift, bool first) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    __syncthreads();
    for (int column = threadIdx.x; column < length; column += THREADS) {
        uint32_t key;
        if (first) {
            key = key_of(keys.scores[column]);
            if (RESIDENT) keys.kept[column] = key;
        } else {
            key = keys[column];
        }
        if (first || key >> above == prefix >> above) atomicAdd(&shared.histogram[key >> shift & (BINS - 1)], 1u);
    }
    __syncthreads();
}

// The key of the last one chosen; `left` of those that equal it are.
template <bool RESIDENT>
DEVICE uint32_t last_key(Shared& shared, const Keys<RESIDENT>& keys, int length, uint32_t wanted, uint32_t& left) {
    count_keys(shared, keys, length, 0, 31, 21, true);
    find_bin(shared, wanted);
    uint32_t key = shared.bin << 21;
    left = shared.left;
    count_keys(shared, keys, length, key, 21, 10, false);
    find_bin(shared, left);
    key |= shared.bin << 10;
    left = shared.left;
    // The last digit has 10 bits: what is counted agrees in the eleventh.
    count_keys(shared, keys, length, key, 10, 0, false);
    find_bin(shared, left);
    left = shared.left;
    return (key & ~(uint32_t{BINS} - 1)) | shared.bin;
}

DEVICE int32_t index_of(const TopkParams& params, int64_t row, int column) {
    if (params.offsets) return params.offsets[row] + column;
    if (!params.block_table) return column;
    const int32_t page = params.block_table[row * params.block_table_row_stride + column / params.page_size];
    return page < 0 ? -1 : page * params.page_size + column % params.page_size;
}

DEVICE void write(const TopkParams& params, int64_t row, uint32_t place, int column, uint32_t key) {
    params.indices[row * params.indices_row_stride + place] = index_of(params, row, column);
    if (params.values) params.values[row * params.values_row_stride + place] = score_of_key(key);
}

// Every warp takes a stretch of the row; `emit` is told of each column that is chosen, and of the place that it gets.
template <bool RESIDENT>
DEVICE void write_chosen(const TopkParams& params, Shared& shared, const Keys<RESIDENT>& keys, int64_t row, int length,
                         uint32_t last, uint32_t left) {
    const int stretch = ceil_div(ceil_div(length, WARPS), LANES) * LANES;
    const int begin = minimum(warp_id() * stretch, length), end = minimum(begin + stretch, length);
    uint32_t above = 0, equal = 0;
    for (int tile = begin; tile < end; tile += LANES) {
        const int column = tile + lane_id();
        const uint32_t key = column < end ? keys[column] : 0;
        above += column < end && key > last;
        equal += column < end && key == last;
    }
    above = __shfl_sync(FULL_WARP, inclusive_sum(above), WARP_SIZE - 1);
    equal = __shfl_sync(FULL_WARP, inclusive_sum(equal), WARP_SIZE - 1);
    if (lane_id() == 0) {
        shared.above[warp_id()] = above;
        shared.equal[warp_id()] = equal;
    }
    __syncthreads();
    const bool before_own = lane_id() < warp_id();
    above = __shfl_sync(FULL_WARP, inclusive_sum(before_own ? shared.above[lane_id()] : 0), WARP_SIZE - 1);
    equal = __shfl_sync(FULL_WARP, inclusive_sum(before_own ? shared.equal[lane_id()] : 0), WARP_SIZE - 1);
    for (int tile = begin; tile < end; tile += LANES) {
        const int column = tile + lane_id();
        const uint32_t key = column < end ? keys[column] : 0;
        const bool is_above = column < end && key > last, is_equal = column < end && key == last;
        const uint32_t lanes_above = __ballot_sync(FULL_WARP, is_above), lanes_equal = __ballot_sync(FULL_WARP, is_equal);
        const uint32_t lanes_before = (1u << lane_id()) - 1;
        const uint32_t equal_before = equal + __popc(lanes_equal & lanes_before);
        if (is_above || (is_equal && equal_before < left))
            write(params, row, above + __popc(lanes_above & lanes_before) + minimum(equal_before, left), column, key);
        above += __popc(lanes_above);
        equal += __popc(lanes_equal);
    }
}

template <bool RESIDENT>
DEVICE void topk_row(const TopkParams& params) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int64_t row = blockIdx.x;
    int length = params.num_columns;
    if (params.lengths) length = minimum(maximum(params.lengths[row], 0), length);
    const Keys<RESIDENT> keys{params.scores + row * params.scores_row_stride,
                              reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(Shared))};
    const int chosen = minimum(params.topk, length);
    if (length <= params.topk) {
        for (int column = threadIdx.x; column < length; column += THREADS)
            write(params, row, column, column, key_of(keys.scores[column]));
    } else {
        uint32_t left = 0;
        const uint32_t last = last_key(shared, keys, length, params.topk, left);
        write_chosen(params, shared, keys, row, length, last, left);
    }
    for (int place = chosen + threadIdx.x; place < params.topk; place += THREADS) {
        params.indices[row * params.indices_row_stride + place] = -1;
        if (params.values) params.values[row * params.values_row_stride + place] = -INFINITY_F32;
    }
}

KERNEL(topk_resident, TopkParams, THREADS) { topk_row<true>(params); }
KERNEL(topk_streamed, TopkParams, THREADS) { topk_row<false>(params); }
