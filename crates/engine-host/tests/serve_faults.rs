//! A server over an engine with a resource that breaks or stalls under load: what each client is told,
//! and that the others are as well off as without it.

#[path = "../../server/tests/support/http.rs"]
mod http;
mod support;

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine_host::driver::Driver;
use engine_host::engine::OnFault;
use engine_host::registry::Registry;
use engine_host::setup::{self, Loaded};
use http::{get, post, receive, send, wait_until};
use resource_api::{
    EngineResourceInfo, NodeResourceSpec, Resource, ResourceKind, ResourceStep, Result, StepContext,
};
use serde_json::{Value, json};
use server::engine::{self, Failure, Limits};
use server::{App, Model, ServerOptions};

const COMPLETE: &str = "/v1/completions";
/// Panics.
const PILL: u32 = 4242;
/// Sleeps for [`STALL`].
const SAND: u32 = 4243;
const STALL: Duration = Duration::from_secs(6);

/// Panics or sleeps in the commit of a step with a certain token in it.
struct Moody;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {}

impl Resource for Moody {
    fn commit(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        assert!(!step.token_ids().contains(&PILL), "the bomb goes off");
        if step.token_ids().contains(&SAND) {
            std::thread::sleep(STALL);
        }
        Ok(())
    }
}

impl ResourceKind for Moody {
    type Spec = Settings;
    const KIND: &'static str = "moody";
    fn build(_spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(Self)
    }
}

/// A server in this process, two requests to a step.
struct Server {
    address: SocketAddr,
    app: Arc<App>,
    engine: Option<JoinHandle<()>>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Server {
    fn new(on_fault: OnFault) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let app = App::new(ServerOptions::default());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let router = server::routes::router(&app);
        let serving = server::listen::serve(app.clone(), listener, router, stopped);
        runtime.spawn(async move {
            serving.await;
            drop(stop);
        });

        let own = app.clone();
        // Engines stay on the thread that made them.
        let engine = std::thread::spawn(move || {
            let Loaded { engine, model } = load(on_fault);
            let limits = Limits { requests: 64, buffered_events: 4096 };
            let (handle, inbox) = engine::channel(limits);
            let of = engine.limits();
            let (max_model_len, max_num_seqs) = (of.max_model_len, of.max_batch);
            let driver = Driver::new(engine, inbox);
            own.set_model(Model {
                package: Arc::new(model),
                engine: handle,
                names: vec!["m".into()],
                max_model_len,
                max_num_seqs,
                max_batch_tokens: 512,
            });
            driver.run();
        });
        let server = Self { address, app, engine: Some(engine), runtime: Some(runtime) };
        wait_until("the model is loaded", || get(address, "/health").status == 200);
        server
    }

    fn open(&self, first: u32, max_tokens: u32, stream: bool) -> TcpStream {
        let prompt = [first, 11, 12, 13, 14, 15, 16, 17];
        let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": stream });
        send(self.address, COMPLETE, "", &body.to_string())
    }

    fn text(&self, first: u32) -> String {
        let answer = receive(self.open(first, 12, false)).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.error());
        answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    fn load(&self) -> Value {
        get(self.address, "/v1/loads").json()["loads"][0].clone()
    }

    fn is_idle(&self) -> bool {
        let load = self.load();
        load["num_total_reqs"] == 0 && load["num_used_tokens"] == 0
    }

