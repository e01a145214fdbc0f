// Samples one token of each row of logits by the exponential race (inference 12.3).
//
//     order  = ids by falling logit, equal logits by rising id; -0 equals 0, NaN counts as -inf
//     t      = max(temperature, 1e-5), at most FLT_MAX; c = log2(e) / t; m = the largest logit
//     weight = 2^((logit - m) c); where m is infinite 1 at m, and 0 below it
//     kept   = the first n ids of the order above -inf, none below an infinite m; n is least of
//              top_k, if top_k > 0;
//              the least count >= 1 whose weights reach top_p of the sum of all, if top_p < 1;
//              the number of weights >= min(min_p, 1), if min_p > 0
//     x      = word id % 4 of Philox, counter (id / 4, step low, step high, 0), key seed
//     v      = x 2^-32 + 2^-33 in fp32;  g = -log1p(-v), infinite where v rounds to 1 (FM-154)
//     score  = logit c - log2(g); of an infinite logit -log2(g), above all others
//     token  = the kept id of the largest score, the lowest of equals; unless temperature > 0 the
//              first of the order; -1 where no logit is above -inf
//
// A block takes a row and reads it once, in tiles of 16 logits a thread. Score bounds decide
// most ids; exact logarithms are taken only where bounds overlap. With filters, warps list the
// large logits and add them to buckets by logit. One warp then sums the buckets, finds the winner.
// The row is read again where fp32 sums or the list do not decide, or where it holds NaN or inf.
// Floor: 4 bytes a logit; 128 rows of 129280 are 66 MB, 15.6 us at 4.24 TB/s.
// Limit: the issue slots of one SM for each row, then one warp's latency at the end.
// Defines: THREADS, a power of two >= 64; LISTS, 1, or 0 if no row has filters. Launch: num_rows
// blocks; shared memory after `Shared` has room for `segment` ids a warp, 12 bytes each.
// What was tried: kernels/docs/sampler.md.
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "philox.h"
#include "selection.h"

#if !defined(THREADS) || !defined(LISTS)
#error "define THREADS as the threads of a block, and LISTS as 1 or 0"
#endif

constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int IDS = 4;              // that a thread takes at once: the words of one counter
constexpr int LOADS = 4;            // of IDS logits that are on their way at once
constexpr int STEP = THREADS * IDS;
constexpr int SPAN = WARP_SIZE * IDS;  // neighbours, which a warp's load takes
constexpr int ID_BITS = 20;
constexpr uint32_t LAST_ID = (1u << ID_BITS) - 1;
constexpr int HALF = LOADS / 2;
constexpr int STAGED = (HALF + 1) * WARP_SIZE;  // vectors that wait in a warp: those of half a tile, and fewer than a round of lanes
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


// A row and its parameters.
struct Row {
    const float* logits;
    int vocab_size;
    float temperature, factor;
    uint32_t top_k;
    float top_p, min_p;
    uint64_t step;

    bool has_filters() const { return top_k != NO_LIMIT || top_p < 1.0f || min_p > 0.0f; }
};

// The position of an id in the order.
struct Rank {
    float logit;
    int id;

    bool is_behind(float other, int other_id) const { return other > logit || (other == logit && other_id < id); }
};
// Exactly the logits above -infinity precede it.
constexpr Rank END{-INFINITY_F32, 0};

// The place of the leading id in the race, and its logit. Place 0 means no id.
struct Leader {
    uint64_t place = 0;
    float logit = -INFINITY_F32;
};

// Of a row: its largest logit, at least -LARGEST; the sum of its weights; whether a warp had no
// room for all ids it found.
struct Bounds {
    float most, sum;
    bool cut_off;
};

// What precedes an id in the order: the count, and the share of the weights.
struct Front {
    uint64_t share = 0;
    uint32_t count = 0;
};

// What a warp has listed, and the part of it that precedes an id: counts, sums of weights, and the
// leader of the race among the preceding ids.
struct Listed {
    float weight = 0.0f, weight_in_front = 0.0f;
    uint32_t count = 0, count_in_front = 0;
    Leader leader;
};

// KEPT: the leader is known. ASK: the leader must be checked next; no kept id has a larger score.
// UNDECIDED: fp32 does not decide, so the whole row is read.
enum class Verdict : uint32_t { UNDECIDED, KEPT, ASK };
struct Decision {
    Verdict verdict;
    Leader leader;
};

// Listed ids are in buckets by logit, the largest in the first bucket. A bucket holds the sum of
// weights relative to `most` of a Sample in units of 2^-20, the count, and the leader of the race.
// Sums are integers, because shared memory adds integers natively.
constexpr int BUCKETS = LISTS ? 512 : WARP_SIZE;
constexpr float BUCKET_UNITS = 0x1p20f, LARGEST_BUCKET_SUM = 0x1p31f;
struct Bucket {
    uint32_t weight, count;
    uint64_t leader;
};
struct Buckets {
    uint64_t leaders[BUCKETS];
    uint32_t weights[BUCKETS], counts[BUCKETS], keys[BUCKETS];  // keys: the leaders' scores alone
    uint32_t reached_weights[BUCKETS], reached_counts[BUCKETS];  // up to the end of each, of its group
};
// Groups of WARP_SIZE buckets, each summed by one warp.
constexpr int GROUPS = BUCKETS / WARP_SIZE;

// Estimates from the first tile: the row's largest logit, at least -LARGEST, and a logit that
// about half as many ids reach as the lists can hold. Buckets divide the range above `lowest`.
struct Sample {
    float most, least, lowest, buckets_per_logit;

    uint32_t bucket_of(float logit) const {
        constexpr float LAST = BUCKETS - 1;
        return static_cast<uint32_t>(LAST - minimum_f32(maximum_f32((logit - lowest) * buckets_per_logit, 0.0f), LAST));
    }
};

// A warp's staged vectors of IDS logits, and the column of the first logit of each.
struct alignas(16) Staged {
    Vec16 vectors[STAGED];
    int32_t columns[STAGED];
};

// What ends the order, in units of buckets: a weight above `most_weight` does, a weight up to
// `least_weight` does not. Counts of ids are exact.
struct BucketLimit {
    float least_weight, most_weight;
    uint32_t count;
    bool holds;  // units are small enough for the row's sum

    // Of the sums up to and including a bucket: whether all of the bucket is kept. Of the sums
    // before a bucket: whether none of it is.
    bool keeps(uint32_t weight, uint32_t reached) const {
        return reached <= count && static_cast<float>(weight) < least_weight;
    }
    bool ended_by(uint32_t weight, uint32_t reached) const {
        return reached >= count || static_cast<float>(weight) > most_weight;
    }
};

