//! Sizes at their limits, beyond all other edge cases. Each field of a case that is an extent takes
//! the largest value that the declaration allows. Where that costs a sweep too much, it takes the
//! largest affordable value. The other sizes shrink to make room. Operators declare nothing for
//! this.
//!
//! Three kinds of cases follow from the same fields: rows as wide as the model's, more rows than a
//! grid has blocks, and, for each kind of kernels and each extent, one that is larger than a tile.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Profile;
use super::any::{AnyCase, Declaration};
use super::declaration::{Specs, TensorSpec};
use super::format_of;
use super::lines::checked;
use crate::case::Case;

/// Elements that a case may add to the small case it started from, where that reaches an extent's
/// declared limit.
const ROOM_TO_A_LIMIT: usize = 1 << 18;

/// The same where no limit is within reach.
fn room(profile: Profile) -> usize {
    profile.of([1 << 12, 1 << 14, 1 << 16])
}

/// Elements that an oracle may hold beyond its tensors, where a size grows: rows that lists gather
/// are many more than the lists, and so is the work of the kernels.
fn room_of_an_oracle(profile: Profile) -> u128 {
    profile.of([1 << 21, 1 << 23, 1 << 25])
}

/// The least step of an extent: formats and tiles need such multiples.
const STEPS: [u64; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// One case for each field that is an extent, at its largest value.
pub(super) fn edge_cases(operator: &dyn Declaration, profile: Profile) -> Vec<AnyCase> {
    let typical = values(&operator.typical());
    let fields = fields_of(operator, &typical);
    let largest = |(turn, field): (usize, &String)| {
        let mut turns = (0..typical.len()).map(|i| &typical[(turn + i) % typical.len()]);
        turns.find_map(|case| grown(operator, (case, field), profile, room(profile)))
    };
    fields.iter().enumerate().filter_map(largest).collect()
}

/// The width of the model's rows.
const PRODUCTION_WIDTH: u64 = 7168;
/// More rows than a GPU has blocks in flight, and no multiple of anything.
const TALL: u64 = 1031;
/// The largest tile along any axis of most kernels.
const TILE: u64 = 64;
/// Elements that a tall case may add to a small one: on the emulator each row has a block.
const ROOM_TO_TALL: usize = 1 << 15;
/// Elements that a case of the model's width may add to a small case.
const ROOM_TO_PRODUCTION: usize = 1 << 18;
/// Elements that a case may add where one extent is larger than a tile.
const ROOM_BEYOND_A_TILE: usize = 1 << 16;
/// The same for the longest case of a kind of kernels.
const ROOM_TO_A_LONG_CASE: usize = 1 << 14;

fn values(cases: &[AnyCase]) -> Vec<Value> {
    cases.iter().map(|case| Value::Object(case.line().fields)).collect()
}

fn fields_of(operator: &dyn Declaration, cases: &[Value]) -> BTreeSet<String> {
    cases.iter().flat_map(|case| extents(operator, case)).collect()
}

/// A case as wide as the model's rows, and one with over a thousand rows, each where the operator
/// has such an axis and `known` cases do not reach as far.
pub(super) fn of_production(operator: &dyn Declaration, known: &[AnyCase]) -> Vec<AnyCase> {
    let (typical, known) = (values(&operator.typical()), values(known));
    let fields = fields_of(operator, &typical);
    let reach = |is_such: fn(&Specs, &str) -> bool, [least, to]: [u64; 2], room: usize| {
        let reaches = |field: &String| {
            known.iter().any(|case| number(case, field).is_some_and(|number| number >= least))
        };
        let such = |case: &Value, field: &String| {
            case_of(operator, case).is_some_and(|(_, specs)| is_such(&specs, name_of(field)))
        };
        let of_such = |field: &&String| typical.iter().any(|case| such(case, field));
        let fields: Vec<&String> = fields.iter().filter(of_such).collect();
        if fields.iter().any(|field| reaches(field)) {
            return None;
        }
        let tried = fields.iter().flat_map(|field| typical.iter().map(move |case| (case, *field)));
        let cases = tried.filter(|(case, field)| such(case, field)).filter_map(|(case, field)| {
            let small = with_least_others(operator, case, field);
            let wide = with(&small, field, to);
            let added = size(operator, &wide)?.saturating_sub(size(operator, &small)?);
            (added <= room).then_some((added, wide))
        });
        let (_, cheapest) = cases.min_by_key(|(added, _)| *added)?;
        case_of(operator, &cheapest).map(|(case, _)| case)
    };
    let wide = reach(is_width, [PRODUCTION_WIDTH; 2], ROOM_TO_PRODUCTION);
    let tall = reach(is_count_of_rows, [1000, TALL], ROOM_TO_TALL);
    wide.into_iter().chain(tall).collect()
}

/// The name of a field that is given by its JSON pointer.
fn name_of(field: &str) -> &str {
    field.rsplit('/').next().unwrap_or(field)
}

/// Whether rows of numbers are this long.
fn is_width(specs: &Specs, name: &str) -> bool {
    let is_last = |spec: &TensorSpec| {
        let last = spec.axes.len().checked_sub(1).filter(|&last| last > 0);
        last.is_some() && spec.axis(name) == last
    };
    specs.present().any(|spec| format_of(spec.dtype).is_some() && is_last(spec))
}

/// Whether tensors have that many rows, and no row of numbers is this long.
fn is_count_of_rows(specs: &Specs, name: &str) -> bool {
    let first = |spec: &TensorSpec| spec.axes.len() > 1 && spec.axis(name) == Some(0);
    !is_width(specs, name) && specs.present().any(first)
}

/// The fields by which the typical cases choose kernels: names and flags, where they differ.
fn choosing_fields(typical: &[Value]) -> BTreeSet<String> {
    let chooses = |value: &Value| value.is_string() || value.is_boolean();
    let names = typical.iter().filter_map(Value::as_object).flatten();
    let names = names.filter(|(_, value)| chooses(value)).map(|(name, _)| name.clone());
    let differs = |name: &String| typical.iter().any(|case| case.get(name) != typical[0].get(name));
    names.filter(differs).collect()
}

/// For each kind of kernels (typical cases that differ in a name or a flag) and each extent: a case
/// in which it is larger than a tile, unless `known` cases of that kind have one. And for each kind
/// the longest affordable case along its cheapest extent, unless `long` has one of that kind.
pub(super) fn beyond_tiles(
    operator: &dyn Declaration,
    profile: Profile,
    known: &[AnyCase],
    long: &[AnyCase],
) -> Beyond {
    let (typical, known, long) = (values(&operator.typical()), values(known), values(long));
    let choosing = choosing_fields(&typical);
    let kind = |case: &Value| -> Vec<Value> {
        choosing.iter().map(|name| case.get(name).cloned().unwrap_or(Value::Null)).collect()
    };
    let mut beyond = Beyond::default();
    let mut kinds: Vec<Vec<Value>> = Vec::new();
    for case in &typical {
        if kinds.contains(&kind(case)) {
            continue;
        }
        kinds.push(kind(case));
        for field in extents(operator, case) {
            let is_beyond = |known: &&Value| number(known, &field).is_some_and(|n| n > TILE);
            if !known
                .iter()
                .filter(|known| kind(known) == kind(case))
                .any(|known| is_beyond(&known))
            {
                beyond.tiles.extend(beyond_a_tile(operator, case, &field));
            }
        }
        if !long.iter().any(|long| kind(long) == kind(case)) {
            beyond.long.extend(longest(operator, case, profile));
        }
    }
    beyond
}

/// What [`beyond_tiles`] makes.
#[derive(Default)]
pub(super) struct Beyond {
    /// One extent is larger than a tile.
    pub tiles: Vec<AnyCase>,
    /// One extent is as large as a sweep can afford.
    pub long: Vec<AnyCase>,
}

/// The case with an extent just larger than a tile.
fn beyond_a_tile(operator: &dyn Declaration, case: &Value, field: &str) -> Option<AnyCase> {
    let small = with_small_others(operator, case, field);
    let (step, _) = step(operator, &small, field)?;
    let own = number(&small, field)?;
    let steps = (TILE + 1).checked_sub(own)?.div_ceil(step);
    let beyond = with(&small, field, own + steps * step);
    let added = size(operator, &beyond)?.saturating_sub(size(operator, &small)?);
    (added <= ROOM_BEYOND_A_TILE).then(|| case_of(operator, &beyond).map(|(case, _)| case))?
}

/// The longest case along the extent of which a step costs least.
fn longest(operator: &dyn Declaration, case: &Value, profile: Profile) -> Option<AnyCase> {
    let cost = |field: &String| {
        let small = with_small_others(operator, case, field);
        let (step, elements) = step(operator, &small, field)?;
        Some((elements as u64).div_ceil(step))
    };
    let priced = extents(operator, case).into_iter().filter_map(|f| Some((cost(&f)?, f)));
    let (_, cheapest) = priced.min()?;
    grown(operator, (case, &cheapest), profile, ROOM_TO_A_LONG_CASE)
}

fn case_of(operator: &dyn Declaration, value: &Value) -> Option<(AnyCase, Specs)> {
    let fields = value.as_object()?.clone();
    let case = operator.parse(&Case { operator: operator.about().name.to_owned(), fields }).ok()?;
    let specs = checked(&*case).ok()?;
    Some((case, specs))
}

/// Elements of all tensors together; `None` for a rejected case.
fn size(operator: &dyn Declaration, value: &Value) -> Option<usize> {
    Some(elements(&case_of(operator, value)?.1))
}

fn elements(specs: &Specs) -> usize {
    specs.present().fold(0, |sum, spec| sum.saturating_add(spec.elements()))
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
    reduced(operator, case, field, |cost, now| cost < now)
}

/// The same, and sizes that have no tensor in common with this one are reduced as well: work is
/// often the product of both. An example is attention's number of heads where its lists grow.
fn with_least_others(operator: &dyn Declaration, case: &Value, field: &str) -> Value {
    reduced(operator, case, field, |cost, now| cost <= now)
}

/// The case with each other size that is 3 or more at the least one that is allowed and
/// `is_better`: that compares the elements of a step of this field with those before.
fn reduced(
    operator: &dyn Declaration,
    case: &Value,
    field: &str,
    is_better: fn(usize, usize) -> bool,
) -> Value {
    let mut small = case.clone();
    for other in extents(operator, case).iter().filter(|other| *other != field) {
        let cost = |case: &Value| step(operator, case, field).map(|(_, elements)| elements);
        let (Some(own), Some(now)) = (number(&small, other), cost(&small)) else { continue };
        let sizes = STEPS.into_iter().filter(|&size| (2..own).contains(&size));
        let found = sizes
            .map(|size| with(&small, other, size))
            .find(|case| cost(case).is_some_and(|cost| is_better(cost, now)));
        small = found.unwrap_or(small);
    }
    small
}

/// The case with the largest affordable extent in a field. `None` where it already has it.
fn grown(
    operator: &dyn Declaration,
    (case, field): (&Value, &str),
    profile: Profile,
    room: usize,
) -> Option<AnyCase> {
    let small = with_least_others(operator, case, field);
    let (step, _) = step(operator, &small, field)?;
    let (own, now) = (number(&small, field)?, size(operator, &small)?);
    let after = |steps: u64| with(&small, field, own + steps * step);
    let within = |room: usize| {
        let fits = |steps: u64| {
            case_of(operator, &after(steps)).is_some_and(|(case, specs)| {
                elements(&specs) - now <= room
                    && case.oracle_elements() <= room_of_an_oracle(profile)
            })
        };
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
        let declaration = registry::find(operator).expect("an operator").declaration();
        let own = declaration.edge_cases(profile).into_iter();
        let cases: Vec<AnyCase> = own.chain(edge_cases(declaration, profile)).collect();
        let fields = values(&cases).into_iter();
        fields.filter_map(|case| number(&case, field)).max().expect("a case with this field")
    }

    #[test]
    fn every_kind_of_kernels_has_heads_beyond_a_tile_and_rows_as_wide_as_the_models() {
        let lines = |operator: &str| {
            let cases = registry::find(operator).expect("an operator").edge_cases(Profile::Quick);
            cases.into_iter().map(|case| Value::Object(case.fields)).collect::<Vec<_>>()
        };
        for (operator, kind) in [
            ("decode_attention", "portable"),
            ("decode_attention", "hopper"),
            ("sparse_attention", "portable"),
            ("score_recompute", "portable"),
        ] {
            let cases = lines(operator);
            let of_kind = cases.iter().filter(|case| case["implementation"] == kind);
            let heads = of_kind.filter_map(|case| number(case, "/num_heads")).max();
            assert!(heads > Some(TILE), "{operator}, {kind}: {heads:?} heads");
        }
        for operator in ["moe_reduce", "moe_expand", "swiglu", "embed_streams"] {
            let cases = lines(operator);
            let wide = |field| cases.iter().any(|case| number(case, field) >= Some(7168));
            assert!(wide("/hidden_size") || wide("/width"), "{operator} has no such row");
            let tall = |field| cases.iter().any(|case| number(case, field) >= Some(1000));
            assert!(tall("/num_tokens") || tall("/num_rows"), "{operator} has too few rows");
        }
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
