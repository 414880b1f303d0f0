//! What `admit` and `admit_retrieve` answer.

use crate::error::ResourceError;
use crate::id::{LabelId, RequestId};
use abi_stable::StableAbi;
use abi_stable::std_types::{ROption, RString};

/// Why a step was not admitted. An open set: an unknown code is treated as
/// [`FailureReason::RUNTIME_ERROR`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, StableAbi)]
pub struct FailureReason(pub u32);

impl FailureReason {
    /// Admitted.
    pub const NONE: Self = Self(0);
    /// Not enough capacity now: evict, then try again.
    pub const ALLOCATION_FAILED: Self = Self(1);
    /// The request's state is on its way off the device: try again after it is reloaded.
    pub const REQUEST_OFFLOADING: Self = Self(2);
    /// Terminal for the request: fail it.
    pub const RUNTIME_ERROR: Self = Self(3);
    /// The step carries a request whose turn has not come: put the step back, evict nothing.
    pub const ADMISSION_DEFERRED: Self = Self(4);
    /// Granting would leave the admitted requests unable to all finish: hold this one, run the rest.
    pub const GRANT_DEFERRED: Self = Self(5);

    /// A short name for logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::NONE => "admitted",
            Self::ALLOCATION_FAILED => "allocation failed",
            Self::REQUEST_OFFLOADING => "request offloading",
            Self::ADMISSION_DEFERRED => "admission deferred",
            Self::GRANT_DEFERRED => "grant deferred",
            _ => "runtime error",
        }
    }
}

/// The answer of `admit`: ok, ok but not ready yet (try again later, not a failure), or refused
/// with a reason, the request it is about, and the amounts.
#[repr(C)]
#[derive(Clone, Debug, StableAbi)]
pub struct AdmitOutcome {
    reason: FailureReason,
    not_ready: bool,
    request_id: RequestId,
    label: LabelId,
    need: u64,
    have: u64,
    message: ROption<RString>,
}

impl AdmitOutcome {
    /// Admitted and ready.
    pub const OK: AdmitOutcome = AdmitOutcome {
        reason: FailureReason::NONE,
        not_ready: false,
        request_id: RequestId::new(u32::MAX, 0),
        label: LabelId::MAIN,
        need: 0,
        have: 0,
        message: ROption::RNone,
    };

    /// Not refused, but not ready: ask again later.
    pub const NOT_READY: AdmitOutcome = AdmitOutcome { not_ready: true, ..Self::OK };

    /// Refused for this reason. `need` and `have` are in the resource's own unit (pages, slots).
    pub fn refused(reason: FailureReason, request_id: RequestId, label: LabelId) -> Self {
        Self { reason, request_id, label, ..Self::OK }
    }

    /// Refused for lack of capacity: the step needs `need` pages or slots and `have` are free.
    pub fn allocation_failed(request_id: RequestId, label: LabelId, need: u64, have: u64) -> Self {
        Self { need, have, ..Self::refused(FailureReason::ALLOCATION_FAILED, request_id, label) }
    }

    /// Refused for good: the request must fail with this message.
    pub fn runtime_error(
        request_id: RequestId,
        label: LabelId,
        message: impl Into<String>,
    ) -> Self {
        Self::refused(FailureReason::RUNTIME_ERROR, request_id, label).with_message(message)
    }

    /// Adds a line for people.
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = ROption::RSome(message.into().into());
        self
    }

    /// Whether it was admitted (perhaps not ready yet).
    pub fn is_ok(&self) -> bool {
        self.reason == FailureReason::NONE
    }

    /// Whether it was admitted and may run now.
    pub fn is_ready(&self) -> bool {
        self.is_ok() && !self.not_ready
    }

    /// Why not.
    pub fn reason(&self) -> FailureReason {
        self.reason
    }

    /// The request the refusal is about.
    pub fn request_id(&self) -> RequestId {
        self.request_id
    }

    /// The stream the refusal is about.
    pub fn label(&self) -> LabelId {
        self.label
    }

    /// (needed, available), in the resource's own unit.
    pub fn amounts(&self) -> (u64, u64) {
        (self.need, self.have)
    }

    /// The line for people; a default one when the resource gave none.
    pub fn message(&self) -> String {
        match &self.message {
            ROption::RSome(message) => message.to_string(),
            ROption::RNone if self.need > 0 => {
                format!("{}: needs {}, {} free", self.reason.name(), self.need, self.have)
            }
            ROption::RNone => self.reason.name().to_string(),
        }
    }
}

impl Default for AdmitOutcome {
    fn default() -> Self {
        Self::OK
    }
}

impl From<ResourceError> for AdmitOutcome {
    fn from(e: ResourceError) -> Self {
        Self::runtime_error(RequestId::new(u32::MAX, 0), LabelId::MAIN, e.to_string())
    }
}
