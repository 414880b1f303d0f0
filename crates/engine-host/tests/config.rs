//! The engine's configuration: what is accepted, and the exact line for each thing that is not.

use std::path::{Path, PathBuf};

use engine_host::config::{
    Activations, DEFAULT_CONFIG, Device, KvDtype, LogFormat, Origin, Override, ReasoningParser,
    SETTINGS, ToolParser, TransferEngine, UnknownFields, default_model_path, reference, schema,
};
use engine_host::engine::{Queue, Relief, Victims};
use engine_host::{Config, ErrorKind};

fn parse(text: &str) -> Config {
    Config::parse("engine.toml", text, Path::new("/etc/engine")).expect("a good configuration")
}

/// The problems of `text`, which must be wrong usage.
fn problems(text: &str) -> Vec<String> {
    let error = Config::parse("engine.toml", text, Path::new("/etc/engine")).unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Usage, 2));
    error.to_string().lines().map(str::to_owned).collect()
}

#[test]
fn the_embedded_default() {
    let config = Config::embedded().unwrap();
    let kinds: Vec<_> = config.resources.iter().map(|(k, r)| (&**k, &*r.kind)).collect();
    assert_eq!(
        kinds,
        [("attn", "attention"), ("main_kv", "kv"), ("pos", "positions"), ("sampler", "sampler")]
    );
    assert_eq!(config.engine.plugin_dirs, [PathBuf::from("plugins")]);
    assert_eq!(config.model.path, default_model_path());
    // Its `[engine]` only spells the defaults out.
    let nothing = Config::parse("x", "", Path::new("")).unwrap();
    assert_eq!(config.engine, nothing.engine);
    assert_eq!((config.server, config.log), (nothing.server, nothing.log));
    // The keys that it names in comments are keys.
    let all = DEFAULT_CONFIG
        .replace("# threads", "threads")
        .replace("# cpu_features = \"avx2\"", "cpu_features = \"portable\"")
        .replace("# max_model_len", "max_model_len")
        .replace("# path", "path");
    let config = parse(&all);
    assert_eq!(config.engine.cpu_features.as_deref(), Some("portable"));
    assert_eq!((config.engine.threads, config.engine.max_model_len), (2, Some(8192)));
    assert_eq!(config.model.path, Path::new("/etc/engine/SmolLM2-135M-Instruct.Q4_1.gguf"));
}

