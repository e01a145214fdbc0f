//! `score_recompute`: launchers of `kernels/cuda/score_recompute.cu` and `score_recompute_hopper.cu` (training 5).

use crate::arguments::{Arguments, address};
pub use crate::implementation::Implementation;
use crate::kernel_params;
use crate::rms_norm::owned;
use crate::runtime::params::{DeviceAddress, KernelParams};
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "score_recompute.cu";
const HOPPER_FILE: &str = "score_recompute_hopper.cu";
const CHECK: Arguments = Arguments { operator: "score_recompute" };
/// A block sums over all heads of its token: so many it can hold.
const LARGEST_HEADS: usize = 128;
/// Columns of a panel, of which the Hopper kernel takes whole ones.
const PANEL_COLUMNS: usize = 64;

kernel_params! {
    /// Mirror of `ScoreRecomputeParams`.
    struct ScoreRecomputeParams {
        q: DeviceAddress,
        k: DeviceAddress,
        lse: DeviceAddress,
        sink: DeviceAddress,
        indices: DeviceAddress,
        topk_length: DeviceAddress,
        cu_q: DeviceAddress,
        cu_k: DeviceAddress,
        q_off: DeviceAddress,
        scores: DeviceAddress,
        l1: DeviceAddress,
        shift: DeviceAddress,
        q_token_stride: i64,
        q_head_stride: i64,
        k_stride: i64,
        indices_stride: i64,
        scores_stride: i64,
        num_tokens: i32,
        num_heads: i32,
        num_keys: i32,
        columns: i32,
        num_sequences: i32,
        ratio: i32,
        indices_global: i32,
        softmax_scale: f32,
    }
}

kernel_params! {
    /// Mirror of `ScoreRecomputeLseParams`.
    struct ScoreRecomputeLseParams {
        q: DeviceAddress,
        k: DeviceAddress,
        lse_beside: DeviceAddress,
        indices: DeviceAddress,
        topk_length: DeviceAddress,
        cu_q: DeviceAddress,
        cu_k: DeviceAddress,
        q_off: DeviceAddress,
        lse: DeviceAddress,
        q_token_stride: i64,
        q_head_stride: i64,
        k_stride: i64,
        indices_stride: i64,
        num_tokens: i32,
        num_heads: i32,
        num_keys: i32,
        columns: i32,
        num_sequences: i32,
        ratio: i32,
        indices_global: i32,
        softmax_scale: f32,
    }
}

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
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    let geometries = [512, 576, 64].into_iter().flat_map(|head_dim| [16, 64, 128].map(|heads| (head_dim, heads)));
    let all = geometries.flat_map(|(head_dim, heads)| [true, false].map(|selected| (head_dim, heads, selected)));
    let modules = all.flat_map(|(head_dim, heads, selected)| {
        let files = if heads > 16 { &[FILE, HOPPER_FILE][..] } else { &[FILE] };
        files.iter().map(move |&file| (file.to_owned(), owned(defines(head_dim, heads, selected))))
    });
    modules.collect()
}

fn check_inputs(inputs: &Inputs<'_>) -> Result<Extents> {
    let Inputs { q, k, ranking, sequences, softmax_scale } = *inputs;
    let [num_tokens, num_heads, head_dim] = CHECK.extents("q", q)?;
    let [num_keys, key_dim] = CHECK.extents("k", k)?;
    if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > 576 {
        return CHECK.refuse("q", format!("head_dim {head_dim} must be a multiple of 16 up to 576"));
    }
    if num_heads == 0 || num_heads > LARGEST_HEADS {
        return CHECK.refuse("q", format!("num_heads {num_heads} must be 1 to {LARGEST_HEADS}"));
    }
    if key_dim != head_dim {
        return CHECK.refuse("k", format!("width {key_dim} must be head_dim {head_dim}"));
    }
    for (argument, view) in [("q", q), ("k", k)] {
        CHECK.dtype(argument, view, &[DType::Bf16])?;
        CHECK.rows(argument, view)?;
        CHECK.aligned(argument, view)?;
    }
    let num_sequences = check_sequences(sequences)?;
    let (slots, selected) = check_ranking(ranking, num_tokens, num_keys, num_sequences)?;
    CHECK.positive("softmax_scale", softmax_scale)?;
    for (argument, extent) in [("q", num_tokens), ("k", num_keys), ("indices", slots)] {
        CHECK.int32(argument, extent)?;
    }
    Ok(Extents { num_tokens, num_heads, head_dim, num_keys, num_sequences, slots, selected })
}

