//! A whole model on a device: the laws of its cache, and the two commands.
//!
//! Fast kernels choose tiles and parts by the number of tokens of a step. Bits are compared on a
//! device whose launchers choose invariant ones.

use dsv4_kernels::cache::cache_layout::LayerKind::{self, Csa, Hca, Window};
use dsv4_kernels::cache::cache_manager::{CacheError, SequenceId};
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::config::{Config, ExpertFormat};
use dsv4_kernels::model::engine::{Chunk, Limits, Model, ModelError, Sampling};
use dsv4_kernels::model::weights::Weights;
use dsv4_parity::model::random::{self, Sizes};
use dsv4_parity::model::reference::{self, Choice};
use dsv4_reference::model as oracle;
use dsv4_reference::{Precision, Rounding};
use dsv4_runtime::Device;
use statrs::distribution::{ContinuousCDF as _, StudentsT};

use crate::command_line::Parity;
use crate::extent::left_out;
use crate::support::device;

/// Rooms whose changes run the long tests of this file.
const MODEL: [&str; 2] = ["kernels/", "reference/src/model.rs"];

pub(crate) const VOCAB_SIZE: usize = 64;

pub(crate) fn sizes(layers: &[LayerKind]) -> Sizes {
    Sizes {
        layers: layers.to_vec(),
        hidden_size: 128,
        vocab_size: VOCAB_SIZE,
        num_experts: 3,
        topk: 2,
        num_hash_layers: 1,
        num_mtp_layers: 0,
        expert_format: ExpertFormat::Mxfp4,
    }
}

/// A device whose launchers choose kernels without a dependence on the batch.
fn invariant_device() -> &'static Device {
    Box::leak(Box::new(device().invariant()))
}

/// A random model of these layers, whose kernels do not depend on the batch. With drafts it has an
/// MTP module.
pub(crate) fn model(layers: &[LayerKind], limits: Limits) -> Model<'static> {
    model_on(invariant_device(), sizes(layers), limits)
}

