//! Settings of the kind.

use resource_api::{ResourceError, Result};
use serde::Deserialize;

/// How a stream's tokens get their positions when a step gives none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// One after the other.
    #[default]
    Sequential,
    /// The tokens that a step adds share one position; the counter then advances by `block_step`.
    Block,
}

/// `[resources.<key>]` with `kind = "positions"`. What concerns rotary embedding comes from the
/// model unless the config says otherwise.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositionsSpec {
    /// Key of the cache whose rows the ids belong to.
    pub kv_cache: String,
    /// How positions are counted.
    #[serde(default)]
    pub scheme: Scheme,
    /// How far a step's span advances the counter under `scheme = "block"`.
    #[serde(default = "one")]
    pub block_step: u32,
    /// How many elements of each head are turned, from its start. Default: all.
    pub rotary_dim: Option<u32>,
    /// Whether elements `2i` and `2i + 1` are turned together, instead of `i` and `i + rotary_dim / 2`.
    #[serde(default)]
    pub interleave: bool,
    /// Linear scaling: positions count as if divided by this.
    #[serde(default = "one_f64")]
    pub rope_scale: f64,
    /// Base of the frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Llama 3.1 scaling: what low frequencies are divided by. All four `llama3_` keys, or none.
    pub llama3_factor: Option<f64>,
    /// Frequencies of fewer turns than this over the original length are low.
    pub llama3_low_freq_factor: Option<f64>,
    /// Frequencies of more turns than this over the original length are kept.
    pub llama3_high_freq_factor: Option<f64>,
    /// Length that the model was first trained on, in tokens.
    pub llama3_original_max_position: Option<f64>,
    /// One divisor for each frequency (`rope_freqs.weight` of a GGUF file).
    pub rope_freqs: Option<Vec<f64>>,
    /// Base of the frequencies in `local_layers`, to which no scaling applies. Both keys, or none.
    pub local_rope_theta: Option<f64>,
    /// Layers that are turned by `local_rope_theta` instead of `rope_theta`.
    pub local_layers: Option<Vec<u32>>,
}

fn one() -> u32 {
    1
}

fn one_f64() -> f64 {
    1.0
}

fn default_theta() -> f64 {
    10_000.0
}

/// Llama 3.1 scaling, complete.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Llama3 {
    pub factor: f64,
    pub low: f64,
    pub high: f64,
    pub original: f64,
}

impl PositionsSpec {
    /// The Llama 3.1 scaling, if there is one.
    pub(crate) fn llama3(&self) -> Result<Option<Llama3>> {
        let parts = [
            ("llama3_factor", self.llama3_factor),
            ("llama3_low_freq_factor", self.llama3_low_freq_factor),
            ("llama3_high_freq_factor", self.llama3_high_freq_factor),
            ("llama3_original_max_position", self.llama3_original_max_position),
        ];
        let [Some(factor), Some(low), Some(high), Some(original)] = parts.map(|(_, value)| value)
        else {
            return match parts.iter().find(|(_, value)| value.is_none()) {
                Some((missing, _)) if parts.iter().any(|(_, value)| value.is_some()) => {
                    Err(ResourceError::invalid(format!(
                        "{missing} is missing: the four llama3_ keys go together, all or none"
                    )))
                }
                _ => Ok(None),
            };
        };
        Ok(Some(Llama3 { factor, low, high, original }))
    }

    /// What applies in `local_layers` instead of this.
    pub(crate) fn local(&self) -> Option<Self> {
        Some(Self {
            rope_theta: self.local_rope_theta?,
            rope_scale: 1.0,
            llama3_factor: None,
            llama3_low_freq_factor: None,
            llama3_high_freq_factor: None,
            llama3_original_max_position: None,
            rope_freqs: None,
            local_rope_theta: None,
            local_layers: None,
            ..self.clone()
        })
    }

    /// Checks everything that does not depend on the cache.
    pub(crate) fn check(&self) -> Result<()> {
        positive("rope_theta", self.rope_theta)?;
        positive("rope_scale", self.rope_scale)?;
        if let Some(llama3) = self.llama3()? {
            positive("llama3_factor", llama3.factor)?;
            positive("llama3_low_freq_factor", llama3.low)?;
            positive("llama3_high_freq_factor", llama3.high)?;
            positive("llama3_original_max_position", llama3.original)?;
            if llama3.high <= llama3.low {
                return Err(ResourceError::invalid(format!(
                    "llama3_high_freq_factor = {} must be above llama3_low_freq_factor = {}",
                    llama3.high, llama3.low
                )));
            }
            if self.rope_freqs.is_some() || self.rope_scale != 1.0 {
                return Err(ResourceError::invalid(
                    "the llama3_ keys already say how frequencies are scaled: leave out rope_scale \
                     and rope_freqs",
                ));
            }
        }
        match (self.local_rope_theta, &self.local_layers) {
            (Some(theta), Some(_)) => positive("local_rope_theta", theta)?,
            (None, None) => {}
            (theta, _) => {
                let missing = if theta.is_none() { "local_rope_theta" } else { "local_layers" };
                return Err(ResourceError::invalid(format!(
                    "{missing} is missing: local_rope_theta and local_layers go together, both or \
                     none"
                )));
            }
        }
        for &divisor in self.rope_freqs.iter().flatten() {
            positive("every value of rope_freqs", divisor)?;
        }
        Ok(())
    }
}

fn positive(name: &str, value: f64) -> Result<()> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(ResourceError::invalid(format!("{name} = {value} must be above 0"))),
    }
}
