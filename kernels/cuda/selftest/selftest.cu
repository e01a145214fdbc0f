// Kernels that test both backends against the same expected outputs. Each exercises one part of
// the execution model or of include/ and stores its results. The tests compute the expected
// outputs from the CUDA programming guide and the number formats, not with either backend.
//
// Defines: none. All are correct programs; the incorrect ones are in selftest_faults.cu.
#include "async_copy.h"
#include "math.h"
#include "memory.h"
#include "mma.h"
#include "numeric.h"
#include "quantize.h"

DEVICE int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE int64_t global_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// ---------------------------------------------------------------- number formats

struct SelftestConversionsParams {
    const float* x;       // [count]
    uint16_t* bf16_bits;  // [count]
    uint32_t* pairs;      // [count], pack_bf16(x[i], -x[i])
    uint8_t* e4m3_bits;   // [count]
    uint8_t* e2m1_codes;  // [count]
    uint8_t* e8m0_bits;   // [count]
    float* e4m3_values;   // [256], the value of each code
    float* e2m1_values;   // [16]
    float* e8m0_values;   // [256]
    int64_t count;
};

// Any grid and block; no bit may differ between the backends.
KERNEL(selftest_conversions, SelftestConversionsParams, 256) {
    for (int64_t i = global_thread(); i < params.count; i += global_threads()) {
        const float x = params.x[i];
        params.bf16_bits[i] = to_bf16(x).bits;
        params.pairs[i] = pack_bf16(x, -x);
        params.e4m3_bits[i] = to_e4m3(x).bits;
        params.e2m1_codes[i] = to_e2m1(x);
        // Of bf16 values in range, eight at a time: x takes each of the eight positions
        // round-robin.
        if (to_float(to_bf16(x)) == x && absolute_f32(x) <= 6.0f) {
            float numbers[8] = {1.0f, -6.0f, 0.5f, -0.0f, 6.0f, -0.25f, 3.0f, 5.0f};
            numbers[i % 8] = x;
            params.e2m1_codes[i] = e2m1_codes(numbers, 127) >> 4 * (i % 8) & 15u;
        }
        params.e8m0_bits[i] = to_e8m0(x);
    }
    for (int64_t i = global_thread(); i < 256; i += global_threads()) {
        const uint8_t code = static_cast<uint8_t>(i);
        params.e4m3_values[i] = to_float(fp8_e4m3{code});
        params.e8m0_values[i] = e8m0_to_float(code);
        if (i < 16) params.e2m1_values[i] = e2m1_to_float(code);
    }
}

struct SelftestE4m3PairsParams {
    float* low;   // [65536], the value of the low code of each pair of codes
    float* high;  // [65536]
};

// Any grid and block.
KERNEL(selftest_e4m3_pairs, SelftestE4m3PairsParams, 256) {
    for (int64_t i = global_thread(); i < 65536; i += global_threads())
        e4m3x2_to_float(static_cast<uint32_t>(i), params.low[i], params.high[i]);
}

// ---------------------------------------------------------------- warps

struct SelftestWarpParams {
    const int32_t* x;  // [threads]
    int32_t* y;        // [22, threads]
};

// One block of one or more full warps. Row r of y holds the result of test r for each thread.
KERNEL(selftest_warp, SelftestWarpParams, 256) {
    const int thread = threadIdx.x, lane = thread % WARP_SIZE;
    const int x = params.x[thread];
    const unsigned bits = static_cast<unsigned>(x);
    int test = 0;
    const auto report = [&](int value) { params.y[test++ * blockDim.x + thread] = value; };

    report(__shfl_sync(FULL_WARP, x, (7 * lane + 3) % 32));  // 0
    report(__shfl_sync(FULL_WARP, x, 11, 8));                // 1: lane 3 of each segment of 8
    report(__shfl_up_sync(FULL_WARP, x, 3));                 // 2
    report(__shfl_up_sync(FULL_WARP, x, 3, 8));              // 3
    report(__shfl_down_sync(FULL_WARP, x, 5));               // 4
    report(__shfl_down_sync(FULL_WARP, x, 5, 16));           // 5
    report(__shfl_xor_sync(FULL_WARP, x, 1));                // 6
    report(__shfl_xor_sync(FULL_WARP, x, 16));               // 7
    report(__shfl_xor_sync(FULL_WARP, x, 9, 8));             // 8: later segments are out of reach
    report(static_cast<int>(__ballot_sync(FULL_WARP, x & 1)));      // 9
    report(__any_sync(FULL_WARP, x > 0) != 0);                      // 10
    report(__all_sync(FULL_WARP, x > 0) != 0);                      // 11
    report(__reduce_add_sync(FULL_WARP, x));                        // 12: wraps around
    report(__reduce_min_sync(FULL_WARP, x));                        // 13
    report(__reduce_max_sync(FULL_WARP, x));                        // 14
    report(static_cast<int>(__reduce_max_sync(FULL_WARP, bits)));   // 15: unsigned
    report(static_cast<int>(__reduce_and_sync(FULL_WARP, bits)));   // 16
    report(static_cast<int>(__reduce_or_sync(FULL_WARP, bits)));    // 17
    report(static_cast<int>(__reduce_xor_sync(FULL_WARP, bits)));   // 18

    // 19: the halves of the warp reduce separately, in different branches.
    int half = 0;
    if (lane < 16) {
        half = __reduce_add_sync(0x0000ffffu, x);
    } else {
        half = __reduce_max_sync(0xffff0000u, x);
    }
    report(half);

    // 20: even lanes vote, odd lanes shuffle among themselves.
    int other = 0;
    if (lane % 2 == 0) {
        other = static_cast<int>(__ballot_sync(0x55555555u, x & 2));
    } else {
        other = __shfl_xor_sync(0xaaaaaaaau, x, 2);
    }
    report(other);

    // 21: a shuffle keeps all bits of a float.
    report(__float_as_int(__shfl_xor_sync(FULL_WARP, __int_as_float(x), 31)));
}

