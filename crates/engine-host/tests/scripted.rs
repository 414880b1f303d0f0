//! What the engine makes of what resources answer: one beside the shipped ones answers what each request
//! tells it to, and notes what it is asked.

mod reader;

use std::collections::BTreeMap;
use std::sync::Mutex;

use engine_host::engine::{Engine, Remedy, Victims};
use engine_host::error::ErrorKind;
use engine_host::request::{Event, GenerateRequest};
use reader::{Outcome, Setup, cache, expected, greedy, run, told};
use resource_api::{
    AdmitOutcome, EngineResourceInfo, KvCache, LabelId, NodeId, NodeResourceSpec, PrefixInputs,
    RequestId, RequestOverrides, Resource, ResourceError, ResourceKind, ResourceStep, Result,
    StepContext, WalkId, kind,
};
use serde_json::{Value, json};

/// What a request tells it.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Script {
    /// Tokens that are found, where there is an opinion.
    prefix: Option<u32>,
    resolve_fails: bool,
    apply_fails: bool,
    reclaimable: u64,
    /// It stays, though there is something to move.
    stays: bool,
    /// How often it says that it cannot come back, and then how often it fails to.
    refuses_reload: u32,
    fails_reload: u32,
    priority: f64,
    /// How often it has no room for a step.
    full: u32,
    #[serde(skip)]
    away: bool,
}

#[derive(Default)]
struct Scripted {
    of: Mutex<BTreeMap<RequestId, Script>>,
    log: Mutex<Vec<String>>,
}

impl Scripted {
    fn asked<R>(&self, rid: RequestId, what: &str, answer: impl FnOnce(&mut Script) -> R) -> R {
        self.log.lock().unwrap().push(format!("{what} {rid}"));
        answer(self.of.lock().unwrap().entry(rid).or_default())
    }
}

fn told_to(fails: bool) -> Result<()> {
    if fails { Err(ResourceError::invalid("told to")) } else { Ok(()) }
}

/// Counts one off; `true` where there was none.
fn count_down(left: &mut u32) -> bool {
    let none = *left == 0;
    *left = left.saturating_sub(1);
    none
}

impl Resource for Scripted {
    fn inspect(&self) -> String {
        json!(*self.log.lock().unwrap()).to_string()
    }

    fn ingest_request(&self, rid: RequestId, overrides: &RequestOverrides<'_>) -> Result<()> {
        let script = overrides.parse::<Script>()?.unwrap_or_default();
        self.asked(rid, "ingest", |own| *own = script);
        Ok(())
    }

    fn admit(&self, step: &ResourceStep<'_>, _: &StepContext<'_>) -> Result<AdmitOutcome> {
        let mut of = self.of.lock().unwrap();
        let full = step
            .segments()
            .request
            .iter()
            .find(|rid| of.get_mut(rid).is_some_and(|own| !count_down(&mut own.full)));
        Ok(full.map_or(AdmitOutcome::OK, |&rid| {
            AdmitOutcome::allocation_failed(rid, LabelId::MAIN, 2, 0)
        }))
    }

    fn remove_request(&self, rid: RequestId) -> Result<()> {
        self.asked(rid, "remove", |_| ());
        self.of.lock().unwrap().remove(&rid);
        Ok(())
    }

    fn resolve_cached_prefix(&self, rid: RequestId, _: NodeId, _: WalkId) -> Result<Option<u32>> {
        let script = self.asked(rid, "resolve", |own| own.clone());
        told_to(script.resolve_fails).map(|()| script.prefix)
    }

    fn apply_cached_prefix(
        &self,
        rid: RequestId,
        _: NodeId,
        _: WalkId,
        inputs: &PrefixInputs<'_>,
        matched: u32,
    ) -> Result<()> {
        let what = format!("apply {matched} of {} to", inputs.token_ids().len());
        let script = self.asked(rid, &what, |own| own.clone());
        told_to(script.apply_fails)
    }

    fn supports_eviction(&self) -> bool {
        true
    }

    fn get_offload_priority(&self, rid: RequestId) -> Result<f64> {
        Ok(self.asked(rid, "priority", |own| own.priority))
    }

    fn reclaimable(&self, rid: RequestId) -> Result<u64> {
        Ok(self.asked(rid, "reclaimable", |own| if own.away { 0 } else { own.reclaimable }))
    }

