//! The same codes on a GPU, for compute-sanitizer to watch, and what its logs say of them.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaFunction, LaunchConfig, PushKernelArg as _, result};
use cudarc::nvrtc::Ptx;
use dsv4_runtime::SourceTree;
use dsv4_runtime::cuda::Nvrtc;

use super::{GRAPHS, THREADS, VERTICES, graph, start_data};

/// What the sanitizer calls the kernel of a code: its place in the sorted list.
fn kernel_name(place: usize) -> String {
    format!("code_{place:03}")
}

/// Runs every `of`-th code, from the `first` one on, on all graphs. Prints a line for each.
///
/// # Errors
/// No GPU, no NVRTC; a code that does not compile.
pub fn run(codes: &[PathBuf], first: usize, of: usize) -> Result<(), Box<dyn Error>> {
    dsv4_runtime::cuda::require_driver()?;
    let (start, context, nvrtc) = (Instant::now(), CudaContext::new(0)?, Nvrtc::load()?);
    let (major, minor) = context.compute_capability()?;
    for (place, code) in codes.iter().enumerate().skip(first).step_by(of) {
        let name = kernel_name(place);
        let text = std::fs::read_to_string(code)?.replace("#include \"indigo_cuda.h\"", "");
        let kernel = format!("extern \"C\" __global__ void {name}(");
        // The host's functions follow, which NVRTC does not take.
        let of_device = text.split("void serial_code(").next().unwrap_or_default();
        let source = of_device.replace("__global__ void test_kernel(", &kernel);
        let files = BTreeMap::from([("code.cu".into(), source)]);
        let tree = SourceTree::from_files("a code of the suite".into(), files)?;
        let compiled = nvrtc.compile(&tree, "code.cu", &[], &format!("sm_{major}{minor}"))?;
        let module = context.load_module(Ptx::from_binary(compiled.cubin))?;
        let function = module.load_function(&name)?;
        let ended = (0..GRAPHS).try_for_each(|seed| launch(&context, &function, seed + 1));
        println!("{name} {}", ended.map_or_else(|error| error.to_string(), |()| "ran".into()));
    }
    println!("{:.3} seconds", start.elapsed().as_secs_f64());
    Ok(())
}

/// One run of a code. Each array is an allocation of its own, so that its end is the one that
/// memcheck knows.
fn launch(
    context: &std::sync::Arc<CudaContext>,
    function: &CudaFunction,
    seed: u32,
) -> Result<(), result::DriverError> {
    let (starts, targets) = graph(seed);
    let data = start_data(targets.len());
    let mut addresses = Vec::new();
    for values in [&starts, &targets, &data, &data] {
        let numbers: Vec<i32> = values.iter().map(|value| *value as i32).collect();
        // SAFETY: the context is current to this thread, and the memory is freed below.
        let address = unsafe { result::malloc_sync(size_of_val(numbers.as_slice()))? };
        // SAFETY: as many bytes as were allocated.
        unsafe { result::memcpy_htod_sync(address, &numbers)? };
        addresses.push(address);
    }
    let (stream, vertices) = (context.default_stream(), VERTICES as i32);
    let mut launch = stream.launch_builder(function);
    addresses.iter().for_each(|address| _ = launch.arg(address));
    launch.arg(&vertices);
    let grid_dim = (VERTICES as u32 + 2, 1, 1);
    // SAFETY: the kernel takes four pointers to such arrays, and a number. That it may have a bug is
    // the point: this process does nothing else.
    unsafe {
        launch.launch(LaunchConfig {
            grid_dim,
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        })?;
    }
    let ended = stream.synchronize();
    for address in addresses {
        // SAFETY: allocated above, and nothing runs any more.
        unsafe { result::free_sync(address)? };
    }
    ended
}

/// What a tool of the sanitizer said.
#[derive(Default)]
pub struct Tool {
    /// Places of the codes that it ran.
    ran: BTreeSet<usize>,
    /// Places of the codes that it reported.
    reported: BTreeSet<usize>,
    /// Seconds of all its processes.
    pub seconds: f64,
}

impl Tool {
    /// Whether it reported this code.
    pub fn reports(&self, place: usize) -> bool {
        self.reported.contains(&place)
    }

    /// How many codes ran under it.
    pub fn ran(&self) -> usize {
        self.ran.len()
    }

    fn read(&mut self, log: &str) {
        for line in log.lines() {
            let place = line.split("code_").nth(1).and_then(|rest| rest.get(..3)?.parse().ok());
            if let Some(seconds) = line.strip_suffix(" seconds").and_then(|s| s.parse::<f64>().ok())
            {
                self.seconds += seconds;
            } else if let Some(place) = place {
                self.ran.insert(place);
                if line.starts_with("=========") {
                    self.reported.insert(place);
                }
            }
        }
    }
}

/// The logs of a folder, by tool: `memcheck-0.log` is one of memcheck.
///
/// # Errors
/// A folder or a log that cannot be read.
pub fn tools(folder: &Path) -> std::io::Result<BTreeMap<String, Tool>> {
    let mut tools = BTreeMap::<String, Tool>::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let (tool, _) = name.split_once('-').unwrap_or((&name, ""));
        tools.entry(tool.to_owned()).or_default().read(&std::fs::read_to_string(&path)?);
    }
    Ok(tools)
}
