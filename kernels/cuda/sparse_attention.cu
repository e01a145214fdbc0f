// Sparse attention over gathered keys with a per-head sink, forward and backward
// (inference section 8 and 8.1; training sections 3 and 4).
//
//     z[t,h,j] = softmax_scale * q[t,h] . k[indices[t,j]]          over the valid slots j of token t
//     lse      = log sum_j exp z            max_logits = max_j z     (natural, both without the sink)
//     P        = exp(z - log(exp(lse) + exp(sink_h)))                out = sum_j P v[indices[t,j]]
//
//     delta    = out . dout                 dP = dout . v            dS = P (dP - delta) + exp(z - lse) dlse
//     dq       = softmax_scale * sum_j dS k                          dk[i] += softmax_scale * dS q
//     dv[i]   += P dout                     dsink_h = - sum_t exp(sink_h - L) delta
//
// A slot is valid iff j < clamp(topk_length, 0, topk) and 0 <= indices[t,j] < num_keys. An invalid
// slot is never dereferenced: its row in shared memory is zero-filled, its score is -inf, and no
// atomic is issued for it. A slot that repeats a key counts again. A row without a valid slot has
// out = 0, lse = +inf, max_logits = -inf, dq = 0.
//
// Kernels
//   sparse_attention_forward   one block per (token, HEADS_PER_BLOCK heads)
//   sparse_attention_delta     one warp per (token, head): delta and the token's term of dsink
//   sparse_attention_dsink     sum of those terms over tokens in a fixed order
//   sparse_attention_zero      zero-fills the fp32 accumulator rows
//   sparse_attention_backward  one block per (token, HEADS_PER_BLOCK heads): dq, and fp32 atomics to dk, dv
//   sparse_attention_cast      fp32 accumulator rows to bf16
// and with DETERMINISTIC, for a chunk of tokens after the other, around a backward without atomics:
//   sparse_attention_count     how many slots name each key
//   sparse_attention_reserve   room for each key's list of slots
//   sparse_attention_fill      the lists, in whatever order
//   sparse_attention_order     the lists, ascending
//   sparse_attention_sum       the rows of a key's slots, added to its accumulator row in the order of its list
//
// How the work is laid out. All heads of a token share one list of keys, so a block takes a token
// and up to 64 of its heads as the M side of the matrix products, gathers the listed rows of K (and
// V) tile by tile into shared memory with cp.async, one tile ahead of the arithmetic, and keeps its
// result (out, or dq) in registers, split over the warps by columns. Scores are split over the warps
// by heads and keys. Shared tiles are swizzled so that ldmatrix reads eight rows without a bank
// conflict. Blocks of the same token are neighbours in the grid, so its rows are read from L2.
//
// Floors, for one token, H heads, J slots: forward 2*H*J*(D+Dv) FLOP and 2*J*D bytes gathered (K only
// when V is part of K); backward 2*H*J*(3*D+2*Dv) FLOP, the same gather, and 4*J*D bytes of atomics.
// At H = 64, D = 512 the forward's gather has 128 FLOP per byte. What limits it is the rate of
// mma.sync and of shared-memory wavefronts: per tile of 64 keys 2048 matrix instructions against about
// 3072 (scores) + 1024 (values) + 512 (arriving rows) wavefronts of 128 bytes. A tile of 32 keys in the
// backward has 2560 against about 5400, and its fp32 atomics, D per slot and token, are the second
// limit. One block fills an SM at these sizes, so its two or three barriers a tile are not hidden.
//
// Measured on one H200 (matrix rate 795 TFLOP/s in the same run, 4096 queries): forward 232 TFLOP/s at H 64,
// D 512, topk 512 and 255 at H 128, topk 1024, the same for 8192 keys as for 65536: not limited by the gather.
// Backward 192 and 206, falling to 184 and 201 where the atomics spread over many keys. A separate V, gathered
// beside K, costs a quarter of the forward (170) and half of the backward (112).
//
// What determinism costs. A slot's row is written once by each block of heads and read once by the sum: 8*D bytes for
// each slot, token and block of heads (8*(D + Dv) with V_SEPARATE) take the place of 4*D bytes of atomics. At the
// 4.24 TB/s of a device copy that is 2.0 ms for 4096 tokens at H 64, D 512, topk 512, and 8.1 ms at H 128, topk 1024;
// half of it, the writing, runs beside the matrix products. The index of a chunk moves 24 bytes a slot. These are
// bounds, not measurements. A key that every slot names is summed by HEAD_DIM / 128 warps alone: slow, not wrong.
//
// Defines
//   HEAD_DIM         width of q and k, a multiple of 16, at most 576
//   V_DIM            width of v and out, a multiple of 16, at most 512
//   HEADS_PER_BLOCK  16 or 64
//   V_SEPARATE       1: V is its own tensor. 0: V is the first V_DIM columns of K
//   DETERMINISTIC    1: the backward stores a row for each slot. 0: it adds to the rows of the keys by atomics
//
// Launch. The grid of the forward and of the backward is num_tokens * ceil(num_heads / HEADS_PER_BLOCK)
// blocks in x; block size and dynamic shared memory are what the module exports beside the kernel. The
// other kernels take 256 threads, no dynamic shared memory, and the grid named with their parameters.

#include "async_copy.h"
#include "math.h"
#include "memory.h"
#include "mma.h"
#include "numeric.h"
#include "platform.h"
#include "sparse_attention.h"

#if !defined(HEAD_DIM) || !defined(V_DIM) || !defined(HEADS_PER_BLOCK) || !defined(V_SEPARATE) || \
    !defined(DETERMINISTIC)
