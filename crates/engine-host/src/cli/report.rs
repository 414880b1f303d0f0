//! What `generate` prints: results as JSON lines, and the closing line of figures.

use std::time::Duration;

use resource_api::Resource;
use serde_json::{Map, Value, json};

use crate::engine::Engine;
use crate::request::{FinishReason, Token, Usage};

/// A finished request.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The prompt as it was run.
    pub prompt_ids: Vec<u32>,
    /// The prompt's tokens with their log-probabilities, where they were asked for.
    pub prompt_tokens: Vec<Option<Token>>,
    /// What another engine had generated.
    pub handed_over: Vec<u32>,
    /// What was generated.
    pub tokens: Vec<Token>,
    /// Its text, without control tokens.
    pub text: String,
    /// Why it ended; `None` for a failure.
    pub finish: Option<(FinishReason, Usage)>,
    /// Why it failed, if it did.
    pub error: Option<String>,
}

/// A result line.
pub fn line(id: &Value, outcome: &Outcome, logprobs: bool) -> Value {
    let mut fields = Map::new();
    fields.insert("id".into(), id.clone());
    if let Some(error) = &outcome.error {
        fields.insert("error".into(), json!({ "message": error }));
        return Value::Object(fields);
    }
    let own = outcome.tokens.iter().map(|t| t.id);
    let ids: Vec<u32> = outcome.handed_over.iter().copied().chain(own).collect();
    fields.insert("prompt_ids".into(), json!(outcome.prompt_ids));
    fields.insert("ids".into(), json!(ids));
    fields.insert("text".into(), json!(outcome.text));
    let (reason, usage) = outcome.finish.unwrap_or((FinishReason::Cancelled, Usage::default()));
    fields.insert("finish_reason".into(), json!(reason.name()));
    fields.insert(
        "usage".into(),
        json!({
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }),
    );
    if !outcome.prompt_tokens.is_empty() {
        let known = |t: &Option<Token>| t.as_ref().map_or(Value::Null, token);
        fields.insert("prompt_logprobs".into(), outcome.prompt_tokens.iter().map(known).collect());
    }
    if logprobs {
        fields.insert("logprobs".into(), outcome.tokens.iter().map(token).collect());
    }
    Value::Object(fields)
}

fn token(token: &Token) -> Value {
    let entry = |(id, logprob): (u32, f32)| json!({ "id": id, "logprob": number(logprob) });
    json!({
        "id": token.id,
        "logprob": number(token.logprob),
        "top": token.top.iter().copied().map(entry).collect::<Vec<_>>(),
    })
}

/// JSON has no minus infinity (a token that cannot be chosen); -9999 stands for it.
fn number(logprob: f32) -> f64 {
    if logprob.is_finite() { f64::from(logprob) } else { -9999.0 }
}

/// What each resource has taken, as lines of a table.
pub fn usage(engine: &Engine) -> Vec<String> {
    let steps = engine.stats().steps.max(1);
    let mut lines = vec![format!(
        "{:<20} {:<16} {:>10} {:>12} {:>10} {:>7}",
        "resource", "kind", "calls", "time", "per step", "panics"
    )];
    for u in engine.usage() {
        let per_step = u.time / u32::try_from(steps).unwrap_or(u32::MAX);
        let (time, per_step) = (format!("{:.1?}", u.time), format!("{per_step:.1?}"));
        let fault = if u.is_faulted { "  out of use" } else { "" };
        lines.push(format!(
            "{:<20} {:<16} {:>10} {time:>12} {per_step:>10} {:>7}{fault}",
            u.key, u.kind, u.calls, u.panics
        ));
    }
    lines
}

/// The closing line: rates, and pages at their most.
pub fn figures(engine: &Engine) -> String {
    let stats = engine.stats();
    let rate = |tokens: u64, time: Duration| match time.as_secs_f64() {
        0.0 => "-".to_string(),
        seconds => format!("{:.1} tokens/s", tokens as f64 / seconds),
    };
    let mut line = format!(
        "prompt {} ({} tokens), decode {} ({} tokens)",
        rate(stats.prefill_tokens, stats.prefill_time),
        stats.prefill_tokens,
        rate(stats.decode_tokens, stats.decode_time),
        stats.decode_tokens
    );
    for (key, used, total) in pages(engine) {
        line.push_str(&format!(", {key}: {used} of {total} pages used"));
    }
    if stats.offloads > 0 {
        line.push_str(&format!(", {} offloads", stats.offloads));
    }
    if stats.preemptions > 0 {
        line.push_str(&format!(", {} preemptions", stats.preemptions));
    }
    line
}

/// Resources that count pages say so in what `inspect` gives: `pages.peak` and `pages.total`.
fn pages(engine: &Engine) -> Vec<(String, u64, u64)> {
    let entries = engine.resources().entries().iter();
    let read = entries.filter_map(|entry| {
        let state: Value = serde_json::from_str(&entry.resource().inspect()).ok()?;
        let of = |name: &str| state.get("pages")?.get(name)?.as_u64();
        Some((entry.key.clone(), of("peak")?, of("total")?))
    });
    read.collect()
}
