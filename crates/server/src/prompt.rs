//! From what a request sends to the token ids of its prompts.

use model::ChatInput;
use serde_json::{Map, Value};

use crate::app::Model;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, shown, token_ids};

/// `prompt` of a completion: a text, token ids, or an array of either.
pub fn of_completion(fields: &mut Fields, model: &Model) -> Result<Vec<Vec<u32>>> {
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let Some(prompt) = fields.take("prompt") else {
        return Err(ApiError::field("prompt", "prompt is missing: a text, or token ids"));
    };
    let wrong = || {
        let what = "a text, an array of token ids, or an array of either";
        ApiError::field("prompt", format!("prompt must be {what}, got {}", shown(&prompt)))
    };
    let vocab = model.package.config.vocab;
    let one = |name: &str, value: &Value| match value {
        Value::String(text) => encode(model, text, special),
        Value::Array(list) => token_ids(name, list, vocab),
        _ => Err(wrong()),
    };
    let several = |list: &[Value]| {
        let named = list.iter().enumerate();
        named.map(|(i, value)| one(&format!("prompt[{i}]"), value)).collect()
    };
    let prompts = match &prompt {
        Value::Array(list) if list.is_empty() => Err(wrong()),
        Value::Array(list) if !list[0].is_number() => several(list),
        other => one("prompt", other).map(|ids| vec![ids]),
    };
    let prompts: Vec<Vec<u32>> =
        prompts.map_err(|e: ApiError| ApiError { param: Some("prompt".into()), ..e })?;
    prompts.iter().try_for_each(|ids| check_length(ids, model, "prompt"))?;
    Ok(prompts)
}

fn encode(model: &Model, text: &str, special: bool) -> Result<Vec<u32>> {
    let tokenizer = &model.package.tokenizer;
    check_text(text, model, "prompt")?;
    let ids = tokenizer.encode(text, false);
    let ids = ids.map_err(|e| ApiError::field("prompt", format!("prompt: {e}")))?;
    Ok(if special { tokenizer.with_bos(ids) } else { ids })
}

/// Refuses a text that is too long whatever its tokens are: to find those of megabytes takes seconds.
fn check_text(text: &str, model: &Model, param: &str) -> Result<()> {
    let least = model.package.tokenizer.least_tokens(text);
    match least >= model.max_model_len as usize {
        true => Err(too_long(&format!("at least {least}"), model, param)),
        false => Ok(()),
    }
}

/// Refuses what leaves no room for an answer.
pub fn check_length(ids: &[u32], model: &Model, param: &str) -> Result<()> {
    match ids.len() {
        0 => Err(ApiError::field(param, format!("{param} has no tokens"))),
        len if len >= model.max_model_len as usize => Err(too_long(&len.to_string(), model, param)),
        _ => Ok(()),
    }
}

fn too_long(tokens: &str, model: &Model, param: &str) -> ApiError {
    let message = format!(
        "{param} has {tokens} tokens; with one generated token it would exceed the model's \
         maximum context length of {}",
        model.max_model_len
    );
    ApiError::field(param, message).with_code("context_length_exceeded")
}

/// Most tokens that an answer to `ids` can have: the model's context, or what the caches hold in all.
pub fn room(ids: &[u32], model: &Model) -> u32 {
    let snapshot = model.engine.snapshot();
    let pages = snapshot.pages_total.saturating_sub(1) * snapshot.page_size;
    let most = match pages {
        0 => model.max_model_len,
        tokens => model.max_model_len.min(u32::try_from(tokens).unwrap_or(u32::MAX)),
    };
    most.saturating_sub(ids.len() as u32).max(1)
}

/// A conversation as the model's chat template writes it.
#[derive(Debug)]
pub struct Conversation {
    pub text: String,
    pub ids: Vec<u32>,
    /// The tools that the model was told of.
    pub tools: Option<Value>,
}

/// `messages`, `tools` and what else a chat template sees.
pub fn of_chat(fields: &mut Fields, model: &Model) -> Result<Conversation> {
    let messages = messages(fields)?;
    let tools = tools(fields)?;
    let opens = fields.boolean("add_generation_prompt")?.unwrap_or(true);
    let extra = fields.read("chat_template_kwargs", "an object", |v| v.as_object().cloned())?;
    let mut extra = extra.unwrap_or_default();
    if let Some(effort) = fields.string("reasoning_effort")? {
        extra.entry("reasoning_effort").or_insert(Value::String(effort));
    }
    let why = "the model's own chat template is used";
    fields.refuse_unless("chat_template", why, |_| false)?;
    fields.refuse_unless("continue_final_message", "not offered yet", |v| v == false)?;
    let input = ChatInput {
        messages: &messages,
        tools: tools.as_ref(),
        add_generation_prompt: opens,
        extra,
        now: None,
    };
    let wrong = |e: model::Error| ApiError::field("messages", e.to_string());
    let package = &model.package;
    let text = package.chat_template().and_then(|t| t.render(&input)).map_err(wrong)?;
    check_text(&text, model, "messages")?;
    let ids = package.tokenizer.encode(&text, true).map_err(wrong)?;
    // Many templates write the beginning-of-sequence token themselves.
    let ids = package.tokenizer.with_bos(ids);
    check_length(&ids, model, "messages")?;
    Ok(Conversation { text, ids, tools })
}

const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

