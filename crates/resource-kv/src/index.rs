//! Which page holds which key.

use device::{Table, prefetch};

use crate::keys::Key;
use crate::pool::SINK;

/// An open-addressing table from keys to pages, sized once for the whole pool, so that no step pays
/// for its growth.
///
/// A slot is 8 bytes: the page, and 32 bits of its key that say where the slot belongs and rule out
/// nearly every other key. The full key lies with the page, which whoever finds it touches anyway.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    slots: Table<u64>,
    mask: usize,
    len: u32,
}

/// A vacant slot: the sink is never indexed.
const VACANT: u64 = SINK as u64;

fn page_of(slot: u64) -> u32 {
    slot as u32
}

fn tag_of(key: Key) -> u32 {
    key as u32
}

fn pack(key: Key, page: u32) -> u64 {
    u64::from(tag_of(key)) << 32 | u64::from(page)
}

impl PrefixIndex {
    /// Makes room for `pages` keys: at most half of the slots are in use.
    ///
    /// # Errors
    /// When the operating system has no room.
    pub(crate) fn open(&mut self, pages: u32) -> device::Result<()> {
        const { assert!(VACANT == 0, "a new table is zero") }
        let slots = (pages as usize * 2).next_power_of_two();
        self.slots = Table::zeroed(slots)?;
        self.mask = slots - 1;
        Ok(())
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    fn home(&self, slot: u64) -> usize {
        (slot >> 32) as usize & self.mask
    }

    /// Asks for the slot that a key belongs to, so that what follows finds it in the processor's cache.
    #[inline]
    pub(crate) fn warm(&self, key: Key) {
        if let Some(slot) = self.slots.get(self.home(pack(key, 0))) {
            prefetch(slot);
        }
    }

    /// The page that the slot of this key, if it is alone there, has: so that its memory can be asked
    /// for before [`PrefixIndex::find`] compares keys.
    #[inline]
    pub(crate) fn hint(&self, key: Key) -> u32 {
        self.slots.get(self.home(pack(key, 0))).map_or(SINK, |&slot| page_of(slot))
    }

    /// The page with this key; `key_of` says which key a page has.
    pub(crate) fn find(&self, key: Key, key_of: impl Fn(u32) -> Key) -> Option<u32> {
        if !self.is_open() {
            return None;
        }
        let wanted = pack(key, 0);
        let mut at = self.home(wanted);
        loop {
            let slot = self.slots[at];
            if slot == VACANT {
                return None;
            }
            if slot >> 32 == wanted >> 32 && key_of(page_of(slot)) == key {
                return Some(page_of(slot));
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Adds a key that is not there.
    pub(crate) fn insert(&mut self, key: Key, page: u32) {
        let slot = pack(key, page);
        let mut at = self.home(slot);
        while self.slots[at] != VACANT {
            at = (at + 1) & self.mask;
        }
        self.slots[at] = slot;
        self.len += 1;
    }

    /// Takes out the key of a page; it must be there.
    pub(crate) fn remove(&mut self, key: Key, page: u32) {
        let slot = pack(key, page);
        let mut hole = self.home(slot);
        while self.slots[hole] != slot {
            assert!(self.slots[hole] != VACANT, "page {page} is not under its key");
            hole = (hole + 1) & self.mask;
        }
        // What follows moves up where that brings it closer to home, so that no search meets a gap.
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask;
            let slot = self.slots[at];
            if slot == VACANT {
                break;
            }
            let from_home = at.wrapping_sub(self.home(slot)) & self.mask;
            if from_home >= at.wrapping_sub(hole) & self.mask {
                self.slots[hole] = slot;
                hole = at;
            }
        }
        self.slots[hole] = VACANT;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Keys that share homes, among them some that share the whole tag.
    fn key(n: u32) -> Key {
        Key::from(n % 7) | Key::from(n) << 64
    }

    #[test]
    fn the_table_agrees_with_a_map() {
        let mut table = PrefixIndex::default();
        table.open(20).unwrap();
        let mut map: HashMap<Key, u32> = HashMap::new();
        let mut x = 1u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let page = 1 + (x >> 8) % 20;
            let key_of = |p| key(p);
            match map.remove(&key(page)) {
                Some(_) => table.remove(key(page), page),
                None => {
                    table.insert(key(page), page);
                    map.insert(key(page), page);
                }
            }
            assert_eq!(table.len() as usize, map.len());
            for page in 1..=20 {
                assert_eq!(table.find(key(page), key_of), map.get(&key(page)).copied());
            }
        }
    }

    #[test]
    fn a_closed_table_finds_nothing() {
        assert_eq!(PrefixIndex::default().find(3, |_| 3), None);
    }
}
