//! `rope` (inference 4, training 8): `kernels/cuda/rope.cu` against `reference/src/rope.rs`.

use dsv4_kernels::rope as launcher;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Role, RuntimeError};
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::rope as reference;
use dsv4_reference::rope::YarnParameters;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::Rng;
use serde::{Deserialize, Serialize};

use super::{
    Aliasing, Float, LARGEST_DRAWN, deterministic, elements, extent, layout, magnitude, oracle_error, oracle_tensor,
    permuted, place, scaled, tensor, widened,
};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    ExpectedTensor, GoldenCase, GradientProbe, KernelRun, Law, ModuleSpecification, Operator, OracleTensor, Prepared,
    Profile, Relation, Side,
};
use crate::record::OperatorRecord;

const NAME: &str = "rope";
/// Longest context of the model: positions up to this one are tested.
const LAST_POSITION: i64 = 1_048_575;

/// The operator.
pub struct Rope;

/// Which frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Frequencies {
    /// Base 10000, no YaRN.
    Main,
    /// Base 160000 with YaRN.
    Compress,
}

/// How tokens find their table rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TableForm {
    /// One table row a token, at positions up to the model's last.
    RowPerToken,
    /// A table of all positions up to a bound, and a position for each token.
    Positions,
    /// The same, some positions being negative or beyond the table.
    HostilePositions,
}

/// A case: extents, types, table, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeCase {
    /// Tokens; 0 is legal.
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
    /// How tokens find their table rows.
    pub table: TableForm,
    /// Rows of the table where there are positions.
    pub table_rows: usize,
    /// Where y lies.
    pub aliasing: Aliasing,
    /// Elements after each head, which belong to nobody.
    pub padding: usize,
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
            padding: 0,
            distribution: Distribution::Normal,
            magnitude: 1.0,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if self.rope_dim < 2 || !self.rope_dim.is_multiple_of(2) || self.rope_dim > self.head_dim {
            return refuse("rope_dim", format!("{} must be even, 2 to head_dim {}", self.rope_dim, self.head_dim));
        }
        if self.table != TableForm::RowPerToken && self.table_rows == 0 {
            return refuse("table_rows", "0: a table with positions needs rows".into());
        }
        let elements = self.num_tokens.saturating_mul(self.num_heads).saturating_mul(self.head_dim + self.padding);
        if elements > 1 << 31 || self.table_rows > 1 << 24 {
            return refuse(
                "num_tokens",
                format!("{elements} elements and {} table rows are too many", self.table_rows),
            );
        }
        if !(self.magnitude.is_finite() && self.magnitude > 0.0) {
            return refuse("magnitude", format!("{} must be finite and above 0", self.magnitude));
        }
        Ok(())
    }

    fn shape(&self) -> [usize; 3] {
        [self.num_tokens, self.num_heads, self.head_dim]
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] =
    &["rope_forward", "rope_forward_scalar", "backward rope_forward", "backward rope_forward_scalar", "rope_table"];

