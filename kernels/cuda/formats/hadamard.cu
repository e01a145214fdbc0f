// The orthonormal Walsh-Hadamard transform of rows of 128, stored or quantised (inference 5.4, 7, 7.1).
//
//     y[i] = 128^-0.5 sum over j of (-1)^popcount(i AND j) x[j]
//
// as seven steps of butterflies, h = 1, 2, 4 ... 64: (a, b) = (a + b, a - b) for each pair of elements h apart. The order is
// part of the definition: every sum is an fp32 number, so that the result, and each code made of it, has one value. The
// transform is symmetric and its own inverse: the backward is the forward of dy.
//
// STORED 0 writes y. Otherwise y is rounded to bf16 and quantised, amax being the largest magnitude of a group,
//
//     1  e2m1 in groups of 32, two codes a byte, the even one in the low nibble, with an e8m0 byte a group:
//            s = 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6)))
//     2  e4m3, the row being one group, with an fp32 scale a row:
//            s = 2^ceil(log2(max(amax, 1e-4) * fp32(1/448)))
//
// A group with a NaN or an infinity has a scale of NaN, and its codes are those of NaN (of e2m1, which has none, +6).
//
// Codes of bf16 are made by hadamard_codes.cu where accesses of 16 bytes fit every row; what follows is for all else.
//
// Four lanes take a row, so that five of the seven steps stay within a lane. Floor for bf16: 256 bytes read and 256, 68 or 132
// written a row; at 4.24 TB/s a row of the e2m1 form takes 0.076 ns, which leaves 21 instructions an element at 85 %. It takes
// 19, 613 a warp of eight rows: 7 sums, 2 shuffles and a product of the transform, 1 to unpack, 2 to round and find the
// largest, 4 for the code, the rest for addresses, scales and signs. With three sums a code it took 656, 23 us of issue slots for
// 262144 rows, as long as 85 % of the copy rate leaves. Measured on one H200 for 262144 rows with these: e2m1 31.9 us (63 % of the
// copy rate; 34.1 before codes were sums in packed bf16), e4m3 30.4 us (79 %), bf16 34.0 us (93 %).
//
// Defines: ELEMENT  type of x and y: bf16 or float; STORED  0, 1 or 2. Launch: ceil(num_rows / ROWS_PER_BLOCK) blocks.
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
PARAMS_LAYOUT(HadamardParams, x, x_row_stride, y, y_row_stride, codes, codes_row_stride, scale_bytes, scales, num_rows)

template <bool WIDE>
DEVICE void hadamard_row(const HadamardParams& params) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    // A row that is not there is a row of zeros: its lanes take part in the shuffles of their warp.
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
