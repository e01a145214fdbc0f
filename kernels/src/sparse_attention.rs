//! `sparse_attention`: launchers of `kernels/cuda/sparse_attention.cu` (inference 8, training 3 and 4).

use crate::arguments::{Arguments, address};
pub use crate::implementation::Implementation;
use crate::kernel_params;
use crate::rms_norm::owned;
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, Kernel, LaunchConfig, Result, TensorView};

const FILE: &str = "sparse_attention.cu";
const HOPPER_FILE: &str = "sparse_attention_hopper.cu";
const HOPPER_BACKWARD_FILE: &str = "sparse_attention_hopper_backward.cu";
const CHECK: Arguments = Arguments { operator: "sparse_attention" };
/// Rows that one block of the row kernels (delta, zero, cast) takes: one a warp.
const ROWS_PER_BLOCK: u64 = 8;
/// Heads of one block of the Hopper kernels: the rows of a warpgroup's product.
const HOPPER_HEADS: usize = 64;
/// Threads of a block of the index kernels (count, reserve, fill): one an entry or a key.
const INDEX_THREADS: u64 = 256;
/// Columns that a warp of the sum takes.
const SUM_COLUMNS: usize = 128;
/// Counts that a warp clears at a time.
const COUNTS_PER_ROW: usize = 128;
/// What [`default_chunk_tokens`] lets the rows of a chunk take: enough blocks for several waves of any GPU.
const DEFAULT_ROW_BYTES: usize = 1 << 30;
/// Widths of q and k that the Hopper kernels take: forward, backward.
const HOPPER_HEAD_DIMS: [usize; 2] = [512, 576];
const HOPPER_BACKWARD_HEAD_DIMS: [usize; 1] = [512];

kernel_params! {
    /// Mirror of `SparseAttentionForwardParams`.
    struct SparseAttentionForwardParams {
        q: DeviceAddress,
        k: DeviceAddress,
        v: DeviceAddress,
        sink: DeviceAddress,
        indices: DeviceAddress,
        topk_length: DeviceAddress,
        out: DeviceAddress,
        lse: DeviceAddress,
        max_logits: DeviceAddress,
        q_token_stride: i64,
        q_head_stride: i64,
        k_stride: i64,
        v_stride: i64,
        indices_stride: i64,
        out_token_stride: i64,
        out_head_stride: i64,
        num_tokens: i32,
        num_heads: i32,
        num_keys: i32,
        topk: i32,
        softmax_scale: f32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionDeltaParams`.
    struct SparseAttentionDeltaParams {
        out: DeviceAddress,
        dout: DeviceAddress,
        lse: DeviceAddress,
        sink: DeviceAddress,
        delta: DeviceAddress,
        sink_terms: DeviceAddress,
        out_token_stride: i64,
        out_head_stride: i64,
        dout_token_stride: i64,
        dout_head_stride: i64,
        num_tokens: i32,
        num_heads: i32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionDsinkParams`.
    struct SparseAttentionDsinkParams {
        sink_terms: DeviceAddress,
        dsink: DeviceAddress,
        num_tokens: i32,
        num_heads: i32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionZeroParams`.
    struct SparseAttentionZeroParams {
        target: DeviceAddress,
        stride: i64,
        num_rows: i64,
        width: i32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionCastParams`.
    struct SparseAttentionCastParams {
        source: DeviceAddress,
        target: DeviceAddress,
        source_stride: i64,
        target_stride: i64,
        num_rows: i64,
        width: i32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionBackwardParams`.
    struct SparseAttentionBackwardParams {
        q: DeviceAddress,
        k: DeviceAddress,
        v: DeviceAddress,
        dout: DeviceAddress,
        sink: DeviceAddress,
        lse: DeviceAddress,
        delta: DeviceAddress,
        dlse: DeviceAddress,
        indices: DeviceAddress,
        topk_length: DeviceAddress,
        dq: DeviceAddress,
        dk: DeviceAddress,
        dv: DeviceAddress,
        q_token_stride: i64,
        q_head_stride: i64,
        k_stride: i64,
        v_stride: i64,
        dout_token_stride: i64,
        dout_head_stride: i64,
        indices_stride: i64,
        dq_token_stride: i64,
        dq_head_stride: i64,
        dk_stride: i64,
        dv_stride: i64,
        num_tokens: i32,
        num_heads: i32,
        num_keys: i32,
        topk: i32,
        softmax_scale: f32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionIndexParams`.
    struct SparseAttentionIndexParams {
        indices: DeviceAddress,
        topk_length: DeviceAddress,
        counts: DeviceAddress,
        ends: DeviceAddress,
        entries: DeviceAddress,
        ordered: DeviceAddress,
        indices_stride: i64,
        num_tokens: i32,
        num_keys: i32,
        topk: i32,
    }
}

kernel_params! {
    /// Mirror of `SparseAttentionSumParams`.
    struct SparseAttentionSumParams {
        rows: DeviceAddress,
        counts: DeviceAddress,
        ends: DeviceAddress,
        ordered: DeviceAddress,
        target: DeviceAddress,
        stride: i64,
        num_entries: i64,
        head_blocks: i32,
        num_keys: i32,
        width: i32,
    }
}

/// How the gradients of a key's slots are summed into `dk` (and `dv`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyGradients {
    /// By fp32 atomics, in whatever order the blocks come: runs differ in the last bits of fp32.
    #[default]
    Atomic,
    /// In one order, of tokens, slots and blocks of heads: every run gives the same bits. The gradient of each slot has
    /// an fp32 row of its own in the workspace, for a chunk of tokens at a time; the bits do not depend on the chunk.
    Deterministic {
        /// Tokens of a chunk, at least 1, as in [`default_chunk_tokens`]; more than there are is all of them.
        chunk_tokens: usize,
    },
}

/// Where the values come from.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// The first `v_dim` columns of the keys: all of them (K = V), or a prefix (576/512).
    Prefix {
        /// Columns, at most `head_dim`.
        v_dim: usize,
    },
    /// A tensor of its own: `[num_keys, v_dim]` bf16.
    Separate(&'a TensorView),
}

/// What forward and backward read.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[num_tokens, num_heads, head_dim]` bf16.
    pub q: &'a TensorView,
    /// `[num_keys, head_dim]` bf16; one key head, shared by all query heads.
    pub k: &'a TensorView,
    /// The values.
    pub value: Value<'a>,
    /// `[num_heads]` f32: a logit, not scaled; `None` is no sink.
    pub sink: Option<&'a TensorView>,
    /// `[num_tokens, topk]` i32: rows of `k`. Slot `j` is valid when `j < topk_length` and the index is in
    /// `[0, num_keys)`; invalid slots contribute nothing and are never dereferenced.
    pub indices: &'a TensorView,
    /// `[num_tokens]` i32, clamped to `[0, topk]`; `None` is `topk` everywhere.
    pub topk_length: Option<&'a TensorView>,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
}

/// Arguments of [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// What it reads.
    pub inputs: Inputs<'a>,
    /// Which implementation runs. The Hopper kernel takes V as the first 512 columns of K, `head_dim` 512 or 576.
    pub implementation: Implementation,
    /// `[num_tokens, num_heads, v_dim]` bf16; 0 for a row without a valid slot.
    pub out: &'a TensorView,
    /// `[num_tokens, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a row.
    pub lse: &'a TensorView,
    /// `[num_tokens, num_heads]` f32: largest logit, without the sink; `-inf` for such a row.
    pub max_logits: &'a TensorView,
}

