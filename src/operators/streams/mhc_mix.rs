//! `mhc_mix` (inference 2.1 and 2.2, training 11.1): `kernels/cuda/streams/mhc_mix.cu`,
//! `mhc_mix_hopper.cu`, `mhc_mix_backward.cu` and `mhc_mix_hopper_backward.cu` against
//! `reference/src/streams/mhc_mix.rs`.

use dsv4_kernels::streams::mhc_mix::{self as launcher, NUM_COLUMNS};
use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_reference::streams::mhc_mix as reference;
use dsv4_runtime::Device;

use crate::operator::declaration::TensorSpec;
use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::streams::site;

/// The operator.
pub struct MhcMix;

/// A case: sizes, values, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcMixCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of a stream.
    pub hidden_size: usize,
    /// Iterations of the Sinkhorn normalisation, 1 to 48.
    pub sinkhorn_iters: usize,
    /// Added to the mean square of a token.
    pub norm_eps: f32,
    /// Added to pre, after the softmax, and to each sum that the Sinkhorn iteration divides by.
    pub hc_eps: f32,
    /// `base` is uniform between this and its negative: the spread of the logits.
    pub logits: f32,
    /// Whether the streams of a token differ by only a few percent, as in a trained model.
    pub near_equal: bool,
    /// Whether `fn` holds values of TF32. Kernels may multiply in it (inference 2.1); ours do not,
    /// and are judged with any `fn`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fn_tf32: bool,
    /// Which kernels run the projection and the gradient of the streams.
    pub implementation: Implementation,
    /// The streams.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcMixCase {
    let (sinkhorn_iters, norm_eps, hc_eps, logits) = (20, 1e-6, 1e-6, 2.0);
    let (near_equal, implementation, data) = (false, Implementation::Portable, Data::normal(1.0));
    MhcMixCase {
        num_tokens,
        hidden_size,
        sinkhorn_iters,
        norm_eps,
        hc_eps,
        logits,
        near_equal,
        fn_tf32: false,
        implementation,
        data,
    }
}

fn hopper(num_tokens: usize, hidden_size: usize) -> MhcMixCase {
    MhcMixCase { implementation: Implementation::Hopper, ..plain(num_tokens, hidden_size) }
}

impl MhcMixCase {
    fn of_launcher(&self) -> launcher::Numbers {
        let Self { sinkhorn_iters, norm_eps, hc_eps, .. } = *self;
        launcher::Numbers { sinkhorn_iters, norm_eps, hc_eps }
    }

    fn channels(&self) -> usize {
        NUM_STREAMS * self.hidden_size
    }
}

/// The fp32 number without the 13 bits of its fraction that TF32 lacks.
fn tf32(x: f64) -> f64 {
    f32::from_bits((x as f32).to_bits() & !0x1fff).into()
}

/// The oracle's arguments of a call: hc_eps and norm_eps bound as the case's scalars.
pub(crate) fn of_oracle(numbers: launcher::Numbers, t: &Bound<'_>) -> reference::Numbers {
    let launcher::Numbers { sinkhorn_iters, norm_eps, hc_eps } = numbers;
    reference::Numbers {
        sinkhorn_iters,
        norm_eps: t.scalar("norm_eps", norm_eps.into()),
        hc_eps: t.scalar("hc_eps", hc_eps.into()),
    }
}

