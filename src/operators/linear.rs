//! `linear` (inference 0, 5.2, 5.5): `kernels/cuda/linear.cu` against `reference/src/linear.rs`.

use dsv4_kernels::linear::{self as launcher, MAX_FEATURES};
use dsv4_reference::linear as reference;

use super::extent;
use crate::operator::prelude::*;

/// The operator.
pub struct Linear;

/// What a result is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Before {
    /// Nothing.
    Absent,
    /// A tensor of its own.
    Apart,
    /// What lies where y goes, and a tensor of its own for dw.
    InPlace,
}

/// A case: extents, types, what results are added to, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCase {
    /// Tokens; 0 is legal.
    pub num_tokens: usize,
    /// Features of a row of y.
    pub out_features: usize,
    /// Features of a row of x.
    pub in_features: usize,
    /// Type of y.
    pub output: Float,
    /// Type of dw.
    pub weight_gradient: Float,
    /// What y and dw are added to.
    pub before: Before,
    /// x.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, out_features: usize, in_features: usize) -> LinearCase {
    let (output, weight_gradient, before, data) = (Float::Bf16, Float::F32, Before::Absent, Data::normal(1.0));
    LinearCase { num_tokens, out_features, in_features, output, weight_gradient, before, data }
}

/// Products that a drawn case computes at most: ten runs of the oracle take a second or so.
const LARGEST_PRODUCT: usize = 1 << 22;

impl Declared for Linear {
    type Case = LinearCase;

