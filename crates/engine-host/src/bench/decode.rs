//! Decode steps, without page ends and with a sixteenth of the requests at one.
//!
//! A page ends in two steps: one writes its last slot, and its key enters the index; the next takes
//! another page, which then enters the table of every slot as that slot comes round. Requests that
//! all begin at a page's start have steps far from all of that; requests that begin at every offset
//! have an equal share of it in every step.

use std::time::Instant;

use super::rig::{Check, PAGE, Rig, SLOTS, Stream, Times};
use super::shapes::Shape;
use super::stats::Summary;
use crate::error::Result;

/// Steps before anything counts.
pub const WARM: u32 = 64;
/// The plan of one step in so many is compared with the ledger. Prime to the number of slots and to
/// the page size, so that all slots and offsets get their turn.
pub const PERIOD: u32 = 37;
/// Steps after a comparison, which reads whole tables, until the caches are as they were: what a page's
/// end touches is touched again after as many steps as a page has slots.
const REWARM: u32 = PAGE + SLOTS;
/// Batches up to this are quick beside a reading of the clock: samples are means of several steps.
const QUICK: u32 = 8;

/// What was measured of one kind of step.
#[derive(Clone, Debug, Default)]
pub struct Decode {
    /// Steps that count.
    pub steps: u64,
    /// Writing the description.
    pub declare: Summary,
    /// `admit` and `plan`.
    pub start: Summary,
    /// `commit`.
    pub commit: Summary,
    /// `on_outputs` and giving the slot back.
    pub outputs: Summary,
    /// `start`, `commit` and `outputs` together.
    pub total: Summary,
    /// `publish_for_step` of every request.
    pub publish: Summary,
    /// Allocations per step, where they can be counted.
    pub allocations: Option<f64>,
    /// Bytes of plans written per step, page tables left out.
    pub bytes: u64,
    /// Page ends per step.
    pub page_ends: f64,
    /// Pages that the batch holds, on average.
    pub pages: f64,
    /// Plans compared with the ledger.
    pub compared: u64,
    /// Tokens of a request while it was measured: first and last.
    pub tokens: (u32, u32),
}

/// Which steps count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// Those far from a page's end.
    None,
    /// All: a sixteenth of the requests ends a page in each.
    Sixteenth,
}

impl Ends {
    /// Lengths at which the requests begin.
    pub fn lens(self, shape: &Shape) -> Vec<u32> {
        let whole = shape.context.next_multiple_of(PAGE);
        let len = |i: u32| match self {
            Self::None => whole,
            Self::Sixteenth => (shape.context - (i % PAGE).min(shape.context - 1)).max(1),
        };
        (0..shape.batch).map(len).collect()
    }

    /// Whether a step counts whose first request has so many tokens before it.
    pub fn counts(self, len: u32) -> bool {
        match self {
            // The slots have all taken the last new page on, and the next end is to come.
            Self::None => (SLOTS..PAGE - 1).contains(&(len % PAGE)),
            Self::Sixteenth => true,
        }
    }
}

/// Times `wanted` steps of this kind.
///
/// # Errors
/// What a resource says, or a plan that is not what the ledger says.
pub fn measure(rig: &mut Rig, shape: &Shape, ends: Ends, wanted: usize) -> Result<Decode> {
    let mut samples = Samples::new(wanted, block(shape, ends));
    let mut result = Decode { tokens: (u32::MAX, 0), ..Decode::default() };
    let compared = rig.ledger.compared;
    let mut published = Vec::new();
    while samples.len() < wanted {
        let steps = shape.steps();
        let mut streams = rig.population(&ends.lens(shape), steps + 1)?;
        for n in 0..steps - PAGE {
            if samples.len() >= wanted {
                break;
            }
            let at = n % PERIOD;
            let check = if at == 0 { Check::Compare } else { Check::Record };
            let len = streams[0].len;
            let times = rig.step(&mut streams, None, check)?;
            published.extend(times.publish);
            let counts = n >= WARM.min(steps / 4) && at > REWARM && ends.counts(len);
            if counts {
                samples.add(&times);
                result.tokens.0 = result.tokens.0.min(len);
                result.tokens.1 = result.tokens.1.max(len);
                result.pages += f64::from(len.div_ceil(PAGE));
            } else {
                samples.interrupt();
            }
        }
        rig.ledger.disjoint(&streams)?;
        result.bytes = bytes_of_a_step(rig, &mut streams)?;
        rig.end_all(&streams)?;
    }
    result.compared = rig.ledger.compared - compared;
    result.publish = Summary::of(&mut published, 1.0);
    result.pages *= f64::from(shape.batch) / samples.counted.max(1) as f64;
    result.page_ends = match ends {
        Ends::None => 0.0,
        Ends::Sixteenth => f64::from(shape.batch) / f64::from(PAGE),
    };
    samples.finish(&mut result, rig.allocations.is_some());
    Ok(result)
}

