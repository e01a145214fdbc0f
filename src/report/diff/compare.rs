//! What got worse, better, or cannot be compared.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use dsv4_runtime::BackendKind;

use super::FALSE_ALARM_RATE;
use super::statistics::{absence, holm, median, rank_sum, signed_rank};
use crate::mutants::matrix::tally::Tally;
use crate::record::Standing;
use crate::record::check::LAW;
use crate::record::{
    BenchmarkRecord, CaseRecord, Metrics, MutantRecord, MutantSource, MutantStatus, Origin, Report,
    Skip,
};
use crate::report::drawn::compared;
use crate::report::numbers::{count, counted, significant, time};
use crate::report::summary::{agrees, survived};

/// The kind of a finding. Regressions come first, in the order that suits a reviewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A check that agreed fails, cannot be decided, or is an unfounded pass.
    NewlyFailing,
    /// A mutant that was killed survives.
    MutantSurvives,
    /// Something that was compared is not compared any more, or less.
    CoverageShrank,
    /// The derived budget accepts larger errors.
    BudgetLoosened,
    /// The kernel uses more of its budget.
    BudgetUseGrew,
    /// A benchmark takes longer.
    Slower,
    /// A check fails in both reports.
    StillFailing,
    /// A check that failed agrees.
    NewlyPassing,
    /// A mutant that survived is killed.
    MutantKilled,
    /// Something new is compared.
    CoverageGrew,
    /// The derived budget accepts only smaller errors.
    BudgetTightened,
    /// The kernel uses less of its budget.
    BudgetUseFell,
    /// A benchmark takes less time.
    Faster,
}

impl Kind {
    /// Whether a merge should wait for it.
    pub fn is_regression(self) -> bool {
        self <= Self::Slower
    }

    /// Its text in reports.
    pub fn words(self) -> &'static str {
        match self {
            Self::NewlyFailing => "newly failing",
            Self::MutantSurvives => "mutant survives",
            Self::CoverageShrank => "coverage shrank",
            Self::BudgetLoosened => "budget loosened",
            Self::BudgetUseGrew => "budget use grew",
            Self::Slower => "slower",
            Self::StillFailing => "still failing",
            Self::NewlyPassing => "newly passing",
            Self::MutantKilled => "mutant killed",
            Self::CoverageGrew => "coverage grew",
            Self::BudgetTightened => "budget tightened",
            Self::BudgetUseFell => "budget use fell",
            Self::Faster => "faster",
        }
    }
}

/// One difference.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Its kind.
    pub kind: Kind,
    /// Operator.
    pub operator: String,
    /// Check and tensors, path, mutant or benchmark.
    pub subject: String,
    /// How it was.
    pub base: String,
    /// How it is.
    pub head: String,
    /// The evidence for it; may be empty.
    pub why: String,
    /// Command that shows it, where one case does.
    pub replay: Option<String>,
}

/// How often checks of one name passed and ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckDiff {
    /// The check.
    pub check: String,
    /// Passed and ran in BASE.
    pub base: (u64, u64),
    /// Passed and ran in HEAD.
    pub head: (u64, u64),
}

/// A tensor's measures over the cases of one report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Cases with metrics.
    pub cases: u64,
    /// Median share of the budget used.
    pub median: f64,
    /// Largest share of the budget used.
    pub worst: f64,
    /// Median of the budget relative to the value.
    pub relative: f64,
}

/// One tensor under one check.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDiff {
    /// `forward` or `gradient`.
    pub check: String,
    /// Tensor.
    pub tensor: String,
    /// In BASE.
    pub base: Option<Spread>,
    /// In HEAD.
    pub head: Option<Spread>,
    /// Pairs in which the use rose and fell, where cases were compared in pairs.
    pub moved: Option<(u64, u64)>,
    /// One-sided `p` that the use grew, that it fell, that the budget loosened, that it tightened.
    pub p: [f64; 4],
    /// Which of these are significant.
    pub stands: [bool; 4],
    /// The largest rise of one case's use, with its replay.
    pub largest_rise: Option<(f64, f64, String)>,
}

/// One operator.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorDiff {
    /// Its name.
    pub name: String,
    /// Cases of the sweep in BASE, in HEAD, in both.
    pub cases: [u64; 3],
    /// The same of saved cases; their number depends on earlier runs.
    pub remembered: [u64; 3],
    /// By check.
    pub checks: Vec<CheckDiff>,
    /// By tensor.
    pub tensors: Vec<TensorDiff>,
    /// Cases by kernel path, in BASE and in HEAD.
    pub paths: BTreeMap<String, [u64; 2]>,
}

/// One benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchmarkDiff {
    /// Criterion's id.
    pub id: String,
    /// In BASE.
    pub base: Option<BenchmarkRecord>,
    /// In HEAD.
    pub head: Option<BenchmarkRecord>,
    /// The kind of change; `None` where the intervals overlap or nothing can be concluded.
    pub kind: Option<Kind>,
}

