//! `indexer_loss`: launchers of `kernels/cuda/indexer/indexer_loss.cu` and `indexer_loss_sum.cu`
//! (training 6 and 7).

use serde::{Deserialize, Serialize};

use crate::arguments::{Argument, Arguments, Signature, read, saved, scratch, write};
use dsv4_runtime::params::Params;
use dsv4_runtime::source::{Module, module};
use dsv4_runtime::{DType, Device, Result, TensorView, Views};

const FILE: &str = "indexer_loss.cu";
const SUM_FILE: &str = "indexer_loss_sum.cu";
const CHECK: Arguments = Arguments { operator: "indexer_loss" };
/// Threads of a block: for rows of up to [`HELD`] times this many slots, and beyond.
const THREADS: [usize; 4] = [32, 64, 256, 512];
/// Slots of a row that a thread holds.
const HELD: usize = 16;

/// Which definition of the divergence, for value and gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// (E): logarithms of the softmax values.
    Exact,
    /// (C): log-probabilities of at least -100, without a gradient below that.
    ClippedLog,
}

/// What the sum over the rows is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// All rows, including empty and padding rows.
    MeanOfRows,
    /// The rows that are not padding, at least 1. Requires a `row_mask`.
    MeanOfRealRows,
    /// Nothing.
    Sum,
}

/// The options of a call.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Keys of all sequences.
    pub num_keys: usize,
    /// Whether `indices` are rows of all keys; otherwise they count from the first key of the
    /// token's sequence.
    pub global: bool,
    /// Tokens that one key covers, at least 1. Used where there are no `indices`.
    pub ratio: usize,
    /// Which definition of the divergence.
    pub form: Form,
    /// What the sum over the rows is divided by.
    pub reduction: Reduction,
    /// Multiplies the loss; finite. 0 makes loss and gradients 0.
    pub loss_coeff: f32,
    /// Whether `idx_lse` is given; otherwise the forward computes and stores it.
    pub lse_given: bool,
}

/// The purpose of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Wanted {
    value: bool,
    gradient: bool,
}

/// Every module that the launchers compile.
pub fn modules() -> Vec<Module> {
    let of =
        |threads: usize| [true, false].map(|selected| module(FILE, &defines(threads, selected)));
    THREADS.into_iter().flat_map(of).chain([module(SUM_FILE, &[])]).collect()
}

fn defines(threads: usize, selected: bool) -> Vec<(&'static str, String)> {
    vec![("THREADS", threads.to_string()), ("SELECTED", usize::from(selected).to_string())]
}

/// Kernel and threads for rows of this many slots.
fn kernel_of(slots: usize, vectorised: bool) -> (&'static str, usize) {
    match THREADS.into_iter().find(|threads| slots <= threads * HELD) {
        Some(threads) if vectorised => ("indexer_loss_vector", threads),
        Some(threads) => ("indexer_loss_scalar", threads),
        None => ("indexer_loss_streamed", THREADS[THREADS.len() - 1]),
    }
}

/// Bytes of scratch memory that [`forward`] needs for this many rows without a `kl`.
pub fn workspace_bytes(num_tokens: usize) -> usize {
    4 * num_tokens
}