    fn resource(&self) -> Value {
        let all = get(self.address, "/admin/plugins").json();
        let all = all["resources"].as_array().unwrap();
        all.iter().find(|r| r["kind"] == "moody").unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(model) = self.app.loaded_model() {
            model.engine.stop(Failure::new(503, "the test is over"));
        }
        let _ = self.engine.take().map(JoinHandle::join);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

fn load(on_fault: OnFault) -> Loaded {
    let mut config = support::config("max_model_len = 400\nmax_batch = 2", "pages = 96");
    let mut section = config.resources["sampler"].clone();
    section.kind = "moody".into();
    section.on_fault = on_fault;
    section.settings = toml::Table::new();
    config.resources.insert("moody".into(), section);
    let discovery = setup::discover(&config).unwrap();
    let mut registry = Registry::load(&discovery, None);
    registry.link(resource_api::kind::<Moody>());
    let loaded = setup::load_with(&config, &mut registry, &discovery, &mut |_, _| {});
    loaded.unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_panic_under_load_fails_its_step_and_the_others_get_what_they_would() {
    let server = Server::new(OnFault::Restart);
    let alone: Vec<String> = (30..38).map(|first| server.text(first)).collect();
    // Two that run, the panic next in the queue, and many behind it.
    let in_flight = || server.app.loaded_model().unwrap().engine.in_flight();
    let mut streaming = server.open(20, 300, true);
    streaming.read_exact(&mut [0; 200]).unwrap();
    let shorter = server.open(21, 60, false);
    wait_until("both run", || in_flight() == 2);
    let bomb = server.open(PILL, 12, false);
    wait_until("it waits", || in_flight() == 3);
    let waiting: Vec<TcpStream> = (30..38).map(|first| server.open(first, 12, false)).collect();
    wait_until("all wait", || in_flight() == 11);

    assert_eq!(receive(shorter).unwrap().status, 200, "it had ended before");
    let why = receive(bomb).unwrap();
    assert_eq!(why.status, 500);
    let message = why.error();
    assert!(message.contains("resource `moody`") && message.contains("goes off"), "{message}");
    // Its stream had begun, so it is told in the stream.
    let mut rest = String::new();
    streaming.read_to_string(&mut rest).unwrap();
    let last: Vec<&str> = rest.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let [.., error, "[DONE]"] = last[..] else { panic!("{rest}") };
    let error: Value = serde_json::from_str(error).unwrap();
    assert_eq!(error["error"]["type"], "server_error", "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("resource `moody`"), "{error}");

    for (stream, alone) in waiting.into_iter().zip(&alone) {
        let answer = receive(stream).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.error());
        assert_eq!(answer.json()["choices"][0]["text"], **alone);
    }
    assert_eq!(server.text(30), alone[0], "and later ones");
    wait_until("nothing is held", || server.is_idle());
    let resource = server.resource();
    assert_eq!((&resource["panics"], &resource["restarts"]), (&json!(1), &json!(1)));
    assert_eq!(
        (&resource["is_faulted"], get(server.address, "/health").status),
        (&json!(false), 200)
    );
    let metrics = String::from_utf8(get(server.address, "/metrics").body).unwrap();
    let restarts = metrics.lines().find(|line| {
        line.starts_with("engine_host_resource_restarts_total{") && line.contains("=\"moody\"")
    });
    assert!(restarts.is_some_and(|line| line.ends_with("} 1")), "{metrics}");
}

#[test]
fn a_server_that_can_answer_nothing_any_more_says_so() {
    for on_fault in [OnFault::FailRequests, OnFault::Stop] {
        let server = Server::new(on_fault);
        server.text(30);
        let long = server.open(20, 300, false);
        wait_until("it runs", || server.load()["num_running_reqs"] == 1);
        let bomb = receive(server.open(PILL, 12, false)).unwrap();
        assert_eq!(bomb.status, 500, "{}", bomb.error());
        let long = receive(long).unwrap();
        assert!(matches!(long.status, 500 | 503), "{}", long.error());
        let later = receive(server.open(30, 12, false)).unwrap();
        assert_eq!(later.status, 503, "{}", later.error());
        assert!(later.error().contains("`moody`"), "{}", later.error());
        for path in ["/health", "/ready"] {
            wait_until("it says so", || get(server.address, path).status == 503);
            let told = get(server.address, path).json().to_string();
            assert!(told.contains("`moody`"), "{told}");
        }
        wait_until("nothing is held", || server.is_idle());
    }
}

#[test]
fn a_stall_keeps_requests_waiting_and_nobody_else() {
    let server = Server::new(OnFault::FailRequests);
    let alone = server.text(30);
    let stalled = server.open(SAND, 12, false);
    let started = Instant::now();
    wait_until("it has begun", || server.app.loaded_model().unwrap().engine.in_flight() == 1);
    std::thread::sleep(Duration::from_millis(200));
    let waiting = server.open(30, 12, false);
    let leaves = server.open(31, 12, false);
    // What needs no engine is answered at once, what asks it within its second.
    for (path, most) in
        [("/health", 500), ("/v1/models", 500), ("/metrics", 1900), ("/v1/loads", 1900)]
    {
        let asked = Instant::now();
        assert_eq!(get(server.address, path).status, 200);
        assert!(asked.elapsed() < Duration::from_millis(most), "{path}: {:?}", asked.elapsed());
    }
    let ids = post(server.address, "/tokenize", &json!({ "prompt": "Hi" }));
    assert_eq!(ids.status, 200);
    drop(leaves);
    assert!(started.elapsed() < STALL, "that was while it stalled");
    assert_eq!(receive(stalled).unwrap().status, 200);
    assert!(started.elapsed() >= STALL);
    assert_eq!(receive(waiting).unwrap().json()["choices"][0]["text"], *alone);
    wait_until("nothing is held", || server.is_idle());
}
