//! Panics in resources, kinds and the host itself: each becomes an error, and the process lives.
//!
//! The lists name every slot of every vtable; a method that is added and not listed fails here.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use engine_host::error::ErrorKind as HostErrorKind;
use resource_api::abi::guard::install_panic_hook;
use resource_api::host::{HostServices, Job, ParallelBody};
use resource_api::{
    BuiltResource, Device, EngineResourceInfo, ErrorKind, HostServicesHandle, Interface, Kind,
    KindHandle, LabelId, NodeId, NodeResourceSpec, PrefixInputs, RequestId, RequestOverrides,
    Resource, ResourceError, ResourceHandle, ResourceStep, Result, Segments, SlotLease,
    StepContext, StepHead, StepId, WalkId,
};
use resource_testkit::Echo;
use serde_json::{Value, json};

use crate::fixture::{Bench, NODE, WALK, build, info, registry, services, spec, wanted};

pub const RID: RequestId = RequestId::new(0, 1);

/// How a method that panicked answered.
pub enum Answer {
    /// With an error.
    Failed(ResourceError),
    /// It cannot fail: with its type's default.
    Default,
    /// With something else.
    Wrong(String),
}

pub fn failed<T: Debug>(answer: Result<T>) -> Answer {
    match answer {
        Err(e) => Answer::Failed(e),
        Ok(value) => Answer::Wrong(format!("{value:?}")),
    }
}

pub fn plain<T: Debug + Default + PartialEq>(answer: T) -> Answer {
    if answer == T::default() { Answer::Default } else { Answer::Wrong(format!("{answer:?}")) }
}

/// Calls `f` with a step of one request.
pub fn in_step<R>(f: impl FnOnce(&ResourceStep<'_>, &StepContext<'_>) -> R) -> R {
    let head = StepHead {
        step: StepId(1),
        epoch: 1,
        node: NODE,
        graph_walk: WALK,
        lease: SlotLease::eager(0, 1),
        capture: false,
        is_preplan: false,
        stream: 0,
    };
    let (request, label, span) = ([RID], [LabelId::MAIN], [1]);
    let step = ResourceStep::new(Segments { request: &request, label: &label, span: &span });
    f(&step, &StepContext::new(head, &request, &request, &[]))
}

pub fn panicker(settings: Value) -> BuiltResource {
    let spec = spec("p", "panicker", settings);
    registry().build_resource(&spec, info()).unwrap().named("p")
}

