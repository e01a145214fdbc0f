// CUDA's execution model for the host's C++ compiler.
//
// A kernel source is built into a shared library with this header in front. Each CUDA thread is a
// coroutine of the runtime (kernels/runtime/src/emulator); whatever makes a thread wait for others
// goes through HostApi, and everything else runs as plain C++.
//
// A collective (shuffle, vote, mma) works in one rendezvous: every lane named in the mask hands in
// a pointer to its own payload, on its own stack; the last lane to arrive runs `op` once over all
// payloads, which writes each lane's result in place; then all lanes go on.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include "functions.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
// One operating-system thread runs one block at a time, so a block's static shared memory is that
// thread's storage. The runtime poisons it before each block (emulator_poison_static_shared). Blocks of a cluster share the
// thread, and have no static shared memory.
#define __shared__ static thread_local
// A function whose accesses to memory nobody is told of (below).
#define UNWATCHED __attribute__((no_sanitize("thread")))
// What becomes a part of such functions, and of others.
#define EMULATOR_INLINE __attribute__((always_inline)) inline
#define EMULATOR_LAMBDA __attribute__((always_inline))

namespace emulator {

struct Dim3 {
    unsigned x, y, z;
};

// Mirrored by `ThreadContext` in kernels/runtime/src/emulator.
struct ThreadContext {
    Dim3 thread_idx, block_idx, block_dim, grid_dim;
    uint32_t lane, warp;
    uint8_t* dynamic_shared;
    uint64_t dynamic_shared_bytes;
    void* scheduler;
    uint32_t watched;  // who asks what this thread accesses: WATCHED_ below
    uint32_t cluster_rank;
};

// Bits of ThreadContext::watched, mirrored in kernels/runtime/src/emulator: accesses to global memory are held against those of
// other blocks; all accesses are held against those of other threads.
constexpr uint32_t WATCHED_BETWEEN_BLOCKS = 1, WATCHED_BETWEEN_THREADS = 2;

// What an access to memory does; mirrored by `AccessKind` in kernels/runtime/src/emulator.
enum class AccessKind : uint32_t { read, write, atomic };

using CollectiveOp = void (*)(void* const* payloads, uint32_t mask);

// What a read of shared memory through the asynchronous proxy sees; mirrored by `AsyncReads` in
// kernels/runtime/src/emulator, which says when an ordinary write is seen.
struct AsyncReads {
    const uint8_t* shared;
    const uint64_t* writes;  // for each 16 bytes: time << 10 | thread of the last ordinary write, or 0
    const uint64_t* fences;  // for each thread
    uint64_t issuer_fence;
    uint64_t* touched;  // a bit for each 16 bytes, set when they are read; or null