    fn offload(&self, rid: RequestId) -> Result<u64> {
        Ok(self.asked(rid, "offload", |own| {
            own.away = !own.stays;
            if own.stays { 0 } else { own.reclaimable }
        }))
    }

    fn is_offloaded(&self, rid: RequestId) -> Result<bool> {
        Ok(self.of.lock().unwrap().get(&rid).is_some_and(|own| own.away))
    }

    fn can_reload(&self, rid: RequestId) -> Result<bool> {
        Ok(self.asked(rid, "can_reload", |own| count_down(&mut own.refuses_reload)))
    }

    fn reset_request(&self, rid: RequestId, _: bool) -> Result<()> {
        self.asked(rid, "reset", |own| own.away = false);
        Ok(())
    }

    fn reload(&self, rid: RequestId) -> Result<bool> {
        Ok(self.asked(rid, "reload", |own| {
            own.away = !count_down(&mut own.fails_reload);
            !own.away
        }))
    }
}

impl ResourceKind for Scripted {
    type Spec = serde_json::Map<String, Value>;
    const KIND: &'static str = "scripted";

    fn build(_: NodeResourceSpec<Self::Spec>, _: &EngineResourceInfo) -> Result<Self> {
        Ok(Self::default())
    }
}

/// An engine with one under this key.
fn engine(key: &'static str, setup: Setup) -> Engine {
    let (kinds, beside) = (vec![kind::<Scripted>()], vec![(key, "scripted", json!({}))]);
    Setup { kinds, beside, ..setup }.build()
}

fn tells(mut request: GenerateRequest, key: &str, script: Value) -> GenerateRequest {
    request.overrides.insert(key.into(), script.as_object().unwrap().clone());
    request
}

/// What the one under this key was asked, since the last time.
fn log(engine: &Engine, key: &str, rid: RequestId) -> Vec<String> {
    let (_, entry) = engine.resources().find(key).unwrap();
    let all: Vec<String> = serde_json::from_str(&entry.resource().inspect()).unwrap();
    let own = format!(" {rid}");
    all.iter().filter_map(|line| line.strip_suffix(&own).map(str::to_owned)).collect()
}

fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i + 7 * i * seed + seed) % reader::VOCAB as u32).collect()
}

#[test]
fn a_resource_that_fails_at_a_cached_prefix_fails_that_request_alone() {
    for key in ["a_script", "script"] {
        let mut engine = engine(key, Setup::default());
        let prompt = text(3, 17);
        assert_eq!(run(&mut engine, vec![greedy(&prompt, 1)])[0].cached(), 0);
        let scripts = [
            json!({}),
            json!({ "apply_fails": true }),
            json!({ "resolve_fails": true }),
            json!({ "prefix": 9 }),
            json!({ "prefix": 0 }),
            json!({ "prefix": 17 }),
        ];
        let requests = scripts.map(|script| tells(greedy(&prompt, 5), key, script));
        let got = run(&mut engine, requests.to_vec());
        for (i, method) in [(1, "apply_cached_prefix"), (2, "resolve_cached_prefix")] {
            let said = got[i].failure.as_deref();
            assert_eq!(said, Some(&*format!("resource `{key}`, {method}: told to")));
            assert!(got[i].tokens.is_empty());
        }
        for (i, cached) in [(0, 16), (3, 9), (4, 0), (5, 16)] {
            assert_eq!(got[i].tokens, expected(&prompt, 5, 1), "{i}");
            assert_eq!((&got[i].failure, got[i].cached()), (&None, cached), "{i}");
        }
        let free = told(&engine, "pages.free") + told(&engine, "pages.cached");
        assert_eq!(free, 64, "what was found for those that failed is given back");
    }
}

/// What it lacks nobody has whom the engine knows: it may come back by itself, and is not waited for without end.
#[test]
fn a_request_that_runs_alone_waits_for_what_is_held_elsewhere_and_at_last_fails() {
    let mut engine = engine("script", Setup::default());
    let prompt = text(5, 9);
    let of = |full: u32| tells(greedy(&prompt, 4), "script", json!({ "full": full }));
    let got = run(&mut engine, vec![of(40), of(0)]);
    for got in &got {
        assert_eq!((&got.failure, &got.tokens), (&None, &expected(&prompt, 4, 1)));
    }
    let rids = [of(u32::MAX), of(0)].map(|request| engine.submit(request).unwrap());
    let (mut tokens, mut failures) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        for event in engine.step() {
            match event {
                Event::Token(rid, token) if *rid == rids[1] => tokens.push(token.id),
                Event::Failed(rid, why) => failures.push((*rid, why.message.clone())),
                _ => {}
            }
        }
    }
    let [(rid, why)] = &failures[..] else { panic!("{failures:?}") };
    assert_eq!((*rid, &tokens), (rids[0], &expected(&prompt, 4, 1)));
    assert!(why.contains("`script`") && why.contains("though nothing else runs, for 5"), "{why}");
}

