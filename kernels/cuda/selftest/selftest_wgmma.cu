// wgmma of every shape and operand source that hopper.h offers. sm_90a only.
//
// Defines: none.
#include "hopper.h"
#include "numeric.h"

struct SelftestWgmmaParams {
    const uint16_t* a;     // bf16 [M, K]
    const uint16_t* b;     // bf16 [K, n]
    const float* c;        // [M, n]
    float* y;              // [M, n], c + a b, or a b where `accumulate` is 0
    int32_t n;             // 64, 128 or 256; 24 or 72 with A from registers and B as it is
    int32_t a_source;      // 0: shared memory, 1: shared memory, transposed, 2: registers
    int32_t b_transposed;  // 0 or 1
    int32_t accumulate;    // 0 or 1
};

// Two warpgroups of 64 rows each; K is two swizzled rows long.
constexpr int WGMMA_THREADS = 2 * WARPGROUP_SIZE, WGMMA_M = 128, WGMMA_N = 256, WGMMA_K = 128;
constexpr int ROW = 64, ROW_BYTES = 128, GROUP_BYTES = 8 * ROW_BYTES;  // of a swizzled operand
constexpr int A_BYTES = WGMMA_M * WGMMA_K * 2, B_BYTES = WGMMA_K * WGMMA_N * 2;
SHARED_MEMORY(selftest_wgmma, A_BYTES + B_BYTES)

// An operand of `extent` m or n and K k.
template <bool TRANSPOSED>
struct Operand {
    SharedAddress start;
    int extent;

    // The address of the pair that holds (mn, k) and its neighbour along the contiguous direction.
    SharedAddress place(int mn, int k) const {
        const int row = TRANSPOSED ? k : mn, column = TRANSPOSED ? mn : k, rows = TRANSPOSED ? WGMMA_K : extent;
        const int byte = column % ROW * 2 ^ row % 8 * 16;
        return start + column / ROW * rows * ROW_BYTES + row * ROW_BYTES + byte;
    }
    uint64_t descriptor(int first, int k) const {
        const SharedAddress base = TRANSPOSED ? start + first / ROW * WGMMA_K * ROW_BYTES + k * ROW_BYTES
                                              : start + k / ROW * extent * ROW_BYTES + first * ROW_BYTES;
        const uint64_t whole = matrix_descriptor(base, WGMMA_K * ROW_BYTES, GROUP_BYTES);
        return TRANSPOSED ? whole : descriptor_advance(whole, k % ROW * 2);
    }
    // Fills the operand from memory in which mn and k have these strides.
    void fill(const uint16_t* source, int mn_stride, int k_stride) const {
        for (int pair = threadIdx.x; pair < extent * WGMMA_K / 2; pair += WGMMA_THREADS) {
            const int mn = TRANSPOSED ? 2 * pair % extent : 2 * pair / WGMMA_K;
            const int k = TRANSPOSED ? 2 * pair / extent : 2 * pair % WGMMA_K;
            const uint16_t* low = source + mn * mn_stride + k * k_stride;
            const uint16_t high = low[TRANSPOSED ? mn_stride : k_stride];
            store_shared(place(mn, k), static_cast<uint32_t>(*low) | static_cast<uint32_t>(high) << 16);
        }
    }
};

DEVICE void load_fragment(uint32_t (&a)[4], const uint16_t* source, int row, int k) {
    const int t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) {
        const uint16_t* low = source + (row + 8 * (i & 1)) * WGMMA_K + k + 2 * t + 8 * (i >> 1);
        a[i] = static_cast<uint32_t>(low[0]) | static_cast<uint32_t>(low[1]) << 16;
    }
}

template <int N8, bool A_REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void multiply(const SelftestWgmmaParams& params, float (&d)[N8][4], int first_row, int fragment_row) {
    const Operand<A_TRANSPOSED> a{shared_address(dynamic_shared()), WGMMA_M};
    const Operand<B_TRANSPOSED> b{a.start + A_BYTES, 8 * N8};
    a.fill(params.a, WGMMA_K, 1);
    b.fill(params.b, 1, 8 * N8);
    uint32_t fragments[WGMMA_K / 16][4];
    UNROLL
    for (int step = 0; step < WGMMA_K / 16; ++step) load_fragment(fragments[step], params.a, fragment_row, 16 * step);
    fence_async_proxy();
    __syncthreads();
    wgmma_fence();
    UNROLL
    for (int step = 0; step < WGMMA_K / 16; ++step) {
        const bool accumulate = step > 0 || params.accumulate;
        if constexpr (A_REGISTERS) {
            wgmma_registers<B_TRANSPOSED>(d, fragments[step], b.descriptor(0, 16 * step), accumulate);
        } else {
            wgmma_shared<A_TRANSPOSED, B_TRANSPOSED>(d, a.descriptor(first_row, 16 * step), b.descriptor(0, 16 * step),
                                                     accumulate);
        }
        if (step % 2 == 1) wgmma_commit();
    }
    wgmma_wait<1>();
    wgmma_wait<0>();
    wgmma_hold(d);
}

