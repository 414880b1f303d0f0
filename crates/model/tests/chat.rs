//! Chat templates against Python's Jinja2 (`data/chat_reference.py` writes `data/chat.json`).

use std::time::{Duration, UNIX_EPOCH};

use model::gguf::Value as GgufValue;
use model::testing::TinyModel;
use model::{Architecture, ChatInput, ChatTemplate, ErrorKind, Gguf};
use serde_json::{Value, json};

fn template(source: &str) -> model::Result<ChatTemplate> {
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
    ChatTemplate::new(
        [("default".to_owned(), source.to_owned())],
        special.map(|(name, token)| (name.to_owned(), token.to_owned())).to_vec(),
    )
}

fn user(content: &str) -> Vec<Value> {
    vec![json!({ "role": "user", "content": content })]
}

/// Renders the cases of a file that Jinja2 has written, and tells those that come out otherwise.
fn wrong_cases(file: &str) -> Vec<String> {
    let reference: Value = serde_json::from_str(file).expect("the reference is JSON");
    let now = UNIX_EPOCH + Duration::from_secs(reference["now"].as_u64().expect("a time"));
    let cases = reference["cases"].as_array().expect("cases");
    assert!(cases.len() > 40);
    let mut wrong = Vec::new();
    for case in cases {
        let name = case["template"].as_str().expect("a name");
        let source = reference["templates"][name].as_str().expect("a template");
        let conversation = &reference["conversations"][case["conversation"].as_str().expect("one")];
        let input = ChatInput {
            messages: conversation["messages"].as_array().expect("messages"),
            tools: conversation.get("tools"),
            add_generation_prompt: conversation["add_generation_prompt"] == true,
            extra: conversation
                .get("extra")
                .and_then(Value::as_object)
                .cloned()
                .unwrap_or_default(),
            now: Some(now),
        };
        let rendered = template(source).and_then(|t| t.render(&input));
        let right = match (&rendered, case.get("text"), case.get("error")) {
            (Ok(text), Some(expected), _) => expected == text,
            (Err(error), None, Some(words)) => {
                let line = error.to_string();
                !line.contains('\n') && line.contains(words.as_str().unwrap_or_default())
            }
            _ => false,
        };
        if !right {
            wrong.push(format!("{name}, {}:\n  {rendered:?}\n  {case}", case["conversation"]));
        }
    }
    wrong
}

