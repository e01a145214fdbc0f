//! `embed_streams`: launchers of `kernels/cuda/streams/embed_streams.cu` (inference 1).

use crate::arguments::{
    Arguments, FLOATS, Parts, element_types, modules_of_floats, pieces, read, scratch, write,
};
use crate::attention::sparse_attention::{self, KeyIndex};
use dsv4_runtime::params::DeviceAddress;
use dsv4_runtime::source::Module;
use dsv4_runtime::{DType, Device, Result, Views};

const FILE: &str = "embed_streams.cu";
const CHECK: Arguments = Arguments { operator: "embed_streams" };
/// The most streams.
pub const MAX_STREAMS: usize = 16;
/// Threads of a block.
const THREADS: usize = 128;
/// Most pieces of a row for each thread: `PIECES` in the kernel source.
const PIECES: usize = 4;
/// Blocks that an SM runs at once. If all blocks run at once with one piece a thread, a thread has
/// one piece.
const BLOCKS_AT_ONCE: usize = 16;

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    modules_of_floats(FILE, &["ELEMENT"])
        .into_iter()
        .chain([sparse_attention::index_module()])
        .collect()
}

/// Where the parts of the workspace start, in bytes.
struct Workspace {
    counts: usize,
    ends: usize,
    entries: usize,
    ordered: usize,
    bytes: usize,
}

impl Workspace {
    fn of(num_tokens: usize, vocab_size: usize) -> Self {
        let mut parts = Parts::default();
        let counts = parts.words(&[vocab_size.saturating_add(1)]);
        let (ends, entries) = (parts.words(&[vocab_size]), parts.words(&[num_tokens]));
        let ordered = parts.words(&[num_tokens]);
        Self { counts, ends, entries, ordered, bytes: parts.bytes }
    }
}

/// Bytes of scratch memory that [`backward`] needs: the tokens of each id.
pub fn workspace_bytes(num_tokens: usize, vocab_size: usize) -> usize {
    Workspace::of(num_tokens, vocab_size).bytes
}

/// Copies rows of the table to the streams; returns the kernel that ran. Its tensors:
///
/// - `table` `[vocab_size, hidden_size]`, bf16 or f32, rows contiguous;
/// - `token_ids` `[num_tokens]` i32: rows of the table; an id outside the table gives zeros;
/// - `out` `[num_tokens, num_streams, hidden_size]`, of the table's type, rows contiguous, up to
///   16 streams.
///
/// # Errors
/// A rejected argument (`num_streams` is 1 to 16), a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, num_streams: usize) -> Result<&'static str> {
    let tensors = [
        read("table").of(&FLOATS).axes(&["vocab_size", "hidden_size"]).rows(),
        read("token_ids").of(&[DType::I32]).axes(&["num_tokens"]),
        write("out").typed("table").axes(&["num_tokens", "num_streams", "hidden_size"]).rows(),
    ];
    check_streams(num_streams)?;
    let signature = CHECK.signature(views, tensors).given("num_streams", num_streams);
    let mut call = signature.extent("hidden_size", 1, i32::MAX as usize);
    let [num_tokens, vocab_size, hidden_size] =
        call.bind(["num_tokens", "vocab_size", "hidden_size"])?;
    let params = call.params(&["table", "token_ids", "out"]).i32("vocab_size", vocab_size)?;
    let params = params.i32("num_streams", num_streams)?.i32("hidden_size", hidden_size)?;
    let (dtype, vectorised) = (views["table"].dtype, call.vectorised());
    let blocks = |own: usize| {
        num_tokens.saturating_mul(pieces(hidden_size, dtype, vectorised, own * THREADS))
    };
    let few = blocks(1) <= BLOCKS_AT_ONCE * device.environment().processors as usize;
    let (name, blocks) = match (vectorised, few) {
        (true, true) => ("embed_streams_forward_few", blocks(1)),
        (true, false) => ("embed_streams_forward_vector", blocks(PIECES)),
        (false, _) => ("embed_streams_forward_scalar", blocks(PIECES)),
    };
    device
        .kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?
        .launch_blocks("out", blocks, &params)?;
    Ok(name)
}

/// Launches the gradient of the table; returns the kernels that ran. Its tensors:
///
/// - `token_ids` as in [`forward`];
/// - `dout` `[num_tokens, num_streams, hidden_size]`, bf16 or f32, rows contiguous;
/// - `dtable` `[vocab_size, hidden_size]` f32, rows contiguous: zeros in rows without a token;
/// - `workspace`, scratch memory of [`workspace_bytes`] bytes, 16-byte aligned.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, num_streams: usize) -> Result<Vec<&'static str>> {
    let tensors = [
        read("dout").of(&FLOATS).axes(&["num_tokens", "num_streams", "hidden_size"]).rows(),
        read("token_ids").of(&[DType::I32]).axes(&["num_tokens"]),
        read("table").typed("dout").axes(&["vocab_size", "hidden_size"]).rows().optional(),
        write("dtable").axes(&["vocab_size", "hidden_size"]).rows(),
        scratch("workspace", 16),
    ];
    check_streams(num_streams)?;
    let signature = CHECK.signature(views, tensors).given("num_streams", num_streams);
    let mut call = signature.extent("hidden_size", 1, i32::MAX as usize);
    let [num_tokens, vocab_size, hidden_size] =
        call.bind(["num_tokens", "vocab_size", "hidden_size"])?;
    let workspace = Workspace::of(num_tokens, vocab_size);
    CHECK.holds("workspace", &views["workspace"], workspace.bytes)?;
    let address = |offset: usize| DeviceAddress(views["workspace"].address + offset as u64);
    let (counts, ends, ordered) =
        (address(workspace.counts), address(workspace.ends), address(workspace.ordered));
    let params = call
        .params(&["dout", "dtable"])
        .ptr("counts", counts)
        .ptr("ends", ends)
        .ptr("ordered", ordered);
    let params = params.i32("vocab_size", vocab_size)?.i32("num_streams", num_streams)?;
    let params = params.i32("hidden_size", hidden_size)?;
    let (dtype, vectorised) = (views["dout"].dtype, call.vectorised_rows(&["dout", "dtable"]));
    let launch = |name: &'static str, blocks: usize| -> Result<&'static str> {
        device
            .kernel(FILE, &element_types(&[("ELEMENT", dtype)]), name)?
            .launch_blocks("dtable", blocks, &params)?;
        Ok(name)
    };
    let mut ran = vec![launch("embed_streams_clear", (vocab_size + 1).div_ceil(THREADS))?];
    let index = KeyIndex { counts, ends, entries: address(workspace.entries), ordered };
    let kernel = |name: &str| sparse_attention::index_kernel(device, name);
    ran.extend(index.launch(
        CHECK,
        kernel,
        [Some(&views["token_ids"]), None],
        [num_tokens, 1, vocab_size],
    )?);
    let name =
        if vectorised { "embed_streams_backward_vector" } else { "embed_streams_backward_scalar" };
    // Its pieces are 16 bytes of the gradient, which is fp32.
    let parts = pieces(hidden_size, DType::F32, vectorised, PIECES * THREADS);
    ran.push(launch(name, vocab_size.saturating_mul(parts))?);
    Ok(ran)
}

fn check_streams(num_streams: usize) -> Result<()> {
    if (1..=MAX_STREAMS).contains(&num_streams) {
        return Ok(());
    }
    CHECK.refuse("num_streams", format!("{num_streams} must be 1 to {MAX_STREAMS}"))
}