// ---------------------------------------------------------------- tensor cores

struct SelftestMmaParams {
    const uint16_t* a;  // bf16 [16, 16]
    const uint16_t* b;  // bf16 [16, 8]
    const float* c;     // [16, 8]
    float* y;           // [3, 16, 8], three times c + a b, each by other loads
};

constexpr int MMA_M = 16, MMA_N = 8, MMA_K = 16;
struct MmaTiles {
    uint16_t a[MMA_M][MMA_K], a_transposed[MMA_K][MMA_M], b[MMA_K][MMA_N], b_transposed[MMA_N][MMA_K];
};
SHARED_MEMORY(selftest_mma, sizeof(MmaTiles))

DEVICE void fill_mma_tiles(const SelftestMmaParams& params, MmaTiles& tiles) {
    for (int i = threadIdx.x; i < MMA_M * MMA_K; i += blockDim.x) {
        tiles.a[i / MMA_K][i % MMA_K] = params.a[i];
        tiles.a_transposed[i % MMA_K][i / MMA_K] = params.a[i];
    }
    for (int i = threadIdx.x; i < MMA_K * MMA_N; i += blockDim.x) {
        tiles.b[i / MMA_N][i % MMA_N] = params.b[i];
        tiles.b_transposed[i % MMA_N][i / MMA_N] = params.b[i];
    }
}

DEVICE void multiply_tiles(const SelftestMmaParams& params, const uint32_t (&a)[4], const uint32_t (&b)[2], int which) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float c[4];
    for (int i = 0; i < 4; ++i) c[i] = params.c[(g + 8 * (i / 2)) * MMA_N + 2 * t + i % 2];
    mma_bf16_16x8x16(c, a, b[0], b[1]);
    float* y = params.y + which * MMA_M * MMA_N;
    for (int i = 0; i < 4; ++i) y[(g + 8 * (i / 2)) * MMA_N + 2 * t + i % 2] = c[i];
}

// One warp. Each form of ldmatrix must give the fragments that mma expects.
KERNEL(selftest_mma, SelftestMmaParams, WARP_SIZE) {
    MmaTiles& tiles = *reinterpret_cast<MmaTiles*>(dynamic_shared());
    fill_mma_tiles(params, tiles);
    __syncthreads();
    // Lane i names row i % 8 of 8 x 8 matrix i / 8.
    const int row = threadIdx.x % 8, matrix = threadIdx.x / 8;
    uint32_t a[4], a_again[4], b[2], b_again[2];
    ldmatrix_x4(a, shared_address(&tiles.a[row + 8 * (matrix % 2)][8 * (matrix / 2)]));
    ldmatrix_x4_transposed(a_again, shared_address(&tiles.a_transposed[row + 8 * (matrix / 2)][8 * (matrix % 2)]));
    ldmatrix_x2(b, shared_address(&tiles.b_transposed[row][8 * (matrix % 2)]));
    ldmatrix_x2_transposed(b_again, shared_address(&tiles.b[row + 8 * (matrix % 2)][0]));
    multiply_tiles(params, a, b, 0);
    multiply_tiles(params, a, b_again, 1);
    multiply_tiles(params, a_again, b, 2);
}

// ---------------------------------------------------------------- asynchronous copies

struct SelftestAsyncCopyParams {
    const uint32_t* source;  // [source_rows, 16]
    const int32_t* indices;  // [num_rows], outside [0, source_rows): a row of zeros
    uint32_t* y;             // [num_rows, 16], the rows gathered
    int32_t source_rows;
    int32_t num_rows;
};

constexpr int COPY_THREADS = 128;
constexpr int COPY_ROW_BYTES = 64;
constexpr int COPY_STAGE_ROWS = COPY_THREADS / 4;  // each thread copies a quarter of a row
SHARED_MEMORY(selftest_async_copy, 2 * COPY_STAGE_ROWS * COPY_ROW_BYTES)

