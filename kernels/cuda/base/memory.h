// Memory accesses by name: 16-byte vectors, cache hints, vector atomics, shared addresses.
#pragma once

#include "platform.h"

// 16 bytes that move as one access. Addresses must be 16-byte aligned.
struct alignas(16) Vec16 {
    uint32_t w[4];
};

DEVICE Vec16 load_vec16(const void* source) { return *static_cast<const Vec16*>(source); }

// From global memory that nothing writes while the kernel runs (the read-only path).
DEVICE Vec16 load_vec16_readonly(const void* source) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(source, "load_vec16_readonly");
    return emulator::loaded(*static_cast<const Vec16*>(source));
#else
    Vec16 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(source));
    return v;
#endif
}

// As load_vec16_readonly, for data that is read once: it does not displace others in the cache.
DEVICE Vec16 load_vec16_streaming(const void* source) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(source, "load_vec16_streaming");
    return emulator::loaded(*static_cast<const Vec16*>(source));
#else
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(source));
    return v;
#endif
}

// Prefetches a line of global memory into L2.
DEVICE void prefetch_second_level(const void* source) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(source, "prefetch_second_level");
#else
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
#endif
}

// Prefetches `bytes` contiguous bytes into L2; the address and `bytes` are multiples of 16.
DEVICE void prefetch_second_level(const void* source, uint32_t bytes) {
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(source, 16, "prefetch_second_level");
    emulator::require_global(source, "prefetch_second_level");
    static_cast<void>(bytes);
#elif PARITY_SM >= 90
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes));
#else
    for (uint32_t at = 0; at < bytes; at += 128) prefetch_second_level(static_cast<const uint8_t*>(source) + at);
#endif
}

// To global or shared memory.
DEVICE void store_vec16(void* target, Vec16 v) {
#if defined(PARITY_EMULATOR)
    const uint64_t offset = static_cast<uint64_t>(static_cast<const uint8_t*>(target) - dynamic_shared());
    if (offset < emulator::context->dynamic_shared_bytes)
        emulator::host->shared_store(emulator::context, static_cast<uint32_t>(offset), 16);
#endif
    *static_cast<Vec16*>(target) = v;
}

// To global memory. In some kernels the compiler turns a struct's plain copy into four stores of 4
// bytes, each of which writes every sector of a warp's 512 bytes.
DEVICE void store_vec16_global(void* target, Vec16 v) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(target, "store_vec16_global");
    *static_cast<Vec16*>(target) = v;
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
#endif
}

// To global memory that this kernel does not read again (evicted first).
DEVICE void store_vec16_streaming(void* target, Vec16 v) {
#if defined(PARITY_EMULATOR)
    emulator::require_global(target, "store_vec16_streaming");
    *static_cast<Vec16*>(target) = v;
#else
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
#endif
}

// Two consecutive floats; `target` must be 8-byte aligned.
DEVICE void store_pair(float* target, float first, float second) {
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(target, 8, "store_pair");
    emulator::require_global(target, "store_pair");
    target[0] = first;
    target[1] = second;
#else
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(first), "f"(second) : "memory");
#endif
}

// target[i] += v[i] for four consecutive floats in global memory, each addition atomic by itself.
// `target` must be 16-byte aligned. One instruction from sm_90 on, four below.
DEVICE void atomic_add_vec4(float* target, float v0, float v1, float v2, float v3) {
#if !defined(PARITY_EMULATOR) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(v0), "f"(v1), "f"(v2),
                 "f"(v3)
                 : "memory");
#else
#if defined(PARITY_EMULATOR)
    emulator::require_aligned(target, 16, "atomic_add_vec4");
    emulator::require_global(target, "atomic_add_vec4");
#endif
    atomicAdd(target, v0);
    atomicAdd(target + 1, v1);
    atomicAdd(target + 2, v2);
    atomicAdd(target + 3, v3);
#endif
}

// An address within the block's dynamic shared memory, in 32 bits: what ldmatrix and cp.async
// take. In the emulator it is the offset from dynamic_shared().
using SharedAddress = uint32_t;

