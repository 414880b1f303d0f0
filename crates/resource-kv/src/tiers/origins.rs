//! What the keys of pages are made of, so that a file can say it beside each page: a key tells nobody which
//! tokens its page has, and prompts that part within a page are found by tokens.

use device::Table;

use crate::keys::{Key, Link, link, short};

/// Most pages of which it is known; those noted later take the places of earlier ones.
const PLACES: u32 = 1 << 16;
/// Words of a place before its tokens: the link of the page before, and how many tokens there are.
const BEFORE: usize = 9;

/// The link of the page before, and the page's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) parent: Link,
    pub(crate) tokens: Vec<u32>,
}

/// Origins by key. A place is right only where its contents make the key that is asked for, so nothing is
/// ever taken out.
#[derive(Debug)]
pub(crate) struct Origins {
    table: Table<u32>,
    page_size: usize,
}

impl Origins {
    /// For a store of so many pages of so many tokens.
    ///
    /// # Errors
    /// When the operating system has no room.
    pub(crate) fn new(pages: u32, page_size: u32) -> device::Result<Self> {
        let (places, page_size) = (pages.saturating_mul(2).clamp(1, PLACES), page_size as usize);
        Ok(Origins { table: Table::zeroed(places as usize * (BEFORE + page_size))?, page_size })
    }

    fn start(&self, key: Key) -> usize {
        let stride = BEFORE + self.page_size;
        // Keys are digests: any of their bits will do, and the index uses the lowest.
        ((key >> 64) as u64 % (self.table.len() / stride) as u64) as usize * stride
    }

    /// Notes what the page with this key has: `tokens`, at most a page of them, after `parent`.
    pub(crate) fn note(&mut self, key: Key, parent: &Link, tokens: &[u32]) {
        let start = self.start(key);
        let Some(place) = self.table.get_mut(start..start + BEFORE + tokens.len()) else { return };
        place[..8].copy_from_slice(parent);
        place[8] = tokens.len() as u32;
        place[BEFORE..].copy_from_slice(tokens);
    }

    /// What the page with this key has, if that is known.
    pub(crate) fn find(&self, key: Key) -> Option<Origin> {
        let start = self.start(key);
        let place = self.table.get(start..start + BEFORE + self.page_size)?;
        let mut parent = Link::default();
        parent.copy_from_slice(&place[..8]);
        let tokens = place.get(BEFORE..BEFORE + place[8] as usize)?;
        let is_it = !tokens.is_empty() && short(&link(&parent, tokens)) == key;
        is_it.then(|| Origin { parent, tokens: tokens.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_noted_is_found_under_its_key_and_no_other() {
        let mut origins = Origins::new(4, 3).unwrap();
        let parent: Link = std::array::from_fn(|i| i as u32 + 5);
        let noted: Vec<(Key, Vec<u32>)> = (0..40u32)
            .map(|i| {
                let tokens: Vec<u32> = (i..i + 1 + i % 3).collect();
                let key = short(&link(&parent, &tokens));
                origins.note(key, &parent, &tokens);
                (key, tokens)
            })
            .collect();
        let found = noted.iter().filter(|(key, tokens)| match origins.find(*key) {
            Some(origin) => {
                assert_eq!((&origin.parent, &origin.tokens), (&parent, tokens));
                true
            }
            None => false,
        });
        // Of eight places most were taken more than once, and the last one noted is in its own.
        assert!((1..=8).contains(&found.count()));
        assert!(origins.find(noted[39].0).is_some());
        assert_eq!(origins.find(7), None);
    }
}
