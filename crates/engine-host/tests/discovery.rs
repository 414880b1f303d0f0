//! Scanning plugin directories: order, directory rules, states, and what the messages name.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use engine_host::discovery::{Discovery, Options, State, discover};
use engine_host::manifest::ApiVersion;
use engine_host::probe::Probe;
use tempfile::TempDir;

const OPTIONS: Options = Options {
    strict: false,
    api: ApiVersion { major: 1, minor: 0 },
    probe: Probe::Never,
    use_lock: true,
};

fn directory() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    set_mode(dir.path(), 0o755);
    dir
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    set_mode(path, 0o644);
}

/// A manifest `file` of plugin `name` and kind `kind`, with a file standing in for its library.
fn plugin(dir: &Path, file: &str, name: &str, kind: &str, more: &str) -> PathBuf {
    let library = format!("lib{file}.so");
    write(&dir.join(&library), "");
    let path = dir.join(format!("{file}.toml"));
    let text = format!(
        "[plugin]\nname = '{name}'\nversion = '0.1.0'\napi = '1.0'\nlibrary = '{library}'\nkinds = \
         ['{kind}']\n{more}"
    );
    write(&path, &text);
    path
}

fn scan(dirs: &[&Path]) -> Discovery {
    discover(&dirs.iter().map(|d| d.to_path_buf()).collect::<Vec<_>>(), &OPTIONS).unwrap()
}

fn scan_error(dirs: &[&Path], options: &Options) -> String {
    let dirs: Vec<_> = dirs.iter().map(|d| d.to_path_buf()).collect();
    discover(&dirs, options).unwrap_err().to_string()
}

/// The reason why the only plugin of `found` is refused, without the path in front.
fn only_refusal(found: &Discovery) -> &str {
    let [only] = &found.plugins[..] else { panic!("{} plugins", found.plugins.len()) };
    match &only.state {
        State::Refused(reason) => reason.split_once(": ").map_or("", |(_, message)| message),
        state => panic!("{state:?}"),
    }
}

