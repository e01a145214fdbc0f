// SwiGLU with clamps and an optional row weight w (inference 11.1, training 11.2). With
// a = min(gate, limit), b = clamp(up, -limit, limit) and s = 1 / (1 + exp(-a)),
//
//     y     = w (a s b)                                     dup     = [|up| <= limit] w dy (a s)
//     dgate = [gate <= limit] w dy b s (1 + a (1 - s))      dweight = sum over the row of dy a s b
//
// The gate has no lower clamp. A value equal to the limit passes its gradient on. NaN is not
// clamped and stays NaN. A padding row, one whose pos_to_token_topk entry is negative, is treated
// as zeros and gets zeros; with many rows it is not read. fp32 from load to store: each output is
// rounded once. A row's sum depends on its width only.
//
// Work division: one warp takes a row, 16 bytes an access where width, strides and addresses allow
// it, one element otherwise. With the few rows of a decode step each access has its own thread.
// gate and up are loaded before it is known whether the row is padding, which changes no bit. The
// backward of such a row takes one block: each warp has one step of the warp that takes a row of
// many. dweight adds the steps' sums in the same order either way.
//
// Floor, s = sizeof(ELEMENT): forward 3s bytes an element for 10 FLOPs, backward 5s for 22, two of
// them special functions. Limit: memory, at 4.24 TB/s. At 3.6e12 a second the special functions
// take 0.4 of the bf16 forward's time, 0.24 of the backward's. One H200: 65536 rows of 2048 bf16
// channels in 189 and 323 us (4.26 and 4.16 TB/s, a copy 4.2).
//
// Defines: ELEMENT  type of the rows: bf16 or float. Launch: ceil(num_rows / ROWS_PER_BLOCK)
// blocks; with few rows a row of blocks for each, one thread an access, of the backward one block.
// What was tried: kernels/docs/swiglu.md.
#include "element.h"
#include "elements.h"
#include "swiglu.h"

constexpr int ROWS_PER_BLOCK = 4, THREADS = ROWS_PER_BLOCK * WARP_SIZE;
constexpr int FEW_BACKWARD_THREADS = 512, FEW_BACKWARD_WARPS = FEW_BACKWARD_THREADS / WARP_SIZE;

struct SwigluParams {
    const ELEMENT* gate; int64_t gate_row_stride;    // [num_rows, width], as are up, y, dy, dgate and dup
    const ELEMENT* up; int64_t up_row_stride;        // all strides in elements
    const float* weight;                             // [num_rows], or nullptr for ones
    const int32_t* pos_to_token_topk;                // [num_rows], or nullptr where no row is padding
    ELEMENT* y; int64_t y_row_stride;                // of the forward; nullptr in the backward
    const ELEMENT* dy; int64_t dy_row_stride;        // of the backward, as all below; nullptr in the forward
    ELEMENT* dgate; int64_t dgate_row_stride;
    ELEMENT* dup; int64_t dup_row_stride;
    float* dweight;                                  // [num_rows], or nullptr
    int64_t num_rows;
    int32_t width;
    float limit;
};

// Sums the warps' steps in the order of the steps. One warp that takes them all has the same sums
// in its lanes.
DEVICE float sum_of_steps(float dweight) {
    __shared__ float of_steps[FEW_BACKWARD_WARPS][WARP_SIZE];
    of_steps[warp_id()][lane_id()] = dweight;
    __syncthreads();
    float sum = 0.0f;
    for (int step = 0; step < static_cast<int>(blockDim.x / WARP_SIZE); ++step) sum += of_steps[step][lane_id()];
    return sum;
}

// FEW: blockIdx.y is the row, and each thread has one of its accesses, without a loop. The access
// then does not wait for what is known of the row.
template <int COUNT, bool BACKWARD, bool FEW = false>
DEVICE void swiglu_row(const SwigluParams& params) {
    const int64_t row = FEW ? blockIdx.y : static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + warp_id();
    if (row >= params.num_rows) return;
    const int64_t step = (FEW ? static_cast<int64_t>(gridDim.x) * THREADS : WARP_SIZE) * COUNT;
    const int64_t first = (FEW ? static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x : lane_id()) * COUNT;
    const bool padding = params.pos_to_token_topk && params.pos_to_token_topk[row] < 0;
    const float given = params.weight && (FEW || !padding) ? params.weight[row] : 1.0f, limit = params.limit;
    const float weight = padding ? 1.0f : given;
    float dweight = 0.0f;
    for (int64_t column = first; column < params.width; column += step) {
        float gate[COUNT] = {}, up[COUNT] = {}, dy[COUNT] = {}, y[COUNT], dgate[COUNT], dup[COUNT];
        if (FEW || !padding) {
            load_elements<COUNT>(params.gate + row * params.gate_row_stride + column, gate);
            load_elements<COUNT>(params.up + row * params.up_row_stride + column, up);
            if (BACKWARD) load_elements<COUNT>(params.dy + row * params.dy_row_stride + column, dy);
        }
        for (int e = 0; FEW && e < COUNT; ++e) {
            gate[e] = padding ? 0.0f : gate[e];
            up[e] = padding ? 0.0f : up[e];
            if (BACKWARD) dy[e] = padding ? 0.0f : dy[e];
        }
        float of_step = 0.0f;
        for (int e = 0; e < COUNT; ++e) {
            const float a = clamp_gate(gate[e], limit), b = clamp_up(up[e], limit);
            const float s = sigmoid(a), silu = a * s, g = dy[e] * weight;
            y[e] = silu * b * weight;
            dgate[e] = gate[e] > limit ? 0.0f : g * b * (s * (1.0f + a * (1.0f - s)));
            dup[e] = absolute_f32(up[e]) > limit ? 0.0f : g * silu;
            of_step += dy[e] * (silu * b);
        }
        dweight += of_step;
        if (!BACKWARD) store_elements(params.y + row * params.y_row_stride + column, y);
        if (BACKWARD) store_elements(params.dgate + row * params.dgate_row_stride + column, dgate);
        if (BACKWARD) store_elements(params.dup + row * params.dup_row_stride + column, dup);
        if (FEW) break;
    }
    if (!BACKWARD || !params.dweight) return;
    if (FEW) dweight = sum_of_steps(dweight);
    dweight = warp_sum(dweight);
    if (FEW ? threadIdx.x == 0 : lane_id() == 0) params.dweight[row] = dweight;
}

KERNEL(swiglu_forward_vector, SwigluParams, THREADS) { swiglu_row<VECTOR, false>(params); }
KERNEL(swiglu_forward_scalar, SwigluParams, THREADS) { swiglu_row<1, false>(params); }
KERNEL(swiglu_forward_few_vector, SwigluParams, THREADS) { swiglu_row<VECTOR, false, true>(params); }
KERNEL(swiglu_forward_few_scalar, SwigluParams, THREADS) { swiglu_row<1, false, true>(params); }
// All blocks of 4096 rows of 2048 channels run at once.
KERNEL_OF(swiglu_backward_vector, SwigluParams, THREADS, 8) { swiglu_row<VECTOR, true>(params); }
KERNEL(swiglu_backward_few_vector, SwigluParams, FEW_BACKWARD_THREADS) { swiglu_row<VECTOR, true, true>(params); }
KERNEL(swiglu_backward_scalar, SwigluParams, THREADS) { swiglu_row<1, true>(params); }
