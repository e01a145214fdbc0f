//! `decode_attention`: launcher of `kernels/cuda/decode_attention.cu` (inference 8 to 8.4).

use crate::arguments::{Arguments, address};
pub use crate::implementation::Implementation;
use crate::kernel_params;
use crate::kv_cache::{Cache, RowFormat};
use crate::rms_norm::owned;
use crate::runtime::params::DeviceAddress;
use crate::runtime::{DType, Device, LaunchConfig, Result, TensorView};

const FILE: &str = "decode_attention.cu";
const HOPPER_FILE: &str = "decode_attention_hopper.cu";
/// Heads of one block of the Hopper kernel: the rows of a warpgroup's product.
const HOPPER_HEADS: usize = 64;
/// Rows that the Hopper kernel takes.
const HOPPER_FORMATS: [RowFormat; 2] = [RowFormat::MODEL, RowFormat::bf16(512)];
const CHECK: Arguments = Arguments { operator: "decode_attention" };
/// Slots of a tile, the least that is given to a block; `KEYS` in the kernel source.
pub const TILE_SLOTS: usize = 64;
/// Heads of a block of the merge, one a warp.
const COMBINE_HEADS: usize = 8;
/// Largest head that the output's accumulators hold.
const LARGEST_HEAD_DIM: usize = 512;

kernel_params! {
    /// Mirror of `DecodeAttentionParams`.
    struct DecodeAttentionParams {
        q: DeviceAddress,
        window_pages: DeviceAddress,
        compressed_pages: DeviceAddress,
        window_indices: DeviceAddress,
        compressed_indices: DeviceAddress,
        window_length: DeviceAddress,
        compressed_length: DeviceAddress,
        sink: DeviceAddress,
        out: DeviceAddress,
        lse: DeviceAddress,
        partial_out: DeviceAddress,
        partial_lse: DeviceAddress,
        spans: DeviceAddress,
        q_token_stride: i64,
        q_head_stride: i64,
        out_token_stride: i64,
        out_head_stride: i64,
        window_page_stride: i64,
        compressed_page_stride: i64,
        window_indices_stride: i64,
        compressed_indices_stride: i64,
        batch: i32,
        s_q: i32,
        num_heads: i32,
        window_page_size: i32,
        window_num_slots: i32,
        window_topk: i32,
        compressed_page_size: i32,
        compressed_num_slots: i32,
        compressed_topk: i32,
        softmax_scale: f32,
    }
}

/// One store of rows and the lists that point into it.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    /// The rows.
    pub cache: Cache<'a>,
    /// `[batch, s_q, topk]` i32: slots of the cache, `page * page_size + row`. Slot `j` of a list is valid when
    /// `j < length` and its index is in `[0, num_slots)`; others contribute nothing and are never dereferenced.
    pub indices: &'a TensorView,
    /// `[batch]` i32, clamped to `[0, topk]`: the request's, for all its tokens; `None` is `topk` everywhere.
    pub length: Option<&'a TensorView>,
}

/// What the attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[batch, s_q, num_heads, head_dim]` bf16; the tokens of all requests are evenly spaced.
    pub q: &'a TensorView,
    /// How the rows of both stores are stored; `head_dim` is a multiple of 16 up to 512.
    pub format: RowFormat,
    /// The raw rows of the window.
    pub window: Store<'a>,
    /// The compressed entries; `None` where the layer has none.
    pub compressed: Option<Store<'a>>,
    /// `[num_heads]` f32: a logit, not scaled; `None` is no sink.
    pub sink: Option<&'a TensorView>,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
}

/// Arguments of [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Forward<'a> {
    /// What it reads.
    pub inputs: Inputs<'a>,
    /// Blocks that the work is spread over, at least 1: [`natural_blocks`] of the device. The result depends on it
    /// within rounding, and on nothing else of the launch.
    pub num_blocks: usize,
    /// Which implementation runs. The Hopper kernel takes heads of 512 channels: the model's rows, or bf16 ones.
    pub implementation: Implementation,
    /// `[batch, s_q, num_heads, head_dim]` bf16; 0 for a token without a valid slot.
    pub out: &'a TensorView,
    /// `[batch, s_q, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a token.
    pub lse: &'a TensorView,
    /// Scratch memory of at least [`workspace_bytes`] bytes, 16-byte aligned.
    pub workspace: &'a TensorView,
}

