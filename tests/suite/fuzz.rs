//! Every reader of a file or a line gets mutated valid inputs, and random bytes. It reports an
//! error or accepts the input, and accepted input is used as in the harness. Nothing panics, aborts
//! or takes much memory.
//!
//! Each commit tries some hundreds of inputs for each reader, `PARITY_TESTS=all` more than 100,000
//! in total.

use std::cell::Cell;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use dsv4_parity::blame::{dump, judge};
use dsv4_parity::case::Case;
use dsv4_parity::external::adapter::Adapter;
use dsv4_parity::external::process::{Call as _, Worker};
use dsv4_parity::external::wire;
use dsv4_parity::judge::checks::CheckOptions;
use dsv4_parity::mutants::matrix::equivalent::Equivalents;
use dsv4_parity::mutants::planted;
use dsv4_parity::operator::Profile;
use dsv4_parity::operator::golden_file;
use dsv4_parity::operator::size::Limit;
use dsv4_parity::operators::registry;
use dsv4_parity::record::journal::{self, Identity, PlanRecord, Shard};
use dsv4_parity::record::{CaseRecord, Origin, Report, Revision, SCHEMA_VERSION, ShardRecord};
use dsv4_parity::report::{self, diff, history};
use dsv4_parity::sweep;
use dsv4_parity::sweep::merge::{self, Part};
use dsv4_parity::sweep::progress::Progress;
use dsv4_parity::sweep::shard::Costs;
use dsv4_runtime::{DType, HostTensor, SourceTree};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::extent::{attacked, everything};
use crate::support;

/// Inputs for each reader.
const EACH_COMMIT: u32 = 300;
const EVERYTHING: u32 = 11_000;

/// Memory limit of a process that tries them, in bytes.
const MOST_MEMORY: u64 = 4 << 30;

/// A change of a valid input.
#[derive(Clone, Debug)]
enum Change {
    /// Replaces a byte.
    Byte(Index, u8),
    /// Inserts bytes.
    Insert(Index, Vec<u8>),
    /// Removes everything between two places.
    Cut(Index, Index),
    /// Removes everything after a place.
    End(Index),
    /// Changes a number.
    Number(Index, usize),
    /// Changes a word, a number or a bracket.
    Token(Index, usize),
    /// Copies a word, a number or a bracket to the place of another one.
    Swap(Index, Index),
    /// Repeats a line.
    Line(Index),
}

/// Replacements of a word, a number or a bracket.
const HOSTILE: [&str; 24] = [
    "0",
    "-1",
    "1",
    "0.5",
    "1e308",
    "-1e400",
    "1e-320",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"NaN\"",
    "\"inf\"",
    "nan",
    "[[[[[[[[[[[[[[[[",
    "\\u0000",
    "../../..",
    "\u{1b}[2J\u{202e}",
    "ä\u{0}ß",
];

/// Replacements of a number.
const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "7",
    "-1",
    "0.5",
    "-0.0",
    "1e308",
    "1e-320",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
];

