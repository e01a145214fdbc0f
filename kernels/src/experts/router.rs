//! `router`: launcher of `kernels/cuda/experts/router.cu` (inference 10, training 11.4).

use crate::arguments::{Arguments, read, saved, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "router.cu";
const CHECK: Arguments = Arguments { operator: "router" };
/// The most experts.
pub const MAX_EXPERTS: usize = 512;
/// The most slots of a token: one for each lane of its warp.
pub const MAX_TOPK: usize = 32;
/// Tokens of a block: one a warp.
const TOKENS_PER_BLOCK: usize = 4;
/// Up to this many slots of a token, a warp of the backward has several tokens, each with this many
/// lanes.
const FEW_SLOTS: usize = 8;
/// Experts of a warp, for a token that a block processes.
const GROUP: usize = 32;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &[])]
}

/// Chooses experts and weights; returns the kernel that ran. Its tensors:
///
/// - `logits` `[num_tokens, num_experts]` f32, rows contiguous, up to 512 experts: the GEMM with
///   the router's matrix, in fp32;
/// - `bias` `[num_experts]` f32, for the selection only: a learned router. Or
/// - `tid2eid` `[vocab_size, topk]` i32, rows contiguous: the table of a hashed router. Exactly one
///   of the two is present;
/// - `token_ids` `[num_tokens]` i32: for a hashed router the row of the table. A negative id, and
///   one beyond the table, is a padding token: it gets no expert. A learned router reads only their
///   sign, and they may be absent;
/// - `topk_indices` `[num_tokens, topk]` i32, rows contiguous, up to 32 slots, of a learned router
///   as many as experts at most: ids from the lowest up (learned) or in the table's order; -1 for
///   no expert;
/// - `topk_weights` `[num_tokens, topk]` f32, rows contiguous: their weights, which sum to
///   `route_scale`; 0 for no expert.
///
/// Tensors that only [`backward`] takes may be among the views.
///
/// # Errors
/// A rejected argument (`route_scale` is above 0), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, route_scale: f32) -> Result<&'static str> {
    let hashed = views.get("tid2eid").is_some();
    let token_ids = read("token_ids").of(&[DType::I32]).axes(&["num_tokens"]);
    let tensors = [
        read("logits").axes(&["num_tokens", "num_experts"]).rows(),
        if hashed {
            read("bias").axes(&["num_experts"]).optional()
        } else {
            read("bias").axes(&["num_experts"])
        },
        read("tid2eid").of(&[DType::I32]).axes(&["vocab_size", "topk"]).rows().optional(),
        if hashed { token_ids } else { token_ids.optional() },
        write("topk_indices").of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
        write("topk_weights").axes(&["num_tokens", "topk"]).rows(),
        read("dtopk_weights").when(false),
        write("dlogits").when(false),
    ];
    let signature = CHECK
        .signature(views, tensors)
        .extent("num_experts", 1, MAX_EXPERTS)
        .extent("topk", 1, MAX_TOPK);
    let mut call = signature.wide("num_tokens").wide("vocab_size");
    let axes = ["num_tokens", "num_experts", "vocab_size", "topk"];
    let [num_tokens, num_experts, vocab_size, topk] = call.bind(axes)?;
    if hashed && views.get("bias").is_some() {
        return CHECK
            .refuse("bias", "there is a table, too: a router is learned or hashed, not both");
    }
    if !hashed && topk > num_experts {
        return CHECK.refuse(
            "topk_indices",
            format!("topk {topk} of {num_experts} experts: there are not so many"),
        );
    }
    CHECK.positive("route_scale", route_scale)?;
    let params =
        call.params(&["logits", "bias", "tid2eid", "token_ids", "topk_indices", "topk_weights"]);
    let params = params.i64("num_tokens", num_tokens)?.i64("vocab_size", vocab_size)?;
    let params =
        params.i32("num_experts", num_experts)?.i32("topk", topk)?.f32("route_scale", route_scale);
    // One block a token, if there are few enough that one or two blocks of each SM process them.
    // Slots are limited by the groups of experts: with more slots nearly all experts would be
    // candidates.
    let few = num_tokens <= 2 * device.environment().processors.max(1) as usize
        && topk * GROUP <= num_experts;
    let (tokens, name) = match hashed {
        true => (TOKENS_PER_BLOCK, "router_hashed"),
        false if few => (1, "router_learned_few"),
        false if call.vectorised_rows(&["logits", "bias"]) => {
            (TOKENS_PER_BLOCK, "router_learned_vector")
        }
        false => (TOKENS_PER_BLOCK, "router_learned_scalar"),
    };
    device.kernel(FILE, &[], name)?.launch_blocks(
        "logits",
        num_tokens.div_ceil(tokens),
        &params,
    )?;
    Ok(name)
}

/// Launches the gradient of the logits. Returns the kernel that ran. Selection and bias have no
/// gradient.
/// Its tensors:
///
/// - `logits` and `topk_indices` as in [`forward`], which stored the latter; an index that is not
///   an expert's is an unused slot;
/// - `dtopk_weights` `[num_tokens, topk]` f32, rows contiguous; not read for unused slots;
/// - `dlogits` `[num_tokens, num_experts]` f32, rows contiguous.
///
/// Tensors that only [`forward`] takes may be among the views.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, route_scale: f32) -> Result<&'static str> {
    let tensors = [
        read("logits").axes(&["num_tokens", "num_experts"]).rows(),
        saved("topk_indices", true).of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
        read("dtopk_weights").axes(&["num_tokens", "topk"]).rows(),
        write("dlogits").like("logits").rows(),
        read("bias").axes(&["num_experts"]).optional(),
        read("tid2eid").of(&[DType::I32]).axes(&["vocab_size", "topk"]).rows().optional(),
        read("token_ids").of(&[DType::I32]).axes(&["num_tokens"]).optional(),
        read("topk_weights").when(false),
    ];
    let signature = CHECK
        .signature(views, tensors)
        .extent("num_experts", 1, MAX_EXPERTS)
        .extent("topk", 1, MAX_TOPK);
    let mut call = signature.wide("num_tokens").wide("vocab_size");
    let [num_tokens, num_experts, topk] = call.bind(["num_tokens", "num_experts", "topk"])?;
    CHECK.positive("route_scale", route_scale)?;
    let params = call.params(&["logits", "topk_indices", "dtopk_weights", "dlogits"]);
    let params =
        params.i64("num_tokens", num_tokens)?.i32("num_experts", num_experts)?.i32("topk", topk)?;
    let wide = call.vectorised_rows(&["dlogits"]);
    let name = if wide { "router_backward_vector" } else { "router_backward_scalar" };
    let kernel = device.kernel(FILE, &[], name)?;
    let params = params.f32("route_scale", route_scale);
    let tokens =
        if topk <= FEW_SLOTS { TOKENS_PER_BLOCK * 32 / FEW_SLOTS } else { TOKENS_PER_BLOCK };
    kernel.launch_blocks("logits", num_tokens.div_ceil(tokens), &params)?;
    Ok(name)
}
