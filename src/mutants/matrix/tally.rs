//! Totals of the mutants' records.

use crate::record::{GeneratedRecord, MutantRecord, MutantSource, MutantStatus, Report};

/// The counts of one operator's mutants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operator.
    pub operator: String,
    /// Planted mutants that were killed.
    pub planted_killed: u64,
    /// Planted mutants that survived or could not run: in neither case did a check see them.
    pub planted_missed: u64,
    /// Generated mutants that were killed.
    pub killed: u64,
    /// Generated mutants that survived.
    pub survived: u64,
    /// Generated mutants that do not compile or cannot be launched.
    pub invalid: u64,
    /// Generated mutants that are equivalent: listed, or compiled to the same code as the kernel.
    pub equivalent: u64,
    /// Mutants that were not sampled or did not run.
    pub left_out: Option<GeneratedRecord>,
}

impl Tally {
    /// Why operators of a report miss the required share.
    pub fn shortfalls(report: &Report) -> impl Iterator<Item = String> {
        let (floor, sample) =
            report.kill_matrix.as_ref().map_or((0.0, None), |matrix| (matrix.floor, matrix.sample));
        Self::all(report).into_iter().filter_map(move |tally| tally.shortfall(floor, sample))
    }

    /// Of every operator that has mutants, in the order of the report's operators.
    pub fn all(report: &Report) -> Vec<Self> {
        let entries = report.kill_matrix.iter().flat_map(|matrix| &matrix.operators);
        let named = report.operators.iter().map(|operator| &operator.name);
        let mut names: Vec<&String> = Vec::new();
        let mentioned = entries.clone().map(|entry| &entry.operator);
        for name in
            named.chain(mentioned).chain(report.mutants.iter().map(|mutant| &mutant.operator))
        {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let of = |name: &String| {
            let mutants = report.mutants.iter().filter(|mutant| mutant.operator == *name);
            let left_out = entries.clone().find(|entry| entry.operator == *name).cloned();
            let tally = Self { left_out, ..Self::of(mutants) };
            Self { operator: name.clone(), ..tally }
        };
        names
            .into_iter()
            .map(of)
            .filter(|tally| *tally != Self { operator: tally.operator.clone(), ..Self::default() })
            .collect()
    }

    /// The counts of some records.
    pub fn of<'a>(mutants: impl Iterator<Item = &'a MutantRecord>) -> Self {
        let mut tally = Self::default();
        for mutant in mutants {
            let count = match (mutant.source, mutant.status) {
                (MutantSource::Planted, MutantStatus::Killed) => &mut tally.planted_killed,
                (MutantSource::Planted, _) => &mut tally.planted_missed,
                (MutantSource::Generated, MutantStatus::Killed) => &mut tally.killed,
                (MutantSource::Generated, MutantStatus::Survived) => &mut tally.survived,
                (MutantSource::Generated, MutantStatus::Invalid) => &mut tally.invalid,
                (MutantSource::Generated, MutantStatus::Equivalent) => &mut tally.equivalent,
            };
            *count += 1;
        }
        tally
    }

    /// Share of the generated mutants that were killed, among those that ran and are not
    /// equivalent; `None` if that is none.
    pub fn rate(&self) -> Option<f64> {
        let judged = self.killed + self.survived;
        (judged > 0).then(|| self.killed as f64 / judged as f64)
    }

    /// Why this operator's mutants fail the run, if they do. If no generated mutant was judged, the
    /// run shows nothing and fails too, unless `sample` is 0.
    pub fn shortfall(&self, floor: f64, sample: Option<u64>) -> Option<String> {
        let name = &self.operator;
        if self.planted_missed > 0 {
            return Some(format!("{name}: {} planted mutant(s) not killed", self.planted_missed));
        }
        match self.rate() {
            None if sample == Some(0) => None,
            None => Some(format!("{name}: no generated mutant was judged")),
            // NaN must fail, so the comparison states what passes.
            Some(rate) if rate >= floor => None,
            Some(rate) => Some(format!(
                "{name}: {:.1} % of the generated mutants killed, below {:.1} %",
                100.0 * rate,
                100.0 * floor
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutants(source: MutantSource, status: MutantStatus, count: usize) -> Vec<MutantRecord> {
        vec![MutantRecord { source, status, ..MutantRecord::default() }; count]
    }

    fn generated(killed: usize, survived: usize, invalid: usize, equivalent: usize) -> Tally {
        use MutantStatus::{Equivalent, Invalid, Killed, Survived};
        let counts =
            [(Killed, killed), (Survived, survived), (Invalid, invalid), (Equivalent, equivalent)];
        let all: Vec<_> = counts
            .into_iter()
            .flat_map(|(status, count)| mutants(MutantSource::Generated, status, count))
            .collect();
        Tally::of(all.iter())
    }

    #[test]
    fn the_rate_counts_neither_invalid_nor_equivalent_mutants() {
        assert_eq!(generated(19, 1, 100, 100).rate(), Some(0.95));
        assert_eq!(generated(19, 1, 100, 100).shortfall(0.95, None), None);
    }

    #[test]
    fn survivors_under_the_floor_fail() {
        let reason = generated(18, 2, 0, 0).shortfall(0.95, None).expect("90 % is below 95 %");
        assert!(reason.contains("90.0 %") && reason.contains("95.0 %"), "{reason}");
        assert!(generated(18, 2, 0, 0).shortfall(0.9, None).is_none());
    }

    #[test]
    fn a_planted_mutant_that_is_not_killed_fails_whatever_the_rate() {
        for status in [MutantStatus::Survived, MutantStatus::Invalid] {
            let planted = Tally::of(mutants(MutantSource::Planted, status, 1).iter());
            let tally = Tally { planted_missed: planted.planted_missed, ..generated(20, 0, 0, 0) };
            assert!(tally.shortfall(0.95, None).is_some(), "{status:?}");
        }
    }

    #[test]
    fn nothing_judged_fails_unless_nothing_was_asked_for() {
        assert!(generated(0, 0, 5, 5).shortfall(0.0, None).is_some());
        assert!(generated(0, 0, 0, 0).shortfall(0.95, Some(0)).is_none());
    }
}
