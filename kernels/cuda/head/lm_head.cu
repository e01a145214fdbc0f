// Logits of sampled rows: hidden states times the head's weights (inference 12.1).
//
//     logits[i, v] = sum over k of hidden[rows[i], k] weight[v, k]     -inf if rows[i] is no token
//
// bf16 operands, accumulated in fp32 by mma.sync.m16n8k16. Without `rows` every token is sampled,
// in order. A logit does not depend on the other rows: both tiled kernels sum in the order of k.
//
// A block takes 128 rows of the weights and a tile of sampled rows, 16 (lm_head_few) or 128
// (lm_head_many). It goes along k in k-blocks of 64 with four stages, three of them in flight
// (cp.async). Weights are the M side and tokens the N side, so that few tokens fill an instruction
// of N = 8. Blocks of one weight tile are consecutive, so that the second reads the weights from
// L2. lm_head_scalar takes tensors that do not allow 16-byte accesses: a warp takes a row of the
// weights and eight tokens, in fp32.
//
// Floor: with few rows the weights' bytes, 129280 x 4096 250 us, x 7168 437 us at 4.24 TB/s. With
// many rows 2 * 129280 hidden_size FLOPs a row, 9.6 ms for 4096 rows of 7168 at 790 TFLOP/s.
// Measured on one H200, x 7168: 1 and 16 rows 434 us (the floor), 128 rows 871 us, 4096 rows 26.2
// ms (290 TFLOP/s). What limits it: the rate of mma.sync, from 128 rows on.
//
// Launch: a block for each tile of rows and of weights; tiles of rows vary fastest.
// Estimates: kernels/docs/lm_head.md.
#include "async_copy.h"
#include "elements.h"
#include "math.h"
#include "tiles.h"

constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
constexpr int TILE_VOCAB = 128;
constexpr int DEPTH = 64;   // of k in a step
constexpr int STAGES = 4;
constexpr int PIECE = 8;    // of k in 16 bytes
constexpr int PIECES = DEPTH / PIECE;
constexpr int SCALAR_ROWS = 8, SCALAR_VOCAB = 4;

struct LmHeadParams {
    const bf16* hidden; int64_t hidden_token_stride;  // [num_tokens, hidden_size]; strides in elements
    const bf16* weight; int64_t weight_vocab_size_stride;  // [vocab_size, hidden_size]
    const int32_t* rows;                              // [num_rows], or nullptr where every token is sampled
    float* logits; int64_t logits_row_stride;         // [num_rows, vocab_size]
    int64_t num_tokens;
    int64_t num_rows;
    int32_t vocab_size;
    int32_t hidden_size;
};

template <int TILE_ROWS>
constexpr int STAGE_BYTES = Tile<DEPTH>::bytes(TILE_VOCAB + TILE_ROWS);

SHARED_MEMORY(lm_head_few, STAGES * STAGE_BYTES<16>)
SHARED_MEMORY(lm_head_many, STAGES * STAGE_BYTES<128>)

constexpr int64_t NO_TOKEN = -1;

// The token of a sampled row.
DEVICE int64_t token_of(const LmHeadParams& params, int64_t row) {
    if (row >= params.num_rows) return NO_TOKEN;
    const int64_t token = params.rows ? params.rows[row] : row;
    return token >= 0 && token < params.num_tokens ? token : NO_TOKEN;
}

// What a thread copies in each step: one piece of every ROWS_A_TURN-th row of both tiles.
constexpr int ROWS_A_TURN = THREADS / PIECES;

template <int TILE_ROWS>
struct Sources {
    static constexpr int OF_VOCAB = TILE_VOCAB / ROWS_A_TURN, OF_ROWS = ceil_div(TILE_ROWS, ROWS_A_TURN);
    const bf16* weight[OF_VOCAB];
    const bf16* hidden[OF_ROWS];  // nullptr: zeros
};

template <int TILE_ROWS>
DEVICE Sources<TILE_ROWS> sources_of(const LmHeadParams& params, int64_t first_vocab, int64_t first_row) {
    using Of = Sources<TILE_ROWS>;
    Of sources;
    const int own = threadIdx.x / PIECES;
    UNROLL
    for (int turn = 0; turn < Of::OF_VOCAB; ++turn) {
        const int64_t vocab = first_vocab + own + turn * ROWS_A_TURN;
        sources.weight[turn] =
            vocab < params.vocab_size ? params.weight + vocab * params.weight_vocab_size_stride : nullptr;
    }
    UNROLL
    for (int turn = 0; turn < Of::OF_ROWS; ++turn) {
        const int row = own + turn * ROWS_A_TURN;
        const int64_t token = row < TILE_ROWS ? token_of(params, first_row + row) : NO_TOKEN;
        sources.hidden[turn] = token != NO_TOKEN ? params.hidden + token * params.hidden_token_stride : nullptr;
    }
    return sources;
}

