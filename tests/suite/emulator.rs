//! What the emulator guarantees in addition to running correct kernels. Incorrect kernels end with
//! an error that names kernel, block and thread, or with wrong values that a seed repeats. Also the
//! module cache and the memory contract. The first two exist only on the emulator and are skipped
//! on a GPU, where an incorrect kernel may crash the driver.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dsv4_runtime::arena::{Layout, Violation, ViolationKind};
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, HostTensor, LaunchConfig,
    Result, Role, RuntimeError, SourceTree, TensorView,
};

use crate::launchers::{assert_refused, shifted};
use crate::{command_line, support};

/// A new emulator with a short time limit; `None` where another backend is under test, which is
/// counted and reported.
pub fn emulator() -> Option<Device> {
    static SKIPPED: AtomicU32 = AtomicU32::new(0);
    if support::backend() != BackendKind::Emulator {
        let number = 1 + SKIPPED.fetch_add(1, Ordering::Relaxed);
        eprintln!(
            "skipped (number {number}): this test is about the emulator, and PARITY_BACKEND demands another backend"
        );
        return None;
    }
    let emulator =
        EmulatorOptions { time_limit: Duration::from_secs(1), ..EmulatorOptions::default() };
    let options = DeviceOptions { emulator, ..dsv4_kernels::device_options() };
    Some(Device::open(BackendKind::Emulator, options).expect("the emulator opens"))
}

/// Kernel, block, thread and text of a fault.
fn fault(result: Result<Vec<Violation>>) -> (String, String, String, String) {
    match result {
        Err(RuntimeError::Fault { kernel, block, thread, what }) => (kernel, block, thread, what),
        other => panic!("expected a fault, not {other:?}"),
    }
}

// ---------------------------------------------------------------- planted faults

const FAULT_THREADS: usize = 64;

/// The result of a faulty kernel: forbidden writes, and y.
type FaultRun = (Result<Vec<Violation>>, Vec<f32>);

/// Runs `FAULT=name` with x = 1, 2, …, 64.
fn run_fault(device: &Device, name: &str, contract: Contract) -> FaultRun {
    let mut arena = DeviceArena::new(device, contract);
    let values: Vec<f64> = (1..=FAULT_THREADS).map(|i| i as f64).collect();
    let x = arena.input("x", &HostTensor::from_f64(DType::F32, &[FAULT_THREADS], &values)).unwrap();
    let y = arena.output("y", DType::F32, &[FAULT_THREADS]).unwrap();
    let params =
        Params::new("selftest").ptr("x", &x).ptr("y", &y).i32("count", FAULT_THREADS).unwrap();
    let config =
        LaunchConfig { grid: [1, 1, 1], block: [FAULT_THREADS as u32, 1, 1], shared_bytes: 0 };
    let defines = [("FAULT", name.to_owned())];
    let result = arena.run(|device| {
        device.kernel("selftest_faults.cu", &defines, "selftest_fault")?.launch(config, &params)
    });
    let y = arena.download(&y).unwrap();
    (result, y.to_f64().into_iter().map(|v| v as f32).collect())
}

/// The fault `name` must be reported for this thread, in a message that contains all of `needles`.
fn assert_fault(name: &str, contract: Contract, thread: u32, needles: &[&str]) {
    let Some(device) = emulator() else { return };
    let (kernel, block, found, what) = fault(run_fault(&device, name, contract).0);
    assert_eq!(kernel, "selftest_fault");
    assert_eq!(
        (block.as_str(), found),
        ("(0, 0, 0)", format!("({thread}, 0, 0)")),
        "{name}: {what}"
    );
    for needle in needles {
        assert!(what.contains(needle), "{name}: `{needle}` is not in `{what}`");
    }
}

#[test]
fn a_barrier_that_half_the_threads_skip_is_reported_as_divergence() {
    let needles = [
        "barrier 0",
        "the __syncthreads at",
        "selftest_faults.cu:",
        "32 of 64 threads arrived",
        "threads 32 to 63 returned",
        "divergence",
        "32 of 64 threads have returned",
    ];
    assert_fault("skipped_barrier", Contract::NAN, 0, &needles);
}

#[test]
fn warps_that_meet_at_different_barriers_in_the_source_are_reported_as_divergence() {
    let needles = [
        "calls __syncthreads at",
        "selftest_faults.cu:",
        "while others of its block wait at",
        "divergence",
    ];
    assert_fault("parted_barrier", Contract::NAN, 32, &needles);
}

#[test]
fn a_shuffle_that_waits_for_lanes_that_have_returned_is_reported_as_divergence() {
    assert_fault("exited_lane", Contract::NAN, 0, &["__shfl_xor_sync", "0xffffffff", "divergence"]);
}

#[test]
fn a_lane_that_its_own_mask_does_not_name_is_reported() {
    assert_fault(
        "foreign_lane",
        Contract::NAN,
        16,
        &["__shfl_xor_sync", "0x0000ffff", "not named"],
    );
}

#[test]
fn a_read_behind_a_buffer_is_reported_with_the_buffers_name() {
    assert_fault(
        "read_past_end",
        Contract::NAN,
        63,
        &["`x`", "0 bytes past the end", "256 bytes long"],
    );
}

#[test]
fn a_vector_loaded_behind_a_buffer_is_reported_though_nobody_reads_it() {
    for name in ["unread_past_end", "unread_streaming"] {
        assert_fault(name, Contract::NAN, 63, &["`x`", "0 bytes past the end", "256 bytes long"]);
    }
}

#[test]
fn a_store_for_global_memory_that_is_given_shared_memory_is_reported() {
    for name in ["shared_as_global", "static_as_global"] {
        let needles = ["store_vec16_global is for global memory", "an address of shared memory"];
        assert_fault(name, Contract::NAN, 63, &needles);
    }
}

#[test]
fn a_write_in_front_of_a_buffer_is_reported_with_the_buffers_name() {
    assert_fault(
        "write_before_start",
        Contract::HUGE,
        0,
        &["`y`", "4 bytes before the start", "256 bytes long"],
    );
}

#[test]
fn a_store_behind_the_dynamic_shared_memory_is_reported_with_its_distance() {
    let needles = ["accessed `dynamic shared memory` 0 bytes past the end (256 bytes long)"];
    assert_fault("past_shared", Contract::NAN, 63, &needles);
}

#[test]
fn a_copy_that_aims_outside_of_shared_memory_is_reported() {
    assert_fault("outside_shared", Contract::NAN, 16, &["outside the dynamic shared memory"]);
}

