//! When a step does not fit: who gives way, who waits, who fails, and how that is told.

use std::fmt;
use std::time::{Duration, Instant};

use resource_api::{FailureReason, HostServices, LabelId, RequestId, Resource};

use super::Engine;
use super::offload::{Relief, start_anew, told};
use crate::error::{Error, ErrorKind, Result};
use crate::request::Failure;
use crate::runner::FullAdmitOutcome;
use crate::scheduler::{Queue, Victims};
use crate::suggest;

/// How long a step may wait for a resource while nothing else can run.
const MAX_STALL: Duration = Duration::from_secs(60);
/// The same for memory that nobody has whom the engine knows: a transfer whose request has gone gives it back.
const MAX_ALONE: Duration = Duration::from_secs(5);

/// A resource refused a step: what was missing, and what was done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Key of the resource.
    pub resource: String,
    /// Why.
    pub reason: FailureReason,
    /// The request it is about.
    pub request: RequestId,
    /// Its stream.
    pub label: LabelId,
    /// How much was needed, in the resource's own unit (pages, slots).
    pub need: u64,
    /// How much was there.
    pub have: u64,
    /// The resource's own line.
    pub message: String,
    /// What the engine did, and so what the request waits for.
    pub remedy: Remedy,
}

/// What the engine does about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// This request is not let in yet: it waits until a running one has ended.
    Waits(RequestId),
    /// This request gave its room back. It is computed again once a running request has ended.
    GaveWay(RequestId),
    /// This request left the device with its state. It comes back once there is room.
    Offloaded(RequestId),
    /// The request is left out until the resource has it ready; the others go on.
    Held,
    /// The step is tried again as it is: nothing else could run.
    Retried,
    /// The request, or when none is to blame the whole step, fails.
    Failed,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "resource `{}`: {}", self.resource, self.message)?;
        match self.remedy {
            Remedy::Waits(rid) => write!(f, "; request {rid} waits until a running one has ended"),
            Remedy::GaveWay(rid) => {
                write!(f, "; request {rid} gives way, and goes on when a running one has ended")
            }
            Remedy::Offloaded(rid) => {
                write!(f, "; request {rid} leaves the device, and comes back when there is room")
            }
            Remedy::Held => write!(f, "; request {} waits for it", self.request),
            Remedy::Retried => f.write_str("; the step is tried again"),
            Remedy::Failed => f.write_str("; that ends it"),
        }
    }
}

impl Engine {
    /// What resources refused in the last call of [`step`](Self::step), in order.
    pub fn refusals(&self) -> &[Refusal] {
        &self.refusals
    }

    /// Has a running request give way, as a lack of room would. `None` when fewer than two run.
    pub fn preempt_one(&mut self) -> Option<RequestId> {
        self.settle_early();
        let rid = self.give_way()?;
        self.scheduler.let_join();
        self.preempt(rid);
        Some(rid)
    }

    /// Sets who gives way when a step does not fit; [`Victims::Youngest`] from the start.
    ///
    /// # Errors
    /// For a resource that does not exist, with the nearest name.
    pub fn set_victims(&mut self, victims: Victims) -> Result<()> {
        if let Some(key) = victims.resource().filter(|key| self.resources().find(key).is_none()) {
            let keys = self.resources().entries().iter().map(|e| e.key.as_str());
            let hint = suggest::did_you_mean(key, keys);
            return Err(Error::usage(format!(
                "victims = \"{victims}\" names resource {key:?}, which does not exist{hint}"
            )));
        }
        self.scheduler.victims = victims;
        Ok(())
    }

    /// Sets whether requests may start before one that waits for room; [`Queue::Strict`] from the start.
    pub fn set_queue(&mut self, queue: Queue) {
        self.scheduler.queue = queue;
    }

    /// Has those wait that the step would let in, or else one that runs give way.
    fn make_room(&mut self, culprit: RequestId) -> Option<Remedy> {
        let away = self.scheduler.turn_away(culprit);
        for &rid in &away {
            self.preempt(rid);
        }
        match away.first() {
            Some(&rid) => Some(Remedy::Waits(rid)),
            None => self.give_way().map(|rid| self.preempt(rid)),
        }
    }

    /// Takes out of the running ones the request that gives way.
    fn give_way(&mut self) -> Option<RequestId> {
        let asked =
            self.scheduler.victims.resource().and_then(|key| self.runner.resources().find(key));
        let wish = |rid| {
            let answer =
                asked.map(|(_, entry)| (entry, entry.resource().get_offload_priority(rid)));
            answer
                .and_then(|(entry, answer)| told(entry, "get_offload_priority", answer))
                .unwrap_or(0.0)
        };
        self.scheduler.give_way(wish)
    }

