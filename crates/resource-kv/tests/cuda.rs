//! A cache, attention, cross-attention and positions on a CUDA device do what they do on the CPU.
//! `cargo xtask device-test` runs what needs a device.

use std::sync::Arc;

use device::cuda::{Context, DeviceBuffer, Graph, Stream, read_column};
use resource_api::host::PlainHost;
use resource_api::{
    Attention, AttentionHandle, BuiltResource, CrossAttention, CrossAttentionHandle, Device,
    DeviceColumn, EngineResourceInfo, Fork, HeadTurn, HostServices, KvCache, KvCacheHandle, KvPlan,
    KvStepOptions, LabelId, NodeId, NodeResourceSpec, Positions, PositionsHandle, PositionsPlan,
    RequestId, RequestOverrides, Resource, ResourceHandle, ResourceStep, Result, Segments,
    SlotLease, StepContext, StepHead, StepId, TensorView, TensorViewMut, TransferEngineInfo,
    TypedRef, WalkId, build_resource,
};
use resource_attn::{PagedAttention, PagedCrossAttention};
use resource_kv::Kv;

const LAYERS: u32 = 2;
const HEADS: usize = 2;
const QUERY_HEADS: usize = 8;
const DIM: usize = 64;
const HIDDEN: usize = 32;
const MAIN: LabelId = LabelId::MAIN;

fn spec(key: &str, kind: &str, settings: &str) -> NodeResourceSpec {
    let (resource_key, kind) = (key.into(), kind.into());
    NodeResourceSpec { resource_key, kind, nodes: Default::default(), settings: settings.into() }
}

fn kv_spec(more: &str) -> NodeResourceSpec {
    let settings = format!(
        r#"{{"num_layers": {LAYERS}, "num_kv_heads": {HEADS}, "num_qo_heads": {QUERY_HEADS},
            "head_dim": {DIM}, "page_size": 16, "pages": 40, "max_seq_len": 300{more}}}"#
    );
    spec("main_kv", "kv", &settings)
}

