//! Random requests with common beginnings over a cache that keeps prefixes. Whatever it says that it
//! has must have been computed by somebody, and must hold the tokens of whoever takes it over.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use resource_api::{
    KvCache, LabelId, NodeId, PrefixInputs, PrefixWalk, RequestId, Resource, ResourceError, WalkId,
};

use super::random::Random;
use super::rig::{LIMITS, Rig, Subject, Watch, told};
use super::step::{Row, Step};
use super::values::{Cells, extend, planned_row};

const NODE: NodeId = NodeId(0);
const WALK: WalkId = WalkId(0);
/// Requests that sequences play with.
const SLOTS: u32 = 4;
/// Tokens of a prompt that follow from one choice.
const BRANCH: usize = 4;

/// One operation.
#[derive(Clone, Debug)]
pub enum PrefixOp {
    /// A request whose prompt takes one of two branches every few tokens, cut to so many tokens.
    Ingest(u32, Vec<u32>, usize),
    /// Asks what of it is there, several times.
    Probe(u32),
    /// Takes over so many quarters of that.
    Apply(u32, u32),
    /// Runs up to so many tokens of each; given up in the end, or not.
    Feed(Vec<(u32, u32)>, bool),
    /// Empties a request.
    Reset(u32, bool),
    /// Forgets it.
    Remove(u32),
}

impl fmt::Display for PrefixOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ingest(s, branches, len) => {
                write!(f, "ingest request {s}: {len} tokens over the branches {branches:?}")
            }
            Self::Probe(s) => write!(f, "resolve_cached_prefix of request {s}, three times"),
            Self::Apply(s, n) => write!(f, "apply_cached_prefix of request {s}: {n}/4 of it"),
            Self::Feed(rows, true) => write!(f, "step (request, at most tokens): {rows:?}"),
            Self::Feed(rows, false) => write!(f, "step {rows:?}, rolled back"),
            Self::Reset(s, free) => write!(f, "reset request {s}, free = {free}"),
            Self::Remove(s) => write!(f, "remove request {s}"),
        }
    }
}

/// About `count` random operations. Most requests are asked for before they run, as a host does it.
pub fn sequence(random: &mut Random, count: usize) -> Vec<PrefixOp> {
    let mut ops = Vec::new();
    while ops.len() < count {
        let slot = random.below(SLOTS);
        match random.below(20) {
            0..=5 => {
                let branches: Vec<u32> = (0..4).map(|_| u32::from(random.chance(30))).collect();
                ops.push(PrefixOp::Ingest(slot, branches, 1 + random.below(14) as usize));
                if random.chance(80) {
                    ops.push(PrefixOp::Probe(slot));
                }
                if random.chance(70) {
                    ops.push(PrefixOp::Apply(slot, random.pick(&[(5, 4), (1, 3), (1, 2), (1, 0)])));
                }
            }
            6..=7 => ops.push(PrefixOp::Probe(slot)),
            8..=9 => ops.push(PrefixOp::Apply(slot, random.below(5))),
            10..=15 => {
                let mut rows: Vec<(u32, u32)> = (0..1 + random.below(3))
                    .map(|_| (random.below(SLOTS), 1 + random.below(10)))
                    .collect();
                rows.sort();
                rows.dedup_by_key(|r| r.0);
                ops.push(PrefixOp::Feed(rows, !random.chance(15)));
            }
            16 | 17 => ops.push(PrefixOp::Reset(slot, random.chance(50))),
            _ => ops.push(PrefixOp::Remove(slot)),
        }
    }
    ops
}

#[derive(Clone, Debug, Default)]
struct Request {
    generation: u32,
    /// The prompt, then what was generated.
    ids: Vec<u32>,
    /// How many of them the stream holds.
    len: usize,
    /// What the probe said, until it is applied.
    found: Option<u32>,
}

struct Play {
    rig: Rig,
    cells: Cells,
    live: BTreeMap<u32, Request>,
    generation: u32,
    next_step: u64,
    total: u64,
    /// Digest of every prefix that was ever committed.
    computed: BTreeSet<u64>,
}

