//! The segments of a step as columns, with what its admission has found out about each. Columns, so
//! that a plan is made of them by copying, and so that a stream is looked up once in admission and
//! once in commit.

use resource_api::{LabelId, RequestId, Segments};

use crate::pool::SINK;
use crate::stream::{NO_SEAT, Stream, StreamId};

/// What a row of a step reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Target {
    /// The stream itself.
    #[default]
    Stream,
    /// The copy that this fork of the step makes before it.
    Fork(u32),
    /// The sink: padding, and requests that have gone since.
    Sink,
    /// No tokens: a stream that nobody opened, which this step does not extend.
    Nothing,
}

/// A segment of the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) id: StreamId,
    pub(crate) target: Target,
    /// Length before the step.
    pub(crate) start: u32,
    /// Tokens that the step adds.
    pub(crate) span: u32,
}

/// One row per segment. The columns `seat`, `list` and `page` are filled in for plain rows only.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    pub(crate) request: Vec<RequestId>,
    pub(crate) label: Vec<LabelId>,
    pub(crate) span: Vec<u32>,
    pub(crate) target: Vec<Target>,
    /// Length of each stream before the step.
    pub(crate) start: Vec<u32>,
    /// Row of each stream in page tables.
    pub(crate) seat: Vec<u32>,
    /// Identity of its page list.
    pub(crate) list: Vec<u64>,
    /// The page that its first new token is written to.
    pub(crate) page: Vec<u32>,
    /// So many rows at the front are plain: they extend the `main` stream of a live request, which
    /// has been marked as in flight.
    pub(crate) plain: usize,
    /// Tokens of all rows.
    pub(crate) tokens: u32,
    /// Whether all rows have the label of the first.
    pub(crate) one_label: bool,
    /// Whether a stream had no seat when it was admitted.
    pub(crate) unseated: bool,
}

impl Rows {
    /// No rows; keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.begin(Segments { request: &[], label: &[], span: &[] });
    }

    /// The rows of these segments, all of which are still to be looked at.
    pub(crate) fn begin(&mut self, segments: Segments<'_>) {
        let rows = segments.len();
        copy(&mut self.request, segments.request);
        copy(&mut self.label, segments.label);
        copy(&mut self.span, segments.span);
        self.target.clear();
        self.target.resize(rows, Target::Stream);
        self.start.resize(rows, 0);
        self.seat.resize(rows, NO_SEAT);
        self.list.resize(rows, 0);
        self.page.resize(rows, SINK);
        let total = |sum: u32, &span: &u32| sum.saturating_add(span);
        self.tokens = segments.span.iter().fold(0, total);
        self.one_label = segments.label.first().is_none_or(|first| first.is_all(segments.label));
        (self.plain, self.unseated) = (0, false);
    }

    pub(crate) fn len(&self) -> usize {
        self.request.len()
    }

    /// Whether these are the segments.
    pub(crate) fn are(&self, segments: Segments<'_>) -> bool {
        let same_labels = || match self.label.first() {
            Some(first) if self.one_label => first.is_all(segments.label),
            _ => self.label == segments.label,
        };
        RequestId::all_equal(&self.request, segments.request)
            && self.span == segments.span
            && same_labels()
    }

    /// Whether there are rows and all are plain: then the step has no options, either.
    pub(crate) fn all_plain(&self) -> bool {
        self.plain > 0 && self.plain == self.len()
    }

    /// Whether every row adds one token.
    pub(crate) fn all_single(&self) -> bool {
        self.span.iter().fold(0, |any, span| any | (span ^ 1)) == 0
    }

    pub(crate) fn get(&self, row: usize) -> Entry {
        Entry {
            id: StreamId { request: self.request[row], label: self.label[row] },
            target: self.target[row],
            start: self.start[row],
            span: self.span[row],
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        (0..self.len()).map(|row| self.get(row))
    }

    /// Notes what admission has found out about a row.
    pub(crate) fn set(&mut self, row: usize, target: Target, start: u32) {
        (self.target[row], self.start[row]) = (target, start);
    }

    /// Notes that a row's stream is short of a seat, if it is.
    pub(crate) fn note_seat(&mut self, stream: &Stream) {
        self.unseated |= stream.seat == NO_SEAT;
    }

    /// Sends the rows of a request that has gone to the sink; says whether there are any.
    pub(crate) fn sink(&mut self, request: RequestId) -> bool {
        let mut found = false;
        for row in 0..self.len() {
            if self.request[row] == request {
                self.target[row] = if self.span[row] > 0 { Target::Sink } else { Target::Nothing };
                // What was noted of plain rows is not looked at again.
                (self.plain, found) = (0, true);
            }
        }
        found
    }
}

fn copy<T: Copy>(to: &mut Vec<T>, from: &[T]) {
    to.clear();
    to.extend_from_slice(from);
}