fn check_sequences(sequences: Option<Sequences<'_>>) -> Result<usize> {
    let Some(Sequences { cu_q, cu_k }) = sequences else { return Ok(1) };
    let [ends] = CHECK.extents("cu_q", cu_q)?;
    if ends == 0 {
        return CHECK.refuse("cu_q", "shape [0] must have an entry more than there are sequences");
    }
    CHECK.dense_tensor("cu_q", cu_q, &[ends], &[DType::I32])?;
    CHECK.dense_tensor("cu_k", cu_k, &[ends], &[DType::I32])?;
    CHECK.int32("cu_q", ends)?;
    Ok(ends - 1)
}

/// Slots of a row, and whether there are lists.
fn check_ranking(
    ranking: Ranking<'_>,
    num_tokens: usize,
    num_keys: usize,
    num_sequences: usize,
) -> Result<(usize, bool)> {
    match ranking {
        Ranking::Selected { indices, topk_length, .. } => {
            let [_, topk] = CHECK.extents("indices", indices)?;
            CHECK.shape("indices", indices, &[num_tokens, topk])?;
            CHECK.dtype("indices", indices, &[DType::I32])?;
            CHECK.rows("indices", indices)?;
            if let Some(length) = topk_length {
                CHECK.dense_tensor("topk_length", length, &[num_tokens], &[DType::I32])?;
            }
            Ok((topk, true))
        }
        Ranking::Causal { ratio, q_off } => {
            if ratio == 0 {
                return CHECK.refuse("ratio", "0 must be at least 1");
            }
            CHECK.int32("ratio", ratio)?;
            if let Some(q_off) = q_off {
                CHECK.dense_tensor("q_off", q_off, &[num_sequences], &[DType::I32])?;
            }
            Ok((num_keys, false))
        }
    }
}

fn check_per_head(argument: &'static str, view: &TensorView, extents: Extents) -> Result<()> {
    CHECK.dense_tensor(argument, view, &[extents.num_tokens, extents.num_heads], &[DType::F32])
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

    fn views(self) -> [Option<&'a TensorView>; 5] {
        [self.indices, self.topk_length, self.q_off, self.cu_q, self.cu_k]
    }
}