// Shared memory of a block. The lists of its warps follow.
struct alignas(16) Shared {
    Staged staged[LISTS ? WARPS : 1];
    Buckets buckets;
    Bucket groups[GROUPS];
    uint32_t leads[WARP_SIZE];  // keys of the best scores of the group before; 0 of the first, and where no group is before
    uint64_t of_warps[WARPS];
    Front fronts[WARPS];
    Listed listed[WARPS];
    uint32_t listed_of_warps[WARPS];
    Bounds of_block[2];
    BucketLimit limit;
    Decision decision;
    Sample samples[WARPS];  // of each warp its own, all the same
    uint32_t most_of_warps[2][WARPS];  // keys
    float sum_of_warps[2][WARPS];
    uint32_t keys[WARPS], most_of_sample[WARPS], middle;  // of the warps' estimates
    PhiloxKeys philox_keys; // of the row: made anew they are 18 sums for each vector that is listed or raced
    Row row;                // for what comes behind the reading, whose registers have no room for it
    // These serve races of a whole row, for the same reason:
    uint32_t least;         // the key that the best score reaches
    Rank end;               // what races lies in front of it
    Bounds bounds;
};

SHARED_MEMORY(sampler_vector, sizeof(Shared))
SHARED_MEMORY(sampler_scalar, sizeof(Shared))

// The parameters of a row, as the call has them.
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
               // NaN sets no limit.
               asked.top_p < 1.0f ? asked.top_p : 1.0f,
               asked.min_p > 0.0f ? minimum_f32(asked.min_p, 1.0f) : 0.0f,
               static_cast<uint64_t>(asked.step)};
}

// Larger for what comes first; 0 means no id. Bits above those of the key may hold more.
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

// The maximum over the warp, in every lane.
DEVICE uint64_t warp_maximum(uint64_t own) {
    const uint32_t upper = static_cast<uint32_t>(own >> 32), most = __reduce_max_sync(FULL_WARP, upper);
    const uint32_t lower = __reduce_max_sync(FULL_WARP, upper == most ? static_cast<uint32_t>(own) : 0);
    return static_cast<uint64_t>(most) << 32 | lower;
}

// The maximum over the block, in every thread.
DEVICE uint64_t block_maximum(Shared& shared, uint64_t own) {
    own = warp_maximum(own);
    __syncthreads();
    if (lane_anew() == 0) shared.of_warps[warp_anew()] = own;
    __syncthreads();
    return warp_maximum(shared.of_warps[lane_anew() % WARPS]);
}

// A row is read in tiles of LOADS * STEP logits. The first tile is a sample of the row: the row is
// cut into one part for each load of a warp, and a tile has a span of each part. The loads of half
// a tile have every second part, so that either half is a sample as well. The first column of a
// thread's load is column_of + part_of(load) * parts_apart. The columns of a load rise from tile
// to tile.
DEVICE int num_tiles(int vocab_size) { return ceil_div(vocab_size, LOADS * STEP); }
DEVICE int column_of(int vocab_size, int tile) {
    return (warp_id() * num_tiles(vocab_size) + tile) * SPAN + lane_id() * IDS;
}
DEVICE int parts_apart(int vocab_size) { return num_tiles(vocab_size) * STEP; }
DEVICE constexpr int part_of(int load) { return load < HALF ? 2 * load : 2 * (load - HALF) + 1; }

// The logits of a tile, and of half of its loads; -infinity past the row's end.
using Tile = float[LOADS][IDS];
using HalfTile = float[HALF][IDS];
DEVICE HalfTile& half_of(Tile& tile, int half) { return *reinterpret_cast<HalfTile*>(&tile[half * HALF]); }

template <bool WIDE, int COUNT>
DEVICE void load_from(const float* logits, int vocab_size, int first, int first_load, float (&own)[COUNT][IDS]) {
    const int apart = parts_apart(vocab_size);
    if (WIDE && first + part_of(first_load + COUNT - 1) * apart + IDS <= vocab_size) {
        UNROLL
        for (int load = 0; load < COUNT; ++load)
            unpack<float>(load_vec16_streaming(logits + first + part_of(first_load + load) * apart), own[load]);
        return;
    }
    UNROLL
    for (int load = 0; load < COUNT; ++load) {
        const int column = first + part_of(first_load + load) * apart;
        UNROLL
        for (int e = 0; e < IDS; ++e) own[load][e] = -INFINITY_F32;
        if constexpr (WIDE) {
            if (column < vocab_size) unpack<float>(load_vec16_streaming(logits + column), own[load]);
        } else {
            UNROLL
            for (int e = 0; e < IDS; ++e)
                if (column + e < vocab_size) own[load][e] = logits[column + e];
        }
    }
}

template <bool WIDE>
DEVICE void load_tile(const float* logits, int vocab_size, int tile, Tile& own) {
    load_from<WIDE>(logits, vocab_size, column_of(vocab_size, tile), 0, own);
}

// Prefetches a tile to L2 ahead of its loads, while no other load is in flight.
DEVICE void prefetch_tile(const Row& row, int tile) {
    if (lane_id() % 8 != 0) return;
    UNROLL
    for (int load = 0; load < LOADS; ++load) {
        const int column = column_of(row.vocab_size, tile) + part_of(load) * parts_apart(row.vocab_size);
        if (column < row.vocab_size) prefetch_second_level(row.logits + column);
    }
}

// Calls visit(column_of, parts_apart, logits) for each tile of a row; `logits` already holds the
// first tile. All threads of a warp call it together.
template <bool WIDE, typename Visit>
DEVICE void visit_tiles(const Row& row, Tile& logits, Visit visit) {
    const int tiles = num_tiles(row.vocab_size), apart = parts_apart(row.vocab_size);
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile > 0) load_tile<WIDE>(row.logits, row.vocab_size, tile, logits);
        visit(column_of(row.vocab_size, tile), apart, logits);
    }
}

// The same for a row of which no tile is loaded.
template <bool WIDE, typename Visit>
DEVICE void visit_row(const Row& row, Visit visit) {
    Tile logits;
    load_tile<WIDE>(row.logits, row.vocab_size, 0, logits);
    visit_tiles<WIDE>(row, logits, visit);
}

DEVICE float largest_of(const float (&logits)[IDS]) {
    return maximum_f32(maximum_f32(logits[0], logits[1]), maximum_f32(logits[2], logits[3]));
}

