//! Random checkpoints: what `parity checkpoint` writes, what the loader rejects, and what reaches
//! the device.

use std::fs;
use std::path::Path;

use dsv4_kernels::cache::cache_layout::LayerKind::{Csa, Hca, Window};
use dsv4_kernels::model::checkpoint::tensors::{LayerId, all};
use dsv4_kernels::model::checkpoint::{Checkpoint, INDEX};
use dsv4_kernels::model::config::{Config, ExpertFormat, FILE};
use dsv4_kernels::model::weights::Weights;
use dsv4_parity::model::random::{self, RandomError, Sizes};
use dsv4_reference::Named;
use dsv4_reference::formats::quantize_fp8::{self, Group};
use dsv4_reference::formats::scale_layout::ScaleLayout;
use dsv4_reference::quantize::ScaleType;
use dsv4_runtime::{HostTensor, TensorView};

use crate::command_line::Parity;
use crate::support::device;

/// All kinds of layers, a hashed router, and an MTP module.
fn small() -> Config {
    Sizes {
        layers: vec![Window, Csa, Hca, Csa],
        hidden_size: 128,
        vocab_size: 64,
        num_experts: 3,
        topk: 2,
        num_hash_layers: 1,
        num_mtp_layers: 1,
        expert_format: ExpertFormat::Mxfp4,
    }
    .config()
}

fn written(config: &Config, seed: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    random::write(folder.path(), config, seed, &|_, _| {}).expect("a checkpoint");
    folder
}

/// Names and bytes of the files of a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("one").path());
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, fs::read(&path).expect("a file"))
    };
    let mut all: Vec<_> = entries.map(read).collect();
    all.sort();
    all
}

#[test]
fn the_same_seed_writes_the_same_bytes_and_another_seed_others() {
    let config = small();
    let [first, again, other] = [1, 1, 2].map(|seed| files(written(&config, seed).path()));
    assert_eq!(first.len(), 2 + 1 + 4 + 1, "config, index, and a shard for each part");
    assert!(first == again, "the same seed");
    for ((name, bytes), (_, others)) in first.iter().zip(&other) {
        let same = [FILE, INDEX].contains(&name.as_str());
        assert_eq!(bytes == others, same, "{name}");
    }
}

#[test]
fn a_written_checkpoint_has_what_its_configuration_says() {
    let (config, folder) = (small(), written(&small(), 3));
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    assert_eq!(checkpoint.config(), &config);
    let (mut tensors, mut zeros) = (0, Vec::new());
    for spec in all(&config) {
        tensors += 1;
        let bytes = checkpoint.bytes(&spec.name);
        assert_eq!(bytes.len(), spec.bytes(), "{}", spec.name);
        // A scale is not enough to tell whether anything was drawn.
        if bytes.len() > 64 && bytes.iter().all(|byte| *byte == bytes[0]) {
            zeros.push(spec.name);
        }
    }
    assert!(tensors > 150 && zeros.is_empty(), "{tensors} tensors, constant: {zeros:?}");
}

#[test]
fn a_folder_with_files_is_left_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("precious"), "data").expect("a file");
    let refused = random::write(folder.path(), &small(), 1, &|_, _| {});
    assert!(matches!(refused, Err(RandomError::NotEmpty(_))));
    assert_eq!(files(folder.path()), [("precious".to_owned(), b"data".to_vec())]);
}

