// The backward of the indexer's logits (stage 2 of training 7), over the valid slots of a token
// (ranking.h). With d[t,h,j] = q[t,h] . k[i] for the key i of slot j, and G = dlogits,
//
//     A[t,h,j] = G[t,j] w[t,h] [d > 0]           rounded to bf16: an operand of the next two GEMMs
//     dq[t,h]  = sm_scale sum_j A k[i]
//     dk[i]   += sm_scale sum_h A q[t,h]
//     dw[t,h]  = sm_scale sum_j G max(d, 0)
//
// sm_scale > 0 multiplies the fp32 sums, once each. A NaN in d stays NaN. Invalid slots are never
// dereferenced. A token without a valid slot has dq = dw = 0; a key in no list has dk = 0.
//
// Work division: a block takes a token with up to 64 heads; missing heads are zeros. cp.async
// loads keys in tiles of 64 rows, two in flight. A warp multiplies 16 heads by the tile's keys. A
// stays in registers as the left operand of dq, whose sums stay in registers for the whole token.
// A also goes to shared memory, where each warp multiplies its transpose by a quarter of q's
// columns: dk of the tile. dk goes to memory by atomics of four floats, or, in deterministic
// order, to a row for each slot that indexer_backward_sum adds.
//
// Floor, 64 heads, J slots a token: 3 GEMMs of 2*64*128*J FLOP, 103 GFLOP for 4096 tokens of 512
// slots, 130 us at 790 TFLOP/s; in L2 512*J bytes of atomics, 1.07 GB, and 256*J bytes gathered.
// Limit: atomics, then shared memory. Three blocks share an SM. One H200: 551 us.
//
// Defines: WEIGHT_ELEMENT  type of w and dw: float or bf16; SELECTED  see ranking.h
// Launch, 128 threads a block: indexer_backward a block a token of a chunk, _zero a warp a key,
// _sum a warp 16 keys. What was tried: kernels/docs/indexer_backward.md.
#include "async_copy.h"
#include "lines.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "ranking.h"
#include "tiles.h"

#if !defined(WEIGHT_ELEMENT) || !defined(SELECTED)
#error "define WEIGHT_ELEMENT and SELECTED"
#endif

constexpr int HEAD_DIM = 128, HEADS = 64, KEYS = 64;
constexpr int WARPS = 4, THREADS = WARPS * WARP_SIZE;
constexpr int STAGES = 2;
constexpr int WARP_HEADS = HEADS / WARPS;        // 16: the rows of one matrix instruction
constexpr int WARP_COLUMNS = HEAD_DIM / WARPS;   // of dk
constexpr int CHUNKS = HEAD_DIM / 8;             // of 16 bytes in a row
constexpr int PART_M = 2;                        // rows of matrix instructions of dk that a warp has at a time
// Larger than the launched block: it limits the compiler to 168 registers, so that three blocks
// share an SM.
constexpr int REGISTER_BOUND = 384;
constexpr int SUM_KEYS = 16;                     // that a warp of the sum has
constexpr int VECTORS = HEAD_DIM / 4 / WARP_SIZE;  // of four floats that a lane has of a row of dk

static_assert(WARP_HEADS == 16, "a warp has the rows of one matrix instruction");
static_assert(VECTORS == 1, "a warp covers a row of dk");

using Rows = Tile<HEAD_DIM>;  // of q, and of k
using Gates = Tile<KEYS>;     // of A: a row for each head

// ---------------------------------------------------------------- parameters

