//! `cp_indexer` (training 1, 2, 5, 6, 7, 10): a step of the indexer's training, of a rank's queries
//! over the keys of all ranks.
//!
//! ```text
//! forward    positions, index_k, k = all_gather     then in the order of positions
//!            logits           = indexer_logits(index_q, index_k, index_w)   of keys ks up to ke
//!            indices, values  = topk(logits)        rows of all keys: ks is added
//!            target           = score_recompute(q, k, lse, indices)
//!            kl, idx_lse      = indexer_loss(values, target, indices)
//!            loss             = all_reduce          a mean divides by the queries of all ranks
//! backward   the same gather of index_k: nothing is kept
//!            dvalues          = indexer_loss_backward(values, target, idx_lse, grad_loss)
//!            dindex_q, dindex_w, dindex_k = indexer_backward    of all keys, by own queries
//!            dindex_k         = reduce_scatter      fp32, the only reduction of it
//! ```
//!
//! Causality is in `ks` and `ke`, which [`ranges`](super::ranges::ranges) makes of global positions.
//! Both are held to the keys, as all kernels here do: positions and ranges stay on the device.
//! Gradients of queries and of their weights are a rank's own: they have no reduction.

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use super::collectives::Rank;
use super::steps::{Slots, in_workspace};
use crate::arguments::{Argument, Arguments, Parts, read, saved, scratch, write};
use crate::implementation::Implementation;
use crate::indexer::indexer_backward::{self, HEAD_DIM, KeyGradients};
use crate::indexer::indexer_logits::{self, Operands};
use crate::indexer::indexer_loss::{self, Form, Reduction};
use crate::indexer::{score_recompute, topk};
use crate::model::tap::Tap;

const CHECK: Arguments = Arguments { operator: "cp_indexer" };
const BF16: [DType; 1] = [DType::Bf16];
const I32: [DType; 1] = [DType::I32];

/// The options of a call, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Queries of all ranks together, padding rows included: what a mean divides by.
    pub num_tokens: usize,
    /// Keys of all ranks together, padding not counted.
    pub num_keys: usize,
    /// Multiplies the indexer's logits, finite and above 0.
    pub sm_scale: f32,
    /// Multiplies the attention's products, finite and above 0.
    pub softmax_scale: f32,
    /// Which definition of the divergence.
    pub form: Form,
    /// What the sum over the rows of all ranks is divided by: all of them, or nothing.
    pub reduction: Reduction,
    /// Multiplies the loss; finite.
    pub loss_coeff: f32,
    /// How each rank sums `dindex_k` over its own queries.
    pub key_gradients: KeyGradients,
    /// Which kernels compute logits and target.
    pub implementation: Implementation,
}

impl Options {
    fn of_logits(&self) -> indexer_logits::Options {
        indexer_logits::Options {
            operands: Operands::Bf16,
            ratio: 1,
            page_size: indexer_logits::PAGE_SIZES[0],
            sm_scale: self.sm_scale,
            clean_logits: true,
            implementation: self.implementation,
        }
    }

    fn of_target(&self) -> score_recompute::Options {
        let Self { softmax_scale, implementation, .. } = *self;
        score_recompute::Options { global: true, ratio: 1, softmax_scale, implementation }
    }

    /// A sum over the own rows, times what the mean over all rows has as a factor.
    fn of_loss(&self) -> indexer_loss::Options {
        let divisor = match self.reduction {
            Reduction::Sum => 1.0,
            _ => self.num_tokens.max(1) as f32,
        };
        indexer_loss::Options {
            num_keys: self.num_keys,
            global: true,
            ratio: 1,
            form: self.form,
            reduction: Reduction::Sum,
            loss_coeff: self.loss_coeff / divisor,
            lse_given: false,
        }
    }

    fn of_gradients(&self) -> indexer_backward::Options {
        let Self { sm_scale, key_gradients, .. } = *self;
        indexer_backward::Options { global: true, ratio: 1, sm_scale, key_gradients }
    }

