//! `moe_reduce` (inference 11.2, 11.3): `kernels/cuda/experts/moe_reduce.cu` against
//! `reference/src/experts/moe_reduce.rs`.

use dsv4_kernels::experts::moe_reduce as launcher;
use dsv4_reference::experts::moe_reduce as reference;

use crate::operator::prelude::*;
use crate::operators::experts::moe_map::Experts;
use crate::operators::experts::moe_rows::MoeRows;

/// The operator.
pub struct MoeReduce;

/// A case: sizes, slots, types, the added terms, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeReduceCase {
    /// Sizes, slots, types, data.
    #[serde(flatten)]
    pub rows: MoeRows,
    /// Whether slots have weights.
    pub weighted: bool,
    /// Whether the shared expert has rows.
    pub with_shared: bool,
}

fn of(rows: MoeRows) -> MoeReduceCase {
    MoeReduceCase { rows, weighted: true, with_shared: true }
}

impl Operator for MoeReduce {
    type Case = MoeReduceCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "moe_reduce",
        family: Family::Experts,
        summary: "rows of experts, weighted or not, added to rows of tokens, with the shared expert's",
        specification: &["inference 11.2", "inference 11.3"],
        paths: &[
            "moe_reduce_forward_vector",
            "moe_reduce_forward_scalar",
            "moe_reduce_backward_vector",
            "moe_reduce_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] =
        &[("rows reduced to e4m3", "the residual streams that follow are bf16")];

    const GOLDEN: &'static [&'static str] = &["moe_topk", "moe_hash"];

    fn tensors(c: &MoeReduceCase) -> Specs {
        let dtype = c.rows.dtype.dtype();
        let any_size = |spec: crate::operator::declaration::TensorSpec| {
            if c.with_shared { spec } else { spec.of_any_size() }
        };
        let y = any_size(input("y", dtype, &c.rows.of_positions()).rows().drawn_as(c.rows.data));
        let weights = input("topk_weights", DType::F32, &c.rows.of_slots())
            .rows()
            .drawn(Distribution::Normal, 1.0);
        let shared = input("shared", dtype, &c.rows.of_tokens()).rows().drawn_as(c.rows.data);
        let given = [y, any_size(weights).when(c.weighted), shared.when(c.with_shared)];
        let results = [
            output("out", dtype, &c.rows.of_tokens()).rows(),
            upstream("dout", "out"),
            gradient("dy", "y", dtype),
            gradient("dtopk_weights", "topk_weights", DType::F32),
        ];
        Specs::new(c.rows.data.seed, given.into_iter().chain(c.rows.tensors()).chain(results))
    }

    fn check(c: &MoeReduceCase) -> Result<(), Refused> {
        c.rows.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MoeReduceCase> {
        (MoeRows::strategy(profile), any::<bool>(), any::<bool>())
            .prop_map(|(rows, weighted, with_shared)| MoeReduceCase { rows, weighted, with_shared })
            .boxed()
    }

    fn typical() -> Vec<MoeReduceCase> {
        let bare = of(MoeRows::plain([5, 3, 4], 16)).with(|case| {
            case.weighted = false;
            case.with_shared = false;
        });
        let single = MoeRows { dtype: Float::F32, ..MoeRows::plain([5, 2, 3], 9) };
        vec![
            of(MoeRows::plain([6, 3, 4], 24)),
            of(single).with(|case| case.with_shared = false),
            bare,
        ]
    }

    fn edge_cases(_: Profile) -> Vec<MoeReduceCase> {
        let bare = |rows: MoeRows| of(rows).with(|case| case.weighted = false);
        let all = MoeRows::edge_cases().into_iter().map(of);
        all.chain([bare(MoeRows::plain([4, 6, 5], 80)), bare(MoeRows::plain([4, 11, 5], 13))])
            .collect()
    }

    fn amend(c: &MoeReduceCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.rows.amend(tensors, "y", "topk_weights")
    }

    fn forward(_: &MoeReduceCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?, rounding)
    }

