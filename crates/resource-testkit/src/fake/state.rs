//! Streams of requests, and what steps have reserved for them.

use std::collections::BTreeMap;

use resource_api::{
    AdmitOutcome, FailureReason, PublishedInfo, RequestId, ResourceError, ResourceStep, Result,
    Segment, StepId,
};
use serde_json::{Value, json};

use super::pool::Pool;
use super::prefix::Prefixes;
use super::spec::FakeRequest;
use crate::interface::FakePlan;

/// Version of the bodies in what a fake publishes.
const PUBLISHED_VERSION: u32 = 1;

/// Everything that changes.
#[derive(Debug)]
pub struct State {
    device: Pool,
    host: Pool,
    streams: BTreeMap<RequestId, Stream>,
    /// Tokens that outlive their request, by name.
    sessions: BTreeMap<String, Vec<u32>>,
    steps: BTreeMap<StepId, Reserved>,
    /// The prefix store.
    pub prefixes: Prefixes,
}

/// What one request has here.
#[derive(Debug, Default)]
struct Stream {
    prompt: Vec<u32>,
    priority: Option<f64>,
    /// Committed tokens. May be fewer than `slots` after a reset that kept the memory.
    len: u32,
    slots: Vec<u32>,
    /// Slots in the host's pool while it is offloaded.
    away: Option<Vec<u32>>,
    outputs: Vec<u32>,
    /// How often a retrieval still answers that it is not ready.
    polls_left: Option<u32>,
}

/// What a step has taken, until it is committed or given back.
#[derive(Debug, Default)]
struct Reserved {
    staged: bool,
    planned: bool,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    rid: RequestId,
    start: u32,
    span: u32,
    taken: Vec<u32>,
}

impl State {
    /// Empty pools of these sizes.
    pub fn new(capacity: u32, host_capacity: u32) -> Self {
        Self {
            device: Pool::new(capacity),
            host: Pool::new(host_capacity),
            streams: BTreeMap::new(),
            sessions: BTreeMap::new(),
            steps: BTreeMap::new(),
            prefixes: Prefixes::default(),
        }
    }

    // --- requests ---------------------------------------------------------------------------

    /// Learns of a request; one that is known already stays as it is.
    pub fn ingest(&mut self, rid: RequestId, prompt: &[u32], asked: FakeRequest) {
        self.streams.entry(rid).or_insert_with(|| Stream {
            prompt: prompt.to_vec(),
            priority: asked.priority,
            ..Stream::default()
        });
    }

    /// Empties a stream.
    pub fn reset(&mut self, rid: RequestId, free: bool) {
        let Some(stream) = self.streams.get_mut(&rid) else { return };
        stream.len = 0;
        self.host.give_back(stream.away.take().unwrap_or_default());
        if free {
            self.device.give_back(stream.slots.drain(..));
        }
        self.prefixes.release(rid);
    }

    /// Forgets a request.
    pub fn remove(&mut self, rid: RequestId) {
        self.reset(rid, true);
        self.streams.remove(&rid);
    }

    /// Keeps a request's tokens for a later one, and empties it.
    pub fn retain(&mut self, rid: RequestId, session: &str) {
        let tokens = self.tokens(rid);
        self.sessions.insert(session.into(), tokens);
        self.reset(rid, true);
    }

    /// Begins a request with the first tokens of a session, which is gone then. Answers how many.
    pub fn resume(&mut self, rid: RequestId, session: &str, len: u32) -> Result<u32> {
        let Some(mut tokens) = self.sessions.remove(session) else { return Ok(0) };
        tokens.truncate(len as usize);
        self.adopt(rid, &tokens)?;
        Ok(tokens.len() as u32)
    }

    /// Forgets a session.
    pub fn forget(&mut self, session: &str) {
        self.sessions.remove(session);
    }

    /// Prompt of a request.
    pub fn prompt(&self, rid: RequestId) -> Option<&[u32]> {
        self.streams.get(&rid).map(|s| s.prompt.as_slice())
    }

