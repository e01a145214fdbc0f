//! How a report stores its cases: what many of them share is stored once.
//!
//! A sweep of all operators makes about a hundred checks of each of thousands of cases, and nearly
//! all of them pass in the same order. `cases` of a `report.json` is therefore an object with
//! tables and one entry for each case:
//!
//! | field | what it holds |
//! | --- | --- |
//! | `checks` | each pair of a check and a tensor |
//! | `orders` | lists of checks that ran, in order: indices into `checks` |
//! | `sizes` | lists of numbers of elements, one for each check: indices into a case's `compared` |
//! | `fields` | each list of a case's fields |
//! | `paths` | each list of kernel paths |
//! | `commands` | replay commands: text before and after the case's line, or all if it has none |
//! | `records` | the cases |
//!
//! A record holds its indices into the tables. `case` holds the values of its fields. `compared`
//! holds the different numbers of elements that its checks compared. `exact` holds the indices of
//! tensors that are the oracle's to the bit. `measured` holds the measures of others that agree: the index in the list, then cosine, norm_ratio, relative_l2, max_abs,
//! ulp_p50, ulp_p99, ulp_max, budget_used, budget_relative and the power. `told` holds every other
//! check that is not a plain pass, in full. Reading it back gives exactly the same records.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::Hash;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::{
    BatchRecord, CaseRecord, Check, CheckRecord, HeatMap, Metrics, Origin, Power, Seconds, Seen,
    Skip, Verdict, Worst, number,
};
use crate::case::Case;
use crate::case::shell::quoted;

/// Limit of checks in all cases of a stored report: a small file must not expand to more than
/// memory holds.
const MOST_CHECKS: usize = 20_000_000;

/// What [`Stored`] keeps of the metrics of a tensor that agrees; [`measures`] leaves the rest
/// absent.
#[derive(PartialEq, Serialize, serde::Deserialize)]
struct Measured(
    u32,
    Number,
    Number,
    Number,
    Number,
    Number,
    Number,
    Number,
    Number,
    Number,
    #[serde(default, skip_serializing_if = "Option::is_none")] Option<StoredPower>,
);

#[derive(PartialEq, Serialize, serde::Deserialize)]
struct Number(#[serde(with = "number")] f64);

/// `bias`, `assert_close`, `cosine`, `flash_mla`, `flash_attention`; then `element` and
/// `powerless`. A rule sees a bias of `2^-k` (k), nothing (-1), or fails what is right (-2).
#[derive(PartialEq, Serialize, serde::Deserialize)]
struct StoredPower([i64; 5], Number, bool);

/// One case.
#[derive(Serialize, serde::Deserialize)]
struct StoredCase {
    /// The operator, where the case does not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    operator: Option<String>,
    /// Index of its list of fields. Absent where the case is not an object; then `case` is the
    /// whole of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fields: Option<u32>,
    case: Value,
    #[serde(default = "drawn", skip_serializing_if = "is_drawn")]
    origin: Origin,
    paths: u32,
    order: u32,
    sizes: u32,
    compared: Vec<u64>,
    /// Checks whose tensors are the oracle's to the bit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    exact: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    measured: Vec<Measured>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    told: Vec<(u32, CheckRecord)>,
    kernel_seconds: f64,
    oracle_seconds: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seconds: Option<Seconds>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    our_seconds: Option<Seconds>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unsupported: Option<String>,
    #[serde(default, skip_serializing_if = "is_first")]
    replay: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    skips: Vec<Skip>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    batches: Vec<BatchRecord>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    plan_number: Option<u64>,
}

fn drawn() -> Origin {
    Origin::Drawn
}

fn is_drawn(origin: &Origin) -> bool {
    *origin == Origin::Drawn
}

fn is_first(place: &u32) -> bool {
    *place == 0
}

/// All cases of a report.
#[derive(Default, serde::Deserialize)]
struct Stored {
    checks: Vec<(String, String)>,
    orders: Vec<Vec<u32>>,
    sizes: Vec<Vec<u32>>,
    fields: Vec<Vec<String>>,
    paths: Vec<Vec<String>>,
    commands: Vec<Vec<String>>,
    records: Vec<StoredCase>,
}

/// Writes the cases of a report.
pub(super) fn serialize<S: Serializer>(
    cases: &[CaseRecord],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut tables = Tables::default();
    // The tables come first. Each case is stored once for them and once more when it is written:
    // all stored cases together take as much memory as the cases.
    cases.iter().for_each(|case| drop(tables.store(case)));
    let mut all = serializer.serialize_struct("Stored", 7)?;
    all.serialize_field("checks", &tables.checks.items)?;
    all.serialize_field("orders", &tables.orders.items)?;
    all.serialize_field("sizes", &tables.sizes.items)?;
    all.serialize_field("fields", &tables.fields.items)?;
    all.serialize_field("paths", &tables.paths.items)?;
    all.serialize_field("commands", &tables.commands.items)?;
    all.serialize_field("records", &Records { cases, tables: RefCell::new(tables) })?;
    all.end()
}

/// The cases of a report, each stored when it is written.
struct Records<'c> {
    cases: &'c [CaseRecord],
    tables: RefCell<Tables>,
}

