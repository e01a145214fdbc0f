// Linear layers of experts with FP8 weights and activations for many rows of an expert on sm_90a:
// grouped_linear.cu, which has the formulas, with e4m3 wgmma.
//
// Work division: quantized_hopper_large.h says how a block computes its work tiles,
// grouped_linear.h which tiles exist. One block per SM takes them as it becomes free, single or in
// pairs. In a pair, blocks share weights of an expert with several row tiles. For a last row tile
// without another they share its rows. While the producer loads the first stages, the consumers
// clear the padding rows. Rows of x after an expert's last are another expert's or padding: their
// sums are not stored.
//
// Floor: 2 FLOP an element of w and row at twice 790 TFLOP/s, or the bytes of w of the experts
// that have rows at 4.24 TB/s: 256 experts of [4096, 4096] 0.52 and 4.2 ms for 24576 and 196608
// rows. Limit: that of linear_hopper_large.cu, and experts whose last tile is nearly empty.
//
// Launch: any grid in x; with pairs, whole clusters, and the features fill an even number of
// tiles. What was tried: kernels/docs/grouped_linear.md.
#include "grouped_hopper_large.h"

SHARED_MEMORY(grouped_linear_hopper_large, GroupedShared::BYTES)
SHARED_MEMORY(grouped_linear_hopper_large_pairs, GroupedShared::BYTES)

template <typename Units>
DEVICE void multiply_experts(const GroupedLinearParams& params) {
    const SharedAddress shared = shared_address(dynamic_shared());
    int32_t* const ends = GroupedShared::ends();
    initialise_barriers<Units::CLUSTER>(shared);
    count_tiles<UnitShape>(params, ends);
    const auto clear = [&params] { clear_padding<CONSUMER_THREADS / WARP_SIZE>(params); };
    multiply_units(Units{{params, ends}}, params.x_map, params.w_map, shared, clear, StoredSums{});
}

KERNEL(grouped_linear_hopper_large, GroupedLinearParams, THREADS) { multiply_experts<UnitsOfExperts>(params); }

KERNEL_OF_CLUSTERS(grouped_linear_hopper_large_pairs, GroupedLinearParams, THREADS, PairsOfExperts::CLUSTER) {
    multiply_experts<PairsOfExperts>(params);
}
