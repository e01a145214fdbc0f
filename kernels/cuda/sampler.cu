// One token of each row of logits: temperature, top-k, top-p and min-p by the exponential race (inference 12.3).
//
//     order  = ids from the largest logit down, of equal ones the lower id first; -0 equals 0, NaN counts as -infinity
//     t      = max(temperature, 1e-5), at most fp32's largest number, c = log2(e) / t, m = the largest logit
//     weight = 2^((logit - m) c);  1 at an infinite m, and 0 below it
//     kept   = ids above -infinity, and where m is infinite none below it, among the first n of the order, n the least of
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
// A block takes a row, and reads it once, four loads of a thread at a time. Without filters each id has an upper bound of its
// score, logit c - log2(v) since g >= v; one bound is made for four ids at once, of the largest logit and the least word.
// What is above the best lower bound of the block so far is bounded closely, to 2^-12, and exact logarithms are taken only
// of ids whose bounds overlap.
//
// With filters the ids that may be kept are listed on the way: those at least as large as a logit that some 4096 of a row
// are expected to reach, by a sample of it (ranks of maxima of SAMPLES logits each, which lie far apart). Their scores are
// computed on the way as well, by whole warps of what was put aside before. The same pass finds the largest logit and the sum of
// the weights, whence follows what is certain: weights of at most (1 - top_p) sum / vocab_size add up to no more than what
// top_p leaves out. Only a row of which that sum is NaN, since it has NaN or infinity, is read again, with care for both.
// Who wins among all that are listed wins among the kept, if it is one of these: counts and shares of what lies in front
// of it say so, in integers (weights in units of 2^-43), whose value no order of additions changes. Where it is not kept,
// nothing behind it is, and those in front race. Where the listed do not reach what ends the order, or are more than there
// is room for, as of rows that are flat or limited to nearly all ids, the row itself is raced and asked in the same way,
// and read twice for each candidate.
//
// Floor: 4 bytes a logit, 66 MB and 15.6 us at 4.24 TB/s for 128 rows of 129280. A row is one block's, so that the time
// is that of one multiprocessor for 517 KB and for what comes before and behind: 128 rows take as long as their slowest.
// Measured on one H200, normal logits of deviation 4, 128 rows: argmax 17.4 us, no filter 24.6, limits by top_p at their edges 32.0 (49 % of
// the copy rate; 25.0 and 33.4 before, when digits of places found the last id and tiles were asked for in L2 in advance), by top_k
// 35.5 and by all filters 34.6, where one of eight rows keeps all ids but one (63 and 65 before). Of the rows with top_p two of nine
// have no limit, so that their time is a bound of the kernel's, and two keep some 2200 ids, by a count on the host. Rows that are
// all limited as users ask for it, by 0.8 to 0.99, take 27.9 us (56 % of the copy rate) beside argmax's 17.4: of the difference the
// sample, its two barriers and what begins behind them are a part, what is listed and raced on the way and the two or three counts at
// the end the rest, neither of which was timed alone.
// What did not help: two tiles asked for in L2 in advance, argmax 19.6; copies of 16 bytes into shared memory, 80 to 112 KB
// on their way, 23.1 to 23.4; bulk copies of 1 KB by each warp, 27.7; bulk copies of 16 KB by one lane, four on their way from before
// the sample on, 21.8 (top-p 36.1, no filter 34.6; 17.7, 28.1 and 24.7 in that call); the first loads before the sample is looked at, no
// filter 28.7. Not tried: a cluster of small blocks for each row, so that rows of unlike work share a multiprocessor.
//
// Defines: THREADS, a power of two of at least 64 threads a block. Launch: num_rows blocks, of which each has shared
// memory for `segment` ids of a warp beyond its own, 12 bytes each.
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
constexpr int STAGED = 3 * WARP_SIZE;  // vectors that wait in a warp: fewer than a round of lanes, and those of two loads
constexpr int SAMPLES = 4;          // that a thread takes; 8 threads take neighbours, an access of 32 bytes
constexpr int SAMPLE_SPAN = 8;
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
    int32_t segment;                                 // ids that a warp has room to list
};
PARAMS_LAYOUT(SamplerParams, logits, logits_row_stride, temperature, top_k, top_p, min_p, seed, step, tokens,
              vocab_size, segment)

