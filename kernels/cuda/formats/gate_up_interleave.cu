// Rows of gate and up of expert weights, interleaved by eight, and back (inference 5.8). With I =
// num_rows / 2,
//
//     interleaved[e][16 g + 8 h + i] = logical[e][h I + 8 g + i]     h: 0 is gate, 1 is up; i < 8
//
// Weights and their scales are rows of this kind. Bytes move without interpretation, before scales
// are swizzled into tiles.
//
// A thread moves UNITS pieces of 16 bytes, counted along the interleaved rows of all experts. It
// reads all of them before it writes the first. Eight neighbouring rows are adjacent on both
// sides. If rows do not allow 16 bytes, a piece is one byte.
//
// Floor: a byte read and one written. 32 experts of 2 x 2048 rows of 4096 e2m1: 268 MB each way,
// 127 us at 4.24 TB/s; their scales, 128 bytes a row, 8 us. Limit: memory. Two 32-bit divisions a
// piece are the only arithmetic. Measured on one H200: 134 us either way (94 and 95 % of a copy);
// scales 9.8 us (81 %, of 33.6 MB, which a copy takes 9.9 for).
//
// Launch: ceil(num_pieces / (THREADS * UNITS)) blocks.
#include "gate_up.h"
#include "memory.h"

constexpr int THREADS = 256, UNITS = 4;

struct GateUpInterleaveParams {
    uint8_t* logical; int64_t logical_expert_stride, logical_row_stride;  // [num_experts, num_rows, row_bytes]
    uint8_t* interleaved; int64_t interleaved_expert_stride, interleaved_row_stride;  // as logical
    int64_t num_pieces;   // of all rows, below 2^32
    int32_t row_pieces;
    int32_t num_rows;
};

// The addresses of a piece in either order.
struct Places {
    uint8_t* logical;
    uint8_t* interleaved;
};

template <int BYTES>
DEVICE Places places_of(const GateUpInterleaveParams& params, uint32_t piece) {
    const uint32_t row_of_all = piece / static_cast<uint32_t>(params.row_pieces);
    const int64_t column = static_cast<int64_t>(piece - row_of_all * params.row_pieces) * BYTES;
    const int64_t expert = row_of_all / static_cast<uint32_t>(params.num_rows);
    const int32_t row = static_cast<int32_t>(row_of_all % static_cast<uint32_t>(params.num_rows));
    const int32_t group = row / (2 * GRANULE), half = row / GRANULE % 2, in_granule = row % GRANULE;
    const int64_t logical_row = half * (params.num_rows / 2) + group * GRANULE + in_granule;
    return Places{
        params.logical + expert * params.logical_expert_stride + logical_row * params.logical_row_stride + column,
        params.interleaved + expert * params.interleaved_expert_stride + row * params.interleaved_row_stride + column};
}

// A piece: 16 bytes, or one.
template <bool WIDE>
DEVICE auto load_piece(const uint8_t* source) {
    if constexpr (WIDE) {
        return load_vec16_streaming(source);
    } else {
        return *source;
    }
}
DEVICE void store_piece(uint8_t* target, const Vec16& piece) { store_vec16(target, piece); }
DEVICE void store_piece(uint8_t* target, uint8_t piece) { *target = piece; }

template <bool WIDE, bool INVERSE>
DEVICE void move_rows(const GateUpInterleaveParams& params) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (THREADS * UNITS) + threadIdx.x;
    uint8_t* targets[UNITS] = {};
    decltype(load_piece<WIDE>(nullptr)) held[UNITS] = {};
    UNROLL
    for (int i = 0; i < UNITS; ++i) {
        const int64_t piece = first + i * THREADS;
        if (piece >= params.num_pieces) continue;
        const Places places = places_of<WIDE ? 16 : 1>(params, static_cast<uint32_t>(piece));
        held[i] = load_piece<WIDE>(INVERSE ? places.interleaved : places.logical);
        targets[i] = INVERSE ? places.logical : places.interleaved;
    }
    UNROLL
    for (int i = 0; i < UNITS; ++i)
        if (targets[i]) store_piece(targets[i], held[i]);
}

KERNEL(gate_up_interleave_vector, GateUpInterleaveParams, THREADS) { move_rows<true, false>(params); }
KERNEL(gate_up_interleave_scalar, GateUpInterleaveParams, THREADS) { move_rows<false, false>(params); }
KERNEL(gate_up_separate_vector, GateUpInterleaveParams, THREADS) { move_rows<true, true>(params); }
KERNEL(gate_up_separate_scalar, GateUpInterleaveParams, THREADS) { move_rows<false, true>(params); }
