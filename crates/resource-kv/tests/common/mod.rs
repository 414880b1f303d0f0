//! A cache behind its handles, and steps for it.
#![allow(dead_code)] // each test file uses its own part

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use resource_api::host::{Job, ParallelBody, PlainHost};
use resource_api::{
    AdmitOutcome, BuiltResource, Device, EngineResourceInfo, ErrorKind, Fork, HostServices,
    HostServicesHandle, KvCache, KvCacheHandle, KvPlan, KvStepOptions, LabelId, NodeId,
    NodeResourceSpec, RequestId, RequestOverrides, Resource, ResourceError, ResourceHandle,
    ResourceStep, Result, Segments, SlotLease, StepContext, StepHead, StepId, TensorView,
    TensorViewMut, TypedRef, WalkId, build_resource,
};
use resource_kv::Kv;

pub const LAYERS: u32 = 2;
pub const HEADS: usize = 2;
pub const DIM: usize = 4;
pub const ROW: usize = HEADS * DIM;
pub const MAIN: LabelId = LabelId::MAIN;

pub struct Cache {
    pub resource: ResourceHandle,
    pub kv: KvCacheHandle,
    pub page_size: u32,
}

pub fn rid(slot: u32) -> RequestId {
    RequestId::new(slot, 1)
}

pub fn spec(settings: &str) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: "main_kv".into(),
        kind: "kv".into(),
        nodes: Default::default(),
        settings: format!(
            r#"{{"num_layers": {LAYERS}, "num_kv_heads": {HEADS}, "head_dim": {DIM}, {settings}}}"#
        ),
    }
}

/// Pages of `page_size` tokens, `pages` of them without the sink.
pub fn cache(page_size: u32, pages: u32, max_seq_len: u32) -> Cache {
    let settings = format!(
        r#""pages": {}, "page_size": {page_size}, "max_seq_len": {max_seq_len}, "dtype": "f32""#,
        pages + 1
    );
    cache_on(PlainHost::handle(), &settings, page_size)
}

pub fn cache_on(host: HostServicesHandle, settings: &str, page_size: u32) -> Cache {
    let built = try_cache_on(host, settings).unwrap();
    let kv = built.capabilities[0].open::<KvCacheHandle>().unwrap();
    Cache { resource: built.resource, kv, page_size }
}

pub fn try_cache_on(host: HostServicesHandle, settings: &str) -> Result<BuiltResource> {
    build_resource::<Kv>(&spec(settings), &EngineResourceInfo::new(Device::CPU, host))
}

/// A host with threads, a budget, and epochs that complete when the test says so.
#[derive(Clone)]
pub struct TestHost(pub Arc<TestHostState>);

pub struct TestHostState {
    pub threads: u32,
    pub free: AtomicU64,
    pub completed: AtomicU64,
    pub parallel: AtomicU64,
    /// Called whenever work is to be shared, and when a label's name is asked for.
    pub hook: OnceLock<Box<dyn Fn() + Send + Sync>>,
    plain: HostServicesHandle,
}

impl TestHost {
    pub fn new(threads: u32, bytes: u64) -> Self {
        TestHost(Arc::new(TestHostState {
            threads,
            free: bytes.into(),
            completed: u64::MAX.into(),
            parallel: 0.into(),
            hook: OnceLock::new(),
            plain: PlainHost::handle(),
        }))
    }

    pub fn handle(&self) -> HostServicesHandle {
        HostServicesHandle::new(self.0.clone())
    }
}

impl TestHostState {
    fn call_hook(&self) {
        self.hook.get().into_iter().for_each(|hook| hook());
    }
}

