//! The weights of a model on a device, in the form that the launchers take (inference 5, 15).
//!
//! Codes and scales are uploaded as they are stored. What changes on the way:
//!
//! - norm weights, bf16 in the file, become fp32, which changes no value;
//! - gate (w1) and up (w3) become one matrix, gate's rows first; so do the two projections of a
//!   compressor, values first; gate and up of NVFP4 stay apart, since each has its own scale;
//! - the scale of the inputs of NVFP4 products is the largest that the layer's experts have;
//! - wo_a is decoded to bf16 (inference 16, O8);
//! - the table of a hashed router becomes 32-bit.

use std::collections::BTreeMap;

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use crate::cache::cache_layout::LayerKind;
use crate::formats::quantize_fp8::{self, Group, ScaleLayout, ScaleType};
use crate::model::checkpoint::tensors::{self, LayerId, MXFP4_GROUP, NVFP4_GROUP, TensorSpec};
use crate::model::checkpoint::{Source, integers, number};
use crate::model::config::ExpertFormat;
use crate::model::memory::Memory;
use crate::projections::linear::BLOCK;
use crate::streams::mhc_mix::NUM_COLUMNS;
use crate::streams::mhc_post::NUM_STREAMS;

/// The weights of a model. Views are named as the launchers of [`crate::model`] use them.
pub struct Weights<'d> {
    memory: Memory<'d>,
    /// `embed`, `head`, `norm` and `head_fn`, `head_base`, `head_scale`.
    pub shared: Views,
    /// Those of each main layer.
    pub layers: Vec<Views>,
    /// Those of the MTP module, with `enorm`, `hnorm`, `norm`, its projections and its head mix.
    pub mtp: Option<Views>,
}

/// Uploads tensors.
struct Loader<'a, 'd> {
    source: &'a dyn Source,
    memory: Memory<'d>,
    views: Views,
}

impl<'d> Weights<'d> {
    /// Uploads the tensors of a checkpoint, layer by layer. `progress` gets each part's name and its bytes in the
    /// files when it is on the device.
    ///
    /// # Errors
    /// A device without enough memory, and its other errors.
    pub fn load(
        device: &'d Device,
        source: &dyn Source,
        progress: &mut dyn FnMut(&str, usize),
    ) -> Result<Self> {
        let config = source.config();
        let memory = Memory::new(device);
        let mut loader = Loader { source, memory, views: Views::new() };
        loader.shared()?;
        let shared = std::mem::take(&mut loader.views);
        progress("shared", tensors::shared(config).iter().map(TensorSpec::bytes).sum());
        let (mut layers, mut mtp) = (Vec::new(), None);
        for id in LayerId::all(config) {
            loader.layer(id)?;
            let views = std::mem::take(&mut loader.views);
            match id {
                LayerId::Main(_) => layers.push(views),
                LayerId::Mtp(_) => mtp = Some(views),
            }
            progress(&id.to_string(), id.bytes(config));
        }
        Ok(Self { memory: loader.memory, shared, layers, mtp })
    }

