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
// A block takes a row. Without filters it reads the row once: g >= v, so that logit c - log2(v) is above an id's
// score, and both exact logarithms are taken only where that is above the best score of the warp so far. With filters
// it reads the row once for its largest logit and the sum of its weights, and keeps the upper halves of ordered keys
// in shared memory, 2 bytes a logit. From both follows a logit below which nothing can be kept: weights of at
// most (1 - top_p) sum / vocab_size add up to no more than what top_p leaves out, and what top_k leaves out lies below the
// k-th largest of the threads' maxima. What the keys put above it, a few hundred ids of a model's logits, is read
// again and listed; the last one that is kept is found by digits of its place in the order, with counts and sums in
// integers (weights in units of 2^-43), whose value no order of additions changes; random words are drawn for the
// kept alone. Of rows too long for shared memory the rest is read twice, from a second-level cache (18 MB of 128 rows
// of 129280); rows that list more than LIST ids, such as flat ones, are read once for each digit, seven times in all at most.
//
// Floor: 4 bytes a logit, 66 MB and 15.6 us at 4.24 TB/s for 128 rows of 129280. Expected with top-p on peaked
// logits: 21 us, 15.6 for the row, 2 for the part that is read twice, 1 for the keys and 2 for listing, choosing and
// drawing, between which a block waits: 74 % of the floor. Without filters instructions limit it, some 17 a logit,
// about 17 us. A few rows take no less than 10 us, since a row is one block's: several blocks to a row would need
// further launches, which cost as much as they save. 
// Measured on one H200, normal logits of deviation 4: top-p 423 us for 128 rows and 273 us for one, top-k 482 us, no
// filter 32 us. These rows are not peaked enough: some 10,000 of their logits lie above the one below which top-p keeps
// nothing, more than LIST, and the row is read for each digit. Sums of the weights by the leading bits of the keys, one
// more pass over what is in shared memory, would name a nearer one.
//
// Defines: THREADS, a power of two of at least 64 threads a block. Launch: num_rows blocks, of which each has 2 bytes
// of shared memory for each resident column beyond its own.
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
constexpr int LIST = 2048;
constexpr int BINS = 2048, BINS_OF_A_THREAD = ceil_div(BINS, THREADS);
constexpr float LEAST_TEMPERATURE = 1e-5f, LARGEST_TEMPERATURE = 0x1.fffffep127f;
constexpr float UNITS = 0x1p43f;    // of a weight of 1: sums of 2^20 of them fit 64 bits
constexpr uint32_t NO_LIMIT = 0xffffffffu;
constexpr uint64_t NO_SHARE = ~uint64_t{0};
constexpr int KEYS_OF_A_VECTOR = 8;

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
    int32_t resident;                                // columns whose keys are kept, a multiple of KEYS_OF_A_VECTOR
};
PARAMS_LAYOUT(SamplerParams, logits, logits_row_stride, temperature, top_k, top_p, min_p, seed, step, tokens,
              vocab_size, resident)

// Shared memory of a block; the upper halves of keys follow, in accesses of 16 bytes.
struct alignas(16) Shared {
    uint64_t list[LIST];
    uint64_t shares[BINS];
    uint32_t counts[BINS];
    uint64_t of_warps[WARPS];
    uint32_t counts_of_warps[WARPS];
    uint64_t share;         // found: what lies in front of the bin
    uint32_t count;
    int32_t bin;            // -1 where the wanted number is not reached
    uint32_t num_listed;
};

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
               top_k > 0 ? static_cast<uint32_t>(top_k) : NO_LIMIT,
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

DEVICE float weight_of(const Row& row, float logit, float most) {
    return logit == most ? 1.0f : exp2_approx((logit - most) * row.factor);
}

// In every thread: the largest of the block's.
DEVICE uint64_t block_maximum(Shared& shared, uint64_t own) {
    for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2)
        own = maximum<uint64_t>(own, __shfl_xor_sync(FULL_WARP, own, distance));
    __syncthreads();
    if (lane_id() == 0) shared.of_warps[warp_id()] = own;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) own = maximum(own, shared.of_warps[warp]);
    return own;
}

