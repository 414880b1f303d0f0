//! A cache over plain memory with a plan made by hand, steps through it, and a float64 reference.

#![allow(dead_code)] // each test binary uses its part

use device::{E4m3, Parallel, Pool, PoolType, SharedPool};
use half::{bf16, f16};
use resource_api::host::{Job, ParallelBody, PlainHost};
use resource_api::*;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

pub const LAYERS: usize = 2;
pub const CONTEXT: LabelId = LabelId(1);

/// What a step is computed with.
#[derive(Clone, Debug)]
pub struct Config {
    pub kind: &'static str,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub page_size: u32,
    pub dtype: DType,
    pub threads: u32,
    pub causal: bool,
    /// Slots of a page lie apart by all heads, not head by head.
    pub slot_major: bool,
    pub window: Option<u32>,
    /// A layer that the window does not apply to.
    pub full_layer: Option<u32>,
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            kind: "attention",
            heads: 6,
            kv_heads: 2,
            head_dim: 64,
            page_size: 16,
            dtype: DType::F32,
            threads: 2,
            causal: true,
            slot_major: false,
            window: None,
            full_layer: None,
            scale: None,
            softcap: None,
        }
    }
}

/// A stream's share of a step. Keys, values and queries follow from `seed` and the position.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub seed: u32,
    pub request: RequestId,
    pub label: LabelId,
    pub start: u32,
    pub span: u32,
}

impl Stream {
    pub fn new(seed: u32, start: u32, span: u32) -> Self {
        Self { seed, request: RequestId::new(seed, 1), label: LabelId::MAIN, start, span }
    }

    pub fn padding(row: u32) -> Self {
        Self { request: RequestId::padding(row), ..Self::new(9999, 0, 1) }
    }

    pub fn context(seed: u32, len: u32) -> Self {
        Self { label: CONTEXT, ..Self::new(seed, len, 0) }
    }

    pub fn len(&self) -> u32 {
        self.start + self.span
    }
}

