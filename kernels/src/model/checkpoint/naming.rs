//! transformers' names of tensors, as official ones (inference 15).
//!
//! transformers has the experts of a layer in one tensor, `[num_experts, 2 expert_width, …]` for w1
//! and w3 and `[num_experts, hidden_size, …]` for w2. Each is taken apart: the bytes of an expert
//! are consecutive. Scales of FP8 are called `weight_scale_inv` there, and mean the same.

/// Modules outside of all layers, and their official names.
const SHARED: [(&str, &str); 6] = [
    ("model.embed_tokens.weight", "embed.weight"),
    ("lm_head.weight", "head.weight"),
    ("model.norm.weight", "norm.weight"),
    ("model.hc_head.hc_fn", "hc_head_fn"),
    ("model.hc_head.hc_base", "hc_head_base"),
    ("model.hc_head.hc_scale", "hc_head_scale"),
];

/// Modules and parameters of a layer, and their official names.
const OF_LAYER: [(&str, &str); 34] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_a_norm", "attn.q_norm"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.kv_norm", "attn.kv_norm"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    ("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    ("self_attn.compressor.kv_norm", "attn.compressor.norm"),
    ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj"),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
    ("self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate"),
    ("self_attn.compressor.indexer.kv_norm", "attn.indexer.compressor.norm"),
    ("mlp.gate", "ffn.gate"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate.tid2eid", "ffn.gate.tid2eid"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ("mlp.experts.gate_up_proj", GATE_UP),
    ("mlp.experts.down_proj", DOWN),
];

/// All experts of a layer: w1 and w3 of one after the other, and w2.
const GATE_UP: &str = "ffn.experts.w1+w3";
const DOWN: &str = "ffn.experts.w2";

/// Endings of a module's tensors, and the official ones.
const ENDINGS: [(&str, &str); 4] = [
    ("", ""),
    (".weight", ".weight"),
    (".weight_scale_inv", ".scale"),
    // Experts are parameters, not modules.
    ("_scale_inv", ".scale"),
];

/// A part of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its official name.
    pub name: String,
    /// Its sizes.
    pub shape: Vec<usize>,
}

/// Whether a name may be transformers'.
pub(super) fn is_of_transformers(name: &str) -> bool {
    name.starts_with("model.") || name == "lm_head.weight"
}

/// The official tensors that a tensor of transformers' consists of, each with as many bytes as the
/// others; `None` if it has none of these names, or cannot be taken apart.
pub(super) fn parts(name: &str, shape: &[usize]) -> Option<Vec<Part>> {
    let whole = |name: String| Some(vec![Part { name, shape: shape.to_vec() }]);
    if let Some((_, official)) = SHARED.iter().find(|(theirs, _)| *theirs == name) {
        return whole((*official).to_owned());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    layer.parse::<usize>().ok()?;
    let (module, ending) = OF_LAYER.iter().find_map(|(theirs, module)| {
        let left = rest.strip_prefix(theirs)?;
        let (_, ending) = ENDINGS.iter().find(|(theirs, _)| *theirs == left)?;
        Some((*module, *ending))
    })?;
    let experts: &[&str] = match module {
        GATE_UP => &["w1", "w3"],
        DOWN => &["w2"],
        _ => return whole(format!("layers.{layer}.{module}{ending}")),
    };
    let &[num_experts, rows, columns] = shape else { return None };
    if rows % experts.len() != 0 {
        return None;
    }
    // A parameter has no `.weight` at its end.
    let ending = if ending.is_empty() { ".weight" } else { ending };
    let part = |expert: usize, which: &str| Part {
        name: format!("layers.{layer}.ffn.experts.{expert}.{which}{ending}"),
        shape: vec![rows / experts.len(), columns],
    };
    let of_expert = |expert| experts.iter().map(move |which| part(expert, which));
    Some((0..num_experts).flat_map(of_expert).collect())
}