// What lies in front of an id in the order, or what a warp knows of it: how many, their share of the weights, and the place in
// the race of the one that wins among them.
struct Front {
    uint64_t share = 0, best = 0;
    uint32_t count = 0;
    float logit = -INFINITY_F32;  // of the best
};

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

// Where an id stands in the order.
struct Rank {
    float logit;
    int id;

    bool is_behind(float other, int other_id) const { return other > logit || (other == logit && other_id < id); }
};
// All logits above -infinity are in front of it, and no others.
constexpr Rank END{-INFINITY_F32, 0};

// Of a row: its largest logit, -LARGEST at least, the sum of its weights, and whether a warp had no room for what it found.
struct Bounds {
    float most, sum;
    bool cut_off;
};

// Of a warp: vectors of IDS logits, and the columns of their first.
struct alignas(16) Staged {
    Vec16 vectors[STAGED];
    int32_t columns[STAGED];
};

// Shared memory of a block; the lists of its warps follow.
struct alignas(16) Shared {
    Staged staged[WARPS];
    uint64_t of_warps[WARPS];
    Front fronts[2][WARPS];
    uint32_t most_of_warps[WARPS];  // keys
    float sum_of_warps[WARPS];
    uint32_t keys[WARPS];
    Row row;                // for what comes behind the reading, whose registers have no room for it
    // Of races of a whole row, for the same reason:
    uint32_t least;         // the key that the best score reaches
    Rank end;               // what races lies in front of it
    Bounds bounds;
};

SHARED_MEMORY(sampler_vector, sizeof(Shared))
SHARED_MEMORY(sampler_scalar, sizeof(Shared))

// What a call says of a row.
struct Asked {
    float temperature, top_p, min_p;
    int32_t top_k;
    int64_t seed, step;
};

DEVICE Asked asked_of(const SamplerParams& params) {
    const int64_t row = blockIdx.x;
    return Asked{params.temperature[row],
                 params.top_p ? params.top_p[row] : 1.0f,
                 params.min_p ? params.min_p[row] : 0.0f,
                 params.top_k ? params.top_k[row] : 0,
                 params.seed[row],
                 params.step[row]};
}