/// Pseudo-random in -1..1.
pub fn noise(seed: u32, kind: u32, position: u32, at: usize) -> f32 {
    let mut x = u64::from(seed) << 40 ^ u64::from(kind) << 36 ^ u64::from(position) << 16;
    x = (x ^ at as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

const Q: u32 = 0;
const K: u32 = 1;
const V: u32 = 2;

/// The query of a token, all heads. Wide enough that softmax is far from uniform.
pub fn query(config: &Config, stream: &Stream, position: u32) -> Vec<f32> {
    let n = config.heads * config.head_dim;
    (0..n).map(|i| 2.0 * noise(stream.seed, Q, position, i)).collect()
}

/// Key or value of a token, all heads, before it is rounded to the cache's type.
fn cached(config: &Config, stream: &Stream, kind: u32, position: u32) -> Vec<f32> {
    let n = config.kv_heads * config.head_dim;
    (0..n).map(|i| noise(stream.seed, kind, position, i)).collect()
}

/// What the cache holds of [`cached`].
fn held(config: &Config, stream: &Stream, kind: u32, position: u32) -> Vec<f64> {
    let all = cached(config, stream, kind, position);
    let rounded = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let one = |&x: &f32| match config.dtype {
            DType::F16 => f16::from_f32(x).to_f64(),
            DType::BF16 => bf16::from_f32(x).to_f64(),
            DType::F8E4M3 => E4m3::from_f32(x).to_f32().into(),
            DType::I8 => f64::from((x * (127.0 / most)).round_ties_even() * (most / 127.0)),
            _ => f64::from(x),
        };
        row.iter().map(one).collect()
    };
    all.chunks(config.head_dim).flat_map(rounded).collect()
}

/// Elements of a row with what lies behind it.
fn row_elements(config: &Config) -> u64 {
    config.head_dim as u64 + if config.dtype == DType::I8 { 4 } else { 0 }
}

/// Attention of one token over `stream`'s first `len` keys in float64, straight from the formula.
pub fn reference(config: &Config, q: &[f32], stream: &Stream, at: u32, len: u32) -> Vec<f64> {
    let (d, group) = (config.head_dim, config.heads / config.kv_heads);
    let scale = config.scale.map_or(1.0 / (d as f64).sqrt(), f64::from);
    let last = if config.causal { at.min(len.saturating_sub(1)) } else { len.saturating_sub(1) };
    let window = config.window.filter(|_| config.full_layer != Some(LAYERS as u32 - 1));
    let first = window.map_or(0, |w| (at + 1).saturating_sub(w));
    let mut out = vec![0.0; q.len()];
    if len == 0 {
        return out;
    }
    for h in 0..config.heads {
        let kv = h / group * d;
        let mut weights = Vec::new();
        for position in first..=last {
            let k = held(config, stream, K, position);
            let dot: f64 = (0..d).map(|i| f64::from(q[h * d + i]) * k[kv + i]).sum();
            let score = dot * scale;
            weights.push(config.softcap.map_or(score, |c| {
                let c = f64::from(c);
                c * (score / c).tanh()
            }));
        }
        let max = weights.iter().fold(f64::NEG_INFINITY, |m, &w| m.max(w));
        weights.iter_mut().for_each(|w| *w = (*w - max).exp());
        let sum: f64 = weights.iter().sum();
        for (position, w) in (first..=last).zip(weights) {
            let v = held(config, stream, V, position);
            for i in 0..d {
                out[h * d + i] += w / sum * v[kv + i];
            }
        }
    }
    out
}

/// A cache whose plan and contents are made up: pages are dealt out of order, and every slot that
/// no stream holds is NaN, the sink's included.
pub struct FakeCache {
    pool: SharedPool,
    facts: KvFacts,
    streams: Vec<Stream>,
    pages: Vec<Vec<u32>>,
    plans: PlanSlots<KvPlan>,
}

impl FakeCache {
    pub fn new(config: &Config, streams: &[Stream]) -> Self {
        let page_size = config.page_size;
        let need: u32 = streams.iter().map(|s| s.len().div_ceil(page_size)).sum();
        let num_pages = need + 3;
        let (d, slots) = (row_elements(config), u64::from(page_size));
        let (head_stride, slot_stride) = match config.slot_major {
            true => (d, d * config.kv_heads as u64),
            false => (d * slots, d),
        };
        let kv_stride = d * slots * config.kv_heads as u64;
        let layer_stride = 2 * kv_stride;
        let page_stride = LAYERS as u64 * layer_stride;
        let facts = KvFacts {
            num_layers: LAYERS as u32,
            num_kv_heads: config.kv_heads as u32,
            num_qo_heads: config.heads as u32,
            head_dim: config.head_dim as u32,
            page_size,
            num_pages,
            max_seq_len: 1 << 20,
            dtype: config.dtype,
            page_stride,
            layer_stride,
            kv_stride,
            head_stride,
            slot_stride,
        };
        let element = match config.dtype {
            DType::F16 => PoolType::F16,
            DType::BF16 => PoolType::BF16,
            DType::I8 => PoolType::I8,
            DType::F8E4M3 => PoolType::E4M3,
            _ => PoolType::F32,
        };
        let elements = (u64::from(num_pages) * page_stride) as usize;
        let pool = SharedPool::new(elements, element).unwrap();
        let view = pool.view();
        let writer = view.writer();
        for row in (0..elements).step_by(row_elements(config) as usize) {
            writer.store(row, &vec![f32::NAN; config.head_dim]).unwrap();
        }
        // Page 0 is the sink; the others are dealt from the last one down, stream by stream in turn.
        let mut pages = vec![Vec::new(); streams.len()];
        let mut next = num_pages - 1;
        for i in 0.. {
            let mut dealt = false;
            for (s, stream) in streams.iter().enumerate() {
                if i < stream.len().div_ceil(page_size) {
                    let page = if stream.request.is_padding() { 0 } else { next };
                    next -= u32::from(page != 0);
                    pages[s].push(page);
                    dealt = true;
                }
            }
            if !dealt {
                break;
            }
        }
        for (s, stream) in streams.iter().enumerate().filter(|s| !s.1.request.is_padding()) {
            for position in 0..stream.len() {
                let page = u64::from(pages[s][(position / page_size) as usize]);
                let slot = u64::from(position % page_size);
                for (half, kind) in [(0, K), (1, V)] {
                    let x = cached(config, stream, kind, position);
                    for (h, x) in x.chunks(config.head_dim).enumerate() {
                        // Only the last layer is written: reading another one gives NaN.
                        let at = page * page_stride
                            + (LAYERS as u64 - 1) * layer_stride
                            + half * kv_stride
                            + slot * slot_stride
                            + h as u64 * head_stride;
                        writer.store(at as usize, x).unwrap();
                    }
                }
            }
        }
        drop(writer);
        Self { pool, facts, streams: streams.to_vec(), pages, plans: PlanSlots::new() }
    }

    /// Makes a stream's first page one that the pool does not have.
    pub fn break_page(&mut self, stream: usize) {
        self.pages[stream][0] = self.facts.num_pages;
    }

    /// Writes NaN over one key and value.
    pub fn spoil(&self, stream: usize, position: u32) {
        let page = u64::from(self.pages[stream][(position / self.facts.page_size) as usize]);
        let f = &self.facts;
        for half in 0..2 {
            for head in 0..u64::from(f.num_kv_heads) {
                let at = page * f.page_stride
                    + (LAYERS as u64 - 1) * f.layer_stride
                    + half * f.kv_stride
                    + u64::from(position % f.page_size) * f.slot_stride
                    + head * f.head_stride;
                let nan = vec![f32::NAN; f.head_dim as usize];
                self.pool.view().writer().store(at as usize, &nan).unwrap();
            }
        }
    }
}

impl Resource for FakeCache {
    fn describe(&self) -> Vec<TypedRef<'_>> {
        vec![TypedRef::new(&self.facts)]
    }

    fn plan(&self, _step: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<Plan> {
        self.plans.plan(ctx, |plan| {
            *plan = KvPlan::default();
            plan.table_stride = self.pages.iter().map(|p| p.len() as u32).max().unwrap_or(0) + 2;
            let table = self.streams.len() * plan.table_stride as usize;
            plan.table.resize(table, u32::MAX);
            for (s, pages) in self.pages.iter().enumerate() {
                let first = s * plan.table_stride as usize;
                plan.table.as_mut_slice()[first..][..pages.len()].copy_from_slice(pages);
            }
            let mut labels: Vec<LabelId> = Vec::new();
            for stream in &self.streams {
                if !labels.contains(&stream.label) {
                    labels.push(stream.label);
                }
            }
            let mut first_token = 0;
            for label in labels {
                let first_row = plan.request.len() as u32;
                let mut token = 0;
                for (s, stream) in self.streams.iter().enumerate().filter(|s| s.1.label == label) {
                    plan.request.push(stream.request);
                    plan.seat.push(s as u32);
                    plan.start.push(stream.start);
                    plan.span.push(stream.span);
                    plan.len.push(stream.len());
                    plan.token_start.push(token);
                    token += stream.span;
                }
                let num_rows = plan.request.len() as u32 - first_row;
                let num_tokens = token;
                plan.groups.push(KvGroup { label, first_row, num_rows, first_token, num_tokens });
                first_token += num_tokens;
            }
            Ok(())
        })
    }
}

impl KvCache for FakeCache {
    fn write_kv(
        &self,
        _: &StepContext<'_>,
        _: u32,
        _: LabelId,
        _: &TensorView<'_>,
        _: &TensorView<'_>,
    ) -> Result<()> {
        Err(ResourceError::unsupported("contents are made up"))
    }

    fn read_kv(
        &self,
        _: &StepContext<'_>,
        _: u32,
        _: LabelId,
        _: &mut TensorViewMut<'_>,
        _: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        Err(ResourceError::unsupported("contents are made up"))
    }

    fn layer_view(&self, layer: u32) -> Result<KvLayer<'_>> {
        let f = &self.facts;
        if layer >= f.num_layers {
            return Err(ResourceError::invalid(format!("no layer {layer}")));
        }
        let row = f.slot_stride.min(f.head_stride) as u32;
        let shape = [f.num_pages, f.page_size, f.num_kv_heads, row].map(|n| n as usize);
        let strides = [f.page_stride, f.slot_stride, f.head_stride, 1].map(|n| n as usize);
        let half = |i: u64| {
            let start = u64::from(layer) * f.layer_stride + i * f.kv_stride;
            let view = self.pool.tensor(start as usize, &shape, &strides);
            view.map_err(|e| ResourceError::internal(e.to_string()))
        };
        Ok(KvLayer { k: half(0)?, v: half(1)? })
    }

    fn stream_len(&self, _: RequestId, _: LabelId) -> Result<u32> {
        Err(ResourceError::unsupported("lengths are in the plan"))
    }

    fn has_room(&self, _: RequestId, _: LabelId, _: u32) -> Result<bool> {
        Ok(true)
    }

    fn free_pages(&self) -> u64 {
        0
    }
}