#error "define HEAD_DIM, V_DIM, HEADS_PER_BLOCK, V_SEPARATE and DETERMINISTIC"
#endif

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 576, "HEAD_DIM is a multiple of 16 up to 576");
static_assert(V_DIM % 16 == 0 && V_DIM >= 16 && V_DIM <= 512, "V_DIM is a multiple of 16 up to 512");
static_assert(HEADS_PER_BLOCK == 16 || HEADS_PER_BLOCK == 64, "a block holds 16 or 64 heads");
static_assert(V_SEPARATE || V_DIM <= HEAD_DIM, "V as a part of K cannot be wider than K");

// ---------------------------------------------------------------- shapes of the block's work

// A row-major tile of bf16 in shared memory, in chunks of 8 columns (16 bytes). Eight rows of one
// chunk column fall into eight different bank groups: by XOR with the row where a row is a multiple
// of eight chunks, otherwise by a row length that is odd in chunks.
template <int COLUMNS>
struct Tile {
    static constexpr int CHUNKS = COLUMNS / 8;
    static constexpr bool XOR = CHUNKS % 8 == 0;
    static constexpr int ROW_BYTES = 16 * (XOR ? CHUNKS : CHUNKS + 1);

    static constexpr int bytes(int rows) { return rows * ROW_BYTES; }
    // Byte offset of one chunk.
    static constexpr int offset(int row, int chunk) {
        return row * ROW_BYTES + 16 * (XOR ? chunk ^ (row & 7) : chunk);
    }
};

constexpr int M_TILES = HEADS_PER_BLOCK / 16;
constexpr int WARPS = HEADS_PER_BLOCK == 64 ? 8 : 4;
constexpr int THREADS = WARPS * WARP_SIZE;
// For the scores, warps form a grid: one row of it per 16 heads, KEY_WARPS columns over the keys.
constexpr int KEY_WARPS = WARPS / M_TILES;
constexpr int STAGES = 2;
constexpr int MAX_SHARED_BYTES = 227 * 1024;

using KeyTile = Tile<HEAD_DIM>;  // also q and dq
using ValueTile = Tile<V_DIM>;   // also out and dout
using GatheredValueTile = Tile<V_SEPARATE ? V_DIM : HEAD_DIM>;
constexpr int GATHERED_ROW_BYTES = KeyTile::ROW_BYTES + (V_SEPARATE ? ValueTile::ROW_BYTES : 0);

// Where everything lies in dynamic shared memory, as byte offsets, for KEYS slots in a tile.
template <int KEYS, bool BACKWARD>
struct Layout {
    using WeightTile = Tile<KEYS>;  // P and dS: heads x slots
    static constexpr int STAGE_BYTES = KEYS * GATHERED_ROW_BYTES;

    static constexpr int Q = 0;
    static constexpr int DOUT = Q + KeyTile::bytes(HEADS_PER_BLOCK);
    static constexpr int STAGE = DOUT + (BACKWARD ? ValueTile::bytes(HEADS_PER_BLOCK) : 0);
    static constexpr int P = STAGE + STAGES * STAGE_BYTES;
    static constexpr int DS = P + WeightTile::bytes(HEADS_PER_BLOCK);
    // Key rows of the slots, -1 where invalid: int32 [STAGES][KEYS].
    static constexpr int ROWS = DS + (BACKWARD ? WeightTile::bytes(HEADS_PER_BLOCK) : 0);
    // Forward: partial maxima, later partial sums, [KEY_WARPS][heads]; one factor per head.
    static constexpr int PARTIAL = ROWS + STAGES * KEYS * 4;
    static constexpr int FACTOR = PARTIAL + (BACKWARD ? 0 : KEY_WARPS * HEADS_PER_BLOCK * 4);
    static constexpr int BYTES = FACTOR + (BACKWARD ? 0 : HEADS_PER_BLOCK * 4);

    static constexpr int keys(int stage) { return STAGE + stage * STAGE_BYTES; }
    // Without a V of its own, values are the leading columns of the same rows.
    static constexpr int values(int stage) { return keys(stage) + (V_SEPARATE ? KeyTile::bytes(KEYS) : 0); }
};

constexpr int FORWARD_KEYS = HEADS_PER_BLOCK == 64 && Layout<64, false>::BYTES <= MAX_SHARED_BYTES ? 64 : 32;
constexpr int BACKWARD_KEYS = Layout<32, true>::BYTES <= MAX_SHARED_BYTES ? 32 : 16;
using Forward = Layout<FORWARD_KEYS, false>;
using Backward = Layout<BACKWARD_KEYS, true>;

static_assert(Forward::BYTES <= MAX_SHARED_BYTES && Backward::BYTES <= MAX_SHARED_BYTES, "tiles exceed shared memory");
static_assert(BACKWARD_KEYS % (8 * KEY_WARPS) == 0 && FORWARD_KEYS % (8 * KEY_WARPS) == 0, "8 keys for each warp");
static_assert(ValueTile::bytes(HEADS_PER_BLOCK) <= STAGES * Forward::STAGE_BYTES, "out is staged where keys lay");

// Column tiles of 8 that one warp owns when a product's columns are split over the warps.
constexpr int column_tiles_per_warp(int columns) { return ceil_div(columns / 8, WARPS); }
constexpr int KEY_N8 = column_tiles_per_warp(HEAD_DIM);
constexpr int VALUE_N8 = column_tiles_per_warp(V_DIM);

// ---------------------------------------------------------------- gathering

// Copies this warp's ROWS rows of a tile; lane i < ROWS holds the source row of row first_row + i,
// or -1 for a row of zeros, for which no source address is formed.
template <typename T, int ROWS>
DEVICE void gather_rows(SharedAddress tile, int first_row, const bf16* source, int64_t stride, int32_t row) {
    constexpr int CHUNKS = ROWS * T::CHUNKS;
    UNROLL
    for (int i = lane_id(); i < ceil_div(CHUNKS, 32) * 32; i += 32) {
        const int r = i / T::CHUNKS, chunk = i % T::CHUNKS;
        const int32_t source_row = __shfl_sync(FULL_WARP, row, r % ROWS);
        const bool wanted = source_row >= 0;
        const bf16* from = source + (wanted ? source_row * stride : 0) + chunk * 8;
        if (CHUNKS % 32 == 0 || i < CHUNKS) copy_async_16(tile + T::offset(first_row + r, chunk), from, wanted);
    }
}

