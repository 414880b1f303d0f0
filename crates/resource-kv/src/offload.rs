//! Requests that leave the pool and come back.
//!
//! All streams of a request go together or not at all. Pages that it alone owns are copied to slots of
//! the tiers; those that others share stay where they are, and stay shared. While a request is away, or on
//! its way, its streams count as in use by a step that rewrites them, so nothing else touches them.
//!
//! A move has three parts: slots or pages are claimed under the lock, contents are copied without it, and
//! then it is made final. A request that was reset or removed meanwhile has no part in the last: then what
//! was claimed goes back.

use std::collections::HashMap;

use resource_api::host::level;
use resource_api::{HostServices, LabelId, RequestId, Result};

use crate::copies::{Failed, PageCopy};
use crate::keys::Key;
use crate::pool::PagePool;
use crate::resource::Kv;
use crate::state::{Shared, State};
use crate::stream::{NO_SEAT, StreamId};
use crate::tiers::Slot;

/// Where a page of a stream is while its request is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the pool, where others have it too.
    Shared(u32),
    /// In a tier, under this key.
    Slot(Slot, Option<Key>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Its pages are being copied out of the pool.
    Leaving,
    Away,
    /// Its pages are being copied back.
    Returning,
}

/// A request that is away.
#[derive(Debug)]
pub(crate) struct Journey {
    /// Tells the moves of one request apart.
    id: u64,
    way: Way,
    /// By label, the pages of its streams in order.
    streams: Vec<(LabelId, Vec<Place>)>,
    /// The pages that it owns now: the shared ones once it is away, and those that it returns to.
    pages: Vec<u32>,
}

impl Journey {
    fn slots(&self) -> impl Iterator<Item = (Slot, Option<Key>)> + '_ {
        self.streams.iter().flat_map(|(_, places)| places).filter_map(|place| match *place {
            Place::Slot(slot, key) => Some((slot, key)),
            Place::Shared(_) => None,
        })
    }
}

/// The requests that are away.
#[derive(Debug, Default)]
pub(crate) struct Journeys {
    of: HashMap<RequestId, Journey>,
    /// Moves whose request has gone while contents were copied.
    orphans: Vec<Journey>,
    last: u64,
}

impl Journeys {
    #[inline]
    pub(crate) fn is_away(&self, request: RequestId) -> bool {
        !self.of.is_empty() && self.of.contains_key(&request)
    }

    pub(crate) fn len(&self) -> usize {
        self.of.len()
    }

    fn all(&self) -> impl Iterator<Item = &Journey> {
        self.of.values().chain(&self.orphans)
    }

    /// Pages of the pool that belong to requests that are away.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &u32> {
        self.all().flat_map(|journey| &journey.pages)
    }

    /// Slots of the tiers that are held.
    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.all().flat_map(Journey::slots).map(|(slot, _)| slot)
    }

    /// Ends a move if its request is still the one that began it; hands the orphan out otherwise.
    fn is_current(&mut self, request: RequestId, id: u64) -> Result<(), Journey> {
        if self.of.get(&request).is_some_and(|journey| journey.id == id) {
            return Ok(());
        }
        let at = self.orphans.iter().position(|journey| journey.id == id);
        Err(self.orphans.swap_remove(at.expect("a move ends once")))
    }
}

/// A move whose contents are to be copied.
#[derive(Debug)]
pub(crate) struct Move {
    id: u64,
    request: RequestId,
    copies: Vec<PageCopy>,
    /// Pages that come free by it.
    freed: u64,
}

impl State {
    /// Pages that the request alone owns, if it can leave now.
    pub(crate) fn reclaimable(&self, request: RequestId) -> u64 {
        if self.tiers.is_empty() || !self.is_at_rest(request) {
            return 0;
        }
        self.own_pages(request)
    }

    /// Pages that nobody shares with the request.
    pub(crate) fn own_pages(&self, request: RequestId) -> u64 {
        if !self.requests.is_live(request) {
            return 0;
        }
        let own = self.streams_of(request).flat_map(|(_, s)| &s.pages);
        own.filter(|&&page| self.pool.owners(page) == 1).count() as u64
    }

    /// Whether no step and no move uses the request, which is known.
    fn is_at_rest(&self, request: RequestId) -> bool {
        self.requests.is_live(request)
            && self.requests.has_no_lease(request)
            && self.streams_of(request).all(|(_, s)| s.in_flight == 0)
    }

    pub(crate) fn streams_of(
        &self,
        request: RequestId,
    ) -> impl Iterator<Item = (StreamId, &crate::stream::Stream)> {
        let labels = (0..).map_while(move |n| self.requests.nth_label(request, n));
        labels.filter_map(move |label| {
            let id = StreamId { request, label };
            self.requests.get(id).map(|stream| (id, stream))
        })
    }

