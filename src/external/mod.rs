//! External kernels: the same cases, oracles, checks and reports for a kernel that is not ours.
//!
//! The kernel is a command. For each run of a case it gets a folder with these files:
//!
//! - `case.json`: the operator and the case's fields, scalars such as `softmax_scale` among them;
//! - `inputs.safetensors`: the inputs, upstream gradients included, dense and row-major, under the
//!   operator's names;
//! - `expected.json`: `{"tensors": [{"name", "dtype", "shape", "side"}], "time": false}`, the
//!   tensors to write; `side` is `forward` or `gradient`; `time` is true where the kernel's time is
//!   requested.
//!
//! It writes `outputs.safetensors` into the folder: a regular file, no larger than what is expected
//! (inputs included) in the widest type.
//!
//! With `--cmd` the command runs once for each run, with `{dir}` replaced by the folder. With
//! `--worker` it is started once. It gets `{"dir": …}` as a line on standard input and answers with
//! a line on standard output, which holds nothing else. Its standard input ends with the sweep. A
//! worker that died is started again for the next run.
//!
//! Whatever goes wrong is the verdict of that case. A worker that ends before its first request
//! cannot start, and no case runs. The answer is one of
//!
//! - `{"ok":true}`, or `{"ok":true,"seconds":{"forward":1e-5,"backward":2e-5}}` where the time was
//!   requested and the kernel has measured it, by the clock of the device. `"kernel":"name"` may
//!   name the kernel that ran: it is the path of the case, and an adapter may demand one;
//! - `{"error":"why"}`: the case has failed;
//! - `{"unsupported":"why"}`: the kernel does not support such cases, which is a counted skip.
//!
//! A command answers with its exit code; the last line of its standard output may be one of these,
//! too.
//!
//! A tensor `input.NAME` in the outputs is an input as the kernel left it. It must equal what was
//! given, and so must the file of the inputs.
//!
//! The tensors are those that our kernels write, as these store them: codes, scales, caches. What
//! they mean (decoded values, which slot holds an entry) is computed here, so that no kernel can
//! claim it.
//!
//! The operators do not know about external kernels. Their `kernel` runs on a device that launches
//! nothing and records what would be read ([`Device::recording`]). Its result defines what would be
//! written.
//!
//! With `--ranks N` an operator of several ranks has a process for each ([`crew`]), which all get
//! their requests at the same time. A rank's folder has what our launcher gets on that rank: rows of
//! its own tokens, padded keys, and no row of another rank ([`PreparedCase::of_ranks`]). `case.json`
//! has the number of the rank as `rank`. Two lists stand for arguments of our launchers: `tokens`,
//! which of all tokens the rank has, and `cu_seqlens`, the first token of each sequence and the
//! number of all tokens. What ranks wrote is put together as of ours ([`PreparedCase::united`]).

pub mod adapter;
pub mod crew;
pub mod definition;
pub mod process;
pub mod wire;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use dsv4_runtime::arena::{Violation, ViolationKind};
use dsv4_runtime::files::read_regular;
use dsv4_runtime::supervisor::temporary_folder;
use dsv4_runtime::{
    BackendKind, Contract, DType, Device, Environment, HostTensor, NamedTensors, Placement,
    RuntimeError,
};
use serde::{Deserialize, Serialize};

use self::adapter::Adapter;
use self::process::Call;
use self::wire::{WireTensor, WireTensors, WireType};
use crate::case::shell::quoted;
use crate::case::{Case, CaseError};
use crate::judge::runner::{RunError, Runner, Times};
use crate::operator::elsewhere::{OfRank, WrittenByRank};
use crate::operator::{
    Arithmetic, KernelRun, KernelTensor, OracleTensor, PreparedCase, Side, Written,
};
use crate::operators::registry;
use crate::record::{Check, OperatorRecord, Seconds, Skip, Verdict};

