//! `rope` (inference 4, training 8): `kernels/cuda/projections/rope.cu` against
//! `reference/src/projections/rope.rs`.

use dsv4_kernels::projections::rope as launcher;
use dsv4_reference::projections::rope as reference;
use dsv4_reference::projections::rope::YarnParameters;
use rand::Rng;

use crate::case::Draw;
use crate::operator::declaration::TensorSpec;
use crate::operator::fields::{LARGEST_DRAWN, elements, extent, magnitude};
use crate::operator::prelude::*;
use crate::operators::lists::Hostile;

/// Longest context of the model: positions up to this one are tested.
const LAST_POSITION: i64 = 1_048_575;

/// The operator.
pub struct Rope;

/// The frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Frequencies {
    /// Base 10000, no YaRN.
    Main,
    /// Base 160000 with YaRN.
    Compress,
}

/// How tokens select their table rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableForm {
    /// One table row for each token, at positions up to the model's last.
    RowPerToken,
    /// A table of all positions up to a bound, and a position for each token.
    Positions,
    /// The same, but some positions are negative or beyond the table.
    HostilePositions,
}

/// Where the rows of a table of [`Turning`] are: far from position 0, which has no rotation, and
/// not a power of two apart.
const FIRST_POSITION: i64 = 4093;
const POSITION_STEP: i64 = 37;

/// The table that an operator uses to rotate its tokens, with the compressed layers' frequencies,
/// and the positions of the tokens.
pub(crate) struct Turning {
    pub form: TableForm,
    /// Rows of the table, if positions are given.
    pub table_rows: usize,
    pub num_tokens: usize,
    pub rope_dim: usize,
    pub seed: u64,
}

impl Turning {
    /// `cos`, `sin` and `positions`.
    pub fn tensors(&self) -> [TensorSpec; 3] {
        let tokens = axis("num_tokens", self.num_tokens);
        let rows = if self.form == TableForm::RowPerToken {
            tokens
        } else {
            axis("table_rows", self.table_rows)
        };
        let table = [rows, axis("half_rope_dim", self.rope_dim / 2)];
        [
            input("cos", DType::F32, &table).rows(),
            input("sin", DType::F32, &table).rows(),
            input("positions", DType::I32, &[tokens]).when(self.form != TableForm::RowPerToken),
        ]
    }

    /// Whether such a table is valid.
    pub fn check(&self) -> Result<(), Refused> {
        if self.form != TableForm::RowPerToken && !(1..=1 << 20).contains(&self.table_rows) {
            return refuse(
                "table_rows",
                format!("{}: a table with positions has 1 to 2^20 rows", self.table_rows),
            );
        }
        Ok(())
    }

    /// Sets the table, rounded as a kernel stores it, and the positions.
    pub fn amend(&self, tensors: &mut Tensors) -> OracleResult<()> {
        let rows =
            if self.form == TableForm::RowPerToken { self.num_tokens } else { self.table_rows };
        let positions: Vec<i64> =
            (0..rows as i64).map(|row| FIRST_POSITION + POSITION_STEP * row).collect();
        let yarn = YarnParameters { rope_dim: self.rope_dim, ..YarnParameters::compress() };
        let (cos, sin) = reference::table(&reference::inv_freq_f32(&yarn)?, &positions)?;
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        if self.form != TableForm::RowPerToken {
            tensors.set_i32s("positions", &self.positions());
        }
        Ok(())
    }

    /// A row of the table for each token. For hostile positions, every third token has none.
    fn positions(&self) -> Vec<i32> {
        let mut draw = Draw::new(self.seed, "positions");
        let rows = self.table_rows as i32;
        let mut hostile = Hostile::new(self.seed, "positions", &[-1, rows, i32::MIN, i32::MAX]);
        (0..self.num_tokens)
            .map(|token| match (self.form, token % 3) {
                (TableForm::HostilePositions, 1) => hostile.take(),
                _ => draw.rng().random_range(0..rows),
            })
            .collect()
    }
}

/// The inputs for the rotation of `x` by the tensors of [`Turning`].
pub(crate) fn turned_by(
    t: &Bound<'_>,
    x: candle_core::Tensor,
    inverse: bool,
) -> OracleResult<dsv4_reference::projections::rope::Inputs> {
    Ok(reference::Inputs {
        x,
        cos: t.f64("cos")?,
        sin: t.f64("sin")?,
        positions: positions_of(t),
        inverse,
    })
}

