// The base of every kernel source: fixed-width types, the KERNEL macro, shared memory.
//
// One source serves two compilers. NVRTC compiles it for a GPU and needs no header of its own. The
// host's C++ compiler builds it with PARITY_EMULATOR defined and finds CUDA's names in emulator.h.
// Kernels have no `asm` and no `#ifdef`: each difference between the two is one named function in
// this folder, with a device body and a host body.
#pragma once

#if defined(PARITY_EMULATOR)
#include "emulator.h"
#define DEVICE static inline
#else
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
using uintptr_t = unsigned long long;
#define DEVICE static __device__ __forceinline__
#endif

constexpr uint32_t WARP_SIZE = 32;
constexpr uint32_t FULL_WARP = 0xffffffffu;

#include "params.h"

// KERNEL(name, Params, max_threads) { ... params.field ... }
//
// Defines the entry point `name`, launched with at most `max_threads` threads a block. Its one
// argument is `const Params& params`. The size of Params and the hash of its layout (params.h) are
// exported next to the kernel, and the launcher rejects values that differ from its own.
//
// KERNEL_OF(name, Params, max_threads, min_blocks) { ... } also limits registers so that an SM
// holds min_blocks blocks at once. It exports that number for a launcher of persistent blocks.
//
// KERNEL_OF_CLUSTERS(name, Params, max_threads, blocks) { ... } is launched in clusters of
// `blocks` blocks, neighbours in x, which access each other's shared memory (hopper.h). Such a
// module has no static shared variables.
// KERNEL_OF_RESIDENT_CLUSTERS(name, Params, max_threads, min_blocks, blocks) { ... } is both.
//
// From Hopper on a kernel may be launched while the one before it in the stream ends. On its first
// line every kernel waits until those before it have ended and their writes are visible.
// `name_waits` reports this to the launcher, which requests the early launch only then, so older
// sources run as they did. The wait is in the macro, so no kernel can forget it.
#if defined(PARITY_EMULATOR)
#define KERNEL_OF(name, Params, max_threads, min_blocks)                                         \
    static void name##_body(const Params& params);                                               \
    extern "C" {                                                                                 \
    __attribute__((visibility("default"))) uint64_t name##_layout[3] = {                         \
        sizeof(Params), layout_hash(static_cast<Params*>(nullptr)), (max_threads)};              \
    __attribute__((visibility("default"))) uint64_t name##_resident_blocks[1] = {(min_blocks)};  \
    }                                                                                            \
    EMULATOR_EXPORT void name##_entry(const void* params) noexcept {                             \
        name##_body(*static_cast<const Params*>(params));                                        \
    }                                                                                            \
    static void name##_body(const Params& params)
#else
#if PARITY_SM >= 90
#define WAITS_FOR_EARLIER_KERNELS(name) extern "C" __device__ uint64_t name##_waits[1] = {1};
DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
#define WAITS_FOR_EARLIER_KERNELS(name)
DEVICE void wait_for_earlier_kernels() {}
#endif
// The threads and blocks that an SM holds. Hopper's hold the most, and kernels are written for them.
#if PARITY_SM == 86 || PARITY_SM == 87
constexpr int SM_THREADS = 1536, SM_BLOCKS = 16;
#elif PARITY_SM == 89 || PARITY_SM >= 120
constexpr int SM_THREADS = 1536, SM_BLOCKS = 24;
#else
constexpr int SM_THREADS = 2048, SM_BLOCKS = 32;
#endif
constexpr int blocks_that_fit(int max_threads, int min_blocks) {
    int most = SM_THREADS / max_threads < SM_BLOCKS ? SM_THREADS / max_threads : SM_BLOCKS;
    return min_blocks < most ? min_blocks : most;
}
#define KERNEL_OF(name, Params, max_threads, min_blocks)                                         \
    extern "C" __device__ uint64_t name##_layout[3] = {                                          \
        sizeof(Params), layout_hash(static_cast<Params*>(nullptr)), (max_threads)};              \
    extern "C" __device__ uint64_t name##_resident_blocks[1] = {                                 \
        blocks_that_fit(max_threads, min_blocks)};                                               \
    WAITS_FOR_EARLIER_KERNELS(name)                                                              \
    DEVICE void name##_body(const Params& params);                                               \
    extern "C" __global__ void __launch_bounds__(                                                \
        max_threads, blocks_that_fit(max_threads, min_blocks))                                   \
        name(const __grid_constant__ Params params) {                                            \
        wait_for_earlier_kernels();                                                              \
        name##_body(params);                                                                     \
    }                                                                                            \
    DEVICE void name##_body(const Params& params)
