//! Random operations, compared with a plain model: what each stream should hold, token by token, and
//! how many pages that takes.

mod common;

use std::collections::HashMap;

use common::*;
use proptest::prelude::*;
use resource_api::{KvCache, KvPlan, KvStepOptions, LabelId, PlanVec, Resource, StepId, TypedRef};

const PAGE: u32 = 3;
const PAGES: u32 = 14;
/// Slot of a request whose stream shows the order of the free pages.
const PROBE: u32 = 9;

#[derive(Clone, Debug)]
struct Request {
    rows: Vec<(u32, u32, u32)>,
    commit: bool,
    pre: Option<(u32, u32, u32)>,
    post: Option<(u32, u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    RollBackAdmitted,
    RollBackPlanned,
    Commit,
    /// Planned ahead, promoted, committed.
    StageAndCommit,
    /// Planned ahead, then dropped.
    StageAndClear,
    /// Planned ahead, then dropped by the next step.
    StageAndReplace,
    /// A request of the step goes while it is in flight.
    RemoveThenCommit(u32),
}

#[derive(Clone, Debug)]
enum Op {
    Ingest(u32),
    Remove(u32),
    Reset(u32, bool),
    Rewind(u32, u32, u32),
    Step(Request, Fate),
    /// A decode step of all rows, during which another one is planned ahead.
    Overlap(Request, Request, Fate),
}

fn request(with_forks: bool) -> impl Strategy<Value = Request> {
    let row = (0..3u32, 0..3u32, 0..6u32);
    let fork = || {
        let fork = (0..3u32, 0..3u32, 0..3u32).prop_filter("to itself", |f| f.1 != f.2);
        proptest::option::weighted(0.3, fork).prop_map(move |fork| fork.filter(|_| with_forks))
    };
    (proptest::collection::vec(row, 0..5), proptest::bool::weighted(0.85), fork(), fork()).prop_map(
        |(mut rows, commit, pre, post)| {
            rows.sort();
            rows.dedup_by_key(|r| (r.0, r.1));
            Request { rows, commit, pre, post }
        },
    )
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        1 => Just(Fate::RollBackAdmitted),
        1 => Just(Fate::RollBackPlanned),
        5 => Just(Fate::Commit),
        2 => Just(Fate::StageAndCommit),
        1 => Just(Fate::StageAndClear),
        1 => Just(Fate::StageAndReplace),
        1 => (0..3u32).prop_map(Fate::RemoveThenCommit),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => (0..3u32).prop_map(Op::Ingest),
        1 => (0..3u32).prop_map(Op::Remove),
        1 => (0..3u32, any::<bool>()).prop_map(|(slot, free)| Op::Reset(slot, free)),
        1 => (0..3u32, 0..3u32, 0..20u32).prop_map(|(s, l, n)| Op::Rewind(s, l, n)),
        8 => (request(true), fate()).prop_map(|(r, f)| Op::Step(r, f)),
        3 => (request(false), request(false), fate()).prop_map(|(a, b, f)| Op::Overlap(a, b, f)),
    ]
}

#[derive(Clone, Debug, Default)]
struct Stream {
    tokens: Vec<f32>,
    held: u32,
}

/// The streams as they should be.
#[derive(Clone, Debug, Default)]
struct Model {
    live: Vec<u32>,
    streams: HashMap<(u32, u32), Stream>,
}

fn pages(tokens: usize) -> u32 {
    (tokens as u32).div_ceil(PAGE)
}

impl Model {
    fn free(&self) -> u32 {
        PAGES - self.streams.values().map(|s| s.held).sum::<u32>()
    }

    fn tokens(&self, slot: u32, label: u32) -> Vec<f32> {
        self.streams.get(&(slot, label)).map_or(Vec::new(), |s| s.tokens.clone())
    }

    fn remove(&mut self, slot: u32) {
        self.live.retain(|&s| s != slot);
        self.streams.retain(|&(s, _), _| s != slot);
    }

