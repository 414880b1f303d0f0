//! Settings of the server.

use std::net::IpAddr;
use std::time::Duration;

use model::{ReasoningFormat, ToolFormat};

/// Settings, with defaults that are safe on a developer's machine.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerOptions {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 for one that is free.
    pub port: u16,
    /// Keys that requests must carry one of (`Authorization: Bearer KEY`); empty: none is needed.
    pub api_keys: Vec<ApiKey>,
    /// What `/v1/models` calls the model, and what requests may name; empty: the model file's name.
    pub served_model_name: Vec<String>,
    /// Requests that may wait beside those that a step holds; more are answered with 429.
    pub max_waiting: usize,
    /// Answers that one HTTP request may ask for: prompts times `n`.
    pub max_choices: usize,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Largest request head, in bytes.
    pub max_header_bytes: usize,
    /// Connections at one time.
    pub max_connections: usize,
    /// Time for a request's head, and again for its body, to arrive; `None`: any.
    pub read_timeout: Option<Duration>,
    /// Time that a client may take nothing of an answer that waits for it; `None`: any.
    pub write_timeout: Option<Duration>,
    /// Longest that a generation may take, waiting included; requests may ask for less.
    pub request_timeout: Option<Duration>,
    /// Tokens that wait for a slow reader before its request is ended.
    pub stream_buffer: usize,
    /// How long running requests may go on after SIGTERM.
    pub drain_timeout: Duration,
    /// Origins that browsers may call from; empty: none; `*`: all.
    pub cors_origins: Vec<String>,
    /// Whether prompts and answers are logged, at level `info`.
    pub log_prompts: bool,
    /// What happens to fields that the server does not know.
    pub unknown_fields: UnknownFields,
    /// How calls of tools are found in what the model writes.
    pub tool_calls: Format<ToolFormat>,
    /// How the model's thoughts are told apart from its answer.
    pub reasoning: Format<ReasoningFormat>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 8000,
            api_keys: Vec::new(),
            served_model_name: Vec::new(),
            max_waiting: 256,
            max_choices: 64,
            max_body_bytes: 4 << 20,
            max_header_bytes: 32 << 10,
            max_connections: 1024,
            read_timeout: Some(Duration::from_secs(30)),
            write_timeout: Some(Duration::from_secs(60)),
            request_timeout: None,
            stream_buffer: 4096,
            drain_timeout: Duration::from_secs(30),
            cors_origins: Vec::new(),
            log_prompts: false,
            unknown_fields: UnknownFields::Refuse,
            tool_calls: Format::OfTemplate,
            reasoning: Format::OfTemplate,
        }
    }
}

/// In which format something stands in what the model writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format<T> {
    /// In the one that the model's chat template shows.
    OfTemplate,
    /// It is not looked for, and stays text.
    AsText,
    /// In this one.
    Is(T),
}

impl<T> Format<T> {
    /// The format; `None` where nothing is looked for.
    pub fn or_of_template(self, of_template: impl FnOnce() -> Option<T>) -> Option<T> {
        match self {
            Self::OfTemplate => of_template(),
            Self::AsText => None,
            Self::Is(format) => Some(format),
        }
    }
}

/// A key. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(pub String);

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

/// What happens to a request with a field that the server does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// It is refused, naming the nearest field that is known.
    #[default]
    Refuse,
    /// The field is left out.
    Ignore,
}

impl UnknownFields {
    /// The names used in configurations.
    pub const NAMES: [(&'static str, Self); 2] =
        [("refuse", Self::Refuse), ("ignore", Self::Ignore)];
}