impl BenchmarkDiff {
    /// Lowest, middle and highest ratio of the times, HEAD over BASE, that the intervals allow.
    pub fn ratio(&self) -> Option<[f64; 3]> {
        let (base, head) = (self.base.as_ref()?, self.head.as_ref()?);
        Some([
            head.low_ns / base.high_ns,
            head.median_ns / base.median_ns,
            head.high_ns / base.low_ns,
        ])
    }

    /// The change in percent with its bounds, such as `+8.1 % (+6.9 … +9.4 %)`.
    pub fn change(&self) -> String {
        let percent = |ratio: f64| {
            let change = 100.0 * (ratio - 1.0);
            format!(
                "{}{}",
                if change > 0.0 { "+" } else { "" },
                significant(change, 2).replace('-', "−")
            )
        };
        self.ratio().map_or("—".to_owned(), |[low, middle, high]| {
            format!("{} % ({} … {} %)", percent(middle), percent(low), percent(high))
        })
    }
}

/// The full comparison of two reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Diff {
    /// Differences, regressions first.
    pub findings: Vec<Finding>,
    /// Reasons why the reports cannot be compared in full.
    pub notes: Vec<String>,
    /// Every operator of either report.
    pub operators: Vec<OperatorDiff>,
    /// Every benchmark of either report.
    pub benchmarks: Vec<BenchmarkDiff>,
}

impl Diff {
    /// The findings for which a merge should wait.
    pub fn regressions(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.kind.is_regression())
    }
}

/// Compares two reports.
///
/// # Errors
/// Reports that have nothing in common to compare, or that are only part of a run.
pub fn compare(base: &Report, head: &Report) -> Result<Diff> {
    for (name, report) in [("BASE", base), ("HEAD", head)] {
        let parts = report.shards.first().map_or(0, |shard| shard.count as usize);
        if report.shards.len() < parts {
            bail!(
                "{name} is {} of {parts} shards: merge them first (parity merge)",
                report.shards.len()
            );
        }
    }
    if base.cases.is_empty() {
        bail!("BASE holds no case: there is nothing to compare with");
    }
    let names = |report: &Report| -> BTreeSet<String> {
        report.cases.iter().map(|c| c.operator.clone()).collect()
    };
    let (in_base, in_head) = (names(base), names(head));
    if !in_head.is_empty() && in_base.is_disjoint(&in_head) {
        bail!("the reports have no operator in common");
    }
    let both = Both {
        base,
        head,
        same_profile: base.profile == head.profile,
        same_seed: base.seed == head.seed,
    };
    let mut diff = Diff {
        findings: Vec::new(),
        notes: notes(base, head),
        operators: Vec::new(),
        benchmarks: Vec::new(),
    };
    for name in in_base.union(&in_head) {
        let sides = [base, head].map(|report| Side::of(report, name));
        diff.operators.push(both.operator(name, &sides, &mut diff.findings));
    }
    diff.notes.extend(diff.operators.iter().filter_map(remembered_note));
    judge_tensors(&mut diff.operators, &mut diff.findings);
    both.schedules(&mut diff.findings);
    mutants(base, head, &mut diff.findings);
    diff.benchmarks = both.benchmarks(&mut diff.findings, &mut diff.notes);
    diff.findings.sort_by(|a, b| (a.kind, &a.operator).cmp(&(b.kind, &b.operator)));
    Ok(diff)
}

/// What a reader must know before trusting the comparison.
fn notes(base: &Report, head: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    let (one, other) = (&base.environment, &head.environment);
    if !same_device(base, head) {
        notes.push(format!(
            "Different devices ({} {} and {} {}): verdicts, budgets and budget use are compared, speed is not.",
            one.backend, one.device, other.backend, other.device
        ));
    }
    for (what, one, other) in
        [("driver", &one.driver, &other.driver), ("compiler", &one.compiler, &other.compiler)]
    {
        if one != other {
            notes.push(format!(
                "Different {what}s ({one} and {other}): a change need not come from the kernels."
            ));
        }
    }
    if one_is_external(base, head) {
        let what = "paths are not compared, and checks that cannot be made of it are no loss";
        notes.push(format!("One of the two is an external kernel: {what}."));
    }
    if base.profile != head.profile {
        notes.push(format!(
            "Different profiles ({} and {}): only cases in both are compared; numbers of cases, paths and checks are not judged.",
            base.profile, head.profile
        ));
    } else if base.seed != head.seed {
        notes.push(format!(
            "Different seeds ({} and {}): the drawn cases differ, so tensors are compared as samples and not in pairs, which sees less.",
            base.seed, head.seed
        ));
    }
    if base.revision.kernels_digest == head.revision.kernels_digest {
        notes.push(
            "The kernel sources are the same: every difference comes from the harness, the oracles or the machine."
                .into(),
        );
    }
    for (name, report) in [("BASE", base), ("HEAD", head)] {
        if report.revision.dirty {
            notes.push(format!("{name} was built with uncommitted changes."));
        }
    }
    for skip in head.skips.iter().filter(|skip| !base.skips.contains(skip)) {
        notes.push(format!("HEAD skipped {} × {}: {}", count(skip.count), skip.what, skip.why));
    }
    notes
}

