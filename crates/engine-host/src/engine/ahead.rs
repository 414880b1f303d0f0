//! Planning the next step while the present one runs.
//!
//! What the next step will be is known, unless a request ends early, joins, or fails: those that run
//! go on by what they have pending, and planning needs no token ids. The staged step is used when it
//! is what the scheduler then asks for, and undone otherwise.

use device::Companion;
use resource_api::RequestId;

use super::Engine;
use super::declare::declare;
use crate::error::{Error, ErrorKind, Result};
use crate::request::Tracked;
use crate::runner::{FailedStep, Runner, StageOutcome, Started};
use crate::step::SubmoduleStep;

type Stage = std::result::Result<StageOutcome, FailedStep>;

/// Runs `work`, and beside it stages `step`.
pub(super) fn beside<R>(
    planner: &mut Option<Companion>,
    runner: &mut Runner,
    step: Option<SubmoduleStep>,
    work: impl FnOnce() -> R,
) -> (R, Option<Stage>) {
    let (Some(planner), Some(step)) = (planner, step) else { return (work(), None) };
    let (mut step, mut staged) = (Some(step), None);
    let result = planner.beside(|| staged = step.take().map(|step| runner.stage(step)), work);
    (result, staged)
}

impl Engine {
    /// Whether a step is planned while the one before it runs. It is from the start, where a resource
    /// supports it.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn plan_ahead(&mut self, on: bool) -> Result<()> {
        self.drop_stage();
        let wanted = on && self.resources().entries().iter().any(|e| e.supports_preplan);
        if wanted != self.planner.is_some() {
            let planner = wanted.then(|| Companion::new("plan ahead")).transpose();
            self.planner = planner.map_err(|e| {
                Error::new(ErrorKind::Internal, format!("no thread to plan ahead with: {e}"))
            })?;
        }
        Ok(())
    }

    /// The step after the one that is about to run, as far as it can be known, for planning ahead.
    pub(super) fn foreseen_step(&mut self) -> Option<SubmoduleStep> {
        self.planner.as_ref()?;
        let mut step = self.foresee()?;
        self.pad(&mut step);
        Some(step)
    }

    /// The same, declared and not padded; its requests are in `foreseen`.
    pub(super) fn foresee(&mut self) -> Option<SubmoduleStep> {
        let max_len = self.limits.max_model_len as usize;
        let requests = &self.requests;
        let share =
            |rid| requests.get(rid).map_or((0, 1), |r| (r.pending_after(max_len), r.width()));
        let is_known = self.held.is_empty() && self.scheduler.foresee(&mut self.foreseen, share);
        if !is_known {
            return None;
        }
        let mut step = self.spare.pop()?;
        step.clear();
        step.graph_walk = self.decode;
        declare(&self.requests, &self.foreseen, Tracked::after_step, &mut step);
        let in_prompt = |r: &Tracked| r.after_step() < r.prompt_len;
        if self.foreseen.iter().any(|t| self.requests.get(t.rid).is_some_and(in_prompt)) {
            step.graph_walk = self.prefill;
        }
        Some(step)
    }

    /// Keeps what came of staging.
    pub(super) fn keep_stage(&mut self, stage: Option<Stage>) {
        match stage {
            Some(Ok(StageOutcome::Staged(staged))) => self.staged = Some(staged),
            Some(Ok(StageOutcome::Refused(_, step))) => self.spare.push(step),
            Some(Err(FailedStep { error, step })) => {
                // The same happens again when the step is started, and is told there.
                tracing::debug!("planning ahead failed: {error}");
                self.spare.push(*step);
            }
            None => {}
        }
    }

    /// Starts `step`: promotes what is staged if it is the same, and undoes it otherwise.
    pub(super) fn start(
        &mut self,
        step: SubmoduleStep,
    ) -> std::result::Result<Started, FailedStep> {
        let is_same = self.staged.as_ref().is_some_and(|staged| {
            let ahead = staged.step();
            ahead.graph_walk == step.graph_walk
                && ahead.request_ids == step.request_ids
                && ahead.segments == step.segments
        });
        let Some(mut staged) = self.staged.take_if(|_| is_same) else {
            self.drop_stage();
            return self.runner.start(step);
        };
        staged.set_token_ids(&step.token_ids);
        self.spare.push(step);
        self.stats.planned_ahead += 1;
        self.runner.promote(staged)
    }

    /// Undoes what is staged.
    pub(super) fn drop_stage(&mut self) {
        if let Some(staged) = self.staged.take() {
            let step = self.runner.unstage(staged);
            self.spare.push(step);
            self.stats.unplanned += 1;
        }
    }

    /// Undoes what is staged if `rid` takes part in it.
    pub(super) fn drop_stage_of(&mut self, rid: RequestId) {
        if self.staged.as_ref().is_some_and(|s| s.step().request_ids.contains(&rid)) {
            self.drop_stage();
        }
    }
}
