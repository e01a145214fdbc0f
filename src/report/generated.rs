//! The results of generated mutants, as a text table that a repository keeps. It is made from the
//! reports of `parity mutants`, each of which may hold other operators, another seed and another
//! revision.

use std::collections::BTreeMap;

use super::numbers::aligned;
use crate::mutants::matrix::tally::Tally;
use crate::record::{MutantRecord, MutantSource, MutantStatus, Report};

const COLUMNS: [&str; 12] = [
    "operator",
    "generated",
    "drawn",
    "killed",
    "survived",
    "same code",
    "listed",
    "invalid",
    "rate",
    "sample",
    "seed",
    "revision",
];

/// The operators' rows in the order of the reports, their survivors, and the reasons of the
/// equivalent ones.
pub fn table(reports: &[Report]) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    for report in reports {
        rows.extend(Tally::all(report).iter().filter_map(|tally| row(report, tally)));
    }
    let mut text = head(reports) + &aligned(&rows);
    text += &survivors(reports);
    text += &equivalents(reports);
    text
}

/// How the table was made, and what its columns mean.
fn head(reports: &[Report]) -> String {
    let mut machines: Vec<String> = Vec::new();
    for report in reports {
        let (environment, schedules) = (&report.environment, report.schedules);
        let machine = format!(
            "# parity mutants --backend {} --schedules {schedules} --ops OPERATOR --sample SAMPLE --seed SEED; {}, {}\n",
            environment.backend, environment.device, environment.compiler
        );
        if !machines.contains(&machine) {
            machines.push(machine);
        }
    }
    machines.concat()
        + "# drawn: evenly from the classes of those that are not listed. The rate is of those drawn that were killed or survived.\n\
           # checks: those of a sweep (on the emulator laws, calls in sequence and other batches take turns), or all by --all-checks.\n\
           # same code: the compiler makes the same assembly of them, in every module of the operator. listed: in equivalent.toml,\n\
           # each with a reason, of all that are generated; they are not drawn.\n"
}

/// The row of an operator for whose kernels mutants were generated.
fn row(report: &Report, tally: &Tally) -> Option<Vec<String>> {
    let matrix = report.kill_matrix.as_ref()?;
    let counts = tally.left_out.as_ref()?;
    let of_operator = report.mutants.iter().filter(|mutant| mutant.operator == tally.operator);
    let same_code = of_operator.filter(|mutant| has_same_code(mutant)).count() as u64;
    let listed = tally.equivalent - same_code;
    let drawn = counts.generated - counts.not_drawn - counts.not_run - listed;
    let numbers =
        [counts.generated, drawn, tally.killed, tally.survived, same_code, listed, tally.invalid];
    let rate = tally.rate().map_or("-".to_owned(), |rate| format!("{:.1} %", 100.0 * rate));
    let revision =
        format!("{:.7}{}", report.revision.commit, if report.revision.dirty { "+" } else { "" });
    let sample = matrix.sample.map_or("all".to_owned(), |sample| sample.to_string());
    let names = [tally.operator.clone()].into_iter();
    let last = [rate, sample, matrix.seed.to_string(), revision];
    Some(names.chain(numbers.map(|number| number.to_string())).chain(last).collect())
}

/// Whether a mutant was sampled and the compiler found it to be equivalent; a listed one is not
/// run.
fn has_same_code(mutant: &MutantRecord) -> bool {
    mutant.status == MutantStatus::Equivalent && mutant.cases_run > 0
}

fn generated(reports: &[Report], status: MutantStatus) -> impl Iterator<Item = &MutantRecord> {
    let all = reports.iter().flat_map(|report| &report.mutants);
    all.filter(move |mutant| mutant.source == MutantSource::Generated && mutant.status == status)
}

fn survivors(reports: &[Report]) -> String {
    let lines = generated(reports, MutantStatus::Survived).map(|mutant| {
        format!("  {} ({}:{}): {}\n", mutant.id, mutant.file, mutant.line, mutant.summary)
    });
    section("Survived", lines.collect())
}

