//! What the engine tells of refusals, and requests whose time is up.

mod support;

use std::time::Duration;

use engine_host::engine::{Engine, Remedy};
use engine_host::request::Event;
use resource_api::{FailureReason, KvCache, KvCacheHandle};
use support::{config, greedy, load};

fn engine(kv: &str) -> Engine {
    load(&config("max_model_len = 160", &format!("{kv}\nprefix_cache = false"))).engine
}

fn free_pages(engine: &Engine) -> u64 {
    let (_, kv) = engine.resources().find("main_kv").unwrap();
    let cache: KvCacheHandle = kv.capabilities()[0].open().unwrap();
    cache.free_pages()
}

#[test]
fn a_refusal_says_who_needs_what_and_what_is_done() {
    let mut engine = engine("pages = 9");
    let all = free_pages(&engine);
    // Two requests of 40 + 40 tokens want 10 pages; there are 8.
    let rids: Vec<_> =
        (0..2).map(|i| engine.submit(greedy(vec![10 + i; 40], 40)).unwrap()).collect();
    let mut told = Vec::new();
    let mut ends = 0;
    while !engine.is_idle() {
        let events = engine.step();
        ends += events.iter().filter(|e| matches!(e, Event::Finished(..))).count();
        told.extend(engine.refusals().iter().cloned());
    }
    assert_eq!(ends, 2, "both get done");
    let first = &told[0];
    assert_eq!(
        (first.resource.as_str(), first.reason),
        ("main_kv", FailureReason::ALLOCATION_FAILED)
    );
    assert_eq!(first.remedy, Remedy::GaveWay(rids[1]), "the youngest gives way");
    assert!(first.need > first.have, "{first}");
    let line = first.to_string();
    assert!(line.starts_with("resource `main_kv`: ") && !line.contains('\n'), "{line}");
    assert!(line.ends_with("gives way, and goes on when a running one has ended"), "{line}");
    let counted = engine.services().metrics()["main_kv.refusals"];
    assert_eq!(counted, engine_host::services::Metric::Counter(told.len() as u64));
    assert_eq!(free_pages(&engine), all);
}

#[test]
fn a_request_whose_time_is_up_fails_alone_and_gives_its_pages_back() {
    let mut engine = engine("pages = 64");
    let all = free_pages(&engine);
    let mut late = greedy(vec![11; 20], 100);
    late.timeout = Some(Duration::from_millis(1));
    let late = engine.submit(late).unwrap();
    let mut patient = greedy(vec![12; 20], 5);
    patient.timeout = Some(Duration::from_secs(3600));
    let patient = engine.submit(patient).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    let first = engine.step().to_vec();
    let is_late = |e: &Event| {
        matches!(e, Event::Failed(rid, why) if *rid == late
        && why.message == "the request's time is up, after 0 tokens")
    };
    assert!(first.iter().any(is_late), "{first:?}");
    let mut tokens = first.iter().filter(|e| matches!(e, Event::Token(..))).count();
    while !engine.is_idle() {
        for event in engine.step() {
            match event {
                Event::Token(rid, _) if *rid == patient => tokens += 1,
                Event::Finished(rid, ..) => assert_eq!(*rid, patient),
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(tokens, 5);
    assert_eq!(free_pages(&engine), all);
}
