//! `query_norm_rope`: launchers of `kernels/cuda/projections/query_norm_rope.cu` (inference 3, 4,
//! 5.1, training 8, 11.3).

use crate::arguments::{
    Argument, Arguments, Defines, Signature, element_types, read, saved, write,
};
use crate::projections::rotation;
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "query_norm_rope.cu";
const CHECK: Arguments = Arguments { operator: "query_norm_rope" };
/// Most channels of a head, and the most that 16-byte accesses support.
pub const MAX_HEAD_DIM: usize = 1024;
const WIDE_HEAD_DIM: usize = 512;
/// Warps of a block; `WARPS` in the kernel source.
const WARPS: usize = 4;

fn defines() -> Defines {
    element_types(&[("ELEMENT", DType::Bf16)])
}

/// The module that the launchers compile.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &defines())]
}

/// The axes of a tensor of heads.
const HEADS: &[&str] = &["num_tokens", "num_heads", "head_dim"];

/// A call whose arguments were checked.
struct Call<'a> {
    signature: Signature<'a>,
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    table_rows: usize,
    half: usize,
}

impl<'a> Call<'a> {
    fn bind(views: &'a Views, tensors: impl IntoIterator<Item = Argument<'a>>) -> Result<Self> {
        let signature = CHECK.signature(views, tensors).extent("head_dim", 2, MAX_HEAD_DIM);
        let mut signature = signature.wide("num_tokens").wide("table_rows");
        let axes = ["num_tokens", "num_heads", "head_dim", "table_rows", "half_rope_dim"];
        let [num_tokens, num_heads, head_dim, table_rows, half] = signature.bind(axes)?;
        rotation::check_half(CHECK, half, head_dim)?;
        rotation::check_rows(CHECK, views, table_rows, num_tokens)?;
        Ok(Self { signature, num_tokens, num_heads, head_dim, table_rows, half })
    }

    /// Parameters of these tensors, of the tables and of the sizes.
    fn params(&self, tensors: &[&'static str], backward: bool) -> Result<Params> {
        let params = self.signature.params(tensors);
        let params = self.signature.append(params, &["cos", "sin", "positions"]);
        let params = params.i64("table_rows", self.table_rows)?;
        let params = params.i64("num_tokens", self.num_tokens)?.i32("num_heads", self.num_heads)?;
        let params = params.i32("head_dim", self.head_dim)?.i32("rope_dim", 2 * self.half)?;
        Ok(params.flag("inverse", backward))
    }

    /// Launches the kernel for 16-byte accesses where they fit all of these tensors.
    fn launch(
        &self,
        device: &Device,
        argument: &'static str,
        names: [&'static str; 2],
        params: &Params,
    ) -> Result<&'static str> {
        let wide = self.head_dim <= WIDE_HEAD_DIM
            && self.signature.vectorised_rows(&["x", "y", "dy", "dx"]);
        let name = names[usize::from(wide)];
        let blocks = self.num_tokens.saturating_mul(self.num_heads.div_ceil(WARPS));
        device.kernel(FILE, &defines(), name)?.launch_blocks(argument, blocks, params)?;
        Ok(name)
    }
}

/// Launches the forward; returns the kernel that ran. Its tensors:
///
/// - `x` `[num_tokens, num_heads, head_dim]` bf16, channels contiguous, `head_dim` even and at
///   most [`MAX_HEAD_DIM`];
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous; `positions` `[num_tokens]`
///   i32, absent where token `t` has the table's row `t`: see
///   [`rope::forward`](crate::projections::rope::forward);
/// - `y` as `x`, which may be `x` itself;
/// - `rstd` `[num_tokens, num_heads]` f32, which the backward reads.
///
/// # Errors
/// A rejected argument (`eps` is above 0), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, eps: f32) -> Result<&'static str> {
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("x").of(&[DType::Bf16]).axes(HEADS).rows(),
        cos,
        sin,
        positions,
        write("y").like("x").rows().may_be("x"),
        saved("rstd", false).axes(&HEADS[..2]),
    ];
    let call = Call::bind(views, tensors)?;
    CHECK.positive("eps", eps)?;
    let params = call.params(&["x", "y", "rstd"], false)?.f32("eps", eps);
    call.launch(device, "x", ["query_norm_rope_scalar", "query_norm_rope_vector"], &params)
}

/// Launches the backward; returns the kernel that ran. Its tensors: `x`, `rstd`, `cos`, `sin` and
/// `positions` as in [`forward`]; `dy` and `dx` as `x`, which may be one.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views) -> Result<&'static str> {
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("dy").of(&[DType::Bf16]).axes(HEADS).rows(),
        read("x").like("dy").rows(),
        cos,
        sin,
        positions,
        saved("rstd", true).axes(&HEADS[..2]),
        write("dx").like("dy").rows().may_be("dy"),
    ];
    let call = Call::bind(views, tensors)?;
    let params = call.params(&["dy", "x", "rstd", "dx"], true)?;
    call.launch(
        device,
        "dy",
        ["query_norm_rope_backward_scalar", "query_norm_rope_backward_vector"],
        &params,
    )
}
