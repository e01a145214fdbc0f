//! `indexer_logits`: launchers of `kernels/cuda/indexer/indexer_logits.cu` and
//! `indexer_logits_hopper.cu` (inference 7, 7.1; training 1).

use serde::{Deserialize, Serialize};

use crate::arguments::{Argument, Arguments, Defines, FLOATS, Signature, read, write};
pub use crate::implementation::Implementation;
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::tensor_map::{MapWords, TensorMap};
use dsv4_runtime::{DType, Device, Result, TensorView, Views};

const FILE: &str = "indexer_logits.cu";
const HOPPER_FILE: &str = "indexer_logits_hopper.cu";
const CHECK: Arguments = Arguments { operator: "indexer_logits" };
/// Width of q and k.
pub const HEAD_DIM: usize = 128;
/// The most heads.
pub const MAX_HEADS: usize = 64;
/// The most keys, and the most columns: positions after the last one still fit 32 bits.
pub const MAX_KEYS: usize = 1 << 30;
/// Allowed numbers of rows of a page.
pub const PAGE_SIZES: [usize; 2] = [32, 64];
/// Heads of a token that a block of the portable kernel holds.
const HEADS: [usize; 3] = [16, 32, MAX_HEADS];
/// Tokens of such a block; `TOKENS` in the kernel source.
const TOKENS: usize = 4;
/// Heads of a token that a block of the Hopper kernel holds, and rows of its tile: heads times
/// tokens.
const HOPPER_HEADS: [usize; 2] = [32, MAX_HEADS];
const HOPPER_ROWS: [usize; 2] = [64, 128];
/// Keys of a tile of either kernel.
const TILE_KEYS: usize = 64;
/// Lower bound on the blocks of the portable kernel for each SM.
const BLOCKS_PER_PROCESSOR: usize = 2;
/// Upper bound on the parts of one tile of tokens for each SM.
const MOST_ROUNDS: usize = 8;
/// Cost of a work tile of the Hopper kernel in addition to its key tiles, in key tiles.
const UNIT_OVERHEAD: usize = 2;

/// The format of q and k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operands {
    /// bf16.
    Bf16,
    /// e4m3, the scale of q folded into w, with an fp32 scale for each key.
    E4m3,
    /// e2m1, two codes to a byte, with an e8m0 scale for each 32.
    E2m1,
}

impl Operands {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::E4m3, Self::E2m1];

    /// Elements of a stored head or key: bf16 values, or bytes.
    pub fn row_elements(self) -> usize {
        if self == Self::E2m1 { HEAD_DIM / 2 } else { HEAD_DIM }
    }

    /// The type of these elements.
    pub fn dtype(self) -> DType {
        if self == Self::Bf16 { DType::Bf16 } else { DType::U8 }
    }

    /// Bytes of a head or a key.
    pub fn row_bytes(self) -> usize {
        self.row_elements() * self.dtype().size()
    }

    /// Bytes of a key's scale, or of its scales.
    pub fn scale_bytes(self) -> usize {
        if self == Self::Bf16 { 0 } else { 4 }
    }

    /// Bytes of a page of `page_size` keys: their rows, then their scales.
    pub fn page_bytes(self, page_size: usize) -> usize {
        page_size * (self.row_bytes() + self.scale_bytes())
    }

    fn types(self) -> &'static [DType] {
        if self == Self::Bf16 { &[DType::Bf16] } else { &[DType::U8] }
    }
}

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The format of q and k.
    pub operands: Operands,
    /// Tokens that one key covers, at least 1. Used where a causal limit determines the keys of a
    /// token.
    pub ratio: usize,
    /// Rows of a page, 32 or 64. Used where there is a block table.
    pub page_size: usize,
    /// Multiplies the logits, finite and above 0.
    pub sm_scale: f32,
    /// Whether columns that a token does not see become -inf. Otherwise they stay unchanged, and
    /// must not be read.
    pub clean_logits: bool,
    /// Which implementation runs.
    pub implementation: Implementation,
}

