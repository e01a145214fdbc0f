//! `sparse_attention`: compute-bound; 4096 queries over gathered keys at the model's two head counts.

use std::collections::BTreeMap;

use anyhow::Result;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_kernels::sparse_attention::{self as launcher, Implementation, KeyGradients};
use dsv4_parity::case::Draw;
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::precision::Rounding;
use dsv4_reference::sparse_attention as reference;
use rand::Rng;

use crate::data::{Lab, Normal, normal_f32, sample, sets};
use crate::oracle::OracleOnly;
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepare, Prepared, Rate};

/// Width of q, k, v and out.
const HEAD_DIM: usize = 512;
/// Tokens and heads that are compared with the oracle after timing.
const SAMPLED_TOKENS: usize = 4;
const SAMPLED_HEADS: usize = 8;
/// Type of dk and dv.
const KEY_GRADIENT: DType = DType::Bf16;

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

/// bf16, with a sink; every slot valid, the slots of a token distinct.
#[derive(Clone, Copy)]
struct Shape {
    num_tokens: usize,
    num_keys: usize,
    num_heads: usize,
    topk: usize,
    /// V is a tensor of its own; otherwise it is K.
    separate: bool,
    implementation: Implementation,
    /// Gradients of keys are summed in one order.
    deterministic: bool,
}

impl Shape {
    fn name(self) -> String {
        let Self { num_tokens, num_keys, num_heads, topk, separate, implementation, deterministic } = self;
        let value = if separate { " V" } else { "" };
        let portable = if implementation == Implementation::Portable { " portable" } else { "" };
        let deterministic = if deterministic { " deterministic" } else { "" };
        format!("q{num_tokens} k{num_keys} H{num_heads} D{HEAD_DIM} topk{topk}{value}{portable}{deterministic}")
    }

    fn softmax_scale(self) -> f32 {
        (HEAD_DIM as f32).sqrt().recip()
    }

    /// Two products forward, five backward, of 2·T·H·topk·D FLOP each. Every tensor once; rows of K (and V)
    /// once for each key, since lists of so many random slots name every one of them.
    fn work(self, direction: Direction) -> Work {
        let Self { num_tokens, num_keys, num_heads, topk, separate, .. } = self;
        let product = 2.0 * (num_tokens * num_heads * topk * HEAD_DIM) as f64;
        let per_head = 4.0 * (num_tokens * num_heads) as f64;
        let heads = 2.0 * (num_tokens * num_heads * HEAD_DIM) as f64;
        let keys = 2.0 * (num_keys.min(num_tokens * topk) * HEAD_DIM) as f64 * if separate { 2.0 } else { 1.0 };
        let inputs = heads + keys + 4.0 * (num_tokens * topk + num_heads) as f64;
        let (bytes, products) = match direction {
            // out; lse and max_logits
            Direction::Forward => (inputs + heads + 2.0 * per_head, 2.0),
            // out, dout, lse; dq, dk (and dv), dsink
            Direction::Backward => {
                let gradients = heads + keys + 4.0 * num_heads as f64;
                (inputs + 2.0 * heads + per_head + gradients, 5.0)
            }
        };
        Work { operator: "sparse_attention".into(), bytes, flops: products * product }
    }

