//! What capability calls read without the lock of the step methods.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use resource_api::{ResourceError, Result};

use crate::stream::StreamId;

/// Most labels of an engine that a cache keeps streams for.
pub(crate) const MAX_LABELS: usize = 256;

/// Requests of the first chunk of a column; every further one is as large as all before it.
const FIRST_CHUNK: usize = 1024;

/// Chunks of a column: enough for every request slot.
const CHUNKS: usize = 11;

/// A stream's published state: each half carries the request's generation.
#[derive(Debug, Default)]
struct Cell {
    /// Generation and committed length.
    len: AtomicU64,
    /// Generation and number of pages.
    held: AtomicU64,
}

#[derive(Debug, Default)]
struct Column {
    chunks: [OnceLock<Box<[Cell]>>; CHUNKS],
}

/// Lengths of all streams and the number of free pages. Written by whoever holds the cache's lock,
/// read by anyone.
#[derive(Debug)]
pub(crate) struct Board {
    columns: Box<[OnceLock<Box<Column>>]>,
    free: AtomicU32,
}

fn place(request: usize) -> (usize, usize, usize) {
    let chunk = (request / FIRST_CHUNK + 1).ilog2() as usize;
    let first = FIRST_CHUNK * ((1 << chunk) - 1);
    (chunk, request - first, FIRST_CHUNK << chunk)
}

fn pack(id: StreamId, value: u32) -> u64 {
    u64::from(id.request.generation) << 32 | u64::from(value)
}

impl Board {
    pub(crate) fn new() -> Self {
        let columns = (0..MAX_LABELS).map(|_| OnceLock::new()).collect();
        Board { columns, free: AtomicU32::new(0) }
    }

    /// Checks that a label can be published, before a stream of it is opened.
    ///
    /// # Errors
    /// `EXHAUSTED` past the most labels that a cache serves.
    pub(crate) fn check(id: StreamId) -> Result<()> {
        match id.label.index() < MAX_LABELS {
            true => Ok(()),
            false => Err(ResourceError::new(
                resource_api::ErrorKind::EXHAUSTED,
                format!("label {} is past the {MAX_LABELS} that a cache serves", id.label.0),
            )),
        }
    }

    /// Publishes a stream. Allocates only for the first requests of a label.
    pub(crate) fn set(&self, id: StreamId, len: u32, held: u32) {
        let Some(column) = self.columns.get(id.label.index()) else { return };
        let (chunk, at, size) = place(id.request.index());
        let Some(chunk) = column.get_or_init(Box::default).chunks.get(chunk) else { return };
        let cells = chunk.get_or_init(|| (0..size).map(|_| Cell::default()).collect());
        cells[at].len.store(pack(id, len), Ordering::Release);
        cells[at].held.store(pack(id, held), Ordering::Release);
    }

    /// To publish lengths of many streams.
    pub(crate) fn lens(&self) -> Lens<'_> {
        Lens { board: self, label: usize::MAX, first: 0, cells: &[] }
    }

    /// The chunk that a stream has its cell in, with the first request there.
    fn chunk(&self, id: StreamId) -> Option<(usize, &[Cell])> {
        let (chunk, at, _) = place(id.request.index());
        let cells = self.columns.get(id.label.index())?.get()?.chunks.get(chunk)?.get()?;
        Some((id.request.index() - at, cells))
    }

    /// Committed length and pages of a stream; zeros for one that is not open.
    pub(crate) fn get(&self, id: StreamId) -> (u32, u32) {
        let Some((first, cells)) = self.chunk(id) else { return (0, 0) };
        let at = id.request.index() - first;
        let read = |half: &AtomicU64| {
            let packed = half.load(Ordering::Acquire);
            if packed >> 32 == u64::from(id.request.generation) { packed as u32 } else { 0 }
        };
        (read(&cells[at].len), read(&cells[at].held))
    }

    pub(crate) fn set_free(&self, pages: u32) {
        self.free.store(pages, Ordering::Release);
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Acquire)
    }
}

/// Publishes lengths and numbers of pages; remembers where the last one went, since the next one goes beside it.
pub(crate) struct Lens<'a> {
    board: &'a Board,
    label: usize,
    first: usize,
    cells: &'a [Cell],
}

impl Lens<'_> {
    /// Publishes the length of a stream that [`Board::set`] has published before.
    #[inline]
    pub(crate) fn set(&mut self, id: StreamId, len: u32) {
        let at = id.request.index().wrapping_sub(self.first);
        match self.cells.get(at) {
            Some(cell) if self.label == id.label.index() => {
                cell.len.store(pack(id, len), Ordering::Release);
            }
            _ => self.find_and_set(id, len),
        }
    }

    /// Publishes the number of pages of such a stream.
    #[inline]
    pub(crate) fn set_held(&mut self, id: StreamId, held: u32) {
        let at = id.request.index().wrapping_sub(self.first);
        if self.label != id.label.index() || at >= self.cells.len() {
            self.find(id);
        }
        if let Some(cell) = self.cells.get(id.request.index().wrapping_sub(self.first)) {
            cell.held.store(pack(id, held), Ordering::Release);
        }
    }

    #[cold]
    fn find_and_set(&mut self, id: StreamId, len: u32) {
        self.find(id);
        if let Some(cell) = self.cells.get(id.request.index().wrapping_sub(self.first)) {
            cell.len.store(pack(id, len), Ordering::Release);
        }
    }

    #[cold]
    fn find(&mut self, id: StreamId) {
        let (first, cells) = self.board.chunk(id).unwrap_or((0, &[]));
        (self.label, self.first, self.cells) = (id.label.index(), first, cells);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::MAX_REQUESTS;
    use resource_api::{LabelId, RequestId};

    fn id(slot: u32, generation: u32, label: u32) -> StreamId {
        StreamId { request: RequestId::new(slot, generation), label: LabelId(label) }
    }

    #[test]
    fn every_request_slot_has_its_own_place() {
        let mut expected = (0, 0);
        for request in 0..MAX_REQUESTS as usize {
            let (chunk, at, size) = place(request);
            assert_eq!((chunk, at), expected);
            expected = if at + 1 == size { (chunk + 1, 0) } else { (chunk, at + 1) };
        }
        assert!(expected.0 < CHUNKS);
    }

    #[test]
    fn only_the_live_generation_is_seen() {
        let board = Board::new();
        board.set(id(700, 3, 0), 40, 5);
        board.set(id(700, 3, 9), 1, 1);
        assert_eq!(board.get(id(700, 3, 0)), (40, 5));
        assert_eq!(board.get(id(700, 2, 0)), (0, 0));
        let mut lens = board.lens();
        board.set(id(3, 1, 0), 1, 1);
        lens.set(id(700, 3, 9), 2);
        lens.set(id(700, 3, 0), 41);
        lens.set(id(3, 1, 0), 7);
        lens.set(id(9000, 1, 0), 8);
        lens.set_held(id(3, 1, 0), 9);
        let read = [(700, 3, 0), (700, 3, 9), (3, 1, 0)].map(|(s, g, l)| board.get(id(s, g, l)));
        assert_eq!(read, [(41, 5), (2, 1), (7, 9)]);
        assert_eq!(board.get(id(700, 3, 1)), (0, 0));
        assert_eq!(board.get(id(u32::MAX - 70000, 3, 0)), (0, 0));
        assert!(Board::check(id(0, 1, 255)).is_ok() && Board::check(id(0, 1, 256)).is_err());
    }
}
