//! Which operator of a whole model is to blame.

use std::collections::BTreeSet;
use std::path::Path;

use dsv4_kernels::cache::cache_layout::LayerKind::{self, Csa, Hca, Window};
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::config::ExpertFormat;
use dsv4_kernels::model::engine::{Chunk, Limits, Model, Sampling};
use dsv4_kernels::model::weights::Weights;
use dsv4_parity::blame::calls::{self, Called};
use dsv4_parity::blame::judge;
use dsv4_parity::blame::summary::Blame;
use dsv4_parity::model::random::{self, Sizes};
use dsv4_parity::mutants::planted::{self, Mutant};
use dsv4_runtime::Device;

use crate::command_line::{Parity, changed_kernels};
use crate::extent::left_out;
use crate::model::{LIMITS, sizes, text};
use crate::support::{device, fixtures};

/// Rooms whose changes run the long tests of this file.
const BLAME: [&str; 2] = ["src/blame/", "kernels/src/model/"];

/// A checkpoint of these layers with an MTP module.
fn checkpoint(layers: &[LayerKind]) -> (Checkpoint, tempfile::TempDir) {
    checkpoint_of(Sizes { num_mtp_layers: 1, ..sizes(layers) })
}

fn checkpoint_of(sizes: Sizes) -> (Checkpoint, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    random::write(folder.path(), &sizes.config(), 1, &|_, _| {}).expect("a checkpoint");
    (Checkpoint::open(folder.path()).expect("a checkpoint"), folder)
}

/// The calls of a chunk of a prompt, of a decoded token, and of a draft.
fn recorded(device: &Device, checkpoint: &Checkpoint) -> Result<Vec<Called>, String> {
    let run = || -> Result<Vec<Called>, Box<dyn std::error::Error>> {
        let weights = Weights::load(device, checkpoint, &mut |_, _| {})?;
        let limits = Limits { drafts: true, num_sequences: 1, ..LIMITS };
        let config = checkpoint.config();
        let mut model = Model::new(device, config, weights, limits, Implementation::Portable)?;
        let (tap, calls) = calls::recorder(config);
        model.set_tap(Some(tap));
        let prompt = text(1, 9);
        let sequence = model.admit(&prompt)?.sequence;
        let sampling = [Sampling { temperature: 2.0, top_p: 1.0, seed: 5 }];
        let next = model.sample(&[Chunk { sequence, tokens: &prompt }], &sampling)?;
        let chunk = Chunk { sequence, tokens: &next };
        model.draft(&[chunk], 1, &sampling)?;
        model.set_tap(None);
        Ok(calls.take())
    };
    run().map_err(|error| error.to_string())
}

#[test]
fn every_call_of_a_right_model_is_within_its_own_budget_and_errors_grow() {
    let layers: &[LayerKind] = if left_out(&BLAME) { &[Csa] } else { &[Window, Csa, Hca] };
    let (checkpoint, _folder) = checkpoint(layers);
    let calls = recorded(device(), &checkpoint).expect("calls");
    // Each operator of the path has a bug.
    let operators: BTreeSet<String> =
        calls.iter().map(|call| call.place.operator.to_string()).collect();
    assert_eq!(operators, bugs().into_iter().map(|(_, operator)| operator).collect());
    let (run, num_layers) = (String::new(), Some(layers.len()));
    let blame = Blame { run, num_layers, findings: judge::all(&calls) };
    let skipped: Vec<_> = blame.skipped().collect();
    assert!(skipped.is_empty(), "{skipped:#?}");
    assert!(blame.first().is_none(), "{:#?}", blame.first());
    let growth = blame.growth();
    assert_eq!(growth.len(), layers.len() + 1, "{growth:?}");
    // The error grows from layer to layer, and a layer's last call adds a small part of it.
    let main = &growth[..layers.len()];
    assert!(main.windows(2).all(|pair| pair[0].total < pair[1].total), "{growth:?}");
    assert!(growth.iter().all(|of| 0.0 < of.added && 2.0 * of.added < of.total), "{growth:?}");
    // The first layer inherits nothing before anything was rounded.
    let first = blame.findings.iter().find(|finding| finding.place.operator == "mhc_mix");
    assert!(first.expect("a mix").errors.iter().all(|error| error.inherited == 0.0));
}

