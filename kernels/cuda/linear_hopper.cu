// Linear layers of FP8 weights and activations for sm_90a: linear_quantised.cu, which has the formulas, with warpgroup
// matrix products of e4m3.
//
// How the work is laid out. quantised_hopper.h says how a block computes its units; as many blocks as there are
// multiprocessors take them in turn. Parts of k leave their sums as those of linear.h do; the launcher chooses so many
// that all multiprocessors read weights.
//
// Floors: 2 rows columns depth FLOP at twice 790 TFLOP/s; of few tokens the bytes of w at 4.24 TB/s: [65536, 1536] 24
// us, [7168, 16384] 28 us. Expected to limit: memory, of which a block has up to seven stages of 16 KB of w under way, each
// in rows of 128 bytes. Of more than 64 tokens FP8 is linear_hopper_large.cu's.
// Measured on one H200, FP8: 1 and 64 tokens 29.4 and 37.2 us for [65536, 1536], 34.5 and 39.9 us for [7168, 16384] (DeepGEMM
// 29.4, 29.6; 34.7, 35.7). MXFP4 has not been measured here.
//
// Defines
//   TOKENS   columns of a product: 16 or 64, of MXFP4 also 128
//   WEIGHTS  1: FP8, 2: MXFP4 with a scale for each 128 numbers of x
//
// Launch. Any grid in x of at most `splits` times the tiles of the result.
#if !defined(TOKENS) || !defined(WEIGHTS)
#error "define TOKENS, and WEIGHTS as 1 (FP8) or 2 (MXFP4)"
#endif
#include "quantised_hopper.h"

SHARED_MEMORY(linear_hopper, Shared::BYTES)

KERNEL(linear_hopper, LinearQuantisedParams, THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantisedProduct product = product_of(params, 1.0f);
    initialise_barriers(shared);
    multiply_units(UnitsOfProduct{product}, shared, [] {});
}
