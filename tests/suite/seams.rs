//! Faults in the seams of a whole model, planted by a tap: each must break the law that is there to
//! see it. A tap runs in the place of every launch. It writes to what a launch reads, or does not
//! run it.

use dsv4_kernels::cache::cache_layout::LayerKind::{self, Csa, Window};
use dsv4_kernels::implementation::Implementation;
use dsv4_kernels::model::checkpoint::Checkpoint;
use dsv4_kernels::model::config::ExpertFormat;
use dsv4_kernels::model::engine::{Chunk, Limits, Model, Sampling};
use dsv4_kernels::model::tap::{Site, Tap};
use dsv4_kernels::model::weights::Weights;
use dsv4_parity::model::random::{self, Sizes};
use dsv4_runtime::{Device, Result, TensorView, Views};

use crate::extent::left_out;
use crate::model::{LIMITS, admitted, first_difference, logits_in, model, sizes, text};
use crate::support::device;

/// Rooms whose changes run the tests of this file.
const SEAMS: [&str; 1] = ["kernels/src/model/"];

/// What a fault does to a launch; returns whether the launch runs.
type Fault = fn(&Device, Site<'_>) -> Result<bool>;

struct Planted(Fault);

impl Tap for Planted {
    fn around(
        &mut self,
        device: &Device,
        site: Site<'_>,
        run: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if (self.0)(device, site)? { run() } else { Ok(()) }
    }
}

/// The numbers of a list.
fn list(device: &Device, view: &TensorView) -> Result<Vec<i32>> {
    let mut bytes = vec![0; view.elements() * 4];
    device.backend().download(view.address, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)).collect())
}

fn write(device: &Device, view: &TensorView, numbers: &[i32]) -> Result<()> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    device.backend().upload(view.address, &bytes)
}

/// Changes the list that a launch of an operator reads.
fn changed(
    device: &Device,
    site: Site<'_>,
    (operator, name): (&str, &str),
    change: impl Fn(&mut [i32]),
) -> Result<bool> {
    if let Some(view) = site.views.get(name).filter(|_| site.operator == operator) {
        let mut numbers = list(device, view)?;
        change(&mut numbers);
        write(device, view, &numbers)?;
    }
    Ok(true)
}

const DRAFTING: Limits = Limits { drafts: true, ..LIMITS };

/// The logits of a text in two chunks, the second one with a fault.
fn in_two_chunks(layers: &[LayerKind], fault: Option<Fault>) -> Vec<Vec<f32>> {
    let mut model = model(layers, LIMITS);
    let (sequence, text) = (admitted(&mut model), text(1, 20));
    let mut all = logits_in(&mut model, sequence, &text[..9], &[9]);
    model.set_tap(fault.map(|fault| Box::new(Planted(fault)) as Box<dyn Tap>));
    all.extend(logits_in(&mut model, sequence, &text[9..], &[11]));
    all
}

/// FM-09, FM-61 and FM-147 of a model: positions, the compressor's tail, and the entries of earlier
/// chunks.
#[test]
fn faults_between_two_chunks_change_the_logits_of_the_second() {
    if left_out(&SEAMS) {
        return;
    }
    let right = in_two_chunks(&[Csa], None);
    let faults: [(&str, Fault); 4] = [
        ("positions start at 0 again", |device, site| {
            changed(device, site, ("query_norm_rope", "positions"), |positions| {
                let first = positions[0];
                positions.iter_mut().for_each(|position| *position -= first);
            })
        }),
        ("the compressor forgets the tokens of the last chunk", |device, site| {
            changed(device, site, ("compressor_stream", "first_positions"), |first| first.fill(0))
        }),
        ("the indexer sees the entries of this chunk only", |device, site| {
            changed(device, site, ("indexer_logits", "context_lens"), |lengths| {
                lengths.iter_mut().for_each(|length| *length = (*length - 2).max(0));
            })
        }),
        ("the window of another token", |device, site| {
            changed(device, site, ("decode_attention", "window_indices"), |rows| {
                rows.iter_mut().filter(|row| **row > 0).for_each(|row| *row -= 1);
            })
        }),
    ];
    for (name, fault) in faults {
        let found = in_two_chunks(&[Csa], Some(fault));
        let at = first_difference(&right, &found);
        assert!(at.is_some_and(|at| at >= 9), "{name}: {at:?}");
    }
}

