//! What a device and its worker process say to each other, over a socket: a request or an answer as JSON, and beside it the
//! bytes that it carries, the parameters of a launch.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::memory::Placed;
use crate::runtime::backend::KernelExports;
use crate::runtime::error::RuntimeError;

/// The longest message, and the most bytes that it carries: what is longer is no message of ours.
const LONGEST: usize = 1 << 24;

/// What a worker is asked for. The first three are answered; what went wrong with another is what the next of them says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Loads a compiled module; answered by [`Answer::Module`].
    Load { path: PathBuf, file: String },
    /// What a module exports for a kernel.
    Exports { module: u64, kernel: String },
    /// Runs a kernel; the bytes are its parameters.
    Launch { module: u64, kernel: String, grid: [u32; 3], block: [u32; 3], shared_bytes: u32 },
    /// Maps a buffer.
    Map(Placed),
    /// Unmaps it.
    Unmap(Placed),
    /// Gives a module back.
    Unload { module: u64 },
    /// The schedule of later launches.
    Schedule { seed: Option<u64> },
}

impl Request {
    /// Whether the worker answers.
    pub fn is_answered(&self) -> bool {
        use Request::*;
        matches!(self, Load { .. } | Exports { .. } | Launch { .. })
    }
}

/// What a worker answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It is done.
    Done,
    /// A module is loaded under this number.
    Module(u64),
    /// Of a kernel.
    Exports(KernelExports),
    /// It could not be done.
    Failed(Failure),
}

/// The errors of a worker, [`RuntimeError`]s.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Failure {
    Fault { kernel: String, block: String, thread: String, what: String },
    Launch { kernel: String, reason: String },
    SymbolMissing { file: String, symbol: String },
    System { doing: String, message: String, out_of_memory: bool },
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Fault { kernel, block, thread, what } => Self::Fault { kernel, block, thread, what },
            RuntimeError::Launch { kernel, reason } => Self::Launch { kernel, reason },
            RuntimeError::SymbolMissing { file, symbol } => Self::SymbolMissing { file, symbol },
            RuntimeError::System { doing, source } => {
                let out_of_memory = source.kind() == io::ErrorKind::OutOfMemory;
                Self::System { doing, message: source.to_string(), out_of_memory }
            }
            other => {
                Self::System { doing: "working for a device".into(), message: other.to_string(), out_of_memory: false }
            }
        }
    }
}

impl From<Failure> for RuntimeError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Fault { kernel, block, thread, what } => Self::Fault { kernel, block, thread, what },
            Failure::Launch { kernel, reason } => Self::Launch { kernel, reason },
            Failure::SymbolMissing { file, symbol } => Self::SymbolMissing { file, symbol },
            Failure::System { doing, message, out_of_memory } => {
                let kind = if out_of_memory { io::ErrorKind::OutOfMemory } else { io::ErrorKind::Other };
                Self::system(doing, io::Error::new(kind, message))
            }
        }
    }
}

/// Writes a message and its bytes. `tag` is what the reader expects of this message: a number that nobody guesses.
pub fn write(stream: &mut impl Write, tag: u64, message: &impl Serialize, bytes: &[u8]) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    stream.write_all(&tag.to_le_bytes())?;
    stream.write_all(&(text.len() as u64).to_le_bytes())?;
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(&text)?;
    stream.write_all(bytes)
}