/// The weights of a random checkpoint.
fn random_weights(device: &'static Device, config: &Config, seed: u64) -> Weights<'static> {
    let folder = tempfile::tempdir().expect("a folder");
    random::write(folder.path(), config, seed, &|_, _| {}).expect("a checkpoint");
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    Weights::load(device, &checkpoint, &mut |_, _| {}).expect("weights")
}

/// A random model of these sizes.
fn model_on(device: &'static Device, sizes: Sizes, limits: Limits) -> Model<'static> {
    let config = Sizes { num_mtp_layers: limits.drafts.into(), ..sizes }.config();
    let weights = random_weights(device, &config, 1);
    Model::new(device, &config, weights, limits, Implementation::Portable).expect("a model")
}

pub(crate) const LIMITS: Limits =
    Limits { num_pages: 3, num_sequences: 2, step_tokens: 32, num_snapshots: 0, drafts: false };

pub(crate) fn text(seed: u32, count: usize) -> Vec<u32> {
    let mixed = |at: u32| (at + 1000 * seed).wrapping_mul(2_654_435_761) >> 7;
    (0..count as u32).map(|at| mixed(at) % VOCAB_SIZE as u32).collect()
}

pub(crate) fn admitted(model: &mut Model<'_>) -> SequenceId {
    model.admit(&[1]).expect("a sequence").sequence
}

/// The logits after each token of a text, a step for each of these numbers of tokens.
pub(crate) fn logits_in(
    model: &mut Model<'_>,
    sequence: SequenceId,
    text: &[u32],
    steps: &[usize],
) -> Vec<Vec<f32>> {
    let (mut rest, mut all) = (text, Vec::new());
    for &count in steps {
        let (tokens, after) = rest.split_at(count);
        rest = after;
        all.extend(model.logits(&[Chunk { sequence, tokens }]).expect("logits").remove(0));
    }
    assert!(rest.is_empty());
    all
}

/// The same of a sequence that starts and ends here.
pub(crate) fn logits(model: &mut Model<'_>, text: &[u32], steps: &[usize]) -> Vec<Vec<f32>> {
    let sequence = admitted(model);
    let all = logits_in(model, sequence, text, steps);
    model.release(sequence).expect("released");
    all
}

/// The first token whose logits differ.
pub(crate) fn first_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> Option<usize> {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().flatten().all(|logit| logit.is_finite()));
    a.iter().zip(b).position(|(a, b)| a != b)
}

#[test]
fn chunks_of_a_prompt_and_a_reused_slot_change_no_bit() {
    let mut model = model(&[Window, Csa, Hca, Csa], LIMITS);
    let text = text(1, 20);
    let whole = logits(&mut model, &text, &[20]);
    for steps in [&[7, 13][..], &[1, 18, 1], &[20]] {
        assert_eq!(first_difference(&whole, &logits(&mut model, &text, steps)), None, "{steps:?}");
    }
    // The comparison sees a change of one token, at that token and not before.
    let mut other = text.clone();
    other[9] = (other[9] + 1) % VOCAB_SIZE as u32;
    assert_eq!(first_difference(&whole, &logits(&mut model, &other, &[20])), Some(9));
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbour_or_its_slot() {
    if left_out(&MODEL) {
        return;
    }
    let mut model = model(&[Window, Csa, Hca, Csa], LIMITS);
    let (own, other) = (text(1, 20), text(2, 14));
    let alone = logits(&mut model, &own, &[7, 13]);
    // The neighbour takes the first slot, and the lengths differ in every step.
    let [neighbour, sequence] = [0; 2].map(|_| admitted(&mut model));
    let mut found = Vec::new();
    for (own, other) in [(&own[..7], &other[..5]), (&own[7..], &other[5..])] {
        let chunks =
            [Chunk { sequence: neighbour, tokens: other }, Chunk { sequence, tokens: own }];
        found.extend(model.logits(&chunks).expect("logits").remove(1));
    }
    assert_eq!(first_difference(&alone, &found), None);
}

/// What a trainer computes of a text at once has the bits of what a sampler saw token by token.
#[test]
fn prefill_and_then_decode_equal_prefill_of_the_whole() {
    if left_out(&MODEL) {
        return;
    }
    let mut model = model(&[Csa, Hca], LIMITS);
    let text = text(3, 18);
    let whole = logits(&mut model, &text, &[18]);
    for (first, step) in [(6, 1), (9, 2), (2, 4)] {
        let mut steps = vec![first];
        steps.extend((first..text.len()).step_by(step).map(|at| step.min(text.len() - at)));
        assert_eq!(first_difference(&whole, &logits(&mut model, &text, &steps)), None, "{steps:?}");
    }
}

/// Tokens that a request samples, and the logits after its prompt and each of them but the last,
/// among other requests of unlike lengths. `place` is its place in every step.
fn request(model: &mut Model<'_>, others: usize, place: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let prompts: Vec<Vec<u32>> =
        (0..others as u32).map(|other| text(other + 5, 1 + (other as usize * 5) % 9)).collect();
    let mut texts: Vec<(SequenceId, Vec<u32>)> =
        prompts.into_iter().map(|prompt| (admitted(model), prompt)).collect();
    texts.insert(place, (admitted(model), text(3, 6)));
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let chunks: Vec<Chunk<'_>> =
            texts.iter().map(|(sequence, tokens)| Chunk { sequence: *sequence, tokens }).collect();
        let found = model.logits(&chunks).expect("logits");
        all.extend(found[place].iter().cloned());
        let next: Vec<u32> =
            found.iter().map(|rows| largest(rows.last().expect("a row"))).collect();
        tokens.push(next[place]);
        texts.iter_mut().zip(next).for_each(|((_, tokens), next)| *tokens = vec![next]);
    }
    texts.iter().for_each(|(sequence, _)| model.release(*sequence).expect("released"));
    (tokens, all)
}

fn largest(logits: &[f32]) -> u32 {
    let order = |a: &(usize, &f32), b: &(usize, &f32)| a.1.total_cmp(b.1);
    logits.iter().enumerate().max_by(order).map_or(0, |(token, _)| token as u32)
}

/// Wide enough that fast kernels divide their sums by the number of tokens.
#[test]
fn tokens_and_logits_of_a_request_are_those_of_it_alone_in_batches_of_7_and_32() {
    if left_out(&MODEL) {
        return;
    }
    let limits = Limits { num_pages: 32, num_sequences: 32, ..LIMITS };
    let wide = || Sizes { hidden_size: 512, ..sizes(&[Csa, Hca]) };
    let mut model = model_on(invariant_device(), wide(), limits);
    let alone = request(&mut model, 0, 0);
    for (batch, place) in [(7, 3), (32, 31)] {
        let among = request(&mut model, batch - 1, place);
        assert_eq!(first_difference(&alone.1, &among.1), None, "in a batch of {batch}");
        assert_eq!(alone.0, among.0, "in a batch of {batch}");
    }
    // The comparison sees kernels whose bits follow the batch.
    let mut fast = model_on(device(), wide(), limits);
    let [alone, among] = [request(&mut fast, 0, 0), request(&mut fast, 31, 31)];
    assert_ne!(alone.1, among.1);
}

#[test]
fn entries_of_128_tokens_and_the_end_of_the_window_cross_chunks() {
    if left_out(&MODEL) {
        return;
    }
    let limits = Limits { step_tokens: 127, ..LIMITS };
    let mut model = model(&[Hca], limits);
    let text = text(4, 136);
    // The first entry is completed by token 127, and token 128 leaves the window.
    let whole = logits(&mut model, &text, &[136]);
    let parted = logits(&mut model, &text, &[60, 64, 12]);
    assert_eq!(first_difference(&whole, &parted), None);
}

#[test]
fn a_rejected_call_names_the_reason_and_changes_nothing() {
    let limits = Limits { num_pages: 1, num_sequences: 1, ..LIMITS };
    let mut model = model(&[Window, Csa], limits);
    let text = text(5, 12);
    let expected = logits(&mut model, &text, &[6, 6]);
    let sequence = admitted(&mut model);
    let first = logits_in(&mut model, sequence, &text[..6], &[6]);
    assert!(matches!(model.admit(&[1]), Err(ModelError::Cache(CacheError::OutOfSequences(1)))));
    let long = vec![1; 130];
    let rejected: [(&[u32], &str); 3] = [
        (&[], "there are no tokens"),
        (&[3, 64], "token 64 of a sequence: the vocabulary has 64"),
        (&long, "1 more pages are needed, and 0 can be had"),
    ];
    for (tokens, said) in rejected {
        let error = model.logits(&[Chunk { sequence, tokens }]).expect_err(said).to_string();
        assert_eq!(error, said);
    }
    let twice = [Chunk { sequence, tokens: &[1] }; 2];
    assert!(matches!(
        model.sample(&twice, &[Sampling::GREEDY; 2]),
        Err(ModelError::Cache(CacheError::UnknownSequence(_)))
    ));
    assert_eq!(model.num_tokens(sequence).expect("tokens"), 6);
    let rest = logits_in(&mut model, sequence, &text[6..], &[6]);
    assert_eq!(first_difference(&expected, &[first, rest].concat()), None);
}

/// Two sequences that decode together from their first token, a chunk of one of them, which moves
/// buffers under what is recorded, then decoding past the end of a page, and drafts: the logits
/// after each of their tokens, and the caches.
fn decoded(model: &mut Model<'_>) -> (Vec<Vec<f32>>, [Vec<u8>; 2]) {
    let texts = [text(5, 134), text(6, 17)];
    let sequences = [admitted(model), admitted(model)];
    let mut all = Vec::new();
    let mut feed = |model: &mut Model<'_>, parts: [std::ops::Range<usize>; 2]| {
        let fed = sequences.iter().zip(&texts).zip(parts);
        let fed = fed.filter(|(_, part)| !part.is_empty());
        let chunks: Vec<_> =
            fed.map(|((&sequence, text), part)| Chunk { sequence, tokens: &text[part] }).collect();
        all.extend(model.logits(&chunks).expect("logits").concat());
    };
    for at in 0..3 {
        feed(model, [at..at + 1, at..at + 1]);
    }
    feed(model, [3..122, 3..3]);
    for at in 0..8 {
        feed(model, [122 + at..123 + at, 3 + at..4 + at]);
    }
    for at in [0, 2] {
        feed(model, [130 + at..132 + at, 11 + at..13 + at]);
    }
    let caches = model.cache_contents().expect("caches");
    sequences.into_iter().for_each(|sequence| model.release(sequence).expect("released"));
    (all, caches)
}

