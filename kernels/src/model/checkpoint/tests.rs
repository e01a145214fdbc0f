use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::json;

use super::tensors::{Format, LayerId, TensorSpec, all, copies};
use super::{Checkpoint, CheckpointError, INDEX, Problem, SINGLE};
use crate::cache::cache_layout::LayerKind::{Csa, Hca, Window};
use crate::model::config::{Config, ExpertFormat, FILE, Yarn};

/// A model of four layers with every kind of tensor.
fn small() -> Config {
    Config {
        layers: vec![Window, Csa, Hca, Csa],
        num_mtp_layers: 1,
        num_hash_layers: 1,
        hidden_size: 128,
        vocab_size: 20,
        num_heads: 2,
        head_dim: 128,
        rope_dim: 64,
        q_lora_rank: 128,
        o_groups: 2,
        o_lora_rank: 128,
        index_heads: 2,
        index_head_dim: 128,
        index_topk: 4,
        num_experts: 3,
        topk: 2,
        expert_width: 128,
        expert_format: ExpertFormat::Mxfp4,
        route_scale: 1.5,
        swiglu_limit: 10.0,
        rope_theta: 10_000.0,
        compress_rope_theta: 160_000.0,
        yarn: Yarn { factor: 16.0, original_positions: 65_536, beta_fast: 32.0, beta_slow: 1.0 },
        max_positions: 1024,
        sinkhorn_iters: 20,
        hc_eps: 1e-6,
        norm_eps: 1e-6,
        bos: 0,
        eos: 1,
    }
}

/// The large released model (inference 14).
fn pro() -> Config {
    let pairs = (0..29).flat_map(|_| [Csa, Hca]);
    Config {
        layers: [Hca; 2].into_iter().chain(pairs).chain([Csa]).collect(),
        num_hash_layers: 3,
        hidden_size: 7168,
        vocab_size: 129_280,
        num_heads: 128,
        head_dim: 512,
        q_lora_rank: 1536,
        o_groups: 16,
        o_lora_rank: 1024,
        index_heads: 64,
        index_topk: 1024,
        num_experts: 384,
        topk: 6,
        expert_width: 3072,
        ..small()
    }
}

/// A tensor of a file: its type, its shape, its bytes.
#[derive(Clone)]
struct Stored(Dtype, Vec<usize>, Vec<u8>);

impl Stored {
    fn of(spec: &TensorSpec) -> Self {
        // Each tensor has other bytes. A table names experts that exist.
        let sum = spec.name.bytes().fold(7u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
        let byte = if spec.format == Format::I64 { 0 } else { sum };
        Self(spec.format.stored(), spec.shape.clone(), vec![byte; spec.bytes()])
    }
}

/// The files of a checkpoint before they are written.
struct Files {
    config: Config,
    tensors: BTreeMap<String, (usize, Stored)>,
    indexed: bool,
}

const NUM_SHARDS: usize = 3;

fn shard(number: usize) -> String {
    format!("model-{:05}-of-{NUM_SHARDS:05}.safetensors", number + 1)
}

impl Files {
    fn new() -> Self {
        Self::of(small())
    }

    fn of(config: Config) -> Self {
        let stored = |(at, spec): (usize, TensorSpec)| {
            let stored = Stored::of(&spec);
            (spec.name, (at % NUM_SHARDS, stored))
        };
        let tensors = all(&config).into_iter().enumerate().map(stored).collect();
        Self { config, tensors, indexed: true }
    }

