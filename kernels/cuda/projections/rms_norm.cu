// RMSNorm (inference 3, training 11.3): y = w * (x * rstd), rstd = 1/sqrt(mean(x^2) + eps), row by
// row.
//
// Defines: ELEMENT         type of x, y, dy and dx: bf16 or float
//          WEIGHT_ELEMENT  type of the weight: bf16 or float (unused without a weight)
//
// All arithmetic between a load and a store is fp32, so each output is rounded once.
//
// The width decides how work is divided. A row of up to 1024 elements belongs to one warp, which
// needs no block barrier and keeps several rows in flight. A wider row belongs to one block. Both
// hold the row in registers between the reduction and the store, so it is read once, in 16-byte
// accesses. The scalar kernels take any width, stride or address that is not a multiple of 16
// bytes. The order of a row's sum depends only on its width and the kernel, never on the number of
// rows.
//
// Floor, with s = sizeof(ELEMENT): forward reads and writes s bytes an element, 2s bytes for 4
// FLOPs. Backward reads dy and x and writes dx, 3s bytes for about 9 FLOPs. All are limited by
// memory. Measured numbers and what was tried: kernels/docs/rms_norm.md.
#include "element.h"
#include "elements.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"

#ifndef WEIGHT_ELEMENT
#error "define WEIGHT_ELEMENT as bf16 or float"
#endif

constexpr int HELD = 32 / VECTOR;                    // vectors of a row that one forward thread holds
constexpr int GRADIENT_HELD = 16 / VECTOR;           // the same for a thread of the backward block kernel
constexpr int WARP_WIDTH = 1024;                     // widest row of the warp kernels
constexpr int WARP_KERNEL_THREADS = 256;
constexpr int FEW_THREADS = 512;                     // of the block kernel for few rows, whose threads hold the weight as well
constexpr int DWEIGHT_GROUPS = 16;
constexpr int DWEIGHT_LOADS = 8;                     // partials that a thread of rms_norm_dweight has in flight
constexpr int LINE_BYTES = 128;
// Limits the compiler to 72 registers, so that two blocks of 448 threads (width 7168) share an SM.
constexpr int BACKWARD_BLOCK_THREADS = 896;

struct RmsNormForwardParams {
    const ELEMENT* x;  // [num_rows, width], rows x_row_stride elements apart
    int64_t x_row_stride;
    ELEMENT* y;  // [num_rows, width]; may be x itself, with equal strides
    int64_t y_row_stride;
    const WEIGHT_ELEMENT* weight;  // [width], or nullptr for a weight of ones
    float* rstd;                   // [num_rows], or nullptr
    int64_t num_rows;
    int32_t width;
    float eps;
};

struct RmsNormBackwardParams {
    const ELEMENT* dy;  // [num_rows, width]
    int64_t dy_row_stride;
    const ELEMENT* x;  // [num_rows, width]
    int64_t x_row_stride;
    const WEIGHT_ELEMENT* weight;  // [width], or nullptr for a weight of ones
    const float* rstd;             // [num_rows], saved by the forward
    ELEMENT* dx;                   // [num_rows, width]; shares no memory with the inputs
    int64_t dx_row_stride;
    float* dweight_partials;  // [gridDim.x, width], or nullptr where no dweight is wanted
    int64_t num_rows;
    int32_t width;
};

struct RmsNormDweightParams {
    const float* dweight_partials;  // [num_partials, width]
    float* dweight;                 // [width]
    int32_t num_partials;           // 0 gives a dweight of zeros
    int32_t width;
};

// ---------------------------------------------------------------- weights, stores, sums

DEVICE Vec16 pack(const float (&in)[VECTOR]) { return pack<ELEMENT>(in); }

template <int COUNT>
DEVICE void load_weight(const WEIGHT_ELEMENT* weight, int64_t column, float (&out)[COUNT]) {
    if (weight) {
        load_elements<COUNT>(weight + column, out);
    } else {
        for (int e = 0; e < COUNT; ++e) out[e] = 1.0f;
    }
}

// The sum over the block, in every thread. `partials` holds one float for each of up to 32 warps.
// A caller may pass it again only after another barrier, so loops alternate between two.
DEVICE float block_sum(float value, float* partials) {
    const uint32_t lane = threadIdx.x % WARP_SIZE;
    value = warp_sum(value);
    if (lane == 0) partials[threadIdx.x / WARP_SIZE] = value;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP_SIZE ? partials[lane] : 0.0f);
}

