//! How one request wants to be sampled.

use std::collections::BTreeMap;

use resource_api::{RequestOverrides, ResourceError, Result};
use serde::{Deserialize, Deserializer};

use crate::adjust::Adjustments;
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
    presence_penalty: f64,
    frequency_penalty: f64,
    /// By token id.
    logit_bias: BTreeMap<u32, f64>,
    min_tokens: u32,
    /// The tokens that `min_tokens` keeps away.
    end_token_ids: Vec<u32>,
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
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            min_tokens: 0,
            end_token_ids: Vec::new(),
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
    pub fn read(
        overrides: &RequestOverrides<'_>,
        spec: &SamplerSpec,
    ) -> Result<(Self, Option<Adjustments>)> {
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
        let adjustments = adjustments(&config, spec)?;
        let vocabulary = i64::from(spec.vocab_size);
        let params = Self {
            temperature: config.temperature as f32,
            top_k: if config.top_k >= vocabulary { 0 } else { config.top_k.max(0) as u32 },
            // A small top_p must not be rounded to nothing.
            top_p: (config.top_p as f32).max(f32::MIN_POSITIVE),
            min_p: config.min_p as f32,
            repetition_penalty: config.repetition_penalty as f32,
            seed: config.seed,
            choice: config.choice,
        };
        Ok((params, adjustments))
    }

    /// Whether the request has a repetition penalty.
    pub fn is_penalised(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

fn adjustments(config: &Config, spec: &SamplerSpec) -> Result<Option<Adjustments>> {
    let in_range = |x: f64| (-2.0..=2.0).contains(&x);
    check("presence_penalty", config.presence_penalty, "from -2 to 2", in_range)?;
    check("frequency_penalty", config.frequency_penalty, "from -2 to 2", in_range)?;
    let known = |token: u32| match token < spec.vocab_size {
        true => Ok(()),
        false => {
            let rule = format!("about token ids below {}", spec.vocab_size);
            Err(invalid("logit_bias", token, &rule))
        }
    };
    for (&token, &bias) in &config.logit_bias {
        known(token)?;
        check("logit_bias", bias, "from -100 to 100", |x| (-100.0..=100.0).contains(&x))?;
    }
    let adjustments = Adjustments {
        bias: config.logit_bias.iter().map(|(&token, &bias)| (token, bias as f32)).collect(),
        presence_penalty: config.presence_penalty as f32,
        frequency_penalty: config.frequency_penalty as f32,
        min_tokens: config.min_tokens,
        end_token_ids: config.end_token_ids.clone(),
        ..Adjustments::default()
    };
    Ok((!adjustments.is_none()).then_some(adjustments))
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
