//! `/v1/chat/completions`, and the same without generating: `/v1/chat/completions/render`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use model::{FinishReason, Tokenizer, ToolCallParser, ToolDelta, ToolFormat};
use serde_json::{Map, Value, json};

use crate::app::{self, App, Model};
use crate::choice::{Choice, Delta};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::generation::Generation;
use crate::logprobs;
use crate::options::ToolCalls;
use crate::prompt;
use crate::running::Running;
use crate::sse::{self, Chunks};

/// Most alternatives per token.
const MAX_TOP_LOGPROBS: u32 = 20;

/// Runs a request.
pub async fn run(app: Arc<App>, fields: Map<String, Value>) -> Result<Response> {
    let (answer, running, stream) = tokio::task::block_in_place(|| prepare(&app, fields))?;
    if stream {
        return sse::respond(answer, running).await;
    }
    collect(answer, running).await
}

/// The prompt that a request would be run with.
pub async fn render(app: Arc<App>, fields: Map<String, Value>) -> Result<Response> {
    tokio::task::block_in_place(|| {
        let model = app.model()?;
        let mut fields = Fields::new(fields);
        Generation::read(&mut fields, &app, model)?;
        let conversation = prompt::of_chat(&mut fields, model)?;
        lengths(&mut fields)?;
        fields.finish(app.options.unknown_fields)?;
        let prompt = json!({
            "prompt": conversation.text,
            "prompt_token_ids": conversation.ids,
            "count": conversation.ids.len(),
            "max_model_len": model.max_model_len,
        });
        Ok(Json(prompt).into_response())
    })
}

fn prepare(app: &App, fields: Map<String, Value>) -> Result<(Answer, Running, bool)> {
    let model = app.model_to_run()?;
    let mut fields = Fields::new(fields);
    let mut generation = Generation::read(&mut fields, app, model)?;
    let conversation = prompt::of_chat(&mut fields, model)?;
    let lengths = lengths(&mut fields)?;
    fields.finish(app.options.unknown_fields)?;

    if app.options.log_prompts {
        tracing::info!(prompt = conversation.text, "chat");
    }
    let max_tokens = lengths.max_tokens.unwrap_or_else(|| prompt::room(&conversation.ids, model));
    generation.request.logprobs = lengths.logprobs;
    let tool_format = conversation.tools.as_ref().and_then(|_| tool_format(app, model));
    // In some vocabularies the marks of a call are control tokens.
    generation.skip_special &= tool_format.is_none();
    let choices = (0..generation.n)
        .map(|_| Choice::new(&model.package, &generation, &conversation.ids))
        .collect();
    let requests = generation.requests(&conversation.ids, max_tokens).collect();
    let part = || Part {
        logprobs: lengths.logprobs.map(|_| Vec::new()),
        parser: tool_format.map(ToolCallParser::new),
        ..Part::default()
    };
    let answer = Answer {
        id: app.answer_id("chatcmpl"),
        created: app::now(),
        model: model.names[0].clone(),
        parts: (0..generation.n).map(|_| part()).collect(),
        include_usage: generation.include_usage,
        has_top: lengths.logprobs.is_some_and(|k| k > 0),
        tokenizer: model.package.tokenizer.clone(),
    };
    let running = Running::start(model, choices, requests, generation.n)?;
    Ok((answer, running, generation.stream))
}

/// How the model's calls of tools are found.
fn tool_format(app: &App, model: &Model) -> Option<ToolFormat> {
    match app.options.tool_calls {
        ToolCalls::AsText => None,
        ToolCalls::Written(format) => Some(format),
        ToolCalls::OfTemplate => model.package.chat_template().ok()?.tool_format(),
    }
}

/// The fields about numbers of tokens.
struct Lengths {
    max_tokens: Option<u32>,
    logprobs: Option<u32>,
}

fn lengths(fields: &mut Fields) -> Result<Lengths> {
    let newer = fields.count("max_completion_tokens")?;
    let older = fields.count("max_tokens")?;
    let max_tokens = newer.or(older);
    if max_tokens == Some(0) {
        let name = if newer.is_some() { "max_completion_tokens" } else { "max_tokens" };
        return Err(ApiError::field(name, format!("{name} must be at least 1, got 0")));
    }
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs")?;
    if let Some(k) = top.filter(|&k| k > MAX_TOP_LOGPROBS) {
        let message = format!("top_logprobs must be at most {MAX_TOP_LOGPROBS}, got {k}");
        return Err(ApiError::field("top_logprobs", message));
    }
    if top.is_some_and(|k| k > 0) && !logprobs {
        let message = "top_logprobs needs \"logprobs\": true";
        return Err(ApiError::field("top_logprobs", message));
    }
    let why = "this model takes and gives text only";
    fields.refuse_unless("modalities", why, |v| *v == json!(["text"]))?;
    fields.refuse_unless("audio", why, |_| false)?;
    fields.refuse_unless("web_search_options", "there is no web search", |_| false)?;
    fields.refuse_unless("prediction", "predicted outputs are not used", |_| false)?;
    fields.refuse_unless("verbosity", "the model cannot be told", |v| v == "medium")?;
    fields.refuse_unless("echo", "only completions have it", |v| v == false)?;
    // One call after the other is what a model writes; nothing makes it write one only.
    fields.refuse_unless(
        "parallel_tool_calls",
        "the model decides how many calls it makes",
        |v| v == true,
    )?;
    Ok(Lengths { max_tokens, logprobs: logprobs.then(|| top.unwrap_or(0)) })
}

