//! One sweep over many workers.
//!
//! Every worker enumerates the same [`Plan`] (saved cases, edge cases, drawn cases of every
//! operator) from the same arguments. It divides the plan in the same way and runs its own part.
//! Workers do not communicate. [`crate::sweep::merge`] joins their results and proves from the
//! records that every case of the plan ran exactly once.
//!
//! The division balances recorded costs. It takes the longest processing time first, which is never
//! more than a third above the best division. Costs come from `--costs FILE`, a `report.json` or
//! `records.jsonl` of an earlier run. A case that is not in the file costs the average of its
//! operator, in proportion to its number of elements. Without a file the costs are the numbers of
//! elements. Every worker must have the same file: the division is part of the plan's digest, and a
//! merge of different plans is rejected.
//!
//! On one machine `parity run --workers N` does all of this with one command, over the available
//! GPUs. They share the memory of the machine and of the GPUs: a case that needs much of it waits
//! until others have released it ([`crate::judge::turns`]).
//!
//! # On a Slurm cluster
//!
//! `fixtures/sharding/parity.sbatch` is a job array, one task for each shard. The arguments after
//! the script's name go to `parity run`:
//!
//! ```text
//! export PARITY=$PWD/target/release/parity PARITY_OUT=$PWD/shards
//! array=$(sbatch --parsable --array=0-7 fixtures/sharding/parity.sbatch --profile full)
//! sbatch --dependency=afterany:$array --wrap="$PARITY merge $PARITY_OUT/shard-* --out reports/latest"
//! ```
//!
//! Tasks are requeued after a node failure or a preemption, and `--resume` continues after the last
//! complete record. To run one task again by hand, set the number of shards, because Slurm then
//! counts one: `PARITY_SHARDS=8 sbatch --array=3 …`.
//!
//! # On GitHub
//!
//! `fixtures/sharding/github-matrix.yml` is a workflow. One job builds, a matrix of jobs runs the
//! shards with that executable, and the last job merges what they uploaded. A disagreement fails
//! its shard's job, and the merge still runs: it reports which shards are missing, if any.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use dsv4_runtime::Environment;
use serde::Deserialize;
use serde_json::Value;

use crate::case::{Case, CaseError};
use crate::operator::AnyOperator;
use crate::operators::registry;
use crate::record::journal::{self, Remembered, Shard};
use crate::record::words::brief;
use crate::record::{CaseRecord, Origin, Skip, stored};
use crate::sweep::{self, PlannedCase, SweepOptions};

/// Every case of a run, and its shard.
pub struct Plan {
    /// All cases, in the order in which one worker would run them.
    pub cases: Vec<PlannedCase>,
    /// For each of them, the index of its shard.
    pub shard_of: Vec<u32>,
    /// [`plan_digest`] of both.
    pub digest: String,
    /// Cases that the device cannot run, counted by the reason: they are in no shard.
    pub skips: Vec<Skip>,
}

impl Plan {
    /// Enumerates the cases of a run on a device like this one, and divides them into `count`
    /// shards.
    ///
    /// # Errors
    /// A case that cannot be drawn, or more shards than cases.
    pub fn new(
        operators: &[&AnyOperator],
        remembered: &Remembered,
        options: &SweepOptions,
        environment: &Environment,
        count: u32,
        costs: &Costs,
    ) -> Result<Self> {
        let (mut cases, mut skips) = (Vec::new(), Vec::new());
        for operator in operators {
            let remembered = remembered.get(operator.name()).cloned().unwrap_or_default();
            let (planned, skipped) = sweep::plan(operator, remembered, options, environment)?;
            cases.extend(planned);
            skips.extend(skipped);
        }
        let cases = optional_in_turn(cases);
        Ok(Self { skips, ..Self::of(cases, options, count, costs)? })
    }

    /// Divides these cases into `count` shards.
    ///
    /// # Errors
    /// More shards than cases.
    pub fn of(
        cases: Vec<PlannedCase>,
        options: &SweepOptions,
        count: u32,
        costs: &Costs,
    ) -> Result<Self> {
        // An empty shard compares nothing, which must never count as agreement.
        if count > 1 && cases.len() < count as usize {
            bail!("{} cases cannot be divided by {count} shards", cases.len());
        }
        let values: Vec<Value> =
            cases.iter().map(|planned| json(&planned.case)).collect::<Result<_, _>>()?;
        let sizes: Vec<u64> = cases.iter().map(|planned| size_of(&planned.case)).collect();
        let shard_of = divide(&costs.of_all(&values, &sizes), count);
        let entries = cases.iter().zip(&shard_of).zip(&values);
        let entries = entries.map(|((planned, &shard), case)| (planned.origin, shard, case));
        let run = RunArguments {
            profile: options.profile.name(),
            seed: options.seed,
            schedules: options.checks.schedules,
        };
        let digest = plan_digest(run, count, entries);
        Ok(Self { cases, shard_of, digest, skips: Vec::new() })
    }
}

