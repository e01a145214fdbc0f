// Linear layers of experts (inference 5.5, 11.1, 11.3): each row of x times the quantized weights
// of its expert.
//
//     y[p,o] = sum over i of x[p,i] w[e,o,i]      for the rows p of expert e
//
// of the values that codes and scales stand for: FP8, MXFP4 or NVFP4 of linear_quantized.cu, expert
// by expert; of NVFP4 x has one scale, and each expert's w has its own. The bits are the same where
// that kernel does not split k. Rows are
//   sorted   [rows, depth]: those of expert e are the first counts[e] from expert_offsets[e] on
//            (moe_map). Offsets ascend. All other rows are padding: not read, and y is 0 there
//   masked   [experts, rows, depth]: those of expert e are the first counts[e] of its part. The
//            others are neither read nor written
// Any number of rows is valid. An expert without rows is not read.
//
// Work division: tiles of the result as in linear_quantized.cu (quantized_tiles.h), each of one
// expert. An expert's last tile has the rows that are left. Only the counts say how many tiles
// exist, so each block first sums the tiles of all experts in shared memory. It finds a tile's
// expert by bisection and takes every gridDim.x-th tile. k is not split.
//
// Floor, 256 experts of [4096, 4096] FP8, 2 FLOP an element of w and row at 790 TFLOP/s: 1.04 ms
// for 24576 rows, 8.35 ms for 196608. With few rows the bytes of w at 4.24 TB/s: 4.3 GB, 1.01 ms;
// half of that for four bits. Limit: that of linear_quantized.cu; with few rows, the weights.
//
// Defines: FORMAT 1 (FP8), 2 (MXFP4) or 3 (NVFP4); GROUP, values of x per scale: 128, of MXFP4 also
// 32, of NVFP4 16.
// Launch: any grid in x.
// What was tried: kernels/docs/grouped_linear.md.
#if !defined(FORMAT) || !defined(GROUP)
#error "define FORMAT as 1 (FP8), 2 (MXFP4) or 3 (NVFP4), and GROUP"
#endif

#include "quantized_tiles.h"
#include "grouped_linear.h"

template <typename S>
using GroupedShared = SharedOfExperts<typename Layout<S>::Plan>;

// What the epilogue multiplies an expert's sums by.
DEVICE float factor_of(const GroupedLinearParams& params, int32_t expert) {
    return FORMAT == NVFP4 ? __fmul_rn(*params.x_global_scale, params.w_global_scale[expert]) : 1.0f;
}

template <typename S, bool WIDE>
DEVICE void grouped_linear(const GroupedLinearParams& params) {
    int32_t* const ends = GroupedShared<S>::ends();
    count_tiles<S>(params, ends);
    clear_padding<S::THREADS / WARP_SIZE>(params);
    const ExpertTiles<S> tiles{params, ends};
    const int64_t count = tiles.count();
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const ExpertTile tile = tiles[number];
        QuantizedProduct product = product_of_expert(params, tile.expert);
        product.result.factor = factor_of(params, tile.expert);
        multiply_tile<S, WIDE>(product, part_of<S>(product.result, tile.number));
        // The next tile's operands overwrite this one's sums.
        __syncthreads();
    }
}

KERNEL(grouped_linear_large, GroupedLinearParams, Large::THREADS) { grouped_linear<Large, true>(params); }
SHARED_MEMORY(grouped_linear_large, GroupedShared<Large>::BYTES)
KERNEL(grouped_linear_small, GroupedLinearParams, Small::THREADS) { grouped_linear<Small, true>(params); }
SHARED_MEMORY(grouped_linear_small, GroupedShared<Small>::BYTES)
KERNEL(grouped_linear_scalar, GroupedLinearParams, Scalar::THREADS) { grouped_linear<Scalar, false>(params); }
SHARED_MEMORY(grouped_linear_scalar, GroupedShared<Scalar>::BYTES)
