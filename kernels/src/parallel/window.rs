//! `cp_window` (training 10): attention over a window of keys, of ranks with consecutive tokens.
//!
//! ```text
//! forward    halo of k   from the ranks before: up to window - 1 rows
//!            out, lse  = attention(q, halo and own k)   by lists of the window
//! backward   the same halo
//!            dq, dk    = attention_backward             of halo and own rows, fp32
//!            halo dk     back to the ranks that have its rows
//!            dk       += what came back                 in the order of ranks
//!            dsink     = all_reduce                     fp32
//! ```
//!
//! A halo ends where a sequence starts, and so do lists.

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use super::collectives::Rank;
use super::halo::Halos;
use super::steps::in_workspace;
use crate::arguments::{Argument, Arguments, FLOATS, Parts, read, saved, scratch, write};
use crate::attention::sparse_attention::{self, RowSums};
use crate::model::tap::Tap;

const CHECK: Arguments = Arguments { operator: "cp_window" };
const BF16: [DType; 1] = [DType::Bf16];

/// The options of a call, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Those of the attention. V is in the keys.
    pub attention: sparse_attention::Options,
    /// Keys that a token sees, itself included: at least 1.
    pub window: usize,
}

/// The sizes of a call on this rank.
#[derive(Clone, Copy, Debug)]
struct Extents {
    num_tokens: usize,
    head_dim: usize,
    halo: usize,
    /// Rows of gradients that come back.
    incoming: usize,
    /// Sequences that have own tokens.
    sequences: usize,
    window: usize,
}

impl Extents {
    fn new(num_tokens: usize, head_dim: usize, window: usize, halos: &Halos, rank: usize) -> Self {
        let incoming = halos.sends(rank).iter().map(|(_, part)| part.len()).sum();
        let (halo, sequences) = (halos.halo(rank).len(), halos.starts(rank).len());
        Self { num_tokens, head_dim, halo, incoming, sequences, window }
    }

    /// Rows that the attention sees: the halo, then the own ones.
    fn rows(self) -> usize {
        self.halo + self.num_tokens
    }
}

/// Parts of the scratch memory, as byte offsets.
struct Workspace {
    k: usize,
    indices: usize,
    /// The row of the first key of each sequence that has own tokens.
    starts: usize,
    dk: usize,
    incoming: usize,
    /// The own row of each incoming one.
    keys: usize,
    sums: usize,
    attention: usize,
    bytes: usize,
}

impl Workspace {
    fn of(extents: Extents, attention: usize) -> Self {
        let Extents { num_tokens, head_dim, incoming, window, .. } = extents;
        let mut parts = Parts::default();
        Self {
            k: parts.words(&[extents.rows(), head_dim / 2]),
            indices: parts.words(&[num_tokens, window]),
            starts: parts.words(&[extents.sequences]),
            dk: parts.words(&[extents.rows(), head_dim]),
            incoming: parts.words(&[incoming, head_dim]),
            keys: parts.words(&[incoming]),
            sums: parts.words(&[RowSums::words(incoming, num_tokens)]),
            attention: parts.words(&[attention.div_ceil(4)]),
            bytes: parts.bytes,
        }
    }
}

fn check(
    views: &Views,
    options: &Options,
    halos: &Halos,
    rank: &Rank<'_>,
    backward: bool,
) -> Result<Extents> {
    let per_head = |tensor: Argument<'static>| tensor.axes(&["num_tokens", "num_heads"]);
    let values =
        |tensor: Argument<'static>| tensor.of(&BF16).axes(&["num_tokens", "num_heads", "v_dim"]);
    let tensors = [
        read("q").of(&BF16).axes(&["num_tokens", "num_heads", "head_dim"]).aligned_rows(),
        read("k").of(&BF16).axes(&["num_tokens", "head_dim"]),
        read("sink").axes(&["num_heads"]).optional(),
        values(saved("out", backward)).aligned_rows(),
        per_head(saved("lse", backward)),
        per_head(write("max_logits")).when(!backward),
        values(read("dout")).aligned_rows().when(backward),
        per_head(read("dlse")).optional().when(backward),
        write("dq").like("q").aligned_rows().when(backward),
        write("dk").of(&FLOATS).axes(&["num_tokens", "head_dim"]).aligned_rows().when(backward),
        write("dsink").axes(&["num_heads"]).with(&["sink"]).when(backward),
        scratch("workspace", 16),
    ];
    let mut call = CHECK.signature(views, tensors).extent("head_dim", 16, 576);
    let [num_tokens, head_dim] = call.bind(["num_tokens", "head_dim"])?;
    halos.check(CHECK.operator, rank.world.size())?;
    let own = halos.own(rank.world.rank()).len();
    if num_tokens != own {
        return CHECK.refuse("q", format!("{num_tokens} tokens, and the partition has {own} here"));
    }
    if options.window == 0 {
        return CHECK.refuse("window", "0: a token sees itself");
    }
    Ok(Extents::new(num_tokens, head_dim, options.window, halos, rank.world.rank()))
}

