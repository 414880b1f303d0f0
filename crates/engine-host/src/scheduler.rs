//! Which requests run in the next step, and how many tokens of each.
//!
//! Continuous batching with chunked prefill: every running request moves on by the tokens it has
//! pending (one, once its prompt is computed), as far as the step's token budget goes. Those that
//! generate come first, so a long prompt never stalls them. When a step does not fit, the youngest
//! request gives way, so the oldest always gets done and no request waits for ever.

use std::collections::VecDeque;

use resource_api::RequestId;

use crate::request::{Requests, Tracked};

/// Limits of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub max_batch: usize,
    pub max_batch_tokens: usize,
}

/// A request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub rid: RequestId,
    /// Tokens to compute, at least 1.
    pub span: usize,
}

/// What comes of a request whose turn to start it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    Runs,
    /// It has failed and is gone.
    Gone,
    /// There is no room for its state yet, and nobody passes it.
    Waits,
    /// Its state is on the way; others may start before it.
    Aside,
}

/// The queues. Every running request is older than every waiting one, but for those whose state is on the
/// way from elsewhere.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    /// Oldest first.
    waiting: VecDeque<RequestId>,
    /// Oldest first.
    running: Vec<RequestId>,
    /// A request gave way for lack of room. Nobody joins until one has ended: trying every step
    /// anew would only churn.
    full: bool,
    /// Whether a request waits for another one that is computing what both begin with.
    pub share_beginnings: bool,
}

/// Tokens that make it worth a wait that another request computes them.
const WORTH_WAITING: usize = 8;

/// Most requests that are passed over in one step.
const MOST_ASIDE: usize = 1024;

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            full: false,
            share_beginnings: false,
        }
    }

    pub fn enqueue(&mut self, rid: RequestId) {
        self.waiting.push_back(rid);
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Lays out the next step in `turns`, without the requests of `held`. `join` prepares a request that starts to run: its state
    /// that is off the device, its cached prefix.
    pub fn fill(
        &mut self,
        requests: &mut Requests,
        turns: &mut Vec<Turn>,
        held: &[RequestId],
        mut join: impl FnMut(&mut Tracked) -> Join,
    ) {
        let share = |rid| requests.get(rid).map_or((0, 1), |r| (r.pending(), r.width()));
        let mut budget = self.take_running(turns, held, share);
        let mut at = 0;
        while budget > 0 && !self.full && self.running.len() < self.limits.max_batch {
            let Some(&rid) = self.waiting.get(at).filter(|_| at < MOST_ASIDE) else { return };
            if self.share_beginnings && self.is_being_computed(requests, rid) {
                at += 1;
                continue;
            }
            let join = requests.get_mut(rid).map_or(Join::Gone, &mut join);
            match join {
                Join::Runs => {
                    self.waiting.remove(at);
                    self.running.push(rid);
                    let share = requests.get(rid).map_or((0, 1), |r| (r.pending(), r.width()));
                    take(turns, &mut budget, rid, share);
                }
                Join::Gone => drop(self.waiting.remove(at)),
                Join::Aside => at += 1,
                Join::Waits => {
                    // Room comes when a running one ends.
                    self.full = !self.running.is_empty();
                    return;
                }
            }
        }
    }

    /// Whether a running request is about to compute tokens that this one begins with, too: those will be
    /// cached then.
    fn is_being_computed(&self, requests: &Requests, rid: RequestId) -> bool {
        let begins = |r: &&Tracked| r.computed == 0 && r.arriving.is_none();
        let Some(request) = requests.get(rid).filter(begins) else { return false };
        let most = request.tokens.len() - 1;
        self.running.iter().filter_map(|&rid| requests.get(rid)).any(|other| {
            let done = other.computed;
            if done >= other.prompt_len.min(most) {
                return false;
            }
            // The next tokens first: they differ most often.
            let pairs =
                request.tokens[done..most].iter().zip(&other.tokens[done..other.prompt_len]);
            let next = pairs.take(WORTH_WAITING).take_while(|(own, its)| own == its).count();
            next == WORTH_WAITING && request.tokens[..done] == other.tokens[..done]
        })
    }

    /// Lays out in `turns` the step after the present one, for when nothing unexpected happens:
    /// `share` says what each request will have to compute then, 0 tokens for one that ends, and how
    /// many rows a token of it takes. `false` when that cannot be known, since somebody may join.
    pub fn foresee(
        &self,
        turns: &mut Vec<Turn>,
        share: impl Fn(RequestId) -> (usize, usize),
    ) -> bool {
        let ends = self.running.iter().any(|&rid| share(rid).0 == 0);
        let budget = self.take_running(turns, &[], share);
        let has_room = self.running.len() < self.limits.max_batch && !self.full || ends;
        !turns.is_empty() && (self.waiting.is_empty() || budget == 0 || !has_room)
    }

    /// The running requests' share of a step; answers how much of the budget is left.
    fn take_running(
        &self,
        turns: &mut Vec<Turn>,
        held: &[RequestId],
        share: impl Fn(RequestId) -> (usize, usize),
    ) -> usize {
        turns.clear();
        let mut budget = self.limits.max_batch_tokens;
        for generating in [true, false] {
            for &rid in self.running.iter().filter(|rid| !held.contains(rid)) {
                let share = share(rid);
                if (share.0 == 1) == generating {
                    take(turns, &mut budget, rid, share);
                }
                if budget == 0 {
                    return 0;
                }
            }
        }
        budget
    }

    /// The request that gives way when a step does not fit: the youngest, unless it is alone.
    pub fn give_way(&mut self) -> Option<RequestId> {
        if self.running.len() < 2 {
            return None;
        }
        let rid = self.running.pop()?;
        self.waiting.push_front(rid);
        self.full = true;
        Some(rid)
    }

    /// Has all running requests wait, in front of the others; they may join again at once.
    pub fn stand_aside(&mut self) -> Vec<RequestId> {
        let running = std::mem::take(&mut self.running);
        running.iter().rev().for_each(|&rid| self.waiting.push_front(rid));
        self.full = false;
        running
    }

    /// Those that wait, the youngest first.
    pub fn youngest_first(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.waiting.iter().rev().copied()
    }

    /// Lets requests join again before one has ended.
    pub fn let_join(&mut self) {
        self.full = false;
    }

    /// Forgets a request; room has come free.
    pub fn remove(&mut self, rid: RequestId) {
        self.running.retain(|&r| r != rid);
        self.waiting.retain(|&r| r != rid);
        self.full = false;
    }
}

