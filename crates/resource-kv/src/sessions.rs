//! Sessions: streams that outlive their request, to be the beginning of a later one.

use std::collections::HashMap;

use resource_api::{LabelId, RequestId, ResourceError, Result};

use crate::state::{Shared, State};
use crate::stream::{NO_SEAT, Stream, StreamId};

/// The streams of a session. Nobody writes to their pages.
#[derive(Debug)]
struct Session {
    streams: Vec<(LabelId, Stream)>,
    /// The session that was kept last has the largest.
    stamp: u64,
}

/// What is kept under the names of sessions.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    of: HashMap<String, Session>,
    last: u64,
}

impl Sessions {
    pub(crate) fn len(&self) -> usize {
        self.of.len()
    }

    /// Pages that sessions own.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &u32> {
        let streams = self.of.values().flat_map(|session| &session.streams);
        streams.flat_map(|(_, stream)| &stream.pages)
    }
}

impl State {
    /// Moves a request's streams to a session, whose old ones go. Says whether there was anything.
    ///
    /// # Errors
    /// `WRONG_STATE` while a step or a move uses the request.
    pub(crate) fn retain_session(
        &mut self,
        shared: &Shared,
        request: RequestId,
        name: &str,
    ) -> Result<bool> {
        if !self.requests.is_live(request) {
            return Ok(false);
        }
        if self.streams_of(request).any(|(_, s)| s.in_flight > 0) {
            return Err(ResourceError::wrong_state(format!(
                "request {request} is in a step or off the device, and cannot become session {name:?}"
            )));
        }
        self.remove_session(shared, name);
        let ids: Vec<StreamId> = self.streams_of(request).map(|(id, _)| id).collect();
        let mut streams = Vec::new();
        for id in ids {
            let table = self.new_table();
            let Some(stream) = self.requests.get_mut(id) else { continue };
            if stream.len == 0 {
                continue;
            }
            let generation = stream.generation + 1;
            let seat = std::mem::replace(&mut stream.seat, NO_SEAT);
            let kept = std::mem::replace(stream, Stream { table, generation, ..Stream::default() });
            self.seats.leave(seat);
            self.publish(shared, id);
            streams.push((id.label, kept));
        }
        let any = !streams.is_empty();
        if any {
            self.sessions.last += 1;
            let stamp = self.sessions.last;
            self.sessions.of.insert(name.to_string(), Session { streams, stamp });
        }
        Ok(any)
    }

    /// Gives a session's streams to a request that has none yet; of `main` the first `len` tokens. Says how
    /// many tokens of `main` the request has then; `None` for a session that is not here.
    ///
    /// # Errors
    /// `WRONG_STATE` for a request that has begun, `EXHAUSTED` where a page must be copied and none is free; the
    /// session stays.
    pub(crate) fn adopt_session(
        &mut self,
        shared: &Shared,
        request: RequestId,
        name: &str,
        len: u32,
    ) -> Result<Option<u32>> {
        if !self.sessions.of.contains_key(name) {
            return Ok(None);
        }
        let is_new = self.requests.is_live(request)
            && self.requests.has_no_lease(request)
            && self.streams_of(request).all(|(_, s)| s.len == 0 && s.in_flight == 0);
        if !is_new {
            return Err(ResourceError::wrong_state(format!(
                "request {request} has begun, and cannot go on with session {name:?}"
            )));
        }
        // Where it is cut within a page that others share it needs one of its own, for which there may have to
        // be made room first.
        if !self.tiers.is_empty() && self.is_cut_in_shared_page(name, len) {
            let page = self.take_one(shared).ok_or_else(|| crate::prefix::no_page(request))?;
            self.pool.put_back(page);
        }
        let Some(session) = self.sessions.of.remove(name) else { return Ok(None) };
        let mut whole = Vec::new();
        for (label, kept) in session.streams {
            if label != LabelId::MAIN {
                whole.push((label, kept.len, kept.released));
            }
            let id = StreamId { request, label };
            let table = self.new_table();
            if self.requests.get(id).is_none() {
                self.requests.open(id, table);
            }
            let Some(stream) = self.requests.get_mut(id) else { continue };
            let generation = stream.generation + 1;
            let fresh = Stream { table, generation, seat: stream.seat, ..kept };
            let mut old = std::mem::replace(stream, fresh).pages;
            self.release(shared, &mut old);
            self.publish(shared, id);
        }
        let main = StreamId { request, label: LabelId::MAIN };
        let held = self.requests.get(main).map_or(0, |s| s.len);
        let released = self.requests.get(main).map_or(0, |s| s.released);
        self.took_over(main, held.min(len), released);
        for (label, len, released) in whole {
            self.took_over(StreamId { request, label }, len, released);
        }
        if len < held {
            self.rewind(shared, main, len)?;
        }
        self.index_ended();
        Ok(Some(held.min(len)))
    }

    /// Whether the page in which a session's `main` has its first `len` tokens end has other owners.
    fn is_cut_in_shared_page(&self, name: &str, len: u32) -> bool {
        let streams = self.sessions.of.get(name).into_iter().flat_map(|session| &session.streams);
        let mut main =
            streams.filter(|(label, stream)| *label == LabelId::MAIN && len < stream.len);
        let page = |stream: &Stream| stream.pages.get((len / self.page_size) as usize).copied();
        !len.is_multiple_of(self.page_size)
            && main.any(|(_, s)| page(s).is_some_and(|page| self.pool.owners(page) > 1))
    }

    /// Forgets a session; its pages come free.
    pub(crate) fn remove_session(&mut self, shared: &Shared, name: &str) {
        let Some(session) = self.sessions.of.remove(name) else { return };
        for (_, mut stream) in session.streams {
            self.release(shared, &mut stream.pages);
        }
    }

    /// Forgets the session that was kept before all others, for its pages. `false` where there is none.
    pub(crate) fn drop_oldest_session(&mut self, shared: &Shared) -> bool {
        let oldest = self.sessions.of.iter().min_by_key(|(_, session)| session.stamp);
        let Some(name) = oldest.map(|(name, _)| name.clone()) else { return false };
        self.remove_session(shared, &name);
        true
    }
}
