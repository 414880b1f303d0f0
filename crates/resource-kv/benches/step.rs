//! What a decode step costs in each kind and phase: for finding out where time goes. The figures that
//! are published come from `engine-host bench step`, through plugins.
//!
//! `cargo bench -p resource-kv --bench step -- [requests] [tokens] [pages]`

use std::time::Instant;

use resource_api::{
    BuiltResource, Device, EngineResourceInfo, LabelId, NodeId, NodeResourceSpec, PrefixWalk,
    RequestId, RequestOverrides, Resource, ResourceKind, ResourceStep, Segments, SlotLease,
    StepContext, StepHead, StepId, TypedRef, WalkId, build_resource, host::PlainHost,
};

const PAGE: u32 = 16;
const KINDS: [&str; 4] = ["kv", "attention", "positions", "sampler"];
const PHASES: [&str; 4] = ["admit", "plan", "commit", "outputs"];

fn build<K: ResourceKind>(
    index: u32,
    key: &str,
    settings: &str,
    kv: Option<&(NodeResourceSpec, BuiltResource)>,
) -> (NodeResourceSpec, BuiltResource) {
    let mut info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
    info.index = index;
    info.limits.max_batch = 1024;
    info.limits.max_model_len = 1 << 18;
    if let Some((spec, built)) = kv {
        info.dependencies.insert("kv".into(), built.as_dependency(spec.clone(), 0));
    }
    let spec = NodeResourceSpec {
        resource_key: key.into(),
        kind: K::KIND.into(),
        nodes: Default::default(),
        settings: settings.into(),
    };
    let built = build_resource::<K>(&spec, &info).expect("it builds");
    (spec, built)
}

struct Rig {
    resources: [BuiltResource; 4],
    request: Vec<RequestId>,
    label: Vec<LabelId>,
    step: u64,
    /// Nanoseconds by kind and phase, one a step.
    samples: [[Vec<u64>; 4]; 4],
}

impl Rig {
    fn run(&mut self, rows: std::ops::Range<usize>, span: u32, refused: bool) {
        self.step += 1;
        let request = &self.request[rows.clone()];
        let label = &self.label[rows.clone()];
        let spans = vec![span; rows.len()];
        let ids = vec![7u32; rows.len() * span as usize];
        let outputs = vec![7u32; rows.len()];
        let segments = Segments { request, label, span: &spans };
        let step = ResourceStep::new(segments).with_token_ids(&ids);
        let head = StepHead {
            step: StepId(self.step),
            epoch: self.step,
            node: NodeId(0),
            graph_walk: WalkId(0),
            lease: SlotLease::eager((self.step % 2) as u32, self.step as u32),
            capture: false,
            is_preplan: false,
            stream: 0,
        };
        let mut plans = [TypedRef::NONE; 4];
        for phase in 0..4 {
            for (kind, built) in self.resources.iter().enumerate() {
                let resource = &built.resource;
                let ctx = StepContext::new(head, request, request, &plans);
                let start = Instant::now();
                let plan = match phase {
                    0 => {
                        let ok = resource.admit(&step, &ctx).unwrap().is_ready();
                        assert!(refused || ok);
                        None
                    }
                    1 => Some(resource.plan(&step, &ctx).unwrap()),
                    2 => resource.commit(&step, &ctx).map(|()| None).unwrap(),
                    _ => resource.on_outputs(&ctx, request, &outputs).map(|()| None).unwrap(),
                };
                self.samples[kind][phase].push(start.elapsed().as_nanos() as u64);
                if let Some(plan) = plan {
                    plans[kind] = plan.into_result();
                }
            }
            if refused {
                return;
            }
        }
    }

    fn report(&mut self, what: &str) {
        let median = |v: &mut Vec<u64>| {
            v.sort_unstable();
            v.get(v.len() / 2).copied().unwrap_or(0) as f64 / 1e3
        };
        println!("{what}");
        let mut total = 0.0;
        for (kind, name) in KINDS.iter().enumerate() {
            print!("  {name:<10}");
            for (phase, name) in PHASES.iter().enumerate() {
                let us = median(&mut self.samples[kind][phase]);
                total += us;
                print!(" {name} {us:6.2}");
            }
            println!();
        }
        println!("  sum of medians {total:.2} us");
        self.samples = Default::default();
    }
}

fn main() {
    let args: Vec<u32> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let arg = |i: usize, default| args.get(i).copied().unwrap_or(default);
    let (requests, tokens) = (arg(0, 256), arg(1, 4096));
    let pages = arg(2, requests * (tokens / PAGE + 40) + 1);
    let settings = format!(
        r#"{{"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "pages": {pages}, "page_size": {PAGE}}}"#
    );
    let kv = build::<resource_kv::Kv>(0, "kv", &settings, None);
    let of_kv = r#"{"kv_cache": "kv"}"#;
    let attention = build::<resource_attn::PagedAttention>(1, "attention", of_kv, Some(&kv)).1;
    let positions = build::<resource_positions::Positions>(2, "positions", of_kv, Some(&kv)).1;
    let sampler =
        build::<resource_sampler::Sampler>(3, "sampler", r#"{"vocab_size": 49152}"#, None).1;
    let resources = [kv.1, attention, positions, sampler];
    let walk = PrefixWalk { label: LabelId::MAIN, write: WalkId(0), decode: WalkId(0) };
    resources[0].resource.enable_prefix_cache(b"", vec![walk]).unwrap();
    let request: Vec<RequestId> = (0..requests).map(|slot| RequestId::new(slot, 1)).collect();
    let label = vec![LabelId::MAIN; requests as usize];
    let mut rig = Rig { resources, request, label, step: 0, samples: Default::default() };
    // All streams end a page in the same step; see below.
    for slot in 0..requests {
        let mut prompt = vec![7; tokens as usize + 1];
        // Told apart by a salt, so that nothing is shared and all is indexed.
        prompt.iter_mut().for_each(|t| *t = 7);
        let text = format!(r#"{{"prefix_salt": "{slot}"}}"#);
        let sampling = r#"{"temperature": 0.7, "top_k": 20, "top_p": 0.9}"#;
        for (kind, built) in rig.resources.iter().enumerate() {
            let text = [&text, "", "", sampling][kind];
            let overrides = RequestOverrides::new(text, &prompt, 600);
            built.resource.ingest_request(RequestId::new(slot, 1), &overrides).unwrap();
        }
    }
    let first = |i: u32| tokens - PAGE + 1 + i;
    for row in 0..requests as usize {
        rig.run(row..row + 1, first(0), false);
    }
    rig.samples = Default::default();
    for round in 0..24 {
        // From one token in a page: 14 steps without a page begun or ended, then two with all.
        for _ in 0..14 {
            rig.run(0..requests as usize, 1, false);
        }
        if round < 4 {
            rig.samples = Default::default();
        }
        let keep = std::mem::take(&mut rig.samples);
        rig.run(0..requests as usize, 1, false);
        rig.run(0..requests as usize, 1, false);
        rig.samples = keep;
    }
    rig.report(&format!("{requests} requests of {tokens} tokens, {pages} pages: no page ends"));
    // Spread over the page: now a 16th of them ends one in every step.
    for i in 1..PAGE {
        for row in (0..requests as usize).filter(|row| *row as u32 % PAGE == i) {
            rig.run(row..row + 1, i, false);
        }
    }
    rig.samples = Default::default();
    for round in 0..192 {
        rig.run(0..requests as usize, 1, false);
        if round == 15 {
            rig.samples = Default::default();
        }
    }
    rig.report("a 16th ends a page");
}
