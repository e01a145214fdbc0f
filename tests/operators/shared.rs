//! Shared by all kinds of tests: what the commit changed, and the devices, one for each thread. A
//! schedule is a setting of the device, and a device compiles one module at a time. On a GPU a
//! device has one stream, and a recording there cannot overlap with launches of other tests.

use std::cell::{Cell, OnceCell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use dsv4_parity::change::{self, Change, Stock};
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operators::registry;
use dsv4_runtime::cache::ModuleCache;
use dsv4_runtime::cuda::Missing;
use dsv4_runtime::emulator::EmulatorOptions;
use dsv4_runtime::{BackendKind, Device, DeviceOptions};

use rayon::ThreadPool;

use crate::support;

/// Time limit of a launch of a mutant: some never end, and their cases normally take far less.
const LIMIT_OF_MUTANTS: Duration = Duration::from_secs(30);

thread_local! {
    static OF_MUTANTS: OnceCell<Device> = const { OnceCell::new() };
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn emulator(options: EmulatorOptions) -> Device {
    Device::open(
        BackendKind::Emulator,
        DeviceOptions { emulator: options, ..dsv4_kernels::device_options() },
    )
    .unwrap_or_else(|error| panic!("no device to test on: {error}"))
}

/// Compiles an operator's modules into the cache, on a GPU. All cores compile them; the device
/// would compile one at a time during the measured time of a test. Without a GPU compilation takes
/// little time.
pub fn compiled(operator: &AnyOperator) -> Result<(), String> {
    if support::backend() != BackendKind::Cuda {
        return Ok(());
    }
    let (cache, tree, modules) =
        (ModuleCache::new(ModuleCache::default_dir()), dsv4_kernels::sources(), operator.modules());
    let target = &support::device().environment().target;
    let missing =
        Missing::from(&cache, &tree, &modules, target).map_err(|error| error.to_string())?;
    // Separate threads: an oracle on the same threads would wait for whole compilations.
    static COMPILERS: LazyLock<ThreadPool> = LazyLock::new(|| support::pool(0));
    // A compilation error is reported by the test that launches the module.
    waiting(|| COMPILERS.install(|| missing.compile(&|| {})));
    Ok(())
}

/// How many threads use the GPU at a time. Their contexts share its time in slices. With sixteen
/// contexts each small launch waits for fifteen slices, and all together take longer than one after
/// the other.
const GPU_SHARERS: usize = 4;

/// One slot on the GPU, with its share of the cores: oracles of different cases in one pool would
/// wait for each other.
type Place = ThreadPool;

fn places() -> &'static (Mutex<Vec<Place>>, Condvar) {
    static PLACES: LazyLock<(Mutex<Vec<Place>>, Condvar)> = LazyLock::new(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let place = |_| support::pool((cores / GPU_SHARERS).max(1));
        (Mutex::new((0..GPU_SHARERS).map(place).collect()), Condvar::new())
    });
    &PLACES
}

/// Runs `work` on this thread's device under test; on a GPU it waits for a slot.
pub fn on_device<R: Send>(work: impl FnOnce(&Device) -> R + Send) -> R {
    if support::backend() != BackendKind::Cuda {
        return work(support::device());
    }
    let device = support::device();
    let (free, left) = places();
    let lock = || free.lock().unwrap_or_else(|e| e.into_inner());
    let place = waiting(|| {
        let mut free =
            left.wait_while(lock(), |free| free.is_empty()).unwrap_or_else(|e| e.into_inner());
        free.pop().expect("there is a free place")
    });
    // A panic in the work ends the test, but must release the slot.
    let done = catch_unwind(AssertUnwindSafe(|| place.install(|| work(device))));
    lock().push(place);
    left.notify_one();
    done.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs what this thread waits for, and counts the time.
fn waiting<R>(work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let done = work();
    WAITED.set(WAITED.get() + start.elapsed());
    done
}

/// How long this thread has waited for the GPU and for compilers since the last call.
pub fn take_waited() -> Duration {
    WAITED.take()
}

/// Runs `work` on this thread's emulator for mutants, whatever backend is under test.
pub fn on_emulator_for_mutants<R>(work: impl FnOnce(&Device) -> R) -> R {
    let options = EmulatorOptions { time_limit: LIMIT_OF_MUTANTS, ..EmulatorOptions::default() };
    OF_MUTANTS.with(|device| work(device.get_or_init(|| emulator(options))))
}

/// What the commit changed; where git cannot report it, prints the reason, and everything runs.
pub fn change() -> Option<&'static Change> {
    static CHANGE: LazyLock<Result<Change, String>> =
        LazyLock::new(|| Change::of_checkout(Path::new(env!("CARGO_MANIFEST_DIR"))));
    static SAID: LazyLock<()> = LazyLock::new(|| {
        if let Err(why) = &*CHANGE {
            eprintln!("nothing is left out: {why}");
        }
    });
    LazyLock::force(&SAID);
    CHANGE.as_ref().ok()
}

/// For each operator, how many items the commit runs; operators that run all have no entry.
pub type Shares = Result<BTreeMap<String, usize>, String>;

/// The shares, where `count` returns how many items each operator has. A commit runs at most
/// `most`, and `rest` of each operator that it does not concern.
pub fn shares(count: impl Fn(&AnyOperator) -> usize, most: usize, rest: usize) -> Shares {
    let Some(change) = change() else { return Ok(BTreeMap::new()) };
    let mut stocks = Vec::new();
    for operator in registry::OPERATORS {
        let files = change::files_of(operator, &dsv4_kernels::sources(), &BTreeSet::new());
        stocks.push(Stock {
            count: count(operator),
            files: files.map_err(|error| error.to_string())?,
        });
    }
    let of = registry::OPERATORS.iter().zip(change.shares(&stocks, most, rest)).zip(&stocks);
    let in_part = of.filter(|((_, share), stock)| *share < stock.count);
    Ok(in_part.map(|((operator, share), _)| (operator.name().to_owned(), share)).collect())
}

/// The operators that the commit concerns: those with a changed file; all where git cannot report
/// the changes.
pub fn concerned() -> Result<BTreeSet<&'static str>, String> {
    static CONCERNED: LazyLock<Result<BTreeSet<&'static str>, String>> = LazyLock::new(|| {
        let left_out = shares(|_| 1, usize::MAX, 0)?;
        Ok(registry::OPERATORS
            .iter()
            .map(|o| o.name())
            .filter(|name| !left_out.contains_key(*name))
            .collect())
    });
    CONCERNED.clone()
}
