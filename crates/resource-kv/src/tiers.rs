//! Pages that are not in the pool: in host memory, and in a file.
//!
//! A tier is a row of slots of one page each. A slot is free, held (by requests that are off the device),
//! or idle: kept for the prefix that it holds until its place is needed. What an upper tier has no room
//! for falls to the one below. Contents under a key never change, so a page may be in several tiers.

mod disk;
mod fall;
mod memory;
mod origins;
mod pinned;
mod settings;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::cuda::PinnedBuffer;
use resource_api::{ErrorKind, ResourceError, Result};

pub(crate) use self::disk::DiskStore;
pub(crate) use self::fall::Fall;
pub(crate) use self::memory::MemoryStore;
pub(crate) use self::origins::{Origin, Origins};
pub(crate) use self::pinned::PinnedStore;
use crate::keys::{Key, Link};

/// Where the pages of a tier lie. No call takes the cache's lock.
pub(crate) trait PageStore: Send + Sync + fmt::Debug {
    /// Keeps a page. Nobody reads the slot meanwhile.
    ///
    /// # Errors
    /// When it could not be kept; the slot then holds nothing. `EXHAUSTED` where there is no room for it.
    fn put(&self, slot: u32, key: Option<Key>, page: &[u8]) -> Result<()>;

    /// Hands out what [`PageStore::put`] kept.
    ///
    /// # Errors
    /// When it is not what was kept; and those of `take`.
    fn get(
        &self,
        slot: u32,
        key: Option<Key>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()>;

    /// Whether [`PageStore::put`] takes no longer than copying memory does, so that steps which write to the
    /// pool can wait for it.
    fn is_quick(&self) -> bool {
        false
    }

    /// The slot, where a device copies from and to it by itself. Nobody else uses it meanwhile.
    fn pinned(&self, _slot: u32) -> Option<MutexGuard<'_, PinnedBuffer<u8>>> {
        None
    }
}

/// The refusal of a store.
fn no_slot(slot: u32) -> ResourceError {
    ResourceError::internal(format!("the host pool has no slot {slot}"))
}

/// A slot of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) tier: usize,
    pub(crate) at: u32,
}

/// What a tier's book says of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    key: Option<Key>,
    /// Requests that hold it.
    holders: u32,
    /// Its place among the idle ones; 0 while it is none.
    stamp: u64,
}

/// So many slots of a store without room for more are ones that it has written before, and then it is tried
/// again.
const REUSED: u32 = 256;

/// The slots of a tier.
#[derive(Debug)]
pub(crate) struct Tier {
    name: &'static str,
    store: Arc<dyn PageStore>,
    records: Vec<Record>,
    free: Vec<u32>,
    by_key: HashMap<Key, u32>,
    /// By when they became idle, the one to go first in front.
    idle: BTreeMap<u64, u32>,
    stamps: u64,
    /// For so many pages to come, idle slots go before free ones: the store has no room for what it has not
    /// written yet.
    reuse: u32,
}

/// How many slots a tier has, and of what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierUse {
    pub(crate) slots: usize,
    pub(crate) free: usize,
    pub(crate) idle: usize,
    pub(crate) held: usize,
}

impl Tier {
    /// `slots` free slots.
    pub(crate) fn new(name: &'static str, store: Arc<dyn PageStore>, slots: u32) -> Self {
        Tier {
            name,
            store,
            records: vec![Record::default(); slots as usize],
            free: (0..slots).rev().collect(),
            by_key: HashMap::new(),
            idle: BTreeMap::new(),
            stamps: 0,
            reuse: 0,
        }
    }

    /// Notes that slots hold these pages already, the one to go first in front.
    pub(crate) fn with_contents(mut self, contents: impl IntoIterator<Item = (u32, Key)>) -> Self {
        let mut filled = vec![false; self.records.len()];
        for (slot, key) in contents {
            if !self.by_key.contains_key(&key)
                && !std::mem::replace(&mut filled[slot as usize], true)
            {
                self.records[slot as usize].key = Some(key);
                self.by_key.insert(key, slot);
                self.retire(slot);
            }
        }
        self.free.retain(|&slot| !filled[slot as usize]);
        self
    }

    fn is_known(&self, key: Key) -> bool {
        self.by_key.contains_key(&key)
    }

    fn hold(&mut self, slot: u32) {
        let record = &mut self.records[slot as usize];
        record.holders += 1;
        let stamp = std::mem::take(&mut record.stamp);
        self.idle.remove(&stamp);
    }

    /// Gives up one hold. With the last one the slot is idle where it has a key, and free otherwise.
    fn let_go(&mut self, slot: u32) {
        let record = &mut self.records[slot as usize];
        assert!(record.holders > 0, "slot {slot} is given up by nobody's holder");
        record.holders -= 1;
        match (record.holders, record.key) {
            (0, Some(_)) => self.retire(slot),
            (0, None) => self.free.push(slot),
            _ => {}
        }
    }

