//! What came after each prefix: where prompts part within a page, their common beginning of it is found here.
//!
//! These are hints and nothing is trusted for being one. Tokens of a page, with the link of the page before
//! them, give a key: only where the pool or a tier has a page under that key does the page hold them. So
//! nothing is ever taken out; what is noted later takes the place of what falls together with it.
//!
//! The page in which a prompt ends is kept like whole ones when its request does, under a key of the tokens
//! that it has: no lookup of whole pages finds it.

use std::ops::Range;

use device::Table;
use resource_api::Result;

use crate::chain::Chain;
use crate::keys::{Key, Link, link, short};
use crate::state::{Shared, State};
use crate::stream::StreamId;
use crate::tiers::Tiers;

/// Fewest and most places, of which there are otherwise two a page of the pool. Pages of tiers have theirs
/// among them, too; in larger pools those noted last are found.
const PLACES: (u32, u32) = (1 << 10, 1 << 16);

/// Places for streams whose prompt ends within a page.
const ENDS: usize = 1 << 10;

/// Stands after the tokens of a page that is not whole.
const END: u32 = u32::MAX;

/// A page of tokens a place. Which place tokens have follows from the page before and from the first of them.
#[derive(Debug, Default)]
pub(crate) struct Branches {
    pages: Table<u32>,
    page_size: usize,
    /// Streams whose prompt ends within a page, which no key leads to.
    ends: Vec<Option<StreamId>>,
}

/// Which of so many places.
fn place(parent: &Link, first: u32, places: usize) -> usize {
    let mixed = (parent[4] ^ first).wrapping_mul(0x9e37_79b1) ^ parent[5];
    ((u64::from(mixed) * places as u64) >> 32) as usize
}

impl Branches {
    /// Makes room for a pool of so many pages.
    ///
    /// # Errors
    /// When the operating system has no room.
    pub(crate) fn open(&mut self, shared: &Shared, pages: u32) -> device::Result<()> {
        self.page_size = shared.facts.page_size as usize;
        let places = pages.saturating_mul(2).clamp(PLACES.0, PLACES.1) as usize;
        self.pages = Table::zeroed(places * self.page_size)?;
        self.ends = vec![None; ENDS];
        Ok(())
    }

    fn start(&self, parent: &Link, first: u32) -> usize {
        place(parent, first, self.pages.len() / self.page_size.max(1)) * self.page_size
    }

    /// Notes that a page of these tokens, at most as many as a page has, came after `parent`.
    #[inline]
    pub(crate) fn note(&mut self, parent: &Link, tokens: &[u32]) {
        let Some(&first) = tokens.first() else { return };
        let start = self.start(parent, first);
        let place = self.pages.get_mut(start..start + self.page_size);
        if let Some(place) = place.filter(|place| tokens.len() <= place.len()) {
            let (has, lacks) = place.split_at_mut(tokens.len());
            has.copy_from_slice(tokens);
            lacks.fill(END);
        }
    }

    /// Notes these pages of a request, which are whole and whose links are there; tiers may want to know, too.
    pub(crate) fn note_pages(&mut self, tiers: &Tiers, chain: &mut Chain, pages: Range<u32>) {
        for page in pages {
            let key = chain.keys(page, page + 1).next();
            if let (Some(key), Some((parent, tokens))) = (key, chain.page(page)) {
                self.note(parent, tokens);
                tiers.note(key, parent, tokens);
            }
        }
    }

    /// Tokens of a page that may have come after `parent`, which begins with `first`.
    fn after(&self, parent: &Link, first: u32) -> Option<&[u32]> {
        let start = self.start(parent, first);
        let place = self.pages.get(start..start + self.page_size)?;
        let len = place.iter().position(|&token| token == END).unwrap_or(place.len());
        Some(&place[..len]).filter(|page| page.first() == Some(&first))
    }

    /// Notes that the stream's prompt ends in a page after `parent`, which begins with `first`.
    fn note_end(&mut self, parent: &Link, first: u32, id: StreamId) {
        let at = place(parent, first, self.ends.len());
        if let Some(place) = self.ends.get_mut(at) {
            *place = Some(id);
        }
    }

    /// A stream whose prompt may end in a page after `parent`, which begins with `first`.
    fn end_after(&self, parent: &Link, first: u32) -> Option<StreamId> {
        *self.ends.get(place(parent, first, self.ends.len()))?
    }
}

/// How many tokens both begin with, where `own` goes on differently and not just ends: what ends within a
/// page is found by whole pages alone, so that a prompt that is sent again is found the same each time.
fn parted(own: &[u32], other: &[u32]) -> usize {
    let common = own.iter().zip(other).take_while(|(a, b)| a == b).count();
    if common < own.len() { common } else { 0 }
}

/// A page that begins like the one that a request needs.
#[derive(Clone, Copy, Debug)]
enum Similar {
    /// Under a key.
    Kept(Key),
    /// That of a stream that is not whole.
    Held(u32),
}

impl State {
    /// Notes what the pages have that a tier held before this process.
    pub(crate) fn note_found(&mut self) {
        for origin in self.tiers.take_found() {
            self.branches.note(&origin.parent, &origin.tokens);
        }
    }

    /// Adds a page of the stream's own to its lease that begins like the page after those found, where
    /// another request had such a page. Says how many tokens it holds.
    pub(crate) fn lease_part(
        &mut self,
        shared: &Shared,
        id: StreamId,
        lease: &mut Vec<u32>,
    ) -> u32 {
        let found = self.find_similar(shared, id, lease.len());
        // Those who come later find this one, which ends no sooner than those before it.
        if let Some((parent, first)) =
            self.requests.chain_of(id).and_then(|chain| chain.end_of_prompt())
        {
            self.branches.note_end(parent, first, id);
        }
        let Some((similar, part)) = found else { return 0 };
        match self.copy_of(shared, similar) {
            Some(page) => {
                lease.push(page);
                part as u32
            }
            None => 0,
        }
    }