#[test]
fn cpu_features_that_are_not_there_are_named_with_those_that_are() {
    let lines = problems("[engine]\ncpu_features = \"sse9\"\n");
    assert_eq!(lines.len(), 1);
    let expected = "engine.toml:2:16: cpu_features in [engine]: there are no CPU features 'sse9'; \
                    choose one of portable";
    assert!(lines[0].starts_with(expected), "{}", lines[0]);
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        [engine]
        device = "cuda:1"
        kv_dtype = "f32"
        activations = "int8"
        plugin_dirs = ["plugins", "/opt/plugins"]
        strict = true
        probe = "never"
        threads = 3
        pin_threads = false
        preplan = false
        run_ahead = false
        cpu_features = "portable"
        watchdog = 0
        pressure = ["evict", "recompute"]
        victims = "priority:main_kv"
        queue = "skip:4"
        transfer = "shared-memory"
        transfer_directory = "shm"
        cuda_graphs = false
        batch_invariant = true
        max_batch = 0x10
        max_batch_tokens = 1_000
        max_model_len = 77
        [model]
        path = "models/m.gguf"
        [server]
        host = "::1"
        port = 0
        served_model_name = ["a", "b"]
        api_keys = ["k1"]
        api_key_file = "keys"
        max_waiting = 0
        max_connections = 3
        max_body_bytes = 4096
        max_header_bytes = 8192
        max_choices = 7
        unknown_fields = "ignore"
        read_timeout = 1
        write_timeout = 3
        request_timeout = 2
        stream_buffer = 5
        drain_timeout = 6
        cors_origins = ["*"]
        tool_parser = "qwen"
        reasoning_parser = "none"
        log_prompts = true
        [log]
        filter = "engine_host=debug"
        format = "json"
        [resources.main_kv]
        kind = "kv"
        nodes = ["decoder"]
        "#,
    );
    let server = &config.server;
    assert_eq!((server.host.to_string().as_str(), server.port), ("::1", 0));
    assert_eq!(
        (&*server.served_model_name, &*server.cors_origins),
        (&["a".into(), "b".into()][..], &["*".into()][..])
    );
    assert!(server.api_keys.iter().eq(["k1"]) && server.log_prompts);
    assert_eq!(server.api_key_file.as_deref(), Some(Path::new("/etc/engine/keys")));
    assert_eq!((server.max_waiting, server.max_connections, server.max_body_bytes), (0, 3, 4096));
    assert_eq!((server.max_header_bytes, server.max_choices), (8192, 7));
    assert_eq!(server.unknown_fields, UnknownFields::Ignore);
    assert_eq!((server.read_timeout, server.write_timeout), (1, 3));
    assert_eq!(server.request_timeout, 2);
    assert_eq!((server.stream_buffer, server.drain_timeout), (5, 6));
    assert_eq!(server.tool_parser, ToolParser::Hermes);
    assert_eq!(server.reasoning_parser, ReasoningParser::None);
    assert_eq!((&*config.log.filter, config.log.format), ("engine_host=debug", LogFormat::Json));
    // No setting was forgotten here.
    for setting in SETTINGS {
        assert!(matches!(config.origin(&setting.path()), Origin::File(..)), "{}", setting.path());
    }
    let engine = config.engine;
    assert_eq!(engine.device, Device::Cuda { ordinal: 1 });
    assert_eq!((engine.kv_dtype, engine.activations), (KvDtype::F32, Activations::Int8));
    assert_eq!(engine.plugin_dirs, [Path::new("/etc/engine/plugins"), Path::new("/opt/plugins")]);
    assert!(!engine.pin_threads);
    assert!(engine.strict && !engine.preplan && !engine.cuda_graphs && engine.batch_invariant);
    assert!(!engine.run_ahead);
    assert_eq!(engine.transfer, TransferEngine::SharedMemory);
    assert_eq!(engine.transfer_directory, Path::new("/etc/engine/shm"));
    assert_eq!(engine.watchdog, 0);
    assert_eq!(engine.pressure, [Relief::Evict, Relief::Recompute]);
    assert_eq!(engine.victims, Victims::Priority("main_kv".into()));
    assert_eq!(engine.queue, Queue::Skip(4));
    assert_eq!((engine.threads, engine.max_batch), (3, 16));
    assert_eq!((engine.max_batch_tokens, engine.max_model_len), (1000, Some(77)));
    assert_eq!(config.model.path, Path::new("/etc/engine/models/m.gguf"));
}

#[test]
fn home_is_expanded() {
    let home = std::env::var("HOME").expect("HOME is set");
    let config = parse("[model]\npath = '~/m.gguf'");
    assert_eq!(config.model.path, Path::new(&home).join("m.gguf"));
    assert_eq!(
        problems("[model]\npath = '~bob/m.gguf'"),
        [
            "engine.toml:2:8: path in [model] is a path with ~ before a user's name, of which only ~/ \
          is known"
        ]
    );
}

#[test]
fn a_kinds_own_settings_are_kept_for_it() {
    let config = parse(
        r#"
[resources.main_kv]
page_size = 16
kind = "kv"
limits = { soft = 0.5, names = ["a", "b"], when = 2026-01-02 }
nodes = ["decoder"]
depends_on = ["other"]
memory = "80%"
"#,
    );
    let kv = &config.resources["main_kv"];
    assert_eq!(
        (&*kv.kind, &kv.nodes[..], &kv.depends_on[..]),
        ("kv", &["decoder".to_owned()][..], &["other".to_owned()][..])
    );
    let text: toml::Table = toml::from_str(&kv.settings_text()).unwrap();
    let expected: toml::Table = toml::from_str(
        "page_size = 16\nmemory = '80%'\n[limits]\nsoft = 0.5\nnames = ['a', 'b']\nwhen = 2026-01-02",
    )
    .unwrap();
    assert_eq!(text, expected);
    assert_eq!(kv.places.table, (2, 1));
    assert_eq!(kv.places.of("memory"), (8, 1));
    assert_eq!(kv.places.of("absent"), (2, 1));
}

#[test]
fn unknown_keys_come_with_the_nearest_name() {
    assert_eq!(
        problems("[engine]\n\n  max_bach = 3\n[modle]\npath = 'x'\n[model]\nzebra = 1\n"),
        [
            "engine.toml:3:3: unknown key \"max_bach\" in [engine]; did you mean \"max_batch\"?",
            "engine.toml:4:2: unknown key \"modle\" in the file; did you mean \"model\"?",
            "engine.toml:7:1: unknown key \"zebra\" in [model]; valid here: path",
        ]
    );
}

