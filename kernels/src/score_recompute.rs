//! `score_recompute`: launchers of `kernels/cuda/score_recompute.cu` and `score_recompute_hopper.cu` (training 5).

use crate::arguments::{Argument, Arguments, Signature, read_at, write_at};
pub use crate::implementation::Implementation;
use crate::runtime::device::{Module, module};
use crate::runtime::params::Params;
use crate::runtime::{DType, Device, Result, TensorView};

const FILE: &str = "score_recompute.cu";
const HOPPER_FILE: &str = "score_recompute_hopper.cu";
const CHECK: Arguments = Arguments { operator: "score_recompute" };
/// A block sums over all heads of its token: so many it can hold.
const LARGEST_HEADS: usize = 128;
/// Columns of a panel, of which the Hopper kernel takes whole ones.
const PANEL_COLUMNS: usize = 64;

/// The keys that a token ranks.
#[derive(Clone, Copy, Debug)]
pub enum Ranking<'a> {
    /// Sparse: a list for each token.
    Selected {
        /// `[num_tokens, topk]` i32. Slot `j` is valid when `j < topk_length` and the index names a key of the
        /// token's sequence; invalid slots contribute nothing and are never dereferenced.
        indices: &'a TensorView,
        /// `[num_tokens]` i32, clamped to `[0, topk]`; `None` is `topk` everywhere.
        topk_length: Option<&'a TensorView>,
        /// Whether indices are rows of `k`; otherwise they count from the first key of the token's sequence.
        global: bool,
    },
    /// Dense: the first `clamp(floor((q_off + t + 1) / ratio), 0, keys)` keys of the token's sequence, `t` counted
    /// within the sequence.
    Causal {
        /// Tokens that one key covers, at least 1.
        ratio: usize,
        /// `[num_sequences]` i32: position of each sequence's first query; `None` is 0.
        q_off: Option<&'a TensorView>,
    },
}

/// Packed sequences: sequence `b` has the tokens `cu_q[b] .. cu_q[b + 1]` and the keys `cu_k[b] .. cu_k[b + 1]`. Any
/// may be empty. Tokens behind the last sequence rank nothing. A batch of equal lengths is packed so too.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// `[num_sequences + 1]` i32, starting at 0, not falling.
    pub cu_q: &'a TensorView,
    /// The same for the keys.
    pub cu_k: &'a TensorView,
}

/// What every kernel of the operator reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[num_tokens, num_heads, head_dim]` bf16, at most 128 heads.
    pub q: &'a TensorView,
    /// `[num_keys, head_dim]` bf16: the keys that the indexer ranks; one key head, shared by all query heads.
    pub k: &'a TensorView,
    /// The keys that a token ranks.
    pub ranking: Ranking<'a>,
    /// `None` is one sequence of all tokens and keys.
    pub sequences: Option<Sequences<'a>>,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
}

/// The logarithm of what the exponentials are divided by.
#[derive(Clone, Copy, Debug)]
pub struct Normaliser<'a> {
    /// `[num_tokens, num_heads]` f32, natural, without the sink: of the ranked keys (V3.2) or of the layer's whole
    /// softmax (V4). A head with an infinity of either sign adds nothing, as padding heads must.
    pub lse: &'a TensorView,
    /// `[num_heads]` f32: a logit, not scaled; `None` is no sink.
    pub sink: Option<&'a TensorView>,
}

/// Arguments of [`target`].
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// What it reads; the ranking is [`Ranking::Selected`].
    pub inputs: Inputs<'a>,
    /// What the exponentials are divided by.
    pub normaliser: Normaliser<'a>,
    /// Which implementation runs. The Hopper kernel takes `head_dim` in multiples of 64.
    pub implementation: Implementation,
    /// `[num_tokens, topk]` f32: each row sums to 1, or is 0 where nothing is valid; 0 in invalid slots.
    pub target: &'a TensorView,
}

/// Arguments of [`scores`].
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// What it reads; the ranking is [`Ranking::Causal`].
    pub inputs: Inputs<'a>,
    /// What the exponentials are divided by.
    pub normaliser: Normaliser<'a>,
    /// Which implementation runs. The Hopper kernel takes `head_dim` in multiples of 64.
    pub implementation: Implementation,
    /// `[num_tokens, columns]` f32: sums over the heads, 0 in masked columns. Without sequences there are
    /// `num_keys` columns; keys of a sequence beyond the last column are left out.
    pub scores: &'a TensorView,
    /// `[num_tokens]` f32: sum of the row of `scores`.
    pub l1: &'a TensorView,
    /// `[num_tokens]` f32: `scores` and `l1` are `exp(-shift)` times what the formula says. 0, unless the row's
    /// largest exponent is beyond what fp32 holds well.
    pub shift: &'a TensorView,
}

