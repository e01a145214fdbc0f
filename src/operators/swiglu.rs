//! `swiglu` (inference 11.1, training 11.2): `kernels/cuda/swiglu.cu` against `reference/src/swiglu.rs`.

use dsv4_kernels::runtime::{DType, RuntimeError};
use dsv4_kernels::swiglu as launcher;
use dsv4_reference::precision::Rounding;
use dsv4_reference::swiglu as reference;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use serde::{Deserialize, Serialize};

use super::{Float, LARGEST_DRAWN, extent, magnitude};
use crate::case::Distribution;
use crate::judge::golden::GoldenFile;
use crate::operator::declaration::{Specs, axis, gradient, input, output, upstream};
use crate::operator::declared::{About, Declared, Launches, Refused, Views, positive, refuse};
use crate::operator::golden::Golden;
use crate::operator::laws::Laws;
use crate::operator::tensors::{Bound, Computed, Tensors};
use crate::operator::{ModuleSpecification, Profile};

/// The operator.
pub struct Swiglu;

/// What gate and up hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// What the distribution gives.
    Drawn,
    /// All pairs of both limits, their neighbours, far beyond them, and 0; every second weight is 0.
    AtTheLimit,
    /// All pairs of NaN, both infinities and 1.
    NotFinite,
}

/// A case: extents, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwigluCase {
    /// Rows; 0 is legal.
    pub num_rows: usize,
    /// Channels of gate, and of up.
    pub width: usize,
    /// Type of gate, up, y, dy, dgate and dup.
    pub dtype: Float,
    /// Whether rows have weights.
    pub weighted: bool,
    /// Whether every third row is padding. Such rows hold NaN.
    pub padding_rows: bool,
    /// The limit of the clamps.
    pub limit: f32,
    /// What gate and up hold.
    pub values: Values,
    /// Distribution of gate and up.
    pub distribution: Distribution,
    /// Their scale.
    pub magnitude: f64,
    /// Seed of the data.
    pub seed: u64,
}

impl SwigluCase {
    fn plain(num_rows: usize, width: usize) -> Self {
        let (dtype, values, distribution) = (Float::Bf16, Values::Drawn, Distribution::Normal);
        let (weighted, padding_rows, limit, magnitude, seed) = (true, true, 10.0, 8.0, 1);
        Self { num_rows, width, dtype, weighted, padding_rows, limit, values, distribution, magnitude, seed }
    }
}

fn inputs(c: &SwigluCase, t: &Bound<'_>) -> dsv4_reference::Result<reference::Inputs> {
    let (gate, up, weight) = (t.f64("gate")?, t.f64("up")?, t.maybe("weight")?);
    let (pos_to_token_topk, limit) = (t.host().maybe_i32s("pos_to_token_topk"), t.scalar("limit", f64::from(c.limit)));
    Ok(reference::Inputs { gate, up, weight, pos_to_token_topk, limit })
}

fn views<'v>(c: &SwigluCase, v: &'v Views) -> launcher::Inputs<'v> {
    let (gate, up, weight, pos_to_token_topk) = (&v["gate"], &v["up"], v.get("weight"), v.get("pos_to_token_topk"));
    launcher::Inputs { gate, up, weight, pos_to_token_topk, limit: c.limit }
}

impl Declared for Swiglu {
    type Case = SwigluCase;

    const ABOUT: About = About {
        name: "swiglu",
        summary: "y = weight · silu(min(gate, limit)) · clamp(up, ±limit), row by row, weighted or not",
        specification: &["inference 11.1", "training 11.2"],
        axes: &["extents", "dtype", "weight", "padding rows", "limit", "special values", "distribution", "magnitude"],
        paths: &["swiglu_forward_vector", "swiglu_forward_scalar", "swiglu_backward_vector", "swiglu_backward_scalar"],
        cases: [24, 60, 120],
    };

