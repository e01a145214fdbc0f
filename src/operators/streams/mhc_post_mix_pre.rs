//! `mhc_post_mix_pre` (inference 2.1 to 2.4, training 11.1):
//! `kernels/cuda/streams/mhc_post_mix_pre.cu`, `mhc_post_mix_pre_hopper.cu` and
//! `mhc_post_mix_pre_backward.cu` against `reference/src/streams/mhc_post_mix_pre.rs`.

use dsv4_kernels::streams::mhc_mix::NUM_COLUMNS;
use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_kernels::streams::mhc_post_mix_pre as launcher;
use dsv4_reference::streams::mhc_post_mix_pre as reference;
use dsv4_runtime::Device;

use crate::operator::fields::Implementation;
use crate::operator::prelude::*;
use crate::operators::streams::mhc_mix::{
    coefficients_bend_over, fastest_projection, fitting, implementations, invariant_projection,
    of_oracle as numbers_of_oracle,
};
use crate::operators::streams::site;

/// The operator.
pub struct MhcPostMixPre;

/// A case: sizes, values, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcPostMixPreCase {
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
    /// Where the new streams are stored.
    pub aliasing: Aliasing,
    /// Whether the forward uses the launchers of `mhc_post`, `mhc_mix` and `mhc_pre` instead. The
    /// fusion is compared with them and timed next to them.
    pub separate: bool,
    /// The forward's kernels. Those for Hopper take 16 bytes at a time.
    pub implementation: Implementation,
    /// Whether the streams of a token differ by only a few percent, as in a trained model.
    pub near_equal: bool,
    /// The streams and the sublayer's output.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcPostMixPreCase {
    MhcPostMixPreCase {
        num_tokens,
        hidden_size,
        sinkhorn_iters: 20,
        norm_eps: 1e-6,
        hc_eps: 1e-6,
        logits: 2.0,
        aliasing: Aliasing::OutOfPlace,
        separate: false,
        implementation: Implementation::Portable,
        near_equal: false,
        data: Data::normal(1.0),
    }
}

fn hopper(num_tokens: usize, hidden_size: usize) -> MhcPostMixPreCase {
    MhcPostMixPreCase { implementation: Implementation::Hopper, ..plain(num_tokens, hidden_size) }
}

/// Streams so small that one of four values rstd dmix is far beyond 2^40. Near that limit, bits
/// follow the scale of the gradients.
fn tiny(num_tokens: usize, hidden_size: usize) -> MhcPostMixPreCase {
    MhcPostMixPreCase {
        norm_eps: 1e-35,
        data: Data::normal(1e-16),
        ..plain(num_tokens, hidden_size)
    }
}

impl MhcPostMixPreCase {
    fn of_launcher(&self) -> dsv4_kernels::streams::mhc_mix::Numbers {
        let Self { sinkhorn_iters, norm_eps, hc_eps, .. } = *self;
        dsv4_kernels::streams::mhc_mix::Numbers { sinkhorn_iters, norm_eps, hc_eps }
    }

    fn channels(&self) -> usize {
        NUM_STREAMS * self.hidden_size
    }
}

const PARAMETERS: [&str; 3] = ["fn", "scale", "base"];
/// What the forward writes.
const WRITTEN: [&str; 7] = ["out", "next_pre", "next_post", "next_comb", "mix", "rstd", "h"];

impl Operator for MhcPostMixPre {
    type Case = MhcPostMixPreCase;
    const SUM_LANES: usize = 4;

