//! Every operator, one line each.

use crate::case::{Case, CaseError};
use crate::operator::{AnyOperator, PreparedCase};

/// The operators, in the order of the specification.
#[rustfmt::skip]
pub static OPERATORS: &[&AnyOperator] = &[
    &AnyOperator::of::<super::streams::embed_streams::EmbedStreams>(),
    &AnyOperator::of::<super::streams::mhc_mix::MhcMix>(),
    &AnyOperator::of::<super::streams::mhc_pre::MhcPre>(),
    &AnyOperator::of::<super::streams::mhc_post::MhcPost>(),
    &AnyOperator::of::<super::streams::mhc_post_mix_pre::MhcPostMixPre>(),
    &AnyOperator::of::<super::streams::mhc_block::MhcBlock>(),
    &AnyOperator::of::<super::streams::mhc_head::MhcHead>(),
    &AnyOperator::of::<super::projections::rms_norm::RmsNorm>(),
    &AnyOperator::of::<super::projections::rope::Rope>(),
    &AnyOperator::of::<super::formats::quantize_fp8::QuantizeFp8>(),
    &AnyOperator::of::<super::formats::quantize_mxfp4::QuantizeMxfp4>(),
    &AnyOperator::of::<super::formats::quantize_nvfp4::QuantizeNvfp4>(),
    &AnyOperator::of::<super::formats::scale_swizzle::ScaleSwizzle>(),
    &AnyOperator::of::<super::formats::gate_up_interleave::GateUpInterleave>(),
    &AnyOperator::of::<super::projections::linear::Linear>(),
    &AnyOperator::of::<super::projections::query_norm_rope::QueryNormRope>(),
    &AnyOperator::of::<super::projections::query_projection::QueryProjection>(),
    &AnyOperator::of::<super::cache::kv_norm_rope_write::KvNormRopeWrite>(),
    &AnyOperator::of::<super::projections::kv_projection::KvProjection>(),
    &AnyOperator::of::<super::cache::compressor::Compressor>(),
    &AnyOperator::of::<super::cache::compressor_stream::CompressorStream>(),
    &AnyOperator::of::<super::formats::hadamard::Hadamard>(),
    &AnyOperator::of::<super::indexer::indexer_query::IndexerQuery>(),
    &AnyOperator::of::<super::indexer::indexer_logits::IndexerLogits>(),
    &AnyOperator::of::<super::indexer::topk::Topk>(),
    &AnyOperator::of::<super::attention::sparse_attention::SparseAttention>(),
    &AnyOperator::of::<super::attention::attention_output_rotation::AttentionOutputRotation>(),
    &AnyOperator::of::<super::attention::cp_sparse_attention::CpSparseAttention>(),
    &AnyOperator::of::<super::attention::cp_window::CpWindow>(),
    &AnyOperator::of::<super::cache::cp_compressor::CpCompressor>(),
    &AnyOperator::of::<super::attention::decode_attention::DecodeAttention>(),
    &AnyOperator::of::<super::attention::attention_combine::AttentionCombine>(),
    &AnyOperator::of::<super::attention::inverse_rope_quantize::InverseRopeQuantize>(),
    &AnyOperator::of::<super::projections::output_projection::OutputProjection>(),
    &AnyOperator::of::<super::attention::attention_layer::AttentionLayer<0>>(),
    &AnyOperator::of::<super::cache::kv_cache_write::KvCacheWrite>(),
    &AnyOperator::of::<super::cache::indexer_cache_write::IndexerCacheWrite>(),
    &AnyOperator::of::<super::experts::router::Router>(),
    &AnyOperator::of::<super::experts::moe_map::MoeMap>(),
    &AnyOperator::of::<super::experts::moe_expand::MoeExpand>(),
    &AnyOperator::of::<super::experts::grouped_linear::GroupedLinear>(),
    &AnyOperator::of::<super::experts::swiglu::Swiglu>(),
    &AnyOperator::of::<super::experts::swiglu_quantize::SwigluQuantize>(),
    &AnyOperator::of::<super::experts::grouped_linear_swiglu::GroupedLinearSwiglu>(),
    &AnyOperator::of::<super::experts::moe_reduce::MoeReduce>(),
    &AnyOperator::of::<super::experts::moe::Moe>(),
    &AnyOperator::of::<super::head::lm_head::LmHead>(),
    &AnyOperator::of::<super::head::mtp_input::MtpInput>(),
    &AnyOperator::of::<super::head::sampler::Sampler>(),
    &AnyOperator::of::<super::indexer::score_recompute::ScoreRecompute>(),
    &AnyOperator::of::<super::indexer::indexer_recompute::IndexerRecompute>(),
    &AnyOperator::of::<super::indexer::indexer_loss::IndexerLoss>(),
    &AnyOperator::of::<super::indexer::indexer_backward::IndexerBackward>(),
    &AnyOperator::of::<super::indexer::indexer_distillation::IndexerDistillation>(),
    &AnyOperator::of::<super::indexer::cp_indexer::CpIndexer>(),
];

/// Names of all operators.
pub fn names() -> Vec<&'static str> {
    OPERATORS.iter().map(|operator| operator.name()).collect()
}

/// The operators that are functions of a caller's tensors on one device.
pub fn functions() -> impl Iterator<Item = &'static AnyOperator> {
    OPERATORS.iter().copied().filter(|operator| !operator.has_ranks())
}

/// The operator called `name`.
///
/// # Errors
/// [`CaseError::UnknownOperator`] with similar names.
pub fn find(name: &str) -> Result<&'static AnyOperator, CaseError> {
    OPERATORS.iter().copied().find(|operator| operator.name() == name).ok_or_else(|| {
        CaseError::UnknownOperator { name: name.to_owned(), hint: did_you_mean(name) }
    })
}

/// `: did you mean …?` with the operators whose names are similar, the most similar one first.
/// Empty where no name is similar.
fn did_you_mean(name: &str) -> String {
    /// The most names that are suggested.
    const MOST: usize = 5;
    /// The least Jaro-Winkler similarity of a suggested name, and how far it may be below the best.
    const ENOUGH: f64 = 0.75;
    const BEHIND: f64 = 0.05;
    /// The similarity of a name that contains the requested one, as several names contain
    /// `attention`.
    const PART: f64 = 0.87;
    let wanted = name.to_lowercase().replace('-', "_");
    let score = |known: &str| {
        let is_part = wanted.len() > 2 && known.contains(&wanted);
        strsim::jaro_winkler(known, &wanted).max(if is_part { PART } else { 0.0 })
    };
    let mut similar: Vec<(f64, &str)> =
        names().into_iter().map(|known| (score(known), known)).collect();
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

/// The operators of a comma-separated list, or all operators without a list.
///
/// # Errors
/// [`CaseError::UnknownOperator`]; [`CaseError::NamedTwice`], because an operator that runs twice
/// would count twice.
pub fn select(list: Option<&str>) -> Result<Vec<&'static AnyOperator>, CaseError> {
    let Some(list) = list else { return Ok(OPERATORS.to_vec()) };
    let names: Vec<&str> = list.split(',').map(str::trim).collect();
    if let Some(at) = (1..names.len()).find(|&at| names[..at].contains(&names[at])) {
        return Err(CaseError::NamedTwice { name: names[at].to_owned() });
    }
    names.into_iter().map(find).collect()
}

/// Makes the inputs of a case of any operator.
///
/// # Errors
/// An unknown operator, or a field that the operator cannot take.
pub fn prepare(case: &Case) -> Result<Box<dyn PreparedCase>, CaseError> {
    find(&case.operator)?.prepare(case)
}
