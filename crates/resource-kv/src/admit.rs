//! Reserving what a step needs, all or nothing, and giving it back.

use resource_api::{
    AdmitOutcome, FailureReason, Fork, KvStepOptions, ResourceError, ResourceStep, Result, Segment,
    Segments, StepContext, StepId,
};

use crate::board::Board;
use crate::state::{Shared, State};
use crate::step::{Copy, Entry, StepRecord, Target, is_real};
use crate::stream::{StreamId, droppable};

/// Most steps between `admit` and `commit`. A host has a handful; more means that it forgets them.
const MAX_IN_FLIGHT: usize = 256;

/// What the first pass over a step finds: how many pages it takes, and the stream at which the free
/// ones ran out.
#[derive(Default)]
struct Need {
    pages: u64,
    short_at: Option<StreamId>,
}

impl Need {
    fn add(&mut self, pages: u32, ready: u32, id: StreamId) {
        self.pages += u64::from(pages);
        if self.pages > u64::from(ready) {
            self.short_at.get_or_insert(id);
        }
    }
}

/// `Err(Some(..))` is a refusal.
type Pass = Result<(), Refusal>;

enum Refusal {
    Outcome(AdmitOutcome),
    Error(ResourceError),
}

impl From<ResourceError> for Refusal {
    fn from(error: ResourceError) -> Self {
        Refusal::Error(error)
    }
}

impl State {
    /// Reserves the step's pages. A refusal changes nothing. For a step that has its reservation
    /// already (planned ahead, or asked again) nothing more is taken.
    pub(crate) fn admit(
        &mut self,
        shared: &Shared,
        step: &ResourceStep<'_>,
        ctx: &StepContext<'_>,
    ) -> Result<AdmitOutcome> {
        let options = step.options::<KvStepOptions>()?;
        let segments = step.segments();
        self.drop_stage(shared, Some(ctx.step()));
        if let Some(at) = self.find(ctx.step()) {
            if self.still_holds(at, segments, options) {
                self.steps[at].staged &= ctx.is_preplan();
                return Ok(AdmitOutcome::OK);
            }
            self.undo(shared, at);
        }
        if !ctx.is_preplan() {
            self.undo_abandoned(shared, segments);
        }
        if self.pool.waiting() > 0 {
            self.pool.settle(shared.completed_epoch());
        }
        self.make_room_for_a_record()?;
        let mut record = self.spare.pop().unwrap_or_default();
        record.begin(ctx.step(), ctx.is_preplan(), options);
        match self.reserve(shared, segments, options, &mut record) {
            Ok(()) => {
                self.steps.push(record);
                Ok(AdmitOutcome::OK)
            }
            Err(refusal) => {
                self.close_opened(shared, &record);
                self.spare.push(record);
                match refusal {
                    Refusal::Outcome(outcome) => Ok(outcome),
                    Refusal::Error(error) => Err(error),
                }
            }
        }
    }

    /// Gives back what the step took. A step that is not in flight (any more) has nothing.
    pub(crate) fn rollback(&mut self, shared: &Shared, step: StepId) {
        // A plan ahead builds on the steps before it.
        self.drop_stage(shared, Some(step));
        if let Some(at) = self.find(step) {
            self.undo(shared, at);
        }
    }

    /// Drops the step that is planned ahead, unless it is `keep`.
    pub(crate) fn drop_stage(&mut self, shared: &Shared, keep: Option<StepId>) {
        if let Some(at) = self.steps.iter().position(|r| r.staged && r.step != keep) {
            self.undo(shared, at);
        }
    }

    /// Drops the step that is planned ahead if it is this one; `None` is any.
    pub(crate) fn clear_preplan(&mut self, shared: &Shared, step: Option<StepId>) {
        let is_it = |r: &StepRecord| r.staged && (step.is_none() || r.step == step);
        if let Some(at) = self.steps.iter().position(is_it) {
            self.undo(shared, at);
        }
    }

    /// Whether a reservation is still what this step needs: nothing it was laid out on has changed.
    fn still_holds(
        &self,
        at: usize,
        segments: Segments<'_>,
        options: Option<&KvStepOptions>,
    ) -> bool {
        let record = &self.steps[at];
        let in_place = |entry: &Entry| match (entry.target, self.requests.get(entry.id)) {
            (Target::Stream, Some(s)) => s.next_len() - record.pending(entry) == entry.start,
            (Target::Stream, None) => false,
            _ => true,
        };
        !record.stale && record.is_for(segments, options) && record.entries.iter().all(in_place)
    }