    /// Claims a slot for every page that only the request has. `None`, and no change, where it cannot
    /// leave now, has nothing to leave with, or the tiers have no room for all of it.
    pub(crate) fn start_offload(&mut self, shared: &Shared, request: RequestId) -> Option<Move> {
        let freed = self.reclaimable(request);
        if freed == 0 {
            return None;
        }
        let mut journey =
            Journey { id: 0, way: Way::Leaving, streams: Vec::new(), pages: Vec::new() };
        let mut wanted = Vec::new();
        for (id, stream) in self.streams_of(request) {
            let used = shared.pages_for(stream.len) as usize;
            journey.streams.push((id.label, Vec::with_capacity(used)));
            wanted
                .extend(stream.pages[..used].iter().map(|&page| (journey.streams.len() - 1, page)));
        }
        let is_own = |pool: &PagePool, page| pool.owners(page) == 1;
        let key_of = |pool: &PagePool, page| pool.is_indexed(page).then(|| pool.key(page));
        // What a tier has already is held first, so that making room does not drop it.
        let kept = |state: &State, page| match is_own(&state.pool, page) {
            true => key_of(&state.pool, page).and_then(|key| state.tiers.find(key)),
            false => None,
        };
        let found: Vec<Option<Slot>> = wanted.iter().map(|&(_, page)| kept(self, page)).collect();
        found.iter().flatten().for_each(|&slot| self.tiers.hold(slot));
        let lacking = wanted.iter().zip(&found);
        let lacking = lacking.filter(|((_, p), slot)| slot.is_none() && is_own(&self.pool, *p));
        let mut needed = lacking.count();
        if needed > self.tiers.room() {
            found.iter().flatten().for_each(|&slot| self.tiers.let_go(slot));
            return None;
        }
        let mut copies = Vec::new();
        for (&(stream, page), found) in wanted.iter().zip(&found) {
            let key = key_of(&self.pool, page);
            let place = match (is_own(&self.pool, page), *found) {
                (false, _) => Place::Shared(page),
                (true, Some(slot)) => Place::Slot(slot, key),
                (true, None) => {
                    let (slot, fall) =
                        self.tiers.take(needed).expect("there is room for all of them");
                    needed -= 1;
                    let store = self.tiers.store(slot);
                    copies.push(PageCopy { page, slot, key, store, fall });
                    Place::Slot(slot, key)
                }
            };
            journey.streams[stream].1.push(place);
        }
        let id = self.begin_journey(request, journey);
        Some(Move { id, request, copies, freed })
    }

    fn begin_journey(&mut self, request: RequestId, mut journey: Journey) -> u64 {
        self.journeys.last += 1;
        let id = self.journeys.last;
        journey.id = id;
        for &(label, _) in &journey.streams {
            if let Some(stream) = self.requests.get_mut(StreamId { request, label }) {
                stream.in_flight += 1;
                stream.rewriters += 1;
            }
        }
        self.journeys.of.insert(request, journey);
        id
    }

    /// Takes a request that is here, or is to start anew, off the list.
    fn end_journey(&mut self, request: RequestId) -> Option<Journey> {
        let journey = self.journeys.of.remove(&request)?;
        for &(label, _) in &journey.streams {
            if let Some(stream) = self.requests.get_mut(StreamId { request, label }) {
                stream.in_flight -= 1;
                stream.rewriters -= 1;
            }
        }
        Some(journey)
    }

    /// Makes an offload final. Says how many pages came free: none where a copy has failed or the
    /// request has gone meanwhile.
    ///
    /// # Errors
    /// That of the copying; the request is here as before.
    fn finish_offload(&mut self, shared: &Shared, moved: &Move, failed: Failed) -> Result<u64> {
        let falls = moved.copies.iter().filter_map(|copy| copy.fall.as_deref());
        falls.for_each(|fall| self.tiers.fallen(fall));
        if let Err(mut orphan) = self.journeys.is_current(moved.request, moved.id) {
            self.let_go_of_slots(&orphan);
            self.release(shared, &mut orphan.pages);
            return Ok(0);
        }
        if let Some((at, error)) = failed.into_iter().next() {
            self.tiers.failed(moved.copies[at].slot, &error);
            if let Some(journey) = self.end_journey(moved.request) {
                self.let_go_of_slots(&journey);
            }
            return Err(error);
        }
        for copy in &moved.copies {
            self.tiers.fill(copy.slot, copy.key);
        }
        let mut journey = self.journeys.of.remove(&moved.request).expect("found above");
        for (label, places) in &journey.streams {
            let id = StreamId { request: moved.request, label: *label };
            let table = self.new_table();
            let Some(stream) = self.requests.get_mut(id) else { continue };
            let mut outgoing = std::mem::take(&mut self.outgoing);
            let stays = |at: usize| matches!(places.get(at), Some(Place::Shared(_)));
            for (at, page) in stream.pages.drain(..).enumerate() {
                let to = if stays(at) { &mut journey.pages } else { &mut outgoing };
                to.push(page);
            }
            stream.table = table;
            self.seats.leave(std::mem::replace(&mut stream.seat, NO_SEAT));
            self.release(shared, &mut outgoing);
            self.outgoing = outgoing;
            self.publish(shared, id);
        }
        journey.way = Way::Away;
        self.journeys.of.insert(moved.request, journey);
        Ok(moved.freed)
    }