/// The case.
pub const CASE: &str = "case.json";
/// The inputs.
pub const INPUTS: &str = "inputs.safetensors";
/// Names, types and shapes of the outputs.
pub const EXPECTED: &str = "expected.json";
/// The field of the case that has the number of a rank.
pub const RANK: &str = "rank";
/// The outputs.
pub const OUTPUTS: &str = "outputs.safetensors";

/// Outputs start as zeros, which an operator can read safely.
const RECORDING: Contract = Contract { poison: 0, placement: Placement::FlushBack };

/// `expected.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// Every tensor that is to be written.
    pub tensors: Vec<ExpectedOutput>,
    /// Whether to report how long the kernel takes.
    pub time: bool,
}

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpectedOutput {
    /// Its name in `outputs.safetensors`.
    pub name: String,
    /// Its type.
    pub dtype: WireType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Forward output or gradient.
    pub side: String,
}

/// An external kernel, and how it is reached.
pub struct External {
    call: RefCell<Box<dyn Call>>,
    options: ExternalOptions,
    environment: Environment,
    recorder: Device,
    /// Holds the tensors of ranks.
    holder: Device,
    case: RefCell<Option<Case>>,
    /// Whether the next run must report how long it takes: the first one of a case.
    asks_time: Cell<bool>,
    times: RefCell<Times>,
    folders: RefCell<u64>,
    /// The tensors that kernels store, where this one leaves some out: nothing else can be compared.
    stored_alone: RefCell<Option<Vec<&'static str>>>,
}

/// How an external kernel is judged and reported.
#[derive(Default)]
pub struct ExternalOptions {
    /// Its name in reports: its command.
    pub name: String,
    /// The arguments of `parity external` without the case, quoted for a shell; part of each
    /// replay.
    pub arguments: String,
    /// How its conventions differ.
    pub adapter: Adapter,
    /// Whether it returns no gradients.
    pub forward_only: bool,
    /// Whether its time is requested.
    pub time: bool,
    /// Its ranks, where each has a process ([`crew::Crew`]).
    pub ranks: Option<usize>,
    /// Where ours are timed as well, or why they are not.
    pub ours: Option<Result<Device, String>>,
    /// Another kernel: both run each case, and their bits are compared.
    pub beside: Option<Box<External>>,
    /// Where the folders of the runs are kept. Without it they are in a temporary folder for as
    /// long as they are needed.
    pub keep: Option<PathBuf>,
}

impl External {
    /// A kernel that `call` runs.
    pub fn new(call: Box<dyn Call>, options: ExternalOptions) -> Self {
        let environment = Environment {
            backend: BackendKind::External,
            device: options.name.clone(),
            driver: String::new(),
            compiler: String::new(),
            target: std::env::consts::ARCH.to_owned(),
            processors: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            shared_bytes_per_block: 0,
        };
        let recorder = Device::recording(environment.clone(), dsv4_kernels::sources());
        let holder = Device::holding(environment.clone(), dsv4_kernels::sources());
        let (call, case, folders) = (RefCell::new(call), RefCell::default(), RefCell::default());
        Self {
            call,
            options,
            environment,
            recorder,
            holder,
            case,
            asks_time: Cell::default(),
            times: RefCell::default(),
            folders,
            stored_alone: RefCell::default(),
        }
    }

