//! `indexer_recompute`: launchers of `kernels/cuda/indexer/indexer_recompute.cu` and
//! `indexer_recompute_hopper.cu` (training 1, 6).

use crate::arguments::{Arguments, Defines, FLOATS, element_types, read, write};
pub use crate::implementation::Implementation;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "indexer_recompute.cu";
const HOPPER_FILE: &str = "indexer_recompute_hopper.cu";
const CHECK: Arguments = Arguments { operator: "indexer_recompute" };
/// Width of q and k.
pub const HEAD_DIM: usize = 128;
/// The most heads: a block holds all heads of a token.
pub const MAX_HEADS: usize = 64;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let of =
        |file: &'static str| FLOATS.into_iter().map(move |weight| module(file, &defines(weight)));
    of(FILE).chain(of(HOPPER_FILE)).collect()
}

fn defines(weight: DType) -> Defines {
    let mut defines = element_types(&[("WEIGHT_ELEMENT", weight)]);
    defines.push(("SELECTED", "1".to_owned()));
    defines
}

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether `indices` are rows of `k`; otherwise they count from the first key of the token's
    /// sequence.
    pub global: bool,
    /// Multiplies the logits, finite and above 0. The factor may be folded into `w` instead, never
    /// into both.
    pub sm_scale: f32,
    /// Which implementation runs.
    pub implementation: Implementation,
}

/// Computes the indexer's logits of selected keys; returns the kernel that ran. Its tensors:
///
/// - `q` `[num_tokens, num_heads, 128]` bf16, up to 64 heads; `k` `[num_keys, 128]` bf16: rows at
///   multiples of 16 bytes;
/// - `w` `[num_tokens, num_heads]` f32 or bf16, rows contiguous: the heads' weights, without the
///   factor [`Options::sm_scale`];
/// - `indices`, `topk_length`, `cu_q`, `cu_k` i32: which slots are valid, as in
///   [`score_recompute::target`](crate::indexer::score_recompute::target);
/// - `logits` `[num_tokens, topk]` f32, rows contiguous: -infinity in slots that are not valid.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, options: Options) -> Result<&'static str> {
    let ends = views.get("cu_q").and_then(|cu_q| cu_q.shape.first().copied());
    let integers = |name: &'static str| read(name).of(&[DType::I32]);
    let tensors = [
        read("q").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read("w").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows().one_stride(),
        read("k").of(&[DType::Bf16]).axes(&["num_keys", "head_dim"]).aligned_rows().one_stride(),
        integers("indices").axes(&["num_tokens", "topk"]).rows().one_stride(),
        integers("topk_length").axes(&["num_tokens"]).optional(),
        integers("cu_q").axes(&["ends"]).optional(),
        integers("cu_k").axes(&["ends"]).with(&["cu_q"]).optional(),
        write("logits").axes(&["num_tokens", "topk"]).rows().one_stride(),
    ];
    let call = CHECK.signature(views, tensors).given("head_dim", HEAD_DIM);
    let mut call = call.extent("num_heads", 1, MAX_HEADS);
    let [num_tokens, num_heads, num_keys, topk] =
        call.bind(["num_tokens", "num_heads", "num_keys", "topk"])?;
    if ends == Some(0) {
        return CHECK.refuse("cu_q", "shape [0] must have an entry more than there are sequences");
    }
    CHECK.positive("sm_scale", options.sm_scale)?;
    let params = call.params(&["q", "k", "w", "indices", "topk_length", "cu_q", "cu_k", "logits"]);
    let params = params.i32("num_tokens", num_tokens)?;
    let params = params.i32("num_heads", num_heads)?.i32("topk", topk)?;
    let params =
        params.i32("num_keys", num_keys)?.i32("num_sequences", ends.map_or(1, |ends| ends - 1))?;
    let params = params.flag("indices_global", options.global).f32("sm_scale", options.sm_scale);
    let environment = device.environment();
    let hopper = options.implementation.runs_hopper(CHECK, environment, num_heads, None)?;
    // Blocks of the Hopper kernel process tokens round-robin.
    let (file, name, blocks) = match hopper {
        true => (
            HOPPER_FILE,
            "indexer_recompute_hopper",
            num_tokens.min((environment.processors as usize).max(1)),
        ),
        false => (FILE, "indexer_recompute", num_tokens),
    };
    device.kernel(file, &defines(views["w"].dtype), name)?.launch_blocks("q", blocks, &params)?;
    Ok(name)
}
