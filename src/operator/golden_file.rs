//! Golden files: results of independent public implementations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use thiserror::Error;

use super::size;

/// Why a golden folder or file cannot be read.
#[derive(Debug, Error)]
pub enum GoldenError {
    /// The folder or a file in it cannot be read.
    #[error("reading {path}: {source}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A folder that holds no golden file.
    #[error("{path} holds no .safetensors file")]
    Empty {
        /// The folder.
        path: PathBuf,
    },
    /// The file is not a safetensors file, is truncated, or has no description.
    #[error("{path} is no golden file: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
}

/// The element kind of a golden tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Floating-point values.
    Float,
    /// Signed integers.
    Integer,
    /// Bytes: masks.
    Byte,
}

/// A tensor of a golden file, widened to f64. Every type that occurs widens exactly.
#[derive(Clone, Debug)]
pub struct GoldenTensor {
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub values: Vec<f64>,
    /// The stored element kind.
    pub kind: Kind,
    /// Whether the file holds f32.
    pub stored_f32: bool,
}

/// One case of the golden set.
#[derive(Clone, Debug)]
pub struct GoldenFile {
    /// File name.
    pub name: String,
    /// Operator, as the golden set names it: the file name up to `__`.
    pub operator: String,
    /// The case's `config`.
    pub config: Value,
    /// Tensors by name (`in.x`, `out.y`, `grad.in.x`, …).
    pub tensors: BTreeMap<String, GoldenTensor>,
}

impl GoldenFile {
    /// A tensor, or an error that names it.
    ///
    /// # Errors
    /// The missing name.
    pub fn tensor(&self, name: &str) -> Result<&GoldenTensor, String> {
        self.tensors.get(name).ok_or_else(|| format!("there is no tensor `{name}`"))
    }

    /// A number of the configuration.
    ///
    /// # Errors
    /// The missing or non-numeric name.
    pub fn number(&self, name: &str) -> Result<f64, String> {
        self.config[name].as_f64().ok_or_else(|| format!("config has no number `{name}`"))
    }
}

/// The names of the golden files in `dir`, in alphabetical order: all that end in `.safetensors`.
///
/// # Errors
/// [`GoldenError::Read`], [`GoldenError::Empty`].
pub fn names_in(dir: &Path) -> Result<Vec<String>, GoldenError> {
    let unread = |source| GoldenError::Read { path: dir.to_owned(), source };
    let entries =
        std::fs::read_dir(dir).map_err(unread)?.collect::<Result<Vec<_>, _>>().map_err(unread)?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
    names.sort();
    if names.is_empty() { Err(GoldenError::Empty { path: dir.to_owned() }) } else { Ok(names) }
}

/// The kind of a file ([`GoldenFile::operator`]): its name up to `__`.
pub fn kind_of(name: &str) -> &str {
    name.split("__").next().unwrap_or_default()
}

/// Memory for reading a file, as a multiple of its bytes: the file, and its elements widened from
/// one byte to eight.
const WIDENED: u128 = 10;

/// The bytes of a regular file within the size limit of a case.
fn bytes_of(path: &Path) -> Result<Vec<u8>, GoldenError> {
    let unread = |source| GoldenError::Read { path: path.to_owned(), source };
    let file = std::fs::metadata(path).map_err(unread)?;
    if !file.is_file() {
        return Err(GoldenError::File {
            path: path.to_owned(),
            reason: "it is no regular file".into(),
        });
    }
    let limit = size::limit();
    if !limit.allows(u128::from(file.len()) * WIDENED) {
        let reason = format!(
            "{} bytes take more than the {limit} of memory that are allowed (--memory)",
            file.len()
        );
        return Err(GoldenError::File { path: path.to_owned(), reason });
    }
    std::fs::read(path).map_err(unread)
}

/// Reads one file.
///
/// # Errors
/// [`GoldenError::Read`], [`GoldenError::File`].
pub fn read(path: &Path) -> Result<GoldenFile, GoldenError> {
    let bytes = bytes_of(path)?;
    let broken = |reason: String| GoldenError::File { path: path.to_owned(), reason };
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|e| broken(e.to_string()))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| broken(e.to_string()))?;
    let description = header.metadata().as_ref().and_then(|m| m.get("golden"));
    let description =
        description.ok_or_else(|| broken("its header has no `golden` description".into()))?;
    let description: Value =
        serde_json::from_str(description).map_err(|e| broken(e.to_string()))?;
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let operator = kind_of(&name).to_owned();
    let mut read = BTreeMap::new();
    for (tensor_name, view) in tensors.tensors() {
        let values = widen(view.dtype(), view.data()).ok_or_else(|| {
            broken(format!("`{tensor_name}` has the unknown type {:?}", view.dtype()))
        })?;
        let (kind, stored_f32) = (kind_of_elements(view.dtype()), view.dtype() == Dtype::F32);
        read.insert(
            tensor_name,
            GoldenTensor { shape: view.shape().to_vec(), values, kind, stored_f32 },
        );
    }
    Ok(GoldenFile { name, operator, config: description["config"].clone(), tensors: read })
}

fn kind_of_elements(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::I64 | Dtype::I32 => Kind::Integer,
        Dtype::U8 | Dtype::BOOL => Kind::Byte,
        _ => Kind::Float,
    }
}

fn widen(dtype: Dtype, data: &[u8]) -> Option<Vec<f64>> {
    fn words<const N: usize>(data: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
        data.chunks_exact(N).map(|chunk| {
            let mut word = [0; N];
            word.copy_from_slice(chunk);
            word
        })
    }
    Some(match dtype {
        Dtype::F64 => words(data).map(f64::from_le_bytes).collect(),
        Dtype::F32 => words(data).map(|w| f64::from(f32::from_le_bytes(w))).collect(),
        Dtype::BF16 => words(data).map(|w| bf16::from_le_bytes(w).to_f64()).collect(),
        Dtype::I64 => words(data).map(|w| i64::from_le_bytes(w) as f64).collect(),
        Dtype::I32 => words(data).map(|w| f64::from(i32::from_le_bytes(w))).collect(),
        Dtype::U8 | Dtype::BOOL => data.iter().map(|&b| f64::from(b)).collect(),
        _ => return None,
    })
}
