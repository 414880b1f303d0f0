//! Resources that break, or answer what cannot be right, in an engine with a real model: who is told,
//! who fails, and who goes on.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use engine_host::engine::{Engine, OnFault};
use engine_host::registry::Registry;
use engine_host::request::GenerateRequest;
use engine_host::services::Metric;
use engine_host::setup;
use resource_api::{
    Attention, AttentionHandle, Capability, EngineResourceInfo, Interface, KindHandle, LabelId,
    NodeResourceSpec, Positions, PositionsHandle, RequestId, Resource, ResourceKind, ResourceStep,
    Result, Sampled, Sampler, SamplerHandle, StepContext, TensorView, TensorViewMut,
};
use support::{Done, config, greedy, run};

/// An engine in which the section `key` is of a kind that is linked in.
fn engine_with(
    key: &str,
    kind: KindHandle,
    engine: &str,
    on_fault: OnFault,
    settings: toml::Table,
) -> Engine {
    let mut config = config(&format!("max_model_len = 160\n{engine}"), "pages = 96");
    let mut section = config.resources["sampler"].clone();
    section.kind = resource_api::Kind::kind(&kind);
    section.on_fault = on_fault;
    section.settings = settings;
    config.resources.insert(key.into(), section);
    let discovery = setup::discover(&config).unwrap();
    let mut registry = Registry::load(&discovery, None);
    registry.link(kind);
    let loaded = setup::load_with(&config, &mut registry, &discovery, &mut |_, _| {});
    loaded.unwrap_or_else(|e| panic!("{e}")).engine
}

/// Panics in a commit: of a step with this token in it, or in its n-th.
struct Bomb(Settings, AtomicU32);

#[derive(serde::Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    at_token: Option<u32>,
    at_commit: Option<u32>,
}

impl Resource for Bomb {
    fn commit(&self, step: &ResourceStep<'_>, _ctx: &StepContext<'_>) -> Result<()> {
        let commits = self.1.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(self.0.at_commit != Some(commits), "the bomb goes off");
        let pill = self.0.at_token;
        assert!(!pill.is_some_and(|id| step.token_ids().contains(&id)), "the bomb goes off");
        Ok(())
    }
}

impl ResourceKind for Bomb {
    type Spec = Settings;
    const KIND: &'static str = "bomb";
    fn build(spec: NodeResourceSpec<Settings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(Self(spec.settings, AtomicU32::new(0)))
    }
}

fn bomb(engine: &str, on_fault: OnFault, settings: toml::Table) -> Engine {
    engine_with("bomb", resource_api::kind::<Bomb>(), engine, on_fault, settings)
}

const PILL: u32 = 4242;

fn requests(first: &[u32]) -> Vec<GenerateRequest> {
    first.iter().map(|&id| greedy(vec![id, 11, 12, 13, 14, 15, 16, 17], 12)).collect()
}

fn usage_of(engine: &Engine, key: &str) -> engine_host::watch::ResourceUsage {
    engine.usage().into_iter().find(|u| u.key == key).unwrap()
}

#[test]
fn a_resource_that_panics_is_built_anew_and_those_that_wait_finish() {
    let undisturbed = {
        let mut engine =
            bomb("max_batch = 2", OnFault::FailRequests, toml::toml! { at_token = 4242 });
        run(&mut engine, requests(&[30, 31, 32]))
    };
    let mut engine = bomb("max_batch = 2", OnFault::Restart, toml::toml! { at_token = 4242 });
    let done = run(&mut engine, requests(&[PILL, 29, 30, 31, 32]));
    for failed in &done[..2] {
        let why = failed.failure.as_deref().expect("in the step of the panic");
        assert!(why.contains("resource `bomb`, commit") && why.contains("goes off"), "{why}");
    }
    assert_eq!(done[2..], undisturbed, "the others are as if nothing had been");
    let usage = usage_of(&engine, "bomb");
    assert_eq!((usage.restarts, usage.panics, usage.is_faulted), (1, 1, false));
    assert_eq!(usage_of(&engine, "main_kv").restarts, 0, "it was not built on the bomb");
    assert_eq!(engine.metrics()["bomb.restarts"], Metric::Counter(1));
    // And later ones.
    assert_eq!(run(&mut engine, requests(&[30])), undisturbed[..1]);
}

/// As a panic between two steps would leave it.
fn mark_broken(engine: &Engine, key: &str) {
    let (_, entry) = engine.resources().find(key).unwrap();
    entry.resource().object().fault().set();
}

