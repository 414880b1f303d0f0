//! `/tokenize` and `/detokenize`.

use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::prompt;

/// Token ids of a text, or of a conversation.
pub fn tokenize(app: &App, fields: Map<String, Value>) -> Result<Value> {
    let model = app.model()?;
    let mut fields = Fields::new(fields);
    fields.string("model")?;
    let with_strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let tokenizer = &model.package.tokenizer;
    // For a conversation its template decides both.
    let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let parse = fields.boolean("parse_special")?.unwrap_or(false);
    let prompt = fields.string("prompt")?;
    let ids = match prompt {
        Some(text) => {
            let ids = tokenizer.encode(&text, parse);
            let ids = ids.map_err(|e| ApiError::field("prompt", format!("prompt: {e}")))?;
            if special { tokenizer.with_bos(ids) } else { ids }
        }
        None => prompt::of_chat(&mut fields, model)?.ids,
    };
    fields.finish(app.options.unknown_fields)?;
    let name = |&id: &u32| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default());
    let strings = with_strings.then(|| ids.iter().map(name).collect::<Vec<_>>());
    Ok(json!({
        "count": ids.len(),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }))
}

/// The text of token ids.
pub fn detokenize(app: &App, fields: Map<String, Value>) -> Result<Value> {
    let model = app.model()?;
    let mut fields = Fields::new(fields);
    fields.string("model")?;
    let skip_special = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    let ids = fields.token_ids("tokens", model.package.config.vocab)?;
    let ids = ids.ok_or_else(|| ApiError::field("tokens", "tokens is missing: an array of ids"))?;
    fields.finish(app.options.unknown_fields)?;
    Ok(json!({ "prompt": model.package.tokenizer.decode(&ids, skip_special) }))
}
