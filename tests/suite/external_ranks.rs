//! External kernels of several ranks, a process each: what each is given, what is made of what they
//! write, and every way in which some of them fail.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use dsv4_parity::case::Case;
use dsv4_parity::external::crew::{Crew, folder_of};
use dsv4_parity::external::process::{Call, Reply};
use dsv4_parity::external::wire::{self, WireTensor, WireTensors};
use dsv4_parity::external::{CASE, ExternalOptions, INPUTS, OUTPUTS, RANK};
use dsv4_parity::judge::runner::RunError;
use dsv4_parity::operator::PreparedCase;
use dsv4_parity::operators::registry;
use dsv4_parity::record::{CaseRecord, Verdict};
use dsv4_runtime::{Contract, Device, HostTensor};

use crate::command_line::{Output, Parity};
use crate::extent::left_out;
use crate::external::{
    adapter, assert_agrees, assert_dies, assert_leaves_nothing, assert_no_outputs, assert_says,
    fails, folder, is_alive, parity_about, python, report, run, script,
};
use crate::support;

/// Rooms whose changes run the long tests of this file.
const ROOMS: [&str; 5] = [
    "src/external/",
    "src/operators/ranks.rs",
    "src/operator/elsewhere.rs",
    "fixtures/external/dsv4_external/",
    "python/examples/",
];
/// Time limit of a test that waits for a live process.
const LIMIT: Duration = Duration::from_secs(60);

/// Two sequences in zigzag: each rank has keys that others name, and V is not the start of K.
const TWO: &str = r#"{"operator":"cp_sparse_attention","ranks":2,"partition":"zigzag","keys":"remapped","num_sequences":2,"delay_seed":0,"num_tokens":14,"num_heads":4,"head_dim":64,"values":"separate","v_dim":32,"topk":12,"indices":"hostile","lengths":"absent","sinks":"normal","softmax_scale":0.125,"logit_deviation":2.0,"key_gradient":"f32","dlse":false,"implementation":"portable","key_gradients":"deterministic","seed":5}"#;