#[test]
fn a_cache_is_built_anew_with_what_was_built_on_it() {
    let load = |on_fault| {
        let mut config = config("max_model_len = 160\nmax_batch = 2", "pages = 96");
        config.resources.get_mut("main_kv").unwrap().on_fault = on_fault;
        support::load(&config).engine
    };
    let undisturbed = run(&mut load(OnFault::FailRequests), requests(&[30, 31, 32]));
    let mut engine = load(OnFault::Restart);
    let free =
        || resource_api::HostServices::free_memory(&**engine.services(), resource_api::Device::CPU);
    let before = free();
    mark_broken(&engine, "main_kv");
    let done = run(&mut engine, requests(&[28, 29, 30, 31, 32]));
    let failed = done.iter().filter(|d| d.failure.is_some()).count();
    assert!(failed <= 2, "{done:?}");
    assert_eq!(done[2..], undisturbed);
    for key in ["main_kv", "attn", "pos"] {
        assert_eq!(usage_of(&engine, key).restarts, 1, "{key}");
    }
    assert_eq!(usage_of(&engine, "sampler").restarts, 0);
    let free =
        resource_api::HostServices::free_memory(&**engine.services(), resource_api::Device::CPU);
    assert_eq!(free, before, "as much as the first ones took");
    assert!(usage_of(&engine, "main_kv").bytes > 0);
    // In the middle of requests that are running.
    let rids: Vec<_> = requests(&[30, 31]).into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut done: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
    let mut step = 0;
    while !engine.is_idle() {
        step += 1;
        if step == 5 {
            mark_broken(&engine, "sampler");
        }
        for event in engine.step() {
            support::take_event(&rids, &mut done, event);
        }
    }
    assert!(done.iter().all(|d| d.failure.is_some()), "a sampler that may not restart: {done:?}");
}

#[test]
fn restarts_come_to_an_end() {
    let mut engine = bomb("max_batch = 1", OnFault::Restart, toml::toml! { at_commit = 2 });
    let done = run(&mut engine, requests(&[20, 21, 22, 23, 24, 25]));
    assert!(done.iter().all(|d| d.failure.is_some()));
    let usage = usage_of(&engine, "bomb");
    assert_eq!((usage.restarts, usage.panics, usage.is_faulted), (3, 4, true));
    let last = done[5].failure.as_deref().unwrap();
    assert!(last.contains("panicked earlier and is out of use"), "{last}");
}

/// What a [`Liar`] does.
#[derive(serde::Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Lie {
    NoToken,
    TokenOutside,
    NanLogprob,
    OddStatus,
    BestOutside,
    Nan,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct LiarSettings {
    lie: Lie,
}

/// Stands in for a resource and lies.
struct Liar(Lie);

impl Resource for Liar {}

impl Sampler for Liar {
    fn sample(
        &self,
        _ctx: &StepContext<'_>,
        _rids: &[RequestId],
        logits: &mut TensorViewMut<'_>,
        out: &mut [Sampled],
    ) -> Result<()> {
        let vocab = logits.view().shape()[1] as u32;
        for out in out {
            *out = match self.0 {
                Lie::NoToken => continue,
                Lie::TokenOutside => Sampled { token: vocab, status: Sampled::OK, logprob: -1.0 },
                Lie::NanLogprob => Sampled { token: 1, status: Sampled::OK, logprob: f32::NAN },
                Lie::OddStatus => Sampled { token: 1, status: 7, logprob: -1.0 },
                _ => Sampled { token: 1, status: Sampled::OK, logprob: -1.0 },
            };
        }
        Ok(())
    }

    fn top_logprobs(
        &self,
        logits: &TensorView<'_>,
        ids: &mut [u32],
        logprobs: &mut [f32],
    ) -> Result<()> {
        let outside = if self.0 == Lie::BestOutside { logits.shape()[0] as u32 } else { 0 };
        ids.fill(outside);
        logprobs.fill(-1.0);
        Ok(())
    }
}

impl ResourceKind for Liar {
    type Spec = LiarSettings;
    const KIND: &'static str = "liar";
    fn build(spec: NodeResourceSpec<LiarSettings>, _info: &EngineResourceInfo) -> Result<Self> {
        Ok(Self(spec.settings.lie))
    }
    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![SamplerHandle::new(this.clone()).into()]
    }
}

fn lie(settings: toml::Table) -> (Engine, Vec<Done>) {
    let kind = resource_api::kind::<Liar>();
    let mut engine = engine_with("sampler", kind, "", OnFault::FailRequests, settings);
    let mut wanted = requests(&[30]);
    wanted[0].sampling.clear();
    let done = run(&mut engine, wanted);
    (engine, done)
}

