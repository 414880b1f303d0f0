//! The routes over a real socket, with an engine that says what a test wrote down.

mod support;

use std::io::{Read, Write};
use std::time::Duration;

use serde_json::{Value, json};
use server::engine::Failure;
use server::{ApiKey, ServerOptions, UnknownFields};
use support::http::{self, get, post, receive, send, text_of, wait_until};
use support::{Script, Server, counts, says};

const CHAT: &str = "/v1/chat/completions";
const COMPLETE: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 200 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn complete(more: Value) -> Value {
    let mut body = json!({ "prompt": "Once", "max_tokens": 200 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn server(text: &'static str) -> Server {
    Server::new(ServerOptions::default(), move |_| says(text))
}

#[test]
fn a_chat_is_answered_whole_and_as_a_stream() {
    let server = server("Hello, wörld 😀");
    let whole = post(server.address, CHAT, &chat(json!({})));
    assert_eq!(whole.status, 200);
    let body = whole.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "tiny");
    assert_eq!(body["choices"][0]["message"]["content"], "Hello, wörld 😀");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let usage = &body["usage"];
    assert_eq!(usage["completion_tokens"], 18);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 18;
    assert_eq!(usage["total_tokens"], sum);

    let stream = post(server.address, CHAT, &chat(json!({ "stream": true })));
    assert_eq!(stream.header("content-type"), Some("text/event-stream"));
    let events = stream.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(text_of(&events), "Hello, wörld 😀");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert!(events.iter().all(|e| e.get("usage").is_none()));
    assert!(events.iter().all(|e| e["id"] == events[0]["id"]));
    assert_eq!(events[0]["object"], "chat.completion.chunk");
}

#[test]
fn the_usage_comes_last_with_no_choices_and_is_null_before() {
    let server = server("abc");
    for (path, body) in [(CHAT, chat(json!({}))), (COMPLETE, complete(json!({})))] {
        let mut body = body;
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        let events = post(server.address, path, &body).events();
        let (last, others) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], 3);
        assert!(others.iter().all(|e| e["usage"].is_null() && e["choices"][0].is_object()));
    }
}

#[test]
fn no_part_of_a_stop_string_leaks_and_streams_say_the_same() {
    let server = server("ABCDEFGHIJKL");
    let body = complete(json!({ "stop": ["DEFGHIJ"] }));
    let whole = post(server.address, COMPLETE, &body).json();
    assert_eq!(whole["choices"][0]["text"], "ABC");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole["choices"][0]["stop_reason"], "DEFGHIJ");
    assert_eq!(whole["usage"]["completion_tokens"], 10);
    let body = complete(json!({ "stop": ["DEFGHIJ"], "stream": true }));
    let events = post(server.address, COMPLETE, &body).events();
    assert_eq!(text_of(&events), "ABC");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    let body = complete(json!({ "stop": "DEF", "include_stop_str_in_output": true }));
    assert_eq!(post(server.address, COMPLETE, &body).json()["choices"][0]["text"], "ABCDEF");
    // What the stop string begins with comes out when the text ends otherwise.
    let body = complete(json!({ "stop": "KLM" }));
    assert_eq!(post(server.address, COMPLETE, &body).json()["choices"][0]["text"], "ABCDEFGHIJKL");
    // Before min_tokens no stop string counts.
    let body = complete(json!({ "stop": ["C", "F"], "min_tokens": 4 }));
    assert_eq!(post(server.address, COMPLETE, &body).json()["choices"][0]["text"], "ABCDE");
}

#[test]
fn characters_come_whole_whatever_tokens_they_are_spread_over() {
    let server = Server::new(ServerOptions::default(), |_| Script {
        bytes: [&b"\xf0\x9f\x98\x80 \xe4\xbd\xa0"[..], b"\xf0\x9f"].concat(),
        ..Script::default()
    });
    let events = post(server.address, COMPLETE, &complete(json!({ "stream": true }))).events();
    let pieces: Vec<&str> =
        events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(pieces, ["😀", " ", "你", "\u{fffd}"]);
    let whole = post(server.address, COMPLETE, &complete(json!({}))).json();
    assert_eq!(whole["choices"][0]["text"], pieces.concat());
}