#[test]
fn all_bad_values_are_reported_together() {
    let found = problems(
        r#"[engine]
device = "gpu"
kv_dtype = "bf61"
threads = 0
max_batch = 99999999999999999999999
max_batch_tokens = -1
max_model_len = 1.5
plugin_dirs = []
strict = "yes"
[model]
path = ""
[resources.kv]
kind = "k v"
nodes = []
[resources.attn]
kind = 3
depends_on = ["kv", "kv", 1]
[resources."a b"]
kind = "x"
nodes = ["decoder"]
[resources]
flat = 1
big.number = 9223372036854775808
"#,
    );
    assert_eq!(
        found,
        [
            "engine.toml:2:10: device = \"gpu\" is neither \"cpu\" nor \"cuda:N\"",
            "engine.toml:3:12: kv_dtype = \"bf61\" in [engine] is not one of f32, f16, bf16, fp8, i8; \
             did you mean \"bf16\"?",
            "engine.toml:4:11: threads = 0 in [engine] is out of range: it must be 1 to 1024",
            "engine.toml:5:13: max_batch = 99999999999999999999999 in [engine] is out of range: it \
             must be 1 to 65536",
            "engine.toml:6:20: max_batch_tokens = -1 in [engine] is out of range: it must be 1 to \
             16777216",
            "engine.toml:7:17: \"max_model_len\" in [engine] must be an integer from 1 to 16777216, \
             not a float",
            "engine.toml:8:1: plugin_dirs in [engine] names no directory",
            "engine.toml:9:10: \"strict\" in [engine] must be true or false, not a string",
            "engine.toml:11:8: path in [model] is an empty path",
            "engine.toml:12:1: \"nodes\" in [resources.kv] names no node of the model",
            "engine.toml:13:8: kind = \"k v\" must be 1 to 64 letters, digits, '_', '-' and '.'",
            "engine.toml:15:1: [resources.attn] lacks the key \"nodes\"",
            "engine.toml:16:8: \"kind\" in [resources.attn] must be a string, not an integer",
            "engine.toml:17:21: \"depends_on\" in [resources.attn] names \"kv\" twice",
            "engine.toml:17:27: \"depends_on\" in [resources.attn] must be an array of strings, not \
             an integer",
            "engine.toml:18:12: resource key \"a b\" must be 1 to 64 letters, digits, '_', '-' and \
             '.'",
            "engine.toml:22:8: \"flat\" in [resources] must be a table, not an integer",
            "engine.toml:23:1: [resources.big] lacks the key \"kind\"",
            "engine.toml:23:1: [resources.big] lacks the key \"nodes\"",
            "engine.toml:23:14: the number 9223372036854775808 does not fit into 64 bits",
        ]
    );
}

#[test]
fn devices() {
    for (text, device) in [
        ("cpu", Some(Device::Cpu)),
        ("cuda:0", Some(Device::Cuda { ordinal: 0 })),
        ("cuda", None),
        ("cuda:", None),
        ("cuda:+1", None),
        ("cuda:256", None),
        ("CPU", None),
    ] {
        assert_eq!(text.parse().ok(), device, "{text}");
    }
}

#[test]
fn syntax_errors_have_a_place() {
    let found = problems("[engine]\nthreads = 2\nthreads = 3\n");
    assert_eq!(found, ["engine.toml:3:1: duplicate key \"threads\""]);
    assert!(problems("[engine\n")[0].starts_with("engine.toml:1:"));
    assert!(problems("\u{feff}[engine]\nx")[0].starts_with("engine.toml:2:"));
    let deep = format!("[model]\npath = {}", "[".repeat(10_000));
    assert!(problems(&deep)[0].starts_with("engine.toml:2:"));
}

#[test]
fn files_that_are_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("engine.toml");
    let load = || Config::load(&path).unwrap_err().to_string();
    let shown = path.display();

    assert!(load().starts_with(&format!("{shown}: cannot be read: ")), "{}", load());
    std::fs::write(&path, b"[engine]\nthr\xffeads = 1").unwrap();
    assert_eq!(load(), format!("{shown}:2:4: not valid UTF-8"));
    std::fs::write(&path, vec![b' '; (1 << 20) + 1]).unwrap();
    assert_eq!(load(), format!("{shown}: larger than the 1024 KiB allowed"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_eq!(load(), format!("{shown}: cannot be read: not a regular file"));
}

#[test]
fn paths_count_from_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("engine.toml");
    std::fs::write(&path, "[model]\npath = 'm.gguf'").unwrap();
    let config = Config::load(&path).unwrap();
    assert_eq!(config.model.path, dir.path().join("m.gguf"));
    assert_eq!(config.engine.plugin_dirs, [dir.path().join("plugins")]);
}