/// Arguments of [`lse`].
#[derive(Clone, Copy, Debug)]
pub struct Lse<'a> {
    /// What it reads.
    pub inputs: Inputs<'a>,
    /// `[num_tokens, num_heads]` f32, natural: log-sum-exp of what the softmax holds beside the ranked keys (the
    /// window); an infinity of either sign is nothing, and so is `None`.
    pub lse_beside: Option<&'a TensorView>,
    /// `[num_tokens, num_heads]` f32, natural; `+inf` where there is neither a key nor anything beside.
    pub lse: &'a TensorView,
}

/// The extents of a call.
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

    /// What the kernels are told of them, and of how `inputs` rank `columns` slots.
    fn params(self, params: Params, columns: usize, inputs: &Inputs<'_>) -> Result<Params> {
        let Lists { ratio, global, .. } = Lists::of(inputs);
        let params = params.i32("num_tokens", self.num_tokens)?.i32("num_heads", self.num_heads)?;
        let params = params.i32("num_keys", self.num_keys)?.i32("columns", columns)?;
        let params = params.i32("num_sequences", self.num_sequences)?.i32("ratio", ratio)?;
        Ok(params.flag("indices_global", global).f32("softmax_scale", inputs.softmax_scale))
    }

    /// Whether the Hopper kernel runs.
    fn hopper(self, device: &Device, implementation: Implementation) -> Result<bool> {
        let fits = self.head_dim.is_multiple_of(PANEL_COLUMNS);
        let misfit = (!fits)
            .then(|| format!("head_dim {}: the Hopper kernel takes multiples of {PANEL_COLUMNS}", self.head_dim));
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
    let geometries = [512, 576, 64].into_iter().flat_map(|head_dim| [16, 64, 128].map(|heads| (head_dim, heads)));
    let all = geometries.flat_map(|(head_dim, heads)| [true, false].map(|selected| (head_dim, heads, selected)));
    let modules = all.flat_map(|(head_dim, heads, selected)| {
        let files = if heads > 16 { &[FILE, HOPPER_FILE][..] } else { &[FILE] };
        files.iter().map(move |&file| module(file, &defines(head_dim, heads, selected)))
    });
    modules.collect()
}

/// The optional tensors of a ranking and of its sequences.
#[derive(Clone, Copy)]
struct Lists<'a> {
    indices: Option<&'a TensorView>,
    topk_length: Option<&'a TensorView>,
    q_off: Option<&'a TensorView>,
    cu_q: Option<&'a TensorView>,
    cu_k: Option<&'a TensorView>,
    ratio: usize,
    global: bool,
}

impl<'a> Lists<'a> {
    fn of(inputs: &Inputs<'a>) -> Self {
        let (cu_q, cu_k) = inputs.sequences.map_or((None, None), |s| (Some(s.cu_q), Some(s.cu_k)));
        let none = Self { indices: None, topk_length: None, q_off: None, cu_q, cu_k, ratio: 1, global: false };
        match inputs.ranking {
            Ranking::Selected { indices, topk_length, global } => {
                Self { indices: Some(indices), topk_length, global, ..none }
            }
            Ranking::Causal { ratio, q_off } => Self { ratio, q_off, ..none },
        }
    }

    fn tensors(self) -> [Argument<'a>; 5] {
        let integers = |name, view| read_at(name, view).of(&[DType::I32]);
        [
            integers("cu_q", self.cu_q).axes(&["ends"]),
            integers("cu_k", self.cu_k).axes(&["ends"]),
            integers("indices", self.indices).axes(&["num_tokens", "topk"]).rows(),
            integers("topk_length", self.topk_length).axes(&["num_tokens"]),
            integers("q_off", self.q_off).axes(&["num_sequences"]),
        ]
    }
}

/// Checks what all kernels read; the signature is to be given the other tensors of a call.
fn check_inputs<'a>(inputs: &Inputs<'a>) -> Result<(Extents, Signature<'a>)> {
    let lists = Lists::of(inputs);
    let heads = [
        read_at("q", inputs.q).of(&[DType::Bf16]).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read_at("k", inputs.k).of(&[DType::Bf16]).axes(&["num_keys", "head_dim"]).aligned_rows(),
    ];
    let ends = lists.cu_q.and_then(|cu_q| cu_q.shape.first().copied());
    let num_sequences = ends.map_or(1, |ends| ends.saturating_sub(1));
    let signature = CHECK.signature_at(heads).and(lists.tensors()).given("num_sequences", num_sequences);
    let mut signature = signature.extent("head_dim", 16, 576).extent("num_heads", 1, LARGEST_HEADS);
    let axes = ["num_tokens", "num_heads", "head_dim", "num_keys", "topk"];
    let [num_tokens, num_heads, head_dim, num_keys, topk] = signature.bind(axes)?;
    if ends == Some(0) {
        return CHECK.refuse("cu_q", "shape [0] must have an entry more than there are sequences");
    }
    if lists.ratio == 0 {
        return CHECK.refuse("ratio", "0 must be at least 1");
    }
    CHECK.int32("ratio", lists.ratio)?;
    CHECK.positive("softmax_scale", inputs.softmax_scale)?;
    let selected = lists.indices.is_some();
    let slots = if selected { topk } else { num_keys };
    Ok((Extents { num_tokens, num_heads, head_dim, num_keys, num_sequences, slots, selected }, signature))
}

