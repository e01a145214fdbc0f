//! What `parity ops` prints about an operator. Its tensors are the union over its cases.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use serde_json::Value;

use super::any::{AnyCase, Declaration};
use super::declaration::{Part, Specs, Strides, TensorSpec};
use super::declared::About;
use super::lines::{SMS, checked};
use super::special::Special;
use super::{Comparison, Profile};
use crate::case::Case;
use crate::record::{BatchAxis, InvariantRecord, OperatorRecord, TensorRecord};

/// Name, files, types, axes of an operator.
pub(super) fn of(operator: &dyn Declaration) -> OperatorRecord {
    let list =
        |items: &[&str]| -> Vec<String> { items.iter().map(|item| (*item).to_owned()).collect() };
    let About { name, family, summary, specification, paths, .. } = *operator.about();
    let tensors = tensors(operator);
    let tree = dsv4_kernels::embedded();
    // An operator's files have one name, in its family's folder of each tree.
    let files = |file: &dyn Fn(&str) -> String| {
        let of = if operator.chain().is_empty() { &[name] } else { operator.chain() };
        let place =
            |name: &&str| tree.path_of(&format!("{name}.cu")).trim_end_matches(".cu").to_owned();
        of.iter().map(|name| file(&place(name))).collect::<Vec<_>>().join(", ")
    };
    OperatorRecord {
        name: name.into(),
        family: Some(family),
        summary: summary.into(),
        specification: list(specification),
        kernel_file: files(&|place| format!("kernels/cuda/{place}.cu")),
        oracle_file: files(&|place| format!("reference/src/{place}.rs")),
        dtypes: tensors
            .iter()
            .map(|tensor| format!("{} {}", tensor.name, tensor.dtypes.join("|")))
            .collect(),
        axes: axes(operator),
        has_backward: tensors.iter().any(|tensor| tensor.part == "gradient"),
        paths: list(paths),
        tensors,
        invariant: invariant(operator),
        conventions: operator
            .conventions()
            .iter()
            .map(|one| [one.name().to_owned(), one.meaning().to_owned()])
            .collect(),
        not_expressible: operator
            .not_expressible()
            .iter()
            .map(|(what, why)| format!("{what} ({why})"))
            .collect(),
    }
}

/// The tensors of an operator: those of its typical cases, edge cases and some drawn ones.
fn tensors(operator: &dyn Declaration) -> Vec<TensorRecord> {
    /// Cached by operator: each lookup of a name needs all of it.
    static KNOWN: Mutex<BTreeMap<&str, Vec<TensorRecord>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    known.entry(operator.about().name).or_insert_with(|| found(operator)).clone()
}

/// The axes on which the operator declares batch invariance, and for which cases.
fn invariant(operator: &dyn Declaration) -> Vec<InvariantRecord> {
    let cases: Vec<(AnyCase, Kinds)> = sampled(operator)
        .filter(|case| checked(&**case).is_ok())
        .map(|case| (case.clone(), kinds(&case.line())))
        .collect();
    let kinds: Vec<Kinds> = cases.iter().map(|(_, kinds)| kinds.clone()).collect();
    let record = |axis: BatchAxis| {
        let of = |path: bool| -> Vec<bool> {
            cases.iter().map(|(case, _)| case.invariant(path).contains(&axis)).collect()
        };
        let (free, asked) = (of(false), of(true));
        let always = free.iter().all(|has| *has);
        let by_path = asked != free;
        let has = if by_path { asked } else { free };
        let when = if has.iter().all(|has| *has) { None } else { when(&has, &kinds) };
        has.contains(&true).then_some(InvariantRecord { axis, always, by_path, when })
    };
    BatchAxis::ALL.into_iter().filter_map(record).collect()
}

fn found(operator: &dyn Declaration) -> Vec<TensorRecord> {
    let (all, kinds) = cases(operator).into_iter().unzip();
    let (all, kinds): (Vec<Specs>, Vec<Kinds>) = (all, kinds);
    let mut names: Vec<&'static str> = Vec::new();
    for spec in all.iter().flat_map(Specs::present) {
        if !names.contains(&spec.name) {
            names.push(spec.name);
        }
    }
    names.into_iter().map(|name| record(name, &all, &kinds)).collect()
}

/// Drawn cases that are examined in addition to typical ones and edge cases. They cover choices
/// that exclude each other.
const DRAWN: usize = 200;

/// The tensors of many cases, and those fields of each case that can decide whether a tensor is
/// present.
fn cases(operator: &dyn Declaration) -> Vec<(Specs, Kinds)> {
    let cases = sampled(operator);
    cases.filter_map(|case| Some((checked(&*case).ok()?, kinds(&case.line())))).collect()
}

/// Typical cases, edge cases and drawn ones.
fn sampled(operator: &dyn Declaration) -> impl Iterator<Item = AnyCase> {
    let strategy = operator.strategy(Profile::Full);
    let mut runner = TestRunner::deterministic();
    let drawn =
        (0..DRAWN).filter_map(move |_| Some(strategy.new_tree(&mut runner).ok()?.current()));
    operator.typical().into_iter().chain(operator.edge_cases(Profile::Quick)).chain(drawn)
}

/// The value of each field of a case: a word, a boolean, or the kind of its value.
type Kinds = BTreeMap<String, String>;

