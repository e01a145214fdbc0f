//! Every operator, one line each.

use crate::case::{Case, CaseError};
use crate::operator::{AnyOperator, PreparedCase};
use crate::operators;

/// The operators, in the order of the specification.
#[rustfmt::skip]
pub static OPERATORS: &[&AnyOperator] = &[
    &AnyOperator::of::<operators::embed_streams::EmbedStreams>(),
    &AnyOperator::of::<operators::mhc_mix::MhcMix>(),
    &AnyOperator::of::<operators::mhc_pre::MhcPre>(),
    &AnyOperator::of::<operators::mhc_post::MhcPost>(),
    &AnyOperator::of::<operators::mhc_post_mix_pre::MhcPostMixPre>(),
    &AnyOperator::of::<operators::mhc_block::MhcBlock>(),
    &AnyOperator::of::<operators::mhc_head::MhcHead>(),
    &AnyOperator::of::<operators::rms_norm::RmsNorm>(),
    &AnyOperator::of::<operators::rope::Rope>(),
    &AnyOperator::of::<operators::quantize_fp8::QuantizeFp8>(),
    &AnyOperator::of::<operators::quantize_mxfp4::QuantizeMxfp4>(),
    &AnyOperator::of::<operators::quantize_nvfp4::QuantizeNvfp4>(),
    &AnyOperator::of::<operators::scale_swizzle::ScaleSwizzle>(),
    &AnyOperator::of::<operators::gate_up_interleave::GateUpInterleave>(),
    &AnyOperator::of::<operators::linear::Linear>(),
    &AnyOperator::of::<operators::query_norm_rope::QueryNormRope>(),
    &AnyOperator::of::<operators::query_projection::QueryProjection>(),
    &AnyOperator::of::<operators::kv_norm_rope_write::KvNormRopeWrite>(),
    &AnyOperator::of::<operators::kv_projection::KvProjection>(),
    &AnyOperator::of::<operators::compressor::Compressor>(),
    &AnyOperator::of::<operators::compressor_stream::CompressorStream>(),
    &AnyOperator::of::<operators::hadamard::Hadamard>(),
    &AnyOperator::of::<operators::indexer_query::IndexerQuery>(),
    &AnyOperator::of::<operators::indexer_logits::IndexerLogits>(),
    &AnyOperator::of::<operators::topk::Topk>(),
    &AnyOperator::of::<operators::sparse_attention::SparseAttention>(),
    &AnyOperator::of::<operators::attention_output_rotation::AttentionOutputRotation>(),
    &AnyOperator::of::<operators::decode_attention::DecodeAttention>(),
    &AnyOperator::of::<operators::attention_combine::AttentionCombine>(),
    &AnyOperator::of::<operators::inverse_rope_quantize::InverseRopeQuantize>(),
    &AnyOperator::of::<operators::output_projection::OutputProjection>(),
    &AnyOperator::of::<operators::kv_cache_write::KvCacheWrite>(),
    &AnyOperator::of::<operators::indexer_cache_write::IndexerCacheWrite>(),
    &AnyOperator::of::<operators::router::Router>(),
    &AnyOperator::of::<operators::moe_map::MoeMap>(),
    &AnyOperator::of::<operators::moe_expand::MoeExpand>(),
    &AnyOperator::of::<operators::grouped_linear::GroupedLinear>(),
    &AnyOperator::of::<operators::swiglu::Swiglu>(),
    &AnyOperator::of::<operators::swiglu_quantize::SwigluQuantize>(),
    &AnyOperator::of::<operators::grouped_linear_swiglu::GroupedLinearSwiglu>(),
    &AnyOperator::of::<operators::moe_reduce::MoeReduce>(),
    &AnyOperator::of::<operators::moe::Moe>(),
    &AnyOperator::of::<operators::lm_head::LmHead>(),
    &AnyOperator::of::<operators::sampler::Sampler>(),
    &AnyOperator::of::<operators::score_recompute::ScoreRecompute>(),
    &AnyOperator::of::<operators::indexer_recompute::IndexerRecompute>(),
    &AnyOperator::of::<operators::indexer_loss::IndexerLoss>(),
    &AnyOperator::of::<operators::indexer_backward::IndexerBackward>(),
    &AnyOperator::of::<operators::indexer_distillation::IndexerDistillation>(),
];

/// Names of all operators.
pub fn names() -> Vec<&'static str> {
    OPERATORS.iter().map(|operator| operator.name()).collect()
}

/// The operator called `name`.
///
/// # Errors
/// [`CaseError::UnknownOperator`] with similar names.
pub fn find(name: &str) -> Result<&'static AnyOperator, CaseError> {
    OPERATORS
        .iter()
        .copied()
        .find(|operator| operator.name() == name)
        .ok_or_else(|| CaseError::UnknownOperator { name: name.to_owned(), hint: did_you_mean(name) })
}

/// `: did you mean …?` with the operators whose names are similar, the most similar one first; empty where there are none.
fn did_you_mean(name: &str) -> String {
    /// Names that are offered.
    const MOST: usize = 4;
    /// Jaro and Winkler's similarity of a name that is offered, and how much less it may be than that of the best.
    const ENOUGH: f64 = 0.75;
    const BEHIND: f64 = 0.05;
    /// That of a name of which what was asked for is a part, as `attention` is of several.
    const PART: f64 = 0.87;
    let wanted = name.to_lowercase().replace('-', "_");
    let score = |known: &str| {
        let is_part = wanted.len() > 2 && known.contains(&wanted);
        strsim::jaro_winkler(known, &wanted).max(if is_part { PART } else { 0.0 })
    };
    let mut similar: Vec<(f64, &str)> = names().into_iter().map(|known| (score(known), known)).collect();
    similar.sort_by(|a, b| b.0.total_cmp(&a.0));
    let least = similar.first().map_or(ENOUGH, |(best, _)| ENOUGH.max(best - BEHIND));
    let similar = similar.iter().take(MOST).filter(|(score, _)| *score >= least);
    let similar: Vec<String> = similar.map(|(_, known)| format!("`{known}`")).collect();
    match similar.split_last() {
        None => String::new(),
        Some((last, [])) => format!(": did you mean {last}?"),
        Some((last, others)) => format!(": did you mean {} or {last}?", others.join(", ")),
    }
}

/// The operators of a comma-separated list; all of them when there is none.
///
/// # Errors
/// [`CaseError::UnknownOperator`]; [`CaseError::NamedTwice`], since what runs twice would count twice.
pub fn select(list: Option<&str>) -> Result<Vec<&'static AnyOperator>, CaseError> {
    let Some(list) = list else { return Ok(OPERATORS.to_vec()) };
    let names: Vec<&str> = list.split(',').map(str::trim).collect();
    if let Some(at) = (1..names.len()).find(|&at| names[..at].contains(&names[at])) {
        return Err(CaseError::NamedTwice { name: names[at].to_owned() });
    }
    names.into_iter().map(find).collect()
}

/// Makes the inputs of any case.
///
/// # Errors
/// An unknown operator, or a field that the operator cannot take.
pub fn prepare(case: &Case) -> Result<Box<dyn PreparedCase>, CaseError> {
    find(&case.operator)?.prepare(case)
}
