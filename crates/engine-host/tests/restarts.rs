//! `on_fault = "restart"` while requests are off the device, arrive, wait, or are planned ahead: those that
//! are not in the step of the fault give the tokens that they would have given, and nothing is left over.

mod support;

use engine_host::engine::{Engine, Handover, OnFault, Relay};
use engine_host::request::{Event, GenerateRequest};
use resource_api::{Interface, KvCache, KvCacheHandle, RequestId};
use serde_json::json;
use support::{Done, config, greedy, load, run, take_event};

const TOKENS: u32 = 24;

/// Everything that a sampler keeps about a request plays a part: draws, tokens seen and counted.
fn requests(count: u32) -> Vec<GenerateRequest> {
    let one = |i: u32| {
        let prompt = (0..10 + 7 * i).map(|n| 100 + 13 * i + n * n % 50).collect();
        let mut request = greedy(prompt, TOKENS);
        for (name, value) in [
            ("temperature", json!(0.9)),
            ("seed", json!(i)),
            ("repetition_penalty", json!(1.2)),
            ("frequency_penalty", json!(0.4)),
        ] {
            request.sampling.insert(name.into(), value);
        }
        request
    };
    (0..count).map(one).collect()
}

/// An engine that builds all of its resources anew when they break.
fn engine(lines: &str, kv: &str) -> Engine {
    let lines = format!("kv_dtype = \"f32\"\nmax_model_len = 160\n{lines}");
    let mut config = config(&lines, &format!("page_size = 8\n{kv}"));
    for resource in config.resources.values_mut() {
        resource.on_fault = OnFault::Restart;
    }
    load(&config).engine
}

const POOL: &str = "pages = 120\nhost_pages = 120";
const KEYS: [&str; 4] = ["main_kv", "attn", "pos", "sampler"];

/// As a panic between two steps would leave it.
fn break_it(engine: &Engine, key: &str) {
    let (_, entry) = engine.resources().find(key).unwrap();
    entry.resource().object().fault().set();
}

fn restarts(engine: &Engine, key: &str) -> u64 {
    engine.usage().into_iter().find(|u| u.key == key).unwrap().restarts
}

fn cache(engine: &Engine) -> KvCacheHandle {
    let (_, kv) = engine.resources().find("main_kv").unwrap();
    kv.capabilities()[0].open().unwrap()
}

struct Running {
    rids: Vec<RequestId>,
    done: Vec<Done>,
    handed: Vec<Option<Handover>>,
}

impl Running {
    fn begin(engine: &mut Engine, requests: Vec<(GenerateRequest, Relay)>) -> Self {
        let submit = |(request, relay)| engine.submit_relayed(request, relay).unwrap();
        let rids: Vec<RequestId> = requests.into_iter().map(submit).collect();
        let done = rids.iter().map(|_| Done::default()).collect();
        let handed = vec![None; rids.len()];
        Self { rids, done, handed }
    }

    fn plain(engine: &mut Engine, requests: Vec<GenerateRequest>) -> Self {
        Self::begin(engine, requests.into_iter().map(|r| (r, Relay::default())).collect())
    }

    fn step(&mut self, engine: &mut Engine) {
        for event in engine.step() {
            take_event(&self.rids, &mut self.done, event);
            if let Event::HandedOver(rid, handover) = event {
                let at = self.rids.iter().position(|r| r == rid).unwrap();
                self.handed[at] = Some((**handover).clone());
            }
        }
    }

    fn finish(mut self, engine: &mut Engine) -> (Vec<Done>, Vec<Option<Handover>>) {
        let mut steps = 0;
        while !engine.is_idle() {
            self.step(engine);
            steps += 1;
            assert!(steps < 5000, "the engine makes no progress");
        }
        (self.done, self.handed)
    }
}

fn tokens(done: &[Done]) -> Vec<Vec<u32>> {
    assert!(done.iter().all(|d| d.failure.is_none()), "{done:?}");
    done.iter().map(Done::ids).collect()
}

