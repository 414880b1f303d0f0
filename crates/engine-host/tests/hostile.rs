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
        self.plugin_with(name, note, body, "", &[]);
    }

    /// The same, with `more` code and flags of the compiler.
    fn plugin_with(&self, name: &str, note: &str, body: &str, more: &str, flags: &[&str]) {
        let source = self.path().join(format!("{name}.c"));
        let text = note.replace('\n', "\\n");
        let code = format!(
            r#"
            #include <stdio.h>
            #include <stdlib.h>
            #include <string.h>
            #include <unistd.h>
            #include <sys/resource.h>
            #include <sys/stat.h>
            #include <fenv.h>
            #include <signal.h>
            #define TEXT "{text}"
            __attribute__((section(".note.resapi"), used, aligned(4)))
            static const struct {{ unsigned n, c, t; char name[8]; char text[sizeof TEXT]; }} note =
                {{ 7, sizeof TEXT, 1, "RESAPI", TEXT }};
            __attribute__((constructor)) static void run(void) {{ {body} }}
            {more}
            "#
        );
        std::fs::write(&source, code).unwrap();
        let library = self.path().join(format!("lib{name}.so"));
        let done = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .args(flags)
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
        self.run_with(args, &[])
    }

    /// With further variables in the environment.
    fn run_with(&self, args: &[&str], environment: &[(&str, &Path)]) -> Output {
        let config = self.path().join("engine.cfg");
        let text = format!("[engine]\nplugin_dirs = [{:?}]\n", self.path());
        std::fs::write(&config, text).unwrap();
        let mut all = args.to_vec();
        all.extend(["--config", config.to_str().unwrap()]);
        let mut host = Command::new(env!("CARGO_BIN_EXE_engine-host"));
        host.args(all).envs(environment.iter().copied()).output().unwrap()
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
        ("_exit(0);", "ends the process when it is loaded: a child exited with code 0"),
        ("_exit(42);", "ends the process when it is loaded: a child exited with code 42"),
        ("abort();", "crashes when it is loaded: a child was ended by signal 6"),
        ("*(volatile int *)8 = 1;", "crashes when it is loaded: a child was ended by signal 11"),
        ("for (;;) sleep(1);", "hangs when it is loaded"),
        (
            "for (char *p; (p = malloc(1 << 24));) memset(p, 1, 1 << 24); abort();",
            "crashes when it is loaded: a child was ended by signal 6",
        ),
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
    let says = "plugins.lock: line 2: unknown field";
    assert!(!output.status.success() && line.contains(says), "{line}");
    assert!(line.contains("`engine-host plugin trust` writes it anew"), "{line}");
}

/// Puts a word of the same length in place of another in a library.
fn patch(library: &Path, from: &[u8], to: &[u8]) {
    let mut bytes = std::fs::read(library).unwrap();
    let places: Vec<usize> =
        (0..bytes.len() - from.len()).filter(|&at| bytes[at..].starts_with(from)).collect();
    assert!(!places.is_empty() && from.len() == to.len());
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to);
    }
    std::fs::write(library, bytes).unwrap();
}

#[test]
fn an_initialiser_that_prints_does_not_spoil_the_output() {
    let dir = Directory::new().with_installed();
    // Through the C library's buffer, and past it.
    dir.plugin("hostile", GOOD_NOTE, "printf(\"hello\"); fflush(stdout); write(1, \"[\", 1);");
    let (state, why) = dir.listed("hostile");
    assert_eq!(state, "refused");
    assert!(why.contains("it has no entry written by export_plugin!"), "{why}");
    let output = dir.run(&["plugin", "doctor", "--json"]);
    serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("nothing else is in it");
    let elsewhere = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(elsewhere.contains("hello"), "{elsewhere}");
}