#[test]
fn several_prompts_and_answers_keep_their_places() {
    let server = Server::new(ServerOptions::default(), |request| {
        let choice = request.sampling.get("choice").and_then(Value::as_u64).unwrap_or(0);
        let last = char::from(*request.prompt.last().unwrap() as u8);
        says(&format!("{last}{choice}"))
    });
    let body = json!({ "prompt": ["a", [98, 99]], "n": 2, "max_tokens": 5 });
    let answer = post(server.address, COMPLETE, &body).json();
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a0", "a1", "c0", "c1"]);
    assert_eq!(answer["usage"]["prompt_tokens"], 3, "each prompt once");
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let body = json!({ "prompt": ["a", [98, 99]], "n": 2, "max_tokens": 5, "stream": true });
    let events = post(server.address, COMPLETE, &body).events();
    for (index, text) in texts.iter().enumerate() {
        let own = events.iter().filter(|e| e["choices"][0]["index"] == index);
        let own: String = own.filter_map(|e| e["choices"][0]["text"].as_str()).collect();
        assert_eq!(own, *text);
    }
}

#[test]
fn log_probabilities_have_a_floor_and_the_forms_of_the_api() {
    let server = server("é!");
    let body = chat(json!({ "logprobs": true, "top_logprobs": 2 }));
    let answer = post(server.address, CHAT, &body).json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    assert_eq!(content[0]["bytes"], json!([0xc3]));
    assert_eq!(content[2]["token"], "!");
    assert_eq!(content[2]["logprob"], -0.5);
    assert_eq!(content[2]["top_logprobs"][1]["logprob"], -9999.0);
    let body = complete(json!({ "logprobs": 2, "echo": true, "prompt": "ab" }));
    let answer = post(server.address, COMPLETE, &body).json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(answer["choices"][0]["text"], "abé!");
    assert_eq!(logprobs["tokens"], json!(["a", "b", "bytes:\\xc3", "bytes:\\xa9", "!"]));
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["token_logprobs"][1], -0.5);
    assert_eq!(logprobs["text_offset"].as_array().unwrap().len(), 5);
    let body = complete(json!({ "logprobs": 0, "echo": true, "prompt": "ab", "max_tokens": 0 }));
    let answer = post(server.address, COMPLETE, &body).json();
    assert_eq!(answer["choices"][0]["text"], "ab");
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
}