    /// A step that was admitted but never planned, and whose streams another step now extends, was
    /// given up by a host that did not say so. Its reservation must not count twice.
    fn undo_abandoned(&mut self, shared: &Shared, segments: Segments<'_>) {
        let is_abandoned = |record: &StepRecord| {
            record.plan.is_none()
                && segments.iter().any(|s| {
                    let id = StreamId { request: s.request_id, label: s.label };
                    s.span > 0 && record.extends(id)
                })
        };
        while let Some(at) = self.steps.iter().rposition(is_abandoned) {
            self.undo(shared, at);
        }
    }

    fn make_room_for_a_record(&mut self) -> Result<()> {
        if self.steps.len() < MAX_IN_FLIGHT {
            return Ok(());
        }
        let is_empty = |r: &StepRecord| r.marked.is_empty() && r.copies.iter().all(|c| !c.alive);
        match self.steps.iter().position(is_empty) {
            Some(at) => {
                let record = self.steps.remove(at);
                self.spare.push(record);
                Ok(())
            }
            None => Err(ResourceError::wrong_state(format!(
                "{MAX_IN_FLIGHT} steps were admitted and neither committed nor rolled back"
            ))),
        }
    }

    /// Fills the record, then takes its pages. Until the pages are known to suffice, only empty
    /// streams are opened.
    fn reserve(
        &mut self,
        shared: &Shared,
        segments: Segments<'_>,
        options: Option<&KvStepOptions>,
        record: &mut StepRecord,
    ) -> Pass {
        self.admissions += 1;
        let ready = self.pool.ready();
        let mut need = Need::default();
        let (pre, post): (&[Fork], &[Fork]) =
            options.map_or((&[], &[]), |o| (&o.pre_forks, &o.post_forks));
        for fork in pre.iter().filter(|f| is_real(f)) {
            self.add_copy(shared, fork, false, record, &mut need)?;
        }
        record.entries.reserve(segments.len());
        for segment in segments.iter() {
            self.add_entry(shared, segment, record, &mut need)?;
        }
        for fork in post.iter().filter(|f| is_real(f)) {
            self.add_copy(shared, fork, true, record, &mut need)?;
        }
        if let Some(options) = options {
            self.add_retention(options, record)?;
        }
        if let Some(id) = need.short_at {
            let waiting = u64::from(ready + self.pool.waiting());
            if need.pages <= waiting {
                let reason = FailureReason::ADMISSION_DEFERRED;
                let outcome = AdmitOutcome::refused(reason, id.request, id.label);
                let why = "the step's pages are free once the steps now running have completed";
                return Err(Refusal::Outcome(outcome.with_message(why)));
            }
            let (request, label) = (id.request, id.label);
            let outcome = AdmitOutcome::allocation_failed(request, label, need.pages, ready.into());
            let message = format!("needs {} more pages, {ready} are free", need.pages);
            return Err(Refusal::Outcome(outcome.with_message(message)));
        }
        self.take(shared, record);
        Ok(())
    }

