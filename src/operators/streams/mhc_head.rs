//! `mhc_head` (inference 2.5, training 11.1): `kernels/cuda/streams/mhc_head.cu`,
//! `mhc_head_backward.cu` and those for Hopper against `reference/src/streams/mhc_head.rs`.

use dsv4_kernels::streams::mhc_head as launcher;
use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_reference::streams::mhc_head as reference;
use dsv4_runtime::Device;

use crate::operator::declaration::TensorSpec;
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::streams::mhc_mix::{coefficients_bend_over, fitting, implementations};
use crate::operators::streams::site;

/// The operator.
pub struct MhcHead;

/// A case: sizes, values, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcHeadCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of a stream.
    pub hidden_size: usize,
    /// Added to the mean square of a token.
    pub norm_eps: f32,
    /// Added to the sigmoids.
    pub hc_eps: f32,
    /// `base` is uniform between this and its negative: the spread of the logits.
    pub logits: f32,
    /// Whether the streams of a token differ by only a few percent, as in a trained model.
    pub near_equal: bool,
    /// Which kernels run.
    pub implementation: Implementation,
    /// The streams, and the distribution of dout.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcHeadCase {
    let (norm_eps, hc_eps, logits, near_equal, data) = (1e-6, 1e-6, 2.0, false, Data::normal(1.0));
    let implementation = Implementation::Portable;
    MhcHeadCase {
        num_tokens,
        hidden_size,
        norm_eps,
        hc_eps,
        logits,
        near_equal,
        implementation,
        data,
    }
}

fn hopper(num_tokens: usize, hidden_size: usize) -> MhcHeadCase {
    MhcHeadCase { implementation: Implementation::Hopper, ..plain(num_tokens, hidden_size) }
}

/// The kernels that a launcher selects by default for rows of whole 16-byte accesses.
fn fastest(environment: &Environment, hidden_size: usize) -> Implementation {
    let takes = hidden_size.is_multiple_of(8) && hidden_size <= launcher::MOST_HOPPER_CHANNELS;
    if takes { Implementation::fastest_on(environment) } else { Implementation::Portable }
}

impl MhcHeadCase {
    fn of_oracle(&self, t: &Bound<'_>) -> reference::Numbers {
        reference::Numbers {
            norm_eps: t.scalar("norm_eps", self.norm_eps.into()),
            hc_eps: t.scalar("hc_eps", self.hc_eps.into()),
        }
    }

    fn of_launcher(&self) -> launcher::Numbers {
        let Self { norm_eps, hc_eps, .. } = *self;
        launcher::Numbers { norm_eps, hc_eps }
    }

    fn channels(&self) -> usize {
        NUM_STREAMS * self.hidden_size
    }
}