fn three() -> String {
    TWO.replace(r#""ranks":2"#, r#""ranks":3"#)
}

fn options(ranks: usize) -> ExternalOptions {
    ExternalOptions { ranks: Some(ranks), ..ExternalOptions::default() }
}

// ---------------------------------------------------------------- what ranks read and write

/// What a rank was given in a run's folder.
fn given(run: &Path, rank: usize) -> WireTensors {
    wire::read(&folder_of(run, rank).join(INPUTS), u64::MAX).expect("tensors")
}

/// The case of a run, which every rank has with its own number.
fn case_of(run: &Path) -> Case {
    let read = |rank: usize| {
        let text = std::fs::read_to_string(folder_of(run, rank).join(CASE)).expect("a case");
        let mut case = Case::parse(&text).expect("a case");
        assert_eq!(case.fields.remove(RANK), Some(rank.into()));
        case
    };
    let case = read(0);
    let ranks = case.fields["ranks"].as_u64().expect("ranks") as usize;
    (1..ranks).for_each(|rank| assert_eq!(read(rank), case));
    case
}

fn row_bytes(tensor: &HostTensor) -> usize {
    tensor.shape[1..].iter().product::<usize>() * tensor.dtype.size()
}

/// What each rank has of tensors of all: a rank's row is the one that would come from it if ranks'
/// rows were put together.
fn divided(
    prepared: &dyn PreparedCase,
    whole: &BTreeMap<&'static str, HostTensor>,
) -> Vec<WireTensors> {
    let holder = Device::holding(support::device().environment().clone(), dsv4_kernels::sources());
    let mut ranks: Vec<BTreeMap<_, _>> = prepared
        .of_ranks(&holder, Contract::NAN)
        .expect("a case of ranks")
        .expect("a case of ranks")
        .into_iter()
        .map(|of_rank| of_rank.written.into_iter().collect())
        .collect();
    let is_whole = |name: &str, part: &HostTensor| part.shape == whole[name].shape;
    // Each row of a rank starts with a number of its own.
    let mut rows = vec![];
    for (rank, tensors) in ranks.iter_mut().enumerate() {
        for (name, tensor) in tensors.iter_mut().filter(|(name, part)| !is_whole(name, part)) {
            let size = row_bytes(tensor);
            for at in 0..tensor.shape[0] {
                tensor.bytes[at * size..at * size + 2]
                    .copy_from_slice(&(rows.len() as u16).to_le_bytes());
                rows.push((rank, *name, at));
            }
        }
    }
    let united = prepared.united(&holder, Contract::NAN, ranks.clone()).expect("rows of ranks");
    for (name, numbered) in united {
        let size = row_bytes(&numbered);
        for row in 0..numbered.shape[0] {
            let own = row * size..(row + 1) * size;
            let number = [numbered.bytes[own.start], numbered.bytes[own.start + 1]];
            let number = usize::from(u16::from_le_bytes(number));
            let Some(&(rank, of, at)) = rows.get(number).filter(|(_, of, _)| *of == name) else {
                continue;
            };
            ranks[rank].get_mut(of).expect("its tensor").bytes[at * size..(at + 1) * size]
                .copy_from_slice(&whole[name].bytes[own]);
        }
    }
    let wired = |(name, part): (&'static str, HostTensor)| {
        let part = if is_whole(name, &part) { &whole[name] } else { &part };
        (name.to_owned(), WireTensor::from(part))
    };
    ranks.into_iter().map(|rank| rank.into_iter().map(wired).collect()).collect()
}

/// Our own kernels in the place of external ones of each rank. `change` gets what a rank writes.
struct Ours<F>(F);

impl<F: FnMut(usize, &mut WireTensors)> Call for Ours<F> {
    fn call(&mut self, run: &Path) -> Result<Reply, RunError> {
        let prepared = registry::prepare(&case_of(run)).expect("a case");
        let stored = prepared.stored(support::device(), Contract::NAN)?.into_iter().collect();
        for (rank, mut written) in divided(&*prepared, &stored).into_iter().enumerate() {
            (self.0)(rank, &mut written);
            let bytes = wire::to_bytes(&written).expect("tensors");
            std::fs::write(folder_of(run, rank).join(OUTPUTS), bytes).expect("written");
        }
        Ok(Reply::default())
    }
}

#[test]
fn our_own_ranks_agree_from_outside_for_every_operator_of_ranks() {
    if left_out(&ROOMS) {
        return;
    }
    let operators = registry::OPERATORS.iter().filter(|operator| operator.has_ranks());
    let mut ran = 0;
    for operator in operators {
        let two = |case: &Case| case.fields["ranks"] == 2;
        let case = operator.typical_cases().into_iter().find(two).expect("a case of two ranks");
        let record = run(&case.line(), options(2), Ours(|_, _: &mut WireTensors| {}));
        assert_agrees(&record);
        // Two processes cannot be four ranks.
        let skipped = |skip: &&dsv4_parity::record::Skip| skip.why.contains("than --ranks");
        assert!(record.skips.iter().any(|skip| skipped(&skip)), "{:?}", record.skips);
        ran += 1;
    }
    assert_eq!(ran, 4);
}

#[test]
fn a_rank_is_given_the_rows_of_its_tokens_and_padding_that_is_poison() {
    let seen = |run: &Path| {
        let prepared = registry::prepare(&case_of(run)).expect("a case");
        let mut all = BTreeSet::new();
        for rank in 0..3 {
            let own = given(run, rank);
            let list = |name: &str| own[name].dtype.decode(&own[name].bytes);
            let (tokens, positions) = (list("tokens"), list("positions"));
            assert_eq!(list("cu_seqlens").last(), Some(&14.0));
            assert_eq!(positions[..tokens.len()], tokens[..]);
            assert!(positions[tokens.len()..].iter().all(|&position| position == -1.0));
            for of_all in prepared.given() {
                let (name, whole) = (of_all.name, of_all.tensor);
                if name == "sink" {
                    assert_eq!(own[name].bytes, whole.bytes);
                    continue;
                }
                let size = row_bytes(whole);
                let rows = tokens.iter().flat_map(|&token| {
                    let start = token as usize * size;
                    whole.bytes[start..start + size].to_vec()
                });
                let mut rows: Vec<u8> = rows.collect();
                if ["k", "v"].contains(&name) {
                    rows.resize(positions.len() * size, Contract::NAN.poison);
                }
                assert!(own[name].bytes == rows, "{name} of rank {rank}");
            }
            // What the rank itself writes is not given to it.
            assert!(!own.contains_key("out") && !own.contains_key("lse"));
            all.extend(tokens.iter().map(|&token| token as usize));
        }
        assert_eq!(all, (0..14).collect());
        Err(RunError::unsupported("it was only looked at"))
    };
    let record = run(&three(), options(3), crate::external::Kernel(seen));
    assert_eq!(record.unsupported.as_deref(), Some("it was only looked at"));
}

#[test]
fn what_one_rank_writes_wrongly_or_not_at_all_is_said_of_it() {
    let judged = |change: fn(usize, &mut WireTensors)| run(TWO, options(2), Ours(change));
    let other = judged(|rank, written| {
        let dsink = written.get_mut("dsink").expect("dsink");
        dsink.bytes[0] ^= rank as u8;
    });
    assert_no_outputs(
        &other,
        Verdict::Fail,
        &["rank 1 of 2", "`dsink`", "another sum than rank 0"],
    );
    let missing = judged(|rank, written| {
        if rank == 1 {
            written.remove("lse");
        }
    });
    assert_no_outputs(&missing, Verdict::Error, &["rank 1 of 2: outputs: `lse` is missing"]);
    let echoed = judged(|rank, written| {
        if rank == 1 {
            written.insert("input.sink".into(), written["dsink"].clone());
        }
    });
    assert!(fails(&echoed, "inputs_unchanged", "sink of rank 1"), "{:?}", echoed.checks);
    let unlike = run(TWO, options(3), Ours(|_, _: &mut WireTensors| {}));
    assert_no_outputs(&unlike, Verdict::Error, &["a case of 2 ranks for 3 processes"]);
}

#[test]
fn adapters_name_tensors_of_ranks_and_the_forward_may_be_alone() {
    let renamed = |run: &Path| {
        let names: Vec<_> = given(run, 1).into_keys().collect();
        assert!(names.contains(&"slots".to_owned()) && !names.contains(&"positions".to_owned()));
        Err(RunError::unsupported("renamed"))
    };
    let text = "[tensor.positions]\nrename = 'slots'";
    let record = run(
        TWO,
        ExternalOptions { ranks: Some(2), ..adapter(text) },
        crate::external::Kernel(renamed),
    );
    assert_eq!(record.unsupported.as_deref(), Some("renamed"));
    let forward =
        Ours(|_, written: &mut WireTensors| written.retain(|name, _| !name.starts_with('d')));
    let record = run(TWO, ExternalOptions { forward_only: true, ..options(2) }, forward);
    assert_agrees(&record);
    assert!(record.skips.iter().any(|skip| skip.what == "gradient of dk"), "{:?}", record.skips);
}

// ---------------------------------------------------------------- processes of ranks

/// A folder of a run of two ranks that nothing reads.
fn two_folders() -> tempfile::TempDir {
    let run = folder();
    (0..2).for_each(|rank| std::fs::create_dir(folder_of(run.path(), rank)).expect("a folder"));
    run
}

/// Two shell scripts that answer requests; `$dir` is the folder of the rank.
fn crew(answer: &str, limit: Duration) -> Crew {
    Crew::of_workers(&script(&format!("while request; do\n{answer}\ndone")), limit, 2)
}

/// What each rank wrote to a file of its folder.
fn written(run: &tempfile::TempDir, name: &str) -> [String; 2] {
    [0, 1].map(|rank| {
        let path = folder_of(run.path(), rank).join(name);
        std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    })
}

/// A rank whose folder has a file `wait` waits for others that do not come.
const ANSWERS: &str = r#"
    echo $$ > "$dir/pid"
    echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR" > "$dir/world"
    echo "$MASTER_PORT" > "$dir/port"
    case $(cat "$dir/does" 2>/dev/null) in
        wait) sleep 300;;
        die) echo out of memory >&2; exit 9;;
        report) echo '{"error":"NaN in k"}';;
        refuse) echo '{"unsupported":"64 heads only"}';;
        *) echo '{"ok":true}';;
    esac"#;

