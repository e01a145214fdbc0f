//! Every operator, one line each.

use crate::case::{Case, CaseError};
use crate::operator::declared::Op;
use crate::operator::{Operator, Prepared};
use crate::operators;

/// The operators, in the order of the specification.
#[rustfmt::skip]
pub static OPERATORS: &[&dyn Operator] = &[
    &Op::<operators::embed_streams::EmbedStreams>::new(),
    &Op::<operators::mhc_mix::MhcMix>::new(),
    &Op::<operators::mhc_pre::MhcPre>::new(),
    &Op::<operators::mhc_post::MhcPost>::new(),
    &Op::<operators::mhc_post_mix_pre::MhcPostMixPre>::new(),
    &Op::<operators::mhc_block::MhcBlock>::new(),
    &Op::<operators::mhc_head::MhcHead>::new(),
    &Op::<operators::rms_norm::RmsNorm>::new(),
    &Op::<operators::rope::Rope>::new(),
    &Op::<operators::quantize_fp8::QuantizeFp8>::new(),
    &Op::<operators::quantize_mxfp4::QuantizeMxfp4>::new(),
    &Op::<operators::quantize_nvfp4::QuantizeNvfp4>::new(),
    &Op::<operators::scale_swizzle::ScaleSwizzle>::new(),
    &Op::<operators::gate_up_interleave::GateUpInterleave>::new(),
    &Op::<operators::linear::Linear>::new(),
    &Op::<operators::query_norm_rope::QueryNormRope>::new(),
    &Op::<operators::query_projection::QueryProjection>::new(),
    &Op::<operators::kv_norm_rope_write::KvNormRopeWrite>::new(),
    &Op::<operators::kv_projection::KvProjection>::new(),
    &Op::<operators::compressor::Compressor>::new(),
    &Op::<operators::compressor_stream::CompressorStream>::new(),
    &Op::<operators::hadamard::Hadamard>::new(),
    &Op::<operators::indexer_query::IndexerQuery>::new(),
    &Op::<operators::indexer_logits::IndexerLogits>::new(),
    &Op::<operators::topk::Topk>::new(),
    &Op::<operators::sparse_attention::SparseAttention>::new(),
    &Op::<operators::attention_output_rotation::AttentionOutputRotation>::new(),
    &Op::<operators::decode_attention::DecodeAttention>::new(),
    &Op::<operators::attention_combine::AttentionCombine>::new(),
    &Op::<operators::inverse_rope_quantize::InverseRopeQuantize>::new(),
    &Op::<operators::output_projection::OutputProjection>::new(),
    &Op::<operators::kv_cache_write::KvCacheWrite>::new(),
    &Op::<operators::indexer_cache_write::IndexerCacheWrite>::new(),
    &Op::<operators::router::Router>::new(),
    &Op::<operators::moe_map::MoeMap>::new(),
    &Op::<operators::moe_expand::MoeExpand>::new(),
    &Op::<operators::grouped_linear::GroupedLinear>::new(),
    &Op::<operators::swiglu::Swiglu>::new(),
    &Op::<operators::swiglu_quantize::SwigluQuantize>::new(),
    &Op::<operators::grouped_linear_swiglu::GroupedLinearSwiglu>::new(),
    &Op::<operators::moe_reduce::MoeReduce>::new(),
    &Op::<operators::moe::Moe>::new(),
    &Op::<operators::lm_head::LmHead>::new(),
    &Op::<operators::sampler::Sampler>::new(),
    &Op::<operators::score_recompute::ScoreRecompute>::new(),
    &Op::<operators::indexer_recompute::IndexerRecompute>::new(),
    &Op::<operators::indexer_loss::IndexerLoss>::new(),
    &Op::<operators::indexer_backward::IndexerBackward>::new(),
    &Op::<operators::indexer_distillation::IndexerDistillation>::new(),
];

/// Names of all operators.
pub fn names() -> Vec<&'static str> {
    OPERATORS.iter().map(|operator| operator.name()).collect()
}

/// The operator called `name`.
///
/// # Errors
/// [`CaseError::UnknownOperator`] with similar names.
pub fn find(name: &str) -> Result<&'static dyn Operator, CaseError> {
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
pub fn select(list: Option<&str>) -> Result<Vec<&'static dyn Operator>, CaseError> {
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
pub fn prepare(case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
    find(&case.operator)?.prepare(case)
}