/// Which kernel runs, and the sizes of its block.
#[derive(Clone, Copy)]
struct Variant {
    hopper: bool,
    operands: Operands,
    heads: usize,
    tokens: usize,
}

impl Variant {
    /// The variant for `num_heads` heads of each of `next_n` tokens with the same keys.
    fn of(hopper: bool, operands: Operands, num_heads: usize, next_n: usize) -> Self {
        let widths = if hopper { &HOPPER_HEADS[..] } else { &HEADS };
        let heads = widths.iter().copied().find(|&heads| num_heads <= heads).unwrap_or(MAX_HEADS);
        // Few tokens do not fill the larger MMA tile.
        let rows = HOPPER_ROWS[usize::from(next_n * heads > HOPPER_ROWS[0])];
        Self { hopper, operands, heads, tokens: if hopper { rows / heads } else { TOKENS } }
    }

    fn file(self) -> &'static str {
        if self.hopper { HOPPER_FILE } else { FILE }
    }

    fn defines(self) -> Defines {
        let mut defines = vec![
            ("OPERANDS", (self.operands as usize).to_string()),
            ("HEADS", self.heads.to_string()),
        ];
        if self.hopper {
            defines.push(("TOKENS", self.tokens.to_string()));
        }
        defines
    }

    /// Its name in records.
    fn path(self) -> String {
        let operands = ["bf16", "e4m3", "e2m1"][self.operands as usize];
        match self.hopper {
            true => format!("indexer_logits_hopper<{operands}, {}, {}>", self.heads, self.tokens),
            false => format!("indexer_logits<{operands}, {}>", self.heads),
        }
    }
}

fn variants() -> impl Iterator<Item = Variant> {
    let portable = HEADS.map(|heads| (false, heads, TOKENS));
    let hopper = HOPPER_HEADS
        .into_iter()
        .flat_map(|heads| HOPPER_ROWS.map(|rows| (true, heads, rows / heads)));
    let all: Vec<_> = portable.into_iter().chain(hopper).collect();
    let of = move |operands| {
        all.clone().into_iter().map(move |(hopper, heads, tokens)| Variant {
            hopper,
            operands,
            heads,
            tokens,
        })
    };
    Operands::ALL.into_iter().flat_map(of)
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    variants().map(|variant| module(variant.file(), &variant.defines())).collect()
}

/// How the keys of a token are given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Addressing {
    Ranges,
    Causal,
    Paged,
}

/// The addressing that a call uses; tensors of another addressing must be absent.
fn addressing(views: &Views) -> Result<Addressing> {
    const OF_RANGES: [&str; 2] = ["ks", "ke"];
    const OF_CAUSAL: [&str; 3] = ["cu_q", "cu_k", "q_off"];
    let present = |name: &&'static str| views.get(name).is_some();
    let (found, others) = if ["pages", "block_table", "context_lens"].iter().any(present) {
        (Addressing::Paged, [&OF_RANGES[..], &OF_CAUSAL].concat())
    } else if OF_RANGES.iter().any(present) {
        (Addressing::Ranges, OF_CAUSAL.to_vec())
    } else {
        (Addressing::Causal, Vec::new())
    };
    match others.into_iter().find(present) {
        Some(other) => CHECK.refuse(
            other,
            "keys are named by pages, by ranges or by a causal limit, not by two of them",
        ),
        None => Ok(found),
    }
}

/// The sizes of a call.
struct Extents {
    paged: bool,
    num_tokens: usize,
    next_n: usize,
    num_heads: usize,
    num_keys: usize,
    columns: usize,
    num_sequences: usize,
    table_pages: usize,
}

