//! Requests that leave small pools and come back, begin alike, or go on with a session, through a node that
//! tells what it read.

mod reader;

use engine_host::engine::{Engine, Relief, Remedy};
use engine_host::request::GenerateRequest;
use reader::{Outcome, Setup, cache, expected, greedy, run, told};
use resource_api::KvCache;
use serde_json::{Value, json};

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 1 + (seed * 31 + i * i * 7 + i * seed) % 60).collect()
}

fn setup(pages: u32, kv: Value) -> Setup {
    Setup { pages, kv, ..Setup::default() }
}

/// So many requests of different lengths, with what each should give.
fn requests(count: u32) -> (Vec<GenerateRequest>, Vec<Vec<u32>>) {
    let one = |i: u32| {
        let (prompt, tokens) = (prompt(i, 5 + 7 * (i % 5)), 6 + i % 9);
        (greedy(&prompt, tokens), expected(&prompt, tokens as usize, 1))
    };
    (0..count).map(one).unzip()
}

fn tokens(outcomes: &[Outcome]) -> Vec<Vec<u32>> {
    assert!(outcomes.iter().all(|o| o.failure.is_none()), "{outcomes:?}");
    outcomes.iter().map(|o| o.tokens.clone()).collect()
}

fn assert_clean(engine: &Engine, pages: u32) {
    assert_eq!(cache(engine).free_pages(), u64::from(pages));
    assert_eq!(told(engine, "away"), 0);
    assert_eq!(told(engine, "tier_failures"), 0);
}

#[test]
fn requests_that_leave_come_back_with_what_they_read() {
    for (pages, host, prefix_cache) in
        [(14, 200, true), (14, 200, false), (20, 12, true), (14, 8, false)]
    {
        let base = setup(pages, json!({ "host_pages": host }));
        let mut engine = Setup { prefix_cache, ..base }.build();
        let (all, want) = requests(12);
        assert_eq!(tokens(&run(&mut engine, all)), want, "{pages} pages, {host} in host memory");
        let stats = engine.stats();
        assert!(stats.offloads > 0, "{pages} pages, {host} in host memory: {stats:?}");
        assert_clean(&engine, pages);
    }
}

#[test]
fn everybody_leaves_before_every_step() {
    let mut engine = setup(64, json!({ "host_pages": 200 })).build();
    let (all, want) = requests(6);
    let rids: Vec<_> = all.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut outcomes = vec![Outcome::default(); rids.len()];
    let mut steps = 0;
    while !engine.is_idle() {
        engine.offload_running();
        let events = engine.step().to_vec();
        for (rid, outcome) in rids.iter().zip(&mut outcomes) {
            events.iter().for_each(|event| outcome.take(*rid, event));
        }
        cache(&engine).assert_pages_conserved().unwrap();
        steps += 1;
        assert!(steps < 500, "the engine makes no progress");
    }
    assert_eq!(tokens(&outcomes), want);
    let stats = engine.stats();
    assert!(stats.offloads > 20 && stats.offloads == stats.reloads, "{stats:?}");
    assert_eq!(stats.preemptions, 0);
    assert_clean(&engine, 64);
}

#[test]
fn the_order_of_relief_is_the_configured_one() {
    for (order, offloads) in
        [(&Relief::ORDER[..], true), (&[Relief::Evict, Relief::Recompute], false)]
    {
        let mut engine = setup(14, json!({ "host_pages": 200 })).build();
        engine.set_relief(order);
        let (all, want) = requests(8);
        let mut told = Vec::new();
        let rids: Vec<_> = all.into_iter().map(|r| engine.submit(r).unwrap()).collect();
        let mut outcomes = vec![Outcome::default(); rids.len()];
        while !engine.is_idle() {
            let events = engine.step().to_vec();
            told.extend(engine.refusals().iter().map(|refusal| refusal.remedy));
            for (rid, outcome) in rids.iter().zip(&mut outcomes) {
                events.iter().for_each(|event| outcome.take(*rid, event));
            }
        }
        assert_eq!(tokens(&outcomes), want);
        assert_eq!(told.iter().any(|r| matches!(r, Remedy::Offloaded(_))), offloads, "{told:?}");
        assert_eq!(engine.stats().offloads > 0, offloads);
        assert!(offloads || engine.stats().preemptions > 0);
    }
}

