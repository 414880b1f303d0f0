//! Steps that are launched before the one before them has landed, so that a device does not wait for the
//! host between them.
//!
//! A step that was launched has its tokens on the device only. The next one is planned (it needs no ids, as
//! when planning ahead), its node is told which samples its tokens are, and then the host waits for the first.
//! What it samples is told to resources before they commit the second. A request that ends with the first has
//! a row in the second for nothing: its pages are freed with the second's epoch, and its sample is thrown away.

use std::time::Instant;

use super::Engine;
use super::work::{Ask, Work};
use crate::error::{Error, Result};
use crate::request::{Failure, Tracked};
use crate::runner::{Committed, FailedStep, Live, Started};
use crate::step::SubmoduleStep;

/// A step that was launched and committed, and has not landed.
#[derive(Debug)]
pub(super) struct Flight {
    done: Committed,
    committed: Result<()>,
    work: Work,
    launched: Instant,
}

/// A step that was launched behind another one.
pub(super) struct Behind {
    live: Live,
    work: Work,
    launched: Instant,
}

impl Engine {
    /// Whether a step is launched before the one before it has landed, where its node and all resources can do
    /// that. It is from the start.
    pub fn run_ahead(&mut self, on: bool) {
        self.settle_early();
        self.runs_ahead = on;
    }

    /// Whether a step may be launched, and one more behind it: nothing that is done between two steps waits
    /// for what the first samples, but for ends of requests.
    pub(super) fn may_launch(&self, ask: &Ask, step: &SubmoduleStep) -> bool {
        let is_plain =
            |r: &Tracked| r.session.is_none() && r.hand_over_after.is_none() && r.prompt.is_none();
        let mut requests = ask.turns.iter().filter_map(|turn| self.requests.get(turn.rid));
        self.runs_ahead
            && requests.all(is_plain)
            && self.runner.resources().entries().iter().all(|e| e.takes_outputs_late)
            && self.node.can_launch(&ask.input(step))
    }

    /// Launches a step with none before it, and goes on from there.
    pub(super) fn launch_first(&mut self, live: Live, work: Work) {
        let launched = Instant::now();
        if let Err(e) = self.launch(&live, &work) {
            self.spare_work.push(work);
            return self.give_up(live, &Failure::from(&e));
        }
        let (done, committed) = self.commit(live);
        self.go_on(Flight { done, committed, work, launched });
    }

    /// Launches the next step, if it is known, and lands the one in flight.
    pub(super) fn go_on(&mut self, flight: Flight) {
        let behind = match flight.committed {
            Ok(()) => self.launch_behind(&flight),
            Err(_) => None,
        };
        self.land(flight, behind);
    }

    /// Whether anybody waits for what a step in flight samples.
    pub(super) fn has_readers(&self, flight: &Flight) -> bool {
        flight.work.ask.turns.iter().any(|turn| self.requests.get(turn.rid).is_some())
    }

    /// Lands the step in flight, with none behind it: whoever changes what requests have does that first.
    pub(super) fn settle(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.land(flight, None);
        }
    }

    /// The same between two calls of [`Engine::step`]; the next one tells what came of it.
    pub(super) fn settle_early(&mut self) {
        let told = std::mem::take(&mut self.events);
        self.settle();
        self.early.append(&mut self.events);
        self.events = told;
    }

    fn launch(&self, live: &Live, work: &Work) -> Result<()> {
        let (node, pool) = (&self.node, self.services.pool());
        let input = work.ask.input(live.step());
        let launch = || node.launch(&live.ctx(), &input, pool);
        Ok(self.runner.watch().forward(launch)?)
    }

    /// Starts and launches the step behind `flight`. Where that cannot be done now, it is done once `flight` has
    /// landed.
    fn launch_behind(&mut self, flight: &Flight) -> Option<Behind> {
        self.drop_stage();
        let mut step = self.foresee()?;
        let mut work = self.spare_work.pop().unwrap_or_default();
        std::mem::swap(&mut work.ask.turns, &mut self.foreseen);
        let before = &flight.work.ask.sampled_rids;
        work.ask.fill(&self.requests, Tracked::after_step, before, &mut step);
        self.pad(&mut step);
        work.ask.withhold(&mut step);
        if !self.may_launch(&work.ask, &step) {
            self.spare.push(step);
            self.spare_work.push(work);
            return None;
        }
        let launched = Instant::now();
        let live = match self.runner.start(step) {
            Ok(Started::Live(live)) => live,
            Ok(Started::Refused(_, step)) => {
                self.spare.push(step);
                self.spare_work.push(work);
                return None;
            }
            Err(FailedStep { error, step }) => {
                // The same happens again when it is started next, and is told there.
                tracing::debug!("running ahead failed: {error}");
                self.services.complete_epoch(self.runner.epoch());
                self.spare.push(*step);
                self.spare_work.push(work);
                return None;
            }
        };
        if let Err(e) = self.launch(&live, &work) {
            self.spare_work.push(work);
            self.give_up(live, &Failure::from(&e));
            return None;
        }
        self.scheduler.ran(&work.ask.turns);
        self.stats.run_ahead += 1;
        Some(Behind { live, work, launched })
    }

    /// Waits for what a step samples, and takes it on. The step behind it is then the one in flight.
    pub(super) fn land(&mut self, flight: Flight, behind: Option<Behind>) {
        let Flight { done, committed, mut work, launched } = flight;
        let (node, output) = (&self.node, &mut work.output);
        let rids = &work.ask.sampled_rids;
        let landed = self.runner.watch().forward(|| node.land(done.id(), rids, output));
        if let Err(e) = landed {
            let why = Failure::from(&Error::from(e));
            if let Some(Behind { live, work, .. }) = behind {
                self.spare_work.push(work);
                self.give_up(live, &why);
            }
            let step = self.runner.finish(done);
            let rids = step.request_ids.clone();
            self.spare.push(step);
            self.spare_work.push(work);
            return self.fail_all(&rids, &why);
        }
        let told = self.tell(&done, &work);
        let behind = behind.map(|behind| {
            let Behind { mut live, work: mut next, launched } = behind;
            next.ask.tell(&work.output.sampled, live.step_mut());
            let (done, committed) = self.commit(live);
            Flight { done, committed, work: next, launched }
        });
        let started = self.landed.replace(Instant::now()).map_or(launched, |at| at.max(launched));
        self.take_on(done, committed.and(told), work, started);
        for turn in behind.iter().flat_map(|flight| &flight.work.ask.turns) {
            if let Some(request) = self.requests.get_mut(turn.rid) {
                request.in_step = turn.span;
            }
        }
        self.flight = behind;
    }
}
