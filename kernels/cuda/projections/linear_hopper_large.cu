// Linear layers of FP8 weights and activations for many tokens on sm_90a: linear_quantised.cu, which has the formulas, with
// warpgroup matrix products of e4m3.
//
// How the work is laid out. quantised_hopper_large.h says how a block computes its units; as many blocks as there are
// multiprocessors take them in turn, alone or, where few tiles of tokens have no other beside them, in pairs that share
// weights. Parts of k leave their sums as those of linear.h do.
//
// Floors: 2 rows columns depth FLOP at twice 790 TFLOP/s, 4096 tokens of [65536, 1536] 522 us, of [7168, 16384] 609 us.
// Expected to limit: shared memory and the second-level cache (quantised_hopper_large.h, with what has been measured), and
// for little k the sums' way out.
//
// Launch. Any grid in x of at most `splits` times the tiles of the result; of pairs of whole clusters, and of tiles of twice as
// many tokens.
#include "quantised_hopper_large.h"

SHARED_MEMORY(linear_hopper_large, Shared::BYTES)
SHARED_MEMORY(linear_hopper_large_pairs, Shared::BYTES)

KERNEL(linear_hopper_large, LinearQuantisedParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantisedProduct product = product_of(params, 1.0f);
    initialise_barriers(shared);
    multiply_units(UnitsOfProduct{product}, params.x_map, params.w_map, shared, [] {}, StoredSums{});
}

KERNEL_OF_CLUSTERS(linear_hopper_large_pairs, LinearQuantisedParams, THREADS, PairsOfProduct::CLUSTER) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantisedProduct product = product_of(params, 1.0f);
    initialise_barriers<PairsOfProduct::CLUSTER>(shared);
    multiply_units(PairsOfProduct{product}, params.x_map, params.w_map, shared, [] {}, StoredSums{});
}