DEVICE Row row_of(const float* logits, int vocab_size, const Asked& asked) {
    return Row{logits,
               vocab_size,
               // Where one id is kept, it is the first.
               asked.top_k == 1 || asked.top_p <= 0.0f ? 0.0f : asked.temperature,
               __fdiv_rn(LOG2_E, minimum_f32(maximum_f32(asked.temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE)),
               asked.top_k > 0 && asked.top_k < vocab_size ? static_cast<uint32_t>(asked.top_k) : NO_LIMIT,
               // NaN is no limit.
               asked.top_p < 1.0f ? maximum_f32(asked.top_p, 0.0f) : 1.0f,
               asked.min_p > 0.0f ? minimum_f32(asked.min_p, 1.0f) : 0.0f,
               static_cast<uint64_t>(asked.seed),
               static_cast<uint64_t>(asked.step)};
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

// As lane_id() and warp_id(), from a thread's number that is read where it is used: what follows from it is not kept while a row
// is read, whose loop needs the registers.
DEVICE int lane_anew() { return static_cast<int>(thread_id_anew() % WARP_SIZE); }
DEVICE int warp_anew() { return static_cast<int>(thread_id_anew() / WARP_SIZE); }

// In every thread: the largest of the block's.
DEVICE uint64_t block_maximum(Shared& shared, uint64_t own) {
    own = warp_maximum(own);
    __syncthreads();
    if (lane_anew() == 0) shared.of_warps[warp_anew()] = own;
    __syncthreads();
    return warp_maximum(shared.of_warps[lane_anew() % WARPS]);
}

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
DEVICE uint64_t place_in_race(uint32_t score_key, float logit, int id) {
    return place_of(score_key, id) | static_cast<uint64_t>(logit == INFINITY_F32) << (32 + ID_BITS);
}
DEVICE uint64_t race(const Row& row, float logit, int id, uint32_t word) {
    return place_in_race(key_of(score_of(row, logit, log2f(-log1pf(-uniform(word))))), logit, id);
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

// Which of a thread's ids in front of `end` may reach the score `least`. log2(v) errs by 2^-22.
DEVICE uint32_t in_front_of(const Row& row, const Rank& end, const float (&logits)[IDS], int column,
                            const PhiloxWords& words, float least) {
    uint32_t in_front = 0;
    UNROLL
    for (int e = 0; e < IDS; ++e) {
        const float least_power = log2_normal_approx(uniform(words.w[e])) - 0x1p-18f;
        const float most = fused_multiply_add(logits[e], row.factor, -least_power);
        in_front |= static_cast<uint32_t>(end.is_behind(logits[e], column + e) && !(most < least)) << e;
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

// The winner among the ids of a row that are in front of shared.end, which the first thread has set. Once a tile a warp
// learns what the others have found, and they what it has.
template <bool WIDE>
DEVICE uint64_t race_of_all(Shared& shared, const Row& row) {
    Contest contest;
    uint32_t least_key = key_of(-INFINITY_F32);
    if (threadIdx.x == 0) shared.least = least_key;
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
            uint32_t in_front = leads ? in_front_of(row, shared.end, logits[load], column, words, least) : 0;
            for (; in_front; in_front &= in_front - 1) {
                const int e = __ffs(static_cast<int>(in_front)) - 1;
                contest.enter(row, one_of(logits[load], e), column + e, one_of(words.w, e));
            }
            __syncwarp();
            least_key = maximum(least_key, __reduce_max_sync(FULL_WARP, key_of(contest.lower)));
            least = score_of_key(least_key);
        }
    });
    return block_maximum(shared, winner(shared, row, contest));
}

// The first of a whole row's order.
template <bool WIDE>
DEVICE uint64_t first_of_all(Shared& shared, const Row& row) {
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
    return block_maximum(shared, id < 0 ? 0 : place_of(best, id));
}

// ---------------------------------------------------------------- what is kept

// What a warp has found: vectors that wait to be looked at closely, and the ids whose logits reach `least`, as far as there is
// room, the first `raced` with the keys of their scores.
struct Listing {
    SharedAddress staged;           // in 32 bits, of which no store computes more than a sum
    uint32_t* own;                  // `room` logits, their ids, and the keys
    float least;
    int room, num_staged, count, raced;

    int listed() const { return minimum(count, room); }
    float& logit(int at) const { return reinterpret_cast<float*>(own)[at]; }
    uint32_t& id(int at) const { return own[room + at]; }
    uint32_t& score(int at) const { return own[2 * room + at]; }
};

DEVICE Listing listing_of(Shared& shared, const SamplerParams& params, float least) {
    const int room = params.segment;
    uint32_t* const own = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(Shared)) + 3 * room * warp_id();
    return Listing{shared_address(&shared.staged[warp_id()]),
                   own,
                   least,
                   room,
                   0,
                   0,
                   0};
}

// The rank-th largest key of a warp, cut off to its upper half, in every lane.
DEVICE uint32_t ranked_key(uint32_t key, int rank) {
    uint32_t reached = 0;
    UNROLL
    for (int bit = 31; bit >= 16; --bit) {
        const uint32_t raised = reached | 1u << bit;
        if (__popc(__ballot_sync(FULL_WARP, key >= raised)) >= rank) reached = raised;
    }
    return reached;
}

// Logits that lie far apart, of which a thread takes the largest.
struct Sample {
    float logits[SAMPLES];
};

DEVICE Sample sample_of(const float* logits, int vocab_size) {
    constexpr int SPANS = THREADS / SAMPLE_SPAN;
    const int stride = vocab_size / (SPANS * SAMPLES) / SAMPLE_SPAN * SAMPLE_SPAN;
    const int thread = static_cast<int>(threadIdx.x);
    const int first = thread / SAMPLE_SPAN * stride + thread % SAMPLE_SPAN;
    Sample sample;
    UNROLL
    for (int i = 0; i < SAMPLES; ++i)
        sample.logits[i] = logits[minimum(first + i * SPANS * stride, vocab_size - 1)];
    return sample;
}

// A logit that about two thirds of what there is room for reach, by a sample; -LARGEST of rows that are listed whole.
DEVICE float least_listed(Shared& shared, const SamplerParams& params, const Row& row, const Sample& sample) {
    // A warp meets each of its loads with so many ids.
    if (row.vocab_size <= params.segment / static_cast<int>(WARP_SIZE * IDS) * STEP) return -LARGEST;
    float most = -INFINITY_F32;
    UNROLL
    for (int i = 0; i < SAMPLES; ++i) most = maximum_f32(most, sample.logits[i]);
    // Of this share of ids one or more of SAMPLES are found with a probability of 1 - (1 - share)^SAMPLES.
    const float aim = static_cast<float>(params.segment * WARPS) / 2.0f;
    const float missed = maximum_f32(1.0f - aim / static_cast<float>(row.vocab_size), 0.0f);
    const float reached = WARP_SIZE * (1.0f - missed * missed * missed * missed);
    // The middle one of the warps' own estimates, whose ranks are on average the one whose median reaches so many.
    const float share = (static_cast<float>(warp_id()) + 0.5f) / WARPS;
    const uint32_t own = ranked_key(key_of(most), minimum(maximum(static_cast<int>(reached + 0.3f + share), 1), 32));
    if (lane_id() == 0) shared.keys[warp_id()] = own;
    __syncthreads();
    // Keys below that of -infinity are those of NaN.
    const uint32_t reached_key = ranked_key(shared.keys[lane_id() % WARPS], WARP_SIZE / 2);
    return score_of_key(maximum(reached_key, key_of(-LARGEST)));
}

DEVICE uint32_t certain_key(const Row& row, const Bounds& bounds) {
    const float most = bounds.most;
    if (most == INFINITY_F32) return key_of(most);
    const uint32_t lowest = key_of(-LARGEST);
    // What is at most that, all together, is no more than top_p leaves out. An octave further down no rounding matters.
    const float left_out = (1.0f - row.top_p) * bounds.sum / static_cast<float>(row.vocab_size);
    const float least = maximum_f32(left_out, row.min_p);
    return least > 0.0f ? maximum(lowest, key_of(most + (log2_approx(least) - 1.0f) / row.factor)) : lowest;
}

DEVICE int lanes_before(uint32_t lanes) { return __popc(lanes & ((1u << lane_id()) - 1)); }

// Puts the vectors of a warp's threads aside that hold what is to be listed.
DEVICE void stage(Listing& listing, const float (&logits)[IDS], int column, bool wanted) {
    const uint32_t lanes = __ballot_sync(FULL_WARP, wanted);
    const int at = listing.num_staged + lanes_before(lanes);
    if (wanted) {
        store_shared_vec16(listing.staged + at * sizeof(Vec16), pack<float>(logits));
        store_shared(listing.staged + sizeof(Staged::vectors) + at * sizeof(int32_t), static_cast<uint32_t>(column));
    }
    listing.num_staged += __popc(lanes);
}

// Gives a warp's next ids of the list their scores.
DEVICE void race_listed(const Row& row, Listing& listing) {
    __syncwarp();
    const int at = listing.raced + lane_id();
    if (at < listing.listed()) {
        const int id = static_cast<int>(listing.id(at));
        const PhiloxWords words = words_of(row, id);
        listing.score(at) = key_of_place(race(row, listing.logit(at), id, one_of(words.w, id % IDS)));
    }
    listing.raced += WARP_SIZE;
}

// Lists what a round of staged vectors holds.
DEVICE void list_staged(Shared& shared, Listing& listing) {
    __syncwarp();
    const int first = maximum(listing.num_staged - static_cast<int>(WARP_SIZE), 0), at = first + lane_id();
    float logits[IDS];
    UNROLL
    for (int e = 0; e < IDS; ++e) logits[e] = -INFINITY_F32;
    int column = 0;
    if (at < listing.num_staged) {
        unpack<float>(shared.staged[warp_id()].vectors[at], logits);
        column = shared.staged[warp_id()].columns[at];
    }
    listing.num_staged = first;
    UNROLL
    for (int e = 0; e < IDS; ++e) {
        const bool wanted = logits[e] >= listing.least;
        const uint32_t lanes = __ballot_sync(FULL_WARP, wanted);
        const int to = listing.count + lanes_before(lanes);
        if (wanted && to < listing.room) {
            listing.logit(to) = logits[e];
            listing.id(to) = static_cast<uint32_t>(column + e);
        }
        listing.count += __popc(lanes);
    }
}

// What is staged and listed is dealt with by whole warps, while memory is waited for.
DEVICE void list_and_race(Shared& shared, const Row& row, Listing& listing) {
    if (listing.num_staged < WARP_SIZE) return;
    while (listing.num_staged >= WARP_SIZE) list_staged(shared, listing);
    while (listing.listed() - listing.raced >= static_cast<int>(WARP_SIZE)) race_listed(row, listing);
}

// The same of what is left.
DEVICE void list_and_race_rest(Shared& shared, const Row& row, Listing& listing) {
    if (listing.num_staged > 0) list_staged(shared, listing);
    while (listing.raced < listing.listed()) race_listed(row, listing);
    __syncwarp();
}

// The bounds of a block from those of its threads.
DEVICE Bounds block_bounds(Shared& shared, const Row& row, float own, float sum, bool cut_off) {
    const uint32_t key = __reduce_max_sync(FULL_WARP, key_of(own));
    sum = warp_sum(sum * weight_of(row, own, score_of_key(key)));
    __syncthreads();
    if (lane_anew() == 0) {
        shared.most_of_warps[warp_anew()] = key;
        shared.sum_of_warps[warp_anew()] = sum;
    }
    cut_off = __syncthreads_or(cut_off) != 0;
    const uint32_t key_of_warp = shared.most_of_warps[lane_anew() % WARPS];
    const float most = score_of_key(__reduce_max_sync(FULL_WARP, key_of_warp));
    const float of_warp = shared.sum_of_warps[lane_anew() % WARPS] * weight_of(row, score_of_key(key_of_warp), most);
    return Bounds{most, warp_sum(lane_anew() < WARPS ? of_warp : 0.0f), cut_off};
}

// Reads a row once. The sum of a row with NaN or infinity is NaN unless CAREFUL, where the former counts as -infinity and the
// latter's weights are 1. Otherwise lists what is at least `least`, which is above -infinity.
template <bool WIDE, bool CAREFUL>
DEVICE Bounds bounds_of(Shared& shared, Listing& listing, const Row& row) {
    float most = -LARGEST, sum = 0.0f;
    float offset = -LARGEST;  // the power of the largest, rounded
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
            const float raised = CAREFUL ? 0.0f : __fmul_rn(top, row.factor);
            sum *= CAREFUL ? weight_of(row, most, top) : exp2_approx(offset - raised);
            most = top;
            offset = raised;
        }
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            float weights[IDS];
            UNROLL
            for (int e = 0; e < IDS; ++e)
                weights[e] = CAREFUL ? weight_of(row, logits[load][e], most)
                                     : exp2_approx(fused_multiply_add(logits[load][e], row.factor, -offset));
            sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
            if constexpr (!CAREFUL) {
                stage(listing, logits[load], column_of(tile, load), tops[load] >= listing.least);
                if (load % 2 == 1) list_and_race(shared, row, listing);
            }
        }
    });
    if constexpr (!CAREFUL) list_and_race_rest(shared, row, listing);
    // What the power was rounded by is no part of the sum.
    if constexpr (!CAREFUL) sum *= most > -LARGEST ? exp2_approx(fused_multiply_add(-most, row.factor, offset)) : 1.0f;
    return block_bounds(shared, row, most, sum, listing.count > listing.room);
}