/// Arguments of [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Backward<'a> {
    /// What the forward read.
    pub inputs: Inputs<'a>,
    /// Which implementation runs. The Hopper kernel takes V that is K, both 512 wide.
    pub implementation: Implementation,
    /// How `dk` and `dv` are summed.
    pub key_gradients: KeyGradients,
    /// `[num_tokens, num_heads, v_dim]` bf16: the forward's output, untouched.
    pub out: &'a TensorView,
    /// `[num_tokens, num_heads]` f32: the forward's; an infinity of either sign is a row without a
    /// valid slot.
    pub lse: &'a TensorView,
    /// `[num_tokens, num_heads, v_dim]` bf16: gradient of `out`.
    pub dout: &'a TensorView,
    /// `[num_tokens, num_heads]` f32: gradient of `lse`; `None` is zero.
    pub dlse: Option<&'a TensorView>,
    /// `[num_tokens, num_heads, head_dim]` bf16.
    pub dq: &'a TensorView,
    /// `[num_keys, head_dim]`, bf16 or f32; with [`Value::Prefix`] it holds the values' gradient too.
    pub dk: &'a TensorView,
    /// `[num_keys, v_dim]`, the type of `dk`; present exactly with [`Value::Separate`].
    pub dv: Option<&'a TensorView>,
    /// `[num_heads]` f32; present exactly when there is a sink.
    pub dsink: Option<&'a TensorView>,
    /// Scratch memory of at least [`workspace_bytes`] bytes, 16-byte aligned.
    pub workspace: &'a TensorView,
}

/// The extents of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    v_dim: usize,
    num_keys: usize,
    topk: usize,
    separate: bool,
}

impl Extents {
    /// Whether the Hopper kernels, for keys of one of these widths, run.
    fn hopper(self, device: &Device, implementation: Implementation, head_dims: &[usize]) -> Result<bool> {
        let fits = !self.separate && self.v_dim == 512 && head_dims.contains(&self.head_dim);
        let misfit = (!fits).then(|| {
            let of_its_own = if self.separate { ", V a tensor of its own" } else { "" };
            format!(
                "the Hopper kernel takes V as the first 512 columns of K and head_dim one of {head_dims:?}, not {} of {}{of_its_own}",
                self.v_dim, self.head_dim
            )
        });
        implementation.runs_hopper(CHECK, device.environment(), self.num_heads, misfit)
    }