DEVICE void gather_stage(const SelftestAsyncCopyParams& params, int stage) {
    const int row = stage * COPY_STAGE_ROWS + static_cast<int>(threadIdx.x) / 4;
    const int quarter = threadIdx.x % 4;
    const int index = row < params.num_rows ? params.indices[row] : -1;
    const bool wanted = index >= 0 && index < params.source_rows;
    const uint32_t* source = params.source + (wanted ? index : 0) * int64_t{16} + 4 * quarter;
    uint8_t* buffer = dynamic_shared() + (stage % 2) * COPY_STAGE_ROWS * COPY_ROW_BYTES;
    copy_async_16(shared_address(buffer + threadIdx.x * 16), source, wanted);
    copy_commit();
}

// One block of COPY_THREADS. While a stage is read, the next is in flight. Each thread reads what
// another one copied, so that both the wait and the barrier are needed.
KERNEL(selftest_async_copy, SelftestAsyncCopyParams, COPY_THREADS) {
    const int stages = ceil_div(params.num_rows, COPY_STAGE_ROWS);
    const int reader = COPY_THREADS - 1 - static_cast<int>(threadIdx.x);
    gather_stage(params, 0);
    for (int stage = 0; stage < stages; ++stage) {
        gather_stage(params, stage + 1);
        copy_wait<1>();
        __syncthreads();
        const uint8_t* buffer = dynamic_shared() + (stage % 2) * COPY_STAGE_ROWS * COPY_ROW_BYTES;
        const Vec16 quarter = load_shared_vec16(shared_address(buffer + reader * 16));
        const int64_t row = stage * COPY_STAGE_ROWS + reader / 4;
        if (row < params.num_rows) store_vec16(params.y + row * 16 + 4 * (reader % 4), quarter);
        __syncthreads();
    }
    copy_wait<0>();
}

// ---------------------------------------------------------------- atomics

struct SelftestAtomicsParams {
    const int32_t* x;   // [count]
    int32_t* integers;  // [9]: sum, difference, min, max, and, or, xor, sum by compare-and-swap, exchanged
    float* floats;      // [8]: sum of x, three zeros, then 1, 2, 3, 4 times the sum by atomic_add_vec4
    uint64_t* wide;     // [1]: sum of 2^31 + x as 64 bits
    int32_t* tickets;   // [count]: how often each ticket was drawn, which is once
    int32_t* next;      // [2]: the next ticket; the value that was put in last
    int64_t count;
};

// Any grid and block. The caller sets the starting values; |sum of x| < 2^22 keeps the floats
// exact.
KERNEL(selftest_atomics, SelftestAtomicsParams, 256) {
    for (int64_t i = global_thread(); i < params.count; i += global_threads()) {
        const int32_t x = params.x[i];
        atomicAdd(&params.integers[0], x);
        atomicSub(&params.integers[1], x);
        atomicMin(&params.integers[2], x);
        atomicMax(&params.integers[3], x);
        atomicAnd(&params.integers[4], x);
        atomicOr(&params.integers[5], x);
        atomicXor(&params.integers[6], x);
        int32_t seen = 0, expected;
        do {
            expected = seen;
            seen = atomicCAS(&params.integers[7], expected, expected + x);
        } while (seen != expected);
        const float value = static_cast<float>(x);
        atomicAdd(&params.floats[0], value);
        atomic_add_vec4(&params.floats[4], value, 2 * value, 3 * value, 4 * value);
        atomicAdd(&params.wide[0], uint64_t{0x80000000u} + static_cast<uint64_t>(static_cast<int64_t>(x)));
        const int32_t ticket = atomicAdd(&params.next[0], 1);
        atomicAdd(&params.tickets[ticket], 1);
        // Every value is stored once and, except the last, removed once.
        atomicAdd(&params.integers[8], atomicExch(&params.next[1], x));
    }
}

// ---------------------------------------------------------------- shared memory and barriers

struct SelftestSharedParams {
    const int32_t* x;  // [blocks, threads]
    int32_t* y;        // [5, blocks, threads]
};

constexpr int SHARED_THREADS = 256;
SHARED_MEMORY(selftest_shared, SHARED_THREADS * sizeof(int32_t))

// Any grid; blocks of up to SHARED_THREADS threads, not necessarily whole warps.
KERNEL(selftest_shared, SelftestSharedParams, SHARED_THREADS) {
    __shared__ int32_t reversed[SHARED_THREADS];
    int32_t* shifted = reinterpret_cast<int32_t*>(dynamic_shared());
    const int thread = threadIdx.x, threads = blockDim.x;
    const int64_t tests = global_threads();
    const int32_t x = params.x[global_thread()];
    int32_t* y = params.y + global_thread();
    reversed[threads - 1 - thread] = x;
    shifted[(thread + 1) % threads] = x;
    __syncthreads();
    y[0] = reversed[thread];
    y[tests] = shifted[thread];
    y[2 * tests] = __syncthreads_count(x > 0);
    y[3 * tests] = (__syncthreads_or(x > 100) != 0) + 2 * (__syncthreads_and(x > 0) != 0);
    y[4 * tests] = static_cast<int32_t>(reinterpret_cast<uintptr_t>(dynamic_shared()) % 1024);
}