#[test]
fn wrong_requests_are_told_what_is_wrong_and_harm_nobody() {
    let server = server("ok");
    let cases: Vec<(&str, Value, u16, &str)> = vec![
        (COMPLETE, json!({ "prompt": [200000] }), 400, "prompt[0] = 200000 is no token id"),
        (COMPLETE, json!({ "prompt": [-1] }), 400, "prompt[0] = -1 is no token id"),
        (COMPLETE, json!({ "prompt": [1, "a"] }), 400, "prompt[1] = \"a\" is no token id"),
        (COMPLETE, json!({ "prompt": ["a", 1] }), 400, "prompt must be"),
        (COMPLETE, json!({ "prompt": [[1], [270000]] }), 400, "prompt[1][0] = 270000"),
        (
            COMPLETE,
            json!({ "prompt": "a", "stop_token_ids": [1, -1] }),
            400,
            "stop_token_ids[1] = -1",
        ),
        (COMPLETE, json!({ "prompt": [] }), 400, "prompt must be"),
        (COMPLETE, json!({ "prompt": [[]] }), 400, "no tokens"),
        (COMPLETE, json!({ "prompt": "" }), 400, "no tokens"),
        (COMPLETE, json!({}), 400, "prompt is missing"),
        (COMPLETE, json!({ "prompt": "a", "temprature": 1 }), 400, "did you mean \"temperature\""),
        (
            COMPLETE,
            json!({ "prompt": "a", "temperature": "hot" }),
            400,
            "temperature must be a number",
        ),
        (COMPLETE, json!({ "prompt": "a", "n": 0 }), 400, "n must be"),
        (COMPLETE, json!({ "prompt": "a", "n": 1e9 }), 400, "n must be"),
        (COMPLETE, json!({ "prompt": "a", "max_tokens": -1 }), 400, "max_tokens must be"),
        (COMPLETE, json!({ "prompt": "a", "logprobs": 100 }), 400, "logprobs must be at most 20"),
        (COMPLETE, json!({ "prompt": "a", "stop": [""] }), 400, "empty string"),
        (COMPLETE, json!({ "prompt": "a", "logit_bias": { "x": 1 } }), 400, "not a token id"),
        (COMPLETE, json!({ "prompt": "a", "logit_bias": { "1": 101 } }), 400, "from -100 to 100"),
        (
            COMPLETE,
            json!({ "prompt": "a", "presence_penalty": 3 }),
            400,
            "presence_penalty must be",
        ),
        (COMPLETE, json!({ "prompt": "a", "suffix": "z" }), 400, "suffix"),
        (COMPLETE, json!({ "prompt": "a", "model": "gpt-9" }), 404, "\"gpt-9\" does not exist"),
        (COMPLETE, json!({ "prompt": "a", "stream_options": {} }), 400, "needs \"stream\""),
        (COMPLETE, json!({ "prompt": "x".repeat(5000) }), 400, "maximum context length of 4096"),
        (CHAT, json!({}), 400, "messages is missing"),
        (CHAT, json!({ "messages": [] }), 400, "messages is missing or empty"),
        (CHAT, json!({ "messages": ["hi"] }), 400, "messages[0] must be an object"),
        (
            CHAT,
            json!({ "messages": [{ "role": "king", "content": "" }] }),
            400,
            "\"king\" is none of",
        ),
        (CHAT, json!({ "messages": [{ "role": "user" }] }), 400, "content is missing"),
        (CHAT, chat(json!({ "response_format": { "type": "json_object" } })), 400, "grammar"),
        (CHAT, chat(json!({ "max_tokens": 0 })), 400, "max_tokens must be at least 1"),
        (CHAT, chat(json!({ "top_logprobs": 2 })), 400, "needs \"logprobs\": true"),
        (
            CHAT,
            chat(
                json!({ "tool_choice": "required", "tools": [{ "type": "function", "function": { "name": "f" } }] }),
            ),
            400,
            "tool_choice",
        ),
        (
            CHAT,
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }] }),
            400,
            "takes text only",
        ),
        ("/detokenize", json!({ "tokens": [999999] }), 400, "999999"),
        ("/detokenize", json!({ "tokens": [-1] }), 400, "tokens[0] = -1 is no token id"),
        ("/detokenize", json!({ "tokens": 7 }), 400, "array of token ids"),
        ("/nowhere", json!({}), 404, "no route POST /nowhere"),
    ];
    for (path, body, status, part) in cases {
        let answer = post(server.address, path, &body);
        let message = answer.error();
        assert_eq!(answer.status, status, "{path} {body}: {message}");
        assert!(message.contains(part), "{path} {body}: {message}");
    }
    for body in ["{", "[]", "nonsense", "{\"prompt\": \"\\ud800\"}", &"[".repeat(100_000)] {
        let answer = receive(send(server.address, COMPLETE, "", body)).unwrap();
        assert_eq!(answer.status, 400, "{body:.40}");
        answer.error();
    }
    // Whole numbers of more than 64 bits, which JSON has and computers do not.
    for (fields, part) in [
        ("\"prompt\": [18446744073709551616]", "prompt[0] = 1.8446744073709552e+19 is no token id"),
        ("\"prompt\": [[1], [18446744073709551617]]", "prompt[1][0] = "),
        (
            "\"prompt\": \"a\", \"seed\": 18446744073709551616",
            "seed must be a whole number of 64 bits",
        ),
        (
            "\"prompt\": \"a\", \"seed\": -9223372036854775809",
            "seed must be a whole number of 64 bits",
        ),
        (
            "\"prompt\": \"a\", \"top_k\": 9223372036854775808",
            "top_k must be a whole number of 64 bits",
        ),
        (
            "\"prompt\": \"a\", \"max_tokens\": 4294967296",
            "max_tokens must be a whole number from 0 to",
        ),
        (
            "\"prompt\": \"a\", \"max_tokens\": 18446744073709551616",
            "max_tokens must be a whole number",
        ),
        ("\"prompt\": \"a\", \"n\": 99999999999999999999", "n must be a whole number"),
        ("\"prompt\": \"a\", \"logit_bias\": {\"18446744073709551616\": 1}", "not a token id"),
        ("\"prompt\": \"a\", \"stop_token_ids\": [18446744073709551616]", "stop_token_ids[0] = "),
        ("\"prompt\": \"a\", \"temperature\": 1e999", "out of range"),
    ] {
        let answer = receive(send(server.address, COMPLETE, "", &format!("{{{fields}}}"))).unwrap();
        let message = answer.error();
        assert!(answer.status == 400 && message.contains(part), "{fields}: {message}");
    }
    for path in ["/v1/models/a%ff", "/v1/models/none"] {
        let answer = get(server.address, path);
        assert!(matches!(answer.status, 400 | 404), "{path}: {}", answer.error());
    }
    assert_eq!(get(server.address, CHAT).status, 405);
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(post(server.address, CHAT, &chat(json!({}))).status, 200);
    assert_eq!(counts(&server).0, 1, "nothing wrong reached the engine");
}