DEVICE float reciprocal_rms(float sum_of_squares, int32_t width, float eps) {
    return rsqrt_approx(sum_of_squares / static_cast<float>(width) + eps);
}

DEVICE float square_sum(const Vec16& vector, float sum) {
    float x[VECTOR];
    unpack<ELEMENT>(vector, x);
    for (int e = 0; e < VECTOR; ++e) sum += x[e] * x[e];
    return sum;
}

template <int COUNT>
DEVICE void normalize(const float (&x)[COUNT], const float (&weight)[COUNT], float rstd, float (&y)[COUNT]) {
    for (int e = 0; e < COUNT; ++e) y[e] = weight[e] * (x[e] * rstd);
}

// ---------------------------------------------------------------- forward

// One warp takes HELD / VECTORS rows at a time, each VECTORS vectors a lane wide.
template <int VECTORS>
DEVICE void forward_rows(const RmsNormForwardParams& params) {
    constexpr int ROWS = HELD / VECTORS;
    const int vectors = params.width / VECTOR;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t warps_per_block = blockDim.x / WARP_SIZE;
    const int64_t num_warps = gridDim.x * warps_per_block;
    const int64_t warp = blockIdx.x * warps_per_block + threadIdx.x / WARP_SIZE;

    for (int64_t first = warp * ROWS; first < params.num_rows; first += num_warps * ROWS) {
        Vec16 held[ROWS][VECTORS];
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                const int64_t column = lane + v * WARP_SIZE;
                held[r][v] = Vec16{};
                if (first + r < params.num_rows && column < vectors)
                    held[r][v] = load_vec16(params.x + (first + r) * params.x_row_stride + column * VECTOR);
            }

        float rstd[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            float sum = 0.0f;
            for (int v = 0; v < VECTORS; ++v) sum = square_sum(held[r][v], sum);
            rstd[r] = reciprocal_rms(warp_sum(sum), params.width, params.eps);
            if (params.rstd && lane == 0 && first + r < params.num_rows) params.rstd[first + r] = rstd[r];
        }

        for (int v = 0; v < VECTORS; ++v) {
            const int64_t column = lane + v * WARP_SIZE;
            if (column >= vectors) continue;
            float weight[VECTOR], x[VECTOR], y[VECTOR];
            load_weight(params.weight, column * VECTOR, weight);
            for (int r = 0; r < ROWS; ++r) {
                if (first + r >= params.num_rows) continue;
                unpack<ELEMENT>(held[r][v], x);
                normalize(x, weight, rstd[r], y);
                store_vec16(params.y + (first + r) * params.y_row_stride + column * VECTOR, pack(y));
            }
        }
    }
}

// Rows of up to 1024 elements, one warp a row. Each lane has 64 (bf16) or 128 (float) bytes in
// flight.
KERNEL(rms_norm_forward_warp, RmsNormForwardParams, WARP_KERNEL_THREADS) {
    const int vectors_per_lane = ceil_div(params.width / VECTOR, static_cast<int>(WARP_SIZE));
    if (vectors_per_lane <= 1) {
        forward_rows<1>(params);
    } else if (vectors_per_lane <= 2) {
        forward_rows<2>(params);
    } else if (vectors_per_lane <= 4) {
        forward_rows<4>(params);
    } else {
        forward_rows<HELD>(params);
    }
}

// A thread's pieces of the weight. A missing column is replaced by the first, so that no load
// depends on a branch.
DEVICE void load_held_weights(const RmsNormForwardParams& params, float (&weight)[HELD][VECTOR]) {
    UNROLL
    for (int v = 0; v < HELD; ++v) {
        const int32_t column = static_cast<int32_t>((threadIdx.x + v * blockDim.x) * VECTOR);
        load_weight(params.weight, column < params.width ? column : 0, weight[v]);
    }
}