    const ABOUT: About = About {
        name: "linear",
        summary: "y = x wᵀ with bf16 weights, added to what was there or not, and its gradients",
        specification: &["inference 0", "inference 5.2", "inference 5.5"],
        paths: &[
            "linear_forward_large",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_sum",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["router_topk", "router_hash"];

    fn tensors(c: &LinearCase) -> Specs {
        let tokens = axis("num_tokens", c.num_tokens);
        let [outs, ins] = [("out_features", c.out_features), ("in_features", c.in_features)]
            .map(|(name, extent)| axis(name, extent).multiples(1, MAX_FEATURES));
        let (output_type, gradient_type) = (c.output.dtype(), c.weight_gradient.dtype());
        let added = c.before != Before::Absent;
        // What is added to something has no scale of its own.
        let of = |name, axes: &[_]| {
            let spec = input(name, DType::Bf16, axes).rows();
            if added { spec } else { spec.of_any_size() }
        };
        let before = |name, dtype, axes: &[_]| input(name, dtype, axes).rows().drawn_as(c.data).when(added);
        let aliasing = if c.before == Before::InPlace { Aliasing::InPlace } else { Aliasing::OutOfPlace };
        let tensors = [
            of("x", &[tokens, ins]).drawn_as(c.data),
            of("w", &[outs, ins]).drawn(Distribution::Normal, 1.0),
            before("y_before", output_type, &[tokens, outs]),
            before("dw_before", gradient_type, &[outs, ins]),
            output("y", output_type, &[tokens, outs]).rows().placed(aliasing, "y_before").only_in("forward"),
            upstream("dy", "y").stored_in(DType::Bf16),
            gradient("dx", "x", DType::Bf16).rows(),
            gradient("dw", "w", gradient_type).rows().may_be("dw_before"),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &LinearCase) -> Result<(), Refused> {
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<LinearCase> {
        let [tokens, features] = profile.of([[40usize, 150], [200, 300], [700, 3000]]);
        let features = move || prop_oneof![3 => extent(features, 8), 1 => 1..=features];
        let before = select(vec![Before::Absent, Before::Absent, Before::Apart, Before::InPlace]);
        let tokens = prop_oneof![2 => extent(tokens, 16), 1 => 0..=17usize];
        (tokens, features(), features(), (Float::strategy(), Float::strategy(), before), Data::strategy(-30..=30))
            .prop_map(|(tokens, outs, ins, (output, weight_gradient, before), data)| {
                let num_tokens = tokens.min(LARGEST_PRODUCT / (outs * ins));
                LinearCase { output, weight_gradient, before, data, ..plain(num_tokens, outs, ins) }
            })
            .boxed()
    }

    fn typical() -> Vec<LinearCase> {
        let added = LinearCase { before: Before::Apart, output: Float::F32, ..plain(5, 24, 72) };
        let narrow = LinearCase { weight_gradient: Float::Bf16, ..plain(18, 9, 13) };
        vec![plain(18, 24, 40), added, narrow]
    }

    fn edge_cases(profile: Profile) -> Vec<LinearCase> {
        let f32s = |case| LinearCase { output: Float::F32, ..case };
        let before = |before, case| LinearCase { before, ..case };
        let mut cases = vec![
            plain(0, 24, 40),
            before(Before::InPlace, plain(0, 24, 40)),
            plain(1, 1, 1),
            plain(1, 8, 8),
            // One row more than the small tiles have, one more than a stage of k, a last stage of eight.
            plain(16, 72, 128),
            plain(17, 72, 64),
            f32s(plain(3, 136, 72)),
            // Rows of y of whole accesses in fp32 and not in bf16; odd ones.
            f32s(plain(4, 12, 16)),
            plain(4, 12, 16),
            plain(65, 67, 70),
            // Two tiles and some more in each direction, and more rows of tiles than are taken together.
            plain(130, 136, 72),
            plain(1030, 8, 8),
            // Parts of k, whose sums are added to what was there: more of them than stages divide by.
            before(Before::Apart, f32s(plain(2, 8, 1480))),
            before(Before::InPlace, plain(17, 16, 584)),
            before(Before::InPlace, f32s(plain(600, 8, 8))),
            before(Before::Apart, plain(5, 7, 535)),
        ];
        if profile == Profile::Full {
            cases.extend([plain(1, 7168, 1536), plain(300, 1030, 4096), f32s(plain(4096, 264, 520))]);
        }
        cases
    }

    fn forward(_: &LinearCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn backward(_: &LinearCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, rounding)
    }

    fn workspaces(c: &LinearCase, _: &Views, device: &Device) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let forward = launcher::forward_workspace_bytes(device, c.num_tokens, c.out_features, c.in_features);
        let backward = launcher::backward_workspace_bytes(device, c.num_tokens, c.out_features, c.in_features);
        Ok(vec![("workspace", forward.max(backward))])
    }

    fn launch(_: &LinearCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, &v.without(&["dy", "dx", "dw"])))
    }

    fn launch_backward(_: &LinearCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let ran = launcher::backward(run.device(), &v.without(&["y"]))?;
        run.ran(ran.into_iter().map(|path| format!("backward {path}")).collect::<Vec<_>>());
        Ok(())
    }

    fn laws(c: &LinearCase, laws: &mut Laws<'_, Self>) {
        if c.before == Before::Absent {
            laws.scale("x counts once", "x", 0.5, &[("y", 0.5), ("dx", 1.0), ("dw", 0.5)]);
            laws.scale("w counts once", "w", 0.5, &[("y", 0.5), ("dx", 0.5), ("dw", 1.0)]);
            laws.scale_upstreams();
        }
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("out_features", "outputs may be permuted");
        laws.independent("in_features");
    }

    /// dw is no gradient where it is added to what was there.
    fn is_smooth(c: &LinearCase) -> bool {
        c.before == Before::Absent && c.out_features.max(c.num_tokens) * c.in_features <= 4096
    }

    /// The logits of a router.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<LinearCase>>, String> {
        let (rows, weight) = (["..tokens", "hidden"], ["experts", "hidden"]);
        file.floats("in.hidden", &rows)?;
        file.floats("param.gate.weight", &weight)?;
        let [tokens, experts, hidden] = [file.extent("tokens")?, file.extent("experts")?, file.extent("hidden")?];
        let golden = Golden::new(LinearCase { output: Float::F32, ..plain(tokens, experts, hidden) });
        let golden = golden.stored(file, "x", "in.hidden", &rows)?;
        let golden = golden.stored(file, "w", "param.gate.weight", &weight)?;
        Ok(vec![golden.expect(file, "y", "out.logits", &["tokens", "experts"])?])
    }

    /// Projections of the model whose weights are bf16 in training, and few tokens of them.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let of = |extents: [usize; 3], direction: Direction| {
            let [num_tokens, out_features, in_features] = extents;
            let name = format!("{num_tokens}x{out_features}x{in_features} bf16");
            let flops = 2.0 * extents.map(|extent| extent as f64).iter().product::<f64>();
            let benchmark = Benchmark::new(direction, name, plain(num_tokens, out_features, in_features), "num_tokens");
            // A tensor that no token has is drawn along its rows.
            let benchmark = benchmark.also_drawn_along("out_features").streaming(&[], 0.0);
            benchmark.computing(if direction == Forward { flops } else { 2.0 * flops })
        };
        let (forward, backward): (&[_], &[_]) = if on_gpu(environment) {
            (
                &[
                    [1, 65536, 1536],
                    [64, 65536, 1536],
                    [4096, 65536, 1536],
                    [1, 7168, 16384],
                    [64, 7168, 16384],
                    [4096, 7168, 16384],
                ],
                &[[4096, 7168, 16384], [4096, 1536, 7168]],
            )
        } else {
            (&[[9, 64, 136]], &[[40, 64, 72]])
        };
        let forward = forward.iter().map(|&extents| of(extents, Forward));
        forward.chain(backward.iter().map(|&extents| of(extents, Backward))).collect()
    }
}
