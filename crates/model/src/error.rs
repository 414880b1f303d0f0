//! The error of this crate: a kind for programs, one line for people.

use std::fmt;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for callers that map errors to exit codes or HTTP statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file is missing or cannot be read.
    Io,
    /// A file is damaged, hostile, or of a format that is not read here.
    Format,
    /// The model's numbers are missing, absurd, or describe something unsupported.
    Config,
    /// A tensor is missing, of the wrong shape, or unknown.
    Weights,
    /// The tokenizer's data are unusable, or a text cannot be encoded.
    Tokenizer,
    /// A chat template does not compile, or refused the conversation.
    Template,
}

/// One line naming what, where, and where possible what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// An error with `message` as its one line; line breaks in it become spaces.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let mut message: String = message.into();
        if message.contains(['\n', '\r']) {
            message = message.split_whitespace().collect::<Vec<_>>().join(" ");
        }
        Self { kind, message }
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The same error with `place: ` in front, for callers that know the file or the key.
    #[must_use]
    pub fn within(self, place: impl fmt::Display) -> Self {
        Self::new(self.kind, format!("{place}: {}", self.message))
    }

    pub(crate) fn format(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Format, message)
    }

    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    pub(crate) fn weights(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Weights, message)
    }

    pub(crate) fn tokenizer(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Tokenizer, message)
    }

    pub(crate) fn template(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Template, message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// Quotes a name from a file for an error line: escaped, and cut when it is absurdly long.
pub(crate) fn quoted(name: &str) -> String {
    const SHOWN: usize = 80;
    match name.char_indices().nth(SHOWN) {
        None => format!("{name:?}"),
        Some((cut, _)) => format!("{:?}...", &name[..cut]),
    }
}
