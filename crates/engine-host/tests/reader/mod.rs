//! A small node whose tokens show what it read: each follows from a digest of every token that the
//! cache holds for the request, found through the page tables as a kernel finds it. What should come
//! out is therefore known from the tokens alone ([`expected`]), and a wrong page shows.
#![allow(dead_code)] // each test file uses its own part

use std::sync::{Arc, Mutex, OnceLock};

use device::Parallel;
use engine_host::discovery::{Options, discover};
use engine_host::engine::{Engine, ModelFacts};
use engine_host::manifest::ApiVersion;
use engine_host::probe::Probe;
use engine_host::registry::Registry;
use engine_host::request::{Event, FinishReason, GenerateRequest, Usage};
use engine_host::resources::{BuildInfo, ResourceSet, Wanted};
use engine_host::services::Services;
use model::{Node, NodeResources, StepInput, StepOutput};
use resource_api::{
    DType, Device, EngineLimits, KindHandle, KvCache, KvCacheHandle, KvPlan, LabelId,
    NodeResourceSpec, RequestId, Resource, Sampler, SamplerHandle, StepContext, StepId, TensorView,
    TensorViewMut, TransferEngineInfo,
};
use serde_json::{Map, Value, json};

/// Token ids are below this.
pub const VOCAB: usize = 64;
/// Elements of a key: the token, and its place in the stream.
pub const DIM: usize = 2;

/// Bytes of host memory that resources may take.
pub const BUDGET: u64 = 1 << 30;

