//! `mhc_post` (inference 2.4, training 11.1): `kernels/cuda/streams/mhc_post.cu` against
//! `reference/src/streams/mhc_post.rs`.

use dsv4_kernels::streams::mhc_post::{self as launcher, NUM_STREAMS};
use dsv4_reference::streams::mhc_post as reference;

use crate::operator::prelude::*;

/// The operator.
pub struct MhcPost;

/// A case: sizes, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MhcPostCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Channels of a stream.
    pub hidden_size: usize,
    /// Type of the streams, the sublayer's output and their gradients.
    pub dtype: Float,
    /// Where the new streams are stored.
    pub aliasing: Aliasing,
    /// Whether the streams of a token differ by only a few percent, as in a trained model.
    pub near_equal: bool,
    /// The streams and the sublayer's output.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, hidden_size: usize) -> MhcPostCase {
    let (dtype, aliasing, data) = (Float::Bf16, Aliasing::OutOfPlace, Data::normal(1.0));
    MhcPostCase { num_tokens, hidden_size, dtype, aliasing, near_equal: false, data }
}

impl Operator for MhcPost {
    type Case = MhcPostCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "mhc_post",
        family: Family::Streams,
        summary: "out = comb^T · streams + post ⊗ y: the residual streams of each token behind a sublayer",
        specification: &["inference 2.4", "training 11.1"],
        paths: &[
            "mhc_post_forward_vector",
            "mhc_post_forward_scalar",
            "mhc_post_backward_vector",
            "mhc_post_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "other numbers of streams than 4",
        "the model has 4 streams, and its kernels hold them in registers",
    )];

    const GOLDEN: &'static [&'static str] = &["hc_block"];

    fn tensors(c: &MhcPostCase) -> Specs {
        let dtype = c.dtype.dtype();
        let (tokens, channels) =
            (axis("num_tokens", c.num_tokens), axis("hidden_size", c.hidden_size).not_empty());
        let (source, destination) = (axis("source", NUM_STREAMS), axis("destination", NUM_STREAMS));
        // Independent of the magnitude of the streams: each term counts next to the others.
        let coefficient = |name, axes: &[_]| {
            input(name, DType::F32, axes).of_any_size().drawn(Distribution::Normal, 1.0)
        };
        let tensors = [
            input("streams", dtype, &[tokens, source, channels])
                .rows()
                .of_any_size()
                .drawn_as(c.data),
            input("y", dtype, &[tokens, channels]).rows().of_any_size().drawn_as(c.data),
            coefficient("post", &[tokens, destination]),
            coefficient("comb", &[tokens, source, destination]),
            output("out", dtype, &[tokens, destination, channels])
                .rows()
                .placed(c.aliasing, "streams"),
            upstream("dout", "out").drawn(c.data.distribution, 1.0),
            gradient("dstreams", "streams", dtype),
            gradient("dy", "y", dtype),
            gradient("dpost", "post", DType::F32),
            gradient("dcomb", "comb", DType::F32),
        ];
        Specs::new(c.data.seed, tensors)
    }

    /// The products of all pairs of streams, several times.
    fn oracle_elements(c: &MhcPostCase) -> u128 {
        4 * (NUM_STREAMS * (NUM_STREAMS + 1)) as u128 * c.num_tokens as u128 * c.hidden_size as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MhcPostCase> {
        let extents = matrix(profile.of([[10, 700], [20, 2100], [200, 7168]]));
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let near_equal = prop_oneof![2 => Just(false), 1 => Just(true)];
        (extents, Float::strategy(), aliasing, near_equal, Data::strategy(-12..=12))
            .prop_map(|([num_tokens, hidden_size], dtype, aliasing, near_equal, data)| {
                MhcPostCase { num_tokens, hidden_size, dtype, aliasing, near_equal, data }
            })
            .boxed()
    }

    fn typical() -> Vec<MhcPostCase> {
        // 16 bytes at a time, and one element.
        vec![plain(5, 64), plain(3, 37).with(|case| case.dtype = Float::F32)]
    }

    fn edge_cases(profile: Profile) -> Vec<MhcPostCase> {
        let single = |case| MhcPostCase { dtype: Float::F32, ..case };
        let mut cases = vec![
            plain(0, 64),
            plain(1, 1),
            plain(5, 72).with(|case| case.aliasing = Aliasing::InPlace),
            plain(3, 5).then(single).with(|case| case.aliasing = Aliasing::InPlace),
            plain(3, 40).with(|case| case.aliasing = Aliasing::Interleaved),
            plain(3, 64).with(|case| case.near_equal = true),
            // One vector, and one channel, more than a block of the forward takes of a row.
            plain(2, 1032),
            plain(2, 129).then(single),
            // One more than the pieces that a warp of the backward takes at a time, and several
            // warps.
            plain(2, 264),
            plain(2, 2056),
            // More pieces for each thread of the widest block than usual.
            plain(1, 16392),
        ];
        if profile == Profile::Full {
            cases.extend([plain(64, 4096), plain(64, 7168), plain(16, 7168).then(single)]);
        }
        cases
    }

    fn amend(c: &MhcPostCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.near_equal {
            tensors.edit("streams", |x| near_equal(x, c.hidden_size));
        }
        Ok(())
    }

    fn forward(_: &MhcPostCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn backward(_: &MhcPostCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, rounding)
    }

    fn launch(_: &MhcPostCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::forward(device, &v.only(&["streams", "y", "post", "comb", "out"]))
        })
    }

    fn launch_backward(
        _: &MhcPostCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::backward(device, &v.without(&["out"])))
    }

    fn invariant(_: &MhcPostCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &MhcPostCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        let counts_in = |changed: &'static str| {
            ["dstreams", "dy", "dpost", "dcomb"]
                .map(|name| (name, if name == changed { 0.5 } else { 1.0 }))
        };
        laws.scale("streams count once in dcomb", "streams", 0.5, &counts_in("dcomb"));
        laws.scale("y counts once in dpost", "y", 0.5, &counts_in("dpost"));
        laws.scale("post counts once in dy", "post", 0.5, &counts_in("dy"));
        laws.scale("comb counts once in dstreams", "comb", 0.5, &counts_in("dstreams"));
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("destination", "destinations may be permuted");
        laws.separate("hidden_size", "channels may be permuted");
    }

    /// The second site of the file's layer, whose sublayer adds `mlp_add` to its input. The streams
    /// before it are computed from the file's data of the first site and rounded to f32.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MhcPostCase>>, String> {
        let [post, comb] = coefficients(file, "attn")?;
        let y = sublayer(file, "mid.attn_in", "in.attn_add")?;
        let streams = file.floats("in.streams", &STREAMS)?.to_vec();
        let hidden_size = file.extent("hidden")?;
        let streams = mixed(&streams, &y, &post, &comb, hidden_size);
        let case = MhcPostCase { dtype: Float::F32, ..plain(y.len() / hidden_size, hidden_size) };
        let [post, comb] = coefficients(file, "ffn")?;
        let golden =
            Golden::new(case).values("streams", streams).values("post", post).values("comb", comb);
        let golden = golden.values("y", sublayer(file, "mid.mlp_in", "in.mlp_add")?);
        let golden = golden.stored(file, "dout", "gout.streams", &STREAMS)?;
        let golden = golden.expect(file, "out", "out.streams", &STREAMS)?;
        Ok(vec![golden.expect(file, "dy", "grad.in.mlp_add", &CHANNELS)?.computed_in_f32()])
    }

    /// The streams of both models.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let gpu = [(4096, 4096), (4096, 7168), (32768, 4096), (32768, 7168)];
        let decode = [(1, 7168), (128, 7168)];
        let extents =
            if on_gpu(environment) { [&gpu[..], &decode].concat() } else { vec![(6, 512)] };
        let benchmark = |&(num_tokens, hidden_size): &(usize, usize), (direction, flops)| {
            let name = format!("{num_tokens}x4x{hidden_size} bf16");
            Benchmark::new(direction, name, plain(num_tokens, hidden_size), "num_tokens")
                .streaming(&[], flops)
        };
        // For each of the four streams' elements: five products and four sums. In the backward four
        // of each, and two more for y.
        let both = [(Forward, 9.0), (Backward, 19.0)];
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

