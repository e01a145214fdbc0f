//! `output_projection` (inference 9, training 8 and 14): the inverse rotation of the attention's
//! output, then the grouped wo_a and wo_b. Forward and backward, composed as in a layer.
//!
//! ```text
//! training   rotated = R^-1 attn_out          z = rotated wo_a^T by groups          y = z wo_b^T
//! backward   dz = dy wo_b, dwo_b = dy^T z     drotated, dwo_a of dz by groups       dattn_out = R drotated
//! wo_b FP8   rotated, z as in training        codes of z, in groups of 128          y of codes
//! both FP8   codes of R^-1 attn_out, one pass z of codes, group by group            codes of z, y of codes
//! ```
//!
//! Each operator may be correct by itself, and still a projection may be wrong. For example, a
//! rotation overwrites what the attention saved, goes in the wrong direction, or uses another
//! token's position. Or groups of heads do not match wo_a's rows, or scales of one group are read
//! as another's.

use dsv4_kernels::attention::inverse_rope_quantize::ScaleLayout;
use dsv4_kernels::{attention::inverse_rope_quantize, projections::linear, projections::rope};
use dsv4_reference::projections::output_projection as reference;

use crate::operator::declaration::Axis;
use crate::operator::fields::extent;
use crate::operator::prelude::*;
use crate::operators::attention::inverse_rope_quantize::{check_groups, check_rope_dim};
use crate::operators::formats::quantize_fp8::layout_of_oracle;
use crate::operators::projections::chain::{ChainProduct, of_codes, parted, set_weight};
use crate::operators::projections::rope::{TableForm, Turning, turned_by};

/// The operators in sequence.
pub struct OutputProjection;

/// Which weights are e4m3 codes with scales of 128 by 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantized {
    /// None: training.
    None,
    /// wo_b.
    WoB,
    /// wo_a and wo_b.
    Both,
}

/// A case: sizes, rotation, formats, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputProjectionCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Heads of the attention.
    pub num_heads: usize,
    /// Channels of a head; a multiple of 128 where both weights are quantized.
    pub head_dim: usize,
    /// Channels that rotate: the last ones of a head. Even, at least 2.
    pub rope_dim: usize,
    /// Groups of heads.
    pub o_groups: usize,
    /// Features of z in each group.
    pub o_lora_rank: usize,
    /// Features of y.
    pub hidden_size: usize,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Which weights are quantized.
    pub quantized: Quantized,
    /// Layout of the scales of the rotated output, where that is quantized.
    pub layout: ScaleLayout,
    /// The attention's output.
    #[serde(flatten)]
    pub data: Data,
}

/// A case of heads, channels, groups, rank and hidden size.
fn plain(num_tokens: usize, extents: [usize; 5]) -> OutputProjectionCase {
    let [num_heads, head_dim, o_groups, o_lora_rank, hidden_size] = extents;
    OutputProjectionCase {
        num_tokens,
        num_heads,
        head_dim,
        rope_dim: head_dim / 4 * 2,
        o_groups,
        o_lora_rank,
        hidden_size,
        table: TableForm::RowPerToken,
        table_rows: 0,
        quantized: Quantized::None,
        layout: ScaleLayout::Plain,
        data: Data::normal(1.0),
    }
}

/// Its name.
const NAME: &str = "output_projection";
const SECOND: ChainProduct = ChainProduct {
    x: ["z", "z_codes", "z_scales"],
    w: ["wo_b", "wo_b_codes", "wo_b_scales"],
    y: "y",
    gradients: ["dz", "dwo_b", "dy"],
};
/// Values that share a scale.
const BLOCK: usize = linear::BLOCK;

impl OutputProjectionCase {
    fn turning(&self) -> Turning {
        let Self { num_tokens, table: form, table_rows, rope_dim, .. } = *self;
        Turning { form, table_rows, num_tokens, rope_dim, seed: self.data.seed }
    }