    /// Checks the adapter against the tensors of an operator and of these cases of it. A tensor
    /// that the operator does not have is an error, and so is a convention that does not fit its
    /// tensor.
    ///
    /// # Errors
    /// The tensor's name, and what is wrong.
    pub fn check_adapter<'a>(
        &self,
        operator: &OperatorRecord,
        cases: impl Iterator<Item = &'a Case>,
    ) -> Result<(), CaseError> {
        let adapter = &self.options.adapter;
        self.check_conventions(operator)?;
        let mut cases = cases.peekable();
        let known = self.known_tensors(operator, cases.peek().copied())?;
        if let Some(name) = adapter.names().find(|name| !known.iter().any(|known| known == name)) {
            let known = known.join(", ");
            return Err(CaseError::Malformed(format!(
                "adapter: unknown tensor `{name}`; {} has {known}",
                operator.name
            )));
        }
        let mut unmet: BTreeSet<&str> = adapter.names().collect();
        for case in cases {
            if unmet.is_empty() {
                return Ok(());
            }
            let prepared = registry::prepare(case)?;
            let asked = self.asked(&*prepared, RECORDING).map_err(malformed)?;
            for Asked { inputs, outputs, .. } in &asked {
                let outputs = outputs.iter().map(|output| (output.name, &output.tensor));
                let inputs = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor));
                for (name, tensor) in inputs.chain(outputs) {
                    adapter.their_form(name, tensor).map_err(CaseError::Malformed)?;
                    unmet.remove(name);
                }
            }
            unmet.retain(|name| !prepared.observed().contains(name));
        }
        Ok(())
    }

    /// Checks what the adapter declares of the operator as a whole.
    fn check_conventions(&self, operator: &OperatorRecord) -> Result<(), CaseError> {
        let (adapter, name) = (&self.options.adapter, &operator.name);
        let has = |wanted: &str| operator.conventions.iter().any(|[own, _]| own == wanted);
        if let Some(unknown) = adapter.conventions().find(|wanted| !has(wanted)) {
            let own: Vec<&str> = operator.conventions.iter().map(|[own, _]| own.as_str()).collect();
            let own = if own.is_empty() { "none".to_owned() } else { own.join(", ") };
            let why = format!("adapter: convention `{unknown}`: {name} has {own}");
            return Err(CaseError::Malformed(why));
        }
        let gradient = |wanted: &str| {
            let mut tensors = operator.tensors.iter();
            tensors.find(|tensor| tensor.of.as_deref() == Some(wanted) && tensor.part == "upstream")
        };
        let with_gradient = adapter.in_any_order().find_map(|tied| Some((tied, gradient(tied)?)));
        match with_gradient {
            Some((tied, gradient)) if !self.options.forward_only => {
                let given = &gradient.name;
                let why = format!(
                    "adapter: order of `{tied}`: its gradient `{given}` is given in our order; \
                     --forward-only judges the rest"
                );
                Err(CaseError::Malformed(why))
            }
            _ => Ok(()),
        }
    }

    /// The tensors of an operator; of ranks also those that only ranks have, as in this case.
    fn known_tensors(
        &self,
        operator: &OperatorRecord,
        case: Option<&Case>,
    ) -> Result<Vec<String>, CaseError> {
        let mut known: Vec<_> = operator.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        let is_asked =
            self.options.ranks.is_some() && self.options.adapter.names().next().is_some();
        if let Some(case) = case.filter(|_| is_asked) {
            let asked = self.asked(&*registry::prepare(case)?, RECORDING).map_err(malformed)?;
            for (name, _) in asked.into_iter().flat_map(|asked| asked.inputs) {
                if !known.contains(&name) {
                    known.push(name);
                }
            }
        }
        Ok(known)
    }

    /// Whether the kernel takes cases with hostile lists, as its adapter declares.
    pub fn takes_hostile(&self) -> bool {
        self.options.adapter.takes_hostile()
    }

    /// Starts the process that answers requests, if it is a worker. The caller does not wait until
    /// it is ready.
    ///
    /// # Errors
    /// What happened instead.
    pub fn start(&self) -> Result<(), RunError> {
        self.call.borrow_mut().start()?;
        self.options.beside.as_ref().map_or(Ok(()), |beside| beside.start())
    }

    /// Whether the started worker still runs, before any request.
    ///
    /// # Errors
    /// That it does not, with its last output.
    pub fn still_runs(&self) -> Result<(), RunError> {
        self.call.borrow_mut().still_runs()?;
        self.options.beside.as_ref().map_or(Ok(()), |beside| beside.still_runs())
    }

    /// Why the kernel does not return a tensor of this side.
    fn why(&self, name: &str, side: Side) -> Option<&'static str> {
        if self.options.forward_only && side == Side::Gradient {
            Some("the kernel has no gradients (--forward-only)")
        } else if self.options.adapter.is_absent(name) {
            Some("the adapter declares that the kernel does not return it")
        } else {
            None
        }
    }

    fn why_not(&self, output: &Output) -> Option<&'static str> {
        self.why(output.name, output.side)
    }

    /// The time that the kernel reported, with ours of the same case.
    fn times_of(&self, prepared: &dyn PreparedCase, theirs: Option<Seconds>) -> Times {
        let skip = |what: &str, why: String| Some(Skip { what: what.into(), why, count: 1 });
        if theirs.is_none() {
            return Times {
                skip: skip("time", "the worker was asked and did not say".into()),
                ..Times::default()
            };
        }
        let ours = match &self.options.ours {
            None => return Times { theirs, ..Times::default() },
            Some(Err(why)) => Err(why.clone()),
            Some(Ok(device)) => prepared.seconds(device).map_err(|error| error.to_string()),
        };
        match ours {
            Ok(ours) => Times { theirs, ours: Some(ours), skip: None },
            Err(why) => {
                Times { theirs, ours: None, skip: skip("time of our kernels beside it", why) }
            }
        }
    }

    /// What each process is given and is to write: one, or one for each rank.
    fn asked(
        &self,
        prepared: &dyn PreparedCase,
        contract: Contract,
    ) -> Result<Vec<Asked>, RunError> {
        let Some(size) = self.options.ranks else {
            let inputs = recorded(prepared, &self.recorder)?.inputs;
            return Ok(vec![Asked { rank: None, inputs, outputs: zeros(prepared) }]);
        };
        let ranks = prepared.of_ranks(&self.holder, contract)?.unwrap_or_default();
        if ranks.len() != size {
            let case = ranks.len();
            return Err(RunError::error(format!("a case of {case} ranks for {size} processes")));
        }
        let sides: BTreeMap<_, _> =
            prepared.written().into_iter().map(|written| (written.name, written.side)).collect();
        let of_rank = |(rank, of): (usize, OfRank)| {
            let outputs = of.written.into_iter().map(|(name, tensor)| {
                let side = sides.get(name).copied().unwrap_or(Side::Forward);
                Output { name, tensor, side }
            });
            Asked { rank: Some((rank, size)), inputs: of.given, outputs: outputs.collect() }
        };
        Ok(ranks.into_iter().enumerate().map(of_rank).collect())
    }

    /// The files of what a process is given and is to write.
    fn request(&self, Asked { rank, inputs, mut outputs }: Asked) -> Result<Request, RunError> {
        let adapter = &self.options.adapter;
        outputs.retain(|output| self.why_not(output).is_none());
        let given: WireTensors = inputs
            .iter()
            .map(|(name, tensor)| {
                Ok((adapter.their_name(name).to_owned(), adapter.to_theirs(name, tensor)?))
            })
            .collect::<Result<_, String>>()
            .map_err(RunError::error)?;
        let expected = outputs
            .iter()
            .map(|output| {
                let (dtype, shape) = adapter.their_form(output.name, &output.tensor)?;
                let name = adapter.their_name(output.name).to_owned();
                let side = match output.side {
                    Side::Forward => "forward",
                    Side::Gradient => "gradient",
                };
                Ok(ExpectedOutput { name, dtype, shape, side: side.into() })
            })
            .collect::<Result<_, String>>()
            .map_err(RunError::error)?;
        let file = wire::to_bytes(&given).map_err(RunError::error)?;
        Ok(Request { rank, given, file, outputs, expected })
    }

    /// What processes wrote, as tensors of the case: those of one, or those of ranks put together.
    fn whole(
        &self,
        prepared: &dyn PreparedCase,
        contract: Contract,
        mut written: Vec<Stored>,
    ) -> Result<Stored, RunError> {
        if self.options.ranks.is_none() {
            return Ok(written.pop().unwrap_or_default());
        }
        let names: BTreeSet<_> = written.iter().flatten().map(|(name, _)| *name).collect();
        let written = written.into_iter().map(WrittenByRank::from_iter).collect();
        let mut whole = prepared.united(&self.holder, contract, written)?;
        whole.retain(|(name, _)| names.contains(name));
        Ok(whole)
    }

    fn folder(&self) -> Result<Folder, RunError> {
        let failed =
            |e: std::io::Error| RunError::error(format!("making a folder for the case: {e}"));
        match &self.options.keep {
            None => temporary_folder("external-").map(Folder::Temporary).map_err(failed),
            Some(dir) => {
                let number = self.folders.replace_with(|number| *number + 1);
                let dir = dir.join(format!("{number:06}"));
                std::fs::create_dir_all(&dir).map_err(failed)?;
                Ok(Folder::Kept(dir))
            }
        }
    }
}

