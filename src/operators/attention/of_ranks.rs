//! Attention that several ranks compute: what each is given and writes, in both directions.

use dsv4_runtime::{RuntimeError, Views};

use crate::operators::ranks::{Launch, Part, Ranks, Taps, Workspace, of_rows};

/// The tensors of a rank, by name.
pub(super) type Parts = Vec<(&'static str, Part)>;

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
            let tokens = ranks.shards().tokens(rank).len();
            let written = v.only(&OUTPUTS);
            let written = written.iter().map(|(name, view)| (name, of_rows(view, tokens)));
            Ok((self.given)(ranks, rank)?.into_iter().chain(written).collect())
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
            for (name, view) in v.only(&["out", "lse", "dout", "dlse"]).iter() {
                parts.push((name, Part::Given(ranks.tokens(&ranks.read(view)?, rank))));
            }
            for (name, view) in v.only(&["dq", "dk", "dv", "dsink"]).iter() {
                let part = match name {
                    "dq" => of_rows(view, ranks.shards().tokens(rank).len()),
                    "dsink" => Part::Written(view.dtype, view.shape.clone()),
                    _ => of_rows(view, rows_of_keys(ranks, rank)),
                };
                parts.push((name, part));
            }
            Ok(parts)
        };
        let written = ranks.launch::<T>(parts, self.workspace, self.launch)?;
        for (name, view) in v.only(&["dq", "dk", "dv"]).iter() {
            ranks.unite(&written, name, view)?;
        }
        v.get("dsink").map_or(Ok(()), |view| ranks.agreed(&written, "dsink", view))
    }
}