#[test]
fn a_loop_without_end_is_stopped_at_the_time_limit() {
    let Some(device) = emulator() else { return };
    // The variants are compiled before their time counts.
    for name in ["endless_loop", "endless_exchange"] {
        run_fault(&device, name, Contract::NAN).0.expect_err(name);
    }
    for name in ["endless_loop", "endless_exchange"] {
        let Some(device) = emulator() else { return };
        let begin = Instant::now();
        let (kernel, block, thread, what) = fault(run_fault(&device, name, Contract::NAN).0);
        assert_eq!((kernel.as_str(), block.as_str()), ("selftest_fault", "(0, 0, 0)"));
        assert!(thread.ends_with(", 0, 0)"), "{name}: thread {thread}");
        assert!(what.contains("time limit"), "{name}: {what}");
        assert!(begin.elapsed() >= Duration::from_secs(1), "{name} was stopped before its time");
        // Launches of a kernel that is known to be endless are stopped sooner.
        let again = Instant::now();
        let (.., what) = fault(run_fault(&device, name, Contract::NAN).0);
        assert!(what.contains("time limit"), "{name}: {what}");
        assert!(again.elapsed() < Duration::from_secs(1), "{name}: {:?}", again.elapsed());
    }
    // The device is usable again.
    let (result, y) = run_fault(&device, "unwritten_output", Contract::NAN);
    assert_eq!((result.unwrap(), y[62]), (vec![], 63.0));
}

#[test]
fn a_write_that_a_guard_page_cannot_catch_is_found_in_the_guard_band() {
    let Some(device) = emulator() else { return };
    // The end of y is at the guard page, and y has a band before it. The deterministic schedule
    // reports each access outside of a buffer.
    let (.., what) = fault(run_fault(&device, "write_before_start", Contract::NAN).0);
    assert_eq!(what, "accessed `y` 4 bytes before the start (256 bytes long)");
    device.backend().set_schedule_seed(Some(1));
    let (result, _) = run_fault(&device, "write_before_start", Contract::NAN);
    let expected =
        Violation { buffer: "y".into(), kind: ViolationKind::Guard, bytes: 4, first_offset: -4 };
    assert_eq!(result.unwrap(), [expected]);
}

#[test]
fn elements_that_no_thread_writes_keep_the_poison() {
    let Some(device) = emulator() else { return };
    for contract in [Contract::NAN, Contract::HUGE] {
        let poison = f32::from_ne_bytes([contract.poison; 4]);
        let (result, y) = run_fault(&device, "unwritten_output", contract);
        assert_eq!(result.unwrap(), []);
        for (i, value) in y.iter().enumerate() {
            let expected = if i % 2 == 0 { i as f32 + 1.0 } else { poison };
            assert_eq!(
                value.to_bits() & 0xffbf_ffff,
                expected.to_bits() & 0xffbf_ffff,
                "element {i} is {value}"
            );
        }
    }
}

/// Bits of y under random schedules, which look for no races.
fn results_by_seed(device: &Device, name: &str) -> Vec<(Option<u64>, Vec<u32>)> {
    results_by_schedule(device, name, (1..=8).map(Some))
}

/// Bits of y under these schedules.
fn results_by_schedule(
    device: &Device,
    name: &str,
    schedules: impl Iterator<Item = Option<u64>>,
) -> Vec<(Option<u64>, Vec<u32>)> {
    let run = |seed| {
        device.backend().set_schedule_seed(seed);
        let (result, y) = run_fault(device, name, Contract::NAN);
        assert_eq!(result.unwrap(), [], "{name} under schedule {seed:?}");
        (seed, y.iter().map(|v| v.to_bits()).collect())
    };
    schedules.map(run).collect()
}

/// A missing synchronization is a race with these words in the deterministic schedule. It shows as
/// wrong values under some random schedule, and each of these repeats its own values.
fn assert_race_shows(name: &str, words: &[&str], correct: impl Fn(usize) -> f32) {
    let Some(device) = emulator() else { return };
    let (.., what) = fault(run_fault(&device, name, Contract::NAN).0);
    assert!(words.iter().all(|word| what.contains(word)), "{name}: {what}");
    let correct: Vec<u32> = (0..FAULT_THREADS).map(|i| correct(i).to_bits()).collect();
    let first = results_by_seed(&device, name);
    assert!(first.iter().any(|(_, y)| *y != correct), "{name} hid under every seed");
    let again = results_by_seed(&device, name);
    for ((seed, a), (_, b)) in first.iter().zip(&again) {
        assert_eq!(a, b, "{name}: schedule {seed:?} did not repeat its result");
    }
}

#[test]
fn a_missing_wait_for_a_copy_is_a_race_and_gives_wrong_numbers_that_a_seed_repeats() {
    let words = ["a copy in flight (cp.async) of thread (15, 0, 0)", "selftest_faults.cu:"];
    assert_race_shows("missing_copy_wait", &words, |i| i as f32 + 1.0);
}

#[test]
fn a_missing_barrier_is_a_race_and_gives_wrong_numbers_that_a_seed_repeats() {
    let words = ["stores byte 128 of `dynamic shared memory`", "(31, 0, 0) reads", "(a race)"];
    assert_race_shows("missing_barrier", &words, |i| (FAULT_THREADS - i) as f32);
}

/// Comparisons skip NaN, so NaN alone does not show what a kernel reads there.
#[test]
fn shared_memory_that_no_thread_writes_reads_as_nan_and_under_schedules_as_what_another_block_may_have_left()
 {
    let Some(device) = emulator() else { return };
    let mut found = Vec::new();
    let schedules = [None].into_iter().chain((1..=8).map(Some));
    for (seed, y) in results_by_schedule(&device, "unwritten_shared", schedules) {
        assert!(y.iter().all(|bits| *bits == y[0]), "schedule {seed:?}: {y:x?}");
        assert_eq!(f32::from_bits(y[0]).is_nan(), seed.is_none(), "schedule {seed:?}: {y:x?}");
        found.push(y[0]);
    }
    let within = |schedules: usize, bits| found[1..=schedules].contains(&bits);
    assert!(
        within(2, 0) && within(2, 0xc0c0_c0c0),
        "two schedules do for zeros and large keys: {found:x?}"
    );
    assert!(within(3, 0x3f3f_3f3f), "three schedules do for all: {found:x?}");
}

// ---------------------------------------------------------------- kernels of this file

/// A kernel source whose kernel `probe` has this body.
fn probe_source(body: &str) -> String {
    format!(
        "#include \"memory.h\"\n\
         DEVICE int deep(int n) {{ volatile char held[1024]; held[n % 1024] = 1; return n ? deep(n - 1) + held[0] : 0; }}\n\
         struct ProbeParams {{ int32_t* y; int32_t count; }};\n\
         PARAMS_LAYOUT(ProbeParams, y, count)\n\
         KERNEL(probe, ProbeParams, 64) {{ {body} }}\n"
    )
}

pub fn probe_tree(body: &str) -> SourceTree {
    dsv4_kernels::sources().with_text("probe.cu", probe_source(body), "a probe")
}

/// Runs a probe with y an i32 `[64]`, and count 0.
fn run_probe(
    device: &Device,
    body: &str,
    grid: [u32; 3],
    block: [u32; 3],
) -> (Result<Vec<Violation>>, Vec<i32>) {
    let device = device.with_tree(probe_tree(body));
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let y = arena.output("y", DType::I32, &[64]).unwrap();
    let params = Params::new("probe").ptr("y", &y).i32("count", 0).unwrap();
    let result = arena.run(|device| {
        let config = LaunchConfig { grid, block, shared_bytes: 0 };
        device.kernel("probe.cu", &[], "probe")?.launch(config, &params)
    });
    let y = arena.download(&y).unwrap().to_i32();
    (result, y)
}

