//! `parity run --workers N`: divides the sweep over processes of this program, each a shard on one
//! of the machine's GPUs, and joins their results.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dsv4_runtime::process::{isolate, kill_group, this_program, variable};
use dsv4_runtime::{BackendKind, Environment, cuda};
use indicatif::{ProgressBar, ProgressStyle};

use super::run::RunArguments;
use super::sweep::Only;
use super::{cores, modules, output, progress};
use crate::judge::turns::{self, TURNS};
use crate::operator::size;
use crate::operators::registry;
use crate::record::Report;
use crate::record::journal::{self, Shard};
use crate::sweep::merge::{self, Part};

/// The environment variable that names the GPU of a process.
const GPU: &str = "PARITY_CUDA_DEVICE";

/// Cores that a worker's oracles keep busy.
const CORES_OF_A_WORKER: usize = 4;
/// The most workers that share the memory of a GPU without being asked for.
const MOST_OF_A_GPU: u32 = 4;

/// How often the records are counted.
const PACE: Duration = Duration::from_millis(500);

/// The GPUs that workers use: the one that the environment names, or all.
///
/// # Errors
/// The driver's.
pub(super) fn gpus() -> Result<u32> {
    if variable(GPU).is_some() { Ok(1) } else { Ok(cuda::device_count()?) }
}

/// Workers of a sweep of all operators on that many GPUs: as many on each, one for
/// [`CORES_OF_A_WORKER`] cores, since oracles take most of a sweep's time.
pub(super) fn usual(cores: usize, gpus: u32) -> u32 {
    let of_each = cores / CORES_OF_A_WORKER / gpus.max(1) as usize;
    gpus.max(1) * (of_each as u32).clamp(1, MOST_OF_A_GPU)
}

/// Sweeps with that many workers. Their files are removed when the report is complete; until then
/// `--resume` continues from them.
pub(super) fn sweep(
    arguments: &RunArguments,
    workers: u32,
    environment: &Environment,
) -> Result<Report> {
    let folder = arguments.out.join(journal::WORKERS);
    if !arguments.resume && folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("removing {}", folder.display()))?;
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let gpus = if environment.backend == BackendKind::Cuda { gpus()? } else { 0 };
    if gpus > 0 {
        divide_memory(workers, gpus, &folder)?;
        // Otherwise each worker would compile all of them.
        let operators = registry::select(arguments.ops.as_deref())?;
        modules::compile_in_advance(&operators, &arguments.device.tree()?, environment)?;
    }
    let shards = (0..workers).map(|index| Shard { index, count: workers });
    let mut running = shards
        .map(|shard| Worker::start(arguments, shard, gpus, environment.backend, &folder))
        .collect::<Result<Vec<_>>>()?;
    watch(&mut running, &arguments.out)?;
    let parts = running
        .iter_mut()
        .map(|worker| {
            let status = worker.child.wait()?;
            let ended = || {
                format!("worker {} ended with {status}; --resume continues the run", worker.shard)
            };
            Part::read(&worker.dir).with_context(ended)
        })
        .collect::<Result<Vec<_>>>()?;
    drop(running);
    let report = merge::merge(parts, arguments.sweep.seed.command())?;
    Ok(report)
}

/// The GPU of a worker: the one that the environment names, or round-robin over `gpus`.
fn gpu_of(worker: u32, gpus: u32) -> OsString {
    variable(GPU).unwrap_or_else(|| (worker % gpus).to_string().into())
}

/// The folder of a GPU's slots.
fn places_of(folder: &Path, gpu: &OsString) -> PathBuf {
    folder.join("turns").with_extension(gpu)
}

/// Divides the memory of each GPU that workers use into slots for their cases.
fn divide_memory(workers: u32, gpus: u32, folder: &Path) -> Result<()> {
    let mut used: Vec<OsString> =
        (0..workers.min(gpus)).map(|worker| gpu_of(worker, gpus)).collect();
    used.dedup();
    for gpu in &used {
        let places = places_of(folder, gpu);
        let made = turns::prepare(
            &places,
            cuda::device_memory(gpu)?,
            u64::from(workers.div_ceil(used.len() as u32)),
        );
        made.with_context(|| format!("creating {}", places.display()))?;
    }
    Ok(())
}

/// Removes the workers' files after the report is written.
pub(super) fn clear(out: &Path) -> Result<()> {
    let folder = out.join(journal::WORKERS);
    std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))
}

/// A worker that runs or has ended. Drop kills it.
struct Worker {
    shard: Shard,
    dir: PathBuf,
    child: Child,
    /// Passes on what it prints about failures.
    words: Option<JoinHandle<()>>,
    /// Bytes of its records that were counted.
    counted: u64,
}

