//! The case that declares given tensors: one of the operator's own cases, with the sizes of these
//! tensors and the numbers and words of the caller.

use std::collections::BTreeMap;

use dsv4_runtime::DType;
use serde_json::Value;

use super::fields::{leaves, set};
use super::fit;
use super::observed::{Observed, Observer, Seen, Sizes};
use super::signature::{Argument, Field, Kind, Signature, Template, free_axes};
use crate::case::{Case, CaseError};
use crate::operator::call::Call;
use crate::operator::declaration::Axis;

/// A tensor of the caller.
#[derive(Clone, Debug)]
pub struct Given {
    /// The argument.
    pub name: String,
    /// Its type.
    pub dtype: DType,
    /// Its sizes.
    pub shape: Vec<usize>,
    /// Its strides, in elements.
    pub strides: Vec<i64>,
}

/// A call that declares the given tensors.
pub struct Solved {
    /// The call.
    pub call: Call,
    /// Its tensors and launches; where nothing is launched, those of a larger case.
    pub observed: Observed,
    /// The sizes of axes that the caller told.
    pub sizes: Sizes,
}

/// Why tensors and options fit no case: the argument, its value and the rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Misfit {
    argument: String,
    reason: String,
    /// How far it is from a fit; the smallest is reported.
    distance: usize,
}

impl Misfit {
    fn new(argument: &str, reason: impl Into<String>, distance: usize) -> Self {
        Self { argument: argument.into(), reason: reason.into(), distance }
    }

    /// With the numbers of which sizes may follow, and which nothing told.
    fn with_open(self, case: &Case, open: &[&Field]) -> Self {
        if open.is_empty() {
            return self;
        }
        let leaves = leaves(case);
        let values = open.iter().map(|field| format!("{}={}", field.keyword, leaves[&field.path]));
        let values: Vec<String> = values.collect();
        let reason = format!("{}, where {} is not given", self.reason, values.join(" and "));
        Self { reason, ..self }
    }

    /// The message of the error.
    pub fn message(&self, operator: &str) -> String {
        format!("{operator}: argument `{}`: {}", self.argument, self.reason)
    }
}

/// Values of the caller by argument.
pub type Options = BTreeMap<String, Value>;

/// A seed that no declared case has.
const SEED: u64 = 40_961;

/// Distances of misfits: the farther one is known earlier.
const OF_NAMES: usize = 1000;
const OF_TYPES: usize = 100;

/// A call to be found.
struct Search<'s> {
    signature: &'s Signature,
    direction: usize,
    /// In the order in which the operator declares them.
    given: Vec<Given>,
    options: &'s Options,
    observer: &'s Observer,
}

/// Finds the call.
///
/// # Errors
/// The misfit of the case that comes closest.
pub fn solve(
    signature: &Signature,
    direction: usize,
    given: &[Given],
    options: &Options,
    observer: &Observer,
) -> Result<Solved, Misfit> {
    let arguments = signature.given(direction);
    given.iter().try_for_each(|tensor| of_argument(tensor, &arguments))?;
    options.iter().try_for_each(|(name, value)| of_option(signature, name, value))?;
    let place = |tensor: &Given| {
        arguments.iter().position(|known| known.spec.name == tensor.name).unwrap_or_default()
    };
    let mut given = given.to_vec();
    given.sort_by_key(place);
    Search { signature, direction, given, options, observer }.run()
}