#[test]
fn a_fault_names_the_block_and_thread_that_did_it_in_all_three_dimensions() {
    let Some(device) = emulator() else { return };
    let body = "if (blockIdx.x == 1 && blockIdx.y == 2 && blockIdx.z == 1 && threadIdx.x == 3 && threadIdx.y == 1)
                    params.y[64 + threadIdx.x] = 1;";
    let (kernel, block, thread, what) = fault(run_probe(&device, body, [2, 3, 2], [4, 2, 1]).0);
    assert_eq!(
        (kernel.as_str(), block.as_str(), thread.as_str()),
        ("probe", "(1, 2, 1)", "(3, 1, 0)")
    );
    assert!(what.contains("`y` 12 bytes past the end"), "{what}");
}

#[test]
fn null_pointers_wild_addresses_deep_stacks_and_division_by_zero_are_reported() {
    let Some(device) = emulator() else { return };
    let of_thread_5 = |statement: &str| format!("if (threadIdx.x == 5) {{ {statement} }}");
    for (statement, needle) in [
        (
            "*reinterpret_cast<volatile int*>(static_cast<uintptr_t>(params.count)) = 1;",
            "null pointer",
        ),
        ("*reinterpret_cast<volatile int*>(0x7f0000000000ull + params.count) = 1;", "no buffer's"),
        ("params.y[0] = deep(1 << 20);", "overflowed its stack"),
        ("params.y[0] = 7 / params.count;", "divided an integer by zero"),
    ] {
        let (_, _, thread, what) =
            fault(run_probe(&device, &of_thread_5(statement), [1, 1, 1], [64, 1, 1]).0);
        assert_eq!(thread, "(5, 0, 0)", "{statement}: {what}");
        assert!(what.contains(needle), "{statement}: `{needle}` is not in `{what}`");
    }
}

#[test]
fn an_index_or_pointer_outside_an_array_of_a_thread_or_block_and_a_shift_by_too_many_bits_are_reported()
 {
    let Some(device) = emulator() else { return };
    let on_thread_5 = |declaration: &str, statement: &str| {
        format!(
            "{declaration} const int at = params.count + 4; if (threadIdx.x == 5) {{ {statement} }}"
        )
    };
    let index = "index 4 is beyond the end of an array 'int [4]', probe.cu:";
    for (declaration, statement, needle) in [
        ("int x[4] = {1, 2, 3, 4};", "params.y[0] = x[at];", index),
        ("__shared__ int x[4];", "x[at] = 1;", index),
        ("struct { int before[4], after; } x{};", "params.y[0] = x.before[at];", index),
        (
            "int x[4] = {1, 2, 3, 4};",
            "params.y[0] = x[3 - at];",
            "index -1 is beyond the end of an array 'int [4]'",
        ),
        (
            "__shared__ int x[4];",
            "int* p = x; p[at] = 1; params.y[1] = p[0];",
            "outside of the variable that its pointer points to",
        ),
        (
            "int x[4] = {1, 2, 3, 4};",
            "const int* p = x; params.y[0] = p[at];",
            "outside of the variable that its",
        ),
        (
            "",
            "params.y[0] = 1 << (8 * at);",
            "a shift of 'int' by 32: more bits than there are, probe.cu:",
        ),
    ] {
        let (_, _, thread, what) =
            fault(run_probe(&device, &on_thread_5(declaration, statement), [1; 3], [64, 1, 1]).0);
        assert_eq!(thread, "(5, 0, 0)", "{statement}: {what}");
        assert!(what.contains(needle), "{statement}: `{needle}` is not in `{what}`");
        let inside = statement.replace("at", "(at - 4)");
        run_probe(&device, &on_thread_5(declaration, &inside), [1; 3], [64, 1, 1])
            .0
            .expect(&inside);
    }
}

#[test]
fn static_shared_memory_that_no_thread_writes_holds_poison_in_the_first_block_and_in_later_ones() {
    let Some(device) = emulator() else { return };
    // Written to an address from the launch; otherwise the compiler could assume a constant.
    let body = "__shared__ int32_t held[64]; if (params.count) held[threadIdx.x] = 1;
                const int32_t first = held[threadIdx.x];
                held[threadIdx.x] = 2;
                if (first != -1) atomicMax(params.y, 1 + (first & 0xff));";
    for blocks in [1, 16] {
        let (result, y) = run_probe(&device, body, [blocks, 1, 1], [64, 1, 1]);
        assert_eq!(
            (result.unwrap(), y[0]),
            (vec![], -1),
            "of {blocks} blocks one found something else than poison"
        );
    }
}

// ---------------------------------------------------------------- accesses of several blocks

const BULK_COPIES: &str = "
        DEVICE void bulk_in(SharedAddress target, const void* source) {
            mbarrier_init(1024, 1);
            fence_mbarrier_init();
            mbarrier_arrive_expect(1024, 32);
            bulk_copy_in(target, source, 32, 1024);
            mbarrier_wait(1024, 0);
        }
        DEVICE void bulk_out(float* target, SharedAddress source) {
            bulk_add_f32(target, source, 32);
            bulk_commit();
            bulk_wait<0>();
        }
";

/// What block 0 does to memory at `at`, what blocks 1 to 3 do, and the fault's text if the two are
/// not allowed. `own` is each block's own place.
const SHARED_ACCESSES: &[(&str, &str, Option<[&str; 2]>)] = &[
    // A lost update: no addition is missed while blocks happen to run one after the other.
    ("*at += 1;", "*at += 1;", Some(["reads", "stores"])),
    ("*at = 1;", "sink = *at;", Some(["reads", "stores"])),
    ("sink = *at;", "*at = 1;", Some(["stores", "reads"])),
    ("*at = 1;", "*at = 1;", Some(["stores", "stores"])),
    ("atomicAdd(at, 1);", "*at = 1;", Some(["stores", "updates"])),
    ("*at = 1;", "atomicMax(at, 1);", Some(["updates", "stores"])),
    ("atomicAdd(at, 1);", "sink = *at;", Some(["reads", "updates"])),
    (
        "store_vec16(at, Vec16{});",
        "sink = load_vec16_readonly(at).w[3];",
        Some(["reads", "stores"]),
    ),
    (
        "*at = 1;",
        "copy_async_16(64, at, true); copy_commit(); copy_wait<0>();",
        Some(["reads", "stores"]),
    ),
    ("*at = 1;", "bulk_in(64, at);", Some(["reads", "stores"])),
    ("*at = 1;", "bulk_out(reinterpret_cast<float*>(at), 64);", Some(["updates", "stores"])),
    (
        "for (int i = 0; i < 4; ++i) at[i] = i;",
        "std::memcpy(&copy, at, 16); sink = copy[3];",
        Some(["reads", "stores"]),
    ),
    // These are allowed.
    ("atomicAdd(at, 1);", "atomicAdd(at, 1); bulk_out(reinterpret_cast<float*>(at), 64);", None),
    ("sink = *at;", "sink = load_vec16(at).w[0];", None),
    ("*own += 1;", "*own += 1; sink = *own;", None),
    ("half[0] = 1;", "if (blockIdx.x == 1) half[1] = 1;", None),
    ("in_static[0] = 1; sink = in_static[0];", "in_static[0] = 2; store_shared(64, 1);", None),
    ("if (params.count < 0) *at = 1;", "*own = *at;", None),
];

