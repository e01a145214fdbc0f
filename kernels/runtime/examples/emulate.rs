//! Runs a CUDA kernel without a GPU, under several orders of its threads. In order, races are
//! looked for: prints the two accesses. Otherwise prints the number of wrong elements.
//!
//!     cargo run -p dsv4-runtime --example emulate

use std::error::Error;
use std::path::Path;

use dsv4_runtime::params::Params;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, HostTensor, LaunchConfig,
    SourceTree,
};

const TILE: usize = 64;

/// The number of wrong elements under a random schedule, or with threads in order where there is no
/// seed.
///
/// # Errors
/// No C++ compiler, and every fault of the kernel.
pub fn wrong_elements(seed: Option<u64>) -> Result<usize, Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tree = SourceTree::from_dir(&here.join("examples"))?
        .with_headers_of(&here.join("../cuda/base"))?;
    let device = Device::open(BackendKind::Emulator, DeviceOptions::of(tree))?;
    device.backend().set_schedule_seed(seed);

    // Guards surround each tensor, and poison fills unwritten memory.
    let mut arena = DeviceArena::new(&device, Contract::NAN);
    let x: Vec<f64> = (0..4 * TILE).map(|i| i as f64).collect();
    let x_view = arena.input("x", &HostTensor::from_f64(DType::F32, &[x.len()], &x))?;
    let y_view = arena.output("y", DType::F32, &[x.len()])?;
    let params =
        Params::new("next_value").ptr("x", &x_view).ptr("y", &y_view).i64("count", x.len())?;
    let launch = LaunchConfig { grid: [1, 1, 1], block: [TILE as u32, 1, 1], shared_bytes: 0 };
    let stray = arena
        .run(|device| device.kernel("next_value.cu", &[], "next_value")?.launch(launch, &params))?;
    assert!(stray.is_empty(), "{stray:?}");

    let y = arena.download(&y_view)?.to_f64();
    let next = |i: usize| if (i + 1).is_multiple_of(TILE) { x[i] } else { x[i + 1] };
    Ok((0..y.len()).filter(|&i| y[i] != next(i)).count())
}

fn main() -> Result<(), Box<dyn Error>> {
    match wrong_elements(None) {
        Err(fault) => println!("threads in order: {fault}"),
        Ok(wrong) => println!("threads in order: {wrong} elements are wrong"),
    }
    for seed in 1..=4 {
        println!("random schedule {seed}: {} elements are wrong", wrong_elements(Some(seed))?);
    }
    Ok(())
}