    /// Features of z.
    pub(crate) fn latent(&self) -> usize {
        self.o_groups * self.o_lora_rank
    }

    pub(crate) fn group_width(&self) -> usize {
        self.num_heads / self.o_groups.max(1) * self.head_dim
    }

    fn of_the_output(&self) -> inverse_rope_quantize::Options {
        let scale = inverse_rope_quantize::ScaleType::E8m0;
        inverse_rope_quantize::Options { o_groups: self.o_groups, scale, layout: self.layout }
    }
}

impl Operator for OutputProjection {
    type Case = OutputProjectionCase;

    const ABOUT: About = About {
        name: NAME,
        family: Family::Projections,
        summary: "the inverse rope of the attention's output, grouped wo_a and wo_b, in bf16 with gradients or FP8",
        specification: &["inference 9", "training 8", "training 14"],
        paths: &[
            "rope_forward",
            "rope_forward_scalar",
            "linear_forward_large",
            "linear_forward_one",
            "linear_forward_small",
            "linear_forward_scalar",
            "linear_sum",
            "inverse_rope_quantize_vector",
            "inverse_rope_quantize_scalar",
            "quantize_fp8_vector",
            "quantize_fp8_scalar",
            "linear_quantized_large<fp8>",
            "linear_quantized_small<fp8>",
            "linear_quantized_scalar<fp8>",
            "linear_quantized_sum<fp8>",
            "backward linear_dx_large",
            "backward linear_dx_small",
            "backward linear_dx_scalar",
            "backward linear_dw_large",
            "backward linear_dw_scalar",
            "backward linear_sum",
            "backward rope_forward",
            "backward rope_forward_scalar",
        ],
        modules: Vec::new,
        cases: [8, 20, 40],
    };