// Rows of up to 32 elements a thread, one block a row. EARLY: the weight is loaded before the
// first row and stays in registers. If loaded after it, the compiler delays the load until the
// sum's inputs arrive.
template <bool EARLY>
DEVICE void forward_of_blocks(const RmsNormForwardParams& params, float (&partials)[2][WARP_SIZE]) {
    const int vectors = params.width / VECTOR;
    float weight[HELD][VECTOR];
    if constexpr (EARLY) load_held_weights(params, weight);
    int turn = 0;
    for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, turn ^= 1) {
        const ELEMENT* row_x = params.x + row * params.x_row_stride;
        ELEMENT* row_y = params.y + row * params.y_row_stride;
        Vec16 held[HELD];
        float sum = 0.0f;
        for (int v = 0; v < HELD; ++v) {
            const int64_t column = threadIdx.x + v * blockDim.x;
            held[v] = Vec16{};
            if (column < vectors) held[v] = load_vec16(row_x + column * VECTOR);
        }
        // The sums of the vectors are independent, so none waits for another.
        for (int v = 0; v < HELD; ++v) sum += square_sum(held[v], 0.0f);
        const float rstd = reciprocal_rms(block_sum(sum, partials[turn]), params.width, params.eps);
        if (params.rstd && threadIdx.x == 0) params.rstd[row] = rstd;
        for (int v = 0; v < HELD; ++v) {
            const int64_t column = threadIdx.x + v * blockDim.x;
            if (column >= vectors) continue;
            float x[VECTOR], y[VECTOR];
            if constexpr (!EARLY) load_weight(params.weight, column * VECTOR, weight[v]);
            unpack<ELEMENT>(held[v], x);
            normalize(x, weight[v], rstd, y);
            store_vec16(row_y + column * VECTOR, pack(y));
        }
    }
}

// While one block waits at its barrier, the SM's other blocks keep memory busy.
KERNEL(rms_norm_forward_block, RmsNormForwardParams, 1024) {
    __shared__ float partials[2][WARP_SIZE];
    forward_of_blocks<false>(params, partials);
}

// For so few rows that no two blocks share an SM. There a load after the barrier is a second wait
// for memory, because no block has read the weight before. The same sums in the same order.
KERNEL(rms_norm_forward_block_few, RmsNormForwardParams, FEW_THREADS) {
    __shared__ float partials[2][WARP_SIZE];
    forward_of_blocks<true>(params, partials);
}

// Any width, stride and alignment, one block a row. The second read of the row hits a cache. Each
// element is read by the thread that overwrites it, so y may be x here too.
KERNEL(rms_norm_forward_scalar, RmsNormForwardParams, 1024) {
    __shared__ float partials[2][WARP_SIZE];
    int turn = 0;
    for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, turn ^= 1) {
        const ELEMENT* row_x = params.x + row * params.x_row_stride;
        ELEMENT* row_y = params.y + row * params.y_row_stride;
        float sum = 0.0f;
        for (int64_t column = threadIdx.x; column < params.width; column += blockDim.x) {
            const float x = Element<ELEMENT>::load(row_x + column);
            sum += x * x;
        }
        const float rstd = reciprocal_rms(block_sum(sum, partials[turn]), params.width, params.eps);
        if (params.rstd && threadIdx.x == 0) params.rstd[row] = rstd;
        for (int64_t column = threadIdx.x; column < params.width; column += blockDim.x) {
            float weight[1], y[1];
            const float x[1] = {Element<ELEMENT>::load(row_x + column)};
            load_weight(params.weight, column, weight);
            normalize(x, weight, rstd, y);
            store_elements(row_y + column, y);
        }
    }
}

// ---------------------------------------------------------------- backward
//
// With g = dy*w and r = rstd: dx = r * (g - x * r^2 * mean(g*x)), dweight = sum over rows of
// dy*x*r. Each block sums dweight of its own rows in fp32 and writes one partial row.
// rms_norm_dweight adds the partials in a fixed order. Nothing is atomic, so equal launches give
// equal bits.

// sum + these elements' part of sum(g*x).
template <int COUNT>
DEVICE float dot_sum(const float (&dy)[COUNT], const float (&x)[COUNT], const float (&weight)[COUNT], float sum) {
    for (int e = 0; e < COUNT; ++e) sum += dy[e] * weight[e] * x[e];
    return sum;
}

// r^2 * mean(g*x), the factor of x in dx.
DEVICE float mean_term(float dot, float rstd, int32_t width) {
    return rstd * rstd * (dot / static_cast<float>(width));
}