    fn heads_per_block(self) -> usize {
        // A block of 64 heads fills a multiprocessor; up to 16 heads would leave three quarters idle.
        if self.num_heads <= 16 { 16 } else { 64 }
    }

    fn defines(self, deterministic: bool) -> Vec<(&'static str, String)> {
        defines(self.head_dim, self.v_dim, self.heads_per_block(), self.separate, deterministic)
    }

    /// One block for each token and `heads` of its heads.
    fn launch(self, heads: usize, kernel: &Kernel) -> Result<LaunchConfig> {
        let blocks = self.num_tokens as u64 * self.num_heads.div_ceil(heads) as u64;
        LaunchConfig::linear(CHECK.operator, "q", blocks, kernel.max_threads())
    }
}

fn defines(
    head_dim: usize,
    v_dim: usize,
    heads_per_block: usize,
    separate: bool,
    deterministic: bool,
) -> Vec<(&'static str, String)> {
    vec![
        ("HEAD_DIM", head_dim.to_string()),
        ("V_DIM", v_dim.to_string()),
        ("HEADS_PER_BLOCK", heads_per_block.to_string()),
        ("V_SEPARATE", usize::from(separate).to_string()),
        ("DETERMINISTIC", usize::from(deterministic).to_string()),
    ]
}

/// The modules of the model's head geometries, and of a small one.
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    let geometries = [(512, 512, false), (576, 512, false), (512, 512, true), (64, 64, false), (64, 32, true)];
    let variants = [(16, false), (64, false), (16, true), (64, true)];
    let all = geometries.into_iter().flat_map(|(d, v, separate)| {
        variants.map(|(heads, deterministic)| defines(d, v, heads, separate, deterministic))
    });
    let hopper = [
        (HOPPER_FILE, 512, false),
        (HOPPER_FILE, 576, false),
        (HOPPER_BACKWARD_FILE, 512, false),
        (HOPPER_BACKWARD_FILE, 512, true),
    ];
    let hopper = hopper.map(|(file, head_dim, deterministic)| {
        (file.to_owned(), owned(defines(head_dim, 512, HOPPER_HEADS, false, deterministic)))
    });
    all.map(|defines| (FILE.to_owned(), owned(defines))).chain(hopper).collect()
}

fn check_inputs(inputs: &Inputs<'_>) -> Result<Extents> {
    let Inputs { q, k, value, sink, indices, topk_length, softmax_scale } = *inputs;
    let [num_tokens, num_heads, head_dim] = CHECK.extents("q", q)?;
    let [num_keys, key_dim] = CHECK.extents("k", k)?;
    let [_, topk] = CHECK.extents("indices", indices)?;
    if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > 576 {
        return CHECK.refuse("q", format!("head_dim {head_dim} must be a multiple of 16 up to 576"));
    }
    if key_dim != head_dim {
        return CHECK.refuse("k", format!("width {key_dim} must be head_dim {head_dim}"));
    }
    for (argument, view) in [("q", q), ("k", k)] {
        CHECK.dtype(argument, view, &[DType::Bf16])?;
        CHECK.rows(argument, view)?;
        CHECK.aligned(argument, view)?;
    }
    let (v_dim, separate) = check_value(value, num_keys, head_dim)?;
    CHECK.shape("indices", indices, &[num_tokens, topk])?;
    CHECK.dtype("indices", indices, &[DType::I32])?;
    CHECK.rows("indices", indices)?;
    if let Some(sink) = sink {
        CHECK.dense_tensor("sink", sink, &[num_heads], &[DType::F32])?;
    }
    if let Some(length) = topk_length {
        CHECK.dense_tensor("topk_length", length, &[num_tokens], &[DType::I32])?;
    }
    CHECK.positive("softmax_scale", softmax_scale)?;
    for (argument, extent) in [("q", num_tokens), ("q", num_heads), ("k", num_keys), ("indices", topk)] {
        CHECK.int32(argument, extent)?;
    }
    Ok(Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate })
}

fn check_value(value: Value<'_>, num_keys: usize, head_dim: usize) -> Result<(usize, bool)> {
    let (v_dim, separate) = match value {
        Value::Prefix { v_dim } => (v_dim, false),
        Value::Separate(v) => {
            let [v_keys, v_dim] = CHECK.extents("v", v)?;
            if v_keys != num_keys {
                return CHECK.refuse("v", format!("{v_keys} rows must be those of k, {num_keys}"));
            }
            CHECK.dtype("v", v, &[DType::Bf16])?;
            CHECK.rows("v", v)?;
            CHECK.aligned("v", v)?;
            (v_dim, true)
        }
    };
    if v_dim == 0 || !v_dim.is_multiple_of(16) || v_dim > 512 || (!separate && v_dim > head_dim) {
        return CHECK
            .refuse("v", format!("v_dim {v_dim} must be a multiple of 16 up to 512, and within k if it is part of k"));
    }
    Ok((v_dim, separate))
}