#[test]
fn samples_that_cannot_be_right_are_charged_to_the_sampler() {
    for (settings, says) in [
        (toml::toml! { lie = "no_token" }, "left the request without a token"),
        (toml::toml! { lie = "token_outside" }, "picked token 49152 from a vocabulary of 49152"),
        (toml::toml! { lie = "nan_logprob" }, "gave token 1 the log-probability NaN"),
        (toml::toml! { lie = "odd_status" }, "gave status 7, which the contract does not know"),
        (toml::toml! { lie = "best_outside" }, "named token 49152 of a vocabulary of 49152"),
    ] {
        let (engine, done) = lie(settings);
        let why = done[0].failure.as_deref().unwrap_or_else(|| panic!("taken: {says}"));
        let named = "resource `sampler` (kind liar, plugin (linked in)) ";
        assert!(why.starts_with(&format!("{named}{says}")), "{why}");
        assert!(why.ends_with("; this is a fault of the plugin"), "{why}");
        assert_eq!(usage_of(&engine, "sampler").bad_values, 1);
    }
}

/// Attention whose answers are no numbers.
struct NanAttention;

impl Resource for NanAttention {}

impl Attention for NanAttention {
    fn run(
        &self,
        _ctx: &StepContext<'_>,
        layer: u32,
        _label: LabelId,
        _q: &TensorView<'_>,
        out: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        let value = if layer == 3 { f32::NAN } else { 0.5 };
        out.as_mut_slice::<f32>().expect("f32 rows").fill(value);
        Ok(())
    }
    fn qo_indptr(&self, _: &StepContext<'_>, _: LabelId, _: &mut [u32]) -> Result<u32> {
        Ok(0)
    }
    fn select_last_hidden(
        &self,
        _: &StepContext<'_>,
        _: LabelId,
        _: &TensorView<'_>,
        _: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

#[derive(serde::Deserialize)]
struct Nothing {}

impl ResourceKind for NanAttention {
    type Spec = Nothing;
    const KIND: &'static str = "nan_attention";
    fn build(_: NodeResourceSpec<Nothing>, _: &EngineResourceInfo) -> Result<Self> {
        Ok(Self)
    }
    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![AttentionHandle::new(this.clone()).into()]
    }
}

/// Positions whose rotation makes infinities.
struct WildPositions;

impl Resource for WildPositions {}

impl Positions for WildPositions {
    fn apply_qk(
        &self,
        _: &StepContext<'_>,
        _: LabelId,
        q: &mut TensorViewMut<'_>,
        _: &mut TensorViewMut<'_>,
    ) -> Result<()> {
        q.as_mut_slice::<f32>().expect("f32 rows")[0] = f32::INFINITY;
        Ok(())
    }
    fn pos_ids(&self, _: &StepContext<'_>, _: LabelId) -> Result<&[u32]> {
        Ok(&[])
    }
    fn position(&self, _: RequestId, _: LabelId) -> Result<u32> {
        Ok(0)
    }
}

impl ResourceKind for WildPositions {
    type Spec = Nothing;
    const KIND: &'static str = "wild_positions";
    fn build(_: NodeResourceSpec<Nothing>, _: &EngineResourceInfo) -> Result<Self> {
        Ok(Self)
    }
    fn capabilities(this: &Arc<Self>) -> Vec<Capability> {
        vec![PositionsHandle::new(this.clone()).into()]
    }
}

#[test]
fn numbers_that_are_none_are_traced_to_the_resource_that_gave_them() {
    for (key, kind, says) in [
        (
            "attn",
            resource_api::kind::<NanAttention>(),
            "resource `attn` (kind nan_attention, plugin (linked in)) gave what is no number in \
             attention of layer 3",
        ),
        (
            "pos",
            resource_api::kind::<WildPositions>(),
            "resource `pos` (kind wild_positions, plugin (linked in)) gave what is no number in the \
             turning of queries and keys of layer 0",
        ),
    ] {
        let mut engine = engine_with(key, kind, "", OnFault::FailRequests, toml::Table::new());
        let done = run(&mut engine, requests(&[30]));
        let why = done[0].failure.as_deref().expect("no token can come of it");
        assert_eq!(
            why,
            format!("the model's logits for the next token are not usable numbers: {says}")
        );
        assert_eq!(usage_of(&engine, key).bad_values, 1);
    }
}