    const ABOUT: About = About {
        name: "mhc_post_mix_pre",
        family: Family::Streams,
        summary: "the residual streams behind a sublayer, and of them the next site's coefficients and h = pre · streams",
        specification: &[
            "inference 2.1",
            "inference 2.2",
            "inference 2.3",
            "inference 2.4",
            "training 11.1",
        ],
        paths: &[
            "mhc_post_mix_pre_project",
            "mhc_post_mix_pre_project_few",
            "mhc_post_mix_pre_project_hopper",
            "mhc_post_mix_pre_mix",
            "mhc_post_forward_vector",
            "mhc_post_forward_scalar",
            "mhc_mix_project",
            "mhc_mix_project_at_once",
            "mhc_mix_project_few",
            "mhc_mix_project_hopper",
            "mhc_mix_project_scalar",
            "mhc_mix_coefficients",
            "mhc_mix_coefficients_few",
            "mhc_pre_forward_vector",
            "mhc_pre_forward_scalar",
            "mhc_post_mix_pre_dpre_vector",
            "mhc_post_mix_pre_dpre_scalar",
            "mhc_mix_backward_coefficients",
            "mhc_post_mix_pre_total_wide",
            "mhc_post_mix_pre_total_scalar",
            "mhc_mix_backward_sums",
            "mhc_post_backward_vector",
            "mhc_post_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 80],
    };

    fn tensors(c: &MhcPostMixPreCase) -> Specs {
        let tokens = axis("num_tokens", c.num_tokens);
        let (source, destination) = (axis("source", NUM_STREAMS), axis("destination", NUM_STREAMS));
        let hopper = c.implementation == Implementation::Hopper;
        let multiple = if hopper { 8 } else { 1 };
        let channels =
            axis("hidden_size", c.hidden_size).multiples(multiple, i32::MAX as usize / NUM_STREAMS);
        let (columns, groups) = (axis("num_columns", NUM_COLUMNS), axis("num_groups", 3));
        let (gates, matrix) = ([tokens, destination], [tokens, source, destination]);
        let [weights, scale, base] =
            site::parameters([columns, destination, channels], groups, c.channels(), c.logits);
        let [dfn, dscale, dbase] = site::gradients();
        let normal =
            |name, axes: &[_]| input(name, DType::F32, axes).drawn(Distribution::Normal, 1.0);
        let [streams, y, out] = [
            input("streams", DType::Bf16, &[tokens, source, channels]).drawn_as(c.data),
            input("y", DType::Bf16, &[tokens, channels]).drawn_as(c.data),
            output("out", DType::Bf16, &[tokens, destination, channels])
                .placed(c.aliasing, "streams"),
        ]
        .map(|rows| if hopper { rows.aligned_rows() } else { rows.rows() });
        let tensors = [
            streams,
            y,
            normal("post", &gates),
            normal("comb", &matrix),
            weights,
            scale,
            base,
            out,
            output("next_pre", DType::F32, &gates),
            output("next_post", DType::F32, &gates),
            output("next_comb", DType::F32, &matrix),
            output("mix", DType::F32, &[tokens, columns]),
            output("rstd", DType::F32, &[tokens]),
            output("h", DType::Bf16, &[tokens, channels]).rows(),
            upstream("dout", "out").rows(),
            upstream("dh", "h"),
            upstream("dnext_post", "next_post"),
            upstream("dnext_comb", "next_comb"),
            gradient("dout_total", "out", DType::Bf16).rows(),
            gradient("dstreams", "streams", DType::Bf16).rows(),
            gradient("dy", "y", DType::Bf16).rows(),
            gradient("dpost", "post", DType::F32),
            gradient("dcomb", "comb", DType::F32),
            dfn,
            dscale,
            dbase,
        ];
        let specs = Specs::new(c.data.seed, tensors);
        site::with_numbers(specs, c.norm_eps, c.hc_eps, c.logits)
    }

    fn check(c: &MhcPostMixPreCase) -> Result<(), Refused> {
        crate::operators::streams::mhc_mix::check_iterations(c.sinkhorn_iters)
    }

    fn cannot_run(c: &MhcPostMixPreCase, environment: &Environment) -> Option<String> {
        c.implementation.launcher().cannot_run_on(environment)
    }

    fn fastest(c: &MhcPostMixPreCase, environment: &Environment) -> MhcPostMixPreCase {
        MhcPostMixPreCase {
            implementation: fastest_projection(environment, c.num_tokens, c.hidden_size),
            ..c.clone()
        }
    }

    fn invariantly(c: &MhcPostMixPreCase, environment: &Environment) -> MhcPostMixPreCase {
        let implementation = invariant_projection(environment, c.hidden_size);
        MhcPostMixPreCase { implementation, ..c.clone() }
    }

    /// The products of all pairs of streams, several times.
    fn oracle_elements(c: &MhcPostMixPreCase) -> u128 {
        4 * (NUM_STREAMS * (NUM_STREAMS + 1)) as u128 * c.num_tokens as u128 * c.hidden_size as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcPostMixPreCase> {
        let extents = matrix(profile.of([[10, 300], [30, 1100], [200, 7168]]));
        let iterations = site::iterations();
        let eps = site::eps();
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let choices = (prop_oneof![3 => Just(false), 1 => Just(true)], site::nearness());
        let logits = select(vec![0.5f32, 4.0, 20.0, 80.0]);
        let data = (implementations(), Data::strategy(-8..=8));
        (extents, iterations, eps, logits, aliasing, choices, data)
            .prop_map(
                |(
                    [num_tokens, width],
                    sinkhorn_iters,
                    (norm_eps, hc_eps),
                    logits,
                    aliasing,
                    (separate, near_equal),
                    (implementation, data),
                )| {
                    let case = plain(num_tokens, fitting(implementation, width));
                    let numbers =
                        MhcPostMixPreCase { sinkhorn_iters, norm_eps, hc_eps, logits, ..case };
                    MhcPostMixPreCase {
                        aliasing,
                        separate,
                        implementation,
                        near_equal,
                        data,
                        ..numbers
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<MhcPostMixPreCase> {
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

    fn edge_cases(profile: Profile) -> Vec<MhcPostMixPreCase> {
        let placed = |aliasing| move |case| MhcPostMixPreCase { aliasing, ..case };
        let separate = |case| MhcPostMixPreCase { separate: true, ..case };
        let mut cases = vec![
            plain(0, 16),
            plain(0, 5),
            plain(1, 1),
            // Not a multiple of a step.
            plain(2, 24),
            plain(3, 72).then(placed(Aliasing::InPlace)),
            plain(3, 5).then(placed(Aliasing::InPlace)),
            plain(3, 40).then(placed(Aliasing::Interleaved)),
            plain(3, 40).with(|case| case.near_equal = true),
            plain(9, 16).with(|case| case.logits = 80.0),
            plain(2, 16).with(|case| case.sinkhorn_iters = 1),
            // An eps with which sums are no numbers that an approximation takes.
            plain(3, 16).with(|case| case.hc_eps = 1.5),
            plain(2, 16).with(|case| {
                case.sinkhorn_iters = 48;
                case.logits = 8.0;
            }),
            plain(3, 16).then(separate),
            // More tokens than the projection for few tokens handles.
            plain(6, 16).then(separate),
            plain(2, 5).then(placed(Aliasing::InPlace)).then(separate),
            // More tokens than a block of the projection has, in parts of one group.
            plain(260, 8).then(separate),
            hopper(0, 16),
            hopper(3, 16).then(separate),
            // Tokens of every warp of both consumers, and of a second round of one; of only one
            // consumer; of a second block.
            hopper(150, 8),
            hopper(40, 24),
            hopper(260, 136),
            // Several groups for each part, with channels after the end of the last one, for
            // consumers with two rounds and with one.
            hopper(150, 520).then(placed(Aliasing::InPlace)),
            hopper(3, 1032),
            hopper(3, 40).then(placed(Aliasing::Interleaved)),
            // Few tokens, with channels in many parts.
            plain(2, 520).then(separate),
            plain(2, 520),
            // More channels than a block has in flight.
            plain(1, 8208),
            plain(5, 840).then(placed(Aliasing::InPlace)),
            // Tokens of a second warp, and of a second block.
            plain(17, 8),
            plain(130, 8),
            // Channels in several parts of different lengths.
            plain(1, 1032),
            // More tokens than a block of the backward holds, in two parts.
            plain(70, 10),
            // Eight blocks of its channels, each in a different order, some with two streams.
            plain(3, 904),
            // Backward values that are too large to be split, for all tokens of a round and of the
            // next one.
            tiny(70, 16),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain(64, 4096),
                plain(200, 7168),
                plain(1025, 64),
                plain(2048, 8),
                hopper(200, 4096),
            ]);
        }
        cases
    }

    fn amend(c: &MhcPostMixPreCase, tensors: &mut Tensors) -> OracleResult<()> {
        site::amend(c.near_equal, c.hidden_size, tensors);
        Ok(())
    }

    fn forward(
        c: &MhcPostMixPreCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(&t.named()?, numbers_of_oracle(c.of_launcher(), t), rounding)
    }

    fn backward(
        c: &MhcPostMixPreCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::backward(&t.named()?, numbers_of_oracle(c.of_launcher(), t), rounding)
    }

    fn workspaces(
        c: &MhcPostMixPreCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let forward = launcher::forward_workspace_bytes(device, c.num_tokens, c.hidden_size);
        Ok(vec![(
            "workspace",
            forward.max(launcher::backward_workspace_bytes(device, c.num_tokens, c.hidden_size)),
        )])
    }

    fn launch(
        c: &MhcPostMixPreCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let given = [&["streams", "y", "post", "comb", "workspace"], &PARAMETERS[..]].concat();
        let own = v.only(&[&given[..], &WRITTEN].concat());
        let forward = if c.separate { launcher::forward_separate } else { launcher::forward };
        run.launch(|device| forward(device, &own, c.of_launcher(), c.implementation.launcher()))
    }

    fn launch_backward(
        c: &MhcPostMixPreCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::backward(
                device,
                &v.without(&["next_post", "next_comb", "h"]),
                c.of_launcher(),
            )
        })
    }

    fn invariant(_: &MhcPostMixPreCase, path: bool) -> &'static [BatchAxis] {
        const ALL: &[BatchAxis] = &[BatchAxis::Company, BatchAxis::Buckets, BatchAxis::Forms];
        if path { ALL } else { &ALL[2..] }
    }

    fn batches(_: &MhcPostMixPreCase, batches: &mut Batches<'_, Self>) {
        batches.of_rows();
        let every: Vec<(usize, usize)> = batches.every("num_tokens");
        let same = WRITTEN.map(|name| Same::along(name, 0, &every)).to_vec();
        batches.run(BatchAxis::Forms, "fused against separate operators", |v| {
            v.case.separate = !v.case.separate;
            same
        });
    }

    fn laws(_: &MhcPostMixPreCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
        let relations = WRITTEN.map(|name| (name, Relation::Times(1.0)));
        laws.law(
            "the separate operators write the same bits",
            |v| v.case.separate = !v.case.separate,
            relations,
        );
    }

    fn bends_over(c: &MhcPostMixPreCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        Some(match input {
            "streams" | "y" | "post" | "comb" => streams_bend_over(c, tensors, input),
            _ => coefficients_bend_over(tensors, f64::from(c.norm_eps), c.channels(), input),
        })
    }

    /// The streams of both models; the separate operators next to the fusion.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu =
            [(4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168), (1, 7168), (128, 7168)];
        let extents = if on_gpu(environment) { &gpu[..] } else { &[(6, 64)] };
        let benchmark = |&(num_tokens, hidden_size): &(usize, usize),
                         (direction, separate, flops)| {
            let name = format!(
                "{num_tokens}x4x{hidden_size} bf16{}",
                if separate { " separate" } else { "" }
            );
            let implementation = fastest_projection(environment, num_tokens, hidden_size);
            let case =
                MhcPostMixPreCase { separate, implementation, ..plain(num_tokens, hidden_size) };
            let benchmark = Benchmark::new(direction, name, case, "num_tokens");
            benchmark.streaming(&["out", "next_pre", "mix", "rstd"], flops)
        };
        // For each element of the streams: 9 operations for the new ones, 50 for the projection, 2
        // for the mix. In the backward 19, 98 and 6.
        let each = [(Forward, false, 61.0), (Forward, true, 61.0), (Backward, false, 123.0)];
        extents.iter().flat_map(|extents| each.map(|call| benchmark(extents, call))).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![
            Reduced::forward(
                &["4096x4x7168 bf16", "4096x4x7168 bf16 separate"],
                json!({"num_tokens": 11, "hidden_size": 72}),
                json!({"num_tokens": 2}),
            ),
            Reduced::backward(
                &["4096x4x7168 bf16"],
                json!({"num_tokens": 11, "hidden_size": 72}),
                json!({"num_tokens": 2}),
            ),
        ]
    }
}

/// How far each input element of the new streams may move. Coefficients bend where the new streams
/// move by their own root mean square.
fn streams_bend_over(c: &MhcPostMixPreCase, tensors: &Tensors, input: &str) -> Vec<f64> {
    let scale =
        tensors.values("scale").into_iter().fold(1.0, |scale: f64, own| scale.max(own.abs()));
    let eps = tensors.scalar("norm_eps", f64::from(c.norm_eps));
    let [streams, y, post, comb] =
        ["streams", "y", "post", "comb"].map(|name| tensors.values(name));
    let largest =
        |numbers: &[f64]| numbers.iter().fold(f64::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    let of_token = |token: usize| -> Vec<f64> {
        let streams = &streams[token * c.channels()..][..c.channels()];
        let y = &y[token * c.hidden_size..][..c.hidden_size];
        let post = &post[token * NUM_STREAMS..][..NUM_STREAMS];
        let comb = &comb[token * NUM_STREAMS * NUM_STREAMS..][..NUM_STREAMS * NUM_STREAMS];
        let out = crate::operators::streams::mhc_post::mixed(streams, y, post, comb, c.hidden_size);
        let size =
            (out.iter().map(|x| x * x).sum::<f64>() / c.channels() as f64 + eps).sqrt() / scale;
        match input {
            "y" => vec![size / largest(post); c.hidden_size],
            "post" => vec![size / largest(y); NUM_STREAMS],
            "comb" => {
                let sources = streams.chunks(c.hidden_size);
                sources.flat_map(|source| [size / largest(source); NUM_STREAMS]).collect()
            }
            _ => comb
                .chunks(NUM_STREAMS)
                .flat_map(|row| vec![size / largest(row); c.hidden_size])
                .collect(),
        }
    };
    (0..c.num_tokens).flat_map(of_token).collect()
}