fn check_heads(argument: &'static str, view: &TensorView, shape: &[usize]) -> Result<()> {
    CHECK.shape(argument, view, shape)?;
    CHECK.dtype(argument, view, &[DType::Bf16])?;
    CHECK.rows(argument, view)?;
    CHECK.aligned(argument, view)
}

fn value_view(value: Value<'_>) -> (DeviceAddress, i64) {
    match value {
        Value::Prefix { .. } => (DeviceAddress(0), 0),
        Value::Separate(v) => (DeviceAddress(v.address), v.strides[0]),
    }
}

fn read_by(inputs: &Inputs<'_>) -> Vec<TensorView> {
    let v = match inputs.value {
        Value::Prefix { .. } => None,
        Value::Separate(v) => Some(v),
    };
    [Some(inputs.q), Some(inputs.k), v, inputs.sink, Some(inputs.indices), inputs.topk_length]
        .into_iter()
        .flatten()
        .cloned()
        .collect()
}

/// No written tensor may share memory with a read one, or with another written one.
fn check_apart(written: &[(&'static str, Option<&TensorView>)], read: &[TensorView]) -> Result<()> {
    for (number, &(argument, view)) in written.iter().enumerate() {
        let Some(view) = view else { continue };
        for other in read.iter().chain(written[..number].iter().filter_map(|&(_, other)| other)) {
            CHECK.apart(argument, view, other)?;
        }
    }
    Ok(())
}

/// Launches the forward; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<String> {
    let Forward { inputs, out, lse, max_logits, .. } = arguments;
    let extents = check_inputs(inputs)?;
    let Extents { num_tokens, num_heads, v_dim, .. } = extents;
    check_heads("out", out, &[num_tokens, num_heads, v_dim])?;
    CHECK.dense_tensor("lse", lse, &[num_tokens, num_heads], &[DType::F32])?;
    CHECK.dense_tensor("max_logits", max_logits, &[num_tokens, num_heads], &[DType::F32])?;
    let written = [("out", Some(*out)), ("lse", Some(*lse)), ("max_logits", Some(*max_logits))];
    check_apart(&written, &read_by(inputs))?;
    let (v, v_stride) = value_view(inputs.value);
    let params = SparseAttentionForwardParams {
        q: DeviceAddress(inputs.q.address),
        k: DeviceAddress(inputs.k.address),
        v,
        sink: address(inputs.sink),
        indices: DeviceAddress(inputs.indices.address),
        topk_length: address(inputs.topk_length),
        out: DeviceAddress(out.address),
        lse: DeviceAddress(lse.address),
        max_logits: DeviceAddress(max_logits.address),
        q_token_stride: inputs.q.strides[0],
        q_head_stride: inputs.q.strides[1],
        k_stride: inputs.k.strides[0],
        v_stride,
        indices_stride: inputs.indices.strides[0],
        out_token_stride: out.strides[0],
        out_head_stride: out.strides[1],
        num_tokens: num_tokens as i32,
        num_heads: num_heads as i32,
        num_keys: extents.num_keys as i32,
        topk: extents.topk as i32,
        softmax_scale: inputs.softmax_scale,
    };
    if extents.hopper(device, arguments.implementation, &HOPPER_HEAD_DIMS)? {
        let name = "sparse_attention_hopper_forward";
        let defines = defines(extents.head_dim, extents.v_dim, HOPPER_HEADS, false, false);
        let kernel = device.kernel::<SparseAttentionForwardParams>(HOPPER_FILE, &defines, name)?;
        let mut config = extents.launch(HOPPER_HEADS, &kernel)?;
        config.grid[0] = config.grid[0].min(device.environment().processors.max(1));
        kernel.launch(config, &params)?;
        return Ok(name.into());
    }
    let name = "sparse_attention_forward";
    let kernel = device.kernel::<SparseAttentionForwardParams>(FILE, &extents.defines(false), name)?;
    kernel.launch(extents.launch(extents.heads_per_block(), &kernel)?, &params)?;
    Ok(format!("{name}<{}>", extents.heads_per_block()))
}

/// Parts of the backward's scratch memory, as byte offsets; each part starts at a multiple of 16.
struct Workspace {
    delta: usize,
    sink_terms: usize,
    dk: usize,
    dv: usize,
    /// With [`KeyGradients::Deterministic`].
    chunk: Option<Chunk>,
    bytes: usize,
}

/// What holds a chunk of tokens: an index of its slots by key, and a row for each slot and block of heads.
#[derive(Clone, Copy)]
struct Chunk {
    tokens: usize,
    head_blocks: usize,
    /// `[num_keys + 1]` i32, filled up to whole rows of [`COUNTS_PER_ROW`].
    counts: usize,
    /// `[num_keys]` i32.
    ends: usize,
    /// `[tokens, topk]` i32.
    entries: usize,
    /// `[tokens, topk]` i32.
    ordered: usize,
    /// `[head_blocks, tokens, topk, head_dim]` f32.
    dk_rows: usize,
    /// `[head_blocks, tokens, topk, v_dim]` f32, for a V of its own.
    dv_rows: usize,
}

impl Chunk {
    /// Rows of counts that are cleared.
    fn count_rows(num_keys: usize) -> usize {
        (num_keys + 1).div_ceil(COUNTS_PER_ROW)
    }

    /// Its parts, each placed by `part`, which takes a number of 4-byte words.
    fn of(extents: Extents, chunk_tokens: usize, mut part: impl FnMut(usize) -> usize) -> Self {
        let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate } = extents;
        // The index tells 2^31 - 1 slots apart.
        let tokens = chunk_tokens.min(num_tokens).min(i32::MAX as usize / topk.max(1));
        let head_blocks = num_heads.div_ceil(extents.heads_per_block());
        let (entries, rows) = (tokens * topk, head_blocks * tokens * topk);
        Self {
            tokens,
            head_blocks,
            counts: part(Self::count_rows(num_keys) * COUNTS_PER_ROW),
            ends: part(num_keys),
            entries: part(entries),
            ordered: part(entries),
            dk_rows: part(rows * head_dim),
            dv_rows: part(if separate { rows * v_dim } else { 0 }),
        }
    }
}