// A weight in integers: sums of them do not depend on an order.
DEVICE uint64_t share_of(const Row& row, float logit, float most) {
    return static_cast<uint64_t>(weight_of(row, logit, most) * UNITS);
}

DEVICE uint64_t wanted_share(const Row& row, const Bounds& bounds) {
    if (!(row.top_p < 1.0f)) return NO_SHARE;
    // Exact: both numbers have 24 bits. No token is kept for a share of 0.
    const double share = static_cast<double>(row.top_p) * static_cast<double>(bounds.sum) * static_cast<double>(UNITS);
    return maximum<uint64_t>(static_cast<uint64_t>(ceil(share)), 1);
}

// What ends the order: so many ids, or so large a share.
struct Limit {
    uint32_t wanted_count;
    uint64_t wanted_share;

    bool reached(const Front& front) const { return front.count >= wanted_count || front.share >= wanted_share; }
};

// Over all lanes of a number below 2^58, in every lane.
DEVICE uint64_t sum_of_lanes(uint64_t value) {
    constexpr int BITS = 26;  // and 5 more of the sum
    constexpr uint32_t LIMB = (1u << BITS) - 1;
    const uint64_t low = ::sum_of_lanes(static_cast<uint32_t>(value) & LIMB);
    const uint64_t middle = ::sum_of_lanes(static_cast<uint32_t>(value >> BITS) & LIMB);
    const uint64_t high = ::sum_of_lanes(static_cast<uint32_t>(value >> 2 * BITS));
    return low + (middle << BITS) + (high << 2 * BITS);
}

