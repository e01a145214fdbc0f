//! `attention_combine` (inference 8.2): `kernels/cuda/attention_combine.cu` against
//! `reference/src/attention_combine.rs`.

use dsv4_kernels::attention_combine as launcher;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Role, RuntimeError};
use dsv4_reference::attention_combine as reference;
use dsv4_reference::precision::{Precision, Rounding};
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
use rand::Rng;
use serde::{Deserialize, Serialize};

use super::sparse_attention::Sinks;
use super::{
    LARGEST_DRAWN, deterministic, extent, layout, magnitude, oracle_error, oracle_tensor, permuted, scaled, widened,
};
use crate::case::{Case, CaseError, Distribution, Draw};
use crate::judge::checks::permutation;
use crate::judge::golden::GoldenFile;
use crate::operator::{
    GoldenCase, KernelRun, Law, ModuleSpecification, Operator, OracleTensor, Prepared, Profile, Relation, Side,
};
use crate::record::OperatorRecord;

const NAME: &str = "attention_combine";

/// The operator.
pub struct AttentionCombine;

/// Which parts have seen no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyParts {
    /// None.
    None,
    /// A third of all rows of all parts; their log-sum-exp is `-inf`, or `+inf` as attention writes it.
    Some,
    /// The same, and every third row in all parts.
    WholeRows,
}

/// A case: extents, empty parts, sinks, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCombineCase {
    /// Parts; 0 is legal.
    pub num_parts: usize,
    /// Tokens; 0 is legal.
    pub num_tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Columns: a multiple of 8.
    pub v_dim: usize,
    /// Which parts have seen no key. Their rows hold NaN.
    pub empty: EmptyParts,
    /// The sinks.
    pub sinks: Sinks,
    /// Standard deviation of the parts' log-sum-exp, natural.
    pub lse_deviation: f64,
    /// Their mean.
    pub lse_shift: f64,
    /// Elements after each row, which belong to nobody; a multiple of 8.
    pub padding: usize,
    /// Distribution of the partial sums.
    pub distribution: Distribution,
    /// Scale of the partial sums.
    pub magnitude: f64,
    /// Seed of the data.
    pub seed: u64,
}

