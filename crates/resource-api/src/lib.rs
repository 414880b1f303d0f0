//! The contract between engine-host and its resources.
//!
//! A **resource** holds state for requests: a paged cache, positions, a sampler, or a kind that
//! nobody has thought of yet. It is built by a **kind** from a plugin `.so`; the host drives all
//! resources of a model's **node** through one protocol around each forward pass:
//! `admit -> plan -> forward -> commit -> outputs`.
//!
//! # Writing a kind
//!
//! Implement [`Resource`] and [`ResourceKind`], both plain safe Rust, in a library crate, and export
//! the kind from a cdylib of one line:
//!
//! ```
//! use resource_api::{AdmitOutcome, EngineResourceInfo, NodeResourceSpec, Resource, ResourceKind};
//! use resource_api::{ResourceStep, Result, StepContext};
//!
//! #[derive(serde::Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Settings {
//!     max_tokens_per_step: usize,
//! }
//!
//! struct Throttle(Settings);
//!
//! impl Resource for Throttle {
//!     fn admit(&self, step: &ResourceStep, _ctx: &StepContext) -> Result<AdmitOutcome> {
//!         let ready = step.segments().num_tokens() <= self.0.max_tokens_per_step;
//!         Ok(if ready { AdmitOutcome::OK } else { AdmitOutcome::NOT_READY })
//!     }
//! }
//!
//! impl ResourceKind for Throttle {
//!     type Spec = Settings;
//!     const KIND: &'static str = "throttle";
//!     fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
//!         Ok(Throttle(spec.settings))
//!     }
//! }
//!
//! // In the cdylib: resource_api::export_plugin!(throttle::Throttle);
//! ```
//!
//! # Who calls what, and when
//!
//! | methods | thread | may overlap with | may block |
//! |---|---|---|---|
//! | `depends_on`, `describe`, `bind`, `accepts`, `enable_prefix_cache`, `build_cuda_graph_buffers`, `post_warmup_validate`, flags | main, before the first request | nothing | yes |
//! | `ingest_request`, `admit_retrieve`, `resolve_cached_prefix`, `apply_cached_prefix`, `extend_prefix_chain`, `reset_request`, `remove_request(s)` | main | step methods of other requests' steps | briefly |
//! | `admit`, `rollback_admit`, `plan`, `commit`, `on_outputs` with a live context | step | main-thread methods, pre-planning of the next step, capability calls | no |
//! | `admit`, `rollback_admit`, `plan` with `ctx.is_preplan()`, `clear_preplan` | plan | the step that runs | no |
//! | `retain_session`, `adopt_session`, `remove_session` | main | steps of other requests | briefly |
//! | `publish*` | main | steps of other requests | briefly |
//! | `offload`, `reload`, `reclaimable`, `is_offloaded`, `can_reload`, `get_offload_priority` | main | steps of other requests | on copies |
//! | `inspect` | any | everything | briefly |
//! | capability methods | step, several at once where the model is parallel | step methods of a staged step | no |
//!
//! For a resource the calls of a step come in the order `admit`, `plan`, `commit`, `on_outputs`, and all of a
//! step before those of the next, but for steps planned ahead, and for those of a host that runs ahead of its
//! device: where all resources say [`Resource::takes_outputs_late`], `admit` and `plan` of a step may come
//! between `commit` and `on_outputs` of the one before it.
//!
//! Idempotent or repeatable: `ingest_request`, `resolve_cached_prefix` (same answer, one reference),
//! `admit` after a refusal, `build_cuda_graph_buffers`, `clear_preplan`, `reset_request`,
//! `remove_request`. Unknown requests are accepted by `reset_request` and `remove_request`. A request
//! id whose generation is not the live one is unknown.
//!
//! A step that is refused or abandoned changes nothing: after `rollback_admit` the resource is as it
//! was before `admit`, down to the order of its free list. What `admit` accepts, `plan` can run:
//! segments of span 0, padding rows and labels that nobody opened included.
//!
//! # Interfaces between resources
//!
//! A **capability** is an object that models and other resources call. `#[capability]` on a trait
//! `Thing: Send + Sync` makes `ThingHandle`, which implements `Thing` wherever the object lives:
//!
//! - in signatures: numbers, `bool`, the ids of this crate, `&T`, `&mut T`, `&[T]`, `&mut [T]` of
//!   [`StableAbi`] types, `&str`, `String`, `Vec`, `Option`, other handles, [`TensorView`] by
//!   reference, and what [`cross_value!`] was applied to; lifetimes are written (`&StepContext<'_>`);
//! - answers: the same, or [`Result`] of them. A plain answer cannot tell of a failure: when the
//!   other side panics, the caller sees the type's default, and the object is marked faulted;
//! - methods are only ever added at the end, with a default body, which runs when the other side is
//!   too old to have them.
//!
//! What a resource requires is in [`EngineResourceInfo::dependency`] at build time; what it accepts
//! from resources built later arrives in [`Resource::bind`].
//!
//! # Panics
//!
//! Every entry into a plugin catches panics inside the plugin. A panic becomes an error of kind
//! [`ErrorKind::PANICKED`]; from then on calls to the resource and all its capabilities answer
//! [`ErrorKind::POISONED`] without entering it. Build plugins with `panic = "unwind"` (the default).
//! A resource that hands on what another one's panic answered is not marked itself: its caller gets
//! [`ErrorKind::POISONED`]. A panic on a thread of [`HostServices::spawn`] ends that thread alone; the
//! host counts and logs it under the name of the resource.
//!
//! # Versions
//!
//! The contract is a draft of 1.0: a plugin must have exactly the host's methods and layouts, which
//! is checked when it is loaded. Plugins are never unloaded.

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
pub use plan::{DeviceColumn, MAX_SLOTS, Plan, PlanSlots, PlanVec};
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
    BucketKey, CGSlotKey, CGSlotSpec, GraphConfig, ResourceStep, Segment, Segments, SlotLease,
    StepContext, StepHead,
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
