//! A run without roundings next to the actual one: each call's oracle on what the earlier ones
//! would have written without any rounding of theirs.
//!
//! Values lie at the addresses of the run. An element without one is as the run has it: weights,
//! lists, choices, which are followed, and rows of caches as they are stored.

use std::collections::{BTreeMap, HashMap};

use dsv4_reference::Named;
use dsv4_reference::formats::quantize_fp8::{self, Group};
use dsv4_reference::formats::scale_layout::ScaleLayout;
use dsv4_reference::quantize::ScaleType;
use dsv4_runtime::{DType, TensorView};
use serde::Serialize;

use super::calls::{Called, Held, rows};
use crate::operator::OracleTensor;
use crate::operator::actual::Actual;
use crate::operator::declaration::TensorSpec;
use crate::operator::fields::{elements, tensor};

/// Elements whose value without roundings is not the actual one, by their addresses.
#[derive(Clone, Default)]
pub(super) struct Shadow {
    values: HashMap<u64, f64>,
}

/// The error of a tensor of numbers, relative to the run without roundings: root mean squares.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorError {
    /// The tensor.
    pub tensor: &'static str,
    /// What the call adds: its distance from the oracle on its own inputs.
    pub added: f64,
    /// What it inherits: the distance of that from the run without roundings.
    pub inherited: f64,
    /// Both together.
    pub total: f64,
}

fn addresses(view: &TensorView) -> impl Iterator<Item = u64> {
    let (offsets, length) = rows(view);
    let (start, size) = (view.address, view.dtype.size() as i64);
    offsets.into_iter().flat_map(move |offset| {
        (0..length as i64).map(move |at| start.wrapping_add_signed((offset + at) * size))
    })
}

impl Shadow {
    /// The tensor's values without roundings, where some differ.
    fn read(&self, held: &Held) -> Option<Vec<f64>> {
        let view = held.view.as_ref()?;
        if !addresses(view).any(|address| self.values.contains_key(&address)) {
            return None;
        }
        let mut values = held.tensor.to_f64();
        for (value, address) in values.iter_mut().zip(addresses(view)) {
            *value = self.values.get(&address).copied().unwrap_or(*value);
        }
        Some(values)
    }

    fn write(&mut self, view: &TensorView, actual: &[f64], exact: Option<&[f64]>) {
        for (at, address) in addresses(view).enumerate() {
            let value = exact.map_or(actual[at], |exact| exact[at]);
            match value == actual[at] || value.is_nan() {
                true => drop(self.values.remove(&address)),
                false => drop(self.values.insert(address, value)),
            }
        }
    }

    /// Runs a call, and returns how far each of its tensors of numbers is from the run without
    /// roundings. With `kicked` the call's own errors remain in this run.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn follow(
        &mut self,
        called: &Called,
        actual: &Actual,
        kicked: bool,
    ) -> Result<Vec<TensorError>, String> {
        let others = self.others(called, actual);
        let own = exact(actual, &BTreeMap::new())?;
        let ideal = if others.is_empty() { own.clone() } else { exact(actual, &others)? };
        let mut errors = Vec::new();
        for spec in actual.outputs() {
            let Some((view, values)) = written(called, spec) else { continue };
            let of = |all| found(all, spec, values.len()).filter(|_| !Actual::is_choice(spec));
            let (own, ideal) = (of(&own), of(&ideal));
            let numbers = own.zip(ideal.clone()).filter(|_| is_number(spec));
            let remaining = numbers.as_ref().filter(|_| kicked).map(|(own, ideal)| {
                let kick = values.iter().zip(own).map(|(actual, own)| actual - own);
                ideal.iter().zip(kick).map(|(ideal, kick)| ideal + kick).collect()
            });
            self.write(&view, &values, remaining.or(ideal).as_deref());
            errors.extend(numbers.map(|(own, ideal)| error_of(spec.name, &values, &own, &ideal)));
        }
        Ok(errors)
    }

    /// Runs a call without roundings.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn run(&mut self, called: &Called, actual: &Actual) -> Result<(), String> {
        let ideal = exact(actual, &self.others(called, actual))?;
        for spec in actual.outputs() {
            let Some((view, values)) = written(called, spec) else { continue };
            let ideal = found(&ideal, spec, values.len());
            self.write(&view, &values, ideal.filter(|_| !Actual::is_choice(spec)).as_deref());
        }
        Ok(())
    }

    /// The values of a call's inputs that are not the actual ones.
    fn others(&self, called: &Called, actual: &Actual) -> BTreeMap<&'static str, Vec<f64>> {
        let of = |spec: &TensorSpec| Some((spec.name, self.read(called.before.get(spec.name)?)?));
        actual.inputs().filter_map(of).collect()
    }

    /// What a call wrote, without roundings.
    pub fn values(&self, called: &Called, tensor: &str) -> Option<Vec<f64>> {
        let held = called.before.get(tensor)?;
        let after = Held { tensor: called.after.get(tensor)?.clone(), view: held.view.clone() };
        self.read(&after).or_else(|| Some(after.tensor.to_f64()))
    }

    /// Takes what a call wrote as it is.
    pub fn forget(&mut self, called: &Called) {
        for (name, held) in &called.before {
            let after = called.after.get(name).filter(|after| **after != held.tensor);
            if let (Some(view), Some(after)) = (&held.view, after) {
                self.write(view, &after.to_f64(), None);
            }
        }
    }
}

