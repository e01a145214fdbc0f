//! `rms_norm` (inference 3, training 11.3): `kernels/cuda/rms_norm.cu` against `reference/src/rms_norm.rs`.

use dsv4_kernels::rms_norm as launcher;
use dsv4_kernels::runtime::{Contract, DType, Device, DeviceArena, HostTensor, Role, RuntimeError};
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::rms_norm as reference;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;
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

const NAME: &str = "rms_norm";

/// The operator.
pub struct RmsNorm;

/// A case: extents, types, layout, data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmsNormCase {
    /// Rows; 0 is legal.
    pub num_rows: usize,
    /// Elements of a row, 1 to 32768.
    pub width: usize,
    /// Type of x, y, dy and dx.
    pub dtype: Float,
    /// Type of the weight; absent for the unweighted norm.
    pub weight: Option<Float>,
    /// Added to the mean square.
    pub eps: f32,
    /// Where y lies.
    pub aliasing: Aliasing,
    /// Elements between rows, which belong to nobody.
    pub padding: usize,
    /// Distribution of x.
    pub distribution: Distribution,
    /// Scale of x.
    pub magnitude: f64,
    /// Whether every third row is zero.
    pub zero_rows: bool,
    /// Whether the forward that writes y saves rstd, as it does in lines written before there was a choice. If not,
    /// as in inference, a forward of its own saves it for the backward.
    #[serde(default = "saved")]
    pub saves_rstd: bool,
    /// Seed of the data.
    pub seed: u64,
}

fn saved() -> bool {
    true
}

impl RmsNormCase {
    fn plain(num_rows: usize, width: usize) -> Self {
        Self {
            num_rows,
            width,
            dtype: Float::Bf16,
            weight: Some(Float::F32),
            eps: 1e-6,
            aliasing: Aliasing::OutOfPlace,
            padding: 0,
            distribution: Distribution::Normal,
            magnitude: 1.0,
            zero_rows: false,
            saves_rstd: true,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), CaseError> {
        let refuse = |field, reason: String| Err(CaseError::Field { operator: NAME, field, reason });
        if !(1..=launcher::MAX_WIDTH).contains(&self.width) {
            return refuse("width", format!("{} must be 1 to {}", self.width, launcher::MAX_WIDTH));
        }
        if !(self.eps.is_finite() && self.eps > 0.0) {
            return refuse("eps", format!("{} must be finite and above 0", self.eps));
        }
        if self.num_rows.saturating_mul(self.width + self.padding) > 1 << 31 {
            return refuse("num_rows", format!("{} rows of {} elements are more than 2^31", self.num_rows, self.width));
        }
        if !(self.magnitude.is_finite() && self.magnitude > 0.0) {
            return refuse("magnitude", format!("{} must be finite and above 0", self.magnitude));
        }
        Ok(())
    }
}

/// What a case's record may say that ran.
const PATHS: &[&str] = &[
    "rms_norm_forward_warp",
    "rms_norm_forward_block",
    "rms_norm_forward_scalar",
    "rms_norm_backward_warp",
    "rms_norm_backward_block",
    "rms_norm_backward_wide",
    "rms_norm_backward_scalar",
    "rms_norm_dweight",
];

impl Operator for RmsNorm {
    fn describe(&self) -> OperatorRecord {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        OperatorRecord {
            name: NAME.into(),
            summary: "y = weight · x / sqrt(mean(x²) + eps), row by row, weighted or not".into(),
            specification: list(&["inference 3", "training 11.3"]),
            kernel_file: "kernels/cuda/rms_norm.cu".into(),
            oracle_file: "reference/src/rms_norm.rs".into(),
            dtypes: list(&["x bf16|f32", "weight none|bf16|f32", "rstd, dweight f32"]),
            axes: list(&[
                "extents",
                "strides",
                "aliasing",
                "dtype",
                "weight",
                "eps",
                "distribution",
                "magnitude",
                "zero rows",
                "rstd saved",
            ]),
            has_backward: true,
            paths: list(PATHS),
        }
    }

