//! The host's error type, and the one table from error kinds to exit codes and HTTP statuses.

use std::fmt;

use crate::document::Problems;
use crate::elf::LibraryError;
use crate::order::OrderError;

/// What went wrong, coarsely: enough to choose an exit code, an HTTP status and whether to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request, command line or configuration is wrong; repeating it cannot help.
    Usage,
    /// Something named does not exist (a model file, an adapter, a plugin).
    NotFound,
    /// What is asked for is understood and not offered.
    Unsupported,
    /// A limit is reached (memory, queue); the same request may succeed later.
    Exhausted,
    /// The engine is starting, draining or faulted.
    Unavailable,
    /// The caller went away or cancelled.
    Cancelled,
    /// A deadline passed.
    Timeout,
    /// A file or a plugin is broken.
    Invalid,
    /// A plugin panicked; the panic was contained.
    Panicked,
    /// A fault of the engine itself, or of the system under it.
    Internal,
}

impl ErrorKind {
    /// Every kind, for tables and tests.
    pub const ALL: [Self; 10] = [
        Self::Usage,
        Self::NotFound,
        Self::Unsupported,
        Self::Exhausted,
        Self::Unavailable,
        Self::Cancelled,
        Self::Timeout,
        Self::Invalid,
        Self::Panicked,
        Self::Internal,
    ];

    /// (name, exit code of the command line, HTTP status).
    const fn row(self) -> (&'static str, u8, u16) {
        match self {
            Self::Usage => ("usage", 2, 400),
            Self::NotFound => ("not found", 1, 404),
            Self::Unsupported => ("unsupported", 1, 501),
            Self::Exhausted => ("exhausted", 1, 429),
            Self::Unavailable => ("unavailable", 1, 503),
            Self::Cancelled => ("cancelled", 1, 499),
            Self::Timeout => ("timeout", 1, 504),
            Self::Invalid => ("invalid", 1, 500),
            Self::Panicked => ("panicked", 1, 500),
            Self::Internal => ("internal", 1, 500),
        }
    }

    /// Exit code of the command line: 2 for wrong usage, 1 for any other failure.
    pub const fn exit_code(self) -> u8 {
        self.row().1
    }

    /// Status with which the HTTP front answers.
    pub const fn http_status(self) -> u16 {
        self.row().2
    }

    /// Whether the same request may succeed later without any change.
    pub const fn retryable(self) -> bool {
        matches!(self, Self::Exhausted | Self::Unavailable | Self::Timeout)
    }
}

/// The contract's kinds are an open set; an unknown one is internal.
impl From<resource_api::ErrorKind> for ErrorKind {
    fn from(kind: resource_api::ErrorKind) -> Self {
        use resource_api::ErrorKind as Api;
        match kind {
            Api::INVALID => Self::Usage,
            Api::NOT_FOUND => Self::NotFound,
            Api::EXHAUSTED => Self::Exhausted,
            Api::UNSUPPORTED => Self::Unsupported,
            Api::POISONED => Self::Unavailable,
            Api::TIMED_OUT => Self::Timeout,
            Api::INCOMPATIBLE => Self::Invalid,
            Api::PANICKED => Self::Panicked,
            _ => Self::Internal,
        }
    }
}

impl From<resource_api::ResourceError> for Error {
    fn from(e: resource_api::ResourceError) -> Self {
        Self::new(e.kind().into(), e.to_string())
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().0)
    }
}

/// Any error of the host. Displays as one line per problem, each complete in itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration has these problems.
    #[error("{0}")]
    Config(Problems),
    /// The plugin directories cannot be used.
    #[error("{0}")]
    Discovery(Problems),
    /// The resources cannot be put into an order of building.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// A plugin's library was refused before it was loaded.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Anything else: its kind and one line of text.
    #[error("{message}")]
    Other {
        /// Decides exit code and HTTP status.
        kind: ErrorKind,
        /// One line: what, where, and what to do.
        message: String,
    },
}

impl Error {
    /// An error of `kind` with one line of text.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::Other { kind, message: message.into() }
    }

    /// Wrong usage, with one line of text.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, message)
    }

    /// The kind, which decides exit code and HTTP status.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_) | Self::Discovery(_) | Self::Order(_) => ErrorKind::Usage,
            Self::Library(_) => ErrorKind::Invalid,
            Self::Other { kind, .. } => *kind,
        }
    }

    /// Exit code of the command line for this error.
    pub fn exit_code(&self) -> u8 {
        self.kind().exit_code()
    }
}

/// Result with the host's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wrong_usage_exits_with_two() {
        for kind in ErrorKind::ALL {
            assert_eq!(kind.exit_code(), if kind == ErrorKind::Usage { 2 } else { 1 }, "{kind}");
            assert!((400..600).contains(&kind.http_status()), "{kind}");
        }
    }

    #[test]
    fn kinds_of_the_hosts_errors() {
        assert_eq!(Error::usage("x").exit_code(), 2);
        assert_eq!(Error::new(ErrorKind::NotFound, "no model").exit_code(), 1);
        assert_eq!(Error::Config(Problems::default()).exit_code(), 2);
    }
}
