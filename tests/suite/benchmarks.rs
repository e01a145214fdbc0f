//! Benchmarks of the declarations, at sizes for the emulator. Each is placed, called and compared
//! with the oracle, and each comparison must fail on a planted bug.

use std::collections::BTreeSet;

use dsv4_parity::judge::recheck::recheck;
use dsv4_parity::mutants::planted::{self, Mutant};
use dsv4_parity::operator::benchmarks::{
    BY_INVARIANT_PATH, Benchmark, Call, Direction, Timed, Whole,
};
use dsv4_parity::operator::declared::Operator;
use dsv4_parity::operator::tensors::{Tensors, permuted_along};
use dsv4_parity::operators::attention::attention_combine::AttentionCombine;
use dsv4_parity::operators::cache::kv_cache_write::KvCacheWrite;
use dsv4_parity::operators::indexer::score_recompute::ScoreRecompute;
use dsv4_parity::operators::projections::linear::{Linear, LinearCase};
use dsv4_parity::operators::projections::rms_norm::RmsNorm;
use dsv4_parity::operators::registry::OPERATORS;
use dsv4_runtime::{BackendKind, Device, Environment};
use serde_json::{Value, json};

use crate::extent::{concerned_operators, left_out};
use crate::support::fixtures;

/// Rooms whose changes run the long tests of this file.
const TIMING: [&str; 3] = ["src/operator/benchmarks.rs", "src/operator/timing.rs", "benches/"];

fn emulator() -> Device {
    Device::open(BackendKind::Emulator, dsv4_kernels::device_options()).expect("the emulator opens")
}

pub fn gpu(target: &str) -> Environment {
    Environment {
        backend: BackendKind::Cuda,
        device: "a GPU".into(),
        driver: String::new(),
        compiler: String::new(),
        target: target.into(),
        processors: 132,
        shared_bytes_per_block: 227 << 10,
    }
}

fn all(environment: &Environment) -> Vec<Box<dyn Timed>> {
    OPERATORS.iter().flat_map(|operator| operator.benchmarks(environment)).collect()
}

/// One call on each set, and the result of comparing the last one.
fn called(benchmark: &dyn Timed, device: &Device) -> Result<u64, String> {
    let buffers = benchmark.place(device).expect("buffers");
    assert!(buffers.sets() > 1, "the buffers do not rotate");
    for set in 0..buffers.sets() {
        buffers.call(set).map_err(|error| error.to_string())?;
    }
    recheck(&*buffers, buffers.sets() - 1).map_err(|error| error.to_string())
}

/// The benchmarks of the operators that a commit runs.
fn of_concerned_operators(mut benchmarks: Vec<Box<dyn Timed>>) -> Vec<Box<dyn Timed>> {
    let drawn = concerned_operators();
    benchmarks.retain(|benchmark| {
        drawn.iter().any(|operator| operator.name() == benchmark.work().operator)
    });
    benchmarks
}

#[test]
fn every_operator_but_a_chain_is_timed_on_a_gpu_and_on_the_emulator_under_names_of_their_own() {
    let emulator = emulator();
    for environment in [&gpu("sm_90a"), &gpu("sm_80"), emulator.environment()] {
        let ids: BTreeSet<_> =
            all(environment).iter().map(|b| (b.group(), b.name().to_owned())).collect();
        assert_eq!(ids.len(), all(environment).len(), "two benchmarks have one name");
        for operator in OPERATORS.iter().filter(|operator| operator.chain().is_empty()) {
            let benchmarks = operator.benchmarks(environment);
            let (name, has_backward) = (operator.name(), operator.describe().has_backward);
            assert!(!benchmarks.is_empty(), "`{name}` is not timed on {}", environment.device);
            for benchmark in benchmarks {
                assert_eq!(benchmark.cannot_run(environment), None, "{}", benchmark.name());
                assert!(benchmark.group().starts_with(name) && benchmark.work().operator == name);
                assert!(has_backward || benchmark.group().ends_with("_forward"));
                assert!(benchmark.work().bytes > 0.0);
            }
        }
    }
}