#endif

#define KERNEL(name, Params, max_threads) KERNEL_OF(name, Params, max_threads, 1)

#if defined(PARITY_EMULATOR)
#define KERNEL_OF_RESIDENT_CLUSTERS(name, Params, max_threads, min_blocks, blocks)               \
    extern "C" {                                                                                 \
    __attribute__((visibility("default"))) uint64_t name##_cluster[1] = {(blocks)};              \
    }                                                                                            \
    KERNEL_OF(name, Params, max_threads, min_blocks)
#else
#define KERNEL_OF_RESIDENT_CLUSTERS(name, Params, max_threads, min_blocks, blocks)               \
    extern "C" __device__ uint64_t name##_cluster[1] = {(blocks)};                               \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) name(const __grid_constant__ Params params); \
    KERNEL_OF(name, Params, max_threads, min_blocks)
#endif

#define KERNEL_OF_CLUSTERS(name, Params, max_threads, blocks) \
    KERNEL_OF_RESIDENT_CLUSTERS(name, Params, max_threads, 1, blocks)

// SHARED_MEMORY(name, bytes)
//
// Exports how much dynamic shared memory a launch of kernel `name` needs; without it a launch gets
// none. The size follows from the defines, and only the source knows the formula.
#if defined(PARITY_EMULATOR)
#define SHARED_MEMORY(name, bytes)                                                               \
    extern "C" {                                                                                 \
    __attribute__((visibility("default"))) uint64_t name##_shared_bytes[1] = {(bytes)};          \
    }
#else
#define SHARED_MEMORY(name, bytes) extern "C" __device__ uint64_t name##_shared_bytes[1] = {(bytes)};
#endif

// OFFSET_OF(Plan, member)
//
// Where a member of a plan of shared memory lies: bytes from its start. A plan is a struct of what
// a kernel keeps there. It is never an object: addresses come from the offsets, since instructions
// take them in 32 bits.
#define OFFSET_OF(Plan, member) static_cast<int>(PARAMS_OFFSET(Plan, member))

// A member of a plan that only some of a kernel's variants have:
//
//     [[no_unique_address]] Where<PRESENT, float[8]> member;
//
// Where it is absent it takes no bytes, and its offset means nothing. (Empty members of one type
// would need different addresses.)
template <typename T>
struct Absent {};
template <bool PRESENT, typename T>
struct MemberWhere {
    using Type = T;
};
template <typename T>
struct MemberWhere<false, T> {
    using Type = Absent<T>;
};
template <bool PRESENT, typename T>
using Where = typename MemberWhere<PRESENT, T>::Type;

// When every block of this launch has called this or ended, the next kernel's blocks may take free
// slots, where they wait for the end of this launch. For kernels that fill the GPU and are
// followed by a small one. If blocks leave SMs idle, those of the next launch crowd there: a
// linear layer of 112 blocks took 42.0 us instead of 38.5 on an H200 when all kernels did this.
#if !defined(PARITY_EMULATOR) && PARITY_SM >= 90
DEVICE void let_next_kernel_come() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void let_next_kernel_come() {}
#endif

// The launch's dynamic shared memory, aligned to 1024 bytes.
#if defined(PARITY_EMULATOR)
DEVICE uint8_t* dynamic_shared() { return emulator::context->dynamic_shared; }
#else
extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
DEVICE uint8_t* dynamic_shared() { return dynamic_shared_memory; }
#endif

// Before a loop: unrolls it fully, or by a factor. Arrays that must stay in registers need it.
#if defined(PARITY_EMULATOR)
#define UNROLL
#define UNROLL_BY(factor)
#else
#define UNROLL_TEXT(text) _Pragma(#text)
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(factor) UNROLL_TEXT(unroll factor)
#endif

template <typename T>
DEVICE constexpr T minimum(T a, T b) { return b < a ? b : a; }
template <typename T>
DEVICE constexpr T maximum(T a, T b) { return a < b ? b : a; }
template <typename T>
DEVICE constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }

// Of a one-dimensional block.
DEVICE int lane_id() { return static_cast<int>(threadIdx.x % WARP_SIZE); }
DEVICE int warp_id() { return static_cast<int>(threadIdx.x / WARP_SIZE); }

// Read from one lane, so that the compiler knows that the warp agrees. Where a warp may diverge,
// the compiler serializes wgmma. After a loop whose lanes are not known to end together, nothing
// is known to be uniform, descriptors included.
DEVICE int32_t uniform(int32_t x) { return __shfl_sync(FULL_WARP, x, 0); }