// Starts the arrival of one tile, whose slot of this lane holds `index`. Returns whether any slot
// of this warp is valid.
template <typename L, int KEYS>
DEVICE bool gather_tile(const SlotList& list, SharedAddress shared, int stage, int32_t index) {
    constexpr int ROWS = KEYS / WARPS;
    const int first_row = warp_id() * ROWS;
    const int32_t row = lane_id() < ROWS ? list.valid_row(index) : -1;
    int32_t* rows = reinterpret_cast<int32_t*>(dynamic_shared() + L::ROWS) + stage * KEYS;
    if (lane_id() < ROWS) rows[first_row + lane_id()] = row;
    gather_rows<KeyTile, ROWS>(shared + L::keys(stage), first_row, list.k, list.k_stride, row);
    if constexpr (V_SEPARATE)
        gather_rows<ValueTile, ROWS>(shared + L::values(stage), first_row, list.v, list.v_stride, row);
    copy_commit();
    return __any_sync(FULL_WARP, row >= 0);
}

// The slot of a tile that this lane looks up for its warp.
template <int KEYS>
DEVICE int lane_slot(int tile) {
    constexpr int ROWS = KEYS / WARPS;
    return tile * KEYS + warp_id() * ROWS + lane_id() % ROWS;
}

// Copies this block's heads of one token, [heads, COLUMNS]; absent heads become zeros.
template <typename T>
DEVICE void load_heads(SharedAddress tile, const bf16* source, int64_t head_stride, int heads) {
    for (int i = threadIdx.x; i < HEADS_PER_BLOCK * T::CHUNKS; i += THREADS) {
        const int head = i / T::CHUNKS, chunk = i % T::CHUNKS;
        const bool wanted = head < heads;
        copy_async_16(tile + T::offset(head, chunk), source + (wanted ? head * head_stride : 0) + chunk * 8, wanted);
    }
}

// ---------------------------------------------------------------- matrix products out of shared memory

// c[n] += A B^T: 16 rows of tile A from a_row on, N8 * 8 rows of tile B from b_row on, both read
// over the columns [FROM, TO).
template <typename A, typename B, int FROM, int TO, int N8>
DEVICE void multiply_rows(float (&c)[N8][4], SharedAddress a_tile, int a_row, SharedAddress b_tile, int b_row) {
    const int lane = lane_id();
    UNROLL_BY(4)
    for (int k = FROM / 16; k < TO / 16; ++k) {
        uint32_t a[4];
        ldmatrix_x4(a, a_tile + A::offset(a_row + lane % 16, 2 * k + lane / 16));
        if constexpr (N8 == 1) {
            uint32_t b[2];
            ldmatrix_x2(b, b_tile + B::offset(b_row + lane % 8, 2 * k + lane / 8 % 2));
            mma_bf16_16x8x16(c[0], a, b[0], b[1]);
        } else {
            UNROLL
            for (int n = 0; n < N8; n += 2) {
                uint32_t b[4];
                const int row = b_row + 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, b_tile + B::offset(row, 2 * k + lane / 8 % 2));
                mma_bf16_16x8x16(c[n], a, b[0], b[1]);
                mma_bf16_16x8x16(c[n + 1], a, b[2], b[3]);
            }
        }
    }
}

// multiply_rows for two left factors and one right factor, which is loaded once.
template <typename A0, typename A1, typename B, int TO, int N8>
DEVICE void multiply_rows_twice(float (&c0)[N8][4], SharedAddress a0_tile, float (&c1)[N8][4], SharedAddress a1_tile,
                                int a_row, SharedAddress b_tile, int b_row) {
    const int lane = lane_id();
    UNROLL_BY(4)
    for (int k = 0; k < TO / 16; ++k) {
        uint32_t a0[4], a1[4];
        ldmatrix_x4(a0, a0_tile + A0::offset(a_row + lane % 16, 2 * k + lane / 16));
        ldmatrix_x4(a1, a1_tile + A1::offset(a_row + lane % 16, 2 * k + lane / 16));
        if constexpr (N8 == 1) {
            uint32_t b[2];
            ldmatrix_x2(b, b_tile + B::offset(b_row + lane % 8, 2 * k + lane / 8 % 2));
            mma_bf16_16x8x16(c0[0], a0, b[0], b[1]);
            mma_bf16_16x8x16(c1[0], a1, b[0], b[1]);
        } else {
            UNROLL
            for (int n = 0; n < N8; n += 2) {
                uint32_t b[4];
                const int row = b_row + 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, b_tile + B::offset(row, 2 * k + lane / 8 % 2));
                mma_bf16_16x8x16(c0[n], a0, b[0], b[1]);
                mma_bf16_16x8x16(c0[n + 1], a0, b[2], b[3]);
                mma_bf16_16x8x16(c1[n], a1, b[0], b[1]);
                mma_bf16_16x8x16(c1[n + 1], a1, b[2], b[3]);
            }
        }
    }
}

