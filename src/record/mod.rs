//! What a run leaves: serialised facts, from which every report is made.
//!
//! The schema is versioned ([`SCHEMA_VERSION`]) and documented here, field by field. `report.json`
//! is one [`Report`], whose cases are stored in tables (the module `stored`). `records.jsonl` has
//! one [`CaseRecord`] a line, written as they come ([`journal`]). Numbers that JSON cannot hold are
//! the strings `"NaN"`, `"inf"` and `"-inf"`.

use std::collections::{BTreeMap, BTreeSet};

pub use dsv4_runtime::cuda::blaslt::Operands;
use dsv4_runtime::{BackendKind, Environment};
use serde::{Deserialize, Serialize};

pub mod batch;
pub mod check;
pub mod family;
pub mod figures;
pub mod journal;
mod spread;
mod standing;
pub(crate) mod stored;
pub mod words;

pub use batch::{BatchAxis, BatchRecord, BatchStanding};
pub use check::Check;
pub use family::Family;
pub use spread::Spread;
pub(crate) use standing::{Standing, within, worse_first};
pub(crate) use stored::measures;

/// Version of the schema. Readers reject another one.
pub const SCHEMA_VERSION: u32 = 3;

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA_VERSION`] of the writer.
    pub schema_version: u32,
    /// The command line that made it.
    pub command: String,
    /// Start of the run, seconds since 1970-01-01 UTC.
    pub started_unix: u64,
    /// Duration in seconds. A resumed run includes the kernel and oracle seconds of the cases that
    /// it took over; for merged shards it is their sum.
    pub seconds: f64,
    /// What was tested.
    pub revision: Revision,
    /// What it ran on.
    pub environment: Environment,
    /// `quick`, `ci` or `full`.
    pub profile: String,
    /// Seed of the sweep.
    pub seed: u64,
    /// How many random schedules each case ran under, after the deterministic one (emulator).
    pub schedules: u32,
    /// One entry for each operator that was swept, in the registry's order.
    pub operators: Vec<OperatorRecord>,
    /// Every case that ran, in the order of the plan; stored in tables (the module `stored`).
    #[serde(with = "stored")]
    pub cases: Vec<CaseRecord>,
    /// Cases that the kernel does not support, as its runner reports; counted among the skips.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsupported: Vec<CaseRecord>,
    /// Cases of the plan that had not run when the run was cut short; only in a report of an
    /// unfinished run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<u64>,
    /// Criterion measurements found next to the run.
    pub benchmarks: Vec<BenchmarkRecord>,
    /// Rates of the device, measured in the same run as the benchmarks.
    pub ceilings: Option<Ceilings>,
    /// Mutants that were run, where the run included them.
    pub mutants: Vec<MutantRecord>,
    /// How those mutants were chosen; absent where none were run.
    pub kill_matrix: Option<KillMatrixRecord>,
    /// Things that were not done, each with its reason; shown, never silent.
    pub skips: Vec<Skip>,
    /// Where failing cases were saved, for the next run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub saved: Vec<SavedRecord>,
    /// What changed against another report, where this one was compared with it (`parity diff
    /// --page`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BaseRecord>,
    /// Which parts of the plan this is: one entry for a run, one for each shard after a merge;
    /// empty where no plan existed.
    pub shards: Vec<ShardRecord>,
}

/// Why a tensor of a case has no verdict: nothing is known of a kernel there.
pub const NOT_JUDGED: &str =
    "not judged: the oracle's runs leave the range of their arithmetic, and no bound follows";

/// A file that holds failing cases of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedRecord {
    /// Its path, as the run named it.
    pub file: String,
    /// How many of the run's failing cases it holds.
    pub cases: u64,
}

/// A report that another one was compared with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseRecord {
    /// Its commit.
    pub commit: String,
    /// Whether it was built with uncommitted changes.
    pub dirty: bool,
    /// Start of its run, seconds since 1970-01-01 UTC.
    pub started_unix: u64,
    /// Its device.
    pub device: String,
    /// Its profile.
    pub profile: String,
    /// The outcome of the comparison in one sentence.
    pub headline: String,
    /// How many changes there are.
    pub number: u64,
    /// The first of them, regressions before others.
    pub changes: Vec<ChangeRecord>,
}

