//! Which pages are free, how many owners each of the others has, and which hold known prefixes.

use bytemuck::{Pod, Zeroable};
use device::{Table, prefetch};

use crate::index::PrefixIndex;
use crate::keys::Key;

/// The page that padding rows write to and read from. Owned for ever.
pub(crate) const SINK: u32 = 0;

/// How far ahead of an eviction records are asked for: more pages than a step usually takes.
const AHEAD: usize = 64;

/// Ends a list.
const END: u32 = u32::MAX;

/// A page's owners, and two marks in the same word.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(transparent)]
struct Owners(u32);

impl Owners {
    /// Never written again while it has this mark: what several owners share must be.
    const SEALED: u32 = 1 << 31;
    /// The index has it.
    const INDEXED: u32 = 1 << 30;

    /// Streams and leases that have this page. 0: it is free, or kept for its contents alone.
    fn count(self) -> u32 {
        self.0 & (Self::INDEXED - 1)
    }

    fn has(self, mark: u32) -> bool {
        self.0 & mark != 0
    }
}

/// One cache line a page: in a large pool every line that a step touches is one that it waits for.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Page {
    /// Key of an indexed page.
    key: Key,
    /// The last step that may still access a page without owners.
    epoch: u64,
    owners: Owners,
    /// The pages before and after it in the list that it is in.
    before: u32,
    after: u32,
    /// Of a cached page, the one that was cached [`AHEAD`] pages after it, or an older one's: a hint
    /// which records an eviction some steps later will want. Lists alone tell one page at a time.
    ahead: u32,
    unused: [u64; 3],
}

/// Pages in a row, linked through themselves.
#[derive(Clone, Copy, Debug)]
struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl List {
    const EMPTY: List = List { first: END, last: END, len: 0 };

    fn push(&mut self, pages: &mut [Page], page: u32) {
        (pages[page as usize].before, pages[page as usize].after) = (self.last, END);
        match self.last {
            END => self.first = page,
            last => pages[last as usize].after = page,
        }
        self.last = page;
        self.len += 1;
    }

    fn remove(&mut self, pages: &mut [Page], page: u32) {
        let Page { before, after, .. } = pages[page as usize];
        match before {
            END => self.first = after,
            before => pages[before as usize].after = after,
        }
        match after {
            END => self.last = before,
            after => pages[after as usize].before = before,
        }
        self.len -= 1;
    }

    /// Removes these pages, which are the first ones.
    fn remove_first(&mut self, pages: &mut [Page], chosen: &[u32]) {
        let Some(&last) = chosen.last() else { return };
        self.first = pages[last as usize].after;
        match self.first {
            END => self.last = END,
            first => pages[first as usize].before = END,
        }
        self.len -= chosen.len() as u32;
    }

    fn iter(self, pages: &[Page]) -> impl Iterator<Item = u32> + '_ {
        let next = |page: &u32| Some(pages[*page as usize].after).filter(|&n| n != END);
        // A damaged list could be a ring.
        let all = std::iter::successors(Some(self.first).filter(|&p| p != END), next);
        all.take(pages.len() + 1)
    }
}

/// The pages of a cache. One that nobody owns is ready (a stack, so that the memory in use stays
/// small and warm), waiting for a step that may still access it, or cached: kept for the prefix that
/// it holds until its place is needed.
///
/// Every operation is O(1) per page.
#[derive(Debug)]
pub(crate) struct PagePool {
    pages: Table<Page>,
    /// The last one is taken next.
    ready: Vec<u32>,
    waiting: List,
    /// Cached pages, the one to evict first in front. A stream gives up its last page first, and
    /// nobody owns a page without owning those before it, so a page stands before its ancestors and
    /// the first one is a leaf.
    cached: List,
    /// The pages cached last, in a ring.
    recent: [u32; AHEAD],
    next_recent: usize,
    index: PrefixIndex,
    /// Pages that an eviction has chosen; kept for its memory.
    chosen: Vec<u32>,
    num_sealed: u32,
    /// See [`PagePool::peak`].
    peak: u32,
    evictions: u64,
}

impl PagePool {
    /// `num_pages` pages, the sink included, which are at least 2. Taken in ascending order.
    ///
    /// # Errors
    /// When the operating system has no room for their records.
    pub(crate) fn new(num_pages: u32) -> device::Result<Self> {
        let mut pages = Table::<Page>::zeroed(num_pages as usize)?;
        pages[SINK as usize].owners = Owners(1);
        Ok(PagePool {
            pages,
            ready: (SINK + 1..num_pages).rev().collect(),
            waiting: List::EMPTY,
            cached: List::EMPTY,
            recent: [SINK; AHEAD],
            next_recent: 0,
            index: PrefixIndex::default(),
            chosen: Vec::new(),
            num_sealed: 0,
            peak: 0,
            evictions: 0,
        })
    }