    fn add_entry(
        &mut self,
        shared: &Shared,
        segment: Segment,
        record: &mut StepRecord,
        need: &mut Need,
    ) -> Pass {
        let Segment { request_id: request, label, span } = segment;
        let id = StreamId { request, label };
        let max = shared.facts.max_seq_len;
        let mut entry = Entry { id, target: Target::Sink, start: 0, span };
        if request.is_padding() {
            if span > max {
                let what = format!("a padding row of {span} tokens; `max_seq_len` is {max}");
                return Err(ResourceError::invalid(what).into());
            }
            record.entries.push(entry);
            return Ok(());
        }
        if self.requests.get(id).is_none() {
            if span == 0 {
                entry.target = Target::Nothing;
                record.entries.push(entry);
                return Ok(());
            }
            self.open(id, record)?;
        }
        let seen = self.admissions;
        let stream = self.requests.get_mut(id).expect("open, or just opened");
        if stream.seen == seen {
            let what = format!("request {request} has two segments of label {}", label.0);
            return Err(ResourceError::invalid(what).into());
        }
        stream.seen = seen;
        if stream.rewriters > 0 {
            return Err(deferred(id));
        }
        let copy = record.copy_into(id);
        (entry.target, entry.start) = match copy {
            Some(at) => (Target::Fork(at), record.copies[at].len),
            None => (Target::Stream, stream.next_len()),
        };
        let held = stream.held();
        let total = entry.start.saturating_add(span);
        if span > 0 && total > max {
            let what =
                format!("{} and {span} more tokens are over `max_seq_len` = {max}", entry.start);
            return Err(never(id, what));
        }
        let pages = shared.pages_for(total);
        if span > 0 && pages > self.pool.usable() {
            let usable = self.pool.usable();
            let what = format!("{total} tokens need {pages} pages, the whole pool has {usable}");
            return Err(never(id, what));
        }
        let ready = self.pool.ready();
        match copy {
            Some(at) => {
                let copy = &mut record.copies[at];
                need.add(pages.saturating_sub(copy.need), ready, id);
                copy.need = copy.need.max(pages);
            }
            None => {
                let fresh = pages.saturating_sub(held);
                need.add(fresh, ready, id);
                if fresh > 0 {
                    record.taken.push((id, fresh));
                }
            }
        }
        record.entries.push(entry);
        Ok(())
    }

    fn add_copy(
        &mut self,
        shared: &Shared,
        fork: &Fork,
        after: bool,
        record: &mut StepRecord,
        need: &mut Need,
    ) -> Pass {
        let mut copy = Copy {
            fork: *fork,
            after,
            len: 0,
            need: 0,
            pages: Vec::new(),
            table: 0,
            done: false,
            alive: true,
        };
        let (source, target) = (copy.source(), copy.target());
        let twice = record.copies.iter().any(|c| c.after == after && c.target() == target);
        if source == target || twice {
            return Err(ResourceError::invalid(format!(
                "request {}: label {} is the target of its own or of two copies",
                fork.request_id, fork.to.0
            ))
            .into());
        }
        let busy = |id| self.requests.get(id).is_some_and(|s| s.in_flight > 0);
        if busy(source) || busy(target) {
            return Err(deferred(target));
        }
        if self.requests.get(target).is_none() {
            self.open(target, record)?;
        }
        copy.len = self.len_at(record, source, after);
        copy.need = shared.pages_for(copy.len);
        if copy.need > self.pool.usable() {
            return Err(never(target, "the copy is larger than the whole pool".into()));
        }
        need.add(copy.need, self.pool.ready(), target);
        record.copies.push(copy);
        Ok(())
    }

    /// Length of a stream where a copy is made: before the step, or after it.
    fn len_at(&self, record: &StepRecord, id: StreamId, after: bool) -> u32 {
        let copies = record.copies.iter().rev();
        if let Some(copy) = copies.clone().find(|c| c.after && c.target() == id) {
            return copy.len;
        }
        if let Some(entry) = record.entry_of(id).filter(|_| after) {
            return entry.start + if record.commit { entry.span } else { 0 };
        }
        match record.copy_into(id) {
            Some(at) => record.copies[at].len,
            None => self.requests.get(id).map_or(0, |s| s.len),
        }
    }

    fn add_retention(&mut self, options: &KvStepOptions, record: &mut StepRecord) -> Pass {
        for retention in options.retention.iter() {
            let id = StreamId { request: retention.request_id, label: retention.label };
            let prefix = retention.protected_prefix;
            let what = format!("retention of label {} of request {}", id.label.0, id.request);
            if retention.context_budget == 0 {
                let what = format!("{what}: `context_budget` is 0");
                return Err(ResourceError::invalid(what).into());
            }
            let protected = self.requests.get(id).map_or(0, |s| s.protected);
            if prefix > 0 && protected > 0 && prefix != protected {
                let what = format!("{what}: protects {prefix} tokens, {protected} were protected");
                return Err(ResourceError::invalid(what).into());
            }
            let len = self.len_at(record, id, true);
            if record.commit && prefix > len && self.requests.get(id).is_some() {
                let what = format!("{what}: protects {prefix} tokens of {len}");
                return Err(ResourceError::invalid(what).into());
            }
            record.retention.push(*retention);
        }
        Ok(())
    }