fn exact(
    actual: &Actual,
    others: &BTreeMap<&'static str, Vec<f64>>,
) -> Result<Vec<OracleTensor>, String> {
    actual.exact(others).map_err(|error| error.to_string())
}

/// Where a tensor of a call lies, and what the call wrote there.
fn written(called: &Called, spec: &TensorSpec) -> Option<(TensorView, Vec<f64>)> {
    let view = called.before.get(spec.name)?.view.clone()?;
    Some((view, called.after.get(spec.name)?.to_f64()))
}

/// The oracle's values of a tensor of that many elements.
fn found(all: &[OracleTensor], spec: &TensorSpec, elements: usize) -> Option<Vec<f64>> {
    let tensor = all.iter().find(|tensor| tensor.name == spec.name);
    let values = tensor.map(|tensor| tensor.values.clone()).or_else(|| coded(all, spec));
    values.filter(|values| values.len() == elements)
}

/// Codes are no numbers of their own: their scales belong to them.
fn is_number(spec: &TensorSpec) -> bool {
    matches!(spec.dtype, DType::Bf16 | DType::F32)
}

/// How far numbers are from others, over the root mean square of the numbers `of`.
pub(super) fn distance(values: &[f64], from: &[f64], of: &[f64]) -> f64 {
    let size: f64 = of.iter().filter(|value| value.is_finite()).map(|value| value * value).sum();
    let squares = values.iter().zip(from).filter(|(_, from)| from.is_finite());
    let sum: f64 = squares.map(|(value, from)| (value - from) * (value - from)).sum();
    if sum == 0.0 { 0.0 } else { (sum / size).sqrt() }
}

/// The e4m3 codes, or their scales, of numbers that an operator's oracle has decoded.
fn coded(all: &[OracleTensor], spec: &TensorSpec) -> Option<Vec<f64>> {
    let decoded = all.iter().find(|tensor| tensor.name == "decoded")?;
    let name = ["codes", "scales"].into_iter().find(|name| *name == spec.name)?;
    let x = tensor(decoded.values.clone(), &decoded.shape).ok()?;
    let options = quantize_fp8::Options {
        group: Group::Row(128),
        scale: ScaleType::E8m0,
        layout: ScaleLayout::Plain,
    };
    let coded = quantize_fp8::quantize(&Named::new().with("x", x), options).ok()?;
    elements(coded.tensor(name).ok()?).ok()
}

/// The parts of an error.
fn error_of(tensor: &'static str, actual: &[f64], own: &[f64], ideal: &[f64]) -> TensorError {
    let apart = |a: &[f64], b: &[f64]| distance(a, b, ideal);
    TensorError {
        tensor,
        added: apart(actual, own),
        inherited: apart(own, ideal),
        total: apart(actual, ideal),
    }
}
