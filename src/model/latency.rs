//! How long steps of a whole model take, next to the sum of what their launches take alone.
//!
//! Weights are random, and so are the rows in the caches: a context of any length costs nothing to
//! make. A step is recorded once and replayed. Then each of its launches is timed by itself, as a
//! graph of several of them: once with the L2 as the launch before it left it, and once after other
//! bytes have been written through it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsv4_kernels::cache::cache_layout::TOKENS_PER_PAGE;
use dsv4_kernels::cache::cache_manager::SequenceId;
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::config::Config;
use dsv4_kernels::model::engine::{Chunk, Limits, Model, Sampling};
use dsv4_kernels::model::memory::Memory;
use dsv4_kernels::model::tap::{Site, Tap};
use dsv4_kernels::model::weights::Weights;
use dsv4_runtime::{BackendKind, DType, Device, TensorView};
use half::bf16;
use serde::Serialize;

use super::repeated::Repeated;
use crate::case::{Distribution, Draw};
use crate::record::Spread;

/// Launches of a sample of one operator's time.
const LAUNCHES: u32 = 10;
/// Samples of it, of which the least counts.
const TRIES: usize = 3;
/// Replays of a sample of a step's time.
const REPLAYS: u32 = 5;
/// Bytes that are written through the L2 between launches: several times its size.
const FLUSHED: usize = 256 << 20;
/// The most tokens that a sequence has in a step.
pub const STEP_TOKENS: usize = 127;

/// A step that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Sequences of the step.
    pub batch: usize,
    /// Tokens of each sequence when the last step ends.
    pub context: usize,
    /// New tokens of each sequence: 1 decodes, more are parts of prompts.
    pub tokens: usize,
}

/// What the launches of one operator take in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The operator.
    pub operator: &'static str,
    /// Its launches.
    pub launches: usize,
    /// Sum of their times, with the L2 as a launch of the same leaves it.
    pub warm_us: f64,
    /// Sum of their times after other bytes have been written through the L2.
    pub cold_us: f64,
}

/// The times of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The step.
    pub work: Work,
    /// Of its launches, on the device.
    pub step: Spread,
    /// From the host's call to its result.
    pub call: Spread,
    /// By operator, the longest first.
    pub rows: Vec<Row>,
}

impl Measured {
    /// The sum over all launches, cold.
    pub fn cold_us(&self) -> f64 {
        self.rows.iter().map(|row| row.cold_us).sum()
    }

    /// The sum over all launches, warm.
    pub fn warm_us(&self) -> f64 {
        self.rows.iter().map(|row| row.warm_us).sum()
    }
}

/// Times steps of a model of this configuration, with random weights.
///
/// # Errors
/// Sizes that no model has, a device without enough memory, its other errors.
pub fn measure(
    device: &Device,
    config: &Config,
    works: &[Work],
    implementation: Implementation,
    samples: usize,
) -> Result<Vec<Measured>> {
    let source = Repeated::new(config, 1)?;
    let mut weights = Weights::load(device, &source, &mut |_, _| {})?;
    drop(source);
    let mut all = Vec::new();
    for &work in works {
        let limits = Limits {
            num_pages: work.batch * work.context.div_ceil(TOKENS_PER_PAGE),
            num_sequences: work.batch,
            step_tokens: STEP_TOKENS,
            num_snapshots: 0,
            drafts: false,
        };
        let mut model = Model::new(device, config, weights, limits, implementation)?;
        let step = Stepped::new(&mut model, device, work, samples);
        all.push(step.and_then(Stepped::measured).with_context(|| format!("{work:?}"))?);
        weights = model.into_weights();
    }
    Ok(all)
}

/// A model whose sequences take the same step again and again.
struct Stepped<'m, 'd> {
    model: &'m mut Model<'d>,
    device: &'d Device,
    work: Work,
    samples: usize,
    sequences: Vec<SequenceId>,
    draw: Draw,
}

impl<'m, 'd> Stepped<'m, 'd> {
    fn new(
        model: &'m mut Model<'d>,
        device: &'d Device,
        work: Work,
        samples: usize,
    ) -> Result<Self> {
        let mut draw = Draw::new(1, "context");
        model.fill_caches(&mut |count| {
            let values = draw.values(Distribution::Normal, 1, count, 1.0);
            values.into_iter().flat_map(|x| bf16::from_f64(x).to_ne_bytes()).collect()
        })?;
        model.record_steps(STEP_TOKENS);
        let sequences = Vec::new();
        Ok(Self { model, device, work, samples, sequences, draw })
    }

    /// Sequences with room for that many steps.
    fn restart(&mut self, steps: usize) -> Result<()> {
        for sequence in self.sequences.drain(..) {
            self.model.release(sequence)?;
        }
        let before = self.work.context.saturating_sub(steps * self.work.tokens);
        for _ in 0..self.work.batch {
            self.sequences.push(self.model.pretend(before)?);
        }
        Ok(())
    }

