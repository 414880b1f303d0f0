//! Copies of pages to tiers and from them, and to where other workers read: while one is under way the
//! cache serves everybody else, and what changes meanwhile is noticed.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use common::*;
use resource_api::{
    Device, EngineResourceInfo, FailureReason, KvCache, KvCacheHandle, KvPlan, NodeId,
    PrefixInputs, PrefixWalk, RequestOverrides, Resource, TransferEngineInfo, WalkId,
    build_resource,
};
use resource_kv::Kv;
use serde_json::Value;

const WALK: WalkId = WalkId(0);

/// Stops whoever asks the host for something in the middle of a copy, once, until it is told.
struct Gate {
    is_shut: AtomicBool,
    begun: SyncSender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Gate {
    fn pass(&self) {
        if self.is_shut.swap(false, Ordering::SeqCst) {
            self.begun.send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        }
    }
}

struct Run {
    cache: Cache,
    gate: Arc<Gate>,
    begun: Receiver<()>,
    go_on: SyncSender<()>,
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

impl Run {
    /// A cache of pages of 4 tokens over host memory.
    fn new(pages: u32, host_pages: u32) -> Self {
        Self::over(pages, &format!(r#""host_pages": {host_pages}"#))
    }

    /// A cache of pages of 4 tokens over these tiers.
    fn over(pages: u32, tiers: &str) -> Self {
        let ((begun, has_begun), (go_on, may_go_on)) = (sync_channel(1), sync_channel(1));
        let gate =
            Arc::new(Gate { is_shut: AtomicBool::new(false), begun, go_on: Mutex::new(may_go_on) });
        let settings = format!(
            r#""pages": {}, "page_size": 4, "max_seq_len": 256, "dtype": "f32",
            {tiers}"#,
            pages + 1
        );
        let (host, at) = (TestHost::new(2, 1 << 30), gate.clone());
        assert!(host.0.hook.set(Box::new(move || at.pass())).is_ok());
        let mut info = EngineResourceInfo::new(Device::CPU, host.handle());
        let (engine, endpoint) = ("in-process".to_string(), String::new());
        info.transfer_engine_info = Some(TransferEngineInfo { engine, endpoint });
        let built = build_resource::<Kv>(&spec(&settings), &info).unwrap();
        let kv = built.capabilities[0].open::<KvCacheHandle>().unwrap();
        let walk = PrefixWalk { label: MAIN, write: WALK, decode: WALK };
        assert!(built.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
        let cache = Cache { resource: built.resource, kv, page_size: 4 };
        Run { cache, gate, begun: has_begun, go_on }
    }

    fn ingest(&self, slot: u32, prompt: &[u32]) {
        let overrides = RequestOverrides::new("", prompt, 4);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

    fn resolve(&self, slot: u32) -> Option<u32> {
        self.cache.resource.resolve_cached_prefix(rid(slot), NodeId(0), WALK).unwrap()
    }

    fn step(id: u64, slot: u32, ids: &[u32]) -> Step {
        let step = Step::new(id, &[(slot, 0, ids.len() as u32)]);
        Step { token_ids: ids.to_vec(), slot: (id % 3) as u32, ..step }
    }

    /// Plans, writes and commits a step of one row that was admitted; says what it reads.
    fn finish(&self, step: &Step) -> Vec<u32> {
        let filed = self.cache.plan(step).unwrap();
        let values: Vec<f32> = step.token_ids.iter().map(|&t| t as f32).collect();
        self.cache.write(step, filed, MAIN, &values);
        let read = self.cache.history(filed.open::<KvPlan>().unwrap(), 0);
        self.cache.commit(step).unwrap();
        self.cache.conserved();
        read.iter().map(|&v| v as u32).collect()
    }

    fn feed(&self, id: u64, slot: u32, ids: &[u32]) -> Vec<u32> {
        let step = Self::step(id, slot, ids);
        let outcome = self.cache.admit(&step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        self.finish(&step)
    }

    fn remove(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }

    /// A prompt that is computed and left to the cache.
    fn leave(&self, id: u64, slot: u32, prompt: &[u32]) {
        self.ingest(slot, prompt);
        self.feed(id, slot, prompt);
        self.remove(slot);
    }

    fn inspect(&self, path: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}: {state}"))
    }

    /// Runs `meanwhile` while `call` stands in the middle of a copy.
    fn during<R: Send>(
        &self,
        call: impl FnOnce(&Cache) -> R + Send,
        meanwhile: impl FnOnce(),
    ) -> R {
        self.gate.is_shut.store(true, Ordering::SeqCst);
        let cache = &self.cache;
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || call(cache));
            self.begun.recv().unwrap();
            // Also where something fails, so that nobody waits for ever.
            struct Open<'a>(&'a SyncSender<()>);
            impl Drop for Open<'_> {
                fn drop(&mut self) {
                    let _ = self.0.send(());
                }
            }
            let open = Open(&self.go_on);
            self.cache.conserved();
            meanwhile();
            self.cache.conserved();
            drop(open);
            let result = thread.join().unwrap();
            self.cache.conserved();
            result
        })
    }
}

fn resolve(cache: &Cache, slot: u32) -> Option<u32> {
    cache.resource.resolve_cached_prefix(rid(slot), NodeId(0), WALK).unwrap()
}

/// A pool of 20 pages, 10 of them free, that has the prompt `100..120`; a tier alone has the prompt `0..16`.
fn with_a_prompt_in_the_tier() -> Run {
    let run = Run::new(20, 32);
    run.leave(1, 0, &tokens(0..16));
    run.leave(2, 0, &tokens(200..264));
    run.leave(3, 0, &tokens(100..120));
    // Nothing is known of what it is made of, so that nothing of it is kept.
    run.ingest(0, &[]);
    run.feed(4, 0, &tokens(0..40));
    run.remove(0);
    assert_eq!((run.inspect("/pages/free"), run.inspect("/spilled")), (10, 15));
    run
}

#[test]
fn others_run_and_look_things_up_while_pages_come_back() {
    let run = with_a_prompt_in_the_tier();
    run.ingest(1, &tokens(0..17));
    let found = run.during(
        |cache| resolve(cache, 1),
        || {
            assert_eq!(run.inspect("/pages/free"), 6, "four are nobody else's");
            // Somebody who shares what lies here, and goes on from it.
            let prompt = tokens(100..119);
            run.ingest(2, &prompt);
            assert_eq!(run.resolve(2), Some(16));
            let inputs = PrefixInputs::new(&prompt);
            let resource = &run.cache.resource;
            resource.apply_cached_prefix(rid(2), NodeId(0), WALK, &inputs, 16).unwrap();
            assert_eq!(run.feed(10, 2, &prompt[16..]), prompt);
            // It leaves for the tier, and comes back.
            assert!(resource.offload(rid(2)).unwrap() > 0);
            assert!(resource.reload(rid(2)).unwrap());
            assert_eq!(run.inspect("/prefix/lookups"), 1, "the other has not asked yet");
        },
    );
    assert_eq!(found, Some(16));
    let prompt = tokens(0..17);
    let inputs = PrefixInputs::new(&prompt);
    run.cache.resource.apply_cached_prefix(rid(1), NodeId(0), WALK, &inputs, 16).unwrap();
    assert_eq!(run.feed(11, 1, &[16]), prompt);
    (1..=2).for_each(|slot| run.remove(slot));
    assert_eq!(run.cache.kv.free_pages(), 20);
}

#[test]
fn who_asks_for_pages_that_are_coming_back_waits_for_nobody() {
    let run = with_a_prompt_in_the_tier();
    let prompt = tokens(0..17);
    (1..=2).for_each(|slot| run.ingest(slot, &prompt));
    let found = run.during(|cache| resolve(cache, 1), || assert_eq!(run.resolve(2), Some(16)));
    assert_eq!(found, Some(16));
    assert_eq!(run.inspect("/restored"), 4, "the later copies are thrown away");
    for slot in 1..=2 {
        let inputs = PrefixInputs::new(&prompt);
        run.cache.resource.apply_cached_prefix(rid(slot), NodeId(0), WALK, &inputs, 16).unwrap();
    }
    assert_eq!(run.inspect("/pages/used"), 4, "both share them");
    assert_eq!(run.feed(11, 1, &[16]), prompt);
    assert_eq!(run.feed(12, 2, &[16]), prompt);
    (1..=2).for_each(|slot| run.remove(slot));
    assert_eq!(run.cache.kv.free_pages(), 20);
}

#[test]
fn a_copy_that_fails_on_the_way_back_costs_its_own_page_alone() {
    let page = (4 * LAYERS * 2) as usize * ROW * 4;
    let mut found = Vec::new();
    for slot in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pages");
        let run = Run::over(8, &format!(r#""disk_file": {file:?}, "disk_size": "1MiB""#));
        run.leave(1, 0, &tokens(0..16));
        run.ingest(0, &[]);
        run.feed(2, 0, &tokens(0..32));
        run.remove(0);
        assert_eq!((run.inspect("/pages/free"), run.inspect("/spilled")), (8, 4));
        let mut bytes = std::fs::read(&file).unwrap();
        assert_eq!(bytes.len(), 512 + 4 * (512 + page));
        bytes[512 + slot * (512 + page) + 512] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        for request in 1..=2 {
            run.ingest(request, &tokens(0..17));
            found.push(run.resolve(request).unwrap_or(0));
            run.remove(request);
        }
        assert_eq!((run.inspect("/restored"), run.inspect("/tier_failures")), (3, 1));
        assert_eq!((run.inspect("/pages/cached"), run.cache.kv.free_pages()), (3, 8));
    }
    let (first, again): (Vec<u32>, Vec<u32>) = found.chunks(2).map(|two| (two[0], two[1])).unzip();
    assert_eq!(first, again);
    found.sort_unstable();
    assert_eq!(found, [0, 0, 4, 4, 8, 8, 12, 12], "each page was the damaged one once");
}

#[test]
fn a_lookup_makes_room_for_what_comes_back_without_the_lock_too() {
    let run = Run::new(8, 32);
    run.leave(1, 0, &tokens(0..16));
    run.leave(2, 0, &tokens(200..228));
    run.ingest(1, &tokens(0..17));
    let found = run.during(
        |cache| resolve(cache, 1),
        || {
            let prompt = tokens(200..217);
            run.ingest(2, &prompt);
            assert_eq!(run.resolve(2), Some(16), "what stays while others leave");
        },
    );
    assert_eq!(found, Some(16));
    (1..=2).for_each(|slot| run.remove(slot));
    assert_eq!(run.cache.kv.free_pages(), 8);
}

#[test]
fn a_request_that_goes_while_pages_come_back_for_it_leaves_nothing_behind() {
    for again in [false, true] {
        let run = with_a_prompt_in_the_tier();
        run.ingest(1, &tokens(0..17));
        let found = run.during(
            |cache| resolve(cache, 1),
            || {
                run.remove(1);
                if again {
                    let overrides = RequestOverrides::new("", &[7, 7, 7], 4);
                    let next = resource_api::RequestId::new(1, 2);
                    run.cache.resource.ingest_request(next, &overrides).unwrap();
                }
            },
        );
        assert_eq!(found, None);
        assert_eq!(run.cache.kv.free_pages(), 20);
        // They have come back all the same, for whoever asks next.
        run.ingest(2, &tokens(0..17));
        assert_eq!(run.resolve(2), Some(16));
    }
}

#[test]
fn pages_that_leave_can_be_found_until_they_have_left() {
    let run = Run::new(8, 32);
    let kept = tokens(0..17);
    run.leave(1, 0, &kept);
    run.ingest(1, &tokens(50..62));
    assert_eq!(run.feed(2, 1, &tokens(50..53)), tokens(50..53));
    run.ingest(2, &tokens(300..328));
    // Two pages are free, of five that are kept three or more must go.
    let step = Run::step(3, 2, &tokens(300..320));
    let outcome = run.during(
        |cache| cache.admit(&step),
        || {
            assert_eq!(run.feed(4, 1, &[53]), tokens(50..54), "a step that needs no page");
            run.ingest(3, &kept);
            assert_eq!(run.resolve(3), Some(16));
            let outcome = run.cache.admit(&Run::step(5, 1, &tokens(54..66)));
            assert!(!outcome.is_ready(), "what leaves is nobody's yet");
            assert_eq!(outcome.reason(), FailureReason::ADMISSION_DEFERRED);
        },
    );
    // What was found stays: there is no room for the step now.
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED, "{}", outcome.message());
    let inputs = PrefixInputs::new(&kept);
    run.cache.resource.apply_cached_prefix(rid(3), NodeId(0), WALK, &inputs, 16).unwrap();
    assert_eq!(run.feed(6, 3, &[16]), kept);
    run.remove(3);
    let step = Run::step(7, 2, &tokens(300..320));
    assert!(run.cache.admit(&step).is_ready());
    assert_eq!(run.finish(&step), tokens(300..320));
    assert!(run.inspect("/spilled") >= 3);
    (1..=2).for_each(|slot| run.remove(slot));
    assert_eq!(run.cache.kv.free_pages(), 8);
}

#[test]
fn others_run_while_a_request_is_published_and_what_changes_is_not_told() {
    let run = Run::new(8, 8);
    let publish = |cache: &Cache| cache.resource.publish(rid(1)).unwrap();
    run.ingest(1, &tokens(0..12));
    run.feed(1, 1, &tokens(0..6));
    run.ingest(2, &tokens(50..60));
    let info = run.during(publish, || {
        assert_eq!(run.feed(2, 2, &tokens(50..59)), tokens(50..59));
        let outcome = run.cache.admit(&Run::step(3, 1, &[6]));
        let deferred = FailureReason::ADMISSION_DEFERRED;
        assert_eq!(outcome.reason(), deferred, "nobody writes to what is being read");
        assert!(run.cache.resource.offload(rid(1)).unwrap() == 0);
    });
    assert_eq!(info.unwrap().entries().next().map(|(_, len, _)| len), Some(6));
    assert_eq!(run.inspect("/published/leases"), 1);
    assert_eq!(run.feed(4, 1, &[6]), tokens(0..7), "it goes on");
    for is_removed in [false, true] {
        let info = run.during(publish, || match is_removed {
            true => run.remove(1),
            false => run.cache.resource.reset_request(rid(1), true).unwrap(),
        });
        assert!(info.is_none());
        assert_eq!(run.inspect("/published/leases"), 1, "nobody was told of the other");
        if !is_removed {
            run.feed(5, 1, &tokens(0..6));
        }
    }
    run.remove(2);
    assert_eq!(run.cache.kv.free_pages(), 8);
}

/// One request of a thread: it takes over what is found of its prompt, computes the rest, goes on, and perhaps
/// leaves, comes back, and is published on the way. What it reads is its own tokens every time.
fn live(cache: &Cache, slot: u32, round: u32, next: &AtomicU64) {
    let resource = &cache.resource;
    let base = 1000 * ((round * 7 + slot) % 5);
    // Prompts part within pages, and at their ends.
    let common = 9 + (round % 4) * 5;
    let mut prompt = tokens(base..base + common);
    prompt.extend(tokens(90_000 + slot..90_000 + slot + round % 3 + 1));
    resource.ingest_request(rid(slot), &RequestOverrides::new("", &prompt, 4)).unwrap();
    let mut has = resolve(cache, slot).unwrap_or(0) as usize;
    if has > 0 {
        let inputs = PrefixInputs::new(&prompt);
        let applied = resource.apply_cached_prefix(rid(slot), NodeId(0), WALK, &inputs, has as u32);
        // Where there is no page for the one that it goes on in, it computes everything.
        has = if applied.is_ok() { has } else { 0 };
    }
    let all: Vec<u32> = prompt.iter().copied().chain([5, 6]).collect();
    for (at, end) in [prompt.len(), prompt.len() + 1, prompt.len() + 2].into_iter().enumerate() {
        let ids = all[has..end].to_vec();
        let id = next.fetch_add(1, Ordering::Relaxed);
        let step = Step::new(id, &[(slot, 0, ids.len() as u32)]);
        let step = Step { token_ids: ids, slot, ..step };
        if !cache.admit(&step).is_ready() {
            break;
        }
        let filed = cache.plan(&step).unwrap();
        let values: Vec<f32> = step.token_ids.iter().map(|&t| t as f32).collect();
        cache.write(&step, filed, MAIN, &values);
        let read = cache.history(filed.open::<KvPlan>().unwrap(), 0);
        let read: Vec<u32> = read.iter().map(|&v| v as u32).collect();
        assert_eq!(read, all[..end], "slot {slot}, round {round}");
        match (round + at as u32) % 7 {
            0 => cache.rollback(&step),
            _ => cache.commit(&step).unwrap(),
        }
        has = cache.len(slot, 0) as usize;
        cache.conserved();
        match (round + slot + at as u32) % 5 {
            0 if resource.offload(rid(slot)).unwrap() > 0 => {
                let back = (0..1000).any(|_| {
                    std::thread::yield_now();
                    resource.reload(rid(slot)).unwrap()
                });
                if !back {
                    break;
                }
            }
            1 => drop(resource.publish(rid(slot))),
            _ => {}
        }
    }
    match round % 2 {
        0 => resource.reset_request(rid(slot), true).unwrap(),
        _ => resource.remove_request(rid(slot)).unwrap(),
    }
    resource.remove_request(rid(slot)).unwrap();
    cache.conserved();
}

/// Requests that take over what is found, move and are published, while another thread ends them at any time.
fn short_lives(cache: &Cache, slot: u32, round: u32) {
    let resource = &cache.resource;
    let base = 1000 * (round % 5);
    let prompt = tokens(base..base + 14);
    resource.ingest_request(rid(slot), &RequestOverrides::new("", &prompt, 4)).unwrap();
    if let Some(found) = resolve(cache, slot) {
        let inputs = PrefixInputs::new(&prompt);
        // It may be gone by now.
        let _ = resource.apply_cached_prefix(rid(slot), NodeId(0), WALK, &inputs, found);
    }
    match round % 3 {
        0 => drop(resource.publish(rid(slot))),
        _ => {
            let _ = resource.offload(rid(slot)).unwrap();
            let _ = resource.reload(rid(slot)).unwrap();
        }
    }
}

#[test]
fn threads_that_move_pages_all_ways_read_their_own_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pages");
    // 21 pages of the file.
    let tiers = format!(r#""host_pages": 6, "disk_file": {file:?}, "disk_size": "32KiB""#);
    let run = Run::over(20, &tiers);
    let next = AtomicU64::new(1);
    std::thread::scope(|threads| {
        for slot in 0..4 {
            let (cache, next) = (&run.cache, &next);
            threads.spawn(move || (0..150).for_each(|round| live(cache, slot, round, next)));
        }
        let cache = &run.cache;
        threads.spawn(move || (0..600).for_each(|round| short_lives(cache, 4, round)));
        threads.spawn(move || {
            for round in 0..1200 {
                match round % 3 {
                    0 => cache.resource.reset_request(rid(4), round % 2 == 0).unwrap(),
                    _ => cache.resource.remove_request(rid(4)).unwrap(),
                }
                cache.conserved();
                std::thread::yield_now();
            }
        });
    });
    run.remove(4);
    run.cache.conserved();
    assert_eq!(run.cache.kv.free_pages(), 20);
    assert!(run.inspect("/restored") > 50 && run.inspect("/spilled") > 50);
    assert_eq!((run.inspect("/tiers/0/held"), run.inspect("/tiers/1/held")), (0, 0));
    assert_eq!(run.inspect("/tier_failures"), 0);
}
