//! What may distinguish cases: the fields of their JSON, the layouts of their tensors, the paths
//! that ran.
//!
//! Each [`Atom`] is one question with the answer yes or no for every case. The cost of naming one,
//! in bits, grows with how many of its kind exist. A field of the case is cheaper to name than one
//! of many pairs of fields or of paths.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::bits::Bits;
use crate::record::{CaseRecord, figures};

/// Moduli that alignments and tiles are made of.
const MODULI: [f64; 9] = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// Values of a field that get one question each.
const MOST_VALUES: usize = 8;
/// Thresholds of a field; with more values the thresholds are evenly spread.
const MOST_THRESHOLDS: usize = 32;

/// A question about cases.
#[derive(Clone, Debug)]
pub(super) struct Atom {
    /// Its text where the answer is yes.
    pub(super) text: String,
    /// Its text where the answer is no.
    pub(super) negation: String,
    /// The cases for which it is yes.
    pub(super) holds: Bits,
    /// Bits that it takes to name it.
    pub(super) cost: f64,
    /// Which field, or kind, it concerns.
    pub(super) feature: usize,
}

impl Atom {
    /// Whether it is a negation: another question with the same answers then reads better.
    pub(super) fn is_negative(&self) -> bool {
        self.text.contains("other than ")
            || self.text.starts_with("other paths ")
            || self.text.starts_with("no ")
    }
}

/// One value of a case.
#[derive(Clone, Debug, PartialEq)]
enum Scalar {
    Truth(bool),
    Text(String),
    Number(f64),
    /// Something that has parts.
    Present,
}

/// The numbers of a case's JSON by the names of its fields, without seeds.
pub(super) fn numbers(case: &Value) -> BTreeMap<String, f64> {
    let scalars = scalars(case).into_iter();
    scalars
        .filter_map(
            |(name, value)| {
                if let Scalar::Number(number) = value { Some((name, number)) } else { None }
            },
        )
        .collect()
}

fn scalars(case: &Value) -> BTreeMap<String, Scalar> {
    let mut found = BTreeMap::new();
    if let Value::Object(fields) = case {
        for (name, value) in
            fields.iter().filter(|(name, _)| !matches!(name.as_str(), "operator" | "layouts"))
        {
            flatten(name, value, &mut found);
        }
    }
    found
}

fn flatten(name: &str, value: &Value, found: &mut BTreeMap<String, Scalar>) {
    // The size of a seed means nothing.
    if name == "seed" || name.ends_with("_seed") || name.ends_with(".seed") {
        return;
    }
    let scalar = match value {
        Value::Null => return,
        Value::Bool(truth) => Scalar::Truth(*truth),
        Value::String(text) => Scalar::Text(text.clone()),
        Value::Number(number) => Scalar::Number(number.as_f64().unwrap_or(f64::NAN)),
        Value::Array(items) => {
            found.insert(format!("entries of {name}"), Scalar::Number(items.len() as f64));
            return;
        }
        Value::Object(fields) => {
            for (part, value) in fields {
                flatten(&format!("{name}.{part}"), value, found);
            }
            Scalar::Present
        }
    };
    found.insert(name.to_owned(), scalar);
}

/// Questions without a cost: a text, its negation, and the cases for which it is yes.
type Questions = Vec<(String, String, Bits)>;

/// All questions that have both answers among these cases.
pub(super) fn atoms(cases: &[&CaseRecord]) -> Vec<Atom> {
    let scalars: Vec<BTreeMap<String, Scalar>> =
        cases.iter().map(|case| scalars(&case.case)).collect();
    let names: BTreeSet<&String> = scalars.iter().flat_map(BTreeMap::keys).collect();
    let mut features: Vec<Questions> = Vec::new();
    for name in names {
        let values: Vec<Option<&Scalar>> =
            scalars.iter().map(|scalars| scalars.get(name)).collect();
        features.push(of_field(name, &values));
    }
    features.push(of_pairs(&scalars));
    features.push(of_paths(cases));
    features.push(of_layouts(cases));
    for questions in &mut features {
        questions.retain(|(_, _, holds)| holds.any() && !holds.all());
    }
    features.retain(|questions| !questions.is_empty());
    let of_features = (features.len() as f64).log2();
    let priced = |(feature, questions): (usize, Questions)| {
        let cost = of_features + (questions.len() as f64).log2();
        questions.into_iter().map(move |(text, negation, holds)| Atom {
            text,
            negation,
            holds,
            cost,
            feature,
        })
    };
    features.into_iter().enumerate().flat_map(priced).collect()
}

/// A question and its contrary.
fn both(questions: &mut Questions, text: String, negation: String, holds: Bits) {
    let contrary = holds.not();
    questions.push((text.clone(), negation.clone(), holds));
    questions.push((negation, text, contrary));
}