#[test]
fn recorded_steps_have_the_bits_of_launched_ones() {
    let layers = [Window, Csa, Hca];
    let limits = Limits { step_tokens: 120, ..LIMITS };
    let (launched, caches) = decoded(&mut model(&layers, limits));
    let mut recording = model(&layers, limits);
    recording.record_steps(2);
    let (recorded, recorded_caches) = decoded(&mut recording);
    // A token of each with one page and with two, and two tokens of each.
    assert_eq!(recording.num_recorded(), usize::from(device().backend().recorder().is_some()) * 3);
    assert_eq!(first_difference(&launched, &recorded), None);
    assert!(caches == recorded_caches, "the caches differ");
    assert!(matches!(recording.repeat_step(), Ok(true)));
    assert!(recording.cache_contents().expect("caches") == caches, "a repeated step changes them");
}

/// The start of a measurement: rows of every layer kind that no prompt wrote.
#[test]
fn a_pretended_context_has_rows_for_every_layer() {
    let mut model = model(&[Window, Csa, Hca], LIMITS);
    let mut drawn = (1..).map(|at: u32| (f64::from(at) * 0.7).sin());
    let mut values = |count: usize| -> Vec<u8> {
        let bytes = drawn.by_ref().take(count).map(|x| half::bf16::from_f64(x).to_ne_bytes());
        bytes.flatten().collect()
    };
    let empty = model.cache_contents().expect("caches");
    model.fill_caches(&mut values).expect("rows");
    let filled = model.cache_contents().expect("caches");
    assert!(empty.iter().flatten().all(|&byte| byte == 0));
    assert!(filled.iter().all(|bytes| bytes.iter().filter(|&&byte| byte != 0).count() > 1000));
    let sequence = model.pretend(140).expect("a sequence");
    assert_eq!(model.num_tokens(sequence).expect("tokens"), 140);
    let long = logits_in(&mut model, sequence, &[5], &[1]);
    let short = logits(&mut model, &[5], &[1]);
    assert!(first_difference(&long, &short).is_some());
    let refused = model.pretend(5000).expect_err("no such position").to_string();
    assert_eq!(refused, "a sequence of 5000 tokens: the model has 4096 positions");
}