#[test]
fn each_rank_has_its_number_and_one_address_for_all_and_lives_on() {
    let run = two_folders();
    let mut crew = crew(ANSWERS, LIMIT);
    crew.call(run.path()).expect("all answer");
    assert_eq!(written(&run, "world"), ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]);
    let (ports, pids) = (written(&run, "port"), written(&run, "pid"));
    assert!(
        ports[0] == ports[1] && ports[0].parse::<u16>().is_ok_and(|port| port > 0),
        "{ports:?}"
    );
    crew.call(run.path()).expect("all answer again");
    assert_eq!(written(&run, "pid"), pids);
    drop(crew);
    pids.iter().for_each(|pid| assert_dies(pid));
}

#[test]
fn one_rank_that_fails_ends_all_is_named_and_the_next_case_has_new_ones() {
    for (does, limit, needles) in [
        (
            ["wait", "die"],
            LIMIT,
            &["rank 1 of 2: the worker ended with exit code 9", "out of memory"][..],
        ),
        (["report", "wait"], LIMIT, &["rank 0 of 2: the worker reported: NaN in k"]),
        (
            ["", "wait"],
            Duration::from_secs(2),
            &["rank 1 of 2: the worker was killed at the time limit of 2 s"],
        ),
        (
            ["", "refuse"],
            LIMIT,
            &["rank 1 of 2: the case is unsupported (64 heads only)", "rank 0 of 2: it ran"],
        ),
    ] {
        let run = two_folders();
        let mut crew = crew(ANSWERS, limit);
        crew.call(run.path()).expect("all answer");
        let (pids, ports) = (written(&run, "pid"), written(&run, "port"));
        for (rank, does) in does.iter().enumerate() {
            std::fs::write(folder_of(run.path(), rank).join("does"), does).expect("written");
        }
        let start = Instant::now();
        let error = crew.call(run.path()).expect_err("one fails");
        assert_says(&error, needles);
        assert!(!error.unsupported && !error.untestable, "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{does:?}: others were waited for");
        pids.iter().for_each(|pid| assert!(!is_alive(pid), "{does:?}"));
        (0..2).for_each(|rank| {
            std::fs::remove_file(folder_of(run.path(), rank).join("does")).expect("removed")
        });
        crew.call(run.path()).expect("all answer again");
        let now = written(&run, "pid");
        assert!(now.iter().zip(&pids).all(|(now, before)| now != before), "{now:?} {pids:?}");
        assert_ne!(written(&run, "port"), ports, "a port that others may still wait at");
    }
}