#[test]
fn requests_in_every_state_go_on_as_if_nothing_had_been() {
    let want = tokens(&run(&mut engine("max_batch = 3", POOL), requests(5)));
    type Prepare = fn(&mut Engine);
    let states: [(&str, &[&str], Prepare); 4] = [
        ("planned ahead", &KEYS, |_| {}),
        ("off the device", &["main_kv", "sampler"], |engine| {
            assert_eq!(engine.offload_running(), 3);
        }),
        ("given way", &["main_kv"], |engine| assert!(engine.preempt_one().is_some())),
        ("given way and off the device", &["sampler"], |engine| {
            engine.preempt_one();
            engine.offload_running();
        }),
    ];
    for (state, keys, prepare) in states {
        for key in keys {
            let mut engine = engine("max_batch = 3", POOL);
            let mut running = Running::plain(&mut engine, requests(5));
            for _ in 0..9 {
                running.step(&mut engine);
            }
            assert_eq!(engine.load(), (2, 3), "some wait, some run");
            prepare(&mut engine);
            break_it(&engine, key);
            let (done, _) = running.finish(&mut engine);
            assert_eq!(tokens(&done), want, "{key}, {state}");
            assert_eq!(restarts(&engine, key), 1, "{key}, {state}");
            cache(&engine).assert_pages_conserved().unwrap();
        }
    }
}

#[test]
fn what_is_kept_after_a_restart_is_keyed_by_all_tokens_before_it() {
    // Hot, so that what it says does not repeat itself.
    let mut request = greedy((200..220).collect(), 40);
    request.sampling.insert("temperature".into(), json!(2));
    let mut engine = engine("", POOL);
    let mut running = Running::plain(&mut engine, vec![request]);
    for _ in 0..9 {
        running.step(&mut engine);
    }
    let before = running.done[0].tokens.len();
    break_it(&engine, "main_kv");
    let (done, _) = running.finish(&mut engine);
    // A prompt that lacks what was generated before the restart is another one.
    let ids = done[0].ids();
    let prompt = [(200..220).collect(), ids[before..].to_vec()].concat();
    let answer = |engine: &mut Engine| run(engine, vec![greedy(prompt.clone(), 4)]).remove(0);
    let got = answer(&mut engine);
    let cached = got.end.unwrap().1.cached_tokens;
    assert!(cached <= 20, "{cached} tokens of another beginning are taken from the cache");
    let mut fresh = self::engine("", POOL);
    assert_eq!(got.tokens, answer(&mut fresh).tokens);
    // And the right one is found.
    let prompt = [(200..220).collect(), ids[..32].to_vec()].concat();
    let again = run(&mut engine, vec![greedy(prompt, 4)]).remove(0);
    assert!(again.end.unwrap().1.cached_tokens > 40, "{again:?}");
}

#[test]
fn requests_that_arrive_from_another_engine_go_on() {
    let transfer = "transfer = \"in-process\"";
    let want = tokens(&run(&mut engine("", POOL), requests(3)));
    for key in ["main_kv", "sampler"] {
        for steps_before in [0, 1] {
            let (mut first, mut second) = (engine(transfer, POOL), engine(transfer, POOL));
            let relays = requests(3).into_iter();
            let relays = relays.map(|r| (r, Relay { from: None, after: Some(6) })).collect();
            let (begun, handed) = Running::begin(&mut first, relays).finish(&mut first);
            let relays = requests(3).into_iter().zip(handed);
            let relays = relays.map(|(r, from)| (r, Relay { from, after: None })).collect();
            let mut arriving = Running::begin(&mut second, relays);
            for _ in 0..steps_before {
                arriving.step(&mut second);
            }
            break_it(&second, key);
            let (done, _) = arriving.finish(&mut second);
            let all: Vec<Vec<u32>> = begun
                .iter()
                .zip(&done)
                .map(|(begun, done)| {
                    assert_eq!(done.failure, None, "{key} after {steps_before} steps");
                    [begun.ids(), done.ids()].concat()
                })
                .collect();
            assert_eq!(all, want, "{key} after {steps_before} steps");
            assert_eq!(restarts(&second, key), 1);
            cache(&second).assert_pages_conserved().unwrap();
        }
    }
}

#[test]
fn sessions_of_a_cache_that_broke_are_computed_again() {
    let mut engine = engine("", POOL);
    let talk = |prompt: &[u32]| {
        let mut request = greedy(prompt.to_vec(), 8);
        request.session = Some("s".into());
        vec![request]
    };
    let first: Vec<u32> = (300..330).collect();
    let said = run(&mut engine, talk(&first)).remove(0).ids();
    break_it(&engine, "main_kv");
    let second = [first, said, vec![7, 8, 9]].concat();
    let got = run(&mut engine, talk(&second)).remove(0);
    let mut fresh = self::engine("", POOL);
    assert_eq!(got.tokens, run(&mut fresh, vec![greedy(second, 8)]).remove(0).tokens);
    assert_eq!(restarts(&engine, "main_kv"), 1);
}