/// What the attention of a rank takes; only shapes count where `address` is that of no memory.
fn attended(views: &Views, extents: Extents, address: impl Fn(usize) -> u64) -> Views {
    let parts = Workspace::of(extents, 0);
    let Extents { num_tokens, head_dim, window, .. } = extents;
    let k = TensorView::dense("k", address(parts.k), DType::Bf16, &[extents.rows(), head_dim]);
    let lists =
        TensorView::dense("indices", address(parts.indices), DType::I32, &[num_tokens, window]);
    views.only(&["q", "sink"]).with("k", &k).with("indices", &lists)
}

/// Bytes of scratch memory that [`forward`] and [`backward`] need on a rank, from `q`, `k` and
/// `sink`.
///
/// # Errors
/// Tensors and options that the attention rejects.
pub fn workspace_bytes(
    views: &Views,
    options: &Options,
    halos: &Halos,
    rank: usize,
) -> Result<usize> {
    let (tokens, width) = (views["q"].shape[0], views["k"].shape[1]);
    let extents = Extents::new(tokens, width, options.window, halos, rank);
    let attended = attended(views, extents, |_| 16);
    let own = sparse_attention::workspace_bytes(&attended, options.attention, DType::F32)?;
    Ok(Workspace::of(extents, own).bytes)
}

/// Launches the forward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It writes `out`, `lse` and `max_logits`, and takes no tensor that only the backward has:
///
/// - `q` `[num_tokens, num_heads, head_dim]` bf16: this rank's queries; 0 are allowed;
/// - `k` `[num_tokens, head_dim]` bf16: this rank's keys, of the same tokens;
/// - `sink` `[num_heads]` f32, the same on all ranks; absent without sinks;
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
    halos: &Halos,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let extents = check(views, options, halos, &rank, false)?;
    let call = Windowed::new(views, options, halos, extents)?;
    let attended = call.attended(&mut rank)?;
    let ran = rank.attention(views, attended, options.attention)?;
    Ok(ran.into_iter().chain(["exchange".into()]).chain(rank.kernels_of_rows()).collect())
}

/// Launches the backward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It reads the inputs of [`forward`], and:
///
/// - `out` and `lse` of the forward, unchanged;
/// - `dout` as `out`, `dlse` as `lse`: gradients of them; `dlse` is absent where it is zero;
/// - `dq` as `q`;
/// - `dk` as `k`, bf16 or f32: the sum over the queries of all ranks;
/// - `dsink` `[num_heads]` f32, with `sink`: the sum over ranks, on each of them;
/// - `workspace` as in [`forward`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    device: &Device,
    views: &Views,
    options: &Options,
    halos: &Halos,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let extents = check(views, options, halos, &rank, true)?;
    let call = Windowed::new(views, options, halos, extents)?;
    let attended = call.attended(&mut rank)?;
    let mut ran = call.gradients(&mut rank, attended)?;
    ran.extend(call.returned(&mut rank)?);
    ran.push("exchange".into());
    ran.extend(rank.sum_sink(views)?);
    ran.extend(rank.kernels_of_rows());
    Ok(ran)
}

/// A checked call of one rank.
struct Windowed<'a> {
    views: &'a Views,
    options: &'a Options,
    halos: &'a Halos,
    extents: Extents,
    workspace: Workspace,
}

impl<'a> Windowed<'a> {
    fn new(
        views: &'a Views,
        options: &'a Options,
        halos: &'a Halos,
        extents: Extents,
    ) -> Result<Self> {
        let attended = attended(views, extents, |_| 16);
        let own = sparse_attention::workspace_bytes(&attended, options.attention, DType::F32)?;
        let workspace = Workspace::of(extents, own);
        CHECK.holds("workspace", &views["workspace"], workspace.bytes)?;
        Ok(Self { views, options, halos, extents, workspace })
    }