impl HostServices for TestHostState {
    fn threads(&self) -> u32 {
        self.threads
    }
    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        self.parallel.fetch_add(1, Ordering::Relaxed);
        self.call_hook();
        std::thread::scope(|s| (0..tasks).for_each(|task| drop(s.spawn(move || body.call(task)))));
    }
    fn log(&self, _: u32, _: &str, _: &str) {}
    fn count(&self, _: &str, _: &str, _: u64) {}
    fn gauge(&self, _: &str, _: &str, _: f64) {}
    fn now_nanos(&self) -> u64 {
        0
    }
    fn label_name(&self, label: LabelId) -> String {
        self.call_hook();
        self.plain.label_name(label)
    }
    fn label_id(&self, name: &str) -> LabelId {
        self.plain.label_id(name)
    }
    fn walk_name(&self, walk: WalkId) -> String {
        self.plain.walk_name(walk)
    }
    fn node_name(&self, node: NodeId) -> String {
        self.plain.node_name(node)
    }
    fn completed_epoch(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }
    fn reserve_memory(&self, _: Device, bytes: u64) -> Result<()> {
        let free = self.free.load(Ordering::Relaxed);
        let left = free.checked_sub(bytes).ok_or_else(|| {
            ResourceError::new(ErrorKind::EXHAUSTED, "no memory").with_amounts(bytes, free)
        })?;
        self.free.store(left, Ordering::Relaxed);
        Ok(())
    }
    fn release_memory(&self, _: Device, bytes: u64) {
        self.free.fetch_add(bytes, Ordering::Relaxed);
    }
    fn free_memory(&self, _: Device) -> u64 {
        self.free.load(Ordering::Relaxed)
    }
    fn spawn(&self, name: &str, job: Job) -> Result<()> {
        self.plain.spawn(name, job)
    }
}

/// A step: its rows and options, where it is planned.
#[derive(Debug, Default)]
pub struct Step {
    pub id: u64,
    pub slot: u32,
    pub request: Vec<RequestId>,
    pub label: Vec<LabelId>,
    pub span: Vec<u32>,
    pub options: Option<KvStepOptions>,
    pub preplan: bool,
    pub walk: u32,
    pub token_ids: Vec<u32>,
}

impl Step {
    pub fn new(id: u64, rows: &[(u32, u32, u32)]) -> Self {
        Step {
            id,
            request: rows.iter().map(|r| rid(r.0)).collect(),
            label: rows.iter().map(|r| LabelId(r.1)).collect(),
            span: rows.iter().map(|r| r.2).collect(),
            ..Step::default()
        }
    }

    pub fn with(mut self, options: KvStepOptions) -> Self {
        self.options = Some(options);
        self
    }

    pub fn tokens(&self) -> usize {
        self.span.iter().sum::<u32>() as usize
    }

    /// Calls `f` with the step and its context.
    pub fn call<R>(
        &self,
        plans: &[TypedRef<'_>],
        f: impl FnOnce(&ResourceStep<'_>, &StepContext<'_>) -> R,
    ) -> R {
        let segments = Segments { request: &self.request, label: &self.label, span: &self.span };
        let mut step = ResourceStep::new(segments);
        if !self.token_ids.is_empty() {
            step = step.with_token_ids(&self.token_ids);
        }
        if let Some(options) = &self.options {
            step = step.with_options(TypedRef::new(options));
        }
        let head = StepHead {
            step: StepId(self.id),
            epoch: self.id,
            node: NodeId(0),
            graph_walk: WalkId(self.walk),
            lease: SlotLease::eager(self.slot, self.id as u32),
            capture: false,
            is_preplan: self.preplan,
            stream: 0,
        };
        f(&step, &StepContext::new(head, &self.request, &self.request, plans))
    }
}

impl Cache {
    pub fn ingest(&self, slot: u32) {
        self.resource.ingest_request(rid(slot), &RequestOverrides::new("", &[1, 2], 2)).unwrap();
    }

    pub fn admit(&self, step: &Step) -> AdmitOutcome {
        step.call(&[], |s, c| self.resource.admit(s, c)).unwrap()
    }

    pub fn rollback(&self, step: &Step) {
        step.call(&[], |s, c| self.resource.rollback_admit(s, c)).unwrap();
    }