/// A folder of one run.
enum Folder {
    Temporary(tempfile::TempDir),
    Kept(PathBuf),
}

impl Folder {
    fn path(&self) -> &Path {
        match self {
            Self::Temporary(dir) => dir.path(),
            Self::Kept(dir) => dir,
        }
    }
}

fn malformed(error: RunError) -> CaseError {
    CaseError::Malformed(error.message)
}

/// Tensors as they are stored, by name.
type Stored = Vec<(&'static str, HostTensor)>;

/// What one process is given and is to write.
struct Asked {
    /// Its rank and the number of ranks, where it is one of several.
    rank: Option<(usize, usize)>,
    inputs: NamedTensors,
    outputs: Vec<Output>,
}

/// The same in the form of the process: a request of [`External::run`].
struct Request {
    rank: Option<(usize, usize)>,
    given: WireTensors,
    /// The bytes of `given` as a file.
    file: Vec<u8>,
    outputs: Vec<Output>,
    expected: Vec<ExpectedOutput>,
}

impl Request {
    /// Its folder within that of the run.
    fn folder(&self, run: &Path) -> PathBuf {
        self.rank.map_or_else(|| run.to_owned(), |(rank, _)| crew::folder_of(run, rank))
    }

    /// An error with the rank that it is of.
    fn named(&self, error: RunError) -> RunError {
        match self.rank {
            Some((rank, ranks)) => crew::of_rank(error, rank, ranks),
            None => error,
        }
    }

    /// Writes its files.
    fn put(&self, run: &Path, case: &Case, time: bool) -> Result<(), RunError> {
        let folder = self.folder(run);
        let failed =
            |e: std::io::Error| RunError::error(format!("making a folder for the case: {e}"));
        std::fs::create_dir_all(&folder).map_err(failed)?;
        // Outputs of an earlier sweep must not pass for outputs of this one.
        match std::fs::remove_file(folder.join(OUTPUTS)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(failed(error));
            }
            _ => {}
        }
        let mut case = case.clone();
        if let Some((rank, _)) = self.rank {
            case.fields.insert(RANK.into(), rank.into());
        }
        write(&folder, CASE, &to_json(&case)?)?;
        write(&folder, INPUTS, &self.file)?;
        write(&folder, EXPECTED, &to_json(&Expected { tensors: self.expected.clone(), time })?)
    }

    /// What the process wrote, in our form, and which inputs it changed.
    fn take(&self, run: &Path, adapter: &Adapter) -> Result<(Stored, Vec<Violation>), RunError> {
        let Self { given, file, outputs, expected, .. } = self;
        let folder = self.folder(run);
        let written = read_outputs(&folder, expected, given)?;
        let mut violations =
            changed_inputs(&folder, file, given, &written, expected).map_err(RunError::fail)?;
        if let Some((rank, _)) = self.rank {
            violations
                .iter_mut()
                .for_each(|violation| violation.buffer += &format!(" of rank {rank}"));
        }
        let ours = |(output, form): (&Output, &ExpectedOutput)| {
            let theirs = &written[&form.name];
            Ok((output.name, adapter.to_ours(output.name, theirs, &output.tensor)?))
        };
        let ours = outputs.iter().zip(expected).map(ours).collect::<Result<Stored, String>>();
        let mut ours = ours.map_err(RunError::fail)?;
        adapter.put_in_order(&mut ours).map_err(RunError::fail)?;
        Ok((ours, violations))
    }
}