    /// One step, with new tokens.
    fn step(&mut self) -> Result<()> {
        let Work { batch, tokens, .. } = self.work;
        let vocab_size = self.model.config().vocab_size;
        let drawn = self.draw.values(Distribution::Uniform, 1, batch * tokens, 1.0);
        let id = |x: f64| ((x.abs() * vocab_size as f64) as usize).min(vocab_size - 1) as u32;
        let ids: Vec<u32> = drawn.into_iter().map(id).collect();
        let chunks: Vec<Chunk<'_>> = self
            .sequences
            .iter()
            .zip(ids.chunks(tokens))
            .map(|(&sequence, tokens)| Chunk { sequence, tokens })
            .collect();
        self.model.sample(&chunks, &vec![Sampling::GREEDY; batch])?;
        Ok(())
    }

    fn measured(mut self) -> Result<Measured> {
        // The first step compiles, the second one is recorded, the third one is a replay.
        for _ in 0..3 {
            self.restart(1)?;
            self.step()?;
        }
        let step = self.step_times()?;
        let call = self.call_times()?;
        self.restart(1)?;
        let found: Arc<Mutex<Vec<Row>>> = Arc::default();
        let launches = Launches::new(self.device, found.clone())?;
        self.model.set_tap(Some(Box::new(launches)));
        let stepped = self.step();
        self.model.set_tap(None);
        stepped?;
        let mut rows = std::mem::take(&mut *found.lock().unwrap_or_else(|e| e.into_inner()));
        rows.sort_by(|a, b| b.cold_us.total_cmp(&a.cold_us));
        Ok(Measured { work: self.work, step, call, rows })
    }

    /// Of replays on the device; of whole calls where it records nothing.
    fn step_times(&mut self) -> Result<Spread> {
        let backend = self.device.backend();
        let mut times = Vec::new();
        for _ in 0..self.samples {
            let mut replayed = true;
            let time = backend.time(&mut || {
                for _ in 0..REPLAYS {
                    replayed &= self.model.repeat_step().map_err(|error| {
                        dsv4_runtime::RuntimeError::argument("latency", "step", error.to_string())
                    })?;
                }
                Ok(())
            })?;
            if !replayed {
                return self.call_times();
            }
            times.push(micros(time / REPLAYS));
        }
        Spread::of(times).context("no samples")
    }

    /// From the host's call to its result, with a context that ends where the work's does.
    fn call_times(&mut self) -> Result<Spread> {
        let mut times = Vec::new();
        let steps = if self.work.tokens == 1 { self.samples } else { 1 };
        while times.len() < self.samples {
            self.restart(steps)?;
            for _ in 0..steps {
                let start = Instant::now();
                self.step()?;
                times.push(micros(start.elapsed()));
            }
        }
        Spread::of(times).context("no samples")
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Times each launch that it runs.
struct Launches<'d> {
    /// Written between launches where their times are cold; nothing on the emulator.
    flushed: Option<TensorView>,
    _memory: Memory<'d>,
    flush_us: f64,
    found: Arc<Mutex<Vec<Row>>>,
}

impl<'d> Launches<'d> {
    fn new(device: &'d Device, found: Arc<Mutex<Vec<Row>>>) -> Result<Self> {
        let mut memory = Memory::new(device);
        let is_gpu = device.environment().backend == BackendKind::Cuda;
        let flushed =
            is_gpu.then(|| memory.tensor("flushed", DType::U8, &[FLUSHED])).transpose()?;
        let mut launches = Self { flushed, _memory: memory, flush_us: 0.0, found };
        launches.flush_us = launches.time(device, true, &mut || Ok(()))?;
        Ok(launches)
    }

    /// The time of a launch, and of what is written through the L2 before it if it is cold.
    fn time(
        &self,
        device: &Device,
        cold: bool,
        run: &mut dyn FnMut() -> dsv4_runtime::Result<()>,
    ) -> dsv4_runtime::Result<f64> {
        let backend = device.backend();
        let Some(flushed) = &self.flushed else { return Ok(micros(backend.time(run)?)) };
        let recorder = backend.recorder().ok_or_else(|| {
            dsv4_runtime::RuntimeError::argument("latency", "device", "it records nothing")
        })?;
        let recorded = recorder.record(&mut || {
            for _ in 0..LAUNCHES {
                if cold {
                    backend.fill(flushed.address, 0, FLUSHED)?;
                }
                run()?;
            }
            Ok(())
        })?;
        recorded.launch()?;
        let mut least = f64::INFINITY;
        for _ in 0..TRIES {
            let time = backend.time(&mut || recorded.launch())?;
            least = least.min(micros(time) / f64::from(LAUNCHES));
        }
        Ok(least)
    }
}

impl Tap for Launches<'_> {
    fn around(
        &mut self,
        device: &Device,
        site: Site<'_>,
        run: &mut dyn FnMut() -> dsv4_runtime::Result<()>,
    ) -> dsv4_runtime::Result<()> {
        run()?;
        let warm_us = self.time(device, false, run)?;
        let cold_us = self.time(device, true, run)? - self.flush_us;
        let mut found = self.found.lock().unwrap_or_else(|e| e.into_inner());
        let at = found.iter().position(|row| row.operator == site.operator);
        let at = at.unwrap_or_else(|| {
            found.push(Row { operator: site.operator, launches: 0, warm_us: 0.0, cold_us: 0.0 });
            found.len() - 1
        });
        found[at].launches += 1;
        found[at].warm_us += warm_us;
        found[at].cold_us += cold_us;
        Ok(())
    }
}
