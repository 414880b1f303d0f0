//! Settings of both kinds.

use resource_api::{ResourceError, ResourceKey, Result};
use serde::{Deserialize, Deserializer, Serialize};
use std::num::NonZeroU32;

/// Which kernels compute. There is one per device so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The best for the engine's device.
    #[default]
    Auto,
    /// Vector kernels of the CPU.
    Cpu,
}

/// Settings of kind `attention`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSettings {
    /// Key of the cache that holds the streams.
    pub kv_cache: ResourceKey,
    /// Which kernels compute.
    #[serde(default)]
    pub backend: Backend,
    /// How many tokens a token sees, itself included; everything before it when not set.
    #[serde(default, deserialize_with = "window")]
    pub sliding_window: Option<NonZeroU32>,
    /// Layers that the window does not apply to.
    #[serde(default)]
    pub full_layers: Vec<u32>,
    /// Factor of the scores; `1 / sqrt(head_dim)` when not set.
    #[serde(default)]
    pub sm_scale: Option<f32>,
    /// Bounds the scores: `cap * tanh(score / cap)`. No bound when not set.
    #[serde(default)]
    pub logit_softcap: Option<f32>,
}

/// Settings of kind `cross_attention`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CrossAttentionSettings {
    /// Key of the cache that holds the contexts.
    pub kv_cache: ResourceKey,
    /// Key of the cache whose plan packs the queries. When not set, this resource's own segments
    /// do, those of the context label left out.
    #[serde(default)]
    pub query_kv_cache: Option<ResourceKey>,
    /// Label of the streams that hold the contexts.
    #[serde(default = "context_label")]
    pub context_label: String,
    /// Which kernels compute.
    #[serde(default)]
    pub backend: Backend,
    /// Factor of the scores; `1 / sqrt(head_dim)` when not set.
    #[serde(default)]
    pub sm_scale: Option<f32>,
}

fn context_label() -> String {
    "context".into()
}

/// serde's own message for a wrong value does not name the key.
fn window<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NonZeroU32>, D::Error> {
    use serde::de::Error;
    Option::<NonZeroU32>::deserialize(from).map_err(|e| {
        D::Error::custom(format!("sliding_window must be a positive number of tokens: {e}"))
    })
}

/// What the kernels need of the settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scoring {
    /// Factor of the scores.
    pub scale: f32,
    /// Bound of the scores.
    pub softcap: Option<f32>,
    /// Tokens that a token sees, itself included.
    pub window: Option<NonZeroU32>,
}

impl Scoring {
    /// Fills in the default scale and checks the values.
    pub fn new(
        head_dim: u32,
        scale: Option<f32>,
        softcap: Option<f32>,
        window: Option<NonZeroU32>,
    ) -> Result<Self> {
        let scale = scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt());
        let positive = |name: &str, value: f32| match value.is_finite() && value > 0.0 {
            true => Ok(value),
            false => Err(ResourceError::invalid(format!("{name} = {value} must be above 0"))),
        };
        Ok(Self {
            scale: positive("sm_scale", scale)?,
            softcap: softcap.map(|cap| positive("logit_softcap", cap)).transpose()?,
            window,
        })
    }

    /// What a page of a later layer depends on beyond its tokens.
    pub fn fingerprint(&self, kind: &str) -> Vec<u8> {
        let Self { scale, softcap, window } = self;
        let softcap = softcap.map_or("none".into(), |cap| format!("{:08x}", cap.to_bits()));
        let window = window.map_or("none".into(), |w| w.to_string());
        format!("{kind}/1 scale={:08x} softcap={softcap} window={window}", scale.to_bits()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use resource_api::spec::parse_settings;

    fn refusal<T: serde::de::DeserializeOwned + std::fmt::Debug>(text: &str) -> String {
        parse_settings::<T>(text).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let attention: AttentionSettings = parse_settings(r#"{"kv_cache": "main_kv"}"#).unwrap();
        assert_eq!((attention.backend, attention.sliding_window), (Backend::Auto, None));
        let scoring = Scoring::new(64, attention.sm_scale, attention.logit_softcap, None).unwrap();
        assert_eq!(scoring, Scoring { scale: 0.125, softcap: None, window: None });
        let cross: CrossAttentionSettings = parse_settings(r#"{"kv_cache": "kv"}"#).unwrap();
        assert_eq!((cross.context_label.as_str(), cross.query_kv_cache), ("context", None));
    }

    #[test]
    fn wrong_settings_are_refused_by_name() {
        let e = refusal::<AttentionSettings>("{}");
        assert!(e.contains("kv_cache"), "{e}");
        let e = refusal::<AttentionSettings>(r#"{"kv_cache": "kv", "sliding_windw": 3}"#);
        assert!(e.contains("did you mean `sliding_window`"), "{e}");
        for window in ["0", "-1", "true", "1.5"] {
            let text = format!(r#"{{"kv_cache": "kv", "sliding_window": {window}}}"#);
            let e = refusal::<AttentionSettings>(&text);
            assert!(e.contains("sliding_window must be a positive number"), "{e}");
        }
        let e = refusal::<CrossAttentionSettings>(r#"{"kv_cache": "kv", "sliding_window": 4}"#);
        assert!(e.contains("unknown key `sliding_window`"), "{e}");
        for (scale, softcap) in [(Some(0.0), None), (Some(f32::NAN), None), (None, Some(-1.0))] {
            let e = Scoring::new(64, scale, softcap, None).unwrap_err().to_string();
            assert!(e.ends_with("must be above 0"), "{e}");
        }
    }

    #[test]
    fn the_fingerprint_changes_with_everything_that_changes_outputs() {
        let window = NonZeroU32::new(8);
        let all = [
            Scoring { scale: 0.125, softcap: None, window: None },
            Scoring { scale: 0.25, softcap: None, window: None },
            Scoring { scale: 0.125, softcap: Some(30.0), window: None },
            Scoring { scale: 0.125, softcap: None, window },
        ];
        let prints: std::collections::BTreeSet<_> =
            all.iter().map(|s| s.fingerprint("attention")).collect();
        assert_eq!(prints.len(), all.len());
    }
}