#[test]
fn other_weights_are_seen_by_recorded_steps_and_by_prefixes() {
    let (layers, limits) = ([Window, Csa], Limits { num_snapshots: 2, ..LIMITS });
    let config = sizes(&layers).config();
    let weights = |seed| random_weights(invariant_device(), &config, seed);
    let (prompt, sampling) = (text(7, 129), [Sampling::GREEDY]);
    let decode = |model: &mut Model<'_>| {
        let admitted = model.admit(&prompt).expect("a sequence");
        let sequence = admitted.sequence;
        let chunk = Chunk { sequence, tokens: &prompt[admitted.cached_tokens..] };
        model.sample(&[chunk], &sampling).expect("a token");
        let logits = logits_in(model, sequence, &prompt[..4], &[1; 4]);
        model.release(sequence).expect("released");
        (admitted.cached_tokens, logits)
    };
    let made = |seed| {
        let device = invariant_device();
        let made = Model::new(device, &config, weights(seed), limits, Implementation::Portable);
        let mut model = made.expect("a model");
        model.record_steps(2);
        model
    };
    let [(_, first), (_, second)] = [1, 2].map(|seed| decode(&mut made(seed)));
    assert!(first_difference(&first, &second).is_some());
    let mut model = made(1);
    assert_eq!(decode(&mut model), (0, first.clone()));
    assert_eq!(decode(&mut model), (128, first));
    let old = model.replace_weights(weights(2)).expect("the same shapes");
    assert_eq!(decode(&mut model), (0, second));
    // Neither weights of other shapes nor caches of other weights get in.
    let sequence = admitted(&mut model);
    let refused = model.replace_weights(old).err().expect("a sequence runs").to_string();
    assert_eq!(refused, "`sequences` is 1: it must be 0: release them first");
    model.release(sequence).expect("released");
    let wider = Sizes { num_experts: 4, ..sizes(&layers) }.config();
    let other = random_weights(invariant_device(), &wider, 1);
    let refused = model.replace_weights(other).err().expect("other shapes").to_string();
    assert!(refused.starts_with("`layer 0: "), "{refused}");
}

