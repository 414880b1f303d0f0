//! Who gives way and who may pass whom in an engine: whatever the policies say, everybody gets what it
//! would have got alone, and nobody gives way for ever.

mod reader;

use engine_host::engine::{Engine, Queue, Remedy, Victims};
use engine_host::request::GenerateRequest;
use reader::{Outcome, Setup, cache, expected, greedy, told};
use resource_api::{EngineLimits, KvCache, RequestId};
use serde_json::json;

/// As the scheduler has it.
const MOST_SET_BACK: usize = 3;

fn victims() -> [Victims; 3] {
    [Victims::Youngest, Victims::LeastRecent, Victims::Priority("main_kv".into())]
}

fn engine(setup: &Setup, victims: &Victims, queue: Queue) -> Engine {
    let mut engine = setup.build();
    engine.set_victims(victims.clone()).unwrap();
    engine.set_queue(queue);
    engine
}

/// Submits a request before every step in which `when` says so, and runs all to their end. Gives what
/// came of each and how often it gave way, in the order in which they came.
fn run(
    engine: &mut Engine,
    requests: Vec<GenerateRequest>,
    when: impl Fn(usize, usize) -> bool,
) -> Vec<(Outcome, usize)> {
    let mut coming = requests.into_iter();
    let (mut rids, mut outcomes): (Vec<RequestId>, Vec<(Outcome, usize)>) = Default::default();
    let mut step = 0;
    while coming.len() > 0 || !engine.is_idle() {
        while coming.len() > 0 && (engine.is_idle() || when(step, rids.len())) {
            rids.extend(coming.next().map(|request| engine.submit(request).unwrap()));
            outcomes.push((Outcome::default(), 0));
        }
        let events = engine.step().to_vec();
        for (rid, (outcome, _)) in rids.iter().zip(&mut outcomes) {
            events.iter().for_each(|event| outcome.take(*rid, event));
        }
        for refusal in engine.refusals() {
            if let Remedy::GaveWay(rid) | Remedy::Offloaded(rid) = refusal.remedy {
                outcomes[rids.iter().rposition(|&r| r == rid).unwrap()].1 += 1;
            }
        }
        cache(engine).assert_pages_conserved().unwrap();
        step += 1;
        assert!(step < 20_000, "the engine makes no progress");
    }
    outcomes
}

#[test]
fn everybody_gets_done_whoever_gives_way_and_whoever_passes() {
    let prompt =
        |i: u32| -> Vec<u32> { (0..2 + i * 7 % 23).map(|at| (i + at * at) % 60).collect() };
    let request = |i: u32| greedy(&prompt(i), 3 + i * 5 % 17);
    for (host_pages, chunk) in [(0, 64), (0, 5), (200, 64), (3, 9)] {
        for victims in victims() {
            for queue in [Queue::Strict, Queue::Skip(1), Queue::Skip(3)] {
                let limits =
                    EngineLimits { max_batch: 8, max_batch_tokens: chunk, max_model_len: 64 };
                let kv =
                    if host_pages > 0 { json!({ "host_pages": host_pages }) } else { json!({}) };
                let setup = Setup { pages: 12, limits, kv, ..Setup::default() };
                let mut engine = engine(&setup, &victims, queue);
                let how = format!("{victims}, {queue}, {host_pages} host pages, chunks of {chunk}");
                let got =
                    run(&mut engine, (0..30).map(request).collect(), |step, n| step * 2 / 3 >= n);
                for (i, (outcome, gave_way)) in got.iter().enumerate() {
                    let want = expected(&prompt(i as u32), 3 + i * 5 % 17, 1);
                    assert_eq!((&outcome.tokens, &outcome.failure), (&want, &None), "{i}: {how}");
                    let most = match queue {
                        Queue::Strict => 0,
                        Queue::Skip(most) => most as usize,
                    };
                    assert!(
                        *gave_way <= MOST_SET_BACK + i + most,
                        "{i} gave way {gave_way} times: {how}"
                    );
                }
                let total: usize = got.iter().map(|(_, gave_way)| gave_way).sum();
                assert!(total > 0, "nobody gave way: {how}");
                assert_eq!(
                    told(&engine, "pages.free") + told(&engine, "pages.cached"),
                    12,
                    "{how}"
                );
            }
        }
    }
}

#[test]
fn who_holds_most_gives_way_no_more_than_so_often_while_others_keep_coming() {
    // The first holds more than any other at all times, so that the cache wants it gone.
    for queue in [Queue::Strict, Queue::Skip(2)] {
        let limits = EngineLimits { max_batch: 8, max_batch_tokens: 64, max_model_len: 64 };
        let setup = Setup { pages: 12, prefix_cache: false, limits, ..Setup::default() };
        let mut engine = engine(&setup, &Victims::Priority("main_kv".into()), queue);
        let long: Vec<u32> = (1..25).collect();
        let mut requests = vec![greedy(&long, 20)];
        requests.extend((0..150).map(|i| greedy(&[i % 60, 7, 8], 9)));
        let got = run(&mut engine, requests, |step, n| step >= n);
        let (first, gave_way) = &got[0];
        assert_eq!(first.tokens, expected(&long, 20, 1));
        assert!((1..=MOST_SET_BACK).contains(gave_way), "{queue}: {gave_way} times");
    }
}

#[test]
fn a_small_request_passes_one_that_waits_for_room_only_where_it_may() {
    let (long, short): (Vec<u32>, Vec<u32>) = ((0..28).collect(), vec![1, 2, 3]);
    let first_done = |queue| {
        let setup = Setup { pages: 12, prefix_cache: false, ..Setup::default() };
        let mut engine = engine(&setup, &Victims::Youngest, queue);
        let requests = [greedy(&long, 16), greedy(&long, 16), greedy(&short, 2), greedy(&short, 2)];
        let rids = requests.map(|request| engine.submit(request).unwrap());
        let mut ended = Vec::new();
        while !engine.is_idle() {
            for event in engine.step() {
                if let engine_host::request::Event::Finished(rid, ..) = event {
                    ended.push(rids.iter().position(|r| r == rid).unwrap());
                }
            }
        }
        ended
    };
    assert_eq!(first_done(Queue::Strict)[0], 0, "nobody passes the second");
    assert_eq!(first_done(Queue::Skip(1)), [2, 0, 3, 1], "one passes it");
    assert_eq!(first_done(Queue::Skip(2)), [2, 3, 0, 1], "both pass it");
}

#[test]
fn a_resource_that_does_not_exist_is_named_with_the_nearest() {
    let mut engine = Setup::default().build();
    let e = engine.set_victims(Victims::Priority("main_kb".into())).unwrap_err().to_string();
    assert_eq!(
        e,
        "victims = \"priority:main_kb\" names resource \"main_kb\", which does not exist; did you mean \
         \"main_kv\"?"
    );
}
