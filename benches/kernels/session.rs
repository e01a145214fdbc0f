//! One run of the benchmarks: times them, compares their results, and writes what criterion does
//! not record.

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use criterion::{Criterion, SamplingMode, Throughput};
use dsv4_parity::judge::recheck;
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operator::benchmarks::{Buffers, OracleCall, Rate, Timed};
use dsv4_parity::operators::registry::OPERATORS;
use dsv4_parity::record::{BenchmarkRecord, Operands, Work};
use dsv4_parity::report::benchmarks::{self, Facts};
use dsv4_parity::report::beside::log::{
    self, Line, Machine, Side, Skipped, Time, Timings, Turn, Writer,
};
use dsv4_parity::report::beside::pairs::Pairs;
use dsv4_runtime::process::variable;
use dsv4_runtime::{BackendKind, Device, RuntimeError, cuda};

use crate::ceilings::{self, Copies, Datasheet};
use crate::clock::DeviceTime;

/// The run.
pub struct Session<'d> {
    device: &'d Device,
    criterion: Criterion<DeviceTime>,
    clock: DeviceTime,
    directory: PathBuf,
    facts: Facts,
    datasheet: Option<Datasheet>,
    failures: Vec<String>,
    /// Only benchmarks of this list run, if a list is given.
    pairs: Option<Pairs>,
    /// Where samples go for `parity beside`.
    log: Option<Writer>,
    /// Whether criterion measures and keeps results, not `--test`, `--list` or similar.
    measuring: bool,
}

impl<'d> Session<'d> {
    /// Reads criterion's command line; `pairs` lists the benchmarks to run; without it all run.
    pub fn new(device: &'d Device, pairs: Option<Pairs>) -> Self {
        let environment = device.environment();
        let (samples, warm_up, measurement) = match environment.backend {
            BackendKind::Cuda => (20, Duration::from_millis(300), Duration::from_secs(1)),
            BackendKind::Emulator | BackendKind::External => {
                (10, Duration::from_millis(200), Duration::from_millis(500))
            }
        };
        let clock = DeviceTime::default();
        let directory = benchmarks::directory();
        let criterion = Criterion::default()
            .without_plots()
            .output_directory(&directory)
            .sample_size(samples)
            .warm_up_time(warm_up)
            .measurement_time(measurement)
            .nresamples(10_000)
            .with_measurement(clock.clone())
            .configure_from_args();
        let datasheet = ceilings::datasheet(&environment.device);
        let kernels = variable("PARITY_KERNELS").unwrap_or_else(|| "embedded".into());
        let revision = format!("{}, kernels: {}", log::revision(), kernels.to_string_lossy());
        let facts = Facts::continued(&directory, &environment.device, &revision);
        let (failures, measuring, log) = (Vec::new(), measuring(), None);
        Self {
            device,
            criterion,
            clock,
            directory,
            facts,
            datasheet,
            failures,
            pairs,
            log,
            measuring,
        }
    }

