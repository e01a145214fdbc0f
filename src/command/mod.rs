//! The command line of `parity`: its options, its subcommands, and how they print.

// First: the subcommands print with its macros.
#[macro_use]
pub mod output;

mod benchmarks;
mod beside;
mod bisect;
mod blame;
mod checkpoint;
mod ci;
mod compile;
mod completions;
mod coverage;
mod diff;
mod doctor;
mod external;
mod gallery;
mod generate;
mod golden;
mod history;
mod latency;
mod man;
mod merge;
mod modules;
mod mutants;
mod ops;
mod outcome;
mod power;
mod progress;
mod ranks;
mod replay;
mod report;
mod run;
mod sweep;
mod tasks;
mod workers;

pub use modules::compile_in_advance;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use clap::{
    ArgAction, Args, ColorChoice, CommandFactory as _, FromArgMatches as _, Parser, Subcommand,
    ValueEnum,
};
use dsv4_runtime::emulator::{EmulatorOptions, SMS};
use dsv4_runtime::{BackendKind, Device, DeviceOptions, RuntimeError, SourceTree};
use tracing_subscriber::EnvFilter;

use crate::operator::Profile;
use crate::operator::size::{self, Limit};
use crate::record::words;

/// How a command ends.
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
    /// The kernels do not compile or cannot run: nothing was learnt (`git bisect run` skips such a
    /// revision).
    Untestable,
    /// Standard output is closed.
    Closed,
}

impl Exit {
    /// The process's exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::Agreed => 0,
            Self::Disagreed => 1,
            Self::BadInput => 2,
            Self::BackendMissing => 3,
            Self::Untestable => 125,
            // 128 and the number of SIGPIPE: what a shell reports of a program that this signal
            // ends.
            Self::Closed => 141,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// The exit code of a command that ended with an error.
pub fn exit_code_of(error: &anyhow::Error) -> Exit {
    match error.downcast_ref::<RuntimeError>() {
        Some(RuntimeError::BackendMissing { .. }) => Exit::BackendMissing,
        _ => Exit::BadInput,
    }
}

/// The text below the list of commands: the environment variables and the exit codes.
const AFTER_HELP: &str = "\
Environment variables:
  PARITY_BACKEND      Backend, as --backend
  PARITY_CACHE_DIR    Folder of compiled kernels; ~/.cache/dsv4-parity by default
  PARITY_CUDA_DEVICE  Number of the GPU to use; 0 by default
  PARITY_CXX          C++ compiler of the emulator; c++ by default
  PARITY_FIXTURES     Folder of saved cases and mutants; ./fixtures by default
  PARITY_KERNELS      Directory of kernel sources, as --kernels
  PARITY_LOG          What is logged, such as info or dsv4_kernels=trace
  PARITY_MEMORY       Most memory that one case may take, as --memory
  PARITY_NVRTC        libnvrtc.so or its folder; toolkits and wheels by default
  CUDA_HOME           CUDA toolkit to take libraries from; also CUDA_PATH
  NO_COLOR            No colours, as --color never
  RAYON_NUM_THREADS   Threads of oracles and compilers; the cores by default

Kernel sources see PARITY_SM, the architecture that they are compiled for: 80 or 90.

Exit codes: 0 all agreed, 1 disagreement, 2 bad usage or input, 3 the demanded backend is missing, 141 nobody reads \
standard output.";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "parity",
    version = env!("PARITY_VERSION"),
    about = "Numerical verification of DeepSeek-V4's CUDA kernels against slow f64 oracles",
    after_long_help = AFTER_HELP,
    max_term_width = 100
)]
struct Arguments {
    #[command(flatten)]
    global: GlobalArguments,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
struct GlobalArguments {
    /// Print the verdict and the failures alone
    #[arg(short, long, global = true, conflicts_with = "verbose", display_order = 900)]
    quiet: bool,
    /// Log more to standard error: -v what is done, -vv details, -vvv every launch
    #[arg(short, long, global = true, action = ArgAction::Count, display_order = 901)]
    verbose: u8,
    /// Colour the output
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", display_order = 902)]
    color: ColorChoice,
}

impl GlobalArguments {
    /// The log filter: these options first, then PARITY_LOG, then warnings.
    fn log_filter(&self) -> String {
        /// The project's own crates: -v does not log other crates.
        const CRATES: [&str; 3] = ["dsv4_parity", "dsv4_kernels", "dsv4_reference"];
        let level = match (self.quiet, self.verbose) {
            (true, _) => return "error".to_owned(),
            (false, 0) => {
                let asked = std::env::var("PARITY_LOG").unwrap_or_default();
                return if asked.is_empty() { "warn".to_owned() } else { asked };
            }
            (false, 1) => "info",
            (false, 2) => "debug",
            (false, _) => "trace",
        };
        format!("warn,{}", CRATES.map(|name| format!("{name}={level}")).join(","))
    }
}

/// The value of `--color`, also where the rest of the command line is an error that is printed.
fn color_of(arguments: impl Iterator<Item = OsString>) -> ColorChoice {
    let mut color = ColorChoice::Auto;
    let mut arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    while let Some(argument) = arguments.next().filter(|argument| argument != "--") {
        let value = match argument.split_once('=') {
            Some(("--color", value)) => Some(value.to_owned()),
            None if argument == "--color" => arguments.next(),
            _ => None,
        };
        color = value.and_then(|value| ColorChoice::from_str(&value, false).ok()).unwrap_or(color);
    }
    color
}

/// Parses the command line. Help, the version and usage errors are printed and end the process.
fn parse(words: &[OsString]) -> Arguments {
    let color = color_of(words.iter().cloned());
    let parsed = Arguments::command().color(color).try_get_matches_from(words);
    match parsed.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => arguments,
        Err(error) => {
            output::set(false, color);
            let text = error.render().ansi().to_string();
            if error.use_stderr() {
                output::print_error(format_args!("{text}"));
            } else {
                output::print(format_args!("{text}"));
                output::flush();
            }
            std::process::exit(error.exit_code());
        }
    }
}

