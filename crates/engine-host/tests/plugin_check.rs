//! `engine-host plugin check` on plugin files, sound and unsound ones.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// The plugin with the fake kinds, as an operator would have it.
fn directory() -> &'static TempDir {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    DIRECTORY.get_or_init(|| resource_testkit::support::plugin_directory().unwrap())
}

fn library() -> PathBuf {
    directory().path().join("libresource_testkit_plugin.so")
}

fn check(file: &Path, args: &[&str]) -> Output {
    let host = env!("CARGO_BIN_EXE_engine-host");
    Command::new(host).args(["plugin", "check"]).arg(file).args(args).output().unwrap()
}

/// Exit code and standard output as JSON.
fn json(file: &Path, args: &[&str]) -> (Option<i32>, Value) {
    let output = check(file, &[args, &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let parsed = serde_json::from_str(&text);
    let said = || format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), parsed.unwrap_or_else(|_| panic!("{}", said())))
}

fn fault(name: &str) -> (Option<i32>, Value) {
    let settings = format!("fault = \"{name}\"");
    let most = ["--patience", "5", "--memory", "1"];
    json(&library(), &[&["--kind", "fake_kv", "--settings", &settings], &most[..]].concat())
}

#[test]
fn a_sound_kind_is_clean_by_its_library_and_by_its_manifest() {
    for file in [library(), directory().path().join("testkit.toml")] {
        let (code, found) = json(&file, &["--kind", "fake_kv", "--seed", "3"]);
        assert_eq!((code, &found["clean"]), (Some(0), &Value::Bool(true)), "{found}");
        let kind = &found["kinds"][0];
        assert_eq!((kind["kind"].as_str(), kind["seed"].as_u64()), (Some("fake_kv"), Some(3)));
        assert!(kind["operations"].as_u64().unwrap() > 2000, "{found}");
        assert_eq!(found["notes"], Value::Array(vec![]));
    }
}

#[test]
fn a_library_without_a_manifest_is_checked_all_the_same() {
    let own = tempfile::tempdir().unwrap();
    let copy = own.path().join("seen-never-before.so");
    std::fs::copy(library(), &copy).unwrap();
    let output = check(&copy, &["--kind", "fake", "--steps", "5"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("note: no manifest beside the file names it"), "{text}");
    assert!(text.contains("  ok       a request may be told of twice"), "{text}");
    assert!(text.contains("nothing found (--seed 0)"), "{text}");
}

#[test]
fn a_finding_has_its_operations_and_the_seed_repeats_it() {
    let (code, found) = fault("fork_aliases");
    assert_eq!(code, Some(1), "{found}");
    let finding = &found["kinds"][0]["findings"][0];
    assert!(!finding["operations"].as_array().unwrap().is_empty(), "{found}");
    assert_eq!(fault("fork_aliases").1, found);
}

#[test]
fn what_ends_the_process_or_never_comes_back_is_a_finding_with_its_place() {
    for (name, how) in [
        ("aborts", "the process died of signal 6"),
        ("overflows", "the process died of signal"),
        ("hangs", "it did not come back"),
        ("takes_memory", "it took more than 1 GiB of memory"),
    ] {
        let (code, found) = fault(name);
        assert_eq!(code, Some(1), "{found}");
        let fatal = found["fatal"][0].as_str().unwrap();
        assert!(fatal.starts_with(&format!("kind fake_kv: {how}")), "{fatal}");
        assert!(fatal.contains("in: commit step "), "{fatal}");
    }
}

#[test]
fn all_kinds_of_a_plugin_have_their_turn() {
    let (code, found) = json(&library(), &["--steps", "4"]);
    assert_eq!(code, Some(1), "the panicker is one of them");
    let kinds = found["kinds"].as_array().unwrap();
    let clean: Vec<(&str, bool)> = kinds
        .iter()
        .map(|k| (k["kind"].as_str().unwrap(), k["clean"].as_bool().unwrap()))
        .collect();
    assert_eq!(clean, [("fake", true), ("fake_kv", true), ("panicker", false)]);
}

#[test]
fn a_dependency_comes_from_the_kit_or_is_said() {
    let needs = "depends_on = ['below']";
    let (code, found) = json(&library(), &["--kind", "fake", "--settings", needs]);
    assert_eq!(code, Some(0), "{found}");
    let said = "depends_on = ['below']\n[dependencies.below]\nkind = 'fake'\ncapacity = 40";
    let (code, found) = json(&library(), &["--kind", "fake", "--settings", said]);
    assert_eq!(code, Some(0), "{found}");
}

#[test]
fn wrong_usage_is_one_line() {
    for (args, said) in [
        (&["--kind", "fakr"][..], "--kind fakr"),
        (&["--settings", "a = 1"][..], "say which with --kind"),
        (&["--kind", "fake", "--settings", "a = "][..], "--settings"),
        (&["--kind", "fake", "--settings", "nowhere.toml"][..], "neither TOML nor a file"),
    ] {
        let output = check(&library(), args);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(said) && text.lines().count() == 1, "{text}");
    }
    let none = check(Path::new("/nowhere/at-all.so"), &[]);
    assert_eq!(none.status.code(), Some(1));
    let text = String::from_utf8_lossy(&none.stdout).into_owned();
    assert!(text.contains("/nowhere/at-all.so"), "{text}");
    let own = tempfile::tempdir().unwrap();
    let broken = own.path().join("broken.so");
    std::fs::write(&broken, "no library").unwrap();
    let output = check(&broken, &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("finding: ") && text.contains("ELF"), "{text}");
}