#[test]
fn the_command_writes_a_checkpoint_and_checks_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("tiny").display().to_string();
    let sizes = ["--hidden", "128", "--vocab", "64", "--experts", "3", "--seed", "5"];
    let write = || {
        let command = ["checkpoint", "--layers", "window,csa,hca,csa", "--out", &out];
        Parity::new(&[&command[..], &sizes].concat()).run()
    };
    let output = write();
    assert_eq!(output.code, Some(0), "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("layers.1: csa, learned router"), "{}", output.stdout);
    assert!(output.stdout.contains("layers.0: window, hashed router"), "{}", output.stdout);
    let again = write();
    assert_eq!(again.code, Some(2), "{}", again.stdout);
    assert!(again.stderr.contains("is not empty"), "{}", again.stderr);
    let check = || Parity::new(&["checkpoint", "--check", &out]).run();
    assert_eq!(check().code, Some(0));
    let shard = Path::new(&out).join("model-00003-of-00006.safetensors");
    let file = fs::File::options().write(true).open(&shard).expect("a shard");
    file.set_len(file.metadata().expect("a file").len() - 1).expect("a shorter file");
    let output = check();
    assert_eq!(output.code, Some(2), "{}", output.stdout);
    assert!(output.stderr.contains("1 problem"), "{}", output.stderr);
    assert!(
        output.stderr.contains("model-00003-of-00006.safetensors is truncated"),
        "{}",
        output.stderr
    );
}

#[test]
fn sizes_that_no_kernel_supports_are_refused_by_name() {
    for (arguments, said) in [
        (&["--hidden", "500"][..], "`hidden_size` is 500"),
        (&["--topk", "9"], "`num_experts_per_tok` is 9: it must be 1 to 8"),
        (&["--hash-layers", "5"], "`num_hash_layers` is 5: the model has 4 layers"),
        (&["--mtp", "2"], "`num_nextn_predict_layers` is 2"),
        (&["--vocab", "1"], "`eos_token_id` is 1: the vocabulary has 1 tokens"),
        (&["--config", "none.json"], "none.json"),
    ] {
        let command = ["checkpoint", "--out", "new"];
        let output = Parity::new(&[&command[..], arguments].concat()).run();
        assert_eq!(output.code, Some(2), "{arguments:?}: {}", output.stdout);
        assert!(output.stderr.contains(said), "{arguments:?}: {}", output.stderr);
    }
}

/// The bytes of a dense tensor on the device.
fn bytes(view: &TensorView) -> Vec<u8> {
    let mut bytes = vec![0; view.elements() * view.dtype.size()];
    assert!(view.is_dense(), "{view:?}");
    device().backend().download(view.address, &mut bytes).expect("a download");
    bytes
}

/// What is uploaded, held to the files without the loader: which tensor is where, in which order.
#[test]
fn weights_reach_the_device_as_they_are_stored_gate_before_up_and_values_before_gates() {
    let (config, folder) = (small(), written(&small(), 7));
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    let mut parts = Vec::new();
    let loaded = Weights::load(device(), &checkpoint, &mut |name, bytes| {
        parts.push((name.to_owned(), bytes))
    });
    let weights = loaded.expect("weights");
    let names: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["shared", "layers.0", "layers.1", "layers.2", "layers.3", "mtp.0"]);
    assert_eq!(parts.iter().map(|(_, bytes)| bytes).sum::<usize>(), checkpoint.total_bytes());
    let stored = |names: &[String]| -> Vec<u8> {
        names.iter().flat_map(|name| checkpoint.bytes(name)).copied().collect()
    };
    let mtp = weights.mtp.as_ref().expect("a module");
    let layers = weights.layers.iter().chain([mtp]);
    for (id, views) in LayerId::all(&config).into_iter().zip(layers) {
        let experts = |parts: [&str; 2], what: &str| -> Vec<String> {
            let of = |expert: usize| {
                let name = move |part| format!("{id}.ffn.experts.{expert}.{part}.{what}");
                parts.map(name)
            };
            (0..config.num_experts).flat_map(of).filter(|name| !name.contains("none")).collect()
        };
        for what in ["weight", "scale"] {
            let [w13, w2] = [["w1", "w3"], ["w2", "none"]].map(|parts| experts(parts, what));
            let suffix = if what == "scale" { "_scales" } else { "" };
            assert_eq!(bytes(&views[&*format!("w13{suffix}")]), stored(&w13), "{id} w13 {what}");
            assert_eq!(bytes(&views[&*format!("w2{suffix}")]), stored(&w2), "{id} w2 {what}");
            let shared = ["w1", "w3"].map(|part| format!("{id}.ffn.shared_experts.{part}.{what}"));
            let name = format!("shared_w13{suffix}");
            assert_eq!(bytes(&views[&*name]), stored(&shared), "{id} {name}");
            for (name, part) in [("wq_a", "attn.wq_a"), ("wkv", "attn.wkv"), ("wo_b", "attn.wo_b")]
            {
                let of = [format!("{id}.{part}.{what}")];
                assert_eq!(bytes(&views[&*format!("{name}{suffix}")]), stored(&of), "{id} {name}");
            }
        }
        assert_eq!(bytes(&views["sink"]), stored(&[format!("{id}.attn.attn_sink")]));
        if let Some(both) = views.get("compressor") {
            let of = ["wkv", "wgate"].map(|part| format!("{id}.attn.compressor.{part}.weight"));
            assert_eq!(bytes(both), stored(&of), "{id} compressor");
        }
        if let Some(both) = views.get("index_compressor") {
            let of =
                ["wkv", "wgate"].map(|part| format!("{id}.attn.indexer.compressor.{part}.weight"));
            assert_eq!(bytes(both), stored(&of), "{id} indexer's compressor");
        }
    }
    assert_eq!(bytes(&weights.shared["head"]), checkpoint.bytes("head.weight"));
    assert_eq!(bytes(&mtp["h_proj"]), checkpoint.bytes("mtp.0.h_proj.weight"));
}