#[test]
fn initialisers_that_exhaust_or_signal_the_process_harm_only_a_child() {
    let more =
        "__attribute__((noinline)) int deeper(int n) { volatile char page[4096]; page[0] = n;
            return deeper(n + 1) + page[0]; }";
    for body in [
        "raise(15);",
        "kill(getpid(), 9);",
        // Everybody in the process group, and a process that leaves it.
        "kill(0, 9);",
        "setsid(); kill(0, 9);",
        "__builtin_trap();",
        "exit(0);",
        "extern int deeper(int); deeper(0);",
    ] {
        let dir = Directory::new().with_installed();
        dir.plugin_with("hostile", GOOD_NOTE, body, more, &["-O0", "-w"]);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused", "{body}: {why}");
        assert!(why.contains("when it is loaded: a child "), "{body}: {why}");
        assert_eq!(dir.listed("resource-kv").0, "loaded", "the others work");
    }
}

#[test]
fn what_an_initialiser_starts_is_not_waited_for_and_ends_with_the_child() {
    let dir = Directory::new();
    let pid = dir.path().join("pid");
    let note = format!(
        "FILE *f = fopen({:?}, \"w\"); fprintf(f, \"%d\", getpid()); fclose(f);",
        pid.to_str().unwrap()
    );
    // It keeps the child's end of the pipe open.
    for body in [
        format!("if (fork() == 0) {{ {note} for (;;) sleep(1); }} sleep(1); _exit(0);"),
        "if (fork() == 0) { setsid(); sleep(30); _exit(0); } _exit(0);".to_owned(),
    ] {
        dir.plugin_with("hostile", GOOD_NOTE, &body, "", &[]);
        let started = std::time::Instant::now();
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains("ends the process when it is loaded"), "{why}");
        assert!(started.elapsed().as_secs() < 9, "{:?}", started.elapsed());
    }
    let pid = std::fs::read_to_string(pid).unwrap();
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(state.is_empty() || state.contains(") Z "), "it goes on: {state}");
}

#[test]
fn initialisers_that_change_the_process_are_refused_with_what_they_change() {
    for (body, what) in [
        ("signal(SIGTERM, SIG_IGN);", "ignored signals"),
        ("signal(SIGINT, exit);", "handled signals"),
        ("sigset_t all; sigfillset(&all); sigprocmask(SIG_BLOCK, &all, 0);", "blocked signals"),
        ("struct rlimit few = { 64, 64 }; setrlimit(RLIMIT_NOFILE, &few);", "its limits"),
        ("if (chdir(\"/\")) abort();", "its working directory"),
        ("umask(0);", "the mode of new files"),
        ("close(2);", "standard streams"),
        ("fclose(stdin);", "standard streams"),
        ("fesetround(FE_UPWARD);", "rounding"),
        #[cfg(target_arch = "x86_64")]
        ("__builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);", "numbers near zero"),
    ] {
        let dir = Directory::new();
        dir.plugin_with("hostile", GOOD_NOTE, body, "", &["-lm"]);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused", "{body}");
        let says = format!("changes the process when it is loaded: {what}");
        assert!(why.ends_with(&says), "{body}: {why}");
    }
}

#[test]
fn what_harms_a_child_is_not_taken_into_the_lock() {
    let dir = Directory::new().with_installed();
    dir.plugin("hostile", GOOD_NOTE, "abort();");
    let trusted = dir.run(&["plugin", "trust"]);
    let said = String::from_utf8_lossy(&trusted.stderr).into_owned();
    assert!(said.contains("left out ") && said.contains("crashes when it is loaded"), "{said}");
    let lock = std::fs::read_to_string(dir.path().join("plugins.lock")).unwrap();
    assert!(lock.contains("resource-kv.toml") && !lock.contains("hostile.toml"), "{lock}");
    assert_eq!(dir.listed("hostile").0, "refused");
}

