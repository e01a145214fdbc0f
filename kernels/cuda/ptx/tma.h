// Bulk copies by TMA: into shared memory, to one block or to several of a cluster, and additions
// to global memory.
#pragma once

#include "memory.h"
#include "tensor_map.h"

// 1-dimensional bulk copy to shared memory; `bytes` is a multiple of 16, both addresses 16-byte
// aligned. The bytes count towards the barrier's expected ones when they land.
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

// TMA load of a box to shared memory: 128 bytes of each of the map's `box_rows` rows, from these
// coordinates on, in the 128-byte swizzle (wgmma.h). `target` is a multiple of 1024. Bytes outside
// the tensor are 0. All the box's bytes, zeros included, count towards the barrier's expected ones
// when they land.
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

// The same to every block of the cluster whose bit is set in `blocks` (multicast). The box arrives
// at the same offset of each, and its bytes count at each one's mbarrier at offset `barrier`. They
// may arrive before that mbarrier expects them.
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

// target[i] += source[i] for `bytes` / 4 consecutive floats, each addition atomic by itself.
// Shared memory is read through the asynchronous proxy at some moment before bulk_wait_read
// returns.
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

// Waits until at most PENDING of this thread's newest bulk groups still have to read shared
// memory.
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
