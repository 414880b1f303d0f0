//! The engine's threads: all work is on those of the pool, and neither how many there are nor where they
//! are kept changes an answer.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Mutex;

use engine_host::request::GenerateRequest;
use support::{Done, config, greedy, load, reference, run};

/// One test at a time: they count threads and set what holds for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn requests(count: usize, steps: u32) -> Vec<GenerateRequest> {
    let short = reference().into_iter().filter(|item| item.prompt_ids.len() < 60);
    short.map(|item| greedy(item.prompt_ids, steps)).take(count).collect()
}

/// The threads of this process by name: how many, and on which processors each may run.
#[cfg(target_os = "linux")]
fn threads() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::<_, Vec<_>>::new();
    for thread in fs::read_dir("/proc/self/task").unwrap() {
        // One may have ended since.
        let path = thread.unwrap().path();
        let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().trim().to_owned()
        };
        found.entry(field("Name:")).or_default().push(field("Cpus_allowed_list:"));
    }
    found
}

#[cfg(target_os = "linux")]
#[test]
fn the_pool_and_the_planner_are_all_threads_there_are() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let cpus = device::Cpus::allowed().unwrap();
    let processors = cpus.count();
    let before = threads();
    let shapes =
        [(1, true), (processors, true), (cpus.cores(), true), (2, false), (processors + 1, true)];
    for (count, pin) in shapes {
        let config = config(&format!("threads = {count}\npin_threads = {pin}"), "pages = 512");
        let mut engine = load(&config).engine;
        let done = run(&mut engine, requests(3, 4));
        assert!(done.iter().all(|d| d.failure.is_none() && d.tokens.len() == 4));
        let mut names = threads();
        for (name, of) in &before {
            let left = names.remove(name).unwrap_or_default().len() - of.len();
            assert_eq!(left, 0, "{left} more threads are called {name}");
        }
        let mut wanted: Vec<_> = (1..count).map(|i| format!("kernel-{i}")).collect();
        wanted.extend(["plan ahead".into(), "watchdog".into()]);
        wanted.sort();
        let found: Vec<_> = names.keys().cloned().collect();
        assert_eq!(found, wanted, "threads = {count}");
        assert!(names.values().all(|of| of.len() == 1));
        let is_kept = |of: &[String]| of[0].parse::<usize>().is_ok();
        assert_eq!(
            is_kept(&names["plan ahead"]),
            processors == 1,
            "it was started by a kept thread"
        );
        for (_, of) in names.iter().filter(|(name, _)| name.starts_with("kernel-")) {
            let is_all = count == processors || count == cpus.cores();
            assert_eq!(is_kept(of), processors == 1 || pin && is_all);
        }
    }
}

#[test]
fn answers_are_the_same_on_any_number_of_threads_at_every_level_of_instructions() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for features in device::CpuFeatures::supported().map(|features| features.name()) {
        // Without vector instructions a token takes long.
        let (count, steps) = if features == "portable" { (2, 2) } else { (5, 6) };
        for activations in ["float", "int8"] {
            let answers = |threads: usize, batch: usize, backwards: bool| -> Vec<Done> {
                let lines = format!(
                    "threads = {threads}\nmax_batch = {batch}\ncpu_features = {features:?}\n\
                     activations = {activations:?}\nmax_model_len = 160"
                );
                let config = config(&lines, "pages = 512\nprefix_cache = false");
                let mut requests = requests(count, steps);
                if backwards {
                    requests.reverse();
                }
                let mut done = run(&mut load(&config).engine, requests);
                if backwards {
                    done.reverse();
                }
                done
            };
            let alone = answers(1, 1, false);
            for (threads, batch, backwards) in [(2, 64, false), (3, 64, true), (7, 2, true)] {
                let got = answers(threads, batch, backwards);
                assert_eq!(got, alone, "{features}, {activations}, {threads} threads");
            }
        }
    }
}
