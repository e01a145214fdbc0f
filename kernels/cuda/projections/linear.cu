// Linear layers of bf16 weights and their gradients (inference 0, 5.2, 5.5).
//
//     y[t,o]  = y_before[t,o]  + sum over i of x[t,i] w[o,i]
//     dx[t,i] =                  sum over o of dy[t,o] w[o,i]
//     dw[o,i] = dw_before[o,i] + sum over t of dy[t,o] x[t,i]
//
// x, w, dy and dx are bf16, y and dw bf16 or fp32. Products are exact, sums fp32. y_before and
// dw_before (may be y and dw, or absent) are added to the whole sum with one rounding.
// num_groups independent layers run in one launch (inference 9, wo_a): x, w and y then have a
// group axis. A group's blocks are neighbours, so its operands stay in L2.
//
// All three are out = A B^T (linear.h), with A and B as stored: ldmatrix transposes B of dx and
// both operands of dw. A block computes one tile, 128 x 128 or, for up to 16 rows, 16 x 64. It
// goes over k in stages of 64; cp.async keeps STAGES - 1 in flight while mma.sync multiplies one.
// With few tiles k is split, and linear_sum adds the partial sums in order. The scalar kernels take
// any stride. One token: linear_forward_one, warps for whole rows of w, in plain fp32.
// Batch invariance (Device::invariant): parts of k from columns and depth alone. In every tile
// mma.sync adds k in steps of 16; linear_sum, or *_folded in registers, adds parts in order.
// Floor: 2 rows columns depth FLOP at 790 TFLOP/s; for few rows the bytes of w at 4.24 TB/s, 67 us
// for [65536, 4096]. Limit: of large tiles mma.sync, about two thirds of wgmma's rate; of small
// tiles memory: 5 x 10 KB in flight a block, three blocks an SM (large: 3 x 32 KB, one). More than
// 16 rows may go to cuBLASLt (Products::Library). What was tried: kernels/docs/linear.md.
// Launch: num_groups * splits * tiles blocks. linear_forward_one: num_groups * ceil(columns /
// (ONE_WARPS / splits * ONE_FEATURES)), splits a power of two up to ONE_WARPS. linear_sum:
// ceil(num_groups rows ceil(columns / 8) / SUM_THREADS).
#include "async_copy.h"
#include "linear.h"
#include "math.h"

using Large = Shape<128, 128, 2, 4, 4>;
using Small = Shape<16, 64, 1, 4, 6>;
using Scalar = Shape<64, 64, 2, 2, 2>;
constexpr int SUM_THREADS = 256;

struct LinearParams {
    // For each group. A group stride is the number of elements to the next group.
    const bf16* a; int64_t a_stride; int64_t a_group_stride;  // [rows, depth] or, transposed, [depth, rows]
    const bf16* b; int64_t b_stride; int64_t b_group_stride;  // [columns, depth] or, transposed, [depth, columns]
    const void* before; int64_t before_stride; int64_t before_group_stride;
    void* out; int64_t out_stride; int64_t out_group_stride;
    float* partials;
    int64_t rows;
    int64_t columns;
    int64_t depth;
    int32_t splits;
    int32_t out_is_f32;
    int32_t wide;
    int32_t num_groups;
};

// The parameters of one group.
DEVICE LinearParams of_group(LinearParams params, int64_t group) {
    const int64_t size = params.out_is_f32 ? 4 : 2, chunks = ceil_div<int64_t>(params.columns, CHUNK);
    params.a += group * params.a_group_stride;
    params.b += group * params.b_group_stride;
    if (params.before)
        params.before = static_cast<const uint8_t*>(params.before) + size * group * params.before_group_stride;
    params.out = static_cast<uint8_t*>(params.out) + size * group * params.out_group_stride;
    params.partials += group * params.splits * params.rows * (chunks * CHUNK);
    return params;
}

DEVICE Result result_of(const LinearParams& params) {
    return Result{params.before, params.before_stride, params.out,     params.out_stride, params.partials,
                  params.rows,   params.columns,       params.depth,   params.splits,     params.out_is_f32,
                  params.wide,   1.0f};
}

// An operand: its elements, and how many rows of the result it has.
struct Operand {
    const bf16* numbers;
    int64_t stride, extent, depth;
};