    fn strategy(&self, profile: Profile) -> BoxedStrategy<Case> {
        let (rows, width) = match profile {
            Profile::Quick => (24, 2100),
            Profile::Ci => (40, 9000),
            Profile::Full => (600, 32768),
        };
        let widths = prop_oneof![3 => extent(300, 8), 2 => extent(width, 128), 1 => Just(width)];
        let float = prop_oneof![2 => Just(Float::Bf16), 1 => Just(Float::F32)];
        let weight = prop_oneof![Just(None), Just(Some(Float::F32)), Just(Some(Float::Bf16))];
        let aliasing = prop_oneof![
            3 => Just(Aliasing::OutOfPlace), 1 => Just(Aliasing::InPlace), 1 => Just(Aliasing::Interleaved)
        ];
        let saves_rstd = prop_oneof![3 => Just(true), 1 => Just(false)];
        let distribution = prop::sample::select(Distribution::ALL.to_vec());
        let data = (distribution, magnitude(-18..=18), any::<bool>(), saves_rstd, 0..1000u64);
        let shape = (extent(rows, 8), widths, prop_oneof![3 => Just(0usize), 1 => Just(8usize), 1 => 1..20usize]);
        let eps = prop_oneof![3 => Just(1e-6f32), 1 => Just(1e-2f32), 1 => Just(1e-12f32)];
        (shape, float, weight, eps, aliasing, data)
            .prop_map(|((num_rows, width, padding), dtype, weight, eps, aliasing, data)| {
                let (distribution, magnitude, zero_rows, saves_rstd, seed) = data;
                let num_rows = num_rows.min((LARGEST_DRAWN / width).max(1));
                // A row of one element has dx = dy·w·r·eps·r²: it vanishes under the rounding of its two
                // terms unless eps counts.
                let magnitude = if width == 1 { f64::from(eps).sqrt() } else { magnitude };
                let case = RmsNormCase {
                    num_rows,
                    width,
                    dtype,
                    weight,
                    eps,
                    aliasing,
                    padding,
                    distribution,
                    magnitude,
                    zero_rows,
                    saves_rstd,
                    seed,
                };
                Case::new(NAME, &case)
            })
            .boxed()
    }