#[test]
fn manifests_come_in_a_fixed_order() {
    let (first, second) = (directory(), directory());
    plugin(first.path(), "b", "b", "kind-b", "");
    plugin(first.path(), "a", "a", "kind-a", "");
    plugin(second.path(), "A", "c", "kind-c", "");
    write(&first.path().join("README.md"), "");
    write(&first.path().join(".hidden.toml"), "rubbish");
    fs::create_dir(first.path().join("folder")).unwrap();

    let found = scan(&[first.path(), second.path(), first.path()]);
    let names: Vec<_> = found.plugins.iter().map(|plugin| plugin.name()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(found.plugins.iter().all(|plugin| plugin.state == State::Usable));
    assert_eq!(found.kinds().keys().copied().collect::<Vec<_>>(), ["kind-a", "kind-b", "kind-c"]);
    let library = found.plugins[0].library_path().unwrap();
    assert_eq!(library, first.path().canonicalize().unwrap().join("liba.so"));
    assert!(scan(&[]).plugins.is_empty());
}

#[test]
fn directories_that_cannot_be_used_are_errors_together() {
    let dir = directory();
    let (missing, file) = (dir.path().join("missing"), dir.path().join("file"));
    write(&file, "");
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    set_mode(&open, 0o777);
    assert_eq!(
        scan_error(&[&missing, &file, &open], &OPTIONS),
        format!(
            "{}: plugin directory does not exist\n{}: plugin directory is not a directory\n{}: \
             plugin directory can be written by every user (mode 0777): chmod o-w",
            missing.display(),
            file.display(),
            open.display()
        )
    );
    // The sticky bit keeps strangers from replacing what is there.
    set_mode(&open, 0o1777);
    assert!(scan(&[&open]).plugins.is_empty());
}

#[test]
fn a_file_open_to_every_user_is_refused() {
    let dir = directory();
    let path = plugin(dir.path(), "kv", "kv", "kv", "");
    set_mode(&path, 0o666);
    let found = scan(&[dir.path()]);
    assert_eq!(only_refusal(&found), "can be written by every user (mode 0666): chmod o-w");

    set_mode(&path, 0o644);
    set_mode(&dir.path().join("libkv.so"), 0o646);
    let found = scan(&[dir.path()]);
    let error = found.plugins[0].check_library().unwrap_err();
    assert_eq!(error.reason, "can be written by every user (mode 0646): chmod o-w");
}

#[test]
fn symbolic_links_must_stay_inside() {
    let (dir, outside) = (directory(), directory());
    let real = dir.path().join("data");
    fs::create_dir(&real).unwrap();
    let inside = plugin(&real, "kv", "kv", "kv", "");
    write(&dir.path().join("libkv.so"), "");
    symlink(&inside, dir.path().join("kv.toml")).unwrap();
    assert_eq!(scan(&[dir.path()]).plugins[0].state, State::Usable);

    fs::remove_file(dir.path().join("kv.toml")).unwrap();
    symlink(plugin(outside.path(), "kv", "kv", "kv", ""), dir.path().join("kv.toml")).unwrap();
    let found = scan(&[dir.path()]);
    let expected = "a symbolic link that leads out of the directory, to ";
    assert!(only_refusal(&found).starts_with(expected), "{}", only_refusal(&found));

    // A library that leads outside is found when it is opened.
    fs::remove_file(dir.path().join("kv.toml")).unwrap();
    plugin(dir.path(), "kv", "kv", "kv", "");
    fs::remove_file(dir.path().join("libkv.so")).unwrap();
    symlink(outside.path().join("libkv.so"), dir.path().join("libkv.so")).unwrap();
    let error = scan(&[dir.path()]).plugins[0].check_library().unwrap_err();
    assert!(error.reason.starts_with(expected), "{error}");
}

#[test]
fn a_link_into_a_directory_that_others_can_write_is_refused() {
    let dir = directory();
    let (deeper, open) = (dir.path().join("data/deeper"), dir.path().join("data"));
    fs::create_dir_all(&deeper).unwrap();
    set_mode(&deeper, 0o755);
    let real = plugin(&deeper, "kv", "kv", "kv", "");
    write(&dir.path().join("libkv.so"), "");
    symlink(&real, dir.path().join("kv.toml")).unwrap();
    set_mode(&open, 0o755);
    assert_eq!(scan(&[dir.path()]).plugins[0].state, State::Usable);
    for writable in [&open, &deeper] {
        set_mode(writable, 0o777);
        let found = scan(&[dir.path()]);
        let place = writable.canonicalize().unwrap();
        let says = format!(
            "lies in {}, which can be written by every user (mode 0777): chmod o-w",
            place.display()
        );
        assert_eq!(only_refusal(&found), says);
        set_mode(writable, 0o755);
    }
}

#[test]
fn many_manifests_take_no_long_time_and_give_no_long_messages() {
    let (claims, circle, chain) = (directory(), directory(), directory());
    for i in 0..1024 {
        let name = format!("p{i:04}");
        plugin(claims.path(), &name, "same", "same", "");
        let more = format!("provides = ['c{i}/1']\nrequires = ['c{}']", (i + 1) % 1024);
        plugin(circle.path(), &name, &name, &name, &more);
        let more = format!("provides = ['c{i}/1']\nrequires = ['c{}']", i + 1);
        plugin(chain.path(), &name, &name, &name, &more);
    }
    let started = std::time::Instant::now();
    for (dir, says) in [
        (&claims, "p0003.toml, 1020 more too: set enabled = false"),
        (&circle, ", which requires c16 of p0016, and so on"),
        (&chain, "requires c1, which no usable plugin provides: p0001 would, but is refused"),
    ] {
        let found = scan(&[dir.path()]);
        let all = found.plugins.iter().map(|plugin| match &plugin.state {
            State::Refused(reason) => reason.clone(),
            state => panic!("{state:?}"),
        });
        let all: Vec<String> = all.collect();
        let first = &all[0];
        assert!(first.contains(says), "{first}");
        assert!(all.iter().all(|reason| reason.len() < 1500), "{first}");
    }
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    plugin(chain.path(), "z", "z", "z", "");
    let reason = scan_error(&[chain.path()], &OPTIONS);
    assert!(reason.ends_with("plugin directory has more than 1024 manifests"), "{reason}");
}

#[test]
fn strict_rules() {
    // Somewhere whose parents pass: the build directory, unless a parent of it does not.
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).canonicalize().unwrap();
    let dir = tempfile::tempdir_in(&base).unwrap();
    set_mode(dir.path(), 0o775);
    let strict = Options { strict: true, ..OPTIONS };
    let reason = scan_error(&[dir.path()], &strict);
    assert!(reason.contains("can be written by its group (mode 0775)"), "{reason}");

    let link = base.join(format!("{}-link", dir.path().file_name().unwrap().display()));
    symlink(dir.path(), &link).unwrap();
    let reason = scan_error(&[&link], &strict);
    fs::remove_file(&link).unwrap();
    assert!(reason.ends_with("is a symbolic link, which strict = true forbids"), "{reason}");

    set_mode(dir.path(), 0o755);
    plugin(dir.path(), "kv", "kv", "kv", "");
    if let Ok(found) = discover(&[dir.path().to_owned()], &strict) {
        assert_eq!(found.plugins[0].state, State::Usable);
        fs::rename(dir.path().join("kv.toml"), dir.path().join("real")).unwrap();
        symlink("real", dir.path().join("kv.toml")).unwrap();
        let found = discover(&[dir.path().to_owned()], &strict).unwrap();
        assert_eq!(only_refusal(&found), "is a symbolic link, which strict = true forbids");
    }
}

