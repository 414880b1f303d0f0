//! Handles over linked-in objects: every call goes through the vtable and the shim, as it would
//! into a plugin.

use resource_api::host::PlainHost;
use resource_api::{
    AdmitOutcome, Device, EngineResourceInfo, ErrorKind, Exclusive, FailureReason, LabelId, NodeId,
    NodeResourceSpec, Plan, PlanSlots, PublishedInfo, RequestId, RequestOverrides, Resource,
    ResourceError, ResourceHandle, ResourceKind, ResourceStep, Result, Segments, SlotLease,
    StableAbi, StepContext, StepHead, StepId, Typed, TypedRef, WalkId, build_resource, capability,
    kind,
};
use std::sync::Arc;

#[repr(C)]
#[derive(Default, StableAbi)]
struct CountPlan {
    tokens: u64,
    uses: u32,
}

impl Typed for CountPlan {
    const TAG: &'static str = "test.count-plan";
    const MAJOR: u32 = 1;
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    limit: u32,
}

struct Counter {
    limit: u32,
    seen: Exclusive<Vec<RequestId>>,
    plans: PlanSlots<CountPlan>,
}

impl Resource for Counter {
    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides) -> Result<()> {
        if overrides.prompt().is_empty() {
            panic!("no prompt for {rid}");
        }
        self.seen.lock().push(rid);
        Ok(())
    }

    fn admit(&self, step: &ResourceStep, _ctx: &StepContext) -> Result<AdmitOutcome> {
        let need = step.segments().num_tokens() as u64;
        match need > self.limit as u64 {
            true => {
                let rid = step.segments().request[0];
                Ok(AdmitOutcome::allocation_failed(rid, LabelId::MAIN, need, self.limit as u64))
            }
            false => Ok(AdmitOutcome::OK),
        }
    }

    fn plan(&self, step: &ResourceStep, ctx: &StepContext) -> Result<Plan> {
        self.plans.plan(ctx, |plan| {
            plan.tokens = step.segments().num_tokens() as u64;
            plan.uses += 1;
            Ok(())
        })
    }
}

impl ResourceKind for Counter {
    type Spec = Settings;
    const KIND: &'static str = "counter";
    fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(Counter {
            limit: spec.settings.limit,
            seen: Exclusive::default(),
            plans: PlanSlots::new(),
        })
    }
}

fn spec(settings: &str) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: "c".into(),
        kind: "counter".into(),
        nodes: Default::default(),
        settings: settings.into(),
    }
}

