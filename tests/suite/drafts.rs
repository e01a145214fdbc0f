//! Draft tokens of the MTP module: what is accepted, and that what is rejected leaves no trace.

use dsv4_kernels::cache::cache_layout::LayerKind::{Csa, Hca, Window};
use dsv4_kernels::cache::cache_manager::SequenceId;
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::engine::{Chunk, Limits, Model, Sampling};
use dsv4_kernels::model::weights::Weights;
use dsv4_parity::model::random::{self, Sizes};
use dsv4_parity::model::reference;
use dsv4_reference::{Precision, Rounding};

use crate::extent::left_out;
use crate::model::{
    LIMITS, VOCAB_SIZE, admitted, beyond_one_more, distance, first_difference, logits, logits_in,
    model, sizes, tensor, text,
};
use crate::support::device;

/// Rooms whose changes run the long tests of this file.
const DRAFTS: [&str; 3] = ["kernels/src/model/", "kernels/src/cache/", "reference/src/model.rs"];

const DRAFTING: Limits = Limits { drafts: true, ..LIMITS };

/// A text and the tokens that the model samples after it, one by one.
fn continued(model: &mut Model<'_>, prompt: &[u32], count: usize) -> Vec<u32> {
    let sequence = admitted(model);
    let (mut all, mut next) = (prompt.to_vec(), prompt.to_vec());
    for _ in 0..count {
        let chunk = Chunk { sequence, tokens: &next };
        next = model.sample(&[chunk], &[Sampling::GREEDY]).expect("a token");
        all.extend(&next);
    }
    model.release(sequence).expect("released");
    all
}

/// A token that is not this one.
fn other(token: u32) -> u32 {
    (token + 1) % VOCAB_SIZE as u32
}

/// `text[from .. from + kept]` and `wrong` drafts that the model does not sample.
fn proposed(text: &[u32], from: usize, kept: usize, wrong: usize) -> Vec<u32> {
    let rejected = (0..wrong).map(|at| other(text[from + kept + at]));
    text[from..from + kept].iter().copied().chain(rejected).collect()
}

/// Feeds these, of which all but the wrong ones are kept.
fn verified(
    model: &mut Model<'_>,
    sequence: SequenceId,
    text: &[u32],
    (from, kept, wrong): (usize, usize, usize),
) {
    let tokens = proposed(text, from, kept, wrong);
    let found = model.verify(&[Chunk { sequence, tokens: &tokens }], &[Sampling::GREEDY]);
    assert_eq!(found.expect("tokens"), [&text[from + 1..=from + kept]], "{from}, {kept}, {wrong}");
}

#[test]
fn tokens_with_drafts_are_those_without() {
    let drawn = Sampling { temperature: 2.0, top_p: 0.9, seed: 3 };
    for (sampling, most) in [(Sampling::GREEDY, 3), (drawn, 1)] {
        let mut model = model(&[Csa], DRAFTING);
        let prompt = text(1, 9);
        let mut found = Vec::new();
        for count in [0, most] {
            let sequence = admitted(&mut model);
            let chunk = Chunk { sequence, tokens: &prompt };
            let mut tokens = model.sample(&[chunk], &[sampling]).expect("a token");
            while tokens.len() < 6 {
                let mut next = tokens[tokens.len() - 1..].to_vec();
                let chunk = Chunk { sequence, tokens: &next };
                next.extend(model.draft(&[chunk], count, &[sampling]).expect("drafts").remove(0));
                assert_eq!(next.len(), 1 + count);
                let chunk = Chunk { sequence, tokens: &next };
                tokens.extend(model.verify(&[chunk], &[sampling]).expect("tokens").remove(0));
            }
            tokens.truncate(6);
            found.push(tokens);
            model.release(sequence).expect("released");
        }
        assert!(found.iter().all(|tokens| *tokens == found[0]), "{sampling:?}: {found:?}");
    }
}

