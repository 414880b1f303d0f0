//! Tool calls in text: what is one, what is not, and that pieces make no difference.

use model::tool_calls::{ToolCall, ToolCallParser, ToolDelta, ToolFormat};
use proptest::prelude::*;

/// Content and calls (name, arguments).
fn parse(format: ToolFormat, text: &str) -> (String, Vec<(String, String)>) {
    let (content, calls) = ToolCallParser::parse(format, text);
    (content, calls.into_iter().map(|call| (call.name, call.arguments)).collect())
}

/// A text, its content, and its calls (name, arguments).
type Case<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

fn check(format: ToolFormat, cases: &[Case<'_>]) {
    for (text, content, calls) in cases {
        let calls: Vec<_> = calls.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect();
        assert_eq!(parse(format, text), (content.to_string(), calls), "{text:?}");
    }
}

#[test]
fn hermes_and_qwen_calls() {
    let long = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"id\": 12345678901234567890123, \"x\": 1.10}}\n</tool_call>";
    check(
        ToolFormat::Hermes,
        &[
            ("Hello.", "Hello.", &[]),
            (" two\n lines \n", " two\n lines \n", &[]),
            // As Hermes and Qwen write it, and without the line breaks.
            (
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
                "",
                &[("f", "{\"a\": 1}")],
            ),
            ("<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>", "", &[("f", "{}")]),
            // Content before, several calls, content after.
            (
                "Let me see.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n\
                 {\"arguments\": {\"b\": [1, {\"c\": null}]}, \"name\": \"g\"}\n</tool_call>\nDone.",
                "Let me see.Done.",
                &[("f", "{}"), ("g", "{\"b\": [1, {\"c\": null}]}")],
            ),
            // The model forgot to close it, or was cut short while it did.
            ("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}", "", &[("f", "{}")]),
            ("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_", "", &[("f", "{}")]),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}",
                "",
                &[("f", "{}"), ("g", "{}")],
            ),
            // Marks inside of strings are text of the arguments; numbers stay as they are written.
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call> \\\"}<tool_call>\"}}</tool_call>",
                "",
                &[("f", "{\"x\": \"</tool_call> \\\"}<tool_call>\"}")],
            ),
            (long, "", &[("f", "{\"id\": 12345678901234567890123, \"x\": 1.10}")]),
            // No arguments, null, and the object as a string.
            ("<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]),
            ("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", "", &[("f", "{}")]),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
                "",
                &[("f", "{\"a\": 1}")],
            ),
            (
                "<tool_call>{\"name\": \"天気\", \"arguments\": {\"où\": \"京都😀\"}}",
                "",
                &[("天気", "{\"où\": \"京都😀\"}")],
            ),
        ],
    );
}

#[test]
fn what_is_no_call_comes_back_to_the_letter() {
    let whole = [
        "<tool_call>",
        "<tool_call>\n",
        "a <tool_call> b </tool_call> c",
        "</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\n</tool_call>\n",
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"none\"}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": 3, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": tru}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1,}}</tool_call>",
        "<tool_call>{\"name\": \"line\nbreak\"}</tool_call>",
        "<tool_call>[{\"name\": \"f\"}]</tool_call>",
        "<tool_cal",
        "a <",
        "<<tool_call",
        "{\"name\": \"f\", \"arguments\": {}}",
    ];
    for text in whole {
        assert_eq!(parse(ToolFormat::Hermes, text), (text.to_owned(), vec![]), "{text:?}");
    }
    // A call behind one that is malformed is still found.
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    for broken in ["<tool_call>{nothing</tool_call>", "<tool_call>", "<tool_call>{\"name\": \"f}"] {
        let (content, calls) = parse(ToolFormat::Hermes, &format!("{broken}\n{call}"));
        assert_eq!((content.as_str(), calls.len()), (broken, 1), "{broken}");
    }
    let deep = format!("<tool_call>{{\"name\": {}", "[".repeat(100_000));
    assert_eq!(parse(ToolFormat::Hermes, &deep), (deep.clone(), vec![]));
}