#[test]
fn what_all_ranks_do_not_support_is_a_skip_and_their_processes_live_on() {
    let run = two_folders();
    let mut crew = crew(ANSWERS, LIMIT);
    for rank in 0..2 {
        std::fs::write(folder_of(run.path(), rank).join("does"), "refuse").expect("written");
    }
    let mut pids = BTreeSet::new();
    for _ in 0..2 {
        let error = crew.call(run.path()).expect_err("it is not supported");
        assert_eq!(error, RunError::unsupported("64 heads only"));
        pids.extend(written(&run, "pid"));
    }
    assert_eq!(pids.len(), 2);
}

#[test]
fn the_time_of_ranks_is_that_of_the_slowest_and_all_their_kernels_are_named() {
    let run = two_folders();
    let answer =
        r#"echo "{\"ok\":true,\"kernel\":\"k$RANK\",\"seconds\":{\"forward\":$((RANK + 1))e-5}}""#;
    let reply = crew(answer, LIMIT).call(run.path()).expect("all answer");
    assert_eq!(reply.kernel.as_deref(), Some("k0, k1"));
    let seconds = reply.seconds.expect("times");
    assert_eq!((seconds.forward, seconds.backward), (Some(2e-5), None));
    let commands = r#"echo "$RANK of $WORLD_SIZE at $MASTER_PORT" > {dir}/world"#;
    let mut commands = Crew::of_commands(commands, LIMIT, 2);
    let mut ports = BTreeSet::new();
    for _ in 0..2 {
        commands.call(run.path()).expect("all succeed");
        let [first, second] = written(&run, "world");
        assert!(first.starts_with("0 of 2") && second.starts_with("1 of 2"), "{first} {second}");
        ports.insert(first);
    }
    assert_eq!(ports.len(), 2);
}

// ---------------------------------------------------------------- the command

fn parity(dir: &Path, arguments: &[&str]) -> Output {
    parity_about("cp_sparse_attention", dir, &[&["--ranks", "2"], arguments].concat())
}

#[test]
fn ranks_that_cannot_start_are_said_once_and_a_failing_case_replays_with_ranks() {
    let dir = folder();
    let case = ["--case", TWO];
    // At once, and when it was asked already.
    for before in ["", "sleep 1; "] {
        let does = format!("{before}echo no such module >&2; exit 3");
        let worker = format!("[ $RANK = 1 ] && {{ {does}; }}; cat > /dev/null");
        let output = parity(dir.path(), &[&["--worker", &worker][..], &case].concat());
        output.assert_code(2);
        assert_eq!(output.stderr.matches("cannot start").count(), 1, "{}", output.stderr);
        for needle in ["rank 1 of 2: the worker cannot start", "exit code 3", "no such module"] {
            assert!(output.stderr.contains(needle), "{needle}: {}", output.stderr);
        }
    }
    // It starts, and dies before its first answer.
    let worker = r#"read -r line; if [ $RANK = 1 ]; then echo '{"error":"odd"}'; fi; sleep 300"#;
    let output = parity(dir.path(), &[&["--worker", worker][..], &case].concat());
    output.assert_code(1);
    assert!(output.stderr.contains("rank 1 of 2: the worker reported: odd"), "{}", output.stderr);
    let report = report(&dir.path().join("out"));
    let replay = &report.cases[0].replay;
    assert!(
        replay.starts_with("parity external --op cp_sparse_attention --ranks 2 --worker"),
        "{replay}"
    );
    assert!(report.environment.device.ends_with(", 2 ranks"), "{}", report.environment.device);
}