#[test]
fn rejected_drafts_leave_no_trace_in_any_cache() {
    if left_out(&DRAFTS) {
        return;
    }
    let layers = [Window, Csa, Hca];
    let text = continued(&mut model(&layers, DRAFTING), &text(2, 6), 20);
    // Tokens one by one, or with that many rejected drafts.
    let run = |wrong: Option<usize>| {
        let mut model = model(&layers, DRAFTING);
        let sequence = admitted(&mut model);
        logits_in(&mut model, sequence, &text[..6], &[6]);
        if let Some(wrong) = wrong {
            verified(&mut model, sequence, &text, (6, 1, wrong));
            verified(&mut model, sequence, &text, (7, 4, wrong));
            // Rows of the rejected drafts are written again.
            verified(&mut model, sequence, &text, (11, 7, 0));
        } else {
            logits_in(&mut model, sequence, &text[6..18], &[1; 12]);
        }
        let contents = model.cache_contents().expect("contents");
        let drafted = model.draft_logits(&[Chunk { sequence, tokens: &text[18..19] }]);
        let rest = logits_in(&mut model, sequence, &text[18..24], &[6]);
        (contents, rest, drafted.expect("logits"))
    };
    let clean = run(None);
    for found in [0, 1, 3].map(|wrong| run(Some(wrong))) {
        assert_eq!(first_difference(&clean.1, &found.1), None);
        assert!(clean.0 == found.0, "pages or states differ");
        assert_eq!(clean.2, found.2);
    }
}

/// Where drafts start, how many tokens their step has, and how many of these are kept.
type At = (usize, usize, usize);

/// Each sequence of a batch starts, accepts and rejects elsewhere.
#[test]
fn every_number_of_drafts_is_rejected_at_every_place_of_a_group() {
    if left_out(&DRAFTS) {
        return;
    }
    let places = (4..8).flat_map(|start| (2..=4).map(move |step| (start, step)));
    let places = places.flat_map(|(start, step)| (1..=step).map(move |kept| (start, step, kept)));
    let places: Vec<At> = places.collect();
    let limits = Limits { num_sequences: places.len(), num_pages: places.len(), ..LIMITS };
    let mut model = model(&[Csa], limits);
    let text = continued(&mut model, &text(3, 4), 12);
    let whole = logits(&mut model, &text, &[16]);
    let sequences: Vec<SequenceId> = places.iter().map(|_| admitted(&mut model)).collect();
    let fed = |model: &mut Model<'_>, of: &dyn Fn(&At) -> Vec<u32>| {
        let tokens: Vec<Vec<u32>> = places.iter().map(of).collect();
        let chunks: Vec<Chunk<'_>> = sequences
            .iter()
            .zip(&tokens)
            .map(|(&sequence, tokens)| Chunk { sequence, tokens })
            .collect();
        model.logits(&chunks).expect("logits")
    };
    fed(&mut model, &|&(start, ..)| text[..start].to_vec());
    let tokens: Vec<Vec<u32>> = places
        .iter()
        .map(|&(start, step, kept)| proposed(&text, start, kept, step - kept))
        .collect();
    let chunks = sequences.iter().zip(&tokens);
    let chunks: Vec<Chunk<'_>> =
        chunks.map(|(&sequence, tokens)| Chunk { sequence, tokens }).collect();
    let sampling = vec![Sampling::GREEDY; chunks.len()];
    let found = model.verify(&chunks, &sampling).expect("tokens");
    for (found, &(start, step, kept)) in found.iter().zip(&places) {
        assert_eq!(found, &text[start + 1..=start + kept], "{start}, {kept} of {step}");
    }
    let rest = fed(&mut model, &|&(start, _, kept)| text[start + kept..].to_vec());
    for (found, &(start, step, kept)) in rest.iter().zip(&places) {
        let expected = &whole[start + kept..];
        let place = format!("start {start}, {kept} of {step} kept");
        assert_eq!(first_difference(expected, found), None, "{place}");
    }
}

