//! `mhc_pre` (inference 2.3 and 3, training 11.1 and 11.3): `kernels/cuda/streams/mhc_pre.cu` and
//! `mhc_pre_norm.cu` against `reference/src/streams/mhc_pre.rs`.

use dsv4_kernels::streams::mhc_post::NUM_STREAMS;
use dsv4_kernels::streams::mhc_pre as launcher;
use dsv4_reference::streams::mhc_pre as reference;
use dsv4_runtime::Device;

use crate::operator::format_of;
use crate::operator::prelude::*;

/// The operator.
pub struct MhcPre;

/// A case: sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcPreCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of a stream; with the norm at most 16384.
    pub hidden_size: usize,
    /// Type of the streams, of the sublayer's input, and of their gradients.
    pub dtype: Float,
    /// Whether the norm follows.
    pub norm: bool,
    /// Whether its forward saves rstd. If not, as in inference, a separate forward saves it for the
    /// backward.
    pub saves_rstd: bool,
    /// Added by the norm to the mean square.
    pub eps: f32,
    /// The streams.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcPreCase {
    let (dtype, data) = (Float::Bf16, Data::normal(1.0));
    MhcPreCase { num_tokens, hidden_size, dtype, norm: false, saves_rstd: true, eps: 1e-6, data }
}

fn normed(num_tokens: usize, hidden_size: usize) -> MhcPreCase {
    MhcPreCase { norm: true, ..plain(num_tokens, hidden_size) }
}

fn single(case: MhcPreCase) -> MhcPreCase {
    MhcPreCase { dtype: Float::F32, ..case }
}

impl MhcPreCase {
    fn of_oracle(&self, t: &Bound<'_>) -> Option<reference::Norm> {
        let stored = format_of(self.dtype.dtype())?;
        self.norm.then(|| reference::Norm { eps: t.scalar("eps", self.eps.into()), stored })
    }
}