/// One change against a base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeRecord {
    /// Its kind in words, such as `budget use grew`.
    pub kind: String,
    /// Whether a merge should wait for it.
    pub is_regression: bool,
    /// Operator.
    pub operator: String,
    /// Check and tensors, path, mutant or benchmark.
    pub subject: String,
    /// How it was.
    pub base: String,
    /// How it is.
    pub head: String,
}

/// One part of a divided run. A run that is not divided is shard 0 of 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Which one, from 0.
    pub index: u32,
    /// How many shards exist.
    pub count: u32,
    /// Cases of the whole plan, over all shards.
    pub planned_cases: u64,
    /// blake3 of the whole plan and of its division.
    pub plan_digest: String,
    /// blake3 of the `parity` executable. Two builds with uncommitted changes share a commit, but
    /// not this.
    pub executable_digest: String,
    /// Device that this shard ran on.
    pub device: String,
    /// Duration of this shard in seconds.
    pub seconds: f64,
    /// What the plan was made of, by the option that sets it.
    pub settings: Settings,
}

/// What a plan was made of, by the option that sets it.
pub type Settings = BTreeMap<String, String>;

/// The first setting that both have and that is not the same, with both of its values.
pub fn other_setting<'a>(
    one: &'a Settings,
    other: &'a Settings,
) -> Option<(&'a str, &'a str, &'a str)> {
    let different = |(name, value): (&'a String, &'a String)| {
        let there = other.get(name)?;
        (value != there).then_some((name.as_str(), value.as_str(), there.as_str()))
    };
    one.iter().find_map(different)
}

/// The source that was tested.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revision {
    /// Commit id at build time, or `unknown`.
    pub commit: String,
    /// Whether the working tree had uncommitted changes then.
    pub dirty: bool,
    /// Where the kernel sources came from: `the embedded kernels`, or a directory.
    pub kernels: String,
    /// blake3 over the kernel sources.
    pub kernels_digest: String,
}

/// An operator as the registry describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorRecord {
    /// The operator's one name.
    pub name: String,
    /// The part of the model that it belongs to; absent if the registry does not know the operator.
    pub family: Option<Family>,
    /// One sentence.
    pub summary: String,
    /// Sections of the specification that it implements, one citation each
    /// ([`crate::specification`]).
    pub specification: Vec<String>,
    /// Kernel source file.
    pub kernel_file: String,
    /// Oracle source file.
    pub oracle_file: String,
    /// Element types that the kernel takes.
    pub dtypes: Vec<String>,
    /// Axes along which its strategy generates cases.
    pub axes: Vec<String>,
    /// Whether there is a backward kernel.
    pub has_backward: bool,
    /// Every path that a case's record may name.
    pub paths: Vec<String>,
    /// Its tensors.
    pub tensors: Vec<TensorRecord>,
    /// The axes on which it declares batch invariance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invariant: Vec<InvariantRecord>,
    /// What an adapter may declare that a kernel does otherwise: each name, and what it means.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conventions: Vec<[String; 2]>,
    /// What public kernels of its kind compute and no case of it can, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_expressible: Vec<String>,
}

/// An axis on which an operator declares batch invariance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvariantRecord {
    /// The axis.
    pub axis: BatchAxis,
    /// Whether every case is invariant along it, whatever path it takes.
    pub always: bool,
    /// Whether it takes the invariant path (`"invariant": true`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_path: bool,
    /// Which cases are, where not all are: a field and its values, or the fields that decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
}

impl InvariantRecord {
    /// The axis, and the cases if not all.
    pub fn words(&self) -> String {
        let path = if self.by_path { " by its invariant path" } else { "" };
        match &self.when {
            Some(when) => format!("{}{path} ({when})", self.axis),
            None if self.always || self.by_path => format!("{}{path}", self.axis),
            None => format!("{} in some cases", self.axis),
        }
    }
}