    /// Makes room after a refusal; `false` when the step should be tried again later.
    pub(super) fn relieve(&mut self, why: &FullAdmitOutcome) -> bool {
        let outcome = &why.outcome;
        let (need, have) = outcome.amounts();
        let mut refusal = Refusal {
            resource: why.failed_resource.clone().unwrap_or_else(|| "?".into()),
            reason: outcome.reason(),
            request: outcome.request_id(),
            label: outcome.label(),
            need,
            have,
            message: outcome.message(),
            remedy: Remedy::Failed,
        };
        let message = format!("resource `{}`: {}", refusal.resource, refusal.message);
        let (remedy, again) = match refusal.reason {
            FailureReason::RUNTIME_ERROR => {
                self.fail_culprit(refusal.request, &Failure::new(ErrorKind::Internal, message))
            }
            FailureReason::ALLOCATION_FAILED => match self.make_room(refusal.request) {
                Some(remedy) => (remedy, true),
                None => match self.recall() {
                    Some(rid) => (Remedy::GaveWay(rid), true),
                    // What would never fit is refused when it comes: somebody else's transfer, or a step on a device,
                    // has to end first.
                    None => {
                        let message = format!("{message}, though nothing else runs");
                        self.hold(refusal.request, &message, MAX_ALONE)
                    }
                },
            },
            _ => self.hold(refusal.request, &message, MAX_STALL),
        };
        refusal.remedy = remedy;
        tracing::debug!("{refusal}");
        self.services.count(&refusal.resource, "refusals", 1);
        self.refusals.push(refusal);
        again
    }

    fn fail_culprit(&mut self, culprit: RequestId, why: &Failure) -> (Remedy, bool) {
        match self.work.ask.turns.iter().any(|t| t.rid == culprit) {
            true => self.fail(culprit, why),
            false => self.fail_turns(why),
        }
        (Remedy::Failed, true)
    }

    fn fail_turns(&mut self, why: &Failure) {
        let rids: Vec<_> = self.work.ask.turns.iter().map(|t| t.rid).collect();
        self.fail_all(&rids, why);
    }

    /// Leaves a request that has to wait out of this step, and says whether the rest may be tried. When
    /// nobody can run, waits a little, and at last fails what has waited too long.
    fn hold(&mut self, rid: RequestId, message: &str, most: Duration) -> (Remedy, bool) {
        if self.work.ask.turns.len() > 1 && self.work.ask.turns.iter().any(|t| t.rid == rid) {
            self.held.push(rid);
            return (Remedy::Held, true);
        }
        let since = *self.stalled.get_or_insert_with(Instant::now);
        if since.elapsed() < most {
            std::thread::sleep(Duration::from_millis(1));
            return (Remedy::Retried, false);
        }
        self.stalled = None;
        let message = format!("{message}, for {} seconds", most.as_secs());
        self.fail_turns(&Failure::new(ErrorKind::Exhausted, message));
        (Remedy::Failed, true)
    }

    /// Takes a request's state off the device, by what [`Relief`] allows: with its state, or to be
    /// computed again later.
    pub(super) fn preempt(&mut self, rid: RequestId) -> Remedy {
        self.drop_stage();
        if self.relief.contains(&Relief::Offload) && self.offload(rid) {
            return Remedy::Offloaded(rid);
        }
        let Some(request) = self.requests.get_mut(rid) else { return Remedy::GaveWay(rid) };
        if request.computed > 0 && !request.offloaded {
            start_anew(self.runner.resources(), request);
            self.stats.preemptions += 1;
        }
        Remedy::GaveWay(rid)
    }

    /// Fails the requests whose time is up.
    pub(super) fn enforce_deadlines(&mut self) {
        let Some(next) = self.next_deadline else { return };
        let now = Instant::now();
        if now < next {
            return;
        }
        let late: Vec<_> = self
            .requests
            .iter()
            .filter(|r| r.deadline.is_some_and(|d| d <= now))
            .map(|r| (r.rid, r.generated()))
            .collect();
        for (rid, generated) in late {
            let message = format!("the request's time is up, after {generated} tokens");
            self.fail(rid, &Failure::new(ErrorKind::Timeout, message));
        }
        self.next_deadline = self.requests.iter().filter_map(|r| r.deadline).min();
    }
}