    // Copies the aligned 16 bytes at `offset`; bytes of 0xff, NaN in every format, where they are not seen.
    EMULATOR_INLINE void chunk(uint32_t offset, void* target) const {
        if (touched) touched[offset / 1024] |= uint64_t{1} << offset / 16 % 64;
        const uint64_t write = writes ? writes[offset / 16] : 0, time = write >> 10;
        if (write && fences[write & 1023] <= time && issuer_fence <= time)
            std::memset(target, 0xff, 16);
        else
            std::memcpy(target, shared + offset, 16);
    }
};

// One warp's 16 rows of a wgmma; mirrored by `WarpProduct` in kernels/runtime/src/emulator.
struct WarpProduct {
    uint64_t a_descriptor, b_descriptor;
    uint32_t columns;
    uint32_t warp;  // within its warpgroup
    uint32_t a_in_registers, a_transposed, b_transposed, accumulate;
    uint32_t a_registers[32][4];
    float* accumulators[32];
    // Takes the accumulators out of the lanes into `values` [16, columns] and leaves poison there.
    void (*capture)(const WarpProduct*, float* values);
    // Reads the operands; values = A B, or values += A B.
    void (*multiply)(const WarpProduct*, const AsyncReads*, float* values);
    // Puts the accumulators back; other than 0 if the poison was not there any more.
    uint32_t (*deliver)(const WarpProduct*, const float* values);
};

// Where in the source a check failed; mirrored by `Place` in kernels/runtime/src/emulator.
struct Place {
    const char* file;  // or null
    uint32_t line, column;
};

// Mirrored by `HostApi` in kernels/runtime/src/emulator.
struct HostApi {
    void (*collective)(ThreadContext*, uint32_t mask, const char* what, CollectiveOp, void* payload);
    // Waits at barrier `id` (0 to 15) until `count` threads have arrived; `wait` 0 arrives only.
    // Returns how many of the arrived threads had a non-zero `vote`. `place`, or null: where in the source all of them must be.
    uint32_t (*barrier)(ThreadContext*, uint32_t id, uint32_t count, uint32_t wait, uint32_t vote, const char* place);
    // Copies `source_bytes` from `source` and zeroes the rest of `bytes`, at some moment before the wait.
    void (*copy_async)(ThreadContext*, void* target, const void* source, uint32_t bytes, uint32_t source_bytes);
    void (*copy_commit)(ThreadContext*);
    // Returns once at most `pending` committed groups of this thread have not landed.
    void (*copy_wait)(ThreadContext*, uint32_t pending);
    // Arrives at the mbarrier once all copies that this thread has issued have landed.
    void (*copy_arrive)(ThreadContext*, uint32_t barrier);
    // Ends the launch with an error that names kernel, block and thread. `fail` returns, as the operation of a
    // collective must; the two below it do not.
    void (*fail)(ThreadContext*, const char* message);
    void (*stop)(ThreadContext*, const Place*, const char* message);
    // `what` accesses `bytes` bytes at once at an address that is no multiple of them.
    void (*misaligned)(ThreadContext*, const Place*, const void* address, uint32_t bytes, const char* what);
    // This thread accesses these bytes of global or shared memory. `code`: an address of the code that does, or null.
    void (*accessed)(ThreadContext*, const void* address, uint64_t bytes, AccessKind, const void* code);
    // Offsets here and below are from the start of the dynamic shared memory. This thread stores these bytes.
    void (*shared_store)(ThreadContext*, uint32_t offset, uint32_t bytes);
    void (*fence_async_proxy)(ThreadContext*);
    void (*mbarrier_init)(ThreadContext*, uint32_t barrier, uint32_t arrivals);
    // Arrives, and makes the phase wait for `bytes` more.
    void (*mbarrier_arrive)(ThreadContext*, uint32_t barrier, uint32_t bytes);
    void (*mbarrier_wait)(ThreadContext*, uint32_t barrier, uint32_t parity, const void* code);
    // Copies at some moment, and then counts the bytes at the mbarrier.
    void (*bulk_copy_in)(ThreadContext*, uint32_t target, const uint8_t* source, uint32_t bytes, uint32_t barrier);
    // Adds at some moment before the wait.
    void (*bulk_add)(ThreadContext*, float* target, uint32_t source, uint32_t bytes);
    void (*bulk_commit)(ThreadContext*);
    void (*bulk_wait)(ThreadContext*, uint32_t pending);
    // Called by one lane for its warp, in a collective.
    void (*wgmma_issue)(ThreadContext*, const WarpProduct*);
    // Called by every lane.
    void (*wgmma_fence)(ThreadContext*);
    void (*wgmma_commit)(ThreadContext*);
    // Called by one lane for its warp, in a collective: returns once at most `pending` groups are in flight.
    void (*wgmma_wait)(ThreadContext*, uint32_t pending);
    // Copies a box of the tensor that `map`, 16 words, describes, and then counts its bytes at the mbarrier, in each block of
    // the cluster whose bit is set in `blocks`.
    void (*tensor_copy_in)(ThreadContext*, uint32_t target, const uint64_t* map, int32_t column, int32_t row,
                           int32_t matrix, uint32_t barrier, uint32_t blocks);
    // Arrives at the mbarrier of block `rank` of the cluster.
    void (*mbarrier_arrive_at)(ThreadContext*, uint32_t barrier, uint32_t rank);
    // Stores 4 bytes in block `rank` of the cluster, and counts them at its mbarrier.
    void (*store_at)(ThreadContext*, uint32_t target, uint32_t value, uint32_t barrier, uint32_t rank);
    // Arrives at the cluster's barrier, or waits there for all threads of the cluster that have not returned.
    void (*cluster_barrier)(ThreadContext*, uint32_t wait);
    // The lanes of the mask meet in a __syncwarp; called by one of them, in a collective.
    void (*warp_sync)(ThreadContext*, uint32_t mask);
    void (*fence_mbarrier_init)(ThreadContext*);
};

inline const HostApi* host = nullptr;
// The thread that runs now; the runtime sets it at every switch. Not __shared__, though it lives
// in the same storage: the poison leaves it out.
inline thread_local ThreadContext* context = nullptr;

template <typename Payload>
inline void collective(uint32_t mask, const char* what, void (*op)(void* const*, uint32_t), Payload& payload) {
    host->collective(context, mask, what, op, &payload);
}

[[noreturn]] inline void stop(const Place& place, const char* message) {
    host->stop(context, &place, message);
    __builtin_unreachable();
}

// A GPU faults on an access of several bytes at an address that is no multiple of them. The compiler checks this where
// a pointer is dereferenced (below); what goes by another way asks here.
inline void require_aligned(const void* address, uint32_t bytes, const char* what) {
    const Place unknown{};
    if (reinterpret_cast<uintptr_t>(address) % bytes) host->misaligned(context, &unknown, address, bytes, what);
}

// What a load has given, which a GPU makes whether or not anybody reads it, and faults where it may not: the compiler must not leave
// it out.
template <class T>
inline T loaded(const T& source) {
    const T value = source;
    asm volatile("" : : "m"(value));
    return value;
}

}  // namespace emulator

