//! `sparse_attention`: launchers of `kernels/cuda/sparse_attention*.cu` (inference 8, training 3 and 4).

use crate::arguments::{Argument, Arguments, FLOATS, Parts, Signature, read_at, scratch_at, write_at};
pub use crate::implementation::Implementation;
use crate::runtime::device::{Module, module};
use crate::runtime::params::{DeviceAddress, Params};
use crate::runtime::{DType, Device, Kernel, LaunchConfig, Result, TensorView};

const FORWARD_FILE: &str = "sparse_attention.cu";
const BACKWARD_FILE: &str = "sparse_attention_backward.cu";
const SUMS_FILE: &str = "sparse_attention_sums.cu";
const HOPPER_FORWARD_FILE: &str = "sparse_attention_hopper.cu";
const HOPPER_BACKWARD_FILE: &str = "sparse_attention_hopper_backward.cu";
const CHECK: Arguments = Arguments { operator: "sparse_attention" };
const BF16: [DType; 1] = [DType::Bf16];
/// Rows that one block of the row kernels (delta, zero, cast) takes: one a warp.
const ROWS_PER_BLOCK: usize = 8;
/// Heads of one block of the Hopper kernels: the rows of a warpgroup's product.
const HOPPER_HEADS: usize = 64;
/// Threads of a block of the index kernels (count, reserve, fill): one an entry or a key.
const INDEX_THREADS: usize = 256;
/// Columns that a warp of the sum takes.
const SUM_COLUMNS: usize = 128;
/// Counts that a warp clears at a time.
const COUNTS_PER_ROW: usize = 128;
/// What [`default_chunk_tokens`] lets the rows of a chunk take: enough blocks for several waves of any GPU.
const DEFAULT_ROW_BYTES: usize = 1 << 30;
/// Widths of q and k that the Hopper kernels take: forward, backward.
const HOPPER_HEAD_DIMS: [usize; 2] = [512, 576];
const HOPPER_BACKWARD_HEAD_DIMS: [usize; 1] = [512];

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

impl<'a> Inputs<'a> {
    /// V where it is a tensor of its own.
    fn v(&self) -> Option<&'a TensorView> {
        match self.value {
            Value::Prefix { .. } => None,
            Value::Separate(v) => Some(v),
        }
    }

    fn tensors(&self) -> [Argument<'a>; 6] {
        [
            read_at("q", self.q).of(&BF16).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
            read_at("k", self.k).of(&BF16).axes(&["num_keys", "head_dim"]).aligned_rows(),
            read_at("v", self.v()).of(&BF16).axes(&["num_keys", "v_dim"]).aligned_rows(),
            read_at("sink", self.sink).axes(&["num_heads"]),
            read_at("indices", self.indices).of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
            read_at("topk_length", self.topk_length).of(&[DType::I32]).axes(&["num_tokens"]),
        ]
    }
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

    /// What the forward and the backward are told of them.
    fn params(self, params: Params) -> Result<Params> {
        let params = params.i32("num_tokens", self.num_tokens)?.i32("num_heads", self.num_heads)?;
        params.i32("num_keys", self.num_keys)?.i32("topk", self.topk)
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

/// What the sums are compiled for.
fn sums_defines(v_dim: usize) -> Vec<(&'static str, String)> {
    vec![("V_DIM", v_dim.to_string())]
}

/// The modules of the model's head geometries, and of a small one.
pub fn modules() -> Vec<Module> {
    let geometries = [(512, 512, false), (576, 512, false), (512, 512, true), (64, 64, false), (64, 32, true)];
    let forward_and_backwards = [(FORWARD_FILE, false), (BACKWARD_FILE, false), (BACKWARD_FILE, true)];
    let portable = geometries.into_iter().flat_map(|(head_dim, v_dim, separate)| {
        let of = move |heads| {
            let defines = move |deterministic| defines(head_dim, v_dim, heads, separate, deterministic);
            forward_and_backwards.map(|(file, deterministic)| module(file, &defines(deterministic)))
        };
        [16, 64].into_iter().flat_map(of)
    });
    let hopper = [
        (HOPPER_FORWARD_FILE, 512, false),
        (HOPPER_FORWARD_FILE, 576, false),
        (HOPPER_BACKWARD_FILE, 512, false),
        (HOPPER_BACKWARD_FILE, 512, true),
    ];
    let hopper = hopper.map(|(file, head_dim, deterministic)| {
        module(file, &defines(head_dim, 512, HOPPER_HEADS, false, deterministic))
    });
    let sums = [512, 64, 32].map(|v_dim| module(SUMS_FILE, &sums_defines(v_dim)));
    portable.chain(hopper).chain(sums).collect()
}

/// Checks what forward and backward read; the signature is to be given what they write.
fn check_inputs<'a>(inputs: &Inputs<'a>) -> Result<(Extents, Signature<'a>)> {
    let mut signature = CHECK.signature_at(inputs.tensors()).extent("head_dim", 16, 576);
    let axes = ["num_tokens", "num_heads", "head_dim", "num_keys", "topk", "v_dim"];
    let [num_tokens, num_heads, head_dim, num_keys, topk, own_dim] = signature.bind(axes)?;
    let (v_dim, separate) = match inputs.value {
        Value::Prefix { v_dim } => (v_dim, false),
        Value::Separate(_) => (own_dim, true),
    };
    if v_dim == 0 || !v_dim.is_multiple_of(16) || v_dim > 512 || (!separate && v_dim > head_dim) {
        return CHECK
            .refuse("v", format!("v_dim {v_dim} must be a multiple of 16 up to 512, and within k if it is part of k"));
    }
    CHECK.positive("softmax_scale", inputs.softmax_scale)?;
    Ok((Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate }, signature.given("v_dim", v_dim)))
}

