//! Sizes at their limits, beyond all other edge cases. Each field of a case that is an extent takes
//! the largest value that the declaration allows. Where that costs a sweep too much, it takes the
//! largest affordable value. The other sizes shrink to make room. Operators declare nothing for
//! this.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Profile;
use super::any::{AnyCase, Declaration};
use super::declaration::Specs;
use super::lines::checked;
use crate::case::Case;

/// Elements that a case may add to the small case it started from, where that reaches an extent's
/// declared limit.
const ROOM_TO_A_LIMIT: usize = 1 << 18;

/// The same where no limit is within reach.
fn room(profile: Profile) -> usize {
    profile.of([1 << 12, 1 << 14, 1 << 16])
}

/// The least step of an extent: formats and tiles need such multiples.
const STEPS: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// One case for each field that is an extent, at its largest value.
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

/// Elements of all tensors together; `None` for a rejected case.
fn size(operator: &dyn Declaration, value: &Value) -> Option<usize> {
    let (_, specs) = case_of(operator, value)?;
    Some(specs.present().fold(0, |sum, spec| sum.saturating_add(spec.elements())))
}

/// A case with another number in a field, given by its JSON pointer.
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

/// The least step of a field, and how many elements it adds. `None` if the field is not an extent
/// of the case.
fn step(operator: &dyn Declaration, case: &Value, field: &str) -> Option<(u64, usize)> {
    let (own, now) = (number(case, field)?, size(operator, case)?);
    let more = |step: u64| Some((step, size(operator, &with(case, field, own + step))?));
    let (step, then) = STEPS.into_iter().find_map(more)?;
    (then > now).then(|| (step, then - now))
}

/// The fields of a case that are sizes, by their JSON pointers.
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

/// The case with the other sizes reduced so that a step of this one costs less. They stay at 2 or
/// more, where that is allowed.
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

/// The case with the largest affordable extent in a field. `None` where it already has it.
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
