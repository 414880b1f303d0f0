//! On a GPU, an engine gives the same tokens to the last one, also where steps are launched before the one
//! before them has landed and where requests leave the device; and it scores prompts as on the CPU.
//! `cargo xtask device-test` runs this; the plugins are those beside the executable's folder, or those that
//! `cargo xtask build` installed.

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
    engine_with(model, lines, "pages = 200")
}

fn engine_with(model: &Path, lines: &str, kv: &str) -> Engine {
    let lines =
        format!("device = \"cuda:0\"\nbatch_invariant = true\nmax_model_len = 120\n{lines}");
    support::load(&support::config_with(&plugins(), model, &lines, kv)).engine
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

/// Has all that run leave the device before every third step.
fn run_moving(engine: &mut Engine, requests: Vec<GenerateRequest>) -> Vec<Vec<u32>> {
    let rids: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
    let mut done: Vec<_> = rids.iter().map(|_| support::Done::default()).collect();
    let mut steps = 0;
    while !engine.is_idle() {
        if steps % 3 == 2 {
            engine.offload_running();
        }
        engine.step().iter().for_each(|event| support::take_event(&rids, &mut done, event));
        steps += 1;
        assert!(steps < 2000, "the engine makes no progress");
    }
    done.iter().for_each(|done| assert_eq!(done.failure, None));
    done.iter().map(support::Done::ids).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn leaving_the_device_changes_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    write_model(&model);
    let file = folder.path().join("pages");
    let file = format!("pages = 200\ndisk_file = {file:?}\ndisk_size = \"64MiB\"");
    let want = run(&mut engine(&model, "run_ahead = false"), requests(true));
    for ahead in [false, true] {
        let lines = format!("run_ahead = {ahead}");
        for kv in ["pages = 200\nhost_pages = 200", &file] {
            let mut engine = engine_with(&model, &lines, kv);
            let got = run_moving(&mut engine, requests(true));
            assert!(got == want, "{lines}, {kv}: {got:?} for {want:?}");
            let stats = engine.stats();
            assert!(stats.offloads > 10 && stats.offloads == stats.reloads, "{lines}: {stats:?}");
        }
        // Too small for all of them: some leave because others need the room.
        let mut engine = engine_with(&model, &lines, "pages = 14\nhost_pages = 200");
        let got = run(&mut engine, requests(true));
        assert!(got == want, "{lines}, short: {got:?} for {want:?}");
        assert!(engine.stats().offloads > 0, "{lines}: {:?}", engine.stats());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn prompts_are_scored_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny.gguf");
    write_model(&model);
    let scored = || -> Vec<_> {
        let scored = |request| GenerateRequest { prompt_logprobs: Some(3), ..request };
        requests(false).into_iter().map(scored).collect()
    };
    let scores = |engine: &mut Engine| -> Vec<Vec<f32>> {
        let done = support::run(engine, scored());
        let of = |done: &support::Done| {
            assert_eq!(done.failure, None);
            assert!(done.prompt[0].is_none(), "nothing comes before the first token");
            done.prompt[1..].iter().map(|t| t.as_ref().unwrap().logprob).collect()
        };
        done.iter().map(of).collect()
    };
    let config = support::config_with(&plugins(), &model, "max_model_len = 120", "pages = 200");
    let want = scores(&mut support::load(&config).engine);
    let together = scores(&mut engine(&model, ""));
    for (want, got) in want.iter().flatten().zip(together.iter().flatten()) {
        assert!((want - got).abs() < 0.1, "{got} for {want}");
    }
    for lines in ["max_batch_tokens = 13", "cuda_graphs = false\nmax_batch = 3"] {
        let got = scores(&mut engine(&model, lines));
        assert!(got == together, "{lines}: {got:?} for {together:?}");
    }
}
