// Attention of decoded tokens over a paged cache, with a sink (inference 8 to 8.4).
//
//     z[h,j] = softmax_scale * q[t,h] . kv[j]   over the valid slots j of a token's two lists,
//                                               window and compressed entries: one softmax
//     lse    = log sum_j exp z                  natural, without the sink
//     out    = sum_j exp(z - lse) kv[j] / (1 + exp(sink_h - lse))
//
// A slot is valid iff it is below clamp(length, 0, topk) of its request and its index is in [0,
// num_slots) of its store. An invalid slot is never dereferenced: its row is zero-filled, its
// score is -inf. A token without a valid slot has out = 0, lse = +inf. A cache row is both K and
// V. Its e4m3 channels become bf16 exactly, code * 2^(scale - 127).
// Work: a unit is a token with up to HEADS_PER_BLOCK heads. Its lists are cut in tiles of KEYS
// slots, the window first. The tiles of all units are split into equal stretches, one a block. A
// unit within one stretch is finished there. Another leaves a part in each of its blocks
// (normalized, fp32, base-2 lse, no sink). decode_attention_combine merges parts in list order,
// with the sink: results depend only on the number of blocks. With a block for each tile (num_blocks
// beyond the tiles of any batch) every list is cut alike, and no bit depends on the batch.
// Floor, a token, H heads, J slots of 512 channels: 4*H*J*512 FLOP; J * 584 bytes (bf16: J * 1024)
// gathered for each block of heads. Limit: at large batch mma.sync and shared-memory wavefronts,
// at batch 1 latency.
// Defines: NOPE_DIM, e4m3 channels, a multiple of 64 up to 512 (0: bf16 cache); ROPE_DIM, bf16
// channels; NOPE_DIM + ROPE_DIM a multiple of 16, at most 512; HEADS_PER_BLOCK 16 or 64. Launch:
// one block an SM, or any number; block size and shared memory as exported by the module.
// decode_attention_combine: num_blocks * HEADS_PER_BLOCK / 8 blocks of 256 threads.
// Design and estimates: kernels/docs/decode_attention.md.

#include "async_copy.h"
#include "combine.h"
#include "decode_attention.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "online_softmax.h"
#include "tiles.h"

#if !defined(NOPE_DIM) || !defined(ROPE_DIM) || !defined(HEADS_PER_BLOCK)
#error "define NOPE_DIM, ROPE_DIM and HEADS_PER_BLOCK"
#endif

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 512, "a head is a multiple of 16 channels up to 512");

// ---------------------------------------------------------------- shapes of the block's work

constexpr int STAGES = 2;
constexpr int SCORE_N8 = KEYS / KEY_WARPS / 8;
// Slots of a tile that one warp gathers.
constexpr int ROWS = KEYS / WARPS;
// Column tiles of 8 of the output that one warp owns.
constexpr int OUT_N8 = ceil_div(HEAD_DIM / 8, WARPS);
constexpr bool RAGGED = WARPS * OUT_N8 != HEAD_DIM / 8;

using KeyTile = Tile<HEAD_DIM>;  // also q and out
using WeightTile = Tile<KEYS>;   // P: heads x slots

constexpr int STAGE_BYTES = KeyTile::bytes(KEYS);
struct SharedPlan {
    uint8_t q[KeyTile::bytes(HEADS_PER_BLOCK)];
    uint8_t stages[STAGES][STAGE_BYTES];
    uint8_t p[WeightTile::bytes(HEADS_PER_BLOCK)];
    int32_t valid[STAGES][KEYS];
    float partial[KEY_WARPS][HEADS_PER_BLOCK];  // maxima, later sums
    float factor[HEADS_PER_BLOCK];
};
constexpr int Q_AT = OFFSET_OF(SharedPlan, q), STAGE_AT = OFFSET_OF(SharedPlan, stages);
constexpr int P_AT = OFFSET_OF(SharedPlan, p), VALID_AT = OFFSET_OF(SharedPlan, valid);
constexpr int PARTIAL_AT = OFFSET_OF(SharedPlan, partial), FACTOR_AT = OFFSET_OF(SharedPlan, factor);
constexpr int SHARED_BYTES = sizeof(SharedPlan);