#[test]
fn what_is_agreed_on_is_told_once_with_the_whole_prompt() {
    let mut engine = engine("script", Setup::default());
    let prompt = text(4, 17);
    run(&mut engine, vec![greedy(&prompt, 1)]);
    let rid = engine.submit(tells(greedy(&prompt, 2), "script", json!({ "prefix": 5 }))).unwrap();
    while !engine.is_idle() {
        engine.step();
    }
    assert_eq!(log(&engine, "script", rid), ["ingest", "resolve", "apply 5 of 17 to", "remove"]);
}

/// Runs a request whose state leaves the device after some steps, behind so many others that end one
/// after the other, and gives its log from then on and how often it was computed again.
fn leave(key: &'static str, script: Value, others: u32) -> (Vec<String>, u64) {
    let setup = Setup { kv: json!({ "host_pages": 64 }), prefix_cache: false, ..Setup::default() };
    let mut engine = engine(key, setup);
    let prompts: Vec<Vec<u32>> = (0..=others).map(|i| text(i, 9)).collect();
    let mut all: Vec<_> = (0..others).map(|i| greedy(&prompts[i as usize], 8 + 3 * i)).collect();
    all.push(tells(greedy(&prompts[others as usize], 20), key, script));
    let most: Vec<usize> = all.iter().map(|request| request.max_tokens as usize).collect();
    let rids: Vec<_> = all.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut got = vec![Outcome::default(); rids.len()];
    let mut step = |engine: &mut Engine| {
        for event in engine.step().to_vec() {
            rids.iter().zip(&mut got).for_each(|(&rid, got)| got.take(rid, &event));
        }
        cache(engine).assert_pages_conserved().unwrap();
    };
    (0..4).for_each(|_| step(&mut engine));
    let rid = rids[others as usize];
    let before = log(&engine, key, rid).len();
    engine.offload_running();
    while !engine.is_idle() {
        step(&mut engine);
    }
    for ((got, prompt), most) in got.iter().zip(&prompts).zip(most) {
        assert_eq!(got.tokens, expected(prompt, most, 1));
    }
    let said = log(&engine, key, rid);
    (said[before..said.len() - 1].to_vec(), engine.stats().preemptions)
}

#[test]
fn a_request_comes_back_once_all_that_moved_it_can_bring_it_back() {
    // Nobody is asked to reload who says that it cannot; and an answer counts, though it said it could:
    // the cache, which was back, leaves again. Each end of another request is another try.
    let script = json!({ "reclaimable": 3, "refuses_reload": 2, "fails_reload": 1 });
    let tries = ["can_reload", "can_reload", "can_reload", "reload", "can_reload", "reload"];
    for key in ["a_script", "script"] {
        let want = [&["reclaimable", "offload"][..], &tries].concat();
        let (said, again) = leave(key, script.clone(), 3);
        assert_eq!((said, again), (want.map_owned(), 0), "{key}");
    }
    // Who has nothing to move is neither moved nor brought back.
    let (said, again) = leave("script", json!({ "reclaimable": 0 }), 3);
    assert_eq!((said, again), (["reclaimable"].map_owned(), 0));
    // Where nobody runs whose end could change the answer, it is computed again.
    let (said, again) = leave("script", json!({ "reclaimable": 3, "refuses_reload": 1 }), 0);
    assert_eq!((&said[2..3], again), (&["can_reload"].map_owned()[..], 1));
    assert!(!said.contains(&"reload".into()), "{said:?}");
}

#[test]
fn a_request_that_one_resource_cannot_move_stays_in_all() {
    for key in ["a_script", "script"] {
        let (said, again) = leave(key, json!({ "reclaimable": 3, "stays": true }), 2);
        assert_eq!((said, again), (["reclaimable", "offload"].map_owned(), 0), "{key}");
    }
}

trait Owned {
    fn map_owned(&self) -> Vec<String>;
}

