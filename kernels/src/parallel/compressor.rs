//! `cp_compressor` (training 9, 10): tokens pooled into entries, by ranks with consecutive tokens.
//!
//! ```text
//! forward    halo of kv, gate   from the ranks before: the rest of a group, the group before it
//!            entries            = compressor(halo and own rows)       of groups that end here
//! backward   the same halo
//!            dkv, dgate, dape, dnorm_weight = compressor_backward     of halo and own rows
//!            halo dkv, dgate      back to the ranks that have its rows
//!            dkv, dgate         += what came back                     in the order of ranks
//!            dape, dnorm_weight = all_reduce                          fp32, once, both together
//! ```
//!
//! A halo ends where a sequence starts. The rest of a sequence that started before the first row,
//! and all other sequences, are a launch each: entries turn by their place in the sequence.

use dsv4_runtime::{DType, Device, Result, TensorView, Views};

use super::collectives::Rank;
use super::groups::{Groups, Piece};
use super::steps::in_workspace;
use crate::arguments::{Arguments, FLOATS, Parts, read, saved, scratch, write};
use crate::attention::sparse_attention::{INDEX_V_DIM, RowSums};
use crate::cache::compressor::{self, Epilogue, Extents, MAX_HEAD_DIM, MAX_RATIO, QUAD};
use crate::model::tap::Tap;

const CHECK: Arguments = Arguments { operator: "cp_compressor" };
const COLUMNS: &[&str] = &["num_tokens", "width"];
const ENTRIES: &[&str] = &["num_entries", "head_dim"];

/// What a rank pools, and the parts of its scratch memory, as byte offsets.
struct Plan {
    pieces: Vec<Piece>,
    /// The sizes of its own rows.
    own: Extents,
    halo: usize,
    /// Rows of kv's gradient that come back; as many of gate's.
    incoming: usize,
    /// `[2, rows, width]` f32: kv, then gate, of the halo and the own tokens.
    columns: usize,
    /// The ends of the sequences of all pieces.
    ends: usize,
    /// `[entries, head_dim]`: entries, or their gradient.
    entries: usize,
    pooled: usize,
    /// As `columns`: dkv, then dgate.
    gradients: usize,
    coming: usize,
    /// The row of `gradients` of each row that comes back, and a 0.
    keys: usize,
    sums: usize,
    /// A row for each piece: dape, then dnorm_weight.
    parameters: usize,
    pooling: usize,
    bytes: usize,
}

impl Plan {
    fn new(device: &Device, own: Extents, groups: &Groups, rank: usize) -> Self {
        let (halos, pieces) = (groups.halos(), groups.pieces(rank));
        let halo = halos.halo(rank).len();
        let incoming: usize = halos.sends(rank).iter().map(|(_, part)| part.len()).sum();
        let ends: usize = pieces.iter().map(|piece| 2 * piece.ends[0].len()).sum();
        let entries = pieces.iter().map(|piece| piece.entries.end).max().unwrap_or(0);
        let (rows, width) = (halo + own.num_tokens, own.width);
        let pooling = pieces.iter().map(|piece| {
            let (num_tokens, num_entries) = (piece.tokens.len(), piece.entries.len());
            compressor::workspace_bytes(device, &Extents { num_tokens, num_entries, ..own })
        });
        let pooling = pooling.max().unwrap_or(0);
        let mut parts = Parts::default();
        Self {
            columns: parts.words(&[2, rows, width]),
            ends: parts.words(&[ends]),
            entries: parts.words(&[entries, own.head_dim]),
            pooled: parts.words(&[entries, own.head_dim]),
            gradients: parts.words(&[2, rows, width]),
            coming: parts.words(&[2, incoming, width]),
            keys: parts.words(&[2 * incoming + 1]),
            sums: parts.words(&[RowSums::words(2 * incoming, 2 * rows).max(RowSums::words(1, 1))]),
            parameters: parts.words(&[pieces.len(), own.ratio * width + own.head_dim]),
            pooling: parts.words(&[pooling.div_ceil(4)]),
            bytes: parts.bytes,
            pieces,
            own,
            halo,
            incoming,
        }
    }

