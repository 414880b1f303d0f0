//! Admitting a step, and every way in which an admission ends before a commit.

use resource_api::{
    AdmitOutcome, KvStepOptions, ResourceError, ResourceStep, Result, Segments, StepContext, StepId,
};

use crate::reserve::Refusal;
use crate::rows::{Entry, Target};
use crate::state::{Shared, State};
use crate::step::StepRecord;
use crate::stream::StreamId;

/// Most steps between `admit` and `commit`. A host has a handful; more means that it forgets them.
const MAX_IN_FLIGHT: usize = 256;

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
                self.take_back(&record);
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
        let in_place = |entry: Entry| match (entry.target, self.requests.get(entry.id)) {
            (Target::Stream, Some(s)) => s.next_len() - record.pending(entry) == entry.start,
            (Target::Stream, None) => false,
            _ => true,
        };
        !record.stale && record.is_for(segments, options) && record.rows.iter().all(in_place)
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
        let is_empty = |r: &StepRecord| !r.uses_any() && r.copies.iter().all(|c| !c.alive);
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
}
