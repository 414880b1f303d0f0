//! On a GPU, steps that are launched before the one before them has landed give the same tokens, to the
//! last one. `cargo xtask device-test` runs this; the plugins are those beside the executable's folder, or
//! those that `cargo xtask build` installed.

use std::path::{Path, PathBuf};

use engine_host::engine::Engine;
use engine_host::request::GenerateRequest;
use model::Architecture;
use model::testing::{TinyModel, Vocabulary};
use serde_json::json;

mod support;

/// A pack for a machine with a GPU has `tests/` and `plugins/` side by side.
fn plugins() -> PathBuf {
    let packed = std::env::current_exe().ok();
    let packed = packed.and_then(|exe| Some(exe.parent()?.parent()?.join("plugins")));
    let packed = packed.filter(|path| path.join("resource-kv.toml").exists());
    packed.unwrap_or_else(support::plugins)
}

fn write_model(to: &Path) {
    let mut config = TinyModel::new(Architecture::Qwen3, 0).config;
    config.head_dim = 64;
    config.rope.dim = 64;
    config.hidden = 64;
    config.ffn = 128;
    let model = TinyModel::with_config(config, Vocabulary::small("qwen2"), 3);
    std::fs::write(to, model.gguf().build()).unwrap();
}

fn engine(model: &Path, lines: &str) -> Engine {
    let lines =
        format!("device = \"cuda:0\"\nbatch_invariant = true\nmax_model_len = 120\n{lines}");
    let config = support::config_with(&plugins(), model, &lines, "pages = 200");
    support::load(&config).engine
}

/// Greedy ones, drawn ones, and one whose penalty has every step of it wait.
fn requests(with_penalty: bool) -> Vec<GenerateRequest> {
    let one = |i: u32| {
        let prompt = (0..5 + 3 * i).map(|n| (n * n * 7 + i * 31 + n) % 100).collect();
        let mut request = GenerateRequest {
            prompt,
            max_tokens: 20 + 9 * (i % 4),
            ignore_eos: !i.is_multiple_of(3),
            ..GenerateRequest::default()
        };
        let mut set = |name: &str, value| request.sampling.insert(name.into(), value);
        set("seed", json!(i));
        set("temperature", json!(if i.is_multiple_of(2) { 0.0 } else { 1.2 }));
        if i == 5 && with_penalty {
            set("repetition_penalty", json!(1.3));
        }
        request
    };
    (0..8).map(one).collect()
}

fn run(engine: &mut Engine, requests: Vec<GenerateRequest>) -> Vec<Vec<u32>> {
    let done = support::run(engine, requests);
    done.iter().for_each(|done| assert_eq!(done.failure, None));
    done.iter().map(support::Done::ids).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn running_ahead_changes_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    write_model(&model);
    for lines in ["", "max_batch_tokens = 13", "max_batch = 3", "cuda_graphs = false"] {
        for with_penalty in [false, true] {
            let of = |ahead: bool| {
                let mut engine = engine(&model, &format!("run_ahead = {ahead}\n{lines}"));
                let tokens = run(&mut engine, requests(with_penalty));
                (tokens, engine.stats().run_ahead)
            };
            let (want, none) = of(false);
            let (got, some) = of(true);
            assert!(got == want, "{lines}: {got:?} for {want:?}");
            assert_eq!(none, 0);
            assert!(some > 5, "{lines}: {some} steps ran ahead");
        }
    }
}
