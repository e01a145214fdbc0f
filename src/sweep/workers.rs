//! A sweep divided over processes of this program, each a shard on one of the machine's GPUs.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dsv4_runtime::process::{isolate, kill_group, this_program, variable};
use dsv4_runtime::{BackendKind, cuda};

use super::merge::Part;
use crate::THREADS;
use crate::judge::turns::{self, MACHINE_TURNS, TURNS};
use crate::operator::size;
use crate::record::journal::{self, Shard};

/// The environment variable that names the GPU of a process.
const GPU: &str = "PARITY_CUDA_DEVICE";

/// Cores that a worker keeps busy: those of an oracle about half of the time, one while kernels run
/// and while tensors go to the GPU and back.
const CORES_OF_A_WORKER: usize = 2;
/// The most workers that share the memory of a GPU without being asked for.
const MOST_OF_A_GPU: u32 = 8;

/// The folder of the places of the machine's memory.
const MACHINE: &str = "machine";

/// How often the records are counted.
const PACE: Duration = Duration::from_millis(500);

/// The number of GPUs that workers use: the one that the environment names, or all.
///
/// # Errors
/// The driver's.
pub fn gpus() -> Result<u32> {
    if variable(GPU).is_some() { Ok(1) } else { Ok(cuda::device_count()?) }
}

/// Workers of a sweep of all operators on that many GPUs: as many on each, one for
/// [`CORES_OF_A_WORKER`] cores, since oracles take most of a sweep's time.
pub fn usual(cores: usize, gpus: u32) -> u32 {
    let of_each = cores / CORES_OF_A_WORKER / gpus.max(1) as usize;
    gpus.max(1) * (of_each as u32).clamp(1, MOST_OF_A_GPU)
}

/// What a sweep by workers is asked for.
pub struct Request<'r> {
    /// The folder of the report; the workers' files are in a folder in it.
    pub out: &'r Path,
    /// How many processes.
    pub workers: u32,
    /// Their backend.
    pub backend: BackendKind,
    /// Whether they continue from files of an earlier run.
    pub resume: bool,
    /// Cores of this machine.
    pub cores: usize,
    /// Variables of their environment.
    pub environment: Vec<(&'static str, OsString)>,
    /// The arguments of the one with this shard and this folder.
    pub arguments: &'r dyn Fn(Shard, &Path) -> Vec<OsString>,
    /// Sees each line that one prints to its standard error.
    pub words: fn(&str),
}

/// Processes that sweep. Dropping them ends them.
pub struct Workers {
    running: Vec<Worker>,
}

/// Makes the folder of the workers. Without [`Request::resume`] it removes an earlier one.
///
/// # Errors
/// Names the folder.
pub fn prepare(request: &Request) -> Result<()> {
    let folder = request.out.join(journal::WORKERS);
    if !request.resume && folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("removing {}", folder.display()))?;
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))
}

impl Workers {
    /// Divides the memory of the GPUs, and starts the processes.
    ///
    /// # Errors
    /// The driver's; a process that does not start.
    pub fn start(request: &Request) -> Result<Self> {
        let folder = request.out.join(journal::WORKERS);
        let gpus = if request.backend == BackendKind::Cuda { gpus()? } else { 0 };
        if gpus > 0 {
            divide_memory(request.workers, gpus, &folder)?;
        }
        let (places, workers) = (folder.join(MACHINE), u64::from(request.workers));
        turns::prepare_machine(&places, size::limit().number(), workers)
            .with_context(|| format!("creating {}", places.display()))?;
        let count = request.workers;
        let shards = (0..count).map(|index| Shard { index, count });
        let running = shards.map(|shard| Worker::start(request, shard, gpus, &folder));
        Ok(Self { running: running.collect::<Result<_>>()? })
    }

    /// Waits until all have ended; `recorded` sees how many cases all of them have recorded. If one
    /// ends without a report, the others are ended too.
    ///
    /// # Errors
    /// Names that one.
    pub fn wait(&mut self, recorded: &dyn Fn(u64)) -> Result<()> {
        let mut count = 0;
        loop {
            let mut runs = false;
            for worker in &mut self.running {
                count += worker.newly_recorded();
                recorded(count);
                if worker.runs()? {
                    runs = true;
                } else if !worker.dir.join("report.json").is_file() {
                    bail!(worker.ended()?);
                }
            }
            if !runs {
                return Ok(());
            }
            std::thread::sleep(PACE);
        }
    }

    /// What they leave.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn parts(mut self) -> Result<Vec<Part>> {
        let part = |worker: &mut Worker| {
            let ended = worker.ended()?;
            Part::read(&worker.dir).context(ended)
        };
        self.running.iter_mut().map(part).collect()
    }
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
///
/// # Errors
/// Names the folder that cannot be removed.
pub fn clear(out: &Path) -> Result<()> {
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
    fn start(request: &Request, shard: Shard, gpus: u32, folder: &Path) -> Result<Self> {
        let dir = folder.join(shard.index.to_string());
        let mut command = this_program();
        command.args((request.arguments)(shard, &dir));
        // All workers together have the memory of one process; a case may have nearly all of it.
        command.arg("--memory").arg(size::limit().number().to_string());
        command.env(MACHINE_TURNS, folder.join(MACHINE));
        command.envs(request.environment.iter().map(|(name, value)| (name, value)));
        if gpus > 0 {
            let gpu = gpu_of(shard.index, gpus);
            command.env(TURNS, places_of(folder, &gpu)).env(GPU, gpu);
        }
        // Half of the workers run an oracle at a time.
        let threads = (2 * request.cores / shard.count as usize).clamp(1, request.cores);
        command.env(THREADS, threads.to_string()).env_remove("RAYON_NUM_THREADS");
        isolate(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting worker {shard}"))?;
        let pass_on = request.words;
        let words = child.stderr.take().map(|words| {
            std::thread::spawn(move || {
                for line in BufReader::new(words).lines().map_while(Result::ok) {
                    pass_on(&line);
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

    /// Waits for its end, and says how to go on.
    fn ended(&mut self) -> Result<String> {
        let status = self.child.wait()?;
        Ok(format!("worker {} ended with {status}; --resume continues the run", self.shard))
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

#[cfg(test)]
mod tests {
    use super::usual;

    #[test]
    fn every_gpu_has_as_many_workers_as_cores_keep_busy_and_at_most_eight() {
        let of = |cores, gpus| usual(cores, gpus);
        assert_eq!([of(2, 1), of(8, 1), of(16, 1), of(64, 1)], [1, 4, 8, 8]);
        assert_eq!([of(32, 2), of(8, 8), of(128, 8)], [16, 8, 64]);
    }
}
