//! The indexer: its scores, their selection and its training.

pub mod cp_indexer;
pub mod indexer_backward;
pub mod indexer_distillation;
pub mod indexer_logits;
pub mod indexer_loss;
pub mod indexer_query;
pub mod indexer_recompute;
pub mod ranking;
pub mod score_recompute;
pub mod topk;
