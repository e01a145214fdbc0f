//! `rope`: memory-bound; the query heads of 16384 tokens.

use anyhow::Result;
use dsv4_kernels::rope as launcher;
use dsv4_kernels::runtime::{DType, DeviceArena, HostTensor, RuntimeError, TensorView};
use dsv4_parity::report::benchmarks::Work;
use dsv4_reference::precision::Rounding;
use dsv4_reference::{Result as OracleResult, rope as reference};

use crate::data::{Lab, Normal, normal_f32, sample, sets};
use crate::oracle::OracleOnly;
use crate::recheck::{Written, agree, tensor};
use crate::session::{Benchmark, Prepare, Prepared, Rate};

const ROPE_DIM: usize = 64;
/// Tokens that are compared with the oracle after timing.
const SAMPLED_TOKENS: usize = 4;

/// `[num_tokens, num_heads, head_dim]` bf16; token `t` turns by row `t` of the tables.
#[derive(Clone, Copy)]
struct Shape {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    inverse: bool,
    in_place: bool,
}

impl Shape {
    fn extents(self) -> [usize; 3] {
        [self.num_tokens, self.num_heads, self.head_dim]
    }

    fn name(self) -> String {
        let [num_tokens, num_heads, head_dim] = self.extents();
        let inverse = if self.inverse { " inverse" } else { "" };
        let in_place = if self.in_place { " in place" } else { "" };
        format!("{num_tokens}x{num_heads}x{head_dim} bf16{inverse}{in_place}")
    }

    /// Reads and writes everything, or in place only the channels that turn, and reads the tables; six
    /// operations a pair.
    fn work(self) -> Work {
        let channels = if self.in_place { ROPE_DIM } else { self.head_dim };
        let heads = (self.num_tokens * self.num_heads) as f64;
        let tables = (2 * 4 * self.num_tokens * ROPE_DIM / 2) as f64;
        Work {
            operator: "rope".into(),
            bytes: 2.0 * 2.0 * heads * channels as f64 + tables,
            flops: 3.0 * heads * ROPE_DIM as f64,
        }
    }

    fn benchmark(self) -> Benchmark {
        Benchmark {
            group: "rope_forward",
            name: self.name(),
            work: self.work(),
            rate: Rate::Bytes,
            prepare: Box::new(move |lab| Ok(Box::new(Buffers::place(lab, self)?))),
        }
    }

    /// The oracle alone, on the host.
    fn oracle(self) -> Benchmark {
        let prepare: Prepare = Box::new(move |_| {
            let x = normal_f32("oracle x", self.extents().iter().product(), 0.0).to_f64();
            let tokens: Vec<usize> = (0..self.num_tokens).collect();
            let inputs = Tables::new(self.num_tokens)?.inputs(self, x, &tokens)?;
            let y = move || Ok(reference::forward(&inputs, &mut Rounding::exact())?.y);
            Ok(Box::new(OracleOnly(y)))
        });
        Benchmark {
            group: "rope_forward_oracle",
            name: self.name().replace("bf16", "f64"),
            work: self.work(),
            rate: Rate::Bytes,
            prepare,
        }
    }
}

/// Shapes of the model.
pub fn production() -> Vec<Benchmark> {
    let plain = Shape { num_tokens: 16384, num_heads: 128, head_dim: 512, inverse: false, in_place: false };
    let shapes = [plain, Shape { inverse: true, ..plain }, Shape { in_place: true, ..plain }];
    shapes.into_iter().map(Shape::benchmark).collect()
}

/// Shapes for the emulator.
pub fn small() -> Vec<Benchmark> {
    let plain = Shape { num_tokens: 16, num_heads: 16, head_dim: 512, inverse: false, in_place: false };
    vec![plain.benchmark(), Shape { in_place: true, ..plain }.benchmark(), plain.oracle()]
}

/// Cosine and sine of positions `0..num_tokens`, in f32.
struct Tables {
    cos: HostTensor,
    sin: HostTensor,
}

