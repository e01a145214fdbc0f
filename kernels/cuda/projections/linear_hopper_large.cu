// Linear layers of FP8 weights and activations for many tokens on sm_90a, by wgmma of e4m3.
// linear_quantized.cu has the formulas.
//
// quantized_hopper_large.h describes how a block computes its work tiles. The grid has as many
// blocks as SMs, which take tiles round-robin: alone or in pairs that share weights. The launcher
// pairs blocks if the number of token tiles is even or large. Splits of k leave partial sums as in
// linear.h.
//
// Floor: 2 rows columns depth FLOP at twice 790 TFLOP/s: 4096 tokens of [65536, 1536] 522 us, of
// [7168, 16384] 609 us. Expected limit: shared memory and L2 (quantized_hopper_large.h), and for
// small k the epilogue.
// Measured numbers and what was tried: kernels/docs/linear_quantized.md.
//
// Launch. Any grid in x of at most `splits` times the tiles of the result. For pairs: whole
// clusters, and tiles of twice as many tokens.
#include "quantized_hopper_large.h"

SHARED_MEMORY(linear_hopper_large, Shared::BYTES)
SHARED_MEMORY(linear_hopper_large_pairs, Shared::BYTES)

KERNEL(linear_hopper_large, LinearQuantizedParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantizedProduct product = product_of(params, 1.0f);
    initialise_barriers(shared);
    multiply_units(UnitsOfProduct{product}, params.x_map, params.w_map, shared, [] {}, StoredSums{});
}

KERNEL_OF_CLUSTERS(linear_hopper_large_pairs, LinearQuantizedParams, THREADS, PairsOfProduct::CLUSTER) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantizedProduct product = product_of(params, 1.0f);
    initialise_barriers<PairsOfProduct::CLUSTER>(shared);
    multiply_units(PairsOfProduct{product}, params.x_map, params.w_map, shared, [] {}, StoredSums{});
}