    fn tensors(c: &SwigluCase) -> Specs {
        let rows = [axis("num_rows", c.num_rows), axis("width", c.width)];
        let element = |name| input(name, c.dtype.dtype(), &rows).rows().drawn(c.distribution, c.magnitude);
        Specs::new(
            c.seed,
            [
                element("gate"),
                element("up"),
                input("weight", DType::F32, &rows[..1]).when(c.weighted).drawn(Distribution::Normal, 1.0),
                input("pos_to_token_topk", DType::I32, &rows[..1]).when(c.padding_rows),
                output("y", c.dtype.dtype(), &rows).rows(),
                upstream("dy", "y"),
                gradient("dgate", "gate", c.dtype.dtype()),
                gradient("dup", "up", c.dtype.dtype()),
                gradient("dweight", "weight", DType::F32),
            ],
        )
    }

    fn check(c: &SwigluCase) -> Result<(), Refused> {
        if c.width == 0 {
            return refuse("width", "0: a row has at least one channel");
        }
        positive("limit", f64::from(c.limit))?;
        positive("magnitude", c.magnitude)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<SwigluCase> {
        let (rows, width) = match profile {
            Profile::Quick => (12, 2100),
            Profile::Ci => (40, 5000),
            Profile::Full => (600, 20000),
        };
        let widths = prop_oneof![3 => extent(300, 8), 1 => extent(width, 256)];
        let float = prop_oneof![2 => Just(Float::Bf16), 1 => Just(Float::F32)];
        let values = prop_oneof![4 => Just(Values::Drawn), 1 => Just(Values::AtTheLimit), 1 => Just(Values::NotFinite)];
        let form = (float, any::<bool>(), any::<bool>(), prop::sample::select(vec![10.0f32, 1.0, 0.7]), values);
        let data = (prop::sample::select(Distribution::ALL.to_vec()), magnitude(-8..=8), 0..1000u64);
        (extent(rows, 4), widths, form, data)
            .prop_map(|(num_rows, width, form, (distribution, magnitude, seed))| {
                let (dtype, weighted, padding_rows, limit, values) = form;
                let num_rows = num_rows.min((LARGEST_DRAWN / width).max(1));
                SwigluCase {
                    num_rows,
                    width,
                    dtype,
                    weighted,
                    padding_rows,
                    limit,
                    values,
                    distribution,
                    magnitude,
                    seed,
                }
            })
            .boxed()
    }

    fn typical() -> Vec<SwigluCase> {
        vec![SwigluCase::plain(5, 64), SwigluCase { dtype: Float::F32, ..SwigluCase::plain(5, 37) }]
    }

    fn edge_cases(_: Profile) -> Vec<SwigluCase> {
        let plain = SwigluCase::plain;
        let mut cases = vec![
            plain(0, 64),
            // One channel; one more than a warp takes in a step, by either kernel.
            SwigluCase { padding_rows: false, ..plain(6, 1) },
            plain(9, 33),
            plain(9, 264),
            SwigluCase { weighted: false, ..plain(7, 2048) },
            SwigluCase { weighted: false, padding_rows: false, dtype: Float::F32, ..plain(3, 132) },
        ];
        for (values, dtype) in
            [Values::AtTheLimit, Values::NotFinite].into_iter().flat_map(|v| [(v, Float::Bf16), (v, Float::F32)])
        {
            cases.extend([plain(6, 72), plain(5, 35)].map(|c| SwigluCase { values, dtype, ..c }));
        }
        cases
    }

    fn modules() -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn amend(c: &SwigluCase, tensors: &mut Tensors) -> dsv4_reference::Result<()> {
        let limit = f64::from(c.limit);
        let (above, below) = if c.dtype == Float::Bf16 {
            (1.0 + 2f64.powi(-7), 1.0 - 2f64.powi(-7))
        } else {
            (1.0 + 2f64.powi(-23), 1.0 - 2f64.powi(-23))
        };
        let special = match c.values {
            Values::Drawn => vec![],
            Values::AtTheLimit => {
                [1.0, above, below, 20.0, 0.0].into_iter().flat_map(|x| [x * limit, -x * limit]).collect()
            }
            Values::NotFinite => vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1.0],
        };
        let count = special.len().max(1);
        for (name, run) in [("gate", 1), ("up", count)] {
            tensors.edit(name, |x| {
                x.iter_mut().enumerate().for_each(|(i, x)| *x = special.get(i / run % count).copied().unwrap_or(*x))
            });
        }
        if c.values == Values::AtTheLimit {
            tensors.edit("weight", |weights| weights.iter_mut().step_by(2).for_each(|w| *w = 0.0));
        }
        if c.padding_rows {
            tensors.set_i32s(
                "pos_to_token_topk",
                &(0..c.num_rows as i32).map(|row| if row % 3 == 1 { -row } else { row }).collect::<Vec<_>>(),
            );
            for name in ["gate", "up", "dy"] {
                tensors.edit(name, |x| x.chunks_mut(c.width).skip(1).step_by(3).for_each(|row| row.fill(f64::NAN)));
            }
            tensors.edit("weight", |weights| weights.iter_mut().skip(1).step_by(3).for_each(|w| *w = f64::NAN));
        }
        Ok(())
    }

