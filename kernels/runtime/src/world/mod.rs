//! Ranks of one computation, and the collectives by which they exchange tensors.
//!
//! A [`World`] is what one rank sees of all: its number, their number, and collectives on buffers of
//! its device. All ranks call the same collectives in the same order, as with NCCL. There are two:
//!
//! - by [NCCL](super::cuda::nccl), on the device's stream, where each rank has a GPU of its own;
//! - by [shared memory](shared), on any device, with one order of sums: bit-exact and repeatable.
//!
//! In both, ranks first meet ([`meeting`]). They compare what each is about to call, with counts and
//! types. A mismatch is an error that names both places of the source. So is a rank that ended, or
//! that does not come in time. A seed delays ranks before and after collectives.
//!
//! [`crew`] starts the processes of the ranks, and keeps them for later calls.

pub mod crew;
pub mod meeting;
pub mod shared;
#[cfg(test)]
mod tests;

use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use super::error::{Result, RuntimeError};
use super::tensor::{DType, TensorView};

/// The most ranks of a world.
pub const MOST_RANKS: usize = 64;

/// Dense elements in the memory of a rank's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Device address of the first one.
    pub address: u64,
    /// Their type.
    pub dtype: DType,
    /// Their number.
    pub elements: usize,
}

impl Span {
    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

/// What ranks do together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Collective {
    /// No rank goes on before all have come.
    Barrier,
    /// The sources of all ranks, one behind the other by rank, in the target of each.
    AllGather {
        /// What this rank gives.
        source: Span,
        /// As many times its elements as there are ranks.
        target: Span,
    },
    /// The sum over ranks of part `r` of the sources, in the target of rank `r`. fp32.
    ReduceScatter {
        /// As many times the target's elements as there are ranks.
        source: Span,
        /// The sum of this rank's part.
        target: Span,
    },
    /// The sum over ranks, in the buffer of each. fp32.
    AllReduce {
        /// Summed in place.
        buffer: Span,
    },
    /// Rows between neighbours. What a rank sends to another is what that one receives from it.
    Exchange {
        /// For each peer that gets something: its rank, and what it gets.
        sends: Vec<(usize, Span)>,
        /// For each peer that gives something: its rank, and where it goes.
        receives: Vec<(usize, Span)>,
    },
}

/// A place of the source that calls a collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// The file.
    pub file: String,
    /// The line.
    pub line: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A collective, and the place that calls it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The collective.
    pub collective: Collective,
    /// The place.
    pub site: Site,
}

/// What a rank tells the others about its next call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The name of the collective.
    pub name: String,
    /// The type of its elements; `None` for a barrier, and where nothing is sent or received.
    pub dtype: Option<DType>,
    /// Elements of its source; 0 for an exchange.
    pub elements: usize,
    /// For each rank, how many elements it gets of an exchange.
    pub sends: Vec<usize>,
    /// For each rank, how many elements it gives.
    pub receives: Vec<usize>,
    /// The place that calls it.
    pub site: Site,
}

impl fmt::Display for Announcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, dtype, elements, sends, receives, site } = self;
        write!(f, "{name}")?;
        match dtype {
            None => {}
            Some(dtype) if name == "exchange" => {
                write!(f, " of {dtype} (sends {sends:?}, receives {receives:?})")?;
            }
            Some(dtype) => write!(f, " of {elements} {dtype}")?,
        }
        write!(f, " at {site}")
    }
}

impl Call {
    /// What the others must know of it in a world of `size` ranks.
    pub fn announcement(&self, size: usize) -> Announcement {
        let (name, span) = match &self.collective {
            Collective::Barrier => ("barrier", None),
            Collective::AllGather { source, .. } => ("all_gather", Some(source)),
            Collective::ReduceScatter { source, .. } => ("reduce_scatter", Some(source)),
            Collective::AllReduce { buffer } => ("all_reduce", Some(buffer)),
            Collective::Exchange { sends, receives } => {
                ("exchange", sends.iter().chain(receives).map(|(_, span)| span).next())
            }
        };
        let (mut to, mut from) = (vec![0; size], vec![0; size]);
        let mut elements = span.map_or(0, |span| span.elements);
        if let Collective::Exchange { sends, receives } = &self.collective {
            elements = 0;
            for (all, counts) in [(sends, &mut to), (receives, &mut from)] {
                for (peer, span) in all {
                    if let Some(count) = counts.get_mut(*peer) {
                        *count += span.elements;
                    }
                }
            }
        }
        Announcement {
            name: name.into(),
            dtype: span.map(|span| span.dtype),
            elements,
            sends: to,
            receives: from,
            site: self.site.clone(),
        }
    }
}

/// One rank's view of the ranks of a computation.
pub trait World: Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Takes part in a collective. On a GPU it is enqueued on the device's stream.
    ///
    /// # Errors
    /// [`RuntimeError::Rank`] if another rank calls something else, has ended, or does not come;
    /// errors of the device.
    fn take_part(&self, call: &Call) -> Result<()>;
}

