//! `cp_sparse_attention` (training 10): sparse attention of a rank's queries over the keys of all
//! ranks, forward and backward.
//!
//! ```text
//! forward    positions, K (, V) = all_gather          of each rank's rows, padding included
//!            out, lse           = attention(q, K, V)  of own queries
//! backward   the same gather: nothing is kept
//!            dq, dK (, dV)      = attention_backward  dK of all rows, by own queries
//!            dk (, dv)          = reduce_scatter      fp32, the only reduction of them
//!            dsink              = all_reduce          fp32
//! ```
//!
//! Lists name keys by position. Either gathered rows are brought into the order of positions
//! ([`Keys::Reordered`]), or lists are mapped to gathered rows ([`Keys::Remapped`]): one of the two,
//! once. Lists alone decide what a query sees. Positions and lists stay on the device: a key whose
//! position no rank has is in no list, and of two rows with one position the lower counts.

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use super::collectives::Rank;
use super::steps::{Slots, in_workspace};
use crate::arguments::{Argument, Arguments, FLOATS, Parts, read, saved, scratch, write};
use crate::attention::sparse_attention;
use crate::model::tap::Tap;

const CHECK: Arguments = Arguments { operator: "cp_sparse_attention" };
const BF16: [DType; 1] = [DType::Bf16];

/// How lists, which name keys by position, find gathered rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Gathered rows are brought into the order of positions.
    Reordered,
    /// Each list is mapped to gathered rows.
    Remapped,
}

/// The options of a call, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Those of the attention.
    pub attention: sparse_attention::Options,
    /// Keys of all ranks together, padding not counted.
    pub num_keys: usize,
    /// How lists find gathered rows.
    pub keys: Keys,
}

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    ranks: usize,
    /// Queries of this rank.
    num_tokens: usize,
    /// Rows of each rank's keys, padding included.
    rows: usize,
    head_dim: usize,
    /// The width of a separate V, otherwise 0.
    v_dim: usize,
    topk: usize,
    num_keys: usize,
    keys: Keys,
}

impl Extents {
    /// Rows that the attention sees.
    fn attended(self) -> usize {
        match self.keys {
            Keys::Reordered => self.num_keys,
            Keys::Remapped => self.gathered(),
        }
    }

    fn gathered(self) -> usize {
        self.ranks * self.rows
    }
}

/// Parts of the scratch memory, as byte offsets.
struct Workspace {
    positions: usize,
    slots: usize,
    k: usize,
    v: usize,
    ordered_k: usize,
    ordered_v: usize,
    indices: usize,
    /// `[attended, head_dim + v_dim]` f32: dK and dV by rows that the attention sees.
    dkv: usize,
    /// The same by gathered row, for [`Keys::Reordered`].
    slotted: usize,
    /// `[rows, head_dim + v_dim]` f32.
    reduced: usize,
    attention: usize,
    bytes: usize,
}

impl Workspace {
    fn of(extents: Extents, backward: bool, attention: usize) -> Self {
        let Extents { rows, head_dim, v_dim, num_tokens, topk, num_keys, keys, .. } = extents;
        let (gathered, width) = (extents.gathered(), head_dim + v_dim);
        let (reordered, backward) = (usize::from(keys == Keys::Reordered), usize::from(backward));
        let mut parts = Parts::default();
        Self {
            positions: parts.words(&[gathered]),
            slots: parts.words(&[num_keys]),
            k: parts.words(&[gathered, head_dim / 2]),
            v: parts.words(&[gathered, v_dim / 2]),
            ordered_k: parts.words(&[reordered, num_keys, head_dim / 2]),
            ordered_v: parts.words(&[reordered, num_keys, v_dim / 2]),
            indices: parts.words(&[1 - reordered, num_tokens, topk]),
            dkv: parts.words(&[backward, extents.attended(), width]),
            slotted: parts.words(&[backward, reordered, gathered, width]),
            reduced: parts.words(&[backward, rows, width]),
            attention: parts.words(&[attention.div_ceil(4)]),
            bytes: parts.bytes,
        }
    }
}

