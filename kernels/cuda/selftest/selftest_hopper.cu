// A pipeline between two warpgroups as in the Hopper kernels, named barriers, TMA boxes, and
// clusters. sm_90a only.
//
// All kernels are correct. The tests remove or change single lines of them, to check that the
// emulator reports it.
//
// Defines: none.
#include "hopper.h"
#include "numeric.h"

constexpr int TILE = 64, STAGES = 2;
constexpr int TILE_BYTES = TILE * TILE * 2, GROUP_BYTES = 8 * 128;
constexpr int PIPELINE_THREADS = 2 * WARPGROUP_SIZE;
struct PipelinePlan {
    uint8_t a_tiles[STAGES][TILE_BYTES];
    uint8_t b_tiles[STAGES][TILE_BYTES];
    float sums[TILE][TILE];
    uint64_t full[STAGES], empty[STAGES];  // mbarriers
};
constexpr int A_TILES = OFFSET_OF(PipelinePlan, a_tiles), B_TILES = OFFSET_OF(PipelinePlan, b_tiles);
constexpr int SUMS = OFFSET_OF(PipelinePlan, sums), FULL = OFFSET_OF(PipelinePlan, full);
constexpr int EMPTY = OFFSET_OF(PipelinePlan, empty);
SHARED_MEMORY(selftest_pipeline, sizeof(PipelinePlan))

struct SelftestPipelineParams {
    const uint16_t* a;  // bf16 [steps, TILE, TILE], row = m, column = k
    const uint16_t* b;  // bf16 [steps, TILE, TILE], row = n, column = k, the chunks of 8 of row n at chunk ^ n % 8
    float* y;           // [TILE, TILE] += 3 x the sum over steps of a b^T, by each block
    int32_t steps;
};

struct Stage {
    SharedAddress a, b, full, empty;
    uint32_t parity;  // of the phases in which this step uses the stage
};

DEVICE Stage stage_of(SharedAddress shared, int step) {
    const int stage = step % STAGES;
    const uint32_t parity = step / STAGES % 2;
    return {shared + A_TILES + stage * TILE_BYTES, shared + B_TILES + stage * TILE_BYTES, shared + FULL + stage * 8,
            shared + EMPTY + stage * 8, parity};
}

// A by 16-byte copies of all threads, B by one bulk copy.
DEVICE void produce(const SelftestPipelineParams& params, SharedAddress shared, int thread) {
    for (int step = 0; step < params.steps; ++step) {
        const Stage stage = stage_of(shared, step);
        mbarrier_wait(stage.empty, stage.parity ^ 1);
        if (thread == 0) {
            mbarrier_arrive_expect(stage.full, TILE_BYTES);
            bulk_copy_in(stage.b, params.b + step * TILE * TILE, TILE_BYTES, stage.full);
        }
        for (int i = thread; i < TILE * TILE / 8; i += WARPGROUP_SIZE) {
            const int row = i / 8, chunk = i % 8;
            copy_async_16(stage.a + row * 128 + (chunk ^ row % 8) * 16, params.a + (step * TILE * TILE + i * 8), true);
        }
        copy_arrive(stage.full);
    }
}

