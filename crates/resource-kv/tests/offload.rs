//! Requests that leave the pool for host memory and come back: what moves, what stays, and what is
//! refused meanwhile.

mod common;

use common::*;
use resource_api::host::PlainHost;
use resource_api::{
    FailureReason, KvCache, KvPlan, KvStepOptions, NodeId, PlanVec, PrefixInputs, PrefixWalk,
    RequestOverrides, Resource, WalkId,
};
use serde_json::Value;

const PAGE: u32 = 4;

/// Tokens double as contents.
struct Run {
    cache: Cache,
    next: u64,
}

impl Run {
    fn new(pages: u32, tiers: &str) -> Self {
        let settings = format!(
            r#""pages": {}, "page_size": {PAGE}, "max_seq_len": 4096, "dtype": "f32", {tiers}"#,
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

    fn step(&mut self, rows: &[(u32, u32, u32)], ids: &[u32]) -> Step {
        self.next += 1;
        Step { token_ids: ids.to_vec(), ..Step::new(self.next, rows) }
    }

    /// Runs a step of one row and says what it reads.
    fn feed(&mut self, slot: u32, label: u32, ids: &[u32]) -> Vec<f32> {
        let step = self.step(&[(slot, label, ids.len() as u32)], ids);
        let outcome = self.cache.admit(&step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        let filed = self.cache.plan(&step).unwrap();
        let values: Vec<f32> = ids.iter().map(|&t| t as f32).collect();
        self.cache.write(&step, filed, resource_api::LabelId(label), &values);
        let read = self.cache.history(filed.open::<KvPlan>().unwrap(), 0);
        self.cache.commit(&step).unwrap();
        self.cache.conserved();
        read
    }

    /// A prompt, with what is cached skipped; how much that was.
    fn prompt(&mut self, slot: u32, prompt: &[u32]) -> u32 {
        self.ingest(slot, prompt);
        let node = NodeId(0);
        let r = &self.cache.resource;
        let found = r.resolve_cached_prefix(rid(slot), node, WalkId(0)).unwrap().unwrap_or(0);
        let inputs = PrefixInputs::new(prompt);
        if found > 0 {
            r.apply_cached_prefix(rid(slot), node, WalkId(0), &inputs, found).unwrap();
        }
        let read = self.feed(slot, 0, &prompt[found as usize..]);
        assert_eq!(read, floats(prompt));
        found
    }

    fn offload(&self, slot: u32) -> u64 {
        let freed = self.cache.resource.offload(rid(slot)).unwrap();
        self.cache.conserved();
        freed
    }

    fn reload(&self, slot: u32) -> bool {
        let back = self.cache.resource.reload(rid(slot)).unwrap();
        self.cache.conserved();
        back
    }

    fn free(&self) -> u64 {
        self.cache.kv.free_pages()
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }

    fn inspect(&self, path: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}"))
    }
}

fn floats(tokens: &[u32]) -> Vec<f32> {
    tokens.iter().map(|&t| t as f32).collect()
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn a_request_comes_back_with_all_of_its_streams() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.ingest(0, &[]);
    run.feed(0, 0, &tokens(0..10));
    run.feed(0, 1, &tokens(100..103));
    run.cache.kv.protect_prefix(rid(0), MAIN, 4).unwrap();
    assert_eq!((run.cache.resource.reclaimable(rid(0)).unwrap(), run.free()), (4, 16));
    assert_eq!((run.offload(0), run.free()), (4, 20));
    let r = &run.cache.resource;
    assert!(r.is_offloaded(rid(0)).unwrap() && r.can_reload(rid(0)).unwrap());
    assert_eq!((r.reclaimable(rid(0)).unwrap(), run.offload(0)), (0, 0), "it is away already");
    assert_eq!((run.cache.len(0, 0), run.cache.len(0, 1)), (10, 3), "lengths stay known");
    // Others write all over the pool meanwhile.
    run.ingest(1, &[]);
    run.feed(1, 0, &tokens(500..580));
    run.end(1);
    assert!(run.reload(0) && !run.cache.resource.is_offloaded(rid(0)).unwrap());
    assert_eq!(run.free(), 16);
    let mut all = tokens(0..10);
    all.push(7);
    assert_eq!(run.feed(0, 0, &[7]), floats(&all));
    let mut other = tokens(100..103);
    other.push(8);
    assert_eq!(run.feed(0, 1, &[8]), floats(&other));
    assert_eq!(
        run.cache.kv.release_oldest(rid(0), MAIN, 4).unwrap(),
        4,
        "behind what is protected"
    );
    assert_eq!(run.inspect("/tiers/0/free"), 20);
}

#[test]
fn without_a_place_to_go_nothing_leaves() {
    let mut run = Run::new(20, r#""host_pages": 0"#);
    assert!(!run.cache.resource.supports_eviction());
    run.prompt(0, &tokens(0..10));
    assert_eq!((run.cache.resource.reclaimable(rid(0)).unwrap(), run.offload(0)), (0, 0));
    assert!(run.reload(0), "it is here");
    let mut run = Run::new(20, r#""host_pages": 2"#);
    assert!(run.cache.resource.supports_eviction());
    run.prompt(0, &tokens(0..12));
    let before = run.cache.resource.inspect();
    assert_eq!(run.offload(0), 0, "three pages do not fit into two");
    assert_eq!(run.cache.resource.inspect(), before);
    run.feed(0, 0, &[99]);
    run.prompt(1, &tokens(50..58));
    assert_eq!(run.offload(1), 2, "another one does");
}

#[test]
fn shared_pages_stay_and_stay_shared() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..14));
    assert_eq!(run.prompt(1, &tokens(0..14)), 12);
    // Three pages are shared; each has a tail of its own.
    assert_eq!(run.free(), 20 - 5);
    assert_eq!((run.offload(0), run.offload(1)), (1, 1));
    assert_eq!((run.free(), run.inspect("/tiers/0/held")), (17, 2));
    assert!(run.reload(1) && run.reload(0));
    assert_eq!(run.free(), 15);
    let mut all = tokens(0..14);
    all.push(77);
    assert_eq!(run.feed(0, 0, &[77]), floats(&all));
    *all.last_mut().unwrap() = 78;
    assert_eq!(run.feed(1, 0, &[78]), floats(&all));
}

#[test]
fn cached_pages_that_are_still_there_are_taken_back_and_not_copied() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..14));
    assert_eq!((run.offload(0), run.inspect("/pages/cached")), (4, 3));
    // A twin finds them in the pool, and they are shared when the first comes back.
    assert_eq!(run.prompt(1, &tokens(0..14)), 12);
    assert!(run.reload(0));
    assert_eq!(run.free(), 15);
    // Slots of known prefixes are kept, the tail's is free.
    assert_eq!((run.inspect("/tiers/0/cached"), run.inspect("/tiers/0/free")), (3, 17));
    assert_eq!((run.offload(0), run.inspect("/tiers/0/held")), (1, 1));
}

