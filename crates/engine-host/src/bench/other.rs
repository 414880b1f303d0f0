//! Steps that are not plain decoding: prefill, mixed, refused, churning, and planned ahead.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use serde_json::{Value, json};

use super::decode::{Ends, WARM, time};
use super::kinds::Kinds;
use super::rig::{Check, Geometry, PAGE, Prompt, Rig, Stream, Times, refused};
use super::shapes::{Pool, Shape};
use super::stats::Summary;
use crate::error::{Error, ErrorKind, Result};
use crate::runner::{StageOutcome, Started};

/// What a shape is called, and its figures by name.
pub type Figures = (&'static str, Vec<(&'static str, Summary)>, Value);

/// Samples of a step's phases.
#[derive(Default)]
struct Phased([Vec<u64>; 5]);

impl Phased {
    fn add(&mut self, times: &Times) {
        let values = [times.declare, times.start, times.commit, times.outputs, times.total()];
        self.0.iter_mut().zip(values).for_each(|(samples, value)| samples.push(value));
    }

    fn summaries(mut self) -> Vec<(&'static str, Summary)> {
        let names = ["declare", "start", "commit", "outputs", "total"];
        let of = |(name, samples): (&'static str, &mut Vec<u64>)| (name, Summary::of(samples, 1.0));
        names.into_iter().zip(&mut self.0).map(of).collect()
    }
}

/// Eight fresh prompts of 512 tokens in one step.
///
/// # Errors
/// What a resource says, or a plan that is not what the ledger says.
pub fn prefill(kinds: &Kinds, wanted: usize) -> Result<Figures> {
    const BATCH: u32 = 8;
    const LEN: u32 = 512;
    let pages = BATCH * LEN / PAGE * 4;
    let mut rig = Rig::build(kinds, Geometry { pages, max_batch: BATCH, max_len: LEN + PAGE })?;
    let mut phases = Phased::default();
    let mut begin = Vec::with_capacity(wanted);
    for n in 0..wanted + WARM as usize {
        let prompts: Vec<Prompt> = (0..BATCH).map(|_| rig.fresh_prompt(LEN)).collect();
        let tokens: Vec<Vec<u32>> = prompts.iter().map(Prompt::tokens).collect();
        let (mut streams, took) = time(&mut rig, |rig| {
            let each = prompts.iter().zip(&tokens);
            each.map(|(&prompt, tokens)| take_in(rig, prompt, tokens, 1))
                .collect::<Result<Vec<_>>>()
        })?;
        let spans: Vec<u32> = streams.iter().map(|s| s.prompt.len - s.len).collect();
        let times = rig.step(&mut streams, Some(&spans), Check::Compare)?;
        if n >= WARM as usize {
            phases.add(&times);
            begin.push(took);
        }
        rig.end_all(&streams)?;
    }
    let mut figures = phases.summaries();
    figures.push(("begin", Summary::of(&mut begin, 1.0)));
    Ok(("prefill 8 x 512", figures, json!({ "plans_compared": rig.ledger.compared })))
}

/// 224 requests that generate and 32 chunks of 128 prompt tokens.
///
/// # Errors
/// As for [`prefill`].
pub fn mixed(kinds: &Kinds, wanted: usize) -> Result<Figures> {
    const DECODE: u32 = 224;
    const PREFILL: u32 = 32;
    const CHUNK: u32 = 128;
    const CHUNKS: u32 = 32;
    let len = CHUNK * CHUNKS;
    let max_len = 4096 + 2 * CHUNKS + 2 * PAGE;
    let pages = (DECODE + PREFILL) * max_len.div_ceil(PAGE) + 2;
    let geometry = Geometry { pages, max_batch: DECODE + PREFILL, max_len };
    let mut rig = Rig::build(kinds, geometry)?;
    let shape = Shape { batch: DECODE, context: 4096, pool: Pool::Enough };
    let mut phases = Phased::default();
    let mut counted = 0;
    while counted < wanted {
        let mut streams = rig.population(&Ends::Sixteenth.lens(&shape), CHUNKS + 1)?;
        for _ in 0..PREFILL {
            let prompt = rig.fresh_prompt(len);
            streams.push(rig.begin(prompt, 1)?);
        }
        let spans: Vec<u32> =
            (0..DECODE + PREFILL).map(|i| if i < DECODE { 1 } else { CHUNK }).collect();
        for n in 0..CHUNKS {
            let check = if n % 7 == 0 { Check::Compare } else { Check::Record };
            let times = rig.step(&mut streams, Some(&spans), check)?;
            if n >= 8 && n % 7 >= 3 {
                phases.add(&times);
                counted += 1;
            }
        }
        rig.ledger.disjoint(&streams)?;
        rig.end_all(&streams)?;
    }
    let note = json!({ "plans_compared": rig.ledger.compared });
    Ok(("mixed 224 + 32 x 128", phases.summaries(), note))
}

/// A step of 256 requests that all need a page, in a pool that lacks one: what the refusal costs
/// beside the same step admitted, and that nothing has changed.
///
/// # Errors
/// What a resource says; a step that is not refused, or one that leaves a trace.
pub fn refusal(kinds: &Kinds, wanted: usize) -> Result<Figures> {
    const BATCH: u32 = 256;
    const LEN: u32 = 512;
    let mut summaries = Vec::new();
    for (name, missing) in [("admitted", 0), ("refused", 1)] {
        let pages = BATCH * (LEN / PAGE + 1) + 1 - missing;
        let geometry = Geometry { pages, max_batch: BATCH, max_len: LEN + PAGE };
        let mut rig = Rig::build(kinds, geometry)?;
        let streams = rig.population(&vec![LEN; BATCH as usize], PAGE)?;
        let before = digest(&rig);
        let mut samples = Vec::with_capacity(wanted);
        for n in 0..wanted + WARM as usize {
            let step = rig.declare(&streams, None)?;
            let start = Instant::now();
            let started = rig.runner.start(step);
            let end = Instant::now();
            let step = match (started, missing) {
                (Ok(Started::Refused(_, step)), 1) => step,
                (Ok(Started::Live(live)), 0) => {
                    let step = rig.runner.abandon(live);
                    // What it gave back may be taken again at once: nothing has run.
                    rig.services.complete_epoch(rig.runner.epoch());
                    step
                }
                (Ok(Started::Refused(why, _)), _) => return Err(refused(&why)),
                (Ok(Started::Live(_)), _) => {
                    return Err(Error::new(ErrorKind::Internal, "a step that lacks a page runs"));
                }
                (Err(failed), _) => return Err(failed.error),
            };
            rig.give_back(step);
            if n >= WARM as usize {
                samples.push(rig.nanos(start, end));
            }
        }
        // A planned step has had its place in the order of steps, which pages given back show.
        if missing > 0 && digest(&rig) != before {
            let message = "the state changed by steps that were refused";
            return Err(Error::new(ErrorKind::Internal, message));
        }
        rig.runner.resources().entries().iter().try_for_each(|entry| {
            use resource_api::Resource;
            entry.resource().post_warmup_validate()
        })?;
        summaries.push((name, Summary::of(&mut samples, 1.0)));
    }
    let note =
        json!({ "state": "same digest before and after refusals", "admitted": "admit and plan" });
    Ok(("refused B=256, one page short", summaries, note))
}

fn digest(rig: &Rig) -> u64 {
    let mut hasher = DefaultHasher::new();
    rig.inspect().hash(&mut hasher);
    hasher.finish()
}

/// 256 requests of which four end and four begin in every step, with a prompt of 4,096 tokens whose
/// first 3,584 are cached.
///
/// # Errors
/// As for [`prefill`].
pub fn churn(kinds: &Kinds, wanted: usize) -> Result<Figures> {
    const BATCH: u32 = 256;
    const TURNOVER: usize = 4;
    const LEN: u32 = 4096;
    const CACHED: u32 = 3584;
    let max_len = LEN + BATCH + 4 * PAGE;
    let pages = (BATCH + 8) * max_len.div_ceil(PAGE) * 2;
    let mut rig = Rig::build(kinds, Geometry { pages, max_batch: BATCH, max_len })?;
    let prompt = |rig: &mut Rig| Prompt { shared: CACHED, ..rig.fresh_prompt(LEN) };
    let mut streams: Vec<Stream> = Vec::new();
    for _ in 0..BATCH {
        let prompt = prompt(&mut rig);
        let mut stream = rig.begin(prompt, BATCH)?;
        rig.compute(std::slice::from_mut(&mut stream), Check::Record)?;
        streams.push(stream);
    }
    let mut phases = Phased::default();
    let (mut ends, mut begins) = (Vec::new(), Vec::new());
    let mut cached = 0;
    for n in 0..wanted + WARM as usize {
        let out = (n * TURNOVER) % BATCH as usize..(n * TURNOVER) % BATCH as usize + TURNOVER;
        let leaving = streams[out.clone()].to_vec();
        let ((), ended) = time(&mut rig, |rig| rig.end_all(&leaving))?;
        let prompts: Vec<Prompt> = (0..TURNOVER).map(|_| prompt(&mut rig)).collect();
        let tokens: Vec<Vec<u32>> = prompts.iter().map(Prompt::tokens).collect();
        let (coming, begun) = time(&mut rig, |rig| {
            let each = prompts.iter().zip(&tokens);
            each.map(|(&prompt, tokens)| take_in(rig, prompt, tokens, BATCH))
                .collect::<Result<Vec<_>>>()
        })?;
        cached = coming[0].len;
        streams[out].copy_from_slice(&coming);
        let spans: Vec<u32> =
            streams.iter().map(|s| s.prompt.len.saturating_sub(s.len).max(1)).collect();
        let check = if n % 17 == 0 { Check::Compare } else { Check::Record };
        let times = rig.step(&mut streams, Some(&spans), check)?;
        if n >= WARM as usize && n % 17 > 4 {
            phases.add(&times);
            ends.push(ended);
            begins.push(begun);
        }
    }
    let mut figures = phases.summaries();
    figures.push(("end 4", Summary::of(&mut ends, 1.0)));
    figures.push(("begin 4", Summary::of(&mut begins, 1.0)));
    let note = json!({ "cached_tokens": cached, "plans_compared": rig.ledger.compared });
    Ok(("churn B=256, 4 end, 4 begin", figures, note))
}

/// Decode steps of 256 requests planned while the step before them runs.
///
/// # Errors
/// As for [`prefill`].
pub fn staged(kinds: &Kinds, wanted: usize) -> Result<Figures> {
    let shape = Shape { batch: 256, context: 4096, pool: Pool::Enough };
    let count = wanted as u32 + WARM + 2;
    let mut rig = Rig::build(kinds, shape.geometry(count))?;
    let mut streams = rig.population(&Ends::Sixteenth.lens(&shape), count)?;
    let (mut stage, mut left) = (Vec::new(), Vec::new());
    let first = rig.declare(&streams, None)?;
    let started = rig.runner.start(first);
    let mut live = rig.live(started)?;
    let ids = vec![super::rig::TOKEN; streams.len()];
    let rids: Vec<_> = streams.iter().map(|s| s.rid).collect();
    // Two descriptions are in use at a time.
    let all = live.step().resources.clone();
    rig.give_back(crate::step::SubmoduleStep::new(rig.node, rig.decode, all));
    for n in 0..count - 1 {
        let mut ahead = streams.clone();
        ahead.iter_mut().for_each(|s| (s.len, s.sampled) = (s.len + 1, s.sampled + 1));
        let step = rig.declare(&ahead, None)?;
        let start = Instant::now();
        let outcome = rig.runner.stage(step);
        let took = rig.nanos(start, Instant::now());
        let next = match outcome {
            Ok(StageOutcome::Staged(next)) => next,
            Ok(StageOutcome::Refused(why, _)) => return Err(refused(&why)),
            Err(failed) => return Err(failed.error),
        };
        rig.services.complete_epoch(rig.runner.epoch());
        rig.ledger.record(&live.ctx())?;
        if n % 21 == 0 {
            rig.ledger.compare(&live.ctx(), &streams, None)?;
        }
        let start = Instant::now();
        let (done, committed) = rig.runner.commit(live);
        let told = rig.runner.outputs(&done, &rids, &ids);
        let step = rig.runner.finish(done);
        let promoted = rig.runner.promote(next);
        let on_step = rig.nanos(start, Instant::now());
        committed.and(told)?;
        rig.give_back(step);
        live = rig.live(promoted)?;
        streams = ahead;
        if n >= WARM && n % 21 > 4 {
            stage.push(took);
            left.push(on_step);
        }
    }
    rig.finish(live, &mut streams, None, Check::Compare, Times::default())?;
    let note = json!({ "plans_compared": rig.ledger.compared });
    let figures =
        vec![("stage", Summary::of(&mut stage, 1.0)), ("left", Summary::of(&mut left, 1.0))];
    Ok(("planned ahead B=256 L=4096", figures, note))
}

/// Takes a request in and adopts what is cached of its prompt.
fn take_in(rig: &mut Rig, prompt: Prompt, tokens: &[u32], new_tokens: u32) -> Result<Stream> {
    let mut stream = rig.ingest(prompt, tokens, new_tokens)?;
    let matched = rig.resolve(&stream)?;
    rig.apply(&mut stream, tokens, matched)?;
    Ok(stream)
}
