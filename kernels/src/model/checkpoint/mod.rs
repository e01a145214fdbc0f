//! A checkpoint: `config.json`, shards and their index (inference 15).
//!
//! [`Checkpoint::open`] maps the shards and holds every tensor to the configuration before a byte
//! is uploaded. It reports all that is missing, extra, truncated, of another type or of another
//! shape in one error. Bytes are read when a tensor is used. Names may be the official ones or
//! transformers' (`naming`); the formats are the released ones in both.

mod naming;
mod shards;
pub mod tensors;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use thiserror::Error;

use crate::model::config::{Config, ConfigError};
use shards::Shards;
pub use shards::{INDEX, SINGLE};
use tensors::{Format, TensorSpec};

/// One thing that is wrong with the files of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// No shard has a tensor of the configuration.
    #[error("`{name}` is missing")]
    Missing {
        /// The tensor.
        name: String,
    },
    /// A shard has a tensor that the configuration does not have.
    #[error("`{name}` in {shard} is no tensor of this configuration")]
    Extra {
        /// The tensor.
        name: String,
        /// Its shard.
        shard: String,
    },
    /// A tensor has another type.
    #[error("`{name}` is {found}; the configuration has {expected}")]
    WrongType {
        /// The tensor.
        name: String,
        /// The type in the file.
        found: String,
        /// The expected one.
        expected: String,
    },
    /// A tensor has other sizes.
    #[error("`{name}` has shape {found:?}; the configuration has {expected:?}")]
    WrongShape {
        /// The tensor.
        name: String,
        /// The shape in the file.
        found: Vec<usize>,
        /// The expected one.
        expected: Vec<usize>,
    },
    /// A shard ends before the bytes of its tensors.
    #[error(
        "{shard} is truncated: it has {bytes} of {declared} bytes; {} of its tensors are cut \
         off: {}", tensors.len(), quoted(tensors)
    )]
    Truncated {
        /// The shard.
        shard: String,
        /// Its bytes.
        bytes: usize,
        /// The bytes that its header declares.
        declared: usize,
        /// The tensors whose bytes are not complete.
        tensors: Vec<String>,
    },
    /// A shard that cannot be read.
    #[error("{shard}: {reason}")]
    Shard {
        /// The shard.
        shard: String,
        /// Why.
        reason: String,
    },
    /// A shard whose name leads out of the folder.
    #[error("the index names the shard `{shard}`, which is no file of this folder")]
    ShardOutside {
        /// The name.
        shard: String,
    },
    /// The index names a shard for a tensor that is not in it.
    #[error("`{name}` is not in {shard}, where the index has it")]
    NotInShard {
        /// The tensor.
        name: String,
        /// The shard.
        shard: String,
    },
    /// A tensor that the index does not name.
    #[error("`{name}` in {shard} is not in the index")]
    Unlisted {
        /// The tensor.
        name: String,
        /// Its shard.
        shard: String,
    },
    /// A tensor that two shards have.
    #[error("`{name}` is in {} and in {}", shards[0], shards[1])]
    Twice {
        /// The tensor.
        name: String,
        /// The shards.
        shards: [String; 2],
    },
    /// A copy that differs from the shared tensor.
    #[error("`{name}` differs from `{of}`, which it must equal")]
    CopyDiffers {
        /// The copy.
        name: String,
        /// The shared tensor.
        of: String,
    },
    /// A tensor with a name like transformers' that stands for no official tensor, or whose sizes
    /// do not let it be taken apart into those of its experts.
    #[error("`{name}` is like a name of transformers, and no official tensor is in it")]
    TransformersName {
        /// The tensor.
        name: String,
    },
    /// A scale of a whole tensor that is no positive number.
    #[error("`{name}` is {value}: a scale is above 0 and finite")]
    NoScale {
        /// The scale.
        name: String,
        /// Its value.
        value: String,
    },
    /// A table of a hashed router that names an expert beyond the last one.
    #[error("`{name}` names expert {expert} for token {token}: there are {experts}")]
    NoExpert {
        /// The table.
        name: String,
        /// The first such token.
        token: usize,
        /// The entry.
        expert: i64,
        /// Experts of a layer.
        experts: usize,
    },
}

/// Names in backquotes, separated by commas.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Why a folder is no checkpoint that can be loaded.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file that cannot be read.
    #[error("{path}: cannot be read")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// An index that is not one.
    #[error("{path} is not an index of shards: {reason}")]
    Index {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Neither an index nor a single file.
    #[error("{folder} has neither {INDEX} nor {SINGLE}")]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// The tensors do not match the configuration: all problems.
    #[error("{folder}: {}", Listed(problems))]
    Problems {
        /// The folder.
        folder: PathBuf,
        /// All of them, in the order of the tensors.
        problems: Vec<Problem>,
    },
}

/// The number of problems, and a line for each.
struct Listed<'a>(&'a [Problem]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "problem" } else { "problems" };
        write!(f, "{} {plural}", self.0.len())?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

/// A checkpoint whose tensors match its configuration. No other process may change its files.
pub struct Checkpoint {
    config: Config,
    folder: PathBuf,
    shards: Shards,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.folder.display(), self.shards.tensors.len())
    }
}

/// Where the tensors of a model come from.
pub trait Source {
    /// The configuration whose tensors it has.
    fn config(&self) -> &Config;

