//! Stretches of rows that a kernel goes through, and where each one's scores and sums are.

use super::rows::{Element, Rows};
use crate::cpu::simd::{LANES, prefetch};

/// Rows that lie at equal distances, mostly one head's in a page, and what they have to do with the tables
/// of a call. A call takes many: beginning one takes as long as a quarter of a page's arithmetic.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    pub rows: Rows<'a>,
    /// How many of `rows`.
    pub count: usize,
    /// Row of the tables that the first of the span's queries has.
    pub query: usize,
    /// Number of the span's queries; [`dot_rows`](super::dot_rows) has the same for all its spans.
    pub queries: usize,
    /// Column of the table of scores that the first of the span's rows has.
    pub column: usize,
    /// Element of the sums at which that of the span's first query begins.
    pub sum: usize,
}

impl<'a> Span<'a> {
    /// `count` rows from the first on, for `queries` queries, at the beginning of all tables.
    pub fn new(rows: Rows<'a>, count: usize, queries: usize) -> Self {
        Self { rows, count, query: 0, queries, column: 0, sum: 0 }
    }

    /// Panics where the span's scores are not inside a table of `len` elements, `stride` from row to row.
    pub(super) fn check_scores(&self, stride: usize, len: usize) {
        let Self { count, queries, query, column, .. } = *self;
        let columns = column.checked_add(count);
        assert!(
            queries <= 1 || columns.is_some_and(|n| n <= stride),
            "{count} columns from {column} on at a stride of {stride} overlap"
        );
        let end = || query.checked_add(queries)?.checked_sub(1)?.checked_mul(stride);
        let fits = queries == 0
            || end().zip(columns).and_then(|(s, n)| s.checked_add(n)).is_some_and(|n| n <= len);
        assert!(
            fits,
            "{queries} rows of {count} from {query}, {column} on at a stride of {stride} do not fit \
             into {len}"
        );
    }
}

/// The rows of a span that a kernel goes through, and those to be fetched on the way.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a, E> {
    x: &'a [E],
    stride: usize,
    pub width: usize,
    pub count: usize,
    next: &'a [u8],
}

impl<'a, E: Element> Walk<'a, E> {
    /// The rows of `span`, which must be of this type and so many.
    #[inline(always)]
    pub fn new(span: &Span<'a>, width: usize) -> Self {
        let rows = &span.rows;
        rows.check(span.count, width);
        let x = E::of(rows.data).expect("rows of one type in a call");
        Self { x, stride: rows.stride, width, count: span.count, next: rows.next }
    }

    /// 16 elements of row `i` from `column` on.
    ///
    /// # Safety
    /// There are that many rows, and columns.
    #[inline(always)]
    pub unsafe fn vector(&self, i: usize, column: usize) -> &'a [E; LANES] {
        debug_assert!(i < self.count && column + LANES <= self.width);
        // SAFETY: by the caller's promise inside a row, and `new` has seen that all rows lie in `x`.
        unsafe { &*self.x.as_ptr().add(i * self.stride + column).cast() }
    }

    /// Row `i` from `column` on.
    #[inline(always)]
    pub fn rest(&self, i: usize, column: usize) -> &'a [E] {
        &self.x[i * self.stride..][..self.width][column..]
    }

    /// The same rows with nothing to be fetched.
    #[inline(always)]
    pub fn fetched(self) -> Self {
        Self { next: &[], ..self }
    }

    /// Asks for as much of what comes next as four rows take, or for 16 lines of it.
    #[inline(always)]
    pub fn fetch(&mut self) {
        match self.width * size_of::<E>() > 2 * LINE {
            true => self.fetch_lines::<16>(),
            false => self.fetch_lines::<8>(),
        }
    }

    #[inline(always)]
    fn fetch_lines<const N: usize>(&mut self) {
        if let Some((lines, rest)) = self.next.split_at_checked(N * LINE) {
            for i in 0..N {
                prefetch(lines.as_ptr().wrapping_add(i * LINE));
            }
            self.next = rest;
        }
    }
}

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