#[test]
fn a_forward_with_an_invariant_path_is_timed_by_it_too_beside_the_same_call_without() {
    for environment in [&gpu("sm_90a"), emulator().environment()] {
        let all = all(environment);
        let names: BTreeSet<_> = all.iter().map(|b| (b.group(), b.name().to_owned())).collect();
        let mut operators = BTreeSet::new();
        for (group, name) in &names {
            let Some(free) = name.strip_suffix(BY_INVARIANT_PATH) else { continue };
            assert!(names.contains(&(group.clone(), free.to_owned())), "{group}/{name}");
            operators.insert(group.strip_suffix("_forward").expect("a forward").to_owned());
        }
        let expected = ["linear", "mhc_head", "mhc_mix"].map(str::to_owned);
        assert!(expected.iter().all(|name| operators.contains(name)), "{operators:?}");
    }
}

#[test]
fn what_a_timed_call_writes_agrees_with_the_oracle() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    for benchmark in all(device.environment()) {
        let id = format!("{}/{}", benchmark.group(), benchmark.name());
        let compared =
            called(&*benchmark, &device).unwrap_or_else(|problem| panic!("{id}: {problem}"));
        assert!(compared > 0, "{id}");
    }
}

#[test]
fn what_no_call_wrote_is_not_taken_for_a_result() {
    let device = emulator();
    for group in ["rms_norm_forward", "rms_norm_backward"] {
        let benchmark =
            all(device.environment()).into_iter().find(|benchmark| benchmark.group() == group);
        let benchmark = benchmark.expect("a benchmark");
        let buffers = benchmark.place(&device).expect("buffers");
        buffers.call(0).expect("a call");
        assert!(recheck(&*buffers, 0).is_ok());
        let problem = recheck(&*buffers, 1).expect_err("nobody called the second set").to_string();
        assert!(problem.contains("sampled along num_rows"), "{problem}");
    }
}

#[test]
fn a_planted_bug_of_every_timed_direction_is_seen_by_the_recheck() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    let mutants = planted::load(&fixtures().join("mutants"))
        .expect("fixtures/mutants holds lists of mutants");
    let timed = |group: &str| {
        let of_group = |mutant: &&Mutant| {
            let direction = mutant.timed.map(|direction| format!("{direction:?}").to_lowercase());
            direction.is_some_and(|of| format!("{}_{of}", mutant.operator) == group)
        };
        mutants.iter().filter(of_group).collect::<Vec<_>>()
    };
    let groups: BTreeSet<String> =
        all(device.environment()).iter().map(|benchmark| benchmark.group()).collect();
    for group in &groups {
        assert!(!timed(group).is_empty(), "no planted mutant says that {group} is timed with it");
    }
    let drawn: BTreeSet<String> =
        of_concerned_operators(all(device.environment())).iter().map(|b| b.group()).collect();
    for group in &drawn {
        for mutant in timed(group) {
            let mutated =
                device.with_tree(mutant.plant(device.tree()).expect("an anchor that matches"));
            let of_group = all(device.environment()).into_iter().filter(|b| b.group() == *group);
            let seen: Vec<_> = of_group.map(|benchmark| called(&*benchmark, &mutated)).collect();
            let id = &mutant.id;
            assert!(seen.iter().any(Result::is_err), "{group}: `{id}` was not seen: {seen:?}");
        }
    }
}

/// A forward of the model's shapes by its name, reduced to a size for the emulator. `whole`
/// changes fields of its case. `drawn` changes the fields in which the drawn case differs from it.
fn reduced<K: Operator>(name: &str, whole: Value, drawn: Value) -> Benchmark<K> {
    let is_it = |benchmark: &Benchmark<K>| {
        benchmark.name == name && benchmark.direction == Direction::Forward
    };
    let found = K::benchmarks(&gpu("sm_90a")).into_iter().find(is_it);
    let benchmark = found.unwrap_or_else(|| panic!("no `{name}` of {}", K::ABOUT.name));
    benchmark.reduced(&whole, &drawn).expect("fields of its case")
}