    fn corner_cases(&self, profile: Profile) -> Vec<Case> {
        let plain = RmsNormCase::plain;
        let mut cases = vec![
            plain(0, 64),
            plain(1, 32768),
            RmsNormCase { aliasing: Aliasing::InPlace, ..plain(5, 1024) },
            RmsNormCase { zero_rows: true, weight: None, ..plain(7, 512) },
            RmsNormCase { dtype: Float::F32, ..plain(3, 1000) },
            RmsNormCase { padding: 3, ..plain(9, 517) },
            // Backward of rows too wide for registers.
            RmsNormCase { padding: 8, ..plain(3, 14344) },
            // Three, and five, vectors a lane in the warp kernels.
            plain(5, 768),
            RmsNormCase { dtype: Float::F32, ..plain(3, 640) },
            // Weights of half the size of an element, which load in accesses of their own.
            RmsNormCase { dtype: Float::F32, weight: Some(Float::Bf16), ..plain(3, 64) },
            // A scalar row wider than its block.
            RmsNormCase { padding: 3, ..plain(3, 1501) },
            // More rows than blocks in the backward, and no dweight.
            RmsNormCase { weight: None, ..plain(20, 2048) },
            // More partial sums of dweight than one block of their sum takes at a time.
            plain(136, 1024),
            // No rstd to store, by each of the forward kernels.
            RmsNormCase { saves_rstd: false, ..plain(5, 512) },
            RmsNormCase { saves_rstd: false, ..plain(3, 2048) },
            RmsNormCase { saves_rstd: false, padding: 3, ..plain(3, 517) },
        ];
        if profile == Profile::Full {
            cases.extend([plain(512, 7168), plain(2048, 512), RmsNormCase { weight: None, ..plain(4096, 512) }]);
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
        let case: RmsNormCase = case.fields()?;
        case.check()?;
        Ok(Box::new(Inputs::draw(case)))
    }

    fn golden(&self, file: &GoldenFile) -> Result<Vec<GoldenCase>, CaseError> {
        if file.operator != "rmsnorm" {
            return Ok(Vec::new());
        }
        golden_case(file).map(|case| vec![case]).map_err(CaseError::Malformed)
    }
}

fn golden_case(file: &GoldenFile) -> Result<GoldenCase, String> {
    let x = file.tensor("in.x")?;
    let width = x.shape.last().copied().ok_or("in.x is a scalar")?;
    let num_rows = x.values.len() / width;
    let shape = [num_rows, width];
    let weighted = file.config["weighted"].as_bool().ok_or("config has no `weighted`")?;
    let weight = weighted.then(|| file.tensor("param.norm.weight")).transpose()?;
    let case = RmsNormCase {
        weight: weighted.then_some(Float::Bf16),
        eps: file.number("eps")? as f32,
        ..RmsNormCase::plain(num_rows, width)
    };
    let inputs = Inputs {
        x: HostTensor::from_f64(DType::Bf16, &shape, &x.values),
        weight: weight.map(|w| HostTensor::from_f64(DType::Bf16, &[width], &w.values)),
        dy: HostTensor::from_f64(DType::Bf16, &shape, &file.tensor("gout.y")?.values),
        eps: file.number("eps")?,
        case,
    };
    let mut names = vec![("y", "out.y"), ("dx", "grad.in.x")];
    names.extend(weighted.then_some(("dweight", "grad.param.norm.weight")));
    let expected = names
        .into_iter()
        .map(|(name, stored_as)| {
            let stored = file.tensor(stored_as)?;
            let (values, stored_f32) = (stored.values.clone(), stored.stored_f32);
            Ok(ExpectedTensor { name, stored_as: stored_as.to_owned(), values, stored_f32, computed_f32: false })
        })
        .collect::<Result<_, String>>()?;
    Ok(GoldenCase { prepared: Box::new(inputs), expected, kernel_skip: None })
}

/// A case with its tensors.
#[derive(Clone)]
struct Inputs {
    case: RmsNormCase,
    x: HostTensor,
    weight: Option<HostTensor>,
    dy: HostTensor,
    /// The oracle's eps: what the kernel gets, or the unrounded one of a golden file.
    eps: f64,
}

impl Inputs {
    fn draw(case: RmsNormCase) -> Self {
        let shape = [case.num_rows, case.width];
        let data = |name: &str, magnitude: f64| {
            Draw::new(case.seed, name).values(case.distribution, case.num_rows, case.width, magnitude)
        };
        let mut x = data("x", case.magnitude);
        if case.zero_rows {
            x.chunks_mut(case.width).step_by(3).for_each(|row| row.fill(0.0));
        }
        let weight = case.weight.map(|float| {
            let values = Draw::new(case.seed, "weight").values(Distribution::Normal, 1, case.width, 1.0);
            HostTensor::from_f64(float.dtype(), &[case.width], &values)
        });
        Self {
            x: HostTensor::from_f64(case.dtype.dtype(), &shape, &x),
            weight,
            dy: HostTensor::from_f64(case.dtype.dtype(), &shape, &data("dy", 1.0)),
            eps: f64::from(case.eps),
            case,
        }
    }

    fn reference(&self) -> Result<(reference::Inputs, candle_core::Tensor), candle_core::Error> {
        let weight = self.weight.as_ref().map(widened).transpose()?;
        Ok((reference::Inputs { x: widened(&self.x)?, weight, eps: self.eps }, widened(&self.dy)?))
    }

    fn run_oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, dsv4_reference::Error> {
        let (inputs, dy) = self.reference()?;
        let forward = reference::forward(&inputs, &mut Rounding::new(precision))?;
        let backward = reference::backward(&inputs, &dy, &mut Rounding::new(precision))?;
        let mut tensors = vec![
            oracle_tensor("y", Side::Forward, &forward.y)?,
            oracle_tensor("rstd", Side::Forward, &forward.rstd)?,
            oracle_tensor("dx", Side::Gradient, &backward.dx)?,
        ];
        if let Some(dweight) = &backward.dweight {
            tensors.push(oracle_tensor("dweight", Side::Gradient, dweight)?);
        }
        Ok(tensors)
    }

