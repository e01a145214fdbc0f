//! `moe_expand` (inference 11.3): `kernels/cuda/experts/moe_expand.cu` against
//! `reference/src/experts/moe_expand.rs`.

use dsv4_kernels::experts::moe_expand as launcher;
use dsv4_reference::experts::moe_expand as reference;

use crate::operator::prelude::*;
use crate::operators::experts::moe_rows::MoeRows;

/// The operator.
pub struct MoeExpand;

/// A case: sizes, slots, types, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeExpandCase {
    /// Sizes, slots, types, data.
    #[serde(flatten)]
    pub rows: MoeRows,
}

fn of(rows: MoeRows) -> MoeExpandCase {
    MoeExpandCase { rows }
}

impl Operator for MoeExpand {
    type Case = MoeExpandCase;

    const ABOUT: About = About {
        name: "moe_expand",
        family: Family::Experts,
        summary: "rows of tokens copied to the rows of their experts; backward, added up again",
        specification: &["inference 11.3"],
        paths: &[
            "moe_expand_forward_vector",
            "moe_expand_forward_scalar",
            "moe_expand_backward_vector",
            "moe_expand_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [16, 40, 120],
    };

    const NOT_EXPRESSIBLE: &'static [(&'static str, &'static str)] = &[(
        "codes expanded with their scales",
        "the experts quantize rows after they were expanded",
    )];

    fn tensors(c: &MoeExpandCase) -> Specs {
        let dtype = c.rows.dtype.dtype();
        let x = input("x", dtype, &c.rows.of_tokens()).rows().drawn_as(c.rows.data).of_any_size();
        let results = [
            output("y", dtype, &c.rows.of_positions()).rows().exact(),
            upstream("dy", "y"),
            gradient("dx", "x", dtype),
        ];
        Specs::new(c.rows.data.seed, [x].into_iter().chain(c.rows.tensors()).chain(results))
    }

    fn check(c: &MoeExpandCase) -> Result<(), Refused> {
        c.rows.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<MoeExpandCase> {
        MoeRows::strategy(profile).prop_map(of).boxed()
    }

    fn typical() -> Vec<MoeExpandCase> {
        vec![
            of(MoeRows::plain([6, 3, 4], 24)),
            of(MoeRows { dtype: Float::F32, ..MoeRows::plain([5, 2, 3], 9) }),
        ]
    }

    fn edge_cases(_: Profile) -> Vec<MoeExpandCase> {
        MoeRows::edge_cases().into_iter().map(of).collect()
    }

    fn amend(c: &MoeExpandCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.rows.amend(tensors, "dy", "")
    }

    fn forward(_: &MoeExpandCase, t: &Bound<'_>, _: &mut Rounding) -> OracleResult<Named> {
        reference::forward(&t.named()?)
    }

    fn backward(_: &MoeExpandCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        reference::backward(&t.named()?, rounding)
    }

    fn launch(_: &MoeExpandCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, &v.without(&["dy", "dx"]), false))
    }

    fn launch_backward(
        _: &MoeExpandCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::launch(device, &v.without(&["y"]), true))
    }

    fn invariant(_: &MoeExpandCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &MoeExpandCase, batches: &mut Batches<'_, Self>) {
        if !c.rows.is_whole() {
            return batches.skip(BatchAxis::Company, "the rank received some of the rows");
        }
        batches.rows_with("num_tokens", |tensors, cut| {
            let rows = c.rows.cut(tensors, "dy", cut);
            vec![Same::along("y", 0, &rows)]
        });
    }

    fn laws(_: &MoeExpandCase, laws: &mut Laws<'_, Self>) {
        laws.scale("rows are copied", "x", 0.5, &[("y", 0.5), ("dx", 1.0)]);
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("hidden_size", "channels may be permuted");
    }

    /// Channels are sampled, because the destination of a row depends on all tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let benchmark = |rows: MoeRows, direction| {
            let (name, drawn) = (rows.name(), of(rows.shortened()));
            let of_x = (rows.num_tokens * rows.hidden_size * rows.dtype.dtype().size()) as f64;
            // The backward does not use x, nor rows without a slot.
            let unused = if direction == Backward { of_x + rows.unread_bytes() } else { 0.0 };
            let streaming =
                Benchmark::new(direction, name, of(rows), "hidden_size").streaming(&[], 1.0);
            Benchmark {
                drawn,
                bytes: streaming.bytes - unused,
                amend: |c: &MoeExpandCase, tensors| {
                    c.rows.set_maps(tensors).expect("maps of a case that was checked")
                },
                ..streaming
            }
        };
        let both =
            |rows: MoeRows| [Forward, Backward].map(|direction| benchmark(rows.clone(), direction));
        MoeRows::benchmarks(environment).into_iter().flat_map(both).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["32768x7168 to 6 of 256 experts bf16"],
            json!({"num_tokens": 21, "num_experts": 8, "hidden_size": 96, "alignment": 4}),
            json!({"num_tokens": 5}),
        )]
    }
}
