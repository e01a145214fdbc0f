//! The subcommands of `parity`.

mod benchmarks;
mod bisect;
mod compile;
mod diff;
mod doctor;
mod external;
mod golden;
mod history;
mod merge;
mod mutants;
mod ops;
mod power;
mod replay;
mod report;
mod run;
mod sweep;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use dsv4_kernels::runtime::{BackendKind, Device, DeviceOptions, RuntimeError, SourceTree};

use crate::operator::Profile;

/// What a command ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// All agreed.
    Agreed,
    /// Something disagreed, or could not be decided.
    Disagreed,
    /// Bad usage or input.
    BadInput,
    /// The demanded backend is missing.
    BackendMissing,
    /// The kernels do not compile or cannot be run: nothing was learnt (`git bisect run` skips such a revision).
    Untestable,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Agreed => 0,
            Exit::Disagreed => 1,
            Exit::BadInput => 2,
            Exit::BackendMissing => 3,
            Exit::Untestable => 125,
        })
    }
}

/// The exit code of a command that ended with an error.
pub fn exit_code_of(error: &anyhow::Error) -> Exit {
    match error.downcast_ref::<RuntimeError>() {
        Some(RuntimeError::BackendMissing { .. }) => Exit::BackendMissing,
        _ => Exit::BadInput,
    }
}

/// Random schedules to run each case under: those asked for, or the profile's. None where the device schedules by itself.
fn schedules(asked: Option<u32>, profile: Profile, device: &Device) -> u32 {
    let takes_a_seed = device.environment().backend == BackendKind::Emulator;
    if takes_a_seed { asked.unwrap_or(profile.schedules()) } else { 0 }
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sweep operators, compare kernels with oracles, write a report
    Run(run::RunArguments),
    /// Put the reports of shards together; refuses gaps, overlaps and mixed revisions
    Merge(merge::MergeArguments),
    /// Compare two reports: what got worse, better, or is covered no longer
    Diff(diff::DiffArguments),
    /// Show budget use and speed over revisions, and warn of drifts
    History(history::HistoryArguments),
    /// Sweep a kernel from elsewhere, which a command of yours runs
    External(external::ExternalArguments),
    /// Answer requests of `parity external` with our own kernels: the reference worker
    ExternalWorker(external::WorkerArguments),
    /// Hold oracles and kernels against golden files
    Golden(golden::GoldenArguments),
    /// Plant bugs in the kernels, by hand and by the hundred, and say which check sees each
    Mutants(mutants::MutantsArguments),
    /// Say which errors the verdicts of a sweep would see, without running a kernel
    Power(power::PowerArguments),
    /// Write the pages of a report.json anew
    Report(report::ReportArguments),
    /// Run a case again, or a file of them, and print what failed
    Replay(replay::ReplayArguments),
    /// Find the commit that made a kernel wrong, imprecise, slow or non-deterministic
    Bisect(bisect::BisectArguments),
    /// List operators
    Ops(ops::OpsArguments),
    /// Say which backends work here, and why not
    Doctor,
    /// Compile every kernel with NVRTC, which needs no GPU
    Compile(compile::CompileArguments),
}

/// Runs a subcommand.
///
/// # Errors
/// Bad input, or a missing backend; see [`exit_code_of`].
pub fn execute(command: Command) -> Result<Exit> {
    match command {
        Command::Run(arguments) => run::execute(&arguments),
        Command::Merge(arguments) => merge::execute(&arguments),
        Command::Diff(arguments) => diff::execute(&arguments),
        Command::History(arguments) => history::execute(&arguments),
        Command::External(arguments) => external::execute(&arguments),
        Command::ExternalWorker(arguments) => external::answer(&arguments),
        Command::Golden(arguments) => golden::execute(&arguments),
        Command::Mutants(arguments) => mutants::execute(&arguments),
        Command::Power(arguments) => power::execute(&arguments),
        Command::Report(arguments) => report::execute(&arguments),
        Command::Replay(arguments) => replay::execute(&arguments),
        Command::Bisect(arguments) => bisect::execute(&arguments),
        Command::Ops(arguments) => ops::execute(&arguments),
        Command::Doctor => Ok(doctor::execute()),
        Command::Compile(arguments) => compile::execute(&arguments),
    }
}

/// Which backend to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// CUDA where it works, the emulator otherwise
    Auto,
    /// A GPU, or exit code 3
    Cuda,
    /// The emulator
    Emulator,
}

/// Options of every command that runs kernels.
#[derive(Clone, Debug, Args)]
pub struct DeviceArguments {
    /// Backend to run the kernels on
    #[arg(long, value_enum, default_value = "auto", env = "PARITY_BACKEND")]
    pub backend: BackendChoice,
    /// Directory laid out as kernels/cuda to take the kernels from, instead of the embedded ones
    #[arg(long, value_name = "DIR", env = "PARITY_KERNELS")]
    pub kernels: Option<PathBuf>,
    /// Keep the GPU's context in this process, where compute-sanitizer, ncu and debuggers look for it; a kernel that ruins it
    /// then fails all cases that follow
    #[arg(long)]
    pub in_process: bool,
}

impl DeviceArguments {
    /// The kernels' sources.
    ///
    /// # Errors
    /// A kernel directory that cannot be read.
    pub fn tree(&self) -> Result<SourceTree> {
        match &self.kernels {
            Some(dir) => SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display())),
            None => Ok(SourceTree::embedded()),
        }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// A missing backend, or a kernel directory that cannot be read.
    pub fn open(&self) -> Result<Device> {
        self.open_with(&DeviceOptions::default())
    }

    /// Opens the device, with other options than the usual ones for all but the kernels.
    ///
    /// # Errors
    /// As [`DeviceArguments::open`].
    pub fn open_with(&self, other: &DeviceOptions) -> Result<Device> {
        let options = || -> Result<DeviceOptions> {
            let tree = self.tree()?;
            let remote = other.remote.filter(|_| !self.in_process);
            Ok(DeviceOptions { tree, remote, ..other.clone() })
        };
        match self.backend {
            BackendChoice::Cuda => Ok(Device::open(BackendKind::Cuda, options()?)?),
            BackendChoice::Emulator => Ok(Device::open(BackendKind::Emulator, options()?)?),
            BackendChoice::Auto => match Device::open(BackendKind::Cuda, options()?) {
                Ok(device) => Ok(device),
                Err(reason) => {
                    tracing::info!("{reason}");
                    Ok(Device::open(BackendKind::Emulator, options()?)?)
                }
            },
        }
    }
}
