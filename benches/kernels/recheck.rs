//! Rows of what a timed launch wrote, held to the oracle.

use candle_core::{Device as Cpu, Tensor};
use dsv4_kernels::runtime::DType;
use dsv4_parity::judge::agreement::budget_use;
use dsv4_parity::judge::budget::{Budget, working_precisions};
use dsv4_parity::operator::{OracleTensor, Side};
use dsv4_reference::precision::{Precision, Rounding};
use dsv4_reference::{Error, Products, Result as OracleResult};

/// Rows of a tensor that a kernel wrote.
pub struct Written {
    /// Name.
    pub name: &'static str,
    /// Type in which the kernel stores it.
    pub stored: DType,
    /// The sampled rows, widened.
    pub values: Vec<f64>,
}

/// Runs the oracle exactly and in working precision and compares every written tensor with its own:
/// `oracle` returns them in the order of `written`. Returns the number of elements compared.
///
/// # Errors
/// The first element beyond its budget, too much error altogether, or nothing compared.
pub fn agree(written: &[Written], oracle: impl Fn(&mut Rounding) -> OracleResult<Vec<Tensor>>) -> Result<u64, String> {
    // The exact run comes first: what it multiplies of inputs, the others need not.
    let products = Products::default();
    let run =
        |precision| oracle(&mut Rounding::sharing(precision, &products)).map_err(|e: Error| format!("the oracle: {e}"));
    let exact = run(Precision::Exact)?;
    let working: Vec<_> = working_precisions().map(run).collect::<Result<_, _>>()?;
    let mut compared = 0;
    for (index, tensor) in written.iter().enumerate() {
        let named = |run: &[Tensor]| oracle_tensor(tensor.name, run, index);
        let runs = working.iter().map(|run| named(run)).collect::<Result<Vec<_>, _>>()?;
        compared += agree_one(tensor, &named(&exact)?, &runs)?;
    }
    if compared == 0 { Err("nothing was compared".into()) } else { Ok(compared) }
}

fn oracle_tensor(name: &'static str, run: &[Tensor], index: usize) -> Result<OracleTensor, String> {
    let tensor = run.get(index).ok_or_else(|| format!("the oracle has no `{name}`"))?;
    let values = tensor.flatten_all().and_then(|flat| flat.to_vec1()).map_err(|e| format!("{name}: {e}"))?;
    Ok(OracleTensor { name, side: Side::Forward, shape: tensor.dims().to_vec(), values })
}

fn agree_one(written: &Written, exact: &OracleTensor, working: &[OracleTensor]) -> Result<u64, String> {
    let Written { name, stored, values } = written;
    if values.len() != exact.values.len() {
        return Err(format!("{name}: {} elements against the oracle's {}", values.len(), exact.values.len()));
    }
    let budget = Budget::derive(exact, &working.iter().collect::<Vec<_>>(), *stored);
    if budget.is_vacuous(exact) {
        return Err(format!("{name}: the budget would accept zeros"));
    }
    for (i, (&kernel, &oracle)) in values.iter().zip(&exact.values).enumerate() {
        let used = budget_use(kernel, oracle, budget.allowed[i]);
        // NaN must fail, so the comparison is written as what passes.
        let within = used <= 1.0 && oracle.is_finite();
        if !within {
            let row = exact.shape.last().copied().unwrap_or(1).max(1);
            let place = format!("sampled row {}, column {}", i / row, i % row);
            return Err(format!("{name}: {kernel:e} against {oracle:e} at {place}: {used:.2} of the budget"));
        }
    }
    let energy: f64 = values.iter().zip(&exact.values).map(|(kernel, oracle)| (kernel - oracle).powi(2)).sum();
    let within = energy <= budget.energy;
    if !within {
        return Err(format!("{name}: sum of squared errors {energy:.3e} exceeds {:.3e}", budget.energy));
    }
    Ok(values.len() as u64)
}

/// A candle tensor in f64, as the oracles take them.
///
/// # Errors
/// Values that do not fill the shape.
pub fn tensor(values: Vec<f64>, shape: &[usize]) -> OracleResult<Tensor> {
    Ok(Tensor::from_vec(values, shape, &Cpu::Cpu)?)
}
