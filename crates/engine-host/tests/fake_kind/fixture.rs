//! Resources built from the plugin, with a runner over them and a view into what they noted.

use std::sync::{Arc, OnceLock};

use engine_host::discovery::{Options, discover};
use engine_host::error::Result;
use engine_host::manifest::ApiVersion;
use engine_host::probe::Probe;
use engine_host::registry::Registry;
use engine_host::resources::{BuildInfo, Entry, ResourceSet, Wanted};
use engine_host::runner::{
    Committed, FullAdmitOutcome, Live, Runner, StageOutcome, Staged, Started,
};
use engine_host::services::Services;
use engine_host::step::{Share, SubmoduleStep};
use resource_api::{
    Capability, DType, Device, EngineLimits, EngineResourceInfo, HostServicesHandle, Interface,
    LabelId, NodeId, NodeResourceSpec, RequestId, RequestOverrides, Resource, ResourceHandle,
    Segment, WalkId,
};
use resource_testkit::{EchoHandle, FakePlan, FakeStepOptions};
use serde_json::{Value, json};

pub const NODE: NodeId = NodeId(0);
pub const WALK: WalkId = WalkId(0);

/// The kinds of the plugin, loaded once.
pub fn registry() -> &'static Registry {
    static REGISTRY: OnceLock<Registry> = OnceLock::new();
    REGISTRY.get_or_init(|| {
        let directory = resource_testkit::support::plugin_directory().unwrap();
        let api = ApiVersion::parse(resource_api::API_VERSION).unwrap();
        let options = Options { strict: false, api, probe: Probe::Never, use_lock: true };
        let found = discover(&[directory.path().to_owned()], &options).unwrap();
        let registry = Registry::load(&found, None);
        let kinds: Vec<_> = registry.kinds().collect();
        let refused = found.plugins.iter().map(engine_host::registry::inspect);
        assert_eq!(kinds, ["fake", "fake_kv", "panicker"], "{:?}", refused.collect::<Vec<_>>());
        registry
    })
}

/// A resource to be built.
pub fn wanted(key: &str, kind: &str, settings: Value) -> Wanted {
    Wanted { spec: spec(key, kind, settings), depends_on: Vec::new() }
}

pub fn spec(key: &str, kind: &str, settings: Value) -> NodeResourceSpec {
    NodeResourceSpec {
        resource_key: key.into(),
        kind: kind.into(),
        nodes: ["decoder".to_string()].into(),
        settings: settings.to_string(),
    }
}

pub fn services() -> Arc<Services> {
    Services::new(2, 1 << 20)
}

/// What a resource that is built on its own is told.
pub fn info() -> EngineResourceInfo {
    EngineResourceInfo::new(Device::CPU, HostServicesHandle::new(services()))
}

pub fn build(wanted: Vec<Wanted>, services: &Arc<Services>) -> Result<ResourceSet> {
    let info = BuildInfo {
        device: Device::CPU,
        kv_dtype: DType::F32,
        needs_remote_transfer: true,
        batch_invariant: false,
        transfer: None,
        limits: EngineLimits::default(),
    };
    ResourceSet::build(registry(), wanted, &info, services.clone())
}

/// A runner over resources of the plugin.
pub struct Bench {
    pub runner: Runner,
    pub services: Arc<Services>,
}

impl Bench {
    /// Fakes with these keys and settings.
    pub fn new(fakes: &[(&str, Value)]) -> Self {
        let services = services();
        let list = fakes.iter().map(|(key, s)| wanted(key, "fake", s.clone())).collect();
        let set = build(list, &services).unwrap();
        Self { runner: Runner::new(Arc::new(set), 2), services }
    }

    /// Three in a row, each on the one before: `a`, `b`, `c`.
    pub fn chain() -> Self {
        Self::new(&[
            ("a", json!({})),
            ("b", json!({ "depends_on": ["a"] })),
            ("c", json!({ "depends_on": ["b"] })),
        ])
    }

    pub fn entry(&self, key: &str) -> &Entry {
        self.runner.resources().find(key).unwrap().1
    }

    pub fn resource(&self, key: &str) -> &ResourceHandle {
        self.entry(key).resource()
    }

    pub fn index(&self, key: &str) -> usize {
        self.runner.resources().find(key).unwrap().0
    }

    pub fn echo(&self, key: &str) -> EchoHandle {
        let offered = self.entry(key).capabilities();
        offered.iter().find(|c| c.id() == EchoHandle::ID).map(Capability::open).unwrap().unwrap()
    }

