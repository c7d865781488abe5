//! Why a model cannot be loaded or a service cannot be started: each variant names what was wanted
//! and what was found, with numbers, so that the message alone says what to change.

use rootstock::ConfigError;
use rootstock::journal::JournalError;
use rootstock::memory::{ArenaError, LayoutError};
use rootstock_kernels::KernelError;

use crate::gguf::GgufError;

/// Everything that can go wrong before the first step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The file names an architecture this engine has no mathematics for.
    #[error("architecture {found:?} is not supported, supported are {supported}")]
    Architecture {
        /// What `general.architecture` says.
        found: String,
        /// The names this engine knows, joined by commas.
        supported: &'static str,
    },
    /// The file itself cannot be read, or lacks what every model needs.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A metadata value is outside what this engine computes.
    #[error("metadata {key} is {found}, this engine needs {wanted}")]
    Unsupported {
        /// The full key.
        key: String,
        /// The value of the file.
        found: String,
        /// What would be accepted.
        wanted: String,
    },
    /// A tensor of the architecture is not in the file.
    #[error("tensor {name} is missing, the file is incomplete or of another architecture")]
    TensorMissing {
        /// The tensor's name.
        name: String,
    },
    /// A tensor has other dimensions than the metadata asks for.
    #[error("tensor {name} is {found:?}, the metadata asks for {wanted:?} (row length first)")]
    TensorShape {
        /// The tensor's name.
        name: String,
        /// Dimensions in the file, row length first.
        found: Vec<u64>,
        /// Dimensions that follow from the metadata.
        wanted: Vec<u64>,
    },
    /// A tensor's element type cannot be used where it stands.
    #[error("tensor {name} is of type {found}, this engine reads {wanted} there")]
    TensorType {
        /// The tensor's name.
        name: String,
        /// The type in the file.
        found: String,
        /// What would be accepted.
        wanted: &'static str,
    },
    /// The weights of a tensor could not be repacked.
    #[error("tensor {name} cannot be packed")]
    Pack {
        /// The tensor's name.
        name: String,
        /// The kernel's reason.
        #[source]
        source: KernelError,
    },
    /// A CUDA device cannot be used.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] rootstock_kernels::cuda::CudaError),
    /// The kernels refused the machine, the sizes or the number of threads.
    #[error("the kernels cannot be set up")]
    Kernel(#[from] KernelError),
    /// No page of these sizes exists.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No memory for the key-value arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The core refuses its configuration.
    #[error(transparent)]
    Core(#[from] ConfigError),
    /// The journal cannot be opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The key-value arena and the weights do not fit into memory.
    #[error(
        "{wanted_mib} MiB of key-value pages and {weights_mib} MiB of weights do not fit into \
         {available_mib} MiB of available memory, lower --kv-cache-mib"
    )]
    Memory {
        /// The arena asked for.
        wanted_mib: u64,
        /// The weights after repacking.
        weights_mib: u64,
        /// What the system says is available.
        available_mib: u64,
    },
    /// The storage tier cannot be opened.
    #[error("storage {uri}: {reason}")]
    Storage {
        /// The address, without secrets.
        uri: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A setting of the service is outside its range.
    #[error("{setting} is {found}, it must be {wanted}")]
    Config {
        /// Name of the setting.
        setting: &'static str,
        /// The value given.
        found: String,
        /// The accepted range.
        wanted: String,
    },
    /// A thread of the service could not be started.
    #[error("thread {thread} cannot be started")]
    Thread {
        /// The thread's name.
        thread: &'static str,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
}