// ---------------------------------------------------------------- the race

DEVICE PhiloxWords words_of(const Shared& shared, const Row& row, int id) {
    return philox(static_cast<uint32_t>(id) / IDS, static_cast<uint32_t>(row.step),
                  static_cast<uint32_t>(row.step >> 32), 0, shared.philox_keys);
}

DEVICE float uniform(uint32_t word) { return fused_multiply_add(static_cast<float>(word), 0x1p-32f, 0x1p-33f); }

// An infinite logit counts as 0 here: its place already puts it first.
DEVICE float score_of(const Row& row, float logit, float power) {
    return fused_multiply_add(logit == INFINITY_F32 ? 0.0f : logit, row.factor, -power);
}

// Place of an id in the race. Infinite logits come first.
DEVICE uint64_t place_in_race(uint32_t score_key, float logit, int id) {
    return place_of(score_key, id) | static_cast<uint64_t>(logit == INFINITY_F32) << (32 + ID_BITS);
}
DEVICE uint64_t race(const Row& row, float logit, int id, uint32_t word) {
    return place_in_race(key_of(score_of(row, logit, log2f(-log1pf(-uniform(word))))), logit, id);
}

// The word or the logit of one of a thread's ids, by selects: indexed registers go to local
// memory.
template <typename T>
DEVICE T one_of(const T (&values)[IDS], int at) {
    const T low = at & 1 ? values[1] : values[0], high = at & 1 ? values[3] : values[2];
    return at & 2 ? high : low;
}

// log2(g) within 2^-13. Below 2^-6 it uses three terms of the series, whose remainder is v^3 / 4
// of it. Above, log2(1 - v) has an error of 2^-22, of a value of at least 2^-6.
DEVICE float approximate_power(float v) {
    const float series = v * fused_multiply_add(v, fused_multiply_add(v, 1.0f / 3.0f, 0.5f), 1.0f);
    return log2_approx(v < 0x1p-6f ? series : -LN_2 * log2_approx(1.0f - v));
}

// An upper bound of the score, since g >= v; log2(v) has an error of 2^-22. It is rounded as the
// score is.
DEVICE float most_score_of(const Row& row, float logit, uint32_t word) {
    return fused_multiply_add(logit, row.factor, -(log2_normal_approx(uniform(word)) - 0x1p-18f));
}

// What a thread has seen of a race. One id waits; its exact score is computed only where the
// bounds do not decide.
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

// The winner of all threads is the maximum of what each thread gets here.
DEVICE uint64_t winner(Shared& shared, const Row& row, Contest& contest) {
    const float lower = score_of_key(static_cast<uint32_t>(block_maximum(shared, key_of(contest.lower))));
    if (!(contest.upper < lower)) contest.decide(row);
    return contest.best;
}

// Which of a thread's ids before `end` may reach the score `least`.
DEVICE uint32_t in_front_of(const Row& row, const Rank& end, const float (&logits)[IDS], int column,
                            const PhiloxWords& words, float least) {
    uint32_t in_front = 0;
    UNROLL
    for (int e = 0; e < IDS; ++e) {
        const float most = most_score_of(row, logits[e], words.w[e]);
        in_front |= static_cast<uint32_t>(end.is_behind(logits[e], column + e) && !(most < least)) << e;
    }
    return in_front;
}

// Whether one of a thread's ids may reach `least`: the largest logit with the least word bounds
// all of them. Logits of -infinity and NaN may as well, where no id is found yet.
DEVICE bool may_lead(const Row& row, const float (&logits)[IDS], const PhiloxWords& words, float least) {
    const uint32_t word = minimum(minimum(words.w[0], words.w[1]), minimum(words.w[2], words.w[3]));
    return !(most_score_of(row, largest_of(logits), word) < least);
}