#[test]
fn repeated_tensors_and_samples_of_some_rows_agree_with_the_oracle_for_every_operator() {
    if left_out(&TIMING) {
        return;
    }
    let device = emulator();
    let environment = gpu("sm_90a");
    let groups = |benchmarks: &[Box<dyn Timed>]| -> BTreeSet<String> {
        benchmarks.iter().map(|benchmark| benchmark.group()).collect()
    };
    let mut all = Vec::new();
    for operator in OPERATORS {
        let reduced = operator.reduced_benchmarks(&environment).expect("benchmarks that it has");
        // Each direction that is timed has one.
        assert_eq!(groups(&reduced), groups(&operator.benchmarks(&environment)));
        all.extend(reduced);
    }
    for benchmark in of_concerned_operators(all) {
        let id = format!("{}/{}", benchmark.group(), benchmark.name());
        let compared =
            called(&*benchmark, &device).unwrap_or_else(|problem| panic!("{id}: {problem}"));
        println!("{id}: {compared}");
        assert!(compared > 0, "{id}");
    }
}

/// The error of a benchmark of an operator after a change.
fn problem<K: Operator>(benchmark: Benchmark<K>) -> String {
    let device = emulator();
    let timed = benchmark.timed();
    let placed = timed.place(&device);
    let problem = placed.and_then(|buffers| {
        buffers.call(0)?;
        recheck(&*buffers, 0)
    });
    problem.expect_err("a problem").to_string()
}

#[test]
fn a_sample_of_which_nothing_is_written_or_that_has_no_such_axis_is_an_error() {
    let parts = || {
        let small = json!({"num_tokens": 2, "num_heads": 3});
        reduced::<AttentionCombine>("8 parts 128x128x512", small, json!({}))
    };
    assert!(problem(Benchmark { axis: "num_parts", ..parts() }).contains("nothing was compared"));
    assert!(problem(Benchmark { axis: "num_rows", ..parts() }).contains("`num_rows`"));
}

#[test]
fn a_sample_that_its_operator_does_not_complete_disagrees() {
    let whole = json!({"num_tokens": 96, "num_pages": 6, "page_size": 16, "page_padding": 448});
    let cache = reduced::<KvCacheWrite>("65536x512 page 64 fp8", whole, json!({}));
    // Tokens of pages outside the sample are written to pages in it.
    assert!(problem(Benchmark { sampled: |_, _, _| {}, ..cache }).contains("elements differ"));
    let keys = json!({"num_tokens": 9, "num_heads": 5, "num_keys": 30});
    let dense = reduced::<ScoreRecompute>("q4096 k2048 H64 D512 dense", keys, json!({}));
    // Sampled tokens are not consecutive.
    assert!(problem(Benchmark { sampled: |_, _, _| {}, ..dense }).contains("forward"));
}

#[test]
fn scales_of_other_blocks_than_the_sampled_features_disagree() {
    let whole = json!({"num_tokens": 21, "out_features": 400, "in_features": 160});
    let drawn = json!({"num_tokens": 4, "out_features": 400});
    let product = reduced::<Linear>("4096x7168x16384 fp8", whole, drawn);
    let first_blocks = |_: &Whole<'_, Linear>, _: &mut LinearCase, tensors: &mut Tensors| {
        let scales = tensors.tensor("w_scales").clone();
        tensors.put("w_scales", permuted_along(&scales, 0, &[0, 1]));
    };
    assert!(problem(Benchmark { sampled: first_blocks, ..product }).contains("forward y"));
}

#[test]
fn features_that_were_not_written_are_among_the_sampled_ones() {
    let whole = json!({"num_tokens": 3, "out_features": 1000, "in_features": 72});
    let product = reduced::<Linear>("4096x65536x1536 bf16", whole, json!({"num_tokens": 3}));
    // As if the launch ended before the last block of features.
    let shortened: Call<Linear> = |case, views, run| {
        let narrow = |name: &str, axis| views[name].narrow(axis, 0, 896).expect("fewer features");
        let mut fewer = views.clone();
        fewer.put("w", narrow("w", 0));
        fewer.put("y", narrow("y", 1));
        let case = LinearCase { out_features: 896, ..case.clone() };
        Linear::launch(&case, &fewer, run)
    };
    assert!(problem(Benchmark { call: shortened, ..product }).contains("forward y"));
}

#[test]
fn tensors_that_do_not_repeat_to_those_of_the_case_are_refused_by_name() {
    let rows = json!({"num_rows": 8, "width": 512});
    let larger = reduced::<RmsNorm>("4096x7168 bf16", rows, json!({"num_rows": 9}));
    let problem = problem(larger);
    assert!(
        problem.contains("`dy` is [9, 512]") || problem.contains("`x` is [9, 512]"),
        "{problem}"
    );
}