impl Serialize for Records<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.cases.iter().map(|case| self.tables.borrow_mut().store(case)))
    }
}

/// Reads the cases of a report.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<CaseRecord>, D::Error> {
    Stored::deserialize(deserializer)?.read().map_err(de::Error::custom)
}

/// Different items, each with its index.
struct Interned<T> {
    places: HashMap<T, u32>,
    items: Vec<T>,
}

impl<T> Default for Interned<T> {
    fn default() -> Self {
        Self { places: HashMap::new(), items: Vec::new() }
    }
}

impl<T: Clone + Eq + Hash> Interned<T> {
    fn place(&mut self, item: T) -> u32 {
        let next = self.items.len() as u32;
        let place = *self.places.entry(item.clone()).or_insert(next);
        if place == next {
            self.items.push(item);
        }
        place
    }
}

#[derive(Default)]
struct Tables {
    checks: Interned<(String, String)>,
    orders: Interned<Vec<u32>>,
    sizes: Interned<Vec<u32>>,
    fields: Interned<Vec<String>>,
    paths: Interned<Vec<String>>,
    commands: Interned<Vec<String>>,
}

impl Tables {
    fn store(&mut self, record: &CaseRecord) -> StoredCase {
        let mut compared = Interned::default();
        let (mut exact, mut measured, mut told) = (Vec::new(), Vec::new(), Vec::new());
        let (mut checks, mut sizes) = (Vec::new(), Vec::new());
        for (place, check) in (0..).zip(&record.checks) {
            checks.push(self.checks.place((check.check.to_string(), check.tensor.clone())));
            sizes.push(compared.place(check.compared));
            let plain = check.verdict == Verdict::Pass && check.message.is_empty();
            match &check.metrics {
                None if plain => {}
                Some(metrics) if plain && holds_measures_alone(metrics) => {
                    let of = Measured::of(place, metrics);
                    if of == Measured::exact(place) { exact.push(place) } else { measured.push(of) }
                }
                _ => told.push((place, check.clone())),
            }
        }
        let names_operator = record.case["operator"] == record.operator.as_str();
        let (fields, case) = match &record.case {
            Value::Object(fields) => {
                let names = self.fields.place(fields.keys().cloned().collect());
                (Some(names), Value::Array(fields.values().cloned().collect()))
            }
            other => (None, other.clone()),
        };
        StoredCase {
            operator: (!names_operator).then(|| record.operator.clone()),
            fields,
            case,
            origin: record.origin,
            paths: self.paths.place(record.paths.clone()),
            order: self.orders.place(checks),
            sizes: self.sizes.place(sizes),
            compared: compared.items,
            exact,
            measured,
            told,
            kernel_seconds: record.kernel_seconds,
            oracle_seconds: record.oracle_seconds,
            seconds: record.seconds,
            our_seconds: record.our_seconds,
            unsupported: record.unsupported.clone(),
            replay: self.commands.place(without_case(&record.replay, &record.case)),
            skips: record.skips.clone(),
            batches: record.batches.clone(),
            plan_number: record.plan_number,
        }
    }
}

