//! The reference interpreter: what every stream of a paged cache holds, as plain lists of tokens, and
//! how many pages that takes.

use std::collections::BTreeMap;

use super::ops::{Keep, Row3, Shape};
use super::values::extend;

/// One stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stream {
    /// Its tokens, each as the digest of the stream up to it.
    pub tokens: Vec<u64>,
    /// Pages that it has. More than its tokens need after a reset that keeps memory.
    pub held: u64,
    /// Tokens at the front that no window lets go.
    pub protected: u64,
}

/// The streams of a cache as they should be.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Tokens of a page.
    pub page: u64,
    /// Pages of the pool, without the sink.
    pub pages: u64,
    /// Longest stream.
    pub max_len: u64,
    /// Generation of each request that is known, by slot.
    pub live: BTreeMap<u32, u32>,
    /// Requests whose streams are off the device.
    pub away: Vec<u32>,
    /// By (request slot, label).
    pub streams: BTreeMap<(u32, u32), Stream>,
}

/// What a step should do.
#[derive(Clone, Debug)]
pub enum Expected {
    /// It must not be admitted, for this reason.
    Refused(String),
    /// It must be admitted, unless a row of an unknown request (that adds nothing) is refused.
    Runs {
        /// The streams afterwards.
        next: Box<Model>,
        /// What each row reads, itself included.
        reads: Vec<Vec<u64>>,
        /// Whether it has a row of an unknown request.
        may_refuse: bool,
    },
}

impl Model {
    /// Pages that `tokens` take.
    pub fn pages_of(&self, tokens: usize) -> u64 {
        (tokens as u64).div_ceil(self.page)
    }

    /// Pages that no stream has.
    pub fn free(&self) -> u64 {
        self.pages.saturating_sub(self.streams.values().map(|s| s.held).sum())
    }

    /// Tokens of a stream.
    pub fn tokens(&self, slot: u32, label: u32) -> &[u64] {
        self.streams.get(&(slot, label)).map_or(&[], |s| &s.tokens)
    }

    /// Forgets a request.
    pub fn remove(&mut self, slot: u32) {
        self.live.remove(&slot);
        self.away.retain(|&s| s != slot);
        self.streams.retain(|&(s, _), _| s != slot);
    }

    /// Digests of the tokens with these ids that a step adds, row by row.
    pub fn digests(&self, step: &Shape, ids: &[u32]) -> Vec<u64> {
        let mut after: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        let mut ids = ids.iter();
        let mut all = Vec::new();
        for &Row3 { slot, label, span } in &step.rows {
            let from = match step.pre {
                Some((s, from, to)) if (s, to) == (slot, label) => from,
                _ => label,
            };
            let last = self.tokens(slot, from).last().copied().unwrap_or(0);
            let history = after.entry((slot, label)).or_insert(last);
            for &id in ids.by_ref().take(span as usize) {
                *history = extend(*history, id);
                all.push(*history);
            }
        }
        all
    }

    /// Lets the oldest pages go, one after the other, that are whole, hold no protected token, are not
    /// the last, and without which the window is still there.
    fn trim(&mut self, keep: Keep) {
        let page = self.page;
        let Some(stream) = self.streams.get_mut(&(keep.slot, keep.label)) else { return };
        stream.protected = stream.protected.max(keep.prefix.into());
        let first = (stream.protected.div_ceil(page) * page) as usize;
        loop {
            let len = stream.tokens.len();
            let is_last = first + page as usize >= len;
            let left = (len as u64).saturating_sub(stream.protected + page);
            if is_last || left < keep.budget.into() {
                return;
            }
            stream.tokens.drain(first..first + page as usize);
            stream.held -= 1;
        }
    }

    /// What a step should do that adds tokens with these digests.
    pub fn after(&self, step: &Shape, digests: &[u64]) -> Expected {
        let refused = |why: String| Expected::Refused(why);
        let mut next = self.clone();
        let (mut fresh, mut may_refuse) = (0, false);
        let known = |slot: u32| self.live.contains_key(&slot);
        let here = |slot: u32| !self.away.contains(&slot);
        for (slot, ..) in step.pre.iter().chain(&step.post) {
            if !known(*slot) || !here(*slot) {
                return refused(format!("it copies streams of request {slot}, which is not here"));
            }
        }
        if let Some((slot, from, to)) = step.pre {
            let tokens = self.tokens(slot, from).to_vec();
            let held = self.pages_of(tokens.len());
            fresh += held;
            next.streams.insert((slot, to), Stream { tokens, held, protected: 0 });
        }
        let (mut reads, mut digests) = (Vec::new(), digests.iter());
        for &Row3 { slot, label, span } in &step.rows {
            if !here(slot) {
                return refused(format!("request {slot} is off the device"));
            }
            if !known(slot) && span > 0 {
                return refused(format!("request {slot} is unknown"));
            }
            may_refuse |= !known(slot);
            let mut all = next.tokens(slot, label).to_vec();
            all.extend(digests.by_ref().take(span as usize));
            if span > 0 {
                let need = self.pages_of(all.len());
                if all.len() as u64 > self.max_len || need > self.pages {
                    return refused(format!("{} tokens can never fit", all.len()));
                }
                let stream = next.streams.entry((slot, label)).or_default();
                fresh += need.saturating_sub(stream.held);
                stream.held = stream.held.max(need);
                if !step.discard {
                    stream.tokens.clone_from(&all);
                }
            }
            reads.push(all);
        }
        if let Some((slot, from, _)) = step.post {
            fresh += self.pages_of(next.tokens(slot, from).len());
        }
        if let Some(keep) = step.retain {
            if !here(keep.slot) {
                return refused(format!("request {} is off the device", keep.slot));
            }
            let len = next.tokens(keep.slot, keep.label).len() as u64;
            if !step.discard && u64::from(keep.prefix) > len {
                if len > 0 {
                    return refused(format!("it protects {} tokens of {len}", keep.prefix));
                }
                // Whether a stream without tokens is there at all is the cache's business.
                may_refuse = true;
            }
        }
        if fresh > self.free() {
            return refused(format!("it needs {fresh} pages and {} are free", self.free()));
        }
        if let Some(keep) = step.retain.filter(|_| !step.discard) {
            next.trim(keep);
        }
        if let Some((slot, from, to)) = step.post {
            let tokens = next.tokens(slot, from).to_vec();
            let held = self.pages_of(tokens.len());
            next.streams.insert((slot, to), Stream { tokens, held, protected: 0 });
        }
        Expected::Runs { next: Box::new(next), reads, may_refuse }
    }
}