/// Reads the message of this tag, and how many bytes follow it: the caller reads them.
pub fn read<M: DeserializeOwned>(stream: &mut impl Read, tag: u64) -> io::Result<(M, u64)> {
    let mut length = || {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    };
    let (found, text, bytes) = (length()?, length()?, length()?);
    let fits = |length: &usize| *length <= LONGEST && bytes <= LONGEST as u64 && found == tag;
    let length = usize::try_from(text).ok().filter(fits);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no message of a worker"))?;
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok((serde_json::from_slice(&text)?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_comes_back_with_the_length_of_its_bytes_and_half_of_one_or_another_is_an_error() {
        let mut sent = Vec::new();
        let request = Request::Schedule { seed: Some(u64::MAX) };
        write(&mut sent, 7, &request, b"bytes").unwrap();
        let mut stream = &sent[..];
        let (read_back, bytes) = read::<Request>(&mut stream, 7).unwrap();
        assert_eq!((format!("{read_back:?}"), bytes, stream), (format!("{request:?}"), 5, &b"bytes"[..]));
        for length in 0..sent.len() - 5 {
            assert!(read::<Request>(&mut &sent[..length], 7).is_err(), "{length} bytes");
        }
        let kind = |sent: &[u8], tag| read::<Request>(&mut &sent[..], tag).unwrap_err().kind();
        assert_eq!(kind(&sent, 8), io::ErrorKind::InvalidData, "another message was expected");
        sent[15] = 1;
        assert_eq!(kind(&sent, 7), io::ErrorKind::InvalidData, "of such a length there is none");
    }

    /// Messages of both kinds, as they are sent.
    fn sent() -> Vec<Vec<u8>> {
        let requests = [
            Request::Load { path: "/tmp/module.so".into(), file: "rope.cu".into() },
            Request::Launch {
                module: 3,
                kernel: "k".into(),
                grid: [1, 2, 3],
                block: [64, 1, 1],
                shared_bytes: 48 << 10,
            },
            Request::Schedule { seed: Some(7) },
        ];
        let fault = RuntimeError::Fault { kernel: "k".into(), block: "b".into(), thread: "t".into(), what: "w".into() };
        let answers = [Answer::Done, Answer::Module(u64::MAX), Answer::Failed(fault.into())];
        let mut all = Vec::new();
        for request in requests {
            let mut bytes = Vec::new();
            write(&mut bytes, 7, &request, b"parameters").unwrap();
            all.push(bytes);
        }
        for answer in answers {
            let mut bytes = Vec::new();
            write(&mut bytes, 7, &answer, &[]).unwrap();
            all.push(bytes);
        }
        all
    }

    #[test]
    fn whatever_a_worker_or_its_device_sends_is_a_message_or_an_error() {
        use proptest::prelude::*;
        use proptest::sample::Index;
        let everything = std::env::var("PARITY_TESTS").is_ok_and(|extent| extent == "all");
        let config = ProptestConfig {
            cases: if everything { 11_000 } else { 300 },
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        let changes = prop::collection::vec((any::<Index>(), any::<u8>(), 0..4u8), 0..4);
        proptest!(config, |(which in any::<Index>(), changes in changes, end in any::<Index>(), whole in any::<bool>())| {
            let mut bytes = which.get(&sent()).clone();
            for (at, byte, kind) in changes {
                // Mostly in the text: the tag is another one at once.
                let at = if kind == 0 { at.index(bytes.len()) } else { 24.min(bytes.len() - 1) + at.index(bytes.len().saturating_sub(24).max(1)) };
                let at = at.min(bytes.len() - 1);
                if kind == 1 { bytes.insert(at, byte) } else { bytes[at] = byte }
            }
            if !whole {
                bytes.truncate(end.index(bytes.len()));
            }
            let _ = read::<Request>(&mut &bytes[..], 7);
            if let Ok((Answer::Failed(failure), _)) = read::<Answer>(&mut &bytes[..], 7) {
                let _ = RuntimeError::from(failure).to_string();
            }
        });
    }

    #[test]
    fn errors_keep_their_kind_and_words() {
        let out_of_memory = io::Error::from(io::ErrorKind::OutOfMemory);
        let kernel = || "copy".to_owned();
        let errors = [
            RuntimeError::Fault { kernel: kernel(), block: "b".into(), thread: "t".into(), what: "w".into() },
            RuntimeError::Launch { kernel: kernel(), reason: "r".into() },
            RuntimeError::SymbolMissing { file: "f".into(), symbol: "s".into() },
            RuntimeError::system("mapping", out_of_memory),
        ];
        for error in errors {
            let words = error.to_string();
            let failure = serde_json::to_string(&Failure::from(error)).unwrap();
            let back = RuntimeError::from(serde_json::from_str::<Failure>(&failure).unwrap());
            assert_eq!(back.to_string(), words);
        }
    }
}