    fn forward(c: &SwigluCase, t: &Bound<'_>, rounding: &mut Rounding) -> dsv4_reference::Result<Computed> {
        Ok(Computed::new().with("y", reference::forward(&inputs(c, t)?, rounding)?))
    }

    fn backward(c: &SwigluCase, t: &Bound<'_>, rounding: &mut Rounding) -> dsv4_reference::Result<Computed> {
        let reference::Gradients { dgate, dup, dweight } =
            reference::backward(&inputs(c, t)?, &t.f64("dy")?, rounding)?;
        Ok(Computed::new().with("dgate", dgate).with("dup", dup).maybe("dweight", dweight))
    }

    fn launch(c: &SwigluCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.ran(launcher::forward(run.device(), &views(c, v), &v["y"])?);
        Ok(())
    }

    fn launch_backward(c: &SwigluCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let gradients = launcher::Gradients { dgate: &v["dgate"], dup: &v["dup"], dweight: v.get("dweight") };
        run.ran(launcher::backward(run.device(), &views(c, v), &v["dy"], &gradients)?);
        Ok(())
    }

    fn laws(_: &SwigluCase, laws: &mut Laws<'_, Self>) {
        // Powers of two scale exactly where nothing underflows: the sigmoid of these is subnormal, or nearly.
        if !laws.tensors().values("gate").iter().any(|gate| (-90.0..-70.0).contains(gate)) {
            let scaled = [("dgate", 4.0), ("dup", 4.0), ("dweight", 4.0), ("y", 1.0)];
            laws.scale("dy scales the gradients once", "dy", 4.0, &scaled);
            laws.scale(
                "weight counts once",
                "weight",
                0.5,
                &[("y", 0.5), ("dgate", 0.5), ("dup", 0.5), ("dweight", 1.0)],
            );
        }
        laws.permute("rows may be permuted", "num_rows");
        laws.permute("channels may be permuted", "width");
        laws.independent("num_rows");
        laws.independent("width");
    }

    /// Finite differences run the oracle dozens of times: large cases learn nothing more from them.
    fn is_smooth(c: &SwigluCase) -> bool {
        c.num_rows * c.width <= 4096 && c.values != Values::NotFinite
    }

    /// Up to the nearest limit, and silu over 1: on a limit there is no derivative to see.
    fn bends_over(c: &SwigluCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let distance = |x: f64| (x - f64::from(c.limit)).abs().min(1.0);
        match input {
            "gate" => Some(tensors.values("gate").into_iter().map(distance).collect()),
            "up" => Some(tensors.values("up").into_iter().map(|x| distance(x.abs())).collect()),
            _ => None,
        }
    }