/// One row per method: its name, and a call of it on a handle.
pub type Calls<H> = Vec<(&'static str, fn(&H) -> Answer)>;

/// Makes every call on an object of its own, and checks that no method is left out.
pub fn check<H: Interface>(interface: &str, make: impl Fn() -> H, calls: Calls<H>) {
    // For objects that are linked in; a plugin has seen to itself.
    install_panic_hook();
    for (name, call) in &calls {
        let handle = make();
        match call(&handle) {
            Answer::Failed(e) => {
                assert_eq!(e.kind(), ErrorKind::PANICKED, "{interface}::{name}: {e}");
                let says = format!("{interface}::{name} panicked: {name} always panics");
                assert!(e.message().starts_with(&says), "{e}");
                assert!(e.location().contains(".rs:"), "{name}: where it was: {e:?}");
            }
            Answer::Default => {}
            Answer::Wrong(value) => panic!("{interface}::{name} answered {value}"),
        }
        let fault = handle.object().fault();
        assert_eq!(fault.panics(), 1, "{interface}::{name} marks its resource");
        match call(&handle) {
            Answer::Failed(e) => assert_eq!(e.kind(), ErrorKind::POISONED, "{interface}::{name}"),
            Answer::Default => {}
            Answer::Wrong(value) => panic!("{interface}::{name} answered {value} afterwards"),
        }
        assert_eq!(fault.panics(), 1, "{interface}::{name} is not entered again");
    }
    let called: BTreeSet<&str> = calls.iter().map(|(name, _)| *name).collect();
    let methods: BTreeSet<&str> = H::METHODS.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(called, methods, "{interface}: the list has every method");
    assert_eq!(calls.len(), H::METHODS.len());
}

#[test]
fn every_method_of_a_resource_may_panic() {
    let calls: Calls<ResourceHandle> = vec![
        ("depends_on", |r| plain(r.depends_on())),
        ("describe", |r| plain(r.describe().len())),
        ("inspect", |r| plain(r.inspect())),
        ("prefix_skip_safe", |r| plain(r.prefix_skip_safe())),
        ("supports_preplan", |r| plain(r.supports_preplan())),
        ("takes_outputs_late", |r| plain(r.takes_outputs_late())),
        ("supports_eviction", |r| plain(r.supports_eviction())),
        ("force_double_buffer", |r| plain(r.force_double_buffer())),
        ("fingerprint", |r| plain(r.fingerprint())),
        ("accepts", |r| plain(r.accepts())),
        ("bind", |r| failed(r.bind(Vec::new()))),
        ("enable_prefix_cache", |r| failed(r.enable_prefix_cache(b"root", Vec::new()))),
        ("build_cuda_graph_buffers", |r| failed(r.build_cuda_graph_buffers(&[], 1, 1))),
        ("post_warmup_validate", |r| failed(r.post_warmup_validate())),
        ("ingest_request", |r| {
            failed(r.ingest_request(RID, &RequestOverrides::new("{}", &[1], 1)))
        }),
        ("admit_retrieve", |r| failed(r.admit_retrieve(RID, NODE, WALK, None))),
        ("resolve_cached_prefix", |r| failed(r.resolve_cached_prefix(RID, NODE, WALK))),
        ("apply_cached_prefix", |r| {
            failed(r.apply_cached_prefix(RID, NODE, WALK, &PrefixInputs::new(&[1]), 0))
        }),
        ("extend_prefix_chain", |r| failed(r.extend_prefix_chain(RID, NODE, WALK, &[1]))),
        ("reset_request", |r| failed(r.reset_request(RID, true))),
        ("remove_request", |r| failed(r.remove_request(RID))),
        ("remove_requests", |r| failed(r.remove_requests(&[RID]))),
        ("cleanup", |r| failed(r.cleanup())),
        ("admit", |r| in_step(|step, ctx| failed(r.admit(step, ctx)))),
        ("rollback_admit", |r| in_step(|step, ctx| failed(r.rollback_admit(step, ctx)))),
        ("plan", |r| in_step(|step, ctx| failed(r.plan(step, ctx)))),
        ("commit", |r| in_step(|step, ctx| failed(r.commit(step, ctx)))),
        ("clear_preplan", |r| failed(r.clear_preplan(None))),
        ("on_outputs", |r| in_step(|_, ctx| failed(r.on_outputs(ctx, &[RID], &[1])))),
        ("publish", |r| failed(r.publish(RID))),
        ("publish_for_step", |r| failed(r.publish_for_step(RID, None, None))),
        ("publish_after_stop", |r| failed(r.publish_after_stop(RID, None, None))),
        ("reclaimable", |r| failed(r.reclaimable(RID))),
        ("get_offload_priority", |r| failed(r.get_offload_priority(RID))),
        ("offload", |r| failed(r.offload(RID))),
        ("is_offloaded", |r| failed(r.is_offloaded(RID))),
        ("can_reload", |r| failed(r.can_reload(RID))),
        ("reload", |r| failed(r.reload(RID))),
        ("retain_session", |r| failed(r.retain_session(RID, "s"))),
        ("adopt_session", |r| failed(r.adopt_session(RID, "s", 1))),
        ("remove_session", |r| failed(r.remove_session("s"))),
    ];
    check("Resource", || panicker(json!({})).resource, calls);
}

#[test]
fn kinds_may_panic_before_and_while_they_build() {
    let panics = |settings: Value| {
        let e = build(vec![wanted("p", "panicker", settings)], &services()).unwrap_err();
        assert_eq!(e.kind(), HostErrorKind::Panicked);
        e.to_string()
    };
    let place = "[resources.p] (kind panicker, plugin testkit): ";
    for (setting, says) in [
        ("in_depends_on", "Kind::depends_on panicked: depends_on was asked to panic"),
        ("in_build", "Kind::build panicked: build was asked to panic"),
        ("in_capabilities", "Kind::build panicked: capabilities was asked to panic"),
    ] {
        // Each kind's own handle would be out of use after this: one of them serves all resources.
        let text = panics(json!({ setting: true }));
        assert!(text.starts_with(&format!("{place}{says}")), "{text}");
    }
}

#[test]
fn a_resource_that_panics_while_it_is_asked_about_itself_is_refused_at_load() {
    let services = services();
    let all = services.free_memory(Device::CPU);
    let list = vec![wanted("a", "fake", json!({})), wanted("p", "panicker", json!({}))];
    let e = build(list, &services).unwrap_err();
    assert_eq!(e.kind(), HostErrorKind::Panicked);
    assert_eq!(e.to_string(), "[resources.p] (kind panicker) panicked while it was loaded");
    assert_eq!(services.free_memory(Device::CPU), all);
}

#[test]
fn a_panic_in_drop_ends_with_the_resource() {
    let built = panicker(json!({ "in_drop": true }));
    let capability = built.capabilities[0].clone();
    drop(built);
    drop(capability);
    let mut bench = Bench::new(&[("a", json!({ "panic_in": "drop" })), ("b", json!({}))]);
    let rid = bench.ingest(0, &[]);
    bench.run(&[(rid, 1)]);
    let services = bench.services.clone();
    drop(bench);
    assert!(services.metrics().contains_key("a.dropped"), "it was dropped, up to its panic");
    assert_eq!(services.free_memory(Device::CPU), 1 << 20);
}

#[test]
fn a_panic_on_the_hosts_threads_stays_in_the_call_that_caused_it() {
    let bench = Bench::new(&[("a", json!({})), ("b", json!({}))]);
    let a = bench.echo("a");
    a.start_job(true).unwrap();
    a.start_job(false).unwrap();
    bench.services.join_threads();
    assert_eq!(a.jobs_done(), 1);
    assert!(!bench.entry("a").is_faulted(), "a job belongs to no call");

    let e = a.spread(8, Some(3)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PANICKED);
    assert!(e.message().starts_with("Echo::spread panicked: task 3 was asked to panic"), "{e}");
    assert!(bench.entry("a").is_faulted(), "one mark for the resource and what it offers");
    // The pool is as good as before.
    assert_eq!(bench.echo("b").spread(8, None).unwrap(), 28);
}

/// A kind all of whose slots panic: those that plugins generate from constants cannot.
struct PanickingKind;

impl Kind for PanickingKind {
    fn kind(&self) -> String {
        panic!("kind always panics")
    }
    fn provides(&self) -> Vec<String> {
        panic!("provides always panics")
    }
    fn depends_on(&self, _spec: NodeResourceSpec) -> Result<Vec<String>> {
        panic!("depends_on always panics")
    }
    fn build(&self, _spec: NodeResourceSpec, _info: EngineResourceInfo) -> Result<BuiltResource> {
        panic!("build always panics")
    }
}

#[test]
fn every_method_of_a_kind_may_panic() {
    let calls: Calls<KindHandle> = vec![
        ("kind", |k| plain(k.kind())),
        ("provides", |k| plain(k.provides())),
        ("depends_on", |k| failed(k.depends_on(spec("p", "p", json!({}))))),
        ("build", |k| failed(k.build(spec("p", "p", json!({})), info()))),
    ];
    check("Kind", || KindHandle::new(Arc::new(PanickingKind)), calls);
}

/// A host that panics in every service: plugins must get errors, not a panic through their frames.
struct PanickingHost;

impl HostServices for PanickingHost {
    fn threads(&self) -> u32 {
        panic!("threads always panics")
    }
    fn parallel_for(&self, _tasks: u32, _body: ParallelBody) {
        panic!("parallel_for always panics")
    }
    fn log(&self, _level: u32, _target: &str, _message: &str) {
        panic!("log always panics")
    }
    fn count(&self, _resource: &str, _name: &str, _by: u64) {
        panic!("count always panics")
    }
    fn gauge(&self, _resource: &str, _name: &str, _value: f64) {
        panic!("gauge always panics")
    }
    fn now_nanos(&self) -> u64 {
        panic!("now_nanos always panics")
    }
    fn label_name(&self, _label: LabelId) -> String {
        panic!("label_name always panics")
    }
    fn label_id(&self, _name: &str) -> LabelId {
        panic!("label_id always panics")
    }
    fn walk_name(&self, _walk: WalkId) -> String {
        panic!("walk_name always panics")
    }
    fn node_name(&self, _node: NodeId) -> String {
        panic!("node_name always panics")
    }
    fn completed_epoch(&self) -> u64 {
        panic!("completed_epoch always panics")
    }
    fn reserve_memory(&self, _device: Device, _bytes: u64) -> Result<()> {
        panic!("reserve_memory always panics")
    }
    fn release_memory(&self, _device: Device, _bytes: u64) {
        panic!("release_memory always panics")
    }
    fn free_memory(&self, _device: Device) -> u64 {
        panic!("free_memory always panics")
    }
    fn spawn(&self, _name: &str, _job: Job) -> Result<()> {
        panic!("spawn always panics")
    }
    fn cpu_features(&self) -> String {
        panic!("cpu_features always panics")
    }
}

#[test]
fn every_service_of_the_host_may_panic() {
    let calls: Calls<HostServicesHandle> = vec![
        ("threads", |h| plain(h.threads())),
        ("parallel_for", |h| {
            // What a faulted host did not run must not pass for done: the caller is told by a panic.
            let run = std::panic::AssertUnwindSafe(|| h.run(4, |_| {}));
            assert!(std::panic::catch_unwind(run).is_err());
            Answer::Default
        }),
        ("log", |h| {
            h.log(1, "t", "m");
            Answer::Default
        }),
        ("count", |h| {
            h.count("r", "n", 1);
            Answer::Default
        }),
        ("gauge", |h| {
            h.gauge("r", "n", 1.0);
            Answer::Default
        }),
        ("now_nanos", |h| plain(h.now_nanos())),
        ("label_name", |h| plain(h.label_name(LabelId::MAIN))),
        ("label_id", |h| plain(h.label_id("main"))),
        ("walk_name", |h| plain(h.walk_name(WALK))),
        ("node_name", |h| plain(h.node_name(NODE))),
        ("completed_epoch", |h| plain(h.completed_epoch())),
        ("reserve_memory", |h| failed(h.reserve_memory(Device::CPU, 1))),
        ("release_memory", |h| {
            h.release_memory(Device::CPU, 1);
            Answer::Default
        }),
        ("free_memory", |h| plain(h.free_memory(Device::CPU))),
        ("spawn", |h| failed(h.spawn("job", Job::new(|| {})))),
        ("cpu_features", |h| plain(h.cpu_features())),
    ];
    check("HostServices", || HostServicesHandle::new(Arc::new(PanickingHost)), calls);
    // From the plugin's side: building a fake asks for memory.
    let info =
        EngineResourceInfo::new(Device::CPU, HostServicesHandle::new(Arc::new(PanickingHost)));
    let e = registry().build_resource(&spec("a", "fake", json!({})), info).unwrap_err();
    assert!(e.to_string().contains("reserve_memory always panics"), "{e}");
}