fn flag(path: &str, value: &str) -> Override {
    let origin = Origin::Flag(format!("--{}", path.rsplit('.').next().unwrap()));
    Override { path: path.into(), value: value.into(), origin }
}

fn variable(path: &str, value: &str) -> Override {
    let origin = Origin::Environment(format!("ENGINE_HOST_{}", path.replace('.', "__")));
    Override { path: path.into(), value: value.into(), origin }
}

#[test]
fn flags_count_more_than_variables_and_those_more_than_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("engine.toml");
    let text = "[engine]\nmax_batch = 1\nthreads = 1\n[model]\npath = 'm.gguf'\n\
                [resources.main_kv]\nkind = 'kv'\nnodes = ['decoder']\npages = 10\n";
    std::fs::write(&path, text).unwrap();
    let overrides = [
        variable("engine.max_batch", "2"),
        variable("engine.threads", "2"),
        variable("resources.MAIN_KV.PAGES", "20"),
        flag("engine.max_batch", "3"),
        flag("engine.kv_dtype", "f32"),
        flag("engine.plugin_dirs", "a, /b"),
        flag("server.served_model_name", "[\"x,y\"]"),
        flag("server.log_prompts", "true"),
        flag("resources.main_kv.on_fault", "stop"),
        flag("resources.main_kv.memory", "80%"),
    ];
    let config = Config::with(Some(&path), &overrides).unwrap();
    assert_eq!((config.engine.max_batch, config.engine.threads), (3, 2));
    assert_eq!(config.engine.kv_dtype, KvDtype::F32);
    // Paths of flags count from the working directory.
    assert_eq!(config.engine.plugin_dirs, [Path::new("a"), Path::new("/b")]);
    assert_eq!(config.server.served_model_name, ["x,y"]);
    assert!(config.server.log_prompts);
    let kv = &config.resources["main_kv"];
    assert_eq!(
        (kv.settings["pages"].as_integer(), kv.settings["memory"].as_str()),
        (Some(20), Some("80%"))
    );
    assert_eq!((kv.on_fault.name(), &*kv.kind), ("stop", "kv"));
    for (path, from) in [
        ("engine.max_batch", "--max_batch"),
        ("engine.threads", "ENGINE_HOST_engine__threads"),
        ("model.path", "line 5, column 1"),
        ("engine.device", "default"),
        ("resources.main_kv.pages", "ENGINE_HOST_resources__MAIN_KV__PAGES"),
        ("resources.main_kv.kind", "line 7, column 1"),
        ("resources.main_kv.depends_on", "default"),
    ] {
        // The variable's own path is in capitals; where the value comes from is asked for as in the file.
        assert_eq!(config.origin(path).to_string(), from, "{path}");
    }
}

#[test]
fn what_is_wrong_with_a_flag_names_the_flag() {
    for (over, message) in [
        (
            flag("engine.max_batch", "0"),
            "--max_batch: max_batch = 0 in [engine] is out of range: it must be 1 to 65536",
        ),
        (
            flag("engine.max_batch", "many"),
            "--max_batch: \"max_batch\" in [engine] must be an integer from 1 to 65536, not a string",
        ),
        (
            flag("engine.threads", "1\nmax_batch = 2"),
            "--threads: \"threads\" in [engine] must be an integer from 1 to 1024, not a string",
        ),
        (
            flag("engine.kv_dtype", "bf61"),
            "--kv_dtype: kv_dtype = \"bf61\" in [engine] is not one of f32, f16, bf16, fp8, i8; did you mean \"bf16\"?",
        ),
        (
            flag("server.host", "example.org"),
            "--host: host = \"example.org\" in [server] is not an IP address, such as \"127.0.0.1\" or \"::\"",
        ),
        (
            variable("engine.strict", "yes"),
            "ENGINE_HOST_engine__strict: \"strict\" in [engine] must be true or false, not a string",
        ),
        (
            flag("engine.max_bach", "1"),
            "--max_bach: there is no setting \"engine.max_bach\"; did you mean \"engine.max_batch\"?",
        ),
        (
            flag("resources.main_vk.pages", "1"),
            "--pages: there is no setting \"resources.main_vk.pages\"; did you mean \"resources.main_kv.pages\"?",
        ),
        (
            flag("resources.x", "1"),
            "--x: there is no setting \"resources.x\"; there are the resources attn, main_kv, pos, sampler",
        ),
    ] {
        let error = Config::with(None, &[over]).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert_eq!(error.exit_code(), 2);
    }
    // A key is not quoted, whatever is wrong with it.
    for keys in ["[\"sk-1\", \"sk-1\"]", "[\"sk-1\", \" \"]", "[\"sk-1\", 1]"] {
        let error = Config::with(None, &[flag("server.api_keys", keys)]).unwrap_err().to_string();
        assert!(!error.contains("sk-1") && !error.contains('\n'), "{error}");
    }
    let wrong = Override::from_set("engine.max_batch");
    assert!(matches!(wrong, Err(message) if message.contains("PATH=VALUE")));
}

