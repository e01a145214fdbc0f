// Rows as e2m1 codes with scales of two levels, and back (inference 5.3, 5.6, 5.7). s2 is the
// tensor's; amax is the largest magnitude of each group of 16 neighbours in a row:
//
//     s2    = max(amax of the tensor / 2688, 2^-126)    1 if all are 0, NaN if one is not finite
//     sb    = e4m3(fp32(fp32(amax / 6) / s2))           nearest even, 448 at most
//     code  = e2m1(fp32(x / fp32(sb * s2)))             nearest even; 0 if sb * s2 is; low first
//     y     = fp32(value(code) * sb * s2)               once more to bf16; first product exact
//
// The last group of a row may be smaller. A group with a NaN or an infinity has sb = NaN (0x7f)
// and the codes 7: it decodes to NaN. scale_layout.h has the layout of scales; padding is 0.
//
// A lane takes 16 elements (groups.h), which are a group, and stores their codes in one access of
// 8 bytes. Two kernels find s2: the largest of each block of a grid that fills the GPU, then the
// largest of these.
// Codes are those of quotients rounded once to fp32, by any fp32 scale. For bf16 a product with
// the inverse has the same code unless the divisor is one of few (e2m1_needs_quotients in
// quantize.h). A group checks that once and then takes four instructions an element; otherwise it
// divides.
//
// Floor for bf16: 2 bytes read and 1/2 written an element, and a byte a group: at 4.24 TB/s 81 us
// for 32768 x 4096. s2 reads the elements once more, 64 us. Limit: memory; 87.5 us on one H200.
// What was tried: kernels/docs/quantize_nvfp4.md.
//
// Defines: ELEMENT  type of x and y: bf16 or float. Launch: ceil(padded_rows * row_warps / WARPS)
// blocks; for amax at most AMAX_BLOCKS, and one for all of them.
#include "codes.h"
#include "element.h"
#include "groups.h"
#include "math.h"

constexpr int GROUP = 16;
constexpr uint8_t E4M3_NAN = 0x7f;
static_assert(GROUP == SPAN, "a lane takes a group");

struct Nvfp4AmaxParams {
    const ELEMENT* x; int64_t x_row_stride;  // [num_rows, width]; strides in elements
    uint32_t* workspace;                     // [gridDim.x]: bits of magnitudes
    int64_t num_rows;
    int32_t width, row_warps;
};

struct Nvfp4GlobalScaleParams {
    const uint32_t* workspace;  // [num_blocks]
    float* global_scale;        // [1]
    int32_t num_blocks;
};

struct QuantizeNvfp4Params {
    const ELEMENT* x; int64_t x_row_stride;      // [num_rows, width]
    uint8_t* codes; int64_t codes_row_stride;    // [num_rows, width / 2]
    const float* global_scale;                   // [1]
    uint8_t* scales;                             // scale_layout.h
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout;
};

struct DequantizeNvfp4Params {
    const uint8_t* codes; int64_t codes_row_stride;  // [num_rows, width / 2]
    ELEMENT* y; int64_t y_row_stride;                // [num_rows, width]
    const float* global_scale;                       // [1]
    const uint8_t* scales;                           // scale_layout.h
    int64_t num_rows, padded_rows;
    int32_t width, row_warps, num_groups, padded_groups, scale_layout;
};

// ---------------------------------------------------------------- the scale of the tensor

// The largest of a block's threads, in its first thread.
DEVICE uint32_t largest_of_block(uint32_t magnitude) {
    __shared__ uint32_t of_warp[WARPS];
    magnitude = __reduce_max_sync(FULL_WARP, magnitude);
    if (lane_id() == 0) of_warp[warp_id()] = magnitude;
    __syncthreads();
    UNROLL
    for (int warp = 0; warp < WARPS; ++warp) magnitude = maximum(magnitude, of_warp[warp]);
    return magnitude;
}

template <bool WIDE>
DEVICE void find_amax(const Nvfp4AmaxParams& params) {
    const int64_t warps = params.num_rows * params.row_warps, step = static_cast<int64_t>(gridDim.x) * WARPS;
    uint32_t magnitude = 0;
    for (int64_t warp = static_cast<int64_t>(blockIdx.x) * WARPS + warp_id(); warp < warps; warp += step) {
        const int64_t row = static_cast<uint32_t>(warp) / static_cast<uint32_t>(params.row_warps);
        const int32_t in_row = static_cast<int32_t>(warp - row * params.row_warps);
        const int32_t column = (in_row * static_cast<int32_t>(WARP_SIZE) + lane_id()) * SPAN;
        const int32_t count = minimum(maximum(params.width - column, 0), SPAN);
        Raw<ELEMENT> raw;
        load_raw<WIDE>(params.x + row * params.x_row_stride + column, count, raw);
        magnitude = maximum(magnitude, largest_magnitude(raw));
    }
    magnitude = largest_of_block(magnitude);
    if (threadIdx.x == 0) params.workspace[blockIdx.x] = magnitude;
}

DEVICE float global_scale_of(float amax) {
    if (!is_finite(amax)) return NAN_F32;
    return amax == 0.0f ? 1.0f : maximum_f32(__fdiv_rn(amax, 6.0f * 448.0f), 0x1p-126f);
}

