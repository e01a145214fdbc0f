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
    static constexpr int64_t TICKS = 1;
    using Shape = UnitShape;
    ExpertTiles<Shape> tiles;

    int64_t count() const { return tiles.count(); }
    Unit at(int64_t number) const {
        const GroupedLinearParams& params = tiles.params;
        const ExpertTile tile = tiles[number];
        const QuantisedProduct product = product_of_expert(params, tile.expert);
        const Part part = part_of<UnitShape>(product.result, tile.number);
        return unit_of(params, product, part, tile.expert, false);
    }
};

// Pairs of units of an expert: two tiles of tokens with the same weights or, of a last tile that has no other beside it, twice
// as many features. Experts have an even number of tiles of features. A pair takes two numbers and, where the last tile has no
// more than half its tokens, one: it takes half the time.
struct PairsOfExperts {
    static constexpr uint32_t CLUSTER = 2;
    static constexpr int64_t TICKS = 2;
    // The numbers of two tiles of features of an expert.
    struct Shape {
        static constexpr int COLUMNS = 2 * FEATURES;

        static int32_t of_last(int64_t rows) {
            const int64_t left = rows % PairShape::ROWS;
            return left == 0 || left > TOKENS ? 0 : left > CONSUMER_TOKENS ? 2 : 1;
        }
        static uint32_t pairs(int64_t rows) { return static_cast<uint32_t>(rows + TOKENS - 1) / PairShape::ROWS; }
        static int32_t tiles(int64_t rows) { return 4 * static_cast<int32_t>(pairs(rows)) + of_last(rows); }
    };
    // Whose number it is. Rows of pairs come as part_of takes them, TILE_GROUP at a time, but for those that are left over: two
    // tiles of features of all of these, then of the last tile, so that who runs at a time reads the same weights.
    struct Place {
        ExpertTile tile;
        uint32_t number;           // of the expert's
        uint32_t groups_end;       // where those of whole groups of rows end
        uint32_t first_row, rows;  // rows of pairs that are left over
        uint32_t two, within;      // two tiles of features, and the number among theirs
    };
    ExpertTiles<Shape> tiles;

    int64_t count() const { return tiles.count(); }
    Place place(int64_t number) const {
        const ExpertTile tile = tiles[number];
        const int64_t rows = rows_of(tiles.params, tile.expert).count;
        const uint32_t own = static_cast<uint32_t>(tile.number), pairs = Shape::pairs(rows);
        const uint32_t first_row = pairs / TILE_GROUP * TILE_GROUP, end = first_row * 4 * tiles.column_tiles();
        const uint32_t turn = 4 * (pairs - first_row) + Shape::of_last(rows);
        const uint32_t two = own < end ? 0 : (own - end) / turn;
        return Place{tile, own, end, first_row, pairs - first_row, two, own - end - two * turn};
    }
    bool begins(int64_t number) const {
        const Place at = place(number);
        if (at.number < at.groups_end) return at.number % 2 == 0;
        return at.within <= 4 * at.rows && at.within % 2 == 0;
    }
    Unit at(int64_t number) const {
        const Place at = place(number);
        const QuantisedProduct product = product_of_expert(tiles.params, at.tile.expert);
        Result paired = product.result;
        paired.rows = static_cast<int64_t>(at.first_row) * PairShape::ROWS;
        if (at.number < at.groups_end) return unit_of_pair(product, part_of<PairShape>(paired, at.number / 2), at.tile.expert, false);
        const uint32_t within = at.within / 2;
        const bool is_last = within == 2 * at.rows, is_second = is_last ? cluster_rank() == 1 : within >= at.rows;
        const uint32_t row = at.first_row + (is_last ? at.rows : is_second ? within - at.rows : within);
        const int64_t column = static_cast<int64_t>(2 * at.two + is_second) * FEATURES;
        const int64_t stages = ceil_div<int64_t>(product.result.depth, GROUP);
        const Part part{static_cast<int64_t>(row) * PairShape::ROWS, column, 0, stages, 0};
        return unit_of_pair(product, part, at.tile.expert, is_last);
    }
    // The block's own of a pair.
    Unit unit_of_pair(const QuantisedProduct& product, Part part, int32_t expert, bool is_last) const {
        if (!is_last) part.row += cluster_rank() * TOKENS;
        return unit_of(tiles.params, product, part, expert, is_last);
    }
};
