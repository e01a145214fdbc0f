// The topk largest scores of each row, by index (inference 7, 7.2).
//
//     length  = clamp(lengths[row], 0, num_columns), or num_columns without lengths
//     order   = scores descending, ties by lower column; -0 equals 0, NaN counts as -infinity
//     indices = the first min(topk, length) columns in that order, from the lowest up, then -1
//     values  = their scores (-infinity for NaN), then -infinity
//
// An index is the column, the column plus offsets[row], or the slot of a paged store:
// block_table[row][column / page_size] * page_size + column % page_size, -1 for a negative entry.
//
// Method: scores become ordered 32-bit keys. Histograms of 11, 11 and 10 bits find the last chosen
// key. They run on candidates: a sample of S of the n scores, 1 / 16 or more, is ranked first by
// 22 bits. Its key of rank r = k S / n + 5 sqrt(k S / n) + 8 is below the last chosen key but for
// one row in a million. One pass keeps the about r n / S columns that reach it. With too few
// candidates, or too many (ties), the row is ranked as a whole: slower, the same result. Chosen
// columns set bits whose prefix sums are their places. Rows over MARKED_COLUMNS, and those ranked
// as a whole, take two passes: each warp counts, then stores, a stretch. The result has one value
// in any order of blocks and warps.
//
// Floor: 4 bytes a score, read once; 1/16 to 1/8 again from L2. Limit: with few rows the latency
// of about 16 barriers; with many, instructions, about 30 per 128 scores. One H200: 512 of 16384
// in 128 rows 11.4 us, in 4096 rows 144 us.
//
// Defines: THREADS of a block, a power of two from 64 on. Launch: num_rows blocks, with 8 bytes a
// candidate and 2 bits a column of shared memory more. What was tried: kernels/docs/topk.md.
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "selection.h"

#ifndef THREADS
#error "define THREADS as the threads of a block"
#endif

constexpr int LANES = WARP_SIZE, WARPS = THREADS / LANES;
constexpr int log2_of(int power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }
constexpr int THREADS_LOG2 = log2_of(THREADS);
static_assert(1 << THREADS_LOG2 == THREADS, "a power of two");
constexpr int FIRST_BITS = 11, BINS = 1 << FIRST_BITS;
constexpr int BINS_OF_A_THREAD = ceil_div(BINS, THREADS);
constexpr int SAMPLE_PIECE = 4;     // consecutive scores of a sample
constexpr int SAMPLE_SPARSITY = 64;  // at most so many columns for a piece of the sample
constexpr int MARKED_COLUMNS = 1 << 17;

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
    int32_t capacity;                                            // candidates that a block has room for
};

// Shared memory of a block. After it the keys and the columns of its candidates, and the bits of
// the columns.
struct Shared {
    alignas(16) uint32_t histogram[BINS];
    uint32_t above[WARPS], equal[WARPS];  // of a warp: counts, or sums of bins
    uint32_t bin, left, inside;           // the bin that was found, how many of it are chosen, and how many it has
    uint32_t num_candidates;              // those without room among them
};

SHARED_MEMORY(topk, sizeof(Shared))

// Finds the bin of the histogram, counted from the last one down, in which the sum reaches
// `wanted`, and what is left of `wanted` there. Leaves a histogram of zeros for the next one. A
// thread has neighbouring bins and reads vectors: lanes that read one word each would have bank
// conflicts.
DEVICE void find_bin(Shared& shared, uint32_t wanted) {
    const int first = BINS - BINS_OF_A_THREAD * (static_cast<int>(threadIdx.x) + 1);
    uint32_t bins[BINS_OF_A_THREAD] = {}, own = 0;
    if constexpr (BINS_OF_A_THREAD % 4 == 0) {
        UNROLL
        for (int i = 0; i < BINS_OF_A_THREAD; i += 4) {
            const Vec16 four = load_vec16(&shared.histogram[first + i]);
            UNROLL
            for (int word = 0; word < 4; ++word) bins[i + word] = four.w[word];
            store_vec16(&shared.histogram[first + i], Vec16{{0, 0, 0, 0}});
        }
    } else {
        for (int i = 0; i < BINS_OF_A_THREAD; ++i) {
            bins[i] = first + i >= 0 ? shared.histogram[first + i] : 0;
            if (first + i >= 0) shared.histogram[first + i] = 0;
        }
    }
    UNROLL
    for (int i = 0; i < BINS_OF_A_THREAD; ++i) own += bins[i];
    const uint32_t of_warp = sum_of_lanes(own);
    if (lane_id() == 0) shared.above[warp_id()] = of_warp;
    __syncthreads();
    const uint32_t of_warps = lane_id() < warp_id() ? shared.above[lane_id()] : 0;
    uint32_t before = sum_of_lanes(of_warps) + inclusive_sum(own) - own;
    if (before < wanted && before + own >= wanted) {
        UNROLL
        for (int i = BINS_OF_A_THREAD - 1; i >= 0; --i) {
            if (before < wanted && before + bins[i] >= wanted) {
                shared.bin = first + i;
                shared.left = wanted - before;
                shared.inside = bins[i];
            }
            before += bins[i];
        }
    }
    __syncthreads();
}

