//! What one step asks its node for, and what comes of it.

use model::{Score, StepInput, StepOutput};
use resource_api::{RequestId, Sampled};

use crate::request::{Requests, Tracked};
use crate::scheduler::Turn;
use crate::step::SubmoduleStep;

/// A step's requests, what its node is asked for, and its answer. Keeps its memory from step to step.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub ask: Ask,
    pub output: StepOutput,
}

/// What a step asks its node for.
#[derive(Debug, Default)]
pub(super) struct Ask {
    pub turns: Vec<Turn>,
    sample: Vec<u32>,
    top_logprobs: Vec<u32>,
    /// Tokens of prompts to score in the step, and whose they are.
    pub scores: Vec<Score>,
    pub scored_rids: Vec<RequestId>,
    /// Whose samples are asked for.
    pub sampled_rids: Vec<RequestId>,
    /// Per token, see [`StepInput::from_sample`]; empty where all ids are known.
    from_sample: Vec<u32>,
    /// The ids, where resources are not told of them yet.
    withheld: Vec<u32>,
}

impl Ask {
    /// As what the node takes.
    pub fn input<'a>(&'a self, step: &'a SubmoduleStep) -> StepInput<'a> {
        let is_withheld = !self.withheld.is_empty();
        StepInput {
            segments: step.segments.view(),
            token_ids: if is_withheld { &self.withheld } else { &step.token_ids },
            from_sample: &self.from_sample,
            sample: &self.sample,
            top_logprobs: &self.top_logprobs,
            score: &self.scores,
        }
    }

    /// Writes the ids of the tokens that the declared `step` adds, and what is sampled and scored. `begins`
    /// says from which of its tokens on a request goes; those of `before` have one more than is known, which
    /// is the sample of that number of the step before.
    pub fn fill(
        &mut self,
        requests: &Requests,
        begins: impl Fn(&Tracked) -> usize,
        before: &[RequestId],
        step: &mut SubmoduleStep,
    ) {
        let Self { sample, top_logprobs, scores, scored_rids, sampled_rids, .. } = self;
        sample.clear();
        top_logprobs.clear();
        scores.clear();
        scored_rids.clear();
        sampled_rids.clear();
        self.from_sample.clear();
        self.withheld.clear();
        let mut find = Finder { before, next: 0 };
        for (i, segment) in step.segments.view().iter().enumerate() {
            let Some(request) = requests.get(segment.request_id) else { continue };
            let (begin, row) = (begins(request), step.token_ids.len());
            let end = begin + segment.span as usize;
            let known = end.min(request.tokens.len());
            step.token_ids.extend_from_slice(&request.tokens[begin.min(known)..known]);
            let last = find.place_of(request.rid);
            let all = request.tokens.len() + usize::from(last.is_some());
            if let Some(last) = last.filter(|_| known < end) {
                self.from_sample.resize(step.token_ids.len(), StepInput::KNOWN);
                self.from_sample.push(last);
                step.token_ids.push(0);
            }
            // A request is sampled once, at the first of its streams.
            if request.labels_at(begin).first() != Some(&segment.label) {
                continue;
            }
            for score in request.scores_of_step(row) {
                scores.push(score);
                scored_rids.push(request.rid);
            }
            if end == all {
                sample.push(i as u32);
                sampled_rids.push(request.rid);
                top_logprobs.push(request.logprobs.unwrap_or(0));
            }
        }
        if top_logprobs.iter().all(|&k| k == 0) {
            top_logprobs.clear();
        }
    }

    /// Keeps the ids, which are not all known, from the step and with it from resources.
    pub fn withhold(&mut self, step: &mut SubmoduleStep) {
        if !self.from_sample.is_empty() {
            self.from_sample.resize(step.token_ids.len(), StepInput::KNOWN);
            std::mem::swap(&mut self.withheld, &mut step.token_ids);
        }
    }

    /// Gives out what was withheld, now that the step before has given `sampled`.
    pub fn tell(&mut self, sampled: &[Sampled], step: &mut SubmoduleStep) {
        if self.withheld.is_empty() {
            return;
        }
        for (id, &sample) in self.withheld.iter_mut().zip(&self.from_sample) {
            let of = sampled.get(sample as usize).filter(|s| s.status == Sampled::OK);
            *id = of.map_or(*id, |sampled| sampled.token);
        }
        std::mem::swap(&mut self.withheld, &mut step.token_ids);
        self.withheld.clear();
    }
}

/// Finds requests in a list, quickly where they come in its order.
struct Finder<'a> {
    before: &'a [RequestId],
    next: usize,
}

impl Finder<'_> {
    fn place_of(&mut self, rid: RequestId) -> Option<u32> {
        let (front, back) = self.before.split_at(self.next.min(self.before.len()));
        let at = match back.iter().position(|&other| other == rid) {
            Some(at) => front.len() + at,
            None => front.iter().position(|&other| other == rid)?,
        };
        // Not past it: the next stream may be of the same request.
        self.next = at;
        Some(at as u32)
    }
}