fn shared_accesses_source() -> String {
    let cases = (0..).zip(SHARED_ACCESSES).map(|(number, (first, others, _))| {
        format!("case {number}: if (blockIdx.x == 0) {{ {first} }} else {{ {others} }} break;\n")
    });
    format!(
        r#"#include "hopper.h"
        struct ProbeParams {{ int32_t* y; int32_t count; }};
        PARAMS_LAYOUT(ProbeParams, y, count)
        {BULK_COPIES}
        SHARED_MEMORY(probe, 2048)
        KERNEL(probe, ProbeParams, 32) {{
            __shared__ int32_t in_static[4];
            int32_t* const at = params.y + 8;
            int32_t* const own = params.y + 16 + blockIdx.x;
            int16_t* const half = reinterpret_cast<int16_t*>(params.y);
            int32_t copy[4] = {{}};
            volatile int sink = copy[0];
            if (threadIdx.x != 5) return;
            switch (params.count) {{ {} }}
        }}"#,
        cases.collect::<String>()
    )
}

#[test]
fn a_byte_that_one_block_stores_may_not_be_accessed_by_another_under_any_schedule() {
    let Some(device) = emulator() else { return };
    let device = device.with_tree(dsv4_kernels::sources().with_text(
        "probe.cu",
        shared_accesses_source(),
        "a probe",
    ));
    for (number, &(first, others, said)) in SHARED_ACCESSES.iter().enumerate() {
        for seed in 1..4 {
            device.backend().set_schedule_seed(Some(seed));
            let mut arena = DeviceArena::new(&device, Contract::NAN);
            let y = arena.output("y", DType::I32, &[64]).unwrap();
            let params = Params::new("probe").ptr("y", &y).i32("count", number).unwrap();
            // Of more blocks two that do the same could meet first.
            let config = LaunchConfig { grid: [2, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
            let ran = arena
                .run(|device| device.kernel("probe.cu", &[], "probe")?.launch(config, &params));
            let Some([what_is_done, before]) = said else {
                ran.unwrap_or_else(|error| {
                    panic!("`{first}` and `{others}` under schedule {seed}: {error}")
                });
                continue;
            };
            let (_, block, thread, what) = fault(ran);
            assert_eq!(thread, "(5, 0, 0)", "{what}");
            // Which of two blocks comes second depends on the machine.
            let either = [[what_is_done, before], [before, what_is_done]];
            let told = either.iter().any(|[this, other]| {
                what.starts_with(&format!("{this} byte 32 of `y`, which block ("))
                    && what.contains(&format!(") {other}:"))
            });
            assert!(
                told && !what.contains(&format!("block {block} ")),
                "`{first}`, `{others}`: {block} {what}"
            );
        }
    }
}

// ---------------------------------------------------------------- misaligned accesses

/// Accesses of several bytes, each with the number of bytes that must divide its address, and the
/// memory that it uses. `at` points into y, `shared` is an address in shared memory; those of
/// thread 5 have the offset of the test.
const WIDE_ACCESSES: &[(&str, usize, &str)] = &[
    // Through the named functions of the kernels' headers.
    ("sink = load_vec16(at).w[0];", 16, "y"),
    ("sink = load_vec16_readonly(at).w[0];", 16, "y"),
    ("sink = load_vec16_streaming(at).w[0];", 16, "y"),
    ("if (mine) store_vec16(at, Vec16{});", 16, "y"),
    ("if (mine) store_vec16_streaming(at, Vec16{});", 16, "y"),
    ("if (mine) store_vec16(dynamic_shared() + shared, Vec16{});", 16, "dynamic shared memory"),
    ("if (mine) store_pair(reinterpret_cast<float*>(at), 0.0f, 1.0f);", 8, "y"),
    ("if (mine) atomic_add_vec4(reinterpret_cast<float*>(at), 0.0f, 1.0f, 2.0f, 3.0f);", 16, "y"),
    ("if (mine) atomicAdd(reinterpret_cast<int*>(at), 1);", 4, "y"),
    ("if (mine) atomicMax(reinterpret_cast<unsigned long long*>(at), 1ull);", 8, "y"),
    (
        "if (mine) atomicAdd(reinterpret_cast<int*>(dynamic_shared() + shared), 1);",
        4,
        "dynamic shared memory",
    ),
    ("if (mine) store_shared(shared, 1);", 4, "dynamic shared memory"),
    ("if (mine) store_shared_vec16(shared, Vec16{});", 16, "dynamic shared memory"),
    ("sink = load_shared_vec16(shared).w[0];", 16, "dynamic shared memory"),
    ("if (mine) copy_async_16(64, at, true); copy_commit(); copy_wait<0>();", 16, "y"),
    ("if (mine) copy_async_16(64, at, false); copy_commit(); copy_wait<0>();", 16, "y"),
    (
        "if (mine) copy_async_16(shared, params.y, true); copy_commit(); copy_wait<0>();",
        16,
        "dynamic shared memory",
    ),
    ("uint32_t d[4]; ldmatrix_x4(d, shared); sink = d[0];", 16, "dynamic shared memory"),
    ("uint32_t d[2]; ldmatrix_x2_transposed(d, shared); sink = d[0];", 16, "dynamic shared memory"),
    ("if (mine) bulk_in(64, at);", 16, "y"),
    ("if (mine) bulk_in(shared, params.y);", 16, "dynamic shared memory"),
    ("if (mine) bulk_out(reinterpret_cast<float*>(at), 64);", 16, "y"),
    (
        "if (mine) bulk_out(reinterpret_cast<float*>(params.y), shared);",
        16,
        "dynamic shared memory",
    ),
    ("sink = static_cast<int>(matrix_descriptor(shared, 16, 16));", 16, "dynamic shared memory"),
    // Through plain pointers.
    ("sink = *reinterpret_cast<const uint16_t*>(at);", 2, "y"),
    ("sink = *reinterpret_cast<const volatile int*>(at);", 4, "y"),
    ("if (mine) *reinterpret_cast<float*>(at) = 1.0f;", 4, "y"),
    ("if (mine) *reinterpret_cast<double*>(at) = 1.0;", 8, "y"),
    ("sink = static_cast<int>(reinterpret_cast<const uint64_t*>(at)[2]);", 8, "y"),
    ("if (mine) *reinterpret_cast<Pair*>(at) = Pair{1, 2};", 8, "y"),
    ("sink = reinterpret_cast<const Pair*>(at)->second;", 8, "y"),
    ("Quad copy = *reinterpret_cast<const Quad*>(at); sink = copy.word[3];", 16, "y"),
    ("const Quad& quad = *reinterpret_cast<const Quad*>(at); sink = quad.word[mine];", 16, "y"),
    (
        "if (mine) *reinterpret_cast<int*>(dynamic_shared() + shared) = 1;",
        4,
        "dynamic shared memory",
    ),
    ("sink = *reinterpret_cast<const int*>(at_static);", 4, ""),
];

/// A kernel that makes access number `params.count / 16`, with thread 5's addresses offset by
/// `params.count % 16` bytes.
fn wide_accesses_source() -> String {
    let cases: String = (0..)
        .zip(WIDE_ACCESSES)
        .map(|(number, (statement, ..))| format!("case {number}: {{ {statement} break; }}\n"))
        .collect();
    format!(
        r#"#include "hopper.h"
        struct ProbeParams {{ int32_t* y; int32_t count; }};
        PARAMS_LAYOUT(ProbeParams, y, count)
        struct alignas(8) Pair {{ int32_t first, second; }};
        struct alignas(16) Quad {{ int32_t word[4]; }};
        {BULK_COPIES}
        SHARED_MEMORY(probe, 2048)
        KERNEL(probe, ProbeParams, 64) {{
            __shared__ __align__(16) uint8_t in_static[64];
            const bool mine = threadIdx.x == 5;
            const int off = mine ? params.count % 16 : 0;
            uint8_t* const at = reinterpret_cast<uint8_t*>(params.y) + 32 + off;
            uint8_t* const at_static = in_static + 16 + off;
            const SharedAddress shared = 512 + off;
            volatile int sink = 0;
            switch (params.count / 16) {{ {cases} }}
        }}"#
    )
}

#[test]
fn an_access_whose_address_is_no_multiple_of_its_size_is_reported_with_buffer_and_size() {
    let Some(device) = emulator() else { return };
    let device = device.with_tree(dsv4_kernels::sources().with_text(
        "probe.cu",
        wide_accesses_source(),
        "a probe",
    ));
    let access = |number: usize, off: usize| {
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let y = arena.output("y", DType::I32, &[64]).unwrap();
        let params = Params::new("probe").ptr("y", &y).i32("count", 16 * number + off).unwrap();
        let config = LaunchConfig { grid: [1; 3], block: [32, 1, 1], shared_bytes: 0 };
        arena.run(|device| device.kernel("probe.cu", &[], "probe")?.launch(config, &params))
    };
    for (number, &(statement, bytes, memory)) in WIDE_ACCESSES.iter().enumerate() {
        access(number, 0).unwrap_or_else(|error| panic!("{statement}: {error}"));
        for off in [bytes / 2, bytes - 1] {
            let (kernel, block, thread, what) = fault(access(number, off));
            assert_eq!(
                (kernel.as_str(), block.as_str()),
                ("probe", "(0, 0, 0)"),
                "{statement}: {what}"
            );
            assert_eq!(thread, "(5, 0, 0)", "{statement}: {what}");
            let place =
                if memory.is_empty() { "no buffer's".to_owned() } else { format!("of `{memory}`") };
            for needle in [
                &format!("misaligned {bytes}-byte access"),
                &format!(": {off} past a multiple of {bytes}"),
                &place,
            ] {
                assert!(
                    what.contains(needle.as_str()),
                    "{statement}: `{needle}` is not in `{what}`"
                );
            }
        }
        // An address that is aligned for a narrower access is not reported for it.
        if bytes < 16 {
            access(number, bytes)
                .unwrap_or_else(|error| panic!("{statement}, {bytes} further on: {error}"));
        }
    }
}

#[test]
fn a_fault_of_a_dereference_says_what_was_read_and_where_in_the_source() {
    let Some(device) = emulator() else { return };
    let body = "if (threadIdx.x == 5)\n params.y[0] = *reinterpret_cast<const int*>(\
                reinterpret_cast<const uint8_t*>(params.y) + 6 + params.count);";
    let (_, _, _, what) = fault(run_probe(&device, body, [1, 1, 1], [64, 1, 1]).0);
    let needle = "misaligned 4-byte access (load of 'const int', probe.cu:6): 2 past a multiple of 4, at byte 6 of `y`";
    assert!(what.contains(needle), "{what}");
}

#[test]
fn the_deterministic_schedule_repeats_itself_and_a_seed_brings_another_order() {
    let Some(device) = emulator() else { return };
    // Lane numbers in the order in which threads arrive.
    let body = "__shared__ int32_t next; if (threadIdx.x == 0) next = 0; __syncthreads();
                params.y[atomicAdd(&next, 1)] = threadIdx.x;";
    let orders = |seed| {
        device.backend().set_schedule_seed(seed);
        let (result, order) = run_probe(&device, body, [1, 1, 1], [64, 1, 1]);
        assert_eq!(result.unwrap(), []);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<_>>(), "schedule {seed:?} lost a thread");
        order
    };
    let deterministic = orders(None);
    assert_eq!(deterministic, orders(None));
    let seeded = orders(Some(7));
    assert_eq!(seeded, orders(Some(7)), "seed 7 did not repeat its order");
    assert_ne!(seeded, deterministic);
    assert_ne!(seeded, orders(Some(8)));
}

// ---------------------------------------------------------------- compilation

#[test]
fn a_source_that_does_not_compile_gives_the_compilers_own_words() {
    let device = support::device().with_tree(probe_tree("params.y[0] = undeclared_name;"));
    match device.kernel("probe.cu", &[("EXTRA", "3".into())], "probe").map(|_| ()) {
        Err(RuntimeError::Compile { compiler, file, defines, log }) => {
            assert_eq!((file.as_str(), defines.as_str()), ("probe.cu", " -DEXTRA=3"));
            assert!(!compiler.is_empty() && log.contains("undeclared_name"), "{compiler}: {log}");
        }
        other => panic!("expected a compile error, not {other:?}"),
    }
}

#[test]
fn a_specialisation_without_its_define_is_a_compile_error_that_names_it() {
    let error = support::device().kernel("selftest_faults.cu", &[], "selftest_fault");
    let error = error.map(|_| ()).expect_err("FAULT is missing").to_string();
    assert!(error.contains("define FAULT"), "{error}");
}

#[test]
fn a_missing_kernel_or_source_is_named() {
    let device = support::device().with_tree(probe_tree(""));
    let error = |file, name| device.kernel(file, &[], name).map(|_| ()).expect_err(name);
    assert!(
        matches!(error("probe.cu", "absent"), RuntimeError::SymbolMissing { symbol, .. } if symbol.contains("absent"))
    );
    assert!(
        matches!(error("absent.cu", "probe"), RuntimeError::SourceMissing { file, .. } if file == "absent.cu")
    );
}

#[test]
fn a_parameter_struct_that_differs_from_the_kernels_is_refused() {
    let device = support::device().with_tree(probe_tree(""));
    let kernel = device.kernel("probe.cu", &[], "probe").unwrap();
    let config = LaunchConfig { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
    let (params, nowhere) = (|| Params::new("probe"), DeviceAddress(0));
    let right = params().ptr("y", nowhere).i32("count", 0).unwrap();
    kernel.launch(config, &right).expect("the right struct is accepted");
    // The same size, a field renamed; another size; the same fields in another order; another type.
    let wrong = [
        (params().ptr("z", nowhere).i32("count", 0).unwrap(), "field 0 is `y`"),
        (
            params().ptr("y", nowhere).i32("count", 0).unwrap().i64("extra", 0).unwrap(),
            "field 2 is no further field",
        ),
        (params().i32("count", 0).unwrap().ptr("y", nowhere), "field 0 is `y`"),
        (params().ptr("y", nowhere).i64("count", 0).unwrap(), "field 1 is `count` of 4 bytes"),
    ];
    for (params, needle) in wrong {
        // Even where no launch follows.
        kernel
            .launch(LaunchConfig { grid: [0, 1, 1], ..config }, &params)
            .expect_err("another struct");
        match kernel.launch(config, &params) {
            Err(RuntimeError::ParamsLayout {
                kernel,
                rust_size,
                rust_hash,
                kernel_size,
                kernel_hash,
                difference,
            }) => {
                assert_eq!((kernel.as_str(), kernel_size), ("probe", 16));
                assert!((rust_size, rust_hash) != (kernel_size, kernel_hash));
                assert!(difference.contains(needle), "{difference}");
            }
            other => panic!("expected a layout mismatch, not {other:?}"),
        }
    }
}

/// One field of each kind, in an order that leaves gaps, on both sides.
#[test]
fn a_struct_of_mixed_sizes_has_the_layout_that_the_compiler_gives_it() {
    let source = "#include \"memory.h\"\n\
        struct MixedParams { int32_t first; int32_t* y; int64_t y_token_stride; int64_t y_head_stride; float eps;\n\
                             int64_t rows; int32_t last; };\n\
        PARAMS_LAYOUT(MixedParams, first, y, y_token_stride, y_head_stride, eps, rows, last)\n\
        KERNEL(mixed, MixedParams, 32) {\n\
            if (threadIdx.x != 0) return;\n\
            params.y[0] = params.first; params.y[1] = static_cast<int32_t>(params.y_token_stride);\n\
            params.y[2] = static_cast<int32_t>(params.y_head_stride); params.y[3] = static_cast<int32_t>(params.eps);\n\
            params.y[4] = static_cast<int32_t>(params.rows >> 33); params.y[5] = params.last; }\n";
    let device = support::device().with_tree(dsv4_kernels::sources().with_text(
        "mixed.cu",
        source.into(),
        "a probe",
    ));
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let y = arena.output("y", DType::I32, &[2, 3]).unwrap();
    let params = Params::new("mixed").i32("first", 1).unwrap().heads("y", &y).f32("eps", 4.0);
    let params = params.i64("rows", 5 << 33).unwrap().i32("last", 6).unwrap();
    let config = LaunchConfig { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0 };
    let violations =
        arena.run(|device| device.kernel("mixed.cu", &[], "mixed")?.launch(config, &params));
    assert!(violations.unwrap().is_empty());
    assert_eq!(arena.download(&y).unwrap().to_i32(), [1, 3, 1, 4, 5, 6]);
}

#[test]
fn an_emulator_without_a_compiler_is_a_missing_backend() {
    let case = r#"{"operator":"rms_norm"}"#;
    let nowhere = "/nonexistent/compiler";
    let output = command_line::Parity::new(&[
        "run",
        "--backend",
        "emulator",
        "--ops",
        "rms_norm",
        "--cases",
        "0",
    ])
    .env("PARITY_CXX", nowhere)
    .run();
    output.assert_code(3);
    assert!(
        output.stderr.contains(nowhere) && output.stderr.contains("PARITY_CXX"),
        "{}",
        output.stderr
    );
    // A malformed case is still reported as such: no device is opened for it.
    command_line::Parity::new(&["replay", "--backend", "emulator", case])
        .env("PARITY_CXX", nowhere)
        .run()
        .assert_code(2);
}

/// Modules in a cache directory: name, inode and time of each.
fn cached(dir: &Path) -> Vec<(String, u64, i64)> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .map(|entries| entries.map(|e| e.expect("readable")).collect::<Vec<_>>())
        .unwrap_or_default()
        .into_iter()
        .map(|entry| {
            let meta = entry.metadata().expect("readable");
            (entry.file_name().to_string_lossy().into_owned(), meta.ino(), meta.mtime_nsec())
        })
        .collect();
    files.sort();
    // Each module has a file with its digest next to it.
    let (digests, modules): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|(name, ..)| name.ends_with(".blake3"));
    let names: Vec<_> = modules.iter().map(|(name, ..)| format!("{name}.blake3")).collect();
    assert_eq!(digests.into_iter().map(|(name, ..)| name).collect::<Vec<_>>(), names);
    modules
}