/// An f32 tensor `[num_tokens, num_heads]`.
fn per_head(tensor: Argument<'_>) -> Argument<'_> {
    tensor.axes(&["num_tokens", "num_heads"])
}

/// What [`target`] and [`scores`] have in common.
struct ScoreCall<'a> {
    inputs: &'a Inputs<'a>,
    normaliser: Normaliser<'a>,
    implementation: Implementation,
    scores: &'a TensorView,
    l1: Option<&'a TensorView>,
    shift: Option<&'a TensorView>,
}

impl<'a> ScoreCall<'a> {
    /// Checks the tensors beside the inputs; `argument` is what the scores are called.
    fn check(&self, argument: &'static str, signature: Signature<'a>) -> Result<()> {
        let tensors = [
            per_head(read_at("lse", self.normaliser.lse)),
            read_at("sink", self.normaliser.sink).axes(&["num_heads"]),
            write_at(argument, self.scores).axes(&["num_tokens", "columns"]).rows(),
            write_at("l1", self.l1).axes(&["num_tokens"]),
            write_at("shift", self.shift).axes(&["num_tokens"]),
        ];
        signature.and(tensors).bind([]).map(|[]| ())
    }

    fn launch(&self, device: &Device, extents: Extents) -> Result<String> {
        let lists = Lists::of(self.inputs);
        let params = CHECK.params().heads("q", self.inputs.q).rows("k", self.inputs.k);
        let params = params.ptr("lse", self.normaliser.lse).ptr("sink", self.normaliser.sink);
        let params = list_params(params, lists).rows("scores", self.scores).ptr("l1", self.l1).ptr("shift", self.shift);
        let params = extents.params(params, self.scores.shape[1], self.inputs)?;
        launch(device, extents, "score_recompute", extents.hopper(device, self.implementation)?, &params)
    }
}

fn list_params(params: Params, lists: Lists<'_>) -> Params {
    let params = params.rows("indices", lists.indices).ptr("topk_length", lists.topk_length);
    params.ptr("cu_q", lists.cu_q).ptr("cu_k", lists.cu_k).ptr("q_off", lists.q_off)
}

/// One block a token.
fn launch(device: &Device, extents: Extents, name: &str, hopper: bool, params: &Params) -> Result<String> {
    let (file, name) = if hopper { (HOPPER_FILE, format!("{name}_hopper")) } else { (FILE, name.to_owned()) };
    let heads = extents.heads(hopper);
    let kernel = device.kernel(file, &defines(extents.head_dim, heads, extents.selected), &name)?;
    kernel.launch_blocks("q", extents.num_tokens, params)?;
    let ranking = if extents.selected { "selected" } else { "causal" };
    Ok(format!("{name}<{heads}, {ranking}>"))
}

/// Launches the sparse target; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn target(device: &Device, arguments: &Target<'_>) -> Result<String> {
    let Target { inputs, normaliser, implementation, target: scores } = *arguments;
    let (extents, signature) = check_inputs(&inputs)?;
    if !extents.selected {
        return CHECK.refuse("ranking", "it must be a list of selected keys: the dense form is `scores`");
    }
    let call = ScoreCall { inputs: &inputs, normaliser, implementation, scores, l1: None, shift: None };
    call.check("target", signature.given("columns", extents.slots))?;
    call.launch(device, extents)
}

/// Launches the dense scores; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn scores(device: &Device, arguments: &Scores<'_>) -> Result<String> {
    let Scores { inputs, normaliser, implementation, scores, l1, shift } = *arguments;
    let (extents, mut signature) = check_inputs(&inputs)?;
    if extents.selected {
        return CHECK.refuse("ranking", "it must be causal: the form for selected keys is `target`");
    }
    if inputs.sequences.is_none() {
        signature = signature.given("columns", extents.num_keys);
    }
    let (l1, shift) = (Some(l1), Some(shift));
    let call = ScoreCall { inputs: &inputs, normaliser, implementation, scores, l1, shift };
    call.check("scores", signature)?;
    call.launch(device, extents)
}

/// Launches the log-sum-exp of the ranked keys; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn lse(device: &Device, arguments: &Lse<'_>) -> Result<String> {
    let Lse { inputs, lse_beside, lse } = *arguments;
    let (extents, signature) = check_inputs(&inputs)?;
    signature.and([per_head(read_at("lse_beside", lse_beside)), per_head(write_at("lse", lse))]).bind([])?;
    let params = CHECK.params().heads("q", inputs.q).rows("k", inputs.k).ptr("lse_beside", lse_beside);
    let params = list_params(params, Lists::of(&inputs)).ptr("lse", lse);
    let params = extents.params(params, extents.slots, &inputs)?;
    launch(device, extents, "score_recompute_lse", false, &params)
}