// Loads EXTENT rows of an operand from `first` on, and the DEPTH elements of k of a stage, into
// their tile. Missing elements are 0. WIDE: by 16-byte cp.async, which land later.
template <int EXTENT, int THREADS, bool TRANSPOSED, bool WIDE>
DEVICE void load_operand(SharedAddress tile, const Operand& operand, int64_t first, int64_t stage) {
    constexpr int LINE = TRANSPOSED ? EXTENT : DEPTH, LINE_CHUNKS = LINE / CHUNK;
    const int64_t outer = TRANSPOSED ? stage * DEPTH : first, outer_end = TRANSPOSED ? operand.depth : operand.extent;
    const int64_t inner = TRANSPOSED ? first : stage * DEPTH, inner_end = TRANSPOSED ? operand.extent : operand.depth;
    UNROLL
    for (int i = 0; i < EXTENT * DEPTH / CHUNK / THREADS; ++i) {
        const int number = static_cast<int>(threadIdx.x) + i * THREADS, chunk = number % LINE_CHUNKS;
        const int64_t line = outer + number / LINE_CHUNKS, from = inner + chunk * CHUNK;
        const int64_t count = line < outer_end ? inner_end - from : 0;
        const bf16* const source = operand.numbers + line * operand.stride + from;
        const SharedAddress target = tile + Tile<LINE>::offset(number / LINE_CHUNKS, chunk);
        if constexpr (WIDE) {
            copy_async_16(target, count > 0 ? source : operand.numbers, count > 0);
        } else {
            Vec16 numbers = {};
            UNROLL
            for (int e = 0; e < CHUNK; ++e)
                if (e < count) numbers.w[e / 2] |= static_cast<uint32_t>(source[e].bits) << 16 * (e % 2);
            store_shared_vec16(target, numbers);
        }
    }
}

// FOLDED: a block takes all parts of k, whose sums it adds in order.
template <typename S, bool A_TRANSPOSED, bool B_TRANSPOSED, bool WIDE, bool FOLDED = false>
DEVICE void linear(const LinearParams& all) {
    const uint32_t group_blocks = gridDim.x / static_cast<uint32_t>(all.num_groups);
    const LinearParams params = of_group(all, blockIdx.x / group_blocks);
    Result result = result_of(params);
    const int32_t parts = result.splits;
    if constexpr (FOLDED) result.splits = 1;
    const Part part = part_of<S>(result, blockIdx.x % group_blocks);
    const Operand a{params.a, params.a_stride, params.rows, params.depth};
    const Operand b{params.b, params.b_stride, params.columns, params.depth};
    const SharedAddress shared = shared_address(dynamic_shared());
    const auto place = [&](int64_t stage) { return shared + static_cast<int>(stage % S::STAGES) * S::STAGE_BYTES; };
    const auto load = [&](int64_t stage) {
        if (stage < part.end) {
            load_operand<S::ROWS, S::THREADS, A_TRANSPOSED, WIDE>(place(stage), a, part.row, stage);
            load_operand<S::COLUMNS, S::THREADS, B_TRANSPOSED, WIDE>(place(stage) + S::B, b, part.column, stage);
        }
        copy_commit();
    };
    for (int i = 0; i < S::STAGES - 1; ++i) load(part.begin + i);
    // A warp without a row of the result has nothing to multiply.
    const bool has_rows = part.row + warp_row<S>() < params.rows;
    Sums<S> sums = {}, total = {};
    int32_t folded = 0;
    for (int64_t stage = part.begin; stage < part.end; ++stage) {
        copy_wait<S::STAGES - 2>();
        // After this barrier all threads see this stage, and no thread reads the previous one.
        __syncthreads();
        load(stage + S::STAGES - 1);
        if (has_rows) multiply_stage<S, A_TRANSPOSED, B_TRANSPOSED>(sums, place(stage));
        if constexpr (FOLDED) {
            if (stage + 1 == part.end * (folded + 1) / parts) {
                fold<S>(total, sums);
                ++folded;
            }
        }
    }
    __syncthreads();
    store_sums<S>(result, part, FOLDED ? total : sums);
}

KERNEL(linear_forward_large, LinearParams, Large::THREADS) { linear<Large, false, false, true>(params); }
SHARED_MEMORY(linear_forward_large, Large::BYTES)
KERNEL(linear_forward_small, LinearParams, Small::THREADS) { linear<Small, false, false, true>(params); }
SHARED_MEMORY(linear_forward_small, Small::BYTES)
KERNEL(linear_forward_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, false, false, false>(params); }
SHARED_MEMORY(linear_forward_scalar, Scalar::BYTES)
KERNEL(linear_forward_large_folded, LinearParams, Large::THREADS) { linear<Large, false, false, true, true>(params); }
SHARED_MEMORY(linear_forward_large_folded, Large::BYTES)
KERNEL(linear_dx_large, LinearParams, Large::THREADS) { linear<Large, false, true, true>(params); }
SHARED_MEMORY(linear_dx_large, Large::BYTES)
KERNEL(linear_dx_large_folded, LinearParams, Large::THREADS) { linear<Large, false, true, true, true>(params); }
SHARED_MEMORY(linear_dx_large_folded, Large::BYTES)
KERNEL(linear_dx_small, LinearParams, Small::THREADS) { linear<Small, false, true, true>(params); }
SHARED_MEMORY(linear_dx_small, Small::BYTES)
KERNEL(linear_dx_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, false, true, false>(params); }
SHARED_MEMORY(linear_dx_scalar, Scalar::BYTES)
KERNEL(linear_dw_large, LinearParams, Large::THREADS) { linear<Large, true, true, true>(params); }
SHARED_MEMORY(linear_dw_large, Large::BYTES)
KERNEL(linear_dw_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, true, true, false>(params); }
SHARED_MEMORY(linear_dw_scalar, Scalar::BYTES)

