//! The configuration from a Hugging Face `config.json`.

use serde_json::{Map, Value};

use super::{Activation, Architecture, Keys, ModelConfig, default_head_dim, limit, size};
use super::{RopeConfig, RopeLayout, RopeScaling};
use crate::error::{Error, Result, quoted};

const HEAD_DIM: &str = "head_dim";

impl ModelConfig {
    /// Reads and checks `config.json`, and `generation_config.json` where there is one: chat models
    /// often list more end-of-sequence ids there. Errors name the key.
    pub fn from_hf(config: &Value, generation_config: Option<&Value>) -> Result<Self> {
        let Value::Object(root) = config else {
            return Err(Error::config("config.json does not hold an object"));
        };
        let root = Object { map: root, place: "" };
        let name = root.str("model_type")?.ok_or_else(|| root.missing("model_type"))?;
        let architecture = Architecture::from_name("model_type", name, Architecture::IN_HF)?;
        refuse_what_is_unsupported(&root)?;

        let keys = keys();
        let hidden = root.required("hidden_size", limit::WIDTH)?;
        let heads = root.required("num_attention_heads", limit::HEADS)?;
        let head_dim = match root.optional(HEAD_DIM, limit::HEAD_DIM)? {
            Some(stated) => stated,
            None => default_head_dim(hidden, heads, &keys)?,
        };
        let mut eos = root.ids("eos_token_id")?;
        if let Some(Value::Object(map)) = generation_config {
            for id in (Object { map, place: "generation_config.json: " }).ids("eos_token_id")? {
                if !eos.contains(&id) {
                    eos.push(id);
                }
            }
        }
        let default_positions = match architecture {
            Architecture::Llama => 2048,
            Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Gemma3 => 32_768,
        };
        Self {
            architecture,
            layers: root.required("num_hidden_layers", limit::LAYERS)?,
            hidden,
            ffn: root.required("intermediate_size", limit::WIDTH)?,
            heads,
            kv_heads: root.optional("num_key_value_heads", limit::HEADS)?.unwrap_or(heads),
            head_dim,
            vocab: root.required("vocab_size", limit::VOCAB)?,
            rms_eps: root.f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: rope(&root, head_dim)?,
            qkv_bias: architecture == Architecture::Qwen2,
            qk_norm: architecture == Architecture::Qwen3,
            post_norms: false,
            activation: Activation::Silu,
            embedding_scale: None,
            attention_scale: None,
            attention_softcap: None,
            logit_softcap: None,
            local: None,
            tied_embeddings: root.bool("tie_word_embeddings")?.unwrap_or(false),
            max_position: root
                .optional("max_position_embeddings", limit::POSITION)?
                .unwrap_or(default_positions),
            bos: root.ids("bos_token_id")?.first().copied(),
            eos,
            eot: None,
        }
        .checked(&keys)
    }
}

fn rope(root: &Object<'_>, head_dim: usize) -> Result<RopeConfig> {
    // Newer files gather everything in `rope_parameters`, older ones have `rope_scaling` and a
    // `rope_theta` of its own.
    let parameters = root.object("rope_parameters")?;
    let scaling = match &parameters {
        Some(p) => Some(Object { map: p.map, place: "rope_parameters." }),
        None => root.object("rope_scaling")?,
    };
    let from_either = |key| match parameters.as_ref().map(|p| p.f64(key)).transpose()?.flatten() {
        Some(x) => Ok(Some(x)),
        None => root.f64(key),
    };
    let theta = from_either("rope_theta")?.unwrap_or(10_000.0);
    let share = from_either("partial_rotary_factor")?.unwrap_or(1.0);
    if !(share > 0.0 && share <= 1.0) {
        return Err(Error::config(format!(
            "partial_rotary_factor = {share} must be above 0 and at most 1"
        )));
    }
    Ok(RopeConfig {
        theta,
        dim: (head_dim as f64 * share) as usize,
        layout: RopeLayout::HalfSplit,
        scaling: scaling.map_or(Ok(RopeScaling::None), |s| rope_scaling(&s))?,
    })
}

fn rope_scaling(scaling: &Object<'_>) -> Result<RopeScaling> {
    // `type` is the older spelling; where both stand, `rope_type` counts.
    let kind = match scaling.str("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.str("type")?,
    };
    let number = |key| scaling.f64(key)?.ok_or_else(|| scaling.missing(key));
    match kind {
        None if scaling.map.values().any(Value::is_object) => Err(Error::config(format!(
            "{}rope parameters per kind of layer are not supported",
            scaling.place
        ))),
        None if scaling.map.contains_key("factor") => Err(scaling.missing("rope_type")),
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position: number("original_max_position_embeddings")?,
        }),
        Some(other) => Err(Error::config(format!(
            "{}rope_type = {} is not supported; supported: default, linear, llama3",
            scaling.place,
            quoted(other)
        ))),
    }
}

/// Settings that change the arithmetic in a way that nothing here implements.
fn refuse_what_is_unsupported(root: &Object<'_>) -> Result<()> {
    for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
        if root.bool(key)? == Some(true) {
            return Err(Error::config(format!("{key} = true is not supported")));
        }
    }
    for key in ["quantization_config", "num_local_experts"] {
        if root.map.get(key).is_some_and(|v| !v.is_null()) {
            return Err(Error::config(format!("{key} is not supported")));
        }
    }
    match root.str("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(Error::config(format!(
            "hidden_act = {} is not supported; supported: silu",
            quoted(other)
        ))),
    }
}

fn keys() -> Keys {
    Keys {
        hidden: "hidden_size".into(),
        heads: "num_attention_heads".into(),
        kv_heads: "num_key_value_heads".into(),
        head_dim: HEAD_DIM.into(),
        rms_eps: "rms_norm_eps".into(),
        rope_theta: "rope_theta".into(),
        rope_dim: "the rotated part of head_dim".into(),
        local_rope_theta: "rope_local_base_freq".into(),
        attention_softcap: "attn_logit_softcapping".into(),
        logit_softcap: "final_logit_softcapping".into(),
        vocab: "vocab_size".into(),
        bos: "bos_token_id".into(),
        eos: "eos_token_id".into(),
        eot: "eot_token_id".into(),
    }
}

/// A JSON object whose getters name the key; null counts as absent.
struct Object<'a> {
    map: &'a Map<String, Value>,
    place: &'static str,
}

impl<'a> Object<'a> {
    fn missing(&self, key: &str) -> Error {
        Error::config(format!("key {}{key} is missing", self.place))
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        pick: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => pick(value).map(Some).ok_or_else(|| {
                let shown = quoted(&value.to_string());
                Error::config(format!("key {}{key} must be {wanted}, but is {shown}", self.place))
            }),
        }
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn object(&self, key: &str) -> Result<Option<Object<'a>>> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Object { map, place: "rope_scaling." }))
    }

    fn optional(&self, key: &str, max: u64) -> Result<Option<usize>> {
        let value = self.typed(key, "a positive integer", Value::as_u64)?;
        value.map(|v| size(&format!("{}{key}", self.place), v, max)).transpose()
    }

    fn required(&self, key: &str, max: u64) -> Result<usize> {
        self.optional(key, max)?.ok_or_else(|| self.missing(key))
    }

    /// One token id, or a list of them.
    fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.typed(key, "a token id or a list of them", |v| match v {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
            one => id(one).map(|n| vec![n]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}