#[test]
fn steps_and_copies_of_a_request_that_is_away_are_refused_and_take_nothing() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..10));
    run.prompt(1, &tokens(50..60));
    run.offload(0);
    let before = run.cache.resource.inspect();
    let fork = |options: fn(PlanVec<resource_api::Fork>) -> KvStepOptions| {
        let mut forks = PlanVec::default();
        forks.push(fork(0, 0, 1));
        options(forks)
    };
    let pre = fork(|pre_forks| KvStepOptions { pre_forks, ..Default::default() });
    let post = fork(|post_forks| KvStepOptions { post_forks, ..Default::default() });
    let steps = [
        run.step(&[(0, 0, 1)], &[1]),
        run.step(&[(0, 0, 0)], &[]),
        run.step(&[(0, 1, 1)], &[1]),
        run.step(&[(1, 0, 1), (0, 0, 1)], &[1, 2]),
        run.step(&[(1, 0, 1)], &[1]).with(pre),
        run.step(&[(1, 0, 1)], &[1]).with(post),
    ];
    for step in &steps {
        let outcome = run.cache.admit(step);
        assert_eq!(outcome.reason(), FailureReason::REQUEST_OFFLOADING, "{}", outcome.message());
        assert_eq!(outcome.request_id(), rid(0));
        run.cache.rollback(step);
        assert_eq!(run.cache.resource.inspect(), before);
    }
    let kv = &run.cache.kv;
    for refused in [
        kv.correct_len(rid(0), MAIN, 4).unwrap_err(),
        kv.protect_prefix(rid(0), MAIN, 4).unwrap_err(),
        kv.release_oldest(rid(0), MAIN, 4).unwrap_err(),
    ] {
        assert!(refused.message().contains("off the device"), "{refused}");
    }
    let mut all = tokens(50..60);
    all.push(3);
    assert_eq!(run.feed(1, 0, &[3]), floats(&all), "others go on");
}

