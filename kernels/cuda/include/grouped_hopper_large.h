// Units of the products of experts (quantised_hopper_large.h), and where their blocks keep how many there are.
#pragma once

#include "grouped_linear.h"
#include "quantised_hopper_large.h"

struct GroupedShared {
    static constexpr int ENDS = Shared::BYTES;  // of count_tiles
    static constexpr int BYTES = ENDS + MAX_EXPERTS * 4;
};
static_assert(GroupedShared::BYTES <= 227 * 1024, "stages exceed shared memory");

// Of x the map has all rows, or those of each expert.
DEVICE Unit unit_of(const GroupedLinearParams& params, const QuantisedProduct& product, const Part& part, int32_t expert,
                    bool shares_tokens) {
    const bool sorted = params.expert_offsets != nullptr;
    const int64_t first = sorted ? rows_of(params, expert).first : 0;
    const auto row = static_cast<int32_t>(first + part.row), column = static_cast<int32_t>(part.column);
    return Unit{product, part, row, sorted ? 0 : expert, {column, column + GROUP}, expert, shares_tokens};
}

struct UnitsOfExperts {
    static constexpr uint32_t CLUSTER = 1;
    ExpertTiles<UnitShape> tiles;

    int64_t count() const { return tiles.count(); }
    Unit at(int64_t number) const {
        const GroupedLinearParams& params = tiles.params;
        const ExpertTile tile = tiles[number];
        const QuantisedProduct product = product_of_expert(params, tile.expert);
        const Part part = part_of<UnitShape>(product.result, tile.number);
        return unit_of(params, product, part, tile.expert, false);
    }
};