impl Owned for [&str] {
    fn map_owned(&self) -> Vec<String> {
        self.iter().map(|s| (*s).to_owned()).collect()
    }
}

#[test]
fn priorities_are_asked_of_the_named_resource_and_under_that_policy_alone() {
    let policies = [
        (Victims::Youngest, 1),
        (Victims::LeastRecent, 1),
        (Victims::Priority("main_kv".into()), 1),
        (Victims::Priority("script".into()), 0),
    ];
    for (victims, gives_way) in policies {
        let mut engine = engine("script", Setup { pages: 8, ..Setup::default() });
        engine.set_victims(victims.clone()).unwrap();
        let prompts = [text(1, 12), text(2, 13)];
        let request = |i: usize| {
            let priority = json!({ "priority": if i == 0 { 5.5 } else { 1.0 } });
            tells(greedy(&prompts[i], 12), "script", priority)
        };
        let rids = [0, 1].map(|i| engine.submit(request(i)).unwrap());
        let mut outcomes = [Outcome::default(), Outcome::default()];
        let mut first = None;
        while !engine.is_idle() {
            let events = engine.step().to_vec();
            for (rid, outcome) in rids.iter().zip(&mut outcomes) {
                events.iter().for_each(|event| outcome.take(*rid, event));
            }
            let remedies = engine.refusals().iter().map(|refusal| refusal.remedy);
            let mut gave = remedies.filter(|r| matches!(r, Remedy::GaveWay(_)));
            first = first.or_else(|| gave.next());
        }
        assert_eq!(first, Some(Remedy::GaveWay(rids[gives_way])), "{victims}");
        for (outcome, prompt) in outcomes.iter().zip(&prompts) {
            assert_eq!(outcome.tokens, expected(prompt, 12, 1), "{victims}");
        }
        let asked =
            rids.iter().any(|&rid| log(&engine, "script", rid).contains(&"priority".into()));
        assert_eq!(asked, victims.resource() == Some("script"), "{victims}");
    }
}

#[test]
fn what_a_request_says_wrongly_to_a_resource_is_refused_by_name_and_leaves_nothing() {
    let mut engine = engine("script", Setup::default());
    for (key, said_to_it, told) in [
        (
            "main_kw",
            json!({}),
            "overrides name resource \"main_kw\", which does not exist; did you mean \"main_kv\"?",
        ),
        ("main_kv", json!({ "prefix_salt": 5 }), "prefix_salt"),
        ("main_kv", json!({ "prefix_cach": true }), "did you mean `prefix_cache`?"),
        ("main_kv", json!({ "prefix_cache": "yes" }), "prefix_cache"),
        ("sampler", json!({ "temperatur": 1 }), "did you mean `temperature`?"),
        ("sampler", json!({ "top_k": "all" }), "top_k"),
        ("attn", json!({ "causal": true }), "causal"),
        ("pos", json!({ "offset": 1 }), "offset"),
        ("script", json!({ "prefix": -1 }), "prefix"),
        ("script", json!({ "prio": 1 }), "prio"),
    ] {
        let e = engine.submit(tells(greedy(&[1, 2, 3], 4), key, said_to_it)).unwrap_err();
        let text = e.to_string();
        assert_eq!(e.kind(), ErrorKind::Usage, "{text}");
        assert!(text.contains(told) && !text.contains('\n'), "{text}");
        assert!(text.contains(&format!("`{key}`")) || text.contains(&format!("{key:?}")), "{text}");
        assert!(engine.is_idle());
    }
    // Resources that had taken it in were told that it is gone, and no id comes again.
    let (_, script) = engine.resources().find("script").unwrap();
    let said: Vec<String> = serde_json::from_str(&script.resource().inspect()).unwrap();
    let of = |what: &str| -> Vec<String> {
        said.iter().filter_map(|line| line.strip_prefix(what).map(str::to_owned)).collect()
    };
    assert!(of("ingest ").iter().all(|rid| of("remove ").contains(rid)), "{said:?}");
    let (_, kv) = engine.resources().find("main_kv").unwrap();
    let state: Value = serde_json::from_str(&kv.resource().inspect()).unwrap();
    assert_eq!(state["streams"], json!([]));
    let got =
        run(&mut engine, vec![tells(greedy(&[1, 2, 3], 4), "script", json!({ "priority": 2 }))]);
    assert_eq!(got[0].tokens, expected(&[1, 2, 3], 4, 1));
}
