//! Runs an engine for a server: takes requests from its channel, steps, and passes on what happens.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use resource_api::{RequestId, Resource};
use serde_json::Value;
use server::engine::{Command, Event, Failure, Inbox, Sink, Ticket};
use server::snapshot::{self, ResourceSnapshot, Snapshot};

use crate::engine::Engine;
use crate::error::Error;
use crate::request::{self, GenerateRequest};
use crate::services::Metric;

/// Busy resources are asked no more often than this, whoever asks: it takes time from the steps.
const FRESH: Duration = Duration::from_millis(100);
/// How long an idle engine sleeps before it looks up.
const IDLE: Duration = Duration::from_secs(1);

/// An engine at work for a server.
pub struct Driver {
    engine: Engine,
    inbox: Inbox,
    live: HashMap<RequestId, Live>,
    by_ticket: HashMap<Ticket, RequestId>,
    snapshot: Snapshot,
    /// When resources were last asked.
    asked: Option<Instant>,
    events: Vec<request::Event>,
}

/// A request in the engine.
struct Live {
    ticket: Ticket,
    sink: Sink,
    has_events: bool,
}

impl Driver {
    /// For a server that holds the other end of `inbox`, to which the engine's state is known from here on.
    pub fn new(engine: Engine, inbox: Inbox) -> Self {
        let mut new = Self {
            engine,
            inbox,
            live: HashMap::new(),
            by_ticket: HashMap::new(),
            snapshot: Snapshot::default(),
            asked: None,
            events: Vec::new(),
        };
        new.answer();
        new
    }

    /// Works until it is told to stop; all requests have ended then.
    pub fn run(mut self) {
        loop {
            let mut next = match self.engine.is_idle() {
                true => self.inbox.wait(IDLE),
                false => self.inbox.try_next(),
            };
            while let Some(command) = next {
                if let Command::Stop(why) = command {
                    return self.stop(&why);
                }
                self.obey(command);
                next = self.inbox.try_next();
            }
            if !self.engine.is_idle() {
                self.step();
            }
            self.take_stock();
            self.inbox.publish(self.snapshot.clone());
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(ticket, request, sink) => self.submit(ticket, *request, sink),
            Command::Cancel(ticket) => {
                if let Some(rid) = self.by_ticket.get(&ticket) {
                    self.cancel(*rid);
                }
            }
            Command::Ask => self.answer(),
            Command::Stop(_) => {}
        }
    }

    fn submit(&mut self, ticket: Ticket, request: GenerateRequest, sink: Sink) {
        match self.engine.submit(request) {
            Ok(rid) => {
                self.snapshot.submitted += 1;
                self.by_ticket.insert(ticket, rid);
                self.live.insert(rid, Live { ticket, sink, has_events: false });
            }
            Err(e) => {
                // Whoever is gone does not want to know.
                let _ = sink.put(Event::Failed(refusal(&e)));
            }
        }
    }

    /// Ends a request that nobody reads any more.
    fn cancel(&mut self, rid: RequestId) {
        self.engine.cancel(rid);
        let Some(live) = self.let_go(rid) else { return };
        match live.sink.has_enough() {
            true => self.snapshot.finished += 1,
            false => self.snapshot.cancelled += 1,
        }
    }

    fn let_go(&mut self, rid: RequestId) -> Option<Live> {
        let live = self.live.remove(&rid)?;
        self.by_ticket.remove(&live.ticket);
        Some(live)
    }

    fn step(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        events.extend_from_slice(self.engine.step());
        for event in events.drain(..) {
            self.pass_on(event);
        }
        self.events = events;
    }

    fn pass_on(&mut self, event: request::Event) {
        match event {
            request::Event::Prompt(rid, tokens) => self.put(rid, Event::Prompt(tokens)),
            request::Event::Token(rid, token) => {
                self.snapshot.generated_tokens += 1;
                self.put(rid, Event::Token(token));
            }
            request::Event::Finished(rid, reason, usage) => {
                self.snapshot.finished += 1;
                if let Some(live) = self.let_go(rid) {
                    if !live.has_events {
                        self.snapshot.cached_tokens += u64::from(usage.cached_tokens);
                    }
                    let _ = live.sink.put(Event::Finished(reason, usage));
                }
            }
            // Nobody asks for that over HTTP.
            request::Event::HandedOver(rid, _) => drop(self.let_go(rid)),
            request::Event::Failed(rid, why) => {
                self.snapshot.failed += 1;
                if let Some(live) = self.let_go(rid) {
                    let failure = Failure::new(why.kind.http_status(), why.message);
                    let _ = live.sink.put(Event::Failed(failure));
                }
            }
        }
    }