impl Worker {
    fn start(
        arguments: &RunArguments,
        shard: Shard,
        gpus: u32,
        backend: BackendKind,
        folder: &Path,
    ) -> Result<Self> {
        let dir = folder.join(shard.index.to_string());
        let mut command = this_program();
        command.args(shard_arguments(arguments, shard, backend, &dir));
        // All workers together have the memory of one process.
        command.arg("--memory").arg((size::limit().number() / u64::from(shard.count)).to_string());
        // Their failures and logs go to this process's standard error.
        command.args([
            "--annotations",
            "none",
            "--color",
            if output::stderr_has_color() { "always" } else { "never" },
        ]);
        command.env("PARITY_LOG", super::LOG_FILTER.get().map_or("warn", String::as_str));
        if gpus > 0 {
            let gpu = gpu_of(shard.index, gpus);
            command.env(TURNS, places_of(folder, &gpu)).env(GPU, gpu);
        }
        let cores = cores();
        // No more threads than cores: the threads of an oracle spin while they wait for each other.
        command.env("RAYON_NUM_THREADS", (cores / shard.count as usize).max(1).to_string());
        isolate(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting worker {shard}"))?;
        let words = child.stderr.take().map(|words| {
            std::thread::spawn(move || {
                for line in BufReader::new(words).lines().map_while(Result::ok) {
                    errln!("{line}");
                }
            })
        });
        Ok(Self { shard, dir, child, words, counted: 0 })
    }

    /// Whether it still runs.
    fn runs(&mut self) -> Result<bool> {
        Ok(self
            .child
            .try_wait()
            .with_context(|| format!("waiting for worker {}", self.shard))?
            .is_none())
    }

    /// How many records it has written since the last call.
    fn newly_recorded(&mut self) -> u64 {
        let mut new = Vec::new();
        // The file does not exist before the worker starts, and nothing depends on this number.
        let read = std::fs::File::open(self.dir.join(journal::RECORDS)).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.counted))?;
            file.read_to_end(&mut new)
        });
        self.counted += read.unwrap_or_default() as u64;
        new.iter().filter(|&&byte| byte == b'\n').count() as u64
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        kill_group(self.child.id());
        let _ = self.child.wait();
        if let Some(words) = self.words.take() {
            let _ = words.join();
        }
    }
}

/// Shows the progress of the workers until all have ended. If one ends without a report, the others
/// are ended too.
fn watch(workers: &mut [Worker], out: &Path) -> Result<()> {
    let recorded = Arc::<AtomicU64>::default();
    progress::say_when_interrupted(recorded.clone(), None, out)?;
    let bar = if output::is_quiet() { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
    if let Ok(style) = ProgressStyle::with_template("{msg} {pos} cases {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(format!("{} workers", workers.len()));
    loop {
        let mut runs = false;
        for worker in workers.iter_mut() {
            recorded.fetch_add(worker.newly_recorded(), Ordering::Relaxed);
            bar.set_position(recorded.load(Ordering::Relaxed));
            if worker.runs()? {
                runs = true;
            } else if !worker.dir.join("report.json").is_file() {
                let status = worker.child.wait()?;
                bail!("worker {} ended with {status}; --resume continues the run", worker.shard);
            }
        }
        if !runs {
            bar.finish_and_clear();
            return Ok(());
        }
        std::thread::sleep(PACE);
    }
}

/// The arguments of the `parity run` that is one shard of this one.
fn shard_arguments(
    arguments: &RunArguments,
    shard: Shard,
    backend: BackendKind,
    dir: &Path,
) -> Vec<OsString> {
    let RunArguments { ops, sweep, only, ranks, schedules, regressions, costs, .. } = arguments;
    let (device, ranks): (_, Vec<String>) =
        (&arguments.device, ranks.iter().map(u16::to_string).collect());
    let text = |text: String| Some(OsString::from(text));
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.clone().into_os_string());
    let valued = [
        ("--ops", ops.clone().and_then(text)),
        ("--profile", text(sweep.profile().name().to_owned())),
        ("--cases", sweep.cases.and_then(|number| text(number.to_string()))),
        ("--edge-cases", sweep.edge_cases.and_then(|number| text(number.to_string()))),
        ("--only", only.and_then(|Only::BatchInvariance| text("batch_invariance".to_owned()))),
        ("--seed", text(sweep.seed.number().to_string())),
        ("--ranks", (!ranks.is_empty()).then(|| ranks.join(",").into())),
        ("--schedules", schedules.and_then(|number| text(number.to_string()))),
        ("--regressions", path(regressions)),
        ("--costs", path(costs)),
        ("--backend", text(backend.to_string())),
        ("--kernels", path(&device.kernels)),
        ("--out", Some(dir.into())),
        ("--shard", text(shard.to_string())),
    ];
    let flags = [
        ("--resume", arguments.resume),
        ("--in-process", device.in_process),
        ("--part-of-another", true),
    ];
    let valued = valued
        .into_iter()
        .filter_map(|(name, value)| Some([OsString::from(name), value?]))
        .flatten();
    let flags = flags.into_iter().filter(|(_, set)| *set).map(|(name, _)| name.into());
    [OsString::from("run")].into_iter().chain(valued).chain(flags).collect()
}

#[cfg(test)]
mod tests {
    use super::usual;

    #[test]
    fn every_gpu_has_as_many_workers_as_cores_keep_busy_and_at_most_four() {
        let of = |cores, gpus| usual(cores, gpus);
        assert_eq!([of(2, 1), of(8, 1), of(16, 1), of(64, 1)], [1, 2, 4, 4]);
        assert_eq!([of(32, 2), of(16, 8), of(128, 8)], [8, 8, 32]);
    }
}