    fn benchmark(self, direction: Direction) -> Benchmark {
        let group = match direction {
            Direction::Forward => "sparse_attention_forward",
            Direction::Backward => "sparse_attention_backward",
        };
        Benchmark {
            group,
            name: self.name(),
            work: self.work(direction),
            rate: Rate::Flops,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self, direction)?))),
        }
    }

    /// The oracle alone, on the host.
    fn oracle(self) -> Benchmark {
        let prepare: Prepare = Box::new(move |_| {
            let values = |name: &str, rows: usize| normal_f32(name, rows * HEAD_DIM, 0.0).to_f64();
            let inputs = reference::Inputs {
                q: tensor(
                    values("oracle q", self.num_tokens * self.num_heads),
                    &[self.num_tokens, self.num_heads, HEAD_DIM],
                )?,
                k: tensor(values("oracle k", self.num_keys), &[self.num_keys, HEAD_DIM])?,
                value: reference::Value::Shared,
                sink: Some(tensor(self.sink().to_f64(), &[self.num_heads])?),
                indices: self.indices(0),
                topk: self.topk,
                topk_length: None,
                softmax_scale: f64::from(self.softmax_scale()),
            };
            let out = move || Ok(reference::forward(&inputs, &mut Rounding::exact())?.out);
            Ok(Box::new(OracleOnly(out)))
        });
        Benchmark {
            group: "sparse_attention_forward_oracle",
            name: format!("{} f64", self.name()),
            work: self.work(Direction::Forward),
            rate: Rate::Flops,
            prepare,
        }
    }

    fn sink(self) -> HostTensor {
        normal_f32("sink", self.num_heads, 0.0)
    }

    /// `[num_tokens, topk]`: for each token distinct keys in random order.
    fn indices(self, set: usize) -> Vec<i32> {
        let mut draw = Draw::new(set as u64, "indices");
        let mut keys: Vec<i32> = (0..self.num_keys as i32).collect();
        let mut indices = Vec::with_capacity(self.num_tokens * self.topk);
        for _ in 0..self.num_tokens {
            // The beginning of a Fisher-Yates shuffle, of what the last token left.
            for slot in 0..self.topk {
                keys.swap(slot, draw.rng().random_range(slot..self.num_keys));
            }
            indices.extend_from_slice(&keys[..self.topk]);
        }
        indices
    }
}

/// Shapes of the model, forward and backward.
pub fn production() -> Vec<Benchmark> {
    let implementation = Implementation::Auto;
    let shape = |num_heads, topk, num_keys| Shape {
        num_tokens: 4096,
        num_keys,
        num_heads,
        topk,
        separate: false,
        implementation,
        deterministic: false,
    };
    let shapes = [
        shape(64, 512, 8192),
        shape(64, 512, 32768),
        shape(128, 1024, 8192),
        shape(128, 1024, 65536),
        Shape { separate: true, ..shape(64, 512, 8192) },
        Shape { implementation: Implementation::Portable, ..shape(64, 512, 8192) },
        Shape { implementation: Implementation::Portable, ..shape(128, 1024, 8192) },
    ];
    let both = |shape: Shape| [Direction::Forward, Direction::Backward].map(|direction| shape.benchmark(direction));
    let summed_in_order = [shape(64, 512, 8192), shape(128, 1024, 8192)]
        .map(|shape| Shape { deterministic: true, ..shape }.benchmark(Direction::Backward));
    shapes.into_iter().flat_map(both).chain(summed_in_order).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    let implementation = Implementation::Auto;
    let (separate, deterministic) = (false, false);
    let shape = Shape { num_tokens: 2, num_keys: 64, num_heads: 16, topk: 32, separate, implementation, deterministic };
    let summed_in_order = Shape { deterministic: true, ..shape }.benchmark(Direction::Backward);
    vec![shape.benchmark(Direction::Forward), shape.benchmark(Direction::Backward), summed_in_order, shape.oracle()]
}

/// One set: what a call reads and writes.
struct Set {
    q: Normal,
    k: Normal,
    v: Option<Normal>,
    indices: Vec<i32>,
    indices_view: TensorView,
    out: TensorView,
    lse: TensorView,
    max_logits: TensorView,
    backward: Option<Gradients>,
}

struct Gradients {
    dout: Normal,
    dq: TensorView,
    dk: TensorView,
    dv: Option<TensorView>,
}

