//! `query_norm_rope` (inference 3, 4, 5.1, training 8, 11.3):
//! `kernels/cuda/projections/query_norm_rope.cu` against
//! `reference/src/projections/query_norm_rope.rs`.

use dsv4_kernels::projections::query_norm_rope::{self as launcher, MAX_HEAD_DIM};
use dsv4_reference::projections::query_norm_rope as reference;

use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::attention::inverse_rope_quantize::check_rope_dim;
use crate::operators::projections::rms_norm::sizes_of_rows;
use crate::operators::projections::rope::{TableForm, Turning, turned_by};

/// The operator.
pub struct QueryNormRope;

/// A case: sizes, rotation, aliasing, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueryNormRopeCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Channels of a head: even, at most 1024.
    pub head_dim: usize,
    /// Channels that rotate: the last ones of a head. Even, at least 2.
    pub rope_dim: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Where y is stored.
    pub aliasing: Aliasing,
    /// Whether every third head is zero.
    pub zero_heads: bool,
    /// x, and the distribution of dy.
    #[serde(flatten)]
    pub data: Data,
}

/// A case of tokens, heads and channels, half of which rotate.
fn plain([num_tokens, num_heads, head_dim]: [usize; 3]) -> QueryNormRopeCase {
    let (eps, table, table_rows, aliasing) =
        (1e-6, TableForm::RowPerToken, 0, Aliasing::OutOfPlace);
    let (rope_dim, zero_heads, data) = (head_dim / 4 * 2, false, Data::normal(1.0));
    QueryNormRopeCase {
        num_tokens,
        num_heads,
        head_dim,
        rope_dim,
        eps,
        table,
        table_rows,
        aliasing,
        zero_heads,
        data,
    }
}

impl QueryNormRopeCase {
    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }
}

impl Operator for QueryNormRope {
    type Case = QueryNormRopeCase;
    const SUM_LANES: usize = 32;

