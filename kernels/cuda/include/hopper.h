// Hopper's asynchronous machinery (sm_90a): mbarriers, warpgroup matrix products (wgmma), copies that
// complete on an mbarrier, bulk copies and reductions, named barriers, register hand-over between
// warpgroups. Kernels that include this header compile for sm_90a only.
//
// Who may read what, and when:
// - A phase of an mbarrier completes when all its expected arrivals have come and all its expected
//   bytes have landed; mbarrier_wait(parity) returns once the phase of that parity is complete. What
//   the arriving threads wrote before is then visible to ordinary reads.
// - wgmma and bulk copies read and write shared memory through the asynchronous proxy. What ordinary
//   stores or copy_async_16 wrote is seen by it only after fence_async_proxy() by the writer after its
//   write, or by the issuing warp after it learnt of the write.
// - Between its issue and the wgmma_wait that covers it a wgmma may read its operands in shared memory,
//   and its accumulators hold nothing that can be used.
// - A thread waits (bulk_wait_read) for its bulk additions before it returns, and somebody waits for every
//   bulk copy before the block ends.
// - Blocks of a cluster (KERNEL_OF_CLUSTERS) run at the same time. One may arrive at another's mbarriers and copy into its
//   shared memory when that one has initialised its mbarriers, and as long as it has not ended: both begin and end with
//   the cluster's barrier.
// The emulator does all asynchronous work at a random moment that these rules allow, or as late as they do.
// What the asynchronous proxy need not see it reads as NaN, and so do accumulators before their wait; a wgmma
// without a wgmma_fence since its warp's last wait, unless it goes on with accumulators under way, is a fault.
//
// Operands of wgmma in shared memory are described by 64 bits (matrix_descriptor). Everything here uses
// the 128-byte swizzle: rows of 128 bytes, whose eight chunks of 16 bytes stand at chunk ^ (row % 8), in
// groups of eight rows that start at multiples of 1024 bytes.
// - K-major operand (a row holds 64 consecutive k of one m or n): `group_stride` is the distance of two
//   groups of eight rows; steps of 16 along k add 32 bytes to the address. Of e4m3 a row holds 128 consecutive k, and steps of
//   32 add 32 bytes; there are no transposed operands of e4m3.
// - Transposed operand (a row holds 64 consecutive m or n of one k): `group_stride` as above, over k;
//   `block_stride` is the distance of two blocks of 64 along m or n; steps of 16 along k add 2048 bytes
//   where groups follow one another.
//
// Accumulators d[n][i] of a 64 x 8N product, warp w of the warpgroup, lane 4*g + t: column 8n + 2t + i%2,
// row 16w + g + 8*(i/2). A fragments from registers: as in mma.h, for the warp's 16 rows; of e4m3 a[i] has rows g + 8*(i%2) and
// the four k from 4t + 16*(i/2) on, the first in the lowest byte.
#pragma once

#include "async_copy.h"
#include "memory.h"
#include "mma.h"
#include "numeric.h"
#include "tensor_map.h"

#if !defined(PARITY_EMULATOR) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "hopper.h needs sm_90a"
#endif

constexpr int WARPGROUP_SIZE = 128;

// ---------------------------------------------------------------- mbarriers

