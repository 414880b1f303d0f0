//! Streams of requests: which pages hold a stream's tokens, and how many tokens there are.

use resource_api::{LabelId, RequestId};

use crate::chain::Chain;

/// Seat of a stream that has none.
pub(crate) const NO_SEAT: u32 = 0;

/// Most request slots. Slots are dense, so a larger one is a mistake, not a need for memory.
pub(crate) const MAX_REQUESTS: u32 = 1 << 20;

/// A stream of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    pub(crate) request: RequestId,
    pub(crate) label: LabelId,
}

/// The tokens of a stream that are here. What every step touches comes first: with the request's
/// generation it is one cache line.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Stream {
    /// Committed tokens.
    pub(crate) len: u32,
    /// Tokens that steps in flight will commit.
    pub(crate) pending: u32,
    /// Its row in page tables.
    pub(crate) seat: u32,
    /// Steps in flight that read or extend it.
    pub(crate) in_flight: u16,
    /// Steps in flight that will replace or trim it.
    pub(crate) rewriters: u16,
    /// The last admission that looked at it, to find streams named twice.
    pub(crate) seen: u64,
    /// Changes whenever a page that a table may already list is replaced or dropped.
    pub(crate) table: u64,
    /// Pages in stream order. May be more than the tokens need: reservations, and what a reset or a
    /// step without commit left.
    pub(crate) pages: Vec<u32>,
    /// Counts changes of the contents other than growth.
    pub(crate) generation: u64,
    /// Tokens released at the front over the stream's life.
    pub(crate) released: u64,
    /// Tokens at the front that are never released.
    pub(crate) protected: u32,
}

impl Stream {
    /// Length once the steps in flight have committed.
    pub(crate) fn next_len(&self) -> u32 {
        self.len + self.pending
    }

    /// Pages it has.
    pub(crate) fn held(&self) -> u32 {
        self.pages.len() as u32
    }
}

/// How many pages at the front of a stream can go so that at least `keep` tokens stay after the
/// `protected` ones: whole pages only, neither one with a protected token nor the last one.
pub(crate) fn droppable(len: u32, protected: u32, keep: u32, page_size: u32) -> u32 {
    let after_protected = len - protected.min(len);
    let spare = after_protected.saturating_sub(keep) / page_size;
    let first = protected.div_ceil(page_size);
    let last = len.div_ceil(page_size).saturating_sub(1);
    spare.min(last.saturating_sub(first))
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Request {
    /// Generation of the live request; 0 when the slot is vacant.
    generation: u32,
    /// Its stream `main`, which nearly every request has as its only one.
    main: Stream,
    /// The others that were opened, in that order.
    others: Vec<Other>,
}

/// A stream other than `main`, and what is known of its tokens.
#[derive(Debug, Default)]
struct Other {
    label: LabelId,
    stream: Stream,
    chain: Chain,
}

/// All streams of live requests, by request slot.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Request>,
    /// What is known of the tokens of each slot's `main`.
    chains: Vec<Chain>,
}

impl Requests {
    /// The generation that lives in the slot of `request`, if one does.
    pub(crate) fn live(&self, request: RequestId) -> Option<u32> {
        self.slots.get(request.index()).map(|r| r.generation).filter(|&g| g > 0)
    }

    /// Whether exactly this request is live.
    pub(crate) fn is_live(&self, request: RequestId) -> bool {
        self.live(request) == Some(request.generation)
    }