impl Operator for Rope {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "rotates the last channels of each head by position, in adjacent pairs; builds the tables".into(),
            specification: list(&["inference 4", "training 8"]),
            kernel_file: "kernels/cuda/rope.cu".into(),
            oracle_file: "reference/src/rope.rs".into(),
            dtypes: list(&["x bf16|f32", "cos, sin f32", "positions i32"]),
            axes: list(&[
                "extents",
                "strides",
                "aliasing",
                "dtype",
                "direction",
                "table form",
                "hostile positions",
                "distribution",
                "magnitude",
            ]),
            has_backward: true,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let (tokens, heads): (usize, usize) = match profile {
            Profile::Quick => (20, 12),
            Profile::Ci => (40, 40),
            Profile::Full => (300, 130),
        };
        let head = prop_oneof![
            2 => Just((512usize, 64usize)),
            1 => Just((128, 64)),
            1 => Just((576, 64)),
            4 => (1..=20usize, 0..=41usize).prop_map(|(half, copied)| (2 * half + copied, 2 * half)),
        ];
        let shape =
            (0..=tokens, extent(heads, 8), head, prop_oneof![3 => Just(0usize), 1 => Just(8usize), 1 => 1..9usize]);
        let float = prop_oneof![2 => Just(Float::Bf16), 1 => Just(Float::F32)];
        let frequencies = prop_oneof![Just(Frequencies::Main), Just(Frequencies::Compress)];
        let table =
            prop_oneof![Just(TableForm::RowPerToken), Just(TableForm::Positions), Just(TableForm::HostilePositions)];
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 2 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let rotation = (any::<bool>(), frequencies, table, 1..700usize);
        let data = (prop::sample::select(Distribution::ALL.to_vec()), magnitude(-18..=18), 0..1000u64);
        (shape, float, rotation, aliasing, data)
            .prop_map(|((num_tokens, num_heads, (head_dim, rope_dim), padding), dtype, rotation, aliasing, data)| {
                let (inverse, frequencies, table, rows) = rotation;
                let (distribution, magnitude, seed) = data;
                let num_tokens = num_tokens.min((LARGEST_DRAWN / (num_heads * head_dim)).max(1));
                let table_rows = if table == TableForm::RowPerToken { 0 } else { rows };
                let case = RopeCase {
                    num_tokens,
                    num_heads,
                    head_dim,
                    rope_dim,
                    dtype,
                    inverse,
                    frequencies,
                    table,
                    table_rows,
                    aliasing,
                    padding,
                    distribution,
                    magnitude,
                    seed,
                };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let plain = RopeCase::plain;
        let mut cases = vec![
            plain(0, 3, 40, 16),
            RopeCase { aliasing: Aliasing::InPlace, ..plain(5, 9, 512, 64) },
            RopeCase { inverse: true, dtype: Float::F32, ..plain(3, 2, 24, 24) },
            RopeCase { table: TableForm::HostilePositions, table_rows: 50, ..plain(17, 3, 128, 64) },
            RopeCase {
                table: TableForm::Positions,
                table_rows: 1 << 20,
                frequencies: Frequencies::Main,
                ..plain(9, 2, 12, 2)
            },
            // The scalar kernel with more heads than a block serves at a time, which it must rotate once only.
            RopeCase { aliasing: Aliasing::InPlace, ..plain(2, 17, 261, 260) },
            // The scalar kernel with one head, and threads beyond the last token.
            RopeCase { table: TableForm::Positions, table_rows: 50, ..plain(15, 1, 21, 6) },
        ];
        if profile == Profile::Full {
            cases.extend([plain(64, 128, 512, 64), RopeCase { inverse: true, ..plain(128, 64, 512, 64) }]);
        }
        cases.iter().map(|case| Case::new(NAME, case)).collect()
    }

    fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Quick => 24,
            Profile::Ci => 60,
            Profile::Full => 120,
        }
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: RopeCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)?))
    }

    fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        match file.operator.as_str() {
            "rotary" => [false, true]
                .into_iter()
                .map(|inverse| rotary_case(file, inverse).map_err(CaseError::Malformed))
                .collect(),
            "rope_table" => table_cases(file).map_err(CaseError::Malformed),
            _ => Ok(Vec::new()),
        }
    }
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: RopeCase,
    x: HostTensor,
    dy: HostTensor,
    cos: HostTensor,
    sin: HostTensor,
    positions: Option<Vec<i32>>,
    inv_freq: Vec<f32>,
    /// Positions of the rows that the table kernel is asked for.
    table_positions: Vec<i32>,
}

impl Inputs {
    fn draw(case: RopeCase) -> Result<Self, CaseError> {
        let shape = case.shape();
        let yarn = match case.frequencies {
            Frequencies::Main => YarnParameters { rope_dim: case.rope_dim, ..YarnParameters::main() },
            Frequencies::Compress => YarnParameters { rope_dim: case.rope_dim, ..YarnParameters::compress() },
        };
        let inv_freq = reference::inv_freq_f32(&yarn).map_err(|e| oracle_error(NAME, e))?;
        let positions = (case.table != TableForm::RowPerToken).then(|| positions(&case));
        let table_positions: Vec<i32> = match &positions {
            Some(_) => (0..case.table_rows as i32).collect(),
            None => far_positions(&case),
        };
        let (cos, sin) = host_table(&inv_freq, &table_positions)?;
        let rows = case.num_tokens * case.num_heads;
        let values = |name: &str, magnitude| {
            Draw::new(case.seed, name).values(case.distribution, rows, case.head_dim, magnitude)
        };
        Ok(Self {
            x: HostTensor::from_f64(case.dtype.dtype(), &shape, &values("x", case.magnitude)),
            dy: HostTensor::from_f64(case.dtype.dtype(), &shape, &values("dy", 1.0)),
            cos,
            sin,
            positions,
            inv_freq,
            table_positions,
            case,
        })
    }

