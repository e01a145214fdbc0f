//! `golden::OPERATOR`: oracle and kernels against the results of an independent implementation.
//! Every file must have an effect: a changed value in it is noticed.

use std::path::PathBuf;
use std::sync::LazyLock;

use dsv4_parity::change::MOST_GOLDEN_FILES;
use dsv4_parity::judge::golden_run;
use dsv4_parity::judge::truth::Truth;
use dsv4_parity::operator::golden_file::{self, GoldenFile};
use dsv4_parity::operator::{AnyOperator, ExpectedTensor, GoldenCase, OracleTensor, half_ulp};
use dsv4_parity::record::{CheckRecord, Verdict};
use dsv4_runtime::DType;
use libtest_mimic::Trial;

use crate::shared::Shares;
use crate::{Extent, shared, support};

pub fn trial(operator: &'static AnyOperator, extent: Extent) -> Option<Trial> {
    Some(crate::trial(format!("golden::{}", operator.name()), move || run(operator, extent)))
}

fn run(operator: &'static AnyOperator, extent: Extent) -> Result<String, String> {
    shared::compiled(operator)?;
    let (found, left_out) = chosen(operator, extent, names_of(operator)?)?;
    let (files, mut skips, mut by_kernels, mut changed) = (found.len(), Vec::new(), 0, 0);
    for name in found {
        let (file, cases) = read(operator, &name)?;
        for mut case in cases {
            let truth = Truth::of(&*case.prepared, case.prepared.arithmetic())
                .map_err(|error| format!("{}: {error}", file.name))?;
            agrees(&truth, &file, &case)?;
            by_kernels += usize::from(case.kernel_skip.is_none());
            skips.extend(case.kernel_skip.clone());
            changed += notices_changes(&truth, &file, &mut case)?;
        }
    }
    if files == 0 {
        return Ok("no golden file is about it".to_owned());
    }
    // The kernels' own declaration rejects what they skip (the layer checks this). They must run
    // most cases.
    if left_out == 0 && by_kernels <= skips.len() {
        return Err(format!("the kernels ran {by_kernels} cases, and were spared {skips:?}"));
    }
    let oracle_only = skips.iter().map(|why| format!("; oracle only: {why}")).collect::<String>();
    let left_out = if left_out == 0 {
        String::new()
    } else {
        format!("; {left_out} larger files are left out")
    };
    Ok(format!("{files} files, {changed} tensors{oracle_only}{left_out}"))
}

/// The files that run, smallest first, and how many are skipped. Of an operator that the commit
/// concerns these are as many as a commit runs, of any other operator one file.
fn chosen(
    operator: &'static AnyOperator,
    extent: Extent,
    mut names: Vec<String>,
) -> Result<(Vec<String>, usize), String> {
    static SHARES: LazyLock<Shares> = LazyLock::new(shares);
    let all = names.len();
    if extent == Extent::Commit
        && let Some(&most) = SHARES.as_ref().map_err(Clone::clone)?.get(operator.name())
    {
        names.sort_by_key(|name| {
            std::fs::metadata(folder().join(name)).map_or(u64::MAX, |data| data.len())
        });
        names.truncate(most);
    }
    let left_out = all - names.len();
    Ok((names, left_out))
}

fn shares() -> Shares {
    let names = golden_file::names_in(&folder()).map_err(|error| error.to_string())?;
    let is_about = |operator: &AnyOperator, name: &str| {
        operator.golden_kinds().contains(&golden_file::kind_of(name))
    };
    shared::shares(
        |operator| names.iter().filter(|name| is_about(operator, name)).count(),
        MOST_GOLDEN_FILES,
        1,
    )
}

fn folder() -> PathBuf {
    support::fixtures().join("golden")
}

/// Every golden file about an operator: all files of each kind that it declares.
fn names_of(operator: &'static AnyOperator) -> Result<Vec<String>, String> {
    let names =
        golden_run::files_about(&folder(), &[operator]).map_err(|error| error.to_string())?;
    let found = |kind: &&&str| names.iter().any(|name| golden_file::kind_of(name) == **kind);
    match operator.golden_kinds().iter().find(|kind| !found(kind)) {
        Some(kind) => Err(format!("no golden file is of the kind `{kind}`")),
        None => Ok(names),
    }
}

