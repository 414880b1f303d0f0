//! Decode steps in which every method of every resource is timed by itself.
//!
//! The runner calls all resources for one phase and tells nothing between; here the same calls are
//! made in the same order with the clock read between them.

use std::time::Instant;

use resource_api::{Resource, SlotLease, StepContext, StepHead, StepId, TypedRef};
use serde_json::{Map, Value};

use super::decode::{Ends, WARM};
use super::rig::{PAGE, Rig, SLOTS, TOKEN};
use super::shapes::Shape;
use super::stats::Summary;
use crate::error::{Error, ErrorKind, Result};

/// Names of the timed methods.
pub const METHODS: [&str; 4] = ["admit", "plan", "commit", "on_outputs"];

/// Step ids that no runner has given out.
const FIRST_STEP: u64 = 1 << 40;

/// Per resource and method.
#[derive(Clone, Debug, Default)]
pub struct Phases {
    /// Keys of the resources, in build order.
    pub resources: Vec<String>,
    /// Per resource and method.
    pub each: Vec<[Summary; 4]>,
    /// Per method, over all resources.
    pub all: [Summary; 4],
}

impl Phases {
    /// `{resource: {method: summary}}`, with `all` for the sums.
    pub fn to_json(&self) -> Value {
        let methods = |summaries: &[Summary; 4]| -> Value {
            let named = METHODS.iter().zip(summaries);
            Value::Object(named.map(|(m, s)| (m.to_string(), s.to_json())).collect())
        };
        let mut object = Map::new();
        for (key, summaries) in self.resources.iter().zip(&self.each) {
            object.insert(key.clone(), methods(summaries));
        }
        object.insert("all".into(), methods(&self.all));
        Value::Object(object)
    }
}

/// Times `wanted` steps.
///
/// # Errors
/// What a resource says, or a refusal.
pub fn measure(rig: &mut Rig, shape: &Shape, ends: Ends, wanted: usize) -> Result<Phases> {
    let set = rig.runner.resources().clone();
    let count = set.entries().len();
    let mut samples = vec![[const { Vec::<u64>::new() }; 4]; count];
    let mut sums = [const { Vec::<u64>::new() }; 4];
    let mut step_id = FIRST_STEP + (u64::from(shape.batch) << 32);
    let mut generation = 1 << 20;
    let ids = vec![TOKEN; shape.batch as usize];
    while sums[0].len() < wanted {
        let steps = shape.steps();
        let mut streams = rig.population(&ends.lens(shape), steps + 1)?;
        let rids: Vec<_> = streams.iter().map(|s| s.rid).collect();
        for n in 0..steps - PAGE {
            let len = streams[0].len;
            let step = rig.declare(&streams, None)?;
            step_id += 1;
            generation += 1;
            let epoch = rig.runner.epoch();
            let head = StepHead {
                step: StepId(step_id),
                epoch,
                node: rig.node,
                graph_walk: rig.decode,
                lease: SlotLease::eager((step_id % u64::from(SLOTS)) as u32, generation),
                capture: false,
                is_preplan: false,
                stream: 0,
            };
            let mut plans = vec![TypedRef::NONE; count];
            let mut times = vec![[0u64; 4]; count];
            for (i, entry) in set.entries().iter().enumerate() {
                let ctx = StepContext::new(head, &rids, &rids, &plans);
                let share = step.share(i);
                let start = Instant::now();
                let admitted = entry.resource().admit(&share, &ctx);
                times[i][0] = rig.nanos(start, Instant::now());
                if !admitted?.is_ready() {
                    let message = format!("`{}` refused a step", entry.key);
                    return Err(Error::new(ErrorKind::Internal, message));
                }
            }
            for (i, entry) in set.entries().iter().enumerate() {
                let ctx = StepContext::new(head, &rids, &rids, &plans);
                let share = step.share(i);
                let start = Instant::now();
                let planned = entry.resource().plan(&share, &ctx);
                times[i][1] = rig.nanos(start, Instant::now());
                plans[i] = planned?.into_result();
            }
            rig.services.complete_epoch(epoch);
            let ctx = StepContext::new(head, &rids, &rids, &plans);
            rig.ledger.record(&ctx)?;
            for (i, entry) in set.entries().iter().enumerate() {
                let share = step.share(i);
                let start = Instant::now();
                let committed = entry.resource().commit(&share, &ctx);
                times[i][2] = rig.nanos(start, Instant::now());
                committed?;
            }
            for (i, entry) in set.entries().iter().enumerate() {
                let start = Instant::now();
                let told = entry.resource().on_outputs(&ctx, &rids, &ids);
                times[i][3] = rig.nanos(start, Instant::now());
                told?;
            }
            rig.give_back(step);
            for stream in &mut streams {
                stream.len += 1;
                stream.sampled += 1;
            }
            if n >= WARM.min(steps / 4) && ends.counts(len) && sums[0].len() < wanted {
                for method in 0..4 {
                    sums[method].push(times.iter().map(|t| t[method]).sum());
                    samples.iter_mut().zip(&times).for_each(|(s, t)| s[method].push(t[method]));
                }
            }
        }
        rig.ledger.disjoint(&streams)?;
        rig.end_all(&streams)?;
    }
    let summary = |of: &mut [Vec<u64>; 4]| of.each_mut().map(|s| Summary::of(s, 1.0));
    Ok(Phases {
        resources: set.entries().iter().map(|e| e.key.clone()).collect(),
        each: samples.iter_mut().map(summary).collect(),
        all: summary(&mut sums),
    })
}
