// Linear layers of quantised weights and activations (inference 5.3 to 5.7): y = y_before + x w^T of what their codes
// and scales stand for.
//
//     FP8      y[t,o] = y_before[t,o] + sum over b of (sum over i in block b of qx[t,i] qw[o,i]) sx[t,b] sw[o/128,b]
//     MXFP4    y[t,o] = y_before[t,o] + sum over g of (sum over i in group g of qx[t,i] w[o,i]) sx[t,g]
//     NVFP4    y[t,o] = y_before[t,o] + (sum over i of x[t,i] w[o,i]) (gx gw)
//
// FP8: both are e4m3, scales e8m0 or fp32. MXFP4: x is e4m3 with e8m0 scales of 128 or 32 numbers, w is e2m1 with e8m0
// scales of 32, and w[o,i] = bf16(e2m1 times its scale), exact below the largest bf16 number and infinite above. NVFP4:
// both are e2m1 with e4m3 scales of 16, x and w their products, which bf16 holds; gx and gw are the scales of the whole
// tensors. Products are exact and the sums of a group fp32; blocks are added in increasing order, in fp32.
//
// How the work is laid out. As in linear.cu: tiles of the result, parts of k, linear_quantised_sum. quantised_tiles.h
// says how codes become bf16 and where scales are applied.
//
// Floors: 2 rows columns depth FLOP at 790 TFLOP/s; of few rows the bytes of w at 4.24 TB/s: FP8 [65536, 1536] 24 us,
// [7168, 16384] 28 us, half of that for four bits. Expected to limit: of many rows the decoding, some 3 instructions a
// number and warp, beside mma.sync; of few memory, since a block has one stage of 4 to 5 KB under way, and four blocks
// a multiprocessor are too few for all of the bandwidth. Measured on one H200 (MXFP4,
// groups of 128): 1, 64 and 4096 tokens 75, 196 and 6199 us for [65536, 1536], 101, 258 and 7364 us for [7168, 16384].
// linear_hopper.cu is the faster one for FP8 and MXFP4 on sm_90a.
//
// Defines
//   FORMAT   1: FP8, 2: MXFP4, 3: NVFP4
//   GROUP    numbers of x that share a scale: 128, of MXFP4 also 32; of NVFP4 16
//
// Launch. As linear.cu.
#if !defined(FORMAT) || !defined(GROUP)
#error "define FORMAT as 1 (FP8), 2 (MXFP4) or 3 (NVFP4), and GROUP"
#endif

#include "quantised_tiles.h"

constexpr int SUM_THREADS = 256;

DEVICE float factor_of(const LinearQuantisedParams& params) {
    return FORMAT == NVFP4 ? __fmul_rn(*params.x_global_scale, *params.w_global_scale) : 1.0f;
}

template <typename S, bool WIDE>
DEVICE void linear_quantised(const LinearQuantisedParams& params) {
    const QuantisedProduct product = product_of(params, factor_of(params));
    multiply_tile<S, WIDE>(product, part_of<S>(product.result, blockIdx.x));
}

KERNEL(linear_quantised_large, LinearQuantisedParams, Large::THREADS) { linear_quantised<Large, true>(params); }
SHARED_MEMORY(linear_quantised_large, Layout<Large>::BYTES)
KERNEL(linear_quantised_small, LinearQuantisedParams, Small::THREADS) { linear_quantised<Small, true>(params); }
SHARED_MEMORY(linear_quantised_small, Layout<Small>::BYTES)
KERNEL(linear_quantised_scalar, LinearQuantisedParams, Scalar::THREADS) { linear_quantised<Scalar, false>(params); }
SHARED_MEMORY(linear_quantised_scalar, Layout<Scalar>::BYTES)

KERNEL(linear_quantised_sum, LinearQuantisedParams, SUM_THREADS) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    add_partials(result_of(params, factor_of(params)), number);
}