/// An entry of a table.
fn entry<'a, T>(table: &'a [T], what: &str, place: u32) -> Result<&'a T, String> {
    table.get(place as usize).ok_or_else(|| format!("{what} {place} of {}", table.len()))
}

/// A check of a case's list.
fn entry_mut(checks: &mut [CheckRecord], place: u32) -> Result<&mut CheckRecord, String> {
    let length = checks.len();
    checks.get_mut(place as usize).ok_or_else(|| format!("check {place} of its {length}"))
}

impl Stored {
    fn read(mut self) -> Result<Vec<CaseRecord>, String> {
        if self.checks_in_all() > MOST_CHECKS {
            return Err(format!("more than {MOST_CHECKS} checks"));
        }
        let records = std::mem::take(&mut self.records).into_iter().enumerate();
        records
            .map(|(number, stored)| {
                self.record(stored).map_err(|problem| format!("case {number} names {problem}"))
            })
            .collect()
    }

    /// How many checks all cases have together.
    fn checks_in_all(&self) -> usize {
        let of = |stored: &StoredCase| self.orders.get(stored.order as usize).map_or(0, Vec::len);
        self.records.iter().map(of).fold(0, usize::saturating_add)
    }

    fn record(&self, stored: StoredCase) -> Result<CaseRecord, String> {
        let checks = self.checks(&stored)?;
        let case = match (stored.fields, stored.case) {
            (None, case) => case,
            (Some(fields), Value::Array(values)) => {
                let names = entry(&self.fields, "fields", fields)?;
                if names.len() != values.len() {
                    return Err(format!("{} fields and has {} values", names.len(), values.len()));
                }
                Value::Object(names.iter().cloned().zip(values).collect())
            }
            (Some(_), other) => return Err(format!("fields of `{other}`, which holds no values")),
        };
        let operator = match (stored.operator, case["operator"].as_str()) {
            (Some(operator), _) => operator,
            (None, Some(operator)) => operator.to_owned(),
            (None, None) => return Err("no operator".to_owned()),
        };
        let command = entry(&self.commands, "command", stored.replay)?;
        Ok(CaseRecord {
            operator,
            replay: with_case(command, &case)?,
            case,
            origin: stored.origin,
            paths: entry(&self.paths, "paths", stored.paths)?.clone(),
            checks,
            kernel_seconds: stored.kernel_seconds,
            oracle_seconds: stored.oracle_seconds,
            seconds: stored.seconds,
            our_seconds: stored.our_seconds,
            unsupported: stored.unsupported,
            skips: stored.skips,
            batches: stored.batches,
            plan_number: stored.plan_number,
            untestable: None,
        })
    }

    fn checks(&self, stored: &StoredCase) -> Result<Vec<CheckRecord>, String> {
        let order = entry(&self.orders, "order", stored.order)?;
        let sizes = entry(&self.sizes, "sizes", stored.sizes)?;
        if order.len() != sizes.len() {
            let (checks, sizes) = (order.len(), sizes.len());
            return Err(format!("an order of {checks} checks and {sizes} sizes"));
        }
        let check = |(&check, &size): (&u32, &u32)| {
            let (check, tensor) = entry(&self.checks, "check", check)?.clone();
            let compared = *entry(&stored.compared, "size", size)?;
            Ok(CheckRecord {
                check: Check::from(check.as_str()),
                tensor,
                verdict: Verdict::Pass,
                compared,
                message: String::new(),
                metrics: None,
                failing: None,
            })
        };
        let mut checks = order.iter().zip(sizes).map(check).collect::<Result<Vec<_>, String>>()?;
        for &place in &stored.exact {
            entry_mut(&mut checks, place)?.metrics =
                Some(Box::new(Measured::exact(place).metrics()));
        }
        for measured in &stored.measured {
            entry_mut(&mut checks, measured.0)?.metrics = Some(Box::new(measured.metrics()));
        }
        for (place, told) in &stored.told {
            *entry_mut(&mut checks, *place)? = told.clone();
        }
        Ok(checks)
    }
}

