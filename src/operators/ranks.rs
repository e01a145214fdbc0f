//! Cases of operators that several ranks compute: who has which tokens, and the tensors of each.
//!
//! The case's tensors are those of one device. Ranks get the rows of their own tokens, in memory of
//! their own processes: no rank can read what it was not given. What they write is put together
//! again, and compared as if one device had written it.

use std::ops::Range;

use dsv4_kernels::model::tap::{Tap, Untapped};
use dsv4_kernels::parallel::{self, Shards};
use dsv4_runtime::arena::Violation;
use dsv4_runtime::world::crew::Means;
use dsv4_runtime::{Device, DeviceArena, HostTensor, RuntimeError, TensorView, Views};
use proptest::prelude::*;
use proptest::sample::select;
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::case::Draw;
use crate::operator::declared::{Launches, Refused, refuse};
use crate::operator::elsewhere::WrittenByRank;
pub(crate) use crate::operator::elsewhere::{Part, Parts};
use crate::operator::tensors::permuted_along;

/// The most ranks of a case: each is two processes.
pub const MOST_RANKS: usize = 8;

/// How tokens are divided among ranks (training 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Partition {
    /// One part of all tokens for each rank.
    Contiguous,
    /// For each rank a part from the start and one from the end of every sequence.
    Zigzag,
}

impl Partition {
    /// The launchers' word for it.
    pub(crate) fn launcher(self) -> parallel::Partition {
        match self {
            Self::Contiguous => parallel::Partition::Contiguous,
            Self::Zigzag => parallel::Partition::Zigzag,
        }
    }
}

/// Who sees, and may change, the launches and collectives of each rank. The registry's operators
/// have [`NoTaps`]; tests plant faults by others.
pub trait Taps: Send + Sync + 'static {
    /// The tap of a rank, for one call.
    fn tap(rank: usize) -> Box<dyn Tap>;
}

/// No taps.
pub struct NoTaps;

impl Taps for NoTaps {
    fn tap(_: usize) -> Box<dyn Tap> {
        Box::new(Untapped)
    }
}

/// The ranks of a case.
#[derive(Clone, Debug)]
pub(crate) struct Division {
    pub ranks: usize,
    pub partition: Partition,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
    /// Delays ranks around collectives, unless 0.
    pub delay_seed: u64,
}

/// Checks the number of ranks and of sequences.
///
/// # Errors
/// The field.
pub(crate) fn check(ranks: usize, num_sequences: usize, num_tokens: usize) -> Result<(), Refused> {
    if !(1..=MOST_RANKS).contains(&ranks) {
        return refuse("ranks", format!("{ranks} must be 1 to {MOST_RANKS}"));
    }
    if num_sequences == 0 || num_sequences > num_tokens.max(1) {
        let reason = format!("{num_sequences} must be 1 to num_tokens {num_tokens}");
        return refuse("num_sequences", reason);
    }
    Ok(())
}

/// Lengths of packed sequences that have `num_tokens` tokens together; some may be empty.
pub(crate) fn lengths(seed: u64, num_sequences: usize, num_tokens: usize) -> Vec<usize> {
    let mut draw = Draw::new(seed, "sequences");
    let mut ends: Vec<usize> =
        (1..num_sequences).map(|_| draw.rng().random_range(0..=num_tokens)).collect();
    ends.push(num_tokens);
    ends.sort_unstable();
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(&ends).map(|(start, end)| end - start).collect()
}

/// Ranks, the partition, sequences and a seed of delays.
pub(crate) fn strategy() -> impl Strategy<Value = (usize, Partition, usize, u64)> {
    (
        select(&[2usize, 3, 1, 4, 8][..]),
        select(&[Partition::Contiguous, Partition::Zigzag][..]),
        prop_oneof![2 => Just(1usize), 1 => 2..=4usize],
        prop_oneof![1 => Just(0u64), 1 => 1..1000u64],
    )
}