/// A bf16 tensor `[num_tokens, num_heads, v_dim]`.
fn values(tensor: Argument<'_>) -> Argument<'_> {
    tensor.of(&BF16).axes(&["num_tokens", "num_heads", "v_dim"]).aligned_rows()
}

/// An f32 tensor `[num_tokens, num_heads]`.
fn per_head(tensor: Argument<'_>) -> Argument<'_> {
    tensor.axes(&["num_tokens", "num_heads"])
}

/// Launches the forward; returns the kernel that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<String> {
    let Forward { inputs, out, lse, max_logits, .. } = *arguments;
    let (extents, signature) = check_inputs(&inputs)?;
    let written =
        [values(write_at("out", out)), per_head(write_at("lse", lse)), per_head(write_at("max_logits", max_logits))];
    signature.and(written).bind([])?;
    let params = CHECK.params().heads("q", inputs.q).rows("k", inputs.k).rows("v", inputs.v()).ptr("sink", inputs.sink);
    let params = params.rows("indices", inputs.indices).ptr("topk_length", inputs.topk_length);
    let params = params.heads("out", out).ptr("lse", lse).ptr("max_logits", max_logits);
    let params = extents.params(params)?.f32("softmax_scale", inputs.softmax_scale);
    if extents.hopper(device, arguments.implementation, &HOPPER_HEAD_DIMS)? {
        let name = "sparse_attention_hopper_forward";
        let defines = defines(extents.head_dim, extents.v_dim, HOPPER_HEADS, false, false);
        let kernel = device.kernel(HOPPER_FORWARD_FILE, &defines, name)?;
        let mut config = extents.launch(HOPPER_HEADS, &kernel)?;
        config.grid[0] = config.grid[0].min(device.environment().processors.max(1));
        kernel.launch(config, &params)?;
        return Ok(name.into());
    }
    let name = "sparse_attention_forward";
    let kernel = device.kernel(FORWARD_FILE, &extents.defines(false), name)?;
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

    fn of(extents: Extents, chunk_tokens: usize, parts: &mut Parts) -> Self {
        let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate } = extents;
        // The index tells 2^31 - 1 slots apart.
        let tokens = chunk_tokens.min(num_tokens).min(i32::MAX as usize / topk.max(1));
        let head_blocks = num_heads.div_ceil(extents.heads_per_block());
        Self {
            tokens,
            head_blocks,
            counts: parts.words(&[Self::count_rows(num_keys), COUNTS_PER_ROW]),
            ends: parts.words(&[num_keys]),
            entries: parts.words(&[tokens, topk]),
            ordered: parts.words(&[tokens, topk]),
            dk_rows: parts.words(&[head_blocks, tokens, topk, head_dim]),
            dv_rows: parts.words(&[usize::from(separate), head_blocks, tokens, topk, v_dim]),
        }
    }
}

impl Extents {
    /// Bytes of one token's own rows.
    fn row_bytes(self) -> usize {
        let width = self.head_dim + if self.separate { self.v_dim } else { 0 };
        self.num_heads.div_ceil(self.heads_per_block()).saturating_mul(self.topk).saturating_mul(width * 4)
    }
}

