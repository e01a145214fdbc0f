//! `compressor`: launchers of `kernels/cuda/cache/compressor.cu` (inference 5.4, 6, training 9).

use serde::{Deserialize, Serialize};

use crate::arguments::{
    Argument, Arguments, Defines, FLOATS, Parts, Signature, element_types, is_aligned,
    modules_of_floats, read, saved, scratch, write,
};
use crate::formats::hadamard;
use dsv4_runtime::params::Params;
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, LaunchConfig, Result, TensorView, Views};

const FILE: &str = "compressor.cu";
const CHECK: Arguments = Arguments { operator: "compressor" };

/// Channels of the widest entry.
pub const MAX_HEAD_DIM: usize = 512;
/// Tokens of a group that overlaps with the previous one; `OVERLAP_RATIO` in the kernel source.
pub const OVERLAP_RATIO: usize = 4;
/// Most tokens of a group; `MAX_RATIO` in the kernel source.
pub const MAX_RATIO: usize = 128;
/// Channels of a thread; numbers of channels are multiples of it. `QUAD` in the kernel source.
pub const QUAD: usize = 4;
/// Threads of a block that computes entries, and of a block of the backward.
pub(crate) const FORWARD_THREADS: usize = 128;
const BACKWARD_THREADS: usize = 128;
/// Channels of a block that pools without overlap, and its most warps; `CHUNK` and `POOL_WARPS` in
/// the kernel source.
const CHUNK: usize = 32;
const POOL_WARPS: usize = 8;
/// Slots that a warp of such a block processes at a time.
const WARP_SLOTS: usize = 4;
/// Threads, and tokens, of a block of `compressor_sums`; `SUM_THREADS` in the kernel source.
const SUM_THREADS: usize = 512;
/// Blocks of the backward for each SM: each leaves a row of partial sums.
const BLOCKS_PER_PROCESSOR: usize = 2;

/// How entries are rounded before they are stored (inference 5.4, 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// Unchanged; only these entries have a backward.
    None,
    /// As attention's entries: the channels that are not rotated hold the values that e4m3 codes
    /// with scales of 64 would decode to.
    Fp8,
    /// As the indexer's entries: Hadamard-transformed values that e2m1 codes with scales of 32
    /// would decode to.
    HadamardFp4,
}

impl Epilogue {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Fp8, Self::HadamardFp4];

    /// `params.epilogue` in the kernel source.
    fn number(self) -> usize {
        match self {
            Self::None => 0,
            Self::Fp8 => 1,
            Self::HadamardFp4 => 2,
        }
    }
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT", "GRADIENT"])
}

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// Rows of kv.
    pub num_tokens: usize,
    /// Rows of entries.
    pub num_entries: usize,
    /// Tokens of a group.
    pub ratio: usize,
    /// Channels of kv: `head_dim`, or twice that where groups overlap.
    pub width: usize,
    /// Channels of an entry.
    pub head_dim: usize,
}

impl Extents {
    pub(crate) fn overlaps(&self) -> bool {
        self.width > self.head_dim
    }

    /// Threads of an entry: whole warps that hold it.
    pub(crate) fn entry_threads(&self) -> usize {
        (self.head_dim / QUAD).next_power_of_two().max(32)
    }

    fn chunks(&self) -> usize {
        self.head_dim.div_ceil(CHUNK)
    }

    /// A launch of the kernels that pool without overlap: blocks for each chunk of `entries`
    /// entries.
    pub(crate) fn pool_launch(
        &self,
        check: Arguments,
        argument: &'static str,
        entries: usize,
    ) -> Result<LaunchConfig> {
        let warps = self.ratio.div_ceil(WARP_SLOTS).min(POOL_WARPS);
        LaunchConfig::linear(
            check.operator,
            argument,
            (entries * self.chunks()) as u64,
            32 * warps as u32,
        )
    }

    /// Rejects sizes that do not match.
    pub(crate) fn check(&self, check: Arguments, half_rope_dim: usize) -> Result<()> {
        let Self { ratio, width, head_dim, .. } = *self;
        if width != head_dim && width != 2 * head_dim {
            return check
                .refuse("kv", format!("width {width} must be head_dim {head_dim} or twice that"));
        }
        if self.overlaps() && ratio != OVERLAP_RATIO {
            return check.refuse(
                "ape",
                format!("ratio {ratio} must be {OVERLAP_RATIO} where groups overlap"),
            );
        }
        let rope_dim = 2 * half_rope_dim;
        if rope_dim > head_dim {
            let reason = format!(
                "{half_rope_dim} columns turn {rope_dim} channels, and there are {head_dim}"
            );
            return check.refuse("cos", reason);
        }
        Ok(())
    }

