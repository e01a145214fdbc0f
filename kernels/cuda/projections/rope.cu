// Partial rotary embedding (inference 4, training 8), and its cos/sin tables.
//
// Defines: ELEMENT  type of x and y: bf16 or float
//
// The last rope_dim channels of each head rotate, in adjacent pairs (2i, 2i+1). The others are
// copied bit by bit. With C = cos(a), S = sin(a), a = position * inv_freq[i]:
//
//     y[2i] = x[2i]*C - x[2i+1]*S ;   y[2i+1] = x[2i]*S + x[2i+1]*C ;   the inverse negates S.
//
// The backward is the opposite rotation of dy. Arithmetic is fp32 with one rounding at the store.
// Every multiply-add is explicit, so that both backends give the same bits.
//
// A thread block is three-dimensional: threadIdx.x runs over the pieces of a head, y over heads, z
// over tokens. A piece is 16 bytes in rope_forward; in rope_forward_scalar it is one copied
// element or one rotated pair. Each thread moves one piece of up to HEADS heads: cos and sin are
// loaded once for all of them, and as many loads are in flight. With few tokens it takes fewer
// heads, so that every SM has a block. One thread reads and writes a piece, so x and y may be the
// same tensor; the copied channels are then not touched.
//
// Floor: every element is read and written once (in place: only those that rotate), 3 FLOPs for a
// rotated element; cos and sin add 4*rope_dim bytes a token. Limit: memory. In place it is the
// access pattern, 128 bytes of each 1024: 80 % of a copy on one H200, out of place 98 %. What was
// tried: kernels/docs/rope.md.
#include "element.h"
#include "math.h"
#include "memory.h"
#include "numeric.h"
#include "rotation.h"

constexpr int HEADS = 8;                             // heads that one thread serves, of few tokens fewer
constexpr int THREADS = 256;
// More threads than are launched: this limits the compiler to 80 registers. Then three blocks of
// 256 threads share an SM, and one block's stores overlap the others' loads.
constexpr int REGISTER_BOUND = 768;

struct RopeParams {
    const ELEMENT* x;        // [num_tokens, num_heads, head_dim]
    int64_t x_token_stride;  // all strides in elements; the channels of a head are contiguous
    int64_t x_head_stride;
    ELEMENT* y;  // the same shape; may be x itself, with equal strides
    int64_t y_token_stride;
    int64_t y_head_stride;
    const float* cos;  // [table_rows, rope_dim/2], rows contiguous
    int64_t cos_stride;
    const float* sin;  // likewise
    int64_t sin_stride;
    const int32_t* positions;  // [num_tokens], or nullptr: token t uses table row t
    int64_t num_tokens;
    int64_t table_rows;
    int32_t num_heads;
    int32_t head_dim;
    int32_t rope_dim;  // even, at most head_dim
    int32_t inverse;   // 0 or 1
    int32_t heads_per_thread;  // 1 to HEADS
};

struct RopeTableParams {
    const float* inv_freq;     // [half]
    const int32_t* positions;  // [num_positions]
    float* cos;                // [num_positions, half]
    float* sin;                // [num_positions, half]
    int64_t num_positions;
    int32_t half;  // rope_dim / 2
};

// ---------------------------------------------------------------- rotation

DEVICE Vec16 rotate_vector(Vec16 vector, const Rotation (&rotations)[VECTOR / 2]) {
    constexpr int per_word = Element<ELEMENT>::per_word;
    float channels[VECTOR];
    for (int i = 0; i < 4; ++i) Element<ELEMENT>::unpack(vector.w[i], channels + i * per_word);
    for (int i = 0; i < VECTOR / 2; ++i) rotate(rotations[i], channels[2 * i], channels[2 * i + 1]);
    for (int i = 0; i < 4; ++i) vector.w[i] = Element<ELEMENT>::pack(channels + i * per_word);
    return vector;
}

// ---------------------------------------------------------------- work of a thread