#[test]
fn a_machine_without_a_driver_says_so_in_one_line() {
    if Context::of(0).is_ok() {
        return;
    }
    let info = EngineResourceInfo::new(Device::cuda(0), PlainHost::handle());
    let error = build_resource::<Kv>(&kv_spec(""), &info).unwrap_err().to_string();
    assert!(error.contains("[resources.main_kv]") && error.contains("libcuda.so.1"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

/// The resources of one engine.
struct Engine {
    all: Vec<ResourceHandle>,
    kv: KvCacheHandle,
    attention: AttentionHandle,
    positions: PositionsHandle,
    cross: CrossAttentionHandle,
    context_label: LabelId,
    device: Option<(Arc<Context>, Stream)>,
}

/// Numbers that look random, the same for the same seed.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// What a step computes for one label and layer.
#[derive(Debug, PartialEq)]
struct Outcome {
    rotated: [Vec<f32>; 2],
    stored: [Vec<f32>; 2],
    attended: Vec<f32>,
    crossed: Vec<f32>,
    last: Vec<f32>,
}

/// A step: (request, label, tokens), labels as 0 for `main`, 1 for a branch and 2 for the context.
struct Step {
    id: u64,
    slot: u32,
    rows: Vec<(u32, u32, u32)>,
    options: KvStepOptions,
}

impl Step {
    fn new(id: u64, slot: u32, rows: &[(u32, u32, u32)]) -> Self {
        Self { id, slot, rows: rows.to_vec(), options: KvStepOptions::default() }
    }

    fn has_context(&self) -> bool {
        self.rows.iter().any(|r| r.1 == 2 && r.2 == 0)
    }
}

impl Engine {
    fn new(device: Option<(Arc<Context>, Stream)>, more: &str) -> Result<Self> {
        let place = device.as_ref().map_or(Device::CPU, |(context, _)| context.device());
        let host = PlainHost::handle();
        // So that `context` is label 2 in both engines.
        for name in ["main", "branch", "context"] {
            host.label_id(name);
        }
        let context_label = host.label_id("context");
        let mut info = EngineResourceInfo::new(place, host);
        let (engine, endpoint) = ("in-process".to_owned(), String::new());
        info.transfer_engine_info = Some(TransferEngineInfo { engine, endpoint });
        let kv = build_resource::<Kv>(&kv_spec(more), &info)?;
        info.dependencies.insert("main_kv".into(), kv.as_dependency(kv_spec(more), 0));
        let settings = r#"{"kv_cache": "main_kv"}"#;
        let mut built = vec![kv];
        let mut add = |one: BuiltResource| built.push(one);
        info.index = 1;
        add(build_resource::<PagedAttention>(&spec("attn", "attention", settings), &info)?);
        info.index = 2;
        let positions = spec("pos", "positions", settings);
        add(build_resource::<resource_positions::Positions>(&positions, &info)?);
        info.index = 3;
        let settings = r#"{"kv_cache": "main_kv", "query_kv_cache": "main_kv"}"#;
        let cross = spec("cross", "cross_attention", settings);
        add(build_resource::<PagedCrossAttention>(&cross, &info)?);
        Ok(Self {
            kv: built[0].capabilities[0].open()?,
            attention: built[1].capabilities[0].open()?,
            positions: built[2].capabilities[0].open()?,
            cross: built[3].capabilities[0].open()?,
            all: built.into_iter().map(|b| b.resource).collect(),
            context_label,
            device,
        })
    }

    fn ingest(&self, slot: u32) {
        for resource in &self.all {
            let overrides = RequestOverrides::new("", &[1], 1);
            resource.ingest_request(RequestId::new(slot, 1), &overrides).unwrap();
        }
    }

    fn label(&self, label: u32) -> LabelId {
        if label == 2 { self.context_label } else { LabelId(label) }
    }

    /// A whole step; what it computes for each label that has tokens, in each layer.
    fn step(&self, step: &Step) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        self.planned(step, |ctx| {
            self.check_device_plan(ctx);
            let plan: &KvPlan = ctx.plan_result(0).unwrap();
            for group in plan.groups.iter().filter(|g| g.num_tokens > 0) {
                let crosses = step.has_context() && group.label != self.context_label;
                for layer in 0..LAYERS {
                    outcomes.push(self.forward(ctx, step.id, layer, group.label, crosses));
                }
            }
        });
        outcomes
    }

    /// Admits and plans a step, calls `forward`, and commits.
    fn planned(&self, step: &Step, forward: impl FnOnce(&StepContext<'_>)) {
        let request: Vec<_> = step.rows.iter().map(|r| RequestId::new(r.0, 1)).collect();
        let label: Vec<_> = step.rows.iter().map(|r| self.label(r.1)).collect();
        let span: Vec<_> = step.rows.iter().map(|r| r.2).collect();
        let segments = Segments { request: &request, label: &label, span: &span };
        let plain = ResourceStep::new(segments);
        let for_kv = ResourceStep::new(segments).with_options(TypedRef::new(&step.options));
        let head = StepHead {
            step: StepId(step.id),
            epoch: step.id,
            node: NodeId(0),
            graph_walk: WalkId(0),
            lease: SlotLease::eager(step.slot, step.id as u32),
            capture: false,
            is_preplan: false,
            stream: self.device.as_ref().map_or(0, |(_, stream)| stream.handle()),
        };
        // Cross-attention takes part in steps with a context.
        let taking_part = if step.has_context() { 4 } else { 3 };
        let of = |i: usize| if i == 0 { &for_kv } else { &plain };
        let mut results: Vec<TypedRef<'_>> = Vec::new();
        for (i, resource) in self.all.iter().enumerate().take(taking_part) {
            let ctx = StepContext::new(head, &request, &request, &results);
            assert!(resource.admit(of(i), &ctx).unwrap().is_ready());
        }
        for (i, resource) in self.all.iter().enumerate().take(taking_part) {
            let plan = resource
                .plan(of(i), &StepContext::new(head, &request, &request, &results))
                .unwrap();
            results.push(plan.into_result());
        }
        let ctx = StepContext::new(head, &request, &request, &results);
        forward(&ctx);
        for (i, resource) in self.all.iter().enumerate().take(taking_part) {
            resource.commit(of(i), &ctx).unwrap();
        }
        self.kv.assert_pages_conserved().unwrap();
    }

    fn forward(
        &self,
        ctx: &StepContext<'_>,
        seed: u64,
        layer: u32,
        label: LabelId,
        crosses: bool,
    ) -> Outcome {
        let plan: &KvPlan = ctx.plan_result(0).unwrap();
        let group = *plan.group(label).unwrap();
        let (tokens, rows) = (group.num_tokens as usize, group.num_rows as usize);
        let seed = seed * 100 + u64::from(layer) * 10 + u64::from(label.0);
        let shape = |heads: usize| [tokens, heads, DIM];
        let random = |salt: u64, n: usize| Place::new(&self.device, &numbers(seed * 7 + salt, n));
        let mut q = random(1, tokens * QUERY_HEADS * DIM);
        let mut k = random(2, tokens * HEADS * DIM);
        let v = random(3, tokens * HEADS * DIM);
        let hidden = random(4, tokens * HIDDEN);
        let mut out = random(5, tokens * QUERY_HEADS * DIM);
        let mut crossed = Place::new(&self.device, &vec![0.0; tokens * QUERY_HEADS * DIM]);
        let mut last = Place::new(&self.device, &vec![0.0; rows * HIDDEN]);
        let (q_shape, k_shape) = (shape(QUERY_HEADS), shape(HEADS));
        // On a device, in every other layer, in one pass with the writing.
        let turning = self.positions.turning(ctx, layer, label).unwrap();
        assert_eq!(turning.is_some(), self.device.is_some());
        let turning = turning.filter(|_| layer % 2 == 1);
        let mut separate = random(1, tokens * QUERY_HEADS * DIM);
        if let Some(turning) = turning {
            let (q_norm, k_norm) = (DeviceColumn::EMPTY, DeviceColumn::EMPTY);
            let how = HeadTurn { turning, q_norm, k_norm, eps: 0.0 };
            let (q, k) = (&mut q.view_mut(&q_shape), k.view(&k_shape));
            let written = self.kv.write_turned(ctx, layer, label, q, &k, &v.view(&k_shape), &how);
            assert!(written.unwrap(), "the pool takes these tensors");
        }
        let in_place = if turning.is_some() { &mut separate } else { &mut q };
        let (turned, k_view) = (&mut in_place.view_mut(&q_shape), &mut k.view_mut(&k_shape));
        self.positions.apply_qk_layer(ctx, layer, label, turned, k_view).unwrap();
        if turning.is_none() {
            self.kv.write_kv(ctx, layer, label, &k.view(&k_shape), &v.view(&k_shape)).unwrap();
        }
        let mut stored = [vec![0.0; tokens * HEADS * DIM], vec![0.0; tokens * HEADS * DIM]];
        let [stored_k, stored_v] = &mut stored;
        let mut k_view = TensorViewMut::from_slice(stored_k, &k_shape);
        let mut v_view = TensorViewMut::from_slice(stored_v, &k_shape);
        self.kv.read_kv(ctx, layer, label, &mut k_view, &mut v_view).unwrap();
        let out_view = &mut out.view_mut(&q_shape);
        self.attention.run(ctx, layer, label, &q.view(&q_shape), out_view).unwrap();
        if crosses {
            let out_view = &mut crossed.view_mut(&q_shape);
            self.cross.run(ctx, layer, label, &q.view(&q_shape), out_view).unwrap();
        }
        let (hidden_view, last_view) =
            (hidden.view(&[tokens, HIDDEN]), &mut last.view_mut(&[rows, HIDDEN]));
        self.attention.select_last_hidden(ctx, label, &hidden_view, last_view).unwrap();
        Outcome {
            rotated: [q.read(), k.read()],
            stored,
            attended: out.read(),
            crossed: crossed.read(),
            last: last.read(),
        }
    }

    /// What kernels would read is what the host's plan says.
    fn check_device_plan(&self, ctx: &StepContext<'_>) {
        let Some((context, _)) = &self.device else { return };
        let read = |column| read_column(context, column).unwrap();
        let plan: &KvPlan = ctx.plan_result(0).unwrap();
        let there = &plan.device;
        assert_eq!(read(there.seat), *plan.seat);
        assert_eq!(read(there.start), *plan.start);
        assert_eq!(read(there.span), *plan.span);
        assert_eq!(read(there.len), *plan.len);
        assert_eq!(read(there.token_start), *plan.token_start);
        assert_eq!(read(there.write_page), *plan.write_page);
        assert_eq!(read(there.write_slot), *plan.write_slot);
        let table = read(there.table);
        for row in 0..plan.request.len() {
            let first = (plan.seat[row] * plan.table_stride) as usize;
            let pages = plan.pages(row, 16);
            assert_eq!(table[first..first + pages.len()], *pages, "row {row}");
        }
        let positions: &PositionsPlan = ctx.plan_result(2).unwrap();
        assert_eq!(read(positions.device), *positions.pos_ids);
    }
}

/// Numbers on the engine's device.
enum Place {
    Host(Vec<f32>),
    Device(DeviceBuffer<f32>),
}

impl Place {
    fn new(device: &Option<(Arc<Context>, Stream)>, values: &[f32]) -> Self {
        match device {
            None => Self::Host(values.to_vec()),
            Some((context, _)) => Self::Device(DeviceBuffer::from_slice(context, values).unwrap()),
        }
    }

    fn view(&self, shape: &[usize]) -> TensorView<'_> {
        match self {
            Self::Host(values) => TensorView::from_slice(values, shape),
            Self::Device(buffer) => buffer.view(shape).unwrap(),
        }
    }

    fn view_mut(&mut self, shape: &[usize]) -> TensorViewMut<'_> {
        match self {
            Self::Host(values) => TensorViewMut::from_slice(values, shape),
            Self::Device(buffer) => buffer.view_mut(shape).unwrap(),
        }
    }

    fn read(&self) -> Vec<f32> {
        match self {
            Self::Host(values) => values.clone(),
            Self::Device(buffer) => buffer.to_vec().unwrap(),
        }
    }
}

fn assert_near(what: &str, got: &[f32], want: &[f32], relative: f32, absolute: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let near = (got - want).abs() <= want.abs() * relative + absolute;
        assert!(near, "{what}, element {i}: {got} for {want}");
    }
}

