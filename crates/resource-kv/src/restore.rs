//! Pages that come back from a tier for the prefix that they hold.
//!
//! They come before what asks for them is done, without the cache's lock: into pages that nobody else has
//! and no key leads to until they are whole. Then they are pages that the pool keeps, as if they had never
//! left, and whoever asked looks them up there. Who asks for the same meanwhile waits for nobody and copies
//! them, too; whose copy is there first is kept.

use crate::copies::{Failed, PageCopy};
use crate::keys::Key;
use crate::resource::Kv;
use crate::spill::Spill;
use crate::state::{Shared, State};
use crate::stream::StreamId;
use crate::tiers::Slot;

/// Copies before a lookup at most. Others may take what was fetched, and not for ever.
const MOST_FETCHES: usize = 16;

/// What a lookup will ask for.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Keys of pages that follow each other.
    pub(crate) keys: Vec<Key>,
    /// Those for which a page is looked for that begins like the one after those found.
    pub(crate) streams: Vec<StreamId>,
}

/// Where a page is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Here(u32),
    Away(Slot),
}

/// Pages that are to come back.
#[derive(Debug)]
struct Restore {
    /// In flight are the pages of the pool before and between them, too, so that none of these leaves.
    id: u64,
    copies: Vec<PageCopy>,
}

/// What is to be done without the lock before a lookup.
#[derive(Debug)]
enum Fetch {
    Room(Spill),
    Pages(Restore),
}

impl State {
    fn place_of(&self, key: Key) -> Option<Place> {
        let here = self.pool.find(key).map(Place::Here);
        here.or_else(|| self.tiers.find(key).map(Place::Away))
    }

    /// Begins to bring back what tiers have of what is wanted, or to make room for it. What there is no room
    /// for stays where it is. `None` where nothing is to be done.
    fn begin_fetch(&mut self, shared: &Shared, wanted: &Wanted) -> Option<Fetch> {
        let places = wanted.keys.iter().map_while(|&key| Some((key, self.place_of(key)?)));
        let mut run: Vec<(Key, Place)> = places.collect();
        let (found, mut copied, mut is_spare) = (run.len(), 0, false);
        for &id in &wanted.streams {
            let Some(key) = self.similar_key(shared, id, found) else { continue };
            copied += 1;
            let Some((key, place)) = key.and_then(|key| Some((key, self.place_of(key)?))) else {
                continue;
            };
            is_spare |= match place {
                Place::Here(page) => self.pool.owners(page) == 0 && self.tiers.find(key).is_some(),
                Place::Away(_) => true,
            };
            if run.iter().all(|(known, _)| *known != key) {
                run.push((key, place));
            }
        }
        // Where there is no room for a copy of it, too, a page that a tier has is taken as it is.
        copied -= u32::from(is_spare);
        let away = run.iter().filter(|(_, place)| matches!(place, Place::Away(_))).count() as u32;
        if away == 0 && copied == 0 {
            return None;
        }
        self.pool.settle(shared.completed_epoch());
        // Those that lie here must not make room for those that come.
        for &(_, place) in &run {
            if let Place::Here(page) = place {
                self.pool.retain(page);
            }
        }
        let lacking = (away + copied).saturating_sub(self.pool.ready());
        let spill = match lacking.min(self.pool.cached()) {
            0 => None,
            lacking => {
                // Nor may the slots of those that come: they are the last to go.
                for &(_, place) in &run {
                    if let Place::Away(slot) = place {
                        self.tiers.touch(slot);
                    }
                }
                self.begin_spill(shared, lacking)
            }
        };
        let may_come = spill.is_none();
        let (mut pages, mut copies) = (Vec::new(), Vec::new());
        for (key, place) in run {
            match place {
                Place::Here(page) => pages.push(page),
                Place::Away(slot) if may_come && self.pool.take(1, &mut pages) => {
                    self.tiers.hold_in_flight(slot);
                    let (page, store) = (pages[pages.len() - 1], self.tiers.store(slot));
                    copies.push(PageCopy { page, slot, key: Some(key), store, fall: None });
                }
                Place::Away(_) => {}
            }
        }
        if copies.is_empty() {
            self.release(shared, &mut pages);
            return spill.map(Fetch::Room);
        }
        Some(Fetch::Pages(Restore { id: self.in_flight.begin(pages), copies }))
    }

    fn finish_fetch(&mut self, shared: &Shared, fetch: &Fetch, failed: &Failed) {
        match fetch {
            Fetch::Room(spill) => self.finish_spill(shared, spill, failed),
            Fetch::Pages(restore) => self.finish_restore(shared, restore, failed),
        }
    }

    /// Keeps what has come back, as pages that nobody has.
    fn finish_restore(&mut self, shared: &Shared, restore: &Restore, failed: &Failed) {
        for (at, copy) in restore.copies.iter().enumerate() {
            let is_there = failed.iter().all(|(of, _)| *of != at);
            if !is_there {
                self.tiers.forget(copy.slot);
            }
            self.tiers.let_land(copy.slot);
            // Another one may have come under the key meanwhile: then this one comes free.
            if let Some(key) = copy.key.filter(|_| is_there) {
                self.tiers.restored += u64::from(self.pool.insert(key, copy.page));
            }
        }
        let mut pages = self.in_flight.end(restore.id);
        self.release(shared, &mut pages);
    }
}

impl Kv {
    /// Brings back what tiers have of what `wanted` says, without the lock, and runs `f` under the lock in
    /// which that has come.
    pub(crate) fn with_pages<R>(
        &self,
        mut wanted: impl FnMut(&mut State, &Shared) -> Option<Wanted>,
        mut f: impl FnMut(&mut State, &Shared) -> R,
    ) -> R {
        let mut last: Option<(Fetch, Failed)> = None;
        for left in (0..=MOST_FETCHES).rev() {
            let next = self.with_state(|state, shared| {
                if let Some((fetch, failed)) = last.take() {
                    state.finish_fetch(shared, &fetch, &failed);
                }
                let has_tiers = !state.tiers.is_empty() && left > 0;
                let wanted = if has_tiers { wanted(state, shared) } else { None };
                match wanted.and_then(|wanted| state.begin_fetch(shared, &wanted)) {
                    Some(fetch) => Ok(fetch),
                    None => {
                        let result = f(state, shared);
                        // There is no more room than was made.
                        state.wanted_room = 0;
                        Err(result)
                    }
                }
            });
            let fetch = match next {
                Ok(fetch) => fetch,
                Err(result) => return result,
            };
            let failed = match &fetch {
                Fetch::Room(spill) => self.shared.copy_out(&spill.copies),
                Fetch::Pages(restore) => self.shared.copy_in(&restore.copies),
            };
            last = Some((fetch, failed));
        }
        unreachable!("the last time nothing is fetched")
    }
}