#[test]
fn requests_that_are_away_and_share_pages_do_not_block_each_other() {
    // All begin with most of the pool.
    let common = prompt(3, 32);
    let request = |i: u32| [common.clone(), vec![1 + i, 2 + i]].concat();
    for pages in [12, 13, 16] {
        let mut engine = setup(pages, json!({ "host_pages": 60 })).build();
        let all = (0..6).map(|i| greedy(&request(i), 10)).collect();
        let want: Vec<_> = (0..6).map(|i| expected(&request(i), 10, 1)).collect();
        assert_eq!(tokens(&run(&mut engine, all)), want, "{pages} pages");
        assert_clean(&engine, pages);
    }
}

#[test]
fn a_common_beginning_is_computed_once_and_found_in_every_tier() {
    let common = prompt(5, 40);
    let request = |i: u32| [common.clone(), vec![1 + i, 2 + i, 3 + i]].concat();
    for chunk in [8, 64] {
        let mut base = setup(200, json!({ "host_pages": 60 }));
        base.limits.max_batch_tokens = chunk;
        let mut engine = base.build();
        let all = (0..16).map(|i| greedy(&request(i), 3)).collect();
        let outcomes = run(&mut engine, all);
        let want: Vec<_> = (0..16).map(|i| expected(&request(i), 3, 1)).collect();
        assert_eq!(tokens(&outcomes), want);
        assert!(outcomes[1..].iter().all(|o| o.cached() == 40), "{outcomes:?}");
        // Ten pages once, and three tokens of each; some tokens of decode steps are counted with them.
        let computed = engine.stats().prefill_tokens;
        assert!(computed <= 40 + 16 * (3 + 3), "{computed} tokens were computed");
    }
    let mut small = setup(16, json!({ "host_pages": 60 })).build();
    for i in 0..4 {
        let outcome = run(&mut small, vec![greedy(&request(i), 3)]).remove(0);
        assert_eq!(outcome.cached(), if i == 0 { 0 } else { 40 });
        // Something else takes the whole pool meanwhile.
        run(&mut small, vec![greedy(&prompt(20 + i, 50), 8)]);
    }
    assert!(told(&small, "restored") >= 24, "{}", told(&small, "restored"));
}

fn turn(prompt: &[u32], session: &str) -> GenerateRequest {
    GenerateRequest { session: Some(session.into()), ..greedy(prompt, 5) }
}

#[test]
fn a_session_goes_on_where_it_was_also_without_a_prefix_cache() {
    let base = Setup { prefix_cache: false, ..setup(40, json!({})) };
    let mut engine = base.build();
    let first = prompt(1, 11);
    let said = run(&mut engine, vec![turn(&first, "chat")]).remove(0).tokens;
    assert_eq!(engine.sessions().collect::<Vec<_>>(), ["chat"]);
    let second = [first, said, vec![9, 8]].concat();
    let outcome = run(&mut engine, vec![turn(&second, "chat")]).remove(0);
    assert_eq!(outcome.tokens, expected(&second, 5, 1));
    // The last token of the first turn was never computed.
    assert_eq!(outcome.cached(), 15);
    // One that differs from the eleventh token on, one that is the same, one that has nothing in common.
    let mut other = second.clone();
    other[10] ^= 1;
    for (prompt, cached) in [(other.clone(), 10), (other, 17), (prompt(9, 12), 0)] {
        let outcome = run(&mut engine, vec![turn(&prompt, "chat")]).remove(0);
        assert_eq!(
            (outcome.tokens, outcome.end.unwrap().1.cached_tokens),
            (expected(&prompt, 5, 1), cached)
        );
    }
    engine.remove_session("chat");
    engine.remove_session("chat");
    assert_eq!((engine.sessions().count(), cache(&engine).free_pages()), (0, 40));
}

#[test]
fn sessions_are_bounded_and_give_way() {
    let mut engine = Setup { prefix_cache: false, ..setup(12, json!({})) }.build();
    engine.set_max_sessions(2);
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        run(&mut engine, vec![turn(&prompt(i as u32, 9), name)]);
    }
    assert_eq!(engine.sessions().collect::<Vec<_>>(), ["b", "c"]);
    let long = prompt(7, 38);
    assert_eq!(run(&mut engine, vec![greedy(&long, 6)]).remove(0).tokens, expected(&long, 6, 1));
    // The cache has forgotten one that the engine still knows.
    let again = prompt(1, 9);
    let outcome = run(&mut engine, vec![turn(&again, "b")]).remove(0);
    assert_eq!((outcome.tokens.clone(), outcome.cached()), (expected(&again, 5, 1), 0));
    // One of two goes on with it.
    let both = run(&mut engine, vec![turn(&again, "b"), turn(&again, "b")]);
    assert!(both.iter().all(|o| o.tokens == outcome.tokens));
    engine.set_max_sessions(0);
    assert_eq!(cache(&engine).free_pages(), 12);
}
