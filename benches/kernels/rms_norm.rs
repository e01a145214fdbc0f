//! `rms_norm`: memory-bound; the widths of the model's hidden state and of its query heads.

use anyhow::Result;
use dsv4_kernels::rms_norm as launcher;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::precision::Rounding;
use dsv4_reference::{Result as OracleResult, rms_norm as reference};

use crate::data::{Lab, Normal, normal_f32, sample, sets};
use crate::oracle::OracleOnly;
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepare, Prepared, Rate};

const EPS: f32 = 1e-6;
/// Rows that are compared with the oracle after timing.
const SAMPLED_ROWS: usize = 4;

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

/// `[num_rows, width]` bf16; the weight is f32.
#[derive(Clone, Copy)]
struct Shape {
    num_rows: usize,
    width: usize,
    weighted: bool,
}

impl Shape {
    fn name(self) -> String {
        let Self { num_rows, width, weighted } = self;
        format!("{num_rows}x{width} bf16{}", if weighted { "" } else { " unweighted" })
    }

    /// Forward: x and y once, rstd, weight; a square, its sum and two products an element.
    /// Backward: dy, x, dx once, rstd, weight, dweight; nine operations an element.
    fn work(self, direction: Direction) -> Work {
        let elements = (self.num_rows * self.width) as f64;
        let weight = if self.weighted { 4.0 * self.width as f64 } else { 0.0 };
        let rstd = 4.0 * self.num_rows as f64;
        let (bytes, flops) = match direction {
            Direction::Forward => (4.0 * elements + rstd + weight, 4.0 * elements),
            Direction::Backward => (6.0 * elements + rstd + 2.0 * weight, 9.0 * elements),
        };
        Work { operator: "rms_norm".into(), bytes, flops }
    }

    fn weight(self) -> Option<HostTensor> {
        self.weighted.then(|| normal_f32("weight", self.width, 1.0))
    }

    fn benchmark(self, direction: Direction) -> Benchmark {
        let group = match direction {
            Direction::Forward => "rms_norm_forward",
            Direction::Backward => "rms_norm_backward",
        };
        Benchmark {
            group,
            name: self.name(),
            work: self.work(direction),
            rate: Rate::Bytes,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self, direction)?))),
        }
    }

    /// The oracle alone, on the host.
    fn oracle(self) -> Benchmark {
        let prepare: Prepare = Box::new(move |_| {
            let rows = normal_f32("oracle x", self.num_rows * self.width, 0.0).to_f64();
            let inputs = oracle_inputs(self, rows)?;
            let y = move || Ok(reference::forward(&inputs, &mut Rounding::exact())?.y);
            Ok(Box::new(OracleOnly(y)))
        });
        Benchmark {
            group: "rms_norm_forward_oracle",
            name: self.name().replace("bf16", "f64"),
            work: self.work(Direction::Forward),
            rate: Rate::Bytes,
            prepare,
        }
    }
}

/// Shapes of the model.
pub fn production() -> Vec<Benchmark> {
    use Direction::{Backward, Forward};
    let shape = |num_rows, width, weighted| Shape { num_rows, width, weighted };
    vec![
        shape(4096, 7168, true).benchmark(Forward),
        shape(16384, 7168, true).benchmark(Forward),
        shape(32768, 7168, true).benchmark(Forward),
        // 16384 tokens of 128 query heads.
        shape(16384 * 128, 512, true).benchmark(Forward),
        shape(16384 * 128, 512, false).benchmark(Forward),
        shape(16384, 7168, true).benchmark(Backward),
    ]
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    let wide = Shape { num_rows: 16, width: 4096, weighted: true };
    let heads = Shape { num_rows: 256, width: 512, weighted: false };
    vec![
        wide.benchmark(Direction::Forward),
        heads.benchmark(Direction::Forward),
        wide.benchmark(Direction::Backward),
        wide.oracle(),
    ]
}

/// One set: what a call reads and writes.
struct Set {
    x: Normal,
    /// y of the forward, dx of the backward.
    output: TensorView,
    rstd: TensorView,
    dy: Option<Normal>,
}

