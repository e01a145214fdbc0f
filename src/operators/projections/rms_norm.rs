//! `rms_norm` (inference 3, training 11.3): `kernels/cuda/projections/rms_norm.cu` against
//! `reference/src/projections/rms_norm.rs`.

use dsv4_kernels::projections::rms_norm as launcher;
use dsv4_reference::projections::rms_norm as reference;
use dsv4_runtime::Device;

use crate::operator::prelude::*;

/// The operator.
pub struct RmsNorm;

/// A case: sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Elements of a row, 1 to 32768.
    pub width: usize,
    /// Type of x, y, dy and dx.
    pub dtype: Float,
    /// Type of the weight; absent for the unweighted norm.
    pub weight: Option<Float>,
    /// Added to the mean square.
    pub eps: f32,
    /// Where y is stored.
    pub aliasing: Aliasing,
    /// Whether every third row is zero.
    pub zero_rows: bool,
    /// Whether the forward that writes y saves rstd. If not, as in inference, a separate forward
    /// saves it for the backward.
    pub saves_rstd: bool,
    /// x, and the distribution of dy.
    #[serde(flatten)]
    pub data: Data,
}

impl RmsNormCase {
    fn plain(num_rows: usize, width: usize) -> Self {
        Self {
            num_rows,
            width,
            dtype: Float::Bf16,
            weight: Some(Float::F32),
            eps: 1e-6,
            aliasing: Aliasing::OutOfPlace,
            zero_rows: false,
            saves_rstd: true,
            data: Data::normal(1.0),
        }
    }
}

/// The distance over which a norm bends: each row's own root mean square, or the root of eps if
/// that is larger.
pub(crate) fn sizes_of_rows(x: &[f64], width: usize, eps: f64) -> Vec<f64> {
    let size =
        |row: &[f64]| (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + eps).sqrt();
    x.chunks(width).flat_map(|row| std::iter::repeat_n(size(row), row.len())).collect()
}

