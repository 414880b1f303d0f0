//! A request's streams on their way to where other workers read them.
//!
//! Their pages are copied without the cache's lock: meanwhile they belong to the copy, too, and the streams
//! count as in use by a step that rewrites them. A request that changes or goes all the same is told nothing.

use std::time::Instant;

use resource_api::{HostServices, LabelId, PublishedInfo, RequestId, ResourceError, Result};
use transfer::{Lease, Leases, RemotePages, TransferError};

use crate::handover::{Earlier, PUBLISHED, PublishedStream, Transfer};
use crate::resource::Kv;
use crate::state::{Shared, State};
use crate::stream::StreamId;

/// Streams that are being published.
#[derive(Debug)]
struct Publishing {
    /// In flight are their pages.
    id: u64,
    streams: Vec<Leaving>,
}

/// A stream that is being published.
#[derive(Debug)]
struct Leaving {
    label: LabelId,
    len: u32,
    generation: u64,
    released: u64,
    protected: u32,
    held: Vec<u32>,
    /// Where it was published before, if it has not changed since.
    earlier: Option<RemotePages>,
}

impl Leaving {
    fn id(&self, request: RequestId) -> StreamId {
        StreamId { request, label: self.label }
    }
}

impl Transfer {
    /// Copies a stream to where others read it, unless it is there and unchanged. Needs no lock of the cache.
    fn copy(&self, shared: &Shared, leaving: &Leaving) -> transfer::Result<RemotePages> {
        self.with_leases(|leases| {
            if let Some(earlier) = &leaving.earlier
                && leases.is_active(Lease(earlier.lease))
            {
                return Ok(earlier.clone());
            }
            let held = &leaving.held;
            leases.offer(held.len(), Instant::now(), |at, put| {
                let copy = shared.memory.copy_of_page(held[at]);
                put(&copy.map_err(|e| TransferError::Local(e.message().to_string()))?)
            })
        })?
    }

    /// What is told of a stream that is at `pages`.
    fn tell(&self, leaving: &Leaving, pages: &RemotePages) -> Result<Vec<u8>> {
        let &Leaving { len, released, protected, .. } = leaving;
        let (layout, pages) = (self.layout.clone(), pages.clone());
        serde_json::to_vec(&PublishedStream { len, released, protected, layout, pages })
            .map_err(|e| ResourceError::internal(e.to_string()))
    }
}

impl State {
    /// Takes a request's streams to publish them: nobody writes to them meanwhile, and their pages stay.
    /// `None` for a request that is not here.
    fn begin_publishing(&mut self, shared: &Shared, request: RequestId) -> Option<Publishing> {
        if !self.requests.is_live(request) || self.journeys.is_away(request) {
            return None;
        }
        let mut earlier = self.handovers.published.remove(&request).unwrap_or_default();
        let (mut streams, mut pinned) = (Vec::new(), Vec::new());
        for (id, stream) in self.streams_of(request).filter(|(_, s)| s.len > 0) {
            let (label, len, generation) = (id.label, stream.len, stream.generation);
            let is_same = |e: &Earlier| (e.label, e.len, e.generation) == (label, len, generation);
            let held = stream.pages[..shared.pages_for(len) as usize].to_vec();
            pinned.extend_from_slice(&held);
            streams.push(Leaving {
                label,
                len,
                generation,
                released: stream.released,
                protected: stream.protected,
                earlier: earlier.iter().position(is_same).map(|at| earlier.swap_remove(at).pages),
                held,
            });
        }
        pinned.iter().for_each(|&page| self.pool.pin(page));
        for leaving in &streams {
            if let Some(stream) = self.requests.get_mut(leaving.id(request)) {
                stream.in_flight += 1;
                stream.rewriters += 1;
            }
        }
        let id = self.in_flight.begin(pinned);
        self.handovers.publishing.push((request, id));
        Some(Publishing { id, streams })
    }

    /// Lets go of streams that were published at these places, and notes those. `false` where the request has
    /// changed meanwhile.
    fn finish_publishing(
        &mut self,
        shared: &Shared,
        request: RequestId,
        publishing: &Publishing,
        places: Option<&[RemotePages]>,
    ) -> bool {
        let mut pages = self.in_flight.end(publishing.id);
        self.release(shared, &mut pages);
        // A reset takes the marks off the streams, and this one from the list.
        let listed = self.handovers.publishing.iter().position(|&(_, id)| id == publishing.id);
        let mut is_same = listed.is_some();
        if let Some(at) = listed {
            self.handovers.publishing.swap_remove(at);
            for leaving in &publishing.streams {
                let Some(stream) = self.requests.get_mut(leaving.id(request)) else { continue };
                stream.in_flight -= 1;
                stream.rewriters -= 1;
                is_same &= stream.generation == leaving.generation;
            }
        }
        if let Some(places) = places.filter(|_| is_same) {
            let now = publishing.streams.iter().zip(places).map(|(leaving, pages)| {
                let &Leaving { label, len, generation, .. } = leaving;
                Earlier { label, len, generation, pages: pages.clone() }
            });
            self.handovers.published.insert(request, now.collect());
        }
        is_same
    }
}

fn exhausted(error: TransferError) -> ResourceError {
    let kind = resource_api::ErrorKind::EXHAUSTED;
    ResourceError::new(kind, format!("nothing can be published: {error}"))
}

impl Kv {
    /// See [`resource_api::Resource::publish`]. The same again while nothing has changed and the lease lasts.
    ///
    /// # Errors
    /// `EXHAUSTED` where the region has no room.
    pub(crate) fn publish_request(&self, request: RequestId) -> Result<Option<PublishedInfo>> {
        let Some(transfer) = &self.shared.transfer else { return Ok(None) };
        let begin = |state: &mut State, shared: &Shared| state.begin_publishing(shared, request);
        let Some(publishing) = self.with_state(begin) else { return Ok(None) };
        let mut info = PublishedInfo::new(PUBLISHED.0, PUBLISHED.1);
        let mut places = Vec::new();
        let copied: Result<()> = publishing.streams.iter().try_for_each(|leaving| {
            let pages = transfer.copy(&self.shared, leaving).map_err(exhausted)?;
            let name = self.shared.host.label_name(leaving.label);
            info.set(&name, leaving.len.into(), transfer.tell(leaving, &pages)?);
            places.push(pages);
            Ok(())
        });
        let done = copied.is_ok().then_some(&places[..]);
        let is_same = self.with_state(|state, shared| {
            state.finish_publishing(shared, request, &publishing, done)
        });
        if copied.is_err() || !is_same {
            // Nobody has been told of them.
            let is_told = |l: &Leaving, lease| l.earlier.as_ref().is_some_and(|e| e.lease == lease);
            let leaving = publishing.streams.iter().zip(&places);
            let new = leaving.filter(|(l, pages)| !is_told(l, pages.lease));
            let end = |leases: &mut Leases| {
                new.for_each(|(_, pages)| {
                    leases.end(Lease(pages.lease));
                });
            };
            transfer.with_leases(end).map_err(exhausted)?;
        }
        copied?;
        Ok(Some(info).filter(|_| is_same && !places.is_empty()))
    }
}
