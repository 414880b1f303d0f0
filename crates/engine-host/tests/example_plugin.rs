//! The example that a third party starts from: built outside of the workspace, loaded, at work.

mod support;

use std::path::Path;
use std::process::Command;

use support::{config, greedy, load, run};

/// "The capital of France is", and " Paris".
const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];
const PARIS: u32 = 7042;

fn build_example(plugins: &Path) {
    let source = xtask::workspace_root().join("examples/ban-tokens");
    let target = xtask::workspace_root().join("target/examples");
    let done = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--manifest-path"])
        .arg(source.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    std::fs::copy(source.join("plugin.toml"), plugins.join("ban-tokens.toml")).unwrap();
    let library = "libban_tokens.so";
    std::fs::copy(target.join("debug").join(library), plugins.join(library)).unwrap();
}

#[test]
fn a_third_partys_plugin_changes_what_is_sampled() {
    let mut plain = config("", "pages = 64");
    let answer = run(&mut load(&plain).engine, vec![greedy(PROMPT.to_vec(), 1)]);
    assert_eq!(answer[0].ids(), [PARIS]);

    let own = tempfile::tempdir().unwrap();
    build_example(own.path());
    plain.engine.plugin_dirs.push(own.path().to_owned());
    let mut section = plain.resources["sampler"].clone();
    section.kind = "ban_tokens".into();
    section.settings = toml::toml! {
        sampler = "sampler"
        tokens = [7042]
    };
    plain.resources.insert("no_paris".into(), section);
    let answer = run(&mut load(&plain).engine, vec![greedy(PROMPT.to_vec(), 1)]);
    assert_eq!(answer[0].failure, None);
    assert_ne!(answer[0].ids(), [PARIS]);
    // Reported log-probabilities are the model's own, before processors.
    assert_eq!(answer[0].tokens[0].top[0].0, PARIS);
}