    /// Tells a request's reader, and ends the request when it is gone or too slow.
    fn put(&mut self, rid: RequestId, event: Event) {
        let Some(live) = self.live.get_mut(&rid) else { return };
        let mut is_read = true;
        if !std::mem::replace(&mut live.has_events, true)
            && let Some(usage) = self.engine.usage_of(rid)
        {
            self.snapshot.cached_tokens += u64::from(usage.cached_tokens);
            is_read = live.sink.put(Event::Cached(usage.cached_tokens));
        }
        if !(is_read && live.sink.put(event)) {
            self.cancel(rid);
        }
    }

    fn stop(&mut self, why: &Failure) {
        let all: Vec<RequestId> = self.live.keys().copied().collect();
        for rid in all {
            self.engine.cancel(rid);
            if let Some(live) = self.let_go(rid) {
                let _ = live.sink.put(Event::Failed(why.clone()));
            }
        }
        while let Some(command) = self.inbox.try_next() {
            if let Command::Submit(_, _, sink) = command {
                let _ = sink.put(Event::Failed(why.clone()));
            }
        }
        self.answer();
    }

    /// What is there to know without asking anybody.
    fn take_stock(&mut self) {
        let stats = self.engine.stats();
        let snapshot = &mut self.snapshot;
        (snapshot.waiting, snapshot.running) = self.engine.load();
        snapshot.steps = stats.steps;
        snapshot.prompt_tokens = stats.prefill_tokens;
        snapshot.preemptions = stats.preemptions;
        if self.engine.stopped() != snapshot.stopped.as_deref() {
            snapshot.stopped = self.engine.stopped().map(str::to_owned);
        }
        if self.engine.out_of_use() != snapshot.out_of_use.as_deref() {
            snapshot.out_of_use = self.engine.out_of_use().map(str::to_owned);
        }
    }

    /// Makes the state known with what resources say of themselves.
    fn answer(&mut self) {
        self.take_stock();
        if self.engine.is_idle() || self.asked.is_none_or(|asked| asked.elapsed() >= FRESH) {
            self.ask();
        }
        self.inbox.answer(self.snapshot.clone());
    }

    fn ask(&mut self) {
        self.asked = Some(Instant::now());
        let entries = self.engine.resources().entries();
        let usage = self.engine.usage();
        let resources = entries.iter().zip(usage).map(|(entry, usage)| ResourceSnapshot {
            key: usage.key,
            kind: usage.kind,
            plugin: usage.plugin,
            calls: usage.calls,
            time: usage.time,
            panics: usage.panics,
            is_faulted: usage.is_faulted,
            bad_values: usage.bad_values,
            restarts: usage.restarts,
            bytes: usage.bytes,
            state: serde_json::from_str(&entry.resource().inspect()).unwrap_or(Value::Null),
        });
        let resources: Arc<[ResourceSnapshot]> = resources.collect();
        let metrics = self.engine.services().metrics().into_iter();
        let metrics = metrics.map(|(name, metric)| match metric {
            Metric::Counter(n) => (name, snapshot::Metric::Counter(n)),
            Metric::Gauge(x) => (name, snapshot::Metric::Gauge(x)),
        });
        let metrics = Arc::new(metrics.collect());
        let snapshot = &mut self.snapshot;
        (snapshot.pages_used, snapshot.pages_total, snapshot.page_size) = (0, 0, 0);
        for state in resources.iter().map(|r| &r.state) {
            let of = |name: &str| state["pages"][name].as_u64().unwrap_or(0);
            snapshot.pages_total += of("total");
            snapshot.pages_used += of("used");
            let size = state["page_size"].as_u64().unwrap_or(0);
            snapshot.page_size = snapshot.page_size.max(size);
        }
        (snapshot.resources, snapshot.metrics) = (resources, metrics);
    }
}

fn refusal(e: &Error) -> Failure {
    Failure::new(e.kind().http_status(), e.to_string())
}
