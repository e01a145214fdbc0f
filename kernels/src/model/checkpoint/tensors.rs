//! The tensors of a checkpoint: their official names, formats and shapes (inference 5.2, 15).

use std::fmt;

use safetensors::Dtype;

use crate::cache::cache_layout::LayerKind;
use crate::model::config::{Config, ExpertFormat};
use crate::projections::linear::BLOCK;
use crate::streams::mhc_mix::NUM_COLUMNS;
use crate::streams::mhc_post::NUM_STREAMS;

/// Values of a row that share a scale in MXFP4.
pub const MXFP4_GROUP: usize = 32;

/// Values of a row that share a scale in NVFP4.
pub const NVFP4_GROUP: usize = 16;

/// The format of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// bf16.
    Bf16,
    /// fp32.
    F32,
    /// 64-bit integers.
    I64,
    /// e4m3 codes.
    E4m3,
    /// e8m0 scales.
    E8m0,
    /// Two e2m1 codes in a byte, the even one in the low nibble.
    E2m1Pairs,
    /// The same in bytes without a sign, of NVFP4.
    Nvfp4Pairs,
    /// e4m3 scales of NVFP4.
    Nvfp4Scales,
}

impl Format {
    /// Its type in a safetensors file.
    pub fn stored(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F32 => Dtype::F32,
            Self::I64 => Dtype::I64,
            Self::E4m3 => Dtype::F8_E4M3,
            Self::E8m0 => Dtype::F8_E8M0,
            Self::E2m1Pairs => Dtype::I8,
            Self::Nvfp4Pairs => Dtype::U8,
            Self::Nvfp4Scales => Dtype::F8_E4M3,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::E4m3 | Self::E8m0 | Self::E2m1Pairs => 1,
            Self::Nvfp4Pairs | Self::Nvfp4Scales => 1,
        }
    }
}

/// A tensor that a checkpoint of a configuration has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its official name.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// Its sizes, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Whether it is a scale of a whole tensor, above 0.
    pub fn is_global_scale(&self) -> bool {
        self.shape.is_empty()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.format.bytes()
    }
}

/// A layer whose tensors are loaded together: a main layer, or an MTP module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerId {
    /// The main layer of this number.
    Main(usize),
    /// The MTP module of this number.
    Mtp(usize),
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Main(layer) => write!(f, "layers.{layer}"),
            Self::Mtp(module) => write!(f, "mtp.{module}"),
        }
    }
}

impl LayerId {
    /// All layers of a model, main ones first.
    pub fn all(config: &Config) -> Vec<Self> {
        let main = (0..config.layers.len()).map(Self::Main);
        main.chain((0..config.num_mtp_layers).map(Self::Mtp)).collect()
    }

    /// What it attends to. An MTP module has a window only.
    pub fn kind(self, config: &Config) -> LayerKind {
        match self {
            Self::Main(layer) => config.layers[layer],
            Self::Mtp(_) => LayerKind::Window,
        }
    }

    /// Bytes of its tensors in the files.
    pub fn bytes(self, config: &Config) -> usize {
        of_layer(config, self).iter().map(TensorSpec::bytes).sum()
    }

    /// How its experts are stored. An MTP module keeps the released format.
    pub fn expert_format(self, config: &Config) -> ExpertFormat {
        match self {
            Self::Main(_) => config.expert_format,
            Self::Mtp(_) => ExpertFormat::Mxfp4,
        }
    }

    /// Whether its experts are chosen by a table of token ids.
    pub fn is_hashed(self, config: &Config) -> bool {
        match self {
            Self::Main(layer) => config.is_hashed(layer),
            Self::Mtp(_) => false,
        }
    }
}

/// The tensors outside of all layers: embedding, head, final norm and the mix before it.
pub fn shared(config: &Config) -> Vec<TensorSpec> {
    let mut list = List::default();
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    list.bf16("embed.weight", &[vocab, hidden]);
    list.bf16("head.weight", &[vocab, hidden]);
    list.bf16("norm.weight", &[hidden]);
    list.head_mix("", config);
    list.0
}

