//! Steps from `admit` to their end. A refused step restores a copy of everything.

use resource_api::{
    AdmitOutcome, FailureReason, Fork, KvStepOptions, RequestId, ResourceError, ResourceStep,
    Result, Retention, StepContext,
};

use super::fault::Fault;
use super::state::{Copy, Entry, InFlight, State, Stream, StreamId, Target};

impl State {
    /// Length of a stream once every step in flight has been committed.
    pub(super) fn next_len(&self, id: StreamId) -> u32 {
        let pending = self.steps.values().filter(|s| s.commit).flat_map(|s| &s.entries);
        let pending = pending.filter(|e| e.id == id && e.target == Target::Stream);
        self.streams.get(&id).map_or(0, |s| s.len) + pending.map(|e| e.span).sum::<u32>()
    }

    fn is_away(&self, rid: RequestId) -> bool {
        self.known(rid) && self.requests[&rid.slot].away.is_some()
    }

    pub(super) fn admit(
        &mut self,
        share: &ResourceStep<'_>,
        ctx: &StepContext<'_>,
    ) -> Result<AdmitOutcome> {
        let step = ctx.step().0;
        self.drop_stages(|id| id != step);
        if let Some(here) = self.steps.get_mut(&step) {
            let promoted = here.staged && !ctx.is_preplan();
            here.staged &= ctx.is_preplan();
            if promoted && self.fault == Some(Fault::DoublePromote) {
                here.entries.iter_mut().for_each(|e| e.start += e.span);
                here.planned = false;
            }
            return Ok(AdmitOutcome::OK);
        }
        let before = self.clone();
        let reserved = self.reserve(share, ctx);
        if !reserved.as_ref().is_ok_and(AdmitOutcome::is_ready) && !self.has(Fault::RefusedKeeps) {
            *self = before;
        }
        reserved
    }

    fn reserve(&mut self, share: &ResourceStep<'_>, ctx: &StepContext<'_>) -> Result<AdmitOutcome> {
        let options = share.options::<KvStepOptions>()?;
        let mut step = InFlight {
            staged: ctx.is_preplan(),
            commit: options.is_none_or(|o| o.commit) || self.has(Fault::DiscardAdvances),
            ..InFlight::default()
        };
        for fork in options.iter().flat_map(|o| o.pre_forks.iter()) {
            let outcome = self.reserve_copy(&mut step, *fork, false)?;
            if !outcome.is_ready() {
                return Ok(outcome);
            }
        }
        for s in share.segments().iter() {
            let id = (self.owner_if_stale(s.request_id), s.label);
            let outcome = self.reserve_row(&mut step, id, s.span);
            if !outcome.is_ready() {
                return Ok(outcome);
            }
        }
        for fork in options.iter().flat_map(|o| o.post_forks.iter()) {
            let outcome = self.reserve_copy(&mut step, *fork, true)?;
            if !outcome.is_ready() {
                return Ok(outcome);
            }
        }
        if let Some(options) = options {
            step.combined.extend_from_slice(&options.combined_labels);
            step.retention.extend_from_slice(&options.retention);
            if let Some(keep) = step.retention.iter().find(|keep| self.is_away(keep.request_id)) {
                let (rid, label) = (keep.request_id, keep.label);
                let reason = FailureReason::REQUEST_OFFLOADING;
                return Ok(AdmitOutcome::refused(reason, rid, label));
            }
            self.check_retention(&step)?;
        }
        self.steps.insert(ctx.step().0, step);
        Ok(AdmitOutcome::OK)
    }

    fn check_retention(&self, step: &InFlight) -> Result<()> {
        for keep in step.retention.iter().filter(|_| step.commit) {
            let id = (keep.request_id, keep.label);
            let own = step.entries.iter().find(|e| e.id == id);
            let copied = step.copies.iter().find(|c| !c.after && c.to == id).map(|c| c.len);
            let stream = self.streams.contains_key(&id).then(|| self.next_len(id));
            let len = own.map(|e| e.start + e.span).or(copied).or(stream);
            if len.is_some_and(|len| keep.protected_prefix > len) {
                return Err(ResourceError::invalid("more is protected than there is"));
            }
        }
        Ok(())
    }

    /// Whether a step in flight will let pages of the stream go.
    fn is_trimmed(&self, id: StreamId) -> bool {
        let all = self.steps.values().flat_map(|s| &s.retention);
        all.map(|keep| (keep.request_id, keep.label)).any(|of| of == id)
    }

