//! Which generated mutants run when not all of them do.

use std::collections::{BTreeMap, VecDeque};

use super::{Class, GeneratedMutant};

/// At most `count` mutants, distributed over the classes as evenly as possible. Every prefix of the
/// order is such a sample too, so that a time budget cuts no class. A mutant's position depends
/// only on `seed` and its id: other mutants move it as little as possible.
pub fn sample(mutants: Vec<GeneratedMutant>, count: usize, seed: u64) -> Vec<GeneratedMutant> {
    let mut strata: BTreeMap<Class, Vec<GeneratedMutant>> = BTreeMap::new();
    for mutant in mutants {
        strata.entry(mutant.class).or_default().push(mutant);
    }
    let mut strata: VecDeque<VecDeque<GeneratedMutant>> = strata
        .into_values()
        .map(|mut stratum| {
            stratum.sort_by_key(|mutant| lot(seed, &mutant.id));
            stratum.into()
        })
        .collect();
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let Some(mut stratum) = strata.pop_front() else { break };
        if let Some(mutant) = stratum.pop_front() {
            drawn.push(mutant);
            strata.push_back(stratum);
        }
    }
    drawn
}

fn lot(seed: u64, id: &str) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes()).update(id.as_bytes());
    *hasher.finalize().as_bytes()
}
