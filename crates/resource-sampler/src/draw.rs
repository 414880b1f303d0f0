//! One row: from logits to a token and its log-probability.

use resource_api::{ResourceError, Result, Sampled};

use crate::adjust::Adjustments;
use crate::params::SamplingParams;
use crate::philox::random_bits;
use crate::row::{Best, UNITS, Weights, log_sum, share, units};
use crate::seen::Seen;
use crate::truncate::{Candidate, above, best_k, by_rank, keep_mass, mass, weigh};

/// What a row's request wants.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    pub params: SamplingParams,
    /// Place in the request's sequence of random numbers.
    pub position: u32,
    /// Tokens under the repetition penalty; `None` when there is no penalty.
    pub seen: Option<&'a Seen>,
    /// Tokens under the penalty that are not in `seen` yet.
    pub fresh: &'a [u32],
    /// What the request adds to its logits, if anything.
    pub adjust: Option<&'a Adjustments>,
}

/// Memory that rows are worked on in, kept from one to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    penalised: Vec<f32>,
    weights: Weights,
    candidates: Vec<Candidate>,
    values: Vec<f32>,
    keys: Vec<u64>,
}

impl Scratch {
    /// With room for every row of a vocabulary: how many of its tokens are candidates differs from step to
    /// step. What is not used of it takes no memory.
    pub fn of(vocabulary: usize) -> Self {
        // No vocabulary there is has more; a number that is no vocabulary's must not end the process here.
        let vocabulary = vocabulary.min(1 << 20);
        Self {
            penalised: Vec::with_capacity(vocabulary),
            weights: Weights::of(vocabulary),
            // The best k are looked for among twice as many.
            candidates: Vec::with_capacity(2 * vocabulary),
            values: Vec::with_capacity(vocabulary),
            keys: Vec::with_capacity(vocabulary),
        }
    }
}

const BAD: Sampled = Sampled { token: 0, status: Sampled::BAD_LOGITS, logprob: 0.0 };

/// Draws from `row`. `model` is the same row before logits processors; the log-probability is taken
/// from it.
pub fn draw(model: &[f32], row: &[f32], draw: &Draw<'_>, scratch: &mut Scratch) -> Sampled {
    let Some(best_of_model) = Best::of(model) else { return BAD };
    let Some(log_sum) = log_sum(&mut scratch.weights, model, best_of_model) else { return BAD };
    let Some(token) = token(row, draw, scratch) else { return BAD };
    let above_best = f64::from(model[token as usize]) - f64::from(best_of_model.logit);
    Sampled { token, status: Sampled::OK, logprob: (above_best - log_sum) as f32 }
}

fn token(row: &[f32], draw: &Draw<'_>, scratch: &mut Scratch) -> Option<u32> {
    if draw.seen.is_none() && draw.adjust.is_none() {
        return choose(row, draw, scratch);
    }
    let mut penalised = std::mem::take(&mut scratch.penalised);
    penalised.clear();
    penalised.extend_from_slice(row);
    if let Some(adjust) = draw.adjust {
        adjust.add_bias(&mut penalised);
    }
    if let Some(seen) = draw.seen {
        penalise(&mut penalised, seen, draw.fresh, draw.params.repetition_penalty);
    }
    if let Some(adjust) = draw.adjust {
        adjust.finish(&mut penalised, draw.position);
    }
    let token = choose(&penalised, draw, scratch);
    scratch.penalised = penalised;
    token
}