fn check(views: &Views, options: &Options, ranks: usize, backward: bool) -> Result<Extents> {
    let per_head = |tensor: Argument<'static>| tensor.axes(&["num_tokens", "num_heads"]);
    let values = |tensor: Argument<'static>| {
        tensor.of(&BF16).axes(&["num_tokens", "num_heads", "value_dim"])
    };
    let tensors = [
        read("q").of(&BF16).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read("k").of(&BF16).axes(&["rows", "head_dim"]),
        read("v").of(&BF16).axes(&["rows", "v_dim"]).optional(),
        read("positions").of(&[DType::I32]).axes(&["rows"]),
        read("sink").axes(&["num_heads"]).optional(),
        read("indices").of(&[DType::I32]).axes(&["num_tokens", "topk"]),
        read("topk_length").of(&[DType::I32]).axes(&["num_tokens"]).optional(),
        values(saved("out", backward)).aligned_rows(),
        per_head(saved("lse", backward)),
        per_head(write("max_logits")).when(!backward),
        values(read("dout")).aligned_rows().when(backward),
        per_head(read("dlse")).optional().when(backward),
        write("dq").like("q").aligned_rows().when(backward),
        write("dk").of(&FLOATS).axes(&["rows", "head_dim"]).aligned_rows().when(backward),
        write("dv").axes(&["rows", "v_dim"]).typed("dk").aligned_rows().with(&["v"]).when(backward),
        write("dsink").axes(&["num_heads"]).with(&["sink"]).when(backward),
        scratch("workspace", 16),
    ];
    let mut call = CHECK.signature(views, tensors).extent("head_dim", 16, 576);
    let axes = ["num_tokens", "rows", "head_dim", "v_dim", "topk"];
    let [num_tokens, rows, head_dim, v_dim, topk] = call.bind(axes)?;
    let Options { num_keys, keys, .. } = *options;
    let extents = Extents { ranks, num_tokens, rows, head_dim, v_dim, topk, num_keys, keys };
    CHECK.int32("num_keys", num_keys)?;
    if num_tokens > rows {
        return CHECK.refuse("q", format!("{num_tokens} tokens of {rows} rows of keys"));
    }
    if num_keys > extents.gathered() {
        let gathered = extents.gathered();
        return CHECK.refuse("num_keys", format!("{num_keys} of {gathered} rows of all ranks"));
    }
    Ok(extents)
}

/// What the attention takes, of the sizes that it has on this rank.
fn attended(views: &Views, extents: Extents) -> Views {
    // Only shapes count: it asks for the bytes of its workspace.
    let names = ["q", "k", "v", "sink", "indices", "topk_length"];
    let mut attended = views.only(&names);
    for name in ["k", "v"] {
        if let Some(view) = views.get(name) {
            let shape = [extents.attended(), view.shape[1]];
            attended.put(name, TensorView::dense(name, view.address, view.dtype, &shape));
        }
    }
    attended
}

/// Bytes of scratch memory that [`forward`] and [`backward`] need on one of `ranks` ranks, from
/// `q`, `k`, `v`, `sink` and the lists of the forward.
///
/// # Errors
/// Tensors and options that the attention rejects.
pub fn workspace_bytes(views: &Views, options: &Options, ranks: usize) -> Result<usize> {
    let (q, k, lists) = (&views["q"], &views["k"], &views["indices"]);
    let extents = Extents {
        ranks,
        num_tokens: q.shape[0],
        rows: k.shape[0],
        head_dim: k.shape[1],
        v_dim: views.get("v").map_or(0, |v| v.shape[1]),
        topk: lists.shape[1],
        num_keys: options.num_keys,
        keys: options.keys,
    };
    let attended = attended(views, extents);
    let own = sparse_attention::workspace_bytes(&attended, options.attention, DType::F32)?;
    Ok(Workspace::of(extents, true, own).bytes)
}