#[test]
fn bad_manifests_leave_the_others_usable() {
    let dir = directory();
    plugin(dir.path(), "good", "good", "kv", "");
    plugin(dir.path(), "future", "future", "future", "");
    let future = fs::read_to_string(dir.path().join("future.toml")).unwrap();
    write(&dir.path().join("future.toml"), &future.replace("api = '1.0'", "api = '2.0'"));
    write(&dir.path().join("huge.toml"), &" ".repeat(65 * 1024));
    write(&dir.path().join("typo.toml"), "[plugin]\nnmae = 'x'\n");
    fs::create_dir(dir.path().join("folder.toml")).unwrap();
    plugin(dir.path(), "lost", "lost", "lost", "");
    fs::remove_file(dir.path().join("liblost.so")).unwrap();

    let found = scan(&[dir.path()]);
    let reasons: Vec<String> = found
        .plugins
        .iter()
        .map(|plugin| match &plugin.state {
            State::Refused(reason) => {
                assert!(!reason.contains('\n'), "{reason}");
                reason.replace(&*dir.path().to_string_lossy(), "D")
            }
            state => format!("{}: {state:?}", plugin.name()),
        })
        .collect();
    assert_eq!(
        reasons,
        [
            "D/folder.toml: cannot be read: not a regular file",
            "D/future.toml: built against contract 2.0, this host speaks 1.0: update the host",
            "good: Usable",
            "D/huge.toml: larger than the 64 KiB allowed",
            "D/lost.toml: library \"liblost.so\" does not exist beside the manifest",
            "D/typo.toml:1:1: [plugin] lacks the key \"api\" (and 5 more)",
        ]
    );
}

#[test]
fn a_pipe_named_like_a_manifest_does_not_hang() {
    let dir = directory();
    let status = std::process::Command::new("mkfifo").arg(dir.path().join("x.toml")).status();
    assert!(status.expect("mkfifo is installed").success());
    assert_eq!(only_refusal(&scan(&[dir.path()])), "cannot be read: not a regular file");
}

#[test]
fn disabled_plugins_are_listed_and_never_opened() {
    let dir = directory();
    plugin(dir.path(), "off", "off", "kv", "enabled = false");
    fs::remove_file(dir.path().join("liboff.so")).unwrap();
    write(&dir.path().join("broken.toml"), "[plugin]\nenabled = false\nkinds = 3\n");
    let found = scan(&[dir.path()]);
    assert!(found.plugins.iter().all(|plugin| plugin.state == State::Disabled));
    let error = found.plugins[1].check_library().unwrap_err();
    assert_eq!(error.reason, "the plugin is disabled (enabled = false)");
}

