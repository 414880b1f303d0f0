//! The live requests: their parameters, what they have seen, and how far they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use resource_api::{RequestId, ResourceError, Result, StepId};

use crate::adjust::Adjustments;
use crate::params::SamplingParams;
use crate::seen::Seen;

/// Request slots that can be kept.
const MAX_REQUESTS: usize = 1 << 20;
/// No step.
const NONE: u64 = u64::MAX;

/// A live request. What changes in a step is atomic, so that steps only ever read the table.
#[derive(Debug)]
pub struct Request {
    generation: u32,
    /// Number of tokens sampled.
    position: AtomicU32,
    /// Told apart from everything that was in this slot before.
    pub version: u64,
    /// How it wants to be sampled.
    pub params: SamplingParams,
    /// The step whose sample is thrown away.
    discarded: AtomicU64,
    /// The last step that began to sample and whose output has not been told.
    begun: AtomicU64,
    /// Kept for those with a repetition penalty.
    pub seen: Option<Arc<Seen>>,
    /// Of those that have any.
    pub adjust: Option<Arc<Adjustments>>,
}

impl Request {
    /// Number of tokens sampled so far, as far as they were told of.
    pub fn position(&self) -> u32 {
        self.position.load(Relaxed)
    }

    /// The same with one that a step has begun to sample.
    pub fn next_position(&self) -> u32 {
        let begun = self.begun.load(Relaxed);
        let counts = begun != NONE && begun != self.discarded.load(Relaxed);
        self.position() + u32::from(counts)
    }

    /// Notes that a step samples, and that its output will be told later.
    pub fn begin(&self, step: StepId) {
        self.begun.store(step.0, Relaxed);
    }

    /// Notes that the sample of this step is thrown away.
    pub fn discard(&self, step: StepId) {
        self.discarded.store(step.0, Relaxed);
    }

    /// Takes a sampled token on, unless the sample was thrown away.
    #[inline]
    pub fn take_output(&mut self, step: StepId, token: u32) {
        if *self.begun.get_mut() == step.0 {
            *self.begun.get_mut() = NONE;
        }
        if *self.discarded.get_mut() != step.0 {
            self.take_outside(token);
        }
    }

    /// Takes on a token that no step of this sampler gave.
    #[inline]
    pub fn take_outside(&mut self, token: u32) {
        *self.position.get_mut() += 1;
        if let Some(seen) = &self.seen {
            seen.extend(&[token]);
        }
        if let Some(adjust) = &self.adjust {
            adjust.count(token);
        }
    }

    /// Takes on what another worker knows, unless this one is further.
    pub fn catch_up(&self, position: u32, seen: &[u32], counts: &[(u32, u32)]) {
        self.position.fetch_max(position, Relaxed);
        if let Some(own) = &self.seen {
            own.extend(seen);
        }
        if let Some(adjust) = &self.adjust {
            adjust.catch_up(counts);
        }
    }
}

/// Requests by slot.
#[derive(Debug, Default)]
pub struct Requests {
    slots: Vec<Option<Request>>,
    versions: u64,
    penalised: usize,
    adjusted: usize,
}

impl Requests {
    /// A live request.
    #[inline]
    pub fn get(&self, rid: RequestId) -> Option<&Request> {
        self.slots.get(rid.index())?.as_ref().filter(|r| r.generation == rid.generation)
    }

    /// A live request, to change.
    #[inline]
    pub fn get_mut(&mut self, rid: RequestId) -> Option<&mut Request> {
        self.slots.get_mut(rid.index())?.as_mut().filter(|r| r.generation == rid.generation)
    }

    /// All live requests, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &Request)> {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(slot, r)| r.as_ref().map(|r| (RequestId::new(slot, r.generation), r)))
    }

    /// Number of live requests.
    pub fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether any live request has a repetition penalty; if not, nobody looks at tokens.
    pub fn any_penalised(&self) -> bool {
        self.penalised > 0
    }

    /// Whether any live request has adjustments.
    pub fn any_adjusted(&self) -> bool {
        self.adjusted > 0
    }

    /// Takes a request on. One that is live already stays as it is.
    pub fn insert(
        &mut self,
        rid: RequestId,
        params: SamplingParams,
        seen: Option<Arc<Seen>>,
        adjust: Option<Arc<Adjustments>>,
    ) -> Result<()> {
        if rid.index() >= MAX_REQUESTS {
            return Err(ResourceError::invalid(format!(
                "request {rid}: a sampler keeps {MAX_REQUESTS} request slots"
            ))
            .with_amounts(u64::from(rid.slot) + 1, MAX_REQUESTS as u64));
        }
        if rid.index() >= self.slots.len() {
            self.slots.resize_with(rid.index() + 1, || None);
        }
        match &self.slots[rid.index()] {
            Some(live) if live.generation == rid.generation => return Ok(()),
            Some(live) if live.generation > rid.generation => {
                return Err(ResourceError::wrong_state(format!(
                    "request {rid} is out of date: generation {} owns its slot",
                    live.generation
                )));
            }
            _ => {}
        }
        self.versions += 1;
        self.penalised += usize::from(seen.is_some());
        self.adjusted += usize::from(adjust.is_some());
        let old = self.slots[rid.index()].replace(Request {
            generation: rid.generation,
            position: AtomicU32::new(0),
            version: self.versions,
            params,
            discarded: AtomicU64::new(NONE),
            begun: AtomicU64::new(NONE),
            seen,
            adjust,
        });
        self.forget(old);
        Ok(())
    }

    /// Gives a request the random numbers of another worker.
    pub fn reseed(&mut self, rid: RequestId, seed: u64, choice: u32) {
        let versions = self.versions + 1;
        let Some(Some(request)) = self.slots.get_mut(rid.index()) else { return };
        let params = SamplingParams { seed, choice, ..request.params };
        if request.generation == rid.generation && request.params != params {
            (request.params, request.version) = (params, versions);
            self.versions = versions;
        }
    }

    /// Forgets a request.
    pub fn remove(&mut self, rid: RequestId) {
        if self.get(rid).is_some() {
            let old = self.slots[rid.index()].take();
            self.forget(old);
        }
    }

    fn forget(&mut self, old: Option<Request>) {
        let Some(old) = old else { return };
        self.penalised -= usize::from(old.seen.is_some());
        self.adjusted -= usize::from(old.adjust.is_some());
    }
}
