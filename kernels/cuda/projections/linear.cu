// Linear layers of bf16 weights and their gradients (inference 0, 5.2, 5.5).
//
//     y[t,o]  = y_before[t,o]  + sum over i of x[t,i] w[o,i]
//     dx[t,i] =                  sum over o of dy[t,o] w[o,i]
//     dw[o,i] = dw_before[o,i] + sum over t of dy[t,o] x[t,i]
//
// x, w, dy and dx are bf16, y and dw bf16 or fp32. Products are exact, sums are fp32; y_before and dw_before, which may
// be y and dw themselves (sums over chunks of a sequence, say) or absent, are added to the whole sum with one rounding.
//
// A layer may be num_groups independent ones of the same extents (inference 9, wo_a): x, w and y then have an axis of
// groups, which are no part of any sum. A launch computes all groups, with as many blocks for each: the blocks of a
// group are neighbours, so that its operands stay in L2.
//
// How the work is laid out. All three are out = A B^T (linear.h), with A and B read as they lie: of dx the numbers of B
// that are multiplied stand below one another in memory, of dw those of both, and ldmatrix transposes them. A block
// takes a tile of the result, 128 x 128 or, of up to 16 rows, 16 x 64, and goes over k in stages of 64, of which
// cp.async holds STAGES - 1 under way while the tensor cores multiply one. Where there are fewer tiles than the machine
// takes blocks, k is divided among several, whose sums linear_sum adds in order: the same bits each time. The scalar
// kernels take any stride and extent, element by element.
//
// Floors: 2 rows columns depth FLOP at 790 TFLOP/s; of few rows the bytes of w at 4.24 TB/s, 67 us for [65536, 4096].
// Expected to limit: the rate of mma.sync of the large tiles, about two thirds of wgmma's; memory of the small ones,
// which keep 5 x 10 KB a block and three blocks a multiprocessor in flight (of large tiles it is 3 x 32 KB and one).
// cuBLASLt, three times as fast for many tokens, takes products of more than 16 rows where the caller lets the launcher
// choose it (Products::Library); these kernels are what there is everywhere.
// Measured on one H200: 7168 x 16384 for one token 64 us (3.7 TB/s), for 4096 tokens 3482 us (276 TFLOP/s), both
// gradients 7305 us (263 TFLOP/s).
//
// Groups, 16 of 1024 x 4096: 137 MB of w, 32 us, for one token; 550 GFLOP, 696 us, for 4096. Measured: 62.7 us for 64 tokens,
// 2085 us for 4096, both gradients 4363 us: the rate of mma.sync, as above, with a third of cuBLAS's.
//
// One token has a kernel of its own (linear_forward_one). In tiles of 16 rows it took, on one H200, 51.6, 65.8, 35.1, 10.7 and 7.7 us
// for [65536, 1536], [7168, 16384], 16 groups of [1024, 4096], [1536, 7168] and [512, 7168], the narrow ones of which had a second
// launch that added up parts of k; in the same call this takes 47.0, 55.5, 32.8, 7.7 and 3.7, and torch, which has cuBLAS, the first
// three in 50.7, 59.8 and 33.6. Floors are 47.5, 55.4, 31.7, 5.2 and 1.7 us at 4.24 TB/s and an empty launch. Four blocks of 64
// registers a thread with two chunks under way were the fastest; eight chunks, of which two blocks are held, took 53.7, 55.2 and
// 33.4. The same of four tokens took 80 to 90 us for [7168, 16384], where tiles take 65: not kept.
//
// Launch. num_groups times `splits` times the tiles of a group's result blocks; linear_forward_one: num_groups times as many blocks
// as ONE_WARPS / splits * ONE_FEATURES columns fill, of which `splits` warps, a power of two up to ONE_WARPS, share a row of w; linear_sum: ceil(num_groups rows
// ceil(columns / 8) / SUM_THREADS).
#include "async_copy.h"
#include "linear.h"
#include "math.h"

using Large = Shape<128, 128, 2, 4, 4>;
using Small = Shape<16, 64, 1, 4, 6>;
using Scalar = Shape<64, 64, 2, 2, 2>;
constexpr int SUM_THREADS = 256;

