//! The check `sequence`: test operators that keep something of an earlier call fail only this
//! check. Their launches copy within the device, so that they run, and are recorded, on every
//! backend.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use dsv4_parity::case::Case;
use dsv4_parity::judge::checks::{self, CheckOptions, Outcome};
use dsv4_parity::operator::AnyOperator;
use dsv4_parity::operator::prelude::*;
use dsv4_parity::record::CheckRecord;
use dsv4_runtime::BackendKind;

use crate::support;

/// `y = x`, through a workspace.
struct Copied;

/// The launcher's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Fault {
    /// Nothing.
    None,
    /// It reads x at its address in an earlier call.
    KeepsInput,
    /// It writes y at its address in an earlier call.
    KeepsOutput,
    /// It fills a workspace only in the first call that gets it.
    FillsWorkspaceOnce,
}

/// A seed as in cases, or one that cannot be changed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Seed {
    Number(u64),
    Text(String),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Copy {
    num_rows: usize,
    fault: Fault,
    /// Launches with the same id are counted together.
    id: u64,
    /// The seed modulo this number is added to the number of rows.
    grows: u64,
    seed: Seed,
}

/// What a launcher keeps from its earlier calls.
#[derive(Default)]
struct Kept {
    calls: u32,
    input: Option<u64>,
    output: Option<u64>,
    workspaces: BTreeSet<u64>,
}

/// Calls whose buffers are freed before the next call: afterwards their addresses are invalid.
const CALLS_WITH_BUFFERS_OF_THEIR_OWN: u32 = 3;

static KEPT: Mutex<Option<HashMap<u64, Kept>>> = Mutex::new(None);

impl Copy {
    fn number(&self) -> u64 {
        match &self.seed {
            Seed::Number(seed) => *seed,
            Seed::Text(text) => text.len() as u64,
        }
    }

    fn rows(&self) -> usize {
        self.num_rows + (self.number() % self.grows) as usize
    }

    /// What the launcher has kept from the calls of this case and of those with other seeds.
    fn kept<R>(&self, use_it: impl FnOnce(&mut Kept) -> R) -> R {
        let mut all = KEPT.lock().unwrap_or_else(|e| e.into_inner());
        use_it(all.get_or_insert_default().entry(self.id).or_default())
    }
}

impl Operator for Copied {
    type Case = Copy;

    const ABOUT: About = About {
        name: "copied",
        family: Family::Formats,
        summary: "y = x",
        specification: &["inference 3"],
        paths: &["copied"],
        modules: Vec::new,
        cases: [0, 0, 0],
    };

    fn tensors(c: &Copy) -> Specs {
        let rows = [axis("num_rows", c.rows()), axis("width", 24)];
        let x = input("x", DType::F32, &rows).drawn(Distribution::Normal, 1.0);
        Specs::new(c.number(), [x, output("y", DType::F32, &rows).exact()])
    }

    fn strategy(_: Profile) -> BoxedStrategy<Copy> {
        Just(case(Fault::None)).boxed()
    }

    fn typical() -> Vec<Copy> {
        vec![case(Fault::None)]
    }

    fn edge_cases(_: Profile) -> Vec<Copy> {
        Vec::new()
    }

    fn forward(_: &Copy, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        Ok(Named::new().with("y", t.f64("x")?))
    }

    fn workspaces(
        _: &Copy,
        v: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", 4 * v["x"].elements())])
    }

    fn launch(c: &Copy, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let (mut x, mut y, workspace) = (v["x"].address, v["y"].address, v["workspace"].address);
        let mut fills = true;
        c.kept(|kept| {
            kept.calls += 1;
            if kept.calls <= CALLS_WITH_BUFFERS_OF_THEIR_OWN {
                return;
            }
            match c.fault {
                Fault::None => {}
                Fault::KeepsInput => x = *kept.input.get_or_insert(x),
                Fault::KeepsOutput => y = *kept.output.get_or_insert(y),
                Fault::FillsWorkspaceOnce => fills = kept.workspaces.insert(workspace),
            }
        });
        let (backend, bytes) = (run.device().backend(), 4 * v["x"].elements());
        if fills {
            backend.copy(workspace, x, bytes)?;
        }
        backend.copy(y, workspace, bytes)?;
        run.ran("copied");
        Ok(())
    }
}