/// No written tensor may share memory with a read one, or with another written one.
fn check_apart(
    written: &[(&'static str, &TensorView)],
    inputs: &Inputs<'_>,
    others: &[Option<&TensorView>],
) -> Result<()> {
    let lists = Lists::of(inputs).views();
    let read: Vec<&TensorView> =
        [Some(inputs.q), Some(inputs.k)].into_iter().chain(lists).chain(others.iter().copied()).flatten().collect();
    for (number, &(argument, view)) in written.iter().enumerate() {
        for other in read.iter().copied().chain(written[..number].iter().map(|&(_, other)| other)) {
            CHECK.apart(argument, view, other)?;
        }
    }
    Ok(())
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

impl ScoreCall<'_> {
    fn check(&self, argument: &'static str, columns: usize, extents: Extents) -> Result<()> {
        let Self { inputs, normaliser, implementation: _, scores, l1, shift } = self;
        check_per_head("lse", normaliser.lse, extents)?;
        if let Some(sink) = normaliser.sink {
            CHECK.dense_tensor("sink", sink, &[extents.num_heads], &[DType::F32])?;
        }
        CHECK.shape(argument, scores, &[extents.num_tokens, columns])?;
        CHECK.int32(argument, columns)?;
        CHECK.dtype(argument, scores, &[DType::F32])?;
        CHECK.rows(argument, scores)?;
        let mut written = vec![(argument, *scores)];
        for (name, view) in [("l1", l1), ("shift", shift)] {
            if let Some(view) = view {
                CHECK.dense_tensor(name, view, &[extents.num_tokens], &[DType::F32])?;
                written.push((name, *view));
            }
        }
        check_apart(&written, inputs, &[Some(normaliser.lse), normaliser.sink])
    }

    fn launch(&self, device: &Device, extents: Extents) -> Result<String> {
        let Inputs { q, k, softmax_scale, .. } = *self.inputs;
        let lists = Lists::of(self.inputs);
        let params = ScoreRecomputeParams {
            q: DeviceAddress(q.address),
            k: DeviceAddress(k.address),
            lse: DeviceAddress(self.normaliser.lse.address),
            sink: address(self.normaliser.sink),
            indices: address(lists.indices),
            topk_length: address(lists.topk_length),
            cu_q: address(lists.cu_q),
            cu_k: address(lists.cu_k),
            q_off: address(lists.q_off),
            scores: DeviceAddress(self.scores.address),
            l1: address(self.l1),
            shift: address(self.shift),
            q_token_stride: q.strides[0],
            q_head_stride: q.strides[1],
            k_stride: k.strides[0],
            indices_stride: lists.indices.map_or(0, |indices| indices.strides[0]),
            scores_stride: self.scores.strides[0],
            num_tokens: extents.num_tokens as i32,
            num_heads: extents.num_heads as i32,
            num_keys: extents.num_keys as i32,
            columns: self.scores.shape[1] as i32,
            num_sequences: extents.num_sequences as i32,
            ratio: lists.ratio as i32,
            indices_global: i32::from(lists.global),
            softmax_scale,
        };
        launch(device, extents, "score_recompute", extents.hopper(device, self.implementation)?, &params)
    }
}

/// One block a token.
fn launch<P: KernelParams>(device: &Device, extents: Extents, name: &str, hopper: bool, params: &P) -> Result<String> {
    let (file, name) = if hopper { (HOPPER_FILE, format!("{name}_hopper")) } else { (FILE, name.to_owned()) };
    let heads = extents.heads(hopper);
    let kernel = device.kernel::<P>(file, &defines(extents.head_dim, heads, extents.selected), &name)?;
    let config = LaunchConfig::linear(CHECK.operator, "q", extents.num_tokens as u64, kernel.max_threads())?;
    kernel.launch(config, params)?;
    let ranking = if extents.selected { "selected" } else { "causal" };
    Ok(format!("{name}<{heads}, {ranking}>"))
}

/// Launches the sparse target; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn target(device: &Device, arguments: &Target<'_>) -> Result<String> {
    let Target { inputs, normaliser, implementation, target } = arguments;
    let extents = check_inputs(inputs)?;
    if !extents.selected {
        return CHECK.refuse("ranking", "it must be a list of selected keys: the dense form is `scores`");
    }
    let call = ScoreCall {
        inputs,
        normaliser: *normaliser,
        implementation: *implementation,
        scores: target,
        l1: None,
        shift: None,
    };
    call.check("target", extents.slots, extents)?;
    call.launch(device, extents)
}

/// Launches the dense scores; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn scores(device: &Device, arguments: &Scores<'_>) -> Result<String> {
    let Scores { inputs, normaliser, implementation, scores, l1, shift } = arguments;
    let extents = check_inputs(inputs)?;
    if extents.selected {
        return CHECK.refuse("ranking", "it must be causal: the form for selected keys is `target`");
    }
    let [_, columns] = CHECK.extents("scores", scores)?;
    let columns = if inputs.sequences.is_some() { columns } else { extents.num_keys };
    let call = ScoreCall {
        inputs,
        normaliser: *normaliser,
        implementation: *implementation,
        scores,
        l1: Some(l1),
        shift: Some(shift),
    };
    call.check("scores", columns, extents)?;
    call.launch(device, extents)
}

/// Launches the log-sum-exp of the ranked keys; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn lse(device: &Device, arguments: &Lse<'_>) -> Result<String> {
    let Lse { inputs, lse_beside, lse } = arguments;
    let extents = check_inputs(inputs)?;
    check_per_head("lse", lse, extents)?;
    if let Some(beside) = lse_beside {
        check_per_head("lse_beside", beside, extents)?;
    }
    check_apart(&[("lse", lse)], inputs, &[*lse_beside])?;
    let lists = Lists::of(inputs);
    let params = ScoreRecomputeLseParams {
        q: DeviceAddress(inputs.q.address),
        k: DeviceAddress(inputs.k.address),
        lse_beside: address(*lse_beside),
        indices: address(lists.indices),
        topk_length: address(lists.topk_length),
        cu_q: address(lists.cu_q),
        cu_k: address(lists.cu_k),
        q_off: address(lists.q_off),
        lse: DeviceAddress(lse.address),
        q_token_stride: inputs.q.strides[0],
        q_head_stride: inputs.q.strides[1],
        k_stride: inputs.k.strides[0],
        indices_stride: lists.indices.map_or(0, |indices| indices.strides[0]),
        num_tokens: extents.num_tokens as i32,
        num_heads: extents.num_heads as i32,
        num_keys: extents.num_keys as i32,
        columns: extents.slots as i32,
        num_sequences: extents.num_sequences as i32,
        ratio: lists.ratio as i32,
        indices_global: i32::from(lists.global),
        softmax_scale: inputs.softmax_scale,
    };
    launch(device, extents, "score_recompute_lse", false, &params)
}
