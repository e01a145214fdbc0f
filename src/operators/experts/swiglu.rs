//! `swiglu` (inference 11.1, training 11.2): `kernels/cuda/experts/swiglu.cu` against
//! `reference/src/experts/swiglu.rs`.

use dsv4_kernels::experts::swiglu as launcher;
use dsv4_reference::experts::swiglu as reference;

use crate::operator::prelude::*;

/// The operator.
pub struct Swiglu;

/// A case: sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwigluCase {
    /// Rows; 0 is allowed.
    pub num_rows: usize,
    /// Channels of gate, and of up.
    pub width: usize,
    /// Type of gate, up, y, dy, dgate and dup.
    pub dtype: Float,
    /// Whether rows have weights.
    pub weighted: bool,
    /// Whether every third row is padding.
    pub padding_rows: bool,
    /// The limit of the clamps.
    pub limit: f32,
    /// Gate and up.
    #[serde(flatten)]
    pub data: Data,
}

/// bf16, weighted, with padding rows.
fn plain(num_rows: usize, width: usize) -> SwigluCase {
    let (dtype, weighted, padding_rows, limit, data) =
        (Float::Bf16, true, true, 10.0, Data::normal(8.0));
    SwigluCase { num_rows, width, dtype, weighted, padding_rows, limit, data }
}

impl Operator for Swiglu {
    type Case = SwigluCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "swiglu",
        family: Family::Experts,
        summary: "y = weight · silu(min(gate, limit)) · clamp(up, ±limit), row by row, weighted or not",
        specification: &["inference 11.1", "training 11.2"],
        paths: &[
            "swiglu_forward_vector",
            "swiglu_forward_scalar",
            "swiglu_forward_few_vector",
            "swiglu_forward_few_scalar",
            "swiglu_backward_vector",
            "swiglu_backward_scalar",
            "swiglu_backward_few_vector",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] =
        &[("no limit", "a limit beyond all values is the same function: `\"limit\": 3e38`")];