struct IndexerBackwardParams {
    const bf16* q; int64_t q_token_stride; int64_t q_head_stride;    // [num_tokens, num_heads, 128]; in elements
    const bf16* k; int64_t k_stride;                                 // [num_keys, 128]
    const WEIGHT_ELEMENT* w; int64_t w_stride;                       // [num_tokens, num_heads]
    const float* dlogits; int64_t dlogits_stride;                    // [num_tokens, slots]
    const int32_t* indices; int64_t indices_stride;                  // [num_tokens, slots], or nullptr
    const int32_t* topk_length;                                      // [num_tokens], or nullptr
    const int32_t* cu_q;                                             // [num_sequences + 1], or nullptr
    const int32_t* cu_k;                                             // [num_sequences + 1], or nullptr
    const int32_t* q_off;                                            // [num_sequences], or nullptr
    bf16* dq; int64_t dq_token_stride; int64_t dq_head_stride;       // [num_tokens, num_heads, 128]
    float* dk; int64_t dk_stride;                                    // [num_keys, 128]
    WEIGHT_ELEMENT* dw; int64_t dw_stride;                           // [num_tokens, num_heads]
    float* slot_rows;                                                // [num_tokens, slots, 128], or nullptr: atomics
    int32_t first_token;                                             // of the chunk
    int32_t num_tokens;                                              // of the chunk
    int32_t num_heads;
    int32_t slots;
    int32_t num_keys;
    int32_t num_sequences;
    int32_t ratio;
    int32_t indices_global;
    float sm_scale;
};

struct SharedPlan {
    uint8_t q[Rows::bytes(HEADS)];
    uint8_t k[STAGES][Rows::bytes(KEYS)];
    uint8_t a[Gates::bytes(HEADS)];
    int32_t key_rows[STAGES][KEYS];  // -1 where a slot is not valid
    float upstream[STAGES][KEYS];
};
constexpr int Q = OFFSET_OF(SharedPlan, q), K = OFFSET_OF(SharedPlan, k), A = OFFSET_OF(SharedPlan, a);
constexpr int KEY_ROWS = OFFSET_OF(SharedPlan, key_rows), UPSTREAM = OFFSET_OF(SharedPlan, upstream);
constexpr int SHARED_BYTES = sizeof(SharedPlan);
SHARED_MEMORY(indexer_backward, SHARED_BYTES)

// ---------------------------------------------------------------- loads

// Loads q of a token; missing heads become zeros.
DEVICE void start_queries(const IndexerBackwardParams& params, int32_t token, SharedAddress shared) {
    const bf16* q = params.q + token * params.q_token_stride;
    for (int i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
        const int head = i / CHUNKS, chunk = i % CHUNKS;
        const bool wanted = head < params.num_heads;
        const bf16* from = q + (wanted ? head * params.q_head_stride : 0) + 8 * chunk;
        copy_async_16(shared + Q + Rows::offset(head, chunk), from, wanted);
    }
}

// One of the 16 slots of a tile that this warp loads, one a lane.
struct Slot {
    int32_t row;     // of k, -1 where it is not valid
    float upstream;  // 0 there
};

constexpr int WARP_SLOTS = KEYS / WARPS;

DEVICE Slot look_up(const IndexerBackwardParams& params, const Ranking& list, int32_t token, int tile) {
    const int slot = tile * KEYS + warp_id() * WARP_SLOTS + lane_id();
    if (lane_id() >= WARP_SLOTS) return Slot{-1, 0.0f};
    const int32_t row = list.valid_row(list.stored_index(slot));
    return Slot{row, row < 0 ? 0.0f : params.dlogits[token * params.dlogits_stride + slot]};
}

// Starts the loads of a tile's rows; invalid slots become zeros.
DEVICE void start_tile(const IndexerBackwardParams& params, const Slot& own, SharedAddress shared, int stage) {
    const int first = warp_id() * WARP_SLOTS;
    if (lane_id() < WARP_SLOTS) {
        reinterpret_cast<int32_t*>(dynamic_shared() + KEY_ROWS)[stage * KEYS + first + lane_id()] = own.row;
        reinterpret_cast<float*>(dynamic_shared() + UPSTREAM)[stage * KEYS + first + lane_id()] = own.upstream;
    }
    // Half a warp takes a row.
    UNROLL
    for (int i = 0; i < WARP_SLOTS; i += 2) {
        const int slot = i + lane_id() / CHUNKS, chunk = lane_id() % CHUNKS;
        const int32_t row = __shfl_sync(FULL_WARP, own.row, slot);
        const bool wanted = row >= 0;
        const SharedAddress to = shared + K + stage * Rows::bytes(KEYS) + Rows::offset(first + slot, chunk);
        copy_async_16(to, params.k + (wanted ? row * params.k_stride : 0) + 8 * chunk, wanted);
    }
    copy_commit();
}