struct Buffers<'d> {
    shape: Shape,
    sink: HostTensor,
    sink_view: TensorView,
    dsink: TensorView,
    key_gradients: KeyGradients,
    workspace: Option<TensorView>,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape, direction: Direction) -> Result<Self> {
        let mut memory = lab.arena();
        let sink = shape.sink();
        let sink_view = lab.upload(&mut memory, "sink", &sink)?;
        let dsink = memory.output("dsink", DType::F32, &[shape.num_heads])?;
        let number = sets(lab.device, shape.work(direction).bytes);
        let sets = (0..number).map(|set| Set::place(lab, &mut memory, shape, direction, set));
        let sets = sets.collect::<Result<_, RuntimeError>>()?;
        let (key_gradients, workspace) = (KeyGradients::Atomic, None);
        let mut buffers = Self { shape, sink, sink_view, dsink, key_gradients, workspace, sets, _memory: memory };
        if direction == Direction::Backward {
            if shape.deterministic {
                let chunk_tokens = launcher::default_chunk_tokens(&buffers.inputs(0))?;
                buffers.key_gradients = KeyGradients::Deterministic { chunk_tokens };
            }
            let bytes = launcher::workspace_bytes(&buffers.inputs(0), KEY_GRADIENT, buffers.key_gradients)?;
            buffers.workspace = Some(buffers._memory.workspace("workspace", bytes)?);
            // The backward reads what a forward saved.
            (0..number).try_for_each(|set| buffers.forward(lab, set))?;
        }
        Ok(buffers)
    }

    fn inputs(&self, set: usize) -> launcher::Inputs<'_> {
        let Set { q, k, v, indices_view, .. } = &self.sets[set];
        launcher::Inputs {
            q: &q.view,
            k: &k.view,
            value: match v {
                Some(v) => launcher::Value::Separate(&v.view),
                None => launcher::Value::Prefix { v_dim: HEAD_DIM },
            },
            sink: Some(&self.sink_view),
            indices: indices_view,
            topk_length: None,
            softmax_scale: self.shape.softmax_scale(),
        }
    }

    fn forward(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { out, lse, max_logits, .. } = &self.sets[set];
        let implementation = self.shape.implementation;
        let arguments = launcher::Forward { inputs: self.inputs(set), implementation, out, lse, max_logits };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }
}

impl Set {
    fn place<'d>(
        lab: &Lab<'d>,
        memory: &mut DeviceArena<'d>,
        shape: Shape,
        direction: Direction,
        set: usize,
    ) -> Result<Self, RuntimeError> {
        let Shape { num_tokens, num_keys, num_heads, topk, separate, .. } = shape;
        let (heads, keys) = ([num_tokens, num_heads, HEAD_DIM], [num_keys, HEAD_DIM]);
        let indices = shape.indices(set);
        let backward = match direction {
            Direction::Forward => None,
            Direction::Backward => Some(Gradients {
                dout: lab.normal(memory, "dout", set, &heads)?,
                dq: memory.output("dq", DType::Bf16, &heads)?,
                dk: memory.output("dk", KEY_GRADIENT, &keys)?,
                dv: separate.then(|| memory.output("dv", KEY_GRADIENT, &keys)).transpose()?,
            }),
        };
        Ok(Self {
            q: lab.normal(memory, "q", set, &heads)?,
            k: lab.normal(memory, "k", set, &keys)?,
            v: separate.then(|| lab.normal(memory, "v", set, &keys)).transpose()?,
            indices_view: lab.upload(memory, "indices", &HostTensor::from_i32(&[num_tokens, topk], &indices))?,
            indices,
            out: memory.output("out", DType::Bf16, &heads)?,
            lse: memory.output("lse", DType::F32, &[num_tokens, num_heads])?,
            max_logits: memory.output("max_logits", DType::F32, &[num_tokens, num_heads])?,
            backward,
        })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { out, lse, backward, .. } = &self.sets[set];
        let (Some(gradients), Some(workspace)) = (backward, &self.workspace) else {
            return self.forward(lab, set);
        };
        let arguments = launcher::Backward {
            inputs: self.inputs(set),
            implementation: self.shape.implementation,
            key_gradients: self.key_gradients,
            out,
            lse,
            dout: &gradients.dout.view,
            dlse: None,
            dq: &gradients.dq,
            dk: &gradients.dk,
            dv: gradients.dv.as_ref(),
            dsink: Some(&self.dsink),
            workspace,
        };
        launcher::backward(lab.device, &arguments).map(|_| ())
    }

    /// Sampled heads of sampled tokens: out, lse and max_logits, or dq. The gradients of keys and sinks sum
    /// over all tokens: they are left to the sweeps.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let sampled = Sampled::new(self.shape);
        let inputs = self.oracle_inputs(lab, set, &sampled).map_err(|e| format!("{e:#}"))?;
        let Set { out, lse, max_logits, backward, .. } = &self.sets[set];
        let rows = |name, view: &TensorView, inner| {
            let values = lab.download_rows(view, inner, &sampled.rows).map_err(|e| e.to_string())?;
            Ok::<_, String>(Written { name, stored: view.dtype, values })
        };
        let Some(gradients) = backward else {
            let written = [rows("out", out, 1)?, rows("lse", lse, 0)?, rows("max_logits", max_logits, 0)?];
            return agree(&written, |rounding| {
                let outputs = reference::forward(&inputs, rounding)?;
                Ok(vec![outputs.out, outputs.lse, outputs.max_logits])
            });
        };
        let dout = lab.rows(&gradients.dout, 1, &sampled.rows).map_err(|e| e.to_string())?;
        let dout = tensor(dout, &sampled.extents()).map_err(|e| e.to_string())?;
        let upstream = reference::Upstream { dout, dlse: None };
        let written = [rows("dq", &gradients.dq, 1)?];
        agree(&written, |rounding| Ok(vec![reference::backward(&inputs, &upstream, rounding)?.dq]))
    }
}

