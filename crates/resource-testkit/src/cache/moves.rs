//! Sessions, and streams that go to another cache: their pages travel as bytes.

use resource_api::{
    AdmitOutcome, HostServices, LabelId, PublishedInfo, RequestId, ResourceError, Result,
};

use super::FakeCache;
use super::fault::Fault;
use super::state::{State, Stream, StreamId};

/// Format of what is published: an entry per stream, named after its label, ordered by its length. Its
/// body is the ids that are known, after their number, and then the contents of its pages.
const PUBLISHED: (&str, u32) = ("fake_kv", 1);

impl State {
    fn own_streams(&self, rid: RequestId) -> Vec<StreamId> {
        self.streams.keys().filter(|id| id.0 == rid).copied().collect()
    }

    pub(super) fn is_at_rest(&self, rid: RequestId) -> bool {
        let busy = self.steps.values().any(|s| s.entries.iter().any(|e| e.id.0 == rid));
        self.known(rid) && !busy && self.requests[&rid.slot].away.is_none()
    }

    /// Moves a request's streams to a session, whose old ones go.
    pub(super) fn retain(&mut self, rid: RequestId, name: &str) -> Result<()> {
        if !self.known(rid) {
            return Ok(());
        }
        if !self.is_at_rest(rid) {
            return Err(ResourceError::wrong_state(format!("request {rid} is in a step, or away")));
        }
        let own = self.own_streams(rid);
        if own.iter().all(|id| self.streams[id].len == 0) {
            return Ok(());
        }
        self.forget(name);
        let mut kept = Vec::new();
        for id in own {
            let stream = self.streams.remove(&id).unwrap_or_default();
            kept.push((id.1, stream));
        }
        self.sessions.insert(name.to_owned(), kept);
        Ok(())
    }

    /// Gives a session's streams to a request that has none. Says how many tokens of `main` it has then.
    pub(super) fn resume(&mut self, rid: RequestId, name: &str, len: u32) -> Result<u32> {
        let is_new = self.is_at_rest(rid)
            && self.requests[&rid.slot].lease.is_none()
            && self.own_streams(rid).iter().all(|id| self.streams[id].len == 0);
        let Some(kept) = self.sessions.get(name) else { return Ok(0) };
        if !is_new {
            return Err(ResourceError::wrong_state(format!("request {rid} has begun")));
        }
        let kept = match self.has(Fault::SessionLingers) {
            true => kept.clone(),
            false => self.sessions.remove(name).unwrap_or_default(),
        };
        for id in self.own_streams(rid) {
            let old = self.streams.remove(&id).unwrap_or_default();
            self.release(&old.pages);
        }
        for (label, stream) in kept {
            self.streams.insert((rid, label), stream);
        }
        let held = self.streams.get(&(rid, LabelId::MAIN)).map_or(0, |s| s.len);
        Ok(if self.has(Fault::SessionWhole) { held } else { held.min(len) })
    }

    /// Forgets a session; its pages come free.
    pub(super) fn forget(&mut self, name: &str) {
        for (_, stream) in self.sessions.remove(name).unwrap_or_default() {
            if !self.has(Fault::SessionLeaks) {
                self.release(&stream.pages);
            }
        }
    }
}

impl FakeCache {
    pub(super) fn adopt_streams(&self, rid: RequestId, name: &str, len: u32) -> Result<u32> {
        let held = self.with(|state| state.resume(rid, name, len))?;
        let main = (rid, LabelId::MAIN);
        if self.with(|state| state.streams.get(&main).is_some_and(|s| s.len > held)) {
            self.rewind(main, held)?;
        }
        Ok(held)
    }

    pub(super) fn published(&self, rid: RequestId) -> Option<PublishedInfo> {
        self.with(|state| {
            if !state.is_at_rest(rid) {
                return None;
            }
            let mut info = PublishedInfo::new(PUBLISHED.0, PUBLISHED.1);
            let own = state.streams.iter().filter(|(id, s)| id.0 == rid && s.len > 0);
            for (id, stream) in own {
                let mut body = (stream.ids.len() as u32).to_le_bytes().to_vec();
                body.extend(stream.ids.iter().flat_map(|id| id.to_le_bytes()));
                for (at, &page) in stream.pages[..state.pages_for(stream.len)].iter().enumerate() {
                    let swapped = at > 0 && self.has(Fault::PublishedTwice);
                    let page = if swapped { stream.pages[at - 1] } else { page };
                    body.extend(self.page(page).iter().flat_map(|x| x.to_le_bytes()));
                }
                info.set(&self.host.label_name(id.1), stream.len.into(), body);
            }
            let has_any = info.entries().next().is_some();
            has_any.then_some(info)
        })
    }

    pub(super) fn take_in(&self, rid: RequestId, info: &PublishedInfo) -> Result<AdmitOutcome> {
        if (info.kind(), info.version()) != PUBLISHED {
            return Err(ResourceError::invalid(format!("{} published this", info.kind())));
        }
        self.with(|state| {
            if !state.is_at_rest(rid) {
                return Err(ResourceError::wrong_state(format!("request {rid} cannot take it in")));
            }
            for (name, len, body) in info.entries() {
                let id = (rid, self.host.label_id(name));
                if state.streams.get(&id).is_some_and(|s| u64::from(s.len) >= len) {
                    continue;
                }
                let (ids, pages) = self.read(len, body)?;
                let Some(taken) = state.take(pages.len()) else {
                    let (need, have) = (pages.len() as u64, state.free_pages());
                    state.reset(rid, true);
                    return Ok(AdmitOutcome::allocation_failed(rid, id.1, need, have));
                };
                for (&page, elements) in taken.iter().zip(&pages) {
                    let stored =
                        self.memory.view().writer().store(self.place(0, 0, page, 0), elements);
                    stored.map_err(|e| ResourceError::internal(e.to_string()))?;
                }
                let len = len as u32 - u32::from(self.has(Fault::ArrivesShort));
                let stream = Stream { pages: taken, len, ids, protected: 0 };
                let old = state.streams.insert(id, stream).unwrap_or_default();
                state.release(&old.pages);
                state.keep(id);
            }
            Ok(AdmitOutcome::OK)
        })
    }

    /// Ids and pages of a published stream of `len` tokens.
    fn read(&self, len: u64, body: &[u8]) -> Result<(Vec<u32>, Vec<Vec<f32>>)> {
        let damaged = || ResourceError::invalid("what was published is damaged");
        let (words, rest) = body.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(damaged());
        }
        let (count, rest) = words.split_first().ok_or_else(damaged)?;
        let count = u32::from_le_bytes(*count) as usize;
        let (ids, cells) = rest.split_at_checked(count).ok_or_else(damaged)?;
        let each = self.facts.page_stride as usize;
        let pages = len.div_ceil(self.facts.page_size.into()) as usize;
        if len > self.facts.max_seq_len.into() || cells.len() != pages * each {
            return Err(damaged());
        }
        let cells: Vec<f32> = cells.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let ids = ids.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok((ids, cells.chunks(each).map(<[f32]>::to_vec).collect()))
    }
}
