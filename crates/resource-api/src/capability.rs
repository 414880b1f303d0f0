//! A capability: an object that a resource offers under an interface name.

use crate::abi::object::{Interface, Object, open};
use crate::{ResourceKey, Result};
use abi_stable::StableAbi;

/// Some interface that a resource offers, not opened yet. Typed handles convert into it.
#[repr(transparent)]
#[derive(Clone, Debug, StableAbi)]
pub struct Capability(Object);

impl Capability {
    /// Used by generated code.
    #[doc(hidden)]
    pub fn from_object(object: Object) -> Self {
        Self(object)
    }

    pub(crate) fn into_object(self) -> Object {
        self.0
    }

    /// Interface name, such as `kv.cache`.
    pub fn id(&self) -> &'static str {
        self.0.head().id.as_str()
    }

    /// Interface major version.
    pub fn major(&self) -> u32 {
        self.0.head().major
    }

    /// As a handle of a known interface: `cap.open::<KvCacheHandle>()`.
    ///
    /// # Errors
    /// `INCOMPATIBLE` when it is another interface or major, or a method differs.
    pub fn open<H: Interface>(&self) -> Result<H> {
        open(self.0.clone())
    }
}

/// A capability with the key of the resource that offers it: what `bind` receives.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Who offers it.
    pub key: ResourceKey,
    /// What is offered.
    pub capability: Capability,
}

/// Raw form of [`Offered`].
#[repr(C)]
#[derive(StableAbi)]
#[doc(hidden)]
pub struct RawOffered {
    key: abi_stable::std_types::RString,
    capability: Capability,
}

// SAFETY: both parts are layout-checked and carry their own allocators.
unsafe impl crate::abi::cross::Cross for Offered {
    type Raw = RawOffered;
    fn lower(self) -> RawOffered {
        RawOffered { key: self.key.into(), capability: self.capability }
    }
    unsafe fn lift(raw: RawOffered) -> Self {
        Offered { key: raw.key.into(), capability: raw.capability }
    }
}
