//! One run of the benchmarks: times, rechecks, and writes what criterion does not know.

use std::any::Any;
use std::cell::{Cell, OnceCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use criterion::{Criterion, SamplingMode, Throughput};
use dsv4_kernels::runtime::{BackendKind, RuntimeError};
use dsv4_parity::record::BenchmarkRecord;
use dsv4_parity::report::benchmarks::{self, Facts, Work};

use crate::ceilings::{self, Datasheet};
use crate::clock::DeviceTime;
use crate::data::Lab;

/// Something to time.
pub struct Benchmark {
    /// Criterion's group: operator and direction.
    pub group: &'static str,
    /// Name within the group: extents and types.
    pub name: String,
    /// What one call does.
    pub work: Work,
    /// What is printed beside the time.
    pub rate: Rate,
    /// Makes inputs and places buffers. Called only when the benchmark runs.
    pub prepare: Prepare,
}

/// See [`Benchmark::prepare`].
pub type Prepare = Box<dyn for<'d> Fn(&Lab<'d>) -> Result<Box<dyn Prepared + 'd>>>;

/// The rate of interest.
#[derive(Clone, Copy)]
pub enum Rate {
    /// Bytes per second.
    Bytes,
    /// FLOP per second.
    Flops,
}

/// A benchmark with its buffers.
pub trait Prepared {
    /// How many sets of buffers there are. Calls take them in turn.
    fn sets(&self) -> usize;

    /// Enqueues one call on a set.
    ///
    /// # Errors
    /// The launcher's.
    fn call(&self, lab: &Lab<'_>, set: usize) -> std::result::Result<(), RuntimeError>;

    /// Compares rows of what the last call on `set` wrote with the oracle; how many elements.
    ///
    /// # Errors
    /// What disagrees, or could not be compared.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> std::result::Result<u64, String>;
}

/// The run.
pub struct Session<'l, 'd> {
    lab: &'l Lab<'d>,
    criterion: Criterion<DeviceTime>,
    clock: DeviceTime,
    directory: PathBuf,
    facts: Facts,
    datasheet: Option<Datasheet>,
    failures: Vec<String>,
    /// Whether criterion measures and keeps results, as opposed to `--test`, `--list` and the like.
    measuring: bool,
}

impl<'l, 'd> Session<'l, 'd> {
    /// Reads criterion's command line.
    pub fn new(lab: &'l Lab<'d>) -> Self {
        let environment = lab.device.environment();
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
        let device = environment.device.clone();
        let datasheet = ceilings::datasheet(&device);
        let facts = Facts { device, ..Facts::default() };
        Self { lab, criterion, clock, directory, facts, datasheet, failures: Vec::new(), measuring: measuring() }
    }

    /// Measures the device's rates, if anything is to be measured.
    ///
    /// # Errors
    /// The device's.
    pub fn measure_ceilings(&mut self) -> Result<()> {
        if self.measuring {
            let ceilings = ceilings::measure(self.lab)?;
            let matrix = ceilings.matrix_flops_per_second;
            self.check_rates("ceilings", ceilings.copy_bytes_per_second, matrix.unwrap_or(0.0));
            self.facts.ceilings = Some(ceilings);
        }
        Ok(())
    }

    /// Times one benchmark if the filter admits it, and rechecks what it wrote.
    ///
    /// # Errors
    /// What the device or a launcher refuses. Disagreements are collected instead, for [`Session::finish`].
    pub fn run(&mut self, benchmark: &Benchmark) -> Result<()> {
        let id = format!("{}/{}", benchmark.group, benchmark.name);
        let (prepared, calls) = (OnceCell::new(), Cell::new(0usize));
        let timed = catch_unwind(AssertUnwindSafe(|| self.time(benchmark, &prepared, &calls)));
        timed.map_err(|panic| error_of(panic).context(id.clone()))?;
        let (Some(prepared), true) = (prepared.get(), calls.get() > 0) else { return Ok(()) };
        let start = Instant::now();
        match prepared.recheck(self.lab, (calls.get() - 1) % prepared.sets()) {
            Ok(0) => self.fail(&id, "nothing was compared"),
            Ok(compared) => {
                println!("{:24}{compared} elements agree ({:.1} s)", "", start.elapsed().as_secs_f64());
                self.facts.work.insert(id, benchmark.work.clone());
            }
            Err(problem) => self.fail(&id, &problem),
        }
        Ok(())
    }

    /// Hands the benchmark to criterion, whose closures cannot fail: errors leave by unwinding.
    fn time<'p>(&mut self, benchmark: &Benchmark, prepared: &'p OnceCell<Box<dyn Prepared + 'd>>, calls: &Cell<usize>)
    where
        'd: 'p,
    {
        let (lab, clock) = (self.lab, self.clock.clone());
        let mut group = self.criterion.benchmark_group(benchmark.group);
        // Samples of equal length: the median over them is what is reported.
        group.sampling_mode(SamplingMode::Flat);
        group.throughput(match benchmark.rate {
            Rate::Bytes => Throughput::BytesDecimal(benchmark.work.bytes as u64),
            Rate::Flops => Throughput::Elements(benchmark.work.flops as u64),
        });
        group.bench_function(&benchmark.name, |bencher| {
            let prepared = prepared.get_or_init(|| ready(benchmark, lab).unwrap_or_else(|error| leave(error)));
            bencher.iter_custom(|iterations| {
                let mut calls_of_sample = || {
                    for _ in 0..iterations {
                        prepared.call(lab, calls.get() % prepared.sets())?;
                        calls.set(calls.get() + 1);
                    }
                    Ok(())
                };
                clock.interval(lab.device, &mut calls_of_sample).unwrap_or_else(|error| leave(error.into()))
            });
        });
        group.finish();
    }

    fn fail(&mut self, id: &str, problem: &str) {
        eprintln!("FAILED {id}: {problem}");
        self.failures.push(format!("{id}: {problem}"));
    }

    /// A rate above the data sheet's is a mistake in the measurement.
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

    /// Writes the facts and holds every result to the data sheet; whether all is well.
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
            let found = benchmarks::read(&self.directory, &self.facts.device).map_err(anyhow::Error::msg)?;
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

/// Prepares a benchmark and calls it once on each set: compilation must be over before criterion guesses
/// from its warm-up how long a call takes.
fn ready<'d>(benchmark: &Benchmark, lab: &Lab<'d>) -> Result<Box<dyn Prepared + 'd>> {
    let prepared = (benchmark.prepare)(lab)?;
    (0..prepared.sets()).try_for_each(|set| prepared.call(lab, set))?;
    lab.device.backend().synchronize()?;
    Ok(prepared)
}

/// Whether criterion's command line asks for measurements that are kept.
fn measuring() -> bool {
    let otherwise = ["--test", "--list", "--profile-time", "--discard-baseline", "--load-baseline"];
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    arguments.iter().any(|argument| argument == "--bench")
        && !arguments.iter().any(|argument| otherwise.iter().any(|prefix| argument.starts_with(prefix)))
}

/// Leaves criterion's closures with an error; the panic hook stays silent.
fn leave(error: anyhow::Error) -> ! {
    resume_unwind(Box::new(error))
}

/// The error that [`leave`] threw. Anything else is a panic of criterion's or of ours: it goes on.
fn error_of(panic: Box<dyn Any + Send>) -> anyhow::Error {
    match panic.downcast::<anyhow::Error>() {
        Ok(error) => *error,
        Err(panic) => resume_unwind(panic),
    }
}