// dx of these elements, and their terms added to dweight.
template <int COUNT>
DEVICE void gradient(const float (&dy)[COUNT], const float (&x)[COUNT], const float (&weight)[COUNT], float rstd,
                     float mean, float (&dx)[COUNT], float (&dweight)[COUNT]) {
    for (int e = 0; e < COUNT; ++e) {
        dx[e] = rstd * (dy[e] * weight[e] - x[e] * mean);
        dweight[e] += dy[e] * (x[e] * rstd);
    }
}

// One row of a warp: every lane's vectors of dy and x, and the gradient's two scalars.
template <int VECTORS>
struct WarpRow {
    Vec16 dy[VECTORS], x[VECTORS];
    float rstd, mean;
};

template <int VECTORS>
DEVICE void load_row(const RmsNormBackwardParams& params, int64_t row, WarpRow<VECTORS>& held) {
    const int lane = threadIdx.x % WARP_SIZE;
    const bool inside = row < params.num_rows;
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = (lane + v * WARP_SIZE) * VECTOR;
        held.dy[v] = Vec16{};
        held.x[v] = Vec16{};
        if (inside && column < params.width) {
            held.dy[v] = load_vec16(params.dy + row * params.dy_row_stride + column);
            held.x[v] = load_vec16(params.x + row * params.x_row_stride + column);
        }
    }
    held.rstd = inside ? params.rstd[row] : 0.0f;
}

template <int VECTORS>
DEVICE void reduce_row(const RmsNormBackwardParams& params, WarpRow<VECTORS>& held) {
    const int lane = threadIdx.x % WARP_SIZE;
    float dot = 0.0f;
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = (lane + v * WARP_SIZE) * VECTOR;
        if (column >= params.width) continue;
        float dy[VECTOR], x[VECTOR], weight[VECTOR];
        unpack<ELEMENT>(held.dy[v], dy);
        unpack<ELEMENT>(held.x[v], x);
        load_weight(params.weight, column, weight);
        dot = dot_sum(dy, x, weight, dot);
    }
    held.mean = mean_term(warp_sum(dot), held.rstd, params.width);
}

// The warps of a block add their dweight one after the other, so that the order is always the
// same.
template <int VECTORS>
DEVICE void write_block_dweight(const RmsNormBackwardParams& params, const float (&dweight)[VECTORS][VECTOR],
                                float* total) {
    const uint32_t lane = threadIdx.x % WARP_SIZE;
    for (uint32_t warp = 0; warp < blockDim.x / WARP_SIZE; ++warp) {
        if (warp == threadIdx.x / WARP_SIZE) {
            for (int v = 0; v < VECTORS; ++v) {
                const int column = (lane + v * WARP_SIZE) * VECTOR;
                if (column >= params.width) continue;
                for (int e = 0; e < VECTOR; ++e)
                    total[column + e] = (warp == 0 ? 0.0f : total[column + e]) + dweight[v][e];
            }
        }
        __syncthreads();
    }
    float* partial = params.dweight_partials + static_cast<int64_t>(blockIdx.x) * params.width;
    for (int column = threadIdx.x; column < params.width; column += blockDim.x) partial[column] = total[column];
}

template <int VECTORS>
DEVICE void backward_rows(const RmsNormBackwardParams& params, float* total) {
    constexpr int ROWS = HELD / VECTORS;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t warps_per_block = blockDim.x / WARP_SIZE;
    const int64_t num_warps = gridDim.x * warps_per_block;
    const int64_t warp = blockIdx.x * warps_per_block + threadIdx.x / WARP_SIZE;
    float dweight[VECTORS][VECTOR] = {};

    for (int64_t first = warp * ROWS; first < params.num_rows; first += num_warps * ROWS) {
        WarpRow<VECTORS> held[ROWS];
        for (int r = 0; r < ROWS; ++r) load_row(params, first + r, held[r]);
        for (int r = 0; r < ROWS; ++r) reduce_row(params, held[r]);
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t column = (lane + v * WARP_SIZE) * VECTOR;
            if (column >= params.width) continue;
            float dy[VECTOR], x[VECTOR], weight[VECTOR], dx[VECTOR];
            load_weight(params.weight, column, weight);
            for (int r = 0; r < ROWS; ++r) {
                if (first + r >= params.num_rows) continue;
                unpack<ELEMENT>(held[r].dy[v], dy);
                unpack<ELEMENT>(held[r].x[v], x);
                gradient(dy, x, weight, held[r].rstd, held[r].mean, dx, dweight[v]);
                store_vec16(params.dx + (first + r) * params.dx_row_stride + column, pack(dx));
            }
        }
    }
    if (params.dweight_partials) write_block_dweight(params, dweight, total);
}