    fn backward(_: &MoeReduceCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, rounding)
    }

    fn launch(_: &MoeReduceCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| {
            launcher::launch(device, &v.without(&["dout", "dy", "dtopk_weights"]), false)
        })
    }

    fn launch_backward(
        _: &MoeReduceCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, &v.without(&["out"]), true))
    }

    fn invariant(_: &MoeReduceCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &MoeReduceCase, batches: &mut Batches<'_, Self>) {
        if !c.rows.is_whole() {
            return batches.skip(BatchAxis::Company, "the rank received some of the rows");
        }
        batches.rows_with("num_tokens", |tensors, cut| {
            let rows = c.rows.cut(tensors, "y", cut);
            vec![Same::along("dy", 0, &rows)]
        });
    }

    fn laws(c: &MoeReduceCase, laws: &mut Laws<'_, Self>) {
        if !c.with_shared {
            let halved = [("out", 0.5), ("dy", 0.5), ("dtopk_weights", 1.0)];
            laws.scale(
                "a weight counts once",
                "topk_weights",
                0.5,
                &halved[..if c.weighted { 3 } else { 2 }],
            );
            let halved = [("out", 0.5), ("dy", 1.0), ("dtopk_weights", 0.5)];
            laws.scale("a row counts once", "y", 0.5, &halved[..if c.weighted { 3 } else { 2 }]);
        }
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("hidden_size", "channels may be permuted");
    }

    /// The sum of the routed experts' part and the shared expert's: the rows of the routed part
    /// have one slot for each token.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<MoeReduceCase>>, String> {
        let rows = ["..tokens", "hidden"];
        let routed = file.floats("mid.routed_out", &rows)?.to_vec();
        let (num_tokens, hidden_size) = (file.extent("tokens")?, file.extent("hidden")?);
        let plain = MoeRows::plain([num_tokens, 1, 1], hidden_size);
        let plain = MoeRows {
            alignment: 1,
            spare_positions: 0,
            experts: Experts::One,
            dtype: Float::F32,
            ..plain
        };
        let golden =
            Golden::new(MoeReduceCase { weighted: false, ..of(plain) }).values("y", routed);
        let golden = golden
            .stored(file, "shared", "mid.shared_out", &rows)?
            .stored(file, "dout", "gout.y", &rows)?;
        Ok(vec![golden.expect(file, "out", "out.y", &rows)?.computed_in_f32()])
    }

    /// Channels are sampled, because the source of a row depends on all tokens. Forward with the
    /// shared expert's rows and without weights, which the experts applied. Forward with only
    /// weights, as in public kernels. Backward with weights.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let benchmark = |rows: MoeRows, (direction, weighted, suffix): (Direction, bool, &str)| {
            let name = format!("{}{suffix}", rows.name());
            let with = |rows| MoeReduceCase { rows, weighted, with_shared: !weighted };
            let drawn = with(rows.shortened());
            let unread = rows.unread_bytes();
            let streaming =
                Benchmark::new(direction, name, with(rows), "hidden_size").streaming(&[], 2.0);
            Benchmark {
                drawn,
                bytes: streaming.bytes - unread,
                amend: |c: &MoeReduceCase, tensors| {
                    c.rows.set_maps(tensors).expect("maps of a case that was checked")
                },
                ..streaming
            }
        };
        let each = [(Forward, false, ""), (Forward, true, " weighted"), (Backward, true, "")];
        let of = |rows: MoeRows| each.map(|kind| benchmark(rows.clone(), kind));
        MoeRows::benchmarks(environment).into_iter().flat_map(of).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["32768x7168 to 6 of 256 experts bf16"],
            json!({"num_tokens": 21, "num_experts": 8, "hidden_size": 96, "alignment": 4}),
            json!({"num_tokens": 5}),
        )]
    }
}
