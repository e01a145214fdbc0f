//! A call after another one: what a launcher, a module or a workspace keeps of the first must not show in the second.
//!
//! The case's kernels run on other data; then on the case's own in the same buffers, with workspaces and outputs as the
//! first call left them; then in buffers elsewhere, while the first ones, still there, hold the other data again. Where launches can be
//! recorded, they are, once, and replayed on other data and the case's own in turn. Each run on the case's own data must
//! write what a run by itself wrote.
//!
//! The other data are the case's with other seeds: other numbers, lists and lengths. Where these make tensors or
//! workspaces of other extents, or the case has no seed, they are the case's own with every floating-point number
//! negated, which is exact; integers and bytes are then the same, and that is a counted skip.

use dsv4_kernels::runtime::arena::Violation;
use dsv4_kernels::runtime::{Contract, DType, Device, RuntimeError};
use serde_json::Value;

use super::KernelRun;
use super::declaration::{Specs, TensorSpec};
use super::declared::{Choices, Declared, Inputs, Launches, case_of, read, too_large_on};
use super::memory::Placed;
use super::tensors::Tensors;
use crate::operators::Aliasing;
use crate::record::Skip;

/// How often recorded launches are replayed, on the case's own data and on other data in turn.
const REPLAYS: usize = 11;

/// What the kernels of a case wrote after calls with other data.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Runs on the case's own data.
    pub repeats: Vec<Repeat>,
    /// What was written into the buffers of an earlier call.
    pub stray_writes: Vec<Violation>,
    /// What could not be done, and why.
    pub skips: Vec<Skip>,
}

/// A run on the case's own data, and what came before it.
#[derive(Clone, Debug)]
pub struct Repeat {
    /// Such as `after other data in the same buffers`.
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
pub(super) fn of<K: Declared>(
    inputs: &Inputs<K>,
    device: &Device,
    contract: Contract,
) -> Result<Sequence, RuntimeError> {
    let (specs, mut sequence) = (inputs.specs(), Sequence::default());
    // First, so that these buffers and not the others lie where those of the runs before it lay, which are gone.
    let mut elsewhere = match too_large_on(device.environment(), &specs, &inputs.choices.layouts, 2) {
        None => Some(inputs.placed(device, contract, &specs)?),
        Some(why) => {
            sequence.skip("buffers elsewhere", format!("twice, {why}"));
            None
        }
    };
    let mut here = inputs.placed(device, contract, &specs)?;
    let other = drawn_anew(inputs, &specs, &here, device).unwrap_or_else(|why| {
        sequence.skip("another draw", why);
        negated(inputs)
    });
    // Who has kept an address finds other numbers there, and what it writes there is found.
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
            sequence.push("in buffers beside those of earlier calls", inputs.launched(&specs, elsewhere)?);
            sequence.stray_writes.extend(here.arena().stray_writes()?);
            elsewhere
        }
    };
    replays(inputs, &other, &specs, last, &mut sequence)?;
    Ok(sequence)
}

/// Records the launches while their buffers hold other data, and replays them.
fn replays<K: Declared>(
    inputs: &Inputs<K>,
    other: &Inputs<K>,
    specs: &Specs,
    placed: &mut Placed<'_>,
    sequence: &mut Sequence,
) -> Result<(), RuntimeError> {
    let device = placed.arena().device();
    placed.rewrite(specs, &other.tensors)?;
    let recorded = device.backend().record(&mut || {
        let mut run = Launches::timed(device);
        K::launch(&inputs.case, placed.views(), &mut run)?;
        if specs.gradients().next().is_some() {
            K::launch_backward(&inputs.case, placed.backward_views(), &mut run)?;
        }
        Ok(())
    })?;
    let Some(recorded) = recorded else {
        sequence.skip("recorded launches", format!("the {} records no graphs", device.environment().backend));
        return Ok(());
    };
    for replay in 1..=REPLAYS {
        let own = replay % 2 == 1;
        placed.rewrite(specs, if own { &inputs.tensors } else { &other.tensors })?;
        let violations = placed.arena().run(|_| recorded.launch())?;
        let mut tensors = if own { inputs.collect(specs, placed, &[])? } else { Vec::new() };
        // Nothing reads it back between the launches: another output lies over it by now.
        tensors.retain(|tensor| !is_overwritten(specs, tensor.name));
        sequence
            .push(format!("in replay {replay} of recorded launches"), KernelRun { tensors, violations, paths: vec![] });
    }
    Ok(())
}

/// Whether another tensor is written in this one's place.
fn is_overwritten(specs: &Specs, name: &str) -> bool {
    let over = |spec: &TensorSpec| matches!(spec.placed, Some((Aliasing::InPlace, of)) if of == name);
    specs.present().any(over)
}

/// The case with other seeds, or why that does not go with the buffers of this one.
fn drawn_anew<K: Declared>(
    inputs: &Inputs<K>,
    specs: &Specs,
    placed: &Placed<'_>,
    device: &Device,
) -> Result<Inputs<K>, String> {
    // Special numbers lie where they lie, whatever the seed: the other data have none.
    let choices = Choices { layouts: inputs.choices.layouts.clone(), special: None };
    let mut line = case_of::<K>(&inputs.case, &choices);
    let seeds: usize = line.fields.iter_mut().map(|(name, value)| reseed(name, value)).sum();
    if seeds == 0 {
        return Err("the case has no field `seed`".into());
    }
    let (case, choices) = read::<K>(&line).map_err(|error| error.to_string())?;
    let other = Inputs::<K>::draw(case, choices).map_err(|error| error.to_string())?;
    let mut others_specs = other.specs();
    others_specs.seed = specs.seed;
    let form = |tensors: &Tensors| -> Vec<_> {
        tensors.iter().map(|(name, tensor)| (name, tensor.dtype, tensor.shape.clone())).collect()
    };
    if others_specs != *specs || form(&other.tensors) != form(&inputs.tensors) {
        return Err("tensors drawn by another seed are of other extents".into());
    }
    let workspaces = |case| K::workspaces(case, placed.views(), device).map_err(|error| error.to_string());
    if workspaces(&other.case)? != workspaces(&inputs.case)? {
        return Err("workspaces of another seed are of other sizes".into());
    }
    Ok(other)
}

/// Changes every field `seed` of a case, also those of cases within it; how many there are.
fn reseed(name: &str, value: &mut Value) -> usize {
    match value {
        Value::Object(fields) => fields.iter_mut().map(|(name, value)| reseed(name, value)).sum(),
        Value::Number(seed) if name == "seed" => {
            let Some(old) = seed.as_u64() else { return 0 };
            *value = (old ^ 1).into();
            1
        }
        _ => 0,
    }
}

/// The case's own data with every floating-point number negated.
fn negated<K: Declared>(inputs: &Inputs<K>) -> Inputs<K> {
    let mut tensors = Tensors::clone(&inputs.tensors);
    let names: Vec<_> = tensors.iter().map(|(name, tensor)| (name, tensor.dtype)).collect();
    for (name, _) in names.into_iter().filter(|(_, dtype)| matches!(dtype, DType::Bf16 | DType::F32)) {
        tensors.edit(name, |values| values.iter_mut().for_each(|value| *value = -*value));
    }
    Inputs::of(inputs.case.clone(), inputs.choices.clone(), tensors)
}
