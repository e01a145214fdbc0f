// Work tiles of the experts' GEMMs (quantized_hopper_large.h), and where a block stores the number
// of row tiles of each expert.
#pragma once

#include "grouped_linear.h"
#include "quantized_hopper_large.h"

using GroupedShared = SharedOfExperts<Shared::Plan>;
static_assert(GroupedShared::BYTES <= 227 * 1024, "stages exceed shared memory");

// The scheduler of the experts' work tiles: blocks take each as they become free.
template <uint32_t CLUSTER, typename Tiles>
DEVICE AsFree<CLUSTER> turns_of(const Tiles& tiles, SharedAddress shared) {
    return {static_cast<uint32_t>(tiles.count()), shared, tiles.params.num_taken};
}

// x_map covers all rows of x where rows are sorted. Otherwise the expert is one of its
// coordinates.
DEVICE Unit unit_of(const GroupedLinearParams& params, const QuantizedProduct& product, const Part& part, int32_t expert,
                    bool shares_tokens) {
    const bool sorted = params.expert_offsets != nullptr;
    const int64_t first = sorted ? rows_of(params, expert).first : 0;
    const auto row = static_cast<int32_t>(first + part.row), column = static_cast<int32_t>(part.column);
    return Unit{product, part, row, sorted ? 0 : expert, {column, column + GROUP}, expert, shares_tokens};
}

struct UnitsOfExperts {
    static constexpr uint32_t CLUSTER = 1;
    ExpertTiles<UnitShape> tiles;

    AsFree<CLUSTER> turns(SharedAddress shared) const { return turns_of<CLUSTER>(tiles, shared); }
    Unit at(uint32_t number) const {
        const GroupedLinearParams& params = tiles.params;
        const ExpertTile tile = tiles[number];
        const QuantizedProduct product = product_of_expert(params, tile.expert);
        const Part part = part_of<UnitShape>(product.result, tile.number);
        return unit_of(params, product, part, tile.expert, false);
    }
};

// Pairs of work tiles of one expert: two tiles of tokens with the same weights. A last tile of
// tokens without another next to it takes two tiles of features instead. Experts have an even
// number of feature tiles.
struct PairsOfExperts {
    static constexpr uint32_t CLUSTER = 2;
    // One number stands for TOKENS rows by two tiles of features. A pair of token tiles therefore
    // has two numbers for the same columns: one for each tile of features.
    struct Shape {
        static constexpr int ROWS = TOKENS, COLUMNS = 2 * FEATURES;
    };
    ExpertTiles<Shape> tiles;

    AsFree<CLUSTER> turns(SharedAddress shared) const { return turns_of<CLUSTER>(tiles, shared); }
    Unit at(uint32_t number) const {
        const ExpertTile tile = tiles[number];
        const QuantizedProduct product = product_of_expert(tiles.params, tile.expert);
        const auto row_pairs = static_cast<uint32_t>(product.result.rows + TOKENS - 1) / (2 * TOKENS);
        const uint32_t whole = row_pairs * 2 * tiles.column_tiles(), within = static_cast<uint32_t>(tile.number);
        const bool is_last = within >= whole;
        Result paired = product.result;
        paired.rows = is_last ? TOKENS : static_cast<int64_t>(row_pairs) * PairShape::ROWS;
        Part part = part_of<PairShape>(paired, is_last ? 2 * (within - whole) + cluster_rank() : within);
        part.row += is_last ? static_cast<int64_t>(row_pairs) * PairShape::ROWS : cluster_rank() * TOKENS;
        return unit_of(tiles.params, product, part, tile.expert, is_last);
    }
};