// The MMA of one step is in flight while that of the next is issued.
DEVICE void multiply_steps(float (&d)[8][4], int steps, SharedAddress shared) {
    for (int step = 0; step < steps; ++step) {
        const Stage stage = stage_of(shared, step);
        mbarrier_wait(stage.full, stage.parity);
        fence_async_proxy();
        wgmma_fence();
        UNROLL
        for (int k = 0; k < TILE; k += 16) {
            const uint64_t a = descriptor_advance(matrix_descriptor(stage.a, 0, GROUP_BYTES), 2 * k);
            const uint64_t b = descriptor_advance(matrix_descriptor(stage.b, 0, GROUP_BYTES), 2 * k);
            wgmma_shared<false, false>(d, a, b, step > 0 || k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) mbarrier_arrive(stage_of(shared, step - 1).empty);
    }
    wgmma_wait<0>();
    wgmma_hold(d);
}

// y += factor d, through shared memory.
DEVICE void add_sums(const float (&d)[8][4], float factor, float* y, SharedAddress shared, int thread) {
    const int lane = thread % WARP_SIZE, row = thread / WARP_SIZE * 16 + lane / 4;
    UNROLL
    for (int n = 0; n < 8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) {
            const int place = (row + 8 * (i / 2)) * TILE + 8 * n + 2 * (lane % 4) + i % 2;
            store_shared(shared + SUMS + place * 4, __float_as_uint(factor * d[n][i]));
        }
    fence_async_proxy();
    named_barrier_sync(1, WARPGROUP_SIZE);
    if (thread == 0) {
        bulk_add_f32(y, shared + SUMS, TILE * TILE * 4);
        bulk_commit();
        bulk_wait_read<0>();
    }
    named_barrier_sync(2, WARPGROUP_SIZE);
}

using Registers = DividedRegisters<1, 40, 1, 232>;

KERNEL(selftest_pipeline, SelftestPipelineParams, PIPELINE_THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const int thread = threadIdx.x % WARPGROUP_SIZE;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + FULL + stage * 8, WARPGROUP_SIZE + 1);
            mbarrier_init(shared + EMPTY + stage * 8, WARPGROUP_SIZE);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP_SIZE) {
        Registers::give();
        produce(params, shared, thread);
    } else {
        Registers::take();
        float d[8][4] = {};
        multiply_steps(d, params.steps, shared);
        add_sums(d, 1.0f, params.y, shared, thread);
        add_sums(d, 2.0f, params.y, shared, thread);
    }
}

// ---------------------------------------------------------------- named barriers

struct SelftestNamedBarriersParams {
    const int32_t* x;  // [rounds, WARPGROUP_SIZE]
    int32_t* y;        // [rounds, WARPGROUP_SIZE], each round of x reversed
    int32_t rounds;
};

constexpr int HANDED_OVER = 1, TAKEN = 2;
SHARED_MEMORY(selftest_named_barriers, WARPGROUP_SIZE * 4)

// One block: the first warpgroup hands each round to the second. Neither waits for itself.
KERNEL(selftest_named_barriers, SelftestNamedBarriersParams, PIPELINE_THREADS) {
    int32_t* held = reinterpret_cast<int32_t*>(dynamic_shared());
    const int thread = threadIdx.x % WARPGROUP_SIZE;
    const bool gives = threadIdx.x < WARPGROUP_SIZE;
    for (int round = 0; round < params.rounds; ++round) {
        if (gives) {
            if (round > 0) named_barrier_sync(TAKEN, PIPELINE_THREADS);
            held[thread] = params.x[round * WARPGROUP_SIZE + thread];
            named_barrier_arrive(HANDED_OVER, PIPELINE_THREADS);
        } else {
            named_barrier_sync(HANDED_OVER, PIPELINE_THREADS);
            params.y[round * WARPGROUP_SIZE + thread] = held[WARPGROUP_SIZE - 1 - thread];
            if (round + 1 < params.rounds) named_barrier_arrive(TAKEN, PIPELINE_THREADS);
        }
    }
}

// ---------------------------------------------------------------- TMA boxes

struct SelftestBoxParams {
    uint8_t* y;  // [BOX_ROWS, 128], the box as it lies in the tensor
    int32_t column, row, matrix;
    TensorMap map;  // boxes of BOX_ROWS rows
};

constexpr int BOX_ROWS = 40, BOX_BYTES = BOX_ROWS * 128;
struct BoxPlan {
    uint8_t box[BOX_BYTES];
    uint8_t after[1024];
    uint64_t landed;  // mbarrier
};
constexpr int LANDED = OFFSET_OF(BoxPlan, landed);
SHARED_MEMORY(selftest_box, sizeof(BoxPlan))