impl Plan {
    /// Rejects wrong records of a resumed run, one record a line. Each record must be of a case
    /// that this plan has for the shard, exactly as in the plan. No case may be recorded twice.
    ///
    /// # Errors
    /// The first line that does not match.
    pub fn refuse_other_records(&self, shard: Shard, records: &[CaseRecord]) -> Result<()> {
        let mut recorded = HashMap::new();
        for (line, record) in (1usize..).zip(records) {
            let shrunk_from = line.checked_sub(2).and_then(|before| records.get(before));
            self.refuse_another_record(shard, record, shrunk_from)
                .with_context(|| format!("line {line}"))?;
            if let Some(first) =
                recorded.insert((record.plan_number, record.origin == Origin::Shrunk), line)
            {
                bail!("line {line}: it is of the same case as line {first}");
            }
        }
        Ok(())
    }

    fn refuse_another_record(
        &self,
        shard: Shard,
        record: &CaseRecord,
        before: Option<&CaseRecord>,
    ) -> Result<()> {
        let place = record.plan_number.and_then(|number| usize::try_from(number).ok());
        let planned = place.and_then(|place| self.cases.get(place).zip(self.shard_of.get(place)));
        let Some((planned, &index)) = planned else {
            let number = record.plan_number.map_or("none".to_owned(), |number| number.to_string());
            bail!("its plan number is {number}, and the plan has {} cases", self.cases.len());
        };
        if index != shard.index {
            bail!("its case is of shard {index}, not of {}", shard.index);
        }
        let named = record.case.get("operator").and_then(Value::as_str);
        if record.operator != planned.case.operator || named != Some(&record.operator) {
            bail!(
                "its operator is {}, and the plan has a case of {}",
                record.operator,
                planned.case.operator
            );
        }
        if record.origin == Origin::Shrunk {
            // A shrunk case comes directly after the case that it came from.
            let follows = before.is_some_and(|before| before.plan_number == record.plan_number);
            return if follows {
                Ok(())
            } else {
                Err(anyhow!("the case that it was made of is not in the line before"))
            };
        }
        if record.origin != planned.origin {
            bail!("its case is {:?}, and that of the plan {:?}", record.origin, planned.origin);
        }
        let case = json(&planned.case)?;
        if record.case != case {
            bail!("its case is not that of the plan, {}", brief(&case.to_string()));
        }
        Ok(())
    }
}

/// The cases that always run, then the optional ones, round-robin over the operators.
fn optional_in_turn(cases: Vec<PlannedCase>) -> Vec<PlannedCase> {
    let (optional, mut order): (Vec<_>, Vec<_>) =
        cases.into_iter().partition(|planned| planned.optional);
    let mut turns: HashMap<String, usize> = HashMap::new();
    let turn_of = |planned: PlannedCase| {
        let turn = turns.entry(planned.case.operator.clone()).or_default();
        *turn += 1;
        (*turn, planned)
    };
    let mut optional: Vec<(usize, PlannedCase)> = optional.into_iter().map(turn_of).collect();
    optional.sort_by_key(|(turn, _)| *turn);
    order.extend(optional.into_iter().map(|(_, planned)| planned));
    order
}

fn json(case: &Case) -> Result<Value, CaseError> {
    serde_json::to_value(case).map_err(|e| CaseError::Malformed(e.to_string()))
}

/// What decides how a case is judged, in addition to the case itself.
#[derive(Clone, Copy, Debug)]
pub struct RunArguments<'a> {
    /// Name of the profile.
    pub profile: &'a str,
    /// Seed of the sweep.
    pub seed: u64,
    /// Random schedules for each case.
    pub schedules: u32,
}

/// blake3 over the arguments and, for each case in order, its origin, its shard and its JSON.
///
/// A merge computes it again from the merged records. So it detects two workers that planned
/// differently, and a record that was changed or moved.
pub fn plan_digest<'a>(
    run: RunArguments<'_>,
    count: u32,
    cases: impl Iterator<Item = (Origin, u32, &'a Value)>,
) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut line = |text: String| {
        hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    };
    line(format!("{} {} {} {count}", run.profile, run.seed, run.schedules));
    for (origin, shard, case) in cases {
        line(format!("{origin:?} {shard} {case}"));
    }
    hasher.finalize().to_hex().to_string()
}