fn kinds(case: &Case) -> Kinds {
    let mut kinds = Kinds::new();
    case.fields.iter().for_each(|(name, value)| add_kind(&mut kinds, name.clone(), value));
    kinds
}

fn add_kind(kinds: &mut Kinds, name: String, value: &Value) {
    let kind = match value {
        Value::Null => "absent".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) if number.as_f64() == Some(0.0) => "0".to_owned(),
        Value::Number(_) => "not 0".to_owned(),
        Value::String(word) => word.clone(),
        Value::Object(fields) if fields.len() == 1 => fields.keys().cloned().collect(),
        Value::Object(_) | Value::Array(_) => "present".to_owned(),
    };
    if let Value::Object(fields) = value {
        fields
            .iter()
            .for_each(|(within, value)| add_kind(kinds, format!("{name}.{within}"), value));
    }
    kinds.insert(name, kind);
}

/// Which cases have an optional tensor: the values of one field that decides it, or else the fewest
/// fields that decide it together.
fn when(has: &[bool], kinds: &[Kinds]) -> Option<String> {
    let fields: BTreeSet<&String> = kinds.iter().flat_map(Kinds::keys).collect();
    let of = |names: &[&String], present: bool| -> BTreeSet<Vec<&str>> {
        let cases = kinds.iter().zip(has).filter(|(_, has)| **has == present);
        cases
            .map(|(kinds, _)| {
                names.iter().map(|name| kinds.get(*name).map_or("absent", String::as_str)).collect()
            })
            .collect()
    };
    let decide = |names: &[&String]| of(names, true).is_disjoint(&of(names, false));
    if let Some(field) = fields.iter().find(|field| decide(&[field])) {
        let values: Vec<&str> = of(&[field], true).into_iter().flatten().collect();
        return Some(format!("{field}: {}", values.join(", ")));
    }
    let pairs =
        fields.iter().flat_map(|a| fields.iter().map(move |b| [*a, *b])).filter(|[a, b]| a < b);
    let threes = pairs
        .clone()
        .flat_map(|[a, b]| fields.iter().map(move |c| [a, b, *c]))
        .filter(|[_, b, c]| b < c);
    let decisive = pairs.map(Vec::from).chain(threes.map(Vec::from)).find(|names| decide(names))?;
    Some(format!(
        "decided by {}",
        decisive.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ")
    ))
}

/// What distinguishes its cases: the fields of a line, and what this layer chooses in addition.
fn axes(operator: &dyn Declaration) -> Vec<String> {
    let cases = || operator.typical().into_iter().chain(operator.edge_cases(Profile::Quick));
    let lines = cases().map(|case| case.line());
    let fields: BTreeSet<String> =
        lines.flat_map(|line| line.fields.keys().cloned().collect::<Vec<_>>()).collect();
    let special =
        |case: AnyCase| Special::OF_CLAMPS.iter().any(|special| special.fits(&case.tensors()));
    let special = operator.typical().into_iter().any(special).then_some("special values");
    let chosen = special.into_iter().chain(["layouts", SMS]).map(str::to_owned);
    fields.into_iter().filter(|field| field != "seed").chain(chosen).collect()
}

fn record(name: &'static str, all: &[Specs], kinds: &[Kinds]) -> TensorRecord {
    let has: Vec<bool> = all.iter().map(|specs| specs.find(name).is_some()).collect();
    let found: Vec<&TensorSpec> = all.iter().filter_map(|specs| specs.find(name)).collect();
    let (part, of) = match found[0].part {
        Part::Input => ("input", None),
        Part::Upstream { of } => ("upstream", Some(of)),
        Part::Output => ("output", None),
        Part::Gradient { of } => ("gradient", Some(of)),
        Part::State => ("state", None),
        Part::Scratch => ("scratch", None),
        Part::Observed => ("observed", None),
    };
    let dtypes: BTreeSet<String> = found.iter().map(|spec| spec.dtype.to_string()).collect();
    TensorRecord {
        name: name.to_owned(),
        part: part.to_owned(),
        of: of.map(str::to_owned),
        axes: found[0].axes.iter().map(|axis| axis.name.to_owned()).collect(),
        dtypes: dtypes.into_iter().collect(),
        always: found.len() == all.len(),
        when: if found.len() == all.len() { None } else { when(&has, kinds) },
        layouts: layouts(found[0]),
        compared: all.iter().any(|specs| specs.compares(name)).then(|| compared(found[0])),
    }
}

fn layouts(spec: &TensorSpec) -> String {
    let joined = if spec.joined {
        format!("; {} and {} evenly spaced", spec.axes[0].name, spec.axes[1].name)
    } else {
        String::new()
    };
    let aligned = |align: usize| {
        if align > 1 { format!(", at multiples of {align} bytes") } else { String::new() }
    };
    match spec.strides {
        Strides::Dense => "dense".into(),
        Strides::Rows { align } => format!("rows anywhere{}{joined}", aligned(align)),
        Strides::OrderedRows { align } => {
            format!("rows in order, with gaps{}{joined}", aligned(align))
        }
    }
}

fn compared(spec: &TensorSpec) -> String {
    let how = match spec.comparison {
        Comparison::Rounded => "within its budget".to_owned(),
        Comparison::Exact => "exactly".to_owned(),
        Comparison::Selection { scores } => format!("as a selection by `{scores}`, by margin"),
    };
    if spec.deterministic { how } else { format!("{how}; sums come in any order") }
}