/// A tensor that a kernel is to write, in our form.
pub struct Output {
    /// Its name.
    pub name: &'static str,
    /// Its type and shape; its values are zeros.
    pub tensor: HostTensor,
    /// Whether the forward or the backward writes it.
    pub side: Side,
}

/// The tensors that kernels of a case write, as they are stored.
pub fn zeros(prepared: &dyn PreparedCase) -> Vec<Output> {
    let written = prepared.written().into_iter();
    let zeros = |Written { name, dtype, shape, side }| {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.size()];
        Output { name, tensor: HostTensor { dtype, shape, bytes }, side }
    };
    written.map(zeros).collect()
}

/// What our kernel would read, and what would be compared.
pub struct Recorded {
    /// The inputs, by the operator's names.
    pub inputs: NamedTensors,
    /// The tensors that are compared, of outputs that are zeros.
    pub outputs: Vec<KernelTensor>,
}

/// Runs a case on a device that launches nothing and records ([`Device::recording`]).
///
/// # Errors
/// The launcher's. What it recorded until then is gone, too.
pub fn recorded(prepared: &dyn PreparedCase, recorder: &Device) -> Result<Recorded, RuntimeError> {
    let run = prepared.kernel(recorder, RECORDING);
    let mut inputs = recorder.take_recorded();
    // Our backward may read a copy of an input that our forward overwrites; for external kernels
    // both are one tensor.
    let all: BTreeMap<_, _> = inputs.iter().cloned().collect();
    inputs.retain(|(name, tensor)| {
        name.strip_prefix("saved_").and_then(|of| all.get(of)) != Some(tensor)
    });
    Ok(Recorded { inputs, outputs: run?.tensors })
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), RunError> {
    std::fs::write(folder.join(name), bytes)
        .map_err(|e| RunError::error(format!("writing {name}: {e}")))
}

