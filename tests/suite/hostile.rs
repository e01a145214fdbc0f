//! Kernels that end, stall or corrupt the process in which they run: each is a fault of its own
//! launch, and the device continues.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dsv4_runtime::arena::Violation;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::params::Params;
use dsv4_runtime::remote::RemoteOptions;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, HostTensor, LaunchConfig,
    Result, RuntimeError, SourceTree,
};

use dsv4_parity::record::{Report, Verdict};

use crate::command_line::{Parity, binary, changed_kernels};
use crate::emulator::{emulator, probe_tree};
use crate::extent::{attacked, everything, left_out};
use crate::support::{backend, fixtures};

/// Rooms whose changes run the long tests of this file.
const EMULATOR: [&str; 2] = ["kernels/runtime/src/", "kernels/runtime/emulator/"];

/// The C library's functions that hostile kernels call; static constructors are here too.
const DECLARATIONS: &str = "
    #include <cassert>
    #include <pthread.h>
    #include <signal.h>
    #include <stdlib.h>
    #include <unistd.h>
";

/// The probe with declarations before it.
fn hostile(before: &str, body: &str) -> SourceTree {
    let tree = probe_tree(body);
    let text = format!("{DECLARATIONS}{before}\n{}", tree.text("probe.cu").unwrap());
    tree.with_text("probe.cu", text, "a hostile kernel")
}

/// Runs a probe of one block of 64 threads. Returns y, an i32 `[64]`, unless the launch failed.
fn run(device: &Device, tree: SourceTree) -> Result<Vec<i32>> {
    run_blocks(device, tree, 1)
}

fn run_blocks(device: &Device, tree: SourceTree, blocks: u32) -> Result<Vec<i32>> {
    let device = device.with_tree(tree);
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let y = arena.output("y", DType::I32, &[64])?;
    let params = Params::new("probe").ptr("y", &y).i32("count", 0)?;
    let violations: Vec<Violation> = arena.run(|device| {
        let config = LaunchConfig { grid: [blocks, 1, 1], block: [64, 1, 1], shared_bytes: 0 };
        device.kernel("probe.cu", &[], "probe")?.launch(config, &params)
    })?;
    assert_eq!(violations, []);
    arena.download(&y).map(|y: HostTensor| y.to_i32())
}

/// A GPU with a short time limit; `None` where another backend is under test.
fn gpu() -> Option<Device> {
    if backend() != BackendKind::Cuda {
        eprintln!("skipped: this test is about a GPU, and PARITY_BACKEND does not demand one");
        return None;
    }
    let remote = Some(RemoteOptions { time_limit: Duration::from_secs(10) });
    Some(
        Device::open(backend(), DeviceOptions { remote, ..dsv4_kernels::device_options() })
            .expect("the GPU opens"),
    )
}