/// A tensor of an operator, as its cases have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// Its name, also in the exchange with external kernels.
    pub name: String,
    /// `input`, `upstream`, `output`, `gradient`, `state`, `scratch` or `observed`.
    pub part: String,
    /// The output that an upstream belongs to, or the input that a gradient belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// Names of its axes, outermost first.
    pub axes: Vec<String>,
    /// Element types that occur in cases.
    pub dtypes: Vec<String>,
    /// Whether every case has it.
    pub always: bool,
    /// Which cases have it, where not all do: a field and its values, or the fields that decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
    /// Layouts that the kernels take.
    pub layouts: String,
    /// How it is compared, where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<String>,
}

/// One case: what was run and what every check found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseRecord {
    /// Operator.
    pub operator: String,
    /// The case's JSON line, which is enough to replay it.
    pub case: serde_json::Value,
    /// Where the case came from.
    pub origin: Origin,
    /// Kernel paths that ran, such as `rms_norm_forward_block`.
    pub paths: Vec<String>,
    /// One entry for each check and tensor.
    pub checks: Vec<CheckRecord>,
    /// Seconds spent in the kernel's runs.
    pub kernel_seconds: f64,
    /// Seconds spent in the oracle's runs.
    pub oracle_seconds: f64,
    /// How long an external kernel took by its own clock, where it was asked for the time and
    /// reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<Seconds>,
    /// How long ours took for the same case on the same device, where they were measured, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub our_seconds: Option<Seconds>,
    /// Why the kernel does not support such a case, as its runner reports: then nothing was
    /// compared, and it is a counted skip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
    /// Command that runs this case again.
    pub replay: String,
    /// Checks that could not be made of this case, if any: only for external kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skips: Vec<Skip>,
    /// What other batches with the same rows showed, axis by axis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub batches: Vec<BatchRecord>,
    /// Position in the plan of the whole run, over all operators and shards. A shrunk case has that
    /// of the case it came from. Absent where no plan existed: replays, golden files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_number: Option<u64>,
    /// Why the kernels cannot run here at all, if they cannot: then nothing was learnt, and the
    /// record is not kept.
    #[serde(skip)]
    pub untestable: Option<String>,
}

/// Times of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seconds {
    /// Seconds of the forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<f64>,
    /// Seconds of the backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backward: Option<f64>,
}

impl Seconds {
    /// Whether the values are possible times.
    pub fn are_times(&self) -> bool {
        [self.forward, self.backward]
            .into_iter()
            .flatten()
            .all(|time| time.is_finite() && time >= 0.0)
    }
}

/// Where a case came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// `fixtures/regressions`.
    Regression,
    /// Generated by the operator: an edge case, or drawn by its strategy.
    Drawn,
    /// A generated case that failed, shrunk.
    Shrunk,
    /// Given on the command line.
    Given,
}

/// The first words of a skip of all cases of an operator whose kernels cannot run; its name
/// follows.
const ALL_CASES_OF: &str = "all cases of ";

/// The text of a skip of all cases of an operator whose kernels cannot run.
pub fn all_cases_of(operator: &str) -> String {
    format!("{ALL_CASES_OF}{operator}")
}

/// The first words of a skip of a tensor's agreement; its name follows.
const AGREEMENT_OF: &str = "agreement of ";

/// The text of a skip of a tensor's agreement.
pub fn agreement_of(tensor: &str) -> String {
    format!("{AGREEMENT_OF}{tensor}")
}

impl CaseRecord {
    /// Tensors whose verdicts had no power, and how often.
    pub fn powerless(&self) -> impl Iterator<Item = (&str, u64)> {
        self.skips
            .iter()
            .filter_map(|skip| Some((skip.what.strip_prefix(AGREEMENT_OF)?, skip.count)))
    }
}

/// One check of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckRecord {
    /// What was checked.
    pub check: Check,
    /// Tensor that it checked; empty for checks of the whole case.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tensor: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// Elements that were really compared. A pass has at least one.
    pub compared: u64,
    /// One sentence on failure or error; empty on a pass.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Agreement measures, for forward and gradient checks. Boxed, as most checks have none, and
    /// reports hold millions of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Box<Metrics>>,
    /// Which elements failed, where elements did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<Box<FailingElements>>,
}