    fn rows(&self) -> usize {
        self.halo + self.own.num_tokens
    }

    /// Rows of entries of all pieces, and how many of the first ones are another rank's.
    fn entries(&self) -> (usize, usize) {
        let skipped = self.pieces.iter().map(|piece| piece.skipped).sum::<usize>();
        (skipped + self.own.num_entries, skipped)
    }

    /// Elements of the parameters' gradients.
    fn num_parameters(&self) -> usize {
        self.own.ratio * self.own.width + self.own.head_dim
    }
}

fn check(views: &Views, groups: &Groups, rank: usize, backward: bool) -> Result<Extents> {
    let tensors = [
        read("kv").axes(COLUMNS),
        read("gate").like("kv"),
        read("ape").axes(&["ratio", "width"]),
        read("norm_weight").axes(&["head_dim"]),
        read("cos").axes(&["table_rows", "half_rope_dim"]).rows().one_stride(),
        read("sin").like("cos").rows().one_stride(),
        write("entries").of(&FLOATS).axes(ENTRIES).when(!backward),
        saved("pooled", backward).of(&FLOATS).axes(ENTRIES),
        read("dentries").like("pooled").when(backward),
        write("dkv").like("kv").when(backward),
        write("dgate").like("kv").when(backward),
        write("dape").like("ape").when(backward),
        write("dnorm_weight").like("norm_weight").when(backward),
        scratch("workspace", 16),
    ];
    let call = CHECK.signature(views, tensors).extent("head_dim", QUAD, MAX_HEAD_DIM);
    let axes = ["num_tokens", "num_entries", "ratio", "width", "head_dim"];
    let [num_tokens, num_entries, ratio, width, head_dim] =
        call.extent("ratio", 1, MAX_RATIO).bind(axes)?;
    let (tokens, entries) = (groups.halos().own(rank).len(), groups.entries(rank).len());
    let expected = |argument, what, has: usize, expected: usize| match has == expected {
        true => Ok(()),
        false => CHECK.refuse(argument, format!("{has} {what}, and the groups have {expected}")),
    };
    expected("kv", "tokens", num_tokens, tokens)?;
    expected("pooled", "entries", num_entries, entries)?;
    expected("ape", "tokens of a group", ratio, groups.ratio())?;
    let halves = if groups.overlaps() { 2 } else { 1 };
    expected("kv", "columns", width, halves * head_dim)?;
    if !backward && views["entries"].dtype != views["pooled"].dtype {
        let (entries, pooled) = (views["entries"].dtype, views["pooled"].dtype);
        return CHECK.refuse("pooled", format!("{pooled}: it must be {entries}, as `entries`"));
    }
    Ok(Extents { num_tokens, num_entries, ratio, width, head_dim })
}

/// Bytes of scratch memory that [`forward`] and [`backward`] need on a rank, from its `kv` and
/// `norm_weight`.
pub fn workspace_bytes(device: &Device, views: &Views, groups: &Groups, rank: usize) -> usize {
    let (kv, head_dim) = (&views["kv"], views["norm_weight"].shape[0]);
    let (num_tokens, width) = (kv.shape[0], kv.shape[1]);
    let (num_entries, ratio) = (groups.entries(rank).len(), groups.ratio());
    let own = Extents { num_tokens, num_entries, ratio, width, head_dim };
    Plan::new(device, own, groups, rank).bytes
}

