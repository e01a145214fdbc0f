//! `score_recompute`: compute-bound; the sparse target of 4096 queries at the model's two head counts, and the dense scores.

use std::collections::BTreeMap;

use anyhow::Result;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_kernels::score_recompute::{self as launcher, Implementation};
use dsv4_parity::case::Draw;
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::precision::Rounding;
use dsv4_reference::score_recompute as reference;
use rand::Rng;

use crate::data::{Lab, Normal, normal_f32, sample, sets};
use crate::oracle::OracleOnly;
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepare, Prepared, Rate};

/// Width of q and k.
const HEAD_DIM: usize = 512;
/// Tokens that are compared with the oracle after timing, with all of their heads.
const SAMPLED_TOKENS: usize = 4;
/// Tokens that a key covers in the dense form.
const RATIO: usize = 4;

/// bf16, with a sink and an lse of the order of the logits'. Sparse: every slot valid, the slots of a token distinct.
#[derive(Clone, Copy)]
struct Shape {
    num_tokens: usize,
    num_keys: usize,
    num_heads: usize,
    /// Slots of a list; `None` is the dense form, in which the last token sees the last key.
    topk: Option<usize>,
    implementation: Implementation,
}

impl Shape {
    fn name(self) -> String {
        let Self { num_tokens, num_keys, num_heads, topk, implementation } = self;
        let ranking = topk.map_or("dense".to_owned(), |topk| format!("topk{topk}"));
        let portable = if implementation == Implementation::Portable { " portable" } else { "" };
        format!("q{num_tokens} k{num_keys} H{num_heads} D{HEAD_DIM} {ranking}{portable}")
    }

    fn softmax_scale(self) -> f32 {
        (HEAD_DIM as f32).sqrt().recip()
    }

    fn columns(self) -> usize {
        self.topk.unwrap_or(self.num_keys)
    }

    /// Position of the first query.
    fn offset(self) -> usize {
        RATIO * self.num_keys - self.num_tokens
    }

    /// Slots of all tokens that count.
    fn ranked(self) -> usize {
        match self.topk {
            Some(topk) => self.num_tokens * topk,
            None => (0..self.num_tokens).map(|token| (self.offset() + token + 1) / RATIO).sum(),
        }
    }

    /// One product of 2·H·D FLOP a slot. Every tensor once; rows of K once for each key.
    fn work(self) -> Work {
        let Self { num_tokens, num_keys, num_heads, .. } = self;
        let heads = (num_tokens * num_heads) as f64;
        let keys = (num_keys.min(self.ranked()) * HEAD_DIM) as f64;
        let rows = 4.0 * (num_tokens * self.columns()) as f64;
        let lists = if self.topk.is_some() { rows } else { 0.0 };
        let bytes = 2.0 * heads * HEAD_DIM as f64 + 4.0 * heads + 2.0 * keys + lists + rows;
        let flops = 2.0 * (self.ranked() * num_heads * HEAD_DIM) as f64;
        Work { operator: "score_recompute".into(), bytes, flops }
    }

    fn benchmark(self) -> Benchmark {
        Benchmark {
            group: "score_recompute_forward",
            name: self.name(),
            work: self.work(),
            rate: Rate::Flops,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self)?))),
        }
    }

    /// The oracle alone, on the host.
    fn oracle(self) -> Benchmark {
        let prepare: Prepare = Box::new(move |_| {
            let values = |name: &str, rows: usize| normal_f32(name, rows * HEAD_DIM, 0.0).to_f64();
            let heads = self.num_tokens * self.num_heads;
            let extents = [self.num_tokens, self.num_heads, HEAD_DIM];
            let topk = self.columns();
            let inputs = reference::Inputs {
                q: tensor(values("oracle q", heads), &extents)?,
                k: tensor(values("oracle k", self.num_keys), &[self.num_keys, HEAD_DIM])?,
                ranking: selected(self.indices(0), topk),
                sequences: None,
                softmax_scale: f64::from(self.softmax_scale()),
            };
            let lse = tensor(normal_f32("lse", heads, LSE).to_f64(), &extents[..2])?;
            let normaliser = reference::Normaliser { lse, sink: None };
            let target = move || reference::target(&inputs, &normaliser, &mut Rounding::exact());
            Ok(Box::new(OracleOnly(target)))
        });
        Benchmark {
            group: "score_recompute_forward_oracle",
            name: format!("{} f64", self.name()),
            work: self.work(),
            rate: Rate::Flops,
            prepare,
        }
    }

    /// `[num_tokens, topk]`: for each token distinct keys in random order.
    fn indices(self, set: usize) -> Vec<i32> {
        let Some(topk) = self.topk else { return Vec::new() };
        let mut draw = Draw::new(set as u64, "indices");
        let mut keys: Vec<i32> = (0..self.num_keys as i32).collect();
        let mut indices = Vec::with_capacity(self.num_tokens * topk);
        for _ in 0..self.num_tokens {
            // The beginning of a Fisher-Yates shuffle, of what the last token left.
            for slot in 0..topk {
                keys.swap(slot, draw.rng().random_range(slot..self.num_keys));
            }
            indices.extend_from_slice(&keys[..topk]);
        }
        indices
    }
}

