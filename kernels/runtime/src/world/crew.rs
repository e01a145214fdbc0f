//! The processes of the ranks: started once, seated in worlds of any size, ended together.
//!
//! A rank's work runs on a thread here, as for any device in another process
//! ([`RemoteBackend`]). What its device does, and its part of each collective, runs in the rank's
//! process. If one rank fails, all others end: no rank waits for it, and the next world has new
//! processes. Where Slurm has started this process as one of several [tasks], each rank's process is
//! in the task of its number.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::meeting::{Meeting, Seat};
use super::{Call, MOST_RANKS, World};
use crate::backend::{Backend as _, BackendKind};
use crate::cuda;
use crate::error::{Result, RuntimeError};
use crate::process::variable;
use crate::remote::{Rank, RemoteBackend, RemoteOptions};
use crate::tasks::{self, Tasks};

/// How long the other ranks may take to end once one has failed; then they are killed.
const GRACE: Duration = Duration::from_secs(2);

/// How collectives move tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// Memory that the processes share.
    SharedMemory,
    /// NCCL, on the stream of each rank's GPU.
    Nccl,
}

/// The ranks of a device: processes with devices of its kind.
pub struct Ranks {
    kind: BackendKind,
    cache_dir: PathBuf,
    options: RemoteOptions,
    /// Where the processes are, if not in this process's task.
    tasks: Option<&'static Tasks>,
    crew: Mutex<Option<Crew>>,
}

/// Running processes.
struct Crew {
    meeting: Arc<Meeting>,
    ranks: Vec<Arc<RemoteBackend>>,
    /// Names of the library's worlds, by the number of ranks.
    named: HashMap<usize, Vec<u8>>,
}

/// What the ranks of one call have in common.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The number of ranks.
    pub size: usize,
    /// The seed by which ranks are delayed, if they are.
    pub delays: Option<u64>,
    /// The schedule of the ranks' devices.
    pub schedule: Option<u64>,
}

/// A rank, as its work is given it.
pub struct Member {
    /// Its device.
    pub device: Arc<RemoteBackend>,
    /// Its view of the world.
    pub world: Arc<dyn World>,
}

impl Ranks {
    /// Ranks with devices of this kind. Their processes start at the first use, in the tasks that
    /// this process has joined.
    pub fn new(kind: BackendKind, cache_dir: PathBuf, options: RemoteOptions) -> Self {
        Self { kind, cache_dir, options, tasks: tasks::joined(), crew: Mutex::default() }
    }

    /// How the collectives of `size` ranks move tensors: by NCCL where each has a GPU of its own
    /// and there is the library, otherwise by shared memory. `PARITY_WORLD` demands one. GPUs of
    /// several tasks are told apart by their ids: two tasks may see the same one.
    ///
    /// # Errors
    /// A `PARITY_WORLD` that is neither `nccl` nor `shared`, and one that cannot be had here;
    /// [`RuntimeError::TooLarge`] for more ranks than tasks, and for more than GPUs, where it
    /// demands NCCL.
    pub fn means(&self, size: usize) -> Result<Means> {
        if let Some(tasks) = self.tasks.filter(|tasks| size > tasks.count()) {
            return Err(RuntimeError::TooLarge {
                name: "world".into(),
                needed: size,
                limit: tasks.count(),
                of: "tasks of srun, one for each rank",
            });
        }
        let demanded = variable("PARITY_WORLD").map(|value| value.to_string_lossy().into_owned());
        let gpus = match self.kind {
            BackendKind::Cuda if demanded.as_deref() != Some("shared") => self.gpus(size)?,
            _ => 0,
        };
        let library = || cuda::nccl::find().err().map(|error| error.to_string());
        chosen(demanded.as_deref(), self.kind, (size, gpus), library)
    }

    /// How many GPUs there are for `size` ranks.
    fn gpus(&self, size: usize) -> Result<usize> {
        match self.tasks {
            Some(tasks) => tasks.gpus_of(size),
            None => Ok(cuda::device_count()? as usize),
        }
    }

    /// The number of a rank's GPU; `None` where it has none.
    fn ordinal(&self, rank: usize) -> Result<Option<u32>> {
        match (self.kind, self.tasks) {
            (BackendKind::Cuda, Some(tasks)) => tasks.gpu(rank).map(|gpu| Some(gpu.ordinal)),
            (BackendKind::Cuda, None) => Ok(Some(rank as u32 % cuda::device_count()?.max(1))),
            _ => Ok(None),
        }
    }

    /// The processes of the ranks that run now.
    pub fn processes(&self) -> Vec<u32> {
        let crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        crew.iter().flat_map(|crew| &crew.ranks).filter_map(|rank| rank.process()).collect()
    }