impl Workspace {
    fn of(extents: Extents, dk_type: DType, sink: bool, key_gradients: KeyGradients) -> Result<Self> {
        let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, separate, .. } = extents;
        let mut parts = Parts::default();
        let accumulated = dk_type == DType::Bf16;
        let delta = parts.words(&[num_tokens, num_heads]);
        let sink_terms = parts.words(&[usize::from(sink), num_tokens, num_heads]);
        let dk = parts.words(&[usize::from(accumulated), num_keys, head_dim]);
        let dv = parts.words(&[usize::from(accumulated && separate), num_keys, v_dim]);
        let chunk = match key_gradients {
            KeyGradients::Atomic => None,
            KeyGradients::Deterministic { chunk_tokens: 0 } => {
                return CHECK.refuse("key_gradients", "chunk_tokens 0 must be at least 1");
            }
            KeyGradients::Deterministic { chunk_tokens } => Some(Chunk::of(extents, chunk_tokens, &mut parts)),
        };
        Ok(Self { delta, sink_terms, dk, dv, chunk, bytes: parts.bytes })
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
    Ok(Workspace::of(check_inputs(inputs)?.0, dk, inputs.sink.is_some(), key_gradients)?.bytes)
}

/// As many tokens as have their own rows in 1 GiB, and at least one: what [`KeyGradients::Deterministic`] is best given.
///
/// # Errors
/// Inputs that the launcher refuses.
pub fn default_chunk_tokens(inputs: &Inputs<'_>) -> Result<usize> {
    let (extents, _) = check_inputs(inputs)?;
    Ok((DEFAULT_ROW_BYTES / extents.row_bytes().max(1)).clamp(1, extents.num_tokens.max(1)))
}

/// Launches the backward; returns the kernels that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn backward(device: &Device, arguments: &Backward<'_>) -> Result<Vec<String>> {
    let (extents, workspace) = check_backward(arguments)?;
    let hopper = extents.hopper(device, arguments.implementation, &HOPPER_BACKWARD_HEAD_DIMS)?;
    let call = BackwardCall { device, arguments, extents, workspace, hopper };
    let mut paths = vec![call.delta()?];
    paths.extend(call.dsink()?);
    paths.extend(call.gradients()?);
    Ok(paths)
}