impl Extents {
    /// Bytes of one token's own rows.
    fn row_bytes(self) -> usize {
        let width = self.head_dim + if self.separate { self.v_dim } else { 0 };
        self.num_heads.div_ceil(self.heads_per_block()) * self.topk * width * 4
    }
}

impl Workspace {
    fn of(extents: Extents, dk_type: DType, sink: bool, key_gradients: KeyGradients) -> Result<Self> {
        let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, separate, .. } = extents;
        let mut end = 0;
        let mut part = |words: usize| {
            let start = end;
            end += (words * 4).next_multiple_of(16);
            start
        };
        let per_row = num_tokens * num_heads;
        let accumulated = dk_type == DType::Bf16;
        let delta = part(per_row);
        let sink_terms = part(if sink { per_row } else { 0 });
        let dk = part(if accumulated { num_keys * head_dim } else { 0 });
        let dv = part(if accumulated && separate { num_keys * v_dim } else { 0 });
        let chunk = match key_gradients {
            KeyGradients::Atomic => None,
            KeyGradients::Deterministic { chunk_tokens: 0 } => {
                return CHECK.refuse("key_gradients", "chunk_tokens 0 must be at least 1");
            }
            KeyGradients::Deterministic { chunk_tokens } => Some(Chunk::of(extents, chunk_tokens, &mut part)),
        };
        Ok(Self { delta, sink_terms, dk, dv, chunk, bytes: end })
    }
}

/// Bytes of scratch memory that [`backward`] needs: `delta` and, with a sink, its terms, 4 bytes for
/// each `(token, head)`; where `dk` is bf16 the fp32 rows of `dk` (and of a separate `dv`) as well. With
/// [`KeyGradients::Deterministic`] also an fp32 row of `dk` (and of a separate `dv`) for each slot of a chunk of tokens
/// and each block of 64 heads, and an index of those slots.
///
/// # Errors
/// Inputs that the launcher refuses, and a chunk of 0 tokens.
pub fn workspace_bytes(inputs: &Inputs<'_>, dk: DType, key_gradients: KeyGradients) -> Result<usize> {
    Ok(Workspace::of(check_inputs(inputs)?, dk, inputs.sink.is_some(), key_gradients)?.bytes)
}

/// As many tokens as have their own rows in 1 GiB, and at least one: what [`KeyGradients::Deterministic`] is best given.
///
/// # Errors
/// Inputs that the launcher refuses.
pub fn default_chunk_tokens(inputs: &Inputs<'_>) -> Result<usize> {
    let extents = check_inputs(inputs)?;
    Ok((DEFAULT_ROW_BYTES / extents.row_bytes().max(1)).clamp(1, extents.num_tokens.max(1)))
}

/// Launches the backward; returns the kernels that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, arguments: &Backward<'_>) -> Result<Vec<String>> {
    let extents = check_inputs(&arguments.inputs)?;
    let workspace = check_backward(arguments, extents)?;
    let hopper = extents.hopper(device, arguments.implementation, &HOPPER_BACKWARD_HEAD_DIMS)?;
    let call = BackwardCall { device, arguments, extents, workspace, hopper };
    let mut paths = vec![call.delta()?];
    paths.extend(call.dsink()?);
    paths.extend(call.gradients()?);
    Ok(paths)
}