#[test]
fn a_fault_on_a_gpu_fails_its_own_launch_and_the_next_one_gets_a_new_context() {
    let Some(device) = gpu() else { return };
    for (statement, needle) in [
        ("*(volatile int*)8 = 1;", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("*(volatile int*)((char*)params.y + 1) = 1;", "CUDA_ERROR_MISALIGNED_ADDRESS"),
        ("asm volatile(\"trap;\");", "CUDA_ERROR_"),
        ("for (volatile int i = 0; ; i = 0) {}", "did not end within 10 s"),
    ] {
        let body = format!("if (threadIdx.x == 5) {{ {statement} }} params.y[threadIdx.x] = 1;");
        let error = run(&device, probe_tree(&body)).expect_err(statement);
        let is_its_own = matches!(&error, RuntimeError::Cuda { .. } | RuntimeError::Fault { .. });
        let words = error.to_string();
        assert!(
            is_its_own && words.contains(needle) && words.contains("probe"),
            "{statement}: {words}"
        );
        assert_works(&device, statement);
    }
}

/// Checks that the device still runs correct kernels.
fn assert_works(device: &Device, after: &str) {
    let ran = run(device, probe_tree("params.y[threadIdx.x] = threadIdx.x;"));
    assert_eq!(
        ran.unwrap_or_else(|e| panic!("after {after}: {e}")),
        (0..64).collect::<Vec<_>>(),
        "after {after}"
    );
}

/// Places where thread 5 does something, and the number of blocks of the launch; the last block has
/// that thread. The places are: at the start; after a barrier, in the last of three blocks; in the
/// third iteration of a loop, while others wait for their warp.
const PLACES: [(&str, &str, u32); 3] = [
    ("if (threadIdx.x == 5) {", "}", 1),
    ("__syncthreads(); if (blockIdx.x == 2 && threadIdx.x == 5) {", "} __syncthreads();", 3),
    (
        "for (int step = 0; step < 4; ++step) { if (step == 2 && threadIdx.x == 5) {",
        "} __syncwarp(); }",
        1,
    ),
];

/// The fault's text for a kernel whose thread 5 does this, and the thread. Both are the same at
/// every place; a commit tries the first place.
fn said(device: &Device, before: &str, statement: &str) -> (String, String) {
    let places = if everything() { &PLACES[..] } else { &PLACES[..1] };
    let said: Vec<_> =
        places.iter().map(|place| said_at(device, before, statement, place)).collect();
    let (thread, what) = &said[0];
    assert!(
        said.iter().all(|said| said.0.contains(thread) && said.1 == *what),
        "{statement}: {said:?}"
    );
    said[0].clone()
}

fn said_at(
    device: &Device,
    before: &str,
    statement: &str,
    place: &(&str, &str, u32),
) -> (String, String) {
    let start = Instant::now();
    let (open, close, blocks) = place;
    let body = format!("{open} {statement} {close} params.y[threadIdx.x] = 1;");
    let error = run_blocks(device, hostile(before, &body), *blocks).expect_err(statement);
    // The time limit of a second, what a launch may take beyond it, and a compiler on a busy
    // machine.
    assert!(start.elapsed() < Duration::from_secs(20), "{statement} took {:?}", start.elapsed());
    assert_works(device, statement);
    match error {
        RuntimeError::Fault { kernel, block, thread, what } => {
            assert_eq!(kernel, "probe");
            // Damage to files shows only when the kernel has ended. If every thread ends at once,
            // any block may be reported.
            let its = format!("({}, 0, 0)", blocks - 1);
            assert!(
                block.contains(&its) || what.contains("files"),
                "{statement}: {what} in block {block}"
            );
            attacked("kernels that end, stall or deceive their process", 1);
            (thread, what)
        }
        other => panic!("{statement}: expected a fault, not {other}"),
    }
}

#[test]
fn a_kernel_that_ends_its_process_fails_its_own_launch_with_block_and_thread_and_no_other() {
    let Some(device) = emulator() else { return };
    for (statement, needle) in [
        ("exit(0);", "ended its process, with code 0"),
        ("exit(3);", "ended its process, with code 3"),
        ("quick_exit(0);", "ended its process, with code 0"),
        ("_exit(0);", "ended its process, with code 0"),
        ("execl(\"/bin/true\", \"true\", nullptr);", "ended its process, with code 0"),
        ("kill(getpid(), SIGKILL);", "was killed by signal 9 (SIGKILL)"),
        ("kill(0, SIGTERM);", "was killed by signal 15"),
        ("signal(SIGSEGV, SIG_DFL); *(volatile int*)8 = 1;", "was killed by signal 11 (SIGSEGV)"),
        ("pthread_exit(nullptr);", ""),
    ] {
        let (thread, what) = said(&device, "", statement);
        assert_eq!(thread, "(5, 0, 0)", "{statement}: {what}");
        assert!(what.contains(needle), "{statement}: `{needle}` is not in `{what}`");
    }
}

#[test]
fn a_kernel_that_closes_the_files_of_its_process_is_a_fault() {
    let Some(device) = emulator() else { return };
    let (_, what) = said(&device, "", "for (int i = 0; i < 4096; ++i) close(i);");
    assert_eq!(what, "closed the files of its process");
}

#[test]
fn an_abort_a_failed_assertion_and_an_exception_are_faults_of_their_thread() {
    let Some(device) = emulator() else { return };
    for (before, statement) in [
        ("", "abort();"),
        ("", "assert(params.count == 1);"),
        ("", "throw 1;"),
        ("struct Thrown { ~Thrown() noexcept(false) { throw 2; } };", "Thrown thrown;"),
        (
            "__attribute__((noinline)) void beyond(volatile char* x, int n) { for (int i = 0; i < n; ++i) x[i] = 1; }",
            "volatile char x[64]; beyond(x, 128 + params.count); params.y[0] = x[0];",
        ),
    ] {
        let (thread, what) = said(&device, before, statement);
        assert_eq!(thread, "(5, 0, 0)", "{statement}: {what}");
        assert!(what.contains("aborted"), "{statement}: {what}");
    }
}

/// Writes that hide from the compiler which array they use, and two static shared arrays.
const BEYOND: &str = "
    __attribute__((noinline)) void put(volatile int* array, int at, int value) { array[at] = value; }
    __attribute__((noinline)) int get(volatile int* array, int at) { return array[at]; }
";
const SHARED_ARRAYS: &str = "
    __shared__ int first[32]; __shared__ int second[40];
    first[threadIdx.x % 32] = 1; second[threadIdx.x % 40] = 2; __syncthreads();
";

#[test]
fn a_write_beyond_a_static_shared_array_is_a_fault_of_its_thread_that_names_the_array() {
    let Some(device) = emulator() else { return };
    for (statement, needle) in [
        ("put(first, 32, 7);", "`first`, 0 bytes behind it"),
        ("put(first, 33, -1);", "`first`, 4 bytes behind it"),
        ("put(second, 40 + params.count, 7);", "`second`, 0 bytes behind it"),
        ("put(first, -1, 7);", "`first`, 1 bytes before it"),
        ("put(second, -3, 7);", "`second`, 9 bytes before it"),
        // 1 KB at once, and 500 bytes further on, in the middle of the padding.
        ("for (int i = 0; i < 256; ++i) put(first, 32 + i, i);", "`first`, 0 bytes behind it"),
        ("put(second, 40 + 125, 0);", "`second`, 500 bytes behind it"),
    ] {
        let body = format!(
            "{SHARED_ARRAYS} if (threadIdx.x == 5) {{ {statement} }} params.y[threadIdx.x] = first[0];"
        );
        let error = run(&device, hostile(BEYOND, &body)).expect_err(statement).to_string();
        assert!(
            error.contains("static shared variable") && error.contains(needle),
            "{statement}: {error}"
        );
        // Bytes far from the array are checked when the block has ended.
        assert!(
            error.contains("thread (5, 0, 0)") || statement.contains("125"),
            "{statement}: {error}"
        );
        attacked("kernels that end, stall or deceive their process", 1);
        assert_works(&device, statement);
    }
}

#[test]
fn what_is_read_beyond_a_static_shared_array_is_no_number_that_passes_for_one() {
    let Some(device) = emulator() else { return };
    let body = format!(
        "{SHARED_ARRAYS} params.y[threadIdx.x] = get(threadIdx.x % 2 ? second : first, 40);"
    );
    let read = run(&device, hostile(BEYOND, &body)).expect("reads are no faults");
    assert!(read.iter().all(|&bits| f32::from_bits(bits as u32).is_nan()), "{read:x?}");
    attacked("kernels that end, stall or deceive their process", 1);
}

#[test]
fn what_a_kernel_adds_to_a_local_variable_that_nobody_set_is_no_sum() {
    let Some(device) = emulator() else { return };
    for (declared, added) in [
        ("float sum;", "sum += threadIdx.x;"),
        (
            "float sums[8];",
            "sums[(threadIdx.x + params.count) % 8] += 1; float sum = sums[threadIdx.x % 8];",
        ),
        (
            "float sums[8];",
            "for (int i = 0; i < 8; ++i) put((int*)sums, i, get((int*)sums, i)); float sum = sums[3];",
        ),
    ] {
        // The old contents of the stack are zero on some machines.
        let body = format!("{declared} {added} params.y[threadIdx.x] = __float_as_int(sum);");
        let sums = run(&device, hostile(BEYOND, &body)).expect("it runs");
        assert!(
            sums.iter().all(|&bits| f32::from_bits(bits as u32) < -1e38),
            "{declared} {added}: {sums:x?}"
        );
        attacked("kernels that end, stall or deceive their process", 1);
    }
}

#[test]
fn a_wait_without_end_is_stopped_wherever_it_waits() {
    if left_out(&EMULATOR) {
        return;
    }
    let Some(device) = emulator() else { return };
    for statement in [
        "for (;;) usleep(100000);",
        "pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER; pthread_mutex_lock(&m); pthread_mutex_lock(&m);",
        "for (;;) pause();",
        "raise(SIGSTOP);",
        "sigset_t all; sigfillset(&all); pthread_sigmask(SIG_BLOCK, &all, nullptr); for (;;) usleep(1000);",
    ] {
        let (thread, what) = said(&device, "", statement);
        assert_eq!(
            (thread.as_str(), what.as_str()),
            ("(5, 0, 0)", "did not end within the time limit"),
            "{statement}"
        );
    }
}

#[test]
fn a_static_constructor_that_ends_its_process_is_an_error_of_its_module() {
    if left_out(&EMULATOR) {
        return;
    }
    let Some(device) = emulator() else { return };
    for (constructor, needle) in [
        ("exit(0);", "ended its process, with code 0"),
        ("_exit(7);", "ended its process, with code 7"),
        ("abort();", "was killed by signal 6 (SIGABRT)"),
        ("for (;;) pause();", "did not end within the time limit"),
    ] {
        let before = format!("struct Begin {{ Begin() {{ {constructor} }} }} begin;\n");
        let error = run(&device, hostile(&before, "params.y[threadIdx.x] = 1;"))
            .expect_err(constructor)
            .to_string();
        let expected = format!("loading `probe.cu`: a static constructor {needle}");
        assert_eq!(error, expected);
        attacked("kernels that end, stall or deceive their process", 1);
        assert_works(&device, constructor);
    }
}

#[test]
fn a_kernel_that_writes_to_every_file_of_its_process_deceives_nobody() {
    let Some(device) = emulator() else { return };
    let answer = r#"{\"Exports\":{\"params_size\":1,\"params_hash\":1,\"max_threads\":1,\"shared_bytes\":null}}"#;
    let statement = format!(
        "char text[] = \"{answer}\"; for (int i = 3; i < 64; ++i) {{ long zero = 0, n = sizeof text - 1;
             write(i, &n, 8); write(i, &zero, 8); write(i, text, n); }}"
    );
    let (_, what) = said(&device, "", &statement);
    assert!(what.contains("wrote to the files of its process"), "{what}");
}