struct Buffers<'d> {
    shape: Shape,
    direction: Direction,
    weight: Option<TensorView>,
    dweight: Option<TensorView>,
    workspace: Option<TensorView>,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape, direction: Direction) -> Result<Self> {
        let mut memory = lab.arena();
        let Shape { num_rows, width, .. } = shape;
        let backward = direction == Direction::Backward;
        let weight = shape.weight().map(|w| lab.upload(&mut memory, "weight", &w)).transpose()?;
        let (mut dweight, mut workspace) = (None, None);
        if backward && shape.weighted {
            dweight = Some(memory.output("dweight", DType::F32, &[width])?);
            let bytes = launcher::workspace_bytes(lab.device, DType::Bf16, num_rows, width);
            workspace = Some(memory.workspace("workspace", bytes)?);
        }
        let mut all = Vec::new();
        for set in 0..sets(lab.device, shape.work(direction).bytes) {
            let extents = [num_rows, width];
            all.push(Set {
                x: lab.normal(&mut memory, "x", set, &extents)?,
                output: memory.output("output", DType::Bf16, &extents)?,
                rstd: memory.output("rstd", DType::F32, &[num_rows])?,
                dy: backward.then(|| lab.normal(&mut memory, "dy", set, &extents)).transpose()?,
            });
        }
        let buffers = Self { shape, direction, weight, dweight, workspace, sets: all, _memory: memory };
        if backward {
            // The backward reads what a forward saved.
            (0..buffers.sets.len()).try_for_each(|set| buffers.forward(lab, set))?;
        }
        Ok(buffers)
    }

    fn forward(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { x, output, rstd, .. } = &self.sets[set];
        let weight = self.weight.as_ref();
        let arguments = launcher::Forward { x: &x.view, weight, y: output, rstd: Some(rstd), eps: EPS };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { x, output, rstd, dy } = &self.sets[set];
        let Some(dy) = dy else { return self.forward(lab, set) };
        let arguments = launcher::Backward {
            dy: &dy.view,
            x: &x.view,
            weight: self.weight.as_ref(),
            rstd,
            dx: output,
            dweight: self.dweight.as_ref(),
            workspace: self.workspace.as_ref(),
        };
        launcher::backward(lab.device, &arguments).map(|_| ())
    }

    /// Sampled rows of y and rstd, or of dx. A row of dweight sums all rows: it is left to the sweeps.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let failed = |e: RuntimeError| e.to_string();
        let rows = sample(self.shape.num_rows, SAMPLED_ROWS);
        let Set { x, output, rstd, dy } = &self.sets[set];
        let inputs = oracle_inputs(self.shape, lab.rows(x, 1, &rows).map_err(failed)?).map_err(|e| e.to_string())?;
        let output = lab.download_rows(output, 1, &rows).map_err(failed)?;
        if self.direction == Direction::Forward {
            let rstd = lab.download_rows(rstd, 0, &rows).map_err(failed)?;
            let written = [
                Written { name: "y", stored: DType::Bf16, values: output },
                Written { name: "rstd", stored: DType::F32, values: rstd },
            ];
            return agree(&written, |rounding| {
                let outputs = reference::forward(&inputs, rounding)?;
                Ok(vec![outputs.y, outputs.rstd])
            });
        }
        let dy = dy.as_ref().ok_or("a backward without dy")?;
        let dy = lab.rows(dy, 1, &rows).map_err(failed)?;
        let dy = tensor(dy, &[rows.len(), self.shape.width]).map_err(|e| e.to_string())?;
        let written = [Written { name: "dx", stored: DType::Bf16, values: output }];
        agree(&written, |rounding| Ok(vec![reference::backward(&inputs, &dy, rounding)?.dx]))
    }
}

fn oracle_inputs(shape: Shape, rows: Vec<f64>) -> OracleResult<reference::Inputs> {
    let num_rows = rows.len() / shape.width;
    let weight = shape.weight().map(|w| tensor(w.to_f64(), &[shape.width])).transpose()?;
    Ok(reference::Inputs { x: tensor(rows, &[num_rows, shape.width])?, weight, eps: f64::from(EPS) })
}