impl Search<'_> {
    fn run(&self) -> Result<Solved, Misfit> {
        let mut closest: Option<Misfit> = None;
        let mut found: Option<Solved> = None;
        for template in candidates(self.signature, self.direction, &self.given) {
            match self.fitted(template) {
                Ok(solved) => match &found {
                    None => found = Some(solved),
                    Some(one) => self.unambiguous(one, &solved)?,
                },
                Err(misfit) => {
                    let is_closer = |closest: &Misfit| misfit.distance < closest.distance;
                    if closest.as_ref().is_none_or(is_closer) {
                        closest = Some(misfit);
                    }
                }
            }
        }
        let none = || Misfit::new("arguments", "no case of the operator has them", 0);
        found.ok_or_else(|| closest.unwrap_or_else(none))
    }

    /// Where two calls fit that launch something else, the caller must choose.
    fn unambiguous(&self, one: &Solved, other: &Solved) -> Result<(), Misfit> {
        let launches = |solved: &Solved| solved.observed.launches[self.direction].clone();
        if launches(one) == launches(other) {
            return Ok(());
        }
        let (one, other) = (leaves(&one.call.line()), leaves(&other.call.line()));
        let is_open = |field: &&Field| {
            field.kind == Kind::Choice
                && field.default.is_none()
                && !field.is_implementation()
                && !self.options.contains_key(&field.keyword)
                && one.get(&field.path) != other.get(&field.path)
        };
        let Some(field) = self.signature.fields.iter().find(is_open) else { return Ok(()) };
        let values: Vec<String> = field.values.iter().map(Value::to_string).collect();
        let reason = format!("it must be given: one of {}", values.join(", "));
        Err(Misfit::new(&field.keyword, reason, 0))
    }

    /// The case of a template with its fields set for the given tensors.
    fn set(&self, template: &Template) -> Case {
        let Self { signature, given, options, .. } = self;
        let mut case = template.case.clone();
        // Which tensors are one memory is the caller's to say.
        for path in leaves(&case).keys().filter(|path| path.ends_with("aliasing")) {
            set(&mut case, path, &"out_of_place".into());
        }
        fit::set_options(signature, &mut case, given, options);
        fit::set_modes(signature, &mut case, given, options);
        fit::set_sizes(signature, template, &mut case, given, options);
        fit::set_gaps(signature, template, &mut case, given);
        case
    }

    /// Compares what a template's case then declares with the given tensors.
    fn fitted(&self, template: &Template) -> Result<Solved, Misfit> {
        let Self { signature, given, options, observer, direction } = self;
        let case = self.set(template);
        let open = fit::open_numbers(signature, &case, given, options);
        let call = signature.operator.call(&case).map_err(|error| of_case(signature, &error))?;
        let sizes = fit::free_sizes(signature, &call, given, options);
        for tensor in given {
            compare(tensor, &call, &sizes).map_err(|misfit| misfit.with_open(&case, &open))?;
        }
        let observed = observer.observe_with(&call, &sizes);
        let observed = observed.map_err(|error| of_launcher(&error.to_string()))?;
        let of_values = free_axes(signature.operator, observer, &case, &observed, SEED);
        let is_untold =
            |axis: &&&str| signature.free.contains(**axis) && !sizes.contains_key(**axis);
        if let Some(axis) = of_values.iter().find(is_untold) {
            return Err(Misfit::new(axis, "it must be given: values decide it", 2));
        }
        let observed =
            if observed.launches_in(*direction) { observed } else { template.observed.clone() };
        self.all_needed(&observed)?;
        all_told(signature, &case, &observed, &open, observer)?;
        Ok(Solved { call, observed, sizes })
    }

    /// Rejects a tensor that is missing, and one that is not read.
    fn all_needed(&self, observed: &Observed) -> Result<(), Misfit> {
        let needed: Vec<&str> = observed.given(self.direction).map(|seen| seen.spec.name).collect();
        if let Some(missing) =
            needed.iter().find(|name| self.given.iter().all(|tensor| tensor.name != **name))
        {
            return Err(Misfit::new(missing, "it must be present", OF_NAMES));
        }
        match self.given.iter().find(|tensor| !needed.contains(&tensor.name.as_str())) {
            Some(tensor) => {
                Err(Misfit::new(&tensor.name, "such a call does not read it", OF_NAMES))
            }
            None => Ok(()),
        }
    }
}

/// Rejects a tensor that no case can have.
fn of_argument(tensor: &Given, arguments: &[Argument]) -> Result<(), Misfit> {
    let refuse = |reason| Err(Misfit::new(&tensor.name, reason, 0));
    let Some(argument) = arguments.iter().find(|known| known.spec.name == tensor.name) else {
        return refuse("there is no argument of this name".to_owned());
    };
    if !argument.dtypes.contains(&tensor.dtype.to_string()) {
        let known: Vec<&str> = argument.dtypes.iter().map(String::as_str).collect();
        return refuse(format!("element type {} must be {}", tensor.dtype, known.join(" or ")));
    }
    Ok(())
}

