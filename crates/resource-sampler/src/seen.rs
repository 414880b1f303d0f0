//! Which tokens a request has seen, for the repetition penalty.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A set of tokens. Readable while others add to it, without a lock: within a step nothing is added
/// to a request that is being sampled.
#[derive(Debug)]
pub struct Seen {
    words: Box<[AtomicU64]>,
    vocabulary: u32,
}

impl Seen {
    /// An empty set of tokens below `vocabulary`.
    pub fn new(vocabulary: u32) -> Self {
        let words = (0..vocabulary.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, vocabulary }
    }

    /// Adds tokens; those past the vocabulary are skipped.
    pub fn extend(&self, tokens: &[u32]) {
        for &token in tokens.iter().filter(|&&t| t < self.vocabulary) {
            self.words[token as usize / 64].fetch_or(1 << (token % 64), Relaxed);
        }
    }

    /// Whether a token is in the set, or can never be.
    pub fn contains(&self, token: u32) -> bool {
        token >= self.vocabulary
            || self.words[token as usize / 64].load(Relaxed) & 1 << (token % 64) != 0
    }

    /// Copies the set's words, and adds the tokens of `fresh` to the copy.
    pub fn copy_with(&self, fresh: &[u32], words: &mut [u64]) {
        words.iter_mut().zip(&self.words).for_each(|(to, word)| *to = word.load(Relaxed));
        for &token in fresh.iter().filter(|&&t| t < self.vocabulary) {
            words[token as usize / 64] |= 1 << (token % 64);
        }
    }

    /// The tokens, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.words).flat_map(|(i, word)| {
            let mut word = word.load(Relaxed);
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros())?;
                word &= word - 1;
                Some(i * 64 + bit)
            })
        })
    }
}