template <int N8>
DEVICE void multiply_from(const SelftestWgmmaParams& params, float (&d)[N8][4], int first_row, int row) {
    const int way = 2 * params.a_source + params.b_transposed;
    if (way == 4) multiply<N8, true, false, false>(params, d, first_row, row);
    if constexpr (N8 % 8 == 0) {
        if (way == 0) multiply<N8, false, false, false>(params, d, first_row, row);
        if (way == 1) multiply<N8, false, false, true>(params, d, first_row, row);
        if (way == 2) multiply<N8, false, true, false>(params, d, first_row, row);
        if (way == 3) multiply<N8, false, true, true>(params, d, first_row, row);
        if (way == 5) multiply<N8, true, false, true>(params, d, first_row, row);
    }
}

template <int N8>
DEVICE void whole_product(const SelftestWgmmaParams& params) {
    const int first_row = threadIdx.x / WARPGROUP_SIZE * 64, lane = threadIdx.x % WARP_SIZE;
    const int row = first_row + threadIdx.x % WARPGROUP_SIZE / WARP_SIZE * 16 + lane / 4;
    const auto at = [&](int n, int i) { return (row + 8 * (i / 2)) * 8 * N8 + 8 * n + 2 * (lane % 4) + i % 2; };
    float d[N8][4];
    UNROLL
    for (int n = 0; n < N8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) d[n][i] = params.c[at(n, i)];
    multiply_from(params, d, first_row, row);
    UNROLL
    for (int n = 0; n < N8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) params.y[at(n, i)] = d[n][i];
}

// One block.
KERNEL(selftest_wgmma, SelftestWgmmaParams, WGMMA_THREADS) {
    if (params.n == 24) whole_product<3>(params);
    if (params.n == 72) whole_product<9>(params);
    if (params.n == 64) whole_product<8>(params);
    if (params.n == 128) whole_product<16>(params);
    if (params.n == 256) whole_product<32>(params);
}

// ---------------------------------------------------------------- e4m3

struct SelftestWgmmaE4m3Params {
    const uint8_t* a;      // e4m3 [M, K], 16-byte aligned
    const uint8_t* b;      // e4m3 [n, K], 16-byte aligned
    const float* c;        // [M, n]
    float* y;              // [M, n], c + a b^T, or a b^T where `accumulate` is 0
    int32_t n;             // 8, 16, 64 or 128
    int32_t accumulate;    // 0 or 1
};
SHARED_MEMORY(selftest_wgmma_e4m3, (WGMMA_M + 128) * WGMMA_K)

// A row of K codes is one swizzled row.
DEVICE void fill_rows(SharedAddress operand, const uint8_t* source, int rows) {
    for (int i = threadIdx.x; i < rows * 8; i += WGMMA_THREADS)
        store_shared_vec16(operand + i / 8 * ROW_BYTES + 16 * (i % 8 ^ i / 8 % 8), load_vec16(source + 16 * i));
}

template <int N8>
DEVICE void whole_product_e4m3(const SelftestWgmmaE4m3Params& params) {
    const int first_row = threadIdx.x / WARPGROUP_SIZE * 64, lane = threadIdx.x % WARP_SIZE;
    const int row = first_row + threadIdx.x % WARPGROUP_SIZE / WARP_SIZE * 16 + lane / 4;
    const auto at = [&](int n, int i) { return (row + 8 * (i / 2)) * 8 * N8 + 8 * n + 2 * (lane % 4) + i % 2; };
    const SharedAddress a = shared_address(dynamic_shared()), b = a + WGMMA_M * ROW_BYTES;
    fill_rows(a, params.a, WGMMA_M);
    fill_rows(b, params.b, 8 * N8);
    float d[N8][4];
    UNROLL
    for (int n = 0; n < N8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) d[n][i] = params.c[at(n, i)];
    fence_async_proxy();
    __syncthreads();
    wgmma_fence();
    UNROLL
    for (int step = 0; step < WGMMA_K / 32; ++step)
        wgmma_shared_e4m3(d, matrix_descriptor(a + first_row * ROW_BYTES + 32 * step, 0, GROUP_BYTES),
                          matrix_descriptor(b + 32 * step, 0, GROUP_BYTES), step > 0 || params.accumulate);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
    UNROLL
    for (int n = 0; n < N8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) params.y[at(n, i)] = d[n][i];
}

// One block.
KERNEL(selftest_wgmma_e4m3, SelftestWgmmaE4m3Params, WGMMA_THREADS) {
    if (params.n == 8) whole_product_e4m3<1>(params);
    if (params.n == 16) whole_product_e4m3<2>(params);
    if (params.n == 64) whole_product_e4m3<8>(params);
    if (params.n == 128) whole_product_e4m3<16>(params);
}
