//! A cache that only lays rows out, and a position resource on it.

use std::sync::Arc;

use resource_api::Positions as _;
use resource_api::host::PlainHost;
use resource_api::{
    AdmitOutcome, BuiltResource, DType, Device, EngineResourceInfo, HostServicesHandle, KvFacts,
    KvGroup, KvPlan, KvStepOptions, LabelId, NodeId, NodeResourceSpec, Plan, PlanSlots,
    PositionStepOptions, PositionsHandle, RequestId, RequestOverrides, Resource, ResourceHandle,
    ResourceKind, ResourceStep, Result, Segments, SlotLease, StepContext, StepHead, StepId,
    TypedRef, WalkId, build_resource,
};
use resource_positions::Positions;

pub const HEAD_DIM: usize = 8;
pub const MAIN: LabelId = LabelId::MAIN;
pub const OTHER: LabelId = LabelId(1);

/// Lays rows out as a cache does, and holds nothing.
pub struct Rows {
    plans: PlanSlots<KvPlan>,
    facts: KvFacts,
}

impl Resource for Rows {
    fn describe(&self) -> Vec<TypedRef<'_>> {
        vec![TypedRef::new(&self.facts)]
    }

    fn plan(&self, step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        let options = step.options::<KvStepOptions>()?;
        let combined: Vec<_> = options.iter().flat_map(|o| o.combined_labels.iter()).collect();
        let mut groups: Vec<(LabelId, Vec<LabelId>)> = Vec::new();
        for &label in step.segments().label {
            match combined.iter().find(|c| c.source == label) {
                _ if groups.iter().any(|(_, members)| members.contains(&label)) => {}
                None => groups.push((label, vec![label])),
                Some(c) => {
                    let members = combined.iter().filter(|m| m.combined == c.combined);
                    groups.push((c.combined, members.map(|m| m.source).collect()));
                }
            }
        }
        self.plans.plan(ctx, |plan| {
            plan.groups.clear();
            plan.request.clear();
            plan.span.clear();
            for (label, members) in &groups {
                let first_row = plan.request.len() as u32;
                let first_token = plan.span.iter().sum();
                for member in members {
                    for segment in step.segments().iter().filter(|s| s.label == *member) {
                        plan.request.push(segment.request_id);
                        plan.span.push(segment.span);
                    }
                }
                let tokens: u32 = plan.span.iter().sum();
                plan.groups.push(KvGroup {
                    label: *label,
                    first_row,
                    num_rows: plan.request.len() as u32 - first_row,
                    first_token,
                    num_tokens: tokens - first_token,
                });
            }
            Ok(())
        })
    }
}

impl ResourceKind for Rows {
    type Spec = serde_json::Value;
    const KIND: &'static str = "rows";
    fn build(_: NodeResourceSpec<serde_json::Value>, _: &EngineResourceInfo) -> Result<Self> {
        let facts = KvFacts {
            num_layers: 1,
            num_kv_heads: 1,
            num_qo_heads: 2,
            head_dim: HEAD_DIM as u32,
            page_size: 4,
            num_pages: 1,
            max_seq_len: 1 << 14,
            dtype: DType::F32,
            page_stride: 0,
            layer_stride: 0,
            kv_stride: 0,
            head_stride: 0,
            slot_stride: 0,
        };
        Ok(Self { plans: PlanSlots::new(), facts })
    }
}

fn spec(key: &str, kind: &str, settings: &str) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: key.into(),
        kind: kind.into(),
        nodes: Default::default(),
        settings: settings.into(),
    }
}

/// A position resource with the cache it hangs on.
pub struct Engine {
    kv: ResourceHandle,
    pub pos: ResourceHandle,
    pub api: PositionsHandle,
}

pub type Seg = (RequestId, LabelId, u32);

/// Builds with these settings beside `kv_cache`.
pub fn build(settings: serde_json::Value, host: HostServicesHandle) -> Result<BuiltResource> {
    Ok(build_both(settings, host)?.1)
}

fn build_both(
    mut settings: serde_json::Value,
    host: HostServicesHandle,
) -> Result<(ResourceHandle, BuiltResource)> {
    let mut info = EngineResourceInfo::new(Device::CPU, host);
    let kv_spec = spec("main_kv", "rows", "{}");
    let kv = build_resource::<Rows>(&kv_spec, &info)?;
    info.dependencies.insert("main_kv".into(), kv.as_dependency(kv_spec, 0));
    info.index = 1;
    settings["kv_cache"] = "main_kv".into();
    let pos = build_resource::<Positions>(&spec("pos", "positions", &settings.to_string()), &info)?;
    Ok((kv.resource, pos))
}

/// A step with what the model says about it.
#[derive(Default)]
pub struct Step {
    pub id: u64,
    pub slot: u32,
    pub preplan: bool,
    pub segments: Vec<Seg>,
    pub kv: KvStepOptions,
    pub options: PositionStepOptions,
}

impl Step {
    pub fn new(id: u64, slot: u32, segments: &[Seg]) -> Self {
        Self { id, slot, segments: segments.to_vec(), ..Self::default() }
    }

    pub fn staged(self) -> Self {
        Self { preplan: true, ..self }
    }
}

impl Engine {
    pub fn new(settings: serde_json::Value) -> Self {
        Self::on(settings, PlainHost::handle())
    }

