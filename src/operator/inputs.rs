//! A case with its tensors: the input of an operator's oracle and kernels.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::{Conventions, Products};
use dsv4_runtime::arena::Violation;
use dsv4_runtime::recording::RecordingBackend;
use dsv4_runtime::{Contract, DType, Device, Environment, HostTensor, Role, RuntimeError};

use super::any::AnyCase;
use super::declaration::{Part, Specs, TensorSpec};
use super::declared::{Frozen, Launches};
use super::elsewhere::{Elsewhere, OfRank, WrittenByRank};
use super::lines::{Choices, line, oracle_error, room_on};
use super::memory::Placed;
use super::probe::Probe;
use super::special::{self, Special};
use super::tensors::{Bound, Tensors};
use super::{
    Arithmetic, Batched, Given, GradientProbe, KernelRun, KernelTensor, Law, OracleTensor,
    PreparedCase, Sequence, Side,
};
use super::{laws, sequence};
use crate::case::{Case, CaseError};
use crate::operator::Written;
use crate::operator::fields::elements;
use crate::record::Seconds;

/// The part of a variant's tensor that is compared: the elements at these offsets, in this shape.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    pub name: &'static str,
    pub shape: Vec<usize>,
    pub elements: Vec<usize>,
}

impl Shown {
    fn of_values(&self, values: &[f64]) -> Vec<f64> {
        self.elements.iter().map(|&at| values[at]).collect()
    }

    fn of_tensor(&self, tensor: &HostTensor) -> HostTensor {
        let size = tensor.dtype.size();
        let bytes = self
            .elements
            .iter()
            .flat_map(|&at| tensor.bytes[at * size..(at + 1) * size].iter().copied());
        HostTensor { dtype: tensor.dtype, shape: self.shape.clone(), bytes: bytes.collect() }
    }
}

/// A case with its tensors.
#[derive(Clone)]
pub struct Inputs {
    pub(super) case: AnyCase,
    pub(super) choices: Choices,
    pub(super) tensors: Arc<Tensors>,
    pub(super) shown: Vec<Shown>,
    /// Whether the case's line determines these inputs except for their values.
    pub(super) said: bool,
}

impl Inputs {
    /// Draws the tensors of a case that was checked.
    pub(super) fn draw(case: AnyCase, choices: Choices) -> Result<Self, CaseError> {
        let mut tensors = Tensors::draw(&case.tensors(), choices.special.as_ref());
        case.amend(&mut tensors).map_err(|e| oracle_error(case.name(), e))?;
        let inputs = Self::of(case, choices, tensors);
        let Some(special) = &inputs.choices.special else { return Ok(inputs) };
        match special {
            Special::NanIn(name) => inputs.with_lone(name, f64::NAN),
            Special::InfinityIn(name) => inputs.with_lone(name, f64::INFINITY),
            Special::Large(name) => Ok(inputs.scaled_as_far_as_fp32_allows(name, 2.0)),
            Special::Small(name) => Ok(inputs.scaled_as_far_as_fp32_allows(name, 0.5)),
            Special::Subnormal(name) => Ok(inputs.subnormal(name)),
            Special::AtTheLimit | Special::NotFinite | Special::Alone(_) => Ok(inputs),
        }
    }

    /// The same inputs with a tensor of subnormal values.
    fn subnormal(&self, name: &str) -> Self {
        let Some(spec) = self.specs().find(name).cloned() else { return self.clone() };
        let mut tensors = (*self.tensors).clone();
        tensors.scale(spec.name, special::to_subnormal(&self.tensors.values(spec.name)));
        Self { tensors: Arc::new(tensors), ..self.clone() }
    }

    /// The same inputs with a tensor multiplied by the largest power of a base, 2 or its inverse,
    /// that keeps every intermediate within fp32's range. Unchanged if no power does.
    fn scaled_as_far_as_fp32_allows(&self, name: &str, base: f64) -> Self {
        let Some(spec) = self.specs().find(name).cloned() else { return self.clone() };
        let of = |tensors: &Tensors| laws::outside_f32(&*self.case, tensors);
        let (own, before) = (self.tensors.values(spec.name), of(&self.tensors));
        let scaled = |exponent: i32| {
            let factor = base.powi(exponent);
            let mut tensors = (*self.tensors).clone();
            tensors.scale(spec.name, factor);
            // A type with a smaller range loses values: scaling back does not restore them.
            let back = tensors.values(spec.name).into_iter().map(|x| x / factor);
            let kept = back.zip(&own).all(|(a, b)| a == *b || a.is_nan() && b.is_nan());
            (kept && of(&tensors) == before).then_some(tensors)
        };
        match (1..=12).rev().find_map(|tens| scaled(10 * tens)) {
            Some(tensors) => Self { tensors: Arc::new(tensors), ..self.clone() },
            None => self.clone(),
        }
    }

