//! The conformance check for authors of kinds, and fake resources that exercise the whole contract.
//!
//! - [`check`] tries a kind: random operations against a reference, and the rules of the contract.
//!   `engine-host plugin check` runs it on a plugin file.
//! - [`Fake`] (kind `fake`) uses everything that a resource can use: staged plans, exact rollback,
//!   slots with buffers that grow, publishing, offload, a prefix store, capabilities in both
//!   directions and an interface of its own ([`Echo`]). Its `inspect` tells what was called.
//! - [`FakeCache`] (kind `fake_kv`) is a small paged cache, in which faults can be planted.
//! - [`Panicker`] (kind `panicker`) offers every capability and panics in every method.
//! - [`support`] builds the plugin with both and lays it out as an operator would.
//!
//! # How a third party writes a kind
//!
//! One type that implements [`Resource`](resource_api::Resource), where every method has a default,
//! and [`ResourceKind`](resource_api::ResourceKind). State that changes sits behind a lock, since
//! all methods take `&self`. A capability is an interface that other plugins and models call; one
//! of your own takes a trait and `#[capability]`.
//!
//! ```
//! use std::sync::Arc;
//!
//! use resource_api::{
//!     AdmitOutcome, Capability, EngineResourceInfo, Exclusive, LabelId, NodeResourceSpec, Resource,
//!     ResourceKind, ResourceStep, Result, StepContext, capability,
//! };
//!
//! /// Anyone may ask how much is left. Goes into a crate that users of the interface share.
//! #[capability(id = "org.example.quota", major = 1)]
//! pub trait Quota: Send + Sync {
//!     fn left(&self) -> Result<u64>;
//! }
//!
//! /// `[resources.quota]` in the engine's config.
//! #[derive(serde::Deserialize)]
//! #[serde(deny_unknown_fields)]
//! pub struct Settings {
//!     tokens: u64,
//! }
//!
//! /// Lets the engine run so many tokens, and no more.
//! pub struct TokenQuota {
//!     left: Exclusive<u64>,
//! }
//!
//! impl Resource for TokenQuota {
//!     fn admit(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
//!         let (need, left) = (step.segments().num_tokens() as u64, *self.left.lock());
//!         match step.segments().request.first() {
//!             Some(&rid) if need > left => {
//!                 Ok(AdmitOutcome::allocation_failed(rid, LabelId::MAIN, need, left))
//!             }
//!             _ => Ok(AdmitOutcome::OK),
//!         }
//!     }
//!
//!     fn commit(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
//!         *self.left.lock() -= step.segments().num_tokens() as u64;
//!         Ok(())
//!     }
//! }
//!
//! impl Quota for TokenQuota {
//!     fn left(&self) -> Result<u64> {
//!         Ok(*self.left.lock())
//!     }
//! }
//!
//! impl ResourceKind for TokenQuota {
//!     type Spec = Settings;
//!     const KIND: &'static str = "org.example.token-quota";
//!     const PROVIDES: &'static [&'static str] = &["org.example.quota/1"];
//!
//!     fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
//!         Ok(Self { left: Exclusive::new(spec.settings.tokens) })
//!     }
//!
//!     fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
//!         vec![QuotaHandle::new(this.clone()).into()]
//!     }
//! }
//!
//! // In the plugin's own cdylib crate: `resource_api::export_plugin!(token_quota::TokenQuota);`.
//! // Without a plugin, as in a unit test:
//! use resource_api::{Device, build_resource, host::PlainHost};
//! let info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
//! let spec = NodeResourceSpec {
//!     resource_key: "quota".into(),
//!     kind: TokenQuota::KIND.into(),
//!     nodes: ["decoder".to_string()].into(),
//!     settings: r#"{"tokens": 1000}"#.into(),
//! };
//! let built = build_resource::<TokenQuota>(&spec, &info)?;
//! let quota: QuotaHandle = built.capabilities[0].open()?;
//! assert_eq!(quota.left()?, 1000);
//! # Ok::<(), resource_api::ResourceError>(())
//! ```

#![deny(unsafe_code)]

pub mod cache;
pub mod check;
pub mod fake;
pub mod interface;
pub mod panicker;
pub mod support;

pub use cache::{FakeCache, FakeCacheSpec, Fault};
pub use fake::{Fake, FakeSpec};
pub use interface::{Echo, EchoHandle, FakeFacts, FakePlan, FakeStepOptions};
pub use panicker::{Panicker, PanickerSpec};
