//! From the streams after the last layer to logits and sampled tokens (inference 12.1, 12.3).

use dsv4_runtime::{DType, TensorView, Views};

use crate::head::{lm_head, sampler};
use crate::model::buffers::bytes_of;
use crate::model::engine::{Model, Result, Sampling};
use crate::model::step::Step;
use crate::streams::mhc_head;

/// What a step computes after its layers: the logits of these of its tokens and, with requests, a
/// sample of each, by the sampling and the position of the sampled token.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted {
    pub rows: Vec<i32>,
    pub requests: Vec<(Sampling, u64)>,
}

impl Wanted {
    /// The logits of that many tokens.
    pub fn logits(tokens: usize) -> Self {
        Self { rows: (0..tokens as i32).collect(), requests: Vec::new() }
    }

    /// The lists that the launches read.
    pub fn lists(&self) -> Vec<(&'static str, Vec<u8>)> {
        let words = |of: &dyn Fn(&(Sampling, u64)) -> u64| -> Vec<u8> {
            self.requests.iter().flat_map(|request| of(request).to_ne_bytes()).collect()
        };
        let floats = |of: &dyn Fn(&Sampling) -> f32| -> Vec<u8> {
            self.requests.iter().flat_map(|(sampling, _)| of(sampling).to_ne_bytes()).collect()
        };
        vec![
            ("sampled_rows", bytes_of(&self.rows)),
            ("temperature", floats(&|sampling| sampling.temperature)),
            ("top_p", floats(&|sampling| sampling.top_p)),
            ("seed", words(&|(sampling, _)| sampling.seed)),
            ("step", words(&|&(_, position)| position)),
        ]
    }
}

impl Model<'_> {
    /// The logits that a step has computed, a row for each of `wanted`.
    pub(super) fn read_logits(&mut self, wanted: &Wanted) -> Result<Vec<Vec<f32>>> {
        let shape = [wanted.rows.len(), self.config().vocab_size];
        let logits = self.parts.buffers.view("logits", DType::F32, &shape)?;
        let bytes = self.download(&logits)?;
        let numbers: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        Ok(numbers.chunks(shape[1].max(1)).map(<[f32]>::to_vec).collect())
    }

    /// The tokens that a step has sampled.
    pub(super) fn read_tokens(&mut self, wanted: &Wanted) -> Result<Vec<u32>> {
        let tokens = self.parts.buffers.view("tokens", DType::I32, &[wanted.requests.len()])?;
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
}

impl Step<'_, '_> {
    /// What is wanted of a step, by the head mix and the norm of `w` and the matrix `head`.
    pub fn head(
        &mut self,
        wanted: &Wanted,
        w: &Views,
        head: &TensorView,
    ) -> dsv4_runtime::Result<()> {
        let count = wanted.rows.len();
        if count == 0 {
            return Ok(());
        }
        let hidden = self.final_hidden(w)?;
        let rows = self.list("sampled_rows", &[count])?;
        let logits = self.buffers.view("logits", DType::F32, &[count, head.shape[0]])?;
        let views = Views::from([("hidden", &hidden), ("weight", head)]);
        let views = views.with("rows", &rows).with("logits", &logits);
        self.launch("lm_head", "logits", &views, lm_head::forward)?;
        if wanted.requests.is_empty() {
            return Ok(());
        }
        let mut views = Views::from([("logits", &logits)]);
        for (name, dtype) in [
            ("temperature", DType::F32),
            ("top_p", DType::F32),
            ("seed", DType::I64),
            ("step", DType::I64),
            ("tokens", DType::I32),
        ] {
            views.put(name, self.buffers.view(name, dtype, &[count])?);
        }
        self.launch("sampler", "tokens", &views, sampler::forward)
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