/// Rejects a value that no case can have.
fn of_option(signature: &Signature, name: &str, value: &Value) -> Result<(), Misfit> {
    let refuse = |reason| Err(Misfit::new(name, reason, 0));
    let Some(field) = signature.fields.iter().find(|field| field.keyword == name) else {
        return match (signature.free.contains(name), value.is_u64()) {
            (true, true) => Ok(()),
            (true, false) => refuse(format!("{value} must be a whole number, not negative")),
            (false, _) => refuse("there is no argument of this name".to_owned()),
        };
    };
    let is_whole = field.values.iter().all(Value::is_u64);
    match field.kind {
        Kind::Choice if !field.values.contains(value) && !value.is_array() => {
            let values: Vec<String> = field.values.iter().map(Value::to_string).collect();
            refuse(format!("{value} must be one of {}", values.join(", ")))
        }
        Kind::Number | Kind::Size(_) if is_whole && !value.is_u64() => {
            refuse(format!("{value} must be a whole number, not negative"))
        }
        Kind::Number | Kind::Size(_) if !value.is_number() => {
            refuse(format!("{value} must be a number"))
        }
        _ => Ok(()),
    }
}

/// The cases with the given tensors' names first, then those with some of them.
fn candidates<'s>(
    signature: &'s Signature,
    direction: usize,
    given: &[Given],
) -> Vec<&'s Template> {
    let distance = |template: &&Template| {
        let has = |name: &str| given.iter().any(|tensor| tensor.name == name);
        let seen: Vec<_> = template.observed.given(direction).collect();
        let absent = seen.iter().filter(|seen| !has(seen.spec.name)).count();
        let of = |tensor: &Given| {
            let same = seen.iter().find(|seen| seen.spec.name == tensor.name);
            same.map_or(OF_NAMES, |seen| {
                let rank = seen.spec.axes.len() != tensor.shape.len();
                usize::from(seen.spec.dtype != tensor.dtype) + usize::from(rank)
            })
        };
        OF_NAMES * absent + given.iter().map(of).sum::<usize>()
    };
    let launching =
        signature.templates.iter().filter(|template| template.observed.launches_in(direction));
    let mut all: Vec<(usize, &Template)> =
        launching.map(|template| (distance(&template), template)).collect();
    all.sort_by_key(|(distance, _)| *distance);
    let least = all.first().map_or(0, |(distance, _)| *distance);
    // Where some case has these very tensors, others need no trial.
    let most = if least == 0 { 0 } else { least + 4 };
    all.into_iter().filter(|(distance, _)| *distance <= most).map(|(_, one)| one).collect()
}

/// Rejects a call whose launches, or what they write, depend on a number that nothing tells.
fn all_told(
    signature: &Signature,
    case: &Case,
    observed: &Observed,
    open: &[&Field],
    observer: &Observer,
) -> Result<(), Misfit> {
    let tensors = |observed: &Observed, given: bool| -> Vec<_> {
        let of = |seen: &&Seen| (0..2).any(|d| seen.needed[d] && seen.is_read(d)) == given;
        let all = observed.tensors.iter().filter(of);
        all.map(|seen| (seen.spec.name, seen.spec.dtype, seen.spec.shape())).collect()
    };
    for field in open {
        let value = leaves(case)[&field.path].as_f64().unwrap_or_default();
        for other in [value + 1.0, value * 2.0 + 0.5, value * 2.0] {
            let mut changed = case.clone();
            let is_whole = leaves(case)[&field.path].is_u64();
            let other: Value = if is_whole { (other as u64).into() } else { other.into() };
            set(&mut changed, &field.path, &other);
            let Ok(call) = signature.operator.call(&changed) else { continue };
            let Ok(again) = observer.observe_near(&call, observed) else { continue };
            let same = tensors(&again, true) == tensors(observed, true);
            let else_same = tensors(&again, false) == tensors(observed, false)
                && again.launches == observed.launches;
            if same && !else_same {
                return Err(Misfit::new(&field.keyword, "it must be given", 2));
            }
        }
    }
    Ok(())
}