// Rows of up to 1024 elements, one warp a row; any grid covers all rows.
KERNEL(rms_norm_backward_warp, RmsNormBackwardParams, WARP_KERNEL_THREADS) {
    __shared__ float total[WARP_WIDTH];
    const int vectors_per_lane = ceil_div(params.width / VECTOR, static_cast<int>(WARP_SIZE));
    if (vectors_per_lane <= 1) {
        backward_rows<1>(params, total);
    } else if (vectors_per_lane <= 2) {
        backward_rows<2>(params, total);
    } else if (vectors_per_lane <= 4) {
        backward_rows<4>(params, total);
    } else {
        backward_rows<HELD>(params, total);
    }
}

// Prefetches a row into L2, if it exists: memory is busy while the row before it is reduced.
DEVICE void prefetch_row(const RmsNormBackwardParams& params, int64_t row) {
    if (row >= params.num_rows) return;
    constexpr int step = LINE_BYTES / static_cast<int>(sizeof(ELEMENT));
    for (int64_t column = threadIdx.x * step; column < params.width; column += blockDim.x * step) {
        prefetch_second_level(params.dy + row * params.dy_row_stride + column);
        prefetch_second_level(params.x + row * params.x_row_stride + column);
    }
}

// Stores dweight of neighbouring columns, if they exist. Single floats would write each sector of
// memory eight times. If the width is whole vectors, rows of the workspace start at multiples of
// 16 bytes; the launcher aligns it.
DEVICE void store_partial(const RmsNormBackwardParams& params, float* partial, int64_t column,
                          const float (&dweight)[VECTOR]) {
    if (column >= params.width) return;
    partial += column;
    UNROLL
    for (int e = 0; e < VECTOR; e += 4) {
        const float four[4] = {dweight[e], dweight[e + 1], dweight[e + 2], dweight[e + 3]};
        store_vec16(partial + e, ::pack<float>(four));
    }
}

// Rows of up to 16 elements a thread, one block a row; any grid covers all rows. Each thread keeps
// its columns' dweight in registers over all rows of its block.
KERNEL(rms_norm_backward_block, RmsNormBackwardParams, BACKWARD_BLOCK_THREADS) {
    __shared__ float partials[2][WARP_SIZE];
    float dweight[GRADIENT_HELD][VECTOR] = {};
    int turn = 0;
    for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, turn ^= 1) {
        const float rstd = params.rstd[row];
        Vec16 held_dy[GRADIENT_HELD], held_x[GRADIENT_HELD];
        float dy[VECTOR], x[VECTOR], weight[VECTOR], dx[VECTOR];
        for (int v = 0; v < GRADIENT_HELD; ++v) {
            const int64_t column = (threadIdx.x + v * blockDim.x) * VECTOR;
            if (column >= params.width) continue;
            held_dy[v] = load_vec16(params.dy + row * params.dy_row_stride + column);
            held_x[v] = load_vec16(params.x + row * params.x_row_stride + column);
        }
        prefetch_row(params, row + gridDim.x);
        float dot = 0.0f;
        for (int v = 0; v < GRADIENT_HELD; ++v) {
            const int64_t column = (threadIdx.x + v * blockDim.x) * VECTOR;
            if (column >= params.width) continue;
            unpack<ELEMENT>(held_dy[v], dy);
            unpack<ELEMENT>(held_x[v], x);
            load_weight(params.weight, column, weight);
            dot = dot_sum(dy, x, weight, dot);
        }
        const float mean = mean_term(block_sum(dot, partials[turn]), rstd, params.width);
        for (int v = 0; v < GRADIENT_HELD; ++v) {
            const int64_t column = (threadIdx.x + v * blockDim.x) * VECTOR;
            if (column >= params.width) continue;
            unpack<ELEMENT>(held_dy[v], dy);
            unpack<ELEMENT>(held_x[v], x);
            load_weight(params.weight, column, weight);
            gradient(dy, x, weight, rstd, mean, dx, dweight[v]);
            store_vec16(params.dx + row * params.dx_row_stride + column, pack(dx));
        }
    }
    if (!params.dweight_partials) return;
    float* partial = params.dweight_partials + static_cast<int64_t>(blockIdx.x) * params.width;
    for (int v = 0; v < GRADIENT_HELD; ++v)
        store_partial(params, partial, (threadIdx.x + v * blockDim.x) * VECTOR, dweight[v]);
}