// An mbarrier is 8 bytes of shared memory, 8-byte aligned. Initialised by one thread; the others may use it
// after fence_mbarrier_init by that thread and a __syncthreads.
DEVICE void mbarrier_init(SharedAddress barrier, uint32_t arrivals) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_init(emulator::context, barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

DEVICE void fence_mbarrier_init() {
#if !defined(PARITY_EMULATOR)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEVICE void mbarrier_arrive(SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive(emulator::context, barrier, 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// One arrival, and `bytes` more of bulk copies that the current phase waits for.
DEVICE void mbarrier_arrive_expect(SharedAddress barrier, uint32_t bytes) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive(emulator::context, barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Arrives at the mbarrier in the same place of block `rank` of the cluster, which learns that this thread's reads and waits before
// are over, and sees none of its ordinary writes: an arrival that passes these on waits until the whole GPU could see them.
DEVICE void mbarrier_arrive_at(SharedAddress barrier, uint32_t rank) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_arrive_at(emulator::context, barrier, rank);
#else
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
#endif
}

// Waits until the phase with this parity is complete. The first phase has parity 0; waiting for parity 1 on
// a fresh barrier returns at once.
DEVICE void mbarrier_wait(SharedAddress barrier, uint32_t parity) {
#if defined(PARITY_EMULATOR)
    emulator::host->mbarrier_wait(emulator::context, barrier, parity);
#else
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1, 0x989680;\n"
        "@complete bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// This thread's arrival happens once all copies (copy_async_16) that it has issued so far have landed. It is
// one of the arrivals that the barrier was initialised with.
DEVICE void copy_arrive(SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    emulator::host->copy_arrive(emulator::context, barrier);
#else
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// ---------------------------------------------------------------- clusters

// Number of the block within its cluster.
DEVICE uint32_t cluster_rank() {
#if defined(PARITY_EMULATOR)
    return emulator::context->cluster_rank;
#else
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

// The barrier of all threads of a cluster that have not returned. A thread waits once for every time that it has arrived.
DEVICE void cluster_arrive() {
#if defined(PARITY_EMULATOR)
    emulator::host->cluster_barrier(emulator::context, 0);
#else
    asm volatile("barrier.cluster.arrive;" ::: "memory");
#endif
}
// The same of a thread none of whose stores the others read; they see mbarriers that it has initialised (fence_mbarrier_init). The
// arrival above waits until its stores could be seen by the whole GPU.
DEVICE void cluster_arrive_relaxed() {
#if defined(PARITY_EMULATOR)
    cluster_arrive();
#else
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
DEVICE void cluster_wait() {
#if defined(PARITY_EMULATOR)
    emulator::host->cluster_barrier(emulator::context, 1);
#else
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Stores 4 bytes to the place of `target` in block `rank` of the cluster and counts them at the mbarrier in the place of `barrier`
// there, which need not expect them yet: whoever has waited for its phase may read them. In a launch without clusters the
// instruction is illegal, even for the block itself.
DEVICE void store_at(SharedAddress target, uint32_t value, SharedAddress barrier, uint32_t rank) {
#if defined(PARITY_EMULATOR)
    emulator::host->store_at(emulator::context, target, value, barrier, rank);
#else
    asm volatile(
        "{\n.reg .b32 there, told;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 told, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [told];\n}" ::"r"(target),
        "r"(value), "r"(barrier), "r"(rank)
        : "memory");
#endif
}

// ---------------------------------------------------------------- fences and named barriers

// Orders ordinary accesses to shared memory before later ones through the asynchronous proxy.
DEVICE void fence_async_proxy() {
#if defined(PARITY_EMULATOR)
    emulator::host->fence_async_proxy(emulator::context);
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if defined(PARITY_EMULATOR)
namespace emulator {
inline void named_barrier(uint32_t id, uint32_t threads, bool wait) {
    if (id == 0 || threads == 0 || threads % WARP_SIZE)
        host->fail(context, "a named barrier is one of 1 to 15, for a multiple of 32 threads");
    host->barrier(context, id, threads, wait, 0, nullptr);
}
}  // namespace emulator
#endif

// Barriers 1 to 15 among `threads` threads, a multiple of 32; barrier 0 is __syncthreads.
DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
#if defined(PARITY_EMULATOR)
    emulator::named_barrier(id, threads, true);
#else
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Counts as having come, without waiting.
DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
#if defined(PARITY_EMULATOR)
    emulator::named_barrier(id, threads, false);
#else
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// ---------------------------------------------------------------- bulk copies

// 1-dimensional bulk copy to shared memory; `bytes` is a multiple of 16, both addresses 16-byte aligned.
// The bytes count towards the barrier's expected ones when they land.
DEVICE void bulk_copy_in(SharedAddress target, const void* source, uint32_t bytes, SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(source, "bulk_copy_in");
    emulator::host->bulk_copy_in(emulator::context, target, static_cast<const uint8_t*>(source), bytes, barrier);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

// Copy of a box of a tensor to shared memory: 128 bytes of each of the map's `box_rows` rows, from these coordinates on, in
// the swizzle described above; `target` is a multiple of 1024. Zeros where the tensor has no bytes. All the box's bytes,
// zeros among them, count towards the barrier's expected ones when they land.
DEVICE void tensor_copy_in(SharedAddress target, const TensorMap& map, int32_t column, int32_t row, int32_t matrix,
                           SharedAddress barrier) {
#if defined(PARITY_EMULATOR)
    const uint32_t own = 1u << emulator::context->cluster_rank;
    emulator::host->tensor_copy_in(emulator::context, target, map.words, column, row, matrix, barrier, own);
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            target),
        "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
        : "memory");
#endif
}

// The same to every block of the cluster whose bit is set in `blocks`: the box arrives in the same place of each, and its bytes
// count at the mbarrier that each has in the place of `barrier`. They may arrive there before it expects them.
DEVICE void tensor_copy_in_all(SharedAddress target, const TensorMap& map, int32_t column, int32_t row, int32_t matrix,
                               SharedAddress barrier, uint32_t blocks) {
#if defined(PARITY_EMULATOR)
    emulator::host->tensor_copy_in(emulator::context, target, map.words, column, row, matrix, barrier, blocks);
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
        : "memory");
#endif
}

// target[i] += source[i] for `bytes` / 4 consecutive floats, each addition atomic on its own; read from shared
// memory through the asynchronous proxy at some moment before bulk_wait_read returns.
DEVICE void bulk_add_f32(float* target, SharedAddress source, uint32_t bytes) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(target, "bulk_add_f32");
    emulator::host->bulk_add(emulator::context, target, source, bytes);
#else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(source),
                 "r"(bytes)
                 : "memory");
#endif
}

DEVICE void bulk_commit() {
#if defined(PARITY_EMULATOR)
    emulator::host->bulk_commit(emulator::context);
#else
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most PENDING of this thread's newest bulk groups have still to read shared memory.
template <int PENDING>
DEVICE void bulk_wait_read() {
#if defined(PARITY_EMULATOR)
    emulator::host->bulk_wait(emulator::context, PENDING);
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#endif
}

// Waits until at most PENDING of this thread's newest bulk groups are not complete.
template <int PENDING>
DEVICE void bulk_wait() {
#if defined(PARITY_EMULATOR)
    emulator::host->bulk_wait(emulator::context, PENDING);
#else
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ---------------------------------------------------------------- registers

// How a block's warpgroups divide the registers of the launch, as many for each thread as its threads can have where a
// multiprocessor holds HELD blocks: GIVING of them go on with FEWER and the TAKING others with MORE, which each says for all of its
// warps. Who takes waits until others have given, and without end where they have not given enough: the emulator has no registers
// to count.
template <int GIVING, int FEWER, int TAKING, int MORE, int HELD = 1>
struct DividedRegisters {
    static constexpr int WARPGROUPS = GIVING + TAKING;
    static constexpr int OF_LAUNCH = minimum(65536 / (WARPGROUPS * WARPGROUP_SIZE * HELD) / 8 * 8, 256);
    static_assert(FEWER % 8 == 0 && MORE % 8 == 0 && FEWER >= 24 && MORE <= 256, "multiples of 8 from 24 to 256");
    static_assert(GIVING * FEWER + TAKING * MORE <= WARPGROUPS * OF_LAUNCH, "who takes registers waits without end");

    static void give() {
#if !defined(PARITY_EMULATOR)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEWER));
#endif
    }
    static void take() {
#if !defined(PARITY_EMULATOR)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MORE));
#endif
    }
};

// ---------------------------------------------------------------- warpgroup matrix products

#if defined(PARITY_EMULATOR)
namespace emulator {
// A descriptor counts in units of 16 bytes: what is left over is lost, and a GPU reads another operand in silence.
inline void require_whole_units(uint32_t bytes) {
    if (bytes % 16) stop({}, "a wgmma descriptor is given a stride or an advance that is no multiple of 16 bytes");
}
}  // namespace emulator
#endif

// `start` and both strides, in bytes, are multiples of 16.
DEVICE uint64_t matrix_descriptor(SharedAddress start, uint32_t block_stride, uint32_t group_stride) {
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(dynamic_shared() + start, 16, "matrix_descriptor");
    emulator::require_whole_units(block_stride | group_stride);
#endif
    constexpr uint64_t SWIZZLE_128 = 1ull << 62;
    const uint64_t address = (start & 0x3ffffu) >> 4, block = block_stride >> 4, group = group_stride >> 4;
    return SWIZZLE_128 | group << 32 | block << 16 | address;
}

// The same operand, `bytes` further on, a multiple of 16.
DEVICE uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
#if defined(PARITY_EMULATOR)
    emulator::require_whole_units(bytes);
#endif
    return descriptor + (bytes >> 4);
}

#if defined(PARITY_EMULATOR)
namespace emulator {

constexpr int WGMMA_WARPS = 4;       // of a warpgroup
constexpr int WGMMA_ROWS = 16;       // that one warp computes
constexpr int WGMMA_K = 16;
constexpr uint32_t POISON = ~0u;     // a NaN

// An operand in shared memory, as its descriptor says.
struct Operand {
    uint32_t start, block_stride, group_stride;
    bool transposed;

    EMULATOR_INLINE Operand(uint64_t descriptor, bool transposed)
        : start((descriptor & 0x3fff) << 4),
          block_stride((descriptor >> 16 & 0x3fff) << 4),
          group_stride((descriptor >> 32 & 0x3fff) << 4),
          transposed(transposed) {}

    // Where the 16 bytes begin that hold 8 elements from (mn, k) on, along the direction that is
    // contiguous; that one of mn and k is a multiple of 8.
    EMULATOR_INLINE uint32_t chunk(uint32_t mn, uint32_t k) const {
        const uint32_t linear = transposed
            ? start + mn % 64 * 2 + mn / 64 * block_stride + k % 8 * 128 + k / 8 * group_stride
            : start + mn % 8 * 128 + mn / 8 * group_stride + k * 2;
        return linear ^ (linear >> 7 & 7) << 4;
    }
    // End of the last row of 128 bytes that `extent` elements of m or n reach.
    uint64_t end(uint32_t extent) const {
        const uint64_t blocks = transposed ? (extent - 1) / 64 : 0, groups = transposed ? 1 : (extent - 1) / 8;
        const uint64_t last = start + blocks * block_stride + groups * group_stride + 7 * 128;
        return last / 128 * 128 + 128;
    }
};

// Why a descriptor cannot be used, or null.
inline const char* descriptor_fault(uint64_t descriptor, bool transposed, uint32_t extent) {
    if (descriptor >> 62 != 1) return "a wgmma descriptor asks for another swizzle than that of 128 bytes";
    if (descriptor >> 49 & 7) return "a wgmma descriptor has a base offset other than 0";
    if (Operand(descriptor, transposed).end(extent) > context->dynamic_shared_bytes)
        return "an operand of a wgmma reaches beyond the dynamic shared memory";
    return nullptr;
}

// elements[i] is element i of the 16 bytes at `offset`.
EMULATOR_INLINE void read_bf16(const AsyncReads& reads, uint32_t offset, float (&elements)[8]) {
    uint32_t pairs[4];
    reads.chunk(offset, pairs);
    for (int i = 0; i < 8; ++i) elements[i] = bf16_half(pairs[i / 2], i % 2);
}

// Calls put(mn, k, element) for EXTENT elements of m or n, of which `first` is number 0, and all k.
template <int EXTENT, typename Put>
EMULATOR_INLINE void read_operand(const AsyncReads& reads, const Operand& operand, int first, Put put) {
    float elements[8];
    if (operand.transposed) {
        for (int k = 0; k < WGMMA_K; ++k)
            for (int mn = 0; mn < EXTENT; mn += 8) {
                read_bf16(reads, operand.chunk(first + mn, k), elements);
                for (int i = 0; i < 8; ++i) put(mn + i, k, elements[i]);
            }
    } else {
        for (int mn = 0; mn < EXTENT; ++mn)
            for (int k = 0; k < WGMMA_K; k += 8) {
                read_bf16(reads, operand.chunk(first + mn, k), elements);
                for (int i = 0; i < 8; ++i) put(mn, k + i, elements[i]);
            }
    }
}

// Calls visit(lane's accumulator, its place in values [16, COLUMNS]) for all of them.
template <int COLUMNS, typename Visit>
EMULATOR_INLINE void each_accumulator(const WarpProduct& product, Visit visit) {
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int n = 0; n < COLUMNS / 8; ++n)
            for (int i = 0; i < 4; ++i)
                visit(product.accumulators[lane][4 * n + i], (g + 8 * (i >> 1)) * COLUMNS + 8 * n + 2 * t + (i & 1));
    }
}

template <int COLUMNS>
UNWATCHED inline void wgmma_capture(const WarpProduct* product, float* values) {
    each_accumulator<COLUMNS>(*product, [&](float& accumulator, int place) EMULATOR_LAMBDA {
        values[place] = accumulator;
        accumulator = __uint_as_float(POISON);
    });
}

template <int COLUMNS>
UNWATCHED inline uint32_t wgmma_deliver(const WarpProduct* product, const float* values) {
    uint32_t touched = 0;
    each_accumulator<COLUMNS>(*product, [&](float& accumulator, int place) EMULATOR_LAMBDA {
        touched |= __float_as_uint(accumulator) != POISON;
        accumulator = values[place];
    });
    return touched;
}

// values = A B or values += A B, as block_sum adds.
template <int COLUMNS>
WIDE_VECTORS inline void wgmma_multiply(const WarpProduct* product, const AsyncReads* reads, float* values) {
    Scaled a[WGMMA_ROWS][WGMMA_K];
    bool finite = true;
    const auto seen = [&](float x) EMULATOR_LAMBDA { finite &= is_finite(x); return x; };
    if (product->a_in_registers) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int half = 0; half < 2; ++half)
                    a[lane / 4 + 8 * (i & 1)][lane % 4 * 2 + half + 8 * (i >> 1)].set(
                        seen(bf16_half(product->a_registers[lane][i], half)));
    } else {
        const Operand operand(product->a_descriptor, product->a_transposed);
        read_operand<WGMMA_ROWS>(*reads, operand, WGMMA_ROWS * product->warp, [&](int m, int k, float x) EMULATOR_LAMBDA { a[m][k].set(seen(x)); });
    }
    const bool finite_rows = finite;
    const Operand operand(product->b_descriptor, product->b_transposed);
    for (int first = 0; first < COLUMNS; first += 8) {
        ScaledColumns b[WGMMA_K];
        finite = finite_rows;
        read_operand<8>(*reads, operand, first, [&](int n, int k, float x) EMULATOR_LAMBDA { b[k].set(n, seen(x)); });
        for (int m = 0; m < WGMMA_ROWS; ++m) {
            float* row = values + m * COLUMNS + first;
            if (!product->accumulate) std::memset(row, 0, 8 * sizeof(float));
            block_sum(a[m], b, finite, row);
        }
    }
}

// The exponent of a number of e4m3, as scale_of has it: that of the smallest normal one where it is subnormal.
UNWATCHED inline float scale_of_e4m3(float x) {
    const float scale = scale_of(x);
    return scale > 0 && scale < 0x1p-6f ? 0x1p-6f : scale;
}

// Products of e4m3 numbers that Hopper adds in one step, 2^bits that they keep below the exponent of the largest term, and the
// fraction bits of a sum.
constexpr int E4M3_TERMS = 32;
constexpr double E4M3_ALIGNED = 1 << 13;
constexpr int E4M3_FRACTION_BITS = 13;

// x with so many bits below its leading one, towards zero.
UNWATCHED inline double cut_to_fraction(double x, int bits) {
    uint64_t word;
    std::memcpy(&word, &x, sizeof(word));
    word &= ~((1ull << (52 - bits)) - 1);
    std::memcpy(&x, &word, sizeof(word));
    return x;
}

// As block_sum, of e4m3 numbers by wgmma: terms are cut off sooner, and so is their sum.
WIDE_VECTORS OPTIMISED inline void block_sum_e4m3(const Scaled* a, const ScaledColumns* b, bool finite, float* row) {
    Doubles c, largest;
    for (int n = 0; n < 8; ++n) c[n] = row[n], largest[n] = scale_of(row[n]), finite &= is_finite(row[n]);
    if (!finite) {
        FiniteTerms<E4M3_TERMS> terms;
        terms.take(a, b, row);
        block_sum_e4m3(terms.a, terms.b, true, terms.row);
        return terms.give(row);
    }
    for (int k = 0; k < E4M3_TERMS; ++k) {
        const Doubles scale = a[k].scale * b[k].scale;
        largest = largest > scale ? largest : scale;
    }
    // A block of zeros has no exponent: any will do.
    largest = largest > 0 ? largest : largest + 1;
    const Doubles finest = largest * (1 / E4M3_ALIGNED), steps = 1 / finest;
    // In units of the finest bit no term reaches 2^16.
    Doubles sum = __builtin_convertvector(__builtin_convertvector(c * steps, Words), Doubles);
    for (int k = 0; k < E4M3_TERMS; ++k)
        sum += __builtin_convertvector(__builtin_convertvector(a[k].value * steps * b[k].value, Words), Doubles);
    Doubles done = sum * finest;
    for (int n = 0; n < 8; ++n) done[n] = cut_to_fraction(done[n], E4M3_FRACTION_BITS);
    toward_zero(done, row);
}

// Calls put(mn, k, element) for EXTENT elements of m or n, of which `first` is number 0, and all 32 k of an operand of e4m3.
template <int EXTENT, typename Put>
EMULATOR_INLINE void read_operand_e4m3(const AsyncReads& reads, const Operand& operand, int first, Put put) {
    for (int mn = 0; mn < EXTENT; ++mn)
        for (int k = 0; k < E4M3_TERMS; k += 16) {
            uint32_t words[4];
            // Two codes take the place of a number of bf16.
            reads.chunk(operand.chunk(first + mn, k / 2), words);
            for (int i = 0; i < 16; ++i)
                put(mn, k + i, to_float(fp8_e4m3{static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4))}));
        }
}

