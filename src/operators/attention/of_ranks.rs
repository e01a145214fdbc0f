//! Attention that several ranks compute: what each is given and writes, in both directions.

use dsv4_runtime::{RuntimeError, Views};

use crate::operators::ranks::{Launch, Parts, Ranks, Taps, Workspace, written, written_whole};

/// How the ranks of an operator run in one direction.
pub(super) struct Parallel<'p> {
    /// The tensors that a rank reads in both directions.
    pub given: &'p dyn Fn(&Ranks<'_, '_>, usize) -> Result<Parts, RuntimeError>,
    /// Bytes of the scratch memory of a rank.
    pub workspace: &'p Workspace<'p>,
    /// Its launches.
    pub launch: &'p Launch<'p>,
}

impl Parallel<'_> {
    /// Runs the forward on all ranks, and unites `out`, `lse` and `max_logits`.
    pub fn forward<T: Taps>(
        &self,
        ranks: &mut Ranks<'_, '_>,
        v: &Views,
    ) -> Result<(), RuntimeError> {
        const OUTPUTS: [&str; 3] = ["out", "lse", "max_logits"];
        let parts = |ranks: &Ranks<'_, '_>, rank: usize| {
            let mut parts = (self.given)(ranks, rank)?;
            parts.extend(written(v, &OUTPUTS, ranks.shards().tokens(rank).len()));
            Ok(parts)
        };
        let written = ranks.launch::<T>(parts, self.workspace, self.launch)?;
        OUTPUTS.into_iter().try_for_each(|name| ranks.unite(&written, name, &v[name]))
    }

    /// Runs the backward on all ranks, and unites the gradients. `rows_of_keys` is how many rows of
    /// `dk` and `dv` a rank has.
    pub fn backward<T: Taps>(
        &self,
        ranks: &mut Ranks<'_, '_>,
        v: &Views,
        rows_of_keys: fn(&Ranks<'_, '_>, usize) -> usize,
    ) -> Result<(), RuntimeError> {
        let parts = |ranks: &Ranks<'_, '_>, rank: usize| {
            let mut parts = (self.given)(ranks, rank)?;
            parts.extend(ranks.given_tokens(v, &["out", "lse", "dout", "dlse"], rank)?);
            parts.extend(written(v, &["dq"], ranks.shards().tokens(rank).len()));
            parts.extend(written(v, &["dk", "dv"], rows_of_keys(ranks, rank)));
            parts.extend(written_whole(v, &["dsink"]));
            Ok(parts)
        };
        let written = ranks.launch::<T>(parts, self.workspace, self.launch)?;
        for (name, view) in v.only(&["dq", "dk", "dv"]).iter() {
            ranks.unite(&written, name, view)?;
        }
        v.get("dsink").map_or(Ok(()), |view| ranks.agreed(&written, "dsink", view))
    }
}
