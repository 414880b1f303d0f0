//! Operations on a paged cache, and random sequences of them.

use std::fmt;

use super::random::Random;

/// Requests that sequences play with.
pub const SLOTS: u32 = 3;
/// Streams of a request.
pub const LABELS: u32 = 3;

/// A stream's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row3 {
    /// Slot of the request.
    pub slot: u32,
    /// The stream.
    pub label: u32,
    /// Tokens that are added.
    pub span: u32,
}

/// What a step consists of. Requests are named by slot.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    /// Sorted, each stream once.
    pub rows: Vec<Row3>,
    /// Spans of padding rows after them.
    pub padding: Vec<u32>,
    /// Do not keep what is added.
    pub discard: bool,
    /// A copy before the step: request, from, to.
    pub pre: Option<(u32, u32, u32)>,
    /// A copy after it.
    pub post: Option<(u32, u32, u32)>,
    /// A window that is kept after it.
    pub retain: Option<Keep>,
    /// Labels 0 and 1 are planned under one, the second first.
    pub combined: bool,
}

/// How much of a stream to keep after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Slot of the request.
    pub slot: u32,
    /// The stream.
    pub label: u32,
    /// Tokens at the end.
    pub budget: u32,
    /// Tokens at the front.
    pub prefix: u32,
}

/// How a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// As it should.
    Commit,
    /// Given up after `admit`.
    RollBackAdmitted,
    /// Given up after the forward pass.
    RollBackWritten,
    /// Planned ahead, promoted, committed.
    StageAndCommit,
    /// Planned ahead and dropped.
    StageAndClear,
    /// Admitted ahead and dropped.
    AdmitAheadAndClear,
    /// Planned ahead; another step comes first.
    StageAndReplace,
    /// A request goes between `admit` and `plan`.
    CancelBeforePlan(u32),
    /// A request goes between the forward pass and `commit`.
    CancelBeforeCommit(u32),
}

/// One operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// Tells of a request; again where it is known.
    Ingest(u32),
    /// Forgets it, known or not.
    Remove(u32),
    /// Late calls with the id of the slot's last owner.
    Late(u32),
    /// Empties its streams.
    Reset(u32, bool),
    /// Sets a stream's length back.
    Rewind(u32, u32, u32),
    /// Moves a request off the device.
    Offload(u32),
    /// And back.
    Reload(u32),
    /// A step.
    Step(Shape, Fate),
    /// A step, and another planned while that runs, which has the fate.
    Overlap(Shape, Shape, Fate),
}

fn shape(random: &mut Random, plain: bool) -> Shape {
    let mut rows: Vec<Row3> = (0..random.below(5))
        .map(|_| Row3 {
            slot: random.below(SLOTS),
            label: random.below(LABELS),
            span: random.below(7),
        })
        .collect();
    rows.sort();
    rows.dedup_by_key(|r| (r.slot, r.label));
    let mut fork = |percent| {
        let copy = (random.below(SLOTS), random.below(LABELS), random.below(LABELS));
        (random.chance(percent) && copy.1 != copy.2).then_some(copy)
    };
    let (pre, post) = if plain { (None, None) } else { (fork(30), fork(30)) };
    let padding = match random.chance(25) {
        true => (0..random.below(3) + 1).map(|_| random.below(3)).collect(),
        false => Vec::new(),
    };
    // Mostly of a stream that the step extends: others seldom have much to let go.
    let of_row = rows.first().filter(|_| random.chance(70)).map(|r| (r.slot, r.label));
    let (slot, label) = of_row.unwrap_or((random.below(SLOTS), random.below(LABELS)));
    let retain = random.chance(15).then(|| Keep {
        slot,
        label,
        budget: random.below(5) + 1,
        // One that grows would be refused.
        prefix: if random.chance(30) { 2 } else { 0 },
    });
    let combined = random.chance(10);
    let discard = random.chance(if retain.is_some() { 30 } else { 12 });
    Shape { rows, padding, discard, pre, post, retain, combined }
}

