//! `gate_up_interleave`: launcher of `kernels/cuda/formats/gate_up_interleave.cu` (inference 5.8).

use crate::arguments::{Argument, Arguments, Signature, read, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "gate_up_interleave.cu";
const CHECK: Arguments = Arguments { operator: "gate_up_interleave" };
/// Neighbouring rows of gate, or of up; `GRANULE` in the kernel source.
pub const GRANULE: usize = 8;
/// Rows of an expert at most, gate and up together; they are a multiple of twice [`GRANULE`].
pub const MAX_ROWS: usize = 1 << 24;
/// Bytes of a row at most.
pub const MAX_ROW_BYTES: usize = 1 << 24;
/// Threads of a block, and pieces of a thread; `THREADS` and `UNITS` in the kernel source.
const THREADS: usize = 256;
const UNITS: usize = 4;

/// The one module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &Vec::new())]
}

/// Interleaves the rows of gate and up of each expert, or separates them (`inverse`). Returns the
/// kernel that ran. Its tensors, which hold weights or scales of any type as bytes:
///
/// - `logical` `[num_experts, num_rows, row_bytes]` u8, rows contiguous: the rows of gate, then the
///   same number of rows of up, in all a multiple of 16 up to [`MAX_ROWS`], of up to
///   [`MAX_ROW_BYTES`]; written by the inverse;
/// - `interleaved` of the same shape: eight rows of gate, the eight rows of up with the same
///   indices, the next eight of gate; read by the inverse.
///
/// # Errors
/// A rejected argument (there may be 2^32 pieces of 16 bytes in all, or single bytes where rows do
/// not allow 16), a compile error, a rejected launch.
pub fn launch(device: &Device, views: &Views, inverse: bool) -> Result<&'static str> {
    fn tensor<'a>(name: &'static str, written: bool) -> Argument<'a> {
        let argument = if written { write(name) } else { read(name) };
        argument.of(&[DType::U8]).axes(&["num_experts", "num_rows", "row_bytes"]).rows()
    }
    let tensors = [tensor("logical", inverse), tensor("interleaved", !inverse)];
    let signature: Signature<'_> =
        CHECK.signature(views, tensors).extent("num_rows", 2 * GRANULE, MAX_ROWS);
    let mut call = signature.extent("row_bytes", 1, MAX_ROW_BYTES).wide("num_experts");
    let [num_experts, num_rows, row_bytes] = call.bind(["num_experts", "num_rows", "row_bytes"])?;
    let vectorised = call.vectorised();
    let row_pieces = if vectorised { row_bytes / 16 } else { row_bytes };
    let pieces = num_experts.saturating_mul(num_rows * row_pieces);
    if u32::try_from(pieces).is_err() {
        let reason = format!(
            "{num_experts} experts have {pieces} pieces of rows; there may be {}",
            u32::MAX
        );
        return CHECK.refuse("logical", reason);
    }
    let params = call.params(&["logical", "interleaved"]).i64("num_pieces", pieces)?;
    let params = params.i32("row_pieces", row_pieces)?.i32("num_rows", num_rows)?;
    let names = [
        ["gate_up_interleave_scalar", "gate_up_interleave_vector"],
        ["gate_up_separate_scalar", "gate_up_separate_vector"],
    ];
    let name = names[usize::from(inverse)][usize::from(vectorised)];
    device.kernel(FILE, &Vec::new(), name)?.launch_blocks(
        "logical",
        pieces.div_ceil(THREADS * UNITS),
        &params,
    )?;
    Ok(name)
}