impl AttentionCombineCase {
    fn plain(num_parts: usize, num_tokens: usize, num_heads: usize, v_dim: usize) -> Self {
        Self {
            num_parts,
            num_tokens,
            num_heads,
            v_dim,
            empty: EmptyParts::WholeRows,
            sinks: Sinks::Normal,
            lse_deviation: 2.0,
            lse_shift: 4.0,
            padding: 0,
            distribution: Distribution::Normal,
            magnitude: 1.0,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if self.v_dim == 0 || !self.v_dim.is_multiple_of(8) {
            return refuse("v_dim", format!("{} must be a multiple of 8", self.v_dim));
        }
        if self.num_heads == 0 {
            return refuse("num_heads", "0: there must be a head".into());
        }
        if !(self.lse_deviation.is_finite() && self.lse_deviation >= 0.0 && self.lse_shift.is_finite()) {
            return refuse("lse_deviation", format!("{} must be finite and not negative", self.lse_deviation));
        }
        if !(self.magnitude.is_finite() && self.magnitude > 0.0) {
            return refuse("magnitude", format!("{} must be finite and above 0", self.magnitude));
        }
        if !self.padding.is_multiple_of(8) {
            return refuse("padding", format!("{} must be a multiple of 8: rows are 16-byte aligned", self.padding));
        }
        let rows = self.num_parts.saturating_mul(self.num_tokens).saturating_mul(self.num_heads);
        if rows.saturating_mul(self.v_dim + self.padding) > 1 << 31 {
            return refuse("num_parts", "the case has more than 2^31 elements in one tensor".into());
        }
        Ok(())
    }

    fn rows(&self) -> usize {
        self.num_tokens * self.num_heads
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] = &["attention_combine"];

impl Operator for AttentionCombine {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "merges partial attention results over disjoint keys and applies the sink once".into(),
            specification: list(&["inference 8.1", "inference 8.2"]),
            kernel_file: "kernels/cuda/attention_combine.cu".into(),
            oracle_file: "reference/src/attention_combine.rs".into(),
            dtypes: list(&["partial_out, partial_lse, sink, lse f32", "out bf16"]),
            axes: list(&[
                "extents",
                "number of parts",
                "empty parts",
                "sinks",
                "size and spread of lse",
                "strides",
                "distribution",
                "magnitude",
            ]),
            has_backward: false,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let (parts, tokens, heads): (usize, usize, usize) = match profile {
            Profile::Quick => (9, 8, 12),
            Profile::Ci => (40, 12, 40),
            Profile::Full => (140, 60, 130),
        };
        let shape = (
            prop_oneof![1 => Just(1usize), 4 => 1..=parts],
            extent(tokens, 4),
            extent(heads, 16),
            prop::sample::select(vec![512usize, 64, 40]),
        );
        let empty = prop::sample::select(vec![EmptyParts::None, EmptyParts::Some, EmptyParts::WholeRows]);
        let sinks = prop::sample::select(vec![Sinks::Normal, Sinks::Absent, Sinks::Extreme]);
        let lse =
            (prop::sample::select(vec![0.0, 0.5, 2.0, 10.0]), prop::sample::select(vec![0.0, 6.0, -200.0, 300.0]));
        let data = (
            prop_oneof![3 => Just(0usize), 1 => Just(8usize), 1 => Just(24usize)],
            prop::sample::select(Distribution::ALL.to_vec()),
            magnitude(-18..=18),
            0..1000u64,
        );
        (shape, empty, sinks, lse, data)
            .prop_map(|(shape, empty, sinks, (lse_deviation, lse_shift), data)| {
                let (num_parts, num_tokens, num_heads, v_dim) = shape;
                let (padding, distribution, magnitude, seed) = data;
                let num_tokens = num_tokens.min((LARGEST_DRAWN / (num_parts * num_heads * v_dim)).max(1));
                let case = AttentionCombineCase {
                    num_parts,
                    num_tokens,
                    num_heads,
                    v_dim,
                    empty,
                    sinks,
                    lse_deviation,
                    lse_shift,
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
        let plain = AttentionCombineCase::plain;
        let mut cases = vec![
            plain(3, 0, 4, 64),
            plain(0, 2, 5, 64),
            // One part without a sink is what comes out.
            AttentionCombineCase { sinks: Sinks::Absent, empty: EmptyParts::None, ..plain(1, 4, 6, 512) },
            AttentionCombineCase { sinks: Sinks::Extreme, ..plain(4, 5, 12, 512) },
            // More parts than lanes, of unlike size.
            AttentionCombineCase { lse_deviation: 10.0, ..plain(70, 2, 9, 40) },
            // One of them outweighs the others by more than an fp32 exponent holds; a lane with more columns than others.
            AttentionCombineCase { lse_deviation: 100.0, ..plain(70, 2, 9, 264) },
            AttentionCombineCase { lse_shift: -200.0, ..plain(5, 3, 7, 64) },
        ];
        if profile == Profile::Full {
            cases.extend([plain(8, 32, 64, 512), plain(18, 8, 128, 512)]);
        }
        cases.iter().map(|case| Case::new(NAME, case)).collect()
    }

    fn default_cases(&self, profile: Profile) -> usize {
        match profile {
            Profile::Quick => 16,
            Profile::Ci => 40,
            Profile::Full => 100,
        }
    }

    fn modules(&self) -> Vec<ModuleSpecification> {
        launcher::modules()
    }

    fn prepare(&self, case: &Case) -> Result<Box<dyn Prepared>, CaseError> {
        let case: AttentionCombineCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)))
    }

    /// None: no golden file holds partial results. Decode attention splits the lists of the golden attention, and its
    /// oracle merges the parts by this operator's.
    fn golden(&self, _: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        Ok(Vec::new())
    }
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: AttentionCombineCase,
    partial_out: HostTensor,
    partial_lse: HostTensor,
    sink: Option<HostTensor>,
}

impl Inputs {
    fn draw(case: AttentionCombineCase) -> Self {
        let (parts, rows) = (case.num_parts, case.rows());
        let mut out =
            Draw::new(case.seed, "partial_out").values(case.distribution, parts * rows, case.v_dim, case.magnitude);
        let mut draw = Draw::new(case.seed, "partial_lse");
        let log2_e = std::f64::consts::LOG2_E;
        let mut lse = Vec::with_capacity(parts * rows);
        for part_row in 0..parts * rows {
            let e = (case.lse_shift + case.lse_deviation * draw.normal()) * log2_e;
            let (one_in_three, positive) = (draw.rng().random_ratio(1, 3), draw.rng().random_ratio(1, 2));
            let empty = match case.empty {
                EmptyParts::None => false,
                EmptyParts::Some => one_in_three,
                EmptyParts::WholeRows => one_in_three || part_row % rows % 3 == 0,
            };
            let infinity = if positive { f64::INFINITY } else { f64::NEG_INFINITY };
            lse.push(if empty { infinity } else { e });
            if empty {
                out[part_row * case.v_dim..(part_row + 1) * case.v_dim].fill(f64::NAN);
            }
        }
        let per_row = [parts, case.num_tokens, case.num_heads];
        Self {
            partial_out: HostTensor::from_f64(DType::F32, &[per_row.as_slice(), &[case.v_dim]].concat(), &out),
            partial_lse: HostTensor::from_f64(DType::F32, &per_row, &lse),
            sink: case.sinks.draw(case.seed, case.num_heads, case.lse_shift),
            case,
        }
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let inputs = reference::Inputs {
            partial_out: widened(&self.partial_out)?,
            partial_lse: widened(&self.partial_lse)?,
            sink: self.sink.as_ref().map(widened).transpose()?,
        };
        let outputs = reference::forward(&inputs, &mut Rounding::new(precision))?;
        Ok(vec![oracle_tensor("out", Side::Forward, &outputs.out)?, oracle_tensor("lse", Side::Forward, &outputs.lse)?])
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }

