//! An oracle under the clock: how long the truth takes. Its bytes and FLOP are those of the kernel's call,
//! so that the two rates compare.

use candle_core::Tensor;
use dsv4_kernels::runtime::RuntimeError;
use dsv4_reference::Result as OracleResult;

use crate::data::Lab;
use crate::session::Prepared;

/// A call of an oracle that returns its first output.
pub struct OracleOnly<F>(pub F);

impl<F: Fn() -> OracleResult<Tensor>> Prepared for OracleOnly<F> {
    fn sets(&self) -> usize {
        1
    }

    fn call(&self, _lab: &Lab<'_>, _set: usize) -> Result<(), RuntimeError> {
        let output = (self.0)().map_err(|e| RuntimeError::argument("oracle", "inputs", e.to_string()))?;
        std::hint::black_box(output);
        Ok(())
    }

    /// Two runs are bit-equal: nothing else can judge the judge here.
    fn recheck(&self, _lab: &Lab<'_>, _set: usize) -> Result<u64, String> {
        let run = || -> Result<Vec<f64>, String> {
            let output = (self.0)().map_err(|e| e.to_string())?;
            output.flatten_all().and_then(|flat| flat.to_vec1()).map_err(|e| e.to_string())
        };
        let (first, second) = (run()?, run()?);
        let equal = first.iter().zip(&second).all(|(a, b)| a.to_bits() == b.to_bits());
        if equal { Ok(first.len() as u64) } else { Err("two runs of the oracle differ".into()) }
    }
}