    fn write(&self, folder: &Path) {
        fs::write(folder.join(FILE), self.config.to_json()).expect("a file");
        let mut weight_map = BTreeMap::new();
        for number in 0..if self.indexed { NUM_SHARDS } else { 1 } {
            let own = |&(at, _): &&(usize, Stored)| !self.indexed || *at == number;
            let tensors: Vec<_> = self
                .tensors
                .iter()
                .filter(|(_, stored)| own(stored))
                .map(|(name, (_, Stored(dtype, shape, bytes)))| {
                    (name, TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
                })
                .collect();
            let name = if self.indexed { shard(number) } else { SINGLE.to_owned() };
            weight_map.extend(tensors.iter().map(|(tensor, _)| (tensor.to_string(), name.clone())));
            serialize_to_file(tensors, None, &folder.join(name)).expect("a shard");
        }
        if self.indexed {
            let index = json!({ "metadata": {}, "weight_map": weight_map });
            fs::write(folder.join(INDEX), index.to_string()).expect("an index");
        }
    }

    /// The problems of these files, after a change of the folder.
    fn problems(&self, change: impl FnOnce(&Path)) -> Vec<Problem> {
        let folder = tempfile::tempdir().expect("a folder");
        self.write(folder.path());
        change(folder.path());
        match Checkpoint::open(folder.path()) {
            Err(CheckpointError::Problems { problems, .. }) => problems,
            Err(other) => panic!("{other}"),
            Ok(_) => Vec::new(),
        }
    }

    fn edit(&mut self, name: &str) -> &mut Stored {
        &mut self.tensors.get_mut(name).expect(name).1
    }
}

#[test]
fn the_large_model_has_the_tensors_and_the_bytes_that_the_specification_counts() {
    let tensors = all(&pro());
    assert_eq!(tensors.len(), 145_116);
    let bytes: usize = tensors.iter().map(TensorSpec::bytes).sum();
    // 805.3 units of 2^30 bytes, to the last digit that is given.
    assert_eq!((10.0 * bytes as f64 / 2f64.powi(30)).round(), 8053.0);
    let names: std::collections::BTreeSet<_> = tensors.iter().map(|spec| &spec.name).collect();
    assert_eq!(names.len(), tensors.len());
    let shape = |name: &str| {
        let found = tensors.iter().find(|spec| spec.name == name).expect(name);
        (found.format, found.shape.clone())
    };
    assert_eq!(shape("layers.2.attn.wo_a.weight"), (Format::E4m3, vec![16_384, 4096]));
    assert_eq!(shape("layers.2.attn.wo_a.scale"), (Format::E8m0, vec![128, 32]));
    assert_eq!(shape("layers.1.ffn.experts.383.w2.scale"), (Format::E8m0, vec![7168, 96]));
    assert_eq!(shape("layers.0.attn.compressor.ape"), (Format::F32, vec![128, 512]));
    assert_eq!(shape("layers.2.attn.indexer.compressor.ape"), (Format::F32, vec![4, 256]));
    assert_eq!(shape("layers.2.ffn.gate.tid2eid"), (Format::I64, vec![129_280, 6]));
    assert_eq!(shape("mtp.0.ffn.gate.bias"), (Format::F32, vec![384]));
    assert_eq!(shape("mtp.0.e_proj.scale"), (Format::E8m0, vec![56, 56]));
}

#[test]
fn tensors_of_a_right_checkpoint_are_those_of_its_files_with_and_without_an_index() {
    for indexed in [true, false] {
        let (files, folder) = (Files { indexed, ..Files::new() }, tempfile::tempdir());
        let folder = folder.expect("a folder");
        files.write(folder.path());
        let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
        assert_eq!((checkpoint.config(), checkpoint.folder()), (&files.config, folder.path()));
        for (name, (_, stored)) in &files.tensors {
            assert_eq!(checkpoint.bytes(name), stored.2, "{name}");
        }
        let total: usize = files.tensors.values().map(|(_, stored)| stored.2.len()).sum();
        assert_eq!(checkpoint.total_bytes(), total);
        let layers = LayerId::all(checkpoint.config());
        let of_layers: usize = layers.iter().map(|&layer| layer.bytes(checkpoint.config())).sum();
        assert!(layers.len() == 5 && of_layers < total);
    }
}

#[test]
fn a_missing_tensor_and_an_extra_one_are_both_named() {
    let mut files = Files::new();
    let bias = files.tensors.remove("layers.1.ffn.gate.bias").expect("a tensor");
    files.tensors.insert("layers.1.ffn.gate.biases".into(), bias);
    files.tensors.remove("mtp.0.enorm.weight");
    assert_eq!(
        files.problems(|_| {}),
        [
            Problem::Missing { name: "layers.1.ffn.gate.bias".into() },
            Problem::Missing { name: "mtp.0.enorm.weight".into() },
            Problem::Extra {
                name: "layers.1.ffn.gate.biases".into(),
                shard: files_shard(&files, "layers.1.ffn.gate.biases"),
            },
        ]
    );
}

fn files_shard(files: &Files, name: &str) -> String {
    shard(files.tensors[name].0)
}

#[test]
fn types_and_shapes_are_held_to_the_configuration() {
    let mut files = Files::new();
    files.edit("layers.0.attn.wkv.weight").0 = Dtype::F8_E5M2;
    files.edit("layers.3.ffn.experts.2.w1.weight").0 = Dtype::U8;
    files.edit("layers.2.attn.attn_sink").1 = vec![1, 2];
    // As many bytes.
    files.edit("layers.1.attn.compressor.wkv.weight").1 = vec![128, 256];
    let problems = files.problems(|_| {});
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "`layers.0.attn.wkv.weight` is F8_E5M2; the configuration has F8_E4M3",
            "`layers.1.attn.compressor.wkv.weight` has shape [128, 256]; the configuration has \
             [256, 128]",
            "`layers.2.attn.attn_sink` has shape [1, 2]; the configuration has [2]",
            "`layers.3.ffn.experts.2.w1.weight` is U8; the configuration has I8",
        ]
    );
}