/// What runs in the middle of every forward pass, after the tokens were written.
pub type Meanwhile = Arc<dyn Fn(&StepContext<'_>) + Send + Sync>;

/// The node.
#[derive(Default)]
pub struct Reader {
    handles: OnceLock<(KvCacheHandle, SamplerHandle)>,
    meanwhile: Option<Meanwhile>,
    /// Whether it lets steps be launched.
    runs_ahead: bool,
    /// What the step that was launched last has sampled, where a device would have it.
    sampled: Mutex<Vec<u32>>,
}

impl Reader {
    /// Writes what a step adds, and gives who is sampled and their logits.
    fn compute(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        token_ids: &[u32],
    ) -> resource_api::Result<(Vec<RequestId>, Vec<f32>)> {
        let (kv, _) = self.handles.get().expect("attached");
        let plan = plan_of(ctx);
        write(kv, ctx, plan, token_ids)?;
        if let Some(meanwhile) = &self.meanwhile {
            meanwhile(ctx);
        }
        let (mut rids, mut logits) = (Vec::new(), Vec::new());
        for &segment in input.sample {
            let rid = input.segments.request[segment as usize];
            rids.push(rid);
            let own = (0..plan.request.len()).filter(|&row| plan.request[row] == rid);
            let mut digest = 0;
            for row in own {
                let history = read(kv, plan, row)?;
                digest = history.iter().fold(mix(digest), |d, &id| mix(d ^ u64::from(id)));
            }
            logits.extend(logits_of(digest));
        }
        Ok((rids, logits))
    }
}

impl Node for Reader {
    fn name(&self) -> &str {
        "decoder"
    }

    fn walks(&self) -> &[&str] {
        &["prefill", "decode"]
    }

    fn resource_defaults(&self, _kind: &str) -> Map<String, Value> {
        Map::new()
    }

    fn attach(&self, own: &NodeResources<'_>, _: &EngineLimits) -> resource_api::Result<()> {
        let _ = self.handles.set((own.only("kv")?, own.only("sampler")?));
        Ok(())
    }

    fn forward(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        out: &mut StepOutput,
        _parallel: &dyn Parallel,
    ) -> resource_api::Result<()> {
        input.check(VOCAB)?;
        assert!(input.from_sample.is_empty(), "nothing was launched before");
        let (_, sampler) = self.handles.get().expect("attached");
        out.clear();
        let mut logits;
        (out.requests, logits) = self.compute(ctx, input, input.token_ids)?;
        let rows = out.requests.len();
        out.sampled.resize(rows, Default::default());
        let mut logits = TensorViewMut::from_slice(&mut logits, &[rows, VOCAB]);
        sampler.sample(ctx, &out.requests, &mut logits, &mut out.sampled)
    }

    fn can_launch(&self, input: &StepInput<'_>) -> bool {
        let (_, sampler) = self.handles.get().expect("attached");
        let sampled = input.sample.iter().map(|&s| input.segments.request[s as usize]);
        let is_plain = input.score.is_empty() && input.top_logprobs.is_empty();
        self.runs_ahead && is_plain && sampler.can_begin(&Vec::from_iter(sampled))
    }

    fn launch(
        &self,
        ctx: &StepContext<'_>,
        input: &StepInput<'_>,
        _parallel: &dyn Parallel,
    ) -> resource_api::Result<()> {
        input.check(VOCAB)?;
        let (_, sampler) = self.handles.get().expect("attached");
        let mut sampled = self.sampled.lock().unwrap();
        let mut ids = input.token_ids.to_vec();
        for (id, &sample) in ids.iter_mut().zip(input.from_sample) {
            if sample != StepInput::KNOWN {
                assert_eq!(*id, 0, "an id that nobody can know yet");
                *id = sampled[sample as usize];
            }
        }
        let (rids, mut logits) = self.compute(ctx, input, &ids)?;
        sampled.clear();
        sampled.resize(rids.len(), u32::MAX);
        if rids.is_empty() {
            return Ok(());
        }
        let mut logits = TensorViewMut::from_slice(&mut logits, &[rids.len(), VOCAB]);
        let mut tokens = TensorViewMut::from_slice(&mut sampled[..], &[rids.len()]);
        sampler.begin_sample(ctx, &rids, &mut logits, &mut tokens)
    }

    fn land(
        &self,
        step: StepId,
        requests: &[RequestId],
        out: &mut StepOutput,
    ) -> resource_api::Result<()> {
        let (_, sampler) = self.handles.get().expect("attached");
        out.clear();
        match requests.is_empty() {
            true => Ok(()),
            false => sampler.end_sample(step, out.begin_samples_of(requests)),
        }
    }
}

/// The cache's plan of a step, whichever resource made it.
pub fn plan_of<'a>(ctx: &'a StepContext<'_>) -> &'a KvPlan {
    (0..16).find_map(|i| ctx.plan_result::<KvPlan>(i).ok()).expect("a cache planned the step")
}

/// Writes the tokens that the plan's rows add, in its packed order.
pub fn write(
    kv: &KvCacheHandle,
    ctx: &StepContext<'_>,
    plan: &KvPlan,
    tokens: &[u32],
) -> resource_api::Result<()> {
    let mut tokens = tokens.iter();
    for group in plan.groups.iter() {
        let rows = group.first_row as usize..(group.first_row + group.num_rows) as usize;
        let places = rows.flat_map(|r| plan.start[r]..plan.start[r] + plan.span[r]);
        // Places first: `zip` takes from the tokens only where there is a place.
        let keys: Vec<f32> =
            places.zip(tokens.by_ref()).flat_map(|(at, &id)| [id as f32, at as f32]).collect();
        let values: Vec<f32> = keys.iter().map(|k| -k).collect();
        let shape = [keys.len() / DIM, 1, DIM];
        let (k, v) =
            (TensorView::from_slice(&keys, &shape), TensorView::from_slice(&values, &shape));
        kv.write_kv(ctx, 0, group.label, &k, &v)?;
    }
    Ok(())
}

/// The tokens that a row reads.
pub fn read(kv: &KvCacheHandle, plan: &KvPlan, row: usize) -> resource_api::Result<Vec<u32>> {
    let view = kv.layer_view(0)?;
    let (pages, strides) = (view.k.raw().strides, view.v.raw().strides);
    let size = view.k.raw().shape[1] as usize;
    let table = plan.pages(row, size as u32);
    let mut tokens = Vec::new();
    for at in 0..plan.len[row] as usize {
        let place =
            |s: [i64; 8]| table[at / size] as usize * s[0] as usize + at % size * s[1] as usize;
        let key = view.k.window::<f32>(place(pages), DIM).expect("in the pool");
        let value = view.v.window::<f32>(place(strides), DIM).expect("in the pool");
        assert_eq!((value[0], value[1]), (-key[0], -key[1]), "keys and values of one token");
        assert_eq!(key[1] as usize, at, "a token of another place is read");
        tokens.push(key[0] as u32);
    }
    Ok(tokens)
}

pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 27)
}

fn logits_of(digest: u64) -> impl Iterator<Item = f32> {
    (0..VOCAB as u64).map(move |i| (mix(digest ^ mix(i)) % 1000) as f32 / 250.0)
}

