//! The other process has an emulator here, so that this is tested without a GPU.

use std::time::Instant;

use super::*;
use crate::matrix::Matrix;
use crate::params::{DeviceAddress, Params};
use crate::{Contract, DType, Device, DeviceArena, HostTensor, LaunchConfig};

fn remote(limit: Duration) -> Arc<RemoteBackend> {
    let cache = super::super::cache::ModuleCache::default_dir();
    let backend =
        RemoteBackend::open(BackendKind::Emulator, cache, RemoteOptions { time_limit: limit });
    Arc::new(backend.expect("the emulator opens in another process"))
}

/// Adds `count` to x, an i32 `[32]`; `before` is placed at the start of the kernel.
fn probe(before: &str) -> SourceTree {
    let text = format!(
        "#include \"memory.h\"\n\
         struct ProbeParams {{ int32_t* y; const int32_t* x; int32_t count; }};\n\
         PARAMS_LAYOUT(ProbeParams, y, x, count)\n\
         KERNEL(probe, ProbeParams, 32) {{ {before} params.y[threadIdx.x] = params.x[threadIdx.x] + params.count; }}\n"
    );
    crate::testing::kernels().with_text("probe.cu", text, "a probe")
}

fn launch(device: &Device, y: u64, x: u64, count: usize) -> Result<()> {
    let config = LaunchConfig { grid: [1; 3], block: [32, 1, 1], shared_bytes: 0 };
    let params = Params::new("probe")
        .ptr("y", DeviceAddress(y))
        .ptr("x", DeviceAddress(x))
        .i32("count", count)?;
    device.kernel("probe.cu", &[], "probe")?.launch(config, &params)
}

fn numbers(add: i32) -> HostTensor {
    HostTensor::from_i32(&[32], &(0..32).map(|x| x + add).collect::<Vec<_>>())
}

/// Whether the device computes the sum correctly.
fn run(device: &Device) -> Result<bool> {
    let mut arena = DeviceArena::new(device, Contract::NAN);
    let x = arena.input("x", &numbers(0))?;
    let y = arena.output("y", DType::I32, &[32])?;
    let violations = arena.run(|device| launch(device, y.address, x.address, 5))?;
    Ok(violations.is_empty() && arena.download(&y)? == numbers(5))
}

#[test]
fn a_device_elsewhere_loads_launches_copies_and_takes_time_as_one_in_this_process() {
    let backend = remote(Duration::from_secs(60));
    let device = Device::of(backend.clone(), probe(""));
    assert_eq!(device.environment().backend, BackendKind::Emulator);
    assert!(run(&device).unwrap());
    let source = numbers(0);
    let bytes = source.bytes.len();
    let [x, y] =
        ["x", "y"].map(|name| backend.allocate(name, bytes, Placement::FlushBack).unwrap());
    backend.upload(x.address, &source.bytes).unwrap();
    let took = backend
        .time(&mut || (0..3).try_for_each(|_| launch(&device, y.address, x.address, 1)))
        .unwrap();
    assert!(took > Duration::ZERO);
    // What is recorded runs when it is replayed, not before; what waits for the host is refused.
    let recorder = backend.recorder().expect("emulators record");
    let mut read = vec![0; bytes];
    backend.fill(y.address, 0, bytes).unwrap();
    let recorded = recorder.record(&mut || launch(&device, y.address, x.address, 1)).unwrap();
    backend.download(y.address, &mut read).unwrap();
    assert_eq!(read, vec![0; bytes]);
    recorded.launch().unwrap();
    backend.download(y.address, &mut read).unwrap();
    assert_eq!(read, numbers(1).bytes);
    let refused = recorder.record(&mut || backend.upload(x.address, &source.bytes));
    let refused = refused.err().expect("an upload").to_string();
    assert!(refused.contains("recording work"), "{refused}");
    backend.copy(x.address, y.address, bytes).unwrap();
    backend.fill(y.address, 7, 4).unwrap();
    backend.download(x.address, &mut read).unwrap();
    assert_eq!(read, numbers(1).bytes);
    backend.download(y.address, &mut read[..4]).unwrap();
    assert_eq!(read[..4], [7; 4]);
    let huge = backend
        .reserve("huge", 1 << 40, &[0..8, (1 << 39)..(1 << 39) + 8], Placement::FlushFront)
        .unwrap();
    assert_eq!((huge.allocation.bytes, huge.touched.len()), (1 << 40, 2));
    let row = |address| Matrix { address, stride: 8, extents: [1, 8], step: 0 };
    let [x, y] = [x, y].map(|allocation| (allocation, row(allocation.address)));
    backend.upload(x.1.address, &HostTensor::from_f64(DType::Bf16, &[8], &[1.5; 8]).bytes).unwrap();
    let product = MatrixProduct {
        a: x.1,
        b: x.1,
        transposed: [false, true],
        before: None,
        out: Matrix { extents: [1, 1], ..y.1 },
        dtype: DType::F32,
        count: 1,
    };
    assert!(backend.matrix_library().unwrap().multiply(&product).unwrap());
    backend.download(y.1.address, &mut read[..4]).unwrap();
    assert_eq!(read[..4], 18f32.to_ne_bytes());
    for allocation in [x.0, y.0, huge.allocation] {
        backend.free(&allocation);
    }
    assert!(backend.synchronize().is_ok());
}

