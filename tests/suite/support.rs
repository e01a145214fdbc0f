//! Shared by the tests.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once};

use dsv4_parity::judge::turns;
use dsv4_parity::record::CaseRecord;
use dsv4_parity::sweep::Observer;
use dsv4_runtime::supervisor::temporary_folder;
use dsv4_runtime::{BackendKind, Device, cuda};

/// The backend that `PARITY_BACKEND` names; the emulator when it names none.
pub fn backend() -> BackendKind {
    match std::env::var("PARITY_BACKEND").as_deref() {
        Ok("cuda") => BackendKind::Cuda,
        Ok("emulator" | "auto" | "") | Err(_) => BackendKind::Emulator,
        Ok(other) => panic!("PARITY_BACKEND is `{other}`, not cuda or emulator"),
    }
}

/// A thread's device; when the thread ends, the device goes to another thread.
struct Own(&'static Device);

impl Drop for Own {
    fn drop(&mut self) {
        idle().push(self.0);
    }
}

thread_local! {
    static OWN: OnceCell<Own> = const { OnceCell::new() };
}

/// Devices that no thread uses at the moment: the tests open as many as threads use at the same
/// time.
fn idle() -> MutexGuard<'static, Vec<&'static Device>> {
    static IDLE: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());
    IDLE.lock().unwrap_or_else(|e| e.into_inner())
}

/// The device under test, with the embedded kernels, used by no other thread. On a GPU it has a
/// separate stream and context, in a separate process; on the emulator a separate schedule.
pub fn device() -> &'static Device {
    let take = || {
        let idle = idle().pop();
        Own(idle.unwrap_or_else(|| Box::leak(Box::new(open()))))
    };
    OWN.with(|own| own.get_or_init(take).0)
}

fn open() -> Device {
    let opened = Device::open(backend(), dsv4_kernels::device_options());
    let device = opened.unwrap_or_else(|error| panic!("no device to test on: {error}"));
    if backend() == BackendKind::Cuda {
        static DIVIDED: Once = Once::new();
        DIVIDED.call_once(|| {
            divide_memory().unwrap_or_else(|error| panic!("dividing the GPU's memory: {error:#}"))
        });
    }
    device
}

/// Makes cases that take much of the GPU's memory wait for each other: its threads share it.
fn divide_memory() -> anyhow::Result<()> {
    let gpu = std::env::var_os("PARITY_CUDA_DEVICE")
        .filter(|gpu| !gpu.is_empty())
        .unwrap_or_else(|| "0".into());
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let folder = temporary_folder("turns-")?.keep();
    turns::prepare(&folder, cuda::device_memory(&gpu)?, threads)?;
    turns::share(folder);
    Ok(())
}

/// The `fixtures` folder: next to the sources, or `PARITY_FIXTURES` where the binary runs without
/// them.
pub fn fixtures() -> PathBuf {
    let given = std::env::var_os("PARITY_FIXTURES").map(PathBuf::from);
    let fixtures = given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"));
    // Commands that get it run in other folders.
    std::path::absolute(&fixtures).unwrap_or(fixtures)
}

/// Keeps what a sweep reports.
#[derive(Default)]
pub struct Collected {
    /// Cases of the last planned sweep.
    pub planned: usize,
    /// Every case that ran.
    pub records: Vec<CaseRecord>,
}

impl Observer for Collected {
    fn planned(&mut self, _operator: &str, cases: usize) {
        self.planned = cases;
    }

    fn done(&mut self, record: CaseRecord) {
        self.records.push(record);
    }
}

/// Threads for parallel work, as many as there are cores where `threads` is 0. In the pool that all
/// tests share an oracle waits for those of other tests.
pub fn pool(threads: usize) -> rayon::ThreadPool {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.unwrap_or_else(|error| panic!("starting threads: {error}"))
}