/// What a sequence answers after rejected drafts, with a fault from their step on.
fn after_rejection(fault: Option<Fault>) -> ([Vec<u8>; 2], Vec<Vec<f32>>) {
    let mut model = model(&[Csa], DRAFTING);
    let (sequence, text) = (admitted(&mut model), text(2, 24));
    logits_in(&mut model, sequence, &text[..7], &[7]);
    // A draft that no model samples: all are rejected.
    let rejected = [&text[7..8], &[63, 62, 61, 60, 59]].concat();
    let chunk = Chunk { sequence, tokens: &rejected };
    let found = model.verify(&[chunk], &[Sampling::GREEDY]).expect("tokens");
    assert_eq!(found[0].len(), 1, "a draft was accepted");
    model.set_tap(fault.map(|fault| Box::new(Planted(fault)) as Box<dyn Tap>));
    let rest = logits_in(&mut model, sequence, &text[8..20], &[12]);
    (model.cache_contents().expect("contents"), rest)
}

/// FM-148 of a model: entries, keys and rows of rejected drafts that stay.
#[test]
fn what_rejected_drafts_leave_behind_is_seen() {
    if left_out(&SEAMS) {
        return;
    }
    let right = after_rejection(None);
    let faults: [(&str, Fault); 3] = [
        ("keys of the indexer stay", |_, site| Ok(site.operator != "indexer_cache_write")),
        ("entries stay", |_, site| Ok(site.operator != "kv_cache_write")),
        ("rows of the window stay", |device, site| {
            changed(device, site, ("kv_norm_rope_write", "slots"), |slots| slots[..4].fill(-1))
        }),
    ];
    for (name, fault) in faults {
        let found = after_rejection(Some(fault));
        assert!(found.0 != right.0, "{name}: the caches are the same");
        // All entries are chosen of a short text, whatever their keys are.
        let same = first_difference(&right.1, &found.1).is_none();
        assert_eq!(same, name.starts_with("keys"), "{name}");
    }
}

/// The logits of a draft, with a fault.
fn drafted(fault: Option<Fault>) -> Vec<Vec<f32>> {
    let mut model = model(&[Window], DRAFTING);
    model.set_tap(fault.map(|fault| Box::new(Planted(fault)) as Box<dyn Tap>));
    let (sequence, text) = (admitted(&mut model), text(3, 9));
    logits_in(&mut model, sequence, &text[..8], &[8]);
    model.draft_logits(&[Chunk { sequence, tokens: &text[8..] }]).expect("logits")
}

/// The last token of the text that [`drafted`] feeds.
fn last_fed() -> i32 {
    text(3, 9)[7] as i32
}

/// FM-173, FM-174.
#[test]
fn faults_of_the_draft_module_change_its_logits() {
    if left_out(&SEAMS) {
        return;
    }
    let right = drafted(None);
    let faults: [(&str, Fault); 3] = [
        ("the token of its own position", |device, site| {
            if site.layer != Some(1) {
                return Ok(true);
            }
            changed(device, site, ("embed_streams", "token_ids"), |ids| {
                if let [id] = ids {
                    *id = last_fed();
                }
            })
        }),
        ("the position of the token that it reads", |device, site| {
            if site.layer != Some(1) {
                return Ok(true);
            }
            changed(device, site, ("query_norm_rope", "positions"), |positions| {
                positions.iter_mut().for_each(|position| *position += 1);
            })
        }),
        ("no window of earlier tokens", |_, site| {
            let rows = site.views.get("slots").map_or(0, TensorView::elements);
            let is_window = site.layer == Some(1) && site.operator == "kv_norm_rope_write";
            Ok(!is_window || rows == 1)
        }),
    ];
    for (name, fault) in faults {
        assert_ne!(right, drafted(Some(fault)), "{name}");
    }
}

/// Tokens that two sequences sample together and each alone, with a fault of the sampler.
fn sampled(fault: Option<Fault>) -> [Vec<u32>; 2] {
    let mut model = model(&[Window], LIMITS);
    model.set_tap(fault.map(|fault| Box::new(Planted(fault)) as Box<dyn Tap>));
    let texts = [text(4, 6), text(5, 9)];
    let sampling = Sampling { temperature: 8.0, top_p: 1.0, seed: 7 };
    let alone = texts.iter().map(|text| {
        let sequence = admitted(&mut model);
        let chunk = Chunk { sequence, tokens: text };
        let token = model.sample(&[chunk], &[sampling]).expect("a token")[0];
        model.release(sequence).expect("released");
        token
    });
    let alone = alone.collect();
    let sequences = [0; 2].map(|_| admitted(&mut model));
    let of = |(&sequence, tokens): (&_, _)| Chunk { sequence, tokens };
    let chunks: Vec<Chunk<'_>> =
        sequences.iter().zip(texts.iter().map(Vec::as_slice)).map(of).collect();
    [alone, model.sample(&chunks, &[sampling; 2]).expect("tokens")]
}