#[test]
fn a_sample_depends_on_its_seed_and_its_position_only() {
    let mut model = model(&[Window], LIMITS);
    let text = text(6, 8);
    let drawn = |model: &mut Model<'_>, seeds: &[u64]| -> Vec<u32> {
        let sequences: Vec<_> = seeds.iter().map(|_| admitted(model)).collect();
        let of = |&sequence| Chunk { sequence, tokens: &text };
        let chunks: Vec<_> = sequences.iter().map(of).collect();
        let of = |&seed| Sampling { temperature: 4.0, top_p: 1.0, seed };
        let sampling: Vec<_> = seeds.iter().map(of).collect();
        let tokens = model.sample(&chunks, &sampling).expect("tokens");
        sequences.into_iter().for_each(|sequence| model.release(sequence).expect("released"));
        tokens
    };
    let alone: Vec<u32> = (0..8).flat_map(|seed| drawn(&mut model, &[seed])).collect();
    let pairs: Vec<u32> =
        (0..8).step_by(2).flat_map(|seed| drawn(&mut model, &[seed + 1, seed])).collect();
    let exchanged: Vec<u32> = pairs.chunks(2).flat_map(|pair| [pair[1], pair[0]]).collect();
    assert_eq!(alone, exchanged);
    assert!(alone.iter().any(|token| *token != alone[0]), "{alone:?}");
    // Without temperature it is the largest logit.
    let all = logits(&mut model, &text, &[8]);
    let last = all.last().expect("logits");
    let largest = (0..VOCAB_SIZE).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("one");
    let sequence = admitted(&mut model);
    let chunk = Chunk { sequence, tokens: &text };
    let greedy = model.sample(&[chunk], &[Sampling::GREEDY]).expect("a token");
    assert_eq!(greedy, [largest as u32]);
}

#[test]
fn limits_that_no_model_has_are_refused_by_name() {
    let config = sizes(&[Window]).config();
    let folder = tempfile::tempdir().expect("a folder");
    random::write(folder.path(), &config, 1, &|_, _| {}).expect("a checkpoint");
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    for (limits, said) in [
        (Limits { step_tokens: 0, ..LIMITS }, "`step_tokens` is 0: it must be 1 to 127"),
        (Limits { step_tokens: 128, ..LIMITS }, "`step_tokens` is 128"),
        (Limits { num_pages: 0, ..LIMITS }, "`num_pages` is 0"),
        (Limits { num_sequences: 0, ..LIMITS }, "`num_sequences` is 0"),
    ] {
        let weights = Weights::load(device(), &checkpoint, &mut |_, _| {}).expect("weights");
        let made = Model::new(device(), &config, weights, limits, Implementation::Portable);
        let error = made.err().expect(said).to_string();
        assert!(error.starts_with(said), "{error}");
    }
}

