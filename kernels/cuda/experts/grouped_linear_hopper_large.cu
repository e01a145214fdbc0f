// Linear layers of experts with FP8 weights and activations for many rows of an expert on sm_90a: grouped_linear.cu, which
// has the formulas, with warpgroup matrix products of e4m3.
//
// How the work is laid out. quantised_hopper_large.h says how a block computes its units, grouped_linear.h which there are;
// as many blocks as there are multiprocessors take them as they get free, alone or in pairs: of experts that have several tiles of
// rows blocks share weights and, of a last tile without another, its rows. While the producer brings the first stages, the consumers
// clear the rows of nobody. Rows of x behind an expert's last are another one's or nobody's: their sums go nowhere.
//
// Floors: 2 FLOP a number of w and row at twice 790 TFLOP/s, or the bytes of w of the experts that have rows at 4.24 TB/s:
// 256 experts of [4096, 4096] 0.52 and 4.2 ms for 24576 and 196608 rows. Expected to limit: what limits
// linear_hopper_large.cu, and experts whose last tile is nearly empty.
// Measured on one H200: 196608 rows 8010 us (DeepGEMM 5541), of 384 experts of [6144, 7168] 21360 us (14300), and 24576 rows
// of the former 1403 us (1358): some 1640 cycles a stage and 2960 a unit at 1.4 GHz, a tenth more a stage than linear's. With
// half units (the last tile of every second expert), and consumers that started their products in turn, which has not helped
// linear: 7725 us of 196608 rows (DeepGEMM 5865 in that run), 1450 of 24576 (1458); 6.4 ms were predicted. In pairs of blocks 7443
// and 1478 (5880 and 1453 in a run of the same day). With a shorter loop of stages (quantised_hopper_large.h) and uniform
// descriptors 6830 and 1394 (5751 and 1428 in that call): behind `clear_padding` the compiler did not know warps to be whole,
// and read six of them a stage from registers.
// ncu said of 196608 rows at 1.49 GHz, 5.73 ms: tensor cores busy 71 % of the time, multiprocessors 95 %, 15.3 GB of memory's bytes,
// where 6.7 would do, and 80 % of the second-level cache's rate. What was tried for it, in one call, one after the other: as it is
// 6893 us; an expert's last tile beside the others of its features 6982; that without half units 7006; that with two half units to a
// turn 7195. So none is here. All of these took units in turn. Taken as blocks get free, with neighbours at work at a time: 5.2 GB
// are read where 13.0 were, 70 % of the second-level cache's sectors are found there (40 %), and it is 6042 and 6030 us (6577 and
// 6590 before, in the same call); in another call 6161 (6868), 24576 rows 1380 (1419), of 384 experts of [6144, 7168] 15565 (17748)
// and 6810 (6910). Outputs stored past the cache made no difference.
//
// Launch. Any grid in x; of pairs of whole clusters, and no other number of features than fills an even number of tiles.
#include "grouped_hopper_large.h"

SHARED_MEMORY(grouped_linear_hopper_large, GroupedShared::BYTES)
SHARED_MEMORY(grouped_linear_hopper_large_pairs, GroupedShared::BYTES)

template <typename Units>
DEVICE void multiply_experts(const GroupedLinearParams& params) {
    const SharedAddress shared = shared_address(dynamic_shared());
    auto* const ends = reinterpret_cast<int32_t*>(dynamic_shared() + GroupedShared::ENDS);
    initialise_barriers<Units::CLUSTER>(shared);
    count_tiles<UnitShape>(params, ends);
    const auto clear = [&params] { clear_padding<CONSUMER_THREADS / WARP_SIZE>(params); };
    multiply_units(Units{{params, ends}}, params.x_map, params.w_map, shared, clear, StoredSums{});
}

KERNEL(grouped_linear_hopper_large, GroupedLinearParams, THREADS) { multiply_experts<UnitsOfExperts>(params); }

KERNEL_OF_CLUSTERS(grouped_linear_hopper_large_pairs, GroupedLinearParams, THREADS, PairsOfExperts::CLUSTER) {
    multiply_experts<PairsOfExperts>(params);
}
