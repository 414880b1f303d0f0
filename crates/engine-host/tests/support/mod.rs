//! What the tests with a real model share: the installed plugins, the model, the reference outputs.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use engine_host::Config;
use engine_host::engine::Engine;
use engine_host::request::{Event, FinishReason, GenerateRequest, Token, Usage};
use engine_host::setup::{self, Loaded};
use resource_api::RequestId;
use serde_json::{Value, json};

/// The directory of plugins that `cargo xtask build` installed from the present sources.
pub fn plugins() -> PathBuf {
    match xtask::stamp::installed_plugins(&xtask::workspace_root()) {
        Ok(directory) => directory,
        Err(problems) => panic!("{problems}"),
    }
}

/// The model that `cargo xtask fetch-model` got.
pub fn model_path() -> PathBuf {
    let path = engine_host::config::default_model_path();
    assert!(path.exists(), "{} is missing: `cargo xtask fetch-model` gets it", path.display());
    path
}

/// A configuration over the installed plugins; `engine` and `kv` are further lines of the sections.
pub fn config(engine: &str, kv: &str) -> Config {
    config_with(&plugins(), &model_path(), engine, kv)
}

pub fn config_with(plugins: &Path, model: &Path, engine: &str, kv: &str) -> Config {
    let threads = match engine.lines().any(|line| line.starts_with("threads")) {
        true => "",
        false => "threads = 2",
    };
    let text = format!(
        r#"
[engine]
plugin_dirs = [{plugins:?}]
{threads}
{engine}
[model]
path = {model:?}
[resources.main_kv]
kind = "kv"
nodes = ["decoder"]
{kv}
[resources.attn]
kind = "attention"
nodes = ["decoder"]
kv_cache = "main_kv"
[resources.pos]
kind = "positions"
nodes = ["decoder"]
kv_cache = "main_kv"
[resources.sampler]
kind = "sampler"
nodes = ["decoder"]
"#
    );
    Config::parse("test.toml", &text, Path::new(".")).unwrap()
}

pub fn load(config: &Config) -> Loaded {
    setup::load(config, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// A greedy request that reports the ten best tokens at every step.
pub fn greedy(prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest { prompt, max_tokens, ..GenerateRequest::default() };
    request.ignore_eos = true;
    request.logprobs = Some(10);
    request.sampling.insert("temperature".into(), json!(0));
    request
}

/// What came of a request.
#[derive(Debug, Default, PartialEq)]
pub struct Done {
    pub prompt: Vec<Option<Token>>,
    pub tokens: Vec<Token>,
    pub end: Option<(FinishReason, Usage)>,
    pub failure: Option<String>,
}

impl Done {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

/// Runs requests together until all have ended; results in the order of the requests.
pub fn run(engine: &mut Engine, requests: Vec<GenerateRequest>) -> Vec<Done> {
    let rids: Vec<RequestId> =
        requests.into_iter().map(|r| engine.submit(r).unwrap_or_else(|e| panic!("{e}"))).collect();
    let mut done: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
    let mut idle_steps = 0;
    while !engine.is_idle() {
        let events = engine.step();
        idle_steps = if events.is_empty() { idle_steps + 1 } else { 0 };
        assert!(idle_steps < 10_000, "the engine makes no progress");
        for event in events {
            take_event(&rids, &mut done, event);
        }
    }
    done
}

/// Adds an event to what has come of `rids`; other requests' events are left out.
pub fn take_event(rids: &[RequestId], done: &mut [Done], event: &Event) {
    let rid = &event.request();
    let Some(at) = rids.iter().position(|r| r == rid) else { return };
    match event {
        Event::Prompt(_, tokens) => done[at].prompt = tokens.clone(),
        Event::Token(_, token) => done[at].tokens.push(token.clone()),
        Event::Finished(_, reason, usage) => done[at].end = Some((*reason, *usage)),
        Event::HandedOver(..) => {}
        Event::Failed(_, why) => done[at].failure = Some(why.message.clone()),
    }
}

/// One prompt of the reference.
pub struct Item {
    pub id: String,
    pub prompt_ids: Vec<u32>,
    pub gen_ids: Vec<u32>,
    pub margins: Vec<f64>,
    /// (id, log-probability) of the ten best tokens at the first generated position.
    pub top10: Vec<(u32, f64)>,
    pub raw: Value,
}

/// The reference outputs of a float64 forward pass; see the README beside the model crate's copy.
pub fn reference() -> Vec<Item> {
    let path = xtask::workspace_root().join("crates/model/tests/data/smollm2.json");
    let data: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |v: &Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let item = |raw: &Value| Item {
        id: raw["id"].as_str().unwrap().to_owned(),
        prompt_ids: ids(&raw["prompt_ids"]),
        gen_ids: ids(&raw["f64"]["gen_ids"]),
        margins: serde_json::from_value(raw["f64"]["margins"].clone()).unwrap(),
        top10: raw["f64"]["top10"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| (t["id"].as_u64().unwrap() as u32, t["logprob"].as_f64().unwrap()))
            .collect(),
        raw: raw.clone(),
    };
    data["items"].as_array().unwrap().iter().map(item).collect()
}