/// Whether one report is of our kernels and the other of an external kernel: paths and runs differ
/// then.
fn one_is_external(base: &Report, head: &Report) -> bool {
    let external = |report: &Report| report.environment.backend == BackendKind::External;
    external(base) != external(head)
}

fn same_device(base: &Report, head: &Report) -> bool {
    let key = |report: &Report| {
        let environment = &report.environment;
        (
            environment.backend,
            environment.device.clone(),
            environment.target.clone(),
            environment.processors,
        )
    };
    key(base) == key(head)
}

/// A check of one tensor.
type CheckKey = (String, String);

/// Which part of a run a case belongs to. A case that ran in several parts counts for the first
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    /// The sweep itself: the same number of cases in every run of one profile.
    Swept,
    /// Saved by earlier runs: as many cases as failed there.
    Remembered,
    /// Exists only because a case failed.
    Shrunk,
}

impl Part {
    fn of(case: &CaseRecord) -> Self {
        match case.origin {
            Origin::Drawn | Origin::Given => Self::Swept,
            Origin::Regression => Self::Remembered,
            Origin::Shrunk => Self::Shrunk,
        }
    }
}

/// The result of one check of one case.
struct Said {
    line: String,
    part: Part,
    standing: Standing,
}

/// One operator in one report.
struct Side<'a> {
    /// Cases by their JSON line, each once.
    cases: BTreeMap<String, &'a CaseRecord>,
    /// By check and tensor.
    checks: BTreeMap<CheckKey, Vec<Said>>,
}

impl<'a> Side<'a> {
    fn of(report: &'a Report, operator: &str) -> Self {
        let mut side = Self { cases: BTreeMap::new(), checks: BTreeMap::new() };
        let mut records: Vec<_> =
            report.cases.iter().filter(|case| case.operator == operator).collect();
        records.sort_by_key(|case| Part::of(case));
        for case in records {
            side.add(case);
        }
        side
    }

    /// Adds a record. A saved case runs again next to the drawn one that it came from: its checks
    /// count once, and a failure counts wherever it happened.
    fn add(&mut self, case: &'a CaseRecord) {
        let (line, part) = (case.case.to_string(), Part::of(case));
        let again = self.cases.contains_key(&line);
        let unchecked = ("checks", "", Standing::Error);
        let checks = case
            .checks
            .iter()
            .map(|check| (check.check.as_str(), &*check.tensor, Standing::of(check)));
        for (check, tensor, standing) in checks.chain(case.checks.is_empty().then_some(unchecked)) {
            if !again || standing != Standing::Pass {
                let said = Said { line: line.clone(), part, standing };
                self.checks.entry((check.to_owned(), tensor.to_owned())).or_default().push(said);
            }
        }
        self.cases.entry(line).or_insert(case);
    }

    fn of_part(&self, part: Part) -> impl Iterator<Item = (&String, &'a CaseRecord)> {
        self.cases
            .iter()
            .filter(move |(_, case)| Part::of(case) == part)
            .map(|(line, case)| (line, *case))
    }

    fn count(&self, part: Part) -> u64 {
        self.of_part(part).count() as u64
    }

    /// Cases of the sweep itself.
    fn swept(&self) -> u64 {
        self.count(Part::Swept)
    }

    fn failing(&self, key: &CheckKey) -> Vec<&str> {
        let of_key = self.checks.get(key).into_iter().flatten();
        of_key
            .filter(|said| said.standing != Standing::Pass)
            .map(|said| said.line.as_str())
            .collect()
    }

    fn ran(&self, key: &CheckKey) -> u64 {
        self.checks.get(key).map_or(0, |said| said.len() as u64)
    }

    /// How often a check ran in the sweep itself.
    fn ran_in_sweep(&self, key: &CheckKey) -> u64 {
        self.checks.get(key).into_iter().flatten().filter(|said| said.part == Part::Swept).count()
            as u64
    }

    fn passed(&self, key: &CheckKey) -> u64 {
        self.ran(key) - self.failing(key).len() as u64
    }