    /// Checks the list of pairs against the existing benchmarks, before a benchmark takes device
    /// time.
    ///
    /// # Errors
    /// An id in the list that no benchmark has.
    pub fn check_pairs<'b>(&self, benchmarks: impl Iterator<Item = &'b dyn Timed>) -> Result<()> {
        let Some(pairs) = &self.pairs else { return Ok(()) };
        let ids: BTreeSet<String> =
            benchmarks.map(|benchmark| Id::of(benchmark).to_string()).collect();
        Ok(pairs.check(Side::Ours, |id| ids.contains(id))?)
    }

    /// Whether a benchmark is one of the list of pairs; without a list each is.
    fn is_listed(&self, id: &Id) -> bool {
        let listed = |pairs: &Pairs| pairs.pairs.iter().any(|pair| pair.ours == id.to_string());
        self.pairs.as_ref().is_none_or(listed)
    }

    /// The operators whose kernels are to be measured.
    pub fn operators<'b>(
        &self,
        benchmarks: impl Iterator<Item = &'b dyn Timed>,
    ) -> Vec<&'static AnyOperator> {
        let listed = benchmarks.filter(|one| self.measuring && self.is_listed(&Id::of(*one)));
        let names: BTreeSet<String> = listed.map(|one| one.work().operator).collect();
        let all = OPERATORS.iter().copied();
        all.filter(|operator| names.contains(operator.name())).collect()
    }

    /// Starts a turn in the log for `parity beside`, if something is measured. Benchmarks that
    /// fewer turns have timed run first, because a turn may end early.
    ///
    /// # Errors
    /// A file that cannot be read or written; a device that is not a GPU, whose times cannot be
    /// compared with others.
    pub fn start_log(&mut self, path: &Path, benchmarks: &mut [&dyn Timed]) -> Result<()> {
        if !self.measuring {
            return Ok(());
        }
        if std::fs::metadata(path).is_ok_and(|file| file.len() > 0) {
            let before = Timings::read(&[path])?;
            benchmarks.sort_by_key(|benchmark| {
                before.times(Side::Ours, &Id::of(*benchmark).to_string()).len()
            });
        }
        let environment = self.device.environment();
        let machine = Machine {
            device: environment.device.clone(),
            uuid: cuda::device_uuid().context("PARITY_BENCH_LOG")?,
            driver: environment.driver.clone(),
        };
        let copies = ceilings::SMALLER_COPIES.into_iter().map(Id::of_copy);
        let turn = Turn {
            side: Side::Ours,
            machine,
            software: format!("{}, {}", log::revision(), environment.compiler),
            unix: log::now(),
            copy_bytes_per_second: self
                .facts
                .ceilings
                .map(|ceilings| ceilings.copy_bytes_per_second),
            ids: benchmarks
                .iter()
                .map(|benchmark| Id::of(*benchmark))
                .chain(copies)
                .map(|id| id.to_string())
                .collect(),
        };
        println!("{}, {}, revision {}", turn.machine.device, turn.machine.driver, turn.software);
        self.log = Some(
            Writer::append(path).with_context(|| format!("PARITY_BENCH_LOG {}", path.display()))?,
        );
        self.log_line(&Line::Turn(turn))
    }

    fn log_line(&mut self, line: &Line) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.write(line)).context("PARITY_BENCH_LOG")
    }

    fn log_skip(&mut self, id: &Id, why: &str) -> Result<()> {
        self.log_line(&Line::Skipped(Skipped { id: id.to_string(), why: why.to_owned() }))
    }

    /// Logs the samples that criterion has just kept.
    fn log_time(&mut self, id: &Id, work: &Work, rate: Rate) -> Result<()> {
        if self.log.is_none() {
            return Ok(());
        }
        let samples_us = benchmarks::samples_us(&self.directory, &id.group, &id.to_string())
            .map_err(anyhow::Error::msg)?;
        let bytes = (rate == Rate::Bytes).then_some(work.bytes);
        self.log_line(&Line::Time(Time {
            id: id.to_string(),
            library: None,
            samples_us,
            bytes,
            clock_mhz: None,
        }))
    }

    /// Measures the device's rates, if something is measured.
    ///
    /// # Errors
    /// The device's.
    pub fn measure_ceilings(&mut self) -> Result<()> {
        if self.measuring {
            let ceilings = ceilings::measure(self.device)?;
            let products = [ceilings.matrix_flops_per_second, ceilings.e4m3_flops_per_second];
            let fastest = products.into_iter().flatten().fold(0.0, f64::max);
            self.check_rates("ceilings", ceilings.copy_bytes_per_second, fastest);
            self.facts.ceilings = Some(ceilings);
        }
        Ok(())
    }

    /// Times copies by the driver in the same way as the benchmarks: the time that moving few bytes
    /// takes on this device.
    ///
    /// # Errors
    /// The device's.
    pub fn run_copies(&mut self) -> Result<()> {
        let device = self.device;
        for bytes in ceilings::SMALLER_COPIES {
            let moved = 2.0 * bytes as f64;
            let id = Id::of_copy(bytes);
            let (operator, operands) = ("device_copy".into(), Operands::Bf16);
            let work = Work { operator, bytes: moved, flops: 0.0, operands };
            let place = || Ok(Box::new(Copies::place(device, bytes)?) as Box<dyn Callee + 'd>);
            self.run_callee(&id, work, Rate::Bytes, &place)?;
        }
        Ok(())
    }

    /// Times one benchmark if it can run here and the filter selects it, and compares what it
    /// wrote.
    ///
    /// # Errors
    /// Errors of the device or a launcher. Disagreements are collected for [`Session::finish`]
    /// instead.
    pub fn run(&mut self, benchmark: &dyn Timed) -> Result<()> {
        let id = Id::of(benchmark);
        if !self.is_listed(&id) {
            return Ok(());
        }
        if let Some(why) = benchmark.cannot_run(self.device.environment()) {
            eprintln!("skipped {id}: {why}");
            return self.log_skip(&id, &why);
        }
        let device = self.device;
        let place = || Ok(Box::new(benchmark.place(device)?) as Box<dyn Callee + 'd>);
        self.run_callee(&id, benchmark.work(), benchmark.rate(), &place)
    }

    /// Times the oracle of a benchmark's call on the host. Its bytes and FLOP are those of the
    /// kernel's call, so that the two rates compare.
    ///
    /// # Errors
    /// The oracle's.
    pub fn run_oracle(&mut self, benchmark: &dyn Timed) -> Result<()> {
        let Id { group, name } = Id::of(benchmark);
        let name =
            if name.contains("bf16") { name.replace("bf16", "f64") } else { format!("{name} f64") };
        let id = Id { group: format!("{group}_oracle"), name };
        let place = || Ok(Box::new(benchmark.oracle()?) as Box<dyn Callee + 'd>);
        self.run_callee(&id, benchmark.work(), benchmark.rate(), &place)
    }

    fn run_callee(&mut self, id: &Id, work: Work, rate: Rate, place: &Place<'_, 'd>) -> Result<()> {
        let (callee, calls) = (OnceCell::new(), Cell::new(0usize));
        let timed =
            catch_unwind(AssertUnwindSafe(|| self.time(id, &work, rate, place, &callee, &calls)));
        timed.map_err(|panic| error_of(panic).context(id.to_string()))?;
        let (Some(callee), true) = (callee.get(), calls.get() > 0) else { return Ok(()) };
        let start = Instant::now();
        let problem = match callee.recheck((calls.get() - 1) % callee.sets()) {
            Ok(0) => "nothing was compared".to_owned(),
            Ok(compared) => {
                println!(
                    "{:24}{compared} elements agree ({:.1} s)",
                    "",
                    start.elapsed().as_secs_f64()
                );
                self.log_time(id, &work, rate)?;
                self.facts.work.insert(id.to_string(), work);
                // An interrupted run leaves what it has measured.
                self.facts.write(&self.directory).map_err(anyhow::Error::msg)?;
                return Ok(());
            }
            Err(problem) => format!("{problem:#}"),
        };
        self.fail(&id.to_string(), &problem);
        self.log_skip(id, &problem)
    }

    /// Runs the benchmark in criterion, whose closures cannot return errors: errors leave by
    /// unwinding.
    fn time(
        &mut self,
        id: &Id,
        work: &Work,
        rate: Rate,
        place: &Place<'_, 'd>,
        callee: &OnceCell<Box<dyn Callee + 'd>>,
        calls: &Cell<usize>,
    ) {
        let (device, clock) = (self.device, self.clock.clone());
        let mut group = self.criterion.benchmark_group(&id.group);
        // Samples of equal length: the median over them is what is reported.
        group.sampling_mode(SamplingMode::Flat);
        group.throughput(match rate {
            Rate::Bytes => Throughput::BytesDecimal(work.bytes as u64),
            Rate::Flops => Throughput::Elements(work.flops as u64),
        });
        group.bench_function(&id.name, |bencher| {
            let callee =
                callee.get_or_init(|| ready(place, device).unwrap_or_else(|error| leave(error)));
            bencher.iter_custom(|iterations| {
                let mut calls_of_sample = || {
                    for _ in 0..iterations {
                        callee.call(calls.get() % callee.sets())?;
                        calls.set(calls.get() + 1);
                    }
                    Ok(())
                };
                clock
                    .interval(device, &mut calls_of_sample)
                    .unwrap_or_else(|error| leave(error.into()))
            });
        });
        group.finish();
    }

    fn fail(&mut self, id: &str, problem: &str) {
        eprintln!("FAILED {id}: {problem}");
        self.failures.push(format!("{id}: {problem}"));
    }

    /// A rate above the data sheet's is an error in the measurement.
    fn check_rates(&mut self, id: &str, bytes_per_second: f64, flops_per_second: f64) -> bool {
        let Some(datasheet) = &self.datasheet else { return true };
        let rates = [
            (bytes_per_second, datasheet.bytes_per_second, 1e-9, "GB/s"),
            (flops_per_second, datasheet.flops_per_second, 1e-12, "TFLOP/s"),
        ];
        let beyond = rates.into_iter().find(|(measured, possible, ..)| measured > possible);
        if let Some((measured, possible, scale, unit)) = beyond {
            let (measured, possible) = (measured * scale, possible * scale);
            self.fail(id, &format!("{measured:.0} {unit} exceed the data sheet's {possible:.0}: a wrong measurement"));
        }
        beyond.is_none()
    }

    /// Writes the facts and checks every result against the data sheet; returns whether all is
    /// well.
    ///
    /// # Errors
    /// Results that cannot be written or read back, or that are missing.
    pub fn finish(mut self) -> Result<bool> {
        self.criterion.final_summary();
        if self.measuring {
            if self.facts.work.is_empty() && self.failures.is_empty() {
                return Err(anyhow!("no benchmark ran"));
            }
            self.facts.write(&self.directory).map_err(anyhow::Error::msg)?;
            let found = benchmarks::read(&self.directory, &self.facts.device)
                .map_err(anyhow::Error::msg)?;
            for BenchmarkRecord { id, median_ns, bytes, flops, .. } in found.benchmarks {
                let per_second = 1e9 / median_ns;
                if !self.check_rates(&id, bytes * per_second, flops * per_second) {
                    self.facts.work.remove(&id);
                }
            }
            let path = self.facts.write(&self.directory).map_err(anyhow::Error::msg)?;
            println!("{} benchmarks: {}", self.facts.work.len(), path.display());
        }
        for failure in &self.failures {
            eprintln!("FAILED {failure}");
        }
        Ok(self.failures.is_empty())
    }
}

/// Criterion's id of a benchmark.
struct Id {
    group: String,
    name: String,
}

impl Id {
    fn of(benchmark: &dyn Timed) -> Self {
        Self { group: benchmark.group(), name: benchmark.name().to_owned() }
    }

    /// The id of a copy with this many bytes on each side.
    fn of_copy(bytes: usize) -> Self {
        let name = format!("{:.3} MB read and written", 2.0 * bytes as f64 * 1e-6);
        Self { group: "device_copy".into(), name }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.group, self.name)
    }
}

/// What the clock measures: kernels on their buffers, or an oracle.
pub trait Callee {
    /// How many sets of buffers exist. Calls use them round-robin.
    fn sets(&self) -> usize;

    /// Enqueues one call on a set.
    fn call(&self, set: usize) -> std::result::Result<(), RuntimeError>;

    /// Compares the results of the last call on `set`; returns how many elements.
    fn recheck(&self, set: usize) -> Result<u64>;
}

/// Makes the callee; called only when the benchmark runs.
type Place<'p, 'd> = dyn Fn() -> Result<Box<dyn Callee + 'd>> + 'p;

impl Callee for Box<dyn Buffers + '_> {
    fn sets(&self) -> usize {
        (**self).sets()
    }

    fn call(&self, set: usize) -> std::result::Result<(), RuntimeError> {
        (**self).call(set)
    }

    fn recheck(&self, set: usize) -> Result<u64> {
        recheck::recheck(&**self, set)
    }
}

