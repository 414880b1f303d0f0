//! A decode step allocates nothing from end to end: scheduler, resources, the decoder's forward pass on
//! all threads, sampling, and what is told of it.

#[path = "../src/counting.rs"]
mod counting;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use counting::Counting;
use engine_host::registry::Registry;
use engine_host::request::{Event, GenerateRequest};
use engine_host::{Config, setup};
use model::config::Architecture;
use model::gguf::Gguf;
use model::testing::{TinyModel, real_model_path, trimmed};
use resource_api::kind;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps before allocations count: buffers have grown to what the batch needs.
const WARM: usize = 24;
/// Steps that count, over ends of pages and of what attention reduces together.
const COUNTED: usize = 40;

/// What was allocated in each of the counted steps, by the number of step; only where there was something.
fn allocations(model: &Path, engine: &str, prompts: &[usize]) -> BTreeMap<usize, u64> {
    let folder = model.parent().unwrap();
    let text = format!(
        r#"
[engine]
plugin_dirs = [{folder:?}]
{engine}
[model]
path = {model:?}
[resources.main_kv]
kind = "kv"
nodes = ["decoder"]
pages = 256
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
    let config = Config::parse("test.toml", &text, Path::new(".")).unwrap();
    let discovery = setup::discover(&config).unwrap();
    let mut registry = Registry::load(&discovery, None);
    registry.link(kind::<resource_attn::PagedAttention>());
    registry.link(kind::<resource_kv::Kv>());
    registry.link(kind::<resource_positions::Positions>());
    registry.link(kind::<resource_sampler::Sampler>());
    let loaded = setup::load_with(&config, &mut registry, &discovery, &mut |_, _| {});
    let mut engine = loaded.unwrap_or_else(|e| panic!("{e}")).engine;
    let request = |seed: usize, tokens: usize, max_tokens: usize| GenerateRequest {
        prompt: (0..tokens).map(|t| ((seed * 31 + t * 7) % 200) as u32).collect(),
        max_tokens: max_tokens as u32,
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    // Angles of a position are made for all requests when the first one comes to it.
    let longest = prompts.iter().max().unwrap() + WARM + COUNTED;
    engine.submit(request(prompts.len(), longest, 1)).unwrap_or_else(|e| panic!("{e}"));
    while !engine.is_idle() {
        engine.step();
    }
    // A thread of the pool allocates when it begins, which on a busy machine takes a while.
    std::thread::sleep(Duration::from_millis(300));
    for (i, &tokens) in prompts.iter().enumerate() {
        let mut request = request(i, tokens, WARM + 2 * COUNTED);
        // Greedy, and with every filter.
        if i % 2 == 0 {
            request.sampling.insert("temperature".into(), json!(0));
        } else {
            request.sampling.insert("temperature".into(), json!(0.7));
            request.sampling.insert("top_k".into(), json!(20));
            request.sampling.insert("top_p".into(), json!(0.9));
        }
        engine.submit(request).unwrap_or_else(|e| panic!("{e}"));
    }
    let begin = counting::count();
    let mut counts = BTreeMap::new();
    let mut tokens = 0;
    for step in 0..WARM + COUNTED {
        let before = counting::count();
        let events = engine.step();
        let counted = counting::count() - before;
        let made = events.iter().filter(|e| matches!(e, Event::Token(..))).count();
        if step >= WARM {
            tokens += made;
            if counted > 0 {
                counts.insert(step, counted);
            }
        }
    }
    assert!(counting::count() > begin, "the counter does not count");
    assert_eq!(tokens, COUNTED * prompts.len(), "every request decodes in every counted step");
    counts
}

#[test]
fn decode_steps_of_every_architecture_allocate_nothing() {
    let none = BTreeMap::new();
    let folder = tempfile::tempdir().unwrap();
    for architecture in
        [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3]
    {
        let path = folder.path().join("tiny.gguf");
        let mut tiny = TinyModel::new(architecture, 3);
        tiny.config.max_position = 512;
        std::fs::write(&path, tiny.gguf().build()).unwrap();
        for threads in [1, 3] {
            let engine = format!("threads = {threads}\nmax_model_len = 400");
            let counts = allocations(&path, &engine, &[5, 17, 40]);
            assert_eq!(counts, none, "{architecture:?} on {threads} threads");
        }
    }
    // Layers of the real model, whose blocks are multiplied as int8, with contexts that are split.
    let file = Gguf::open(&real_model_path()).unwrap();
    let path = folder.path().join("trimmed.gguf");
    std::fs::write(&path, trimmed(&file, 2).unwrap().build()).unwrap();
    for activations in ["int8", "float"] {
        for threads in [1, 3] {
            let engine =
                format!("threads = {threads}\nmax_model_len = 1200\nactivations = {activations:?}");
            for prompts in [&[740][..], &[3, 300, 740, 20]] {
                let counts = allocations(&path, &engine, prompts);
                assert_eq!(counts, none, "{activations} on {threads} threads, {prompts:?}");
            }
        }
    }
}