/// Each operator's reasons, and the mutants to which they apply.
fn equivalents(reports: &[Report]) -> String {
    let mut reasons: Vec<(&str, BTreeMap<&str, Vec<&str>>)> = Vec::new();
    for mutant in generated(reports, MutantStatus::Equivalent) {
        if reasons.last().is_none_or(|(operator, _)| *operator != mutant.operator) {
            reasons.push((&mutant.operator, BTreeMap::new()));
        }
        if let Some((_, of)) = reasons.last_mut() {
            of.entry(&mutant.reason).or_default().push(&mutant.id);
        }
    }
    let lines = reasons.into_iter().flat_map(|(operator, of)| {
        let of = of
            .into_iter()
            .map(|(reason, ids)| format!("    {reason}\n      {}\n", ids.join("\n      ")));
        [format!("  {operator}\n")].into_iter().chain(of).collect::<Vec<_>>()
    });
    section("Equivalent", lines.collect())
}

fn section(title: &str, lines: Vec<String>) -> String {
    if lines.is_empty() { String::new() } else { format!("\n{title}\n{}", lines.concat()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{GeneratedRecord, KillMatrixRecord};
    use crate::report::sample;

    fn report(operator: &str, fates: &[(MutantStatus, u64)], seed: u64) -> Report {
        let mutants = fates.iter().enumerate().map(|(number, (status, cases_run))| MutantRecord {
            id: format!("{operator}:function:scale:{number}"),
            operator: operator.to_owned(),
            source: MutantSource::Generated,
            status: *status,
            summary: "The factor is missing.".into(),
            reason: "A reason.".into(),
            cases_run: *cases_run,
            ..MutantRecord::default()
        });
        let operators = vec![GeneratedRecord {
            operator: operator.into(),
            generated: 40,
            not_drawn: 33,
            not_run: 1,
        }];
        let matrix = KillMatrixRecord {
            floor: 0.95,
            seed,
            sample: Some(7),
            schedules: 4,
            all_checks: false,
            operators,
        };
        let mut report =
            Report { mutants: mutants.collect(), kill_matrix: Some(matrix), ..sample::passing(1) };
        report.operators.retain(|described| described.name == operator);
        report
    }

    #[test]
    fn each_report_gives_its_operators_rows_with_its_own_seed_and_reasons_stand_once() {
        use MutantStatus::{Equivalent, Invalid, Killed, Survived};
        let fates = [
            (Killed, 1),
            (Killed, 2),
            (Survived, 9),
            (Equivalent, 9),
            (Equivalent, 0),
            (Equivalent, 0),
            (Invalid, 1),
        ];
        let text = table(&[report("rope", &fates, 3), report("rms_norm", &[(Killed, 1)], 4)]);
        let row = |operator: &str| {
            let line = text.lines().find(|line| line.starts_with(operator)).expect("a row");
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        // 40 generated, of which 33 were not sampled, 1 was not run and 2 are listed.
        assert_eq!(
            row("rope")[..12],
            ["rope", "40", "4", "2", "1", "1", "2", "1", "66.7", "%", "7", "3"]
        );
        assert_eq!(row("rms_norm")[8..12], ["100.0", "%", "7", "4"]);
        assert!(text.contains("\nSurvived\n  rope:function:scale:2 "), "{text}");
        assert_eq!(text.matches("A reason.").count(), 1, "{text}");
        assert!(text.ends_with("  rope\n    A reason.\n      rope:function:scale:3\n      rope:function:scale:4\n      rope:function:scale:5\n"), "{text}");
    }

    #[test]
    fn what_was_killed_altogether_has_neither_survivors_nor_reasons() {
        let text = table(&[report("rope", &[(MutantStatus::Killed, 1)], 0)]);
        assert!(!text.contains("Survived") && !text.contains("Equivalent"), "{text}");
    }
}