// One block.
KERNEL(selftest_box, SelftestBoxParams, PIPELINE_THREADS) {
    const SharedAddress shared = shared_address(dynamic_shared()), landed = shared + LANDED;
    if (threadIdx.x == 0) {
        mbarrier_init(landed, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect(landed, BOX_BYTES);
        tensor_copy_in(shared, params.map, params.column, params.row, params.matrix, landed);
    }
    __syncthreads();
    mbarrier_wait(landed, 0);
    for (int i = threadIdx.x; i < BOX_BYTES / 16; i += PIPELINE_THREADS) {
        const int row = i / 8, chunk = i % 8;
        store_vec16(params.y + 16 * i, load_vec16(dynamic_shared() + row * 128 + 16 * (chunk ^ row % 8)));
    }
}

// ---------------------------------------------------------------- clusters

struct SelftestClusterParams {
    uint8_t* y;      // [blocks, rounds, CLUSTER * BOX_ROWS, 128]: each block of a cluster has what all of them copied
    int32_t rounds;
    TensorMap map;   // boxes of BOX_ROWS rows; of each cluster a matrix, of each round one for every block
};

constexpr uint32_t CLUSTER = 2;
constexpr int ROUND_BYTES = CLUSTER * BOX_BYTES;
struct ClusterPlan {
    uint8_t boxes[CLUSTER][BOX_BYTES];
    uint64_t landed, taken, told;  // mbarriers
    int32_t told_round;
};
constexpr int TOLD_ROUND = OFFSET_OF(ClusterPlan, told_round);
SHARED_MEMORY(selftest_cluster, sizeof(ClusterPlan))

// Each block copies one box to all blocks of the cluster, once all have consumed those of the
// round before. The first block sends the round number to all.
KERNEL_OF_CLUSTERS(selftest_cluster, SelftestClusterParams, PIPELINE_THREADS, CLUSTER) {
    const SharedAddress shared = shared_address(dynamic_shared());
    const SharedAddress landed = shared + OFFSET_OF(ClusterPlan, landed), taken = shared + OFFSET_OF(ClusterPlan, taken);
    const SharedAddress told = shared + OFFSET_OF(ClusterPlan, told);
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(landed, 1);
        mbarrier_init(taken, CLUSTER);
        mbarrier_init(told, 1);
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();
    for (int round = 0; round < params.rounds; ++round) {
        if (threadIdx.x == 0) {
            mbarrier_wait(taken, round % 2 ^ 1);
            mbarrier_arrive_expect(landed, ROUND_BYTES);
            mbarrier_arrive_expect(told, 4);
            for (uint32_t block = 0; rank == 0 && block < CLUSTER; ++block)
                store_at(shared + TOLD_ROUND, static_cast<uint32_t>(round), told, block);
            mbarrier_wait(told, round % 2);
            const int own_round = *reinterpret_cast<const int32_t*>(dynamic_shared() + TOLD_ROUND);
            const int row = (own_round * static_cast<int>(CLUSTER) + static_cast<int>(rank)) * BOX_ROWS;
            tensor_copy_in_all(shared + rank * BOX_BYTES, params.map, 0, row, blockIdx.x / CLUSTER, landed,
                               (1u << CLUSTER) - 1);
        }
        mbarrier_wait(landed, round % 2);
        uint8_t* const y = params.y + (static_cast<int64_t>(blockIdx.x) * params.rounds + round) * ROUND_BYTES;
        for (int i = threadIdx.x; i < ROUND_BYTES / 16; i += PIPELINE_THREADS)
            store_vec16(y + 16 * i, load_vec16(dynamic_shared() + i / 8 * 128 + 16 * (i % 8 ^ i / 8 % 8)));
        __syncthreads();
        if (threadIdx.x < CLUSTER) mbarrier_arrive_at(taken, threadIdx.x);
    }
    cluster_arrive();
    cluster_wait();
}

// ---------------------------------------------------------------- four e4m3 codes at a time

struct SelftestE4m3WordsParams {
    uint32_t* y;  // bf16 [256 scales, 256, 4]: of each word the values of its four codes
};

// Any grid and block. Byte j of word i holds code i + 64 j.
KERNEL(selftest_e4m3_words, SelftestE4m3WordsParams, 256) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 65536; i += gridDim.x * blockDim.x) {
        uint32_t word = 0;
        for (uint32_t j = 0; j < 4; ++j) word |= (i + 64 * j & 0xff) << 8 * j;
        e4m3x4_to_bf16(word, e8m0_to_bf16(static_cast<uint8_t>(i >> 8)), params.y[2 * i], params.y[2 * i + 1]);
    }
}
