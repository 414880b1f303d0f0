//! Chat templates: a conversation as the text that the model was trained on.
//!
//! Models ship a Jinja template written for Hugging Face's `apply_chat_template`, so the semantics
//! here are those: block tags swallow their line, Python's string and dict methods work, `tojson`
//! writes what Python's `json.dumps` writes, and `raise_exception` refuses a conversation.

use std::path::Path;
use std::sync::LazyLock;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use regex::Regex;
use serde_json::Value as Json;

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::package::{read_json_if_present, read_text_if_present};
use crate::reasoning::ReasoningFormat;
use crate::tokenizer::named_token;
use crate::tool_calls::ToolFormat;

mod json;
mod python;
mod time;

/// The template that is used unless there is a better one.
const DEFAULT: &str = "default";
/// The template for conversations with tools.
const TOOL_USE: &str = "tool_use";
const GGUF_TEMPLATE: &str = "tokenizer.chat_template";
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// Instructions that a rendering may take: a hundred times what a long conversation needs.
const FUEL: u64 = 20_000_000;

/// What a template renders.
#[derive(Debug, Clone, Default)]
pub struct ChatInput<'a> {
    /// Objects with `role`, `content` and whatever else the template reads.
    pub messages: &'a [Json],
    /// Tool definitions, as in the OpenAI API.
    pub tools: Option<&'a Json>,
    /// Whether to open the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// More variables, such as `enable_thinking`.
    pub extra: serde_json::Map<String, Json>,
    /// The time that `strftime_now` sees; by default the system's. It is printed in UTC.
    pub now: Option<SystemTime>,
}

/// The chat template or templates of a model, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: Vec<(String, String)>,
    tool_format: Option<ToolFormat>,
    reasoning_format: Option<ReasoningFormat>,
}

impl ChatTemplate {
    /// Compiles templates, given as (name, source); `special` are variables such as
    /// (`bos_token`, `<s>`).
    ///
    /// # Errors
    /// One line naming the template and the line of its first mistake.
    pub fn new(
        templates: impl IntoIterator<Item = (String, String)>,
        special: Vec<(String, String)>,
    ) -> Result<Self> {
        let mut environment = environment();
        let mut tool_format = None;
        let mut reasoning_format = None;
        for (name, source) in templates {
            reasoning_format = reasoning_format.or(ReasoningFormat::of_template(&source));
            let format = ToolFormat::of_template(&source);
            // The one for tools knows best.
            tool_format =
                if name == TOOL_USE { format.or(tool_format) } else { tool_format.or(format) };
            environment
                .add_template_owned(name, without_generation_tags(&source))
                .map_err(|e| Error::template(describe("the chat template does not compile", &e)))?;
        }
        Ok(Self { environment, special, tool_format, reasoning_format })
    }

