use super::*;
use crate::format::Format;
use crate::projections::rope::YarnParameters;
use crate::testing::{Golden, assert_within};

/// The tables of a golden model, whose parameters its description has.
fn table(tokens: usize, yarn: bool) -> Result<Table> {
    let main = YarnParameters { rope_dim: 8, ..YarnParameters::main() };
    let compress = YarnParameters {
        rope_dim: 8,
        factor: Some(4.0),
        original_max_position: 64.0,
        ..YarnParameters::compress()
    };
    let frequencies = rope::inv_freq_f32(if yarn { &compress } else { &main })?;
    let positions: Vec<i64> = (0..tokens as i64).collect();
    let (cos, sin) = rope::table(&frequencies, &positions)?;
    let stored = |table: &Tensor| -> Result<Tensor> {
        let rounded: Vec<f64> =
            values(table)?.into_iter().map(|x| Format::F32.nearest(x)).collect();
        Ok(Tensor::from_vec(rounded, table.shape(), table.device())?)
    };
    Ok(Table { cos: stored(&cos)?, sin: stored(&sin)? })
}

/// A golden layer under the names of the oracle.
fn layer(golden: &Golden, number: usize) -> Result<(Kind, Named)> {
    let full = |name: &str| format!("param.model.layers.{number}.{name}");
    let (of, has) = (|name: &str| golden.f64(&full(name)), |name: &str| golden.has(&full(name)));
    let kind = match has("self_attn.compressor.kv_proj.weight") {
        true if has("self_attn.compressor.indexer.kv_proj.weight") => Kind::Csa,
        true => Kind::Hca,
        false => Kind::Window,
    };
    let streams = |name: &str| -> Result<Tensor> {
        let projection = of(name);
        Ok(projection.reshape((24, NUM_STREAMS, projection.dim(1)? / NUM_STREAMS))?)
    };
    let attn = |name: &str| of(&format!("self_attn.{name}"));
    let mlp = |name: &str| of(&format!("mlp.{name}"));
    let wo_a = attn("o_a_proj.weight");
    let (latent, width) = wo_a.dims2()?;
    let mut w = Named::new();
    let tensors = [
        ("attn_fn", streams("attn_hc.fn")?),
        ("attn_scale", of("attn_hc.scale")),
        ("attn_base", of("attn_hc.base")),
        ("attn_norm", of("input_layernorm.weight")),
        ("ffn_fn", streams("ffn_hc.fn")?),
        ("ffn_scale", of("ffn_hc.scale")),
        ("ffn_base", of("ffn_hc.base")),
        ("ffn_norm", of("post_attention_layernorm.weight")),
        ("wq_a", attn("q_a_proj.weight")),
        ("q_norm", attn("q_a_norm.weight")),
        ("wq_b", attn("q_b_proj.weight")),
        ("wkv", attn("kv_proj.weight")),
        ("kv_norm", attn("kv_norm.weight")),
        ("sink", attn("sinks")),
        ("wo_a", wo_a.reshape((2, latent / 2, width))?),
        ("wo_b", attn("o_b_proj.weight")),
        ("gate_weight", mlp("gate.weight")),
        ("gate_up", mlp("experts.gate_up_proj")),
        ("down", mlp("experts.down_proj")),
        ("shared_gate", mlp("shared_experts.gate_proj.weight")),
        ("shared_up", mlp("shared_experts.up_proj.weight")),
        ("shared_down", mlp("shared_experts.down_proj.weight")),
    ];
    w = tensors.into_iter().fold(w, |w, (name, tensor)| w.with(name, tensor));
    let both = |prefix: &str| -> Result<Tensor> {
        let parts = ["kv_proj", "gate_proj"].map(|part| attn(&format!("{prefix}{part}.weight")));
        Ok(Tensor::cat(&parts, 0)?)
    };
    if kind != Kind::Window {
        w = w.with("compressor", both("compressor.")?);
        w = w.with("ape", attn("compressor.position_bias"));
        w = w.with("compressor_norm", attn("compressor.kv_norm.weight"));
    }
    if kind == Kind::Csa {
        let indexer = |name: &str| attn(&format!("compressor.indexer.{name}"));
        w = w.with("index_compressor", both("compressor.indexer.")?);
        w = w.with("index_ape", indexer("position_bias"));
        w = w.with("index_norm", indexer("kv_norm.weight"));
        w = w.with("index_wq_b", indexer("q_b_proj.weight"));
        w = w.with("index_weights", indexer("scorer.weights_proj.weight"));
    }
    let router = match has("mlp.gate.tid2eid") {
        true => ("tid2eid", mlp("gate.tid2eid")),
        false => ("bias", mlp("gate.e_score_correction_bias")),
    };
    Ok((kind, w.with(router.0, router.1)))
}