#[test]
fn a_kernel_may_print_fork_and_use_half_a_megabyte_of_local_memory() {
    let Some(device) = emulator() else { return };
    for (before, statement) in [
        ("", "printf(\"of a kernel\\n\"); fflush(stdout);"),
        ("", "if (fork() == 0) _exit(0);"),
        (
            "__attribute__((noinline)) int filled(int n) { volatile int x[125000]; for (int i = 0; i < 125000; ++i) x[i] = n; return x[7]; }",
            "params.y[5] = filled(3);",
        ),
    ] {
        let body = format!("if (threadIdx.x == 5) {{ {statement} }} params.y[threadIdx.x] = 1;");
        assert_eq!(run(&device, hostile(before, &body)).expect(statement), [1; 64]);
    }
}

#[test]
fn a_kernel_that_takes_all_memory_gets_none_and_the_machine_keeps_its_own() {
    let Some(device) = emulator() else { return };
    // One page of each is used, so that the mapping takes memory.
    let statement = "for (;;) *static_cast<volatile char*>(malloc(1 << 30)) = 1;";
    let (thread, what) = said(&device, "", statement);
    assert_eq!(thread, "(5, 0, 0)");
    assert!(what.contains("null pointer"), "{what}");
}

#[test]
fn a_compiler_that_hangs_writes_garbage_or_dies_is_an_error_of_its_module() {
    let Some(device) = emulator() else { return };
    let compilers = tempfile::tempdir().unwrap();
    for (name, does, needle) in [
        ("hangs", "sleep 1000", "it did not end within 1 s"),
        (
            "garbage",
            "touch module.s; echo garbage > module.so",
            "it reported success, and the 8 bytes that it wrote are no",
        ),
        ("dies", "kill -9 $$", "could not compile `probe.cu`"),
    ] {
        let path = compilers.path().join(name);
        std::fs::write(
            &path,
            format!("#!/bin/sh\n[ \"$1\" = --version ] && echo {name} 1 && exit\n{does}\n"),
        )
        .unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let cache = tempfile::tempdir().unwrap();
        let emulator = EmulatorOptions {
            compile_limit: Duration::from_secs(1),
            compiler: Some(path),
            ..EmulatorOptions::default()
        };
        let options = DeviceOptions {
            emulator,
            cache_dir: cache.path().to_owned(),
            ..dsv4_kernels::device_options()
        };
        let broken = Device::open(BackendKind::Emulator, options).unwrap();
        let start = Instant::now();
        let error = run(&broken, probe_tree("params.y[threadIdx.x] = 1;")).expect_err(name);
        assert!(
            matches!(error, RuntimeError::Compile { .. }) && error.to_string().contains(needle),
            "{error}"
        );
        assert!(start.elapsed() < Duration::from_secs(20), "{name}");
        attacked("compilers that hang, die or lie", 1);
    }
    assert_works(&device, "compilers that do not");
}