#[test]
fn the_commands_write_a_model_and_generate_the_same_tokens_twice() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("tiny").display().to_string();
    let sizes = ["--hidden", "128", "--vocab", "64", "--experts", "3"];
    let write = ["checkpoint", "--layers", "window,csa,hca", "--out", &out];
    let written = Parity::new(&[&write[..], &sizes].concat()).run();
    assert_eq!(written.code, Some(0), "{}", written.stderr);
    let generate = |more: &[&str]| {
        let command =
            ["generate", "--model", &out, "--prompt-tokens", "1,2,3", "--max-tokens", "3"];
        Parity::new(&[&command[..], &["--backend", "emulator", "-q"], more].concat()).run()
    };
    let [first, again] = [generate(&["--ignore-eos"]), generate(&["--ignore-eos"])];
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert_eq!(first.stdout, again.stdout);
    let tokens: Vec<u32> =
        first.stdout.trim().split(',').map(|id| id.parse().expect("an id")).collect();
    assert!(tokens.len() == 3 && tokens.iter().all(|&token| token < 64), "{tokens:?}");
    // Greedy tokens of the oracle may differ where two logits are close.
    let compared = generate(&["--ignore-eos", "--reference"]);
    assert_eq!(compared.code, Some(0), "{}", compared.stderr);
    let (same, line) = compared.stdout.trim().split_once('\n').expect("two lines");
    assert_eq!(same, first.stdout.trim());
    assert!(line.starts_with("the oracle samples"), "{line}");
    for (more, said) in [
        (&["--chunk", "200"][..], "`step_tokens` is 200"),
        (&["--temperature", "NaN"], "--temperature is NaN"),
    ] {
        let output = generate(more);
        assert_eq!(output.code, Some(2), "{}", output.stdout);
        assert!(output.stderr.contains(said), "{}", output.stderr);
    }
}

/// A tensor of f64 on the CPU.
pub(crate) fn tensor(shape: &[usize], values: Vec<f64>) -> candle_core::Tensor {
    candle_core::Tensor::from_vec(values, shape, &candle_core::Device::Cpu).expect("a tensor")
}

/// The root of the mean square of a difference.
pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (squares / a.len() as f64).sqrt()
}

/// A bound that a further one of such numbers exceeds once in a million times.
pub(crate) fn beyond_one_more(numbers: &[f64]) -> f64 {
    let count = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / count;
    let squares: f64 = numbers.iter().map(|number| (number - mean) * (number - mean)).sum();
    let deviation = (squares / (count - 1.0)).sqrt();
    let student = StudentsT::new(0.0, 1.0, count - 1.0).expect("a distribution");
    mean + student.inverse_cdf(1.0 - 1e-6) * deviation * (1.0 + count.recip()).sqrt()
}

