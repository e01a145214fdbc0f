//! Cases with tensors of the caller's in the place of drawn ones: a server's own activations.

use std::collections::BTreeMap;

use dsv4_runtime::{DType, HostTensor};

use super::any::AnyOperator;
use super::batches::set;
use super::declaration::{Specs, TensorSpec};
use super::lines::read;
use super::{PreparedCase, size};
use crate::case::{Case, CaseError};

/// Tensors by name: the bytes of their elements, row-major, in the case's types and sizes.
pub type Given = BTreeMap<String, Vec<u8>>;

/// Sizes of tensors by name.
pub type Sizes = BTreeMap<String, Vec<usize>>;

impl AnyOperator {
    /// The case with tensors of these sizes: fields that are named like an axis take its extent.
    ///
    /// # Errors
    /// A tensor that the case does not read, by name; one whose sizes no such field can give it, or
    /// two that contradict each other; a field that the operator cannot take.
    pub fn of_sizes(&self, case: &Case, sizes: &Sizes) -> Result<Case, CaseError> {
        let (before, _) = read(self.0, case)?;
        let (name, specs) = (before.name(), before.tensors());
        let mut sized = case.clone();
        for (tensor, shape) in sizes {
            let spec = given(name, &specs, tensor)?;
            for (axis, &extent) in spec.axes.iter().zip(shape) {
                set(&mut sized.fields, axis.name, extent);
            }
        }
        let specs = read(self.0, &sized)?.0.tensors();
        for (tensor, shape) in sizes {
            let spec = given(name, &specs, tensor)?;
            if spec.shape() != *shape {
                return Err(refused(
                    name,
                    tensor,
                    format!("it has shape {shape:?}, and must have {}", described(spec)),
                ));
            }
        }
        Ok(sized)
    }

    /// The types and sizes of the tensors that a case reads, by name, upstream gradients included.
    ///
    /// # Errors
    /// A field that the operator cannot take.
    pub fn forms(&self, case: &Case) -> Result<BTreeMap<String, (DType, Vec<usize>)>, CaseError> {
        let specs = read(self.0, case)?.0.tensors();
        let given = specs.present().filter(|spec| spec.is_given());
        Ok(given.map(|spec| (spec.name.to_owned(), (spec.dtype, spec.shape()))).collect())
    }

    /// As [`Self::prepare`], with these tensors in the place of drawn ones; the others are drawn.
    ///
    /// # Errors
    /// As [`Self::prepare`], and a tensor that the case does not read, or that has another number of
    /// bytes, by name.
    pub fn prepare_given(
        &self,
        case: &Case,
        tensors: Given,
    ) -> Result<Box<dyn PreparedCase>, CaseError> {
        let mut inputs = self.drawn_within(case, size::limit())?;
        let (name, specs) = (inputs.case.name(), inputs.specs());
        for (tensor, bytes) in tensors {
            let spec = given(name, &specs, &tensor)?;
            let (dtype, shape) = (spec.dtype, spec.shape());
            let wanted = spec.elements() * dtype.size();
            if bytes.len() != wanted {
                let reason =
                    format!("{} bytes are not the {wanted} of {}", bytes.len(), described(spec));
                return Err(refused(name, &tensor, reason));
            }
            inputs.put(spec.name, HostTensor { dtype, shape, bytes });
        }
        Ok(Box::new(inputs))
    }
}

fn refused(operator: &'static str, tensor: &str, reason: String) -> CaseError {
    CaseError::Field { operator, field: tensor.to_owned().into(), reason }
}

/// The declaration of a tensor that the case reads.
fn given<'s>(
    operator: &'static str,
    specs: &'s Specs,
    tensor: &str,
) -> Result<&'s TensorSpec, CaseError> {
    let read = || specs.present().filter(|spec| spec.is_given());
    read().find(|spec| spec.name == tensor).ok_or_else(|| {
        let names: Vec<_> = read().map(|spec| spec.name).collect();
        refused(
            operator,
            tensor,
            format!("the case reads no such tensor; it reads {}", names.join(", ")),
        )
    })
}

/// Sizes and type: `[num_rows = 4, width = 8] bf16`.
fn described(spec: &TensorSpec) -> String {
    let axes: Vec<_> =
        spec.axes.iter().map(|axis| format!("{} = {}", axis.name, axis.extent)).collect();
    format!("[{}] {}", axes.join(", "), spec.dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::Profile;
    use crate::operators::registry;

    fn typical() -> (&'static AnyOperator, Case) {
        let operator = registry::find("rms_norm").expect("an operator");
        let case = operator.edge_cases(Profile::Quick).into_iter().next().expect("a case");
        (operator, case)
    }

    fn message<T>(found: Result<T, CaseError>) -> String {
        found.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_case_takes_the_sizes_of_its_tensors() {
        let (operator, case) = typical();
        let sizes = |x: &[usize]| Sizes::from([("x".to_owned(), x.to_vec())]);
        let sized = operator.of_sizes(&case, &sizes(&[3, 40])).expect("such a case");
        assert_eq!((&sized.fields["num_rows"], &sized.fields["width"]), (&3.into(), &40.into()));
        let wrong = message(operator.of_sizes(&case, &sizes(&[3])));
        assert!(
            wrong.contains("`x`") && wrong.contains("[3]") && wrong.contains("num_rows"),
            "{wrong}"
        );
        let two = Sizes::from([("x".to_owned(), vec![3, 40]), ("weight".to_owned(), vec![41])]);
        assert!(message(operator.of_sizes(&case, &two)).contains("41"));
        let unknown = Sizes::from([("y".to_owned(), vec![3, 40])]);
        assert!(message(operator.of_sizes(&case, &unknown)).contains("it reads x"), "y is written");
    }

    #[test]
    fn given_tensors_are_what_the_oracle_reads_and_the_others_are_drawn() {
        let (operator, case) = typical();
        let sizes = Sizes::from([("x".to_owned(), vec![1, 8])]);
        let case = operator.of_sizes(&case, &sizes).expect("such a case");
        let exact = dsv4_reference::precision::Precision::Exact;
        let of = |x: Vec<u8>| {
            let given = Given::from([("x".to_owned(), x)]);
            let prepared = operator.prepare_given(&case, given).expect("a case");
            prepared.oracle(exact).expect("results").swap_remove(0).values
        };
        let bytes = operator.forms(&case).expect("a case")["x"].0.size() * 8;
        assert!(of(vec![0; bytes]).iter().all(|&value| value == 0.0));
        assert!(of(vec![0x3f; bytes]).iter().any(|&value| value != 0.0));
        let short = Given::from([("x".to_owned(), vec![0; 3])]);
        let wrong = message(operator.prepare_given(&case, short));
        assert!(wrong.contains("3 bytes are not the"), "{wrong}");
    }
}