impl Operator for MhcPre {
    type Case = MhcPreCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "mhc_pre",
        family: Family::Streams,
        summary: "h = pre · streams: what a sublayer reads of the residual streams, with or without the RMSNorm of it",
        specification: &["inference 2.3", "inference 3", "training 11.1", "training 11.3"],
        paths: &[
            "mhc_pre_forward_vector",
            "mhc_pre_forward_scalar",
            "mhc_pre_norm_forward_few",
            "mhc_pre_norm_forward_vector",
            "mhc_pre_norm_forward_scalar",
            "mhc_pre_backward_vector",
            "mhc_pre_backward_scalar",
            "mhc_pre_norm_backward_staged",
            "mhc_pre_norm_backward_wide",
            "mhc_pre_norm_backward_scalar",
            "rms_norm_dweight",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "streams in fp32 from end to end, or other numbers of streams than 4",
        "the model has 4 streams, and its kernels hold them in registers",
    )];

    const GOLDEN: &'static [&'static str] = &["hc"];

    fn tensors(c: &MhcPreCase) -> Specs {
        let dtype = c.dtype.dtype();
        let most = if c.norm { launcher::MAX_NORMALISED } else { usize::MAX };
        let (tokens, streams) =
            (axis("num_tokens", c.num_tokens), axis("num_streams", NUM_STREAMS));
        let rows = [tokens, axis("hidden_size", c.hidden_size).multiples(1, most)];
        let tensors = [
            input("streams", dtype, &[tokens, streams, rows[1]])
                .rows()
                .of_any_size()
                .drawn_as(c.data),
            input("pre", DType::F32, &[tokens, streams])
                .of_any_size()
                .drawn(Distribution::Normal, 1.0),
            input("weight", DType::F32, &rows[1..])
                .of_any_size()
                .when(c.norm)
                .drawn(Distribution::Normal, 1.0),
            output("h", dtype, &rows).rows().when(!c.norm),
            output("y", dtype, &rows).rows().when(c.norm).only_in("forward"),
            output("rstd", DType::F32, &rows[..1]).when(c.norm).only_in(if c.saves_rstd {
                "forward"
            } else {
                "saving forward"
            }),
            upstream("dh", "h").drawn(c.data.distribution, 1.0),
            upstream("dy", "y").drawn(c.data.distribution, 1.0),
            gradient("dstreams", "streams", dtype),
            gradient("dpre", "pre", DType::F32),
            gradient("dweight", "weight", DType::F32),
            scratch("y_of_saving_forward", dtype, &rows)
                .rows()
                .when(c.norm && !c.saves_rstd)
                .argument("y"),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &MhcPreCase) -> Result<(), Refused> {
        if !c.norm && !c.saves_rstd {
            return refuse("saves_rstd", "false: without a norm there is no rstd");
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcPreCase> {
        let extents = matrix(profile.of([[10, 700], [20, 2100], [200, 7168]]));
        let norm = prop_oneof![Just((false, true)), Just((true, true)), Just((true, false))];
        let eps = select(vec![1e-6f32, 1e-2, 1e-12]);
        (extents, Float::strategy(), norm, eps, Data::strategy(-12..=12))
            .prop_map(|([num_tokens, hidden_size], dtype, (norm, saves_rstd), eps, data)| {
                // A norm of one channel has dh = w dy r eps r^2. It vanishes under the rounding of
                // its two terms unless eps is large enough.
                let magnitude =
                    if norm && hidden_size == 1 { f64::from(eps).sqrt() } else { data.magnitude };
                let data = Data { magnitude, ..data };
                MhcPreCase { num_tokens, hidden_size, dtype, norm, saves_rstd, eps, data }
            })
            .boxed()
    }

    fn typical() -> Vec<MhcPreCase> {
        let unsaved = |case| MhcPreCase { saves_rstd: false, ..case };
        // 16 bytes at a time, and one element.
        vec![
            plain(5, 64),
            plain(3, 37).then(single),
            normed(5, 64),
            normed(3, 37).then(single).then(unsaved),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<MhcPreCase> {
        let mut cases = vec![
            plain(0, 64),
            normed(0, 64),
            plain(1, 1),
            normed(1, 8),
            // One vector, and one channel, more than a block of the forward takes of a row.
            plain(2, 1032),
            plain(2, 129).then(single),
            // One more than the pieces that a warp of the backward takes at a time, and several
            // warps.
            plain(2, 264),
            plain(2, 2056),
            // Several warps, with the norm; more tokens than blocks of its backward.
            normed(2, 2056),
            normed(2, 521).then(single),
            normed(21, 264),
            normed(20, 264).then(single),
            // Few tokens, with rows that end within a warp and need more threads than a block for
            // many tokens has.
            normed(5, 72),
            normed(2, 4104),
            // Rows that shared memory does not hold.
            normed(2, 16384),
            normed(3, 8192).then(single),
            normed(3, 72).with(|case| case.eps = 1e-2),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain(64, 7168),
                normed(300, 7168),
                normed(300, 4096),
                normed(16, 7168).then(single),
            ]);
        }
        cases
    }

    fn forward(c: &MhcPreCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, c.of_oracle(t), rounding)
    }

    fn backward(c: &MhcPreCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, c.of_oracle(t), rounding)
    }

    fn workspaces(
        c: &MhcPreCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let bytes =
            || launcher::workspace_bytes(device, c.dtype.dtype(), c.num_tokens, c.hidden_size);
        Ok(c.norm.then(|| ("workspace", bytes())).into_iter().collect())
    }

    fn launch(c: &MhcPreCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        let norm = c.norm.then_some(launcher::Norm { eps: c.eps });
        if let Some(y) = v.get("y_of_saving_forward") {
            let saving = v.only(&["streams", "pre", "weight", "rstd"]).with("y", y);
            launcher::forward(run.device(), &saving, norm)?;
        }
        let saved = if c.saves_rstd { "rstd" } else { "pre" };
        let forward = v.only(&["streams", "pre", "weight", "h", "y", saved]);
        run.launch(|device| launcher::forward(device, &forward, norm))
    }

    fn launch_backward(
        c: &MhcPreCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::backward(device, &v.without(&["h", "y", "y_of_saving_forward"]), c.norm)
        })
    }

    /// The sum of squares of few tokens has another order.
    fn invariant(c: &MhcPreCase, path: bool) -> &'static [BatchAxis] {
        if path || !c.norm { BatchAxis::OF_ROWS } else { &[] }
    }

    fn laws(c: &MhcPreCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        if c.norm {
            let once =
                [("y", 0.5), ("rstd", 1.0), ("dstreams", 0.5), ("dpre", 0.5), ("dweight", 1.0)];
            laws.scale("weight scales once", "weight", 0.5, &once);
        } else {
            laws.scale(
                "streams are linear",
                "streams",
                0.5,
                &[("h", 0.5), ("dpre", 0.5), ("dstreams", 1.0)],
            );
            laws.scale(
                "pre is linear",
                "pre",
                0.5,
                &[("h", 0.5), ("dpre", 1.0), ("dstreams", 0.5)],
            );
            laws.separate("hidden_size", "channels may be permuted");
        }
        laws.separate("num_tokens", "tokens may be permuted");
    }

    /// With the norm a token bends over its own root mean square, or over the root of eps if that
    /// is larger.
    fn bends_over(c: &MhcPreCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        if !c.norm || input == "weight" {
            return None;
        }
        let eps = tensors.scalar("eps", f64::from(c.eps));
        let (streams, pre) = (tensors.values("streams"), tensors.values("pre"));
        let token = |(x, pre): (&[f64], &[f64])| -> Vec<f64> {
            let streams: Vec<&[f64]> = x.chunks(c.hidden_size).collect();
            let h = |channel: usize| {
                streams.iter().zip(pre).map(|(x, pre)| pre * x[channel]).sum::<f64>()
            };
            let scale = ((0..c.hidden_size).map(|at| h(at).powi(2)).sum::<f64>()
                / c.hidden_size as f64
                + eps)
                .sqrt();
            let largest =
                |x: &[f64]| x.iter().fold(f64::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
            match input {
                "pre" => streams.iter().map(|x| scale / largest(x)).collect(),
                _ => pre
                    .iter()
                    .flat_map(|&pre| vec![scale / largest(&[pre]); c.hidden_size])
                    .collect(),
            }
        };
        Some(
            streams
                .chunks(NUM_STREAMS * c.hidden_size)
                .zip(pre.chunks(NUM_STREAMS))
                .flat_map(token)
                .collect(),
        )
    }

    /// The files hold the collapsed streams without the norm, and the sigmoids before eps is added.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MhcPreCase>>, String> {
        let (eps, streams) = (file.number("hc_eps")?, ["..tokens", "streams", "hidden"]);
        let pre = file
            .floats("mid.pre_sigmoid", &["..tokens", "streams"])?
            .iter()
            .map(|pre| pre + eps)
            .collect();
        let x = file.floats("in.streams", &streams)?.to_vec();
        let hidden_size = file.extent("hidden")?;
        let case = single(plain(x.len() / NUM_STREAMS / hidden_size, hidden_size));
        let golden = Golden::new(case).values("streams", x).values("pre", pre);
        Ok(vec![
            golden.expect(file, "h", "out.collapsed", &["..tokens", "hidden"])?.computed_in_f32(),
        ])
    }

    /// The streams of both models.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu = [(4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168)];
        let decode = [(1, 7168), (128, 7168)];
        let extents =
            if on_gpu(environment) { [&gpu[..], &decode].concat() } else { vec![(6, 512)] };
        let benchmark = |&(num_tokens, hidden_size): &(usize, usize), norm: bool, direction| {
            let case = MhcPreCase { norm, ..plain(num_tokens, hidden_size) };
            let name =
                format!("{num_tokens}x4x{hidden_size} bf16{}", if norm { " norm" } else { "" });
            // For each of the four streams' elements: a product and a sum, in the backward two
            // products and a sum. The norm has four operations for each channel, in the backward
            // nine in addition to the mix of the streams.
            let flops = match (direction, norm) {
                (Forward, false) => 1.75,
                (Forward, true) => 2.75,
                (Backward, false) => 3.0,
                (Backward, true) => 7.0,
            };
            Benchmark::new(direction, name, case, "num_tokens").streaming(&["rstd"], flops)
        };
        let each = [(false, Forward), (false, Backward), (true, Forward), (true, Backward)];
        let of = |extents| each.map(|(norm, direction)| benchmark(extents, norm, direction));
        extents.iter().flat_map(of).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["4096x4x7168 bf16", "4096x4x7168 bf16 norm"],
            json!({"num_tokens": 11, "hidden_size": 72}),
            json!({"num_tokens": 2}),
        )]
    }
}