/// The line of a case, quoted as a replay command has it.
fn quoted_line(case: &Value) -> Option<String> {
    Some(quoted(&serde_json::from_value::<Case>(case.clone()).ok()?.line()))
}

/// The text before the line of the case and after it, or the whole command where it does not hold
/// the line.
fn without_case(replay: &str, case: &Value) -> Vec<String> {
    let around = quoted_line(case)
        .and_then(|line| replay.split_once(&line).map(|(a, b)| vec![a.into(), b.into()]));
    around.unwrap_or_else(|| vec![replay.to_owned()])
}

fn with_case(command: &[String], case: &Value) -> Result<String, String> {
    match command {
        [whole] => Ok(whole.clone()),
        [before, after] => {
            let line =
                quoted_line(case).ok_or("a command with the line of a case, and has none")?;
            Ok(format!("{before}{line}{after}"))
        }
        parts => Err(format!("a command of {} parts", parts.len())),
    }
}

/// The measures of a tensor that agrees, for tables and comparisons, without what only a picture or
/// a card shows.
pub(crate) fn measures(metrics: &Metrics) -> Metrics {
    Metrics {
        budget_multiple: f64::NAN,
        worst_row: 0,
        worst_row_relative_l2: f64::NAN,
        worst: Worst { index: Vec::new(), kernel: f64::NAN, oracle: f64::NAN, allowed: f64::NAN },
        whole: None,
        use_histogram: Vec::new(),
        heat: HeatMap { rows: 0, columns: 0, total_rows: 0, total_columns: 0, cells: Vec::new() },
        power: metrics.power.clone(),
        ..*metrics
    }
}

fn holds_measures_alone(metrics: &Metrics) -> bool {
    let Metrics { worst, heat, .. } = metrics;
    let numbers = [
        worst.kernel,
        worst.oracle,
        worst.allowed,
        metrics.budget_multiple,
        metrics.worst_row_relative_l2,
    ];
    let extents = [
        heat.total_rows,
        heat.total_columns,
        heat.rows.into(),
        heat.columns.into(),
        metrics.worst_row,
    ];
    numbers.iter().all(|number| number.is_nan())
        && extents == [0; 5]
        && worst.index.is_empty()
        && metrics.whole.is_none()
        && metrics.use_histogram.is_empty()
        && heat.cells.is_empty()
}

impl Measured {
    fn of(place: u32, metrics: &Metrics) -> Self {
        Self(
            place,
            Number(metrics.cosine),
            Number(metrics.norm_ratio),
            Number(metrics.relative_l2),
            Number(metrics.max_abs),
            Number(metrics.ulp_p50),
            Number(metrics.ulp_p99),
            Number(metrics.ulp_max),
            Number(metrics.budget_used),
            Number(metrics.budget_relative),
            metrics.power.as_ref().map(StoredPower::of),
        )
    }

    /// Of a tensor that is the oracle's to the bit, and whose power is not measured.
    fn exact(place: u32) -> Self {
        let (one, zero) = (|| Number(1.0), || Number(0.0));
        let none = [(); 7].map(|()| zero());
        let [l2, max, p50, p99, ulp, used, relative] = none;
        Self(place, one(), one(), l2, max, p50, p99, ulp, used, relative, None)
    }

    fn metrics(&self) -> Metrics {
        let absent = f64::NAN;
        measures(&Metrics {
            cosine: self.1.0,
            norm_ratio: self.2.0,
            relative_l2: self.3.0,
            max_abs: self.4.0,
            ulp_p50: self.5.0,
            ulp_p99: self.6.0,
            ulp_max: self.7.0,
            budget_used: self.8.0,
            budget_relative: self.9.0,
            power: self.10.as_ref().map(StoredPower::power),
            budget_multiple: absent,
            worst_row: 0,
            worst_row_relative_l2: absent,
            worst: Worst { index: Vec::new(), kernel: absent, oracle: absent, allowed: absent },
            whole: None,
            use_histogram: Vec::new(),
            heat: HeatMap {
                rows: 0,
                columns: 0,
                total_rows: 0,
                total_columns: 0,
                cells: Vec::new(),
            },
        })
    }
}