/// Each token's row of the table of [`Turning`]. `None` means the token's own index.
pub(crate) fn positions_of(t: &Bound<'_>) -> Option<Vec<i64>> {
    t.host().maybe_i32s("positions").map(|list| list.into_iter().map(i64::from).collect())
}

/// A case: sizes, types, table, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeCase {
    /// Tokens; 0 is allowed.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Channels that rotate: the last ones. Even, at least 2.
    pub rope_dim: usize,
    /// Type of x and y.
    pub dtype: Float,
    /// Rotate backwards.
    pub inverse: bool,
    /// Frequencies.
    pub frequencies: Frequencies,
    /// How tokens select their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Where y is stored.
    pub aliasing: Aliasing,
    /// Distribution of x.
    pub distribution: Distribution,
    /// Scale of x.
    pub magnitude: f64,
    /// Seed of the data.
    pub seed: u64,
}

impl RopeCase {
    fn plain(num_tokens: usize, num_heads: usize, head_dim: usize, rope_dim: usize) -> Self {
        Self {
            num_tokens,
            num_heads,
            head_dim,
            rope_dim,
            dtype: Float::Bf16,
            inverse: false,
            frequencies: Frequencies::Compress,
            table: TableForm::RowPerToken,
            table_rows: 0,
            aliasing: Aliasing::OutOfPlace,
            distribution: Distribution::Normal,
            magnitude: 1.0,
            seed: 1,
        }
    }

    fn yarn(&self) -> YarnParameters {
        let yarn = match self.frequencies {
            Frequencies::Main => YarnParameters::main(),
            Frequencies::Compress => YarnParameters::compress(),
        };
        YarnParameters { rope_dim: self.rope_dim, ..yarn }
    }

    /// The axis of the table's rows: tokens, if each has its own row.
    fn table_axis(&self) -> (&'static str, usize) {
        match self.table {
            TableForm::RowPerToken => ("num_tokens", self.num_tokens),
            _ => ("table_rows", self.table_rows),
        }
    }
}

fn inputs(c: &RopeCase, t: &Bound<'_>) -> OracleResult<reference::Inputs> {
    turned_by(t, t.f64("x")?, c.inverse)
}

/// cos and sin of the rows at these positions, before rounding to f32.
fn table(
    inv_freq: &[f64],
    positions: &[i32],
) -> OracleResult<(candle_core::Tensor, candle_core::Tensor)> {
    let inv_freq: Vec<f32> = inv_freq.iter().map(|&frequency| frequency as f32).collect();
    let positions: Vec<i64> = positions.iter().map(|&position| i64::from(position)).collect();
    reference::table(&inv_freq, &positions)
}

impl Operator for Rope {
    type Case = RopeCase;

    const ABOUT: About = About {
        name: "rope",
        family: Family::Projections,
        summary: "rotates the last channels of each head by position, in adjacent pairs; builds the tables",
        specification: &["inference 4", "training 8"],
        paths: &[
            "rope_forward",
            "rope_forward_scalar",
            "backward rope_forward",
            "backward rope_forward_scalar",
            "rope_table",
        ],
        modules: launcher::modules,
        cases: [24, 60, 120],
    };

