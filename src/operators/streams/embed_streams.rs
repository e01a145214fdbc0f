//! `embed_streams` (inference 1): `kernels/cuda/streams/embed_streams.cu` against
//! `reference/src/streams/embed_streams.rs`.

use dsv4_kernels::streams::embed_streams as launcher;
use dsv4_reference::streams::embed_streams as reference;
use rand::Rng;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::lists::Hostile;

/// The operator.
pub struct EmbedStreams;

/// The rows of the table for the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenIds {
    /// Any rows.
    Valid,
    /// Some are -1, beyond the table, `i32::MIN` or `i32::MAX`.
    Hostile,
    /// The first row, and occasionally the second.
    Repeated,
}

/// A case: sizes, type, ids, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbedStreamsCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Rows of the table; 0 is allowed.
    pub vocab_size: usize,
    /// Streams of a token, up to 16.
    pub num_streams: usize,
    /// Channels.
    pub hidden_size: usize,
    /// Type of table, out and dout.
    pub dtype: Float,
    /// The rows of the table for the tokens.
    pub token_ids: TokenIds,
    /// The table.
    #[serde(flatten)]
    pub data: Data,
}

fn plain(num_tokens: usize, vocab_size: usize, hidden_size: usize) -> EmbedStreamsCase {
    let (num_streams, dtype, token_ids, data) =
        (4, Float::Bf16, TokenIds::Hostile, Data::normal(1.0));
    EmbedStreamsCase { num_tokens, vocab_size, num_streams, hidden_size, dtype, token_ids, data }
}

impl Operator for EmbedStreams {
    type Case = EmbedStreamsCase;

