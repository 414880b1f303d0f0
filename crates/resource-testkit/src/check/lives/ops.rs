//! What happens to the requests of two workers, and random sequences of it.

use std::fmt;

use super::super::random::Random;

/// Workers, each with a cache of its own.
pub const WORKERS: u32 = 2;
/// Requests of a worker.
pub const SLOTS: u32 = 3;
/// Streams of a request. The first has the prompt and what was sampled after it.
pub const LABELS: u32 = 3;
/// Names of sessions.
const NAMES: u32 = 2;

/// How a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As it should.
    Commit,
    /// It writes and is not kept.
    Discard,
    /// It writes and is given up.
    RollBack,
    /// Planned ahead, promoted, committed.
    Promote,
    /// Planned ahead and dropped.
    Drop,
    /// A request goes before `plan`.
    LeaveEarly(u32),
    /// A request goes before `commit`.
    LeaveLate(u32),
}

/// A step.
#[derive(Clone, Debug)]
pub struct Feed {
    /// Request, label, and how many tokens at most.
    pub rows: Vec<(u32, u32, u32)>,
    /// Spans of padding rows.
    pub padding: Vec<u32>,
    /// A copy before it or (true) after it: request, from, to.
    pub copy: Option<(u32, u32, u32, bool)>,
    /// Whether the resource hears what was sampled.
    pub told: bool,
    /// How it ends.
    pub end: End,
}

/// One operation on a worker; requests are named by slot.
#[derive(Clone, Debug)]
pub enum LifeOp {
    /// A request whose prompt takes one of two branches every few tokens, cut to so many tokens.
    Ingest(u32, Vec<u32>, usize),
    /// Tells of it again.
    IngestAgain(u32),
    /// Asks what of it is cached, several times.
    Probe(u32),
    /// Takes over so many quarters of that.
    Apply(u32, u32),
    /// Runs a step.
    Step(Feed),
    /// Sets a stream back to so many tokens.
    Rewind(u32, u32, u32),
    /// Empties a request.
    Reset(u32, bool),
    /// Forgets it.
    Remove(u32),
    /// Moves it off the device.
    Offload(u32),
    /// And back.
    Reload(u32),
    /// Publishes it for the other worker.
    Publish(u32),
    /// A new request goes on with what was published.
    Retrieve(u32, u32),
    /// Keeps its streams as a session.
    Retain(u32, u32),
    /// A new request goes on with so many quarters of a session.
    Adopt(u32, u32, u32),
    /// Forgets a session.
    Forget(u32),
}

/// An operation and the worker that it happens on.
#[derive(Clone, Debug)]
pub struct Life(pub u32, pub LifeOp);

fn feed(random: &mut Random) -> Feed {
    let mut rows: Vec<(u32, u32, u32)> = (0..1 + random.below(4))
        .map(|_| {
            let label = random.pick(&[(5, 0), (1, 1), (1, 2)]);
            (random.below(SLOTS), label, random.below(10))
        })
        .collect();
    rows.sort();
    rows.dedup_by_key(|r| (r.0, r.1));
    let padding = match random.chance(20) {
        true => (0..1 + random.below(2)).map(|_| random.below(3)).collect(),
        false => Vec::new(),
    };
    let (slot, from, to) =
        (random.below(SLOTS), random.below(LABELS), 1 + random.below(LABELS - 1));
    let copy = (random.chance(15) && from != to).then_some((slot, from, to, random.chance(50)));
    let end = random.pick(&[
        (10, End::Commit),
        (1, End::Discard),
        (2, End::RollBack),
        (3, End::Promote),
        (1, End::Drop),
        (1, End::LeaveEarly(slot)),
        (1, End::LeaveLate(slot)),
    ]);
    Feed { rows, padding, copy, told: random.chance(70), end }
}

