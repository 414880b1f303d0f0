//! `/v1/chat/completions`, and the same without generating: `/v1/chat/completions/render`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use model::{Tokenizer, ToolCallParser};
use serde_json::{Map, Value, json};

use crate::app::{self, App};
use crate::choice::{Choice, Delta};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::generation::Generation;
use crate::logprobs;
use crate::message::Message;
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
        form(&mut fields)?;
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
    let form = form(&mut fields)?;
    fields.finish(app.options.unknown_fields)?;

    if app.options.log_prompts {
        tracing::info!(prompt = conversation.text, "chat");
    }
    let max_tokens = form.max_tokens.unwrap_or_else(|| prompt::room(&conversation.ids, model));
    generation.request.logprobs = form.logprobs;
    let template = model.package.chat_template();
    let template = || template.as_ref().ok();
    let tool_format = app.options.tool_calls.or_of_template(|| template()?.tool_format());
    let tools = conversation.tools.as_ref().zip(tool_format);
    let reasoning = app.options.reasoning.or_of_template(|| template()?.reasoning_format());
    // In some vocabularies the marks of a call are control tokens.
    generation.skip_special &= tools.is_none();
    let choices = (0..generation.n)
        .map(|_| Choice::new(&model.package, &generation, &conversation.ids))
        .collect();
    let requests = generation.requests(&conversation.ids, max_tokens).collect();
    let id = app.answer_id("chatcmpl");
    let message = |i: usize| {
        let call_id = format!("call-{}-{i}", id.strip_prefix("chatcmpl-").unwrap_or(&id));
        let parser = tools.map(|(tools, format)| ToolCallParser::new(format).with_tools(tools));
        Message::new(call_id, parser, form.logprobs.is_some()).with_thoughts(
            reasoning,
            &conversation.text,
            form.thoughts,
        )
    };
    let answer = Answer {
        messages: (0..generation.n).map(message).collect(),
        id,
        created: app::now(),
        model: model.names[0].clone(),
        include_usage: generation.include_usage,
        has_top: form.logprobs.is_some_and(|k| k > 0),
        tokenizer: model.package.tokenizer.clone(),
    };
    let running = Running::start(model, choices, requests, generation.n)?;
    Ok((answer, running, generation.stream))
}

/// What a request says of the answer's form.
struct Form {
    max_tokens: Option<u32>,
    logprobs: Option<u32>,
    /// Whether what the model thinks before it answers is wanted.
    thoughts: bool,
}

fn form(fields: &mut Fields) -> Result<Form> {
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
    let thoughts = fields.boolean("include_reasoning")?.unwrap_or(true);
    Ok(Form { max_tokens, logprobs: logprobs.then(|| top.unwrap_or(0)), thoughts })
}

/// A response on its way.
#[derive(Debug)]
struct Answer {
    id: String,
    created: u64,
    model: String,
    messages: Vec<Message>,
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
        let message = &mut self.messages[i];
        message.take(&delta.text, delta.finish);
        if let Some(token) = &delta.token {
            message.take_logprobs(|| logprobs::of_chat(&self.tokenizer, token, self.has_top));
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
        (0..self.messages.len()).map(entry).collect()
    }

    fn chunk(&mut self, i: usize, delta: Delta, choice: &Choice) -> Option<Value> {
        self.take(i, delta);
        let entry = self.messages[i].delta(i, choice)?;
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
    let messages = answer.messages.iter_mut().zip(running.choices()).enumerate();
    let choices = messages.map(|(i, (message, choice))| message.whole(i, choice)).collect();
    let mut frame = answer.frame("chat.completion", choices);
    frame["usage"] = running.usage();
    Ok(Json(frame).into_response())
}