    const GOLDEN: &'static [&'static str] = &["rotary", "rope_table"];

    fn tensors(c: &RopeCase) -> Specs {
        let (dtype, half) = (c.dtype.dtype(), axis("half_rope_dim", c.rope_dim / 2));
        let heads = [
            axis("num_tokens", c.num_tokens),
            axis("num_heads", c.num_heads),
            axis("head_dim", c.head_dim),
        ];
        let (row, rows) = c.table_axis();
        let (table, computed) = ([axis(row, rows), half], [axis("num_positions", rows), half]);
        Specs::new(
            c.seed,
            [
                input("x", dtype, &heads)
                    .rows()
                    .of_any_size()
                    .drawn(c.distribution, c.magnitude)
                    .only_in("rotation"),
                input("cos", DType::F32, &table).rows().of_any_size().only_in("rotation"),
                input("sin", DType::F32, &table).rows().of_any_size().only_in("rotation"),
                input("positions", DType::I32, &heads[..1])
                    .when(c.table != TableForm::RowPerToken)
                    .only_in("rotation"),
                input("inv_freq", DType::F32, &[half]).only_in("table"),
                input("table_positions", DType::I32, &computed[..1])
                    .argument("positions")
                    .only_in("table"),
                output("y", dtype, &heads).rows().placed(c.aliasing, "x").only_in("rotation"),
                output("table_cos", DType::F32, &computed).argument("cos").only_in("table"),
                output("table_sin", DType::F32, &computed).argument("sin").only_in("table"),
                upstream("dy", "y").drawn(c.distribution, 1.0).argument("x").only_in("backward"),
                gradient("dx", "x", dtype).argument("y").may_be("dy").only_in("backward"),
            ],
        )
    }

    fn check(c: &RopeCase) -> Result<(), Refused> {
        if c.rope_dim < 2 || !c.rope_dim.is_multiple_of(2) || c.rope_dim > c.head_dim {
            return refuse(
                "rope_dim",
                format!("{} must be even, 2 to head_dim {}", c.rope_dim, c.head_dim),
            );
        }
        if c.table != TableForm::RowPerToken && !(1..=1 << 24).contains(&c.table_rows) {
            return refuse(
                "table_rows",
                format!("{}: a table with positions has 1 to 2^24 rows", c.table_rows),
            );
        }
        Ok(())
    }

    fn strategy(profile: Profile) -> BoxedStrategy<RopeCase> {
        let (tokens, heads): (usize, usize) = match profile {
            Profile::Smoke | Profile::Quick => (20, 12),
            Profile::Ci => (40, 40),
            Profile::Full => (300, 130),
        };
        let head = prop_oneof![
            2 => Just((512usize, 64usize)),
            1 => Just((128, 64)),
            1 => Just((576, 64)),
            4 => (1..=20usize, 0..=41usize).prop_map(|(half, copied)| (2 * half + copied, 2 * half)),
        ];
        let shape = (0..=tokens, extent(heads, 8), head);
        let float = prop_oneof![2 => Just(Float::Bf16), 1 => Just(Float::F32)];
        let frequencies = prop_oneof![Just(Frequencies::Main), Just(Frequencies::Compress)];
        let table = prop_oneof![
            Just(TableForm::RowPerToken),
            Just(TableForm::Positions),
            Just(TableForm::HostilePositions)
        ];
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 2 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let rotation = (any::<bool>(), frequencies, table, 1..700usize);
        let data =
            (prop::sample::select(Distribution::ALL.to_vec()), magnitude(-18..=18), 0..1000u64);
        (shape, float, rotation, aliasing, data)
            .prop_map(
                |(
                    (num_tokens, num_heads, (head_dim, rope_dim)),
                    dtype,
                    rotation,
                    aliasing,
                    data,
                )| {
                    let (inverse, frequencies, table, rows) = rotation;
                    let (distribution, magnitude, seed) = data;
                    let num_tokens =
                        num_tokens.min((LARGEST_DRAWN / (num_heads * head_dim)).max(1));
                    let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                    RopeCase {
                        dtype,
                        inverse,
                        frequencies,
                        table,
                        table_rows,
                        aliasing,
                        distribution,
                        magnitude,
                        seed,
                        ..RopeCase::plain(num_tokens, num_heads, head_dim, rope_dim)
                    }
                },
            )
            .boxed()
    }

    fn typical() -> Vec<RopeCase> {
        let positions = RopeCase::plain(4, 3, 128, 64).with(|case| {
            case.table = TableForm::Positions;
            case.table_rows = 50;
        });
        // Rows of the last one are not multiples of 16 bytes: the scalar kernel's.
        vec![RopeCase::plain(3, 5, 24, 16), positions, RopeCase::plain(3, 2, 21, 6)]
    }

    fn edge_cases(profile: Profile) -> Vec<RopeCase> {
        let plain = RopeCase::plain;
        let mut cases = vec![
            plain(0, 3, 40, 16),
            plain(5, 9, 512, 64).with(|case| case.aliasing = Aliasing::InPlace),
            plain(3, 2, 24, 24).with(|case| {
                case.inverse = true;
                case.dtype = Float::F32;
            }),
            plain(17, 3, 128, 64).with(|case| {
                case.table = TableForm::HostilePositions;
                case.table_rows = 50;
            }),
            plain(9, 2, 12, 2).with(|case| {
                case.table = TableForm::Positions;
                case.table_rows = 1 << 20;
                case.frequencies = Frequencies::Main;
            }),
            // The scalar kernel with more heads than a block processes at a time, each of which it
            // must rotate only once.
            plain(2, 17, 261, 260).with(|case| case.aliasing = Aliasing::InPlace),
            // The scalar kernel with one head, and threads beyond the last token.
            plain(15, 1, 21, 6).with(|case| {
                case.table = TableForm::Positions;
                case.table_rows = 50;
            }),
            // Enough tokens for the largest number of heads for each thread, by either kernel; the
            // last thread has one head less.
            plain(80, 15, 64, 16),
            plain(40, 15, 21, 6),
        ];
        if profile == Profile::Full {
            cases.extend([
                plain(64, 128, 512, 64),
                plain(128, 64, 512, 64).with(|case| case.inverse = true),
            ]);
        }
        cases
    }

    fn amend(c: &RopeCase, tensors: &mut Tensors) -> OracleResult<()> {
        let inv_freq: Vec<f64> =
            reference::inv_freq_f32(&c.yarn())?.into_iter().map(f64::from).collect();
        let rows = match c.table {
            TableForm::RowPerToken => far_positions(c),
            _ => {
                tensors.set_i32s("positions", &positions(c));
                (0..c.table_rows as i32).collect()
            }
        };
        let (cos, sin) = table(&inv_freq, &rows)?;
        tensors.set("inv_freq", &inv_freq);
        tensors.set_i32s("table_positions", &rows);
        // Rounded as a kernel stores them.
        tensors.set("cos", &elements(&cos)?);
        tensors.set("sin", &elements(&sin)?);
        Ok(())
    }

    fn forward(c: &RopeCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        let y = reference::forward(&inputs(c, t)?, rounding)?.y;
        let (cos, sin) = table(&t.host().values("inv_freq"), &t.host().i32s("table_positions"))?;
        // The table is stored in f32. It is computed with a function that is accurate to one f32
        // rounding.
        let (cos, sin) = (rounding.f32(&cos)?, rounding.f32(&sin)?);
        Ok(Named::new().with("y", y).with("table_cos", cos).with("table_sin", sin))
    }

    fn backward(c: &RopeCase, t: &Bound<'_>, rounding: &mut Rounding) -> OracleResult<Named> {
        Ok(Named::new()
            .with("dx", reference::backward(&inputs(c, t)?, &t.f64("dy")?, rounding)?.dx))
    }

    fn launch(c: &RopeCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
        rotate(c, v, run)?;
        let table = v.only(&["inv_freq", "table_positions", "table_cos", "table_sin"]);
        let table = table.renamed(&[
            ("table_positions", "positions"),
            ("table_cos", "cos"),
            ("table_sin", "sin"),
        ]);
        run.launch(|device| launcher::table(device, &table))
    }

    fn launch_backward(
        c: &RopeCase,
        v: &Views,
        run: &mut Launches<'_>,
    ) -> Result<(), RuntimeError> {
        let gradient =
            v.only(&["dy", "dx", "cos", "sin", "positions"]).renamed(&[("dy", "x"), ("dx", "y")]);
        run.ran(format!("backward {}", launcher::backward(run.device(), &gradient, c.inverse)?));
        Ok(())
    }

    fn invariant(_: &RopeCase, _: bool) -> &'static [BatchAxis] {
        BatchAxis::OF_ROWS
    }

    fn batches(c: &RopeCase, batches: &mut Batches<'_, Self>) {
        batches.rows_with("num_tokens", |tensors, cut| {
            // A table with a row for each token is computed for these tokens.
            if c.table != TableForm::RowPerToken {
                return Vec::new();
            }
            let positions = tensors.i32s("table_positions");
            let of_cut: Vec<i32> = cut.order.iter().map(|&row| positions[row]).collect();
            tensors.put("table_positions", HostTensor::from_i32(&[of_cut.len()], &of_cut));
            let computed = |name| Same::along(name, 0, &cut.pairs());
            vec![computed("table_cos"), computed("table_sin")]
        });
    }

    fn laws(_: &RopeCase, laws: &mut Laws<'_, Self>) {
        laws.scale("x scales y once", "x", 8.0, &[("y", 8.0), ("dx", 1.0)]);
        laws.separate("num_tokens", "tokens may be permuted");
    }

    /// Tokens with a hostile position have NaN outputs, so finite differences do not exist.
    fn is_smooth(c: &RopeCase) -> bool {
        c.num_tokens * c.num_heads * c.head_dim <= 4096 && c.table != TableForm::HostilePositions
    }

    fn golden(file: &mut Reading<'_>) -> Result<Vec<Golden<RopeCase>>, String> {
        match file.kind() {
            "rotary" => {
                [false, true].into_iter().map(|inverse| rotary_case(file, inverse)).collect()
            }
            "rope_table" => {
                ["main", "compress"].into_iter().map(|table| table_case(file, table)).collect()
            }
            other => Err(format!("{other} is about something else")),
        }
    }

    /// The rotation of the query heads of 16384 tokens, without building the tables.
    fn benchmarks(environment: &Environment) -> Vec<Benchmark<Self>> {
        let gpu = on_gpu(environment);
        let plain = if gpu {
            RopeCase::plain(16384, 128, 512, 64)
        } else {
            RopeCase::plain(16, 16, 512, 64)
        };
        let in_place = RopeCase { aliasing: Aliasing::InPlace, ..plain.clone() };
        let inverse = RopeCase { inverse: true, ..plain.clone() };
        let benchmark = |case: RopeCase| {
            let RopeCase { num_tokens, num_heads, head_dim, rope_dim, .. } = case;
            let turns_in_place = case.aliasing == Aliasing::InPlace;
            // Reads and writes everything, or in place only the channels that rotate, and reads the
            // tables. Six operations for each pair.
            let (heads, channels) =
                (num_tokens * num_heads, if turns_in_place { rope_dim } else { head_dim });
            let suffix = match (case.inverse, turns_in_place) {
                (true, _) => " inverse",
                (_, true) => " in place",
                _ => "",
            };
            let name = format!("{num_tokens}x{num_heads}x{head_dim} bf16{suffix}");
            Benchmark {
                bytes: (4 * heads * channels + 4 * num_tokens * rope_dim) as f64,
                flops: (3 * heads * rope_dim) as f64,
                only: Some("rotation"),
                call: rotate,
                ..Benchmark::new(Direction::Forward, name, case, "num_tokens")
            }
        };
        let decode = [1, 128].map(|num_tokens| RopeCase { num_tokens, ..in_place.clone() });
        let decode = decode.into_iter().filter(|_| gpu);
        [Some(plain), gpu.then_some(inverse), Some(in_place)]
            .into_iter()
            .flatten()
            .chain(decode)
            .map(benchmark)
            .collect()
    }

    fn reduced_benchmarks() -> Vec<Reduced> {
        vec![Reduced::forward(
            &["16384x128x512 bf16", "16384x128x512 bf16 inverse", "16384x128x512 bf16 in place"],
            json!({"num_tokens": 11, "num_heads": 3}),
            json!({"num_tokens": 2}),
        )]
    }
}

