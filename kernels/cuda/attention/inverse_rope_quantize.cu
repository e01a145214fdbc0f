// The attention's output, rotated back by the query's position and quantized in one pass
// (inference 4, 5.4, 9).
//
//     r[t,h,:]      = x[t,h,:] with its last rope_dim channels rotated backwards by the position
//                     of token t, in bf16
//     codes, scales = those of quantize_fp8.cu for r, in groups of 128 channels of a head
//
// x is not overwritten, because the backward of the attention needs it. The num_heads / o_groups
// neighbouring heads of a group of the output projection form a row of its GEMM: codes are
// [num_tokens, o_groups, group_width]. The scales of each group follow those of the group before
// (scale_layout.h); padding is 0. head_dim is a multiple of 128, so 128 channels never span two
// heads.
//
// The rotation (rotation.h) is fp32 and is rounded once to bf16. Codes and scales equal those of
// rope.cu followed by quantize_fp8.cu, bit for bit. A position outside the table makes the rotated
// channels NaN, hence a NaN scale and NaN codes of their 128 channels.
//
// Work: a warp takes 512 channels of a token, a lane 16, in accesses of 16 bytes; eight lanes
// share a scale (groups.h). With heads of 512 a warp takes the same 128 channels of four heads
// (apart_from_heads). Padding rows have warps too.
// Floor: 3 bytes a channel and a scale for 128: 4096 tokens of 64 heads of 512 are 95 us at 4.24
// TB/s. Measured on one H200: 111.0 us with e8m0 scales, 107.0 with fp32 scales. Limit: waits for
// loads.
// ELEMENT: bf16, the type of x. Launch: ceil(o_groups * padded_rows * row_warps / WARPS) blocks.
// What was tried: kernels/docs/inverse_rope_quantize.md.
#include "element.h"
#include "quantize_fp8.h"
#include "rotation.h"

struct InverseRopeQuantizeParams {
    const ELEMENT* x; int64_t x_token_stride; int64_t x_head_stride;         // [num_tokens, num_heads, head_dim]
    uint8_t* codes; int64_t codes_row_stride; int64_t codes_group_stride;    // [num_tokens, o_groups, width]
    uint8_t* scales; int64_t scale_group_bytes;                              // [o_groups] matrices of scale_layout.h
    const float* cos; int64_t cos_stride;                                    // [table_rows, rope_dim / 2]
    const float* sin; int64_t sin_stride;
    const int32_t* positions;                                                // [num_tokens], or nullptr
    int64_t table_rows;
    // Tokens, and the width of a group's row, with its scales.
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout, scale_type, log2_group;
    int32_t o_groups, group_heads, head_dim, rope_dim;
    int32_t inverse;  // 1
    int64_t of_row_warps, of_padded_rows, of_head_dim;  // what quotient() takes beside each of these divisors
};

// number / divisor, where `inverse` is (2^32 - 1) / divisor, rounded down. The upper half of their
// product is the quotient or one less. A plain division takes about 20 instructions.
DEVICE uint32_t quotient(uint32_t number, uint32_t divisor, int64_t inverse) {
    const uint32_t least =
        static_cast<uint32_t>(static_cast<uint64_t>(number) * static_cast<uint32_t>(inverse) >> 32);
    return least + static_cast<uint32_t>(number - least * divisor >= divisor);
}

// The work of a warp: a part of the row of a token in a group.
struct Place {
    int64_t group, token;
    int32_t column, count;  // of the lane: elements column to column + count - 1 of the row
};

// Of four heads of 512 channels a warp takes the same 128 of each, not one of the heads. Three
// warps of four then have no rotated channels, and the rotation costs a quarter of its
// instructions. Two bits of a column select 128 channels of a head, the two bits above them select
// one of four heads: they are swapped.
DEVICE int32_t apart_from_heads(const InverseRopeQuantizeParams& params, int32_t column) {
    if (params.head_dim != 512 || params.width % 2048 != 0) return column;
    return (column & ~0x780) | (column & 0x180) << 2 | (column & 0x600) >> 2;
}