    /// The model after a step that adds `values`, and what each row reads; `None` when it is refused.
    fn after(&self, step: &Request, values: &[f32]) -> Option<(Model, Vec<Vec<f32>>)> {
        let mut next = self.clone();
        let is_live = |slot: u32| self.live.contains(&slot);
        let mut fresh = 0;
        if let Some((slot, from, to)) = step.pre {
            if !is_live(slot) {
                return None;
            }
            let tokens = self.tokens(slot, from);
            next.streams.insert((slot, to), Stream { held: pages(tokens.len()), tokens });
            fresh += next.streams[&(slot, to)].held;
        }
        let mut read = Vec::new();
        let mut values = values.iter();
        for &(slot, label, span) in &step.rows {
            if span > 0 && !is_live(slot) {
                return None;
            }
            let mut all = next.tokens(slot, label);
            all.extend(values.by_ref().take(span as usize));
            if span > 0 {
                let stream = next.streams.entry((slot, label)).or_default();
                if pages(all.len()) > PAGES {
                    return None;
                }
                fresh += pages(all.len()).saturating_sub(stream.held);
                stream.held = stream.held.max(pages(all.len()));
                if step.commit {
                    stream.tokens = all.clone();
                }
            }
            read.push(all);
        }
        if let Some((slot, from, to)) = step.post {
            if !is_live(slot) {
                return None;
            }
            let tokens = next.tokens(slot, from);
            let held = pages(tokens.len());
            fresh += held;
            next.streams.insert((slot, to), Stream { tokens, held });
        }
        (fresh <= self.free()).then_some((next, read))
    }
}

struct Run {
    cache: Cache,
    model: Model,
    next_step: u64,
    next_value: f32,
}

impl Run {
    fn new() -> Self {
        let cache = cache(PAGE, PAGES, PAGE * PAGES + 9);
        cache.ingest(PROBE);
        Run { cache, model: Model::default(), next_step: 1, next_value: 1.0 }
    }

    /// A step in its own slot, and the values of its new tokens.
    fn step(&mut self, request: &Request) -> (Step, Vec<f32>) {
        let id = self.next_step;
        self.next_step += 1;
        let list = |fork: Option<(u32, u32, u32)>| {
            let mut list = PlanVec::default();
            fork.into_iter().for_each(|(slot, from, to)| list.push(common::fork(slot, from, to)));
            list
        };
        let options = KvStepOptions {
            commit: request.commit,
            pre_forks: list(request.pre),
            post_forks: list(request.post),
            ..Default::default()
        };
        let slot = (id % 3) as u32;
        let step = Step { slot, ..Step::new(id, &request.rows).with(options) };
        let values = (0..step.tokens()).map(|i| self.next_value + i as f32).collect();
        self.next_value += step.tokens() as f32;
        (step, values)
    }

    /// The free pages in the order in which they will be taken.
    fn free_order(&mut self) -> Vec<u32> {
        let span = self.cache.kv.free_pages() as u32 * PAGE;
        let (step, _) = self.step(&Request {
            rows: vec![(PROBE, 0, span)],
            commit: true,
            pre: None,
            post: None,
        });
        assert!(self.cache.admit(&step).is_ready());
        let plan = self.cache.plan(&step).unwrap();
        let order = plan.open::<KvPlan>().unwrap().pages(0, PAGE).to_vec();
        self.cache.rollback(&step);
        order
    }

    /// Plans the step, stores its values, and checks what its rows read.
    fn forward(&self, step: &Step, values: &[f32], read: &[Vec<f32>]) {
        let filed = self.cache.plan(step).unwrap();
        self.forward_as(step, filed, values);
        let plan = filed.open::<KvPlan>().unwrap();
        for row in 0..step.request.len() {
            let at = (plan.request[row].slot, self.label_of(plan, row));
            let want = step.request.iter().zip(&step.label).position(|(r, l)| (r.slot, l.0) == at);
            assert_eq!(self.cache.history(plan, row), read[want.unwrap()], "row {row} of {step:?}");
        }
    }

