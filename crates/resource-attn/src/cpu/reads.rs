//! Keys, then values, of a chunk in the order in which attention reads them, a few ahead.
//!
//! Pages lie apart in memory, and what one head has in a page is short: by the time the CPU has seen
//! that it is read from end to end, it has been read. So whoever reads asks for what comes after.

use super::pages::Pages;
use device::attention::Rows;
use std::ops::Range;

/// Bytes that are asked for before they are read: what memory delivers in the time it takes to answer.
const AHEAD: usize = 20 << 10;
/// Most runs of a head that this is divided into.
const MOST: usize = 12;

/// Keys of one page.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub page: u32,
    pub slot: u32,
    pub keys: Range<u32>,
}

/// Rows of the keys of each run, head by head, then of the values.
#[derive(Debug)]
pub(super) struct Reads<'a, R> {
    /// Those whose turn comes next, from `first` on and around.
    coming: [Option<Rows<'a>>; MOST],
    first: usize,
    count: usize,
    later: Later<'a, R>,
}

impl<'a, R: Iterator<Item = Run> + Clone> Reads<'a, R> {
    /// Those of `heads` in `runs`, of keys `k` and values `v`.
    pub fn new(k: &'a Pages<'a>, v: &'a Pages<'a>, runs: R, heads: Range<usize>) -> Self {
        let count = (AHEAD / k.run_bytes().max(1)).clamp(1, MOST);
        let keys =
            OfPages { pages: k, runs: runs.clone(), run: None, heads: heads.clone(), head: 0 };
        let values = OfPages { pages: v, runs, run: None, heads, head: 0 };
        let mut later = Later { keys, values };
        let mut coming = [None; MOST];
        coming[..count].fill_with(|| later.next());
        coming.iter().flatten().for_each(Rows::fetch);
        Self { coming, first: 0, count, later }
    }

    /// The next rows; `None` when their page is not in the pool.
    pub fn next(&mut self) -> Option<Rows<'a>> {
        let later = self.later.next();
        let rows = std::mem::replace(&mut self.coming[self.first], later);
        self.first = if self.first + 1 == self.count { 0 } else { self.first + 1 };
        match later {
            Some(later) => rows.map(|rows| rows.before(later)),
            None => rows,
        }
    }
}

/// What is not yet asked for.
#[derive(Debug)]
struct Later<'a, R> {
    keys: OfPages<'a, R>,
    values: OfPages<'a, R>,
}

impl<'a, R: Iterator<Item = Run>> Later<'a, R> {
    fn next(&mut self) -> Option<Rows<'a>> {
        self.keys.next().or_else(|| self.values.next()).flatten()
    }
}

/// The rows of one of the two.
#[derive(Debug)]
struct OfPages<'a, R> {
    pages: &'a Pages<'a>,
    runs: R,
    run: Option<Run>,
    heads: Range<usize>,
    head: usize,
}

impl<'a, R: Iterator<Item = Run>> OfPages<'a, R> {
    /// `None` at the end, and in it `None` for a page that there is not.
    fn next(&mut self) -> Option<Option<Rows<'a>>> {
        if self.run.is_none() || self.head == self.heads.end {
            self.run = Some(self.runs.next()?);
            self.head = self.heads.start;
        }
        let run = self.run.as_ref()?;
        let head = self.head;
        self.head += 1;
        Some(self.pages.rows(run.page, run.slot, run.keys.len(), head))
    }
}
