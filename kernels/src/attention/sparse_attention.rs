//! `sparse_attention`: launchers of `kernels/cuda/sparse_attention*.cu` (inference 8, training 3
//! and 4).

use crate::arguments::{
    Argument, Arguments, FLOATS, Parts, Signature, read, saved, scratch, write,
};
pub use crate::implementation::Implementation;
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Kernel, LaunchConfig, Result, TensorView, Views};

const FORWARD_FILE: &str = "sparse_attention.cu";
const BACKWARD_FILE: &str = "sparse_attention_backward.cu";
const SUMS_FILE: &str = "sparse_attention_sums.cu";
const HOPPER_FORWARD_FILE: &str = "sparse_attention_hopper.cu";
const HOPPER_BACKWARD_FILE: &str = "sparse_attention_hopper_backward.cu";
const CHECK: Arguments = Arguments { operator: "sparse_attention" };
const BF16: [DType; 1] = [DType::Bf16];
/// Rows of one block of the row kernels (delta, zero, cast): one a warp.
const ROWS_PER_BLOCK: usize = 8;
/// Heads of one block of the Hopper kernels: the rows of a warpgroup's MMA.
const HOPPER_HEADS: usize = 64;
/// Threads of a block of the index kernels (count, reserve, fill): one for each entry or key.
const INDEX_THREADS: usize = 256;
/// Columns that a warp of the sum kernel takes.
const SUM_COLUMNS: usize = 128;
/// Counts that a warp clears at a time.
const COUNTS_PER_ROW: usize = 128;
/// Bytes of the rows of a chunk, as [`default_chunk_tokens`] limits them: enough blocks for several
/// waves of any GPU.
const DEFAULT_ROW_BYTES: usize = 1 << 30;
/// Widths of q and k that the Hopper kernels take: forward, backward.
const HOPPER_HEAD_DIMS: [usize; 2] = [512, 576];
const HOPPER_BACKWARD_HEAD_DIMS: [usize; 1] = [512];
/// Largest width of the values.
const LARGEST_V_DIM: usize = 512;

/// How the gradients of a key's slots are summed into `dk` (and `dv`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyGradients {
    /// By fp32 atomics, in the order in which blocks run: runs differ in the last bits of fp32.
    #[default]
    Atomic,
    /// In a fixed order of tokens, slots and blocks of heads: every run gives the same bits. The
    /// gradient of each slot has a separate fp32 row in the workspace, for one chunk of tokens at a
    /// time. The bits do not depend on the chunk.
    Deterministic {
        /// Tokens of a chunk, at least 1, as in [`default_chunk_tokens`]. A value above the number
        /// of tokens means all of them.
        chunk_tokens: usize,
    },
}

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The values are the first `v_dim` columns of the keys: all of them (K = V), or a prefix
    /// (576/512). A multiple of 16 up to 512; `None` exactly where there is a `v`.
    pub v_dim: Option<usize>,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
    /// Which implementation runs. The Hopper kernels take V as the first 512 columns of K. Their
    /// forward takes keys of width 512 or 576, their backward 512.
    pub implementation: Implementation,
    /// How the backward sums `dk` and `dv`.
    pub key_gradients: KeyGradients,
}

/// The purpose for which arguments are checked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// To compute the sizes that a backward needs.
    Sizes,
    Forward,
    Backward,
}

/// The sizes of a call.
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
    /// Whether the Hopper kernels run, for keys of one of these widths.
    fn hopper(
        self,
        device: &Device,
        implementation: Implementation,
        head_dims: &[usize],
    ) -> Result<bool> {
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
        // A block of 64 heads fills an SM; up to 16 heads would leave three quarters of it idle.
        if self.num_heads <= 16 { 16 } else { 64 }
    }

    fn defines(self, deterministic: bool) -> Vec<(&'static str, String)> {
        defines(self.head_dim, self.v_dim, self.heads_per_block(), self.separate, deterministic)
    }

    /// The parameters of the forward and the backward.
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

/// The defines of the sum kernels.
fn sums_defines(v_dim: usize) -> Vec<(&'static str, String)> {
    vec![("V_DIM", v_dim.to_string())]
}

/// The values' width of the module that other operators use of the sum kernels: theirs have none.
pub(crate) const INDEX_V_DIM: usize = 512;

