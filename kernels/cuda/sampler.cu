// One token of each row of logits: temperature, top-k, top-p and min-p by the exponential race (inference 12.3).
//
//     order  = ids from the largest logit down, of equal ones the lower id first; -0 equals 0, NaN counts as -infinity
//     t      = max(temperature, 1e-5), at most fp32's largest number, c = log2(e) / t, m = the largest logit
//     weight = 2^((logit - m) c);  1 at an infinite m, and 0 below it
//     kept   = ids above -infinity and of nonzero share among the first n of the order, n the least of
//              top_k, where that is above 0;
//              the least number, 1 or more, whose weights reach top_p of the sum of all, where top_p is below 1;
//              the number of weights of at least min(min_p, 1), where min_p is above 0
//     x      = word id % 4 of Philox of counter (id / 4, step low, step high, 0) and key seed
//     v      = x 2^-32 + 2^-33 in fp32;  g = -log1p(-v)
//     score  = logit c - log2(g), of an infinite logit -log2(g) above all others
//     token  = the kept id with the largest score, the lowest of equals; where temperature > 0 does not hold, the
//              first of the order; -1 where no logit is above -infinity
//
// The largest p / g is the largest log2(p) - log2(g), and neither needs the sum that makes a probability of a weight.
// v rounds to 1 at its upper end: g is infinite then, and the id loses (FM-154).
//
// A block takes a row, and reads it once, while the second-level cache is asked for what comes two tiles later. Without
// filters each id has an upper bound of its score, logit c - log2(v) since g >= v; one bound is made for four ids at
// once, of the largest logit and the least word. What is above the best lower bound of the block so far is bounded
// closely, to 2^-12, and exact logarithms are taken only of ids whose bounds overlap.
//
// With filters the ids that may be kept are collected on the way: those at least as large as a logit that some 4096 of
// a row are expected to reach, by a sample of it (a rank of maxima of SAMPLES logits each, which lie far apart). The
// same pass finds the largest logit and the sum of the weights, whence follows what is certain: weights of at most (1
// - top_p) sum / vocab_size add up to no more than what top_p leaves out. Only a row of which that sum is NaN, since it
// has NaN or infinity, is read again, with care for both. The last id that is kept is then found by digits of its
// place in the order, with counts and sums in integers (weights in units of 2^-43), whose value no order of additions
// changes, until no more than FEW ids are left, which a warp orders; random words are drawn for the kept alone. Where
// the collected do not reach what ends the order, or are more than there is room for, as of rows that are flat or
// limited to nearly all ids, all ids race, and what lies in front of the winner in the order says whether it is kept:
// then it wins among the kept as well. Only where it is not is the row read again for each digit, five times at most,
// and once for the race of the kept.
//
// Floor: 4 bytes a logit, 66 MB and 15.6 us at 4.24 TB/s for 128 rows of 129280. A row is one block's, so that the time
// is that of one multiprocessor for 517 KB and for what comes before and behind: 128 rows take as long as a few.
// Measured on one H200 before the last change, normal logits of deviation 4, 128 rows: argmax 18.3 us, no filter 27.3
// (57 % of the copy rate), top-p of 0.9 38.7 (40 %), top-k of 50 36.4, all filters 33.2; where one of eight rows keeps
// all ids but one 73, before such rows raced first 408. One row took 25.8 us without a filter and 29.8 with top-p.
// Loads that were on their way in registers while the logits before them are looked at had given nothing.
// Now: argmax 20.0, no filter 25.5, top-p of 0.9 34.0 (46 %), and 63 and 65 us of top-k and of all filters, each with
// such a row among eight; one row 20.4 and 21.9 us. Predicted were 22 us with top-p, 21 without a filter: not
// profiled. A logit takes 9.4 instructions with filters and 20 without (18 and 28 before), 5.4 and 11.5 us beside the
// 16 us of memory, of which no warp waits any more for more than the second-level cache; behind the reading some 4 us
// were predicted with filters, of about 10: maxima and sums of the block by shuffles instead of each thread for itself, one
// digit of three, and a race of what is kept alone. ncu, 34.6 us with top-p: some 8 us before the reading, 15 of it, and 12
// behind it. Four tiles in advance, asked for by the first instruction, took 36 us, and 22.3 for 20 of argmax.
//
// Defines: THREADS, a power of two of at least 64 threads a block. Launch: num_rows blocks, of which each has shared
// memory for `segment` vectors of a warp beyond its own, 20 bytes each.
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "philox.h"
#include "selection.h"