    /// Stores the step's values where this plan says.
    fn forward_as(&self, step: &Step, filed: TypedRef<'_>, values: &[f32]) {
        let plan = filed.open::<KvPlan>().unwrap();
        let mut labels: Vec<LabelId> = Vec::new();
        for label in &step.label {
            if !labels.contains(label) {
                labels.push(*label);
            }
        }
        assert!(plan.groups.iter().map(|g| g.label).eq(labels.iter().copied()));
        for label in labels {
            let mut first = 0;
            let mut mine = Vec::new();
            for (other, &span) in step.label.iter().zip(&step.span) {
                if *other == label {
                    mine.extend(&values[first..first + span as usize]);
                }
                first += span as usize;
            }
            self.cache.write(step, filed, label, &mine);
        }
    }

    fn label_of(&self, plan: &KvPlan, row: usize) -> u32 {
        let has = |g: &&resource_api::KvGroup| {
            (g.first_row..g.first_row + g.num_rows).contains(&(row as u32))
        };
        plan.groups.iter().find(has).unwrap().label.0
    }

    fn run_step(&mut self, request: &Request, fate: Fate) {
        let order = self.free_order();
        let before = self.cache.resource.inspect();
        let (mut step, values) = self.step(request);
        let expected = self.model.after(request, &values);
        let staged =
            matches!(fate, Fate::StageAndCommit | Fate::StageAndClear | Fate::StageAndReplace);
        step.preplan = staged;
        let outcome = self.cache.admit(&step);
        assert_eq!(outcome.is_ready(), expected.is_some(), "{step:?}: {}", outcome.message());
        let Some((next, read)) = expected else {
            assert_eq!(self.cache.resource.inspect(), before);
            assert_eq!(self.free_order(), order);
            return;
        };
        if staged {
            self.cache.plan(&step).unwrap();
        }
        match fate {
            Fate::RollBackAdmitted => self.cache.rollback(&step),
            Fate::RollBackPlanned => {
                self.forward(&step, &values, &read);
                self.cache.rollback(&step);
            }
            Fate::StageAndClear => {
                self.cache.resource.clear_preplan(Some(StepId(step.id))).unwrap();
            }
            Fate::StageAndReplace => self.run_empty_step(),
            Fate::Commit | Fate::StageAndCommit => {
                step.preplan = false;
                assert!(self.cache.admit(&step).is_ready());
                self.forward(&step, &values, &read);
                self.cache.commit(&step).unwrap();
                self.model = next;
                return;
            }
            Fate::RemoveThenCommit(slot) => {
                self.cache.plan(&step).unwrap();
                self.cache.resource.remove_request(rid(slot)).unwrap();
                let mut without = request.clone();
                // Its rows go to the sink; the values of the others are what they were.
                let mut kept = Vec::new();
                let mut first = 0;
                for &(s, _, span) in &request.rows {
                    if s != slot {
                        kept.extend_from_slice(&values[first..first + span as usize]);
                    }
                    first += span as usize;
                }
                without.rows.retain(|r| r.0 != slot);
                without.pre = without.pre.filter(|f| f.0 != slot);
                without.post = without.post.filter(|f| f.0 != slot);
                self.model.remove(slot);
                let (next, _) = self.model.after(&without, &kept).expect("less than was admitted");
                let filed = self.cache.plan(&step).unwrap();
                self.forward_as(&step, filed, &values);
                self.cache.commit(&step).unwrap();
                self.model = next;
                return;
            }
        }
        assert_eq!(self.free_order(), order, "{fate:?} restores the free list");
        assert_eq!(self.cache.resource.inspect(), before);
    }

