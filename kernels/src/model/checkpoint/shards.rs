//! The files of a checkpoint: which shard has which tensor, and where its bytes are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use dsv4_runtime::mapped::MappedFile;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::{CheckpointError, Problem, naming};

/// The file that names the shard of each tensor.
pub const INDEX: &str = "model.safetensors.index.json";
/// The only file of a checkpoint without an index.
pub const SINGLE: &str = "model.safetensors";
/// Bytes of the number in front of a header, and the most that a header may have.
const LENGTH_BYTES: usize = 8;
const MOST_HEADER_BYTES: usize = 100_000_000;

/// The index: a shard for each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A tensor in a mapped shard.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The first byte in the shard, and the first after the last.
    pub bytes: [usize; 2],
}

/// The mapped shards, and what their headers declare.
pub(super) struct Shards {
    pub names: Vec<String>,
    pub files: Vec<MappedFile>,
    pub tensors: BTreeMap<String, Found>,
}

impl Shards {
    /// Maps all shards and reads their headers. What is wrong with a shard is added to `problems`;
    /// its tensors are missing then, and named by their shard only.
    pub fn open(folder: &Path, problems: &mut Vec<Problem>) -> Result<Self, CheckpointError> {
        let listed = listed(folder)?;
        let names = match &listed {
            Some(listed) => listed.values().cloned().collect::<BTreeSet<_>>(),
            None => BTreeSet::from([SINGLE.to_owned()]),
        };
        let mut shards = Self { names: Vec::new(), files: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            // An index may come from anywhere; its shards are files of this folder.
            if Path::new(&name).file_name().is_none_or(|file| file != name.as_str()) {
                problems.push(Problem::ShardOutside { shard: name });
                continue;
            }
            match MappedFile::open(&folder.join(&name)) {
                Ok(file) => shards.add(name, file, problems),
                Err(error) => {
                    problems.push(Problem::Shard { shard: name, reason: error.to_string() });
                }
            }
        }
        if let Some(listed) = listed {
            shards.match_index(&listed, problems);
        }
        shards.name_officially(problems);
        Ok(shards)
    }

    /// Gives tensors with names of transformers their official names. One that holds all experts
    /// of a layer becomes a tensor for each of them.
    fn name_officially(&mut self, problems: &mut Vec<Problem>) {
        let theirs = |(name, _): &(&String, &Found)| naming::is_of_transformers(name);
        let theirs: Vec<String> =
            self.tensors.iter().filter(theirs).map(|(name, _)| name.clone()).collect();
        for name in theirs {
            let Some(found) = self.tensors.remove(&name) else { continue };
            let Some(parts) = naming::parts(&name, &found.shape) else {
                problems.push(Problem::TransformersName { name });
                continue;
            };
            let each = (found.bytes[1] - found.bytes[0]) / parts.len().max(1);
            for (number, part) in parts.into_iter().enumerate() {
                let start = found.bytes[0] + number * each;
                let (shape, bytes) = (part.shape, [start, start + each]);
                let one = Found { shape, bytes, ..found.clone() };
                if let Some(before) = self.tensors.insert(part.name.clone(), one) {
                    let shards = [before.shard, found.shard].map(|at| self.names[at].clone());
                    problems.push(Problem::Twice { name: part.name, shards });
                }
            }
        }
    }

    fn add(&mut self, shard: String, file: MappedFile, problems: &mut Vec<Problem>) {
        let (start, header) = match header(&file) {
            Ok(header) => header,
            Err(reason) => return problems.push(Problem::Shard { shard, reason }),
        };
        let declared = start + header.data_len();
        if file.len() > declared {
            let reason = format!("has {} bytes, and its header declares {declared}", file.len());
            problems.push(Problem::Shard { shard: shard.clone(), reason });
        }
        let mut cut: Vec<String> = Vec::new();
        for (name, info) in header.tensors() {
            let bytes = [start + info.data_offsets.0, start + info.data_offsets.1];
            if bytes[1] > file.len() {
                cut.push(name.clone());
            }
            let (number, shape) = (self.files.len(), info.shape.clone());
            let found = Found { shard: number, dtype: info.dtype, shape, bytes };
            if let Some(before) = self.tensors.insert(name.clone(), found) {
                let first = self.names[before.shard].clone();
                problems.push(Problem::Twice { name, shards: [first, shard.clone()] });
            }
        }
        if !cut.is_empty() {
            cut.sort();
            let (bytes, tensors) = (file.len(), cut);
            problems.push(Problem::Truncated { shard: shard.clone(), bytes, declared, tensors });
        }
        self.names.push(shard);
        self.files.push(file);
    }

    /// The index and the headers must name the same tensors in the same shards.
    fn match_index(&self, listed: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
        for (name, shard) in listed {
            let is_read = self.names.contains(shard);
            let there = self.tensors.get(name).is_some_and(|at| self.names[at.shard] == *shard);
            // What is wrong with a shard that cannot be read was reported.
            if is_read && !there {
                problems.push(Problem::NotInShard { name: name.clone(), shard: shard.clone() });
            }
        }
        for (name, found) in &self.tensors {
            if !listed.contains_key(name) {
                let shard = self.names[found.shard].clone();
                problems.push(Problem::Unlisted { name: name.clone(), shard });
            }
        }
    }
}

/// The shard of each tensor, if there is an index.
fn listed(folder: &Path) -> Result<Option<BTreeMap<String, String>>, CheckpointError> {
    let path = folder.join(INDEX);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return match folder.join(SINGLE).is_file() {
                true => Ok(None),
                false => Err(CheckpointError::NoWeights { folder: folder.to_owned() }),
            };
        }
        Err(source) => return Err(CheckpointError::Unreadable { path, source }),
    };
    let index: Index = serde_json::from_str(&text)
        .map_err(|error| CheckpointError::Index { path, reason: error.to_string() })?;
    Ok(Some(index.weight_map))
}

/// The first byte after a shard's header, and the header.
fn header(file: &[u8]) -> Result<(usize, Metadata), String> {
    let Some(length) = file.first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("has {} bytes, fewer than the length of a header", file.len()));
    };
    let length = u64::from_le_bytes(*length);
    let bytes = usize::try_from(length).ok().filter(|&bytes| bytes <= MOST_HEADER_BYTES);
    let header = bytes.and_then(|bytes| file.get(LENGTH_BYTES..LENGTH_BYTES + bytes));
    let Some(header) = header else {
        return Err(format!(
            "has {} bytes, and a header of {length} bytes: it is truncated or not a safetensors \
             file",
            file.len()
        ));
    };
    let metadata = serde_json::from_slice(header)
        .map_err(|error| format!("has a header that is not one of safetensors: {error}"))?;
    Ok((LENGTH_BYTES + header.len(), metadata))
}
