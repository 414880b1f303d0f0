//! Pages that are kept for later requests with the same beginning, and pages off the device.

use resource_api::{LabelId, RequestId, ResourceError, Result};

use super::FakeCache;
use super::fault::Fault;
use super::state::{Request, State, Stream, StreamId};

impl State {
    /// Keeps the full pages of a main stream whose tokens are known.
    pub(super) fn keep(&mut self, id: StreamId) {
        let (Some(index), Some(stream)) = (&mut self.index, self.streams.get(&id)) else { return };
        if id.1 != LabelId::MAIN || stream.ids.len() != stream.len as usize {
            return;
        }
        let size = self.size as usize;
        for (at, &page) in stream.pages.iter().enumerate().take(stream.len as usize / size) {
            let key = &stream.ids[..(at + 1) * size];
            if !index.contains_key(key) {
                index.insert(key.to_vec(), page);
                self.owners[page as usize] += 1;
            }
        }
    }

    /// Keeps the page in which a prompt ends where it is not whole, as if somebody had it.
    pub(super) fn keep_end(&mut self, id: StreamId, stream: &Stream) {
        let prompt = self.requests.get(&id.0.slot).map(|request| request.prompt.len());
        let ends = prompt == Some(stream.len as usize) && !stream.len.is_multiple_of(self.size);
        let last = stream.len.div_ceil(self.size).checked_sub(1);
        let page = last.and_then(|last| stream.pages.get(last as usize));
        if let Some(&page) = page.filter(|_| ends && id.1 == LabelId::MAIN && self.index.is_some())
        {
            self.owners[page as usize] += 1;
        }
    }

    /// How much of its prompt is there, held for the request from now on.
    pub(super) fn probe(&mut self, rid: RequestId) -> Option<u32> {
        let has_begun = self.streams.get(&(rid, LabelId::MAIN)).is_some_and(|s| s.len > 0);
        if !self.known(rid) || has_begun {
            return None;
        }
        if self.requests[&rid.slot].away.is_some() && !self.has(Fault::FoundAway) {
            return None;
        }
        let again = self.has(Fault::DoubleReference);
        let (index, request) = (self.index.as_ref()?, self.requests.get_mut(&rid.slot)?);
        if let Some(lease) = request.lease.as_ref().filter(|_| !again) {
            return Some(leased(lease.len(), request.part, self.size));
        }
        let size = self.size as usize;
        let all = self.fault == Some(Fault::ProbeTakesAll);
        let most = (request.prompt.len() - usize::from(!all && !request.prompt.is_empty())) / size;
        let mut pages: Vec<u32> =
            (1..=most).map_while(|n| index.get(&request.prompt[..n * size]).copied()).collect();
        if self.fault == Some(Fault::WrongTail) && pages.len() < most && !pages.is_empty() {
            pages.extend(pages.last().copied());
        }
        // Where prompts part within a page, what they have in common of it counts, too.
        let whole = pages.len() * size;
        let (before, own) = request.prompt.split_at(whole);
        let common = |key: &Vec<u32>| {
            let tokens = key.strip_prefix(before).filter(|tokens| tokens.len() == size)?;
            Some(tokens.iter().zip(own).take_while(|(a, b)| a == b).count())
        };
        let parted = index.iter().filter_map(|(key, &page)| Some((common(key)?, page)));
        // One token is left to compute.
        let parted = parted.filter(|&(n, _)| n > 0 && n < own.len()).max();
        request.part = 0;
        if let Some((part, page)) = parted.filter(|_| self.fault != Some(Fault::WrongTail)) {
            pages.push(page);
            request.part = if self.fault == Some(Fault::PartWhole) { 0 } else { part as u32 };
        }
        if self.fault != Some(Fault::MissingRetain) {
            pages.iter().for_each(|&page| self.owners[page as usize] += 1);
        }
        let found = leased(pages.len(), request.part, self.size);
        request.lease = Some(pages);
        Some(found)
    }
}

/// Tokens of so many pages, of the last of which `part` count where it is not 0.
fn leased(pages: usize, part: u32, size: u32) -> u32 {
    let whole = pages as u32 * size;
    if part == 0 { whole } else { whole - size + part }
}

impl FakeCache {
    /// Makes the request's stream the first `matched` tokens of what is held for it.
    pub(super) fn adopt(&self, rid: RequestId, ids: &[u32], matched: u32) -> Result<()> {
        self.with(|state| {
            if !state.known(rid) {
                return Ok(());
            }
            let lease = state.requests.get_mut(&rid.slot).and_then(|r| r.lease.take());
            let mut pages = lease.unwrap_or_default();
            let rest = pages.split_off(state.pages_for(matched).min(pages.len()));
            state.release(&rest);
            if (pages.len() as u32 * state.size) < matched {
                state.release(&pages);
                return Err(ResourceError::invalid(format!("{matched} tokens are not held")));
            }
            let ids = ids.get(..matched as usize).unwrap_or_default().to_vec();
            let mut stream = Stream { pages, len: matched, ids, protected: 0 };
            let done = match self.has(Fault::PartAliases) {
                true => Ok(()),
                false => self.own_tail(state, &mut stream),
            };
            if done.is_err() {
                state.release(&stream.pages);
                stream = Stream::default();
            }
            let old = state.streams.insert((rid, LabelId::MAIN), stream).unwrap_or_default();
            state.release(&old.pages);
            done
        })
    }