// Starts the copies of a step. Zeros past the last k, and where no row exists.
template <int TILE_ROWS>
DEVICE void load_step(const Sources<TILE_ROWS>& sources, SharedAddress stage, int step, int hidden_size) {
    using Of = Sources<TILE_ROWS>;
    const int own = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, k = step * DEPTH + piece * PIECE;
    const bool inside = k < hidden_size;
    UNROLL
    for (int turn = 0; turn < Of::OF_VOCAB; ++turn) {
        const bool wanted = inside && sources.weight[turn];
        const SharedAddress target = stage + Tile<DEPTH>::offset(own + turn * ROWS_A_TURN, piece);
        copy_async_16(target, wanted ? sources.weight[turn] + k : nullptr, wanted);
    }
    UNROLL
    for (int turn = 0; turn < Of::OF_ROWS; ++turn) {
        const int row = own + turn * ROWS_A_TURN;
        if (row >= TILE_ROWS) break;
        const bool wanted = inside && sources.hidden[turn];
        const SharedAddress target = stage + Tile<DEPTH>::offset(TILE_VOCAB + row, piece);
        copy_async_16(target, wanted ? sources.hidden[turn] + k : nullptr, wanted);
    }
}

// Stores a warp's fragments. Each fragment column is a token; eight lanes hold eight consecutive
// logits of it.
template <int M, int N8>
DEVICE void store_logits(const LmHeadParams& params, const float (&c)[M][N8][4], int64_t first_vocab,
                         int64_t first_row) {
    UNROLL
    for (int n = 0; n < N8; ++n) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const int64_t row = first_row + 8 * n + 2 * (lane_id() % 4) + half;
            if (row >= params.num_rows) continue;
            const bool is_token = token_of(params, row) != NO_TOKEN;
            UNROLL
            for (int m = 0; m < 2 * M; ++m) {
                const int64_t vocab = first_vocab + 8 * m + lane_id() / 4;
                if (vocab < params.vocab_size)
                    params.logits[row * params.logits_row_stride + vocab] =
                        is_token ? c[m / 2][n][m % 2 * 2 + half] : -INFINITY_F32;
            }
        }
    }
}

// A warp takes 16 M rows of the weights and 8 N8 tokens. WARPS_OF_ROWS warps are side by side
// along the tokens.
template <int M, int N8, int WARPS_OF_ROWS>
DEVICE void multiply_tile(const LmHeadParams& params) {
    constexpr int TILE_ROWS = 8 * N8 * WARPS_OF_ROWS;
    static_assert(16 * M * WARPS / WARPS_OF_ROWS == TILE_VOCAB, "warps take the whole tile");
    const int64_t row_tiles = ceil_div<int64_t>(params.num_rows, TILE_ROWS);
    const int64_t first_vocab = blockIdx.x / row_tiles * TILE_VOCAB, first_row = blockIdx.x % row_tiles * TILE_ROWS;
    const int warp_vocab = warp_id() / WARPS_OF_ROWS * 16 * M, warp_row = warp_id() % WARPS_OF_ROWS * 8 * N8;
    const SharedAddress shared = shared_address(dynamic_shared());
    const Sources<TILE_ROWS> sources = sources_of<TILE_ROWS>(params, first_vocab, first_row);
    const int steps = ceil_div(params.hidden_size, DEPTH);
    float c[M][N8][4] = {};
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps)
            load_step<TILE_ROWS>(sources, shared + step * STAGE_BYTES<TILE_ROWS>, step, params.hidden_size);
        copy_commit();
    }
    for (int step = 0; step < steps; ++step) {
        copy_wait<STAGES - 2>();
        // All copies of this step have arrived, and every warp has finished with the stage that is
        // filled next.
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps)
            load_step<TILE_ROWS>(sources, shared + next % STAGES * STAGE_BYTES<TILE_ROWS>, next, params.hidden_size);
        copy_commit();
        const SharedAddress stage = shared + step % STAGES * STAGE_BYTES<TILE_ROWS>;
        multiply_row_tiles<DEPTH>(c, stage, warp_vocab, stage, TILE_VOCAB + warp_row);
    }
    store_logits(params, c, first_vocab + warp_vocab, first_row + warp_row);
}

KERNEL(lm_head_few, LmHeadParams, THREADS) { multiply_tile<1, 2, 1>(params); }
KERNEL(lm_head_many, LmHeadParams, THREADS) { multiply_tile<2, 8, 2>(params); }

KERNEL(lm_head_scalar, LmHeadParams, SCALAR_VOCAB * WARP_SIZE) {
    const int64_t row_tiles = ceil_div<int64_t>(params.num_rows, SCALAR_ROWS);
    const int64_t vocab = blockIdx.x / row_tiles * SCALAR_VOCAB + warp_id();
    const int64_t first_row = blockIdx.x % row_tiles * SCALAR_ROWS;
    if (vocab >= params.vocab_size) return;
    const bf16* const weight = params.weight + vocab * params.weight_vocab_size_stride;
    const bf16* hidden[SCALAR_ROWS];
    float sums[SCALAR_ROWS] = {};
    UNROLL
    for (int row = 0; row < SCALAR_ROWS; ++row) {
        const int64_t token = token_of(params, first_row + row);
        hidden[row] = token != NO_TOKEN ? params.hidden + token * params.hidden_token_stride : nullptr;
    }
    for (int k = lane_id(); k < params.hidden_size; k += WARP_SIZE) {
        const float factor = to_float(weight[k]);
        UNROLL
        for (int row = 0; row < SCALAR_ROWS; ++row)
            if (hidden[row]) sums[row] = fused_multiply_add(to_float(hidden[row][k]), factor, sums[row]);
    }
    UNROLL
    for (int row = 0; row < SCALAR_ROWS; ++row) {
        const float sum = warp_sum(sums[row]);
        if (lane_id() == 0 && first_row + row < params.num_rows)
            params.logits[(first_row + row) * params.logits_row_stride + vocab] = hidden[row] ? sum : -INFINITY_F32;
    }
}
