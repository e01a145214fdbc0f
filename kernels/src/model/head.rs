//! From the streams after the last layer to logits and sampled tokens (inference 12.1, 12.3).

use dsv4_runtime::{DType, TensorView, Views};

use crate::head::{lm_head, sampler};
use crate::model::batch::Batch;
use crate::model::engine::{Model, Result, Sampling};
use crate::model::step::Step;
use crate::streams::mhc_head;

impl Model<'_> {
    /// The logits of some of a step's tokens, `[num_rows, vocab_size]` f32.
    pub(super) fn head(&mut self, batch: &Batch, rows: &[i32]) -> Result<TensorView> {
        let shared = &self.weights.shared;
        Ok(self.parts.step(batch).logits(rows, shared, &shared["head"])?)
    }

    /// A token for each row of logits, by the sampling of its request and the position of the
    /// token.
    pub(super) fn draw(
        &mut self,
        logits: &TensorView,
        requests: &[(Sampling, u64)],
    ) -> Result<Vec<u32>> {
        let rows = [requests.len()];
        let words = |of: &dyn Fn(&(Sampling, u64)) -> u64| -> Vec<u8> {
            requests.iter().flat_map(|request| of(request).to_ne_bytes()).collect()
        };
        let floats = |of: &dyn Fn(&Sampling) -> f32| -> Vec<u8> {
            requests.iter().flat_map(|(sampling, _)| of(sampling).to_ne_bytes()).collect()
        };
        let lists = [
            ("temperature", DType::F32, floats(&|sampling| sampling.temperature)),
            ("top_p", DType::F32, floats(&|sampling| sampling.top_p)),
            ("seed", DType::I64, words(&|(sampling, _)| sampling.seed)),
            ("step", DType::I64, words(&|&(_, position)| position)),
        ];
        let mut views = Views::from([("logits", logits)]);
        for (name, dtype, bytes) in lists {
            views.put(name, self.parts.buffers.upload_bytes(name, dtype, &rows, &bytes)?);
        }
        let tokens = self.parts.buffers.view("tokens", DType::I32, &rows)?;
        let views = views.with("tokens", &tokens);
        let nothing = Batch::default();
        self.parts.step(&nothing).launch("sampler", "tokens", &views, sampler::forward)?;
        let bytes = self.download(&tokens)?;
        let ids = bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_ne_bytes(bytes));
        // A row of NaN has no token; the text ends there.
        Ok(ids.map(|id| u32::try_from(id).unwrap_or(self.config().eos)).collect())
    }

    /// The bytes of a dense tensor, after all launches.
    fn download(&self, view: &TensorView) -> Result<Vec<u8>> {
        let backend = self.parts.device.backend();
        backend.synchronize()?;
        let mut bytes = vec![0; view.elements() * view.dtype.size()];
        backend.download(view.address, &mut bytes)?;
        Ok(bytes)
    }

    /// The rows of an fp32 matrix.
    pub(super) fn floats(&self, view: &TensorView) -> Result<Vec<Vec<f32>>> {
        let bytes = self.download(view)?;
        let numbers: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        Ok(numbers.chunks(view.shape[1].max(1)).map(<[f32]>::to_vec).collect())
    }
}

impl Step<'_, '_> {
    /// The logits of some tokens, by the head mix and the norm of `w` and the matrix `head`.
    pub fn logits(
        &mut self,
        rows: &[i32],
        w: &Views,
        head: &TensorView,
    ) -> dsv4_runtime::Result<TensorView> {
        let hidden = self.final_hidden(w)?;
        let rows = self.buffers.upload("sampled_rows", &[rows.len()], rows)?;
        let shape = [rows.shape[0], head.shape[0]];
        let logits = self.buffers.view("logits", DType::F32, &shape)?;
        let views = Views::from([("hidden", &hidden), ("weight", head)]);
        let views = views.with("rows", &rows).with("logits", &logits);
        self.launch("lm_head", "logits", &views, lm_head::forward)?;
        Ok(logits)
    }

    /// The normed hidden state of each token, from the streams after the last layer.
    fn final_hidden(&mut self, w: &Views) -> dsv4_runtime::Result<TensorView> {
        let (tokens, hidden) = (self.num_tokens(), self.config.hidden_size);
        let out = self.rows("h", DType::Bf16, hidden)?;
        let bytes = mhc_head::forward_workspace_bytes(self.device, tokens, hidden);
        let views = Views::from([("fn", &w["head_fn"]), ("scale", &w["head_scale"])]);
        let views = views.with("base", &w["head_base"]).with("streams", &self.streams()?);
        let views = views.with("out", &out).with("mix", &self.rows("mix", DType::F32, 4)?);
        let views = views.with("rstd", &self.buffers.view("rstd", DType::F32, &[tokens])?);
        let views = views.with("workspace", &self.buffers.workspace(bytes)?);
        let numbers = mhc_head::Numbers {
            norm_eps: self.config.norm_eps as f32,
            hc_eps: self.config.hc_eps as f32,
        };
        let implementation = self.implementation;
        self.launch("mhc_head", "head_fn", &views, |device, views| {
            mhc_head::forward(device, views, numbers, implementation)
        })?;
        self.norm("u", &out, &w["norm"])
    }
}
