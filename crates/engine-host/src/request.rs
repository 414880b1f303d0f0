//! A request as the engine keeps it, and what it reports about it.

use std::fmt;
use std::time::Instant;

use model::Score;
pub use model::{FinishReason, GenerateRequest, Token, Usage};
use resource_api::{LabelId, RequestId};

use crate::engine::{Arriving, Handover};
use crate::error::ErrorKind;
use crate::labels::StreamLabels;

/// What happened to a request in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt's tokens with their log-probabilities, where those were asked for; before any token.
    /// The first token has none.
    Prompt(RequestId, Vec<Option<Token>>),
    /// A token was generated.
    Token(RequestId, Token),
    /// The request ended well; it is gone from the engine.
    Finished(RequestId, FinishReason, Usage),
    /// The request is to go on in another engine; it is gone from this one.
    HandedOver(RequestId, Box<Handover>),
    /// The request failed; it is gone from the engine.
    Failed(RequestId, Failure),
}

impl Event {
    /// The request that it is about.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Prompt(rid, _)
            | Self::Token(rid, _)
            | Self::Finished(rid, ..)
            | Self::HandedOver(rid, _)
            | Self::Failed(rid, _) => *rid,
        }
    }
}

/// Why a request failed after it was taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Decides the HTTP status.
    pub kind: ErrorKind,
    /// One line for the caller.
    pub message: String,
}

