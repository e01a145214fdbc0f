//! Races between the threads of a block, as the emulator's deterministic schedule reports them.

use dsv4_runtime::params::Params;
use dsv4_runtime::{Contract, DType, DeviceArena, LaunchConfig, RuntimeError};

use super::emulator::emulator;

/// Statements of a kernel of 64 threads, and words of the race that they have; none for right ones.
/// `t` is the thread, `s` an int array in dynamic shared memory, `bytes` the same as bytes, `held`
/// one of 64 ints in static shared memory, `y` an int array in global memory.
const STATEMENTS: &[(&str, &[&str])] = &[
    // Barriers of the block.
    ("s[t] = t; __syncthreads(); y[t] = s[63 - t];", &[]),
    (
        "s[t] = t; y[t] = s[63 - t];",
        &[
            "stores byte 128 of `dynamic shared memory` at probe.cu:15, which",
            "thread (31, 0, 0) reads at probe.cu:15: nothing orders the two (a race)",
        ],
    ),
    ("s[t] = t; __syncthreads(); const int x = s[63 - t]; s[t] = x;", &["stores", "reads"]),
    ("s[t] = t; __syncthreads(); const int x = s[63 - t]; __syncthreads(); s[t] = x;", &[]),
    // The second turn of a loop needs a barrier that the first does not.
    (
        "for (int i = 0; i < 2; ++i) { s[t] = i; __syncthreads(); y[t] = s[63 - t]; }",
        &["stores", "reads"],
    ),
    (
        "for (int i = 0; i < 2; ++i) { s[t] = i; __syncthreads(); y[t] = s[63 - t]; __syncthreads(); }",
        &[],
    ),
    ("held[t] = t; y[t] = held[63 - t];", &["static shared memory"]),
    ("held[t] = t; __syncthreads(); y[t] = held[63 - t];", &[]),
    // Of some warps, with arrivals that do not wait.
    ("if (t < 32) s[t] = t; named_barrier_sync(1, 64); if (t >= 32) y[t] = s[t - 32];", &[]),
    (
        "if (t < 32) { s[t] = t; named_barrier_arrive(1, 64); } \
         else { named_barrier_sync(1, 64); y[t] = s[t - 32]; }",
        &[],
    ),
    (
        "if (t < 32) { named_barrier_arrive(1, 64); s[t] = t; } \
         else { named_barrier_sync(1, 64); y[t] = s[t - 32]; }",
        &["(a race)"],
    ),
    (
        "if (t >= 32) { s[t] = t; named_barrier_sync(1, 64); } \
         else { named_barrier_arrive(1, 64); y[t] = s[t + 32]; }",
        &["(a race)"],
    ),
    // Of a warp: shuffles, votes and MMAs order no memory.
    ("s[t] = t; __syncwarp(); y[t] = s[t ^ 1];", &[]),
    ("s[t] = t; y[t] = s[t ^ 1];", &["(a race)"]),
    ("s[t] = t; y[t] = __shfl_xor_sync(FULL_WARP, t, 1) + s[t ^ 1];", &["(a race)"]),
    ("s[t] = t; if (__any_sync(FULL_WARP, t)) y[t] = s[t ^ 1];", &["(a race)"]),
    ("s[t] = t; __syncwarp(); y[t] = s[63 - t];", &["(a race)"]),
    ("if (t % 32 < 16) { s[t] = t; __syncwarp(0xffff); y[t] = s[t ^ 1]; }", &[]),
    // Neighbouring bytes, and parts of a word.
    ("bytes[t] = t; __syncwarp(); y[t] = bytes[t];", &[]),
    ("bytes[t] = t; y[t] = bytes[t / 2 * 2];", &["thread"]),
    ("reinterpret_cast<int16_t*>(bytes)[t] = t; y[t] = 0;", &[]),
    ("s[t] = t; bytes[4 * (t ^ 1) + 3] = 1;", &["stores"]),
    // The same value from several threads.
    ("s[0] = 7; __syncthreads(); y[t] = s[0];", &[]),
    ("s[0] = t; __syncthreads(); y[t] = s[0];", &["stores", "stores"]),
    // Atomics.
    ("if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(s, 1); __syncthreads(); y[t] = s[0];", &[]),
    ("if (t == 0) s[0] = 0; __syncthreads(); atomicAdd(s, 1); y[t] = s[0];", &["updates"]),
    ("if (t == 0) s[0] = 0; atomicAdd(s, 1);", &["updates"]),
    // Global memory within a block.
    ("y[t] = t; __syncthreads(); s[t] = y[63 - t];", &[]),
    ("y[t] = t; s[t] = y[63 - t];", &["of `y`", "(a race)"]),
    ("atomicAdd(y, 1);", &[]),
    ("y[0] += 1;", &["of `y`"]),
    // Wide accesses, and the named functions.
    (
        "store_shared(4 * t, 1); __syncthreads(); if (t < 16) y[t] = load_shared_vec16(16 * t).w[3];",
        &[],
    ),
    (
        "store_shared(4 * t, 1); if (t < 16) y[t] = load_shared_vec16(16 * t).w[3];",
        &["stores byte 4", "reads at "],
    ),
    (
        "s[t] = 0; s[t + 64] = 0; __syncwarp(); uint32_t d[4]; ldmatrix_x4(d, 16 * (t % 32)); y[t] = d[0];",
        &["reads"],
    ),
    (
        "s[t] = 0; s[t + 64] = 0; __syncthreads(); uint32_t d[4]; ldmatrix_x4(d, 16 * (t % 32)); y[t] = d[0];",
        &[],
    ),
    // Asynchronous copies of threads.
    (
        "if (t < 16) copy_async_16(16 * t, y + 4 * t, true); copy_commit(); copy_wait<0>(); __syncthreads(); y[t] = s[63 - t];",
        &[],
    ),
    (
        "if (t < 16) copy_async_16(16 * t, y + 4 * t, true); copy_commit(); __syncthreads(); \
         copy_wait<0>(); s[64 + t] = s[63 - t];",
        &["(a race)"],
    ),
    (
        "s[t] = 1; __syncwarp(); if (t < 16) copy_async_16(16 * t, y + 4 * t, true); copy_commit(); copy_wait<0>();",
        &["(a race)"],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 16); fence_mbarrier_init(); } __syncthreads(); \
         if (t < 16) { copy_async_16(16 * t, y + 4 * t, true); copy_arrive(1024); } \
         else { mbarrier_wait(1024, 0); s[64 + t] = s[63 - t]; }",
        &[],
    ),
    // mbarriers.
    (
        "if (t == 0) { mbarrier_init(1024, 32); fence_mbarrier_init(); } __syncthreads(); \
         if (t < 32) { s[t] = t; mbarrier_arrive(1024); } else { mbarrier_wait(1024, 0); y[t] = s[t - 32]; }",
        &[],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 32); fence_mbarrier_init(); } __syncthreads(); \
         if (t < 32) { mbarrier_arrive(1024); s[t] = t; } else { mbarrier_wait(1024, 0); y[t] = s[t - 32]; }",
        &["(a race)"],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 64); fence_mbarrier_init(); } mbarrier_arrive(1024);",
        &["byte 1024", "thread (0, 0, 0) stores"],
    ),
    // Bulk copies.
    (
        "if (t == 0) { mbarrier_init(1024, 1); fence_mbarrier_init(); } __syncthreads(); \
         if (t == 0) { mbarrier_arrive_expect(1024, 256); bulk_copy_in(0, y, 256, 1024); } \
         mbarrier_wait(1024, 0); s[64 + t] = s[t];",
        &[],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 1); fence_mbarrier_init(); } __syncthreads(); \
         if (t == 0) { mbarrier_arrive_expect(1024, 256); bulk_copy_in(0, y, 256, 1024); } \
         s[64 + t] = s[t]; mbarrier_wait(1024, 0);",
        &["stores byte 252", "thread (63, 0, 0) reads"],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 1); fence_mbarrier_init(); } s[t] = 1; __syncthreads(); \
         if (t == 0) { mbarrier_arrive_expect(1024, 256); bulk_copy_in(0, y, 256, 1024); } \
         mbarrier_wait(1024, 0); s[64 + t] = s[t]; s[63 - t] = 2;",
        &["stores", "reads"],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 1); fence_mbarrier_init(); } __syncthreads(); y[t] = s[t + 128]; \
         if (t == 0) { mbarrier_arrive_expect(1024, 256); bulk_copy_in(512, y + 64, 256, 1024); } \
         mbarrier_wait(1024, 0);",
        &["reads", "(a race)"],
    ),
    (
        "if (t == 0) { mbarrier_init(1024, 1); } __syncthreads(); \
         if (t == 0) { mbarrier_arrive_expect(1024, 256); bulk_copy_in(0, y, 256, 1024); } mbarrier_wait(1024, 0);",
        &["no fence_mbarrier_init"],
    ),
];

