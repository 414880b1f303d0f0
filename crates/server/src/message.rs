//! The message of one answer in a chat: thoughts, content and calls of tools, told apart in the text.

use model::{FinishReason, ReasoningFormat, ReasoningParser, ToolCallParser, ToolDelta};
use serde_json::{Map, Value, json};

use crate::choice::Choice;

/// A message on its way. What was told is forgotten.
#[derive(Debug)]
pub struct Message {
    /// Beginning of the ids of its calls.
    id: String,
    thinking: Option<Thinking>,
    /// Where the model was told of tools.
    tools: Option<ToolCallParser>,
    content: String,
    calls: Vec<Value>,
    /// Calls so far, told ones included.
    call_count: usize,
    /// Where log-probabilities are wanted.
    logprobs: Option<Vec<Value>>,
    finish: Option<FinishReason>,
}

/// Thoughts before the content.
#[derive(Debug)]
struct Thinking {
    parser: ReasoningParser,
    is_wanted: bool,
    text: String,
}

impl Message {
    /// An empty one; `id` must be no other message's.
    pub fn new(id: String, tools: Option<ToolCallParser>, has_logprobs: bool) -> Self {
        Self {
            id,
            thinking: None,
            tools,
            content: String::new(),
            calls: Vec::new(),
            call_count: 0,
            logprobs: has_logprobs.then(Vec::new),
            finish: None,
        }
    }

    /// Tells thoughts apart, and leaves them out unless they are wanted.
    #[must_use]
    pub fn with_thoughts(
        mut self,
        format: Option<ReasoningFormat>,
        prompt: &str,
        is_wanted: bool,
    ) -> Self {
        let parser = format.map(|format| ReasoningParser::after(format, prompt));
        self.thinking = parser.map(|parser| Thinking { parser, is_wanted, text: String::new() });
        self
    }

    /// Takes more text in, and with `finish` its end.
    pub fn take(&mut self, text: &str, finish: Option<FinishReason>) {
        self.finish = finish;
        match &mut self.thinking {
            None => self.take_content(text),
            Some(thinking) => {
                let mut delta = thinking.parser.push(text);
                if finish.is_some() {
                    let rest = thinking.parser.finish();
                    delta.reasoning += &rest.reasoning;
                    delta.content += &rest.content;
                }
                if thinking.is_wanted {
                    thinking.text += &delta.reasoning;
                }
                self.take_content(&delta.content);
            }
        }
    }

    fn take_content(&mut self, text: &str) {
        let Some(parser) = &mut self.tools else {
            self.content += text;
            return;
        };
        let mut deltas = parser.push(text);
        if self.finish.is_some() {
            deltas.extend(parser.finish());
        }
        for delta in deltas {
            match delta {
                ToolDelta::Content(text) => self.content += &text,
                ToolDelta::Call(call) => {
                    self.calls.push(json!({
                        "index": self.call_count,
                        "id": format!("{}-{}", self.id, self.call_count),
                        "type": "function",
                        "function": { "name": call.name, "arguments": call.arguments },
                    }));
                    self.call_count += 1;
                }
            }
        }
    }

    /// Takes a token's log-probabilities in, where they are wanted.
    pub fn take_logprobs(&mut self, entry: impl FnOnce() -> Value) {
        if let Some(list) = &mut self.logprobs {
            list.push(entry());
        }
    }

    fn has_news(&self) -> bool {
        let logprobs = self.logprobs.as_ref().is_some_and(|list| !list.is_empty());
        let thoughts = self.thinking.as_ref().is_some_and(|t| !t.text.is_empty());
        !self.content.is_empty()
            || !self.calls.is_empty()
            || thoughts
            || logprobs
            || self.finish.is_some()
    }

    /// What has come since the last call, as an entry of a chunk's `choices`; `None` if nothing has.
    pub fn delta(&mut self, index: usize, choice: &Choice) -> Option<Value> {
        if !self.has_news() {
            return None;
        }
        let (text, calls) = (std::mem::take(&mut self.content), std::mem::take(&mut self.calls));
        let thoughts = self.thinking.as_mut().map(|t| std::mem::take(&mut t.text));
        let mut delta = Map::new();
        if let Some(thoughts) = thoughts.filter(|thoughts| !thoughts.is_empty()) {
            delta.insert("reasoning_content".into(), thoughts.into());
        }
        if !calls.is_empty() {
            delta.insert("tool_calls".into(), calls.into());
        }
        if !text.is_empty() || delta.is_empty() && self.finish.is_none() {
            delta.insert("content".into(), text.into());
        }
        Some(self.entry(index, "delta", delta, choice))
    }

    /// The whole message, as an entry of `choices`.
    pub fn whole(&mut self, index: usize, choice: &Choice) -> Value {
        let (text, mut calls) =
            (std::mem::take(&mut self.content), std::mem::take(&mut self.calls));
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let thoughts = self.thinking.as_mut().map(|t| std::mem::take(&mut t.text));
        let has_more = !calls.is_empty() || thoughts.as_ref().is_some_and(|t| !t.is_empty());
        let content = if text.is_empty() && has_more { Value::Null } else { text.into() };
        message.insert("content".into(), content);
        message.insert("refusal".into(), Value::Null);
        if let Some(thoughts) = thoughts {
            let thoughts = if thoughts.is_empty() { Value::Null } else { thoughts.into() };
            message.insert("reasoning_content".into(), thoughts);
        }
        if !calls.is_empty() {
            // Places are for streams.
            for call in calls.iter_mut().filter_map(Value::as_object_mut) {
                call.shift_remove("index");
            }
            message.insert("tool_calls".into(), calls.into());
        }
        self.entry(index, "message", message, choice)
    }

    fn entry(
        &mut self,
        index: usize,
        name: &str,
        message: Map<String, Value>,
        choice: &Choice,
    ) -> Value {
        let list = self.logprobs.as_mut().map(std::mem::take);
        let logprobs = list.map_or(Value::Null, |list| json!({ "content": list, "refusal": null }));
        let mut entry = json!({
            "index": index,
            name: message,
            "logprobs": logprobs,
            "finish_reason": self.finish_name(),
        });
        if let Some(stop) = choice.found_stop() {
            entry["stop_reason"] = stop.into();
        }
        entry
    }

    fn finish_name(&self) -> Option<&'static str> {
        match self.finish {
            Some(FinishReason::Stop) if self.call_count > 0 => Some("tool_calls"),
            finish => finish.map(FinishReason::name),
        }
    }
}
