//! `engine-host serve` with the real model and the installed plugins.

#[path = "../../server/tests/support/http.rs"]
mod http;
mod support;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use http::{get, post, receive, send, text_of, wait_until};
use serde_json::{Value, json};
use support::{model_path, plugins, reference};

const COMPLETE: &str = "/v1/completions";

/// A server of its own process.
struct Served {
    child: Child,
    address: SocketAddr,
    dir: Option<tempfile::TempDir>,
}

impl Served {
    /// `engine` and `kv` stand in place of the step's size in tokens and of the pool's.
    fn start(engine: &str, kv: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let default = xtask::workspace_root().join("crates/engine-host/src/config/default.toml");
        let text = std::fs::read_to_string(default)
            .unwrap()
            .replace("plugin_dirs = [\"plugins\"]", &format!("plugin_dirs = [{:?}]", plugins()))
            .replace(
                "max_batch_tokens = 512 ",
                if engine.is_empty() { "max_batch_tokens = 512 " } else { engine },
            )
            .replace("[model]", &format!("[model]\npath = {:?}", model_path()))
            .replace("\npages = 4096 ", &format!("\n{kv} "));
        std::fs::write(dir.path().join("engine.toml"), text).unwrap();
        Self::run(dir, &[])
    }

    /// With further flags.
    fn run(dir: tempfile::TempDir, flags: &[&str]) -> Self {
        let config = dir.path().join("engine.toml");
        let mut child = Command::new(env!("CARGO_BIN_EXE_engine-host"))
            .args(["serve", "--port", "0", "--config", config.to_str().unwrap()])
            .args(flags)
            .current_dir(dir.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut next = || lines.next().and_then(Result::ok).expect("the server ended early");
        let first = next();
        let address = first.strip_prefix("listening on http://").expect(&first).parse().unwrap();
        while !next().starts_with("ready") {}
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, dir: Some(dir) }
    }

    /// Another process in the place of this one.
    fn again(mut self, flags: &[&str]) -> Self {
        let _ = self.child.kill();
        let _ = self.child.wait();
        Self::run(self.dir.take().unwrap(), flags)
    }

    fn new() -> Self {
        Self::start("", "pages = 4096")
    }

    fn post(&self, body: Value) -> Value {
        let answer = post(self.address, COMPLETE, &body);
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        answer.json()
    }

    /// Requests that run or wait, and pages in use.
    fn load(&self) -> (u64, u64) {
        let loads = get(self.address, "/v1/loads").json();
        let of = |name: &str| loads["loads"][0][name].as_u64().unwrap();
        (of("num_total_reqs"), of("num_used_tokens") / 16)
    }

