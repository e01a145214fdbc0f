//! The list of pairs: which benchmark of ours and which public kernel do the same work.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Failure;
use super::log::{Side, Timings};

/// One work on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// Works of a family share a table.
    pub family: String,
    /// What is computed.
    pub work: String,
    /// The library of the public kernel.
    pub who: String,
    /// Criterion's id of our benchmark.
    pub ours: String,
    /// The name of the public kernel's timing in `fixtures/external/public_times.py`.
    pub theirs: String,
    /// What the public kernel does more or less than ours, if anything.
    pub differs: Option<String>,
}

impl Pair {
    /// Its id in the logs of a side.
    pub fn id(&self, side: Side) -> &str {
        match side {
            Side::Ours => &self.ours,
            Side::Theirs => &self.theirs,
        }
    }
}

/// The list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs {
    path: PathBuf,
    /// In the order of the file.
    pub pairs: Vec<Pair>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PairFile {
    pair: Vec<Pair>,
}

impl Pairs {
    /// Reads the list, a TOML file of `[[pair]]`.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, an empty field, a work that is listed twice.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let failed = |why: String| Failure::new(path, &why);
        let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
        let PairFile { pair: pairs } = toml::from_str(&text).map_err(|e| failed(e.to_string()))?;
        let mut works = BTreeSet::new();
        for pair in &pairs {
            let fields = [
                ("family", &pair.family),
                ("work", &pair.work),
                ("who", &pair.who),
                ("ours", &pair.ours),
                ("theirs", &pair.theirs),
            ];
            if let Some((name, _)) = fields.iter().find(|(_, value)| value.trim().is_empty()) {
                return Err(failed(format!("`{name}` of the pair `{}` is empty", pair.work)));
            }
            if !works.insert((&pair.family, &pair.work)) {
                return Err(failed(format!(
                    "`{}` is twice in the family `{}`",
                    pair.work, pair.family
                )));
            }
        }
        if pairs.is_empty() {
            Err(failed("it lists no pair".into()))
        } else {
            Ok(Self { path: path.to_owned(), pairs })
        }
    }

    /// Families in the order in which they first appear, with their pairs.
    pub fn families(&self) -> Vec<(&str, Vec<&Pair>)> {
        let mut families: Vec<(&str, Vec<&Pair>)> = Vec::new();
        for pair in &self.pairs {
            match families.iter_mut().find(|(name, _)| *name == pair.family) {
                Some((_, pairs)) => pairs.push(pair),
                None => families.push((&pair.family, vec![pair])),
            }
        }
        families
    }

    /// Finds an id of a side that is not known.
    ///
    /// # Errors
    /// The first such id.
    pub fn check(&self, side: Side, known: impl Fn(&str) -> bool) -> Result<(), Failure> {
        let Some(pair) = self.pairs.iter().find(|pair| !known(pair.id(side))) else {
            return Ok(());
        };
        let (name, id) = (side.name(), pair.id(side));
        let what = match side {
            Side::Ours => "no benchmark has this id here",
            Side::Theirs => "no public kernel is timed under this name",
        };
        Err(Failure::new(
            &self.path,
            &format!("`{name}` of the pair `{}` is `{id}`: {what}", pair.work),
        ))
    }

    /// Checks the list against the ids in the logs.
    ///
    /// # Errors
    /// A side without a log; an id that its side cannot time.
    pub fn check_against(&self, timings: &Timings) -> Result<(), Failure> {
        for side in [Side::Ours, Side::Theirs] {
            if timings.turns_of(side).next().is_none() {
                let why =
                    format!("none of the logs is of `{}`: both sides are needed", side.name());
                return Err(Failure::new(&self.path, &why));
            }
            self.check(side, |id| timings.knows(side, id))?;
        }
        Ok(())
    }
}