#[test]
fn nvfp4_experts_have_their_own_tensors_and_scales_above_0() {
    let config = Config { expert_format: ExpertFormat::Nvfp4, ..small() };
    assert_eq!(Config::parse(&config.to_json()).expect("a configuration"), config);
    let mut files = Files::of(config);
    let scale = |number: f32| number.to_le_bytes().to_vec();
    let of_experts: Vec<String> =
        files.tensors.keys().filter(|name| name.contains(".experts.")).cloned().collect();
    // Those of the MTP module have the released format.
    let numbers = of_experts.iter().filter(|name| name.ends_with("put_scale"));
    assert_eq!(numbers.count(), 4 * 3 * 3);
    assert!(of_experts.iter().any(|name| name == "mtp.0.ffn.experts.2.w2.scale"));
    for name in of_experts.iter().filter(|name| name.ends_with("scale_2")) {
        files.edit(name).2 = scale(0.5);
    }
    for name in of_experts.iter().filter(|name| name.ends_with("put_scale")) {
        *files.edit(name) = Stored(Dtype::F32, vec![1], scale(0.25));
    }
    assert_eq!(files.problems(|_| {}), []);
    files.edit("layers.0.ffn.experts.0.w1.input_scale").2 = scale(0.0);
    files.edit("layers.1.ffn.experts.1.w3.weight_scale_2").2 = scale(f32::INFINITY);
    files.edit("layers.2.ffn.experts.2.w2.weight").0 = Dtype::I8;
    files.tensors.remove("layers.3.ffn.experts.0.w2.input_scale");
    let texts: Vec<String> = files.problems(|_| {}).iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "`layers.0.ffn.experts.0.w1.input_scale` is 0: a scale is above 0 and finite",
            "`layers.1.ffn.experts.1.w3.weight_scale_2` is inf: a scale is above 0 and finite",
            "`layers.2.ffn.experts.2.w2.weight` is I8; the configuration has U8",
            "`layers.3.ffn.experts.0.w2.input_scale` is missing",
        ]
    );
}

