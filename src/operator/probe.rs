//! The oracle of a declared operator as a differentiable function, for the triangulation of its
//! gradients.

use candle_core::{Device as Cpu, Tensor, Var};
use dsv4_reference::Named;
use dsv4_reference::precision::Rounding;

use super::GradientProbe;
use super::declaration::{Specs, TensorSpec};
use super::inputs::Inputs;
use super::lines::oracle_error;
use super::special;
use super::tensors::Bound;
use crate::case::CaseError;
use crate::operator::fields::elements;

/// The oracle as a function from the inputs that have gradients to the outputs that have upstreams.
pub(super) struct Probe<'i> {
    inputs: &'i Inputs,
    /// Differentiable inputs, and the names of their gradients.
    variables: Vec<(TensorSpec, &'static str)>,
    /// Names of outputs, their shapes, and the names of their upstreams.
    outputs: Vec<(&'static str, Vec<usize>, &'static str)>,
}

impl<'i> Probe<'i> {
    pub fn new(inputs: &'i Inputs, specs: &Specs) -> Self {
        let variables =
            specs.gradients().map(|(input, gradient)| (input.clone(), gradient.name)).collect();
        let outputs = specs
            .upstreams()
            .map(|(output, upstream)| (output.name, output.shape(), upstream.name))
            .collect();
        Self { inputs, variables, outputs }
    }

    /// The case's tensors with the differentiable ones replaced by these.
    fn at(&self, tensors: impl IntoIterator<Item = Tensor>) -> Bound<'i> {
        let bound = Bound::new(&self.inputs.tensors);
        self.variables
            .iter()
            .zip(tensors)
            .fold(bound, |bound, ((spec, _), tensor)| bound.with(spec.name, tensor))
    }

    fn widened(&self, values: &[Vec<f64>]) -> dsv4_reference::Result<Vec<Tensor>> {
        let tensor =
            |((spec, _), values): (&(TensorSpec, _), &Vec<f64>)| f64_tensor(values, &spec.shape());
        self.variables.iter().zip(values).map(tensor).collect()
    }

    fn own(&self) -> dsv4_reference::Result<Vec<Tensor>> {
        let values: Vec<Vec<f64>> = self.inputs().into_iter().map(|(_, values)| values).collect();
        self.widened(&values)
    }

    fn forward(&self, tensors: Vec<Tensor>) -> dsv4_reference::Result<Named> {
        self.inputs.case.forward(&self.at(tensors), &mut Rounding::exact())
    }

    fn run_autograd(&self, upstream: &[Vec<f64>]) -> dsv4_reference::Result<Vec<Vec<f64>>> {
        let variables = self.own()?.iter().map(Var::from_tensor).collect::<Result<Vec<_>, _>>()?;
        let computed =
            self.forward(variables.iter().map(|variable| variable.as_tensor().clone()).collect())?;
        let mut objective = Tensor::zeros((), candle_core::DType::F64, &Cpu::Cpu)?;
        for ((name, shape, _), weights) in self.outputs.iter().zip(upstream) {
            let output = computed.tensor(name)?;
            // 0 · inf would be NaN. A non-finite value (an empty row's lse) is skipped, as is its
            // weight.
            let output = output.abs()?.le(f64::MAX)?.where_cond(output, &output.zeros_like()?)?;
            objective = (objective + (output * f64_tensor(weights, shape)?)?.sum_all()?)?;
        }
        let gradients = objective.backward()?;
        let of = |variable: &Var| match gradients.get(variable) {
            Some(gradient) => Ok(elements(gradient)?),
            None => Ok(vec![0.0; variable.elem_count()]),
        };
        variables.iter().map(of).collect()
    }

    fn run_backward(&self, upstream: &[Vec<f64>]) -> dsv4_reference::Result<Vec<Vec<f64>>> {
        let mut bound = self.at(self.own()?);
        for ((_, shape, name), weights) in self.outputs.iter().zip(upstream) {
            bound = bound.with(name, f64_tensor(weights, shape)?);
        }
        let computed = self.inputs.case.backward(&bound, &mut Rounding::exact())?;
        let gradient = |(_, name): &(_, &'static str)| Ok(elements(computed.tensor(name)?)?);
        self.variables.iter().map(gradient).collect()
    }
}

fn f64_tensor(values: &[f64], shape: &[usize]) -> dsv4_reference::Result<Tensor> {
    Ok(Tensor::from_slice(values, shape, &Cpu::Cpu)?)
}

impl GradientProbe for Probe<'_> {
    fn inputs(&self) -> Vec<(&'static str, Vec<f64>)> {
        // Rows that no kernel may read are NaN, so differences there are undefined.
        let clean = |values: Vec<f64>| {
            values.into_iter().map(|v| if v.is_nan() { 0.0 } else { v }).collect()
        };
        self.variables
            .iter()
            .map(|(spec, _)| (spec.name, clean(self.inputs.tensors.values(spec.name))))
            .collect()
    }

    fn scales(&self) -> Vec<Option<Vec<f64>>> {
        let Inputs { case, tensors, .. } = self.inputs;
        let declared = |spec: &TensorSpec| special::bends_over(spec, &tensors.values(spec.name));
        let own =
            |spec: &TensorSpec| case.bends_over(tensors, spec.name).or_else(|| declared(spec));
        self.variables.iter().map(|(spec, _)| own(spec)).collect()
    }

    fn outputs(&self, inputs: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        let run = || {
            let computed = self.forward(self.widened(inputs)?)?;
            let values = |name| Ok(elements(computed.tensor(name)?)?);
            self.outputs
                .iter()
                .map(|(name, ..)| values(name))
                .collect::<dsv4_reference::Result<_>>()
        };
        run().map_err(|e| oracle_error(self.inputs.case.name(), e))
    }

    fn autograd(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        self.run_autograd(upstream).map_err(|e| oracle_error(self.inputs.case.name(), e))
    }

    fn backward(&self, upstream: &[Vec<f64>]) -> Result<Vec<Vec<f64>>, CaseError> {
        self.run_backward(upstream).map_err(|e| oracle_error(self.inputs.case.name(), e))
    }
}