// The winner among the ids of a row before shared.end, which the first thread has set. Warps
// exchange their best lower bounds once a tile.
template <bool WIDE>
DEVICE uint64_t race_of_all(Shared& shared, const Row& row, Tile& first) {
    Contest contest;
    uint32_t least_key = key_of(-INFINITY_F32);
    if (threadIdx.x == 0) shared.least = least_key;
    __syncthreads();
    visit_tiles<WIDE>(row, first, [&](int own, int apart, const Tile& logits) {
        if (lane_id() == 0) least_key = maximum(least_key, atomicMax(&shared.least, least_key));
        least_key = __shfl_sync(FULL_WARP, least_key, 0);
        float least = score_of_key(least_key);
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            const int column = own + part_of(load) * apart;
            const PhiloxWords words = words_of(shared, row, column);
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
DEVICE uint64_t first_of_all(Shared& shared, const Row& row, Tile& first) {
    // The best of each load. Its columns rise, so the first of equals stays.
    uint32_t best[LOADS];
    int id[LOADS];
    UNROLL
    for (int load = 0; load < LOADS; ++load) {
        best[load] = key_of(-INFINITY_F32);
        id[load] = -1;
    }
    visit_tiles<WIDE>(row, first, [&](int own, int apart, const Tile& logits) {
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            UNROLL
            for (int e = 0; e < IDS; ++e) {
                const uint32_t key = key_of(logits[load][e]);
                if (key > best[load]) {
                    best[load] = key;
                    id[load] = own + part_of(load) * apart + e;
                }
            }
        }
    });
    uint64_t place = 0;
    UNROLL
    for (int load = 0; load < LOADS; ++load)
        if (id[load] >= 0) place = maximum(place, place_of(best[load], id[load]));
    return block_maximum(shared, place);
}

// ---------------------------------------------------------------- what is kept

// What a warp has found: vectors that wait for a closer look, and the ids whose logits reach
// `least`, as far as there is room, with the keys of their scores.
struct Listing {
    SharedAddress staged;           // in 32 bits, of which no store computes more than a sum
    uint32_t* own;                  // `room` times a logit, its id, and the key of its score: one address for all three
    float least;
    int room, num_staged, count;

    int listed() const { return minimum(count, room); }
    float& logit(int at) const { return reinterpret_cast<float*>(own)[3 * at]; }
    uint32_t& id(int at) const { return own[3 * at + 1]; }
    uint32_t& score(int at) const { return own[3 * at + 2]; }
};

DEVICE Listing listing_of(Shared& shared, const SamplerParams& params, float least) {
    const int room = params.segment;
    uint32_t* const own = reinterpret_cast<uint32_t*>(dynamic_shared() + sizeof(Shared)) + 3 * room * warp_id();
    return Listing{shared_address(&shared.staged[warp_id()]), own, least, room, 0, 0};
}

// The rank-th largest key of a warp without its last bits, in every lane. The larger ones are
// removed one by one.
DEVICE uint32_t ranked_key(uint32_t key, int rank) {
    constexpr uint32_t LAST_BITS = WARP_SIZE - 1;
    // No two are equal.
    uint32_t own = (key & ~LAST_BITS) | static_cast<uint32_t>(lane_id());
    uint32_t largest = __reduce_max_sync(FULL_WARP, own);
    UNROLL_BY(1)
    for (int left = uniform(rank); left > 1; --left) {
        if (own == largest) own = 0;
        largest = __reduce_max_sync(FULL_WARP, own);
    }
    return largest & ~LAST_BITS;
}

// The share of a row's ids to list, as a rank among a warp's lanes by the largest logit that each
// lane has sampled.
DEVICE float rank_to_reach(const SamplerParams& params) {
    // A thread finds at least one id of this share among `sampled` ids with probability 1 - (1 -
    // share)^sampled.
    const auto size = static_cast<float>(params.vocab_size);
    const float sampled = HALF * IDS * minimum_f32(size / static_cast<float>(LOADS * STEP), 1.0f);
    const float aim = static_cast<float>(params.segment * WARPS) / 2.0f;
    const float missed = exp2_approx(log2_approx(maximum_f32(1.0f - aim / size, 0.0f)) * sampled);
    return WARP_SIZE * (1.0f - missed);
}

// Estimates from half of the first tile. It also clears the buckets.
DEVICE Sample sample_of(Shared& shared, const SamplerParams& params, const Row& row, const Tile& tile) {
    for (int bucket = static_cast<int>(threadIdx.x); bucket < BUCKETS; bucket += THREADS) {
        shared.buckets.leaders[bucket] = 0;
        shared.buckets.weights[bucket] = shared.buckets.counts[bucket] = shared.buckets.keys[bucket] = 0;
        if (bucket < WARP_SIZE) shared.leads[bucket] = 0;
    }
    float most = -INFINITY_F32;
    UNROLL
    for (int load = 0; load < HALF; ++load) most = maximum_f32(most, largest_of(tile[load]));
    // The median of the warps' own estimates. The mean of their ranks is the rank whose median
    // that many ids reach.
    const float share = (static_cast<float>(warp_id()) + 0.5f) / WARPS;
    const int rank = minimum(maximum(static_cast<int>(rank_to_reach(params) + 0.3f + share), 1), 32);
    const uint32_t key = key_of(most), own = ranked_key(key, rank), most_of_warp = __reduce_max_sync(FULL_WARP, key);
    if (lane_id() == 0) {
        shared.keys[warp_id()] = own;
        shared.most_of_sample[warp_id()] = most_of_warp;
    }
    __syncthreads();
    // Each warp counts the estimates before its own. If one warp searched for the median, all
    // others would wait for it.
    const uint32_t other = lane_id() < WARPS ? shared.keys[lane_id()] : 0;
    const bool in_front = other > own || (other == own && lane_id() < warp_id());
    if (__popc(__ballot_sync(FULL_WARP, in_front)) == WARPS / 2 - 1 && lane_id() == 0) shared.middle = own;
    // Keys below that of -infinity are those of NaN.
    const uint32_t none = key_of(-LARGEST);
    most = score_of_key(maximum(__reduce_max_sync(FULL_WARP, shared.most_of_sample[lane_id() % WARPS]), none));
    __syncthreads();
    // A row that fits is listed whole: a warp finds this many ids with each of its loads.
    const bool whole = params.vocab_size <= params.segment / static_cast<int>(WARP_SIZE * IDS) * STEP;
    const float least = whole ? -LARGEST : score_of_key(maximum(shared.middle, none));
    // Weights below 2^-32 of the sample's largest share the last bucket. The row's own largest may
    // exceed the sample's.
    const float lowest = maximum_f32(least, most - 32.0f / row.factor);
    return Sample{most, least, lowest, BUCKETS / 1.5f / (most - lowest)};
}

// Whether no id below `least` is kept, whatever precedes it. The result is not used for rows with
// an infinite logit.
DEVICE bool lists_all_kept(const Row& row, const Bounds& bounds, float least) {
    // Weights of at most this, added up, are no more than top_p leaves out. One octave of margin
    // covers all rounding.
    const float left_out = (1.0f - row.top_p) * bounds.sum / static_cast<float>(row.vocab_size);
    const float light = maximum_f32(left_out, row.min_p);
    const float certain = light > 0.0f ? bounds.most + (log2_approx(light) - 1.0f) / row.factor : -LARGEST;
    return least <= maximum_f32(certain, -LARGEST);
}

// Stages the vectors of a warp's threads that hold ids to list.
DEVICE void stage(Listing& listing, const float (&logits)[IDS], int column, bool wanted) {
    const uint32_t lanes = __ballot_sync(FULL_WARP, wanted);
    const int at = listing.num_staged + lanes_before(lanes);
    if (wanted) {
        store_shared_vec16(listing.staged + at * sizeof(Vec16), pack<float>(logits));
        store_shared(listing.staged + sizeof(Staged::vectors) + at * sizeof(int32_t), static_cast<uint32_t>(column));
    }
    listing.num_staged += __popc(lanes);
}

// A weight in units of buckets, rounded to nearest.
DEVICE uint32_t units_of(const Row& row, float logit, float most) {
    const float weight = minimum_f32(finite_weight_of(row, logit, most), LARGEST_BUCKET_SUM / BUCKET_UNITS);
    return static_cast<uint32_t>(fused_multiply_add(weight, BUCKET_UNITS, 0.5f));
}

// Of each lane's group of buckets: the key of the best score in the groups before it, as far as
// the block knows.
DEVICE uint32_t lead_in_front_of(Shared& shared, int group) {
    // An atomic read, because other warps change the value.
    uint32_t lead = atomicMax(&shared.leads[lane_id()], 0u);
    UNROLL
    for (int distance = 1; distance < GROUPS; distance *= 2)
        lead = maximum(lead, __shfl_up_sync(FULL_WARP, lead, static_cast<unsigned>(distance)));
    return __shfl_sync(FULL_WARP, lead, group);
}

// Enters an id in the race of its bucket and returns the key of its score.
DEVICE uint32_t race_in_bucket(Shared& shared, const Row& row, uint32_t bucket, float logit, int id, uint32_t word) {
    const uint64_t place = race(row, logit, id, word);
    const uint32_t key = key_of_place(place);
    atomicMax(&shared.leads[bucket / WARP_SIZE + 1], key);
    // A 64-bit atomic maximum is a loop; the test on keys keeps most threads out of it.
    if (atomicMax(&shared.buckets.keys[bucket], key) <= key) atomicMax(&shared.buckets.leaders[bucket], place);
    return key;
}

// The last id to list of a lane's vector, if one exists, and whether more exist.
struct Wanted {
    bool any = false, others = false;
    int at = 0;

    Wanted(const float (&logits)[IDS], float least) {
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            const bool reached = logits[e] >= least;
            others = others || (any && reached);
            any = any || reached;
            at = reached ? e : at;
        }
    }
};

// Lists an id of each lane's vector, where one is wanted, at position `to` of the warp's list,
// with its score, and adds it to its bucket. An id after one with a larger score never leads,
// since the earlier id is kept where this one is. Such ids need no exact score and get the lowest
// key.
DEVICE void list_one(Shared& shared, const Row& row, Listing& listing, const Wanted& wanted, float logit, int id, uint32_t word,
                     int to) {
    const Sample& sample = shared.samples[warp_anew()];
    const uint32_t bucket = sample.bucket_of(logit);
    const uint32_t in_front = lead_in_front_of(shared, static_cast<int>(bucket / WARP_SIZE));
    if (!wanted.any || to >= listing.room) return;
    uint32_t key = 0;
    if (key_of(most_score_of(row, logit, word)) >= in_front) key = race_in_bucket(shared, row, bucket, logit, id, word);
    listing.logit(to) = logit;
    listing.id(to) = static_cast<uint32_t>(id);
    listing.score(to) = key;
    atomicAdd(&shared.buckets.weights[bucket], units_of(row, logit, sample.most));
    atomicAdd(&shared.buckets.counts[bucket], 1u);
}

// Lists one id of each vector of a round of staged vectors. Where a round needs `least` vectors,
// vectors with more ids are staged again without the listed one. At the end (`least` is 1) the
// other ids follow at once, because a round of them would be nearly empty.
DEVICE void list_staged(Shared& shared, const Row& row, Listing& listing, int least) {
    __syncwarp();
    const int first = maximum(listing.num_staged - static_cast<int>(WARP_SIZE), 0), from = first + lane_id();
    float logits[IDS];
    UNROLL
    for (int e = 0; e < IDS; ++e) logits[e] = -INFINITY_F32;
    int column = 0;
    if (from < listing.num_staged) {
        unpack<float>(shared.staged[warp_id()].vectors[from], logits);
        column = shared.staged[warp_id()].columns[from];
    }
    // The next staged vectors overwrite these.
    __syncwarp();
    int to = listing.count + lane_id();
    listing.count += listing.num_staged - first;
    listing.num_staged = first;
    const PhiloxWords words = words_of(shared, row, column);
    UNROLL_BY(1)
    while (true) {
        const Wanted wanted(logits, listing.least);
        list_one(shared, row, listing, wanted, one_of(logits, wanted.at), column + wanted.at, one_of(words.w, wanted.at), to);
        const uint32_t lanes = __ballot_sync(FULL_WARP, wanted.others);
        if (lanes == 0) return;
        UNROLL
        for (int e = 0; e < IDS; ++e)
            if (e == wanted.at) logits[e] = -INFINITY_F32;
        if (least > 1) {
            stage(listing, logits, column, wanted.others);
            return;
        }
        to = listing.count + lanes_before(lanes);
        listing.count += __popc(lanes);
    }
}

// Lists what is staged while at least `least` vectors wait: full warps while loads are in flight,
// the rest at the end.
DEVICE void list_all_staged(Shared& shared, const Row& row, Listing& listing, int least) {
    while (listing.num_staged >= least) list_staged(shared, row, listing, least);
}

DEVICE Leader leader_of_warp(const Leader& own) {
    Leader leader{warp_maximum(own.place)};
    const uint32_t lanes = __ballot_sync(FULL_WARP, own.place == leader.place);
    leader.logit = __shfl_sync(FULL_WARP, own.logit, __ffs(static_cast<int>(lanes)) - 1);
    return leader;
}

// Groups of buckets: each warp sums its own.
DEVICE void add_up_buckets(Shared& shared, int warp) {
    Buckets& buckets = shared.buckets;
    for (int group = warp; group < GROUPS; group += WARPS) {
        const int bucket = group * WARP_SIZE + lane_anew();
        const uint32_t weight = inclusive_sum(buckets.weights[bucket]), count = inclusive_sum(buckets.counts[bucket]);
        const uint64_t leader = warp_maximum(buckets.leaders[bucket]);
        buckets.reached_weights[bucket] = weight;
        buckets.reached_counts[bucket] = count;
        if (lane_anew() == WARP_SIZE - 1) shared.groups[group] = Bucket{weight, count, leader};
    }
}

// The leader of the buckets that are kept whole, and of those that may be kept in part.
struct BucketLeaders {
    uint64_t kept = 0, asked = 0;
};

// One bucket a lane. Returns the lanes whose bucket may be kept in part; updates the leader of the
// buckets that are kept whole.
DEVICE uint32_t add_kept(const BucketLimit& limit, const Bucket& own, const Bucket& reached, BucketLeaders& leaders) {
    const bool kept = limit.keeps(reached.weight, reached.count);
    if (kept) leaders.kept = maximum(leaders.kept, own.leader);
    const bool ended = limit.ended_by(reached.weight - own.weight, reached.count - own.count);
    return __ballot_sync(FULL_WARP, !kept && !ended && own.count > 0);
}

// By the first warp: of the groups, and of the buckets of the groups in which the order ends.
DEVICE BucketLeaders leaders_of_buckets(const Shared& shared, const Bucket& group, const Bucket& reached,
                                        const BucketLimit& limit) {
    const Buckets& buckets = shared.buckets;
    BucketLeaders leaders;
    UNROLL_BY(1)
    for (uint32_t ends = add_kept(limit, group, reached, leaders); ends; ends &= ends - 1) {
        const int at = __ffs(static_cast<int>(ends)) - 1, bucket = at * WARP_SIZE + lane_anew();
        const Bucket own{buckets.weights[bucket], buckets.counts[bucket], buckets.leaders[bucket]};
        const uint32_t weight = __shfl_sync(FULL_WARP, reached.weight - group.weight, at);
        const uint32_t count = __shfl_sync(FULL_WARP, reached.count - group.count, at);
        const Bucket up_to{weight + buckets.reached_weights[bucket], count + buckets.reached_counts[bucket], own.leader};
        const uint32_t lanes = add_kept(limit, own, up_to, leaders);
        if (lanes >> lane_anew() & 1) leaders.asked = maximum(leaders.asked, own.leader);
    }
    return BucketLeaders{warp_maximum(leaders.kept), warp_maximum(leaders.asked)};
}

// Whether min_p excludes an id, where the largest logit is finite.
DEVICE bool is_too_light(const Row& row, float logit, float most) { return finite_weight_of(row, logit, most) < row.min_p; }

// What ends a row's order, of which `count` ids are listed. A weight has an error of half a unit
// of buckets, an fp32 sum a relative error below 2^-18.
DEVICE BucketLimit bucket_limit_of(const Row& row, const Sample& sample, const Bounds& bounds, uint32_t count) {
    constexpr float MARGIN = 0x1p-16f;
    const float sum = bounds.sum * exp2_approx((bounds.most - sample.most) * row.factor) * BUCKET_UNITS;
    const float wanted = row.top_p * sum, margin = fused_multiply_add(static_cast<float>(count), 0.5f, MARGIN * wanted);
    const bool has_limit = row.top_p < 1.0f;
    return BucketLimit{has_limit ? wanted - margin : INFINITY_F32,
                       has_limit ? wanted + margin : INFINITY_F32,
                       row.top_k,
                       sum < LARGEST_BUCKET_SUM};
}

// By the first warp: the winner, or the id that leads all kept ids and must be checked.
DEVICE Decision decision_of_buckets(const Shared& shared, const Row& row, const Bounds& bounds) {
    const BucketLimit limit = shared.limit;
    const Bucket group = lane_anew() < GROUPS ? shared.groups[lane_anew()] : Bucket{};
    const Bucket reached{inclusive_sum(group.weight), inclusive_sum(group.count), group.leader};
    // Either the list reaches the end of the order, or no id outside the list is kept. Few rows
    // need the second test.
    const bool ended = __shfl_sync(FULL_WARP, limit.ended_by(reached.weight, reached.count), WARP_SIZE - 1);
    const bool known = limit.holds && (ended || lists_all_kept(row, bounds, shared.samples[warp_anew()].least));
    const BucketLeaders leaders = known ? leaders_of_buckets(shared, group, reached, limit)
                                        : BucketLeaders{0, warp_maximum(group.leader)};
    Leader leader{maximum(leaders.kept, leaders.asked)};
    if (leaders.kept > leaders.asked && !(row.min_p > 0.0f)) return {Verdict::KEPT, leader};
    if (leader.place) leader.logit = row.logits[id_of(leader.place)];
    const bool wins = leaders.kept > leaders.asked && !is_too_light(row, leader.logit, bounds.most);
    return {wins ? Verdict::KEPT : Verdict::ASK, leader};
}

// By one warp, from the results of all warps.
DEVICE void add_up_warps(Shared& shared, int turn, const Row& row, bool cut_off) {
    const int lane = lane_anew(), warp = lane % WARPS;
    const uint32_t key_of_warp = shared.most_of_warps[turn][warp];
    const uint32_t listed = ::sum_of_lanes(lane < WARPS ? shared.listed_of_warps[warp] : 0);
    const float most = score_of_key(__reduce_max_sync(FULL_WARP, key_of_warp));
    const float of_warp = shared.sum_of_warps[turn][warp] * weight_of(row, score_of_key(key_of_warp), most);
    const Bounds bounds{most, warp_sum(lane < WARPS ? of_warp : 0.0f), cut_off};
    const BucketLimit limit = bucket_limit_of(row, shared.samples[warp_anew()], bounds, listed);
    if (lane != 0) return;
    shared.of_block[turn] = bounds;
    shared.limit = limit;
}

// The bounds of a block from those of its threads, and the decision of its buckets. `turn` differs
// from that of the previous call.
DEVICE Bounds block_bounds(Shared& shared, int turn, const Row& row, const Listing& listing, float own, float sum) {
    const uint32_t key = __reduce_max_sync(FULL_WARP, key_of(own));
    sum = warp_sum(sum * weight_of(row, own, score_of_key(key)));
    if (lane_anew() == 0) {
        shared.most_of_warps[turn][warp_anew()] = key;
        shared.sum_of_warps[turn][warp_anew()] = sum;
        shared.listed_of_warps[warp_anew()] = static_cast<uint32_t>(listing.listed());
    }
    const bool cut_off = __syncthreads_or(listing.count > listing.room) != 0;
    // The last warp has the fewest groups, or none, so it sums the warps' results.
    const int warp = uniform(warp_anew());
    if (warp == WARPS - 1) add_up_warps(shared, turn, shared.row, cut_off);
    add_up_buckets(shared, warp);
    __syncthreads();
    // Only one warp does this: the others would take its issue slots.
    if (warp == 0) {
        const Decision decision = decision_of_buckets(shared, shared.row, shared.of_block[turn]);
        if (lane_anew() == 0) shared.decision = decision;
    }
    __syncthreads();
    return shared.of_block[turn];
}

// Adds the weights of half a tile to a thread's sum, relative to the thread's largest logit.
template <bool CAREFUL>
DEVICE void add_weights(const Row& row, HalfTile& logits, float& most, float& offset, float& sum) {
    static_assert(HALF == 2);
    if constexpr (CAREFUL) {
        UNROLL
        for (int load = 0; load < HALF; ++load)
            for (float& logit : logits[load]) logit = maximum_f32(logit, -INFINITY_F32);
    }
    const float top = maximum_f32(largest_of(logits[0]), largest_of(logits[1]));
    if (top > most) {
        const float raised = CAREFUL ? 0.0f : __fmul_rn(top, row.factor);
        sum *= CAREFUL ? weight_of(row, most, top) : exp2_approx(offset - raised);
        most = top;
        offset = raised;
    }
    UNROLL
    for (int load = 0; load < HALF; ++load) {
        float weights[IDS];
        UNROLL
        for (int e = 0; e < IDS; ++e)
            weights[e] = CAREFUL ? weight_of(row, logits[load][e], most)
                                 : exp2_approx(fused_multiply_add(logits[load][e], row.factor, -offset));
        sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
    }
}

// Stages the vectors to list of half a tile, whose first column is `first`.
DEVICE void stage_half(const Row& row, Listing& listing, int first, int half, const HalfTile& logits) {
    const int apart = parts_apart(row.vocab_size);
    UNROLL
    for (int load = 0; load < HALF; ++load)
        stage(listing, logits[load], first + part_of(half * HALF + load) * apart, largest_of(logits[load]) >= listing.least);
}

// Reads a row once. CAREFUL counts NaN as -infinity and gives infinity a weight of 1, and lists no
// id. Without it the sum of a row with NaN or infinity is NaN, and ids of at least `least`, which
// is above -infinity, are listed.
template <bool WIDE, bool CAREFUL>
DEVICE Bounds bounds_of(Shared& shared, Listing& listing, const Row& row, Tile& logits) {
    float most = -LARGEST, sum = 0.0f;
    float offset = -LARGEST;  // the power of the largest, rounded
    const int tiles = num_tiles(row.vocab_size);
    // One more iteration lists the rest: its code has run before, and code that runs for the first
    // time waits for memory.
    int column = column_of(row.vocab_size, 0);  // the first of the tile
    for (int tile = 0;; ++tile) {
        const bool last = tile == tiles;
        UNROLL
        for (int half = 0; half < 2; ++half) {
            if (!last) {
                HalfTile& own = half_of(logits, half);
                add_weights<CAREFUL>(row, own, most, offset, sum);
                if constexpr (!CAREFUL) stage_half(row, listing, column, half, own);
                // The other half is in flight. This half's next loads start before the staged
                // vectors are listed.
                if (tile + 1 < tiles) load_from<WIDE>(row.logits, row.vocab_size, column + SPAN, half * HALF, own);
            }
            if constexpr (!CAREFUL) list_all_staged(shared, row, listing, last ? 1 : WARP_SIZE);
        }
        if (last) break;
        column += SPAN;
    }
    __syncwarp();
    // Corrects the sum for the rounding of the power.
    if constexpr (!CAREFUL) sum *= most > -LARGEST ? exp2_approx(fused_multiply_add(-most, row.factor, offset)) : 1.0f;
    return block_bounds(shared, CAREFUL, row, listing, most, sum);
}

// A weight as an integer: its sums do not depend on the order.
DEVICE uint64_t share_of(const Row& row, float logit, float most) {
    return static_cast<uint64_t>(weight_of(row, logit, most) * UNITS);
}

DEVICE uint64_t wanted_share(const Row& row, const Bounds& bounds) {
    if (!(row.top_p < 1.0f)) return NO_SHARE;
    // Exact: both factors have 24 bits. A share of 0 would keep no token.
    const double share = static_cast<double>(row.top_p) * static_cast<double>(bounds.sum) * static_cast<double>(UNITS);
    return maximum<uint64_t>(static_cast<uint64_t>(ceil(share)), 1);
}

// What ends the order: a count of ids, or a share of the weights.
struct Limit {
    uint32_t wanted_count;
    uint64_t wanted_share;

    bool reached(const Front& front) const { return front.count >= wanted_count || front.share >= wanted_share; }
};

// The sum over all lanes of a number below 2^58, in every lane.
DEVICE uint64_t sum_of_lanes(uint64_t value) {
    constexpr int BITS = 26;  // and 5 more of the sum
    constexpr uint32_t LIMB = (1u << BITS) - 1;
    const uint64_t low = ::sum_of_lanes(static_cast<uint32_t>(value) & LIMB);
    const uint64_t middle = ::sum_of_lanes(static_cast<uint32_t>(value >> BITS) & LIMB);
    const uint64_t high = ::sum_of_lanes(static_cast<uint32_t>(value >> 2 * BITS));
    return low + (middle << BITS) + (high << 2 * BITS);
}

DEVICE Front front_of_warp(const Front& own) { return Front{sum_of_lanes(own.share), ::sum_of_lanes(own.count)}; }

// The block's, in every thread. A barrier is needed between two calls.
DEVICE Front block_front(Shared& shared, const Front& own) {
    const Front front = front_of_warp(own);
    if (lane_anew() == 0) shared.fronts[warp_anew()] = front;
    __syncthreads();
    return front_of_warp(lane_anew() < WARPS ? shared.fronts[lane_anew()] : Front{});
}

// What of a row precedes `end`, without a race.
template <bool WIDE>
DEVICE Front front_of_row(Shared& shared, const Row& row, const Bounds& bounds, const Rank& end) {
    Front front;
    visit_row<WIDE>(row, [&](int own, int apart, const Tile& logits) {
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            UNROLL
            for (int e = 0; e < IDS; ++e) {
                if (!end.is_behind(logits[load][e], own + part_of(load) * apart + e)) continue;
                ++front.count;
                if (row.top_p < 1.0f) front.share += share_of(row, logits[load][e], bounds.most);
            }
        }
    });
    return block_front(shared, front);
}