/// The tensors of a layer.
pub fn of_layer(config: &Config, layer: LayerId) -> Vec<TensorSpec> {
    let mut list = List::default();
    let hidden = config.hidden_size;
    for site in ["attn", "ffn"] {
        list.bf16(&format!("{layer}.{site}_norm.weight"), &[hidden]);
        list.f32(&format!("{layer}.hc_{site}_fn"), &[NUM_COLUMNS, NUM_STREAMS * hidden]);
        list.f32(&format!("{layer}.hc_{site}_base"), &[NUM_COLUMNS]);
        list.f32(&format!("{layer}.hc_{site}_scale"), &[3]);
    }
    list.attention(&format!("{layer}.attn"), config, layer.kind(config));
    list.router(&format!("{layer}.ffn"), config, layer.is_hashed(config));
    list.experts(&format!("{layer}.ffn"), config, layer.expert_format(config));
    if let LayerId::Mtp(_) = layer {
        for norm in ["enorm", "hnorm", "norm"] {
            list.bf16(&format!("{layer}.{norm}.weight"), &[hidden]);
        }
        for projection in ["e_proj", "h_proj"] {
            list.fp8(&format!("{layer}.{projection}"), hidden, hidden);
        }
        list.head_mix(&format!("{layer}."), config);
    }
    list.0
}

/// All tensors of a checkpoint.
pub fn all(config: &Config) -> Vec<TensorSpec> {
    let layers = LayerId::all(config).into_iter().flat_map(|layer| of_layer(config, layer));
    shared(config).into_iter().chain(layers).collect()
}

/// Names of tensors that a checkpoint may have in addition, and of those that they must equal: the
/// MTP module's copies of embedding and head.
pub fn copies(config: &Config) -> Vec<(String, &'static str)> {
    let of = |module: usize| {
        [("embed.weight", "embed.weight"), ("head.weight", "head.weight")]
            .map(|(name, shared)| (format!("{}.{name}", LayerId::Mtp(module)), shared))
    };
    (0..config.num_mtp_layers).flat_map(of).collect()
}

#[derive(Default)]
struct List(Vec<TensorSpec>);

impl List {
    fn push(&mut self, name: String, format: Format, shape: &[usize]) {
        self.0.push(TensorSpec { name, format, shape: shape.to_vec() });
    }

    fn bf16(&mut self, name: &str, shape: &[usize]) {
        self.push(name.to_owned(), Format::Bf16, shape);
    }

    fn f32(&mut self, name: &str, shape: &[usize]) {
        self.push(name.to_owned(), Format::F32, shape);
    }

    /// A projection in FP8, with a scale for each block of 128 by 128.
    fn fp8(&mut self, name: &str, out_features: usize, in_features: usize) {
        let blocks = [out_features.div_ceil(BLOCK), in_features.div_ceil(BLOCK)];
        self.push(format!("{name}.weight"), Format::E4m3, &[out_features, in_features]);
        self.push(format!("{name}.scale"), Format::E8m0, &blocks);
    }

    /// A projection in MXFP4, with a scale for each 32 values of a row.
    fn mxfp4(&mut self, name: &str, out_features: usize, in_features: usize) {
        let groups = in_features / MXFP4_GROUP;
        self.push(format!("{name}.weight"), Format::E2m1Pairs, &[out_features, in_features / 2]);
        self.push(format!("{name}.scale"), Format::E8m0, &[out_features, groups]);
    }

    /// A projection in NVFP4: codes, a scale for each 16 values of a row, that of the matrix, and
    /// that of its inputs.
    fn nvfp4(&mut self, name: &str, out_features: usize, in_features: usize) {
        let groups = in_features / NVFP4_GROUP;
        self.push(format!("{name}.weight"), Format::Nvfp4Pairs, &[out_features, in_features / 2]);
        self.push(format!("{name}.weight_scale"), Format::Nvfp4Scales, &[out_features, groups]);
        self.f32(&format!("{name}.weight_scale_2"), &[]);
        self.f32(&format!("{name}.input_scale"), &[]);
    }