    /// A last page that will be written on belongs to nobody else.
    fn own_tail(&self, state: &mut State, stream: &mut Stream) -> Result<()> {
        let Some(&page) = stream.pages.last() else { return Ok(()) };
        let full = stream.len as usize == stream.pages.len() * state.size as usize;
        if full || state.owners[page as usize] < 2 {
            return Ok(());
        }
        let Some(fresh) = state.take(1) else {
            let kind = resource_api::ErrorKind::EXHAUSTED;
            return Err(ResourceError::new(kind, "no page is free for the copy"));
        };
        self.copy_page(page, fresh[0])?;
        state.release(&[page]);
        if let Some(last) = stream.pages.last_mut() {
            *last = fresh[0];
        }
        Ok(())
    }

    /// Sets a stream back.
    pub(super) fn rewind(&self, id: StreamId, len: u32) -> Result<()> {
        if self.has(Fault::RewindNothing) {
            return Ok(());
        }
        self.with(|state| {
            let busy = state.steps.values().any(|s| s.entries.iter().any(|e| e.id == id));
            let Some(mut stream) = state.streams.get(&id).filter(|_| !busy).cloned() else {
                let message = "the stream is in a step, or not there".to_string();
                return if len == 0 && !busy {
                    Ok(())
                } else {
                    Err(ResourceError::wrong_state(message))
                };
            };
            if len > stream.len {
                return Err(ResourceError::invalid(format!("{len} tokens of {}", stream.len)));
            }
            stream.len = len;
            stream.ids.truncate(len as usize);
            let rest = stream.pages.split_off(state.pages_for(len).min(stream.pages.len()));
            state.release(&rest);
            self.own_tail(state, &mut stream)?;
            state.streams.insert(id, stream);
            Ok(())
        })
    }

    /// Moves a request's streams off the device. Gives the pages that were freed.
    pub(super) fn put_away(&self, rid: RequestId) -> u64 {
        self.with(|state| {
            let pages = state.reclaimable(rid);
            if pages == 0 || pages > u64::from(state.host_free) {
                return 0;
            }
            let own: Vec<StreamId> = state.streams.keys().filter(|i| i.0 == rid).copied().collect();
            let mut away = Vec::new();
            for id in own {
                let Some(stream) = state.streams.get_mut(&id) else { continue };
                let held = std::mem::take(&mut stream.pages);
                let used = stream.len.div_ceil(self.facts.page_size) as usize;
                away.push((id.1, held[..used].iter().map(|&page| self.page(page)).collect()));
                state.release(&held);
            }
            let count: usize = away.iter().map(|(_, p): &(_, Vec<_>)| p.len()).sum();
            state.host_free -= count as u32;
            if let Some(request) = state.requests.get_mut(&rid.slot) {
                request.away = Some(away);
            }
            pages
        })
    }

    /// Brings them back; false when they do not fit.
    pub(super) fn bring_back(&self, rid: RequestId) -> Result<bool> {
        self.with(|state| {
            if !state.known(rid) {
                return Ok(true);
            }
            let away = state.requests.get_mut(&rid.slot).and_then(|r| r.away.take());
            let Some(away) = away else { return Ok(true) };
            let count: usize = away.iter().map(|(_, pages)| pages.len()).sum();
            let Some(mut fresh) = state.take(count) else {
                state.requests.entry(rid.slot).and_modify(|r| r.away = Some(away));
                return Ok(false);
            };
            state.host_free += count as u32;
            for (label, contents) in away {
                let pages: Vec<u32> = fresh.drain(..contents.len()).collect();
                let skip = usize::from(self.has(Fault::ReloadLosesTail));
                let kept = contents.len() - skip.min(contents.len());
                for (&page, elements) in pages.iter().zip(&contents[..kept]) {
                    let at = self.place(0, 0, page, 0);
                    let stored = self.memory.view().writer().store(at, elements);
                    stored.map_err(|e| ResourceError::internal(e.to_string()))?;
                }
                state.streams.entry((rid, label)).or_default().pages = pages;
            }
            Ok(true)
        })
    }

    pub(super) fn page(&self, page: u32) -> Vec<f32> {
        let mut elements = vec![0.0; self.facts.page_stride as usize];
        // In range: pages come from the pool.
        let _ = self.memory.view().reader().load(self.place(0, 0, page, 0), &mut elements);
        elements
    }
}

impl State {
    /// Pages that offloading would free: none while a step uses the request, or pages are held for it.
    pub(super) fn reclaimable(&self, rid: RequestId) -> u64 {
        let busy = self.steps.values().any(|s| s.entries.iter().any(|e| e.id.0 == rid));
        let away = self.known(rid) && self.requests[&rid.slot].away.is_some();
        let waits = |r: &Request| r.lease.as_ref().is_some_and(|lease| !lease.is_empty());
        let waits = self.known(rid) && waits(&self.requests[&rid.slot]);
        let own = self.streams.iter().filter(|(id, _)| id.0 == rid && !busy && !away && !waits);
        own.map(|(_, s)| s.pages.len() as u64).sum()
    }
}