// Whether an id is kept, from what precedes it.
DEVICE bool is_kept(const Row& row, const Bounds& bounds, const Limit& limit, const Front& front, float logit) {
    return !limit.reached(front) && !(weight_of(row, logit, bounds.most) < row.min_p);
}

// What a warp has listed, and the part that precedes `end`. A lane reads ROUNDS ids at once.
DEVICE Listed listed_by_warp(const Listing& listing, const Row& row, float most, const Rank& end) {
    constexpr int ROUNDS = 4;
    const int count = listing.listed();
    Listed own;
    for (int first = lane_id(); first < count; first += ROUNDS * WARP_SIZE) {
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            const int at = minimum(first + round * static_cast<int>(WARP_SIZE), count - 1);
            const float logit = listing.logit(at);
            const int id = static_cast<int>(listing.id(at));
            const uint64_t place = place_of(listing.score(at), id);
            const bool exists = first + round * static_cast<int>(WARP_SIZE) < count;
            const bool in_front = exists && end.is_behind(logit, id);
            const float weight = finite_weight_of(row, logit, most);
            own.weight += exists ? weight : 0.0f;
            own.weight_in_front += in_front ? weight : 0.0f;
            own.count_in_front += in_front;
            if (in_front && place > own.leader.place) own.leader = Leader{place, logit};
        }
    }
    own.count = static_cast<uint32_t>(count);
    own.count_in_front = ::sum_of_lanes(own.count_in_front);
    own.weight = warp_sum(own.weight);
    own.weight_in_front = warp_sum(own.weight_in_front);
    own.leader = leader_of_warp(own.leader);
    return own;
}

