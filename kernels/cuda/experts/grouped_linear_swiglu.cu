// The experts' first linear layer, SwiGLU and quantization in one kernel (inference 5.4, 5.5, 5.7,
// 5.8, 11.1, 11.3). For the rows p of expert e, and i < I = columns / 2,
//
//     gate[p,i] = bf16(sum_k x[p,k] w[e,g(i),k])     up[p,i] = bf16(sum_k x[p,k] w[e,u(i),k])
//     o[p,i]    = weight[p] (a sigmoid(a) b)    a = min(gate, limit), b = clamp(up, -limit, limit)
//     codes, scales = those of quantize_fp8.cu for o, in groups of 32 or 128 of a row
//
// With round_to_bf16, o is rounded to bf16 before it is quantized. Rows of w are either gate's,
// g(i) = i, then up's, u(i) = I + i. Or they interleave by eight (gate_up_interleave.cu): g(i) =
// 16 (i/8) + i%8, u(i) = g(i) + 8. Scales of w follow its rows as stored (FP8: blocks of 128).
//
// Rows are sorted or masked, as in grouped_linear.cu. Sorted padding rows are not read and are
// quantized as zeros. Masked ones are neither read nor written, nor are scales that pad a part's
// rows. All other padding of scales becomes 0.
//
// Work division: as in grouped_linear.cu, with tiles of 256 columns in interleaved order: gate and
// up of 128 features. Neighbouring 8-column fragments are gate and up of the same features, so a
// thread has both in registers. The results go through shared memory to lanes with 16 neighbours
// of a row each. The first warps of all blocks quantize the padding rows first.
//
// Floor: that of grouped_linear.cu, with 1 byte stored a feature in place of 4. Limit: with many
// rows the decoding of w, with few rows memory.
//
// Defines: FORMAT 1 (FP8) or 2 (MXFP4); GROUP, values of x per scale: 128, of MXFP4 also 32.
// Launch: any grid in x. What was tried: kernels/docs/grouped_linear_swiglu.md.
#if !defined(FORMAT) || !defined(GROUP)
#error "define FORMAT as 1 (FP8) or 2 (MXFP4), and GROUP"
#endif

#include "quantized_tiles.h"
#include "grouped_linear_swiglu.h"
#include "quantize_fp8.h"

static_assert(FORMAT == FP8 || FORMAT == MXFP4, "experts have two formats");

// ---------------------------------------------------------------- the GEMM

// Columns in the order of interleaved rows: eight of gate, the eight of up of the same features,
// the next eight of gate.
struct GateAndUp {
    static constexpr int SHARED = GRANULE;
    int64_t half;  // rows of gate, behind which those of up lie; 0 where rows are interleaved

    int64_t row(int64_t column) const {
        if (half == 0 || column >= 2 * half) return column;
        const int64_t granule = column / GRANULE;
        return granule % 2 * half + granule / 2 * GRANULE + column % GRANULE;
    }
};

constexpr int COLUMNS = 256, FEATURES = COLUMNS / 2;  // of a tile
constexpr int PRODUCT_STRIDE = FEATURES + 4;          // of the products in shared memory, in floats
using LargeTile = Shape<64, COLUMNS, 2, 4, 2>;
using SmallTile = Shape<16, COLUMNS, 1, 4, 2>;

template <typename S>
struct FusedLayout {
    using Tile = typename Layout<S, GateAndUp>::Plan;
    using Shared = SharedOfExperts<Tile>;
    static constexpr int BYTES = Shared::BYTES;
    static_assert(S::N8 % 2 == 0, "a warp has gate and up of the same features");
    static_assert(S::ROWS * PRODUCT_STRIDE * 4 <= sizeof(Tile), "products take the place of operands");
    static_assert(S::ROWS * FEATURES / SPAN % S::THREADS == 0, "all lanes of a warp quantize together");
};

// ---------------------------------------------------------------- codes

// Features of a row from `column` on that belong to a span.
DEVICE int32_t features_left(const GroupedLinearSwigluParams& params, int32_t column) {
    return minimum(maximum(static_cast<int32_t>(params.columns / 2) - column, 0), SPAN);
}

DEVICE void quantize_products(const GroupedLinearSwigluParams& params, const QuantizedRows& target, const Span& span,
                              float (&x)[SPAN], bool has_scales) {
    if (params.wide) quantize_span<true>(target, span, x, has_scales);
    else quantize_span<false>(target, span, x, has_scales);
}

// ---------------------------------------------------------------- a tile

// A tile of the results of an expert: its first row among all rows, the expert's rows from there
// on, and its first feature.
struct ProductTile {
    int64_t row;
    int64_t rows;
    int32_t feature;
};