    /// Metrics of the sweep's cases under one check.
    fn metrics(&self, key: &CheckKey) -> BTreeMap<&str, &'a Metrics> {
        self.of_part(Part::Swept)
            .filter_map(|(line, case)| {
                let check =
                    case.checks.iter().find(|one| one.check == *key.0 && one.tensor == key.1)?;
                Some((line.as_str(), check.metrics.as_deref()?))
            })
            .collect()
    }

    fn paths(&self) -> BTreeMap<String, u64> {
        let mut paths = BTreeMap::new();
        for (_, case) in self.of_part(Part::Swept) {
            for path in case.paths.iter().collect::<BTreeSet<_>>() {
                *paths.entry(path.clone()).or_default() += 1;
            }
        }
        paths
    }
}

/// The reports, and how they can be compared.
struct Both<'a> {
    base: &'a Report,
    head: &'a Report,
    same_profile: bool,
    same_seed: bool,
}

impl Both<'_> {
    fn operator(&self, name: &str, sides: &[Side; 2], findings: &mut Vec<Finding>) -> OperatorDiff {
        let [base, head] = sides;
        let cases = in_each_and_both(sides, Part::Swept);
        let remembered = in_each_and_both(sides, Part::Remembered);
        verdicts(name, sides, findings);
        if head.cases.is_empty() {
            findings.push(shrank(
                name,
                "operator",
                format!("swept, {}", counted(base.swept(), "case")),
                "not swept",
            ));
        } else if base.cases.is_empty() {
            findings.push(Finding {
                kind: Kind::CoverageGrew,
                ..shrank(
                    name,
                    "operator",
                    "not swept",
                    format!("swept, {}", counted(head.swept(), "case")),
                )
            });
        } else {
            self.coverage(name, sides, findings);
        }
        let keys: BTreeSet<_> = base.checks.keys().chain(head.checks.keys()).cloned().collect();
        let tensors = keys.iter().filter_map(|key| self.tensor(key, sides)).collect();
        let mut paths: BTreeMap<String, [u64; 2]> = BTreeMap::new();
        for (place, side) in sides.iter().enumerate() {
            for (path, cases) in side.paths() {
                paths.entry(path).or_default()[place] = cases;
            }
        }
        OperatorDiff {
            name: name.to_owned(),
            cases,
            remembered,
            checks: check_counts(&keys, sides),
            tensors,
            paths,
        }
    }

    /// Cases, paths, checks, axes and types that HEAD lost.
    fn coverage(&self, name: &str, sides: &[Side; 2], findings: &mut Vec<Finding>) {
        let [base, head] = sides;
        self.described(name, findings);
        let (were, are) = (base.swept(), head.swept());
        if self.same_profile && were != are {
            let kind = if are < were { Kind::CoverageShrank } else { Kind::CoverageGrew };
            findings.push(Finding { kind, ..shrank(name, "cases", count(were), count(are)) });
        }
        if !one_is_external(self.base, self.head) {
            self.paths(name, sides, findings);
        }
        self.checks_lost(name, sides, findings);
    }

    fn paths(&self, name: &str, sides: &[Side; 2], findings: &mut Vec<Finding>) {
        let [base, head] = sides;
        let (were, are) = (base.swept(), head.swept());
        let (paths, now) = (base.paths(), head.paths());
        for (path, seen) in paths.iter().filter(|(path, _)| !now.contains_key(*path)) {
            if let Some(why) = self.gone(*seen, were, are) {
                let subject = format!("path {path}");
                findings.push(Finding {
                    why,
                    ..shrank(
                        name,
                        &subject,
                        format!("ran in {}", counted(*seen, "case")),
                        "never ran",
                    )
                });
            }
        }
        for path in now.keys().filter(|path| !paths.contains_key(*path)) {
            let head = format!("ran in {}", counted(now[path], "case"));
            let subject = format!("path {path}");
            findings.push(Finding {
                kind: Kind::CoverageGrew,
                ..shrank(name, &subject, "never ran", head)
            });
        }
    }

    /// Whether a check may be missing: HEAD reports that it checks laws in turn, and BASE checked
    /// all of them; or one of them is an external kernel, which reports that it skipped the check,
    /// or made it in fewer runs of a case.
    fn lacks_rightly(&self, (check, tensor): &CheckKey, are: u64) -> bool {
        let in_turn = |report: &Report| {
            let mut skips = report.cases.iter().flat_map(|case| &case.skips);
            skips.any(|skip| skip.what == "laws")
        };
        if check.starts_with(LAW) && in_turn(self.head) && !in_turn(self.base) {
            return true;
        }
        let of_tensor = format!(" of {tensor}");
        let skipped = |skip: &Skip| {
            skip.what == *check || !tensor.is_empty() && skip.what.ends_with(&of_tensor)
        };
        one_is_external(self.base, self.head) && (are > 0 || self.head.skips.iter().any(skipped))
    }

    /// Whether something seen in `seen` of `were` cases, and in none of `are`, is really gone; if
    /// so, the reason.
    fn gone(&self, seen: u64, were: u64, are: u64) -> Option<String> {
        let chance = absence(seen, were, are);
        match (self.same_profile, self.same_seed) {
            (false, _) => None,
            (true, true) => Some(String::new()),
            (true, false) if chance <= FALSE_ALARM_RATE => Some(format!(
                "another seed would miss it with probability {}",
                significant(chance, 2)
            )),
            (true, false) => None,
        }
    }

    /// Axes, element types and a backward kernel that the registry no longer names.
    fn described(&self, name: &str, findings: &mut Vec<Finding>) {
        let find =
            |report: &'_ Report| report.operators.iter().find(|one| one.name == name).cloned();
        let (Some(base), Some(head)) = (find(self.base), find(self.head)) else { return };
        let backward = |has: bool| if has { vec!["backward".to_owned()] } else { Vec::new() };
        let lists = [
            ("axis", base.axes, head.axes),
            ("type", base.dtypes, head.dtypes),
            ("kernel", backward(base.has_backward), backward(head.has_backward)),
        ];
        for (what, were, are) in lists {
            for lost in were.iter().filter(|one| !are.contains(one)) {
                findings.push(shrank(name, &format!("{what} {lost}"), "covered", "gone"));
            }
        }
    }

    /// Checks that passed in BASE and do not run in HEAD, in the same cases or anywhere. Cases that
    /// fail in HEAD are skipped: a check that a failure prevented is not a second finding.
    fn checks_lost(&self, name: &str, sides: &[Side; 2], findings: &mut Vec<Finding>) {
        let [base, head] = sides;
        let clean = |line: &str| head.cases.get(line).is_some_and(|case| agrees(case));
        let any_clean = head.cases.values().any(|case| agrees(case));
        let mut lost: BTreeMap<&str, Vec<(String, u64, u64, String)>> = BTreeMap::new();
        for key in base.checks.keys().filter(|key| base.passed(key) > 0) {
            let were = base.checks[key]
                .iter()
                .filter(|said| said.standing == Standing::Pass && clean(&said.line));
            let were = were.count() as u64;
            let of_both = |said: &&Said| base.cases.contains_key(&said.line) && clean(&said.line);
            let are =
                head.checks.get(key).map_or(0, |all| all.iter().filter(of_both).count() as u64);
            let entry = if are < were {
                Some((were, are, "in the cases of both reports".to_owned()))
            } else if head.ran(key) == 0 && any_clean && were == 0 && base.ran_in_sweep(key) > 0 {
                let ran = base.ran_in_sweep(key);
                self.gone(ran, base.swept(), head.swept()).map(|why| (ran, 0, why))
            } else {
                None
            };
            if let Some((were, are, why)) =
                entry.filter(|(_, are, _)| !self.lacks_rightly(key, *are))
            {
                lost.entry(&key.0).or_default().push((key.1.clone(), were, are, why));
            }
        }
        for (check, tensors) in lost {
            let sum = |pick: fn(&(String, u64, u64, String)) -> u64| {
                tensors.iter().map(pick).sum::<u64>()
            };
            let names: Vec<&str> = tensors.iter().map(|entry| entry.0.as_str()).collect();
            let (were, are) = (
                format!("ran {} ×", count(sum(|t| t.1))),
                format!("runs {} ×", count(sum(|t| t.2))),
            );
            let why = tensors[0].3.clone();
            findings.push(Finding { why, ..shrank(name, &subject(check, &names), were, are) });
        }
    }

    /// One tensor's measures in both reports; `None` for checks that measure nothing.
    fn tensor(&self, key: &CheckKey, sides: &[Side; 2]) -> Option<TensorDiff> {
        let [base, head] = [sides[0].metrics(key), sides[1].metrics(key)];
        if base.is_empty() && head.is_empty() {
            return None;
        }
        let pairs: Vec<_> = base
            .iter()
            .filter_map(|(line, metrics)| Some((*line, *metrics, *head.get(line)?)))
            .collect();
        let paired = !self.same_profile || (self.same_seed && !pairs.is_empty());
        let of = |map: &BTreeMap<&str, &Metrics>, pick: fn(&Metrics) -> f64| -> Vec<f64> {
            map.values().map(|metrics| compared(pick(metrics))).collect()
        };
        let test = |pick: fn(&Metrics) -> f64| {
            if paired {
                let rises =
                    pairs.iter().map(|(_, was, is)| compared(pick(is)) - compared(pick(was)));
                let rises: Vec<f64> = rises.collect();
                let falls: Vec<f64> = rises.iter().map(|rise| -rise).collect();
                [signed_rank(&rises), signed_rank(&falls)]
            } else {
                let (were, are) = (of(&base, pick), of(&head, pick));
                [rank_sum(&were, &are), rank_sum(&are, &were)]
            }
        };
        let [grew, fell] = test(|metrics| metrics.budget_used);
        let [loosened, tightened] = test(|metrics| metrics.budget_relative);
        let rise = |(_, was, is): &(&str, &Metrics, &Metrics)| {
            compared(is.budget_used) - compared(was.budget_used)
        };
        let largest =
            pairs.iter().filter(|pair| rise(pair) > 0.0).max_by(|a, b| rise(a).total_cmp(&rise(b)));
        let moved = |sign: f64| pairs.iter().filter(|pair| sign * rise(pair) > 0.0).count() as u64;
        Some(TensorDiff {
            check: key.0.clone(),
            tensor: key.1.clone(),
            base: spread(&base),
            head: spread(&head),
            moved: paired.then(|| (moved(1.0), moved(-1.0))),
            p: [grew, fell, loosened, tightened],
            stands: [false; 4],
            largest_rise: largest.map(|(line, was, is)| {
                (was.budget_used, is.budget_used, sides[1].cases[*line].replay.clone())
            }),
        })
    }

    /// Fewer random schedules see fewer races.
    fn schedules(&self, findings: &mut Vec<Finding>) {
        let (were, are) = (self.base.schedules, self.head.schedules);
        if are < were && self.base.environment.backend == self.head.environment.backend {
            findings.push(shrank(
                "all",
                "random schedules of each case",
                count(were.into()),
                count(are.into()),
            ));
        }
    }

    fn benchmarks(
        &self,
        findings: &mut Vec<Finding>,
        notes: &mut Vec<String>,
    ) -> Vec<BenchmarkDiff> {
        let same_device = same_device(self.base, self.head);
        let find =
            |report: &Report, id: &str| report.benchmarks.iter().find(|one| one.id == id).cloned();
        let mut ids: Vec<_> =
            [self.base, self.head].iter().flat_map(|r| &r.benchmarks).map(|one| &one.id).collect();
        ids.sort();
        ids.dedup();
        let mut diffs = Vec::new();
        for id in ids {
            let mut diff = BenchmarkDiff {
                id: id.clone(),
                base: find(self.base, id),
                head: find(self.head, id),
                kind: None,
            };
            if same_device {
                diff.kind = benchmark_kind(&diff, notes);
                findings.extend(diff.kind.map(|kind| benchmark_finding(&diff, kind)));
            }
            diffs.push(diff);
        }
        diffs
    }
}

