//! The kind `panicker`: offers every capability and panics in every method, to show that no panic
//! of a plugin ends the host.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use resource_api::{
    AdmitOutcome, Attending, Attention, AttentionHandle, CGSlotSpec, Capability, CrossAttention,
    CrossAttentionHandle, EngineResourceInfo, HeadTurn, KvCache, KvCacheHandle, KvLayer, LabelId,
    LogitsProcessor, LogitsProcessorHandle, NodeId, NodeResourceSpec, Offered, Plan, Positions,
    PositionsHandle, PrefixInputs, PrefixWalk, PublishedInfo, RequestId, RequestOverrides,
    Resource, ResourceKey, ResourceKind, ResourceStep, Result, Sampled, Sampler, SamplerHandle,
    StepContext, StepId, TensorView, TensorViewMut, Turning, TypedRef, WalkId, WritePlaces,
};
use serde::Deserialize;

use crate::interface::{Echo, EchoHandle};

/// Where a [`Panicker`] panics before and after its life; its methods always do.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PanickerSpec {
    /// While it is asked for dependencies.
    pub in_depends_on: bool,
    /// While it is built.
    pub in_build: bool,
    /// While it is asked for its capabilities.
    pub in_capabilities: bool,
    /// While it is dropped.
    pub in_drop: bool,
}

/// A resource of kind `panicker`.
#[derive(Debug)]
pub struct Panicker(PanickerSpec);

impl ResourceKind for Panicker {
    type Spec = PanickerSpec;
    const KIND: &'static str = "panicker";
    const PROVIDES: &'static [&'static str] = &[
        "kv.cache/1",
        "attention/1",
        "cross_attention/1",
        "positions/1",
        "sampler/1",
        "logits.processor/1",
        "org.testkit.echo/1",
    ];

    fn depends_on(spec: &NodeResourceSpec<PanickerSpec>) -> Vec<ResourceKey> {
        assert!(!spec.settings.in_depends_on, "depends_on was asked to panic");
        Vec::new()
    }

    fn build(spec: NodeResourceSpec<PanickerSpec>, _info: &EngineResourceInfo) -> Result<Self> {
        assert!(!spec.settings.in_build, "build was asked to panic");
        Ok(Self(spec.settings))
    }

    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        assert!(!this.0.in_capabilities, "capabilities was asked to panic");
        vec![
            KvCacheHandle::new(this.clone()).into(),
            AttentionHandle::new(this.clone()).into(),
            CrossAttentionHandle::new(this.clone()).into(),
            PositionsHandle::new(this.clone()).into(),
            SamplerHandle::new(this.clone()).into(),
            LogitsProcessorHandle::new(this.clone()).into(),
            EchoHandle::new(this.clone()).into(),
        ]
    }
}

impl Drop for Panicker {
    fn drop(&mut self) {
        assert!(!self.0.in_drop, "drop was asked to panic");
    }
}

/// Implements a trait by panicking. Methods that the list lacks would run their defaults, which the
/// tests notice.
macro_rules! panicking {
    ($trait:ident { $(fn $name:ident($($arg:ty),*) -> $ret:ty;)* }) => {
        impl $trait for Panicker {
            $(fn $name(&self, $(_: $arg),*) -> $ret {
                panic!(concat!(stringify!($name), " always panics"))
            })*
        }
    };
}

