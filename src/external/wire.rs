//! Tensors in the exchange with another process: safetensors files, read and written whole.

use std::collections::BTreeMap;
use std::path::Path;

use dsv4_runtime::files::read_regular;
use dsv4_runtime::{DType, HostTensor};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

/// Element types of the exchange, by safetensors' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum WireType {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// Two's complement, 64 bits.
    I64,
    /// Two's complement, 32 bits.
    I32,
    /// Bytes.
    U8,
}

impl WireType {
    const ALL: [Self; 7] =
        [Self::F64, Self::F32, Self::F16, Self::Bf16, Self::I64, Self::I32, Self::U8];

    /// The type in which a tensor of ours is exchanged unless an adapter declares another.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::I32 => Self::I32,
            DType::I64 => Self::I64,
            DType::U8 => Self::U8,
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F64 => Dtype::F64,
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
            Self::I64 => Dtype::I64,
            Self::I32 => Dtype::I32,
            Self::U8 => Dtype::U8,
        }
    }

    /// Whether it holds integers.
    pub fn is_integer(self) -> bool {
        matches!(self, Self::I64 | Self::I32 | Self::U8)
    }

    /// Rounds values to this type, ties to even; an integer type takes what it can hold.
    ///
    /// # Errors
    /// A value that an integer type does not have.
    pub fn encode(self, values: &[f64]) -> Result<Vec<u8>, String> {
        let integer = |value: f64, low: f64, high: f64| match value {
            v if v.fract() == 0.0 && (low..=high).contains(&v) => Ok(v as i64),
            v => Err(format!("{v} is no value of {self}")),
        };
        let bytes = |value: f64| -> Result<Vec<u8>, String> {
            Ok(match self {
                Self::F64 => value.to_le_bytes().into(),
                Self::F32 => (value as f32).to_le_bytes().into(),
                Self::F16 => f16::from_f64(value).to_le_bytes().into(),
                Self::Bf16 => bf16::from_f64(value).to_le_bytes().into(),
                // 2^53: up to there every integer is an f64.
                Self::I64 => integer(value, -9_007_199_254_740_992.0, 9_007_199_254_740_992.0)?
                    .to_le_bytes()
                    .into(),
                Self::I32 => (integer(value, f64::from(i32::MIN), f64::from(i32::MAX))? as i32)
                    .to_le_bytes()
                    .into(),
                Self::U8 => vec![integer(value, 0.0, 255.0)? as u8],
            })
        };
        values
            .iter()
            .map(|&value| bytes(value))
            .collect::<Result<Vec<_>, _>>()
            .map(|all| all.concat())
    }

    /// The values of some bytes, widened (exact except for integers beyond 2^53).
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        fn words<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|&word| value(word)).collect()
        }
        match self {
            Self::F64 => words(bytes, f64::from_le_bytes),
            Self::F32 => words(bytes, |word| f64::from(f32::from_le_bytes(word))),
            Self::F16 => words(bytes, |word| f16::from_le_bytes(word).to_f64()),
            Self::Bf16 => words(bytes, |word| bf16::from_le_bytes(word).to_f64()),
            Self::I64 => words(bytes, |word| i64::from_le_bytes(word) as f64),
            Self::I32 => words(bytes, |word| f64::from(i32::from_le_bytes(word))),
            Self::U8 => words(bytes, |[byte]| f64::from(byte)),
        }
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

impl std::fmt::Display for WireType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.stored())
    }
}

/// A dense row-major tensor in a file.
#[derive(Clone, PartialEq, Eq)]
pub struct WireTensor {
    /// Element type.
    pub dtype: WireType,
    /// Shape, outermost axis first.
    pub shape: Vec<usize>,
    /// Elements, little-endian.
    pub bytes: Vec<u8>,
}

impl std::fmt::Debug for WireTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

impl From<&HostTensor> for WireTensor {
    fn from(tensor: &HostTensor) -> Self {
        Self {
            dtype: WireType::of(tensor.dtype),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes.clone(),
        }
    }
}