    pub fn plan(&self, step: &Step) -> Result<TypedRef<'static>> {
        step.call(&[], |s, c| self.resource.plan(s, c)).map(|p| p.into_result())
    }

    pub fn commit(&self, step: &Step) -> Result<()> {
        step.call(&[], |s, c| self.resource.commit(s, c))
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self, slot: u32, label: u32) -> u32 {
        self.kv.stream_len(rid(slot), LabelId(label)).unwrap()
    }

    pub fn conserved(&self) {
        self.kv.assert_pages_conserved().unwrap();
    }

    /// Stores `value(token)` as keys and its negative as values of a label's tokens, in every layer
    /// (plus the layer) and element (plus a hundredth of its place).
    pub fn write(&self, step: &Step, plan: TypedRef<'_>, label: LabelId, values: &[f32]) {
        for layer in 0..LAYERS {
            let k: Vec<f32> = values.iter().flat_map(|&v| row(v, layer)).collect();
            let v: Vec<f32> = k.iter().map(|x| -x).collect();
            let shape = [values.len(), HEADS, DIM];
            let (k, v) = (TensorView::from_slice(&k, &shape), TensorView::from_slice(&v, &shape));
            step.call(&[plan], |_, c| self.kv.write_kv(c, layer, label, &k, &v)).unwrap();
        }
    }

    /// What `read_kv` gives for a label's tokens in a layer.
    pub fn read(
        &self,
        step: &Step,
        plan: TypedRef<'_>,
        layer: u32,
        tokens: usize,
    ) -> [Vec<f32>; 2] {
        let mut out = [vec![0.0; tokens * ROW], vec![0.0; tokens * ROW]];
        let [k, v] = &mut out;
        let shape = [tokens, HEADS, DIM];
        let mut k = TensorViewMut::from_slice(k, &shape);
        let mut v = TensorViewMut::from_slice(v, &shape);
        step.call(&[plan], |_, c| self.kv.read_kv(c, layer, MAIN, &mut k, &mut v)).unwrap();
        out
    }

    /// The values that a plan's row reads, found as a kernel does: through the page table and the
    /// strides of the layer views. Checks that all layers, heads, elements, keys and values agree.
    pub fn history(&self, plan: &KvPlan, row_index: usize) -> Vec<f32> {
        let pages = plan.pages(row_index, self.page_size);
        let len = plan.len[row_index];
        let mut found: Vec<f32> = Vec::new();
        for layer in 0..LAYERS {
            let view = self.kv.layer_view(layer).unwrap();
            let strides = view.k.raw().strides;
            let at = |position: u32, head: usize| {
                let page = pages[(position / self.page_size) as usize] as usize;
                let slot = (position % self.page_size) as usize;
                page * strides[0] as usize + slot * strides[1] as usize + head * strides[2] as usize
            };
            for position in 0..len {
                let heads = |tensor: &TensorView<'_>| -> Vec<f32> {
                    let head = |h| tensor.window::<f32>(at(position, h), DIM).unwrap().to_vec();
                    (0..HEADS).flat_map(head).collect()
                };
                let (k, v) = (heads(&view.k), heads(&view.v));
                let value = k[0] - row(0.0, layer)[0];
                assert_eq!(k, row(value, layer), "keys of position {position}");
                assert_eq!(v, k.iter().map(|x| -x).collect::<Vec<_>>(), "values of {position}");
                match found.get(position as usize) {
                    None => found.push(value),
                    Some(&first) => assert_eq!(first, value, "layer {layer} of {position}"),
                }
            }
        }
        found
    }
}

/// One token's keys in a layer: exact in f32 for whole `value`s.
pub fn row(value: f32, layer: u32) -> Vec<f32> {
    (0..ROW).map(|i| value + layer as f32 / 4.0 + i as f32 / 64.0).collect()
}

pub fn fork(slot: u32, from: u32, to: u32) -> Fork {
    Fork { request_id: rid(slot), from: LabelId(from), to: LabelId(to) }
}