panicking!(Resource {
    fn depends_on() -> Vec<String>;
    fn describe() -> Vec<TypedRef<'_>>;
    fn inspect() -> String;
    fn prefix_skip_safe() -> bool;
    fn supports_preplan() -> bool;
    fn takes_outputs_late() -> bool;
    fn supports_eviction() -> bool;
    fn force_double_buffer() -> bool;
    fn fingerprint() -> Option<Vec<u8>>;
    fn accepts() -> Vec<String>;
    fn bind(Vec<Offered>) -> Result<()>;
    fn enable_prefix_cache(&[u8], Vec<PrefixWalk>) -> Result<bool>;
    fn build_cuda_graph_buffers(&[CGSlotSpec], u32, u32) -> Result<()>;
    fn post_warmup_validate() -> Result<()>;
    fn ingest_request(RequestId, &RequestOverrides<'_>) -> Result<()>;
    fn admit_retrieve(RequestId, NodeId, WalkId, Option<&PublishedInfo>) -> Result<AdmitOutcome>;
    fn resolve_cached_prefix(RequestId, NodeId, WalkId) -> Result<Option<u32>>;
    fn apply_cached_prefix(RequestId, NodeId, WalkId, &PrefixInputs<'_>, u32) -> Result<()>;
    fn extend_prefix_chain(RequestId, NodeId, WalkId, &[u32]) -> Result<()>;
    fn reset_request(RequestId, bool) -> Result<()>;
    fn remove_request(RequestId) -> Result<()>;
    fn remove_requests(&[RequestId]) -> Result<()>;
    fn cleanup() -> Result<()>;
    fn admit(&ResourceStep<'_>, &StepContext<'_>) -> Result<AdmitOutcome>;
    fn rollback_admit(&ResourceStep<'_>, &StepContext<'_>) -> Result<()>;
    fn plan(&ResourceStep<'_>, &StepContext<'_>) -> Result<Plan>;
    fn commit(&ResourceStep<'_>, &StepContext<'_>) -> Result<()>;
    fn clear_preplan(Option<StepId>) -> Result<()>;
    fn on_outputs(&StepContext<'_>, &[RequestId], &[u32]) -> Result<()>;
    fn publish(RequestId) -> Result<Option<PublishedInfo>>;
    fn publish_for_step(RequestId, Option<NodeId>, Option<WalkId>) -> Result<Option<PublishedInfo>>;
    fn publish_after_stop(RequestId, Option<NodeId>, Option<WalkId>) -> Result<Option<PublishedInfo>>;
    fn reclaimable(RequestId) -> Result<u64>;
    fn get_offload_priority(RequestId) -> Result<f64>;
    fn offload(RequestId) -> Result<u64>;
    fn is_offloaded(RequestId) -> Result<bool>;
    fn can_reload(RequestId) -> Result<bool>;
    fn reload(RequestId) -> Result<bool>;
    fn retain_session(RequestId, &str) -> Result<()>;
    fn adopt_session(RequestId, &str, u32) -> Result<Option<u32>>;
    fn remove_session(&str) -> Result<()>;
});

panicking!(KvCache {
    fn write_kv(&StepContext<'_>, u32, LabelId, &TensorView<'_>, &TensorView<'_>) -> Result<()>;
    fn read_kv(
        &StepContext<'_>, u32, LabelId, &mut TensorViewMut<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn layer_view(u32) -> Result<KvLayer<'_>>;
    fn stream_len(RequestId, LabelId) -> Result<u32>;
    fn has_room(RequestId, LabelId, u32) -> Result<bool>;
    fn free_pages() -> u64;
    fn protect_prefix(RequestId, LabelId, u32) -> Result<()>;
    fn release_oldest(RequestId, LabelId, u32) -> Result<u32>;
    fn correct_len(RequestId, LabelId, u32) -> Result<()>;
    fn write_turned(
        &StepContext<'_>, u32, LabelId, &mut TensorViewMut<'_>, &TensorView<'_>, &TensorView<'_>,
        &HeadTurn
    ) -> Result<bool>;
    fn assert_pages_conserved() -> Result<()>;
    fn write_places(&StepContext<'_>, LabelId) -> Result<Option<WritePlaces>>;
});

panicking!(Attention {
    fn run(
        &StepContext<'_>, u32, LabelId, &TensorView<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn qo_indptr(&StepContext<'_>, LabelId, &mut [u32]) -> Result<u32>;
    fn select_last_hidden(
        &StepContext<'_>, LabelId, &TensorView<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn attending(&StepContext<'_>, u32, LabelId) -> Result<Option<Attending>>;
});

panicking!(CrossAttention {
    fn run(
        &StepContext<'_>, u32, LabelId, &TensorView<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
});

panicking!(Positions {
    fn apply_qk(
        &StepContext<'_>, LabelId, &mut TensorViewMut<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn pos_ids(&StepContext<'_>, LabelId) -> Result<&[u32]>;
    fn position(RequestId, LabelId) -> Result<u32>;
    fn apply_qk_layer(
        &StepContext<'_>, u32, LabelId, &mut TensorViewMut<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn turning(&StepContext<'_>, u32, LabelId) -> Result<Option<Turning>>;
});

panicking!(Sampler {
    fn sample(
        &StepContext<'_>, &[RequestId], &mut TensorViewMut<'_>, &mut [Sampled]
    ) -> Result<()>;
    fn top_logprobs(&TensorView<'_>, &mut [u32], &mut [f32]) -> Result<()>;
    fn can_begin(&[RequestId]) -> bool;
    fn begin_sample(
        &StepContext<'_>, &[RequestId], &mut TensorViewMut<'_>, &mut TensorViewMut<'_>
    ) -> Result<()>;
    fn end_sample(StepId, &mut [Sampled]) -> Result<()>;
});

panicking!(LogitsProcessor {
    fn process(&StepContext<'_>, &[RequestId], &mut TensorViewMut<'_>) -> Result<()>;
    fn takes_device() -> bool;
});

panicking!(Echo {
    fn echo(&[u32], Option<&str>) -> Result<u64>;
    fn key() -> String;
    fn peers() -> Vec<String>;
    fn spread(u32, Option<u32>) -> Result<u64>;
    fn start_job(bool) -> Result<()>;
    fn jobs_done() -> u32;
    fn graph_buffer(u32, u32) -> Result<&[AtomicU32]>;
    fn twice(&[u32]) -> Result<u64>;
});
