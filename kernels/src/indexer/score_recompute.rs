//! `score_recompute`: launchers of `kernels/cuda/indexer/score_recompute.cu` and
//! `score_recompute_hopper.cu` (training 5).

use crate::arguments::{Argument, Arguments, Signature, read, saved, write};
pub use crate::implementation::Implementation;
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "score_recompute.cu";
const HOPPER_FILE: &str = "score_recompute_hopper.cu";
const CHECK: Arguments = Arguments { operator: "score_recompute" };
/// The most heads: a block sums over all heads of its token.
const LARGEST_HEADS: usize = 128;
/// Columns of a panel; the Hopper kernel only takes whole panels.
const PANEL_COLUMNS: usize = 64;

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether `indices` are rows of `k`; otherwise they count from the first key of the token's
    /// sequence.
    pub global: bool,
    /// Tokens that one key covers, at least 1. Used where there are no `indices`.
    pub ratio: usize,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
    /// Which implementation runs. The Hopper kernel takes `head_dim` in multiples of 64; [`lse`]
    /// has no Hopper kernel.
    pub implementation: Implementation,
}

/// The function that was called.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Function {
    Target,
    Scores,
    Lse,
}

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    num_keys: usize,
    num_sequences: usize,
    /// Slots of a list; `num_keys` without lists.
    slots: usize,
    selected: bool,
}

impl Extents {
    /// Heads of a block of the portable kernels, or of the Hopper kernel.
    fn heads(self, hopper: bool) -> usize {
        match self.num_heads {
            0..=16 if !hopper => 16,
            0..=64 => 64,
            _ => 128,
        }
    }

    /// The kernels' parameters of the sizes and of the ranking of `columns` slots.
    fn params(self, params: Params, columns: usize, options: Options) -> Result<Params> {
        let params = params.i32("num_tokens", self.num_tokens)?.i32("num_heads", self.num_heads)?;
        let params = params.i32("num_keys", self.num_keys)?.i32("columns", columns)?;
        let params =
            params.i32("num_sequences", self.num_sequences)?.i32("ratio", options.ratio)?;
        Ok(params
            .flag("indices_global", options.global)
            .f32("softmax_scale", options.softmax_scale))
    }

    /// Whether the Hopper kernel runs.
    fn hopper(self, device: &Device, implementation: Implementation) -> Result<bool> {
        let fits = self.head_dim.is_multiple_of(PANEL_COLUMNS);
        let misfit = (!fits).then(|| {
            format!(
                "head_dim {}: the Hopper kernel takes multiples of {PANEL_COLUMNS}",
                self.head_dim
            )
        });
        implementation.runs_hopper(CHECK, device.environment(), self.num_heads, misfit)
    }
}

fn defines(head_dim: usize, heads: usize, selected: bool) -> Vec<(&'static str, String)> {
    vec![
        ("HEAD_DIM", head_dim.to_string()),
        ("HEADS", heads.to_string()),
        ("SELECTED", usize::from(selected).to_string()),
    ]
}

/// The modules of the model's head geometries, and of small ones.
pub fn modules() -> Vec<Module> {
    let geometries = [512, 576, 64]
        .into_iter()
        .flat_map(|head_dim| [16, 64, 128].map(|heads| (head_dim, heads)));
    let all = geometries
        .flat_map(|(head_dim, heads)| [true, false].map(|selected| (head_dim, heads, selected)));
    let modules = all.flat_map(|(head_dim, heads, selected)| {
        let files = if heads > 16 { &[FILE, HOPPER_FILE][..] } else { &[FILE] };
        files.iter().map(move |&file| module(file, &defines(head_dim, heads, selected)))
    });
    modules.collect()
}