fn fate(random: &mut Random) -> Fate {
    let slot = random.below(SLOTS);
    random.pick(&[
        (8, Fate::Commit),
        (2, Fate::RollBackAdmitted),
        (3, Fate::RollBackWritten),
        (3, Fate::StageAndCommit),
        (2, Fate::StageAndClear),
        (1, Fate::AdmitAheadAndClear),
        (1, Fate::StageAndReplace),
        (1, Fate::CancelBeforePlan(slot)),
        (1, Fate::CancelBeforeCommit(slot)),
    ])
}

/// `count` random operations, after one that makes the first requests known.
pub fn sequence(random: &mut Random, count: usize) -> Vec<Op> {
    let mut ops = vec![Op::Ingest(0), Op::Ingest(1)];
    while ops.len() < count {
        let (slot, label) = (random.below(SLOTS), random.below(LABELS));
        ops.push(match random.below(24) {
            0..=2 => Op::Ingest(slot),
            3 => Op::Remove(slot),
            4 => Op::Late(slot),
            5 => Op::Reset(slot, random.chance(50)),
            6 => Op::Rewind(slot, label, random.below(20)),
            7 => Op::Offload(slot),
            8..=9 => Op::Reload(slot),
            10..=19 => Op::Step(shape(random, false), fate(random)),
            _ => Op::Overlap(shape(random, true), shape(random, true), fate(random)),
        });
    }
    ops
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |r: &Row3| format!("{} tokens of request {} label {}", r.span, r.slot, r.label);
        let rows: Vec<String> = self.rows.iter().map(row).collect();
        f.write_str(if rows.is_empty() { "nothing" } else { "" })?;
        f.write_str(&rows.join(", "))?;
        if !self.padding.is_empty() {
            write!(f, ", padding rows of {:?}", self.padding)?;
        }
        if let Some((slot, from, to)) = self.pre {
            write!(f, ", before it label {from} of request {slot} copied to {to}")?;
        }
        if let Some((slot, from, to)) = self.post {
            write!(f, ", after it label {from} of request {slot} copied to {to}")?;
        }
        if let Some(Keep { slot, label, budget, prefix }) = self.retain {
            write!(f, ", keeping {prefix} + {budget} tokens of label {label} of request {slot}")?;
        }
        f.write_str(if self.combined { ", labels 1 and 0 planned as one" } else { "" })?;
        f.write_str(if self.discard { ", not kept (commit = false)" } else { "" })
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Commit => f.write_str("commit"),
            Self::RollBackAdmitted => f.write_str("admit, roll back"),
            Self::RollBackWritten => f.write_str("admit, plan, write, roll back"),
            Self::StageAndCommit => f.write_str("plan ahead, promote, commit"),
            Self::StageAndClear => f.write_str("plan ahead, drop"),
            Self::AdmitAheadAndClear => f.write_str("admit ahead, drop"),
            Self::StageAndReplace => f.write_str("plan ahead, another step comes first"),
            Self::CancelBeforePlan(s) => write!(f, "request {s} goes before plan, commit"),
            Self::CancelBeforeCommit(s) => write!(f, "request {s} goes before commit"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ingest(s) => write!(f, "ingest request {s}"),
            Self::Remove(s) => write!(f, "remove request {s}"),
            Self::Late(s) => write!(f, "late calls for the last owner of slot {s}"),
            Self::Reset(s, free) => write!(f, "reset request {s}, free = {free}"),
            Self::Rewind(s, l, n) => write!(f, "rewind label {l} of request {s} to {n} tokens"),
            Self::Offload(s) => write!(f, "offload request {s}"),
            Self::Reload(s) => write!(f, "reload request {s}"),
            Self::Step(shape, fate) => write!(f, "step: {shape}; {fate}"),
            Self::Overlap(a, b, fate) => write!(f, "step: {a}; meanwhile planned: {b}; {fate}"),
        }
    }
}
