//! Laws of a declared operator: variants of a case, and what must hold between the two.
//!
//! A relation on a tensor that the case does not have is dropped. So an operator states each law
//! once for all its cases.

use std::cell::OnceCell;

use dsv4_reference::Rounding;
use dsv4_runtime::{DType, HostTensor};

use super::any::{AnyCase, DeclaredCase, any};
use super::declaration::{Part, Specs, TensorSpec};
use super::declared::Operator;
use super::inputs::{Inputs, Shown};
use super::lines::Choices;
use super::tensors::{Bound, Tensors};
use super::{Law, Relation};
use crate::case::permutation;

/// A variant under construction.
pub struct Variant<K: Operator> {
    /// Its case.
    pub case: K::Case,
    /// Its tensors.
    pub tensors: Tensors,
    shown: Vec<Shown>,
    said: bool,
}

impl<K: Operator> Variant<K> {
    pub(super) fn of(case: K::Case, tensors: Tensors) -> Self {
        Self { case, tensors, shown: Vec::new(), said: true }
    }

    /// Compares only these elements of the output called `name` (offsets, row-major), in this
    /// shape.
    pub fn show(&mut self, name: &'static str, shape: &[usize], elements: Vec<usize>) {
        self.said = false;
        self.shown.push(Shown { name, shape: shape.to_vec(), elements });
    }

    /// The variant differs from the case in more than a JSON line and given tensors can express.
    /// External kernels do not run it.
    pub fn unsaid(&mut self) {
        self.said = false;
    }

    pub(super) fn into_any(self) -> AnyVariant {
        let Self { case, tensors, shown, said } = self;
        AnyVariant { case: any::<K>(case), tensors, shown, said }
    }
}

/// The tensors that a relation binds, and the relation.
type Bindings = Vec<(&'static str, Relation)>;

/// The laws of one case.
pub struct Laws<'i, K: Operator> {
    case: &'i K::Case,
    any: AnyLaws<'i>,
}

impl<'i, K: Operator> Laws<'i, K> {
    /// The laws of `case`, to which `inputs` belongs.
    pub(super) fn new(case: &'i K::Case, inputs: &'i Inputs) -> Self {
        let any = AnyLaws {
            inputs,
            specs: inputs.specs(),
            laws: Vec::new(),
            outside_f32: OnceCell::new(),
        };
        Self { case, any }
    }

    pub(super) fn finish(self) -> Vec<Law> {
        self.any.laws
    }