    const ABOUT: About = About {
        name: "query_norm_rope",
        family: Family::Projections,
        summary: "the query heads over their root mean square, their last channels turned by position, in one pass",
        specification: &[
            "inference 3",
            "inference 4",
            "inference 5.1",
            "training 8",
            "training 11.3",
        ],
        paths: &[
            "query_norm_rope_vector",
            "query_norm_rope_scalar",
            "backward query_norm_rope_backward_vector",
            "backward query_norm_rope_backward_scalar",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &QueryNormRopeCase) -> Specs {
        let (tokens, heads) = (axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads));
        let all = [tokens, heads, axis("head_dim", c.head_dim).multiples(2, MAX_HEAD_DIM)];
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("x", DType::Bf16, &all).rows().drawn_as(c.data).of_any_size(),
            cos,
            sin,
            positions,
            output("y", DType::Bf16, &all).rows().placed(c.aliasing, "x"),
            output("rstd", DType::F32, &all[..2]),
            upstream("dy", "y").drawn(c.data.distribution, 1.0),
            gradient("dx", "x", DType::Bf16).rows().may_be("dy"),
        ];
        Specs::new(c.data.seed, tensors).positive("eps", c.eps)
    }

    fn check(c: &QueryNormRopeCase) -> Result<(), Refused> {
        check_rope_dim(c.rope_dim, c.head_dim)?;
        c.turning().check()?;
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<QueryNormRopeCase> {
        let tokens = 0..=profile.of([9usize, 40, 300]);
        let heads = extent(profile.of([9, 30, 130]), 8);
        let head = prop_oneof![
            2 => Just((512usize, 64usize)),
            1 => Just((128, 64)),
            1 => Just((256, 256)),
            3 => (1..=20usize, 0..=20usize).prop_map(|(half, copied)| (2 * (half + copied), 2 * half)),
            1 => (257..=512usize).prop_map(|half| (2 * half, 64)),
        ];
        let table =
            select(vec![TableForm::RowPerToken, TableForm::Positions, TableForm::HostilePositions]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32), 1 => Just(1e-12f32)];
        let aliasing = prop_oneof![3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace)];
        (
            tokens,
            heads,
            head,
            (table, 1..200usize),
            (eps, aliasing, any::<bool>()),
            Data::strategy(-18..=18),
        )
            .prop_map(
                |(
                    num_tokens,
                    num_heads,
                    (head_dim, rope_dim),
                    (table, rows),
                    (eps, aliasing, zero_heads),
                    data,
                )| {
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let plain = plain([num_tokens, num_heads, head_dim]);
                    QueryNormRopeCase {
                        rope_dim,
                        eps,
                        table,
                        table_rows,
                        aliasing,
                        zero_heads,
                        data,
                        ..plain
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<QueryNormRopeCase> {
        let positions =
            |case| QueryNormRopeCase { table: TableForm::Positions, table_rows: 9, ..case };
        // Heads of the last one are not multiples of 16 bytes: the scalar kernel's.
        vec![
            plain([3, 5, 32]),
            plain([2, 3, 128]).then(positions),
            plain([3, 2, 22]).then(positions),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<QueryNormRopeCase> {
        let turning = |rope_dim| move |case| QueryNormRopeCase { rope_dim, ..case };
        let mut cases = vec![
            plain([0, 3, 64]),
            plain([1, 1, 2]).then(turning(2)),
            plain([2, 3, 512]).then(turning(64)),
            // One channel more than the vector kernels support, and the most that the scalar
            // kernels support.
            plain([2, 1, 520]).then(turning(64)),
            plain([1, 2, 1024]).then(turning(64)),
            // All channels rotate; a vector of eight channels of which some rotate.
            plain([2, 3, 64]).then(turning(64)),
            plain([2, 3, 40]).then(turning(12)),
            plain([3, 3, 256]).with(|case| case.aliasing = Aliasing::InPlace),
            plain([3, 2, 38]).with(|case| case.aliasing = Aliasing::InPlace),
            plain([3, 4, 64]).with(|case| case.zero_heads = true),
            plain([11, 2, 64]).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
            plain([4, 2, 14]).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain([64, 128, 512]).then(turning(64)),
                plain([130, 64, 512]).then(turning(64)),
            ]);
        }
        cases
    }

    fn amend(c: &QueryNormRopeCase, tensors: &mut Tensors) -> OracleResult<()> {
        if c.zero_heads {
            tensors
                .edit("x", |x| x.chunks_mut(c.head_dim).step_by(3).for_each(|head| head.fill(0.0)));
        }
        c.turning().amend(tensors)
    }

    fn forward(
        c: &QueryNormRopeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(&turned_by(t, t.f64("x")?, false)?, c.eps.into(), rounding)
    }

    fn backward(
        c: &QueryNormRopeCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::backward(
            &turned_by(t, t.f64("x")?, false)?,
            &t.f64("dy")?,
            c.eps.into(),
            rounding,
        )
    }

    fn launch(
        c: &QueryNormRopeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, &v.without(&["dy", "dx"]), c.eps))
    }

    fn launch_backward(
        _: &QueryNormRopeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.ran(format!("backward {}", launcher::backward(run.device(), &v.without(&["y"]))?));
        Ok(())
    }

    fn invariant(_: &QueryNormRopeCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(_: &QueryNormRopeCase, laws: &mut Laws<'_, Self>) {
        laws.scale_upstreams();
        laws.separate("num_tokens", "tokens may be permuted");
        laws.separate("num_heads", "heads may be permuted");
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist.
    fn is_smooth(c: &QueryNormRopeCase) -> bool {
        c.table != TableForm::HostilePositions && c.num_tokens * c.num_heads * c.head_dim <= 1024
    }

    fn bends_over(c: &QueryNormRopeCase, tensors: &Tensors, input: &str) -> Option<Vec<f64>> {
        (input == "x").then(|| sizes_of_rows(&tensors.values("x"), c.head_dim, c.eps.into()))
    }

    /// The query heads of the model, for few and for many tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        use Direction::{Backward, Forward};
        let many = [16384, 128, 512];
        let gpu = [
            (Forward, [1, 128, 512]),
            (Forward, [128, 128, 512]),
            (Forward, many),
            (Backward, many),
        ];
        let small = [(Forward, [8, 4, 512]), (Backward, [8, 4, 512])];
        let shapes = if on_gpu(environment) { &gpu[..] } else { &small };
        let benchmark = |&(direction, extents): &(Direction, [usize; 3])| {
            let case = QueryNormRopeCase { rope_dim: 64, ..plain(extents) };
            let [num_tokens, num_heads, head_dim] = extents;
            let name = format!("{num_tokens}x{num_heads}x{head_dim} bf16");
            // A square, its sum and a product; nine operations in the backward; three of the
            // rotation for an eighth.
            let flops = if direction == Forward { 3.4 } else { 9.4 };
            Benchmark::new(direction, name, case, "num_tokens").streaming(&["rstd"], flops)
        };
        shapes.iter().map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::both(
            &["16384x128x512 bf16"],
            json!({"num_tokens": 11, "num_heads": 3}),
            json!({"num_tokens": 2}),
        )]
    }
}