fn check_backward(arguments: &Backward<'_>) -> Result<(Extents, Workspace)> {
    let Backward { inputs, implementation: _, key_gradients, out, lse, dout, dlse, dq, dk, dv, dsink, workspace } =
        *arguments;
    let (extents, signature) = check_inputs(&inputs)?;
    let tensors = [
        values(read_at("out", out)),
        per_head(read_at("lse", lse)),
        values(read_at("dout", dout)),
        per_head(read_at("dlse", dlse)),
        write_at("dq", dq).like("q").aligned_rows(),
        write_at("dk", dk).of(&FLOATS).axes(&["num_keys", "head_dim"]).aligned_rows(),
        write_at("dv", dv).axes(&["num_keys", "v_dim"]).typed("dk").aligned_rows().with(&["v"]),
        write_at("dsink", dsink).axes(&["num_heads"]).with(&["sink"]),
        scratch_at("workspace", workspace, 16),
    ];
    signature.and(tensors).bind([])?;
    let parts = Workspace::of(extents, dk.dtype, inputs.sink.is_some(), key_gradients)?;
    CHECK.holds("workspace", workspace, parts.bytes)?;
    Ok((extents, parts))
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

impl BackwardCall<'_> {
    /// A dense part of the scratch memory.
    fn scratch(&self, offset: usize, shape: &[usize]) -> TensorView {
        TensorView::dense("workspace", self.arguments.workspace.address + offset as u64, DType::F32, shape)
    }

    fn address(&self, offset: usize) -> DeviceAddress {
        DeviceAddress(self.arguments.workspace.address + offset as u64)
    }

    fn sink_terms(&self) -> DeviceAddress {
        if self.arguments.inputs.sink.is_none() {
            return DeviceAddress::default();
        }
        self.address(self.workspace.sink_terms)
    }

    /// A kernel of the sums.
    fn kernel(&self, name: &str) -> Result<Kernel> {
        self.device.kernel(SUMS_FILE, &sums_defines(self.extents.v_dim), name)
    }

    fn delta(&self) -> Result<String> {
        let Backward { inputs, out, dout, lse, .. } = *self.arguments;
        let Extents { num_tokens, num_heads, .. } = self.extents;
        let name = "sparse_attention_delta";
        let params = CHECK.params().heads("out", out).heads("dout", dout).ptr("lse", lse).ptr("sink", inputs.sink);
        let params = params.ptr("delta", self.address(self.workspace.delta)).ptr("sink_terms", self.sink_terms());
        let params = params.i32("num_tokens", num_tokens)?.i32("num_heads", num_heads)?;
        self.kernel(name)?.launch_blocks("q", (num_tokens * num_heads).div_ceil(ROWS_PER_BLOCK), &params)?;
        Ok(name.into())
    }

    fn dsink(&self) -> Result<Option<String>> {
        let Some(dsink) = self.arguments.dsink else { return Ok(None) };
        let Extents { num_tokens, num_heads, .. } = self.extents;
        let name = "sparse_attention_dsink";
        let params = CHECK.params().ptr("sink_terms", self.sink_terms()).ptr("dsink", dsink);
        let params = params.i32("num_tokens", num_tokens)?.i32("num_heads", num_heads)?;
        self.kernel(name)?.launch_blocks("sink", num_heads.div_ceil(32), &params)?;
        Ok(Some(name.into()))
    }

    /// Zero-fills the accumulators, adds the gradients, rounds them where they are stored narrow.
    fn gradients(&self) -> Result<Vec<String>> {
        let Backward { dk, dv, .. } = *self.arguments;
        let dk_rows = self.accumulator(dk, self.workspace.dk);
        let dv_rows = dv.map(|dv| self.accumulator(dv, self.workspace.dv));
        for rows in [Some(&dk_rows), dv_rows.as_ref()].into_iter().flatten() {
            self.zero(rows)?;
        }
        let mut paths = vec!["sparse_attention_zero".into()];
        match self.workspace.chunk {
            None => paths.push(self.backward(0, self.extents.num_tokens, &dk_rows, dv_rows.as_ref())?),
            Some(chunk) => paths.extend(self.chunks(chunk, &dk_rows, dv_rows.as_ref())?),
        }
        if dk.dtype == DType::Bf16 {
            self.cast(&dk_rows, dk)?;
            if let (Some(rows), Some(dv)) = (&dv_rows, dv) {
                self.cast(rows, dv)?;
            }
            paths.push("sparse_attention_cast".into());
        }
        Ok(paths)
    }

    /// A chunk of tokens after the other: its index, its rows, their sums. Returns the kernels of one chunk.
    fn chunks(&self, chunk: Chunk, dk: &TensorView, dv: Option<&TensorView>) -> Result<Vec<String>> {
        let Extents { num_tokens, topk, v_dim, head_dim, .. } = self.extents;
        let slots = chunk.head_blocks * chunk.tokens * topk;
        let dk_rows = self.scratch(chunk.dk_rows, &[slots, head_dim]);
        let dv_rows = dv.map(|_| self.scratch(chunk.dv_rows, &[slots, v_dim]));
        let mut paths = Vec::new();
        for first in (0..num_tokens).step_by(chunk.tokens.max(1)) {
            let tokens = chunk.tokens.min(num_tokens - first);
            paths = self.index(chunk, first, tokens)?;
            paths.push(self.backward(first, tokens, &dk_rows, dv_rows.as_ref())?);
            paths.push(self.sum(chunk, tokens, &dk_rows, dk)?);
            if let (Some(rows), Some(dv)) = (&dv_rows, dv) {
                self.sum(chunk, tokens, rows, dv)?;
            }
        }
        Ok(paths)
    }

    /// Lists the slots of `tokens` tokens from `first` on, by key and in ascending order.
    fn index(&self, chunk: Chunk, first: usize, tokens: usize) -> Result<Vec<String>> {
        let Inputs { indices, topk_length, .. } = self.arguments.inputs;
        let Extents { num_keys, topk, .. } = self.extents;
        self.zero(&self.scratch(chunk.counts, &[Chunk::count_rows(num_keys), COUNTS_PER_ROW]))?;
        let params = CHECK.params().rows("indices", &indices.skip(first));
        let params = params.ptr("topk_length", topk_length.map(|length| length.skip(first)).as_ref());
        let params = params.ptr("counts", self.address(chunk.counts)).ptr("ends", self.address(chunk.ends));
        let params = params.ptr("entries", self.address(chunk.entries)).ptr("ordered", self.address(chunk.ordered));
        let params = params.i32("num_tokens", tokens)?.i32("num_keys", num_keys)?.i32("topk", topk)?;
        let steps = [
            ("sparse_attention_count", (tokens * topk).div_ceil(INDEX_THREADS)),
            ("sparse_attention_reserve", num_keys.div_ceil(INDEX_THREADS)),
            ("sparse_attention_fill", (tokens * topk).div_ceil(INDEX_THREADS)),
            ("sparse_attention_order", num_keys.div_ceil(ROWS_PER_BLOCK)),
        ];
        for (name, blocks) in steps {
            self.kernel(name)?.launch_blocks("indices", blocks, &params)?;
        }
        Ok(steps.map(|(name, _)| name.into()).into())
    }

    /// Adds the rows of a chunk of `tokens` tokens to those of their keys.
    fn sum(&self, chunk: Chunk, tokens: usize, rows: &TensorView, target: &TensorView) -> Result<String> {
        let Extents { num_keys, topk, .. } = self.extents;
        let width = target.shape[1];
        let name = "sparse_attention_sum";
        let params = CHECK.params().ptr("rows", rows).ptr("counts", self.address(chunk.counts));
        let params = params.ptr("ends", self.address(chunk.ends)).ptr("ordered", self.address(chunk.ordered));
        let params = params.rows("target", target).i64("num_entries", tokens * topk)?;
        let params = params.i32("head_blocks", chunk.head_blocks)?.i32("num_keys", num_keys)?.i32("width", width)?;
        let blocks = (num_keys * width.div_ceil(SUM_COLUMNS)).div_ceil(ROWS_PER_BLOCK);
        self.kernel(name)?.launch_blocks("q", blocks, &params)?;
        Ok(name.into())
    }

    /// The gradient itself where it is f32, dense scratch rows where it is not.
    fn accumulator(&self, gradient: &TensorView, offset: usize) -> TensorView {
        match gradient.dtype {
            DType::F32 => gradient.clone(),
            _ => self.scratch(offset, &gradient.shape),
        }
    }

    fn zero(&self, target: &TensorView) -> Result<()> {
        let params = CHECK.params().rows("target", target).i64("num_rows", target.shape[0])?;
        let params = params.i32("width", target.shape[1])?;
        self.kernel("sparse_attention_zero")?.launch_blocks("q", target.shape[0].div_ceil(ROWS_PER_BLOCK), &params)
    }

    fn cast(&self, source: &TensorView, target: &TensorView) -> Result<()> {
        let params = CHECK.params().rows("source", source).rows("target", target);
        let params = params.i64("num_rows", target.shape[0])?.i32("width", target.shape[1])?;
        self.kernel("sparse_attention_cast")?.launch_blocks("q", target.shape[0].div_ceil(ROWS_PER_BLOCK), &params)
    }

    /// dq of `tokens` tokens from `first` on, and what their slots give to `dk` and `dv`.
    fn backward(&self, first: usize, tokens: usize, dk: &TensorView, dv: Option<&TensorView>) -> Result<String> {
        let Backward { inputs, lse, dout, dlse, dq, .. } = *self.arguments;
        let chunk = Extents { num_tokens: tokens, ..self.extents };
        let from_first = |view: Option<&TensorView>| view.map(|view| view.skip(first));
        let delta = self.scratch(self.workspace.delta, &[self.extents.num_tokens, chunk.num_heads]);
        let params = CHECK.params().heads("q", &inputs.q.skip(first)).rows("k", inputs.k).rows("v", inputs.v());
        let params = params.heads("dout", &dout.skip(first)).ptr("sink", inputs.sink).ptr("lse", &lse.skip(first));
        let params = params.ptr("delta", &delta.skip(first)).ptr("dlse", from_first(dlse).as_ref());
        let params = params.rows("indices", &inputs.indices.skip(first));
        let params = params.ptr("topk_length", from_first(inputs.topk_length).as_ref());
        let params = params.heads("dq", &dq.skip(first)).rows("dk", dk).rows("dv", dv);
        let params = chunk.params(params)?.f32("softmax_scale", inputs.softmax_scale);
        let deterministic = self.workspace.chunk.is_some();
        if self.hopper {
            let name = "sparse_attention_hopper_backward";
            let defines = defines(chunk.head_dim, chunk.v_dim, HOPPER_HEADS, false, deterministic);
            let kernel = self.device.kernel(HOPPER_BACKWARD_FILE, &defines, name)?;
            kernel.launch(chunk.launch(HOPPER_HEADS, &kernel)?, &params)?;
            return Ok(if deterministic { format!("{name}<deterministic>") } else { name.into() });
        }
        let name = "sparse_attention_backward";
        let kernel = self.device.kernel(BACKWARD_FILE, &self.extents.defines(deterministic), name)?;
        kernel.launch(chunk.launch(chunk.heads_per_block(), &kernel)?, &params)?;
        let summed = if deterministic { ",deterministic" } else { "" };
        Ok(format!("{name}<{}{summed}>", chunk.heads_per_block()))
    }
}
