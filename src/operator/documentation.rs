//! What `parity ops` says of an operator's tensors: the union over its cases.

use std::collections::BTreeSet;

use super::declaration::{Part, Specs, Strides, TensorSpec};
use super::declared::{Declared, checked};
use super::special::Special;
use super::{Comparison, Profile};
use crate::case::Case;
use crate::record::TensorRecord;

/// The tensors of an operator: what its typical cases and edge cases have.
pub(super) fn tensors<K: Declared>() -> Vec<TensorRecord> {
    let cases = K::typical().into_iter().chain(K::edge_cases(Profile::Quick));
    let all: Vec<Specs> = cases.filter_map(|case| checked::<K>(&case).ok()).collect();
    let mut names: Vec<&'static str> = Vec::new();
    for spec in all.iter().flat_map(Specs::present) {
        if !names.contains(&spec.name) {
            names.push(spec.name);
        }
    }
    names.into_iter().map(|name| record(name, &all)).collect()
}

/// What its cases differ in: the fields of a line, and what this layer chooses beside them.
pub(super) fn axes<K: Declared>() -> Vec<String> {
    let cases = || K::typical().into_iter().chain(K::edge_cases(Profile::Quick));
    let lines = cases().map(|case| Case::new(K::ABOUT.name, &case));
    let fields: BTreeSet<String> = lines.flat_map(|line| line.fields.keys().cloned().collect::<Vec<_>>()).collect();
    let special = |case: K::Case| Special::OF_CLAMPS.iter().any(|special| special.fits(&K::tensors(&case)));
    let special = K::typical().into_iter().any(special).then_some("special values");
    let chosen = special.into_iter().chain(["layouts"]).map(str::to_owned);
    fields.into_iter().filter(|field| field != "seed").chain(chosen).collect()
}

fn record(name: &'static str, all: &[Specs]) -> TensorRecord {
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
    let aligned = |align: usize| if align > 1 { format!(", at multiples of {align} bytes") } else { String::new() };
    match spec.strides {
        Strides::Dense => "dense".into(),
        Strides::Rows { align } => format!("rows anywhere{}{joined}", aligned(align)),
        Strides::OrderedRows { align } => format!("rows in order, with gaps{}{joined}", aligned(align)),
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
