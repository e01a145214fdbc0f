//! The configuration of a model, from the official `config.json` (inference 14).
//!
//! Every problem of a file is reported at once. A value that no kernel supports is rejected here,
//! by the name of its field, and not by the launcher that would meet it first.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::cache::cache_layout::{LayerKind, WINDOW};
use crate::cache::kv_cache::{RowFormat, SCALE_GROUP};
use crate::cache::kv_norm_rope_write::MAX_HEAD_DIM;
use crate::experts::router::{MAX_EXPERTS, MAX_TOPK};
use crate::formats::hadamard;
use crate::indexer::indexer_logits::MAX_HEADS;
use crate::indexer::indexer_query::ROPE_DIM;
use crate::indexer::topk;
use crate::model::checkpoint::tensors::NVFP4_GROUP;
use crate::projections::linear::BLOCK;
use crate::projections::rms_norm::MAX_WIDTH;
use crate::streams::mhc_post::NUM_STREAMS;

/// The name of the file in a checkpoint.
pub const FILE: &str = "config.json";
const ARCHITECTURE: &str = "DeepseekV4ForCausalLM";
const MODEL_TYPE: &str = "deepseek_v4";
/// What a configuration calls NVFP4 experts.
const NVFP4: &str = "NVFP4";

/// The YaRN interpolation of the table "compress" (inference 4.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// By how much low frequencies are divided.
    pub factor: f64,
    /// Positions of the original context.
    pub original_positions: usize,
    /// Rotations within it above which a frequency stays.
    pub beta_fast: f64,
    /// Rotations within it below which a frequency is divided.
    pub beta_slow: f64,
}

/// The format of the routed experts of main layers. Those of an MTP module are MXFP4 in every
/// released checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ExpertFormat {
    /// e2m1 with an e8m0 scale for each 32 values of a row.
    #[default]
    Mxfp4,
    /// e2m1 with an e4m3 scale for each 16 values of a row and an fp32 scale of the matrix, as
    /// checkpoints of third parties have them (inference 5.6).
    Nvfp4,
}

/// A model's configuration: every field of inference 14. Sizes are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What each main layer attends to, from `compress_ratios`: 0, 4 or 128.
    pub layers: Vec<LayerKind>,
    /// MTP modules: 0 or 1.
    pub num_mtp_layers: usize,
    /// Main layers, from the first on, whose router is a table of token ids.
    pub num_hash_layers: usize,
    /// Channels of a residual stream.
    pub hidden_size: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Channels of a head, and of a row of K = V.
    pub head_dim: usize,
    /// The last channels of a head, which rotate.
    pub rope_dim: usize,
    /// Rank of the queries.
    pub q_lora_rank: usize,
    /// Groups of heads of the output projection.
    pub o_groups: usize,
    /// Rank of each group.
    pub o_lora_rank: usize,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Channels of an indexer's head and key: 128.
    pub index_head_dim: usize,
    /// Entries that the indexer chooses.
    pub index_topk: usize,
    /// Routed experts.
    pub num_experts: usize,
    /// Experts of a token.
    pub topk: usize,
    /// Channels of an expert.
    pub expert_width: usize,
    /// How the experts of main layers are stored.
    pub expert_format: ExpertFormat,
    /// Multiplies the routing weights.
    pub route_scale: f64,
    /// Clamps gate and up of the experts.
    pub swiglu_limit: f64,
    /// Base of the rotation of window layers.
    pub rope_theta: f64,
    /// Base of the rotation of layers with entries.
    pub compress_rope_theta: f64,
    /// The interpolation of the latter.
    pub yarn: Yarn,
    /// Positions that the model supports.
    pub max_positions: usize,
    /// Iterations of the Sinkhorn normalisation.
    pub sinkhorn_iters: usize,
    /// Added in the Sinkhorn iteration.
    pub hc_eps: f64,
    /// Added to the mean squares of all norms.
    pub norm_eps: f64,
    /// The token that starts a text.
    pub bos: u32,
    /// The token that ends it.
    pub eos: u32,
}

/// A field of a configuration, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldProblem {
    /// The field, such as `rope_scaling.factor`.
    pub field: String,
    /// The value, if there is one, and the rule.
    pub reason: String,
}

impl fmt::Display for FieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.field, self.reason)
    }
}

