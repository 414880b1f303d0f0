//! A resource that panics in the middle of the work, and cancelling from other threads.

mod support;

use std::sync::atomic::{AtomicU32, Ordering};

use engine_host::ErrorKind;
use engine_host::engine::{Engine, OnFault};
use engine_host::registry::Registry;
use engine_host::request::Event;
use engine_host::setup;
use resource_api::{
    EngineResourceInfo, KvCache, KvCacheHandle, NodeResourceSpec, Resource, ResourceKind,
    ResourceStep, Result, StepContext,
};
use support::{config, greedy};

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    panics_in_commit: u32,
}

/// Panics in its n-th commit.
struct Bomb(AtomicU32);

impl Resource for Bomb {
    fn commit(&self, _step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        assert!(self.0.fetch_sub(1, Ordering::Relaxed) != 1, "the bomb goes off");
        Ok(())
    }
}

impl ResourceKind for Bomb {
    type Spec = Settings;
    const KIND: &'static str = "bomb";
    fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(Self(AtomicU32::new(spec.settings.panics_in_commit)))
    }
}

fn engine_with_bomb(on_fault: OnFault) -> Engine {
    let mut config = config("max_model_len = 160", "pages = 64\nprefix_cache = false");
    let mut section = config.resources["sampler"].clone();
    section.kind = "bomb".into();
    section.on_fault = on_fault;
    section.settings = toml::toml! { panics_in_commit = 3 };
    config.resources.insert("bomb".into(), section);
    let discovery = setup::discover(&config).unwrap();
    let mut registry = Registry::load(&discovery, None);
    registry.link(resource_api::kind::<Bomb>());
    let loaded = setup::load_with(&config, &mut registry, &discovery, &mut |_, _| {});
    loaded.unwrap_or_else(|e| panic!("{e}")).engine
}

fn free_pages(engine: &Engine) -> u64 {
    let (_, kv) = engine.resources().find("main_kv").unwrap();
    let cache: KvCacheHandle = kv.capabilities()[0].open().unwrap();
    cache.free_pages()
}

/// Steps until all is done; the failures' messages.
fn failures(engine: &mut Engine) -> Vec<String> {
    let mut failed = Vec::new();
    while !engine.is_idle() {
        for event in engine.step() {
            match event {
                Event::Failed(_, why) => failed.push(why.message.clone()),
                Event::Finished(..) | Event::HandedOver(..) => panic!("nobody can finish"),
                Event::Token(..) | Event::Prompt(..) => {}
            }
        }
    }
    failed
}

#[test]
fn requests_fail_with_the_panics_place_and_pages_come_back() {
    let mut engine = engine_with_bomb(OnFault::FailRequests);
    let all = free_pages(&engine);
    for _ in 0..2 {
        engine.submit(greedy(vec![11; 20], 50)).unwrap();
    }
    let failed = failures(&mut engine);
    assert_eq!(failed.len(), 2);
    for why in failed {
        assert!(
            why.contains("resource `bomb`, commit") && why.contains("the bomb goes off"),
            "{why}"
        );
    }
    assert_eq!(free_pages(&engine), all);
    let usage = engine.usage();
    let bomb = usage.iter().find(|u| u.key == "bomb").unwrap();
    assert_eq!((bomb.panics, bomb.is_faulted), (1, true));
    assert!(usage.iter().all(|u| u.calls > 0), "{usage:?}");
    // Whoever comes later is told at once or at its first step, and nothing hangs.
    match engine.submit(greedy(vec![11; 20], 50)) {
        Ok(_) => assert_eq!(failures(&mut engine).len(), 1),
        Err(e) => assert!(e.to_string().contains("bomb"), "{e}"),
    }
    assert_eq!(free_pages(&engine), all);
}

#[test]
fn an_engine_that_is_to_stop_ends_everything_and_takes_no_more() {
    let mut engine = engine_with_bomb(OnFault::Stop);
    // More than one batch: some have not begun.
    for i in 0..3 {
        engine.submit(greedy(vec![11 + i; 100], 50)).unwrap();
    }
    let failed = failures(&mut engine);
    assert_eq!(failed.len(), 3);
    let e = engine.submit(greedy(vec![11; 20], 50)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    assert_eq!(
        e.to_string(),
        "resource `bomb` (kind bomb) panicked, and its on_fault = \"stop\": start the engine again"
    );
}

#[test]
fn another_thread_cancels_while_steps_run() {
    let loaded =
        support::load(&config("max_model_len = 1000", "pages = 256\nprefix_cache = false"));
    let mut engine = loaded.engine;
    let all = free_pages(&engine);
    let keep = engine.submit(greedy(vec![11; 20], 8)).unwrap();
    let drop = engine.submit(greedy(vec![12; 20], 900)).unwrap();
    engine.step();
    let canceller = engine.canceller();
    std::thread::spawn(move || canceller.cancel(drop)).join().unwrap();
    let mut finished = false;
    let mut steps = 0;
    while !engine.is_idle() {
        steps += 1;
        for event in engine.step() {
            match event {
                Event::Token(rid, _) => assert_eq!(*rid, keep),
                Event::Prompt(..) => {}
                Event::Finished(rid, ..) => finished = *rid == keep,
                Event::HandedOver(..) => panic!("nobody asked for that"),
                Event::Failed(_, why) => panic!("{why}"),
            }
        }
        assert!(steps < 20, "the cancelled request goes on");
    }
    assert!(finished);
    assert_eq!(free_pages(&engine), all);
    engine.canceller().cancel(drop);
    assert!(engine.step().is_empty(), "unknown requests are accepted");
}