impl Callee for OracleCall {
    fn sets(&self) -> usize {
        1
    }

    fn call(&self, _: usize) -> std::result::Result<(), RuntimeError> {
        let output = self()
            .map_err(|error| RuntimeError::argument("oracle", "inputs", error.to_string()))?;
        std::hint::black_box(output);
        Ok(())
    }

    /// Two runs must be bit-equal: nothing else can check the oracle here.
    fn recheck(&self, _: usize) -> Result<u64> {
        let (first, second) = (self()?, self()?);
        let equal = first.iter().map(|x| x.to_bits()).eq(second.iter().map(|x| x.to_bits()));
        if equal { Ok(first.len() as u64) } else { Err(anyhow!("two runs of the oracle differ")) }
    }
}

/// Prepares a benchmark and calls it once on each set. Compilation must end before criterion's
/// warm-up estimates the time of a call.
fn ready<'d>(place: &Place<'_, 'd>, device: &Device) -> Result<Box<dyn Callee + 'd>> {
    let callee = place()?;
    (0..callee.sets()).try_for_each(|set| callee.call(set))?;
    device.backend().synchronize()?;
    Ok(callee)
}

/// Whether criterion's command line requests measurements that are kept.
fn measuring() -> bool {
    let otherwise = ["--test", "--list", "--profile-time", "--discard-baseline", "--load-baseline"];
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    arguments.iter().any(|argument| argument == "--bench")
        && !arguments
            .iter()
            .any(|argument| otherwise.iter().any(|prefix| argument.starts_with(prefix)))
}

/// Leaves criterion's closures with an error; the panic hook prints nothing.
fn leave(error: anyhow::Error) -> ! {
    resume_unwind(Box::new(error))
}

/// The error that [`leave`] threw. Any other panic is a bug of criterion or of this program and
/// continues.
fn error_of(panic: Box<dyn Any + Send>) -> anyhow::Error {
    match panic.downcast::<anyhow::Error>() {
        Ok(error) => *error,
        Err(panic) => resume_unwind(panic),
    }
}
