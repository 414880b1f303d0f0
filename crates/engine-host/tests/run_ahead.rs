//! Steps that are launched before the one before them has landed change nothing that anybody sees.

mod reader;

use engine_host::engine::Engine;
use engine_host::request::{Event, FinishReason, GenerateRequest};
use reader::{BUDGET, Outcome, Setup, expected, greedy, run, told};
use resource_api::{Device, EngineLimits, HostServices, RequestId, Resource};
use serde_json::{Value, json};

fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 31 + i * i * 7 + i) % reader::VOCAB as u32).collect()
}

fn drawn(prompt: &[u32], max_tokens: u32, seed: u32, more: &[(&str, Value)]) -> GenerateRequest {
    let mut request = greedy(prompt, max_tokens);
    request.sampling.insert("temperature".into(), json!(1.0));
    request.sampling.insert("top_k".into(), json!(20));
    request.sampling.insert("seed".into(), json!(seed));
    for (name, value) in more {
        request.sampling.insert((*name).into(), value.clone());
    }
    request
}

/// Requests of all lengths, greedy and drawn, of which several end early.
fn requests() -> Vec<GenerateRequest> {
    let one = |i: u32| {
        let (prompt, most) = (text(i, 3 + 5 * i), 6 + 7 * (i % 4));
        if i.is_multiple_of(2) { greedy(&prompt, most) } else { drawn(&prompt, most, i, &[]) }
    };
    (0..9).map(one).collect()
}

/// Runs the same with and without, and gives the engine that ran ahead.
fn same(setup: &Setup, requests: impl Fn() -> Vec<GenerateRequest>) -> Engine {
    let want = run(&mut Setup { run_ahead: false, ..setup.clone() }.build(), requests());
    let mut engine = Setup { run_ahead: true, ..setup.clone() }.build();
    let got = run(&mut engine, requests());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got, want, "request {i}");
    }
    engine
}

#[test]
fn what_requests_get_is_the_same_however_steps_are_cut() {
    for (max_batch, max_batch_tokens) in [(16, 64), (3, 7), (1, 1), (5, 200)] {
        for page_size in [1, 4] {
            let limits = EngineLimits { max_batch, max_batch_tokens, max_model_len: 200 };
            let setup = Setup { page_size, pages: 900, limits, ..Setup::default() };
            let engine = same(&setup, requests);
            let stats = engine.stats();
            assert!(stats.run_ahead > stats.steps / 4, "{limits:?}: {stats:?}");
        }
    }
}

#[test]
fn a_token_that_ends_a_request_throws_its_row_away() {
    // Every token that is the fourth of some answer ends whoever gets it.
    let eos: Vec<u32> = (0..4).map(|i| expected(&text(i, 5), 4, 1)[3]).collect();
    let requests = || {
        let mut all: Vec<_> = (0..4).map(|i| greedy(&text(i, 5), 40)).collect();
        all.iter_mut().for_each(|r| r.ignore_eos = false);
        all.extend((4..9).map(|i| greedy(&text(i, 5), 12)));
        all.iter_mut().skip(4).for_each(|r| r.ignore_eos = true);
        all
    };
    let setup = Setup { eos, pages: 300, prefix_cache: false, ..Setup::default() };
    let mut engine = same(&setup, requests);
    assert!(engine.stats().discarded > 0, "{:?}", engine.stats());
    // Whatever the rows for nothing took is free again.
    assert_eq!(told(&engine, "pages.free"), 300);
    let next = GenerateRequest { ignore_eos: true, ..greedy(&text(20, 9), 6) };
    let again = run(&mut engine, vec![next]);
    assert_eq!(again[0].tokens, expected(&text(20, 9), 6, 1));
}

#[test]
fn pools_that_make_requests_give_way() {
    for pages in [22, 30, 50] {
        let limits = EngineLimits { max_batch: 6, max_batch_tokens: 20, max_model_len: 80 };
        let engine = same(&Setup { pages, limits, ..Setup::default() }, requests);
        assert!(engine.stats().run_ahead > 0);
    }
}