// One 16 x 16 operand A at (row, column), both multiples of 16: of the tile, or of its transpose.
template <typename A, bool TRANSPOSED>
DEVICE void load_a(uint32_t (&a)[4], SharedAddress tile, int row, int column) {
    const int lane = lane_id();
    if constexpr (TRANSPOSED)
        ldmatrix_x4_transposed(a, tile + A::offset(column + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
    else
        ldmatrix_x4(a, tile + A::offset(row + lane % 16, column / 8 + lane / 16));
}

// c[m][n] += (A or A^T) B for the columns of B's 8-wide tiles first_tile + n. DEPTH rows of B.
// Tiles from TILES on do not exist; they are left out (RAGGED: a warp may own some).
template <typename A, bool TRANSPOSED, typename B, int DEPTH, int TILES, bool RAGGED, int M, int N8>
DEVICE void multiply_columns(float (&c)[M][N8][4], SharedAddress a_tile, SharedAddress b_tile, int first_tile) {
    const int lane = lane_id();
    if (RAGGED && first_tile >= TILES) return;
    UNROLL
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[M][4];
        UNROLL
        for (int m = 0; m < M; ++m) load_a<A, TRANSPOSED>(a[m], a_tile, 16 * m, k);
        UNROLL
        for (int n = 0; n < N8; n += 2) {
            if (RAGGED && first_tile + n >= TILES) break;
            uint32_t b[4] = {};
            if (n + 1 < N8) {
                const int tile = first_tile + n + lane / 16;
                ldmatrix_x4_transposed(b, b_tile + B::offset(k + lane % 16, RAGGED ? minimum(tile, TILES - 1) : tile));
            } else {
                uint32_t half[2];
                ldmatrix_x2_transposed(half, b_tile + B::offset(k + lane % 16, first_tile + n));
                b[0] = half[0];
                b[1] = half[1];
            }
            UNROLL
            for (int m = 0; m < M; ++m) {
                mma_bf16_16x8x16(c[m][n], a[m], b[0], b[1]);
                if (n + 1 < N8 && !(RAGGED && first_tile + n + 1 >= TILES))
                    mma_bf16_16x8x16(c[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Rounds a block's accumulators, split over the warps by columns, into a tile of bf16. Row r is
// multiplied by factor(r).
template <typename T, int N8, typename Factor>
DEVICE void stage_heads(SharedAddress tile, const float (&c)[M_TILES][N8][4], Factor factor) {
    const int g = lane_id() / 4, t = lane_id() % 4, first_tile = warp_id() * N8;
    UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        const int row = 16 * m + g;
        const float low = factor(row), high = factor(row + 8);
        UNROLL
        for (int n = 0; n < N8; ++n) {
            if (WARPS * N8 != T::CHUNKS && first_tile + n >= T::CHUNKS) break;
            const int chunk = first_tile + n;
            store_shared(tile + T::offset(row, chunk) + 4 * t, pack_bf16(c[m][n][0] * low, c[m][n][1] * low));
            store_shared(tile + T::offset(row + 8, chunk) + 4 * t, pack_bf16(c[m][n][2] * high, c[m][n][3] * high));
        }
    }
}

// Writes a staged tile to this block's heads of one token, 16 bytes a thread.
template <typename T>
DEVICE void store_heads(bf16* target, int64_t head_stride, SharedAddress tile, int heads) {
    for (int i = threadIdx.x; i < heads * T::CHUNKS; i += THREADS) {
        const int head = i / T::CHUNKS, chunk = i % T::CHUNKS;
        store_vec16_streaming(target + head * head_stride + chunk * 8, load_shared_vec16(tile + T::offset(head, chunk)));
    }
}

// ---------------------------------------------------------------- forward

SHARED_MEMORY(sparse_attention_forward, Forward::BYTES)

constexpr int FORWARD_N8 = FORWARD_KEYS / KEY_WARPS / 8;  // score tiles of 8 keys a warp

// A warp's place among the scores, and this lane's rows in it: first_row + g and first_row + g + 8.
struct ScorePlace {
    int head_warp, key_warp;
    int row;        // the lane's first head row within the block; the other is row + 8
    int first_key;  // the warp's first slot within the tile
};
template <int N8>
DEVICE ScorePlace score_place() {
    const int head_warp = warp_id() / KEY_WARPS, key_warp = warp_id() % KEY_WARPS;
    return ScorePlace{head_warp, key_warp, 16 * head_warp + lane_id() / 4, key_warp * N8 * 8};
}

// The running softmax of this lane's two head rows, in base 2 and without the sink. `maximum` is
// the same in all lanes that share a row; `sum` covers this lane's own slots only.
struct RunningSoftmax {
    float maximum[2] = {-INFINITY_F32, -INFINITY_F32};
    float sum[2] = {0.0f, 0.0f};
};

// Scores to base-2 logits, -inf in invalid slots, and the warp's maximum of each row to `partial`.
DEVICE void mask_and_reduce(float (&s)[FORWARD_N8][4], const ScorePlace& place, const int32_t* rows, float* partial,
                            float scale_log2) {
    const int t = lane_id() % 4;
    float largest[2] = {-INFINITY_F32, -INFINITY_F32};
    UNROLL
    for (int n = 0; n < FORWARD_N8; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const bool valid = rows[place.first_key + 8 * n + 2 * t + i % 2] >= 0;
            s[n][i] = valid ? s[n][i] * scale_log2 : -INFINITY_F32;
            largest[i / 2] = maximum_f32(largest[i / 2], s[n][i]);
        }
    }
    UNROLL
    for (int half = 0; half < 2; ++half) {
        largest[half] = maximum_f32(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 1));
        largest[half] = maximum_f32(largest[half], __shfl_xor_sync(FULL_WARP, largest[half], 2));
        if (t == 0) partial[place.key_warp * HEADS_PER_BLOCK + place.row + 8 * half] = largest[half];
    }
}

// Takes the tile into the running softmax: the weights exp2(z - maximum) go to the tile of P in
// bf16 and to the sum in fp32, and the factor for what was accumulated before goes to `factor`.
DEVICE void update_softmax(RunningSoftmax& state, const float (&s)[FORWARD_N8][4], const ScorePlace& place,
                           const float* partial, float* factor, SharedAddress p_tile) {
    const int t = lane_id() % 4;
    float shift[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = place.row + 8 * half;
        float largest = state.maximum[half];
        UNROLL
        for (int w = 0; w < KEY_WARPS; ++w) largest = maximum_f32(largest, partial[w * HEADS_PER_BLOCK + row]);
        shift[half] = subtrahend(largest);
        const float rescale = exp2_approx(state.maximum[half] - shift[half]);
        state.maximum[half] = largest;
        state.sum[half] *= rescale;
        if (t == 0 && place.key_warp == 0) factor[row] = rescale;
    }
    UNROLL
    for (int n = 0; n < FORWARD_N8; ++n) {
        float p[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(s[n][i] - shift[i / 2]);
            state.sum[i / 2] += p[i];
        }
        const int chunk = place.first_key / 8 + n;
        store_shared(p_tile + Forward::WeightTile::offset(place.row, chunk) + 4 * t, pack_bf16(p[0], p[1]));
        store_shared(p_tile + Forward::WeightTile::offset(place.row + 8, chunk) + 4 * t, pack_bf16(p[2], p[3]));
    }
}

// Multiplies what a warp has accumulated by its rows' factors. Most tiles raise no maximum.
DEVICE void rescale_output(float (&out)[M_TILES][VALUE_N8][4], const float* factor) {
    const int g = lane_id() / 4;
    bool changed = false;
    float rescale[M_TILES][2];
    UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            rescale[m][half] = factor[16 * m + g + 8 * half];
            changed = changed || rescale[m][half] != 1.0f;
        }
    }
    if (!__any_sync(FULL_WARP, changed)) return;
    UNROLL
    for (int m = 0; m < M_TILES; ++m)
        UNROLL
        for (int n = 0; n < VALUE_N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) out[m][n][i] *= rescale[m][i / 2];
}

// Sums each row over lanes and warps, writes lse and max_logits, and leaves 1 / (sum + sink's
// share) in `factor`. Rows without a valid slot get factor 0, whatever the sink.
DEVICE void finish_softmax(const RunningSoftmax& state, const ScorePlace& place, float* partial, float* factor,
                           const SparseAttentionForwardParams& params, const Work& work) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (lane_id() % 4 == 0) partial[place.key_warp * HEADS_PER_BLOCK + place.row + 8 * half] = sum;
        if (lane_id() % 4 == 0 && place.key_warp == 0) factor[place.row + 8 * half] = state.maximum[half];
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= HEADS_PER_BLOCK) return;
    const float row_maximum = factor[row];
    float sum = 0.0f;
    UNROLL
    for (int w = 0; w < KEY_WARPS; ++w) sum += partial[w * HEADS_PER_BLOCK + row];
    const bool empty = sum == 0.0f;
    if (row >= work.heads) {
        factor[row] = 0.0f;
        return;
    }
    // A sink near the largest fp32 becomes inf in base 2 and its share inf: out is then 0, as it should be.
    const float sink_log2 = params.sink ? params.sink[work.first_head + row] * LOG2_E : -INFINITY_F32;
    const float sink_share = exp2_approx(sink_log2 - subtrahend(row_maximum));
    factor[row] = empty ? 0.0f : 1.0f / (sum + sink_share);
    const int64_t at = work.token * params.num_heads + work.first_head + row;
    params.lse[at] = empty ? INFINITY_F32 : (row_maximum + log2_approx(sum)) * LN_2;
    params.max_logits[at] = empty ? -INFINITY_F32 : row_maximum * LN_2;
}

