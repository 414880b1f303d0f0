//! Requests as `generate` reads them: one JSON object each.

use std::path::Path;
use std::time::Duration;

use model::{ChatInput, ModelPackage};
use serde::Deserialize;
use serde_json::{Map, Value};
use server::generation::SAMPLING;

use crate::engine::Handover;
use crate::error::{Error, Result};
use crate::labels::RequestLabels;
use crate::request::GenerateRequest;
use crate::suggest;

/// Fields that are not the sampler's.
const OWN: [&str; 18] = [
    "id",
    "prompt",
    "messages",
    "prompt_ids",
    "parse_special",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "timeout",
    "tools",
    "overrides",
    "labels",
    "handover",
    "session",
];

/// One request of a file.
#[derive(Debug)]
pub struct Job {
    /// The line's own id; its number, from 0, when it has none.
    pub id: Value,
    /// What to run, or why it cannot.
    pub request: Result<GenerateRequest>,
    /// Texts that end the answer, and are no part of it.
    pub stop: Vec<String>,
    /// What another engine has handed over.
    pub handover: Option<Handover>,
    /// All fields but the id, defaults included.
    pub fields: Map<String, Value>,
    /// Its line in the file, from 1.
    line: usize,
}

impl Job {
    /// An error of this request with the place that a person looks for.
    pub fn error(&self, e: &Error) -> String {
        format!("line {}: {e}", self.line)
    }
}

/// Reads a file of requests. A line that is wrong fails alone, naming its number.
///
/// # Errors
/// When the file cannot be read.
pub fn read_file(
    path: &Path,
    defaults: &Map<String, Value>,
    model: &ModelPackage,
) -> Result<Vec<Job>> {
    let bytes = std::fs::read(path)
        .map_err(|e| Error::usage(format!("cannot read {}: {e}", path.display())))?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let lines = bytes.split(|&b| b == b'\n').enumerate();
    let blank = |line: &[u8]| line.iter().all(u8::is_ascii_whitespace);
    let jobs = lines.filter(|(_, line)| !blank(line)).enumerate().map(|(at, (number, line))| {
        let (mut id, mut stop) = (Value::from(at), Vec::new());
        let (mut handover, mut merged) = (None, Map::new());
        let request = parse_line(line).and_then(|mut fields| {
            if let Some(own) = fields.remove("id") {
                id = own;
            }
            let mut all = defaults.clone();
            all.extend(fields);
            stop = stops(&all)?;
            handover = all.get("handover").map(Handover::from_json).transpose()?;
            merged.clone_from(&all);
            request(all, model)
        });
        Job { id, request, stop, handover, fields: merged, line: number + 1 }
    });
    Ok(jobs.collect())
}

fn parse_line(line: &[u8]) -> Result<Map<String, Value>> {
    let text = std::str::from_utf8(line)
        .map_err(|e| Error::usage(format!("is not UTF-8 (byte {})", e.valid_up_to() + 1)))?;
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(Error::usage("is not a JSON object")),
        Err(e) => Err(Error::usage(format!("is not JSON: {}", at_column(&e)))),
    }
}

/// serde's text without its line number, which would be 1 on every line of the file.
fn at_column(e: &serde_json::Error) -> String {
    let text = e.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    format!("{what} at column {}", e.column())
}

/// A request from its fields.
///
/// # Errors
/// The first field that is unknown, of the wrong type, or missing.
pub fn request(fields: Map<String, Value>, model: &ModelPackage) -> Result<GenerateRequest> {
    let known = || OWN.into_iter().chain(SAMPLING);
    if let Some(name) = fields.keys().find(|name| !known().any(|k| k == name.as_str())) {
        let hint = suggest::did_you_mean(name, known());
        return Err(Error::usage(format!("unknown field {name:?}{hint}")));
    }
    let mut request = GenerateRequest {
        prompt: prompt(&fields, model)?,
        max_tokens: number(&fields, "max_tokens")?.unwrap_or(256),
        min_tokens: number(&fields, "min_tokens")?.unwrap_or(0),
        ignore_eos: field(&fields, "ignore_eos", "true or false", Value::as_bool)?.unwrap_or(false),
        stop_token_ids: ids(&fields, "stop_token_ids")?.unwrap_or_default(),
        logprobs: number(&fields, "logprobs")?,
        session: field(&fields, "session", "a string", |v| v.as_str().map(str::to_owned))?,
        prompt_logprobs: number(&fields, "prompt_logprobs")?,
        timeout: field(&fields, "timeout", "seconds above 0", |v| {
            v.as_f64().filter(|&s| s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok())
        })?,
        ..GenerateRequest::default()
    };
    let is_set = |v: &Value| !v.is_null();
    for name in SAMPLING {
        if let Some(value) = fields.get(name).filter(|v| is_set(v)) {
            request.sampling.insert(name.into(), value.clone());
        }
    }
    let overrides =
        field(&fields, "overrides", "an object of objects", |v| v.as_object().cloned())?;
    for (key, config) in overrides.unwrap_or_default() {
        let Value::Object(config) = config else {
            return Err(Error::usage(format!("overrides.{key} must be an object")));
        };
        request.overrides.insert(key, config);
    }
    if let Some(labels) = fields.get("labels").filter(|v| is_set(v)) {
        request.labels =
            RequestLabels::deserialize(labels).map_err(|e| Error::usage(format!("labels: {e}")))?;
    }
    Ok(request)
}