/// Whether a process exists and is not a zombie.
fn runs(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat"));
    status.is_ok_and(|status| {
        !status.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z')
    })
}

#[test]
fn what_a_kernel_forks_off_ends_with_its_device() {
    let Some(device) = emulator() else { return };
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let statement = format!(
        "if (fork() == 0) {{
            setsid();
            FILE* file = fopen(\"{0}.new\", \"w\");
            fprintf(file, \"%d\", getpid());
            fclose(file);
            rename(\"{0}.new\", \"{0}\");
            for (;;) pause();
        }}",
        pid.display()
    );
    let body = format!("if (threadIdx.x == 5) {{ {statement} }} params.y[threadIdx.x] = 1;");
    assert_eq!(run(&device, hostile("", &body)).expect("it runs"), [1; 64]);
    let start = Instant::now();
    while !pid.exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "the fork never ran");
        std::thread::sleep(Duration::from_millis(10));
    }
    let forked = std::fs::read_to_string(&pid).unwrap().parse().expect("a number");
    assert!(runs(forked), "it ended by itself");
    drop(device);
    let start = Instant::now();
    while runs(forked) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "what the kernel forked off outlives its device"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_harness_that_is_killed_leaves_no_worker_behind_even_in_the_midst_of_a_launch() {
    if emulator().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let sigmoid = "DEVICE float sigmoid(float x) {";
    let waits = format!(
        "extern \"C\" {{ int getpid(); int usleep(unsigned); }}
         static void wait_for_ever() {{
             FILE* file = fopen(\"{0}.new\", \"w\");
             fprintf(file, \"%d\", getpid());
             fclose(file);
             rename(\"{0}.new\", \"{0}\");
             for (;;) usleep(1000);
         }}
         {sigmoid} wait_for_ever();",
        pid.display()
    );
    let kernels = changed_kernels(dir.path(), "swiglu.h", sigmoid, &waits);
    let mut harness = Command::new(binary())
        .args([
            "run",
            "--backend",
            "emulator",
            "--ops",
            "swiglu",
            "--cases",
            "0",
            "--edge-cases",
            "1",
            "--kernels",
        ])
        .arg(kernels)
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let worker = loop {
        if let Some(worker) = std::fs::read_to_string(&pid).ok().and_then(|text| text.parse().ok())
        {
            break worker;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "the kernel never ran");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(worker != harness.id() && runs(worker), "the kernel runs in the harness itself");
    harness.kill().unwrap();
    harness.wait().unwrap();
    let killed = Instant::now();
    while runs(worker) {
        assert!(killed.elapsed() < Duration::from_secs(10), "the worker outlives its harness");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_kernel_that_exits_fails_its_cases_in_run_replay_and_golden_and_the_sweep_goes_on() {
    if emulator().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let sigmoid = "DEVICE float sigmoid(float x) {";
    let exits = format!("extern \"C\" void _exit(int) noexcept;\n{sigmoid} _exit(0);");
    let kernels = changed_kernels(dir.path(), "swiglu.h", sigmoid, &exits).display().to_string();
    let folder = |name: &str| dir.path().join(name).display().to_string();
    let on_emulator = ["--backend", "emulator", "--kernels", &kernels];
    let (out, regressions) = (folder("out"), folder("regressions"));
    let sweep = [
        "run",
        "--ops",
        "swiglu,kv_cache_write",
        "--cases",
        "1",
        "--edge-cases",
        "3",
        "--schedules",
        "0",
    ];
    let places = ["--out", &out, "--regressions", &regressions];
    let output = Parity::new(&[&sweep[..], &on_emulator, &places].concat()).run();
    output.assert_code(1);
    assert!(output.stderr.contains("launch: kernel `swiglu_forward_"), "{}", output.stderr);
    assert!(output.stderr.contains("ended its process, with code 0"), "{}", output.stderr);
    let report = std::fs::read_to_string(dir.path().join("out/report.json")).unwrap();
    let report: Report = serde_json::from_str(&report).unwrap();
    let of =
        |name: &str| report.cases.iter().filter(|case| case.operator == name).collect::<Vec<_>>();
    assert!(
        of("swiglu").len() >= 4 && of("swiglu").iter().any(|case| case.verdict() == Verdict::Fail)
    );
    assert!(!of("kv_cache_write").is_empty());
    assert!(of("kv_cache_write").iter().all(|case| case.verdict() == Verdict::Pass));

    let failing =
        of("swiglu").into_iter().find(|case| case.verdict() == Verdict::Fail).expect("a case");
    Parity::new(&[&["replay", &failing.case.to_string()], &on_emulator[..]].concat())
        .run()
        .assert_code(1);
    let golden = fixtures().join("golden").display().to_string();
    let output =
        Parity::new(&[&["golden", &golden, "--ops", "swiglu"], &on_emulator[..]].concat()).run();
    output.assert_code(1);
    assert!(output.stdout.contains("ended its process, with code 0"), "{}", output.stdout);
}
