//! Requests that are cancelled, or whose time is up, at every stage of their life: waiting, in the middle of
//! a prompt, generating, off the device, set back. What they held is free within two steps, and others
//! get what they would have got.

mod reader;

use std::collections::BTreeMap;
use std::time::Duration;

use engine_host::engine::{Engine, Remedy};
use engine_host::request::Event;
use reader::{Outcome, Setup, cache, expected, greedy, told};
use resource_api::{EngineLimits, KvCache, RequestId, Resource};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_millis(40);

/// What the cache has of a request.
fn streams_of(engine: &Engine, rid: RequestId) -> Vec<Value> {
    let text = engine.resources().find("main_kv").unwrap().1.resource().inspect();
    let all: Value = serde_json::from_str(&text).unwrap();
    let name = json!(rid.to_string());
    all["streams"].as_array().unwrap().iter().filter(|s| s["request"] == name).cloned().collect()
}

/// Where a request with a prompt of so many tokens is; `None` once it has ended.
fn stage(engine: &Engine, rid: RequestId, prompt: u64, set_back: bool) -> Option<&'static str> {
    engine.usage_of(rid)?;
    let computed: u64 = streams_of(engine, rid).iter().map(|s| s["tokens"].as_u64().unwrap()).sum();
    Some(match computed {
        _ if told(engine, "away") > 0 => "away",
        0 if set_back => "set back",
        0 => "waiting",
        n if n < prompt => "in its prompt",
        _ => "generating",
    })
}

#[test]
fn what_a_request_held_is_free_within_two_steps_whatever_it_was_doing() {
    let mut seen: BTreeMap<(bool, &str), u32> = BTreeMap::new();
    for (host_pages, chunk) in [(0, 64), (0, 3), (200, 5)] {
        for by_deadline in [true, false] {
            for at in 0..24 {
                let limits =
                    EngineLimits { max_batch: 4, max_batch_tokens: chunk, max_model_len: 64 };
                let kv =
                    if host_pages > 0 { json!({ "host_pages": host_pages }) } else { json!({}) };
                let setup = Setup { pages: 9, prefix_cache: false, limits, kv, ..Setup::default() };
                let mut engine = setup.build();
                let (long, late): (Vec<u32>, Vec<u32>) = ((1..13).collect(), (20..34).collect());
                let other = engine.submit(greedy(&long, 16)).unwrap();
                let mut request = greedy(&late, 12);
                request.timeout = by_deadline.then_some(TIMEOUT);
                let late = engine.submit(request).unwrap();
                let (mut got, mut failed, mut set_back) = (Outcome::default(), None, false);
                let mut step = |engine: &mut Engine, failed: &mut Option<String>| {
                    for event in engine.step().to_vec() {
                        got.take(other, &event);
                        if let Event::Failed(rid, why) = event
                            && rid == late
                        {
                            *failed = Some(why.message);
                        }
                    }
                    let gave_way = |r: &Remedy| matches!(r, Remedy::GaveWay(rid) if *rid == late);
                    engine.refusals().iter().any(|r| gave_way(&r.remedy))
                };
                for _ in 0..at {
                    set_back |= step(&mut engine, &mut failed);
                }
                let at_stage = stage(&engine, late, 14, set_back);
                match by_deadline {
                    true => std::thread::sleep(TIMEOUT + Duration::from_millis(1)),
                    false => engine.canceller().cancel(late),
                }
                for _ in 0..2 {
                    step(&mut engine, &mut failed);
                }
                if let Some(stage) = at_stage {
                    *seen.entry((by_deadline, stage)).or_default() += 1;
                    // A loaded machine may have let its time pass before.
                    assert_eq!(failed.is_some(), by_deadline, "{stage}: {failed:?}");
                    let said = failed.as_deref().unwrap_or("the request's time is up, after");
                    assert!(said.starts_with("the request's time is up, after"), "{stage}: {said}");
                }
                assert_eq!((streams_of(&engine, late), told(&engine, "away")), (vec![], 0));
                let held: u64 =
                    streams_of(&engine, other).iter().map(|s| s["pages"].as_u64().unwrap()).sum();
                assert_eq!(cache(&engine).free_pages() + held, 9, "{at_stage:?} after {at} steps");
                while !engine.is_idle() {
                    step(&mut engine, &mut failed);
                    cache(&engine).assert_pages_conserved().unwrap();
                }
                assert_eq!(got.tokens, expected(&long, 16, 1), "{at_stage:?} after {at} steps");
                assert_eq!(cache(&engine).free_pages(), 9);
            }
        }
    }
    for by_deadline in [true, false] {
        for stage in ["waiting", "in its prompt", "generating", "away", "set back"] {
            assert!(seen.contains_key(&(by_deadline, stage)), "{stage} was never met: {seen:?}");
        }
    }
}