#ifndef THREADS
#error "define THREADS as the threads of a block"
#endif

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int IDS = 4;              // that a thread takes at once: the words of one counter
constexpr int LOADS = 4;            // of IDS logits that are on their way at once
constexpr int STEP = THREADS * IDS;
constexpr int ID_BITS = 20;
constexpr uint32_t LAST_ID = (1u << ID_BITS) - 1;
constexpr int LIST = THREADS > 512 ? 6144 : 2048;  // ids; shorter rows are collected whole
constexpr int BINS = 2048, BINS_OF_A_THREAD = ceil_div(BINS, THREADS);
constexpr int DIGIT_BITS = 11;
static_assert(1 << DIGIT_BITS == BINS, "a digit names a bin");
constexpr int SAMPLES = 4;          // that a thread takes; 8 threads take neighbours, an access of 32 bytes
constexpr int SAMPLE_SPAN = 8;
constexpr int LINE = 128 / static_cast<int>(sizeof(float));  // logits of a line of memory
constexpr int AHEAD = 2;            // tiles of LOADS loads that the second-level cache is asked for in advance
constexpr int FEW = WARP_SIZE;      // ids of a bin that are ordered by one warp
constexpr float LARGEST = 0x1.fffffep127f;
constexpr float LEAST_TEMPERATURE = 1e-5f, LARGEST_TEMPERATURE = LARGEST;
constexpr float UNITS = 0x1p43f;    // of a weight of 1: sums of 2^20 of them fit 64 bits
constexpr uint32_t NO_LIMIT = 0xffffffffu;
constexpr uint64_t NO_SHARE = ~uint64_t{0};

struct SamplerParams {
    const float* logits; int64_t logits_row_stride;  // [num_rows, vocab_size]; strides in elements
    const float* temperature;                        // [num_rows]
    const int32_t* top_k;                            // [num_rows], or nullptr
    const float* top_p;                              // [num_rows], or nullptr
    const float* min_p;                              // [num_rows], or nullptr
    const int64_t* seed;                             // [num_rows]
    const int64_t* step;                             // [num_rows]
    int32_t* tokens;                                 // [num_rows]
    int32_t vocab_size;
    int32_t segment;                                 // vectors of IDS logits that a warp has room to collect
};
PARAMS_LAYOUT(SamplerParams, logits, logits_row_stride, temperature, top_k, top_p, min_p, seed, step, tokens,
              vocab_size, segment)

// An id that was collected.
struct alignas(8) Entry {
    float logit;
    int32_t id;
};

// Shared memory of a block; the segments of its warps follow.
struct alignas(16) Shared {
    Entry list[LIST];
    union {
        uint32_t shares[2][BINS];  // lower and upper words
        uint16_t chosen[LIST];     // once the last bin is found: entries of the list from there on
    };
    uint32_t counts[BINS];
    uint64_t of_warps[WARPS];
    uint32_t counts_of_warps[WARPS];
    uint64_t few[FEW];      // the places of a bin
    uint64_t share;         // found: what lies in front of the bin
    uint64_t last;          // found: the place of the last id
    uint32_t count;
    int32_t bin;            // -1 where the wanted number is not reached
    uint32_t num_listed, num_chosen, num_few;
    uint32_t least;         // of a race of all ids: the key that the best score reaches
};
static_assert(LIST <= 1 << 16 && sizeof(uint16_t) * LIST <= sizeof(uint32_t) * 2 * BINS, "chosen entries fit");

SHARED_MEMORY(sampler_vector, sizeof(Shared))
SHARED_MEMORY(sampler_scalar, sizeof(Shared))

// A row, and what is asked of it.
struct Row {
    const float* logits;
    int vocab_size;
    float temperature, factor;
    uint32_t top_k;
    float top_p, min_p;
    uint64_t seed, step;

    bool has_filters() const { return top_k != NO_LIMIT || top_p < 1.0f || min_p > 0.0f; }
};