KERNEL(sparse_attention_forward, SparseAttentionForwardParams, THREADS) {
    const Work work = block_work(blockIdx.x, params.num_heads);
    const SlotList list = slot_list(params, work.token);
    const ScorePlace place = score_place<FORWARD_N8>();
    const SharedAddress shared = shared_address(dynamic_shared());
    const auto* all_rows = reinterpret_cast<const int32_t*>(dynamic_shared() + Forward::ROWS);
    auto* partial = reinterpret_cast<float*>(dynamic_shared() + Forward::PARTIAL);
    auto* factor = reinterpret_cast<float*>(dynamic_shared() + Forward::FACTOR);
    const float scale_log2 = params.softmax_scale * LOG2_E;

    RunningSoftmax state;
    float out[M_TILES][VALUE_N8][4];
    UNROLL
    for (int m = 0; m < M_TILES; ++m)
        UNROLL
        for (int n = 0; n < VALUE_N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;

    const int tiles = ceil_div(list.length, FORWARD_KEYS);
    bool arriving = false;  // does the tile on its way hold a valid slot of this warp?
    int32_t next_index = -1;
    if (tiles > 0) {
        const bf16* q = params.q + work.token * params.q_token_stride + work.first_head * params.q_head_stride;
        load_heads<KeyTile>(shared + Forward::Q, q, params.q_head_stride, work.heads);
        next_index = list.stored_index(lane_slot<FORWARD_KEYS>(0));
        arriving = gather_tile<Forward, FORWARD_KEYS>(list, shared, 0, next_index);
        next_index = list.stored_index(lane_slot<FORWARD_KEYS>(1));
    }
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        copy_wait<0>();
        // Past this barrier the tile is there for everyone, and nobody reads the previous one any more.
        const bool any_valid = __syncthreads_or(arriving);
        if (tile + 1 < tiles) {
            arriving = gather_tile<Forward, FORWARD_KEYS>(list, shared, 1 - stage, next_index);
            next_index = list.stored_index(lane_slot<FORWARD_KEYS>(tile + 2));
        }
        if (!any_valid) continue;

        float s[FORWARD_N8][4] = {};
        multiply_rows<KeyTile, KeyTile, 0, HEAD_DIM>(s, shared + Forward::Q, 16 * place.head_warp,
                                                     shared + Forward::keys(stage), place.first_key);
        mask_and_reduce(s, place, all_rows + stage * FORWARD_KEYS, partial, scale_log2);
        __syncthreads();  // every warp's maxima are there
        update_softmax(state, s, place, partial, factor, shared + Forward::P);
        __syncthreads();  // P and the rescaling factors are there
        rescale_output(out, factor);
        multiply_columns<Forward::WeightTile, false, GatheredValueTile, FORWARD_KEYS, V_DIM / 8,
                         WARPS * VALUE_N8 != V_DIM / 8>(out, shared + Forward::P, shared + Forward::values(stage),
                                                        warp_id() * VALUE_N8);
    }
    __syncthreads();  // the last tile's factors and keys are no longer read
    finish_softmax(state, place, partial, factor, params, work);
    __syncthreads();  // the rows' normalisers are there
    stage_heads<ValueTile>(shared + Forward::STAGE, out, [&](int row) { return factor[row]; });
    __syncthreads();  // out is staged
    bf16* target = params.out + work.token * params.out_token_stride + work.first_head * params.out_head_stride;
    store_heads<ValueTile>(target, params.out_head_stride, shared + Forward::STAGE, work.heads);
}

