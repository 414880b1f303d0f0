//! Which requests run in the next step, and how many tokens of each.
//!
//! Continuous batching with chunked prefill: every running request moves on by the tokens it has
//! pending (one, once its prompt is computed), as far as the step's token budget goes. Those that
//! generate come first, so a long prompt never stalls them. When a step does not fit, those that it
//! would let in wait; where there are none, one that runs gives way ([`Victims`]). Either waits until a
//! running one has ended.
//!
//! Why every request gets done: at least one is left running, and until one that runs has ended, nobody
//! who gave way or was turned away joins again; those who wait are let in in the order in which they
//! came, and nobody gives way for one that is let in. Where the youngest gives way, all that run beside
//! it are older, so that it does so at most once for each of them, and for each that has passed it,
//! which are so many as [`Queue::Skip`] says.
//! Under the other policies, who has given way [`MOST_SET_BACK`] times does so again only where
//! everybody who runs has, and then the youngest does.

use std::collections::VecDeque;

use resource_api::RequestId;

use crate::request::{Requests, Tracked};

mod policy;
#[cfg(test)]
mod tests;

pub use policy::{Queue, Victims};

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
    /// There is no room for its state yet.
    Waits,
    /// Its state is on the way; others may start before it.
    Aside,
}

/// A request in the queues.
#[derive(Clone, Copy, Debug)]
struct Place {
    rid: RequestId,
    /// In the order in which requests came.
    number: u64,
    /// The last step that it was part of.
    used: u64,
    /// How often it gave way.
    set_back: u32,
    /// How many requests have passed it while it waited for room.
    passed: u32,
    /// It runs, and has not been part of a step yet.
    is_new: bool,
    /// It gave way, or was turned away, and no request has ended since: trying every step anew would only
    /// churn.
    is_blocked: bool,
}

/// The queues.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    /// In the order in which they came.
    waiting: VecDeque<Place>,
    running: Vec<Place>,
    /// A request is blocked.
    full: bool,
    /// Whether a request waits for another one that is computing what both begin with.
    pub share_beginnings: bool,
    pub victims: Victims,
    pub queue: Queue,
    came: u64,
    /// Steps that ran.
    step: u64,
    /// By the request's slot, the last of them that it was part of, so that nobody is looked for.
    ran_in: Vec<u64>,
}