    /// The mix of the streams before a final norm.
    fn head_mix(&mut self, prefix: &str, config: &Config) {
        let hidden = NUM_STREAMS * config.hidden_size;
        self.f32(&format!("{prefix}hc_head_fn"), &[NUM_STREAMS, hidden]);
        self.f32(&format!("{prefix}hc_head_base"), &[NUM_STREAMS]);
        self.f32(&format!("{prefix}hc_head_scale"), &[1]);
    }

    fn attention(&mut self, prefix: &str, config: &Config, kind: LayerKind) {
        let (hidden, rank, dim) = (config.hidden_size, config.q_lora_rank, config.head_dim);
        let latent = config.o_groups * config.o_lora_rank;
        self.f32(&format!("{prefix}.attn_sink"), &[config.num_heads]);
        self.fp8(&format!("{prefix}.wq_a"), rank, hidden);
        self.bf16(&format!("{prefix}.q_norm.weight"), &[rank]);
        self.fp8(&format!("{prefix}.wq_b"), config.num_heads * dim, rank);
        self.fp8(&format!("{prefix}.wkv"), dim, hidden);
        self.bf16(&format!("{prefix}.kv_norm.weight"), &[dim]);
        self.fp8(&format!("{prefix}.wo_a"), latent, config.num_heads / config.o_groups * dim);
        self.fp8(&format!("{prefix}.wo_b"), hidden, latent);
        let Some(ratio) = kind.ratio() else { return };
        let overlaps = kind == LayerKind::Csa;
        self.compressor(&format!("{prefix}.compressor"), ratio, overlaps, hidden, dim);
        if overlaps {
            let (heads, dim) = (config.index_heads, config.index_head_dim);
            self.fp8(&format!("{prefix}.indexer.wq_b"), heads * dim, rank);
            self.bf16(&format!("{prefix}.indexer.weights_proj.weight"), &[heads, hidden]);
            self.compressor(&format!("{prefix}.indexer.compressor"), ratio, true, hidden, dim);
        }
    }

    fn compressor(
        &mut self,
        prefix: &str,
        ratio: usize,
        overlaps: bool,
        hidden: usize,
        dim: usize,
    ) {
        let width = dim * (1 + usize::from(overlaps));
        self.f32(&format!("{prefix}.ape"), &[ratio, width]);
        self.bf16(&format!("{prefix}.wkv.weight"), &[width, hidden]);
        self.bf16(&format!("{prefix}.wgate.weight"), &[width, hidden]);
        self.bf16(&format!("{prefix}.norm.weight"), &[dim]);
    }

    fn router(&mut self, prefix: &str, config: &Config, hashed: bool) {
        let gate = [config.num_experts, config.hidden_size];
        self.bf16(&format!("{prefix}.gate.weight"), &gate);
        if hashed {
            let table = [config.vocab_size, config.topk];
            self.push(format!("{prefix}.gate.tid2eid"), Format::I64, &table);
        } else {
            self.f32(&format!("{prefix}.gate.bias"), &[config.num_experts]);
        }
    }

    fn experts(&mut self, prefix: &str, config: &Config, format: ExpertFormat) {
        let (hidden, width) = (config.hidden_size, config.expert_width);
        for expert in 0..config.num_experts {
            for (part, [outs, ins]) in
                [("w1", [width, hidden]), ("w2", [hidden, width]), ("w3", [width, hidden])]
            {
                let name = format!("{prefix}.experts.{expert}.{part}");
                match format {
                    ExpertFormat::Mxfp4 => self.mxfp4(&name, outs, ins),
                    ExpertFormat::Nvfp4 => self.nvfp4(&name, outs, ins),
                }
            }
        }
        self.fp8(&format!("{prefix}.shared_experts.w1"), width, hidden);
        self.fp8(&format!("{prefix}.shared_experts.w2"), hidden, width);
        self.fp8(&format!("{prefix}.shared_experts.w3"), width, hidden);
    }
}