/// Launches the forward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It takes no tensor that only the backward has. The tensors are those of
/// [`compressor::forward`], of this rank's rows:
///
/// - `kv`, `gate` `[num_tokens, width]` f32: of this rank's tokens; 0 are allowed;
/// - `ape` `[ratio, width]` and `norm_weight` `[head_dim]` f32, the same on all ranks;
/// - `cos`, `sin` `[table_rows, rope_dim / 2]` f32, by the position in a sequence;
/// - `entries`, `pooled` `[num_entries, head_dim]`, bf16 or f32: of [`Groups::entries`];
/// - `workspace`: at least [`workspace_bytes`] bytes, 16-byte aligned.
///
/// # Errors
/// A rejected argument, a device that is no rank; errors of the kernels and of the world.
pub fn forward(
    device: &Device,
    views: &Views,
    eps: f32,
    groups: &Groups,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let call = Pooling::new(views, eps, groups, &rank, false)?;
    call.gather(&mut rank)?;
    let mut ran = call.pool(&mut rank)?;
    let ((_, skipped), own) = (call.plan.entries(), call.plan.own.num_entries);
    for name in ["entries", "pooled"] {
        rank.copy_all_rows(&call.entries(name)?.narrow(0, skipped, own)?, &views[name])?;
    }
    ran.push("exchange".into());
    ran.extend(rank.kernels_of_rows());
    Ok(ran)
}

/// Launches the backward on one rank. All ranks call it at the same time. Returns the kernels that
/// ran. It reads the inputs of [`forward`], and:
///
/// - `pooled` of the forward, unchanged, and `dentries` as it;
/// - `dkv`, `dgate` as `kv`: the sum over the entries of all ranks;
/// - `dape` as `ape` and `dnorm_weight` as `norm_weight`: the sums over ranks, on each of them;
/// - `workspace` as in [`forward`].
///
/// # Errors
/// As [`forward`].
pub fn backward(
    device: &Device,
    views: &Views,
    eps: f32,
    groups: &Groups,
    tap: &mut dyn Tap,
) -> Result<Vec<String>> {
    let mut rank = Rank::of(CHECK.operator, device, tap)?;
    let call = Pooling::new(views, eps, groups, &rank, true)?;
    call.gather(&mut rank)?;
    let mut ran = call.gradients(&mut rank)?;
    ran.extend(call.returned(&mut rank)?);
    ran.extend(call.parameters(&mut rank)?);
    ran.extend(["exchange".into(), "all_reduce".into()]);
    ran.extend(rank.kernels_of_rows());
    Ok(ran)
}

/// A checked call of one rank.
struct Pooling<'a> {
    views: &'a Views,
    eps: f32,
    groups: &'a Groups,
    plan: Plan,
}

impl<'a> Pooling<'a> {
    fn new(
        views: &'a Views,
        eps: f32,
        groups: &'a Groups,
        rank: &Rank<'_>,
        backward: bool,
    ) -> Result<Self> {
        CHECK.positive("eps", eps)?;
        groups.halos().check(CHECK.operator, rank.world.size())?;
        let number = rank.world.rank();
        let own = check(views, groups, number, backward)?;
        let plan = Plan::new(rank.device, own, groups, number);
        CHECK.holds("workspace", &views["workspace"], plan.bytes)?;
        Ok(Self { views, eps, groups, plan })
    }

    fn scratch(&self, name: &str, offset: usize, dtype: DType, shape: &[usize]) -> TensorView {
        in_workspace(self.views, name, offset, dtype, shape)
    }