    /// The bytes of the parts' rows in another order of tokens.
    fn tokens_permuted(&self, order: &[usize]) -> Box<dyn Prepared> {
        let reorder = |tensor: &HostTensor| {
            let part = tensor.bytes.len() / self.case.num_parts.max(1);
            let parts = tensor.bytes.chunks(part.max(1)).map(|bytes| {
                let shape = tensor.shape[1..].to_vec();
                permuted(&HostTensor { dtype: tensor.dtype, shape, bytes: bytes.to_vec() }, order).bytes
            });
            HostTensor { bytes: parts.flatten().collect(), ..tensor.clone() }
        };
        self.with(|v| (v.partial_out, v.partial_lse) = (reorder(&self.partial_out), reorder(&self.partial_lse)))
    }

    /// Parts in the given order; a part may occur more than once. `lse` is changed after that.
    fn parts_of(&self, order: &[usize], lse: impl Fn(usize, f64) -> f64) -> Box<dyn Prepared> {
        let pick = |tensor: &HostTensor| {
            let part = tensor.bytes.len() / self.case.num_parts;
            let bytes = order.iter().flat_map(|&from| tensor.bytes[from * part..(from + 1) * part].iter().copied());
            let mut shape = tensor.shape.clone();
            shape[0] = order.len();
            HostTensor { dtype: tensor.dtype, shape, bytes: bytes.collect() }
        };
        let picked = pick(&self.partial_lse);
        let rows = self.case.rows();
        let values: Vec<f64> = picked.to_f64().iter().enumerate().map(|(i, &e)| lse(i / rows, e)).collect();
        self.with(|v| {
            v.case.num_parts = order.len();
            v.partial_out = pick(&self.partial_out);
            v.partial_lse = HostTensor::from_f64(DType::F32, &picked.shape, &values);
        })
    }

    fn both(relation: impl Fn() -> Relation) -> Vec<(&'static str, Relation)> {
        vec![("out", relation()), ("lse", relation())]
    }

    /// A part may be cut in two of half the weight: both have its sum, and one less in base 2.
    fn halving_law(&self) -> Law {
        let last = self.case.num_parts - 1;
        let order: Vec<usize> = (0..=last).chain([last]).collect();
        let variant = self.parts_of(&order, move |part, e| if part >= last { e - 1.0 } else { e });
        Law { name: "a part may be halved", variant, relations: Self::both(|| Relation::WithinBudget) }
    }

    fn order_law(&self) -> Law {
        let variant = self.parts_of(&permutation(self.case.seed, self.case.num_parts), |_, e| e);
        Law { name: "parts may be permuted", variant, relations: Self::both(|| Relation::WithinBudget) }
    }

