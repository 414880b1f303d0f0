//! A kind as the host sees it: asked for dependencies first, then for resources.

use crate::abi::cross::Cross;
use crate::abi::object::Object;
use crate::resource::{BuiltResource, ResourceHandle, ResourceKind, build_resource};
use crate::spec::{EngineResourceInfo, NodeResourceSpec};
use crate::{Capability, Result};
use abi_stable::StableAbi;
use abi_stable::std_types::RVec;
use resource_api_macros::capability;
use std::marker::PhantomData;
use std::sync::Arc;

/// Builds resources of one kind. Implemented by `export_plugin!` for each [`ResourceKind`].
#[capability(id = "engine.kind", major = 1, path = crate)]
pub trait Kind: Send + Sync {
    /// Name of the kind.
    fn kind(&self) -> String;

    /// Capabilities of the resources it builds.
    fn provides(&self) -> Vec<String>;

    /// Keys that a resource with this spec depends on.
    fn depends_on(&self, spec: NodeResourceSpec) -> Result<Vec<String>>;

    /// Builds a resource.
    fn build(&self, spec: NodeResourceSpec, info: EngineResourceInfo) -> Result<BuiltResource>;
}

struct KindOf<K>(PhantomData<fn() -> K>);

impl<K: ResourceKind> Kind for KindOf<K> {
    fn kind(&self) -> String {
        K::KIND.into()
    }

    fn provides(&self) -> Vec<String> {
        K::PROVIDES.iter().map(|p| p.to_string()).collect()
    }

    fn depends_on(&self, spec: NodeResourceSpec) -> Result<Vec<String>> {
        Ok(<K as ResourceKind>::depends_on(&spec.parse()?))
    }

    fn build(&self, spec: NodeResourceSpec, info: EngineResourceInfo) -> Result<BuiltResource> {
        build_resource::<K>(&spec, &info)
    }
}

/// The kind `K`, as `export_plugin!` exports it and as a static engine registers it.
pub fn kind<K: ResourceKind>() -> KindHandle {
    crate::abi::guard::install_panic_hook();
    KindHandle::new(Arc::new(KindOf::<K>(PhantomData)))
}

/// Raw form of [`BuiltResource`].
#[repr(C)]
#[derive(StableAbi)]
#[doc(hidden)]
pub struct RawBuilt {
    resource: Object,
    capabilities: RVec<Capability>,
}

// SAFETY: checked objects.
unsafe impl Cross for BuiltResource {
    type Raw = RawBuilt;
    fn lower(self) -> RawBuilt {
        RawBuilt { resource: self.resource.lower(), capabilities: self.capabilities.into() }
    }
    unsafe fn lift(raw: RawBuilt) -> Self {
        BuiltResource {
            // SAFETY: lowered from a resource handle.
            resource: unsafe { ResourceHandle::lift(raw.resource) },
            capabilities: raw.capabilities.into(),
        }
    }
}