#[test]
fn nulls_count_as_absent_and_what_has_no_effect_is_taken() {
    let server = server("ok");
    let body = chat(json!({
        "temperature": null, "n": null, "stop": null, "seed": null, "logit_bias": null,
        "response_format": { "type": "text" }, "user": "me", "metadata": { "a": "b" },
        "store": false, "model": "other-name", "future_field": null, "max_completion_tokens": 5,
    }));
    assert_eq!(post(server.address, CHAT, &body).status, 200);
    let options = ServerOptions { unknown_fields: UnknownFields::Ignore, ..Default::default() };
    let lenient = Server::new(options, |_| says("ok"));
    assert_eq!(post(lenient.address, CHAT, &chat(json!({ "future_field": 1 }))).status, 200);
}

#[test]
fn a_failure_is_a_status_before_the_stream_and_an_event_in_it() {
    let failure = Failure::new(500, "resource `kv`: it broke");
    let fails = move |request: &model::GenerateRequest| {
        let bytes = if request.prompt.len() > 3 { b"part".to_vec() } else { Vec::new() };
        Script { bytes, failure: Some(failure.clone()), ..Script::default() }
    };
    let server = Server::new(ServerOptions::default(), fails);
    for stream in [true, false] {
        let body = json!({ "prompt": "ab", "stream": stream });
        let answer = post(server.address, COMPLETE, &body);
        assert_eq!((answer.status, answer.error()), (500, "resource `kv`: it broke".into()));
    }
    let answer = post(server.address, COMPLETE, &json!({ "prompt": "abcdef", "stream": true }));
    assert_eq!(answer.status, 200);
    let events = answer.events();
    assert_eq!(events.len(), 5);
    assert_eq!(events[4]["error"]["message"], "resource `kv`: it broke");
    assert_eq!(events[4]["error"]["type"], "server_error");
}

fn endless() -> Script {
    let pause = Duration::from_millis(1);
    Script { bytes: b"la ".to_vec(), is_endless: true, pause, ..Script::default() }
}

#[test]
fn who_leaves_is_cancelled_streaming_or_not() {
    let server = Server::new(ServerOptions::default(), |_| endless());
    let mut stream = send(server.address, CHAT, "", &chat(json!({ "stream": true })).to_string());
    let mut some = [0; 300];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    wait_until("the stream is cancelled", || counts(&server).1 == 1);
    let stream = send(server.address, CHAT, "", &chat(json!({ "n": 2 })).to_string());
    wait_until("both run", || counts(&server).0 == 3);
    drop(stream);
    wait_until("both are cancelled", || counts(&server).1 == 3);
    let engine = &server.app.loaded_model().unwrap().engine;
    wait_until("all places are free", || engine.in_flight() == 0);
}

#[test]
fn too_many_requests_are_told_when_to_come_back() {
    let options = ServerOptions { max_waiting: 1, ..ServerOptions::default() };
    let server = Server::new(options, |_| endless());
    let busy: Vec<_> = (0..5)
        .map(|_| send(server.address, CHAT, "", &chat(json!({ "stream": true })).to_string()))
        .collect();
    wait_until("five run", || counts(&server).0 == 5);
    let answer = post(server.address, CHAT, &chat(json!({})));
    assert_eq!(answer.status, 429);
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    drop(busy);
    let engine = &server.app.loaded_model().unwrap().engine;
    wait_until("they are gone", || engine.in_flight() == 0);
}

