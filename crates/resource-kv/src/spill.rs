//! Cached pages that leave the pool for a tier.
//!
//! Contents are copied without the cache's lock. A page that leaves stays where it is, under its key, until
//! its copy is made; then it goes, unless somebody has come to share it.

use std::collections::HashMap;

use resource_api::HostServices;
use resource_api::host::level;

use crate::copies::{Failed, PageCopy};
use crate::resource::Kv;
use crate::state::{Shared, State};

/// Pages that copies in flight own.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    of: HashMap<u64, Vec<u32>>,
    last: u64,
    /// Of them, those that will be free.
    leaving: u32,
}

impl InFlight {
    /// Notes pages that a copy has come to own. Says under what to end it.
    pub(crate) fn begin(&mut self, pages: Vec<u32>) -> u64 {
        self.last += 1;
        self.of.insert(self.last, pages);
        self.last
    }

    /// Hands out the pages of a copy that has ended.
    pub(crate) fn end(&mut self, id: u64) -> Vec<u32> {
        self.of.remove(&id).unwrap_or_default()
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &u32> {
        self.of.values().flatten()
    }

    /// Number of cached pages that will be free once they are copied.
    pub(crate) fn leaving(&self) -> u32 {
        self.leaving
    }
}

/// Cached pages that are to leave.
#[derive(Debug)]
pub(crate) struct Spill {
    id: u64,
    /// Of those that no tier has, the one to go first in front.
    pub(crate) copies: Vec<PageCopy>,
}

impl State {
    /// Makes so many cached pages ready, or none if there are not so many. Where tiers are to have what they
    /// hold that is not done here: it is noted as wanted, and the caller changes nothing and fails, to be
    /// called again by [`Kv::with_room`].
    pub(crate) fn make_ready(&mut self, shared: &Shared, pages: u32) -> bool {
        if pages > 0 && !self.tiers.is_empty() {
            if pages <= self.pool.cached() {
                self.wanted_room = pages;
            }
            return false;
        }
        self.pool.evict(pages, shared.completed_epoch())
    }

    /// Whether what failed is to be called again once there is room.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.wanted_room > 0
    }

    /// Begins to move cached pages to the tiers, those not used for the longest. `None` where there are not
    /// so many, or a step still uses one.
    pub(crate) fn begin_spill(&mut self, shared: &Shared, pages: u32) -> Option<Spill> {
        let leaving = self.pool.begin_evict(pages, shared.completed_epoch())?;
        // What a tier has already must not make room for the rest.
        for &page in &leaving {
            let found = self.tiers.find(self.pool.key(page));
            found.into_iter().for_each(|slot| self.tiers.touch(slot));
        }
        let mut copies = Vec::new();
        // Where there is no room for all, those that were used last are kept.
        for &page in leaving.iter().rev() {
            let key = self.pool.key(page);
            if let Some((slot, fall)) = self.tiers.take_for(key) {
                let store = self.tiers.store(slot);
                copies.push(PageCopy { page, slot, key: Some(key), store, fall });
            }
        }
        copies.reverse();
        self.in_flight.leaving += pages;
        Some(Spill { id: self.in_flight.begin(leaving), copies })
    }

    /// Evicts what has been copied; also what could not be.
    pub(crate) fn finish_spill(&mut self, shared: &Shared, spill: &Spill, failed: &Failed) {
        for (at, copy) in spill.copies.iter().enumerate() {
            copy.fall.iter().for_each(|fall| self.tiers.fallen(fall));
            let failed = failed.iter().find(|(of, _)| *of == at).map(|(_, why)| why);
            copy.key.into_iter().for_each(|key| self.tiers.kept(copy.slot, key, failed));
        }
        if let Some(why) = self.tiers.take_trouble() {
            let message = format!("{}: a cached page is dropped: {why}", shared.key);
            shared.host.log(level::WARN, "kv", &message);
        }
        let completed = shared.completed_epoch();
        for page in self.in_flight.end(spill.id) {
            self.in_flight.leaving -= 1;
            let is_evicted = self.pool.end_evict(page, completed);
            self.untold_evictions += u64::from(is_evicted);
        }
    }
}

impl Kv {
    /// Runs `f` under the lock, and again each time that it has failed for room that cached pages make by
    /// leaving for a tier: those are copied in between, without the lock.
    pub(crate) fn with_room<R>(&self, mut f: impl FnMut(&mut State, &Shared) -> R) -> R {
        loop {
            let (result, spill) = self.with_state(|state, shared| {
                state.wanted_room = 0;
                let result = f(state, shared);
                let spill = match std::mem::take(&mut state.wanted_room) {
                    0 => None,
                    wanted => state.begin_spill(shared, wanted),
                };
                (result, spill)
            });
            let Some(spill) = spill else { return result };
            let failed = self.shared.copy_out(&spill.copies);
            self.with_state(|state, shared| state.finish_spill(shared, &spill, &failed));
        }
    }
}