// Calls visit(column, four logits from there on) for a row from column `begin` on, a multiple of IDS; behind the row
// logits are -infinity. All threads of a warp call it together. LOADS of four are on their way at once.
template <bool WIDE, int LOADS, typename Visit>
DEVICE void visit_columns(const Row& row, int begin, Visit visit) {
    for (int tile = begin; tile < row.vocab_size; tile += LOADS * STEP) {
        float logits[LOADS][IDS];
        UNROLL
        for (int load = 0; load < LOADS; ++load) {
            const int column = tile + load * STEP + static_cast<int>(threadIdx.x) * IDS;
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
        UNROLL
        for (int load = 0; load < LOADS; ++load)
            visit(tile + load * STEP + static_cast<int>(threadIdx.x) * IDS, logits[load]);
    }
}

// ---------------------------------------------------------------- the race

DEVICE PhiloxWords words_of(const Row& row, int id) {
    return philox(static_cast<uint32_t>(id / IDS), static_cast<uint32_t>(row.step),
                  static_cast<uint32_t>(row.step >> 32), 0, row.seed);
}

DEVICE float uniform(uint32_t word) { return fused_multiply_add(static_cast<float>(word), 0x1p-32f, 0x1p-33f); }

// Place of an id in the race: infinite logits come first.
DEVICE uint64_t race(const Row& row, float logit, int id, uint32_t word, float& score) {
    const float power = log2f(-log1pf(-uniform(word)));
    const bool infinite = logit == INFINITY_F32;
    score = fused_multiply_add(infinite ? 0.0f : logit, row.factor, -power);
    return place_of(key_of(score), id) | static_cast<uint64_t>(infinite) << (32 + ID_BITS);
}

// The word and the logit of one of a thread's ids, by selects: indexed registers would lie in memory.
template <typename T>
DEVICE T one_of(const T (&values)[IDS], int at) {
    const T low = at & 1 ? values[1] : values[0], high = at & 1 ? values[3] : values[2];
    return at & 2 ? high : low;
}

// The winner of a whole row.
template <bool WIDE>
DEVICE uint64_t race_of_all(const Row& row) {
    uint64_t best = 0;
    float best_score = -INFINITY_F32;
    visit_columns<WIDE, LOADS>(row, 0, [&](int column, const float (&logits)[IDS]) {
        const PhiloxWords words = words_of(row, column);
        uint32_t in_front = 0;
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            // log2(v) errs by 2^-22.
            const float most = fused_multiply_add(logits[e], row.factor, 0x1p-18f - log2_approx(uniform(words.w[e])));
            in_front |= static_cast<uint32_t>(logits[e] > -INFINITY_F32 && !(most < best_score)) << e;
        }
        for (; in_front; in_front &= in_front - 1) {
            const int e = __ffs(static_cast<int>(in_front)) - 1;
            const float logit = one_of(logits, e);
            float score;
            best = maximum(best, race(row, logit, column + e, one_of(words.w, e), score));
            best_score = maximum_f32(best_score, logit == INFINITY_F32 ? INFINITY_F32 : score);
        }
        best_score = score_of_key(__reduce_max_sync(FULL_WARP, key_of(best_score)));
    });
    return best;
}