fn model(golden: &Golden, tokens: usize, window: usize) -> Result<Model> {
    let of = |name: &str| golden.f64(&format!("param.{name}"));
    let head_fn = of("model.hc_head.hc_fn");
    let hidden = head_fn.dim(1)? / NUM_STREAMS;
    let shared = Named::new()
        .with("embed", of("model.embed_tokens.weight"))
        .with("head", of("lm_head.weight"))
        .with("norm", of("model.norm.weight"))
        .with("head_fn", head_fn.reshape((NUM_STREAMS, NUM_STREAMS, hidden))?)
        .with("head_scale", of("model.hc_head.hc_scale"))
        .with("head_base", of("model.hc_head.hc_base"));
    let there =
        |number: &usize| golden.has(&format!("param.model.layers.{number}.input_layernorm.weight"));
    let layers = (0..).take_while(there).map(|number| layer(golden, number));
    let numbers = Numbers {
        num_heads: 4,
        row: RowFormat { nope_dim: 8, rope_dim: 8 },
        window,
        index_topk: 6,
        topk: 2,
        route_scale: 1.5,
        limit: 1.5,
        streams: mhc_mix::Numbers { sinkhorn_iters: 20, norm_eps: 1e-6, hc_eps: 1e-6 },
    };
    let (main, compress) = (table(tokens, false)?, table(tokens, true)?);
    Ok(Model {
        numbers,
        main,
        compress,
        shared,
        layers: layers.collect::<Result<_>>()?,
        module: None,
    })
}

/// The model with every cosine and every sine moved by that many ulps of 1.
fn moved(model: &Model, cos: f64, sin: f64) -> Result<Model> {
    let ulp = f64::from(f32::EPSILON);
    let of = |table: &Table| -> Result<Table> {
        Ok(Table { cos: (&table.cos + cos * ulp)?, sin: (&table.sin + sin * ulp)? })
    };
    Ok(Model { main: of(&model.main)?, compress: of(&model.compress)?, ..model.clone() })
}

fn largest(tensor: &Tensor) -> Result<f64> {
    Ok(values(tensor)?.into_iter().fold(0.0, |all: f64, x| all.max(x.abs())))
}

/// How far logits may be from a file's. They are stored in fp32 where the file is large. Their
/// tables are fp32, too, of cosines and sines that may be off by an ulp of 1: as much as these
/// change what follows from all of them.
fn allowed(model: &Model, ids: &Tensor, found: &Tensor) -> Result<f64> {
    let mut allowed = 2f64.powi(-24) * largest(found)?;
    for (cos, sin) in [(1.0, -1.0), (-1.0, 1.0), (1.0, 1.0)] {
        let other = moved(model, cos, sin)?.logits(ids, &mut Rounding::exact())?;
        allowed += largest(&(other - found)?)?;
    }
    Ok(allowed)
}

/// A bound that would pass a wrong composition is none.
#[test]
fn logits_differ_where_a_step_is_missing_or_misplaced() -> Result<()> {
    let golden = Golden::load("model_prefill__six");
    let (ids, tokens) = (golden.f64("in.input_ids").get(0)?, golden.f64("in.input_ids").dim(1)?);
    let right = model(&golden, tokens, 128)?;
    let logits = |model: &Model| model.logits(&ids, &mut Rounding::exact());
    let expected = logits(&right)?;
    let allowed = allowed(&right, &ids, &expected)?;
    let changes: [fn(&mut Model); 5] = [
        |model| model.numbers.window = 127,
        |model| model.numbers.index_topk = 5,
        |model| std::mem::swap(&mut model.main, &mut model.compress),
        |model| model.layers.swap(0, 1),
        |model| model.numbers.route_scale = 1.0,
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut wrong = right.clone();
        change(&mut wrong);
        let worst = largest(&(logits(&wrong)? - &expected)?)?;
        assert!(worst > allowed, "change {number}: {worst} is within {allowed}");
    }
    Ok(())
}

#[test]
fn logits_of_published_models_are_those_of_the_composition() -> Result<()> {
    for (name, window) in [("one", 128), ("six", 128), ("long", 128), ("batch", 16)] {
        let name = &format!("model_prefill__{name}");
        let golden = Golden::load(name);
        let (ids, logits) = (golden.f64("in.input_ids"), golden.f64("out.logits"));
        let (batch, tokens) = ids.dims2()?;
        let model = model(&golden, tokens, window)?;
        for row in 0..batch {
            let ids = ids.get(row)?;
            let found = model.logits(&ids, &mut Rounding::exact())?;
            let expected = logits.get(row)?;
            let allowed = allowed(&model, &ids, &found)?;
            let bound = (expected.ones_like()? * allowed)?;
            assert_within(name, &found, &expected, &bound);
        }
    }
    Ok(())
}