type Outcome = Result<(), String>;

fn fails(what: &'static str) -> impl Fn(ResourceError) -> String {
    move |e| format!("{what} fails: {}", told(&e))
}

/// Whether the resource keeps prefixes at all.
///
/// # Errors
/// When it cannot be built, or fails in `enable_prefix_cache`.
pub fn keeps_prefixes(subject: &Subject, watch: Watch) -> Result<bool, String> {
    Ok(Play::new(subject, watch)?.is_some())
}

/// Performs `ops` on a fresh resource, as [`super::play::perform`] does.
///
/// # Errors
/// Which operation shows a fault, and what.
pub fn perform(
    subject: &Subject,
    ops: &[PrefixOp],
    watch: Watch,
) -> Result<usize, (usize, String)> {
    let Some(mut play) = Play::new(subject, watch).map_err(|e| (0, e))? else { return Ok(0) };
    for (at, op) in ops.iter().enumerate() {
        play.rig.say(&op.to_string());
        let done = play.apply(op).and_then(|()| play.check());
        done.and_then(|()| play.rig.check_fault()).map_err(|e| (at, e))?;
    }
    play.finish().map_err(|e| (ops.len().saturating_sub(1), e))?;
    Ok(ops.len())
}

impl Play {
    fn new(subject: &Subject, watch: Watch) -> Result<Option<Self>, String> {
        let rig = subject.build(watch).map_err(|e| told(&e))?;
        let Some(cells) = Cells::of(&rig)? else { return Ok(None) };
        let walk = PrefixWalk { label: LabelId::MAIN, write: WALK, decode: WALK };
        rig.say("enable_prefix_cache");
        let opened = rig.part(cells.index).enable_prefix_cache(b"root", vec![walk]);
        if !opened.map_err(fails("enable_prefix_cache"))? {
            return Ok(None);
        }
        let total = cells.kv.free_pages();
        let (live, computed) = Default::default();
        Ok(Some(Play { rig, cells, live, generation: 0, next_step: 1, total, computed }))
    }

    fn rid(&self, slot: u32) -> RequestId {
        RequestId::new(slot, self.live.get(&slot).map_or(u32::MAX, |r| r.generation))
    }

    fn apply(&mut self, op: &PrefixOp) -> Outcome {
        let rid = |slot: &u32| self.rid(*slot);
        match op {
            PrefixOp::Ingest(slot, branches, len) => self.ingest(*slot, branches, *len),
            PrefixOp::Probe(slot) => self.probe(*slot),
            PrefixOp::Apply(slot, quarters) => self.take_over(*slot, *quarters),
            PrefixOp::Feed(rows, kept) => self.feed(rows, *kept),
            PrefixOp::Reset(slot, free) => {
                let rid = rid(slot);
                let reset = |r: &resource_api::ResourceHandle| r.reset_request(rid, *free);
                self.rig.each("reset_request", reset).map_err(fails("reset_request"))?;
                if let Some(r) = self.live.get_mut(slot) {
                    (r.len, r.found) = (0, None);
                }
                Ok(())
            }
            PrefixOp::Remove(slot) => {
                self.rig.remove(rid(slot)).map_err(fails("remove_request"))?;
                self.live.remove(slot);
                Ok(())
            }
        }
    }

    fn ingest(&mut self, slot: u32, branches: &[u32], len: usize) -> Outcome {
        if self.live.contains_key(&slot) {
            return Ok(());
        }
        let id = |at: usize| at as u32 + 100 * branches.get(at / BRANCH).copied().unwrap_or(0);
        let ids: Vec<u32> = (0..len).map(id).collect();
        self.generation += 1;
        let generation = self.generation;
        self.live.insert(slot, Request { generation, ids: ids.clone(), ..Request::default() });
        self.rig.ingest(self.rid(slot), &ids).map_err(fails("ingest_request"))
    }

