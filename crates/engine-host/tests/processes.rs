//! What goes from one process to another, or to the next: requests that begin in one engine and go on in
//! another, and cached pages in a file. The same tokens as in one, and one clear line for whatever comes between.

#[path = "support/files.rs"]
mod files;
mod support;

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use engine_host::engine::{Engine, Handover, Relay};
use engine_host::request::{Event, GenerateRequest};
use files::{Files, ended, signal};
use resource_api::{KvCache, KvCacheHandle, Resource};
use serde_json::{Value, json};
use support::{Done, config, greedy, load, reference, run, take_event};

const STEPS: u32 = 12;

fn requests() -> Vec<GenerateRequest> {
    let short = reference().into_iter().filter(|i| i.prompt_ids.len() < 60);
    let mut requests: Vec<_> = short.map(|i| greedy(i.prompt_ids, STEPS)).take(4).collect();
    // What the sampler knows must come along: seed, number of draws, tokens seen.
    for (i, request) in requests.iter_mut().enumerate().skip(2) {
        for (name, value) in [("temperature", json!(0.9)), ("repetition_penalty", json!(1.3))] {
            request.sampling.insert(name.into(), value);
        }
        request.sampling.insert("seed".into(), json!(i));
    }
    requests
}

fn engine(transfer: &str, kv: &str) -> Engine {
    let lines = format!("kv_dtype = \"f32\"\nmax_model_len = 160\n{transfer}");
    load(&config(&lines, &format!("pages = 200\n{kv}"))).engine
}

/// Runs the requests up to so many tokens and hands them over.
fn begin(engine: &mut Engine, after: u32) -> Vec<(Done, Option<Handover>)> {
    let submit = |request: GenerateRequest| {
        engine.submit_relayed(request, Relay { from: None, after: Some(after) }).unwrap()
    };
    let rids: Vec<_> = requests().into_iter().map(submit).collect();
    let mut begun: Vec<_> = rids.iter().map(|_| Done::default()).collect();
    let mut handed: Vec<Option<Handover>> = rids.iter().map(|_| None).collect();
    while !engine.is_idle() {
        for event in engine.step() {
            take_event(&rids, &mut begun, event);
            if let Event::HandedOver(rid, handover) = event {
                let at = rids.iter().position(|r| r == rid).unwrap();
                // Through text, as between processes.
                let text = handover.to_json().to_string();
                let value: Value = serde_json::from_str(&text).unwrap();
                handed[at] = Some(Handover::from_json(&value).unwrap());
            }
        }
    }
    begun.into_iter().zip(handed).collect()
}

/// Runs requests, some of which come from another engine.
fn go_on(engine: &mut Engine, all: Vec<(GenerateRequest, Option<Handover>)>) -> Vec<Done> {
    let submit = |(request, from): (GenerateRequest, Option<Handover>)| {
        engine.submit_relayed(request, Relay { from, after: None }).unwrap()
    };
    let rids: Vec<_> = all.into_iter().map(submit).collect();
    let mut done: Vec<Done> = rids.iter().map(|_| Done::default()).collect();
    while !engine.is_idle() {
        for event in engine.step() {
            take_event(&rids, &mut done, event);
        }
    }
    done
}

fn leases(engine: &Engine) -> u64 {
    let (_, kv) = engine.resources().find("main_kv").unwrap();
    let state: Value = serde_json::from_str(&kv.resource().inspect()).unwrap();
    let cache: KvCacheHandle = kv.capabilities()[0].open().unwrap();
    cache.assert_pages_conserved().unwrap();
    state.pointer("/published/leases").and_then(Value::as_u64).unwrap_or(0)
}