/// What a greedy request gets whose streams hold the same tokens under `labels` labels.
pub fn expected(prompt: &[u32], count: usize, labels: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let stream = |d| tokens.iter().fold(mix(d), |d, &id| mix(d ^ u64::from(id)));
        let digest = (0..labels).fold(0, |d, _| stream(d));
        let best = logits_of(digest).enumerate().fold((0, f32::MIN), |best, (i, logit)| {
            if logit > best.1 { (i as u32, logit) } else { best }
        });
        tokens.push(best.0);
    }
    tokens.split_off(prompt.len())
}

/// How an engine over a [`Reader`] is built.
#[derive(Clone)]
pub struct Setup {
    pub page_size: u32,
    /// Pages of the pool, without the sink.
    pub pages: u32,
    pub prefix_cache: bool,
    pub limits: EngineLimits,
    pub preplan: bool,
    pub run_ahead: bool,
    /// Tokens that end a request.
    pub eos: Vec<u32>,
    pub meanwhile: Option<Meanwhile>,
    /// Further settings of the cache.
    pub kv: Value,
    /// Whether requests go to other engines of this process and come from them.
    pub transfer: bool,
    /// Further resources: key, kind, settings.
    pub beside: Vec<(&'static str, &'static str, Value)>,
    /// Kinds of those that no plugin has.
    pub kinds: Vec<KindHandle>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            page_size: 4,
            pages: 64,
            prefix_cache: true,
            limits: EngineLimits { max_batch: 16, max_batch_tokens: 64, max_model_len: 512 },
            preplan: true,
            run_ahead: false,
            eos: Vec::new(),
            meanwhile: None,
            kv: json!({}),
            transfer: false,
            beside: Vec::new(),
            kinds: Vec::new(),
        }
    }
}

/// The kinds of the installed plugins.
pub fn new_registry() -> Registry {
    let plugins = xtask::stamp::installed_plugins(&xtask::workspace_root());
    let plugins = plugins.unwrap_or_else(|problems| panic!("{problems}"));
    let api = ApiVersion::parse(resource_api::API_VERSION).unwrap();
    let options = Options { strict: false, api, probe: Probe::Never, use_lock: true };
    Registry::load(&discover(&[plugins], &options).unwrap(), None)
}

fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(new_registry)
}

/// Resources of the installed plugins: key, kind, nodes, settings.
pub fn resources(
    list: &[(&str, &str, &[&str], Value)],
    limits: EngineLimits,
) -> (Arc<ResourceSet>, Arc<Services>) {
    resources_of(registry(), list, limits, false)
}

fn resources_of(
    registry: &Registry,
    list: &[(&str, &str, &[&str], Value)],
    limits: EngineLimits,
    transfer: bool,
) -> (Arc<ResourceSet>, Arc<Services>) {
    let wanted = |(key, kind, nodes, settings): &(&str, &str, &[&str], Value)| Wanted {
        spec: NodeResourceSpec {
            resource_key: key.to_string(),
            kind: kind.to_string(),
            nodes: nodes.iter().map(|n| n.to_string()).collect(),
            settings: settings.to_string(),
        },
        depends_on: Vec::new(),
    };
    let services = Services::new(1, BUDGET);
    let info = BuildInfo {
        device: Device::CPU,
        kv_dtype: DType::F32,
        needs_remote_transfer: transfer,
        batch_invariant: false,
        transfer: transfer
            .then(|| TransferEngineInfo { engine: "in-process".into(), endpoint: String::new() }),
        limits,
    };
    let all = list.iter().map(wanted).collect();
    let set = ResourceSet::build(registry, all, &info, services.clone());
    (Arc::new(set.unwrap_or_else(|e| panic!("{e}"))), services)
}

/// Settings of a cache for a [`Reader`].
pub fn cache_settings(page_size: u32, pages: u32) -> Value {
    json!({
        "num_layers": 1, "num_kv_heads": 1, "head_dim": DIM, "dtype": "f32",
        "page_size": page_size, "pages": pages + 1,
    })
}