    fn signal(&self, name: &str) {
        let done = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ids_of(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn answers_are_those_of_the_reference_alone_and_among_others() {
    let server = Served::new();
    let tokenizer = model::ModelPackage::open(&model_path()).unwrap().tokenizer;
    let items = reference();
    let ask = |item: &support::Item| {
        // Up to where two tokens are so close that another order of sums may decide.
        let sure = item.margins.iter().take_while(|&&m| m > 0.05).count();
        let expected = tokenizer.decode(&item.gen_ids[..sure], true);
        let body = json!({
            "prompt": item.prompt_ids, "max_tokens": sure, "temperature": 0, "ignore_eos": true,
        });
        (body, expected)
    };
    let asked: Vec<_> = items.iter().map(ask).collect();
    for (body, expected) in &asked {
        let answer = server.post(body.clone());
        assert_eq!(ids_of(&answer), expected);
        assert_eq!(answer["usage"]["prompt_tokens"], body["prompt"].as_array().unwrap().len());
    }
    let open: Vec<_> = asked
        .iter()
        .map(|(body, _)| send(server.address, COMPLETE, "", &body.to_string()))
        .collect();
    for (stream, (_, expected)) in open.into_iter().zip(&asked) {
        assert_eq!(ids_of(&receive(stream).unwrap().json()), expected);
    }
    wait_until("nothing is held", || server.load() == (0, 0));
}

#[test]
fn log_probabilities_of_a_prompt_are_whole_whatever_is_cached() {
    let server = Served::new();
    let prompt: Vec<u32> = (1000..1033).collect();
    let body =
        json!({ "prompt": prompt, "max_tokens": 1, "echo": true, "logprobs": 1, "temperature": 0 });
    let first = server.post(body.clone());
    let second = server.post(body.clone());
    // One token at a time, against another way to the same numbers: each token as the answer.
    let of = |answer: &Value| -> Vec<Option<f64>> {
        let list = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        list.iter().map(Value::as_f64).collect()
    };
    let (first, second) = (of(&first), of(&second));
    assert_eq!((first.len(), first[0]), (34, None));
    for (a, b) in first.iter().zip(&second).skip(1) {
        assert!((a.unwrap() - b.unwrap()).abs() < 1e-3, "{a:?} {b:?}");
    }
    for at in [1, 16, 17, 32] {
        let bias = json!({ prompt[at].to_string(): 100 });
        let forced = server.post(json!({
            "prompt": prompt[..at], "max_tokens": 1, "temperature": 0, "logprobs": 0, "logit_bias": bias,
        }));
        let logprob = of(&forced)[0].unwrap();
        assert!((logprob - first[at].unwrap()).abs() < 1e-3, "at {at}: {logprob} {:?}", first[at]);
    }
    // A prompt of one token has a null alone, and many steps give what one gives.
    let short =
        server.post(json!({ "prompt": [1000], "max_tokens": 1, "echo": true, "logprobs": 0 }));
    assert_eq!(of(&short).len(), 2);
    let small = Served::start("max_batch_tokens = 7", "pages = 4096");
    for (a, b) in first.iter().zip(of(&small.post(body))).skip(1) {
        assert!((a.unwrap() - b.unwrap()).abs() < 1e-3, "{a:?} {b:?}");
    }
}

#[test]
fn settings_change_what_is_sampled_as_they_say() {
    let server = Served::new();
    let ask = |more: Value| {
        let mut body = json!({ "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "logprobs": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(body)
    };
    let tokens =
        |answer: &Value| answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone();
    let plain = ask(json!({}));
    assert_eq!(tokens(&plain)[0], " Paris");
    let banned = ask(json!({ "logit_bias": { "7042": -100 } }));
    assert!(!tokens(&banned).contains(&json!(" Paris")));
    let forced = ask(json!({ "logit_bias": { "7042": 100 } }));
    assert_eq!(tokens(&forced), vec![json!(" Paris"); 8]);
    // A penalty of 2 for each time is nothing beside a bias of 100; against one of 3 it tells at once.
    let once =
        ask(json!({ "logit_bias": { "7042": 5 }, "frequency_penalty": 2, "max_tokens": 16 }));
    let often =
        ask(json!({ "logit_bias": { "7042": 5 }, "frequency_penalty": -2, "max_tokens": 16 }));
    let count = |answer: &Value| tokens(answer).iter().filter(|t| **t == " Paris").count();
    assert!(count(&once) < count(&often), "{} {}", count(&once), count(&often));
    // The end is held off, and comes when it may.
    let ends = ask(json!({ "stop_token_ids": [7042] }));
    assert_eq!(ends["usage"]["completion_tokens"], 1);
    assert_eq!((ids_of(&ends), &ends["choices"][0]["finish_reason"]), ("", &json!("stop")));
    let later = ask(json!({ "stop_token_ids": [7042], "min_tokens": 4, "max_tokens": 4 }));
    assert_eq!(later["usage"]["completion_tokens"], 4);
    assert!(!tokens(&later).contains(&json!(" Paris")));
    // A seed decides, whatever else runs.
    let seeded = |seed: i64| ask(json!({ "temperature": 1.5, "seed": seed, "max_tokens": 24 }));
    assert_eq!(ids_of(&seeded(7)), ids_of(&seeded(7)));
    assert_ne!(ids_of(&seeded(7)), ids_of(&seeded(-8)));
    let many = ask(json!({ "temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 24 }));
    assert_eq!(ids_of(&many), ids_of(&seeded(7)), "the first of several is the one alone");
    let texts: Vec<&str> = (0..3).map(|i| many["choices"][i]["text"].as_str().unwrap()).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    for (wrong, part) in [
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "top_p": 0 }), "top_p"),
        (json!({ "min_p": 2 }), "min_p"),
        (json!({ "repetition_penalty": 0 }), "repetition_penalty"),
        (json!({ "top_k": -2 }), "top_k"),
        (json!({ "min_tokens": 9 }), "min_tokens"),
    ] {
        let mut body = json!({ "prompt": "x", "max_tokens": 8 });
        body.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        let answer = post(server.address, COMPLETE, &body);
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(part)),
            "{part}"
        );
    }
    for top_k in [0, -1, 1, 49152, 49153, 9_999_999] {
        let body = json!({ "prompt": "x", "max_tokens": 2, "top_k": top_k, "temperature": 1e-45 });
        assert_eq!(post(server.address, COMPLETE, &body).status, 200, "{top_k}");
    }
}

#[test]
fn what_can_never_fit_is_refused_and_the_rest_goes_on() {
    let server = Served::start("max_model_len = 1024", "pages = 10");
    let long: Vec<u32> = (1000..1400).collect();
    let started = Instant::now();
    let answer = post(server.address, COMPLETE, &json!({ "prompt": long, "max_tokens": 4 }));
    assert!((400..500).contains(&answer.status), "{}", answer.error());
    assert!(
        answer.error().contains("the pool has 9 in all"),
        "the pool has 9 in all: {}",
        answer.error()
    );
    assert!(started.elapsed() < Duration::from_secs(20));
    let short: Vec<u32> = (1000..1010).collect();
    server.post(json!({ "prompt": short, "max_tokens": 4 }));
    // Without a length an answer may have what there is.
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "ignore_eos": true });
    let answer = post(server.address, "/v1/chat/completions", &chat);
    assert_eq!(answer.status, 200, "{:?}", answer.json());
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    // A pool that is always too small: all give way to each other, and all come to an end.
    let body = json!({ "prompt": short, "max_tokens": 60, "temperature": 0, "ignore_eos": true });
    let alone = server.post(body.clone());
    let open: Vec<_> =
        (0..12).map(|_| send(server.address, COMPLETE, "", &body.to_string())).collect();
    for stream in open {
        assert_eq!(ids_of(&receive(stream).unwrap().json()), ids_of(&alone));
    }
    wait_until("nothing is held", || server.load() == (0, 0));
}

#[test]
fn who_leaves_gives_all_back_at_once() {
    let server = Served::new();
    let prompt: Vec<u32> = (1000..1040).collect();
    for stream in [true, false] {
        let body =
            json!({ "prompt": prompt, "max_tokens": 4000, "ignore_eos": true, "stream": stream });
        let mut open = send(server.address, COMPLETE, "", &body.to_string());
        wait_until("it runs", || server.load().1 > 2);
        if stream {
            open.read_exact(&mut [0; 200]).unwrap();
        }
        drop(open);
        wait_until("it is gone", || server.load() == (0, 0));
    }
    let state = get(server.address, "/admin/plugins").json();
    let kv = state["resources"].as_array().unwrap().iter().find(|r| r["kind"] == "kv").unwrap();
    assert_eq!(kv["state"]["streams"], json!([]));
    assert!(state["resources"].as_array().unwrap().iter().all(|r| r["panics"] == 0));
}

#[test]
fn cached_prompts_are_told_kept_apart_by_salt_and_dropped_on_demand() {
    let server = Served::new();
    let prompt: Vec<u32> = (1000..1040).collect();
    let cached = |more: Value| {
        let mut body = json!({ "prompt": prompt, "max_tokens": 1, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(body)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(json!({})), 0);
    assert_eq!(cached(json!({})), 32);
    assert_eq!(cached(json!({ "cache_salt": "mine" })), 0);
    assert_eq!(cached(json!({ "cache_salt": "mine" })), 32);
    let done = receive(send(server.address, "/admin/reset_prefix_cache", "", "{}")).unwrap();
    assert_eq!(done.status, 200);
    assert_eq!(cached(json!({})), 0);
    assert_eq!(cached(json!({})), 32);
    assert_eq!(cached(json!({ "cache_salt": "mine" })), 0);
}

#[test]
fn a_signal_lets_running_requests_finish_and_takes_no_more() {
    let mut server = Served::new();
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": true, "stream": true });
    let mut open = send(server.address, COMPLETE, "", &body.to_string());
    open.read_exact(&mut [0; 100]).unwrap();
    server.signal("-TERM");
    wait_until("it drains", || get(server.address, "/ready").status == 503);
    let refused = post(server.address, COMPLETE, &json!({ "prompt": "x" }));
    assert_eq!(refused.status, 503, "{}", refused.error());
    let mut rest = String::new();
    open.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

/// A stream of a long answer.
fn long_stream(server: &Served, first: u32, max_tokens: u32) -> std::net::TcpStream {
    let prompt: Vec<u32> = (first..first + 20).collect();
    let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "stream": true, "temperature": 0 });
    send(server.address, COMPLETE, "", &body.to_string())
}

#[test]
fn a_signal_under_load_cuts_nobody_off() {
    let mut server = Served::new().again(&["--max-batch", "4"]);
    let streams: Vec<_> = (0..12).map(|i| long_stream(&server, 1000 + i, 40)).collect();
    wait_until("some run and some wait", || server.load().0 == 12);
    server.signal("-TERM");
    wait_until("it drains", || get(server.address, "/ready").status == 503);
    assert_eq!(post(server.address, COMPLETE, &json!({ "prompt": "x" })).status, 503);
    for stream in streams {
        let events = receive(stream).unwrap().events();
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn what_is_not_done_when_the_time_is_up_is_told_so() {
    let mut server = Served::new().again(&["--drain-timeout", "1"]);
    let mut stream = long_stream(&server, 1000, 8000);
    stream.read_exact(&mut [0; 200]).unwrap();
    server.signal("-INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let events: Vec<&str> = rest.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    let [.., error, "[DONE]"] = events[..] else { panic!("{rest}") };
    let error: Value = serde_json::from_str(error).unwrap();
    assert_eq!(error["error"]["type"], "service_unavailable", "{error}");
    assert_eq!(server.child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_new_process_after_a_kill_finds_the_prompts_of_the_old_one() {
    let kv = "pages = 24\ndisk_file = \"kv.pages\"\ndisk_size = \"64MiB\"";
    let server = Served::start("max_model_len = 300", kv);
    let ask = |server: &Served, first: u32| {
        let prompt: Vec<u32> = (first..first + 100).collect();
        let answer = server.post(json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0 }));
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (ids_of(&answer).to_owned(), cached)
    };
    // More than the pool holds, so that the first ones are in the file.
    let first: Vec<(String, u64)> = (0..8).map(|i| ask(&server, 1000 + 200 * i)).collect();
    assert!(first.iter().all(|(_, cached)| *cached == 0));
    // In the middle of answers, which are cut.
    let mut streams: Vec<_> = (0..3).map(|i| long_stream(&server, 5000 + i, 200)).collect();
    for stream in &mut streams {
        stream.read_exact(&mut [0; 200]).unwrap();
    }
    let server = server.again(&[]);
    for mut stream in streams {
        let mut rest = String::new();
        let _ = stream.read_to_string(&mut rest);
        assert!(!rest.contains("[DONE]"), "cut, and to be seen as that");
    }
    assert_eq!(server.load(), (0, 0));
    let second: Vec<(String, u64)> = (0..8).map(|i| ask(&server, 1000 + 200 * i)).collect();
    for ((text, _), (again, _)) in first.iter().zip(&second) {
        assert_eq!(text, again);
    }
    let found = second.iter().filter(|(_, cached)| *cached == 96).count();
    assert!(found >= 3, "{second:?}");
}

#[test]
fn an_answer_that_ends_at_a_stop_string_is_no_cancelled_one() {
    let server = Served::new();
    let body = json!({ "prompt": "The capital of France is", "max_tokens": 400, "temperature": 0, "ignore_eos": true, "stop": " Paris" });
    let answer = server.post(body);
    assert_eq!((ids_of(&answer), &answer["choices"][0]["finish_reason"]), ("", &json!("stop")));
    wait_until("it has left the engine", || server.load() == (0, 0));
    let text = String::from_utf8(get(server.address, "/metrics").body).unwrap();
    let count = |name: &str| {
        let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(count("engine_host_requests_finished_total"), "1");
    assert_eq!(count("engine_host_requests_cancelled_total"), "0");
    assert_eq!(count("vllm:request_success_total{engine=\"0\",finished_reason=\"stop\""), "1");
}

#[test]
fn a_chat_is_answered_with_the_models_template() {
    let server = Served::new();
    let body = json!({
        "messages": [{ "role": "user", "content": "What is the capital of France?" }],
        "max_tokens": 24, "temperature": 0, "stream": true,
    });
    let events = post(server.address, "/v1/chat/completions", &body).events();
    assert!(text_of(&events).contains("Paris"), "{}", text_of(&events));
    let render = post(
        server.address,
        "/v1/chat/completions/render",
        &json!({ "messages": body["messages"] }),
    );
    let render = render.json();
    assert!(render["prompt"].as_str().unwrap().ends_with("<|im_start|>assistant\n"));
    // One beginning-of-sequence token where the model has one, never two.
    let ids = render["prompt_token_ids"].as_array().unwrap();
    assert_ne!(ids[0], ids[1]);
}
