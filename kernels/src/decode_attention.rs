//! `decode_attention`: launcher of `kernels/cuda/decode_attention.cu` (inference 8 to 8.4).

use crate::arguments::{Argument, Arguments, Parts, read_at, scratch_at, write_at};
pub use crate::implementation::Implementation;
use crate::kv_cache::{Cache, RowFormat};
use crate::runtime::device::{Module, module};
use crate::runtime::params::{DeviceAddress, Params};
use crate::runtime::{DType, Device, Result, TensorView};

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
pub fn modules() -> Vec<Module> {
    let formats = [
        RowFormat::MODEL,
        RowFormat::bf16(512),
        RowFormat { nope_dim: 64, rope_dim: 64 },
        RowFormat { nope_dim: 128, rope_dim: 48 },
        RowFormat::bf16(64),
    ];
    let all = formats.into_iter().flat_map(|format| [16, 64].map(|heads| defines(format, heads)));
    let hopper = HOPPER_FORMATS.map(|format| module(HOPPER_FILE, &defines(format, HOPPER_HEADS)));
    all.map(|defines| module(FILE, &defines)).chain(hopper).collect()
}

/// What a store's tensors are called.
struct StoreNames {
    argument: &'static str,
    indices: &'static str,
    length: &'static str,
    /// Axes of the pages and of the lists.
    pages_axes: [&'static str; 2],
    indices_axes: [&'static str; 3],
    /// Fields of the parameters.
    pages: &'static str,
    page_size: &'static str,
    num_slots: &'static str,
    topk: &'static str,
}

static WINDOW: StoreNames = StoreNames {
    argument: "window",
    indices: "window_indices",
    length: "window_length",
    pages_axes: ["window_num_pages", "window_page_bytes"],
    indices_axes: ["batch", "s_q", "window_topk"],
    pages: "window_pages",
    page_size: "window_page_size",
    num_slots: "window_num_slots",
    topk: "window_topk",
};
static COMPRESSED: StoreNames = StoreNames {
    argument: "compressed",
    indices: "compressed_indices",
    length: "compressed_length",
    pages_axes: ["compressed_num_pages", "compressed_page_bytes"],
    indices_axes: ["batch", "s_q", "compressed_topk"],
    pages: "compressed_pages",
    page_size: "compressed_page_size",
    num_slots: "compressed_num_slots",
    topk: "compressed_topk",
};

impl StoreNames {
    fn tensors<'a>(&'static self, store: Option<Store<'a>>) -> [Argument<'a>; 3] {
        let (pages, indices) = (store.map(|store| store.cache.pages), store.map(|store| store.indices));
        [
            Cache::argument(read_at(self.argument, pages), &self.pages_axes),
            read_at(self.indices, indices).of(&[DType::I32]).axes(&self.indices_axes).rows(),
            read_at(self.length, store.and_then(|store| store.length)).of(&[DType::I32]).axes(&["batch"]),
        ]
    }

    /// Where the rows and the lists are.
    fn places(&self, params: Params, store: Option<Store<'_>>) -> Result<Params> {
        let indices = store.map(|store| CHECK.tokens(self.indices, store.indices)).transpose()?;
        let params = params.rows(self.pages, store.map(|store| store.cache.pages)).rows(self.indices, indices.as_ref());
        Ok(params.ptr(self.length, store.and_then(|store| store.length)))
    }

    fn sizes(&self, params: Params, store: Option<Store<'_>>) -> Result<Params> {
        // The kernel divides by the size of a page, if only to find that it holds no row.
        let of_store = |store: Store<'_>| (store.cache.page_size, store.cache.num_slots(), store.indices.shape[2]);
        let (page_size, num_slots, topk) = store.map_or((1, 0, 0), of_store);
        params.i32(self.page_size, page_size)?.i32(self.num_slots, num_slots)?.i32(self.topk, topk)
    }
}

/// Checks the inputs and, where they are given, the tensors that the kernels write.
fn check<'a>(
    inputs: &Inputs<'a>,
    num_blocks: usize,
    implementation: Implementation,
    written: impl IntoIterator<Item = Argument<'a>>,
) -> Result<Extents> {
    let Inputs { q, format, window, compressed, sink, softmax_scale } = *inputs;
    format.check(CHECK)?;
    let heads = read_at("q", q).of(&[DType::Bf16]).axes(&["batch", "s_q", "num_heads", "head_dim"]).aligned_rows();
    let mut signature = CHECK.signature_at([heads]).extent("head_dim", 16, LARGEST_HEAD_DIM);
    for (names, store) in [(&WINDOW, Some(window)), (&COMPRESSED, compressed)] {
        if let Some(Store { cache, .. }) = store {
            cache.check(CHECK, names.argument)?;
            signature = signature.given(names.pages_axes[1], cache.page_bytes(format));
        }
        signature = signature.and(names.tensors(store));
    }
    let axes = ["batch", "s_q", "num_heads", "head_dim", WINDOW.topk, COMPRESSED.topk];
    let mut signature = signature.and([read_at("sink", sink).axes(&["num_heads"])]);
    let [batch, s_q, num_heads, head_dim, window_topk, compressed_topk] = signature.bind(axes)?;
    if head_dim != format.head_dim() {
        return CHECK.refuse("q", format!("head_dim {head_dim} must be the format's {}", format.head_dim()));
    }
    CHECK.tokens("q", q)?;
    CHECK.positive("softmax_scale", softmax_scale)?;
    if num_blocks == 0 {
        return CHECK.refuse("num_blocks", "0: there must be a block");
    }
    signature.and(written).bind([])?;
    // The kernel counts tiles, those of all blocks together and the parts that blocks leave in 32 bits.
    let topk = [window_topk, compressed_topk];
    let tiles = topk.iter().map(|slots| slots / TILE_SLOTS + 1).sum::<usize>();
    let all_tiles = batch.saturating_mul(s_q).saturating_mul(num_heads).saturating_mul(tiles);
    CHECK.int32("q", all_tiles.saturating_add(num_blocks.saturating_mul(2)))?;
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
        let Spread { num_blocks, heads_per_block } = extents.spread;
        let mut parts = Parts::default();
        // A block leaves two parts at most.
        let partial_out = parts.words(&[2, num_blocks, heads_per_block, extents.format.head_dim()]);
        let partial_lse = parts.words(&[2, num_blocks, heads_per_block]);
        let spans = parts.words(&[2, num_blocks]);
        Self { partial_out, partial_lse, spans, bytes: parts.bytes }
    }
}