    /// The same inputs with one value replaced, at an offset where the oracle's results depend on
    /// it. At the last offset that was tried if none does.
    fn with_lone(&self, name: &str, number: f64) -> Result<Self, CaseError> {
        let results = |inputs: &Self| -> Result<Vec<u64>, CaseError> {
            let oracle = inputs
                .run_oracle(Precision::Exact, None, &Side::BOTH)
                .map_err(|e| oracle_error(self.case.name(), e))?;
            Ok(oracle
                .iter()
                .flat_map(|tensor| &tensor.values)
                .map(|value| value.to_bits())
                .collect())
        };
        let specs = self.specs();
        let Some(spec) = specs.find(name) else { return Ok(self.clone()) };
        let before = results(self)?;
        let mut last = self.clone();
        for tensors in special::corrupted(spec, specs.seed, number, &self.tensors) {
            last = Self { tensors: Arc::new(tensors), ..self.clone() };
            if results(&last)? != before {
                break;
            }
        }
        Ok(last)
    }

    pub(super) fn of(case: AnyCase, choices: Choices, tensors: Tensors) -> Self {
        Self { case, choices, tensors: Arc::new(tensors), shown: Vec::new(), said: true }
    }

    /// Replaces a tensor.
    pub(super) fn put(&mut self, name: &'static str, tensor: HostTensor) {
        Arc::make_mut(&mut self.tensors).put(name, tensor);
    }

    pub(super) fn specs(&self) -> Specs {
        self.case.tensors()
    }