impl dyn World + '_ {
    /// Waits for all ranks.
    ///
    /// # Errors
    /// As [`World::take_part`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.call(Collective::Barrier)
    }

    /// Writes the sources of all ranks, one behind the other by rank, to `target`: `[size · n]` of
    /// `[n]` elements of one type, both dense.
    ///
    /// # Errors
    /// Tensors that do not fit; as [`World::take_part`].
    #[track_caller]
    pub fn all_gather(&self, source: &TensorView, target: &TensorView) -> Result<()> {
        const NAME: &str = "all_gather";
        let (source, target) = (span(NAME, "source", source)?, span(NAME, "target", target)?);
        self.fits(NAME, "target", target, source)?;
        self.call(Collective::AllGather { source, target })
    }

    /// Writes the sum over ranks of this rank's part of their sources to `target`: `[n]` of
    /// `[size · n]` elements, fp32, both dense. Shared memory adds in the order of ranks.
    ///
    /// # Errors
    /// As `all_gather`; a type other than fp32.
    #[track_caller]
    pub fn reduce_scatter(&self, source: &TensorView, target: &TensorView) -> Result<()> {
        const NAME: &str = "reduce_scatter";
        let (source, target) = (summed(NAME, "source", source)?, summed(NAME, "target", target)?);
        self.fits(NAME, "source", source, target)?;
        self.call(Collective::ReduceScatter { source, target })
    }

    /// Replaces `buffer` by its sum over ranks, fp32, dense. Shared memory adds in the order of
    /// ranks.
    ///
    /// # Errors
    /// As `reduce_scatter`.
    #[track_caller]
    pub fn all_reduce(&self, buffer: &TensorView) -> Result<()> {
        let buffer = summed("all_reduce", "buffer", buffer)?;
        self.call(Collective::AllReduce { buffer })
    }

    /// Sends dense tensors to other ranks and receives some: a halo. Each entry is the rank of a
    /// peer and a tensor. What one rank sends to another, that one receives from it. Several
    /// tensors for one peer arrive in their order.
    ///
    /// # Errors
    /// A peer that the world does not have, or this rank itself; as `all_gather`.
    #[track_caller]
    pub fn exchange(
        &self,
        sends: &[(usize, TensorView)],
        receives: &[(usize, TensorView)],
    ) -> Result<()> {
        let spans = |argument, all: &[(usize, TensorView)]| -> Result<Vec<(usize, Span)>> {
            let one = |(peer, view): &(usize, TensorView)| {
                if *peer >= self.size() || *peer == self.rank() {
                    let reason = format!("rank {peer} is no other of the {} ranks", self.size());
                    return Err(RuntimeError::argument("exchange", argument, reason));
                }
                Ok((*peer, span("exchange", argument, view)?))
            };
            all.iter().map(one).collect()
        };
        let (sends, receives) = (spans("sends", sends)?, spans("receives", receives)?);
        let mut types = sends.iter().chain(&receives).map(|(_, span)| span.dtype);
        if let Some(first) = types.next()
            && let Some(other) = types.find(|&dtype| dtype != first)
        {
            let reason = format!("{first} and {other}: an exchange has one type");
            return Err(RuntimeError::argument("exchange", "sends", reason));
        }
        self.call(Collective::Exchange { sends, receives })
    }

    #[track_caller]
    fn call(&self, collective: Collective) -> Result<()> {
        let place = Location::caller();
        let site = Site { file: place.file().to_owned(), line: place.line() };
        self.take_part(&Call { collective, site })
    }

    /// Whether the one has the elements of the other once for each rank.
    fn fits(
        &self,
        operator: &'static str,
        argument: &'static str,
        all: Span,
        one: Span,
    ) -> Result<()> {
        if all.dtype == one.dtype && Some(all.elements) == one.elements.checked_mul(self.size()) {
            return Ok(());
        }
        let reason = format!(
            "{} {} must be {} of {} {}: one part for each rank",
            all.elements,
            all.dtype,
            self.size(),
            one.elements,
            one.dtype
        );
        Err(RuntimeError::argument(operator, argument, reason))
    }
}

fn span(operator: &'static str, argument: &'static str, view: &TensorView) -> Result<Span> {
    if view.is_dense() {
        return Ok(Span { address: view.address, dtype: view.dtype, elements: view.elements() });
    }
    let reason = format!(
        "strides {:?} of `{}`, shape {:?}: it must be dense",
        view.strides, view.name, view.shape
    );
    Err(RuntimeError::argument(operator, argument, reason))
}

fn summed(operator: &'static str, argument: &'static str, view: &TensorView) -> Result<Span> {
    if view.dtype == DType::F32 {
        return span(operator, argument, view);
    }
    let reason = format!("`{}` is {}: sums over ranks are fp32", view.name, view.dtype);
    Err(RuntimeError::argument(operator, argument, reason))
}

/// A library of collectives that a device's stream runs, such as NCCL.
pub trait Collectives: Send + Sync {
    /// Enqueues a collective that all ranks have agreed on.
    ///
    /// # Errors
    /// Those of the library and of the device.
    fn enqueue(&self, collective: &Collective) -> Result<()>;
}

/// A world whose collectives move nothing, for devices that only record launches.
pub(super) struct Silent {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
}

impl World for Silent {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn take_part(&self, _: &Call) -> Result<()> {
        Ok(())
    }
}