fn to_json(value: &impl Serialize) -> Result<Vec<u8>, RunError> {
    serde_json::to_vec_pretty(value).map_err(|e| RunError::error(e.to_string()))
}

impl Runner for External {
    fn begin(&self, case: &Case) {
        self.case.replace(Some(case.clone()));
        self.asks_time.set(self.options.time);
        self.times.take();
        if let Some(beside) = &self.options.beside {
            beside.begin(case);
        }
    }

    fn beside(
        &self,
        prepared: &dyn PreparedCase,
        exact: &[OracleTensor],
        contract: Contract,
    ) -> Option<Result<KernelRun, RunError>> {
        Some(self.options.beside.as_ref()?.run(prepared, exact, contract))
    }

    fn times(&self) -> Times {
        self.times.borrow().clone()
    }

    fn run(
        &self,
        prepared: &dyn PreparedCase,
        _exact: &[OracleTensor],
        contract: Contract,
    ) -> Result<KernelRun, RunError> {
        let adapter = &self.options.adapter;
        let requests = self.asked(prepared, contract)?.into_iter();
        let requests = requests.map(|asked| self.request(asked)).collect::<Result<Vec<_>, _>>()?;
        let lacks = zeros(prepared)
            .iter()
            .any(|output| output.side == Side::Forward && self.why_not(output).is_some());
        let stored = prepared.written().into_iter().map(|written| written.name);
        self.stored_alone.replace(lacks.then(|| stored.collect()));
        let folder = self.folder()?;
        let time = self.asks_time.take();
        let case = prepared.case().or_else(|| self.case.borrow().clone());
        let case = case.ok_or_else(|| RunError::error("it is not known which case this is"))?;
        for request in &requests {
            request.put(folder.path(), &case, time)?;
        }
        let reply = self.call.borrow_mut().call(folder.path())?;
        adapter.hold_kernel(&case, reply.kernel.as_deref()).map_err(RunError::fail)?;
        if time {
            self.times.replace(self.times_of(prepared, reply.seconds));
        }
        let (mut written, mut violations) = (Vec::new(), Vec::new());
        for request in &requests {
            let (tensors, found) =
                request.take(folder.path(), adapter).map_err(|error| request.named(error))?;
            written.push(tensors);
            violations.extend(found);
        }
        let conventions = adapter.arithmetic().conventions;
        let tensors = prepared.compared(self.whole(prepared, contract, written)?, conventions);
        let ran = reply.kernel.unwrap_or_else(|| "external".into());
        Ok(KernelRun { tensors, violations, paths: vec![ran] })
    }