fn case(fault: Fault) -> Copy {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let id = IDS.fetch_add(1, Ordering::Relaxed);
    Copy { num_rows: 5, fault, id, grows: 1, seed: Seed::Number(7) }
}

fn check(case: &Copy) -> Outcome {
    let prepared =
        AnyOperator::of::<Copied>().prepare(&Case::new("copied", case)).expect("a sound case");
    // Other batches have buffers of their own, after which the kept addresses are invalid.
    let options = CheckOptions { batches: false, ..CheckOptions::of_kernels(0) };
    checks::run(&*prepared, support::device(), options)
}

/// Whether only a check of the sequence failed.
fn failures(outcome: &Outcome) -> Vec<&CheckRecord> {
    let failures: Vec<_> = outcome.failures().collect();
    assert!(
        failures.iter().all(|check| check.check == "sequence" && check.tensor.starts_with('y')),
        "{failures:#?}"
    );
    failures
}

fn skipped<'o>(outcome: &'o Outcome, what: &str) -> Option<&'o str> {
    outcome
        .skips
        .iter()
        .find(|skip| skip.what == format!("sequence: {what}"))
        .map(|skip| skip.why.as_str())
}

#[test]
fn a_launcher_that_keeps_nothing_passes_and_is_run_in_the_same_buffers_and_in_others() {
    let outcome = check(&case(Fault::None));
    assert!(outcome.passed(), "{:#?}", failures(&outcome));
    let made = outcome.checks.iter().filter(|check| check.check == "sequence");
    let (replays, why) = match support::backend() {
        BackendKind::Cuda => (6, None),
        _ => (0, Some("the emulator records no graphs")),
    };
    assert_eq!((made.count(), skipped(&outcome, "recorded launches")), (2 + replays, why));
    assert_eq!(
        (skipped(&outcome, "another draw"), skipped(&outcome, "buffers elsewhere")),
        (None, None)
    );
}

#[test]
fn an_input_that_is_read_where_it_lay_in_an_earlier_call_is_noticed() {
    let outcome = check(&case(Fault::KeepsInput));
    let failures = failures(&outcome);
    assert!(
        failures.iter().any(|check| check.message.starts_with("in buffers beside those")),
        "{failures:#?}"
    );
}

#[test]
fn an_output_that_is_written_where_it_lay_in_an_earlier_call_is_noticed_in_both_places() {
    let outcome = check(&case(Fault::KeepsOutput));
    let failures = failures(&outcome);
    assert!(
        failures.iter().any(|check| check.message.starts_with("in buffers beside those")),
        "{failures:#?}"
    );
    assert!(
        failures.iter().any(|check| check.message.contains("an earlier call's buffer")),
        "{failures:#?}"
    );
}

#[test]
fn a_workspace_that_is_filled_by_its_first_call_alone_is_noticed() {
    let outcome = check(&case(Fault::FillsWorkspaceOnce));
    let failures = failures(&outcome);
    let message = &failures.first().expect("noticed").message;
    assert!(message.starts_with("after other data in the same buffers: "), "{message}");
    assert!(message.contains("120 element(s) differ"), "{message}");
}

#[test]
fn where_no_other_seed_goes_with_the_buffers_other_numbers_do_and_that_is_counted() {
    let fixed = Copy { seed: Seed::Text("seven".into()), ..case(Fault::None) };
    let grows = Copy { grows: 64, ..case(Fault::None) };
    for (case, why) in [(fixed, "no field `seed`"), (grows, "of other extents")] {
        let outcome = check(&case);
        assert!(outcome.passed(), "{:#?}", failures(&outcome));
        let skip = skipped(&outcome, "another draw").expect("counted");
        assert!(skip.contains(why), "{skip}");
        let faulty = Copy { fault: Fault::FillsWorkspaceOnce, id: case.id + 1000, ..case };
        assert!(!failures(&check(&faulty)).is_empty());
    }
}

#[test]
fn seeds_are_tried_until_one_goes_with_the_buffers() {
    let outcome = check(&Copy { grows: 4, ..case(Fault::None) });
    assert!(outcome.passed() && skipped(&outcome, "another draw").is_none(), "{:?}", outcome.skips);
}
