//! What all commands that sweep share: the size, the number of cases, and `--seed`, a number or
//! `fresh`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::str::FromStr;

use clap::Args;

use super::command_line;

use crate::judge::checks::CheckOptions;
use crate::operator::Profile;
use crate::record::journal::Shard;
use crate::sweep::regressions::Regressions;
use crate::sweep::session::{Started, SweepRequest};
use crate::sweep::{GivenCases, LeftOut, SweepOptions};

/// Which cases a sweep draws.
#[derive(Clone, Debug, Args)]
pub struct SweepArguments {
    /// Size of the sweep [default: quick]
    ///
    /// `parity run` on the emulator defaults to smoke where nothing else limits it: no --ops, no
    /// --cases, no --edge-cases, no --time-budget, no --shard and no --workers.
    #[arg(long, value_enum)]
    pub profile: Option<Profile>,
    /// Drawn cases for each operator [default: the profile's]
    #[arg(long, value_name = "N", value_parser = number_of_cases)]
    pub cases: Option<usize>,
    /// Edge cases of each operator, chosen at random by the seed [default: all]
    ///
    /// The rest is counted as skipped.
    #[arg(long, value_name = "N")]
    pub edge_cases: Option<usize>,
    /// Seed of the sweep; `fresh` draws one, prints it and saves it in the report
    #[arg(long, default_value = "0", value_name = "N|fresh")]
    pub seed: Seed,
}

/// A check that a sweep can make without any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Only {
    /// A row's bits do not depend on the batch that it comes in.
    #[value(name = "batch_invariance")]
    BatchInvariance,
}

impl SweepArguments {
    /// The requested profile, or the default one.
    pub fn profile(&self) -> Profile {
        self.profile.unwrap_or(Profile::Quick)
    }

    /// The options for these cases and for the saved ones in a folder (the project's own if
    /// absent). Failing cases are not saved, and all cases run.
    pub fn options(&self, checks: CheckOptions, regressions: Option<&Path>) -> SweepOptions {
        let folder = regressions.map_or_else(Regressions::default_dir, Path::to_path_buf);
        SweepOptions {
            profile: self.profile(),
            cases: self.cases,
            edge_cases: self.edge_cases.map_or(GivenCases::All, |most| GivenCases::Lots {
                most,
                seed: self.seed.number(),
            }),
            remembered: GivenCases::All,
            seed: self.seed.number(),
            checks,
            regressions: Regressions::new(folder),
            remember: false,
            condition: None,
            left_out: LeftOut::default(),
            time_budget: None,
            deadline: None,
            ranks: Vec::new(),
        }
    }
}

impl SweepArguments {
    /// A complete sweep of these operators, as the user named them, that starts now and has its
    /// journal in `out`.
    pub fn request(&self, names: &str, out: &Path) -> SweepRequest {
        SweepRequest {
            names: names.to_owned(),
            cases: self.cases,
            edge_cases: self.edge_cases,
            costs: None,
            shard: Shard::WHOLE,
            out: out.to_owned(),
            resume: false,
            command: self.seed.command(),
            schedules: self.profile().schedules(),
            started: Started::now(),
        }
    }
}

/// The most drawn cases of an operator: all of them are planned, and are in memory, before the
/// first one runs.
const MOST_CASES: usize = 1_000_000;

fn number_of_cases(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(cases) if cases <= MOST_CASES => Ok(cases),
        Ok(_) => Err(format!("at most {MOST_CASES} cases are drawn of an operator")),
        Err(error) => Err(format!("{error}")),
    }
}

/// The seed of a sweep.
#[derive(Clone, Copy, Debug)]
pub enum Seed {
    /// A given number.
    Given(u64),
    /// Drawn for this run, so that no kernel can be fitted to it.
    Fresh(u64),
}

impl FromStr for Seed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "fresh" {
            // 32 bits: a number that a person can copy and that JSON holds exactly.
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

    /// Prints a fresh seed. Rejects a fresh seed where several runs must have the same.
    ///
    /// # Errors
    /// A fresh seed of a run that is `one_of_several`.
    pub fn announce(self, one_of_several: Option<&str>) -> anyhow::Result<()> {
        if let Self::Fresh(seed) = self {
            if let Some(option) = one_of_several {
                anyhow::bail!(
                    "--seed fresh: with {option} several runs need one seed; give a number, such as {seed}"
                );
            }
            detailln!("seed {seed}");
        }
        Ok(())
    }

    /// The command line of this process, with the fresh seed: it repeats this run exactly.
    pub fn command(self) -> String {
        let Self::Fresh(seed) = self else { return command_line().join(" ") };
        let drawn = |argument: String| match argument.as_str() {
            "fresh" => seed.to_string(),
            "--seed=fresh" => format!("--seed={seed}"),
            _ => argument,
        };
        command_line().into_iter().map(drawn).collect::<Vec<_>>().join(" ")
    }
}
