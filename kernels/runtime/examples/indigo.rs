//! Looks for the bugs of the Indigo suite (small CUDA graph codes, some with a planted bug) on the
//! emulator, and prints what was found by kind of bug.
//!
//!     cargo run --release -p dsv4-runtime --example indigo -- FOLDER [CODES.csv]
//!
//! FOLDER holds the suite's CUDA codes with `int` data, as its generator writes them
//! (github.com/burtscher/IndigoSuite). Each has one `test_kernel` of plain pointers. A bug counts
//! as found if some run ends with a fault: a race, or an access outside of a buffer.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dsv4_runtime::arena::Layout;
use dsv4_runtime::params::Params;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, DeviceArena, DeviceOptions, HostTensor, LaunchConfig,
    Role, RuntimeError, SourceTree,
};

/// Vertices of the graph, edges of each but the first and the last, which have none, and threads of
/// a block: more edges than threads, so that loops turn.
const VERTICES: usize = 10;
const EDGES: usize = 72;
const THREADS: u32 = 64;

/// The names of a code's planted bugs.
const BUGS: [&str; 5] = ["atomicBug", "boundsBug", "guardBug", "raceBug", "syncBug"];

/// What CUDA's own headers would declare, and the kernel that starts `test_kernel`.
const FRONT: &str = r#"#include "memory.h"
#include <cstdio>
#include <cstdlib>
template <typename T> inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> inline T max(T a, T b) { return a < b ? b : a; }
"#;
const BACK: &str = r#"
struct CodeParams { int* nindex; int* nlist; int* data1; int* data2; int32_t numv; };
KERNEL(code, CodeParams, 1024) { test_kernel(params.nindex, params.nlist, params.data1, params.data2, params.numv); }
"#;

/// Where each vertex's edges start, and the vertices that they lead to, at random.
fn graph(seed: u32) -> (Vec<f64>, Vec<f64>) {
    let of_vertex = |vertex: usize| vertex.clamp(1, VERTICES - 1) - 1;
    let starts = (0..=VERTICES).map(|vertex| (of_vertex(vertex) * EDGES) as f64).collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from((state >> 16) % VERTICES as u32)
    };
    (starts, (0..(VERTICES - 2) * EDGES).map(next).collect())
}

/// The first fault of a code on some graph, under the deterministic schedule, which looks for races
/// in a block, or a random one, which looks for races between blocks.
///
/// # Errors
/// Everything but a fault: a code that does not compile, no compiler.
fn fault_of(code: &Path) -> Result<Option<String>, Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(code)?.replace("#include \"indigo_cuda.h\"", "");
    let source = format!("{FRONT}{text}{BACK}");
    let tree = SourceTree::from_dir(&here.join("examples"))?
        .with_headers_of(&here.join("../cuda/base"))?
        .with_text("code.cu", source, "a code of the suite");
    let device = Device::open(BackendKind::Emulator, DeviceOptions::of(tree))?;
    let numbers = |values: &[f64]| HostTensor::from_f64(DType::I32, &[values.len()], values);
    for (schedule, seed) in [(None, 1), (None, 2), (Some(1), 3), (Some(2), 4)] {
        let (starts, targets) = graph(seed);
        let data: Vec<f64> = (0..targets.len()).map(|i| (i * 7 % VERTICES) as f64).collect();
        device.backend().set_schedule_seed(schedule);
        let mut arena = DeviceArena::new(&device, Contract::NAN);
        let nindex = arena.input("nindex", &numbers(&starts))?;
        let nlist = arena.input("nlist", &numbers(&targets))?;
        let layout = Layout::dense(&[data.len()]);
        let data1 = arena.upload("data1", &numbers(&data), &layout, Role::InPlace)?;
        let data2 = arena.upload("data2", &numbers(&data), &layout, Role::InPlace)?;
        let params = Params::new("code").ptr("nindex", &nindex).ptr("nlist", &nlist);
        let params = params.ptr("data1", &data1).ptr("data2", &data2).i32("numv", VERTICES)?;
        // More blocks than vertices, for codes in which a block has one.
        let grid = [VERTICES as u32 + 2, 1, 1];
        let launch = LaunchConfig { grid, block: [THREADS, 1, 1], shared_bytes: 0 };
        match arena.run(|device| device.kernel("code.cu", &[], "code")?.launch(launch, &params)) {
            Ok(stray) if stray.is_empty() => {}
            Ok(stray) => return Ok(Some(format!("{stray:?}"))),
            Err(RuntimeError::Fault { what, .. }) => return Ok(Some(what)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// All `.cu` files below a folder.
fn codes(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(codes(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Codes with a kind of bug, those whose bug was found, and those that do not compile.
#[derive(Default)]
struct Tally {
    codes: usize,
    found: usize,
    failed: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: indigo FOLDER [CODES.csv]";
    let all = codes(Path::new(&arguments.next().ok_or(usage)?))?;
    let codes = &all;
    let (start, next) = (Instant::now(), AtomicUsize::new(0));
    let results = Mutex::new(BTreeMap::new());
    let cores = std::thread::available_parallelism()?.get();
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(code) = codes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = fault_of(code).map_err(|error| error.to_string());
                    results.lock().expect("no thread panics").insert(code.as_path(), found);
                }
            });
        }
    });
    let (mut tallies, mut lines) = (BTreeMap::<String, Tally>::new(), String::new());
    for (code, result) in results.into_inner().expect("no thread panics") {
        let name = code.file_stem().unwrap_or_default().to_string_lossy();
        let bugs: Vec<_> = BUGS.into_iter().filter(|bug| name.contains(bug)).collect();
        let kind = if bugs.is_empty() { "no bug".to_owned() } else { bugs.join(", ") };
        let tally = tallies.entry(kind).or_default();
        tally.codes += 1;
        tally.found += usize::from(matches!(result, Ok(Some(_))));
        tally.failed += usize::from(result.is_err());
        let said = result.unwrap_or_else(Some).unwrap_or_default().replace('"', "'");
        writeln!(lines, "{name},{},\"{said}\"", bugs.join("+"))?;
    }
    println!("| planted bug | codes | faults | not compiled |\n| --- | --: | --: | --: |");
    for (kind, Tally { codes, found, failed }) in &tallies {
        println!("| {kind} | {codes} | {found} | {failed} |");
    }
    println!("\n{} codes, {:.0} s on {cores} cores", codes.len(), start.elapsed().as_secs_f64());
    if let Some(file) = arguments.next() {
        std::fs::write(file, lines)?;
    }
    Ok(())
}
