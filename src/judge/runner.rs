//! What runs the kernels of a case: a [`Device`] of ours, or an external process
//! ([`crate::external`]).

use dsv4_runtime::{Contract, Device, Environment, RuntimeError};

use crate::case::Case;
use crate::judge::turns;
use crate::operator::{Arithmetic, KernelRun, OracleTensor, PreparedCase, Sequence};
use crate::record::{Check, Seconds, Skip, Verdict, words};

/// Why no outputs exist to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError {
    /// The verdict of the case: a failure where the kernel did something wrong, an error where
    /// nothing was learnt.
    pub verdict: Verdict,
    /// What happened.
    pub message: String,
    /// Whether the run was impossible here, although nothing is wrong: then it is a counted skip.
    pub skipped: bool,
    /// Whether these kernels cannot run here at all: they do not compile, or the machine lacks what
    /// a run needs.
    pub untestable: bool,
    /// Whether the runner reports that the kernel does not support such a case: then the case is a
    /// counted skip.
    pub unsupported: bool,
}

impl RunError {
    /// The kernel did something wrong.
    pub fn fail(message: impl Into<String>) -> Self {
        Self { verdict: Verdict::Fail, ..Self::error(message) }
    }

    /// Nothing was learnt about the kernel.
    pub fn error(message: impl Into<String>) -> Self {
        let message = words::message(message);
        Self {
            verdict: Verdict::Error,
            message,
            skipped: false,
            untestable: false,
            unsupported: false,
        }
    }

    /// The kernel does not support such a case, as its owner reports.
    pub fn unsupported(why: impl Into<String>) -> Self {
        Self { skipped: true, unsupported: true, ..Self::error(why) }
    }
}

/// Whether an error shows nothing about any case: kernels that do not compile, and a machine without
/// enough memory, disk or processes.
pub fn shows_nothing(error: &RuntimeError) -> bool {
    matches!(
        error,
        RuntimeError::Compile { .. }
            | RuntimeError::SourceMissing { .. }
            | RuntimeError::SymbolMissing { .. }
            | RuntimeError::BackendMissing { .. }
            | RuntimeError::System { .. }
    )
}

/// A fault is the kernel's failure; a missing device or a rejected argument is an error of the run.
impl From<RuntimeError> for RunError {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Fault { .. }
            | RuntimeError::Load { .. }
            | RuntimeError::Cuda { .. }
            | RuntimeError::Rank { .. } => Self::fail(error.to_string()),
            error if shows_nothing(&error) => {
                Self { untestable: true, ..Self::error(error.to_string()) }
            }
            // A law's variant may need more memory than its case, because it keeps the layouts.
            RuntimeError::TooLarge { .. } => {
                Self { skipped: true, ..Self::error(error.to_string()) }
            }
            _ => Self::error(error.to_string()),
        }
    }
}

/// How long an external kernel took by its own clock, and how long ours took.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// What the external kernel reported.
    pub theirs: Option<Seconds>,
    /// Of the same case, on a device of ours.
    pub ours: Option<Seconds>,
    /// Why no time is known, where it was required.
    pub skip: Option<Skip>,
}

/// What the checks require of a runner of kernels.
pub trait Runner {
    /// A case starts: the calls that follow are about it and its variants.
    fn begin(&self, _case: &Case) {}

    /// Runs the kernels of a case, forward and backward, under a memory contract. `exact` are the
    /// oracle's tensors of the case; they define which tensors are outputs and which gradients.
    ///
    /// # Errors
    /// Whatever leaves no outputs to check.
    fn run(
        &self,
        prepared: &dyn PreparedCase,
        exact: &[OracleTensor],
        contract: Contract,
    ) -> Result<KernelRun, RunError>;

    /// Runs the kernels of a case again after calls with other data. `None` where the case has no
    /// such calls.
    ///
    /// # Errors
    /// Whatever leaves no outputs to check.
    fn sequence(
        &self,
        _prepared: &dyn PreparedCase,
        _contract: Contract,
    ) -> Result<Option<Sequence>, RunError> {
        Ok(None)
    }

    /// Runs the other kernels whose bits are compared with those of [`Self::run`]. `None` where
    /// there are none.
    fn beside(
        &self,
        _prepared: &dyn PreparedCase,
        _exact: &[OracleTensor],
        _contract: Contract,
    ) -> Option<Result<KernelRun, RunError>> {
        None
    }

    /// How long the kernels of the case took, where that was requested.
    fn times(&self) -> Times {
        Times::default()
    }

    /// The environment of this runner.
    fn environment(&self) -> &Environment;

    /// Where the kernels came from, and a digest of them.
    fn kernels(&self) -> (String, String);

    /// The command that runs a case again, under that many random schedules as well where a runner
    /// takes them.
    fn replay_command(&self, case: &Case, schedules: u32) -> String;

    /// What the kernels of a case declare about their arithmetic; for ours, their operator declares
    /// it.
    fn arithmetic(&self, prepared: &dyn PreparedCase) -> Arithmetic {
        prepared.arithmetic()
    }

    /// Chooses the schedule of later runs; see
    /// [`dsv4_runtime::backend::Backend::set_schedule_seed`].
    fn set_schedule_seed(&self, _seed: Option<u64>) {}

    /// Whether later runs look for races; see [`dsv4_runtime::backend::Backend::watch_races`].
    fn watch_races(&self, _watch: bool) {}

    /// Why this check cannot be made here; `None` where it can.
    fn blind_to(&self, _check: &Check) -> Option<&'static str> {
        None
    }

    /// Why this tensor is rightly not among the outputs; `None` where it must be.
    fn leaves_out(&self, _exact: &OracleTensor) -> Option<&'static str> {
        None
    }

    /// Why the bits of this tensor depend on more than its values; then equality within its budget
    /// is enough. `None` where bits must be equal.
    fn rounds_freely(&self, _tensor: &str) -> Option<&'static str> {
        None
    }

    /// The message where bits differ by no more than the budget; `None` where bits must be equal in
    /// any case.
    fn may_round_freely(&self) -> Option<&'static str> {
        None
    }

    /// Why the variant of a law cannot be run here; `None` where it can.
    fn cannot_vary(&self, _variant: &dyn PreparedCase) -> Option<&'static str> {
        None
    }
}

impl Runner for Device {
    fn run(
        &self,
        prepared: &dyn PreparedCase,
        _exact: &[OracleTensor],
        contract: Contract,
    ) -> Result<KernelRun, RunError> {
        let _turn = turns::wait(|| prepared.room_on_gpu(self.environment()));
        Ok(prepared.kernel(self, contract)?)
    }

    fn sequence(
        &self,
        prepared: &dyn PreparedCase,
        contract: Contract,
    ) -> Result<Option<Sequence>, RunError> {
        let _turn = turns::wait(|| prepared.room_on_gpu(self.environment()));
        Ok(prepared.sequence(self, contract)?)
    }

    fn environment(&self) -> &Environment {
        self.environment()
    }

    fn kernels(&self) -> (String, String) {
        (self.tree().origin().to_owned(), self.tree().digest())
    }

    fn replay_command(&self, case: &Case, schedules: u32) -> String {
        case.replay_command(self, schedules)
    }

    fn set_schedule_seed(&self, seed: Option<u64>) {
        self.backend().set_schedule_seed(seed);
    }

    fn watch_races(&self, watch: bool) {
        self.backend().watch_races(watch);
    }
}
