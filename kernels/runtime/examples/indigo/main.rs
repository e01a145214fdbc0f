//! Looks for the bugs of the Indigo suite (small CUDA graph codes, some with a planted bug) on the
//! emulator, and prints what was found by kind of bug.
//!
//!     cargo run --release -p dsv4-runtime --example indigo -- FOLDER [--logs LOGS]
//!
//! FOLDER holds the suite's CUDA codes with `int` data, as its generator writes them
//! (github.com/burtscher/IndigoSuite). Each has one `test_kernel` of plain pointers. A bug counts
//! as found if some run ends with a fault: a race, or an access outside of a buffer.
//!
//! LOGS is a folder of what compute-sanitizer said of the same codes on a GPU, file by file
//! (`memcheck-0.log` and so on). They are then counted in the same table:
//!
//!     compute-sanitizer --tool TOOL --destroy-on-device-error kernel indigo FOLDER --gpu I/N
//!
//! runs every N-th code from the I-th on, each on the same graphs.

mod sanitizer;

use std::collections::BTreeMap;
use std::error::Error;
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

use sanitizer::Tool;

/// Vertices of the graph, edges of each but the first and the last, which have none, and threads of
/// a block: more edges than threads, so that loops turn.
const VERTICES: usize = 10;
const EDGES: usize = 72;
const THREADS: u32 = 64;

/// Random graphs on which each code runs.
const GRAPHS: u32 = 4;

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

/// What both data arrays hold at the start.
fn start_data(length: usize) -> Vec<f64> {
    (0..length).map(|i| (i * 7 % VERTICES) as f64).collect()
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
    for seed in 1..=GRAPHS {
        let (starts, targets) = graph(seed);
        let data = start_data(targets.len());
        device.backend().set_schedule_seed((seed > GRAPHS / 2).then_some(u64::from(seed)));
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

/// The fault of each code in turn, on all cores.
fn faults(codes: &[PathBuf], cores: usize) -> Vec<Result<Option<String>, String>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(code) = codes.get(place) else { break };
                    let found = fault_of(code).map_err(|error| error.to_string());
                    results.lock().expect("no thread panics").insert(place, found);
                }
            });
        }
    });
    results.into_inner().expect("no thread panics").into_values().collect()
}

/// The planted bugs of a code, as its name says.
fn kind(code: &Path) -> String {
    let name = code.file_stem().unwrap_or_default().to_string_lossy();
    let bugs: Vec<_> = BUGS.into_iter().filter(|bug| name.contains(bug)).collect();
    if bugs.is_empty() { "no bug".to_owned() } else { bugs.join(", ") }
}

/// Prints the table: a row for each kind of bug, and columns for the emulator and each tool.
fn print(
    codes: &[PathBuf],
    faults: &[Result<Option<String>, String>],
    tools: &BTreeMap<String, Tool>,
) {
    let mut kinds = BTreeMap::<String, Vec<usize>>::new();
    for (place, code) in codes.iter().enumerate() {
        kinds.entry(kind(code)).or_default().push(place);
    }
    let names: String = tools.keys().map(|tool| format!(" {tool} |")).collect();
    println!("| planted bug | codes | faults | not compiled |{names}");
    println!("| --- | --: | --: | --: |{}", " --: |".repeat(tools.len()));
    for (kind, places) in &kinds {
        let count = |what: fn(&Result<Option<String>, String>) -> bool| {
            places.iter().filter(|place| what(&faults[**place])).count()
        };
        let (found, failed) = (count(|fault| matches!(fault, Ok(Some(_)))), count(Result::is_err));
        let reported =
            |tool: &Tool| places.iter().filter(|place| tool.reports(**place)).count().to_string();
        let said: String = tools.values().map(|tool| format!(" {} |", reported(tool))).collect();
        println!("| {kind} | {} | {found} | {failed} |{said}", places.len());
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let (folder, logs) = match arguments[..] {
        [folder] => (folder, None),
        [folder, "--logs", logs] => (folder, Some(logs)),
        [folder, "--gpu", share] => {
            let (first, of) = share.split_once('/').ok_or("--gpu I/N")?;
            let of: usize = of.parse()?;
            return sanitizer::run(&codes(Path::new(folder))?, first.parse()?, of.max(1));
        }
        _ => return Err("usage: indigo FOLDER [--logs LOGS | --gpu I/N]".into()),
    };
    let tools = logs.map_or(Ok(BTreeMap::new()), |logs| sanitizer::tools(Path::new(logs)))?;
    let codes = codes(Path::new(folder))?;
    let (start, cores) = (Instant::now(), std::thread::available_parallelism()?.get());
    let faults = faults(&codes, cores);
    print(&codes, &faults, &tools);
    println!("\n{} codes, {:.0} s on {cores} cores", codes.len(), start.elapsed().as_secs_f64());
    if !tools.is_empty() {
        let by_some = |place: &usize| tools.values().any(|tool| tool.reports(*place));
        let found = faults.iter().filter(|fault| matches!(fault, Ok(Some(_)))).count();
        let reported = (0..codes.len()).filter(by_some).count();
        println!("{found} codes end with a fault; some tool reports {reported}");
    }
    for (name, tool) in &tools {
        let (ran, seconds) = (tool.ran(), tool.seconds);
        println!("compute-sanitizer {name}: {ran} codes, {seconds:.0} s of its processes");
    }
    Ok(())
}
