// Sparse attention over gathered keys with a per-head sink: the backward (training 3 and 4). With
// lse and P of sparse_attention.cu, and L = log(exp(lse) + exp(sink_h)),
//
//     delta    = out . dout            dP = dout . v       dS = P (dP - delta) + exp(z - lse) dlse
//     dq       = softmax_scale * sum_j dS k                 dk[i] += softmax_scale * dS q
//     dv[i]   += P dout                dsink_h = - sum_t exp(sink_h - L) delta
//
// A row without a valid slot has dq = 0 and adds to no other gradient.
//
// A block takes a token and HEADS_PER_BLOCK heads: dq, and fp32 atomics to dk and dv. With
// DETERMINISTIC it stores a row for each slot, which sparse_attention_sum adds to the key's row.
// sparse_attention_sums.cu has delta and dsink. sparse_attention_tiles.h has the division of work
// and the defines.
//
// Floor, for one token, H heads, J slots: 2*H*J*(3*D+2*Dv) FLOP, a gather of 2*J*D bytes, and
// 4*J*D bytes of atomics. What limits it: shared-memory wavefronts, then fp32 atomics, D per slot
// and token. One block fills an SM at H 64, D 512, so its barriers are exposed.
// Measured on one H200 (795 TFLOP/s MMA rate in the same run, 4096 queries): 192 TFLOP/s at H 64,
// D 512, topk 512; 206 at H 128, topk 1024.
// Launch: as the forward. More: kernels/docs/sparse_attention.md.
#include "sparse_attention_tiles.h"

// ---------------------------------------------------------------- dq, dk, dv

constexpr int BACKWARD_KEYS = Layout<32, true>::BYTES <= MAX_SHARED_BYTES ? 32 : 16;
using Backward = Layout<BACKWARD_KEYS, true>;

static_assert(Backward::BYTES <= MAX_SHARED_BYTES, "tiles exceed shared memory");
static_assert(BACKWARD_KEYS % (8 * KEY_WARPS) == 0, "8 keys for each warp");

SHARED_MEMORY(sparse_attention_backward, Backward::BYTES)

constexpr int BACKWARD_N8 = BACKWARD_KEYS / KEY_WARPS / 8;
constexpr int KEY_M_TILES = BACKWARD_KEYS / 16;
// Column tiles of dk and dv that a warp holds at a time, next to the accumulators of dq.
constexpr int SCATTER_N8 = KEY_N8 <= 8 ? 4 : 2;

// Turns scores and dP of the tile into the operands P and dS. P*(dP - delta) is computed in fp32.
// The scale is applied to the accumulators of dq and dk.
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

// Adds a warp's columns to the rows of the slots' keys, or stores them to the slots' separate
// rows, of which slot 0's is first_row. Two neighbouring lanes exchange halves, so that each has
// four consecutive floats of one row. Invalid slots are skipped.
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

// dk += softmax_scale * dS^T q, and P^T dout in the same columns where V is part of K. A warp
// takes its column tiles a few at a time, starting at BASE.
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

// dv += P^T dout, for a separate V.
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
        // After this barrier all threads see the tile, and no thread reads the previous one.
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