    fn probe(&mut self, slot: u32) -> Outcome {
        let rid = self.rid(slot);
        let Some(request) = self.live.get(&slot).filter(|r| r.len == 0).cloned() else {
            return Ok(());
        };
        let mut first = request.found;
        for _ in 0..3 {
            self.rig.say(&format!("resolve_cached_prefix {rid}"));
            let found = self.rig.part(self.cells.index).resolve_cached_prefix(rid, NODE, WALK);
            let found = found.map_err(fails("resolve_cached_prefix"))?.unwrap_or(0);
            if first.is_some_and(|f| f != found && f > 0) {
                return Err(format!("asked again, it has {found} tokens and not {first:?}"));
            }
            // After a reset, what was generated is known like the prompt.
            if found as usize >= request.ids.len() {
                let known = request.ids.len();
                return Err(format!("it has {found} of {known} tokens: none is left to compute"));
            }
            if found > 0 && !self.computed.contains(&digest(&request.ids[..found as usize])) {
                return Err(format!("it has {found} tokens that nobody has computed"));
            }
            first = Some(found);
        }
        if let Some(r) = self.live.get_mut(&slot) {
            r.found = first;
        }
        Ok(())
    }

    fn take_over(&mut self, slot: u32, quarters: u32) -> Outcome {
        let rid = self.rid(slot);
        let page = self.cells.facts.page_size;
        let Some(r) = self.live.get_mut(&slot).filter(|r| r.found > Some(0) && r.len == 0) else {
            return Ok(());
        };
        let matched = r.found.take().unwrap_or(0) * quarters / 4;
        let inputs = PrefixInputs::new(&r.ids);
        let part = self.rig.part(self.cells.index);
        self.rig.say(&format!("apply_cached_prefix {rid} {matched}"));
        match part.apply_cached_prefix(rid, NODE, WALK, &inputs, matched) {
            Ok(()) => r.len = matched as usize,
            // Only a cut within a page needs one of its own, and may find none.
            Err(e) if matched.is_multiple_of(page) => return Err(fails("apply_cached_prefix")(e)),
            Err(_) => {}
        }
        Ok(())
    }

    fn feed(&mut self, rows: &[(u32, u32)], kept: bool) -> Outcome {
        let id = self.next_step;
        self.next_step += 1;
        let mut step = Step { id, slot: (id % 3) as u32, ..Step::default() };
        for &(slot, most) in rows {
            // A host that asked takes the answer over before it goes on.
            let Some(r) = self.live.get(&slot).filter(|r| r.found.unwrap_or(0) == 0) else {
                continue;
            };
            let left = r.ids.len() - r.len;
            let span = if left == 0 { 1 } else { left.min(most as usize) };
            if r.len + span > LIMITS.max_model_len.min(self.cells.facts.max_seq_len) as usize {
                continue;
            }
            step.tokens.extend(&r.ids[r.len..r.len + span.min(left)]);
            if left == 0 {
                step.tokens.push(500 + (id % 2) as u32);
            }
            step.rows.push(Row { rid: self.rid(slot), label: LabelId::MAIN, span: span as u32 });
        }
        let outcome = self.rig.admit(&step).map_err(fails("admit"))?;
        if !outcome.is_ready() {
            return self.may_refuse(&step, &outcome.message());
        }
        let plans = self.rig.plan(&step).map_err(fails("plan"))?;
        let (mut tokens, mut reads, mut first) = (Vec::new(), Vec::new(), 0);
        for row in &step.rows {
            let r = &self.live[&row.rid.slot];
            let own = &step.tokens[first..first + row.span as usize];
            first += own.len();
            let mut read = digests(&r.ids[..r.len]);
            for &id in own {
                read.push(extend(read.last().copied().unwrap_or(0), id));
            }
            tokens.extend(&read[r.len..]);
            reads.push(read);
        }
        self.cells.write(&self.rig, &step, &plans, &tokens)?;
        let plan = self.cells.plan(&plans)?;
        for (row, want) in reads.iter().enumerate() {
            let at = planned_row(&step, plan, row).ok_or("a row is not planned")?;
            self.cells.compare(plan, at, want).map_err(|e| format!("{step}: {e}"))?;
        }
        if !kept {
            return self.rig.rollback(&step).map_err(fails("rollback_admit"));
        }
        self.rig.commit(&step, &plans).map_err(fails("commit"))?;
        let mut first = 0;
        for (row, read) in step.rows.iter().zip(reads) {
            let own = &step.tokens[first..first + row.span as usize];
            first += own.len();
            if let Some(r) = self.live.get_mut(&row.rid.slot) {
                let known = (r.ids.len() - r.len).min(own.len());
                r.ids.extend(&own[known..]);
                r.len += own.len();
            }
            self.computed.extend(read);
        }
        Ok(())
    }