#[test]
fn llama3_calls() {
    check(
        ToolFormat::Llama3,
        &[
            ("Hello {\"name\": \"f\"}", "Hello {\"name\": \"f\"}", &[]),
            ("{\"name\": \"f\", \"parameters\": {\"a\": \"b\"}}", "", &[("f", "{\"a\": \"b\"}")]),
            (
                "\n {\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}\n",
                "",
                &[("f", "{}")],
            ),
            ("<|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "", &[("f", "{}")]),
            (
                "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"x\": 1}}",
                "",
                &[("f", "{}"), ("g", "{\"x\": 1}")],
            ),
            (
                "I look.\n<function=get.it-1>{\"a\": {}}</function> <function=g>{}</function>",
                "I look.",
                &[("get.it-1", "{\"a\": {}}"), ("g", "{}")],
            ),
            // Answers that merely are JSON or code.
            ("{\"answer\": 42}", "{\"answer\": 42}", &[]),
            ("{\"name\": \"Ada\", \"age\": {", "{\"name\": \"Ada\", \"age\": {", &[]),
            ("{ int x; }", "{ int x; }", &[]),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", &[]),
            ("<function=a b>{}", "<function=a b>{}", &[]),
            ("<function=>{}", "<function=>{}", &[]),
            ("<function=f>[]", "<function=f>[]", &[]),
            ("{", "{", &[]),
        ],
    );
}

#[test]
fn only_what_may_be_a_mark_is_held_back() {
    let mut parser = ToolCallParser::new(ToolFormat::Hermes);
    let content = |text: &str| vec![ToolDelta::Content(text.to_owned())];
    assert_eq!(parser.push("a <"), content("a"));
    assert_eq!(parser.push("tool"), []);
    assert_eq!(parser.push("box> b"), content(" <toolbox> b"));
    // What can no longer become a call is given at once, not at the end.
    assert_eq!(parser.push("<tool_call>{'"), content("<tool_call>{'"));
    assert_eq!(parser.push("<tool_call>{\"name\": \"f\", \"argu"), []);
    let call = ToolCall { name: "f".into(), arguments: "{}".into() };
    assert_eq!(parser.push("ments\": {}}"), [ToolDelta::Call(call)]);
    assert_eq!(parser.push("\n</tool"), []);
    assert_eq!(parser.push("_call>\n"), []);
    assert_eq!(parser.push("ok"), content("ok"));
    assert_eq!(parser.finish(), []);

    let mut parser = ToolCallParser::new(ToolFormat::Llama3);
    assert_eq!(parser.push("{\"nam"), []);
    assert_eq!(parser.push("es\": ["), content("{\"names\": ["));
}

#[test]
fn qwen3_coder_calls() {
    let tools = serde_json::json!([{ "type": "function", "function": { "name": "f", "parameters": {
        "type": "object", "properties": {
            "text": { "type": "string" }, "n": { "type": "integer" }, "on": { "type": "boolean" },
            "list": { "type": "array" }, "maybe": { "type": ["string", "null"] },
            "any": { "anyOf": [{ "type": "number" }, { "type": "object" }] }, "untyped": {},
        },
    } } }]);
    let of = |text: &str| {
        let mut parser = ToolCallParser::new(ToolFormat::Qwen3Coder).with_tools(&tools);
        let mut deltas = parser.push(text);
        deltas.extend(parser.finish());
        merged(deltas)
    };
    let call = |arguments: &str| {
        ToolDelta::Call(ToolCall { name: "f".into(), arguments: arguments.into() })
    };
    let content = |text: &str| ToolDelta::Content(text.into());
    let one = |key: &str, value: &str| {
        format!(
            "<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    for (key, value, json) in [
        // Text is text, to the letter, whatever it looks like.
        ("text", "42", "\"42\""),
        ("text", "null", "\"null\""),
        ("text", "  two\n\nlines \n", "\"  two\\n\\nlines \\n\""),
        ("text", "<b>\"é</parameter></b>", "\"<b>\\\"é</parameter></b>\""),
        ("text", "</function></tool_call>", "\"</function></tool_call>\""),
        ("text", "", "\"\""),
        ("n", "12345678901234567890123", "12345678901234567890123"),
        ("n", " 7 ", "7"),
        ("n", "seven", "\"seven\""),
        ("on", "True", "true"),
        ("on", "false", "false"),
        ("list", "[1, {\"a\": 2}]", "[1, {\"a\": 2}]"),
        ("maybe", "null", "null"),
        ("maybe", "x", "\"x\""),
        ("any", "1.50", "1.50"),
        ("any", "{\"a\": {}}", "{\"a\": {}}"),
        ("untyped", "1", "\"1\""),
        ("unknown", "1", "\"1\""),
    ] {
        assert_eq!(
            of(&one(key, value)),
            [call(&format!("{{\"{key}\": {json}}}"))],
            "{key} {value}"
        );
    }
    for (text, expected) in [
        ("<tool_call><function=f></function></tool_call>", vec![call("{}")]),
        // Without the outer mark, and several, with text around them.
        (
            "I look.\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n\
             <parameter=text>a</parameter>\n<parameter=n>1</parameter>\n</function>\n</tool_call>\nDone.",
            vec![
                content("I look."),
                call("{}"),
                call("{\"text\": \"a\", \"n\": 1}"),
                content("Done."),
            ],
        ),
        ("<tool_call>\n<function=f>\n</function>", vec![call("{}")]),
    ] {
        assert_eq!(of(text), expected, "{text}");
    }
    for text in [
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>a",
        "<tool_call>\n<function=f>\n<parameter=text>a</parameter>",
        "<tool_call>\n<function=f g>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nand <parameter=text>a</parameter></function>",
        "a < b and <tool",
    ] {
        assert_eq!(of(text), [content(text)], "{text}");
    }
}

#[test]
fn templates_tell_the_format() {
    for (source, format) in [
        ("{{ '<tool_call>' }}", Some(ToolFormat::Hermes)),
        ("{{ '<|python_tag|>' }}", Some(ToolFormat::Llama3)),
        ("<function=example_function_name>", Some(ToolFormat::Llama3)),
        ("<tool_call>\n<function=f>\n<parameter=a>", Some(ToolFormat::Qwen3Coder)),
        ("{{ messages }}", None),
    ] {
        assert_eq!(ToolFormat::of_template(source), format, "{source}");
    }
}

/// Content joined, and calls in their place.
fn merged(deltas: Vec<ToolDelta>) -> Vec<ToolDelta> {
    let mut all: Vec<ToolDelta> = Vec::new();
    for delta in deltas {
        match (all.last_mut(), delta) {
            (_, ToolDelta::Content(text)) if text.is_empty() => panic!("empty content"),
            (Some(ToolDelta::Content(before)), ToolDelta::Content(text)) => before.push_str(&text),
            (_, delta) => all.push(delta),
        }
    }
    all
}

/// Text out of what calls are made of, so that near misses are common.
fn nearly_calls() -> impl Strategy<Value = String> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<function=",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}",
        "{\"name\": \"g\", \"parameters\": {}}",
        "{\"name\":",
        " \"f\"",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        ",",
        ":",
        ";",
        "\n",
        " ",
        "<",
        "text",
        "é😀",
        "1.5e3",
        "null",
        "\"arguments\"",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..14)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_split_gives_the_same(
        text in nearly_calls(),
        format in proptest::sample::select(vec![ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Qwen3Coder]),
        cuts in proptest::collection::vec(0usize..200, 0..8),
    ) {
        let run = |pieces: &mut dyn Iterator<Item = &str>| {
            let mut parser = ToolCallParser::new(format);
            let mut deltas: Vec<ToolDelta> = pieces.flat_map(|piece| parser.push(piece)).collect();
            deltas.extend(parser.finish());
            merged(deltas)
        };
        let whole = run(&mut std::iter::once(text.as_str()));
        let mut letters = text.char_indices().map(|(i, c)| &text[i..i + c.len_utf8()]);
        prop_assert_eq!(&run(&mut letters), &whole);
        let mut ends: Vec<usize> =
            cuts.into_iter().filter(|&cut| text.is_char_boundary(cut)).collect();
        ends.push(text.len());
        ends.sort_unstable();
        let mut start = 0;
        let mut pieces = ends.iter().map(|&end| &text[std::mem::replace(&mut start, end)..end]);
        prop_assert_eq!(&run(&mut pieces), &whole);
        // Nothing is lost but what belongs to a call.
        if whole.iter().all(|delta| matches!(delta, ToolDelta::Content(_))) {
            let content: String = whole.iter().map(|delta| match delta {
                ToolDelta::Content(text) => text.as_str(),
                ToolDelta::Call(_) => "",
            }).collect();
            prop_assert_eq!(content, text);
        }
    }
}