/// Only the rotation of x.
fn rotate(c: &RopeCase, v: &Views, run: &mut Launches<'_>) -> Result<(), RuntimeError> {
    let rotation = v.only(&["x", "y", "cos", "sin", "positions"]);
    run.launch(|device| launcher::forward(device, &rotation, c.inverse))
}

fn positions(case: &RopeCase) -> Vec<i32> {
    let mut draw = Draw::new(case.seed, "positions");
    let rows = case.table_rows as i32;
    let values = [-1, rows, rows + 7, i32::MIN, i32::MAX];
    let mut hostile = Hostile::new(case.seed, "positions", &values);
    (0..case.num_tokens)
        .map(|token| {
            let position = draw.rng().random_range(0..rows);
            match case.table {
                TableForm::HostilePositions if draw.rng().random_ratio(1, 3) => hostile.take(),
                // The ends of the table, where an off-by-one error would show.
                _ if token == 0 => rows - 1,
                _ if token == 1 => 0,
                _ => position,
            }
        })
        .collect()
}

/// Positions over the whole context, log-uniform, the last one among them.
fn far_positions(case: &RopeCase) -> Vec<i32> {
    let mut draw = Draw::new(case.seed, "far positions");
    (0..case.num_tokens)
        .map(|token| match token {
            0 => LAST_POSITION as i32,
            1 => 0,
            _ => (2f64.powf(draw.rng().random_range(0.0..20.0)) as i64).min(LAST_POSITION) as i32,
        })
        .collect()
}