fn check_backward(arguments: &Backward<'_>, extents: Extents) -> Result<Workspace> {
    let Backward { inputs, implementation: _, key_gradients, out, lse, dout, dlse, dq, dk, dv, dsink, workspace } =
        *arguments;
    let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, separate, .. } = extents;
    check_heads("out", out, &[num_tokens, num_heads, v_dim])?;
    check_heads("dout", dout, &[num_tokens, num_heads, v_dim])?;
    check_heads("dq", dq, &[num_tokens, num_heads, head_dim])?;
    CHECK.dense_tensor("lse", lse, &[num_tokens, num_heads], &[DType::F32])?;
    if let Some(dlse) = dlse {
        CHECK.dense_tensor("dlse", dlse, &[num_tokens, num_heads], &[DType::F32])?;
    }
    check_key_gradient("dk", dk, &[num_keys, head_dim], &[DType::Bf16, DType::F32])?;
    if dv.is_some() != separate {
        return CHECK.refuse("dv", "it must be present exactly when V is a tensor of its own");
    }
    if let Some(dv) = dv {
        check_key_gradient("dv", dv, &[num_keys, v_dim], &[dk.dtype])?;
    }
    if dsink.is_some() != inputs.sink.is_some() {
        return CHECK.refuse("dsink", "it must be present exactly when `sink` is");
    }
    if let Some(dsink) = dsink {
        CHECK.dense_tensor("dsink", dsink, &[num_heads], &[DType::F32])?;
    }
    let parts = Workspace::of(extents, dk.dtype, inputs.sink.is_some(), key_gradients)?;
    let bytes = workspace.elements() * workspace.dtype.size();
    if bytes < parts.bytes || !workspace.address.is_multiple_of(16) {
        let reason =
            format!("{bytes} bytes at {:#x}; it must have {}, 16-byte aligned", workspace.address, parts.bytes);
        return CHECK.refuse("workspace", reason);
    }
    let mut read = read_by(&inputs);
    read.extend([Some(out), Some(lse), Some(dout), dlse].into_iter().flatten().cloned());
    let written = [("dq", Some(dq)), ("dk", Some(dk)), ("dv", dv), ("dsink", dsink), ("workspace", Some(workspace))];
    check_apart(&written, &read)?;
    Ok(parts)
}

fn check_key_gradient(argument: &'static str, view: &TensorView, shape: &[usize], allowed: &[DType]) -> Result<()> {
    CHECK.shape(argument, view, shape)?;
    CHECK.dtype(argument, view, allowed)?;
    CHECK.rows(argument, view)?;
    CHECK.aligned(argument, view)
}

/// One checked call of the backward.
struct BackwardCall<'a> {
    device: &'a Device,
    arguments: &'a Backward<'a>,
    extents: Extents,
    workspace: Workspace,
    /// Whether the gradients of q and k come from the Hopper kernel.
    hopper: bool,
}

/// fp32 rows that the gradients of keys are added to.
#[derive(Clone, Copy)]
struct Accumulator {
    address: DeviceAddress,
    stride: i64,
    width: usize,
}