DEVICE Front warp_front(const Front& own) {
    Front front;
    front.share = sum_of_lanes(own.share);
    front.count = ::sum_of_lanes(own.count);
    front.best = warp_maximum(own.best);
    const uint32_t lanes = __ballot_sync(FULL_WARP, own.best == front.best);
    front.logit = __shfl_sync(FULL_WARP, own.logit, __ffs(static_cast<int>(lanes)) - 1);
    return front;
}

// The block's in every thread. `turn` is another than in the call before.
DEVICE Front block_front(Shared& shared, int turn, const Front& own) {
    const Front front = warp_front(own);
    if (lane_anew() == 0) shared.fronts[turn][warp_anew()] = front;
    __syncthreads();
    return warp_front(lane_anew() < WARPS ? shared.fronts[turn][lane_anew()] : Front{});
}

// What of the lists lies in front of `end`.
DEVICE Front front_of_listed(Shared& shared, int turn, const Listing& listing, const Row& row, const Bounds& bounds,
                             const Rank& end) {
    Front front;
    for (int at = lane_id(); at < listing.listed(); at += WARP_SIZE) {
        const float logit = listing.logit(at);
        const int id = static_cast<int>(listing.id(at));
        if (!end.is_behind(logit, id)) continue;
        ++front.count;
        front.share += share_of(row, logit, bounds.most);
        const uint64_t place = place_in_race(listing.score(at), logit, id);
        if (place > front.best) {
            front.best = place;
            front.logit = logit;
        }
    }
    return block_front(shared, turn, front);
}

