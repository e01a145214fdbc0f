//! `moe_map`: launcher of `kernels/cuda/experts/moe_map.cu` (inference 11.3).

use crate::arguments::{Arguments, read, scratch, write};
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "moe_map.cu";
const CHECK: Arguments = Arguments { operator: "moe_map" };
/// The most experts.
pub const MAX_EXPERTS: usize = 512;
/// The most slots of a token.
pub const MAX_TOPK: usize = 32;
/// The most that an expert's rows are aligned to.
pub const MAX_ALIGNMENT: usize = 1024;
/// Slots that a block processes at once.
const ROUND: usize = 2048;
/// A call with up to this many slots is one launch.
const SMALL_SLOTS: usize = 2 * ROUND;
/// The most chunks, if there are enough SMs: every block reads the counts of all chunks.
const MAX_CHUNKS: usize = 128;
/// Slots, and rows without a slot, for each block of the single launch.
const SLOTS_PER_BLOCK: usize = 8;
const ROWS_PER_BLOCK: usize = 2048;

/// Every module that the launcher compiles.
pub fn modules() -> Vec<Module> {
    vec![module(FILE, &[])]
}

/// Upper bound on the rows of this many slots and experts: each expert with a slot wastes up to
/// `alignment - 1` rows. A multiple of the alignment; saturates.
pub fn positions(num_slots: usize, num_experts: usize, alignment: usize) -> usize {
    let used = num_slots.min(num_experts);
    let rows = used.saturating_mul(alignment.saturating_sub(1)).saturating_add(num_slots);
    rows / alignment.max(1) * alignment.max(1)
}

/// Slots of a chunk, and the number of chunks, at most `most`.
fn chunks(num_slots: usize, most: usize) -> (usize, usize) {
    let rounds = num_slots.div_ceil(ROUND).div_ceil(most).max(1);
    (rounds * ROUND, num_slots.div_ceil(rounds * ROUND))
}

/// Bytes of the workspace that a call with this many slots needs; 0 where it needs none.
pub fn workspace_bytes(num_slots: usize, num_experts: usize) -> usize {
    if num_slots <= SMALL_SLOTS { 0 } else { 4 * chunks(num_slots, MAX_CHUNKS).1 * num_experts }
}

/// Sorts slots by expert; returns the kernels that ran. Its tensors, all i32:
///
/// - `topk_indices` `[num_tokens, topk]`, rows contiguous, up to 32 slots a token: experts, which
///   may repeat; a value outside `0 .. num_experts` is a slot that is not counted;
/// - `counts` `[num_experts]`, up to 512 experts, and `expert_offsets` `[num_experts + 1]`: an
///   expert's slots, and its first row, a multiple of `alignment`; the last offset is the end of
///   all rows;
/// - `token_topk_to_pos` `[num_tokens, topk]`, rows contiguous: the row of each slot, -1 for none;
/// - `pos_to_expert`, `pos_to_token`, `pos_to_token_topk` `[num_positions]`, at least as many as
///   [`positions`] returns: expert, token and slot (`token * topk + place`) of each row, -1 in rows
///   without a slot;
/// - `workspace`, scratch memory of [`workspace_bytes`] bytes; absent where that is 0.
///
/// # Errors
/// A rejected argument (`alignment` is 1 to 1024), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, alignment: usize) -> Result<Vec<&'static str>> {
    let integers = |name: &'static str| write(name).of(&[DType::I32]);
    let experts = views.get("counts").and_then(|counts| counts.shape.first().copied()).unwrap_or(0);
    let tensors = [
        read("topk_indices").of(&[DType::I32]).axes(&["num_tokens", "topk"]).rows(),
        integers("counts").axes(&["num_experts"]),
        integers("expert_offsets").axes(&["num_experts_and_one"]),
        integers("token_topk_to_pos").axes(&["num_tokens", "topk"]).rows(),
        integers("pos_to_expert").axes(&["num_positions"]),
        integers("pos_to_token").axes(&["num_positions"]),
        integers("pos_to_token_topk").axes(&["num_positions"]),
        scratch("workspace", 4).optional(),
    ];
    let signature =
        CHECK.signature(views, tensors).given("num_experts_and_one", experts.saturating_add(1));
    let mut call = signature.extent("num_experts", 1, MAX_EXPERTS).extent("topk", 1, MAX_TOPK);
    let axes = ["num_tokens", "topk", "num_experts", "num_positions"];
    let [num_tokens, topk, num_experts, num_positions] = call.bind(axes)?;
    if !(1..=MAX_ALIGNMENT).contains(&alignment) {
        return CHECK.refuse("alignment", format!("{alignment} must be 1 to {MAX_ALIGNMENT}"));
    }
    let num_slots = num_tokens * topk;
    CHECK.int32("topk_indices", num_slots)?;
    let needed = positions(num_slots, num_experts, alignment);
    CHECK.int32("alignment", needed)?;
    if num_positions < needed {
        let reason = format!(
            "{num_positions} positions: {num_slots} slots of {num_experts} experts may take {needed}"
        );
        return CHECK.refuse("pos_to_expert", reason);
    }
    let bytes = workspace_bytes(num_slots, num_experts);
    match views.get("workspace") {
        Some(workspace) => CHECK.holds("workspace", workspace, bytes)?,
        None if bytes > 0 => {
            return CHECK.refuse("workspace", format!("it must be present, with {bytes} bytes"));
        }
        None => {}
    }
    let processors = device.environment().processors.max(1) as usize;
    // Few slots: blocks that process them, and blocks that write counts, offsets and the rows
    // without a slot.
    let few = num_slots <= SMALL_SLOTS;
    let others = num_positions.div_ceil(ROWS_PER_BLOCK).clamp(1, processors.div_ceil(2));
    let placing =
        num_slots.div_ceil(SLOTS_PER_BLOCK).clamp(1, processors.saturating_sub(others).max(1));
    let (chunk_slots, num_chunks) =
        if few { (0, placing) } else { chunks(num_slots, MAX_CHUNKS.min(processors)) };
    let params = call.params(&[
        "topk_indices",
        "counts",
        "expert_offsets",
        "token_topk_to_pos",
        "pos_to_expert",
    ]);
    let params = params
        .ptr("pos_to_token", &views["pos_to_token"])
        .ptr("pos_to_token_topk", &views["pos_to_token_topk"]);
    let params = params
        .ptr("chunk_counts", views.get("workspace"))
        .i32("num_slots", num_slots)?
        .i32("topk", topk)?;
    let params = params.i32("num_experts", num_experts)?.i32("num_positions", num_positions)?;
    let params = params
        .i32("alignment", alignment)?
        .i32("chunk_slots", chunk_slots)?
        .i32("num_chunks", num_chunks)?;
    let inverse = |divisor: usize| (1usize << 32).div_ceil(divisor.max(1)).min(0xffff_ffff);
    let params =
        params.i64("topk_inverse", inverse(topk))?.i64("alignment_inverse", inverse(alignment))?;
    let launch = |name: &'static str, blocks: usize| -> Result<&'static str> {
        device.kernel(FILE, &[], name)?.launch_blocks("topk_indices", blocks, &params)?;
        Ok(name)
    };
    if few {
        return Ok(vec![launch("moe_map_small", placing + others)?]);
    }
    Ok(vec![launch("moe_map_count", num_chunks)?, launch("moe_map_place", num_chunks)?])
}
