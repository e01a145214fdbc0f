//! `inverse_rope_quantize` (inference 4, 5.4, 5.7, 9):
//! `kernels/cuda/attention/inverse_rope_quantize.cu` against
//! `reference/src/attention/inverse_rope_quantize.rs`.
//!
//! Codes and scales are fully determined and must equal the oracle's.

use dsv4_kernels::attention::inverse_rope_quantize::{
    self as launcher, GROUP, MAX_WIDTH, Options, ScaleLayout, ScaleType,
};
use dsv4_reference::attention::inverse_rope_quantize as reference;

use crate::operator::declaration::Axis;
use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::formats::quantize_fp8::{layout_of_oracle, scale_of_oracle};
use crate::operators::projections::rope::{TableForm, Turning, turned_by};

/// The operator.
pub struct InverseRopeQuantize;

/// A case: sizes, rotation, how the output is quantized, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InverseRopeQuantizeCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Heads of the attention's output.
    pub num_heads: usize,
    /// Groups of the output projection, all with the same number of heads.
    pub o_groups: usize,
    /// Channels of a head: a multiple of 128.
    pub head_dim: usize,
    /// Channels that rotate: the last ones of a head. Even, at least 2.
    pub rope_dim: usize,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Type of the scales.
    pub scale: ScaleType,
    /// Layout of the scales of a group of the projection.
    pub layout: ScaleLayout,
    /// The attention's output.
    #[serde(flatten)]
    pub data: Data,
}

/// A case of tokens, heads, groups and channels, with a row of the table for each token.
fn plain([num_tokens, num_heads, o_groups, head_dim]: [usize; 4]) -> InverseRopeQuantizeCase {
    let (rope_dim, table, table_rows, data) = (64, TableForm::RowPerToken, 0, Data::normal(1.0));
    let (scale, layout) = (ScaleType::E8m0, ScaleLayout::Plain);
    InverseRopeQuantizeCase {
        num_tokens,
        num_heads,
        o_groups,
        head_dim,
        rope_dim,
        table,
        table_rows,
        scale,
        layout,
        data,
    }
}

impl InverseRopeQuantizeCase {
    fn options(&self) -> Options {
        let Self { o_groups, scale, layout, .. } = *self;
        Options { o_groups, scale, layout }
    }

    fn of_oracle(&self) -> reference::Options {
        let (scale, layout) = (scale_of_oracle(self.scale), layout_of_oracle(self.layout));
        reference::Options { o_groups: self.o_groups, scale, layout }
    }

    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }

    /// Channels of a group of the projection.
    fn group_width(&self) -> usize {
        self.num_heads / self.o_groups.max(1) * self.head_dim
    }
}

/// Whether that many of the last channels of a head may rotate.
pub(crate) fn check_rope_dim(rope_dim: usize, head_dim: usize) -> Result<(), Refused> {
    if rope_dim < 2 || !rope_dim.is_multiple_of(2) || rope_dim > head_dim {
        return refuse("rope_dim", format!("{rope_dim} must be even, 2 to head_dim {head_dim}"));
    }
    Ok(())
}

/// Whether all groups have the same number of heads.
pub(crate) fn check_groups(o_groups: usize, num_heads: usize) -> Result<(), Refused> {
    if o_groups == 0 || num_heads == 0 || !num_heads.is_multiple_of(o_groups) {
        return refuse("o_groups", format!("{o_groups} must divide num_heads, {num_heads}"));
    }
    Ok(())
}

impl Operator for InverseRopeQuantize {
    type Case = InverseRopeQuantizeCase;