impl Failure {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl From<&crate::Error> for Failure {
    fn from(e: &crate::Error) -> Self {
        Self::new(e.kind(), e.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// A request in the engine.
#[derive(Debug)]
pub(crate) struct Tracked {
    pub rid: RequestId,
    pub deadline: Option<Instant>,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    /// How many of `tokens` are in the caches.
    pub computed: usize,
    /// How many more the step that is being run computes.
    pub in_step: usize,
    pub cached: usize,
    /// Whether it gave up tokens that it had computed: what it finds then may be its own.
    pub again: bool,
    /// Whether the cached prefix has been asked for since it last started from nothing.
    pub prefix_resolved: bool,
    /// Whether its state is off the device.
    pub offloaded: bool,
    pub max_tokens: u32,
    pub ignore_eos: bool,
    pub stop_token_ids: Vec<u32>,
    pub logprobs: Option<u32>,
    /// Its streams, where they are not `main` alone.
    pub labels: Option<Box<StreamLabels>>,
    /// See [`GenerateRequest::session`].
    pub session: Option<String>,
    /// What it waits for that comes from another engine.
    pub arriving: Option<Arriving>,
    /// See [`crate::engine::Relay::after`].
    pub hand_over_after: Option<u32>,
    /// Where the log-probabilities of the prompt were asked for and have not been told yet.
    pub prompt: Option<ScoredPrompt>,
}

/// Log-probabilities of a prompt's tokens, as far as they are known.
#[derive(Debug)]
pub(crate) struct ScoredPrompt {
    /// How many of the best tokens to report with each.
    pub top: u32,
    /// The first token has none.
    pub tokens: Vec<Option<Token>>,
}

impl Tracked {
    /// What is to be scored in a step that computes `in_step` tokens, whose first row is `row`.
    pub fn scores_of_step(&self, row: usize) -> impl Iterator<Item = Score> {
        let known = self.prompt.as_ref().map_or(self.prompt_len, |scored| scored.tokens.len());
        let top = self.prompt.as_ref().map_or(0, |scored| scored.top);
        // The row of one token tells how likely the next one is.
        let targets =
            known.max(self.computed + 1)..(self.computed + self.in_step + 1).min(self.prompt_len);
        targets.map(move |target| Score {
            row: (row + target - 1 - self.computed) as u32,
            target: self.tokens[target],
            top,
        })
    }

    /// Nothing of it is computed any more.
    pub fn give_up_computed(&mut self) {
        self.again |= self.computed > self.cached;
        (self.computed, self.prefix_resolved, self.offloaded) = (0, false, false);
    }

    /// Takes over so many tokens that were computed before it started.
    pub fn take_cached(&mut self, tokens: usize) {
        self.computed = tokens;
        if !self.again {
            self.cached = self.cached.max(tokens.min(self.prompt_len));
        }
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// How many of its tokens are computed after the step that is being run.
    pub fn after_step(&self) -> usize {
        self.computed + self.in_step
    }

    /// Tokens that are known and not computed yet, as far as one step may go.
    pub fn pending(&self) -> usize {
        self.pending_from(self.computed)
    }

    /// Where a prompt and what follows it go to different streams, a step ends with the prompt.
    fn pending_from(&self, computed: usize) -> usize {
        let ends = self.is_parted() && computed < self.prompt_len;
        let end = if ends { self.prompt_len } else { self.tokens.len() };
        end - computed
    }

    /// Whether a prompt and what follows it go to different streams.
    fn is_parted(&self) -> bool {
        self.labels.as_ref().is_some_and(|l| l.prefill != l.decode)
    }

    /// Leading tokens that caches may have already: all but one that is left to compute, and where it is
    /// parted none that only some of its streams hold.
    pub fn most_to_skip(&self) -> usize {
        let all = self.tokens.len() - 1;
        if self.is_parted() { all.min(self.prompt_len) } else { all }
    }

    /// Labels of the streams that take the token at this place.
    pub fn labels_at(&self, place: usize) -> &[LabelId] {
        match &self.labels {
            None => &[LabelId::MAIN],
            Some(labels) if place < self.prompt_len => &labels.prefill,
            Some(labels) => &labels.decode,
        }
    }

    /// Rows that each of its tokens takes in a step.
    pub fn width(&self) -> usize {
        self.labels.as_ref().map_or(1, |labels| labels.width())
    }

    /// Tokens that will have to be computed after the present step; 0 when the request ends with it,
    /// unless it ends earlier than by its length.
    pub fn pending_after(&self, max_model_len: usize) -> usize {
        match self.pending_from(self.after_step()) {
            0 if self.in_step > 0 => {
                let ends = self.generated() + 1 >= self.max_tokens as usize
                    || self.tokens.len() + 1 >= max_model_len;
                usize::from(!ends)
            }
            pending => pending,
        }
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_len as u32,
            completion_tokens: self.generated() as u32,
            cached_tokens: self.cached as u32,
        }
    }

    /// Appends a token that was sampled. The first makes room for all that may follow, so that no later
    /// step has to.
    pub fn push(&mut self, token: u32) {
        if self.generated() == 0 {
            self.tokens.reserve(self.max_tokens as usize);
        }
        self.tokens.push(token);
    }

    /// Why the request ends with its last token, if it does.
    pub fn finish_reason(&self, eos: &[u32], max_model_len: usize) -> Option<FinishReason> {
        let last = *self.tokens.last()?;
        let is_eos = !self.ignore_eos && eos.contains(&last);
        if self.generated() > 0 && (is_eos || self.stop_token_ids.contains(&last)) {
            return Some(FinishReason::Stop);
        }
        let used_up =
            self.generated() >= self.max_tokens as usize || self.tokens.len() >= max_model_len;
        used_up.then_some(FinishReason::Length)
    }
}

#[cfg(test)]
impl Tracked {
    /// One with this prompt, of which nothing is computed yet.
    pub fn plain(rid: RequestId, prompt: Vec<u32>) -> Self {
        Self {
            rid,
            deadline: None,
            prompt_len: prompt.len(),
            tokens: prompt,
            computed: 0,
            in_step: 0,
            cached: 0,
            again: false,
            prefix_resolved: false,
            offloaded: false,
            max_tokens: 100,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            logprobs: None,
            labels: None,
            prompt: None,
            session: None,
            arriving: None,
            hand_over_after: None,
        }
    }
}

/// Requests by slot, with generations.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Option<Tracked>>,
    generations: Vec<u32>,
    free: Vec<u32>,
}

impl Requests {
    /// The id that the next request will have.
    pub fn next_id(&mut self) -> RequestId {
        let slot = match self.free.last() {
            Some(&slot) => slot,
            None => {
                self.slots.push(None);
                self.generations.push(0);
                let slot = self.slots.len() as u32 - 1;
                self.free.push(slot);
                slot
            }
        };
        RequestId::new(slot, self.generations[slot as usize].wrapping_add(1).max(1))
    }

    /// Takes a request in under the id of [`Requests::next_id`].
    pub fn insert(&mut self, request: Tracked) {
        let rid = request.rid;
        debug_assert_eq!(self.free.last(), Some(&rid.slot));
        self.free.pop();
        self.generations[rid.index()] = rid.generation;
        self.slots[rid.index()] = Some(request);
    }

    pub fn get(&self, rid: RequestId) -> Option<&Tracked> {
        self.slots.get(rid.index())?.as_ref().filter(|r| r.rid == rid)
    }

    pub fn get_mut(&mut self, rid: RequestId) -> Option<&mut Tracked> {
        self.slots.get_mut(rid.index())?.as_mut().filter(|r| r.rid == rid)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Tracked> {
        self.slots.iter().flatten()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Tracked> {
        self.slots.iter_mut().flatten()
    }

    pub fn remove(&mut self, rid: RequestId) -> Option<Tracked> {
        self.get(rid)?;
        self.free.push(rid.slot);
        self.slots[rid.index()].take()
    }

    /// Spends an id whose request was refused: resources may have seen it.
    pub fn burn(&mut self, rid: RequestId) {
        self.generations[rid.index()] = rid.generation;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracked(rid: RequestId) -> Tracked {
        Tracked { max_tokens: 2, ..Tracked::plain(rid, vec![1, 2, 3]) }
    }

    #[test]
    fn a_slot_comes_back_under_another_generation() {
        let mut requests = Requests::default();
        let first = requests.next_id();
        requests.insert(tracked(first));
        let second = requests.next_id();
        assert_ne!(first.slot, second.slot);
        requests.remove(first);
        let third = requests.next_id();
        assert_eq!((third.slot, third.generation), (first.slot, first.generation + 1));
        requests.insert(tracked(third));
        assert!(requests.get(first).is_none() && requests.remove(first).is_none());
        assert!(requests.get(third).is_some());
    }

    #[test]
    fn the_end_is_found_where_it_is() {
        let mut r = tracked(RequestId::new(0, 1));
        r.tokens[2] = 9;
        assert_eq!(r.finish_reason(&[9], 100), None, "the prompt may end in an eos");
        r.tokens.push(9);
        assert_eq!(r.finish_reason(&[9], 100), Some(FinishReason::Stop));
        r.ignore_eos = true;
        assert_eq!(r.finish_reason(&[9], 100), None);
        assert_eq!(r.finish_reason(&[9], 4), Some(FinishReason::Length));
        r.tokens.push(7);
        assert_eq!(r.finish_reason(&[9], 100), Some(FinishReason::Length));
    }
}