/// The module of the index of slots by key, for operators other than this one.
pub(crate) fn index_module() -> Module {
    module(SUMS_FILE, &sums_defines(INDEX_V_DIM))
}

/// A kernel of that module.
pub(crate) fn index_kernel(device: &Device, name: &str) -> Result<Kernel> {
    device.kernel(SUMS_FILE, &sums_defines(INDEX_V_DIM), name)
}

/// Memory of an index of slots by key: `counts` of `num_keys + 1` integers that are 0 before the
/// launch, `ends` of `num_keys`, `entries` and `ordered` of one entry for each slot.
pub(crate) struct KeyIndex {
    pub counts: DeviceAddress,
    pub ends: DeviceAddress,
    pub entries: DeviceAddress,
    pub ordered: DeviceAddress,
}

impl KeyIndex {
    /// Lists the slots of `tokens` tokens by key, in ascending order. `counts` holds how many slots
    /// each key has, `ends` where its list in `ordered` ends. `lists` are the indices, followed by
    /// their lengths, if there are any. Returns the kernels that ran.
    pub fn launch(
        &self,
        check: Arguments,
        kernel: impl Fn(&str) -> Result<Kernel>,
        [indices, topk_length]: [Option<&TensorView>; 2],
        [tokens, topk, num_keys]: [usize; 3],
    ) -> Result<[&'static str; 4]> {
        let params = check.params().rows("indices", indices).ptr("topk_length", topk_length);
        let params = params.ptr("counts", self.counts).ptr("ends", self.ends);
        let params = params.ptr("entries", self.entries).ptr("ordered", self.ordered);
        let params =
            params.i32("num_tokens", tokens)?.i32("num_keys", num_keys)?.i32("topk", topk)?;
        let steps = [
            ("sparse_attention_count", (tokens * topk).div_ceil(INDEX_THREADS)),
            ("sparse_attention_reserve", num_keys.div_ceil(INDEX_THREADS)),
            ("sparse_attention_fill", (tokens * topk).div_ceil(INDEX_THREADS)),
            ("sparse_attention_order", num_keys.div_ceil(ROWS_PER_BLOCK)),
        ];
        for (name, blocks) in steps {
            kernel(name)?.launch_blocks("indices", blocks, &params)?;
        }
        Ok(steps.map(|(name, _)| name))
    }
}