DEVICE Row row_of(const SamplerParams& params) {
    const int64_t row = blockIdx.x;
    const int32_t top_k = params.top_k ? params.top_k[row] : 0;
    const float top_p = params.top_p ? params.top_p[row] : 1.0f, min_p = params.min_p ? params.min_p[row] : 0.0f;
    const float temperature = params.temperature[row];
    return Row{params.logits + row * params.logits_row_stride,
               params.vocab_size,
               temperature,
               __fdiv_rn(LOG2_E, minimum_f32(maximum_f32(temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE)),
               top_k > 0 && top_k < params.vocab_size ? static_cast<uint32_t>(top_k) : NO_LIMIT,
               // NaN is no limit.
               top_p < 1.0f ? maximum_f32(top_p, 0.0f) : 1.0f,
               min_p > 0.0f ? minimum_f32(min_p, 1.0f) : 0.0f,
               static_cast<uint64_t>(params.seed[row]),
               static_cast<uint64_t>(params.step[row])};
}

// Larger for what comes first: 0 is nothing. Bits above those of a key may say more.
DEVICE uint64_t place_of(uint32_t key, int id) {
    return static_cast<uint64_t>(key) << ID_BITS | (LAST_ID - static_cast<uint32_t>(id));
}
DEVICE int id_of(uint64_t place) { return static_cast<int>(LAST_ID - (static_cast<uint32_t>(place) & LAST_ID)); }
DEVICE uint32_t key_of_place(uint64_t place) { return static_cast<uint32_t>(place >> ID_BITS); }

// `most` is above -infinity, and the largest.
DEVICE float finite_weight_of(const Row& row, float logit, float most) {
    return exp2_approx((logit - most) * row.factor);
}

// The difference of two infinities is NaN, which loses to 1.
DEVICE float weight_of(const Row& row, float logit, float most) {
    return minimum_f32(finite_weight_of(row, logit, most), 1.0f);
}

// In every lane: the largest of the warp's.
DEVICE uint64_t warp_maximum(uint64_t own) {
    const uint32_t upper = static_cast<uint32_t>(own >> 32), most = __reduce_max_sync(FULL_WARP, upper);
    const uint32_t lower = __reduce_max_sync(FULL_WARP, upper == most ? static_cast<uint32_t>(own) : 0);
    return static_cast<uint64_t>(most) << 32 | lower;
}

// In every thread: the largest of the block's.
DEVICE uint64_t block_maximum(Shared& shared, uint64_t own) {
    own = warp_maximum(own);
    __syncthreads();
    if (lane_id() == 0) shared.of_warps[warp_id()] = own;
    __syncthreads();
    return warp_maximum(shared.of_warps[lane_id() % WARPS]);
}

// Asks for the lines of a row that `count` threads, one a line, reach from `first` on.
DEVICE void prefetch_lines(const Row& row, int first, int count) {
    const int column = first + static_cast<int>(threadIdx.x) * LINE;
    if (static_cast<int>(threadIdx.x) < count && column < row.vocab_size) prefetch_second_level(row.logits + column);
}

// The first AHEAD tiles of visit_tiles().
DEVICE void prefetch_row(const Row& row) { prefetch_lines(row, 0, AHEAD * LOADS * STEP / LINE); }
static_assert(AHEAD * LOADS * STEP / LINE <= THREADS, "a line a thread");

// Calls visit(tile, loads of IDS logits each) for a row, of which load i begins at column_of(tile, i); behind the row
// logits are -infinity. All threads of a warp call it together. The second-level cache is asked for the tile after
// the next one, so that memory is busy while logits are looked at.
DEVICE int column_of(int tile, int load) { return tile + load * STEP + static_cast<int>(threadIdx.x) * IDS; }

// The logits of a tile, of which `row.vocab_size` may cut off some.
template <bool WIDE, int LOADS>
DEVICE void load_tile(const Row& row, int tile, float (&logits)[LOADS][IDS]) {
    UNROLL
    for (int load = 0; load < LOADS; ++load) {
        const int column = column_of(tile, load);
        UNROLL
        for (int e = 0; e < IDS; ++e) logits[load][e] = -INFINITY_F32;
        if constexpr (WIDE) {
            if (column < row.vocab_size) unpack<float>(load_vec16_streaming(row.logits + column), logits[load]);
        } else {
            UNROLL
            for (int e = 0; e < IDS; ++e)
                if (column + e < row.vocab_size) logits[load][e] = row.logits[column + e];
        }
    }
}

template <bool WIDE, int LOADS, typename Visit>
DEVICE void visit_tiles(const Row& row, Visit visit) {
    for (int tile = 0; tile < row.vocab_size; tile += LOADS * STEP) {
        float logits[LOADS][IDS];
        prefetch_lines(row, tile + AHEAD * LOADS * STEP, LOADS * STEP / LINE);
        if (WIDE && tile + LOADS * STEP <= row.vocab_size) {
            const float* const own = row.logits + column_of(tile, 0);
            UNROLL
            for (int load = 0; load < LOADS; ++load)
                unpack<float>(load_vec16_streaming(own + load * STEP), logits[load]);
        } else {
            load_tile<WIDE>(row, tile, logits);
        }
        visit(tile, logits);
    }
}

// Calls visit(column, four logits from there on) for a row in the same way.
template <bool WIDE, int LOADS, typename Visit>
DEVICE void visit_columns(const Row& row, Visit visit) {
    visit_tiles<WIDE, LOADS>(row, [&](int tile, const float (&logits)[LOADS][IDS]) {
        UNROLL
        for (int load = 0; load < LOADS; ++load) visit(column_of(tile, load), logits[load]);
    });
}

DEVICE float largest_of(const float (&logits)[IDS]) {
    return maximum_f32(maximum_f32(logits[0], logits[1]), maximum_f32(logits[2], logits[3]));
}

// ---------------------------------------------------------------- the race

DEVICE PhiloxWords words_of(const Row& row, int id) {
    return philox(static_cast<uint32_t>(id) / IDS, static_cast<uint32_t>(row.step),
                  static_cast<uint32_t>(row.step >> 32), 0, row.seed);
}

DEVICE float uniform(uint32_t word) { return fused_multiply_add(static_cast<float>(word), 0x1p-32f, 0x1p-33f); }

// An infinite logit's is that of 0: it comes first by its place.
DEVICE float score_of(const Row& row, float logit, float power) {
    return fused_multiply_add(logit == INFINITY_F32 ? 0.0f : logit, row.factor, -power);
}

// Place of an id in the race: infinite logits come first.
DEVICE uint64_t race(const Row& row, float logit, int id, uint32_t word) {
    const float score = score_of(row, logit, log2f(-log1pf(-uniform(word))));
    const bool infinite = logit == INFINITY_F32;
    return place_of(key_of(score), id) | static_cast<uint64_t>(infinite) << (32 + ID_BITS);
}

// The word and the logit of one of a thread's ids, by selects: indexed registers would lie in memory.
template <typename T>
DEVICE T one_of(const T (&values)[IDS], int at) {
    const T low = at & 1 ? values[1] : values[0], high = at & 1 ? values[3] : values[2];
    return at & 2 ? high : low;
}

// log2(g) within 2^-13: below 2^-6 three terms of its series, which leave out v^3 / 4 of it; above, log2(1 - v) errs by
// 2^-22, of 2^-6 at least.
DEVICE float approximate_power(float v) {
    const float series = v * fused_multiply_add(v, fused_multiply_add(v, 1.0f / 3.0f, 0.5f), 1.0f);
    return log2_approx(v < 0x1p-6f ? series : -LN_2 * log2_approx(1.0f - v));
}

// What a thread has seen of a race: one id waits, and is decided exactly only where bounds of its score do not.
struct Contest {
    static constexpr float SLACK = 0x1p-12f;
    uint64_t best = 0;              // of what is decided: the place in the race
    float lower = -INFINITY_F32;    // the best score is at least that
    float upper = -INFINITY_F32;    // the score of what waits is at most that
    float logit = 0.0f;
    int id = -1;
    uint32_t word = 0;

    // Both bounds are rounded as the score is.
    void enter(const Row& row, float new_logit, int new_id, uint32_t new_word) {
        const float power = approximate_power(uniform(new_word));
        const bool infinite = new_logit == INFINITY_F32;
        const float new_upper = infinite ? INFINITY_F32 : score_of(row, new_logit, power - SLACK);
        const float new_lower = infinite ? INFINITY_F32 : score_of(row, new_logit, power + SLACK);
        if (new_upper < lower) return;
        if (!(new_lower > upper)) decide(row);
        lower = maximum_f32(lower, new_lower);
        upper = new_upper;
        logit = new_logit;
        id = new_id;
        word = new_word;
    }

    void decide(const Row& row) {
        if (id >= 0) best = maximum(best, race(row, logit, id, word));
    }
};

// The winner of all threads, or what each has of it.
DEVICE uint64_t winner(Shared& shared, const Row& row, Contest& contest) {
    const float lower = score_of_key(static_cast<uint32_t>(block_maximum(shared, key_of(contest.lower))));
    if (!(contest.upper < lower)) contest.decide(row);
    return contest.best;
}

// Which of a thread's ids may reach the score `least`. log2(v) errs by 2^-22.
DEVICE uint32_t in_front_of(const Row& row, const float (&logits)[IDS], const PhiloxWords& words, float least) {
    uint32_t in_front = 0;
    UNROLL
    for (int e = 0; e < IDS; ++e) {
        const float least_power = log2_normal_approx(uniform(words.w[e])) - 0x1p-18f;
        const float most = fused_multiply_add(logits[e], row.factor, -least_power);
        in_front |= static_cast<uint32_t>(logits[e] > -INFINITY_F32 && !(most < least)) << e;
    }
    return in_front;
}

// Whether one of them may: the largest logit with the least word is in front of each. That is true of logits of
// -infinity and NaN as well where nothing is found yet.
DEVICE bool may_lead(const Row& row, const float (&logits)[IDS], const PhiloxWords& words, float least) {
    const uint32_t word = minimum(minimum(words.w[0], words.w[1]), minimum(words.w[2], words.w[3]));
    const float top = largest_of(logits), least_power = log2_normal_approx(uniform(word)) - 0x1p-18f;
    return !(fused_multiply_add(top, row.factor, -least_power) < least);
}

// The winner of a whole row. Once a tile a warp learns what the others have found, and they what it has.
template <bool WIDE>
DEVICE uint64_t race_of_all(Shared& shared, const Row& row) {
    Contest contest;
    uint32_t least_key = key_of(-INFINITY_F32);
    if (threadIdx.x == 0) shared.least = least_key;
    prefetch_row(row);
    __syncthreads();
    visit_tiles<WIDE, LOADS>(row, [&](int tile, const float (&logits)[LOADS][IDS]) {
        if (lane_id() == 0) least_key = maximum(least_key, atomicMax(&shared.least, least_key));
        least_key = __shfl_sync(FULL_WARP, least_key, 0);
        float least = score_of_key(least_key);
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            const int column = column_of(tile, load);
            const PhiloxWords words = words_of(row, column);
            const bool leads = may_lead(row, logits[load], words, least);
            if (!__any_sync(FULL_WARP, leads)) continue;
            uint32_t in_front = leads ? in_front_of(row, logits[load], words, least) : 0;
            for (; in_front; in_front &= in_front - 1) {
                const int e = __ffs(static_cast<int>(in_front)) - 1;
                contest.enter(row, one_of(logits[load], e), column + e, one_of(words.w, e));
            }
            __syncwarp();
            least_key = maximum(least_key, __reduce_max_sync(FULL_WARP, key_of(contest.lower)));
            least = score_of_key(least_key);
        }
    });
    return winner(shared, row, contest);
}

