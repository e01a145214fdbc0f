//! Cases that are a little smaller than a failing one. Shrinking tries them after the strategy's
//! own tree has ended, and continues while any smaller case fails.
//!
//! One field changes at a time. Layouts become dense or their gaps shrink, and integers shrink. Any
//! other field takes the value that most edge cases hold there. No change is ever reverted, so this
//! ends.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::case::Case;
use crate::operator::{AnyOperator, Profile};

/// The value that most edge cases of an operator hold, for each field.
pub(super) fn usual(operator: &AnyOperator, profile: Profile) -> Map<String, Value> {
    let mut counts: BTreeMap<String, Vec<(Value, usize)>> = BTreeMap::new();
    for case in operator.edge_cases(profile) {
        for (name, value) in case.fields {
            let values = counts.entry(name).or_default();
            match values.iter_mut().find(|(one, _)| *one == value) {
                Some((_, count)) => *count += 1,
                None => values.push((value, 1)),
            }
        }
    }
    let most = |values: Vec<(Value, usize)>| {
        values.into_iter().max_by_key(|(_, count)| *count).map(|(value, _)| value)
    };
    counts.into_iter().filter_map(|(name, values)| Some((name, most(values)?))).collect()
}

/// The places of a case that may shrink, those that make up most of its size first.
pub(super) fn places(case: &Case) -> Vec<Vec<String>> {
    let mut places = Vec::new();
    let object = Value::Object(case.fields.clone());
    gather(&object, &mut Vec::new(), &mut places);
    let size = |place: &Vec<String>| match at(&object, place) {
        // Layouts go first: without them the case is easy to read.
        Some(_) if place[0] == "layouts" => u64::MAX,
        Some(Value::Number(number)) => number.as_u64().unwrap_or(0),
        _ => 0,
    };
    places.sort_by_key(|place| (std::cmp::Reverse(size(place)), place.len()));
    places
}

fn gather(value: &Value, place: &mut Vec<String>, places: &mut Vec<Vec<String>>) {
    let Value::Object(fields) = value else { return };
    for (name, field) in fields.iter().filter(|(name, _)| *name != "seed") {
        place.push(name.clone());
        places.push(place.clone());
        gather(field, place, places);
        place.pop();
    }
}

fn at<'a>(value: &'a Value, place: &[String]) -> Option<&'a Value> {
    place.iter().try_fold(value, |value, part| value.get(part))
}

/// The case with smaller values at one place, the smallest first.
pub(super) fn at_place(case: &Case, place: &[String], usual: &Map<String, Value>) -> Vec<Case> {
    let object = Value::Object(case.fields.clone());
    let Some(now) = at(&object, place) else { return Vec::new() };
    let mut values: Vec<Option<Value>> = Vec::new();
    match now {
        Value::Number(number) if number.is_u64() => {
            // Without it the case has the SMs of any other.
            values.extend((place == ["sms"]).then_some(None));
            values.extend(
                smaller_integers(number.as_u64().unwrap_or(0))
                    .into_iter()
                    .map(|number| Some(number.into())),
            );
        }
        Value::Object(_) if place[0] == "layouts" => values.push(None),
        Value::Array(_) if place[0] == "layouts" => values.push(None),
        Value::Null | Value::Object(_) | Value::Array(_) => {}
        _ => {
            if let ([name], true) = (place, usual.get(&place[0]).is_some_and(|usual| usual != now))
            {
                values.push(usual.get(name).cloned());
            }
        }
    }
    values.into_iter().filter_map(|value| with(case, place, value)).collect()
}

/// Integers below this one: small ones, powers of two, and values only a little smaller.
fn smaller_integers(number: u64) -> Vec<u64> {
    let powers = (0..63).map(|power| 1u64 << power).take_while(|power| *power < number);
    let near =
        [number / 2, number.saturating_sub(16), number.saturating_sub(8), number.saturating_sub(1)];
    let mut found: Vec<u64> =
        [0, 3, 5, 6, 7].into_iter().chain(powers).chain(near).filter(|one| *one < number).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The case with another value at a place, or without the place.
fn with(case: &Case, place: &[String], value: Option<Value>) -> Option<Case> {
    let mut object = Value::Object(case.fields.clone());
    let (last, outer) = place.split_last()?;
    let Value::Object(within) =
        outer.iter().try_fold(&mut object, |value, part| value.get_mut(part))?
    else {
        return None;
    };
    match value {
        Some(value) => within.insert(last.clone(), value),
        None => within.remove(last),
    };
    let Value::Object(fields) = object else { return None };
    Some(Case { fields, ..case.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_go_first_and_every_value_gets_smaller() {
        let line = r#"{"operator":"rms_norm","layouts":{"x":{"gaps":{"width":24}}},"num_rows":8,"seed":7,"weight":"f32","width":300}"#;
        let case = Case::parse(line).unwrap();
        let places = places(&case);
        assert_eq!(
            (places[0].join("."), places.last().unwrap().join(".")),
            ("layouts".into(), "weight".into())
        );
        assert!(!places.iter().any(|place| place[0] == "seed"));
        let lines = |place: &[&str], usual: &Map<String, Value>| -> Vec<String> {
            let place: Vec<String> = place.iter().map(|part| (*part).to_owned()).collect();
            at_place(&case, &place, usual).iter().map(Case::line).collect()
        };
        let usual: Map<String, Value> = [("weight".to_owned(), Value::Null)].into_iter().collect();
        assert_eq!(
            lines(&["layouts"], &usual),
            [line.replace(r#""layouts":{"x":{"gaps":{"width":24}}},"#, "")]
        );
        assert_eq!(lines(&["num_rows"], &usual).len(), [0, 1, 2, 3, 4, 5, 6, 7].len());
        assert!(
            lines(&["layouts", "x", "gaps", "width"], &usual).contains(&line.replace(":24", ":16"))
        );
        assert_eq!(lines(&["weight"], &usual), [line.replace("\"f32\"", "null")]);
        assert!(lines(&["weight"], &Map::new()).is_empty());
    }
}