    fn trim(&mut self, keep: &Retention) {
        let (size, id) = (self.size, (keep.request_id, keep.label));
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.protected = stream.protected.max(keep.protected_prefix);
        let protected = if self.fault == Some(Fault::PrefixTrimmed) { 0 } else { stream.protected };
        let first = protected.div_ceil(size);
        let spare = (stream.len - protected.min(stream.len)).saturating_sub(keep.context_budget);
        let last = stream.len.div_ceil(size).saturating_sub(1);
        let whole = match self.fault {
            Some(Fault::WindowCut) => spare.div_ceil(size),
            _ => spare / size,
        };
        let count = whole.min(last.saturating_sub(first));
        let gone: Vec<u32> = stream.pages.drain(first as usize..(first + count) as usize).collect();
        stream.len -= count * size;
        stream.ids.clear();
        self.release(&gone);
    }

    fn open(&mut self, step: &mut InFlight, id: StreamId) {
        self.streams.entry(id).or_insert_with(|| {
            step.opened.push(id);
            Stream::default()
        });
    }

    fn owner_if_stale(&self, rid: RequestId) -> RequestId {
        if self.has(Fault::StaleGeneration) { self.owner(rid) } else { rid }
    }

    fn reserve_row(&mut self, step: &mut InFlight, id: StreamId, span: u32) -> AdmitOutcome {
        let (rid, label) = id;
        let mut entry = Entry { id, target: Target::Sink, start: 0, span, appended: 0 };
        if rid.is_padding() {
            step.entries.push(entry);
            return AdmitOutcome::OK;
        }
        if self.is_away(rid) {
            return AdmitOutcome::refused(FailureReason::REQUEST_OFFLOADING, rid, label);
        }
        if self.is_trimmed(id) {
            return AdmitOutcome::refused(FailureReason::ADMISSION_DEFERRED, rid, label);
        }
        let copy = step.copies.iter().position(|c| !c.after && c.to == id);
        if !self.streams.contains_key(&id) && span == 0 && copy.is_none() {
            entry.target = Target::Nothing;
            step.entries.push(entry);
            return AdmitOutcome::OK;
        }
        if !self.known(rid) && !self.has(Fault::StrangersAdmitted) {
            return AdmitOutcome::runtime_error(rid, label, "the request is unknown");
        }
        entry.start = match copy {
            Some(at) => step.copies[at].len,
            None => self.next_len(id) + std::mem::take(&mut self.leftover),
        };
        entry.target = copy.map_or(Target::Stream, Target::Fork);
        let total = entry.start + span;
        let need = self.pages_for(total);
        if total > self.max_len || need > self.usable as usize {
            let message = format!("{total} tokens can never fit");
            return AdmitOutcome::runtime_error(rid, label, message);
        }
        self.open(step, id);
        let held = match copy {
            Some(at) => step.copies[at].pages.len(),
            None => self.streams[&id].pages.len(),
        };
        let need = need.saturating_sub(held);
        let Some(pages) = self.take(need) else {
            let free = self.free_pages();
            return AdmitOutcome::allocation_failed(rid, label, need as u64, free);
        };
        step.taken.extend(&pages);
        match copy {
            Some(at) => step.copies[at].pages.extend(pages),
            None => {
                entry.appended = pages.len();
                self.streams.entry(id).or_default().pages.extend(pages);
            }
        }
        step.entries.push(entry);
        AdmitOutcome::OK
    }

    fn reserve_copy(
        &mut self,
        step: &mut InFlight,
        fork: Fork,
        after: bool,
    ) -> Result<AdmitOutcome> {
        let Fork { request_id: rid, from, to } = fork;
        if from == to {
            return Err(ResourceError::invalid("a stream cannot be copied to itself"));
        }
        if !self.known(rid) || self.is_away(rid) {
            return Ok(AdmitOutcome::refused(FailureReason::RUNTIME_ERROR, rid, to));
        }
        let (from, to) = ((rid, from), (rid, to));
        let own = step.entries.iter().find(|e| e.id == from);
        let copied = step.copies.iter().find(|c| !c.after && c.to == from);
        let len = match (after, own, copied) {
            (true, Some(e), _) if step.commit && !self.has(Fault::ForkTooEarly) => e.start + e.span,
            (_, Some(e), _) => e.start,
            (_, None, Some(copy)) => copy.len,
            (_, None, None) => self.streams.get(&from).map_or(0, |s| s.len),
        };
        let need = self.pages_for(len);
        let Some(pages) = self.take(need) else {
            let free = self.free_pages();
            return Ok(AdmitOutcome::allocation_failed(rid, to.1, need as u64, free));
        };
        self.open(step, to);
        step.taken.extend(&pages);
        step.copies.push(Copy { from, to, after, len, pages, done: false, alive: true });
        Ok(AdmitOutcome::OK)
    }