    const CHAIN: &'static [&'static str] =
        &["rope", "inverse_rope_quantize", "linear", "quantize_fp8"];

    const GOLDEN: &'static [&'static str] = &["o_proj"];

    fn tensors(c: &OutputProjectionCase) -> Specs {
        let none = c.quantized == Quantized::None;
        let both = c.quantized == Quantized::Both;
        let (bf16, f32, u8, normal) = (DType::Bf16, DType::F32, DType::U8, Distribution::Normal);
        let (tokens, groups) = (axis("num_tokens", c.num_tokens), axis("o_groups", c.o_groups));
        let (heads, channels) =
            (axis("num_heads", c.num_heads), axis("head_dim", c.head_dim).not_empty());
        let (all, width) =
            (axis("all_channels", c.num_heads * c.head_dim), axis("group_width", c.group_width()));
        let (rank, latent) =
            (axis("o_lora_rank", c.o_lora_rank).not_empty(), axis("latent", c.latent()));
        let hidden = axis("hidden_size", c.hidden_size).not_empty();
        let blocks = |name, extent: usize| axis(name, extent.div_ceil(BLOCK));
        let of_z = blocks("z_blocks", c.latent());
        let wo_a_scales =
            [groups, blocks("rank_blocks", c.o_lora_rank), blocks("width_blocks", c.group_width())];
        let (scale_dtype, scale_axes) =
            c.of_the_output().scale_tensor(c.num_tokens, c.group_width());
        let scale_axes: Vec<Axis> =
            scale_axes.into_iter().map(|(name, extent)| axis(name, extent)).collect();
        // For columns of values of magnitude 1: the result has that magnitude too.
        let deviation = |depth: usize| (depth.max(1) as f64).sqrt().recip();
        let [cos, sin, positions] = c.turning().tensors();
        let tensors = [
            input("attn_out", bf16, &[tokens, heads, channels]).rows().drawn_as(c.data),
            cos,
            sin,
            positions,
            input("wo_a", bf16, &[groups, rank, width])
                .rows()
                .drawn(normal, deviation(c.group_width()))
                .when(!both),
            input("wo_b", bf16, &[hidden, latent])
                .rows()
                .drawn(normal, deviation(c.latent()))
                .when(none),
            input("wo_a_codes", u8, &[groups, rank, width]).rows().when(both),
            input("wo_a_scales", u8, &wo_a_scales).when(both),
            input("wo_b_codes", u8, &[hidden, latent]).rows().when(!none),
            input("wo_b_scales", u8, &[blocks("hidden_blocks", c.hidden_size), of_z]).when(!none),
            output("rotated", bf16, &[tokens, all]).rows().when(!both),
            output("codes", u8, &[tokens, groups, width]).rows().exact().when(both),
            output("scales", scale_dtype, &scale_axes).exact().when(both),
            output("z", bf16, &[tokens, latent]).rows(),
            scratch("z_codes", u8, &[tokens, latent]).when(!none),
            scratch("z_scales", u8, &[tokens, of_z]).when(!none),
            output("y", bf16, &[tokens, hidden]).rows(),
            upstream("dy", "y").stored_in(bf16).when(none),
            gradient("dz", "z", bf16).when(none),
            gradient("dwo_b", "wo_b", f32),
            gradient("drotated", "rotated", bf16).when(none),
            gradient("dwo_a", "wo_a", f32).when(none),
            gradient("dattn_out", "attn_out", bf16).when(none),
        ];
        Specs::new(c.data.seed, tensors)
    }

    fn check(c: &OutputProjectionCase) -> Result<(), Refused> {
        check_groups(c.o_groups, c.num_heads)?;
        check_rope_dim(c.rope_dim, c.head_dim)?;
        let both = c.quantized == Quantized::Both;
        if both && !c.head_dim.is_multiple_of(inverse_rope_quantize::GROUP) {
            return refuse(
                "head_dim",
                format!("{} must be a multiple of 128 to be quantized", c.head_dim),
            );
        }
        if !both && c.layout != ScaleLayout::Plain {
            return refuse(
                "layout",
                "the rotated output has scales where both weights are quantized",
            );
        }
        c.turning().check()?;
        c.data.check()
    }

    /// Products of every token with every weight, and the decoded weights, are in no tensor.
    fn oracle_elements(c: &OutputProjectionCase) -> u128 {
        4 * c.latent() as u128 * (c.group_width() + c.hidden_size) as u128
    }

    fn strategy(profile: Profile) -> BoxedStrategy<OutputProjectionCase> {
        let [tokens, features] = profile.of([[12, 60], [40, 150], [200, 600]]);
        let heads = (1..=profile.of([3usize, 4, 8]), 1..=profile.of([3usize, 4, 8]));
        let head =
            (1..=16usize, 0..=24usize).prop_map(|(half, copied)| (2 * half + copied, 2 * half));
        let quantized =
            select(vec![Quantized::None, Quantized::None, Quantized::WoB, Quantized::Both]);
        let layout = select(vec![ScaleLayout::Plain, ScaleLayout::MnMajor, ScaleLayout::Blocked]);
        let table = select(vec![TableForm::RowPerToken, TableForm::Positions]);
        let features = (extent(features, 8), extent(features, 8));
        (
            0..=tokens,
            heads,
            head,
            features,
            (table, 1..100usize),
            (quantized, layout),
            Data::strategy(-8..=8),
        )
            .prop_map(
                |(
                    num_tokens,
                    (per_group, o_groups),
                    head,
                    (rank, hidden),
                    (table, rows),
                    format,
                    data,
                )| {
                    let (quantized, layout) = format;
                    let both = quantized == Quantized::Both;
                    let (head_dim, rope_dim) = if both { (128, 64) } else { head };
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    let layout = if both { layout } else { ScaleLayout::Plain };
                    let extents = [per_group * o_groups, head_dim, o_groups, rank, hidden];
                    let plain = plain(num_tokens, extents);
                    OutputProjectionCase {
                        rope_dim,
                        table,
                        table_rows,
                        quantized,
                        layout,
                        data,
                        ..plain
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<OutputProjectionCase> {
        let positions =
            |case| OutputProjectionCase { table: TableForm::Positions, table_rows: 9, ..case };
        let of = |quantized| move |case| OutputProjectionCase { quantized, ..case };
        vec![
            plain(5, [4, 16, 2, 8, 24]).then(positions),
            // Rows that are not multiples of 16 bytes.
            plain(3, [3, 10, 3, 5, 7]),
            plain(5, [4, 128, 2, 16, 24]).then(positions).then(of(Quantized::Both)),
        ]
    }

    fn edge_cases(profile: Profile) -> Vec<OutputProjectionCase> {
        let of = |quantized| move |case| OutputProjectionCase { quantized, ..case };
        let in_layout = |layout| move |case| OutputProjectionCase { layout, ..case };
        let (mn, tiles) = (ScaleLayout::MnMajor, ScaleLayout::Blocked);
        let mut cases = vec![
            plain(0, [4, 16, 2, 8, 24]),
            plain(0, [2, 128, 2, 8, 24]).then(of(Quantized::Both)),
            plain(1, [1, 8, 1, 8, 8]),
            // Split-k in both GEMMs; a single token.
            plain(1, [1, 584, 1, 584, 8]),
            plain(2, [1, 584, 1, 584, 8]),
            // More tokens than small tiles have, more groups than heads in one.
            plain(18, [6, 16, 3, 24, 40]),
            plain(11, [2, 8, 2, 8, 16]).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 5;
            }),
            plain(5, [4, 16, 2, 72, 24]).then(of(Quantized::WoB)),
            plain(3, [2, 12, 1, 131, 9]).then(of(Quantized::WoB)),
            plain(18, [2, 8, 1, 32, 24]).then(of(Quantized::WoB)),
            plain(5, [6, 128, 3, 48, 24]).then(of(Quantized::Both)).then(in_layout(mn)),
            plain(3, [2, 256, 2, 130, 24]).then(of(Quantized::Both)).then(in_layout(tiles)),
        ];
        if profile == Profile::Full {
            let model = |num_tokens| {
                plain(num_tokens, [16, 512, 2, 256, 512]).with(|case| case.rope_dim = 64)
            };
            cases.extend([
                model(1),
                model(70),
                model(30).then(of(Quantized::WoB)),
                model(70).then(of(Quantized::Both)),
            ]);
        }
        cases
    }

    fn amend(c: &OutputProjectionCase, tensors: &mut Tensors) -> OracleResult<()> {
        c.turning().amend(tensors)?;
        if c.quantized != Quantized::None {
            SECOND.set_weight(c.data.seed, tensors, [c.hidden_size, c.latent()])?;
        }
        if c.quantized == Quantized::Both {
            set_weight(
                c.data.seed,
                tensors,
                ["wo_a_codes", "wo_a_scales"],
                [c.o_groups, c.o_lora_rank, c.group_width()],
            )?;
        }
        Ok(())
    }

    fn forward(
        c: &OutputProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        let rotation = turned_by(t, t.f64("attn_out")?, true)?;
        if c.quantized == Quantized::None {
            return reference::forward(&rotation, &named(t)?, rounding);
        }
        reference::forward_quantized(&rotation, &named(t)?, layout_of_oracle(c.layout), rounding)
    }

    fn backward(
        c: &OutputProjectionCase,
        t: &Bound<'_>,
        rounding: &mut Rounding,
    ) -> OracleResult<Named> {
        if c.quantized != Quantized::None {
            return Ok(Named::new());
        }
        reference::backward(&turned_by(t, t.f64("attn_out")?, true)?, &named(t)?, rounding)
    }

    /// Sequential tensors may share memory: launches have one order.
    fn workspaces(
        c: &OutputProjectionCase,
        _: &Views,
        device: &Device,
    ) -> Result<Vec<(&'static str, usize)>, RuntimeError> {
        let (tokens, first, second) =
            (c.num_tokens, [c.o_lora_rank, c.group_width()], [c.hidden_size, c.latent()]);
        let whole = |groups: usize, [outs, ins]: [usize; 2]| {
            let forward = linear::forward_workspace_bytes(device, groups, tokens, outs, ins);
            forward.max(linear::backward_workspace_bytes(device, groups, tokens, outs, ins))
        };
        let coded =
            |[outs, ins]: [usize; 2]| linear::quantized_workspace_bytes(device, tokens, outs, ins);
        let bytes = [whole(c.o_groups, first), whole(1, second), coded(first), coded(second)];
        Ok(vec![("workspace", bytes.into_iter().max().unwrap_or(0))])
    }

    fn launch(
        c: &OutputProjectionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if c.quantized == Quantized::Both {
            quantized_groups(c, v, run)?;
        } else {
            let rotated = parted(NAME, "rotated", &v["rotated"], c.num_heads)?;
            let rotation =
                v.only(&["attn_out", "cos", "sin", "positions"]).renamed(&[("attn_out", "x")]);
            run.launch(|device| rope::forward(device, &rotation.with("y", &rotated), true))?;
            run.freeze(&v["rotated"])?;
            let first = groups(c, v, &["wo_a", "workspace"])?.renamed(&[
                ("wo_a", "w"),
                ("rotated", "x"),
                ("z", "y"),
            ]);
            run.launch(|device| linear::grouped_forward(device, &first, linear::Products::Own))?;
        }
        run.freeze(&v["z"])?;
        SECOND.launch(v, run, c.quantized != Quantized::None)
    }

    fn launch_backward(
        c: &OutputProjectionCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        if c.quantized != Quantized::None {
            return Ok(());
        }
        let mut ran = SECOND.backward(v, run.device())?;
        run.freeze(&v["dz"])?;
        let names =
            [("rotated", "x"), ("wo_a", "w"), ("dz", "dy"), ("drotated", "dx"), ("dwo_a", "dw")];
        let first = groups(c, v, &["wo_a", "dwo_a", "workspace"])?.without(&["z"]).renamed(&names);
        ran.extend(linear::grouped_backward(run.device(), &first, linear::Products::Own)?);
        run.freeze(&v["drotated"])?;
        let drotated = parted(NAME, "drotated", &v["drotated"], c.num_heads)?;
        let rotation =
            v.only(&["dattn_out", "cos", "sin", "positions"]).renamed(&[("dattn_out", "y")]);
        ran.push(rope::backward(run.device(), &rotation.with("x", &drotated), true)?);
        run.ran_backward(ran);
        Ok(())
    }

    fn invariant(_: &OutputProjectionCase, path: bool) -> &'static [BatchAxis] {
        if path { BatchAxis::OF_ROWS } else { &[] }
    }

    fn laws(c: &OutputProjectionCase, laws: &mut Laws<'_, Self>) {
        if c.quantized == Quantized::None {
            laws.scale_upstreams();
        }
        if c.layout == ScaleLayout::Plain {
            laws.separate("num_tokens", "tokens may be permuted");
        }
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist.
    fn is_smooth(c: &OutputProjectionCase) -> bool {
        let elements = c.num_tokens * c.num_heads * c.head_dim
            + c.latent() * (c.group_width() + c.hidden_size);
        c.quantized == Quantized::None && c.table != TableForm::HostilePositions && elements <= 4096
    }

    /// The two GEMMs: the file's output is already rotated back.
    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<OutputProjectionCase>>, String> {
        let (heads, rows) = (["..tokens", "heads", "channels"], ["..tokens", "hidden"]);
        let (first, second) = (["latent", "width"], ["hidden", "latent"]);
        let x = file.floats("in.attn_out", &heads)?.to_vec();
        file.floats("out.y", &rows)?;
        let [o_groups, o_lora_rank] = [file.whole("o_groups")?, file.whole("o_lora_rank")?];
        let [tokens, heads_of_all, channels, hidden] = [
            file.extent("tokens")?,
            file.extent("heads")?,
            file.extent("channels")?,
            file.extent("hidden")?,
        ];
        file.hold("latent", o_groups * o_lora_rank, "config o_groups and o_lora_rank")?;
        let rope_dim = 2;
        let plain = plain(tokens, [heads_of_all, channels, o_groups, o_lora_rank, hidden]);
        let golden = Golden::new(OutputProjectionCase { rope_dim, ..plain }).values("attn_out", x);
        let golden = golden.values("cos", vec![1.0; tokens]).values("sin", vec![0.0; tokens]);
        let [a, b] = ["o_a_proj", "o_b_proj"].map(|name| format!("param.self_attn.{name}.weight"));
        let golden = golden.stored(file, "wo_a", &a, &first)?.stored(file, "wo_b", &b, &second)?;
        let golden = golden.stored(file, "dy", "gout.y", &rows)?;
        let golden = golden.expect(file, "z", "mid.o_a_out", &["..tokens", "groups", "rank"])?;
        let golden = golden.expect(file, "y", "out.y", &rows)?;
        let golden = golden.expect(file, "dwo_a", &format!("grad.{a}"), &first)?;
        let golden = golden.expect(file, "dwo_b", &format!("grad.{b}"), &second)?;
        Ok(vec![golden.expect(file, "dattn_out", "grad.in.attn_out", &heads)?])
    }
}

/// The oracle's inputs in addition to the rotation.
fn named(t: &Bound<'_>) -> OracleResult<Named> {
    let names = ["wo_a", "wo_b", "wo_a_codes", "wo_a_scales", "wo_b_codes", "wo_b_scales", "dy"];
    names.into_iter().try_fold(Named::new(), |all, name| Ok(all.maybe(name, t.maybe(name)?)))
}

/// The tensors of these names, with rows split into groups: the rotated output, z, and their
/// gradients if present.
fn groups(
    c: &OutputProjectionCase,
    v: &Views,
    names: &[&'static str],
) -> Result<Views, RuntimeError> {
    let of_rows = ["rotated", "z", "dz", "drotated"];
    let backward = names.contains(&"dwo_a");
    let taken = of_rows.into_iter().filter(|name| backward || ["rotated", "z"].contains(name));
    taken
        .filter_map(|name| Some((name, v.get(name)?)))
        .try_fold(v.only(names), |all, (name, view)| {
            Ok(all.with(name, &parted(NAME, name, view, c.o_groups)?))
        })
}

/// The output rotated back and quantized in one pass, and z from its codes, one GEMM for each
/// group.
fn quantized_groups(
    c: &OutputProjectionCase,
    v: &Views,
    run: &mut Launches<'_>,
) -> Result<(), RuntimeError> {
    let names = ["attn_out", "cos", "sin", "positions", "codes", "scales"];
    let rotation = v.only(&names).renamed(&[("attn_out", "x")]);
    run.launch(|device| inverse_rope_quantize::forward(device, &rotation, c.of_the_output()))?;
    run.freeze(&v["codes"])?;
    run.freeze(&v["scales"])?;
    let z = parted(NAME, "z", &v["z"], c.o_groups)?;
    for group in 0..c.o_groups {
        let views = v.only(&["workspace"]).with("y", &z.entry(1, group)?);
        let views = views
            .with("x", &v["codes"].entry(1, group)?)
            .with("x_scales", &v["scales"].entry(0, group)?);
        let views = views.with("w", &v["wo_a_codes"].entry(0, group)?);
        let views = views.with("w_scales", &v["wo_a_scales"].entry(0, group)?);
        run.launch(|device| linear::forward_quantized(device, &views, of_codes(c.layout)))?;
    }
    Ok(())
}
