//! Plugin files that do harm as soon as they are mapped, or that are not what they say: the host
//! refuses them in one line, lives, and loads the others. Built from C at test time.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::plugins;

const GOOD_NOTE: &str = "plugin hostile 0.1.0\napi 1.0\nrustc none\npanic unwind\nkind hostile\n";

struct Directory(tempfile::TempDir);

impl Directory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A plugin whose initialiser runs `body`, with this note.
    fn plugin(&self, name: &str, note: &str, body: &str) {
        let source = self.path().join(format!("{name}.c"));
        let text = note.replace('\n', "\\n");
        let code = format!(
            r#"
            #include <stdio.h>
            #include <stdlib.h>
            #include <unistd.h>
            #define TEXT "{text}"
            __attribute__((section(".note.resapi"), used, aligned(4)))
            static const struct {{ unsigned n, c, t; char name[8]; char text[sizeof TEXT]; }} note =
                {{ 7, sizeof TEXT, 1, "RESAPI", TEXT }};
            __attribute__((constructor)) static void run(void) {{ {body} }}
            "#
        );
        std::fs::write(&source, code).unwrap();
        let library = self.path().join(format!("lib{name}.so"));
        let done = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .output()
            .expect("a C compiler, which rustc needs too");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let manifest = format!(
            "[plugin]\nname = \"{name}\"\nversion = \"0.1.0\"\napi = \"1.0\"\n\
             library = \"lib{name}.so\"\nkinds = [\"hostile\"]\n"
        );
        std::fs::write(self.path().join(format!("{name}.toml")), manifest).unwrap();
    }

    /// The plugins of this repository, as installed.
    fn with_installed(self) -> Self {
        for entry in std::fs::read_dir(plugins()).unwrap() {
            let path = entry.unwrap().path();
            let wanted = path.extension().is_some_and(|e| e == "toml" || e == "so");
            let hidden = path.file_name().unwrap().as_encoded_bytes().starts_with(b".");
            if path.is_file() && wanted && !hidden {
                std::fs::copy(&path, self.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        self
    }

    fn run(&self, args: &[&str]) -> Output {
        let config = self.path().join("engine.cfg");
        let text = format!("[engine]\nplugin_dirs = [{:?}]\n", self.path());
        std::fs::write(&config, text).unwrap();
        let mut all = args.to_vec();
        all.extend(["--config", config.to_str().unwrap()]);
        Command::new(env!("CARGO_BIN_EXE_engine-host")).args(all).output().unwrap()
    }

    /// State and reason of a plugin, from the list; which must have ended well.
    fn listed(&self, name: &str) -> (String, String) {
        let output = self.run(&["plugin", "list", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let entry = list.as_array().unwrap().iter().find(|e| e["name"] == name).unwrap();
        let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let reason = text("reason");
        assert!(!reason.contains('\n'), "{reason}");
        (text("state"), reason)
    }
}

#[test]
fn initialisers_that_end_crash_or_hang_harm_only_a_child() {
    for (body, reason) in [
        ("_exit(42);", "ends the process when it is loaded: a child exited with code 42"),
        ("abort();", "crashes when it is loaded: a child was ended by signal 6"),
        ("*(volatile int *)8 = 1;", "crashes when it is loaded: a child was ended by signal 11"),
        ("for (;;) sleep(1);", "hangs when it is loaded"),
    ] {
        let dir = Directory::new().with_installed();
        dir.plugin("hostile", GOOD_NOTE, body);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains(reason) && why.contains("libhostile.so"), "{body}: {why}");
        assert_eq!(dir.listed("resource-kv").0, "loaded", "the others work");
    }
}

#[test]
fn what_the_note_rules_out_is_never_run() {
    let marker = |dir: &Directory| dir.path().join("it-ran");
    for (note, reason) in [
        (
            GOOD_NOTE.replace("kind hostile", "kind other"),
            "manifest says kinds hostile, library has other",
        ),
        (GOOD_NOTE.replace("unwind", "abort"), "was built with panic=abort"),
        (GOOD_NOTE.replace("api 1.0", "api 2.0"), "was built against contract \"2.0\""),
        (format!("{GOOD_NOTE}feature avx4096\n"), "was built for a CPU with avx4096"),
        (format!("{GOOD_NOTE}provides x.y/1\n"), "manifest says provides none, library has x.y/1"),
    ] {
        let dir = Directory::new();
        let body = format!("fclose(fopen({:?}, \"w\"));", marker(&dir).to_str().unwrap());
        dir.plugin("hostile", &note, &body);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains(reason), "{why}");
        assert!(!marker(&dir).exists(), "its code ran: {reason}");
    }
}

#[test]
fn a_library_without_a_note_is_no_plugin() {
    let dir = Directory::new();
    dir.plugin("hostile", GOOD_NOTE, "_exit(1);");
    // Another name: the note is not ours any more.
    let library = dir.path().join("libhostile.so");
    let mut bytes = std::fs::read(&library).unwrap();
    let at = bytes.windows(6).position(|w| w == b"RESAPI").unwrap();
    bytes[at] = b'X';
    std::fs::write(&library, bytes).unwrap();
    let (state, why) = dir.listed("hostile");
    assert_eq!(state, "refused");
    assert!(why.contains("is not a resource plugin: it carries no RESAPI note"), "{why}");
}

fn doctor(dir: &Directory, paths: &[PathBuf]) -> (Option<i32>, String) {
    let mut args = vec!["plugin", "doctor"];
    args.extend(paths.iter().map(|p| p.to_str().unwrap()));
    let output = dir.run(&args);
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_doctor_shows_every_stage_up_to_the_one_that_refuses() {
    let dir = Directory::new().with_installed();
    let (code, text) = doctor(&dir, &[]);
    assert_eq!(code, Some(0), "{text}");
    for stage in ["manifest", "file", "note", "probe", "load"] {
        let ok = text.lines().filter(|l| l.trim_start().starts_with(stage) && l.contains(" ok "));
        assert_eq!(ok.count(), 4, "{stage}:\n{text}");
    }
    dir.plugin("hostile", GOOD_NOTE, "abort();");
    let (code, text) = doctor(&dir, &[dir.path().join("libhostile.so")]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("probe     refused  crashes when it is loaded"), "{text}");
    assert!(!text.contains("resource-kv") && !text.contains("load      "), "{text}");
    let (code, _) = doctor(&dir, &[dir.path().join("nothing.so")]);
    assert_eq!(code, Some(2));
}

#[test]
fn with_a_lock_only_what_is_in_it_is_loaded() {
    let dir = Directory::new().with_installed();
    let trusted = dir.run(&["plugin", "trust"]);
    assert!(trusted.status.success(), "{}", String::from_utf8_lossy(&trusted.stderr));
    assert_eq!(dir.listed("resource-kv"), ("loaded".into(), String::new()));

    dir.plugin("hostile", GOOD_NOTE, "_exit(1);");
    let (state, why) = dir.listed("hostile");
    assert_eq!(state, "refused");
    assert!(
        why.contains("is not in plugins.lock: `engine-host plugin trust` takes it in"),
        "{why}"
    );

    // A manifest without a pin over another library: the lock still knows.
    let manifest = dir.path().join("resource-kv.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, format!("{text}# changed\n")).unwrap();
    let (_, why) = dir.listed("resource-kv");
    assert!(why.contains("is not the manifest that plugins.lock names"), "{why}");
    std::fs::write(&manifest, text).unwrap();
    let library = dir.path().join("libresource_positions.so");
    let manifest = dir.path().join("resource-positions.toml");
    let text = std::fs::read_to_string(&manifest).unwrap();
    let unpinned: Vec<&str> = text.lines().filter(|l| !l.starts_with("sha256")).collect();
    std::fs::write(&manifest, unpinned.join("\n")).unwrap();
    std::fs::remove_file(dir.path().join("hostile.toml")).unwrap();
    assert!(dir.run(&["plugin", "trust"]).status.success());
    let mut bytes = std::fs::read(&library).unwrap();
    bytes.push(0);
    std::fs::write(&library, bytes).unwrap();
    let (state, why) = dir.listed("resource-positions");
    assert_eq!(state, "refused");
    assert!(why.contains("is not the build that plugins.lock names"), "{why}");

    std::fs::write(dir.path().join("plugins.lock"), "version = 1\nplugins = 3\n").unwrap();
    let output = dir.run(&["plugin", "list"]);
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && line.contains("plugins.lock: unknown field"), "{line}");
}