// The sets that can be ranked by their keys, of which each thread sees its own: a row,
struct Row {
    const float* scores;
    int length;

    uint32_t key(int column) const { return key_of(scores[column]); }
    bool is_aligned() const { return reinterpret_cast<uint64_t>(scores) % sizeof(Vec16) == 0; }
    template <class Take>
    void for_each_key(Take take) const {
        for (int column = threadIdx.x; column < length; column += THREADS) take(key(column));
    }
};
// a sample of it, pieces of consecutive scores at even distances,
struct Sample {
    Row row;
    bool is_taken;  // not of a row all of which may be candidates
    int pieces_log2;
    float held[SAMPLE_PIECE];  // the thread's first piece, as it arrives: most rows have no more pieces than threads

    Sample(const Row& row, int capacity) : row(row), is_taken(row.length > capacity), pieces_log2(THREADS_LOG2) {
        while ((SAMPLE_SPARSITY << pieces_log2) < row.length) ++pieces_log2;
        if (is_taken) load(static_cast<int>(threadIdx.x), held);
    }
    int size() const { return SAMPLE_PIECE << pieces_log2; }
    void load(int piece, float (&scores)[SAMPLE_PIECE]) const {
        const uint64_t column = static_cast<uint64_t>(piece) * row.length >> pieces_log2;
        const float* const first = row.scores + (static_cast<int>(column) & -SAMPLE_PIECE);
        if (row.is_aligned()) {
            const Vec16 loaded = load_vec16_readonly(first);
            for (int i = 0; i < SAMPLE_PIECE; ++i) scores[i] = __uint_as_float(loaded.w[i]);
        } else {
            for (int i = 0; i < SAMPLE_PIECE; ++i) scores[i] = first[i];
        }
    }
    template <class Take>
    void for_each_key(Take take) const {
        for (float score : held) take(key_of(score));
        UNROLL_BY(1)
        for (int piece = threadIdx.x + THREADS; piece < 1 << pieces_log2; piece += THREADS) {
            float scores[SAMPLE_PIECE];
            load(piece, scores);
            for (float score : scores) take(key_of(score));
        }
    }
    // The rank of the sample's key: fewer than one row in a million has more of their `wanted`
    // largest in the sample.
    int rank(int wanted) const {
        const float expected = static_cast<float>(wanted) * size() / row.length;
        return static_cast<int>(expected + 5.0f * __fsqrt_rn(expected)) + 8;
    }
};
// and the columns of it that reach the key of the sample.
struct Candidates {
    uint32_t* keys;
    int32_t* columns;
    int count;

    template <class Take>
    void for_each_key(Take take) const {
        for (int place = threadIdx.x; place < count; place += THREADS) take(keys[place]);
    }
};

// What is known of the last chosen key: its first bits, the others being 0, and how many of the
// keys that agree with them are chosen.
struct LastKey {
    uint32_t prefix, left;
    bool all;  // all of those are
};

// Finds the next bits of it, from `shift` up; those from `above` up are known. `first`: none are
// known.
template <class Keys>
DEVICE void find_digit(Shared& shared, const Keys& keys, LastKey& last, int above, int shift, bool first) {
    keys.for_each_key([&](uint32_t key) {
        if (first || key >> above == last.prefix >> above) atomicAdd(&shared.histogram[key >> shift & (BINS - 1)], 1u);
    });
    __syncthreads();
    find_bin(shared, last.left);
    last = LastKey{last.prefix | shared.bin << shift, shared.left, shared.inside == shared.left};
}

