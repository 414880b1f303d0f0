//! Settings of the kind.

use serde::Deserialize;

/// `[resources.<key>]` with `kind = "sampler"`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerSpec {
    /// Tokens of the model. Logits rows may be longer; what is past it is never sampled.
    pub vocab_size: u32,
    /// Whether requests may ask for a repetition penalty.
    #[serde(default = "yes")]
    pub enable_repetition_penalty: bool,
    /// Whether requests may ask for min-p.
    #[serde(default)]
    pub enable_min_p: bool,
}

fn yes() -> bool {
    true
}