// What of a row lies in front of `end`; nobody is asked who wins.
template <bool WIDE>
DEVICE Front front_of_row(Shared& shared, const Row& row, const Bounds& bounds, const Rank& end) {
    Front front;
    visit_columns<WIDE, LOADS>(row, [&](int column, const float (&logits)[IDS]) {
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            if (!end.is_behind(logits[e], column + e)) continue;
            ++front.count;
            if (row.top_p < 1.0f) front.share += share_of(row, logits[e], bounds.most);
        }
    });
    return block_front(shared, 0, front);
}

// Whether an id is kept, by what lies in front of it.
DEVICE bool is_kept(const Row& row, const Bounds& bounds, const Limit& limit, const Front& front, float logit) {
    return !limit.reached(front) && !(weight_of(row, logit, bounds.most) < row.min_p);
}

// The winner of a row of which ids were listed; false where they do not say it. Who wins among all of them wins among the
// kept, if it is one of these. Otherwise nothing behind it is kept, and those in front race.
DEVICE bool race_of_listed(Shared& shared, const Listing& listing, const Bounds& bounds, uint64_t& best) {
    const Row row = shared.row;
    const Limit limit{row.top_k, wanted_share(row, bounds)};
    Front front = front_of_listed(shared, 0, listing, row, bounds, END);
    // Either the list reaches what ends the order, or nothing outside of it is kept.
    if (!limit.reached(front) && key_of(listing.least) > certain_key(row, bounds)) return false;
    for (int turn = 1; front.best != 0; turn ^= 1) {
        best = front.best;
        const Rank end{front.logit, id_of(best)};
        front = front_of_listed(shared, turn, listing, row, bounds, end);
        if (is_kept(row, bounds, limit, front, end.logit)) break;
    }
    return true;
}