/// A host with several threads.
struct ThreadedHost {
    threads: u32,
    /// Without one, each call starts its threads: tasks meet in any order.
    pool: Option<Pool>,
    plain: PlainHost,
}

pub fn host(threads: u32) -> HostServicesHandle {
    host_with(threads, None)
}

/// A host that keeps its threads, as an engine does.
pub fn pool_host(threads: u32) -> HostServicesHandle {
    host_with(threads, Some(Pool::new(threads as usize)))
}

fn host_with(threads: u32, pool: Option<Pool>) -> HostServicesHandle {
    let host = ThreadedHost { threads, pool, plain: PlainHost::default() };
    assert_eq!((host.label_id("main"), host.label_id("context")), (LabelId::MAIN, CONTEXT));
    HostServicesHandle::new(Arc::new(host))
}

impl HostServices for ThreadedHost {
    fn threads(&self) -> u32 {
        self.threads
    }
    fn parallel_for(&self, tasks: u32, body: ParallelBody) {
        if let Some(pool) = &self.pool {
            return pool.run(tasks as usize, &|task| body.call(task as u32));
        }
        std::thread::scope(|s| {
            for task in 1..tasks {
                s.spawn(move || body.call(task));
            }
            if tasks > 0 {
                body.call(0);
            }
        });
    }
    fn log(&self, level: u32, target: &str, message: &str) {
        self.plain.log(level, target, message);
    }
    fn count(&self, _: &str, _: &str, _: u64) {}
    fn gauge(&self, _: &str, _: &str, _: f64) {}
    fn now_nanos(&self) -> u64 {
        self.plain.now_nanos()
    }
    fn label_name(&self, label: LabelId) -> String {
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
        self.plain.completed_epoch()
    }
    fn reserve_memory(&self, _: Device, _: u64) -> Result<()> {
        Ok(())
    }
    fn release_memory(&self, _: Device, _: u64) {}
    fn free_memory(&self, device: Device) -> u64 {
        self.plain.free_memory(device)
    }
    fn spawn(&self, name: &str, job: Job) -> Result<()> {
        self.plain.spawn(name, job)
    }
}

