//! Rotary position embedding: its constants, and the frequencies that follow from them.

use std::f64::consts::TAU;

use crate::error::{Error, Result};

/// Which two values of a head one rotation turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Values 2i and 2i+1. GGUF files of `llama` models are stored for this: their q and k rows are
    /// permuted accordingly, so the weights are used as they lie in the file.
    Interleaved,
    /// Values i and i + dim/2: Hugging Face files, and `qwen2` and `qwen3` in GGUF.
    HalfSplit,
}

/// How the frequencies are stretched for sequences longer than the model was first trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    /// One divisor per frequency, which is how GGUF stores the Llama 3.1 scaling
    /// (`rope_freqs.weight`).
    Divisors(Vec<f32>),
}

/// Everything that rope needs.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// How many values of each head are rotated, from its start; even, at most the head width.
    pub dim: usize,
    pub layout: RopeLayout,
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// The `dim / 2` frequencies, scaling applied: pair `i` at position `p` is turned by
    /// `p * frequencies[i]` radians.
    pub fn frequencies(&self) -> Vec<f64> {
        (0..self.dim / 2)
            .map(|i| {
                let base = self.theta.powf(-2.0 * i as f64 / self.dim as f64);
                self.scaling.apply(i, base)
            })
            .collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        let pairs = self.dim / 2;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => at_least_one("factor", *factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: original,
            } => {
                at_least_one("factor", *factor)?;
                at_least_one("original_max_position_embeddings", *original)?;
                if !(*low > 0.0 && high > low && high.is_finite()) {
                    return Err(Error::config(format!(
                        "rope scaling: low_freq_factor = {low} must be above 0 and below \
                         high_freq_factor = {high}"
                    )));
                }
                Ok(())
            }
            RopeScaling::Divisors(divisors) if divisors.len() != pairs => Err(Error::config(
                format!("rope_freqs.weight has {} values, the model needs {pairs}", divisors.len()),
            )),
            RopeScaling::Divisors(divisors) => {
                match divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
                    Some(bad) => {
                        Err(Error::config(format!("rope_freqs.weight holds {bad}, not above 0")))
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

impl RopeScaling {
    fn apply(&self, pair: usize, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Divisors(divisors) => frequency / f64::from(divisors[pair]),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position: original,
            } => {
                let turns = original * frequency / TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                frequency * (keep + (1.0 - keep) / factor)
            }
        }
    }
}

fn at_least_one(key: &str, value: f64) -> Result<()> {
    if value.is_finite() && value >= 1.0 {
        return Ok(());
    }
    Err(Error::config(format!("rope scaling: {key} = {value} must be at least 1")))
}
