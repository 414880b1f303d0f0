//! Whole lives of requests over the caches of two workers, all of it in one random sequence: prompts
//! that begin alike, steps with every end, requests that leave the device and come back, that are
//! published and go on elsewhere, and that become sessions. Whatever a stream holds must be its own
//! tokens, wherever they came from; whatever a cache says that it has must have been computed by
//! somebody; and all pages come back.

use std::collections::{BTreeMap, BTreeSet};

use resource_api::{
    HostServices, KvCache, LabelId, PrefixWalk, PublishedInfo, RequestId, Resource, ResourceError,
    WalkId,
};

use super::rig::{Rig, Subject, Watch, told};
use super::step::{Row, Step};
use super::values::{Cells, extend, planned_row};

mod moves;
mod ops;
mod steps;

use ops::{LABELS, LifeOp, SLOTS, WORKERS};
pub use ops::{Life, sequence};

const NODE: resource_api::NodeId = resource_api::NodeId(0);
const WALK: WalkId = WalkId(0);
/// Tokens of a prompt that follow from one choice.
const BRANCH: usize = 4;

type Outcome = Result<(), String>;

fn fails(what: &'static str) -> impl Fn(ResourceError) -> String {
    move |e| format!("{what} fails: {}", told(&e))
}

/// Tokens of a stream, and how many pages it may have: more than those need after a reset that keeps
/// memory.
#[derive(Clone, Debug, Default)]
struct Stream {
    tokens: Vec<u32>,
    held: u64,
}

/// By label.
type Streams = BTreeMap<u32, Stream>;

#[derive(Clone, Debug, Default)]
struct Request {
    generation: u32,
    /// The prompt, then what was sampled.
    ids: Vec<u32>,
    streams: Streams,
    /// What the probe said, until it is applied.
    found: Option<u32>,
    /// Whether its streams are off the device.
    away: bool,
}

impl Request {
    fn tokens(&self, label: u32) -> &[u32] {
        self.streams.get(&label).map_or(&[], |s| &s.tokens)
    }

    fn is_empty(&self) -> bool {
        self.streams.values().all(|s| s.tokens.is_empty())
    }

    /// Whether a host would run it: one that asked takes the answer over before it goes on.
    fn may_run(&self) -> bool {
        self.found.unwrap_or(0) == 0
    }
}

/// A cache and what it should hold.
struct Worker {
    rig: Rig,
    cells: Cells,
    live: BTreeMap<u32, Request>,
    sessions: BTreeMap<u32, Streams>,
    next_step: u64,
    /// Pages that are free at first.
    total: u64,
    /// Digest of every prefix that was ever committed or arrived here.
    computed: BTreeSet<u64>,
}

/// What was published, and of what.
struct Mail {
    from: u32,
    info: PublishedInfo,
    request: Request,
}

struct World {
    workers: Vec<Worker>,
    mail: Vec<Mail>,
    generation: u32,
    next_token: u32,
}

/// Performs `ops` on fresh resources, as [`super::play::perform`] does.
///
/// # Errors
/// Which operation shows a fault, and what.
pub fn perform(subject: &Subject, ops: &[Life], watch: Watch) -> Result<usize, (usize, String)> {
    let Some(mut world) = World::new(subject, watch).map_err(|e| (0, e))? else { return Ok(0) };
    for (at, op) in ops.iter().enumerate() {
        world.workers[0].rig.say(&op.to_string());
        world.apply(op).and_then(|()| world.check()).map_err(|e| (at, e))?;
    }
    world.finish().map_err(|e| (ops.len().saturating_sub(1), e))?;
    Ok(ops.len())
}

impl World {
    fn new(subject: &Subject, watch: Watch) -> Result<Option<Self>, String> {
        let mut workers = Vec::new();
        for _ in 0..WORKERS {
            let Some(worker) = Worker::new(subject, watch)? else { return Ok(None) };
            workers.push(worker);
        }
        Ok(Some(World { workers, mail: Vec::new(), generation: 0, next_token: 1000 }))
    }

    fn apply(&mut self, Life(at, op): &Life) -> Outcome {
        match op {
            LifeOp::Ingest(slot, branches, len) => {
                let id =
                    |at: usize| at as u32 + 100 * branches.get(at / BRANCH).copied().unwrap_or(0);
                self.ingest(*at, *slot, (0..*len).map(id).collect()).map(drop)
            }
            LifeOp::Step(feed) => {
                let first = self.next_token;
                self.next_token += 1000;
                self.workers[*at as usize].feed(feed, first)
            }
            LifeOp::Publish(slot) => self.publish(*at, *slot),
            LifeOp::Retrieve(slot, nth) => self.retrieve(*at, *slot, *nth),
            LifeOp::Adopt(slot, name, quarters) => self.adopt(*at, *slot, *name, *quarters),
            LifeOp::IngestAgain(slot) => self.workers[*at as usize].ingest_again(*slot),
            LifeOp::Probe(slot) => self.workers[*at as usize].probe(*slot),
            LifeOp::Apply(slot, quarters) => self.workers[*at as usize].take_over(*slot, *quarters),
            LifeOp::Rewind(slot, label, len) => {
                self.workers[*at as usize].rewind(*slot, *label, *len)
            }
            LifeOp::Reset(slot, free) => self.workers[*at as usize].reset(*slot, *free),
            LifeOp::Remove(slot) => self.workers[*at as usize].remove(*slot),
            LifeOp::Offload(slot) => self.workers[*at as usize].offload(*slot),
            LifeOp::Reload(slot) => self.workers[*at as usize].reload(*slot),
            LifeOp::Retain(slot, name) => self.workers[*at as usize].retain(*slot, *name),
            LifeOp::Forget(name) => self.workers[*at as usize].forget(*name),
        }
    }