fn benchmark_kind(diff: &BenchmarkDiff, notes: &mut Vec<String>) -> Option<Kind> {
    match (&diff.base, &diff.head) {
        (Some(_), None) => Some(Kind::CoverageShrank),
        (None, _) => Some(Kind::CoverageGrew),
        (Some(base), Some(head)) => {
            if (base.bytes, base.flops) != (head.bytes, head.flops) {
                notes.push(format!(
                    "Benchmark {} does other work than before: its times are not compared.",
                    diff.id
                ));
                None
            } else if head.low_ns > base.high_ns {
                Some(Kind::Slower)
            } else if head.high_ns < base.low_ns {
                Some(Kind::Faster)
            } else {
                None
            }
        }
    }
}

fn benchmark_finding(diff: &BenchmarkDiff, kind: Kind) -> Finding {
    let shown = |one: &Option<BenchmarkRecord>| {
        one.as_ref().map_or("not measured".to_owned(), |one| {
            format!("{} ({} … {})", time(one.median_ns), time(one.low_ns), time(one.high_ns))
        })
    };
    let operator =
        diff.base.as_ref().or(diff.head.as_ref()).map_or(String::new(), |one| one.operator.clone());
    let why = if diff.ratio().is_some() { diff.change() } else { String::new() };
    let subject = format!("benchmark {}", diff.id);
    Finding {
        kind,
        operator,
        subject,
        base: shown(&diff.base),
        head: shown(&diff.head),
        why,
        replay: None,
    }
}

