// Linear layers of quantized weights and activations (inference 5.3 to 5.7): y = y_before + x w^T
// of the values of their codes and scales.
//
//     FP8    y[t,o] = y_before[t,o]
//              + sum over b of (sum over i in b of qx[t,i] qw[o,i]) sx[t,b] sw[o/128,b]
//     MXFP4  y[t,o] = y_before[t,o] + sum over g of (sum over i in g of qx[t,i] w[o,i]) sx[t,g]
//     NVFP4  y[t,o] = y_before[t,o] + (sum over i of x[t,i] w[o,i]) (gx gw)
//
// FP8: both e4m3, scales e8m0 or fp32; b is a block of 128. MXFP4: x e4m3, e8m0 scales of 128 or
// 32; w e2m1, e8m0 scales of 32; w[o,i] = bf16(e2m1 times its scale), exact or infinite. NVFP4:
// both e2m1, e4m3 scales of 16; x and w are code times scale, exact in bf16; gx, gw are the
// tensors' scales. Products are exact, sums of a group fp32; blocks are added in increasing order,
// in fp32.
//
// Work is divided as in linear.cu: tiles of the result, splits of k, linear_quantized_sum.
// Batch invariance (Device::invariant): at most four splits, from columns and depth, of every tile.
// quantized_tiles.h converts codes to bf16 and applies scales. linear_hopper.cu is faster for FP8
// and MXFP4 on sm_90a. Launch: as linear.cu.
// Floor: 2 rows columns depth FLOP at 790 TFLOP/s; for few rows the bytes of w at 4.24 TB/s: FP8
// [65536, 1536] 24 us, [7168, 16384] 28 us, half for four bits. Expected limit: for many rows
// decoding, about 3 instructions an element and warp next to mma.sync; for few rows memory, one
// stage of 4 to 5 KB in flight a block, four an SM. Measured: kernels/docs/linear_quantized.md.
// Defines
//   FORMAT   1: FP8, 2: MXFP4, 3: NVFP4
//   GROUP    elements of x that share a scale: 128, of MXFP4 also 32; of NVFP4 16
#if !defined(FORMAT) || !defined(GROUP)
#error "define FORMAT as 1 (FP8), 2 (MXFP4) or 3 (NVFP4), and GROUP"
#endif

#include "quantized_tiles.h"

constexpr int SUM_THREADS = 256;

DEVICE float factor_of(const LinearQuantizedParams& params) {
    return FORMAT == NVFP4 ? __fmul_rn(*params.x_global_scale, *params.w_global_scale) : 1.0f;
}

template <typename S, bool WIDE>
DEVICE void linear_quantized(const LinearQuantizedParams& params) {
    const QuantizedProduct product = product_of(params, factor_of(params));
    multiply_tile<S, WIDE>(product, part_of<S>(product.result, blockIdx.x));
}

KERNEL(linear_quantized_large, LinearQuantizedParams, Large::THREADS) { linear_quantized<Large, true>(params); }
SHARED_MEMORY(linear_quantized_large, Layout<Large>::BYTES)
KERNEL(linear_quantized_small, LinearQuantizedParams, Small::THREADS) { linear_quantized<Small, true>(params); }
SHARED_MEMORY(linear_quantized_small, Layout<Small>::BYTES)
KERNEL(linear_quantized_scalar, LinearQuantizedParams, Scalar::THREADS) { linear_quantized<Scalar, false>(params); }
SHARED_MEMORY(linear_quantized_scalar, Layout<Scalar>::BYTES)

KERNEL(linear_quantized_sum, LinearQuantizedParams, SUM_THREADS) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * SUM_THREADS + threadIdx.x;
    add_partials(result_of(params, factor_of(params)), number);
}