#[test]
fn two_engines_give_the_tokens_of_one() {
    let want = run(&mut engine("", ""), requests());
    let dir = tempfile::tempdir().unwrap();
    let shared = format!("transfer = \"shared-memory\"\ntransfer_directory = {:?}", dir.path());
    for (transfer, after) in
        [(shared.as_str(), 1), (shared.as_str(), 7), ("transfer = \"in-process\"", 3)]
    {
        let mut first = engine(transfer, "");
        let mut second = engine(transfer, "");
        let begun = begin(&mut first, after);
        assert_eq!(leases(&first), 4, "nobody has read yet");
        let handed = begun.iter().map(|(_, handover)| handover.clone());
        let went_on = go_on(&mut second, requests().into_iter().zip(handed).collect());
        for ((want, (begun, _)), went_on) in want.iter().zip(begun).zip(went_on) {
            assert_eq!(went_on.failure, None);
            let tokens = [begun.tokens, went_on.tokens].concat();
            assert_eq!(tokens, want.tokens, "after {after} tokens");
            assert_eq!(went_on.end.map(|(reason, _)| reason), want.end.map(|(reason, _)| reason));
        }
        assert_eq!((leases(&first), leases(&second)), (0, 0));
        let computed = second.stats().prefill_tokens;
        assert_eq!(computed, 0, "nothing of the prompts is computed again");
    }
}

#[test]
fn a_request_whose_state_does_not_arrive_fails_alone() {
    let transfer = "transfer = \"in-process\"";
    let mut first = engine(transfer, "transfer_lease = 0.2");
    let mut begun = begin(&mut first, 2);
    std::thread::sleep(Duration::from_millis(250));
    assert_eq!(leases(&first), 0, "all are over");
    let late = begun.remove(0).1.unwrap();
    let mut again = begin(&mut first, 2);
    let good = again.remove(1).1.unwrap();
    let mut second = engine(transfer, "");
    let mut all = requests();
    let fresh = all.remove(3);
    let (late_one, good_one) = (all.remove(0), all.remove(0));
    let all = vec![(late_one, Some(late)), (good_one, Some(good)), (fresh, None)];
    let done = go_on(&mut second, all);
    let why = done[0].failure.as_deref().unwrap();
    assert!(why.contains("the lease on page") && !why.contains('\n'), "{why}");
    assert_eq!((&done[1].failure, &done[2].failure), (&None, &None));
    assert_eq!(done[1].tokens.len(), STEPS as usize - 2);
    let free = |engine: &Engine| {
        let (_, kv) = engine.resources().find("main_kv").unwrap();
        kv.capabilities()[0].open::<KvCacheHandle>().unwrap().free_pages()
    };
    assert_eq!(free(&second), 199);
    // Another model's or settings' state, and state of resources that are not here.
    let handover = begin(&mut first, 2).remove(0).1.unwrap();
    let mut other = engine(transfer, "page_size = 8");
    let relay = || Relay { from: Some(handover.clone()), after: None };
    let request = || requests().remove(0);
    let error = other.submit_relayed(request(), relay()).unwrap_err().to_string();
    assert!(error.contains("another model or other resources"), "{error}");
    let mut short = request();
    short.prompt.pop();
    let error = second.submit_relayed(short, relay()).unwrap_err().to_string();
    assert!(error.contains("all but the last generated one must be"), "{error}");
    let mut closed = engine("", "");
    let done = go_on(&mut closed, vec![(request(), relay().from)]);
    let why = done[0].failure.as_deref().unwrap();
    assert!(why.contains("`transfer` is not set in [engine]"), "{why}");
}