fn shrank(
    operator: &str,
    subject: &str,
    base: impl Into<String>,
    head: impl Into<String>,
) -> Finding {
    Finding {
        kind: Kind::CoverageShrank,
        operator: operator.to_owned(),
        subject: subject.to_owned(),
        base: base.into(),
        head: head.into(),
        why: String::new(),
        replay: None,
    }
}

fn subject(check: &str, tensors: &[&str]) -> String {
    let named: Vec<&str> = tensors.iter().copied().filter(|name| !name.is_empty()).collect();
    if named.is_empty() { check.to_owned() } else { format!("{check} ({})", named.join(", ")) }
}

/// Cases of one part in BASE, in HEAD, and those of them that HEAD has in any part.
fn in_each_and_both([base, head]: &[Side; 2], part: Part) -> [u64; 3] {
    let both = base.of_part(part).filter(|(line, _)| head.cases.contains_key(*line)).count() as u64;
    [base.count(part), head.count(part), both]
}

/// The change in saved cases, which no count of cases includes: their number shows what failed
/// before, not what is covered.
fn remembered_note(diff: &OperatorDiff) -> Option<String> {
    let [were, are, both] = diff.remembered;
    (were > both || are != were).then(|| {
        let (were, are) = (counted(were, "remembered case"), count(are));
        let (name, absent) = (&diff.name, count(diff.remembered[0] - both));
        format!("{name}: {were} in BASE ({absent} of them not in HEAD), {are} in HEAD. They are compared apart and do not count as coverage.")
    })
}