    /// Makes a request live in a vacant slot, with an empty stream `main` that has room for so many pages.
    pub(crate) fn insert(&mut self, request: RequestId, pages: usize, chain: Chain) {
        let index = request.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Request::default);
            self.chains.resize_with(index + 1, Chain::default);
        }
        let slot = &mut self.slots[index];
        slot.generation = request.generation;
        reserve(&mut slot.main.pages, pages);
        self.chains[index] = chain.of(request);
    }

    /// Opens a stream other than `main` of which it is known what will go to it.
    pub(crate) fn insert_other(&mut self, id: StreamId, table: u64, pages: usize, chain: Chain) {
        let mut stream = Stream { table, ..Stream::default() };
        reserve(&mut stream.pages, pages);
        let index = id.request.index();
        self.chains[index].has_others |= chain.takes_outputs();
        self.slots[index].others.push(Other { label: id.label, stream, chain });
    }

    /// Makes the slot vacant. Its streams have been emptied before.
    pub(crate) fn remove(&mut self, request: RequestId) {
        let slot = &mut self.slots[request.index()];
        slot.generation = 0;
        slot.others.clear();
        self.chains[request.index()] = Chain::default();
        // The list's memory serves the next owner of the slot.
        let pages = std::mem::take(&mut slot.main.pages);
        slot.main = Stream { pages, ..Stream::default() };
    }

    /// A stream that is open.
    #[inline]
    pub(crate) fn get(&self, id: StreamId) -> Option<&Stream> {
        let slot = self.slots.get(id.request.index())?;
        if slot.generation != id.request.generation || slot.generation == 0 {
            return None;
        }
        match id.label {
            LabelId::MAIN => Some(&slot.main),
            label => slot.others.iter().find(|o| o.label == label).map(|o| &o.stream),
        }
    }

    /// The stream `main` of a live request.
    #[inline]
    pub(crate) fn main(&self, request: RequestId) -> Option<&Stream> {
        let slot = self.slots.get(request.index())?;
        let is_live = slot.generation == request.generation && slot.generation != 0;
        is_live.then_some(&slot.main)
    }

    /// The stream `main` of a live request, to change.
    #[inline]
    pub(crate) fn main_mut(&mut self, request: RequestId) -> Option<&mut Stream> {
        let slot = self.slots.get_mut(request.index())?;
        let is_live = slot.generation == request.generation && slot.generation != 0;
        is_live.then_some(&mut slot.main)
    }

    /// A stream that is open, to change.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        let slot = self.slots.get_mut(id.request.index())?;
        if slot.generation != id.request.generation || slot.generation == 0 {
            return None;
        }
        match id.label {
            LabelId::MAIN => Some(&mut slot.main),
            label => slot.others.iter_mut().find(|o| o.label == label).map(|o| &mut o.stream),
        }
    }

    /// A stream that is open, and what is known of its tokens.
    #[inline]
    pub(crate) fn get_with_chain(&mut self, id: StreamId) -> Option<(&mut Stream, &mut Chain)> {
        if id.label == LabelId::MAIN {
            return self.main_and_chain(id.request);
        }
        let slot = self.slots.get_mut(id.request.index())?;
        if slot.generation != id.request.generation || slot.generation == 0 {
            return None;
        }
        let other = slot.others.iter_mut().find(|other| other.label == id.label)?;
        Some((&mut other.stream, &mut other.chain))
    }

    /// What is known of the tokens of an open stream.
    pub(crate) fn chain_of(&mut self, id: StreamId) -> Option<&mut Chain> {
        self.get_with_chain(id).map(|(_, chain)| chain)
    }

    /// The streams of a live request other than `main`, and what is known of their tokens.
    pub(crate) fn others_mut(
        &mut self,
        request: RequestId,
    ) -> impl Iterator<Item = (StreamId, &mut Stream, &mut Chain)> {
        let slot = self.slots.get_mut(request.index());
        let slot = slot.filter(|s| s.generation == request.generation && s.generation != 0);
        slot.into_iter().flat_map(|slot| &mut slot.others).map(move |other| {
            (StreamId { request, label: other.label }, &mut other.stream, &mut other.chain)
        })
    }

    /// A live request's stream `main` and what is known of its tokens.
    #[inline]
    pub(crate) fn main_and_chain(
        &mut self,
        request: RequestId,
    ) -> Option<(&mut Stream, &mut Chain)> {
        let slot = self.slots.get_mut(request.index())?;
        let is_live = slot.generation == request.generation && slot.generation != 0;
        is_live.then(|| (&mut slot.main, &mut self.chains[request.index()]))
    }

    /// What is known of the tokens of a live request's `main`.
    #[inline]
    pub(crate) fn chain_mut(&mut self, request: RequestId) -> Option<&mut Chain> {
        self.chains.get_mut(request.index()).filter(|chain| chain.is_of(request))
    }

    /// Whether nothing has been found for a request that its streams do not have yet.
    pub(crate) fn has_no_lease(&self, request: RequestId) -> bool {
        let (slot, main) = (self.slots.get(request.index()), self.chains.get(request.index()));
        let others = slot.into_iter().flat_map(|slot| &slot.others).map(|other| &other.chain);
        main.into_iter().chain(others).all(|chain| chain.lease.is_empty())
    }

    /// What is known of the tokens of all streams of live requests.
    pub(crate) fn chains(&self) -> impl Iterator<Item = &Chain> {
        let live = self.slots.iter().zip(&self.chains).filter(|(r, _)| r.generation > 0);
        live.flat_map(|(slot, main)| {
            std::iter::once(main).chain(slot.others.iter().map(|other| &other.chain))
        })
    }

    /// Opens a stream of a live request; it must not be open.
    pub(crate) fn open(&mut self, id: StreamId, table: u64) -> &mut Stream {
        let others = &mut self.slots[id.request.index()].others;
        let stream = Stream { table, ..Stream::default() };
        others.push(Other { label: id.label, stream, chain: Chain::default() });
        &mut others.last_mut().expect("just pushed").stream
    }

    /// Closes a stream other than `main` and hands it out.
    pub(crate) fn close(&mut self, id: StreamId) -> Option<Stream> {
        let others = &mut self.slots[id.request.index()].others;
        let at = others.iter().rposition(|other| other.label == id.label)?;
        Some(others.remove(at).stream)
    }

    /// Labels of a live request's open streams: `main`, then the others by index from 1.
    pub(crate) fn nth_label(&self, request: RequestId, n: usize) -> Option<LabelId> {
        match n.checked_sub(1) {
            None => Some(LabelId::MAIN),
            Some(i) => self.slots[request.index()].others.get(i).map(|other| other.label),
        }
    }

    /// All open streams of all live requests.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (StreamId, &Stream)> {
        let live = self.slots.iter().enumerate().filter(|(_, r)| r.generation > 0);
        live.flat_map(|(slot, r)| {
            let request = RequestId::new(slot as u32, r.generation);
            let main = std::iter::once((LabelId::MAIN, &r.main));
            let all = main.chain(r.others.iter().map(|other| (other.label, &other.stream)));
            all.map(move |(label, s)| (StreamId { request, label }, s))
        })
    }
}