/// Records what `launch` enqueues, and runs it over results that are poisoned again.
fn replay(
    device: &Device,
    results: &[&TensorView],
    poison: u8,
    launch: &mut dyn FnMut() -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    let backend = device.backend();
    // On other devices ranks meet on the host, which no recording has.
    let Some(recorder) = device.graphs() else { return Ok(()) };
    backend.synchronize()?;
    let recorded = recorder.record(launch)?;
    for view in results.iter().filter(|view| view.elements() > 0) {
        backend.fill(view.address, poison, view.elements() * view.dtype.size())?;
    }
    recorded.launch()?;
    backend.synchronize()
}

/// A tensor that a rank writes: as that of all tokens, with this many rows.
fn of_rows(view: &TensorView, rows: usize) -> Part {
    let shape = [rows].into_iter().chain(view.shape[1..].iter().copied());
    Part::Written(view.dtype, shape.collect())
}

/// Those that a rank writes with this many rows, where the case has them.
pub(crate) fn written(v: &Views, names: &[&'static str], rows: usize) -> Parts {
    v.only(names).iter().map(|(name, view)| (name, of_rows(view, rows))).collect()
}

/// Those that each rank writes whole, where the case has them.
pub(crate) fn written_whole(v: &Views, names: &[&'static str]) -> Parts {
    let whole = |view: &TensorView| Part::Written(view.dtype, view.shape.clone());
    v.only(names).iter().map(|(name, view)| (name, whole(view))).collect()
}

/// Integers that a rank is given.
pub(crate) fn integers(name: &'static str, numbers: &[i32]) -> (&'static str, Part) {
    (name, Part::Given(HostTensor::from_i32(&[numbers.len()], numbers)))
}

/// What a rank did: the paths that ran, forbidden writes, and what it wrote.
type Done = (Vec<String>, Vec<Violation>, WrittenByRank);

/// What each rank wrote, by name.
pub(crate) type Written = Vec<WrittenByRank>;

/// What the ranks of a call have in common.
pub(crate) struct Ranks<'r, 'd> {
    run: &'r mut Launches<'d>,
    division: Division,
    shards: Shards,
}

/// The launches of a rank: its device, its tensors, and who sees them. Returns the paths.
pub(crate) type Launch<'l> =
    dyn Fn(&Device, &Views, &mut dyn Tap) -> Result<Vec<String>, RuntimeError> + Sync + 'l;

/// Bytes of the scratch memory of a rank: its device, its tensors, and its number.
pub(crate) type Workspace<'w> =
    dyn Fn(&Device, &Views, usize) -> Result<usize, RuntimeError> + Sync + 'w;

/// The numbers of a rank's rows among those of all ranks.
pub(crate) fn numbers(shards: &Shards, rank: usize) -> impl Iterator<Item = usize> + '_ {
    shards.tokens(rank).iter().map(|&row| row as usize)
}

fn of_shard(shards: &Shards, tensor: &HostTensor, rank: usize) -> HostTensor {
    permuted_along(tensor, 0, &numbers(shards, rank).collect::<Vec<_>>())
}

impl<'r, 'd> Ranks<'r, 'd> {
    /// The ranks of a case.
    pub fn of(division: Division, run: &'r mut Launches<'d>) -> Result<Self, RuntimeError> {
        let Division { ranks, partition, lengths, .. } = &division;
        let shards = Shards::new(partition.launcher(), *ranks, lengths)?;
        Ok(Self { run, division, shards })
    }

    /// Who has which tokens.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// A tensor of the case.
    pub fn read(&self, view: &TensorView) -> Result<HostTensor, RuntimeError> {
        self.run.device().read(view)
    }

    /// Tensors of the case, each as `part` gives it to a rank. Absent ones are left out.
    pub fn given(
        &self,
        v: &Views,
        names: &[&'static str],
        part: impl Fn(HostTensor) -> HostTensor,
    ) -> Result<Parts, RuntimeError> {
        let views = v.only(names);
        views.iter().map(|(name, view)| Ok((name, Part::Given(part(self.read(view)?))))).collect()
    }

    /// Tensors of the case, of which a rank gets the rows of its tokens.
    pub fn given_tokens(
        &self,
        v: &Views,
        names: &[&'static str],
        rank: usize,
    ) -> Result<Parts, RuntimeError> {
        self.given(v, names, |tensor| self.tokens(&tensor, rank))
    }

    /// Tensors of the case, which each rank gets whole.
    pub fn given_whole(&self, v: &Views, names: &[&'static str]) -> Result<Parts, RuntimeError> {
        self.given(v, names, |tensor| tensor)
    }

    /// The rows of a rank's tokens, and rows of poison up to the rows of all ranks.
    pub fn padded(&self, tensor: &HostTensor, rank: usize) -> HostTensor {
        self.padded_by(&self.shards, tensor, rank)
    }

    /// As [`Self::padded`], of rows that ranks share in another way than tokens.
    pub fn padded_by(&self, shards: &Shards, tensor: &HostTensor, rank: usize) -> HostTensor {
        let mut own = of_shard(shards, tensor, rank);
        let row = own.shape[1..].iter().product::<usize>() * own.dtype.size();
        own.shape[0] = shards.rows();
        own.bytes.resize(shards.rows() * row, self.run.contract().poison);
        own
    }

    /// Some consecutive rows.
    pub fn rows(&self, tensor: &HostTensor, rows: Range<usize>) -> HostTensor {
        permuted_along(tensor, 0, &rows.collect::<Vec<_>>())
    }

    /// The rows of a rank's tokens.
    pub fn tokens(&self, tensor: &HostTensor, rank: usize) -> HostTensor {
        of_shard(&self.shards, tensor, rank)
    }

    /// Runs `launch` on every rank, with the tensors that `parts` makes of each and a workspace of
    /// `workspace` bytes, which may depend on the rank. Returns what they wrote. Where collectives
    /// are on a GPU's stream and no rank is delayed, it runs once more, from a recording: that is
    /// what is judged. Ranks that run elsewhere are asked instead.
    pub fn launch<T: Taps>(
        &mut self,
        parts: impl Fn(&Self, usize) -> Result<Parts, RuntimeError>,
        workspace: &Workspace<'_>,
        launch: &Launch<'_>,
    ) -> Result<Written, RuntimeError> {
        let size = self.division.ranks;
        let parts = (0..size).map(|rank| parts(self, rank));
        let parts: Vec<_> = parts.collect::<Result<_, RuntimeError>>()?;
        if let Some(elsewhere) = self.run.elsewhere() {
            return elsewhere.launch(&self.with_tokens(parts));
        }
        let (device, contract) = (self.run.device(), self.run.contract());
        // Delays are the host's: they would end before what is recorded runs.
        let replayed = self.division.delay_seed == 0 && device.means(size)? == Some(Means::Nccl);
        let delays = Some(self.division.delay_seed).filter(|&seed| seed != 0);
        let done = device.on_ranks(size, delays, |device| {
            let rank = device.world().map_or(0, |world| world.rank());
            let mut arena = DeviceArena::new(device, contract);
            let mut views = Views::new();
            for (name, part) in &parts[rank] {
                let view = match part {
                    Part::Given(tensor) => arena.input(name, tensor)?,
                    Part::Written(dtype, shape) => arena.output(name, *dtype, shape)?,
                };
                views.put(name, view);
            }
            let bytes = workspace(device, &views, rank)?;
            views.put("workspace", arena.workspace("workspace", bytes)?);
            let mut paths = Vec::new();
            let violations = arena.run(|device| {
                let mut tap = T::tap(rank);
                let mut launch = || {
                    paths = launch(device, &views, &mut *tap)?;
                    Ok(())
                };
                launch()?;
                if replayed {
                    let results = parts[rank].iter().filter(|(_, part)| part.is_written());
                    let results: Vec<_> = results.map(|(name, _)| &views[name]).collect();
                    replay(device, &results, contract.poison, &mut launch)?;
                }
                Ok(())
            })?;
            let written = parts[rank].iter().filter(|(_, part)| part.is_written());
            let written = written.map(|(name, _)| Ok((*name, arena.download(&views[name])?)));
            Ok((paths, violations, written.collect::<Result<_, RuntimeError>>()?))
        })?;
        Ok(self.collected(done))
    }

    /// The parts with lists that say what launchers take from [`Shards`]: `tokens`, which of all
    /// tokens a rank has, and `cu_seqlens`, the first token of each sequence and the number of all.
    fn with_tokens(&self, mut parts: Vec<Parts>) -> Vec<Parts> {
        let mut ends = vec![0];
        for length in &self.division.lengths {
            ends.push(ends[ends.len() - 1] + *length as i32);
        }
        for (rank, parts) in parts.iter_mut().enumerate() {
            parts.push(integers("tokens", self.shards.tokens(rank)));
            parts.push(integers("cu_seqlens", &ends));
        }
        parts
    }

    fn collected(&mut self, done: Vec<Done>) -> Written {
        let mut all = Vec::new();
        for (rank, (paths, violations, written)) in done.into_iter().enumerate() {
            self.run.ran(paths);
            let of_rank = |violation: Violation| Violation {
                buffer: format!("{} of rank {rank}", violation.buffer),
                ..violation
            };
            self.run.found(violations.into_iter().map(of_rank));
            all.push(written);
        }
        all
    }

    /// Writes the rows of all ranks' tokens to a tensor of the case. Rows that no rank wrote keep
    /// their poison.
    pub fn unite(
        &self,
        written: &Written,
        name: &str,
        view: &TensorView,
    ) -> Result<(), RuntimeError> {
        self.unite_rows(written, name, view, |rank| numbers(&self.shards, rank))
    }

    /// As [`Self::unite`], of rows that each rank has by other numbers than those of its tokens.
    pub fn unite_rows<R: Iterator<Item = usize>>(
        &self,
        written: &Written,
        name: &str,
        view: &TensorView,
        rows: impl Fn(usize) -> R,
    ) -> Result<(), RuntimeError> {
        let mut whole = self.run.device().read(view)?;
        let row = view.shape[1..].iter().product::<usize>() * view.dtype.size();
        for (rank, written) in written.iter().enumerate() {
            let Some(own) = written.get(name) else { continue };
            for (at, number) in rows(rank).enumerate() {
                let (to, from) = (number * row, at * row);
                whole.bytes[to..to + row].copy_from_slice(&own.bytes[from..from + row]);
            }
        }
        self.run.device().write(view, &whole)
    }

    /// Writes a tensor that all ranks have alike to a tensor of the case.
    ///
    /// # Errors
    /// [`RuntimeError::Rank`] for the first rank that has another one.
    pub fn agreed(
        &self,
        written: &Written,
        name: &str,
        view: &TensorView,
    ) -> Result<(), RuntimeError> {
        let Some(first) = written.first().and_then(|written| written.get(name)) else {
            return Ok(());
        };
        let other = written.iter().position(|written| written.get(name) != Some(first));
        if let Some(rank) = other.filter(|_| self.run.device().backend().runs()) {
            return Err(RuntimeError::Rank {
                rank,
                size: written.len(),
                collective: format!("all_reduce of `{name}`"),
                what: "it has another sum than rank 0".into(),
            });
        }
        self.run.device().write(view, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_sequences_are_those_of_all_tokens_together() {
        for (sequences, tokens) in [(1, 0), (1, 9), (4, 9), (5, 5), (3, 100)] {
            let lengths = lengths(7, sequences, tokens);
            assert_eq!((lengths.len(), lengths.iter().sum::<usize>()), (sequences, tokens));
        }
        assert!(check(0, 1, 4).is_err() && check(MOST_RANKS + 1, 1, 4).is_err());
        assert!(check(1, 0, 4).is_err() && check(1, 5, 4).is_err());
        assert!(check(1, 1, 0).is_ok() && check(MOST_RANKS, 4, 4).is_ok());
    }
}