/// The tensors, whose tokens are `[batch, next_n]` where there are pages.
fn tensors(operands: Operands, addressing: Addressing) -> Vec<Argument<'static>> {
    let (e2m1, e4m3, paged) =
        (operands == Operands::E2m1, operands == Operands::E4m3, addressing == Addressing::Paged);
    let integers = |name: &'static str| read(name).of(&[DType::I32]);
    // A scale that is folded into w is lost if w is rounded again.
    let weights: &[DType] = if e4m3 { &FLOATS[1..] } else { &FLOATS };
    let of_tokens = |tensor: Argument<'static>,
                     [flat, by_request]: [&'static [&'static str]; 2]| {
        if paged { tensor.axes(by_request).packed() } else { tensor.axes(flat) }
    };
    let heads = [
        &["num_tokens", "num_heads", "row_elements"][..],
        &["batch", "next_n", "num_heads", "row_elements"],
    ];
    let groups = [
        &["num_tokens", "num_heads", "num_groups"][..],
        &["batch", "next_n", "num_heads", "num_groups"],
    ];
    let mut tensors = vec![
        of_tokens(read("q").of(operands.types()).aligned_rows(), heads),
        of_tokens(read("q_scale_bytes").of(&[DType::U8]), groups).when(e2m1),
        of_tokens(
            read("w").of(weights).rows(),
            [&["num_tokens", "num_heads"], &["batch", "next_n", "num_heads"]],
        ),
        of_tokens(
            write("logits").rows().one_stride(),
            [&["num_tokens", "columns"], &["batch", "next_n", "columns"]],
        ),
    ];
    if paged {
        tensors
            .push(read("pages").of(&[DType::U8]).axes(&["num_pages", "page_bytes"]).aligned_rows());
        tensors.push(integers("block_table").axes(&["batch", "table_pages"]).rows().one_stride());
        tensors.push(integers("context_lens").axes(&["batch", "next_n"]));
        return tensors;
    }
    tensors.push(read("k").of(operands.types()).axes(&["num_keys", "row_elements"]).aligned_rows());
    tensors.push(read("k_scales").axes(&["num_keys"]).when(e4m3));
    tensors
        .push(read("k_scale_bytes").of(&[DType::U8]).axes(&["num_keys", "num_groups"]).when(e2m1));
    if addressing == Addressing::Ranges {
        tensors.extend(["ks", "ke"].map(|name| integers(name).axes(&["num_tokens"])));
    } else {
        tensors.push(integers("cu_q").axes(&["ends"]).optional());
        tensors.push(integers("cu_k").axes(&["ends"]).with(&["cu_q"]));
        tensors.push(integers("q_off").axes(&["num_sequences"]).optional());
    }
    tensors
}

fn check<'a>(views: &'a Views, options: &Options) -> Result<(Signature<'a>, Extents)> {
    let Options { operands, ratio, page_size, sm_scale, .. } = *options;
    let addressing = addressing(views)?;
    let paged = addressing == Addressing::Paged;
    CHECK.positive("sm_scale", sm_scale)?;
    if paged && !PAGE_SIZES.contains(&page_size) {
        return CHECK.refuse("page_size", format!("{page_size} must be 32 or 64"));
    }
    if ratio == 0 && addressing == Addressing::Causal {
        return CHECK.refuse("ratio", "0 must be at least 1");
    }
    let ends = views.get("cu_q").and_then(|cu_q| cu_q.shape.first().copied());
    let num_sequences = ends.map_or(1, |ends| ends.saturating_sub(1));
    let call =
        CHECK.signature(views, tensors(operands, addressing)).given("num_sequences", num_sequences);
    let call =
        call.given("row_elements", operands.row_elements()).given("num_groups", HEAD_DIM / 32);
    let mut call =
        call.given("page_bytes", operands.page_bytes(page_size)).extent("num_heads", 1, MAX_HEADS);
    let axes = [
        "num_tokens",
        "batch",
        "next_n",
        "num_heads",
        "num_keys",
        "num_pages",
        "columns",
        "table_pages",
    ];
    let [num_tokens, batch, next_n, num_heads, num_keys, num_pages, columns, table_pages] =
        call.bind(axes)?;
    if ends == Some(0) {
        return CHECK.refuse("cu_q", "shape [0] must have an entry more than there are sequences");
    }
    let (keys, num_keys) =
        if paged { ("pages", num_pages.saturating_mul(page_size)) } else { ("k", num_keys) };
    for (argument, extent) in [(keys, num_keys), ("logits", columns)] {
        if extent > MAX_KEYS {
            return CHECK
                .refuse(argument, format!("{extent} keys, or columns, are more than {MAX_KEYS}"));
        }
    }
    let [num_tokens, next_n] =
        if paged { [batch.saturating_mul(next_n), next_n] } else { [num_tokens; 2] };
    let extents = Extents {
        paged,
        num_tokens,
        next_n,
        num_heads,
        num_keys,
        columns,
        num_sequences,
        table_pages,
    };
    Ok((call, extents))
}