    const ABOUT: About = About {
        name: "embed_streams",
        family: Family::Streams,
        summary: "the embedding of each token, in each of its residual streams",
        specification: &["inference 1"],
        paths: &[
            "embed_streams_forward_vector",
            "embed_streams_forward_few",
            "embed_streams_forward_scalar",
            "embed_streams_clear",
            "sparse_attention_count",
            "sparse_attention_reserve",
            "sparse_attention_fill",
            "sparse_attention_order",
            "embed_streams_backward_vector",
            "embed_streams_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    fn tensors(c: &EmbedStreamsCase) -> Specs {
        let (dtype, tokens) = (c.dtype.dtype(), axis("num_tokens", c.num_tokens));
        let hidden = axis("hidden_size", c.hidden_size).not_empty();
        let streams = axis("num_streams", c.num_streams).multiples(1, launcher::MAX_STREAMS);
        let table = [axis("vocab_size", c.vocab_size), hidden];
        let tensors = [
            input("table", dtype, &table).rows().drawn_as(c.data).of_any_size(),
            input("token_ids", DType::I32, &[tokens]),
            output("out", dtype, &[tokens, streams, hidden]).rows().exact(),
            upstream("dout", "out"),
            gradient("dtable", "table", DType::F32),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn strategy(profile: Profile) -> BoxedStrategy<EmbedStreamsCase> {
        let [tokens, rows, channels] =
            profile.of([[30usize, 40, 600], [90, 200, 1500], [600, 3000, 8000]]);
        let streams = prop_oneof![3 => Just(4usize), 1 => 1..=launcher::MAX_STREAMS];
        let ids = select(vec![TokenIds::Valid, TokenIds::Hostile, TokenIds::Repeated]);
        let channels = prop_oneof![1 => extent(channels, 128), 2 => 1..=80usize];
        (
            extent(tokens, 4),
            1..=rows,
            streams,
            channels,
            Float::strategy(),
            ids,
            Data::strategy(-20..=20),
        )
            .prop_map(
                |(num_tokens, vocab_size, num_streams, hidden_size, dtype, token_ids, data)| {
                    EmbedStreamsCase {
                        num_tokens,
                        vocab_size,
                        num_streams,
                        hidden_size,
                        dtype,
                        token_ids,
                        data,
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<EmbedStreamsCase> {
        vec![
            plain(7, 5, 24),
            plain(6, 4, 9).with(|case| {
                case.dtype = Float::F32;
                case.num_streams = 3;
            }),
        ]
    }

    fn edge_cases(_: Profile) -> Vec<EmbedStreamsCase> {
        let repeated = |case| EmbedStreamsCase { token_ids: TokenIds::Repeated, ..case };
        vec![
            plain(0, 4, 16),
            plain(3, 0, 16),
            plain(1, 1, 8),
            // Several pieces of a row, with either kind of access.
            plain(3, 3, 1032),
            // More tokens than the kernel for few: several pieces where tokens are few, on every
            // GPU.
            plain(17, 3, 4104),
            plain(2400, 3, 8),
            plain(3, 3, 261).with(|case| case.dtype = Float::F32),
            // Lists of tokens that are ordered by rank, and longer ones.
            plain(200, 6, 3).then(repeated),
            plain(900, 2, 1).with(|case| case.num_streams = 1).then(repeated),
            plain(9, 300, 16).with(|case| case.num_streams = 7),
        ]
    }

    fn amend(c: &EmbedStreamsCase, tensors: &mut Tensors) -> OracleResult<()> {
        tensors.set_i32s("token_ids", &draw_ids(c));
        Ok(())
    }

    fn forward(c: &EmbedStreamsCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, c.num_streams)
    }

    fn backward(
        c: &EmbedStreamsCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::backward(&t.named()?, c.num_streams, rounding)
    }

    fn workspaces(
        c: &EmbedStreamsCase,
        _: &Views,
        _: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        Ok(vec![("workspace", launcher::workspace_bytes(c.num_tokens, c.vocab_size))])
    }

    fn launch(c: &EmbedStreamsCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::forward(device, &v.only(&["table", "token_ids", "out"]), c.num_streams)
        })
    }

    fn launch_backward(
        c: &EmbedStreamsCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::backward(device, &v.without(&["out"]), c.num_streams))
    }

    fn invariant(_: &EmbedStreamsCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &EmbedStreamsCase, laws: &mut Laws<'_, Self>) {
        laws.scale("rows are copied", "table", 0.5, &[("out", 0.5), ("dtable", 1.0)]);
        laws.scale_upstreams();
        laws.permute("tokens may be permuted", "num_tokens");
        laws.separate("hidden_size", "channels may be permuted");
    }

    /// The model's embedding. In a backward channels are sampled, because a row's gradient depends
    /// on all tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let vocab = 129_280;
        let gpu = [
            (32_768, vocab, 7168),
            (4096, vocab, 7168),
            (128, vocab, 7168),
            (1, vocab, 7168),
            (32_768, vocab, 4096),
        ];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &[(16, 24, 256)] };
        let benchmark = |&(num_tokens, vocab_size, hidden_size): &(usize, usize, usize),
                         direction| {
            let case = EmbedStreamsCase {
                token_ids: TokenIds::Valid,
                ..plain(num_tokens, vocab_size, hidden_size)
            };
            let rows = (DRAWN / hidden_size).max(1);
            let drawn = EmbedStreamsCase {
                num_tokens: num_tokens.min(rows),
                vocab_size: vocab_size.min(rows),
                ..case.clone()
            };
            let name = format!("{num_tokens} of {vocab_size} rows of {hidden_size} bf16");
            let bytes = case.bytes(direction);
            let benchmark =
                Benchmark::new(direction, name, case, "hidden_size").streaming(&[], 1.0);
            let amend = |c: &EmbedStreamsCase, tensors: &mut Tensors| {
                tensors.put("token_ids", HostTensor::from_i32(&[c.num_tokens], &draw_ids(c)));
            };
            Benchmark { drawn, bytes, amend, ..benchmark }
        };
        let both = |shape| [Forward, Backward].map(|direction| benchmark(shape, direction));
        shapes.iter().flat_map(both).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["32768 of 129280 rows of 7168 bf16"],
            json!({"num_tokens": 21, "vocab_size": 12, "hidden_size": 96}),
            json!({"num_tokens": 5, "vocab_size": 3}),
        )]
    }
}

impl EmbedStreamsCase {
    /// Bytes that a call moves: of the table only the rows of the tokens, of its gradient
    /// everything.
    fn bytes(&self, direction: Direction) -> f64 {
        let size = self.dtype.dtype().size();
        let (row, streams) =
            (self.hidden_size * size, self.num_tokens * self.num_streams * self.hidden_size * size);
        let moved = match direction {
            Direction::Forward => self.num_tokens * row + streams,
            Direction::Backward => streams + 4 * self.vocab_size * self.hidden_size,
        };
        (moved + 4 * self.num_tokens) as f64
    }
}

fn draw_ids(c: &EmbedStreamsCase) -> Vec<i32> {
    let mut draw = Draw::new(c.data.seed, "token_ids");
    let rows = c.vocab_size as i32;
    let values = [-1, rows, i32::MIN, i32::MAX, rows + 3, -7];
    let mut hostile = Hostile::new(c.data.seed, "token_ids", &values);
    let id = |token: usize| {
        let drawn = if rows > 0 { draw.rng().random_range(0..rows) } else { -1 };
        match c.token_ids {
            TokenIds::Hostile if token % 3 == 1 => hostile.take(),
            TokenIds::Repeated if rows > 0 => drawn % 3 / 2,
            _ => drawn,
        }
    };
    (0..c.num_tokens).map(id).collect()
}
