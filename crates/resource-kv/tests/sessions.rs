//! Sessions: streams that outlive their request.

mod common;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{
    FailureReason, KvCache, KvPlan, LabelId, NodeId, PrefixWalk, RequestOverrides, Resource, WalkId,
};
use serde_json::Value;

const PAGE: u32 = 4;

struct Run {
    cache: Cache,
    next: u64,
}

impl Run {
    fn new(pages: u32) -> Self {
        let settings = format!(
            r#""pages": {}, "page_size": {PAGE}, "max_seq_len": 4096, "dtype": "f32", "host_pages": 9"#,
            pages + 1
        );
        let cache = cache_on(PlainHost::handle(), &settings, PAGE);
        let walk = PrefixWalk { label: MAIN, write: WalkId(0), decode: WalkId(0) };
        assert!(cache.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
        Run { cache, next: 1 }
    }

    fn ingest(&self, slot: u32, prompt: &[u32]) {
        let overrides = RequestOverrides::new("", prompt, 0);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

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

    fn retain(&self, slot: u32, name: &str) {
        self.cache.resource.retain_session(rid(slot), name).unwrap();
        self.cache.conserved();
    }

    fn adopt(&self, slot: u32, name: &str, len: u32) -> Option<u32> {
        let adopted = self.cache.resource.adopt_session(rid(slot), name, len).unwrap();
        self.cache.conserved();
        adopted
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }

    fn free(&self) -> u64 {
        self.cache.kv.free_pages()
    }

    fn sessions(&self) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state["sessions"].as_u64().unwrap()
    }
}

fn floats(tokens: &[u32]) -> Vec<f32> {
    tokens.iter().map(|&t| t as f32).collect()
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn a_session_moves_without_copies_and_goes_on_where_it_was() {
    let mut run = Run::new(20);
    run.ingest(0, &tokens(0..10));
    run.feed(0, 0, &tokens(0..10));
    run.feed(0, 1, &tokens(100..103));
    assert_eq!(run.free(), 16);
    run.retain(0, "chat");
    assert_eq!((run.cache.len(0, 0), run.free(), run.sessions()), (0, 16, 1));
    run.end(0);
    assert_eq!(run.free(), 16, "it outlives the request");
    run.ingest(1, &tokens(0..13));
    assert_eq!(run.adopt(1, "chat", 10), Some(10));
    assert_eq!((run.cache.len(1, 0), run.cache.len(1, 1), run.free()), (10, 3, 16));
    assert_eq!(run.feed(1, 0, &tokens(10..13)), floats(&tokens(0..13)));
    assert_eq!(run.feed(1, 1, &[103]), floats(&tokens(100..104)));
    assert_eq!((run.adopt(1, "chat", 10), run.sessions()), (Some(0), 0), "it is gone");
    run.end(1);
    assert_eq!(run.free(), 20);
}

#[test]
fn a_part_of_a_session_can_be_taken_up_and_shared_pages_stay_as_they_are() {
    let mut run = Run::new(20);
    run.ingest(0, &tokens(0..12));
    run.feed(0, 0, &tokens(0..12));
    run.retain(0, "chat");
    run.end(0);
    // A twin shares the session's pages.
    run.ingest(1, &tokens(0..12));
    let found = run.cache.resource.resolve_cached_prefix(rid(1), NodeId(0), WalkId(0)).unwrap();
    assert_eq!(found, Some(8));
    let inputs = tokens(0..12);
    let inputs = resource_api::PrefixInputs::new(&inputs);
    run.cache.resource.apply_cached_prefix(rid(1), NodeId(0), WalkId(0), &inputs, 8).unwrap();
    let mut other = tokens(0..6);
    other.extend([77, 78]);
    run.ingest(2, &other);
    assert_eq!(run.adopt(2, "chat", 6), Some(6));
    assert_eq!(run.feed(2, 0, &[77, 78]), floats(&other));
    assert_eq!(run.feed(1, 0, &tokens(8..12)), floats(&tokens(0..12)));
}

#[test]
fn unknown_sessions_names_used_twice_and_requests_that_have_begun() {
    let mut run = Run::new(20);
    run.ingest(0, &tokens(0..4));
    assert_eq!(run.adopt(0, "nobody", 3), Some(0));
    run.cache.resource.remove_session("nobody").unwrap();
    run.retain(0, "empty");
    assert_eq!(run.sessions(), 0, "there was nothing to keep");
    run.feed(0, 0, &tokens(0..4));
    run.retain(0, "chat");
    run.feed(0, 0, &tokens(50..59));
    assert!(run.cache.resource.adopt_session(rid(0), "chat", 4).is_err(), "it has begun");
    run.retain(0, "chat");
    assert_eq!((run.sessions(), run.free()), (1, 17), "what had the name has gone");
    run.ingest(1, &[]);
    assert_eq!(run.adopt(1, "chat", 100), Some(9), "not more than there is");
    assert_eq!(run.feed(1, 0, &[59]), floats(&tokens(50..60)));
    // Not while a step uses it.
    let step = Step::new(900, &[(1, 0, 1)]);
    assert!(run.cache.admit(&step).is_ready());
    assert!(run.cache.resource.retain_session(rid(1), "busy").is_err());
    run.cache.rollback(&step);
    run.retain(1, "gone");
    run.cache.resource.remove_session("gone").unwrap();
    run.cache.conserved();
    run.end(0);
    run.end(1);
    assert_eq!(run.free(), 20);
}

#[test]
fn the_oldest_session_makes_room_before_a_step_is_refused() {
    let mut run = Run::new(8);
    for slot in 0..3 {
        run.ingest(slot, &[]);
        run.feed(slot, 0, &tokens(slot * 100..slot * 100 + 8));
        run.retain(slot, &format!("s{slot}"));
    }
    assert_eq!((run.free(), run.sessions()), (2, 3));
    run.ingest(5, &[]);
    run.feed(5, 0, &tokens(500..516));
    assert_eq!(run.sessions(), 2);
    assert_eq!((run.adopt(0, "s0", 8), run.adopt(1, "s1", 8)), (Some(0), Some(8)));
    let step = Step::new(901, &[(5, 0, 13)]);
    let outcome = run.cache.admit(&step);
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    run.end(1);
    assert_eq!(run.feed(5, 0, &[516]).len(), 17);
}