/// Divides cases by their costs, in any unit. The most expensive come first, each to the shard with
/// the smallest sum, and to the first of equal ones. With no more shards than cases, no shard stays
/// empty.
pub fn divide(costs: &[u64], count: u32) -> Vec<u32> {
    let mut dearest_first: Vec<usize> = (0..costs.len()).collect();
    dearest_first.sort_by_key(|&case| (Reverse(costs[case]), case));
    let mut least_loaded: BinaryHeap<Reverse<(u64, u32)>> =
        (0..count).map(|shard| Reverse((0, shard))).collect();
    let mut shard_of = vec![0; costs.len()];
    for case in dearest_first {
        let Some(Reverse((load, shard))) = least_loaded.pop() else { break };
        shard_of[case] = shard;
        // A case without measurable cost still counts.
        least_loaded.push(Reverse((load.saturating_add(costs[case].max(1)), shard)));
    }
    shard_of
}

/// Fixed cost of a case, in elements. Of 1,402 cases on an H200 the smallest took a quarter of a
/// second, and those of many elements a microsecond an element.
const OF_EVERY_CASE: u64 = 1 << 18;

/// The size that the time of a case is assumed proportional to. A case that its operator cannot
/// read counts without elements: it fails at once.
fn size_of(case: &Case) -> u64 {
    let elements =
        registry::find(&case.operator).and_then(|operator| operator.elements(case)).unwrap_or(0);
    u64::try_from(elements).unwrap_or(u64::MAX).saturating_add(OF_EVERY_CASE)
}

/// Mean of costs in nanoseconds, or of sizes.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: u64,
    number: u64,
}

impl Mean {
    fn add(&mut self, value: u64) {
        self.sum = self.sum.saturating_add(value);
        self.number += 1;
    }

    fn value(self) -> u64 {
        self.sum / self.number.max(1)
    }
}

/// The costs of cases in an earlier run.
///
/// Whole nanoseconds, so that sums are the same on every worker.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    cases: HashMap<String, Mean>,
    operators: HashMap<String, Mean>,
    all: Mean,
}

impl Costs {
    /// The costs in a `report.json` or a `records.jsonl`.
    ///
    /// # Errors
    /// A file that cannot be read, that is neither, or that holds no case.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("reading costs from {}", path.display()))?;
        let report: Result<Cases, _> = serde_json::from_str(&text);
        let records = match report {
            Ok(report) => report.cases,
            Err(_) => {
                journal::read_records(text.as_bytes())
                    .with_context(|| format!("costs in {}", path.display()))?
                    .records
            }
        };
        if records.is_empty() {
            bail!("{} holds no case whose cost is known", path.display());
        }
        Ok(Self::from_records(&records))
    }

    /// The costs of these records: kernel and oracle seconds.
    pub fn from_records(records: &[CaseRecord]) -> Self {
        let mut costs = Self::default();
        for record in records {
            // `as` saturates, and turns NaN and negative times into 0.
            let nanoseconds = ((record.kernel_seconds + record.oracle_seconds) * 1e9) as u64;
            costs.cases.entry(record.case.to_string()).or_default().add(nanoseconds);
            costs.operators.entry(record.operator.clone()).or_default().add(nanoseconds);
            costs.all.add(nanoseconds);
        }
        costs
    }

    /// Nanoseconds of each case. A known case has its own cost. Otherwise the cost is the mean of
    /// its operator, or of all cases. It is scaled by the case's size over the mean size of the
    /// operator's unknown cases. If nothing is known, the costs are the sizes.
    pub fn of_all(&self, cases: &[Value], sizes: &[u64]) -> Vec<u64> {
        let mut unknown: HashMap<&str, Mean> = HashMap::new();
        let own: Vec<Option<u64>> =
            cases.iter().map(|case| Some(self.cases.get(&case.to_string())?.value())).collect();
        for ((case, &size), _) in cases.iter().zip(sizes).zip(&own).filter(|(_, own)| own.is_none())
        {
            unknown.entry(operator_of(case)).or_default().add(size);
        }
        let estimate = |case: &Value, size: u64| {
            let mean = self.operators.get(operator_of(case)).copied().unwrap_or(self.all);
            if mean.number == 0 {
                return size;
            }
            let mean_size = unknown.get(operator_of(case)).map_or(1, |mean| mean.value().max(1));
            u64::try_from(u128::from(mean.value()) * u128::from(size) / u128::from(mean_size))
                .unwrap_or(u64::MAX)
        };
        let all = cases.iter().zip(sizes).zip(own);
        all.map(|((case, &size), own)| own.unwrap_or_else(|| estimate(case, size)).max(1)).collect()
    }
}

fn operator_of(case: &Value) -> &str {
    case.get("operator").and_then(Value::as_str).unwrap_or_default()
}

/// The part of a report that holds costs.
#[derive(Deserialize)]
struct Cases {
    #[serde(deserialize_with = "stored::deserialize")]
    cases: Vec<CaseRecord>,
}