#[test]
fn modules_are_compiled_once_and_again_only_when_something_changes_that_goes_into_them() {
    let dir = tempfile::tempdir().unwrap();
    let load = |tree: SourceTree, defines: &[(&str, String)]| {
        let options = DeviceOptions {
            tree,
            cache_dir: dir.path().to_owned(),
            ..dsv4_kernels::device_options()
        };
        let device = Device::open(support::backend(), options).unwrap();
        device.kernel("probe.cu", defines, "probe").unwrap();
        cached(dir.path())
    };
    let tree = || probe_tree("params.y[0] = 1;");
    let first = load(tree(), &[]);
    assert_eq!(first.len(), 1);
    assert_eq!(load(tree(), &[]), first, "the same module was compiled again");
    // An unrelated kernel file is not part of this module.
    assert_eq!(load(tree().with_text("other.cu", String::new(), "another file"), &[]), first);
    let header = tree().text("memory.h").unwrap().to_owned() + "\n// changed\n";
    let changes = [
        load(tree().with_text("memory.h", header, "a comment"), &[]),
        load(tree(), &[("WIDTH", "1".into())]),
        load(tree(), &[("WIDTH", "2".into())]),
        load(probe_tree("params.y[0] = 2;"), &[]),
    ];
    for (number, files) in changes.iter().enumerate() {
        assert_eq!(files.len(), 2 + number, "change {number} did not make a module of its own");
    }
    assert!(changes[3].contains(&first[0]), "the first module was touched");
}