/// Mean of lse: that of a thousand standard normal logits.
const LSE: f64 = 7.4;

fn selected(indices: Vec<i32>, topk: usize) -> reference::Ranking {
    reference::Ranking::Selected { indices, topk, topk_length: None, global: true }
}

/// Shapes of the model.
pub fn production() -> Vec<Benchmark> {
    let implementation = Implementation::Auto;
    let shape = |num_heads, topk, num_keys| Shape { num_tokens: 4096, num_keys, num_heads, topk, implementation };
    let portable = |shape| Shape { implementation: Implementation::Portable, ..shape };
    let shapes = [
        shape(64, Some(512), 8192),
        shape(128, Some(1024), 8192),
        shape(128, Some(1024), 65536),
        shape(64, None, 2048),
        portable(shape(64, Some(512), 8192)),
        portable(shape(128, Some(1024), 8192)),
        portable(shape(64, None, 2048)),
    ];
    shapes.into_iter().map(Shape::benchmark).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    let implementation = Implementation::Auto;
    let shape = Shape { num_tokens: 2, num_keys: 64, num_heads: 16, topk: Some(32), implementation };
    vec![shape.benchmark(), Shape { topk: None, ..shape }.benchmark(), shape.oracle()]
}

/// One set: what a call reads and writes.
struct Set {
    q: Normal,
    k: Normal,
    indices: Vec<i32>,
    indices_view: Option<TensorView>,
    scores: TensorView,
}

struct Buffers<'d> {
    shape: Shape,
    lse: HostTensor,
    lse_view: TensorView,
    sink: HostTensor,
    sink_view: TensorView,
    q_off: TensorView,
    l1: TensorView,
    shift: TensorView,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape) -> Result<Self> {
        let mut memory = lab.arena();
        let Shape { num_tokens, num_heads, .. } = shape;
        let mut lse = normal_f32("lse", num_tokens * num_heads, LSE);
        lse.shape = vec![num_tokens, num_heads];
        let sink = normal_f32("sink", num_heads, LSE);
        let q_off = HostTensor::from_i32(&[1], &[shape.offset() as i32]);
        let number = sets(lab.device, shape.work().bytes);
        let sets = (0..number).map(|set| Set::place(lab, &mut memory, shape, set));
        let sets = sets.collect::<Result<_, RuntimeError>>()?;
        Ok(Self {
            shape,
            lse_view: lab.upload(&mut memory, "lse", &lse)?,
            lse,
            sink_view: lab.upload(&mut memory, "sink", &sink)?,
            sink,
            q_off: lab.upload(&mut memory, "q_off", &q_off)?,
            l1: memory.output("l1", DType::F32, &[num_tokens])?,
            shift: memory.output("shift", DType::F32, &[num_tokens])?,
            sets,
            _memory: memory,
        })
    }
}

