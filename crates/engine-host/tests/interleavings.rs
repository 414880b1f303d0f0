//! Every order in which the engine's threads can meet at a cache: one runs a step's forward pass, one
//! plans the next step, one takes requests in and out and looks at the state. Whatever the order, each
//! reads its own tokens, and what is left afterwards is the same.
//!
//! Threads stop at gates, resources of the test that lie before and behind the cache in the build order,
//! and are let on one at a time. What goes on inside of the locks that are held from gate to gate is
//! for the crate `explore`.

mod reader;

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex};

use device::Companion;
use engine_host::registry::Registry;
use engine_host::resources::{BuildInfo, ResourceSet, Wanted};
use engine_host::runner::{Live, Runner, StageOutcome, Started};
use engine_host::services::Services;
use engine_host::step::SubmoduleStep;
use reader::{DIM, cache_settings, plan_of, read, write};
use resource_api::{
    AdmitOutcome, DType, Device, EngineLimits, EngineResourceInfo, KvCache, KvCacheHandle, KvPlan,
    LabelId, NodeId, NodeResourceSpec, Plan, RequestId, RequestOverrides, Resource, ResourceKind,
    ResourceStep, Segment, StepContext, WalkId, kind,
};
use serde_json::{Value, json};

const THREADS: usize = 3;
const FORWARD: usize = 0;
const PLANNER: usize = 1;
const OTHER: usize = 2;

/// Lets one thread on at a time, in an order of its choice.
#[derive(Default)]
struct Turns {
    state: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    /// Threads that wait at a gate.
    waiting: [bool; THREADS],
    ended: [bool; THREADS],
    /// The one that may go on.
    next: Option<usize>,
    /// What was chosen at each meeting, among how many.
    chosen: Vec<(usize, usize)>,
    /// What to choose first.
    wanted: Vec<usize>,
}

impl Turns {
    /// Waits until it is this thread's turn.
    fn gate(&self, own: usize) {
        let mut state = self.state.lock().unwrap();
        state.waiting[own] = true;
        state.choose();
        self.changed.notify_all();
        while state.next != Some(own) {
            state = self.changed.wait(state).unwrap();
        }
        state.next = None;
        state.waiting[own] = false;
    }

    fn end(&self, own: usize) {
        let mut state = self.state.lock().unwrap();
        state.ended[own] = true;
        state.choose();
        self.changed.notify_all();
    }
}

impl Meeting {
    /// Once every thread waits or has ended, one of those that wait.
    fn choose(&mut self) {
        let all_here = (0..THREADS).all(|t| self.waiting[t] || self.ended[t]);
        let ready: Vec<usize> = (0..THREADS).filter(|&t| self.waiting[t]).collect();
        if self.next.is_none() && all_here && !ready.is_empty() {
            let choice = self.wanted.get(self.chosen.len()).copied().unwrap_or(0);
            self.chosen.push((choice, ready.len()));
            self.next = Some(ready[choice]);
        }
    }

    /// What to choose for the next order, all having been tried up to this one.
    fn following(&self) -> Option<Vec<usize>> {
        let last = self.chosen.iter().rposition(|&(choice, of)| choice + 1 < of)?;
        let mut wanted: Vec<usize> =
            self.chosen[..=last].iter().map(|&(choice, _)| choice).collect();
        wanted[last] += 1;
        Some(wanted)
    }
}

