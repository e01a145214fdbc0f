// Linear layers of experts with FP8 or MXFP4 weights and FP8 activations for sm_90a:
// grouped_linear.cu, which has the formulas, with e4m3 wgmma.
//
// Work division: quantized_hopper.h says how a block computes its work tiles, grouped_linear.h
// which tiles exist. As many blocks as the SMs hold take them round-robin. While the producer
// loads the first stages, the consumers clear the padding rows.
//
// Floor: the bytes of w of the experts that have rows at 4.24 TB/s: 256 experts of [4096, 4096]
// 1.01 ms, of MXFP4 0.54 ms with its scales. Limit: memory, and experts whose last tile is nearly
// empty. Of MXFP4 the consumers' instructions as much as memory (quantized_hopper.h). Where an
// expert has more than 64 rows FP8 is grouped_linear_hopper_large.cu's.
//
// Defines
//   TOKENS   columns of an MMA, rows of y: 16 or 64, of MXFP4 also 128
//   WEIGHTS  1: FP8, 2: MXFP4
//   X_GROUP  values of x that share a scale: 128, of MXFP4 also 32
//
// Launch: any grid in x.
// What was tried: kernels/docs/grouped_linear.md.
#if !defined(TOKENS) || !defined(WEIGHTS) || !defined(X_GROUP)
#error "define TOKENS, WEIGHTS as 1 (FP8) or 2 (MXFP4), and X_GROUP"
#endif
#include "grouped_linear.h"
#include "rows_of_w.h"

using RowsOfW = RowsInOrder;
#include "quantized_hopper.h"

using GroupedShared = SharedOfExperts<Shared::Plan>;
static_assert((GroupedShared::BYTES + 1024) * HELD <= 228 * 1024, "stages exceed shared memory");
SHARED_MEMORY(grouped_linear_hopper, GroupedShared::BYTES)

struct UnitsOfExperts {
    static constexpr uint32_t CLUSTER = 1;
    ExpertTiles<UnitShape> tiles;

    int64_t count() const { return tiles.count(); }
    ListedUnit listed(int64_t number) const {
        const ExpertTile tile = tiles[number];
        const Rows rows = rows_of(tiles.params, tile.expert);
        const Result result = product_of_expert(tiles.params, tile.expert, rows).result;
        return ListedUnit(part_of<UnitShape>(result, tile.number), tile.expert, rows.first, rows.count);
    }
    Unit unit(const ListedUnit& listed) const {
        const Rows rows{listed.first_row, listed.rows};
        return Unit{product_of_expert(tiles.params, listed.matrix, rows), listed.part(), listed.features};
    }
};

KERNEL_OF(grouped_linear_hopper, GroupedLinearParams, THREADS, HELD) {
    const SharedAddress shared = shared_address(dynamic_shared());
    int32_t* const ends = GroupedShared::ends();
    initialise_barriers(shared);
    count_tiles<UnitShape>(params, ends);
    const auto clear = [&params] { clear_padding<CONSUMER_THREADS / WARP_SIZE>(params); };
    multiply_units(UnitsOfExperts{{params, ends}}, shared, clear, StoredUnits{});
}