/// Failures that are new, gone, or in both reports; one finding for each check.
fn verdicts(operator: &str, sides: &[Side; 2], findings: &mut Vec<Finding>) {
    let [base, head] = sides;
    let mut groups: BTreeMap<(Kind, &str), Vec<&CheckKey>> = BTreeMap::new();
    let keys: BTreeSet<_> = base.checks.keys().chain(head.checks.keys()).collect();
    for key in keys {
        let (were, are) = (base.failing(key), head.failing(key));
        let passed_before = |line: &&str| {
            let passed = |said: &Said| said.line == **line && said.standing == Standing::Pass;
            base.checks.get(key).is_some_and(|all| all.iter().any(passed))
        };
        let kind = match (were.is_empty(), are.is_empty()) {
            (true, true) => continue,
            (true, false) => Kind::NewlyFailing,
            (false, false) if are.iter().any(passed_before) => Kind::NewlyFailing,
            (false, false) => Kind::StillFailing,
            // No case of it ran and no other case agreed: that is no success.
            (false, true) if !head.cases.values().any(|case| agrees(case)) => continue,
            (false, true) => Kind::NewlyPassing,
        };
        groups.entry((kind, &key.0)).or_default().push(key);
    }
    for ((kind, check), keys) in groups {
        let told = |side: &Side| {
            let sum =
                |pick: &dyn Fn(&CheckKey) -> u64| keys.iter().map(|key| pick(key)).sum::<u64>();
            let (failed, ran) =
                (sum(&|key| side.failing(key).len() as u64), sum(&|key| side.ran(key)));
            if ran == 0 {
                "did not run".to_owned()
            } else {
                format!("{} of {} failed", count(failed), count(ran))
            }
        };
        let tensors: Vec<&str> = keys.iter().map(|key| key.1.as_str()).collect();
        let example = example(head, &keys).or_else(|| example(base, &keys));
        let why = match (kind, &example) {
            (Kind::NewlyPassing, _) | (_, None) => String::new(),
            (_, Some((message, _))) => message.clone(),
        };
        findings.push(Finding {
            kind,
            operator: operator.to_owned(),
            subject: subject(check, &tensors),
            base: told(base),
            head: told(head),
            why,
            replay: example.map(|(_, replay)| replay),
        });
    }
}

/// Message and replay of a failing case, a shrunk one if there is one.
fn example(side: &Side, keys: &[&CheckKey]) -> Option<(String, String)> {
    let mut lines: Vec<(&CheckKey, &str)> = keys
        .iter()
        .flat_map(|key| side.failing(key).into_iter().map(move |line| (*key, line)))
        .collect();
    lines.sort_by_key(|(_, line)| side.cases[*line].origin != Origin::Shrunk);
    let (key, line) = lines.first()?;
    let case = side.cases[*line];
    let check = case.checks.iter().find(|check| check.check == *key.0 && check.tensor == key.1);
    Some((check.map_or(String::new(), |check| check.message.clone()), case.replay.clone()))
}

fn check_counts(keys: &BTreeSet<CheckKey>, [base, head]: &[Side; 2]) -> Vec<CheckDiff> {
    let mut counts: BTreeMap<&str, CheckDiff> = BTreeMap::new();
    for key in keys {
        let entry = counts
            .entry(&key.0)
            .or_insert_with(|| CheckDiff { check: key.0.clone(), ..CheckDiff::default() });
        for (sums, side) in [(&mut entry.base, base), (&mut entry.head, head)] {
            sums.0 += side.passed(key);
            sums.1 += side.ran(key);
        }
    }
    counts.into_values().collect()
}

fn spread(metrics: &BTreeMap<&str, &Metrics>) -> Option<Spread> {
    let used: Vec<f64> = metrics.values().map(|one| one.budget_used).collect();
    let relative: Vec<f64> = metrics.values().map(|one| one.budget_relative).collect();
    let worst = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
    Some(Spread {
        cases: used.len() as u64,
        median: median(&used),
        worst: used.iter().copied().reduce(worst)?,
        relative: median(&relative),
    })
}

