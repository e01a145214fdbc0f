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
    let kind = layer.and_then(|layer| config.layers.get(layer).copied());
    let site = Site { config, tensors, kind: kind.unwrap_or(LayerKind::Window) };
    let fields = site
        .of_streams(operator)
        .or_else(|| site.of_projections(operator))
        .or_else(|| site.of_attention(operator))
        .or_else(|| site.of_indexer(operator))
        .or_else(|| site.of_experts(operator));
    rounded(fields.unwrap_or_else(|| json!({})))
}

/// Where a call is, and its tensors.
struct Site<'a> {
    config: &'a Config,
    tensors: &'a ByName,
    kind: LayerKind,
}

impl Site<'_> {
    fn extent(&self, name: &str, axis: usize) -> usize {
        let tensor = self.tensors.get(name);
        tensor.and_then(|tensor| tensor.shape.get(axis).copied()).unwrap_or(0)
    }

    /// Channels of a row of K = V that do not turn, and that do.
    fn row(&self) -> Value {
        let RowFormat { nope_dim, rope_dim } = self.config.row();
        json!({ "nope_dim": nope_dim, "rope_dim": rope_dim })
    }

    /// Rows of a page of a cache.
    fn page_rows(&self, name: &str) -> usize {
        self.extent(name, 1) / self.config.row().row_bytes().max(1)
    }

    /// The fields of a table, which is indexed by positions where the call has them.
    fn table(&self) -> Value {
        let is_indexed = self.tensors.contains_key("positions");
        let (table, rows) = match is_indexed {
            true => ("positions", self.extent("cos", 0)),
            false => ("row_per_token", 0),
        };
        json!({ "table": table, "table_rows": rows, "rope_dim": self.config.rope_dim })
    }

    fn of_streams(&self, operator: &str) -> Option<Value> {
        let Config { norm_eps, hc_eps, sinkhorn_iters, .. } = self.config;
        Some(match operator {
            "embed_streams" => json!({ "num_streams": self.extent("out", 1) }),
            "mhc_mix" | "mhc_post_mix_pre" | "mhc_head" => json!({ "norm_eps": norm_eps,
                "hc_eps": hc_eps, "sinkhorn_iters": sinkhorn_iters, "separate": false }),
            "mhc_pre" => json!({ "eps": norm_eps, "norm": false }),
            _ => return None,
        })
    }

    fn of_projections(&self, operator: &str) -> Option<Value> {
        let eps = json!({ "eps": self.config.norm_eps });
        Some(match operator {
            "rms_norm" => eps,
            "quantize_fp8" => with(quantized(), json!({ "task": "quantize" })),
            "quantize_nvfp4" => json!({ "task": "quantize", "layout": "plain" }),
            "linear" => self.linear(),
            "query_norm_rope" => with(self.table(), eps),
            "rope" => with(self.table(), json!({ "inverse": true })),
            "kv_norm_rope_write" => {
                let page = json!({ "page_size": self.page_rows("cache") });
                with(with(self.table(), self.row()), with(eps, page))
            }
            "kv_cache_write" => {
                with(self.row(), json!({ "page_size": self.kind.entries_per_page() }))
            }
            "compressor_stream" => with(self.compressor(), eps),
            _ => return None,
        })
    }

    fn of_attention(&self, operator: &str) -> Option<Value> {
        let stores = || {
            json!({
                "window.page_size": self.page_rows("window"),
                "window.num_pages": self.extent("window", 0),
                "window.topk": self.extent("window_indices", 2),
                "compressed.page_size": self.kind.entries_per_page().max(1),
                "compressed.num_pages": self.extent("compressed", 0),
                "compressed.topk": self.extent("compressed_indices", 2),
            })
        };
        let scale = (self.config.head_dim as f64).sqrt().recip();
        let numbers = json!({ "lengths": "absent", "num_blocks": 1, "softmax_scale": scale });
        (operator == "decode_attention").then(|| with(with(self.row(), stores()), numbers))
    }

    fn of_indexer(&self, operator: &str) -> Option<Value> {
        let page_size = self.kind.entries_per_page();
        let channels = (self.config.index_heads * self.config.index_head_dim) as f64;
        Some(match operator {
            "indexer_cache_write" => json!({ "stored": "e2m1", "page_size": page_size }),
            "indexer_query" => with(
                self.table(),
                json!({ "stored": "e2m1", "weights": "f32",
                    "weights_scale": channels.sqrt().recip() }),
            ),
            "indexer_logits" => json!({ "addressing": "paged", "operands": "e2m1",
                "weights": "f32", "ratio": 1, "sm_scale": 1.0, "page_size": page_size,
                "columns": self.extent("logits", 2), "clean_logits": true, "packed": false,
                "q_off": false }),
            "topk" => json!({ "topk": self.config.index_topk, "page_size": page_size,
                "index": "paged", "lengths": "within", "with_values": false }),
            _ => return None,
        })
    }

    fn of_experts(&self, operator: &str) -> Option<Value> {
        let limit = self.config.swiglu_limit;
        let rows = || {
            json!({ "num_experts": self.config.num_experts, "alignment": 1,
                "spare_positions": 0, "expected_rows": 1 })
        };
        let (weights, group) = match self.tensors.contains_key("w_global_scale") {
            true => ("nvfp4", 16),
            false => ("mxfp4", 128),
        };
        let products = || {
            let formats = json!({ "group": group, "weights": weights, "layout": "plain",
                "output": "bf16", "grouping": "contiguous" });
            with(rows(), formats)
        };
        Some(match operator {
            "router" => json!({ "route_scale": self.config.route_scale }),
            "moe_map" | "moe_expand" | "moe_reduce" => rows(),
            "grouped_linear" => products(),
            "grouped_linear_swiglu" => with(
                products(),
                json!({ "interleaved": false, "limit": limit, "product_group": "row128",
                    "product_layout": "plain", "product_scale": "e8m0", "round_to_bf16": true,
                    "weighted": true }),
            ),
            "swiglu" => json!({ "limit": limit, "padding_rows": false }),
            "swiglu_quantize" => with(
                quantized(),
                json!({ "limit": limit, "round_to_bf16": true, "padding_rows": false }),
            ),
            _ => return None,
        })
    }

    /// Codes of weights have scales of 128 numbers; sums of bf16 are stored in the type of y.
    fn linear(&self) -> Value {
        let output = self.tensors.get("y").map_or_else(String::new, |y| y.dtype.to_string());
        let (weights, group) = match self.tensors.contains_key("w_scales") {
            true => ("fp8", 128),
            false => ("bf16", 0),
        };
        let groups = match self.tensors.get("x").map(|x| &x.shape[..]) {
            Some(&[_, groups, _]) => groups,
            _ => 0,
        };
        json!({ "weights": weights, "group": group, "output": output, "layout": "plain",
            "before": "absent", "num_groups": groups, "scale_bytes": group > 0 })
    }

    /// One step of sequences; the oracle takes their lengths and positions from the lists. How many
    /// entries they complete follows from the first position.
    fn compressor(&self) -> Value {
        let sequences = self.extent("first_positions", 0).max(1);
        let positions = self.tensors.get("first_positions").and_then(|list| list.to_integers());
        let first = positions.and_then(|list| list.first().copied()).unwrap_or(0).max(0);
        json!({ "overlaps": self.kind == LayerKind::Csa, "ratio": self.kind.ratio().unwrap_or(1),
            "num_sequences": sequences, "position": first,
            "chunks": [self.extent("kv", 0).div_ceil(sequences)], "epilogue": "none",
            "dtype": "bf16", "hostile": false, "staggered": false, "drafts": 0,
            "rope_dim": self.config.rope_dim })
    }
}

/// How activations are quantized.
fn quantized() -> Value {
    json!({ "group": "row128", "scale": "e8m0", "layout": "plain" })
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