    /// Tells every resource of a request.
    pub fn ingest(&self, slot: u32, prompt: &[u32]) -> RequestId {
        let rid = RequestId::new(slot, 1);
        for entry in self.runner.resources().entries() {
            entry.resource().ingest_request(rid, &RequestOverrides::new("", prompt, 8)).unwrap();
        }
        rid
    }

    /// A step over all resources.
    pub fn step(&self, rows: &[(RequestId, u32)]) -> SubmoduleStep {
        let all = (0..self.runner.resources().entries().len()).collect();
        step_over(all, rows)
    }

    /// A step in which the resource `key` is to behave like this.
    pub fn step_with(
        &self,
        rows: &[(RequestId, u32)],
        key: &str,
        options: FakeStepOptions,
    ) -> SubmoduleStep {
        let mut step = self.step(rows);
        let share = Share { options: Some(Box::new(options)), segments: None };
        step.shares.insert(self.index(key), share);
        step
    }

    pub fn start(&mut self, step: SubmoduleStep) -> Live {
        match self.runner.start(step).unwrap() {
            Started::Live(live) => live,
            Started::Refused(outcome, _) => panic!("refused: {outcome:?}"),
        }
    }

    pub fn refused(&mut self, step: SubmoduleStep) -> (FullAdmitOutcome, SubmoduleStep) {
        match self.runner.start(step).unwrap() {
            Started::Refused(outcome, step) => (outcome, step),
            Started::Live(_) => panic!("not refused"),
        }
    }

    pub fn stage(&mut self, step: SubmoduleStep) -> Staged {
        match self.runner.stage(step).unwrap() {
            StageOutcome::Staged(staged) => staged,
            StageOutcome::Refused(outcome, _) => panic!("refused: {outcome:?}"),
        }
    }

    pub fn promote(&mut self, staged: Staged) -> Live {
        match self.runner.promote(staged).unwrap() {
            Started::Live(live) => live,
            Started::Refused(outcome, _) => panic!("refused: {outcome:?}"),
        }
    }

    pub fn commit(&mut self, live: Live) -> Committed {
        let (done, result) = self.runner.commit(live);
        result.unwrap();
        done
    }

    /// A step from admission to the release of its slot.
    pub fn run(&mut self, rows: &[(RequestId, u32)]) {
        let live = self.start(self.step(rows));
        let done = self.commit(live);
        self.runner.finish(done);
    }

    /// The plan of `key` in a step.
    pub fn plan<'a>(&self, ctx: &'a resource_api::StepContext<'_>, key: &str) -> &'a FakePlan {
        ctx.plan_result(self.index(key) as u32).unwrap()
    }

    pub fn inspect(&self, key: &str) -> Value {
        serde_json::from_str(&self.resource(key).inspect()).unwrap()
    }

    /// Everything that `key` keeps, without what was called.
    pub fn state(&self, key: &str) -> Value {
        self.inspect(key)["state"].clone()
    }

    /// The states of all resources.
    pub fn states(&self) -> Vec<Value> {
        let keys = self.runner.resources().entries().iter().map(|e| e.key.as_str());
        keys.map(|key| self.state(key)).collect()
    }

    /// All calls so far of the methods in `of`, in order, as `key.method`; staged ones with a `*`.
    pub fn calls(&self, of: &[&str]) -> Vec<String> {
        let mut calls = Vec::new();
        for entry in self.runner.resources().entries() {
            for call in self.inspect(&entry.key)["log"].as_array().unwrap() {
                let (method, staged) = (call[1].as_str().unwrap(), call[3] == true);
                if of.contains(&method) {
                    let name = format!("{}.{method}{}", entry.key, if staged { "*" } else { "" });
                    calls.push((call[0].as_u64().unwrap(), name));
                }
            }
        }
        calls.sort();
        calls.into_iter().map(|(_, name)| name).collect()
    }
}

/// The methods of a step.
pub const STEP_METHODS: &[&str] =
    &["admit", "rollback_admit", "plan", "commit", "on_outputs", "clear_preplan"];

/// Fills in a step; its tokens count up from 100 by row and place.
pub fn step_over(resources: Vec<usize>, rows: &[(RequestId, u32)]) -> SubmoduleStep {
    let mut step = SubmoduleStep::new(NODE, WALK, resources);
    for &(request_id, span) in rows {
        if !request_id.is_padding() && !step.request_ids.contains(&request_id) {
            step.request_ids.push(request_id);
        }
        step.segments.push(Segment { request_id, label: LabelId::MAIN, span });
        step.token_ids.extend((0..span).map(|i| 100 * (request_id.slot % 1000 + 1) + i));
    }
    step
}
