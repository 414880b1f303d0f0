//! Errors as values: a kind, a message, and the numbers a person needs.

use abi_stable::StableAbi;
use abi_stable::std_types::{RBox, RString};

/// What kind of error this is. An open set: an unknown number is treated as [`ErrorKind::INTERNAL`].
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, StableAbi)]
pub struct ErrorKind(pub u32);

/// One row of the table that maps error kinds to the outside world.
struct KindRow(ErrorKind, &'static str, i32, u16);

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $n:literal, $text:literal, exit $exit:literal, http $http:literal;)*) => {
        impl ErrorKind {
            $($(#[$doc])* pub const $name: ErrorKind = ErrorKind($n);)*
        }
        const KINDS: &[KindRow] = &[$(KindRow(ErrorKind::$name, $text, $exit, $http)),*];
    };
}

kinds! {
    /// The caller's input is wrong; the same call can never succeed.
    INVALID = 1, "invalid", exit 2, http 400;
    /// A named thing does not exist.
    NOT_FOUND = 2, "not found", exit 1, http 404;
    /// Not enough of something right now; the same call may succeed later.
    EXHAUSTED = 3, "exhausted", exit 1, http 429;
    /// The call is not allowed in the present state.
    WRONG_STATE = 4, "wrong state", exit 1, http 409;
    /// This build or kind cannot do that.
    UNSUPPORTED = 5, "unsupported", exit 1, http 501;
    /// Plugin code panicked; the resource is faulted from now on.
    PANICKED = 6, "panicked", exit 1, http 500;
    /// The resource faulted earlier; the call did not enter it.
    POISONED = 7, "poisoned", exit 1, http 503;
    /// Two sides of an interface do not fit.
    INCOMPATIBLE = 8, "incompatible", exit 1, http 500;
    /// A deadline passed.
    TIMED_OUT = 9, "timed out", exit 1, http 504;
    /// Reading or writing outside the process failed.
    IO = 10, "io", exit 1, http 500;
    /// A fault of ours or of the plugin's.
    INTERNAL = 11, "internal", exit 1, http 500;
}

impl ErrorKind {
    fn row(self) -> &'static KindRow {
        KINDS.iter().find(|row| row.0 == self).unwrap_or(&KINDS[KINDS.len() - 1])
    }

    /// A short name for logs.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Exit code of a command that fails with this kind: 2 for wrong input, 1 otherwise.
    pub fn exit_code(self) -> i32 {
        self.row().2
    }

    /// HTTP status for this kind.
    pub fn http_status(self) -> u16 {
        self.row().3
    }

    /// Whether the same call may succeed later.
    pub fn is_retryable(self) -> bool {
        self == ErrorKind::EXHAUSTED || self == ErrorKind::TIMED_OUT
    }
}

impl std::fmt::Debug for ErrorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An error of a resource, a capability or a host service. One pointer wide, so that results stay
/// cheap; it is created on failure only.
#[repr(transparent)]
#[derive(StableAbi)]
pub struct ResourceError(RBox<Body>);

/// What is behind the pointer.
#[repr(C)]
#[derive(Clone, StableAbi)]
#[doc(hidden)]
pub struct Body {
    kind: ErrorKind,
    need: u64,
    have: u64,
    message: RString,
    location: RString,
    details: RString,
}

/// Result of everything in this crate that can fail.
pub type Result<T, E = ResourceError> = std::result::Result<T, E>;

impl ResourceError {
    /// An error of this kind. The message is one line that says what, where, and what to do.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let body = Body {
            kind,
            need: 0,
            have: 0,
            message: message.into().into(),
            location: RString::new(),
            details: RString::new(),
        };
        Self(RBox::new(body))
    }

    /// Short for [`ErrorKind::INVALID`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::INVALID, message)
    }

    /// Short for [`ErrorKind::WRONG_STATE`].
    pub fn wrong_state(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::WRONG_STATE, message)
    }

    /// Short for [`ErrorKind::UNSUPPORTED`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::UNSUPPORTED, message)
    }

    /// Short for [`ErrorKind::INTERNAL`].
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::INTERNAL, message)
    }

    /// The same with another kind.
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Adds how much was needed and how much there was.
    pub fn with_amounts(mut self, need: u64, have: u64) -> Self {
        self.0.need = need;
        self.0.have = have;
        self
    }

    /// Adds where in the source the fault was raised.
    pub fn at(mut self, location: impl Into<String>) -> Self {
        self.0.location = location.into().into();
        self
    }

    /// Adds what a person may want to read who asks for more: many lines, a backtrace for example.
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.0.details = details.into().into();
        self
    }

    /// Puts `what: ` before the message: callers add the context they know.
    pub fn within(mut self, what: impl std::fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message).into();
        self
    }

    /// Its kind.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message, without the source location.
    pub fn message(&self) -> &str {
        self.0.message.as_str()
    }

    /// Where in the source it was raised; empty when unknown.
    pub fn location(&self) -> &str {
        self.0.location.as_str()
    }

    /// What there is beside the message, in any number of lines; mostly nothing.
    pub fn details(&self) -> &str {
        self.0.details.as_str()
    }

    /// (needed, available), both 0 when they do not apply.
    pub fn amounts(&self) -> (u64, u64) {
        (self.0.need, self.0.have)
    }
}

impl Clone for ResourceError {
    fn clone(&self) -> Self {
        Self(RBox::new(Body::clone(&self.0)))
    }
}

impl std::fmt::Display for ResourceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.message())?;
        if !self.location().is_empty() {
            write!(f, " ({})", self.location())?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for ResourceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {self}", self.kind().name())
    }
}

impl std::error::Error for ResourceError {}

impl From<std::io::Error> for ResourceError {
    fn from(e: std::io::Error) -> Self {
        Self::new(ErrorKind::IO, e.to_string())
    }
}

impl From<serde_json::Error> for ResourceError {
    fn from(e: serde_json::Error) -> Self {
        Self::invalid(e.to_string())
    }
}
