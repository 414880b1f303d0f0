//! The program as people meet it: wrong input is one clear line, with the right exit code.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::{model_path, plugins};

struct Host {
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// The default configuration over some plugins and some model.
    fn config(&self, plugins: &Path, model: &Path) -> PathBuf {
        let text = std::fs::read_to_string(
            xtask::workspace_root().join("crates/engine-host/src/config/default.toml"),
        )
        .unwrap()
        .replace("plugin_dirs = [\"plugins\"]", &format!("plugin_dirs = [{plugins:?}]"))
        .replace("[model]", &format!("[model]\npath = {model:?}"));
        self.file("engine.toml", text)
    }

    fn run(&self, args: &[&str]) -> Output {
        let host = env!("CARGO_BIN_EXE_engine-host");
        Command::new(host).args(args).current_dir(self.dir.path()).output().unwrap()
    }

    fn generate(&self, config: &Path, more: &[&str]) -> Output {
        let mut args = vec!["generate", "--config", config.to_str().unwrap()];
        args.extend(more);
        self.run(&args)
    }
}

/// Exit code and the one line on standard error; more than one line is a failure of the test.
fn refused(output: &Output) -> (Option<i32>, String) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1, "expected one line:\n{text}");
    assert!(!text.contains("panicked"), "{text}");
    (output.status.code(), lines[0].to_owned())
}

#[test]
fn a_gpu_that_is_not_there_is_told_before_the_model_is_read() {
    let host = Host::new();
    // On a machine with a driver it is the device that is missing.
    let text =
        "[engine]\ndevice = \"cuda:250\"\nplugin_dirs = [\".\"]\n[model]\npath = \"none.gguf\"\n";
    let config = host.file("gpu.toml", text);
    let (code, line) = refused(&host.generate(&config, &["--prompt", "x"]));
    assert_eq!(code, Some(1));
    let why = ["libcuda.so.1", "CUDA device 250 is out of range"];
    assert!(line.contains("gpu.toml: device = \"cuda:250\": "), "{line}");
    assert!(why.iter().any(|why| line.contains(why)), "{line}");
}

#[test]
fn a_model_that_is_not_there_or_broken_is_named() {
    let host = Host::new();
    let real = std::fs::read(model_path()).unwrap();
    let cases: [(&str, PathBuf, &str); 4] = [
        ("missing", host.dir.path().join("none.gguf"), "does not exist"),
        ("truncated", host.file("cut.gguf", &real[..real.len() / 2]), "cut.gguf"),
        ("wrong magic", host.file("bad.gguf", b"GGML and then some"), "bad.gguf"),
        ("empty", host.file("empty.gguf", b""), "empty.gguf"),
    ];
    for (what, model, part) in cases {
        let config = host.config(&plugins(), &model);
        let (code, line) = refused(&host.generate(&config, &["--prompt", "x"]));
        assert_eq!(code, Some(1), "{what}: {line}");
        assert!(line.contains(part), "{what}: {line}");
    }
}

