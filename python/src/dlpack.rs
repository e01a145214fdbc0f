//! Tensors by DLPack: where the memory of a capsule is, and how it is laid out. Nothing is taken
//! over: the capsule keeps its tensor alive, and frees it when Python drops the capsule.

use std::ffi::{CStr, c_void};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// The name of a capsule whose tensor is still its own.
const NAME: &CStr = c"dltensor";

/// The tensor at the start of a managed one, as `dlpack.h` declares it.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    axes: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Address, type, sizes, and strides in elements; no strides are those of a dense tensor.
type Described = (u64, String, Vec<usize>, Option<Vec<i64>>);

/// Reads a capsule of `__dlpack__`.
#[pyfunction]
pub fn from_dlpack(name: &str, capsule: &Bound<'_, PyCapsule>) -> PyResult<Described> {
    let pointer = capsule.pointer_checked(Some(NAME))?;
    // SAFETY: a capsule of this name points to a managed tensor, which starts with a tensor, and
    // which lives as long as the capsule, which is borrowed here.
    let tensor = unsafe { pointer.cast::<Tensor>().as_ref() };
    let dtype = match (tensor.code, tensor.bits, tensor.lanes) {
        (2, 32, 1) => "f32",
        (4, 16, 1) | (1, 16, 1) => "bf16",
        (0, 32, 1) => "i32",
        (0, 64, 1) => "i64",
        (1, 8, 1) | (7..=17, 8, 1) => "u8",
        (code, bits, lanes) => {
            let what = format!("code {code}, {bits} bits, {lanes} lanes");
            return Err(PyTypeError::new_err(format!(
                "argument `{name}`: DLPack type ({what}) is none of kernels"
            )));
        }
    };
    let axes = usize::try_from(tensor.axes).unwrap_or(0);
    let numbers = |pointer: *const i64| {
        if axes == 0 {
            return Vec::new();
        }
        // SAFETY: DLPack gives as many numbers as axes; a null pointer is excluded by the callers.
        unsafe { std::slice::from_raw_parts(pointer, axes) }.to_vec()
    };
    if axes > 0 && tensor.shape.is_null() {
        return Err(PyValueError::new_err(format!("argument `{name}`: DLPack without a shape")));
    }
    let shape: Result<Vec<usize>, _> =
        numbers(tensor.shape).into_iter().map(usize::try_from).collect();
    let shape = shape.map_err(|_| {
        PyValueError::new_err(format!("argument `{name}`: DLPack with a negative size"))
    })?;
    let strides = (!tensor.strides.is_null()).then(|| numbers(tensor.strides));
    let address = (tensor.data as u64).wrapping_add(tensor.byte_offset);
    Ok((address, dtype.to_owned(), shape, strides))
}