KERNEL(nvfp4_global_scale, Nvfp4GlobalScaleParams, THREADS) {
    uint32_t magnitude = 0;
    for (int32_t block = static_cast<int32_t>(threadIdx.x); block < params.num_blocks; block += THREADS)
        magnitude = maximum(magnitude, params.workspace[block]);
    magnitude = largest_of_block(magnitude);
    if (threadIdx.x == 0) params.global_scale[0] = global_scale_of(__uint_as_float(magnitude));
}

// ---------------------------------------------------------------- codes

// The scale of a group with this largest magnitude, as an e4m3 code.
DEVICE uint8_t block_scale(float amax, float global_scale) {
    if (!is_finite(amax)) return E4M3_NAN;
    return to_e4m3(__fdiv_rn(__fdiv_rn(amax, 6.0f), global_scale)).bits;
}

// The codes of quotients, eight in a word.
template <typename Divide>
DEVICE void codes_of_quotients(const float (&x)[SPAN], Divide divide, uint32_t (&codes)[SPAN / 8]) {
    UNROLL
    for (int i = 0; i < SPAN; ++i) codes[i / 8] |= static_cast<uint32_t>(to_e2m1(divide(x[i]))) << 4 * (i % 8);
}

// The codes of a group with this largest magnitude and this scale.
DEVICE void codes_of(const float (&x)[SPAN], float amax, uint8_t scale, float global_scale, uint32_t (&codes)[SPAN / 8]) {
    const float divisor = __fmul_rn(to_float(fp8_e4m3{scale}), global_scale);
    codes[0] = codes[1] = 0;
    if (divisor == 0.0f) return;
    // Far from underflow: numbers that underflow in products and divisions have the code 0 anyway.
    if (divisor >= 0x1p-90f && divisor <= 0x1p90f) {
        const float inverse = __frcp_rn(divisor), most = 8.0f * divisor;
        if (sizeof(ELEMENT) == sizeof(bf16) && amax * inverse < 7.0f && !e2m1_needs_quotients(divisor)) {
            UNROLL
            for (int i = 0; i < SPAN; i += 8) codes[i / 8] = e2m1_codes_of_products(x + i, inverse * 0x1p-14f);
            return;
        }
        // A division is six instructions. Numbers far beyond the largest code are clamped first,
        // so that no intermediate value overflows; their code is the same.
        const auto divide = [&](float number) {
            return divided(maximum_f32(minimum_f32(number, most), -most), divisor, inverse);
        };
        codes_of_quotients(x, divide, codes);
    } else {
        codes_of_quotients(x, [&](float number) { return __fdiv_rn(number, divisor); }, codes);
    }
}

template <bool WIDE>
DEVICE void quantize(const QuantizeNvfp4Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.padded_rows) return;
    Raw<ELEMENT> raw;
    load_raw<WIDE>(params.x + span.row * params.x_row_stride + span.column, span.count, raw);
    float x[SPAN];
    unpack_stored(raw, x);
    const float global_scale = params.global_scale[0];
    const float amax = __uint_as_float(largest_magnitude(raw));
    const uint8_t scale = block_scale(amax, global_scale);
    if (span.count > 0) {
        uint32_t codes[SPAN / 8];
        codes_of(x, amax, scale, global_scale, codes);
        store_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column / 2, codes, span.count / 2);
    }
    const int32_t group = span.column / GROUP;
    if (group < params.padded_groups) params.scales[scale_place(params, span.row, group)] = span.count > 0 ? scale : 0;
}

template <bool WIDE>
DEVICE void dequantize(const DequantizeNvfp4Params& params) {
    const Span span = span_of(params);
    if (span.row >= params.num_rows) return;
    // Lanes after the row's end take part in its stores.
    uint32_t codes[SPAN / 8] = {};
    float scale = 1.0f;
    if (span.count > 0) {
        load_words<WIDE>(params.codes + span.row * params.codes_row_stride + span.column / 2, codes, span.count / 2);
        scale = to_float(fp8_e4m3{params.scales[scale_place(params, span.row, span.column / GROUP)]});
    }
    const float global_scale = params.global_scale[0];
    float y[SPAN];
    for (int i = 0; i < SPAN; i += 8) e2m1x8_to_float(codes[i / 8], *reinterpret_cast<float(*)[8]>(y + i));
    UNROLL
    for (int i = 0; i < SPAN; ++i) y[i] = __fmul_rn(__fmul_rn(y[i], scale), global_scale);
    store_span<WIDE>(params.y + span.row * params.y_row_stride + span.column, span.count, y);
}

KERNEL(nvfp4_amax_vector, Nvfp4AmaxParams, THREADS) { find_amax<true>(params); }
KERNEL(nvfp4_amax_scalar, Nvfp4AmaxParams, THREADS) { find_amax<false>(params); }
KERNEL_OF(quantize_nvfp4_vector, QuantizeNvfp4Params, THREADS, 8) { quantize<true>(params); }
KERNEL(quantize_nvfp4_scalar, QuantizeNvfp4Params, THREADS) { quantize<false>(params); }
KERNEL(dequantize_nvfp4_vector, DequantizeNvfp4Params, THREADS) { dequantize<true>(params); }
KERNEL(dequantize_nvfp4_scalar, DequantizeNvfp4Params, THREADS) { dequantize<false>(params); }