thread_local! {
    /// Who the thread is, while orders are tried.
    static OWN: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

fn gate() {
    let own = OWN.with_borrow(Clone::clone);
    own.inspect(|(turns, own)| turns.gate(*own));
}

fn as_thread<R>(turns: &Arc<Turns>, own: usize, work: impl FnOnce() -> R) -> R {
    OWN.set(Some((turns.clone(), own)));
    // Also where it panics: the others must not wait for it.
    let _ends = Ends;
    work()
}

/// Ends the thread's part when it is dropped.
struct Ends;

impl Drop for Ends {
    fn drop(&mut self) {
        let own = OWN.take();
        own.inspect(|(turns, own)| turns.end(*own));
    }
}

/// A resource that only stops whoever calls it.
struct Gate {
    after: Vec<String>,
}

#[derive(serde::Deserialize)]
struct GateSettings {
    #[serde(default)]
    after: Vec<String>,
}

impl ResourceKind for Gate {
    type Spec = GateSettings;
    const KIND: &'static str = "gate";

    fn depends_on(spec: &NodeResourceSpec<GateSettings>) -> Vec<String> {
        spec.settings.after.clone()
    }

    fn build(
        spec: NodeResourceSpec<GateSettings>,
        _: &EngineResourceInfo,
    ) -> resource_api::Result<Self> {
        Ok(Gate { after: spec.settings.after })
    }
}

impl Resource for Gate {
    fn depends_on(&self) -> Vec<String> {
        self.after.clone()
    }

    fn supports_preplan(&self) -> bool {
        true
    }

    fn admit(
        &self,
        _: &ResourceStep<'_>,
        _: &StepContext<'_>,
    ) -> resource_api::Result<AdmitOutcome> {
        gate();
        Ok(AdmitOutcome::OK)
    }

    fn plan(&self, _: &ResourceStep<'_>, _: &StepContext<'_>) -> resource_api::Result<Plan> {
        gate();
        Ok(Plan::NONE)
    }

    fn clear_preplan(&self, _: Option<resource_api::StepId>) -> resource_api::Result<()> {
        gate();
        Ok(())
    }
}

/// A runner over a cache of the installed plugin, with the tokens that its streams should hold.
struct World {
    runner: Runner,
    kv: KvCacheHandle,
    tokens: Vec<Vec<u32>>,
}

fn rid(slot: usize) -> RequestId {
    RequestId::new(slot as u32, 1)
}

impl World {
    fn new(registry: &Registry) -> Self {
        let resource = |key: &str, kind: &str, settings: Value| Wanted {
            spec: NodeResourceSpec {
                resource_key: key.into(),
                kind: kind.into(),
                nodes: ["decoder".to_string()].into(),
                settings: settings.to_string(),
            },
            depends_on: Vec::new(),
        };
        let mut kv = cache_settings(2, 12);
        kv["host_pages"] = json!(8);
        let wanted = vec![
            resource("a_gate", "gate", json!({})),
            resource("main_kv", "kv", kv),
            resource("z_gate", "gate", json!({ "after": ["main_kv"] })),
        ];
        let info = BuildInfo {
            device: Device::CPU,
            kv_dtype: DType::F32,
            needs_remote_transfer: false,
            batch_invariant: false,
            transfer: None,
            limits: EngineLimits::default(),
        };
        let set = ResourceSet::build(registry, wanted, &info, Services::new(1, 1 << 20)).unwrap();
        let runner = Runner::new(Arc::new(set), 2);
        let kv = runner.resources().find("main_kv").unwrap().1.capabilities()[0].open().unwrap();
        let mut world = World { runner, kv, tokens: vec![Vec::new(); 2] };
        (0..2).for_each(|slot| world.ingest(slot));
        world.run(&[(0, 3), (1, 2)]);
        world
    }

    fn ingest(&self, slot: usize) {
        for entry in self.runner.resources().entries() {
            entry.resource().ingest_request(rid(slot), &RequestOverrides::new("", &[], 8)).unwrap();
        }
    }

    fn step(&self, rows: &[(usize, u32)]) -> SubmoduleStep {
        let mut step = SubmoduleStep::new(NodeId(0), WalkId(0), vec![0, 1, 2]);
        for &(slot, span) in rows {
            step.request_ids.push(rid(slot));
            step.segments.push(Segment { request_id: rid(slot), label: LabelId::MAIN, span });
            let own = (0..span).map(|i| (10 * slot + self.tokens[slot].len()) as u32 + i);
            step.token_ids.extend(own);
        }
        step
    }

    fn live(started: Started) -> Live {
        match started {
            Started::Live(live) => live,
            Started::Refused(why, _) => panic!("{}", why.outcome.message()),
        }
    }

    /// Notes a step's tokens, for whoever reads its streams from now on.
    fn note(&mut self, live: &Live) {
        let (mut at, step) = (0, live.step());
        for segment in step.segments.view().iter() {
            let ids = &step.token_ids[at..at + segment.span as usize];
            self.tokens[segment.request_id.index()].extend(ids);
            at += ids.len();
        }
    }

    fn run(&mut self, rows: &[(usize, u32)]) {
        let live = Self::live(self.runner.start(self.step(rows)).unwrap());
        self.finish(live);
    }

    fn finish(&mut self, live: Live) {
        self.note(&live);
        forward(&self.kv, &live, &self.tokens);
        self.commit(live);
    }

    fn commit(&mut self, live: Live) {
        let (done, committed) = self.runner.commit(live);
        committed.unwrap();
        self.runner.finish(done);
    }
}

/// Writes a step's tokens and reads what its rows should hold then.
fn forward(kv: &KvCacheHandle, live: &Live, tokens: &[Vec<u32>]) {
    let ctx = live.ctx();
    let plan: &KvPlan = plan_of(&ctx);
    gate();
    write(kv, &ctx, plan, &live.step().token_ids).unwrap();
    for row in 0..plan.request.len() {
        gate();
        let own = plan.request[row].index();
        assert_eq!(read(kv, plan, row).unwrap(), tokens[own], "request {own}");
        // It counts when the step commits, whatever is planned meanwhile.
        let len = kv.stream_len(plan.request[row], LabelId::MAIN).unwrap();
        assert_eq!(len, plan.start[row], "request {own}");
    }
}

/// What the third thread does to requests that no step has.
fn come_and_go(runner_resources: &ResourceSet, kv: &KvCacheHandle) {
    let resource = runner_resources.find("main_kv").unwrap().1.resource();
    gate();
    resource.ingest_request(rid(2), &RequestOverrides::new("", &[], 8)).unwrap();
    gate();
    let told: Value = serde_json::from_str(&resource.inspect()).unwrap();
    assert_eq!(told["streams"].as_array().unwrap().len(), 3, "{told}");
    kv.assert_pages_conserved().unwrap();
    // Requests of steps in flight are no victims.
    assert_eq!((resource.reclaimable(rid(0)).unwrap(), resource.offload(rid(0)).unwrap()), (0, 0));
    gate();
    resource.remove_request(rid(2)).unwrap();
    kv.assert_pages_conserved().unwrap();
}

/// What is to be the same whatever the order.
fn state(world: &World) -> Vec<Value> {
    let text = world.runner.resources().find("main_kv").unwrap().1.resource().inspect();
    let told: Value = serde_json::from_str(&text).unwrap();
    ["streams", "pages", "steps_in_flight"].map(|name| told[name].clone()).into()
}

/// Runs a step, plans the next one meanwhile, and promotes or drops that, in the order that `wanted`
/// begins; gives what the next order begins with, and the state at the end.
fn one_order(
    registry: &Registry,
    wanted: Vec<usize>,
    promote: bool,
) -> (Option<Vec<usize>>, Vec<Value>) {
    let mut world = World::new(registry);
    let mut companion = Companion::new("planner").unwrap();
    let turns = Arc::new(Turns::default());
    turns.state.lock().unwrap().wanted = wanted;
    let live = World::live(world.runner.start(world.step(&[(0, 1), (1, 2)])).unwrap());
    world.note(&live);
    let (resources, kv) = (world.runner.resources().clone(), world.kv.clone());
    let (mut next, mut staged) = (Some(world.step(&[(0, 2), (1, 1)])), None);
    let others = (turns.clone(), resources.clone(), kv.clone());
    let other = std::thread::spawn(move || {
        let (turns, resources, kv) = others;
        as_thread(&turns, OTHER, || come_and_go(&resources, &kv));
    });
    let (runner, tokens) = (&mut world.runner, &world.tokens);
    companion.beside(
        || {
            let step = next.take().unwrap();
            staged = Some(as_thread(&turns, PLANNER, || runner.stage(step).unwrap()));
        },
        || as_thread(&turns, FORWARD, || forward(&kv, &live, tokens)),
    );
    other.join().unwrap();
    let Some(StageOutcome::Staged(staged)) = staged else { panic!("the next step was not staged") };
    world.commit(live);
    match promote {
        true => {
            let live = World::live(world.runner.promote(staged).unwrap());
            world.finish(live);
        }
        false => drop(world.runner.unstage(staged)),
    }
    world.kv.assert_pages_conserved().unwrap();
    world.run(&[(0, 1), (1, 1)]);
    drop(resources);
    let following = turns.state.lock().unwrap().following();
    (following, state(&world))
}

#[test]
fn every_order_of_planning_running_and_looking_gives_the_same() {
    let mut registry = reader::new_registry();
    registry.link(kind::<Gate>());
    assert_eq!(cache_settings(2, 12)["head_dim"], json!(DIM));
    for promote in [true, false] {
        let (mut wanted, mut orders) = (Some(Vec::new()), 0);
        let mut first: Option<Vec<Value>> = None;
        while let Some(order) = wanted {
            let shown = format!("{order:?}");
            let (next, end) = one_order(&registry, order, promote);
            let same = first.get_or_insert_with(|| end.clone());
            assert_eq!(*same, end, "the order {shown}");
            (wanted, orders) = (next, orders + 1);
        }
        // Four gates of the planner and three of each of the others, in every order.
        assert_eq!(orders, 4200, "promote: {promote}");
    }
}