/// About `count` random operations. Most requests are asked for before they run, as a host does it.
pub fn sequence(random: &mut Random, count: usize) -> Vec<Life> {
    let mut ops = Vec::new();
    while ops.len() < count {
        // One worker does most, so that its pool fills up.
        let worker = random.pick(&[(3, 0), (1, 1)]);
        let mut push = |op| ops.push(Life(worker, op));
        let slot = random.below(SLOTS);
        let quarters = random.pick(&[(5, 4), (1, 3), (1, 2), (1, 0)]);
        match random.below(40) {
            0..=9 => {
                let branches: Vec<u32> = (0..4).map(|_| u32::from(random.chance(30))).collect();
                push(LifeOp::Ingest(slot, branches, 1 + random.below(14) as usize));
                if random.chance(80) {
                    push(LifeOp::Probe(slot));
                }
                if random.chance(70) {
                    push(LifeOp::Apply(slot, quarters));
                }
            }
            10 => push(LifeOp::IngestAgain(slot)),
            11 => push(LifeOp::Probe(slot)),
            12 => push(LifeOp::Apply(slot, random.below(5))),
            13 => push(LifeOp::Rewind(slot, 1 + random.below(LABELS - 1), random.below(8))),
            14..=15 => {
                let (free, leaves) = (random.chance(50), random.chance(50));
                if !free && leaves {
                    // Pages that nobody shares, so that they stay.
                    let rows = vec![(slot, 1, 1 + random.below(4))];
                    let (told, end) = (true, End::Commit);
                    push(LifeOp::Step(Feed { rows, padding: Vec::new(), copy: None, told, end }));
                }
                push(LifeOp::Reset(slot, free));
                if !free && leaves {
                    // Without tokens they leave, are asked for meanwhile, and come back.
                    push(LifeOp::Offload(slot));
                    push(LifeOp::Probe(slot));
                    push(LifeOp::Reload(slot));
                    push(LifeOp::Probe(slot));
                    push(LifeOp::Apply(slot, quarters));
                }
            }
            16..=17 => push(LifeOp::Remove(slot)),
            18..=19 => {
                push(LifeOp::Offload(slot));
                if random.chance(50) {
                    push(LifeOp::Step(feed(random)));
                    push(LifeOp::Reload(slot));
                }
            }
            20..=21 => push(LifeOp::Reload(slot)),
            22..=23 => push(LifeOp::Publish(slot)),
            24..=25 => {
                // Both want a slot of nobody.
                push(LifeOp::Remove(slot));
                push(LifeOp::Retrieve(slot, random.below(4)));
            }
            26..=27 => {
                let name = random.below(NAMES);
                push(LifeOp::Retain(slot, name));
                if random.chance(60) {
                    push(LifeOp::Remove(slot));
                    push(LifeOp::Adopt(slot, name, 1 + random.below(4)));
                }
            }
            28 => {
                push(LifeOp::Remove(slot));
                push(LifeOp::Adopt(slot, random.below(NAMES), 1 + random.below(4)));
            }
            29 => push(LifeOp::Forget(random.below(NAMES))),
            _ => push(LifeOp::Step(feed(random))),
        }
    }
    ops
}

impl fmt::Display for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step (request, label, at most tokens): {:?}", self.rows)?;
        if !self.padding.is_empty() {
            write!(f, ", padding rows of {:?}", self.padding)?;
        }
        if let Some((slot, from, to, after)) = self.copy {
            let when = if after { "after" } else { "before" };
            write!(f, ", {when} it label {from} of request {slot} copied to {to}")?;
        }
        match self.end {
            End::Commit if self.told => f.write_str("; commit, outputs told"),
            End::Commit => f.write_str("; commit"),
            End::Discard => f.write_str("; not kept (commit = false)"),
            End::RollBack => f.write_str("; rolled back after it has written"),
            End::Promote => f.write_str("; planned ahead, promoted, commit"),
            End::Drop => f.write_str("; planned ahead, dropped"),
            End::LeaveEarly(slot) => write!(f, "; request {slot} goes before plan, commit"),
            End::LeaveLate(slot) => write!(f, "; request {slot} goes before commit"),
        }
    }
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}: ", self.0)?;
        match &self.1 {
            LifeOp::Ingest(s, branches, len) => {
                write!(f, "ingest request {s}: {len} tokens over the branches {branches:?}")
            }
            LifeOp::IngestAgain(s) => write!(f, "ingest request {s} again"),
            LifeOp::Probe(s) => write!(f, "resolve_cached_prefix of request {s}, three times"),
            LifeOp::Apply(s, n) => write!(f, "apply_cached_prefix of request {s}: {n}/4 of it"),
            LifeOp::Step(feed) => feed.fmt(f),
            LifeOp::Rewind(s, l, n) => write!(f, "rewind label {l} of request {s} to {n} tokens"),
            LifeOp::Reset(s, free) => write!(f, "reset request {s}, free = {free}"),
            LifeOp::Remove(s) => write!(f, "remove request {s}"),
            LifeOp::Offload(s) => write!(f, "offload request {s}"),
            LifeOp::Reload(s) => write!(f, "reload request {s}"),
            LifeOp::Publish(s) => write!(f, "publish request {s}"),
            LifeOp::Retrieve(s, n) => write!(f, "request {s} retrieves publication {n}"),
            LifeOp::Retain(s, name) => write!(f, "request {s} becomes session {name}"),
            LifeOp::Adopt(s, name, n) => write!(f, "request {s} adopts {n}/4 of session {name}"),
            LifeOp::Forget(name) => write!(f, "forget session {name}"),
        }
    }
}
