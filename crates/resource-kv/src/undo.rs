//! Giving back what a step has taken, without trace.

use crate::rows::Target;
use crate::state::{Shared, State};
use crate::step::{StepRecord, Taken};
use crate::stream::Stream;

impl State {
    /// Takes the step's marks off its streams.
    pub(crate) fn unmark(&mut self, record: &StepRecord) {
        self.unmark_others(record);
        for entry in record.rows.iter() {
            if let (Target::Stream, Some(stream)) = (entry.target, self.requests.get_mut(entry.id))
            {
                stream.pending -= record.pending(entry);
                stream.in_flight -= 1;
            }
        }
    }

    /// Takes the step's marks off the streams that it has marked besides those of its rows.
    pub(crate) fn unmark_others(&mut self, record: &StepRecord) {
        for &(id, rewrites) in &record.marked {
            if let Some(stream) = self.requests.get_mut(id) {
                stream.in_flight -= 1;
                stream.rewriters -= u16::from(rewrites);
            }
        }
    }

    /// Gives back everything that the step has taken, last first, so that the free list is as it was.
    pub(crate) fn undo(&mut self, shared: &Shared, at: usize) {
        let mut record = self.steps.remove(at);
        self.unmark(&record);
        let planned = record.plan.is_some();
        // Only a step that may have started can have pages that are still being written.
        let started = planned && !record.staged;
        let completed = if started { shared.completed_epoch() } else { 0 };
        let epoch = self.last_epoch;
        let put_back = |state: &mut State, page| match started {
            true => state.pool.release(page, epoch, completed),
            false => state.pool.put_back(page),
        };
        while let Some(Taken { id, pages, .. }) = record.taken.pop() {
            let table = self.new_table();
            let Some(stream) = self.requests.get_mut(id) else { continue };
            if stream.in_flight > 0 && self.steps[at..].iter().any(|r| r.uses(id)) {
                // A later step has laid itself out on these pages: they stay with the stream.
                continue;
            }
            if planned {
                stream.table = table;
            }
            for _ in 0..pages {
                let page = self.requests.get_mut(id).and_then(|s| s.pages.pop());
                page.into_iter().for_each(|page| put_back(self, page));
            }
            self.publish(shared, id);
        }
        for copy in record.copies.iter_mut().rev() {
            copy.pages.drain(..).rev().for_each(|page| put_back(self, page));
        }
        self.close_opened(shared, &record);
        self.spare.push(record);
    }

    /// Closes the streams that the step opened, unless something has become of them.
    pub(crate) fn close_opened(&mut self, shared: &Shared, record: &StepRecord) {
        for &id in record.opened.iter().rev() {
            let unused = |s: &&Stream| s.len == 0 && s.pages.is_empty() && s.in_flight == 0;
            if self.requests.get(id).filter(unused).is_some() {
                if let Some(stream) = self.requests.close(id) {
                    self.seats.leave(stream.seat);
                }
                self.publish(shared, id);
            }
        }
    }
}