impl Setup {
    pub fn build(&self) -> Engine {
        let mut kv = cache_settings(self.page_size, self.pages);
        kv["prefix_cache"] = json!(self.prefix_cache);
        let further = self.kv.as_object().unwrap().clone();
        kv.as_object_mut().unwrap().extend(further);
        let own = &["decoder"][..];
        let mut all = vec![
            ("main_kv", "kv", own, kv),
            ("attn", "attention", own, json!({ "kv_cache": "main_kv" })),
            ("pos", "positions", own, json!({ "kv_cache": "main_kv", "rotary_dim": DIM })),
            ("sampler", "sampler", own, json!({ "vocab_size": VOCAB })),
        ];
        all.extend(
            self.beside.iter().map(|(key, kind, settings)| (*key, *kind, own, settings.clone())),
        );
        let own_registry = (!self.kinds.is_empty()).then(|| {
            let mut registry = new_registry();
            self.kinds.iter().for_each(|kind| registry.link(kind.clone()));
            registry
        });
        let registry = own_registry.as_ref().unwrap_or_else(|| registry());
        let (set, services) = resources_of(registry, &all, self.limits, self.transfer);
        let facts = ModelFacts { eos: self.eos.clone(), vocab: VOCAB, identity: [7; 32] };
        let meanwhile = self.meanwhile.clone();
        let node = Reader { meanwhile, runs_ahead: self.run_ahead, ..Reader::default() };
        let engine = Engine::new(Box::new(node), set, services, facts, self.limits);
        let mut engine = engine.unwrap_or_else(|e| panic!("{e}"));
        engine.plan_ahead(self.preplan).unwrap();
        engine
    }
}

/// A request that takes the likeliest token each time.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut request =
        GenerateRequest { prompt: prompt.to_vec(), max_tokens, ..GenerateRequest::default() };
    request.sampling.insert("temperature".into(), json!(0));
    request
}

/// The letters of `text` as token ids, A being 1.
pub fn letters(text: &str) -> Vec<u32> {
    text.bytes().map(|b| u32::from(b - b'A') + 1).collect()
}

/// What came of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub tokens: Vec<u32>,
    pub end: Option<(FinishReason, Usage)>,
    pub failure: Option<String>,
}

impl Outcome {
    /// Tokens of the prompt that a cache had.
    pub fn cached(&self) -> u32 {
        self.end.expect("it ended").1.cached_tokens
    }

    pub fn take(&mut self, rid: RequestId, event: &Event) {
        match event {
            Event::Token(r, token) if *r == rid => self.tokens.push(token.id),
            Event::Finished(r, reason, usage) if *r == rid => self.end = Some((*reason, *usage)),
            Event::Failed(r, message) if *r == rid => self.failure = Some(message.to_string()),
            _ => {}
        }
    }
}

/// Runs requests together until all have ended; pages are conserved after every step.
pub fn run(engine: &mut Engine, requests: Vec<GenerateRequest>) -> Vec<Outcome> {
    let submit = |r| engine.submit(r).unwrap_or_else(|e| panic!("{e}"));
    let rids: Vec<RequestId> = requests.into_iter().map(submit).collect();
    let mut outcomes = vec![Outcome::default(); rids.len()];
    let mut idle = 0;
    while !engine.is_idle() {
        let events = engine.step().to_vec();
        idle = if events.is_empty() { idle + 1 } else { 0 };
        assert!(idle < 2_000, "the engine makes no progress");
        for (rid, outcome) in rids.iter().zip(&mut outcomes) {
            events.iter().for_each(|event| outcome.take(*rid, event));
        }
        cache(engine).assert_pages_conserved().unwrap();
    }
    outcomes
}

/// One request by itself on a fresh engine of the same kind.
pub fn cold(setup: &Setup, request: GenerateRequest) -> Outcome {
    run(&mut setup.build(), vec![request]).remove(0)
}

pub fn cache(engine: &Engine) -> KvCacheHandle {
    engine.resources().find("main_kv").unwrap().1.capabilities()[0].open().unwrap()
}

/// A number of `inspect`: `pages.free`, `prefix.pages`, ...
pub fn told(engine: &Engine, path: &str) -> u64 {
    let text = engine.resources().find("main_kv").unwrap().1.resource().inspect();
    let all: Value = serde_json::from_str(&text).unwrap();
    let found = path.split('.').fold(&all, |value, key| &value[key]);
    found.as_u64().unwrap_or_else(|| panic!("{path} in {text}"))
}

/// The id of `main`.
pub const MAIN: LabelId = LabelId::MAIN;
