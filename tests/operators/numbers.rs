//! `numbers::OPERATOR`: every integer of its cases, one or two at a time, set to values that
//! overflow, that take all memory, or that are not numbers. Each case ends in an error that names
//! the wrong field, or in a verdict, at once and within the memory of a case. A commit tries a
//! share of them.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use dsv4_parity::case::{Case, Draw};
use dsv4_parity::change::{FIXED, lot};
use dsv4_parity::judge::checks::{self, CheckOptions};
use dsv4_parity::operator::size::Limit;
use dsv4_parity::operator::{AnyOperator, Profile};
use dsv4_parity::record::Verdict;
use libtest_mimic::Trial;
use rand::Rng;
use serde_json::{Value, json};

use crate::{Extent, shared};

/// The memory of a case here: typical cases take a tenth.
const LIMIT: Limit = Limit::bytes(64 << 20);
/// A rejection takes microseconds, and more on a machine that is busy with other tests.
const AT_ONCE: Duration = Duration::from_secs(5);
/// Cases within this memory take at most seconds.
const A_WHILE: Duration = Duration::from_secs(60);
/// How many cases are modified.
const CASES: usize = 4;
/// A commit runs one in this many tries: of an operator that it concerns, and of the others.
const SHARES_OF_TRIES: [usize; 2] = [16, 128];
/// Pairs of integers that are tried in each case.
const PAIRS: usize = 40;

pub fn trial(operator: &'static AnyOperator, extent: Extent) -> Option<Trial> {
    Some(crate::trial(format!("numbers::{}", operator.name()), move || run(operator, extent)))
}

/// The values for an integer: the limits of 31, 32, 53, 63 and 64 bits, and values that are not
/// integers.
fn hostile() -> Vec<Value> {
    let whole = [0, 1, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, i64::MAX as u64, u64::MAX];
    whole
        .into_iter()
        .map(Value::from)
        .chain([json!(-1), json!(i64::MIN), json!(0.5), json!("7"), Value::Null])
        .collect()
}

fn run(operator: &'static AnyOperator, extent: Extent) -> Result<String, String> {
    shared::compiled(operator)?;
    let mut tries = tries(operator);
    let all = tries.len();
    if extent == Extent::Commit {
        let [concerned, other] = SHARES_OF_TRIES;
        let share = if shared::concerned()?.contains(operator.name()) { concerned } else { other };
        tries.sort_by_cached_key(|case| lot(FIXED, &case.line()));
        tries.truncate(all.div_ceil(share));
    }
    let (mut refused, mut judged, mut wrong) = (0, 0, Vec::new());
    for case in &tries {
        let ended = catch_unwind(AssertUnwindSafe(|| attempt(operator, case)));
        match ended.unwrap_or_else(|_| Err("a panic".to_owned())) {
            Ok(true) => judged += 1,
            Ok(false) => refused += 1,
            Err(why) => wrong.push(format!("{why}: {}", case.line())),
        }
    }
    println!("attack: {} cases whose numbers cannot be", tries.len());
    let tried = format!("{} of {all} tried: {refused} refused, {judged} judged", tries.len());
    if wrong.is_empty() {
        Ok(tried)
    } else {
        Err(format!("{tried}, {} wrong:\n{}", wrong.len(), wrong.join("\n")))
    }
}

/// Whether the case was judged; an error where it was neither judged nor rejected with a useful
/// message.
fn attempt(operator: &AnyOperator, case: &Case) -> Result<bool, String> {
    let start = Instant::now();
    let prepared = operator.prepare_within(case, LIMIT);
    if start.elapsed() > AT_ONCE {
        return Err(format!("took {:.1} s", start.elapsed().as_secs_f64()));
    }
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(error) if error.to_string().chars().count() > 1000 => {
            return Err(format!("an endless message: {error}"));
        }
        Err(_) => return Ok(false),
    };
    let options = CheckOptions { sequence: false, ..CheckOptions::of_kernels(0) };
    let (outcome, time) = shared::on_device(|device| {
        let start = Instant::now();
        (checks::run(&*prepared, device, options), start.elapsed())
    });
    if time > A_WHILE {
        return Err(format!("was judged for {:.1} s", time.as_secs_f64()));
    }
    match outcome.checks.iter().find(|check| check.verdict != Verdict::Pass) {
        Some(check) => Err(format!("{} {}: {}", check.check, check.tensor, check.message)),
        None => Ok(true),
    }
}

/// Small cases with one or two of their integers changed.
fn tries(operator: &AnyOperator) -> Vec<Case> {
    let mut tries = BTreeSet::new();
    for (turn, case) in small_cases(operator).into_iter().enumerate() {
        let whole = Value::Object(case.fields.clone());
        let mut fields = Vec::new();
        numbers(&whole, "", &mut fields);
        let mut add = |changes: &[(&str, &Value)]| {
            let mut changed = whole.clone();
            for (field, value) in changes {
                changed.pointer_mut(field).into_iter().for_each(|place| *place = (*value).clone());
            }
            if let Value::Object(fields) = changed {
                tries.insert(Case { operator: case.operator.clone(), fields }.line());
            }
        };
        let hostile = hostile();
        for field in &fields {
            hostile.iter().for_each(|value| add(&[(field, value)]));
        }
        let mut draw = Draw::new(turn as u64, &case.operator);
        for _ in 0..PAIRS {
            let mut pick = |count: usize| draw.rng().random_range(0..count);
            let (one, other) = (&fields[pick(fields.len())], &fields[pick(fields.len())]);
            add(&[(one, &hostile[pick(hostile.len())]), (other, &hostile[pick(8)])]);
        }
    }
    tries.iter().map(|line| Case::parse(line).expect("a line of JSON")).collect()
}

/// Edge cases that fit, with fields as different as possible; also some with layouts.
fn small_cases(operator: &AnyOperator) -> Vec<Case> {
    let fits = |case: &Case| operator.bytes(case).is_ok_and(|bytes| LIMIT.allows(bytes * 4));
    let mut cases: Vec<Case> =
        operator.edge_cases(Profile::Quick).into_iter().filter(fits).collect();
    let of_fields = |case: &Case| case.fields.keys().cloned().collect::<BTreeSet<_>>();
    let mut seen = BTreeSet::new();
    cases.sort_by_key(|case| !seen.insert(of_fields(case)));
    cases.truncate(CASES);
    cases
}

/// The integers of a case, by their JSON pointers.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| numbers(value, &format!("{path}/{name}"), found))
        }
        Value::Number(number) if number.is_u64() => found.push(path.to_owned()),
        _ => {}
    }
}
