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
// 29.4, 29.6; 34.7, 35.7). MXFP4 folded by the producer, as this kernel once did, 4482 and 5393 us for 4096 tokens.
// MXFP4 as it is: 26.4, 45.2 and 1945 us for 1, 64 and 4096 tokens of [65536, 1536]; 38.3, 56.5 and 2029 us of [7168, 16384]. By
// its instructions (quantised_hopper.h), some 500 cycles a stage of 16 tokens, 800 of 64 and 1200 of 128, it was predicted to
// take 18, 24 and 1450 us: what is missing has not been profiled. Later, with 8 tokens in a tile and what the header says: 21.2 and
// 43.8 us for 1 and 64 tokens of the former, 30.8 and 53.2 of the latter; FP8 27.2 and 33.4, 34.1 and 40.3.
//
// Defines
//   TOKENS   columns of a product: 16 or 64, of MXFP4 also 128
//   WEIGHTS  1: FP8, 2: MXFP4
//   X_GROUP  numbers of x that share a scale: 128, of MXFP4 also 32
//
// Launch. Any grid in x of at most `splits` times the tiles of the result.
#if !defined(TOKENS) || !defined(WEIGHTS) || !defined(X_GROUP)
#error "define TOKENS, WEIGHTS as 1 (FP8) or 2 (MXFP4), and X_GROUP"
#endif
#include "rows_of_w.h"

using RowsOfW = RowsInOrder;
#include "quantised_hopper.h"

SHARED_MEMORY(linear_hopper, Shared::BYTES)

KERNEL_OF(linear_hopper, LinearQuantisedParams, THREADS, HELD) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantisedProduct product = product_of(params, 1.0f);
    initialise_barriers(shared);
    multiply_units(UnitsOfProduct{product}, shared, [] {}, StoredUnits{});
}