/// Launches the forward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It writes `out`, `lse` and `max_logits`, and takes no tensor that only the backward has:
///
/// - `q` `[num_tokens, num_heads, head_dim]` bf16: this rank's queries; 0 are allowed;
/// - `k` `[rows, head_dim]` bf16: this rank's keys, the queries' own rows first, then padding, so
///   that all ranks have as many;
/// - `v` `[rows, v_dim]` bf16; absent where the values are the first columns of the keys;
/// - `positions` `[rows]` i32: where each key is among all, -1 for padding, as
///   [`Shards::positions`](super::Shards::positions) has them: each position on one rank;
/// - `sink` `[num_heads]` f32, the same on all ranks; absent without sinks;
/// - `indices` `[num_tokens, topk]` i32: positions of keys. Others are no slots;
/// - `topk_length` `[num_tokens]` i32; absent where it is `topk` everywhere;
/// - `out` `[num_tokens, num_heads, v_dim]` bf16, `lse` and `max_logits` `[num_tokens, num_heads]`
///   f32, as [`sparse_attention::forward`] writes them;
/// - `workspace`: at least [`workspace_bytes`] bytes, 16-byte aligned.
///
/// # Errors
/// A rejected argument, a device that is no rank; errors of the kernels and of the world.
pub fn forward(
    device: &Device,
    views: &Views,
    options: &Options,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let extents = check(views, options, rank.world.size(), false)?;
    let call = Parallel::new(views, options, extents, false)?;
    let slots = call.gather(&mut rank)?;
    let attended = call.attended(&rank, &slots)?;
    let ran = rank.attention(views, attended, options.attention)?;
    Ok(ran.into_iter().chain(["all_gather".into()]).chain(rank.kernels_of_rows()).collect())
}

/// Launches the backward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It reads the inputs of [`forward`], and:
///
/// - `out` and `lse` of the forward, unchanged;
/// - `dout` as `out`, `dlse` as `lse`: gradients of them; `dlse` is absent where it is zero;
/// - `dq` as `q`;
/// - `dk` `[rows, head_dim]`, bf16 or f32: of this rank's keys, the sum over the queries of all
///   ranks; 0 for padding;
/// - `dv` `[rows, v_dim]`, the type of `dk`, with `v`;
/// - `dsink` `[num_heads]` f32, with `sink`: the sum over ranks, on each of them;
/// - `workspace` as in [`forward`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    device: &Device,
    views: &Views,
    options: &Options,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let extents = check(views, options, rank.world.size(), true)?;
    let call = Parallel::new(views, options, extents, true)?;
    let slots = call.gather(&mut rank)?;
    let attended = call.attended(&rank, &slots)?;
    let mut ran = call.gradients(&mut rank, attended)?;
    ran.extend(call.scatter(&mut rank, &slots)?);
    ran.extend(["all_gather".into(), "reduce_scatter".into()]);
    ran.extend(rank.sum_sink(views)?);
    ran.extend(rank.kernels_of_rows());
    Ok(ran)
}

/// A checked call of one rank.
struct Parallel<'a> {
    views: &'a Views,
    options: &'a Options,
    extents: Extents,
    workspace: Workspace,
}

impl<'a> Parallel<'a> {
    fn new(
        views: &'a Views,
        options: &'a Options,
        extents: Extents,
        backward: bool,
    ) -> Result<Self> {
        let own = match backward {
            true => sparse_attention::workspace_bytes(
                &attended(views, extents),
                options.attention,
                DType::F32,
            )?,
            false => 0,
        };
        let workspace = Workspace::of(extents, backward, own);
        CHECK.holds("workspace", &views["workspace"], workspace.bytes)?;
        Ok(Self { views, options, extents, workspace })
    }

    fn scratch(&self, name: &str, offset: usize, dtype: DType, shape: &[usize]) -> TensorView {
        in_workspace(self.views, name, offset, dtype, shape)
    }

    /// Gathers positions, keys and values of all ranks.
    fn gather(&self, rank: &mut Rank<'_>) -> Result<Slots> {
        let Extents { head_dim, v_dim, num_keys, .. } = self.extents;
        let (rows, parts) = (self.extents.gathered(), &self.workspace);
        let slots =
            rank.gather_slots(self.views, [parts.positions, parts.slots], [rows, num_keys])?;
        let k = self.scratch("k", parts.k, DType::Bf16, &[rows, head_dim]);
        rank.all_gather("k", &self.views["k"], &k)?;
        if let Some(v) = self.views.get("v") {
            let all = self.scratch("v", parts.v, DType::Bf16, &[rows, v_dim]);
            rank.all_gather("v", v, &all)?;
        }
        Ok(slots)
    }