#[test]
fn a_truncated_shard_is_named_with_the_tensors_that_it_cuts_off() {
    let files = Files::new();
    let cut_to = |bytes: u64| {
        files.problems(|folder| {
            let file = fs::File::options().write(true).open(folder.join(shard(1)));
            file.and_then(|file| file.set_len(bytes)).expect("a shorter file");
        })
    };
    let whole = {
        let folder = tempfile::tempdir().expect("a folder");
        files.write(folder.path());
        fs::metadata(folder.path().join(shard(1))).expect("a shard").len()
    };
    assert_eq!(cut_to(whole), []);
    let problems = cut_to(whole - 1);
    let [Problem::Truncated { shard: name, bytes, declared, tensors }] = &problems[..] else {
        panic!("{problems:?}")
    };
    assert_eq!((name, *bytes as u64, *declared as u64), (&shard(1), whole - 1, whole));
    assert_eq!(tensors.len(), 1, "only the last tensor lacks a byte: {tensors:?}");
    let problems = cut_to(whole / 2);
    let [Problem::Truncated { tensors, .. }] = &problems[..] else { panic!("{problems:?}") };
    let own = files.tensors.values().filter(|(at, _)| *at == 1).count();
    assert!(tensors.len() > 1 && tensors.len() < own, "{} of {own}", tensors.len());
    for bytes in [0, 5, 100] {
        let problems = cut_to(bytes);
        let of_shard = |problem: &&Problem| matches!(problem, Problem::Shard { .. });
        assert_eq!(problems.iter().filter(of_shard).count(), 1, "{bytes}");
        let missing = |problem: &&Problem| matches!(problem, Problem::Missing { .. });
        assert_eq!(problems.iter().filter(missing).count(), own, "{bytes}");
        assert!(problems[0].to_string().contains(&format!("has {bytes} bytes")), "{problems:?}");
    }
}

#[test]
fn bytes_after_the_last_tensor_are_a_problem() {
    let problems = Files::new().problems(|folder| {
        let path = folder.join(shard(0));
        let mut bytes = fs::read(&path).expect("a shard");
        bytes.extend([0; 3]);
        fs::write(&path, bytes).expect("a longer file");
    });
    let [Problem::Shard { shard: name, reason }] = &problems[..] else { panic!("{problems:?}") };
    assert!(*name == shard(0) && reason.contains("its header declares"), "{reason}");
}

#[test]
fn an_index_must_name_what_the_shards_have() {
    let files = Files::new();
    let with_index = |change: fn(&mut serde_json::Value)| {
        files.problems(|folder| {
            let path = folder.join(INDEX);
            let mut index: serde_json::Value =
                serde_json::from_slice(&fs::read(&path).expect("an index")).expect("JSON");
            change(&mut index["weight_map"]);
            fs::write(&path, index.to_string()).expect("an index");
        })
    };
    let problems = with_index(|map| {
        map.as_object_mut().expect("a map").remove("norm.weight");
    });
    assert!(matches!(&problems[..], [Problem::Unlisted { name, .. }] if name == "norm.weight"));
    let problems = with_index(|map| {
        map["norm.weight"] =
            json!(if map["norm.weight"] == shard(0) { shard(1) } else { shard(0) });
    });
    assert!(matches!(&problems[..], [Problem::NotInShard { name, .. }] if name == "norm.weight"));
    let problems = with_index(|map| map["norm.weight"] = json!("../other/model.safetensors"));
    assert!(matches!(
        &problems[..],
        [Problem::ShardOutside { shard }] if shard.starts_with("../other")
    ));
    let problems = with_index(|map| map["norm.weight"] = json!("lost.safetensors"));
    assert!(matches!(&problems[..], [Problem::Shard { shard, .. }] if shard == "lost.safetensors"));
}

#[test]
fn a_tensor_of_two_shards_is_a_problem() {
    let problems = Files::new().problems(|folder| {
        fs::copy(folder.join(shard(0)), folder.join("again.safetensors")).expect("a copy");
        let path = folder.join(INDEX);
        let mut index: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).expect("an index")).expect("JSON");
        index["weight_map"]["again"] = json!("again.safetensors");
        fs::write(&path, index.to_string()).expect("an index");
    });
    let twice = problems.iter().filter(|problem| matches!(problem, Problem::Twice { .. }));
    let own = Files::new().tensors.values().filter(|(at, _)| *at == 0).count();
    assert_eq!(twice.count(), own);
}