    /// A new request with these tokens; `false` where the slot has one.
    fn ingest(&mut self, at: u32, slot: u32, ids: Vec<u32>) -> Result<bool, String> {
        let worker = &mut self.workers[at as usize];
        if worker.live.contains_key(&slot) {
            return Ok(false);
        }
        self.generation += 1;
        let generation = self.generation;
        worker.live.insert(slot, Request { generation, ids: ids.clone(), ..Request::default() });
        worker.rig.ingest(worker.rid(slot), &ids).map_err(fails("ingest_request"))?;
        Ok(true)
    }

    fn check(&mut self) -> Outcome {
        self.workers.iter_mut().try_for_each(Worker::check)
    }

    /// Everything that was taken can be given back: what is only kept for others counts as free.
    fn finish(mut self) -> Outcome {
        for worker in &mut self.workers {
            let names: Vec<u32> = worker.sessions.keys().copied().collect();
            names.into_iter().try_for_each(|name| worker.forget(name))?;
            (0..SLOTS).try_for_each(|slot| worker.remove(slot))?;
            worker.check()?;
            let (free, total) = (worker.cells.kv.free_pages(), worker.total);
            if free != total {
                return Err(format!("after everything was removed {free} of {total} are free"));
            }
        }
        Ok(())
    }
}

impl Worker {
    fn new(subject: &Subject, watch: Watch) -> Result<Option<Self>, String> {
        let rig = subject.build_worker(watch).map_err(|e| told(&e))?;
        let Some(cells) = Cells::of(&rig)? else { return Ok(None) };
        // Names are the same everywhere; so that ids are too, they are used in one order.
        for label in 0..LABELS {
            rig.host().label_id(&rig.host().label_name(LabelId(label)));
        }
        let walk = PrefixWalk { label: LabelId::MAIN, write: WALK, decode: WALK };
        rig.say("enable_prefix_cache");
        // Without a prefix cache nothing is found, and the rest is the same.
        let opened = rig.part(cells.index).enable_prefix_cache(b"root", vec![walk]);
        opened.map_err(fails("enable_prefix_cache"))?;
        let total = cells.kv.free_pages();
        let (live, sessions, computed) = Default::default();
        Ok(Some(Worker { rig, cells, live, sessions, next_step: 1, total, computed }))
    }

    fn rid(&self, slot: u32) -> RequestId {
        RequestId::new(slot, self.live.get(&slot).map_or(u32::MAX, |r| r.generation))
    }

    fn resource(&self) -> &resource_api::ResourceHandle {
        self.rig.part(self.cells.index)
    }

    fn pages_of(&self, tokens: usize) -> u64 {
        (tokens as u64).div_ceil(self.cells.facts.page_size.into())
    }

    /// Everything that can be asked, against the reference.
    fn check(&mut self) -> Outcome {
        self.cells.kv.assert_pages_conserved().map_err(fails("assert_pages_conserved"))?;
        let mut step = Step { id: self.next_step, slot: 4, ..Step::default() };
        self.next_step += 1;
        let mut wanted = Vec::new();
        for (&slot, r) in self.live.iter().filter(|(_, r)| !r.away) {
            let rid = self.rid(slot);
            for label in 0..LABELS {
                let of = LabelId(label);
                let len = self.cells.kv.stream_len(rid, of).map_err(fails("stream_len"))?;
                let want = r.tokens(label);
                if len as usize != want.len() {
                    return Err(format!(
                        "{rid} label {label} has {len} tokens, not {}",
                        want.len()
                    ));
                }
                // Reading a stream that a lease waits for would open it.
                if r.may_run() {
                    step.rows.push(Row { rid, label: of, span: 0 });
                    wanted.push(digests(want));
                }
            }
        }
        let most: u64 = self.live.values().map(|r| self.held_by(r)).sum::<u64>()
            + self.sessions.values().flat_map(BTreeMap::values).map(|s| s.held).sum::<u64>();
        let free = self.cells.kv.free_pages();
        if free > self.total || free + most < self.total {
            return Err(format!(
                "{free} of {} pages are free, though streams have at most {most}",
                self.total
            ));
        }
        let outcome = self.rig.admit(&step).map_err(fails("admit"))?;
        if !outcome.is_ready() {
            return Err(format!("a step that reads is refused: {}", outcome.message()));
        }
        let plans = self.rig.plan(&step).map_err(fails("plan"))?;
        let plan = self.cells.plan(&plans)?;
        for (row, want) in wanted.iter().enumerate() {
            let at = planned_row(&step, plan, row).ok_or("a row is not planned")?;
            self.cells.compare(plan, at, want)?;
        }
        self.rig.commit(&step, &plans).map_err(fails("commit"))?;
        self.rig.check_fault()
    }

    /// Pages that a request has at most.
    fn held_by(&self, r: &Request) -> u64 {
        let lease = self.pages_of(r.found.unwrap_or(0) as usize);
        lease + r.streams.values().map(|s| s.held).sum::<u64>()
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
mod tests;