    /// Committed tokens of a request.
    pub fn tokens(&self, rid: RequestId) -> Vec<u32> {
        let Some(stream) = self.streams.get(&rid) else { return Vec::new() };
        match &stream.away {
            Some(away) => self.host.read(away),
            None => self.device.read(&stream.slots[..stream.len as usize]),
        }
    }

    /// Notes sampled tokens.
    pub fn add_outputs(&mut self, rid: RequestId, ids: &[u32]) {
        if let Some(stream) = self.streams.get_mut(&rid) {
            stream.outputs.extend(ids);
        }
    }

    // --- steps ------------------------------------------------------------------------------

    /// Whether the step is here.
    pub fn has_step(&self, step: StepId) -> bool {
        self.steps.contains_key(&step)
    }

    /// Makes a staged step the live one: it keeps what it has.
    pub fn promote(&mut self, step: StepId) {
        if let Some(reserved) = self.steps.get_mut(&step) {
            reserved.staged = false;
        }
    }

    /// Takes slots for a step, row by row. When a row does not fit, what was taken so far stays
    /// with the step: giving it back is the rollback's job.
    pub fn reserve(
        &mut self,
        step: StepId,
        share: &ResourceStep<'_>,
        staged: bool,
    ) -> AdmitOutcome {
        self.steps.insert(step, Reserved { staged, ..Reserved::default() });
        for segment in share.segments().iter() {
            let outcome = self.reserve_row(step, segment);
            if !outcome.is_ready() {
                return outcome;
            }
        }
        AdmitOutcome::OK
    }

    fn reserve_row(&mut self, step: StepId, segment: Segment) -> AdmitOutcome {
        let Segment { request_id: rid, label, span } = segment;
        let mut row = Row { rid, start: 0, span, taken: Vec::new() };
        let mut outcome = AdmitOutcome::OK;
        match self.streams.get(&rid) {
            _ if rid.is_padding() => {}
            None if span > 0 => {
                return AdmitOutcome::runtime_error(rid, label, format!("{rid} is unknown"));
            }
            None => {}
            Some(stream) if stream.away.is_some() => {
                return AdmitOutcome::refused(FailureReason::REQUEST_OFFLOADING, rid, label);
            }
            Some(stream) => {
                let earlier = self.steps.values().flat_map(|r| &r.rows).filter(|r| r.rid == rid);
                let (spans, taken) =
                    earlier.fold((0, 0), |(s, t), row| (s + row.span, t + row.taken.len()));
                row.start = stream.len + spans;
                let need = (row.start + span) as usize;
                let need = need.saturating_sub(stream.slots.len() + taken);
                let have = self.device.free();
                row.taken.extend((0..need).map_while(|_| self.device.take()));
                if row.taken.len() < need {
                    outcome = AdmitOutcome::allocation_failed(rid, label, need as u64, have as u64);
                }
            }
        }
        self.steps.entry(step).or_default().rows.push(row);
        outcome
    }

    /// Gives back what a step has taken. Steps that are not here are accepted.
    pub fn release(&mut self, step: StepId) {
        for row in self.steps.remove(&step).unwrap_or_default().rows {
            self.device.give_back(row.taken);
        }
    }

    /// Gives back a staged step, or all of them.
    pub fn release_staged(&mut self, step: Option<StepId>) {
        let staged: Vec<StepId> = self
            .steps
            .iter()
            .filter(|(id, r)| r.staged && step.is_none_or(|s| s == **id))
            .map(|(id, _)| *id)
            .collect();
        staged.into_iter().for_each(|id| self.release(id));
    }

    /// Lays a step out, once; false when that has been done before.
    pub fn lay_out(&mut self, step: StepId, plan: &mut FakePlan) -> Result<bool> {
        let Some(reserved) = self.steps.get_mut(&step) else {
            return Err(ResourceError::wrong_state(format!("step {} is not admitted", step.0)));
        };
        if std::mem::replace(&mut reserved.planned, true) {
            return Ok(false);
        }
        plan.request.clear();
        plan.start.clear();
        plan.span.clear();
        plan.slots.clear();
        for row in &self.steps[&step].rows {
            plan.request.push(row.rid);
            plan.start.push(row.start);
            plan.span.push(row.span);
            let slots = self.slots_with_reserved(row.rid);
            for position in row.start..row.start + row.span {
                // Padding rows have no slots: they write to the sink.
                plan.slots.push(slots.get(position as usize).copied().unwrap_or(0));
            }
        }
        Ok(true)
    }