// By the first warp, from all warps' lists: whether `leader` is kept. The relative error of fp32
// sums is below 2^-19 here: a lane, a warp and a block add fewer than 2^5 numbers each in
// sequence.
DEVICE Decision decision_of(const Row& row, const Bounds& bounds, float least, const Leader& leader, const Listed& of_lane) {
    constexpr float MARGIN = 0x1p-16f;
    const float weight = warp_sum(of_lane.weight), in_front = warp_sum(of_lane.weight_in_front);
    const uint32_t count = ::sum_of_lanes(of_lane.count), count_in_front = ::sum_of_lanes(of_lane.count_in_front);
    const Leader next = leader_of_warp(of_lane.leader);
    const float wanted = row.top_p < 1.0f ? row.top_p * bounds.sum : INFINITY_F32;
    // Either the list reaches the end of the order, or no id outside the list is kept.
    const bool reached = count >= row.top_k || weight > wanted + MARGIN * wanted;
    if (!reached && !lists_all_kept(row, bounds, least)) return {Verdict::UNDECIDED, {}};
    if (leader.place == 0) return {Verdict::KEPT, {}};
    if (count_in_front >= row.top_k || is_too_light(row, leader.logit, bounds.most)) return {Verdict::ASK, next};
    if (wanted == INFINITY_F32 || in_front < wanted - MARGIN * wanted) return {Verdict::KEPT, leader};
    return {in_front > wanted + MARGIN * wanted ? Verdict::ASK : Verdict::UNDECIDED, next};
}