/// Why a configuration is not one of a model that can run.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: cannot be read")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not a JSON object.
    #[error("config.json is not a JSON object: {0}")]
    NotJson(String),
    /// Another architecture.
    #[error("config.json: `{field}` is {value}; only {expected} is supported")]
    Architecture {
        /// `architectures` or `model_type`.
        field: &'static str,
        /// The value, as JSON.
        value: String,
        /// The supported one.
        expected: &'static str,
    },
    /// Missing fields, fields of another type, and values that no kernel supports: all of them.
    #[error("config.json: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Fields(Vec<FieldProblem>),
}

/// Reads fields, and collects their problems.
struct Fields<'a> {
    object: &'a Map<String, Value>,
    problems: Vec<FieldProblem>,
}

impl Fields<'_> {
    fn refuse(&mut self, field: &str, reason: impl Into<String>) {
        self.problems.push(FieldProblem { field: field.to_owned(), reason: reason.into() });
    }

    /// The value at a path of names with dots; a problem if there is none.
    fn value(&mut self, field: &str) -> Option<Value> {
        let mut names = field.split('.');
        let mut value = names.next().and_then(|name| self.object.get(name));
        for name in names {
            value = value.and_then(|value| value.get(name));
        }
        let value = value.filter(|value| !value.is_null()).cloned();
        if value.is_none() {
            self.refuse(field, "is missing");
        }
        value
    }

    fn whole(&mut self, field: &str) -> usize {
        let Some(value) = self.value(field) else { return 0 };
        // Positions, ids and sizes fit 32 bits in all kernels.
        let whole = value.as_u64().filter(|&whole| whole <= i32::MAX as u64);
        if whole.is_none() {
            self.refuse(field, format!("is {value}: it must be a whole number below 2^31"));
        }
        whole.unwrap_or(0) as usize
    }

    fn positive(&mut self, field: &str) -> f64 {
        let Some(value) = self.value(field) else { return 1.0 };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        if number.is_none() {
            self.refuse(field, format!("is {value}: it must be a number above 0"));
        }
        number.unwrap_or(1.0)
    }

    /// A field with only one supported value.
    fn only(&mut self, field: &str, expected: Value) {
        if let Some(value) = self.value(field).filter(|value| *value != expected) {
            self.refuse(field, format!("is {value}: only {expected} is supported"));
        }
    }

    /// The same of a field that may be absent.
    fn only_if_present(&mut self, field: &str, expected: Value) {
        if self.object.get(field).is_some_and(|value| !value.is_null()) {
            self.only(field, expected);
        }
    }

    /// The format of the experts, which a released checkpoint does not name.
    fn expert_format(&mut self) -> ExpertFormat {
        let quantization = self.object.get("quantization_config");
        let of = |name: &str| quantization.and_then(|all| all.get(name)).cloned();
        match of("moe_quant_algo").unwrap_or(Value::Null) {
            Value::Null => return ExpertFormat::Mxfp4,
            Value::String(name) if name == NVFP4 => {}
            value => {
                let reason = format!("is {value}: only \"{NVFP4}\" is supported");
                self.refuse("quantization_config.moe_quant_algo", reason);
            }
        }
        if let Some(size) = of("group_size").filter(|size| *size != json!(NVFP4_GROUP)) {
            let reason = format!("is {size}: only {NVFP4_GROUP} is supported");
            self.refuse("quantization_config.group_size", reason);
        }
        ExpertFormat::Nvfp4
    }

    fn multiple(&mut self, field: &str, value: usize, multiple: usize, most: usize) {
        let named = self.problems.iter().any(|problem| problem.field == field);
        if !named && (value == 0 || !value.is_multiple_of(multiple) || value > most) {
            let rule = format!("is {value}: it must be a multiple of {multiple} up to {most}");
            self.refuse(field, rule);
        }
    }

    /// The layers' kinds, and the problems of a list that contradicts the other fields.
    fn layers(&mut self, num_layers: usize, num_mtp_layers: usize) -> Vec<LayerKind> {
        const FIELD: &str = "compress_ratios";
        let Some(value) = self.value(FIELD) else { return Vec::new() };
        let ratios: Option<Vec<u64>> =
            value.as_array().and_then(|all| all.iter().map(Value::as_u64).collect());
        let Some(ratios) = ratios else {
            self.refuse(FIELD, format!("is {value}: it must be a list of 0, 4 and 128"));
            return Vec::new();
        };
        if ratios.len() != num_layers + num_mtp_layers {
            let reason = format!(
                "has {} entries: it must have one for each of {num_layers} layers \
                 (`num_hidden_layers`) and {num_mtp_layers} MTP modules \
                 (`num_nextn_predict_layers`)",
                ratios.len()
            );
            self.refuse(FIELD, reason);
            return Vec::new();
        }
        if let Some(ratio) = ratios[num_layers..].iter().find(|&&ratio| ratio != 0) {
            self.refuse(FIELD, format!("ends with {ratio}: an MTP module has a window, ratio 0"));
        }
        let kind = |&ratio: &u64| {
            LayerKind::ALL.into_iter().find(|kind| kind.ratio().unwrap_or(0) as u64 == ratio)
        };
        let kinds: Vec<Option<LayerKind>> = ratios[..num_layers].iter().map(kind).collect();
        if let Some(layer) = kinds.iter().position(Option::is_none) {
            let ratio = ratios[layer];
            self.refuse(FIELD, format!("is {ratio} for layer {layer}: it must be 0, 4 or 128"));
        }
        kinds.into_iter().flatten().collect()
    }

    /// What is one number in every released model, and an assumption of the kernels.
    fn constants(&mut self) {
        self.only("num_key_value_heads", json!(1));
        self.only("n_shared_experts", json!(1));
        self.only("hc_mult", json!(NUM_STREAMS));
        self.only("sliding_window", json!(WINDOW));
        self.only("index_head_dim", json!(hadamard::DIM));
        self.only("scoring_func", json!("sqrtsoftplus"));
        self.only("norm_topk_prob", json!(true));
        self.only("rope_scaling.type", json!("yarn"));
        self.only_if_present("hidden_act", json!("silu"));
        self.only_if_present("expert_dtype", json!("fp4"));
        self.only_if_present("tie_word_embeddings", json!(false));
        self.only("quantization_config.quant_method", json!("fp8"));
        self.only("quantization_config.fmt", json!("e4m3"));
        self.only("quantization_config.scale_fmt", json!("ue8m0"));
        self.only("quantization_config.weight_block_size", json!([BLOCK, BLOCK]));
    }
}

