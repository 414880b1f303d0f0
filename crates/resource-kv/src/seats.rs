//! Page tables that stay from step to step.
//!
//! A stream has one seat, the row of it in the page tables of all slots. A slot remembers which pages
//! of which page list it has written to a seat, so that a step writes only what is new there.

use std::ops::Range;

use device::{prefer_large_pages, prefetch_at};
use resource_api::PlanVec;

use crate::pool::SINK;
use crate::stream::{NO_SEAT, Stream};

/// What a slot has written to a seat.
#[derive(Clone, Copy, Debug, Default)]
struct Written {
    /// Identity of the page list; 0 for none.
    table: u64,
    /// How many pages of it.
    pages: u32,
}

/// Seats of all streams. Seat 0 is that of the sink: a row of sink pages.
#[derive(Debug)]
pub(crate) struct Seats {
    /// Entries of a row: pages of the longest stream.
    stride: u32,
    /// Rows that tables have.
    rows: u32,
    /// Rows that were ever given to a stream, the sink's included.
    used: u32,
    free: Vec<u32>,
    slots: Vec<Vec<Written>>,
    /// By slot, where its table was when it was last given room.
    addresses: Vec<usize>,
    /// By slot, which entries of its table were written and not yet told to the device; `None` where
    /// there is none.
    changes: Option<Vec<Vec<Range<u32>>>>,
}

impl Seats {
    pub(crate) fn new(stride: u32, max_batch: u32) -> Self {
        let rows = max_batch.clamp(1, 1 << 16) + 1;
        Seats {
            stride,
            rows,
            used: 1,
            free: Vec::new(),
            slots: Vec::new(),
            addresses: Vec::new(),
            changes: None,
        }
    }

    /// The stream's seat; gives it one if it has none.
    pub(crate) fn take(&mut self, stream: &mut Stream) -> u32 {
        if stream.seat == NO_SEAT {
            stream.seat = self.free.pop().unwrap_or_else(|| {
                self.used += 1;
                self.used - 1
            });
        }
        stream.seat
    }

    /// Notes from now on which entries of the tables are written.
    pub(crate) fn note_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// What was written to the slot's table since it was last emptied.
    pub(crate) fn changes(&mut self, slot: usize) -> Option<&mut Vec<Range<u32>>> {
        self.changes.as_mut()?.get_mut(slot)
    }

    /// Frees a seat.
    pub(crate) fn leave(&mut self, seat: u32) {
        if seat != NO_SEAT {
            self.free.push(seat);
        }
    }

    /// Gives the slot's table a row for every seat. `keep_old`: a captured graph may read the table
    /// at its present address.
    pub(crate) fn make_room(&mut self, slot: usize, table: &mut PlanVec<u32>, keep_old: bool) {
        while self.rows < self.used {
            self.rows *= 2;
        }
        let entries = self.rows as usize * self.stride as usize;
        if table.len() < entries {
            table.reserve(entries, keep_old);
            // Before it is written to.
            prefer_large_pages(table.as_ptr(), entries);
            table.resize(entries, SINK);
        }
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, Vec::new);
            self.addresses.resize(slot + 1, 0);
        }
        self.addresses[slot] = table.as_ptr().addr();
        if let Some(changes) = self.changes.as_mut().filter(|c| c.len() <= slot) {
            changes.resize_with(slot + 1, Vec::new);
        }
        if self.slots[slot].len() < self.rows as usize {
            self.slots[slot].resize(self.rows as usize, Written::default());
        }
    }

    /// Asks for the entries of the seat's row, in the tables of all slots, that name its `page`th page.
    #[inline]
    pub(crate) fn warm(&self, seat: u32, page: u32) {
        let entry = seat as usize * self.stride as usize + page as usize;
        self.addresses.iter().for_each(|&table| prefetch_at(table + entry * size_of::<u32>()));
    }

    /// The rows of a slot, whose table has been given room.
    pub(crate) fn tables<'a>(&'a mut self, slot: usize, table: &'a mut [u32]) -> Tables<'a> {
        let changes = self.changes.as_mut().map(|changes| &mut changes[slot]);
        Tables { stride: self.stride as usize, written: &mut self.slots[slot], table, changes }
    }

    pub(crate) fn stride(&self) -> u32 {
        self.stride
    }
}

/// The page tables of one slot.
pub(crate) struct Tables<'a> {
    stride: usize,
    written: &'a mut [Written],
    table: &'a mut [u32],
    changes: Option<&'a mut Vec<Range<u32>>>,
}

impl Tables<'_> {
    /// Whether the seat's row has the first `pages` pages of page list `list`.
    #[inline]
    pub(crate) fn has(&self, seat: u32, list: u64, pages: u32) -> bool {
        let written = self.written[seat as usize];
        written.table == list && written.pages >= pages
    }

    /// Brings the seat's row up to date with the first `pages` pages of page list `list`.
    #[inline]
    pub(crate) fn write(&mut self, seat: u32, list: u64, pages: &[u32]) {
        if self.has(seat, list, pages.len() as u32) {
            return;
        }
        let written = &mut self.written[seat as usize];
        if written.table != list {
            *written = Written { table: list, pages: 0 };
        }
        let known = written.pages as usize;
        let row = seat as usize * self.stride;
        match pages[known..] {
            // Nearly always.
            [page] => self.table[row + known] = page,
            ref new => self.table[row + known..row + pages.len()].copy_from_slice(new),
        }
        written.pages = pages.len() as u32;
        if let Some(changes) = &mut self.changes {
            changes.push((row + known) as u32..(row + pages.len()) as u32);
        }
    }
}
