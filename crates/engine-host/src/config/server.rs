//! `[server]` and `[log]`: how requests come in over the network, and what is told of it.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use ::server::UnknownFields;

use super::secret::Secrets;
use crate::document::{self, Problem};
use crate::error::{Error, Result};

/// `[server]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address to listen on; default `127.0.0.1`.
    pub host: IpAddr,
    /// Port to listen on, 0 for any that is free; default 8000.
    pub port: u16,
    /// Names that requests may call the model by; default none: the name of the model's file.
    pub served_model_name: Vec<String>,
    /// Keys that are written in the configuration; default none. See [`Self::all_keys`].
    pub api_keys: Secrets,
    /// A file with further keys, one a line; default none.
    pub api_key_file: Option<PathBuf>,
    /// Requests that may wait beside those that a step holds; default 256.
    pub max_waiting: usize,
    /// Answers that one HTTP request may ask for, prompts times `n`; default 64.
    pub max_choices: usize,
    /// Connections at once; default 1024.
    pub max_connections: usize,
    /// Bytes of a request's body at most; default 4 MiB.
    pub max_body_bytes: usize,
    /// Bytes of a request's head at most; default 32 KiB.
    pub max_header_bytes: usize,
    /// Seconds that a request's head, and again its body, may take to arrive, 0 for any
    /// time; default 30.
    pub read_timeout: u64,
    /// Seconds that a client may take nothing of an answer, 0 for any time; default 60.
    pub write_timeout: u64,
    /// Seconds that a request may take, 0 for any time; default 0.
    pub request_timeout: u64,
    /// Tokens kept for a client that reads slowly; default 4096.
    pub stream_buffer: usize,
    /// Seconds that running requests have to finish after SIGTERM; default 30.
    pub drain_timeout: u64,
    /// Origins whose pages may use the server from a browser; default none.
    pub cors_origins: Vec<String>,
    /// Format of the model's tool calls; default `auto`.
    pub tool_parser: ToolParser,
    /// Format of what the model thinks before it answers; default `auto`.
    pub reasoning_parser: ReasoningParser,
    /// What happens to a request with a field that the server does not know; default `refuse`.
    pub unknown_fields: UnknownFields,
    /// Whether prompts and completions are logged; default off.
    pub log_prompts: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 8000,
            served_model_name: Vec::new(),
            api_keys: Secrets::default(),
            api_key_file: None,
            max_waiting: 256,
            max_choices: 64,
            max_connections: 1024,
            max_body_bytes: 4 << 20,
            max_header_bytes: 32 << 10,
            read_timeout: 30,
            write_timeout: 60,
            request_timeout: 0,
            stream_buffer: 4096,
            drain_timeout: 30,
            cors_origins: Vec::new(),
            tool_parser: ToolParser::Auto,
            reasoning_parser: ReasoningParser::Auto,
            unknown_fields: UnknownFields::Refuse,
            log_prompts: false,
        }
    }
}

/// A file of keys is short; a larger one is the wrong file.
const MAX_KEY_FILE_BYTES: u64 = 1 << 20;

impl ServerConfig {
    /// The keys of the configuration and of its key file. None at all: no key is asked for.
    ///
    /// # Errors
    /// A key file that cannot be read, or that has no key in it: a server that then let everybody in
    /// would not be what was asked for.
    pub fn all_keys(&self) -> Result<Secrets> {
        let mut keys = self.api_keys.clone();
        let Some(path) = &self.api_key_file else { return Ok(keys) };
        let fail = |problem: Problem| Error::Config(problem.into());
        let text = document::read_text(path, MAX_KEY_FILE_BYTES).map_err(fail)?;
        let before = keys.len();
        for line in text.lines().map(str::trim) {
            if !line.is_empty() && !line.starts_with('#') {
                keys.push(line);
            }
        }
        if keys.len() == before {
            let message = "api_key_file has no key in it";
            return Err(fail(Problem::of_file(document::shown(path), message)));
        }
        Ok(keys)
    }
}

/// Format of a model's tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ToolParser {
    /// What the chat template shows.
    Auto,
    /// Tool calls stay text.
    None,
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// A JSON object with `name` and `parameters`, or `<function=name>{…}</function>`: Llama 3.
    Llama3,
    /// `<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder.
    Qwen3Coder,
}

impl ToolParser {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("auto", Self::Auto),
        ("none", Self::None),
        ("hermes", Self::Hermes),
        ("qwen", Self::Hermes),
        ("llama3", Self::Llama3),
        ("qwen3_coder", Self::Qwen3Coder),
    ];
}

/// Format of what a model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReasoningParser {
    /// What the chat template shows.
    Auto,
    /// Thoughts stay text.
    None,
    /// `<think>…</think>`: DeepSeek-R1, Qwen3.
    Think,
}

impl ReasoningParser {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("auto", Self::Auto),
        ("none", Self::None),
        ("think", Self::Think),
        ("qwen3", Self::Think),
        ("deepseek_r1", Self::Think),
    ];
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// What is logged, as `tracing` filters are written; default `warn`.
    pub filter: String,
    /// How lines are written; default text.
    pub format: LogFormat,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { filter: "warn".to_owned(), format: LogFormat::Text }
    }
}

/// How lines of the log are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Names in the configuration.
    pub const NAMES: [(&'static str, Self); 2] = [("text", Self::Text), ("json", Self::Json)];
}