pub fn spec(key: &str, kind: &str, settings: String) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: key.into(),
        kind: kind.into(),
        nodes: Default::default(),
        settings,
    }
}

/// Settings of the resource under test.
pub fn settings(config: &Config) -> String {
    let mut settings = serde_json::Map::new();
    settings.insert("kv_cache".into(), "kv".into());
    if let Some(scale) = config.scale {
        settings.insert("sm_scale".into(), scale.into());
    }
    if let Some(window) = config.window.and_then(NonZeroU32::new) {
        settings.insert("sliding_window".into(), window.get().into());
    }
    if let Some(layer) = config.full_layer {
        settings.insert("full_layers".into(), vec![layer].into());
    }
    if let Some(cap) = config.softcap {
        settings.insert("logit_softcap".into(), cap.into());
    }
    serde_json::Value::Object(settings).to_string()
}

/// What a resource on this cache is built from.
pub fn info(cache: &Arc<FakeCache>, threads: u32) -> EngineResourceInfo {
    let built = BuiltResource {
        resource: ResourceHandle::new(cache.clone()),
        capabilities: vec![KvCacheHandle::new(cache.clone()).into()],
    };
    let mut info = EngineResourceInfo::new(Device::CPU, host(threads));
    info.index = 1;
    let dependency = built.as_dependency(spec("kv", "kv", String::new()), 0);
    info.dependencies = BTreeMap::from([("kv".to_string(), dependency)]);
    info
}

pub fn head(slot: u32, is_preplan: bool) -> StepHead {
    StepHead {
        step: StepId(1),
        epoch: 1,
        node: NodeId(0),
        graph_walk: WalkId(0),
        lease: SlotLease::eager(slot, 1),
        stream: 0,
        capture: false,
        is_preplan,
    }
}

