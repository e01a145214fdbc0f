//! `decode_attention`: launcher of `kernels/cuda/attention/decode_attention.cu` (inference 8 to
//! 8.4).

use crate::arguments::{Argument, Arguments, Parts, Signature, read, scratch, write};
use crate::cache::kv_cache::{RowFormat, num_slots};
pub use crate::implementation::Implementation;
use dsv4_runtime::params::{DeviceAddress, Params};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "decode_attention.cu";
const HOPPER_FILE: &str = "decode_attention_hopper.cu";
/// Heads of one block of the Hopper kernel: the rows of a warpgroup's MMA.
const HOPPER_HEADS: usize = 64;
/// Row formats that the Hopper kernel takes.
pub const HOPPER_FORMATS: [RowFormat; 2] = [RowFormat::MODEL, RowFormat::bf16(512)];
const CHECK: Arguments = Arguments { operator: "decode_attention" };
/// Slots of a tile, the least work that a block gets; `KEYS` in the kernel source.
pub const TILE_SLOTS: usize = 64;
/// Heads of a block of the merge kernel, one a warp.
const COMBINE_HEADS: usize = 8;
/// Largest `head_dim` that the output's accumulators hold.
const LARGEST_HEAD_DIM: usize = 512;

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The row format of both stores; `head_dim` is a multiple of 16 up to 512.
    pub format: RowFormat,
    /// Rows of a page of the window, at least 1.
    pub window_page_size: usize,
    /// Rows of a page of the compressed entries, at least 1; ignored where there are none.
    pub compressed_page_size: usize,
    /// Multiplies `q · k`, finite and above 0.
    pub softmax_scale: f32,
    /// Blocks that the work is spread over, at least 1: [`natural_blocks`] of the device. The
    /// result depends on this number within rounding, and on nothing else of the launch.
    pub num_blocks: usize,
    /// Which implementation runs. The Hopper kernel takes heads of 512 channels, in the model's
    /// format or in bf16.
    pub implementation: Implementation,
}

impl Options {
    fn check(&self) -> Result<()> {
        self.format.check(CHECK)?;
        let head_dim = self.format.head_dim();
        if !head_dim.is_multiple_of(16) || head_dim > LARGEST_HEAD_DIM {
            let reason =
                format!("head_dim {head_dim} must be a multiple of 16 up to {LARGEST_HEAD_DIM}");
            return CHECK.refuse("format", reason);
        }
        CHECK.positive("softmax_scale", self.softmax_scale)?;
        if self.num_blocks == 0 {
            return CHECK.refuse("num_blocks", "0: there must be a block");
        }
        Ok(())
    }
}

/// As many blocks as the device has SMs: one block fills one SM.
pub fn natural_blocks(device: &Device) -> usize {
    (device.environment().processors as usize).max(1)
}

/// The implementation that runs on a device: the requested one, or for [`Implementation::Auto`] the
/// Hopper kernel where it can run, above 16 heads.
///
/// # Errors
/// The Hopper kernel is requested and cannot run.
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

/// How a call is spread over the device. A work tile is a token with up to `heads_per_block` of its
/// heads. The key tiles of all work tiles, one after the other, are divided among the blocks in
/// equal ranges (the kernel's header).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// Heads of a work tile.
    pub heads_per_block: usize,
    /// Blocks that are launched.
    pub num_blocks: usize,
}

/// How a call of `batch * s_q` tokens is spread over at most `num_blocks` blocks. Their lists have
/// `topk` slots in each store. [`Implementation::Auto`] must have been resolved; it counts as
/// portable.
pub fn spread(
    [batch, s_q, num_heads]: [usize; 3],
    topk: &[usize],
    num_blocks: usize,
    implementation: Implementation,
) -> Spread {
    let tiles = topk.iter().map(|slots| slots.div_ceil(TILE_SLOTS)).sum::<usize>().max(1);
    // A block of 64 heads reads each row once for all of them. A tile of 16 heads finishes sooner,
    // and that matters more where the SMs hold all tiles at once.
    let small_blocks = batch * s_q * num_heads.div_ceil(16) * tiles;
    let small =
        implementation != Implementation::Hopper && (num_heads <= 16 || small_blocks <= num_blocks);
    let heads_per_block = if small { 16 } else { HOPPER_HEADS };
    // Blocks beyond the number of tiles would have no work.
    let all_tiles = batch * s_q * num_heads.div_ceil(heads_per_block) * tiles;
    Spread { heads_per_block, num_blocks: num_blocks.min(all_tiles) }
}

/// Tiles of a block's range where `total` tiles are divided among `num_blocks` blocks. `unit` is
/// the number of tiles of a work tile, if all have the same, as without lengths. A range of whole
/// work tiles leaves no parts to merge; it is chosen if it is at most a sixteenth longer than an
/// even share.
pub fn stretch(total: usize, unit: Option<usize>, num_blocks: usize) -> usize {
    let even = total.div_ceil(num_blocks.max(1));
    let whole = unit.map(|tiles| even.next_multiple_of(tiles.max(1)));
    whole.filter(|whole| whole - even <= even / 16).unwrap_or(even)
}

