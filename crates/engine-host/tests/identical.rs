//! A request's tokens and log-probabilities do not depend on how its work is cut into steps, on what
//! runs beside it, on planning ahead, on having given way, or on where its cache has been meanwhile: bit
//! for bit.

mod support;

use engine_host::engine::Engine;
use engine_host::request::GenerateRequest;
use resource_api::{KvCache, KvCacheHandle, KvFacts, Resource};
use support::{Done, config, greedy, load, reference, run, take_event};

const STEPS: u32 = 10;

fn requests() -> Vec<GenerateRequest> {
    let short = reference().into_iter().filter(|i| i.prompt_ids.len() < 60);
    let mut requests: Vec<_> = short.map(|i| greedy(i.prompt_ids, STEPS)).take(6).collect();
    // Sampling must not move either.
    for (i, request) in requests.iter_mut().enumerate().skip(3) {
        let settings = [("temperature", 0.8), ("top_k", 40.0), ("repetition_penalty", 1.2)];
        for (name, value) in settings {
            request.sampling.insert(name.into(), serde_json::json!(value));
        }
        request.sampling.insert("top_k".into(), serde_json::json!(40));
        request.sampling.insert("seed".into(), serde_json::json!(i));
    }
    requests
}

fn engine(lines: &str, pages: u32) -> Engine {
    let lines = format!("kv_dtype = \"f32\"\nmax_model_len = 160\n{lines}");
    load(&config(&lines, &format!("pages = {pages}\nprefix_cache = false"))).engine
}

/// All memory is free again, page by page.
fn assert_clean(engine: &Engine) {
    let kv = engine.resources().entries().iter().find(|e| e.key == "main_kv").unwrap();
    let cache: KvCacheHandle = kv.capabilities()[0].open().unwrap();
    cache.assert_pages_conserved().unwrap();
    let facts = kv.resource().describe();
    let pages = facts.iter().find_map(|f| f.open::<KvFacts>().ok()).unwrap().num_pages;
    assert_eq!(cache.free_pages(), u64::from(pages) - 1, "pages are lost");
}

#[test]
fn chunks_of_any_size_with_and_without_planning_ahead() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    for chunk in [1, 7, 64, 512] {
        for preplan in [true, false] {
            let lines = format!("max_batch_tokens = {chunk}\npreplan = {preplan}");
            let mut engine = engine(&lines, 1024);
            assert_eq!(run(&mut engine, requests()), want, "{lines}");
            let ahead = engine.stats().planned_ahead;
            assert_eq!(ahead > 0, preplan, "{lines}: {ahead} steps were planned ahead");
            assert_clean(&engine);
        }
    }
}

#[test]
fn pools_that_make_requests_wait_and_give_way() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    for (pages, preplan) in [(9, true), (9, false), (14, true)] {
        let mut engine = engine(&format!("preplan = {preplan}\nmax_batch = 4"), pages);
        assert_eq!(run(&mut engine, requests()), want, "{pages} pages, preplan = {preplan}");
        assert_clean(&engine);
    }
}

#[test]
fn giving_way_every_few_steps() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    for every in [2, 3, 5] {
        let mut engine = engine("", 1024);
        let rids: Vec<_> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
        let mut got: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
        let mut step = 0;
        while !engine.is_idle() {
            for event in engine.step() {
                take_event(&rids, &mut got, event);
            }
            step += 1;
            // Not for ever: what gives way each time before it gets anywhere would never end.
            if step % every == 0 && step < 40 {
                engine.preempt_one();
            }
        }
        assert!(engine.stats().preemptions > 0, "nobody gave way");
        assert_eq!(got, want, "every {every} steps");
        assert_clean(&engine);
    }
}

#[test]
fn others_that_are_cancelled_at_any_time() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    let mut engine = engine("max_batch_tokens = 16", 1024);
    let mut rids = Vec::new();
    let mut passers_by = Vec::new();
    for request in requests() {
        passers_by.push(engine.submit(greedy(request.prompt.clone(), 50)).unwrap());
        rids.push(engine.submit(request).unwrap());
    }
    let mut got: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
    let mut step = 0;
    while !engine.is_idle() {
        step += 1;
        if step % 3 == 0 {
            passers_by.pop().inspect(|&rid| engine.cancel(rid));
        }
        for event in engine.step() {
            take_event(&rids, &mut got, event);
        }
    }
    assert_eq!(got, want);
    assert_clean(&engine);
}

/// With prefixes cached and these tiers.
fn tiered(lines: &str, pages: u32, tiers: &str) -> Engine {
    let lines = format!("kv_dtype = \"f32\"\nmax_model_len = 160\n{lines}");
    load(&config(&lines, &format!("pages = {pages}\n{tiers}"))).engine
}

fn file_tier(dir: &tempfile::TempDir, host_pages: u32) -> String {
    let file = dir.path().join("pages");
    format!("host_pages = {host_pages}\ndisk_file = {file:?}\ndisk_size = \"1GiB\"")
}

/// The same tokens, however much of the prompts was cached.
fn assert_same(got: &[Done], want: &[Done], how: &str) {
    for (got, want) in got.iter().zip(want) {
        assert_eq!((&got.tokens, &got.failure), (&want.tokens, &want.failure), "{how}");
    }
}