struct LinearParams {
    // Of each group, and how many elements further the next group's lies.
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
PARAMS_LAYOUT(LinearParams, a, a_stride, a_group_stride, b, b_stride, b_group_stride, before, before_stride,
              before_group_stride, out, out_stride, out_group_stride, partials, rows, columns, depth, splits, out_is_f32,
              wide, num_groups)

// The call as it is for one group.
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

// An operand: where its numbers lie, and how many rows of the result it has.
struct Operand {
    const bf16* numbers;
    int64_t stride, extent, depth;
};

// EXTENT rows of an operand from `first` on, and the DEPTH numbers of k of a stage, into their tile; zeros where there
// are none. WIDE: by copies of 16 bytes that land later.
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

template <typename S, bool A_TRANSPOSED, bool B_TRANSPOSED, bool WIDE>
DEVICE void linear(const LinearParams& all) {
    const uint32_t group_blocks = gridDim.x / static_cast<uint32_t>(all.num_groups);
    const LinearParams params = of_group(all, blockIdx.x / group_blocks);
    const Result result = result_of(params);
    const Part part = part_of<S>(result, blockIdx.x % group_blocks);
    const Operand a{params.a, params.a_stride, params.rows, params.depth};
    const Operand b{params.b, params.b_stride, params.columns, params.depth};
    const SharedAddress shared = shared_address(dynamic_shared());
    const auto place = [&](int64_t stage) { return shared + static_cast<int>(stage % S::STAGES) * S::STAGE_BYTES; };
    const auto load = [&](int64_t stage) {
        if (stage < part.end) {
            load_operand<S::ROWS, S::THREADS, A_TRANSPOSED, WIDE>(place(stage), a, part.row, stage);
            load_operand<S::COLUMNS, S::THREADS, B_TRANSPOSED, WIDE>(place(stage) + S::A_BYTES, b, part.column, stage);
        }
        copy_commit();
    };
    for (int i = 0; i < S::STAGES - 1; ++i) load(part.begin + i);
    // A warp without a row of the result has nothing to multiply.
    const bool has_rows = part.row + warp_row<S>() < params.rows;
    Sums<S> sums = {};
    for (int64_t stage = part.begin; stage < part.end; ++stage) {
        copy_wait<S::STAGES - 2>();
        // Past this barrier the stage is there for everyone, and nobody reads the one before it any more.
        __syncthreads();
        load(stage + S::STAGES - 1);
        if (has_rows) multiply_stage<S, A_TRANSPOSED, B_TRANSPOSED>(sums, place(stage));
    }
    __syncthreads();
    store_sums<S>(result, part, sums);
}

KERNEL(linear_forward_large, LinearParams, Large::THREADS) { linear<Large, false, false, true>(params); }
SHARED_MEMORY(linear_forward_large, Large::BYTES)
KERNEL(linear_forward_small, LinearParams, Small::THREADS) { linear<Small, false, false, true>(params); }
SHARED_MEMORY(linear_forward_small, Small::BYTES)
KERNEL(linear_forward_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, false, false, false>(params); }
SHARED_MEMORY(linear_forward_scalar, Scalar::BYTES)
KERNEL(linear_dx_large, LinearParams, Large::THREADS) { linear<Large, false, true, true>(params); }
SHARED_MEMORY(linear_dx_large, Large::BYTES)
KERNEL(linear_dx_small, LinearParams, Small::THREADS) { linear<Small, false, true, true>(params); }
SHARED_MEMORY(linear_dx_small, Small::BYTES)
KERNEL(linear_dx_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, false, true, false>(params); }
SHARED_MEMORY(linear_dx_scalar, Scalar::BYTES)
KERNEL(linear_dw_large, LinearParams, Large::THREADS) { linear<Large, true, true, true>(params); }
SHARED_MEMORY(linear_dw_large, Large::BYTES)
KERNEL(linear_dw_scalar, LinearParams, Scalar::THREADS) { linear<Scalar, true, true, false>(params); }
SHARED_MEMORY(linear_dw_scalar, Scalar::BYTES)

// ---------------------------------------------------------------- one token

// A warp reads rows of w from one end to the other, or every `splits`th part of them beside other warps of its block, and a lane
// every 32nd chunk of 16 bytes, several of which are on their way at once: memory is asked for whole rows, no tile waits for
// another, and no launch adds up what parts of k left. Products are added in plain fp32: of a token the tensor cores would multiply
// fifteen of sixteen times by nothing.
constexpr int ONE_THREADS = 256, ONE_WARPS = ONE_THREADS / static_cast<int>(WARP_SIZE), ONE_HELD = 4;
constexpr int ONE_FEATURES = 2, ONE_CHUNKS = 2;  // rows of w of a warp, chunks of each that a lane has under way
constexpr int ONE_STEP = ONE_CHUNKS * static_cast<int>(WARP_SIZE);

// What a lane multiplies: its chunks from `chunk` on, of which those from `chunks` on are not there. WHOLE: all are.
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
    // Columns of a block, from its first on; the warp's are those behind `turn` others.
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
    // A chunk of one element, behind which the row ends.
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