/// Which elements of a tensor fail a check, axis by axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailingElements {
    /// How many.
    pub count: u64,
    /// Shape of the tensor.
    pub shape: Vec<u64>,
    /// For each axis, which of its entries have a failing element.
    pub axes: Vec<FailingEntries>,
    /// The factor on the oracle's values that brings them closest to the kernel's, over the failing
    /// elements. Absent where one of these values is not finite, or where the check compares no
    /// values with the oracle's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factor: Option<Factor>,
}

/// Entries of an axis, as runs that may repeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailingEntries {
    /// Number of entries after which the runs repeat; the axis's size where they do not.
    pub period: u64,
    /// First and last entry of each run within a period; empty where there are too many to keep.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<[u64; 2]>,
    /// How many entries of the axis have a failing element in all.
    pub entries: u64,
}

/// A factor, and what it leaves unexplained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Factor {
    /// The factor.
    #[serde(with = "number")]
    pub value: f64,
    /// Root mean square of the rest, over that of the kernel's values.
    #[serde(with = "number")]
    pub rest: f64,
}

/// The verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The property holds.
    Pass,
    /// It does not.
    Fail,
    /// It could not be decided; counts as failed.
    Error,
}

/// How well a kernel's tensor agrees with the oracle's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// `<k, o> / (|k| |o|)`; reported, but never the only reason for a verdict.
    #[serde(with = "number")]
    pub cosine: f64,
    /// `|k| / |o|`.
    #[serde(with = "number")]
    pub norm_ratio: f64,
    /// `|k - o| / |o|`.
    #[serde(with = "number")]
    pub relative_l2: f64,
    /// `max |k - o|`.
    #[serde(with = "number")]
    pub max_abs: f64,
    /// Errors in units in the last place of the output type: median.
    #[serde(with = "number")]
    pub ulp_p50: f64,
    /// 99th percentile.
    #[serde(with = "number")]
    pub ulp_p99: f64,
    /// Largest.
    #[serde(with = "number")]
    pub ulp_max: f64,
    /// `max |k - o| / budget`: above 1 fails.
    #[serde(with = "number")]
    pub budget_used: f64,
    /// rms of the budget over rms of the oracle: how tight the budget is.
    #[serde(with = "number")]
    pub budget_relative: f64,
    /// Multiple of the working spread that the budget allows.
    #[serde(with = "number")]
    pub budget_multiple: f64,
    /// Row (all axes but the last, flattened) with the largest relative L2 error.
    pub worst_row: u64,
    /// Its relative L2 error.
    #[serde(with = "number")]
    pub worst_row_relative_l2: f64,
    /// The element that used most of its budget.
    pub worst: Worst,
    /// The tensor as a whole; absent where it is not compared within rounding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeTensor>,
    /// What the verdict could have seen; absent where there is nothing to see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// Counts of elements by share of budget used: 16 bins of 1/8 each from 0, including their
    /// upper ends; the last one is open.
    pub use_histogram: Vec<u64>,
    /// Largest error over budget of each cell, over the tensor as rows × last axis.
    pub heat: HeatMap,
}

/// A tensor as a whole, compared with runs of the oracle that round as the kernel does
/// ([`crate::judge::yardstick`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WholeTensor {
    /// Where the kernel declares that it rounds.
    pub rounding: RoundingPoints,
    /// The uniform relative error that explains it best.
    #[serde(with = "number")]
    pub bias: f64,
    /// The least that is allowed.
    #[serde(with = "number")]
    pub bias_low: f64,
    /// The most that is allowed.
    #[serde(with = "number")]
    pub bias_high: f64,
    /// Mean square of errors in units of the modelled variance.
    #[serde(with = "number")]
    pub energy: f64,
    /// The most that is allowed.
    #[serde(with = "number")]
    pub energy_allowed: f64,
    /// Share of elements that are equal to those of a run to nearest.
    #[serde(with = "number")]
    pub equal: f64,
    /// The least that is allowed.
    #[serde(with = "number")]
    pub equal_required: f64,
}