impl Operator for MhcHead {
    type Case = MhcHeadCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "mhc_head",
        family: Family::Streams,
        summary: "out = sigmoid(projection) · streams: the residual streams collapsed in front of the final norm",
        specification: &["inference 2.5", "training 11.1"],
        paths: &[
            "mhc_head_project",
            "mhc_head_project_few",
            "mhc_head_project_scalar",
            "mhc_head_mix_vector",
            "mhc_head_mix_scalar",
            "mhc_head_backward_coefficients_vector",
            "mhc_head_backward_coefficients_scalar",
            "mhc_head_backward_streams_wide",
            "mhc_head_backward_streams_scalar",
            "mhc_head_backward_sums",
            "mhc_head_backward_parameters",
            "mhc_head_hopper_1024",
            "mhc_head_hopper_4096",
            "mhc_head_hopper_7168",
            "mhc_head_backward_hopper_1024",
            "mhc_head_backward_hopper_4096",
            "mhc_head_backward_hopper_7168",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "other numbers of streams than 4",
        "the model has 4 streams, and its kernels hold them in registers",
    )];

    const GOLDEN: &'static [&'static str] = &["hc_head"];

    fn tensors(c: &MhcHeadCase) -> Specs {
        let (tokens, streams) =
            (axis("num_tokens", c.num_tokens), axis("num_streams", NUM_STREAMS));
        let hopper = c.implementation == Implementation::Hopper;
        let (multiple, most) = if hopper {
            (8, launcher::MOST_HOPPER_CHANNELS)
        } else {
            (1, i32::MAX as usize / NUM_STREAMS)
        };
        let channels = axis("hidden_size", c.hidden_size).multiples(multiple, most);
        let (columns, groups) = (axis("num_columns", NUM_STREAMS), axis("num_groups", 1));
        let [weights, scale, base] =
            site::parameters([columns, streams, channels], groups, c.channels(), c.logits);
        let [dfn, dscale, dbase] = site::gradients();
        let rows = |tensor: TensorSpec| if hopper { tensor.aligned_rows() } else { tensor.rows() };
        let tensors = [
            rows(input("streams", DType::Bf16, &[tokens, streams, channels]).drawn_as(c.data)),
            weights,
            scale,
            base,
            rows(output("out", DType::Bf16, &[tokens, channels])),
            output("mix", DType::F32, &[tokens, columns]),
            output("rstd", DType::F32, &[tokens]),
            upstream("dout", "out").drawn(c.data.distribution, 1.0),
            rows(gradient("dstreams", "streams", DType::Bf16)),
            dfn,
            dscale,
            dbase,
        ];
        let specs = Specs::new(c.data.seed, tensors);
        site::with_numbers(specs, c.norm_eps, c.hc_eps, c.logits)
    }

    fn cannot_run(c: &MhcHeadCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &MhcHeadCase, environment: &Environment) -> MhcHeadCase {
        MhcHeadCase { implementation: fastest(environment, c.hidden_size), ..c.clone() }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcHeadCase> {
        let extents = matrix(profile.of([[12, 300], [40, 1100], [300, 7168]]));
        let eps = site::eps();
        let near_equal = site::nearness();
        let logits = select(vec![0.5f32, 4.0, 20.0]);
        (extents, eps, logits, near_equal, implementations(), Data::strategy(-8..=8))
            .prop_map(
                |(
                    [num_tokens, width],
                    (norm_eps, hc_eps),
                    logits,
                    near_equal,
                    implementation,
                    data,
                )| {
                    let case = plain(num_tokens, fitting(implementation, width));
                    MhcHeadCase {
                        norm_eps,
                        hc_eps,
                        logits,
                        near_equal,
                        implementation,
                        data,
                        ..case
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MhcHeadCase> {
        // 16 bytes at a time, and one element.
        vec![plain(5, 16), plain(3, 5).with(|case| case.hc_eps = 1e-2), hopper(5, 16)]
    }

    fn edge_cases(profile: Profile) -> Vec<MhcHeadCase> {
        let mut cases = vec![
            plain(0, 16),
            plain(1, 8),
            plain(1, 1),
            // Not a multiple of a step of 64 channels.
            plain(2, 24),
            plain(3, 40).with(|case| case.near_equal = true),
            plain(9, 16).with(|case| case.logits = 80.0),
            // Tokens of a second warp, and of a second block.
            plain(17, 8),
            plain(130, 8),
            // Channels in several parts; one vector more than a block of the mix takes of a row.
            plain(2, 520),
            plain(1, 1032),
            // More channels of one lane than a step of its sum of squares, one at a time.
            plain(2, 515),
            // Few tokens, so that one block of the projection has all of them. As many as it holds,
            // with more channels than it takes at a time.
            plain(4, 1160),
            // More tokens, of more steps than there are stages.
            plain(6, 1160),
            // More tokens than a block of the backward holds, in two parts.
            plain(70, 10),
            hopper(0, 16),
            // One block of a cluster has channels; the others have none.
            hopper(1, 8),
            // A batch less a token, and one more; the last blocks have fewer channels, and none.
            hopper(3, 72),
            hopper(5, 72),
            // A last block with one piece of 16 bytes; a warp without a token's last channels.
            hopper(2, 1032),
            hopper(4, 520).with(|case| {
                case.near_equal = true;
                case.logits = 80.0;
            }),
            // As many batches as the ring has slots, and one more.
            hopper(12, 16),
            hopper(14, 16),
            // Two clusters, the last with one token; several with more than twice as many batches
            // as ring slots.
            hopper(17, 40),
            hopper(200, 40),
            // More batches than ring slots, in blocks of several warps: one warp may still read
            // what another overwrites.
            hopper(16, 1544),
            // The widest shape that a block supports.
            hopper(1, 7168),
        ];
        if profile == Profile::Full {
            cases.extend([hopper(64, 4096), hopper(200, 7168), hopper(1025, 64), hopper(33, 2056)]);
            cases.extend([plain(64, 4096), plain(200, 7168), plain(1025, 64)]);
        }
        cases
    }

    fn amend(c: &MhcHeadCase, tensors: &mut Tensors) -> OracleResult<()> {
        site::amend(c.near_equal, c.hidden_size, tensors);
        Ok(())
    }

    fn forward(c: &MhcHeadCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, c.of_oracle(t), rounding)
    }

    fn backward(c: &MhcHeadCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, c.of_oracle(t), rounding)
    }

    fn workspaces(
        c: &MhcHeadCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let forward = launcher::forward_workspace_bytes(device, c.num_tokens, c.hidden_size);
        Ok(vec![(
            "workspace",
            forward.max(launcher::backward_workspace_bytes(device, c.num_tokens, c.hidden_size)),
        )])
    }

    fn launch(c: &MhcHeadCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let own = v.only(&["streams", "fn", "scale", "base", "out", "mix", "rstd", "workspace"]);
        run.launch(|device| {
            launcher::forward(device, &own, c.of_launcher(), c.implementation.launcher())
        })
    }

    fn launch_backward(
        c: &MhcHeadCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::backward(
                device,
                &v.without(&["out"]),
                c.of_launcher(),
                c.implementation.launcher(),
            )
        })
    }

    fn invariant(_: &MhcHeadCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn laws(_: &MhcHeadCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
    }

    fn bends_over(c: &MhcHeadCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        Some(coefficients_bend_over(tensors, f64::from(c.norm_eps), c.channels(), input))
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MhcHeadCase>>, String> {
        let (streams, channels) = (["..tokens", "streams", "hidden"], ["..tokens", "hidden"]);
        let x = file.floats("in.streams", &streams)?.to_vec();
        let hidden_size = file.extent("hidden")?;
        let case = MhcHeadCase {
            norm_eps: file.number("rms_norm_eps")? as f32,
            hc_eps: file.number("hc_eps")? as f32,
            ..plain(x.len() / NUM_STREAMS / hidden_size, hidden_size)
        };
        let golden =
            Golden::new(case).values("streams", x).stored(file, "dout", "gout.y", &channels)?;
        let golden = golden
            .scalar("norm_eps", file.number("rms_norm_eps")?)
            .scalar("hc_eps", file.number("hc_eps")?);
        let golden = golden.stored(file, "fn", "param.hc_head.hc_fn", &["columns", "channels"])?;
        let golden = golden.stored(file, "scale", "param.hc_head.hc_scale", &["groups"])?;
        let golden = golden.stored(file, "base", "param.hc_head.hc_base", &["columns"])?;
        let golden = golden.expect(file, "out", "out.y", &channels)?;
        let golden = golden.expect(file, "dstreams", "grad.in.streams", &streams)?;
        let golden =
            golden.expect(file, "dfn", "grad.param.hc_head.hc_fn", &["columns", "channels"])?;
        let golden = golden.expect(file, "dscale", "grad.param.hc_head.hc_scale", &["groups"])?;
        Ok(vec![golden.expect(file, "dbase", "grad.param.hc_head.hc_base", &["columns"])?])
    }

    /// The streams of both models.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu =
            [(4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168), (1, 7168), (128, 7168)];
        let extents = if on_gpu(environment) { &gpu[..] } else { &[(6, 64)] };
        let benchmark = |&(num_tokens, hidden_size): &(usize, usize), (direction, flops)| {
            let name = format!("{num_tokens}x4x{hidden_size} bf16");
            let implementation = fastest(environment, hidden_size);
            let case = MhcHeadCase { implementation, ..plain(num_tokens, hidden_size) };
            Benchmark::new(direction, name, case, "num_tokens").streaming(&["mix", "rstd"], flops)
        };
        // For each element of the streams four products and sums, its square, and its part of out.
        // Twice as many in the backward.
        let both = [(Forward, 12.0), (Backward, 24.0)];
        extents
            .iter()
            .flat_map(|extents| both.map(|direction| benchmark(extents, direction)))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["4096x4x7168 bf16"],
            json!({"num_tokens": 11, "hidden_size": 72}),
            json!({"num_tokens": 2}),
        )]
    }
}
