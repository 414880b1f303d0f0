//! Requests, streams and pages.

use std::collections::BTreeMap;

use resource_api::{CombinedLabel, KvFacts, LabelId, RequestId, Retention};

use super::fault::Fault;

/// Whose stream.
pub(super) type StreamId = (RequestId, LabelId);

#[derive(Clone, Debug, Default)]
pub(super) struct Stream {
    pub(super) pages: Vec<u32>,
    pub(super) len: u32,
    /// Ids of its tokens, as far as they are known.
    pub(super) ids: Vec<u32>,
    /// Tokens at the front that no window lets go.
    pub(super) protected: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Target {
    Stream,
    /// The step's own copy of another stream.
    Fork(usize),
    Sink,
    Nothing,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) id: StreamId,
    pub(super) target: Target,
    pub(super) start: u32,
    pub(super) span: u32,
    /// How many pages were appended to the stream for it.
    pub(super) appended: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Copy {
    pub(super) from: StreamId,
    pub(super) to: StreamId,
    pub(super) after: bool,
    pub(super) len: u32,
    pub(super) pages: Vec<u32>,
    pub(super) done: bool,
    pub(super) alive: bool,
}

/// A step between `admit` and `commit`.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlight {
    pub(super) staged: bool,
    pub(super) planned: bool,
    pub(super) commit: bool,
    pub(super) entries: Vec<Entry>,
    pub(super) copies: Vec<Copy>,
    pub(super) opened: Vec<StreamId>,
    pub(super) retention: Vec<Retention>,
    pub(super) combined: Vec<CombinedLabel>,
    /// Pages in the order in which they were taken.
    pub(super) taken: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) generation: u32,
    pub(super) prompt: Vec<u32>,
    /// Cached pages held for it until it takes them over.
    pub(super) lease: Option<Vec<u32>>,
    /// Tokens of the last of them that are its own, where the page goes on differently; else 0.
    pub(super) part: u32,
    /// Off the device: pages of each stream, as they were.
    pub(super) away: Option<Vec<(LabelId, Vec<Vec<f32>>)>>,
}

#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) size: u32,
    pub(super) usable: u32,
    pub(super) max_len: u32,
    /// The last is taken first.
    pub(super) free: Vec<u32>,
    pub(super) owners: Vec<u32>,
    pub(super) requests: BTreeMap<u32, Request>,
    pub(super) streams: BTreeMap<StreamId, Stream>,
    pub(super) steps: BTreeMap<u64, InFlight>,
    pub(super) sessions: BTreeMap<String, Vec<(LabelId, Stream)>>,
    pub(super) host_free: u32,
    /// Cached pages by the tokens up to their end; closed at first.
    pub(super) index: Option<BTreeMap<Vec<u32>, u32>>,
    pub(super) fault: Option<Fault>,
    pub(super) leftover: u32,
}

impl State {
    pub(super) fn new(facts: &KvFacts, host_pages: u32, fault: Option<Fault>) -> Self {
        let usable = facts.num_pages - 1;
        let first = if fault == Some(Fault::SinkHandedOut) { 0 } else { 1 };
        Self {
            size: facts.page_size,
            usable,
            max_len: facts.max_seq_len,
            free: (first..first + usable).rev().collect(),
            owners: vec![0; facts.num_pages as usize],
            requests: BTreeMap::new(),
            streams: BTreeMap::new(),
            steps: BTreeMap::new(),
            sessions: BTreeMap::new(),
            host_free: host_pages,
            index: None,
            fault,
            leftover: 0,
        }
    }

    pub(super) fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    // --- pages ------------------------------------------------------------------------------