/// All streams of a token become the first one plus a 64th of their old values.
pub(crate) fn near_equal(streams: &mut [f64], hidden_size: usize) {
    for token in streams.chunks_mut(NUM_STREAMS * hidden_size) {
        let (first, others) = token.split_at_mut(hidden_size);
        others
            .chunks_mut(hidden_size)
            .for_each(|x| x.iter_mut().zip(&*first).for_each(|(x, first)| *x = first + *x / 64.0));
    }
}

const STREAMS: [&str; 3] = ["..tokens", "streams", "hidden"];
const CHANNELS: [&str; 2] = ["..tokens", "hidden"];

/// post and comb of one site of a golden layer.
fn coefficients(file: &mut Reading<'_>, site: &str) -> Result<[Vec<f64>; 2], String> {
    let post = file.floats(&format!("mid.{site}_hc.post"), &["..tokens", "streams"])?.to_vec();
    let comb = file
        .floats(&format!("mid.{site}_hc.comb"), &["..tokens", "streams", "destinations"])?
        .to_vec();
    Ok([post, comb])
}

/// The output of a golden layer's sublayer for its input.
fn sublayer(file: &mut Reading<'_>, input: &str, added: &str) -> Result<Vec<f64>, String> {
    let (input, added) = (file.floats(input, &CHANNELS)?, file.floats(added, &CHANNELS)?);
    Ok(input.iter().zip(added).map(|(input, added)| input + added).collect())
}

/// The streams after a sublayer, by the definition.
pub(crate) fn mixed(
    streams: &[f64],
    y: &[f64],
    post: &[f64],
    comb: &[f64],
    hidden_size: usize,
) -> Vec<f64> {
    let element = |at: usize| {
        let (channel, destination) = (at % hidden_size, at / hidden_size % NUM_STREAMS);
        let token = at / hidden_size / NUM_STREAMS;
        let source = |source: usize| {
            let of = token * NUM_STREAMS + source;
            comb[of * NUM_STREAMS + destination] * streams[of * hidden_size + channel]
        };
        let of_y = post[token * NUM_STREAMS + destination] * y[token * hidden_size + channel];
        of_y + (0..NUM_STREAMS).map(source).sum::<f64>()
    };
    (0..streams.len()).map(element).collect()
}
