//! What a step needs, counted and then taken.

use resource_api::{
    AdmitOutcome, FailureReason, Fork, KvStepOptions, LabelId, ResourceError, Result, Segments,
};

use crate::board::Board;
use crate::plan::check_combined;
use crate::pool::SINK;
use crate::rows::Target;
use crate::state::{Shared, State};
use crate::step::{Copy, StepRecord, Taken, is_real};
use crate::stream::{NO_SEAT, StreamId, droppable};

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

/// A pass over the step, or why it ends.
pub(crate) type Pass = Result<(), Refusal>;

/// Why a step is not admitted.
pub(crate) enum Refusal {
    Outcome(AdmitOutcome),
    Error(ResourceError),
}

impl From<ResourceError> for Refusal {
    fn from(error: ResourceError) -> Self {
        Refusal::Error(error)
    }
}

impl State {
    /// Fills the record, then takes its pages. Until the pages are known to suffice, only empty
    /// streams are opened and plain rows are marked, which [`State::take_back`] undoes.
    pub(crate) fn reserve(
        &mut self,
        shared: &Shared,
        segments: Segments<'_>,
        options: Option<&KvStepOptions>,
        record: &mut StepRecord,
    ) -> Pass {
        self.admissions += 1;
        let mut need = Need::default();
        let (pre, post): (&[Fork], &[Fork]) =
            options.map_or((&[], &[]), |o| (&o.pre_forks, &o.post_forks));
        for fork in pre.iter().filter(|f| is_real(f)) {
            self.add_copy(shared, fork, false, record, &mut need)?;
        }
        record.rows.begin(segments);
        // Options may copy streams or rewrite them: then no row is plain.
        if options.is_none() {
            self.add_plain_rows(shared, record, &mut need);
        }
        for row in record.rows.plain..segments.len() {
            self.add_row(shared, row, record, &mut need)?;
        }
        for fork in post.iter().filter(|f| is_real(f)) {
            self.add_copy(shared, fork, true, record, &mut need)?;
        }
        if let Some(options) = options {
            self.add_retention(options, record)?;
            record.combined.extend_from_slice(&options.combined_labels);
            check_combined(&record.rows, &record.combined)?;
        }
        if let Some(id) = need.short_at {
            while !self.evict_for(shared, need.pages.saturating_sub(self.pool.ready().into())) {
                if self.waits_for_room() || !self.drop_oldest_session(shared) {
                    return Err(self.refuse(&need, id));
                }
            }
        }
        self.take(shared, record);
        Ok(())
    }

    /// Makes so many cached pages ready.
    fn evict_for(&mut self, shared: &Shared, pages: u64) -> bool {
        let cached = self.pool.cached();
        match u32::try_from(pages) {
            Ok(pages) if pages <= cached => {
                let evicted = self.make_ready(shared, pages);
                self.untold_evictions += if evicted { pages.into() } else { 0 };
                evicted
            }
            _ => false,
        }
    }

    /// The answer to a step whose pages are not there.
    fn refuse(&self, need: &Need, id: StreamId) -> Refusal {
        if need.pages <= u64::from(self.pool.unowned() + self.in_flight.leaving()) {
            let reason = FailureReason::ADMISSION_DEFERRED;
            let outcome = AdmitOutcome::refused(reason, id.request, id.label);
            let why = "the step's pages are free once the steps now running have completed";
            return Refusal::Outcome(outcome.with_message(why));
        }
        let ready = self.pool.ready() + self.pool.cached();
        let (request, label) = (id.request, id.label);
        let outcome = AdmitOutcome::allocation_failed(request, label, need.pages, ready.into());
        let message = format!("needs {} more pages, {ready} are free", need.pages);
        Refusal::Outcome(outcome.with_message(message))
    }

    /// Adds rows that extend the `main` stream of a request, up to the first that does not: nearly
    /// always all of them. Each stream is looked up once, and what a plan needs of it is noted.
    fn add_plain_rows(&mut self, shared: &Shared, record: &mut StepRecord, need: &mut Need) {
        let (seen, size, ready) = (self.admissions, shared.page_size, self.pool.ready());
        let (most, usable) = (shared.facts.max_seq_len, self.pool.usable());
        let rows = &mut record.rows;
        let count = rows.len();
        let (request, label, span) =
            (&rows.request[..count], &rows.label[..count], &rows.span[..count]);
        let (start, seat) = (&mut rows.start[..count], &mut rows.seat[..count]);
        let (list, page) = (&mut rows.list[..count], &mut rows.page[..count]);
        let mut unseated = false;
        let mut plain = count;
        for row in 0..count {
            let id = StreamId { request: request[row], label: label[row] };
            let stream = match self.requests.main_mut(id.request) {
                Some(stream) if id.label == LabelId::MAIN && stream.rewriters == 0 => stream,
                _ => {
                    plain = row;
                    break;
                }
            };
            let first = stream.next_len();
            let total = first.saturating_add(span[row]);
            let short = u64::from(total) > size.tokens(stream.held());
            if total > most || stream.seen == seen || (short && size.pages(total) > usable) {
                plain = row;
                break;
            }
            if short {
                let pages = size.pages(total) - stream.held();
                need.add(pages, ready, id);
                record.taken.push(Taken { row, id, pages });
            }
            stream.seen = seen;
            stream.pending += span[row];
            stream.in_flight += 1;
            (start[row], seat[row], list[row]) = (first, stream.seat, stream.table);
            page[row] = stream.pages.get(size.page(first) as usize).copied().unwrap_or(SINK);
            unseated |= stream.seat == NO_SEAT;
        }
        (rows.plain, rows.unseated) = (plain, unseated);
    }