    /// How the model writes what it thinks before it answers, if the template shows that.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        self.reasoning_format
    }

    /// The format in which the template asks the model for tool calls, if it is one of those known.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// The templates of a GGUF file; `None` if it has none.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<Self>> {
        let meta = gguf.metadata();
        let mut templates = Vec::new();
        for (key, _) in meta.iter() {
            let Some(rest) = key.strip_prefix(GGUF_TEMPLATE) else { continue };
            let name = match rest.strip_prefix('.') {
                Some(name) => name,
                None if rest.is_empty() => DEFAULT,
                None => continue,
            };
            templates.extend(meta.str(key)?.map(|source| (name.to_owned(), source.to_owned())));
        }
        if templates.is_empty() {
            return Ok(None);
        }
        let tokens = meta.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
        let mut special = Vec::new();
        for (variable, key) in SPECIAL_TOKENS.iter().zip(["bos", "eos", "unknown", "padding"]) {
            let id = meta.u32(&format!("tokenizer.ggml.{key}_token_id"))?;
            let token = id.and_then(|id| tokens.get(id as usize));
            special.extend(token.map(|token| ((*variable).to_owned(), token.clone())));
        }
        Self::new(templates, special).map(Some)
    }

    /// The templates of a Hugging Face directory; `None` if it has none.
    pub fn from_hf_dir(dir: &Path) -> Result<Option<Self>> {
        let config =
            read_json_if_present(&dir.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
        let mut templates = match config.get("chat_template") {
            Some(Json::String(source)) => vec![(DEFAULT.to_owned(), source.clone())],
            Some(Json::Array(list)) => list.iter().filter_map(named_template).collect(),
            _ => Vec::new(),
        };
        // A file of its own is the newer place, and counts where both are there.
        if let Some(source) = read_text_if_present(&dir.join("chat_template.jinja"))? {
            templates.retain(|(name, _)| name != DEFAULT);
            templates.push((DEFAULT.to_owned(), source));
        }
        if templates.is_empty() {
            return Ok(None);
        }
        let special = SPECIAL_TOKENS.iter().filter_map(|variable| {
            Some(((*variable).to_owned(), named_token(&config, variable)?.to_owned()))
        });
        Self::new(templates, special.collect()).map(Some)
    }

    /// Renders a conversation. Encode the result with `parse_special`, and use
    /// [`Tokenizer::with_bos`](crate::Tokenizer::with_bos): many templates write the
    /// beginning-of-sequence token themselves.
    ///
    /// # Errors
    /// One line: the template's own words where it refuses the conversation, otherwise the line and
    /// the mistake.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String> {
        let with_tools = input.tools.and_then(|_| self.environment.get_template(TOOL_USE).ok());
        let template = match with_tools {
            Some(template) => template,
            None => self
                .environment
                .get_template(DEFAULT)
                .map_err(|_| Error::template("the model has no default chat template"))?,
        };
        let mut variables: Vec<(String, Value)> = Vec::new();
        let mut set = |name: &str, value| variables.push((name.to_owned(), value));
        for (name, token) in &self.special {
            set(name, Value::from(token.as_str()));
        }
        set("documents", Value::from(()));
        for (name, value) in &input.extra {
            set(name, Value::from(Serde(value)));
        }
        let now = input.now.unwrap_or_else(SystemTime::now);
        set("strftime_now", Value::from_function(move |format: &str| time::strftime(format, now)));
        set("messages", Value::from(Serde(input.messages)));
        set(
            "tools",
            input.tools.map_or_else(|| Value::from(()), |tools| Value::from(Serde(tools))),
        );
        set("add_generation_prompt", Value::from(input.add_generation_prompt));
        template.render(Value::from_pairs(variables)).map_err(|e| {
            Error::template(match refusal(&e) {
                Some(words) => format!("the chat template refuses the conversation: {words}"),
                None if e.kind() == ErrorKind::OutOfFuel => {
                    "the chat template does not come to an end with this conversation".to_owned()
                }
                None => describe("the chat template cannot render this conversation", &e),
            })
        })
    }
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    // Both are on in Hugging Face's environment, and templates rely on them.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, "refused")
            .with_source(Refusal(message)))
    });
    env.set_formatter(python::format);
    env.add_filter("string", |value: Value| python::string(&value));
    // Python's None is not iterable, and templates tell by that whether there are tools.
    env.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
    // Templates come with models, from anybody.
    env.set_fuel(Some(FUEL));
    env.add_filter("tojson", |value: Value, ascii: Option<Value>, options: Kwargs| {
        json::tojson(&value, ascii, &options)
    });
    env
}

/// `{% generation %}` marks what the assistant said, for training; to rendering it means nothing.
fn without_generation_tags(source: &str) -> String {
    static TAG: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").ok());
    let Some(tag) = TAG.as_ref() else { return source.to_owned() };
    // Another block tag keeps the white space rules around it as they are.
    tag.replace_all(source, |found: &regex::Captures<'_>| {
        let word = if found.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {word} {}%}}", &found[1], &found[3])
    })
    .into_owned()
}

/// One entry of a list of named templates.
fn named_template(entry: &Json) -> Option<(String, String)> {
    let text = |key| Some(entry.get(key)?.as_str()?.to_owned());
    Some((text("name")?, text("template")?))
}

/// What a template said when it called `raise_exception`.
#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn refusal(error: &minijinja::Error) -> Option<&str> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(Refusal(words)) = error.downcast_ref() {
            return Some(words);
        }
        next = error.source();
    }
    None
}

fn describe(what: &str, error: &minijinja::Error) -> String {
    let line = error.line().map(|n| format!("line {n}: ")).unwrap_or_default();
    match error.detail() {
        // "Invalid operation" tells nothing that the detail does not.
        Some(detail) if error.kind() == ErrorKind::InvalidOperation => {
            format!("{what}: {line}{detail}")
        }
        Some(detail) => format!("{what}: {line}{}: {detail}", error.kind()),
        None => format!("{what}: {line}{}", error.kind()),
    }
}