#[test]
fn a_request_in_a_step_stays() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..10));
    for preplan in [false, true] {
        let mut step = run.step(&[(0, 0, 1)], &[5]);
        step.preplan = preplan;
        assert!(run.cache.admit(&step).is_ready());
        let before = run.cache.resource.inspect();
        assert_eq!((run.cache.resource.reclaimable(rid(0)).unwrap(), run.offload(0)), (0, 0));
        assert_eq!(run.cache.resource.inspect(), before);
        run.cache.rollback(&step);
    }
    assert_eq!(run.offload(0), 3);
}

#[test]
fn a_reload_that_does_not_fit_moves_nothing_and_succeeds_later() {
    let mut run = Run::new(6, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..14));
    run.offload(0);
    run.prompt(1, &tokens(50..66));
    let before = run.cache.resource.inspect();
    let r = &run.cache.resource;
    assert!(!r.can_reload(rid(0)).unwrap() && !run.reload(0));
    assert_eq!(run.cache.resource.inspect(), before);
    run.end(1);
    // What the other one left is cached, and makes room.
    assert_eq!(run.inspect("/pages/cached"), 6);
    assert!(run.cache.resource.can_reload(rid(0)).unwrap() && run.reload(0));
    let mut all = tokens(0..14);
    all.push(1);
    assert_eq!(run.feed(0, 0, &[1]), floats(&all));
}