    fn check(&self) -> Result<()> {
        CHECK.positive("sm_scale", self.sm_scale)?;
        CHECK.positive("softmax_scale", self.softmax_scale)?;
        CHECK.int32("num_tokens", self.num_tokens)?;
        CHECK.int32("num_keys", self.num_keys)?;
        if !self.loss_coeff.is_finite() {
            return CHECK.refuse("loss_coeff", format!("{} must be finite", self.loss_coeff));
        }
        if self.reduction == Reduction::MeanOfRealRows {
            return CHECK.refuse("reduction", "mean_of_real_rows: no row of a step is padding");
        }
        Ok(())
    }
}

/// The sizes of a call.
#[derive(Clone, Copy, Debug)]
struct Extents {
    ranks: usize,
    num_tokens: usize,
    /// Rows of each rank's keys, padding included.
    rows: usize,
    /// Width of the attention's keys; 0 in the backward.
    head_dim: usize,
    num_keys: usize,
}

impl Extents {
    fn gathered(self) -> usize {
        self.ranks * self.rows
    }
}

/// Parts of the scratch memory, as byte offsets.
struct Workspace {
    positions: usize,
    slots: usize,
    /// Rows as they were gathered, of one tensor at a time.
    gathered: usize,
    index_k: usize,
    k: usize,
    /// `[2, num_tokens]` i32: the first key of each token, and how many it scores.
    ranges: usize,
    /// `[num_keys, 128]` f32: dindex_k of all keys, then by gathered row.
    dk: usize,
    slotted: usize,
    gradients: usize,
    bytes: usize,
}

impl Workspace {
    fn of(extents: Extents, backward: bool, gradients: usize) -> Self {
        let Extents { num_tokens, head_dim, num_keys, .. } = extents;
        let (gathered, backward) = (extents.gathered(), usize::from(backward));
        let mut parts = Parts::default();
        Self {
            positions: parts.words(&[gathered]),
            slots: parts.words(&[num_keys]),
            gathered: parts.words(&[gathered, HEAD_DIM.max(head_dim) / 2]),
            index_k: parts.words(&[num_keys, HEAD_DIM / 2]),
            k: parts.words(&[num_keys, head_dim / 2]),
            ranges: parts.words(&[2, num_tokens]),
            dk: parts.words(&[backward, num_keys, HEAD_DIM]),
            slotted: parts.words(&[backward, gathered, HEAD_DIM]),
            gradients: parts.words(&[gradients.div_ceil(4)]),
            bytes: parts.bytes,
        }
    }
}

fn tensors(backward: bool) -> Vec<Argument<'static>> {
    const LISTS: &[&str] = &["num_tokens", "topk"];
    let per_token = |tensor: Argument<'static>| tensor.axes(&["num_tokens"]);
    let of_forward = |tensor: Argument<'static>| tensor.when(!backward);
    let of_backward = |tensor: Argument<'static>| tensor.when(backward);
    let queries = &["num_tokens", "index_heads", "index_head_dim"];
    let keys = &["rows", "index_head_dim"];
    vec![
        read("index_q").of(&BF16).axes(queries).aligned_rows(),
        read("index_k").of(&BF16).axes(keys),
        read("index_w").axes(&["num_tokens", "index_heads"]),
        read("positions").of(&I32).axes(&["rows"]),
        of_forward(read("q").of(&BF16).axes(&["num_tokens", "num_heads", "head_dim"]))
            .aligned_rows(),
        of_forward(read("k").of(&BF16).axes(&["rows", "head_dim"])),
        of_forward(read("lse").axes(&["num_tokens", "num_heads"])),
        of_forward(per_token(read("ks").of(&I32))),
        of_forward(per_token(read("ke").of(&I32))),
        of_forward(write("logits").axes(&["num_tokens", "columns"])),
        saved("indices", backward).of(&I32).axes(LISTS),
        saved("values", backward).axes(LISTS),
        saved("target", backward).axes(LISTS),
        per_token(saved("idx_lse", backward)),
        of_forward(write("loss").axes(&["one"])),
        of_forward(per_token(write("kl"))),
        of_backward(read("grad_loss").axes(&["one"])),
        of_backward(write("dvalues").like("values")),
        of_backward(write("dindex_q").like("index_q").aligned_rows()),
        of_backward(write("dindex_k").axes(keys)),
        of_backward(write("dindex_w").like("index_w")),
        scratch("workspace", 16),
    ]
}