// ---------------------------------------------------------------- MMAs

// The weights of this lane's two heads, and its part of their gradients.
struct HeadWeights {
    float w[2], dw[2];
};

DEVICE int lane_head(int half) { return warp_id() * WARP_HEADS + lane_id() / 4 + 8 * half; }

// From d to A, as a register operand of dq and in shared memory. Adds G max(d, 0) to dw.
DEVICE void gate(const float (&d)[KEYS / 8][4], HeadWeights& heads, uint32_t (&a)[KEYS / 16][4], SharedAddress shared,
                 int stage) {
    const auto* rows = reinterpret_cast<const int32_t*>(dynamic_shared() + KEY_ROWS) + stage * KEYS;
    const auto* upstream = reinterpret_cast<const float*>(dynamic_shared() + UPSTREAM) + stage * KEYS;
    UNROLL
    for (int n = 0; n < KEYS / 8; ++n) {
        const int key = 8 * n + 2 * (lane_id() % 4);
        UNROLL
        for (int half = 0; half < 2; ++half) {
            float gated[2];
            UNROLL
            for (int i = 0; i < 2; ++i) {
                const float product = d[n][2 * half + i];
                // NaN passes. The row of zeros of an invalid slot does not, whatever q is.
                const bool passes = rows[key + i] >= 0 && !(product <= 0.0f);
                gated[i] = passes ? upstream[key + i] * heads.w[half] : 0.0f;
                heads.dw[half] += passes ? upstream[key + i] * product : 0.0f;
            }
            const uint32_t pair = pack_bf16(gated[0], gated[1]);
            a[n / 2][n % 2 * 2 + half] = pair;
            store_shared(shared + A + Gates::offset(lane_head(half), n) + 4 * (lane_id() % 4), pair);
        }
    }
}

// dq += A k: 16 heads by all columns.
DEVICE void add_query_gradients(float (&dq)[CHUNKS][4], const uint32_t (&a)[KEYS / 16][4], SharedAddress k) {
    const int lane = lane_id();
    UNROLL
    for (int step = 0; step < KEYS / 16; ++step) {
        UNROLL
        for (int n = 0; n < CHUNKS; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_transposed(b, k + Rows::offset(16 * step + lane % 16, n + lane / 16));
            mma_bf16_16x8x16(dq[n], a[step], b[0], b[1]);
            mma_bf16_16x8x16(dq[n + 1], a[step], b[2], b[3]);
        }
    }
}