// ---------------------------------------------------------------- the memory contract

/// One buffer of each role, and a call that sets one run of bytes to a value that does not occur
/// there.
struct Buffers<'d> {
    arena: DeviceArena<'d>,
    input: TensorView,
    padded: TensorView,
    in_place: TensorView,
    workspace: TensorView,
}

const STRAY: u8 = 0x55;

impl Buffers<'static> {
    fn new(contract: Contract) -> Self {
        let mut arena = DeviceArena::new(support::device(), contract);
        // Sizes that are not multiples of 16 bytes leave a band on both sides under either
        // placement.
        let five = HostTensor::from_f64(DType::F32, &[5], &[1.0; 5]);
        let input = arena.input("input", &five).unwrap();
        let layout = Layout::padded(&[3, 3], 2);
        let padded = arena.allocate("padded", DType::F32, &[3, 3], &layout, Role::Output).unwrap();
        let in_place =
            arena.upload("in_place", &five, &Layout::dense(&[5]), Role::InPlace).unwrap();
        let workspace = arena.workspace("workspace", 20).unwrap();
        Self { arena, input, padded, in_place, workspace }
    }

    fn all(&self) -> [&TensorView; 4] {
        [&self.input, &self.padded, &self.in_place, &self.workspace]
    }

    /// Violations of a call that writes `bytes` bytes from `offset` of a buffer's first byte.
    fn write(&self, view: &TensorView, offset: i64, bytes: usize) -> Vec<Violation> {
        let address = view.address.wrapping_add_signed(offset);
        self.arena.run(|device| device.backend().fill(address, STRAY, bytes)).unwrap()
    }
}