/// The sizes of a call, as its tensors have them.
#[derive(Clone, Copy, Debug)]
struct Extents {
    batch: usize,
    s_q: usize,
    num_heads: usize,
    window: Store,
    compressed: Store,
}

/// A store, and the width of the lists that index it.
#[derive(Clone, Copy, Debug)]
struct Store {
    page_size: usize,
    num_slots: usize,
    topk: usize,
}

impl Extents {
    fn spread(self, num_blocks: usize, implementation: Implementation) -> Spread {
        let topk = [self.window.topk, self.compressed.topk];
        spread([self.batch, self.s_q, self.num_heads], &topk, num_blocks, implementation)
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

/// Checks the options and the tensors of [`forward`]. Written tensors are checked only when
/// `launching`.
fn check<'a>(
    views: &'a Views,
    options: &Options,
    launching: bool,
) -> Result<(Signature<'a>, Extents)> {
    let Options { format, window_page_size, compressed_page_size, num_blocks, .. } = *options;
    options.check()?;
    let slots = &[DType::I32];
    let pages = |store: Argument<'a>| store.of(&[DType::U8]).aligned_rows().one_stride();
    let lists = |lists: Argument<'a>| lists.of(slots).rows().one_stride().packed();
    let tensors = [
        read("q")
            .of(&[DType::Bf16])
            .axes(&["batch", "s_q", "num_heads", "head_dim"])
            .aligned_rows()
            .packed(),
        pages(read("window").axes(&["window_num_pages", "window_page_bytes"])),
        lists(read("window_indices").axes(&["batch", "s_q", "window_topk"])),
        read("window_length").of(slots).axes(&["batch"]).optional(),
        pages(read("compressed").axes(&["compressed_num_pages", "compressed_page_bytes"]))
            .optional(),
        lists(read("compressed_indices").axes(&["batch", "s_q", "compressed_topk"]))
            .with(&["compressed"]),
        read("compressed_length").of(slots).axes(&["batch"]).only_with(&["compressed"]),
        read("sink").axes(&["num_heads"]).optional(),
        write("out").like("q").aligned_rows().packed().when(launching),
        write("lse").axes(&["batch", "s_q", "num_heads"]).when(launching),
        scratch("workspace", 16).when(launching),
    ];
    // The kernel divides by the page size, even to find that a page holds no row.
    let compressed_page_size = views.get("compressed").map_or(1, |_| compressed_page_size);
    let mut call = CHECK
        .signature(views, tensors)
        .given("head_dim", format.head_dim())
        .given("window_page_bytes", format.page_bytes(CHECK, "window", window_page_size)?)
        .given(
            "compressed_page_bytes",
            format.page_bytes(CHECK, "compressed", compressed_page_size)?,
        );
    let [batch, s_q, num_heads] = call.bind(["batch", "s_q", "num_heads"])?;
    let mut store = |name, page_size, axes| -> Result<Store> {
        let [num_pages, topk] = call.bind(axes)?;
        Ok(Store { page_size, num_slots: num_slots(CHECK, name, num_pages, page_size)?, topk })
    };
    let window = store("window", window_page_size, ["window_num_pages", "window_topk"])?;
    let compressed =
        store("compressed", compressed_page_size, ["compressed_num_pages", "compressed_topk"])?;
    // The kernel counts in 32 bits: the tiles, those of all blocks together, and the parts that
    // blocks leave.
    let tiles = [window, compressed].iter().map(|store| store.topk / TILE_SLOTS + 1).sum::<usize>();
    let all_tiles = batch.saturating_mul(s_q).saturating_mul(num_heads).saturating_mul(tiles);
    CHECK.int32("q", all_tiles.saturating_add(num_blocks.saturating_mul(2)))?;
    Ok((call, Extents { batch, s_q, num_heads, window, compressed }))
}

/// Parts of the scratch memory, as byte offsets. Each part starts at a multiple of 16.
struct Workspace {
    partial_out: usize,
    partial_lse: usize,
    spans: usize,
    bytes: usize,
}

impl Workspace {
    fn of(format: RowFormat, Spread { num_blocks, heads_per_block }: Spread) -> Self {
        let mut parts = Parts::default();
        // A block leaves at most two parts.
        let partial_out = parts.words(&[2, num_blocks, heads_per_block, format.head_dim()]);
        let partial_lse = parts.words(&[2, num_blocks, heads_per_block]);
        let spans = parts.words(&[2, num_blocks]);
        Self { partial_out, partial_lse, spans, bytes: parts.bytes }
    }
}

/// Bytes of scratch memory that [`forward`] needs with these options. Each block has two parts of a
/// block of heads in f32, their log-sum-exp, and the index of the work tile that it leaves
/// unfinished.
///
/// # Errors
/// Inputs that the launcher rejects.
pub fn workspace_bytes(views: &Views, options: &Options) -> Result<usize> {
    let (_, extents) = check(views, options, false)?;
    let of = |implementation| {
        Workspace::of(options.format, extents.spread(options.num_blocks, implementation)).bytes
    };
    Ok(match options.implementation {
        // The device decides which kernel runs: the size is enough for either.
        Implementation::Auto if HOPPER_FORMATS.contains(&options.format) => {
            of(Implementation::Portable).max(of(Implementation::Hopper))
        }
        resolved => of(resolved),
    })
}

/// Launches the attention and, where work was split, the merge. Returns the kernels that ran. Its
/// tensors:
///
/// - `q` `[batch, s_q, num_heads, head_dim]` bf16, rows 16-byte aligned; the tokens of all
///   requests are evenly spaced, as are those of `window_indices`, `compressed_indices` and `out`;
/// - `window` `[num_pages, page_size * row_bytes]` u8, pages 16-byte aligned: the raw rows of the
///   window. Bytes between pages are not used;
/// - `window_indices` `[batch, s_q, topk]` i32: slots of the window, `page * page_size + row`.
///   Slot `j` of a list is valid when `j < length` and its index is in `[0, num_slots)`; others
///   contribute nothing and are never dereferenced;
/// - `window_length` `[batch]` i32, clamped to `[0, topk]`: one length for all tokens of a request;
///   absent where it is `topk` everywhere;
/// - `compressed`, `compressed_indices`, `compressed_length`: the same for the compressed entries,
///   with separate pages, number of pages and `topk`; absent where the layer has none;
/// - `sink` `[num_heads]` f32: a logit, not scaled; absent without sinks;
/// - `out` `[batch, s_q, num_heads, head_dim]` bf16, rows 16-byte aligned: 0 for a token without a
///   valid slot;
/// - `lse` `[batch, s_q, num_heads]` f32: natural log-sum-exp without the sink; `+inf` for such a
///   token;
/// - `workspace`: scratch memory of at least [`workspace_bytes`] bytes, 16-byte aligned.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, options: &Options) -> Result<Vec<String>> {
    let (call, extents) = check(views, options, true)?;
    let implementation =
        resolve(device, options.format, extents.num_heads, options.implementation)?;
    let spread = extents.spread(options.num_blocks, implementation);
    let params = params(views, &call, options, (extents, spread))?;
    let hopper = implementation == Implementation::Hopper;
    let (file, name) =
        if hopper { (HOPPER_FILE, "decode_attention_hopper") } else { (FILE, "decode_attention") };
    let Spread { num_blocks, heads_per_block } = spread;
    let defines = defines(options.format, heads_per_block);
    device.kernel(file, &defines, name)?.launch_blocks("num_blocks", num_blocks, &params)?;
    let mut paths =
        vec![if hopper { name.to_owned() } else { format!("{name}<{heads_per_block}>") }];
    if num_blocks > 1 {
        let name = "decode_attention_combine";
        let blocks = num_blocks * heads_per_block / COMBINE_HEADS;
        device.kernel(FILE, &defines, name)?.launch_blocks("num_blocks", blocks, &params)?;
        paths.push(name.into());
    }
    Ok(paths)
}

