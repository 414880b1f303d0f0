//! Small inputs on small pools that broke other engines: prompts that end with a page, shared and
//! recycled pages, requests that cannot fit, or only one after the other.

mod reader;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine_host::engine::Relay;
use engine_host::error::ErrorKind;
use engine_host::request::{Event, FinishReason, GenerateRequest};
use reader::{Outcome, Setup, cache, cold, expected, greedy, letters, run, told};
use resource_api::{EngineLimits, KvCache};
use serde_json::json;

/// Runs a request by itself.
fn one(engine: &mut engine_host::engine::Engine, prompt: &[u32], max_tokens: u32) -> Outcome {
    run(engine, vec![greedy(prompt, max_tokens)]).remove(0)
}

#[test]
fn a_prompt_of_whole_pages_is_reused_but_for_its_last_page() {
    for page_size in [1, 2, 4] {
        for preplan in [true, false] {
            let setup = Setup { page_size, preplan, ..Setup::default() };
            let mut engine = setup.build();
            let (prompt, longer) = (letters("ABCDEFGH"), letters("ABCDEFGHIJKL"));
            for (prompt, reused) in [(&prompt, 0), (&prompt, 8 - page_size), (&longer, 8)] {
                let got = one(&mut engine, prompt, 4);
                assert_eq!(got.cached(), reused, "pages of {page_size}");
                assert_eq!(got.tokens, expected(prompt, 4, 1));
                assert_eq!(got.tokens, cold(&setup, greedy(prompt, 4)).tokens);
            }
        }
    }
}

#[test]
fn a_recycled_page_is_not_found_under_what_it_held_before() {
    for pages in [3, 4] {
        let setup = Setup { pages, ..Setup::default() };
        let mut engine = setup.build();
        for text in ["ABCDEFGH", "IJKLMNOP", "ABCDEFGH", "ABCDIJKL", "IJKLMNOP"] {
            let got = one(&mut engine, &letters(text), 3);
            assert_eq!(got.tokens, expected(&letters(text), 3, 1), "{text}");
            let (free, cached) = (told(&engine, "pages.free"), told(&engine, "pages.cached"));
            assert_eq!(free + cached, u64::from(pages), "after {text}");
        }
    }
}

#[test]
fn a_page_that_two_requests_share_counts_once_when_both_have_ended() {
    let setup = Setup { pages: 32, ..Setup::default() };
    let mut engine = setup.build();
    // The first page is there to be shared by both at once.
    one(&mut engine, &letters("ABCD"), 1);
    assert_eq!(told(&engine, "pages.cached"), 1);
    let got =
        run(&mut engine, vec![greedy(&letters("ABCDEFGH"), 1), greedy(&letters("ABCDIJKL"), 1)]);
    assert_eq!(got.iter().map(Outcome::cached).collect::<Vec<_>>(), [4, 4]);
    assert_eq!(told(&engine, "pages.cached"), 3, "ABCD once, EFGH, IJKL");
    assert_eq!(told(&engine, "pages.free") + told(&engine, "pages.cached"), 32);
    // Neither in flight together: whoever is second keeps no page of its own of what they share.
    let mut fresh = setup.build();
    run(&mut fresh, vec![greedy(&letters("ABCDEFGH"), 1), greedy(&letters("ABCDIJKL"), 1)]);
    assert_eq!(told(&fresh, "pages.cached"), 3);
    assert_eq!(told(&fresh, "pages.free") + told(&fresh, "pages.cached"), 32);
}