#[test]
fn keys_come_from_the_file_of_keys_too_and_an_empty_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    let file = flag("server.api_key_file", path.to_str().unwrap());
    let config = Config::with(None, &[file, flag("server.api_keys", "a,b")]).unwrap();
    let keys = || config.server.all_keys();
    assert!(keys().unwrap_err().to_string().contains("cannot be read"));
    std::fs::write(&path, "# nobody\n\n").unwrap();
    assert!(keys().unwrap_err().to_string().ends_with("api_key_file has no key in it"));
    std::fs::write(&path, "# ours\n  c \n\r\nd\r\n").unwrap();
    let all = keys().unwrap();
    assert!(all.iter().eq(["a", "b", "c", "d"]), "{}", all.len());
    assert!(!format!("{config:?}").contains("\"a\""));
}

#[test]
fn defaults_are_as_they_are_told() {
    let config = Config::parse("x", "", Path::new("")).unwrap();
    for setting in SETTINGS {
        let Ok(told) = toml::from_str::<toml::Table>(&format!("v = {}", setting.default)) else {
            continue;
        };
        assert_eq!(setting.value(&config).as_ref(), told.get("v"), "{}", setting.path());
    }
}

#[test]
fn flags_and_variables_of_settings_differ() {
    let mut names: Vec<String> = SETTINGS.iter().map(|setting| setting.env()).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), SETTINGS.len());
}

#[test]
fn the_reference_page_is_current() {
    let path = xtask::workspace_root().join("docs/configuration.md");
    let page = std::fs::read_to_string(path).unwrap();
    assert!(
        page.trim_end() == reference::page().trim_end(),
        "docs/configuration.md is old: `engine-host config reference > docs/configuration.md`"
    );
}

#[test]
fn the_schema_knows_every_setting_and_the_default_file() {
    let schema = schema();
    for setting in SETTINGS {
        let at = format!("/properties/{}/properties/{}/description", setting.table, setting.key);
        assert_eq!(schema.pointer(&at).and_then(|v| v.as_str()), Some(setting.help), "{at}");
    }
    let file: toml::Table = toml::from_str(DEFAULT_CONFIG).unwrap();
    for (table, keys) in file.iter().filter(|(table, _)| *table != "resources") {
        for key in keys.as_table().unwrap().keys() {
            assert!(
                schema.pointer(&format!("/properties/{table}/properties/{key}")).is_some(),
                "{key}"
            );
        }
    }
    assert_eq!(
        schema.pointer("/properties/engine/properties/max_batch/maximum"),
        Some(&65_536.into())
    );
    let dtypes = schema.pointer("/properties/engine/properties/kv_dtype/enum").unwrap();
    assert_eq!(dtypes, &serde_json::json!(["f32", "f16", "bf16", "fp8", "i8"]));
}

#[test]
fn a_policy_that_names_no_resource_is_a_mistake_with_its_place() {
    let text = "[engine]\nvictims = \"priority:main_kb\"\nqueue = \"skip:0\"\n[resources.main_kv]\nkind = \"kv\"\nnodes = [\"decoder\"]\n";
    let e = Config::parse("engine.toml", text, Path::new("/etc")).unwrap_err().to_string();
    let queue = "engine.toml:3:9: queue in [engine]: there is no \"skip:0\"";
    assert!(e.contains(queue), "{e}");
    let victims = "engine.toml:2:1: victims = \"priority:main_kb\" in [engine] names resource \"main_kb\", which \
                   does not exist; did you mean \"main_kv\"?";
    assert!(e.contains(victims), "{e}");
    assert_eq!(e.lines().count(), 2, "{e}");
}