// The work of a thread: up to heads_per_thread heads of one token, every step-th of the `left`
// ones from its first on. They start at x and y (channel 0), x_step and y_step elements apart.
// blockIdx.x counts chunks of blockDim.y * heads_per_thread heads, blockIdx.y and z together
// blockDim.z tokens. Division would take a fifth of the time for few tokens. Blocks that start one
// after the other have neighbouring heads: all tokens of one chunk before the next chunk took 4 %
// longer out of place.
struct Work {
    int64_t token, position;
    const ELEMENT* x;
    ELEMENT* y;
    int64_t x_step, y_step;
    int left, step, most;

    explicit Work(const RopeParams& params)
        : token((static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * blockDim.z + threadIdx.z), left(0),
          step(static_cast<int>(blockDim.y)), most(0) {
        if (token >= params.num_tokens) return;
        // Loaded first: the table's address depends on it, and it is a memory access of its own.
        position = position_of(params, token);
        const int head = static_cast<int>(blockIdx.x) * step * params.heads_per_thread + static_cast<int>(threadIdx.y);
        x = params.x + token * params.x_token_stride + head * params.x_head_stride;
        y = params.y + token * params.y_token_stride + head * params.y_head_stride;
        x_step = step * params.x_head_stride;
        y_step = step * params.y_head_stride;
        left = params.num_heads - head;
        most = params.heads_per_thread;
    }
    bool has(int i) const { return i < most && i * step < left; }
};

DEVICE void rotate_heads(const RopeParams& params, const Work& work, int channel) {
    Vec16 held[HEADS];
    const ELEMENT* x = work.x + channel;
    ELEMENT* y = work.y + channel;
    for (int i = 0; i < HEADS; ++i, x += work.x_step)
        if (work.has(i)) held[i] = load_vec16(x);
    const int rotated = channel - (params.head_dim - params.rope_dim);
    if (rotated >= 0) {
        Rotation rotations[VECTOR / 2];
        load_rotations(params, rows_of_position(params, work.position, rotated / 2), rotations);
        for (int i = 0; i < HEADS; ++i)
            if (work.has(i)) held[i] = rotate_vector(held[i], rotations);
    }
    for (int i = 0; i < HEADS; ++i, y += work.y_step)
        if (work.has(i)) store_vec16(y, held[i]);
}

// 16-byte accesses: head_dim, rope_dim, all strides and both addresses are multiples of 16 bytes.
KERNEL(rope_forward, RopeParams, REGISTER_BOUND) {
    const int first = params.x == params.y ? params.head_dim - params.rope_dim : 0;
    const Work work(params);
    if (!work.has(0)) return;
    const int step = static_cast<int>(blockDim.x) * VECTOR;
    for (int channel = first + static_cast<int>(threadIdx.x) * VECTOR; channel < params.head_dim; channel += step)
        rotate_heads(params, work, channel);
}

DEVICE void rotate_pairs(const RopeParams& params, const Work& work, int pair) {
    const int channel = params.head_dim - params.rope_dim + 2 * pair;
    Rotation rotation[1];
    load_rotations(params, rows_of_position(params, work.position, pair), rotation);
    const ELEMENT* x = work.x + channel;
    ELEMENT* y = work.y + channel;
    for (int i = 0; work.has(i); ++i, x += work.x_step, y += work.y_step) {
        float even = Element<ELEMENT>::load(x), odd = Element<ELEMENT>::load(x + 1);
        rotate(rotation[0], even, odd);
        Element<ELEMENT>::store(y, even);
        Element<ELEMENT>::store(y + 1, odd);
    }
}

DEVICE void copy_channel(const Work& work, int channel) {
    for (int i = 0; work.has(i); ++i) work.y[i * work.y_step + channel] = work.x[i * work.x_step + channel];
}

// Any head_dim, even rope_dim, stride and alignment.
KERNEL(rope_forward_scalar, RopeParams, THREADS) {
    const int copied = params.head_dim - params.rope_dim;
    const int first = params.x == params.y ? copied : 0;
    const int units = copied + params.rope_dim / 2;
    const Work work(params);
    if (!work.has(0)) return;
    for (int unit = first + static_cast<int>(threadIdx.x); unit < units; unit += static_cast<int>(blockDim.x)) {
        if (unit < copied) {
            copy_channel(work, unit);
        } else {
            rotate_pairs(params, work, unit - copied);
        }
    }
}

// ---------------------------------------------------------------- tables

constexpr double TWO_OVER_PI = 0x1.45f306dc9c883p-1;
constexpr double HALF_PI_HIGH = 0x1.921fb54442d18p+0;  // pi/2 to 53 bits
constexpr double HALF_PI_LOW = 0x1.1a62633145c07p-54;  // pi/2 - HALF_PI_HIGH
constexpr double ROUND_TO_INTEGER = 0x1.8p+52;         // adding it leaves no bits below 1
constexpr double LARGEST_ANGLE = 3.0e9;                // the quadrant's number still fits 32 bits

// sin and cos on [-pi/4, pi/4] by their Taylor series, to about 1e-16.
DEVICE double sine_polynomial(double r) {
    const double z = r * r;
    double p = -1.0 / 1307674368000.0;
    p = fma(p, z, 1.0 / 6227020800.0);
    p = fma(p, z, -1.0 / 39916800.0);
    p = fma(p, z, 1.0 / 362880.0);
    p = fma(p, z, -1.0 / 5040.0);
    p = fma(p, z, 1.0 / 120.0);
    p = fma(p, z, -1.0 / 6.0);
    return fma(p * z, r, r);
}
DEVICE double cosine_polynomial(double r) {
    const double z = r * r;
    double p = 1.0 / 20922789888000.0;
    p = fma(p, z, -1.0 / 87178291200.0);
    p = fma(p, z, 1.0 / 479001600.0);
    p = fma(p, z, -1.0 / 3628800.0);
    p = fma(p, z, 1.0 / 40320.0);
    p = fma(p, z, -1.0 / 720.0);
    p = fma(p, z, 1.0 / 24.0);
    p = fma(p, z, -0.5);
    return fma(p, z, 1.0);
}

// cos and sin of an fp32 angle, within half an fp32 ulp (and 1e-8 of one). The fast intrinsics
// lose all digits at large angles. Double arithmetic costs little, because a table is built once.
// It reduces the angle in one step: angle - quadrant * pi/2 with pi/2 to 106 bits.
DEVICE Rotation accurate_rotation(float angle) {
    const double a = static_cast<double>(angle);
    if (!(a < LARGEST_ANGLE && a > -LARGEST_ANGLE)) return Rotation{NAN_F32, NAN_F32};
    const double quadrant = fma(a, TWO_OVER_PI, ROUND_TO_INTEGER) - ROUND_TO_INTEGER;
    const double r = fma(-quadrant, HALF_PI_LOW, fma(-quadrant, HALF_PI_HIGH, a));
    const float sine = static_cast<float>(sine_polynomial(r));
    const float cosine = static_cast<float>(cosine_polynomial(r));
    switch (static_cast<int32_t>(quadrant) & 3) {
        case 0: return Rotation{cosine, sine};
        case 1: return Rotation{-sine, cosine};
        case 2: return Rotation{-cosine, -sine};
        default: return Rotation{sine, -cosine};
    }
}

// cos and sin of fp32(position) * inv_freq, the product rounded to fp32 (inference 4). One thread
// an entry. Writes 8 bytes for about 40 double FLOPs: limited by arithmetic where fp64 is slow.
KERNEL(rope_table, RopeTableParams, THREADS) {
    const int64_t entries = params.num_positions * params.half;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < entries; i += step) {
        const float position = static_cast<float>(params.positions[i / params.half]);
        const float angle = __fmul_rn(position, params.inv_freq[i % params.half]);
        const Rotation rotation = accurate_rotation(angle);
        params.cos[i] = rotation.cos;
        params.sin[i] = rotation.sin;
    }
}
