//! The OpenAPI document says what the server does.

mod support;

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use server::ServerOptions;
use support::http::{get, post};
use support::{Server, says};

fn document() -> Value {
    let server = Server::new(ServerOptions::default(), |_| says("x"));
    let answer = get(server.address, "/openapi.json");
    assert_eq!(answer.status, 200);
    answer.json()
}

#[test]
fn every_route_is_in_the_document_and_no_other() {
    let source = include_str!("../src/routes.rs");
    let routes: BTreeSet<(String, String)> = source
        .split(".route(\"")
        .skip(1)
        .filter_map(|rest| {
            let (path, rest) = rest.split_once("\", ")?;
            let (method, _) = rest.split_once('(')?;
            Some((path.to_owned(), method.to_owned()))
        })
        .collect();
    assert!(routes.len() > 10);
    let document = document();
    let paths = document["paths"].as_object().unwrap();
    let told: BTreeSet<(String, String)> = paths
        .iter()
        .flat_map(|(path, of)| of.as_object().unwrap().keys().map(|m| (path.clone(), m.clone())))
        .collect();
    assert_eq!(routes, told);
}

/// Each field on its own, with the example that stands in the document.
#[test]
fn every_field_in_the_document_is_known_to_its_route() {
    let server = Server::new(ServerOptions::default(), |_| says("x"));
    let document = document();
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
    for (path, schema, base) in [
        ("/v1/chat/completions", "ChatRequest", chat.clone()),
        ("/v1/chat/completions/render", "ChatRequest", chat.clone()),
        ("/v1/completions", "CompletionRequest", json!({ "prompt": "Hi" })),
        ("/tokenize", "TokenizeRequest", chat),
        ("/detokenize", "DetokenizeRequest", json!({ "tokens": [1] })),
    ] {
        let at = format!("/components/schemas/{schema}/properties");
        let fields = document.pointer(&at).and_then(Value::as_object).unwrap();
        for (name, field) in fields {
            let mut body: Map<String, Value> = base.as_object().unwrap().clone();
            match field.get("example") {
                // A field that is null is as if it were absent, so it would prove nothing; those are
                // refused with any other value, which is told apart from being unknown.
                Some(Value::Null) => body.insert(name.clone(), json!({ "x": 1 })),
                Some(example) => body.insert(name.clone(), example.clone()),
                None => continue,
            };
            if name == "prompt" {
                body.remove("messages");
            }
            let of_chat_alone =
                path == "/tokenize" && base.get("messages").is_some() && name == "prompt";
            let answer = post(server.address, path, &Value::Object(body));
            let told = answer.json();
            assert_ne!(told["error"]["code"], "unknown_parameter", "{path} {name}: {told}");
            if field["example"] != Value::Null && !of_chat_alone {
                assert_eq!(answer.status, 200, "{path} {name}: {told}");
            }
        }
    }
}