/// Token ids of whichever one of the three kinds of prompt is there.
fn prompt(fields: &Map<String, Value>, model: &ModelPackage) -> Result<Vec<u32>> {
    let given: Vec<&str> = ["prompt", "messages", "prompt_ids"]
        .into_iter()
        .filter(|name| fields.get(*name).is_some_and(|v| !v.is_null()))
        .collect();
    let [name] = given[..] else {
        let what = if given.is_empty() { "none is there".into() } else { given.join(" and ") };
        return Err(Error::usage(format!(
            "needs one of \"prompt\", \"messages\" and \"prompt_ids\": {what}"
        )));
    };
    let parse_special =
        field(fields, "parse_special", "true or false", Value::as_bool)?.unwrap_or(false);
    let tokenizer = &model.tokenizer;
    let encode = |text: &str, special| {
        tokenizer.encode(text, special).map_err(|e| Error::usage(e.to_string()))
    };
    match name {
        "prompt" => {
            let text = field(fields, name, "a string", |v| v.as_str().map(str::to_owned))?;
            Ok(tokenizer.with_bos(encode(&text.unwrap_or_default(), parse_special)?))
        }
        "messages" => {
            let messages = field(fields, name, "an array", |v| v.as_array().cloned())?;
            let template = model.chat_template().map_err(|e| Error::usage(e.to_string()))?;
            let input = ChatInput {
                messages: &messages.unwrap_or_default(),
                tools: fields.get("tools").filter(|v| !v.is_null()),
                add_generation_prompt: true,
                ..ChatInput::default()
            };
            let text = template.render(&input).map_err(|e| Error::usage(e.to_string()))?;
            encode(&text, true)
        }
        _ => Ok(ids(fields, name)?.unwrap_or_default()),
    }
}

/// `stop`: a text, or an array of texts.
fn stops(fields: &Map<String, Value>) -> Result<Vec<String>> {
    let stops = field(fields, "stop", "a string or an array of strings", |v| match v {
        Value::String(stop) => Some(vec![stop.clone()]),
        Value::Array(list) => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        _ => None,
    })?;
    Ok(stops.unwrap_or_default())
}

fn ids(fields: &Map<String, Value>, name: &str) -> Result<Option<Vec<u32>>> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    let Some(value) = fields.get(name).filter(|v| !v.is_null()) else { return Ok(None) };
    let Some(list) = value.as_array() else {
        return Err(Error::usage(format!("{name} must be an array of token ids")));
    };
    match list.iter().find(|v| id(v).is_none()) {
        Some(wrong) => Err(Error::usage(format!("{name}: {wrong} is not a token id"))),
        None => Ok(Some(list.iter().filter_map(id).collect())),
    }
}

fn number(fields: &Map<String, Value>, name: &str) -> Result<Option<u32>> {
    let what = "a whole number up to 4294967295";
    field(fields, name, what, |v| v.as_u64().and_then(|n| u32::try_from(n).ok()))
}

/// A field by type; `None` when it is absent or null.
fn field<T>(
    fields: &Map<String, Value>,
    name: &str,
    what: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>> {
    match fields.get(name).filter(|v| !v.is_null()) {
        None => Ok(None),
        Some(value) => read(value)
            .map(Some)
            .ok_or_else(|| Error::usage(format!("{name} must be {what}, got {value}"))),
    }
}