impl Tables {
    fn new(num_tokens: usize) -> OracleResult<Self> {
        let inv_freq = reference::inv_freq_f32(&reference::YarnParameters::compress())?;
        let positions: Vec<i64> = (0..num_tokens as i64).collect();
        let (cos, sin) = reference::table(&inv_freq, &positions)?;
        let rounded = |table: candle_core::Tensor| -> OracleResult<HostTensor> {
            let values = table.flatten_all()?.to_vec1::<f64>()?;
            Ok(HostTensor::from_f64(DType::F32, table.dims(), &values))
        };
        Ok(Self { cos: rounded(cos)?, sin: rounded(sin)? })
    }

    /// The oracle's inputs for some tokens.
    fn inputs(&self, shape: Shape, x: Vec<f64>, tokens: &[usize]) -> OracleResult<reference::Inputs> {
        let whole = |table: &HostTensor| tensor(table.to_f64(), &table.shape);
        Ok(reference::Inputs {
            x: tensor(x, &[tokens.len(), shape.num_heads, shape.head_dim])?,
            cos: whole(&self.cos)?,
            sin: whole(&self.sin)?,
            positions: Some(tokens.iter().map(|&token| token as i64).collect()),
            inverse: shape.inverse,
        })
    }
}

struct Set {
    x: Normal,
    /// `x` itself when in place.
    y: TensorView,
}

struct Buffers<'d> {
    shape: Shape,
    tables: Tables,
    cos: TensorView,
    sin: TensorView,
    sets: Vec<Set>,
    _memory: DeviceArena<'d>,
}

impl<'d> Buffers<'d> {
    fn place(lab: &Lab<'d>, shape: Shape) -> Result<Self> {
        let mut memory = lab.arena();
        let tables = Tables::new(shape.num_tokens)?;
        let cos = lab.upload(&mut memory, "cos", &tables.cos)?;
        let sin = lab.upload(&mut memory, "sin", &tables.sin)?;
        let mut all = Vec::new();
        for set in 0..sets(lab.device, shape.work().bytes) {
            let x = lab.normal(&mut memory, "x", set, &shape.extents())?;
            let y = if shape.in_place { x.view.clone() } else { memory.output("y", DType::Bf16, &shape.extents())? };
            all.push(Set { x, y });
        }
        Ok(Self { shape, tables, cos, sin, sets: all, _memory: memory })
    }
}

impl Prepared for Buffers<'_> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn call(&self, lab: &Lab<'_>, set: usize) -> Result<(), RuntimeError> {
        let Set { x, y } = &self.sets[set];
        let (cos, sin, inverse) = (&self.cos, &self.sin, self.shape.inverse);
        let arguments = launcher::Forward { x: &x.view, y, cos, sin, positions: None, inverse };
        launcher::forward(lab.device, &arguments).map(|_| ())
    }

    /// Sampled tokens, all heads. In place, the timed calls have turned the same numbers over and over; one
    /// more call is compared with a rotation of what they left.
    fn recheck(&self, lab: &Lab<'_>, set: usize) -> Result<u64, String> {
        let failed = |e: RuntimeError| e.to_string();
        let tokens = sample(self.shape.num_tokens, SAMPLED_TOKENS);
        let Set { x, y } = &self.sets[set];
        let before = if self.shape.in_place {
            let before = lab.download_rows(y, 2, &tokens).map_err(failed)?;
            self.call(lab, set).map_err(failed)?;
            before
        } else {
            lab.rows(x, 2, &tokens).map_err(failed)?
        };
        let inputs = self.tables.inputs(self.shape, before, &tokens).map_err(|e| e.to_string())?;
        let y = lab.download_rows(y, 2, &tokens).map_err(failed)?;
        let written = [Written { name: "y", stored: DType::Bf16, values: y }];
        agree(&written, |rounding| Ok(vec![reference::forward(&inputs, rounding)?.y]))
    }
}
