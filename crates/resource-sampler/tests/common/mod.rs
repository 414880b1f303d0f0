//! A sampler driven step by step, as a host would.

use device::cuda::{Context, DeviceBuffer, Stream};
use resource_api::host::PlainHost;
use resource_api::{
    BuiltResource, Device, EngineResourceInfo, HostServicesHandle, LabelId, LogitsProcessor,
    LogitsProcessorHandle, NodeId, NodeResourceSpec, Offered, RequestId, RequestOverrides,
    Resource as _, ResourceHandle, ResourceStep, Result, Sampled, Sampler as _, SamplerHandle,
    SamplerPlan, SamplerStepOptions, Segments, SlotLease, StepContext, StepHead, StepId,
    TensorViewMut, TypedRef, WalkId, build_resource,
};
use resource_sampler::Sampler;
use std::sync::Arc;

pub struct Engine {
    pub resource: ResourceHandle,
    pub api: SamplerHandle,
    next_step: std::cell::Cell<u64>,
    /// Where logits are copied to before they are sampled.
    device: Option<(Arc<Context>, Stream)>,
}

pub fn build(settings: &str, host: HostServicesHandle) -> Result<BuiltResource> {
    build_on(Device::CPU, settings, host)
}

pub fn build_on(device: Device, settings: &str, host: HostServicesHandle) -> Result<BuiltResource> {
    let spec = NodeResourceSpec {
        resource_key: "sampler".into(),
        kind: "sampler".into(),
        nodes: Default::default(),
        settings: settings.into(),
    };
    build_resource::<Sampler>(&spec, &EngineResourceInfo::new(device, host))
}

/// What a step feeds and says besides its logits.
#[derive(Default)]
pub struct Extra {
    pub slot: u32,
    /// Per request, tokens that its `main` stream is fed.
    pub tokens: Vec<Vec<u32>>,
    pub options: SamplerStepOptions,
}

impl Engine {
    pub fn new(vocab: usize) -> Self {
        Self::on(vocab, PlainHost::handle())
    }

    pub fn on(vocab: usize, host: HostServicesHandle) -> Self {
        Self::with(vocab, host, None)
    }