/// The whole program: parses the words of the command line, the program's name first, runs the
/// subcommand, and prints its error. Under `srun` only task 0 does so.
pub fn main(words: impl IntoIterator<Item = OsString>) -> Exit {
    let words = WORDS.get_or_init(|| words.into_iter().collect());
    match tasks::take_part(words) {
        Ok(None) => {}
        Ok(Some(exit)) => return exit,
        Err(error) => {
            output::set(false, color_of(words.iter().cloned()));
            return failed(&error);
        }
    }
    let Arguments { global, command } = parse(words);
    output::set(global.quiet, global.color);
    let ended = start_log(&global.log_filter()).and_then(|()| {
        if let Some(limit) = command.memory() {
            size::set_limit(limit);
        }
        execute(command)
    });
    output::flush();
    ended.unwrap_or_else(|error| failed(&error))
}

/// Prints the error that a command ended with.
fn failed(error: &anyhow::Error) -> Exit {
    errln!("{} {}", output::bad("parity:"), words::printable(&words::of_error(error)));
    exit_code_of(error)
}

/// The words of the command line.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// The log filter of this process; workers use the same.
static LOG_FILTER: OnceLock<String> = OnceLock::new();

/// Starts the log to standard error.
fn start_log(filter: &str) -> Result<()> {
    let filter = LOG_FILTER.get_or_init(|| filter.to_owned());
    let filter = EnvFilter::try_new(filter).with_context(|| format!("PARITY_LOG is `{filter}`"))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A log that prints its own errors would panic where standard error is closed.
    log.log_internal_errors(false).init();
    Ok(())
}