    /// Whether the request is away and would fit now.
    pub(crate) fn can_reload(&mut self, shared: &Shared, request: RequestId) -> bool {
        self.pool.settle(shared.completed_epoch());
        let journey = self.journeys.of.get(&request);
        journey.is_some_and(|j| j.way == Way::Away && self.count_for(j).is_some())
    }

    /// Pages that the request would have to take, if there are so many.
    fn count_for(&self, journey: &Journey) -> Option<u32> {
        let (mut fresh, mut cached) = (0, Vec::new());
        for (_, key) in journey.slots() {
            match key.and_then(|key| self.pool.find(key)) {
                Some(page) if self.pool.owners(page) == 0 => cached.push(page),
                Some(_) => {}
                None => fresh += 1,
            }
        }
        cached.sort_unstable();
        cached.dedup();
        let others = self.pool.cached() - cached.len() as u32;
        (fresh <= self.pool.ready() + others).then_some(fresh)
    }

    /// Claims a page for everything that is in a tier; what the pool still has under its key is shared
    /// again. `None`, and no change, where it does not fit.
    pub(crate) fn start_reload(&mut self, shared: &Shared, request: RequestId) -> Option<Move> {
        self.pool.settle(shared.completed_epoch());
        let mut journey = self.journeys.of.remove(&request)?;
        let claimed = (journey.way == Way::Away)
            .then(|| self.count_for(&journey))
            .flatten()
            .and_then(|fresh| self.claim_pages(shared, &journey, fresh));
        let Some(copies) = claimed else {
            self.journeys.of.insert(request, journey);
            return None;
        };
        // From now on the journey owns all pages of the request, in order.
        let mut copied = copies.iter().map(|copy| copy.0);
        let mut pages = Vec::new();
        for (_, places) in &journey.streams {
            for place in places {
                pages.push(match *place {
                    Place::Shared(page) => page,
                    Place::Slot(..) => copied.next().expect("one for each slot"),
                });
            }
        }
        journey.pages = pages;
        journey.way = Way::Returning;
        let id = journey.id;
        let tiers = &self.tiers;
        let copies = copies.into_iter().filter_map(|(page, fresh)| {
            let (slot, key) = fresh?;
            Some(PageCopy { page, slot, key, store: tiers.store(slot), fall: None })
        });
        let copies = copies.collect();
        self.journeys.of.insert(request, journey);
        Some(Move { id, request, copies, freed: 0 })
    }

    /// A page for every slot of the journey, in order, and the slot where it is to be filled from that.
    #[allow(clippy::type_complexity)]
    fn claim_pages(
        &mut self,
        shared: &Shared,
        journey: &Journey,
        fresh: u32,
    ) -> Option<Vec<(u32, Option<(Slot, Option<Key>)>)>> {
        let find = |state: &State, key: Option<Key>| key.and_then(|key| state.pool.find(key));
        let found: Vec<Option<u32>> = journey.slots().map(|(_, key)| find(self, key)).collect();
        found.iter().flatten().for_each(|&page| self.pool.retain(page));
        let mut taken = Vec::new();
        let lacking = fresh.saturating_sub(self.pool.ready());
        if !self.make_ready(shared, lacking) || !self.pool.take(fresh, &mut taken) {
            let mut found: Vec<u32> = found.into_iter().flatten().collect();
            self.release(shared, &mut found);
            return None;
        }
        let mut taken = taken.into_iter();
        let claims = journey.slots().zip(found).map(|(slot, found)| match found {
            Some(page) => (page, None),
            None => (taken.next().expect("as many as were counted"), Some(slot)),
        });
        Some(claims.collect())
    }

