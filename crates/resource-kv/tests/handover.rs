//! Streams that go on in another cache: what arrives, what it costs, and what fails alone.

mod common;

use std::time::{Duration, Instant};

use common::*;
use resource_api::host::PlainHost;
use resource_api::{
    AdmitOutcome, Device, EngineResourceInfo, FailureReason, KvCache, KvCacheHandle, KvPlan,
    LabelId, NodeId, PrefixWalk, PublishedInfo, RequestOverrides, Resource, TransferEngineInfo,
    WalkId, build_resource,
};
use resource_kv::Kv;
use serde_json::Value;

const PAGE: u32 = 4;

struct Worker {
    cache: Cache,
    next: u64,
}

impl Worker {
    fn with(pages: u32, more: &str, engine: &str, endpoint: &str) -> Self {
        let settings = format!(
            r#""pages": {}, "page_size": {PAGE}, "max_seq_len": 4096, "dtype": "f32"{more}"#,
            pages + 1
        );
        let mut info = EngineResourceInfo::new(Device::CPU, PlainHost::handle());
        let (engine, endpoint) = (engine.to_string(), endpoint.to_string());
        info.transfer_engine_info = Some(TransferEngineInfo { engine, endpoint });
        let built = build_resource::<Kv>(&spec(&settings), &info).unwrap();
        let kv = built.capabilities[0].open::<KvCacheHandle>().unwrap();
        let walk = PrefixWalk { label: MAIN, write: WalkId(0), decode: WalkId(0) };
        assert!(built.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
        Worker { cache: Cache { resource: built.resource, kv, page_size: PAGE }, next: 1 }
    }

    fn new(pages: u32, more: &str) -> Self {
        Self::with(pages, more, "in-process", "")
    }

    fn ingest(&self, slot: u32, prompt: &[u32]) {
        let overrides = RequestOverrides::new("", prompt, 20);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

    /// Runs a step of one row and says what it reads.
    fn feed(&mut self, slot: u32, label: u32, ids: &[u32]) -> Vec<f32> {
        self.next += 1;
        let step = Step::new(self.next, &[(slot, label, ids.len() as u32)]);
        let step = Step { token_ids: ids.to_vec(), ..step };
        let outcome = self.cache.admit(&step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        let filed = self.cache.plan(&step).unwrap();
        let values: Vec<f32> = ids.iter().map(|&t| t as f32).collect();
        self.cache.write(&step, filed, LabelId(label), &values);
        let read = self.cache.history(filed.open::<KvPlan>().unwrap(), 0);
        self.cache.commit(&step).unwrap();
        self.cache.conserved();
        read
    }

    fn publish(&self, slot: u32) -> Option<PublishedInfo> {
        self.cache.resource.publish(rid(slot)).unwrap()
    }

    fn ask(&self, slot: u32, info: &PublishedInfo) -> AdmitOutcome {
        let r = &self.cache.resource;
        let outcome = r.admit_retrieve(rid(slot), NodeId(0), WalkId(0), Some(info)).unwrap();
        self.cache.conserved();
        outcome
    }

    /// Asks until there is an answer.
    fn retrieve(&self, slot: u32, info: &PublishedInfo) -> AdmitOutcome {
        let begun = Instant::now();
        loop {
            let outcome = self.ask(slot, info);
            if !outcome.is_ok() || outcome.is_ready() {
                return outcome;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "it never arrives");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn inspect(&self, path: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}"))
    }

    fn free(&self) -> u64 {
        self.cache.kv.free_pages()
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }
}

fn floats(tokens: &[u32]) -> Vec<f32> {
    tokens.iter().map(|&t| t as f32).collect()
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Through bytes, as between processes.
fn sent(info: &PublishedInfo) -> PublishedInfo {
    PublishedInfo::from_bytes(&info.to_bytes()).unwrap()
}

#[test]
fn all_streams_go_on_elsewhere_under_another_id() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    for engine in ["in-process", "shared-memory"] {
        let mut from = Worker::with(20, "", engine, path);
        let mut to = Worker::with(20, "", engine, path);
        // Exactly two pages: the next token begins a page that only the other side has.
        from.ingest(3, &tokens(0..8));
        from.feed(3, 0, &tokens(0..8));
        from.feed(3, 1, &tokens(100..103));
        let info = from.publish(3).unwrap();
        assert_eq!((info.kind(), info.version()), ("kv", 1));
        assert_eq!(from.publish(3).as_ref(), Some(&info), "nothing has changed");
        from.end(3);
        assert_eq!(from.inspect("/published/leases"), 2, "leases outlast the request");
        to.ingest(0, &tokens(0..8));
        assert!(to.retrieve(0, &sent(&info)).is_ready());
        assert_eq!((to.cache.len(0, 0), to.cache.len(0, 1), to.free()), (8, 3, 17));
        assert_eq!(from.inspect("/published/leases"), 0, "freed when told");
        assert!(to.ask(0, &sent(&info)).is_ready(), "asked again, it is there");
        let mut all = tokens(0..8);
        all.push(7);
        assert_eq!(to.feed(0, 0, &[7]), floats(&all));
        let mut other = tokens(100..103);
        other.push(8);
        assert_eq!(to.feed(0, 1, &[8]), floats(&other));
        // What has arrived is found by others.
        to.ingest(1, &tokens(0..9));
        let found = to.cache.resource.resolve_cached_prefix(rid(1), NodeId(0), WalkId(0)).unwrap();
        assert_eq!(found, Some(8));
        to.end(1);
        to.end(0);
        assert_eq!((to.free(), from.free()), (20, 20));
    }
}

#[test]
fn a_worker_does_not_read_what_it_has_published_itself() {
    let mut worker = Worker::new(20, "");
    worker.ingest(0, &tokens(0..8));
    worker.feed(0, 0, &tokens(0..8));
    let info = worker.publish(0).unwrap();
    assert!(worker.ask(0, &info).is_ready());
    worker.ingest(1, &tokens(0..8));
    assert!(worker.ask(1, &info).is_ready());
    assert_eq!((worker.cache.len(1, 0), worker.inspect("/published/leases")), (0, 1));
    assert!(worker.publish(1).is_none(), "it has nothing");
}

#[test]
fn pages_that_are_here_already_are_not_read() {
    let (mut from, mut to) = (Worker::new(20, ""), Worker::new(20, ""));
    let prompt = tokens(0..14);
    from.ingest(0, &prompt);
    from.feed(0, 0, &prompt);
    to.ingest(0, &prompt);
    to.feed(0, 0, &prompt);
    to.ingest(1, &prompt);
    assert!(to.retrieve(1, &from.publish(0).unwrap()).is_ready());
    // Three are shared, the tail is its own.
    assert_eq!(to.free(), 20 - 4 - 1);
    let mut all = prompt.clone();
    all.push(50);
    assert_eq!(to.feed(1, 0, &[50]), floats(&all));
}

#[test]
fn what_does_not_fit_waits_and_takes_nothing() {
    let (mut from, mut to) = (Worker::new(20, ""), Worker::new(9, ""));
    from.ingest(0, &tokens(0..14));
    from.feed(0, 0, &tokens(0..14));
    let info = from.publish(0).unwrap();
    to.ingest(1, &[]);
    to.feed(1, 0, &tokens(500..524));
    to.ingest(0, &tokens(0..14));
    let outcome = to.ask(0, &info);
    assert_eq!((outcome.reason(), outcome.amounts()), (FailureReason::ALLOCATION_FAILED, (4, 3)));
    assert_eq!(to.free(), 3);
    to.end(1);
    assert!(to.retrieve(0, &info).is_ready());
    assert_eq!(to.cache.len(0, 0), 14);
}

#[test]
fn a_read_that_comes_too_late_fails_its_request_and_no_other() {
    let (mut from, to) = (Worker::new(20, r#", "transfer_lease": 0.02"#), Worker::new(20, ""));
    for slot in 0..2 {
        from.ingest(slot, &tokens(0..14));
        from.feed(slot, 0, &tokens(slot * 100..slot * 100 + 14));
    }
    let late = from.publish(0).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    // The region notices when it is used next.
    let good = from.publish(1).unwrap();
    to.ingest(0, &tokens(0..14));
    to.ingest(1, &tokens(100..114));
    assert!(to.retrieve(1, &good).is_ready());
    let outcome = to.retrieve(0, &late);
    assert_eq!(outcome.reason(), FailureReason::RUNTIME_ERROR);
    assert!(outcome.message().contains("the lease on page"), "{}", outcome.message());
    assert_eq!(to.ask(0, &good).reason(), FailureReason::RUNTIME_ERROR, "for good");
    assert_eq!((to.cache.len(0, 0), to.cache.len(1, 0)), (0, 14));
    assert_eq!((to.free(), to.inspect("/quarantined")), (16, 0));
}

#[test]
fn a_request_that_goes_while_its_state_arrives_leaves_no_page_behind() {
    let (mut from, to) = (Worker::new(200, ""), Worker::new(200, ""));
    from.ingest(0, &[]);
    from.feed(0, 0, &tokens(0..700));
    for round in 0..20 {
        from.cache.kv.correct_len(rid(0), MAIN, 700 - round).unwrap();
        let info = from.publish(0).unwrap();
        to.ingest(0, &[]);
        assert!(!to.ask(0, &info).is_ready());
        assert!(to.cache.resource.reclaimable(rid(0)).unwrap() == 0);
        match round % 2 {
            0 => to.end(0),
            _ => to.cache.resource.reset_request(rid(0), true).unwrap(),
        }
        let begun = Instant::now();
        while to.free() < 200 {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{} pages are lost",
                200 - to.free()
            );
            to.ingest(5, &[]);
            to.end(5);
        }
        to.end(0);
    }
}

#[test]
fn state_of_something_else_is_refused_in_one_line() {
    let (mut from, to) = (Worker::new(20, ""), Worker::new(20, ""));
    from.ingest(0, &tokens(0..6));
    from.feed(0, 0, &tokens(0..6));
    let good = from.publish(0).unwrap();
    let (_, body) = good.get("main").unwrap();
    let body: Value = serde_json::from_slice(body).unwrap();
    let altered = |pointer: &str, value: Value| {
        let mut body = body.clone();
        *body.pointer_mut(pointer).unwrap() = value;
        let mut info = PublishedInfo::new("kv", 1);
        info.set("main", 6, serde_json::to_vec(&body).unwrap());
        info
    };
    let mut cut = PublishedInfo::new("kv", 1);
    cut.set("main", 6, b"{".to_vec());
    for (slot, (info, said)) in [
        (PublishedInfo::new("positions", 1), "state of positions/1"),
        (PublishedInfo::new("kv", 9), "state of kv/9"),
        (cut, "is malformed"),
        (altered("/layout", "kv/1;layers=3".into()), "those of this cache"),
        (altered("/len", 5000.into()), "do not fit"),
        (altered("/len", 16.into()), "contradicts itself"),
        (altered("/pages/address/engine", "smoke".into()), "an address of \"smoke\""),
        (altered("/pages/address/endpoint", "nowhere".into()), "no engine of this process has it"),
    ]
    .into_iter()
    .enumerate()
    {
        to.ingest(slot as u32, &tokens(0..6));
        let outcome = to.retrieve(slot as u32, &info);
        let message = outcome.message();
        assert_eq!(outcome.reason(), FailureReason::RUNTIME_ERROR, "{said}");
        assert!(message.contains(said) && !message.contains('\n'), "{message}");
        assert_eq!(to.free(), 20, "{said}");
    }
    assert!(!to.ask(99, &good).is_ok(), "a request that nobody knows");
    to.ingest(50, &tokens(0..6));
    assert!(to.retrieve(50, &good).is_ready());
}

#[test]
fn a_region_that_is_full_says_so() {
    let mut from = Worker::new(20, r#", "transfer_pages": 3"#);
    from.ingest(0, &tokens(0..8));
    from.feed(0, 0, &tokens(0..8));
    from.ingest(1, &tokens(20..28));
    from.feed(1, 0, &tokens(20..28));
    let first = from.publish(0).unwrap();
    let error = from.cache.resource.publish(rid(1)).unwrap_err();
    assert!(error.message().contains("1 free pages and 2 are needed"), "{error}");
    let to = Worker::new(20, "");
    to.ingest(0, &tokens(0..8));
    assert!(to.retrieve(0, &first).is_ready());
    assert!(from.publish(1).is_some(), "the first was read");
}

#[test]
fn leaving_the_pool_does_not_change_what_is_published() {
    let mut worker = Worker::new(20, r#", "host_pages": 20"#);
    worker.ingest(0, &tokens(0..8));
    worker.feed(0, 0, &tokens(0..8));
    let info = worker.publish(0).unwrap();
    assert!(worker.cache.resource.offload(rid(0)).unwrap() > 0);
    assert!(worker.publish(0).is_none(), "not while it is away");
    assert!(worker.cache.resource.reload(rid(0)).unwrap());
    assert_eq!(worker.publish(0), Some(info.clone()), "the same contents, the same lease");
    worker.cache.kv.correct_len(rid(0), MAIN, 7).unwrap();
    worker.feed(0, 0, &[9]);
    assert_ne!(worker.publish(0), Some(info), "as long, and another generation");
}