    /// Makes room for the keys of all pages.
    ///
    /// # Errors
    /// When the operating system has no room.
    pub(crate) fn open_index(&mut self) -> device::Result<()> {
        self.index.open(self.usable())
    }

    /// Pages that streams can have at all.
    pub(crate) fn usable(&self) -> u32 {
        self.pages.len() as u32 - 1
    }

    /// Pages that may be taken now.
    pub(crate) fn ready(&self) -> u32 {
        self.ready.len() as u32
    }

    /// Free pages that a running step may still access.
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting.len
    }

    /// Pages that nobody owns and that are kept for what they hold.
    pub(crate) fn cached(&self) -> u32 {
        self.cached.len
    }

    /// Pages without an owner: ready, waiting or cached.
    pub(crate) fn unowned(&self) -> u32 {
        self.ready() + self.waiting() + self.cached()
    }

    /// Most pages that had owners at once, of the times when that was noted.
    pub(crate) fn peak(&self) -> u32 {
        self.peak
    }

    /// Pages evicted so far.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Pages that the index has.
    pub(crate) fn indexed(&self) -> u32 {
        self.index.len()
    }

    /// Sealed pages.
    pub(crate) fn sealed(&self) -> u32 {
        self.num_sealed
    }

    /// Owners of a page.
    pub(crate) fn owners(&self, page: u32) -> u32 {
        self.pages[page as usize].owners.count()
    }

    /// Whether a page must not be written.
    pub(crate) fn is_sealed(&self, page: u32) -> bool {
        self.pages[page as usize].owners.has(Owners::SEALED)
    }

    /// Whether the index has this page.
    pub(crate) fn is_indexed(&self, page: u32) -> bool {
        self.pages[page as usize].owners.has(Owners::INDEXED)
    }

    /// Moves `count` pages to the end of `into`, or none if there are not so many.
    pub(crate) fn take(&mut self, count: u32, into: &mut Vec<u32>) -> bool {
        let Some(left) = self.ready.len().checked_sub(count as usize) else { return false };
        let (pages, taken) = (&mut self.pages[..], &self.ready[left..]);
        for &page in taken.iter().rev() {
            pages[page as usize].owners = Owners(1);
            into.push(page);
        }
        self.ready.truncate(left);
        true
    }

    /// Notes how many pages have owners now, for [`PagePool::peak`].
    pub(crate) fn note_peak(&mut self) {
        self.peak = self.peak.max(self.usable() - self.unowned());
    }

    /// Undoes a `take`: the last page taken is the next to be taken again.
    pub(crate) fn put_back(&mut self, page: u32) {
        let owners = self.owned(page);
        assert!(owners.0 == 1, "page {page} was shared since it was taken");
        self.pages[page as usize].owners = Owners(0);
        self.ready.push(page);
    }

    /// Adds an owner.
    pub(crate) fn retain(&mut self, page: u32) {
        let owners = &mut self.pages[page as usize].owners;
        assert!(owners.has(Owners::SEALED), "page {page} is shared and not sealed");
        owners.0 += 1;
        if owners.count() == 1 {
            self.cached.remove(&mut self.pages, page);
        }
    }

    /// Gives up one ownership. With the last one the page becomes free, or cached if the index has it;
    /// it may be taken again once the step `epoch` has `completed`.
    pub(crate) fn release(&mut self, page: u32, epoch: u64, completed: u64) {
        let mut owners = self.owned(page);
        owners.0 -= 1;
        self.pages[page as usize].owners = owners;
        if owners.count() > 0 {
            return;
        }
        self.pages[page as usize].epoch = epoch;
        match owners.has(Owners::INDEXED) {
            true => self.cache(page),
            false => self.free(page, completed),
        }
    }

    /// Puts a page that nobody has and the index knows behind those that go first.
    fn cache(&mut self, page: u32) {
        self.cached.push(&mut self.pages, page);
        let earlier = std::mem::replace(&mut self.recent[self.next_recent], page);
        self.pages[earlier as usize].ahead = page;
        self.next_recent = (self.next_recent + 1) % AHEAD;
    }

    /// Puts a page that nobody has and the index does not know where free pages are.
    fn free(&mut self, page: u32, completed: u64) {
        let record = &mut self.pages[page as usize];
        self.num_sealed -= u32::from(record.owners.has(Owners::SEALED));
        record.owners = Owners(0);
        match record.epoch <= completed {
            true => self.ready.push(page),
            false => self.waiting.push(&mut self.pages, page),
        }
    }

    /// Makes pages ready whose last step has completed. Looking at the head of the queue is enough:
    /// epochs of releases never fall, and an evicted page that was released earlier than those before
    /// it only waits a little longer.
    pub(crate) fn settle(&mut self, completed: u64) {
        while self.waiting.first != END {
            let page = self.waiting.first;
            if self.pages[page as usize].epoch > completed {
                return;
            }
            self.waiting.remove(&mut self.pages, page);
            self.ready.push(page);
        }
    }

    /// Makes `count` more pages ready out of the cached ones that were not used for the longest, or
    /// none if there are not so many whose last step has completed.
    pub(crate) fn evict(&mut self, count: u32, completed: u64) -> bool {
        let Some(last) = count.checked_sub(1) else { return true };
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        chosen.extend(self.cached.iter(&self.pages).take(count as usize));
        // Released in order of epochs, so the last of them decides.
        let fits = chosen
            .get(last as usize)
            .is_some_and(|&page| self.pages[page as usize].epoch <= completed);
        if fits {
            // Those of a decode step have been asked for in the step before.
            if chosen.len() > AHEAD {
                chosen.iter().for_each(|&page| self.index.warm(self.pages[page as usize].key));
            }
            self.cached.remove_first(&mut self.pages, &chosen);
            for &page in &chosen {
                self.index.remove(self.pages[page as usize].key, page);
                self.free(page, completed);
                prefetch(&self.pages[self.pages[page as usize].ahead as usize]);
            }
            self.evictions += u64::from(count);
        }
        self.chosen = chosen;
        fits
    }

    /// Takes the `count` cached pages that were not used for the longest, or none, as [`PagePool::evict`]
    /// would. They stay indexed, and [`PagePool::end_evict`] is to be called for each.
    pub(crate) fn begin_evict(&mut self, count: u32, completed: u64) -> Option<Vec<u32>> {
        let chosen: Vec<u32> = self.cached.iter(&self.pages).take(count as usize).collect();
        let last = *chosen.get(count.checked_sub(1)? as usize)?;
        if self.pages[last as usize].epoch > completed {
            return None;
        }
        self.cached.remove_first(&mut self.pages, &chosen);
        chosen.iter().for_each(|&page| self.pages[page as usize].owners.0 += 1);
        Some(chosen)
    }

    /// Evicts a page that was taken for that, unless others have come to own it. Says whether it did.
    pub(crate) fn end_evict(&mut self, page: u32, completed: u64) -> bool {
        let mut owners = self.owned(page);
        owners.0 -= 1;
        self.pages[page as usize].owners = owners;
        if owners.count() > 0 {
            return false;
        }
        self.index.remove(self.pages[page as usize].key, page);
        self.evictions += 1;
        self.free(page, completed);
        true
    }

    /// Adds an owner that only reads a page, which others may go on to write.
    pub(crate) fn pin(&mut self, page: u32) {
        let mut owners = self.owned(page);
        owners.0 += 1;
        self.pages[page as usize].owners = owners;
    }

    /// The key of an indexed page.
    pub(crate) fn key(&self, page: u32) -> Key {
        self.pages[page as usize].key
    }

    /// The page with this key.
    pub(crate) fn find(&self, key: Key) -> Option<u32> {
        self.index.find(key, |page| self.pages[page as usize].key)
    }

    /// Asks for the slot of the index that this key belongs to.
    #[inline]
    pub(crate) fn warm(&self, key: Key) {
        self.index.warm(key);
    }

    /// Asks for the records of the page that [`PagePool::find`] will probably find under this key.
    #[inline]
    pub(crate) fn warm_found(&self, key: Key) {
        self.warm_page(self.index.hint(key));
    }

    /// Asks for the records of a page.
    #[inline]
    pub(crate) fn warm_page(&self, page: u32) {
        prefetch(&self.pages[page as usize]);
    }

    /// Asks for what taking so many pages soon will touch.
    pub(crate) fn warm_next(&self, count: usize) {
        let ready = &self.ready[self.ready.len().saturating_sub(count)..];
        ready.iter().for_each(|&page| self.warm_page(page));
        let evicted = self.cached.iter(&self.pages).take(count - ready.len());
        evicted.for_each(|page| self.index.warm(self.pages[page as usize].key));
    }

    /// Indexes and seals a page that has owners, unless another one has this key already. Says
    /// whether it did.
    pub(crate) fn insert(&mut self, key: Key, page: u32) -> bool {
        let mut owners = self.owned(page);
        assert!(!owners.has(Owners::INDEXED), "page {page} is indexed under another key");
        let pages = &mut self.pages;
        if !self.index.insert(key, page, |page| pages[page as usize].key) {
            return false;
        }
        self.num_sealed += u32::from(!owners.has(Owners::SEALED));
        owners.0 |= Owners::SEALED | Owners::INDEXED;
        let record = &mut pages[page as usize];
        (record.owners, record.key) = (owners, key);
        true
    }

    /// Makes a sealed page that only the caller owns writable: the index forgets it.
    pub(crate) fn unseal(&mut self, page: u32) {
        let owners = self.owned(page);
        assert!(owners.count() == 1, "page {page} is shared");
        if owners.has(Owners::INDEXED) {
            self.index.remove(self.pages[page as usize].key, page);
        }
        self.num_sealed -= u32::from(owners.has(Owners::SEALED));
        self.pages[page as usize].owners = Owners(1);
    }

    /// The pages that may be taken, next one first.
    pub(crate) fn ready_list(&self) -> impl Iterator<Item = u32> + '_ {
        self.ready.iter().rev().copied()
    }

    /// The free pages that may not be taken yet, first one first.
    pub(crate) fn waiting_list(&self) -> impl Iterator<Item = u32> + '_ {
        self.waiting.iter(&self.pages)
    }

    /// The pages that are kept for what they hold, the one to evict first in front.
    pub(crate) fn cached_list(&self) -> impl Iterator<Item = u32> + '_ {
        self.cached.iter(&self.pages)
    }

    fn owned(&self, page: u32) -> Owners {
        let owners = self.pages[page as usize].owners;
        assert!(page != SINK && owners.count() > 0, "page {page} is given up by nobody's owner");
        owners
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(pool: &PagePool) -> Vec<u32> {
        pool.ready_list().collect()
    }

    #[test]
    fn the_sink_is_never_taken() {
        let mut pool = PagePool::new(4).unwrap();
        assert_eq!((pool.usable(), pool.ready(), pool.owners(SINK)), (3, 3, 1));
        let mut taken = Vec::new();
        assert!(pool.take(3, &mut taken));
        assert_eq!(taken, [1, 2, 3]);
        assert!(!pool.take(1, &mut taken));
    }

    #[test]
    fn a_shortfall_takes_none() {
        let mut pool = PagePool::new(4).unwrap();
        let mut taken = Vec::new();
        assert!(!pool.take(4, &mut taken));
        assert!(taken.is_empty());
        assert_eq!(order(&pool), [1, 2, 3]);
    }

    #[test]
    fn putting_back_in_reverse_restores_the_order() {
        let mut pool = PagePool::new(6).unwrap();
        let mut taken = Vec::new();
        assert!(pool.take(4, &mut taken));
        pool.release(2, 0, 0);
        pool.release(4, 0, 0);
        let before = order(&pool);
        let mut again = Vec::new();
        assert!(pool.take(3, &mut again));
        again.iter().rev().for_each(|&page| pool.put_back(page));
        assert_eq!(order(&pool), before);
    }

    #[test]
    fn a_page_waits_for_its_last_step() {
        let mut pool = PagePool::new(4).unwrap();
        let mut taken = Vec::new();
        assert!(pool.take(3, &mut taken));
        pool.release(1, 5, 4);
        pool.release(2, 6, 4);
        pool.release(3, 6, 6);
        assert_eq!((pool.ready(), pool.waiting()), (1, 2));
        assert_eq!(pool.waiting_list().collect::<Vec<_>>(), [1, 2]);
        pool.settle(4);
        assert_eq!(pool.ready(), 1);
        pool.settle(5);
        assert_eq!((pool.ready(), pool.waiting()), (2, 1));
        pool.settle(9);
        assert_eq!((pool.ready(), pool.waiting()), (3, 0));
        assert_eq!(order(&pool), [2, 1, 3]);
    }

    #[test]
    #[should_panic(expected = "page 1 is given up by nobody's owner")]
    fn releasing_a_free_page_is_a_fault() {
        PagePool::new(4).unwrap().release(1, 0, 0);
    }

    #[test]
    #[should_panic(expected = "page 0 is given up")]
    fn releasing_the_sink_is_a_fault() {
        PagePool::new(4).unwrap().release(SINK, 0, 0);
    }
}