    const GOLDEN: &'static [&'static str] = &["experts"];

    fn tensors(c: &SwigluCase) -> Specs {
        let (dtype, limit) = (c.dtype.dtype(), f64::from(c.limit));
        let rows = [axis("num_rows", c.num_rows), axis("width", c.width).not_empty()];
        let element = |name| input(name, dtype, &rows).rows().drawn_as(c.data).bends_over(1.0); // as silu does
        let tensors = [
            element("gate").clamped(f64::NEG_INFINITY, limit),
            element("up").clamped(-limit, limit),
            input("weight", DType::F32, &rows[..1])
                .of_any_size()
                .drawn(Distribution::Normal, 1.0)
                .with_zeros()
                .when(c.weighted),
            input("pos_to_token_topk", DType::I32, &rows[..1]).marks_padding().when(c.padding_rows),
            output("y", dtype, &rows).rows(),
            upstream("dy", "y"),
            gradient("dgate", "gate", dtype),
            gradient("dup", "up", dtype),
            gradient("dweight", "weight", DType::F32),
        ];
        Specs::new(c.data.seed, tensors).positive("limit", c.limit)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<SwigluCase> {
        let extents = matrix(profile.of([[12, 2100], [40, 5000], [600, 20000]]));
        let limit = prop::sample::select(vec![10.0f32, 1.0, 0.7]);
        (extents, Float::strategy(), any::<bool>(), any::<bool>(), limit, Data::strategy(-8..=8))
            .prop_map(|([num_rows, width], dtype, weighted, padding_rows, limit, data)| {
                SwigluCase { num_rows, width, dtype, weighted, padding_rows, limit, data }
            })
            .boxed()
    }

    fn typical() -> Vec<SwigluCase> {
        vec![plain(5, 64), plain(5, 61).with(|case| case.dtype = Float::F32)]
    }

    fn edge_cases(_: Profile) -> Vec<SwigluCase> {
        // One channel; one more than a warp takes in a step, by either kernel.
        let extents =
            [(0, 64), (6, 1), (9, 33), (9, 264)].map(|(num_rows, width)| plain(num_rows, width));
        let unweighted = plain(7, 2048).with(|case| case.weighted = false);
        let bare = plain(3, 132).with(|case| {
            case.weighted = false;
            case.padding_rows = false;
            case.dtype = Float::F32;
        });
        // Several blocks for each of few rows; rows with one warp each, as on a GPU of that many
        // SMs.
        let f32 = plain(23, 132).with(|case| case.dtype = Float::F32);
        // More rows than threads for each access on 132 SMs, with few channels: a GPU's kernels for
        // many rows.
        let many = [plain(530, 8), plain(529, 3)];
        [
            &extents[..],
            &[unweighted, bare, plain(3, 261), plain(22, 264), plain(21, 33), f32],
            &many,
        ]
        .concat()
    }

    fn forward(c: &SwigluCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, t.scalar("limit", c.limit.into()), rounding)
    }

    fn backward(c: &SwigluCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, t.scalar("limit", c.limit.into()), rounding)
    }

    fn launch(c: &SwigluCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.limit, false))
    }

    fn launch_backward(
        c: &SwigluCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, v, c.limit, true))
    }

    fn invariant(_: &SwigluCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &SwigluCase, laws: &mut Laws<'_, Self>) {
        laws.scale(
            "weight counts once",
            "weight",
            0.5,
            &[("y", 0.5), ("dgate", 0.5), ("dup", 0.5), ("dweight", 1.0)],
        );
        laws.scale_upstreams();
        laws.separate("num_rows", "rows may be permuted");
        laws.separate("width", "channels may be permuted");
    }

    /// The weights' gradients of the experts' files, which follow the GEMMs with the experts'
    /// matrices. Gate, up and dy are computed from those and rounded to f32, while the file's
    /// authors did not round.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<SwigluCase>>, String> {
        Ok(vec![routed_experts(file, |num_rows, width, limit| SwigluCase {
            dtype: Float::F32,
            padding_rows: false,
            limit,
            ..plain(num_rows, width)
        })?])
    }

    /// The model's experts: rows of a few thousand tokens, and of many.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let extents = if on_gpu(environment) { &[128, 4096, 65536][..] } else { &[16] };
        let benchmark = |num_rows, (direction, flops)| {
            let case = SwigluCase { padding_rows: false, ..plain(num_rows, 2048) };
            Benchmark::new(direction, format!("{num_rows}x2048 bf16"), case, "num_rows")
                .streaming(&[], flops)
        };
        // Three bounds, three operations of silu, two products; 18 in the backward.
        let both = [(Direction::Forward, 8.0), (Direction::Backward, 18.0)];
        extents
            .iter()
            .flat_map(|&num_rows| both.map(|direction| benchmark(num_rows, direction)))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["4096x2048 bf16"],
            json!({"num_rows": 21, "width": 512}),
            json!({"num_rows": 4}),
        )]
    }
}

/// The golden case of an experts' file for an operator with gate, up, weight, dy and dweight as in
/// `swiglu`. It is made from the rows, the width and the limit.
pub(crate) fn routed_experts<C>(
    file: &mut Reading<'_>,
    case: impl FnOnce(usize, usize, f32) -> C,
) -> Result<Golden<C>, String> {
    let (chosen, limit) = ("in.top_k_index", file.number("swiglu_limit")?);
    let gate_up = ("param.experts.gate_up_proj", ["gate_and_up", "hidden"]);
    let gate_up = golden::routed(file, "in.hidden", chosen, gate_up)?;
    let dy = golden::routed_back(
        file,
        "gout.y",
        chosen,
        ("param.experts.down_proj", ["hidden", "width"]),
    )?;
    let (width, topk) = (file.extent("width")?, ["..tokens", "topk"]);
    file.hold("gate_and_up", 2 * width, "two of param.experts.down_proj")?;
    let (gate, up): (Vec<_>, Vec<_>) = gate_up.iter().map(|row| row.split_at(width)).unzip();
    let golden = Golden::new(case(dy.len(), width, limit as f32)).scalar("limit", limit);
    let golden = golden.stored(file, "weight", "in.top_k_weights", &topk)?;
    let golden =
        golden.values("gate", gate.concat()).values("up", up.concat()).values("dy", dy.concat());
    Ok(golden.expect(file, "dweight", "grad.in.top_k_weights", &topk)?.computed_in_f32())
}