static_assert(SHARED_BYTES <= 227 * 1024, "tiles exceed shared memory");
static_assert(KeyTile::bytes(HEADS_PER_BLOCK) <= STAGES * STAGE_BYTES, "out is staged where keys lay");

SHARED_MEMORY(decode_attention, SHARED_BYTES)

// ---------------------------------------------------------------- gathering

// The slot of a tile that this lane looks up for its warp.
DEVICE int lane_slot() { return warp_id() * ROWS + lane_id() % ROWS; }

// Starts the copies of the warp's bf16 channels to a stage, and stores which slots are valid. An
// invalid slot forms no source address; `anywhere` stands for it.
DEVICE void copy_rope(const LaneRow& row, const void* anywhere, SharedAddress shared, int stage) {
    constexpr int ROW_CHUNKS = ROPE_DIM / 8, CHUNKS = ROWS * ROW_CHUNKS;
    const int first_row = warp_id() * ROWS;
    const SharedAddress tile = shared + STAGE_AT + stage * STAGE_BYTES;
    int32_t* valid = reinterpret_cast<int32_t*>(dynamic_shared() + VALID_AT) + stage * KEYS;
    if (lane_id() < ROWS) valid[first_row + lane_id()] = row.data != nullptr;
    UNROLL
    for (int i = lane_id(); i < ceil_div(CHUNKS, 32) * 32; i += 32) {
        const int r = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS;
        const uint8_t* data = address_of_lane(row.data, r % ROWS);
        const bool wanted = data != nullptr;
        const void* from = wanted ? data + NOPE_DIM + 16 * chunk : anywhere;
        if (CHUNKS % 32 == 0 || i < CHUNKS)
            copy_async_16(tile + KeyTile::offset(first_row + r, NOPE_DIM / 8 + chunk), from, wanted);
    }
    copy_commit();
}

constexpr int CODE_CHUNKS = NOPE_DIM > 0 ? NOPE_DIM / 16 : 1;  // of 16 codes, of a row
// A step of the warp covers this many whole rows. With the model's 28 chunks it is one row, and
// four lanes are idle. The row of a step, and all that depends on it, is then a constant.
constexpr int STEP_ROWS = minimum(static_cast<int>(WARP_SIZE) / CODE_CHUNKS, ROWS);
constexpr int STEPS = NOPE_DIM > 0 ? ceil_div(ROWS, STEP_ROWS) : 1;
static_assert(ROWS % STEP_ROWS == 0, "steps divide a warp's rows");

DEVICE bool lane_has_codes() { return lane_id() < STEP_ROWS * CODE_CHUNKS; }
DEVICE int lane_code_chunk() { return lane_id() % CODE_CHUNKS; }
DEVICE int step_row(int step) { return step * STEP_ROWS + lane_id() / CODE_CHUNKS % STEP_ROWS; }

// A lane's share of the codes of its warp's rows: a chunk of row step_row(step) for each step.
// Scales are those of the row that the lane looks up.
struct Codes {
    Vec16 chunk[STEPS];
    uint32_t scales[2];
};

// Loads the codes of a tile. Codes and scales of an invalid slot are 0.
DEVICE void load_codes(Codes& codes, const LaneRow& row) {
    if constexpr (NOPE_DIM > 0) {
        codes.scales[0] = codes.scales[1] = 0;
        if (row.scales != nullptr) {
            codes.scales[0] = reinterpret_cast<const uint32_t*>(row.scales)[0];
            codes.scales[1] = reinterpret_cast<const uint32_t*>(row.scales)[1];
        }
        UNROLL
        for (int step = 0; step < STEPS; ++step) {
            const uint8_t* data = address_of_lane(row.data, step_row(step));
            codes.chunk[step] = Vec16{{0, 0, 0, 0}};
            if (data != nullptr && lane_has_codes())
                codes.chunk[step] = load_vec16_readonly(data + 16 * lane_code_chunk());
        }
    }
}

