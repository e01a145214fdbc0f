//! The numbers of a model's calls that no tensor tells. They follow from the configuration and the
//! specification, not from what the model passed: a wrong number is then an error of its call.

use dsv4_kernels::cache::cache_layout::LayerKind;
use dsv4_kernels::cache::kv_cache::RowFormat;
use dsv4_kernels::model::config::Config;
use serde_json::{Value, json};

use super::cases::Fields;
use crate::operator::actual::ByName;

/// The fields of a call of an operator in a layer.
pub(super) fn of(
    config: &Config,
    operator: &str,
    layer: Option<usize>,
    tensors: &ByName,
) -> Fields {
    let extent = |name: &str, axis: usize| -> usize {
        tensors.get(name).and_then(|tensor| tensor.shape.get(axis).copied()).unwrap_or(0)
    };
    let kind = layer.and_then(|layer| config.layers.get(layer).copied());
    let kind = kind.unwrap_or(LayerKind::Window);
    let (eps, row) = (config.norm_eps, config.row());
    let RowFormat { nope_dim, rope_dim } = row;
    let entries = kind.entries_per_page();
    let rows_of = |name: &str| extent(name, 1) / row.row_bytes().max(1);
    let table = |fields: Value| with(fields, table_of(tensors, &extent));
    let experts = json!({ "num_experts": config.num_experts, "alignment": 1,
        "spare_positions": 0, "expected_rows": 1 });
    let quantized = json!({ "group": "row128", "scale": "e8m0", "layout": "plain" });
    let streams = json!({ "norm_eps": eps, "hc_eps": config.hc_eps,
        "sinkhorn_iters": config.sinkhorn_iters, "separate": false });
    let fields = match operator {
        "embed_streams" => json!({ "num_streams": extent("out", 1) }),
        "mhc_mix" | "mhc_post_mix_pre" | "mhc_head" => streams,
        "mhc_pre" => json!({ "eps": eps, "norm": false }),
        "rms_norm" => json!({ "eps": eps }),
        "quantize_fp8" => with(quantized, json!({ "task": "quantize" })),
        "linear" => linear(tensors),
        "query_norm_rope" => table(json!({ "eps": eps, "rope_dim": rope_dim })),
        "kv_norm_rope_write" => table(json!({ "eps": eps, "nope_dim": nope_dim,
            "rope_dim": rope_dim, "page_size": rows_of("cache") })),
        "kv_cache_write" => {
            json!({ "nope_dim": nope_dim, "rope_dim": rope_dim, "page_size": entries })
        }
        "decode_attention" => json!({ "nope_dim": nope_dim, "rope_dim": rope_dim,
            "window.page_size": rows_of("window"), "compressed.page_size": entries.max(1),
            "window.num_pages": extent("window", 0), "window.topk": extent("window_indices", 2),
            "compressed.num_pages": extent("compressed", 0),
            "compressed.topk": extent("compressed_indices", 2),
            "lengths": "absent", "num_blocks": 1,
            "softmax_scale": (config.head_dim as f64).sqrt().recip() }),
        "rope" => table(json!({ "inverse": true, "rope_dim": rope_dim })),
        "router" => json!({ "route_scale": config.route_scale }),
        "moe_map" | "moe_expand" | "moe_reduce" => experts,
        "grouped_linear" => with(
            experts,
            json!({ "group": 128, "weights": "mxfp4",
            "layout": "plain", "output": "bf16", "grouping": "contiguous" }),
        ),
        "grouped_linear_swiglu" => with(
            experts,
            json!({ "group": 128, "weights": "mxfp4",
            "layout": "plain", "interleaved": false, "limit": config.swiglu_limit,
            "product_group": "row128", "product_layout": "plain", "product_scale": "e8m0",
            "round_to_bf16": true, "grouping": "contiguous", "weighted": true }),
        ),
        "swiglu_quantize" => with(
            quantized,
            json!({ "limit": config.swiglu_limit,
            "round_to_bf16": true, "padding_rows": false }),
        ),
        "compressor_stream" => with(
            compressor(kind, tensors, &extent),
            json!({ "eps": eps,
            "epilogue": "none", "dtype": "bf16", "hostile": false, "staggered": false,
            "drafts": 0, "rope_dim": rope_dim }),
        ),
        "indexer_cache_write" => json!({ "stored": "e2m1", "page_size": entries }),
        "indexer_query" => {
            let channels = (config.index_heads * config.index_head_dim) as f64;
            table(json!({ "stored": "e2m1", "weights": "f32",
                "weights_scale": channels.sqrt().recip() }))
        }
        "indexer_logits" => json!({ "addressing": "paged", "operands": "e2m1", "weights": "f32",
            "ratio": 1, "sm_scale": 1.0, "page_size": entries, "columns": extent("logits", 2),
            "clean_logits": true, "packed": false, "q_off": false }),
        "topk" => json!({ "topk": config.index_topk, "page_size": entries, "index": "paged",
            "lengths": "within", "with_values": false }),
        _ => json!({}),
    };
    rounded(fields)
}

fn with(fields: Value, more: Value) -> Value {
    match (fields, more) {
        (Value::Object(mut fields), Value::Object(more)) => {
            fields.extend(more);
            Value::Object(fields)
        }
        (fields, _) => fields,
    }
}

/// A table is indexed by positions where the call has them.
fn table_of(tensors: &ByName, extent: &dyn Fn(&str, usize) -> usize) -> Value {
    match tensors.contains_key("positions") {
        true => json!({ "table": "positions", "table_rows": extent("cos", 0) }),
        false => json!({ "table": "row_per_token", "table_rows": 0 }),
    }
}

/// Codes of weights have scales of 128 numbers; sums of bf16 are stored in the type of y.
fn linear(tensors: &ByName) -> Value {
    let output = tensors.get("y").map_or_else(String::new, |y| y.dtype.to_string());
    let (weights, group) = match tensors.contains_key("w_scales") {
        true => ("fp8", 128),
        false => ("bf16", 0),
    };
    let groups = match tensors.get("x").map(|x| &x.shape[..]) {
        Some(&[_, groups, _]) => groups,
        _ => 0,
    };
    json!({ "weights": weights, "group": group, "output": output, "layout": "plain",
        "before": "absent", "num_groups": groups, "scale_bytes": group > 0 })
}

/// One step of sequences; the oracle takes their lengths and positions from the lists. How many
/// entries they complete follows from the first position.
fn compressor(kind: LayerKind, tensors: &ByName, extent: &dyn Fn(&str, usize) -> usize) -> Value {
    let sequences = extent("first_positions", 0).max(1);
    let positions = tensors.get("first_positions").and_then(|list| list.to_integers());
    let first = positions.and_then(|list| list.first().copied()).unwrap_or(0).max(0);
    json!({ "overlaps": kind == LayerKind::Csa, "ratio": kind.ratio().unwrap_or(1),
        "num_sequences": sequences, "position": first,
        "chunks": [extent("kv", 0).div_ceil(sequences)] })
}

/// Numbers as a launcher takes them, in fp32.
fn rounded(fields: Value) -> Fields {
    let Value::Object(mut fields) = fields else { return Fields::new() };
    for value in fields.values_mut() {
        if let Some(number) = value.as_f64().filter(|_| value.is_f64()) {
            *value = json!(f64::from(number as f32));
        }
    }
    fields
}