#[test]
fn a_reader_that_does_not_read_is_ended_and_blocks_nobody() {
    let options = ServerOptions { stream_buffer: 64, ..ServerOptions::default() };
    let server = Server::new(options, |request| {
        let is_slow = request.prompt.len() == 2;
        if is_slow { Script { pause: Duration::ZERO, ..endless() } } else { says("quick") }
    });
    let body = json!({ "prompt": "zz", "stream": true }).to_string();
    let slow = send(server.address, COMPLETE, "", &body);
    for _ in 0..20 {
        let answer = post(server.address, COMPLETE, &complete(json!({})));
        assert_eq!(answer.json()["choices"][0]["text"], "quick");
    }
    wait_until("the slow one is ended", || counts(&server).1 == 1);
    // What had been written still comes, and then why there is no more.
    let mut text = String::new();
    let mut slow = slow;
    slow.read_to_string(&mut text).unwrap();
    assert!(text.contains("read too slowly"), "{}", &text[text.len() - 300..]);
    assert!(text.contains("[DONE]"));
}

#[test]
fn who_takes_nothing_loses_the_connection() {
    let options = ServerOptions {
        max_connections: 1,
        write_timeout: Some(Duration::from_millis(500)),
        ..ServerOptions::default()
    };
    let server = Server::new(options, |_| Script { pause: Duration::ZERO, ..endless() });
    let body = chat(json!({ "stream": true, "max_tokens": 1_000_000_000 })).to_string();
    let stuck = send(server.address, CHAT, "", &body);
    // There is one place, so somebody else is answered once the first one is given up.
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(counts(&server).1, 1);
    drop(stuck);
}

