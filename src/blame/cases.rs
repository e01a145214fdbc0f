//! The case that declares the tensors of a call that has happened.
//!
//! Sizes are those of the tensors: a field with the name of an axis is its extent. Other numbers
//! and words are given. The oracle reads the tensors as they are, so sizes that a case would derive
//! (the rows of experts, the longest of some lists) need not be the call's.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};

use crate::calls::fields::{leaves, set};
use crate::case::Case;
use crate::operator::AnyOperator;
use crate::operator::actual::ByName;
use crate::operator::call::Call;
use crate::operator::declaration::TensorSpec;

/// Numbers and words by the paths of their fields.
pub type Fields = Map<String, Value>;

/// The cases that show how an operator is used, gathered once.
fn templates(operator: &'static AnyOperator) -> Vec<Case> {
    static KNOWN: Mutex<BTreeMap<&'static str, Vec<Case>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry(operator.name()).or_insert_with(|| operator.templates()).clone()
}

/// The call of an operator with these tensors and fields.
///
/// # Errors
/// Why no case of the operator has them.
pub fn find(
    operator: &'static AnyOperator,
    tensors: &ByName,
    fields: &Fields,
) -> Result<Call, String> {
    let (mut near, mut reason): (Option<(Distance, Call)>, _) = (None, None);
    for template in templates(operator) {
        match declared(operator, template, tensors, fields) {
            Ok((call, distance)) => {
                if near.as_ref().is_none_or(|(known, _)| distance < *known) {
                    near = Some((distance, call));
                }
                if distance == (0, 0) {
                    break;
                }
            }
            Err(why) => reason = reason.or(why),
        }
    }
    let name = operator.name();
    near.map(|(_, call)| call).ok_or_else(|| {
        let why = reason.unwrap_or_else(|| {
            let names: Vec<&str> = tensors.keys().map(String::as_str).collect();
            format!("no case has the tensors {} with these types", names.join(", "))
        });
        format!("{name}: {why}")
    })
}

/// How many tensors that a case has for its other launches the call lacks, and how many of its own
/// have other shapes.
type Distance = (usize, usize);

/// A template's case with the sizes of the tensors.
fn declared(
    operator: &'static AnyOperator,
    mut case: Case,
    tensors: &ByName,
    fields: &Fields,
) -> Result<(Call, Distance), Option<String>> {
    let known = leaves(&case);
    let of_case = |case: &Case| operator.call(case).map_err(|error| Some(error.to_string()));
    let sized = |case: &mut Case, call: &Call| {
        for spec in call.specs().all() {
            let Some(tensor) = tensors.get(spec.name) else { continue };
            for (axis, &extent) in spec.axes.iter().zip(&tensor.shape) {
                if known.contains_key(axis.name) && !fields.contains_key(axis.name) {
                    set(case, axis.name, &extent.into());
                }
            }
        }
    };
    let own = of_case(&case)?;
    sized(&mut case, &own);
    for (path, value) in fields.iter().filter(|(path, _)| known.contains_key(*path)) {
        set(&mut case, path, value);
    }
    let call = of_case(&case)?;
    if !fits(&call, tensors) {
        return Err(None);
    }
    let read = || call.specs().present().filter(|spec| spec.is_read());
    let missing = read().filter(|spec| !tensors.contains_key(spec.name)).count();
    let other = |spec: &&TensorSpec| {
        tensors.get(spec.name).is_some_and(|tensor| tensor.shape != spec.shape())
    };
    let others = read().filter(other).count();
    Ok((call, (missing, others)))
}

/// Whether the case has these tensors, with their types and axes.
fn fits(call: &Call, tensors: &ByName) -> bool {
    call.specs().all().iter().filter(|spec| spec.is_stored()).all(|spec| {
        match (spec.is_read(), spec.present, tensors.get(spec.name)) {
            (true, false, Some(_)) => false,
            (_, true, Some(tensor)) => {
                tensor.dtype == spec.dtype && tensor.shape.len() == spec.axes.len()
            }
            _ => true,
        }
    })
}