#[test]
fn what_goes_wrong_there_is_the_same_error_here_and_ends_a_span_that_has_begun() {
    let backend = remote(Duration::from_secs(60));
    let broken = Device::of(backend.clone(), probe("this does not compile"));
    assert!(matches!(run(&broken), Err(RuntimeError::Compile { .. })));
    let device = Device::of(backend.clone(), probe("if (threadIdx.x == 3) params.y[1 << 20] = 1;"));
    let Err(RuntimeError::Fault { kernel, block, thread, .. }) = run(&device) else {
        panic!("it must fail")
    };
    assert_eq!(
        (kernel.as_str(), block.as_str(), thread.as_str()),
        ("probe", "(0, 0, 0)", "(3, 0, 0)")
    );
    let process = backend.process();
    let refused = backend.time(&mut || Err(RuntimeError::argument("probe", "x", "no")));
    assert!(matches!(refused, Err(RuntimeError::Argument { .. })), "{refused:?}");
    assert!(run(&Device::of(backend.clone(), probe(""))).unwrap());
    assert_eq!(
        (process.is_some(), backend.process()),
        (true, process),
        "none of it ends the process"
    );
    let missing =
        RemoteBackend::open(BackendKind::External, PathBuf::new(), RemoteOptions::default());
    assert!(missing.is_err_and(|error| error.to_string().contains("no device of ours")));
}

#[test]
fn a_request_that_takes_too_long_is_the_fault_of_what_was_launched_and_the_next_case_gets_a_new_process()
 {
    let backend = remote(Duration::from_secs(1));
    let waits = Device::of(backend.clone(), probe("for (volatile int i = 0;; ++i) {}"));
    let right = Device::of(backend.clone(), probe(""));
    assert!(run(&right).unwrap());
    let process = backend.process();
    let start = Instant::now();
    let Err(RuntimeError::Fault { kernel, what, .. }) = run(&waits) else { panic!("it must fail") };
    assert_eq!((kernel.as_str(), what.as_str()), ("probe", "did not end within 1 s"));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert!(run(&right).unwrap(), "the module is loaded again");
    assert_ne!(backend.process(), process);
}

#[test]
fn memory_of_a_process_that_is_gone_is_never_taken_for_that_of_the_next() {
    let backend = remote(Duration::from_secs(60));
    let device = Device::of(backend.clone(), probe(""));
    assert!(run(&device).unwrap());
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let x = arena.input("x", &numbers(0)).unwrap();
    let process = backend.process().unwrap();
    // SAFETY: the process of this backend only.
    unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) };
    let error = arena.download(&x).expect_err("it is gone");
    assert!(error.to_string().contains("signal 9"), "{error}");
    assert!(arena.output("y", DType::I32, &[32]).is_err(), "x is in the way");
    assert!(backend.process().is_none());
    drop(arena);
    assert!(run(&device).unwrap());
    assert!(backend.process().is_some_and(|new| new != process));
}
