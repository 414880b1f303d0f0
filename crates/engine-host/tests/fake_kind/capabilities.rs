//! Capabilities in both directions, an interface of a third party, and services of the host.

use resource_api::host::HostServices;
use resource_api::{Capability, Device, ErrorKind, Offered, Resource};
use resource_testkit::Echo;
use serde_json::json;

use engine_host::services::Metric;

use crate::fixture::{Bench, build, info, registry, services, spec, wanted};

/// `base` is built first and takes what later ones offer; they are built on it.
fn both_ways() -> Bench {
    Bench::new(&[
        ("base", json!({ "accepts": ["org.testkit.echo"] })),
        ("deep", json!({ "depends_on": ["late"], "accepts": ["org.testkit.echo"] })),
        ("late", json!({ "depends_on": ["base"] })),
        ("other", json!({ "accepts": ["org.testkit.nobody"] })),
    ])
}

#[test]
fn resources_are_built_dependencies_first_and_bound_in_that_order() {
    let bench = both_ways();
    let order: Vec<&str> =
        bench.runner.resources().entries().iter().map(|e| e.key.as_str()).collect();
    assert_eq!(order, ["base", "late", "deep", "other"]);
    for (index, key) in order.iter().enumerate() {
        assert_eq!(bench.inspect(key)["index"], index);
    }
    assert_eq!(bench.echo("base").peers(), ["late", "deep", "other"]);
    assert_eq!(bench.echo("deep").peers(), ["other"], "only what is built later");
    assert_eq!(bench.echo("late").peers(), Vec::<String>::new(), "it accepts nothing");
    assert_eq!(bench.echo("other").peers(), Vec::<String>::new(), "nobody offers that");
    assert_eq!(bench.calls(&["bind"]), ["base.bind", "deep.bind", "other.bind"]);
    assert_eq!(bench.runner.resources().of_node("decoder").len(), 4);
}

#[test]
fn a_plan_calls_upstream_and_downstream() {
    let mut bench = both_ways();
    let rid = bench.ingest(0, &[]);
    let live = bench.start(bench.step(&[(rid, 3)]));
    let ctx = live.ctx();
    // An echo adds the length of the key that answers to the span of 3.
    let base = bench.plan(&ctx, "base");
    assert_eq!((base.dependency_echo, base.peer_echo), (0, (3 + 4) + (3 + 4) + (3 + 5)));
    let deep = bench.plan(&ctx, "deep");
    assert_eq!((deep.dependency_echo, deep.peer_echo), (3 + 4, 3 + 5));
    assert_eq!(bench.calls(&["echo"]).len(), 3 + 1 + 2);
    bench.commit(live);
}

#[test]
fn an_interface_of_a_third_party_works_across_the_boundary() {
    let bench = Bench::new(&[("quota", json!({}))]);
    let echo = bench.echo("quota");
    assert_eq!(echo.key(), "quota");
    assert_eq!(echo.echo(&[1, 2, 3], Some("fine")).unwrap(), 11);
    assert_eq!(echo.echo(&[], None).unwrap(), 5);
    assert_eq!(echo.twice(&[1, 2, 3]).unwrap(), 22, "a default that calls back in");
    let e = echo.echo(&[1], Some("bad")).unwrap_err();
    assert_eq!((e.kind(), e.message()), (ErrorKind::INVALID, "label `bad` is never echoed"));
    let offered: Vec<String> = bench
        .entry("quota")
        .capabilities()
        .iter()
        .map(|c| format!("{}/{}", c.id(), c.major()))
        .collect();
    assert_eq!(offered, ["org.testkit.echo/1"]);
}

#[test]
fn another_interface_than_the_accepted_one_is_refused() {
    let bench = Bench::new(&[("a", json!({}))]);
    let built = registry().build_resource(&spec("p", "panicker", json!({})), info()).unwrap();
    let sampler = built.capabilities.into_iter().find(|c| c.id() == "sampler").unwrap();
    let offered = Offered { key: "p".into(), capability: sampler };
    let e = bench.resource("a").bind(vec![offered]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::INCOMPATIBLE);
    assert!(e.message().starts_with("expected org.testkit.echo/1, found sampler/1"), "{e}");
    assert!(!bench.entry("a").is_faulted());
}

#[test]
fn dropping_unties_cycles_and_goes_backwards() {
    let bench = both_ways();
    let services = bench.services.clone();
    // Four pools of 64 tokens of four bytes.
    let all = services.free_memory(Device::CPU) + 4 * 64 * 4;
    drop(bench);
    assert_eq!(services.free_memory(Device::CPU), all);
    let metrics = services.metrics();
    let dropped = |key: &str| match metrics[&format!("{key}.dropped")] {
        Metric::Gauge(at) => at,
        other => panic!("{other:?}"),
    };
    let at = ["other", "deep", "late", "base"].map(dropped);
    assert!(at.is_sorted(), "{at:?}");
}

#[test]
fn a_load_that_fails_leaves_nothing_over() {
    let services = services();
    let all = services.free_memory(Device::CPU);
    let list = vec![
        wanted("first", "fake", json!({})),
        wanted("large", "fake", json!({ "capacity": 1 << 20, "depends_on": ["first"] })),
    ];
    let e = build(list, &services).unwrap_err();
    let text = e.to_string();
    let place = "[resources.large] (kind fake, plugin testkit): ";
    assert!(text.starts_with(place) && text.contains("4194304 bytes on cpu"), "{text}");
    assert_eq!(services.free_memory(Device::CPU), all);
    let e = build(vec![wanted("a", "fake", json!({ "capacty": 1 }))], &services).unwrap_err();
    assert_eq!(e.to_string(), "[resources.a]: unknown key `capacty`; did you mean `capacity`?");
}

#[test]
fn plugins_use_the_pool_and_the_threads_of_the_host() {
    let bench = Bench::new(&[("a", json!({}))]);
    let echo: resource_testkit::EchoHandle =
        bench.entry("a").capabilities().first().map(Capability::open).unwrap().unwrap();
    assert_eq!(echo.spread(100, None).unwrap(), (0..100).sum::<u64>());
    assert_eq!(echo.spread(0, None).unwrap(), 0);
    echo.start_job(false).unwrap();
    echo.start_job(false).unwrap();
    bench.services.join_threads();
    assert_eq!(echo.jobs_done(), 2);
}