    /// The number of an epilogue, which must be one that supports entries of this width.
    pub(crate) fn epilogue(&self, check: Arguments, epilogue: Epilogue) -> Result<usize> {
        if epilogue == Epilogue::HadamardFp4 && self.head_dim != hadamard::DIM {
            let reason = format!(
                "the transform is one of {} channels, not of {}",
                hadamard::DIM,
                self.head_dim
            );
            return check.refuse("epilogue", reason);
        }
        Ok(epilogue.number())
    }

    /// Blocks of the backward's kernels: those that sum whole entries, and those that sum a chunk's
    /// channels without overlap.
    fn backward_blocks(&self, device: &Device) -> [usize; 2] {
        let most = BLOCKS_PER_PROCESSOR * device.environment().processors as usize;
        let of_entries =
            self.num_entries.div_ceil(BACKWARD_THREADS / self.entry_threads()).min(most);
        [of_entries, self.num_entries.min((most / self.chunks()).max(1))]
    }

    /// Bytes of the backward's workspace, and the offsets of its parts: dpooled, rows of dape, rows
    /// of dnorm_weight.
    fn workspace(&self, device: &Device) -> (usize, [usize; 3]) {
        let [of_entries, of_chunks] = self.backward_blocks(device);
        let (dpooled, dape) =
            if self.overlaps() { (0, of_entries) } else { (self.num_entries, of_chunks) };
        let mut parts = Parts::default();
        let starts = [
            parts.words(&[dpooled, self.head_dim]),
            parts.words(&[dape, self.ratio, self.width]),
            parts.words(&[of_entries, self.head_dim]),
        ];
        (parts.bytes, starts)
    }
}

/// Bytes of scratch memory that [`backward`] needs for these sizes.
pub fn workspace_bytes(device: &Device, extents: &Extents) -> usize {
    extents.workspace(device).0
}

/// A call whose arguments were checked.
struct Call<'a> {
    signature: Signature<'a>,
    extents: Extents,
    num_sequences: usize,
    table_rows: usize,
    half_rope_dim: usize,
    /// Whether every access may be 16 bytes, or 8 for bf16.
    vectorised: bool,
    defines: Defines,
}

/// The parameters that come first in both directions.
const INPUTS: [&str; 8] =
    ["kv", "gate", "ape", "norm_weight", "cu_seqlens", "cu_entries", "cos", "sin"];

/// The tensors that both launches read.
fn inputs() -> [Argument<'static>; 8] {
    const ENDS: &[&str] = &["num_sequences_and_one"];
    [
        read("kv").axes(&["num_tokens", "width"]).rows().one_stride(),
        read("gate").like("kv").rows().one_stride(),
        read("ape").axes(&["ratio", "width"]),
        read("norm_weight").axes(&["head_dim"]),
        read("cu_seqlens").of(&[DType::I32]).axes(ENDS),
        read("cu_entries").of(&[DType::I32]).axes(ENDS),
        read("cos").axes(&["table_rows", "half_rope_dim"]).rows().one_stride(),
        read("sin").like("cos").rows().one_stride(),
    ]
}

impl<'a> Call<'a> {
    fn check(
        views: &'a Views,
        tensors: impl IntoIterator<Item = Argument<'a>>,
        eps: f32,
    ) -> Result<Self> {
        let signature: Signature<'a> = CHECK.signature(views, inputs().into_iter().chain(tensors));
        let signature =
            signature.extent("head_dim", QUAD, MAX_HEAD_DIM).extent("ratio", 1, MAX_RATIO);
        let mut signature = signature.extent("num_sequences_and_one", 1, i32::MAX as usize);
        let [num_tokens, num_entries, ratio, width, head_dim, ends, table_rows, half_rope_dim] =
            signature.bind([
                "num_tokens",
                "num_entries",
                "ratio",
                "width",
                "head_dim",
                "num_sequences_and_one",
                "table_rows",
                "half_rope_dim",
            ])?;
        let extents = Extents { num_tokens, num_entries, ratio, width, head_dim };
        CHECK.positive("eps", eps)?;
        extents.check(CHECK, half_rope_dim)?;
        let moved =
            ["kv", "gate", "ape", "norm_weight", "pooled", "entries", "dentries", "dkv", "dgate"];
        let vectorised = moved.iter().filter_map(|name| views.get(name)).all(is_aligned);
        let stored = views
            .get("entries")
            .or_else(|| views.get("pooled"))
            .map_or(DType::Bf16, |stored| stored.dtype);
        let gradient = views.get("dkv").map_or(DType::F32, |gradient| gradient.dtype);
        let defines = element_types(&[("ELEMENT", stored), ("GRADIENT", gradient)]);
        Ok(Self {
            signature,
            extents,
            num_sequences: ends - 1,
            table_rows,
            half_rope_dim,
            vectorised,
            defines,
        })
    }