// The library is built with hidden visibility, so that two modules never share a variable; what
// the runtime looks up is exported by name.
#define EMULATOR_EXPORT extern "C" __attribute__((used, visibility("default")))

EMULATOR_EXPORT UNWATCHED void emulator_attach(const emulator::HostApi* api) { emulator::host = api; }
EMULATOR_EXPORT UNWATCHED void emulator_enter(emulator::ThreadContext* thread) { emulator::context = thread; }

namespace emulator {
// The calling thread's storage of the library that an address lies in.
struct ThreadStorage {
    uintptr_t inside;
    void* start;
    size_t bytes;
};
UNWATCHED inline int find_thread_storage(dl_phdr_info* info, size_t, void* data) {
    auto* storage = static_cast<ThreadStorage*>(data);
    size_t tls_size = 0;
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& segment = info->dlpi_phdr[i];
        if (segment.p_type == PT_TLS) tls_size = segment.p_memsz;
        const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
        if (segment.p_type == PT_LOAD && storage->inside >= start && storage->inside < start + segment.p_memsz)
            here = true;
    }
    if (!here) return 0;
    if (info->dlpi_tls_data) {
        storage->start = info->dlpi_tls_data;
        storage->bytes = tls_size;
    }
    return 1;
}
UNWATCHED inline ThreadStorage thread_storage() {
    // Its address makes the loader allocate the thread's storage, which it has not done before the thread's first block.
    asm volatile("" ::"r"(&context));
    ThreadStorage storage{reinterpret_cast<uintptr_t>(&host), nullptr, 0};
    dl_iterate_phdr(find_thread_storage, &storage);
    return storage;
}
}  // namespace emulator

namespace emulator {
// This thread's, which static shared memory lies in. The poison leaves it out, as it does `context`.
inline thread_local ThreadStorage own_storage{};

// Instructions that a GPU has for global memory alone fault at an address of shared memory, of which a pointer says nothing.
UNWATCHED inline void require_global(const void* address, const char* what) {
    const auto* byte = static_cast<const uint8_t*>(address);
    const auto from = [=](const void* start) { return static_cast<uint64_t>(byte - static_cast<const uint8_t*>(start)); };
    if (from(context->dynamic_shared) >= context->dynamic_shared_bytes && from(own_storage.start) >= own_storage.bytes) return;
    char text[160];
    std::snprintf(text, sizeof text, "%s is for global memory and was given an address of shared memory", what);
    stop({}, text);
}
}  // namespace emulator

#ifdef PARITY_COVERAGE
// Adds how often each line has run to the module's file (kernels/runtime/src/emulator/coverage.rs). The functions are those of
// the compiler's library.
extern "C" void __gcov_dump();
extern "C" void __gcov_reset();
EMULATOR_EXPORT UNWATCHED void emulator_dump_counts() {
    __gcov_dump();
    __gcov_reset();
}
#endif