impl BackwardCall<'_> {
    fn scratch(&self, offset: usize) -> DeviceAddress {
        DeviceAddress(self.arguments.workspace.address + offset as u64)
    }

    fn kernel<P: crate::runtime::params::KernelParams>(&self, name: &str) -> Result<Kernel> {
        self.device.kernel::<P>(FILE, &self.extents.defines(self.workspace.chunk.is_some()), name)
    }

    fn rows(&self, rows: usize, kernel: &Kernel) -> Result<LaunchConfig> {
        LaunchConfig::linear(CHECK.operator, "q", (rows as u64).div_ceil(ROWS_PER_BLOCK), kernel.max_threads())
    }

    fn delta(&self) -> Result<String> {
        let Backward { inputs, out, dout, lse, .. } = self.arguments;
        let name = "sparse_attention_delta";
        let kernel = self.kernel::<SparseAttentionDeltaParams>(name)?;
        let sink_terms = if inputs.sink.is_some() { self.scratch(self.workspace.sink_terms) } else { DeviceAddress(0) };
        let params = SparseAttentionDeltaParams {
            out: DeviceAddress(out.address),
            dout: DeviceAddress(dout.address),
            lse: DeviceAddress(lse.address),
            sink: address(inputs.sink),
            delta: self.scratch(self.workspace.delta),
            sink_terms,
            out_token_stride: out.strides[0],
            out_head_stride: out.strides[1],
            dout_token_stride: dout.strides[0],
            dout_head_stride: dout.strides[1],
            num_tokens: self.extents.num_tokens as i32,
            num_heads: self.extents.num_heads as i32,
        };
        kernel.launch(self.rows(self.extents.num_tokens * self.extents.num_heads, &kernel)?, &params)?;
        Ok(name.into())
    }

    fn dsink(&self) -> Result<Option<String>> {
        let Some(dsink) = self.arguments.dsink else { return Ok(None) };
        let name = "sparse_attention_dsink";
        let kernel = self.kernel::<SparseAttentionDsinkParams>(name)?;
        let params = SparseAttentionDsinkParams {
            sink_terms: self.scratch(self.workspace.sink_terms),
            dsink: DeviceAddress(dsink.address),
            num_tokens: self.extents.num_tokens as i32,
            num_heads: self.extents.num_heads as i32,
        };
        let blocks = self.extents.num_heads.div_ceil(32) as u64;
        kernel.launch(LaunchConfig::linear(CHECK.operator, "sink", blocks, kernel.max_threads())?, &params)?;
        Ok(Some(name.into()))
    }

    /// Zero-fills the accumulators, adds the gradients, rounds them where they are stored narrow.
    fn gradients(&self) -> Result<Vec<String>> {
        let Backward { dk, dv, .. } = *self.arguments;
        let dk_rows = self.accumulator(dk, self.workspace.dk);
        let dv_rows = dv.map(|dv| self.accumulator(dv, self.workspace.dv));
        for rows in [Some(dk_rows), dv_rows].into_iter().flatten() {
            self.zero(rows, self.extents.num_keys)?;
        }
        let mut paths = vec!["sparse_attention_zero".into()];
        match self.workspace.chunk {
            None => paths.push(self.backward(0, self.extents.num_tokens, dk_rows, dv_rows)?),
            Some(chunk) => paths.extend(self.chunks(chunk, dk_rows, dv_rows)?),
        }
        if dk.dtype == DType::Bf16 {
            self.cast(dk_rows, dk)?;
            if let (Some(rows), Some(dv)) = (dv_rows, dv) {
                self.cast(rows, dv)?;
            }
            paths.push("sparse_attention_cast".into());
        }
        Ok(paths)
    }

    /// A chunk of tokens after the other: its index, its rows, their sums. Returns the kernels of one chunk.
    fn chunks(&self, chunk: Chunk, dk: Accumulator, dv: Option<Accumulator>) -> Result<Vec<String>> {
        let Extents { num_tokens, v_dim, head_dim, .. } = self.extents;
        let own =
            |offset: usize, width: usize| Accumulator { address: self.scratch(offset), stride: width as i64, width };
        let (dk_rows, dv_rows) = (own(chunk.dk_rows, head_dim), dv.map(|_| own(chunk.dv_rows, v_dim)));
        let mut paths = Vec::new();
        for first in (0..num_tokens).step_by(chunk.tokens.max(1)) {
            let tokens = chunk.tokens.min(num_tokens - first);
            paths = self.index(chunk, first, tokens)?;
            paths.push(self.backward(first, tokens, dk_rows, dv_rows)?);
            paths.push(self.sum(chunk, tokens, dk_rows, dk)?);
            if let (Some(rows), Some(dv)) = (dv_rows, dv) {
                self.sum(chunk, tokens, rows, dv)?;
            }
        }
        Ok(paths)
    }

    /// Lists the slots of `tokens` tokens from `first` on, by key and in ascending order.
    fn index(&self, chunk: Chunk, first: usize, tokens: usize) -> Result<Vec<String>> {
        let Inputs { indices, topk_length, .. } = self.arguments.inputs;
        let Extents { num_keys, topk, .. } = self.extents;
        let counts =
            Accumulator { address: self.scratch(chunk.counts), stride: COUNTS_PER_ROW as i64, width: COUNTS_PER_ROW };
        self.zero(counts, Chunk::count_rows(num_keys))?;
        let params = SparseAttentionIndexParams {
            indices: advanced(indices, first),
            topk_length: topk_length.map_or(DeviceAddress(0), |length| advanced(length, first)),
            counts: counts.address,
            ends: self.scratch(chunk.ends),
            entries: self.scratch(chunk.entries),
            ordered: self.scratch(chunk.ordered),
            indices_stride: indices.strides[0],
            num_tokens: tokens as i32,
            num_keys: num_keys as i32,
            topk: topk as i32,
        };
        let (entries, keys) = ((tokens * topk) as u64, num_keys as u64);
        let steps = [
            ("sparse_attention_count", entries.div_ceil(INDEX_THREADS)),
            ("sparse_attention_reserve", keys.div_ceil(INDEX_THREADS)),
            ("sparse_attention_fill", entries.div_ceil(INDEX_THREADS)),
            ("sparse_attention_order", keys.div_ceil(ROWS_PER_BLOCK)),
        ];
        for (name, blocks) in steps {
            let kernel = self.kernel::<SparseAttentionIndexParams>(name)?;
            kernel.launch(LaunchConfig::linear(CHECK.operator, "indices", blocks, kernel.max_threads())?, &params)?;
        }
        Ok(steps.map(|(name, _)| name.into()).into())
    }

    /// Adds the rows of a chunk of `tokens` tokens to those of their keys.
    fn sum(&self, chunk: Chunk, tokens: usize, rows: Accumulator, target: Accumulator) -> Result<String> {
        let name = "sparse_attention_sum";
        let kernel = self.kernel::<SparseAttentionSumParams>(name)?;
        let params = SparseAttentionSumParams {
            rows: rows.address,
            counts: self.scratch(chunk.counts),
            ends: self.scratch(chunk.ends),
            ordered: self.scratch(chunk.ordered),
            target: target.address,
            stride: target.stride,
            num_entries: (tokens * self.extents.topk) as i64,
            head_blocks: chunk.head_blocks as i32,
            num_keys: self.extents.num_keys as i32,
            width: target.width as i32,
        };
        kernel.launch(self.rows(self.extents.num_keys * target.width.div_ceil(SUM_COLUMNS), &kernel)?, &params)?;
        Ok(name.into())
    }

    /// The gradient itself where it is f32, dense scratch rows where it is not.
    fn accumulator(&self, gradient: &TensorView, offset: usize) -> Accumulator {
        let width = gradient.shape[1];
        match gradient.dtype {
            DType::F32 => Accumulator { address: DeviceAddress(gradient.address), stride: gradient.strides[0], width },
            _ => Accumulator { address: self.scratch(offset), stride: width as i64, width },
        }
    }

    fn zero(&self, rows: Accumulator, num_rows: usize) -> Result<()> {
        let kernel = self.kernel::<SparseAttentionZeroParams>("sparse_attention_zero")?;
        let params = SparseAttentionZeroParams {
            target: rows.address,
            stride: rows.stride,
            num_rows: num_rows as i64,
            width: rows.width as i32,
        };
        kernel.launch(self.rows(num_rows, &kernel)?, &params)
    }

    fn cast(&self, rows: Accumulator, target: &TensorView) -> Result<()> {
        let kernel = self.kernel::<SparseAttentionCastParams>("sparse_attention_cast")?;
        let params = SparseAttentionCastParams {
            source: rows.address,
            target: DeviceAddress(target.address),
            source_stride: rows.stride,
            target_stride: target.strides[0],
            num_rows: self.extents.num_keys as i64,
            width: rows.width as i32,
        };
        kernel.launch(self.rows(self.extents.num_keys, &kernel)?, &params)
    }

    /// dq of `tokens` tokens from `first` on, and what their slots give to `dk` and `dv`.
    fn backward(&self, first: usize, tokens: usize, dk: Accumulator, dv: Option<Accumulator>) -> Result<String> {
        let Backward { inputs, lse, dout, dlse, dq, .. } = *self.arguments;
        let (v, v_stride) = value_view(inputs.value);
        let params = SparseAttentionBackwardParams {
            q: advanced(inputs.q, first),
            k: DeviceAddress(inputs.k.address),
            v,
            dout: advanced(dout, first),
            sink: address(inputs.sink),
            lse: advanced(lse, first),
            delta: self.scratch(self.workspace.delta + first * self.extents.num_heads * 4),
            dlse: dlse.map_or(DeviceAddress(0), |dlse| advanced(dlse, first)),
            indices: advanced(inputs.indices, first),
            topk_length: inputs.topk_length.map_or(DeviceAddress(0), |length| advanced(length, first)),
            dq: advanced(dq, first),
            dk: dk.address,
            dv: dv.map_or(DeviceAddress(0), |rows| rows.address),
            q_token_stride: inputs.q.strides[0],
            q_head_stride: inputs.q.strides[1],
            k_stride: inputs.k.strides[0],
            v_stride,
            dout_token_stride: dout.strides[0],
            dout_head_stride: dout.strides[1],
            indices_stride: inputs.indices.strides[0],
            dq_token_stride: dq.strides[0],
            dq_head_stride: dq.strides[1],
            dk_stride: dk.stride,
            dv_stride: dv.map_or(0, |rows| rows.stride),
            num_tokens: tokens as i32,
            num_heads: self.extents.num_heads as i32,
            num_keys: self.extents.num_keys as i32,
            topk: self.extents.topk as i32,
            softmax_scale: inputs.softmax_scale,
        };
        let chunk = Extents { num_tokens: tokens, ..self.extents };
        let deterministic = self.workspace.chunk.is_some();
        let summed = if deterministic { ",deterministic" } else { "" };
        if self.hopper {
            let name = "sparse_attention_hopper_backward";
            let defines = defines(chunk.head_dim, chunk.v_dim, HOPPER_HEADS, false, deterministic);
            let kernel = self.device.kernel::<SparseAttentionBackwardParams>(HOPPER_BACKWARD_FILE, &defines, name)?;
            kernel.launch(chunk.launch(HOPPER_HEADS, &kernel)?, &params)?;
            return Ok(if deterministic { format!("{name}<deterministic>") } else { name.into() });
        }
        let name = "sparse_attention_backward";
        let kernel = self.kernel::<SparseAttentionBackwardParams>(name)?;
        kernel.launch(chunk.launch(chunk.heads_per_block(), &kernel)?, &params)?;
        Ok(format!("{name}<{}{summed}>", chunk.heads_per_block()))
    }
}

/// Where the entry `first` of a tensor's first axis begins.
fn advanced(view: &TensorView, first: usize) -> DeviceAddress {
    DeviceAddress(view.address + first as u64 * view.strides[0] as u64 * view.dtype.size() as u64)
}
