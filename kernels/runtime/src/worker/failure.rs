//! The errors of a worker process, as they are sent to its device.

use std::io;

use serde::{Deserialize, Serialize};

use crate::error::RuntimeError;

/// A [`RuntimeError`] in a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Failure {
    Fault { kernel: String, block: String, thread: String, what: String },
    Launch { kernel: String, reason: String },
    SymbolMissing { file: String, symbol: String },
    SourceMissing { file: String, tree: String },
    Compile { compiler: String, file: String, defines: String, log: String },
    Load { file: String, what: String },
    Cuda { call: String, name: String, message: String },
    TooLarge { name: String, needed: usize, limit: usize, of: String },
    BackendMissing { backend: String, reason: String },
    Rank { rank: usize, size: usize, collective: String, what: String },
    System { doing: String, message: String, out_of_memory: bool },
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        use RuntimeError as E;
        match error {
            E::Fault { kernel, block, thread, what } => Self::Fault { kernel, block, thread, what },
            E::Launch { kernel, reason } => Self::Launch { kernel, reason },
            E::SymbolMissing { file, symbol } => Self::SymbolMissing { file, symbol },
            E::SourceMissing { file, tree } => Self::SourceMissing { file, tree },
            E::Compile { compiler, file, defines, log } => {
                Self::Compile { compiler, file, defines, log }
            }
            E::Load { file, what } => Self::Load { file, what },
            E::Cuda { call, name, message } => Self::Cuda { call, name, message },
            E::TooLarge { name, needed, limit, of } => {
                Self::TooLarge { name, needed, limit, of: of.to_owned() }
            }
            E::BackendMissing { backend, reason } => {
                Self::BackendMissing { backend: backend.to_owned(), reason }
            }
            E::Rank { rank, size, collective, what } => Self::Rank { rank, size, collective, what },
            E::System { doing, source } => {
                let out_of_memory = source.kind() == io::ErrorKind::OutOfMemory;
                Self::System { doing, message: source.to_string(), out_of_memory }
            }
            // Errors of launchers, which do not run in the worker.
            other @ (E::Argument { .. } | E::ParamsLayout { .. }) => Self::System {
                doing: "working for a device".into(),
                message: other.to_string(),
                out_of_memory: false,
            },
        }
    }
}

impl From<Failure> for RuntimeError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Fault { kernel, block, thread, what } => {
                Self::Fault { kernel, block, thread, what }
            }
            Failure::Launch { kernel, reason } => Self::Launch { kernel, reason },
            Failure::SymbolMissing { file, symbol } => Self::SymbolMissing { file, symbol },
            Failure::SourceMissing { file, tree } => Self::SourceMissing { file, tree },
            Failure::Compile { compiler, file, defines, log } => {
                Self::Compile { compiler, file, defines, log }
            }
            Failure::Load { file, what } => Self::Load { file, what },
            Failure::Cuda { call, name, message } => Self::Cuda { call, name, message },
            Failure::TooLarge { name, needed, limit, of } => Self::TooLarge {
                name,
                needed,
                limit,
                of: known(&of, &["bytes of addresses", "bytes of device memory"]),
            },
            Failure::BackendMissing { backend, reason } => Self::BackendMissing {
                backend: known(&backend, &["nccl", "emulator", "external", "cuda"]),
                reason,
            },
            Failure::Rank { rank, size, collective, what } => {
                Self::Rank { rank, size, collective, what }
            }
            Failure::System { doing, message, out_of_memory } => {
                let kind =
                    if out_of_memory { io::ErrorKind::OutOfMemory } else { io::ErrorKind::Other };
                Self::system(doing, io::Error::new(kind, message))
            }
        }
    }
}

/// The entry of `words` that equals `text`; the last one if none does.
fn known(text: &str, words: &[&'static str]) -> &'static str {
    words.iter().copied().find(|word| *word == text).or(words.last().copied()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_kind_and_words() {
        let of = |text: &str| text.to_owned();
        let errors = [
            RuntimeError::Fault {
                kernel: of("copy"),
                block: of("b"),
                thread: of("t"),
                what: of("w"),
            },
            RuntimeError::Launch { kernel: of("copy"), reason: of("r") },
            RuntimeError::SymbolMissing { file: of("f"), symbol: of("s") },
            RuntimeError::SourceMissing { file: of("f"), tree: of("t") },
            RuntimeError::Compile {
                compiler: of("c"),
                file: of("f"),
                defines: of(" -DX"),
                log: of("l"),
            },
            RuntimeError::Load { file: of("f"), what: of("ended its process") },
            RuntimeError::Cuda { call: of("cuInit"), name: of("CUDA_ERROR"), message: of("m") },
            RuntimeError::TooLarge { name: of("y"), needed: 2, limit: 1, of: "bytes of addresses" },
            RuntimeError::TooLarge {
                name: of("y"),
                needed: 2,
                limit: 1,
                of: "bytes of device memory",
            },
            RuntimeError::BackendMissing { backend: "cuda", reason: of("r") },
            RuntimeError::Rank { rank: 1, size: 2, collective: of("barrier"), what: of("w") },
            RuntimeError::system("mapping", io::ErrorKind::OutOfMemory.into()),
        ];
        for error in errors {
            let (words, kind) = (error.to_string(), std::mem::discriminant(&error));
            let failure = serde_json::to_string(&Failure::from(error)).unwrap();
            let back = RuntimeError::from(serde_json::from_str::<Failure>(&failure).unwrap());
            assert_eq!((back.to_string(), std::mem::discriminant(&back)), (words, kind));
        }
    }
}
