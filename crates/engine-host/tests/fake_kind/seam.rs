//! Between plugins and host: whose fault something is, and what is left when a resource goes.

use std::sync::Arc;
use std::time::Duration;

use engine_host::runner::Runner;
use resource_api::{Device, ErrorKind, HostServices, Interface, Resource, ResourceError};
use resource_testkit::Echo;
use serde_json::json;

use crate::fixture::{Bench, build, services, wanted};

#[test]
fn a_panic_in_a_call_by_another_plugin_is_the_fault_of_the_one_that_panicked() {
    let mut bench = Bench::new(&[
        ("a", json!({ "panic_in": "echo" })),
        ("b", json!({ "depends_on": ["a"] })),
        ("c", json!({})),
    ]);
    let rid = bench.ingest(0, &[]);
    let failed = bench.runner.start(bench.step(&[(rid, 1)])).unwrap_err();
    let text = failed.error.to_string();
    assert!(text.starts_with("resource `b`, plan: Echo::echo panicked: echo was asked"), "{text}");
    assert!(bench.entry("a").is_faulted(), "the one that panicked");
    assert!(!bench.entry("b").is_faulted(), "the one that handed it on");
    assert_eq!(bench.runner.free_slots(), 2);
    // The caller can be called, and says that it can not.
    let e = bench.resource("b").reclaimable(rid);
    assert!(e.is_ok(), "{e:?}");
    let usage = bench.runner.usage();
    assert_eq!(usage.iter().map(|u| u.panics).collect::<Vec<_>>(), [1, 0, 0]);
    assert!(usage.iter().all(|u| u.plugin == "testkit"), "{usage:?}");
}

#[test]
fn a_panic_on_a_thread_that_it_started_is_counted_and_puts_nobody_out_of_use() {
    let bench = Bench::new(&[("a", json!({})), ("b", json!({}))]);
    bench.echo("a").start_job(true).unwrap();
    assert!(bench.entry("a").account.join_threads(Duration::from_secs(20)).is_empty());
    let usage = bench.runner.usage();
    assert_eq!(
        usage.iter().map(|u| (u.panics, u.is_faulted)).collect::<Vec<_>>(),
        [(1, false), (0, false)]
    );
}

#[test]
fn memory_is_charged_to_who_takes_it() {
    let bench = Bench::new(&[("a", json!({ "capacity": 100 })), ("b", json!({ "capacity": 50 }))]);
    let usage = bench.runner.usage();
    assert_eq!(usage.iter().map(|u| u.bytes).collect::<Vec<_>>(), [400, 200]);
}

/// A cache of the kit, by itself.
fn cache(settings: serde_json::Value) -> Bench {
    let services = services();
    let set = build(vec![wanted("kv", "fake_kv", settings)], &services).unwrap();
    Bench { runner: Runner::new(Arc::new(set), 2), services }
}

#[test]
fn a_page_outside_of_the_pool_is_charged_to_the_plugin_by_name() {
    let mut sound = cache(json!({}));
    let rid = sound.ingest(0, &[1, 2, 3]);
    let live = sound.start(sound.step(&[(rid, 3)]));
    sound.commit(live);

    let mut bench = cache(json!({ "fault": "page_outside" }));
    let rid = bench.ingest(0, &[1, 2, 3]);
    let failed = bench.runner.start(bench.step(&[(rid, 3)])).unwrap_err();
    assert_eq!(
        failed.error.to_string(),
        "resource `kv` (kind fake_kv, plugin testkit), plan: column write_page has 15, outside of the \
         pool's pages, which are 15; this is a fault of the plugin"
    );
    let entry = bench.entry("kv");
    assert!(entry.is_broken() && !entry.is_faulted());
    assert_eq!(entry.account.bad_values(), 1);
    assert_eq!(bench.inspect("kv")["pages"]["free"], 14, "and the step is rolled back");
}

#[test]
fn a_length_that_goes_backwards_is_charged_to_the_cache() {
    let mut bench = cache(json!({}));
    let rid = bench.ingest(0, &[1, 2, 3]);
    bench.run(&[(rid, 3)]);
    let mut step = bench.step(&[(rid, 1)]);
    step.starts = vec![4];
    let failed = bench.runner.start(step).unwrap_err().error.to_string();
    assert!(failed.contains("has 3 tokens in it, and 4 were computed"), "{failed}");
    let mut step = bench.step(&[(rid, 1)]);
    step.starts = vec![3];
    let live = bench.start(step);
    bench.commit(live);
}

