//! Calls that have happened: a case with the tensors that its kernels read and wrote, in the place
//! of drawn ones. So a call of a whole model is judged as a case is.

use std::collections::BTreeMap;

use candle_core::{Device as Cpu, Tensor};
use dsv4_reference::Products;
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_runtime::HostTensor;

use super::call::Call;
use super::declaration::{Axis, Part, Specs, TensorSpec};
use super::inputs::{Inputs, kernel_tensor};
use super::lines::{Choices, field_error, oracle_error, within};
use super::size;
use super::tensors::{Bound, Tensors};
use super::{Arithmetic, Comparison, KernelRun, OracleTensor, PreparedCase, Side};
use crate::case::CaseError;
use crate::operator::fields::elements;

/// Tensors by name.
pub type ByName = BTreeMap<String, HostTensor>;

/// A call with the tensors that it read.
pub struct Actual {
    inputs: Inputs,
    specs: Specs,
}

impl Call {
    /// The call with these tensors. Those that it does not read are ignored. What the case has for
    /// its other launches, which this call was made without, is zeros.
    ///
    /// # Errors
    /// A case that takes more memory than one may.
    pub fn actual(&self, given: &ByName) -> Result<Actual, CaseError> {
        let (case, choices) = (self.any_case(), Choices::default());
        within(&*case, self.specs(), &choices.layouts, size::limit())
            .map_err(|refused| field_error(case.name(), refused))?;
        let mut tensors = Tensors::default();
        for spec in self.specs().present().filter(|spec| spec.is_read()) {
            let zeros = || {
                let shape: Vec<usize> =
                    spec.axes.iter().map(|axis| self.extent_in(axis, given)).collect();
                let bytes = vec![0; shape.iter().product::<usize>() * spec.dtype.size()];
                HostTensor { dtype: spec.dtype, shape, bytes }
            };
            tensors.put(spec.name, given.get(spec.name).cloned().unwrap_or_else(zeros));
        }
        let inputs = Inputs::of(case, choices, tensors);
        Ok(Actual { inputs, specs: self.specs().clone() })
    }

    /// The extent of an axis in the given tensors, or else in the case.
    fn extent_in(&self, axis: &Axis, given: &ByName) -> usize {
        let of =
            |spec: &TensorSpec| given.get(spec.name)?.shape.get(spec.axis(axis.name)?).copied();
        self.specs().present().find_map(of).unwrap_or(axis.extent)
    }
}

impl Actual {
    /// The arithmetic of the operator's own kernels.
    pub fn arithmetic(&self) -> Arithmetic {
        self.inputs.arithmetic()
    }

    /// A run of the oracle's forward, as one of several that have `products` in common.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn oracle(
        &self,
        precision: Precision,
        products: &Products,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let found = self.inputs.run_oracle(precision, Some(products), &[Side::Forward]);
        found.map_err(|error| oracle_error(self.inputs.operator(), error))
    }

    /// The tensors that the forward reads, in the order of their declaration.
    pub fn inputs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.specs.present().filter(|spec| spec.is_read())
    }

    /// The tensors that the forward writes and that are compared, in the order of their
    /// declaration.
    pub fn outputs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.specs
            .present()
            .filter(|spec| spec.is_written() && matches!(spec.part, Part::Output | Part::State))
    }

    /// Whether an output follows from a choice, or is a number that counts or names something.
    pub fn is_choice(spec: &TensorSpec) -> bool {
        let whole = matches!(spec.dtype, dsv4_runtime::DType::I32 | dsv4_runtime::DType::I64);
        whole || matches!(spec.comparison, Comparison::Selection { .. })
    }

    /// What the call wrote, as the checks compare it.
    pub fn run(&self, written: &ByName) -> KernelRun {
        let mut tensors = Vec::new();
        let mut stored = Tensors::default();
        for spec in self.outputs() {
            let Some(tensor) = written.get(spec.name) else { continue };
            if self.specs.compares(spec.name) {
                tensors.push(kernel_tensor(spec, tensor.clone()));
            }
            stored.put(spec.name, tensor.clone());
        }
        for (name, tensor) in self.inputs.observed(&stored) {
            if let Some(spec) = self.specs.find(name) {
                tensors.push(kernel_tensor(spec, tensor));
            }
        }
        KernelRun { tensors, violations: Vec::new(), paths: Vec::new() }
    }

    /// The oracle's exact outputs, with other values of some inputs.
    ///
    /// # Errors
    /// What the oracle rejects.
    pub fn exact(
        &self,
        others: &BTreeMap<&'static str, Vec<f64>>,
    ) -> Result<Vec<OracleTensor>, CaseError> {
        let name = self.inputs.operator();
        let mut bound = Bound::new(&self.inputs.tensors);
        for (&of, values) in others {
            let shape = &self.inputs.tensors.tensor(of).shape;
            let tensor = Tensor::from_slice(values, shape.as_slice(), &Cpu::Cpu);
            bound = bound.with(of, tensor.map_err(|error| oracle_error(name, error))?);
        }
        let mut rounding = Rounding::new(Precision::Exact);
        let found = self.inputs.case.forward(&bound, &mut rounding);
        let of = |(name, tensor): (&'static str, Tensor)| {
            let shape = tensor.dims().to_vec();
            Ok(OracleTensor { name, side: Side::Forward, shape, values: elements(&tensor)? })
        };
        found
            .and_then(|named| named.into_tensors().into_iter().map(of).collect())
            .map_err(|error| oracle_error(name, error))
    }
}