    /// Runs the oracle of these sides, separately or as one of the runs that have `products` in
    /// common.
    pub(super) fn run_oracle(
        &self,
        precision: Precision,
        products: Option<&Products>,
        sides: &[Side],
    ) -> dsv4_reference::Result<Vec<OracleTensor>> {
        let specs = self.specs();
        let bound = Bound::new(&self.tensors);
        let mut tensors = Vec::new();
        // One for all sides: runs that share products must request them in one order.
        let mut rounding =
            products.map_or_else(|| Rounding::new(precision), |p| Rounding::sharing(precision, p));
        for &side in sides {
            let computed = match side {
                Side::Forward => self.case.forward(&bound, &mut rounding)?,
                Side::Gradient => self.case.backward(&bound, &mut rounding)?,
            };
            for (name, tensor) in computed.into_tensors() {
                tensors.push(OracleTensor {
                    name,
                    side,
                    shape: tensor.dims().to_vec(),
                    values: elements(&tensor)?,
                });
            }
        }
        self.observe_oracle(&specs, &mut tensors, rounding.conventions());
        for shown in &self.shown {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == shown.name) {
                (tensor.values, tensor.shape) =
                    (shown.of_values(&tensor.values), shown.shape.clone());
            }
        }
        Ok(tensors)
    }

    /// Replaces the oracle's stored bytes by what they mean, where the operator observes them.
    fn observe_oracle(
        &self,
        specs: &Specs,
        tensors: &mut Vec<OracleTensor>,
        conventions: Conventions,
    ) {
        if specs.present().all(|spec| spec.part != Part::Observed) {
            return;
        }
        let mut written = Tensors::default();
        for spec in specs.present().filter(|spec| spec.is_written()) {
            if let Some(tensor) = tensors.iter().find(|tensor| tensor.name == spec.name) {
                written.put(spec.name, stored(spec, &tensor.values));
            }
        }
        tensors.retain(|tensor| written.get(tensor.name).is_none() || specs.compares(tensor.name));
        let observed = self.case.observe(&self.tensors, &written, conventions);
        let observed = observed.into_iter().map(|(name, tensor)| OracleTensor {
            name,
            side: Side::Forward,
            shape: tensor.shape.clone(),
            values: tensor.to_f64(),
        });
        tensors.extend(observed);
    }

    /// What stored bytes mean, where the operator observes them.
    pub(super) fn observed(&self, written: &Tensors) -> Vec<(&'static str, HostTensor)> {
        match self.specs().present().any(|spec| spec.part == Part::Observed) {
            true => self.case.observe(&self.tensors, written, Conventions::default()),
            false => Vec::new(),
        }
    }

    /// The device for its launches: with the SMs that the case asks for, if it asks and the device
    /// can, and asked for invariant paths, if the case is.
    pub(super) fn on<'d>(&self, device: &'d Device) -> On<'d> {
        let with_sms = self.choices.sms.and_then(|sms| device.with_sms(sms));
        match (with_sms, self.choices.invariant) {
            (None, false) => On::Given(device),
            (Some(changed), false) => On::Changed(changed),
            (None, true) => On::Changed(device.invariant()),
            (Some(changed), true) => On::Changed(changed.invariant()),
        }
    }

    /// Its tensors on a device, with the workspaces that its launches need.
    pub(super) fn placed<'d>(
        &self,
        device: &'d Device,
        contract: Contract,
        specs: &Specs,
    ) -> Result<Placed<'d>, RuntimeError> {
        let mut placed =
            Placed::place(device, contract, specs, &self.choices.layouts, &self.tensors)?;
        for (name, bytes) in self.case.workspaces(placed.views(), device)? {
            placed.workspace(name, bytes)?;
        }
        Ok(placed)
    }

    /// Launches forward and backward on the placed tensors, and reads back what they wrote.
    pub(super) fn launched(
        &self,
        specs: &Specs,
        placed: &Placed<'_>,
    ) -> Result<KernelRun, RuntimeError> {
        let (violations, paths, frozen) = self.run_on(specs, placed, None)?;
        Ok(KernelRun { tensors: self.collect(specs, placed, &frozen)?, violations, paths })
    }

    /// Launches forward and backward on the placed tensors. Returns forbidden writes, the paths that
    /// ran, and outputs as they were before the backward.
    fn run_on(
        &self,
        specs: &Specs,
        placed: &Placed<'_>,
        elsewhere: Option<&Elsewhere>,
    ) -> Result<Ran, RuntimeError> {
        let (mut paths, mut frozen, mut changed) = (Vec::new(), Vec::new(), Vec::new());
        let mut violations = placed.arena().run(|device| {
            let mut run = Launches::new(device, placed.arena()).with_ranks(elsewhere);
            self.case.launch(placed.views(), &mut run)?;
            if specs.gradients().next().is_some() {
                for spec in specs.present().filter(|spec| spec.part == Part::Output) {
                    run.freeze(&placed.views()[spec.name])?;
                }
                self.case.launch_backward(placed.backward_views(), &mut run)?;
            }
            let launched = run.finish();
            (paths, frozen) = (launched.paths, launched.frozen);
            changed = placed.changed(&frozen)?;
            changed.extend(launched.violations);
            Ok(())
        })?;
        violations.extend(changed);
        Ok((violations, paths, frozen))
    }

    /// Every tensor that the kernels wrote, as it is stored; of ranks that run elsewhere, if any.
    fn stored_by(
        &self,
        device: &Device,
        contract: Contract,
        elsewhere: Option<&Elsewhere>,
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        let (specs, device) = (self.specs(), self.on(device));
        let placed = self.placed(&device, contract, &specs)?;
        let (_, _, frozen) = self.run_on(&specs, &placed, elsewhere)?;
        self.read_back(&specs, &placed, &frozen)
    }

    /// The given tensors as the device received them, where they differ from what was drawn.
    fn uploaded(&self, specs: &Specs, placed: &Placed<'_>) -> Cow<'_, Tensors> {
        let mut given = Cow::Borrowed(&*self.tensors);
        for spec in specs.present().filter(|spec| spec.is_given()) {
            if let Some(tensor) = placed.replacement(spec.name) {
                given.to_mut().put(spec.name, tensor.clone());
            }
        }
        given
    }

    /// What was written and is compared. A frozen tensor is reported as it was when frozen, because
    /// a later change is a separate finding.
    pub(super) fn collect(
        &self,
        specs: &Specs,
        placed: &Placed<'_>,
        frozen: &[Frozen],
    ) -> Result<Vec<KernelTensor>, RuntimeError> {
        let written = self.read_back(specs, placed, frozen)?;
        let given = self.uploaded(specs, placed);
        Ok(self.compared_of(specs, written, &given, Conventions::default()))
    }

    /// Every tensor that the kernels wrote, as it is stored.
    fn read_back(
        &self,
        specs: &Specs,
        placed: &Placed<'_>,
        frozen: &[Frozen],
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        let written = specs.present().filter(|spec| is_read_back(spec)).map(|spec| {
            let whole = &placed.views()[spec.name];
            let of_whole = frozen
                .iter()
                .find(|(view, _)| view.name == whole.name && view.same_elements(whole));
            let tensor = match of_whole {
                Some((_, tensor)) => tensor.clone(),
                None => placed.download(spec.name)?,
            };
            Ok((spec.name, tensor))
        });
        written.collect()
    }

    /// What is compared of tensors as they are stored: themselves, or what they mean. Nothing is
    /// observed of an incomplete forward.
    fn compared_of(
        &self,
        specs: &Specs,
        stored: Vec<(&'static str, HostTensor)>,
        given: &Tensors,
        conventions: Conventions,
    ) -> Vec<KernelTensor> {
        let mut tensors = Vec::new();
        let mut written = Tensors::default();
        for (name, tensor) in stored {
            let Some(spec) = specs.find(name) else { continue };
            if specs.compares(name) {
                tensors.push(kernel_tensor(spec, tensor.clone()));
            }
            written.put(name, tensor);
        }
        let is_there = |spec: &TensorSpec| {
            matches!(spec.part, Part::Gradient { .. }) || written.get(spec.name).is_some()
        };
        if specs.present().any(|spec| spec.part == Part::Observed)
            && specs.present().filter(|spec| is_read_back(spec)).all(is_there)
        {
            for (name, tensor) in self.case.observe(given, &written, conventions) {
                if let Some(spec) = specs.find(name) {
                    tensors.push(kernel_tensor(spec, tensor));
                }
            }
        }
        for shown in &self.shown {
            if let Some(tensor) = tensors.iter_mut().find(|tensor| tensor.name == shown.name) {
                tensor.tensor = shown.of_tensor(&tensor.tensor);
            }
        }
        tensors
    }
}

/// Whether the kernels write a tensor that is read back.
fn is_read_back(spec: &TensorSpec) -> bool {
    spec.is_written() && spec.part != Part::Scratch
}

/// A device as it is given, or one with what a case asks for.
pub(super) enum On<'d> {
    Given(&'d Device),
    Changed(Device),
}

impl Deref for On<'_> {
    type Target = Device;

    fn deref(&self) -> &Device {
        match self {
            Self::Given(device) => device,
            Self::Changed(device) => device,
        }
    }
}