// Eight codes times their scale, as bf16.
DEVICE Vec16 dequantize(uint32_t first, uint32_t second, float scale) {
    Vec16 values;
    UNROLL
    for (int i = 0; i < 4; ++i) {
        float low, high;
        e4m3x2_to_float((i < 2 ? first : second) >> 16 * (i % 2), low, high);
        values.w[i] = pack_bf16(low * scale, high * scale);
    }
    return values;
}

// Converts the lane's chunk of a step and stores it to a stage.
DEVICE void store_codes(const Codes& codes, int step, SharedAddress tile) {
    const int row = step_row(step), chunk = lane_code_chunk();
    // Four chunks share a scale; four scales share a word.
    const uint32_t low = __shfl_sync(FULL_WARP, codes.scales[0], row);
    const uint32_t high = __shfl_sync(FULL_WARP, codes.scales[1], row);
    const float scale = e8m0_to_float(static_cast<uint8_t>((chunk < 16 ? low : high) >> 8 * (chunk / 4 % 4)));
    if (!lane_has_codes()) return;
    // Lanes of four even and four odd halves together use all banks.
    const int half = chunk / 4 % 2;
    const Vec16& c = codes.chunk[step];
    UNROLL
    for (int pass = 0; pass < 2; ++pass) {
        const bool upper = (half ^ pass) != 0;
        const Vec16 values = dequantize(upper ? c.w[2] : c.w[0], upper ? c.w[3] : c.w[1], scale);
        store_shared_vec16(tile + KeyTile::offset(warp_id() * ROWS + row, 2 * chunk + (upper ? 1 : 0)), values);
    }
}

// Piece `pause` of `pauses` of the conversion of a tile.
DEVICE void store_codes_between(const Codes& codes, int pause, int pauses, SharedAddress tile) {
    const int steps = ceil_div(STEPS, pauses);
    UNROLL
    for (int step = pause * steps; step < minimum((pause + 1) * steps, STEPS); ++step) store_codes(codes, step, tile);
}

using Accumulators = float[M_TILES][OUT_N8][4];

// ---------------------------------------------------------------- the epilogue of a unit

// Sums each row over lanes and warps and stores the log-sum-exp: natural of a whole unit, base 2
// of a part. Leaves the row's normalizer in `factor`, with the sink where the unit is whole. Rows
// without a valid slot get 0.
DEVICE void finish_softmax(const RunningSoftmax& state, const ScorePlace& place, float* partial, float* factor,
                           const DecodeAttentionParams& params, const Segment& segment, int32_t part) {
    share_sums(state, place, partial, factor);
    const int row = threadIdx.x;
    if (row >= HEADS_PER_BLOCK) return;
    const float row_maximum = factor[row], sum = sum_of_row(partial, row);
    const bool empty = sum == 0.0f;
    const float lse_log2 = row_maximum + log2_approx(sum);
    if (row >= segment.heads) {
        factor[row] = 0.0f;
    } else if (part != WHOLE) {
        factor[row] = empty ? 0.0f : 1.0f / sum;
        params.partial_lse[static_cast<int64_t>(part) * HEADS_PER_BLOCK + row] = empty ? -INFINITY_F32 : lse_log2;
    } else {
        // A sink near the largest fp32 becomes inf in base 2, and so does its share: out is then
        // 0, as specified.
        const float sink_log2 = params.sink ? params.sink[segment.first_head + row] * LOG2_E : -INFINITY_F32;
        const float sink_share = exp2_approx(sink_log2 - subtrahend(row_maximum));
        factor[row] = empty ? 0.0f : 1.0f / (sum + sink_share);
        params.lse[segment.token * params.num_heads + segment.first_head + row] =
            empty ? INFINITY_F32 : lse_log2 * LN_2;
    }
}