/// Parts into which the keys of each tile of tokens are divided.
fn pieces(variant: Variant, processors: usize, tiles: usize, columns: usize) -> usize {
    let key_tiles = columns.div_ceil(TILE_KEYS).max(1);
    if !variant.hopper {
        // At least this many blocks.
        return (BLOCKS_PER_PROCESSOR * processors).div_ceil(tiles.max(1)).clamp(1, key_tiles);
    }
    // A block takes several work tiles: one for each round, and the longest determines the time.
    let time = |pieces: usize| {
        (tiles * pieces).div_ceil(processors) * (key_tiles.div_ceil(pieces) + UNIT_OVERHEAD)
    };
    // Fewer than 2^32 work tiles.
    let most = key_tiles.min(processors * MOST_ROUNDS).min(u32::MAX as usize / tiles.max(1)).max(1);
    (1..=most).min_by_key(|&pieces| time(pieces)).unwrap_or(1)
}

/// A tensor's rows as bytes.
fn bytes_of(view: &TensorView) -> TensorView {
    let size = view.dtype.size();
    let (mut shape, mut strides) = (view.shape.clone(), view.strides.clone());
    if let [.., elements] = &mut shape[..] {
        *elements *= size;
    }
    let outer = strides.len().saturating_sub(1);
    strides[..outer].iter_mut().for_each(|stride| *stride *= size as i64);
    TensorView { dtype: DType::U8, shape, strides, ..view.clone() }
}

/// The TMA boxes of q, `[num_tokens, num_heads, bytes]`, and of the keys or pages that the Hopper
/// kernel copies. `None` where hardware cannot copy boxes of such a tensor. Codes of e2m1 are not
/// copied by TMA, and neither is an empty k.
fn maps(
    views: &Views,
    options: &Options,
    extents: &Extents,
    variant: Variant,
) -> Result<Option<[Option<TensorMap>; 2]>> {
    let Options { operands, page_size, .. } = *options;
    if operands == Operands::E2m1 {
        return Ok(Some([None; 2]));
    }
    let row_bytes = operands.row_elements() * if operands == Operands::Bf16 { 2 } else { 1 };
    let q = if extents.paged { CHECK.tokens("q", &views["q"])? } else { views["q"].clone() };
    let q = TensorMap::of(&bytes_of(&q), variant.heads as u32);
    let keys = match extents.paged {
        true => {
            let pages = &views["pages"];
            let shape = vec![pages.shape[0], page_size, row_bytes];
            let strides = vec![pages.strides[0], row_bytes as i64, 1];
            TensorMap::of(
                &TensorView { shape, strides, ..pages.clone() },
                page_size.min(TILE_KEYS) as u32,
            )
        }
        false => TensorMap::of(&bytes_of(&views["k"]), TILE_KEYS as u32),
    };
    let known = q.is_some() && (keys.is_some() || extents.num_keys == 0);
    Ok((known || extents.num_tokens == 0).then_some([q, keys]))
}