    const ABOUT: About = About {
        name: "inverse_rope_quantize",
        family: Family::Attention,
        summary: "the attention's output turned back by position, as e4m3 codes with scales of 128 channels, in one pass",
        specification: &["inference 4", "inference 5.4", "inference 5.7", "inference 9"],
        paths: &["inverse_rope_quantize_vector", "inverse_rope_quantize_scalar"],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    fn tensors(c: &InverseRopeQuantizeCase) -> Specs {
        let (tokens, heads) = (axis("num_tokens", c.num_tokens), axis("num_heads", c.num_heads));
        let channels = axis("head_dim", c.head_dim).multiples(GROUP, MAX_WIDTH);
        let (groups, width) = (axis("o_groups", c.o_groups), axis("group_width", c.group_width()));
        let (dtype, axes) = c.options().scale_tensor(c.num_tokens, c.group_width());
        let axes: Vec<Axis> = axes.into_iter().map(|(name, extent)| axis(name, extent)).collect();
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("x", DType::Bf16, &[tokens, heads, channels])
                .rows()
                .drawn_as(c.data)
                .of_any_size(),
            cos,
            sin,
            positions,
            output("codes", DType::U8, &[tokens, groups, width]).rows().exact(),
            output("scales", dtype, &axes).exact(),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &InverseRopeQuantizeCase) -> Result<(), Refused> {
        check_groups(c.o_groups, c.num_heads)?;
        check_rope_dim(c.rope_dim, c.head_dim)?;
        if c.scale != ScaleType::E8m0 && c.layout == ScaleLayout::Blocked {
            return refuse("layout", "tiles of scales hold bytes");
        }
        c.turning().check()?;
        c.data.check()
    }

    fn strategy(profile: Profile) -> BoxedStrategy<InverseRopeQuantizeCase> {
        let tokens = 0..=profile.of([9usize, 40, 300]);
        let heads = (extent(profile.of([4, 9, 20]), 4), 1..=profile.of([3usize, 8, 16]));
        let head = prop_oneof![3 => Just((512usize, 64usize)), 1 => Just((128, 64)), 1 => Just((128, 128)),
            2 => (1..=5usize, 1..=64usize).prop_map(|(groups, half)| (128 * groups, 2 * half))];
        let table =
            select(vec![TableForm::RowPerToken, TableForm::Positions, TableForm::HostilePositions]);
        let scale = select(vec![ScaleType::E8m0, ScaleType::PowerOfTwo, ScaleType::Fp32]);
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        (tokens, heads, head, (table, 1..200usize), (scale, layout), Data::strategy(-30..=30))
            .prop_map(
                |(
                    num_tokens,
                    (heads, o_groups),
                    (head_dim, rope_dim),
                    (table, rows),
                    (scale, layout),
                    data,
                )| {
                    let tiles = layout == ScaleLayout::Blocked && scale != ScaleType::E8m0;
                    let layout = if tiles { ScaleLayout::MnMajor } else { layout };
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let plain = plain([num_tokens, heads * o_groups, o_groups, head_dim]);
                    InverseRopeQuantizeCase {
                        rope_dim,
                        table,
                        table_rows,
                        scale,
                        layout,
                        data,
                        ..plain
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<InverseRopeQuantizeCase> {
        let positions =
            |case| InverseRopeQuantizeCase { table: TableForm::Positions, table_rows: 9, ..case };
        let of = |scale, layout| move |case| InverseRopeQuantizeCase { scale, layout, ..case };
        vec![
            plain([3, 4, 2, 128]),
            plain([5, 3, 3, 256]).then(positions).then(of(ScaleType::Fp32, ScaleLayout::MnMajor)),
            plain([2, 4, 1, 128]).then(positions).then(of(ScaleType::E8m0, ScaleLayout::MnMajor)),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<InverseRopeQuantizeCase> {
        let of = |scale, layout| move |case| InverseRopeQuantizeCase { scale, layout, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let turning = |rope_dim| move |case| InverseRopeQuantizeCase { rope_dim, ..case };
        let sized = |exponent| {
            move |case| InverseRopeQuantizeCase {
                data: Data { magnitude: 2f64.powi(exponent), ..Data::normal(1.0) },
                ..case
            }
        };
        let mut cases = vec![
            plain([0, 4, 2, 128]),
            plain([0, 4, 2, 128]).then(of(ScaleType::E8m0, mn)),
            plain([1, 1, 1, 128]),
            // Heads of the model: a warp takes one. Words of scales and tiles with padding, of
            // several groups.
            plain([2, 4, 2, 512]),
            plain([5, 6, 3, 128]).then(of(ScaleType::E8m0, mn)),
            plain([5, 4, 2, 512]).then(of(ScaleType::Fp32, mn)),
            plain([3, 2, 2, 384]).then(of(ScaleType::PowerOfTwo, ScaleLayout::Plain)),
            plain([3, 6, 2, 256]).then(of(ScaleType::E8m0, tiles)),
            // All channels rotate; two do; and a count where a lane has rotated and copied
            // channels.
            plain([3, 2, 1, 128]).then(turning(128)),
            plain([3, 2, 1, 128]).then(turning(2)),
            plain([3, 2, 1, 256]).then(turning(70)),
            plain([11, 2, 1, 256]).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
            // Below the floor of the scales, and at their largest values.
            plain([3, 2, 1, 128]).then(sized(-14)),
            plain([3, 2, 1, 128]).then(of(ScaleType::Fp32, ScaleLayout::Plain)).then(sized(118)),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain([300, 64, 8, 512]),
                plain([130, 128, 16, 512]).then(of(ScaleType::Fp32, mn)),
            ]);
        }
        cases
    }

    fn amend(c: &InverseRopeQuantizeCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.turning().amend(tensors)
    }

    fn forward(
        c: &InverseRopeQuantizeCase,
        t: &Bound<'_>,
        _: &mut Rounding,
    ) -> OracleResult<Named> {
        reference::forward(&turned_by(t, t.f64("x")?, true)?, c.of_oracle())
    }

    fn launch(
        c: &InverseRopeQuantizeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        run.launch(|device| launcher::forward(device, v, c.options()))
    }

    fn invariant(_: &InverseRopeQuantizeCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn laws(c: &InverseRopeQuantizeCase, laws: &mut Laws<'_, Self>) {
        // In other layouts the scales of tokens have no separate axis.
        if c.layout == ScaleLayout::Plain {
            laws.separate("num_tokens", "tokens may be permuted");
        }
    }

    /// The attention's output of the model, for few and for many tokens.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let extents: &[[usize; 4]] = if on_gpu(environment) {
            &[[1, 128, 16, 512], [128, 128, 16, 512], [4096, 64, 8, 512], [4096, 128, 16, 512]]
        } else {
            &[[16, 4, 2, 128]]
        };
        let benchmark = |&extents: &[usize; 4]| {
            [ScaleType::E8m0, ScaleType::Fp32].map(|scale| {
                let case = InverseRopeQuantizeCase {
                    scale,
                    layout: ScaleLayout::MnMajor,
                    ..plain(extents)
                };
                let [num_tokens, num_heads, o_groups, head_dim] = extents;
                let name =
                    format!("{num_tokens}x{num_heads}x{head_dim} in {o_groups} groups {scale:?}")
                        .to_lowercase();
                // A magnitude, a maximum, a product and a rounding; three operations of the
                // rotation for an eighth.
                Benchmark::new(Direction::Forward, name, case, "num_tokens").streaming(&[], 4.4)
            })
        };
        extents.iter().flat_map(benchmark).collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["4096x128x512 in 16 groups e8m0", "4096x64x512 in 8 groups fp32"],
            json!({"num_tokens": 11, "num_heads": 6, "o_groups": 2, "head_dim": 128}),
            json!({"num_tokens": 2}),
        )]
    }
}
