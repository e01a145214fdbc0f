//! What launchers check before they launch. Every refusal names the argument and the value.

use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Result, RuntimeError, TensorView};

/// The arguments of one operator's launcher.
#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    pub operator: &'static str,
}

impl Arguments {
    pub fn refuse<T>(self, argument: &'static str, reason: impl Into<String>) -> Result<T> {
        Err(RuntimeError::argument(self.operator, argument, reason))
    }

    /// The extents of a tensor of `N` axes.
    pub fn extents<const N: usize>(self, argument: &'static str, view: &TensorView) -> Result<[usize; N]> {
        view.shape.as_slice().try_into().or_else(|_| {
            self.refuse(argument, format!("shape {:?} has {} axes, not {N}", view.shape, view.shape.len()))
        })
    }

    pub fn shape(self, argument: &'static str, view: &TensorView, expected: &[usize]) -> Result<()> {
        if view.shape == expected {
            return Ok(());
        }
        self.refuse(argument, format!("shape {:?} must be {expected:?}", view.shape))
    }

    pub fn dtype(self, argument: &'static str, view: &TensorView, allowed: &[DType]) -> Result<()> {
        if allowed.contains(&view.dtype) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(ToString::to_string).collect();
        self.refuse(argument, format!("element type {} must be {}", view.dtype, allowed.join(" or ")))
    }

    fn whole_elements(self, argument: &'static str, view: &TensorView) -> Result<()> {
        let size = view.dtype.size() as u64;
        if view.address.is_multiple_of(size) {
            return Ok(());
        }
        self.refuse(argument, format!("address {:#x} must be a multiple of {size} bytes", view.address))
    }

    pub fn dense(self, argument: &'static str, view: &TensorView) -> Result<()> {
        self.whole_elements(argument, view)?;
        if view.is_dense() {
            return Ok(());
        }
        self.refuse(argument, format!("strides {:?} of shape {:?} must be dense", view.strides, view.shape))
    }

    /// Whole-tensor checks of a dense tensor.
    pub fn dense_tensor(
        self,
        argument: &'static str,
        view: &TensorView,
        shape: &[usize],
        allowed: &[DType],
    ) -> Result<()> {
        self.shape(argument, view, shape)?;
        self.dtype(argument, view, allowed)?;
        self.dense(argument, view)
    }

    /// The last axis is contiguous, no stride is negative, rows do not overlap, and elements are aligned.
    pub fn rows(self, argument: &'static str, view: &TensorView) -> Result<()> {
        self.whole_elements(argument, view)?;
        let axes = view.shape.len();
        if view.shape[axes - 1] > 1 && view.strides[axes - 1] != 1 {
            return self.refuse(argument, format!("strides {:?}: the last axis must be contiguous", view.strides));
        }
        let mut reach = view.shape[axes - 1] as i64;
        for axis in (0..axes - 1).rev() {
            let (extent, stride) = (view.shape[axis], view.strides[axis]);
            if extent > 1 && stride < reach {
                return self.refuse(
                    argument,
                    format!("strides {:?} of shape {:?}: axis {axis} overlaps itself", view.strides, view.shape),
                );
            }
            reach = if extent > 1 { (extent as i64 - 1) * stride + reach } else { reach };
        }
        Ok(())
    }

    /// Address and every stride but the last are multiples of 16 bytes.
    pub fn aligned(self, argument: &'static str, view: &TensorView) -> Result<()> {
        if is_aligned(view) {
            return Ok(());
        }
        self.refuse(
            argument,
            format!("address {:#x} and strides {:?} must be multiples of 16 bytes", view.address, view.strides),
        )
    }

    /// `written` shares no memory with `read`.
    pub fn apart(self, argument: &'static str, written: &TensorView, read: &TensorView) -> Result<()> {
        if written.elements() == 0 || read.elements() == 0 || !written.overlaps(read) {
            return Ok(());
        }
        self.refuse(argument, format!("it overlaps `{}`", read.name))
    }

    /// `written` is `read` itself, or shares no memory with it.
    pub fn same_or_apart(self, argument: &'static str, written: &TensorView, read: &TensorView) -> Result<()> {
        if written.same_elements(read) {
            return Ok(());
        }
        self.apart(argument, written, read)
            .or_else(|_| self.refuse(argument, format!("it overlaps `{}` without being the same tensor", read.name)))
    }

    /// A finite number above zero.
    pub fn positive(self, argument: &'static str, value: f32) -> Result<()> {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        self.refuse(argument, format!("{value} must be finite and above 0"))
    }

    pub fn int32(self, argument: &'static str, value: usize) -> Result<i32> {
        i32::try_from(value).or_else(|_| self.refuse(argument, format!("{value} must fit 32 bits")))
    }
}

/// Whether 16-byte accesses fit: address and every stride but the last.
pub(crate) fn is_aligned(view: &TensorView) -> bool {
    let size = view.dtype.size() as i64;
    let axes = view.shape.len();
    view.address.is_multiple_of(16)
        && (0..axes.saturating_sub(1)).all(|axis| view.shape[axis] <= 1 || view.strides[axis] * size % 16 == 0)
}

/// An optional tensor's address, or `nullptr`.
pub(crate) fn address(view: Option<&TensorView>) -> DeviceAddress {
    DeviceAddress(view.map_or(0, |view| view.address))
}