EMULATOR_EXPORT UNWATCHED void* emulator_thread_storage() { return emulator::thread_storage().start; }
EMULATOR_EXPORT UNWATCHED void emulator_poison_static_shared(uint8_t byte) {
    const emulator::ThreadStorage storage = emulator::thread_storage();
    emulator::ThreadContext* kept = emulator::context;
    std::memset(storage.start, byte, storage.bytes);
    emulator::context = kept;
    emulator::own_storage = storage;
}

// ---------------------------------------------------------------- the compiler's checks

// What code built with -fsanitize=bounds,shift-exponent,alignment calls when a check fails, instead of the compiler's own
// library, which knows nothing of blocks and threads. Layouts and names are that library's.
namespace emulator {
struct CheckedType {
    uint16_t kind;  // 0 for integers
    uint16_t info;  // of an integer: log2 of its bits << 1 | whether it is signed
    char name[1];   // in quotes, longer than this

    long long value(uintptr_t handle) const {
        const unsigned unused = kind == 0 && info >> 1 < 6 ? 64 - (1u << (info >> 1)) : 0;
        const auto shifted = static_cast<unsigned long long>(handle) << unused;
        return info & 1 ? static_cast<long long>(shifted) >> unused : static_cast<long long>(shifted >> unused);
    }
};
struct IndexCheck {
    Place place;
    const CheckedType* array;
    const CheckedType* index;
};
struct ShiftCheck {
    Place place;
    const CheckedType* shifted;
    const CheckedType* by;
};
struct AlignmentCheck {
    Place place;
    const CheckedType* type;
    uint8_t log_alignment;
    uint8_t kind;
};
constexpr int CHECK_TEXT = 256;
}  // namespace emulator

#define EMULATOR_CHECK extern "C" __attribute__((used, noreturn)) void

EMULATOR_CHECK __ubsan_handle_out_of_bounds_abort(void* data, void* index) {
    const auto* check = static_cast<const emulator::IndexCheck*>(data);
    char text[emulator::CHECK_TEXT];
    std::snprintf(text, sizeof text, "index %lld is beyond the end of an array %s",
                  check->index->value(reinterpret_cast<uintptr_t>(index)), check->array->name);
    emulator::stop(check->place, text);
}
EMULATOR_CHECK __ubsan_handle_shift_out_of_bounds_abort(void* data, void*, void* by) {
    const auto* check = static_cast<const emulator::ShiftCheck*>(data);
    char text[emulator::CHECK_TEXT];
    std::snprintf(text, sizeof text, "a shift of %s by %lld: more bits than there are", check->shifted->name,
                  check->by->value(reinterpret_cast<uintptr_t>(by)));
    emulator::stop(check->place, text);
}
EMULATOR_CHECK __ubsan_handle_type_mismatch_v1_abort(void* data, void* address) {
    const auto* check = static_cast<const emulator::AlignmentCheck*>(data);
    const char* const kinds[] = {"load of", "store to", "reference to", "member of"};
    char text[emulator::CHECK_TEXT];
    const char* const kind = check->kind < 4 ? kinds[check->kind] : "access to";
    if (reinterpret_cast<uintptr_t>(address) % (uintptr_t{1} << check->log_alignment) == 0) {
        std::snprintf(text, sizeof text, "%s %s outside of the variable that its pointer points to", kind, check->type->name);
        emulator::stop(check->place, text);
    }
    std::snprintf(text, sizeof text, "%s %s", kind, check->type->name);
    emulator::host->misaligned(emulator::context, &check->place, address, 1u << check->log_alignment, text);
    __builtin_unreachable();
}

// ---------------------------------------------------------------- accesses to memory