    pub(super) fn pages_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.size) as usize
    }

    /// Free pages, and those that are only kept for later requests.
    pub(super) fn free_pages(&self) -> u64 {
        let kept = self.index.iter().flat_map(|i| i.values());
        (self.free.len() + kept.filter(|&&p| self.owners[p as usize] == 1).count()) as u64
    }

    pub(super) fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        while self.free.len() < count {
            // The longest prefix has nothing behind it.
            let index = self.index.as_mut()?;
            let idle = |(_, page): &(&Vec<u32>, &u32)| self.owners[**page as usize] == 1;
            let key = index.iter().filter(idle).max_by_key(|(key, _)| key.len())?.0.clone();
            let page = index.remove(&key)?;
            self.release(&[page]);
        }
        let pages = self.free.split_off(self.free.len() - count);
        let pages: Vec<u32> = pages.into_iter().rev().collect();
        pages.iter().for_each(|&page| self.owners[page as usize] += 1);
        Some(pages)
    }

    /// Drops a reference to each; the last comes to lie on top.
    pub(super) fn release(&mut self, pages: &[u32]) {
        for &page in pages.iter().rev() {
            let owners = &mut self.owners[page as usize];
            *owners = owners.saturating_sub(1);
            if *owners == 0 {
                self.free.push(page);
            }
        }
    }

    // --- requests ---------------------------------------------------------------------------

    pub(super) fn known(&self, rid: RequestId) -> bool {
        let same = |r: &Request| r.generation == rid.generation || self.has(Fault::StaleGeneration);
        self.requests.get(&rid.slot).is_some_and(same)
    }

    /// The id that the slot's present owner has.
    pub(super) fn owner(&self, rid: RequestId) -> RequestId {
        let generation = self.requests.get(&rid.slot).map_or(rid.generation, |r| r.generation);
        RequestId::new(rid.slot, generation)
    }

    pub(super) fn ingest(&mut self, rid: RequestId, prompt: &[u32]) {
        if rid.is_padding() || self.known(rid) {
            if self.has(Fault::IngestResets) {
                self.reset(rid, true);
            }
            return;
        }
        if let Some(last) = self.requests.get(&rid.slot) {
            self.remove(RequestId::new(rid.slot, last.generation));
        }
        let (generation, prompt) = (rid.generation, prompt.to_vec());
        self.requests.insert(rid.slot, Request { generation, prompt, ..Request::default() });
    }

    pub(super) fn reset(&mut self, rid: RequestId, free: bool) {
        if !self.known(rid) {
            return;
        }
        let rid = self.owner(rid);
        self.drop_lease(rid);
        if let Some(away) = self.requests.get_mut(&rid.slot).and_then(|r| r.away.take()) {
            self.host_free += away.iter().map(|(_, pages)| pages.len() as u32).sum::<u32>();
        }
        let own: Vec<StreamId> = self.streams.keys().filter(|id| id.0 == rid).copied().collect();
        for id in own {
            let mut stream = std::mem::take(self.streams.entry(id).or_default());
            if free && self.has(Fault::EndKept) {
                self.keep_end(id, &stream);
            }
            if self.has(Fault::PrematureFree) {
                self.release(&stream.pages.clone());
            }
            let private = |page: &u32| !free && self.owners[*page as usize] == 1;
            let keep = stream.pages.iter().take_while(|p| private(p)).count();
            let rest = stream.pages.split_off(keep);
            self.release(&rest);
            if !self.has(Fault::ResetKeepsLength) {
                stream.len = 0;
                stream.protected = 0;
                stream.ids.clear();
            }
            match free && !self.has(Fault::ResetKeepsLength) {
                true => drop(self.streams.remove(&id)),
                false => drop(self.streams.insert(id, stream)),
            }
        }
    }

    pub(super) fn drop_lease(&mut self, rid: RequestId) {
        let lease = self.requests.get_mut(&rid.slot).and_then(|r| r.lease.take());
        self.release(&lease.unwrap_or_default());
    }

    pub(super) fn remove(&mut self, rid: RequestId) {
        if !self.known(rid) {
            return;
        }
        let rid = self.owner(rid);
        let uses = |s: &InFlight| s.entries.iter().any(|e| e.id.0 == rid);
        if self.has(Fault::LostCancel) && self.steps.values().any(uses) {
            return;
        }
        let mut freed = Vec::new();
        for step in self.steps.values_mut() {
            // A plan that was made ahead writes to pages that are gone.
            step.planned &= !step.entries.iter().any(|e| e.id.0 == rid);
            step.entries.iter_mut().filter(|e| e.id.0 == rid).for_each(|e| e.target = Target::Sink);
            for copy in step.copies.iter_mut().filter(|c| c.to.0 == rid) {
                copy.alive = false;
                freed.append(&mut copy.pages);
            }
        }
        self.release(&freed);
        self.reset(rid, true);
        self.streams.retain(|id, _| id.0 != rid);
        self.requests.remove(&rid.slot);
    }
}
