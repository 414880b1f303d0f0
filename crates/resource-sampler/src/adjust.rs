//! What a request adds to its logits: biases, penalties by how often a token came, and tokens that may
//! not come yet. Kept apart from the parameters, since few requests have any.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A request's adjustments, and how often it was given each token.
#[derive(Debug, Default)]
pub struct Adjustments {
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Taken from the logits of tokens that were generated, once.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens that were generated, as often as they were.
    pub frequency_penalty: f32,
    /// As long as fewer tokens were sampled...
    pub min_tokens: u32,
    /// ...these are not.
    pub end_token_ids: Vec<u32>,
    pub(crate) counts: Mutex<BTreeMap<u32, u32>>,
}

impl Adjustments {
    /// Whether nothing is ever adjusted.
    pub fn is_none(&self) -> bool {
        self.bias.is_empty()
            && !self.counts_tokens()
            && (self.min_tokens == 0 || self.end_token_ids.is_empty())
    }

    fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Notes that a token was generated.
    pub fn count(&self, token: u32) {
        if self.counts_tokens() {
            *self.lock().entry(token).or_default() += 1;
        }
    }

    /// How often each token was generated; empty where that does not matter.
    pub fn counts(&self) -> Vec<(u32, u32)> {
        self.lock().iter().map(|(&token, &count)| (token, count)).collect()
    }

    /// Takes on counts of another worker, where they are larger.
    pub fn catch_up(&self, counts: &[(u32, u32)]) {
        let mut own = self.lock();
        for &(token, count) in counts.iter().filter(|_| self.counts_tokens()) {
            let own = own.entry(token).or_default();
            *own = count.max(*own);
        }
    }

    /// What comes before the repetition penalty.
    pub fn add_bias(&self, row: &mut [f32]) {
        for &(token, bias) in &self.bias {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit += bias;
            }
        }
    }

    /// What comes after it, when `sampled` tokens were sampled before.
    pub fn finish(&self, row: &mut [f32], sampled: u32) {
        for (&token, &count) in self.lock().iter() {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit -= self.presence_penalty + self.frequency_penalty * count as f32;
            }
        }
        let too_early = self.end_token_ids.iter().filter(|_| sampled < self.min_tokens);
        for &token in too_early {
            if let Some(logit) = row.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, u32>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