// The first of a whole row's order.
template <bool WIDE>
DEVICE uint64_t first_of_all(const Row& row) {
    uint32_t best = key_of(-INFINITY_F32);
    int id = -1;
    visit_columns<WIDE, LOADS>(row, 0, [&](int column, const float (&logits)[IDS]) {
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

// Of a row: its largest logit, the sum of its weights, and keys below which nothing is kept.
struct Bounds {
    float most, sum;
    uint32_t least_key;
};

// Reads a row once and keeps the upper halves of its keys, as far as they are resident.
template <bool WIDE>
DEVICE Bounds bounds_of(const SamplerParams& params, Shared& shared, uint64_t* kept, const Row& row) {
    float most = -INFINITY_F32, sum = 0.0f;
    visit_columns<WIDE, LOADS>(row, 0, [&](int column, const float (&given)[IDS]) {
        float logits[IDS];
        uint64_t halves = 0;
        UNROLL
        for (int e = 0; e < IDS; ++e) {
            logits[e] = maximum_f32(given[e], -INFINITY_F32);
            halves |= static_cast<uint64_t>(key_of(logits[e]) >> 16) << 16 * e;
        }
        if (column < params.resident) kept[column / IDS] = halves;
        const float top = maximum_f32(maximum_f32(logits[0], logits[1]), maximum_f32(logits[2], logits[3]));
        if (top > most) {
            sum *= weight_of(row, most, top);
            most = top;
        }
        UNROLL
        for (int e = 0; e < IDS; ++e) sum += weight_of(row, logits[e], most);
    });
    const float own = most;
    most = score_of_key(static_cast<uint32_t>(block_maximum(shared, key_of(most))));
    sum = warp_sum(sum * weight_of(row, own, most));
    __syncthreads();
    if (lane_id() == 0) shared.of_warps[warp_id()] = __float_as_uint(sum);
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp) sum += __uint_as_float(static_cast<uint32_t>(shared.of_warps[warp]));
    uint32_t least_key = key_of(-INFINITY_F32) + 1;
    // Each thread's largest is a logit: as many as reach a key there are at least. A short row has room on the list.
    if (row.top_k <= THREADS && row.vocab_size > LIST) {
        uint32_t reached = 0;
        for (uint32_t bit = 1u << 31; bit > 0xffff; bit >>= 1)
            if (static_cast<uint32_t>(__syncthreads_count(key_of(own) >= (reached | bit))) >= row.top_k) reached |= bit;
        least_key = maximum(least_key, reached);
    }
    // What is at most that, all together, is no more than top_p leaves out. An octave further down no rounding matters.
    const float left_out = (1.0f - row.top_p) * sum / static_cast<float>(row.vocab_size);
    const float least = maximum_f32(left_out, row.min_p);
    if (most == INFINITY_F32) return Bounds{most, sum, key_of(most)};
    if (least > 0.0f) least_key = maximum(least_key, key_of(most + (log2_approx(least) - 1.0f) / row.factor));
    return Bounds{most, sum, least_key};
}

// Lists the ids of a row whose keys reach the least; whether there was room for all.
template <bool WIDE>
DEVICE bool list_ids(const SamplerParams& params, Shared& shared, const uint64_t* kept, const Row& row,
                     const Bounds& bounds) {
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    const auto add = [&](float logit, int id) {
        const uint32_t key = key_of(logit);
        if (key < bounds.least_key) return;
        const uint32_t at = atomicAdd(&shared.num_listed, 1u);
        if (at < LIST) shared.list[at] = place_of(key, id);
    };
    const uint32_t least = bounds.least_key >> 16;
    for (int vector = threadIdx.x; vector < params.resident / KEYS_OF_A_VECTOR; vector += THREADS) {
        const Vec16 keys = load_vec16(kept + vector * (KEYS_OF_A_VECTOR / IDS));
        const uint32_t most = maximum_u16x2(maximum_u16x2(keys.w[0], keys.w[1]), maximum_u16x2(keys.w[2], keys.w[3]));
        if (maximum(most & 0xffffu, most >> 16) < least) continue;
        for (int e = 0; e < KEYS_OF_A_VECTOR; ++e) {
            const int id = vector * KEYS_OF_A_VECTOR + e;
            if ((keys.w[e / 2] >> 16 * (e % 2) & 0xffffu) >= least && id < row.vocab_size) add(row.logits[id], id);
        }
    }
    visit_columns<WIDE, LOADS>(row, params.resident, [&](int column, const float (&logits)[IDS]) {
        for (int e = 0; e < IDS; ++e) add(logits[e], column + e);
    });
    __syncthreads();
    return shared.num_listed <= LIST;
}

// Ids by place: those of a list.
struct Listed {
    const uint64_t* list;
    int count;

    template <typename Visit>
    void visit(Visit visit) const {
        for (int i = threadIdx.x; i < count; i += THREADS) visit(list[i]);
    }
};

// Those of a whole row whose keys reach the least.
template <bool WIDE>
struct Streamed {
    const Row& row;
    uint32_t least_key;

    template <typename Visit>
    void visit(Visit visit) const {
        visit_columns<WIDE, 1>(row, 0, [&](int column, const float (&logits)[IDS]) {
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

// Finds the bin, counted from the last one down, in which count or share reach what is wanted, beside what lies in
// front.
DEVICE void find_bin(Shared& shared, uint32_t count, uint64_t share, uint32_t wanted_count, uint64_t wanted_share) {
    const int first = BINS - BINS_OF_A_THREAD * (static_cast<int>(threadIdx.x) + 1);
    uint32_t own_count = 0;
    uint64_t own_share = 0;
    for (int i = 0; i < BINS_OF_A_THREAD; ++i) {
        own_count += shared.counts[first + i];
        own_share += shared.shares[first + i];
    }
    if (threadIdx.x == 0) shared.bin = -1;
    count += sum_before(own_count, shared.counts_of_warps);
    share += sum_before(own_share, shared.of_warps);
    const auto reached = [&](uint32_t count, uint64_t share) { return count >= wanted_count || share >= wanted_share; };
    if (!reached(count, share) && reached(count + own_count, share + own_share)) {
        int bin = first + BINS_OF_A_THREAD - 1;
        for (; !reached(count + shared.counts[bin], share + shared.shares[bin]); --bin) {
            count += shared.counts[bin];
            share += shared.shares[bin];
        }
        shared.bin = bin;
        shared.count = count;
        shared.share = share;
    }
    __syncthreads();
}

// The place of the last id that top_k and top_p keep; 0 where they keep all.
template <typename Ids>
DEVICE uint64_t last_kept(Shared& shared, const Ids& ids, const Row& row, const Bounds& bounds) {
    // Two digits of 11 bits and one of 10 of a key, two of 10 bits of an id.
    constexpr int LEVELS = 5, LONG_LEVELS = 2, LONG = 11, SHORT = 10;
    static_assert(LONG_LEVELS * LONG + (LEVELS - LONG_LEVELS) * SHORT == 32 + ID_BITS, "digits make up a place");
    // Exact: both numbers have 24 bits. No token is kept for a share of 0.
    const double share_of_all =
        static_cast<double>(row.top_p) * static_cast<double>(bounds.sum) * static_cast<double>(UNITS);
    const uint64_t wanted =
        row.top_p < 1.0f ? maximum<uint64_t>(static_cast<uint64_t>(ceil(share_of_all)), 1) : NO_SHARE;
    uint64_t prefix = 0, share = 0;
    uint32_t count = 0;
    for (int level = 0; level < LEVELS; ++level) {
        const int digit = level < LONG_LEVELS ? LONG : SHORT;
        const int shift = (LEVELS - 1 - level) * SHORT + maximum(LONG_LEVELS - 1 - level, 0) * (LONG - SHORT);
        const int upto = shift + digit;
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.counts[bin] = shared.shares[bin] = 0;
        __syncthreads();
        ids.visit([&](uint64_t place) {
            if (level > 0 && place >> upto != prefix >> upto) return;
            const uint32_t bin = static_cast<uint32_t>(place >> shift) & ((1u << digit) - 1);
            const float weight = weight_of(row, score_of_key(key_of_place(place)), bounds.most);
            atomicAdd(&shared.counts[bin], 1u);
            atomicAdd(&shared.shares[bin], static_cast<uint64_t>(weight * UNITS));
        });
        __syncthreads();
        find_bin(shared, count, share, row.top_k, wanted);
        if (shared.bin < 0) return 0;
        prefix |= static_cast<uint64_t>(shared.bin) << shift;
        count = shared.count;
        share = shared.share;
        // A bin of one id has none behind the last.
        if (shared.counts[shared.bin] == 1) break;
        __syncthreads();
    }
    return prefix;
}

// The winner among what is kept.
template <typename Ids>
DEVICE uint64_t race_of_kept(Shared& shared, const Ids& ids, const Row& row, const Bounds& bounds) {
    const uint64_t last = last_kept(shared, ids, row, bounds);
    uint64_t best = 0;
    ids.visit([&](uint64_t place) {
        const float logit = score_of_key(key_of_place(place));
        if (place < last || weight_of(row, logit, bounds.most) < row.min_p) return;
        const int id = id_of(place);
        const PhiloxWords words = words_of(row, id);
        float score;
        best = maximum(best, race(row, logit, id, words.w[id % IDS], score));
    });
    return best;
}

template <bool WIDE>
DEVICE uint64_t best_of(const SamplerParams& params, Shared& shared, const Row& row) {
    if (!(row.temperature > 0.0f)) return first_of_all<WIDE>(row);
    if (!row.has_filters()) return race_of_all<WIDE>(row);
    uint64_t* const kept = reinterpret_cast<uint64_t*>(dynamic_shared() + sizeof(Shared));
    const Bounds bounds = bounds_of<WIDE>(params, shared, kept, row);
    if (list_ids<WIDE>(params, shared, kept, row, bounds))
        return race_of_kept(shared, Listed{shared.list, static_cast<int>(shared.num_listed)}, row, bounds);
    return race_of_kept(shared, Streamed<WIDE>{row, bounds.least_key}, row, bounds);
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