/// Applies the joint false-alarm rate to all tensors at once: worse and better are one family of
/// tests each.
fn judge_tensors(operators: &mut [OperatorDiff], findings: &mut Vec<Finding>) {
    for family in [[0, 2], [1, 3]] {
        let places = || family.into_iter();
        let ps: Vec<f64> = operators
            .iter()
            .flat_map(|o| &o.tensors)
            .flat_map(|t| places().map(|place| t.p[place]))
            .collect();
        let mut stands = holm(&ps, FALSE_ALARM_RATE).into_iter();
        for tensor in operators.iter_mut().flat_map(|operator| &mut operator.tensors) {
            for place in family {
                tensor.stands[place] = stands.next().unwrap_or(false);
            }
        }
    }
    for operator in operators.iter() {
        for tensor in &operator.tensors {
            let kinds = [
                Kind::BudgetUseGrew,
                Kind::BudgetUseFell,
                Kind::BudgetLoosened,
                Kind::BudgetTightened,
            ];
            for (place, kind) in
                kinds.into_iter().enumerate().filter(|(place, _)| tensor.stands[*place])
            {
                findings.push(tensor_finding(&operator.name, tensor, place, kind));
            }
        }
    }
}

fn tensor_finding(operator: &str, tensor: &TensorDiff, place: usize, kind: Kind) -> Finding {
    let use_changed = place < 2;
    let shown = |spread: &Option<Spread>| match spread {
        None => "—".to_owned(),
        Some(s) if use_changed => {
            format!("median {}, worst {}", significant(s.median, 3), significant(s.worst, 3))
        }
        Some(s) => format!("median {} of the value", significant(s.relative, 3)),
    };
    let mut why = format!("p = {}", significant(tensor.p[place], 2));
    if let (true, Some((up, down))) = (use_changed, tensor.moved) {
        why += &format!(", {} cases up, {} down", count(up), count(down));
    }
    let replay = tensor
        .largest_rise
        .as_ref()
        .filter(|_| kind == Kind::BudgetUseGrew)
        .map(|rise| rise.2.clone());
    Finding {
        kind,
        operator: operator.to_owned(),
        subject: subject(&tensor.check, &[&tensor.tensor]),
        base: shown(&tensor.base),
        head: shown(&tensor.head),
        why,
        replay,
    }
}

fn mutants(base: &Report, head: &Report, findings: &mut Vec<Finding>) {
    for was in &base.mutants {
        let is = head.mutants.iter().find(|one| one.id == was.id);
        let kind = match is {
            // Generated mutants change with every edit of a kernel: they are counted below.
            None if was.source == MutantSource::Generated => continue,
            None => Kind::CoverageShrank,
            Some(is) if survived(is) && !survived(was) => Kind::MutantSurvives,
            Some(is) if is.status == MutantStatus::Killed && survived(was) => Kind::MutantKilled,
            Some(_) => continue,
        };
        findings.push(Finding {
            kind,
            why: is.map_or_else(|| was.summary.clone(), why),
            ..shrank(
                &was.operator,
                &format!("mutant {}", was.id),
                fate(was),
                is.map_or("not run".to_owned(), fate),
            )
        });
    }
    for new in head
        .mutants
        .iter()
        .filter(|one| survived(one) && !base.mutants.iter().any(|was| was.id == one.id))
    {
        let subject = format!("mutant {}", new.id);
        let finding = shrank(&new.operator, &subject, "not run", fate(new));
        findings.push(Finding { kind: Kind::MutantSurvives, why: why(new), ..finding });
    }
    for operator in &base.operators {
        let (was, is) = (
            Tally::of(of_operator(base, &operator.name)),
            Tally::of(of_operator(head, &operator.name)),
        );
        let judged = |tally: &Tally| tally.killed + tally.survived;
        if judged(&is) < judged(&was) {
            findings.push(shrank(
                &operator.name,
                "generated mutants",
                judged(&was).to_string(),
                judged(&is).to_string(),
            ));
        }
    }
}

fn of_operator<'a>(
    report: &'a Report,
    operator: &'a str,
) -> impl Iterator<Item = &'a MutantRecord> {
    report.mutants.iter().filter(move |mutant| mutant.operator == operator)
}

/// The result of a mutant.
fn fate(mutant: &MutantRecord) -> String {
    match mutant.status {
        MutantStatus::Killed => format!("killed by {}", mutant.killers()),
        MutantStatus::Survived => "survived".to_owned(),
        MutantStatus::Equivalent => "equivalent".to_owned(),
        MutantStatus::Invalid => "not runnable".to_owned(),
    }
}

/// The change, with the line after it where the record has it.
fn why(mutant: &MutantRecord) -> String {
    match mutant.mutated.lines().next() {
        Some(line) => {
            format!("{} {}:{}: {}", mutant.summary, mutant.file, mutant.line, line.trim())
        }
        None => mutant.summary.clone(),
    }
}