/// Launches the loss, and with `grad_loss` its gradient. Returns the kernels that ran. The slots of
/// a row are those of a list (sparse, with `indices`), or columns, one for each key of its sequence
/// (dense):
///
/// - `logits` `[num_tokens, topk]` or `[num_tokens, columns]` f32, rows contiguous: the indexer's
///   logits, of the listed keys or of all. Neither they nor the target are used where a slot is
///   not valid;
/// - `target` `[num_tokens, topk]` f32, rows contiguous: the sparse target. The dense form has
///   `scores` `[num_tokens, columns]` f32, rows contiguous, and `l1` `[num_tokens]` f32 instead:
///   the target is `scores / l1`, and 0 where `l1` is 0. A common factor of both, such as
///   `exp(-shift)` of `score_recompute`, cancels;
/// - `indices`, `topk_length`, `q_off`, `cu_q`, `cu_k` i32: which slots are valid, as in
///   [`score_recompute::target`](crate::indexer::score_recompute::target) and
///   [`score_recompute::scores`](crate::indexer::score_recompute::scores). Without sequences there
///   are as many columns as keys;
/// - `row_mask` `[num_tokens]` u8: 0 for a padding row, which has no valid slot; absent without
///   padding rows;
/// - `idx_lse` `[num_tokens]` f32, natural: log-sum-exp of the valid logits. Read with
///   [`Options::lse_given`], otherwise written, `+inf` where a row has no valid slot;
/// - `real_rows` `[1]` i32, written: the number of rows that are not padding; present exactly with
///   [`Reduction::MeanOfRealRows`];
/// - `loss` `[1]` f32; `kl` `[num_tokens]` f32: each row's divergence, neither scaled nor divided;
///   without `kl`, `workspace`, scratch memory of [`workspace_bytes`] bytes;
/// - `grad_loss` `[1]` f32, read on the device, with `dlogits` of the shape of `logits`, rows
///   contiguous: both or neither. `dlogits` may be `logits` (dense) or `target` (sparse) itself.
///
/// # Errors
/// A rejected argument, a compile error, a rejected launch.
pub fn forward(device: &Device, views: &Views, options: Options) -> Result<Vec<&'static str>> {
    let call = Call::check(views, options, true)?;
    let kl = views.get("kl").or(views.get("workspace"));
    let mut ran = Vec::new();
    if call.real_rows.is_some() && views.get("row_mask").is_some() {
        let params = call.signature.params(&["row_mask", "real_rows"]);
        let params = params.i32("num_tokens", call.num_tokens)?;
        device
            .kernel(SUM_FILE, &[], "indexer_loss_count")?
            .launch_blocks("row_mask", 1, &params)?;
        ran.push("indexer_loss_count");
    }
    ran.push(call.launch(device, views, options, kl)?);
    let params =
        CHECK.params().ptr("kl", kl).ptr("real_rows", call.real_rows).ptr("loss", &views["loss"]);
    let params =
        params.i32("num_tokens", call.num_tokens)?.i32("divisor", call.divisor(options))?;
    let params = params.f32("loss_coeff", options.loss_coeff);
    device.kernel(SUM_FILE, &[], "indexer_loss_sum")?.launch_blocks("kl", 1, &params)?;
    ran.push("indexer_loss_sum");
    Ok(ran)
}

/// Launches only the gradient. Returns the kernel that ran. Tensors as in [`forward`], but without
/// `kl`, `loss` and `workspace`. It reads `idx_lse` and `real_rows` as the forward stored them, and
/// needs `grad_loss` and `dlogits`.
///
/// # Errors
/// As [`forward`].
pub fn backward(device: &Device, views: &Views, options: Options) -> Result<&'static str> {
    let options = Options { lse_given: true, ..options };
    Call::check(views, options, false)?.launch(device, views, options, None)
}

/// A call whose arguments were checked.
struct Call<'a> {
    num_tokens: usize,
    slots: usize,
    num_sequences: usize,
    selected: bool,
    signature: Signature<'a>,
    real_rows: Option<&'a TensorView>,
}

impl<'a> Call<'a> {
    fn check(views: &'a Views, options: Options, forward: bool) -> Result<Self> {
        let gradient = !forward || views.get("grad_loss").is_some();
        let selected = check_ranking(views)?;
        let ends = views.get("cu_q").and_then(|cu_q| cu_q.shape.first().copied());
        let num_sequences = ends.map_or(1, |ends| ends.saturating_sub(1));
        let mut signature =
            signature(views, options, Wanted { value: forward, gradient }, selected)
                .given("num_sequences", num_sequences)
                .given("one", 1);
        if !selected && ends.is_none() {
            signature = signature.given("columns", options.num_keys);
        }
        let [num_tokens, topk, columns] = signature.bind(["num_tokens", "topk", "columns"])?;
        if ends == Some(0) {
            return CHECK
                .refuse("cu_q", "shape [0] must have an entry more than there are sequences");
        }
        check_options(views, options)?;
        if let (true, None, Some(workspace)) = (forward, views.get("kl"), views.get("workspace")) {
            CHECK.holds("workspace", workspace, workspace_bytes(num_tokens))?;
        }
        let real_rows =
            views.get("real_rows").filter(|_| options.reduction == Reduction::MeanOfRealRows);
        let slots = if selected { topk } else { columns };
        Ok(Self { num_tokens, slots, num_sequences, selected, signature, real_rows })
    }

    /// The divisor of the sum, unless the device computes it.
    fn divisor(&self, options: Options) -> usize {
        if options.reduction == Reduction::Sum { 1 } else { self.num_tokens.max(1) }
    }