    /// On the first CUDA device.
    pub fn on_device(vocab: usize) -> Self {
        let context = Context::of(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        Self::with(vocab, PlainHost::handle(), Some((context, stream)))
    }

    fn with(
        vocab: usize,
        host: HostServicesHandle,
        device: Option<(Arc<Context>, Stream)>,
    ) -> Self {
        let settings = format!(r#"{{"vocab_size": {vocab}, "enable_min_p": true}}"#);
        let place = device.as_ref().map_or(Device::CPU, |(context, _)| context.device());
        let built = build_on(place, &settings, host).unwrap();
        let api = built.capabilities[0].open().unwrap();
        Self { resource: built.resource, api, next_step: Default::default(), device }
    }

    /// Has the sampler accept this processor alone.
    pub fn bind_all(&self, processors: impl IntoIterator<Item = impl LogitsProcessor + 'static>) {
        let offered = processors.into_iter().map(|processor| {
            let capability = LogitsProcessorHandle::new(Arc::new(processor)).into();
            Offered { key: "processor".into(), capability }
        });
        self.resource.bind(offered.collect()).unwrap();
    }

    fn head(&self, step: u64, slot: u32, is_preplan: bool) -> StepHead {
        let stream = self.device.as_ref().map_or(0, |(_, stream)| stream.handle());
        StepHead { stream, ..head(step, slot, is_preplan) }
    }

    pub fn ingest(&self, rid: RequestId, config: &str) {
        self.ingest_prompt(rid, config, &[]).unwrap();
    }

    pub fn ingest_prompt(&self, rid: RequestId, config: &str, prompt: &[u32]) -> Result<()> {
        self.resource.ingest_request(rid, &RequestOverrides::new(config, prompt, 10))
    }

    /// One whole step in which every request is sampled.
    pub fn step(&self, rids: &[RequestId], rows: &[&[f32]]) -> Vec<Sampled> {
        self.step_with(rids, rows, Extra::default())
    }

    pub fn step_with(&self, rids: &[RequestId], rows: &[&[f32]], extra: Extra) -> Vec<Sampled> {
        let tokens: Vec<u32> = extra.tokens.concat();
        let span: Vec<u32> = match extra.tokens.is_empty() {
            true => vec![0; rids.len()],
            false => extra.tokens.iter().map(|t| t.len() as u32).collect(),
        };
        let label = vec![LabelId::MAIN; rids.len()];
        let step = ResourceStep::new(Segments { request: rids, label: &label, span: &span })
            .with_token_ids(&tokens)
            .with_options(TypedRef::new(&extra.options));
        self.next_step.set(self.next_step.get() + 1);
        let head = self.head(self.next_step.get(), extra.slot, false);
        let ctx = StepContext::new(head, rids, rids, &[]);
        assert!(self.resource.admit(&step, &ctx).unwrap().is_ready());
        let results = [self.resource.plan(&step, &ctx).unwrap().into_result()];
        let ctx = StepContext::new(head, rids, rids, &results);
        let mut logits = rows.concat();
        let width = logits.len() / rids.len();
        let mut out = vec![Sampled::default(); rids.len()];
        let shape = [rids.len(), width];
        match &self.device {
            None => {
                let mut view = TensorViewMut::from_slice(&mut logits, &shape);
                self.api.sample(&ctx, rids, &mut view, &mut out).unwrap();
            }
            Some((context, _)) => {
                let mut there = DeviceBuffer::from_slice(context, &logits).unwrap();
                let view = &mut there.view_mut(&shape).unwrap();
                self.api.sample(&ctx, rids, view, &mut out).unwrap();
            }
        }
        self.resource.commit(&step, &ctx).unwrap();
        let good: Vec<_> = (0..rids.len()).filter(|&i| out[i].status == Sampled::OK).collect();
        let good_rids: Vec<_> = good.iter().map(|&i| rids[i]).collect();
        let ids: Vec<_> = good.iter().map(|&i| out[i].token).collect();
        self.resource.on_outputs(&ctx, &good_rids, &ids).unwrap();
        out
    }

    /// Steps over these rows, each of which begins before the one before it has been asked for.
    pub fn run_ahead(&self, rids: &[RequestId], steps: &[Vec<Vec<f32>>]) -> Vec<Vec<Sampled>> {
        let label = vec![LabelId::MAIN; rids.len()];
        let span = vec![0; rids.len()];
        let step = ResourceStep::new(Segments { request: rids, label: &label, span: &span });
        assert!(self.api.can_begin(rids));
        let mut all: Vec<Vec<Sampled>> = Vec::new();
        let mut before: Option<StepHead> = None;
        let land = |head: StepHead, tokens: &[u32]| {
            let mut out = vec![Sampled::default(); rids.len()];
            self.api.end_sample(head.step, &mut out).unwrap();
            let asked_twice = self.api.end_sample(head.step, &mut out.clone());
            assert!(asked_twice.is_err());
            let is_good = |i: &usize| out[*i].status == Sampled::OK;
            for (i, token) in tokens.iter().enumerate() {
                let want = if is_good(&i) { out[i].token } else { i32::MAX as u32 };
                assert_eq!(*token, want, "what work that follows reads");
            }
            let good: Vec<_> = (0..rids.len()).filter(is_good).collect();
            let good_rids: Vec<_> = good.iter().map(|&i| rids[i]).collect();
            let ids: Vec<_> = good.iter().map(|&i| out[i].token).collect();
            let ctx = StepContext::new(head, rids, rids, &[]);
            self.resource.on_outputs(&ctx, &good_rids, &ids).unwrap();
            out
        };
        let mut tokens_before = Vec::new();
        for (n, rows) in steps.iter().enumerate() {
            self.next_step.set(self.next_step.get() + 1);
            let head = self.head(self.next_step.get(), n as u32 % 2, false);
            let ctx = StepContext::new(head, rids, rids, &[]);
            assert!(self.resource.admit(&step, &ctx).unwrap().is_ready());
            let results = [self.resource.plan(&step, &ctx).unwrap().into_result()];
            let ctx = StepContext::new(head, rids, rids, &results);
            let mut logits = rows.concat();
            let shape = [rids.len(), logits.len() / rids.len()];
            let mut tokens = vec![7u32; rids.len()];
            match &self.device {
                None => {
                    let mut view = TensorViewMut::from_slice(&mut logits, &shape);
                    let mut told = TensorViewMut::from_slice(&mut tokens, &[rids.len()]);
                    self.api.begin_sample(&ctx, rids, &mut view, &mut told).unwrap();
                }
                Some((context, _)) => {
                    let mut there = DeviceBuffer::from_slice(context, &logits).unwrap();
                    let mut told = DeviceBuffer::from_slice(context, &tokens).unwrap();
                    let view = &mut there.view_mut(&shape).unwrap();
                    let told_view = &mut told.view_mut(&[rids.len()]).unwrap();
                    self.api.begin_sample(&ctx, rids, view, told_view).unwrap();
                    tokens = told.to_vec().unwrap();
                }
            }
            let last = before.replace(head);
            all.extend(last.map(|last| land(last, &tokens_before)));
            tokens_before = tokens;
            self.resource.commit(&step, &ctx).unwrap();
        }
        all.extend(before.map(|last| land(last, &tokens_before)));
        all
    }

    /// `steps` steps of one request over the same row.
    pub fn run(&self, rid: RequestId, row: &[f32], steps: usize) -> Vec<u32> {
        (0..steps).map(|_| self.step(&[rid], &[row])[0].token).collect()
    }

    /// What a plan over `rids` in `slot` holds.
    pub fn plan<T>(
        &self,
        rids: &[RequestId],
        slot: u32,
        preplan: bool,
        read: impl FnOnce(&SamplerPlan) -> T,
    ) -> T {
        let step = ResourceStep::new(Segments { request: &[], label: &[], span: &[] });
        self.next_step.set(self.next_step.get() + 1);
        let head = head(self.next_step.get(), slot, preplan);
        let ctx = StepContext::new(head, rids, rids, &[]);
        let results = [self.resource.plan(&step, &ctx).unwrap().into_result()];
        read(StepContext::new(head, rids, rids, &results).plan_result(0).unwrap())
    }
}

fn head(step: u64, slot: u32, is_preplan: bool) -> StepHead {
    StepHead {
        step: StepId(step),
        epoch: step,
        node: NodeId(0),
        graph_walk: WalkId(0),
        lease: SlotLease::eager(slot, step as u32),
        capture: false,
        is_preplan,
        stream: 0,
    }
}

/// Logits of rank `n` that are no distribution of any kind in particular.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 21) as f32 - 4.0
    };
    (0..n).map(|_| next()).collect()
}

/// A host with three threads.
pub struct Threads;

impl Threads {
    pub fn handle() -> HostServicesHandle {
        HostServicesHandle::new(Arc::new(Threads))
    }
}

impl resource_api::HostServices for Threads {
    fn threads(&self) -> u32 {
        3
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
    fn label_id(&self, _: &str) -> LabelId {
        LabelId::MAIN
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