// The winner of a row that is read for each race, in the same way.
template <bool WIDE>
DEVICE uint64_t race_of_row(Shared& shared, const Row& row, const Bounds& bounds) {
    if (threadIdx.x == 0) {
        shared.end = END;
        shared.bounds = bounds;
    }
    while (true) {
        const uint64_t best = race_of_all<WIDE>(shared, row);
        const Row row = shared.row;
        if (best == 0 || !row.has_filters()) return best;
        const Bounds bounds = shared.bounds;
        const Rank end{row.logits[id_of(best)], id_of(best)};
        const Front front = front_of_row<WIDE>(shared, row, bounds, end);
        if (is_kept(row, bounds, Limit{row.top_k, wanted_share(row, bounds)}, front, end.logit)) return best;
        if (threadIdx.x == 0) shared.end = end;
    }
}

// Reads a row and lists what may be kept; whether the list says who wins.
template <bool WIDE>
DEVICE bool race_of_first_reading(const SamplerParams& params, Shared& shared, const Row& row, const Sample& sample,
                                  Bounds& bounds, uint64_t& best) {
    Listing listing = listing_of(shared, params, least_listed(shared, params, row, sample));
    bounds = bounds_of<WIDE, false>(shared, listing, row);
    if (is_nan(bounds.sum)) {
        const Bounds careful = bounds_of<WIDE, true>(shared, listing, row);
        bounds = Bounds{careful.most, careful.sum, bounds.cut_off};
    }
    return !bounds.cut_off && race_of_listed(shared, listing, bounds, best);
}

template <bool WIDE>
DEVICE uint64_t best_of(const SamplerParams& params, Shared& shared, const Row& row, const Sample& sample) {
    if (!(row.temperature > 0.0f)) return first_of_all<WIDE>(shared, row);
    Bounds bounds{};
    // No list holds more ids than there is room for.
    const bool may_suffice =
        row.top_k <= static_cast<uint32_t>(params.segment * WARPS) || row.top_p < 1.0f || row.min_p > 0.0f;
    if (row.has_filters() && may_suffice) {
        uint64_t best = 0;
        if (race_of_first_reading<WIDE>(params, shared, row, sample, bounds, best)) return best;
    }
    return race_of_row<WIDE>(shared, row, bounds);
}

template <bool WIDE>
DEVICE void sample(const SamplerParams& params) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const float* const logits = params.logits + blockIdx.x * params.logits_row_stride;
    // These come first, since they are waited for first.
    const Sample sample = sample_of(logits, params.vocab_size);
    const Asked asked = asked_of(params);
    __syncwarp();
    const Row row = row_of(logits, params.vocab_size, asked);
    if (threadIdx.x == 0) shared.row = row;
    const uint64_t best = best_of<WIDE>(params, shared, row, sample);
    if (threadIdx.x == 0) params.tokens[blockIdx.x] = best ? id_of(best) : -1;
}

KERNEL(sampler_vector, SamplerParams, THREADS) { sample<true>(params); }
KERNEL(sampler_scalar, SamplerParams, THREADS) { sample<false>(params); }
