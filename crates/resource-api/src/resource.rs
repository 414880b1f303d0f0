//! The traits that an author implements: [`Resource`] and [`ResourceKind`].

use crate::abi::fault::FaultCell;
use crate::abi::object::{Interface, Object};
use crate::capability::Offered;
use crate::id::{NodeId, RequestId, StepId, WalkId};
use crate::outcome::AdmitOutcome;
use crate::plan::Plan;
use crate::publish::PublishedInfo;
use crate::spec::Dependency;
use crate::spec::{EngineResourceInfo, NodeResourceSpec, PrefixInputs, RequestOverrides};
use crate::step::{CGSlotSpec, ResourceStep, StepContext};
use crate::{Capability, ResourceKey, Result, TypedRef};
use resource_api_macros::capability;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// Something that holds state for requests.
///
/// Every method has the seed's name and default. All take `&self`: admission, planning a step
/// ahead, the step itself and offload run on different threads. The table in the crate docs says
/// which thread calls what, and what may overlap. [`crate::Exclusive`] is the easy way to `&mut`.
///
/// Per-step methods come once per step, not once per request; what the seed has per request has a
/// batched form beside it whose default loops.
#[capability(id = "engine.resource", major = 1, path = crate)]
pub trait Resource: Send + Sync {
    // --- what it is -------------------------------------------------------------------------

    /// Keys of the resources it was built on. Must agree with [`ResourceKind::depends_on`].
    fn depends_on(&self) -> Vec<String> {
        Vec::new()
    }