fn params(
    (views, call): (&Views, &Signature),
    options: &Options,
    extents: &Extents,
    num_pieces: usize,
    maps: [Option<MapWords>; 2],
) -> Result<Params> {
    let Extents {
        paged,
        num_tokens,
        next_n,
        num_heads,
        num_keys,
        columns,
        num_sequences,
        table_pages,
    } = *extents;
    // Rows of q and of keys are counted in bytes, whatever their type.
    let q = if paged { CHECK.tokens("q", &views["q"])? } else { views["q"].clone() };
    let (q, keys) = (bytes_of(&q), bytes_of(&views[if paged { "pages" } else { "k" }]));
    let params = call.append(CHECK.params().heads("q", &q), &["q_scale_bytes", "w"]);
    // Each addressing has tensors that the others do not know.
    let of = |operands, name| views.get(name).filter(|_| operands == options.operands);
    let params = params.rows("k", &keys).ptr("k_scales", of(Operands::E4m3, "k_scales"));
    let params = params.ptr("k_scale_bytes", of(Operands::E2m1, "k_scale_bytes"));
    let params = params.rows("block_table", views.get("block_table"));
    let params = ["context_lens", "ks", "ke", "cu_q", "cu_k", "q_off"]
        .iter()
        .fold(params, |params, name| params.ptr(*name, views.get(name)));
    let params = call.append(params, &["logits"]);
    let params = params.i32("num_tokens", num_tokens)?.i32("num_heads", num_heads)?;
    let params = params
        .i32("num_keys", num_keys)?
        .i32("columns", columns)?
        .i32("num_sequences", num_sequences)?;
    // Ranges and pages say themselves which keys are seen.
    let is_causal = !paged && views.get("ks").is_none();
    let ratio = if is_causal { options.ratio } else { 1 };
    let params = params.i32("ratio", ratio)?.i32("next_n", next_n.max(1))?;
    let params = params.i32("page_shift", options.page_size.trailing_zeros() as usize)?;
    let params = params.i32("table_pages", table_pages)?.i32("num_pieces", num_pieces)?;
    let of_bf16 = views["w"].dtype == DType::Bf16;
    let flags = usize::from(options.clean_logits) + 2 * usize::from(of_bf16);
    let [q_map, k_map] = maps;
    let params = params.i32("flags", flags)?.f32("sm_scale", options.sm_scale);
    Ok(params.tensor_map("q_map", q_map).tensor_map("k_map", k_map))
}

