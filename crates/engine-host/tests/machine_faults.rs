//! What the machine does to processes of the program: full disks, limits, files that change under them, and
//! peers that are killed or stopped while pages go over. One line for each request that it costs, and the
//! tokens of the others.

#[path = "support/files.rs"]
mod files;
mod support;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use files::{Files, ended, lines, signal};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// So small a pool that prompts soon go to the file, which is `pages` in the directory `at`.
fn with_file(at: &Path) -> Files {
    let file = at.join("pages");
    let files = Files::new("", &format!("disk_file = {file:?}\ndisk_size = \"1GiB\""));
    files.configure("pages = 100", "pages = 8");
    files
}

/// Prompts with nothing in common, of four pages each: 3 MB of the file.
fn write_prompts(files: &Files, count: usize) -> std::path::PathBuf {
    let line = |i: usize| {
        let prompt = (0..16).map(|n| (i * 991 + n * 37).to_string()).collect::<Vec<_>>().join(" ");
        json!({ "prompt": prompt, "max_tokens": 2, "temperature": 0 }).to_string()
    };
    let path = files.path("requests.jsonl");
    std::fs::write(&path, (0..count).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn ids(lines: &[Value]) -> Vec<&Value> {
    assert!(lines.iter().all(|line| line["error"].is_null()), "{lines:?}");
    lines.iter().map(|line| &line["ids"]).collect()
}

fn cached(lines: &[Value]) -> u64 {
    lines.iter().map(|line| line["usage"]["cached_tokens"].as_u64().unwrap()).sum()
}

/// A shell script with a file system of its own at `at`, which has the last two arguments run after it.
fn on_a_small_disk(at: &Path, size: u64, script: &str, program: &Command) -> Option<Command> {
    let at = at.display();
    let script = format!("mount -t tmpfs -o size={size} none {at} || exit 77\n{script}");
    // Root may; others may in a space of users of their own, where the system lets them.
    [&["-m"][..], &["-Urm"]].iter().find_map(|flags| {
        let mut command = Command::new("unshare");
        command.args(*flags).args(["sh", "-c"]);
        let mut probe = Command::new("unshare");
        probe.args(*flags).args(["sh", "-c", &format!("mount -t tmpfs -o size=4096 none {at}")]);
        let may = probe.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        command.arg(&script).arg("sh").arg(program.get_program()).args(program.get_args());
        may.then_some(command)
    })
}

#[test]
fn a_full_disk_costs_cached_pages_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let files = with_file(dir.path());
    let prompts = write_prompts(&files, 6);
    let (_, want) = files.generate(&prompts);
    let kept = std::fs::metadata(dir.path().join("pages")).unwrap().len();
    assert!(kept > 10 * MIB, "without a limit the file has {kept} bytes");
    std::fs::remove_file(dir.path().join("pages")).unwrap();
    let program = files.command("generate", &prompts);
    // Twice, in one file system that goes with the shell.
    let script = format!(
        "\"$@\" && echo --- && \"$@\"; code=$?; df -B1 {} >&2; exit $code",
        dir.path().display()
    );
    let Some(mut command) = on_a_small_disk(dir.path(), 4 * MIB, &script, &program) else {
        println!(
            "skipped: this machine lets nobody mount a file system; the next test has a limit instead"
        );
        return;
    };
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let (first, again) = printed.split_once("---\n").unwrap();
    let (first, again) = (lines(first.as_bytes()), lines(again.as_bytes()));
    assert_eq!((ids(&first), ids(&again)), (ids(&want), ids(&want)));
    let line = told.lines().find(|line| line.contains("a cached page is dropped"));
    assert!(line.is_some_and(|line| line.contains("No space left on device")), "{told}");
    assert!(told.contains("100%"), "it was full: {told}");
    // What there was room for is served to the next process.
    assert!(cached(&again) > 0, "{again:?}");
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_no_signal() {
    let dir = tempfile::tempdir().unwrap();
    let files = with_file(dir.path());
    let prompts = write_prompts(&files, 6);
    let (_, want) = files.generate(&prompts);
    std::fs::remove_file(dir.path().join("pages")).unwrap();
    let program = files.command("generate", &prompts);
    let mut command = Command::new("sh");
    // In units of 512 bytes, and above the size of any library.
    let limit = 8 * MIB;
    command.arg("-c").arg(format!("ulimit -f {}; exec \"$@\"", limit / 512)).arg("sh");
    command.arg(program.get_program()).args(program.get_args());
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {told}", output.status);
    assert_eq!(ids(&lines(&output.stdout)), ids(&want));
    assert!(told.contains("File too large"), "{told}");
    let len = std::fs::metadata(dir.path().join("pages")).unwrap().len();
    assert!(len <= limit && len > limit - 2 * MIB, "{len}");
    let (_, again) = files.generate(&prompts);
    assert_eq!(ids(&again), ids(&want));
    assert!(cached(&again) > 0);
}

#[test]
fn a_file_that_is_cut_or_replaced_while_it_is_used_costs_what_it_held() {
    let dir = tempfile::tempdir().unwrap();
    let files = with_file(dir.path());
    let prompts = write_prompts(&files, 10);
    let (_, want) = files.generate(&prompts);
    let path = dir.path().join("pages");
    let len = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
    for cut in [true, false] {
        let _ = std::fs::remove_file(&path);
        let mut command = files.command("generate", &prompts);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while len(&path) < 6 * MIB && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing goes to the file");
            std::thread::sleep(Duration::from_millis(1));
        }
        signal(&child, "-STOP");
        match cut {
            true => {
                std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap()
            }
            false => {
                let other = dir.path().join("other");
                std::fs::write(&other, "somebody's letter").unwrap();
                std::fs::rename(&other, &path).unwrap();
            }
        }
        signal(&child, "-CONT");
        let mut printed = Vec::new();
        child.stdout.take().unwrap().read_to_end(&mut printed).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(ids(&lines(&printed)), ids(&want), "cut: {cut}");
        let (output, again) = files.generate(&prompts);
        match cut {
            true => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                assert_eq!(ids(&again), ids(&want));
            }
            false => {
                let told = String::from_utf8_lossy(&output.stderr);
                assert!(
                    told.contains("is no file of cached pages, and is left as it is"),
                    "{told}"
                );
                assert_eq!(std::fs::read(&path).unwrap(), b"somebody's letter");
            }
        }
    }
}

