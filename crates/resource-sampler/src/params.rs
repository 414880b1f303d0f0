//! How one request wants to be sampled.

use resource_api::{RequestOverrides, ResourceError, Result};
use serde::{Deserialize, Deserializer};

use crate::spec::SamplerSpec;

/// The per-request config, checked and in the form that sampling uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the best token.
    pub temperature: f32,
    /// How many of the best tokens stay; 0 is off, and so is everything from the vocabulary up.
    pub top_k: u32,
    /// Probability of the best tokens that stay; 1 is off.
    pub top_p: f32,
    /// Tokens stay whose probability is at least this share of the best one's; 0 is off.
    pub min_p: f32,
    /// Positive logits of seen tokens are divided by it, negative ones multiplied; 1 is off.
    pub repetition_penalty: f32,
    /// Key of the random numbers.
    pub seed: u64,
    /// Which of several answers to one prompt this is.
    pub choice: u32,
}

/// The per-request config as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Config {
    temperature: f64,
    top_k: i64,
    top_p: f64,
    repetition_penalty: f64,
    min_p: f64,
    /// For those who decide when a request ends; it changes nothing here.
    #[serde(rename = "ignore_eos")]
    _ignore_eos: bool,
    #[serde(deserialize_with = "any_integer")]
    seed: u64,
    choice: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            temperature: 0.6,
            top_k: 0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            min_p: 0.0,
            _ignore_eos: false,
            seed: 0,
            choice: 0,
        }
    }
}

/// Seeds are 64 bits; a negative one is taken as its two's complement.
fn any_integer<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "seed must be a 64-bit integer")]
    enum Integer {
        Unsigned(u64),
        Signed(i64),
    }
    Ok(match Integer::deserialize(from)? {
        Integer::Unsigned(seed) => seed,
        Integer::Signed(seed) => seed as u64,
    })
}

impl SamplingParams {
    /// Greedy: what padding rows get.
    pub(crate) const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        seed: 0,
        choice: 0,
    };

    /// Reads and checks what a request says, with the seed API's defaults for the rest.
    ///
    /// # Errors
    /// `INVALID` naming the field and its value.
    pub fn read(overrides: &RequestOverrides<'_>, spec: &SamplerSpec) -> Result<Self> {
        let config = overrides.parse::<Config>()?.unwrap_or_default();
        let in_f32 = |x: f64| (x as f32).is_finite();
        check("temperature", config.temperature, "0 or above", |t| t >= 0.0 && in_f32(t))?;
        check("top_p", config.top_p, "above 0 and at most 1", |p| p > 0.0 && p <= 1.0)?;
        check("min_p", config.min_p, "at least 0 and at most 1", |p| (0.0..=1.0).contains(&p))?;
        check("repetition_penalty", config.repetition_penalty, "above 0", |r| {
            r as f32 > 0.0 && in_f32(r)
        })?;
        if config.top_k < -1 {
            return Err(invalid("top_k", config.top_k, "0 or -1 (off) or above"));
        }
        if config.repetition_penalty != 1.0 && !spec.enable_repetition_penalty {
            return Err(switched_off("repetition_penalty", config.repetition_penalty));
        }
        if config.min_p != 0.0 && !spec.enable_min_p {
            return Err(switched_off("min_p", config.min_p));
        }
        let vocabulary = i64::from(spec.vocab_size);
        Ok(Self {
            temperature: config.temperature as f32,
            top_k: if config.top_k >= vocabulary { 0 } else { config.top_k.max(0) as u32 },
            // A small top_p must not be rounded to nothing.
            top_p: (config.top_p as f32).max(f32::MIN_POSITIVE),
            min_p: config.min_p as f32,
            repetition_penalty: config.repetition_penalty as f32,
            seed: config.seed,
            choice: config.choice,
        })
    }

    /// Whether the request has a repetition penalty.
    pub fn is_penalised(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

fn check(name: &str, value: f64, rule: &str, holds: impl Fn(f64) -> bool) -> Result<()> {
    match holds(value) {
        true => Ok(()),
        false => Err(invalid(name, value, rule)),
    }
}

fn invalid(name: &str, value: impl std::fmt::Display, rule: &str) -> ResourceError {
    ResourceError::invalid(format!("{name} = {value} must be {rule}"))
}

fn switched_off(name: &str, value: f64) -> ResourceError {
    ResourceError::invalid(format!(
        "{name} = {value} is switched off in this sampler: set enable_{name} = true in its settings"
    ))
}