#[test]
fn what_can_never_fit_is_refused_at_once_and_blocks_nobody() {
    let setup = Setup { page_size: 16, pages: 10, ..Setup::default() };
    let mut engine = setup.build();
    let started = Instant::now();
    // 400 tokens are 25 pages; 150 and 12 generated, the last of them uncached, are one page more
    // than there are.
    for (prompt, max_tokens, needs) in [(400, 1, 25), (150, 12, 11)] {
        let e = engine.submit(greedy(&vec![5; prompt], max_tokens)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage, "{e}");
        let said = e.to_string();
        assert!(said.contains(&format!("need {needs} pages of 16 tokens")), "{said}");
        assert!(said.contains("the pool has 10 in all") && !said.contains('\n'), "{said}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(engine.is_idle(), "nothing of it is queued");
    let got = one(&mut engine, &[5; 10], 5);
    assert_eq!(got.tokens, expected(&[5; 10], 5, 1));
    assert!(one(&mut engine, &[5; 150], 11).failure.is_none(), "what just fits runs");
}

#[test]
fn a_request_may_take_the_pool_to_its_last_slot_and_no_token_more() {
    // The last generated token goes to no page.
    for (page_size, pages) in [(1, 9), (2, 6), (3, 5), (4, 4), (16, 1)] {
        let slots = page_size * pages;
        for (chunk, preplan, run_ahead) in
            [(64, false, false), (3, true, false), (64, true, false), (5, false, true)]
        {
            for prefix_cache in [true, false] {
                let limits =
                    EngineLimits { max_batch: 4, max_batch_tokens: chunk, max_model_len: 64 };
                let setup = Setup {
                    page_size,
                    pages,
                    preplan,
                    run_ahead,
                    prefix_cache,
                    limits,
                    ..Setup::default()
                };
                let mut engine = setup.build();
                for prompt_len in 1..=slots {
                    let prompt: Vec<u32> =
                        (0..prompt_len).map(|i| (prompt_len + i * i) % 60).collect();
                    let most = slots - prompt_len + 1;
                    let how = format!("{pages} pages of {page_size}, {prompt_len} and {most}");
                    let e = engine.submit(greedy(&prompt, most + 1)).unwrap_err();
                    assert_eq!(e.kind(), ErrorKind::Usage, "{how}: {e}");
                    assert!(e.to_string().contains(&format!("the pool has {pages} in all")), "{e}");
                    assert!(engine.is_idle(), "{how}");
                    // Beside another one, which then has to wait or give way.
                    let got = run(&mut engine, vec![greedy(&prompt, most), greedy(&[7], 1)]);
                    assert_eq!(got[0].tokens, expected(&prompt, most as usize, 1), "{how}");
                    assert_eq!(got[0].failure, None, "{how}");
                    assert_eq!(got[1].tokens, expected(&[7], 1, 1), "{how}");
                }
                let free = told(&engine, "pages.free") + told(&engine, "pages.cached");
                assert_eq!(free + told(&engine, "pages.waiting"), u64::from(pages));
            }
        }
    }
}

#[test]
fn sessions_make_room_for_a_request_that_needs_the_whole_pool() {
    let mut engine = Setup { pages: 6, prefix_cache: false, ..Setup::default() }.build();
    for name in ["first", "second"] {
        let session = Some(name.to_owned());
        run(&mut engine, vec![GenerateRequest { session, ..greedy(&letters("ABCDEFG"), 3) }]);
    }
    assert_eq!(told(&engine, "pages.free"), 0, "sessions have them");
    let prompt: Vec<u32> = (0..20).collect();
    let got = run(&mut engine, vec![greedy(&prompt, 5)]);
    assert_eq!((&got[0].tokens, &got[0].failure), (&expected(&prompt, 5, 1), &None));
}

#[test]
fn a_request_that_arrives_gives_its_pages_to_one_that_runs_alone() {
    // It has pages from the moment at which it begins to arrive, and no place in a batch of one.
    for prefix_cache in [true, false] {
        let limits = EngineLimits { max_batch: 1, max_batch_tokens: 64, max_model_len: 64 };
        let setup = Setup { pages: 10, transfer: true, prefix_cache, limits, ..Setup::default() };
        let (mut first, mut second) = (setup.build(), setup.build());
        let (prompt, other): (Vec<u32>, Vec<u32>) = ((0..18).collect(), (20..37).collect());
        let relay = Relay { from: None, after: Some(3) };
        first.submit_relayed(greedy(&prompt, 9), relay).unwrap();
        let mut from = None;
        while from.is_none() {
            let handed = first.step().iter().find_map(|event| match event {
                Event::HandedOver(_, handover) => Some((**handover).clone()),
                _ => None,
            });
            from = handed;
        }
        let arriving = Relay { from, after: None };
        let rids = [
            second.submit_relayed(greedy(&prompt, 9), arriving).unwrap(),
            second.submit(greedy(&other, 24)).unwrap(),
        ];
        let mut got = [Outcome::default(), Outcome::default()];
        while !second.is_idle() {
            for event in second.step().to_vec() {
                rids.iter().zip(&mut got).for_each(|(&rid, got)| got.take(rid, &event));
            }
            cache(&second).assert_pages_conserved().unwrap();
        }
        assert_eq!((&got[1].tokens, &got[1].failure), (&expected(&other, 24, 1), &None));
        assert_eq!((&got[0].tokens[..], &got[0].failure), (&expected(&prompt, 9, 1)[3..], &None));
        assert_eq!(second.stats().preemptions, 1, "its pages were given up");
        assert_eq!(told(&second, "pages.free") + told(&second, "pages.cached"), 10);
    }
}

#[test]
fn what_is_longer_than_a_stream_may_be_is_refused_at_once() {
    let setup = Setup { kv: json!({ "max_seq_len": 10 }), ..Setup::default() };
    let mut engine = setup.build();
    let just: Vec<u32> = (0..8).collect();
    for (prompt, most) in [(&just[..], 4), (&[1; 11], 1), (&[1; 11], 5)] {
        let e = engine.submit(greedy(prompt, most)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage);
        assert!(e.to_string().contains("one may have 10 (`max_seq_len`)"), "{e}");
    }
    assert!(engine.is_idle());
    assert_eq!(one(&mut engine, &just, 3).tokens, expected(&just, 3, 1));
}

#[test]
fn requests_that_hold_a_cached_prefix_do_not_block_each_other() {
    // Each has 8 tokens cached and 17 more to compute; together they are over the pool.
    for chunk in [3, 8, 64] {
        let limits = EngineLimits { max_batch: 8, max_batch_tokens: chunk, max_model_len: 64 };
        let setup = Setup { pages: 10, limits, ..Setup::default() };
        let mut engine = setup.build();
        let prompt = |first: u32| -> Vec<u32> { (0..25).map(|i| (first + i) % 60).collect() };
        one(&mut engine, &prompt(1)[..8], 1);
        one(&mut engine, &prompt(30)[..8], 1);
        let got = run(&mut engine, vec![greedy(&prompt(1), 6), greedy(&prompt(30), 6)]);
        for (got, first) in got.iter().zip([1, 30]) {
            assert_eq!(got.cached(), 8, "chunks of {chunk}");
            assert_eq!(got.tokens, expected(&prompt(first), 6, 1), "chunks of {chunk}");
        }
        assert_eq!(told(&engine, "pages.free") + told(&engine, "pages.cached"), 10);
    }
}

#[test]
fn many_requests_with_one_long_prompt_get_done_on_a_pool_for_one_and_a_half() {
    // 59 of 96 pages are the prompt's; every request generates over a page's end.
    let limits = EngineLimits { max_batch: 32, max_batch_tokens: 64, max_model_len: 512 };
    for prefix_cache in [true, false] {
        let setup = Setup { pages: 96, prefix_cache, limits, ..Setup::default() };
        let mut engine = setup.build();
        let shared: Vec<u32> = (0..236).map(|i| i * 7 % 60).collect();
        let prompts: Vec<Vec<u32>> = (0..32).map(|i| [&shared[..], &[i]].concat()).collect();
        let got = run(&mut engine, prompts.iter().map(|p| greedy(p, 40)).collect());
        for (got, prompt) in got.iter().zip(&prompts) {
            assert_eq!(got.failure, None);
            assert_eq!(got.tokens, expected(prompt, 40, 1));
        }
    }
}

#[test]
fn pages_of_a_request_that_ended_are_not_written_by_the_step_planned_with_it() {
    let turn = Arc::new(AtomicU64::new(0));
    let counter = turn.clone();
    // A slow kernel, whose step is planned around meanwhile.
    let meanwhile = move |_: &resource_api::StepContext<'_>| {
        let n = counter.fetch_add(1, Ordering::Relaxed);
        if n.is_multiple_of(7) {
            std::thread::sleep(Duration::from_micros(n % 300));
        }
    };
    let setup = Setup {
        pages: 5,
        prefix_cache: false,
        meanwhile: Some(Arc::new(meanwhile)),
        ..Setup::default()
    };
    let mut engine = setup.build();
    let (mut unplanned, mut tries) = (0, 0);
    for round in 0..1000u32 {
        let prompt = [round % 50 + 1, round % 7, 3, 4, 5];
        let will = expected(&prompt, 8, 1);
        let stop = will[round as usize % 4 + 1];
        let mut first = greedy(&prompt, 12);
        first.stop_token_ids = vec![stop];
        let length = will.iter().position(|&t| t == stop).unwrap() + 1;
        let first = engine.submit(first).unwrap();
        let second_prompt = [9, round % 60, 11, 12, 13, 14, 15, round % 11, 9];
        let mut second = None;
        let (mut got, mut other) = (Outcome::default(), Outcome::default());
        while !engine.is_idle() || second.is_none() {
            for event in engine.step().to_vec() {
                got.take(first, &event);
                second.inspect(|&rid| other.take(rid, &event));
            }
            // It takes the pages of the other one, which only then are free.
            if second.is_none() && got.tokens.len() + 1 >= length {
                second = Some(engine.submit(greedy(&second_prompt, 4)).unwrap());
            }
        }
        assert_eq!(got.tokens, will[..length], "round {round}");
        assert_eq!(got.end.unwrap().0, FinishReason::Stop);
        assert_eq!(other.tokens, expected(&second_prompt, 4, 1), "round {round}");
        tries += 1;
        unplanned = engine.stats().unplanned;
    }
    assert_eq!(tries, 1000);
    assert!(unplanned >= 500, "{unplanned} steps were planned with a request that ended");
    cache(&engine).assert_pages_conserved().unwrap();
    assert_eq!(told(&engine, "pages.free") + told(&engine, "pages.waiting"), 5);
}

#[test]
fn a_partly_filled_page_is_never_shared_by_two_that_write_on() {
    let setup = Setup::default();
    let sampled = |seed: u32| {
        let mut request = greedy(&letters("ABCDE"), 20);
        request.sampling.insert("temperature".into(), json!(1));
        request.sampling.insert("seed".into(), json!(seed));
        request
    };
    let alone: Vec<Outcome> = (0..6).map(|seed| cold(&setup, sampled(seed))).collect();
    let different: BTreeSet<_> = alone.iter().map(|o| o.tokens.clone()).collect();
    assert!(different.len() > 4, "seeds differ");
    let mut engine = setup.build();
    // Each joins while the ones before it are decoding.
    let mut rids = Vec::new();
    let mut got = vec![Outcome::default(); alone.len()];
    while rids.len() < alone.len() || !engine.is_idle() {
        if rids.len() < alone.len() {
            rids.push(engine.submit(sampled(rids.len() as u32)).unwrap());
        }
        for event in engine.step().to_vec() {
            rids.iter().zip(&mut got).for_each(|(&rid, o)| o.take(rid, &event));
        }
        cache(&engine).assert_pages_conserved().unwrap();
    }
    for (got, alone) in got.iter().zip(&alone) {
        assert_eq!(got.tokens, alone.tokens);
    }
    assert_eq!(told(&engine, "pages.free") + told(&engine, "pages.cached"), 64);
}

#[test]
fn a_request_cancelled_at_any_step_leaves_its_pages_within_two() {
    for at in 0..12 {
        let setup = Setup { pages: 16, prefix_cache: false, ..Setup::default() };
        let mut engine = setup.build();
        let (keep, gone) = (letters("ABCDE"), letters("FGHIJKL"));
        let kept = engine.submit(greedy(&keep, 14)).unwrap();
        let cancelled = engine.submit(greedy(&gone, 14)).unwrap();
        let mut got = Outcome::default();
        for _ in 0..at {
            engine.step().to_vec().iter().for_each(|e| got.take(kept, e));
        }
        engine.canceller().cancel(cancelled);
        for _ in 0..2 {
            let events = engine.step().to_vec();
            events.iter().for_each(|e| got.take(kept, e));
            let mut of_it =
                events.iter().filter(|e| matches!(e, Event::Token(r, _) if *r == cancelled));
            assert!(of_it.next().is_none(), "a token after it was cancelled at {at}");
        }
        let text = engine.resources().find("main_kv").unwrap().1.resource();
        let text = resource_api::Resource::inspect(text);
        assert!(!text.contains(&format!("\"{cancelled}\"")), "at {at}: {text}");
        while !engine.is_idle() {
            engine.step().to_vec().iter().for_each(|e| got.take(kept, e));
        }
        assert_eq!(got.tokens, expected(&keep, 14, 1), "at {at}");
        assert_eq!(told(&engine, "pages.free") + told(&engine, "pages.waiting"), 16);
    }
}

#[test]
fn what_each_resource_says_of_itself_is_its_state_as_data() {
    let setup = Setup { preplan: false, prefix_cache: false, ..Setup::default() };
    let mut engine = setup.build();
    let mut sampled = greedy(&letters("ABCDEFGHI"), 8);
    sampled.sampling.insert("seed".into(), json!(7));
    let rids = [engine.submit(sampled).unwrap(), engine.submit(greedy(&[3], 8)).unwrap()];
    for _ in 0..3 {
        engine.step();
    }
    let state = |key: &str| -> serde_json::Value {
        let (_, entry) = engine.resources().find(key).unwrap();
        serde_json::from_str(&resource_api::Resource::inspect(entry.resource())).unwrap()
    };
    let names = rids.map(|rid| rid.to_string());
    let kv = state("main_kv");
    let mut pages = BTreeSet::new();
    for (stream, (name, tokens)) in
        kv["streams"].as_array().unwrap().iter().zip([(&names[0], 11), (&names[1], 3)])
    {
        assert_eq!(
            (&stream["request"], &stream["label"], &stream["tokens"]),
            (&json!(name), &json!("main"), &json!(tokens))
        );
        let runs: Vec<(u32, u32)> = serde_json::from_value(stream["page_map"].clone()).unwrap();
        let own = runs.iter().flat_map(|&(first, count)| first..first + count);
        assert_eq!(own.clone().count() as u64, stream["pages"].as_u64().unwrap());
        assert!(own.into_iter().all(|page| page != 0 && pages.insert(page)), "{kv}");
    }
    assert_eq!(pages.len() as u64, kv["pages"]["used"].as_u64().unwrap());
    let stream = |name: &String, next: u32| json!({"request": name, "label": "main", "next": next});
    assert_eq!(state("pos")["streams"], json!([stream(&names[0], 11), stream(&names[1], 3)]));
    let sampler = state("sampler");
    let of = |at: usize, field: &str| sampler["live"][at][field].clone();
    assert_eq!(
        [of(0, "request"), of(0, "sampled"), of(0, "seed")],
        [json!(names[0]), json!(3), json!(7)]
    );
    assert_eq!([of(1, "request"), of(1, "temperature")], [json!(names[1]), json!(0.0)]);
    let attn = state("attn");
    assert_eq!(attn["planned"]["plans"], json!(3));
    assert_eq!(attn["planned"]["last"]["rows"], json!(2));
    assert_eq!(attn["planned"]["last"]["tokens"], json!(2));
    assert!(!attn["slots"].as_array().unwrap().is_empty(), "{attn}");
}