    /// Typed facts about the built resource that dependents read (a cache's geometry).
    fn describe(&self) -> Vec<TypedRef<'_>> {
        Vec::new()
    }

    /// Its state as JSON, for tools. Any thread; may block briefly.
    fn inspect(&self) -> String {
        "{}".into()
    }

    /// Whether it tolerates tokens that it never sees because a cached prefix was skipped.
    fn prefix_skip_safe(&self) -> bool {
        false
    }

    /// Whether `admit` and `plan` may be called one step ahead.
    fn supports_preplan(&self) -> bool {
        false
    }

    /// Whether `admit` and `plan` of a live step may come before `on_outputs` of the step before it. The ids
    /// of the tokens that the step adds are then not told before `commit`, which comes after that.
    fn takes_outputs_late(&self) -> bool {
        false
    }

    /// Whether it can move a request's state off the device.
    fn supports_eviction(&self) -> bool {
        false
    }

    /// Whether its plan buffers must not be reused while the previous step still runs, also where
    /// nothing is planned ahead: it stages a layout in a host buffer and copies it asynchronously.
    fn force_double_buffer(&self) -> bool {
        false
    }

    /// What it contributes to the root of the prefix cache: everything a stored page depends on
    /// beyond its own tokens. `None` leaves it out, which is right only where it cannot change what
    /// a page holds.
    fn fingerprint(&self) -> Option<Vec<u8>> {
        None
    }

    // --- load: main thread, once unless noted ----------------------------------------------

    /// Interfaces that it takes from resources built later (`logits.processor`).
    fn accepts(&self) -> Vec<String> {
        Vec::new()
    }

    /// Receives what resources offer under the interfaces it accepts, in build order. Called once
    /// before the first request, and once with nothing before the engine drops its resources.
    fn bind(&self, _offered: Vec<Offered>) -> Result<()> {
        Ok(())
    }

    /// Opens whatever it keeps across requests, under `root`; true if anything opened. `walks` names,
    /// per label, the walk that writes the keyed span and the one that decodes after it.
    fn enable_prefix_cache(&self, _root: &[u8], _walks: Vec<PrefixWalk>) -> Result<bool> {
        Ok(false)
    }

    /// Sizes whatever captured replays will read. Called once per runner that captures; grows to
    /// the largest shape asked for and never moves what an earlier call sized.
    fn build_cuda_graph_buffers(
        &self,
        _slots: &[CGSlotSpec],
        _max_bs: u32,
        _max_seq_len: u32,
    ) -> Result<()> {
        Ok(())
    }

    /// Checks after warm-up, such as free pages being equal on all ranks.
    fn post_warmup_validate(&self) -> Result<()> {
        Ok(())
    }

    // --- request: main thread --------------------------------------------------------------

    /// Learns of a request. Claims nothing. May come twice for a live request: the second changes
    /// nothing.
    ///
    /// # Errors
    /// `INVALID` for settings that the kind does not know, which by default are any.
    fn ingest_request(&self, _rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        overrides.refuse_any()
    }

    /// Takes what `publish` gave, perhaps on another device, and starts fetching what it needs.
    /// Not ready until the fetch has completed.
    fn admit_retrieve(
        &self,
        _rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        _published: Option<&PublishedInfo>,
    ) -> Result<AdmitOutcome> {
        Ok(AdmitOutcome::OK)
    }

    /// How many leading tokens of the request it already holds, under each of the labels that its
    /// prompt goes to. `None` leaves the length to other resources; 0 means that nothing can be skipped.
    /// Repeated calls give the same answer and take one reference.
    fn resolve_cached_prefix(
        &self,
        _rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
    ) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Takes on the length that every resource agreed to skip, for each stream that the inputs name.
    /// The inputs are untrimmed.
    fn apply_cached_prefix(
        &self,
        _rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        _inputs: &PrefixInputs<'_>,
        _matched_len: u32,
    ) -> Result<()> {
        Ok(())
    }

    /// Takes this step's sampled tokens, so that what was generated can be keyed. May come after
    /// the commit that wrote them. Comes outside of steps, too, with what was generated before the
    /// resource knew the request: in another engine, or before the resource was built anew.
    fn extend_prefix_chain(
        &self,
        _rid: RequestId,
        _node: NodeId,
        _graph_walk: WalkId,
        _outputs: &[u32],
    ) -> Result<()> {
        Ok(())
    }

    /// Makes a request's streams empty again, so that its tokens can be run once more from the start
    /// (after a preemption, or a rerun). With `free`, gives their memory back too. What was decided
    /// about the request stays: how many tokens were sampled, their penalties, its seed. Unknown
    /// requests are accepted.
    fn reset_request(&self, _rid: RequestId, _free: bool) -> Result<()> {
        Ok(())
    }

    /// Forgets a request. Unknown requests are accepted.
    fn remove_request(&self, _rid: RequestId) -> Result<()> {
        Ok(())
    }

    /// Batched [`Resource::remove_request`].
    fn remove_requests(&self, rids: &[RequestId]) -> Result<()> {
        rids.iter().try_for_each(|&rid| self.remove_request(rid))
    }

    /// Last call before the resource is dropped.
    fn cleanup(&self) -> Result<()> {
        Ok(())
    }

    // --- step: step thread; plan thread while ctx.is_preplan() ------------------------------

    /// Reserves space for the step. With `ctx.is_preplan()` the reservation belongs to the staged
    /// step; the later call for the same step id promotes it.
    fn admit(&self, _step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        Ok(AdmitOutcome::OK)
    }

    /// Gives back what `admit` freshly took for this step. Called on a refused admit for every
    /// resource reached, the refuser included. Shared pages and converted leases are not its own.
    fn rollback_admit(&self, _step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        Ok(())
    }

    /// Lays the step out. The answer is opaque to the runner, which files it for dependents; it
    /// stays readable until the runner releases the slot of the step.
    fn plan(&self, _step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<Plan> {
        Ok(Plan::NONE)
    }

    /// Records that the step has consumed what it admitted.
    fn commit(&self, _step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        Ok(())
    }

    /// Undoes a staged step without trace; `None` undoes whatever is staged. Accepts a step that
    /// is not staged (any more).
    fn clear_preplan(&self, _step: Option<StepId>) -> Result<()> {
        Ok(())
    }

    /// Learns the ids sampled in a step, one per entry of `rids`. The default hands each to
    /// [`Resource::extend_prefix_chain`].
    fn on_outputs(&self, ctx: &StepContext<'_>, rids: &[RequestId], ids: &[u32]) -> Result<()> {
        rids.iter().zip(ids).try_for_each(|(&rid, id)| {
            self.extend_prefix_chain(rid, ctx.node(), ctx.graph_walk(), std::slice::from_ref(id))
        })
    }

    // --- publishing: main thread ------------------------------------------------------------

    /// What another worker needs to go on with the request.
    fn publish(&self, _request_id: RequestId) -> Result<Option<PublishedInfo>> {
        Ok(None)
    }

    /// Publishes after one step of a node.
    fn publish_for_step(
        &self,
        request_id: RequestId,
        _node: Option<NodeId>,
        _graph_walk: Option<WalkId>,
    ) -> Result<Option<PublishedInfo>> {
        self.publish(request_id)
    }

    /// Publishes what is useful only once a dynamic loop has stopped.
    fn publish_after_stop(
        &self,
        _request_id: RequestId,
        _node: Option<NodeId>,
        _graph_walk: Option<WalkId>,
    ) -> Result<Option<PublishedInfo>> {
        Ok(None)
    }

    // --- pressure: main thread, may block on copies -----------------------------------------

    /// What `offload` would free, in whatever the resource counts. 0 means that the request is no
    /// candidate, however cold it is.
    fn reclaimable(&self, _rid: RequestId) -> Result<u64> {
        Ok(0)
    }

    /// How much this resource wants the request gone, higher being more. Asked only under the
    /// PRIORITY policy, of the resource it names.
    fn get_offload_priority(&self, _rid: RequestId) -> Result<f64> {
        Ok(0.0)
    }

    /// Moves the request's state off the device. Answers what was reclaimed.
    fn offload(&self, _rid: RequestId) -> Result<u64> {
        Ok(0)
    }

    /// Whether the state is away, or on its way.
    fn is_offloaded(&self, _rid: RequestId) -> Result<bool> {
        Ok(false)
    }

    /// Whether a reload is worth an attempt.
    fn can_reload(&self, _rid: RequestId) -> Result<bool> {
        Ok(false)
    }

    /// Brings the state back. False when it does not fit yet.
    fn reload(&self, _rid: RequestId) -> Result<bool> {
        Ok(true)
    }

    // --- sessions: main thread ---------------------------------------------------------------

    /// Keeps what a request has, for a later one, under the name of a session; what had that name goes.
    /// The request is empty then. A resource may forget sessions when it needs their room.
    fn retain_session(&self, _rid: RequestId, _session: &str) -> Result<()> {
        Ok(())
    }

    /// Makes the first `len` tokens that a session has the beginning of a request that has none yet. The
    /// session is gone then. Answers how many tokens the request has, 0 for a session that is not here;
    /// `None` leaves that to other resources.
    fn adopt_session(&self, _rid: RequestId, _session: &str, _len: u32) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Forgets a session. Unknown ones are accepted.
    fn remove_session(&self, _session: &str) -> Result<()> {
        Ok(())
    }
}