    fn reference(&self) -> Result<reference::Inputs, candle_core::Error> {
        Ok(reference::Inputs {
            x: widened(&self.x)?,
            cos: widened(&self.cos)?,
            sin: widened(&self.sin)?,
            positions: self.positions.as_ref().map(|list| list.iter().map(|&p| i64::from(p)).collect()),
            inverse: self.case.inverse,
        })
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let inputs = self.reference()?;
        let forward = reference::forward(&inputs, &mut Rounding::new(precision))?;
        let backward = reference::backward(&inputs, &widened(&self.dy)?, &mut Rounding::new(precision))?;
        let wide: Vec<i64> = self.table_positions.iter().map(|&p| i64::from(p)).collect();
        let (cos, sin) = reference::table(&self.inv_freq, &wide)?;
        // The table is stored in f32 and computed with a function that is good to a rounding of f32.
        let mut rounding = Rounding::new(precision);
        Ok(vec![
            oracle_tensor("y", Side::Forward, &forward.y)?,
            oracle_tensor("table_cos", Side::Forward, &rounding.f32(&cos)?)?,
            oracle_tensor("table_sin", Side::Forward, &rounding.f32(&sin)?)?,
            oracle_tensor("dx", Side::Gradient, &backward.dx)?,
        ])
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }
}

