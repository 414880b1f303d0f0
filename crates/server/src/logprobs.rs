//! Log-probabilities in the two forms of the API.

use model::{Token, Tokenizer};
use serde_json::{Map, Value, json};

/// JSON has no minus infinity (a token that cannot be chosen); this stands for it.
const FLOOR: f64 = -9999.0;

fn number(logprob: f32) -> f64 {
    if logprob.is_finite() { f64::from(logprob).max(FLOOR) } else { FLOOR }
}

/// `choices[].logprobs.content` of a chat: one entry per token.
pub fn of_chat(tokenizer: &Tokenizer, token: &Token, top: bool) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({
            "token": String::from_utf8_lossy(bytes),
            "logprob": number(logprob),
            "bytes": bytes,
        })
    };
    let mut value = entry(token.id, token.logprob);
    let best = token.top.iter().filter(|_| top);
    value["top_logprobs"] = best.map(|&(id, logprob)| entry(id, logprob)).collect();
    value
}

/// `choices[].logprobs` of a completion: columns, one entry per token.
#[derive(Debug, Default)]
pub struct Columns {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
    /// Characters of text before the next token.
    offset: usize,
}

impl Columns {
    /// Columns for a text of which `offset` characters have been told already.
    pub fn at(offset: usize) -> Self {
        Self { offset, ..Self::default() }
    }

    /// Adds a token; one without a log-probability is the first of a prompt.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, token: Option<&Token>) {
        let text = text_of(tokenizer, id);
        self.text_offset.push(json!(self.offset));
        self.offset += text.chars().count();
        self.tokens.push(json!(text));
        self.token_logprobs.push(token.map_or(Value::Null, |t| json!(number(t.logprob))));
        let top = token.map_or(Value::Null, |token| {
            let mut best = Map::new();
            for &(id, logprob) in &token.top {
                // Of tokens with one text the likeliest stays.
                best.entry(text_of(tokenizer, id)).or_insert_with(|| json!(number(logprob)));
            }
            // As in OpenAI's API, the token itself is always there.
            best.entry(text_of(tokenizer, token.id))
                .or_insert_with(|| json!(number(token.logprob)));
            Value::Object(best)
        });
        self.top_logprobs.push(top);
    }

    /// Characters of text so far.
    pub fn offset(&self) -> usize {
        self.offset
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The object, and empty columns that go on from it.
    pub fn take(&mut self) -> Value {
        let rest = Self::at(self.offset);
        let done = std::mem::replace(self, rest);
        json!({
            "tokens": done.tokens,
            "token_logprobs": done.token_logprobs,
            "top_logprobs": done.top_logprobs,
            "text_offset": done.text_offset,
        })
    }
}

/// A token's text; bytes that are no text of their own are written `bytes:\xf0\x9f`.
fn text_of(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let hex: String = bytes.iter().map(|b| format!("\\x{b:02x}")).collect();
            format!("bytes:{hex}")
        }
    }
}