// values = A B or values += A B, as block_sum_e4m3 adds.
template <int COLUMNS>
WIDE_VECTORS inline void wgmma_multiply_e4m3(const WarpProduct* product, const AsyncReads* reads, float* values) {
    Scaled a[WGMMA_ROWS][E4M3_TERMS];
    bool finite_rows = true;
    const Operand rows(product->a_descriptor, false), columns(product->b_descriptor, false);
    const auto put = [&](int m, int k, float x) EMULATOR_LAMBDA {
        a[m][k].value = x, a[m][k].scale = scale_of_e4m3(x), finite_rows &= is_finite(x);
    };
    if (product->a_in_registers) {
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i)
                for (int byte = 0; byte < 4; ++byte)
                    put(lane / 4 + 8 * (i & 1), lane % 4 * 4 + byte + 16 * (i >> 1),
                        to_float(fp8_e4m3{static_cast<uint8_t>(product->a_registers[lane][i] >> 8 * byte)}));
    } else {
        read_operand_e4m3<WGMMA_ROWS>(*reads, rows, WGMMA_ROWS * product->warp, put);
    }
    for (int first = 0; first < COLUMNS; first += 8) {
        ScaledColumns b[E4M3_TERMS];
        bool finite = finite_rows;
        read_operand_e4m3<8>(*reads, columns, first, [&](int n, int k, float x) EMULATOR_LAMBDA {
            b[k].value[n] = x, b[k].scale[n] = scale_of_e4m3(x), finite &= is_finite(x);
        });
        for (int m = 0; m < WGMMA_ROWS; ++m) {
            float* row = values + m * COLUMNS + first;
            if (!product->accumulate) std::memset(row, 0, 8 * sizeof(float));
            block_sum_e4m3(a[m], b, finite, row);
        }
    }
}