// ---------------------------------------------------------------- one token

// A warp reads rows of w from end to end, or every `splits`th part of them next to other warps of
// its block. A lane has every 32nd chunk of 16 bytes, several of them in flight. DRAM serves whole
// rows, no tile waits for another, and no second launch adds partial sums. The sums are plain
// fp32: with one token, tensor cores would waste fifteen of sixteen rows.
constexpr int ONE_THREADS = 256, ONE_WARPS = ONE_THREADS / static_cast<int>(WARP_SIZE), ONE_HELD = 4;
constexpr int ONE_FEATURES = 2, ONE_CHUNKS = 2;  // rows of w of a warp, chunks of each that a lane has in flight
constexpr int ONE_STEP = ONE_CHUNKS * static_cast<int>(WARP_SIZE);

// A lane's chunks from `chunk` on; chunks from `chunks` on do not exist. WHOLE: all exist.
template <bool WHOLE>
DEVICE void add_chunks(const bf16* x, const bf16* const (&rows)[ONE_FEATURES], int chunk, int chunks,
                       float (&sums)[ONE_FEATURES]) {
    Vec16 w[ONE_CHUNKS][ONE_FEATURES];
    UNROLL
    for (int i = 0; i < ONE_CHUNKS; ++i) {
        const int own = chunk + i * static_cast<int>(WARP_SIZE);
        UNROLL
        for (int f = 0; f < ONE_FEATURES; ++f)
            w[i][f] = WHOLE || own < chunks ? load_vec16_streaming(rows[f] + own * CHUNK) : Vec16{};
    }
    UNROLL
    for (int i = 0; i < ONE_CHUNKS; ++i) {
        const int own = chunk + i * static_cast<int>(WARP_SIZE);
        float of_x[CHUNK];
        unpack<bf16>(WHOLE || own < chunks ? load_vec16_readonly(x + own * CHUNK) : Vec16{}, of_x);
        UNROLL
        for (int f = 0; f < ONE_FEATURES; ++f) {
            float of_w[CHUNK];
            unpack<bf16>(w[i][f], of_w);
            UNROLL
            for (int e = 0; e < CHUNK; ++e) sums[f] = fused_multiply_add(of_w[e], of_x[e], sums[f]);
        }
    }
}

KERNEL_OF(linear_forward_one, LinearParams, ONE_THREADS, ONE_HELD) {
    __shared__ float of_warps[ONE_WARPS][ONE_FEATURES];
    const uint32_t group_blocks = gridDim.x / static_cast<uint32_t>(params.num_groups);
    const LinearParams own = of_group(params, blockIdx.x / group_blocks);
    // Columns of a block and its first one; the warp's follow those of `turn` other warps.
    const int columns = ONE_WARPS / own.splits * ONE_FEATURES, turn = warp_id() / own.splits;
    const int64_t first = static_cast<int64_t>(blockIdx.x % group_blocks) * columns;
    const bf16* rows[ONE_FEATURES];
    UNROLL
    for (int f = 0; f < ONE_FEATURES; ++f)
        rows[f] = own.b + minimum(first + turn * ONE_FEATURES + f, own.columns - 1) * own.b_stride;
    const int chunks = static_cast<int>(own.depth / CHUNK), step = own.splits * ONE_STEP;
    float sums[ONE_FEATURES] = {};
    int begin = warp_id() % own.splits * ONE_STEP;
    UNROLL_BY(1)
    for (; begin + ONE_STEP <= chunks; begin += step) add_chunks<true>(own.a, rows, begin + lane_id(), chunks, sums);
    if (begin < chunks) add_chunks<false>(own.a, rows, begin + lane_id(), chunks, sums);
    UNROLL
    for (int f = 0; f < ONE_FEATURES; ++f) {
        const float sum = warp_sum(sums[f]);
        if (lane_id() == 0) of_warps[warp_id()][f] = sum;
    }
    __syncthreads();
    const int column = threadIdx.x;
    if (column >= columns || first + column >= own.columns) return;
    float chunk[CHUNK] = {};
    for (int part = 0; part < own.splits; ++part)
        chunk[0] += of_warps[column / ONE_FEATURES * own.splits + part][column % ONE_FEATURES];
    // A chunk of one element, after which the row ends.
    Result result = result_of(own);
    result.columns = first + column + 1;
    result.wide = 0;
    finish_chunk(result, 0, first + column, chunk);
}

KERNEL(linear_sum, LinearParams, SUM_THREADS) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    const int64_t chunks = params.rows * ceil_div<int64_t>(params.columns, CHUNK), group = number / chunks;
    if (group < params.num_groups) add_partials(result_of(of_group(params, group)), number % chunks);
}