/// As many blocks as the device has multiprocessors: one block fills one.
pub fn natural_blocks(device: &Device) -> usize {
    (device.environment().processors as usize).max(1)
}

/// The implementation that runs on a device: what is asked for, or for [`Implementation::Auto`] the Hopper kernel where
/// there is one, beyond 16 heads.
///
/// # Errors
/// The Hopper kernel is asked for and cannot run.
pub fn resolve(
    device: &Device,
    format: RowFormat,
    num_heads: usize,
    implementation: Implementation,
) -> Result<Implementation> {
    let fits = HOPPER_FORMATS.contains(&format);
    let misfit = (!fits).then(|| format!("{format:?}: the Hopper kernel takes {HOPPER_FORMATS:?}"));
    let hopper = implementation.runs_hopper(CHECK, device.environment(), num_heads, misfit)?;
    Ok(if hopper { Implementation::Hopper } else { Implementation::Portable })
}

/// How a call is spread over the device. A unit is a token with up to `heads_per_block` of its heads; the tiles of all
/// units, one behind the other, are dealt to the blocks in equal stretches (the kernel's header).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Heads of a unit.
    pub heads_per_block: usize,
    /// Blocks that are launched.
    pub num_blocks: usize,
}

/// How a call of `batch * s_q` tokens whose lists have `topk` slots in each store is spread when it is offered
/// `num_blocks` blocks; [`Implementation::Auto`] must have been resolved, and counts as portable.
pub fn spread(
    [batch, s_q, num_heads]: [usize; 3],
    topk: &[usize],
    num_blocks: usize,
    implementation: Implementation,
) -> Spread {
    let tiles = topk.iter().map(|slots| slots.div_ceil(TILE_SLOTS)).sum::<usize>().max(1);
    // A block of 64 heads reads each row once for all of them. With 16 a tile is done sooner, and where there are
    // multiprocessors for all tiles at once that is what counts.
    let small_blocks = batch * s_q * num_heads.div_ceil(16) * tiles;
    let small = implementation != Implementation::Hopper && (num_heads <= 16 || small_blocks <= num_blocks);
    let heads_per_block = if small { 16 } else { HOPPER_HEADS };
    // Blocks beyond the number of tiles would find nothing to do.
    let all_tiles = batch * s_q * num_heads.div_ceil(heads_per_block) * tiles;
    Spread { heads_per_block, num_blocks: num_blocks.min(all_tiles) }
}

/// Tiles of a block's stretch where `total` tiles are dealt to `num_blocks` blocks. `unit` is a unit's number of tiles
/// where all have the same, as without lengths: whole units that are at most a sixteenth longer than an even share leave
/// no parts to merge.
pub fn stretch(total: usize, unit: Option<usize>, num_blocks: usize) -> usize {
    let even = total.div_ceil(num_blocks.max(1));
    let whole = unit.map(|tiles| even.next_multiple_of(tiles.max(1)));
    whole.filter(|whole| whole - even <= even / 16).unwrap_or(even)
}

/// The extents of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    batch: usize,
    s_q: usize,
    num_heads: usize,
    format: RowFormat,
    spread: Spread,
}

impl Extents {
    fn defines(self) -> Vec<(&'static str, String)> {
        defines(self.format, self.spread.heads_per_block)
    }
}

fn defines(format: RowFormat, heads_per_block: usize) -> Vec<(&'static str, String)> {
    let mut defines = format.defines();
    defines.push(("HEADS_PER_BLOCK", heads_per_block.to_string()));
    defines
}

