//! The one error type of the runtime and the launchers.

use thiserror::Error;

/// Errors between a launcher's arguments and its outputs.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// A launcher rejected an argument. The message names the argument, its value and the rule that
    /// it breaks.
    #[error("{operator}: argument `{argument}`: {reason}")]
    Argument {
        /// Operator whose launcher rejected it.
        operator: &'static str,
        /// Argument, as the launcher's struct spells it.
        argument: &'static str,
        /// The value and the rule that it breaks.
        reason: String,
    },
    /// The required backend cannot work here.
    #[error("the {backend} backend is not available: {reason}")]
    BackendMissing {
        /// `cuda` or `emulator`.
        backend: &'static str,
        /// What was searched for, and where.
        reason: String,
    },
    /// A kernel source is missing from the current tree.
    #[error("no kernel source `{file}` in {tree}")]
    SourceMissing {
        /// File name within the tree.
        file: String,
        /// The tree: `the embedded kernels` or a directory.
        tree: String,
    },
    /// The compiler rejected a kernel source.
    #[error("{compiler} could not compile `{file}`{defines}:\n{log}")]
    Compile {
        /// Compiler and version.
        compiler: String,
        /// Source file.
        file: String,
        /// The defines it was compiled with, each with a leading ` -D`.
        defines: String,
        /// The compiler's messages.
        log: String,
    },
    /// A compiled module lacks a kernel or its exported layout.
    #[error("module `{file}` has no symbol `{symbol}`")]
    SymbolMissing {
        /// Source file of the module.
        file: String,
        /// Symbol that was looked up.
        symbol: String,
    },
    /// The parameter struct of Rust and the one of the kernel differ.
    #[error(
        "kernel `{kernel}`: parameter struct mismatch: the launcher has {rust_size} bytes, layout {rust_hash:016x}; \
         the kernel has {kernel_size} bytes, layout {kernel_hash:016x}: {difference}"
    )]
    ParamsLayout {
        /// Kernel name.
        kernel: String,
        /// Size of the launcher's struct in bytes.
        rust_size: u64,
        /// Layout hash of the launcher's struct.
        rust_hash: u64,
        /// Size of the kernel's struct in bytes.
        kernel_size: u64,
        /// Layout hash of the kernel's struct.
        kernel_hash: u64,
        /// The first field that differs, as the kernel's source declares it.
        difference: String,
    },
    /// A module had an effect on its process when it was loaded, before any of its kernels ran.
    #[error("loading `{file}`: a static constructor {what}")]
    Load {
        /// Source file of the module.
        file: String,
        /// The effect, or the time that it took.
        what: String,
    },
    /// A launch configuration outside of what the kernel or the device allows.
    #[error("kernel `{kernel}`: launch refused: {reason}")]
    Launch {
        /// Kernel name.
        kernel: String,
        /// The limit that was exceeded, and the value.
        reason: String,
    },
    /// The kernel did something that CUDA forbids; the emulator found it.
    #[error("kernel `{kernel}`, block {block}, thread {thread}: {what}")]
    Fault {
        /// Kernel name.
        kernel: String,
        /// Block index as `(x, y, z)`.
        block: String,
        /// Thread index as `(x, y, z)`.
        thread: String,
        /// The fault: divergence, an access outside a buffer, a time limit.
        what: String,
    },
    /// A call of the CUDA driver or NVRTC failed.
    #[error("{call} failed: {name}: {message}")]
    Cuda {
        /// The call that failed.
        call: String,
        /// CUDA's name of the error, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        /// CUDA's description.
        message: String,
    },
    /// A buffer needs more than this device has. Only the device's size is the cause, so a caller
    /// with a generated case may count it as skipped.
    #[error(
        "`{name}` is too large for this device: it needs {needed} {of}, and at most {limit} are to be had"
    )]
    TooLarge {
        /// The buffer's name.
        name: String,
        /// The required amount.
        needed: usize,
        /// The available amount.
        limit: usize,
        /// The unit, in the plural, such as `bytes of device memory`.
        of: &'static str,
    },
    /// A rank of a world failed, or does what the others do not.
    #[error("rank {rank} of {size}, {collective}: {what}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// The collective that failed, with its place in the source.
        collective: String,
        /// What happened to the rank, or what it does.
        what: String,
    },
    /// The operating system rejected something (memory, files, processes).
    #[error("{doing}: {source}")]
    System {
        /// The operation that failed.
        doing: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

impl RuntimeError {
    /// An [`RuntimeError::Argument`]; `reason` contains the value and the rule.
    pub fn argument(
        operator: &'static str,
        argument: &'static str,
        reason: impl Into<String>,
    ) -> Self {
        Self::Argument { operator, argument, reason: reason.into() }
    }

    /// An [`RuntimeError::System`] with the operation that failed.
    pub fn system(doing: impl Into<String>, source: std::io::Error) -> Self {
        Self::System { doing: doing.into(), source }
    }
}

/// `Result` with [`RuntimeError`].
pub type Result<T> = std::result::Result<T, RuntimeError>;