    /// The first tensor that the others lack or have in another form, or have alone.
    pub(super) fn difference(&self, others: &Self) -> Option<String> {
        let forms = |weights: &Self| -> BTreeMap<String, (DType, Vec<usize>)> {
            let main = weights.layers.iter().enumerate();
            let main = main.map(|(layer, views)| (format!("layer {layer}: "), views));
            let parts = [(String::new(), &weights.shared)].into_iter().chain(main);
            let parts = parts.chain(weights.mtp.iter().map(|views| ("mtp: ".to_owned(), views)));
            let named = |(part, views): (String, &Views)| {
                let form = |(name, view): (&str, &TensorView)| {
                    (format!("{part}{name}"), (view.dtype, view.shape.clone()))
                };
                views.iter().map(|(name, view)| form((name, view))).collect::<Vec<_>>()
            };
            parts.flat_map(named).collect()
        };
        let (own, others) = (forms(self), forms(others));
        let names = own.keys().chain(others.keys());
        names.into_iter().find(|name| own.get(*name) != others.get(*name)).cloned()
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

impl Loader<'_, '_> {
    fn put(&mut self, name: &'static str, view: TensorView) {
        self.views.put(name, view);
    }

    fn upload(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<()> {
        let view = self.memory.upload(name, dtype, shape, bytes)?;
        self.put(name, view);
        Ok(())
    }

    /// The stored bytes of several tensors, one after the other.
    fn joined(&self, names: &[String]) -> Vec<u8> {
        let mut all = Vec::new();
        names.iter().for_each(|name| all.extend_from_slice(&self.source.bytes(name)));
        all
    }

    /// Tensors of one type, as they are stored, one after the other.
    fn stored(
        &mut self,
        name: &'static str,
        names: &[String],
        dtype: DType,
        shape: &[usize],
    ) -> Result<()> {
        let source = self.source;
        match names {
            [one] => self.upload(name, dtype, shape, &source.bytes(one)),
            _ => self.upload(name, dtype, shape, &self.joined(names)),
        }
    }

    /// A norm's weight.
    fn norm(&mut self, name: &'static str, stored: &str) -> Result<()> {
        let stored = self.source.bytes(stored);
        let words = stored.as_chunks::<2>().0.iter();
        // bf16 is the upper half of an fp32 number.
        let wide = words.flat_map(|&[low, high]| [0, 0, low, high]).collect::<Vec<u8>>();
        self.upload(name, DType::F32, &[wide.len() / 4], &wide)
    }

    /// A projection in FP8, or several of as many inputs, one after the other.
    fn fp8(
        &mut self,
        [name, scales]: [&'static str; 2],
        stored: &[String],
        [outs, ins]: [usize; 2],
    ) -> Result<()> {
        let of = |part: &str| -> Vec<String> {
            stored.iter().map(|name| format!("{name}.{part}")).collect()
        };
        self.stored(name, &of("weight"), DType::U8, &[outs, ins])?;
        let blocks = [outs.div_ceil(BLOCK), ins.div_ceil(BLOCK)];
        self.stored(scales, &of("scale"), DType::U8, &blocks)
    }

    fn shared(&mut self) -> Result<()> {
        let config = self.source.config();
        let table = [config.vocab_size, config.hidden_size];
        self.stored("embed", &["embed.weight".into()], DType::Bf16, &table)?;
        self.stored("head", &["head.weight".into()], DType::Bf16, &table)?;
        self.norm("norm", "norm.weight")?;
        self.head_mix("")
    }

    fn head_mix(&mut self, prefix: &str) -> Result<()> {
        let hidden = self.source.config().hidden_size;
        let parts: [(&'static str, &str, &[usize]); 3] = [
            ("head_fn", "hc_head_fn", &[NUM_STREAMS, NUM_STREAMS, hidden]),
            ("head_base", "hc_head_base", &[NUM_STREAMS]),
            ("head_scale", "hc_head_scale", &[1]),
        ];
        for (name, stored, shape) in parts {
            self.stored(name, &[format!("{prefix}{stored}")], DType::F32, shape)?;
        }
        Ok(())
    }

    fn layer(&mut self, id: LayerId) -> Result<()> {
        let hidden = self.source.config().hidden_size;
        let sites: [(&str, [&'static str; 4]); 2] = [
            ("attn", ["attn_norm", "attn_fn", "attn_base", "attn_scale"]),
            ("ffn", ["ffn_norm", "ffn_fn", "ffn_base", "ffn_scale"]),
        ];
        for (site, [norm, weights, base, scale]) in sites {
            self.norm(norm, &format!("{id}.{site}_norm.weight"))?;
            let parts: [(&'static str, &str, &[usize]); 3] = [
                (weights, "fn", &[NUM_COLUMNS, NUM_STREAMS, hidden]),
                (base, "base", &[NUM_COLUMNS]),
                (scale, "scale", &[3]),
            ];
            for (name, part, shape) in parts {
                self.stored(name, &[format!("{id}.hc_{site}_{part}")], DType::F32, shape)?;
            }
        }
        self.attention(&format!("{id}.attn"), id.kind(self.source.config()))?;
        let config = self.source.config();
        self.router(&format!("{id}.ffn"), id.is_hashed(config))?;
        match id.expert_format(config) {
            ExpertFormat::Mxfp4 => self.mxfp4_experts(&format!("{id}.ffn"))?,
            ExpertFormat::Nvfp4 => self.nvfp4_experts(&format!("{id}.ffn"))?,
        }
        self.shared_expert(&format!("{id}.ffn.shared_experts"))?;
        match id {
            LayerId::Mtp(_) => self.mtp(&id.to_string()),
            LayerId::Main(_) => Ok(()),
        }
    }

    fn mtp(&mut self, prefix: &str) -> Result<()> {
        let hidden = self.source.config().hidden_size;
        for norm in ["enorm", "hnorm", "norm"] {
            self.norm(norm, &format!("{prefix}.{norm}.weight"))?;
        }
        let (e, h) = (["e_proj", "e_proj_scales"], ["h_proj", "h_proj_scales"]);
        self.fp8(e, &[format!("{prefix}.e_proj")], [hidden, hidden])?;
        self.fp8(h, &[format!("{prefix}.h_proj")], [hidden, hidden])?;
        self.head_mix(&format!("{prefix}."))
    }

    fn attention(&mut self, prefix: &str, kind: LayerKind) -> Result<()> {
        let config = self.source.config();
        let (hidden, rank, dim) = (config.hidden_size, config.q_lora_rank, config.head_dim);
        let (heads, latent) = (config.num_heads, config.o_groups * config.o_lora_rank);
        let of = |name: &str| [format!("{prefix}.{name}")];
        self.stored("sink", &of("attn_sink"), DType::F32, &[heads])?;
        self.fp8(["wq_a", "wq_a_scales"], &of("wq_a"), [rank, hidden])?;
        self.norm("q_norm", &format!("{prefix}.q_norm.weight"))?;
        self.fp8(["wq_b", "wq_b_scales"], &of("wq_b"), [heads * dim, rank])?;
        self.fp8(["wkv", "wkv_scales"], &of("wkv"), [dim, hidden])?;
        self.norm("kv_norm", &format!("{prefix}.kv_norm.weight"))?;
        self.decoded("wo_a", &format!("{prefix}.wo_a"))?;
        self.fp8(["wo_b", "wo_b_scales"], &of("wo_b"), [hidden, latent])?;
        let Some(ratio) = kind.ratio() else { return Ok(()) };
        let halves = 1 + usize::from(kind == LayerKind::Csa);
        self.compressor(
            ["compressor", "ape", "compressor_norm"],
            &format!("{prefix}.compressor"),
            [ratio, halves * dim],
        )?;
        if kind != LayerKind::Csa {
            return Ok(());
        }
        let (heads, dim) = (config.index_heads, config.index_head_dim);
        let weights = ["index_wq_b", "index_wq_b_scales"];
        self.fp8(weights, &of("indexer.wq_b"), [heads * dim, rank])?;
        let weights = of("indexer.weights_proj.weight");
        self.stored("index_weights", &weights, DType::Bf16, &[heads, hidden])?;
        self.compressor(
            ["index_compressor", "index_ape", "index_norm"],
            &format!("{prefix}.indexer.compressor"),
            [ratio, halves * dim],
        )
    }

    /// The two projections of a compressor as one, values first, with its bias and its norm.
    fn compressor(
        &mut self,
        [weights, ape, norm]: [&'static str; 3],
        prefix: &str,
        [ratio, width]: [usize; 2],
    ) -> Result<()> {
        let hidden = self.source.config().hidden_size;
        let both = ["wkv", "wgate"].map(|part| format!("{prefix}.{part}.weight"));
        self.stored(weights, &both, DType::Bf16, &[2 * width, hidden])?;
        self.stored(ape, &[format!("{prefix}.ape")], DType::F32, &[ratio, width])?;
        self.norm(norm, &format!("{prefix}.norm.weight"))
    }

    /// wo_a as bf16, `[o_groups, o_lora_rank, group_width]`.
    fn decoded(&mut self, name: &'static str, stored: &str) -> Result<()> {
        let config = self.source.config();
        let (groups, rank) = (config.o_groups, config.o_lora_rank);
        let width = config.num_heads / groups * config.head_dim;
        let [outs, blocks] = [groups * rank, (groups * rank).div_ceil(BLOCK)];
        // Freed at the end, when the decoded weight is complete.
        let mut codes = Memory::new(self.memory.device());
        let coded = codes.upload(
            "wo_a codes",
            DType::U8,
            &[outs, width],
            &self.source.bytes(&format!("{stored}.weight")),
        )?;
        let scales = codes.upload(
            "wo_a scales",
            DType::U8,
            &[blocks, width.div_ceil(BLOCK)],
            &self.source.bytes(&format!("{stored}.scale")),
        )?;
        let mut view = self.memory.tensor(name, DType::Bf16, &[outs, width])?;
        let views = Views::from([("codes", &coded), ("scales", &scales), ("y", &view)]);
        let (group, scale, layout) = (Group::Square128, ScaleType::E8m0, ScaleLayout::Plain);
        let device = self.memory.device();
        let options = quantize_fp8::Options { group, scale, layout };
        quantize_fp8::dequantize(device, &views, options)?;
        device.backend().synchronize()?;
        self.memory.seal_last()?;
        view.shape = vec![groups, rank, width];
        view.strides = dsv4_runtime::tensor::dense_strides(&view.shape);
        self.put(name, view);
        Ok(())
    }

    fn router(&mut self, prefix: &str, hashed: bool) -> Result<()> {
        let config = self.source.config();
        let (experts, hidden) = (config.num_experts, config.hidden_size);
        let gate = [format!("{prefix}.gate.weight")];
        self.stored("gate", &gate, DType::Bf16, &[experts, hidden])?;
        if hashed {
            let table = self.source.bytes(&format!("{prefix}.gate.tid2eid"));
            let ids = integers(&table);
            // The loader has checked that they are experts.
            let ids: Vec<u8> = ids.flat_map(|id| (id as i32).to_ne_bytes()).collect();
            self.upload("tid2eid", DType::I32, &[config.vocab_size, config.topk], &ids)
        } else {
            self.stored("bias", &[format!("{prefix}.gate.bias")], DType::F32, &[experts])
        }
    }

    fn mxfp4_experts(&mut self, prefix: &str) -> Result<()> {
        let config = self.source.config();
        let (experts, hidden, width) =
            (config.num_experts, config.hidden_size, config.expert_width);
        let of = |parts: &[&str], what: &str| -> Vec<String> {
            let of_expert = |expert: usize| {
                let name = move |part: &&str| format!("{prefix}.experts.{expert}.{part}.{what}");
                parts.iter().map(name).collect::<Vec<_>>()
            };
            (0..experts).flat_map(of_expert).collect()
        };
        let (both, down): (&[&str], &[&str]) = (&["w1", "w3"], &["w2"]);
        let [w13, w13_scales] = ["weight", "scale"].map(|what| of(both, what));
        let [w2, w2_scales] = ["weight", "scale"].map(|what| of(down, what));
        let groups = |ins: usize| ins / MXFP4_GROUP;
        self.stored("w13", &w13, DType::U8, &[experts, 2 * width, hidden / 2])?;
        self.stored("w13_scales", &w13_scales, DType::U8, &[experts, 2 * width, groups(hidden)])?;
        self.stored("w2", &w2, DType::U8, &[experts, hidden, width / 2])?;
        self.stored("w2_scales", &w2_scales, DType::U8, &[experts, hidden, groups(width)])
    }

    fn nvfp4_experts(&mut self, prefix: &str) -> Result<()> {
        let (source, config) = (self.source, self.source.config());
        let (experts, hidden, width) =
            (config.num_experts, config.hidden_size, config.expert_width);
        let of = |part: &str, what: &str| -> Vec<String> {
            let name = |expert| format!("{prefix}.experts.{expert}.{part}.{what}");
            (0..experts).map(name).collect()
        };
        let parts: [([&'static str; 3], [usize; 2]); 3] = [
            (["w1", "w1_scales", "w1_global_scale"], [width, hidden]),
            (["w3", "w3_scales", "w3_global_scale"], [width, hidden]),
            (["w2", "w2_scales", "w2_global_scale"], [hidden, width]),
        ];
        for ([codes, scales, global], [outs, ins]) in parts {
            self.stored(codes, &of(codes, "weight"), DType::U8, &[experts, outs, ins / 2])?;
            let groups = [experts, outs, ins / NVFP4_GROUP];
            self.stored(scales, &of(codes, "weight_scale"), DType::U8, &groups)?;
            self.stored(global, &of(codes, "weight_scale_2"), DType::F32, &[experts])?;
        }
        let inputs: [(&'static str, &[&str]); 2] =
            [("w13_input_scale", &["w1", "w3"]), ("w2_input_scale", &["w2"])];
        for (name, parts) in inputs {
            let scales = parts.iter().flat_map(|part| of(part, "input_scale"));
            let largest = scales.map(|scale| number(&source.bytes(&scale))).fold(0.0, f32::max);
            self.upload(name, DType::F32, &[1], &largest.to_ne_bytes())?;
        }
        Ok(())
    }

    fn shared_expert(&mut self, prefix: &str) -> Result<()> {
        let config = self.source.config();
        let (hidden, width) = (config.hidden_size, config.expert_width);
        let of = |part: &str| format!("{prefix}.{part}");
        let both = [of("w1"), of("w3")];
        self.fp8(["shared_w13", "shared_w13_scales"], &both, [2 * width, hidden])?;
        self.fp8(["shared_w2", "shared_w2_scales"], &[of("w2")], [hidden, width])
    }
}