fn params(
    views: &Views,
    call: &Signature,
    options: &Options,
    (extents, spread): (Extents, Spread),
) -> Result<Params> {
    let Extents { batch, s_q, num_heads, window, compressed } = extents;
    let (workspace, parts) = (&views["workspace"], Workspace::of(options.format, spread));
    CHECK.holds("workspace", workspace, parts.bytes)?;
    let part = |offset: usize| DeviceAddress(workspace.address + offset as u64);
    let params = call.append_as(call.params(&["q"]), "window_pages", "window");
    let params = call.append(params, &["window_indices", "window_length"]);
    let params = call.append_as(params, "compressed_pages", "compressed");
    let lists_and_out = ["compressed_indices", "compressed_length", "sink", "out", "lse"];
    let params = call.append(params, &lists_and_out);
    let params = params
        .ptr("partial_out", part(parts.partial_out))
        .ptr("partial_lse", part(parts.partial_lse));
    let params = params.ptr("spans", part(parts.spans)).i32("batch", batch)?.i32("s_q", s_q)?;
    let params = params.i32("num_heads", num_heads)?.i32("window_page_size", window.page_size)?;
    let params =
        params.i32("window_num_slots", window.num_slots)?.i32("window_topk", window.topk)?;
    let params = params.i32("compressed_page_size", compressed.page_size)?;
    let params = params
        .i32("compressed_num_slots", compressed.num_slots)?
        .i32("compressed_topk", compressed.topk)?;
    Ok(params.f32("softmax_scale", options.softmax_scale))
}