/// Checks the arguments of a call. Returns its tensors and sizes.
fn check(views: &Views, options: Options, function: Function) -> Result<(Signature<'_>, Extents)> {
    let (scored, dense) = (function != Function::Lse, function == Function::Scores);
    let integers = |name: &'static str| read(name).of(&[DType::I32]).optional();
    let per_head = |tensor: Argument<'static>| tensor.axes(&["num_tokens", "num_heads"]);
    // With one sequence, every key has a column.
    let packed = views.get("cu_q").is_some();
    let columns: &[&str] =
        if packed { &["num_tokens", "columns"] } else { &["num_tokens", "num_keys"] };
    let tensors = [
        read("q").of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read("k").of(&[DType::Bf16]).axes(&["num_keys", "head_dim"]).aligned_rows().one_stride(),
        integers("cu_q").axes(&["ends"]),
        integers("cu_k").axes(&["ends"]).with(&["cu_q"]),
        integers("indices").axes(&["num_tokens", "topk"]).rows().one_stride(),
        integers("topk_length").axes(&["num_tokens"]),
        integers("q_off").axes(&["num_sequences"]),
        per_head(read("lse_beside")).optional().when(!scored),
        per_head(saved("lse", scored)),
        read("sink").axes(&["num_heads"]).optional().when(scored),
        write("target").axes(&["num_tokens", "topk"]).rows().when(function == Function::Target),
        write("scores").axes(columns).rows().when(dense),
        write("l1").axes(&["num_tokens"]).when(dense),
        write("shift").axes(&["num_tokens"]).when(dense),
    ];
    let selected = check_ranking(views, function)?;
    let ends = views.get("cu_q").and_then(|cu_q| cu_q.shape.first().copied());
    let num_sequences = ends.map_or(1, |ends| ends.saturating_sub(1));
    let call = CHECK.signature(views, tensors).given("num_sequences", num_sequences);
    let mut call = call.extent("head_dim", 16, 576).extent("num_heads", 1, LARGEST_HEADS);
    let axes = ["num_tokens", "num_heads", "head_dim", "num_keys", "topk"];
    let [num_tokens, num_heads, head_dim, num_keys, topk] = call.bind(axes)?;
    if ends == Some(0) {
        return CHECK.refuse("cu_q", "shape [0] must have an entry more than there are sequences");
    }
    if options.ratio == 0 {
        return CHECK.refuse("ratio", "0 must be at least 1");
    }
    CHECK.positive("softmax_scale", options.softmax_scale)?;
    let slots = if selected { topk } else { num_keys };
    let extents =
        Extents { num_tokens, num_heads, head_dim, num_keys, num_sequences, slots, selected };
    Ok((call, extents))
}

/// Whether there are lists of selected keys. Tensors of one ranking must be absent with the other.
fn check_ranking(views: &Views, function: Function) -> Result<bool> {
    let present = |name| views.get(name).is_some();
    let selected = present("indices");
    match function {
        Function::Target if !selected => CHECK.refuse(
            "indices",
            "they must be present: the form without lists of selected keys is `scores`",
        ),
        Function::Scores if selected => CHECK.refuse(
            "indices",
            "they must be absent: the form for lists of selected keys is `target`",
        ),
        _ if !selected && present("topk_length") => {
            CHECK.refuse("topk_length", "it must be absent without `indices`")
        }
        _ if selected && present("q_off") => {
            CHECK.refuse("q_off", "it must be absent where `indices` are present")
        }
        _ => Ok(selected),
    }
}

/// Which slots are valid.
const LISTS: [&str; 5] = ["indices", "topk_length", "cu_q", "cu_k", "q_off"];

/// One block a token.
fn launch(
    device: &Device,
    extents: Extents,
    name: &str,
    hopper: bool,
    params: &Params,
) -> Result<String> {
    let (file, name) =
        if hopper { (HOPPER_FILE, format!("{name}_hopper")) } else { (FILE, name.to_owned()) };
    let heads = extents.heads(hopper);
    let kernel = device.kernel(file, &defines(extents.head_dim, heads, extents.selected), &name)?;
    kernel.launch_blocks("q", extents.num_tokens, params)?;
    let ranking = if extents.selected { "selected" } else { "causal" };
    Ok(format!("{name}<{heads}, {ranking}>"))
}