#[test]
fn two_claims_to_one_name_or_kind() {
    let (first, second) = (directory(), directory());
    let a = plugin(first.path(), "a", "same", "kind-a", "");
    let b = plugin(second.path(), "b", "same", "kind-b", "");
    let c = plugin(first.path(), "c", "c", "kind-c", "");
    let d = plugin(second.path(), "d", "d", "kind-c", "");
    plugin(first.path(), "e", "d", "kind-c", "enabled = false");

    let found = scan(&[first.path(), second.path()]);
    for (this, other, claim) in [
        (&a, &b, "name \"same\""),
        (&b, &a, "name \"same\""),
        (&c, &d, "kind \"kind-c\""),
        (&d, &c, "kind \"kind-c\""),
    ] {
        let plugin = found.plugins.iter().find(|plugin| plugin.path == *this).unwrap();
        let (this, other) = (this.display(), other.display());
        assert_eq!(
            plugin.state,
            State::Refused(format!(
                "{this}: {claim} is claimed by {other} too: set enabled = false in all but one"
            ))
        );
    }
}

#[test]
fn who_builds_a_kind() {
    let dir = directory();
    plugin(dir.path(), "kv", "resource-kv", "kv", "");
    plugin(dir.path(), "attn", "resource-attn", "attention", "");
    let off = plugin(dir.path(), "off", "resource-off", "sampler", "enabled = false");
    let lost = plugin(dir.path(), "lost", "resource-lost", "positions", "");
    fs::remove_file(dir.path().join("liblost.so")).unwrap();

    let found = scan(&[dir.path()]);
    assert_eq!(found.provider("kv").unwrap().name(), "resource-kv");
    assert_eq!(
        found.provider("atention").unwrap_err(),
        "kind \"atention\" is offered by no plugin; did you mean \"attention\"? (kinds there are: \
         attention, kv; 1 refused, see `engine-host plugin list`)"
    );
    assert_eq!(
        found.provider("sampler").unwrap_err(),
        format!(
            "kind \"sampler\" is offered by plugin \"resource-off\", which is disabled (enabled = \
             false in {})",
            off.display()
        )
    );
    assert_eq!(
        found.provider("positions").unwrap_err(),
        format!(
            "kind \"positions\" is offered by plugin \"resource-lost\", which is refused: {}: \
             library \"liblost.so\" does not exist beside the manifest",
            lost.display()
        )
    );
}

/// Reasons of the refused, by the plugin's name.
fn refusals(found: &Discovery) -> Vec<(String, String)> {
    let reason = |plugin: &engine_host::discovery::Discovered| match &plugin.state {
        State::Refused(reason) => {
            let message = reason.split_once(": ").map_or("", |(_, message)| message);
            Some((plugin.name(), message.to_owned()))
        }
        _ => None,
    };
    found.plugins.iter().filter_map(reason).collect()
}

#[test]
fn needs_that_nobody_meets_are_told_with_the_reason() {
    let dir = directory();
    plugin(dir.path(), "a", "a", "kind-a", "provides = ['kv.cache/1.1']");
    plugin(dir.path(), "b", "b", "kind-b", "requires = ['kv.cache >= 1.2']");
    plugin(dir.path(), "c", "c", "kind-c", "requires = ['kv.cahce']");
    plugin(dir.path(), "d", "d", "kind-d", "requires = ['x.y?', 'kv.cache >= 1.1']");
    plugin(dir.path(), "e", "e", "kind-e", "provides = ['clock/1']\nenabled = false");
    plugin(dir.path(), "f", "f", "kind-f", "requires = ['clock']\nprovides = ['ticks/1']");
    plugin(dir.path(), "g", "g", "kind-g", "requires = ['ticks']");
    let found = scan(&[dir.path()]);
    let at = |file: &str| dir.path().join(file).display().to_string();
    let expected = [
        (
            "b",
            "requires kv.cache >= 1.2, which no usable plugin provides: a has kv.cache/1.1".into(),
        ),
        (
            "c",
            "requires kv.cahce, which no usable plugin provides; did you mean \"kv.cache\"?".into(),
        ),
        (
            "f",
            format!(
                "requires clock, which no usable plugin provides: e would, but is disabled ({})",
                at("e.toml")
            ),
        ),
        (
            "g",
            format!(
                "requires ticks, which no usable plugin provides: f would, but is refused ({})",
                at("f.toml")
            ),
        ),
    ];
    let expected: Vec<(String, String)> =
        expected.into_iter().map(|(name, reason)| (name.to_owned(), reason)).collect();
    assert_eq!(refusals(&found), expected);
}