/// Bytes of scratch memory that [`forward`] needs for `num_blocks` blocks: for each block two parts of a block of
/// heads, in f32, their log-sum-exp, and which unit it leaves unfinished.
///
/// # Errors
/// Inputs that the launcher refuses.
pub fn workspace_bytes(inputs: &Inputs<'_>, num_blocks: usize, implementation: Implementation) -> Result<usize> {
    let of = |implementation| Ok(Workspace::of(check(inputs, num_blocks, implementation, [])?).bytes);
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
    let Forward { inputs, num_blocks, implementation, out, lse, workspace } = *arguments;
    let num_heads = inputs.q.shape.get(2).copied().unwrap_or_default();
    let implementation = resolve(device, inputs.format, num_heads, implementation)?;
    let written = [
        write_at("out", out).like("q").aligned_rows(),
        write_at("lse", lse).axes(&["batch", "s_q", "num_heads"]),
        scratch_at("workspace", workspace, 16),
    ];
    let extents = check(&inputs, num_blocks, implementation, written)?;
    let params = params_of(arguments, extents)?;
    let hopper = implementation == Implementation::Hopper;
    let (file, name) = if hopper { (HOPPER_FILE, "decode_attention_hopper") } else { (FILE, "decode_attention") };
    let Spread { num_blocks, heads_per_block } = extents.spread;
    device.kernel(file, &extents.defines(), name)?.launch_blocks("num_blocks", num_blocks, &params)?;
    let mut paths = vec![if hopper { name.to_owned() } else { format!("{name}<{heads_per_block}>") }];
    if num_blocks > 1 {
        let name = "decode_attention_combine";
        let blocks = num_blocks * heads_per_block / COMBINE_HEADS;
        device.kernel(FILE, &extents.defines(), name)?.launch_blocks("num_blocks", blocks, &params)?;
        paths.push(name.into());
    }
    Ok(paths)
}

fn params_of(arguments: &Forward<'_>, extents: Extents) -> Result<Params> {
    let Forward { inputs, out, lse, workspace, .. } = *arguments;
    let Inputs { q, window, compressed, sink, softmax_scale, .. } = inputs;
    let parts = Workspace::of(extents);
    CHECK.holds("workspace", workspace, parts.bytes)?;
    let part = |offset: usize| DeviceAddress(workspace.address + offset as u64);
    let params = CHECK.params().heads("q", &CHECK.tokens("q", q)?);
    let params = COMPRESSED.places(WINDOW.places(params, Some(window))?, compressed)?;
    let params = params.ptr("sink", sink).heads("out", &CHECK.tokens("out", out)?).ptr("lse", lse);
    let params = params.ptr("partial_out", part(parts.partial_out)).ptr("partial_lse", part(parts.partial_lse));
    let params = params.ptr("spans", part(parts.spans)).i32("batch", extents.batch)?.i32("s_q", extents.s_q)?;
    let params = WINDOW.sizes(params.i32("num_heads", extents.num_heads)?, Some(window))?;
    Ok(COMPRESSED.sizes(params, compressed)?.f32("softmax_scale", softmax_scale))
}