/// Heads and tokens that are compared.
struct Sampled {
    tokens: Vec<usize>,
    heads: Vec<usize>,
    /// `token * num_heads + head` of each.
    rows: Vec<usize>,
}

impl Sampled {
    fn new(shape: Shape) -> Self {
        let (tokens, heads) = (sample(shape.num_tokens, SAMPLED_TOKENS), sample(shape.num_heads, SAMPLED_HEADS));
        let rows = tokens.iter().flat_map(|token| heads.iter().map(move |head| token * shape.num_heads + head));
        let rows = rows.collect();
        Self { tokens, heads, rows }
    }

    fn extents(&self) -> [usize; 3] {
        [self.tokens.len(), self.heads.len(), HEAD_DIM]
    }
}

impl Buffers<'_> {
    /// The sampled problem by itself: only its heads, and only the keys that its tokens name.
    fn oracle_inputs(&self, lab: &Lab<'_>, set: usize, sampled: &Sampled) -> Result<reference::Inputs> {
        let Set { q, k, v, indices, .. } = &self.sets[set];
        let topk = self.shape.topk;
        let listed = sampled.tokens.iter().flat_map(|token| &indices[token * topk..(token + 1) * topk]);
        let listed: Vec<usize> = listed.map(|&index| index as usize).collect();
        let mut place: BTreeMap<usize, i32> = listed.iter().map(|&key| (key, 0)).collect();
        place.values_mut().zip(0..).for_each(|(place, number)| *place = number);
        let keys: Vec<usize> = place.keys().copied().collect();
        let rows = |source: &Normal| -> Result<_> { Ok(tensor(lab.rows(source, 1, &keys)?, &[keys.len(), HEAD_DIM])?) };
        let sinks = self.sink.to_f64();
        let sinks: Vec<f64> = sampled.heads.iter().map(|&head| sinks[head]).collect();
        Ok(reference::Inputs {
            q: tensor(lab.rows(q, 1, &sampled.rows)?, &sampled.extents())?,
            k: rows(k)?,
            value: match v {
                Some(v) => reference::Value::Separate(rows(v)?),
                None => reference::Value::Shared,
            },
            sink: Some(tensor(sinks, &[sampled.heads.len()])?),
            indices: listed.iter().map(|key| place[key]).collect(),
            topk,
            topk_length: None,
            softmax_scale: f64::from(self.shape.softmax_scale()),
        })
    }
}