/// The smallest defects that a verdict would have failed ([`crate::judge::power`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Power {
    /// The bias that this verdict sees.
    pub bias: Seen,
    /// Whether an error of 10 % would pass: then the verdict is no agreement.
    pub powerless: bool,
    /// Error of a single element that fails wherever it is, over the root mean square of the
    /// tensor.
    #[serde(with = "number")]
    pub element: f64,
    /// What the defaults of `torch.testing.assert_close` see.
    pub assert_close: Seen,
    /// What a cosine similarity of 0.999 sees.
    pub cosine: Seen,
    /// What FlashMLA's test of attention outputs sees.
    pub flash_mla: Seen,
    /// What FlashAttention's rule sees.
    pub flash_attention: Seen,
}

/// What a rule sees in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// It fails a correct tensor.
    FalseAlarm,
    /// It passes tensors of half and of 1.5 times the correct values.
    Nothing,
    /// It fails a uniform relative bias of `2^-k`.
    Bias(u32),
}

/// One element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worst {
    /// Index along each axis.
    pub index: Vec<u64>,
    /// The kernel's value.
    #[serde(with = "number")]
    pub kernel: f64,
    /// The oracle's value.
    #[serde(with = "number")]
    pub oracle: f64,
    /// The allowed error.
    #[serde(with = "number")]
    pub allowed: f64,
}

/// A small picture of a tensor: at most 24 × 48 cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeatMap {
    /// Cells down; they cover `total_rows` rows evenly.
    pub rows: u32,
    /// Cells across; they cover `total_columns` columns evenly.
    pub columns: u32,
    /// Rows of the tensor (all axes but the last).
    pub total_rows: u64,
    /// Columns of the tensor (the last axis).
    pub total_columns: u64,
    /// Largest error over budget in each cell, in hundredths, at most 1e6, or
    /// [`HeatMap::NOT_COMPARED`]; row-major.
    pub cells: Vec<f32>,
}

impl HeatMap {
    /// A cell in which no element was compared within a budget: the oracle has no finite value
    /// there, or a structural zero, as in padding.
    pub const NOT_COMPARED: f32 = -1.0;
}

/// One criterion measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchmarkRecord {
    /// Criterion's id, such as `rms_norm_forward/16384x7168 bf16`.
    pub id: String,
    /// Operator.
    pub operator: String,
    /// Median time of one call in nanoseconds.
    pub median_ns: f64,
    /// Lower end of the 95 % confidence interval of the median.
    pub low_ns: f64,
    /// Upper end.
    pub high_ns: f64,
    /// Number of samples.
    pub samples: u64,
    /// Fewest bytes that the call must move (each input once, each output once).
    pub bytes: f64,
    /// Floating-point operations that it must do.
    pub flops: f64,
    /// Share of the limit: the larger of bytes over copy rate and FLOPs over matrix rate, over the
    /// time.
    pub percent_of_limit: Option<f64>,
}

/// What the device can do, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// Bytes per second of a device-to-device copy, read plus written.
    pub copy_bytes_per_second: f64,
    /// FLOP per second of an 8192^3 bf16 GEMM, where it was measured.
    pub matrix_flops_per_second: Option<f64>,
    /// The same of e4m3, of which the tensor cores do twice as many.
    pub e4m3_flops_per_second: Option<f64>,
}

/// One mutant and the checks that killed it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutantRecord {
    /// The mutant's id.
    pub id: String,
    /// Catalogue entry, such as `FM-03`; empty for a generated mutant.
    pub catalogue: String,
    /// Operator.
    pub operator: String,
    /// One sentence on what was changed.
    pub summary: String,
    /// Check that was expected to see it; empty for a generated mutant.
    pub expected: String,
    /// Checks that saw it; empty when it survived.
    pub killed_by: Vec<Check>,
    /// Where the mutant comes from.
    pub source: MutantSource,
    /// The result of the mutant.
    pub status: MutantStatus,
    /// Kind of change of a generated mutant, such as `comparison`.
    pub class: String,
    /// File within the kernel tree.
    pub file: String,
    /// Line of the change, from 1.
    pub line: u64,
    /// The changed lines as they stand.
    pub original: String,
    /// The same after the change.
    pub mutated: String,
    /// Cases that it ran on.
    pub cases_run: u64,
    /// The first case that killed it, as a line of JSON.
    pub killing_case: String,
    /// The first message of the killing check, why it is equivalent, or why it could not run.
    pub reason: String,
}