/// One answer's part of the response.
#[derive(Debug, Default)]
struct Part {
    text: String,
    logprobs: Option<Vec<Value>>,
    finish: Option<FinishReason>,
    /// Where the model was told of tools.
    parser: Option<ToolCallParser>,
    /// Calls that have not been told yet.
    calls: Vec<Value>,
    /// Calls so far.
    call_count: usize,
}

impl Part {
    fn has_news(&self) -> bool {
        let logprobs = self.logprobs.as_ref().is_some_and(|list| !list.is_empty());
        !self.text.is_empty() || !self.calls.is_empty() || logprobs || self.finish.is_some()
    }

    /// Takes text in; `id` is the beginning of the ids of its calls.
    fn take_text(&mut self, text: &str, id: &str) {
        let Some(parser) = &mut self.parser else {
            self.text += text;
            return;
        };
        let mut deltas = parser.push(text);
        if self.finish.is_some() {
            deltas.extend(parser.finish());
        }
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => self.text += &text,
                ToolDelta::Call(call) => {
                    self.calls.push(json!({
                        "index": self.call_count,
                        "id": format!("{id}-{}", self.call_count),
                        "type": "function",
                        "function": { "name": call.name, "arguments": call.arguments },
                    }));
                    self.call_count += 1;
                }
            }
        }
    }

    fn finish_name(&self) -> Option<&'static str> {
        match self.finish {
            Some(FinishReason::Stop) if self.call_count > 0 => Some("tool_calls"),
            finish => finish.map(FinishReason::name),
        }
    }

    fn take_logprobs(&mut self) -> Value {
        self.logprobs
            .as_mut()
            .map_or(Value::Null, |list| json!({ "content": std::mem::take(list), "refusal": null }))
    }
}

/// A response on its way.
#[derive(Debug)]
struct Answer {
    id: String,
    created: u64,
    model: String,
    parts: Vec<Part>,
    include_usage: bool,
    has_top: bool,
    tokenizer: Arc<Tokenizer>,
}

impl Answer {
    fn frame(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn chunk_of(&self, choices: Vec<Value>) -> Value {
        let mut frame = self.frame("chat.completion.chunk", choices);
        if self.include_usage {
            frame["usage"] = Value::Null;
        }
        frame
    }

    fn take(&mut self, i: usize, delta: Delta) {
        let part = &mut self.parts[i];
        part.finish = delta.finish;
        let id = self.id.strip_prefix("chatcmpl-").unwrap_or(&self.id);
        part.take_text(&delta.text, &format!("call-{id}-{i}"));
        if let (Some(list), Some(token)) = (&mut part.logprobs, &delta.token) {
            list.push(logprobs::of_chat(&self.tokenizer, token, self.has_top));
        }
    }
}

impl Chunks for Answer {
    fn first(&mut self) -> VecDeque<Value> {
        let entry = |i: usize| {
            self.chunk_of(vec![json!({
                "index": i,
                "delta": { "role": "assistant", "content": "" },
                "logprobs": null,
                "finish_reason": null,
            })])
        };
        (0..self.parts.len()).map(entry).collect()
    }

    fn chunk(&mut self, i: usize, delta: Delta, choice: &Choice) -> Option<Value> {
        self.take(i, delta);
        let part = &mut self.parts[i];
        if !part.has_news() {
            return None;
        }
        let (text, calls) = (std::mem::take(&mut part.text), std::mem::take(&mut part.calls));
        let mut delta = Map::new();
        if !text.is_empty() || calls.is_empty() && part.finish.is_none() {
            delta.insert("content".into(), text.into());
        }
        if !calls.is_empty() {
            delta.insert("tool_calls".into(), calls.into());
        }
        let mut entry = json!({
            "index": i,
            "delta": delta,
            "logprobs": part.take_logprobs(),
            "finish_reason": part.finish_name(),
        });
        if let Some(stop) = choice.found_stop() {
            entry["stop_reason"] = stop.into();
        }
        Some(self.chunk_of(vec![entry]))
    }

    fn last(&mut self, usage: Value) -> Option<Value> {
        let mut frame = self.include_usage.then(|| self.chunk_of(Vec::new()))?;
        frame["usage"] = usage;
        Some(frame)
    }
}

async fn collect(mut answer: Answer, mut running: Running) -> Result<Response> {
    while let Some(next) = running.next().await {
        let (i, delta) = next?;
        answer.take(i, delta);
    }
    let parts = answer.parts.iter_mut().zip(running.choices()).enumerate();
    let choices = parts.map(|(i, (part, choice))| {
        let logprobs = part.take_logprobs();
        let (text, mut calls) = (std::mem::take(&mut part.text), std::mem::take(&mut part.calls));
        let mut message = json!({ "role": "assistant", "content": text, "refusal": null });
        if !calls.is_empty() {
            // Places are for streams.
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                call.shift_remove("index");
            }
            if text.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = calls.into();
        }
        let mut entry = json!({
            "index": i,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": part.finish_name(),
        });
        if let Some(stop) = choice.found_stop() {
            entry["stop_reason"] = stop.into();
        }
        entry
    });
    let choices = choices.collect();
    let mut frame = answer.frame("chat.completion", choices);
    frame["usage"] = running.usage();
    Ok(Json(frame).into_response())
}
