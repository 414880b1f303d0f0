//! Calls written with tags in place of JSON, as Qwen3-Coder does:
//! `<function=name>` `<parameter=key>` value `</parameter>` … `</function>`.
//!
//! Values are bare text. What they mean stands in the tool's schema: text stays text, anything else is
//! JSON where it can be read as JSON.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::{ToolCall, in_name};

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END_OF_FUNCTION: &str = "</function>";
const END_OF_PARAMETER: &str = "</parameter>";

/// The types of every tool's parameters, by tool and parameter.
#[derive(Debug, Default)]
pub(super) struct Types(BTreeMap<String, BTreeMap<String, Vec<String>>>);

impl Types {
    /// From `tools` as in the OpenAI API.
    pub(super) fn of(tools: &Value) -> Self {
        let of_tool = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let types = properties.into_iter().flatten();
            Some((name, types.map(|(key, schema)| (key.clone(), types_in(schema))).collect()))
        };
        Self(tools.as_array().into_iter().flatten().filter_map(of_tool).collect())
    }

    /// The value as JSON.
    fn json_of(&self, tool: &str, key: &str, text: &str) -> String {
        let types = self.0.get(tool).and_then(|keys| keys.get(key));
        let has = |name: &str| types.is_some_and(|types| types.iter().any(|t| t == name));
        let is_null = matches!(text.trim(), "null" | "None") && has("null");
        // A parameter of no known type is text, too.
        if !is_null && (has("string") || types.is_none_or(Vec::is_empty)) {
            return Value::from(text).to_string();
        }
        match text.trim() {
            "True" => "true".to_owned(),
            "False" => "false".to_owned(),
            "None" => "null".to_owned(),
            text => match serde_json::from_str::<&RawValue>(text) {
                // As it is written: numbers of any length.
                Ok(raw) => raw.get().to_owned(),
                Err(_) => Value::from(text).to_string(),
            },
        }
    }
}

/// The types that a schema allows; none where it does not say.
fn types_in(schema: &Value) -> Vec<String> {
    let named = match schema.get("type") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(several)) => {
            several.iter().filter_map(|t| t.as_str().map(str::to_owned)).collect()
        }
        _ => Vec::new(),
    };
    let branches = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema.get(key));
    let branches = branches.filter_map(Value::as_array).flatten().flat_map(types_in);
    named.into_iter().chain(branches).collect()
}

/// How far a call has come.
#[derive(Debug)]
pub(super) enum Progress {
    /// More must come.
    Open,
    /// It ended before this byte of the text.
    Complete(usize),
    /// It is no call.
    Invalid,
}

/// Follows the tags of one call, in a text that grows.
#[derive(Debug, Default)]
pub(super) struct TaggedScanner {
    name: String,
    arguments: Vec<(String, String)>,
    /// The parameter whose value has begun, where it begins, and up to where it holds no end.
    value: Option<(String, usize, usize)>,
    /// Up to where the text is read.
    at: usize,
}

/// What comes next, white space aside.
enum Next<'a> {
    /// What follows the mark, and where that begins.
    Is(&'a str, usize),
    Other,
    /// There is too little text to tell.
    Open,
}

fn next<'a>(text: &'a str, at: usize, mark: &str) -> Next<'a> {
    let rest = text[at..].trim_start();
    match rest.strip_prefix(mark) {
        Some(after) => Next::Is(after, text.len() - after.len()),
        None if mark.starts_with(rest) => Next::Open,
        None => Next::Other,
    }
}

impl TaggedScanner {
    /// For a call that begins at `at`.
    pub(super) fn at(at: usize) -> Self {
        Self { at, ..Self::default() }
    }

    /// So much was taken away from the front of the text.
    pub(super) fn shift(&mut self, count: usize) {
        self.at -= count;
        if let Some((_, start, searched)) = &mut self.value {
            (*start, *searched) = (*start - count, *searched - count);
        }
    }

    pub(super) fn look(&mut self, text: &str) -> Progress {
        loop {
            if self.name.is_empty() {
                match next(text, self.at, FUNCTION) {
                    Next::Open => return Progress::Open,
                    Next::Other => return Progress::Invalid,
                    Next::Is(rest, start) => match rest.split_once('>') {
                        Some((name, _)) if !name.is_empty() && name.chars().all(in_name) => {
                            name.clone_into(&mut self.name);
                            self.at = start + name.len() + 1;
                        }
                        None if rest.chars().all(in_name) => return Progress::Open,
                        _ => return Progress::Invalid,
                    },
                }
            } else if self.value.is_some() {
                if !self.end_value(text) {
                    return Progress::Open;
                }
            } else {
                let (end, parameter) =
                    (next(text, self.at, END_OF_FUNCTION), next(text, self.at, PARAMETER));
                match (end, parameter) {
                    (Next::Is(_, end), _) => return Progress::Complete(end),
                    (_, Next::Is(rest, start)) => match rest.split_once('>') {
                        Some((key, _)) if !key.is_empty() && !key.contains(['<', '\n']) => {
                            let begin = start + key.len() + 1;
                            self.value = Some((key.to_owned(), begin, begin));
                        }
                        None if !rest.contains(['<', '\n']) => return Progress::Open,
                        _ => return Progress::Invalid,
                    },
                    (Next::Open, _) | (_, Next::Open) => return Progress::Open,
                    (Next::Other, Next::Other) => return Progress::Invalid,
                }
            }
        }
    }

    /// Takes the value to its end; `false` while that is not there. The mark of the end may stand in the
    /// value itself, so it counts only where the call goes on after it.
    fn end_value(&mut self, text: &str) -> bool {
        let Some((key, start, searched)) = &mut self.value else { return true };
        while let Some(found) = text[*searched..].find(END_OF_PARAMETER) {
            let end = *searched + found;
            let after = end + END_OF_PARAMETER.len();
            match (next(text, after, PARAMETER), next(text, after, END_OF_FUNCTION)) {
                (Next::Is(..), _) | (_, Next::Is(..)) => {
                    let value = &text[*start..end];
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    let value = value.strip_suffix('\n').unwrap_or(value).to_owned();
                    let key = std::mem::take(key);
                    self.arguments.retain(|(known, _)| *known != key);
                    self.arguments.push((key, value));
                    (self.value, self.at) = (None, after);
                    return true;
                }
                (Next::Open, _) | (_, Next::Open) => return false,
                (Next::Other, Next::Other) => *searched = after,
            }
        }
        // A part of the mark may be there already.
        let mut from = text.len().saturating_sub(END_OF_PARAMETER.len()).max(*searched);
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        *searched = from;
        false
    }

    /// The call, once it is complete.
    pub(super) fn call(&self, types: &Types) -> ToolCall {
        let one = |(key, text): &(String, String)| {
            format!("{}: {}", Value::from(key.as_str()), types.json_of(&self.name, key, text))
        };
        let all: Vec<String> = self.arguments.iter().map(one).collect();
        ToolCall { name: self.name.clone(), arguments: format!("{{{}}}", all.join(", ")) }
    }
}
