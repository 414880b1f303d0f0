//! `/v1/completions`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use model::{FinishReason, Tokenizer};
use serde_json::{Map, Value, json};

use crate::app::{self, App};
use crate::choice::{Choice, Delta};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::generation::Generation;
use crate::logprobs::Columns;
use crate::prompt;
use crate::running::Running;
use crate::sse::{self, Chunks};

/// Tokens that are generated unless a request says how many, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Most alternatives per token.
const MAX_LOGPROBS: u32 = 20;

/// Runs a request.
pub async fn run(app: Arc<App>, fields: Map<String, Value>) -> Result<Response> {
    let (answer, running, stream) = tokio::task::block_in_place(|| prepare(&app, fields))?;
    if stream {
        return sse::respond(answer, running).await;
    }
    collect(answer, running).await
}

fn prepare(app: &App, fields: Map<String, Value>) -> Result<(Answer, Running, bool)> {
    let model = app.model_to_run()?;
    let mut fields = Fields::new(fields);
    let mut generation = Generation::read(&mut fields, app, model)?;
    let prompts = prompt::of_completion(&mut fields, model)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let logprobs = fields.count("logprobs")?;
    if let Some(k) = logprobs.filter(|&k| k > MAX_LOGPROBS) {
        let message = format!("logprobs must be at most {MAX_LOGPROBS}, got {k}");
        return Err(ApiError::field("logprobs", message));
    }
    let max_tokens = fields.count("max_tokens")?.unwrap_or(DEFAULT_MAX_TOKENS);
    fields.refuse_unless("suffix", "text is completed at its end only", |v| v == "")?;
    fields.finish(app.options.unknown_fields)?;

    let count = prompts.len() * generation.n;
    if count > app.options.max_choices {
        let most = app.options.max_choices;
        let message = format!("{count} answers (prompts times n) are more than {most}");
        return Err(ApiError::field("prompt", message));
    }
    generation.request.logprobs = logprobs;
    generation.request.prompt_logprobs = logprobs.filter(|_| echo);
    let (mut choices, mut requests) = (Vec::new(), Vec::new());
    for prompt in &prompts {
        for request in generation.requests(prompt, max_tokens.max(1)) {
            let choice = Choice::new(&model.package, &generation, prompt);
            choices.push(if max_tokens == 0 { choice.prompt_only() } else { choice });
            requests.push(request);
        }
    }
    let tokenizer = model.package.tokenizer.clone();
    let echoed = |i: usize| {
        let ids = &prompts[i / generation.n];
        (echo, ids.clone())
    };
    let parts = (0..count).map(|i| Part::new(echoed(i), logprobs.is_some(), &tokenizer)).collect();
    let answer = Answer {
        id: app.answer_id("cmpl"),
        created: app::now(),
        model: model.names[0].clone(),
        parts,
        include_usage: generation.include_usage,
        tokenizer,
    };
    let running = Running::start(model, choices, requests, generation.n)?;
    Ok((answer, running, generation.stream))
}

/// One answer's part of the response.
#[derive(Debug)]
struct Part {
    text: String,
    columns: Option<Columns>,
    finish: Option<FinishReason>,
    /// The prompt, where it is wanted back and has not been told yet.
    echo: Option<Vec<u32>>,
}

impl Part {
    fn new((echo, ids): (bool, Vec<u32>), logprobs: bool, tokenizer: &Tokenizer) -> Self {
        let text = if echo { tokenizer.decode(&ids, true) } else { String::new() };
        let columns = logprobs.then(Columns::default);
        Self { text, columns, finish: None, echo: echo.then_some(ids) }
    }

    fn take(&mut self, delta: Delta, tokenizer: &Tokenizer) {
        if let (Some(tokens), Some(columns)) = (&delta.prompt, &mut self.columns) {
            for (id, token) in self.echo.take().iter().flatten().zip(tokens) {
                columns.push(tokenizer, *id, token.as_ref());
            }
        }
        if let (Some(token), Some(columns)) = (&delta.token, &mut self.columns) {
            columns.push(tokenizer, token.id, Some(token));
        }
        self.text += &delta.text;
        self.finish = delta.finish;
    }

    /// What has come since the last call, as an entry of `choices`.
    fn entry(&mut self, index: usize, choice: &Choice) -> Value {
        let mut entry = json!({
            "index": index,
            "text": std::mem::take(&mut self.text),
            "logprobs": self.columns.as_mut().map(Columns::take),
            "finish_reason": self.finish.map(FinishReason::name),
        });
        if let Some(stop) = choice.found_stop() {
            entry["stop_reason"] = stop.into();
        }
        entry
    }

    fn has_news(&self) -> bool {
        let columns = self.columns.as_ref().is_some_and(|columns| !columns.is_empty());
        !self.text.is_empty() || columns || self.finish.is_some()
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
    tokenizer: Arc<Tokenizer>,
}

impl Answer {
    fn frame(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

impl Chunks for Answer {
    fn first(&mut self) -> VecDeque<Value> {
        VecDeque::new()
    }

    fn chunk(&mut self, i: usize, delta: Delta, choice: &Choice) -> Option<Value> {
        let part = &mut self.parts[i];
        part.take(delta, &self.tokenizer);
        let entry = part.has_news().then(|| part.entry(i, choice))?;
        let mut frame = self.frame(vec![entry]);
        if self.include_usage {
            frame["usage"] = Value::Null;
        }
        Some(frame)
    }

    fn last(&mut self, usage: Value) -> Option<Value> {
        let mut frame = self.include_usage.then(|| self.frame(Vec::new()))?;
        frame["usage"] = usage;
        Some(frame)
    }
}

async fn collect(mut answer: Answer, mut running: Running) -> Result<Response> {
    while let Some(next) = running.next().await {
        let (i, delta) = next?;
        answer.parts[i].take(delta, &answer.tokenizer);
    }
    let parts = answer.parts.iter_mut().zip(running.choices()).enumerate();
    let choices = parts.map(|(i, (part, choice))| part.entry(i, choice)).collect();
    let mut frame = answer.frame(choices);
    frame["usage"] = running.usage();
    Ok(Json(frame).into_response())
}
