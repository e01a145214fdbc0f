//! `compressor_stream`: launcher of `kernels/cuda/cache/compressor_stream.cu` (inference 5.4, 6,
//! 6.2).

use crate::arguments::{
    Arguments, FLOATS, element_types, is_aligned, modules_of_floats, read, scratch, write,
};
use crate::cache::compressor::{
    Epilogue, Extents, FORWARD_THREADS, MAX_HEAD_DIM, MAX_RATIO, OVERLAP_RATIO, QUAD,
};
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Kernel, LaunchConfig, Result, Views};

const FILE: &str = "compressor_stream.cu";
const CHECK: Arguments = Arguments { operator: "compressor_stream" };

/// A call with overlap is one launch up to this many tokens, and entries, for each sequence.
const STEP_TOKENS: usize = 2;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
}

/// Bytes of scratch memory that [`forward`] needs without overlap, for entries of this type.
pub fn workspace_bytes(stored: DType, num_entries: usize, head_dim: usize) -> usize {
    num_entries * head_dim * stored.size()
}

/// Launches a step of the sequences: computes the entries that it completes, then writes its tokens
/// to the state. Returns the kernels that ran. Its tensors:
///
/// - `kv`, `gate`, `ape`, `norm_weight`, `cos` and `sin` as in
///   [`compressor::forward`](crate::cache::compressor::forward), of the step's tokens;
/// - `state` `[num_slots, num_rows, 2 * width]` f32, rows contiguous: C and S of the token at
///   position `t` of the sequence in a slot, in row `t mod num_rows`. `num_rows` is at least the
///   number of slots of an entry, 8 with overlap and `ratio` without, plus the number of tokens of
///   a step that may be rejected;
/// - `cu_seqlens` `[num_sequences + 1]` i32: the first token of each sequence in the step, and the
///   end, within the tokens;
/// - `first_positions` `[num_sequences]` i32: the position of that token. 0 starts a sequence,
///   whatever its slot holds. A position that was written before rejects the tokens from there on;
/// - `slots` `[num_sequences]` i32, all different. A sequence whose slot is negative or out of
///   range, or whose position is negative, writes nothing and makes no entry;
/// - `cu_entries` `[num_sequences + 1]` i32: the first row of each sequence's new entries, and the
///   end. Entry `first_position / ratio + k` is row `cu_entries[i] + k`, if the step has its last
///   token and the row is the sequence's;
/// - `entries` `[num_entries, head_dim]`, bf16 or f32, rows contiguous; rows without an entry
///   become zero;
/// - `workspace`, scratch memory of [`workspace_bytes`] bytes, where groups do not overlap.
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
    const ENDS: &[&str] = &["num_sequences_and_one"];
    let tensors = [
        read("kv").axes(&["num_tokens", "width"]).rows().one_stride(),
        read("gate").like("kv").rows().one_stride(),
        read("ape").axes(&["ratio", "width"]),
        read("norm_weight").axes(&["head_dim"]),
        write("state").axes(&["num_slots", "num_rows", "state_width"]).rows(),
        read("cu_seqlens").of(&[DType::I32]).axes(ENDS),
        read("cu_entries").of(&[DType::I32]).axes(ENDS),
        read("first_positions").of(&[DType::I32]).axes(&["num_sequences"]),
        read("slots").of(&[DType::I32]).axes(&["num_sequences"]),
        read("cos").axes(&["table_rows", "half_rope_dim"]).rows().one_stride(),
        read("sin").like("cos").rows().one_stride(),
        write("entries").of(&FLOATS).axes(&["num_entries", "head_dim"]).rows().one_stride(),
        scratch("workspace", 16).optional(),
    ];
    let call = CHECK
        .signature(views, tensors)
        .extent("head_dim", QUAD, MAX_HEAD_DIM)
        .extent("ratio", 1, MAX_RATIO);
    let mut call = call.extent("num_sequences_and_one", 1, i32::MAX as usize);
    let [num_tokens, num_entries, ratio, width, head_dim] =
        call.bind(["num_tokens", "num_entries", "ratio", "width", "head_dim"])?;
    let [num_slots, num_rows, state_width, ends, num_sequences, table_rows, half_rope_dim] =
        call.bind([
            "num_slots",
            "num_rows",
            "state_width",
            "num_sequences_and_one",
            "num_sequences",
            "table_rows",
            "half_rope_dim",
        ])?;
    let extents = Extents { num_tokens, num_entries, ratio, width, head_dim };
    extents.check(CHECK, half_rope_dim)?;
    CHECK.positive("eps", eps)?;
    let epilogue = extents.epilogue(CHECK, epilogue)?;
    if ends != num_sequences + 1 {
        return CHECK.refuse(
            "cu_seqlens",
            format!("{ends} ends must be one more than {num_sequences} sequences"),
        );
    }
    if state_width != 2 * width {
        return CHECK.refuse(
            "state",
            format!("rows of {state_width} numbers must be twice the width {width}"),
        );
    }
    let least = if extents.overlaps() { 2 * OVERLAP_RATIO } else { ratio };
    if num_rows < least {
        return CHECK.refuse(
            "state",
            format!("{num_rows} rows must be at least the {least} slots of an entry"),
        );
    }
    let (stored, workspace) = (views["entries"].dtype, views.get("workspace"));
    match workspace {
        Some(workspace) => {
            CHECK.holds("workspace", workspace, workspace_bytes(stored, num_entries, head_dim))?
        }
        None if extents.overlaps() => {}
        None => return CHECK.refuse("workspace", "it must be present where groups do not overlap"),
    }
    let moved = ["kv", "gate", "ape", "norm_weight", "state", "entries"];
    // Rows of the workspace have the layout of dense entries.
    let wide = moved.iter().all(|name| is_aligned(&views[*name]))
        && (head_dim * stored.size()).is_multiple_of(8);
    let given = ["kv", "gate", "ape", "norm_weight", "state", "cu_seqlens", "cu_entries"];
    let params = call.append(call.params(&given), &["first_positions", "slots", "cos", "sin"]);
    let params = call.append(params.ptr("pooled", workspace), &["entries"]);
    let params = params.i64("table_rows", table_rows)?.i32("num_entries", num_entries)?;
    let params = params
        .i32("num_sequences", num_sequences)?
        .i32("num_slots", num_slots)?
        .i32("num_rows", num_rows)?;
    let params = params.i32("ratio", ratio)?.i32("width", width)?.i32("head_dim", head_dim)?;
    let params = params
        .i32("rope_dim", 2 * half_rope_dim)?
        .i32("entry_threads", extents.entry_threads())?
        .f32("eps", eps);
    let params = params.i32("epilogue", epilogue)?;
    let defines = element_types(&[("ELEMENT", stored)]);
    let kernel = |names: [&'static str; 2]| -> Result<(&'static str, Kernel)> {
        let name = names[usize::from(wide)];
        Ok((name, device.kernel(FILE, &defines, name)?))
    };
    let entries = FORWARD_THREADS / extents.entry_threads();
    let blocks = num_entries.div_ceil(entries);
    let few = num_tokens.max(num_entries) <= STEP_TOKENS.saturating_mul(num_sequences);
    if extents.overlaps() && few {
        let (name, step) =
            kernel(["compressor_stream_step_scalar", "compressor_stream_step_vector"])?;
        let (sequences, threads) = (num_sequences as u64, extents.entry_threads() as u32);
        step.launch(LaunchConfig::linear(CHECK.operator, "slots", sequences, threads)?, &params)?;
        return Ok(vec![name]);
    }
    if extents.overlaps() {
        let (name, overlap) =
            kernel(["compressor_stream_overlap_scalar", "compressor_stream_overlap_vector"])?;
        overlap.launch_blocks("entries", blocks, &params)?;
        let (then, rows) =
            kernel(["compressor_stream_write_scalar", "compressor_stream_write_vector"])?;
        rows.launch_blocks("kv", num_tokens, &params)?;
        return Ok(vec![name, then]);
    }
    let (name, pool) = kernel(["compressor_stream_pool_scalar", "compressor_stream_pool_vector"])?;
    pool.launch(extents.pool_launch(CHECK, "entries", num_entries)?, &params)?;
    let (then, rest) =
        kernel(["compressor_stream_norm_write_scalar", "compressor_stream_norm_write_vector"])?;
    rest.launch_blocks("kv", blocks.saturating_add(num_tokens), &params)?;
    Ok(vec![name, then])
}