/// Runs the steps on both, with this element type, and compares them: what is stored within `stored`, a part of
/// it and an absolute, and what is attended to within `near`.
fn compare(dtype: &str, stored: (f32, f32), near: f32) {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let more = format!(r#", "dtype": "{dtype}""#);
    let cpu = Engine::new(None, &more).unwrap();
    let cuda = Engine::new(Some((context, stream)), &more).unwrap();
    for engine in [&cpu, &cuda] {
        (0..3).for_each(|slot| engine.ingest(slot));
    }
    let mut steps = vec![
        Step::new(1, 0, &[(0, 0, 40), (1, 0, 7)]),
        Step::new(2, 1, &[(0, 0, 1), (1, 0, 20), (2, 0, 3)]),
        Step::new(3, 0, &[(0, 0, 1), (1, 0, 1), (2, 0, 1)]),
        Step::new(4, 1, &[(0, 2, 21), (2, 2, 1)]),
        Step::new(5, 1, &[(0, 0, 1), (2, 0, 5), (0, 2, 0), (2, 2, 0)]),
        Step::new(6, 0, &[(0, 1, 2), (1, 0, 1)]),
    ];
    // A branch of request 0 from its main stream, which is copied before the step.
    let fork = Fork { request_id: RequestId::new(0, 1), from: MAIN, to: LabelId(1) };
    steps[5].options.pre_forks.push(fork);
    // Over the ends of pages, in turns of slots.
    steps.extend(
        (7..40).map(|id| Step::new(id, (id % 3) as u32, &[(0, 0, 1), (1, 0, 1), (2, 0, 1)])),
    );
    for step in &steps {
        let (want, got) = (cpu.step(step), cuda.step(step));
        assert_eq!(want.len(), got.len());
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            let named = |what: &str| format!("{what} of step {}, {i}", step.id);
            for which in 0..2 {
                let (got, want) = (&got.rotated[which], &want.rotated[which]);
                assert_near(&named("rotated"), got, want, 0.0, 1e-6);
            }
            for which in 0..2 {
                let (got, want) = (&got.stored[which], &want.stored[which]);
                assert_near(&named("stored"), got, want, stored.0, 1e-6 + stored.1);
            }
            assert_near(&named("attention"), &got.attended, &want.attended, 2.0 * near, near);
            assert_near(&named("cross-attention"), &got.crossed, &want.crossed, 2.0 * near, near);
            assert_eq!(got.last, want.last, "{}", named("last hidden"));
        }
    }
}

