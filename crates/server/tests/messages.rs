//! What a message of a chat is made of: content, calls of tools, and thoughts.

mod support;

use model::{ReasoningFormat, ToolFormat};
use serde_json::{Value, json};
use server::{Format, ServerOptions};
use support::http::{post, text_of};
use support::{Server, says};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A chat with a tool, over a server that finds calls in this format.
fn with_tools(format: ToolFormat, text: &'static str) -> (Value, Value, Vec<Value>) {
    let tool_calls = Format::Is(format);
    let options = ServerOptions { tool_calls, ..ServerOptions::default() };
    let server = Server::new(options, move |_| says(text));
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let whole = post(server.address, CHAT, &chat(json!({ "tools": tools }))).json();
    let stream = post(server.address, CHAT, &chat(json!({ "tools": tools, "stream": true })));
    let deltas = stream.events().into_iter().map(|event| event["choices"][0].clone()).collect();
    let without = post(server.address, CHAT, &chat(json!({}))).json();
    (whole["choices"][0].clone(), without["choices"][0].clone(), deltas)
}

#[test]
fn calls_of_tools_are_told_apart_from_text() {
    let text = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"é\"]}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    let (whole, without, deltas) = with_tools(ToolFormat::Hermes, text);
    assert_eq!(whole["message"]["content"], "Let me see.");
    let calls = whole["message"]["tool_calls"].as_array().unwrap();
    let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
    let expected = [
        json!({ "name": "f", "arguments": "{\"a\": [1, \"é\"]}" }),
        json!({ "name": "g", "arguments": "{}" }),
    ];
    assert_eq!(functions, expected.iter().collect::<Vec<_>>());
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(calls.iter().all(|call| call["type"] == "function" && call.get("index").is_none()));
    // Nobody asked for tools: what looks like a call is text.
    assert_eq!(without["message"]["content"], text);

    let text: String = deltas.iter().filter_map(|d| d["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Let me see.");
    let told: Vec<&Value> =
        deltas.iter().filter_map(|d| d["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!(told.len(), 2);
    for (i, call) in told.iter().enumerate() {
        assert_eq!((&call["index"], &call["function"]), (&json!(i), &expected[i]));
    }
}

#[test]
fn an_answer_that_is_a_call_has_no_content_and_its_own_reason() {
    let call = "{\"name\": \"f\", \"parameters\": {}}";
    let (whole, _, deltas) = with_tools(ToolFormat::Llama3, call);
    assert_eq!(whole["message"]["content"], Value::Null);
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["name"], "f");
    assert_eq!(whole["finish_reason"], "tool_calls");
    assert_eq!(deltas.last().unwrap()["finish_reason"], "tool_calls");
    let (whole, ..) = with_tools(ToolFormat::Llama3, "{\"name\": \"f\", \"parameters\": {");
    assert_eq!(whole["finish_reason"], "stop");
    assert_eq!(whole["message"]["content"], "{\"name\": \"f\", \"parameters\": {");
    assert!(whole["message"].get("tool_calls").is_none());
}

#[test]
fn bare_text_in_a_call_is_read_by_the_tools_schema() {
    let options = ServerOptions {
        tool_calls: Format::Is(ToolFormat::Qwen3Coder),
        ..ServerOptions::default()
    };
    let text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n</parameter>\n\
                </function>\n</tool_call>";
    let server = Server::new(options, move |_| says(text));
    let properties = json!({ "a": { "type": "string" }, "b": { "type": "integer" } });
    let parameters = json!({ "type": "object", "properties": properties });
    let tools =
        json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
    let answer = post(server.address, CHAT, &chat(json!({ "tools": tools }))).json();
    let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call, &json!({ "name": "f", "arguments": "{\"a\": \"1\", \"b\": 1}" }));
}

/// A server of a model that thinks.
fn thinking(text: &'static str) -> Server {
    let options = ServerOptions {
        reasoning: Format::Is(ReasoningFormat::Think),
        tool_calls: Format::Is(ToolFormat::Hermes),
        ..ServerOptions::default()
    };
    Server::new(options, move |_| says(text))
}

#[test]
fn thoughts_are_told_apart_from_the_answer() {
    let server = thinking("<think>\nWell, é.\n</think>\n\nYes.");
    let message = |more: Value| {
        let answer = post(server.address, CHAT, &chat(more)).json();
        answer["choices"][0]["message"].clone()
    };
    let whole = message(json!({}));
    assert_eq!(
        (&whole["reasoning_content"], &whole["content"]),
        (&json!("Well, é."), &json!("Yes."))
    );
    let without = message(json!({ "include_reasoning": false }));
    assert_eq!(
        (&without["reasoning_content"], &without["content"]),
        (&Value::Null, &json!("Yes."))
    );
    // Cut off while it thinks: there is no answer yet.
    let cut = message(json!({ "max_tokens": 12 }));
    assert_eq!((&cut["reasoning_content"], &cut["content"]), (&json!("Well"), &Value::Null));

    let events = post(server.address, CHAT, &chat(json!({ "stream": true }))).events();
    let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
    let thoughts: String = deltas.filter_map(|d| d["reasoning_content"].as_str()).collect();
    assert_eq!((thoughts.as_str(), text_of(&events).as_str()), ("Well, é.", "Yes."));

    // Turns that only thought are taken back, by either name.
    for name in ["reasoning_content", "reasoning"] {
        let messages = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", name: "Hm", "content": null },
            { "role": "user", "content": "So?" },
        ]);
        assert_eq!(post(server.address, CHAT, &json!({ "messages": messages })).status, 200);
    }
    // A model that does not think says nothing of it.
    let plain = Server::new(ServerOptions::default(), |_| says("<think>x</think>y"));
    let answer = post(plain.address, CHAT, &chat(json!({}))).json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "<think>x</think>y");
    assert!(message.get("reasoning_content").is_none());
}

#[test]
fn calls_follow_thoughts_and_are_not_looked_for_in_them() {
    let server = thinking(
        "<think><tool_call>{\"name\": \"no\"}</tool_call></think>\n\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>",
    );
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let answer = post(server.address, CHAT, &chat(json!({ "tools": tools }))).json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "<tool_call>{\"name\": \"no\"}</tool_call>");
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(message["tool_calls"][0]["function"]["name"], "f");
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
}