/// `[batch, heads, tokens, channels]` as `[batch · tokens, heads, channels]`.
pub(crate) fn tokens_first(
    values: &[f64],
    [batches, heads, tokens, channels]: [usize; 4],
) -> Vec<f64> {
    let mut out = Vec::with_capacity(values.len());
    for batch in 0..batches {
        for token in 0..tokens {
            for head in 0..heads {
                let start = ((batch * heads + head) * tokens + token) * channels;
                out.extend_from_slice(&values[start..start + channels]);
            }
        }
    }
    out
}

/// `rotary`: one file holds the forward and the inverse rotation of the same x, so it gives two
/// cases. Its gradient is that of both outputs together, `R^T gout.forward + R gout.inverse`, so it
/// belongs to neither case.
fn rotary_case(file: &mut Reading<'_>, inverse: bool) -> Result<Golden<RopeCase>, String> {
    let (of_x, table) = (["batch", "heads", "tokens", "channels"], ["1", "tokens", "half"]);
    let x = file.floats("in.x", &of_x)?;
    let (cos, sin) =
        (file.floats("mid.cos", &table)?.to_vec(), file.floats("mid.sin", &table)?.to_vec());
    let [batches, heads, tokens, channels, half] = [
        file.extent("batch")?,
        file.extent("heads")?,
        file.extent("tokens")?,
        file.extent("channels")?,
        file.extent("half")?,
    ];
    let case = RopeCase {
        inverse,
        table: TableForm::Positions,
        table_rows: tokens,
        ..RopeCase::plain(batches * tokens, heads, channels, 2 * half)
    };
    let direction = if inverse { "inverse" } else { "forward" };
    let tokens_first = |values: &[f64]| tokens_first(values, [batches, heads, tokens, channels]);
    let upstream = file.floats(&format!("gout.{direction}"), &of_x)?;
    let inv_freq = golden_frequencies(file.config("rope_parameters"), 2 * half)?;
    let golden = Golden::new(case)
        .values("x", tokens_first(x))
        .values("dy", tokens_first(upstream))
        // Batch rows share positions, so the table of one row, by position, serves all.
        .integers("positions", (0..batches).flat_map(|_| 0..tokens as i32).collect())
        .integers("table_positions", file.integers("in.positions", &["1", "tokens"])?)
        .values("inv_freq", inv_freq.into_iter().map(f64::from).collect());
    let golden = golden.values("cos", cos).values("sin", sin);
    golden.expect_reordered(file, "y", &format!("out.{direction}"), &of_x, &tokens_first)
}