// Code built with -fsanitize=thread says what it is about to load and store; names are that library's.
namespace emulator {
// Where buffers of global memory lie (kernels/runtime/src/emulator/memory.rs), and neither stacks nor shared memory.
constexpr uintptr_t GLOBAL_START = uintptr_t{1} << 44, GLOBAL_END = uintptr_t{5} << 44;

// A thread's stack is shorter (kernels/runtime/src/emulator/schedule.rs).
constexpr uintptr_t STACK_BYTES = 1 << 20;

// Tells who asks of an access by the code at `code`.
EMULATOR_INLINE void accessed(const void* address, uint64_t bytes, AccessKind kind, const void* code) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    // Nearly all accesses are to the thread's own stack.
    if (at - reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) < STACK_BYTES) return;
    const uint32_t watched = context->watched;
    if (!watched) return;
    if (at - GLOBAL_START < GLOBAL_END - GLOBAL_START) return host->accessed(context, address, bytes, kind, code);
    if (!(watched & WATCHED_BETWEEN_THREADS)) return;
    const bool is_dynamic = at - reinterpret_cast<uintptr_t>(context->dynamic_shared) < context->dynamic_shared_bytes;
    const bool is_static = at - reinterpret_cast<uintptr_t>(own_storage.start) < own_storage.bytes && address != &context;
    if (is_dynamic || is_static) host->accessed(context, address, bytes, kind, code);
}

// The same for what the compiler does not tell of, from the code that calls this.
UNWATCHED __attribute__((noinline)) inline void accessed_by_caller(const void* address, uint64_t bytes, AccessKind kind) {
    accessed(address, bytes, kind, __builtin_return_address(0));
}

// Waits at an mbarrier, in the code that calls this.
UNWATCHED __attribute__((noinline)) inline void wait_at_mbarrier(uint32_t barrier, uint32_t parity) {
    host->mbarrier_wait(context, barrier, parity, __builtin_return_address(0));
}
}  // namespace emulator

#define EMULATOR_ACCESS extern "C" __attribute__((used)) UNWATCHED void
#define EMULATOR_TELL(NAME, KIND, BYTES)                                                             \
    EMULATOR_ACCESS __tsan_##NAME##BYTES(void* address) {                                            \
        emulator::accessed(address, BYTES, emulator::AccessKind::KIND, __builtin_return_address(0)); \
    }
#define EMULATOR_ACCESSES(BYTES)            \
    EMULATOR_TELL(read, read, BYTES)        \
    EMULATOR_TELL(write, write, BYTES)      \
    EMULATOR_TELL(unaligned_read, read, BYTES) \
    EMULATOR_TELL(unaligned_write, write, BYTES)
EMULATOR_ACCESSES(1)
EMULATOR_ACCESSES(2)
EMULATOR_ACCESSES(4)
EMULATOR_ACCESSES(8)
EMULATOR_ACCESSES(16)
EMULATOR_ACCESS __tsan_read_range(void* address, uint64_t bytes) {
    emulator::accessed(address, bytes, emulator::AccessKind::read, __builtin_return_address(0));
}
EMULATOR_ACCESS __tsan_write_range(void* address, uint64_t bytes) {
    emulator::accessed(address, bytes, emulator::AccessKind::write, __builtin_return_address(0));
}
EMULATOR_ACCESS __tsan_func_entry(void*) {}
EMULATOR_ACCESS __tsan_func_exit() {}
EMULATOR_ACCESS __tsan_init() {}

#define threadIdx (emulator::context->thread_idx)
#define blockIdx (emulator::context->block_idx)
#define blockDim (emulator::context->block_dim)
#define gridDim (emulator::context->grid_dim)

// ---------------------------------------------------------------- barriers

// All threads of a block come to the same one: what is allowed behind a condition is so only where all of them agree. On a GPU it
// mostly works all the same, as a barrier of all threads, until a compiler or compute-sanitizer takes the rule at its word.
namespace emulator {
inline int sync_threads(bool vote, const char* place) {
    const auto& d = blockDim;
    return static_cast<int>(host->barrier(context, 0, d.x * d.y * d.z, 1, vote, place));
}
}  // namespace emulator
#define EMULATOR_TEXT_OF(text) #text
#define EMULATOR_TEXT(text) EMULATOR_TEXT_OF(text)
#if defined(EMULATOR_NAMES_NO_PLACES)
#define EMULATOR_PLACE nullptr
#else
// What follows # tells places of one line apart.
#define EMULATOR_PLACE __FILE__ ":" EMULATOR_TEXT(__LINE__) "#" EMULATOR_TEXT(__COUNTER__)
#endif
#define __syncthreads() static_cast<void>(emulator::sync_threads(false, EMULATOR_PLACE))
#define __syncthreads_count(predicate) emulator::sync_threads((predicate) != 0, EMULATOR_PLACE)
#define __syncthreads_or(predicate) static_cast<int>(emulator::sync_threads((predicate) != 0, EMULATOR_PLACE) != 0)
#define __syncthreads_and(predicate) static_cast<int>(emulator::sync_threads((predicate) == 0, EMULATOR_PLACE) == 0)
UNWATCHED inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() {}