/// Room for so many pages, touched, so that no step waits for the operating system to find the memory.
fn reserve(pages: &mut Vec<u32>, count: usize) {
    pages.reserve(count);
    pages.resize(pages.capacity(), 0);
    pages.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(slot: u32, generation: u32, label: u32) -> StreamId {
        StreamId { request: RequestId::new(slot, generation), label: LabelId(label) }
    }

    #[test]
    fn a_late_copy_of_an_id_finds_nothing() {
        let mut requests = Requests::default();
        requests.insert(RequestId::new(3, 1), 0, Chain::default());
        requests.get_mut(id(3, 1, 0)).unwrap().len = 5;
        requests.open(id(3, 1, 2), 1).len = 6;
        requests.remove(RequestId::new(3, 1));
        assert!(requests.get(id(3, 1, 0)).is_none());
        requests.insert(RequestId::new(3, 2), 0, Chain::default());
        assert!(requests.get(id(3, 1, 0)).is_none() && requests.get(id(3, 2, 2)).is_none());
        assert_eq!(requests.get(id(3, 2, 0)).unwrap().len, 0);
        assert!(requests.get(id(9, 0, 0)).is_none() && requests.get(id(0, 0, 0)).is_none());
        assert_eq!(requests.iter().count(), 1);
    }

    #[test]
    fn whole_unprotected_pages_in_front_of_the_window_can_go() {
        // Written out by hand for pages of 4: (length, protected, keep) -> pages.
        for (len, protected, keep, pages) in [
            (16, 0, 16, 0),
            (16, 0, 13, 0),
            (16, 0, 12, 1),
            (17, 0, 12, 1),
            (16, 0, 1, 3),
            (13, 0, 1, 3),
            (16, 4, 8, 1),
            (16, 5, 4, 1),
            (16, 5, 1, 1),
            (16, 16, 1, 0),
            (16, 20, 1, 0),
            (0, 0, 1, 0),
            (4, 0, 1, 0),
        ] {
            assert_eq!(droppable(len, protected, keep, 4), pages, "{len} {protected} {keep}");
        }
    }
}
