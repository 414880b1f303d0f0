//! Which page holds which key.

use bytemuck::{Pod, Zeroable};
use device::{Table, prefetch};

use crate::keys::Key;
use crate::pool::SINK;

/// Pages of a bucket.
const WIDTH: usize = 7;

/// Buckets are this many pages apart on average: one in a thousand is ever full.
const PAGES_PER_BUCKET: u32 = 2;

/// A cache line of pages. A page is in the first bucket with room from the one on that its key belongs
/// to, so that taking one out moves no other.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Bucket {
    /// 32 bits of each page's key, which rule out nearly every other key.
    tags: [u32; WIDTH],
    /// Pages that belong here or before and are in a later bucket: whoever looks for one goes on.
    passed: u32,
    /// The sink, which is never indexed, where there is none.
    pages: [u32; WIDTH],
    unused: u32,
}

/// Which of some values are this one, one bit each. Compared all at once instead of one after the other,
/// whose end no processor foresees.
fn equal(values: &[u32; WIDTH], wanted: u32) -> u32 {
    values.iter().zip(0..).fold(0, |found, (&value, i)| found | u32::from(value == wanted) << i)
}

/// The places of the bits that are set.
fn places(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let place = bits.trailing_zeros() as usize;
        bits &= bits.wrapping_sub(1);
        (place < WIDTH).then_some(place)
    })
}

/// A hash table from keys to pages, sized once for the whole pool, so that no step pays for its growth.
///
/// The full key lies with the page, which whoever finds it touches anyway. Nearly every call touches one
/// cache line.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    buckets: Table<Bucket>,
    len: u32,
}

fn tag_of(key: Key) -> u32 {
    key as u32
}

impl PrefixIndex {
    /// Makes room for `pages` keys.
    ///
    /// # Errors
    /// When the operating system has no room.
    pub(crate) fn open(&mut self, pages: u32) -> device::Result<()> {
        const { assert!(SINK == 0, "a new table is zero") }
        self.buckets = Table::zeroed((pages / PAGES_PER_BUCKET) as usize + 1)?;
        Ok(())
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.buckets.is_empty()
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The bucket that a key belongs to, by other bits than its tag.
    fn home(&self, key: Key) -> usize {
        let bits = u64::from((key >> 32) as u32);
        ((bits * self.buckets.len() as u64) >> 32) as usize
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Asks for the bucket that a key belongs to, so that what follows finds it in the processor's cache.
    #[inline]
    pub(crate) fn warm(&self, key: Key) {
        if let Some(bucket) = self.buckets.get(self.home(key)) {
            prefetch(bucket);
        }
    }

    /// The page that probably has this key: so that its memory can be asked for before
    /// [`PrefixIndex::find`] compares keys.
    #[inline]
    pub(crate) fn hint(&self, key: Key) -> u32 {
        let Some(bucket) = self.buckets.get(self.home(key)) else { return SINK };
        places(equal(&bucket.tags, tag_of(key))).next().map_or(SINK, |place| bucket.pages[place])
    }

    /// The page with this key; `key_of` says which key a page has.
    #[inline]
    pub(crate) fn find(&self, key: Key, key_of: impl Fn(u32) -> Key) -> Option<u32> {
        if !self.is_open() {
            return None;
        }
        let mut at = self.home(key);
        loop {
            let bucket = &self.buckets[at];
            for place in places(equal(&bucket.tags, tag_of(key))) {
                let page = bucket.pages[place];
                if page != SINK && key_of(page) == key {
                    return Some(page);
                }
            }
            if bucket.passed == 0 {
                return None;
            }
            at = self.after(at);
        }
    }

    /// Adds a key, unless it is there. Says whether it was added.
    #[inline]
    pub(crate) fn insert(&mut self, key: Key, page: u32, key_of: impl Fn(u32) -> Key) -> bool {
        if self.find(key, key_of).is_some() {
            return false;
        }
        let mut at = self.home(key);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = places(equal(&bucket.pages, SINK)).next() {
                (bucket.tags[place], bucket.pages[place]) = (tag_of(key), page);
                self.len += 1;
                return true;
            }
            bucket.passed += 1;
            at = self.after(at);
        }
    }

    /// Takes out the key of a page; it must be there.
    #[inline]
    pub(crate) fn remove(&mut self, key: Key, page: u32) {
        let mut at = self.home(key);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = places(equal(&bucket.pages, page)).next() {
                bucket.pages[place] = SINK;
                self.len -= 1;
                return;
            }
            assert!(bucket.passed > 0, "page {page} is not under its key");
            bucket.passed -= 1;
            at = self.after(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Keys that share buckets, among them some that share the whole tag.
    fn key(n: u32) -> Key {
        Key::from(n % 7) | Key::from(n % 3) << 62 | Key::from(n) << 64
    }

    #[test]
    fn the_table_agrees_with_a_map() {
        let mut table = PrefixIndex::default();
        table.open(60).unwrap();
        let mut map: HashMap<Key, u32> = HashMap::new();
        let key_of = |p| key(p);
        let mut x = 1u32;
        for _ in 0..20_000 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let page = 1 + (x >> 8) % 60;
            match map.remove(&key(page)) {
                Some(_) => table.remove(key(page), page),
                None => {
                    assert!(table.insert(key(page), page, key_of));
                    assert!(!table.insert(key(page), page, key_of));
                    map.insert(key(page), page);
                }
            }
            assert_eq!(table.len() as usize, map.len());
            for page in 1..=60 {
                assert_eq!(table.find(key(page), key_of), map.get(&key(page)).copied());
            }
        }
        map.values().for_each(|&page| table.remove(key(page), page));
        assert!(table.buckets.iter().all(|b| b.passed == 0 && b.pages == [SINK; WIDTH]));
    }

    #[test]
    fn a_closed_table_finds_nothing() {
        assert_eq!(PrefixIndex::default().find(3, |_| 3), None);
    }
}
