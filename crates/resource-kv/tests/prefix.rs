//! The prefix cache: what is found, what is shared, what is evicted, and who owns what meanwhile.

mod common;

use common::*;
use resource_api::{
    AdmitOutcome, FailureReason, KvCache, KvPlan, KvStepOptions, LabelId, NodeId, PlanVec,
    PrefixInputs, PrefixWalk, RequestOverrides, Resource, Result, Retention, WalkId,
};
use serde_json::Value;

const PREFILL: u32 = 1;
const DECODE: u32 = 2;

fn opened(page_size: u32, pages: u32) -> Cache {
    let cache = cache(page_size, pages, 4096);
    let walk = PrefixWalk { label: MAIN, write: WalkId(PREFILL), decode: WalkId(DECODE) };
    assert!(cache.resource.enable_prefix_cache(b"root", vec![walk]).unwrap());
    cache
}

/// Token values double as contents, so that what a stream reads shows which tokens it holds.
struct Run {
    cache: Cache,
    next_step: u64,
}

impl Run {
    fn new(page_size: u32, pages: u32) -> Self {
        Run { cache: opened(page_size, pages), next_step: 1 }
    }

    fn ingest_with(&self, slot: u32, prompt: &[u32], text: &str) {
        let overrides = RequestOverrides::new(text, prompt, 0);
        self.cache.resource.ingest_request(rid(slot), &overrides).unwrap();
    }

    fn resolve(&self, slot: u32) -> Option<u32> {
        self.cache.resource.resolve_cached_prefix(rid(slot), NodeId(0), WalkId(PREFILL)).unwrap()
    }

    fn apply(&self, slot: u32, tokens: &[u32], matched: u32) -> Result<()> {
        let inputs = PrefixInputs::new(tokens);
        let (node, walk) = (NodeId(0), WalkId(PREFILL));
        self.cache.resource.apply_cached_prefix(rid(slot), node, walk, &inputs, matched)
    }

    fn step(&mut self, slot: u32, tokens: &[u32], walk: u32) -> Step {
        self.next_step += 1;
        let step = Step::new(self.next_step, &[(slot, 0, tokens.len() as u32)]);
        Step { walk, token_ids: tokens.to_vec(), ..step }
    }

    fn finish(&self, step: &Step, tokens: &[u32]) -> Vec<f32> {
        let filed = self.cache.plan(step).unwrap();
        let values: Vec<f32> = tokens.iter().map(|&t| t as f32).collect();
        self.cache.write(step, filed, MAIN, &values);
        let read = self.cache.history(filed.open::<KvPlan>().unwrap(), 0);
        self.cache.commit(step).unwrap();
        self.cache.conserved();
        read
    }

    /// Feeds tokens and answers everything that they see.
    fn feed(&mut self, slot: u32, tokens: &[u32], walk: u32) -> Vec<f32> {
        let step = self.step(slot, tokens, walk);
        let outcome = self.cache.admit(&step);
        assert!(outcome.is_ready(), "{}", outcome.message());
        self.finish(&step, tokens)
    }

    /// A request from beginning to prompt end, with what is cached skipped. Answers how much was.
    fn prompt(&mut self, slot: u32, prompt: &[u32]) -> u32 {
        self.ingest_with(slot, prompt, "");
        let cached = self.resolve(slot).unwrap_or(0);
        if cached > 0 {
            self.apply(slot, prompt, cached).unwrap();
        }
        let read = self.feed(slot, &prompt[cached as usize..], PREFILL);
        assert!(read.iter().zip(prompt).all(|(&a, &b)| a == b as f32), "{slot} reads its prompt");
        assert_eq!(read.len(), prompt.len());
        cached
    }

    fn end(&self, slot: u32) {
        self.cache.resource.remove_request(rid(slot)).unwrap();
        self.cache.conserved();
    }