    fn name(&self, kernel: [&'static str; 2]) -> &'static str {
        kernel[usize::from(self.vectorised)]
    }

    /// The parameters that come last in both directions.
    fn extents(&self, params: Params, eps: f32) -> Result<Params> {
        let Extents { num_entries, ratio, head_dim, .. } = self.extents;
        let params = params.i64("table_rows", self.table_rows)?.i32("num_entries", num_entries)?;
        let params = params
            .i32("num_sequences", self.num_sequences)?
            .i32("ratio", ratio)?
            .i32("head_dim", head_dim)?;
        let params = params.i32("rope_dim", 2 * self.half_rope_dim)?;
        Ok(params.i32("entry_threads", self.extents.entry_threads())?.f32("eps", eps))
    }
}

/// Launches the forward; returns the kernels that ran. Its tensors:
///
/// - `kv`, `gate` `[num_tokens, width]` f32, rows contiguous: the projections C and Z. The width
///   is `head_dim`, or twice that where groups overlap, which is the case at a ratio of 4;
/// - `ape` `[ratio, width]` f32, ratio 1 to 128; `norm_weight` `[head_dim]` f32, a multiple of 4
///   up to 512;
/// - `cu_seqlens` `[num_sequences + 1]` i32: the first token of each sequence, and the end of the
///   last one. They do not decrease and stay within the tokens; tokens after the end are padding;
/// - `cu_entries` `[num_sequences + 1]` i32: the first row of each sequence's entries, in the same
///   form, within `num_entries`. Entry `j` of sequence `i` is row `cu_entries[i] + j`, if all its
///   tokens are in the sequence and the row is the sequence's;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, rows contiguous, by position. Entry `j` is
///   rotated by row `j * ratio`, or by NaN if the table ends before that row;
/// - `entries` `[num_entries, head_dim]`, bf16 or f32, rows contiguous; rows without an entry
///   become zero;
/// - `pooled` `[num_entries, head_dim]`, of the type of `entries`: the pooled values before the
///   norm, for the backward; may be absent where groups overlap.
///
/// # Errors
/// A rejected argument (`eps` is above 0, entries that [`Epilogue::HadamardFp4`] transforms have
/// 128 channels), a compile error, a rejected launch.
pub fn forward(
    device: &Device,
    views: &Views,
    eps: f32,
    epilogue: Epilogue,
) -> Result<Vec<&'static str>> {
    const ENTRIES: &[&str] = &["num_entries", "head_dim"];
    let tensors = [
        write("entries").of(&FLOATS).axes(ENTRIES).rows().one_stride(),
        write("pooled").axes(ENTRIES).typed("entries").optional(),
    ];
    let call = Call::check(views, tensors, eps)?;
    let Extents { num_entries, .. } = call.extents;
    let epilogue = call.extents.epilogue(CHECK, epilogue)?;
    let params = call.signature.params(&INPUTS);
    let params = call.signature.append(params, &["pooled", "entries"]);
    let params = call.extents(params, eps)?.i32("epilogue", epilogue)?;
    let launch = |name: &'static str, blocks: usize| {
        device.kernel(FILE, &call.defines, name)?.launch_blocks("entries", blocks, &params)
    };
    let blocks = num_entries.div_ceil(FORWARD_THREADS / call.extents.entry_threads());
    if call.extents.overlaps() {
        let name = call.name(["compressor_overlap_scalar", "compressor_overlap_vector"]);
        launch(name, blocks)?;
        return Ok(vec![name]);
    }
    if views.get("pooled").is_none() {
        return CHECK.refuse("pooled", "it must be present where groups do not overlap");
    }
    let pool = call.name(["compressor_pool_scalar", "compressor_pool_vector"]);
    let config = call.extents.pool_launch(CHECK, "entries", num_entries)?;
    device.kernel(FILE, &call.defines, pool)?.launch(config, &params)?;
    let norm = call.name(["compressor_norm_scalar", "compressor_norm_vector"]);
    launch(norm, blocks)?;
    Ok(vec![pool, norm])
}