fn of_field(name: &str, values: &[Option<&Scalar>]) -> Questions {
    let mut questions = Questions::new();
    if values.iter().any(Option::is_none) {
        both(
            &mut questions,
            format!("{name} present"),
            format!("{name} absent"),
            Bits::of(values, Option::is_some),
        );
    }
    if values.iter().flatten().any(|value| matches!(value, Scalar::Truth(_))) {
        let truth = Bits::of(values, |value| *value == Some(&Scalar::Truth(true)));
        both(&mut questions, format!("{name} = true"), format!("{name} = false"), truth);
    }
    let texts: BTreeSet<&String> = values
        .iter()
        .flatten()
        .filter_map(|value| if let Scalar::Text(text) = value { Some(text) } else { None })
        .collect();
    for text in &texts {
        let holds =
            Bits::of(values, |value| matches!(value, Some(Scalar::Text(one)) if one == *text));
        both(
            &mut questions,
            format!("{name} = {text}"),
            format!("{name} other than {text}"),
            holds,
        );
    }
    let numbers: Vec<Option<f64>> = values
        .iter()
        .map(|value| if let Some(Scalar::Number(number)) = value { Some(*number) } else { None })
        .collect();
    of_numbers(name, &numbers, &mut questions);
    questions
}

/// Thresholds, single values and divisors.
fn of_numbers(name: &str, numbers: &[Option<f64>], questions: &mut Questions) {
    let mut distinct: Vec<f64> =
        numbers.iter().flatten().copied().filter(|number| number.is_finite()).collect();
    distinct.sort_by(f64::total_cmp);
    distinct.dedup();
    let pairs: Vec<(f64, f64)> = distinct.windows(2).map(|pair| (pair[0], pair[1])).collect();
    for (low, high) in pairs.iter().step_by(pairs.len().div_ceil(MOST_THRESHOLDS).max(1)) {
        let [above, below] = threshold(name, *low, *high);
        let holds = |test: fn(f64, f64) -> bool| {
            Bits::of(numbers, |number| number.is_some_and(|number| test(number, *low)))
        };
        questions.push((above.clone(), below.clone(), holds(|number, low| number > low)));
        questions.push((below, above, holds(|number, low| number <= low)));
    }
    for value in distinct
        .iter()
        .filter(|value| distinct.len() <= MOST_VALUES || **value == 0.0 || **value == 1.0)
    {
        let [text, negation] =
            ["=", "!="].map(|sign| format!("{name} {sign} {}", figures::field(*value)));
        both(questions, text, negation, Bits::of(numbers, |number| *number == Some(*value)));
    }
    if distinct.iter().all(|number| number.fract() == 0.0 && *number >= 0.0) {
        for modulus in MODULI {
            let [text, negation] = ["=", "!="].map(|sign| format!("{name} % {modulus} {sign} 0"));
            both(
                questions,
                text,
                negation,
                Bits::of(numbers, |number| number.is_some_and(|number| number % modulus == 0.0)),
            );
        }
    }
}

/// Text for the values above a gap between two values and for those below it, by the roundest
/// number in the gap.
fn threshold(name: &str, low: f64, high: f64) -> [String; 2] {
    let whole = low.fract() == 0.0 && high.fract() == 0.0 && low >= 0.0 && high < 9e15;
    if !whole {
        return [
            format!("{name} >= {}", figures::field(high)),
            format!("{name} <= {}", figures::field(low)),
        ];
    }
    let (low, high) = (low as u64, high as u64);
    let unit = (0..53)
        .map(|power| 1u64 << power)
        .take_while(|unit| high / unit * unit > low)
        .last()
        .unwrap_or(1);
    let round = high / unit * unit;
    // A power of two is the last value that fits a tile or an access; the next number is beyond it.
    if low.is_power_of_two() && low > 1 && !round.is_power_of_two() {
        return [format!("{name} > {low}"), format!("{name} <= {low}")];
    }
    if low == 0 && high == 1 {
        return [format!("{name} > 0"), format!("{name} = 0")];
    }
    [format!("{name} >= {round}"), format!("{name} < {round}")]
}