/// The modules of the model's head geometries, and of a small one.
pub fn modules() -> Vec<Module> {
    let geometries =
        [(512, 512, false), (576, 512, false), (512, 512, true), (64, 64, false), (64, 32, true)];
    let forward_and_backwards =
        [(FORWARD_FILE, false), (BACKWARD_FILE, false), (BACKWARD_FILE, true)];
    let portable = geometries.into_iter().flat_map(|(head_dim, v_dim, separate)| {
        let of = move |heads| {
            let defines =
                move |deterministic| defines(head_dim, v_dim, heads, separate, deterministic);
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

/// Checks the arguments of a call.
fn check(views: &Views, options: Options, purpose: Purpose) -> Result<(Signature<'_>, Extents)> {
    let (forward, backward) = (purpose == Purpose::Forward, purpose == Purpose::Backward);
    let per_head = |tensor: Argument<'static>| tensor.axes(&["num_tokens", "num_heads"]);
    let values = |tensor: Argument<'static>| {
        tensor
            .of(&BF16)
            .axes(&["num_tokens", "num_heads", "v_dim"])
            .aligned_rows()
            .when(forward || backward)
    };
    let tensors = [
        read("q").of(&BF16).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read("k").of(&BF16).axes(&["num_keys", "head_dim"]).aligned_rows().one_stride(),
        read("v").of(&BF16).axes(&["num_keys", "v_dim"]).aligned_rows().one_stride().optional(),
        read("sink").axes(&["num_heads"]).optional(),
        read("indices").of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows().one_stride(),
        read("topk_length").of(&[DType::I32]).axes(&["num_tokens"]).optional(),
        values(saved("out", backward)),
        per_head(saved("lse", backward)).when(forward || backward),
        per_head(write("max_logits")).when(forward),
        values(read("dout")).when(backward),
        per_head(read("dlse")).optional().when(backward),
        write("dq").like("q").aligned_rows().when(backward),
        write("dk").of(&FLOATS).axes(&["num_keys", "head_dim"]).aligned_rows().when(backward),
        write("dv")
            .axes(&["num_keys", "v_dim"])
            .typed("dk")
            .aligned_rows()
            .with(&["v"])
            .when(backward),
        write("dsink").axes(&["num_heads"]).with(&["sink"]).when(backward),
        scratch("workspace", 16).when(backward),
    ];
    let part_of_k = check_values(views, options)?;
    let call = CHECK.signature(views, tensors).extent("head_dim", 16, 576).extent(
        "v_dim",
        16,
        LARGEST_V_DIM,
    );
    let mut call = part_of_k.into_iter().fold(call, |call, v_dim| call.given("v_dim", v_dim));
    let axes = ["num_tokens", "num_heads", "head_dim", "v_dim", "num_keys", "topk"];
    let [num_tokens, num_heads, head_dim, v_dim, num_keys, topk] = call.bind(axes)?;
    CHECK.positive("softmax_scale", options.softmax_scale)?;
    let separate = part_of_k.is_none();
    Ok((call, Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate }))
}

/// The values are either a tensor or the first columns of the keys; `v_dim` is their number.
fn check_values(views: &Views, options: Options) -> Result<Option<usize>> {
    let width = |name: &str| views.get(name).and_then(|view| view.shape.last().copied());
    match (views.get("v"), options.v_dim) {
        (Some(_), None) => Ok(None),
        (Some(_), Some(v_dim)) => {
            CHECK.refuse("v", format!("it must be absent where v_dim {v_dim} says that k has it"))
        }
        (None, None) => {
            CHECK.refuse("v", "it must be present where no v_dim says how much of k it is")
        }
        (None, Some(v_dim)) => {
            // If the widths of q and k differ, the wrong one is still rejected.
            let most =
                width("q").max(width("k")).map_or(LARGEST_V_DIM, |width| width.min(LARGEST_V_DIM));
            if v_dim > 0 && v_dim.is_multiple_of(16) && v_dim <= most {
                return Ok(Some(v_dim));
            }
            CHECK.refuse(
                "v",
                format!("v_dim {v_dim} must be a multiple of 16 up to {most}, as a part of k"),
            )
        }
    }
}

/// Launches the forward. Returns the kernel that ran. It writes `out`, `lse` and `max_logits` and
/// takes no tensor that only the backward has:
///
/// - `q` `[num_tokens, num_heads, head_dim]` bf16;
/// - `k` `[num_keys, head_dim]` bf16: one key head, shared by all query heads;
/// - `v` `[num_keys, v_dim]` bf16; absent where the values are the first columns of the keys
///   ([`Options::v_dim`]);
/// - `sink` `[num_heads]` f32: a logit, not scaled; absent without sinks;
/// - `indices` `[num_tokens, topk]` i32: rows of `k`. Slot `j` is valid when `j < topk_length` and
///   the index is in `[0, num_keys)`; invalid slots contribute nothing and are never dereferenced;
/// - `topk_length` `[num_tokens]` i32, clamped to `[0, topk]`; absent where it is `topk`
///   everywhere;
/// - `out` `[num_tokens, num_heads, v_dim]` bf16; 0 for a row without a valid slot;
/// - `lse` `[num_tokens, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a
///   row;
/// - `max_logits` `[num_tokens, num_heads]` f32: largest logit, without the sink; `-inf` for such
///   a row.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, options: Options) -> Result<String> {
    let (call, extents) = check(views, options, Purpose::Forward)?;
    let tensors = ["q", "k", "v", "sink", "indices", "topk_length", "out", "lse", "max_logits"];
    let params = call.params(&tensors);
    let params = extents.params(params)?.f32("softmax_scale", options.softmax_scale);
    if extents.hopper(device, options.implementation, &HOPPER_HEAD_DIMS)? {
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

/// Parts of the backward's scratch memory, as byte offsets. Each part starts at a multiple of 16.
struct Workspace {
    delta: usize,
    sink_terms: usize,
    dk: usize,
    dv: usize,
    /// With [`KeyGradients::Deterministic`].
    chunk: Option<Chunk>,
    bytes: usize,
}

/// The memory of a chunk of tokens: an index of its slots by key, and a row for each slot and block
/// of heads.
#[derive(Clone, Copy)]
struct Chunk {
    tokens: usize,
    head_blocks: usize,
    /// `[num_keys + 1]` i32, padded to whole rows of [`COUNTS_PER_ROW`].
    counts: usize,
    /// `[num_keys]` i32.
    ends: usize,
    /// `[tokens, topk]` i32.
    entries: usize,
    /// `[tokens, topk]` i32.
    ordered: usize,
    /// `[head_blocks, tokens, topk, head_dim]` f32.
    dk_rows: usize,
    /// `[head_blocks, tokens, topk, v_dim]` f32, for a separate V.
    dv_rows: usize,
}

impl Chunk {
    /// Rows of counts that are cleared.
    fn count_rows(num_keys: usize) -> usize {
        (num_keys + 1).div_ceil(COUNTS_PER_ROW)
    }

    fn of(extents: Extents, chunk_tokens: usize, parts: &mut Parts) -> Self {
        let Extents { num_tokens, num_heads, head_dim, v_dim, num_keys, topk, separate } = extents;
        // The index counts at most 2^31 - 1 slots.
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
    /// Bytes of the rows of one token.
    fn row_bytes(self) -> usize {
        let width = self.head_dim + if self.separate { self.v_dim } else { 0 };
        self.num_heads
            .div_ceil(self.heads_per_block())
            .saturating_mul(self.topk)
            .saturating_mul(width * 4)
    }
}

impl Workspace {
    fn of(
        extents: Extents,
        dk_type: DType,
        sink: bool,
        key_gradients: KeyGradients,
    ) -> Result<Self> {
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
            KeyGradients::Deterministic { chunk_tokens } => {
                Some(Chunk::of(extents, chunk_tokens, &mut parts))
            }
        };
        Ok(Self { delta, sink_terms, dk, dv, chunk, bytes: parts.bytes })
    }
}

/// Bytes of scratch memory that [`backward`] needs where `dk` is of type `dk`, from what the
/// forward reads. `delta` and, with a sink, its terms have 4 bytes for each `(token, head)`. Where
/// `dk` is bf16, the fp32 rows of `dk` (and of a separate `dv`) are added. With
/// [`KeyGradients::Deterministic`], each slot of a chunk of tokens and each block of 64 heads also
/// has an fp32 row of `dk` (and of a separate `dv`), and there is an index of those slots.
///
/// # Errors
/// Tensors and options that the launcher rejects, and a chunk of 0 tokens.
pub fn workspace_bytes(views: &Views, options: Options, dk: DType) -> Result<usize> {
    let (_, extents) = check(views, options, Purpose::Sizes)?;
    Ok(Workspace::of(extents, dk, views.get("sink").is_some(), options.key_gradients)?.bytes)
}

/// The number of tokens whose rows fit in 1 GiB, at least one: the recommended value for
/// [`KeyGradients::Deterministic`].
///
/// # Errors
/// Tensors and options that the launcher rejects.
pub fn default_chunk_tokens(views: &Views, options: Options) -> Result<usize> {
    let (_, extents) = check(views, options, Purpose::Sizes)?;
    Ok((DEFAULT_ROW_BYTES / extents.row_bytes().max(1)).clamp(1, extents.num_tokens.max(1)))
}

/// Launches the backward. Returns the kernels that ran. It reads the inputs of [`forward`], and:
///
/// - `out` and `lse` of the forward, unchanged; an infinite `lse` of either sign is a row without
///   a valid slot;
/// - `dout` `[num_tokens, num_heads, v_dim]` bf16: gradient of `out`;
/// - `dlse` `[num_tokens, num_heads]` f32: gradient of `lse`; absent where it is zero;
/// - `dq` `[num_tokens, num_heads, head_dim]` bf16;
/// - `dk` `[num_keys, head_dim]`, bf16 or f32; without a `v` it holds the values' gradient too;
/// - `dv` `[num_keys, v_dim]`, the type of `dk`, with `v`;
/// - `dsink` `[num_heads]` f32, with `sink`;
/// - `workspace`: at least [`workspace_bytes`] bytes, 16-byte aligned.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn backward(device: &Device, views: &Views, options: Options) -> Result<Vec<String>> {
    let (signature, extents) = check(views, options, Purpose::Backward)?;
    let workspace = Workspace::of(
        extents,
        views["dk"].dtype,
        views.get("sink").is_some(),
        options.key_gradients,
    )?;
    CHECK.holds("workspace", &views["workspace"], workspace.bytes)?;
    let hopper = extents.hopper(device, options.implementation, &HOPPER_BACKWARD_HEAD_DIMS)?;
    let call = BackwardCall {
        device,
        views,
        signature,
        softmax_scale: options.softmax_scale,
        extents,
        workspace,
        hopper,
    };
    let mut paths = vec![call.delta()?];
    paths.extend(call.dsink()?);
    paths.extend(call.gradients()?);
    Ok(paths)
}

/// Adds the rows of entries to the rows of their keys. `index` is that of the entries by key: counts,
/// ends and ordered entries. `entries` are the entries and the blocks of heads of each.
fn sum_rows(
    kernel: impl Fn(&str) -> Result<Kernel>,
    rows: &TensorView,
    [counts, ends, ordered]: [DeviceAddress; 3],
    [entries, head_blocks]: [usize; 2],
    target: &TensorView,
) -> Result<String> {
    let (num_keys, width) = (target.shape[0], target.shape[1]);
    let name = "sparse_attention_sum";
    let params = CHECK.params().ptr("rows", rows).ptr("counts", counts).ptr("ends", ends);
    let params = params.ptr("ordered", ordered).rows("target", target);
    let params = params.i64("num_entries", entries)?.i32("head_blocks", head_blocks)?;
    let params = params.i32("num_keys", num_keys)?.i32("width", width)?;
    let blocks = (num_keys * width.div_ceil(SUM_COLUMNS)).div_ceil(ROWS_PER_BLOCK);
    kernel(name)?.launch_blocks("q", blocks, &params)?;
    Ok(name.into())
}

/// Adds fp32 rows to rows of a tensor, by a list, in the order of the list.
pub(crate) struct RowSums {
    /// Scratch memory of [`Self::words`] words, 16-byte aligned.
    pub address: u64,
    /// The values' width of the module whose kernels add.
    pub v_dim: usize,
}

impl RowSums {
    /// Offsets of the parts of the scratch memory (counts, ends, entries, ordered), and its bytes.
    fn parts(count: usize, num_keys: usize) -> ([usize; 4], usize) {
        let mut parts = Parts::default();
        let counts = parts.words(&[Chunk::count_rows(num_keys), COUNTS_PER_ROW]);
        let offsets =
            [counts, parts.words(&[num_keys]), parts.words(&[count]), parts.words(&[count])];
        (offsets, parts.bytes)
    }

    /// Words of scratch memory for `count` rows that are added to some of `num_keys`.
    pub fn words(count: usize, num_keys: usize) -> usize {
        Self::parts(count, num_keys).1 / 4
    }

    /// Adds row `i` of `rows` `[count, width]` to row `keys[i]` of `target` `[num_keys, width]`.
    /// `keys` is `[count, 1]`. Returns the kernels that ran.
    pub fn add(
        &self,
        device: &Device,
        rows: &TensorView,
        keys: &TensorView,
        target: &TensorView,
    ) -> Result<Vec<String>> {
        let (count, num_keys) = (rows.shape[0], target.shape[0]);
        let ([counts, ends, entries, ordered], _) = Self::parts(count, num_keys);
        let at = |part: usize| DeviceAddress(self.address + part as u64);
        device.backend().fill(at(counts).0, 0, ends - counts)?;
        let kernel = |name: &str| device.kernel(SUMS_FILE, &sums_defines(self.v_dim), name);
        let index = KeyIndex {
            counts: at(counts),
            ends: at(ends),
            entries: at(entries),
            ordered: at(ordered),
        };
        let ran = index.launch(CHECK, kernel, [Some(keys), None], [count, 1, num_keys])?;
        let index = [counts, ends, ordered].map(at);
        let sum = sum_rows(kernel, rows, index, [count, 1], target)?;
        Ok(ran.iter().map(|&name| name.to_owned()).chain([sum]).collect())
    }
}

/// Rounds fp32 rows `[rows, width]` to bf16 ones, by a kernel of the module for values of `v_dim`.
pub(crate) fn round_rows(
    device: &Device,
    v_dim: usize,
    source: &TensorView,
    target: &TensorView,
) -> Result<()> {
    let (rows, width) = (target.shape[0], target.shape[1]);
    let params = CHECK.params().rows("source", source).rows("target", target);
    let params = params.i64("num_rows", rows)?.i32("width", width)?;
    let kernel = device.kernel(SUMS_FILE, &sums_defines(v_dim), "sparse_attention_cast")?;
    kernel.launch_blocks("q", rows.div_ceil(ROWS_PER_BLOCK), &params)
}

/// One checked call of the backward.
struct BackwardCall<'a> {
    device: &'a Device,
    views: &'a Views,
    signature: Signature<'a>,
    softmax_scale: f32,
    extents: Extents,
    workspace: Workspace,
    /// Whether the gradients of q and k come from the Hopper kernel.
    hopper: bool,
}

impl BackwardCall<'_> {
    /// A dense part of the scratch memory.
    fn scratch(&self, offset: usize, shape: &[usize]) -> TensorView {
        TensorView::dense("workspace", self.address(offset).0, DType::F32, shape)
    }

    fn address(&self, offset: usize) -> DeviceAddress {
        DeviceAddress(self.views["workspace"].address + offset as u64)
    }

    fn sink_terms(&self) -> DeviceAddress {
        self.views.get("sink").map(|_| self.address(self.workspace.sink_terms)).unwrap_or_default()
    }

    /// The entries of a tensor for the tokens from `first` on.
    fn tokens_from(&self, first: usize, name: &str) -> Option<TensorView> {
        self.views.get(name).map(|view| view.skip(first))
    }

    /// A kernel of the sums.
    fn kernel(&self, name: &str) -> Result<Kernel> {
        self.device.kernel(SUMS_FILE, &sums_defines(self.extents.v_dim), name)
    }

    fn delta(&self) -> Result<String> {
        let Extents { num_tokens, num_heads, .. } = self.extents;
        let name = "sparse_attention_delta";
        let params = self.signature.params(&["out", "dout", "lse", "sink"]);
        let params = params
            .ptr("delta", self.address(self.workspace.delta))
            .ptr("sink_terms", self.sink_terms());
        let params = params.i32("num_tokens", num_tokens)?.i32("num_heads", num_heads)?;
        self.kernel(name)?.launch_blocks(
            "q",
            (num_tokens * num_heads).div_ceil(ROWS_PER_BLOCK),
            &params,
        )?;
        Ok(name.into())
    }

    fn dsink(&self) -> Result<Option<String>> {
        if self.views.get("dsink").is_none() {
            return Ok(None);
        }
        let Extents { num_tokens, num_heads, .. } = self.extents;
        let name = "sparse_attention_dsink";
        let params = CHECK.params().ptr("sink_terms", self.sink_terms());
        let params = self.signature.append(params, &["dsink"]);
        let params = params.i32("num_tokens", num_tokens)?.i32("num_heads", num_heads)?;
        self.kernel(name)?.launch_blocks("sink", num_heads.div_ceil(32), &params)?;
        Ok(Some(name.into()))
    }

    /// Zero-fills the accumulators, adds the gradients, and rounds those that are stored in bf16.
    fn gradients(&self) -> Result<Vec<String>> {
        let (dk, dv) = (&self.views["dk"], self.views.get("dv"));
        let dk_rows = self.accumulator(dk, self.workspace.dk);
        let dv_rows = dv.map(|dv| self.accumulator(dv, self.workspace.dv));
        for rows in [Some(&dk_rows), dv_rows.as_ref()].into_iter().flatten() {
            self.zero(rows)?;
        }
        let mut paths = vec!["sparse_attention_zero".into()];
        match self.workspace.chunk {
            None => {
                paths.push(self.backward(0, self.extents.num_tokens, &dk_rows, dv_rows.as_ref())?)
            }
            Some(chunk) => paths.extend(self.chunks(chunk, &dk_rows, dv_rows.as_ref())?),
        }
        if dk.dtype == DType::Bf16 {
            let v_dim = self.extents.v_dim;
            round_rows(self.device, v_dim, &dk_rows, dk)?;
            if let (Some(rows), Some(dv)) = (&dv_rows, dv) {
                round_rows(self.device, v_dim, rows, dv)?;
            }
            paths.push("sparse_attention_cast".into());
        }
        Ok(paths)
    }

    /// Processes one chunk of tokens after the other: its index, its rows, their sums. Returns the
    /// kernels of one chunk.
    fn chunks(
        &self,
        chunk: Chunk,
        dk: &TensorView,
        dv: Option<&TensorView>,
    ) -> Result<Vec<String>> {
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
        let Extents { num_keys, topk, .. } = self.extents;
        self.zero(&self.scratch(chunk.counts, &[Chunk::count_rows(num_keys), COUNTS_PER_ROW]))?;
        let of_chunk = |name| self.tokens_from(first, name);
        let index = KeyIndex {
            counts: self.address(chunk.counts),
            ends: self.address(chunk.ends),
            entries: self.address(chunk.entries),
            ordered: self.address(chunk.ordered),
        };
        let (indices, topk_length) = (of_chunk("indices"), of_chunk("topk_length"));
        let lists = [indices.as_ref(), topk_length.as_ref()];
        let ran = index.launch(CHECK, |name| self.kernel(name), lists, [tokens, topk, num_keys])?;
        Ok(ran.map(Into::into).into())
    }

    /// Adds the rows of a chunk of `tokens` tokens to the rows of their keys.
    fn sum(
        &self,
        chunk: Chunk,
        tokens: usize,
        rows: &TensorView,
        target: &TensorView,
    ) -> Result<String> {
        let index = [chunk.counts, chunk.ends, chunk.ordered].map(|part| self.address(part));
        let entries = [tokens * self.extents.topk, chunk.head_blocks];
        sum_rows(|name| self.kernel(name), rows, index, entries, target)
    }

    /// The gradient itself where it is f32, otherwise dense scratch rows.
    fn accumulator(&self, gradient: &TensorView, offset: usize) -> TensorView {
        match gradient.dtype {
            DType::F32 => gradient.clone(),
            _ => self.scratch(offset, &gradient.shape),
        }
    }

    fn zero(&self, target: &TensorView) -> Result<()> {
        let params = CHECK.params().rows("target", target).i64("num_rows", target.shape[0])?;
        let params = params.i32("width", target.shape[1])?;
        self.kernel("sparse_attention_zero")?.launch_blocks(
            "q",
            target.shape[0].div_ceil(ROWS_PER_BLOCK),
            &params,
        )
    }

    /// dq of `tokens` tokens from `first` on, and the contributions of their slots to `dk` and
    /// `dv`.
    fn backward(
        &self,
        first: usize,
        tokens: usize,
        dk: &TensorView,
        dv: Option<&TensorView>,
    ) -> Result<String> {
        let chunk = Extents { num_tokens: tokens, ..self.extents };
        let call = &self.signature;
        let delta = self.scratch(self.workspace.delta, &[self.extents.num_tokens, chunk.num_heads]);
        let of_chunk = |params, names: &[&'static str]| call.append_from(params, first, names);
        let params = call.append(of_chunk(CHECK.params(), &["q"]), &["k", "v"]);
        let params = call.append(of_chunk(params, &["dout"]), &["sink"]);
        let params = of_chunk(params, &["lse"]).ptr("delta", &delta.skip(first));
        let params = of_chunk(params, &["dlse", "indices", "topk_length", "dq"]);
        let params = params.rows("dk", dk).rows("dv", dv);
        let params = chunk.params(params)?.f32("softmax_scale", self.softmax_scale);
        let deterministic = self.workspace.chunk.is_some();
        if self.hopper {
            let name = "sparse_attention_hopper_backward";
            let defines = defines(chunk.head_dim, chunk.v_dim, HOPPER_HEADS, false, deterministic);
            let kernel = self.device.kernel(HOPPER_BACKWARD_FILE, &defines, name)?;
            kernel.launch(chunk.launch(HOPPER_HEADS, &kernel)?, &params)?;
            return Ok(if deterministic { format!("{name}<deterministic>") } else { name.into() });
        }
        let name = "sparse_attention_backward";
        let kernel =
            self.device.kernel(BACKWARD_FILE, &self.extents.defines(deterministic), name)?;
        kernel.launch(chunk.launch(chunk.heads_per_block(), &kernel)?, &params)?;
        let summed = if deterministic { ",deterministic" } else { "" };
        Ok(format!("{name}<{}{summed}>", chunk.heads_per_block()))
    }
}