#[test]
fn plugins_that_need_each_other_in_a_circle_are_refused_with_the_chain() {
    let dir = directory();
    plugin(dir.path(), "a", "a", "kind-a", "provides = ['x/1']\nrequires = ['z']");
    plugin(dir.path(), "b", "b", "kind-b", "provides = ['y/1']\nrequires = ['x']");
    plugin(dir.path(), "c", "c", "kind-c", "provides = ['z/1']\nrequires = ['y >= 1.0']");
    plugin(dir.path(), "d", "d", "kind-d", "requires = ['z']");
    plugin(dir.path(), "e", "e", "kind-e", "provides = ['own/1']\nrequires = ['own']");
    plugin(dir.path(), "f", "f", "kind-f", "provides = ['u/1']\nrequires = ['v?']");
    plugin(dir.path(), "g", "g", "kind-g", "provides = ['v/1']\nrequires = ['u']");
    let found = scan(&[dir.path()]);
    let refused = refusals(&found);
    let names: Vec<&str> = refused.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d"], "{refused:?}");
    assert_eq!(
        refused[0].1,
        "can never be built: a requires z of c, which requires y >= 1.0 of b, which requires x of a"
    );
    assert!(
        refused[3].1.starts_with("can never be built: d requires z of c, which "),
        "{refused:?}"
    );
}

#[test]
fn ordinary_installations_work() {
    // A clone under umask 002, and files of another user in a container.
    let dir = directory();
    let path = plugin(dir.path(), "kv", "kv", "kv", "");
    set_mode(dir.path(), 0o775);
    set_mode(&path, 0o664);
    set_mode(&dir.path().join("libkv.so"), 0o775);
    assert_eq!(scan(&[dir.path()]).plugins[0].state, State::Usable);
    // A mount whose files are links to links within it, read-only.
    let mount = directory();
    let version = mount.path().join("..2026_01_01");
    fs::create_dir(&version).unwrap();
    plugin(&version, "kv", "kv", "kv", "");
    symlink("..2026_01_01", mount.path().join("..data")).unwrap();
    for file in ["kv.toml", "libkv.so"] {
        symlink(Path::new("..data").join(file), mount.path().join(file)).unwrap();
    }
    set_mode(&version, 0o555);
    set_mode(mount.path(), 0o555);
    let found = scan(&[mount.path()]);
    assert_eq!(found.plugins[0].state, State::Usable);
    let error = found.plugins[0].check_library().unwrap_err();
    assert_eq!(error.reason, "not an ELF file", "it is looked into");
    set_mode(&version, 0o755);
    set_mode(mount.path(), 0o755);
}

#[test]
fn the_first_variant_that_this_cpu_can_run_is_taken() {
    let dir = directory();
    let variants = |features: &[&str]| {
        let list = features.iter().enumerate();
        list.map(|(i, f)| {
            format!("[[plugin.variants]]\nlibrary = 'v{i}.so'\ntarget_features = [{f}]\n")
        })
        .collect::<String>()
    };
    for file in ["v0.so", "v1.so"] {
        write(&dir.path().join(file), "");
    }
    let library = |features: &[&str]| {
        plugin(dir.path(), "kv", "kv", "kv", &variants(features));
        let path = scan(&[dir.path()]).plugins[0].library_path().unwrap();
        path.file_name().unwrap().to_string_lossy().into_owned()
    };
    assert_eq!(library(&["'avx4096'"]), "libkv.so");
    assert_eq!(library(&["'avx4096'", ""]), "v1.so");
    assert_eq!(library(&["", "'avx4096'"]), "v0.so");
}
