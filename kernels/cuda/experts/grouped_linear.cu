// Linear layers of experts (inference 5.5, 11.1, 11.3): each row of x times the quantised weights of its expert.
//
//     y[p,o] = sum over i of x[p,i] w[e,o,i]      for the rows p of expert e
//
// of what codes and scales stand for: FP8 or MXFP4 of linear_quantised.cu, expert by expert, bit for bit where that one
// does not divide k. Rows are
//   sorted   [rows, depth]: those of expert e are the first counts[e] from expert_offsets[e] on, as moe_map writes
//            both. Offsets may be any that ascend. All other rows are nobody's: they are not read, and y is 0 there
//   masked   [experts, rows, depth]: those of expert e are the first counts[e] of its part. The others are neither read
//            nor written
// No number of rows is too small, and an expert without rows is not touched.
//
// How the work is laid out. Tiles of the result as in linear_quantised.cu (quantised_tiles.h), each of one expert: an
// expert's last tile has the rows that are left, whatever its offset. How many there are only the counts say, so each
// block adds up the tiles of all experts first, in shared memory, finds the expert of a tile by bisection, and takes
// every gridDim.x-th tile. k is not divided: experts are many.
//
// Floors, 256 experts of [4096, 4096] FP8: 2 FLOP a number of w and row at 790 TFLOP/s, 24576 rows 1.04 ms, 196608 rows
// 8.35 ms; of few rows the bytes of w of the experts that have any, at 4.24 TB/s: 4.3 GB, 1.01 ms, and half of that for
// four bits. Expected to limit: what limits linear_quantised.cu, and of many experts with few rows the weights, of
// which four blocks of small tiles have a stage of 4 to 5 KB under way each. Measured on one H200
// (MXFP4, masked, 6, 192 and 768 slots): 91, 2476 and 4771 us. grouped_linear_hopper.cu is the faster one on
// sm_90a.
//
// Defines
//   FORMAT   1: FP8, 2: MXFP4
//   GROUP    numbers of x that share a scale: 128, of MXFP4 also 32
//
// Launch. Any grid in x.
#if !defined(FORMAT) || !defined(GROUP)
#error "define FORMAT as 1 (FP8) or 2 (MXFP4), and GROUP"
#endif

#include "quantised_tiles.h"
#include "grouped_linear.h"

static_assert(FORMAT == FP8 || FORMAT == MXFP4, "experts have two formats");

template <typename S>
struct GroupedLayout {
    static constexpr int ENDS = Layout<S>::BYTES;  // of count_tiles
    static constexpr int BYTES = ENDS + MAX_EXPERTS * 4;
};

template <typename S, bool WIDE>
DEVICE void grouped_linear(const GroupedLinearParams& params) {
    auto* const ends = reinterpret_cast<int32_t*>(dynamic_shared() + GroupedLayout<S>::ENDS);
    count_tiles<S>(params, ends);
    clear_padding<S::THREADS / WARP_SIZE>(params);
    const ExpertTiles<S> tiles{params, ends};
    const int64_t count = tiles.count();
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const ExpertTile tile = tiles[number];
        const QuantisedProduct product = product_of_expert(params, tile.expert);
        multiply_tile<S, WIDE>(product, part_of<S>(product.result, tile.number));
        // The next tile's operands take the place of this one's sums.
        __syncthreads();
    }
}

KERNEL(grouped_linear_large, GroupedLinearParams, Large::THREADS) { grouped_linear<Large, true>(params); }
SHARED_MEMORY(grouped_linear_large, GroupedLayout<Large>::BYTES)
KERNEL(grouped_linear_small, GroupedLinearParams, Small::THREADS) { grouped_linear<Small, true>(params); }
SHARED_MEMORY(grouped_linear_small, GroupedLayout<Small>::BYTES)
KERNEL(grouped_linear_scalar, GroupedLinearParams, Scalar::THREADS) { grouped_linear<Scalar, false>(params); }
SHARED_MEMORY(grouped_linear_scalar, GroupedLayout<Scalar>::BYTES)