/// The common part of [`target`] and [`scores`]; `written` is their name of the scores.
fn launch_scores(
    device: &Device,
    views: &Views,
    options: Options,
    function: Function,
    written: &str,
) -> Result<String> {
    let (signature, extents) = check(views, options, function)?;
    let params = signature.params(&["q", "k", "lse", "sink"]);
    let params = signature.append(params, &LISTS).rows("scores", &views[written]);
    let params = signature.append(params, &["l1", "shift"]);
    let params = extents.params(params, views[written].shape[1], options)?;
    launch(
        device,
        extents,
        "score_recompute",
        extents.hopper(device, options.implementation)?,
        &params,
    )
}

/// Launches the sparse target, over lists of selected keys; returns the kernel that ran. Tensors
/// of the operator:
///
/// - `q` `[num_tokens, num_heads, head_dim]` bf16, at most 128 heads;
/// - `k` `[num_keys, head_dim]` bf16: the keys that the indexer ranks; one key head, shared by all
///   query heads;
/// - `indices` `[num_tokens, topk]` i32: the keys that each token ranks. Slot `j` is valid when `j
///   < topk_length` and the index names a key of the token's sequence ([`Options::global`]);
///   invalid slots contribute nothing and are never dereferenced. Without them the ranking is
///   causal, as in [`scores`];
/// - `topk_length` `[num_tokens]` i32, clamped to `[0, topk]`; absent where it is `topk`
///   everywhere;
/// - `cu_q`, `cu_k` `[num_sequences + 1]` i32, starting at 0, not decreasing: packed sequences.
///   Sequence `b` has the tokens `cu_q[b] .. cu_q[b + 1]` and the keys `cu_k[b] .. cu_k[b +
///   1]`. Any may be empty. Tokens after the last sequence rank nothing. A batch of equal lengths
///   is packed in the same way. Both are absent for one sequence of everything;
/// - `lse` `[num_tokens, num_heads]` f32, natural, without the sink: the logarithm of the softmax
///   denominator, of the ranked keys (V3.2) or of the layer's whole softmax (V4).
///   A head with an infinity of either sign adds nothing, as padding heads must;
/// - `sink` `[num_heads]` f32: a logit, not scaled; absent without sinks;
/// - `target` `[num_tokens, topk]` f32: each row sums to 1, or is 0 where nothing is valid; 0 in
///   invalid slots.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn target(device: &Device, views: &Views, options: Options) -> Result<String> {
    launch_scores(device, views, options, Function::Target, "target")
}

/// Launches the dense scores. Returns the kernel that ran. Each token ranks the first
/// `clamp(floor((q_off + t + 1) / ratio), 0, keys)` keys of its sequence, where `t` counts within
/// the sequence. Tensors as in [`target`], but these instead of `indices`, `topk_length` and
/// `target`:
///
/// - `q_off` `[num_sequences]` i32: position of each sequence's first query; absent where it is 0;
/// - `scores` `[num_tokens, columns]` f32: sums over the heads, 0 in masked columns. Without
///   sequences there are `num_keys` columns; keys of a sequence beyond the last column are skipped;
/// - `l1` `[num_tokens]` f32: sum of the row of `scores`;
/// - `shift` `[num_tokens]` f32: `scores` and `l1` are `exp(-shift)` times the formula's value.
///   0, unless the row's largest exponent exceeds what fp32 represents well.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn scores(device: &Device, views: &Views, options: Options) -> Result<String> {
    launch_scores(device, views, options, Function::Scores, "scores")
}

/// Launches the log-sum-exp of the ranked keys, of either ranking. Returns the kernel that ran.
/// Tensors as in [`target`] and [`scores`], without `sink`. It writes only `lse`, `+inf` where
/// there are neither keys nor an `lse_beside`:
///
/// - `lse_beside` `[num_tokens, num_heads]` f32, natural: log-sum-exp of the softmax entries
///   other than the ranked keys (the window). An infinity of either sign means none, and so does
///   its absence.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn lse(device: &Device, views: &Views, options: Options) -> Result<String> {
    let (signature, extents) = check(views, options, Function::Lse)?;
    let params = signature.params(&["q", "k", "lse_beside"]);
    let params = signature.append(signature.append(params, &LISTS), &["lse"]);
    let params = extents.params(params, extents.slots, options)?;
    launch(device, extents, "score_recompute_lse", false, &params)
}