// Rows too wide for registers, or not vectorizable. dy and x are read twice, the second time from
// a cache. The block's partial dweight is in memory; one thread owns each column.
template <int COUNT>
DEVICE void backward_reread(const RmsNormBackwardParams& params, float (*partials)[WARP_SIZE]) {
    const int64_t step = static_cast<int64_t>(blockDim.x) * COUNT;
    float* partial = params.dweight_partials;
    if (partial) {
        partial += static_cast<int64_t>(blockIdx.x) * params.width;
        for (int64_t column = threadIdx.x * COUNT; column < params.width; column += step)
            for (int e = 0; e < COUNT; ++e) partial[column + e] = 0.0f;
    }
    int turn = 0;
    for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x, turn ^= 1) {
        const ELEMENT* row_dy = params.dy + row * params.dy_row_stride;
        const ELEMENT* row_x = params.x + row * params.x_row_stride;
        ELEMENT* row_dx = params.dx + row * params.dx_row_stride;
        const float rstd = params.rstd[row];
        float dy[COUNT], x[COUNT], weight[COUNT], dx[COUNT];
        float dot = 0.0f;
        for (int64_t column = threadIdx.x * COUNT; column < params.width; column += step) {
            load_elements<COUNT>(row_dy + column, dy);
            load_elements<COUNT>(row_x + column, x);
            load_weight(params.weight, column, weight);
            dot = dot_sum(dy, x, weight, dot);
        }
        const float mean = mean_term(block_sum(dot, partials[turn]), rstd, params.width);
        for (int64_t column = threadIdx.x * COUNT; column < params.width; column += step) {
            load_elements<COUNT>(row_dy + column, dy);
            load_elements<COUNT>(row_x + column, x);
            load_weight(params.weight, column, weight);
            float dweight[COUNT] = {};
            gradient(dy, x, weight, rstd, mean, dx, dweight);
            store_elements(row_dx + column, dx);
            if (!partial) continue;
            for (int e = 0; e < COUNT; ++e) partial[column + e] += dweight[e];
        }
    }
}

KERNEL(rms_norm_backward_wide, RmsNormBackwardParams, 1024) {
    __shared__ float partials[2][WARP_SIZE];
    backward_reread<VECTOR>(params, partials);
}

KERNEL(rms_norm_backward_scalar, RmsNormBackwardParams, 1024) {
    __shared__ float partials[2][WARP_SIZE];
    backward_reread<1>(params, partials);
}

// dweight[column] = the sum of the partials' column, always in the same order: DWEIGHT_GROUPS
// strided sums, then those one after the other. Reads num_partials * width floats, far less than a
// row pass.
KERNEL(rms_norm_dweight, RmsNormDweightParams, DWEIGHT_GROUPS * WARP_SIZE) {
    __shared__ float sums[DWEIGHT_GROUPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, group = threadIdx.x / WARP_SIZE;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * WARP_SIZE + lane;
    float sum = 0.0f;
    const float* const partials = params.dweight_partials + column;
    for (int64_t first = group; column < params.width && first < params.num_partials;
         first += DWEIGHT_LOADS * DWEIGHT_GROUPS) {
        float loaded[DWEIGHT_LOADS];
        UNROLL
        for (int i = 0; i < DWEIGHT_LOADS; ++i) {
            const int64_t row = first + i * DWEIGHT_GROUPS;
            loaded[i] = row < params.num_partials ? partials[row * params.width] : 0.0f;
        }
        UNROLL
        for (int i = 0; i < DWEIGHT_LOADS; ++i) sum += loaded[i];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= params.width) return;
    for (int g = 1; g < DWEIGHT_GROUPS; ++g) sum += sums[g][lane];
    params.dweight[column] = sum;
}