/// For one label: the walk that writes the keyed span and the one that decodes after it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, abi_stable::StableAbi)]
pub struct PrefixWalk {
    /// The stream.
    pub label: crate::LabelId,
    /// Writes the keyed span.
    pub write: WalkId,
    /// Decodes after it; equal to `write` when there is none.
    pub decode: WalkId,
}
crate::cross_value!(PrefixWalk);

/// A kind of resource that a plugin can build.
pub trait ResourceKind: Resource + Sized + 'static {
    /// The kind's settings. Derive `Deserialize` with `deny_unknown_fields`.
    type Spec: DeserializeOwned;

    /// Name of the kind in configs and manifests.
    const KIND: &'static str;

    /// Capabilities that built resources offer (`kv.cache/1`); must agree with the manifest.
    const PROVIDES: &'static [&'static str] = &[];

    /// Keys of the resources it needs. Asked before anything is built; authoritative.
    fn depends_on(_spec: &NodeResourceSpec<Self::Spec>) -> Vec<ResourceKey> {
        Vec::new()
    }

    /// Builds a resource.
    fn build(spec: NodeResourceSpec<Self::Spec>, info: &EngineResourceInfo) -> Result<Self>;

    /// What the built resource offers: `vec![KvCacheHandle::new(this.clone()).into()]`.
    fn capabilities(_this: &Arc<Self>) -> Vec<Capability> {
        Vec::new()
    }
}

/// A built resource with what it offers.
#[derive(Clone, Debug)]
pub struct BuiltResource {
    /// The resource.
    pub resource: ResourceHandle,
    /// Its capabilities.
    pub capabilities: Vec<Capability>,
}

impl BuiltResource {
    /// Gives all handles to this resource one fault mark that names it `key`.
    pub fn named(self, key: &str) -> Self {
        let fault = FaultCell::shared(key);
        let share = |mut object: Object| {
            object.share_fault(fault.clone());
            object
        };
        let resource = share(self.resource.into_object());
        let capabilities = self.capabilities.into_iter();
        Self {
            // SAFETY: the object came out of a resource handle.
            resource: unsafe { ResourceHandle::from_object_unchecked(resource) },
            capabilities: capabilities
                .map(|c| Capability::from_object(share(c.into_object())))
                .collect(),
        }
    }

    /// What dependents get of this resource. `index` is where its plans are filed.
    pub fn as_dependency(&self, spec: NodeResourceSpec, index: u32) -> Dependency {
        let facts = self.resource.describe();
        // SAFETY: facts borrow from the resource, which `Dependency` keeps alive beside them.
        let facts = facts.into_iter().map(|f| unsafe { f.extend() }).collect();
        let resource = self.resource.object().clone();
        Dependency::new(spec, index, self.capabilities.clone(), facts, resource)
    }
}

/// Builds a resource of a kind that is linked in (without a plugin): tests, static engines.
///
/// # Errors
/// Those of the kind's settings and of its `build`.
pub fn build_resource<K: ResourceKind>(
    spec: &NodeResourceSpec,
    info: &EngineResourceInfo,
) -> Result<BuiltResource> {
    let built = Arc::new(K::build(spec.parse()?, info)?);
    let capabilities = K::capabilities(&built);
    Ok(BuiltResource { resource: ResourceHandle::new(built), capabilities })
}