// The first of a whole row's order.
template <bool WIDE>
DEVICE uint64_t first_of_all(const Row& row) {
    uint32_t best = key_of(-INFINITY_F32);
    int id = -1;
    visit_columns<WIDE, LOADS>(row, [&](int column, const float (&logits)[IDS]) {
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            const uint32_t key = key_of(logits[e]);
            if (key > best) {
                best = key;
                id = column + e;
            }
        }
    });
    return id < 0 ? 0 : place_of(best, id);
}

// ---------------------------------------------------------------- what is kept

// Of a row: its largest logit, -LARGEST at least, the sum of its weights, and a key below which certainly nothing is
// kept.
struct Bounds {
    float most, sum;
    uint32_t certain;
};

// What a warp has collected: vectors of IDS logits with their first columns, as far as there was room.
struct Segment {
    Vec16* vectors;
    int32_t* columns;
    SharedAddress vectors_address, columns_address;  // in 32 bits, of which no store computes more than a sum
    int room, count;
};

DEVICE Segment segment_of(const SamplerParams& params) {
    Vec16* const vectors = reinterpret_cast<Vec16*>(dynamic_shared() + sizeof(Shared));
    int32_t* const columns = reinterpret_cast<int32_t*>(vectors + WARPS * params.segment);
    const int first = warp_id() * params.segment;
    return Segment{vectors + first, columns + first, shared_address(vectors + first), shared_address(columns + first),
                   params.segment, 0};
}