/// Plans `streams` and calls `forward` with the step's context, where plans are filed.
pub fn with_step<R>(
    causal: Option<bool>,
    cache: &FakeCache,
    resource: &ResourceHandle,
    streams: &[Stream],
    forward: impl FnOnce(&StepContext<'_>) -> R,
) -> Result<R> {
    let request: Vec<_> = streams.iter().map(|s| s.request).collect();
    let label: Vec<_> = streams.iter().map(|s| s.label).collect();
    let span: Vec<_> = streams.iter().map(|s| s.span).collect();
    let options = causal.map(|causal| AttentionStepOptions { causal });
    let mut step = ResourceStep::new(Segments { request: &request, label: &label, span: &span });
    let ctx = StepContext::new(head(0, false), &request, &request, &[]);
    let mut results = [TypedRef::NONE, TypedRef::NONE];
    results[0] = cache.plan(&step, &ctx)?.into_result();
    if let Some(options) = &options {
        step = step.with_options(TypedRef::new(options));
    }
    let ctx = StepContext::new(head(0, false), &request, &request, &results);
    assert!(resource.admit(&step, &ctx)?.is_ready());
    let planned = resource.plan(&step, &ctx)?.into_result();
    let results = [results[0], planned];
    let ctx = StepContext::new(head(0, false), &request, &request, &results);
    Ok(forward(&ctx))
}

/// Queries of the streams of `label`, packed.
pub fn queries(config: &Config, streams: &[Stream], label: LabelId) -> Vec<f32> {
    let of_label = streams.iter().filter(|s| s.label == label);
    of_label.flat_map(|s| (s.start..s.len()).flat_map(|p| query(config, s, p))).collect()
}

/// Runs one step of kind `attention` and gives each stream's outputs, token after token.
pub fn attend(config: &Config, streams: &[Stream]) -> Vec<Vec<f32>> {
    let cache = Arc::new(FakeCache::new(config, streams));
    attend_on(config, &cache, streams)
}

/// As [`attend`], on a cache made before.
pub fn attend_on(config: &Config, cache: &Arc<FakeCache>, streams: &[Stream]) -> Vec<Vec<f32>> {
    let spec = spec("attn", "attention", settings(config));
    let built =
        build_resource::<resource_attn::PagedAttention>(&spec, &info(cache, config.threads));
    let built = built.unwrap();
    let attention: AttentionHandle = built.capabilities[0].open().unwrap();
    let mut labels: Vec<LabelId> = streams.iter().map(|s| s.label).collect();
    labels.sort();
    labels.dedup();
    let width = config.heads * config.head_dim;
    let mut outputs = vec![Vec::new(); streams.len()];
    with_step(Some(config.causal), cache, &built.resource, streams, |ctx| {
        for label in labels {
            let q = queries(config, streams, label);
            let shape = [q.len() / width, config.heads, config.head_dim];
            let mut out = vec![f32::NAN; q.len()];
            let q = TensorView::from_slice(&q, &shape);
            let mut view = TensorViewMut::from_slice(&mut out, &shape);
            attention.run(ctx, LAYERS as u32 - 1, label, &q, &mut view).unwrap();
            let mut rest = &out[..];
            for (s, stream) in streams.iter().enumerate().filter(|s| s.1.label == label) {
                let (own, others) = rest.split_at(stream.span as usize * width);
                outputs[s] = own.to_vec();
                rest = others;
            }
        }
    })
    .unwrap();
    outputs
}

/// Compares a stream's outputs with the reference.
pub fn check(config: &Config, stream: &Stream, outputs: &[f32]) {
    let width = config.heads * config.head_dim;
    assert_eq!(outputs.len(), stream.span as usize * width, "{stream:?}");
    for (out, position) in outputs.chunks(width).zip(stream.start..) {
        if stream.request.is_padding() {
            assert!(out.iter().all(|&x| x == 0.0), "padding is not 0: {config:?}");
            continue;
        }
        let q = query(config, stream, position);
        let want = reference(config, &q, stream, position, stream.len());
        for (i, (&got, want)) in out.iter().zip(want).enumerate() {
            assert!(
                (f64::from(got) - want).abs() < 2e-5,
                "{got} is not {want} at position {position}, element {i} of {stream:?}; {config:?}"
            );
        }
    }
}