/// After every step all requests leave the device, another one writes all over what they left, and they
/// come back: steps compute what they do where nobody leaves.
fn compare_with_journeys(tier: &str) {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let cpu = Engine::new(None, r#", "dtype": "f32""#).unwrap();
    let cuda = Engine::new(Some((context, stream)), &format!(r#", "dtype": "f32"{tier}"#)).unwrap();
    let requests = [0, 1, 2];
    for engine in [&cpu, &cuda] {
        requests.iter().for_each(|&slot| engine.ingest(slot));
    }
    let (kv, scribbler) = (&cuda.all[0], 9);
    for id in 1..30 {
        let spans = if id == 1 { [40, 7, 60] } else { [1, 1 + id as u32 % 3, 1] };
        let step =
            Step::new(2 * id, (id % 2) as u32, &[0, 1, 2].map(|r| (r, 0, spans[r as usize])));
        let (want, got) = (cpu.step(&step), cuda.step(&step));
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            let named = |what: &str| format!("{what} of step {id}, {i}");
            assert_near(&named("stored"), &got.stored[0], &want.stored[0], 1e-6, 1e-6);
            assert_near(&named("attention"), &got.attended, &want.attended, 6e-5, 3e-5);
        }
        let freed: u64 = requests.iter().map(|&r| kv.offload(RequestId::new(r, 1)).unwrap()).sum();
        assert!(freed >= 8, "{freed} pages");
        cuda.kv.assert_pages_conserved().unwrap();
        cuda.ingest(scribbler);
        cuda.step(&Step::new(2 * id + 1, 2, &[(scribbler, 0, 290)]));
        cuda.step(&Step::new(2 * id + 1, 2, &[(scribbler, 0, 10)]));
        for resource in &cuda.all {
            resource.remove_request(RequestId::new(scribbler, 1)).unwrap();
        }
        for r in requests {
            assert!(kv.is_offloaded(RequestId::new(r, 1)).unwrap());
            assert!(kv.reload(RequestId::new(r, 1)).unwrap());
        }
        cuda.kv.assert_pages_conserved().unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn requests_leave_the_device_for_host_memory_and_come_back_as_they_were() {
    compare_with_journeys(r#", "host_pages": 20"#);
}

#[test]
#[ignore = "needs a GPU"]
fn requests_leave_the_device_for_a_file_and_come_back_as_they_were() {
    let file = std::env::temp_dir().join(format!("engine-host-tier.{}", std::process::id()));
    compare_with_journeys(&format!(r#", "disk_file": {file:?}, "disk_size": "4MiB""#));
    std::fs::remove_file(file).unwrap();
}

/// Has `to` take in what `from` publishes of request 0.
fn hand_over(from: &Engine, to: &Engine) {
    let rid = RequestId::new(0, 1);
    for (from, to) in from.all.iter().zip(&to.all) {
        let Some(info) = from.publish(rid).unwrap() else { continue };
        let mut tries = 0;
        let ask = || to.admit_retrieve(rid, NodeId(0), WalkId(0), Some(&info)).unwrap();
        while !ask().is_ready() {
            tries += 1;
            assert!(tries < 10_000, "it never arrives");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Pages of eight bits mean the same on both: what one has begun the other goes on with.
#[test]
#[ignore = "needs a GPU"]
fn a_request_of_eight_bits_goes_on_on_another_device() {
    let context = Context::of(0).unwrap();
    for dtype in ["fp8", "i8"] {
        for from_device in [false, true] {
            let more = format!(r#", "dtype": "{dtype}""#);
            let on =
                |device: bool| device.then(|| (context.clone(), Stream::new(&context).unwrap()));
            let [alone, from, to] = [false, from_device, !from_device]
                .map(|device| Engine::new(on(device), &more).unwrap());
            [&alone, &from, &to].iter().for_each(|engine| engine.ingest(0));
            let begun = Step::new(1, 0, &[(0, 0, 43)]);
            alone.step(&begun);
            from.step(&begun);
            hand_over(&from, &to);
            for id in 2..20 {
                let step = Step::new(id, (id % 2) as u32, &[(0, 0, 1)]);
                for (want, got) in alone.step(&step).iter().zip(&to.step(&step)) {
                    assert_near(dtype, &got.attended, &want.attended, 0.04, 0.02);
                }
            }
        }
    }
}

/// A request goes on where another engine left it, on the same device.
#[test]
#[ignore = "needs a GPU"]
fn a_request_that_is_handed_over_goes_on_as_if_it_had_not_been() {
    let context = Context::of(0).unwrap();
    let on_device = || Some((context.clone(), Stream::new(&context).unwrap()));
    let more = r#", "dtype": "f32""#;
    let [cpu, one, other] =
        [None, on_device(), on_device()].map(|device| Engine::new(device, more).unwrap());
    [&cpu, &one, &other].iter().for_each(|engine| engine.ingest(0));
    let begun = Step::new(1, 0, &[(0, 0, 43)]);
    cpu.step(&begun);
    one.step(&begun);
    hand_over(&one, &other);
    for id in 2..20 {
        let step = Step::new(id, (id % 2) as u32, &[(0, 0, 1)]);
        for (want, got) in cpu.step(&step).iter().zip(&other.step(&step)) {
            assert_near("rotated", &got.rotated[1], &want.rotated[1], 0.0, 1e-6);
            assert_near("attention", &got.attended, &want.attended, 6e-5, 3e-5);
        }
    }
}

/// A decode step is captured once, with one slot, and replayed for later steps of that slot: what it reads
/// are the columns and tables that each step's plan wrote there.
#[test]
#[ignore = "needs a GPU"]
fn a_captured_step_reads_the_plan_of_each_later_step_of_its_slot() {
    let context = Context::of(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let more = r#", "dtype": "bf16""#;
    let (cpu, cuda) =
        (Engine::new(None, more).unwrap(), Engine::new(Some((context, stream)), more).unwrap());
    for engine in [&cpu, &cuda] {
        (0..3).for_each(|slot| engine.ingest(slot));
        engine.step(&Step::new(1, 1, &[(0, 0, 40), (1, 0, 7), (2, 0, 15)]));
    }
    let (context, stream) = cuda.device.as_ref().unwrap();
    let shape = |heads: usize| [3, heads, DIM];
    let (q_shape, k_shape) = (shape(QUERY_HEADS), shape(HEADS));
    let empty = |heads| DeviceBuffer::<f32>::zeroed(context, 3 * heads * DIM).unwrap();
    let (mut q, mut k, mut v, mut out) =
        (empty(QUERY_HEADS), empty(HEADS), empty(HEADS), empty(QUERY_HEADS));
    let mut graph = None;
    for id in 2..40 {
        let step = Step::new(id, 0, &[(0, 0, 1), (1, 0, 1), (2, 0, 1)]);
        let values = |salt: u64, heads: usize| numbers(id * 7 + salt, 3 * heads * DIM);
        let (q_now, k_now, v_now) = (values(1, QUERY_HEADS), values(2, HEADS), values(3, HEADS));
        q.copy_from_slice(&q_now).unwrap();
        k.copy_from_slice(&k_now).unwrap();
        v.copy_from_slice(&v_now).unwrap();
        let forward = |engine: &Engine,
                       ctx: &StepContext<'_>,
                       q: &mut TensorViewMut<'_>,
                       k: &mut TensorViewMut<'_>,
                       v: &TensorView<'_>,
                       out: &mut TensorViewMut<'_>|
         -> Result<()> {
            engine.positions.apply_qk_layer(ctx, 1, MAIN, q, k)?;
            engine.kv.write_kv(ctx, 1, MAIN, &k.view(), v)?;
            engine.attention.run(ctx, 1, MAIN, &q.view(), out)
        };
        let mut want = vec![0.0; 3 * QUERY_HEADS * DIM];
        cpu.planned(&step, |ctx| {
            let (mut q, mut k, mut v) = (q_now.clone(), k_now.clone(), v_now.clone());
            let q = &mut TensorViewMut::from_slice(&mut q, &q_shape);
            let k = &mut TensorViewMut::from_slice(&mut k, &k_shape);
            let v = TensorViewMut::from_slice(&mut v, &k_shape);
            let out = &mut TensorViewMut::from_slice(&mut want, &q_shape);
            forward(&cpu, ctx, q, k, &v.view(), out).unwrap();
        });
        cuda.planned(&step, |ctx| {
            let graph = graph.get_or_insert_with(|| {
                Graph::capture(stream, || {
                    let (q, k) = (&mut q.view_mut(&q_shape)?, &mut k.view_mut(&k_shape)?);
                    let out = &mut out.view_mut(&q_shape)?;
                    forward(&cuda, ctx, q, k, &v.view(&k_shape)?, out)
                })
                .unwrap()
            });
            graph.replay(stream).unwrap();
        });
        let got = out.to_vec().unwrap();
        assert_near(&format!("attention of step {id}"), &got, &want, 0.02, 0.01);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn steps_compute_what_they_do_on_the_cpu() {
    compare("bf16", (1.0 / 128.0, 2e-4), 0.01);
    compare("f16", (1.0 / 1024.0, 2e-5), 0.01);
    compare("f32", (1e-6, 0.0), 3e-5);
}

/// Keys that are turned differ in their last bits, which decide between two neighbouring codes.
#[test]
#[ignore = "needs a GPU"]
fn steps_over_caches_of_eight_bits_compute_what_they_do_on_the_cpu() {
    compare("fp8", (1.0 / 8.0, 2e-3), 0.02);
    // One step of the largest row that there can be.
    compare("i8", (0.0, 1.5 / 127.0), 0.02);
}