#[test]
fn calls_that_no_draft_module_can_answer_are_rejected_by_name() {
    let mut model = model(&[Window], DRAFTING);
    let sequence = admitted(&mut model);
    let draft = |model: &mut Model<'_>, tokens: &[u32], count| {
        let chunk = Chunk { sequence, tokens };
        let drafted = model.draft(&[chunk], count, &[Sampling::GREEDY]);
        drafted.map(|_| String::new()).unwrap_or_else(|error| error.to_string())
    };
    assert_eq!(draft(&mut model, &[1], 1), "there are no tokens");
    logits_in(&mut model, sequence, &text(4, 5), &[5]);
    assert!(draft(&mut model, &[1, 2], 1).starts_with("`tokens` is 2"));
    assert!(draft(&mut model, &[1], 32).starts_with("`drafts` is 32"));
    assert!(draft(&mut model, &[64], 1).starts_with("token 64 of a sequence"));
    assert_eq!(draft(&mut model, &[1], 1), "");
    assert_eq!(model.num_tokens(sequence).expect("tokens"), 5);
    let long = Chunk { sequence, tokens: &text(4, 33) };
    let error = model.verify(&[long], &[Sampling::GREEDY]).expect_err("too long").to_string();
    assert!(error.starts_with("`tokens` is 33"), "{error}");
    let mut without = crate::model::model(&[Window], LIMITS);
    let sequence = admitted(&mut without);
    let chunk = Chunk { sequence, tokens: &[1] };
    let error = without.draft(&[chunk], 1, &[Sampling::GREEDY]).expect_err("no module").to_string();
    assert!(error.contains("made without its MTP module"), "{error}");
}

/// As the main model's logits: no farther from the exact ones than one more working run.
#[test]
fn logits_of_the_module_are_those_of_the_composed_oracles() {
    if left_out(&DRAFTS) {
        return;
    }
    const RUNS: u64 = 16;
    let sizes = Sizes { num_mtp_layers: 1, ..sizes(&[Window]) };
    let (config, folder) = (sizes.config(), tempfile::tempdir().expect("a folder"));
    random::write(folder.path(), &config, 1, &|_, _| {}).expect("a checkpoint");
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    let weights = Weights::load(device(), &checkpoint, &mut |_, _| {}).expect("weights");
    let text = text(7, 11);
    let oracle = reference::oracle(device(), &config, &weights, text.len()).expect("an oracle");
    let ids = |text: &[u32]| tensor(&[text.len()], text.iter().map(|&id| f64::from(id)).collect());
    let run = |text: &[u32], precision| -> Vec<f64> {
        let rounding = &mut Rounding::new(precision);
        let all = oracle.draft_logits(&ids(text), rounding).expect("logits");
        all.flatten_all().and_then(|all| all.to_vec1()).expect("values")
    };
    let exact = run(&text, Precision::Exact);
    let working = (0..RUNS).map(|seed| run(&text, Precision::Working { seed }));
    let distances: Vec<f64> = working.map(|run| distance(&run, &exact)).collect();
    let allowed = beyond_one_more(&distances);
    let made = Model::new(device(), &config, weights, DRAFTING, Implementation::Portable);
    let mut model = made.expect("a model");
    let sequence = admitted(&mut model);
    let mut found = Vec::new();
    // The module reads the token after the last one, which the sequence gets then.
    for next in 1..text.len() {
        logits_in(&mut model, sequence, &text[next - 1..next], &[1]);
        let chunk = Chunk { sequence, tokens: &text[next..=next] };
        found.extend(model.draft_logits(&[chunk]).expect("logits").remove(0));
    }
    let found: Vec<f64> = found.into_iter().map(f64::from).collect();
    let own = distance(&found, &exact);
    println!("kernels {own}, allowed {allowed}, working runs {distances:?}");
    assert!(own <= allowed, "{own} from the exact logits, allowed {allowed}");
    // A module that is fed the token of its own position is seen.
    let mut shifted = text.clone();
    shifted.insert(0, text[0]);
    let shifted = run(&shifted[..text.len()], Precision::Exact);
    assert!(distance(&found, &shifted) > allowed);
}