#[test]
fn facts_that_cannot_be_right_are_refused_at_load() {
    let services = services();
    let absurd = json!({ "num_qo_heads": 0 });
    let e = build(vec![wanted("kv", "fake_kv", absurd)], &services).unwrap_err();
    let text = e.to_string();
    assert!(text.starts_with("[resources.kv] (kind fake_kv, plugin testkit)"), "{text}");
    assert!(text.contains("num_qo_heads = 0; this is a fault of the plugin"), "{text}");
    assert_eq!(services.free_memory(Device::CPU), 1 << 20, "what it took is given back");
}

#[test]
fn a_capability_outlives_the_resources_and_calls_in_flight_end_well() {
    let bench = Bench::new(&[("a", json!({})), ("b", json!({}))]);
    let echo = bench.echo("a");
    let services = bench.services.clone();
    let calls = std::thread::spawn(move || {
        (0..2000).map(|i| echo.spread(i % 8, None)).collect::<resource_api::Result<Vec<_>>>()
    });
    drop(bench);
    // Whoever still holds a handle holds the resource.
    let answers = calls.join().unwrap().unwrap();
    assert_eq!(answers[7], 21);
    assert_eq!(services.free_memory(Device::CPU), 1 << 20, "and then it is gone");
}

#[test]
fn calls_in_flight_in_a_resource_that_panics_end_well() {
    const TASKS: u32 = 1_000_000;
    let sum = u64::from(TASKS) * u64::from(TASKS - 1) / 2;
    // Whether the call is in the plugin when the mark comes is up to the system's scheduler.
    let was_in_flight = (0..200).any(|_| {
        let bench = Bench::new(&[("a", json!({})), ("b", json!({}))]);
        let (echo, other) = (bench.echo("a"), bench.echo("b"));
        let calls = std::thread::spawn(move || (echo.spread(TASKS, None), echo.echo(&[1], None)));
        std::thread::sleep(Duration::from_millis(1));
        // As a panic in another call leaves it.
        bench.entry("a").resource().object().fault().set();
        let (first, second) = calls.join().unwrap();
        assert_eq!(other.echo(&[1], None).unwrap(), 2);
        let refused = |e: ResourceError| assert_eq!(e.kind(), ErrorKind::POISONED);
        let first = first.map(|answer| assert_eq!(answer, sum)).map_err(refused);
        let second = second.map(|answer| assert_eq!(answer, 2)).map_err(refused);
        (first, second) == (Ok(()), Err(()))
    });
    assert!(was_in_flight);
}

#[test]
fn resources_are_built_anew_in_order_with_all_that_hold_on_to_them() {
    let services = services();
    let list = [
        ("a", json!({ "accepts": ["org.testkit.echo"] })),
        ("b", json!({})),
        ("c", json!({ "depends_on": ["b"] })),
        ("d", json!({ "depends_on": ["c"] })),
        ("e", json!({})),
    ];
    let list = list.into_iter().map(|(key, settings)| wanted(key, "fake", settings)).collect();
    let mut set = build(list, &services).unwrap();
    let before = services.free_memory(Device::CPU);
    let echo = |set: &engine_host::resources::ResourceSet, key: &str| {
        let (_, entry) = set.find(key).unwrap();
        entry.capabilities()[0].open::<resource_testkit::EchoHandle>().unwrap()
    };
    let old = echo(&set, "b");
    assert_eq!(set.rebuild("b").unwrap(), ["b", "c", "d"]);
    let keys: Vec<&str> = set.entries().iter().map(|e| e.key.as_str()).collect();
    assert_eq!(keys, ["a", "b", "c", "d", "e"], "each in its place");
    let restarts: Vec<u64> = set.entries().iter().map(|e| e.account.restarts()).collect();
    assert_eq!(restarts, [0, 1, 1, 1, 0]);
    assert_eq!(echo(&set, "a").peers(), ["b", "c", "d", "e"], "bound to the new ones");
    assert_eq!(old.key(), "b", "a handle to the old one still works");
    drop(old);
    assert_eq!(services.free_memory(Device::CPU), before);
    assert_eq!(set.rebuild("e").unwrap(), ["e"]);
    drop(set);
    assert_eq!(services.free_memory(Device::CPU), 1 << 20);
}

#[test]
fn errors_of_the_kinds_stay_what_they_are_through_the_boundary() {
    let bench = Bench::new(&[("a", json!({}))]);
    let e = bench.echo("a").echo(&[1], Some("bad")).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::INVALID);
    assert!(!bench.entry("a").is_broken());
}