// A logit that about two thirds of what there is room for reach, by a sample; -LARGEST of rows that the list holds.
DEVICE float least_collected(const SamplerParams& params, const Row& row) {
    if (row.vocab_size <= LIST) return -LARGEST;
    constexpr int SPANS = THREADS / SAMPLE_SPAN;
    const int stride = row.vocab_size / (SPANS * SAMPLES) / SAMPLE_SPAN * SAMPLE_SPAN;
    const int thread = static_cast<int>(threadIdx.x);
    const int first = thread / SAMPLE_SPAN * stride + thread % SAMPLE_SPAN;
    float sampled[SAMPLES];
    UNROLL
    for (int i = 0; i < SAMPLES; ++i) sampled[i] = row.logits[first + i * SPANS * stride];
    prefetch_row(row);
    float most = -INFINITY_F32;
    UNROLL
    for (int i = 0; i < SAMPLES; ++i) most = maximum_f32(most, sampled[i]);
    // Of this share of ids one or more of SAMPLES are found with a probability of 1 - (1 - share)^SAMPLES.
    const float aim = static_cast<float>(minimum(params.segment * WARPS, LIST)) * (2.0f / 3.0f);
    const float missed = 1.0f - aim / static_cast<float>(row.vocab_size);
    const int rank = maximum(static_cast<int>(THREADS * (1.0f - missed * missed * missed * missed)), 1);
    const uint32_t key = key_of(most);
    uint32_t reached = 0;
    for (uint32_t bit = 1u << 31; bit > 0xffff; bit >>= 1)
        if (__syncthreads_count(key >= (reached | bit)) >= rank) reached |= bit;
    // Keys below that of -infinity are those of NaN, which loses.
    return maximum_f32(score_of_key(reached), -LARGEST);
}

DEVICE uint32_t certain_key(const Row& row, float most, float sum) {
    if (most == INFINITY_F32) return key_of(most);
    const uint32_t lowest = key_of(-LARGEST);
    // What is at most that, all together, is no more than top_p leaves out. An octave further down no rounding matters.
    const float left_out = (1.0f - row.top_p) * sum / static_cast<float>(row.vocab_size);
    const float least = maximum_f32(left_out, row.min_p);
    return least > 0.0f ? maximum(lowest, key_of(most + (log2_approx(least) - 1.0f) / row.factor)) : lowest;
}

// Adds a thread's logits to what a warp has collected, where one of them, `top`, is at least `least`.
DEVICE void collect(Segment& segment, const float (&logits)[IDS], int column, bool collected) {
    const uint32_t lanes = __ballot_sync(FULL_WARP, collected);
    const int at = segment.count + __popc(lanes & ((1u << lane_id()) - 1));
    if (collected && at < segment.room) {
        store_shared_vec16(segment.vectors_address + at * sizeof(Vec16), pack<float>(logits));
        store_shared(segment.columns_address + at * sizeof(int32_t), column);
    }
    segment.count += __popc(lanes);
}