// Stores SwiGLU of a thread's sums to shared memory.
template <typename S>
DEVICE void store_products(const GroupedLinearSwigluParams& params, const float* weights, const ProductTile& tile,
                           const Sums<S>& sums, float* products) {
    const int lane = lane_id();
    UNROLL
    for (int m = 0; m < S::M16; ++m) {
        UNROLL
        for (int i = 0; i < 4; i += 2) {
            const int row = warp_row<S>() + 16 * m + lane / 4 + 4 * i;
            if (row >= tile.rows) continue;
            const float weight = weights ? weights[tile.row + row] : 1.0f;
            UNROLL
            for (int n = 0; n < S::N8; n += 2) {
                float gate[2] = {sums[m][n][i], sums[m][n][i + 1]}, up[2] = {sums[m][n + 1][i], sums[m][n + 1][i + 1]};
                round_to_bf16(gate);
                round_to_bf16(up);
                float* const to = products + row * PRODUCT_STRIDE + (warp_column<S>() + 8 * n) / 2 + lane % 4 * 2;
                to[0] = weighted_swiglu(gate[0], up[0], params.limit, weight);
                to[1] = weighted_swiglu(gate[1], up[1], params.limit, weight);
            }
        }
    }
}

// Codes and scales of the values in shared memory. The last feature tile also sets the scales that
// pad its rows to 0.
template <typename S>
DEVICE void quantize_tile(const GroupedLinearSwigluParams& params, const QuantizedRows& target, const ProductTile& tile,
                          const float* products) {
    constexpr int ROW_SPANS = FEATURES / SPAN;
    for (int i = threadIdx.x; i < S::ROWS * ROW_SPANS; i += S::THREADS) {
        const int row = i / ROW_SPANS, feature = i % ROW_SPANS * SPAN;
        const bool exists = row < tile.rows;
        const int32_t column = tile.feature + feature, count = exists ? features_left(params, column) : 0;
        float x[SPAN] = {};
        UNROLL
        for (int e = 0; e < SPAN; e += 4) {
            // Features are a multiple of 8.
            const float* const from = products + row * PRODUCT_STRIDE + feature + e;
            if (e < count) load_elements<4>(from, *reinterpret_cast<float(*)[4]>(&x[e]));
        }
        if (params.round_to_bf16) round_to_bf16(x);
        quantize_products(params, target, Span{tile.row + row, column, count}, x, exists);
    }
    if (tile.feature + FEATURES < params.columns / 2) return;
    const int32_t first = (tile.feature + FEATURES) >> params.log2_group;
    for (int row = threadIdx.x; row < S::ROWS && row < tile.rows; row += S::THREADS)
        for (int32_t group = first; group < target.padded_groups; ++group)
            store_scale(target, scale_place(target, tile.row + row, group), 0.0f, false);
}

template <typename S, bool WIDE>
DEVICE void grouped_linear_swiglu(const GroupedLinearSwigluParams& params) {
    int32_t* const ends = FusedLayout<S>::Shared::ends();
    auto* const products = reinterpret_cast<float*>(dynamic_shared());
    constexpr bool OF_FP8 = FORMAT == FP8;
    const GroupedLinearParams product = product_of<GROUP, OF_FP8 ? BLOCK : 1, OF_FP8 ? BLOCK : W_GROUP>(params);
    count_tiles<S>(product, ends);
    const QuantizedRows target = quantized_rows_of(params);
    quantize_rows_of_nobody<S::THREADS / WARP_SIZE>(params, target, product);
    const ExpertTiles<S> tiles{product, ends};
    const GateAndUp columns{params.interleaved ? 0 : params.columns / 2};
    const int64_t count = tiles.count();
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const ExpertTile own = tiles[number];
        const QuantizedProduct operands = product_of_expert(product, own.expert);
        const Part part = part_of<S>(operands.result, own.number);
        Sums<S> sums = {};
        sum_tile<S, WIDE>(operands, columns, part, sums);
        // Masked rows are counted within their expert's part.
        const int32_t of_expert = params.expert_offsets ? 0 : own.expert;
        const float* const weights = params.weight ? params.weight + of_expert * params.rows : nullptr;
        const ProductTile tile{rows_of(product, own.expert).first + part.row, operands.result.rows - part.row,
                               static_cast<int32_t>(part.column / 2)};
        store_products<S>(params, weights, tile, sums, products);
        __syncthreads();
        quantize_tile<S>(params, part_of_rows(params, target, of_expert), tile, products);
        // The next tile's operands overwrite this one's values.
        __syncthreads();
    }
}

KERNEL(grouped_linear_swiglu_large, GroupedLinearSwigluParams, LargeTile::THREADS) {
    grouped_linear_swiglu<LargeTile, true>(params);
}
SHARED_MEMORY(grouped_linear_swiglu_large, FusedLayout<LargeTile>::BYTES)
KERNEL(grouped_linear_swiglu_small, GroupedLinearSwigluParams, SmallTile::THREADS) {
    grouped_linear_swiglu<SmallTile, true>(params);
}
SHARED_MEMORY(grouped_linear_swiglu_small, FusedLayout<SmallTile>::BYTES)
KERNEL(grouped_linear_swiglu_scalar, GroupedLinearSwigluParams, SmallTile::THREADS) {
    grouped_linear_swiglu<SmallTile, false>(params);
}
SHARED_MEMORY(grouped_linear_swiglu_scalar, FusedLayout<SmallTile>::BYTES)