    /// A part without keys at the end changes no bit.
    fn padding_law(&self) -> Law {
        let parts = self.case.num_parts;
        let order: Vec<usize> = (0..parts).chain([0, parts - 1]).collect();
        let variant = self.parts_of(&order, move |part, e| match part.checked_sub(parts) {
            None => e,
            Some(0) => f64::NEG_INFINITY,
            Some(_) => f64::INFINITY,
        });
        Law { name: "a part without keys adds nothing", variant, relations: Self::both(|| Relation::Times(1.0)) }
    }

    fn scale_law(&self) -> Law {
        let variant = self.with(|v| v.partial_out = scaled(&self.partial_out, 4.0));
        let relations = vec![("out", Relation::Times(4.0)), ("lse", Relation::Times(1.0))];
        Law { name: "a scale counts once", variant, relations }
    }

    fn permutation_law(&self) -> Law {
        let heads = self.case.num_heads;
        let order = permutation(self.case.seed, self.case.num_tokens);
        let by_head = order.iter().flat_map(|&t| (0..heads).map(move |h| t * heads + h)).collect();
        let variant = self.tokens_permuted(&order);
        let relations = vec![("out", Relation::PermutedRows(by_head)), ("lse", Relation::PermutedRows(order))];
        Law { name: "tokens may be permuted", variant, relations }
    }

    /// Other parts of one token change no other token's row.
    fn independence_law(&self) -> Law {
        let (heads, middle) = (self.case.num_heads, self.case.num_tokens / 2);
        let rows = self.case.rows();
        let lse: Vec<f64> = self.partial_lse.to_f64();
        let changed = |i: usize, e: f64| if i % rows / heads == middle { e * 0.5 + 1.0 } else { e };
        let lse: Vec<f64> = lse.iter().enumerate().map(|(i, &e)| changed(i, e)).collect();
        let variant = self.with(|v| v.partial_lse = HostTensor::from_f64(DType::F32, &self.partial_lse.shape, &lse));
        let others = move |row: usize| row != middle;
        let relations = vec![
            ("out", Relation::EqualRows(Box::new(move |row| others(row / heads)))),
            ("lse", Relation::EqualRows(Box::new(others))),
        ];
        Law { name: "independence", variant, relations }
    }
}

impl Prepared for Inputs {
    fn operator(&self) -> &'static str {
        NAME
    }

    fn case(&self) -> Option<Case> {
        Some(Case::new(NAME, &self.case))
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision).map_err(|e| oracle_error(NAME, e))
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let case = &self.case;
        let mut arena = DeviceArena::new(device, contract);
        let padded = layout(&self.partial_out.shape, case.padding);
        let partial_out = arena.upload("partial_out", &self.partial_out, &padded, Role::Input)?;
        let partial_lse = arena.input("partial_lse", &self.partial_lse)?;
        let sink = self.sink.as_ref().map(|sink| arena.input("sink", sink)).transpose()?;
        let shape = [case.num_tokens, case.num_heads, case.v_dim];
        let out = arena.allocate("out", DType::Bf16, &shape, &layout(&shape, case.padding), Role::Output)?;
        let lse = arena.output("lse", DType::F32, &shape[..2])?;
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let arguments = launcher::Forward {
                partial_out: &partial_out,
                partial_lse: &partial_lse,
                sink: sink.as_ref(),
                out: &out,
                lse: &lse,
            };
            paths.push(launcher::forward(device, &arguments)?.to_owned());
            Ok(())
        })?;
        let tensors = vec![deterministic("out", arena.download(&out)?), deterministic("lse", arena.download(&lse)?)];
        Ok(KernelRun { tensors, violations, paths })
    }

    fn laws(&self) -> Vec<Law> {
        if self.case.num_tokens == 0 || self.case.num_parts == 0 {
            return Vec::new();
        }
        let mut laws = vec![self.scale_law(), self.permutation_law(), self.halving_law(), self.padding_law()];
        if self.case.num_parts > 1 {
            laws.push(self.order_law());
        }
        if self.case.num_tokens > 1 {
            laws.push(self.independence_law());
        }
        laws
    }
}