    /// Makes a reload final.
    ///
    /// # Errors
    /// That of the copying; the request stays away, and where a page is damaged it has to be computed
    /// again.
    fn finish_reload(&mut self, shared: &Shared, moved: &Move, failed: Failed) -> Result<bool> {
        if let Err(mut orphan) = self.journeys.is_current(moved.request, moved.id) {
            self.let_go_of_slots(&orphan);
            self.release(shared, &mut orphan.pages);
            return Ok(false);
        }
        failed.iter().for_each(|&(at, _)| self.tiers.forget(moved.copies[at].slot));
        if let Some((_, error)) = failed.into_iter().next() {
            let mut journey = self.journeys.of.remove(&moved.request).expect("found above");
            let is_shared = |place: &&Place| matches!(place, Place::Shared(_));
            let places = journey.streams.iter().flat_map(|(_, places)| places);
            let (mut shared_pages, mut rest) = (Vec::new(), Vec::new());
            for (place, page) in places.zip(journey.pages.drain(..)) {
                if is_shared(&place) { &mut shared_pages } else { &mut rest }.push(page);
            }
            journey.pages = shared_pages;
            journey.way = Way::Away;
            self.journeys.of.insert(moved.request, journey);
            self.release(shared, &mut rest);
            return Err(error);
        }
        for copy in &moved.copies {
            if let Some(key) = copy.key {
                self.pool.insert(key, copy.page);
            }
        }
        let mut journey = self.end_journey(moved.request).expect("found above");
        self.let_go_of_slots(&journey);
        let mut pages = journey.pages.drain(..);
        for (label, places) in &journey.streams {
            let id = StreamId { request: moved.request, label: *label };
            let table = self.new_table();
            if let Some(stream) = self.requests.get_mut(id) {
                stream.pages.extend(pages.by_ref().take(places.len()));
                stream.table = table;
            }
            self.publish(shared, id);
        }
        for &(label, _) in &journey.streams {
            let id = StreamId { request: moved.request, label };
            let Some((stream, chain)) = self.requests.get_with_chain(id) else { continue };
            let last = stream.pages[..chain.indexed.min(stream.held()) as usize].last();
            chain.tip_is_own = last.is_none_or(|&page| self.pool.is_indexed(page));
        }
        self.pool.note_peak();
        Ok(true)
    }

    /// Forgets that a request is away: it is to start anew. What it has in tiers is given up.
    pub(crate) fn cancel_journey(&mut self, shared: &Shared, request: RequestId) {
        if !self.journeys.is_away(request) {
            return;
        }
        let Some(mut journey) = self.end_journey(request) else { return };
        match journey.way {
            Way::Away => {
                self.let_go_of_slots(&journey);
                self.release(shared, &mut journey.pages);
                return;
            }
            // The streams are about to give up what is still read.
            Way::Leaving => {
                for (label, places) in &journey.streams {
                    let stream = self.requests.get(StreamId { request, label: *label });
                    let pages = stream.into_iter().flat_map(|s| &s.pages).zip(places);
                    journey.pages.extend(pages.map(|(&page, _)| page));
                }
                journey.pages.iter().for_each(|&page| self.pool.pin(page));
            }
            Way::Returning => {}
        }
        // Contents are being copied: whoever does that gives back what it uses.
        self.journeys.orphans.push(journey);
    }

    fn let_go_of_slots(&mut self, journey: &Journey) {
        // The last page first, as elsewhere: it is the first to go.
        let slots: Vec<Slot> = journey.slots().map(|(slot, _)| slot).collect();
        slots.into_iter().rev().for_each(|slot| self.tiers.let_go(slot));
    }
}

impl Kv {
    /// See [`resource_api::Resource::offload`].
    pub(crate) fn offload_request(&self, request: RequestId) -> Result<u64> {
        let Some(moved) = self.with_state(|state, shared| state.start_offload(shared, request))
        else {
            return Ok(0);
        };
        let failed = self.shared.copy_out(&moved.copies);
        match self.with_state(|state, shared| state.finish_offload(shared, &moved, failed)) {
            Ok(freed) => {
                self.shared.count("offloaded_pages", freed);
                Ok(freed)
            }
            // It is here as before, and the host can do without.
            Err(e) => {
                let message = format!("{}: request {request} stays: {e}", self.shared.key);
                self.shared.host.log(level::WARN, "kv", &message);
                Ok(0)
            }
        }
    }

    /// See [`resource_api::Resource::reload`].
    pub(crate) fn reload_request(&self, request: RequestId) -> Result<bool> {
        if !self.with_state(|state, _| state.journeys.is_away(request)) {
            return Ok(true);
        }
        let Some(moved) = self.with_room(|state, shared| state.start_reload(shared, request))
        else {
            return Ok(false);
        };
        let failed = self.shared.copy_in(&moved.copies);
        let pages = moved.copies.len() as u64;
        let back = self.with_state(|state, shared| state.finish_reload(shared, &moved, failed))?;
        self.shared.count("reloaded_pages", if back { pages } else { 0 });
        Ok(back)
    }
}

#[cfg(test)]
mod tests;