// As store_heads (block_heads.h), but the stride is read where it is used: it takes no registers.
DEVICE void store_output(const DecodeAttentionParams& params, const Segment& segment, SharedAddress tile) {
    bf16* target =
        params.out + segment.token * params.out_token_stride + segment.first_head * params.out_head_stride;
    for (int i = threadIdx.x; i < segment.heads * KeyTile::CHUNKS; i += THREADS) {
        const int head = i / KeyTile::CHUNKS, chunk = i % KeyTile::CHUNKS;
        store_vec16_streaming(target + head * params.out_head_stride + chunk * 8,
                              load_shared_vec16(tile + KeyTile::offset(head, chunk)));
    }
}

// Stores the accumulators to the part's rows in fp32, each row times its factor. Absent heads are
// skipped.
DEVICE void store_part(float* target, const Accumulators& out, const float* factor, int heads) {
    const int g = lane_id() / 4, t = lane_id() % 4, first_tile = warp_id() * OUT_N8;
    UNROLL
    for (int m = 0; m < M_TILES; ++m) {
        UNROLL
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + g + 8 * half;
            if (row >= heads) continue;
            const float normaliser = factor[row];
            UNROLL
            for (int n = 0; n < OUT_N8; ++n) {
                if (RAGGED && first_tile + n >= KeyTile::CHUNKS) break;
                const float(&c)[4] = out[m][n];
                store_pair(target + row * HEAD_DIM + 8 * (first_tile + n) + 2 * t, c[2 * half] * normaliser,
                           c[2 * half + 1] * normaliser);
            }
        }
    }
}

// ---------------------------------------------------------------- a segment

// The softmax over the segment's tiles. `part` is the slot in the workspace of a unit that is not
// whole.
DEVICE void attend(const DecodeAttentionParams& params, const Segment& segment, int32_t part) {
    const ScorePlace place = score_place<SCORE_N8>();
    const SharedAddress shared = shared_address(dynamic_shared());
    const auto* all_valid = reinterpret_cast<const int32_t*>(dynamic_shared() + VALID_AT);
    auto* partial = reinterpret_cast<float*>(dynamic_shared() + PARTIAL_AT);
    auto* factor = reinterpret_cast<float*>(dynamic_shared() + FACTOR_AT);
    const float scale_log2 = params.softmax_scale * LOG2_E;

    RunningSoftmax state;
    Accumulators out;
    UNROLL
    for (int m = 0; m < M_TILES; ++m)
        UNROLL
        for (int n = 0; n < OUT_N8; ++n)
            UNROLL
            for (int i = 0; i < 4; ++i) out[m][n][i] = 0.0f;

    // The first tile arrives whole. The codes of the second are in flight.
    int32_t index = stored_index(params, segment, segment.first, lane_slot());
    int32_t next_index = stored_index(params, segment, segment.first + 1, lane_slot());
    const bf16* q = params.q + segment.token * params.q_token_stride + segment.first_head * params.q_head_stride;
    load_heads<KeyTile>(shared + Q_AT, q, params.q_head_stride, segment.heads);
    LaneRow row = find_row(params, segment, segment.first, index, lane_id() < ROWS);
    Codes codes;
    load_codes(codes, row);
    copy_rope(row, params.q, shared, 0);
    bool arriving = row.data != nullptr;
    if constexpr (NOPE_DIM > 0) store_codes_between(codes, 0, 1, shared + STAGE_AT);
    row = find_row(params, segment, segment.first + 1, next_index, lane_id() < ROWS);
    load_codes(codes, row);
    next_index = stored_index(params, segment, segment.first + 2, lane_slot());

    for (int32_t tile = segment.first; tile < segment.last; ++tile) {
        const int stage = (tile - segment.first) % STAGES;
        const SharedAddress keys = shared + STAGE_AT + stage * STAGE_BYTES;
        const SharedAddress next_keys = shared + STAGE_AT + (1 - stage) * STAGE_BYTES;
        copy_wait<0>();
        // After this barrier all threads see the tile, and no thread reads the previous one.
        const bool any_valid = __syncthreads_or(arriving);
        arriving = row.data != nullptr;
        copy_rope(row, params.q, shared, 1 - stage);

        float s[SCORE_N8][4] = {};
        if (any_valid) {
            multiply_rows<HEAD_DIM>(s, shared + Q_AT, 16 * place.head_warp, keys, place.first_key, [&](int pause) {
                if constexpr (NOPE_DIM > 0) store_codes_between(codes, pause, pauses(HEAD_DIM), next_keys);
            });
        } else if constexpr (NOPE_DIM > 0) {
            store_codes_between(codes, 0, 1, next_keys);
        }
        row = find_row(params, segment, tile + 2, next_index, lane_id() < ROWS);
        load_codes(codes, row);
        next_index = stored_index(params, segment, tile + 3, lane_slot());
        if (!any_valid) continue;

        const int32_t* valid = all_valid + stage * KEYS;
        mask_and_reduce<maximum_f32>(s, place, partial, scale_log2, [&](int slot, float z) {
            return valid[slot] != 0 ? z : -INFINITY_F32;
        });
        __syncthreads();  // every warp's maxima are there
        update_softmax<maximum_f32, WeightTile>(state, s, place, partial, factor, shared + P_AT);
        __syncthreads();  // P and the rescaling factors are there
        rescale_output(out, factor);
        multiply_columns<KEYS, HEAD_DIM, RAGGED>(out, shared + P_AT, keys, warp_id() * OUT_N8);
    }
    copy_wait<0>();   // of the tile behind the last one, which is empty
    __syncthreads();  // the last tile's factors and keys are no longer read
    finish_softmax(state, place, partial, factor, params, segment, part);
    __syncthreads();  // the rows' normalisers are there
    if (part == WHOLE) {
        stage_heads<KeyTile>(shared + STAGE_AT, out, [&](int row) { return factor[row]; });
        __syncthreads();  // out is staged
        store_output(params, segment, shared + STAGE_AT);
    } else {
        float* target = params.partial_out + static_cast<int64_t>(part) * HEADS_PER_BLOCK * HEAD_DIM;
        store_part(target, out, factor, segment.heads);
    }
    __syncthreads();  // shared memory belongs to the next segment
}