    /// The two tensors that start at a part: kv and gate, or their gradients.
    fn columns(&self, names: [&'static str; 2], offset: usize) -> [TensorView; 2] {
        let (rows, width) = (self.plan.rows(), self.plan.own.width);
        [0, 1].map(|at| {
            let offset = offset + at * rows * width * 4;
            self.scratch(names[at], offset, DType::F32, &[rows, width])
        })
    }

    /// Puts a piece's rows of them to others.
    fn put_columns(
        &self,
        views: &mut Views,
        names: [&'static str; 2],
        offset: usize,
        piece: &Piece,
    ) -> Result<()> {
        for (name, all) in names.into_iter().zip(self.columns(names, offset)) {
            views.put(name, all.narrow(0, piece.tokens.start, piece.tokens.len())?);
        }
        Ok(())
    }

    /// Entries of all pieces: `entries`, `dentries` or `pooled`.
    fn entries(&self, name: &str) -> Result<TensorView> {
        let offset = if name == "pooled" { self.plan.pooled } else { self.plan.entries };
        let shape = [self.plan.entries().0, self.plan.own.head_dim];
        Ok(self.scratch(name, offset, self.views["pooled"].dtype, &shape))
    }

    /// The halo's rows and the own ones, and the ends of sequences.
    fn gather(&self, rank: &mut Rank<'_>) -> Result<()> {
        let (halos, number, halo) = (self.groups.halos(), rank.world.rank(), self.plan.halo);
        let (first, tokens) = (halos.own(number).start, self.plan.own.num_tokens);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for all in self.columns(["kv", "gate"], self.plan.columns) {
            let own = &self.views[&*all.name];
            rank.copy_all_rows(own, &all.narrow(0, halo, tokens)?)?;
            for (to, part) in halos.sends(number) {
                sends.push((to, own.narrow(0, part.start - first, part.len())?));
            }
            for (from, part) in halos.receives(number) {
                receives.push((from, all.narrow(0, part.start + halo - first, part.len())?));
            }
        }
        rank.exchange("halo", &sends, &receives)?;
        let ends = self.plan.pieces.iter().flat_map(|piece| piece.ends.iter().flatten().copied());
        let ends: Vec<i32> = ends.collect();
        rank.write(&self.scratch("ends", self.plan.ends, DType::I32, &[ends.len()]), &ends)
    }

    /// What a launch of a piece reads in both directions.
    fn piece(&self, at: usize) -> Result<Views> {
        let pieces = &self.plan.pieces;
        let piece = &pieces[at];
        let mut views = self.views.only(&["ape", "norm_weight"]);
        self.put_columns(&mut views, ["kv", "gate"], self.plan.columns, piece)?;
        for name in ["cos", "sin"] {
            let table = &self.views[name];
            let from = piece.position.min(table.shape[0]);
            views.put(name, table.narrow(0, from, table.shape[0] - from)?);
        }
        let before: usize = pieces[..at].iter().map(|piece| 2 * piece.ends[0].len()).sum();
        for (at, name) in ["cu_seqlens", "cu_entries"].into_iter().enumerate() {
            let count = piece.ends[at].len();
            let offset = self.plan.ends + (before + at * count) * 4;
            views.put(name, self.scratch(name, offset, DType::I32, &[count]));
        }
        Ok(views)
    }

    fn rows_of(&self, name: &str, piece: &Piece) -> Result<TensorView> {
        self.entries(name)?.narrow(0, piece.entries.start, piece.entries.len())
    }

    fn pool(&self, rank: &mut Rank<'_>) -> Result<Vec<String>> {
        let mut ran = Vec::new();
        for (at, piece) in self.plan.pieces.iter().enumerate() {
            let mut views = self.piece(at)?;
            for name in ["entries", "pooled"] {
                views.put(name, self.rows_of(name, piece)?);
            }
            let paths = rank.launch("compressor", "forward", &views, |device| {
                compressor::forward(device, &views, self.eps, Epilogue::None)
            })?;
            ran.extend(paths.into_iter().flatten().map(String::from));
        }
        Ok(ran)
    }

    /// The gradients of all rows, and of the parameters by each piece. Entries of another rank have
    /// the gradient 0 here.
    fn gradients(&self, rank: &mut Rank<'_>) -> Result<Vec<String>> {
        let (num_entries, (_, skipped)) = (self.plan.own.num_entries, self.plan.entries());
        for name in ["pooled", "dentries"] {
            let all = self.entries(name)?;
            let others = all.narrow(0, 0, skipped)?;
            let bytes = others.elements() * others.dtype.size();
            rank.device.backend().fill(others.address, 0, bytes)?;
            rank.copy_all_rows(&self.views[name], &all.narrow(0, skipped, num_entries)?)?;
        }
        let mut ran = Vec::new();
        for (at, piece) in self.plan.pieces.iter().enumerate() {
            let mut views = self.piece(at)?;
            for name in ["pooled", "dentries"] {
                views.put(name, self.rows_of(name, piece)?);
            }
            self.put_columns(&mut views, ["dkv", "dgate"], self.plan.gradients, piece)?;
            self.put_parameters(&mut views, at);
            let bytes = self.plan.bytes - self.plan.pooling;
            views.put(
                "workspace",
                self.scratch("workspace", self.plan.pooling, DType::U8, &[bytes]),
            );
            let paths = rank.launch("compressor", "backward", &views, |device| {
                compressor::backward(device, &views, self.eps)
            })?;
            ran.extend(paths.into_iter().flatten().map(String::from));
        }
        Ok(ran)
    }

    /// Puts the gradients of the parameters by a piece to others.
    fn put_parameters(&self, views: &mut Views, piece: usize) {
        let Extents { ratio, width, head_dim, .. } = self.plan.own;
        let offset = self.plan.parameters + piece * self.plan.num_parameters() * 4;
        views.put("dape", self.scratch("dape", offset, DType::F32, &[ratio, width]));
        let offset = offset + ratio * width * 4;
        views.put("dnorm_weight", self.scratch("dnorm_weight", offset, DType::F32, &[head_dim]));
    }

    /// Sends the halo's gradients back, adds what comes, and writes the own rows.
    fn returned(&self, rank: &mut Rank<'_>) -> Result<Vec<String>> {
        let Plan { halo, incoming, own, .. } = self.plan;
        let (halos, number, rows) = (self.groups.halos(), rank.world.rank(), self.plan.rows());
        let first = halos.own(number).start;
        let all = self.columns(["dkv", "dgate"], self.plan.gradients);
        let coming =
            self.scratch("coming", self.plan.coming, DType::F32, &[2 * incoming, own.width]);
        let (mut sends, mut receives, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        for (at, gradient) in all.iter().enumerate() {
            for (to, part) in halos.receives(number) {
                sends.push((to, gradient.narrow(0, part.start + halo - first, part.len())?));
            }
            for (from, part) in halos.sends(number) {
                receives.push((from, coming.narrow(0, keys.len(), part.len())?));
                keys.extend(part.map(|token| (at * rows + token + halo - first) as i32));
            }
        }
        rank.exchange("halo gradient", &sends, &receives)?;
        let both = self.scratch("dkv", self.plan.gradients, DType::F32, &[2 * rows, own.width]);
        let ran = self.add_rows(rank, &coming, &keys, &both)?;
        for (name, gradient) in ["dkv", "dgate"].into_iter().zip(&all) {
            rank.copy_all_rows(&gradient.narrow(0, halo, own.num_tokens)?, &self.views[name])?;
        }
        Ok(ran)
    }

    /// Adds rows to those of a list. Returns the kernels that ran.
    fn add_rows(
        &self,
        rank: &Rank<'_>,
        rows: &TensorView,
        keys: &[i32],
        target: &TensorView,
    ) -> Result<Vec<String>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let list = self.scratch("keys", self.plan.keys, DType::I32, &[keys.len(), 1]);
        rank.write(&list, keys)?;
        let address = self.views["workspace"].address + self.plan.sums as u64;
        RowSums { address, v_dim: INDEX_V_DIM }.add(rank.device, rows, &list, target)
    }

    /// Sums the gradients of the parameters over pieces, and over ranks.
    fn parameters(&self, rank: &mut Rank<'_>) -> Result<Vec<String>> {
        let (pieces, count) = (self.plan.pieces.len(), self.plan.num_parameters());
        let all = self.scratch("parameters", self.plan.parameters, DType::F32, &[pieces, count]);
        let (first, others) = (all.narrow(0, 0, 1)?, all.narrow(0, 1, pieces - 1)?);
        let ran = self.add_rows(rank, &others, &vec![0; pieces - 1], &first)?;
        rank.all_reduce("parameters", &first)?;
        let mut sums = Views::new();
        self.put_parameters(&mut sums, 0);
        for (name, sum) in sums.iter() {
            rank.copy_all_rows(sum, &self.views[name])?;
        }
        Ok(ran)
    }
}