    fn scratch(&self, name: &str, offset: usize, dtype: DType, shape: &[usize]) -> TensorView {
        in_workspace(self.views, name, offset, dtype, shape)
    }

    /// The halo's rows and the own ones, and the lists of the window.
    fn attended(&self, rank: &mut Rank<'_>) -> Result<Views> {
        let Extents { num_tokens, halo, .. } = self.extents;
        let at = self.views["workspace"].address;
        let attended = attended(self.views, self.extents, |offset| at + offset as u64);
        let (k, own) = (&attended["k"], &self.views["k"]);
        rank.copy_all_rows(own, &k.narrow(0, halo, num_tokens)?)?;
        let (number, first) = (rank.world.rank(), self.halos.own(rank.world.rank()).start);
        let sends = self.halos.sends(number).into_iter();
        let sends =
            sends.map(|(to, part)| Ok((to, own.narrow(0, part.start - first, part.len())?)));
        let receives = self.halos.receives(number).into_iter();
        let receives = receives
            .map(|(from, part)| Ok((from, k.narrow(0, part.start + halo - first, part.len())?)));
        let (sends, receives): (Result<Vec<_>>, Result<Vec<_>>) =
            (sends.collect(), receives.collect());
        rank.exchange("halo", &sends?, &receives?)?;
        let shape = [self.extents.sequences];
        let starts = self.scratch("starts", self.workspace.starts, DType::I32, &shape);
        rank.write(&starts, &self.halos.starts(number))?;
        rank.window(&starts, &attended["indices"], halo)?;
        Ok(attended)
    }

    /// The values' width, of whose module kernels are used.
    fn v_dim(&self) -> usize {
        self.options.attention.v_dim.unwrap_or(self.extents.head_dim)
    }

    /// fp32 rows of dk, of the halo and the own tokens.
    fn dk(&self) -> TensorView {
        let shape = [self.extents.rows(), self.extents.head_dim];
        self.scratch("dk", self.workspace.dk, DType::F32, &shape)
    }

    fn gradients(&self, rank: &mut Rank<'_>, attended: Views) -> Result<Vec<String>> {
        let bytes = self.workspace.bytes - self.workspace.attention;
        let scratch = self.scratch("workspace", self.workspace.attention, DType::U8, &[bytes]);
        let views = attended.with("dk", &self.dk()).with("workspace", &scratch);
        rank.attention_backward(self.views, views, self.options.attention)
    }

    /// Sends the halo's gradients back, adds what comes, and writes the own rows.
    fn returned(&self, rank: &mut Rank<'_>) -> Result<Vec<String>> {
        let Extents { num_tokens, head_dim, halo, incoming, .. } = self.extents;
        let (number, dk) = (rank.world.rank(), self.dk());
        let first = self.halos.own(number).start;
        let coming =
            self.scratch("incoming", self.workspace.incoming, DType::F32, &[incoming, head_dim]);
        let (mut receives, mut keys) = (Vec::new(), Vec::new());
        for (from, part) in self.halos.sends(number) {
            receives.push((from, coming.narrow(0, keys.len(), part.len())?));
            keys.extend(part.map(|token| (token - first) as i32));
        }
        let sends = self.halos.receives(number).into_iter();
        let sends = sends
            .map(|(to, part)| Ok((to, dk.narrow(0, part.start + halo - first, part.len())?)))
            .collect::<Result<Vec<_>>>()?;
        rank.exchange("halo gradient", &sends, &receives)?;
        let own = dk.narrow(0, halo, num_tokens)?;
        let mut ran = Vec::new();
        if incoming > 0 {
            let list = self.scratch("keys", self.workspace.keys, DType::I32, &[incoming, 1]);
            rank.write(&list, &keys)?;
            let at = self.views["workspace"].address + self.workspace.sums as u64;
            let sums = RowSums { address: at, v_dim: self.v_dim() };
            ran.extend(sums.add(rank.device, &coming, &list, &own)?);
        }
        ran.extend(rank.write_rows(&own, &self.views["dk"], self.v_dim())?);
        Ok(ran)
    }
}
