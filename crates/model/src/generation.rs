//! A generation as its caller sees it: what is asked for, and what is reported.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

/// What a caller asks for.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate; at least 1.
    pub max_tokens: u32,
    /// Until so many are generated, no token that ends the generation is chosen.
    pub min_tokens: u32,
    /// Whether end-of-generation tokens are tokens like any other.
    pub ignore_eos: bool,
    /// Further tokens that end the generation.
    pub stop_token_ids: Vec<u32>,
    /// How many of the best tokens to report with each generated one.
    pub logprobs: Option<u32>,
    /// How many of the best tokens to report with each token of the prompt. What a cache holds of the
    /// prompt is computed again then.
    pub prompt_logprobs: Option<u32>,
    /// How long the request may take, waiting included; then it fails and its memory is free within a
    /// step.
    pub timeout: Option<Duration>,
    /// Sampling settings that the request names (`temperature`, `top_k`, ...); they go to the
    /// sampler of the node, which has defaults for the rest.
    pub sampling: Map<String, Value>,
    /// Per-request config of other resources, by resource key.
    pub overrides: BTreeMap<String, Map<String, Value>>,
    /// Only requests with the same salt read what caches hold of each other's prompts.
    pub cache_salt: String,
    /// Name of the session that the request goes on with, and that what it computes is kept for. Where its
    /// tokens differ from the session's it is computed from there on.
    pub session: Option<String>,
    /// The streams that its tokens go to; default: `main`.
    pub labels: RequestLabels,
}

/// The labels of a request's streams. A step of a node extends those under (node, walk), or else under
/// the node, or else [`needed`](Self::needed), or else `main`: each by the same tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestLabels {
    /// Of every step that the other two do not name; empty for `main` alone.
    pub needed: Vec<String>,
    /// By node.
    pub per_node: BTreeMap<String, Vec<String>>,
    /// By node, then walk. In the walk `prefill` a request's prompt is computed, in `decode` what
    /// follows it.
    pub per_node_walk: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl RequestLabels {
    /// The labels of a step of `node` in `walk`.
    pub fn of<'a>(&'a self, node: &str, walk: &str) -> impl Iterator<Item = &'a str> {
        let by_walk = self.per_node_walk.get(node).and_then(|walks| walks.get(walk));
        let named = by_walk.or_else(|| self.per_node.get(node)).unwrap_or(&self.needed);
        let main = named.is_empty().then_some("main");
        named.iter().map(String::as_str).chain(main)
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-generation or stop token.
    Stop,
    /// `max_tokens` or the model's context is used up.
    Length,
    /// The caller cancelled.
    Cancelled,
}

impl FinishReason {
    /// As in OpenAI's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One token, generated or, where its log-probability was asked for, of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probability under the model's own distribution.
    pub logprob: f32,
    /// The best tokens of that position with theirs; empty unless asked for.
    pub top: Vec<(u32, f32)>,
}

/// How many tokens a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Tokens of the prompt that were read from a cache and not computed.
    pub cached_tokens: u32,
}