    /// The bytes of a tensor, as a checkpoint stores them.
    ///
    /// # Panics
    /// If no checkpoint of the configuration has such a tensor. That is a mistake of the caller.
    fn bytes(&self, name: &str) -> Cow<'_, [u8]>;
}

impl Source for Checkpoint {
    fn config(&self) -> &Config {
        self.config()
    }

    fn bytes(&self, name: &str) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.bytes(name))
    }
}

impl Checkpoint {
    /// Maps a checkpoint and checks it. Nothing is uploaded.
    ///
    /// # Errors
    /// [`CheckpointError`]; [`CheckpointError::Problems`] has all problems of the tensors.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let config = Config::read(folder)?;
        let mut problems = Vec::new();
        let shards = Shards::open(folder, &mut problems)?;
        let checkpoint = Self { config, folder: folder.to_owned(), shards };
        checkpoint.check(&mut problems);
        if problems.is_empty() {
            return Ok(checkpoint);
        }
        Err(CheckpointError::Problems { folder: folder.to_owned(), problems })
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The bytes of a tensor.
    ///
    /// # Panics
    /// For a name that no configuration has. That is a mistake in the model, which every checkpoint
    /// shows.
    pub fn bytes(&self, name: &str) -> &[u8] {
        let found = self.shards.tensors.get(name);
        let found = found.unwrap_or_else(|| panic!("a checkpoint has no tensor `{name}`"));
        &self.shards.files[found.shard][found.bytes[0]..found.bytes[1]]
    }

    /// Bytes of all tensors in the files, copies of shared ones excepted.
    pub fn total_bytes(&self) -> usize {
        tensors::all(&self.config).iter().map(TensorSpec::bytes).sum()
    }

    /// Adds what is wrong with the tensors to `problems`.
    fn check(&self, problems: &mut Vec<Problem>) {
        let expected = tensors::all(&self.config);
        let shared: BTreeMap<String, &str> = tensors::copies(&self.config).into_iter().collect();
        let known: BTreeSet<&str> = expected.iter().map(|spec| spec.name.as_str()).collect();
        for spec in &expected {
            self.check_tensor(spec, problems);
        }
        for (name, found) in &self.shards.tensors {
            match shared.get(name) {
                Some(&of) => self.check_copy(name, of, problems),
                None if known.contains(name.as_str()) => {}
                None => {
                    let shard = self.shards.names[found.shard].clone();
                    problems.push(Problem::Extra { name: name.clone(), shard });
                }
            }
        }
    }

    fn check_tensor(&self, spec: &TensorSpec, problems: &mut Vec<Problem>) {
        let name = &spec.name;
        let Some(found) = self.shards.tensors.get(name) else {
            return problems.push(Problem::Missing { name: name.clone() });
        };
        let right_type = found.dtype == spec.format.stored();
        if !right_type {
            let (found, expected) = (type_name(found.dtype), type_name(spec.format.stored()));
            problems.push(Problem::WrongType { name: name.clone(), found, expected });
        }
        // A number may be a list of one.
        let is_number = spec.is_global_scale() && found.shape == [1];
        if found.shape != spec.shape && !is_number {
            let (found, expected) = (found.shape.clone(), spec.shape.clone());
            problems.push(Problem::WrongShape { name: name.clone(), found, expected });
        } else if right_type && spec.format == Format::I64 && self.is_complete(name) {
            self.check_table(spec, problems);
        } else if right_type && spec.is_global_scale() && self.is_complete(name) {
            let value = number(self.bytes(name));
            if !(value > 0.0 && value.is_finite()) {
                problems.push(Problem::NoScale { name: name.clone(), value: value.to_string() });
            }
        }
    }

    /// Whether the shard has all bytes of a tensor.
    fn is_complete(&self, name: &str) -> bool {
        let found = self.shards.tensors.get(name);
        found.is_some_and(|found| found.bytes[1] <= self.shards.files[found.shard].len())
    }

    /// The entries of a hashed router's table are experts.
    fn check_table(&self, spec: &TensorSpec, problems: &mut Vec<Problem>) {
        let (topk, experts) = (self.config.topk, self.config.num_experts);
        let entries = integers(self.bytes(&spec.name));
        let wrong = entries.enumerate().find(|&(_, id)| !(0..experts as i64).contains(&id));
        if let Some((slot, expert)) = wrong {
            let (name, token) = (spec.name.clone(), slot / topk);
            problems.push(Problem::NoExpert { name, token, expert, experts });
        }
    }

    fn check_copy(&self, name: &str, of: &str, problems: &mut Vec<Problem>) {
        let complete = [name, of].iter().all(|name| self.is_complete(name));
        let of_type = |name: &str| self.shards.tensors[name].dtype;
        // A shared tensor that is missing or cut off was reported.
        let differs =
            complete && (of_type(name) != of_type(of) || self.bytes(name) != self.bytes(of));
        if differs {
            problems.push(Problem::CopyDiffers { name: name.to_owned(), of: of.to_owned() });
        }
    }
}

/// The number that an fp32 tensor of one element holds.
pub(crate) fn number(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(f32::NAN, |&bytes| f32::from_le_bytes(bytes))
}

/// The integers of a tensor of 64-bit integers.
pub(crate) fn integers(bytes: &[u8]) -> impl Iterator<Item = i64> {
    bytes.as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes))
}

/// The name of a type in a safetensors file.
fn type_name(dtype: Dtype) -> String {
    format!("{dtype:?}")
}

#[cfg(test)]
mod tests;