#[test]
fn a_request_that_goes_while_it_is_away_leaves_nothing() {
    let mut run = Run::new(20, r#""host_pages": 20"#);
    run.prompt(0, &tokens(0..10));
    run.prompt(1, &tokens(0..10));
    run.offload(0);
    run.end(0);
    run.end(1);
    assert_eq!((run.free(), run.inspect("/tiers/0/held"), run.inspect("/away")), (20, 0, 0));
    // The same for one that starts anew.
    run.prompt(2, &tokens(20..30));
    run.offload(2);
    run.cache.resource.reset_request(rid(2), true).unwrap();
    run.cache.conserved();
    assert!(!run.cache.resource.is_offloaded(rid(2)).unwrap() && run.reload(2));
    assert_eq!((run.cache.len(2, 0), run.free()), (0, 20));
    assert_eq!(run.feed(2, 0, &tokens(20..30)), floats(&tokens(20..30)));
}

#[test]
fn evicted_prefixes_fall_to_host_memory_and_come_back_by_key() {
    let mut run = Run::new(8, r#""host_pages": 20"#);
    let prompt = tokens(0..30);
    run.prompt(0, &prompt);
    run.end(0);
    run.prompt(1, &tokens(500..530));
    run.end(1);
    assert!(run.inspect("/prefix/evictions") >= 6 && run.inspect("/spilled") >= 6);
    assert_eq!(run.prompt(2, &prompt), 28, "as much as if the pool were larger");
    assert!(run.inspect("/restored") > 0);
    run.end(2);
    assert_eq!(run.prompt(3, &tokens(500..530)), 28);
}

#[test]
fn a_request_that_is_away_without_tokens_is_found_no_prefix() {
    let mut run = Run::new(16, r#""host_pages": 8"#);
    run.prompt(0, &tokens(0..9));
    run.ingest(1, &tokens(0..9));
    run.feed(1, 0, &[0, 1]);
    run.cache.resource.reset_request(rid(1), false).unwrap();
    assert_eq!(run.offload(1), 1, "it has kept its page");
    let resolve =
        |run: &Run| run.cache.resource.resolve_cached_prefix(rid(1), NodeId(0), WalkId(0)).unwrap();
    assert_eq!(resolve(&run), None);
    assert!(run.reload(1));
    assert_eq!(resolve(&run), Some(8));
}

#[test]
fn what_prompts_have_in_common_within_a_page_comes_from_a_tier_too() {
    let mut run = Run::new(4, r#""host_pages": 8"#);
    run.prompt(0, &tokens(0..12));
    run.end(0);
    run.prompt(1, &tokens(50..66));
    run.end(1);
    let parted = [tokens(0..7), vec![90, 91]].concat();
    assert_eq!(run.prompt(2, &parted), 7);
    run.end(2);
    // What fell there whole is as it was.
    run.prompt(3, &tokens(50..66));
    run.end(3);
    assert_eq!(run.prompt(4, &tokens(0..13)), 12);
    run.end(4);
    assert_eq!(run.free(), 4);
}

#[test]
fn a_file_serves_prefixes_to_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pages");
    let tiers = format!(r#""disk_file": {file:?}, "disk_size": "1MiB""#);
    let prompt = tokens(0..30);
    let mut run = Run::new(8, &tiers);
    run.prompt(0, &prompt);
    run.end(0);
    run.prompt(1, &tokens(500..530));
    drop(run);
    let mut run = Run::new(8, &tiers);
    assert_eq!(run.prompt(0, &prompt), 28);
    run.end(0);
    drop(run);
    // A flipped byte is a miss, from there on.
    let mut bytes = std::fs::read(&file).unwrap();
    let len = bytes.len();
    bytes[512..len].iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(&file, &bytes).unwrap();
    let mut run = Run::new(8, &tiers);
    assert_eq!(run.prompt(0, &prompt), 0);
}

#[test]
fn what_prompts_have_in_common_within_a_page_is_found_after_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    for (at, host) in ["", r#""host_pages": 3, "#].into_iter().enumerate() {
        let file = dir.path().join(at.to_string());
        let tiers = format!(r#"{host}"disk_file": {file:?}, "disk_size": "1MiB""#);
        let mut run = Run::new(8, &tiers);
        // The last page is that in which a prompt ends, and it is not whole.
        run.prompt(0, &tokens(0..15));
        run.end(0);
        // What makes room leaves for the file, twice the pool of it, so that host memory is full, too.
        for slot in 1..3 {
            run.prompt(slot, &tokens(500 * slot..500 * slot + 30));
            run.end(slot);
        }
        for round in 0..2 {
            drop(run);
            run = Run::new(8, &tiers);
            for (slot, common) in [(0, 7), (1, 14), (2, 4), (3, 11)] {
                let other = 90 + 10 * round;
                let prompt = [tokens(0..common), tokens(other..other + 3)].concat();
                assert_eq!(run.prompt(slot, &prompt), common, "{host:?}, round {round}");
                run.end(slot);
                // Out of the pool with it, so that the next one comes from the file as well.
                run.prompt(4, &tokens(900 + 100 * common..930 + 100 * common));
                run.end(4);
            }
        }
    }
}

#[test]
fn a_damaged_page_of_a_request_is_told_and_it_can_start_anew() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pages");
    let mut run = Run::new(8, &format!(r#""disk_file": {file:?}, "disk_size": "1MiB""#));
    run.prompt(0, &tokens(0..11));
    run.offload(0);
    // The pool forgets them.
    run.ingest(1, &[]);
    run.feed(1, 0, &tokens(100..132));
    run.end(1);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[1024] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let error = run.cache.resource.reload(rid(0)).unwrap_err();
    assert!(error.message().contains("its digest does not match its contents"), "{error}");
    run.cache.conserved();
    assert!(run.cache.resource.is_offloaded(rid(0)).unwrap());
    run.cache.resource.reset_request(rid(0), true).unwrap();
    run.cache.conserved();
    assert_eq!(run.feed(0, 0, &tokens(0..11)), floats(&tokens(0..11)));
}

#[test]
fn what_the_settings_say_of_tiers_is_checked() {
    let refused = |tiers: &str| {
        let settings = format!(r#""pages": 9, "page_size": 4, {tiers}"#);
        let error = try_cache_on(PlainHost::handle(), &settings).err();
        error.unwrap_or_else(|| panic!("accepted {tiers}")).to_string()
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pages");
    for (tiers, said) in [
        (r#""host_pages": 3, "host_memory": "1MiB""#.to_string(), "set one of them"),
        (r#""host_memory": "1B""#.to_string(), "no room for a page"),
        (r#""host_memory": "lots""#.to_string(), "`host_memory` is \"lots\""),
        (r#""disk_size": "1MiB""#.to_string(), "`disk_file` is not"),
        (format!(r#""disk_file": {file:?}"#), "say how large"),
        (format!(r#""disk_file": {file:?}, "disk_size": "80%""#), "not a share"),
        (format!(r#""disk_file": {file:?}, "disk_size": "9B""#), "no room for a page"),
        (r#""disk_file": "/", "disk_size": "1MiB""#.to_string(), "`disk_file` \"/\""),
    ] {
        let message = refused(&tiers);
        assert!(message.contains(said) && message.starts_with("[resources.main_kv]"), "{message}");
    }
    // Host memory counts against the engine's budget.
    let host = TestHost::new(1, 100_000);
    let settings = r#""pages": 9, "page_size": 4, "dtype": "f32", "host_pages": 1000"#;
    assert!(try_cache_on(host.handle(), settings).is_err());
    let cache = cache_on(host.handle(), &settings.replace("1000", "100"), 4);
    let page = u64::from(4 * LAYERS * 2) * ROW as u64 * 4;
    assert_eq!(host.0.free.load(std::sync::atomic::Ordering::Relaxed), 100_000 - 109 * page);
    drop(cache);
    assert_eq!(host.0.free.load(std::sync::atomic::Ordering::Relaxed), 100_000);
}
