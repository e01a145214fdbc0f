// The orthonormal Walsh-Hadamard transform of rows of 128, stored or quantized (inference 5.4, 7,
// 7.1).
//
//     y[i] = 128^-0.5 sum over j of (-1)^popcount(i AND j) x[j]
//
// as seven steps of butterflies, h = 1, 2, 4 ... 64: (a, b) = (a + b, a - b) for each pair of
// elements h apart. The order is part of the definition: every sum is rounded to fp32, so all
// codes have one value. The transform is its own inverse: the backward is the forward of dy.
// STORED 0 writes y. Otherwise y is rounded to bf16 and quantized; amax is a group's largest
// magnitude:
//     1  e2m1 in groups of 32, two codes a byte, the even one low, with an e8m0 byte a group:
//            s = 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6)))
//     2  e4m3, the row being one group, with an fp32 scale a row:
//            s = 2^ceil(log2(max(amax, 1e-4) * fp32(1/448)))
// A group with a NaN or an infinity has the scale NaN and the codes of NaN (of e2m1, which has
// none, +6). hadamard_codes.cu makes the codes of bf16 if 16-byte accesses fit every row; this
// kernel is for all else.
//
// Four lanes take a row, so five of the seven steps stay within a lane. Floor for bf16: 256 bytes
// read and 256, 68 or 132 written a row, at 4.24 TB/s. e2m1 is close to the issue limit: 19
// instructions an element of the 21 that 85 % of that rate leaves. What was tried:
// kernels/docs/hadamard.md.
//
// Defines: ELEMENT  type of x and y: bf16 or float; STORED  0, 1 or 2. Launch: ceil(num_rows /
// ROWS_PER_BLOCK) blocks.
#include "element.h"
#include "hadamard.h"

#ifndef STORED
#error "define STORED as 0 (y), 1 (e2m1) or 2 (e4m3)"
#endif

constexpr int THREADS = 128;
constexpr int ROWS_PER_BLOCK = THREADS / LANES;

struct HadamardParams {
    const ELEMENT* x; int64_t x_row_stride;        // [num_rows, 128]; strides in elements
    ELEMENT* y; int64_t y_row_stride;              // [num_rows, 128], or nullptr
    uint8_t* codes; int64_t codes_row_stride;      // [num_rows, 64 or 128], or nullptr
    uint8_t* scale_bytes;                          // [num_rows, 4] e8m0, or nullptr
    float* scales;                                 // [num_rows], or nullptr
    int64_t num_rows;
};

template <bool WIDE>
DEVICE void hadamard_row(const HadamardParams& params) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    // A missing row is a row of zeros: its lanes take part in the shuffles of their warp.
    const bool exists = row < params.num_rows;
    Row x = {};
    if (exists) load_row<WIDE>(params.x + row * params.x_row_stride, lane, x);
    transform(x, lane);
    Rounded rounded = {};
    if constexpr (STORED != 0) rounded = round_to_bf16(x);
    uint8_t* const codes = params.codes + row * params.codes_row_stride;
    if constexpr (STORED == 1)
        store_e2m1<WIDE>(codes, params.scale_bytes + row * E2M1_GROUPS, lane, exists, rounded);
    if constexpr (STORED == 2) {
        const uint8_t scale = store_e4m3<WIDE>(codes, lane, exists, x, rounded);
        if (exists && lane == 0) params.scales[row] = e8m0_to_float(scale);
    }
    if (STORED == 0 && exists) store_row<WIDE>(params.y + row * params.y_row_stride, lane, x);
}

KERNEL(hadamard_vector, HadamardParams, THREADS) { hadamard_row<true>(params); }
KERNEL(hadamard_scalar, HadamardParams, THREADS) { hadamard_row<false>(params); }