// Reads a row once, and collects what is at least `least`, which is above -infinity. The sum of a row with NaN or
// infinity is NaN unless CAREFUL, where the former counts as -infinity and the latter's weights are 1.
template <bool WIDE, bool CAREFUL>
DEVICE Bounds bounds_of(Shared& shared, Segment& segment, const Row& row, float least) {
    float most = -LARGEST, sum = 0.0f;
    visit_tiles<WIDE, LOADS>(row, [&](int tile, float (&logits)[LOADS][IDS]) {
        float tops[LOADS], top = -INFINITY_F32;
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            if constexpr (CAREFUL)
                for (float& logit : logits[load]) logit = maximum_f32(logit, -INFINITY_F32);
            tops[load] = largest_of(logits[load]);
            top = maximum_f32(top, tops[load]);
        }
        if (top > most) {
            sum *= weight_of(row, most, top);
            most = top;
        }
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            float weights[IDS];
            UNROLL
            for (int e = 0; e < IDS; ++e)
                weights[e] = CAREFUL ? weight_of(row, logits[load][e], most)
                                     : finite_weight_of(row, logits[load][e], most);
            sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
            collect(segment, logits[load], column_of(tile, load), tops[load] >= least);
        }
    });
    const float own = most;
    most = score_of_key(static_cast<uint32_t>(block_maximum(shared, key_of(most))));
    sum = warp_sum(sum * weight_of(row, own, most));
    __syncthreads();
    if (lane_id() == 0) shared.counts_of_warps[warp_id()] = __float_as_uint(sum);
    __syncthreads();
    sum = warp_sum(lane_id() < WARPS ? __uint_as_float(shared.counts_of_warps[lane_id()]) : 0.0f);
    return Bounds{most, sum, certain_key(row, most, sum)};
}

// Lists what was collected and reaches this logit; whether there was room for all. A warp takes its part of the list at
// once: additions to one word wait for each other.
DEVICE bool list_collected(Shared& shared, const Segment& segment, float least) {
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    const auto visit_own = [&](auto visit) {
        for (int i = lane_id(); i < minimum(segment.count, segment.room); i += WARP_SIZE) {
            float logits[IDS];
            unpack<float>(segment.vectors[i], logits);
            const int column = segment.columns[i];
            UNROLL
            for (int e = 0; e < IDS; ++e)
                if (logits[e] >= least) visit(Entry{logits[e], column + e});
        }
    };
    uint32_t own = 0;
    visit_own([&](Entry) { ++own; });
    const uint32_t upto = inclusive_sum(own);
    uint32_t first = 0;
    if (lane_id() == WARP_SIZE - 1) first = atomicAdd(&shared.num_listed, upto);
    uint32_t at = __shfl_sync(FULL_WARP, first, WARP_SIZE - 1) + upto - own;
    visit_own([&](Entry entry) {
        if (at < LIST) shared.list[at] = entry;
        ++at;
    });
    const int cut_off = __syncthreads_count(segment.count > segment.room);
    return cut_off == 0 && shared.num_listed <= LIST;
}

// Ids by place: those of a list, or some of them.
struct Listed {
    static constexpr uint32_t FEW = ::FEW;
    const Entry* list;
    const uint16_t* chosen;  // nullptr for all
    int count;

    template <typename Visit>
    void visit(Visit visit) const {
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const Entry entry = list[chosen ? chosen[i] : i];
            visit(place_of(key_of(entry.logit), entry.id));
        }
    }
};

// Those of a whole row whose keys reach the least.
template <bool WIDE>
struct Streamed {
    static constexpr uint32_t FEW = 1;
    const Row& row;
    uint32_t least_key;

    template <typename Visit>
    void visit(Visit visit) const {
        visit_columns<WIDE, 1>(row, [&](int column, const float (&logits)[IDS]) {
            for (int e = 0; e < IDS; ++e) {
                const uint32_t key = key_of(logits[e]);
                if (key >= least_key) visit(place_of(key, column + e));
            }
        });
    }
};

// Sum over the threads before this one; `all` is that of the whole block's.
template <typename T>
DEVICE T sum_before(T own, T* of_warps) {
    const T upto = inclusive_sum(own);
    if (lane_id() == WARP_SIZE - 1) of_warps[warp_id()] = upto;
    __syncthreads();
    const T before = inclusive_sum(lane_id() < warp_id() ? of_warps[lane_id()] : T{0});
    return __shfl_sync(FULL_WARP, before, WARP_SIZE - 1) + upto - own;
}

// A weight in integers: sums of them do not depend on an order.
DEVICE uint64_t share_of(const Row& row, uint32_t key, float most) {
    return static_cast<uint64_t>(weight_of(row, score_of_key(key), most) * UNITS);
}

// Two additions of 32 bits: one of 64 is a loop of compare and swap, which many ids of one bin repeat for each other.
DEVICE void add_share(Shared& shared, uint32_t bin, uint64_t share) {
    const uint32_t lower = static_cast<uint32_t>(share);
    const uint32_t carry = atomicAdd(&shared.shares[0][bin], lower) > ~lower;
    const uint32_t upper = static_cast<uint32_t>(share >> 32) + carry;
    if (upper != 0) atomicAdd(&shared.shares[1][bin], upper);
}

DEVICE uint64_t share_of_bin(const Shared& shared, int bin) {
    return shared.shares[0][bin] | static_cast<uint64_t>(shared.shares[1][bin]) << 32;
}

// What ends the order: so many ids, or so large a share.
struct Limit {
    uint32_t wanted_count;
    uint64_t wanted_share;

    bool reached(uint32_t count, uint64_t share) const { return count >= wanted_count || share >= wanted_share; }
    // By an id or more, of this count and share, behind those in front.
    bool reached_within(uint32_t count, uint64_t share, uint32_t own_count, uint64_t own_share) const {
        return !reached(count, share) && reached(count + own_count, share + own_share);
    }
};