impl Config {
    /// The sizes of the small released model (inference 14), with these main layers.
    pub fn flash(layers: Vec<LayerKind>) -> Self {
        Self {
            layers,
            num_mtp_layers: 1,
            num_hash_layers: 3,
            hidden_size: 4096,
            vocab_size: 129_280,
            num_heads: 64,
            head_dim: 512,
            rope_dim: 64,
            q_lora_rank: 1024,
            o_groups: 8,
            o_lora_rank: 1024,
            index_heads: 64,
            index_head_dim: 128,
            index_topk: 512,
            num_experts: 256,
            topk: 6,
            expert_width: 2048,
            expert_format: ExpertFormat::Mxfp4,
            route_scale: 1.5,
            swiglu_limit: 10.0,
            rope_theta: 10_000.0,
            compress_rope_theta: 160_000.0,
            yarn: Yarn {
                factor: 16.0,
                original_positions: 65_536,
                beta_fast: 32.0,
                beta_slow: 1.0,
            },
            max_positions: 1_048_576,
            sinkhorn_iters: 20,
            hc_eps: 1e-6,
            norm_eps: 1e-6,
            bos: 0,
            eos: 1,
        }
    }

    /// Reads `config.json` of a checkpoint's folder.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn read(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join(FILE);
        let text =
            fs::read_to_string(&path).map_err(|source| ConfigError::Unreadable { path, source })?;
        Self::parse(&text)
    }

    /// Reads a configuration from the text of the file.
    ///
    /// # Errors
    /// [`ConfigError`], with all problems of the fields.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let object: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| ConfigError::NotJson(error.to_string()))?;
        check_architecture(&object)?;
        let mut fields = Fields { object: &object, problems: Vec::new() };
        let config = Self::of(&mut fields);
        if fields.problems.is_empty() {
            config.check(&mut fields);
        }
        match fields.problems.is_empty() {
            true => Ok(config),
            false => Err(ConfigError::Fields(fields.problems)),
        }
    }

    fn of(fields: &mut Fields<'_>) -> Self {
        fields.constants();
        let num_layers = fields.whole("num_hidden_layers");
        let num_mtp_layers = fields.whole("num_nextn_predict_layers");
        Self {
            layers: fields.layers(num_layers, num_mtp_layers),
            num_mtp_layers,
            num_hash_layers: fields.whole("num_hash_layers"),
            hidden_size: fields.whole("hidden_size"),
            vocab_size: fields.whole("vocab_size"),
            num_heads: fields.whole("num_attention_heads"),
            head_dim: fields.whole("head_dim"),
            rope_dim: fields.whole("qk_rope_head_dim"),
            q_lora_rank: fields.whole("q_lora_rank"),
            o_groups: fields.whole("o_groups"),
            o_lora_rank: fields.whole("o_lora_rank"),
            index_heads: fields.whole("index_n_heads"),
            index_head_dim: hadamard::DIM,
            index_topk: fields.whole("index_topk"),
            num_experts: fields.whole("n_routed_experts"),
            topk: fields.whole("num_experts_per_tok"),
            expert_width: fields.whole("moe_intermediate_size"),
            expert_format: fields.expert_format(),
            route_scale: fields.positive("routed_scaling_factor"),
            swiglu_limit: fields.positive("swiglu_limit"),
            rope_theta: fields.positive("rope_theta"),
            compress_rope_theta: fields.positive("compress_rope_theta"),
            yarn: Yarn {
                factor: fields.positive("rope_scaling.factor"),
                original_positions: fields.whole("rope_scaling.original_max_position_embeddings"),
                beta_fast: fields.positive("rope_scaling.beta_fast"),
                beta_slow: fields.positive("rope_scaling.beta_slow"),
            },
            max_positions: fields.whole("max_position_embeddings"),
            sinkhorn_iters: fields.whole("hc_sinkhorn_iters"),
            hc_eps: fields.positive("hc_eps"),
            norm_eps: fields.positive("rms_norm_eps"),
            bos: fields.whole("bos_token_id") as u32,
            eos: fields.whole("eos_token_id") as u32,
        }
    }

    /// Sizes that the kernels support, and fields that must match others.
    fn check(&self, fields: &mut Fields<'_>) {
        let row = self.row();
        fields.multiple("num_hidden_layers", self.layers.len(), 1, 1 << 10);
        fields.multiple("hidden_size", self.hidden_size, BLOCK, MAX_WIDTH);
        fields.multiple("moe_intermediate_size", self.expert_width, BLOCK, 1 << 20);
        fields.multiple("vocab_size", self.vocab_size, 1, 1 << 24);
        fields.multiple("q_lora_rank", self.q_lora_rank, BLOCK, 1 << 13);
        fields.multiple("o_lora_rank", self.o_lora_rank, BLOCK, 1 << 16);
        fields.multiple("num_attention_heads", self.num_heads, 1, 1 << 10);
        fields.multiple("index_n_heads", self.index_heads, 1, MAX_HEADS);
        fields.multiple("index_topk", self.index_topk, 1, topk::MAX_TOPK);
        fields.multiple("n_routed_experts", self.num_experts, 1, MAX_EXPERTS);
        fields.multiple("hc_sinkhorn_iters", self.sinkhorn_iters, 1, 48);
        fields.multiple("max_position_embeddings", self.max_positions, 1, 1 << 24);
        fields.multiple(
            "rope_scaling.original_max_position_embeddings",
            self.yarn.original_positions,
            1,
            1 << 24,
        );
        let RowFormat { nope_dim, rope_dim } = row;
        // The indexer's queries rotate as many channels as a head.
        let multiple = if self.layers.contains(&LayerKind::Csa) { ROPE_DIM } else { 8 };
        fields.multiple("qk_rope_head_dim", rope_dim, multiple, ROPE_DIM);
        let whole = nope_dim > 0 && nope_dim.is_multiple_of(SCALE_GROUP);
        if !whole || !self.head_dim.is_multiple_of(16) || self.head_dim > MAX_HEAD_DIM {
            let reason = format!(
                "is {} with `qk_rope_head_dim` {rope_dim}: it must be a multiple of 16 up to \
                 {MAX_HEAD_DIM}, of which all but those are a multiple of {SCALE_GROUP}",
                self.head_dim
            );
            fields.refuse("head_dim", reason);
        }
        self.check_relations(fields);
    }

    fn check_relations(&self, fields: &mut Fields<'_>) {
        let most = self.num_experts.min(MAX_TOPK);
        if self.topk == 0 || self.topk > most {
            let reason = format!("is {}: it must be 1 to {most}", self.topk);
            fields.refuse("num_experts_per_tok", reason);
        }
        if self.o_groups == 0 || !self.num_heads.is_multiple_of(self.o_groups) {
            let reason = format!(
                "is {}: it must divide `num_attention_heads`, {}",
                self.o_groups, self.num_heads
            );
            fields.refuse("o_groups", reason);
        }
        if self.num_hash_layers > self.layers.len() {
            let reason =
                format!("is {}: the model has {} layers", self.num_hash_layers, self.layers.len());
            fields.refuse("num_hash_layers", reason);
        }
        if self.num_mtp_layers > 1 {
            let reason = format!("is {}: at most one is supported", self.num_mtp_layers);
            fields.refuse("num_nextn_predict_layers", reason);
        }
        for (field, id) in [("bos_token_id", self.bos), ("eos_token_id", self.eos)] {
            if id as usize >= self.vocab_size {
                let reason = format!("is {id}: the vocabulary has {} tokens", self.vocab_size);
                fields.refuse(field, reason);
            }
        }
    }

    /// How rows of K = V are stored.
    pub fn row(&self) -> RowFormat {
        let rope_dim = self.rope_dim;
        RowFormat { nope_dim: self.head_dim.saturating_sub(rope_dim), rope_dim }
    }

    /// Whether a main layer's experts are chosen by a table of token ids.
    pub fn is_hashed(&self, layer: usize) -> bool {
        layer < self.num_hash_layers
    }

    /// The configuration as the official file has it.
    pub fn to_json(&self) -> String {
        let parts = [self.sizes_as_json(), self.attention_as_json(), self.experts_as_json()];
        let fields = parts.into_iter().flat_map(|part| match part {
            Value::Object(fields) => fields,
            _ => Map::new(),
        });
        let all: Map<String, Value> = fields.collect();
        format!("{:#}\n", Value::Object(all))
    }

    /// How weights are quantized. Layers other than experts are FP8 in all checkpoints.
    fn quantization_as_json(&self) -> Value {
        let mut fields = json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",
        });
        if self.expert_format == ExpertFormat::Nvfp4 {
            fields["quant_algo"] = json!("MIXED_PRECISION");
            fields["moe_quant_algo"] = json!(NVFP4);
            fields["group_size"] = json!(NVFP4_GROUP);
        }
        fields
    }

    fn sizes_as_json(&self) -> Value {
        json!({
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "bos_token_id": self.bos,
            "eos_token_id": self.eos,
            "quantization_config": self.quantization_as_json(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers.len(),
            "num_nextn_predict_layers": self.num_mtp_layers,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "hc_mult": NUM_STREAMS,
            "hc_sinkhorn_iters": self.sinkhorn_iters,
            "hc_eps": self.hc_eps,
        })
    }

    fn attention_as_json(&self) -> Value {
        let ratio = |kind: &LayerKind| kind.ratio().unwrap_or(0);
        let mut ratios: Vec<usize> = self.layers.iter().map(ratio).collect();
        ratios.resize(self.layers.len() + self.num_mtp_layers, 0);
        json!({
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "q_lora_rank": self.q_lora_rank,
            "o_groups": self.o_groups,
            "o_lora_rank": self.o_lora_rank,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "sliding_window": WINDOW,
            "compress_ratios": ratios,
            "rope_theta": self.rope_theta,
            "compress_rope_theta": self.compress_rope_theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn.factor,
                "original_max_position_embeddings": self.yarn.original_positions,
                "beta_fast": self.yarn.beta_fast,
                "beta_slow": self.yarn.beta_slow,
            },
        })
    }

    fn experts_as_json(&self) -> Value {
        json!({
            "expert_dtype": "fp4",
            "moe_intermediate_size": self.expert_width,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.topk,
            "num_hash_layers": self.num_hash_layers,
            "norm_topk_prob": true,
            "routed_scaling_factor": self.route_scale,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "swiglu_limit": self.swiglu_limit,
        })
    }
}

/// Another architecture has other fields: it is named before they are read.
fn check_architecture(object: &Map<String, Value>) -> Result<(), ConfigError> {
    let refused = |field, expected| {
        let value = object.get(field).map_or_else(|| "missing".to_owned(), ToString::to_string);
        Err(ConfigError::Architecture { field, value, expected })
    };
    if object.get("model_type") != Some(&json!(MODEL_TYPE)) {
        return refused("model_type", MODEL_TYPE);
    }
    let named = object.get("architectures").and_then(Value::as_array);
    match named.is_some_and(|all| all.contains(&json!(ARCHITECTURE))) {
        true => Ok(()),
        false => refused("architectures", ARCHITECTURE),
    }
}

#[cfg(test)]
mod tests;