    /// Puts an idle slot behind all others.
    fn retire(&mut self, slot: u32) {
        self.stamps += 1;
        let record = &mut self.records[slot as usize];
        self.idle.remove(&record.stamp);
        record.stamp = self.stamps;
        self.idle.insert(self.stamps, slot);
    }

    /// Says what a held slot has come to hold. Another slot may have the key meanwhile: then this one
    /// is its holders' alone.
    fn fill(&mut self, slot: u32, key: Option<Key>) {
        let Some(key) = key.filter(|key| !self.by_key.contains_key(key)) else { return };
        self.records[slot as usize].key = Some(key);
        self.by_key.insert(key, slot);
    }

    /// Forgets what a slot holds. An idle one is free then.
    fn forget(&mut self, slot: u32) {
        let record = &mut self.records[slot as usize];
        if let Some(key) = record.key.take() {
            self.by_key.remove(&key);
        }
        let stamp = std::mem::take(&mut record.stamp);
        if self.idle.remove(&stamp).is_some() {
            self.free.push(slot);
        }
    }

    fn usage(&self) -> TierUse {
        let (slots, free, idle) = (self.records.len(), self.free.len(), self.idle.len());
        TierUse { slots, free, idle, held: slots - free - idle }
    }

    /// Slots that could be had.
    fn room(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    fn check(&self, holds: &HashMap<u32, u32>) -> Result<()> {
        let fault = |what: String| Err(ResourceError::internal(format!("{}: {what}", self.name)));
        let mut free = vec![false; self.records.len()];
        for &slot in &self.free {
            if std::mem::replace(&mut free[slot as usize], true) {
                return fault(format!("slot {slot} is free twice"));
            }
        }
        for (slot, record) in self.records.iter().enumerate() {
            let at = slot as u32;
            let found = holds.get(&at).copied().unwrap_or(0);
            if record.holders != found {
                return fault(format!(
                    "slot {slot} counts {} holders and has {found}",
                    record.holders
                ));
            }
            let idle = self.idle.get(&record.stamp) == Some(&at);
            if u32::from(free[slot]) + u32::from(idle) + u32::from(found > 0) != 1 {
                return fault(format!("slot {slot} is not one of free, idle and held"));
            }
            let known = record.key.map(|key| self.by_key.get(&key) == Some(&at));
            if known == Some(false) || (idle && known.is_none()) || (free[slot] && known.is_some())
            {
                return fault(format!("slot {slot} is not under its key"));
            }
        }
        match self.by_key.len() == self.records.iter().filter(|r| r.key.is_some()).count() {
            true => Ok(()),
            false => fault("keys lead to slots that do not have them".into()),
        }
    }
}

/// All tiers, the uppermost first. None where the settings want none.
#[derive(Debug, Default)]
pub(crate) struct Tiers {
    tiers: Vec<Tier>,
    /// Slots that copies in flight hold.
    in_flight: Vec<Slot>,
    /// Pages that could not be kept or were damaged.
    pub(crate) failures: u64,
    /// Why a page could not be kept, until somebody is told; and whether somebody was since one was kept.
    trouble: Option<String>,
    is_told: bool,
    /// Pages that came to a tier because the pool, or the tier above, had no room.
    pub(crate) spilled: u64,
    /// Pages that came back for the prefix that they hold.
    pub(crate) restored: u64,
    /// Of what the keys of pages are made, where a tier outlives the process.
    origins: Option<Arc<Mutex<Origins>>>,
    /// What the pages that were there at the start have, the oldest first.
    found: Vec<Origin>,
}

impl Tiers {
    pub(crate) fn new(tiers: Vec<Tier>) -> Self {
        Tiers { tiers, ..Tiers::default() }
    }

    /// With a tier that outlives the process: `origins` is what it writes beside its pages, `found` what was
    /// there.
    pub(crate) fn with_origins(mut self, origins: Arc<Mutex<Origins>>, found: Vec<Origin>) -> Self {
        (self.origins, self.found) = (Some(origins), found);
        self
    }

    /// What pages that were there at the start have, the oldest first; once.
    pub(crate) fn take_found(&mut self) -> Vec<Origin> {
        std::mem::take(&mut self.found)
    }