    /// The case's own tensors.
    pub fn tensors(&self) -> &'i Tensors {
        &self.any.inputs.tensors
    }

    /// The outputs and gradients of the case.
    pub fn compared(&self) -> Vec<&'static str> {
        self.any.specs.compared().map(|spec| spec.name).collect()
    }

    fn variant(&self) -> Variant<K> {
        let (case, tensors) = (self.case.clone(), Tensors::clone(self.tensors()));
        Variant::of(case, tensors)
    }

    /// A law of any kind.
    pub fn law(
        &mut self,
        name: &'static str,
        change: impl FnOnce(&mut Variant<K>),
        relations: impl IntoIterator<Item = (&'static str, Relation)>,
    ) {
        let mut variant = self.variant();
        change(&mut variant);
        self.any.law(name, variant.into_any(), relations.into_iter().collect());
    }

    /// A law that binds all outputs and gradients alike.
    pub fn alike(
        &mut self,
        name: &'static str,
        relation: Relation,
        change: impl FnOnce(&mut Variant<K>),
    ) {
        let relations = self.all(relation);
        self.law(name, change, relations);
    }

    /// Tensor `scaled` times `factor`, a power of two, multiplies each named tensor by the given
    /// power of that factor. Cases where that moves an intermediate out of fp32's range, or back
    /// into it, are skipped and counted.
    pub fn scale(
        &mut self,
        name: &'static str,
        scaled: &'static str,
        factor: f64,
        outputs: &[(&'static str, f64)],
    ) {
        self.any.scale(name, &[scaled], factor, outputs);
    }

    /// The gradients are linear in the upstream gradients, and no output depends on these: each
    /// upstream contributes once.
    pub fn scale_upstreams(&mut self) {
        self.any.scale_upstreams();
    }

    /// Binds every output and gradient with this relation.
    pub fn all(&self, relation: Relation) -> Vec<(&'static str, Relation)> {
        self.compared().into_iter().map(|name| (name, relation.clone())).collect()
    }

    /// `number`, the case's field called `field`, multiplies what tensor `scaled` multiplies, once.
    /// These relations hold where the number is a quarter and the tensor four times as large.
    pub fn exchange(
        &mut self,
        name: &'static str,
        scaled: &'static str,
        field: &'static str,
        number: fn(&mut K::Case) -> &mut f32,
        relations: impl IntoIterator<Item = (&'static str, Relation)>,
    ) {
        let mut variant = self.variant();
        variant.tensors.scale(scaled, 4.0);
        variant.tensors.scale_scalar(field, 0.25);
        *number(&mut variant.case) /= 4.0;
        let variant = variant.into_any();
        if self.any.leaves_f32(&*variant.case, &variant.tensors) {
            return self.any.leave_out(name);
        }
        self.any.law(name, variant, relations.into_iter().collect());
    }

    /// Entries along `axis` are independent of each other: [`Self::permute`], under this name, and
    /// [`Self::independent`].
    pub fn separate(&mut self, axis: &str, permuted: &'static str) {
        self.permute(permuted, axis);
        self.independent(axis);
    }

    /// Entries along `axis` may come in another order. A tensor with the axis follows that order,
    /// bit for bit. A sum over the axis stays the same: a gradient within its budget, an output bit
    /// for bit.
    pub fn permute(&mut self, name: &'static str, axis: &str) {
        self.any.permute(name, axis);
    }

    /// Other values and lists in the middle entry along `axis` change no other entry of what has
    /// the axis.
    pub fn independent(&mut self, axis: &str) {
        self.any.independent(axis);
    }
}

/// A variant of a case of any operator.
pub(super) struct AnyVariant {
    pub(super) case: AnyCase,
    pub(super) tensors: Tensors,
    shown: Vec<Shown>,
    said: bool,
}

impl AnyVariant {
    pub(super) fn of(case: AnyCase, tensors: Tensors) -> Self {
        Self { case, tensors, shown: Vec::new(), said: true }
    }

    pub(super) fn into_inputs(self, choices: Choices) -> Inputs {
        let Self { case, tensors, shown, said } = self;
        Inputs { shown, said, ..Inputs::of(case, choices, tensors) }
    }
}

/// The part of [`Laws`] that does not need the case's type.
struct AnyLaws<'i> {
    inputs: &'i Inputs,
    specs: Specs,
    laws: Vec<Law>,
    /// The results for the case's own tensors, computed at first use.
    outside_f32: OnceCell<Option<u64>>,
}

impl AnyLaws<'_> {
    fn law(&mut self, name: &'static str, variant: AnyVariant, mut relations: Bindings) {
        relations.retain(|(name, _)| self.specs.find(name).is_some());
        if relations.is_empty() {
            return;
        }
        let variant = Box::new(variant.into_inputs(self.inputs.choices.clone()));
        self.laws.push(Law { name, variant, relations, left_out: None });
    }

    /// The case with other tensors.
    fn with(&self, tensors: Tensors) -> AnyVariant {
        AnyVariant::of(self.inputs.case.clone(), tensors)
    }

    fn scale_upstreams(&mut self) {
        const FACTOR: f64 = 4.0;
        let upstreams: Vec<_> = self.specs.upstreams().map(|(_, upstream)| upstream.name).collect();
        let factor = |spec: &TensorSpec| {
            if matches!(spec.part, Part::Gradient { .. }) { FACTOR } else { 1.0 }
        };
        // Sums in no fixed order repeat only within their budgets.
        let bound = self.specs.compared().filter(|spec| spec.deterministic);
        let outputs: Vec<_> = bound.map(|spec| (spec.name, factor(spec))).collect();
        self.scale("upstreams scale the gradients once", &upstreams, FACTOR, &outputs);
    }

    fn scale(
        &mut self,
        name: &'static str,
        scaled: &[&'static str],
        factor: f64,
        outputs: &[(&'static str, f64)],
    ) {
        let present = |name: &&str| self.specs.find(name).is_some_and(|spec| spec.elements() > 0);
        if !scaled.iter().any(present) {
            return;
        }
        let mut tensors = Tensors::clone(&self.inputs.tensors);
        scaled.iter().for_each(|name| tensors.scale(name, factor));
        if self.leaves_f32(&*self.inputs.case, &tensors) {
            return self.leave_out(name);
        }
        let relations =
            outputs.iter().map(|&(name, factor)| (name, Relation::Times(factor))).collect();
        self.law(name, self.with(tensors), relations);
    }

    /// Whether these values move an intermediate out of fp32's range, or back into it.
    fn leaves_f32(&self, case: &dyn DeclaredCase, tensors: &Tensors) -> bool {
        let own =
            self.outside_f32.get_or_init(|| outside_f32(&*self.inputs.case, &self.inputs.tensors));
        *own != outside_f32(case, tensors)
    }

    fn leave_out(&mut self, name: &'static str) {
        let why = "an intermediate leaves fp32's range or comes into it, where powers of two are rounded, too";
        let variant = Box::new(self.inputs.clone());
        self.laws.push(Law { name, variant, relations: Vec::new(), left_out: Some(why) });
    }

    fn permute(&mut self, name: &'static str, axis: &str) {
        let Some(extent) = self.specs.extent(axis).filter(|&extent| extent > 1) else { return };
        let order = permutation(self.specs.seed, extent);
        let relation = |spec: &TensorSpec| match (spec.axis(axis), spec.part) {
            (Some(at), _) => Relation::PermutedAlong { axis: at, order: order.clone() },
            (None, Part::Gradient { .. }) => Relation::WithinBudget,
            (None, _) => Relation::Times(1.0),
        };
        let relations = self.specs.compared().map(|spec| (spec.name, relation(spec))).collect();
        let mut tensors = Tensors::clone(&self.inputs.tensors);
        tensors.permute(&self.specs, axis, &order);
        self.law(name, self.with(tensors), relations);
    }

    fn independent(&mut self, axis: &str) {
        let Some(extent) = self.specs.extent(axis).filter(|&extent| extent > 1) else { return };
        let middle = extent / 2;
        let bound = self.specs.compared().filter(|spec| spec.deterministic);
        let bound = bound.filter_map(|spec| Some((spec.name, spec.axis(axis)?)));
        let relations =
            bound.map(|(name, axis)| (name, Relation::EqualExcept { axis, at: middle })).collect();
        let mut tensors = Tensors::clone(&self.inputs.tensors);
        for spec in self.specs.present().filter(|spec| spec.is_given()) {
            if let (Some(at), Some(tensor)) = (spec.axis(axis), tensors.get(spec.name)) {
                let changed = with_other_entry(tensor, at, middle);
                tensors.put(spec.name, changed);
            }
        }
        self.law("independence", self.with(tensors), relations);
    }
}

/// The oracle's intermediates that fp32 cannot hold. An oracle that rejects its inputs reports that
/// in another check.
pub(super) fn outside_f32(case: &dyn DeclaredCase, tensors: &Tensors) -> Option<u64> {
    let (bound, mut rounding) = (Bound::new(tensors), Rounding::watching());
    case.forward(&bound, &mut rounding).ok()?;
    case.backward(&bound, &mut rounding).ok()?;
    Some(rounding.outside_f32())
}

/// The tensor with other values in entry `entry` along axis `at`. Floating-point values are
/// subtracted from 3, and lists of integers are reversed. Single integers and bytes stay.
fn with_other_entry(tensor: &HostTensor, at: usize, entry: usize) -> HostTensor {
    let inner: usize = tensor.shape[at + 1..].iter().product();
    let (extent, outer) = (tensor.shape[at], tensor.shape[..at].iter().product::<usize>());
    let ranges = (0..outer).map(|o| (o * extent + entry) * inner).map(|start| start..start + inner);
    match tensor.dtype {
        DType::F32 | DType::Bf16 => {
            let mut values = tensor.to_f64();
            ranges.flatten().for_each(|i| values[i] = 3.0 - values[i]);
            HostTensor::from_f64(tensor.dtype, &tensor.shape, &values)
        }
        DType::I32 => {
            let mut values = tensor.to_i32();
            ranges.for_each(|range| values[range].reverse());
            HostTensor::from_i32(&tensor.shape, &values)
        }
        _ => tensor.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_entry_gets_other_numbers() {
        let tensor = HostTensor::from_f64(
            DType::F32,
            &[2, 3, 2],
            &(0..12).map(f64::from).collect::<Vec<_>>(),
        );
        let changed = with_other_entry(&tensor, 1, 1).to_f64();
        assert_eq!(changed, [0.0, 1.0, 1.0, 0.0, 4.0, 5.0, 6.0, 7.0, -5.0, -6.0, 10.0, 11.0]);
        let lists = HostTensor::from_i32(&[2, 3], &[1, 2, 3, 4, 5, 6]);
        assert_eq!(with_other_entry(&lists, 0, 1).to_i32(), [1, 2, 3, 6, 5, 4]);
    }
}
