//! Random requests over a small pool with the prefix cache on, with and without tiers under it. The reference knows, for every prefix,
//! whether somebody has computed it; whatever the cache hands out must hold exactly the
//! tokens of the request that takes it, under each of the labels that its tokens go to.

mod common;

use std::collections::{HashMap, HashSet};

use common::*;
use proptest::prelude::*;
use resource_api::host::PlainHost;
use resource_api::{
    HostServices, KvCache, KvPlan, LabelId, NodeId, PrefixInputs, PrefixWalk, RequestOverrides,
    Resource, WalkId,
};
use serde_json::{Value, json};

/// Page sizes: one that divides nothing, and the one whose keys are computed in batches.
const SIZES: [u32; 2] = [3, 16];
const PAGES: u32 = 12;
const WALK: WalkId = WalkId(0);
const LABELS: [&str; 3] = ["main", "b", "c"];

#[derive(Clone, Copy, Debug)]
enum Fate {
    Commit,
    RollBack,
    Stage,
    RemoveInFlight,
}

#[derive(Clone, Debug)]
enum Op {
    /// A request whose prompt takes one of a few branches at every page, so that many begin alike, and
    /// whose tokens go to these [`LABELS`].
    Ingest(u32, Vec<u32>, &'static [usize]),
    Resolve(u32),
    /// Takes over this share of what was found, of 4.
    Apply(u32, u32),
    /// Feeds up to so many thirds of a page: what is left of those known, then generated ones.
    Feed(Vec<(u32, u32)>, Fate),
    /// Generates so many tokens, one by one, each told of before it is fed.
    Generate(u32, u32),
    /// To so many thirds of a page, and this share of one more, of 16.
    Rewind(u32, u32, u32),
    Reset(u32, bool),
    Remove(u32),
    /// Leaves the pool, if it can.
    Offload(u32),
    Reload(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..4u32;
    let fate = prop_oneof![
        6 => Just(Fate::Commit),
        1 => Just(Fate::RollBack),
        2 => Just(Fate::Stage),
        1 => Just(Fate::RemoveInFlight),
    ];
    let labels = || {
        let two = proptest::sample::select(vec![&[0usize, 1][..], &[1], &[2, 1]]);
        prop_oneof![3 => Just(&[0usize][..]), 2 => two]
    };
    let rows = proptest::collection::vec((slot(), 1..8u32), 1..4).prop_map(|mut rows| {
        rows.sort();
        rows.dedup_by_key(|r| r.0);
        rows
    });
    prop_oneof![
        3 => (slot(), proptest::collection::vec(0..2u32, 1..14), labels())
            .prop_map(|(s, p, l)| Op::Ingest(s, p, l)),
        3 => slot().prop_map(Op::Resolve),
        3 => (slot(), 0..5u32).prop_map(|(s, n)| Op::Apply(s, n)),
        8 => (rows, fate).prop_map(|(r, f)| Op::Feed(r, f)),
        2 => (slot(), 1..20u32).prop_map(|(s, n)| Op::Generate(s, n)),
        1 => (slot(), 0..PAGES * 3, 0..16u32).prop_map(|(s, n, part)| Op::Rewind(s, n, part)),
        1 => (slot(), any::<bool>()).prop_map(|(s, f)| Op::Reset(s, f)),
        2 => slot().prop_map(Op::Remove),
        3 => slot().prop_map(Op::Offload),
        3 => slot().prop_map(Op::Reload),
    ]
}

#[derive(Debug, Default)]
struct Request {
    generation: u32,
    /// Prompt, then what was generated.
    tokens: Vec<u32>,
    /// How many of them the stream holds.
    len: usize,
    found: u32,
    asked: bool,
    away: bool,
    labels: &'static [usize],
}

struct Run {
    cache: Cache,
    labels: [LabelId; 3],
    /// Tokens of a page.
    size: u32,
    live: HashMap<u32, Request>,
    generations: u32,
    next_step: u64,
    /// Every prefix that was ever computed.
    computed: HashSet<Vec<u32>>,
}

impl Run {
    /// `tiers` are settings that begin with a comma.
    fn new(size: u32, tiers: &str) -> Self {
        let settings = format!(
            r#""pages": {}, "page_size": {size}, "max_seq_len": {}, "dtype": "f32"{tiers}"#,
            PAGES + 1,
            PAGES * size
        );
        let host = PlainHost::handle();
        let labels = LABELS.map(|name| host.label_id(name));
        let cache = cache_on(host, &settings, size);
        let walk = PrefixWalk { label: MAIN, write: WALK, decode: WALK };
        assert!(cache.resource.enable_prefix_cache(b"", vec![walk]).unwrap());
        let (live, computed) = Default::default();
        Run { cache, labels, size, live, generations: 0, next_step: 1, computed }
    }

    fn rid(&self, slot: u32) -> resource_api::RequestId {
        let generation = self.live.get(&slot).map_or(u32::MAX, |r| r.generation);
        resource_api::RequestId::new(slot, generation)
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Ingest(slot, prompt, labels) => self.ingest(*slot, prompt, labels),
            Op::Resolve(slot) => self.resolve(*slot),
            Op::Apply(slot, share) => self.take_over(*slot, *share),
            Op::Feed(rows, fate) => self.feed(rows, *fate),
            Op::Generate(slot, count) => (0..*count).for_each(|_| self.generate(*slot)),
            Op::Rewind(slot, thirds, part) => {
                let third = self.size / 3;
                self.rewind(*slot, thirds * third + part * third / 16);
            }
            Op::Reset(slot, free) => {
                self.cache.resource.reset_request(self.rid(*slot), *free).unwrap();
                if let Some(r) = self.live.get_mut(slot) {
                    (r.len, r.found, r.asked, r.away) = (0, 0, false, false);
                }
            }
            Op::Remove(slot) => {
                self.cache.resource.remove_request(self.rid(*slot)).unwrap();
                self.live.remove(slot);
            }
            Op::Offload(slot) => self.offload(*slot),
            Op::Reload(slot) => self.reload(*slot),
        }
        self.check();
    }

    fn ingest(&mut self, slot: u32, branches: &[u32], labels: &'static [usize]) {
        if self.live.contains_key(&slot) {
            return;
        }
        // The tokens of a third of a page all follow from its branch.
        let third = self.size / 3;
        let of = |(i, b): (usize, &u32)| vec![10 * i as u32 / self.size + b * 500; third as usize];
        let tokens: Vec<u32> = branches.iter().enumerate().flat_map(of).collect();
        self.generations += 1;
        let generation = self.generations;
        self.live.insert(
            slot,
            Request { generation, tokens: tokens.clone(), labels, ..Request::default() },
        );
        let names: Vec<&str> = labels.iter().map(|&at| LABELS[at]).collect();
        let text = match labels {
            [0] => String::new(),
            _ => json!({ "labels": { "prompt": names, "generated": names } }).to_string(),
        };
        let most = (self.max() / labels.len() as u32).saturating_sub(tokens.len() as u32);
        let overrides = RequestOverrides::new(&text, &tokens, most);
        if let Err(e) = self.cache.resource.ingest_request(self.rid(slot), &overrides) {
            assert!(labels.len() > 1 && e.message().contains("the pool has"), "{e}");
            self.live.remove(&slot);
        }
    }

    fn max(&self) -> u32 {
        PAGES * self.size
    }

    fn generate(&mut self, slot: u32) {
        let rid = self.rid(slot);
        let max = self.max() as usize;
        let Some(r) = self.live.get_mut(&slot) else { return };
        if r.len < r.tokens.len() || r.len == max || r.found > 0 || r.away {
            return;
        }
        let token = 1000 + r.len as u32 % 2;
        let told = self.cache.resource.extend_prefix_chain(rid, NodeId(0), WALK, &[token]);
        told.unwrap();
        r.tokens.push(token);
        self.feed(&[(slot, 1)], Fate::Commit);
    }

    fn resolve(&mut self, slot: u32) {
        let rid = self.rid(slot);
        let found = self.cache.resource.resolve_cached_prefix(rid, NodeId(0), WALK).unwrap();
        let Some(r) = self.live.get_mut(&slot) else { return assert_eq!(found, None) };
        if r.len > 0 {
            return;
        }
        let found = found.unwrap_or(0);
        if r.asked && r.found > 0 {
            assert_eq!(found, r.found, "asked again");
        }
        assert!((found as usize) < r.tokens.len());
        // Nothing is found that nobody has computed.
        assert!(found == 0 || self.computed.contains(&r.tokens[..found as usize]));
        (r.found, r.asked) = (found, true);
    }

    fn offload(&mut self, slot: u32) {
        let (rid, free) = (self.rid(slot), self.cache.kv.free_pages());
        let resource = &self.cache.resource;
        let could = resource.reclaimable(rid).unwrap();
        let freed = resource.offload(rid).unwrap();
        assert!(freed == 0 || freed == could, "{freed} of {could}");
        assert_eq!(self.cache.kv.free_pages(), free + freed);
        let Some(r) = self.live.get_mut(&slot) else { return assert_eq!(could, 0) };
        assert!(could == 0 || !r.away);
        r.away |= freed > 0;
        assert_eq!(resource.is_offloaded(rid).unwrap(), r.away);
        if r.away {
            assert_eq!(resource.reclaimable(rid).unwrap(), 0);
        }
    }

    fn reload(&mut self, slot: u32) {
        let rid = self.rid(slot);
        let resource = &self.cache.resource;
        let could = resource.can_reload(rid).unwrap();
        let back = resource.reload(rid).unwrap();
        let Some(r) = self.live.get_mut(&slot) else { return assert!(back && !could) };
        assert_eq!((could, back), (r.away && back, could || !r.away));
        r.away &= !back;
        assert_eq!(resource.is_offloaded(rid).unwrap(), r.away);
    }

    fn take_over(&mut self, slot: u32, share: u32) {
        let rid = self.rid(slot);
        let Some(r) = self.live.get_mut(&slot).filter(|r| r.found > 0 && r.len == 0) else {
            return;
        };
        let matched = r.found * share.min(4) / 4;
        let labels: Vec<LabelId> = r.labels.iter().map(|&at| self.labels[at]).collect();
        let inputs = PrefixInputs::new(&r.tokens).with_labels(&labels);
        let done = self.cache.resource.apply_cached_prefix(rid, NodeId(0), WALK, &inputs, matched);
        // Only a cut within a page needs one of its own, and may find none.
        match done {
            Ok(()) => r.len = matched as usize,
            Err(e) => assert!(!matched.is_multiple_of(self.size), "{e}"),
        }
        (r.found, r.asked) = (0, false);
    }

    fn feed(&mut self, rows: &[(u32, u32)], fate: Fate) {
        self.next_step += 1;
        let mut step = Step { slot: (self.next_step % 3) as u32, ..Step::new(self.next_step, &[]) };
        let mut spans = Vec::new();
        for &(slot, most) in rows {
            // A host that asked takes the answer over before it goes on.
            let is_idle = |r: &&Request| r.found == 0 && !r.away;
            let Some(r) = self.live.get(&slot).filter(is_idle) else { continue };
            let left = r.tokens.len() - r.len;
            let most = (most * self.size / 3) as usize;
            let span = if left == 0 { 1 } else { left.min(most) };
            if r.len + span > self.max() as usize {
                continue;
            }
            let mut own = r.tokens[r.len..r.len + span.min(left)].to_vec();
            own.resize(span, 1000 + (self.next_step as u32 % 2));
            spans.push((slot, own));
        }
        let mut ids = Vec::new();
        for label in 0..LABELS.len() {
            for (slot, own) in &spans {
                if self.live[slot].labels.contains(&label) {
                    step.request.push(self.rid(*slot));
                    step.label.push(self.labels[label]);
                    step.span.push(own.len() as u32);
                    ids.extend(own);
                }
            }
        }
        if ids.is_empty() {
            return;
        }
        step.token_ids.clone_from(&ids);
        step.preplan = matches!(fate, Fate::Stage);
        let free = self.cache.kv.free_pages();
        let outcome = self.cache.admit(&step);
        if !outcome.is_ready() {
            assert!(free < self.need(&step), "{}", outcome.message());
            return;
        }
        assert!(free >= self.need(&step));
        let mut filed = self.cache.plan(&step).unwrap();
        match fate {
            Fate::RollBack => return self.cache.rollback(&step),
            Fate::RemoveInFlight => {
                if let Some(&rid) = step.request.first() {
                    self.cache.resource.remove_request(rid).unwrap();
                    self.live.remove(&rid.slot);
                    filed = self.cache.plan(&step).unwrap();
                }
            }
            Fate::Stage => {
                step.preplan = false;
                assert!(self.cache.admit(&step).is_ready());
                filed = self.cache.plan(&step).unwrap();
            }
            Fate::Commit => {}
        }
        let plan = filed.open::<KvPlan>().unwrap();
        for group in plan.groups.iter() {
            let own = group.first_token as usize..(group.first_token + group.num_tokens) as usize;
            let values: Vec<f32> = ids[own].iter().map(|&t| t as f32).collect();
            self.cache.write(&step, filed, group.label, &values);
        }
        for (slot, own) in &spans {
            let Some(r) = self.live.get_mut(slot) else { continue };
            let known = (r.tokens.len() - r.len).min(own.len());
            r.tokens.extend(&own[known..]);
            r.len += own.len();
            for len in r.len - own.len()..=r.len {
                self.computed.insert(r.tokens[..len].to_vec());
            }
        }
        for (row, &rid) in step.request.iter().enumerate() {
            let Some(r) = self.live.get(&rid.slot).filter(|r| r.generation == rid.generation)
            else {
                continue;
            };
            let read: Vec<u32> =
                self.cache.history(plan, row).into_iter().map(|v| v as u32).collect();
            assert_eq!(read, r.tokens[..r.len], "what {rid} reads under {:?}", step.label[row]);
        }
        self.cache.commit(&step).unwrap();
    }

    /// Pages that a step takes; what a stream holds follows from its length.
    fn need(&self, step: &Step) -> u64 {
        let of = |row: usize| {
            let (rid, span) = (step.request[row], step.span[row]);
            let len = self.live[&rid.slot].len as u32;
            let held = self.held(rid.slot, step.label[row]).max(len.div_ceil(self.size));
            u64::from((len + span).div_ceil(self.size).saturating_sub(held))
        };
        (0..step.span.len()).map(of).sum()
    }

    fn inspect(&self) -> Value {
        serde_json::from_str(&self.cache.resource.inspect()).unwrap()
    }

    /// A reset may leave pages with a stream.
    fn held(&self, slot: u32, label: LabelId) -> u32 {
        let name = self.rid(slot).to_string();
        let label = LABELS[self.labels.iter().position(|own| *own == label).unwrap()];
        let state = self.inspect();
        let streams = state["streams"].as_array().unwrap();
        let own = streams.iter().find(|s| s["request"] == name.as_str() && s["label"] == label);
        own.map_or(0, |s| s["pages"].as_u64().unwrap() as u32)
    }

    fn rewind(&mut self, slot: u32, len: u32) {
        let rid = self.rid(slot);
        let Some(r) = self.live.get_mut(&slot) else { return };
        // Before what was said of the prompt only a reset goes.
        if (len as usize) < r.len && r.found == 0 {
            let before = r.len;
            for (nth, &label) in r.labels.iter().enumerate() {
                match self.cache.kv.correct_len(rid, self.labels[label], len) {
                    Ok(()) => r.len = len as usize,
                    Err(e) if r.away => assert!(e.message().contains("off the device"), "{e}"),
                    Err(e) => {
                        assert!(e.message().contains("no page is free"), "{e}");
                        // Its streams are not alike any more.
                        if nth > 0 && before != r.len {
                            self.cache.resource.remove_request(rid).unwrap();
                            self.live.remove(&slot);
                        }
                        return;
                    }
                }
            }
        }
    }

    fn check(&self) {
        self.cache.conserved();
        for (&slot, r) in &self.live {
            for &label in r.labels {
                let len = self.cache.kv.stream_len(self.rid(slot), self.labels[label]).unwrap();
                assert_eq!(len as usize, r.len, "{slot} under {}", LABELS[label]);
            }
        }
        let state = self.inspect();
        let pages = |name: &str| state["pages"][name].as_u64().unwrap();
        assert_eq!(self.cache.kv.free_pages(), pages("free") + pages("cached"));
        assert!(pages("peak") <= u64::from(PAGES));
        assert!(pages("cached") <= state["prefix"]["pages"].as_u64().unwrap());
    }
}

fn play(size: u32, tiers: &str, ops: &[Op]) {
    let mut run = Run::new(size, tiers);
    ops.iter().for_each(|op| run.apply(op));
    // Everything that was taken can be given back.
    (0..4).for_each(|slot| run.apply(&Op::Remove(slot)));
    assert_eq!(run.cache.kv.free_pages(), u64::from(PAGES));
    let state = run.inspect();
    let tiers = state["tiers"].as_array().unwrap();
    assert!(tiers.iter().all(|tier| tier["held"] == 0), "{tiers:?}");
    assert_eq!((&state["away"], &state["tier_failures"]), (&0.into(), &0.into()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn whatever_is_shared_holds_the_tokens_of_those_who_share_it(
        ops in proptest::collection::vec(op(), 1..80)
    ) {
        for size in SIZES {
            play(size, "", &ops);
        }
    }

    #[test]
    fn whatever_comes_back_from_host_memory_holds_what_it_held(
        host in 1..40u32,
        ops in proptest::collection::vec(op(), 1..80)
    ) {
        for size in SIZES {
            play(size, &format!(r#", "host_pages": {host}"#), &ops);
        }
    }

    #[test]
    fn whatever_comes_back_from_a_file_holds_what_it_held(
        host in 0..6u32,
        disk in 1..20u32,
        ops in proptest::collection::vec(op(), 1..80)
    ) {
        for size in SIZES {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("pages");
            let bytes = 512 + disk * (512 + size * LAYERS * 2 * ROW as u32 * 4);
            let disk = format!(r#""disk_file": {file:?}, "disk_size": "{bytes}B""#);
            play(size, &format!(r#", "host_pages": {host}, {disk}"#), &ops);
        }
    }
}