impl MutantRecord {
    /// The checks that saw it, in words.
    pub fn killers(&self) -> String {
        self.killed_by.iter().map(Check::as_str).collect::<Vec<_>>().join(", ")
    }
}

/// Where a mutant comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MutantSource {
    /// A known failure mode, planted by hand.
    #[default]
    Planted,
    /// Made from the syntax tree of the kernel.
    Generated,
}

/// The result of a mutant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MutantStatus {
    /// Some check failed.
    Killed,
    /// Every check of every case passed.
    #[default]
    Survived,
    /// It computes the same as the kernel. It is listed so with a reason and not run, or its
    /// machine code is the kernel's.
    Equivalent,
    /// It does not compile or cannot be launched, so it shows nothing.
    Invalid,
}

/// How a run's mutants were chosen and judged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KillMatrixRecord {
    /// Least share of each operator's generated mutants that must be killed.
    pub floor: f64,
    /// Seed of the sample.
    pub seed: u64,
    /// Most generated mutants of an operator; all where absent.
    pub sample: Option<u64>,
    /// Random schedules of each case (emulator).
    pub schedules: u32,
    /// Whether a mutant ran on all its cases. Otherwise it stopped at the first case that killed
    /// it.
    pub all_checks: bool,
    /// One entry for each operator.
    pub operators: Vec<GeneratedRecord>,
}

/// How many mutants an operator's kernel has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratedRecord {
    /// Operator.
    pub operator: String,
    /// Mutants of its syntax tree, equivalent ones included.
    pub generated: u64,
    /// How many of those the sample skipped.
    pub not_drawn: u64,
    /// How many of the sampled ones the time budget skipped.
    pub not_run: u64,
}

/// Something that was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skip {
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
    /// How many.
    pub count: u64,
}

impl Skip {
    /// Adds one more of a kind to a list that has each kind once.
    pub fn count(skips: &mut Vec<Self>, what: String, why: &str) {
        match skips.iter_mut().find(|skip| skip.what == what && skip.why == why) {
            Some(skip) => skip.count += 1,
            None => skips.push(Self { what, why: why.to_owned(), count: 1 }),
        }
    }
}

impl CaseRecord {
    /// The worst verdict of the case.
    pub fn verdict(&self) -> Verdict {
        self.checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Error)
    }
}

/// Operators and tensors for which no case reached agreement, because rounding was as large as the
/// values in each.
pub fn without_power(cases: &[CaseRecord]) -> Vec<(&str, &str)> {
    let powerless = cases
        .iter()
        .flat_map(|case| case.powerless().map(|(tensor, _)| (case.operator.as_str(), tensor)));
    let powerless: BTreeSet<_> = powerless.collect();
    let compared = |&(operator, tensor): &(&str, &str)| {
        let of_operator = cases.iter().filter(|case| case.operator == operator);
        of_operator
            .flat_map(|case| &case.checks)
            .any(|check| check.tensor == tensor && check.metrics.is_some())
    };
    powerless.into_iter().filter(|of| !compared(of)).collect()
}

impl CaseRecord {
    /// Whether a failing check of the case names this kernel.
    fn blames(&self, kernel: &str) -> bool {
        let is_part = |byte: char| byte.is_alphanumeric() || byte == '_';
        let mut failing = self.checks.iter().filter(|check| check.verdict != Verdict::Pass);
        failing.any(|check| check.message.split(|byte| !is_part(byte)).any(|word| word == kernel))
    }
}