#[test]
fn what_changes_its_type_on_the_way_keeps_its_values() {
    let (config, folder) = (small(), written(&small(), 8));
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    let weights = Weights::load(device(), &checkpoint, &mut |_, _| {}).expect("weights");
    let views = &weights.layers[0];
    let host = |name: &str| HostTensor {
        dtype: views[name].dtype,
        shape: views[name].shape.clone(),
        bytes: bytes(&views[name]),
    };
    let norm = checkpoint.bytes("layers.0.attn.q_norm.weight");
    let norm = norm.as_chunks::<2>().0.iter().map(|&[low, high]| {
        f64::from(f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16))
    });
    assert_eq!(host("q_norm").to_f64(), norm.collect::<Vec<_>>());
    let table = checkpoint.bytes("layers.0.ffn.gate.tid2eid").as_chunks::<8>().0.iter();
    let table: Vec<i32> = table.map(|&bytes| i64::from_le_bytes(bytes) as i32).collect();
    assert_eq!(host("tid2eid").to_i32(), table);
    // wo_a, decoded by the oracle.
    let shape = [config.o_groups * config.o_lora_rank, config.num_heads / 2 * config.head_dim];
    let tensor = |name: &str, shape: [usize; 2]| {
        let values = checkpoint.bytes(name).iter().map(|&byte| f64::from(byte)).collect();
        candle_core::Tensor::from_vec::<_, f64>(values, &shape, &candle_core::Device::Cpu)
    };
    let codes = tensor("layers.0.attn.wo_a.weight", shape).expect("codes");
    let scales = tensor("layers.0.attn.wo_a.scale", shape.map(|extent| extent.div_ceil(128)));
    let named = Named::new().with("codes", codes).with("scales", scales.expect("scales"));
    let (group, scale, layout) = (Group::Square, ScaleType::E8m0, ScaleLayout::Plain);
    let options = quantize_fp8::Options { group, scale, layout };
    let decoded = quantize_fp8::dequantize(&named, options, dsv4_reference::Format::BF16);
    let decoded = decoded.expect("decoded").tensor("y").expect("y").flatten_all();
    let decoded = decoded.and_then(|tensor| tensor.to_vec1::<f64>()).expect("values");
    assert_eq!(host("wo_a").to_f64(), decoded);
    assert_eq!(views["wo_a"].shape, [2, config.o_lora_rank, shape[1]]);
}