/// A prompt whose pages take a while to read, and one that is handed over beside it.
fn handed_over(lease: &str) -> (Files, Vec<Value>, Child) {
    let shared = "transfer = \"shared-memory\"\ntransfer_directory = SHARED";
    let files = Files::new(shared, lease);
    files.configure("max_model_len = 160", "max_model_len = 900");
    files.configure("pages = 100", "pages = 200\ntransfer_pages = 200");
    let long: Vec<u32> = (0..800).map(|n| 100 + n * n % 900).collect();
    let all = [
        json!({ "id": "long", "prompt_ids": long, "max_tokens": 3, "temperature": 0 }),
        json!({ "id": "other", "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0 }),
    ];
    let prompts = files.path("requests.jsonl");
    std::fs::write(&prompts, all.each_ref().map(Value::to_string).join("\n")).unwrap();
    let first = files.prefill(&prompts, &files.path("begun.jsonl"), "1");
    // Only the long one goes over; the other begins where the long one goes on.
    let begun = std::fs::read_to_string(files.path("begun.jsonl")).unwrap();
    let long = begun.lines().next().unwrap();
    std::fs::write(files.path("on.jsonl"), format!("{long}\n{}", all[1])).unwrap();
    (files, all.to_vec(), first)
}

/// Whether all threads of a process are stopped, or it has ended.
fn is_stopped(child: &Child) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{}/task", child.id()));
    threads.into_iter().flatten().flatten().all(|thread| {
        let state = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // Behind the name, which is in brackets.
        state.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['T', 'Z', 'X']))
    })
}