/// FM-175: a counter of each slot in the place of each request's position.
#[test]
fn a_counter_of_the_sampler_for_each_slot_is_seen() {
    let [alone, together] = sampled(None);
    assert_eq!(alone, together);
    let by_slot: Fault = |device, site| {
        if let Some(view) = site.views.get("step").filter(|_| site.operator == "sampler") {
            let steps: Vec<u8> = (0..view.elements() as u64).flat_map(u64::to_ne_bytes).collect();
            device.backend().upload(view.address, &steps)?;
        }
        Ok(true)
    };
    let [alone, together] = sampled(Some(by_slot));
    assert_ne!(alone, together);
}

/// The logits of a model whose weights were changed after they were loaded.
fn of_weights(change: fn(&mut Vec<Views>)) -> Vec<Vec<f32>> {
    of_weights_in(ExpertFormat::Mxfp4, change)
}

/// The same of a model with experts of this format.
fn of_weights_in(expert_format: ExpertFormat, change: fn(&mut Vec<Views>)) -> Vec<Vec<f32>> {
    let sizes = Sizes { num_hash_layers: 0, expert_format, ..sizes(&[Window]) };
    let (config, folder) = (sizes.config(), tempfile::tempdir().expect("a folder"));
    random::write(folder.path(), &config, 1, &|_, _| {}).expect("a checkpoint");
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    let mut weights = Weights::load(device(), &checkpoint, &mut |_, _| {}).expect("weights");
    change(&mut weights.layers);
    let mut model =
        Model::new(device(), &config, weights, LIMITS, Implementation::Portable).expect("a model");
    let sequence = admitted(&mut model);
    logits_in(&mut model, sequence, &text(6, 8), &[8])
}

/// FM-116: one scale for gate and up, which each have their own, and one of another product's inputs.
#[test]
fn scales_of_nvfp4_experts_that_a_loader_confuses_change_the_logits() {
    if left_out(&SEAMS) {
        return;
    }
    let of = |change| of_weights_in(ExpertFormat::Nvfp4, change);
    let right = of(|_| {});
    let changes: [fn(&mut Vec<Views>); 3] = [
        |layers| {
            let gate = layers[0]["w1_global_scale"].clone();
            layers[0].put("w3_global_scale", gate);
        },
        |layers| {
            let up = layers[0]["w3"].clone();
            let gate = layers[0]["w1"].clone();
            layers[0].put("w1", up);
            layers[0].put("w3", gate);
        },
        |layers| {
            let down = layers[0]["w2_input_scale"].clone();
            layers[0].put("w13_input_scale", down);
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        assert!(first_difference(&right, &of(change)).is_some(), "change {number}");
    }
}

/// FM-176: a loader that swaps gate and up, and one that takes another layer's norm.
#[test]
fn weights_that_a_loader_confuses_change_the_logits() {
    if left_out(&SEAMS) {
        return;
    }
    let right = of_weights(|_| {});
    assert_eq!(first_difference(&right, &of_weights(|_| {})), None);
    let swapped = of_weights(|layers| {
        for name in ["shared_w13", "shared_w13_scales"] {
            let view = layers[0][name].clone();
            let rows = view.shape[0] / 2;
            // Two halves of one matrix: gate's rows come first.
            let bytes = rows * view.strides[0] as usize * view.dtype.size();
            let mut both = vec![0; 2 * bytes];
            let backend = device().backend();
            backend.download(view.address, &mut both).expect("bytes");
            both.rotate_left(bytes);
            let copy = backend.allocate(name, both.len(), dsv4_runtime::Placement::FlushBack);
            let copy = copy.expect("memory");
            backend.upload(copy.address, &both).expect("uploaded");
            layers[0].put(name, TensorView { address: copy.address, ..view });
        }
    });
    assert!(first_difference(&right, &swapped).is_some(), "gate and up are the same");
    let confused = of_weights(|layers| {
        let norm = layers[0]["ffn_norm"].clone();
        layers[0].put("attn_norm", norm);
    });
    assert!(first_difference(&right, &confused).is_some(), "both norms are the same");
}