    /// A refusal is right only where all of the step's tokens together need more than is free.
    fn may_refuse(&self, step: &Step, why: &str) -> Outcome {
        let page = u64::from(self.cells.facts.page_size);
        let most: u64 = step.rows.iter().map(|r| u64::from(r.span).div_ceil(page) + 1).sum();
        match self.cells.kv.free_pages() >= most {
            true => Err(format!("{step} fits and is refused: {why}")),
            false => Ok(()),
        }
    }

    fn check(&mut self) -> Outcome {
        self.cells.kv.assert_pages_conserved().map_err(fails("assert_pages_conserved"))?;
        let mut step = Step { id: self.next_step, slot: 4, ..Step::default() };
        self.next_step += 1;
        for (&slot, r) in &self.live {
            let rid = self.rid(slot);
            let len = self.cells.kv.stream_len(rid, LabelId::MAIN).map_err(fails("stream_len"))?;
            if len as usize != r.len {
                return Err(format!("{rid} has {len} tokens, not {}", r.len));
            }
            step.rows.push(Row { rid, label: LabelId::MAIN, span: 0 });
        }
        let outcome = self.rig.admit(&step).map_err(fails("admit"))?;
        if !outcome.is_ready() {
            return Err(format!("a step that reads is refused: {}", outcome.message()));
        }
        let plans = self.rig.plan(&step).map_err(fails("plan"))?;
        let plan = self.cells.plan(&plans)?;
        for (row, r) in self.live.values().enumerate() {
            let at = planned_row(&step, plan, row).ok_or("a row is not planned")?;
            self.cells.compare(plan, at, &digests(&r.ids[..r.len]))?;
        }
        self.rig.commit(&step, &plans).map_err(fails("commit"))
    }

    /// Everything that was taken can be given back: what is only kept for others counts as free.
    fn finish(mut self) -> Outcome {
        for slot in 0..SLOTS {
            self.apply(&PrefixOp::Remove(slot))?;
        }
        self.check()?;
        let free = self.cells.kv.free_pages();
        match free == self.total {
            true => Ok(()),
            false => Err(format!("after everything was removed {free} of {} are free", self.total)),
        }
    }
}

fn digests(ids: &[u32]) -> Vec<u64> {
    let mut history = 0;
    ids.iter()
        .map(|&id| {
            history = extend(history, id);
            history
        })
        .collect()
}

fn digest(ids: &[u32]) -> u64 {
    digests(ids).last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FakeCache;

    #[test]
    fn sequences_find_prefixes_and_take_them_over() {
        let subject = Subject::new(resource_api::kind::<FakeCache>(), "{}").unwrap();
        let (mut hits, mut taken) = (0, 0);
        for seed in 0..20 {
            let mut play = Play::new(&subject, |_| {}).unwrap().unwrap();
            for op in sequence(&mut Random::new(seed), 40) {
                let found = |play: &Play| -> Vec<u32> {
                    play.live.values().filter_map(|r| r.found).filter(|&n| n > 0).collect()
                };
                let before = found(&play).len();
                play.apply(&op).unwrap();
                match op {
                    PrefixOp::Probe(_) => hits += found(&play).len() - before,
                    PrefixOp::Apply(..) => taken += before - found(&play).len(),
                    _ => {}
                }
            }
        }
        assert!(hits > 12 && taken > 8, "{hits} hits, {taken} taken over");
    }
}