impl Operator for RmsNorm {
    type Case = RmsNormCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "rms_norm",
        family: Family::Projections,
        summary: "y = weight · x / sqrt(mean(x²) + eps), row by row, weighted or not",
        specification: &["inference 3", "training 11.3"],
        paths: &[
            "rms_norm_forward_warp",
            "rms_norm_forward_block",
            "rms_norm_forward_block_few",
            "rms_norm_forward_scalar",
            "rms_norm_backward_warp",
            "rms_norm_backward_block",
            "rms_norm_backward_wide",
            "rms_norm_backward_scalar",
            "rms_norm_dweight",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["rmsnorm"];

    fn tensors(c: &RmsNormCase) -> Specs {
        let (dtype, weight) = (c.dtype.dtype(), c.weight.unwrap_or(c.dtype).dtype());
        let rows = [
            axis("num_rows", c.num_rows),
            axis("width", c.width).multiples(1, launcher::MAX_WIDTH),
        ];
        let tensors = [
            input("x", dtype, &rows).rows().of_any_size().drawn_as(c.data),
            input("weight", weight, &rows[1..])
                .of_any_size()
                .when(c.weight.is_some())
                .drawn(Distribution::Normal, 1.0),
            output("y", dtype, &rows).rows().placed(c.aliasing, "x").only_in("forward"),
            output("rstd", DType::F32, &rows[..1]).only_in(if c.saves_rstd {
                "forward"
            } else {
                "saving forward"
            }),
            upstream("dy", "y").drawn(c.data.distribution, 1.0),
            gradient("dx", "x", dtype),
            gradient("dweight", "weight", DType::F32),
            scratch("y_of_saving_forward", dtype, &rows).rows().when(!c.saves_rstd).argument("y"),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<RmsNormCase> {
        let extents = matrix(profile.of([[24, 2100], [40, 9000], [600, 32768]]));
        let weight = prop_oneof![Just(None), Just(Some(Float::F32)), Just(Some(Float::Bf16))];
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let saves_rstd = prop_oneof![3 => Just(true), 1 => Just(false)];
        let rows = (any::<bool>(), saves_rstd);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32), 1 => Just(1e-12f32)];
        (extents, Float::strategy(), weight, eps, aliasing, rows, Data::strategy(-18..=18))
            .prop_map(
                |(
                    [num_rows, width],
                    dtype,
                    weight,
                    eps,
                    aliasing,
                    (zero_rows, saves_rstd),
                    data,
                )| {
                    // A row of one element has dx = dy·w·r·eps·r². It vanishes under the rounding
                    // of its two terms unless eps is large enough.
                    let magnitude = if width == 1 { f64::from(eps).sqrt() } else { data.magnitude };
                    let data = Data { magnitude, ..data };
                    RmsNormCase {
                        num_rows,
                        width,
                        dtype,
                        weight,
                        eps,
                        aliasing,
                        zero_rows,
                        saves_rstd,
                        data,
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<RmsNormCase> {
        let plain = RmsNormCase::plain;
        // One row for each warp, one row for each block, and one element at a time.
        vec![
            plain(5, 512),
            plain(3, 2048),
            plain(3, 517).with(|case| {
                case.dtype = Float::F32;
                case.saves_rstd = false;
            }),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<RmsNormCase> {
        let plain = RmsNormCase::plain;
        let mut cases = vec![
            plain(0, 64),
            plain(1, 32768),
            plain(5, 1024).with(|case| case.aliasing = Aliasing::InPlace),
            plain(7, 512).with(|case| {
                case.zero_rows = true;
                case.weight = None;
            }),
            plain(3, 1000).with(|case| case.dtype = Float::F32),
            plain(9, 517),
            // Backward of rows too wide for registers.
            plain(3, 14344),
            // Three, and five, vectors a lane in the warp kernels.
            plain(5, 768),
            plain(3, 640).with(|case| case.dtype = Float::F32),
            // Weights of half an element's size, which have separate loads.
            plain(3, 64).with(|case| {
                case.dtype = Float::F32;
                case.weight = Some(Float::Bf16);
            }),
            // Few rows, whose weight is loaded together with them: either type with either, absent,
            // and a row in place.
            plain(2, 1032).with(|case| {
                case.dtype = Float::F32;
                case.weight = Some(Float::Bf16);
            }),
            plain(2, 2056).with(|case| case.weight = Some(Float::Bf16)),
            plain(2, 1032).with(|case| {
                case.weight = None;
                case.aliasing = Aliasing::InPlace;
            }),
            // A scalar row wider than its block.
            plain(3, 1501),
            // More rows than blocks in the backward, and no dweight.
            plain(20, 2048).with(|case| case.weight = None),
            // More partial sums of dweight than one block of their sum takes at a time.
            plain(136, 1024),
            // No rstd to store, by each forward kernel.
            plain(5, 512).with(|case| case.saves_rstd = false),
            plain(3, 2048).with(|case| case.saves_rstd = false),
            plain(3, 517).with(|case| case.saves_rstd = false),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain(512, 7168),
                plain(2048, 512),
                plain(4096, 512).with(|case| case.weight = None),
            ]);
        }
        cases
    }

    fn amend(c: &RmsNormCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.zero_rows {
            tensors.edit("x", |x| x.chunks_mut(c.width).step_by(3).for_each(|row| row.fill(0.0)));
        }
        Ok(())
    }

    fn forward(c: &RmsNormCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, t.scalar("eps", c.eps.into()), rounding)
    }

    fn backward(c: &RmsNormCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, t.scalar("eps", c.eps.into()), rounding)
    }

    fn workspaces(
        c: &RmsNormCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let bytes = || launcher::workspace_bytes(device, c.dtype.dtype(), c.num_rows, c.width);
        Ok(c.weight.iter().map(|_| ("workspace", bytes())).collect())
    }

    fn launch(c: &RmsNormCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        if let Some(y) = v.get("y_of_saving_forward") {
            launcher::forward(run.device(), &v.only(&["x", "weight", "rstd"]).with("y", y), c.eps)?;
        }
        let forward =
            if c.saves_rstd { &["x", "weight", "y", "rstd"][..] } else { &["x", "weight", "y"] };
        run.launch(|device| launcher::forward(device, &v.only(forward), c.eps))
    }

    fn launch_backward(
        _: &RmsNormCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::backward(device, &v.without(&["y_of_saving_forward"])))
    }

    fn invariant(_: &RmsNormCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &RmsNormCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        let halved = [("y", 0.5), ("dx", 0.5), ("dweight", 1.0), ("rstd", 1.0)];
        laws.scale("weight scales once", "weight", 0.5, &halved);
        laws.separate("num_rows", "rows may be permuted");
    }

    /// A row bends over its own root mean square, or over the root of eps if that is larger.
    fn bends_over(c: &RmsNormCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        let eps = tensors.scalar("eps", f64::from(c.eps));
        (input == "x").then(|| sizes_of_rows(&tensors.values("x"), c.width, eps))
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<RmsNormCase>>, String> {
        let rows = &["..rows", "width"];
        let x = file.floats("in.x", rows)?.to_vec();
        let weighted = file.config("weighted").as_bool().ok_or("config has no `weighted`")?;
        let case = RmsNormCase {
            weight: weighted.then_some(Float::Bf16),
            eps: file.number("eps")? as f32,
            ..RmsNormCase::plain(file.extent("rows")?, file.extent("width")?)
        };
        let golden = Golden::new(case).scalar("eps", file.number("eps")?).values("x", x);
        let golden = golden.stored(file, "dy", "gout.y", rows)?.expect(file, "y", "out.y", rows)?;
        let golden = golden.expect(file, "dx", "grad.in.x", rows)?;
        if !weighted {
            return Ok(vec![golden]);
        }
        let golden = golden.stored(file, "weight", "param.norm.weight", &["width"])?;
        Ok(vec![golden.expect(file, "dweight", "grad.param.norm.weight", &["width"])?])
    }

    /// The widths of the model's hidden state and of its query heads.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let heads = 16384 * 128;
        let gpu = [
            (Forward, 1, 7168, true),
            (Forward, 128, 7168, true),
            (Forward, 4096, 7168, true),
            (Forward, 16384, 7168, true),
            (Forward, 32768, 7168, true),
            (Forward, heads, 512, true),
            (Forward, heads, 512, false),
            (Backward, 4096, 7168, true),
            (Backward, 16384, 7168, true),
        ];
        let small =
            [(Forward, 16, 4096, true), (Forward, 256, 512, false), (Backward, 16, 4096, true)];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &small };
        let benchmark = |&(direction, num_rows, width, weighted): &(_, usize, usize, bool)| {
            let weight = weighted.then_some(Float::F32);
            let case = RmsNormCase { weight, ..RmsNormCase::plain(num_rows, width) };
            let name =
                format!("{num_rows}x{width} bf16{}", if weighted { "" } else { " unweighted" });
            // A square, its sum and two products for each element; nine operations in the backward.
            let flops = if direction == Forward { 4.0 } else { 9.0 };
            Benchmark::new(direction, name, case, "num_rows").streaming(&["rstd"], flops)
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["4096x7168 bf16", "2097152x512 bf16 unweighted"],
                json!({"num_rows": 21, "width": 512}),
                json!({"num_rows": 4}),
            ),
            Reduced::backward(
                &["16384x7168 bf16"],
                json!({"num_rows": 21, "width": 512}),
                json!({"num_rows": 4}),
            ),
        ]
    }
}
