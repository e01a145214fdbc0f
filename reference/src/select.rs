//! Selection of values by a mask. No function uses a product, because 0 * NaN is NaN.

use candle_core::{CpuStorage, Shape, Storage, Tensor};

use crate::error::Result;
use crate::precision::gathered;

/// `tensor` where `condition` is 1, the value `otherwise` where it is 0.
pub(crate) fn select(condition: &Tensor, tensor: &Tensor, otherwise: f64) -> Result<Tensor> {
    let otherwise = Tensor::full(otherwise, tensor.shape(), tensor.device())?;
    Ok(condition.where_cond(tensor, &otherwise)?)
}

/// `tensor` where `condition` is 0, the value `instead` where it is 1.
pub(crate) fn unless(condition: &Tensor, tensor: &Tensor, instead: f64) -> Result<Tensor> {
    let instead = Tensor::full(instead, tensor.shape(), tensor.device())?;
    Ok(condition.where_cond(&instead, tensor)?)
}

/// A mask or counts, broadcast over a shape and laid out row by row. No gradient passes through it.
pub(crate) fn spread(tensor: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let wide = tensor.broadcast_as(shape)?;
    let laid_out = {
        let (storage, layout) = wide.storage_and_layout();
        let (shape, device) = (wide.shape(), wide.device());
        match &*storage {
            Storage::Cpu(CpuStorage::F64(data)) => {
                Tensor::from_vec(gathered(data, layout), shape, device)
            }
            Storage::Cpu(CpuStorage::U8(data)) => {
                Tensor::from_vec(gathered(data, layout), shape, device)
            }
            _ => wide.contiguous(),
        }
    };
    Ok(laid_out?)
}

/// The largest value along a dimension, which stays with size 1; NaN where one is NaN.
pub(crate) fn max_or_nan(tensor: &Tensor, dim: usize) -> Result<Tensor> {
    let has_nan = tensor.ne(tensor)?.max_keepdim(dim)?;
    unless(&has_nan, &tensor.max_keepdim(dim)?, f64::NAN)
}

/// `low` where `tensor` is below it, `high` where it is above; NaN stays, and equality passes a
/// derivative on.
pub(crate) fn clamp(tensor: &Tensor, low: f64, high: f64) -> Result<Tensor> {
    unless(&tensor.lt(low)?, &unless(&tensor.gt(high)?, tensor, high)?, low)
}

/// The entry `index` along an axis, without that axis.
pub(crate) fn entry(tensor: &Tensor, axis: usize, index: usize) -> Result<Tensor> {
    let entry = tensor.narrow(axis, index, 1)?.squeeze(axis)?;
    // candle fails to copy from a tensor without elements, even zero of them.
    if entry.elem_count() == 0 {
        return Ok(Tensor::zeros(entry.shape(), entry.dtype(), entry.device())?);
    }
    Ok(entry.contiguous()?)
}
