//! The fields that all generating routes share.

use std::time::Duration;

use model::GenerateRequest;
use serde_json::{Map, Value, json};

use crate::app::{App, Model};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, shown};

/// Most stop strings, and the longest one, of a request.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Fields of a request that are the sampler's, under its own names.
pub const SAMPLING: [&str; 9] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
];

/// What a request says beside its prompt.
#[derive(Debug)]
pub struct Generation {
    /// Answers per prompt.
    pub n: usize,
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    pub stops: Vec<String>,
    pub keeps_stop: bool,
    pub skip_special: bool,
    /// Everything but the prompt and the number of tokens.
    pub request: GenerateRequest,
}

impl Generation {
    /// Reads the shared fields.
    ///
    /// # Errors
    /// 400 for a wrong field, 404 for another model.
    pub fn read(fields: &mut Fields, app: &App, model: &Model) -> Result<Self> {
        check_model(fields, model)?;
        let n = fields.count("n")?.unwrap_or(1) as usize;
        if n == 0 || n > app.options.max_choices {
            let most = app.options.max_choices;
            return Err(ApiError::field("n", format!("n must be from 1 to {most}, got {n}")));
        }
        fields.refuse_unless("best_of", "answers are not ranked; use n", |v| {
            v.as_u64() == Some(n as u64)
        })?;
        fields.refuse_unless("use_beam_search", "there is no beam search", |v| v == false)?;
        fields.refuse_unless("response_format", NO_GRAMMAR, |v| v["type"] == "text")?;
        for name in ["guided_json", "guided_regex", "guided_choice", "guided_grammar"] {
            fields.refuse_unless(name, NO_GRAMMAR, |_| false)?;
        }
        fields.refuse_unless("structured_outputs", NO_GRAMMAR, |_| false)?;
        // Who asks, and what a provider may keep or charge: nothing that changes an answer.
        fields.without_effect(&["user", "metadata", "store", "service_tier", "safety_identifier"]);
        fields.without_effect(&["prompt_cache_key", "prompt_cache_retention", "request_id"]);
        let stream = fields.boolean("stream")?.unwrap_or(false);
        Ok(Self {
            n,
            stream,
            include_usage: include_usage(fields, stream)?,
            stops: stops(fields)?,
            keeps_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
            skip_special: fields.boolean("skip_special_tokens")?.unwrap_or(true),
            request: GenerateRequest {
                min_tokens: fields.count("min_tokens")?.unwrap_or(0),
                ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
                stop_token_ids: fields
                    .token_ids("stop_token_ids", model.package.config.vocab)?
                    .unwrap_or_default(),
                timeout: timeout(fields, app.options.request_timeout)?,
                sampling: sampling(fields, app, model)?,
                overrides: overrides(fields)?,
                cache_salt: app.cache_salt(&fields.string("cache_salt")?.unwrap_or_default()),
                ..GenerateRequest::default()
            },
        })
    }

    /// The requests for all answers to `prompt`.
    pub fn requests(
        &self,
        prompt: &[u32],
        max_tokens: u32,
    ) -> impl Iterator<Item = GenerateRequest> {
        (0..self.n).map(move |choice| {
            let mut request = self.request.clone();
            request.prompt = prompt.to_vec();
            request.max_tokens = max_tokens;
            if choice > 0 {
                request.sampling.insert("choice".into(), json!(choice));
            }
            request
        })
    }
}

const NO_GRAMMAR: &str =
    "answers cannot be held to a format, since no grammar resource is configured";

/// A request may leave the model out.
fn check_model(fields: &mut Fields, model: &Model) -> Result<()> {
    let Some(name) = fields.string("model")? else { return Ok(()) };
    if model.names.contains(&name) {
        return Ok(());
    }
    let shown: String = name.chars().take(80).collect();
    let message = format!(
        "the model {shown:?} does not exist; this server has {}",
        model.names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
    );
    let error = ApiError { param: Some("model".into()), ..ApiError::new(404, message) };
    Err(error.with_code("model_not_found"))
}

