//! `indexer_backward`: launchers of `kernels/cuda/indexer/indexer_backward.cu` (stage 2 of
//! training 7).

use crate::arguments::{
    Arguments, Defines, FLOATS, Parts, Signature, element_types, read, scratch, write,
};
pub use crate::attention::sparse_attention::KeyGradients;
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

const FILE: &str = "indexer_backward.cu";
const CHECK: Arguments = Arguments { operator: "indexer_backward" };
/// Width of q and k.
pub const HEAD_DIM: usize = 128;
/// The most heads: a block holds all heads of a token.
pub const MAX_HEADS: usize = 64;
/// Warps of a block: each processes 16 heads, zeroes a row of dk, or sums the rows of
/// `SUM_KEYS` keys.
const WARPS: usize = 4;
const THREADS: u32 = 32 * WARPS as u32;
const SUM_KEYS: usize = 16;
/// Bytes of the rows of a chunk, as [`default_chunk_tokens`] limits them.
const DEFAULT_ROW_BYTES: usize = 1 << 30;

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether `indices` are rows of `k`; otherwise they count from the first key of the token's
    /// sequence.
    pub global: bool,
    /// Tokens that one key covers, at least 1. Used where there are no `indices`.
    pub ratio: usize,
    /// Multiplies the logits, finite and above 0. The factor may be folded into `w` instead, never
    /// into both.
    pub sm_scale: f32,
    /// How `dk` is summed.
    pub key_gradients: KeyGradients,
}

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    num_tokens: usize,
    num_heads: usize,
    num_keys: usize,
    num_sequences: usize,
    slots: usize,
    selected: bool,
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let of = |weight: DType| [true, false].map(|selected| module(FILE, &defines(weight, selected)));
    FLOATS.into_iter().flat_map(of).collect()
}

fn defines(weight: DType, selected: bool) -> Defines {
    let mut defines = element_types(&[("WEIGHT_ELEMENT", weight)]);
    defines.push(("SELECTED", usize::from(selected).to_string()));
    defines
}

/// Bytes of scratch memory that [`backward`] needs: none for sums by atomics, otherwise a row for
/// each slot of a chunk.
///
/// # Errors
/// A rejected argument.
pub fn workspace_bytes(views: &Views, options: Options) -> Result<usize> {
    let views = views.without(&["workspace"]);
    let (_, extents) = Extents::check(&views, options)?;
    Ok(extents.workspace_bytes(options))
}

/// Tokens of a chunk whose rows take about a GiB: enough blocks for several waves of any GPU.
///
/// # Errors
/// A rejected argument.
pub fn default_chunk_tokens(views: &Views, options: Options) -> Result<usize> {
    let views = views.without(&["workspace"]);
    let (_, extents) = Extents::check(&views, options)?;
    Ok((DEFAULT_ROW_BYTES / (4 * HEAD_DIM * extents.slots.max(1)))
        .clamp(1, extents.num_tokens.max(1)))
}

impl Extents {
    /// The tensors of a call, and its sizes.
    fn check(views: &Views, options: Options) -> Result<(Signature<'_>, Self)> {
        let selected = views.get("indices").is_some();
        let of_other = if selected { "q_off" } else { "topk_length" };
        if views.get(of_other).is_some() {
            let rule = if selected {
                "it must be absent where `indices` are present"
            } else {
                "it must be absent without `indices`"
            };
            return CHECK.refuse(of_other, rule);
        }
        let ends = views.get("cu_q").and_then(|cu_q| cu_q.shape.first().copied());
        let num_sequences = ends.map_or(1, |ends| ends.saturating_sub(1));
        let slots: &[&str] = match (selected, ends) {
            (true, _) => &["num_tokens", "topk"],
            (false, Some(_)) => &["num_tokens", "columns"],
            // With one sequence, every key has a column.
            (false, None) => &["num_tokens", "num_keys"],
        };
        let integers = |name: &'static str| read(name).of(&[DType::I32]).optional();
        let tensors = [
            read("q")
                .of(&[DType::Bf16])
                .axes(&["num_tokens", "num_heads", "head_dim"])
                .aligned_rows(),
            read("w").of(&FLOATS).axes(&["num_tokens", "num_heads"]).rows().one_stride(),
            read("dlogits").axes(slots).rows().one_stride(),
            read("k")
                .of(&[DType::Bf16])
                .axes(&["num_keys", "head_dim"])
                .aligned_rows()
                .one_stride(),
            integers("cu_q").axes(&["ends"]),
            integers("cu_k").axes(&["ends"]).with(&["cu_q"]),
            integers("indices").axes(&["num_tokens", "topk"]).rows().one_stride(),
            integers("topk_length").axes(&["num_tokens"]),
            integers("q_off").axes(&["num_sequences"]),
            write("dq").like("q").aligned_rows(),
            write("dk").axes(&["num_keys", "head_dim"]).aligned_rows().one_stride(),
            write("dw").like("w").rows().one_stride(),
            scratch("workspace", 16).optional(),
        ];
        let call = CHECK
            .signature(views, tensors)
            .given("num_sequences", num_sequences)
            .given("head_dim", HEAD_DIM);
        let mut call = call.extent("num_heads", 1, MAX_HEADS);
        let axes = ["num_tokens", "num_heads", "num_keys", slots[1]];
        let [num_tokens, num_heads, num_keys, slots] = call.bind(axes)?;
        if ends == Some(0) {
            return CHECK
                .refuse("cu_q", "shape [0] must have an entry more than there are sequences");
        }
        CHECK.int32("ratio", options.ratio)?;
        if options.ratio == 0 {
            return CHECK.refuse("ratio", "0 must be at least 1");
        }
        if let KeyGradients::Deterministic { chunk_tokens: 0 } = options.key_gradients {
            return CHECK.refuse("chunk_tokens", "0 must be at least 1");
        }
        CHECK.positive("sm_scale", options.sm_scale)?;
        Ok((call, Self { num_tokens, num_heads, num_keys, num_sequences, slots, selected }))
    }

