//! Batch invariance: the rows of a case in other batches, bit for bit.

use dsv4_runtime::{BackendKind, Contract, HostTensor};

use super::{Outcome, launched, memory_checks};
use crate::judge::runner::Runner;
use crate::operator::{BatchRun, KernelRun, OracleTensor, PreparedCase, Same};
use crate::record::{BatchRecord, Check, figures};

const CHECK: Check = Check::BatchInvariance;

/// Runs the rows of the case in its other batches. What the operator declares is checked; other
/// differences are measured. An external kernel, which runs only if its owner asks for this check,
/// must be invariant along every axis.
pub(super) fn batch_checks(
    prepared: &dyn PreparedCase,
    runner: &dyn Runner,
    exact: &[OracleTensor],
    base: &KernelRun,
    outcome: &mut Outcome,
    enough: &dyn Fn(&Outcome) -> bool,
) {
    let mut batched = prepared.batches();
    if runner.environment().backend == BackendKind::External {
        batched.runs.iter_mut().for_each(|run| run.declared = true);
    }
    for (axis, why) in batched.skips {
        outcome.skip(format!("{CHECK} along {axis}"), &why, 1);
    }
    // The kernels have the races that the case's own run had.
    runner.watch_races(false);
    for run in &batched.runs {
        if enough(outcome) {
            break;
        }
        if let Some(why) = runner.cannot_vary(&*run.variant) {
            outcome.skip(format!("{CHECK} along {}", run.axis), why, 1);
            continue;
        }
        let ran = runner.run(&*run.variant, exact, Contract::NAN);
        let Some(batch) = launched(ran, CHECK, outcome) else { continue };
        memory_checks(runner, &batch, outcome);
        let pair = Pair { prepared, base, run, batch: &batch };
        pair.compare(runner, outcome);
    }
    runner.watch_races(true);
}

/// A case and one of its other batches.
struct Pair<'a> {
    prepared: &'a dyn PreparedCase,
    base: &'a KernelRun,
    run: &'a BatchRun,
    batch: &'a KernelRun,
}

impl Pair<'_> {
    fn compare(&self, runner: &dyn Runner, outcome: &mut Outcome) {
        let mut first = String::new();
        for same in &self.run.same {
            let Some((compared, difference)) = self.difference(same, runner, outcome) else {
                continue;
            };
            let problem = difference.map(|difference| {
                let BatchRun { axis, extents, .. } = self.run;
                format!("{axis}: {extents}: {difference}; {}", self.choice(runner))
            });
            if first.is_empty()
                && let Some(problem) = &problem
            {
                first = format!("{} {problem}", same.tensors[0]);
            }
            if self.run.declared {
                outcome.verdict(CHECK, same.tensors[0], compared, problem);
            }
        }
        outcome.measure(self.run, first);
    }

    /// How many elements are compared, and the first that differs; `None` where none is compared.
    fn difference(
        &self,
        same: &Same,
        runner: &dyn Runner,
        outcome: &mut Outcome,
    ) -> Option<(u64, Option<String>)> {
        let [of_case, of_batch] = same.tensors;
        let find = |run: &KernelRun, name: &str| {
            run.tensors.iter().find(|tensor| tensor.name == name).map(|found| found.tensor.clone())
        };
        let (a, b) = (find(self.base, of_case)?, find(self.batch, of_batch)?);
        if let Some(why) = runner.rounds_freely(of_case) {
            outcome.skip(format!("bit equality of {of_case}"), why, 1);
            return None;
        }
        entries_differ(&a, &b, same)
    }

    /// Which choice of the launcher is another one for the batch.
    fn choice(&self, runner: &dyn Runner) -> String {
        if self.base.paths != self.batch.paths {
            let [a, b] = [self.base, self.batch].map(|run| run.paths.join(", "));
            return format!("path {a} against {b}");
        }
        if runner.environment().backend == BackendKind::External {
            return "an external kernel".to_owned();
        }
        let launches = |case: &dyn PreparedCase| case.launches(runner.environment());
        match (launches(self.prepared), launches(&*self.run.variant)) {
            (Ok(a), Ok(b)) => changed(&a, &b),
            _ => "the same path".to_owned(),
        }
    }
}

/// The first launch that is another one.
fn changed(a: &[String], b: &[String]) -> String {
    match a.iter().zip(b).find(|(a, b)| a != b) {
        Some((a, b)) => format!("launch {a} against {b}"),
        None if a.len() != b.len() => format!("{} launches against {}", a.len(), b.len()),
        None => "the same launches".to_owned(),
    }
}

/// An entry is `inner` elements, `outer` times: how the axes of a tensor divide.
struct Division {
    outer: usize,
    extent: usize,
    inner: usize,
}

impl Division {
    fn of(tensor: &HostTensor, (axis, joined): (usize, usize)) -> Option<Self> {
        let product = |axes: &[usize]| axes.iter().product();
        let after = axis + joined;
        Some(Self {
            outer: product(tensor.shape.get(..axis)?),
            extent: product(tensor.shape.get(axis..after)?),
            inner: product(tensor.shape.get(after..)?),
        })
    }