fn change() -> impl Strategy<Value = Change> {
    let index = any::<Index>;
    prop_oneof![
        2 => (index(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        1 => (index(), prop::collection::vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => (index(), index()).prop_map(|(from, to)| Change::Cut(from, to)),
        1 => index().prop_map(Change::End),
        16 => (index(), 0..NUMBERS.len()).prop_map(|(at, number)| Change::Number(at, number)),
        4 => (index(), 0..HOSTILE.len()).prop_map(|(at, word)| Change::Token(at, word)),
        3 => (index(), index()).prop_map(|(at, from)| Change::Swap(at, from)),
        1 => index().prop_map(Change::Line),
    ]
}

/// Ranges of the words, numbers and brackets of a text.
fn tokens(text: &[u8]) -> Vec<std::ops::Range<usize>> {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_.+-".contains(&byte);
    let mut tokens: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, &byte) in text.iter().enumerate() {
        match tokens.last_mut() {
            Some(last) if last.end == at && is_word(byte) && is_word(text[at - 1]) => {
                last.end = at + 1
            }
            _ if is_word(byte) || b"[]{}\",:".contains(&byte) => tokens.push(at..at + 1),
            _ => {}
        }
    }
    tokens
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    if bytes.is_empty() {
        return;
    }
    match change {
        Change::Byte(at, byte) => *at.get_mut(bytes) = *byte,
        Change::Insert(at, more) => {
            let at = at.index(bytes.len());
            bytes.splice(at..at, more.iter().copied());
        }
        Change::Cut(from, to) => {
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            bytes.drain(from.min(to)..from.max(to));
        }
        Change::End(at) => bytes.truncate(at.index(bytes.len())),
        Change::Number(at, number) => {
            let mut tokens = tokens(bytes);
            tokens
                .retain(|token| bytes[token.start].is_ascii_digit() || bytes[token.start] == b'-');
            if !tokens.is_empty() {
                bytes.splice(at.get(&tokens).clone(), NUMBERS[*number].bytes());
            }
        }
        Change::Token(at, word) => {
            let tokens = tokens(bytes);
            if !tokens.is_empty() {
                bytes.splice(at.get(&tokens).clone(), HOSTILE[*word].bytes());
            }
        }
        Change::Swap(at, from) => {
            let tokens = tokens(bytes);
            if !tokens.is_empty() {
                let from = bytes[from.get(&tokens).clone()].to_vec();
                bytes.splice(at.get(&tokens).clone(), from);
            }
        }
        Change::Line(at) => {
            let lines: Vec<Vec<u8>> =
                bytes.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
            bytes.extend(at.get(&lines));
        }
    }
}

/// Inputs: valid ones with some changes, rarely random bytes. In a safetensors file mostly the
/// header changes, and its first bytes then state the new length.
fn inputs(valid: Vec<Vec<u8>>, safetensors: bool) -> impl Strategy<Value = Vec<u8>> {
    let changed = (any::<Index>(), prop::collection::vec(change(), 1..4), any::<u8>());
    let changed = changed.prop_map(move |(which, changes, lot)| {
        let mut input = which.get(&valid).clone();
        if !safetensors || lot < 50 {
            changes.iter().for_each(|change| apply(&mut input, change));
            return input;
        }
        let length = u64::from_le_bytes(input[..8].try_into().expect("a length")) as usize;
        let data = input.split_off(8 + length);
        let mut header = input.split_off(8);
        changes.iter().for_each(|change| apply(&mut header, change));
        [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
    });
    prop_oneof![15 => changed, 1 => prop::collection::vec(any::<u8>(), 0..600)]
}

/// Gives a reader its share of inputs, of which it must accept some; `read` returns whether it
/// accepted one.
fn tried(reader: &str, valid: Vec<Vec<u8>>, safetensors: bool, read: impl Fn(&[u8]) -> bool) {
    let cases = if everything() { EVERYTHING } else { EACH_COMMIT };
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut seed = [0; 32];
    seed[..reader.len().min(32)].copy_from_slice(&reader.as_bytes()[..reader.len().min(32)]);
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let taken = Cell::new(0);
    let ended = runner.run(&inputs(valid, safetensors), |input| {
        taken.set(taken.get() + u32::from(read(&input)));
        Ok(())
    });
    ended.unwrap_or_else(|error| panic!("{reader}: {error}"));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let peak = peak.strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10;
    assert!(peak < MOST_MEMORY, "{reader}: {peak} bytes");
    attacked("malformed files and lines", cases.into());
    println!("{reader}: {cases} inputs, {} taken, {} MiB at the most", taken.get(), peak >> 20);
    assert!((1..cases).contains(&taken.get()), "{reader}: {} of {cases} were taken", taken.get());
}

/// The same for a reader of a file with this name, in a separate folder.
fn tried_as_file(name: &str, valid: Vec<Vec<u8>>, read: impl Fn(&Path) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    tried(name, valid, name.ends_with(".safetensors"), |input| {
        std::fs::write(&path, input).unwrap();
        read(&path)
    });
}

/// A small report of two operators, as a run writes it.
fn sample() -> &'static Report {
    static REPORT: OnceLock<Report> = OnceLock::new();
    REPORT.get_or_init(|| {
        let device = support::device();
        let small = |operator: &str| {
            let operator = registry::find(operator).unwrap();
            let cases = operator.edge_cases(Profile::Quick).into_iter();
            cases.min_by_key(|case| operator.bytes(case).unwrap().abs_diff(3 << 20)).unwrap()
        };
        let options = CheckOptions::everything(0);
        let run = |(number, operator)| {
            let record = sweep::run_case(&small(operator), Origin::Drawn, device, options);
            CaseRecord { plan_number: Some(number), ..record }
        };
        let cases = [(0, "rms_norm"), (1, "swiglu")].map(run).to_vec();
        let shard = ShardRecord {
            index: 0,
            count: 1,
            planned_cases: 2,
            plan_digest: "digest".into(),
            executable_digest: "digest".into(),
            device: device.environment().device.clone(),
            settings: [("--seed".to_owned(), "0".to_owned())].into(),
            seconds: 1.0,
        };
        Report {
            schema_version: SCHEMA_VERSION,
            command: "parity run".into(),
            started_unix: 1_700_000_000,
            seconds: 1.0,
            revision: Revision::default(),
            environment: device.environment().clone(),
            profile: "quick".into(),
            seed: 0,
            unsupported: Vec::new(),
            unfinished: None,
            saved: Vec::new(),
            base: None,
            schedules: 0,
            operators: ["rms_norm", "swiglu"]
                .map(|name| registry::find(name).unwrap().describe())
                .to_vec(),
            cases,
            benchmarks: Vec::new(),
            ceilings: None,
            mutants: Vec::new(),
            kill_matrix: None,
            skips: Vec::new(),
            shards: vec![shard],
        }
    })
}

#[test]
fn case_lines() {
    let small = |case: &Case| {
        registry::find(&case.operator).unwrap().bytes(case).is_ok_and(|bytes| bytes < 4 << 20)
    };
    let cases = registry::OPERATORS.iter().flat_map(|operator| operator.edge_cases(Profile::Quick));
    let lines = cases.filter(small).map(|case| case.line().into_bytes()).collect();
    tried("case lines", lines, false, |input| {
        let Ok(case) = Case::parse(&String::from_utf8_lossy(input)) else { return false };
        let Ok(operator) = registry::find(&case.operator) else { return false };
        operator.prepare_within(&case, Limit::bytes(4 << 20)).is_ok()
    });
}

#[test]
fn golden_files() {
    let folder = support::fixtures().join("golden");
    let valid = ["rmsnorm__w2", "rope_table__small_yarn", "attn_core__one", "experts__one"];
    for name in valid.map(|name| format!("{name}.safetensors")) {
        let bytes = std::fs::read(folder.join(&name)).unwrap();
        tried_as_file(&name, vec![bytes], |path| {
            let Ok(file) = golden_file::read(path) else { return false };
            registry::OPERATORS
                .iter()
                .any(|operator| operator.golden(&file).is_ok_and(|cases| !cases.is_empty()))
        });
    }
}

#[test]
fn calls_of_other_stacks() {
    let of = |dtype, shape: &[usize]| {
        let values: Vec<f64> =
            (0..shape.iter().product()).map(|at| f64::from(at as u8) + 1.0).collect();
        wire::WireTensor::from(&HostTensor::from_f64(dtype, shape, &values))
    };
    let norm = [
        ("x", of(DType::Bf16, &[2, 8])),
        ("weight", of(DType::F32, &[8])),
        ("y", of(DType::Bf16, &[2, 8])),
    ];
    let expand = [
        ("x", of(DType::F32, &[2, 4])),
        ("token_topk_to_pos", (&HostTensor::from_i32(&[2, 1], &[1, 0])).into()),
        ("pos_to_token", (&HostTensor::from_i32(&[2], &[1, 0])).into()),
        ("y", of(DType::F32, &[2, 4])),
    ];
    let under =
        |call: &str, (name, tensor): (&str, wire::WireTensor)| (format!("{call}/{name}"), tensor);
    let norm = norm.map(|tensor| under("000000/0/rms_norm/attn_norm", tensor));
    let expand = expand.map(|tensor| under("000001/-/moe_expand/rows", tensor));
    let tensors: wire::WireTensors = norm.into_iter().chain(expand).collect();
    let bytes = wire::to_bytes(&tensors).expect("bytes");
    tried_as_file("calls.safetensors", vec![bytes], |path| {
        let Ok((calls, _)) = dump::read(path.parent().expect("a folder")) else { return false };
        dump::compare(&calls, &calls);
        judge::all(&calls).iter().any(|finding| finding.skipped.is_none())
    });
}

#[test]
fn records() {
    let lines: String = sample()
        .cases
        .iter()
        .map(|case| format!("{}\n", serde_json::to_string(case).unwrap()))
        .collect();
    tried("records.jsonl", vec![lines.into_bytes()], false, |input| {
        let Ok(parsed) = journal::read_records(input) else {
            return false;
        };
        let costs = Costs::from_records(&parsed.records);
        for record in &parsed.records {
            let _ = (
                record.verdict(),
                sweep::failure_text(record),
                costs.of_all(std::slice::from_ref(&record.case), &[1]),
            );
        }
        let _ = Progress::resumed(&parsed.records);
        !parsed.records.is_empty()
    });
}

#[test]
fn plans() {
    let report = sample();
    let plan = PlanRecord {
        schema_version: SCHEMA_VERSION,
        shard: Shard::WHOLE,
        planned_cases: 2,
        shard_cases: 2,
        plan_digest: "digest".into(),
        identity: Identity {
            revision: report.revision.clone(),
            executable_digest: "digest".into(),
            environment: report.environment.clone(),
        },
        settings: [("--seed".to_owned(), "0".to_owned())].into(),
        remembered: Default::default(),
        run: Default::default(),
    };
    tried_as_file("plan.json", vec![serde_json::to_vec(&plan).unwrap()], |path| {
        let _ = journal::refuse_foreign(path.parent().unwrap());
        let _ = Part::read(path.parent().unwrap());
        journal::read_plan(path.parent().unwrap()).is_ok()
    });
}

#[test]
fn reports() {
    let mut small = sample().clone();
    small.cases.iter_mut().for_each(|case| case.checks.truncate(3));
    tried_as_file("report.json", vec![serde_json::to_vec(&small).unwrap()], |path| {
        let Ok(read) = diff::read(path) else { return false };
        let _ = (report::html(&read), report::markdown(&read), history::lines(&read));
        if let Ok(found) = diff::compare(&small, &read) {
            let _ = (diff::terminal(&small, &read, &found), diff::html(&small, &read, &found));
        }
        if let Ok(part) = Part::read(path.parent().unwrap()) {
            let _ = merge::merge(vec![part], String::new());
        }
        true
    });
}

#[test]
fn histories() {
    let lines: String = history::lines(sample())
        .iter()
        .map(|line| serde_json::to_string(line).unwrap() + "\n")
        .collect();
    tried_as_file("history.jsonl", vec![lines.into_bytes()], |path| {
        let Ok(lines) = history::read(path) else { return false };
        let series = history::series(&lines);
        let _ = (history::terminal(&series), history::page(&series));
        true
    });
}

#[test]
fn adapters() {
    let valid = [
        &include_bytes!("../../fixtures/external/adapters/pytorch_sparse_attention.toml")[..],
        b"rounding = \"specification\"\nlanes = 4\n[tensor.x]\nrename = \"input\"\ndtype = \"F64\"\npermute = [1, 0]\nscale = 0.5\n\
          negate = true\n[tensor.indices]\nsentinel = 7\n[tensor.lse]\nabsent = true\nfill = { ours = inf, theirs = nan }\n",
    ];
    let tensor =
        HostTensor::from_f64(DType::F32, &[2, 3], &[0.0, 1.0, -1.0, f64::INFINITY, f64::NAN, 0.5]);
    tried("adapters", valid.map(<[u8]>::to_vec).to_vec(), false, |input| {
        let Ok(adapter) = Adapter::parse(&String::from_utf8_lossy(input)) else { return false };
        for name in ["lse", "x", "indices", "out"].into_iter().chain(adapter.names()) {
            let _ = adapter.their_form(name, &tensor);
            if let Ok(theirs) = adapter.to_theirs(name, &tensor) {
                let _ = adapter.to_ours(name, &theirs, &tensor);
            }
        }
        let _ = adapter.arithmetic();
        true
    });
}

/// The first mutants of a list, with the cases that they name.
fn first_mutants(list: &str, count: usize) -> String {
    let mut list: toml::Table = list.parse().expect("a list");
    let mutants = list["mutants"].as_table_mut().expect("mutants");
    *mutants = mutants.clone().into_iter().take(count).collect();
    let named: Vec<_> = mutants
        .values()
        .flat_map(|mutant| mutant["cases"].as_array().expect("names").clone())
        .collect();
    let cases = list["cases"].as_table_mut().expect("cases");
    cases.retain(|name, _| named.iter().any(|named| named.as_str() == Some(name)));
    list.to_string()
}

#[test]
fn mutants() {
    static TREE: LazyLock<SourceTree> = LazyLock::new(dsv4_kernels::sources);
    let text =
        std::fs::read_to_string(support::fixtures().join("mutants/experts/swiglu.toml")).unwrap();
    tried_as_file("swiglu.toml", vec![first_mutants(&text, 2).into_bytes()], |path| {
        let Ok(mutants) = planted::load(path.parent().unwrap()) else { return false };
        mutants.iter().for_each(|mutant| drop(mutant.plant(&TREE)));
        true
    });
    let text =
        std::fs::read_to_string(support::fixtures().join("mutants/equivalent.toml")).unwrap();
    let short: String = text.split_inclusive("\n\n").take(4).collect();
    tried_as_file("equivalent.toml", vec![short.into_bytes()], |path| {
        let Ok(equivalents) = Equivalents::load(path.parent().unwrap()) else { return false };
        let _ = equivalents.check(&Default::default(), &Default::default());
        true
    });
}

#[test]
fn outputs_of_external_kernels() {
    let bytes = std::fs::read(support::fixtures().join("golden/rmsnorm__w2.safetensors")).unwrap();
    tried_as_file("outputs.safetensors", vec![bytes], |path| wire::read(path, 1 << 20).is_ok());
}

/// The worker is a process: each input costs one process.
#[test]
fn answers_of_external_workers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answer");
    let command = format!("read -r request; cat '{}'", path.display());
    let valid =
        ["{\"ok\":true}\n", "{\"error\":\"no such case\"}\n"].map(|line| line.as_bytes().to_vec());
    tried("answers", valid.to_vec(), false, |input| {
        std::fs::write(&path, input).unwrap();
        let ended = Worker::new(command.clone(), Duration::from_secs(20)).call(folder.path());
        ended
            .map_err(|error| assert!(error.message.chars().count() < 3000, "{}", error.message))
            .is_ok()
    });
}