#[test]
fn names_and_texts_of_others_stay_in_their_line() {
    let dir = Directory::new();
    std::fs::write(dir.path().join("a\nb\u{1b}[2J.toml"), "[plugin]\n\"x\\u001b[2J\\n\" = 1\n")
        .unwrap();
    std::fs::write(dir.path().join("c.toml"), "[plugin]\nname = \"\\u202e\\n\"\n").unwrap();
    let bytes = std::os::unix::ffi::OsStrExt::from_bytes(&b"d\xff.toml"[..]);
    std::fs::write(dir.path().join::<&std::ffi::OsStr>(bytes), "x").unwrap();
    dir.plugin("hostile", &GOOD_NOTE.replace("kind hostile", "kind \\033[2J"), "");
    for command in ["list", "doctor"] {
        let output = dir.run(&["plugin", command, "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json.as_array().map(Vec::len), Some(4), "also one that is not UTF-8");
        let output = dir.run(&["plugin", command]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(!said.contains(['\u{1b}', '\u{202e}']), "{said:?}");
        assert!(said.lines().all(|l| !l.starts_with('b')), "{said:?}");
    }
    let (_, why) = dir.listed("hostile");
    assert!(why.contains("its RESAPI note is not plain text"), "{why}");
}

#[test]
fn thousands_of_problems_are_told_in_a_few_lines() {
    let dir = Directory::new();
    let keys: String = (0..8000).map(|i| format!("k{i}=1\n")).collect();
    std::fs::write(dir.path().join("x.toml"), format!("[plugin]\n{keys}")).unwrap();
    let (code, text) = doctor(&dir, &[]);
    assert_eq!(code, Some(1));
    assert!(text.lines().count() < 30 && text.contains("more problems"), "{text}");
}

#[test]
fn a_note_that_says_two_things_is_refused() {
    let dir = Directory::new();
    let twice = GOOD_NOTE.replace("panic unwind", "panic abort\npanic unwind");
    dir.plugin("hostile", &twice, "_exit(1);");
    let (_, why) = dir.listed("hostile");
    assert!(why.ends_with("corrupt: its RESAPI note says \"panic\" twice"), "{why}");
    // Another note beside it.
    let more = "#define OTHER \"api 1.0\\npanic unwind\\nkind other\\n\"
        __attribute__((section(\".note.resapi\"), used, aligned(4)))
        static const struct { unsigned n, c, t; char name[8]; char text[sizeof OTHER]; } other =
            { 7, sizeof OTHER, 1, \"RESAPI\", OTHER };";
    dir.plugin_with("hostile", GOOD_NOTE, "_exit(1);", more, &[]);
    let (_, why) = dir.listed("hostile");
    assert!(why.ends_with("corrupt: it carries two RESAPI notes"), "{why}");
}

/// The name that a plugin's entry has.
const ENTRY: &str = "_1as_0lib_1header_0root_bmodule_bloader";

#[test]
fn forged_entries_are_refused() {
    let magic = "abi stable library for Rust     ";
    for (more, reason) in [
        (format!("const char {ENTRY}[512] = \"not that magic at all ----------\";"), ""),
        (format!("const char {ENTRY}[512] = {{0}};"), ""),
        // The right magic over nothing: whoever reads on, crashes.
        (format!("const char {ENTRY}[512] = \"{magic}\";"), ""),
        (format!("const int {ENTRY} = 0;"), ""),
        (format!("int {ENTRY}(void) {{ return 1; }}"), ""),
    ] {
        let dir = Directory::new().with_installed();
        dir.plugin_with("hostile", GOOD_NOTE, "", &more, &[]);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused", "{more}");
        assert!(why.contains("libhostile.so: ") && why.contains(reason), "{more}: {why}");
        assert_eq!(dir.listed("resource-kv").0, "loaded", "the others work");
    }
}

#[test]
fn a_library_that_needs_a_newer_c_library_is_refused_in_its_words() {
    let dir = Directory::new();
    dir.plugin("hostile", GOOD_NOTE, "puts(\"\");");
    let library = dir.path().join("libhostile.so");
    patch(&library, b"GLIBC_2.2.5", b"GLIBC_9.9.9");
    let (state, why) = dir.listed("hostile");
    assert_eq!(state, "refused");
    assert!(why.contains("cannot be loaded: ") && why.contains("GLIBC_9.9.9"), "{why}");
}

#[test]
fn a_library_of_its_own_beside_a_plugin_is_not_taken_along() {
    let dir = Directory::new();
    let vendor = dir.path().join("libvendor.so.1");
    let source = dir.path().join("vendor.c");
    std::fs::write(&source, "int vendor(void) { return 1; }").unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libvendor.so.1", "-o"])
        .args([&vendor, &source])
        .status();
    assert!(built.unwrap().success());
    let folder = dir.path().to_str().unwrap();
    for flags in
        [vec!["-Wl,-rpath,$ORIGIN"], vec!["-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"], vec![]]
    {
        let (more, lib) = ("int vendor(void); int use(void) { return vendor(); }", vendor.to_str());
        let flags: Vec<&str> = flags.into_iter().chain([lib.unwrap(), "-L", folder]).collect();
        dir.plugin_with("hostile", GOOD_NOTE, "", more, &flags);
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains("needs \"libvendor.so.1\""), "{why}");
        assert!(why.contains("link it statically"), "{why}");
    }
}

#[test]
fn a_library_that_may_be_needed_is_not_looked_for_where_the_plugin_says() {
    let dir = Directory::new();
    let source = dir.path().join("driver.c");
    std::fs::write(&source, "int driver(void) { return 1; }").unwrap();
    let driver = dir.path().join("libcuda.so.1");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&driver, &source])
        .status();
    assert!(built.unwrap().success());
    let (more, library) = ("int driver(void); int use(void) { return driver(); }", driver.to_str());
    let path = format!("-Wl,-rpath,{}", dir.path().display());
    for tags in ["-Wl,--disable-new-dtags", "-Wl,--enable-new-dtags"] {
        dir.plugin_with("hostile", GOOD_NOTE, "_exit(1);", more, &[library.unwrap(), &path, tags]);
        let (_, why) = dir.listed("hostile");
        assert!(why.contains("needs \"libcuda.so.1\" and says to look for it in "), "{why}");
    }
    // What is in the process already is not looked for.
    dir.plugin_with("hostile", GOOD_NOTE, "puts(\"\");", "", &[&path]);
    let (_, why) = dir.listed("hostile");
    assert!(why.contains("it has no entry written by export_plugin!"), "{why}");
}

#[test]
fn a_library_may_not_pass_for_one_that_others_need() {
    let dir = Directory::new();
    for name in ["libcuda.so.1", "libm.so.6"] {
        dir.plugin_with("hostile", GOOD_NOTE, "_exit(1);", "", &[&format!("-Wl,-soname,{name}")]);
        let (_, why) = dir.listed("hostile");
        assert!(why.contains(&format!("calls itself {name:?}, and would stand in for")), "{why}");
    }
}

#[test]
fn the_search_path_does_not_decide_which_plugin_is_loaded() {
    let (dir, evil) = (Directory::new().with_installed(), Directory::new());
    for name in ["resource_kv", "resource_positions", "resource_sampler", "resource_attention"] {
        evil.plugin(name, GOOD_NOTE, "_exit(7);");
    }
    let environment = [("LD_LIBRARY_PATH", evil.path())];
    let output = dir.run_with(&["plugin", "list", "--json"], &environment);
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(list.as_array().unwrap().iter().all(|p| p["state"] == "loaded"), "{list}");
    // What the environment decides all the same is said.
    let output = dir.run_with(&["plugin", "doctor"], &environment);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("warning: LD_LIBRARY_PATH="), "{said}");
}

#[test]
fn programs_and_object_files_are_no_plugins() {
    let dir = Directory::new();
    for (flags, says) in [
        (vec!["-pie", "-nostartfiles"], "executable, not a shared library"),
        (vec!["-no-pie", "-nostartfiles", "-Wl,-e,0"], "an executable, not a shared library"),
        (vec!["-c"], "an object file, not a shared library"),
    ] {
        dir.plugin("hostile", GOOD_NOTE, "");
        let (library, source) = (dir.path().join("libhostile.so"), dir.path().join("hostile.c"));
        let built = Command::new("cc").args(flags).arg("-o").args([&library, &source]).status();
        assert!(built.unwrap().success());
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn symbols_that_plugins_would_share_are_warned_of() {
    let dir = Directory::new();
    let more = "__asm__(\".globl shared\\n.type shared, @gnu_unique_object\\n.data\\nshared: .long 1\\n\
                .size shared, 4\\n.text\");";
    dir.plugin_with("hostile", GOOD_NOTE, "", more, &[]);
    let (_, text) = doctor(&dir, &[dir.path().join("hostile.toml")]);
    assert!(text.contains("warning: 1 of its symbols are unique in the process"), "{text}");
    dir.plugin("hostile", GOOD_NOTE, "");
    let (_, text) = doctor(&dir, &[dir.path().join("hostile.toml")]);
    assert!(!text.contains("warning: "), "{text}");
}

#[test]
fn a_note_of_absurd_size_is_refused() {
    for (note, says) in [
        ((0..3000).fold(GOOD_NOTE.to_owned(), |n, i| format!("{n}kind k{i}\n")), "3001 kinds"),
        (format!("{GOOD_NOTE}kind {}\n", "x".repeat(4000)), "a name of 4000 bytes"),
    ] {
        let dir = Directory::new();
        dir.plugin("hostile", &note, "_exit(1);");
        let (state, why) = dir.listed("hostile");
        assert_eq!(state, "refused");
        assert!(why.contains(says) && why.len() < 600, "{why}");
    }
}

#[test]
fn a_lock_without_a_digest_trusts_nothing() {
    let dir = Directory::new().with_installed();
    assert!(dir.run(&["plugin", "trust"]).status.success());
    let lock = dir.path().join("plugins.lock");
    let text = std::fs::read_to_string(&lock).unwrap();
    for digest in ["", "0", "zz", " "] {
        let lines = text.lines().map(|line| match line.starts_with("library_sha256") {
            true => format!("library_sha256 = {digest:?}\n"),
            false => format!("{line}\n"),
        });
        std::fs::write(&lock, lines.collect::<String>()).unwrap();
        let (state, why) = dir.listed("resource-kv");
        assert_eq!(state, "refused", "{digest:?}");
        assert!(why.contains("plugins.lock has no digest for its library"), "{why}");
    }
    let without = text.lines().filter(|line| !line.starts_with("library_sha256"));
    std::fs::write(&lock, without.collect::<Vec<_>>().join("\n")).unwrap();
    let output = dir.run(&["plugin", "list"]);
    assert!(!output.status.success(), "a lock that cannot be understood is an error");
}

#[test]
fn a_contract_that_does_not_fit_is_one_line_and_verbose_has_the_rest() {
    // A plugin of this repository whose idea of an interface is changed: the name of a method.
    let dir = Directory::new().with_installed();
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "toml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let unpinned = text.lines().filter(|l| !l.starts_with("sha256"));
            std::fs::write(&path, unpinned.collect::<Vec<_>>().join("\n")).unwrap();
        }
    }
    patch(&dir.path().join("libresource_kv.so"), b"rollback_admit", b"rollback_adnit");
    let (state, why) = dir.listed("resource-kv");
    assert_eq!(state, "refused");
    assert!(why.contains("`rollback_admit`: expected that name, found `rollback_adnit`"), "{why}");
    // A field of a type.
    patch(&dir.path().join("libresource_sampler.so"), b"max_seq_len", b"max_seq_lem");
    let (state, why) = dir.listed("resource-sampler");
    assert_eq!(state, "refused");
    assert!(why.contains(" > ") || why.contains("KvFacts"), "{why}");
    assert!(why.contains("expected max_seq_len, found max_seq_lem"), "{why}");
    let brief = dir.run(&["plugin", "list"]).stdout;
    let verbose = dir.run(&["plugin", "list", "--verbose"]).stdout;
    let lines = |output: &[u8]| String::from_utf8_lossy(output).lines().count();
    assert!(lines(&verbose) > lines(&brief) + 50, "{}", String::from_utf8_lossy(&verbose));
    assert_eq!(dir.listed("resource-positions").0, "loaded", "the others work");
}
