//! A call after another one: state that a launcher, a module or a workspace keeps from the first
//! call must not change the second.
//!
//! The case's kernels run on other data first. Then they run on the case's own data in the same
//! buffers, with workspaces and outputs as the first call left them. Then they run in new buffers,
//! while the first buffers still exist and hold the other data again. Where launches can be
//! recorded, they are recorded once and replayed on other data and the case's own in turn. Each run
//! on the case's own data must write what a separate run wrote. State that only the very first call
//! sets, such as a length that a module keeps, is right for this case. The next case detects it.
//!
//! The other data are the case's with other seeds: other values, lists and lengths. The case may
//! have no seed, or other seeds may change the sizes of tensors or workspaces. Then only
//! floating-point values differ: those of a distribution are drawn again, all others are negated,
//! which is exact. Integers and bytes are then the same, and that is a counted skip.

use dsv4_runtime::arena::Violation;
use dsv4_runtime::{Contract, Device, RuntimeError};
use serde_json::Value;

use super::any::AnyCase;
use super::declaration::{Source, Specs, TensorSpec};
use super::declared::Launches;
use super::inputs::Inputs;
use super::lines::{Choices, line, read, too_large_on};
use super::memory::Placed;
use super::tensors::Tensors;
use super::{KernelRun, format_of};
use crate::operator::fields::Aliasing;
use crate::record::Skip;

/// How often recorded launches are replayed, on the case's own data and on other data in turn.
const REPLAYS: usize = 11;

/// How many other seeds are tried, until one fits the case's buffers.
const SEEDS: u64 = 32;

/// What the kernels of a case wrote after calls with other data.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Runs on the case's own data.
    pub repeats: Vec<Repeat>,
    /// What was written into the buffers of an earlier call.
    pub stray_writes: Vec<Violation>,
    /// The skipped runs, with reasons.
    pub skips: Vec<Skip>,
}

/// A run on the case's own data, and the calls before it.
#[derive(Clone, Debug)]
pub struct Repeat {
    /// A description such as `after other data in the same buffers`.
    pub when: String,
    /// What was written.
    pub run: KernelRun,
}

impl Sequence {
    fn push(&mut self, when: impl Into<String>, run: KernelRun) {
        self.repeats.push(Repeat { when: when.into(), run });
    }

    fn skip(&mut self, what: &str, why: impl Into<String>) {
        self.skips.push(Skip { what: format!("sequence: {what}"), why: why.into(), count: 1 });
    }
}

/// Runs the sequence of a case.
pub(super) fn of(
    inputs: &Inputs,
    device: &Device,
    contract: Contract,
) -> Result<Sequence, RuntimeError> {
    let (specs, mut sequence) = (inputs.specs(), Sequence::default());
    let device = &*inputs.on(device);
    let (mut here, mut elsewhere) = buffers(inputs, &specs, device, contract, &mut sequence)?;
    let other = drawn_anew(inputs, &specs, &here, device).unwrap_or_else(|why| {
        sequence.skip("another draw", why);
        with_other_numbers(inputs, &specs)
    });
    // A kept address leads to other values there, and a write through it is detected.
    for placed in elsewhere.iter_mut().chain([&mut here]) {
        placed.rewrite(&specs, &other.tensors)?;
    }
    let before = other.launched(&specs, &here)?;
    here.rewrite(&specs, &inputs.tensors)?;
    let mut again = inputs.launched(&specs, &here)?;
    again.violations.extend(before.violations);
    sequence.push("after other data in the same buffers", again);
    let last = match &mut elsewhere {
        None => &mut here,
        Some(elsewhere) => {
            sequence.stray_writes.extend(elsewhere.arena().stray_writes()?);
            here.rewrite(&specs, &other.tensors)?;
            here.arena().poison_again()?;
            elsewhere.rewrite(&specs, &inputs.tensors)?;
            sequence.push(
                "in buffers beside those of earlier calls",
                inputs.launched(&specs, elsewhere)?,
            );
            sequence.stray_writes.extend(here.arena().stray_writes()?);
            elsewhere
        }
    };
    replays(inputs, &other, &specs, last, &mut sequence)?;
    Ok(sequence)
}

/// Buffers for two calls, and separate ones next to them where memory allows both.
fn buffers<'d>(
    inputs: &Inputs,
    specs: &Specs,
    device: &'d Device,
    contract: Contract,
    sequence: &mut Sequence,
) -> Result<(Placed<'d>, Option<Placed<'d>>), RuntimeError> {
    const WHAT: &str = "buffers elsewhere";
    let first = inputs.placed(device, contract, specs)?;
    if let Some(why) = too_large_on(device.environment(), specs, &inputs.choices.layouts, 2) {
        sequence.skip(WHAT, format!("twice, {why}"));
        return Ok((first, None));
    }
    match inputs.placed(device, contract, specs) {
        // These buffers may reuse the addresses of earlier runs, which are freed. They are
        // therefore not first here.
        Ok(second) => Ok((second, Some(first))),
        Err(error @ RuntimeError::TooLarge { .. }) => {
            sequence.skip(WHAT, error.to_string());
            Ok((first, None))
        }
        Err(error) => Err(error),
    }
}