#[test]
fn wrong_sampling_values_and_empty_prompts_are_usage_errors() {
    let host = Host::new();
    let config = host.config(&plugins(), &model_path());
    let cases: [(&[&str], &str); 6] = [
        (&["--prompt", "x", "--temperature", "-1"], "temperature"),
        (&["--prompt", "x", "--temperature", "NaN"], "temperature"),
        (&["--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (&["--prompt", "x", "--top-p", "1.5"], "top_p"),
        (&["--prompt", ""], "no tokens"),
        (&["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ];
    for (args, part) in cases {
        let (code, line) = refused(&host.generate(&config, args));
        assert_eq!(code, Some(2), "{args:?}: {line}");
        assert!(line.contains(part), "{args:?}: {line}");
    }
}

#[test]
fn a_wrong_line_of_a_batch_fails_alone_with_its_number() {
    let host = Host::new();
    let config = host.config(&plugins(), &model_path());
    let mut lines: Vec<u8> = Vec::new();
    let good = r#"{"id": "good", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}"#;
    lines.extend(good.as_bytes());
    lines.extend(b"\nnot json\n\xff\xfe\n\n");
    for wrong in [
        r#"{"prompt_ids": [200000]}"#,
        r#"{"prompt_ids": [-1]}"#,
        r#"{"prompt_ids": []}"#,
        r#"{"prompt": "a", "messages": []}"#,
        r#"{"prompt": "a", "max_tokens": 0}"#,
        r#"{"prompt": "a", "temprature": 1}"#,
        r#"{"prompt": "a", "temperature": -0.5}"#,
        r#"[1, 2]"#,
    ] {
        lines.extend(wrong.as_bytes());
        lines.push(b'\n');
    }
    lines.extend(good.replace("\"good\"", "\"last\"").as_bytes());
    let input = host.file("in.jsonl", lines);
    let output = host.generate(&config, &["--prompts", input.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(results.len(), 12);
    for (at, id) in [(0, "good"), (11, "last")] {
        assert_eq!(results[at]["id"], id);
        assert_eq!(results[at]["ids"], serde_json::json!([7042, 30, 198]));
        assert_eq!(results[at]["finish_reason"], "length");
        assert_eq!(results[at]["usage"]["completion_tokens"], 3);
    }
    let parts = [
        (1, "line 2: is not JSON"),
        (2, "line 3: is not UTF-8"),
        (3, "200000"),
        (4, "line 6: prompt_ids: -1 is not a token id"),
        (5, "no tokens"),
        (6, "prompt and messages"),
        (7, "max_tokens"),
        (8, "did you mean \"temperature\""),
        (9, "temperature"),
        (10, "line 12: is not a JSON object"),
    ];
    for (at, part) in parts {
        let message = results[at]["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "result {at}: {message}");
    }
}

#[test]
fn taking_a_plugin_away_takes_its_kind_away() {
    let host = Host::new();
    let kept = host.dir.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    for entry in std::fs::read_dir(plugins()).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_string_lossy().into_owned();
        let wanted = name.ends_with(".so") || name.ends_with(".toml");
        if wanted && !name.contains("sampler") {
            std::fs::copy(entry.path(), kept.join(name)).unwrap();
        }
    }
    let config = host.config(&kept, &model_path());
    let (code, line) = refused(&host.generate(&config, &["--prompt", "x"]));
    assert_eq!(code, Some(2), "{line}");
    for part in [
        "engine.toml",
        "[resources.sampler]",
        "\"sampler\"",
        "attention, cross_attention, kv, positions",
    ] {
        assert!(line.contains(part), "{part} is not in: {line}");
    }
}

#[test]
fn the_list_names_every_plugin_and_why_one_is_refused() {
    let host = Host::new();
    let dir = host.dir.path().join("p");
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(plugins()).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            std::fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
        }
    }
    std::fs::write(dir.join("libtext.so"), "not a library").unwrap();
    let manifest = "[plugin]\nname = \"text\"\nversion = \"1.0.0\"\napi = \"1.0\"\nlibrary = \"libtext.so\"\nkinds = [\"text\"]\n";
    std::fs::write(dir.join("text.toml"), manifest).unwrap();
    let config = host.config(&dir, &model_path());
    let output = host.run(&["plugin", "list", "--json", "--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let state = |name: &str| {
        let entry = list.iter().find(|p| p["name"] == name);
        entry.map(|p| (p["state"].as_str().unwrap().to_owned(), p["reason"].clone()))
    };
    let loaded = list.iter().filter(|p| p["state"] == "loaded").count();
    assert_eq!(loaded, 4, "{list:?}");
    let (text_state, reason) = state("text").unwrap();
    assert_eq!(text_state, "refused");
    assert!(reason.as_str().unwrap().contains("libtext.so"), "{reason}");
    assert!(!reason.as_str().unwrap().contains('\n'));
}

#[test]
fn kernels_keep_to_the_cpu_features_asked_for() {
    let host = Host::new();
    let config = host.config(&plugins(), &model_path());
    let config = config.to_str().unwrap();
    let (code, line) = refused(&host.run(&["generate", "--prompt", "x", "--cpu-features", "sse9"]));
    assert_eq!(code, Some(2));
    assert!(line.contains("--cpu-features: there are no CPU features 'sse9'"), "{line}");

    let ask = ["generate", "--config", config, "--prompt", "The capital of France is"];
    let more = ["--max-tokens", "6", "--temperature", "0"];
    let best = host.run(&[&ask[..], &more].concat());
    let portable = host.run(&[&ask[..], &more, &["--cpu-features", "portable"]].concat());
    assert!(portable.status.success(), "{}", String::from_utf8_lossy(&portable.stderr));
    assert_eq!(best.stdout, portable.stdout, "other instructions, another answer");
}

#[test]
fn the_configuration_is_checked_and_shown() {
    let host = Host::new();
    let config = host.config(&plugins(), &model_path());
    let run = |more: &[&str]| {
        let mut args = vec!["config"];
        args.extend(more);
        args.extend(["--config", config.to_str().unwrap()]);
        host.run(&args)
    };
    let good = run(&["check", "--max-batch", "3"]);
    assert_eq!(String::from_utf8_lossy(&good.stdout), format!("{}: good\n", config.display()));
    let (code, line) = refused(&run(&["check", "--model-path", "none.gguf"]));
    assert_eq!(code, Some(1));
    assert!(line.contains("model none.gguf does not exist"), "{line}");
    let (code, line) = refused(&run(&["check", "--set", "resources.main_kv.kind=kw"]));
    assert_eq!(code, Some(2));
    assert!(
        line.starts_with("error: --set resources.main_kv.kind: [resources.main_kv]:"),
        "{line}"
    );
    let (code, line) = refused(&run(&["check", "--api-key-file", "none"]));
    assert_eq!(code, Some(2));
    assert!(line.contains("none: cannot be read"), "{line}");
    let (_, line) = refused(&run(&["check", "--host", "0.0.0.0"]));
    assert!(line.starts_with("warning: [server] host"), "{line}");

    // What is shown can be read again, and says the same; keys are not in it.
    let shown = run(&[
        "show",
        "--max-batch",
        "3",
        "--api-key",
        "sk-1",
        "--set",
        "resources.main_kv.pages=77",
    ]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(!text.contains("sk-1") && text.contains("# api_keys: 1 hidden"), "{text}");
    assert!(
        text.lines().any(|l| l.starts_with("max_batch = 3 ") && l.ends_with("# --max-batch")),
        "{text}"
    );
    let again = host.file("again.toml", &text);
    let again = host.run(&["config", "show", "--json", "--config", again.to_str().unwrap()]);
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(again["engine.max_batch"]["value"], 3);
    assert_eq!(again["resources.main_kv.pages"]["value"], 77);
    assert_eq!(again["engine.max_model_len"]["value"], Value::Null);
}

#[test]
fn variables_are_settings_and_slips_are_told() {
    let host = Host::new();
    let show = |name: &str, value: &str| {
        let program = env!("CARGO_BIN_EXE_engine-host");
        let mut command = Command::new(program);
        command.args(["config", "show", "--json"]).env(name, value);
        let output = command.current_dir(host.dir.path()).output().unwrap();
        let shown = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (shown, String::from_utf8(output.stderr).unwrap())
    };
    let (shown, told) = show("ENGINE_HOST_PORT", "9");
    assert_eq!(shown["server.port"]["value"], 9);
    assert_eq!(shown["server.port"]["from"], "ENGINE_HOST_PORT");
    assert_eq!(told, "");
    let (shown, told) = show("ENGINE_HOST_RESOURCES__MAIN_KV__PAGES", "5");
    assert_eq!(shown["resources.main_kv.pages"]["value"], 5, "{told}");
    let (shown, _) = show("ENGINE_HOST_PORT", "");
    assert_eq!(shown["server.port"]["value"], 8000, "an empty variable is none");
    let (shown, told) = show("ENGINE_HOST_PROT", "9");
    assert_eq!(shown["server.port"]["value"], 8000);
    assert!(
        told.contains("ENGINE_HOST_PROT is no setting; did you mean ENGINE_HOST_PORT?"),
        "{told}"
    );
    let (_, told) = show("ENGINE_HOST_PORT", "99999");
    assert_eq!(
        told,
        "error: ENGINE_HOST_PORT: port = 99999 in [server] is out of range: it must be 0 to 65535\n"
    );
    let (shown, told) = show("ENGINE_HOST_LOG_FORMAT", "yaml");
    assert_eq!(shown, Value::Null);
    assert!(
        told.starts_with("error: ENGINE_HOST_LOG_FORMAT: format = \"yaml\" in [log]"),
        "{told}"
    );
}