fn positions(case: &RopeCase) -> Vec<i32> {
    let mut draw = Draw::new(case.seed, "positions");
    let rows = case.table_rows as i32;
    let hostile = [-1, rows, rows + 7, i32::MIN, i32::MAX];
    (0..case.num_tokens)
        .map(|token| {
            let position = draw.rng().random_range(0..rows);
            let bad = hostile[draw.rng().random_range(0..hostile.len())];
            match case.table {
                TableForm::HostilePositions if draw.rng().random_ratio(1, 3) => bad,
                // The ends of the table, where an off-by-one would show.
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

/// cos and sin as a kernel would store them: the oracle's, rounded to f32.
fn host_table(inv_freq: &[f32], positions: &[i32]) -> Result<(HostTensor, HostTensor), CaseError> {
    let wide: Vec<i64> = positions.iter().map(|&p| i64::from(p)).collect();
    let shape = [positions.len(), inv_freq.len()];
    let run = || {
        let (cos, sin) = reference::table(inv_freq, &wide)?;
        Ok((
            HostTensor::from_f64(DType::F32, &shape, &elements(&cos)?),
            HostTensor::from_f64(DType::F32, &shape, &elements(&sin)?),
        ))
    };
    run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let mut arena = DeviceArena::new(device, contract);
        let shape = &self.x.shape;
        let (x, y) = place(&mut arena, &self.x, self.case.aliasing, self.case.padding)?;
        let cos = arena.input("cos", &self.cos)?;
        let sin = arena.input("sin", &self.sin)?;
        let positions = self
            .positions
            .as_ref()
            .map(|list| arena.input("positions", &HostTensor::from_i32(&[list.len()], list)))
            .transpose()?;
        let padded = layout(shape, self.case.padding);
        let dy = arena.upload("dy", &self.dy, &padded, Role::Input)?;
        let dx = arena.allocate("dx", self.x.dtype, shape, &padded, Role::Output)?;
        let frequencies: Vec<f64> = self.inv_freq.iter().map(|&f| f64::from(f)).collect();
        let inv_freq = HostTensor::from_f64(DType::F32, &[frequencies.len()], &frequencies);
        let inv_freq = arena.input("inv_freq", &inv_freq)?;
        let table_positions = HostTensor::from_i32(&[self.table_positions.len()], &self.table_positions);
        let table_positions = arena.input("table positions", &table_positions)?;
        let table_cos = arena.output("table_cos", DType::F32, &self.cos.shape)?;
        let table_sin = arena.output("table_sin", DType::F32, &self.sin.shape)?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let inverse = self.case.inverse;
            let positions = positions.as_ref();
            let rotation = launcher::Forward { x: &x, y: &y, cos: &cos, sin: &sin, positions, inverse };
            paths.push(launcher::forward(device, &rotation)?.to_owned());
            let gradient = launcher::Forward { x: &dy, y: &dx, ..rotation };
            paths.push(format!("backward {}", launcher::backward(device, &gradient)?));
            let table =
                launcher::Table { inv_freq: &inv_freq, positions: &table_positions, cos: &table_cos, sin: &table_sin };
            paths.push(launcher::table(device, &table)?.to_owned());
            Ok(())
        })?;
        let mut tensors = Vec::new();
        for (name, view) in [("y", &y), ("table_cos", &table_cos), ("table_sin", &table_sin), ("dx", &dx)] {
            tensors.push(deterministic(name, arena.download(view)?));
        }
        Ok(KernelRun { tensors, violations, paths })
    }

    fn case(&self) -> Option<Case> {
        Some(Case::new(NAME, &self.case))
    }

    fn laws(&self) -> Vec<Law> {
        if self.case.num_tokens == 0 || self.case.num_heads == 0 {
            return Vec::new();
        }
        let heads = self.case.num_heads;
        let order = permutation(self.case.seed, self.case.num_tokens);
        let rows: Vec<usize> =
            order.iter().flat_map(|&token| (0..heads).map(move |head| token * heads + head)).collect();
        let middle = self.case.num_tokens / 2;
        let mut laws = vec![
            Law {
                name: "x scales y once",
                variant: self.with(|v| v.x = scaled(&self.x, 8.0)),
                relations: [("y", 8.0), ("dx", 1.0)].map(|(name, factor)| (name, Relation::Times(factor))).into(),
            },
            Law {
                name: "tokens may be permuted",
                variant: self.with(|v| v.permute(&order)),
                relations: ["y", "dx"].map(|name| (name, Relation::PermutedRows(rows.clone()))).into(),
            },
            Law {
                name: "independence",
                variant: self.with(|v| v.x = negate_token(&self.x, middle)),
                relations: vec![("y", Relation::EqualRows(Box::new(move |row| row / heads != middle)))],
            },
        ];
        if self.case.num_tokens == 1 {
            laws.retain(|law| law.name != "independence");
        }
        laws
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        // Tokens with a hostile position have NaN outputs, which no finite difference can follow.
        let fits =
            self.x.elements() <= 4096 && self.case.num_tokens > 0 && self.case.table != TableForm::HostilePositions;
        fits.then(|| Box::new(Probe(self)) as Box<dyn GradientProbe>)
    }
}

fn negate_token(x: &HostTensor, token: usize) -> HostTensor {
    let mut values = x.to_f64();
    let row = values.len() / x.shape[0];
    values[token * row..(token + 1) * row].iter_mut().for_each(|value| *value = 0.5 - *value);
    HostTensor::from_f64(x.dtype, &x.shape, &values)
}

impl Inputs {
    fn permute(&mut self, order: &[usize]) {
        (self.x, self.dy) = (permuted(&self.x, order), permuted(&self.dy, order));
        match &mut self.positions {
            Some(positions) => *positions = order.iter().map(|&t| positions[t]).collect(),
            None => (self.cos, self.sin) = (permuted(&self.cos, order), permuted(&self.sin, order)),
        }
    }
}

struct Probe<'a>(&'a Inputs);

impl GradientProbe for Probe<'_> {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        vec![("x", self.0.x.to_f64())]
    }

    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let at = reference::Inputs { x: tensor(inputs[0].clone(), &self.0.x.shape)?, ..self.0.reference()? };
            Ok(vec![elements(&reference::forward(&at, &mut Rounding::exact())?.y)?])
        };
        run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
    }

    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let dy = tensor(upstream[0].clone(), &self.0.x.shape)?;
            Ok(vec![elements(&reference::backward_autograd(&self.0.reference()?, &dy)?.dx)?])
        };
        run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
    }

    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let dy = tensor(upstream[0].clone(), &self.0.x.shape)?;
            Ok(vec![elements(&reference::backward(&self.0.reference()?, &dy, &mut Rounding::exact())?.dx)?])
        };
        run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
    }
}