    fn run_overlapping(&mut self, first: &Request, second: &Request, fate: Fate) {
        let (running, values) = self.step(first);
        let Some((next, _)) = self.model.after(first, &values) else { return };
        assert!(self.cache.admit(&running).is_ready());
        let filed = self.cache.plan(&running).unwrap();
        let (mut staged, staged_values) = self.step(second);
        staged.preplan = true;
        let after = next.after(second, &staged_values);
        assert_eq!(self.cache.admit(&staged).is_ready(), after.is_some(), "{staged:?}");
        if after.is_some() && fate != Fate::RollBackAdmitted {
            self.cache.plan(&staged).unwrap();
        }
        if fate == Fate::RollBackPlanned {
            return self.cache.rollback(&running);
        }
        self.forward_as(&running, filed, &values);
        self.cache.commit(&running).unwrap();
        self.model = next;
        match (after, fate) {
            (Some((next, read)), Fate::Commit | Fate::StageAndCommit) => {
                staged.preplan = false;
                assert!(self.cache.admit(&staged).is_ready());
                self.forward(&staged, &staged_values, &read);
                self.cache.commit(&staged).unwrap();
                self.model = next;
            }
            (_, Fate::StageAndReplace) => self.run_empty_step(),
            (_, Fate::RemoveThenCommit(slot)) => {
                self.cache.resource.remove_request(rid(slot)).unwrap();
                self.model.remove(slot);
                self.cache.resource.clear_preplan(None).unwrap();
            }
            _ => self.cache.resource.clear_preplan(Some(StepId(staged.id))).unwrap(),
        }
    }

    fn run_empty_step(&mut self) {
        let (step, _) = self.step(&Request { rows: vec![], commit: true, pre: None, post: None });
        assert!(self.cache.admit(&step).is_ready());
        self.cache.commit(&step).unwrap();
    }

    fn check(&mut self) {
        self.cache.conserved();
        assert_eq!(self.cache.kv.free_pages(), u64::from(self.model.free()));
        for slot in 0..3 {
            for label in 0..3 {
                let want = self.model.tokens(slot, label);
                assert_eq!(self.cache.len(slot, label) as usize, want.len());
                let rows = vec![(slot, label, 0)];
                let read = Request { rows, commit: true, pre: None, post: None };
                let (step, _) = self.step(&read);
                assert!(self.cache.admit(&step).is_ready());
                self.forward(&step, &[], &[want]);
                self.cache.commit(&step).unwrap();
            }
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            &Op::Ingest(slot) => {
                self.cache.ingest(slot);
                if !self.model.live.contains(&slot) {
                    self.model.live.push(slot);
                }
            }
            &Op::Remove(slot) => {
                self.cache.resource.remove_request(rid(slot)).unwrap();
                self.model.remove(slot);
            }
            &Op::Reset(slot, free) => {
                self.cache.resource.reset_request(rid(slot), free).unwrap();
                for (_, stream) in self.model.streams.iter_mut().filter(|(k, _)| k.0 == slot) {
                    stream.tokens.clear();
                    stream.held = if free { 0 } else { stream.held };
                }
            }
            &Op::Rewind(slot, label, len) => {
                let stream = self.model.streams.get_mut(&(slot, label));
                let stream = stream.filter(|s| len as usize <= s.tokens.len());
                let done = self.cache.kv.correct_len(rid(slot), LabelId(label), len);
                match stream {
                    Some(stream) => {
                        done.unwrap();
                        stream.tokens.truncate(len as usize);
                        stream.held = stream.held.min(pages(len as usize));
                    }
                    // A live request's main stream is open from the start, and empty.
                    None => assert!(done.is_err() || len == 0),
                }
            }
            Op::Step(request, fate) => self.run_step(request, *fate),
            Op::Overlap(first, second, fate) => self.run_overlapping(first, second, *fate),
        }
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn streams_hold_exactly_what_the_model_holds(ops in proptest::collection::vec(op(), 1..30)) {
        let mut run = Run::new();
        (0..2).for_each(|slot| run.apply(&Op::Ingest(slot)));
        ops.iter().for_each(|op| run.apply(op));
    }
}
