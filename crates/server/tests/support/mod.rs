//! A server over an engine that is made up: it answers with what a test wrote down.
#![allow(dead_code)]

pub mod http;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use model::testing::TinyModel;
use model::{Architecture, FinishReason, GenerateRequest, Gguf, ModelPackage, Token, Usage};
use server::engine::{self, Command, Event, Failure, Inbox, Limits, Sink, Ticket};
use server::snapshot::Snapshot;
use server::{App, Model, ServerOptions};

/// What the engine does with a request.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Comes as one token each; bytes are the tokens of the vocabulary.
    pub bytes: Vec<u8>,
    /// Fails after that, in place of an end by length.
    pub failure: Option<Failure>,
    /// Never ends by itself; the bytes come again and again.
    pub is_endless: bool,
    /// Between tokens.
    pub pause: Duration,
}

pub fn says(text: &str) -> Script {
    Script { bytes: text.as_bytes().to_vec(), ..Script::default() }
}

pub struct Server {
    pub address: SocketAddr,
    pub app: Arc<App>,
    runtime: Option<tokio::runtime::Runtime>,
    stop: tokio::sync::watch::Sender<bool>,
}

pub fn package() -> ModelPackage {
    let file = TinyModel::new(Architecture::Llama, 1).gguf();
    ModelPackage::from_gguf(&Gguf::parse(file.build().into()).unwrap()).unwrap()
}

/// Requests that the engine took, and those that were cancelled.
pub fn counts(server: &Server) -> (u64, u64) {
    let snapshot = server.app.loaded_model().unwrap().engine.snapshot();
    (snapshot.submitted, snapshot.cancelled)
}

impl Server {
    /// `script` says what is answered to a request.
    pub fn new(
        options: ServerOptions,
        script: impl Fn(&GenerateRequest) -> Script + Send + 'static,
    ) -> Self {
        let server = Self::loading(options);
        server.load(script);
        server
    }

    /// A server whose model is not there yet.
    pub fn loading(options: ServerOptions) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let app = App::new(ServerOptions { port: 0, ..options });
        let listener = runtime.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let router = server::routes::router(&app);
        runtime.spawn(server::listen::serve(app.clone(), listener, router, stopped));
        Self { address, app, runtime: Some(runtime), stop }
    }

    pub fn load(&self, script: impl Fn(&GenerateRequest) -> Script + Send + 'static) {
        let (engine, inbox) = engine::channel(Limits {
            requests: 4 + self.app.options.max_waiting,
            buffered_events: self.app.options.stream_buffer,
        });
        std::thread::spawn(move || run(&inbox, script));
        self.app.set_model(Model {
            package: Arc::new(package()),
            engine,
            names: vec!["tiny".into(), "other-name".into()],
            max_model_len: 4096,
            max_num_seqs: 4,
            max_batch_tokens: 64,
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(model) = self.app.loaded_model() {
            model.engine.stop(Failure::new(503, "the test is over"));
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    }
}

struct Job {
    sink: Sink,
    script: Script,
    sent: usize,
    prompt: Vec<u32>,
    max_tokens: usize,
}

fn run(inbox: &Inbox, script: impl Fn(&GenerateRequest) -> Script) {
    let mut jobs: HashMap<Ticket, Job> = HashMap::new();
    let mut snapshot = Snapshot::default();
    loop {
        let mut next = match jobs.is_empty() {
            true => inbox.wait(Duration::from_secs(1)),
            false => inbox.try_next(),
        };
        while let Some(command) = next {
            match command {
                Command::Submit(ticket, request, sink) => {
                    snapshot.submitted += 1;
                    let script = script(&request);
                    let tokens = request.prompt.iter().map(|&id| Some(token(id))).skip(1);
                    if request.prompt_logprobs.is_some() {
                        let all = std::iter::once(None).chain(tokens).collect();
                        assert!(sink.put(Event::Prompt(all)));
                    }
                    let (prompt, max_tokens) = (request.prompt, request.max_tokens as usize);
                    jobs.insert(ticket, Job { sink, script, sent: 0, prompt, max_tokens });
                }
                Command::Cancel(ticket) => {
                    if let Some(job) = jobs.remove(&ticket) {
                        job.is_left(&mut snapshot);
                    }
                }
                Command::Ask => inbox.answer(snapshot.clone()),
                Command::Stop(_) => return,
            }
            next = inbox.try_next();
        }
        jobs.retain(|_, job| job.step(&mut snapshot));
        snapshot.running = jobs.len();
        inbox.publish(snapshot.clone());
    }
}

fn token(id: u32) -> Token {
    Token { id, logprob: -0.5, top: vec![(id, -0.5), (65, f32::NEG_INFINITY)] }
}

impl Job {
    /// Nobody reads it any more.
    fn is_left(&self, snapshot: &mut Snapshot) {
        snapshot.cancelled += u64::from(!self.sink.has_enough());
    }

    /// `false` when it has ended.
    fn step(&mut self, snapshot: &mut Snapshot) -> bool {
        let script = &self.script;
        std::thread::sleep(script.pause);
        let at = if script.is_endless { self.sent % script.bytes.len() } else { self.sent };
        let usage = Usage {
            prompt_tokens: self.prompt.len() as u32,
            completion_tokens: self.sent as u32,
            cached_tokens: 3,
        };
        let end = match script.bytes.get(at) {
            _ if !script.is_endless && self.sent == self.max_tokens => FinishReason::Length,
            Some(&byte) => {
                self.sent += 1;
                let is_read = self.sink.put(Event::Token(token(u32::from(byte))));
                if !is_read {
                    self.is_left(snapshot);
                }
                return is_read;
            }
            None => FinishReason::Stop,
        };
        let last = match &script.failure {
            Some(failure) => Event::Failed(failure.clone()),
            None => Event::Finished(end, usage),
        };
        let _ = self.sink.put(last);
        false
    }
}