    pub fn on(settings: serde_json::Value, host: HostServicesHandle) -> Self {
        let (kv, pos) = build_both(settings, host).unwrap();
        let api = pos.capabilities[0].open().unwrap();
        Self { kv, pos: pos.resource, api }
    }

    pub fn ingest(&self, rids: &[RequestId]) {
        for &rid in rids {
            self.pos.ingest_request(rid, &RequestOverrides::new("", &[], 1)).unwrap();
        }
    }

    /// Calls `with` with a context in which all have planned.
    pub fn planned<T>(&self, step: &Step, with: impl FnOnce(&Self, &StepContext<'_>) -> T) -> T {
        self.try_planned(step, with).unwrap()
    }

    pub fn try_plan(&self, step: &Step) -> Result<()> {
        self.try_planned(step, |_, _| ())
    }

    fn try_planned<T>(
        &self,
        step: &Step,
        with: impl FnOnce(&Self, &StepContext<'_>) -> T,
    ) -> Result<T> {
        self.in_context(step, |kv_step, pos_step, head| {
            let ctx = StepContext::new(head, &[], &[], &[]);
            let kv = self.kv.plan(kv_step, &ctx)?.into_result();
            let results = [kv];
            let ctx = StepContext::new(head, &[], &[], &results);
            let pos = self.pos.plan(pos_step, &ctx)?.into_result();
            let results = [kv, pos];
            Ok(with(self, &StepContext::new(head, &[], &[], &results)))
        })
    }

    pub fn plan(&self, step: &Step, label: LabelId) -> Vec<u32> {
        self.planned(step, |e, ctx| e.api.pos_ids(ctx, label).unwrap().to_vec())
    }

    pub fn admit(&self, step: &Step) -> AdmitOutcome {
        self.in_context(step, |_, s, head| {
            self.pos.admit(s, &StepContext::new(head, &[], &[], &[])).unwrap()
        })
    }

    pub fn commit(&self, step: &Step) {
        self.in_context(step, |_, s, head| {
            self.pos.commit(s, &StepContext::new(head, &[], &[], &[])).unwrap();
        });
    }

    pub fn roll_back(&self, step: &Step) {
        self.in_context(step, |_, s, head| {
            self.pos.rollback_admit(s, &StepContext::new(head, &[], &[], &[])).unwrap();
        });
    }

    /// Admits, plans and commits; the ids of `main`.
    pub fn run(&self, step: &Step) -> Vec<u32> {
        assert!(self.admit(step).is_ready());
        let ids = self.plan(step, MAIN);
        self.commit(step);
        ids
    }

    fn in_context<T>(
        &self,
        step: &Step,
        with: impl FnOnce(&ResourceStep<'_>, &ResourceStep<'_>, StepHead) -> T,
    ) -> T {
        let request: Vec<_> = step.segments.iter().map(|s| s.0).collect();
        let label: Vec<_> = step.segments.iter().map(|s| s.1).collect();
        let span: Vec<_> = step.segments.iter().map(|s| s.2).collect();
        let segments = Segments { request: &request, label: &label, span: &span };
        let head = StepHead {
            step: StepId(step.id),
            epoch: step.id,
            node: NodeId(0),
            graph_walk: WalkId(0),
            lease: SlotLease::eager(step.slot, step.id as u32),
            capture: false,
            is_preplan: step.preplan,
            stream: 0,
        };
        let kv = ResourceStep::new(segments).with_options(TypedRef::new(&step.kv));
        let pos = ResourceStep::new(segments).with_options(TypedRef::new(&step.options));
        with(&kv, &pos, head)
    }
}

/// A host with four threads, which takes tasks in any order.
pub struct Threads;

impl resource_api::HostServices for Threads {
    fn threads(&self) -> u32 {
        4
    }
    fn parallel_for(&self, tasks: u32, body: resource_api::host::ParallelBody) {
        std::thread::scope(|s| {
            (0..tasks).rev().for_each(|t| {
                s.spawn(move || body.call(t));
            });
        });
    }
    fn log(&self, _: u32, _: &str, _: &str) {}
    fn count(&self, _: &str, _: &str, _: u64) {}
    fn gauge(&self, _: &str, _: &str, _: f64) {}
    fn now_nanos(&self) -> u64 {
        0
    }
    fn label_name(&self, label: LabelId) -> String {
        label.0.to_string()
    }
    fn label_id(&self, name: &str) -> LabelId {
        LabelId(name.parse().unwrap_or(0))
    }
    fn walk_name(&self, _: WalkId) -> String {
        String::new()
    }
    fn node_name(&self, _: NodeId) -> String {
        String::new()
    }
    fn completed_epoch(&self) -> u64 {
        0
    }
    fn reserve_memory(&self, _: Device, _: u64) -> Result<()> {
        Ok(())
    }
    fn release_memory(&self, _: Device, _: u64) {}
    fn free_memory(&self, _: Device) -> u64 {
        0
    }
    fn spawn(&self, _: &str, _: resource_api::host::Job) -> Result<()> {
        Ok(())
    }
}

impl Threads {
    pub fn handle() -> HostServicesHandle {
        HostServicesHandle::new(Arc::new(Threads))
    }
}