// ---------------------------------------------------------------- warp: shuffles, votes, reductions

namespace emulator {

// CUDA's integer sums wrap around; signed overflow in C++ is undefined.
template <typename T>
inline T wrapping_add(T a, T b) { return a + b; }
inline int wrapping_add(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }
template <typename T>
inline T wrapping_subtract(T a, T b) { return a - b; }
inline int wrapping_subtract(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) - static_cast<unsigned>(b)); }

struct SyncPayload {};
inline void sync_op(void* const*, uint32_t mask) { host->warp_sync(context, mask); }

template <typename T>
struct ShufflePayload {
    T value;
    uint32_t source;  // lane to read, WIDTH bounds applied by the caller
    T result;
};
template <typename T>
inline void shuffle_op(void* const* payloads, uint32_t) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!payloads[lane]) continue;
        auto* mine = static_cast<ShufflePayload<T>*>(payloads[lane]);
        const auto* theirs = static_cast<const ShufflePayload<T>*>(payloads[mine->source]);
        if (!theirs) {
            host->fail(context, "a shuffle reads a lane that its mask does not name");
            return;
        }
        mine->result = theirs->value;
    }
}
template <typename T>
inline T shuffle(uint32_t mask, const char* what, T value, uint32_t source) {
    ShufflePayload<T> payload{value, source & 31u, value};
    collective(mask, what, shuffle_op<T>, payload);
    return payload.result;
}

struct VotePayload {
    uint32_t predicate, ballot;
};
inline void vote_op(void* const* payloads, uint32_t) {
    uint32_t ballot = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (payloads[lane] && static_cast<VotePayload*>(payloads[lane])->predicate) ballot |= 1u << lane;
    for (int lane = 0; lane < 32; ++lane)
        if (payloads[lane]) static_cast<VotePayload*>(payloads[lane])->ballot = ballot;
}