/// Tensors of a file, by name.
pub type WireTensors = BTreeMap<String, WireTensor>;

/// The bytes of a safetensors file.
///
/// # Errors
/// What safetensors rejects.
pub fn to_bytes(tensors: &WireTensors) -> Result<Vec<u8>, String> {
    let views = tensors
        .iter()
        .map(|(name, tensor)| {
            let view = TensorView::new(tensor.dtype.stored(), tensor.shape.clone(), &tensor.bytes);
            view.map(|view| (name.as_str(), view)).map_err(|e| format!("`{name}`: {e}"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    safetensors::serialize(views, None).map_err(|e| e.to_string())
}

/// Bytes that a file of tensors of these names and shapes may have, whatever the types: with its
/// header, and with room for as much again.
pub fn most_bytes<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> u64 {
    /// Of the widest type.
    const ELEMENT: u64 = 8;
    /// Of an entry's text, and of a number.
    const WORDS: u64 = 128;
    const NUMBER: u64 = 24;
    let entries = tensors.map(|(name, shape)| {
        let elements =
            shape.iter().fold(1_u64, |product, &extent| product.saturating_mul(extent as u64));
        // A byte of a name may be written as six.
        let header = 6 * name.len() as u64 + WORDS + NUMBER * (shape.len() as u64 + 2);
        elements.saturating_mul(ELEMENT).saturating_add(header)
    });
    entries.fold(1 << 16, u64::saturating_add)
}

/// Reads a regular file of at most that many bytes.
///
/// # Errors
/// A file that is missing, not regular, larger, or not a safetensors file, or a tensor of a type
/// that is not supported here.
pub fn read(path: &Path, most: u64) -> Result<WireTensors, String> {
    let bytes = read_regular(path, most)?;
    let name_of =
        path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|e| format!("{name_of} is no safetensors file: {e}"))?;
    file.tensors()
        .into_iter()
        .map(|(name, view)| {
            let dtype = WireType::ALL.into_iter().find(|dtype| dtype.stored() == view.dtype());
            let dtype = dtype.ok_or_else(|| {
                format!("`{name}` of {name_of} has the unknown type {}", view.dtype())
            })?;
            Ok((
                name,
                WireTensor { dtype, shape: view.shape().to_vec(), bytes: view.data().to_vec() },
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_takes_its_own_values_and_gives_them_back() {
        for dtype in WireType::ALL {
            let values: &[f64] =
                if dtype.is_integer() { &[0.0, 1.0, 255.0] } else { &[0.0, -1.5, f64::INFINITY] };
            let bytes = dtype.encode(values).unwrap();
            assert_eq!(bytes.len(), values.len() * dtype.size());
            assert_eq!(dtype.decode(&bytes), values, "{dtype}");
        }
    }

    #[test]
    fn integers_refuse_what_they_do_not_have() {
        for (dtype, value) in
            [(WireType::U8, -1.0), (WireType::I32, 0.5), (WireType::I64, f64::NAN)]
        {
            assert!(dtype.encode(&[value]).unwrap_err().contains(&dtype.to_string()));
        }
    }

    #[test]
    fn a_file_holds_every_tensor_and_a_cut_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.safetensors");
        let tensor = |dtype: WireType, shape: &[usize]| WireTensor {
            dtype,
            shape: shape.to_vec(),
            bytes: vec![1; shape.iter().product::<usize>() * dtype.size()],
        };
        let tensors: WireTensors =
            [("a", tensor(WireType::Bf16, &[2, 3])), ("b", tensor(WireType::I64, &[0, 4]))]
                .map(|(n, t)| (n.into(), t))
                .into();
        let bytes = to_bytes(&tensors).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path, bytes.len() as u64).unwrap(), tensors);
        let shapes = || tensors.iter().map(|(name, tensor)| (name.as_str(), &tensor.shape[..]));
        assert!(most_bytes(shapes()) >= bytes.len() as u64 && most_bytes(shapes()) < 1 << 17);
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(read(&path, 1 << 20).unwrap_err().contains("no safetensors file"));
    }
}