impl Operator for MhcMix {
    type Case = MhcMixCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "mhc_mix",
        family: Family::Streams,
        summary: "pre, post and comb of the residual streams: projection, sigmoids, Sinkhorn iteration",
        specification: &["inference 2.1", "inference 2.2", "training 11.1"],
        paths: &[
            "mhc_mix_project",
            "mhc_mix_project_at_once",
            "mhc_mix_project_few",
            "mhc_mix_project_hopper",
            "mhc_mix_project_scalar",
            "mhc_mix_coefficients",
            "mhc_mix_coefficients_few",
            "mhc_mix_backward_coefficients",
            "mhc_mix_backward_streams_hopper",
            "mhc_mix_backward_streams_wide",
            "mhc_mix_backward_streams_scalar",
            "mhc_mix_backward_sums",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "other numbers of streams than 4",
        "the model has 4 streams, and Sinkhorn runs on 4 by 4 values",
    )];

    const GOLDEN: &'static [&'static str] = &["hc"];

    fn tensors(c: &MhcMixCase) -> Specs {
        let (tokens, streams) =
            (axis("num_tokens", c.num_tokens), axis("num_streams", NUM_STREAMS));
        let hopper = c.implementation == Implementation::Hopper;
        let multiple = if hopper { 8 } else { 1 };
        let channels =
            axis("hidden_size", c.hidden_size).multiples(multiple, i32::MAX as usize / NUM_STREAMS);
        let (columns, groups) = (axis("num_columns", NUM_COLUMNS), axis("num_groups", 3));
        let matrix = [tokens, axis("source", NUM_STREAMS), axis("destination", NUM_STREAMS)];
        let [weights, scale, base] =
            site::parameters([columns, streams, channels], groups, c.channels(), c.logits);
        let [dfn, dscale, dbase] = site::gradients();
        let of_tokens =
            input("streams", DType::Bf16, &[tokens, streams, channels]).drawn_as(c.data);
        let rows = |tensor: TensorSpec| if hopper { tensor.aligned_rows() } else { tensor.rows() };
        let tensors = [
            rows(of_tokens),
            weights,
            scale,
            base,
            output("pre", DType::F32, &[tokens, streams]),
            output("post", DType::F32, &[tokens, streams]),
            output("comb", DType::F32, &matrix),
            output("mix", DType::F32, &[tokens, columns]),
            output("rstd", DType::F32, &[tokens]),
            upstream("dpre", "pre"),
            upstream("dpost", "post"),
            upstream("dcomb", "comb"),
            rows(gradient("dstreams", "streams", DType::Bf16)),
            dfn,
            dscale,
            dbase,
        ];
        let specs = Specs::new(c.data.seed, tensors);
        site::with_numbers(specs, c.norm_eps, c.hc_eps, c.logits)
    }

    fn check(c: &MhcMixCase) -> Result<(), Refused> {
        check_iterations(c.sinkhorn_iters)
    }

    fn cannot_run(c: &MhcMixCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &MhcMixCase, environment: &Environment) -> MhcMixCase {
        MhcMixCase {
            implementation: fastest_projection(environment, c.num_tokens, c.hidden_size),
            ..c.clone()
        }
    }

    fn invariantly(c: &MhcMixCase, environment: &Environment) -> MhcMixCase {
        let implementation = invariant_projection(environment, c.hidden_size);
        MhcMixCase { implementation, ..c.clone() }
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcMixCase> {
        let extents = matrix(profile.of([[12, 300], [40, 1100], [300, 7168]]));
        let iterations = site::iterations();
        let eps = site::eps();
        let near_equal = site::nearness();
        let logits = select(vec![0.5f32, 4.0, 20.0, 80.0]);
        let fn_tf32 = prop_oneof![3 => Just(false), 1 => Just(true)];
        let data = (implementations(), fn_tf32, Data::strategy(-8..=8));
        (extents, iterations, eps, logits, near_equal, data)
            .prop_map(
                |(
                    [num_tokens, width],
                    sinkhorn_iters,
                    eps,
                    logits,
                    near_equal,
                    (implementation, fn_tf32, data),
                )| {
                    let (hidden_size, (norm_eps, hc_eps)) = (fitting(implementation, width), eps);
                    let case = plain(num_tokens, hidden_size);
                    MhcMixCase {
                        sinkhorn_iters,
                        norm_eps,
                        hc_eps,
                        logits,
                        near_equal,
                        fn_tf32,
                        implementation,
                        data,
                        ..case
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MhcMixCase> {
        // 16 bytes at a time, and one element.
        vec![
            plain(5, 16),
            plain(3, 5).with(|case| {
                case.sinkhorn_iters = 3;
                case.hc_eps = 1e-2;
            }),
            hopper(5, 16),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<MhcMixCase> {
        let mut cases = vec![
            plain(0, 16),
            plain(0, 5),
            plain(1, 8),
            plain(1, 1),
            // Not a multiple of a step of 64 channels: one ends within a stream.
            plain(2, 24),
            plain(3, 40).with(|case| case.near_equal = true),
            plain(9, 16).with(|case| case.logits = 80.0),
            plain(2, 16).with(|case| case.sinkhorn_iters = 1),
            plain(2, 16).with(|case| {
                case.sinkhorn_iters = 48;
                case.logits = 8.0;
            }),
            // Tokens of a second warp, and of a second block.
            plain(17, 8),
            plain(130, 8),
            // Channels in several parts of different lengths.
            plain(2, 520),
            // Few tokens, so that one block has all of them: one, as many as it holds, with more
            // channels than it takes at a time.
            plain(1, 1160),
            plain(4, 1160),
            // More tokens, of more steps than there are stages.
            plain(6, 1160),
            // The iteration by single lanes: one pass, and an eps that its shorter reciprocal does
            // not support.
            plain(2, 520).with(|case| case.sinkhorn_iters = 1),
            plain(2, 520).with(|case| case.hc_eps = 2.0),
            // More tokens than a block of the backward holds, in two parts.
            plain(70, 10),
            // Backward values that are too large to be split, for all tokens of a round and of the
            // next one. They exceed the limit by far, because bits follow the scale of the
            // gradients near it.
            plain(70, 16).with(|case| {
                case.norm_eps = 1e-35;
                case.data = Data::normal(1e-16);
            }),
            // More blocks of tokens than blocks of the coefficients.
            plain(200, 2),
            hopper(0, 16),
            hopper(1, 8),
            // More steps than stages of streams, and of weights; each stream ends within a step.
            hopper(2, 520),
            // Tokens of a second row of a lane, of another warp, of the last warpgroup, and of a
            // second block.
            hopper(9, 72),
            hopper(17, 8),
            hopper(200, 40).with(|case| case.near_equal = true),
            hopper(260, 8),
            hopper(3, 64).with(|case| case.fn_tf32 = true),
            // A whole block of tokens and a second one, each with more steps than stages. The
            // backward takes three blocks of channels.
            hopper(260, 136),
            // Rounds of tokens in the backward: more in a part than stages, and two with values too
            // large to be split.
            hopper(1345, 8),
            hopper(330, 16).with(|case| {
                case.norm_eps = 1e-35;
                case.data = Data::normal(1e-16);
            }),
        ];
        if profile == Profile::Full {
            cases.extend([hopper(64, 4096), hopper(200, 7168), hopper(1025, 64), hopper(2048, 8)]);
            cases.extend([plain(64, 4096), plain(200, 7168), plain(1025, 64), plain(2048, 8)]);
            // More tokens in each part than a block of the backward has slots.
            cases.push(plain(5300, 8));
            // More tokens, and more groups of channels, than an invariant path gives a part each.
            cases.push(hopper(1030, 576));
        }
        cases
    }

    fn amend(c: &MhcMixCase, tensors: &mut Tensors) -> OracleResult<()> {
        site::amend(c.near_equal, c.hidden_size, tensors);
        if c.fn_tf32 {
            tensors.edit("fn", |x| x.iter_mut().for_each(|x| *x = tf32(*x)));
        }
        Ok(())
    }

    fn forward(c: &MhcMixCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, of_oracle(c.of_launcher(), t), rounding)
    }

    fn backward(c: &MhcMixCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, of_oracle(c.of_launcher(), t), rounding)
    }

    fn workspaces(
        c: &MhcMixCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let forward = launcher::forward_workspace_bytes(device, c.num_tokens, c.hidden_size);
        Ok(vec![(
            "workspace",
            forward.max(launcher::backward_workspace_bytes(device, c.num_tokens, c.hidden_size)),
        )])
    }

    fn launch(c: &MhcMixCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let given = ["streams", "fn", "scale", "base"];
        let written = ["pre", "post", "comb", "mix", "rstd", "workspace"];
        let own = v.only(&[&given[..], &written].concat());
        run.launch(|device| {
            launcher::forward(device, &own, c.of_launcher(), c.implementation.launcher())
        })
    }

    fn launch_backward(
        c: &MhcMixCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let own = v.without(&["pre", "post", "comb"]);
        run.launch(|device| {
            launcher::backward(device, &own, c.of_launcher(), c.implementation.launcher())
        })
    }

    fn invariant(_: &MhcMixCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn laws(_: &MhcMixCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
    }

    fn bends_over(c: &MhcMixCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        Some(coefficients_bend_over(tensors, f64::from(c.norm_eps), c.channels(), input))
    }

    /// The gradient of pre is computed from that of the collapsed streams and rounded to f32.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MhcMixCase>>, String> {
        let (streams, gates) = (["..tokens", "streams", "hidden"], ["..tokens", "streams"]);
        let (x, dh) = (
            file.floats("in.streams", &streams)?,
            file.floats("gout.collapsed", &["..tokens", "hidden"])?,
        );
        let hidden_size = file.extent("hidden")?;
        let num_tokens = dh.len() / hidden_size;
        let of_stream = |(number, x): (usize, &[f64])| -> f64 {
            let token = number / NUM_STREAMS;
            x.iter().zip(&dh[token * hidden_size..]).map(|(x, dh)| x * dh).sum()
        };
        let dpre = x.chunks(hidden_size).enumerate().map(of_stream).collect();
        let case = MhcMixCase {
            sinkhorn_iters: file.whole("sinkhorn_iters")?,
            norm_eps: file.number("rms_norm_eps")? as f32,
            hc_eps: file.number("hc_eps")? as f32,
            ..plain(num_tokens, hidden_size)
        };
        let golden = Golden::new(case).values("streams", x.to_vec()).values("dpre", dpre);
        let golden = golden
            .scalar("norm_eps", file.number("rms_norm_eps")?)
            .scalar("hc_eps", file.number("hc_eps")?);
        let golden = golden.stored(file, "fn", "param.attn_hc.fn", &["columns", "channels"])?;
        let golden = golden.stored(file, "scale", "param.attn_hc.scale", &["groups"])?;
        let golden = golden.stored(file, "base", "param.attn_hc.base", &["columns"])?;
        let golden = golden.stored(file, "dpost", "gout.post", &gates)?;
        let matrix = ["..tokens", "streams", "destinations"];
        let golden = golden.stored(file, "dcomb", "gout.comb", &matrix)?;
        let golden = golden
            .expect(file, "post", "out.post", &gates)?
            .expect(file, "comb", "out.comb", &matrix)?;
        let golden = golden.expect(file, "mix", "mid.mixes", &["..tokens", "columns"])?;
        let golden =
            golden.expect(file, "dfn", "grad.param.attn_hc.fn", &["columns", "channels"])?;
        let golden = golden.expect(file, "dscale", "grad.param.attn_hc.scale", &["groups"])?;
        Ok(vec![
            golden
                .expect(file, "dbase", "grad.param.attn_hc.base", &["columns"])?
                .computed_in_f32(),
        ])
    }

    /// The streams of both models.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu =
            [(8192, 4096), (8192, 7168), (32768, 4096), (32768, 7168), (1, 7168), (128, 7168)];
        let extents = if on_gpu(environment) { &gpu[..] } else { &[(6, 64)] };
        let benchmark = |&(num_tokens, hidden_size): &(usize, usize), (direction, flops)| {
            let name = format!("{num_tokens}x4x{hidden_size} bf16");
            let implementation = fastest_projection(environment, num_tokens, hidden_size);
            let case = MhcMixCase { implementation, ..plain(num_tokens, hidden_size) };
            Benchmark::new(direction, name, case, "num_tokens").streaming(&["mix", "rstd"], flops)
        };
        // For each element of the streams 24 products and sums, and its square. Twice as many in
        // the backward.
        let both = [(Forward, 50.0), (Backward, 98.0)];
        extents
            .iter()
            .flat_map(|extents| both.map(|direction| benchmark(extents, direction)))
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["8192x4x4096 bf16"],
            json!({"num_tokens": 11, "hidden_size": 72}),
            json!({"num_tokens": 2}),
        )]
    }
}

/// The projection kernels. Those for Hopper need whole accesses of 16 bytes (`fitting`).
pub(crate) fn implementations() -> impl Strategy<Value = Implementation> {
    select(vec![Implementation::Portable, Implementation::Hopper])
}

/// Channels near the limits of the kernels.
pub(crate) fn fitting(implementation: Implementation, channels: usize) -> usize {
    if implementation == Implementation::Hopper { channels.next_multiple_of(8) } else { channels }
}

/// The kernels that a launcher selects by default for streams of whole 16-byte accesses.
pub(crate) fn fastest_projection(
    environment: &Environment,
    num_tokens: usize,
    hidden_size: usize,
) -> Implementation {
    let takes = num_tokens > launcher::FEW_TOKENS && hidden_size.is_multiple_of(8);
    if takes { Implementation::fastest_on(environment) } else { Implementation::Portable }
}

/// Those of an invariant path: it has one projection for any number of tokens.
pub(crate) fn invariant_projection(
    environment: &Environment,
    hidden_size: usize,
) -> Implementation {
    fastest_projection(environment, usize::MAX, hidden_size)
}

/// Requires a case's number of Sinkhorn iterations to be one that the launcher accepts.
pub(crate) fn check_iterations(sinkhorn_iters: usize) -> Result<(), Refused> {
    if !(1..=launcher::MAX_ITERATIONS).contains(&sinkhorn_iters) {
        let reason = format!("{sinkhorn_iters} must be 1 to {}", launcher::MAX_ITERATIONS);
        return refuse("sinkhorn_iters", reason);
    }
    Ok(())
}

/// How far each element of an input of coefficients may move. Sigmoids and softmax bend over a
/// logit of 1, and a token over its own root mean square.
pub(crate) fn coefficients_bend_over(
    tensors: &Tensors,
    norm_eps: f64,
    channels: usize,
    input: &str,
) -> Vec<f64> {
    let scale =
        tensors.values("scale").into_iter().fold(1.0, |scale: f64, own| scale.max(own.abs()));
    let eps = tensors.scalar("norm_eps", norm_eps);
    let size = |v: &[f64]| (v.iter().map(|v| v * v).sum::<f64>() / channels as f64 + eps).sqrt();
    let all = |distance: f64| vec![distance; tensors.values(input).len()];
    match input {
        "streams" => {
            let of_token = |v: &[f64]| vec![size(v) / scale; v.len()];
            tensors.values("streams").chunks(channels).flat_map(of_token).collect()
        }
        "fn" => all(0.25 / scale),
        "scale" => all(0.25),
        _ => all(1.0),
    }
}