enum class Reduction { add, min, max, bit_and, bit_or, bit_xor };
template <typename T, Reduction R>
inline void reduce_op(void* const* payloads, uint32_t) {
    T total{};
    bool first = true;
    for (int lane = 0; lane < 32; ++lane) {
        if (!payloads[lane]) continue;
        const T value = *static_cast<T*>(payloads[lane]);
        if (first) total = value;
        else if (R == Reduction::add) total = wrapping_add(total, value);
        else if (R == Reduction::min) total = value < total ? value : total;
        else if (R == Reduction::max) total = value > total ? value : total;
        else if (R == Reduction::bit_and) total = total & value;
        else if (R == Reduction::bit_or) total = total | value;
        else total = total ^ value;
        first = false;
    }
    for (int lane = 0; lane < 32; ++lane)
        if (payloads[lane]) *static_cast<T*>(payloads[lane]) = total;
}
template <Reduction R, typename T>
inline T reduce(uint32_t mask, const char* what, T value) {
    collective(mask, what, reduce_op<T, R>, value);
    return value;
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulator::SyncPayload payload;
    emulator::collective(mask, "__syncwarp", emulator::sync_op, payload);
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const uint32_t lane = emulator::context->lane;
    const uint32_t base = lane & ~static_cast<uint32_t>(width - 1);
    return emulator::shuffle(mask, "__shfl_sync", value, base | (static_cast<uint32_t>(source) & (width - 1)));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    const uint32_t lane = emulator::context->lane;
    const uint32_t source = lane ^ static_cast<uint32_t>(lane_mask);
    // Beyond the segment's end a lane reads itself, as the hardware does.
    const bool inside = (source / width) <= (lane / width);
    return emulator::shuffle(mask, "__shfl_xor_sync", value, inside ? source : lane);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const uint32_t lane = emulator::context->lane;
    const bool inside = (lane % width) >= delta;
    return emulator::shuffle(mask, "__shfl_up_sync", value, inside ? lane - delta : lane);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const uint32_t lane = emulator::context->lane;
    const bool inside = (lane % width) + delta < static_cast<uint32_t>(width);
    return emulator::shuffle(mask, "__shfl_down_sync", value, inside ? lane + delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulator::VotePayload payload{predicate != 0, 0};
    emulator::collective(mask, "__ballot_sync", emulator::vote_op, payload);
    return payload.ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::add>(mask, "__reduce_add_sync", v); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::min>(mask, "__reduce_min_sync", v); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::max>(mask, "__reduce_max_sync", v); }
inline int __reduce_add_sync(unsigned mask, int v) { return emulator::reduce<emulator::Reduction::add>(mask, "__reduce_add_sync", v); }
inline int __reduce_min_sync(unsigned mask, int v) { return emulator::reduce<emulator::Reduction::min>(mask, "__reduce_min_sync", v); }
inline int __reduce_max_sync(unsigned mask, int v) { return emulator::reduce<emulator::Reduction::max>(mask, "__reduce_max_sync", v); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::bit_and>(mask, "__reduce_and_sync", v); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::bit_or>(mask, "__reduce_or_sync", v); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return emulator::reduce<emulator::Reduction::bit_xor>(mask, "__reduce_xor_sync", v); }

// ---------------------------------------------------------------- atomics (blocks run on several cores)

namespace emulator {
template <typename T, typename Change>
UNWATCHED inline T exchange_atomically(T* address, Change change) {
    T old;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    for (;;) {
        T next = change(old);
        if (__atomic_compare_exchange(address, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
    }
}

// Inlined, as the functions below, so that the code that tells of the access is the kernel's own.
template <typename T, typename Change>
EMULATOR_INLINE T atomic_update(T* address, Change change) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics are 4 or 8 bytes wide");
    require_aligned(address, sizeof(T), "atomic operation");
    accessed_by_caller(address, sizeof(T), AccessKind::atomic);
    return exchange_atomically(address, change);
}

// Additions of fp32 numbers in global memory take subnormal operands for zeros, and leave zeros of subnormal results, each of its
// own sign (PTX ISA, atom and red); those in shared memory do not.
UNWATCHED inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
template <typename T>
inline T atomic_sum(const T*, T old, T value) { return wrapping_add(old, value); }
template <>
inline float atomic_sum(const float* address, float old, float value) {
    if (reinterpret_cast<uintptr_t>(address) - GLOBAL_START >= GLOBAL_END - GLOBAL_START) return old + value;
    return flushed(flushed(old) + flushed(value));
}
}  // namespace emulator

template <typename T>
EMULATOR_INLINE T atomicAdd(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return emulator::atomic_sum(address, old, value); }); }
template <typename T>
EMULATOR_INLINE T atomicSub(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return emulator::wrapping_subtract(old, value); }); }
template <typename T>
EMULATOR_INLINE T atomicMin(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return value < old ? value : old; }); }
template <typename T>
EMULATOR_INLINE T atomicMax(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return old < value ? value : old; }); }
template <typename T>
EMULATOR_INLINE T atomicAnd(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return old & value; }); }
template <typename T>
EMULATOR_INLINE T atomicOr(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return old | value; }); }
template <typename T>
EMULATOR_INLINE T atomicXor(T* address, T value) { return emulator::atomic_update(address, [=](T old) { return old ^ value; }); }
template <typename T>
EMULATOR_INLINE T atomicExch(T* address, T value) { return emulator::atomic_update(address, [=](T) { return value; }); }
template <typename T>
EMULATOR_INLINE T atomicCAS(T* address, T expected, T value) { return emulator::atomic_update(address, [=](T old) { return old == expected ? value : old; }); }

// ---------------------------------------------------------------- bit casts and integer intrinsics

EMULATOR_INLINE unsigned __float_as_uint(float v) { unsigned r; std::memcpy(&r, &v, 4); return r; }
EMULATOR_INLINE int __float_as_int(float v) { int r; std::memcpy(&r, &v, 4); return r; }
EMULATOR_INLINE float __uint_as_float(unsigned v) { float r; std::memcpy(&r, &v, 4); return r; }
EMULATOR_INLINE float __int_as_float(int v) { float r; std::memcpy(&r, &v, 4); return r; }
// Byte i of the result is byte `selector >> 4 * i & 7` of the eight that a and, above them, b hold. (Bit 3 would copy a sign.)
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
// The upper half of both shifted to the left, by 32 at most.
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift < 32 ? shift : 32) >> 32);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
