// Sparse attention over gathered keys with a per-head sink: the forward (inference 8 and 8.1). The
// backward is in sparse_attention_backward.cu, its sums over slots and tokens in
// sparse_attention_sums.cu.
//
//     z[t,h,j] = softmax_scale * q[t,h] . k[indices[t,j]]       over the valid slots j of token t
//     lse      = log sum_j exp z     max_logits = max_j z       (natural, without the sink)
//     P        = exp(z - log(exp(lse) + exp(sink_h)))           out = sum_j P v[indices[t,j]]
//
// A slot is valid iff j < clamp(topk_length, 0, topk) and 0 <= indices[t,j] < num_keys. An invalid
// slot is never dereferenced: its row in shared memory is zero-filled, its score is -inf, and no
// atomic is issued for it. A slot that repeats a key counts again. A row without a valid slot has
// out = 0, lse = +inf, max_logits = -inf, dq = 0.
//
// A block takes a token and HEADS_PER_BLOCK heads; sparse_attention_tiles.h has the division of
// work and the defines.
// Floor, for one token, H heads, J slots: 2*H*J*(D+Dv) FLOP and 2*J*D bytes gathered (only K when
// V is part of K). What limits it: mma.sync and shared-memory wavefronts; with one block an SM (H
// 64, D 512) the three barriers of a tile are exposed.
// Measured on one H200 (795 TFLOP/s MMA rate in the same run, 4096 queries): 232 TFLOP/s at H 64,
// D 512, topk 512; 255 at H 128, topk 1024.
// Launch: num_tokens * ceil(num_heads / HEADS_PER_BLOCK) blocks in x; block size and dynamic
// shared memory as the module exports them. More: kernels/docs/sparse_attention.md.
#include "online_softmax.h"
#include "sparse_attention_tiles.h"

constexpr int FORWARD_KEYS = HEADS_PER_BLOCK == 64 && Layout<64, false>::BYTES <= MAX_SHARED_BYTES ? 64 : 32;
using Forward = Layout<FORWARD_KEYS, false>;

static_assert(Forward::BYTES <= MAX_SHARED_BYTES, "tiles exceed shared memory");
static_assert(FORWARD_KEYS % (8 * KEY_WARPS) == 0, "8 keys for each warp");
static_assert(ValueTile::bytes(HEADS_PER_BLOCK) <= STAGES * Forward::STAGE_BYTES, "out is staged where keys lay");

SHARED_MEMORY(sparse_attention_forward, Forward::BYTES)

constexpr int FORWARD_N8 = FORWARD_KEYS / KEY_WARPS / 8;  // score tiles of 8 keys a warp

// Sums each row over lanes and warps, stores lse and max_logits, and leaves 1 / (sum + sink's
// share) in `factor`. Rows without a valid slot get factor 0, whatever the sink.
DEVICE void finish_softmax(const RunningSoftmax& state, const ScorePlace& place, float* partial, float* factor,
                           const SparseAttentionForwardParams& params, const Work& work) {
    share_sums(state, place, partial, factor);
    const int row = threadIdx.x;
    if (row >= HEADS_PER_BLOCK) return;
    const float row_maximum = factor[row], sum = sum_of_row(partial, row);
    const bool empty = sum == 0.0f;
    if (row >= work.heads) {
        factor[row] = 0.0f;
        return;
    }
    // A sink near the largest fp32 becomes inf in base 2, and so does its share: out is then 0, as
    // specified.
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
        // After this barrier all threads see the tile, and no thread reads the previous one.
        const bool any_valid = __syncthreads_or(arriving);
        if (tile + 1 < tiles) {
            arriving = gather_tile<Forward, FORWARD_KEYS>(list, shared, 1 - stage, next_index);
            next_index = list.stored_index(lane_slot<FORWARD_KEYS>(tile + 2));
        }
        if (!any_valid) continue;

        float s[FORWARD_N8][4] = {};
        multiply_rows<KeyTile, KeyTile, 0, HEAD_DIM>(s, shared + Forward::Q, 16 * place.head_warp,
                                                     shared + Forward::keys(stage), place.first_key);
        const int32_t* rows = all_rows + stage * FORWARD_KEYS;
        mask_and_reduce<maximum_or_nan_f32>(s, place, partial, scale_log2, [&](int slot, float z) {
            return rows[slot] >= 0 ? z : -INFINITY_F32;
        });
        __syncthreads();  // every warp's maxima are there
        update_softmax<maximum_or_nan_f32, Forward::WeightTile>(state, s, place, partial, factor,
                                                                shared + Forward::P);
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