DEVICE Place place_of(const InverseRopeQuantizeParams& params) {
    const uint32_t warp = blockIdx.x * WARPS + static_cast<uint32_t>(warp_id()), row_warps = params.row_warps;
    const uint32_t row = quotient(warp, row_warps, params.of_row_warps);
    const uint32_t rows = static_cast<uint32_t>(params.padded_rows);
    const uint32_t group = quotient(row, rows, params.of_padded_rows);
    const int32_t first = static_cast<int32_t>(warp - row * row_warps) * static_cast<int32_t>(WARP_SIZE);
    const int32_t column = apart_from_heads(params, (first + lane_id()) * SPAN);
    const int64_t token = row - group * rows;
    const int32_t left = token < params.num_rows ? maximum(params.width - column, 0) : 0;
    return Place{group, token, column, minimum(left, SPAN)};
}

// The rotations, in the form that rotation.h takes. They are always inverse.
struct InverseRotations {
    static constexpr int32_t inverse = 1;
    const float* cos; int64_t cos_stride;
    const float* sin; int64_t sin_stride;
    const int32_t* positions;
    int64_t table_rows;
};

// Rotates a pair of channels, and rounds it.
DEVICE void turn_pair(Rotation by, uint32_t& pair) {
    float even = unpack_bf16_low(pair), odd = unpack_bf16_high(pair);
    rotate(by, even, odd);
    pair = pack_bf16(even, odd);
}

// Rotates those of a lane's channels of a head that have a rotation. Usually all have one and
// vector loads are possible; the rotations are then loaded before the channels arrive.
DEVICE void turn_stored(const InverseRopeQuantizeParams& params, int64_t token, int32_t channel, Raw<ELEMENT>& raw) {
    const int32_t copied = params.head_dim - params.rope_dim;
    if (channel + SPAN <= copied) return;
    const InverseRotations tables{params.cos, params.cos_stride, params.sin, params.sin_stride, params.positions, params.table_rows};
    if (channel >= copied) {
        const RotationRows rows = rotation_rows(tables, token, (channel - copied) / 2);
        if (rows.exist() && rows.in_vectors()) {
            Rotation rotations[SPAN / 2];
            load_rotations(tables, rows, rotations);
            UNROLL
            for (int i = 0; i < SPAN / 2; ++i) turn_pair(rotations[i], raw.vectors[i / 4].w[i % 4]);
            return;
        }
    }
    UNROLL
    for (int i = 0; i < SPAN / 2; ++i) {
        if (channel + 2 * i < copied) continue;
        Rotation rotation[1];
        load_rotations(tables, token, (channel + 2 * i - copied) / 2, rotation);
        turn_pair(rotation[0], raw.vectors[i / 4].w[i % 4]);
    }
}

template <bool WIDE>
DEVICE void inverse_rope_quantize(const InverseRopeQuantizeParams& all) {
    const Place at = place_of(all);
    if (at.group >= all.o_groups) return;
    Raw<ELEMENT> x{};
    if (at.count > 0) {
        const int32_t of_group = static_cast<int32_t>(quotient(at.column, all.head_dim, all.of_head_dim));
        const int64_t head = at.group * all.group_heads + of_group;
        const int32_t channel = at.column - of_group * all.head_dim;
        load_raw<WIDE>(all.x + at.token * all.x_token_stride + head * all.x_head_stride + channel, at.count, x);
        turn_stored(all, at.token, channel, x);
    }
    InverseRopeQuantizeParams params = all;
    params.codes += at.group * params.codes_group_stride;
    params.scales += at.group * params.scale_group_bytes;
    quantize_span<WIDE>(params, Span{at.token, at.column, at.count}, x);
}

// Eight blocks an SM, so that other blocks issue while one waits for memory.
KERNEL_OF(inverse_rope_quantize_vector, InverseRopeQuantizeParams, THREADS, 8) { inverse_rope_quantize<true>(params); }
KERNEL(inverse_rope_quantize_scalar, InverseRopeQuantizeParams, THREADS) { inverse_rope_quantize<false>(params); }