    /// Slots of a stream as it will be once every step that is here has been committed.
    fn slots_with_reserved(&self, rid: RequestId) -> Vec<u32> {
        let committed = self.streams.get(&rid).map(|s| s.slots.clone()).unwrap_or_default();
        let rows = self.steps.values().flat_map(|r| &r.rows).filter(|r| r.rid == rid);
        committed.into_iter().chain(rows.flat_map(|r| r.taken.iter().copied())).collect()
    }

    /// Records a step with the tokens it has added.
    pub fn commit(&mut self, step: StepId, token_ids: &[u32]) -> Result<()> {
        let Some(reserved) = self.steps.remove(&step) else {
            return Err(ResourceError::wrong_state(format!("step {} is not admitted", step.0)));
        };
        let mut token = 0;
        for row in reserved.rows {
            let tokens = token_ids.get(token..token + row.span as usize).unwrap_or_default();
            token += row.span as usize;
            let Some(stream) = self.streams.get_mut(&row.rid) else {
                // Removed while its step ran.
                self.device.give_back(row.taken);
                continue;
            };
            stream.slots.extend(row.taken);
            for (&slot, &token) in stream.slots[stream.len as usize..].iter().zip(tokens) {
                self.device.write(slot, token);
            }
            stream.len += row.span;
        }
        Ok(())
    }

    // --- moving -----------------------------------------------------------------------------