    /// Looks for the page that has most in common with what comes after so many pages of the stream.
    fn find_similar(
        &mut self,
        shared: &Shared,
        id: StreamId,
        pages: usize,
    ) -> Option<(Similar, usize)> {
        let size = shared.facts.page_size as usize;
        let (parent, own) = self.requests.chain_of(id)?.after(pages as u32)?;
        let (parent, own) = (*parent, own[..own.len().min(size + 1)].to_vec());
        let first = *own.first()?;
        let is_there = |key| self.pool.find(key).is_some() || self.tiers.find(key).is_some();
        let kept = self.branches.after(&parent, first).and_then(|page| {
            let part = Some(parted(&own, page)).filter(|&part| part > 0)?;
            let key = Some(short(&link(&parent, page))).filter(|&key| is_there(key))?;
            Some((Similar::Kept(key), part))
        });
        let other =
            self.branches.end_after(&parent, first).filter(|other| other.request != id.request);
        let held = other.and_then(|other| self.find_in(other, &parent, pages, &own));
        kept.into_iter().chain(held).max_by_key(|(_, part)| *part)
    }

    /// Whether there is a page that begins like the one after so many pages of the stream; its key where
    /// it has one.
    pub(crate) fn similar_key(
        &mut self,
        shared: &Shared,
        id: StreamId,
        pages: usize,
    ) -> Option<Option<Key>> {
        match self.find_similar(shared, id, pages)?.0 {
            Similar::Kept(key) => Some(Some(key)),
            Similar::Held(_) => Some(None),
        }
    }

    /// What the page of a stream after the first `pages` has in common with `own`.
    fn find_in(
        &mut self,
        other: StreamId,
        parent: &Link,
        pages: usize,
        own: &[u32],
    ) -> Option<(Similar, usize)> {
        let (stream, chain) = self.requests.get_with_chain(other)?;
        let page = *stream.pages.get(pages).filter(|_| chain.holds && stream.rewriters == 0)?;
        let start = pages as u32 * self.page_size;
        let held = stream.len.checked_sub(start)?.min(self.page_size) as usize;
        let (link, tokens) = chain.after(pages as u32)?;
        let part = parted(own, &tokens[..tokens.len().min(held)]);
        (link == parent && part > 0).then_some((Similar::Held(page), part))
    }

    /// Notes the pages that a stream has of what was generated, before it gives its pages up.
    pub(crate) fn note_generated(&mut self, id: StreamId) {
        let State { requests, branches, tiers, .. } = self;
        let Some(chain) = requests.chain_of(id) else { return };
        branches.note_pages(tiers, chain, chain.prompt_pages()..chain.indexed);
    }

    /// Sees to it that the page in which the prompt ends is kept, if it is not whole, of a stream that gives
    /// its pages up.
    pub(crate) fn keep_end(&mut self, id: StreamId) {
        let Some((stream, chain)) = self.requests.get_with_chain(id) else { return };
        let whole = stream.len.checked_div(self.page_size).unwrap_or(0);
        let held = (stream.len - whole * self.page_size) as usize;
        let ends = chain.takes_prompt() && chain.prompt_pages() == whole;
        let is_end = chain.holds && held > 0 && ends;
        let Some(&page) = stream.pages.get(whole as usize).filter(|_| is_end) else { return };
        // Links of the prompt's pages are there from the beginning.
        let Some((parent, tokens)) = chain.after(whole) else { return };
        let Some(tokens) = tokens.get(..held) else { return };
        if self.pool.owners(page) == 1 && !self.pool.is_sealed(page) {
            let key = short(&link(parent, tokens));
            self.pool.insert(key, page);
            self.branches.note(parent, tokens);
            self.tiers.note(key, parent, tokens);
        }
    }

    /// A page of one owner with what the other one holds.
    fn copy_of(&mut self, shared: &Shared, similar: Similar) -> Option<u32> {
        let from = match similar {
            Similar::Held(page) => page,
            Similar::Kept(key) => match self.pool.find(key) {
                Some(page) => {
                    let is_spare = self.pool.owners(page) == 0 && self.tiers.find(key).is_some();
                    // Making room below must not take it.
                    self.pool.retain(page);
                    if is_spare && self.pool.ready() == 0 {
                        // A tier has it, too: there is room for one, and that is the request's.
                        self.pool.unseal(page);
                        return Some(page);
                    }
                    let copy = self.copy_of(shared, Similar::Held(page));
                    self.release(shared, &mut vec![page]);
                    return copy;
                }
                // A tier may have it, and there was no room for it here.
                None => return None,
            },
        };
        let to = self.take_one(shared)?;
        let copied: Result<()> = shared.memory.copy_page(from, to);
        match copied {
            Ok(()) => Some(to),
            Err(_) => {
                self.pool.put_back(to);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_again_or_only_ends_is_left_to_whole_pages() {
        for (own, other, common) in [
            (&[1, 2, 3, 9][..], &[1, 2, 3, 4][..], 3),
            (&[1, 2, 3], &[1, 2, 3, 4], 0),
            (&[1, 2, 3, 4], &[1, 2, 3, 4], 0),
            (&[1, 2, 3, 4, 5], &[1, 2, 3], 3),
            (&[2, 2], &[1, 2], 0),
            (&[], &[1], 0),
        ] {
            assert_eq!(parted(own, other), common, "{own:?} {other:?}");
        }
    }
}
