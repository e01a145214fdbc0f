//! The MTP module of a model (inference 12.2), of the streams X after the last layer:
//!
//! ```text
//! X = mtp_input(embedding of the next token, X)
//! X = a window layer of X
//! logits = head(norm(mhc_head(X)))                 norm and mhc_head of the module
//! ```

use candle_core::Tensor;

use super::{Kind, Model, is_plain};
use crate::error::{Error, Result};
use crate::head::mtp_input;
use crate::precision::Rounding;

impl Model {
    /// `[num_tokens - 1, vocab_size]` of the MTP module, stored in f32: row i is of the token after
    /// the next one, i + 2.
    ///
    /// # Errors
    /// Those of the operators; a model without a module.
    pub fn draft_logits(&self, token_ids: &Tensor, rounding: &mut Rounding) -> Result<Tensor> {
        let w = self.module.as_ref().ok_or(Error::Value {
            argument: "module",
            value: "absent".into(),
            rule: "drafts are those of an MTP module",
        })?;
        let rows = token_ids.dim(0)?.saturating_sub(1);
        let (read, next) = (token_ids.narrow(0, 0, rows)?, token_ids.narrow(0, 1, rows)?);
        let model = self.shortened(rows)?;
        let streams = model.streams(&read.contiguous()?, rounding)?;
        let next = next.contiguous()?;
        let embedding = self.embedding(&next, 1)?;
        let (tokens, _, hidden) = embedding.dims3()?;
        let inputs = w.clone().with("streams", streams);
        let inputs = inputs.with("embedding", embedding.reshape((tokens, hidden))?);
        let eps = self.numbers.streams.norm_eps;
        let entering = match is_plain(w) {
            true => mtp_input::forward(&inputs, eps, rounding)?,
            false => mtp_input::forward_quantized(&inputs, eps, rounding)?,
        };
        let streams = rounding.bf16(entering.tensor("out")?)?;
        let streams = model.layer(&streams, Kind::Window, w, &next, rounding)?;
        model.head(&streams, w, rounding)
    }
}