impl Set {
    fn place<'d>(lab: &Lab<'d>, memory: &mut DeviceArena<'d>, shape: Shape, set: usize) -> Result<Self, RuntimeError> {
        let Shape { num_tokens, num_keys, num_heads, .. } = shape;
        let indices = shape.indices(set);
        let lists = HostTensor::from_i32(&[num_tokens, shape.topk.unwrap_or(0)], &indices);
        Ok(Self {
            q: lab.normal(memory, "q", set, &[num_tokens, num_heads, HEAD_DIM])?,
            k: lab.normal(memory, "k", set, &[num_keys, HEAD_DIM])?,
            indices_view: shape.topk.map(|_| lab.upload(memory, "indices", &lists)).transpose()?,
            indices,
            scores: memory.output("scores", DType::F32, &[num_tokens, shape.columns()])?,
        })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { q, k, indices_view, scores, .. } = &self.sets[set];
        let ranking = match indices_view {
            Some(indices) => launcher::Ranking::Selected { indices, topk_length: None, global: true },
            None => launcher::Ranking::Causal { ratio: RATIO, q_off: Some(&self.q_off) },
        };
        let softmax_scale = self.shape.softmax_scale();
        let inputs = launcher::Inputs { q: &q.view, k: &k.view, ranking, sequences: None, softmax_scale };
        let normaliser = launcher::Normaliser { lse: &self.lse_view, sink: Some(&self.sink_view) };
        let implementation = self.shape.implementation;
        let path = match indices_view {
            Some(_) => {
                launcher::target(lab.device, &launcher::Target { inputs, normaliser, implementation, target: scores })
            }
            None => {
                let (l1, shift) = (&self.l1, &self.shift);
                let arguments = launcher::Scores { inputs, normaliser, implementation, scores, l1, shift };
                launcher::scores(lab.device, &arguments)
            }
        };
        path.map(|_| ())
    }

    /// Whole rows of sampled tokens.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let tokens = sample(self.shape.num_tokens, SAMPLED_TOKENS);
        let (inputs, normaliser) = self.oracle_inputs(lab, set, &tokens).map_err(|e| format!("{e:#}"))?;
        let Set { scores, .. } = &self.sets[set];
        let values = lab.download_rows(scores, 1, &tokens).map_err(|e| e.to_string())?;
        let name = if self.shape.topk.is_some() { "target" } else { "scores" };
        agree(&[Written { name, stored: scores.dtype, values }], |rounding| {
            Ok(vec![match inputs.ranking {
                reference::Ranking::Selected { .. } => reference::target(&inputs, &normaliser, rounding)?,
                reference::Ranking::Causal { .. } => reference::scores(&inputs, &normaliser, rounding)?.scores,
            }])
        })
    }
}

impl Buffers<'_> {
    /// The sampled tokens by themselves, each a sequence of its own in the dense form, over the keys that they name.
    fn oracle_inputs(
        &self,
        lab: &Lab<'_>,
        set: usize,
        tokens: &[usize],
    ) -> Result<(reference::Inputs, reference::Normaliser)> {
        let Set { q, k, indices, .. } = &self.sets[set];
        let Shape { num_heads, num_keys, topk, .. } = self.shape;
        let heads = tokens.iter().flat_map(|token| (0..num_heads).map(move |head| token * num_heads + head));
        let heads: Vec<usize> = heads.collect();
        let lse = self.lse.to_f64();
        let (ranking, sequences, keys) = match topk {
            Some(topk) => {
                let listed = tokens.iter().flat_map(|token| &indices[token * topk..(token + 1) * topk]);
                let listed: Vec<usize> = listed.map(|&index| index as usize).collect();
                let mut place: BTreeMap<usize, i32> = listed.iter().map(|&key| (key, 0)).collect();
                place.values_mut().zip(0..).for_each(|(place, number)| *place = number);
                let keys: Vec<usize> = place.keys().copied().collect();
                (selected(listed.iter().map(|key| place[key]).collect(), topk), None, keys)
            }
            None => {
                let offsets = tokens.iter().map(|token| (self.shape.offset() + token) as i32).collect();
                let ends = |length: usize| (0..=tokens.len()).map(|end| (end * length) as i32).collect();
                let ranking = reference::Ranking::Causal { ratio: RATIO, q_off: Some(offsets), columns: num_keys };
                let keys = tokens.iter().flat_map(|_| 0..num_keys).collect();
                (ranking, Some(reference::Sequences { cu_q: ends(1), cu_k: ends(num_keys) }), keys)
            }
        };
        let inputs = reference::Inputs {
            q: tensor(lab.rows(q, 1, &heads)?, &[tokens.len(), num_heads, HEAD_DIM])?,
            k: tensor(lab.rows(k, 1, &keys)?, &[keys.len(), HEAD_DIM])?,
            ranking,
            sequences,
            softmax_scale: f64::from(self.shape.softmax_scale()),
        };
        let lse = heads.iter().map(|&row| lse[row]).collect();
        let normaliser = reference::Normaliser {
            lse: tensor(lse, &[tokens.len(), num_heads])?,
            sink: Some(tensor(self.sink.to_f64(), &[num_heads])?),
        };
        Ok((inputs, normaliser))
    }
}