#[test]
fn a_request_that_draws_by_its_tokens_has_every_step_wait() {
    type Settings<'a> = &'a [(&'a str, f64)];
    let all: [Settings<'_>; 4] = [
        &[("repetition_penalty", 1.3)],
        &[("presence_penalty", 0.7)],
        &[("frequency_penalty", 0.4)],
        &[("min_tokens", 5.0)],
    ];
    for settings in all {
        let more: Vec<(&str, Value)> = settings
            .iter()
            .map(|&(name, x)| (name, if name == "min_tokens" { json!(5) } else { json!(x) }))
            .collect();
        let requests = || {
            let mut one = drawn(&text(3, 9), 12, 5, &more);
            one.ignore_eos = false;
            vec![one, GenerateRequest { ignore_eos: true, ..greedy(&text(4, 6), 30) }]
        };
        let setup = Setup { eos: vec![1, 2, 3, 5, 8, 13, 21, 34], ..Setup::default() };
        let engine = same(&setup, requests);
        // Only once the other one is alone.
        let stats = engine.stats();
        assert!(stats.run_ahead > 5 && stats.run_ahead < 30, "{settings:?}: {stats:?}");
    }
}

#[test]
fn best_tokens_and_scored_prompts_have_every_step_wait() {
    let requests = || {
        let mut scored = greedy(&text(3, 9), 5);
        scored.logprobs = Some(3);
        vec![scored, greedy(&text(4, 6), 5)]
    };
    let mut engine = Setup { run_ahead: true, ..Setup::default() }.build();
    // The reader reports no best tokens; that it is asked by `forward` alone is what matters here.
    assert!(run(&mut engine, requests()).iter().all(|o| o.tokens.len() == 5));
    assert_eq!(engine.stats().run_ahead, 0);
}

#[test]
fn sessions_and_cached_prompts_find_what_they_find_without() {
    for session in [None, Some("s".to_owned())] {
        let turns = |engine: &mut Engine| {
            let mut prompt = text(1, 13);
            let mut all = Vec::new();
            for _ in 0..4 {
                let request = GenerateRequest { session: session.clone(), ..greedy(&prompt, 9) };
                let got = run(engine, vec![request]).remove(0);
                prompt.extend(&got.tokens);
                prompt.extend(text(7, 3));
                all.push(got);
            }
            all
        };
        let setup = Setup { prefix_cache: session.is_none(), ..Setup::default() };
        let want = turns(&mut setup.build());
        let got = turns(&mut Setup { run_ahead: true, ..setup }.build());
        assert_eq!(got, want);
        assert!(got[3].cached() > 20, "{got:?}");
    }
}

/// Steps until all requests have ended, doing something else before each step.
fn run_with(
    engine: &mut Engine,
    requests: Vec<GenerateRequest>,
    mut before: impl FnMut(&mut Engine, usize, &[RequestId]),
) -> Vec<Outcome> {
    let rids: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut outcomes = vec![Outcome::default(); rids.len()];
    for step in 0.. {
        assert!(step < 2_000, "the engine makes no progress");
        if engine.is_idle() {
            break;
        }
        before(engine, step, &rids);
        for event in engine.step().to_vec() {
            let of = rids.iter().position(|rid| *rid == event.request()).unwrap();
            outcomes[of].take(rids[of], &event);
        }
        reader_cache_is_sound(engine);
    }
    outcomes
}

fn reader_cache_is_sound(engine: &Engine) {
    use resource_api::KvCache;
    reader::cache(engine).assert_pages_conserved().unwrap();
}

#[test]
fn requests_that_are_cancelled_or_moved_between_steps_leave_the_others_as_they_are() {
    let setup = Setup { run_ahead: true, pages: 300, prefix_cache: false, ..Setup::default() };
    let prompts: Vec<_> = (0..6).map(|i| text(i, 4 + i)).collect();
    let requests = || prompts.iter().map(|p| greedy(p, 25)).collect::<Vec<_>>();
    let check = |outcomes: &[Outcome], cancelled: Option<usize>| {
        for (i, (got, prompt)) in outcomes.iter().zip(&prompts).enumerate() {
            if cancelled == Some(i) {
                assert!(got.tokens.len() < 25 && got.end.is_none());
                continue;
            }
            assert_eq!(got.tokens, expected(prompt, 25, 1), "request {i}");
            assert_eq!(got.end.map(|(reason, _)| reason), Some(FinishReason::Length));
        }
    };
    let mut engine = setup.build();
    let got = run_with(&mut engine, requests(), |engine, step, rids| {
        if step == 7 {
            engine.cancel(rids[2]);
        }
    });
    check(&got, Some(2));
    assert_eq!(told(&engine, "pages.free"), 300);

    let mut engine = setup.build();
    let got = run_with(&mut engine, requests(), |engine, step, _| {
        if step % 5 == 4 {
            engine.preempt_one();
        }
    });
    check(&got, None);
    assert!(engine.stats().preemptions > 0 && engine.stats().run_ahead > 0);

    let mut engine = setup.build();
    let got = run_with(&mut engine, requests(), |engine, step, _| {
        engine.run_ahead(step % 3 != 0);
    });
    check(&got, None);
}

#[test]
fn all_that_are_cancelled_leave_an_engine_that_works() {
    let mut engine = Setup { run_ahead: true, pages: 300, ..Setup::default() }.build();
    for round in 0..5 {
        let rids: Vec<_> =
            (0..4).map(|i| engine.submit(greedy(&text(i, 5 + round), 50)).unwrap()).collect();
        for _ in 0..3 + round {
            engine.step();
        }
        assert!(engine.stats().run_ahead > 0);
        rids.into_iter().for_each(|rid| engine.cancel(rid));
        assert!(engine.is_idle() && engine.step().is_empty());
    }
    let got = run(&mut engine, vec![greedy(&text(9, 9), 9)]);
    assert_eq!(got[0].tokens, expected(&text(9, 9), 9, 1));
}

#[test]
fn every_call_of_step_tells_of_one_token_of_each() {
    let mut engine = Setup { run_ahead: true, ..Setup::default() }.build();
    for i in 0..3 {
        engine.submit(greedy(&text(i, 5), 10)).unwrap();
    }
    for _ in 0..10 {
        let tokens = engine.step().iter().filter(|e| matches!(e, Event::Token(..))).count();
        assert_eq!(tokens, 3);
    }
    assert!(engine.is_idle());
}

#[test]
fn an_engine_may_go_at_any_moment_while_others_look_and_cancel() {
    for (run_ahead, preplan) in [(true, true), (false, true), (false, false)] {
        for steps in 0..7 {
            let setup = Setup { run_ahead, preplan, ..Setup::default() };
            let mut engine = setup.build();
            let services = engine.services().clone();
            let rids: Vec<_> = (0..3)
                .map(|i| engine.submit(greedy(&text(i, 4 + i), 3 + 4 * i)).unwrap())
                .collect();
            let entries = engine.resources().entries().iter();
            let resources: Vec<_> = entries.map(|entry| entry.resource().clone()).collect();
            let (canceller, goes) = (engine.canceller(), std::sync::Barrier::new(2));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    goes.wait();
                    for &rid in rids.iter().cycle().take(30) {
                        canceller.cancel(rid);
                        resources.iter().for_each(|r| drop(r.inspect()));
                    }
                });
                (0..steps).for_each(|_| drop(engine.step().to_vec()));
                goes.wait();
                // Steps go on beside them, and then the engine goes with what is in flight.
                engine.step();
                drop(engine);
            });
            // Whoever holds a resource can still ask it; with the last of them its memory goes.
            resources.iter().for_each(|r| drop(r.inspect()));
            assert!(services.free_memory(Device::CPU) < BUDGET);
            drop(resources);
            assert_eq!(services.free_memory(Device::CPU), BUDGET, "after {steps} steps");
        }
    }
}
