//! `indexer_query`: launchers of `kernels/cuda/indexer/indexer_query.cu` (inference 7, 7.1).

use crate::arguments::{
    Arguments, Defines, FLOATS, Signature, element_types, is_aligned, read, write,
};
pub use crate::formats::hadamard::{DIM, Stored};
use crate::projections::rotation;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "indexer_query.cu";
const CHECK: Arguments = Arguments { operator: "indexer_query" };
/// Channels that are rotated: the last ones of a head.
pub const ROPE_DIM: usize = 64;
/// Heads of a block; `HEADS_PER_BLOCK` in the kernel source.
const HEADS_PER_BLOCK: usize = 32;

fn defines(stored: Stored, weights: DType) -> Defines {
    let mut defines = element_types(&[("ELEMENT", DType::Bf16), ("WEIGHT", weights)]);
    defines.push(("STORED", (stored as usize).to_string()));
    defines
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let of = |stored| FLOATS.map(|weights| module(FILE, &defines(stored, weights)));
    Stored::ALL.into_iter().flat_map(of).collect()
}

/// A call of either launch whose arguments were checked.
struct Call {
    num_tokens: usize,
    num_heads: usize,
    table_rows: usize,
}

impl Call {
    fn check(signature: &mut Signature<'_>, views: &Views, weights_scale: f32) -> Result<Self> {
        let [num_tokens, num_heads, table_rows] =
            signature.bind(["num_tokens", "num_heads", "table_rows"])?;
        if !weights_scale.is_finite() {
            return CHECK.refuse("weights_scale", format!("{weights_scale} must be finite"));
        }
        rotation::check_rows(CHECK, views, table_rows, num_tokens)?;
        Ok(Self { num_tokens, num_heads, table_rows })
    }

    /// Launches the kernel for 16-byte accesses where they fit all of these tensors.
    fn launch(
        &self,
        device: &Device,
        views: &Views,
        call: &Signature<'_>,
        [own, names]: [&[&'static str]; 2],
        (stored, weights, weights_scale): (Stored, DType, f32),
    ) -> Result<&'static str> {
        let moved = ["q", "y", "codes", "dy", "dq"].iter().filter(|name| own.contains(name));
        let mut rows = moved.filter_map(|name| views.get(name));
        let name = names[usize::from(rows.all(is_aligned))];
        let backward = own.contains(&"dy");
        let params = call.append(call.params(own), &["cos", "sin", "positions"]);
        let params = params.i64("table_rows", self.table_rows)?;
        let params = params.i32("num_heads", self.num_heads)?.flag("inverse", backward);
        let blocks = self.num_tokens * self.num_heads.div_ceil(HEADS_PER_BLOCK);
        let kernel = device.kernel(FILE, &defines(stored, weights), name)?;
        kernel.launch_blocks(own[0], blocks, &params.f32("weights_scale", weights_scale))?;
        Ok(name)
    }
}

/// Launches the forward; returns the kernel that ran. Its tensors:
///
/// - `q` `[num_tokens, num_heads, 128]` bf16, channels contiguous;
/// - `cos`, `sin` `[table_rows, 32]` f32, rows contiguous; `positions` `[num_tokens]` i32, absent
///   where token `t` has the table's row `t`: see
///   [`rope::forward`](crate::projections::rope::forward);
/// - `weights` `[num_tokens, num_heads]`, bf16 or f32, heads contiguous: the output of the weights'
///   projection;
/// - `y` as `q`, which may be `q` itself; or instead `codes` `[num_tokens, num_heads, 64]`
///   (e2m1, the even one of two in the low nibble) or `[num_tokens, num_heads, 128]` (e4m3) u8, a
///   head's contiguous;
/// - with e2m1 `scale_bytes` `[num_tokens, num_heads, 4]` u8, e8m0;
/// - `w` `[num_tokens, num_heads]` f32, heads contiguous: `weights * weights_scale`, with e4m3
///   times the scale of the head's codes.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    stored: Stored,
    weights_scale: f32,
) -> Result<&'static str> {
    let (values, e2m1) = (stored == Stored::Values, stored == Stored::E2m1);
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("q").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        cos,
        sin,
        positions,
        read("weights").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows(),
        write("y").like("q").rows().may_be("q").when(values),
        write("codes")
            .of(&[DType::U8])
            .axes(&["num_tokens", "num_heads", "code_bytes"])
            .rows()
            .when(!values),
        write("scale_bytes")
            .of(&[DType::U8])
            .axes(&["num_tokens", "num_heads", "num_groups"])
            .when(e2m1),
        write("w").axes(&["num_tokens", "num_heads"]).rows(),
    ];
    let signature =
        CHECK.signature(views, tensors).given("head_dim", DIM).given("half_rope_dim", ROPE_DIM / 2);
    let mut signature =
        signature.given("code_bytes", stored.code_bytes()).given("num_groups", DIM / 32);
    let call = Call::check(&mut signature, views, weights_scale)?;
    let own = ["q", "weights", "y", "codes", "scale_bytes", "w"];
    let names = ["indexer_query_scalar", "indexer_query_vector"];
    call.launch(
        device,
        views,
        &signature,
        [&own, &names],
        (stored, views["weights"].dtype, weights_scale),
    )
}

/// Launches the gradient of the forward that stores `y`; returns the kernel that ran. Its tensors:
/// `cos`, `sin` and `positions` as in [`forward`]; `dy` and `dq` as `q`, which may be one; `dw` as
/// `w`, and `dweights` as `weights`. `q` and `weights` may be present and stay unchanged.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, weights_scale: f32) -> Result<&'static str> {
    let [cos, sin, positions] = rotation::tables();
    let tensors = [
        read("dy").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).rows(),
        cos,
        sin,
        positions,
        read("dw").axes(&["num_tokens", "num_heads"]).rows(),
        // Not read, and not changed.
        read("q").like("dy").rows().optional(),
        read("weights").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows().optional(),
        write("dq").like("dy").rows().may_be("dy"),
        write("dweights").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows(),
    ];
    let mut signature =
        CHECK.signature(views, tensors).given("head_dim", DIM).given("half_rope_dim", ROPE_DIM / 2);
    let call = Call::check(&mut signature, views, weights_scale)?;
    let own = ["dy", "dw", "dq", "dweights"];
    let names = ["indexer_query_backward_scalar", "indexer_query_backward_vector"];
    let weights = views["dweights"].dtype;
    call.launch(device, views, &signature, [&own, &names], (Stored::Values, weights, weights_scale))
}