/// Begins to go on, and stops the process while it reads the region.
fn stopped_while_reading(files: &Files) -> Child {
    let region = files.region();
    for _ in 0..3 {
        let mut command = files.command("generate", &files.path("on.jsonl"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let descriptors = format!("/proc/{}/fd", child.id());
        let reads = || {
            let all = std::fs::read_dir(&descriptors).into_iter().flatten().flatten();
            all.filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|to| to == region)
        };
        let begun = Instant::now();
        while !reads() && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(120), "it never reads");
            std::thread::sleep(Duration::from_micros(200));
        }
        signal(&child, "-STOP");
        // On a busy machine it takes a moment for all of its threads.
        while !is_stopped(&child) {
            std::thread::sleep(Duration::from_micros(200));
        }
        if reads() {
            return child;
        }
        // It was faster.
        signal(&child, "-KILL");
        child.wait().unwrap();
    }
    panic!("it could not be stopped while it reads");
}

fn outcome(mut child: Child) -> (Vec<Value>, String) {
    let (mut printed, mut told) = (Vec::new(), String::new());
    child.stdout.take().unwrap().read_to_end(&mut printed).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    child.wait().unwrap();
    (lines(&printed), told)
}

fn failure(line: &Value) -> &str {
    let message = line["error"]["message"].as_str().unwrap_or_else(|| panic!("{line}"));
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn a_peer_that_is_killed_or_stopped_while_it_is_read_is_read_all_the_same() {
    let (files, all, mut first) = handed_over("");
    let reader = stopped_while_reading(&files);
    signal(&first, "-STOP");
    signal(&reader, "-CONT");
    let (got, told) = outcome(reader);
    assert_eq!(ids(&got).len(), 2, "{told}");
    // Nobody has taken note of the reader's notice yet, so the state can be read again.
    let reader = stopped_while_reading(&files);
    first.kill().unwrap();
    first.wait().unwrap();
    signal(&reader, "-CONT");
    let (again, _) = outcome(reader);
    assert_eq!(ids(&again), ids(&got));
    let prompts = files.path("requests.jsonl");
    std::fs::write(&prompts, all.iter().map(Value::to_string).collect::<Vec<_>>().join("\n"))
        .unwrap();
    let (_, whole) = files.generate(&prompts);
    assert_eq!(ids(&got), ids(&whole));
}

#[test]
fn a_reader_that_is_killed_or_stopped_for_longer_than_the_lease_costs_its_source_nothing() {
    let (files, _, mut first) = handed_over("transfer_lease = 25");
    let mut killed = stopped_while_reading(&files);
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(first.try_wait().unwrap().is_none(), "nobody has told it that the pages were read");
    let stopped = stopped_while_reading(&files);
    // The source gives its pages to whoever comes next, and here nobody does.
    assert!(ended(&mut first, Duration::from_secs(60)), "it ends when the lease does");
    assert!(first.wait().unwrap().success());
    signal(&stopped, "-CONT");
    let (got, told) = outcome(stopped);
    assert!(failure(&got[0]).contains("the lease on page"), "{got:?} {told}");
    assert_eq!(ids(&got[1..]).len(), 1, "the other one goes on");
}

#[test]
fn what_does_not_arrive_in_time_or_is_a_later_workers_fails_alone() {
    let (files, _, mut first) = handed_over("transfer_timeout = 0.001");
    let (_, got) = files.generate(&files.path("on.jsonl"));
    let why = failure(&got[0]);
    assert!(why.contains("`transfer_timeout`") || why.contains("by its deadline"), "{why}");
    assert_eq!(ids(&got[1..]).len(), 1);
    // The source has started again, under the name that it had.
    let region = files.region();
    first.kill().unwrap();
    first.wait().unwrap();
    std::fs::remove_file(files.path("begun.jsonl")).unwrap();
    let mut later = files.prefill(&files.path("requests.jsonl"), &files.path("begun.jsonl"), "1");
    std::fs::rename(files.region(), &region).unwrap();
    let (_, got) = files.generate(&files.path("on.jsonl"));
    let why = failure(&got[0]);
    assert!(why.contains("belongs to a later worker than the one that published"), "{why}");
    assert_eq!(ids(&got[1..]).len(), 1);
    let _ = later.kill();
    let _ = later.wait();
}