/// Takes what the budget has for a request with so many tokens pending, of so many rows each.
fn take(
    turns: &mut Vec<Turn>,
    budget: &mut usize,
    rid: RequestId,
    (pending, width): (usize, usize),
) {
    let span = pending.min(*budget / width);
    *budget -= span * width;
    if span > 0 {
        turns.push(Turn { rid, span });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        scheduler: Scheduler,
        requests: Requests,
        turns: Vec<Turn>,
    }

    impl Bench {
        fn new(max_batch: usize, max_batch_tokens: usize, prompts: &[usize]) -> Self {
            let mut requests = Requests::default();
            let mut scheduler = Scheduler::new(Limits { max_batch, max_batch_tokens });
            for &len in prompts {
                let rid = requests.next_id();
                requests.insert(Tracked {
                    rid,
                    deadline: None,
                    tokens: vec![0; len],
                    prompt_len: len,
                    computed: 0,
                    in_step: 0,
                    cached: 0,
                    prefix_resolved: false,
                    offloaded: false,
                    max_tokens: 100,
                    ignore_eos: true,
                    stop_token_ids: vec![],
                    logprobs: None,
                    labels: None,
                    prompt: None,
                    session: None,
                    arriving: None,
                    hand_over_after: None,
                });
                scheduler.enqueue(rid);
            }
            Self { scheduler, requests, turns: Vec::new() }
        }

        /// Spans of the next step by request slot, after running it.
        fn step(&mut self) -> Vec<(u32, usize)> {
            self.scheduler.fill(&mut self.requests, &mut self.turns, &[], |_| Join::Runs);
            let turns = self.turns.iter().map(|t| (t.rid.slot, t.span)).collect();
            for turn in &self.turns {
                let request = self.requests.get_mut(turn.rid).unwrap();
                request.computed += turn.span;
                if request.pending() == 0 {
                    request.tokens.push(0);
                }
            }
            turns
        }
    }

    #[test]
    fn generating_requests_come_before_long_prompts() {
        let mut bench = Bench::new(8, 10, &[3, 25]);
        assert_eq!(bench.step(), [(0, 3), (1, 7)]);
        assert_eq!(bench.step(), [(0, 1), (1, 9)]);
        assert_eq!(bench.step(), [(0, 1), (1, 9)]);
        assert_eq!(bench.step(), [(0, 1), (1, 1)]);
    }

    #[test]
    fn the_batch_has_a_size() {
        let mut bench = Bench::new(2, 100, &[5, 5, 5]);
        assert_eq!(bench.step(), [(0, 5), (1, 5)]);
        bench.scheduler.remove(RequestId::new(0, 1));
        assert_eq!(bench.step(), [(1, 1), (2, 5)]);
    }

    #[test]
    fn the_youngest_gives_way_and_waits_until_one_ends() {
        let mut bench = Bench::new(8, 100, &[5, 5, 5]);
        bench.step();
        assert_eq!(bench.scheduler.give_way().unwrap().slot, 2);
        assert_eq!(bench.step(), [(0, 1), (1, 1)]);
        assert_eq!(bench.scheduler.give_way().unwrap().slot, 1);
        assert_eq!(bench.scheduler.give_way(), None, "the last one stays");
        bench.scheduler.remove(RequestId::new(0, 1));
        assert_eq!(bench.step(), [(1, 1), (2, 1)]);
    }
}
