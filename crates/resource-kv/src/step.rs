//! What a step in flight has reserved: enough to undo it without trace, or to commit it.

use resource_api::{
    CombinedLabel, Fork, KvStepOptions, LabelId, Plan, Retention, Segments, SlotLease, StepId,
};

use crate::rows::{Entry, Rows, Target};
use crate::stream::StreamId;

/// A copy that the step makes. It goes to pages of its own, which become the target's at commit: an
/// abandoned step leaves the target's contents as they were.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) fork: Fork,
    /// Made after the step, at commit.
    pub(crate) after: bool,
    /// Length of the copy.
    pub(crate) len: u32,
    /// Pages for the copy and what the step appends to it.
    pub(crate) need: u32,
    pub(crate) pages: Vec<u32>,
    /// See `Stream::table`.
    pub(crate) table: u64,
    /// Whether the contents have been copied.
    pub(crate) done: bool,
    /// False once the request has gone.
    pub(crate) alive: bool,
}

impl Copy {
    pub(crate) fn source(&self) -> StreamId {
        StreamId { request: self.fork.request_id, label: self.fork.from }
    }

    pub(crate) fn target(&self) -> StreamId {
        StreamId { request: self.fork.request_id, label: self.fork.to }
    }
}

/// Pages that a step took for the stream of one of its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) row: usize,
    pub(crate) id: StreamId,
    pub(crate) pages: u32,
}

/// One step between `admit` and `commit`. Reused, so that steps allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub(crate) step: StepIdOrNone,
    /// Only planned ahead: dropped by any other step.
    pub(crate) staged: bool,
    /// A request of it has gone, so that a plan made ahead is wrong.
    pub(crate) stale: bool,
    /// Whether the streams grow at commit.
    pub(crate) commit: bool,
    pub(crate) rows: Rows,
    /// In the order they are made.
    pub(crate) copies: Vec<Copy>,
    pub(crate) retention: Vec<Retention>,
    /// Labels that it plans together.
    pub(crate) combined: Vec<CombinedLabel>,
    /// Streams that it opened, in order.
    pub(crate) opened: Vec<StreamId>,
    /// Pages that it took for streams, in order.
    pub(crate) taken: Vec<Taken>,
    /// Streams besides those of its rows that it marked as in flight, and whether it rewrites them.
    pub(crate) marked: Vec<(StreamId, bool)>,
    /// Its plan, and the lease it was made for.
    pub(crate) plan: Option<(SlotLease, Plan)>,
}

/// The step of a record; `None` while the record is spare.
pub(crate) type StepIdOrNone = Option<StepId>;

impl StepRecord {
    /// Empties the record and keeps its memory.
    pub(crate) fn begin(&mut self, step: StepId, staged: bool, options: Option<&KvStepOptions>) {
        self.step = Some(step);
        self.staged = staged;
        self.stale = false;
        self.commit = options.is_none_or(|o| o.commit);
        self.rows.clear();
        self.copies.clear();
        self.retention.clear();
        self.combined.clear();
        self.opened.clear();
        self.taken.clear();
        self.marked.clear();
        self.plan = None;
    }

    /// Whether the record was made for exactly this.
    pub(crate) fn is_for(&self, segments: Segments<'_>, options: Option<&KvStepOptions>) -> bool {
        let copies = |after| self.copies.iter().filter(move |c| c.after == after).map(|c| c.fork);
        let forks = |list: &[Fork], after| copies(after).eq(list.iter().copied().filter(is_real));
        let rest = match options {
            None => {
                self.commit
                    && self.copies.is_empty()
                    && self.retention.is_empty()
                    && self.combined.is_empty()
            }
            Some(o) => {
                self.commit == o.commit
                    && forks(&o.pre_forks, false)
                    && forks(&o.post_forks, true)
                    && self.retention[..] == o.retention[..]
                    && self.combined[..] == o.combined_labels[..]
            }
        };
        rest && self.rows.are(segments)
    }

    /// Whether it marked a stream as in flight.
    pub(crate) fn uses(&self, id: StreamId) -> bool {
        let of_row = |e: Entry| e.target == Target::Stream && e.id == id;
        self.rows.iter().any(of_row) || self.marked.iter().any(|(marked, _)| *marked == id)
    }

    /// Whether it marked any stream as in flight.
    pub(crate) fn uses_any(&self) -> bool {
        !self.marked.is_empty() || self.rows.iter().any(|e| e.target == Target::Stream)
    }

    /// Tokens that the row makes pending on its stream.
    pub(crate) fn pending(&self, entry: Entry) -> u32 {
        match entry.target {
            Target::Stream if self.commit => entry.span,
            _ => 0,
        }
    }

    /// The last copy made before the step that goes to this stream.
    pub(crate) fn copy_into(&self, id: StreamId) -> Option<usize> {
        self.copies.iter().rposition(|c| !c.after && c.alive && c.target() == id)
    }

    /// What the step does to a stream.
    pub(crate) fn entry_of(&self, id: StreamId) -> Option<Entry> {
        self.rows.iter().find(|e| e.id == id)
    }

    /// Whether the step adds tokens to the stream.
    pub(crate) fn extends(&self, id: StreamId) -> bool {
        self.taken.iter().any(|t| t.id == id)
            || self.entry_of(id).is_some_and(|e| e.span > 0 && e.target == Target::Stream)
    }
}

/// Padding rows have nothing to copy.
pub(crate) fn is_real(fork: &Fork) -> bool {
    !fork.request_id.is_padding()
}

/// The label under which a stream's rows are planned.
pub(crate) fn plan_label(label: LabelId, combined: &[CombinedLabel]) -> LabelId {
    combined.iter().find(|c| c.source == label).map_or(label, |c| c.combined)
}