    /// Notes what the page with this key has, where a tier wants to know.
    #[inline]
    pub(crate) fn note(&self, key: Key, parent: &Link, tokens: &[u32]) {
        if let Some(origins) = &self.origins {
            origins.lock().unwrap_or_else(PoisonError::into_inner).note(key, parent, tokens);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }

    /// Slots that could be had.
    pub(crate) fn room(&self) -> usize {
        self.tiers.iter().map(Tier::room).sum()
    }

    /// The slot with this page.
    pub(crate) fn find(&self, key: Key) -> Option<Slot> {
        let mut tiers = self.tiers.iter().enumerate();
        tiers.find_map(|(tier, t)| Some(Slot { tier, at: *t.by_key.get(&key)? }))
    }

    pub(crate) fn store(&self, slot: Slot) -> Arc<dyn PageStore> {
        self.tiers[slot.tier].store.clone()
    }

    pub(crate) fn hold(&mut self, slot: Slot) {
        self.tiers[slot.tier].hold(slot.at);
    }

    pub(crate) fn let_go(&mut self, slot: Slot) {
        self.tiers[slot.tier].let_go(slot.at);
    }

    /// See [`Tier::fill`].
    pub(crate) fn fill(&mut self, slot: Slot, key: Option<Key>) {
        self.tiers[slot.tier].fill(slot.at, key);
    }

    /// Forgets what a slot holds: it is damaged.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.failures += 1;
        self.tiers[slot.tier].forget(slot.at);
    }

    /// Marks an idle slot as used just now.
    pub(crate) fn touch(&mut self, slot: Slot) {
        let tier = &mut self.tiers[slot.tier];
        if tier.records[slot.at as usize].stamp > 0 {
            tier.retire(slot.at);
        }
    }

    /// A slot for one holder, of the uppermost tier that has room, and what has to leave it first; nothing
    /// does that would take the room of so many in all.
    pub(crate) fn take(&mut self, needed: usize) -> Option<(Slot, Option<Box<Fall>>)> {
        let tier = (0..self.tiers.len()).find(|&tier| self.tiers[tier].room() > 0)?;
        let spare = self.room().saturating_sub(needed);
        self.take_in(tier, spare)
    }

    /// A slot for a page under its key, unless a tier has it: that one counts as used just now.
    /// [`Tiers::kept`] ends it.
    pub(crate) fn take_for(&mut self, key: Key) -> Option<(Slot, Option<Box<Fall>>)> {
        if let Some(slot) = self.find(key) {
            self.touch(slot);
            return None;
        }
        let (slot, fall) = self.take(1)?;
        self.in_flight.push(slot);
        Some((slot, fall))
    }

    /// Notes that a page has come to the slot that was taken for it, or why not.
    pub(crate) fn kept(&mut self, slot: Slot, key: Key, failed: Option<&ResourceError>) {
        match failed {
            None => {
                self.fill(slot, Some(key));
                self.spilled += 1;
                self.is_told = false;
            }
            Some(e) => self.failed(slot, e),
        }
        self.let_land(slot);
    }

    /// Holds a slot for a copy in flight.
    pub(crate) fn hold_in_flight(&mut self, slot: Slot) {
        self.hold(slot);
        self.in_flight.push(slot);
    }

    /// Ends a copy's hold.
    pub(crate) fn let_land(&mut self, slot: Slot) {
        let at = self.in_flight.iter().position(|held| *held == slot);
        self.in_flight.swap_remove(at.expect("a copy holds its slot"));
        self.let_go(slot);
    }

    /// Notes that a page could not be kept in a slot.
    pub(crate) fn failed(&mut self, slot: Slot, error: &ResourceError) {
        self.failures += 1;
        if !std::mem::replace(&mut self.is_told, true) {
            self.trouble = Some(error.message().to_string());
        }
        if error.kind() == ErrorKind::EXHAUSTED {
            self.tiers[slot.tier].reuse = REUSED;
        }
    }

    /// Why a page could not be kept, once for all that fail one after the other.
    pub(crate) fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// A slot of a tier for one holder; what had to go for it falls to the next tier, for which there are so
    /// many slots to spare.
    fn take_in(&mut self, tier: usize, spare: usize) -> Option<(Slot, Option<Box<Fall>>)> {
        let from = &mut self.tiers[tier];
        let reuse = from.reuse > 0 && !from.idle.is_empty();
        from.reuse = from.reuse.saturating_sub(1);
        let (at, fall) = match if reuse { None } else { from.free.pop() } {
            Some(at) => (at, None),
            None => {
                let (_, &at) = self.tiers[tier].idle.first_key_value()?;
                let fall = self.drop_down(tier, at, spare);
                self.tiers[tier].forget(at);
                (self.tiers[tier].free.pop()?, fall)
            }
        };
        self.tiers[tier].records[at as usize].holders = 1;
        Some((Slot { tier, at }, fall))
    }

    /// (name, use) of each tier.
    pub(crate) fn usage(&self) -> impl Iterator<Item = (&'static str, TierUse)> + '_ {
        self.tiers.iter().map(|t| (t.name, t.usage()))
    }

    /// Checks that every slot is free, idle, or held by as many as it counts.
    pub(crate) fn check(&self, held: impl Iterator<Item = Slot>) -> Result<()> {
        let mut holds = vec![HashMap::new(); self.tiers.len()];
        let held = held.chain(self.in_flight.iter().copied());
        held.for_each(|slot| *holds[slot.tier].entry(slot.at).or_insert(0) += 1);
        self.tiers.iter().zip(&holds).try_for_each(|(tier, holds)| tier.check(holds))
    }
}

#[cfg(test)]
mod tests;