/// Modules of the model's format, of bf16 rows, and of small ones.
pub fn modules() -> Vec<(String, Vec<(String, String)>)> {
    let formats = [
        RowFormat::MODEL,
        RowFormat::bf16(512),
        RowFormat { nope_dim: 64, rope_dim: 64 },
        RowFormat { nope_dim: 128, rope_dim: 48 },
        RowFormat::bf16(64),
    ];
    let all = formats.into_iter().flat_map(|format| [16, 64].map(|heads| defines(format, heads)));
    let hopper = HOPPER_FORMATS.map(|format| (HOPPER_FILE.to_owned(), owned(defines(format, HOPPER_HEADS))));
    all.map(|defines| (FILE.to_owned(), owned(defines))).chain(hopper).collect()
}

/// The tensors of a call have a token's rows at one stride: `[batch, s_q, ...]` may be seen as `[batch * s_q, ...]`.
fn check_tokens(argument: &'static str, view: &TensorView) -> Result<()> {
    let (batch, s_q) = (view.shape[0], view.shape[1]);
    if batch <= 1 || s_q == 0 || view.strides[0] == s_q as i64 * view.strides[1] {
        return Ok(());
    }
    let reason = format!("strides {:?} of shape {:?}: tokens must be evenly spaced", view.strides, view.shape);
    CHECK.refuse(argument, reason)
}

/// Elements from one token to the next.
fn token_stride(view: &TensorView) -> i64 {
    if view.shape[1] > 1 { view.strides[1] } else { view.strides[0] }
}

fn check_heads(argument: &'static str, view: &TensorView) -> Result<()> {
    CHECK.dtype(argument, view, &[DType::Bf16])?;
    CHECK.rows(argument, view)?;
    CHECK.aligned(argument, view)?;
    check_tokens(argument, view)
}

