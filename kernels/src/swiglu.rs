//! `swiglu`: launcher of `kernels/cuda/swiglu.cu` (inference 11.1, training 11.2).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use crate::runtime::device::Module;
use crate::runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "swiglu.cu";
const CHECK: Arguments = Arguments { operator: "swiglu" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: usize = 4;
/// Up to so many rows for each multiprocessor the forward gives each access a thread.
const FEW_ROWS: usize = 4;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Launches the forward, or the `backward`; returns the kernel that ran. Its tensors:
///
/// - `gate`, `up` `[num_rows, width]`, bf16 or f32, and with it `y`, of the backward `dy`, `dgate` and `dup`, all of one
///   type, rows contiguous, strides of their own: the halves of one `[num_rows, 2 * width]` tensor will do;
/// - `weight` `[num_rows]` f32, the routing weight, absent for ones, and with it the backward's `dweight`;
/// - `pos_to_token_topk` `[num_rows]` i32, negative for padding rows, which get zeros; absent where there are none.
///
/// # Errors
/// A refused argument (`limit`, of the clamps, is above 0), a compile error, a refused launch.
pub fn launch(device: &Device, views: &Views, limit: f32, backward: bool) -> Result<&'static str> {
    let tensors = [
        read("gate").of(&FLOATS).axes(&["num_rows", "width"]).rows(),
        read("up").like("gate").rows(),
        read("weight").axes(&["num_rows"]).optional(),
        read("pos_to_token_topk").of(&[DType::I32]).axes(&["num_rows"]).optional(),
        write("y").like("gate").rows().when(!backward),
        read("dy").like("gate").rows().when(backward),
        write("dgate").like("gate").rows().when(backward),
        write("dup").like("gate").rows().when(backward),
        write("dweight").axes(&["num_rows"]).with(&["weight"]).when(backward),
    ];
    let mut call = CHECK.signature(views, tensors).extent("width", 1, i32::MAX as usize).wide("num_rows");
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.positive("limit", limit)?;
    let params = call.params(&["gate", "up", "weight", "pos_to_token_topk", "y", "dy", "dgate", "dup", "dweight"]);
    let params = params.i64("num_rows", num_rows)?.i32("width", width)?.f32("limit", limit);
    let few = !backward && num_rows <= FEW_ROWS * device.environment().processors.max(1) as usize;
    let names = match (backward, few) {
        (true, _) => ["swiglu_backward_scalar", "swiglu_backward_vector"],
        (false, false) => ["swiglu_forward_scalar", "swiglu_forward_vector"],
        (false, true) => ["swiglu_forward_few_scalar", "swiglu_forward_few_vector"],
    };
    let (wide, dtype) = (call.vectorised(), views["gate"].dtype);
    let name = names[usize::from(wide)];
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?;
    if !few {
        kernel.launch_blocks("gate", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
        return Ok(name);
    }
    let access = if wide { 16 / dtype.size() } else { 1 };
    let pieces = width.div_ceil(access * kernel.max_threads() as usize);
    let config = LaunchConfig::linear(CHECK.operator, "gate", pieces as u64, kernel.max_threads())?;
    kernel.launch(LaunchConfig { grid: [config.grid[0], num_rows as u32, 1], ..config }, &params)?;
    Ok(name)
}