/// Launches the backward; returns the kernels that ran. Its tensors:
///
/// - those that the forward read, and `pooled` as it saved it;
/// - `dentries` `[num_entries, head_dim]`, of the type of `pooled`, rows contiguous; rows without
///   an entry are not read;
/// - `dkv`, `dgate` `[num_tokens, width]`, both bf16 or f32, rows contiguous; zero where no entry
///   pools that half of a token;
/// - `dape` `[ratio, width]` and `dnorm_weight` `[head_dim]` f32;
/// - `workspace`, scratch memory of [`workspace_bytes`] bytes.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, eps: f32) -> Result<Vec<&'static str>> {
    const ENTRIES: &[&str] = &["num_entries", "head_dim"];
    const TOKENS: &[&str] = &["num_tokens", "width"];
    let tensors = [
        saved("pooled", true).of(&FLOATS).axes(ENTRIES),
        read("dentries").like("pooled").rows().one_stride(),
        write("dkv").of(&FLOATS).axes(TOKENS).rows().one_stride(),
        write("dgate").typed("dkv").axes(TOKENS).rows().one_stride(),
        write("dape").like("ape"),
        write("dnorm_weight").like("norm_weight"),
        scratch("workspace", 16),
    ];
    let call = Call::check(views, tensors, eps)?;
    let (workspace, (bytes, starts)) = (&views["workspace"], call.extents.workspace(device));
    CHECK.holds("workspace", workspace, bytes)?;
    let [dpooled, dape, dnorm_weight] = starts
        .map(|start| TensorView { address: workspace.address + start as u64, ..workspace.clone() });
    let params = call.signature.params(&INPUTS);
    let params = call.signature.append(params, &["pooled", "dentries", "dkv", "dgate"]);
    let params = params.ptr("dpooled", &dpooled);
    let params = params.ptr("dape_partials", &dape).ptr("dnorm_weight_partials", &dnorm_weight);
    let params = call.extents(params, eps)?;
    let launch = |name: &'static str, blocks: usize| {
        device.kernel(FILE, &call.defines, name)?.launch_blocks("dentries", blocks, &params)
    };
    let [of_entries, of_chunks] = call.extents.backward_blocks(device);
    let mut ran = Vec::new();
    if call.extents.overlaps() {
        ran.push(
            call.name(["compressor_overlap_backward_scalar", "compressor_overlap_backward_vector"]),
        );
        launch(ran[0], of_entries)?;
    } else {
        ran.push(call.name(["compressor_norm_backward_scalar", "compressor_norm_backward_vector"]));
        ran.push(call.name(["compressor_pool_backward_scalar", "compressor_pool_backward_vector"]));
        launch(ran[0], of_entries)?;
        let config = call.extents.pool_launch(CHECK, "dentries", of_chunks)?;
        device.kernel(FILE, &call.defines, ran[1])?.launch(config, &params)?;
    }
    let rows_of_dape = if call.extents.overlaps() { of_entries } else { of_chunks };
    ran.push(sums(device, &call, [&dape, &dnorm_weight], [rows_of_dape, of_entries])?);
    Ok(ran)
}

/// Adds the rows of partial sums, and zeroes the gradients of tokens that no entry pools.
fn sums(
    device: &Device,
    call: &Call<'_>,
    [dape, dnorm_weight]: [&TensorView; 2],
    [rows_of_dape, rows_of_dnorm_weight]: [usize; 2],
) -> Result<&'static str> {
    let Extents { num_tokens, ratio, width, head_dim, .. } = call.extents;
    let params =
        CHECK.params().ptr("dape_partials", dape).ptr("dnorm_weight_partials", dnorm_weight);
    let given = ["dape", "dnorm_weight", "dkv", "dgate", "cu_seqlens", "cu_entries"];
    let params = call.signature.append(params, &given);
    let params = params.i32("num_tokens", num_tokens)?.i32("num_sequences", call.num_sequences)?;
    let params = params.i32("num_dape_partials", rows_of_dape)?;
    let params = params.i32("num_dnorm_weight_partials", rows_of_dnorm_weight)?;
    let params = params.i32("num_ape", ratio * width)?.i32("ratio", ratio)?.i32("width", width)?;
    let params = params.i32("head_dim", head_dim)?;
    let name = call.name(["compressor_sums_scalar", "compressor_sums_vector"]);
    let blocks =
        (ratio * width).div_ceil(32) + head_dim.div_ceil(32) + num_tokens.div_ceil(SUM_THREADS);
    let config = LaunchConfig::linear(CHECK.operator, "kv", blocks as u64, SUM_THREADS as u32)?;
    device.kernel(FILE, &call.defines, name)?.launch(config, &params)?;
    Ok(name)
}
