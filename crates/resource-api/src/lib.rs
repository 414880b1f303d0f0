//! The contract between engine-host and its resources.

extern crate self as resource_api;

pub mod abi;
pub mod capability;
pub mod caps;
pub mod cursor;
pub mod error;
pub mod exclusive;
pub mod host;
pub mod id;
pub mod kind;
pub mod outcome;
pub mod plan;
pub mod publish;
pub mod resource;
pub mod spec;
pub mod step;
pub mod tensor;
pub mod typed;

pub use abi::layout::MethodDesc;
pub use abi::object::Interface;
pub use abi::root::API_VERSION;
pub use abi_stable::StableAbi;
pub use capability::{Capability, Offered};
pub use caps::*;
pub use cursor::{AttentionResource, Bound};
pub use error::{ErrorKind, ResourceError, Result};
pub use exclusive::Exclusive;
pub use host::{HostServices, HostServicesHandle};
pub use id::{LabelId, NodeId, RequestId, ResourceKey, StepId, WalkId};
pub use kind::{Kind, KindHandle, kind};
pub use outcome::{AdmitOutcome, FailureReason};
pub use plan::{MAX_SLOTS, Plan, PlanSlots, PlanVec};
pub use publish::PublishedInfo;
pub use resource::{
    BuiltResource, PrefixWalk, Resource, ResourceHandle, ResourceKind, build_resource,
};
pub use resource_api_macros::capability;
pub use spec::{
    CommGroup, Dependency, EngineLimits, EngineResourceInfo, NodeResourceSpec, PrefixInputs,
    RequestOverrides, TransferEngineInfo,
};
pub use step::{
    BucketKey, CGSlotKey, CGSlotSpec, ResourceStep, Segment, Segments, SlotLease, StepContext,
    StepHead,
};
pub use tensor::{DType, Device, Element, RawTensor, TensorView, TensorViewMut};
pub use typed::{Typed, TypedRef};

/// Exports kinds from a cdylib: `export_plugin!(MyKind, MyOtherKind);`, once per library.
#[macro_export]
macro_rules! export_plugin {
    ($($kind:path),+ $(,)?) => {
        $crate::plugin_entry!($($kind),+);
    };
}
#[doc(hidden)]
pub use resource_api_macros::plugin_entry;