impl StoredPower {
    fn of(power: &Power) -> Self {
        let seen = |seen: Seen| match seen {
            Seen::Bias(k) => i64::from(k),
            Seen::Nothing => -1,
            Seen::FalseAlarm => -2,
        };
        let Power { bias, powerless, element, assert_close, cosine, flash_mla, flash_attention } =
            *power;
        Self(
            [bias, assert_close, cosine, flash_mla, flash_attention].map(seen),
            Number(element),
            powerless,
        )
    }

    fn power(&self) -> Power {
        let seen = |&seen: &i64| match u32::try_from(seen) {
            Ok(k) => Seen::Bias(k),
            Err(_) if seen == -2 => Seen::FalseAlarm,
            Err(_) => Seen::Nothing,
        };
        let [bias, assert_close, cosine, flash_mla, flash_attention] = self.0.each_ref().map(seen);
        let (element, powerless) = (self.1.0, self.2);
        Power { bias, powerless, element, assert_close, cosine, flash_mla, flash_attention }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Report;
    use crate::report::sample;

    /// Two NaN are the same here.
    fn json(cases: &[CaseRecord]) -> Value {
        serde_json::to_value(cases).expect("cases are JSON")
    }

    #[test]
    fn a_report_reads_back_to_the_very_same_records() {
        for mut report in [sample::passing(30), sample::failing(30), sample::whole(2)] {
            // Some have only their measures, one has no operator in its case, and one has a command
            // without a case.
            for check in report.cases.iter_mut().step_by(2).flat_map(|case| &mut case.checks) {
                check.metrics = check.metrics.as_deref().map(measures).map(Box::new);
            }
            report.cases[0].case = Value::from("a line");
            report.cases[1].replay = "parity replay FILE".into();
            let text = serde_json::to_string(&report).unwrap();
            let read: Report = serde_json::from_str(&text).unwrap();
            assert!(json(&read.cases) == json(&report.cases));
            assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
    }

    #[test]
    fn what_names_no_entry_of_a_table_is_refused_by_name() {
        let stored = |change: &dyn Fn(&mut Value)| {
            let mut value = serde_json::to_value(sample::passing(3)).unwrap();
            change(&mut value["cases"]);
            serde_json::from_value::<Report>(value).map(|_| ()).unwrap_err().to_string()
        };
        let at = |pointer: &'static str, to: Value| {
            stored(&move |cases| {
                *cases.pointer_mut(pointer).expect("there is such a field") = to.clone()
            })
        };
        assert!(at("/records/1/order", 99.into()).contains("case 1 names order 99 of"));
        assert!(at("/records/0/paths", 7.into()).contains("case 0 names paths 7 of"));
        assert!(at("/records/2/replay", 4.into()).contains("case 2 names command 4 of"));
        assert!(at("/records/0/fields", 9.into()).contains("case 0 names fields 9 of"));
        assert!(
            at("/records/0/compared", Value::Array(Vec::new()))
                .contains("case 0 names size 0 of 0")
        );
        assert!(at("/orders/0/0", 5000.into()).contains("case 0 names check 5000 of"));
        assert!(at("/sizes/0", Value::Array(Vec::new())).contains("checks and 0 sizes"));
        assert!(
            at("/records/0/case", Value::Array(Vec::new())).contains("fields and has 0 values")
        );
        assert!(at("/commands/0", Value::Array(Vec::new())).contains("a command of 0 parts"));
    }

    #[test]
    fn a_small_file_does_not_unfold_to_more_than_memory_holds() {
        let mut value = serde_json::to_value(sample::passing(3)).unwrap();
        let cases = &mut value["cases"];
        cases["orders"][0] = vec![0; 2_000_000].into();
        cases["sizes"][0] = vec![0; 2_000_000].into();
        let record = cases["records"][0].clone();
        cases["records"] = vec![record; 40].into();
        let mut stored: Stored = serde_json::from_value(cases.take()).unwrap();
        stored.records.iter_mut().for_each(|record| (record.order, record.sizes) = (0, 0));
        assert_eq!(stored.checks_in_all(), 80_000_000);
        assert_eq!(stored.read().unwrap_err(), "more than 20000000 checks");
    }
}