    fn with(&self, change: impl FnOnce(&mut Self)) -> Box<dyn Prepared> {
        let mut variant = self.clone();
        change(&mut variant);
        Box::new(variant)
    }
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
        let (num_rows, width) = (self.case.num_rows, self.case.width);
        let (x, y) = place(&mut arena, &self.x, self.case.aliasing, self.case.padding)?;
        let weight = self.weight.as_ref().map(|w| arena.input("weight", w)).transpose()?;
        let rstd = arena.output("rstd", DType::F32, &[num_rows])?;
        let rows = layout(&self.x.shape, self.case.padding);
        // The backward reads the x that the forward read, which an in-place forward has overwritten.
        let saved_x = arena.upload("saved x", &self.x, &rows, Role::Input)?;
        let dy = arena.upload("dy", &self.dy, &rows, Role::Input)?;
        let dx = arena.allocate("dx", self.x.dtype, &self.x.shape, &rows, Role::Output)?;
        let saves_rstd = self.case.saves_rstd;
        let saver = |arena: &mut DeviceArena<'_>| {
            arena.allocate("y of the forward that saves rstd", self.x.dtype, &self.x.shape, &rows, Role::Output)
        };
        let saver = (!saves_rstd).then(|| saver(&mut arena)).transpose()?;
        let (mut dweight, mut workspace) = (None, None);
        if weight.is_some() {
            dweight = Some(arena.output("dweight", DType::F32, &[width])?);
            let bytes = launcher::workspace_bytes(device, self.x.dtype, num_rows, width);
            workspace = Some(arena.workspace("workspace", bytes)?);
        }
        let mut paths = Vec::new();
        let violations = arena.run(|device| {
            let weight = weight.as_ref();
            let eps = self.case.eps;
            let forward = launcher::Forward { x: &x, weight, y: &y, rstd: saves_rstd.then_some(&rstd), eps };
            paths.push(launcher::forward(device, &forward)?.to_owned());
            if let Some(y) = &saver {
                launcher::forward(device, &launcher::Forward { x: &saved_x, weight, y, rstd: Some(&rstd), eps })?;
            }
            let backward = launcher::Backward {
                dy: &dy,
                x: &saved_x,
                weight,
                rstd: &rstd,
                dx: &dx,
                dweight: dweight.as_ref(),
                workspace: workspace.as_ref(),
            };
            paths.extend(launcher::backward(device, &backward)?.into_iter().map(str::to_owned));
            Ok(())
        })?;
        let mut tensors = vec![
            deterministic("y", arena.download(&y)?),
            deterministic("rstd", arena.download(&rstd)?),
            deterministic("dx", arena.download(&dx)?),
        ];
        if let Some(dweight) = &dweight {
            tensors.push(deterministic("dweight", arena.download(dweight)?));
        }
        Ok(KernelRun { tensors, violations, paths })
    }

    fn case(&self) -> Option<Case> {
        Some(Case::new(NAME, &self.case))
    }