#[test]
fn keys_are_asked_for_everywhere_but_where_health_is_asked() {
    let options = ServerOptions {
        api_keys: vec![ApiKey("k1".into()), ApiKey("k2".into())],
        ..Default::default()
    };
    let server = Server::new(options, |_| says("ok"));
    for path in ["/v1/models", "/server_info", "/v1/loads", "/admin/plugins"] {
        let answer = get(server.address, path);
        assert_eq!(answer.status, 401, "{path}");
        answer.error();
        for (key, status) in [("k1", 200), ("k2", 200), ("k3", 401), ("", 401)] {
            let headers = format!("Authorization: Bearer {key}\r\n");
            let answer = receive(send(server.address, path, &headers, "")).unwrap();
            assert_eq!(answer.status, status, "{path} {key}");
        }
    }
    for path in ["/health", "/ready", "/version"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    assert_eq!(post(server.address, CHAT, &chat(json!({}))).status, 401);
}

#[test]
fn admin_routes_are_for_this_machine_and_not_for_browsers_or_proxies() {
    let server = server("ok");
    assert_eq!(get(server.address, "/admin/plugins").status, 200);
    for header in ["Origin: http://evil.example\r\n", "X-Forwarded-For: 1.2.3.4\r\n"] {
        let answer = receive(send(server.address, "/admin/plugins", header, "")).unwrap();
        assert_eq!(answer.status, 403, "{header}");
    }
    let answer = receive(send(server.address, "/v1/models", "Origin: http://a.example\r\n", ""));
    assert_eq!(answer.unwrap().header("access-control-allow-origin"), None, "CORS is off");
    let options =
        ServerOptions { cors_origins: vec!["http://a.example".into()], ..Default::default() };
    let open = Server::new(options, |_| says("ok"));
    let answer = receive(send(open.address, "/v1/models", "Origin: http://a.example\r\n", ""));
    let answer = answer.unwrap();
    assert_eq!(answer.header("access-control-allow-origin"), Some("http://a.example"));
    let answer = receive(send(open.address, "/v1/models", "Origin: http://b.example\r\n", ""));
    assert_eq!(answer.unwrap().header("access-control-allow-origin"), None);
}

#[test]
fn bodies_and_heads_are_limited_in_size_and_time() {
    let options = ServerOptions {
        max_body_bytes: 1000,
        read_timeout: Some(Duration::from_millis(300)),
        ..ServerOptions::default()
    };
    let server = Server::new(options, |_| says("ok"));
    let body = complete(json!({ "prompt": "x".repeat(2000) })).to_string();
    let answer = receive(send(server.address, COMPLETE, "", &body)).unwrap();
    assert_eq!(answer.status, 413, "{}", answer.error());
    // What says that it is larger is not waited for.
    let mut announced = http::connect(server.address);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n{";
    announced.write_all(head.as_bytes()).unwrap();
    assert_eq!(receive(announced).unwrap().status, 413);
    let long = format!("X-Long: {}\r\n", "y".repeat(200_000));
    // A refusal may be lost when the connection is closed under what is still being sent.
    if let Ok(answer) = receive(send(server.address, "/v1/models", &long, "")) {
        assert_eq!(answer.status, 431);
    }
    let mut half = http::connect(server.address);
    half.write_all(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n").unwrap();
    let mut rest = Vec::new();
    let _ = half.read_to_end(&mut rest);
    let mut half = http::connect(server.address);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{";
    half.write_all(head.as_bytes()).unwrap();
    assert_eq!(receive(half).unwrap().status, 408);
    let wrong = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
    let mut stream = http::connect(server.address);
    stream.write_all(wrong.as_bytes()).unwrap();
    assert_eq!(receive(stream).unwrap().status, 415);
    assert_eq!(get(server.address, "/health").status, 200);
}

#[test]
fn health_tells_how_far_the_model_is_loaded_and_drain_ends_readiness() {
    let server = Server::loading(ServerOptions::default());
    server.app.set_progress(30, 120);
    let answer = get(server.address, "/health");
    assert_eq!(answer.status, 503);
    let expected = json!({ "status": "loading", "loaded_bytes": 30, "total_bytes": 120 });
    assert_eq!(answer.json(), expected);
    let answer = post(server.address, CHAT, &chat(json!({})));
    assert_eq!(answer.status, 503);
    assert!(answer.error().contains("25 %") && answer.header("retry-after").is_some());
    assert_eq!(get(server.address, "/ready").status, 503);
    server.load(|_| says("ok"));
    for path in ["/health", "/ready", "/v1/models", "/v1/models/tiny", "/server_info", "/v1/loads"]
    {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    assert_eq!(get(server.address, "/v1/models").json()["data"][0]["max_model_len"], 4096);
    assert_eq!(get(server.address, "/server_info").json()["max_num_seqs"], 4);
    server.app.drain();
    assert_eq!(get(server.address, "/health").json()["status"], "draining");
    assert_eq!(get(server.address, "/ready").status, 503);
    assert_eq!(post(server.address, CHAT, &chat(json!({}))).status, 503);
}

#[test]
fn text_becomes_ids_and_ids_text() {
    let server = server("ok");
    let answer = post(server.address, "/tokenize", &json!({ "prompt": "the 你" })).json();
    assert_eq!(answer["count"], answer["tokens"].as_array().unwrap().len());
    assert_eq!(answer["max_model_len"], 4096);
    let back = post(server.address, "/detokenize", &json!({ "tokens": answer["tokens"] })).json();
    assert_eq!(back["prompt"], "the 你");
    let body =
        json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }] });
    let render = post(server.address, "/v1/chat/completions/render", &body).json();
    assert_eq!(render["prompt"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let tokens = post(server.address, "/tokenize", &body).json();
    assert_eq!(tokens["tokens"], render["prompt_token_ids"]);
}

#[test]
fn metrics_are_there_without_a_key_and_count_requests() {
    let keys = vec![ApiKey("k".into())];
    let server =
        Server::new(ServerOptions { api_keys: keys, ..ServerOptions::default() }, |_| says("abc"));
    let text = || String::from_utf8(get(server.address, "/metrics").body).unwrap();
    let value = |name: &str| -> f64 {
        let text = text();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.unwrap_or_else(|| panic!("{name}\n{text}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 0.0);
    let body = complete(json!({ "stop": "b" }));
    let head = "Authorization: Bearer k\r\n";
    let answer = receive(send(server.address, COMPLETE, head, &body.to_string())).unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), 1.0);
    // The front has ended it at the stop string; the engine does not know why.
    assert_eq!(value("vllm:e2e_request_latency_seconds_count"), 1.0);
    assert!(text().contains("finished_reason=\"stop\",model_name=\"tiny\"} 1"), "{}", text());
}

#[test]
fn an_answer_that_ends_at_a_stop_string_ended_well() {
    let server = Server::new(ServerOptions::default(), |_| Script {
        pause: Duration::from_millis(1),
        ..endless()
    });
    for stream in [true, false] {
        let body = chat(json!({ "stop": ["la la"], "stream": stream, "max_tokens": 1000 }));
        assert_eq!(post(server.address, CHAT, &body).status, 200);
    }
    let count = |name: &str| {
        let text = String::from_utf8(get(server.address, "/metrics").body).unwrap();
        let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    wait_until("both have left the engine", || count("vllm:num_requests_running") == "0");
    assert_eq!(counts(&server), (2, 0), "none was cancelled");
    let stops = "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"";
    assert_eq!(count(stops), "2");
}