    fn environment(&self) -> &Environment {
        &self.environment
    }

    fn arithmetic(&self, _prepared: &dyn PreparedCase) -> Arithmetic {
        self.options.adapter.arithmetic()
    }

    fn kernels(&self) -> (String, String) {
        (
            format!("external: {}", self.options.name),
            // The adapter's content counts too, whatever its file is called.
            blake3::hash(
                format!("{}\n{}", self.options.arguments, self.options.adapter.text()).as_bytes(),
            )
            .to_hex()
            .to_string(),
        )
    }

    fn replay_command(&self, case: &Case, _schedules: u32) -> String {
        format!("parity external {} --case {}", self.options.arguments, quoted(&case.line()))
    }

    fn blind_to(&self, check: &Check) -> Option<&'static str> {
        match check {
            Check::Guards | Check::FullyWritten | Check::PoisonIndependent => {
                Some("the memory of another process cannot be prepared")
            }
            Check::ScheduleIndependent => Some("another process schedules by itself"),
            Check::Sequence => {
                Some("another process has buffers of its own, new ones for each call")
            }
            Check::BatchInvariance => Some("--only batch_invariance makes it, and no other check"),
            _ => None,
        }
    }

    fn leaves_out(&self, exact: &OracleTensor) -> Option<&'static str> {
        let why = self.why(exact.name, exact.side);
        why.or_else(|| {
            let stored = self.stored_alone.borrow();
            let is_derived = stored.as_ref().is_some_and(|names| !names.contains(&exact.name));
            is_derived.then_some("it follows from a tensor that the kernel does not return")
        })
    }

    fn rounds_freely(&self, tensor: &str) -> Option<&'static str> {
        let why =
            "the adapter declares that its bits vary (bitwise = false): held within the budget";
        (!self.options.adapter.is_bitwise(tensor)).then_some(why)
    }

    fn may_round_freely(&self) -> Option<&'static str> {
        Some(
            "all within the budget: where sums run in an order that may change, the adapter says so with `bitwise = false`",
        )
    }

    fn cannot_vary(&self, variant: &dyn PreparedCase) -> Option<&'static str> {
        let Some(case) = variant.case() else {
            return Some("the operator does not say with which scalars the variant goes");
        };
        let ranks = case.fields.get("ranks").and_then(|ranks| ranks.as_u64());
        (self.options.ranks.is_some_and(|own| ranks != Some(own as u64)))
            .then_some("its variant has another number of ranks than --ranks")
    }
}

/// Every expected tensor in its expected form, or all problems in one message.
fn read_outputs(
    folder: &Path,
    expected: &[ExpectedOutput],
    given: &WireTensors,
) -> Result<WireTensors, RunError> {
    let path = folder.join(OUTPUTS);
    // A link that leads nowhere exists, too.
    if path.symlink_metadata().is_err() {
        return Err(RunError::error(format!("the kernel wrote no {OUTPUTS}")));
    }
    let outputs = expected.iter().map(|output| (output.name.as_str(), &output.shape[..]));
    let echoes = given.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..]));
    let written =
        wire::read(&path, wire::most_bytes(outputs.chain(echoes))).map_err(RunError::error)?;
    let (mut problems, mut verdict) = (Vec::new(), Verdict::Pass);
    for ExpectedOutput { name, dtype, shape, .. } in expected {
        match written.get(name) {
            None => {
                problems.push(format!("`{name}` is missing"));
                verdict = Verdict::Error;
            }
            Some(found) if (found.dtype, &found.shape) != (*dtype, shape) => {
                problems.push(format!("`{name}` is {found:?}, expected {dtype} {shape:?}"));
                verdict = verdict.max(Verdict::Fail);
            }
            Some(_) => {}
        }
    }
    if problems.is_empty() {
        return Ok(written);
    }
    let names: Vec<_> = written.keys().map(String::as_str).collect();
    let message = format!("outputs: {}; written: {}", problems.join(", "), names.join(", "));
    Err(RunError { verdict, ..RunError::error(message) })
}

