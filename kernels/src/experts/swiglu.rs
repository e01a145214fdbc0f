//! `swiglu`: launcher of `kernels/cuda/experts/swiglu.cu` (inference 11.1, training 11.2).

use crate::arguments::{Arguments, FLOATS, element_types, modules_of_floats, read, write};
use crate::streams::mhc_post::threads;
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, Views};

const FILE: &str = "swiglu.cu";
const CHECK: Arguments = Arguments { operator: "swiglu" };
/// Rows of a block: one a warp.
const ROWS_PER_BLOCK: usize = 4;
/// Up to this many rows for each SM, each access has a thread, in the backward within one block of
/// limited size: `FEW_BACKWARD_THREADS` in the kernel source.
const FEW_ROWS: usize = 4;
const FEW_BACKWARD_THREADS: usize = 512;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Launches the forward, or the `backward`; returns the kernel that ran. Its tensors:
///
/// - `gate`, `up` `[num_rows, width]`, bf16 or f32, and with it `y`, of the backward `dy`, `dgate`
///   and `dup`, all of one type, rows contiguous, separate strides: the halves of one
///   `[num_rows, 2 * width]` tensor are allowed;
/// - `weight` `[num_rows]` f32, the routing weight, absent for ones, and with it the backward's
///   `dweight`;
/// - `pos_to_token_topk` `[num_rows]` i32, negative for padding rows, which get zeros; absent
///   without padding rows.
///
/// # Errors
/// A rejected argument (`limit`, of the clamps, is above 0), a compile error, a rejected launch.
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
    let mut call =
        CHECK.signature(views, tensors).extent("width", 1, i32::MAX as usize).wide("num_rows");
    let [num_rows, width] = call.bind(["num_rows", "width"])?;
    CHECK.positive("limit", limit)?;
    let params = call.params(&[
        "gate",
        "up",
        "weight",
        "pos_to_token_topk",
        "y",
        "dy",
        "dgate",
        "dup",
        "dweight",
    ]);
    let params = params.i64("num_rows", num_rows)?.i32("width", width)?.f32("limit", limit);
    let (wide, dtype) = (call.vectorised(), views["gate"].dtype);
    let accesses = width.div_ceil(if wide { 16 / dtype.size() } else { 1 });
    // One block processes a row of the backward.
    let fits = !backward || (wide && accesses <= FEW_BACKWARD_THREADS);
    let few = fits && num_rows <= FEW_ROWS * device.environment().processors.max(1) as usize;
    let names = match (backward, few) {
        (true, false) => ["swiglu_backward_scalar", "swiglu_backward_vector"],
        (true, true) => ["swiglu_backward_scalar", "swiglu_backward_few_vector"],
        (false, false) => ["swiglu_forward_scalar", "swiglu_forward_vector"],
        (false, true) => ["swiglu_forward_few_scalar", "swiglu_forward_few_vector"],
    };
    let name = names[usize::from(wide)];
    let kernel = device.kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?;
    if !few {
        kernel.launch_blocks("gate", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
        return Ok(name);
    }
    let most = kernel.max_threads() as usize;
    let threads = if backward { threads(accesses, 1, most) } else { most };
    let pieces = accesses.div_ceil(most);
    let config = LaunchConfig::linear(CHECK.operator, "gate", pieces as u64, threads as u32)?;
    kernel
        .launch(LaunchConfig { grid: [config.grid[0], num_rows as u32, 1], ..config }, &params)?;
    Ok(name)
}