/// Records the launches while their buffers hold other data, and replays them.
fn replays(
    inputs: &Inputs,
    other: &Inputs,
    specs: &Specs,
    placed: &mut Placed<'_>,
    sequence: &mut Sequence,
) -> Result<(), RuntimeError> {
    const WHAT: &str = "recorded launches";
    let device = placed.arena().device();
    if inputs.case.operator().has_ranks() {
        sequence.skip(WHAT, "ranks launch in processes of their own");
        return Ok(());
    }
    // A recording of the emulator is the same launches again, which the runs above have judged.
    let Some(recorder) = device.graphs() else {
        sequence.skip(WHAT, format!("the {} records no graphs", device.environment().backend));
        return Ok(());
    };
    placed.rewrite(specs, &other.tensors)?;
    let recorded = recorder.record(&mut || {
        let mut run = Launches::timed(device);
        inputs.case.launch(placed.views(), &mut run)?;
        if specs.gradients().next().is_some() {
            inputs.case.launch_backward(placed.backward_views(), &mut run)?;
        }
        Ok(())
    })?;
    for replay in 1..=REPLAYS {
        let own = replay % 2 == 1;
        placed.rewrite(specs, if own { &inputs.tensors } else { &other.tensors })?;
        let violations = placed.arena().run(|_| recorded.launch())?;
        let mut tensors = if own { inputs.collect(specs, placed, &[])? } else { Vec::new() };
        // Nothing reads it back between the launches: another output already uses its memory.
        tensors.retain(|tensor| !is_overwritten(specs, tensor.name));
        sequence.push(
            format!("in replay {replay} of recorded launches"),
            KernelRun { tensors, violations, paths: vec![] },
        );
    }
    Ok(())
}

/// Whether another tensor overwrites this one.
fn is_overwritten(specs: &Specs, name: &str) -> bool {
    let over =
        |spec: &TensorSpec| matches!(spec.placed, Some((Aliasing::InPlace, of)) if of == name);
    specs.present().any(over)
}

/// The case with other seeds, the first that fit this one's buffers, or why none fits.
fn drawn_anew(
    inputs: &Inputs,
    specs: &Specs,
    placed: &Placed<'_>,
    device: &Device,
) -> Result<Inputs, String> {
    let mut why = String::new();
    for change in 1..=SEEDS {
        match drawn_with(inputs, specs, placed, device, change) {
            Ok(other) => return Ok(other),
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// The case with seeds changed by `change`, or why it does not fit this one's buffers.
fn drawn_with(
    inputs: &Inputs,
    specs: &Specs,
    placed: &Placed<'_>,
    device: &Device,
    change: u64,
) -> Result<Inputs, String> {
    // Special values keep their offsets for every seed, so the other data have none.
    let choices = Choices { special: None, ..inputs.choices.clone() };
    let mut line = line(&*inputs.case, &choices);
    let seeds: usize =
        line.fields.iter_mut().map(|(name, value)| reseed(name, value, change)).sum();
    if seeds == 0 {
        return Err("the case has no field `seed`".into());
    }
    let (case, choices) = read(inputs.case.operator(), &line).map_err(|error| error.to_string())?;
    let mut others_specs = case.tensors();
    others_specs.seed = specs.seed;
    if others_specs != *specs {
        return Err("tensors drawn by other seeds are of other extents".into());
    }
    let workspaces =
        |case: &AnyCase| case.workspaces(placed.views(), device).map_err(|error| error.to_string());
    if workspaces(&case)? != workspaces(&inputs.case)? {
        return Err("workspaces of other seeds are of other sizes".into());
    }
    let other = Inputs::draw(case, choices).map_err(|error| error.to_string())?;
    let form = |tensors: &Tensors| -> Vec<_> {
        tensors.iter().map(|(name, tensor)| (name, tensor.dtype, tensor.shape.clone())).collect()
    };
    if form(&other.tensors) != form(&inputs.tensors) {
        return Err("tensors drawn by other seeds are of other extents".into());
    }
    Ok(other)
}

/// Changes every field `seed` of a case, also those of nested cases. Returns their number.
fn reseed(name: &str, value: &mut Value, change: u64) -> usize {
    match value {
        Value::Object(fields) => {
            fields.iter_mut().map(|(name, value)| reseed(name, value, change)).sum()
        }
        Value::Number(seed) if name == "seed" => {
            let Some(old) = seed.as_u64() else { return 0 };
            *value = (old ^ change).into();
            1
        }
        _ => 0,
    }
}

/// The case's own data with other floating-point values. Negating all is not enough: a product of
/// two inputs would not change.
fn with_other_numbers(inputs: &Inputs, specs: &Specs) -> Inputs {
    let mut reseeded = specs.clone();
    reseeded.seed ^= 1;
    let (mut tensors, drawn) = (Tensors::clone(&inputs.tensors), Tensors::draw(&reseeded, None));
    for spec in specs.present().filter(|spec| spec.is_given() && format_of(spec.dtype).is_some()) {
        match (spec.source, drawn.get(spec.name)) {
            (Source::Drawn { .. }, Some(other)) => tensors.put(spec.name, other.clone()),
            _ => tensors
                .edit(spec.name, |values| values.iter_mut().for_each(|value| *value = -*value)),
        }
    }
    Inputs::of(inputs.case.clone(), inputs.choices.clone(), tensors)
}