    fn params(&self, views: &Views, options: Options, kl: Option<&TensorView>) -> Result<Params> {
        let target = if self.selected { "target" } else { "scores" };
        let params = self.signature.params(&["logits"]).rows("target", &views[target]);
        let params = self.signature.append(params, &["l1", "row_mask", "indices", "topk_length"]);
        let read = ["cu_q", "cu_k", "q_off", "idx_lse", "grad_loss", "real_rows"];
        let params = self.signature.append(params, &read).ptr("kl", kl);
        let params = self.signature.append(params, &["dlogits"]);
        let params = params.i32("slots", self.slots)?.i32("num_keys", options.num_keys)?;
        let params =
            params.i32("num_sequences", self.num_sequences)?.i32("ratio", options.ratio)?;
        let params =
            params.flag("indices_global", options.global).flag("lse_given", options.lse_given);
        let params = params.flag("clipped", options.form == Form::ClippedLog);
        Ok(params.i32("divisor", self.divisor(options))?.f32("loss_coeff", options.loss_coeff))
    }

    fn launch(
        &self,
        device: &Device,
        views: &Views,
        options: Options,
        kl: Option<&TensorView>,
    ) -> Result<&'static str> {
        let (name, threads) = kernel_of(self.slots, self.signature.vectorised());
        let params = self.params(views, options, kl)?;
        let kernel = device.kernel(FILE, &defines(threads, self.selected), name)?;
        kernel.launch_blocks("logits", self.num_tokens, &params)?;
        Ok(name)
    }
}

fn signature<'a>(
    views: &'a Views,
    options: Options,
    wanted: Wanted,
    selected: bool,
) -> Signature<'a> {
    let Wanted { value, gradient } = wanted;
    let slots: &[&str] =
        if selected { &["num_tokens", "topk"] } else { &["num_tokens", "columns"] };
    let integers = |name: &'static str| read(name).of(&[DType::I32]).optional();
    let rows = |tensor: Argument<'static>| tensor.axes(slots).rows().one_stride();
    let counted = options.reduction == Reduction::MeanOfRealRows;
    let no_kl = value && views.get("kl").is_none();
    let tensors = [
        rows(read("logits")),
        rows(read("target")).when(selected),
        rows(read("scores")).when(!selected),
        read("l1").axes(&["num_tokens"]).when(!selected),
        integers("cu_q").axes(&["ends"]),
        integers("cu_k").axes(&["ends"]).with(&["cu_q"]),
        integers("indices").axes(&["num_tokens", "topk"]).rows().one_stride(),
        integers("topk_length").axes(&["num_tokens"]),
        integers("q_off").axes(&["num_sequences"]),
        read("row_mask").of(&[DType::U8]).axes(&["num_tokens"]).optional(),
        saved("idx_lse", options.lse_given || !value).axes(&["num_tokens"]),
        saved("real_rows", !value).of(&[DType::I32]).axes(&["one"]).when(counted),
        write("loss").axes(&["one"]).when(value),
        write("kl").axes(&["num_tokens"]).optional().when(value),
        scratch("workspace", 4).when(no_kl),
        if value {
            read("grad_loss").axes(&["one"]).optional()
        } else {
            read("grad_loss").axes(&["one"])
        },
        rows(write("dlogits")).may_be(if selected { "target" } else { "logits" }).when(gradient),
    ];
    CHECK.signature(views, tensors)
}

/// Whether there are lists of selected keys. Tensors of one ranking must be absent with the other.
fn check_ranking(views: &Views) -> Result<bool> {
    let present = |name| views.get(name).is_some();
    let selected = present("indices");
    let of_dense = ["scores", "l1", "q_off"].into_iter().find(|name| selected && present(name));
    let of_sparse = ["target", "topk_length"].into_iter().find(|name| !selected && present(name));
    match (of_dense, of_sparse) {
        (Some(name), _) => CHECK.refuse(name, "it must be absent where `indices` are present"),
        (_, Some(name)) => CHECK.refuse(name, "it must be absent without `indices`"),
        _ => Ok(selected),
    }
}

fn check_options(views: &Views, options: Options) -> Result<()> {
    CHECK.int32("num_keys", options.num_keys)?;
    CHECK.int32("ratio", options.ratio)?;
    if options.ratio == 0 {
        return CHECK.refuse("ratio", "0 must be at least 1");
    }
    if !options.loss_coeff.is_finite() {
        return CHECK.refuse("loss_coeff", format!("{} must be finite", options.loss_coeff));
    }
    if options.reduction == Reduction::MeanOfRealRows && views.get("row_mask").is_none() {
        return CHECK.refuse(
            "row_mask",
            "it must be present: the mean is over the rows that it says are no padding",
        );
    }
    Ok(())
}