#[test]
fn two_processes_give_the_tokens_of_one() {
    let files = Files::new("transfer = \"shared-memory\"\ntransfer_directory = SHARED", "");
    let prompts = files.path("requests.jsonl");
    let lines = [
        json!({ "id": "a", "prompt": "The capital of France is", "max_tokens": 10, "temperature": 0 }),
        json!({ "id": "b", "prompt": "Once upon a time", "max_tokens": 10, "seed": 4,
                "repetition_penalty": 1.2 }),
        json!({ "id": "c", "prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0 }),
        json!({ "id": "d", "prompt": "" }),
    ];
    std::fs::write(&prompts, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let (_, want) = files.generate(&prompts);
    for tokens in ["1", "4"] {
        let begun = files.path(&format!("begun-{tokens}.jsonl"));
        let mut first = files.prefill(&prompts, &begun, tokens);
        let (output, got) = files.generate(&begun);
        assert!(ended(&mut first, Duration::from_secs(20)), "it ends when everything was read");
        assert_eq!(output.status.code(), Some(1), "the empty prompt failed");
        for (want, got) in want.iter().zip(&got).take(3) {
            for field in ["id", "prompt_ids", "ids", "text", "finish_reason"] {
                assert_eq!(got[field], want[field], "{field} with {tokens} tokens handed over");
            }
        }
        assert!(got[3]["error"]["message"].is_string(), "{}", got[3]);
    }
}

/// What comes of a request whose first process was treated so before the second one began.
fn after(kv: &str, treat: impl FnOnce(&Files, &mut Child)) -> Value {
    let files = Files::new("transfer = \"shared-memory\"\ntransfer_directory = SHARED", kv);
    let prompts = files.path("requests.jsonl");
    let line = json!({ "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0 });
    std::fs::write(&prompts, line.to_string()).unwrap();
    let begun = files.path("begun.jsonl");
    let mut first = files.prefill(&prompts, &begun, "1");
    treat(&files, &mut first);
    let (_, mut got) = files.generate(&begun);
    let _ = first.kill();
    let _ = first.wait();
    got.remove(0)
}

#[test]
fn a_first_process_that_was_killed_or_stopped_has_published_what_is_read() {
    let whole = after("", |_, _| ());
    assert_eq!(whole["ids"].as_array().unwrap().len(), 6, "{whole}");
    let killed = after("", |_, first| {
        first.kill().unwrap();
        first.wait().unwrap();
    });
    let stopped = after("", |_, first| signal(first, "-STOP"));
    assert_eq!((&killed["ids"], &stopped["ids"]), (&whole["ids"], &whole["ids"]));
}

#[test]
fn a_region_that_was_cut_or_damaged_fails_the_request_with_one_line() {
    let message = |value: Value| value["error"]["message"].as_str().unwrap().to_string();
    let cut = after("", |files, _| {
        let file = std::fs::OpenOptions::new().write(true).open(files.region()).unwrap();
        file.set_len(37_000).unwrap();
    });
    assert!(message(cut).contains("it was cut short"));
    let flipped = after("", |files, _| {
        let mut bytes = std::fs::read(files.region()).unwrap();
        bytes[37_000..].iter_mut().for_each(|byte| *byte ^= 1);
        std::fs::write(files.region(), bytes).unwrap();
    });
    assert!(message(flipped).contains("is damaged"));
    let gone = after("", |files, _| std::fs::remove_file(files.region()).unwrap());
    assert!(message(gone).contains("the worker that published it has ended"));
    let over = after("transfer_lease = 0.2", |_, first| {
        assert!(ended(first, Duration::from_secs(20)), "it ends when the lease does");
    });
    assert!(message(over).contains("the worker that published it has ended"));
}

#[test]
fn prefill_without_a_way_to_hand_over_is_refused() {
    let files = Files::new("", "");
    let prompts = files.path("requests.jsonl");
    std::fs::write(&prompts, "{}").unwrap();
    let mut command = files.command("prefill", &prompts);
    let output = command.arg("--output").arg(files.path("out")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
    assert!(text.contains("`transfer` is not set in [engine]"), "{text}");
}

#[test]
fn a_process_that_was_killed_leaves_a_file_that_the_next_one_reads() {
    let files = Files::new("", "disk_file = \"kv.pages\"\ndisk_size = \"1GiB\"");
    let text = std::fs::read_to_string(&files.config).unwrap();
    let text = text.replace("kv.pages", files.path("kv.pages").to_str().unwrap());
    // So small that prompts soon go to the file.
    std::fs::write(&files.config, text.replace("pages = 100", "pages = 8")).unwrap();
    let prompts = files.path("requests.jsonl");
    let line = |i: usize| {
        // Nothing in common.
        let prompt = (0..16).map(|n| (i * 991 + n * 37).to_string()).collect::<Vec<_>>().join(" ");
        json!({ "prompt": prompt, "max_tokens": 4, "temperature": 0 }).to_string()
    };
    std::fs::write(&prompts, (0..12).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let (_, want) = files.generate(&prompts);
    std::fs::remove_file(files.path("kv.pages")).unwrap();
    let mut child = files
        .command("generate", &prompts)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    // In the middle of writing pages, when those of the first prompt are there.
    let len = || std::fs::metadata(files.path("kv.pages")).map_or(0, |m| m.len());
    while len() < 8 << 20 && child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(120), "nothing goes to the file");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let (output, got) = files.generate(&prompts);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let ids = |lines: &[Value]| lines.iter().map(|line| line["ids"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&got), ids(&want));
    let cached = |line: &Value| line["usage"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&got[0]) > 0, "the first prompt is found: {}", got[0]);
}