/// Compares a given tensor with what the case declares.
fn compare(tensor: &Given, call: &Call, sizes: &Sizes) -> Result<(), Misfit> {
    let refuse = |reason, distance| Err(Misfit::new(&tensor.name, reason, distance));
    let Some(spec) = call.specs().find(&tensor.name) else {
        return refuse("such a call does not have it".to_owned(), OF_NAMES);
    };
    if spec.dtype != tensor.dtype {
        let reason = format!("element type {} must be {}", tensor.dtype, spec.dtype);
        return refuse(reason, OF_TYPES);
    }
    let names: Vec<&str> = spec.axes.iter().map(|axis| axis.name).collect();
    let size = |axis: &Axis| sizes.get(axis.name).copied().unwrap_or(axis.extent);
    let (names, shape) = (names.join(", "), spec.axes.iter().map(size).collect::<Vec<_>>());
    if shape.len() != tensor.shape.len() {
        let (axes, wanted) = (tensor.shape.len(), shape.len());
        let reason = format!("shape {:?} has {axes} axes, not {wanted} ({names})", tensor.shape);
        return refuse(reason, OF_TYPES);
    }
    if shape != tensor.shape {
        return refuse(format!("shape {:?} must be {shape:?} ({names})", tensor.shape), 10);
    }
    Ok(())
}

fn of_case(signature: &Signature, error: &CaseError) -> Misfit {
    let keyword = |path: &str| {
        let field = signature.fields.iter().find(|field| field.path == path);
        field.map_or_else(|| path.to_owned(), |field| field.keyword.clone())
    };
    match error {
        CaseError::Field { field, reason, .. } => Misfit::new(&keyword(field), reason.clone(), 5),
        other => Misfit::new("arguments", other.to_string(), 20),
    }
}

fn of_launcher(message: &str) -> Misfit {
    let named = message.split('`').nth(1).unwrap_or("arguments");
    let reason = message.split_once("`: ").map_or(message, |(_, reason)| reason);
    Misfit::new(named, reason, 4)
}

/// Solves templates of an operator again, from their tensors and options, for launches with the
/// portable kernels; returns each that then launches something else.
pub fn rediscover(signature: &Signature, observer: &Observer, most: usize) -> Vec<String> {
    let step = signature.templates.len().div_ceil(most).max(1);
    let templates = signature.templates.iter().step_by(step);
    let portable = templates.filter(|template| {
        let chosen = signature.fields.iter().filter(|field| field.is_implementation());
        chosen.into_iter().all(|field| {
            template.leaves.get(&field.path).is_none_or(|value| *value == fit::slowest(field))
        })
    });
    portable
        .flat_map(|template| (0..2).map(move |direction| (template, direction)))
        .filter(|(template, direction)| template.observed.launches_in(*direction))
        .filter_map(|(template, direction)| again(signature, template, direction, observer))
        .collect()
}

/// What differs where a template is solved again.
fn again(
    signature: &Signature,
    template: &Template,
    direction: usize,
    observer: &Observer,
) -> Option<String> {
    let given = template.observed.given(direction).map(|seen| Given {
        name: seen.spec.name.to_owned(),
        dtype: seen.spec.dtype,
        shape: seen.spec.shape(),
        strides: seen.strides.clone(),
    });
    let axes = template.observed.tensors.iter().flat_map(|seen| &seen.spec.axes);
    let free = axes.filter(|axis| signature.free.contains(axis.name));
    let free = free.map(|axis| (axis.name.to_owned(), axis.extent.into()));
    let taken =
        signature.fields.iter().filter(|field| signature.takes(field)).filter_map(|field| {
            Some((field.keyword.clone(), template.leaves.get(&field.path)?.clone()))
        });
    let (given, options): (Vec<_>, Options) = (given.collect(), taken.chain(free).collect());
    let case = template.case.line();
    match solve(signature, direction, &given, &options, observer) {
        Err(misfit) => Some(format!("{} for {case}", misfit.message(signature.operator.name()))),
        Ok(solved) => {
            let same = solved.observed.launches[direction] == template.observed.launches[direction];
            (!same).then(|| format!("{} instead of {case}", solved.call.line().line()))
        }
    }
}