impl Report {
    /// For each operator with cases that ran, the paths of its kernels that no case took. Without
    /// this list a report would present them as tested. A kernel whose fault a case reports ran.
    /// External kernels have paths of their own.
    pub fn paths_never_run(&self) -> Vec<(&str, Vec<&str>)> {
        let mut never = Vec::new();
        for operator in
            self.operators.iter().filter(|_| self.environment.backend != BackendKind::External)
        {
            let cases: Vec<_> =
                self.cases.iter().filter(|case| case.operator == operator.name).collect();
            let ran = |path: &String| {
                cases.iter().any(|case| case.paths.contains(path) || case.blames(path))
            };
            let missing: Vec<&str> =
                operator.paths.iter().filter(|path| !ran(path)).map(String::as_str).collect();
            if !cases.is_empty() && !missing.is_empty() {
                never.push((operator.name.as_str(), missing));
            }
        }
        never
    }

    /// Tensors for which no case of the whole run had a verdict with power: nothing was shown about
    /// them.
    pub fn without_power(&self) -> Vec<(&str, &str)> {
        let is_part = matches!(self.shards[..], [ShardRecord { count: 2.., .. }]);
        if is_part { Vec::new() } else { without_power(&self.cases) }
    }

    /// Skips that follow from the cases: those that the kernel does not support, tensors that were
    /// not judged, and, for an external kernel, the checks that could not be made.
    pub fn skips_of_cases(&self) -> Vec<Skip> {
        let is_external = self.environment.backend == BackendKind::External;
        let mut counts: BTreeMap<(String, String), u64> = BTreeMap::new();
        for record in &self.unsupported {
            let why = format!(
                "the kernel does not support them: {}",
                record.unsupported.as_deref().unwrap_or_default()
            );
            *counts.entry((format!("cases of {}", record.operator), why)).or_default() += 1;
        }
        let counts_here = |skip: &&Skip| is_external || skip.why == NOT_JUDGED;
        for skip in self.cases.iter().flat_map(|case| &case.skips).filter(counts_here) {
            *counts.entry((skip.what.clone(), skip.why.clone())).or_default() += skip.count;
        }
        counts.into_iter().map(|((what, why), count)| Skip { what, why, count }).collect()
    }

    /// Operators whose kernels could not be run, each with the reason.
    pub fn not_run(&self) -> impl Iterator<Item = (&str, &str)> {
        self.skips
            .iter()
            .filter_map(|skip| Some((skip.what.strip_prefix(ALL_CASES_OF)?, skip.why.as_str())))
    }

    /// The worst verdict of the run. A run is an error if it compared nothing, was cut short, or
    /// could not run an operator's kernels. It fails if no verdict over some tensor had power.
    pub fn verdict(&self) -> Verdict {
        let floor = if self.unfinished.is_some() || self.not_run().next().is_some() {
            Verdict::Error
        } else if self.without_power().is_empty() {
            Verdict::Pass
        } else {
            Verdict::Fail
        };
        self.cases.iter().map(|case| case.verdict().max(floor)).max().unwrap_or(Verdict::Error)
    }
}

/// Floating-point numbers in JSON, the special ones as strings.
pub mod number {
    use serde::{Deserialize, Deserializer, Serializer, de};

    /// Writes a number, or its name.
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() {
            serializer.serialize_f64(*value)
        } else if value.is_nan() {
            serializer.serialize_str("NaN")
        } else {
            serializer.serialize_str(if *value > 0.0 { "inf" } else { "-inf" })
        }
    }

    /// Reads either form.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(f64),
            Name(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(value) => Ok(value),
            Either::Name(name) => match name.as_str() {
                "NaN" => Ok(f64::NAN),
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                other => Err(de::Error::custom(format!("`{other}` is no number"))),
            },
        }
    }
}

/// What one call does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Operator.
    pub operator: String,
    /// Fewest bytes that it must move: each input once, each output once.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
    /// What the tensor cores multiply, by which [`Ceilings`] limit the operations.
    pub operands: Operands,
}

/// Where a kernel rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoundingPoints {
    /// Where the specification requires it: the oracle's rounding points.
    Specification,
    /// Not declared.
    #[default]
    Undeclared,
}