    /// Takes the marks of a refused step's plain rows back.
    pub(crate) fn take_back(&mut self, record: &StepRecord) {
        let rows = record.rows.request.iter().zip(&record.rows.span);
        for (&request, &span) in rows.take(record.rows.plain) {
            if let Some(stream) = self.requests.main_mut(request) {
                stream.pending -= span;
                stream.in_flight -= 1;
            }
        }
    }

    /// Adds a row of any kind.
    fn add_row(
        &mut self,
        shared: &Shared,
        row: usize,
        record: &mut StepRecord,
        need: &mut Need,
    ) -> Pass {
        let (request, label, span) =
            (record.rows.request[row], record.rows.label[row], record.rows.span[row]);
        let id = StreamId { request, label };
        let max = shared.facts.max_seq_len;
        if request.is_padding() {
            if span > max {
                let what = format!("a padding row of {span} tokens; `max_seq_len` is {max}");
                return Err(ResourceError::invalid(what).into());
            }
            record.rows.set(row, Target::Sink, 0);
            return Ok(());
        }
        if self.journeys.is_away(request) {
            return Err(offloading(id));
        }
        if self.requests.get(id).is_none() {
            if span == 0 {
                record.rows.set(row, Target::Nothing, 0);
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
        record.rows.note_seat(stream);
        let copy = match record.copies.is_empty() {
            true => None,
            false => record.copy_into(id),
        };
        let (target, start) = match copy {
            Some(at) => (Target::Fork(at as u32), record.copies[at].len),
            None => (Target::Stream, stream.next_len()),
        };
        let held = stream.held();
        let total = start.saturating_add(span);
        if span > 0 && total > max {
            let what = format!("{start} and {span} more tokens are over `max_seq_len` = {max}");
            return Err(never(id, what));
        }
        record.rows.set(row, target, start);
        if copy.is_none() && u64::from(total) <= u64::from(held) * u64::from(self.page_size()) {
            return Ok(());
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
                let fresh = pages - held;
                need.add(fresh, ready, id);
                record.taken.push(Taken { row, id, pages: fresh });
            }
        }
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
        if self.journeys.is_away(fork.request_id) {
            return Err(offloading(source));
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
        let mut copies = record.copies.iter().rev();
        if let Some(copy) = copies.find(|c| c.after && c.target() == id) {
            return copy.len;
        }
        self.len_of(record, id, after)
    }

    /// The same, without the copies that are made after the step.
    fn len_of(&self, record: &StepRecord, id: StreamId, after: bool) -> u32 {
        if let Some(entry) = record.entry_of(id).filter(|_| after) {
            return entry.start + if record.commit { entry.span } else { 0 };
        }
        match record.copy_into(id) {
            Some(at) => record.copies[at].len,
            // What steps in flight add counts: a window may be kept by a step planned behind them.
            None => self.requests.get(id).map_or(0, |s| s.next_len()),
        }
    }

    fn add_retention(&mut self, options: &KvStepOptions, record: &mut StepRecord) -> Pass {
        for retention in options.retention.iter() {
            let id = StreamId { request: retention.request_id, label: retention.label };
            if self.journeys.is_away(id.request) {
                return Err(offloading(id));
            }
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
            // Windows are kept before copies are made.
            let len = self.len_of(record, id, true);
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
        let mut board = shared.board.lens();
        for &Taken { row, id, pages } in &record.taken {
            let stream = self.requests.get_mut(id).expect("found by the first pass");
            let taken = self.pool.take(pages, &mut stream.pages);
            assert!(taken, "the first pass counted the pages");
            let at = shared.page_size.page(record.rows.start[row]) as usize;
            record.rows.page[row] = stream.pages.get(at).copied().unwrap_or(SINK);
            match id.label {
                LabelId::MAIN => board.set_held(id, stream.held()),
                // It may have been opened just now.
                _ => shared.board.set(id, stream.len, stream.held()),
            }
        }
        for row in record.rows.plain..record.rows.len() {
            let entry = record.rows.get(row);
            if entry.target != Target::Stream {
                continue;
            }
            if let Some(stream) = self.requests.get_mut(entry.id) {
                stream.pending += record.pending(entry);
                stream.in_flight += 1;
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
            stream.rewriters += u16::from(rewrites);
            record.marked.push((id, rewrites));
        }
    }
}

fn deferred(id: StreamId) -> Refusal {
    let reason = FailureReason::ADMISSION_DEFERRED;
    let why = "a step in flight uses a stream that is to be copied, or rewrites one of this step's";
    Refusal::Outcome(AdmitOutcome::refused(reason, id.request, id.label).with_message(why))
}

fn offloading(id: StreamId) -> Refusal {
    let reason = FailureReason::REQUEST_OFFLOADING;
    let why = "the request is off the device; reload it first";
    Refusal::Outcome(AdmitOutcome::refused(reason, id.request, id.label).with_message(why))
}

fn never(id: StreamId, why: String) -> Refusal {
    Refusal::Outcome(AdmitOutcome::runtime_error(id.request, id.label, why))
}