fn violation(
    buffer: &TensorView,
    kind: ViolationKind,
    bytes: usize,
    first_offset: i64,
) -> Vec<Violation> {
    vec![Violation { buffer: buffer.name.clone(), kind, bytes, first_offset }]
}

#[test]
fn a_write_on_either_side_of_any_buffer_is_reported_with_name_and_offset() {
    // After the end under either placement; before the start only where a band and no guard page is
    // there.
    for contract in [Contract::NAN, Contract::HUGE] {
        for which in 0..4 {
            let buffers = Buffers::new(contract);
            let view = buffers.all()[which];
            let end = (view.span().1 - view.span().0) as i64;
            assert_eq!(
                buffers.write(view, end + 2, 3),
                violation(view, ViolationKind::Guard, 3, end + 2)
            );
        }
    }
    for which in 0..4 {
        let buffers = Buffers::new(Contract::NAN);
        let view = buffers.all()[which];
        assert_eq!(buffers.write(view, -7, 2), violation(view, ViolationKind::Guard, 2, -7));
    }
}

#[test]
fn a_changed_input_is_reported_with_name_and_offset() {
    let buffers = Buffers::new(Contract::NAN);
    let found = buffers.write(&buffers.input, 6, 4);
    assert_eq!(found, violation(&buffers.input, ViolationKind::Input, 4, 6));
}

/// No comparison afterwards can see it.
#[test]
fn a_store_to_an_input_that_is_undone_is_a_fault_under_every_schedule() {
    let Some(device) = emulator() else { return };
    let body = "if (threadIdx.x == 3) { const int x = params.y[5]; params.y[5] = x + 1; params.y[5] = x; }";
    let device = device.with_tree(probe_tree(body));
    for seed in [None, Some(1)] {
        device.backend().set_schedule_seed(seed);
        for role in [Role::Input, Role::InPlace] {
            let mut arena = DeviceArena::new(&device, Contract::NAN);
            let numbers = HostTensor::from_f64(DType::I32, &[8], &[1.0; 8]);
            let y = arena.upload("y", &numbers, &Layout::dense(&[8]), role).unwrap();
            let params = Params::new("probe").ptr("y", &y).i32("count", 0).unwrap();
            let config = LaunchConfig { grid: [1; 3], block: [64, 1, 1], shared_bytes: 0 };
            let ran = arena
                .run(|device| device.kernel("probe.cu", &[], "probe")?.launch(config, &params));
            if role == Role::InPlace {
                assert_eq!(ran.unwrap(), []);
                continue;
            }
            let (_, _, thread, what) = fault(ran);
            assert_eq!(thread, "(3, 0, 0)");
            assert_eq!(what, "stored to byte 20 of `y`, which is an input", "{seed:?}");
        }
    }
}

#[test]
fn a_write_between_the_rows_of_an_output_is_reported_with_name_and_offset() {
    let buffers = Buffers::new(Contract::HUGE);
    // Rows of 12 bytes every 20: the second row ends at 32.
    let found = buffers.write(&buffers.padded, 28, 9);
    assert_eq!(found, violation(&buffers.padded, ViolationKind::Gap, 5, 32));
}

#[test]
fn writes_that_the_contract_allows_are_not_reported() {
    for contract in [Contract::NAN, Contract::HUGE] {
        let buffers = Buffers::new(contract);
        assert_eq!(buffers.write(&buffers.padded, 20, 12), []);
        assert_eq!(buffers.write(&buffers.in_place, 0, 20), []);
        assert_eq!(buffers.write(&buffers.workspace, 0, 20), []);
    }
}

#[test]
fn an_output_within_an_inputs_buffer_may_be_written_and_the_input_may_not() {
    let mut arena = DeviceArena::new(support::device(), Contract::NAN);
    let x = HostTensor::from_f64(DType::F32, &[2, 2], &[1.0; 4]);
    let layout = Layout { offset: 0, strides: vec![4, 1], elements: 8 };
    let x = arena.upload("x", &x, &layout, Role::Input).unwrap();
    let y = TensorView { name: "y".into(), address: x.address + 8, ..x.clone() };
    arena.also_writes(&y);
    let write = |view: &TensorView, bytes| {
        arena.run(|device| device.backend().fill(view.address, STRAY, bytes)).unwrap()
    };
    assert_eq!(write(&y, 8), []);
    assert_eq!(write(&y, 16), violation(&x, ViolationKind::Input, 8, 16));
}

#[test]
fn padded_tensors_travel_to_the_device_and_back() {
    let mut arena = DeviceArena::new(support::device(), Contract::NAN);
    let host = HostTensor::from_i32(&[2, 2, 3], &(0..12).collect::<Vec<_>>());
    let view = arena.upload("x", &host, &Layout::padded(&[2, 2, 3], 5), Role::Input).unwrap();
    assert_eq!(arena.download(&view).unwrap(), host);
}

// ---------------------------------------------------------------- tensors with huge strides

/// `[3, 5, 64]` in bf16, whose rows start `2^28 + 64` elements apart: the last one ends beyond 7
/// GiB.
const FAR_SHAPE: [usize; 3] = [3, 5, 64];
const FAR_ROW: i64 = 2 * ((1 << 28) + 64);

fn far_tensor() -> (HostTensor, Layout) {
    let values: Vec<f64> =
        (0..FAR_SHAPE.iter().product()).map(|i: usize| (i % 251) as f64).collect();
    let layout = Layout::of(&FAR_SHAPE, &[0, 1, 2], &[0, 0, 1 << 28]).unwrap();
    (HostTensor::from_f64(DType::Bf16, &FAR_SHAPE, &values), layout)
}

/// Bytes of physical memory of this process' addresses within `span`.
fn resident(span: (u64, u64)) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut kibibytes) = (false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let hex = |text| u64::from_str_radix(text, 16).ok();
        if let Some((start, end)) =
            first.split_once('-').and_then(|(a, b)| Some((hex(a)?, hex(b)?)))
        {
            inside = start < span.1 && span.0 < end;
        } else if inside && first == "Rss:" {
            kibibytes +=
                words.next().and_then(|number| number.parse::<u64>().ok()).expect("a number");
        }
    }
    1024 * kibibytes
}

#[test]
fn a_tensor_that_ends_beyond_32_bits_of_offset_travels_both_ways_in_a_few_pages() {
    let Some(device) = emulator() else { return };
    let (host, layout) = far_tensor();
    let round_trip = || {
        let start = Instant::now();
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let view = arena.upload("x", &host, &layout, Role::Input).unwrap();
        let output = arena.allocate("y", DType::Bf16, &FAR_SHAPE, &layout, Role::Output).unwrap();
        assert_eq!(arena.run(|_| Ok(())).unwrap(), []);
        assert_eq!(arena.download(&view).unwrap(), host);
        assert!(
            arena.download(&output).unwrap().bytes.iter().all(|&byte| byte == Contract::NAN.poison)
        );
        let took = start.elapsed();
        assert!(view.span().1 - view.span().0 > 7 << 30);
        for view in [view, output] {
            let pages = resident(view.span()).div_ceil(4096);
            // Each of 15 rows with its bands is in at most two pages.
            assert!((15..=30).contains(&pages), "{} has {pages} pages", view.name);
        }
        took
    };
    // The fastest of a few: other tests run at the same time.
    let took = (0..5).map(|_| round_trip()).min().unwrap();
    eprintln!("two tensors of 7.5 GiB placed, inspected and read back in {took:?}");
    assert!(took < Duration::from_millis(100), "{took:?}");
}

