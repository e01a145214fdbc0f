// The first linear layer of experts and what follows it, in one kernel (inference 5.4, 5.5, 5.7, 5.8, 11.1, 11.3): gate
// and up of each row, SwiGLU with clamps, the routing weight, and codes. For the rows p of expert e, and i < I =
// columns / 2,
//
//     gate[p,i] = bf16(sum over k of x[p,k] w[e,g(i),k])        up[p,i] = bf16(sum over k of x[p,k] w[e,u(i),k])
//     o[p,i]    = weight[p] (a sigmoid(a) b)                    a = min(gate, limit), b = clamp(up, -limit, limit)
//     codes, scales = those of quantize_fp8.cu for o, in groups of 32 or 128 of a row
//
// o is rounded to bf16 before it is quantised where that is asked for. Rows of w are those of gate, g(i) = i, and then
// those of up, u(i) = I + i, or both interleaved by eight as gate_up_interleave.cu lays them out: g(i) = 16 (i/8) +
// i%8, u(i) = g(i) + 8. The scales of w are those of its rows as they lie, of FP8 those of blocks of 128 of them.
//
// Which rows are whose grouped_linear.cu says: sorted or masked. Sorted rows of nobody are not read, and quantised as
// rows of zeros; masked ones are neither read nor written, nor are the places of scales that pad the rows of a part.
// Every other place that pads becomes 0.
//
// How the work is laid out. As in grouped_linear.cu (quantised_tiles.h), with 256 columns a tile, which are always
// taken in the order of interleaved rows: gate and up of 128 features, whole groups of either size. The 8 columns of a
// fragment of sums are gate's, those of the next one up's of the same features, so that a thread has both in its
// registers. What it makes of them goes through shared memory to lanes that have 16 neighbours of a row each, and their
// scales follow as in swiglu_quantize.cu. The first warps of all blocks quantise the rows of nobody before.
//
// Floors: those of grouped_linear.cu, with 1 byte a feature written in the place of 4: 256 experts of [4096, 4096] FP8,
// 2 FLOP a number of w and row at 790 TFLOP/s: 24576 rows 1.04 ms, 196608 rows 8.35 ms; of few rows the bytes of w of
// the experts that have any, at 4.24 TB/s: 4.3 GB, 1.01 ms, and half of that for four bits. Apart, gate and up of 24576
// rows of 4096 would be written and read once more: 0.4 GB, 0.1 ms. Expected to limit: of many rows the decoding of w,
// which a tile of 64 rows repeats twice as often as one of 128; of few memory, of which a block of the small tiles has
// a stage of 17 KB under way (four bits: 9 KB), three blocks a multiprocessor. Measured on one H200: FP8, 24576 rows 8.8 ms,
// 196608 rows 52.3 ms, six rows of six experts 154 us. grouped_linear_swiglu_hopper_large.cu is for FP8
// on Hopper.
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
#include "grouped_linear_swiglu.h"
#include "quantize_fp8.h"

static_assert(FORMAT == FP8 || FORMAT == MXFP4, "experts have two formats");

// ---------------------------------------------------------------- the product

// Columns in the order of interleaved rows: eight of gate, the eight of up of the same features, the next eight of
// gate.
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
    static constexpr int ENDS = Layout<S, GateAndUp>::BYTES;  // of count_tiles
    static constexpr int BYTES = ENDS + MAX_EXPERTS * 4;
    static_assert(S::N8 % 2 == 0, "a warp has gate and up of the same features");
    static_assert(S::ROWS * PRODUCT_STRIDE * 4 <= ENDS, "products take the place of operands");
    static_assert(S::ROWS * FEATURES / SPAN % S::THREADS == 0, "all lanes of a warp quantise together");
};

// ---------------------------------------------------------------- codes

// Features of a row from this one on, of a span.
DEVICE int32_t features_left(const GroupedLinearSwigluParams& params, int32_t column) {
    return minimum(maximum(static_cast<int32_t>(params.columns / 2) - column, 0), SPAN);
}

DEVICE void quantise_products(const GroupedLinearSwigluParams& params, const QuantisedRows& target, const Span& span,
                              float (&x)[SPAN], bool has_scales) {
    if (params.wide) quantize_span<true>(target, span, x, has_scales);
    else quantize_span<false>(target, span, x, has_scales);
}

// ---------------------------------------------------------------- a tile

// A tile of the products of an expert's rows: the first of all rows that it has, rows that the expert has from there
// on, and its first feature.
struct ProductTile {
    int64_t row;
    int64_t rows;
    int32_t feature;
};

// The products of a thread's sums, to shared memory.
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

// Codes and scales of the products in shared memory, and 0 for the scales that pad the tile's rows, where it is the
// last of them.
template <typename S>
DEVICE void quantise_tile(const GroupedLinearSwigluParams& params, const QuantisedRows& target, const ProductTile& tile,
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
        quantise_products(params, target, Span{tile.row + row, column, count}, x, exists);
    }
    if (tile.feature + FEATURES < params.columns / 2) return;
    const int32_t first = (tile.feature + FEATURES) >> params.log2_group;
    for (int row = threadIdx.x; row < S::ROWS && row < tile.rows; row += S::THREADS)
        for (int32_t group = first; group < target.padded_groups; ++group)
            store_scale(target, scale_place(target, tile.row + row, group), 0.0f, false);
}

template <typename S, bool WIDE>
DEVICE void grouped_linear_swiglu(const GroupedLinearSwigluParams& params) {
    auto* const ends = reinterpret_cast<int32_t*>(dynamic_shared() + FusedLayout<S>::ENDS);
    auto* const products = reinterpret_cast<float*>(dynamic_shared());
    constexpr bool OF_FP8 = FORMAT == FP8;
    const GroupedLinearParams product = product_of<GROUP, OF_FP8 ? BLOCK : 1, OF_FP8 ? BLOCK : W_GROUP>(params);
    count_tiles<S>(product, ends);
    const QuantisedRows target = quantised_rows_of(params);
    quantise_rows_of_nobody<S::THREADS / WARP_SIZE>(params, target, product);
    const ExpertTiles<S> tiles{product, ends};
    const GateAndUp columns{params.interleaved ? 0 : params.columns / 2};
    const int64_t count = tiles.count();
    for (int64_t number = blockIdx.x; number < count; number += gridDim.x) {
        const ExpertTile own = tiles[number];
        const QuantisedProduct operands = product_of_expert(product, own.expert);
        const Part part = part_of<S>(operands.result, own.number);
        Sums<S> sums = {};
        sum_tile<S, WIDE>(operands, columns, part, sums);
        // Where rows have experts they are those of the expert's part.
        const int32_t of_expert = params.expert_offsets ? 0 : own.expert;
        const float* const weights = params.weight ? params.weight + of_expert * params.rows : nullptr;
        const ProductTile tile{rows_of(product, own.expert).first + part.row, operands.result.rows - part.row,
                               static_cast<int32_t>(part.column / 2)};
        store_products<S>(params, weights, tile, sums, products);
        __syncthreads();
        quantise_tile<S>(params, part_of_rows(params, target, of_expert), tile, products);
        // The next tile's operands take the place of this one's products.
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
