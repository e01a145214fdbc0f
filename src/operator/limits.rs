//! Extents at their limits, beyond what any other edge case has. A field of a case that is an
//! extent takes in turn the most that the declaration allows, or, where that is more than a sweep
//! can pay for, as much as it can; the other extents shrink for it. No operator has to say
//! anything of it.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Profile;
use super::any::{AnyCase, Declaration};
use super::declaration::Specs;
use super::lines::checked;
use crate::case::Case;

/// Elements that the tensors of a case may have beyond those of the small case that it grew from,
/// where that takes an extent to its declared limit.
const ROOM_TO_A_LIMIT: usize = 1 << 18;

/// The same where there is no limit within that.
fn room(profile: Profile) -> usize {
    profile.of([1 << 12, 1 << 14, 1 << 16])
}

/// By how much an extent may grow at least: formats and tiles come in these.
const STEPS: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// One case for each field that is an extent, as large as it may be.
pub(super) fn edge_cases(operator: &dyn Declaration, profile: Profile) -> Vec<AnyCase> {
    let typical: Vec<Value> =
        operator.typical().iter().map(|case| Value::Object(case.line().fields)).collect();
    let fields: BTreeSet<String> =
        typical.iter().flat_map(|case| extents(operator, case)).collect();
    let largest = |(turn, field): (usize, &String)| {
        let mut turns = (0..typical.len()).map(|i| &typical[(turn + i) % typical.len()]);
        turns.find_map(|case| grown(operator, case, field, room(profile)))
    };
    fields.iter().enumerate().filter_map(largest).collect()
}

fn case_of(operator: &dyn Declaration, value: &Value) -> Option<(AnyCase, Specs)> {
    let fields = value.as_object()?.clone();
    let case = operator.parse(&Case { operator: operator.about().name.to_owned(), fields }).ok()?;
    let specs = checked(&*case).ok()?;
    Some((case, specs))
}

/// Elements of all tensors together; `None` of a case that is refused.
fn size(operator: &dyn Declaration, value: &Value) -> Option<usize> {
    let (_, specs) = case_of(operator, value)?;
    Some(specs.present().fold(0, |sum, spec| sum.saturating_add(spec.elements())))
}

/// A case with another number in a field, which is named by its JSON pointer.
fn with(case: &Value, field: &str, number: u64) -> Value {
    let mut case = case.clone();
    if let Some(value) = case.pointer_mut(field) {
        *value = number.into();
    }
    case
}

fn number(case: &Value, field: &str) -> Option<u64> {
    case.pointer(field)?.as_u64()
}

/// By how much a field grows at least, and how many elements that adds; `None` of what is no
/// extent of the case.
fn step(operator: &dyn Declaration, case: &Value, field: &str) -> Option<(u64, usize)> {
    let (own, now) = (number(case, field)?, size(operator, case)?);
    let more = |step: u64| Some((step, size(operator, &with(case, field, own + step))?));
    let (step, then) = STEPS.into_iter().find_map(more)?;
    (then > now).then(|| (step, then - now))
}

/// The fields of a case that are extents, by their JSON pointers.
fn extents(operator: &dyn Declaration, case: &Value) -> Vec<String> {
    fn fields(value: &Value, path: &str, all: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                map.iter().for_each(|(name, value)| fields(value, &format!("{path}/{name}"), all))
            }
            Value::Number(number) if number.is_u64() => all.push(path.to_owned()),
            _ => {}
        }
    }
    let mut all = Vec::new();
    fields(case, "", &mut all);
    all.retain(|field| step(operator, case, field).is_some());
    all
}

/// The case with the other extents as small as makes a step of this one cheaper: at least 2, where
/// they may be.
fn with_small_others(operator: &dyn Declaration, case: &Value, field: &str) -> Value {
    let mut small = case.clone();
    for other in extents(operator, case).iter().filter(|other| *other != field) {
        let cost = |case: &Value| step(operator, case, field).map(|(_, elements)| elements);
        let (Some(own), Some(now)) = (number(&small, other), cost(&small)) else { continue };
        let sizes = STEPS.into_iter().filter(|&size| (2..own).contains(&size));
        let found = sizes
            .map(|size| with(&small, other, size))
            .find(|case| cost(case).is_some_and(|cost| cost < now));
        small = found.unwrap_or(small);
    }
    small
}

/// The case with the largest extent in a field that there is room for; `None` where it is that
/// already.
fn grown(operator: &dyn Declaration, case: &Value, field: &str, room: usize) -> Option<AnyCase> {
    let small = with_small_others(operator, case, field);
    let (step, _) = step(operator, &small, field)?;
    let (own, now) = (number(&small, field)?, size(operator, &small)?);
    let after = |steps: u64| with(&small, field, own + steps * step);
    let within = |room: usize| {
        let fits =
            |steps: u64| size(operator, &after(steps)).is_some_and(|size| size - now <= room);
        let beyond = std::iter::successors(Some(1u64), |steps| steps.checked_mul(2))
            .find(|&steps| !fits(steps))?;
        // What fits is below what does not.
        let (mut most, mut too_much) = (beyond / 2, beyond);
        while too_much - most > 1 {
            let middle = most.midpoint(too_much);
            *(if fits(middle) { &mut most } else { &mut too_much }) = middle;
        }
        Some(most)
    };
    let at_the_limit =
        within(ROOM_TO_A_LIMIT).filter(|most| size(operator, &after(most + 1)).is_none());
    let most = at_the_limit.or_else(|| within(room)).filter(|&most| most > 0)?;
    case_of(operator, &after(most)).map(|(case, _)| case)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators::registry;

    /// The largest number in a field (a JSON pointer) of an operator's edge cases.
    fn largest(operator: &str, field: &str, profile: Profile) -> u64 {
        let cases = registry::find(operator).expect("an operator").edge_cases(profile);
        let fields = cases.into_iter().map(|case| Value::Object(case.fields));
        fields.filter_map(|case| number(&case, field)).max().expect("a case with this field")
    }

    #[test]
    fn declared_limits_are_edge_cases_and_other_extents_grow_as_far_as_a_sweep_can_pay() {
        for (operator, field, limit) in [
            ("rms_norm", "/width", 32768),
            ("sparse_attention", "/head_dim", 576),
            ("score_recompute", "/num_heads", 128),
            ("score_recompute", "/head_dim", 576),
            ("decode_attention", "/nope_dim", 448),
            ("kv_cache_write", "/nope_dim", 512),
        ] {
            assert_eq!(largest(operator, field, Profile::Quick), limit, "{field} of {operator}");
        }
        for (operator, field) in [
            ("attention_combine", "/num_parts"),
            ("decode_attention", "/window/topk"),
            ("sparse_attention", "/topk"),
            ("swiglu", "/num_rows"),
        ] {
            let [quick, full] =
                [Profile::Quick, Profile::Full].map(|profile| largest(operator, field, profile));
            assert!(
                quick > 96 && full > 2 * quick,
                "{field} of {operator}: {quick} in quick, {full} in full"
            );
        }
    }
}
