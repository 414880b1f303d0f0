//! The mark that a resource has panicked: shared by every handle to it, kept in host memory.

use abi_stable::StableAbi;
use abi_stable::std_types::{RArc, RString};
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts the panics of one resource. Once it is marked, calls answer `POISONED` without entering
/// the plugin.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct FaultCell {
    panics: AtomicU32,
    owner: RString,
}

/// A shared [`FaultCell`].
pub type Fault = RArc<FaultCell>;

impl FaultCell {
    /// A fresh cell; `owner` names the resource in errors.
    pub fn shared(owner: &str) -> Fault {
        RArc::new(FaultCell { panics: AtomicU32::new(0), owner: owner.into() })
    }

    /// Whether the resource has panicked.
    pub fn is_set(&self) -> bool {
        self.panics.load(Ordering::Relaxed) != 0
    }

    /// How often.
    pub fn panics(&self) -> u32 {
        self.panics.load(Ordering::Relaxed)
    }

    /// Marks it.
    pub fn set(&self) {
        self.panics.fetch_add(1, Ordering::Relaxed);
    }

    /// Name of the resource.
    pub fn owner(&self) -> &str {
        self.owner.as_str()
    }
}