// Finds the bin, counted from the last one down, in which the limit is reached, beside what lies in front.
DEVICE void find_bin(Shared& shared, uint32_t count, uint64_t share, const Limit& limit) {
    const int first = BINS - BINS_OF_A_THREAD * (static_cast<int>(threadIdx.x) + 1);
    uint32_t own_count = 0;
    uint64_t own_share = 0;
    for (int i = 0; i < BINS_OF_A_THREAD; ++i) {
        own_count += shared.counts[first + i];
        own_share += share_of_bin(shared, first + i);
    }
    if (threadIdx.x == 0) shared.bin = -1;
    count += sum_before(own_count, shared.counts_of_warps);
    share += sum_before(own_share, shared.of_warps);
    if (limit.reached_within(count, share, own_count, own_share)) {
        int bin = first + BINS_OF_A_THREAD - 1;
        for (; !limit.reached(count + shared.counts[bin], share + share_of_bin(shared, bin)); --bin) {
            count += shared.counts[bin];
            share += share_of_bin(shared, bin);
        }
        shared.bin = bin;
        shared.count = count;
        shared.share = share;
    }
    __syncthreads();
}

DEVICE uint64_t wanted_share(const Row& row, const Bounds& bounds) {
    if (!(row.top_p < 1.0f)) return NO_SHARE;
    // Exact: both numbers have 24 bits. No token is kept for a share of 0.
    const double share = static_cast<double>(row.top_p) * static_cast<double>(bounds.sum) * static_cast<double>(UNITS);
    return maximum<uint64_t>(static_cast<uint64_t>(ceil(share)), 1);
}

// Whether this id is kept, by what lies in front of it.
template <bool WIDE>
DEVICE bool is_kept(Shared& shared, const Row& row, const Bounds& bounds, int id) {
    const float logit = row.logits[id];
    const uint64_t own = place_of(key_of(logit), id);
    uint32_t count = 0;
    uint64_t share = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.count = 0;
        shared.share = 0;
    }
    __syncthreads();
    visit_columns<WIDE, 1>(row, [&](int column, const float (&logits)[IDS]) {
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            const uint32_t key = key_of(logits[e]);
            if (place_of(key, column + e) <= own) continue;
            ++count;
            share += share_of(row, key, bounds.most);
        }
    });
    count = inclusive_sum(count);
    share = inclusive_sum(share);
    if (lane_id() == WARP_SIZE - 1) {
        atomicAdd(&shared.count, count);
        atomicAdd(&shared.share, share);
    }
    __syncthreads();
    const bool in_front = shared.count < row.top_k && shared.share < wanted_share(row, bounds);
    return in_front && !(weight_of(row, logit, bounds.most) < row.min_p);
}

// A bin of places, [first, first + 2^bits), and what lies in front of it.
struct Bin {
    uint64_t first, share;
    uint32_t count, num_ids;  // no ids: the limit is not reached
    int bits;
};

// The bin of the last id that top_k and top_p keep: of no more than Ids::FEW ids, or of one place.
template <typename Ids>
DEVICE Bin last_bin(Shared& shared, const Ids& ids, const Row& row, const Bounds& bounds, uint32_t least_key) {
    const Limit limit{row.top_k, wanted_share(row, bounds)};
    // Digits are those of the distance from the least place that there may be, the first one of the largest distance.
    const uint64_t base = static_cast<uint64_t>(least_key) << ID_BITS;
    int shift = ID_BITS + 32 - __clz(static_cast<int>(key_of(bounds.most) - least_key));
    uint64_t prefix = 0, share = 0;
    uint32_t count = 0, num_ids = 0;
    while (shift > 0) {
        const int upto = shift;
        shift = maximum(upto - DIGIT_BITS, 0);
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
            shared.counts[bin] = shared.shares[0][bin] = shared.shares[1][bin] = 0;
        __syncthreads();
        ids.visit([&](uint64_t place) {
            const uint64_t distance = place - base;
            if (distance >> upto != prefix >> upto) return;
            const uint32_t bin = static_cast<uint32_t>((distance - prefix) >> shift);
            atomicAdd(&shared.counts[bin], 1u);
            if (limit.wanted_share != NO_SHARE)
                add_share(shared, bin, share_of(row, key_of_place(place), bounds.most));
        });
        __syncthreads();
        find_bin(shared, count, share, limit);
        if (shared.bin < 0) return Bin{0, 0, 0, 0, 0};
        prefix |= static_cast<uint64_t>(shared.bin) << shift;
        count = shared.count;
        share = shared.share;
        num_ids = shared.counts[shared.bin];
        if (num_ids <= Ids::FEW) break;
        __syncthreads();
    }
    return Bin{base + prefix, share, count, num_ids, shift};
}