// A^T q: keys of a part of the tile by this warp's columns.
DEVICE void key_gradients(float (&c)[PART_M][WARP_COLUMNS / 8][4], SharedAddress shared, int first_m) {
    const int lane = lane_id();
    UNROLL
    for (int step = 0; step < HEADS / 16; ++step) {
        uint32_t a[PART_M][4];
        UNROLL
        for (int m = 0; m < PART_M; ++m) {
            const int head = 16 * step + lane % 8 + lane / 16 * 8;
            ldmatrix_x4_transposed(a[m], shared + A + Gates::offset(head, 2 * (first_m + m) + lane / 8 % 2));
        }
        UNROLL
        for (int n = 0; n < WARP_COLUMNS / 8; n += 2) {
            uint32_t b[4];
            const int chunk = warp_id() * (WARP_COLUMNS / 8) + n + lane / 16;
            ldmatrix_x4_transposed(b, shared + Q + Rows::offset(16 * step + lane % 16, chunk));
            UNROLL
            for (int m = 0; m < PART_M; ++m) {
                mma_bf16_16x8x16(c[m][n], a[m], b[0], b[1]);
                mma_bf16_16x8x16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Adds four consecutive floats to a row of dk, or stores them to the slot's own row.
DEVICE void give(const IndexerBackwardParams& params, int32_t row, int64_t slot, int column, const float (&x)[4]) {
    if (params.slot_rows) {
        Vec16 vector;
        for (int i = 0; i < 4; ++i) vector.w[i] = __float_as_uint(x[i]);
        store_vec16(params.slot_rows + slot * HEAD_DIM + column, vector);
    } else {
        atomic_add_vec4(params.dk + row * params.dk_stride + column, x[0], x[1], x[2], x[3]);
    }
}

// In whole lines of memory. All exchanges come first: an atomic add is a branch to the compiler,
// and nothing moves past it.
DEVICE void scatter(const IndexerBackwardParams& params, float (&c)[PART_M][WARP_COLUMNS / 8][4], int stage,
                    int64_t first_slot, int first_m) {
    static_assert(WARP_COLUMNS == 32, "a warp has a line of each row");
    const auto* rows = reinterpret_cast<const int32_t*>(dynamic_shared() + KEY_ROWS) + stage * KEYS;
    UNROLL
    for (int m = 0; m < PART_M; ++m) trade_columns(c[m], 0);
    UNROLL
    for (int m = 0; m < PART_M; ++m) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int slot = 16 * (first_m + m) + line_row(i), n = i % 2 * 2, pair = i / 2 * 2;
            const int32_t row = rows[slot];
            if (row < 0) continue;
            float x[4] = {c[m][n][pair], c[m][n][pair + 1], c[m][n + 1][pair], c[m][n + 1][pair + 1]};
            UNROLL
            for (int j = 0; j < 4; ++j) x[j] *= params.sm_scale;
            give(params, row, first_slot + slot, warp_id() * WARP_COLUMNS + line_column(), x);
        }
    }
}

// ---------------------------------------------------------------- stores

// Stores dq through this warp's rows of q, which no thread reads any more.
DEVICE void store_query_gradients(const IndexerBackwardParams& params, const float (&dq)[CHUNKS][4], int32_t token,
                                  SharedAddress shared) {
    const int t = lane_id() % 4;
    UNROLL
    for (int n = 0; n < CHUNKS; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const float low = dq[n][2 * half] * params.sm_scale, high = dq[n][2 * half + 1] * params.sm_scale;
            store_shared(shared + Q + Rows::offset(lane_head(half), n) + 4 * t, pack_bf16(low, high));
        }
    }
    __syncwarp();
    bf16* target = params.dq + token * params.dq_token_stride;
    UNROLL
    for (int i = 0; i < WARP_HEADS; i += 2) {
        const int head = warp_id() * WARP_HEADS + i + lane_id() / CHUNKS, chunk = lane_id() % CHUNKS;
        if (head >= params.num_heads) continue;
        const Vec16 channels = load_shared_vec16(shared + Q + Rows::offset(head, chunk));
        store_vec16(target + head * params.dq_head_stride + 8 * chunk, channels);
    }
}

// Each of the four lanes of a head has a part of its sum.
DEVICE void store_weight_gradients(const IndexerBackwardParams& params, const HeadWeights& heads, int32_t token) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float sum = heads.dw[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        WEIGHT_ELEMENT* target = params.dw + token * params.dw_stride + lane_head(half);
        if (lane_id() % 4 == 0 && lane_head(half) < params.num_heads)
            Element<WEIGHT_ELEMENT>::store(target, sum * params.sm_scale);
    }
}

KERNEL(indexer_backward, IndexerBackwardParams, REGISTER_BOUND) {
    // Without lists later tokens see more keys: they go first.
    const int32_t place = static_cast<int32_t>(SELECTED ? blockIdx.x : params.num_tokens - 1 - blockIdx.x);
    const int32_t token = params.first_token + place;
    const Ranking list = ranking(params, token, params.slots);
    const SharedAddress shared = shared_address(dynamic_shared());
    const int tiles = ceil_div(list.length, KEYS);

    HeadWeights heads{};
    UNROLL
    for (int half = 0; half < 2; ++half)
        if (lane_head(half) < params.num_heads)
            heads.w[half] = Element<WEIGHT_ELEMENT>::load(params.w + token * params.w_stride + lane_head(half));
    float dq[CHUNKS][4] = {};
    Slot next{-1, 0.0f};
    if (tiles > 0) {
        start_queries(params, token, shared);
        start_tile(params, look_up(params, list, token, 0), shared, 0);
        next = look_up(params, list, token, 1);
    }
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        copy_wait<0>();
        // After this barrier all threads see the tile, and no thread reads the one before it or
        // its A any more.
        __syncthreads();
        if (tile + 1 < tiles) {
            start_tile(params, next, shared, 1 - stage);
            next = look_up(params, list, token, tile + 2);
        }
        const SharedAddress k = shared + K + stage * Rows::bytes(KEYS);
        float d[KEYS / 8][4] = {};
        multiply_rows<HEAD_DIM>(d, shared + Q, warp_id() * WARP_HEADS, k, 0, [](int) {});
        uint32_t a[KEYS / 16][4];
        gate(d, heads, a, shared, stage);
        add_query_gradients(dq, a, k);
        __syncthreads();  // A of all heads is there
        UNROLL_BY(1)
        for (int first_m = 0; first_m < KEYS / 16; first_m += PART_M) {
            float c[PART_M][WARP_COLUMNS / 8][4] = {};
            key_gradients(c, shared, first_m);
            scatter(params, c, stage, static_cast<int64_t>(place) * params.slots + tile * KEYS, first_m);
        }
    }
    __syncthreads();  // q is no longer read by anyone; dq is staged in its place
    store_query_gradients(params, dq, token, shared);
    store_weight_gradients(params, heads, token);
}