/// Random schedules to run each case under: the requested number, or the profile's. 0 where the
/// device schedules by itself.
fn schedules(asked: Option<u32>, profile: Profile, device: &Device) -> u32 {
    let takes_a_seed = device.environment().backend == BackendKind::Emulator;
    if takes_a_seed { asked.unwrap_or(profile.schedules()) } else { 0 }
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Sweep operators, compare kernels with oracles, write a report
    Run(Box<run::RunArguments>),
    /// Join the reports of shards into one
    ///
    /// Gaps, overlaps and mixed revisions are rejected.
    Merge(merge::MergeArguments),
    /// Compare two reports: what got worse, better or lost coverage
    Diff(diff::DiffArguments),
    /// Show budget use and speed over revisions; warn of drifts
    History(history::HistoryArguments),
    /// Sweep an external kernel, which a command of yours runs
    External(Box<external::ExternalArguments>),
    /// Answer `parity external` with our own kernels
    ///
    /// This is the reference worker.
    ExternalWorker(external::WorkerArguments),
    /// Compare oracles and kernels with golden files
    Golden(golden::GoldenArguments),
    /// Plant bugs in the kernels; report which check sees each
    ///
    /// Some are planted by hand, hundreds are generated from the syntax trees of the kernels.
    Mutants(mutants::MutantsArguments),
    /// Report which errors the verdicts of a sweep would see
    ///
    /// No kernel runs, except those with the bugs of --mutants.
    Power(power::PowerArguments),
    /// Write the pages of a report.json again
    Report(report::ReportArguments),
    /// Run a case again, or a file of them, and print what failed
    Replay(replay::ReplayArguments),
    /// Find the commit that made a kernel wrong, imprecise or slow
    ///
    /// Or non-deterministic: see --metric.
    Bisect(bisect::BisectArguments),
    /// Put times of our kernels and of public ones next to each other, from logs of both
    Beside(beside::BesideArguments),
    /// Judge public kernels, and write one page about all of them
    ///
    /// Each kernel of the list has a worker, and is judged as `parity external` does. What is not
    /// installed is skipped and said.
    Gallery(Box<gallery::GalleryArguments>),
    /// Time steps of a whole model, next to their launches alone
    Latency(Box<latency::LatencyArguments>),
    /// Time the attention of several ranks, next to its kernels and its collectives alone
    Ranks(Box<ranks::RanksArguments>),
    /// List operators, or describe some
    Ops(ops::OpsArguments),
    /// Write a small random checkpoint, or check one
    ///
    /// It has the official names, shards and formats, hashed and learned routers, and an MTP
    /// module. The same seed gives the same bytes.
    Checkpoint(Box<checkpoint::CheckpointArguments>),
    /// Generate tokens from a checkpoint
    Generate(Box<generate::GenerateArguments>),
    /// Report which operator of a whole model is to blame for an error
    ///
    /// Each call of a run is compared with the oracle on the tensors that the call itself read, so
    /// an error is split into what an operator adds and what it inherits.
    Blame(Box<blame::BlameArguments>),
    /// Report which backends work here, and why others do not
    Doctor(doctor::DoctorArguments),
    /// Compile every kernel with NVRTC, which needs no GPU
    Compile(compile::CompileArguments),
    /// List the lines of kernels that no case of a sweep runs
    ///
    /// Each case is launched once on an emulator that counts lines; nothing is compared. It needs
    /// g++ and its gcov. The exit code is 1 if a line that never ran is not in the list of reasons.
    Coverage(Box<coverage::CoverageArguments>),
    /// Print the completions of a shell
    Completions(completions::CompletionsArguments),
    /// Write man pages
    Man(man::ManArguments),
}

impl Command {
    /// The memory limit of one case, where the command makes inputs and the user gave a limit.
    fn memory(&self) -> Option<Limit> {
        let given = match self {
            Self::Run(arguments) => &arguments.device.memory,
            Self::Coverage(arguments) => &arguments.device.memory,
            Self::External(arguments) => &arguments.memory,
            Self::ExternalWorker(arguments) => &arguments.device.memory,
            Self::Golden(arguments) => &arguments.device.memory,
            Self::Mutants(arguments) => &arguments.device.memory,
            Self::Power(arguments) => &arguments.memory,
            Self::Ranks(arguments) => &arguments.device.memory,
            Self::Replay(arguments) => &arguments.device.memory,
            Self::Bisect(arguments) => &arguments.memory,
            Self::Merge(_)
            | Self::Beside(_)
            | Self::Gallery(_)
            | Self::Diff(_)
            | Self::History(_)
            | Self::Report(_)
            | Self::Ops(_)
            | Self::Checkpoint(_)
            | Self::Blame(_)
            | Self::Generate(_)
            | Self::Latency(_) => {
                return None;
            }
            Self::Doctor(_) | Self::Compile(_) | Self::Completions(_) | Self::Man(_) => {
                return None;
            }
        };
        given.memory
    }
}

/// Runs a subcommand.
///
/// # Errors
/// Bad input, or a missing backend; see [`exit_code_of`].
pub fn execute(command: Command) -> Result<Exit> {
    match command {
        Command::Run(arguments) => run::execute(*arguments),
        Command::Merge(arguments) => merge::execute(&arguments),
        Command::Diff(arguments) => diff::execute(&arguments),
        Command::History(arguments) => history::execute(&arguments),
        Command::External(arguments) => external::execute(&arguments),
        Command::ExternalWorker(arguments) => external::answer(&arguments),
        Command::Golden(arguments) => golden::execute(&arguments),
        Command::Mutants(arguments) => mutants::execute(&arguments),
        Command::Power(arguments) => power::execute(&arguments),
        Command::Latency(arguments) => latency::execute(&arguments),
        Command::Ranks(arguments) => ranks::execute(&arguments),
        Command::Report(arguments) => report::execute(&arguments),
        Command::Replay(arguments) => replay::execute(&arguments),
        Command::Bisect(arguments) => bisect::execute(&arguments),
        Command::Beside(arguments) => beside::execute(&arguments),
        Command::Gallery(arguments) => gallery::execute(&arguments),
        Command::Ops(arguments) => ops::execute(&arguments),
        Command::Checkpoint(arguments) => checkpoint::execute(&arguments),
        Command::Generate(arguments) => generate::execute(&arguments),
        Command::Blame(arguments) => blame::execute(&arguments),
        Command::Doctor(arguments) => doctor::execute(&arguments),
        Command::Compile(arguments) => compile::execute(&arguments),
        Command::Coverage(arguments) => coverage::execute(&arguments),
        Command::Completions(arguments) => completions::execute(&arguments),
        Command::Man(arguments) => man::execute(&arguments),
    }
}

