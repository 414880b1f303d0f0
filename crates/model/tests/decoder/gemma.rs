//! Gemma-3-270m against what llama.cpp answers (`data/gemma3.json`).

use std::path::PathBuf;

use device::Activations;
use model::ModelPackage;
use model::testing::real_model_path;
use serde_json::Value;

use crate::engine::{Engine, Part, Resources};

/// Beside the model of the other tests; `scripts/fetch-gemma3` puts it there.
fn path() -> PathBuf {
    let path = std::env::var_os("ENGINE_HOST_GEMMA3").map_or_else(
        || real_model_path().with_file_name("gemma-3-270m-q4_k_m.gguf"),
        PathBuf::from,
    );
    assert!(path.is_file(), "{} is missing: scripts/fetch-gemma3 gets it", path.display());
    path
}

fn ids(item: &Value, key: &str) -> Vec<u32> {
    serde_json::from_value(item[key].clone()).expect("token ids")
}

#[test]
#[ignore = "needs another 253 MB: scripts/fetch-gemma3"]
fn greedy_text_is_that_of_llama_cpp() {
    let package = ModelPackage::open(&path()).expect("the model opens");
    let made: Value = serde_json::from_str(include_str!("../data/gemma3.json")).expect("JSON");
    let items = made["items"].as_array().expect("items");
    assert!(items.len() >= 5);
    for item in items {
        let text = item["prompt"].as_str().expect("a text");
        let ids_of_text = package.tokenizer.encode(text, false).expect("encodes");
        let prompt = ids(item, "prompt_ids");
        assert_eq!(package.tokenizer.with_bos(ids_of_text), prompt, "{}", item["id"]);
    }
    // Its window is 512 tokens.
    assert!(items.iter().any(|item| ids(item, "prompt_ids").len() > 700));

    for item in items {
        let (prompt, want) = (ids(item, "prompt_ids"), ids(item, "generated_ids"));
        let mut engine = Engine::new(&package, Activations::Float, Resources::Kinds);
        engine.ingest(0, &prompt);
        let mut chosen = Vec::new();
        for chunk in prompt.chunks(256) {
            let rows = engine.step(&[Part::sampled(0, chunk)]).expect("the step runs");
            chosen = vec![rows[0].token];
        }
        while chosen.len() < want.len() {
            let last = [chosen[chosen.len() - 1]];
            let rows = engine.step(&[Part::sampled(0, &last)]).expect("the step runs");
            chosen.push(rows[0].token);
        }
        assert_eq!(chosen, want, "{}", item["id"]);
    }
}