    /// Gives back what a step has taken.
    pub(super) fn undo(&mut self, step: u64) {
        let Some(step) = self.steps.remove(&step) else { return };
        // What a removed request had has gone back already.
        let mut mine: Vec<u32> = step.copies.iter().flat_map(|c| c.pages.clone()).collect();
        for entry in step.entries.iter().rev().filter(|e| e.target == Target::Stream) {
            if let Some(stream) = self.streams.get_mut(&entry.id) {
                mine.extend(stream.pages.split_off(stream.pages.len() - entry.appended));
            }
            self.leftover = u32::from(self.has(Fault::LeftoverPending));
        }
        let mut pages: Vec<u32> = step.taken.into_iter().filter(|p| mine.contains(p)).collect();
        if self.has(Fault::ReversedRollback) {
            pages.reverse();
        }
        self.release(&pages);
        let empty = |s: &Stream| s.len == 0 && s.pages.is_empty();
        for id in step.opened {
            if self.streams.get(&id).is_some_and(empty) {
                self.streams.remove(&id);
            }
        }
    }

    /// Drops staged steps whose id is meant.
    pub(super) fn drop_stages(&mut self, meant: impl Fn(u64) -> bool) {
        if self.has(Fault::StageKept) {
            return;
        }
        let staged = self.steps.iter().filter(|(id, s)| s.staged && meant(**id));
        let staged: Vec<u64> = staged.map(|(id, _)| *id).collect();
        staged.into_iter().rev().for_each(|id| self.undo(id));
    }

    /// Records a step. Gives copies to be made now that its tokens are written, as (from, to).
    pub(super) fn commit(
        &mut self,
        id: u64,
        tokens: &[u32],
        keyed: bool,
    ) -> Result<Vec<(u32, u32)>> {
        let ready = self.steps.get(&id).is_some_and(|s| !s.staged);
        if !ready {
            let message = format!("step {id} is not admitted");
            return Err(ResourceError::wrong_state(message));
        }
        let mut step = match self.has(Fault::DoubleCommit) {
            true => self.steps[&id].clone(),
            false => self.steps.remove(&id).unwrap_or_default(),
        };
        let mut first = 0;
        for entry in &step.entries {
            let own = tokens.get(first..first + entry.span as usize).unwrap_or_default();
            first += entry.span as usize;
            match entry.target {
                Target::Stream if step.commit => {
                    let Some(stream) = self.streams.get_mut(&entry.id) else { continue };
                    if stream.ids.len() == stream.len as usize {
                        stream.ids.extend(own);
                    }
                    stream.len += entry.span;
                }
                Target::Fork(at) if step.commit => step.copies[at].len += entry.span,
                _ => {}
            }
        }
        let mut moves = Vec::new();
        for after in [false, true] {
            if after && (step.commit || self.has(Fault::TrimmedUnkept)) {
                step.retention.iter().for_each(|keep| self.trim(keep));
            }
            for at in 0..step.copies.len() {
                let mut copy = step.copies[at].clone();
                if copy.after != after || !copy.alive {
                    continue;
                }
                if after && !step.retention.is_empty() {
                    // Its source may be shorter than when the pages were counted.
                    copy.len = self.streams.get(&copy.from).map_or(0, |s| s.len);
                    let rest = copy.pages.split_off(self.pages_for(copy.len).min(copy.pages.len()));
                    self.release(&rest);
                }
                if after {
                    let from = self.streams.get(&copy.from).map_or(&[][..], |s| &s.pages);
                    moves.extend(from.iter().copied().zip(copy.pages.iter().copied()));
                }
                self.replace(copy);
            }
        }
        if keyed {
            let rows = step.entries.iter().filter(|e| e.target == Target::Stream && e.span > 0);
            rows.for_each(|e| self.keep(e.id));
        }
        Ok(moves)
    }

    fn replace(&mut self, copy: Copy) {
        let mut pages = copy.pages.clone();
        if self.has(Fault::ForkAliases)
            && let (Some(last), Some(theirs)) =
                (pages.last_mut(), self.streams.get(&copy.from).and_then(|s| s.pages.last()))
        {
            self.owners[*theirs as usize] += 1;
            let own = std::mem::replace(last, *theirs);
            self.release(&[own]);
        }
        let new = Stream { pages, len: copy.len, ..Stream::default() };
        let old = self.streams.insert(copy.to, new).unwrap_or_default();
        self.release(&old.pages);
    }
}