    /// Does `work` on every rank at the same time, and returns the results by rank. `started` is
    /// told the processes before the work begins.
    ///
    /// # Errors
    /// The first that any rank's work returned: of a rank that is at fault, not of those that
    /// waited for it. [`RuntimeError::Rank`] for a rank that died, panicked or did not come.
    pub fn run<T: Send>(
        &self,
        terms: Terms,
        started: &dyn Fn(&[u32]),
        work: &(dyn Fn(Member) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        if !(1..=MOST_RANKS).contains(&terms.size) {
            let reason = format!("{} must be 1 to {MOST_RANKS}", terms.size);
            return Err(RuntimeError::argument("world", "ranks", reason));
        }
        let mut crew = self.crew.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out, so that it is gone after whatever ends this.
        let mut running = match crew.take() {
            Some(running) => running,
            None => Crew::new()?,
        };
        let done = self.run_by(&mut running, terms, started, work);
        if done.is_ok() {
            *crew = Some(running);
        }
        done
    }

    fn run_by<T: Send>(
        &self,
        crew: &mut Crew,
        terms: Terms,
        started: &dyn Fn(&[u32]),
        work: &(dyn Fn(Member) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let name = self.prepare(crew, terms.size)?;
        let ranks = &crew.ranks[..terms.size];
        started(&ranks.iter().filter_map(|rank| rank.process()).collect::<Vec<_>>());
        let shift =
            Shift { meeting: &crew.meeting, terms, limit: self.options.time_limit, name: &name };
        let (first, (sender, receiver)) = (Mutex::new(None), mpsc::channel());
        let results = std::thread::scope(|scope| {
            for (rank, device) in ranks.iter().enumerate() {
                let (sender, shift, first) = (sender.clone(), &shift, &first);
                scope.spawn(move || shift.work(rank, device, work, first, &sender));
            }
            drop(sender);
            collected(&receiver, ranks)
        });
        match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(results),
        }
    }

    /// Starts what is missing for a world of `size` ranks. Returns the name of the library's world,
    /// empty for shared memory.
    fn prepare(&self, crew: &mut Crew, size: usize) -> Result<Vec<u8>> {
        let means = self.means(size)?;
        while crew.ranks.len() < size {
            let rank = crew.ranks.len();
            let ordinal = self.ordinal(rank)?;
            // Task 0 is this process.
            let task = self.tasks.filter(|_| rank > 0).map(|tasks| (tasks, rank));
            let rank = Rank { meeting: crew.meeting.clone(), ordinal, task };
            let (kind, cache_dir) = (self.kind, self.cache_dir.clone());
            let device = RemoteBackend::of_rank(kind, cache_dir, self.options, rank)?;
            crew.ranks.push(Arc::new(device));
        }
        crew.meeting.reset();
        if means == Means::SharedMemory {
            return Ok(Vec::new());
        }
        if let Some(name) = crew.named.get(&size) {
            return Ok(name.clone());
        }
        let name = crew.ranks[0].name_world()?;
        crew.named.insert(size, name.clone());
        Ok(name)
    }
}

/// The means of `size` ranks on this many GPUs, by what `PARITY_WORLD` demands. `library` says why
/// NCCL cannot be had, if it cannot.
fn chosen(
    demanded: Option<&str>,
    kind: BackendKind,
    (size, gpus): (usize, usize),
    library: impl Fn() -> Option<String>,
) -> Result<Means> {
    let refused = |reason| Err(RuntimeError::BackendMissing { backend: "nccl", reason });
    match demanded {
        Some("shared") => return Ok(Means::SharedMemory),
        Some("nccl") | None => {}
        Some(other) => return refused(format!("PARITY_WORLD is {other:?}, not nccl or shared")),
    }
    const NEEDS: &str = "GPUs, as PARITY_WORLD is nccl";
    match (demanded, kind) {
        (None, BackendKind::Cuda) if size <= gpus && library().is_none() => Ok(Means::Nccl),
        (None, _) => Ok(Means::SharedMemory),
        (Some(_), BackendKind::Cuda) if size > gpus => Err(RuntimeError::TooLarge {
            name: "world".into(),
            needed: size,
            limit: gpus,
            of: NEEDS,
        }),
        (Some(_), BackendKind::Cuda) => match library() {
            None => Ok(Means::Nccl),
            Some(why) => refused(format!("PARITY_WORLD is nccl: {why}")),
        },
        (Some(_), kind) => refused(format!("PARITY_WORLD is nccl: the {kind} has no GPUs")),
    }
}

impl Crew {
    fn new() -> Result<Self> {
        let meeting = Meeting::create()
            .map_err(|error| RuntimeError::system("making memory that ranks share", error))?;
        Ok(Self { meeting: Arc::new(meeting), ranks: Vec::new(), named: HashMap::new() })
    }
}

/// The results of all ranks, by rank, of those that have one. If one fails, the others must end
/// soon.
fn collected<T>(receiver: &Receiver<(usize, Option<T>)>, ranks: &[Arc<RemoteBackend>]) -> Vec<T> {
    let mut results: Vec<Option<T>> = ranks.iter().map(|_| None).collect();
    let (mut ended, mut failed) = (vec![false; ranks.len()], false);
    while ended.contains(&false) {
        let limit = if failed { GRACE } else { Duration::MAX };
        match receiver.recv_timeout(limit) {
            Ok((rank, result)) => {
                ended[rank] = true;
                failed |= result.is_none();
                results[rank] = result;
            }
            Err(RecvTimeoutError::Timeout) => {
                for (rank, _) in ranks.iter().zip(&ended).filter(|(_, ended)| !**ended) {
                    rank.kill();
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    results.into_iter().flatten().collect()
}

/// One call of all ranks.
struct Shift<'c> {
    meeting: &'c Meeting,
    terms: Terms,
    limit: Duration,
    name: &'c [u8],
}

impl Shift<'_> {
    /// The work of a rank, on its thread.
    fn work<T>(
        &self,
        rank: usize,
        device: &Arc<RemoteBackend>,
        work: &(dyn Fn(Member) -> Result<T> + Sync),
        first: &Mutex<Option<RuntimeError>>,
        sender: &Sender<(usize, Option<T>)>,
    ) {
        let done = catch_unwind(AssertUnwindSafe(|| self.seated(rank, device, work)));
        let done = done.unwrap_or_else(|panic| Err(self.error(rank, panicked(&*panic))));
        let result = match done {
            Ok(result) => {
                self.meeting.leave(rank);
                Some(result)
            }
            Err(error) => {
                let error = self.of_rank(rank, error);
                let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                // Before anybody else learns of it, and fails because of it.
                let first = first.get_or_insert(error);
                self.meeting.break_off(&first.to_string());
                None
            }
        };
        let _ = sender.send((rank, result));
    }

    fn seated<T>(
        &self,
        rank: usize,
        device: &Arc<RemoteBackend>,
        work: &(dyn Fn(Member) -> Result<T> + Sync),
    ) -> Result<T> {
        let Terms { size, delays, schedule } = self.terms;
        if device.schedule_seed() != schedule {
            device.set_schedule_seed(schedule);
        }
        device.join(Seat { rank, size, delays, limit: self.limit }, self.name)?;
        let world = Arc::new(Elsewhere { device: device.clone(), rank, size });
        work(Member { device: device.clone(), world })
    }

    /// The error of a rank, which names it, unless the error is about what the call asks for.
    fn of_rank(&self, rank: usize, error: RuntimeError) -> RuntimeError {
        use RuntimeError as E;
        match error {
            E::Fault { .. } | E::System { .. } | E::Cuda { .. } | E::Launch { .. } => {
                self.error(rank, error.to_string())
            }
            other => other,
        }
    }

    fn error(&self, rank: usize, what: String) -> RuntimeError {
        let collective = match self.meeting.last_of(rank) {
            Some(last) => format!("in or after {last}"),
            None => "before its first collective".into(),
        };
        RuntimeError::Rank { rank, size: self.terms.size, collective, what }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a text");
    format!("it panicked: {text}")
}

/// The world as the thread of a rank sees it: collectives run in the rank's process.
struct Elsewhere {
    device: Arc<RemoteBackend>,
    rank: usize,
    size: usize,
}

impl World for Elsewhere {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn take_part(&self, call: &Call) -> Result<()> {
        self.device.take_part(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_for_ranks_with_a_gpu_each_and_more_of_them_are_too_many_only_where_it_is_demanded() {
        let chosen = |demanded, kind, size| chosen(demanded, kind, (size, 2), || None);
        assert_eq!(chosen(None, BackendKind::Cuda, 2).unwrap(), Means::Nccl);
        assert_eq!(chosen(None, BackendKind::Cuda, 3).unwrap(), Means::SharedMemory);
        assert_eq!(chosen(None, BackendKind::Emulator, 2).unwrap(), Means::SharedMemory);
        assert_eq!(chosen(Some("shared"), BackendKind::Cuda, 2).unwrap(), Means::SharedMemory);
        let many = chosen(Some("nccl"), BackendKind::Cuda, 3).unwrap_err();
        assert!(matches!(many, RuntimeError::TooLarge { needed: 3, limit: 2, .. }), "{many}");
        for (demanded, kind) in [("nccl", BackendKind::Emulator), ("mpi", BackendKind::Cuda)] {
            let error = chosen(Some(demanded), kind, 2).unwrap_err();
            assert!(matches!(error, RuntimeError::BackendMissing { .. }), "{error}");
        }
        let missing = super::chosen(Some("nccl"), BackendKind::Cuda, (2, 2), || Some("no".into()));
        assert!(matches!(missing, Err(RuntimeError::BackendMissing { .. })));
        let missing = super::chosen(None, BackendKind::Cuda, (2, 2), || Some("no".into()));
        assert_eq!(missing.unwrap(), Means::SharedMemory);
    }
}