    fn open(&mut self, id: StreamId, record: &mut StepRecord) -> Pass {
        if !self.requests.is_live(id.request) {
            return Err(never(id, format!("request {} was not ingested, or removed", id.request)));
        }
        Board::check(id)?;
        let table = self.new_table();
        self.requests.open(id, table);
        record.opened.push(id);
        Ok(())
    }

    /// The second pass: everything fits.
    fn take(&mut self, shared: &Shared, record: &mut StepRecord) {
        for at in 0..record.copies.len() {
            let table = self.new_table();
            let copy = &mut record.copies[at];
            copy.table = table;
            let taken = self.pool.take(copy.need, &mut copy.pages);
            assert!(taken, "the first pass counted the pages");
            let (source, target) = (copy.source(), copy.target());
            self.mark(source, false, record);
            self.mark(target, true, record);
        }
        for &(id, fresh) in &record.taken {
            let stream = self.requests.get_mut(id).expect("found by the first pass");
            let taken = self.pool.take(fresh, &mut stream.pages);
            assert!(taken, "the first pass counted the pages");
            self.publish(shared, id);
        }
        for at in 0..record.entries.len() {
            let entry = record.entries[at];
            let pending = record.pending(&entry);
            if let (Target::Stream, Some(stream)) = (entry.target, self.requests.get_mut(entry.id))
            {
                stream.pending += pending;
                self.mark(entry.id, false, record);
            }
        }
        for at in 0..record.retention.len() {
            let r = record.retention[at];
            let id = StreamId { request: r.request_id, label: r.label };
            let Some(stream) = self.requests.get(id).filter(|_| record.commit) else { continue };
            let protected = r.protected_prefix.max(stream.protected);
            let len = self.len_at(record, id, true);
            if droppable(len, protected, r.context_budget, shared.facts.page_size) > 0 {
                self.mark(id, true, record);
            }
        }
    }

    fn mark(&mut self, id: StreamId, rewrites: bool, record: &mut StepRecord) {
        if let Some(stream) = self.requests.get_mut(id) {
            stream.in_flight += 1;
            stream.rewriters += u32::from(rewrites);
            record.marked.push((id, rewrites));
        }
    }

    /// Takes the step's marks off its streams.
    pub(crate) fn unmark(&mut self, record: &StepRecord) {
        for &(id, rewrites) in &record.marked {
            if let Some(stream) = self.requests.get_mut(id) {
                stream.in_flight -= 1;
                stream.rewriters -= u32::from(rewrites);
            }
        }
        for entry in &record.entries {
            if let (Target::Stream, Some(stream)) = (entry.target, self.requests.get_mut(entry.id))
            {
                stream.pending -= record.pending(entry);
            }
        }
    }

    /// Gives back everything that the step has taken, last first, so that the free list is as it was.
    fn undo(&mut self, shared: &Shared, at: usize) {
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
        while let Some((id, fresh)) = record.taken.pop() {
            let table = self.new_table();
            let Some(stream) = self.requests.get_mut(id) else { continue };
            if stream.in_flight > 0 {
                // Another step has laid itself out on these pages: they stay with the stream.
                continue;
            }
            if planned {
                stream.table = table;
            }
            for _ in 0..fresh {
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
    fn close_opened(&mut self, shared: &Shared, record: &StepRecord) {
        for &id in record.opened.iter().rev() {
            let unused = |s: &&_| {
                let s: &crate::stream::Stream = s;
                s.len == 0 && s.pages.is_empty() && s.in_flight == 0
            };
            if self.requests.get(id).filter(unused).is_some() {
                if let Some(stream) = self.requests.close(id) {
                    self.seats.leave(stream.seat);
                }
                self.publish(shared, id);
            }
        }
    }
}

fn deferred(id: StreamId) -> Refusal {
    let reason = FailureReason::ADMISSION_DEFERRED;
    let why = "a step in flight uses a stream that is to be copied, or rewrites one of this step's";
    Refusal::Outcome(AdmitOutcome::refused(reason, id.request, id.label).with_message(why))
}

fn never(id: StreamId, why: String) -> Refusal {
    Refusal::Outcome(AdmitOutcome::runtime_error(id.request, id.label, why))
}