/// A file, and the operator's cases in it; the layer checks that it has some.
fn read(
    operator: &'static AnyOperator,
    name: &str,
) -> Result<(GoldenFile, Vec<GoldenCase>), String> {
    let file = golden_file::read(&folder().join(name)).map_err(|error| error.to_string())?;
    let cases = golden_run::cases_of(&file, &[operator]).map_err(|error| error.to_string())?;
    if cases.is_empty() { Err(format!("{name} makes no case")) } else { Ok((file, cases)) }
}

/// Checks that the file agrees with the oracle and, where they can run it, with the kernels.
fn agrees(truth: &Truth, file: &GoldenFile, case: &GoldenCase) -> Result<(), String> {
    let record = shared::on_device(|device| golden_run::run_by(truth, file, case, Some(device)));
    let failed: Vec<_> =
        record.checks.iter().filter(|c| c.verdict != Verdict::Pass || c.compared == 0).collect();
    if !failed.is_empty() {
        return Err(format!("{}: {failed:#?}", file.name));
    }
    let golden = record.checks.iter().filter(|c| c.check == "golden").count();
    if golden == 0 || golden != case.expected.len() {
        return Err(format!(
            "{}: {golden} of {} tensors were compared",
            file.name,
            case.expected.len()
        ));
    }
    if case.kernel_skip.is_none() && !record.checks.iter().any(|c| c.check == "forward") {
        return Err(format!("{}: no kernel ran", file.name));
    }
    Ok(())
}

/// In every tensor, changes one element by three times its allowance and checks that only this
/// change is noticed. One allowance covers the element itself, and another a difference of the
/// oracle to the other side. Returns how many elements were changed.
fn notices_changes(
    truth: &Truth,
    file: &GoldenFile,
    case: &mut GoldenCase,
) -> Result<usize, String> {
    let unchanged = golden_run::run_by(truth, file, case, None);
    let mut changed = 0;
    for number in 0..case.expected.len() {
        let expected = &case.expected[number];
        let position = |tensor: &OracleTensor| tensor.name == expected.name;
        let index = truth.exact.iter().position(position).ok_or("the oracle has no such tensor")?;
        let Some(element) = largest(&expected.values) else { continue };
        let (name, original) = (expected.name, expected.values[element]);
        let allowed = allowed(expected, truth, index, element);
        // A table's entry may be exact: then the smallest change that the file can hold.
        let step = if allowed > 0.0 { 3.0 * allowed } else { 2.0 * half_ulp(DType::F32, original) };
        // A bf16 kernel could not see this change: the comparison is far sharper than any kernel's.
        if step >= half_ulp(DType::Bf16, original) {
            return Err(format!("{}: {name} allows {allowed:e}", file.name));
        }
        case.expected[number].values[element] = original + step;
        let record = golden_run::run_by(truth, file, case, None);
        case.expected[number].values[element] = original;
        let failed: Vec<&CheckRecord> =
            record.checks.iter().filter(|check| check.verdict != Verdict::Pass).collect();
        let only =
            failed.len() == 1 && failed[0].tensor == name && failed[0].verdict == Verdict::Fail;
        if !only || failed[0].message.is_empty() {
            return Err(format!(
                "{}: {name} moved by {step:e} of {original:e}: {failed:#?}",
                file.name
            ));
        }
        let others = |checks: &[CheckRecord]| {
            checks.iter().filter(|c| c.tensor != name).cloned().collect::<Vec<_>>()
        };
        if others(&unchanged.checks) != others(&record.checks) {
            return Err(format!("{}: a change of {name} shows elsewhere", file.name));
        }
        changed += 1;
    }
    if changed == 0 {
        return Err(format!("{}: nothing could be changed", file.name));
    }
    Ok(changed)
}

/// The allowance of `golden_run` for an oracle's element: the scatter of working runs at the width
/// of f64, plus the rounding of the file.
fn allowed(expected: &ExpectedTensor, truth: &Truth, index: usize, element: usize) -> f64 {
    let working = truth.budget(index, DType::F32).allowed[element];
    if expected.computed_f32 {
        return working;
    }
    let stored =
        if expected.stored_f32 { half_ulp(DType::F32, expected.values[element]) } else { 0.0 };
    working * (f64::EPSILON / f64::from(f32::EPSILON)) + stored
}

/// The finite element of largest magnitude.
fn largest(values: &[f64]) -> Option<usize> {
    let finite = (0..values.len()).filter(|&i| values[i].is_finite());
    finite.max_by(|&a, &b| values[a].abs().total_cmp(&values[b].abs()))
}
