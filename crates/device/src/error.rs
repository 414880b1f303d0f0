//! The error of every call in this crate that can refuse its input.

use resource_api::{ErrorKind, ResourceError};

/// What was wrong, in one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice does not have the length its shape asks for.
    #[error("{what}: got {got} {unit}, need {need}")]
    Length { what: &'static str, unit: &'static str, got: usize, need: usize },

    /// A row does not consist of whole blocks.
    #[error("a row of {len} weights is not whole {name} blocks of {block_len}")]
    PartialBlock { name: &'static str, len: usize, block_len: usize },

    /// An index or range lies outside what it points into.
    #[error("{what} {index} is out of range, the limit is {limit}")]
    OutOfRange { what: &'static str, index: usize, limit: usize },

    /// A size does not fit into the address space.
    #[error("{what} is too large for this machine's address space")]
    TooLarge { what: &'static str },

    /// The operating system refused an allocation.
    #[error("cannot allocate {bytes} bytes: {reason}")]
    OutOfMemory { bytes: usize, reason: String },

    /// A name of a CPU feature level that does not exist or that this CPU lacks.
    #[error("{0}")]
    CpuFeatures(String),

    /// The driver or a library of the CUDA toolkit is not on this machine, or is too old.
    #[error("{0}")]
    Library(String),

    /// A call into CUDA failed.
    #[error("{call}: {reason}")]
    Cuda { call: &'static str, reason: String },

    /// A kernel does not compile, or cannot be loaded.
    #[error("{0}")]
    Kernel(String),

    /// A tensor is not what an operation takes.
    #[error("{what}: {reason}")]
    Tensor { what: &'static str, reason: String },
}

impl From<Error> for ResourceError {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::OutOfMemory { .. } => ErrorKind::EXHAUSTED,
            Error::CpuFeatures(_) | Error::Tensor { .. } => ErrorKind::INVALID,
            Error::Library(_) => ErrorKind::UNSUPPORTED,
            _ => ErrorKind::INTERNAL,
        };
        ResourceError::new(kind, error.to_string())
    }
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Checks that `what` has exactly `need` elements.
pub(crate) fn check_len(what: &'static str, got: usize, need: usize) -> Result<()> {
    if got == need { Ok(()) } else { Err(Error::Length { what, unit: "elements", got, need }) }
}

/// `a * b`, or the error that says that `what` is too large.
pub(crate) fn product(what: &'static str, a: usize, b: usize) -> Result<usize> {
    a.checked_mul(b).ok_or(Error::TooLarge { what })
}