fn counter() -> ResourceHandle {
    let info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    build_resource::<Counter>(&spec(r#"{"limit": 10}"#), &info).unwrap().resource
}

fn head(slot: u32) -> StepHead {
    StepHead {
        step: StepId(1),
        epoch: 1,
        node: NodeId(0),
        graph_walk: WalkId(0),
        lease: SlotLease::eager(slot, 1),
        capture: false,
        is_preplan: false,
        stream: 0,
    }
}

const RIDS: [RequestId; 2] = [RequestId::new(0, 1), RequestId::new(1, 1)];

#[test]
fn a_step_crosses_and_its_plan_comes_back() {
    let counter = counter();
    let labels = [LabelId::MAIN; 2];
    for (slot, spans) in [(3, [4u32, 1]), (3, [2, 0]), (5, [1, 1])] {
        let step = ResourceStep::new(Segments { request: &RIDS, label: &labels, span: &spans });
        let ctx = StepContext::new(head(slot), &RIDS, &RIDS, &[]);
        assert!(counter.admit(&step, &ctx).unwrap().is_ready());
        let results = [counter.plan(&step, &ctx).unwrap().into_result()];
        let ctx = StepContext::new(head(slot), &RIDS, &RIDS, &results);
        let plan = ctx.plan_result::<CountPlan>(0).unwrap();
        assert_eq!(plan.tokens, spans.iter().sum::<u32>() as u64);
        assert_eq!(plan.uses, if spans == [2, 0] { 2 } else { 1 });
        assert_eq!(ctx.plan_result::<CountPlan>(1).err().unwrap().kind(), ErrorKind::WRONG_STATE);
    }
}

#[test]
fn a_refusal_keeps_its_reason_and_amounts() {
    let (labels, spans) = ([LabelId::MAIN; 2], [9u32, 4]);
    let step = ResourceStep::new(Segments { request: &RIDS, label: &labels, span: &spans });
    let ctx = StepContext::new(head(0), &RIDS, &RIDS, &[]);
    let outcome = counter().admit(&step, &ctx).unwrap();
    assert!(!outcome.is_ok());
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!((outcome.request_id(), outcome.amounts()), (RIDS[0], (13, 10)));
}

#[test]
fn a_panic_is_an_error_and_faults_every_handle() {
    let counter = counter();
    let other = counter.clone();
    let e = counter.ingest_request(RIDS[0], &RequestOverrides::new("", &[], 1)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PANICKED);
    assert!(e.message().contains("Resource::ingest_request panicked: no prompt for r0.1"), "{e}");
    let e = other.ingest_request(RIDS[0], &RequestOverrides::new("", &[1], 1)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::POISONED);
    assert_eq!(other.depends_on(), Vec::<String>::new());
}

#[test]
fn the_seed_defaults_hold_for_a_bare_resource() {
    struct Bare;
    impl Resource for Bare {}
    let bare = ResourceHandle::new(Arc::new(Bare));
    let (rid, node, walk) = (RIDS[0], NodeId(0), WalkId(0));
    assert!(!bare.prefix_skip_safe() && !bare.force_double_buffer());
    assert!(!bare.supports_preplan() && !bare.supports_eviction());
    assert!(bare.admit_retrieve(rid, node, walk, None).unwrap().is_ready());
    assert_eq!(bare.resolve_cached_prefix(rid, node, walk).unwrap(), None);
    assert_eq!((bare.reclaimable(rid).unwrap(), bare.offload(rid).unwrap()), (0, 0));
    assert_eq!(bare.get_offload_priority(rid).unwrap(), 0.0);
    assert!(bare.reload(rid).unwrap() && !bare.can_reload(rid).unwrap());
    assert_eq!(bare.fingerprint(), None);
    assert!(!bare.enable_prefix_cache(b"root", vec![]).unwrap());
    assert_eq!(bare.publish_for_step(rid, Some(node), Some(walk)).unwrap(), None);
}

#[test]
fn publishing_for_a_step_goes_through_publish_and_after_a_stop_nothing_is_published() {
    struct Publisher;
    impl Resource for Publisher {
        fn publish(&self, rid: RequestId) -> Result<Option<PublishedInfo>> {
            let mut info = PublishedInfo::new("publisher", 1);
            info.set("main", rid.slot.into(), Vec::new());
            Ok(Some(info))
        }
    }
    let publisher = ResourceHandle::new(Arc::new(Publisher));
    let (rid, node, walk) = (RIDS[1], Some(NodeId(0)), Some(WalkId(0)));
    let info = publisher.publish(rid).unwrap();
    assert!(info.is_some());
    assert_eq!(publisher.publish_for_step(rid, node, walk).unwrap(), info);
    assert_eq!(publisher.publish_after_stop(rid, node, walk).unwrap(), None);
}

#[test]
fn a_kind_reads_its_settings_and_names_a_wrong_key() {
    let kind = kind::<Counter>();
    use resource_api::Kind;
    assert_eq!(kind.kind(), "counter");
    let e = kind.depends_on(spec(r#"{"limt": 3}"#)).unwrap_err();
    assert_eq!(e.to_string(), "[resources.c]: unknown key `limt`; did you mean `limit`?");
    let info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    assert!(kind.build(spec(r#"{"limit": 3}"#), info).is_ok());
}

/// A third party's own interface.
#[capability(id = "org.example.adder", major = 1)]
pub trait Adder: Send + Sync {
    fn add(&self, values: &[u32], label: Option<&str>) -> Result<u64>;
    fn names(&self) -> Vec<String> {
        vec![format!("{}", self.add(&[1, 2], None).unwrap_or(0))]
    }
}

struct Plus(u64);
impl Adder for Plus {
    fn add(&self, values: &[u32], label: Option<&str>) -> Result<u64> {
        match label {
            Some("bad") => Err(ResourceError::invalid("bad label").with_amounts(2, 1)),
            _ => Ok(values.iter().map(|&v| v as u64).sum::<u64>() + self.0),
        }
    }
}

#[test]
fn a_third_party_interface_opens_by_its_own_name_only() {
    let capability: resource_api::Capability = AdderHandle::new(Arc::new(Plus(5))).into();
    let adder = capability.open::<AdderHandle>().unwrap();
    assert_eq!(adder.add(&[1, 2, 3], None).unwrap(), 11);
    assert_eq!(adder.names(), vec!["8"]);
    let e = adder.add(&[], Some("bad")).unwrap_err();
    assert_eq!((e.kind(), e.amounts()), (ErrorKind::INVALID, (2, 1)));
    let e = capability.open::<resource_api::KvCacheHandle>().unwrap_err();
    assert!(e.to_string().contains("expected kv.cache/1, found org.example.adder/1"), "{e}");
}

#[test]
fn the_pool_runs_every_task_and_carries_a_panic_to_the_caller() {
    let host = PlainHost::handle();
    let sum = std::sync::atomic::AtomicU32::new(0);
    host.run(10, |i| {
        sum.fetch_add(i, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(sum.into_inner(), 45);
    let caught = std::panic::catch_unwind(|| host.run(4, |i| assert!(i != 2, "task {i}")));
    let message = *caught.unwrap_err().downcast::<String>().unwrap();
    assert_eq!(message, "task 2");
}

#[test]
fn a_typed_reference_opens_only_as_what_it_is() {
    let plan = CountPlan { tokens: 3, uses: 1 };
    let reference = TypedRef::new(&plan);
    assert_eq!(reference.open::<CountPlan>().unwrap().tokens, 3);
    let e = reference.open::<resource_api::KvPlan>().err().unwrap();
    assert!(e.to_string().contains("expected a kv.plan/1, found a test.count-plan/1"), "{e}");
    assert!(TypedRef::NONE.open::<CountPlan>().is_err());
}