// ---------------------------------------------------------------- backward: per-row terms

constexpr int ROW_THREADS = 256;
constexpr int ROWS_PER_BLOCK = ROW_THREADS / WARP_SIZE;

// delta = sum_d out*dout in fp32, and sink_term = -exp(sink - L)*delta, both [num_tokens, num_heads].
// One warp per (token, head); grid ceil(num_tokens*num_heads / 8). sink and sink_terms may be null, both or neither.
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
PARAMS_LAYOUT(SparseAttentionDeltaParams, out, out_token_stride, out_head_stride, dout, dout_token_stride,
              dout_head_stride, lse, sink, delta, sink_terms, num_tokens, num_heads)

// Products of two packed pairs, added to `sum`.
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
    // A row without valid slots is 0 whatever its saved out holds: a select, since NaN * 0 is NaN.
    const float delta = is_infinite(lse) ? 0.0f : sum;
    params.delta[at] = delta;
    if (params.sink == nullptr) return;
    const float sink_share = share_beside_sink(params.sink[head] * LOG2_E, lse * LOG2_E);
    params.sink_terms[at] = is_infinite(lse) ? 0.0f : -sink_share * delta;
}

// dsink[h] = sum over tokens of sink_terms[t, h], each head by one block in one order.
// Grid ceil(num_heads / 32).
struct SparseAttentionDsinkParams {
    const float* sink_terms;
    float* dsink;
    int32_t num_tokens;
    int32_t num_heads;
};
PARAMS_LAYOUT(SparseAttentionDsinkParams, sink_terms, dsink, num_tokens, num_heads)

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

// ---------------------------------------------------------------- backward: accumulator rows

// Rows of fp32 set to 0. One warp per row; grid ceil(num_rows / 8). width and stride are multiples of 4.
struct SparseAttentionZeroParams {
    float* target;
    int64_t target_stride;
    int64_t num_rows;
    int32_t width;
};
PARAMS_LAYOUT(SparseAttentionZeroParams, target, target_stride, num_rows, width)

KERNEL(sparse_attention_zero, SparseAttentionZeroParams, ROW_THREADS) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (row >= params.num_rows) return;
    float* target = params.target + row * params.target_stride;
    for (int column = 4 * lane_id(); column < params.width; column += 4 * WARP_SIZE)
        store_vec16(target + column, Vec16{{0, 0, 0, 0}});
}

// Rows of fp32 rounded to bf16, once. One warp per row; grid ceil(num_rows / 8). width and strides are
// multiples of 8.
struct SparseAttentionCastParams {
    const float* source;
    int64_t source_stride;
    bf16* target;
    int64_t target_stride;
    int64_t num_rows;
    int32_t width;
};
PARAMS_LAYOUT(SparseAttentionCastParams, source, source_stride, target, target_stride, num_rows, width)

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

// ---------------------------------------------------------------- backward: sums in one order

// The inverted index of a chunk of tokens: for each key the slots that name it. Slot j of the chunk's token t is entry
// t * topk + j, below 2^31; invalid slots are nobody's. Room and places are given out by integer atomics: where a list
// lies, and its order before sparse_attention_order, differ from run to run; what is summed does not depend on either.
// counts is [num_keys + 1] and zero before: the lengths of the lists, and last how many entries have room.
// ends is [num_keys]: where a list's room begins, and once it is filled, where it ends. Lists lie in entries in
// whatever order, in ordered in ascending order, both [num_tokens * topk].
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
PARAMS_LAYOUT(SparseAttentionIndexParams, indices, indices_stride, topk_length, counts, ends, entries, ordered,
              num_tokens, num_keys, topk)

// This thread's number in the grid.
DEVICE int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * ROW_THREADS + threadIdx.x; }

// The key that an entry names, -1 where the slot is invalid or there is no such entry.
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

// One thread per key; grid ceil(num_keys / 256). A warp takes room for its 32 keys at once.
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

// Up to this many entries each one's place is counted by comparing it with all others: n^2 / 32 steps of a warp.
constexpr int32_t RANKED_ENTRIES = 256;
// Longer lists pass through a bitmap of a window of entries at a time.
constexpr int WINDOW_WORDS = 256;
constexpr uint32_t WINDOW_ENTRIES = 32 * WINDOW_WORDS;

// Puts each entry of a warp's list where its rank is. No entry is there twice.
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

// Marks a warp's entries in a bitmap, window by window, and writes down the marks in their order.
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