/// Compares integers of a case with each other.
fn of_pairs(scalars: &[BTreeMap<String, Scalar>]) -> Questions {
    let integer = |value: Option<&Scalar>| match value {
        Some(Scalar::Number(number)) if number.fract() == 0.0 => Some(*number),
        _ => None,
    };
    let everywhere =
        |name: &&String| scalars.iter().all(|scalars| integer(scalars.get(*name)).is_some());
    let names: Vec<&String> =
        scalars.first().into_iter().flat_map(BTreeMap::keys).filter(everywhere).collect();
    let mut questions = Questions::new();
    for (at, a) in names.iter().enumerate() {
        for b in &names[at + 1..] {
            let compared = |test: fn(f64, f64) -> bool| {
                Bits::of(scalars, |scalars| {
                    match (integer(scalars.get(*a)), integer(scalars.get(*b))) {
                        (Some(a), Some(b)) => test(a, b),
                        _ => false,
                    }
                })
            };
            both(
                &mut questions,
                format!("{a} = {b}"),
                format!("{a} != {b}"),
                compared(|a, b| a == b),
            );
            both(
                &mut questions,
                format!("{a} > {b}"),
                format!("{a} <= {b}"),
                compared(|a, b| a > b),
            );
            both(
                &mut questions,
                format!("{a} >= {b}"),
                format!("{a} < {b}"),
                compared(|a, b| a >= b),
            );
        }
    }
    questions
}

/// Paths that ran, and words that several of them have in common.
fn of_paths(cases: &[&CaseRecord]) -> Questions {
    let paths: BTreeSet<&String> = cases.iter().flat_map(|case| &case.paths).collect();
    let words = |path: &str| -> BTreeSet<String> {
        path.split(|c: char| !c.is_ascii_alphanumeric())
            .filter(|word| word.len() > 1)
            .map(str::to_owned)
            .collect()
    };
    let mut of_word: BTreeMap<String, u64> = BTreeMap::new();
    paths
        .iter()
        .flat_map(|path| words(path))
        .for_each(|word| *of_word.entry(word).or_default() += 1);
    let mut questions = Questions::new();
    for path in &paths {
        let ran = Bits::of(cases, |case| case.paths.contains(path));
        both(&mut questions, format!("path {path}"), format!("other paths than {path}"), ran);
    }
    for (word, _) in of_word.iter().filter(|(_, paths)| **paths > 1) {
        let ran = Bits::of(cases, |case| case.paths.iter().any(|path| words(path).contains(word)));
        both(&mut questions, format!("a {word} path"), format!("no {word} path"), ran);
    }
    questions
}

/// Gaps and orders of tensors in memory.
fn of_layouts(cases: &[&CaseRecord]) -> Questions {
    let layout = |case: &CaseRecord, tensor: &str| {
        case.case.get("layouts").and_then(|all| all.get(tensor)).cloned()
    };
    let gap = |case: &CaseRecord, (tensor, axis): (&str, &str)| {
        layout(case, tensor)
            .and_then(|layout| layout.get("gaps")?.get(axis)?.as_f64())
            .unwrap_or(0.0)
    };
    let (mut tensors, mut gaps) = (BTreeSet::new(), BTreeSet::new());
    for layouts in cases.iter().filter_map(|case| case.case.get("layouts")?.as_object()) {
        for (tensor, layout) in layouts {
            tensors.insert(tensor.as_str());
            let axes = layout.get("gaps").and_then(Value::as_object);
            gaps.extend(
                axes.into_iter()
                    .flat_map(|axes| axes.keys())
                    .map(|axis| (tensor.as_str(), axis.as_str())),
            );
        }
    }
    let mut questions = Questions::new();
    let any = Bits::of(cases, |case| {
        case.case.get("layouts").and_then(Value::as_object).is_some_and(|all| !all.is_empty())
    });
    both(&mut questions, "a tensor that is not dense".into(), "dense tensors".into(), any);
    for tensor in &tensors {
        let sparse = Bits::of(cases, |case| layout(case, tensor).is_some());
        both(&mut questions, format!("{tensor} not dense"), format!("{tensor} dense"), sparse);
        let turned = Bits::of(cases, |case| {
            layout(case, tensor).is_some_and(|layout| layout.get("order").is_some())
        });
        both(
            &mut questions,
            format!("axes of {tensor} in another order"),
            format!("axes of {tensor} in order"),
            turned,
        );
    }
    for &(tensor, axis) in &gaps {
        let of_case: Vec<Option<f64>> =
            cases.iter().map(|case| Some(gap(case, (tensor, axis)))).collect();
        of_numbers(&format!("gap after {axis} of {tensor}"), &of_case, &mut questions);
    }
    for &(tensor, axis) in &gaps {
        for other in
            tensors.iter().filter(|other| **other > tensor && gaps.contains(&(**other, axis)))
        {
            let equal =
                Bits::of(cases, |case| gap(case, (tensor, axis)) == gap(case, (other, axis)));
            let [text, negation] = ["equal", "different"]
                .map(|word| format!("{word} gaps after {axis} of {tensor} and {other}"));
            both(&mut questions, text, negation, equal);
        }
    }
    questions
}