// What a thread reads of a row at once: some loads of WIDTH consecutive scores, at a stride of a
// block's width. The PLACED loads that are placed together share one atomic add to the number of
// candidates.
constexpr int LOADS = THREADS == 512 ? 8 : 4, PLACED = THREADS == 512 ? 4 : 2;
template <int WIDTH>
struct Tile {
    static constexpr int COLUMNS = LOADS * THREADS * WIDTH;
    float scores[LOADS / PLACED][PLACED][WIDTH];
};

// All loads of a thread are in flight at once. Most tiles need no bounds test of columns.
template <int WIDTH>
DEVICE void load(const Row& row, int begin, Tile<WIDTH>& tile) {
    const bool is_whole = begin + Tile<WIDTH>::COLUMNS <= row.length;
    if (WIDTH > 1 && is_whole) {
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            const int first = begin + (load * THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
            const Vec16 loaded = load_vec16_readonly(row.scores + first);
            for (int i = 0; i < WIDTH; ++i) tile.scores[load / PLACED][load % PLACED][i] = __uint_as_float(loaded.w[i]);
        }
        return;
    }
    UNROLL
    for (int load = 0; load < LOADS; ++load) {
        float(&scores)[WIDTH] = tile.scores[load / PLACED][load % PLACED];
        const int first = begin + (load * THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
        if (WIDTH > 1 && first + WIDTH <= row.length) {
            const Vec16 loaded = load_vec16_readonly(row.scores + first);
            for (int i = 0; i < WIDTH; ++i) scores[i] = __uint_as_float(loaded.w[i]);
        } else {
            for (int i = 0; i < WIDTH; ++i) scores[i] = first + i < row.length ? row.scores[first + i] : 0.0f;
        }
    }
}

// A block with an SM to itself holds a row's first tile in registers, if the row is 16-byte
// aligned.
constexpr bool HOLDS = THREADS > 256;

// Starts the loads of a row, so that the pass over it does not wait for memory. What is not held
// is prefetched into L2.
DEVICE void ask(const Row& row, bool is_sampled, Tile<4>& first) {
    constexpr int LINE = 128 / sizeof(float);
    const bool is_held = HOLDS && row.is_aligned();
    if (is_held) load(row, 0, first);
    if (!is_sampled) return;
    UNROLL_BY(1)
    for (int column = (is_held ? Tile<4>::COLUMNS : 0) + threadIdx.x * LINE; column < row.length; column += THREADS * LINE)
        prefetch_second_level(row.scores + column);
}

// The first 22 bits of a key that all chosen reach but in one row in a million, or 0 without a
// sample. The row's loads start after the sample's, which is needed first, and are in flight while
// it is ranked.
DEVICE uint32_t leading_bits(Shared& shared, const Row& row, const Sample& sample, int topk, Tile<4>& tile) {
    LastKey last{0, static_cast<uint32_t>(sample.rank(topk)), false};
    if (sample.is_taken) find_digit(shared, sample, last, 31, 21, true);
    ask(row, sample.is_taken, tile);
    if (sample.is_taken) find_digit(shared, sample, last, 21, 10, false);
    return last.prefix;
}

// The last chosen key; `left` of the keys equal to it are chosen. As soon as all keys with some
// first bits are chosen, it is the lowest key that starts with them.
template <class Keys>
DEVICE LastKey last_key(Shared& shared, const Keys& keys, uint32_t wanted) {
    LastKey last{0, wanted, false};
    find_digit(shared, keys, last, 31, 21, true);
    if (!last.all) find_digit(shared, keys, last, 21, 10, false);
    // The last digit has 10 bits: counted keys agree in the eleventh.
    if (!last.all) find_digit(shared, keys, last, 10, 0, false);
    return last;
}

// Appends the warp's scores that reach the pivot to the candidates. A lane has WIDTH consecutive
// columns of each load, from `first` on at a stride of a block's width.
template <int WIDTH>
DEVICE void keep(Shared& shared, const Candidates& candidates, int capacity, const float (&scores)[PLACED][WIDTH], float pivot,
                 int first, int length) {
    uint32_t lanes[PLACED][WIDTH], kept = 0;
    UNROLL
    for (int load = 0; load < PLACED; ++load) {
        UNROLL
        for (int i = 0; i < WIDTH; ++i) {
            const int column = first + load * THREADS * WIDTH + i;
            lanes[load][i] = __ballot_sync(FULL_WARP, column < length && scores[load][i] >= pivot);
            kept += __popc(lanes[load][i]);
        }
    }
    if (kept == 0) return;
    uint32_t place = 0;
    if (lane_id() == 0) place = atomicAdd(&shared.num_candidates, kept);
    place = __shfl_sync(FULL_WARP, place, 0);
    UNROLL
    for (int load = 0; load < PLACED; ++load) {
        UNROLL
        for (int i = 0; i < WIDTH; ++i) {
            const uint32_t own = place + static_cast<uint32_t>(lanes_before(lanes[load][i]));
            if ((lanes[load][i] >> lane_id() & 1) && own < static_cast<uint32_t>(capacity)) {
                candidates.keys[own] = key_of(scores[load][i]);
                candidates.columns[own] = first + load * THREADS * WIDTH + i;
            }
            place += __popc(lanes[load][i]);
        }
    }
}

// One pass over the row: keeps every score that reaches the pivot, in no order. `tile` has the
// row's first tile where it is held.
template <int WIDTH>
DEVICE void collect(Shared& shared, const Candidates& candidates, int capacity, const Row& row, float pivot, Tile<WIDTH>& tile) {
    UNROLL_BY(1)
    for (int begin = 0; begin < row.length; begin += Tile<WIDTH>::COLUMNS) {
        if (begin > 0 || WIDTH == 1 || !HOLDS) load(row, begin, tile);
        UNROLL
        for (int some = 0; some < LOADS / PLACED; ++some)
            keep<WIDTH>(shared, candidates, capacity, tile.scores[some], pivot,
                        begin + (some * PLACED * THREADS + static_cast<int>(threadIdx.x)) * WIDTH, row.length);
    }
}

// Finds the candidates of a row; returns whether the chosen are among them. Scores equal to
// -infinity stay out: NaN, which ranks equal, would not reach the pivot.
DEVICE bool find_candidates(Shared& shared, Candidates& candidates, int capacity, const Row& row, const Sample& sample,
                            int topk) {
    Tile<4> tile;
    const uint32_t of_sample = leading_bits(shared, row, sample, topk, tile);
    const float pivot = score_of_key(maximum(of_sample, key_of(-INFINITY_F32) + 1));
    if (row.is_aligned()) {
        collect<4>(shared, candidates, capacity, row, pivot, tile);
    } else {
        Tile<1> narrow;
        collect<1>(shared, candidates, capacity, row, pivot, narrow);
    }
    __syncthreads();
    candidates.count = minimum(static_cast<int>(shared.num_candidates), capacity);
    return static_cast<int>(shared.num_candidates) <= capacity && candidates.count >= topk;
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

// The bits of the columns, after the candidates.
DEVICE uint32_t* marks(const TopkParams& params, const Candidates& candidates) {
    return candidates.keys + 2 * static_cast<int64_t>(params.capacity);
}

// Clears all that must start at 0 at once: one barrier is enough.
DEVICE void clear(const TopkParams& params, Shared& shared, const Candidates& candidates, int length) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = 0;
    const int words = params.num_columns <= MARKED_COLUMNS ? 2 * ceil_div(length, 32) : 0;
    for (int word = threadIdx.x; word < words; word += THREADS) marks(params, candidates)[word] = 0;
    if (threadIdx.x == 0) shared.num_candidates = 0;
    __syncthreads();
}

struct Counts {
    uint32_t above, equal;
};

// The sums over the threads before this one.
DEVICE Counts before_thread(Shared& shared, Counts own) {
    const uint32_t above = inclusive_sum(own.above), equal = inclusive_sum(own.equal);
    if (lane_id() == WARP_SIZE - 1) {
        shared.above[warp_id()] = above;
        shared.equal[warp_id()] = equal;
    }
    __syncthreads();
    const bool before_own = lane_id() < warp_id();
    const uint32_t above_before = sum_of_lanes(before_own ? shared.above[lane_id()] : 0);
    const uint32_t equal_before = sum_of_lanes(before_own ? shared.equal[lane_id()] : 0);
    return {above_before + above - own.above, equal_before + equal - own.equal};
}

// Every warp takes a stretch of the row.
DEVICE void write_by_stretches(const TopkParams& params, Shared& shared, int64_t row, const Row& scores, uint32_t last,
                               uint32_t left) {
    const int stretch = ceil_div(ceil_div(scores.length, WARPS), LANES) * LANES;
    const int begin = minimum(warp_id() * stretch, scores.length), end = minimum(begin + stretch, scores.length);
    Counts own = {0, 0};
    for (int column = begin + lane_id(); column < end; column += LANES) {
        const uint32_t key = scores.key(column);
        own.above += key > last;
        own.equal += key == last;
    }
    Counts before = before_thread(shared, own);
    before = {__shfl_sync(FULL_WARP, before.above, 0), __shfl_sync(FULL_WARP, before.equal, 0)};
    for (int tile = begin; tile < end; tile += LANES) {
        const int column = tile + lane_id();
        const uint32_t key = column < end ? scores.key(column) : 0;
        const bool is_above = column < end && key > last, is_equal = column < end && key == last;
        const uint32_t lanes_above = __ballot_sync(FULL_WARP, is_above), lanes_equal = __ballot_sync(FULL_WARP, is_equal);
        const uint32_t equal_before = before.equal + static_cast<uint32_t>(lanes_before(lanes_equal));
        if (is_above || (is_equal && equal_before < left)) {
            const uint32_t place = before.above + static_cast<uint32_t>(lanes_before(lanes_above)) + minimum(equal_before, left);
            write(params, row, place, column, key);
        }
        before.above += __popc(lanes_above);
        before.equal += __popc(lanes_equal);
    }
}

// Every candidate that is chosen, or may be, sets its column's bit. Every thread takes some words
// of bits.
DEVICE void write_by_marks(const TopkParams& params, Shared& shared, int64_t row, const Row& scores, const Candidates& candidates,
                           uint32_t last, uint32_t left) {
    uint32_t* const above = marks(params, candidates);
    const int words = ceil_div(scores.length, 32);
    uint32_t* const equal = above + words;
    for (int place = threadIdx.x; place < candidates.count; place += THREADS) {
        const uint32_t key = candidates.keys[place];
        const int column = candidates.columns[place];
        if (key >= last) atomicOr(&(key > last ? above : equal)[column / 32], 1u << column % 32);
    }
    __syncthreads();
    const int share = ceil_div(words, THREADS);
    const int begin = minimum(static_cast<int>(threadIdx.x) * share, words), end = minimum(begin + share, words);
    Counts own = {0, 0};
    for (int word = begin; word < end; ++word) {
        own.above += __popc(above[word]);
        own.equal += __popc(equal[word]);
    }
    Counts before = before_thread(shared, own);
    for (int word = begin; word < end; ++word) {
        for (uint32_t bits = above[word] | equal[word]; bits; bits &= bits - 1) {
            const int bit = __ffs(bits) - 1, column = word * 32 + bit;
            const bool is_equal = equal[word] >> bit & 1;
            if (!is_equal || before.equal < left) {
                const uint32_t key = params.values ? scores.key(column) : 0;
                write(params, row, before.above + minimum(before.equal, left), column, key);
            }
            before.above += !is_equal;
            before.equal += is_equal;
        }
    }
}

// With few threads four blocks an SM hide each other's barriers and memory.
KERNEL_OF(topk, TopkParams, THREADS, THREADS <= 256 ? 4 : 1) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const int64_t row = blockIdx.x;
    int length = params.num_columns;
    if (params.lengths) length = minimum(maximum(params.lengths[row], 0), length);
    const Row scores{params.scores + row * params.scores_row_stride, length};
    const int chosen = minimum(params.topk, length);
    if (length <= params.topk) {
        for (int column = threadIdx.x; column < length; column += THREADS)
            write(params, row, column, column, scores.key(column));
    } else {
        uint32_t* const keys = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(Shared));
        Candidates candidates{keys, reinterpret_cast<int32_t*>(keys + params.capacity), 0};
        const Sample sample(scores, params.capacity);  // on its way while shared memory is cleared
        clear(params, shared, candidates, length);
        const bool found = find_candidates(shared, candidates, params.capacity, scores, sample, params.topk);
        const LastKey last = found ? last_key(shared, candidates, params.topk) : last_key(shared, scores, params.topk);
        if (found && params.num_columns <= MARKED_COLUMNS)
            write_by_marks(params, shared, row, scores, candidates, last.prefix, last.left);
        else write_by_stretches(params, shared, row, scores, last.prefix, last.left);
    }
    for (int place = chosen + threadIdx.x; place < params.topk; place += THREADS) {
        params.indices[row * params.indices_row_stride + place] = -1;
        if (params.values) params.values[row * params.values_row_stride + place] = -INFINITY_F32;
    }
}