/// What `count` steps in a row took, and what a loop took beside them that computes as long and touches no
/// memory: steps that are longer than any of the loop's are our own, the others the machine's.
#[derive(Clone, Copy, Debug, Default)]
pub struct Longest {
    /// The steps.
    pub steps: Summary,
    /// The loop.
    pub control: Summary,
    /// How many of each took more than three medians.
    pub above: [usize; 2],
}

/// Times `count` steps in a row, and the loop after each.
///
/// # Errors
/// As for [`measure`].
pub fn longest(rig: &mut Rig, shape: &Shape, count: u32) -> Result<Longest> {
    let mut streams = rig.population(&Ends::Sixteenth.lens(shape), count + WARM + 1)?;
    let mut times = [const { Vec::<u64>::new() }; 2];
    times.iter_mut().for_each(|times| times.reserve(count as usize));
    let mut rounds = 0;
    for n in 0..count + WARM {
        let step = rig.step(&mut streams, None, Check::Record)?.total();
        let start = Instant::now();
        compute(rounds);
        let control = rig.nanos(start, Instant::now());
        match n < WARM {
            // As long as the step was, with what is known of the loop so far.
            true => rounds = rounds_for(step),
            false => [step, control].into_iter().zip(&mut times).for_each(|(t, all)| all.push(t)),
        }
    }
    rig.step(&mut streams, None, Check::Compare)?;
    rig.ledger.disjoint(&streams)?;
    rig.end_all(&streams)?;
    let [steps, control] = times.each_mut().map(|times| Summary::of(times, 1.0));
    let above = |times: &[u64]| {
        let limit = 3 * times[times.len() / 2];
        times.len() - times.partition_point(|&time| time <= limit)
    };
    Ok(Longest { steps, control, above: times.each_ref().map(|times| above(times)) })
}

/// Multiplies so many times, each waiting for the one before.
fn compute(rounds: u64) {
    let step = |x: u64, n: u64| (x ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::hint::black_box((0..rounds).fold(1, step));
}

/// Rounds of [`compute`] that take so many nanoseconds.
fn rounds_for(nanos: u64) -> u64 {
    const ROUNDS: u64 = 4096;
    let time = || {
        let start = Instant::now();
        compute(ROUNDS);
        start.elapsed().as_nanos() as u64
    };
    let least = (0..3).map(|_| time()).min().unwrap_or(1);
    nanos * ROUNDS / least.max(1)
}

/// Of how many steps a sample is the mean.
fn block(shape: &Shape, ends: Ends) -> usize {
    match (shape.batch <= QUICK, ends) {
        (false, _) => 1,
        // As many as lie between two page ends, or between two comparisons.
        (true, Ends::None) => 8,
        (true, Ends::Sixteenth) => 16,
    }
}

fn bytes_of_a_step(rig: &mut Rig, streams: &mut [Stream]) -> Result<u64> {
    let step = rig.declare(streams, None)?;
    let started = rig.runner.start(step);
    let live = rig.live(started)?;
    let bytes = rig.ledger.written(&live.ctx())?;
    rig.finish(live, streams, None, Check::Record, Times::default())?;
    Ok(bytes)
}

/// Samples of the phases.
struct Samples {
    block: usize,
    pending: Vec<Times>,
    phases: [Vec<u64>; 5],
    allocations: u64,
    counted: usize,
}

impl Samples {
    fn new(wanted: usize, block: usize) -> Self {
        let phases = std::array::from_fn(|_| Vec::with_capacity(wanted + 1));
        let pending = Vec::with_capacity(block);
        Self { block, pending, phases, allocations: 0, counted: 0 }
    }

    fn len(&self) -> usize {
        self.phases[0].len()
    }

    fn add(&mut self, times: &Times) {
        self.counted += 1;
        self.allocations += times.allocations;
        self.pending.push(*times);
        if self.pending.len() < self.block {
            return;
        }
        let mut sum = |phase: usize, of: fn(&Times) -> u64| {
            self.phases[phase].push(self.pending.iter().map(of).sum());
        };
        sum(0, |t| t.declare);
        sum(1, |t| t.start);
        sum(2, |t| t.commit);
        sum(3, |t| t.outputs);
        sum(4, Times::total);
        self.pending.clear();
    }

    /// What follows does not follow on the last step.
    fn interrupt(&mut self) {
        self.pending.clear();
    }

    fn finish(mut self, result: &mut Decode, counts_allocations: bool) {
        let steps = self.block as f64;
        result.steps = self.counted as u64;
        let [declare, start, commit, outputs, total] = &mut self.phases;
        result.declare = Summary::of(declare, steps);
        result.start = Summary::of(start, steps);
        result.commit = Summary::of(commit, steps);
        result.outputs = Summary::of(outputs, steps);
        result.total = Summary::of(total, steps);
        let per_step = self.allocations as f64 / self.counted.max(1) as f64;
        result.allocations = counts_allocations.then_some(per_step);
    }
}

/// Times `work` once.
pub fn time<T>(rig: &mut Rig, work: impl FnOnce(&mut Rig) -> Result<T>) -> Result<(T, u64)> {
    let start = Instant::now();
    let done = work(rig)?;
    let end = Instant::now();
    Ok((done, rig.nanos(start, end)))
}
