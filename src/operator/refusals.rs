//! Bad arguments, derived from the declaration. Each tensor of a typical case is corrupted in every
//! way, one at a time. The launcher must reject it and name the argument before any kernel runs.

use std::collections::BTreeMap;

use dsv4_runtime::{Contract, DType, Device, RuntimeError, TensorView, Views};

use super::any::Declaration;
use super::declaration::{Axis, Part, Specs, Strides, TensorSpec};
use super::declared::Launches;
use super::inputs::Inputs;
use super::lines::{Choices, oracle_error};
use super::memory::Placed;
use super::tensors::Tensors;
use crate::case::CaseError;

/// A bad argument, and the launcher's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Which tensor was corrupted, and how.
    pub what: String,
    /// The failure: it was accepted, the error named another argument, or a kernel ran. `None`
    /// where it was rejected correctly.
    pub problem: Option<String>,
}

/// Corrupted views, and the argument names that a rejection of them may give.
struct Corrupted {
    what: String,
    views: Vec<(&'static str, TensorView)>,
    blamed: Vec<&'static str>,
}

/// Corrupts every tensor of every typical case that can run on this device.
pub(super) fn of(operator: &dyn Declaration, device: &Device) -> Result<Vec<Refusal>, CaseError> {
    let mut refusals = Vec::new();
    for case in operator.typical() {
        if case.cannot_run(device.environment()).is_some() {
            continue;
        }
        let specs = case.tensors();
        let mut tensors = Tensors::draw(&specs, None);
        case.amend(&mut tensors).map_err(|e| oracle_error(case.name(), e))?;
        let inputs = Inputs::of(case, Choices::default(), tensors);
        refusals.extend(
            of_case(&inputs, &specs, device).map_err(|e| oracle_error(inputs.case.name(), e))?,
        );
    }
    Ok(refusals)
}

fn of_case(inputs: &Inputs, specs: &Specs, device: &Device) -> Result<Vec<Refusal>, RuntimeError> {
    let mut placed =
        Placed::place(device, Contract::NAN, specs, &inputs.choices.layouts, &inputs.tensors)?;
    for (name, bytes) in inputs.case.workspaces(placed.views(), device)? {
        placed.workspace(name, bytes)?;
    }
    let launch = |views: &Views| {
        let mut run = Launches::new(device, placed.arena());
        inputs.case.launch(views, &mut run)?;
        if specs.gradients().next().is_some() {
            inputs.case.launch_backward(views, &mut run)
        } else {
            Ok(())
        }
    };
    // The uncorrupted call must run. Otherwise every rejection could have another cause.
    launch(placed.views())?;
    let refusal = |corrupted: Corrupted| {
        let mut views = placed.views().clone();
        corrupted.views.into_iter().for_each(|(name, view)| views.put(name, view));
        Refusal {
            what: format!("{}: {}", inputs.case.name(), corrupted.what),
            problem: problem(launch(&views), &corrupted.blamed),
        }
    };
    Ok(spoil(specs, placed.views()).into_iter().map(refusal).collect())
}

fn problem(outcome: Result<(), RuntimeError>, blamed: &[&'static str]) -> Option<String> {
    match outcome {
        Err(RuntimeError::Argument { argument, .. }) if blamed.contains(&argument) => None,
        Err(RuntimeError::Argument { argument, reason, .. }) => {
            Some(format!("`{argument}` was blamed ({reason}), not {}", blamed.join(" or ")))
        }
        Err(error) => Some(format!("it was not refused, and then: {error}")),
        Ok(()) => Some("it was accepted".into()),
    }
}

fn spoil(specs: &Specs, views: &Views) -> Vec<Corrupted> {
    let mut all = Vec::new();
    for spec in specs.present().filter(|spec| spec.is_stored() && spec.elements() > 0) {
        let view = &views[spec.name];
        all.extend(with_another_type(spec, view));
        all.extend(with_another_rank(spec, view));
        all.extend(with_fewer_entries(specs, spec, view));
        all.extend(misaligned(spec, view));
        all.extend(laid_out_otherwise(spec, view));
        all.extend(overlapping(specs, spec, views));
    }
    all.extend(beyond_the_limits(specs, views));
    all
}

fn corrupted(spec: &TensorSpec, how: &str, view: TensorView) -> Corrupted {
    Corrupted {
        what: format!("`{}` {how}", spec.name),
        views: vec![(spec.name, view)],
        blamed: vec![spec.argument],
    }
}

fn with_another_type(spec: &TensorSpec, view: &TensorView) -> Option<Corrupted> {
    let other = if spec.dtype == DType::U8 { DType::I32 } else { DType::U8 };
    Some(corrupted(spec, &format!("of type {other}"), TensorView { dtype: other, ..view.clone() }))
}

fn with_another_rank(spec: &TensorSpec, view: &TensorView) -> Option<Corrupted> {
    let shape = [vec![1], view.shape.clone()].concat();
    let strides = [vec![spec.elements() as i64], view.strides.clone()].concat();
    Some(corrupted(spec, "with an axis more", TensorView { shape, strides, ..view.clone() }))
}

/// One entry less along each axis that another tensor of the case has as well.
fn with_fewer_entries(specs: &Specs, spec: &TensorSpec, view: &TensorView) -> Vec<Corrupted> {
    let less = |(at, axis): (usize, &Axis)| {
        let sharing: Vec<&'static str> = specs
            .present()
            .filter(|other| {
                other.name != spec.name && other.is_stored() && other.axis(axis.name).is_some()
            })
            .map(|other| other.argument)
            .collect();
        if sharing.is_empty() || axis.extent == 0 {
            return None;
        }
        let mut shorter = view.clone();
        shorter.shape[at] -= 1;
        let one = corrupted(spec, &format!("with one entry less along {}", axis.name), shorter);
        Some(Corrupted { blamed: [one.blamed.clone(), sharing].concat(), ..one })
    };
    spec.axes.iter().enumerate().filter_map(less).collect()
}

/// All tensors that have an axis with a limited extent, with one step more along it than the limit.
fn beyond_the_limits(specs: &Specs, views: &Views) -> Vec<Corrupted> {
    let stored = || specs.present().filter(|spec| spec.is_stored());
    let limited = |axis: &&Axis| axis.multiple > 0 && axis.most < i32::MAX as usize;
    let axes: BTreeMap<_, _> = stored()
        .flat_map(|spec| &spec.axes)
        .filter(limited)
        .map(|axis| (axis.name, axis))
        .collect();
    let beyond = |axis: &Axis| {
        let extent = axis.most + axis.multiple;
        let having = || stored().filter_map(|spec| Some((spec, spec.axis(axis.name)?)));
        let wider = |(spec, at): (&TensorSpec, usize)| {
            let mut view = views[spec.name].clone();
            view.shape[at] = extent;
            (spec.name, view)
        };
        let what = format!("{} of {extent}, its limit being {}", axis.name, axis.most);
        Corrupted {
            what,
            views: having().map(wider).collect(),
            blamed: having().map(|(spec, _)| spec.argument).collect(),
        }
    };
    axes.into_values().map(beyond).collect()
}

fn misaligned(spec: &TensorSpec, view: &TensorView) -> Vec<Corrupted> {
    let mut offsets = Vec::new();
    if spec.dtype.size() > 1 {
        offsets.push(1);
    }
    if let Strides::Rows { align } | Strides::OrderedRows { align } = spec.strides
        && align > spec.dtype.size()
    {
        offsets.push(spec.dtype.size());
    }
    let moved = |by: usize| {
        let view = TensorView { address: view.address + by as u64, ..view.clone() };
        corrupted(spec, &format!("{by} byte(s) off its alignment"), view)
    };
    offsets.into_iter().map(moved).collect()
}

/// Layouts that the kernel does not accept.
fn laid_out_otherwise(spec: &TensorSpec, view: &TensorView) -> Vec<Corrupted> {
    let mut all = Vec::new();
    let last = view.shape.len() - 1;
    let mut change = |how: &str, strides: Vec<i64>| {
        all.push(corrupted(spec, how, TensorView { strides, ..view.clone() }))
    };
    if view.shape[last] > 1 {
        let doubled = view.strides.iter().map(|stride| 2 * stride).collect();
        change("with gaps between the elements of a row", doubled);
    }
    let Some(outer) = (0..last).find(|&at| view.shape[at] > 1) else { return all };
    let with = |stride: i64| {
        let mut strides = view.strides.clone();
        strides[outer] = stride;
        strides
    };
    change("with all rows in one place", with(0));
    if spec.joined && view.shape[0] > 1 && view.shape[1] > 1 {
        let mut strides = view.strides.clone();
        strides[0] += 16;
        change(&format!("with its {} unevenly spaced", spec.axes[1].name), strides);
    }
    match spec.strides {
        Strides::Dense => change("with a gap between its rows", with(view.strides[outer] + 16)),
        Strides::Rows { align } | Strides::OrderedRows { align } if align > spec.dtype.size() => {
            change("with rows off their alignment", with(view.strides[outer] + 1));
        }
        _ => {}
    }
    all
}

/// Everything that is written, in the memory of every other tensor of the same launch.
fn overlapping(specs: &Specs, spec: &TensorSpec, views: &Views) -> Vec<Corrupted> {
    let others = specs
        .present()
        .filter(|other| other.name != spec.name && other.is_stored() && other.elements() > 0);
    let may_be = |a: &TensorSpec, b: &TensorSpec| a.may_be == Some(b.name);
    others
        .filter(|other| meet(spec, other) && !may_be(spec, other) && !may_be(other, spec))
        .map(|other| {
            let view =
                TensorView { address: views[other.name].address, ..views[spec.name].clone() };
            let one = corrupted(spec, &format!("in the memory of `{}`", other.name), view);
            Corrupted { blamed: vec![spec.argument, other.argument], ..one }
        })
        .collect()
}

/// Whether a launch that writes `written` also receives `other`. The declaration does not list the
/// outputs that a backward reads.
fn meet(written: &TensorSpec, other: &TensorSpec) -> bool {
    let one_launch =
        written.only_in.is_none() || other.only_in.is_none() || written.only_in == other.only_in;
    match written.part {
        Part::Output | Part::State => {
            one_launch && matches!(other.part, Part::Input | Part::Output | Part::State)
        }
        Part::Gradient { .. } => match other.part {
            Part::Input => other.only_in.is_none() || other.only_in == written.only_in,
            Part::Upstream { .. } | Part::Gradient { .. } => one_launch,
            _ => false,
        },
        _ => false,
    }
}