    /// The tensors that the attention reads: keys and lists that go together.
    fn attended(&self, rank: &Rank<'_>, slots: &Slots) -> Result<Views> {
        let Extents { head_dim, v_dim, num_keys, num_tokens, topk, keys, .. } = self.extents;
        let (rows, parts) = (self.extents.gathered(), &self.workspace);
        let mut views = self.views.only(&["q", "sink", "indices", "topk_length"]);
        let tensors =
            [("k", head_dim, parts.k, parts.ordered_k), ("v", v_dim, parts.v, parts.ordered_v)];
        for (name, width, gathered, ordered) in tensors {
            if self.views.get(name).is_none() {
                continue;
            }
            let gathered = self.scratch(name, gathered, DType::Bf16, &[rows, width]);
            if keys == Keys::Remapped {
                views.put(name, gathered);
                continue;
            }
            let ordered = self.scratch(name, ordered, DType::Bf16, &[num_keys, width]);
            rank.copy_rows(&gathered, &ordered, Some(&slots.slots))?;
            views.put(name, ordered);
        }
        if keys == Keys::Remapped {
            let mapped = self.scratch("indices", parts.indices, DType::I32, &[num_tokens, topk]);
            rank.map_lists(&self.views["indices"], &slots.slots, &mapped)?;
            views.put("indices", mapped);
        }
        Ok(views)
    }

    /// dq, dsink of own queries, and dK (and dV) of all rows by them.
    fn gradients(&self, rank: &mut Rank<'_>, attended: Views) -> Result<Vec<String>> {
        let Extents { head_dim, v_dim, .. } = self.extents;
        let all = self.rows_of("dk", self.workspace.dkv, self.extents.attended());
        let mut views = attended
            .with("dk", &all.narrow(1, 0, head_dim)?)
            .with("workspace", &self.scratch_of_attention());
        if v_dim > 0 {
            let dv = TensorView { name: "dv".into(), ..all.narrow(1, head_dim, v_dim)? };
            views.put("dv", dv);
        }
        rank.attention_backward(self.views, views, self.options.attention)
    }

    fn scratch_of_attention(&self) -> TensorView {
        let bytes = self.workspace.bytes - self.workspace.attention;
        self.scratch("workspace", self.workspace.attention, DType::U8, &[bytes])
    }

    /// fp32 rows of dK and dV, side by side.
    fn rows_of(&self, name: &str, offset: usize, rows: usize) -> TensorView {
        let width = self.extents.head_dim + self.extents.v_dim;
        self.scratch(name, offset, DType::F32, &[rows, width])
    }

    /// Sums dK and dV over ranks, and writes the rows of this rank. Returns the kernel that rounded
    /// them, where they are rounded.
    fn scatter(&self, rank: &mut Rank<'_>, slots: &Slots) -> Result<Option<String>> {
        let Extents { rows, head_dim, v_dim, keys, .. } = self.extents;
        let parts = &self.workspace;
        let all = self.rows_of("dkv", parts.dkv, self.extents.attended());
        let all = match keys {
            Keys::Remapped => all,
            Keys::Reordered => {
                let slotted = self.rows_of("dkv", parts.slotted, self.extents.gathered());
                rank.by_slot(&all, &slotted, slots)?;
                slotted
            }
        };
        let reduced = self.rows_of("dkv", parts.reduced, rows);
        rank.reduce_scatter("dkv", &all, &reduced)?;
        let (own, mut ran) = ([("dk", 0, head_dim), ("dv", head_dim, v_dim)], None);
        let of_module = self.options.attention.v_dim.unwrap_or(v_dim);
        for (name, from, width) in own {
            let Some(target) = self.views.get(name) else { continue };
            ran = rank.write_rows(&reduced.narrow(1, from, width)?, target, of_module)?;
        }
        Ok(ran)
    }
}