// The winner of a row from its list; false where the list does not decide. Where the buckets do
// not decide, the leader of the ids that may be kept is checked. If it is kept, it wins. If not,
// no id after it is kept, and the ids before it race.
DEVICE bool race_of_listed(Shared& shared, const Listing& listing, const Bounds& bounds, uint64_t& best) {
    if (bounds.most == INFINITY_F32) return false;
    Decision decision = shared.decision;
    const Row row = shared.row;
    UNROLL_BY(1)
    while (true) {
        const Leader leader = decision.leader;
        best = leader.place;
        if (decision.verdict != Verdict::ASK) return decision.verdict == Verdict::KEPT;
        const Listed own = listed_by_warp(listing, row, bounds.most, Rank{leader.logit, id_of(leader.place)});
        if (lane_anew() == 0) shared.listed[warp_anew()] = own;
        __syncthreads();
        // Only one warp does this: the others would take its issue slots.
        if (uniform(warp_anew()) == 0) {
            const Listed of_lane = lane_anew() < WARPS ? shared.listed[lane_anew()] : Listed{};
            decision = decision_of(row, bounds, listing.least, leader, of_lane);
            if (lane_anew() == 0) shared.decision = decision;
        }
        __syncthreads();
        decision = shared.decision;
    }
}

// The winner by the same rule, where the row is read for each race.
template <bool WIDE>
DEVICE uint64_t race_of_row(Shared& shared, const Row& row, const Bounds& bounds, Tile& first) {
    if (threadIdx.x == 0) {
        shared.end = END;
        shared.bounds = bounds;
    }
    while (true) {
        const uint64_t best = race_of_all<WIDE>(shared, row, first);
        const Row row = shared.row;
        if (best == 0 || !row.has_filters()) return best;
        const Bounds bounds = shared.bounds;
        const Rank end{row.logits[id_of(best)], id_of(best)};
        const Front front = front_of_row<WIDE>(shared, row, bounds, end);
        if (is_kept(row, bounds, Limit{row.top_k, wanted_share(row, bounds)}, front, end.logit)) return best;
        if (threadIdx.x == 0) shared.end = end;
        load_tile<WIDE>(row.logits, row.vocab_size, 0, first);
    }
}