/// Launches the logits. Returns the kernel that ran. Where keys are paged, tokens are `[batch,
/// next_n, ..]` instead of `[num_tokens, ..]`, and the tokens of all requests are evenly spaced.
/// Its tensors:
///
/// - `q` `[num_tokens, num_heads, 128]` bf16, or u8: 128 codes of e4m3, 64 bytes of e2m1 (the even
///   code of two in the low nibble); rows 16-byte aligned; at most 64 heads;
/// - `q_scale_bytes` `[num_tokens, num_heads, 4]` u8, e8m0, with e2m1;
/// - `w` `[num_tokens, num_heads]` f32 or bf16, heads contiguous; f32 with e4m3, whose scale of q
///   is folded into it;
/// - `k` `[num_keys, 128]` (64 bytes with e2m1) as q, rows 16-byte aligned; with `k_scales`
///   `[num_keys]` f32 (e4m3), above 0, or `k_scale_bytes` `[num_keys, 4]` u8, e8m0 (e2m1);
/// - instead of k, `pages` `[num_pages, page_bytes]` u8, 16-byte aligned: `page_size` rows, then
///   `page_size` scales of 4 bytes; `block_table` `[batch, table_pages]` i32, rows contiguous, the
///   page of each `page_size` entries of a request, and `context_lens` `[batch, next_n]` i32: the
///   number of entries that each token scores;
/// - `ks`, `ke` `[num_tokens]` i32: the rows of k that each token scores; or
/// - `cu_q`, `cu_k` `[num_sequences + 1]` i32, absent for one sequence of everything, and `q_off`
///   `[num_sequences]` i32, absent where it is 0: a token scores the first `clamp(floor((q_off + t
///   + 1) / ratio), 0, keys)` keys of its sequence;
/// - `logits` `[num_tokens, columns]` f32, rows contiguous: column `c` is the `c`-th key that the
///   token scores. Keys beyond the tensor, the pages or the columns are skipped; for the other
///   columns see [`Options::clean_logits`].
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, options: &Options) -> Result<String> {
    let (call, extents) = check(views, options)?;
    let Extents { num_tokens, next_n, num_heads, columns, .. } = extents;
    let requests = num_tokens / next_n.max(1);
    let processors = (device.environment().processors as usize).max(1);
    let variant = |hopper| Variant::of(hopper, options.operands, num_heads, next_n);
    let maps = maps(views, options, &extents, variant(true))?;
    let misfit = maps
        .is_none()
        .then(|| "hardware copies no boxes of q or of the keys: their rows overlap".to_owned());
    let hopper =
        options.implementation.runs_hopper(CHECK, device.environment(), num_heads, misfit)?;
    let variant = variant(hopper);
    let tiles = requests * next_n.div_ceil(variant.tokens);
    let num_pieces = pieces(variant, processors, tiles, columns);
    let (units, name) =
        (tiles * num_pieces, if hopper { "indexer_logits_hopper" } else { "indexer_logits" });
    let blocks = if hopper { units.min(processors) } else { units };
    let map = |map: Option<TensorMap>| {
        map.filter(|_| hopper).map(|map| device.tensor_map(&map)).transpose()
    };
    let [q_map, k_map] = maps.unwrap_or_default().map(map);
    let params = params((views, &call), options, &extents, num_pieces, [q_map?, k_map?])?;
    device.kernel(variant.file(), &variant.defines(), name)?.launch_blocks("q", blocks, &params)?;
    Ok(variant.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hopper: bool, num_heads: usize, next_n: usize) -> Variant {
        Variant::of(hopper, Operands::E4m3, num_heads, next_n)
    }

    #[test]
    fn a_block_holds_as_many_heads_as_there_are_and_tokens_that_fill_a_product() {
        let held = |num_heads, next_n| {
            (of(true, num_heads, next_n).heads, of(true, num_heads, next_n).tokens)
        };
        assert_eq!([held(64, 1), held(64, 2), held(33, 9)], [(64, 1), (64, 2), (64, 2)]);
        assert_eq!([held(32, 1), held(5, 2), held(32, 3)], [(32, 2), (32, 2), (32, 4)]);
        assert_eq!([16, 17, 33].map(|heads| of(false, heads, 1).heads), [16, 32, 64]);
    }

    #[test]
    fn every_variant_that_a_call_may_need_is_among_the_modules() {
        let known: Vec<_> = variants().map(|variant| (variant.file(), variant.defines())).collect();
        for hopper in [false, true] {
            for (num_heads, next_n) in
                [1, 16, 17, 32, 33, 64].into_iter().flat_map(|h| [1, 2, 3, 9].map(|n| (h, n)))
            {
                let variant = of(hopper, num_heads, next_n);
                assert!(known.contains(&(variant.file(), variant.defines())), "{}", variant.path());
            }
        }
        assert_eq!(known.len(), 21);
    }

    #[test]
    fn keys_are_dealt_so_that_one_request_fills_the_device_and_many_leave_no_part_round() {
        let decode = of(true, 64, 1);
        // 128 tiles of keys for 132 SMs; four parts of each of 32 requests; whole contexts of 128.
        assert_eq!(
            [(1, 8192), (32, 8192), (128, 8192)]
                .map(|(tiles, columns)| pieces(decode, 132, tiles, columns)),
            [128, 4, 1]
        );
        assert_eq!(pieces(of(true, 64, 4096), 132, 2048, 16_384), 1);
        assert_eq!(pieces(of(false, 64, 1), 132, 1, 8192), 128);
        assert_eq!(pieces(of(false, 64, 9), 132, 300, 8192), 1);
        assert_eq!([true, false].map(|hopper| pieces(of(hopper, 64, 1), 132, 1, 0)), [1, 1]);
    }
}