/// Which backend runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendChoice {
    /// CUDA where it works, the emulator otherwise
    Auto,
    /// A GPU, or exit code 3
    Cuda,
    /// The emulator
    Emulator,
}

/// The option of every command that makes inputs.
#[derive(Clone, Debug, Default, Args)]
pub struct MemoryArguments {
    /// Most memory that one case may take, such as 8GiB [default: half of the machine's]
    ///
    /// A case that needs more is rejected; a sweep skips it. In a control group the default is
    /// half of its memory.
    #[arg(long, value_name = "SIZE", env = "PARITY_MEMORY", hide_env_values = true)]
    pub memory: Option<Limit>,
}

/// Options of every command that runs kernels.
#[derive(Clone, Debug, Args)]
pub struct DeviceArguments {
    /// Backend to run the kernels on
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        env = "PARITY_BACKEND",
        hide_env_values = true
    )]
    pub backend: BackendChoice,
    /// Directory of kernel sources, laid out as kernels/cuda [default: the embedded ones]
    #[arg(long, value_name = "DIR", env = "PARITY_KERNELS", hide_env_values = true)]
    pub kernels: Option<PathBuf>,
    /// SMs of the emulated device, by which launchers size their grids
    #[arg(long, value_name = "N", default_value_t = SMS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: u32,
    /// Keep the GPU's context in this process, for compute-sanitizer, ncu and debuggers
    ///
    /// After a kernel corrupts the context all following cases fail.
    #[arg(long)]
    pub in_process: bool,
    /// The most memory of one case.
    #[command(flatten)]
    pub memory: MemoryArguments,
}

impl DeviceArguments {
    /// The kernels' sources.
    ///
    /// # Errors
    /// A kernel directory that cannot be read.
    pub fn tree(&self) -> Result<SourceTree> {
        match &self.kernels {
            Some(dir) => {
                SourceTree::from_dir(dir).with_context(|| format!("--kernels {}", dir.display()))
            }
            None => Ok(dsv4_kernels::sources()),
        }
    }

    fn with_sms(&self, options: DeviceOptions) -> DeviceOptions {
        let emulator = EmulatorOptions { sms: self.sms, ..options.emulator };
        DeviceOptions { emulator, ..options }
    }

    /// Opens the device.
    ///
    /// # Errors
    /// A missing backend, or a kernel directory that cannot be read.
    pub fn open(&self) -> Result<Device> {
        self.open_with(&dsv4_kernels::device_options())
    }

    /// Opens a device of this backend.
    ///
    /// # Errors
    /// As [`DeviceArguments::open`].
    pub fn open_as(&self, backend: BackendKind) -> Result<Device> {
        Ok(Device::open(
            backend,
            self.with_sms(DeviceOptions { tree: self.tree()?, ..dsv4_kernels::device_options() }),
        )?)
    }

    /// Opens the device with these options, except the kernels, which come from the arguments.
    ///
    /// # Errors
    /// As [`DeviceArguments::open`].
    pub fn open_with(&self, other: &DeviceOptions) -> Result<Device> {
        let options = || -> Result<DeviceOptions> {
            let tree = self.tree()?;
            let remote = other.remote.filter(|_| !self.in_process);
            Ok(self.with_sms(DeviceOptions { tree, remote, ..other.clone() }))
        };
        let device = match self.backend {
            BackendChoice::Cuda => Device::open(BackendKind::Cuda, options()?)?,
            BackendChoice::Emulator => Device::open(BackendKind::Emulator, options()?)?,
            BackendChoice::Auto => match Device::open(BackendKind::Cuda, options()?) {
                Ok(device) => device,
                Err(reason) => {
                    tracing::info!("{reason}");
                    Device::open(BackendKind::Emulator, options()?)?
                }
            },
        };
        let environment = device.environment();
        tracing::info!(
            "{} ({}), kernels compiled by {}",
            environment.device,
            environment.backend,
            environment.compiler
        );
        Ok(device)
    }
}

/// How many cores this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The words of the command line, as text: what is no UTF-8 is replaced. The program is its name
/// alone: no other machine has it in the same place.
fn command_line() -> Vec<String> {
    let words = WORDS.get().into_iter().flatten();
    let mut words: Vec<String> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = words.first_mut() {
        let name = Path::new(program.as_str()).file_name();
        *program = name.map_or("parity".into(), |name| name.to_string_lossy().into_owned());
    }
    words
}