#[test]
fn what_travels_to_the_device_in_any_layout_comes_back() {
    let shape = [3, 4, 8];
    let host = HostTensor::from_i32(&shape, &(0..96).collect::<Vec<_>>());
    let orders = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0]];
    let gaps = [[0, 0, 0], [0, 0, 5], [7, 3, 5], [0, 1 << 20, 0], [1 << 20, 3, 0], [0, 9, 1 << 20]];
    for (order, gaps) in orders.iter().flat_map(|order| gaps.iter().map(move |gaps| (order, gaps)))
    {
        for contract in [Contract::NAN, Contract::HUGE] {
            let layout = Layout::of(&shape, order, gaps).unwrap();
            let mut arena = DeviceArena::new(support::device(), contract);
            let view = arena.upload("x", &host, &layout, Role::InPlace).unwrap();
            assert_eq!(arena.download(&view).unwrap(), host, "{order:?} {gaps:?}");
            // The middle of every axis but the last, as a launcher would pass it.
            let at = 4 * (view.strides[0] + 2 * view.strides[1]);
            let row =
                TensorView { shape: vec![8], strides: vec![view.strides[2]], ..shifted(&view, at) };
            assert_eq!(
                arena.download(&row).unwrap().to_i32(),
                (48..56).collect::<Vec<_>>(),
                "{order:?} {gaps:?}"
            );
            assert_eq!(
                arena.run(|device| device.backend().fill(row.address, STRAY, 4)).unwrap(),
                []
            );
            assert_eq!(
                arena.download(&row).unwrap().to_i32()[..2],
                [0x5555_5555, 49],
                "{order:?} {gaps:?}"
            );
        }
    }
}

#[test]
fn a_write_beside_a_row_of_a_tensor_with_huge_strides_is_reported_with_name_and_offset() {
    let (host, layout) = far_tensor();
    for contract in [Contract::NAN, Contract::HUGE] {
        let mut arena = DeviceArena::new(support::device(), contract);
        let input = arena.upload("input", &host, &layout, Role::Input).unwrap();
        let output =
            arena.allocate("output", DType::Bf16, &FAR_SHAPE, &layout, Role::Output).unwrap();
        let write = |view: &TensorView, offset, bytes| {
            let address = view.address.wrapping_add_signed(offset);
            let found = arena.run(|device| device.backend().fill(address, STRAY, bytes)).unwrap();
            // Restored for the next write: what was written is poison in each of these places.
            device_fill(&arena, address, contract.poison, bytes);
            found
        };
        let (row, end) = (9 * FAR_ROW, 14 * FAR_ROW + 128);
        for (offset, bytes) in
            [(row - 512, 2), (row - 1, 1), (row + 128, 3), (row + 639, 1), (end - 128 - 7, 7)]
        {
            assert_eq!(
                write(&output, offset, bytes),
                violation(&output, ViolationKind::Gap, bytes, offset)
            );
            assert_eq!(
                write(&input, offset, bytes),
                violation(&input, ViolationKind::Input, bytes, offset)
            );
        }
        assert_eq!(write(&output, row - 2, 4), violation(&output, ViolationKind::Gap, 2, row - 2));
        assert_eq!(write(&output, row, 128), []);
        // After the last row: no 16 bytes fit between it and the guard page under `Contract::NAN`.
        if contract == Contract::HUGE {
            assert_eq!(write(&output, end, 16), violation(&output, ViolationKind::Guard, 16, end));
        } else {
            assert_eq!(write(&output, -16, 5), violation(&output, ViolationKind::Guard, 5, -16));
        }
        assert_eq!(write(&input, row + 5, 2), violation(&input, ViolationKind::Input, 2, row + 5));
    }
}

fn device_fill(arena: &DeviceArena<'_>, address: u64, byte: u8, bytes: usize) {
    arena.device().backend().fill(address, byte, bytes).unwrap();
}

#[test]
fn a_view_of_the_gap_between_far_rows_is_refused() {
    let (host, layout) = far_tensor();
    let mut arena = DeviceArena::new(support::device(), Contract::NAN);
    let x = arena.upload("x", &host, &layout, Role::Input).unwrap();
    let nowhere = TensorView {
        name: "nowhere".into(),
        shape: vec![64],
        strides: vec![1],
        ..shifted(&x, FAR_ROW / 2)
    };
    assert_refused(arena.download(&nowhere), "view", "`nowhere`");
}

#[test]
fn offsets_of_32_bits_into_a_tensor_with_huge_strides_are_faults_with_its_name() {
    let Some(device) = emulator() else { return };
    // Rows 2^30 elements apart: the third starts at offset 2^31, which is negative in 32 bits.
    let run = |offset: &str| {
        let device = device.with_tree(probe_tree(&format!("params.y[{offset}] = blockIdx.x;")));
        let layout = Layout::of(&[3, 64], &[0, 1], &[0, (1 << 30) - 64]).unwrap();
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let y = arena.allocate("y", DType::I32, &[3, 64], &layout, Role::Output).unwrap();
        let params = Params::new("probe").ptr("y", &y).i32("count", 0).unwrap();
        let result = arena.run(|device| {
            let config = LaunchConfig { grid: [3, 1, 1], block: [64, 1, 1], shared_bytes: 0 };
            device.kernel("probe.cu", &[], "probe")?.launch(config, &params)
        });
        (result, arena.download(&y).unwrap().to_i32())
    };
    let (result, y) = run("static_cast<int64_t>(blockIdx.x) * (1 << 30) + threadIdx.x");
    assert_eq!(result.unwrap(), []);
    assert_eq!(y, (0..192).map(|i| i / 64).collect::<Vec<_>>());
    for (offset, block, needle) in [
        (
            "static_cast<int>(blockIdx.x * (1u << 30) + threadIdx.x)",
            2,
            "`y` 8589934592 bytes before the start",
        ),
        (
            "(blockIdx.x + 0ull) * (1 << 29) + threadIdx.x",
            1,
            "`y` 2147483648 bytes past the start, in the gap between rows",
        ),
        ("(blockIdx.x * 4ull << 30) + threadIdx.x", 1, "`y` 8589934336 bytes past the end"),
    ] {
        let (_, found, thread, what) = fault(run(offset).0);
        assert_eq!(
            (found, thread),
            (format!("({block}, 0, 0)"), "(0, 0, 0)".to_owned()),
            "{offset}: {what}"
        );
        assert!(what.contains(needle), "{offset}: `{needle}` is not in `{what}`");
    }
}