/// After giving way so often a request does so only where all who run have.
pub(crate) const MOST_SET_BACK: u32 = 3;

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
            victims: Victims::default(),
            queue: Queue::default(),
            came: 0,
            step: 0,
            ran_in: Vec::new(),
        }
    }

    pub fn enqueue(&mut self, rid: RequestId) {
        let number = self.came;
        self.came += 1;
        let place = Place {
            rid,
            number,
            used: 0,
            set_back: 0,
            passed: 0,
            is_new: false,
            is_blocked: false,
        };
        self.waiting.push_back(place);
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

    /// Lays out the next step in `turns`, without the requests of `held`. `join` prepares a request that
    /// starts to run: its state that is off the device, its cached prefix.
    pub fn fill(
        &mut self,
        requests: &mut Requests,
        turns: &mut Vec<Turn>,
        held: &[RequestId],
        join: impl FnMut(&mut Tracked) -> Join,
    ) {
        let share = |rid| requests.get(rid).map_or((0, 1), |r| (r.pending(), r.width()));
        let budget = self.take_running(turns, held, share);
        self.let_in(requests, turns, budget, join);
    }

    /// Notes that a step of these turns runs.
    pub fn ran(&mut self, turns: &[Turn]) {
        self.step += 1;
        let all = self.victims == Victims::LeastRecent;
        if !all && !self.running.iter().any(|place| place.is_new) {
            return;
        }
        for turn in turns {
            let at = turn.rid.index();
            self.ran_in.resize(self.ran_in.len().max(at + 1), 0);
            self.ran_in[at] = self.step;
        }
        for place in self.running.iter_mut().filter(|place| all || place.is_new) {
            if self.ran_in.get(place.rid.index()) == Some(&self.step) {
                (place.used, place.is_new) = (self.step, false);
            }
        }
    }

    fn let_in(
        &mut self,
        requests: &mut Requests,
        turns: &mut Vec<Turn>,
        mut budget: usize,
        mut join: impl FnMut(&mut Tracked) -> Join,
    ) {
        if self.full && self.queue == Queue::Strict {
            return;
        }
        // `at` is past those that are left where they are.
        let mut at = 0;
        while budget > 0 && self.running.len() < self.limits.max_batch && at < MOST_ASIDE {
            let Some(&Place { rid, is_blocked, passed, .. }) = self.waiting.get(at) else { return };
            if is_blocked {
                if !self.queue.lets_pass(passed) {
                    return;
                }
                at += 1;
                continue;
            }
            if self.share_beginnings && self.is_being_computed(requests, rid) {
                at += 1;
                continue;
            }
            match requests.get_mut(rid).map_or(Join::Gone, &mut join) {
                Join::Runs => {
                    let Some(place) = self.waiting.remove(at) else { return };
                    self.running.push(Place { is_new: true, ..place });
                    let share = requests.get(rid).map_or((0, 1), |r| (r.pending(), r.width()));
                    take(turns, &mut budget, rid, share);
                    let mut may_pass = true;
                    for left in self.waiting.iter_mut().take(at).filter(|left| left.is_blocked) {
                        left.passed += 1;
                        may_pass &= self.queue.lets_pass(left.passed);
                    }
                    if !may_pass {
                        return;
                    }
                }
                Join::Gone => drop(self.waiting.remove(at)),
                Join::Aside => at += 1,
                // Room comes when a running one ends.
                Join::Waits if self.running.is_empty() => return,
                Join::Waits => {
                    self.full = true;
                    self.waiting[at].is_blocked = true;
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
        self.running.iter().filter_map(|place| requests.get(place.rid)).any(|other| {
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
        let ends = self.running.iter().any(|place| share(place.rid).0 == 0);
        let budget = self.take_running(turns, &[], share);
        let may_join = match ends {
            true => !self.waiting.is_empty(),
            false => self.running.len() < self.limits.max_batch && self.anybody_may_join(),
        };
        !turns.is_empty() && (budget == 0 || !may_join)
    }

    /// Whether a waiting request would be let in, were there tokens left in a step.
    fn anybody_may_join(&self) -> bool {
        if self.full && self.queue == Queue::Strict {
            return false;
        }
        let is_passed = |place: &&Place| place.is_blocked && self.queue.lets_pass(place.passed);
        self.waiting.iter().find(|place| !is_passed(place)).is_some_and(|place| !place.is_blocked)
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
            for &Place { rid, .. } in self.running.iter().filter(|p| !held.contains(&p.rid)) {
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

    /// Turns away one that the refused step would let in, the one that lacks room if it is, unless nobody
    /// else runs; and those behind it that may not pass it. The first is the one that lacks room.
    pub fn turn_away(&mut self, culprit: RequestId) -> Vec<RequestId> {
        let new = |place: &&Place| place.is_new;
        // Somebody must be left: the one that came first, where nobody ran before.
        let oldest = self.running.iter().min_by_key(|place| (place.is_new, place.number));
        let kept = oldest.map(|place| place.number);
        let others = self.running.iter().filter(new).filter(|place| Some(place.number) != kept);
        let lacking = others.clone().find(|place| place.rid == culprit);
        let Some(&lacking) = lacking.or_else(|| others.max_by_key(|place| place.number)) else {
            return Vec::new();
        };
        let mut away = vec![Place { is_blocked: true, ..lacking }];
        let behind = |place: &&Place| place.number > lacking.number && Some(place.number) != kept;
        let mut behind: Vec<Place> =
            self.running.iter().filter(new).filter(behind).copied().collect();
        behind.sort_by_key(|place| place.number);
        for place in behind {
            match self.queue.lets_pass(away[0].passed) {
                true => away[0].passed += 1,
                false => away.push(place),
            }
        }
        self.running.retain(|place| away.iter().all(|gone| gone.rid != place.rid));
        away.iter().for_each(|&place| self.wait(place));
        self.full = true;
        away.iter().map(|place| place.rid).collect()
    }

    /// Takes out the request that gives way when a step does not fit, unless it runs alone. `wish` is how
    /// much the resource that the policy names wants it gone; it is asked for no other policy.
    pub fn give_way(&mut self, wish: impl Fn(RequestId) -> f64) -> Option<RequestId> {
        if self.running.len() < 2 {
            return None;
        }
        let settled = |place: &Place| place.set_back >= MOST_SET_BACK;
        let all_settled = self.running.iter().all(settled);
        let all = self.running.iter().enumerate();
        // Of equals, `max_by` has the last: they are compared by their number at the end.
        let victim = match &self.victims {
            Victims::LeastRecent if !all_settled => all
                .filter(|(_, place)| !settled(place))
                .max_by_key(|(_, place)| (std::cmp::Reverse(place.used), place.number)),
            Victims::Priority(_) if !all_settled => all
                .filter(|(_, place)| !settled(place))
                .map(|(at, place)| ((at, place), wish(place.rid)))
                .max_by(|((_, a), x), ((_, b), y)| x.total_cmp(y).then(a.number.cmp(&b.number)))
                .map(|(found, _)| found),
            _ => all.max_by_key(|(_, place)| place.number),
        };
        let at = victim.map(|(at, _)| at)?;
        let mut place = self.running.remove(at);
        place.set_back += 1;
        place.is_blocked = true;
        self.wait(place);
        self.full = true;
        Some(place.rid)
    }

    /// Puts a request where it came.
    fn wait(&mut self, place: Place) {
        let place = Place { is_new: false, ..place };
        let at = self.waiting.partition_point(|other| other.number < place.number);
        self.waiting.insert(at, place);
    }

    /// Has all running requests wait, where they came; they may join again at once.
    pub fn stand_aside(&mut self) -> Vec<RequestId> {
        let running = std::mem::take(&mut self.running);
        running.iter().for_each(|&place| self.wait(place));
        self.let_join();
        running.iter().map(|place| place.rid).collect()
    }

    /// Those that wait, the youngest first.
    pub fn youngest_first(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.waiting.iter().rev().map(|place| place.rid)
    }

    /// Lets requests join again before one has ended.
    pub fn let_join(&mut self) {
        self.full = false;
        self.waiting.iter_mut().for_each(|place| place.is_blocked = false);
    }

    /// Forgets a request. Where it ran, room has come free.
    pub fn remove(&mut self, rid: RequestId) {
        let ran = self.running.len();
        self.running.retain(|place| place.rid != rid);
        self.waiting.retain(|place| place.rid != rid);
        if self.running.len() < ran {
            self.let_join();
        }
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