// Chooses the entries of a list from this bin on, and the places of the bin, of which there are no more than FEW.
DEVICE void choose(Shared& shared, const Listed& listed, const Bin& bin) {
    if (threadIdx.x == 0) shared.num_chosen = shared.num_few = 0;
    __syncthreads();
    for (int first = 0; first < listed.count; first += THREADS) {
        const int i = first + static_cast<int>(threadIdx.x);
        const Entry entry = i < listed.count ? listed.list[i] : Entry{-INFINITY_F32, 0};
        const uint64_t place = place_of(key_of(entry.logit), entry.id);
        const bool chosen = place >= bin.first;
        const uint32_t lanes = __ballot_sync(FULL_WARP, chosen);
        uint32_t at = 0;
        if (lane_id() == 0 && lanes != 0) at = atomicAdd(&shared.num_chosen, static_cast<uint32_t>(__popc(lanes)));
        at = __shfl_sync(FULL_WARP, at, 0) + __popc(lanes & ((1u << lane_id()) - 1));
        if (chosen) shared.chosen[at] = static_cast<uint16_t>(i);
        if (chosen && (place - bin.first) >> bin.bits == 0) shared.few[atomicAdd(&shared.num_few, 1u)] = place;
    }
    __syncthreads();
}

// The place of the last id that top_k and top_p keep, which is one of the few. A lane of the first warp takes an id,
// and adds up what lies in front of it.
DEVICE uint64_t last_of_few(Shared& shared, const Row& row, const Bounds& bounds, const Bin& bin) {
    if (threadIdx.x < shared.num_few) {
        const Limit limit{row.top_k, wanted_share(row, bounds)};
        const uint64_t own = shared.few[threadIdx.x];
        uint64_t share = bin.share;
        uint32_t count = bin.count;
        for (uint32_t i = 0; i < shared.num_few; ++i) {
            const uint64_t other = shared.few[i];
            if (other <= own) continue;
            ++count;
            share += share_of(row, key_of_place(other), bounds.most);
        }
        const uint64_t own_share = share_of(row, key_of_place(own), bounds.most);
        if (limit.reached_within(count, share, 1, own_share)) shared.last = own;
    }
    __syncthreads();
    return shared.last;
}

// The winner among what is kept.
template <typename Ids>
DEVICE uint64_t race_of_kept(Shared& shared, const Ids& ids, const Row& row, const Bounds& bounds, uint64_t last) {
    Contest contest;
    ids.visit([&](uint64_t place) {
        const float logit = score_of_key(key_of_place(place));
        if (place < last || weight_of(row, logit, bounds.most) < row.min_p) return;
        const int id = id_of(place);
        const PhiloxWords words = words_of(row, id);
        contest.enter(row, logit, id, one_of(words.w, id % IDS));
    });
    return winner(shared, row, contest);
}

// The winner of a row of which ids were collected; false where they do not say it.
DEVICE bool race_of_collected(Shared& shared, const Segment& segment, const Row& row, const Bounds& bounds,
                              uint32_t least_key, uint64_t& best) {
    if (!list_collected(shared, segment, score_of_key(least_key))) return false;
    Listed listed{shared.list, nullptr, static_cast<int>(shared.num_listed)};
    const Bin bin = last_bin(shared, listed, row, bounds, least_key);
    // Either the list reaches what ends the order, or nothing outside of it is kept.
    if (bin.num_ids == 0 && least_key != bounds.certain) return false;
    uint64_t last = 0;
    if (bin.num_ids > 0) {
        choose(shared, listed, bin);
        last = last_of_few(shared, row, bounds, bin);
        listed = Listed{shared.list, shared.chosen, static_cast<int>(shared.num_chosen)};
    }
    best = race_of_kept(shared, listed, row, bounds, last);
    return true;
}

template <bool WIDE>
DEVICE uint64_t best_of(const SamplerParams& params, Shared& shared, const Row& row) {
    if (!(row.temperature > 0.0f)) return first_of_all<WIDE>(row);
    Bounds bounds{};
    uint64_t best = 0;
    if (row.has_filters()) {
        Segment segment = segment_of(params);
        const float least = least_collected(params, row);
        bounds = bounds_of<WIDE, false>(shared, segment, row, least);
        if (is_nan(bounds.sum)) {
            segment.count = 0;
            bounds = bounds_of<WIDE, true>(shared, segment, row, least);
        }
        const uint32_t least_key = maximum(key_of(least), bounds.certain);
        if (race_of_collected(shared, segment, row, bounds, least_key, best)) return best;
        __syncthreads();
    }
    best = race_of_all<WIDE>(shared, row);
    if (!row.has_filters()) return best;
    // Who wins among all ids wins among the kept, if it is one of them.
    best = block_maximum(shared, best);
    if (best == 0 || is_kept<WIDE>(shared, row, bounds, id_of(best))) return best;
    __syncthreads();
    const Streamed<WIDE> streamed{row, bounds.certain};
    const Bin bin = last_bin(shared, streamed, row, bounds, bounds.certain);
    return race_of_kept(shared, streamed, row, bounds, bin.first);
}

template <bool WIDE>
DEVICE void sample(const SamplerParams& params) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const Row row = row_of(params);
    const uint64_t best = block_maximum(shared, best_of<WIDE>(params, shared, row));
    if (threadIdx.x == 0) params.tokens[blockIdx.x] = best ? id_of(best) : -1;
}

KERNEL(sampler_vector, SamplerParams, THREADS) { sample<true>(params); }
KERNEL(sampler_scalar, SamplerParams, THREADS) { sample<false>(params); }