fn check(views: &Views, options: &Options, ranks: usize, backward: bool) -> Result<Extents> {
    options.check()?;
    let call = CHECK.signature(views, tensors(backward)).given("index_head_dim", HEAD_DIM);
    let [num_tokens, rows, head_dim] =
        call.given("one", 1).bind(["num_tokens", "rows", "head_dim"])?;
    let num_keys = options.num_keys;
    let extents = Extents { ranks, num_tokens, rows, head_dim, num_keys };
    if num_keys > extents.gathered() {
        let gathered = extents.gathered();
        return CHECK.refuse("num_keys", format!("{num_keys} of {gathered} rows of all ranks"));
    }
    if num_tokens > options.num_tokens {
        let all = options.num_tokens;
        return CHECK.refuse("num_tokens", format!("{all} of all ranks, and {num_tokens} here"));
    }
    Ok(extents)
}

/// What the gradients' launch takes, of keys in the order of positions.
fn of_gradients(views: &Views, k: &TensorView, dk: &TensorView) -> Views {
    let own = ["index_q", "index_w", "dvalues", "indices", "dindex_q", "dindex_w"];
    let names = [
        ("index_q", "q"),
        ("index_w", "w"),
        ("dvalues", "dlogits"),
        ("dindex_q", "dq"),
        ("dindex_w", "dw"),
    ];
    views.only(&own).renamed(&names).with("k", k).with("dk", dk)
}

/// Bytes of scratch memory of the gradients' launch.
fn gradient_bytes(views: &Views, options: &Options) -> Result<usize> {
    let shape = [options.num_keys, HEAD_DIM];
    // Only shapes count, of memory that no other tensor has.
    let k = TensorView::dense("k", 16, DType::Bf16, &shape);
    let after = k.address + (k.elements() * k.dtype.size()) as u64;
    let dk = TensorView::dense("dk", after, DType::F32, &shape);
    indexer_backward::workspace_bytes(&of_gradients(views, &k, &dk), options.of_gradients())
}

/// Bytes of scratch memory that [`forward`] needs on one of `ranks` ranks, or [`backward`] where
/// the tensors are those of the backward.
///
/// # Errors
/// Tensors and options that the indexer's gradients reject.
pub fn workspace_bytes(views: &Views, options: &Options, ranks: usize) -> Result<usize> {
    let backward = views.get("dindex_k").is_some();
    let extents = Extents {
        ranks,
        num_tokens: views["index_q"].shape[0],
        rows: views["index_k"].shape[0],
        head_dim: views.get("k").filter(|_| !backward).map_or(0, |k| k.shape[1]),
        num_keys: options.num_keys,
    };
    let gradients = if backward { gradient_bytes(views, options)? } else { 0 };
    Ok(Workspace::of(extents, backward, gradients).bytes)
}