DEVICE SharedAddress shared_address(const void* pointer) {
#if defined(PARITY_EMULATOR)
    return static_cast<SharedAddress>(static_cast<const uint8_t*>(pointer) - dynamic_shared());
#else
    SharedAddress address;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(pointer));
    return address;
#endif
}

// The same address, opaque to the compiler. What is derived from it is computed where it is used,
// instead of before the surrounding loops and kept in registers.
DEVICE SharedAddress recomputed(SharedAddress address) {
#if !defined(PARITY_EMULATOR)
    asm volatile("" : "+r"(address));
#endif
    return address;
}

// A value that the compiler cannot compute again, so a loop that uses it in every round keeps it
// in a register.
DEVICE int kept(int x) {
#if !defined(PARITY_EMULATOR)
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// threadIdx.x, read at the call: neither it nor what is derived from it stays in registers across
// a surrounding loop.
DEVICE uint32_t thread_id_anew() {
#if defined(PARITY_EMULATOR)
    return threadIdx.x;
#else
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#endif
}

// As lane_id() and warp_id(), from a thread index that is read where it is used.
DEVICE int lane_anew() { return static_cast<int>(thread_id_anew() % WARP_SIZE); }
DEVICE int warp_anew() { return static_cast<int>(thread_id_anew() / WARP_SIZE); }

#if defined(PARITY_EMULATOR)
// The host's view of a shared address. An access of `bytes` bytes at once that is misaligned or
// outside the launch's shared memory ends the launch.
DEVICE uint8_t* shared_pointer(SharedAddress address, uint32_t bytes, const char* what) {
    if (static_cast<uint64_t>(address) + bytes > emulator::context->dynamic_shared_bytes)
        emulator::stop({}, "a shared address lies outside the dynamic shared memory");
    emulator::require_aligned(dynamic_shared() + address, bytes, what);
    return dynamic_shared() + address;
}
#endif

// What wgmma and bulk copies (hopper.h) read from shared memory must be written by the stores
// below, by store_vec16, by copy_async_16 or by a bulk copy. If a proxy fence is missing, the
// emulator gives them poison, but it does not see stores through plain pointers.

// Stores 4 bytes to shared memory; the address is 4-byte aligned.
DEVICE void store_shared(SharedAddress address, uint32_t value) {
#if defined(PARITY_EMULATOR)
    std::memcpy(shared_pointer(address, 4, "store_shared"), &value, 4);
    emulator::host->shared_store(emulator::context, address, 4);
#else
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

// Stores 8 bytes to shared memory; the address is 8-byte aligned.
DEVICE void store_shared_vec8(SharedAddress address, uint32_t first, uint32_t second) {
#if defined(PARITY_EMULATOR)
    const uint32_t words[2] = {first, second};
    std::memcpy(shared_pointer(address, 8, "store_shared_vec8"), words, 8);
    emulator::host->shared_store(emulator::context, address, 8);
#else
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
#endif
}

// A word of shared memory; the address is 4-byte aligned. For loads that the compiler must neither
// move nor merge.
DEVICE int32_t load_shared_word(SharedAddress address) {
#if defined(PARITY_EMULATOR)
    return *reinterpret_cast<const int32_t*>(shared_pointer(address, 4, "load_shared_word"));
#else
    int32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
#endif
}

// Stores 16 bytes to shared memory; the address is 16-byte aligned.
DEVICE void store_shared_vec16(SharedAddress address, Vec16 v) {
#if defined(PARITY_EMULATOR)
    std::memcpy(shared_pointer(address, 16, "store_shared_vec16"), &v, 16);
    emulator::host->shared_store(emulator::context, address, 16);
#else
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
#endif
}

// Loads 16 bytes from shared memory; the address is 16-byte aligned.
DEVICE Vec16 load_shared_vec16(SharedAddress address) {
    Vec16 v;
#if defined(PARITY_EMULATOR)
    std::memcpy(&v, shared_pointer(address, 16, "load_shared_vec16"), 16);
#else
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "r"(address)
                 : "memory");
#endif
    return v;
}