    /// A request's state for another worker.
    pub fn publish(&self, rid: RequestId) -> Option<PublishedInfo> {
        let stream = self.streams.get(&rid)?;
        let mut info = PublishedInfo::new("fake", PUBLISHED_VERSION);
        let bytes = |ids: &[u32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        info.set("tokens", stream.len.into(), bytes(&self.tokens(rid)));
        info.set("outputs", stream.outputs.len() as u64, bytes(&stream.outputs));
        Some(info)
    }

    /// Takes a published state in, once it has been asked for `polls` times in vain.
    pub fn retrieve(
        &mut self,
        rid: RequestId,
        info: &PublishedInfo,
        polls: u32,
    ) -> Result<AdmitOutcome> {
        if info.kind() != "fake" || info.version() != PUBLISHED_VERSION {
            return Err(ResourceError::invalid(format!(
                "published by {}/{}, expected fake/{PUBLISHED_VERSION}",
                info.kind(),
                info.version()
            )));
        }
        let tokens = ids_of(info, "tokens")?;
        let outputs = ids_of(info, "outputs")?;
        let Some(stream) = self.streams.get_mut(&rid) else {
            return Err(ResourceError::wrong_state(format!("{rid} is unknown")));
        };
        if stream.len > 0 {
            return Ok(AdmitOutcome::OK);
        }
        let left = stream.polls_left.get_or_insert(polls);
        if *left > 0 {
            *left -= 1;
            return Ok(AdmitOutcome::NOT_READY);
        }
        // What a reset that kept the memory has left.
        self.device.give_back(stream.slots.drain(..));
        let (need, have) = (tokens.len(), self.device.free());
        let Some(slots) = self.device.take_all(need) else {
            let label = resource_api::LabelId::MAIN;
            return Ok(AdmitOutcome::allocation_failed(rid, label, need as u64, have as u64));
        };
        slots.iter().zip(&tokens).for_each(|(&slot, &token)| self.device.write(slot, token));
        (stream.len, stream.slots, stream.outputs) = (need as u32, slots, outputs);
        Ok(AdmitOutcome::OK)
    }

    /// Takes on tokens that need not be computed.
    pub fn adopt(&mut self, rid: RequestId, tokens: &[u32]) -> Result<()> {
        let Some(stream) = self.streams.get_mut(&rid) else {
            return Err(ResourceError::wrong_state(format!("{rid} is unknown")));
        };
        self.device.give_back(stream.slots.drain(..));
        let (need, have) = (tokens.len() as u64, self.device.free() as u64);
        let Some(slots) = self.device.take_all(tokens.len()) else {
            let e = ResourceError::new(resource_api::ErrorKind::EXHAUSTED, "the pool is full");
            return Err(e.with_amounts(need, have));
        };
        slots.iter().zip(tokens).for_each(|(&slot, &token)| self.device.write(slot, token));
        (stream.len, stream.slots) = (tokens.len() as u32, slots);
        Ok(())
    }

    /// Slots that offloading would free: none while a step uses the stream.
    pub fn reclaimable(&self, rid: RequestId) -> u64 {
        let in_use = self.steps.values().flat_map(|r| &r.rows).any(|r| r.rid == rid);
        match self.streams.get(&rid) {
            Some(stream) if !in_use => stream.slots.len() as u64,
            _ => 0,
        }
    }

    /// How much the request is to go.
    pub fn priority(&self, rid: RequestId) -> f64 {
        let stream = self.streams.get(&rid);
        stream.map_or(0.0, |s| s.priority.unwrap_or(f64::from(s.len)))
    }

    /// Moves a stream to the host's pool. Answers how many slots that freed.
    pub fn offload(&mut self, rid: RequestId) -> u64 {
        let freed = self.reclaimable(rid);
        let Some(stream) = self.streams.get_mut(&rid).filter(|_| freed > 0) else { return 0 };
        let Some(away) = self.host.take_all(stream.len as usize) else { return 0 };
        let tokens = self.device.read(&stream.slots[..stream.len as usize]);
        away.iter().zip(tokens).for_each(|(&slot, token)| self.host.write(slot, token));
        self.device.give_back(stream.slots.drain(..));
        stream.away = Some(away);
        freed
    }

    /// Whether the stream is away.
    pub fn is_offloaded(&self, rid: RequestId) -> bool {
        self.streams.get(&rid).is_some_and(|s| s.away.is_some())
    }

    /// Whether it is away and would fit.
    pub fn can_reload(&self, rid: RequestId) -> bool {
        let away = self.streams.get(&rid).and_then(|s| s.away.as_ref());
        away.is_some_and(|away| away.len() <= self.device.free())
    }

    /// Brings a stream back. False when it does not fit.
    pub fn reload(&mut self, rid: RequestId) -> bool {
        let Some(stream) = self.streams.get_mut(&rid) else { return true };
        let Some(away) = stream.away.take() else { return true };
        let Some(slots) = self.device.take_all(away.len()) else {
            stream.away = Some(away);
            return false;
        };
        let tokens = self.host.read(&away);
        slots.iter().zip(tokens).for_each(|(&slot, token)| self.device.write(slot, token));
        self.host.give_back(away);
        stream.slots = slots;
        true
    }

    /// For `inspect`: all of it but the contents of free memory.
    pub fn inspect(&self) -> Value {
        let stream = |(rid, s): (&RequestId, &Stream)| {
            let value = json!({
                "len": s.len,
                "slots": s.slots,
                "away": s.away,
                "tokens": self.tokens(*rid),
                "outputs": s.outputs,
                "polls_left": s.polls_left,
            });
            (rid.to_string(), value)
        };
        let step = |(id, r): (&StepId, &Reserved)| json!([id.0, r.staged, r.planned]);
        json!({
            "free": self.device.free_slots(),
            "host_free": self.host.free_slots(),
            "streams": self.streams.iter().map(stream).collect::<serde_json::Map<_, _>>(),
            "steps": self.steps.iter().map(step).collect::<Vec<_>>(),
            "prefixes": self.prefixes.inspect(),
        })
    }
}

/// The ids in an entry of published state.
fn ids_of(info: &PublishedInfo, name: &str) -> Result<Vec<u32>> {
    let (_, body) = info
        .get(name)
        .ok_or_else(|| ResourceError::invalid(format!("published state lacks `{name}`")))?;
    let (ids, rest) = body.as_chunks::<4>();
    match rest {
        [] => Ok(ids.iter().map(|id| u32::from_le_bytes(*id)).collect()),
        _ => Err(ResourceError::invalid(format!("published `{name}` is cut short"))),
    }
}