    /// Tokens of a chunk; `None` for sums by atomics.
    fn chunk_tokens(self, options: Options) -> Option<usize> {
        match options.key_gradients {
            KeyGradients::Atomic => None,
            KeyGradients::Deterministic { chunk_tokens } => {
                Some(chunk_tokens.min(self.num_tokens).max(1))
            }
        }
    }

    fn workspace_bytes(self, options: Options) -> usize {
        let mut parts = Parts::default();
        if let Some(chunk_tokens) = self.chunk_tokens(options) {
            parts.words(&[chunk_tokens, self.slots, HEAD_DIM]);
        }
        parts.bytes
    }

    /// The parameters of the kernels for `num_tokens` tokens from `first_token` on.
    fn params(
        self,
        signature: &Signature<'_>,
        options: Options,
        slot_rows: Option<&TensorView>,
        [first_token, num_tokens]: [usize; 2],
    ) -> Result<Params> {
        let params = signature.params(&[
            "q",
            "k",
            "w",
            "dlogits",
            "indices",
            "topk_length",
            "cu_q",
            "cu_k",
            "q_off",
            "dq",
            "dk",
            "dw",
        ]);
        let params = params
            .ptr("slot_rows", slot_rows)
            .i32("first_token", first_token)?
            .i32("num_tokens", num_tokens)?;
        let params = params.i32("num_heads", self.num_heads)?.i32("slots", self.slots)?;
        let params =
            params.i32("num_keys", self.num_keys)?.i32("num_sequences", self.num_sequences)?;
        let params = params.i32("ratio", options.ratio)?.flag("indices_global", options.global);
        Ok(params.f32("sm_scale", options.sm_scale))
    }
}

/// Launches the backward of the indexer's logits. Returns the kernels that ran. With `indices`,
/// slots are those of a list; otherwise columns, one for each key of a token's sequence:
///
/// - `q` `[num_tokens, num_heads, 128]` bf16, up to 64 heads; `k` `[num_keys, 128]` bf16: rows at
///   multiples of 16 bytes;
/// - `w` `[num_tokens, num_heads]` f32 or bf16, rows contiguous: the heads' weights, without the
///   factor [`Options::sm_scale`];
/// - `dlogits` `[num_tokens, topk]` or `[num_tokens, columns]` f32, rows contiguous: the gradient
///   with respect to each slot's logit. It is not used where a slot is not valid;
/// - `indices`, `topk_length`, `q_off`, `cu_q`, `cu_k` i32: which slots are valid, as in
///   [`score_recompute::target`](crate::indexer::score_recompute::target) and
///   [`score_recompute::scores`](crate::indexer::score_recompute::scores). Without sequences there
///   are as many columns as keys;
/// - `dq` of the type and shape of `q`, rows at multiples of 16 bytes; `dk` `[num_keys, 128]` f32,
///   rows at multiples of 16 bytes, whatever it held before; `dw` of the type and shape of `w`,
///   rows contiguous;
/// - `workspace`, scratch memory of [`workspace_bytes`] bytes at a multiple of 16; absent where
///   that is 0.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views, options: Options) -> Result<Vec<String>> {
    let (signature, extents) = Extents::check(views, options)?;
    let (needed, workspace) = (extents.workspace_bytes(options), views.get("workspace"));
    match workspace {
        Some(workspace) => CHECK.holds("workspace", workspace, needed)?,
        None if needed > 0 => {
            return CHECK.refuse("workspace", format!("it must be present, of {needed} bytes"));
        }
        None => {}
    }
    let defines = defines(views["w"].dtype, extents.selected);
    // Not the most that a kernel is declared for, which only limits its registers.
    let launch = |name: &str, argument: &'static str, blocks: usize, params: &Params| {
        let config = LaunchConfig::linear(CHECK.operator, argument, blocks as u64, THREADS)?;
        device.kernel(FILE, &defines, name)?.launch(config, params)
    };
    let ranking = if extents.selected { "selected" } else { "causal" };
    let rows_of = |keys: usize| extents.num_keys.div_ceil(keys);
    let Some(chunk_tokens) = extents.chunk_tokens(options) else {
        let params = extents.params(&signature, options, None, [0, extents.num_tokens])?;
        launch("indexer_backward_zero", "k", rows_of(WARPS), &params)?;
        launch("indexer_backward", "q", extents.num_tokens, &params)?;
        return Ok(vec![
            "indexer_backward_zero".to_owned(),
            format!("indexer_backward<{ranking}>"),
        ]);
    };
    // Without tokens there is still one chunk: dk becomes 0.
    for first_token in (0..extents.num_tokens.max(1)).step_by(chunk_tokens) {
        let count = chunk_tokens.min(extents.num_tokens - first_token);
        let slot_rows = workspace.filter(|_| needed > 0);
        let params = extents.params(&signature, options, slot_rows, [first_token, count])?;
        launch("indexer_backward", "q", count, &params)?;
        launch("indexer_backward_sum", "k", rows_of(WARPS * SUM_KEYS), &params)?;
    }
    Ok(vec![
        format!("indexer_backward<{ranking}, deterministic>"),
        "indexer_backward_sum".to_owned(),
    ])
}