// ---------------------------------------------------------------- all of dk

// Four floats a lane.
DEVICE void store_row(float* row, const float (&x)[4]) {
    Vec16 vector;
    for (int i = 0; i < 4; ++i) vector.w[i] = __float_as_uint(x[i]);
    store_vec16(row + 4 * lane_id(), vector);
}

// dk = 0, before atomics add to it.
KERNEL(indexer_backward_zero, IndexerBackwardParams, THREADS) {
    const int64_t key = static_cast<int64_t>(blockIdx.x) * WARPS + warp_id();
    if (key < params.num_keys) store_row(params.dk + key * params.dk_stride, {0.0f, 0.0f, 0.0f, 0.0f});
}

SHARED_MEMORY(indexer_backward_sum, WARPS * SUM_KEYS * HEAD_DIM * 4)

// Adds the slots' rows of a chunk to the keys that they name, in the order of tokens and slots. A
// warp has SUM_KEYS keys and looks for them in all lists of the chunk. Their sums are in shared
// memory; each lane has its own columns.
KERNEL(indexer_backward_sum, IndexerBackwardParams, THREADS) {
    auto* sums = reinterpret_cast<float*>(dynamic_shared()) + warp_id() * SUM_KEYS * HEAD_DIM + 4 * lane_id();
    const int64_t first_key = (static_cast<int64_t>(blockIdx.x) * WARPS + warp_id()) * SUM_KEYS;
    const int keys = static_cast<int>(maximum<int64_t>(minimum<int64_t>(params.num_keys - first_key, SUM_KEYS), 0));
    for (int key = 0; key < keys; ++key) {
        // The first chunk starts with 0, whatever dk holds.
        const float* before = params.dk + (first_key + key) * params.dk_stride + 4 * lane_id();
        for (int i = 0; i < 4; ++i) sums[key * HEAD_DIM + i] = params.first_token == 0 ? 0.0f : before[i];
    }
    for (int32_t place = 0; place < params.num_tokens && keys > 0; ++place) {
        const Ranking list = ranking(params, params.first_token + place, params.slots);
        for (int first = 0; first < list.length; first += WARP_SIZE) {
            const int32_t row = list.valid_row(list.stored_index(first + lane_id()));
            const bool own = row >= first_key && row < first_key + keys;
            for (uint32_t left = __ballot_sync(FULL_WARP, own); left != 0; left &= left - 1) {
                const int lane = __popc((left & (0u - left)) - 1);
                const int64_t key = __shfl_sync(FULL_WARP, row, lane) - first_key;
                const int64_t from = static_cast<int64_t>(place) * params.slots + first + lane;
                const Vec16 term = load_vec16(params.slot_rows + from * HEAD_DIM + 4 * lane_id());
                for (int i = 0; i < 4; ++i) sums[key * HEAD_DIM + i] += __uint_as_float(term.w[i]);
            }
        }
    }
    for (int key = 0; key < keys; ++key) {
        const float* sum = sums + key * HEAD_DIM;
        store_row(params.dk + (first_key + key) * params.dk_stride, {sum[0], sum[1], sum[2], sum[3]});
    }
}