fn include_usage(fields: &mut Fields, stream: bool) -> Result<bool> {
    let what = "an object, with \"stream\": true";
    let read = |v: &Value| v.as_object().cloned();
    let Some(options) = fields.read("stream_options", what, read)? else { return Ok(false) };
    if !stream {
        let message = "stream_options needs \"stream\": true";
        return Err(ApiError::field("stream_options", message));
    }
    let mut options = Fields::new(options);
    let include = options.boolean("include_usage")?.unwrap_or(false);
    options.without_effect(&["include_obfuscation"]);
    options.finish(Default::default())?;
    Ok(include)
}

fn stops(fields: &mut Fields) -> Result<Vec<String>> {
    let stops = fields.read("stop", "a string or an array of strings", |v| match v {
        Value::String(stop) => Some(vec![stop.clone()]),
        Value::Array(list) => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        _ => None,
    })?;
    let stops = stops.unwrap_or_default();
    if stops.len() > MAX_STOPS || stops.iter().any(|s| s.len() > MAX_STOP_BYTES) {
        let message = format!("stop must be at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes");
        return Err(ApiError::field("stop", message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::field("stop", "stop must not hold an empty string"));
    }
    Ok(stops)
}

/// The smaller of what the request and the server allow.
fn timeout(fields: &mut Fields, most: Option<Duration>) -> Result<Option<Duration>> {
    let own = fields.read("timeout", "seconds above 0", |v| {
        v.as_f64().filter(|&s| s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok())
    })?;
    Ok(own.into_iter().chain(most).min())
}

/// Settings for the sampler, which checks their ranges. Defaults are the API's, not the sampler's.
fn sampling(fields: &mut Fields, app: &App, model: &Model) -> Result<Map<String, Value>> {
    let mut sampling = Map::new();
    sampling.insert("temperature".into(), json!(fields.number("temperature")?.unwrap_or(1.0)));
    for name in ["top_p", "min_p", "repetition_penalty"] {
        sampling.extend(fields.number(name)?.map(|x| (name.into(), json!(x))));
    }
    for name in ["presence_penalty", "frequency_penalty"] {
        let penalty = fields.number_in(name, -2.0, 2.0)?.filter(|&x| x != 0.0);
        sampling.extend(penalty.map(|x| (name.into(), json!(x))));
    }
    let top_k = fields.read("top_k", "a whole number of 64 bits", |v| v.as_i64())?;
    sampling.extend(top_k.map(|k| ("top_k".into(), json!(k))));
    if let Some(bias) = logit_bias(fields, model)? {
        sampling.insert("logit_bias".into(), bias);
    }
    let seed = fields.read("seed", "a whole number of 64 bits", |v| {
        (v.is_u64() || v.is_i64()).then(|| v.clone())
    })?;
    sampling.insert("seed".into(), seed.unwrap_or_else(|| json!(app.random_number())));
    Ok(sampling)
}

fn logit_bias(fields: &mut Fields, model: &Model) -> Result<Option<Value>> {
    let what = "an object of token ids and numbers from -100 to 100";
    let Some(bias) = fields.read("logit_bias", what, |v| v.as_object().cloned())? else {
        return Ok(None);
    };
    let vocab = model.package.config.vocab;
    for (id, value) in &bias {
        if !id.parse::<u32>().is_ok_and(|id| (id as usize) < vocab) {
            let id: String = id.chars().take(32).collect();
            let message = format!(
                "logit_bias: {id:?} is not a token id of this model, which are below {vocab}"
            );
            return Err(ApiError::field("logit_bias", message));
        }
        if !value.as_f64().is_some_and(|x| (-100.0..=100.0).contains(&x)) {
            let message = format!("logit_bias must be {what}, got {}", shown(value));
            return Err(ApiError::field("logit_bias", message));
        }
    }
    Ok((!bias.is_empty()).then_some(Value::Object(bias)))
}

/// Per-request settings of resources, by key.
fn overrides(
    fields: &mut Fields,
) -> Result<std::collections::BTreeMap<String, Map<String, Value>>> {
    let read = |v: &Value| -> Option<_> {
        let each = v.as_object()?.iter();
        each.map(|(key, own)| Some((key.clone(), own.as_object()?.clone()))).collect()
    };
    let overrides = fields.read("overrides", "an object of objects, by resource", read)?;
    Ok(overrides.unwrap_or_default())
}