// Reads a row, of which `first` is the first tile, and lists the ids that may be kept. Returns
// whether the list decides.
template <bool WIDE>
DEVICE bool race_of_first_reading(const SamplerParams& params, Shared& shared, const Row& row, Tile& first, Bounds& bounds,
                                  uint64_t& best) {
    // Without the prefetch no load is in flight until the threshold for the list is known.
    if constexpr (WIDE) prefetch_tile(row, 1);
    const Sample sample = sample_of(shared, params, row, first);
    if (lane_id() == 0) shared.samples[warp_id()] = sample;
    __syncwarp();
    Listing listing = listing_of(shared, params, sample.least);
    bounds = bounds_of<WIDE, false>(shared, listing, row, first);
    if (is_nan(bounds.sum)) {
        load_tile<WIDE>(row.logits, row.vocab_size, 0, first);
        const Bounds careful = bounds_of<WIDE, true>(shared, listing, row, first);
        bounds = Bounds{careful.most, careful.sum, bounds.cut_off};
    }
    return !bounds.cut_off && race_of_listed(shared, listing, bounds, best);
}

template <bool WIDE>
DEVICE uint64_t best_of(const SamplerParams& params, Shared& shared, const Row& row, Tile& first) {
    if (!(row.temperature > 0.0f)) return first_of_all<WIDE>(shared, row, first);
    Bounds bounds{};
    if constexpr (!LISTS) return race_of_row<WIDE>(shared, row, bounds, first);
    // A list holds no more ids than there is room for.
    const bool may_suffice =
        row.top_k <= static_cast<uint32_t>(params.segment * WARPS) || row.top_p < 1.0f || row.min_p > 0.0f;
    if (row.has_filters() && may_suffice) {
        uint64_t best = 0;
        if (race_of_first_reading<WIDE>(params, shared, row, first, bounds, best)) return best;
        load_tile<WIDE>(row.logits, row.vocab_size, 0, first);
    }
    return race_of_row<WIDE>(shared, row, bounds, first);
}

template <bool WIDE>
DEVICE void sample(const SamplerParams& params) {
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
    const float* const logits = params.logits + blockIdx.x * params.logits_row_stride;
    // In flight while the row's parameters are read.
    Tile first;
    load_tile<WIDE>(logits, params.vocab_size, 0, first);
    const Asked asked = asked_of(params);
    const Row row = row_of(logits, params.vocab_size, asked);
    if (threadIdx.x == 0) shared.row = row;
    if (threadIdx.x < 2 * PHILOX_ROUNDS) {
        const uint32_t round = threadIdx.x / 2, half = threadIdx.x % 2;
        shared.philox_keys.of_rounds[round][half] = philox_key(static_cast<uint64_t>(asked.seed), round, half);
    }
    const uint64_t best = best_of<WIDE>(params, shared, row, first);
    if (threadIdx.x == 0) params.tokens[blockIdx.x] = best ? id_of(best) : -1;
}

KERNEL(sampler_vector, SamplerParams, THREADS) { sample<true>(params); }
KERNEL(sampler_scalar, SamplerParams, THREADS) { sample<false>(params); }