/// Frequencies from a golden file's rope parameters.
fn golden_frequencies(parameters: &serde_json::Value, rope_dim: usize) -> Result<Vec<f32>, String> {
    let number = |name: &str| parameters[name].as_f64();
    let theta = number("rope_theta").ok_or("rope_parameters has no rope_theta")?;
    let yarn = YarnParameters {
        theta,
        rope_dim,
        factor: number("factor"),
        original_max_position: number("original_max_position_embeddings").unwrap_or(1.0),
        beta_fast: number("beta_fast").unwrap_or(1.0),
        beta_slow: number("beta_slow").unwrap_or(1.0),
    };
    reference::inv_freq_f32(&yarn).map_err(|e| e.to_string())
}

/// `rope_table`: the table `main` or `compress` at some positions.
fn table_case(file: &mut Reading<'_>, name: &str) -> Result<Golden<RopeCase>, String> {
    let positions = file.integers("in.positions", &["1", "positions"])?;
    let (rope_dim, stored) =
        (file.whole("rope_dim")?, file.floats(&format!("out.{name}.inv_freq"), &["half"])?);
    file.hold("half", rope_dim / 2, "half of config rope_dim")?;
    let inv_freq = golden_frequencies(&file.config("rope_parameters")[name], rope_dim)?;
    let inv_freq: Vec<f64> = inv_freq.into_iter().map(f64::from).collect();
    if inv_freq != stored {
        return Err(format!("out.{name}.inv_freq differs from the oracle's frequencies"));
    }
    let run = || {
        let (cos, sin) = table(&inv_freq, &positions)?;
        Ok((elements(&cos)?, elements(&sin)?))
    };
    let (cos, sin) = run().map_err(|e: dsv4_reference::Error| e.to_string())?;
    let golden = Golden::new(RopeCase::plain(positions.len(), 1, rope_dim, rope_dim))
        .values("cos", cos)
        .values("sin", sin)
        .values("inv_freq", inv_freq)
        .integers("table_positions", positions);
    let table = ["1", "positions", "half"];
    let golden = golden.expect(file, "table_cos", &format!("out.{name}.cos"), &table)?;
    Ok(golden.expect(file, "table_sin", &format!("out.{name}.sin"), &table)?.computed_in_f32())
}