    fn laws(&self) -> Vec<Law> {
        if self.case.num_rows == 0 {
            return Vec::new();
        }
        let order = permutation(self.case.seed, self.case.num_rows);
        let middle = self.case.num_rows / 2;
        let permuted_rows = || Relation::PermutedRows(order.clone());
        let others = || Relation::EqualRows(Box::new(move |row| row != middle));
        let mut laws = vec![
            Law {
                name: "dy scales the gradients once",
                variant: self.with(|v| v.dy = scaled(&self.dy, 4.0)),
                relations: [("dx", 4.0), ("dweight", 4.0), ("y", 1.0)].map(|(n, f)| (n, Relation::Times(f))).into(),
            },
            Law {
                name: "rows may be permuted",
                variant: self.with(|v| {
                    v.x = permuted(&self.x, &order);
                    v.dy = permuted(&self.dy, &order);
                }),
                relations: ["y", "dx"].map(|name| (name, permuted_rows())).into(),
            },
            Law {
                name: "independence",
                variant: self.with(|v| {
                    let mut values = self.x.to_f64();
                    let start = middle * self.case.width;
                    values[start..start + self.case.width].iter_mut().for_each(|value| *value = 3.0 - *value);
                    v.x = HostTensor::from_f64(self.x.dtype, &self.x.shape, &values);
                }),
                relations: ["y", "dx"].map(|name| (name, others())).into(),
            },
        ];
        if self.case.num_rows == 1 {
            laws.retain(|law| law.name != "independence");
        }
        if let Some(weight) = &self.weight {
            laws.push(Law {
                name: "weight scales once",
                variant: self.with(|v| v.weight = Some(scaled(weight, 0.5))),
                relations: [("y", 0.5), ("dx", 0.5), ("dweight", 1.0), ("rstd", 1.0)]
                    .map(|(name, factor)| (name, Relation::Times(factor)))
                    .into(),
            });
        } else {
            laws[0].relations.retain(|(name, _)| *name != "dweight");
        }
        laws
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        // Finite differences run the oracle dozens of times: large cases learn nothing more from them.
        (self.x.elements() <= 4096 && self.case.num_rows > 0).then(|| Box::new(Probe(self)) as Box<dyn GradientProbe>)
    }
}

struct Probe<'a>(&'a Inputs);

impl Probe<'_> {
    fn at(&self, inputs: &[Vec<f64>]) -> Result<reference::Inputs, dsv4_reference::Error> {
        let weight = inputs.get(1).map(|w| tensor(w.clone(), &[self.0.case.width])).transpose()?;
        Ok(reference::Inputs { x: tensor(inputs[0].clone(), &self.0.x.shape)?, weight, eps: self.0.eps })
    }

    fn values(&self) -> Vec<Vec<f64>> {
        self.inputs().into_iter().map(|(_, values)| values).collect()
    }

    fn gradients(gradients: &reference::Gradients) -> Result<Vec<Vec<f64>>, dsv4_reference::Error> {
        let mut all = vec![elements(&gradients.dx)?];
        all.extend(gradients.dweight.as_ref().map(elements).transpose()?);
        Ok(all)
    }

    fn upstream(&self, upstream: &[Vec<f64>]) -> Result<candle_core::Tensor, dsv4_reference::Error> {
        Ok(tensor(upstream[0].clone(), &self.0.x.shape)?)
    }
}

impl GradientProbe for Probe<'_> {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        let mut inputs = vec![("x", self.0.x.to_f64())];
        inputs.extend(self.0.weight.as_ref().map(|w| ("weight", w.to_f64())));
        inputs
    }

    /// A row bends over its own root mean square, or over the root of eps where that is larger.
    fn scales(&self) -> Vec<Option<Vec<f64>>> {
        let width = self.0.case.width;
        let row_scale = |row: &[f64]| (row.iter().map(|v| v * v).sum::<f64>() / width as f64 + self.0.eps).sqrt();
        let x = self.0.x.to_f64();
        let scales = x.chunks(width).flat_map(|row| std::iter::repeat_n(row_scale(row), width)).collect();
        let mut all = vec![Some(scales)];
        all.extend(self.0.weight.as_ref().map(|_| None));
        all
    }

    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || Ok(vec![elements(&reference::forward(&self.at(inputs)?, &mut Rounding::exact())?.y)?]);
        run().map_err(|e: dsv4_reference::Error| oracle_error(NAME, e))
    }

    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run =
            || Self::gradients(&reference::backward_autograd(&self.at(&self.values())?, &self.upstream(upstream)?)?);
        run().map_err(|e| oracle_error(NAME, e))
    }

    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let inputs = self.at(&self.values())?;
            Self::gradients(&reference::backward(&inputs, &self.upstream(upstream)?, &mut Rounding::exact())?)
        };
        run().map_err(|e| oracle_error(NAME, e))
    }
}