    /// The place of element `inside` of an entry.
    fn place(&self, entry: usize, inside: usize) -> usize {
        let (outer, inner) = (inside / self.inner, inside % self.inner);
        (outer * self.extent + entry) * self.inner + inner
    }
}

/// How many elements of the paired entries are compared, and where the first ones differ. `None`
/// where there are none.
fn entries_differ(a: &HostTensor, b: &HostTensor, same: &Same) -> Option<(u64, Option<String>)> {
    let (of_a, of_b) = (Division::of(a, same.axes[0])?, Division::of(b, same.axes[1])?);
    let each = of_a.outer * of_a.inner;
    if each != of_b.outer * of_b.inner || a.dtype != b.dtype {
        return Some((1, Some(format!("{a:?} against {b:?}"))));
    }
    let compared = each * same.entries.len();
    if compared == 0 {
        return None;
    }
    let size = a.dtype.size();
    let bytes = |tensor: &HostTensor, at: usize| tensor.bytes[at * size..(at + 1) * size].to_vec();
    let (mut count, mut first) = (0usize, None);
    for &(entry, other) in &same.entries {
        for inside in 0..each {
            let at = [of_a.place(entry, inside), of_b.place(other, inside)];
            if bytes(a, at[0]) != bytes(b, at[1]) {
                count += 1;
                first.get_or_insert((entry, inside, at));
            }
        }
    }
    let problem = first.map(|(row, column, [x, y])| {
        let [x, y] = [a.to_f64()[x], b.to_f64()[y]].map(figures::element);
        format!("{count} element(s) differ; first at row {row}, column {column}: {x} against {y}")
    });
    Some((compared as u64, problem))
}

impl Outcome {
    /// Adds the result of one other batch to what is known of its axis.
    fn measure(&mut self, run: &BatchRun, difference: String) {
        let differs = u64::from(!difference.is_empty());
        let known = self
            .batches
            .iter_mut()
            .find(|known| known.axis == run.axis && known.declared == run.declared);
        match known {
            Some(known) => {
                known.runs += 1;
                known.differ += differs;
                if known.message.is_empty() {
                    known.message = difference;
                }
            }
            None => self.batches.push(BatchRecord {
                axis: run.axis,
                declared: run.declared,
                runs: 1,
                differ: differs,
                message: difference,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[usize], values: &[f64]) -> HostTensor {
        HostTensor::from_f64(dsv4_runtime::DType::F32, shape, values)
    }

    #[test]
    fn entries_are_compared_where_they_lie_in_both_extents() {
        // Axis 1 has three entries in the case and two in the batch.
        let a = tensor(&[2, 3, 1], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let b = tensor(&[2, 2, 1], &[3.0, 1.0, 6.0, 4.0]);
        let equal = Same::along("y", 1, &[(2, 0), (0, 1)]);
        assert_eq!(entries_differ(&a, &b, &equal), Some((4, None)));
        let unlike = Same::along("y", 1, &[(2, 0), (1, 1)]);
        let (compared, problem) = entries_differ(&a, &b, &unlike).expect("entries");
        assert_eq!(compared, 4);
        let problem = problem.expect("a difference");
        assert_eq!(problem, "2 element(s) differ; first at row 1, column 0: 2 against 1");
    }

    #[test]
    fn joined_axes_count_as_one_and_nan_equals_only_its_own_bits() {
        let a = tensor(&[2, 2, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, f64::NAN, 7.0, 8.0]);
        let b = tensor(&[2, 1, 2], &[5.0, f64::NAN, 3.0, 4.0]);
        let joined = Same::leading("y", [2, 2], &[(2, 0), (1, 1)]);
        assert_eq!(entries_differ(&a, &b, &joined), Some((4, None)));
        assert_eq!(entries_differ(&a, &b, &Same::leading("y", [2, 2], &[])), None);
    }

    #[test]
    fn a_batch_of_another_shape_or_type_is_a_difference() {
        let (a, b) = (tensor(&[2, 3], &[0.0; 6]), tensor(&[2, 2], &[0.0; 4]));
        let (_, problem) = entries_differ(&a, &b, &Same::along("y", 0, &[(0, 0)])).expect("it");
        assert!(problem.is_some());
    }

    #[test]
    fn the_first_launch_that_changes_is_named() {
        let of = |launches: &[&str]| launches.iter().map(|one| (*one).to_owned()).collect();
        let (a, b): (Vec<String>, Vec<String>) = (of(&["k [1]", "sum [1]"]), of(&["k [2]"]));
        assert_eq!(changed(&a, &b), "launch k [1] against k [2]");
        assert_eq!(changed(&a, &a[..1]), "2 launches against 1");
        assert_eq!(changed(&a, &a), "the same launches");
    }
}