/// Runs the requests, and has all that run leave the device before every step.
fn run_moving(engine: &mut Engine) -> Vec<Done> {
    let rids: Vec<_> = requests().into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut got: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
    let mut steps = 0;
    while !engine.is_idle() {
        engine.offload_running();
        for event in engine.step() {
            take_event(&rids, &mut got, event);
        }
        steps += 1;
        assert!(steps < 1000, "the engine makes no progress");
    }
    assert_eq!(engine.stats().preemptions, 0, "nobody is computed again");
    got
}

#[test]
fn leaving_the_device_before_every_step() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    let dir = tempfile::tempdir().unwrap();
    for (tiers, preplan) in [
        ("host_pages = 512\nprefix_cache = false".to_string(), true),
        ("host_pages = 512".to_string(), false),
        (file_tier(&dir, 0), true),
        (file_tier(&dir, 3), true),
    ] {
        let mut engine = tiered(&format!("preplan = {preplan}"), 256, &tiers);
        assert_same(&run_moving(&mut engine), &want, &tiers);
        let stats = engine.stats();
        assert!(stats.offloads >= 20, "{tiers}: {stats:?}");
        assert_eq!(stats.offloads, stats.reloads, "{tiers}");
        assert_clean(&engine);
    }
}

#[test]
fn pools_too_small_with_host_memory_behind_them() {
    // Four of them grow past what the pools hold.
    let longer = || -> Vec<_> {
        let long = |request| GenerateRequest { max_tokens: 60, ..request };
        requests().into_iter().map(long).collect()
    };
    let want = run(&mut engine("preplan = false", 1024), longer());
    for (pages, tiers) in [(9, "host_pages = 200"), (12, "host_pages = 9"), (9, "host_pages = 1")] {
        let mut engine = tiered("max_batch = 4", pages, tiers);
        assert_same(&run(&mut engine, longer()), &want, &format!("{pages} pages, {tiers}"));
        let stats = engine.stats();
        // Where there is room for one page, nearly everybody is computed again.
        let gave_way = if tiers == "host_pages = 1" { stats.preemptions } else { stats.offloads };
        assert!(gave_way > 0, "{pages} pages, {tiers}: {stats:?}");
        assert_clean(&engine);
    }
    // By the configuration, too, requests are computed again.
    let lines = "max_batch = 4\npressure = [\"evict\", \"recompute\"]";
    let mut engine = tiered(lines, 9, "host_pages = 200");
    assert_same(&run(&mut engine, longer()), &want, lines);
    assert_eq!((engine.stats().offloads, engine.stats().preemptions > 0), (0, true));
}

#[test]
fn prompts_that_come_back_from_a_file_after_a_restart() {
    let want = run(&mut engine("preplan = false", 1024), requests());
    let dir = tempfile::tempdir().unwrap();
    let mut engine = tiered("", 9, &file_tier(&dir, 0));
    assert_same(&run(&mut engine, requests()), &want, "cold");
    drop(engine);
    let mut engine = tiered("", 64, &file_tier(&dir, 0));
    let got = run(&mut engine, requests());
    assert_same(&got, &want, "after a restart");
    let cached = |done: &Done| done.end.map_or(0, |(_, usage)| usage.cached_tokens);
    assert!(got.iter().map(cached).sum::<u32>() > 0, "nothing was found again");
    assert_clean(&engine);
}

#[test]
fn a_common_beginning_is_computed_once() {
    let common: Vec<u32> = reference()[0].prompt_ids.iter().cycle().take(100).copied().collect();
    let request = |i: u32| greedy([common.clone(), vec![40 + i, 50 + i]].concat(), 3);
    let all = || (0..12).map(request).collect::<Vec<_>>();
    let want = run(&mut engine("", 1024), all());
    for chunk in [24, 512] {
        let mut engine = tiered(&format!("max_batch_tokens = {chunk}"), 256, "");
        assert_same(&run(&mut engine, all()), &want, "shared");
        // Once what is common, and of each what comes after; decode steps count among them.
        assert!(engine.stats().prefill_tokens <= 100 + 12 * (2 + 2), "{:?}", engine.stats());
        assert_clean(&engine);
    }
}

#[test]
fn a_long_common_prompt_costs_sixty_four_requests_what_it_costs_one() {
    let common: Vec<u32> = reference()[0].prompt_ids.iter().cycle().take(1000).copied().collect();
    let request = |i: u32| greedy([common.clone(), vec![40 + i, 50 + i, 7]].concat(), 1);
    let load_with = |cache: &str| {
        let lines = "kv_dtype = \"f32\"\nmax_model_len = 1200\nmax_batch_tokens = 512";
        load(&config(lines, &format!("pages = 600\n{cache}"))).engine
    };
    let mut warm = load_with("");
    let got = run(&mut warm, (0..64).map(request).collect());
    let computed = warm.stats().prefill_tokens;
    assert!(computed <= 1050 + 64 * 3, "{computed} tokens were computed");
    assert_clean(&warm);
    let some = [0, 1, 63];
    let want = run(&mut load_with("prefix_cache = false"), some.map(request).into());
    for (i, want) in some.into_iter().zip(&want) {
        assert_same(&got[i as usize..][..1], std::slice::from_ref(want), "shared");
    }
}