/// `[batch, heads, tokens, channels]` as `[batch · tokens, heads, channels]`.
fn tokens_first(values: &[f64], shape: &[usize]) -> Vec<f64> {
    let [batches, heads, tokens, channels] = [shape[0], shape[1], shape[2], shape[3]];
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

/// `rotary`: one file holds the forward and the inverse rotation of the same x: two cases. Its gradient
/// is that of both outputs together, `R^T gout.forward + R gout.inverse`, so neither case's alone.
fn rotary_case(file: &GoldenFile, inverse: bool) -> Result<GoldenCase, String> {
    let x = file.tensor("in.x")?;
    if x.shape.len() != 4 {
        return Err(format!("{}: in.x has {} axes, not 4", file.name, x.shape.len()));
    }
    let [batches, heads, tokens, channels] = [x.shape[0], x.shape[1], x.shape[2], x.shape[3]];
    let (cos, sin) = (file.tensor("mid.cos")?, file.tensor("mid.sin")?);
    let half = cos.shape.last().copied().unwrap_or(0);
    let shape = [batches * tokens, heads, channels];
    // Batch rows share positions, so the table of one row serves all, by position.
    let positions: Vec<i32> = (0..batches).flat_map(|_| 0..tokens as i32).collect();
    let case = RopeCase {
        inverse,
        table: TableForm::Positions,
        table_rows: tokens,
        ..RopeCase::plain(batches * tokens, heads, channels, 2 * half)
    };
    let table_positions = file.tensor("in.positions")?.values.iter().map(|&p| p as i32).collect();
    let table = |t: &crate::judge::golden::GoldenTensor| HostTensor::from_f64(DType::F32, &[tokens, half], &t.values);
    let direction = if inverse { "inverse" } else { "forward" };
    let upstream = file.tensor(&format!("gout.{direction}"))?;
    let inputs = Inputs {
        x: HostTensor::from_f64(DType::Bf16, &shape, &tokens_first(&x.values, &x.shape)),
        dy: HostTensor::from_f64(DType::Bf16, &shape, &tokens_first(&upstream.values, &x.shape)),
        cos: table(cos),
        sin: table(sin),
        positions: Some(positions),
        inv_freq: golden_frequencies(&file.config["rope_parameters"], 2 * half)?,
        table_positions,
        case,
    };
    let stored_as = format!("out.{direction}");
    let stored = file.tensor(&stored_as)?;
    let expected = vec![ExpectedTensor {
        name: "y",
        stored_as,
        values: tokens_first(&stored.values, &x.shape),
        stored_f32: stored.stored_f32,
        computed_f32: false,
    }];
    Ok(GoldenCase { prepared: Box::new(inputs), expected, kernel_skip: None })
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

/// `rope_table`: the tables `main` and `compress` at some positions.
fn table_cases(file: &GoldenFile) -> Result<Vec<GoldenCase>, String> {
    let positions: Vec<i32> = file.tensor("in.positions")?.values.iter().map(|&p| p as i32).collect();
    let rope_dim = file.number("rope_dim")? as usize;
    ["main", "compress"]
        .into_iter()
        .map(|table| {
            let inv_freq = golden_frequencies(&file.config["rope_parameters"][table], rope_dim)?;
            let stored: Vec<f64> = file.tensor(&format!("out.{table}.inv_freq"))?.values.clone();
            if inv_freq.iter().zip(&stored).any(|(ours, theirs)| f64::from(*ours) != *theirs) {
                return Err(format!("{}: out.{table}.inv_freq differs from the oracle's frequencies", file.name));
            }
            let case = RopeCase::plain(positions.len(), 1, rope_dim, rope_dim);
            let drawn = Inputs::draw(case).map_err(|e| e.to_string())?;
            let (cos, sin) = host_table(&inv_freq, &positions).map_err(|e| e.to_string())?;
            let inputs = Inputs { cos, sin, inv_freq, table_positions: positions.clone(), ..drawn };
            let expected = [("table_cos", "cos"), ("table_sin", "sin")]
                .into_iter()
                .map(|(name, function)| {
                    let stored_as = format!("out.{table}.{function}");
                    let stored = file.tensor(&stored_as)?;
                    Ok(ExpectedTensor {
                        name,
                        stored_as,
                        values: stored.values.clone(),
                        stored_f32: true,
                        computed_f32: true,
                    })
                })
                .collect::<Result<_, String>>()?;
            Ok(GoldenCase { prepared: Box::new(inputs), expected, kernel_skip: None })
        })
        .collect()
}