/// Launches the forward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It takes no tensor that only the backward has:
///
/// - `index_q` `[num_tokens, index_heads, 128]` bf16, `index_w` `[num_tokens, index_heads]` f32:
///   the indexer's queries of this rank and the weights of its heads; 0 tokens are allowed;
/// - `index_k` `[rows, 128]` bf16: the indexer's keys of this rank, then padding, so that all ranks
///   have as many;
/// - `positions` `[rows]` i32: where each key is among all, -1 for padding, as
///   [`Shards::positions`](super::Shards::positions) has them: each position on one rank;
/// - `q` `[num_tokens, num_heads, head_dim]`, `k` `[rows, head_dim]` bf16, `lse` `[num_tokens,
///   num_heads]` f32: the attention's, of the same tokens and keys;
/// - `ks`, `ke` `[num_tokens]` i32: the keys that each token scores, by position, as
///   [`ranges`](super::ranges::ranges) has them;
/// - `logits` `[num_tokens, columns]` f32: column `c` is key `ks + c`; -infinity from `ke` on;
/// - `indices` `[num_tokens, topk]` i32: positions of the largest logits, ascending, then -1;
///   `values` as it, f32: their logits, then -infinity; `target` as `values`;
/// - `idx_lse`, `kl` `[num_tokens]` f32, as [`indexer_loss::forward`] writes them;
/// - `loss` `[1]` f32: that of all ranks, on each of them;
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
    let slots = call.slots(&mut rank)?;
    let index_k = call.ordered(&mut rank, "index_k", call.workspace.index_k, &slots)?;
    let k = call.ordered(&mut rank, "k", call.workspace.k, &slots)?;
    let mut ran = call.lists(&mut rank, &index_k)?;
    ran.extend(call.loss(&mut rank, &k)?);
    rank.all_reduce("loss", &views["loss"])?;
    ran.extend(["all_gather".into(), "all_reduce".into()]);
    ran.extend(rank.kernels_of_rows());
    Ok(ran)
}