#[test]
fn every_call_of_a_model_with_nvfp4_experts_is_within_its_own_budget() {
    let sizes = Sizes { expert_format: ExpertFormat::Nvfp4, ..sizes(&[Window]) };
    let (checkpoint, _folder) = checkpoint_of(Sizes { num_mtp_layers: 1, ..sizes });
    let calls = recorded(device(), &checkpoint).expect("calls");
    let of = |name: &str| {
        calls
            .iter()
            .filter(|call| call.place.operator == name && call.place.layer == Some(0))
            .count()
    };
    // A chunk and a decoded token: two quantized rows and three products each.
    assert_eq!(["quantize_nvfp4", "swiglu", "grouped_linear"].map(of), [2, 1, 3]);
    let blame = Blame { run: String::new(), num_layers: Some(1), findings: judge::all(&calls) };
    let skipped: Vec<_> = blame.skipped().collect();
    assert!(skipped.is_empty(), "{skipped:#?}");
    assert!(blame.first().is_none(), "{:#?}", blame.first());
}

/// Bugs of kernels of the path, each with the operator to blame.
fn bugs() -> Vec<(Mutant, String)> {
    let mutants = planted::load(&fixtures().join("mutants")).expect("mutants");
    let blamed = |mutant: Mutant| mutant.blamed.clone().map(|operator| (mutant, operator));
    mutants.into_iter().filter_map(blamed).collect()
}

/// How many of them a commit tries that changed nothing here.
const FEW: usize = 2;

#[test]
fn a_bug_of_a_kernel_of_the_path_is_blamed_on_its_operator() {
    let (checkpoint, _folder) = checkpoint(&[Csa]);
    let bugs = bugs();
    let tried = if left_out(&BLAME) { FEW } else { bugs.len() };
    for (mutant, operator) in &bugs[..tried] {
        let planted = mutant.plant(device().tree()).expect("a tree");
        let calls = recorded(&device().with_tree(planted), &checkpoint).expect("calls");
        let found = judge::first(&calls).map(|found| found.place.operator);
        assert_eq!(found.as_deref(), Some(operator.as_str()), "{}", mutant.id);
    }
}

#[test]
fn the_command_names_a_bug_writes_a_page_and_reads_what_it_saved() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (tiny, saved, other, page) = (path("tiny"), path("saved"), path("other"), path("page"));
    let config = sizes(&[Window]).config();
    random::write(Path::new(&tiny), &config, 1, &|_, _| {}).expect("a checkpoint");
    let blame = |more: &[&str]| Parity::new(&[&["blame"], more].concat()).run();
    let run = ["--model", &tiny, "--prompt-tokens", "1,2,3", "--max-tokens", "1"];
    let run = [&run[..], &["--backend", "emulator"]].concat();
    let right = blame(&[&run[..], &["--save", &saved]].concat());
    right.assert_code(0);
    assert!(right.stdout.starts_with("every call is within its own budget"), "{}", right.stdout);
    assert!(right.stdout.lines().all(|line| line.chars().count() <= 80), "{}", right.stdout);
    let kernels = changed_kernels(folder.path(), "rms_norm.cu", "(width) + eps", "(width) + 1.0f");
    let kernels = kernels.display().to_string();
    let more = ["--kernels", &kernels, "--out", &page, "--save", &other];
    let wrong = blame(&[&run[..], &more].concat());
    wrong.assert_code(1);
    let said = "first outside its own budget: rms_norm attn_norm of layer 0, call 3";
    assert!(wrong.stdout.starts_with(said), "{}", wrong.stdout);
    let html = std::fs::read_to_string(Path::new(&page).join("index.html")).expect("a page");
    assert!(html.contains("first outside its own budget"));
    let numbers = std::fs::read(Path::new(&page).join("blame.json")).expect("numbers");
    let numbers: serde_json::Value = serde_json::from_slice(&numbers).expect("JSON");
    assert_eq!(numbers["findings"][3]["operator"], "rms_norm");
    // What was saved is judged in the same way, without the run.
    blame(&["--dump", &saved]).assert_code(0);
    let again = blame(&["--dump", &other]);
    again.assert_code(1);
    assert!(again.stdout.starts_with(said), "{}", again.stdout);
    let apart = blame(&["--dump", &saved, "--against", &other]);
    apart.assert_code(1);
    let said = "the runs part at rms_norm attn_norm of layer 0, call 3";
    assert!(apart.stdout.starts_with(said), "{}", apart.stdout);
    blame(&["--dump", &saved, "--against", &saved]).assert_code(0);
    blame(&["--dump", &page]).assert_bad_input(&["no file of tensors"]);
    let broken = Path::new(&saved).join("calls.json");
    std::fs::write(broken, "{").expect("written");
    blame(&["--dump", &saved]).assert_bad_input(&["calls.json"]);
}