    /// The weights' gradients of the experts' files, which stand behind the products with the experts' matrices: gate, up
    /// and dy are computed from those, and rounded to f32 where the file's authors rounded nothing.
    fn golden(file: &GoldenFile) -> Result<Vec<Golden<SwigluCase>>, String> {
        if file.operator != "experts" {
            return Ok(Vec::new());
        }
        let (hidden, chosen, dout) =
            (file.tensor("in.hidden")?, file.tensor("in.top_k_index")?, file.tensor("gout.y")?);
        let (gate_up, down) = (file.tensor("param.experts.gate_up_proj")?, file.tensor("param.experts.down_proj")?);
        let &[_, channels, width] = down.shape.as_slice() else { return Err("down_proj: 3 axes".into()) };
        let topk = *chosen.shape.last().ok_or("in.top_k_index has no axes")?;
        let [mut gate, mut up, mut dy] = [const { Vec::new() }; 3];
        for (row, &expert) in chosen.values.iter().enumerate() {
            let token = row / topk * channels..(row / topk + 1) * channels;
            let product = |x: &[f64], matrix: &[f64], start: usize, step: usize| -> f64 {
                x[token.clone()].iter().enumerate().map(|(i, x)| x * matrix[start + i * step]).sum()
            };
            for channel in 0..width {
                let first = (expert as usize * 2 * width + channel) * channels;
                gate.push(product(&hidden.values, &gate_up.values, first, 1));
                up.push(product(&hidden.values, &gate_up.values, first + width * channels, 1));
                dy.push(product(&dout.values, &down.values, expert as usize * channels * width + channel, width));
            }
        }
        let plain = SwigluCase::plain(chosen.values.len(), width);
        let case =
            SwigluCase { dtype: Float::F32, padding_rows: false, limit: file.number("swiglu_limit")? as f32, ..plain };
        let golden = Golden::new(case).values("gate", gate).values("up", up).values("dy", dy);
        let golden = golden.scalar("limit", file.number("swiglu_limit")?).stored(file, "weight", "in.top_k_weights")?;
        Ok(vec![golden.expect(file, "dweight", "grad.in.top_k_weights")?.computed_in_f32()])
    }

    /// The model's experts: rows of a few thousand tokens, and of many.
    fn benchmarks(
        environment: &dsv4_kernels::runtime::Environment,
    ) -> Vec<crate::operator::benchmarks::Benchmark<Self>> {
        use crate::operator::benchmarks::{Benchmark, DRAWN, Direction::*, on_gpu};
        let shapes = if on_gpu(environment) { &[(4096, 2048), (65536, 2048)][..] } else { &[(16, 2048)] };
        let benchmark = |direction, num_rows: usize, width: usize| {
            let case = SwigluCase { padding_rows: false, ..SwigluCase::plain(num_rows, width) };
            let (elements, rows) = ((num_rows * width) as f64, num_rows as f64);
            // Forward: gate, up and y once, and the weights; three bounds, three operations of silu, two products.
            // Backward: dy, gate, up, dgate and dup once, the weights and their gradients; 18 operations an element.
            let (bytes, flops) = match direction {
                Forward => (6.0 * elements + 4.0 * rows, 8.0 * elements),
                Backward => (10.0 * elements + 8.0 * rows, 18.0 * elements),
            };
            let drawn = SwigluCase { num_rows: num_rows.min(DRAWN / width), ..case.clone() };
            let name = format!("{num_rows}x{width} bf16");
            Benchmark { drawn, bytes, flops, ..Benchmark::new(direction, name, case, "num_rows") }
        };
        let both =
            shapes.iter().flat_map(|&(rows, width)| [Forward, Backward].map(|side| benchmark(side, rows, width)));
        both.collect()
    }
}