/// Launches the backward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It reads `index_q`, `index_k`, `index_w` and `positions` of [`forward`], and:
///
/// - `indices`, `values`, `target` and `idx_lse` of the forward, unchanged;
/// - `grad_loss` `[1]` f32, read on the device, the same on all ranks;
/// - `dvalues` as `values`, `dindex_q` as `index_q`, `dindex_w` as `index_w`: of own tokens;
/// - `dindex_k` `[rows, 128]` f32: of this rank's keys, the sum over the queries of all ranks; 0
///   for padding;
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
    let slots = call.slots(&mut rank)?;
    let index_k = call.ordered(&mut rank, "index_k", call.workspace.index_k, &slots)?;
    let mut ran = call.gradients(&mut rank, &index_k)?;
    call.scatter(&mut rank, &slots)?;
    ran.extend(["all_gather".into(), "reduce_scatter".into()]);
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
        let extents = Extents { head_dim: if backward { 0 } else { extents.head_dim }, ..extents };
        let gradients = if backward { gradient_bytes(views, options)? } else { 0 };
        let workspace = Workspace::of(extents, backward, gradients);
        CHECK.holds("workspace", &views["workspace"], workspace.bytes)?;
        Ok(Self { views, options, extents, workspace })
    }

    fn scratch(&self, name: &str, offset: usize, dtype: DType, shape: &[usize]) -> TensorView {
        in_workspace(self.views, name, offset, dtype, shape)
    }

    fn slots(&self, rank: &mut Rank<'_>) -> Result<Slots> {
        let Extents { num_keys, .. } = self.extents;
        let (rows, parts) = (self.extents.gathered(), &self.workspace);
        rank.gather_slots(self.views, [parts.positions, parts.slots], [rows, num_keys])
    }

    /// Keys of all ranks, in the order of positions.
    fn ordered(
        &self,
        rank: &mut Rank<'_>,
        name: &'static str,
        offset: usize,
        slots: &Slots,
    ) -> Result<TensorView> {
        let (own, width) = (&self.views[name], self.views[name].shape[1]);
        let shape = [self.extents.gathered(), width];
        let gathered = self.scratch(name, self.workspace.gathered, DType::Bf16, &shape);
        rank.all_gather(name, own, &gathered)?;
        let ordered = self.scratch(name, offset, DType::Bf16, &[self.extents.num_keys, width]);
        rank.copy_rows(&gathered, &ordered, Some(&slots.slots))?;
        Ok(ordered)
    }

    /// The logits, and the lists of their largest ones.
    fn lists(&self, rank: &mut Rank<'_>, index_k: &TensorView) -> Result<Vec<String>> {
        let scored = self.views.only(&["index_q", "index_w", "ks", "ke", "logits"]);
        let scored = scored.renamed(&[("index_q", "q"), ("index_w", "w")]).with("k", index_k);
        let logits = rank.launch("indexer_logits", "forward", &scored, |device| {
            indexer_logits::forward(device, &scored, &self.options.of_logits())
        })?;
        let [offsets, lengths] = self.ranges(rank)?;
        let listed = self.views.only(&["logits", "indices", "values"]);
        let listed = listed.renamed(&[("logits", "scores")]).with("offsets", &offsets);
        let listed = listed.with("lengths", &lengths);
        // Without pages no size of them counts.
        let topk =
            rank.launch("topk", "forward", &listed, |device| topk::forward(device, &listed, 1))?;
        Ok(logits.into_iter().chain(topk.map(String::from)).collect())
    }

    /// The first key of each token, and how many it scores.
    fn ranges(&self, rank: &Rank<'_>) -> Result<[TensorView; 2]> {
        let Extents { num_tokens, num_keys, .. } = self.extents;
        let shape = [2, num_tokens];
        let both = self.scratch("ranges", self.workspace.ranges, DType::I32, &shape);
        let of = |at: usize, name: &str| {
            TensorView::dense(
                name,
                both.address + (4 * at * num_tokens) as u64,
                DType::I32,
                &[num_tokens],
            )
        };
        let ranges = [of(0, "offsets"), of(1, "lengths")];
        let [offsets, lengths] = &ranges;
        rank.ranges([&self.views["ks"], &self.views["ke"]], [offsets, lengths], num_keys)?;
        Ok(ranges)
    }

    /// The target, and the divergence from it, of the own rows.
    fn loss(&self, rank: &mut Rank<'_>, k: &TensorView) -> Result<Vec<String>> {
        let attended = self.views.only(&["q", "lse", "indices", "target"]).with("k", k);
        let target = rank.launch("score_recompute", "target", &attended, |device| {
            score_recompute::target(device, &attended, self.options.of_target())
        })?;
        let compared = self.views.only(&["values", "target", "indices", "idx_lse", "loss", "kl"]);
        let compared = compared.renamed(&[("values", "logits")]);
        let loss = rank.launch("indexer_loss", "forward", &compared, |device| {
            indexer_loss::forward(device, &compared, self.options.of_loss())
        })?;
        Ok(target.into_iter().chain(loss.into_iter().flatten().map(String::from)).collect())
    }

    fn dk(&self) -> TensorView {
        let shape = [self.extents.num_keys, HEAD_DIM];
        self.scratch("dk", self.workspace.dk, DType::F32, &shape)
    }

    /// Gradients of the listed logits, of the own queries and weights, and by them of all keys.
    fn gradients(&self, rank: &mut Rank<'_>, index_k: &TensorView) -> Result<Vec<String>> {
        let names = ["values", "target", "indices", "idx_lse", "grad_loss", "dvalues"];
        let compared = self.views.only(&names);
        let compared = compared.renamed(&[("values", "logits"), ("dvalues", "dlogits")]);
        let loss = rank.launch("indexer_loss", "backward", &compared, |device| {
            indexer_loss::backward(device, &compared, self.options.of_loss())
        })?;
        let mut views = of_gradients(self.views, index_k, &self.dk());
        let bytes = self.workspace.bytes - self.workspace.gradients;
        if bytes > 0 {
            let offset = self.workspace.gradients;
            views.put("workspace", self.scratch("workspace", offset, DType::U8, &[bytes]));
        }
        let ran = rank.launch("indexer_backward", "backward", &views, |device| {
            indexer_backward::backward(device, &views, self.options.of_gradients())
        })?;
        let loss = loss.map(String::from).into_iter();
        Ok(loss.chain(ran.into_iter().flatten()).map(|path| format!("backward {path}")).collect())
    }

    /// Sums the gradient of the keys over ranks, each of which gets that of its own.
    fn scatter(&self, rank: &mut Rank<'_>, slots: &Slots) -> Result<()> {
        let shape = [self.extents.gathered(), HEAD_DIM];
        let slotted = self.scratch("dindex_k", self.workspace.slotted, DType::F32, &shape);
        rank.by_slot(&self.dk(), &slotted, slots)?;
        rank.reduce_scatter("dindex_k", &slotted, &self.views["dindex_k"])
    }
}