/// Each layer kind alone, and two layers, against the composition of all oracles. The kernels are one more run
/// whose roundings are not known: they may be no farther from the exact logits than one more of the
/// oracle's working runs would be.
#[test]
fn logits_are_those_of_the_composed_oracles_within_what_rounding_explains() {
    if left_out(&MODEL) {
        return;
    }
    const RUNS: u64 = 16;
    // Texts in which no rounding changes the choice of an expert: a choice that falls the other way
    // moves a run by more than all roundings.
    let (mxfp4, nvfp4) = (ExpertFormat::Mxfp4, ExpertFormat::Nvfp4);
    let cases: [(&[LayerKind], usize, u32, ExpertFormat); 5] = [
        (&[Window], 12, 7, mxfp4),
        (&[Csa], 18, 7, mxfp4),
        (&[Hca], 132, 7, mxfp4),
        (&[Window, Csa], 10, 14, mxfp4),
        (&[Window], 12, 7, nvfp4),
    ];
    for (layers, tokens, seed, expert_format) in cases {
        let config = Sizes { expert_format, ..sizes(layers) }.config();
        let weights = random_weights(device(), &config, 1);
        let oracle = reference::oracle(device(), &config, &weights, tokens).expect("an oracle");
        let text = text(seed, tokens);
        let ids = tensor(&[tokens], text.iter().map(|&id| f64::from(id)).collect());
        let run = |oracle: &oracle::Model, precision| -> Vec<f64> {
            let logits = oracle.logits(&ids, &mut Rounding::new(precision)).expect("logits");
            logits.flatten_all().and_then(|all| all.to_vec1()).expect("values")
        };
        let exact = run(&oracle, Precision::Exact);
        let working = (0..RUNS).map(|seed| run(&oracle, Precision::Working { seed }));
        let distances: Vec<f64> = working.map(|run| distance(&run, &exact)).collect();
        let allowed = beyond_one_more(&distances);
        let made = Model::new(device(), &config, weights, LIMITS, Implementation::Portable);
        let mut model = made.expect("a model");
        let steps = [tokens.min(20), tokens - tokens.min(20)];
        let steps: Vec<usize> = steps.into_iter().filter(|&count| count > 0).collect();
        let found: Vec<f64> =
            logits(&mut model, &text, &steps).concat().into_iter().map(f64::from).collect();
        let own = distance(&found, &exact);
        println!(
            "{layers:?} {expert_format:?}: kernels {own}, allowed {allowed}, working runs {distances:?}"
        );
        assert!(own <= allowed, "{layers:?}: {own} from the exact logits, allowed {allowed}");
        // A wrong number is seen.
        let changes: [fn(&mut oracle::Model); 3] = [
            |model| std::mem::swap(&mut model.main, &mut model.compress),
            |model| model.numbers.route_scale = 1.0,
            |model| model.numbers.window = 4,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut wrong = oracle.clone();
            change(&mut wrong);
            let away = distance(&found, &run(&wrong, Precision::Exact));
            assert!(away > allowed, "{layers:?}, change {number}: {away} within {allowed}");
        }
    }
}

/// What the oracle samples after the same tokens, and how far another token is behind.
#[test]
fn the_oracle_samples_its_own_tokens_and_reports_how_far_others_are_behind() {
    let config = sizes(&[Window]).config();
    let weights = random_weights(device(), &config, 1);
    let oracle = reference::oracle(device(), &config, &weights, 12).expect("an oracle");
    let prompt = text(9, 6);
    for sampling in [Sampling::GREEDY, Sampling { temperature: 3.0, top_p: 1.0, seed: 5 }] {
        let choices = |generated: &[u32]| -> Vec<Choice> {
            reference::choices(&oracle, &prompt, generated, sampling).expect("choices")
        };
        let mut own: Vec<u32> = Vec::new();
        for _ in 0..4 {
            let next = choices(&[&own[..], &[0]].concat());
            own.push(next.last().and_then(|choice| choice.reference).expect("a token"));
        }
        assert!(choices(&own).iter().all(|choice| choice.margin == 0.0), "{sampling:?}");
        let mut other = own.clone();
        other[2] = (other[2] + 1) % VOCAB_SIZE as u32;
        let found = choices(&other);
        let same = |at: usize| found[at].reference == Some(own[at]) && found[at].margin == 0.0;
        assert!(same(0) && same(1) && found[2].reference == Some(own[2]), "{found:?}");
        assert!(found[2].margin > 0.0, "{found:?}");
    }
    assert_eq!(reference::choices(&oracle, &prompt, &[], Sampling::GREEDY).expect("none"), []);
}