#[test]
fn copies_of_the_mtp_module_are_skipped_if_they_are_equal() {
    let mut files = Files::new();
    for (copy, of) in copies(&files.config) {
        let stored = files.tensors[of].clone();
        files.tensors.insert(copy, stored);
    }
    assert_eq!(files.problems(|_| {}), []);
    files.edit("mtp.0.head.weight").2[5] ^= 1;
    assert_eq!(
        files.problems(|_| {}),
        [Problem::CopyDiffers { name: "mtp.0.head.weight".into(), of: "head.weight".into() }]
    );
}

#[test]
fn a_table_that_names_no_expert_is_a_problem() {
    let mut files = Files::new();
    files.edit("layers.0.ffn.gate.tid2eid").2[8 * 7..8 * 8].copy_from_slice(&3i64.to_le_bytes());
    let problems = files.problems(|_| {});
    let text = problems.iter().map(ToString::to_string).collect::<String>();
    assert_eq!(text, "`layers.0.ffn.gate.tid2eid` names expert 3 for token 3: there are 3");
}

/// The name that transformers gives to an official tensor of a main layer or outside of all, as its
/// table of renamings says: one after the other, each wherever it occurs. Experts are not in it.
fn in_transformers(official: &str) -> String {
    let renamings = [
        (".attn.", ".self_attn."),
        (".ffn.", ".mlp."),
        (".indexer.compressor.", ".compressor.indexer."),
        (".attn_norm.", ".input_layernorm."),
        (".ffn_norm.", ".post_attention_layernorm."),
        (".hc_attn_", ".attn_hc."),
        (".hc_ffn_", ".ffn_hc."),
        (".attn_sink", ".sinks"),
        (".indexer.weights_proj.", ".compressor.indexer.scorer.weights_proj."),
        (".indexer.wq_b.", ".compressor.indexer.q_b_proj."),
        (".norm.", ".kv_norm."),
        (".ape", ".position_bias"),
        (".wq_a.", ".q_a_proj."),
        (".self_attn.wq_b.", ".self_attn.q_b_proj."),
        (".wkv.", ".kv_proj."),
        (".wgate.", ".gate_proj."),
        (".wo_a.", ".o_a_proj."),
        (".wo_b.", ".o_b_proj."),
        (".q_norm.", ".q_a_norm."),
        (".gate.bias", ".gate.e_score_correction_bias"),
        (".shared_experts.w1.", ".shared_experts.gate_proj."),
        (".shared_experts.w2.", ".shared_experts.down_proj."),
        (".shared_experts.w3.", ".shared_experts.up_proj."),
    ];
    let name = match official {
        "head.weight" => return "lm_head.weight".to_owned(),
        "embed.weight" => "embed_tokens.weight".to_owned(),
        _ => official.replace("hc_head_", "hc_head.hc_"),
    };
    let name = renamings.iter().fold(name, |name, (ours, theirs)| name.replace(ours, theirs));
    let is_scale = name.ends_with(".scale") && !name.ends_with("_hc.scale");
    let name = if is_scale { name.replace(".scale", ".weight_scale_inv") } else { name };
    format!("model.{name}")
}