fn source() -> String {
    let cases: String = (0..)
        .zip(STATEMENTS)
        .map(|(number, (statement, _))| format!("case {number}: {{ {statement} break; }}\n"))
        .collect();
    format!(
        r#"#include "hopper.h"
        #include "mma.h"
        struct ProbeParams {{ int32_t* y; int32_t count; }};
        PARAMS_LAYOUT(ProbeParams, y, count)
        SHARED_MEMORY(probe, 2048)
        KERNEL(probe, ProbeParams, 64) {{
            __shared__ int32_t held[64];
            const int t = static_cast<int>(threadIdx.x);
            int32_t* const y = params.y;
            volatile int32_t* const unused = held;
            uint8_t* const bytes = dynamic_shared();
            int32_t* const s = reinterpret_cast<int32_t*>(bytes);
            if (params.count < 0) unused[0] = 0;
            switch (params.count) {{ {cases} }}
        }}"#
    )
}

/// The fault of statement `number` under the deterministic schedule.
fn fault_of(number: usize) -> Option<String> {
    let device = emulator()?;
    let tree = dsv4_kernels::sources().with_text("probe.cu", source(), "a probe");
    let device = device.with_tree(tree);
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let y = arena.output("y", DType::I32, &[128]).unwrap();
    let params = Params::new("probe").ptr("y", &y).i32("count", number).unwrap();
    let config = LaunchConfig { grid: [1; 3], block: [64, 1, 1], shared_bytes: 2048 };
    let ran = arena.run(|device| device.kernel("probe.cu", &[], "probe")?.launch(config, &params));
    match ran {
        Ok(_) => Some(String::new()),
        Err(RuntimeError::Fault { what, .. }) => Some(what),
        Err(error) => panic!("{}: {error}", STATEMENTS[number].0),
    }
}

#[test]
fn two_accesses_without_an_order_are_a_race_and_no_ordered_ones_are() {
    let mut wrong = Vec::new();
    for (number, (statement, words)) in STATEMENTS.iter().enumerate() {
        let Some(fault) = fault_of(number) else { return };
        let as_expected = match words {
            [] => fault.is_empty(),
            words => words.iter().all(|word| fault.contains(word)),
        };
        if !as_expected {
            wrong.push(format!("`{statement}`: {fault:?}, expected {words:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