/// Bytes of a spec's type that hold the oracle's values.
fn stored(spec: &TensorSpec, values: &[f64]) -> HostTensor {
    let shape = spec.shape();
    match spec.dtype {
        DType::U8 => HostTensor {
            dtype: DType::U8,
            shape,
            bytes: values.iter().map(|&value| value as u8).collect(),
        },
        DType::I32 => HostTensor::from_i32(
            &shape,
            &values.iter().map(|&value| value as i32).collect::<Vec<_>>(),
        ),
        dtype => HostTensor::from_f64(dtype, &shape, values),
    }
}

pub(super) fn kernel_tensor(spec: &TensorSpec, tensor: HostTensor) -> KernelTensor {
    let TensorSpec { deterministic, comparison, grid, pooling, .. } = *spec;
    KernelTensor {
        deterministic,
        comparison,
        grid,
        pooling,
        ..KernelTensor::new(spec.name, tensor)
    }
}

/// Forbidden writes, the paths that ran, and outputs as they were before the backward.
type Ran = (Vec<Violation>, Vec<String>, Vec<Frozen>);

impl PreparedCase for Inputs {
    fn operator(&self) -> &'static str {
        self.case.name()
    }

    fn case(&self) -> Option<Case> {
        self.said.then(|| line(&*self.case, &self.choices))
    }

    fn given(&self) -> Vec<Given<'_>> {
        let specs = self.case.tensors();
        let of = |spec: &TensorSpec| {
            let tensor = self.tensors.get(spec.name)?;
            let axes = spec.axes.iter().map(|axis| axis.name).collect();
            // A variant may hold a tensor in another form than its case declares.
            (spec.is_given() && tensor.shape.len() == spec.axes.len()).then_some(Given {
                name: spec.name,
                tensor,
                axes,
            })
        };
        specs.present().filter_map(of).collect()
    }

    fn oracle(&self, precision: Precision) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision, None, &Side::BOTH).map_err(|e| oracle_error(self.case.name(), e))
    }

    fn arithmetic(&self) -> Arithmetic {
        Arithmetic::of_specification(self.case.operator().sum_lanes())
    }

    fn oracle_sharing(
        &self,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        self.run_oracle(precision, Some(products), &Side::BOTH)
            .map_err(|e| oracle_error(self.case.name(), e))
    }

    fn oracle_of_saved(
        &self,
        written: &KernelRun,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let mut tensors = (*self.tensors).clone();
        for saved in &written.tensors {
            tensors.put(saved.name, saved.tensor.clone());
        }
        let mut rounding = Rounding::sharing(precision, products);
        let computed = self.case.backward_of_saved(&Bound::new(&tensors), &mut rounding);
        let side = Side::Gradient;
        let of = |(name, tensor): (&'static str, Tensor)| {
            Ok(OracleTensor {
                name,
                side,
                shape: tensor.dims().to_vec(),
                values: elements(&tensor)?,
            })
        };
        let tensors = computed.and_then(|named| named.into_tensors().into_iter().map(of).collect());
        tensors.map_err(|e| oracle_error(self.case.name(), e))
    }

    fn room_on_gpu(&self, environment: &Environment) -> u64 {
        room_on(environment, &self.specs(), &self.choices.layouts)
    }

    fn kernel(&self, device: &Device, contract: Contract) -> Result<KernelRun, RuntimeError> {
        let specs = self.specs();
        let device = self.on(device);
        self.launched(&specs, &self.placed(&device, contract, &specs)?)
    }

    fn stored(
        &self,
        device: &Device,
        contract: Contract,
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        self.stored_by(device, contract, None)
    }

    fn of_ranks(
        &self,
        device: &Device,
        contract: Contract,
    ) -> Result<Option<Vec<OfRank>>, RuntimeError> {
        if !self.case.operator().has_ranks() {
            return Ok(None);
        }
        let asked = Elsewhere::asked();
        self.stored_by(device, contract, Some(&asked))?;
        Ok(asked.into_asked())
    }

    fn united(
        &self,
        device: &Device,
        contract: Contract,
        written: Vec<WrittenByRank>,
    ) -> Result<Vec<(&'static str, HostTensor)>, RuntimeError> {
        self.stored_by(device, contract, Some(&Elsewhere::Answered(written)))
    }

    fn written(&self) -> Vec<Written> {
        let specs = self.specs();
        let form = |spec: &TensorSpec| Written {
            name: spec.name,
            dtype: spec.dtype,
            shape: spec.shape(),
            side: match spec.part {
                Part::Gradient { .. } => Side::Gradient,
                _ => Side::Forward,
            },
        };
        specs.present().filter(|spec| is_read_back(spec)).map(form).collect()
    }

    fn observed(&self) -> Vec<&'static str> {
        let specs = self.specs();
        let observed = specs.present().filter(|spec| spec.part == Part::Observed);
        observed.map(|spec| spec.name).collect()
    }

    fn compared(
        &self,
        stored: Vec<(&'static str, HostTensor)>,
        conventions: Conventions,
    ) -> Vec<KernelTensor> {
        self.compared_of(&self.specs(), stored, &self.tensors, conventions)
    }

    fn seconds(&self, device: &Device) -> Result<Seconds, RuntimeError> {
        super::timing::of(self, device)
    }

    fn sequence(
        &self,
        device: &Device,
        contract: Contract,
    ) -> Result<Option<Sequence>, RuntimeError> {
        sequence::of(self, device, contract).map(Some)
    }

    fn laws(&self) -> Vec<Law> {
        self.case.laws(self)
    }

    fn batches(&self) -> Batched {
        self.case.batches(self)
    }

    fn launches(&self, environment: &Environment) -> Result<Vec<String>, RuntimeError> {
        let backend = Arc::new(RecordingBackend::accepting(environment.clone()));
        let device = Device::of_accepting(backend.clone(), dsv4_kernels::sources());
        let device = self.on(&device);
        let specs = self.specs();
        let placed = self.placed(&device, Contract::NAN, &specs)?;
        let mut run = Launches::timed(&device);
        self.case.launch(placed.views(), &mut run)?;
        if specs.gradients().next().is_some() {
            self.case.launch_backward(placed.backward_views(), &mut run)?;
        }
        Ok(backend.take_accepted().into_iter().map(|launch| launch.kernel).collect())
    }

    fn gradient_probe(&self) -> Option<Box<dyn GradientProbe + '_>> {
        let specs = self.specs();
        let whole =
            specs.gradients().next().is_some() && specs.present().all(|spec| spec.elements() > 0);
        let finite = self.choices.special.as_ref().is_none_or(Special::is_finite);
        (whole && finite && self.case.is_smooth())
            .then(|| Box::new(Probe::new(self, &specs)) as Box<dyn GradientProbe>)
    }
}

/// Roles of the arena by part.
pub(super) fn role(part: Part) -> Role {
    match part {
        Part::Input | Part::Upstream { .. } => Role::Input,
        Part::State => Role::InPlace,
        Part::Output | Part::Gradient { .. } => Role::Output,
        Part::Scratch | Part::Observed => Role::Workspace,
    }
}