    fn inspect(&self, path: &str) -> u64 {
        let state: Value = serde_json::from_str(&self.cache.resource.inspect()).unwrap();
        state.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}"))
    }

    fn cached(&self) -> u64 {
        self.inspect("/pages/cached")
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn a_hit_leaves_a_token_to_compute() {
    let mut run = Run::new(16, 64);
    assert_eq!(run.prompt(0, &tokens(0..100)), 0);
    for (slot, (len, hit)) in [(100, 96), (96, 80), (97, 96), (17, 16)].into_iter().enumerate() {
        assert_eq!(run.prompt(slot as u32 + 1, &tokens(0..len)), hit);
    }
    run.ingest_with(8, &tokens(0..16), "");
    assert_eq!(run.resolve(8), None, "a page that is all of the prompt");
}

#[test]
fn a_prompt_of_whole_pages_is_found_again_and_goes_on() {
    let mut run = Run::new(4, 16);
    let prompt = tokens(10..18);
    assert_eq!(run.prompt(0, &prompt), 0);
    run.end(0);
    assert_eq!(run.prompt(1, &prompt), 4, "never all of it");
    run.end(1);
    assert_eq!(run.prompt(2, &tokens(10..22)), 8);
}

#[test]
fn prompts_share_what_they_have_in_common() {
    let mut run = Run::new(16, 64);
    run.prompt(0, &tokens(0..100));
    let mut other = tokens(0..100);
    other[48] = 7777;
    assert_eq!(run.prompt(1, &other), 48);
    assert_eq!(run.prompt(2, &other), 96);
    run.ingest_with(3, &tokens(500..600), "");
    assert_eq!(run.resolve(3), None);
    run.cache.conserved();
}

#[test]
fn where_prompts_part_within_a_page_what_is_common_is_copied() {
    for idle in [false, true] {
        let mut run = Run::new(16, 64);
        run.prompt(0, &tokens(0..100));
        if idle {
            run.end(0);
        }
        let mut other = tokens(0..100);
        other[55] = 7777;
        assert_eq!(run.prompt(1, &other), 55);
        // The page that was copied from is as it was, and the copy is found like any other.
        assert_eq!(run.prompt(2, &tokens(0..97)), 96);
        assert_eq!(run.prompt(3, &other[..90]), 80);
        // Of those that share the first token of a page, the one that came last is compared.
        other[49] = 8888;
        assert_eq!(run.prompt(4, &other), 49);
    }
}

#[test]
fn of_a_prompt_that_still_runs_its_last_page_is_copied_too() {
    let mut run = Run::new(16, 64);
    let prompt = |own: std::ops::Range<u32>| [tokens(0..40), tokens(own)].concat();
    run.prompt(0, &prompt(500..503));
    assert_eq!(run.prompt(1, &prompt(600..605)), 40);
    run.end(0);
    assert_eq!(run.prompt(2, &prompt(700..702)), 40, "of one that was copied itself");
    // What it generates does not get into the copy, nor the other way round.
    let read = run.feed(1, &[9], DECODE);
    assert_eq!(read[40..], [600., 601., 602., 603., 604., 9.]);
    assert_eq!(run.feed(2, &[8], DECODE)[40..], [700., 701., 8.]);
    (1..3).for_each(|slot| run.end(slot));
    assert_eq!(run.prompt(3, &prompt(800..801)), 40, "the last page is kept, too");
    let next = [prompt(700..702), vec![8, 9]].concat();
    assert_eq!(run.prompt(4, &next), 43, "with what was generated");
}

#[test]
fn what_was_generated_is_found_within_a_page_once_its_request_has_ended() {
    let mut run = Run::new(4, 64);
    run.prompt(0, &tokens(0..6));
    (6..24).for_each(|token| {
        run.feed(0, &[token], DECODE);
    });
    let mut other = tokens(0..24);
    (other[6], other[18]) = (66, 77);
    assert_eq!(run.prompt(1, &other), 6, "where the prompt of one that runs ends");
    other[6] = 6;
    assert_eq!(run.prompt(2, &other), 16, "whole pages alone of what one that runs generates");
    run.end(0);
    assert_eq!(run.prompt(3, &tokens(0..20)), 16);
    assert_eq!(run.prompt(4, &[tokens(0..18), tokens(90..99)].concat()), 18);
}

#[test]
fn work_on_a_common_beginning_is_done_once_wherever_it_ends() {
    for common in [1000, 1001, 1007, 1008, 1015] {
        let mut run = Run::new(16, 1024);
        let mut computed = 0;
        for slot in 0..64 {
            let prompt = [tokens(0..common), tokens(5000 + slot * 5..5003 + slot * 5)].concat();
            computed += prompt.len() as u32 - run.prompt(slot, &prompt);
        }
        assert_eq!(computed, common + 64 * 3);
    }
}

#[test]
fn without_a_page_for_the_copy_the_hit_ends_with_the_last_whole_page() {
    let mut run = Run::new(4, 4);
    run.prompt(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    run.prompt(1, &[20, 21, 22, 23, 24]);
    run.ingest_with(2, &[1, 2, 3, 4, 5, 6, 9], "");
    assert_eq!(run.resolve(2), Some(4));
    run.end(1);
    run.ingest_with(3, &[1, 2, 3, 4, 5, 6, 9], "");
    assert_eq!(run.resolve(3), Some(6));
    run.cache.conserved();
    assert_eq!(run.resolve(3), Some(6), "asked again");
    run.end(3);
    run.end(2);
    run.end(0);
    assert_eq!(run.cache.kv.free_pages(), 4);
}

#[test]
fn less_than_what_was_copied_may_be_agreed_on() {
    for (agreed, held) in [(55, 3), (53, 3), (48, 3), (20, 1), (0, 0)] {
        let mut run = Run::new(16, 64);
        run.prompt(0, &tokens(0..100));
        let mut other = tokens(0..100);
        other[55] = 7777;
        run.ingest_with(1, &other, "");
        assert_eq!(run.resolve(1), Some(55));
        run.apply(1, &other, agreed).unwrap();
        run.cache.conserved();
        let read = run.feed(1, &other[agreed as usize..], PREFILL);
        assert!(read.iter().zip(&other).all(|(&a, &b)| a == b as f32), "{agreed}");
        run.end(0);
        assert_eq!(run.cached(), 7 - held, "{agreed}");
        run.end(1);
        assert_eq!(run.cache.kv.free_pages(), 64);
    }
}

#[test]
fn requests_that_shared_pages_leave_each_cached_once() {
    let mut run = Run::new(4, 12);
    run.prompt(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(run.prompt(1, &[1, 2, 3, 4, 9, 10, 11, 12]), 4);
    assert_eq!((run.cached(), run.inspect("/pages/free")), (0, 9));
    run.end(0);
    assert_eq!((run.cached(), run.inspect("/pages/free")), (1, 9), "the first is still shared");
    run.end(1);
    assert_eq!((run.cached(), run.inspect("/pages/free")), (3, 9));
    assert_eq!(run.inspect("/pages/peak"), 3);
    assert_eq!(run.cache.kv.free_pages(), 12);
}

#[test]
fn a_twin_still_computing_is_not_waited_for_and_keeps_its_own_pages() {
    let mut run = Run::new(4, 16);
    let prompt = tokens(0..9);
    run.ingest_with(0, &prompt, "");
    run.ingest_with(1, &prompt, "");
    assert_eq!((run.resolve(0), run.resolve(1)), (None, None));
    run.feed(0, &prompt, PREFILL);
    run.feed(1, &prompt, PREFILL);
    assert_eq!(run.inspect("/prefix/pages"), 2, "the first writer wins");
    run.end(0);
    run.end(1);
    assert_eq!((run.cached(), run.inspect("/pages/free")), (3, 13), "with the last page of one");
}

#[test]
fn a_tail_that_two_requests_have_alike_is_not_shared() {
    let mut run = Run::new(4, 16);
    let prompt = [1, 2, 3, 4, 5];
    run.prompt(0, &prompt);
    assert_eq!(run.prompt(1, &prompt), 4);
    for step in 0..9u32 {
        for slot in 0..2 {
            let own = 100 * (slot + 1) + step;
            let read = run.feed(slot, &[own], DECODE);
            assert_eq!(read[5], (100 * (slot + 1)) as f32);
            run.cache
                .resource
                .extend_prefix_chain(rid(slot), NodeId(0), WalkId(DECODE), &[own])
                .unwrap();
        }
    }
    run.end(0);
    run.end(1);
    assert_eq!(run.cache.kv.free_pages(), 16);
}

#[test]
fn asking_again_gives_the_same_answer_and_takes_one_reference() {
    let mut run = Run::new(4, 8);
    run.prompt(0, &tokens(0..13));
    run.end(0);
    assert_eq!(run.cached(), 4);
    run.ingest_with(1, &tokens(0..13), "");
    for _ in 0..3 {
        assert_eq!(run.resolve(1), Some(12));
        run.cache.conserved();
    }
    assert_eq!(run.cached(), 1, "the page that is not whole");
    run.cache.resource.reset_request(rid(1), true).unwrap();
    assert_eq!(run.cached(), 4, "a reset returns the lease");
    assert_eq!(run.resolve(1), Some(12));
    run.end(1);
    assert_eq!(run.cached(), 4, "so does a removal");
    run.ingest_with(2, &tokens(0..13), "");
    assert_eq!(run.resolve(2), Some(12));
    run.apply(2, &tokens(0..13), 12).unwrap();
    assert_eq!(run.resolve(2), Some(12));
    let big = run.step(2, &tokens(12..13 + 24), PREFILL);
    assert!(!run.cache.admit(&big).is_ok());
    run.cache.rollback(&big);
    assert_eq!(run.resolve(2), Some(12), "a refused step keeps what was found");
    assert_eq!(run.cache.len(2, 0), 12);
    run.feed(2, &[12], PREFILL);
    run.end(2);
    assert_eq!(run.cached(), 4);
}

#[test]
fn the_agreed_length_cuts_the_lease() {
    let mut run = Run::new(4, 10);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    run.end(0);
    for matched in [0, 4, 6, 11, 12] {
        run.ingest_with(1, &prompt, "");
        assert_eq!(run.resolve(1), Some(12));
        run.apply(1, &prompt, matched).unwrap();
        run.apply(1, &prompt, matched).unwrap();
        run.cache.conserved();
        assert_eq!(run.cache.len(1, 0), matched);
        assert_eq!(run.cached(), 4 - u64::from(matched / 4));
        let read = run.feed(1, &prompt[matched as usize..], PREFILL);
        assert_eq!(read, prompt.iter().map(|&t| t as f32).collect::<Vec<_>>(), "cut at {matched}");
        run.end(1);
        assert_eq!(run.cached(), 4);
    }
}

#[test]
fn what_cannot_be_applied_is_refused_and_returns_the_lease() {
    let mut run = Run::new(4, 10);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    run.end(0);
    run.ingest_with(1, &prompt, "");
    assert!(run.apply(1, &prompt, 4).is_err(), "no lease");
    assert_eq!(run.resolve(1), Some(12));
    assert!(run.apply(1, &prompt, 13).is_err(), "more than was found");
    assert_eq!((run.cached(), run.cache.len(1, 0)), (4, 0));
    assert_eq!(run.resolve(1), Some(12));
    assert!(run.apply(1, &tokens(1..14), 12).is_err(), "other inputs");
    assert_eq!((run.cached(), run.cache.len(1, 0)), (4, 0));
    run.feed(1, &prompt, PREFILL);
    assert!(run.apply(1, &prompt, 4).is_err(), "the stream has begun");
    assert!(run.apply(7, &prompt, 4).is_err(), "nobody");
    run.cache.conserved();
}

#[test]
fn rolling_back_keeps_adopted_pages_and_frees_fresh_ones() {
    let mut run = Run::new(4, 10);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    run.end(0);
    run.ingest_with(1, &prompt, "");
    let cached = run.resolve(1).unwrap();
    run.apply(1, &prompt, cached).unwrap();
    let before = run.cache.resource.inspect();
    let step = run.step(1, &[12], PREFILL);
    assert!(run.cache.admit(&step).is_ready());
    assert_eq!(run.inspect("/pages/free"), 5, "one page for the tail, no other");
    run.cache.plan(&step).unwrap();
    run.cache.rollback(&step);
    run.cache.conserved();
    assert_eq!(run.cache.resource.inspect(), before);
    run.feed(1, &[12], PREFILL);
}

#[test]
fn cached_pages_make_room_before_a_step_is_refused() {
    let mut run = Run::new(4, 10);
    for slot in 0..2 {
        run.prompt(slot, &tokens(slot * 100..slot * 100 + 20));
        run.end(slot);
    }
    assert_eq!((run.cached(), run.inspect("/pages/free")), (10, 0));
    assert!(run.cache.kv.has_room(rid(5), MAIN, 32).unwrap());
    assert_eq!(run.prompt(2, &tokens(1000..1032)), 0);
    assert_eq!(run.inspect("/prefix/evictions"), 8);
    run.ingest_with(3, &tokens(100..120), "");
    assert_eq!(run.resolve(3), Some(8), "the newest stay, the first pages longest");
    run.end(3);
    run.prompt(4, &[5]);
    let step = run.step(2, &tokens(0..8), DECODE);
    let outcome = run.cache.admit(&step);
    assert_eq!(outcome.reason(), FailureReason::ALLOCATION_FAILED);
    assert_eq!(run.cached(), 1, "a refusal evicts nothing");
}

#[test]
fn the_tail_goes_first_and_what_was_used_last_stays() {
    let mut run = Run::new(4, 12);
    run.prompt(0, &tokens(0..17));
    run.end(0);
    run.prompt(1, &tokens(100..117));
    run.end(1);
    assert_eq!(run.prompt(2, &tokens(0..9)), 8, "used again");
    run.end(2);
    assert_eq!(run.cached(), 11, "eight whole ones, and the last one of each");
    // One page of room: the first request's tail goes, though its beginning was used last.
    run.ingest_with(3, &tokens(500..514), "");
    run.feed(3, &tokens(500..514), PREFILL);
    assert_eq!(run.cached(), 8);
    run.end(3);
    for (slot, first, hit) in [(4, 0, 9), (5, 100, 16)] {
        run.ingest_with(slot, &tokens(first..first + 17), "");
        assert_eq!(run.resolve(slot), Some(hit));
    }
    run.cache.conserved();
}

#[test]
fn a_recycled_page_is_not_found_under_its_old_key() {
    let mut run = Run::new(4, 3);
    let (a, b) = (tokens(0..8), tokens(50..58));
    run.prompt(0, &a);
    run.end(0);
    run.prompt(1, &b);
    run.end(1);
    run.prompt(2, &a);
    run.end(2);
    assert_eq!(run.cache.kv.free_pages(), 3);
}

#[test]
fn evicted_pages_wait_for_the_steps_that_read_them() {
    let host = TestHost::new(1, 1 << 30);
    let settings = r#""pages": 5, "page_size": 4, "max_seq_len": 64, "dtype": "f32""#;
    let cache = cache_on(host.handle(), settings, 4);
    let walk = PrefixWalk { label: MAIN, write: WalkId(PREFILL), decode: WalkId(DECODE) };
    assert!(cache.resource.enable_prefix_cache(b"", vec![walk]).unwrap());
    let mut run = Run { cache, next_step: 10 };
    host.0.completed.store(0, std::sync::atomic::Ordering::Relaxed);
    run.prompt(0, &tokens(0..16));
    run.end(0);
    assert_eq!(run.cached(), 4);
    run.ingest_with(1, &tokens(100..116), "");
    let step = run.step(1, &tokens(100..116), PREFILL);
    let outcome: AdmitOutcome = run.cache.admit(&step);
    assert_eq!(outcome.reason(), FailureReason::ADMISSION_DEFERRED);
    assert_eq!(run.cached(), 4);
    host.0.completed.store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
    run.feed(1, &tokens(100..116), PREFILL);
}

#[test]
fn generated_tokens_are_found_after_a_preemption() {
    let mut run = Run::new(4, 16);
    let prompt = tokens(0..6);
    run.prompt(0, &prompt);
    let mut all = prompt.clone();
    for token in 100..107 {
        run.cache
            .resource
            .extend_prefix_chain(rid(0), NodeId(0), WalkId(DECODE), &[token])
            .unwrap();
        run.feed(0, &[token], DECODE);
        all.push(token);
    }
    run.cache.resource.extend_prefix_chain(rid(0), NodeId(0), WalkId(DECODE), &[107]).unwrap();
    all.push(107);
    run.cache.resource.reset_request(rid(0), true).unwrap();
    run.cache.conserved();
    assert_eq!(
        run.resolve(0),
        Some(12),
        "a page of generated tokens alone is not kept before it is whole"
    );
    run.apply(0, &all, 12).unwrap();
    let read = run.feed(0, &all[12..], PREFILL);
    assert_eq!(read, all.iter().map(|&t| t as f32).collect::<Vec<_>>());
    run.end(0);
    assert_eq!(run.prompt(1, &all), 12);
}

#[test]
fn ids_may_come_after_the_commit_that_wrote_them() {
    let mut run = Run::new(4, 16);
    run.prompt(0, &[1, 2, 3]);
    for token in 50..55 {
        // The step ran ahead: it names no ids.
        let step = Step { token_ids: Vec::new(), ..run.step(0, &[token], DECODE) };
        assert!(run.cache.admit(&step).is_ready());
        run.finish(&step, &[token]);
        run.cache
            .resource
            .extend_prefix_chain(rid(0), NodeId(0), WalkId(DECODE), &[token])
            .unwrap();
    }
    run.end(0);
    assert_eq!(run.prompt(1, &[1, 2, 3, 50, 51, 52, 53, 54, 99]), 8);
}

#[test]
fn streams_whose_tokens_are_unknown_are_not_indexed() {
    let mut run = Run::new(4, 32);
    let prompt = tokens(0..9);
    // Without ids, in another walk, in a captured step's shape of fewer ids, and on another label.
    run.ingest_with(0, &prompt, "");
    let step = Step { token_ids: Vec::new(), ..run.step(0, &prompt, PREFILL) };
    assert!(run.cache.admit(&step).is_ready());
    run.finish(&step, &prompt);
    run.ingest_with(1, &prompt, "");
    run.feed(1, &prompt, 9);
    run.ingest_with(2, &prompt, "");
    let other = tokens(40..49);
    run.feed(2, &other, PREFILL);
    run.ingest_with(3, &prompt, "");
    let mut step = run.step(3, &prompt, PREFILL);
    step.label = vec![LabelId(1)];
    assert!(run.cache.admit(&step).is_ready());
    run.cache.plan(&step).unwrap();
    run.cache.commit(&step).unwrap();
    run.ingest_with(4, &[], "");
    run.feed(4, &prompt, PREFILL);
    run.ingest_with(5, &prompt, r#"{"prefix_cache": false}"#);
    run.feed(5, &prompt, PREFILL);
    assert_eq!(run.inspect("/prefix/pages"), 0);
    // A reset makes the stream a clean one.
    run.cache.resource.reset_request(rid(2), false).unwrap();
    run.feed(2, &prompt, PREFILL);
    assert_eq!(run.inspect("/prefix/pages"), 2);
    let elsewhere = run.cache.resource.resolve_cached_prefix(rid(3), NodeId(0), WalkId(9)).unwrap();
    assert_eq!(elsewhere, None);
}

#[test]
fn a_request_that_shares_nothing_may_go_back_and_on_otherwise() {
    let mut run = Run::new(4, 32);
    run.ingest_with(0, &tokens(0..3), r#"{"prefix_cache": false}"#);
    run.feed(0, &tokens(0..9), PREFILL);
    run.cache.kv.correct_len(rid(0), MAIN, 5).unwrap();
    let read = run.feed(0, &[90, 91, 92, 93], DECODE);
    assert_eq!(read, [0.0, 1.0, 2.0, 3.0, 4.0, 90.0, 91.0, 92.0, 93.0]);
    assert_eq!(run.inspect("/prefix/pages"), 0);
}

#[test]
fn salts_keep_requests_apart() {
    let mut run = Run::new(4, 32);
    let prompt = tokens(0..9);
    run.prompt(0, &prompt);
    run.ingest_with(1, &prompt, r#"{"prefix_salt": "tenant"}"#);
    assert_eq!(run.resolve(1), None);
    run.feed(1, &prompt, PREFILL);
    run.ingest_with(2, &prompt, r#"{"prefix_salt": "tenant"}"#);
    assert_eq!(run.resolve(2), Some(8));
    let overrides = RequestOverrides::new(r#"{"prefix_slat": "x"}"#, &prompt, 1);
    let error = run.cache.resource.ingest_request(rid(3), &overrides).unwrap_err();
    assert!(error.message().contains("prefix_salt"), "{error}");
}

#[test]
fn a_rewind_into_a_shared_page_leaves_the_others_alone() {
    for others in [false, true] {
        let mut run = Run::new(4, 16);
        let prompt = tokens(0..13);
        run.prompt(0, &prompt);
        if others {
            assert_eq!(run.prompt(1, &prompt), 12);
        }
        run.cache.kv.correct_len(rid(0), MAIN, 6).unwrap();
        run.cache.conserved();
        let read = run.feed(0, &[90, 91], DECODE);
        assert_eq!(read, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 90.0, 91.0]);
        run.end(0);
        if others {
            let read = run.feed(1, &[13], DECODE);
            assert_eq!(read, tokens(0..14).iter().map(|&t| t as f32).collect::<Vec<_>>());
        }
        let mut new = tokens(0..6);
        new.extend([90, 91, 5]);
        let cached = run.prompt(2, &new);
        assert!([4, 6, 8].contains(&cached), "{cached}");
    }
}

#[test]
fn a_copy_onto_a_stream_of_shared_pages_leaves_the_others_alone() {
    let mut run = Run::new(4, 24);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    assert_eq!(run.prompt(1, &prompt), 12);
    // A stream that nobody opened is copied onto the shared pages, and written on.
    let mut pre_forks = PlanVec::default();
    pre_forks.push(fork(1, 5, 0));
    let options = KvStepOptions { pre_forks, ..Default::default() };
    let step = run.step(1, &[50, 51], DECODE).with(options);
    assert!(run.cache.admit(&step).is_ready());
    assert_eq!(run.finish(&step, &[50, 51]), [50.0, 51.0]);
    let read = run.feed(0, &[13], DECODE);
    assert_eq!(read, tokens(0..14).iter().map(|&t| t as f32).collect::<Vec<_>>());
    assert_eq!(run.prompt(2, &prompt), 12);
    run.cache.conserved();
}

#[test]
fn a_rewind_without_a_page_for_the_copy_is_refused() {
    let mut run = Run::new(4, 5);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    assert_eq!(run.prompt(1, &prompt), 12);
    let error = run.cache.kv.correct_len(rid(0), MAIN, 6).unwrap_err();
    assert!(error.message().contains("no page is free"), "{error}");
    assert_eq!(run.cache.len(0, 0), 13);
    run.cache.conserved();
}

#[test]
fn a_trimmed_stream_is_left_out_and_what_it_had_stays() {
    let mut run = Run::new(4, 16);
    let prompt = tokens(0..13);
    run.prompt(0, &prompt);
    let mut retention = PlanVec::default();
    let (request_id, label) = (rid(0), MAIN);
    retention.push(Retention { request_id, label, context_budget: 4, protected_prefix: 0 });
    let options = KvStepOptions { retention, ..Default::default() };
    let step = run.step(0, &[13, 14, 15, 16], DECODE).with(options);
    assert!(run.cache.admit(&step).is_ready());
    run.finish(&step, &[13, 14, 15, 16]);
    assert!(run.cache.len(0, 0) < 17);
    run.feed(0, &tokens(17..25), DECODE);
    let indexed = run.inspect("/prefix/pages");
    assert!(indexed <= 4, "{indexed}");
    run.end(0);
    assert_eq!(run.prompt(1, &prompt), 12);
    // All of it can be evicted, whatever order it was released in.
    run.end(1);
    run.ingest_with(2, &tokens(500..564), "");
    run.feed(2, &tokens(500..564), PREFILL);
}

#[test]
fn a_page_whose_parent_was_another_requests_can_still_be_found() {
    let mut run = Run::new(4, 9);
    let prompt = tokens(0..9);
    run.ingest_with(0, &prompt, "");
    run.ingest_with(1, &prompt, "");
    run.feed(0, &prompt[..8], PREFILL);
    run.feed(1, &prompt, PREFILL);
    // Request 0's pages have the keys. They are evicted while request 1 goes on with its own.
    run.end(0);
    run.ingest_with(2, &tokens(300..324), "");
    run.feed(2, &tokens(300..324), PREFILL);
    assert_eq!(run.inspect("/prefix/evictions"), 2);
    run.end(2);
    run.feed(1, &[9, 10, 11], DECODE);
    run.end(1);
    assert_eq!(run.prompt(3, &tokens(0..13)), 12);
}

#[test]
fn the_cache_opens_where_settings_and_walks_want_it() {
    let walk = |label| PrefixWalk { label, write: WalkId(1), decode: WalkId(2) };
    let off = cache_on(
        resource_api::host::PlainHost::handle(),
        r#""pages": 9, "page_size": 4, "max_seq_len": 64, "prefix_cache": false"#,
        4,
    );
    assert!(!off.resource.enable_prefix_cache(b"", vec![walk(MAIN)]).unwrap());
    let cache = cache(4, 8, 64);
    assert!(!cache.resource.enable_prefix_cache(b"", vec![walk(LabelId(3))]).unwrap());
    assert!(cache.resource.enable_prefix_cache(b"", vec![walk(LabelId(3)), walk(MAIN)]).unwrap());
    assert!(cache.resource.enable_prefix_cache(b"", vec![walk(MAIN)]).is_err());
    assert!(cache.resource.prefix_skip_safe());
}