/// Makes seen tokens less likely: whatever its sign, a logit goes down for a penalty above 1.
fn penalise(row: &mut [f32], seen: &Seen, fresh: &[u32], penalty: f32) {
    let fresh = fresh.iter().copied().filter(|&token| !seen.contains(token));
    for token in seen.iter().chain(fresh) {
        if let Some(logit) = row.get_mut(token as usize) {
            *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

/// Picks a token; `None` when the row is unusable.
fn choose(row: &[f32], draw: &Draw<'_>, scratch: &mut Scratch) -> Option<u32> {
    let SamplingParams { temperature, top_k, top_p, min_p, seed, choice, .. } = draw.params;
    let best = Best::of(row)?;
    let is_number = row.iter().fold(true, |all, logit| all & !logit.is_nan());
    if !is_number {
        return None;
    }
    if temperature == 0.0 || top_k == 1 {
        return Some(best.token);
    }
    let bits = random_bits(seed, choice, draw.position);
    let Scratch { weights, candidates, values, keys, .. } = scratch;
    if top_k == 0 && top_p == 1.0 && min_p == 0.0 {
        weights.compute(row, best.logit, temperature);
        return weights.token_at(row, bits);
    }

    let whole = if top_k > 0 {
        best_k(row, top_k as usize, candidates);
        candidates.sort_unstable_by_key(|c| c.token);
        weigh(candidates, best.logit, temperature, values);
        mass(candidates)
    } else if top_p < 1.0 {
        weights.compute(row, best.logit, temperature);
        // All tokens up to this weight together are no more than what top-p leaves out.
        let rest = (1.0 - f64::from(top_p)) * (weights.total() as f64 / UNITS) / row.len() as f64;
        above(row, bound(best.logit, temperature, rest), candidates);
        weigh(candidates, best.logit, temperature, values);
        candidates.retain(|c| f64::from(c.weight) > rest);
        weights.total()
    } else {
        above(row, bound(best.logit, temperature, f64::from(min_p)), candidates);
        weigh(candidates, best.logit, temperature, values);
        0
    };
    if top_p < 1.0 {
        keep_mass(candidates, (f64::from(top_p) * whole as f64).ceil() as u64, keys);
    }
    candidates.retain(|c| c.weight > 0.0 && c.weight >= min_p);
    let target = share(bits, mass(candidates));
    let mut running = 0;
    let passed = candidates.iter().find(|c| {
        running += units(c.weight);
        running > target
    });
    passed.map(|c| c.token)
}

/// A logit safely below those of weight `weight`, so that rounding loses none.
fn bound(best: f32, temperature: f32, weight: f64) -> f32 {
    let (best, temperature) = (f64::from(best), f64::from(temperature));
    let slack = temperature * 1e-3 + best.abs() * 1e-6 + f64::from(f32::MIN_POSITIVE);
    (best + temperature * weight.ln() - slack) as f32
}

/// Writes the best tokens of a row and their log-probabilities, best first.
///
/// # Errors
/// `INVALID` for more tokens than there are, and for a row that is no distribution.
pub fn top_logprobs(
    row: &[f32],
    ids: &mut [u32],
    logprobs: &mut [f32],
    scratch: &mut Scratch,
) -> Result<()> {
    if ids.len() != logprobs.len() || ids.len() > row.len() {
        return Err(ResourceError::invalid(format!(
            "top_logprobs: {} ids and {} log-probabilities wanted of {} tokens",
            ids.len(),
            logprobs.len(),
            row.len()
        )));
    }
    let unusable = || ResourceError::invalid("top_logprobs: the logits are no numbers");
    let best = Best::of(row).ok_or_else(unusable)?;
    let log_sum = log_sum(&mut scratch.weights, row, best).ok_or_else(unusable)?;
    let found = &mut scratch.candidates;
    best_k(row, ids.len(), found);
    found.sort_unstable_by(by_rank);
    let impossible = (0..).zip(row).filter(|(_, logit)| **logit == f32::NEG_INFINITY);
    let impossible = impossible.map(|(token, &logit)| (token, logit));
    let ranked = found.iter().map(|c| (c.token, c.logit)).chain(impossible);
    for ((id, logprob), (token, logit)) in ids.iter_mut().zip(logprobs).zip(ranked) {
        *id = token;
        *logprob = (f64::from(logit) - f64::from(best.logit) - log_sum) as f32;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
