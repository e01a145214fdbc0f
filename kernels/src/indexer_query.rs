//! `indexer_query`: launcher of `kernels/cuda/indexer_query.cu` (inference 7, 7.1).

use crate::arguments::{Arguments, Defines, FLOATS, element_types, read, write};
pub use crate::hadamard::Stored;
use crate::runtime::device::{Module, module};
use crate::runtime::{DType, Device, Result, Views};

const FILE: &str = "indexer_query.cu";
const CHECK: Arguments = Arguments { operator: "indexer_query" };
/// Length of a row.
pub const HEAD_DIM: usize = crate::hadamard::DIM;
/// The most pairs of a row that turn.
pub const MAX_PAIRS: usize = HEAD_DIM / 2;
/// Rows of a block: one for eight lanes.
const ROWS_PER_BLOCK: usize = 16;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    let of = |weight: DType| Stored::ALL.map(|stored| module(FILE, &defines(weight, stored)));
    FLOATS.into_iter().flat_map(of).collect()
}

fn defines(weight: DType, stored: Stored) -> Defines {
    let mut defines = element_types(&[("ELEMENT", DType::Bf16), ("WEIGHT_ELEMENT", weight)]);
    defines.push(("STORED", (stored as usize).to_string()));
    defines
}

/// What multiplies the weights of so many heads: `128^-0.5 num_heads^-0.5`.
pub fn head_scale(num_heads: usize) -> f32 {
    ((HEAD_DIM * num_heads) as f64).sqrt().recip() as f32
}

/// Launches the preparation of the indexer's queries: rotation, Hadamard transform, and what `stored` says; returns the
/// kernel that ran. Its tensors:
///
/// - `q` `[num_tokens, num_heads, 128]` bf16, rows contiguous: the projection;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous, for the last `rope_dim` channels of a row, up to
///   all of them;
/// - `positions` `[num_tokens]` i32: the table's row of each token, NaN being what turns by one outside; absent where
///   token `t` has row `t`, and there are as many rows as tokens;
/// - `weights` `[num_tokens, num_heads]` f32 or bf16, rows contiguous: the projection of the head weights;
/// - `y` `[num_tokens, num_heads, 128]` bf16, rows contiguous; or in its place `codes` `[num_tokens, num_heads, 64]`
///   (e2m1, the even one of two in the low nibble) or `[num_tokens, num_heads, 128]` (e4m3) u8, rows contiguous, and
///   with e2m1 `scale_bytes` `[num_tokens, num_heads, 4]` u8, e8m0;
/// - `w` `[num_tokens, num_heads]` f32, rows contiguous: `weights` times [`head_scale`], with e4m3 times the scale of
///   the row, too.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, views: &Views, stored: Stored) -> Result<&'static str> {
    let (values, e2m1) = (stored == Stored::Values, stored == Stored::E2m1);
    let tensors = [
        read("q").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        read("cos").axes(&["table_rows", "half"]).rows(),
        read("sin").like("cos").rows(),
        read("positions").of(&[DType::I32]).axes(&["num_tokens"]).optional(),
        read("weights").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows(),
        write("y").like("q").rows().when(values),
        write("codes").of(&[DType::U8]).axes(&["num_tokens", "num_heads", "code_bytes"]).rows().when(!values),
        write("scale_bytes").of(&[DType::U8]).axes(&["num_tokens", "num_heads", "num_groups"]).when(e2m1),
        write("w").axes(&["num_tokens", "num_heads"]).rows(),
    ];
    let signature = CHECK.signature(views, tensors).given("head_dim", HEAD_DIM).given("num_groups", HEAD_DIM / 32);
    let signature = signature.given("code_bytes", stored.code_bytes()).wide("num_tokens").wide("table_rows");
    let mut call = signature.extent("half", 1, MAX_PAIRS).extent("num_heads", 1, i32::MAX as usize);
    let axes = ["num_tokens", "num_heads", "table_rows", "half"];
    let [num_tokens, num_heads, table_rows, half] = call.bind(axes)?;
    if views.get("positions").is_none() && table_rows < num_tokens {
        return CHECK.refuse("cos", format!("{table_rows} rows must cover {num_tokens} tokens without positions"));
    }
    let Some(num_rows) = num_tokens.checked_mul(num_heads) else {
        return CHECK.refuse("q", format!("{num_tokens} tokens of {num_heads} heads must be rows that 64 bits count"));
    };
    let (y, codes) = (values.then(|| &views["y"]), (!values).then(|| &views["codes"]));
    let params = CHECK.params().heads("q", &views["q"]).rows("cos", &views["cos"]).rows("sin", &views["sin"]);
    let params = params.ptr("positions", views.get("positions")).rows("weights", &views["weights"]);
    let params = params.heads("y", y).heads("codes", codes).ptr("scale_bytes", e2m1.then(|| &views["scale_bytes"]));
    let params = params.rows("w", &views["w"]).i64("num_rows", num_rows)?.i64("table_rows", table_rows)?;
    let params =
        params.i32("num_heads", num_heads)?.i32("rope_dim", 2 * half)?.f32("head_scale", head_scale(num_heads));
    // Of the tensors with rows only these two are accessed by more than an element.
    let wide = [Some(&views["q"]), y, codes].into_iter().flatten().all(crate::arguments::is_aligned);
    let name = if wide { "indexer_query_vector" } else { "indexer_query_scalar" };
    let kernel = device.kernel(FILE, &defines(views["weights"].dtype, stored), name)?;
    kernel.launch_blocks("q", num_rows.div_ceil(ROWS_PER_BLOCK), &params)?;
    Ok(name)
}
