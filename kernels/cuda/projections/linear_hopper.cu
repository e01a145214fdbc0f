// Linear layers of FP8 or MXFP4 weights and FP8 activations for sm_90a, by wgmma of e4m3.
// linear_quantized.cu has the formulas.
//
// quantized_hopper.h describes how a block computes its work tiles. The grid has HELD blocks an
// SM, which take tiles round-robin. Splits of k leave partial sums as in linear.h; the launcher
// chooses enough of them that all SMs load weights.
//
// Floor: 2 rows columns depth FLOP at twice 790 TFLOP/s; for few tokens the bytes of w at 4.24
// TB/s: [65536, 1536] 24 us, [7168, 16384] 28 us. Expected limit: memory. A block has up to seven
// stages of 16 KB of w in flight, in rows of 128 bytes. FP8 with more than 64 tokens is
// linear_hopper_large.cu's.
// Measured numbers and what was tried: kernels/docs/linear_quantized.md.
//
// Defines
//   TOKENS   columns of the MMA: 16 or 64, of MXFP4 also 8 and 128
//   WEIGHTS  1: FP8, 2: MXFP4
//   X_GROUP  elements of x that share a scale: 128, of MXFP4 also 32
//
// Launch. Any grid in x of at most `splits` times the tiles of the result.
#if !defined(TOKENS) || !defined(WEIGHTS) || !defined(X_GROUP)
#error "define TOKENS, WEIGHTS as 1 (FP8) or 2 (MXFP4), and X_GROUP"
#endif
#include "rows_of_w.h"

using RowsOfW = RowsInOrder;
#include "quantized_hopper.h"

SHARED_MEMORY(linear_hopper, Shared::BYTES)

KERNEL_OF(linear_hopper, LinearQuantizedParams, THREADS, HELD) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const QuantizedProduct product = product_of(params, 1.0f);
    initialise_barriers(shared);
    multiply_units(UnitsOfProduct{product}, shared, [] {}, StoredUnits{});
}