struct WgmmaPayload {
    float* accumulators;
    uint32_t a[4];
    uint64_t a_descriptor, b_descriptor;
    uint32_t accumulate;
};

template <int COLUMNS, bool A_IN_REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED, bool OF_E4M3 = false>
UNWATCHED inline void wgmma_op(void* const* payloads, uint32_t) {
    const auto& first = *static_cast<const WgmmaPayload*>(payloads[0]);
    WarpProduct product{first.a_descriptor, first.b_descriptor, COLUMNS, context->warp % WGMMA_WARPS, A_IN_REGISTERS,
                        A_TRANSPOSED, B_TRANSPOSED, first.accumulate, {}, {}, wgmma_capture<COLUMNS>,
                        OF_E4M3 ? wgmma_multiply_e4m3<COLUMNS> : wgmma_multiply<COLUMNS>, wgmma_deliver<COLUMNS>};
    for (int lane = 0; lane < 32; ++lane) {
        const auto& payload = *static_cast<const WgmmaPayload*>(payloads[lane]);
        if (payload.a_descriptor != first.a_descriptor || payload.b_descriptor != first.b_descriptor ||
            payload.accumulate != first.accumulate)
            return host->fail(context, "the lanes of a warp disagree about a wgmma's descriptors or accumulation");
        product.accumulators[lane] = payload.accumulators;
        std::memcpy(product.a_registers[lane], payload.a, sizeof(payload.a));
    }
    const char* fault = descriptor_fault(first.b_descriptor, B_TRANSPOSED, COLUMNS);
    if (!A_IN_REGISTERS && !fault) fault = descriptor_fault(first.a_descriptor, A_TRANSPOSED, WGMMA_ROWS * WGMMA_WARPS);
    if (fault) return host->fail(context, fault);
    host->wgmma_issue(context, &product);
}

