//! Which pages are free, and how many owners each of the others has.

/// The page that padding rows write to and read from. Owned for ever.
pub(crate) const SINK: u32 = 0;

/// Ends a list.
const END: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Page {
    /// Streams (and later other holders) that have this page. 0: it is free.
    owners: u32,
    /// Never written again while it has owners: what several owners share must be.
    sealed: bool,
    /// The page after this one in the list of free pages that it is in.
    next: u32,
    /// The last step that may still access a free page.
    epoch: u64,
}

/// The pages of a cache. Free ones form two lists through the pages themselves: a stack of those that
/// may be taken (so that the memory in use stays small and warm), and a queue of those that a step
/// still running may access.
///
/// Every operation is O(1) per page.
#[derive(Debug)]
pub(crate) struct PagePool {
    pages: Vec<Page>,
    first_ready: u32,
    num_ready: u32,
    first_waiting: u32,
    last_waiting: u32,
    num_waiting: u32,
    num_sealed: u32,
}

impl PagePool {
    /// `num_pages` pages, the sink included, which are at least 2. Taken in ascending order.
    pub(crate) fn new(num_pages: u32) -> Self {
        let page = |i: u32| {
            let next = if i + 1 < num_pages { i + 1 } else { END };
            Page { owners: u32::from(i == SINK), sealed: false, next, epoch: 0 }
        };
        PagePool {
            pages: (0..num_pages).map(page).collect(),
            first_ready: SINK + 1,
            num_ready: num_pages - 1,
            first_waiting: END,
            last_waiting: END,
            num_waiting: 0,
            num_sealed: 0,
        }
    }

    /// Pages that streams can have at all.
    pub(crate) fn usable(&self) -> u32 {
        self.pages.len() as u32 - 1
    }

    /// Pages that may be taken now.
    pub(crate) fn ready(&self) -> u32 {
        self.num_ready
    }

    /// Free pages that a running step may still access.
    pub(crate) fn waiting(&self) -> u32 {
        self.num_waiting
    }

    /// Sealed pages.
    pub(crate) fn sealed(&self) -> u32 {
        self.num_sealed
    }

    /// Owners of a page.
    pub(crate) fn owners(&self, page: u32) -> u32 {
        self.pages[page as usize].owners
    }

    /// Whether a page must not be written.
    pub(crate) fn is_sealed(&self, page: u32) -> bool {
        self.pages[page as usize].sealed
    }

    /// Moves `count` pages to the end of `into`, or none if there are not so many.
    pub(crate) fn take(&mut self, count: u32, into: &mut Vec<u32>) -> bool {
        if count > self.num_ready {
            return false;
        }
        for _ in 0..count {
            let page = self.first_ready;
            let entry = &mut self.pages[page as usize];
            entry.owners = 1;
            self.first_ready = entry.next;
            into.push(page);
        }
        self.num_ready -= count;
        true
    }

    /// Undoes a `take`: the last page taken is the next to be taken again.
    pub(crate) fn put_back(&mut self, page: u32) {
        let entry = self.owned(page);
        assert!(entry.owners == 1 && !entry.sealed, "page {page} was shared since it was taken");
        entry.owners = 0;
        self.push_ready(page);
    }

    /// Gives up one ownership. The last one frees the page; it may be taken again once the step
    /// `epoch` has `completed`.
    pub(crate) fn release(&mut self, page: u32, epoch: u64, completed: u64) {
        let entry = self.owned(page);
        entry.owners -= 1;
        if entry.owners > 0 {
            return;
        }
        entry.epoch = epoch;
        let was_sealed = std::mem::take(&mut entry.sealed);
        self.num_sealed -= u32::from(was_sealed);
        if epoch <= completed {
            return self.push_ready(page);
        }
        self.pages[page as usize].next = END;
        match self.last_waiting {
            END => self.first_waiting = page,
            last => self.pages[last as usize].next = page,
        }
        self.last_waiting = page;
        self.num_waiting += 1;
    }

    /// Makes pages ready whose last step has completed. Epochs of releases never fall, so looking at
    /// the head of the queue is enough.
    pub(crate) fn settle(&mut self, completed: u64) {
        while self.first_waiting != END {
            let page = self.first_waiting;
            let entry = self.pages[page as usize];
            if entry.epoch > completed {
                return;
            }
            self.first_waiting = entry.next;
            if self.first_waiting == END {
                self.last_waiting = END;
            }
            self.num_waiting -= 1;
            self.push_ready(page);
        }
    }

    /// The pages that may be taken, next one first.
    pub(crate) fn ready_list(&self) -> impl Iterator<Item = u32> + '_ {
        self.list(self.first_ready)
    }

    /// The free pages that may not be taken yet, first one first.
    pub(crate) fn waiting_list(&self) -> impl Iterator<Item = u32> + '_ {
        self.list(self.first_waiting)
    }

    fn list(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let next = |page: &u32| Some(self.pages[*page as usize].next).filter(|&n| n != END);
        // A damaged list could be a ring.
        std::iter::successors(Some(first).filter(|&p| p != END), next).take(self.pages.len() + 1)
    }

    fn owned(&mut self, page: u32) -> &mut Page {
        let entry = &mut self.pages[page as usize];
        assert!(page != SINK && entry.owners > 0, "page {page} is given up by nobody's owner");
        entry
    }

    fn push_ready(&mut self, page: u32) {
        self.pages[page as usize].next = self.first_ready;
        self.first_ready = page;
        self.num_ready += 1;
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
        let mut pool = PagePool::new(4);
        assert_eq!((pool.usable(), pool.ready(), pool.owners(SINK)), (3, 3, 1));
        let mut taken = Vec::new();
        assert!(pool.take(3, &mut taken));
        assert_eq!(taken, [1, 2, 3]);
        assert!(!pool.take(1, &mut taken));
    }

    #[test]
    fn a_shortfall_takes_none() {
        let mut pool = PagePool::new(4);
        let mut taken = Vec::new();
        assert!(!pool.take(4, &mut taken));
        assert!(taken.is_empty());
        assert_eq!(order(&pool), [1, 2, 3]);
    }

    #[test]
    fn putting_back_in_reverse_restores_the_order() {
        let mut pool = PagePool::new(6);
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
        let mut pool = PagePool::new(4);
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
        PagePool::new(4).release(1, 0, 0);
    }

    #[test]
    #[should_panic(expected = "page 0 is given up")]
    fn releasing_the_sink_is_a_fault() {
        PagePool::new(4).release(SINK, 0, 0);
    }
}