/// Inputs that are not what was given: in the file, or as the kernel returns them. A tensor that is
/// also to be written (a cache) may change.
fn changed_inputs(
    folder: &Path,
    file: &[u8],
    given: &WireTensors,
    written: &WireTensors,
    expected: &[ExpectedOutput],
) -> Result<Vec<Violation>, String> {
    let mut violations = Vec::new();
    let now = read_regular(&folder.join(INPUTS), file.len() as u64)?;
    if now != file {
        violations.push(violation(INPUTS, &now, file));
    }
    let is_state = |name: &String| expected.iter().any(|output| output.name == *name);
    for (name, tensor) in given.iter().filter(|(name, _)| !is_state(name)) {
        let left = written.get(&format!("input.{name}"));
        if let Some(left) = left.filter(|left| *left != tensor) {
            violations.push(violation(name, &left.bytes, &tensor.bytes));
        }
    }
    Ok(violations)
}

fn violation(buffer: &str, now: &[u8], before: &[u8]) -> Violation {
    let differs = |&at: &usize| now.get(at) != before.get(at);
    let bytes = 0..now.len().max(before.len());
    Violation {
        buffer: buffer.to_owned(),
        kind: ViolationKind::Input,
        bytes: bytes.clone().filter(differs).count(),
        first_offset: bytes.clone().find(differs).map_or(0, |at| at as i64),
    }
}

/// Reads a request's folder and answers it with our own kernel. This is the reference
/// implementation of the protocol, and a worker to compare other kernels with.
///
/// # Errors
/// A folder that is not a request, or what the kernel did wrong.
pub fn answer(folder: &Path, device: &Device) -> Result<(), String> {
    let read =
        |name: &str| std::fs::read_to_string(folder.join(name)).map_err(|e| format!("{name}: {e}"));
    let case = Case::parse(&read(CASE)?).map_err(|e| e.to_string())?;
    if let Some(rank) = case.fields.get(RANK) {
        return Err(format!("rank {rank} is asked (--ranks); this worker has the tensors of all"));
    }
    let expected: Expected =
        serde_json::from_str(&read(EXPECTED)?).map_err(|e| format!("{EXPECTED}: {e}"))?;
    let prepared = registry::prepare(&case).map_err(|e| e.to_string())?;
    let inputs = wire::read(&folder.join(INPUTS), u64::MAX)?;
    let inputs = inputs
        .iter()
        .map(|(name, tensor)| Ok((name.clone(), to_host(tensor)?)))
        .collect::<Result<_, String>>()?;
    let stored =
        prepared.stored(&device.with_inputs(inputs), Contract::NAN).map_err(|e| e.to_string())?;
    let mut outputs = WireTensors::new();
    for form in expected.tensors {
        let tensor = stored.iter().find(|(name, _)| *name == form.name);
        let (_, tensor) =
            tensor.ok_or_else(|| format!("the operator returns no `{}`", form.name))?;
        outputs.insert(form.name, WireTensor::from(tensor));
    }
    std::fs::write(folder.join(OUTPUTS), wire::to_bytes(&outputs)?)
        .map_err(|e| format!("{OUTPUTS}: {e}"))
}

fn to_host(tensor: &WireTensor) -> Result<HostTensor, String> {
    let dtype = DType::ALL.into_iter().find(|&dtype| WireType::of(dtype) == tensor.dtype);
    let dtype = dtype.ok_or_else(|| format!("no kernel takes {}", tensor.dtype))?;
    Ok(HostTensor { dtype, shape: tensor.shape.clone(), bytes: tensor.bytes.clone() })
}