#[test]
fn ranks_are_refused_where_they_make_no_sense() {
    let dir = folder();
    let of = |operator: &str, arguments: &[&str]| parity_about(operator, dir.path(), arguments);
    of("rms_norm", &["--worker", "cat", "--ranks", "2"]).assert_bad_input(&[
        "--ranks 2",
        "rms_norm",
        "cp_sparse_attention",
        "cp_indexer",
    ]);
    parity(dir.path(), &["--worker", "cat", "--case", &three()])
        .assert_bad_input(&["3 ranks", "--ranks says 2"]);
    for ranks in ["0", "9", "2,3"] {
        let output = of("cp_sparse_attention", &["--worker", "cat", "--ranks", ranks]);
        assert!(output.code == Some(2) && output.stderr.contains(ranks), "{}", output.stderr);
    }
    for other in [
        &["--only", "batch_invariance", "--worker", "cat"][..],
        &["--solution", "a", "--definition", "b"],
    ] {
        let output = Parity::new(&[&["external", "--ranks", "2"], other].concat()).run();
        assert!(output.code == Some(2) && output.stderr.contains("--ranks"), "{}", output.stderr);
    }
    // The reference worker has the tensors of all ranks.
    let output = parity(dir.path(), &["--worker", &crate::external::reference(), "--case", TWO]);
    output.assert_code(1);
    assert!(
        output.stderr.contains("rank 0 of 2: the worker reported: rank 0 is asked"),
        "{}",
        output.stderr
    );
}

#[test]
fn nothing_of_ranks_is_left_after_any_end_of_the_harness() {
    let command = format!("{}\nsleep 300", crate::external::LINGER);
    let arguments = ["external", "--op", "cp_sparse_attention", "--ranks", "2", "--case", TWO];
    let arguments = [&arguments[..], &["--worker", &command]].concat();
    ["-INT", "-KILL"].iter().for_each(|end| assert_leaves_nothing(&arguments, &[], end));
}

// ---------------------------------------------------------------- Python

/// The example of the Python package, with a part of its text replaced; what the command says.
fn example(dir: &Path, line: &str, replaced: Option<[&str; 2]>) -> CaseRecord {
    let path = support::fixtures().join("../python/examples/numpy_cp_sparse_attention.py");
    let mut text = std::fs::read_to_string(path).expect("the example");
    if let Some([before, after]) = replaced {
        assert_eq!(text.matches(before).count(), 1, "{before}");
        text = text.replace(before, after);
    }
    let (path, package) = (dir.join("kernel.py"), support::fixtures().join("external"));
    std::fs::write(&path, text).expect("written");
    let command = format!("PYTHONPATH='{}' python3 '{}'", package.display(), path.display());
    let ranks =
        Case::parse(line).expect("a case").fields["ranks"].as_u64().expect("ranks") as usize;
    run(line, options(ranks), Crew::of_workers(&command, LIMIT, ranks))
}

#[test]
fn ranks_in_numpy_agree_and_each_wrong_one_is_seen() {
    if left_out(&ROOMS) || !python("import numpy", "ranks in numpy") {
        return;
    }
    let dir = folder();
    assert_agrees(&example(dir.path(), TWO, None));
    assert_agrees(&example(dir.path(), &three(), None));
    // FM-04: V is read from K.
    let values = [r#"inputs.get("v", inputs["k"][:, :v_dim])"#, r#"inputs["k"][:, :v_dim]"#];
    let record = example(dir.path(), TWO, Some(values));
    assert!(fails(&record, "forward", "out") && !fails(&record, "forward", "lse"), "{record:?}");
    // FM-24: lists, which name positions, are used on rows in the order of ranks.
    let mapped = [
        "kv[positions[positions >= 0]] =",
        "kv[kv.any(1).sum() + numpy.arange((positions >= 0).sum())] =",
    ];
    let record = example(dir.path(), TWO, Some(mapped));
    assert!(fails(&record, "forward", "out") && fails(&record, "gradient", "dq"), "{record:?}");
    // FM-25: one rank does not add its part.
    let part = ["world()((dkv, dsink))", "world()((dkv * (RANK != 1), dsink))"];
    let record = example(dir.path(), TWO, Some(part));
    assert!(fails(&record, "gradient", "dk") && !fails(&record, "gradient", "dq"), "{record:?}");
}
