//! `attention_combine`: memory-bound; the parts of a batch of decoded tokens.

use anyhow::Result;
use dsv4_kernels::attention_combine as launcher;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_parity::case::Draw;
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::attention_combine as reference;
use rand::Rng;

use crate::data::{Lab, normal_f32, sample, sets};
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepared, Rate};

const V_DIM: usize = 512;
/// Rows that are compared with the oracle after timing.
const SAMPLED_ROWS: usize = 16;

/// f32 parts, every one of which has seen a key, with a sink.
#[derive(Clone, Copy)]
struct Shape {
    num_parts: usize,
    num_tokens: usize,
    num_heads: usize,
}

impl Shape {
    fn rows(self) -> usize {
        self.num_tokens * self.num_heads
    }

    /// Every part read, the merged row written; a product and a sum for each element read.
    fn work(self) -> Work {
        let (parts, rows) = (self.num_parts as f64, self.rows() as f64);
        Work {
            operator: "attention_combine".into(),
            bytes: rows * (parts * (4 * V_DIM + 4) as f64 + (2 * V_DIM + 4) as f64),
            flops: 2.0 * parts * rows * V_DIM as f64,
        }
    }

    fn benchmark(self) -> Benchmark {
        let Self { num_parts, num_tokens, num_heads } = self;
        Benchmark {
            group: "attention_combine_forward",
            name: format!("{num_parts} parts {num_tokens}x{num_heads}x{V_DIM}"),
            work: self.work(),
            rate: Rate::Bytes,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self)?))),
        }
    }
}

/// A few parts of many rows, and many of few.
pub fn production() -> Vec<Benchmark> {
    let shapes = [(2, 128, 128), (8, 128, 128), (18, 1, 128)];
    let shape = |(num_parts, num_tokens, num_heads)| Shape { num_parts, num_tokens, num_heads };
    shapes.into_iter().map(|extents| shape(extents).benchmark()).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    vec![Shape { num_parts: 4, num_tokens: 2, num_heads: 8 }.benchmark()]
}

struct Set {
    partial_out: TensorView,
    partial_lse: TensorView,
    out: TensorView,
    lse: TensorView,
}

struct Buffers<'d> {
    shape: Shape,
    sink: HostTensor,
    sink_view: TensorView,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape) -> Result<Self> {
        let mut memory = lab.arena();
        let sink = normal_f32("sink", shape.num_heads, 0.0);
        let sink_view = lab.upload(&mut memory, "sink", &sink)?;
        let number = sets(lab.device, shape.work().bytes);
        let sets = (0..number).map(|set| Set::place(lab, &mut memory, shape, set)).collect::<Result<_, _>>()?;
        Ok(Self { shape, sink, sink_view, sets, _memory: memory })
    }
}

impl Set {
    fn place<'d>(lab: &Lab<'d>, memory: &mut DeviceArena<'d>, shape: Shape, set: usize) -> Result<Self, RuntimeError> {
        let Shape { num_parts, num_tokens, num_heads } = shape;
        let mut draw = Draw::new(set as u64, "partial_out");
        let count = num_parts * shape.rows();
        // Uniform numbers: as many as these are not worth a logarithm each.
        let parts: Vec<u8> =
            (0..count * V_DIM).flat_map(|_| draw.rng().random_range(-1.0f32..1.0).to_ne_bytes()).collect();
        let parts =
            HostTensor { dtype: DType::F32, shape: vec![num_parts, num_tokens, num_heads, V_DIM], bytes: parts };
        let lse = HostTensor { shape: parts.shape[..3].to_vec(), ..normal_f32("partial_lse", count, 4.0) };
        Ok(Self {
            partial_out: lab.upload(memory, "partial_out", &parts)?,
            partial_lse: lab.upload(memory, "partial_lse", &lse)?,
            out: memory.output("out", DType::Bf16, &parts.shape[1..])?,
            lse: memory.output("lse", DType::F32, &parts.shape[1..3])?,
        })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { partial_out, partial_lse, out, lse } = &self.sets[set];
        let arguments = launcher::Forward { partial_out, partial_lse, sink: Some(&self.sink_view), out, lse };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }

    /// Sampled rows, each as a head of its own.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let Set { partial_out, partial_lse, out, lse } = &self.sets[set];
        let Shape { num_parts, num_heads, .. } = self.shape;
        let rows = sample(self.shape.rows(), SAMPLED_ROWS);
        let in_parts: Vec<usize> =
            (0..num_parts).flat_map(|part| rows.iter().map(move |row| part * self.shape.rows() + row)).collect();
        let download = |view, inner, rows: &[usize]| lab.download_rows(view, inner, rows).map_err(|e| e.to_string());
        let sinks = self.sink.to_f64();
        let sinks: Vec<f64> = rows.iter().map(|row| sinks[row % num_heads]).collect();
        let shaped = |values, shape: &[usize]| tensor(values, shape).map_err(|e| e.to_string());
        let inputs = reference::Inputs {
            partial_out: shaped(download(partial_out, 1, &in_parts)?, &[num_parts, 1, rows.len(), V_DIM])?,
            partial_lse: shaped(download(partial_lse, 0, &in_parts)?, &[num_parts, 1, rows.len()])?,
            sink: Some(shaped(sinks, &[rows.len()])?),
        };
        let written = [
            Written { name: "out", stored: DType::Bf16, values: download(out, 1, &rows)? },
            Written { name: "lse", stored: DType::F32, values: download(lse, 0, &rows)? },
        ];
        agree(&written, |rounding| {
            let outputs = reference::forward(&inputs, rounding)?;
            Ok(vec![outputs.out, outputs.lse])
        })
    }
}
