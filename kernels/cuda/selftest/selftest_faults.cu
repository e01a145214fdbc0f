// Deliberately incorrect kernels. The emulator must report each of them. A GPU may hang, crash or
// give wrong numbers instead, so none of these is ever launched on one.
//
// Defines: FAULT  one of the names in `enum class Fault`
//
// Launch: one block of 64 threads, x and y of 64 floats, dynamic shared memory as exported.
#include "async_copy.h"
#include "memory.h"
#include "numeric.h"

#ifndef FAULT
#error "define FAULT as one of the names in enum class Fault"
#endif

enum class Fault {
    skipped_barrier,     // half the threads return before the barrier on which the others wait
    parted_barrier,      // half the threads call one __syncthreads, the others another one
    exited_lane,         // a shuffle's mask names lanes that have returned
    foreign_lane,        // a lane calls a shuffle with a mask that does not name it
    read_past_end,       // the last thread reads one element behind x
    unread_past_end,     // the last thread loads a vector behind x, which nobody reads
    unread_streaming,    // the same by the load of what is read once
    write_before_start,  // the first thread writes one element in front of y
    missing_copy_wait,   // shared memory is read while its asynchronous copy may still be on its way
    missing_barrier,     // shared memory is read before the thread that writes it need have run
    unwritten_shared,    // shared memory is read that no thread writes
    unwritten_output,    // every other element of y is left as it was
    past_shared,         // the last thread stores one element behind the dynamic shared memory
    shared_as_global,    // the last thread stores in dynamic shared memory by an instruction that is for global memory
    static_as_global,    // the same in static shared memory
    outside_shared,      // an asynchronous copy aims behind the end of the dynamic shared memory
    endless_loop,        // a thread waits for a value that nobody stores
    endless_exchange,    // the same, with a warp barrier in the loop
};

constexpr Fault CHOSEN = Fault::FAULT;
constexpr int FAULT_THREADS = 64;
SHARED_MEMORY(selftest_fault, FAULT_THREADS * sizeof(float))

struct SelftestFaultParams {
    const float* x;  // [count], 16-byte aligned
    float* y;        // [count]
    int32_t count;   // FAULT_THREADS
};

DEVICE void wrong_synchronization(const SelftestFaultParams& params, int thread) {
    const int lane = thread % WARP_SIZE;
    const float x = params.x[thread];
    if constexpr (CHOSEN == Fault::skipped_barrier) {
        if (thread >= params.count / 2) return;
        __syncthreads();
        params.y[thread] = x;
    } else if constexpr (CHOSEN == Fault::parted_barrier) {
        if (thread < params.count / 2) {
            __syncthreads();
        } else {
            __syncthreads();
        }
        params.y[thread] = x;
    } else if constexpr (CHOSEN == Fault::exited_lane) {
        if (lane >= 16) return;
        params.y[thread] = __shfl_xor_sync(FULL_WARP, x, 1);
    } else if constexpr (CHOSEN == Fault::foreign_lane) {
        params.y[thread] = __shfl_xor_sync(0x0000ffffu, x, 1);
    }
}

DEVICE void wrong_address(const SelftestFaultParams& params, int thread) {
    if constexpr (CHOSEN == Fault::read_past_end) {
        params.y[thread] = params.x[thread] + params.x[thread + 1];
    } else if constexpr (CHOSEN == Fault::unread_past_end) {
        if (thread == params.count - 1) load_vec16_readonly(params.x + params.count);
        params.y[thread] = params.x[thread];
    } else if constexpr (CHOSEN == Fault::unread_streaming) {
        if (thread == params.count - 1) load_vec16_streaming(params.x + params.count);
        params.y[thread] = params.x[thread];
    } else if constexpr (CHOSEN == Fault::write_before_start) {
        params.y[thread - 1] = params.x[thread];
    } else if constexpr (CHOSEN == Fault::unwritten_output) {
        if (thread % 2 == 0) params.y[thread] = params.x[thread];
    }
}

DEVICE void wrong_shared_memory(const SelftestFaultParams& params, int thread) {
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    const bool copier = thread < params.count / 4;
    if constexpr (CHOSEN == Fault::missing_copy_wait) {
        if (copier) copy_async_16(shared_address(shared + 4 * thread), params.x + 4 * thread, true);
        copy_commit();
        __syncthreads();
        params.y[thread] = shared[thread];
    } else if constexpr (CHOSEN == Fault::missing_barrier) {
        shared[thread] = params.x[thread];
        __syncwarp();
        params.y[thread] = shared[params.count - 1 - thread];
    } else if constexpr (CHOSEN == Fault::unwritten_shared) {
        params.y[thread] = shared[thread];
    } else if constexpr (CHOSEN == Fault::past_shared) {
        shared[thread + 1] = params.x[thread];
        __syncthreads();
        params.y[thread] = shared[thread];
    } else if constexpr (CHOSEN == Fault::shared_as_global) {
        if (thread == params.count - 1) store_vec16_global(shared, Vec16{});
        params.y[thread] = params.x[thread];
    } else if constexpr (CHOSEN == Fault::static_as_global) {
        __shared__ Vec16 kept;
        if (thread == params.count - 1) store_vec16_global(&kept, Vec16{});
        params.y[thread] = params.x[thread];
    } else if constexpr (CHOSEN == Fault::outside_shared) {
        copy_async_16(shared_address(shared + 4 * thread), params.x, true);
        copy_commit();
        copy_wait<0>();
        params.y[thread] = params.x[thread];
    }
}

DEVICE void endless(const SelftestFaultParams& params, int thread) {
    const volatile float* flag = params.y;
    params.y[thread] = 0.0f;
    __syncthreads();
    while (*flag != 1.0f) {
        if constexpr (CHOSEN == Fault::endless_exchange) __syncwarp();
    }
}

KERNEL(selftest_fault, SelftestFaultParams, FAULT_THREADS) {
    const int thread = threadIdx.x;
    wrong_synchronization(params, thread);
    wrong_address(params, thread);
    wrong_shared_memory(params, thread);
    if constexpr (CHOSEN == Fault::endless_loop || CHOSEN == Fault::endless_exchange) endless(params, thread);
}
