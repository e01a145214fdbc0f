//! `--seed`: a number, or `fresh`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::str::FromStr;

/// The seed of a sweep.
#[derive(Clone, Copy, Debug)]
pub enum Seed {
    /// Given as a number.
    Given(u64),
    /// Drawn for this run, so that no kernel can be fitted to it.
    Fresh(u64),
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "fresh" {
            // 32 bits: a number that a person can copy, and that JSON holds exactly.
            return Ok(Self::Fresh(RandomState::new().build_hasher().finish() >> 32));
        }
        text.parse().map(Self::Given).map_err(|_| "neither a number nor `fresh`".to_owned())
    }
}

impl Seed {
    /// The number.
    pub fn number(self) -> u64 {
        match self {
            Self::Given(seed) | Self::Fresh(seed) => seed,
        }
    }

    /// Says which one was drawn, and refuses to draw one where several runs must have the same.
    ///
    /// # Errors
    /// A fresh seed of a run that is `one_of_several`.
    pub fn announce(self, one_of_several: Option<&str>) -> anyhow::Result<()> {
        if let Self::Fresh(seed) = self {
            if let Some(option) = one_of_several {
                anyhow::bail!("--seed fresh: with {option} several runs need one seed; give a number, such as {seed}");
            }
            println!("seed {seed}");
        }
        Ok(())
    }

    /// The command line of this process, with the seed that was drawn: it repeats this very run.
    pub fn command(self) -> String {
        let arguments = std::env::args();
        let Self::Fresh(seed) = self else { return arguments.collect::<Vec<_>>().join(" ") };
        let drawn = |argument: String| match argument.as_str() {
            "fresh" => seed.to_string(),
            "--seed=fresh" => format!("--seed={seed}"),
            _ => argument,
        };
        arguments.map(drawn).collect::<Vec<_>>().join(" ")
    }
}