KERNEL(decode_attention, DecodeAttentionParams, THREADS) {
    const Span span = for_each_segment(params, [&](const Segment& segment, int32_t part) { attend(params, segment, part); });
    if (threadIdx.x == 0) store_span(params, span);
}

// ---------------------------------------------------------------- the merge

// Units that span blocks, at most one for each block in which a unit starts. A warp takes a head.
constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_HEADS = COMBINE_THREADS / WARP_SIZE;
static_assert(HEADS_PER_BLOCK % COMBINE_HEADS == 0, "blocks of the merge divide a unit");

// The parts of one head of the unit that starts in `block`.
struct UnitParts {
    const float* out;
    const float* lse;
    int32_t block;
    int32_t row;
    int32_t count;

    int64_t place(int32_t part) const {
        return static_cast<int64_t>(part_place(block + part, part == 0)) * HEADS_PER_BLOCK + row;
    }
    float exponent(int32_t part) const { return part_exponent(lse[place(part)]); }
    const float* columns(int32_t part) const { return out + place(part) * HEAD_DIM; }
};

KERNEL(decode_attention_combine, DecodeAttentionParams, COMBINE_THREADS) {
    constexpr int BLOCKS = HEADS_PER_BLOCK / COMBINE_HEADS;
    const int32_t block = static_cast<int32_t>(blockIdx.x) / BLOCKS;
    const int32_t row = static_cast<int32_t>(blockIdx.x) % BLOCKS * COMBINE_HEADS + warp_id();
    const int32_t unit = params.spans[2 * block];
    if (unit < 0) return;
    const int32_t blocks = head_blocks(params);
    const int64_t token = unit / blocks;
    const int32_t head = unit % blocks * HEADS_PER_BLOCK + row;
    if (head >= params.num_heads) return;
    const UnitParts parts{params.partial_out, params.partial_lse, block, row, params.spans[2 * block + 1]};
    const float sink_log2 = params.sink ? params.sink[head] * LOG2_E : -INFINITY_F32;
    bf16* out = params.out + token * params.out_token_stride + head * params.out_head_stride;
    combine_row<HEAD_DIM>(parts, sink_log2, out, params.lse + token * params.num_heads + head);
}