fn messages(fields: &mut Fields) -> Result<Vec<Value>> {
    let given = fields.read("messages", "an array of messages", |v| v.as_array().cloned())?;
    let given = given.filter(|list| !list.is_empty());
    let given = given.ok_or_else(|| {
        ApiError::field("messages", "messages is missing or empty: a conversation has a message")
    })?;
    let number = |(i, message): (usize, Value)| {
        normalize(message).map_err(|why| {
            ApiError::field(&format!("messages[{i}]"), format!("messages[{i}]{why}"))
        })
    };
    given.into_iter().enumerate().map(number).collect()
}

/// A message in the form that templates expect: content is one text, arguments of calls are objects.
fn normalize(message: Value) -> Result<Value, String> {
    let Value::Object(mut message) = message else { return Err(" must be an object".into()) };
    let role = match message.get("role") {
        Some(Value::String(role)) => role.clone(),
        Some(other) => return Err(format!(".role must be a string, got {}", shown(other))),
        None => return Err(".role is missing".into()),
    };
    if !ROLES.contains(&role.as_str()) {
        let known = ROLES.join(", ");
        let role: String = role.chars().take(40).collect();
        return Err(format!(".role = {role:?} is none of {known}"));
    }
    if role == "developer" {
        message.insert("role".into(), "system".into());
    }
    let calls = message.get_mut("tool_calls").filter(|v| !v.is_null());
    let has_calls = calls.is_some();
    if let Some(calls) = calls {
        parse_arguments(calls)?;
    }
    // vLLM has two names for it, templates know the older one.
    if let Some(thoughts) = message.remove("reasoning") {
        message.entry("reasoning_content").or_insert(thoughts);
    }
    let has_more =
        ["function_call", "reasoning_content"].iter().any(|key| message.contains_key(*key));
    match message.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = parts.iter().map(text_of_part).collect::<Result<Vec<_>, _>>()?;
            message.insert("content".into(), text.join("\n").into());
        }
        // As templates see it, a message that only calls or thinks has no text.
        None | Some(Value::Null) if has_calls || has_more => {
            message.insert("content".into(), "".into());
        }
        None | Some(Value::Null) => return Err(".content is missing".into()),
        Some(other) => {
            let what = "a string or an array of parts";
            return Err(format!(".content must be {what}, got {}", shown(other)));
        }
    }
    Ok(Value::Object(message))
}

fn text_of_part(part: &Value) -> Result<String, String> {
    let kind = part.get("type").and_then(Value::as_str);
    match (kind, part.get("text").or(part.get("refusal")), part) {
        (Some("text" | "refusal") | None, Some(Value::String(text)), _) => Ok(text.clone()),
        (_, _, Value::String(text)) => Ok(text.clone()),
        (Some(kind), ..) if !matches!(kind, "text" | "refusal") => {
            let kind: String = kind.chars().take(40).collect();
            Err(format!(".content has a part of type {kind:?}; this model takes text only"))
        }
        _ => Err(format!(".content has a part without a text: {}", shown(part))),
    }
}

/// OpenAI's API writes arguments as text, templates expect what the text holds.
fn parse_arguments(calls: &mut Value) -> Result<(), String> {
    let Some(calls) = calls.as_array_mut() else {
        return Err(format!(".tool_calls must be an array, got {}", shown(calls)));
    };
    for (i, call) in calls.iter_mut().enumerate() {
        let wrong = |what: &str| format!(".tool_calls[{i}]{what}");
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return Err(wrong(".function must be an object"));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(wrong(".function.name must be a string"));
        }
        let parsed = match function.get("arguments") {
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text)
                .map_err(|e| wrong(&format!(".function.arguments is not JSON: {e}")))?,
            Some(value @ Value::Object(_)) => value.clone(),
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(other) => {
                return Err(wrong(&format!(
                    ".function.arguments is {}: a text of JSON",
                    shown(other)
                )));
            }
        };
        function.insert("arguments".into(), parsed);
    }
    Ok(())
}

/// The tools that the model is told of; none where the request says to call none.
fn tools(fields: &mut Fields) -> Result<Option<Value>> {
    let tools = fields.read("tools", "an array of tools", |v| v.as_array().cloned())?;
    for (i, tool) in tools.iter().flatten().enumerate() {
        let name = tool.get("function").and_then(|f| f.get("name"));
        if tool.get("type").is_some_and(|t| t != "function") || !name.is_some_and(Value::is_string)
        {
            let message = format!("tools[{i}] must be a function with a name, got {}", shown(tool));
            return Err(ApiError::field(&format!("tools[{i}]"), message));
        }
    }
    let tools = tools.filter(|list| !list.is_empty());
    let choice = fields.take("tool_choice");
    let why = "the model cannot be made to call a tool without a grammar resource; use \"auto\"";
    fields.refuse_unless("functions", "use tools", |_| false)?;
    fields.refuse_unless("function_call", "use tool_choice", |_| false)?;
    match choice {
        None => Ok(tools.map(Value::Array)),
        Some(choice) if choice == "none" => Ok(None),
        Some(_) if tools.is_none() => {
            Err(ApiError::field("tool_choice", "tool_choice needs tools"))
        }
        Some(choice) if choice == "auto" => Ok(tools.map(Value::Array)),
        Some(choice) => {
            let message = format!("tool_choice = {}: {why}", shown(&choice));
            Err(ApiError::field("tool_choice", message).with_code("unsupported_parameter"))
        }
    }
}