// target[key] += the rows of the key's entries, in ascending order of entries and, for each, of head blocks. A row is
// added after the other, so chunks of any size give the same sum, bit for bit. rows is [head_blocks, num_entries,
// width], of which only rows of valid slots are read. One warp per (key, 128 columns); grid
// ceil(num_keys*ceil(width/128) / 8). width and stride are multiples of 4.
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
PARAMS_LAYOUT(SparseAttentionSumParams, rows, counts, ends, ordered, target, target_stride, num_entries, head_blocks,
              num_keys, width)

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
        // Only the next entry's first row moves the list on, so that nothing is read past its end.
        head_block = head_block + 1 == params.head_blocks ? 0 : head_block + 1;
        if (head_block == 0 && term + 1 < terms) ++list;
    }
    store_vec16(target, Vec16{{__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                               __float_as_uint(sum[3])}});
}

// ---------------------------------------------------------------- backward: dq, dk, dv

SHARED_MEMORY(sparse_attention_backward, Backward::BYTES)

constexpr int BACKWARD_N8 = BACKWARD_KEYS / KEY_WARPS / 8;
constexpr int KEY_M_TILES = BACKWARD_KEYS / 16;
// Column tiles of dk and dv that a warp holds at a time, beside the accumulators of dq.
constexpr int SCATTER_N8 = KEY_N8 <= 8 ? 4 : 2;

// Scores and dP of the tile to the operands P and dS. The product P*(dP - delta) is formed in fp32;
// the scale is left to the accumulators of dq and dk.
DEVICE void write_weights(const float (&s)[BACKWARD_N8][4], const float (&dp)[BACKWARD_N8][4],
                          const RowState (&state)[2], const ScorePlace& place, const int32_t* rows,
                          SharedAddress shared, float scale_log2) {
    using W = Backward::WeightTile;
    const int t = lane_id() % 4;
    UNROLL
    for (int n = 0; n < BACKWARD_N8; ++n) {
        float p[4], ds[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const RowState& row = state[i / 2];
            const bool valid = rows[place.first_key + 8 * n + 2 * t + i % 2] >= 0;
            const float without_sink = valid ? exp2_approx(s[n][i] * scale_log2 - row.lse_log2) : 0.0f;
            p[i] = without_sink * row.share;
            ds[i] = p[i] * (dp[n][i] - row.delta) + without_sink * row.dlse;
        }
        const int low = W::offset(place.row, place.first_key / 8 + n) + 4 * t;
        const int high = W::offset(place.row + 8, place.first_key / 8 + n) + 4 * t;
        store_shared(shared + Backward::P + low, pack_bf16(p[0], p[1]));
        store_shared(shared + Backward::P + high, pack_bf16(p[2], p[3]));
        store_shared(shared + Backward::DS + low, pack_bf16(ds[0], ds[1]));
        store_shared(shared + Backward::DS + high, pack_bf16(ds[2], ds[3]));
    }
}

// Gives a warp's columns to the rows that the tile's slots name, or to their own, of which slot 0's is first_row. Two
// neighbouring lanes trade halves, so that each gives four consecutive floats of one row. Invalid slots are left alone.
template <int N8, int TILES>
DEVICE void scatter(const float (&c)[KEY_M_TILES][N8][4], float* target, int64_t stride, const int32_t* rows,
                    int64_t first_row, int first_tile) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    const bool odd = t % 2 != 0;
    UNROLL
    for (int m = 0; m < KEY_M_TILES; ++m) {
        const int slot = 16 * m + g + (odd ? 8 : 0);
        const int32_t row = rows[slot];
        float* row_target = target + gradient_row(row, first_row + slot) * stride + 8 * first_tile + t / 2 * 4;
        UNROLL
        for (int n = 0; n < N8; ++n) {
            if (first_tile + n >= TILES) break;
            const float(&own)[4] = c[m][n];
            const float first = __shfl_xor_sync(FULL_WARP, odd ? own[0] : own[2], 1);
            const float second = __shfl_xor_sync(FULL_WARP, odd ? own[1] : own[3], 1);
            if (row < 0) continue;
            float* at = row_target + 8 * n;
            if (odd) give_vec4(at, first, second, own[2], own[3]);
            else give_vec4(at, own[0], own[1], first, second);
        }
    }
}

template <int N8>
DEVICE void clear(float (&c)[KEY_M_TILES][N8][4]) {
    UNROLL
    for (int m = 0; m < KEY_M_TILES; ++m)
        UNROLL
        for (int n = 0; n < N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) c[m][n][i] = 0.0f;
}

// dk += softmax_scale * dS^T q, and P^T dout in the same columns where V is part of K. A warp takes
// its column tiles a few at a time, from BASE on.
template <int BASE>
DEVICE void scatter_key_gradients(const SparseAttentionBackwardParams& params, SharedAddress shared,
                                  const int32_t* rows, int64_t first_row) {
    if constexpr (BASE < KEY_N8) {
        constexpr int N8 = minimum(SCATTER_N8, KEY_N8 - BASE);
        constexpr int TILES = HEAD_DIM / 8;
        using W = Backward::WeightTile;
        const int first_tile = warp_id() * KEY_N8 + BASE;
        float c[KEY_M_TILES][N8][4];
        clear(c);
        multiply_columns<W, true, KeyTile, HEADS_PER_BLOCK, TILES, WARPS * KEY_N8 != TILES>(
            c, shared + Backward::DS, shared + Backward::Q, first_tile);
        UNROLL
        for (int m = 0; m < KEY_M_TILES; ++m)
            UNROLL
            for (int n = 0; n < N8; ++n)
                UNROLL
                for (int i = 0; i < 4; ++i) c[m][n][i] *= params.softmax_scale;
        if constexpr (!V_SEPARATE)
            multiply_columns<W, true, ValueTile, HEADS_PER_BLOCK, V_DIM / 8, WARPS * KEY_N8 != V_DIM / 8>(
                c, shared + Backward::P, shared + Backward::DOUT, first_tile);
        scatter<N8, TILES>(c, params.dk, params.dk_stride, rows, first_row, first_tile);
        scatter_key_gradients<BASE + N8>(params, shared, rows, first_row);
    }
}