template <int COLUMNS, bool A_TRANSPOSED, bool B_TRANSPOSED>
inline void wgmma_shared(float* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {}, a, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, false, A_TRANSPOSED, B_TRANSPOSED>, payload);
}

template <int COLUMNS, bool B_TRANSPOSED>
inline void wgmma_registers(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, true, false, B_TRANSPOSED>, payload);
}

template <int COLUMNS>
inline void wgmma_shared_e4m3(float* d, uint64_t a, uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {}, a, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, false, false, false, true>, payload);
}

template <int COLUMNS>
inline void wgmma_registers_e4m3(float* d, const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    WgmmaPayload payload{d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate};
    collective(FULL_WARP, "wgmma", wgmma_op<COLUMNS, true, false, false, true>, payload);
}

template <int PENDING>
inline void wgmma_wait_op(void* const*, uint32_t) { host->wgmma_wait(context, PENDING); }

template <int PENDING>
inline void wgmma_wait() {
    SyncPayload payload;
    collective(FULL_WARP, "wgmma_wait", wgmma_wait_op<PENDING>, payload);
}

}  // namespace emulator
#endif

// Before a warpgroup's first wgmma, and after accumulators or A fragments were touched by other instructions.
DEVICE void wgmma_fence() {
#if defined(PARITY_EMULATOR)
    emulator::host->wgmma_fence(emulator::context);
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

DEVICE void wgmma_commit() {
#if defined(PARITY_EMULATOR)
    emulator::host->wgmma_commit(emulator::context);
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most PENDING of the warpgroup's newest groups are under way.
template <int PENDING>
DEVICE void wgmma_wait() {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_wait<PENDING>();
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Keeps the compiler from moving uses of these registers across this point: it does not know that a wgmma
// under way still writes them.
template <int N8>
DEVICE void wgmma_hold(float (&d)[N8][4]) {
#if !defined(PARITY_EMULATOR)
    UNROLL
    for (int n = 0; n < N8; ++n)
        UNROLL
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
#endif
}

// The same of pairs of bf16 that are made of accumulators: what follows needs their registers, and is not begun before.
template <int N8>
DEVICE void hold_pairs(uint32_t (&pairs)[N8][2]) {
#if !defined(PARITY_EMULATOR)
    UNROLL
    for (int n = 0; n < N8; ++n) asm volatile("" : "+r"(pairs[n][0]), "+r"(pairs[n][1])::"memory");
#endif
}

// d = A B, or d += A B where `accumulate`: 64 x 8N, 16 deep, bf16 operands, fp32 accumulators.
// wgmma_shared takes both operands from shared memory, wgmma_registers its A from registers.

template <bool B_TRANSPOSED>
DEVICE void wgmma_registers(float (&d)[3][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers<24, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
        "}, {%12, %13, %14, %15}, %16, accumulate, 1, 1, %18;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void wgmma_shared(float (&d)[4][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared<32, A_TRANSPOSED, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, accumulate, 1, 1, %19, %20;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_TRANSPOSED)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void wgmma_shared(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared<64, A_TRANSPOSED, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, accumulate, 1, 1, %35, %36;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_TRANSPOSED)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool B_TRANSPOSED>
DEVICE void wgmma_registers(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers<64, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool B_TRANSPOSED>
DEVICE void wgmma_registers(float (&d)[9][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers<72, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35"
        "}, {%36, %37, %38, %39}, %40, accumulate, 1, 1, %42;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void wgmma_shared(float (&d)[9][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared<72, A_TRANSPOSED, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35"
        "}, %36, %37, accumulate, 1, 1, %39, %40;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_TRANSPOSED)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void wgmma_shared(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared<128, A_TRANSPOSED, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, accumulate, 1, 1, %67, %68;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_TRANSPOSED)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool B_TRANSPOSED>
DEVICE void wgmma_registers(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers<128, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, %70;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool A_TRANSPOSED, bool B_TRANSPOSED>
DEVICE void wgmma_shared(float (&d)[32][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared<256, A_TRANSPOSED, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, accumulate, 1, 1, %131, %132;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]),
          "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]),
          "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]),
          "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]),
          "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(A_TRANSPOSED)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

template <bool B_TRANSPOSED>
DEVICE void wgmma_registers(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers<256, B_TRANSPOSED>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, {%128, %129, %130, %131}, %132, accumulate, 1, 1, %134;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]),
          "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]),
          "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]),
          "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]),
          "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
          "n"(static_cast<int>(B_TRANSPOSED)));
#endif
}

// The same 32 deep, of e4m3 operands in shared memory. The accumulators are fp32 registers that hold 13 fraction bits: products
// and sums are cut off there (reference/src/tensor_core.rs has the rule).

DEVICE void wgmma_shared_e4m3(float (&d)[1][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared_e4m3<8>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_shared_e4m3(float (&d)[2][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared_e4m3<16>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, %8, %9, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_shared_e4m3(float (&d)[8][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared_e4m3<64>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_shared_e4m3(float (&d)[16][4], uint64_t a, uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_shared_e4m3<128>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

// The same with A from registers.

DEVICE void wgmma_registers_e4m3(float (&d)[1][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers_e4m3<8>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_registers_e4m3(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers_e4m3<16>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_registers_e4m3(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers_e4m3<64>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}

DEVICE void wgmma_registers_e4m3(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
#if defined(PARITY_EMULATOR)
    emulator::wgmma_registers_e4m3<128>(&d[0][0], a, b, accumulate);
#else
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
#endif
}