impl Files {
    /// The same checkpoint as transformers names it; the MTP module, which it ignores, as before.
    fn in_transformers(&self) -> Self {
        let mut tensors = BTreeMap::new();
        for (name, stored) in &self.tensors {
            if name.starts_with("mtp.") {
                tensors.insert(name.clone(), stored.clone());
            } else if !name.contains(".experts.") {
                tensors.insert(in_transformers(name), stored.clone());
            }
        }
        let last = |ending: &str| if ending == "scale" { "_scale_inv" } else { "" };
        for layer in 0..self.config.layers.len() {
            for (theirs, which) in [("gate_up_proj", &["w1", "w3"][..]), ("down_proj", &["w2"])] {
                for ending in ["weight", "scale"] {
                    let experts = 0..self.config.num_experts;
                    let names = experts.flat_map(|expert| {
                        which.iter().map(move |w| {
                            format!("layers.{layer}.ffn.experts.{expert}.{w}.{ending}")
                        })
                    });
                    let parts: Vec<&Stored> = names.map(|name| &self.tensors[&name].1).collect();
                    let Stored(dtype, shape, _) = parts[0];
                    let shape = vec![self.config.num_experts, which.len() * shape[0], shape[1]];
                    let bytes = parts.iter().flat_map(|part| part.2.clone()).collect();
                    let name = format!("model.layers.{layer}.mlp.experts.{theirs}{}", last(ending));
                    tensors.insert(name, (layer % NUM_SHARDS, Stored(*dtype, shape, bytes)));
                }
            }
        }
        Self { config: self.config.clone(), tensors, indexed: self.indexed }
    }
}

#[test]
fn a_checkpoint_with_names_of_transformers_has_the_same_bytes_under_the_official_ones() {
    let files = Files::new();
    let folder = tempfile::tempdir().expect("a folder");
    files.in_transformers().write(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).expect("a checkpoint");
    for (name, (_, stored)) in &files.tensors {
        assert!(checkpoint.bytes(name) == stored.2, "{name}");
    }
}

#[test]
fn names_of_transformers_that_mean_nothing_or_what_is_there_already_are_problems() {
    let text = |change: fn(&mut Files)| {
        let mut files = Files::new().in_transformers();
        change(&mut files);
        let problems = files.problems(|_| {});
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    assert_eq!(text(|_| {}), "");
    let unknown = text(|files| {
        let tensor = files.tensors.remove("model.norm.weight").expect("a tensor");
        files.tensors.insert("model.norms.weight".into(), tensor);
    });
    assert!(unknown.contains("`norm.weight` is missing"), "{unknown}");
    assert!(unknown.contains("`model.norms.weight` is like a name of transformers"), "{unknown}");
    let twice = text(|files| {
        let tensor = files.tensors["model.norm.weight"].clone();
        files.tensors.insert("norm.weight".into(), tensor);
    });
    assert!(twice.starts_with("`norm.weight` is in model-0"), "{twice}");
    let experts = "model.layers.1.mlp.experts.gate_up_proj";
    let fewer = text(|files| {
        let Stored(_, shape, bytes) = files.edit("model.layers.1.mlp.experts.gate_up_proj");
        shape[0] -= 1;
        bytes.truncate(shape.iter().product());
    });
    assert!(fewer.contains("`layers.1.ffn.experts.2.w1.weight` is missing"), "{experts}: {fewer}");
    let odd = text(|files| {
        let Stored(_, shape, bytes) = files.edit("model.layers.1.mlp.experts.gate_up_proj");
        shape[1] -= 1;
        bytes.truncate(shape.iter().product());
    });
    assert!(odd.contains(&format!("`{experts}` is like a name of transformers")), "{odd}");
}

#[test]
fn all_problems_are_in_one_error_with_a_line_for_each() {
    let mut files = Files::new();
    files.tensors.remove("norm.weight");
    files.edit("embed.weight").0 = Dtype::F16;
    let folder = tempfile::tempdir().expect("a folder");
    files.write(folder.path());
    let error = Checkpoint::open(folder.path()).expect_err("two problems").to_string();
    assert!(error.contains(": 2 problems\n  `embed.weight` is F16"), "{error}");
    assert_eq!(error.lines().count(), 3, "{error}");
}

#[test]
fn a_folder_without_weights_or_with_a_broken_index_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join(FILE), small().to_json()).expect("a file");
    let error = Checkpoint::open(folder.path()).expect_err("no weights").to_string();
    assert!(error.contains("has neither model.safetensors.index.json nor"), "{error}");
    fs::write(folder.path().join(INDEX), "{}").expect("a file");
    let error = Checkpoint::open(folder.path()).expect_err("no map").to_string();
    assert!(error.contains("is not an index of shards") && error.contains("weight_map"), "{error}");
}