/// Checks a store and returns the width of its lists.
fn check_store(
    names: [&'static str; 3],
    store: &Store<'_>,
    format: RowFormat,
    [batch, s_q]: [usize; 2],
) -> Result<usize> {
    let [cache, indices, length] = names;
    store.cache.check(CHECK, cache, format)?;
    let [_, _, topk] = CHECK.extents(indices, store.indices)?;
    CHECK.shape(indices, store.indices, &[batch, s_q, topk])?;
    CHECK.dtype(indices, store.indices, &[DType::I32])?;
    CHECK.rows(indices, store.indices)?;
    check_tokens(indices, store.indices)?;
    CHECK.int32(indices, topk)?;
    if let Some(view) = store.length {
        CHECK.dense_tensor(length, view, &[batch], &[DType::I32])?;
    }
    Ok(topk)
}

const WINDOW: [&str; 3] = ["window", "window_indices", "window_length"];
const COMPRESSED: [&str; 3] = ["compressed", "compressed_indices", "compressed_length"];

fn check_inputs(inputs: &Inputs<'_>, num_blocks: usize, implementation: Implementation) -> Result<Extents> {
    let Inputs { q, format, window, compressed, sink, softmax_scale } = *inputs;
    format.check(CHECK)?;
    let [batch, s_q, num_heads, head_dim] = CHECK.extents("q", q)?;
    if !head_dim.is_multiple_of(16) || head_dim > LARGEST_HEAD_DIM {
        return CHECK.refuse("q", format!("head_dim {head_dim} must be a multiple of 16 up to {LARGEST_HEAD_DIM}"));
    }
    if head_dim != format.head_dim() {
        return CHECK.refuse("q", format!("head_dim {head_dim} must be the format's {}", format.head_dim()));
    }
    check_heads("q", q)?;
    let mut topk = vec![check_store(WINDOW, &window, format, [batch, s_q])?];
    if let Some(store) = &compressed {
        topk.push(check_store(COMPRESSED, store, format, [batch, s_q])?);
    }
    if let Some(sink) = sink {
        CHECK.dense_tensor("sink", sink, &[num_heads], &[DType::F32])?;
    }
    CHECK.positive("softmax_scale", softmax_scale)?;
    if num_blocks == 0 {
        return CHECK.refuse("num_blocks", "0: there must be a block");
    }
    // The kernel counts tiles, and those of all blocks together, in 32 bits.
    let tiles = topk.iter().map(|slots| slots / TILE_SLOTS + 1).sum::<usize>();
    let all_tiles = batch.saturating_mul(s_q).saturating_mul(num_heads).saturating_mul(tiles);
    CHECK.int32("q", all_tiles.saturating_add(num_blocks))?;
    let spread = spread([batch, s_q, num_heads], &topk, num_blocks, implementation);
    Ok(Extents { batch, s_q, num_heads, format, spread })
}

/// Parts of the scratch memory, as byte offsets; each part starts at a multiple of 16.
struct Workspace {
    partial_out: usize,
    partial_lse: usize,
    spans: usize,
    bytes: usize,
}

impl Workspace {
    fn of(extents: Extents) -> Self {
        let mut end = 0;
        let mut part = |words: usize| {
            let start = end;
            end += (words * 4).next_multiple_of(16);
            start
        };
        // A block leaves two parts at most.
        let rows = 2 * extents.spread.num_blocks * extents.spread.heads_per_block;
        let partial_out = part(rows * extents.format.head_dim());
        let partial_lse = part(rows);
        let spans = part(2 * extents.spread.num_blocks);
        Self { partial_out, partial_lse, spans, bytes: end }
    }
}

/// Bytes of scratch memory that [`forward`] needs for `num_blocks` blocks: for each block two parts of a block of
/// heads, in f32, their log-sum-exp, and which unit it leaves unfinished.
///
/// # Errors
/// Inputs that the launcher refuses.
pub fn workspace_bytes(inputs: &Inputs<'_>, num_blocks: usize, implementation: Implementation) -> Result<usize> {
    let of = |implementation| Ok(Workspace::of(check_inputs(inputs, num_blocks, implementation)?).bytes);
    match implementation {
        // Which one runs is the device's to say: enough for either.
        Implementation::Auto if HOPPER_FORMATS.contains(&inputs.format) => {
            Ok(of(Implementation::Portable)?.max(of(Implementation::Hopper)?))
        }
        resolved => of(resolved),
    }
}

/// Launches the attention and, where work was split, the merge; returns the kernels that ran.
///
/// # Errors
/// A refused argument, a compile error, a refused launch.
pub fn forward(device: &Device, arguments: &Forward<'_>) -> Result<Vec<String>> {
    let Inputs { format, q, .. } = arguments.inputs;
    let num_heads = q.shape.get(2).copied().unwrap_or_default();
    let implementation = resolve(device, format, num_heads, arguments.implementation)?;
    let extents = check_inputs(&arguments.inputs, arguments.num_blocks, implementation)?;
    let parts = check_outputs(arguments, extents)?;
    let blocks = extents.spread.num_blocks;
    let params = params_of(arguments, extents, &parts);
    let hopper = implementation == Implementation::Hopper;
    let (file, name) = if hopper { (HOPPER_FILE, "decode_attention_hopper") } else { (FILE, "decode_attention") };
    let kernel = device.kernel::<DecodeAttentionParams>(file, &extents.defines(), name)?;
    let config = LaunchConfig::linear(CHECK.operator, "num_blocks", blocks as u64, kernel.max_threads())?;
    kernel.launch(config, &params)?;
    let heads = extents.spread.heads_per_block;
    let mut paths = vec![if hopper { name.to_owned() } else { format!("{name}<{heads}>") }];
    if blocks > 1 {
        let name = "decode_attention_combine";
        let kernel = device.kernel::<DecodeAttentionParams>(FILE, &extents.defines(), name)?;
        let blocks = (blocks * extents.spread.heads_per_block / COMBINE_HEADS) as u64;
        kernel.launch(LaunchConfig::linear(CHECK.operator, "num_blocks", blocks, kernel.max_threads())?, &params)?;
        paths.push(name.into());
    }
    Ok(paths)
}

fn check_outputs(arguments: &Forward<'_>, extents: Extents) -> Result<Workspace> {
    let Forward { inputs, out, lse, workspace, .. } = *arguments;
    let Extents { batch, s_q, num_heads, format, .. } = extents;
    CHECK.shape("out", out, &[batch, s_q, num_heads, format.head_dim()])?;
    check_heads("out", out)?;
    CHECK.dense_tensor("lse", lse, &[batch, s_q, num_heads], &[DType::F32])?;
    let parts = Workspace::of(extents);
    let bytes = workspace.elements() * workspace.dtype.size();
    if bytes < parts.bytes || !workspace.address.is_multiple_of(16) {
        let reason =
            format!("{bytes} bytes at {:#x}; it must have {}, 16-byte aligned", workspace.address, parts.bytes);
        return CHECK.refuse("workspace", reason);
    }
    let of_store =
        |store: Store<'_>| [Some(store.cache.pages.clone()), Some(store.indices.clone()), store.length.cloned()];
    let stores = [Some(inputs.window), inputs.compressed].into_iter().flatten().flat_map(of_store);
    let read: Vec<TensorView> = stores.chain([Some(inputs.q.clone()), inputs.sink.cloned()]).flatten().collect();
    let written = [("out", out), ("lse", lse), ("workspace", workspace)];
    for (number, &(argument, view)) in written.iter().enumerate() {
        for other in read.iter().chain(written[..number].iter().map(|&(_, other)| other)) {
            CHECK.apart(argument, view, other)?;
        }
    }
    Ok(parts)
}

/// A store's share of the parameters; nothing where it is absent.
struct StoreParams {
    pages: DeviceAddress,
    indices: DeviceAddress,
    length: DeviceAddress,
    page_stride: i64,
    indices_stride: i64,
    page_size: i32,
    num_slots: i32,
    topk: i32,
}

impl StoreParams {
    fn of(store: Option<&Store<'_>>) -> Self {
        let Some(Store { cache, indices, length }) = store else {
            let none = DeviceAddress(0);
            // The kernel divides by the size of a page, if only to find that it holds no row.
            let (pages, indices, length) = (none, none, none);
            return Self {
                pages,
                indices,
                length,
                page_stride: 0,
                indices_stride: 0,
                page_size: 1,
                num_slots: 0,
                topk: 0,
            };
        };
        Self {
            pages: DeviceAddress(cache.pages.address),
            indices: DeviceAddress(indices.address),
            length: address(*length),
            page_stride: cache.page_stride(),
            indices_stride: token_stride(indices),
            page_size: cache.page_size as i32,
            num_slots: cache.num_slots() as i32,
            topk: indices.shape[2] as i32,
        }
    }
}

fn params_of(arguments: &Forward<'_>, extents: Extents, parts: &Workspace) -> DecodeAttentionParams {
    let Forward { inputs, out, lse, workspace, .. } = *arguments;
    let window = StoreParams::of(Some(&inputs.window));
    let compressed = StoreParams::of(inputs.compressed.as_ref());
    let scratch = |offset: usize| DeviceAddress(workspace.address + offset as u64);
    DecodeAttentionParams {
        q: DeviceAddress(inputs.q.address),
        window_pages: window.pages,
        compressed_pages: compressed.pages,
        window_indices: window.indices,
        compressed_indices: compressed.indices,
        window_length: window.length,
        compressed_length: compressed.length,
        sink: address(inputs.sink),
        out: DeviceAddress(out.address),
        lse: DeviceAddress(lse.address),
        partial_out: scratch(parts.partial_out),
        partial_lse: scratch(parts.partial_lse),
        spans: scratch(parts.spans),
        q_token_stride: token_stride(inputs.q),
        q_head_stride: inputs.q.strides[2],
        out_token_stride: token_stride(out),
        out_head_stride: out.strides[2],
        window_page_stride: window.page_stride,
        compressed_page_stride: compressed.page_stride,
        window_indices_stride: window.indices_stride,
        compressed_indices_stride: compressed.indices_stride,
        batch: extents.batch as i32,
        s_q: extents.s_q as i32,
        num_heads: extents.num_heads as i32,
        window_page_size: window.page_size,
        window_num_slots: window.num_slots,
        window_topk: window.topk,
        compressed_page_size: compressed.page_size,
        compressed_num_slots: compressed.num_slots,
        compressed_topk: compressed.topk,
        softmax_scale: inputs.softmax_scale,
    }
}