// dv += P^T dout, for a V of its own.
template <int BASE>
DEVICE void scatter_value_gradients(const SparseAttentionBackwardParams& params, SharedAddress shared,
                                    const int32_t* rows, int64_t first_row) {
    if constexpr (BASE < VALUE_N8) {
        constexpr int N8 = minimum(SCATTER_N8, VALUE_N8 - BASE);
        constexpr int TILES = V_DIM / 8;
        const int first_tile = warp_id() * VALUE_N8 + BASE;
        float c[KEY_M_TILES][N8][4];
        clear(c);
        multiply_columns<Backward::WeightTile, true, ValueTile, HEADS_PER_BLOCK, TILES, WARPS * VALUE_N8 != TILES>(
            c, shared + Backward::P, shared + Backward::DOUT, first_tile);
        scatter<N8, TILES>(c, params.dv, params.dv_stride, rows, first_row, first_tile);
        scatter_value_gradients<BASE + N8>(params, shared, rows, first_row);
    }
}

// s += q k^T and dp += dout v^T for this warp's heads and keys.
DEVICE void scores_and_gradients(float (&s)[BACKWARD_N8][4], float (&dp)[BACKWARD_N8][4], SharedAddress shared,
                                 int stage, const ScorePlace& place) {
    const int head = 16 * place.head_warp;
    const SharedAddress q = shared + Backward::Q, dout = shared + Backward::DOUT;
    const SharedAddress keys = shared + Backward::keys(stage), values = shared + Backward::values(stage);
    if constexpr (V_SEPARATE) {
        multiply_rows<KeyTile, KeyTile, 0, HEAD_DIM>(s, q, head, keys, place.first_key);
        multiply_rows<ValueTile, ValueTile, 0, V_DIM>(dp, dout, head, values, place.first_key);
    } else {
        multiply_rows_twice<KeyTile, ValueTile, KeyTile, V_DIM>(s, q, dp, dout, head, keys, place.first_key);
        multiply_rows<KeyTile, KeyTile, V_DIM, HEAD_DIM>(s, q, head, keys, place.first_key);
    }
}

KERNEL(sparse_attention_backward, SparseAttentionBackwardParams, THREADS) {
    const Work work = block_work(blockIdx.x, params.num_heads);
    const SlotList list = slot_list(params, work.token);
    const ScorePlace place = score_place<BACKWARD_N8>();
    const SharedAddress shared = shared_address(dynamic_shared());
    const auto* all_rows = reinterpret_cast<const int32_t*>(dynamic_shared() + Backward::ROWS);
    const float scale_log2 = params.softmax_scale * LOG2_E;

    float dq[M_TILES][KEY_N8][4];
    UNROLL
    for (int m = 0; m < M_TILES; ++m)
        UNROLL
        for (int n = 0; n < KEY_N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) dq[m][n][i] = 0.0f;

    const int tiles = ceil_div(list.length, BACKWARD_KEYS);
    const RowState state[2] = {row_state(params, work, place.row), row_state(params, work, place.row + 8)};
    bool arriving = false;
    int32_t next_index = -1;
    if (tiles > 0) {
        const bf16* q = params.q + work.token * params.q_token_stride + work.first_head * params.q_head_stride;
        const bf16* dout =
            params.dout + work.token * params.dout_token_stride + work.first_head * params.dout_head_stride;
        load_heads<KeyTile>(shared + Backward::Q, q, params.q_head_stride, work.heads);
        load_heads<ValueTile>(shared + Backward::DOUT, dout, params.dout_head_stride, work.heads);
        next_index = list.stored_index(lane_slot<BACKWARD_KEYS>(0));
        arriving = gather_tile<Backward, BACKWARD_KEYS>(list, shared, 0, next_index);
        next_index = list.stored_index(lane_slot<BACKWARD_KEYS>(1));
    }
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES;
        copy_wait<0>();
        // Past this barrier the tile is there for everyone, and nobody reads the previous one any more.
        const bool has_valid = __syncthreads_or(arriving);
        if (tile + 1 < tiles) {
            arriving = gather_tile<Backward, BACKWARD_KEYS>(list, shared, 1 - stage, next_index);
            next_index = list.stored_index(lane_slot<BACKWARD_KEYS>(tile + 2));
        }
        if (!has_valid) continue;

        const int32_t* rows = all_rows + stage * BACKWARD_KEYS;
        float s[BACKWARD_N8][4] = {}, dp[BACKWARD_N8][4] = {};
        scores_and_gradients(s, dp, shared, stage, place);
        write_weights(s, dp, state, place, rows, shared, scale_log2);
        __syncthreads();  // P and dS are there
        multiply_columns<Backward::WeightTile, false, KeyTile, BACKWARD_KEYS, HEAD_DIM / 8,
                         WARPS * KEY_N8 != HEAD_DIM / 8>(dq, shared + Backward::DS, shared + Backward::keys(stage),
                                                         warp_id() * KEY_N8);
        const int64_t first_row = first_own_row(params, work) + tile * BACKWARD_KEYS;
        scatter_key_gradients<0>(params, shared, rows, first_row);
        if constexpr (V_SEPARATE) scatter_value_gradients<0>(params, shared, rows, first_row);
    }
    __syncthreads();  // q is no longer read by anyone; dq is staged in its place
    stage_heads<KeyTile>(shared + Backward::Q, dq, [&](int) { return params.softmax_scale; });
    __syncthreads();  // dq is staged
    bf16* target = params.dq + work.token * params.dq_token_stride + work.first_head * params.dq_head_stride;
    store_heads<KeyTile>(target, params.dq_head_stride, shared + Backward::Q, work.heads);
}
