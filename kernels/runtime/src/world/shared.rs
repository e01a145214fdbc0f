//! Collectives by shared memory, on any device: each rank shows a piece of its tensor, all read it.
//!
//! Sums are formed by whoever needs them, from rank 0 on: their bits depend on nothing else.

use super::meeting::{PIECE, Seat, Seated, Transport};
use super::{Announcement, Collective, Span};
use crate::backend::Backend;
use crate::error::Result;

/// Bytes of an fp32 number.
const F32: usize = 4;

/// Moves tensors between a device and the memory that ranks share.
pub struct SharedMemory<'b> {
    backend: &'b dyn Backend,
}

impl<'b> SharedMemory<'b> {
    /// For tensors of this device.
    pub fn new(backend: &'b dyn Backend) -> Self {
        Self { backend }
    }

    /// Shows bytes of the device at an offset of this rank's piece.
    fn show(&self, rank: &Seated, at: usize, address: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: all ranks have counted the step after which no rank reads the last pieces, and
        // none reads this one before the next.
        let piece = unsafe { rank.meeting().own_piece(rank.seat().rank) };
        self.backend.download(address, &mut piece[at..at + bytes])
    }

    /// What a rank shows, between the steps before and after which it may write.
    fn seen<'r>(&self, rank: &'r Seated, of: usize, at: usize, bytes: usize) -> &'r [u8] {
        // SAFETY: called between the step that follows `show` and the next one.
        unsafe { &rank.meeting().piece_of(of)[at..at + bytes] }
    }

    /// The sum over ranks of the fp32 numbers at an offset of their pieces, in the order of ranks.
    fn sum(&self, rank: &Seated, at: usize, bytes: usize) -> Vec<u8> {
        let of = |other| self.seen(rank, other, at, bytes).as_chunks::<F32>().0.iter();
        let mut sums: Vec<f32> = of(0).map(|&number| f32::from_ne_bytes(number)).collect();
        for other in 1..rank.seat().size {
            for (sum, &number) in sums.iter_mut().zip(of(other)) {
                *sum += f32::from_ne_bytes(number);
            }
        }
        sums.into_iter().flat_map(f32::to_ne_bytes).collect()
    }

    fn put(&self, address: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() { Ok(()) } else { self.backend.upload(address, bytes) }
    }

    fn all_gather(&self, source: Span, target: Span, rank: &Seated) -> Result<()> {
        for (from, bytes) in parts(source.bytes(), PIECE) {
            self.show(rank, 0, source.address + from as u64, bytes)?;
            rank.step()?;
            for other in rank.ranks_in_any_order() {
                let address = target.address + (other * source.bytes() + from) as u64;
                self.put(address, self.seen(rank, other, 0, bytes))?;
            }
            rank.step()?;
        }
        Ok(())
    }

    fn reduce_scatter(&self, source: Span, target: Span, rank: &Seated) -> Result<()> {
        let Seat { rank: own, size, .. } = *rank.seat();
        let most = share(size);
        for (from, bytes) in parts(target.bytes(), most) {
            for other in 0..size {
                let address = source.address + (other * target.bytes() + from) as u64;
                self.show(rank, other * most, address, bytes)?;
            }
            rank.step()?;
            self.put(target.address + from as u64, &self.sum(rank, own * most, bytes))?;
            rank.step()?;
        }
        Ok(())
    }

    fn all_reduce(&self, buffer: Span, rank: &Seated) -> Result<()> {
        for (from, bytes) in parts(buffer.bytes(), PIECE) {
            let address = buffer.address + from as u64;
            self.show(rank, 0, address, bytes)?;
            rank.step()?;
            self.put(address, &self.sum(rank, 0, bytes))?;
            rank.step()?;
        }
        Ok(())
    }

    fn exchange(
        &self,
        [sends, receives]: [&[(usize, Span)]; 2],
        all: &[Announcement],
        rank: &Seated,
    ) -> Result<()> {
        let Seat { rank: own, size, .. } = *rank.seat();
        let most = share(size);
        // All ranks take as many rounds as the longest message of any of them.
        let widest = all.iter().filter_map(|a| Some(a.dtype?.size())).max().unwrap_or(1);
        let longest = all.iter().flat_map(|a| a.sends.iter()).max().copied().unwrap_or(0);
        for (from, _) in parts(longest * widest, most) {
            for peer in 0..size {
                for (at, address, bytes) in window(sends, peer, from, most) {
                    self.show(rank, peer * most + at, address, bytes)?;
                }
            }
            rank.step()?;
            for peer in rank.ranks_in_any_order() {
                for (at, address, bytes) in window(receives, peer, from, most) {
                    self.put(address, self.seen(rank, peer, own * most + at, bytes))?;
                }
            }
            rank.step()?;
        }
        Ok(())
    }
}

/// Bytes of a piece that each of `size` ranks has for itself.
fn share(size: usize) -> usize {
    // A multiple of every element's size.
    PIECE / size / 8 * 8
}

/// Starts and lengths of the parts of `bytes` bytes, `most` at a time.
fn parts(bytes: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(most.max(1)).map(move |from| (from, most.min(bytes - from)))
}

/// What of the tensors of a peer, one behind the other, is in the `most` bytes from `from` on:
/// offsets from there, addresses and bytes.
fn window(
    tensors: &[(usize, Span)],
    peer: usize,
    from: usize,
    most: usize,
) -> Vec<(usize, u64, usize)> {
    let (mut before, mut found) = (0, Vec::new());
    for (_, span) in tensors.iter().filter(|(of, _)| *of == peer) {
        let (start, end) = (from.max(before), (from + most).min(before + span.bytes()));
        if start < end {
            found.push((start - from, span.address + (start - before) as u64, end - start));
        }
        before += span.bytes();
    }
    found
}

impl Transport for SharedMemory<'_> {
    fn perform(&self, collective: &Collective, all: &[Announcement], rank: &Seated) -> Result<()> {
        match collective {
            Collective::Barrier => Ok(()),
            Collective::AllGather { source, target } => self.all_gather(*source, *target, rank),
            Collective::ReduceScatter { source, target } => {
                self.reduce_scatter(*source, *target, rank)
            }
            Collective::AllReduce { buffer } => self.all_reduce(*buffer, rank),
            Collective::Exchange { sends, receives } => self.exchange([sends, receives], all, rank),
        }
    }
}