#[test]
fn renders_what_jinja_renders() {
    let wrong = wrong_cases(include_str!("data/chat.json"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Templates in the manner of well-known families, over conversations with and without tools.
#[test]
fn families_of_templates_render_as_in_jinja() {
    let wrong = wrong_cases(include_str!("data/chat_families.json"));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "needs templates from a package: scripts/chat_templates.py --public DIR"]
fn public_templates_render_as_in_jinja() {
    let file = std::env::var("CHAT_TEMPLATE_CASES").expect("the file of cases");
    let mut wrong = wrong_cases(&std::fs::read_to_string(file).expect("the cases"));
    // Where Python itself fails (it iterates over None, say), ours may go on.
    wrong.retain(|case| !case.contains("\"error\":\"\""));
    // What it adds to a string marked as safe, Jinja escapes as HTML: nothing that a model was taught.
    wrong.retain(|case| !case.starts_with("meetkai-functionary-medium-v3.1"));
    assert!(wrong.is_empty(), "{} are wrong\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn mistakes_and_refusals_are_one_line() {
    let broken = template("{% if x %}\n{{ y }").expect_err("a mistake");
    assert_eq!(broken.kind(), ErrorKind::Template);
    let line = broken.to_string();
    assert!(line.contains("line 2") && !line.contains('\n'), "{line}");

    let messages = user("x");
    let input = ChatInput { messages: &messages, ..ChatInput::default() };
    let failing = |source: &str| {
        let error = template(source).expect("it compiles").render(&input).expect_err("an error");
        assert!(!error.to_string().contains('\n'));
        error.to_string()
    };
    let refused = failing("{{ raise_exception('No system\nprompts here') }}");
    assert_eq!(refused, "the chat template refuses the conversation: No system prompts here");
    // The same from within a macro, where the template engine wraps the error.
    let refused = failing("{% macro m() %}{{ raise_exception('Not so') }}{% endmacro %}{{ m() }}");
    assert_eq!(refused, "the chat template refuses the conversation: Not so");
    assert!(failing("\n\n{{ nothing.at.all }}").contains("line 3"));
    assert!(failing("{{ messages | nosuchfilter }}").contains("nosuchfilter"));
    assert!(failing("{{ nothing | tojson }}").contains("tojson"));
    assert_eq!(
        failing("\n{{ 'x' + messages[0].tool_calls }}").split(": ").take(2).collect::<Vec<_>>(),
        ["the chat template cannot render this conversation", "line 2"]
    );
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
                   {% endfor %}{% endfor %}{% endfor %}";
    assert!(failing(endless).ends_with("does not come to an end with this conversation"));
}

#[test]
fn templates_and_special_tokens_come_from_the_file() {
    let tiny = TinyModel::new(Architecture::Qwen2, 0);
    let mut file = tiny.gguf();
    let text = |s: &str| GgufValue::String(s.into());
    file.unset("tokenizer.chat_template")
        .set("tokenizer.chat_template", text("{{ bos_token }}{{ messages[0].content }}"))
        .set("tokenizer.chat_template.tool_use", text("with tools{{ eos_token }}"));
    let gguf = Gguf::parse(file.build().into()).expect("a readable file");
    let template = ChatTemplate::from_gguf(&gguf).expect("readable").expect("a template");
    let messages = user("hi");
    let tools = json!([]);
    let mut input = ChatInput { messages: &messages, ..ChatInput::default() };
    assert_eq!(template.render(&input).as_deref(), Ok("<|endoftext|>hi"));
    input.tools = Some(&tools);
    assert_eq!(template.render(&input).as_deref(), Ok("with tools<|im_end|>"));

    file.unset("tokenizer.chat_template").unset("tokenizer.chat_template.tool_use");
    let gguf = Gguf::parse(file.build().into()).expect("a readable file");
    assert!(ChatTemplate::from_gguf(&gguf).expect("readable").is_none());
}

#[test]
fn hugging_face_directories() {
    let dir = tempfile::tempdir().expect("a directory");
    let write =
        |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("write");
    let render = || {
        let messages = user("hi");
        let template = ChatTemplate::from_hf_dir(dir.path()).expect("readable")?;
        Some(template.render(&ChatInput { messages: &messages, ..ChatInput::default() }))
    };
    assert!(render().is_none());
    let list = json!([{ "name": "default", "template": "A{{ bos_token }}" },
                      { "name": "tool_use", "template": "B" }]);
    for (template, expected) in [(json!("one {{ eos_token }}"), "one </s>"), (list, "A<s>")] {
        let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "</s>",
                             "chat_template": template });
        write("tokenizer_config.json", &config.to_string());
        assert_eq!(render(), Some(Ok(expected.to_owned())));
    }
    write("chat_template.jinja", "newer {{ messages[0].content }}");
    assert_eq!(render(), Some(Ok("newer hi".to_owned())));
}

#[test]
fn one_bos_whoever_writes_it() {
    let tiny = TinyModel::new(Architecture::Llama, 0);
    let mut file = tiny.gguf();
    file.unset("tokenizer.ggml.add_bos_token")
        .set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true));
    let gguf = Gguf::parse(file.build().into()).expect("a readable file");
    let tokenizer = model::Tokenizer::from_gguf(&gguf).expect("a tokenizer");
    let bos = tokenizer.bos().expect("a bos");
    for source in ["<|endoftext|>{{ messages[0].content }}", "{{ messages[0].content }}"] {
        let messages = user("hi");
        let input = ChatInput { messages: &messages, ..ChatInput::default() };
        let text = template(source).and_then(|t| t.render(&input)).expect("a rendering");
        let ids = tokenizer.with_bos(tokenizer.encode(&text, true).expect("ids"));
        assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1);
        assert_eq!(ids[0], bos);
    }
}
